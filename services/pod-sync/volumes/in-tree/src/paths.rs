//! The kubelet's directories of the volumes.

use std::path::{Path, PathBuf};

use quintlet_model::ids::PodUid;

use crate::error::Error;
use crate::volume::{Plugin, Source, Volume};

/// Directory of block volumes.
const BLOCK: &str = "volumeDevices";

/// The paths below a root directory.
#[derive(Debug, Clone)]
pub struct Paths(PathBuf);

/// Checks a value that becomes one component of a path.
fn component(value: &str) -> Result<&str, Error> {
    if value.is_empty() || value == "." || value == ".." || value.contains(['/', '\0']) {
        return Err(Error::Name { field: "volume name", value: value.to_owned() });
    }
    Ok(value)
}

impl Paths {
    /// Returns the paths below a root directory of the kubelet.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        Self(root.to_owned())
    }

    /// Returns the directory of all pods.
    pub(crate) fn pods(&self) -> PathBuf {
        self.0.join("pods")
    }

    /// Returns the directory of a pod's volumes of a plugin.
    pub(crate) fn volumes(&self, plugin: Plugin, pod: &Path) -> PathBuf {
        pod.join("volumes").join(plugin.escaped_name())
    }

    /// Returns the mount point of a pod's volume (`GetPodVolumeDir`).
    ///
    /// # Errors
    /// Fails if the name would lead out of the directory.
    pub fn mount(&self, plugin: Plugin, pod: &PodUid, name: &str) -> Result<PathBuf, Error> {
        Ok(self.volumes(plugin, &self.pods().join(pod.as_str())).join(component(name)?))
    }

    /// Returns the directory of the mounted devices of `local` volumes.
    pub(crate) fn device_mounts(&self) -> PathBuf {
        self.0.join("plugins").join(Plugin::Local.name()).join("mounts")
    }

    /// Returns the mount point of the device of a `local` volume.
    ///
    /// # Errors
    /// Fails if the name would lead out of the directory.
    pub fn device_mount(&self, name: &str) -> Result<PathBuf, Error> {
        Ok(self.device_mounts().join(component(name)?))
    }

    /// Returns the directory with the global directories of a plugin's disks.
    pub(crate) fn disks(&self, plugin: Plugin, is_block: bool) -> PathBuf {
        let of_plugin = self.0.join("plugins").join(plugin.name());
        if is_block { of_plugin.join(BLOCK) } else { of_plugin }
    }

    /// Returns the global directory of a disk (`GetDeviceMountPath`, `GetGlobalMapPath`).
    ///
    /// # Errors
    /// Fails if a part of the name would lead out of the directory.
    pub fn disk(&self, plugin: Plugin, is_block: bool, name: &str) -> Result<PathBuf, Error> {
        let mut path = self.disks(plugin, is_block);
        let (first, rest) = match plugin {
            // An interface and a disk.
            Plugin::Iscsi => name.split_once('/').map_or((name, None), |(iface, disk)| (iface, Some(disk))),
            Plugin::Fc | Plugin::Local | Plugin::HostPath | Plugin::Nfs => (name, None),
        };
        for part in std::iter::once(first).chain(rest) {
            path.push(component(part)?);
        }
        match path.file_name().is_some_and(|last| last == BLOCK) {
            true => Err(Error::Name { field: "volume name", value: name.to_owned() }),
            false => Ok(path),
        }
    }

    /// Returns the directory of all block volumes of a plugin.
    pub(crate) fn block_volumes(&self, plugin: Plugin) -> PathBuf {
        match plugin.is_disk() {
            true => self.disks(plugin, true),
            false => self.0.join("plugins").join(plugin.escaped_name()).join(BLOCK),
        }
    }

    /// Returns the directory with one file per pod, on which the device of a block volume is bound
    /// (`GetGlobalMapPath`).
    ///
    /// # Errors
    /// Fails if the name would lead out of the directory.
    pub fn block_volume(&self, plugin: Plugin, name: &str) -> Result<PathBuf, Error> {
        match plugin.is_disk() {
            true => self.disk(plugin, true, name),
            false => Ok(self.block_volumes(plugin).join(component(name)?)),
        }
    }

    /// Returns the directory of a pod's links to its block volumes.
    pub(crate) fn links(&self, plugin: Plugin, pod: &Path) -> PathBuf {
        pod.join(BLOCK).join(plugin.escaped_name())
    }

    /// Returns a pod's link to its device (`GetPodDeviceMapPath`).
    ///
    /// # Errors
    /// Fails if the name would lead out of the directory.
    pub fn link(&self, plugin: Plugin, pod: &PodUid, name: &str) -> Result<PathBuf, Error> {
        Ok(self.links(plugin, &self.pods().join(pod.as_str())).join(component(name)?))
    }

    /// Returns the path that containers of a pod mount.
    ///
    /// # Errors
    /// Fails if the name would lead out of its directory.
    pub fn host_path(&self, volume: &Volume, pod: &PodUid) -> Result<PathBuf, Error> {
        match &volume.source {
            Source::HostPath { path, .. } => Ok(PathBuf::from(path)),
            Source::Local { .. } | Source::Iscsi(_) | Source::Fc(_) if volume.is_block => {
                self.link(volume.plugin(), pod, &volume.name)
            }
            Source::Local { .. } | Source::Nfs { .. } | Source::Iscsi(_) | Source::Fc(_) => {
                self.mount(volume.plugin(), pod, &volume.name)
            }
        }
    }
}
