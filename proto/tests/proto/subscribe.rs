//! Fields that the messages for subscribers must not have.

use prost::Message as _;
use prost_types::DescriptorProto;

/// Parts of the names of fields that may hold a secret or a text of a tenant.
const PRIVATE: [&str; 10] =
    ["env", "command", "arg", "annotation", "label", "message", "output", "image", "mount", "address"];

fn fields(message: &DescriptorProto, all: &mut Vec<String>) {
    all.extend(message.field.iter().map(|field| format!("{}.{}", message.name(), field.name())));
    for nested in &message.nested_type {
        fields(nested, all);
    }
}

#[test]
fn no_message_for_subscribers_has_a_field_for_a_secret() {
    let set = prost_types::FileDescriptorSet::decode(quintlet_proto::FILE_DESCRIPTOR_SET).unwrap();
    let mut all = Vec::new();
    for file in set.file.iter().filter(|file| file.package() == "quintlet.subscribe.v1") {
        file.message_type.iter().for_each(|message| fields(message, &mut all));
    }
    assert!(all.len() > 60, "{all:?}");
    for field in &all {
        let (_, name) = field.split_once('.').unwrap();
        let found = PRIVATE.iter().find(|word| name.contains(*word));
        assert_eq!(found, None, "{field}");
    }
}
