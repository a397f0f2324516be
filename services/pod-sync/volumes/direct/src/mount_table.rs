//! The mount table of the kernel.

use std::io;
use std::path::{Path, PathBuf};

use quintlet_kit::mount_table;
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags};

/// A line of `/proc/self/mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// Mount point, with escapes decoded.
    pub path: PathBuf,
    /// File system type, for example `tmpfs` or `hugetlbfs`.
    pub fs_type: String,
    /// `pagesize` of a hugetlbfs, as the kernel writes it.
    pub page_size: Option<String>,
    /// Whether the mount has shared propagation.
    pub shared: bool,
}

/// A source of mount entries. Tests implement it with their own entries.
pub trait MountTable: Send + Sync {
    /// Returns all mounts of this mount namespace, oldest first.
    ///
    /// # Errors
    /// The mount table cannot be read.
    fn entries(&self) -> io::Result<Vec<MountEntry>>;

    /// Returns whether something is mounted on a file or directory. Returns `None` if only
    /// [`MountTable::entries`] can answer that; reading the whole table is expensive on a full node.
    fn is_mount_point(&self, path: &Path) -> Option<bool> {
        let _ = path;
        None
    }

    /// Returns the type of the file system that is mounted on a directory, or `None` if nothing is mounted
    /// there.
    ///
    /// # Errors
    /// The mount table cannot be read.
    fn file_system_at(&self, path: &Path) -> io::Result<Option<String>> {
        Ok(mount_at(self, path)?.map(|m| m.fs_type))
    }
}

/// The kernel's mount table of this process.
#[derive(Debug, Clone, Copy, Default)]
pub struct ProcMountTable;

impl MountTable for ProcMountTable {
    fn entries(&self) -> io::Result<Vec<MountEntry>> {
        let entry = |mount: mount_table::Mount| MountEntry {
            page_size: mount.option("pagesize").map(str::to_owned),
            path: mount.path,
            fs_type: mount.fs_type,
            shared: mount.is_shared,
        };
        Ok(mount_table::read()?.into_iter().map(entry).collect())
    }

    // Linux 5.8 and later.
    fn is_mount_point(&self, path: &Path) -> Option<bool> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        let stat = rustix::fs::statx(CWD, path, flags, StatxFlags::empty()).ok()?;
        let known = stat.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT);
        known.then(|| stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
    }

    fn file_system_at(&self, path: &Path) -> io::Result<Option<String>> {
        match self.is_mount_point(path) {
            Some(false) => Ok(None),
            Some(true) if rustix::fs::statfs(path)?.f_type == TMPFS_MAGIC => Ok(Some("tmpfs".to_owned())),
            Some(true) | None => Ok(mount_at(self, path)?.map(|m| m.fs_type)),
        }
    }
}

/// File system type of a tmpfs, as `statfs(2)` reports it.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Returns the mount on a path; the newest if there are several.
///
/// # Errors
/// The mount table cannot be read.
pub fn mount_at(table: &(impl MountTable + ?Sized), path: &Path) -> io::Result<Option<MountEntry>> {
    if table.is_mount_point(path) == Some(false) {
        return Ok(None);
    }
    let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    Ok(table.entries()?.into_iter().rev().find(|e| e.path == path || e.path == real))
}

/// Returns the mounts at or below a path, newest first.
#[cfg(test)]
pub(crate) fn mounts_below(table: &dyn MountTable, path: &Path) -> io::Result<Vec<PathBuf>> {
    let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let all = table.entries()?.into_iter().rev();
    Ok(all.filter(|e| e.path.starts_with(&real) || e.path.starts_with(path)).map(|e| e.path).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_point_is_known_without_the_table() {
        let tmp = tempfile::tempdir().unwrap();
        let (dir, file) = (tmp.path().join("d"), tmp.path().join("f"));
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(&file, "").unwrap();
        for path in [&dir, &file] {
            assert_eq!(ProcMountTable.is_mount_point(path), Some(false));
            rustix::mount::mount_bind(path, path).unwrap();
            assert_eq!(ProcMountTable.is_mount_point(path), Some(true));
            assert_eq!(mount_at(&ProcMountTable, path).unwrap().unwrap().path, *path);
            let link = tmp.path().join("link");
            std::os::unix::fs::symlink(path, &link).unwrap();
            assert_eq!(ProcMountTable.is_mount_point(&link), Some(false), "links are not followed");
            std::fs::remove_file(&link).unwrap();
            let type_of = |path: &Path| ProcMountTable.file_system_at(path).unwrap();
            assert_eq!(type_of(path), mount_at(&ProcMountTable, path).unwrap().map(|m| m.fs_type));
            rustix::mount::unmount(path, rustix::mount::UnmountFlags::empty()).unwrap();
            assert_eq!(mount_at(&ProcMountTable, path).unwrap(), None);
            assert_eq!(type_of(path), None);
        }
        rustix::mount::mount(c"tmpfs", &dir, c"tmpfs", rustix::mount::MountFlags::empty(), None).unwrap();
        assert_eq!(ProcMountTable.file_system_at(&dir).unwrap().as_deref(), Some("tmpfs"));
        rustix::mount::unmount(&dir, rustix::mount::UnmountFlags::empty()).unwrap();
        assert_eq!(ProcMountTable.is_mount_point(&tmp.path().join("absent")), None);
    }
}
