//! What a PersistentVolume or a volume of a pod describes.

use k8s_openapi::api::core::v1::{
    HostPathVolumeSource, LocalVolumeSource, NFSVolumeSource, PersistentVolumeSpec, Volume as PodVolume,
};

use crate::fc::FcSource;
use crate::iscsi::{IscsiSource, SecretRef};

/// A volume plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Plugin {
    /// A directory or block device of the node.
    Local,
    /// A path of the node, which containers mount as it is.
    HostPath,
    /// A directory of an NFS server.
    Nfs,
    /// A disk of an iSCSI target.
    Iscsi,
    /// A Fibre Channel disk.
    Fc,
}

impl Plugin {
    /// Returns the name of the plugin.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "kubernetes.io/local-volume",
            Self::HostPath => "kubernetes.io/host-path",
            Self::Nfs => "kubernetes.io/nfs",
            Self::Iscsi => "kubernetes.io/iscsi",
            Self::Fc => "kubernetes.io/fc",
        }
    }

    /// Returns the name of the plugin as part of a path (`EscapeQualifiedName`).
    #[must_use]
    pub fn escaped_name(self) -> &'static str {
        match self {
            Self::Local => "kubernetes.io~local-volume",
            Self::HostPath => "kubernetes.io~host-path",
            Self::Nfs => "kubernetes.io~nfs",
            Self::Iscsi => "kubernetes.io~iscsi",
            Self::Fc => "kubernetes.io~fc",
        }
    }

    /// Returns whether the node agent attaches disks of the plugin, which a controller marks as attached.
    #[must_use]
    pub fn is_disk(self) -> bool {
        match self {
            Self::Iscsi | Self::Fc => true,
            Self::Local | Self::HostPath | Self::Nfs => false,
        }
    }
}

/// Source of the content of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// `local`: a directory, or a block device with a file system.
    Local {
        /// Path of the directory or device on the node.
        path: String,
        /// File system of a block device.
        fs_type: Option<String>,
    },
    /// `hostPath`: a path and the type that it must have; empty for any.
    HostPath {
        /// Path on the node.
        path: String,
        /// `type` of the volume; empty: no check.
        kind: String,
    },
    /// `nfs`: a server and a directory that it exports.
    Nfs {
        /// Name or address of the server.
        server: String,
        /// Path that the server exports.
        path: String,
    },
    /// `iscsi`: a LUN of a target.
    Iscsi(IscsiSource),
    /// `fc`: a LUN of target ports, or a disk by its identifiers.
    Fc(FcSource),
}

/// A volume that the node agent mounts without a driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Name of the PersistentVolume, or of the volume in its pod.
    pub name: String,
    /// Kind and place of the content.
    pub source: Source,
    /// Whether the pod gets a block device.
    pub is_block: bool,
    /// Whether the pod requests the volume read-only. [`Volume::is_read_only`] counts mount options, too.
    pub read_only: bool,
    /// Mount options of the PersistentVolume.
    pub mount_options: Vec<String>,
}

impl Source {
    /// Returns the source of a PersistentVolume, or `None` if another plugin provides it.
    #[must_use]
    pub fn of_persistent_volume(spec: &PersistentVolumeSpec) -> Option<Self> {
        if let Some(LocalVolumeSource { path, fs_type }) = &spec.local {
            return Some(Self::Local { path: path.clone(), fs_type: fs_type.clone() });
        }
        if let Some(HostPathVolumeSource { path, type_ }) = &spec.host_path {
            return Some(Self::HostPath { path: path.clone(), kind: type_.clone().unwrap_or_default() });
        }
        if let Some(source) = &spec.iscsi {
            return Some(Self::Iscsi(source.into()));
        }
        if let Some(source) = &spec.fc {
            return Some(Self::Fc(source.into()));
        }
        spec.nfs.as_ref().map(Self::nfs)
    }

    fn nfs(source: &NFSVolumeSource) -> Self {
        Self::Nfs { server: source.server.clone(), path: source.path.clone() }
    }

    /// Returns the plugin of the kubelet for this kind.
    #[must_use]
    pub fn plugin(&self) -> Plugin {
        match self {
            Self::Local { .. } => Plugin::Local,
            Self::HostPath { .. } => Plugin::HostPath,
            Self::Nfs { .. } => Plugin::Nfs,
            Self::Iscsi(_) => Plugin::Iscsi,
            Self::Fc(_) => Plugin::Fc,
        }
    }

    /// Returns the Secret with the CHAP credentials of an iSCSI volume that uses them.
    #[must_use]
    pub fn chap_secret(&self) -> Option<&SecretRef> {
        match self {
            Self::Iscsi(source) if source.chap_discovery || source.chap_session => source.secret.as_ref(),
            Self::Iscsi(_) | Self::Fc(_) | Self::Local { .. } | Self::HostPath { .. } | Self::Nfs { .. } => {
                None
            }
        }
    }
}

impl Volume {
    /// Returns a volume of a pod that has no PersistentVolume, or `None` if another plugin provides it.
    #[must_use]
    pub fn of_pod(volume: &PodVolume) -> Option<Self> {
        let (source, read_only) = if let Some(source) = &volume.iscsi {
            (Source::Iscsi(source.into()), source.read_only)
        } else if let Some(source) = &volume.fc {
            (Source::Fc(source.into()), source.read_only)
        } else {
            let source = volume.nfs.as_ref()?;
            (Source::nfs(source), source.read_only)
        };
        Some(Self {
            name: volume.name.clone(),
            source,
            is_block: false,
            read_only: read_only.unwrap_or(false),
            mount_options: Vec::new(),
        })
    }

    /// Returns the path of the directory of the volume's device below that of its plugin.
    #[must_use]
    pub fn device_name(&self) -> String {
        match &self.source {
            Source::Iscsi(source) => source.disk(&self.name).directory(),
            Source::Fc(source) => source.disk().map(|disk| disk.directory()).unwrap_or_default(),
            Source::Local { .. } | Source::HostPath { .. } | Source::Nfs { .. } => self.name.clone(),
        }
    }

    /// Returns the plugin of the kubelet for the volume.
    #[must_use]
    pub fn plugin(&self) -> Plugin {
        self.source.plugin()
    }

    /// Returns whether the volume is mounted read-only, by its field or by the mount option `ro`
    /// (`k8s.io/mount-utils: formatAndMountSensitive`). Another host may write its device then.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        // mount(8) also splits an option at its commas.
        self.read_only || self.mount_options.iter().flat_map(|o| o.split(',')).any(|o| o.trim() == "ro")
    }

    /// Returns whether the runtime relabels the content for SELinux (`GetAttributes`).
    #[must_use]
    pub fn relabel(&self) -> bool {
        match self.plugin() {
            Plugin::Local | Plugin::Iscsi | Plugin::Fc => !self.is_read_only(),
            Plugin::HostPath | Plugin::Nfs => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_option_makes_a_volume_read_only_as_its_field_does() {
        let source = Source::Local { path: "/d".to_owned(), fs_type: None };
        let plain = Volume {
            name: "v".to_owned(),
            source,
            is_block: false,
            read_only: false,
            mount_options: Vec::new(),
        };
        for (read_only, options, want) in [
            (false, &[][..], false),
            (true, &[], true),
            (false, &["noatime", "ro"], true),
            (false, &["noatime,ro"], true),
            (false, &["noatime, ro"], true),
            (false, &["errors=remount-ro", "rw", "norecovery"], false),
            (true, &["rw"], true),
        ] {
            let mount_options = options.iter().map(|option| (*option).to_owned()).collect();
            let volume = Volume { read_only, mount_options, ..plain.clone() };
            assert_eq!(volume.is_read_only(), want, "{read_only} {options:?}");
            assert_eq!(volume.relabel(), !want, "{read_only} {options:?}");
        }
    }
}
