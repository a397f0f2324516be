//! The mount table of the kernel.

use std::io;
use std::path::{Path, PathBuf};

use procfs::process::MountOptFields;

/// A line of `/proc/self/mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
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
}

/// The kernel's mount table of this process.
#[derive(Debug, Clone, Copy, Default)]
pub struct ProcMountTable;

impl MountTable for ProcMountTable {
    fn entries(&self) -> io::Result<Vec<MountEntry>> {
        let table =
            procfs::process::Process::myself().and_then(|p| p.mountinfo()).map_err(io::Error::other)?;
        Ok(table
            .0
            .into_iter()
            .map(|m| MountEntry {
                path: unescape(&m.mount_point),
                fs_type: m.fs_type,
                page_size: m.super_options.get("pagesize").cloned().flatten(),
                shared: m.opt_fields.iter().any(|o| matches!(o, MountOptFields::Shared(_))),
            })
            .collect())
    }
}

// The kernel writes space, tab, newline and backslash as three octal digits.
fn unescape(path: &Path) -> PathBuf {
    use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
    let bytes = path.as_os_str().as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((first, tail)) = rest.split_first() {
        let code = (*first == b'\\')
            .then(|| tail.get(..3).and_then(|d| std::str::from_utf8(d).ok()))
            .flatten()
            .and_then(|d| u8::from_str_radix(d, 8).ok());
        match code {
            Some(code) => {
                out.push(code);
                rest = &tail[3..];
            }
            None => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(out))
}

/// Returns the mount on a path; the newest if there are several.
///
/// # Errors
/// The mount table cannot be read.
pub fn mount_at(table: &dyn MountTable, path: &Path) -> io::Result<Option<MountEntry>> {
    let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    Ok(table.entries()?.into_iter().rev().find(|e| e.path == path || e.path == real))
}

/// Returns the mounts at or below a path, newest first, which is the order to unmount them.
///
/// # Errors
/// The mount table cannot be read.
pub fn mounts_below(table: &dyn MountTable, path: &Path) -> io::Result<Vec<PathBuf>> {
    let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let all = table.entries()?.into_iter().rev();
    Ok(all.filter(|e| e.path.starts_with(&real) || e.path.starts_with(path)).map(|e| e.path).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_paths_read_as_they_are() {
        assert_eq!(unescape(Path::new("/a\\040b\\134c\\x")), Path::new("/a b\\c\\x"));
        assert!(ProcMountTable.entries().unwrap().iter().any(|e| e.path == Path::new("/proc")));
    }
}
