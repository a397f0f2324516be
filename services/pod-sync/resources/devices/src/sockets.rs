//! The sockets of plugins in their directory.

use std::io;
use std::path::Path;

/// Removes the sockets of a directory: plugins whose socket disappears register again
/// (`CleanupPluginDirectory`). Other files, and links, stay. Blocks.
///
/// # Errors
/// The directory cannot be read.
pub(crate) fn remove_sockets(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileTypeExt as _;
    for entry in std::fs::read_dir(dir)?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_socket())
            && let Err(error) = std::fs::remove_file(entry.path())
        {
            tracing::warn!(path = %entry.path().display(), %error, "failed to remove the socket of a device plugin");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::checkpoint::CHECKPOINT;

    #[test]
    fn only_sockets_are_removed() {
        let temp = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let far = elsewhere.path().join("far.sock");
        let _listeners =
            [temp.path().join("a.sock"), far.clone()].map(|path| UnixListener::bind(path).unwrap());
        std::fs::write(temp.path().join(CHECKPOINT), "").unwrap();
        std::fs::create_dir(temp.path().join("dir")).unwrap();
        std::os::unix::fs::symlink(&far, temp.path().join("link.sock")).unwrap();
        remove_sockets(temp.path()).unwrap();
        let mut left: Vec<_> =
            std::fs::read_dir(temp.path()).unwrap().flatten().map(|e| e.file_name()).collect();
        left.sort();
        assert_eq!(left, ["dir", CHECKPOINT, "link.sock"]);
        assert!(far.exists());
        assert!(remove_sockets(Path::new("/nonexistent")).is_err());
    }
}
