//! The kubelet's hash of a container definition (pkg/kubelet/container/helpers.go: HashContainer).

use std::fmt::Write as _;
use std::hash::Hasher as _;

/// Hash of a container definition as written into the annotation: lower-case hex without padding.
///
/// Only name and image take part. It equals the kubelet's bit for bit, so containers can change hands.
#[must_use]
pub fn container_hash(name: &str, image: &str) -> String {
    let json = format!("{{\"image\":{},\"name\":{}}}", go_json(image), go_json(name));
    let mut text = String::from("([]uint8)[");
    for (i, b) in json.bytes().enumerate() {
        let _ = write!(text, "{}{b}", if i == 0 { "" } else { " " });
    }
    text.push(']');
    let mut hash: u32 = 0x811c_9dc5;
    for b in text.bytes() {
        hash ^= u32::from(b);
        hash = hash.wrapping_mul(0x0100_0193);
    }
    format!("{hash:x}")
}

fn go_json(text: &str) -> String {
    escape_as_go(&serde_json::Value::String(text.to_owned()).to_string())
}

/// JSON as Go's encoder has it, which also escapes what HTML would interpret, and two separators.
#[must_use]
pub fn escape_as_go(json: &str) -> String {
    json.replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029")
}

/// FNV-1a, 64 bit, of some text, hex: the key of a crash-loop back-off entry.
#[must_use]
pub fn fnv64_hex(text: &str) -> String {
    let mut hasher = fnv::FnvHasher::default();
    hasher.write(text.as_bytes());
    format!("{:x}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_equals_the_kubelets_reference_values() {
        assert_eq!(container_hash("foo", "bar"), "11a6d6d6");
        assert_eq!(container_hash("test_container", "foo/image:v1"), "8e45cbd0");
    }
}
