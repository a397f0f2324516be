//! Volumes that the directories describe, after a restart (`pkg/volume/csi: ConstructVolumeSpec`).

use std::ffi::OsString;
use std::fs::{self, FileType};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::CsiError;
use crate::paths::{ESCAPED_PLUGIN, GLOBAL_MOUNT, MOUNT, Root};
use crate::volume_data::VolumeData;

/// A volume directory.
#[derive(Debug)]
pub struct VolumeDir {
    /// The directory.
    pub path: PathBuf,
    /// The metadata; `None` if the process ended before it was written, or after it was removed.
    pub data: Result<Option<VolumeData>, CsiError>,
}

/// A directory of a pod's volume.
#[derive(Debug)]
pub struct FoundInPod {
    /// UID of the pod.
    pub pod: String,
    /// Name of the directory: the volume's name with `~` for `/`.
    pub name: String,
    /// The directory with its metadata.
    pub found: VolumeDir,
}

/// Returns the published volumes of all pods, sorted by path. Blocks.
///
/// # Errors
/// Fails if a directory cannot be read.
pub fn published(root: &Root) -> io::Result<Vec<FoundInPod>> {
    let mut volumes = Vec::new();
    for pod in directories(&root.pods())? {
        let of_plugin = pod.join("volumes").join(ESCAPED_PLUGIN);
        for dir in directories(&of_plugin)? {
            volumes.push(FoundInPod {
                pod: name(&pod),
                name: name(&dir),
                found: VolumeDir { path: dir.join(MOUNT), data: VolumeData::load(&dir) },
            });
        }
    }
    Ok(volumes)
}

/// Returns the block volumes of all pods, sorted by the path of the pod's link. Blocks.
///
/// # Errors
/// Fails if a directory cannot be read.
pub fn block_volumes(root: &Root) -> io::Result<Vec<FoundInPod>> {
    let mut volumes = Vec::new();
    for pod in directories(&root.pods())? {
        for link in entries(&pod.join("volumeDevices").join(ESCAPED_PLUGIN), |kind| kind.is_symlink())? {
            let volume = name(&link);
            let data = root.block(&volume).map_err(CsiError::from);
            let data = data.and_then(|paths| VolumeData::load(&paths.data()));
            volumes.push(FoundInPod { pod: name(&pod), name: volume, found: VolumeDir { path: link, data } });
        }
    }
    Ok(volumes)
}

/// Returns the staged volumes, sorted by path. Blocks.
///
/// # Errors
/// Fails if a directory cannot be read.
pub fn staged(root: &Root) -> io::Result<Vec<VolumeDir>> {
    let mut volumes = Vec::new();
    for driver in directories(&root.csi())? {
        if name(&driver) == "volumeDevices" {
            continue;
        }
        for dir in directories(&driver)? {
            volumes.push(VolumeDir { path: dir.join(GLOBAL_MOUNT), data: VolumeData::load(&dir) });
        }
    }
    Ok(volumes)
}

/// Directories of a block volume that no pod's link leads to.
#[derive(Debug)]
pub struct FoundBlock {
    /// Name of the volume.
    pub name: String,
    /// UIDs of the pods that have a device of the volume, or may have one.
    pub pods: Vec<String>,
    /// The metadata.
    pub data: Result<Option<VolumeData>, CsiError>,
}

/// Returns the block volumes below the directory of the plugin, sorted by name. Blocks.
///
/// # Errors
/// Fails if a directory cannot be read.
pub fn staged_blocks(root: &Root) -> io::Result<Vec<FoundBlock>> {
    let mut volumes = Vec::new();
    for dir in directories(&root.csi().join("volumeDevices"))? {
        let volume = name(&dir);
        // The directories `staging` and `publish` are no volumes.
        let Ok(paths) = root.block(&volume) else { continue };
        let mut pods: Vec<String> = Vec::new();
        for of_pods in [&paths.publish, &paths.devices()] {
            pods.extend(entries(of_pods, |_| true)?.iter().map(|path| name(path)));
        }
        pods.sort();
        pods.dedup();
        volumes.push(FoundBlock { name: volume, pods, data: VolumeData::load(&paths.data()) });
    }
    Ok(volumes)
}

/// Returns the directories in a directory, sorted. Links are skipped. A directory that does not exist is
/// empty.
fn directories(dir: &Path) -> io::Result<Vec<PathBuf>> {
    entries(dir, |kind| kind.is_dir())
}

fn entries(dir: &Path, wanted: impl Fn(FileType) -> bool) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        if wanted(entry.file_type()?) {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

fn name(path: &Path) -> String {
    path.file_name().map(OsString::from).unwrap_or_default().to_string_lossy().into_owned()
}
