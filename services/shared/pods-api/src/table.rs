//! The fields of a Pod in protobuf, read from `fields/pod.txt`.

use std::collections::HashMap;
use std::sync::LazyLock;

const TEXT: &str = include_str!("../fields/pod.txt");

/// The messages that a Pod consists of.
pub(crate) static MESSAGES: LazyLock<Messages> =
    LazyLock::new(|| parse(TEXT).expect("a test parses the table of this crate"));

/// The messages by name.
#[derive(Debug, Default)]
pub(crate) struct Messages(HashMap<&'static str, Vec<Field>>);

impl Messages {
    /// Returns the fields of a message by ascending number, as they are encoded. A message that the table
    /// lacks has none.
    pub(crate) fn fields(&self, message: &str) -> &[Field] {
        self.0.get(message).map_or(&[], Vec::as_slice)
    }

    #[cfg(test)]
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.0.keys().copied()
    }
}

/// A field of a message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Field {
    /// The name in JSON; that of the message for [`Shape::Inline`].
    pub(crate) name: &'static str,
    pub(crate) number: u32,
    pub(crate) shape: Shape,
    pub(crate) kind: Kind,
}

/// How often a field occurs, and where its JSON is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    One,
    List,
    /// A map with strings as keys.
    Map,
    /// One message, whose fields are in the surrounding JSON object.
    Inline,
}

/// The type of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Text,
    Flag,
    Integer,
    /// `metav1.Time`: seconds and nanoseconds.
    Time,
    /// `resource.Quantity`: a message with a string.
    Quantity,
    /// `intstr.IntOrString`.
    IntOrString,
    /// `metav1.FieldsV1`: a message with JSON.
    Json,
    Message(&'static str),
}

impl Kind {
    fn parse(name: &'static str) -> Self {
        match name {
            "string" => Self::Text,
            "bool" => Self::Flag,
            "int" => Self::Integer,
            "time" => Self::Time,
            "quantity" => Self::Quantity,
            "int-or-string" => Self::IntOrString,
            "raw" => Self::Json,
            message => Self::Message(message),
        }
    }
}

/// Returns none if a line of the table is malformed, or a message is not defined.
fn parse(text: &'static str) -> Option<Messages> {
    let mut messages = Messages::default();
    let mut current = None;
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some(field) = line.strip_prefix("  ") else {
            messages.0.insert(line, Vec::new());
            current = Some(line);
            continue;
        };
        let mut words = field.split(' ');
        let name = words.next()?;
        let number = words.next()?.parse().ok()?;
        let first = words.next()?;
        let shape = match first {
            "list" => Shape::List,
            "map" => Shape::Map,
            "inline" => Shape::Inline,
            _ => Shape::One,
        };
        let kind = Kind::parse(if shape == Shape::One { first } else { words.next()? });
        let fields = messages.0.get_mut(current?)?;
        let is_ascending = fields.last().is_none_or(|last: &Field| last.number < number);
        (is_ascending && words.next().is_none()).then(|| fields.push(Field { name, number, shape, kind }))?;
    }
    let is_defined = |field: &Field| match field.kind {
        Kind::Message(message) => messages.0.contains_key(message),
        Kind::Text
        | Kind::Flag
        | Kind::Integer
        | Kind::Time
        | Kind::Quantity
        | Kind::IntOrString
        | Kind::Json => field.shape != Shape::Inline,
    };
    messages.0.values().flatten().all(is_defined).then_some(messages)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use k8s_openapi::api::core::v1::PodStatus;
    use quintlet_testkit::fields;

    use super::*;

    /// Adds the fields of a message as they occur in JSON.
    fn flatten(owner: &str, message: &str, all: &mut BTreeMap<String, Kind>) {
        for field in MESSAGES.fields(message) {
            match (field.shape, field.kind) {
                (Shape::Inline, Kind::Message(inner)) => flatten(owner, inner, all),
                (_, kind) => {
                    all.insert(format!("{owner}.{}", field.name), kind);
                }
            }
        }
    }

    #[test]
    fn every_field_of_the_api_types_has_a_number_and_its_type() {
        let mut encoded = BTreeMap::new();
        // Messages whose fields are those of another type in JSON.
        let inline = ["VolumeSource", "ProbeHandler", "EphemeralContainerCommon"];
        for name in MESSAGES.names().filter(|name| !inline.contains(name)) {
            flatten(name, name, &mut encoded);
        }
        let mut in_api = BTreeSet::new();
        let of_pod = fields::of_pod().into_iter().chain(fields::of::<PodStatus>("status"));
        for field in of_pod.filter(|field| field.owner.contains('.')) {
            let kind = encoded.get(&field.owner);
            in_api.insert(field.owner.clone());
            let expected = match field.kind {
                fields::Kind::Bool => Kind::Flag,
                fields::Kind::I32 | fields::Kind::I64 => Kind::Integer,
                fields::Kind::String => Kind::Text,
                fields::Kind::Quantity => Kind::Quantity,
                fields::Kind::IntOrString => Kind::IntOrString,
                fields::Kind::Time => Kind::Time,
                fields::Kind::Json => Kind::Json,
                fields::Kind::Struct(name) => Kind::Message(name),
                // Their items follow.
                fields::Kind::List | fields::Kind::Map => {
                    assert!(kind.is_some(), "{} has no number", field.path);
                    continue;
                }
            };
            assert_eq!(kind, Some(&expected), "{}", field.path);
        }
        let is_known = |name: &String| name.starts_with("Pod.") || in_api.contains(name);
        let unknown: Vec<_> = encoded.keys().filter(|name| !is_known(name)).collect();
        assert_eq!(unknown, Vec::<&String>::new(), "the API types do not have these fields");
    }

    #[test]
    fn a_malformed_table_is_not_read() {
        for (text, is_read) in [
            ("A\n  b 1 string\n  c 2 list A", true),
            ("# A comment.\nA\n  b 1 inline A", true),
            ("  b 1 string", false),
            ("A\n  b one string", false),
            ("A\n  b 1", false),
            ("A\n  b 1 list", false),
            ("A\n  b 1 string string", false),
            ("A\n  b 2 string\n  c 1 string", false),
            ("A\n  b 1 B", false),
            ("A\n  b 1 inline string", false),
        ] {
            assert_eq!(parse(text).is_some(), is_read, "{text:?}");
        }
    }
}
