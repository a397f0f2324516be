//! Lists of watches in files of the run directory, for a pod-sync that starts while the API server is away.
//!
//! Its pods run on, and a container of theirs that ends is started again. A kubelet, which knows no pods of
//! the API server then, starts none (`serviceHasSynced`).

use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use quintlet_kit::atomic_file;
use quintlet_kit::clock::deadline_after;
use quintlet_kit::task;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

/// Time after which the list of the file is used if the watch has delivered none.
pub(crate) const FIRST_LIST_TIMEOUT: Duration = Duration::from_secs(10);
/// Shortest time between two writes of a file.
const WRITE_INTERVAL: Duration = Duration::from_secs(10);

/// The next work on a list and its file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ListTask<T> {
    /// Use this list until the watch delivers one.
    Use(T),
    /// Call [`KnownList::write`].
    Write,
}

/// A list that a watch keeps up to date, and its file.
#[derive(Debug)]
pub(crate) struct KnownList<T> {
    /// Without a file nothing is kept.
    path: Option<PathBuf>,
    /// The list of the file, and when it is used.
    kept: Option<(T, Instant)>,
    /// When the file is to be written.
    due: Option<Instant>,
    last_write: Option<Instant>,
    /// Hash of the file's content.
    content: Option<u64>,
    is_failing: bool,
}

impl<T: DeserializeOwned + Send + 'static> KnownList<T> {
    /// Reads the file `name` of the directory. One that is unreadable is logged and replaced.
    pub(crate) async fn open(dir: Option<&Path>, name: &str) -> Self {
        let mut list = Self {
            path: dir.map(|dir| dir.join(name)),
            kept: None,
            due: None,
            last_write: None,
            content: None,
            is_failing: false,
        };
        let Some(path) = list.path.clone() else { return list };
        match task::blocking(move || read(&path)).await {
            Ok(None) => {}
            Ok(Some((kept, content))) => {
                list.kept = Some((kept, deadline_after(Instant::now(), FIRST_LIST_TIMEOUT)));
                list.content = Some(content);
            }
            Err(error) => {
                let path = list.path.as_deref().map(|path| path.display().to_string());
                tracing::warn!(path, error = error.to_string(), "list of known objects ignored");
            }
        }
        list
    }

    /// Waits until there is something to do. May be dropped and called again.
    pub(crate) async fn task(&mut self) -> ListTask<T> {
        match (&self.kept, self.due) {
            (Some((_, at)), _) => tokio::time::sleep_until(*at).await,
            (None, Some(at)) => tokio::time::sleep_until(at).await,
            (None, None) => std::future::pending().await,
        }
        match self.kept.take() {
            Some((kept, _)) => ListTask::Use(kept),
            None => ListTask::Write,
        }
    }
}

impl<T> KnownList<T> {
    /// Takes in that the watch delivered the list, or a change of it. It is written at most once in
    /// [`WRITE_INTERVAL`].
    pub(crate) fn changed(&mut self) {
        self.kept = None;
        if self.path.is_some() {
            let now = Instant::now();
            let at = self.last_write.map_or(now, |last| now.max(deadline_after(last, WRITE_INTERVAL)));
            self.due.get_or_insert(at);
        }
    }

    /// Writes the list. A failure is logged once, and the list is written later.
    pub(crate) async fn write(&mut self, list: impl Serialize + Send + 'static) {
        self.due = None;
        let Some(path) = self.path.clone() else { return };
        let now = Instant::now();
        self.last_write = Some(now);
        let before = self.content;
        match task::blocking(move || replace(&path, &list, before)).await {
            Ok(content) => {
                self.content = Some(content);
                self.is_failing = false;
            }
            Err(error) => {
                if !std::mem::replace(&mut self.is_failing, true) {
                    let path = self.path.as_deref().map(|path| path.display().to_string());
                    tracing::warn!(path, error = error.to_string(), "list of known objects not written");
                }
                self.due = Some(deadline_after(now, WRITE_INTERVAL));
            }
        }
    }
}

/// Reads a list and the hash of its file. Blocks.
fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Option<(T, u64)>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some((serde_json::from_slice(&bytes)?, hash(&bytes)))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes a list unless its file has the hash `before`. Returns the hash. Blocks.
fn replace(path: &Path, list: &impl Serialize, before: Option<u64>) -> io::Result<u64> {
    let bytes = serde_json::to_vec(list)?;
    let content = hash(&bytes);
    if before != Some(content) {
        atomic_file::write(path, &bytes, 0o600)?;
    }
    Ok(content)
}

fn hash(bytes: &[u8]) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(bytes)
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    async fn open(dir: &Path) -> KnownList<Vec<u32>> {
        KnownList::open(Some(dir), ".numbers").await
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_is_written_at_once_and_then_at_most_every_ten_seconds_if_it_changed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(".numbers");
        let mut list = open(dir.path()).await;
        assert_eq!(list.task().now_or_never(), None, "nothing was delivered");
        let start = Instant::now();
        list.changed();
        assert_eq!(list.task().await, ListTask::Write);
        list.write([1]).await;
        for _ in 0..100 {
            list.changed();
        }
        assert_eq!((list.task().await, start.elapsed()), (ListTask::Write, WRITE_INTERVAL));
        std::fs::remove_file(&file).unwrap();
        list.write([1]).await;
        assert!(!file.exists(), "the list is as it was");
        list.changed();
        assert_eq!(list.task().await, ListTask::Write);
        list.write([2]).await;
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "[2]");
    }

    #[tokio::test(start_paused = true)]
    async fn a_kept_list_is_used_once_the_first_list_is_late() {
        let dir = tempfile::tempdir().unwrap();
        open(dir.path()).await.write([1]).await;
        let start = Instant::now();
        let mut list = open(dir.path()).await;
        assert_eq!((list.task().await, start.elapsed()), (ListTask::Use(vec![1]), FIRST_LIST_TIMEOUT));
        assert_eq!(list.task().now_or_never(), None);

        let mut list = open(dir.path()).await;
        list.changed();
        assert_eq!(list.task().await, ListTask::Write, "the list of the watch is newer");
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_cannot_be_read_or_written_changes_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(".numbers"), "[1").unwrap();
        let mut list = open(dir.path()).await;
        assert_eq!(list.task().now_or_never(), None);

        std::fs::remove_file(dir.path().join(".numbers")).unwrap();
        std::fs::create_dir(dir.path().join(".numbers")).unwrap();
        list.write([3]).await;
        let start = Instant::now();
        assert_eq!((list.task().await, start.elapsed()), (ListTask::Write, WRITE_INTERVAL), "tried again");
        std::fs::remove_dir(dir.path().join(".numbers")).unwrap();
        list.write([3]).await;
        assert_eq!(std::fs::read_to_string(dir.path().join(".numbers")).unwrap(), "[3]");

        let mut without: KnownList<Vec<u32>> = KnownList::open(None, ".numbers").await;
        without.changed();
        assert_eq!(without.task().now_or_never(), None);
    }
}
