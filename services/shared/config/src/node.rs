//! Values of a configuration with their origins.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// The origin of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The default of the field.
    Default,
    /// The default of the field, which depends on another field.
    Follows(&'static str),
    /// A file and the line in it, counted from 1.
    File(Arc<Path>, usize),
    /// A flag, with its dashes.
    Flag(Arc<str>),
}

impl Origin {
    /// Returns whether a file or a flag set the value.
    #[must_use]
    pub fn is_set(&self) -> bool {
        matches!(self, Self::File(..) | Self::Flag(_))
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Follows(field) => write!(f, "default, follows {field}"),
            Self::File(file, line) => write!(f, "{}:{line}", file.display()),
            Self::Flag(flag) => write!(f, "flag {flag}"),
        }
    }
}

/// A value and its origin.
#[derive(Debug, Clone, PartialEq)]
pub struct LocatedValue {
    /// The value.
    pub data: Data,
    /// Origin of the value; for a map or a list, of its beginning.
    pub origin: Origin,
}

/// The data model that YAML and JSON share.
#[derive(Debug, Clone, PartialEq)]
pub enum Data {
    /// `null`, or no value.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// Any other number.
    Float(f64),
    /// A string, quoted or not.
    Text(String),
    /// A sequence of values.
    List(Vec<LocatedValue>),
    /// A map with unique text keys.
    Map(Vec<MapEntry>),
}

/// A key of a map with its value.
#[derive(Debug, Clone, PartialEq)]
pub struct MapEntry {
    /// The name of the field, or a key of a map.
    pub key: String,
    /// Origin of the key.
    pub origin: Origin,
    /// The value of the key.
    pub value: LocatedValue,
}

impl LocatedValue {
    /// Returns a value with the origin [`Origin::Default`].
    #[must_use]
    pub fn default_of(data: Data) -> Self {
        Self { data, origin: Origin::Default }
    }

    /// Returns an empty map with the origin [`Origin::Default`].
    #[must_use]
    pub fn empty() -> Self {
        Self::default_of(Data::Map(Vec::new()))
    }

    /// Returns the text of a text value.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match &self.data {
            Data::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the entries of a map; none for other values.
    #[must_use]
    pub fn entries(&self) -> &[MapEntry] {
        match &self.data {
            Data::Map(entries) => entries,
            _ => &[],
        }
    }

    /// Returns the elements of a list; none for other values.
    #[must_use]
    pub fn elements(&self) -> &[LocatedValue] {
        match &self.data {
            Data::List(elements) => elements,
            _ => &[],
        }
    }

    /// Returns the value at a path of keys such as `a.b.c`. A null counts as absent.
    #[must_use]
    pub fn at(&self, path: &str) -> Option<&LocatedValue> {
        path.split('.').try_fold(self, |node, key| node.get(key)).filter(|n| n.data != Data::Null)
    }

    /// Returns the value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&LocatedValue> {
        self.entries().iter().find(|e| e.key == key).map(|e| &e.value)
    }

    /// Sets the value at a path of keys. Other values on the path are replaced by maps.
    pub fn put(&mut self, path: &str, value: LocatedValue) {
        let (key, rest) = path.split_once('.').map_or((path, None), |(key, rest)| (key, Some(rest)));
        if !matches!(self.data, Data::Map(_)) {
            self.data = Data::Map(Vec::new());
        }
        let origin = value.origin.clone();
        let Data::Map(entries) = &mut self.data else { return };
        let at = entries.iter().position(|e| e.key == key).unwrap_or_else(|| {
            let value = LocatedValue { data: Data::Null, origin: origin.clone() };
            entries.push(MapEntry { key: key.to_owned(), origin, value });
            entries.len().saturating_sub(1)
        });
        match rest {
            Some(rest) => entries[at].value.put(rest, value),
            None => entries[at].value = value,
        }
    }

    /// Applies a JSON merge patch (RFC 7386): maps are merged, null removes a key, and any other value
    /// replaces the existing one.
    pub fn merge(&mut self, patch: LocatedValue) {
        let Data::Map(changes) = patch.data else {
            *self = patch;
            return;
        };
        if !matches!(self.data, Data::Map(_)) {
            *self = LocatedValue { data: Data::Map(Vec::new()), origin: patch.origin };
        }
        let Data::Map(entries) = &mut self.data else { return };
        for change in changes {
            let at = entries.iter().position(|e| e.key == change.key);
            match (at, change.value.data == Data::Null) {
                (Some(at), true) => drop(entries.remove(at)),
                (None, true) => {}
                (Some(at), false) => entries[at].value.merge(change.value),
                (None, false) => {
                    let mut value = LocatedValue { data: Data::Null, origin: change.value.origin.clone() };
                    value.merge(change.value);
                    entries.push(MapEntry { key: change.key, origin: change.origin, value });
                }
            }
        }
    }

    /// Returns whether two values are equal, ignoring their origins and the order of keys.
    #[must_use]
    pub fn equals(&self, other: &LocatedValue) -> bool {
        match (&self.data, &other.data) {
            (Data::List(a), Data::List(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.equals(b)),
            (Data::Map(a), Data::Map(b)) => {
                a.len() == b.len() && a.iter().all(|e| other.get(&e.key).is_some_and(|o| o.equals(&e.value)))
            }
            (a, b) => a == b,
        }
    }
}

/// Formats a value for a message: text in quotes, lists and maps by their type.
impl fmt::Display for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Int(value) => write!(f, "{value}"),
            Self::Float(value) => write!(f, "{value}"),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::List(_) => f.write_str("a list"),
            Self::Map(_) => f.write_str("a map"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yaml(text: &str) -> LocatedValue {
        crate::yaml::value(text)
    }

    #[test]
    fn a_merge_patch_merges_maps_replaces_the_rest_and_removes_by_null() {
        for (base, patch, want) in [
            ("{a: 1}", "{b: 2}", "{a: 1, b: 2}"),
            ("{a: {x: 1, y: 2}}", "{a: {y: 3}}", "{a: {x: 1, y: 3}}"),
            ("{a: [1, 2]}", "{a: [3]}", "{a: [3]}"),
            ("{a: 1, b: 2}", "{a: null}", "{b: 2}"),
            ("{a: 1}", "{a: {x: 1}}", "{a: {x: 1}}"),
            ("{a: {x: 1}}", "{a: 1}", "{a: 1}"),
            ("{}", "{a: {x: null, y: 1}}", "{a: {y: 1}}"),
        ] {
            let mut merged = yaml(base);
            merged.merge(yaml(patch));
            assert!(merged.equals(&yaml(want)), "{base} + {patch}: {merged:?}");
        }
    }

    #[test]
    fn a_value_set_at_a_path_is_found_there_and_its_siblings_stay() {
        let mut node = yaml("{a: {x: 1}, b: 2}");
        node.put("a.y.z", LocatedValue::default_of(Data::Int(3)));
        node.put("b.c", LocatedValue::default_of(Data::Int(4)));
        assert!(node.equals(&yaml("{a: {x: 1, y: {z: 3}}, b: {c: 4}}")), "{node:?}");
        assert_eq!(node.at("a.y.z").map(|n| &n.data), Some(&Data::Int(3)));
        assert_eq!(node.at("a.none.z"), None);
    }
}
