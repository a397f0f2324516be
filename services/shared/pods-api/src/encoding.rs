//! Writes the JSON of a Pod as protobuf.

use k8s_openapi::api::core::v1::Pod;
use prost::encoding::{WireType, encode_key, encode_varint};
use serde_json::{Map, Value};

use crate::table::{Field, Kind, MESSAGES, Shape};

/// A value does not have the type of its field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} has a value of another type")]
pub struct Unencodable {
    /// The field, below the message that has it.
    field: &'static str,
}

/// Returns a Pod as the Kubernetes API encodes it in protobuf (`v1.Pod.Marshal`). A field that is not set is
/// omitted, also where the API server writes the default of the type; a reader gets the same object.
///
/// # Errors
/// A value does not have the type of its field, such as a time that is none.
pub fn encode(pod: &Pod) -> Result<Vec<u8>, Unencodable> {
    let json = serde_json::to_value(pod).map_err(|_| Unencodable { field: "Pod" })?;
    let mut out = Vec::new();
    if let Value::Object(pod) = &json {
        message(&mut out, "Pod", pod)?;
    }
    Ok(out)
}

fn message(out: &mut Vec<u8>, name: &str, object: &Map<String, Value>) -> Result<(), Unencodable> {
    for field in MESSAGES.fields(name) {
        if field.shape == Shape::Inline {
            let Kind::Message(inner) = field.kind else { continue };
            let mut content = Vec::new();
            message(&mut content, inner, object)?;
            delimited(out, field.number, &content);
            continue;
        }
        let Some(json) = object.get(field.name).filter(|json| !json.is_null()) else { continue };
        let unencodable = Unencodable { field: field.name };
        match field.shape {
            Shape::One | Shape::Inline => value(out, field, field.number, json)?,
            Shape::List => {
                for item in json.as_array().ok_or(unencodable)? {
                    value(out, field, field.number, item)?;
                }
            }
            Shape::Map => {
                for (key, item) in json.as_object().ok_or(unencodable)? {
                    let mut pair = Vec::new();
                    delimited(&mut pair, 1, key.as_bytes());
                    value(&mut pair, field, 2, item)?;
                    delimited(out, field.number, &pair);
                }
            }
        }
    }
    Ok(())
}

/// Writes a value with its key.
fn value(out: &mut Vec<u8>, field: &Field, number: u32, json: &Value) -> Result<(), Unencodable> {
    let unencodable = Unencodable { field: field.name };
    match field.kind {
        Kind::Text => delimited(out, number, json.as_str().ok_or(unencodable)?.as_bytes()),
        Kind::Flag => integer(out, number, json.as_bool().ok_or(unencodable)?.into()),
        Kind::Integer => integer(out, number, json.as_i64().ok_or(unencodable)?),
        Kind::Time => {
            let time: jiff::Timestamp =
                json.as_str().and_then(|text| text.parse().ok()).ok_or(unencodable)?;
            let mut content = Vec::new();
            integer(&mut content, 1, time.as_second());
            integer(&mut content, 2, time.subsec_nanosecond().into());
            delimited(out, number, &content);
        }
        Kind::Quantity => {
            let mut content = Vec::new();
            delimited(&mut content, 1, json.as_str().ok_or(unencodable)?.as_bytes());
            delimited(out, number, &content);
        }
        Kind::IntOrString => {
            let mut content = Vec::new();
            match (json.as_i64(), json.as_str()) {
                (Some(number), _) => {
                    integer(&mut content, 1, 0);
                    integer(&mut content, 2, number);
                }
                (None, Some(text)) => {
                    integer(&mut content, 1, 1);
                    delimited(&mut content, 3, text.as_bytes());
                }
                (None, None) => return Err(unencodable),
            }
            delimited(out, number, &content);
        }
        Kind::Json => {
            let mut content = Vec::new();
            delimited(&mut content, 1, json.to_string().as_bytes());
            delimited(out, number, &content);
        }
        Kind::Message(name) => {
            let mut content = Vec::new();
            message(&mut content, name, json.as_object().ok_or(unencodable)?)?;
            delimited(out, number, &content);
        }
    }
    Ok(())
}

fn integer(out: &mut Vec<u8>, number: u32, value: i64) {
    encode_key(number, WireType::Varint, out);
    encode_varint(value.cast_unsigned(), out);
}

fn delimited(out: &mut Vec<u8>, number: u32, content: &[u8]) {
    encode_key(number, WireType::LengthDelimited, out);
    encode_varint(content.len() as u64, out);
    out.extend_from_slice(content);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn encoded(pod: Value) -> Vec<u8> {
        encode(&serde_json::from_value(pod).expect("a pod")).expect("it has protobuf")
    }

    #[test]
    fn each_type_has_its_bytes() {
        for (pod, bytes) in [
            (json!({"metadata": {}}), &b"\x0a\x00"[..]),
            (
                json!({"metadata": {"name": "p", "generation": -1}}),
                b"\x0a\x0e\x0a\x01p\x38\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            ),
            (
                json!({"metadata": {"labels": {"b": "2", "a": "1"}}}),
                b"\x0a\x10\x5a\x06\x0a\x01a\x12\x011\x5a\x06\x0a\x01b\x12\x012",
            ),
            (
                json!({"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}}),
                b"\x0a\x0a\x42\x08\x08\x80\xf2\xd6\xca\x06\x10\x00",
            ),
            (
                json!({"metadata": {}, "spec": {"containers": [], "overhead": {"cpu": "1"}}}),
                b"\x0a\x00\x12\x0d\x82\x02\x0a\x0a\x03cpu\x12\x03\x0a\x011",
            ),
            (
                json!({"metadata": {}, "spec": {"containers": [], "hostNetwork": true}}),
                b"\x0a\x00\x12\x02\x58\x01",
            ),
        ] {
            assert_eq!(encoded(pod.clone()), bytes, "{pod}");
        }
    }

    #[test]
    fn the_fields_of_an_inline_message_are_those_of_the_object_around_it() {
        // Volume: name = 1, volumeSource = 2, which has emptyDir = 2.
        let pod =
            json!({"metadata": {}, "spec": {"containers": [], "volumes": [{"name": "v", "emptyDir": {}}]}});
        assert_eq!(encoded(pod), b"\x0a\x00\x12\x09\x0a\x07\x0a\x01v\x12\x02\x12\x00");
        // Container: name = 1, livenessProbe = 10. Probe: handler = 1, which has tcpSocket = 3, whose port =
        // 1 is a number or a name.
        for (port, bytes) in [
            (
                json!(80),
                &b"\x0a\x00\x12\x10\x12\x0e\x0a\x00\x52\x0a\x0a\x08\x1a\x06\x0a\x04\x08\x00\x10\x50"[..],
            ),
            (
                json!("http"),
                b"\x0a\x00\x12\x14\x12\x12\x0a\x00\x52\x0e\x0a\x0c\x1a\x0a\x0a\x08\x08\x01\x1a\x04http",
            ),
        ] {
            let probe = json!({"tcpSocket": {"port": port}});
            let pod = json!({"metadata": {}, "spec": {"containers": [{"name": "", "livenessProbe": probe}]}});
            assert_eq!(encoded(pod), bytes, "{probe}");
        }
    }

    #[test]
    fn a_value_of_another_type_is_an_error() {
        let json = json!({"metadata": {"name": 1}});
        let error =
            message(&mut Vec::new(), "Pod", json.as_object().expect("an object")).expect_err("a number");
        assert_eq!(error.to_string(), "name has a value of another type");
    }
}
