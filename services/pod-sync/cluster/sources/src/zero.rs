//! Decodes JSON values as Go does: `null` is the zero value of its type (`encoding/json: Unmarshal`).
//!
//! The bindings of the Kubernetes types take `null` for a field, and refuse it for an element of a list or a
//! value of a map.

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{Deserializer, IntoDeserializer, Visitor};
use serde_json::{Error, Value};

/// A value whose `null` becomes the zero value of what is decoded.
#[derive(Debug)]
pub(crate) struct ZeroForNull(pub Value);

impl IntoDeserializer<'_, Error> for ZeroForNull {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

macro_rules! scalars {
    ($($method:ident => $visit:ident($zero:expr),)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            match self.0 {
                Value::Null => visitor.$visit($zero),
                value => value.$method(visitor),
            }
        }
    )*};
}

impl<'de> Deserializer<'de> for ZeroForNull {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Array(items) => {
                visitor.visit_seq(SeqDeserializer::new(items.into_iter().map(ZeroForNull)))
            }
            Value::Object(fields) => {
                visitor.visit_map(MapDeserializer::new(fields.into_iter().map(|(k, v)| (k, ZeroForNull(v)))))
            }
            value => value.deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if self.0.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        // The zero of an `apimachinery/pkg/api/resource: Quantity` is a number, not an empty text.
        let is_quantity = self.0.is_null() && name == "Quantity";
        visitor.visit_newtype_struct(if is_quantity { Self("0".into()) } else { self })
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        Self(or(self.0, Value::Array(Vec::new()))).deserialize_any(visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        Self(or(self.0, Value::Object(serde_json::Map::new()))).deserialize_any(visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_map(visitor)
    }

    scalars! {
        deserialize_bool => visit_bool(false),
        deserialize_i8 => visit_i8(0),
        deserialize_i16 => visit_i16(0),
        deserialize_i32 => visit_i32(0),
        deserialize_i64 => visit_i64(0),
        deserialize_u8 => visit_u8(0),
        deserialize_u16 => visit_u16(0),
        deserialize_u32 => visit_u32(0),
        deserialize_u64 => visit_u64(0),
        deserialize_f32 => visit_f32(0.0),
        deserialize_f64 => visit_f64(0.0),
        deserialize_str => visit_str(""),
        deserialize_string => visit_str(""),
    }

    serde::forward_to_deserialize_any! {
        char bytes byte_buf unit unit_struct tuple tuple_struct enum identifier ignored_any
    }
}

fn or(value: Value, zero: Value) -> Value {
    if value.is_null() { zero } else { value }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[test]
    fn null_is_the_zero_value_wherever_it_stands() {
        for (field, value, want) in [
            ("/metadata/annotations", json!({"a": null, "b": "1"}), json!({"a": "", "b": "1"})),
            ("/metadata/labels", json!({"a": null}), json!({"a": ""})),
            ("/metadata/labels", json!(null), json!(null)),
            ("/metadata/finalizers", json!([null, "a"]), json!(["", "a"])),
            ("/spec/nodeSelector", json!({"a": null}), json!({"a": ""})),
            ("/spec/containers/0/args", json!([null, "a"]), json!(["", "a"])),
            (
                "/spec/containers/0/resources/limits",
                json!({"cpu": null, "memory": "1"}),
                json!({"cpu": "0", "memory": "1"}),
            ),
            ("/spec/containers/0/stdin", json!(null), json!(null)),
            ("/spec/containers/0/name", json!(null), json!("")),
            ("/spec/containers/0/ports", json!([null]), json!([{"containerPort": 0}])),
            (
                "/spec/volumes",
                json!([{"name": "v", "flexVolume": {"driver": "d", "options": {"o": null}}}]),
                json!([{"name": "v", "flexVolume": {"driver": "d", "options": {"o": ""}}}]),
            ),
            (
                "/spec/securityContext",
                json!({"supplementalGroups": [null]}),
                json!({"supplementalGroups": [0]}),
            ),
        ] {
            let (parent, key) = field.rsplit_once('/').unwrap();
            let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {},
                "spec": {"containers": [{"name": "c", "resources": {}}]}});
            pod.pointer_mut(parent).unwrap()[key] = value.clone();
            let pod = Pod::deserialize(ZeroForNull(pod)).unwrap_or_else(|e| panic!("{field}: {value}: {e}"));
            let got = serde_json::to_value(pod).unwrap();
            assert_eq!(got.pointer(field).unwrap_or(&Value::Null), &want, "{field}: {value}");
        }
        let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {}, "data": {"k": null}});
        let map = ConfigMap::deserialize(ZeroForNull(map)).unwrap();
        assert_eq!(map.data.unwrap()["k"], "");
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {}, "data": {"k": null}});
        let secret = Secret::deserialize(ZeroForNull(secret)).unwrap();
        assert_eq!(secret.data.unwrap()["k"].0, b"");
    }

    #[test]
    fn other_values_are_decoded_and_refused_as_before() {
        let pod = |spec: Value| {
            let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "creationTimestamp": null},
                "spec": spec});
            let before = serde_json::from_value::<Pod>(pod.clone()).map_err(|e| e.to_string());
            (Pod::deserialize(ZeroForNull(pod)).map_err(|e| e.to_string()), before)
        };
        for spec in [
            json!({"containers": [{"name": "a", "stdin": true, "ports": [{"containerPort": 80}],
                "livenessProbe": {"httpGet": {"port": "http"}, "periodSeconds": 3},
                "readinessProbe": {"httpGet": {"port": 80}}, "resources": {"limits": {"cpu": "1"}}}]}),
            json!({"containers": [], "terminationGracePeriodSeconds": 5, "unknown": [{"x": null}]}),
            json!({"containers": [{"name": 3}]}),
            json!({"containers": "none"}),
            json!({"hostNetwork": "yes", "containers": []}),
        ] {
            let (got, before) = pod(spec.clone());
            assert_eq!(got.is_ok(), before.is_ok(), "{spec}");
            assert_eq!(got.ok(), before.ok(), "{spec}");
        }
    }
}
