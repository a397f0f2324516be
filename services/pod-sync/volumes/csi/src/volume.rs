//! The description of a CSI volume, which all operations take.

use std::collections::BTreeMap;
use std::fmt;

use quintlet_plugin_api::csi::volume_capability::access_mode::Mode;

use crate::volume_data::LifecycleMode;

/// Access mode of a PersistentVolume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AccessMode {
    /// Read and write on one node.
    ReadWriteOnce,
    /// Read on many nodes.
    ReadOnlyMany,
    /// Read and write on many nodes.
    ReadWriteMany,
    /// Read and write in one pod.
    ReadWriteOncePod,
}

impl AccessMode {
    /// Parses the API's name of a mode.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "ReadWriteOnce" => Self::ReadWriteOnce,
            "ReadOnlyMany" => Self::ReadOnlyMany,
            "ReadWriteMany" => Self::ReadWriteMany,
            "ReadWriteOncePod" => Self::ReadWriteOncePod,
            _ => return None,
        })
    }

    /// Returns the mode of CSI, for a driver with or without the capability `SINGLE_NODE_MULTI_WRITER`
    /// (`getNodeV1AccessModeMapper`).
    #[must_use]
    pub fn to_csi(self, single_node_multi_writer: bool) -> Mode {
        match (self, single_node_multi_writer) {
            (Self::ReadWriteOnce | Self::ReadWriteOncePod, false) => Mode::SingleNodeWriter,
            (Self::ReadWriteOnce, true) => Mode::SingleNodeMultiWriter,
            (Self::ReadWriteOncePod, true) => Mode::SingleNodeSingleWriter,
            (Self::ReadOnlyMany, _) => Mode::MultiNodeReaderOnly,
            (Self::ReadWriteMany, _) => Mode::MultiNodeMultiWriter,
        }
    }

    /// Returns the mode that [`Self::to_csi`] converts to a mode of CSI. Modes that no PersistentVolume has
    /// are `None`.
    #[must_use]
    pub fn from_csi(mode: Mode) -> Option<Self> {
        match mode {
            Mode::SingleNodeWriter | Mode::SingleNodeMultiWriter => Some(Self::ReadWriteOnce),
            Mode::SingleNodeSingleWriter => Some(Self::ReadWriteOncePod),
            Mode::MultiNodeReaderOnly => Some(Self::ReadOnlyMany),
            Mode::MultiNodeMultiWriter => Some(Self::ReadWriteMany),
            Mode::SingleNodeReaderOnly | Mode::MultiNodeSingleWriter | Mode::Unknown => None,
        }
    }

    /// Returns the API's name of the mode.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ReadWriteOnce => "ReadWriteOnce",
            Self::ReadOnlyMany => "ReadOnlyMany",
            Self::ReadWriteMany => "ReadWriteMany",
            Self::ReadWriteOncePod => "ReadWriteOncePod",
        }
    }
}

/// Credentials for a driver. `Debug` prints only their number.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secrets(pub BTreeMap<String, String>);

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secrets({})", self.0.len())
    }
}

/// A volume of a CSI driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Name of the driver.
    pub driver: String,
    /// Handle of the volume. That of an inline volume is [`crate::paths::inline_handle`].
    pub handle: String,
    /// Name of the PersistentVolume, or of an inline volume in its pod.
    pub name: String,
    /// Whether the volume outlives its pod.
    pub lifecycle: LifecycleMode,
    /// File system; empty for the driver's default.
    pub fs_type: String,
    /// Access modes of the PersistentVolume; empty for an inline volume. Drivers receive the first one.
    pub access_modes: Vec<AccessMode>,
    /// Whether the volume is published read-only.
    pub read_only: bool,
    /// Mount options of the PersistentVolume.
    pub mount_options: Vec<String>,
    /// Attributes of the volume.
    pub attributes: BTreeMap<String, String>,
    /// The volume is of an in-tree type that the driver replaced.
    pub migrated: bool,
}

impl Volume {
    /// Returns the access mode that drivers receive.
    pub(crate) fn access_mode(&self) -> AccessMode {
        self.access_modes.first().copied().unwrap_or(AccessMode::ReadWriteOnce)
    }

    /// Returns the mount options, with the SELinux label if the volume is mounted with one.
    pub(crate) fn options(&self, selinux_label: Option<&str>) -> Vec<String> {
        // The quotes allow a label with a comma.
        let label = selinux_label.map(|label| format!("context=\"{label}\""));
        self.mount_options.iter().cloned().chain(label).collect()
    }
}

/// Value of `CSIDriver.spec.fsGroupPolicy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum FsGroupPolicy {
    /// Only volumes with a file system type and an access mode for one node or pod.
    #[default]
    ReadWriteOnceWithFsType,
    /// All volumes.
    File,
    /// No volume.
    None,
}

/// Returns whether the agent, not the driver, changes the group of a published volume's files
/// (`supportsFSGroup`). A driver with the capability `VOLUME_MOUNT_GROUP` changes it itself.
#[must_use]
pub fn agent_applies_fs_group(volume: &Volume, fs_group: Option<i64>, policy: FsGroupPolicy) -> bool {
    if fs_group.is_none() || volume.read_only {
        return false;
    }
    match policy {
        FsGroupPolicy::None => false,
        FsGroupPolicy::File => true,
        FsGroupPolicy::ReadWriteOnceWithFsType => {
            let once =
                |mode: &AccessMode| matches!(mode, AccessMode::ReadWriteOnce | AccessMode::ReadWriteOncePod);
            let single = match volume.lifecycle {
                LifecycleMode::Ephemeral => true,
                LifecycleMode::Persistent => volume.access_modes.iter().any(once),
            };
            !volume.fs_type.is_empty() && single
        }
    }
}

/// The pod that a volume is published to, for drivers with `podInfoOnMount`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodInfo {
    /// Name of the pod.
    pub name: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// UID of the pod.
    pub uid: String,
    /// `spec.serviceAccountName`.
    pub service_account: String,
}

impl PodInfo {
    /// Returns the attributes with which a driver is informed of the pod (`getPodInfoAttrs`).
    #[must_use]
    pub fn attributes(&self, lifecycle: LifecycleMode) -> BTreeMap<String, String> {
        let ephemeral = lifecycle == LifecycleMode::Ephemeral;
        [
            ("csi.storage.k8s.io/pod.name", self.name.clone()),
            ("csi.storage.k8s.io/pod.namespace", self.namespace.clone()),
            ("csi.storage.k8s.io/pod.uid", self.uid.clone()),
            ("csi.storage.k8s.io/serviceAccount.name", self.service_account.clone()),
            ("csi.storage.k8s.io/ephemeral", ephemeral.to_string()),
        ]
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(fs_type: &str, modes: &[AccessMode], lifecycle: LifecycleMode) -> Volume {
        Volume {
            driver: "d".into(),
            handle: "h".into(),
            name: "pv".into(),
            lifecycle,
            fs_type: fs_type.into(),
            access_modes: modes.to_vec(),
            read_only: false,
            mount_options: vec!["noatime".into()],
            attributes: BTreeMap::new(),
            migrated: false,
        }
    }

    #[test]
    fn the_agent_applies_fs_group_according_to_the_policy() {
        use AccessMode::{ReadWriteMany, ReadWriteOnce, ReadWriteOncePod};
        use FsGroupPolicy::{File, None, ReadWriteOnceWithFsType};
        use LifecycleMode::{Ephemeral, Persistent};
        let once = &[ReadWriteOnce][..];
        for (fs_type, modes, lifecycle, policy, expected) in [
            ("ext4", once, Persistent, ReadWriteOnceWithFsType, true),
            ("ext4", &[ReadWriteMany, ReadWriteOncePod], Persistent, ReadWriteOnceWithFsType, true),
            ("", once, Persistent, ReadWriteOnceWithFsType, false),
            ("ext4", &[ReadWriteMany], Persistent, ReadWriteOnceWithFsType, false),
            ("ext4", &[], Persistent, ReadWriteOnceWithFsType, false),
            ("ext4", &[], Ephemeral, ReadWriteOnceWithFsType, true),
            ("", &[], Ephemeral, ReadWriteOnceWithFsType, false),
            ("", &[ReadWriteMany], Persistent, File, true),
            ("ext4", once, Persistent, None, false),
        ] {
            let mut volume = volume(fs_type, modes, lifecycle);
            assert_eq!(agent_applies_fs_group(&volume, Some(7), policy), expected, "{volume:?} {policy:?}");
            assert!(!agent_applies_fs_group(&volume, Option::None, policy));
            volume.read_only = true;
            assert!(!agent_applies_fs_group(&volume, Some(7), policy));
        }
    }

    #[test]
    fn access_modes_depend_on_the_capability_for_several_writers() {
        use AccessMode::{ReadOnlyMany, ReadWriteMany, ReadWriteOnce, ReadWriteOncePod};
        for (mode, without, with) in [
            (ReadWriteOnce, Mode::SingleNodeWriter, Mode::SingleNodeMultiWriter),
            (ReadWriteOncePod, Mode::SingleNodeWriter, Mode::SingleNodeSingleWriter),
            (ReadOnlyMany, Mode::MultiNodeReaderOnly, Mode::MultiNodeReaderOnly),
            (ReadWriteMany, Mode::MultiNodeMultiWriter, Mode::MultiNodeMultiWriter),
        ] {
            assert_eq!((mode.to_csi(false), mode.to_csi(true)), (without, with), "{mode:?}");
            assert_eq!(AccessMode::parse(&format!("{mode:?}")), Some(mode));
        }
    }

    #[test]
    fn the_selinux_label_is_a_quoted_mount_option_and_secrets_are_not_printed() {
        let volume = volume("", &[], LifecycleMode::Persistent);
        assert_eq!(volume.options(Some("s0:c1,c2")), ["noatime", "context=\"s0:c1,c2\""]);
        assert_eq!(volume.options(None), ["noatime"]);
        let secrets = Secrets([("password".into(), "hunter2".into())].into());
        assert_eq!(format!("{secrets:?}"), "Secrets(1)");
    }
}
