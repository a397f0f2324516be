//! Capacity and usage of a file system (statvfs(3)).

use std::path::Path;

/// Capacity and usage of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSystemUsage {
    /// Size in bytes.
    pub capacity_bytes: u64,
    /// Free bytes for users other than root.
    pub available_bytes: u64,
    /// Bytes in use. What is reserved for root counts as free.
    pub used_bytes: u64,
    /// Number of inodes.
    pub inodes: u64,
    /// Number of unused inodes.
    pub free_inodes: u64,
}

impl FileSystemUsage {
    /// Reads the file system at `path`. Returns `None` if it cannot be read, such as in a directory that this
    /// process may not enter.
    #[must_use]
    pub fn read(path: &Path) -> Option<Self> {
        let fs = nix::sys::statvfs::statvfs(path).ok()?;
        let unit = fs.fragment_size();
        Some(Self {
            capacity_bytes: fs.blocks().saturating_mul(unit),
            available_bytes: fs.blocks_available().saturating_mul(unit),
            used_bytes: fs.blocks().saturating_sub(fs.blocks_free()).saturating_mul(unit),
            inodes: fs.files(),
            free_inodes: fs.files_free(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usage_of_a_file_system_fits_its_capacity_and_a_missing_path_has_none() {
        let dir = tempfile::tempdir().unwrap();
        let usage = FileSystemUsage::read(dir.path()).unwrap();
        assert!(usage.capacity_bytes > 0, "{usage:?}");
        assert!(usage.available_bytes + usage.used_bytes <= usage.capacity_bytes, "{usage:?}");
        assert!(usage.free_inodes <= usage.inodes, "{usage:?}");
        assert_eq!(FileSystemUsage::read(&dir.path().join("missing")), None);
    }
}
