//! The kubelet's checkpoints of resources, byte for byte (pkg/kubelet/allocation/state): JSON with the entries as a text and
//! the sum of that text.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::allocation::PodResources;

/// By pod UID.
pub type PodResourceEntries = BTreeMap<String, PodResources>;

#[derive(Serialize, Deserialize)]
struct File {
    data: String,
    checksum: u64,
}

#[derive(Serialize, Deserialize)]
struct Data {
    #[serde(default)]
    entries: Option<PodResourceEntries>,
}

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CorruptCheckpoint {
    /// It is no JSON, or other JSON.
    #[error("not a checkpoint")]
    Unreadable(#[source] serde_json::Error),
    /// The sum is that of other data.
    #[error("checkpoint is corrupted: checksum is {found}, that of its data {expected}")]
    Checksum {
        /// In the file.
        found: u64,
        /// Of its data.
        expected: u64,
    },
    /// The sum is right, the data is not.
    #[error("entries cannot be read")]
    PodResourceEntries(#[source] serde_json::Error),
}

/// The file's bytes.
///
/// # Errors
/// None that resources as the API has them can bring about.
pub fn encode(entries: &PodResourceEntries) -> Result<Vec<u8>, serde_json::Error> {
    // Only for writing: what is borrowed has the same form.
    #[derive(Serialize)]
    struct Data<'a> {
        entries: &'a PodResourceEntries,
    }
    let data = serde_json::to_string(&Data { entries })?;
    let checksum = checksum(&data);
    serde_json::to_vec(&File { data, checksum })
}

/// Reads a file.
///
/// # Errors
/// See [`CorruptCheckpoint`].
pub fn decode(bytes: &[u8]) -> Result<PodResourceEntries, CorruptCheckpoint> {
    let file: File = serde_json::from_slice(bytes).map_err(CorruptCheckpoint::Unreadable)?;
    let expected = checksum(&file.data);
    if file.checksum != expected {
        return Err(CorruptCheckpoint::Checksum { found: file.checksum, expected });
    }
    let data: Data = serde_json::from_str(&file.data).map_err(CorruptCheckpoint::PodResourceEntries)?;
    Ok(data.entries.unwrap_or_default())
}

// FNV-1a of 32 bits over how Go prints a text with its type.
fn checksum(data: &str) -> u64 {
    let bytes = b"(string)".iter().chain(data.as_bytes());
    let sum = bytes.fold(0x811c_9dc5_u32, |hash, b| (hash ^ u32::from(*b)).wrapping_mul(0x0100_0193));
    u64::from(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resize::allocation::of_pod;
    use quintlet_testkit::pods::pod_json;
    use serde_json::json;

    fn entries() -> PodResourceEntries {
        let pod = pod_json(json!({"containers": [{"name": "c", "image": "i",
            "resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "500m", "memory": "64Mi"}}}]}));
        [("u1".to_owned(), of_pod(&pod))].into()
    }

    #[test]
    fn a_checkpoint_has_the_kubelets_form_and_comes_back() {
        let bytes = encode(&entries()).unwrap();
        let file: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        let data = r#"{"entries":{"u1":{"ContainerResources":{"c":{"limits":{"cpu":"1"},"requests":{"cpu":"500m","memory":"64Mi"}}},"PodLevelResources":null}}}"#;
        assert_eq!(file["data"], data);
        // FNV-1a of 32 bits of "(string)" and the data, by another implementation.
        assert_eq!(file["checksum"], 1_873_932_677_u64);
        assert_eq!(decode(&bytes).unwrap(), entries());
        assert_eq!(decode(&encode(&PodResourceEntries::new()).unwrap()).unwrap(), PodResourceEntries::new());
    }

    #[test]
    fn what_another_wrote_or_half_wrote_is_not_believed() {
        let good = encode(&entries()).unwrap();
        for cut in [0, 1, good.len() / 2, good.len() - 1] {
            assert!(matches!(decode(&good[..cut]), Err(CorruptCheckpoint::Unreadable(_))), "{cut}");
        }
        let text = String::from_utf8(good).unwrap();
        let changed = text.replace("500m", "900m");
        assert!(matches!(decode(changed.as_bytes()), Err(CorruptCheckpoint::Checksum { .. })));
        let other = serde_json::to_vec(&json!({"data": "7", "checksum": checksum("7")})).unwrap();
        assert!(matches!(decode(&other), Err(CorruptCheckpoint::PodResourceEntries(_))));
        // Go writes an empty map as null.
        let text = r#"{"entries":null}"#;
        let empty = serde_json::to_vec(&json!({"data": text, "checksum": checksum(text)})).unwrap();
        assert_eq!(decode(&empty).unwrap(), PodResourceEntries::new());
        let text = r#"{"entries":{"u":{"ContainerResources":null,"PodLevelResources":null}}}"#;
        let empty = serde_json::to_vec(&json!({"data": text, "checksum": checksum(text)})).unwrap();
        assert_eq!(decode(&empty).unwrap()["u"], PodResources::default());
    }
}
