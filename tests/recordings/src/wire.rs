//! Decodes a protobuf message to JSON and encodes it again, by a table of its fields.
//!
//! Bindings would drop fields that are newer than they are. A field that is not in the table is shown with
//! its number. Default values are omitted, as on the wire. A message field that occurs several times is
//! merged, as by every decoder.

use std::collections::BTreeMap;

use prost::encoding::{WireType, encode_varint};
use serde_json::{Map, Value, json};

/// A field of a message.
#[derive(Debug)]
pub(crate) struct Field {
    /// Number of the field on the wire.
    pub number: u64,
    /// Name in the contract.
    pub name: &'static str,
    /// Type of the field.
    pub kind: Kind,
    /// Whether the field is repeated.
    pub many: bool,
}

/// Type of a field.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    /// A string, or bytes with text.
    Text,
    /// A boolean.
    Bool,
    /// An integer.
    Int,
    /// An enum, with the names of its values.
    Word(&'static [&'static str]),
    /// A wrapped number, which distinguishes "none" from "0".
    Number,
    /// A map of strings to strings.
    Map,
    /// A message, with its fields.
    Message(&'static [Field]),
}

/// Reason why bytes are not a message of this type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a protobuf message: {0}")]
pub struct NotAMessage(&'static str);

/// A value on the wire.
#[derive(Debug, Clone, Copy)]
enum Raw<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
}

fn varint(bytes: &mut &[u8]) -> Result<u64, NotAMessage> {
    let mut out = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first().ok_or(NotAMessage("a number is cut"))?;
        *bytes = rest;
        out |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Ok(out);
        }
    }
    Err(NotAMessage("a number is too long"))
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Result<&'a [u8], NotAMessage> {
    let (taken, rest) = bytes.split_at_checked(count).ok_or(NotAMessage("a field is cut"))?;
    *bytes = rest;
    Ok(taken)
}

fn fields(mut bytes: &[u8]) -> Result<BTreeMap<u64, Vec<Raw<'_>>>, NotAMessage> {
    let mut out: BTreeMap<u64, Vec<Raw<'_>>> = BTreeMap::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes)?;
        let raw = match key & 7 {
            0 => Raw::Varint(varint(&mut bytes)?),
            1 => Raw::Bytes(take(&mut bytes, 8)?),
            2 => {
                let length =
                    usize::try_from(varint(&mut bytes)?).map_err(|_| NotAMessage("a field is cut"))?;
                Raw::Bytes(take(&mut bytes, length)?)
            }
            5 => Raw::Bytes(take(&mut bytes, 4)?),
            _ => return Err(NotAMessage("an unknown type")),
        };
        out.entry(key >> 3).or_default().push(raw);
    }
    Ok(out)
}

/// Decodes a message to JSON.
///
/// # Errors
/// Fails if the bytes are malformed or a field has another type than in the table.
pub(crate) fn decode(table: &[Field], bytes: &[u8]) -> Result<Value, NotAMessage> {
    let mut out = Map::new();
    for (number, raws) in fields(bytes)? {
        let Some(field) = table.iter().find(|f| f.number == number) else {
            out.insert(format!("?{number}"), Value::Array(raws.iter().map(unknown).collect()));
            continue;
        };
        let value = value(field, &raws)?;
        if !is_default(field, &value) {
            out.insert(field.name.to_owned(), value);
        }
    }
    Ok(Value::Object(out))
}

fn unknown(raw: &Raw<'_>) -> Value {
    match raw {
        Raw::Varint(n) => json!(n),
        Raw::Bytes(bytes) => json!(String::from_utf8_lossy(bytes)),
    }
}

/// Returns whether a value is the default. An empty message is not, but an empty list or enum is.
fn is_default(field: &Field, value: &Value) -> bool {
    !field.many
        && match field.kind {
            Kind::Text => value == "",
            Kind::Bool => value == false,
            Kind::Int => value == 0,
            Kind::Word(words) => Some(value) == words.first().map(|w| json!(w)).as_ref(),
            Kind::Number | Kind::Map | Kind::Message(_) => false,
        }
}

fn value(field: &Field, raws: &[Raw<'_>]) -> Result<Value, NotAMessage> {
    let last = raws.last().ok_or(NotAMessage("a field without a value"))?;
    match (field.kind, field.many) {
        (Kind::Map, _) => {
            let mut out = Map::new();
            for raw in raws {
                let entry = fields(payload(raw)?)?;
                let part = |number| {
                    entry
                        .get(&number)
                        .and_then(|r| r.last())
                        .map_or(Ok(""), |raw| text(raw))
                        .map(str::to_owned)
                };
                out.insert(part(1)?, Value::String(part(2)?));
            }
            Ok(Value::Object(out))
        }
        (kind, true) => {
            let mut out = Vec::new();
            for raw in raws {
                match (kind, raw) {
                    // Repeated numbers are packed.
                    (Kind::Int, Raw::Bytes(packed)) => {
                        let mut packed = *packed;
                        while !packed.is_empty() {
                            out.push(json!(varint(&mut packed)?.cast_signed()));
                        }
                    }
                    (kind, raw) => out.push(one(kind, raw)?),
                }
            }
            Ok(Value::Array(out))
        }
        (Kind::Message(table), false) => {
            let mut whole = Vec::new();
            for raw in raws {
                whole.extend_from_slice(payload(raw)?);
            }
            decode(table, &whole)
        }
        (kind, false) => one(kind, last),
    }
}

fn one(kind: Kind, raw: &Raw<'_>) -> Result<Value, NotAMessage> {
    Ok(match kind {
        Kind::Text => json!(text(raw)?),
        Kind::Bool => json!(number(raw)? != 0),
        Kind::Int => json!(number(raw)?.cast_signed()),
        Kind::Word(words) => {
            let n = number(raw)?;
            match usize::try_from(n).ok().and_then(|n| words.get(n)) {
                Some(word) => json!(word),
                None => json!(n),
            }
        }
        Kind::Number => {
            let inner = fields(payload(raw)?)?;
            let n = inner.get(&1).and_then(|r| r.last()).map_or(Ok(0), number)?;
            json!(n.cast_signed())
        }
        Kind::Map => return Err(NotAMessage("a map is no single value")),
        Kind::Message(table) => decode(table, payload(raw)?)?,
    })
}

fn payload<'a>(raw: &Raw<'a>) -> Result<&'a [u8], NotAMessage> {
    match raw {
        Raw::Bytes(bytes) => Ok(bytes),
        Raw::Varint(_) => Err(NotAMessage("a number where bytes should be")),
    }
}

fn text<'a>(raw: &Raw<'a>) -> Result<&'a str, NotAMessage> {
    std::str::from_utf8(payload(raw)?).map_err(|_| NotAMessage("a text that is not UTF-8"))
}

fn number(raw: &Raw<'_>) -> Result<u64, NotAMessage> {
    match raw {
        Raw::Varint(n) => Ok(*n),
        Raw::Bytes(_) => Err(NotAMessage("bytes where a number should be")),
    }
}

/// Reason why JSON is not a message of this type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: not {expected}: {value}")]
pub(crate) struct NotOfType {
    field: String,
    expected: &'static str,
    value: String,
}

impl NotOfType {
    fn new(field: &str, expected: &'static str, value: &Value) -> Self {
        Self { field: field.to_owned(), expected, value: value.to_string() }
    }
}

/// Encodes JSON of [`decode`].
///
/// # Errors
/// Fails if a field is not in the table, or has another type there.
pub(crate) fn encode(table: &[Field], value: &Value) -> Result<Vec<u8>, NotOfType> {
    let mut out = Vec::new();
    let map = value.as_object().ok_or_else(|| NotOfType::new("", "a message", value))?;
    for (name, value) in map {
        let field = table.iter().find(|f| f.name == name);
        let field = field.ok_or_else(|| NotOfType::new(name, "a known field", value))?;
        encode_field(field, value, &mut out)?;
    }
    Ok(out)
}

fn encode_field(field: &Field, value: &Value, out: &mut Vec<u8>) -> Result<(), NotOfType> {
    let wrong = |expected| NotOfType::new(field.name, expected, value);
    if matches!(field.kind, Kind::Map) {
        for (key, value) in value.as_object().ok_or_else(|| wrong("a map"))? {
            let text = value.as_str().ok_or_else(|| wrong("a map of texts"))?;
            let mut entry = Vec::new();
            bytes(1, key.as_bytes(), &mut entry);
            bytes(2, text.as_bytes(), &mut entry);
            bytes(field.number, &entry, out);
        }
        return Ok(());
    }
    if !field.many {
        return encode_one(field, value, out);
    }
    let list = value.as_array().ok_or_else(|| wrong("a list"))?;
    list.iter().try_for_each(|value| encode_one(field, value, out))
}

fn encode_one(field: &Field, value: &Value, out: &mut Vec<u8>) -> Result<(), NotOfType> {
    let wrong = |expected| NotOfType::new(field.name, expected, value);
    match field.kind {
        Kind::Text => {
            let text = value.as_str().ok_or_else(|| wrong("a text"))?;
            bytes(field.number, text.as_bytes(), out);
        }
        Kind::Bool => {
            let bool = value.as_bool().ok_or_else(|| wrong("a boolean"))?;
            varint_field(field.number, u64::from(bool), out);
        }
        Kind::Int => {
            let number = value.as_i64().ok_or_else(|| wrong("an integer"))?;
            varint_field(field.number, number.cast_unsigned(), out);
        }
        Kind::Word(words) => {
            let number = words.iter().position(|w| value == w).map(|n| n as u64).or_else(|| value.as_u64());
            varint_field(field.number, number.ok_or_else(|| wrong("a name of the enum"))?, out);
        }
        Kind::Number => {
            let number = value.as_i64().ok_or_else(|| wrong("an integer"))?;
            let mut wrapped = Vec::new();
            varint_field(1, number.cast_unsigned(), &mut wrapped);
            bytes(field.number, &wrapped, out);
        }
        Kind::Map => return Err(wrong("a single value")),
        Kind::Message(table) => bytes(field.number, &encode(table, value)?, out),
    }
    Ok(())
}

fn varint_field(number: u64, value: u64, out: &mut Vec<u8>) {
    encode_varint(number << 3 | WireType::Varint as u64, out);
    encode_varint(value, out);
}

fn bytes(number: u64, value: &[u8], out: &mut Vec<u8>) {
    encode_varint(number << 3 | WireType::LengthDelimited as u64, out);
    encode_varint(value.len() as u64, out);
    out.extend_from_slice(value);
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use quintlet_cri_api::v1 as cri;

    use super::*;
    use crate::schema;

    #[test]
    fn the_field_table_equals_the_bindings() {
        let config = cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: "c".into(), attempt: 2 }),
            envs: vec![cri::KeyValue { key: "A".into(), value: b"1".to_vec() }],
            args: vec!["a".into(), String::new()],
            labels: [("k".to_owned(), "v".to_owned())].into(),
            tty: true,
            linux: Some(cri::LinuxContainerConfig {
                resources: Some(cri::LinuxContainerResources { oom_score_adj: -997, ..Default::default() }),
                security_context: Some(cri::LinuxContainerSecurityContext {
                    run_as_user: Some(cri::Int64Value { value: 0 }),
                    supplemental_groups: vec![1, 300],
                    namespace_options: Some(cri::NamespaceOption { pid: 2, ..Default::default() }),
                    ..Default::default()
                }),
            }),
            ..Default::default()
        };
        let request = cri::CreateContainerRequest {
            pod_sandbox_id: "s".into(),
            config: Some(config),
            sandbox_config: Some(cri::PodSandboxConfig::default()),
        };
        let bytes = request.encode_to_vec();
        let want = json!({
            "pod_sandbox_id": "s",
            "config": {
                "metadata": {"name": "c", "attempt": 2},
                "envs": [{"key": "A", "value": "1"}],
                "args": ["a", ""],
                "labels": {"k": "v"},
                "tty": true,
                "linux": {
                    "resources": {"oom_score_adj": -997},
                    "security_context": {
                        "run_as_user": 0,
                        "supplemental_groups": [1, 300],
                        "namespace_options": {"pid": "NODE"},
                    },
                },
            },
            "sandbox_config": {},
        });
        assert_eq!(decode(schema::CREATE_CONTAINER, &bytes), Ok(want.clone()));
        let again = encode(schema::CREATE_CONTAINER, &want).unwrap();
        assert_eq!(cri::CreateContainerRequest::decode(again.as_slice()), Ok(request));
        for wrong in [
            json!({"?99": [5]}),
            json!({"pod_sandbox_id": 5}),
            json!({"config": {"envs": {}}}),
            json!({"config": {"labels": {"k": 1}}}),
            json!({"config": {"tty": "yes"}}),
            json!({"config": {"linux": {"security_context": {"namespace_options": {"pid": "OTHER"}}}}}),
        ] {
            assert!(encode(schema::CREATE_CONTAINER, &wrong).is_err(), "{wrong}");
        }

        // The message in two parts, with an unknown field.
        let mut more = bytes.clone();
        more.extend([0x12, 3, 0x90, 1, 23]);
        more.extend([0x12, 4, 0xf8, 0x3f, 7, 0]);
        assert_eq!(
            decode(schema::CREATE_CONTAINER, &more[..more.len() - 6])
                .map(|v| v["config"]["stop_signal"].clone()),
            Ok(json!(23))
        );
        assert!(decode(schema::CREATE_CONTAINER, &bytes[..bytes.len() - 1]).is_err());
        let strange = [0x98, 6, 5];
        assert_eq!(decode(schema::CREATE_CONTAINER, &strange), Ok(json!({"?99": [5]})));
    }
}
