//! Crashes of cri-proxy, and the pods whose calls they broke.
//!
//! A broken call alone is no evidence, since a kill from outside breaks calls, too. A crash counts only if the supervisor of
//! cri-proxy recorded it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use pod_sync_clients::BrokenCalls;
use pod_sync_decisions::containment::ProcessExit;
use quintlet_kit::clock::Clock;
use quintlet_kit::task::blocking;
use quintlet_model::ids::PodUid;
use tokio_util::sync::CancellationToken;

use crate::exits;

/// Name of the service in exit notes.
pub const CRI_PROXY: &str = "cri-proxy";

/// Longest wait for the exit note.
const NOTE_TIMEOUT: Duration = Duration::from_secs(3);
/// An exit note that is older than this when the first call breaks is from an earlier exit.
const NOTE_MAX_AGE: Duration = Duration::from_secs(1);
/// Interval between checks for the exit note.
const NOTE_POLL: Duration = Duration::from_millis(50);

/// Calls `blame` with the cause and the pods of each crash of cri-proxy, until `stop`. `exit_note` is the path of its exit note.
pub async fn follow_cri_proxy(
    broken: Arc<BrokenCalls>,
    exit_note: PathBuf,
    clock: Clock,
    blame: impl Fn(&ProcessExit, &BTreeSet<PodUid>),
    stop: CancellationToken,
) {
    // A crash whose note has not arrived when pod-sync stops is not counted.
    tokio::select! {
        () = stop.cancelled() => {}
        () = find_crashes(&broken, &exit_note, &clock, blame) => {}
    }
}

async fn find_crashes(
    broken: &BrokenCalls,
    exit_note: &Path,
    clock: &Clock,
    blame: impl Fn(&ProcessExit, &BTreeSet<PodUid>),
) {
    loop {
        let (began, mut pods) = broken.next_crash(clock).await;
        if pods.is_empty() {
            continue;
        }
        let note = take_note(exit_note, began, clock).await;
        // On a busy node a call that an earlier crash broke may be the first of `pods`. The calls of this crash broke after it.
        pods.extend(broken.take());
        match exits::cause(&note, false) {
            ProcessExit::External => {}
            cause @ (ProcessExit::Crash(_) | ProcessExit::OutOfMemory) => blame(&cause, &pods),
        }
    }
}

// Waits for the exit note of a crash at about `began`, and removes it. Returns an empty text if there is none in time.
async fn take_note(path: &Path, began: Timestamp, clock: &Clock) -> String {
    let oldest = began.checked_sub(NOTE_MAX_AGE).unwrap_or(Timestamp::UNIX_EPOCH);
    let deadline = clock.boot().saturating_add(NOTE_TIMEOUT);
    loop {
        let path = path.to_owned();
        match blocking(move || take_if_newer(&path, oldest)).await {
            Some(note) => return note,
            None if clock.boot() >= deadline => return String::new(),
            None => tokio::time::sleep(NOTE_POLL).await,
        }
    }
}

fn take_if_newer(path: &Path, oldest: Timestamp) -> Option<String> {
    let modified = std::fs::metadata(path).and_then(|m| m.modified()).ok()?;
    let modified = Timestamp::try_from(modified).ok()?;
    // A shell truncates the file before it writes.
    let is_written = || std::fs::read_to_string(path).is_ok_and(|note| !note.trim().is_empty());
    (modified >= oldest && is_written()).then(|| exits::take(path))
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use quintlet_kit::contain::{Work, contained};
    use quintlet_testkit::wait::until;

    use super::*;

    fn uid(name: &str) -> PodUid {
        PodUid::parse(name).unwrap()
    }

    async fn breaks(broken: &BrokenCalls, name: &str) {
        contained(Work::new(name, ""), async { broken.add_current() }).await.unwrap();
    }

    #[tokio::test]
    async fn pods_whose_calls_broke_are_blamed_for_a_crash_in_the_exit_note() {
        for (notes, want) in [
            (["signal ABRT\n"; 2], vec![ProcessExit::Crash("SIGABRT".to_owned()); 2]),
            (["oom-kill KILL\n", "signal KILL\n"], vec![ProcessExit::OutOfMemory]),
            (["exit-code 70\n", "success 0\n"], vec![]),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let note = dir.path().join(CRI_PROXY);
            let (broken, blamed) = (BrokenCalls::default(), Mutex::new(Vec::new()));
            let blame = |cause: &ProcessExit, pods: &BTreeSet<PodUid>| {
                blamed.lock().push((cause.clone(), pods.clone()))
            };
            let clock = Clock::system();
            let die = async |pods: &[&str], text: &str| {
                broken.add_current();
                for pod in pods {
                    breaks(&broken, pod).await;
                }
                std::fs::write(&note, text).unwrap();
                until("the note is taken", NOTE_TIMEOUT, async || {
                    if note.exists() { Err("it is there") } else { Ok(()) }
                })
                .await;
            };
            let deaths = async {
                for text in notes {
                    die(&["a", "b"], text).await;
                }
                // Crashes are reported in order, so the earlier ones have been reported after this one.
                die(&["last"], "core-dump SEGV").await;
                until("the last is blamed", NOTE_TIMEOUT, async || {
                    let blamed = blamed.lock();
                    if blamed.iter().any(|(_, pods)| pods.contains(&uid("last"))) {
                        Ok(())
                    } else {
                        Err(blamed.len())
                    }
                })
                .await;
            };
            tokio::select! {
                () = find_crashes(&broken, &note, &clock, blame) => {}
                () = deaths => {}
            }
            let pods: BTreeSet<PodUid> = [uid("a"), uid("b")].into();
            let mut want: Vec<_> = want.into_iter().map(|cause| (cause, pods.clone())).collect();
            want.push((ProcessExit::Crash("SIGSEGV".to_owned()), [uid("last")].into()));
            assert_eq!(*blamed.lock(), want, "{notes:?}");
        }
    }

    #[tokio::test]
    async fn a_call_that_breaks_late_after_one_crash_does_not_hide_the_pods_of_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let note = dir.path().join(CRI_PROXY);
        let (broken, blamed) = (BrokenCalls::default(), Mutex::new(Vec::new()));
        let blame = |_: &ProcessExit, pods: &BTreeSet<PodUid>| blamed.lock().push(pods.clone());
        let clock = Clock::system();
        let crashes = async {
            breaks(&broken, "late").await;
            tokio::time::sleep(Duration::from_millis(300)).await;
            breaks(&broken, "bad").await;
            std::fs::write(&note, "signal ABRT\n").unwrap();
            until("the crash is blamed on a pod", NOTE_TIMEOUT, async || {
                if blamed.lock().is_empty() { Err("it is not") } else { Ok(()) }
            })
            .await;
        };
        tokio::select! {
            () = find_crashes(&broken, &note, &clock, blame) => {}
            () = crashes => {}
        }
        assert!(blamed.lock()[0].contains(&uid("bad")), "{:?}", blamed.lock());
    }

    #[test]
    fn an_exit_note_that_is_old_or_empty_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(CRI_PROXY);
        let now = Clock::system().wall();
        assert_eq!(take_if_newer(&path, now), None, "no supervisor");
        std::fs::write(&path, "").unwrap();
        assert_eq!(take_if_newer(&path, Timestamp::UNIX_EPOCH), None, "not written yet");
        std::fs::write(&path, "signal ABRT\n").unwrap();
        let later = now.checked_add(Duration::from_secs(60)).unwrap();
        assert_eq!(take_if_newer(&path, later), None);
        assert_eq!(take_if_newer(&path, now.checked_sub(NOTE_MAX_AGE).unwrap()).unwrap(), "signal ABRT\n");
        assert!(!path.exists());
    }
}
