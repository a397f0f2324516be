//! Hashes that the kubelet stores on containers (`pkg/kubelet/container: HashContainer`).

use std::fmt::Write as _;
use std::hash::Hasher as _;

/// Returns the hash of a container definition as in the container's annotation: lower-case hex without padding.
///
/// It covers the name and the image only. It equals the kubelet's hash, so that Quintlet and the kubelet can take over each
/// other's containers.
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

/// Escapes JSON as Go's `encoding/json` does: also the HTML characters `<`, `>` and `&`, and the separators U+2028 and U+2029.
#[must_use]
pub fn escape_as_go(json: &str) -> String {
    json.replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029")
}

/// Returns the 64-bit FNV-1a hash of a text in hex, which is the key of a crash-loop back-off entry.
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
    fn hashes_equal_the_kubelets_reference_values() {
        assert_eq!(container_hash("foo", "bar"), "11a6d6d6");
        assert_eq!(container_hash("test_container", "foo/image:v1"), "8e45cbd0");
    }
}
