//! The kubelet's checkpoints of allocated and actuated resources, byte for byte
//! (`pkg/kubelet/allocation/state`): JSON whose entries are a string, and a checksum of that string.

use std::collections::BTreeMap;

use quintlet_model::hash::GoHash;
use serde::{Deserialize, Serialize};

use super::allocation::PodResources;

/// Resources by pod UID.
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

/// Reason why a checkpoint of allocations is not used.
#[derive(Debug, thiserror::Error)]
pub enum CorruptCheckpoint {
    /// The file is not valid JSON, or has other fields.
    #[error("not a checkpoint")]
    Unreadable(#[source] serde_json::Error),
    /// The checksum does not match.
    #[error("checkpoint is corrupt: its checksum is {found}, that of its data is {expected}")]
    Checksum {
        /// Checksum in the file.
        found: u64,
        /// Checksum of the data.
        expected: u64,
    },
    /// The checksum matches, but the entries cannot be parsed.
    #[error("failed to parse entries of the checkpoint")]
    PodResourceEntries(#[source] serde_json::Error),
}

/// Returns the content of a checkpoint file.
///
/// # Errors
/// Serialization failed, which resources of the API do not cause.
pub fn encode(entries: &PodResourceEntries) -> Result<Vec<u8>, serde_json::Error> {
    /// Borrows the entries; used for writing only.
    #[derive(Serialize)]
    struct Data<'a> {
        entries: &'a PodResourceEntries,
    }
    let data = serde_json::to_string(&Data { entries })?;
    let checksum = GoHash::of_string(&data);
    serde_json::to_vec(&File { data, checksum })
}

/// Parses a checkpoint file.
///
/// # Errors
/// See [`CorruptCheckpoint`].
pub fn decode(bytes: &[u8]) -> Result<PodResourceEntries, CorruptCheckpoint> {
    let file: File = serde_json::from_slice(bytes).map_err(CorruptCheckpoint::Unreadable)?;
    let expected = GoHash::of_string(&file.data);
    if file.checksum != expected {
        return Err(CorruptCheckpoint::Checksum { found: file.checksum, expected });
    }
    let data: Data = serde_json::from_str(&file.data).map_err(CorruptCheckpoint::PodResourceEntries)?;
    Ok(data.entries.unwrap_or_default())
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
    fn a_checkpoint_has_the_kubelets_format_and_is_restored() {
        let bytes = encode(&entries()).unwrap();
        let file: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        let data = r#"{"entries":{"u1":{"ContainerResources":{"c":{"limits":{"cpu":"1"},"requests":{"cpu":"500m","memory":"64Mi"}}},"PodLevelResources":null}}}"#;
        assert_eq!(file["data"], data);
        // 32-bit FNV-1a of "(string)" and the data, computed by another implementation.
        assert_eq!(file["checksum"], 1_873_932_677_u64);
        assert_eq!(decode(&bytes).unwrap(), entries());
        assert_eq!(decode(&encode(&PodResourceEntries::new()).unwrap()).unwrap(), PodResourceEntries::new());
    }

    #[test]
    fn a_corrupt_checkpoint_is_refused_and_null_is_empty() {
        let good = encode(&entries()).unwrap();
        for cut in [0, 1, good.len() / 2, good.len() - 1] {
            assert!(matches!(decode(&good[..cut]), Err(CorruptCheckpoint::Unreadable(_))), "{cut}");
        }
        let text = String::from_utf8(good).unwrap();
        let changed = text.replace("500m", "900m");
        assert!(matches!(decode(changed.as_bytes()), Err(CorruptCheckpoint::Checksum { .. })));
        let other = serde_json::to_vec(&json!({"data": "7", "checksum": GoHash::of_string("7")})).unwrap();
        assert!(matches!(decode(&other), Err(CorruptCheckpoint::PodResourceEntries(_))));
        // Go writes a nil map as null.
        let text = r#"{"entries":null}"#;
        let empty = serde_json::to_vec(&json!({"data": text, "checksum": GoHash::of_string(text)})).unwrap();
        assert_eq!(decode(&empty).unwrap(), PodResourceEntries::new());
        for fields in [
            r#""ContainerResources":null,"PodLevelResources":null"#,
            r#""ContainerResources":null,"PodLevelResources":null,"EmptyDirVolumeLimits":null"#,
        ] {
            let text = format!(r#"{{"entries":{{"u":{{{fields}}}}}}}"#);
            let empty =
                serde_json::to_vec(&json!({"data": text, "checksum": GoHash::of_string(&text)})).unwrap();
            assert_eq!(decode(&empty).unwrap()["u"], PodResources::default(), "{fields}");
        }
    }

    #[test]
    fn limits_of_volumes_have_the_name_of_a_kubelet_1_37() {
        let entry =
            r#"{"ContainerResources":{},"PodLevelResources":null,"EmptyDirVolumeLimits":{"v":"64Mi"}}"#;
        let resources: PodResources = serde_json::from_str(entry).unwrap();
        assert_eq!(resources.size_limits["v"].0, "64Mi");
        assert_eq!(serde_json::to_string(&resources).unwrap(), entry);
    }
}
