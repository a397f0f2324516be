//! What a PersistentVolume or a volume of a pod describes.

use k8s_openapi::api::core::v1::{
    HostPathVolumeSource, LocalVolumeSource, NFSVolumeSource, PersistentVolumeSpec, Volume as PodVolume,
};

/// A volume plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Plugin {
    /// A directory or block device of the node.
    Local,
    /// A path of the node, which containers mount as it is.
    HostPath,
    /// A directory of an NFS server.
    Nfs,
}

impl Plugin {
    /// Returns the name of the plugin.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "kubernetes.io/local-volume",
            Self::HostPath => "kubernetes.io/host-path",
            Self::Nfs => "kubernetes.io/nfs",
        }
    }

    /// Returns the name of the plugin as part of a path (`EscapeQualifiedName`).
    #[must_use]
    pub fn escaped_name(self) -> &'static str {
        match self {
            Self::Local => "kubernetes.io~local-volume",
            Self::HostPath => "kubernetes.io~host-path",
            Self::Nfs => "kubernetes.io~nfs",
        }
    }
}

/// Source of the content of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// `local`: a directory, or a block device with a file system.
    Local {
        path: String,
        /// File system of a block device.
        fs_type: Option<String>,
    },
    /// `hostPath`: a path and the type that it must have; empty for any.
    HostPath { path: String, kind: String },
    /// `nfs`: a server and a directory that it exports.
    Nfs { server: String, path: String },
}

/// A volume that the node agent mounts without a driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Name of the PersistentVolume, or of the volume in its pod.
    pub name: String,
    pub source: Source,
    /// Whether the pod gets a block device.
    pub is_block: bool,
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
        spec.nfs.as_ref().map(Self::nfs)
    }

    fn nfs(source: &NFSVolumeSource) -> Self {
        Self::Nfs { server: source.server.clone(), path: source.path.clone() }
    }

    #[must_use]
    pub fn plugin(&self) -> Plugin {
        match self {
            Self::Local { .. } => Plugin::Local,
            Self::HostPath { .. } => Plugin::HostPath,
            Self::Nfs { .. } => Plugin::Nfs,
        }
    }
}

impl Volume {
    /// Returns a volume of a pod that has no PersistentVolume, or `None` if another plugin provides it.
    #[must_use]
    pub fn of_pod(volume: &PodVolume) -> Option<Self> {
        let source = volume.nfs.as_ref()?;
        Some(Self {
            name: volume.name.clone(),
            source: Source::nfs(source),
            is_block: false,
            read_only: source.read_only.unwrap_or(false),
            mount_options: Vec::new(),
        })
    }

    #[must_use]
    pub fn plugin(&self) -> Plugin {
        self.source.plugin()
    }

    /// Returns whether the runtime relabels the content for SELinux (`GetAttributes`).
    #[must_use]
    pub fn relabel(&self) -> bool {
        self.plugin() == Plugin::Local && !self.read_only
    }
}
