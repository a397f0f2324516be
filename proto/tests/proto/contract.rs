//! A version of the contracts, read from its descriptors.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message as _;
use prost_types::field_descriptor_proto::Type;
use prost_types::{DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet};

/// A remote call: types of request and reply, and whether each is a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemoteCall {
    pub(crate) request: (String, bool),
    pub(crate) reply: (String, bool),
}

/// A version of the contracts, by full names without a leading dot.
#[derive(Debug, Clone, Default)]
pub(crate) struct Contract {
    pub(crate) messages: BTreeMap<String, DescriptorProto>,
    /// Names of values by number.
    pub(crate) enums: BTreeMap<String, BTreeMap<i32, String>>,
    pub(crate) calls: BTreeMap<String, RemoteCall>,
}

impl Contract {
    /// Returns the contracts of the last release.
    pub(crate) fn last_release() -> Self {
        Self::parse(include_bytes!("../../baseline.binpb"))
    }

    /// Returns the contracts of this version.
    pub(crate) fn current() -> Self {
        Self::parse(quintlet_proto::FILE_DESCRIPTOR_SET)
    }

    fn parse(descriptors: &[u8]) -> Self {
        let mut contract = Self::default();
        for file in FileDescriptorSet::decode(descriptors).unwrap().file {
            let package = file.package().to_owned();
            if !package.starts_with("quintlet.") {
                continue;
            }
            for message in file.message_type {
                contract.add_message(&package, message);
            }
            for enumeration in &file.enum_type {
                contract.add_enum(&package, enumeration);
            }
            for service in file.service {
                for method in &service.method {
                    let name = format!("{package}.{}.{}", service.name(), method.name());
                    let request = (full_name(method.input_type()), method.client_streaming());
                    let reply = (full_name(method.output_type()), method.server_streaming());
                    contract.calls.insert(name, RemoteCall { request, reply });
                }
            }
        }
        contract
    }

    fn add_message(&mut self, scope: &str, message: DescriptorProto) {
        let name = format!("{scope}.{}", message.name());
        for nested in message.nested_type.clone() {
            self.add_message(&name, nested);
        }
        for enumeration in &message.enum_type {
            self.add_enum(&name, enumeration);
        }
        self.messages.insert(name, message);
    }

    fn add_enum(&mut self, scope: &str, enumeration: &EnumDescriptorProto) {
        let values = enumeration.value.iter().map(|value| (value.number(), value.name().to_owned()));
        self.enums.insert(format!("{scope}.{}", enumeration.name()), values.collect());
    }

    /// Returns what a peer of `earlier` does not know: calls, fields of messages that it knows, and values of
    /// enums that it knows.
    pub(crate) fn additions_to(&self, earlier: &Self) -> BTreeSet<String> {
        let mut names: BTreeSet<String> =
            self.calls.keys().filter(|name| !earlier.calls.contains_key(*name)).cloned().collect();
        for (name, message) in &self.messages {
            let Some(before) = earlier.messages.get(name) else { continue };
            let is_new =
                |field: &&FieldDescriptorProto| before.field.iter().all(|old| old.name() != field.name());
            names.extend(message.field.iter().filter(is_new).map(|field| format!("{name}.{}", field.name())));
        }
        for (name, values) in &self.enums {
            let Some(before) = earlier.enums.get(name) else { continue };
            let new = values.iter().filter(|(number, _)| !before.contains_key(number));
            names.extend(new.map(|(_, value)| format!("{name}.{value}")));
        }
        names
    }
}

/// Returns the name of a type as [`Contract`] has it.
pub(crate) fn full_name(type_name: &str) -> String {
    type_name.trim_start_matches('.').to_owned()
}

/// Returns whether a field has its values in one length-delimited record when it is repeated.
pub(crate) fn is_packable(kind: Type) -> bool {
    !matches!(kind, Type::String | Type::Bytes | Type::Message | Type::Group)
}
