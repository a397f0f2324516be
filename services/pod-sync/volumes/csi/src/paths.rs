//! The kubelet's directories of CSI volumes
//! (`pkg/volume/csi: makeDeviceMountPath, getTargetPath, getVolumePluginDir`).

use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

/// Name of the plugin as part of a path.
pub const ESCAPED_PLUGIN: &str = "kubernetes.io~csi";
/// Name of the metadata file of a volume.
pub const VOLUME_DATA: &str = "vol_data.json";
/// Name of the mount point in the directory of a staged volume.
pub const GLOBAL_MOUNT: &str = "globalmount";
/// Name of the mount point in the directory of a pod's volume.
pub const MOUNT: &str = "mount";

/// Reason why a field of a volume cannot be part of a path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// The field is empty.
    #[error("missing {0}")]
    Missing(&'static str),
    /// The field would lead out of its directory.
    #[error("{field} {value:?} cannot be part of a path")]
    Unsafe {
        /// Name of the field.
        field: &'static str,
        /// Content of the field, which would lead out of the directory.
        value: String,
    },
}

/// Checks a value that becomes one component of a path.
fn component<'a>(field: &'static str, value: &'a str) -> Result<&'a str, PathError> {
    if value.is_empty() {
        return Err(PathError::Missing(field));
    }
    if value == "." || value == ".." || value.contains(['/', '\0']) {
        return Err(PathError::Unsafe { field, value: value.to_owned() });
    }
    Ok(value)
}

/// Returns the name of a volume in paths: the pod's name of an inline volume, or the name of the
/// PersistentVolume.
fn spec_name(name: &str) -> Result<String, PathError> {
    let escaped = name.replace('/', "~");
    component("volume name", &escaped)?;
    Ok(escaped)
}

/// The root directory.
#[derive(Debug, Clone)]
pub struct Root(PathBuf);

impl Root {
    /// Returns the paths below a root directory.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        Self(root.to_owned())
    }

    /// Returns the directory in which plugins create their registration sockets.
    #[must_use]
    pub fn plugins_registry(&self) -> PathBuf {
        self.0.join("plugins_registry")
    }

    /// Returns the directory of all staged volumes.
    #[must_use]
    pub fn csi(&self) -> PathBuf {
        self.0.join("plugins").join("kubernetes.io").join("csi")
    }

    /// Returns the directory of all pods.
    #[must_use]
    pub fn pods(&self) -> PathBuf {
        self.0.join("pods")
    }

    /// Returns the mount point of a staged volume.
    ///
    /// # Errors
    /// Fails if the driver or the handle is empty, or the driver's name has a slash.
    pub fn global_mount(&self, driver: &str, handle: &str) -> Result<PathBuf, PathError> {
        let driver = component("driver name", driver)?;
        if handle.is_empty() {
            return Err(PathError::Missing("volume id"));
        }
        let hashed = hex::encode(Sha256::digest(handle.as_bytes()));
        Ok(self.csi().join(driver).join(hashed).join(GLOBAL_MOUNT))
    }

    /// Returns the mount point of a pod's volume.
    ///
    /// # Errors
    /// Fails if the UID or the name is empty or would lead out of the pod's directory.
    pub fn mount(&self, pod: &str, volume: &str) -> Result<PathBuf, PathError> {
        let pod = component("pod UID", pod)?;
        Ok(self.pods().join(pod).join("volumes").join(ESCAPED_PLUGIN).join(spec_name(volume)?).join(MOUNT))
    }

    /// Returns the paths of a block volume.
    ///
    /// # Errors
    /// Fails if the name is empty or would lead out of the directory.
    pub fn block(&self, volume: &str) -> Result<BlockPaths, PathError> {
        let devices = self.csi().join("volumeDevices");
        let name = component("volume name", volume)?;
        // A PersistentVolume may have the name of one of the two directories, in which case its files would
        // mix with others'.
        if name == "staging" || name == "publish" {
            return Err(PathError::Unsafe { field: "volume name", value: name.to_owned() });
        }
        Ok(BlockPaths {
            volume: devices.join(name),
            staging: devices.join("staging").join(name),
            publish: devices.join("publish").join(name),
        })
    }

    /// Returns the symbolic link to the device of a pod's block volume.
    ///
    /// # Errors
    /// Fails if the UID or the name is empty or would lead out of the pod's directory.
    pub fn pod_device(&self, pod: &str, volume: &str) -> Result<PathBuf, PathError> {
        let (pod, volume) = (component("pod UID", pod)?, component("volume name", volume)?);
        Ok(self.pods().join(pod).join("volumeDevices").join(ESCAPED_PLUGIN).join(volume))
    }
}

/// The paths of a block volume below `plugins/kubernetes.io/csi/volumeDevices`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockPaths {
    /// Directory with `data/vol_data.json` and `dev`.
    pub volume: PathBuf,
    /// Directory for the driver's staging.
    pub staging: PathBuf,
    /// Directory with one entry per pod.
    pub publish: PathBuf,
}

impl BlockPaths {
    /// Returns the directory of the metadata file.
    #[must_use]
    pub fn data(&self) -> PathBuf {
        self.volume.join("data")
    }

    /// Returns the directory with a link per pod to its device.
    #[must_use]
    pub fn devices(&self) -> PathBuf {
        self.volume.join("dev")
    }

    /// Returns the file that a pod's device is bound to.
    ///
    /// # Errors
    /// Fails if the UID is empty or would lead out of the directory.
    pub fn mapped(&self, pod: &str) -> Result<PathBuf, PathError> {
        Ok(self.devices().join(component("pod UID", pod)?))
    }

    /// Returns the path at which the driver publishes the volume to a pod.
    ///
    /// # Errors
    /// Fails if the UID is empty or would lead out of the directory.
    pub fn published(&self, pod: &str) -> Result<PathBuf, PathError> {
        Ok(self.publish.join(component("pod UID", pod)?))
    }
}

/// Returns the name of the VolumeAttachment object of a volume on a node (`getAttachmentName`).
#[must_use]
pub fn attachment_name(handle: &str, driver: &str, node: &str) -> String {
    format!("csi-{}", hex::encode(Sha256::digest(format!("{handle}{driver}{node}"))))
}

/// Returns the handle of an inline volume (`makeVolumeHandle`).
#[must_use]
pub fn inline_handle(pod_uid: &str, volume: &str) -> String {
    format!("csi-{}", hex::encode(Sha256::digest(format!("{pod_uid}{volume}"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_the_kubelets() {
        let root = Root::new(Path::new("/var/lib/kubelet"));
        // sha256 of "vol-1".
        let hash = "d2e8363faaac7ae76def3b14091d8eb5755f6b92e9531627aeec833a8731cc49";
        let global = root.global_mount("csi.example.com", "vol-1").unwrap();
        assert_eq!(
            global,
            Path::new(&format!(
                "/var/lib/kubelet/plugins/kubernetes.io/csi/csi.example.com/{hash}/globalmount"
            ))
        );
        assert_eq!(
            root.mount("u1", "pv-1").unwrap(),
            Path::new("/var/lib/kubelet/pods/u1/volumes/kubernetes.io~csi/pv-1/mount")
        );
        let block = root.block("pv-1").unwrap();
        let devices = "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices";
        assert_eq!(block.data(), Path::new(&format!("{devices}/pv-1/data")));
        assert_eq!(block.devices(), Path::new(&format!("{devices}/pv-1/dev")));
        assert_eq!(block.staging, Path::new(&format!("{devices}/staging/pv-1")));
        assert_eq!(block.published("u1").unwrap(), Path::new(&format!("{devices}/publish/pv-1/u1")));
        assert_eq!(
            root.pod_device("u1", "pv-1").unwrap(),
            Path::new("/var/lib/kubelet/pods/u1/volumeDevices/kubernetes.io~csi/pv-1")
        );
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        let root = Root::new(Path::new("/r"));
        for driver in ["", ".", "..", "a/b", "../x", "a\0"] {
            assert!(root.global_mount(driver, "h").is_err(), "{driver:?}");
        }
        assert_eq!(root.global_mount("d", "").unwrap_err().to_string(), "missing volume id");
        assert!(root.mount("..", "v").is_err());
        assert!(root.mount("u", "..").is_err());
        assert_eq!(
            root.mount("u", "a/b").unwrap(),
            Path::new("/r/pods/u/volumes/kubernetes.io~csi/a~b/mount")
        );
        for volume in ["", "..", "staging", "publish", "a/b"] {
            assert!(root.block(volume).is_err(), "{volume:?}");
        }
    }
}
