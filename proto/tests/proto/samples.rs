//! Messages with a value in each field, written and read by descriptors alone.

use std::collections::BTreeMap;

use prost::encoding::{WireType, decode_key, decode_varint, encode_key, encode_varint};
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto};

use crate::contract::{Contract, full_name, is_packable};

/// Depth of nested messages, since a message may contain itself.
const DEPTH: usize = 4;

/// The meaning of a message: fields by name, with their values as text. A field that the descriptor lacks has
/// the name `?NUMBER`.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Meaning(pub(crate) BTreeMap<String, Vec<FieldValue>>);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FieldValue {
    Text(String),
    Nested(Meaning),
}

/// Returns messages of a type that together have a value in each field: the members of a oneof need one
/// message each. Values of enums are among those that `peer` has, too.
pub(crate) fn samples(contract: &Contract, peer: &Contract, name: &str) -> Vec<Vec<u8>> {
    let message = &contract.messages[name];
    let members = |index: i32| message.field.iter().filter(move |field| field.oneof_index == Some(index));
    let most = (0..).zip(&message.oneof_decl).map(|(index, _)| members(index).count()).max();
    (0..most.unwrap_or(1).max(1)).map(|turn| sample(contract, peer, message, turn, DEPTH)).collect()
}

/// Returns a message with the `turn`th member of each oneof.
fn sample(
    contract: &Contract,
    peer: &Contract,
    message: &DescriptorProto,
    turn: usize,
    depth: usize,
) -> Vec<u8> {
    let mut bytes = Vec::new();
    for field in &message.field {
        if let Some(oneof) = field.oneof_index {
            let members: Vec<_> =
                message.field.iter().filter(|other| other.oneof_index == Some(oneof)).collect();
            if members[turn % members.len()].number() != field.number() {
                continue;
            }
        }
        let tag = u32::try_from(field.number()).unwrap();
        let values: Vec<Vec<u8>> = (0..if field.label() == Label::Repeated { 2 } else { 1 })
            .map(|index| value(contract, peer, field, turn + index, depth))
            .collect();
        if field.label() == Label::Repeated && is_packable(field.r#type()) {
            let packed = values.concat();
            encode_key(tag, WireType::LengthDelimited, &mut bytes);
            encode_varint(packed.len() as u64, &mut bytes);
            bytes.extend(packed);
            continue;
        }
        for value in values {
            encode_key(tag, wire_type(field.r#type()), &mut bytes);
            if wire_type(field.r#type()) == WireType::LengthDelimited {
                encode_varint(value.len() as u64, &mut bytes);
            }
            bytes.extend(value);
        }
    }
    bytes
}

/// Returns the encoded value of a field, without its key and length. Each field has another one.
fn value(
    contract: &Contract,
    peer: &Contract,
    field: &FieldDescriptorProto,
    turn: usize,
    depth: usize,
) -> Vec<u8> {
    let number = u64::try_from(field.number()).unwrap() + 100 + turn as u64;
    let mut bytes = Vec::new();
    match field.r#type() {
        Type::Message | Type::Group => {
            let nested = &contract.messages[&full_name(field.type_name())];
            if depth > 0 {
                bytes = sample(contract, peer, nested, turn, depth - 1);
            }
        }
        Type::String | Type::Bytes => bytes.extend(format!("{} {number}", field.name()).into_bytes()),
        Type::Bool => encode_varint(1, &mut bytes),
        Type::Enum => {
            let name = full_name(field.type_name());
            let is_known =
                |number: &&i32| peer.enums.get(&name).is_none_or(|values| values.contains_key(*number));
            let last = contract.enums[&name].keys().rfind(is_known).unwrap();
            encode_varint(u64::try_from(*last).unwrap(), &mut bytes);
        }
        Type::Double => bytes.extend(f64::from_bits(number).to_le_bytes()),
        Type::Float => bytes.extend((f32::from(u16::try_from(number).unwrap())).to_le_bytes()),
        Type::Fixed64 | Type::Sfixed64 => bytes.extend(number.to_le_bytes()),
        Type::Fixed32 | Type::Sfixed32 => bytes.extend(u32::try_from(number).unwrap().to_le_bytes()),
        Type::Int32 | Type::Int64 | Type::Uint32 | Type::Uint64 | Type::Sint32 | Type::Sint64 => {
            encode_varint(number, &mut bytes);
        }
    }
    bytes
}

fn wire_type(kind: Type) -> WireType {
    match kind {
        Type::Message | Type::Group | Type::String | Type::Bytes => WireType::LengthDelimited,
        Type::Double | Type::Fixed64 | Type::Sfixed64 => WireType::SixtyFourBit,
        Type::Float | Type::Fixed32 | Type::Sfixed32 => WireType::ThirtyTwoBit,
        _ => WireType::Varint,
    }
}

/// Reads a message as a peer with this contract does.
///
/// # Errors
/// A record does not have the form of its field.
pub(crate) fn read(contract: &Contract, name: &str, mut bytes: &[u8]) -> Result<Meaning, String> {
    let message = contract.messages.get(name).ok_or(format!("no message {name}"))?;
    let mut meaning = Meaning::default();
    while !bytes.is_empty() {
        let (tag, wire) = decode_key(&mut bytes).map_err(|error| error.to_string())?;
        let record = record(wire, &mut bytes)?;
        let field = message.field.iter().find(|field| u32::try_from(field.number()) == Ok(tag));
        let Some(field) = field else {
            meaning.0.entry(format!("?{tag}")).or_default().push(FieldValue::Text(String::new()));
            continue;
        };
        let kind = field.r#type();
        let is_packed =
            field.label() == Label::Repeated && is_packable(kind) && wire == WireType::LengthDelimited;
        if !is_packed && wire != wire_type(kind) {
            return Err(format!("{name}.{} has the form {wire:?}", field.name()));
        }
        let mut values = Vec::new();
        let mut rest = record;
        if is_packed {
            while !rest.is_empty() {
                values.push(text(contract, field, self::record(wire_type(kind), &mut rest)?)?);
            }
        } else {
            values.push(text(contract, field, rest)?);
        }
        meaning.0.entry(field.name().to_owned()).or_default().extend(values);
    }
    Ok(meaning)
}

/// Takes the value of a record, without its length.
fn record<'a>(wire: WireType, bytes: &mut &'a [u8]) -> Result<&'a [u8], String> {
    let length = match wire {
        WireType::Varint => {
            let mut rest = *bytes;
            decode_varint(&mut rest).map_err(|error| error.to_string())?;
            bytes.len() - rest.len()
        }
        WireType::SixtyFourBit => 8,
        WireType::ThirtyTwoBit => 4,
        WireType::LengthDelimited => {
            usize::try_from(decode_varint(bytes).map_err(|error| error.to_string())?).unwrap()
        }
        WireType::StartGroup | WireType::EndGroup => return Err("a group".to_owned()),
    };
    let (value, rest) = bytes.split_at_checked(length).ok_or("the record is cut")?;
    *bytes = rest;
    Ok(value)
}

/// Returns the value of a field as its reader understands it: an enum by the name of the value, a number with
/// its type.
fn text(contract: &Contract, field: &FieldDescriptorProto, mut value: &[u8]) -> Result<FieldValue, String> {
    let kind = field.r#type();
    Ok(FieldValue::Text(match kind {
        Type::Message | Type::Group => {
            return read(contract, &full_name(field.type_name()), value).map(FieldValue::Nested);
        }
        Type::String => String::from_utf8(value.to_vec()).map_err(|error| error.to_string())?,
        Type::Enum => {
            let number = decode_varint(&mut value).map_err(|error| error.to_string())?;
            let names = &contract.enums[&full_name(field.type_name())];
            i32::try_from(number)
                .ok()
                .and_then(|number| names.get(&number).cloned())
                .unwrap_or(format!("?{number}"))
        }
        _ => format!("{kind:?} {value:?}"),
    }))
}
