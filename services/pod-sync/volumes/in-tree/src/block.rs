//! Block devices of `local` volumes and of disks, which containers get as devices.
//!
//! The device is bound on a file per pod, and linked in the pod's directory. The kubelet also attaches a loop
//! device to the file. This crate attaches none, and detaches that of a kubelet whose volumes it takes over.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use quintlet_kit::failpoint::step;
use quintlet_kit::task;
use quintlet_model::ids::PodUid;

use crate::error::Error;
use crate::mount::{Mounter, make_directory};
use crate::paths::Paths;
use crate::removal;
use crate::volume::{Plugin, Source, Volume};

/// Makes block devices available to pods.
#[derive(Debug, Clone)]
pub struct BlockMapper {
    paths: Paths,
}

impl BlockMapper {
    /// Returns a mapper for the root directory of `mounter`.
    #[must_use]
    pub fn of(mounter: &Mounter) -> Self {
        Self { paths: mounter.paths.clone() }
    }

    /// Checks that a volume is a block device.
    ///
    /// # Errors
    /// The plugin has no block volumes, or the path of a `local` volume is not a block device.
    pub async fn check(&self, volume: &Volume) -> Result<(), Error> {
        match &volume.source {
            Source::Local { path, .. } => {
                let path = path.clone();
                task::blocking(move || device_of(&path)).await.map(drop)
            }
            Source::Fc(source) if source.disk().is_none() => Err(Error::NoDisk("mapper")),
            Source::Iscsi(_) | Source::Fc(_) => {
                self.paths.disk(volume.plugin(), volume.is_block, &volume.device_name()).map(drop)
            }
            Source::HostPath { .. } | Source::Nfs { .. } => Err(Error::NoBlock(volume.plugin().name())),
        }
    }

    /// Makes the device of a `local` volume, or the `attached` one of a disk, available to a pod
    /// (`MapPodDevice`, `MapBlockVolume`).
    ///
    /// # Errors
    /// The device cannot be bound or linked. Call [`BlockMapper::unmap`] to remove what was made.
    pub async fn map(&self, volume: &Volume, attached: Option<&Path>, pod: &PodUid) -> Result<(), Error> {
        let path = match (&volume.source, attached) {
            (_, Some(device)) => device.display().to_string(),
            (Source::Local { path, .. }, None) => path.clone(),
            (_, None) => return Err(Error::NoBlock(volume.plugin().name())),
        };
        let plugin = volume.plugin();
        let directory = self.paths.block_volume(plugin, &volume.device_name())?;
        let link = self.paths.link(plugin, pod, &volume.name)?;
        let device = task::blocking(move || device_of(&path)).await?;
        let bound = directory.join(pod.as_str());
        let source = device.clone();
        step!("block device bound", task::blocking(move || bind(&source, &bound)))?;
        step!("block device linked", task::blocking(move || make_link(&device, &link)))
    }

    /// Removes the device of a pod (`UnmapBlockVolume`). `device` is the name of its directory
    /// ([`Volume::device_name`]), `None` if it is not known.
    ///
    /// # Errors
    /// The mount is busy. The volume then counts as mounted.
    pub async fn unmap(
        &self,
        plugin: Plugin,
        pod: &PodUid,
        name: &str,
        device: Option<&str>,
    ) -> Result<(), Error> {
        let link = self.paths.link(plugin, pod, name)?;
        step!("link to block device removed", task::blocking(move || removal::mount_point(&link)))?;
        let Some(device) = device else { return Ok(()) };
        let bound = self.paths.block_volume(plugin, device)?.join(pod.as_str());
        step!("block device unmounted", task::blocking(move || removal::unmount_device(&bound)))
    }

    /// Removes the directory of a `local` block volume (`RemoveMapPath`).
    ///
    /// # Errors
    /// A pod has the device.
    pub async fn unmap_device(&self, name: &str) -> Result<(), Error> {
        let directory = self.paths.block_volume(Plugin::Local, name)?;
        step!("directory of block device removed", task::blocking(move || removal::directory(&directory)))
    }
}

/// Returns the device at a path, without links.
fn device_of(path: &str) -> Result<PathBuf, Error> {
    if path.is_empty() {
        return Err(Error::NoPath);
    }
    let read = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::Absent(path.to_owned()),
        _ => Error::file("read", Path::new(path))(error),
    };
    let real = fs::canonicalize(path).map_err(read)?;
    let kind = fs::metadata(&real).map_err(Error::file("read", &real))?.file_type();
    if kind.is_block_device() { Ok(real) } else { Err(Error::NotBlockDevice(path.to_owned())) }
}

/// Creates a file and bind-mounts a device on it. A file that is a mount point was bound by an earlier
/// process.
fn bind(device: &Path, target: &Path) -> Result<(), Error> {
    if !removal::mount_point(target)? {
        return Ok(());
    }
    if let Some(directory) = target.parent() {
        make_directory(directory)?;
    }
    fs::File::create_new(target).map_err(Error::file("create", target))?;
    rustix::mount::mount_bind(device, target).map_err(|error| Error::file("bind", target)(error.into()))
}

/// Creates a symbolic link, or replaces an existing one.
fn make_link(device: &Path, link: &Path) -> Result<(), Error> {
    if let Some(directory) = link.parent() {
        make_directory(directory)?;
    }
    removal::mount_point(link)?;
    std::os::unix::fs::symlink(device, link).map_err(Error::file("create link", link))
}
