//! Volumes of pods: set up, kept fresh, taken down (pkg/volume, volumes-env.md).

use std::collections::BTreeMap;
use std::path::PathBuf;

/// A volume on the node, ready to be mounted into containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedVolume {
    /// Path on the node.
    pub host_path: PathBuf,
    /// The volume's kind does not let containers write.
    pub read_only: bool,
    /// SELinux labels of its files are the runtime's to set.
    pub relabel: bool,
}

/// Volumes of a pod by their name in its spec.
pub type MountedVolumes = BTreeMap<String, MountedVolume>;
