//! Lists the fields of an API type by deserializing it from a source that offers every field once.

use std::cell::RefCell;

use serde::Deserialize;
use serde::de::value::{Error, StrDeserializer};
use serde::de::{DeserializeSeed, Deserializer, IntoDeserializer as _, MapAccess, SeqAccess, Visitor};

/// Content of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A boolean.
    Bool,
    /// A signed integer of 32 bits.
    I32,
    /// A signed integer of 64 bits.
    I64,
    /// Text.
    String,
    /// `Quantity`.
    Quantity,
    /// `IntOrString`.
    IntOrString,
    /// `Time`.
    Time,
    /// JSON of any type.
    Json,
    /// A list; the path of its items ends in `[]`.
    List,
    /// A map with string keys; the path of its values ends in `{}`.
    Map,
    /// A struct of this name, followed by its fields.
    Struct(&'static str),
}

/// A field of a type, with its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    /// Path, such as `spec.containers[].ports[].hostPort`.
    pub path: String,
    /// Type and name, such as `ContainerPort.hostPort`. Items and values have that of their list or map.
    pub owner: String,
    /// Content of the field.
    pub kind: Kind,
}

impl Field {
    /// Returns true for the items of a list and the values of a map.
    #[must_use]
    pub fn is_item(&self) -> bool {
        self.path.ends_with([']', '}'])
    }
}

/// Returns the fields of `T` in the order of its definition, with `root` before each path.
///
/// # Panics
/// Panics if `T` is not a type of the Kubernetes API.
#[must_use]
pub fn of<'de, T: Deserialize<'de>>(root: &str) -> Vec<Field> {
    let found = RefCell::new(Vec::new());
    let source = Source { found: &found, path: root.to_owned(), owner: root.to_owned() };
    let traced = T::deserialize(source);
    assert!(traced.is_ok(), "the fields of {root} cannot be listed: {:?}", traced.err());
    found.into_inner()
}

/// Returns the fields of a pod that a user sets: its metadata and its spec.
#[must_use]
pub fn of_pod() -> Vec<Field> {
    use k8s_openapi::api::core::v1::PodSpec;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
    let mut all = of::<ObjectMeta>("metadata");
    all.extend(of::<PodSpec>("spec"));
    all
}

#[derive(Clone)]
struct Source<'a> {
    found: &'a RefCell<Vec<Field>>,
    path: String,
    owner: String,
}

impl Source<'_> {
    fn note(&self, kind: Kind) {
        let (path, owner) = (self.path.clone(), self.owner.clone());
        self.found.borrow_mut().push(Field { path, owner, kind });
    }

    fn within(&self, suffix: &str) -> Self {
        Self { path: format!("{}{suffix}", self.path), ..self.clone() }
    }
}

impl<'de> Deserializer<'de> for Source<'_> {
    type Error = Error;

    // Only `IntOrString` is deserialized by the type of its input.
    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.note(Kind::IntOrString);
        visitor.visit_i64(1)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.note(Kind::Bool);
        visitor.visit_bool(false)
    }

    fn deserialize_i32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.note(Kind::I32);
        visitor.visit_i32(1)
    }

    fn deserialize_i64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.note(Kind::I64);
        visitor.visit_i64(1)
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.note(Kind::String);
        visitor.visit_str("x")
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        let text = |text: &'static str| -> StrDeserializer<'static, Error> { text.into_deserializer() };
        match name {
            "Quantity" => {
                self.note(Kind::Quantity);
                visitor.visit_newtype_struct(text("1"))
            }
            "Time" => {
                self.note(Kind::Time);
                visitor.visit_newtype_struct(text("2026-01-01T00:00:00Z"))
            }
            "FieldsV1" => {
                self.note(Kind::Json);
                visitor.visit_newtype_struct(text("x"))
            }
            other => Err(serde::de::Error::custom(format!("{}: {other} is not known", self.path))),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        // The type itself is not a field.
        if self.owner != self.path {
            self.note(Kind::Struct(name));
        }
        visitor.visit_map(Fields { of: self, name, left: fields.iter(), current: "" })
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.note(Kind::List);
        visitor.visit_seq(Once(Some(self.within("[]"))))
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.note(Kind::Map);
        visitor.visit_map(Once(Some(self.within("{}"))))
    }

    serde::forward_to_deserialize_any! {
        i8 i16 u8 u16 u32 u64 f32 f64 char str bytes byte_buf unit unit_struct tuple tuple_struct enum identifier
        ignored_any
    }
}

struct Fields<'a> {
    of: Source<'a>,
    name: &'static str,
    left: std::slice::Iter<'static, &'static str>,
    current: &'static str,
}

impl<'de> MapAccess<'de> for Fields<'_> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Error> {
        let Some(field) = self.left.next() else { return Ok(None) };
        self.current = field;
        let key: StrDeserializer<'_, Error> = (*field).into_deserializer();
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        let mut source = self.of.within(&format!(".{}", self.current));
        source.owner = format!("{}.{}", self.name, self.current);
        seed.deserialize(source)
    }
}

/// A single item, or a single value under the key `key`.
struct Once<'a>(Option<Source<'a>>);

impl<'de> SeqAccess<'de> for Once<'_> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Error> {
        self.0.take().map(|source| seed.deserialize(source)).transpose()
    }
}

impl<'de> MapAccess<'de> for Once<'_> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Error> {
        if self.0.is_none() {
            return Ok(None);
        }
        let key: StrDeserializer<'_, Error> = "key".into_deserializer();
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        let source = self.0.take().ok_or_else(|| serde::de::Error::custom("a value without a key"))?;
        seed.deserialize(source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_field_is_listed_with_its_place_and_type() {
        let all = of_pod();
        let owner_and_kind = |path: &str| {
            let field = all.iter().find(|f| f.path == path).unwrap_or_else(|| panic!("{path} is not listed"));
            (field.owner.as_str(), field.kind)
        };
        for (path, owner, kind) in [
            ("metadata.creationTimestamp", "ObjectMeta.creationTimestamp", Kind::Time),
            ("metadata.managedFields[].fieldsV1", "ManagedFieldsEntry.fieldsV1", Kind::Json),
            ("metadata.labels", "ObjectMeta.labels", Kind::Map),
            ("metadata.labels{}", "ObjectMeta.labels", Kind::String),
            ("spec.containers", "PodSpec.containers", Kind::List),
            ("spec.containers[].ports[].hostPort", "ContainerPort.hostPort", Kind::I32),
            ("spec.initContainers[].resources.limits{}", "ResourceRequirements.limits", Kind::Quantity),
            ("spec.containers[].livenessProbe.httpGet.port", "HTTPGetAction.port", Kind::IntOrString),
            ("spec.terminationGracePeriodSeconds", "PodSpec.terminationGracePeriodSeconds", Kind::I64),
            ("spec.hostUsers", "PodSpec.hostUsers", Kind::Bool),
            ("spec.affinity", "PodSpec.affinity", Kind::Struct("Affinity")),
            ("spec.containers[]", "PodSpec.containers", Kind::Struct("Container")),
            ("spec.priority", "PodSpec.priority", Kind::I32),
            ("spec.volumes[].projected.sources[].configMap.items[].mode", "KeyToPath.mode", Kind::I32),
        ] {
            assert_eq!(owner_and_kind(path), (owner, kind), "{path}");
        }
        let mut paths: Vec<&str> = all.iter().map(|f| f.path.as_str()).collect();
        let count = paths.len();
        paths.sort_unstable();
        paths.dedup();
        assert_eq!(paths.len(), count, "each path is listed once");
        assert!(count > 1000, "{count}");
    }
}
