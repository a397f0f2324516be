//! The contracts only grow: services of different builds talk to each other during an update, and old ones must be understood.
//!
//! `contracts.txt` has a line for everything a peer may rely on. A line that vanishes or changes breaks one; new lines are added
//! with `QUINTLET_ADD_CONTRACTS=1 cargo test -p quintlet-proto`, which never takes one away.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::BTreeSet;
use std::path::Path;

use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet, ServiceDescriptorProto,
};

const ADD: &str = "QUINTLET_ADD_CONTRACTS";

fn field(message: &str, of: &DescriptorProto, f: &FieldDescriptorProto) -> String {
    let kind = match f.r#type() {
        Type::Message | Type::Enum => f.type_name().trim_start_matches('.').to_owned(),
        other => format!("{other:?}").to_lowercase(),
    };
    let label = match (f.label(), f.proto3_optional(), f.oneof_index) {
        (Label::Repeated, ..) => " repeated".to_owned(),
        (_, true, _) => " optional".to_owned(),
        (_, _, Some(index)) => {
            let oneof = usize::try_from(index).ok().and_then(|i| of.oneof_decl.get(i)).unwrap();
            format!(" oneof {}", oneof.name())
        }
        _ => String::new(),
    };
    format!("field {message}.{} = {} {kind}{label}", f.name(), f.number())
}

fn enumeration(scope: &str, of: &EnumDescriptorProto, lines: &mut BTreeSet<String>) {
    let name = format!("{scope}.{}", of.name());
    lines.extend(of.value.iter().map(|v| format!("value {name}.{} = {}", v.name(), v.number())));
}

fn message(scope: &str, of: &DescriptorProto, lines: &mut BTreeSet<String>) {
    let name = format!("{scope}.{}", of.name());
    lines.insert(format!("message {name}"));
    lines.extend(of.field.iter().map(|f| field(&name, of, f)));
    of.nested_type.iter().for_each(|m| message(&name, m, lines));
    of.enum_type.iter().for_each(|e| enumeration(&name, e, lines));
}

fn service(scope: &str, of: &ServiceDescriptorProto, lines: &mut BTreeSet<String>) {
    let stream = |is| if is { "stream " } else { "" };
    lines.extend(of.method.iter().map(|m| {
        format!(
            "rpc {scope}.{}.{} ({}{}) returns ({}{})",
            of.name(),
            m.name(),
            stream(m.client_streaming()),
            m.input_type().trim_start_matches('.'),
            stream(m.server_streaming()),
            m.output_type().trim_start_matches('.'),
        )
    }));
}

/// Everything in our packages, one line each.
fn contracts(descriptors: &[u8]) -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    for file in FileDescriptorSet::decode(descriptors).unwrap().file {
        if !file.package().starts_with("quintlet.") {
            continue;
        }
        file.message_type.iter().for_each(|m| message(file.package(), m, &mut lines));
        file.enum_type.iter().for_each(|e| enumeration(file.package(), e, &mut lines));
        file.service.iter().for_each(|s| service(file.package(), s, &mut lines));
    }
    lines
}

#[test]
fn what_a_peer_may_rely_on_never_vanishes_or_changes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("contracts.txt");
    let promised: BTreeSet<String> =
        std::fs::read_to_string(&path).unwrap_or_default().lines().map(str::to_owned).collect();
    let now = contracts(quintlet_proto::FILE_DESCRIPTOR_SET);
    let broken: Vec<&String> = promised.difference(&now).collect();
    assert!(
        broken.is_empty(),
        "vanished from the contracts, or changed, which a service of an older build does not survive:\n{broken:#?}\n\
         Leave the old one as it is and add a new one beside it."
    );
    if std::env::var_os(ADD).is_some() {
        let text: String = now.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(&path, text).unwrap();
        return;
    }
    let new: Vec<&String> = now.difference(&promised).collect();
    assert!(
        new.is_empty(),
        "new in the contracts, and from now on for good:\n{new:#?}\n\
         Add them to proto/contracts.txt with {ADD}=1 cargo test -p quintlet-proto"
    );
}
