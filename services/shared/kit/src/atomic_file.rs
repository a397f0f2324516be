//! Replaces files atomically: a reader sees the old content or the new one.
//!
//! The new content is written to a temporary file with a random name beside the target (`O_CREAT | O_EXCL`,
//! so that a planted link is never followed). The owner and mode are set through its descriptor before it is
//! renamed to the target. A target that is a link is replaced, not followed. Only trusted users may be able
//! to write to the directory.

use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use tempfile::NamedTempFile;

use crate::failpoint;

/// Mode of a new temporary file.
const CREATED: u32 = 0o600;

/// The owner of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// User ID.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
}

/// Replaces `path` by a file with the given content and exactly this mode. Does not sync it to the disk: for
/// files on tmpfs.
///
/// # Errors
/// Fails if the file cannot be created or renamed.
pub fn write(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    failpoint::file!("file replaced", || replace(path, bytes, mode, None, Durability::Volatile))
}

/// Replaces a file as [`write()`] does, and sets its owner before its content is written.
///
/// # Errors
/// Fails as [`write()`] does, and if the process may not change the owner.
pub fn write_owned(path: &Path, bytes: &[u8], mode: u32, owner: Owner) -> io::Result<()> {
    failpoint::file!("file replaced", || replace(path, bytes, mode, Some(owner), Durability::Volatile))
}

/// Replaces a file as [`write()`] does, and syncs the file and its directory to the disk before it returns.
///
/// The directory's own entry is not synced: after the loss of power, a directory that was just created may be
/// missing, with its files.
///
/// # Errors
/// Fails if the file cannot be created or renamed.
pub fn write_durable(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    failpoint::file!("file replaced", || replace(path, bytes, mode, None, Durability::Synced))
}

/// Replaces a file as [`write_durable()`] does, through a temporary file with the name `temporary` in the
/// same directory, for a directory whose files have known names. A process that is killed leaves that file.
///
/// # Errors
/// Fails if a file cannot be created, removed or renamed.
pub fn write_durable_through(path: &Path, temporary: &str, bytes: &[u8], mode: u32) -> io::Result<()> {
    failpoint::file!("file replaced", || {
        let dir = directory(path);
        absent(std::fs::remove_file(dir.join(temporary)))?;
        let file = tempfile::Builder::new().prefix(temporary).rand_bytes(0).tempfile_in(dir)?;
        persist(file, path, bytes, mode, Durability::Synced)
    })
}

/// Whether a file survives the loss of power.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Durability {
    /// The file and its directory are synced to the disk.
    Synced,
    /// The loss of power may leave the old content, the new one, or an empty or incomplete file.
    Volatile,
}

fn directory(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

fn absent(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Returns a temporary file, which is removed when it is dropped.
fn temporary(path: &Path) -> io::Result<NamedTempFile> {
    let name =
        path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not a file name"))?;
    // Readers that list the directory ignore names with a leading dot.
    let prefix = format!(".{}.", name.to_string_lossy());
    tempfile::Builder::new().prefix(&prefix).tempfile_in(directory(path))
}

fn replace(
    path: &Path,
    bytes: &[u8],
    mode: u32,
    owner: Option<Owner>,
    durability: Durability,
) -> io::Result<()> {
    let file = temporary(path)?;
    if let Some(Owner { uid, gid }) = owner {
        std::os::unix::fs::fchown(file.as_file(), Some(uid), Some(gid))?;
    }
    persist(file, path, bytes, mode, durability)
}

fn persist(
    mut file: NamedTempFile,
    path: &Path,
    bytes: &[u8],
    mode: u32,
    durability: Durability,
) -> io::Result<()> {
    if mode != CREATED {
        file.as_file().set_permissions(std::fs::Permissions::from_mode(mode))?;
    }
    file.write_all(bytes)?;
    if durability == Durability::Synced {
        file.as_file().sync_all()?;
    }
    file.persist(path).map_err(|e| e.error)?;
    if durability == Durability::Synced {
        std::fs::File::open(directory(path))?.sync_all()?;
    }
    #[cfg(feature = "failpoints")]
    failpoint::wrote(&failpoint::FileWrite { path, bytes, is_durable: durability == Durability::Synced });
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use super::*;

    #[test]
    fn a_file_is_replaced_with_its_mode_and_no_temporary_file_remains() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        write(&path, b"one", 0o600).unwrap();
        write_durable(&path, b"two", 0o666).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
        assert!(write(&dir.path().join("no/f"), b"", 0o600).is_err());
        std::fs::create_dir(dir.path().join("d")).unwrap();
        assert!(write(&dir.path().join("d"), b"", 0o600).is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_temporary_file_with_a_given_name_may_be_left_from_before() {
        let dir = tempfile::tempdir().unwrap();
        let (path, left) = (dir.path().join("f"), dir.path().join("f.new"));
        for content in ["one", "two"] {
            std::fs::write(&left, "incomplete").unwrap();
            write_durable_through(&path, "f.new", content.as_bytes(), 0o644).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
            assert!(!left.exists());
        }
    }

    #[test]
    fn a_link_planted_under_the_temporary_name_of_this_process_is_not_written_through() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        std::fs::write(&victim, "host").unwrap();
        symlink(&victim, dir.path().join(format!(".f.{}", std::process::id()))).unwrap();
        write(&dir.path().join("f"), b"new", 0o600).unwrap();
        assert_eq!(std::fs::read(&victim).unwrap(), b"host");
        assert!(!std::fs::symlink_metadata(dir.path().join("f")).unwrap().is_symlink());
    }

    #[test]
    fn a_target_that_is_a_link_is_replaced_and_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        std::fs::write(&victim, "host").unwrap();
        let path = dir.path().join("f");
        symlink(&victim, &path).unwrap();
        write(&path, b"new", 0o600).unwrap();
        assert_eq!(
            (std::fs::read(&victim).unwrap(), std::fs::read(&path).unwrap()),
            (b"host".into(), b"new".into())
        );
    }

    #[test]
    fn a_file_with_an_owner_is_accessible_only_to_that_owner() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        write_owned(&path, b"key", 0o400, Owner { uid: 65533, gid: 65532 }).unwrap();
        let meta = std::fs::metadata(&path).unwrap();
        assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (65533, 65532, 0o400));
    }
}
