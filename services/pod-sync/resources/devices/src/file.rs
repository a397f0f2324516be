//! The checkpoint on disk.

use std::io;
use std::path::{Path, PathBuf};

use quintlet_kit::{atomic_file, failpoint};

use crate::checkpoint::{CHECKPOINT, DeviceCheckpoint, decode};

/// Mode of the checkpoint.
const MODE: u32 = 0o600;

/// The checkpoint file, and what was written to it last.
#[derive(Debug)]
pub(crate) struct CheckpointFile {
    path: PathBuf,
    written: Vec<u8>,
}

impl CheckpointFile {
    /// Reads the checkpoint in `dir`. One that cannot be used is renamed for inspection, and the devices of its pods are free.
    /// Blocks.
    pub(crate) fn open(dir: &Path) -> (Self, DeviceCheckpoint) {
        let path = dir.join(CHECKPOINT);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::error!(path = %path.display(), %error, "failed to read device checkpoint");
                }
                return (Self { path, written: Vec::new() }, DeviceCheckpoint::default());
            }
        };
        match decode(&bytes) {
            Ok(checkpoint) => (Self { path, written: bytes }, checkpoint),
            Err(error) => {
                let aside = path.with_extension("corrupt");
                let moved = std::fs::rename(&path, &aside).is_ok();
                let error = quintlet_kit::error_chain(&error);
                tracing::error!(path = %path.display(), error, moved, "device checkpoint is unusable, starting an empty one");
                (Self { path, written: Vec::new() }, DeviceCheckpoint::default())
            }
        }
    }

    /// Writes the content, unless the file has it already. Blocks.
    ///
    /// # Errors
    /// The file cannot be replaced.
    pub(crate) fn write(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        if bytes == self.written {
            return Ok(());
        }
        failpoint::file!("device checkpoint written", || {
            atomic_file::write_durable(&self.path, &bytes, MODE)
        })?;
        self.written = bytes;
        Ok(())
    }
}

/// Removes the sockets of a directory: plugins whose socket disappears register again (`CleanupPluginDirectory`). Other files, and
/// links, stay. Blocks.
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
    use crate::checkpoint::encode;

    #[test]
    fn an_unusable_checkpoint_is_kept_aside_and_an_equal_one_is_not_written_again() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join(CHECKPOINT);
        std::fs::write(&path, "{\"Data\":").unwrap();
        let (mut file, checkpoint) = CheckpointFile::open(temp.path());
        assert_eq!(checkpoint, DeviceCheckpoint::default());
        let aside = std::fs::read_to_string(temp.path().join("kubelet_internal_checkpoint.corrupt")).unwrap();
        assert_eq!(aside, "{\"Data\":");
        let mut checkpoint = DeviceCheckpoint::default();
        checkpoint.registered.insert("a.com/gpu".to_owned(), Vec::new());
        let bytes = encode(&checkpoint).unwrap();
        file.write(bytes.clone()).unwrap();
        assert_eq!(CheckpointFile::open(temp.path()).1, checkpoint);
        std::fs::remove_file(&path).unwrap();
        file.write(bytes).unwrap();
        assert!(!path.exists());
    }

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
