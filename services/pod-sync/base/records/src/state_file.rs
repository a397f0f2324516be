//! Files of the kubelet that are read at the start and replaced as a whole.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use quintlet_kit::{atomic_file, error_chain, task};
use tokio::sync::Mutex;

/// Only root reads the files.
const MODE: u32 = 0o600;

/// A file, and what was written to it last.
#[derive(Debug)]
pub struct StateFile {
    path: PathBuf,
    written: Vec<u8>,
    copy: Option<VolatileCopy>,
}

/// A copy of the file on tmpfs, for a file that is lost or torn while containers run.
#[derive(Debug)]
struct VolatileCopy {
    path: PathBuf,
    written: Vec<u8>,
}

/// The origin of the value of a file that has a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateOrigin {
    /// The content is complete and was read.
    File,
    /// The file is missing or cannot be used, and its copy was read.
    Copy,
    /// There is neither, so that the value is the default.
    Nothing,
}

impl StateFile {
    /// Reads a file. The value is the default if there is no file, or if it cannot be used; then it is
    /// renamed for inspection. Blocks.
    pub fn open<T: Default, E: Error + 'static>(
        path: PathBuf,
        decode: impl FnOnce(&[u8]) -> Result<T, E>,
    ) -> (Self, T) {
        let (written, value) = read(&path, decode).unwrap_or_default();
        (Self { path, written, copy: None }, value)
    }

    /// Reads a file as [`StateFile::open`] does. If there is none, or if it cannot be used, its copy counts,
    /// which each write replaces first. The copy is on tmpfs: while containers run, it is there. Blocks.
    pub fn open_with_copy<T: Default, E: Error + 'static>(
        path: PathBuf,
        copy: PathBuf,
        decode: impl Fn(&[u8]) -> Result<T, E>,
    ) -> (Self, T, StateOrigin) {
        let found = read(&path, &decode);
        let copied = std::fs::read(&copy).unwrap_or_default();
        let mut file =
            Self { path, written: Vec::new(), copy: Some(VolatileCopy { path: copy, written: copied }) };
        if let Some((written, value)) = found {
            // Another program, such as a kubelet, may have written the file.
            file.write_copy(&written);
            file.written = written;
            return (file, value, StateOrigin::File);
        }
        let copied = file.copy.as_ref().map(|copy| copy.written.clone()).unwrap_or_default();
        let Some(value) =
            Some(&copied).filter(|bytes| !bytes.is_empty()).and_then(|bytes| decode(bytes).ok())
        else {
            return (file, T::default(), StateOrigin::Nothing);
        };
        tracing::warn!(path = %file.path.display(), "state file is missing or unusable, using its copy");
        if let Err(error) = file.write(copied) {
            tracing::error!(path = %file.path.display(), %error, "failed to restore state file");
        }
        (file, value, StateOrigin::Copy)
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
        Ok((Self { path, written: bytes.clone().unwrap_or_default(), copy: None }, bytes))
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
        self.write_copy(&bytes);
        atomic_file::write_durable(&self.path, &bytes, MODE)?;
        self.written = bytes;
        Ok(())
    }

    // Replaces the copy. One that cannot be written is removed, since it would have an earlier state.
    fn write_copy(&mut self, bytes: &[u8]) {
        let Some(copy) = &mut self.copy else { return };
        if copy.written == bytes {
            return;
        }
        match atomic_file::write(&copy.path, bytes, MODE) {
            Ok(()) => bytes.clone_into(&mut copy.written),
            Err(error) => {
                tracing::warn!(path = %copy.path.display(), %error, "failed to write the copy of a state file");
                let _ = std::fs::remove_file(&copy.path);
                copy.written.clear();
            }
        }
    }
}

/// Writes a state to its files, one write at a time.
#[derive(Debug)]
pub struct StateWriter<F> {
    name: &'static str,
    files: Arc<Mutex<F>>,
}

impl<F: Send + 'static> StateWriter<F> {
    /// Returns the writer. `name` is what the files have, for the log.
    #[must_use]
    pub fn new(name: &'static str, files: F) -> Self {
        Self { name, files: Arc::new(Mutex::new(files)) }
    }

    /// Writes the state that `state` returns once earlier writes have ended: a later call writes a later
    /// state. `write` may block.
    ///
    /// Cancellation safety: a write that has begun ends, and later writes wait for it.
    ///
    /// # Errors
    /// That of `state` or `write`.
    pub async fn write_state<T: Send + 'static>(
        &self,
        state: impl FnOnce() -> io::Result<T>,
        write: impl FnOnce(&mut F, T) -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let mut files = Arc::clone(&self.files).lock_owned().await;
        let state = state()?;
        task::blocking(move || write(&mut files, state)).await
    }

    /// Logs the error of a write that nothing waits for. The next write tries again.
    pub fn log(&self, written: io::Result<()>) {
        if let Err(error) = written {
            tracing::error!(state = self.name, error = error_chain(&error), "failed to write state file");
        }
    }
}

/// Returns the content of a file, as bytes and decoded. `None` if there is no file, or if it cannot be used;
/// then it is renamed for inspection.
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
    use std::sync::atomic::{AtomicU8, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

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

    #[tokio::test]
    async fn writes_follow_each_other_and_a_later_one_has_the_later_state() {
        let temp = tempfile::tempdir().unwrap();
        let (file, _) = open(&temp.path().join("state"));
        let writer = StateWriter::new("test", file);
        let current = AtomicU8::new(b'0');
        let write = async || {
            let state = || Ok(vec![current.fetch_add(1, Ordering::Relaxed) + 1]);
            writer.write_state(state, StateFile::write).await.unwrap();
            std::fs::read(temp.path().join("state")).unwrap()
        };
        let (first, second) = tokio::join!(write(), write());
        assert_eq!((first, second), (b"1".to_vec(), b"2".to_vec()));
        let refused =
            writer.write_state(|| Err::<Vec<u8>, _>(io::Error::other("no state")), StateFile::write).await;
        assert_eq!(refused.unwrap_err().to_string(), "no state");
    }

    #[tokio::test]
    async fn a_write_waits_for_an_earlier_one_whose_caller_is_gone() {
        let writer = StateWriter::new("test", Vec::new());
        let (began, has_begun) = tokio::sync::oneshot::channel();
        let (go, may_go) = mpsc::channel::<()>();
        let write = move |written: &mut Vec<u8>, state| {
            let _ = began.send(());
            may_go.recv().map_err(io::Error::other)?;
            written.push(state);
            Ok(())
        };
        tokio::select! {
            written = writer.write_state(|| Ok(1), write) => panic!("the first write has ended: {written:?}"),
            begun = has_begun => begun.unwrap(),
        }
        let state = AtomicU8::new(2);
        let read = || Ok(state.load(Ordering::Relaxed));
        let second = writer.write_state(read, |written, state| {
            written.push(state);
            Ok(())
        });
        tokio::pin!(second);
        let early = tokio::time::timeout(Duration::from_millis(50), &mut second).await;
        assert!(early.is_err(), "the first write has not ended");
        state.store(3, Ordering::Relaxed);
        go.send(()).unwrap();
        second.await.unwrap();
        assert_eq!(*writer.files.lock().await, [1, 3], "the later write has the state after the earlier one");
    }

    fn open_copied(dir: &Path) -> (StateFile, String, StateOrigin) {
        let decode = |bytes: &[u8]| std::str::from_utf8(bytes).map(str::to_owned);
        StateFile::open_with_copy(dir.join("state"), dir.join("copy"), decode)
    }

    #[test]
    fn the_copy_counts_if_the_file_is_lost_or_torn_and_the_file_is_restored() {
        let temp = tempfile::tempdir().unwrap();
        let (path, copy) = (temp.path().join("state"), temp.path().join("copy"));
        let (mut file, value, origin) = open_copied(temp.path());
        assert_eq!((value.as_str(), origin), ("", StateOrigin::Nothing));
        file.write(b"one".to_vec()).unwrap();
        std::fs::write(&path, [0xff]).unwrap();
        let (mut file, value, origin) = open_copied(temp.path());
        assert_eq!((value.as_str(), origin), ("one", StateOrigin::Copy));
        assert_eq!(std::fs::read(&path).unwrap(), b"one", "the next agent may be a kubelet");
        file.write(b"two".to_vec()).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(open_copied(temp.path()).1, "two");
        // Another program has written the file.
        std::fs::write(&path, "three").unwrap();
        let (_, value, origin) = open_copied(temp.path());
        assert_eq!((value.as_str(), origin), ("three", StateOrigin::File));
        assert_eq!(std::fs::read(&copy).unwrap(), b"three");
        // Both are unusable.
        std::fs::write(&path, [0xff]).unwrap();
        std::fs::write(&copy, [0xff]).unwrap();
        let (mut file, value, origin) = open_copied(temp.path());
        assert_eq!((value.as_str(), origin), ("", StateOrigin::Nothing));
        file.write(b"four".to_vec()).unwrap();
        assert_eq!(
            (std::fs::read(&path).unwrap(), std::fs::read(&copy).unwrap()),
            (b"four".to_vec(), b"four".to_vec())
        );
    }

    #[test]
    fn a_copy_that_cannot_be_written_keeps_no_earlier_state() {
        let temp = tempfile::tempdir().unwrap();
        let copy = temp.path().join("run/copy");
        let decode = |bytes: &[u8]| std::str::from_utf8(bytes).map(str::to_owned);
        let open = || StateFile::open_with_copy(temp.path().join("state"), copy.clone(), decode);
        open().0.write(b"one".to_vec()).unwrap();
        assert_eq!(open().1, "one", "the file needs no copy");
        std::fs::create_dir(temp.path().join("run")).unwrap();
        open().0.write(b"two".to_vec()).unwrap();
        assert_eq!(std::fs::read(&copy).unwrap(), b"two");
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
