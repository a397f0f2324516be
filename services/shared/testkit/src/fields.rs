//! The fields of an API type, found by deserializing it: what the product decodes is what is listed.
//!
//! The types of `k8s-openapi` name their fields to the deserializer. [`fields`] is a deserializer that offers each of them in
//! turn, so that a release with a new field lists it without any change here.

use std::cell::RefCell;
use std::fmt;

use serde::de::value::StrDeserializer;
use serde::de::{self, DeserializeOwned, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

/// What a field holds. A list or a map of it has the same kind; [`Field::path`] tells them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `true` or `false`.
    Bool,
    /// A whole number of 32 bits.
    Int32,
    /// A whole number of 64 bits.
    Int64,
    /// Text; enumerations too.
    Text,
    /// `IntOrString`.
    IntOrString,
    /// A newtype around text: `Quantity`, `Time`, `ByteString` …
    Newtype(&'static str),
    /// A struct of this name; its fields follow.
    Struct(&'static str),
}

/// A field of a struct.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    /// Name of the struct, as in `Container`.
    pub owner: &'static str,
    /// Name in JSON, as in `imagePullPolicy`.
    pub name: &'static str,
    /// Where it stands: `spec.containers[].resources.limits.*`, with `[]` for each element and `*` for each key.
    pub path: String,
    /// What it holds.
    pub kind: Kind,
}

impl Field {
    /// Name within its struct, as in `Container.imagePullPolicy`.
    #[must_use]
    pub fn of_type(&self) -> String {
        format!("{}.{}", self.owner, self.name)
    }
}

/// Returns every field of `T` and of the structs in it, in the order of the types. Paths begin with `root`. The fields below
/// a field are listed only where `descend` says so.
///
/// # Panics
/// `T` has a form that no API type has: a tuple, a Rust enum, a type that contains itself without end.
pub fn fields<T: DeserializeOwned>(root: &str, descend: impl Fn(&Field) -> bool) -> Vec<Field> {
    let walk = Walk { found: RefCell::default(), descend: &descend };
    let at = At { walk: &walk, path: root.to_owned(), field: None };
    T::deserialize(at).expect("an API type takes any value of the right form");
    walk.found.into_inner()
}

/// Nesting of an API type that does not contain itself is far less.
const DEPTH: usize = 64;

struct Walk<'a> {
    found: RefCell<Vec<Field>>,
    descend: &'a dyn Fn(&Field) -> bool,
}

// One place in the type; `field` is the entry in `found` that it is the value of.
struct At<'a> {
    walk: &'a Walk<'a>,
    path: String,
    field: Option<usize>,
}

#[derive(Debug)]
struct NoSuchForm(String);

impl fmt::Display for NoSuchForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NoSuchForm {}

impl de::Error for NoSuchForm {
    fn custom<T: fmt::Display>(text: T) -> Self {
        Self(text.to_string())
    }
}

impl At<'_> {
    fn is(&self, kind: Kind) {
        let Some(field) = self.field else { return };
        let mut found = self.walk.found.borrow_mut();
        let known = &mut found[field].kind;
        // A newtype says more than the text in it.
        if !matches!(known, Kind::Newtype(_)) {
            *known = kind;
        }
    }

    fn is_newtype(&self) -> Option<&'static str> {
        match self.walk.found.borrow()[self.field?].kind {
            Kind::Newtype(name) => Some(name),
            _ => None,
        }
    }
}

macro_rules! refuse {
    ($($method:ident($($arg:ident: $type:ty),*))*) => {
        $(fn $method<V: Visitor<'de>>(self, $($arg: $type,)* _: V) -> Result<V::Value, Self::Error> {
            Err(de::Error::custom(format!("{}: {} is no form of an API type", self.path, stringify!($method))))
        })*
    };
}

impl<'de> Deserializer<'de> for At<'_> {
    type Error = NoSuchForm;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, NoSuchForm> {
        self.is(Kind::Struct(name));
        if self.path.matches('.').count() > DEPTH {
            return Err(NoSuchForm(format!("{}: {name} contains itself", self.path)));
        }
        let wanted = self.field.is_none_or(|i| (self.walk.descend)(&self.walk.found.borrow()[i].clone()));
        let fields = if wanted { fields } else { &[] };
        visitor.visit_map(Fields { of: self, name, left: fields.iter(), next: None })
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NoSuchForm> {
        visitor.visit_some(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NoSuchForm> {
        let path = format!("{}[]", self.path);
        visitor.visit_seq(One { of: Some(At { path, ..self }), key: false })
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NoSuchForm> {
        let path = format!("{}.*", self.path);
        visitor.visit_map(One { of: Some(At { path, ..self }), key: true })
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, NoSuchForm> {
        self.is(Kind::Newtype(name));
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NoSuchForm> {
        self.is(Kind::IntOrString);
        visitor.visit_str("")
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NoSuchForm> {
        self.is(Kind::Bool);
        visitor.visit_bool(false)
    }

    fn deserialize_i32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NoSuchForm> {
        self.is(Kind::Int32);
        visitor.visit_i32(0)
    }

    fn deserialize_i64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NoSuchForm> {
        self.is(Kind::Int64);
        visitor.visit_i64(0)
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NoSuchForm> {
        self.is(Kind::Text);
        match self.is_newtype() {
            Some("Time" | "MicroTime") => visitor.visit_str("1970-01-01T00:00:00Z"),
            _ => visitor.visit_str(""),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NoSuchForm> {
        self.deserialize_str(visitor)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NoSuchForm> {
        visitor.visit_unit()
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, NoSuchForm> {
        visitor.visit_unit()
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        _: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, NoSuchForm> {
        Err(NoSuchForm(format!("{}: {name} is a Rust enum", self.path)))
    }

    refuse! {
        deserialize_i8() deserialize_i16() deserialize_u8() deserialize_u16() deserialize_u32() deserialize_u64()
        deserialize_f32() deserialize_f64() deserialize_char() deserialize_bytes() deserialize_byte_buf()
        deserialize_unit() deserialize_identifier() deserialize_tuple(_n: usize)
        deserialize_tuple_struct(_name: &'static str, _n: usize)
    }
}

struct Fields<'a> {
    of: At<'a>,
    name: &'static str,
    left: std::slice::Iter<'static, &'static str>,
    next: Option<&'static str>,
}

impl<'de> MapAccess<'de> for Fields<'_> {
    type Error = NoSuchForm;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, NoSuchForm> {
        self.next = self.left.next().copied();
        self.next.map(|name| seed.deserialize(StrDeserializer::new(name))).transpose()
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, NoSuchForm> {
        let name = self.next.take().ok_or_else(|| NoSuchForm("a value without a key".to_owned()))?;
        let path = format!("{}.{name}", self.of.path);
        let mut found = self.of.walk.found.borrow_mut();
        let field = found.len();
        found.push(Field { owner: self.name, name, path: path.clone(), kind: Kind::Text });
        drop(found);
        seed.deserialize(At { walk: self.of.walk, path, field: Some(field) })
    }
}

// A list of one element, or a map of one key.
struct One<'a> {
    of: Option<At<'a>>,
    key: bool,
}

impl<'de> SeqAccess<'de> for One<'_> {
    type Error = NoSuchForm;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, NoSuchForm> {
        self.of.take().map(|of| seed.deserialize(of)).transpose()
    }
}

impl<'de> MapAccess<'de> for One<'_> {
    type Error = NoSuchForm;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, NoSuchForm> {
        let first = std::mem::replace(&mut self.key, false);
        first.then(|| seed.deserialize(StrDeserializer::new("*"))).transpose()
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, NoSuchForm> {
        let of = self.of.take().ok_or_else(|| NoSuchForm("a value without a key".to_owned()))?;
        seed.deserialize(of)
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::PodSpec;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

    use super::*;

    #[test]
    fn every_form_of_a_pods_fields_is_found_with_its_path() {
        let all = fields::<PodSpec>("spec", |_| true);
        for (path, owner, kind) in [
            ("spec.activeDeadlineSeconds", "PodSpec", Kind::Int64),
            ("spec.hostNetwork", "PodSpec", Kind::Bool),
            ("spec.containers", "PodSpec", Kind::Struct("Container")),
            ("spec.containers[].image", "Container", Kind::Text),
            ("spec.containers[].command", "Container", Kind::Text),
            ("spec.initContainers[].livenessProbe.httpGet.port", "HTTPGetAction", Kind::IntOrString),
            ("spec.ephemeralContainers[].targetContainerName", "EphemeralContainer", Kind::Text),
            ("spec.containers[].resources.limits", "ResourceRequirements", Kind::Newtype("Quantity")),
            ("spec.priority", "PodSpec", Kind::Int32),
            ("spec.nodeSelector", "PodSpec", Kind::Text),
            ("spec.volumes[].projected.sources[].configMap.items[].mode", "KeyToPath", Kind::Int32),
            (
                "spec.volumes[].ephemeral.volumeClaimTemplate.metadata.creationTimestamp",
                "ObjectMeta",
                Kind::Newtype("Time"),
            ),
        ] {
            let found = all.iter().find(|f| f.path == path).unwrap_or_else(|| panic!("{path} is not listed"));
            assert_eq!((found.owner, found.kind), (owner, kind), "{path}");
        }
        let mut paths: Vec<&str> = all.iter().map(|f| f.path.as_str()).collect();
        let count = paths.len();
        paths.sort_unstable();
        paths.dedup();
        assert_eq!(paths.len(), count, "each path is listed once");
        assert!(count > 1000, "{count}");
        assert!(fields::<ObjectMeta>("metadata", |_| true).iter().any(|f| f.path == "metadata.annotations"));
    }

    #[test]
    fn what_is_not_descended_into_is_listed_without_its_fields() {
        let flat = fields::<PodSpec>("spec", |f| f.name != "affinity");
        assert!(flat.iter().any(|f| f.path == "spec.affinity"));
        assert!(!flat.iter().any(|f| f.path.starts_with("spec.affinity.")));
        assert!(flat.iter().any(|f| f.path == "spec.containers[].name"));
    }
}
