//! Crashes of cri-proxy, and the pods whose calls they broke.
//!
//! A broken call alone is no evidence, since a kill from outside breaks calls, too. A crash counts only if
//! the supervisor of cri-proxy recorded it.

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

/// Calls `blame` with the cause and the pods of each crash of cri-proxy, until `stop`. `exit_note` is the
/// path of its exit note.
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
        let exited = wait_for_note(exit_note, began, clock).await;
        // On a busy node a call that an earlier crash broke may be the first of `pods`. The calls of this
        // crash broke after it, and before its note is removed: what breaks later belongs to the next crash.
        pods.extend(broken.take());
        if !exited {
            continue;
        }
        let path = exit_note.to_owned();
        match exits::cause(&blocking(move || exits::take(&path)).await, false) {
            ProcessExit::External => {}
            cause @ (ProcessExit::Crash(_) | ProcessExit::OutOfMemory) => blame(&cause, &pods),
        }
    }
}

/// Waits for the exit note of a crash at about `began`. Returns false if there is none in time.
async fn wait_for_note(path: &Path, began: Timestamp, clock: &Clock) -> bool {
    let oldest = began.checked_sub(NOTE_MAX_AGE).unwrap_or(Timestamp::UNIX_EPOCH);
    let deadline = clock.boot().saturating_add(NOTE_TIMEOUT);
    loop {
        let path = path.to_owned();
        if blocking(move || is_written_since(&path, oldest)).await {
            return true;
        }
        if clock.boot() >= deadline {
            return false;
        }
        tokio::time::sleep(NOTE_POLL).await;
    }
}

fn is_written_since(path: &Path, oldest: Timestamp) -> bool {
    let modified = std::fs::metadata(path).and_then(|m| m.modified()).ok();
    let is_new =
        modified.and_then(|m| Timestamp::try_from(m).ok()).is_some_and(|modified| modified >= oldest);
    // A shell truncates the file before it writes.
    is_new && std::fs::read_to_string(path).is_ok_and(|note| !note.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use quintlet_kit::contain::{Work, contained};
    use quintlet_kit::task::spawn;
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

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn calls_that_break_as_soon_as_a_note_is_removed_belong_to_the_next_crash() {
        let dir = tempfile::tempdir().unwrap();
        let note = dir.path().join(CRI_PROXY);
        let (broken, blamed) = (Arc::new(BrokenCalls::default()), Arc::new(Mutex::new(Vec::new())));
        let stop = CancellationToken::new();
        let follower = spawn(
            "follower",
            follow_cri_proxy(
                Arc::clone(&broken),
                note.clone(),
                Clock::system(),
                {
                    let blamed = Arc::clone(&blamed);
                    move |_: &ProcessExit, pods: &BTreeSet<PodUid>| blamed.lock().push(pods.clone())
                },
                stop.clone(),
            ),
        );
        let crashes = spawn("crashes", async move {
            for n in 0..10 {
                breaks(&broken, &format!("pod-{n}")).await;
                std::fs::write(&note, "signal ABRT\n").unwrap();
                // Without a pause, so that the next call breaks as early as it can.
                let deadline = Clock::system().boot() + NOTE_TIMEOUT;
                while note.exists() {
                    assert!(Clock::system().boot() < deadline, "the note of crash {n} is still there");
                    tokio::task::yield_now().await;
                }
            }
        });
        crashes.await.unwrap();
        until("every crash is blamed on a pod", NOTE_TIMEOUT, async || {
            let crashes = blamed.lock().len();
            if crashes == 10 { Ok(()) } else { Err(crashes) }
        })
        .await;
        stop.cancel();
        follower.await.unwrap();
        let want: Vec<BTreeSet<PodUid>> = (0..10).map(|n| [uid(&format!("pod-{n}"))].into()).collect();
        assert_eq!(*blamed.lock(), want);
    }

    #[test]
    fn an_exit_note_that_is_old_or_empty_is_not_of_this_crash() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(CRI_PROXY);
        let now = Clock::system().wall();
        assert!(!is_written_since(&path, now), "no supervisor");
        std::fs::write(&path, "").unwrap();
        assert!(!is_written_since(&path, Timestamp::UNIX_EPOCH), "not written yet");
        std::fs::write(&path, "signal ABRT\n").unwrap();
        assert!(
            !is_written_since(&path, now.checked_add(Duration::from_secs(60)).unwrap()),
            "of an earlier crash"
        );
        assert!(is_written_since(&path, now.checked_sub(NOTE_MAX_AGE).unwrap()));
    }
}
