//! The metadata file of a volume, `vol_data.json`: what teardown needs after a restart.

use std::io;
use std::path::Path;

use quintlet_kit::atomic_file;
use serde::{Deserialize, Serialize};

use crate::error::CsiError;
use crate::paths::VOLUME_DATA;

/// Largest size of a metadata file that is read, in bytes.
const MOST_BYTES: u64 = 64 << 10;
/// Mode of the file: other users need no access.
const MODE: u32 = 0o644;

/// Lifecycle mode of a volume (`VolumeLifecycleMode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LifecycleMode {
    /// A PersistentVolume.
    Persistent,
    /// An inline volume, which exists as long as its pod.
    Ephemeral,
}

/// The content of the file. The kubelet writes fields without a value as empty strings, and reads absent ones
/// as such.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeData {
    /// Name of the VolumeAttachment object.
    #[serde(rename = "attachmentID", skip_serializing_if = "String::is_empty", default)]
    pub attachment_id: String,
    /// Name of the driver.
    #[serde(default)]
    pub driver_name: String,
    /// Name of the node.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub node_name: String,
    /// SELinux label that the volume is mounted with.
    #[serde(rename = "seLinuxMountContext", skip_serializing_if = "String::is_empty", default)]
    pub selinux_mount_context: String,
    /// Name of an inline volume in its pod, or of the PersistentVolume.
    #[serde(rename = "specVolID", skip_serializing_if = "String::is_empty", default)]
    pub spec_volume_id: String,
    /// Handle of the volume.
    #[serde(default)]
    pub volume_handle: String,
    /// `Persistent` or `Ephemeral`; empty for staged and block volumes.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub volume_lifecycle_mode: String,
}

impl VolumeData {
    /// Returns whether the volume is an inline volume of a pod.
    #[must_use]
    pub fn is_ephemeral(&self) -> bool {
        self.volume_lifecycle_mode == "Ephemeral"
    }

    /// Writes the file into `dir` and syncs it: after a power failure the mount would have no driver. Blocks.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn save(&self, dir: &Path) -> Result<(), CsiError> {
        let path = dir.join(VOLUME_DATA);
        let failed = || CsiError::file("save volume data file", &path);
        let mut bytes = serde_json::to_vec(self).map_err(|error| failed()(error.into()))?;
        bytes.push(b'\n');
        atomic_file::write_durable(&path, &bytes, MODE).map_err(failed())
    }

    /// Reads the file in `dir`. Returns `None` if it does not exist. Blocks.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is larger than 64 KiB, or has no driver or volume handle.
    pub fn load(dir: &Path) -> Result<Option<Self>, CsiError> {
        use std::io::Read as _;
        let path = dir.join(VOLUME_DATA);
        let invalid = |text: &'static str| io::Error::new(io::ErrorKind::InvalidData, text);
        let read = || -> io::Result<Option<Self>> {
            let file = match std::fs::File::open(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(error),
            };
            let mut bytes = Vec::new();
            file.take(MOST_BYTES.saturating_add(1)).read_to_end(&mut bytes)?;
            if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > MOST_BYTES {
                return Err(invalid("the file is larger than 64 KiB"));
            }
            let data: Self = serde_json::from_slice(&bytes)?;
            if data.driver_name.is_empty() || data.volume_handle.is_empty() {
                return Err(invalid("the file has no driverName or no volumeHandle"));
            }
            Ok(Some(data))
        };
        read().map_err(CsiError::file("read volume data file", &path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_data_of_the_kubelet_is_parsed_and_written_with_the_same_keys_in_order() {
        let dir = tempfile::tempdir().unwrap();
        // The kubelet writes a map of strings in the order of its keys.
        let text = concat!(
            r#"{"attachmentID":"csi-1","driverName":"d","nodeName":"n","specVolID":"pv","volumeHandle":"h","#,
            r#""volumeLifecycleMode":"Persistent"}"#,
            "\n"
        );
        std::fs::write(dir.path().join(VOLUME_DATA), text).unwrap();
        let data = VolumeData::load(dir.path()).unwrap().unwrap();
        assert_eq!((data.spec_volume_id.as_str(), data.is_ephemeral()), ("pv", false));
        data.save(dir.path()).unwrap();
        assert_eq!(std::fs::read_to_string(dir.path().join(VOLUME_DATA)).unwrap(), text);
    }

    #[test]
    fn truncated_or_foreign_volume_data_is_an_error_and_a_missing_file_is_none() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(VolumeData::load(dir.path()).unwrap(), None);
        let large = format!(r#"{{"driverName":"d","volumeHandle":"{}"}}"#, "x".repeat(70 << 10));
        for text in ["", "{", "[]", r#"{"driverName":"d"}"#, r#"{"driverName":1,"volumeHandle":"h"}"#, &large]
        {
            std::fs::write(dir.path().join(VOLUME_DATA), text).unwrap();
            let error = VolumeData::load(dir.path()).unwrap_err();
            assert!(error.text().contains("vol_data.json"), "{}", error.text());
        }
    }
}
