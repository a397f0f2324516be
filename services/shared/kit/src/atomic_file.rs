//! Files whose content is either the old one or the new one.
//!
//! The new content goes to a file of a random name beside the target (`O_CREAT | O_EXCL`, so a planted link is never
//! followed), gets its owner and mode through its descriptor, and is renamed to the target. A target that is a link is
//! replaced, not followed. The directory itself has to be one that only trusted users can write to.

use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use crate::seam;

/// Who owns a new file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// User ID.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
}

/// Replaces `path` by a file with these bytes and exactly this mode. Not synced: for tmpfs, where there is nothing to sync to.
///
/// # Errors
/// The directory cannot be written.
pub fn write(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    seam::file("file replaced", || replace(path, bytes, mode, None, false))
}

/// As [`write()`], and the file belongs to `owner` from before its content is there.
///
/// # Errors
/// The directory cannot be written, or this process may not give files away.
pub fn write_owned(path: &Path, bytes: &[u8], mode: u32, owner: Owner) -> io::Result<()> {
    seam::file("file replaced", || replace(path, bytes, mode, Some(owner), false))
}

/// As [`write()`], and on the disk when it returns.
///
/// # Errors
/// The directory cannot be written.
pub fn write_durable(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    seam::file("file replaced", || replace(path, bytes, mode, None, true))
}

fn replace(path: &Path, bytes: &[u8], mode: u32, owner: Option<Owner>, sync: bool) -> io::Result<()> {
    let name =
        path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not a file name"))?;
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    // A leading dot: readers that list the directory pass over an incomplete file.
    let prefix = format!(".{}.", name.to_string_lossy());
    // Created with mode 0600. An error drops it, and that removes it.
    let mut file = tempfile::Builder::new().prefix(&prefix).tempfile_in(dir)?;
    if let Some(Owner { uid, gid }) = owner {
        std::os::unix::fs::fchown(file.as_file(), Some(uid), Some(gid))?;
    }
    file.as_file().set_permissions(std::fs::Permissions::from_mode(mode))?;
    file.write_all(bytes)?;
    if sync {
        file.as_file().sync_all()?;
    }
    file.persist(path).map_err(|e| e.error)?;
    if sync {
        std::fs::File::open(dir)?.sync_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use super::*;

    #[test]
    fn a_file_is_replaced_with_its_mode_and_nothing_is_left_beside_it() {
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
    fn a_file_given_away_belongs_to_its_owner_alone() {
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
