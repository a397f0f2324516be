//! Removes the directories of a volume without deleting the content of a mount (`removeMountDir`).
//!
//! Only empty directories, the metadata file and a file that served as a mount point are removed. The kernel
//! refuses to remove a mount point, so a mount that appears concurrently is safe, too. All functions block.

use std::fs;
use std::io;
use std::path::Path;

use quintlet_kit::mount_point;

use crate::error::CsiError;
use crate::paths::VOLUME_DATA;

/// Removes a mount point: an empty directory, or a file or link. Returns `false` if it is mounted.
pub(crate) fn mount_point(path: &Path) -> Result<bool, CsiError> {
    mount_point::remove(path).map_err(CsiError::file("remove mount point", path))
}

/// Unmounts the device that is bound on a file, with a loop device that the kubelet attached to the file, and
/// removes the file.
pub(crate) fn unmount_device(path: &Path) -> Result<(), CsiError> {
    mount_point::unmount_device(path).map_err(CsiError::file("unmount", path))
}

/// Removes the metadata file in a directory, and those that processes were writing when they were killed.
pub(crate) fn data(dir: &Path) -> Result<(), CsiError> {
    let remove =
        |path: &Path| absent(fs::remove_file(path)).map_err(CsiError::file("delete volume data file", path));
    remove(&dir.join(VOLUME_DATA))?;
    let prefix = format!(".{VOLUME_DATA}.");
    // A directory that cannot be read is not removed either, which has the reason.
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// Removes a file or a link.
pub(crate) fn file(path: &Path) -> Result<(), CsiError> {
    absent(fs::remove_file(path)).map_err(CsiError::file("remove", path))
}

/// Removes an empty directory.
pub(crate) fn directory(dir: &Path) -> Result<(), CsiError> {
    absent(fs::remove_dir(dir)).map_err(CsiError::file("delete volume path", dir))
}

fn absent(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
