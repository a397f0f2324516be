//! The commands on projects that a file system has.

use std::io;
use std::path::{Path, PathBuf};

/// Usage of a project.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QuotaUsage {
    /// Bytes on disk.
    pub bytes: u64,
    /// Number of inodes.
    pub inodes: u64,
}

/// A mounted file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Mount point.
    pub path: PathBuf,
    /// File system type, such as `xfs`.
    pub fs_type: String,
    /// The line of the mount in `/proc/self/mounts`.
    pub line: String,
}

/// The commands on projects of a file system. Each blocks, and fails if the file system or its tool does.
#[allow(clippy::missing_errors_doc, reason = "all commands have the same error")]
pub trait QuotaTool: Send + Sync {
    /// Returns whether the file system counts the usage of projects.
    fn has_accounting(&self, mount: &Mount) -> io::Result<bool>;

    /// Returns the project of a directory; 0 is none.
    fn project_of(&self, dir: &Path) -> io::Result<u32>;

    /// Moves a directory and what is in it to a project. What is created in it belongs to the project, too.
    fn set_project(&self, mount: &Mount, dir: &Path, id: u32) -> io::Result<()>;

    /// Returns the usage of a project.
    fn usage(&self, mount: &Mount, id: u32) -> io::Result<QuotaUsage>;
}
