//! Hashes that the kubelet stores: of containers (`pkg/kubelet/container: HashContainer`) and of state files.

use std::fmt::{self, Write as _};
use std::hash::Hasher as _;

/// Returns the hash of a container definition as in the container's annotation: lower-case hex without
/// padding.
///
/// It covers the name and the image only. It equals the kubelet's hash, so that Quintlet and the kubelet can
/// take over each other's containers.
#[must_use]
pub fn container_hash(name: &str, image: &str) -> String {
    let json = format!("{{\"image\":{},\"name\":{}}}", go_json(image), go_json(name));
    let mut text = String::from("([]uint8)[");
    for (i, b) in json.bytes().enumerate() {
        let _ = write!(text, "{}{b}", if i == 0 { "" } else { " " });
    }
    text.push(']');
    format!("{:x}", GoHash::of_text(&text))
}

fn go_json(text: &str) -> String {
    escape_as_go(&serde_json::Value::String(text.to_owned()).to_string())
}

/// Escapes JSON as Go's `encoding/json` does: also the HTML characters `<`, `>` and `&`, and the separators
/// U+2028 and U+2029.
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

/// The checksum of a state file is not that of its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("its checksum is {found}, that of its data is {expected}")]
pub struct ChecksumMismatch {
    /// Checksum in the file.
    pub found: u64,
    /// Checksum of the data.
    pub expected: u64,
}

/// Checks the checksum of a state file, which may be any of `accepted`. Old kubelets wrote none: 0.
///
/// # Errors
/// It is none of them.
pub fn check_checksum(found: u64, accepted: &[u64]) -> Result<(), ChecksumMismatch> {
    if found == 0 || accepted.contains(&found) {
        return Ok(());
    }
    Err(ChecksumMismatch { found, expected: accepted.first().copied().unwrap_or_default() })
}

/// Returns the content that kubelet 1.37 writes into a state file a second time, as a text with a checksum of
/// its own. `None` if the file has neither.
///
/// # Errors
/// The checksum is not that of the text, or is missing.
pub fn checked_text(data: Option<String>, checksum: Option<u64>) -> Result<Option<String>, ChecksumMismatch> {
    let (data, found) = (data.unwrap_or_default(), checksum.unwrap_or(0));
    if data.is_empty() && found == 0 {
        return Ok(None);
    }
    let expected = GoHash::of_string(&data);
    if found == expected { Ok(Some(data)) } else { Err(ChecksumMismatch { found, expected }) }
}

/// The 32-bit FNV-1a hash of the text that is written to it. The kubelet hashes what Go prints for the data
/// of a state file (`pkg/kubelet/checkpointmanager/checksum`).
#[derive(Debug, Clone, Copy)]
pub struct GoHash(u32);

impl GoHash {
    const EMPTY: Self = Self(0x811c_9dc5);

    /// Returns the hash of what a function writes.
    ///
    /// # Errors
    /// The function failed. The hash itself never does.
    pub fn of(write: impl FnOnce(&mut Self) -> fmt::Result) -> Result<u64, fmt::Error> {
        let mut hash = Self::EMPTY;
        write(&mut hash)?;
        Ok(u64::from(hash.0))
    }

    /// Returns the hash of a text.
    #[must_use]
    pub fn of_text(text: &str) -> u64 {
        let mut hash = Self::EMPTY;
        hash.add(text);
        u64::from(hash.0)
    }

    /// Returns the hash of what Go prints for a string.
    #[must_use]
    pub fn of_string(text: &str) -> u64 {
        let mut hash = Self::EMPTY;
        hash.add("(string)");
        hash.add(text);
        u64::from(hash.0)
    }

    /// Writes the items of a Go slice or map, which spaces separate.
    ///
    /// # Errors
    /// `write` failed.
    pub fn separated<T>(
        &mut self,
        items: impl IntoIterator<Item = T>,
        mut write: impl FnMut(&mut Self, T) -> fmt::Result,
    ) -> fmt::Result {
        for (number, item) in items.into_iter().enumerate() {
            if number > 0 {
                fmt::Write::write_char(self, ' ')?;
            }
            write(self, item)?;
        }
        Ok(())
    }

    fn add(&mut self, text: &str) {
        self.0 = text.bytes().fold(self.0, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    }
}

impl fmt::Write for GoHash {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.add(text);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_equal_the_kubelets_reference_values() {
        assert_eq!(container_hash("foo", "bar"), "11a6d6d6");
        assert_eq!(container_hash("test_container", "foo/image:v1"), "8e45cbd0");
        let table =
            r#"{"memory":{"total":2048,"systemReserved":512,"allocatable":1536,"reserved":512,"free":1024}}"#;
        let block = r#"[{"numaAffinity":[0],"type":"memory","size":512}]"#;
        let data = format!(
            r#"{{"policyName":"static","machineState":{{"0":{{"numberOfAssignments":0,"memoryMap":{table},"cells":[]}}}},"entries":{{"pod":{{"container1":{block}}}}},"podEntries":{{"pod":{{"memoryBlocks":{block}}}}}}}"#
        );
        assert_eq!(GoHash::of_string(&data), 637_296_054);
    }
}
