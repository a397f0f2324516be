//! Removes mount points without deleting the content of a mount. All functions block.

use std::path::Path;

use quintlet_kit::mount_point;
use rustix::mount::UnmountFlags;

use crate::error::Error;

/// Removes a mount point: an empty directory, or a file or link. Returns `false` if it is mounted.
pub(crate) fn mount_point(path: &Path) -> Result<bool, Error> {
    mount_point::remove(path).map_err(Error::file("remove mount point", path))
}

/// Unmounts what is mounted at a path, and removes the mount point. Succeeds if the path does not exist.
pub(crate) fn unmount(path: &Path) -> Result<(), Error> {
    while !mount_point(path)? {
        let unmounted = rustix::mount::unmount(path, UnmountFlags::NOFOLLOW);
        unmounted.map_err(|error| Error::file("unmount", path)(error.into()))?;
    }
    Ok(())
}

/// Unmounts the device that is bound on a file, with a loop device that the kubelet attached to the file, and
/// removes the file.
pub(crate) fn unmount_device(path: &Path) -> Result<(), Error> {
    mount_point::unmount_device(path).map_err(Error::file("unmount", path))
}

/// Removes an empty directory.
pub(crate) fn directory(path: &Path) -> Result<(), Error> {
    match std::fs::remove_dir(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::file("remove directory", path)(error))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}
