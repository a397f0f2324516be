//! Operations on many files whose file systems may hang.
//!
//! [`Stalls::run`] runs operations on many paths on one blocking thread. If one of them does not return, the
//! thread is left to it, and the others are run on another thread without that path. The path is skipped
//! until its operation returns.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::task;

/// Hanging operations of one [`Stalls`], each of which holds one of the 512 blocking threads of the process.
/// Nothing begins while there are so many.
const MAX_STUCK: usize = 16;

/// The paths on which operations hang. Clones share them.
#[derive(Debug, Clone)]
pub struct Stalls {
    /// Name of the files, for log lines.
    what: &'static str,
    stuck: Arc<Mutex<BTreeSet<PathBuf>>>,
    stall: Duration,
}

/// Blocking work in progress. The thread of the work and the task that waits for it share it.
#[derive(Debug)]
pub struct Pass {
    stalls: Stalls,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The path of the operation in progress.
    at: Option<PathBuf>,
    /// Operations that have begun, and reports of progress.
    steps: u64,
    /// The operation in progress hung. The work does nothing more after it.
    is_abandoned: bool,
}

/// Ends an operation, also one that panics.
struct Operation<'a> {
    pass: &'a Pass,
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        let mut state = self.pass.state.lock();
        if let Some(path) = state.at.take().filter(|_| state.is_abandoned) {
            self.pass.stalls.stuck.lock().remove(&path);
            tracing::info!(what = self.pass.stalls.what, path = %path.display(), "file system answers again");
        }
    }
}

impl Pass {
    /// Runs an operation on the file at `path`. Returns `None` if an operation on it hangs, or if the work
    /// was abandoned meanwhile.
    pub fn touch<T>(&self, path: &Path, operation: impl FnOnce() -> T) -> Option<T> {
        {
            let mut state = self.state.lock();
            if state.is_abandoned || self.stalls.stuck.lock().contains(path) {
                return None;
            }
            state.at = Some(path.to_owned());
            state.steps = state.steps.saturating_add(1);
        }
        let ends = Operation { pass: self };
        let done = operation();
        drop(ends);
        (!self.state.lock().is_abandoned).then_some(done)
    }

    /// Records that the operation in progress has not come to a halt. Returns whether the work is still
    /// wanted.
    pub fn progress(&self) -> bool {
        let mut state = self.state.lock();
        state.steps = state.steps.saturating_add(1);
        !state.is_abandoned
    }

    /// Abandons the work if an operation is in progress and has made no progress since `seen` steps. Returns
    /// whether it did.
    fn abandon(&self, seen: &mut u64) -> bool {
        let mut state = self.state.lock();
        let progressed = std::mem::replace(seen, state.steps) != state.steps;
        let Some(path) = state.at.clone().filter(|_| !progressed) else { return false };
        tracing::warn!(what = self.stalls.what, path = %path.display(), "file system does not answer, skipping the path until it does");
        self.stalls.stuck.lock().insert(path);
        state.is_abandoned = true;
        true
    }
}

impl Stalls {
    /// An operation counts as hanging after `stall` without progress. It delays the others once, for twice as
    /// long at most. `what` names the files in log lines.
    #[must_use]
    pub fn new(what: &'static str, stall: Duration) -> Self {
        Self { what, stuck: Arc::default(), stall }
    }

    fn pass(&self) -> Option<Arc<Pass>> {
        let has_room = self.stuck.lock().len() < MAX_STUCK;
        has_room.then(|| Arc::new(Pass { stalls: self.clone(), state: Mutex::default() }))
    }

    /// Runs `work` on a blocking thread. If an operation of it hangs, it is run again without that path, so
    /// it must allow that. Returns `None` while too many operations hang.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl Fn(&Pass) -> T + Send + Sync + 'static,
    ) -> Option<T> {
        let work = Arc::new(work);
        loop {
            let pass = self.pass()?;
            let running = {
                let (work, pass) = (Arc::clone(&work), Arc::clone(&pass));
                task::blocking(move || work(&pass))
            };
            tokio::pin!(running);
            let mut seen = 0;
            loop {
                // Dropping the timer loses nothing. The work is not dropped.
                tokio::select! {
                    done = &mut running => return Some(done),
                    () = tokio::time::sleep(self.stall) => {}
                }
                if pass.abandon(&mut seen) {
                    break;
                }
            }
        }
    }

    /// Runs `work` on the file at `path` on a blocking thread. Returns `None` if it takes longer than
    /// `limit`; the work is completed nevertheless.
    pub async fn run_one<T: Send + 'static>(
        &self,
        path: &Path,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let pass = self.pass()?;
        let running = {
            let (pass, path) = (Arc::clone(&pass), path.to_owned());
            task::blocking(move || pass.touch(&path, work))
        };
        tokio::pin!(running);
        loop {
            // Dropping the timer loses nothing. The work is completed even if this caller gives up.
            tokio::select! {
                done = &mut running => return done,
                () = tokio::time::sleep(limit) => {}
            }
            // One operation counts as hanging without a second look.
            if pass.abandon(&mut 1) {
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    const STALL: Duration = Duration::from_millis(500);

    fn paths() -> Vec<PathBuf> {
        ["a", "hangs", "b"].map(PathBuf::from).to_vec()
    }

    /// Returns the paths that were reached. The operation on `hangs` waits for `release`. `began` counts its
    /// calls.
    async fn reached(
        stalls: &Stalls,
        release: &Arc<Mutex<mpsc::Receiver<()>>>,
        began: &Arc<AtomicUsize>,
    ) -> Option<Vec<PathBuf>> {
        let (release, began) = (Arc::clone(release), Arc::clone(began));
        let work = move |pass: &Pass| {
            let operation = |path: &PathBuf| {
                if path.ends_with("hangs") {
                    began.fetch_add(1, Ordering::Relaxed);
                    let _ended = release.lock().recv();
                }
                path.clone()
            };
            paths().iter().filter_map(|path| pass.touch(path, || operation(path))).collect()
        };
        stalls.run(work).await
    }

    #[tokio::test]
    async fn an_operation_that_hangs_delays_only_its_own_path_and_only_once() {
        let stalls = Stalls::new("file", STALL);
        let (release, hangs) = mpsc::channel();
        let hangs = Arc::new(Mutex::new(hangs));
        let others = vec![PathBuf::from("a"), PathBuf::from("b")];
        let began = Arc::new(AtomicUsize::new(0));
        assert_eq!(reached(&stalls, &hangs, &began).await, Some(others.clone()));
        assert_eq!(reached(&stalls, &hangs, &began).await, Some(others));
        assert_eq!(began.load(Ordering::Relaxed), 1, "the path is known to hang");
        let begun =
            stalls.run_one(Path::new("hangs"), STALL, || panic!("beside the operation that hangs")).await;
        assert_eq!(begun, None::<()>);
        // The file system answers again, now and for all later operations.
        drop(release);
        let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
        while reached(&stalls, &hangs, &began).await != Some(paths()) {
            assert!(tokio::time::Instant::now() < deadline, "the path is skipped");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn an_operation_that_hangs_gives_its_place_to_the_next() {
        let stalls = Stalls::new("file", STALL);
        let (release, hangs) = mpsc::channel::<()>();
        assert_eq!(stalls.run_one(Path::new("hangs"), STALL, move || hangs.recv().is_ok()).await, None);
        assert_eq!(stalls.run_one(Path::new("a"), STALL, || 1).await, Some(1));
        release.send(()).unwrap();
        let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
        while stalls.run_one(Path::new("hangs"), STALL, || 2).await.is_none() {
            assert!(tokio::time::Instant::now() < deadline, "the path is skipped");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn no_more_threads_hang_than_the_limit() {
        let stalls = Stalls::new("file", Duration::from_millis(10));
        let (release, hangs) = mpsc::channel::<()>();
        let hangs = Arc::new(Mutex::new(hangs));
        let begun = Arc::new(Mutex::new(0));
        let work = {
            let begun = Arc::clone(&begun);
            move |pass: &Pass| {
                for n in 0..MAX_STUCK * 2 {
                    let operation = || {
                        *begun.lock() += 1;
                        let _ended = hangs.lock().recv();
                    };
                    pass.touch(Path::new(&n.to_string()), operation);
                }
            }
        };
        assert_eq!(stalls.run(work).await, None);
        assert_eq!(stalls.run(|_| ()).await, None, "nothing begins while they hang");
        assert_eq!(*begun.lock(), MAX_STUCK);
        drop(release);
    }
}
