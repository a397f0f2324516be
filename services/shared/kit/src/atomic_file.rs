//! Files that are either the old ones or the new ones.

use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use crate::seam;

/// Replaces `path` by a file with these bytes and mode. Not synced: for tmpfs, where there is nothing to sync to.
///
/// # Errors
/// The directory cannot be written.
pub fn write(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    seam::file("file replaced", || replace(path, bytes, mode, false))
}

/// As [`write()`], and on the disk when it returns.
///
/// # Errors
/// The directory cannot be written.
pub fn write_durable(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    seam::file("file replaced", || replace(path, bytes, mode, true))
}

fn replace(path: &Path, bytes: &[u8], mode: u32, sync: bool) -> io::Result<()> {
    let name =
        path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not a file name"))?;
    let dir = path.parent().unwrap_or(Path::new("."));
    // A leading dot: whoever lists the directory passes a torn one over.
    let temp = dir.join(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
    let written = (|| {
        let mut file =
            std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&temp)?;
        file.write_all(bytes)?;
        if sync {
            file.sync_all()?;
        }
        std::fs::rename(&temp, path)?;
        if sync {
            std::fs::File::open(dir)?.sync_all()?;
        }
        Ok(())
    })();
    if written.is_err() {
        let _ = std::fs::remove_file(&temp);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn a_file_is_replaced_with_its_mode_and_nothing_is_left_beside_it() {
        let dir = std::env::temp_dir().join(format!("kit-atomic-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("f");
        write(&path, b"one", 0o600).unwrap();
        write_durable(&path, b"two", 0o600).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
        assert!(write(&dir.join("no/f"), b"", 0o600).is_err());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
