//! Removes mount points without deleting the content of a mount.

use std::io;
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use crate::loop_device;

/// Removes a mount point: an empty directory, or a file or link. Returns `false` if something is mounted on
/// it, which the kernel checks at the removal. Succeeds if the path does not exist. Blocks.
///
/// # Errors
/// Fails if the directory has content, and as `rmdir(2)` and `unlink(2)` otherwise.
pub fn remove(path: &Path) -> io::Result<bool> {
    let removed = match rustix::fs::rmdir(path) {
        Err(Errno::NOTDIR) => rustix::fs::unlink(path),
        other => other,
    };
    match removed {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::BUSY) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Unmounts the device that is bound on a file, and removes the file. Succeeds if the path does not exist. A
/// loop device that keeps the mount busy is detached: the kubelet attaches one to the file of each block
/// volume. Blocks.
///
/// # Errors
/// Fails if the mount is busy for another reason, and as `loop_device::detach_all`.
pub fn unmount_device(path: &Path) -> io::Result<()> {
    let mut detached = false;
    let mut looks = loop_device::LOOKS;
    while !remove(path)? {
        match rustix::mount::unmount(path, UnmountFlags::NOFOLLOW) {
            // A loop device that is in use is detached when it is closed.
            Err(Errno::BUSY) if !detached && loop_device::detach_all(path)? => detached = true,
            // The kernel closes the file of a loop device after the device has disappeared from sysfs.
            Err(Errno::BUSY) if detached && looks > 0 => {
                looks = looks.saturating_sub(1);
                std::thread::sleep(loop_device::LOOK);
            }
            unmounted => unmounted?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use nix::mount::{MntFlags, MsFlags, mount, umount2};

    use super::*;

    #[test]
    fn empty_directories_files_and_links_are_removed_and_mounts_and_content_stay() {
        let tmp = tempfile::tempdir().unwrap();
        let [dir, file, link, full] = ["dir", "file", "link", "full"].map(|name| tmp.path().join(name));
        std::fs::create_dir_all(full.join("content")).unwrap();
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(&full, &link).unwrap();
        if nix::unistd::geteuid().is_root() {
            for (source, target) in [(&full, &dir), (&file, &file)] {
                mount(Some(source), target, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
                assert!(!remove(target).unwrap(), "{} is mounted", target.display());
                umount2(target, MntFlags::MNT_DETACH).unwrap();
            }
        }
        for path in [&dir, &file, &link, &dir] {
            assert!(remove(path).unwrap());
            assert!(!path.exists());
        }
        assert!(remove(&full).is_err());
        assert!(full.join("content").exists());
    }
}
