//! Files of the kubelet that are read at the start and replaced as a whole.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

use quintlet_kit::{atomic_file, error_chain};

/// Only root reads the files.
const MODE: u32 = 0o600;

/// A file, and what was written to it last.
#[derive(Debug)]
pub struct StateFile {
    path: PathBuf,
    written: Vec<u8>,
}

impl StateFile {
    /// Reads a file. The value is the default if there is no file, or if it cannot be used; then it is renamed for inspection. Blocks.
    pub fn open<T: Default, E: Error + 'static>(
        path: PathBuf,
        decode: impl FnOnce(&[u8]) -> Result<T, E>,
    ) -> (Self, T) {
        let (written, value) = read(&path, decode).unwrap_or_default();
        (Self { path, written }, value)
    }

    /// Reads a file that the caller decodes. The bytes are `None` if there is no file. Blocks.
    ///
    /// # Errors
    /// The file exists and cannot be read.
    pub fn read(path: PathBuf) -> io::Result<(Self, Option<Vec<u8>>)> {
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => Some(bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        Ok((Self { path, written: bytes.clone().unwrap_or_default() }, bytes))
    }

    /// Returns whether the file has this content already.
    #[must_use]
    pub fn has(&self, bytes: &[u8]) -> bool {
        self.written == bytes
    }

    /// Replaces the content, unless the file has it already. Blocks.
    ///
    /// # Errors
    /// The file cannot be replaced.
    pub fn write(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        if self.has(&bytes) {
            return Ok(());
        }
        atomic_file::write_durable(&self.path, &bytes, MODE)?;
        self.written = bytes;
        Ok(())
    }
}

/// Returns the content of a file, as bytes and decoded. `None` if there is no file, or if it cannot be used; then it is renamed for
/// inspection.
pub(crate) fn read<T, E: Error + 'static>(
    path: &Path,
    decode: impl FnOnce(&[u8]) -> Result<T, E>,
) -> Option<(Vec<u8>, T)> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) => {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::error!(path = %path.display(), %error, "failed to read state file");
            }
            return None;
        }
    };
    match decode(&bytes) {
        Ok(value) => Some((bytes, value)),
        Err(error) => {
            let moved = std::fs::rename(path, path.with_extension("corrupt")).is_ok();
            let error = error_chain(&error);
            tracing::error!(path = %path.display(), error, moved, "state file is unusable, starting an empty one");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(path: &Path) -> (StateFile, String) {
        StateFile::open(path.to_owned(), |bytes| std::str::from_utf8(bytes).map(str::to_owned))
    }

    #[test]
    fn a_file_that_the_caller_decodes_is_left_as_it_is() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("state");
        let (mut file, bytes) = StateFile::read(path.clone()).unwrap();
        assert_eq!(bytes, None);
        file.write(vec![0xff]).unwrap();
        let (file, bytes) = StateFile::read(path.clone()).unwrap();
        assert_eq!((bytes, file.has(&[0xff])), (Some(vec![0xff]), true));
        assert!(StateFile::read(temp.path().to_owned()).is_err(), "a directory");
    }

    #[test]
    fn an_unusable_file_is_kept_aside_and_an_equal_one_is_not_written_again() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("state");
        assert_eq!(open(&path).1, "", "no file");
        std::fs::write(&path, [0xff]).unwrap();
        let (mut file, value) = open(&path);
        assert_eq!(value, "");
        assert_eq!(std::fs::read(temp.path().join("state.corrupt")).unwrap(), [0xff]);
        file.write(b"new".to_vec()).unwrap();
        let (mut file, value) = open(&path);
        assert_eq!((value.as_str(), file.has(b"new")), ("new", true));
        std::fs::remove_file(&path).unwrap();
        file.write(b"new".to_vec()).unwrap();
        assert!(!path.exists());
        file.write(b"newer".to_vec()).unwrap();
        assert_eq!(open(&path).1, "newer");
    }
}
