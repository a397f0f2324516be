//! Deaths of cri-proxy, and the pods that it was working for: those whose calls broke with the connection.
//!
//! A broken call alone says nothing, since a kill from outside breaks calls, too. A death counts only if the supervisor of
//! cri-proxy noted that the process ended by itself.

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

use super::exits;

/// Name of the service, as its supervisor has it.
pub const CRI_PROXY: &str = "cri-proxy";

/// Limit of the wait for the supervisor's note.
const NOTED_WITHIN: Duration = Duration::from_secs(3);
/// A note that is older than this when the first call breaks is of an earlier process.
const NOTED_BEFORE: Duration = Duration::from_secs(1);
/// Interval between two looks for the note.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Finds deaths of cri-proxy and gives each with its pods to `blame`, until told to stop. `exit_note`: where the supervisor of
/// cri-proxy notes how the process ended.
pub async fn follow(
    broken: Arc<BrokenCalls>,
    exit_note: PathBuf,
    clock: Clock,
    blame: impl Fn(&ProcessExit, &BTreeSet<PodUid>),
    stop: CancellationToken,
) {
    // A death that was not counted when this process stops is not counted at all.
    tokio::select! {
        () = stop.cancelled() => {}
        () = find_deaths(&broken, &exit_note, &clock, blame) => {}
    }
}

async fn find_deaths(
    broken: &BrokenCalls,
    exit_note: &Path,
    clock: &Clock,
    blame: impl Fn(&ProcessExit, &BTreeSet<PodUid>),
) {
    loop {
        let (began, pods) = broken.next_crash(clock).await;
        if pods.is_empty() {
            continue;
        }
        let note = take_note(exit_note, began, clock).await;
        match exits::cause(&note, false) {
            ProcessExit::External => {}
            cause @ (ProcessExit::Crash(_) | ProcessExit::OutOfMemory) => blame(&cause, &pods),
        }
    }
}

// Waits for the note of an end at about `began`, and takes it. Empty where no supervisor writes one in time.
async fn take_note(path: &Path, began: Timestamp, clock: &Clock) -> String {
    let oldest = began.checked_sub(NOTED_BEFORE).unwrap_or(Timestamp::UNIX_EPOCH);
    let deadline = clock.boot().saturating_add(NOTED_WITHIN);
    loop {
        let path = path.to_owned();
        match blocking(move || take_if_newer(&path, oldest)).await {
            Some(note) => return note,
            None if clock.boot() >= deadline => return String::new(),
            None => tokio::time::sleep(LOOK_EVERY).await,
        }
    }
}

fn take_if_newer(path: &Path, oldest: Timestamp) -> Option<String> {
    let modified = std::fs::metadata(path).and_then(|m| m.modified()).ok()?;
    let modified = Timestamp::try_from(modified).ok()?;
    // A shell empties the file before it writes.
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
    async fn the_pods_whose_calls_broke_are_blamed_for_what_the_supervisor_noted() {
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
                until("the note is taken", NOTED_WITHIN, async || {
                    if note.exists() { Err("it is there") } else { Ok(()) }
                })
                .await;
            };
            let deaths = async {
                for text in notes {
                    die(&["a", "b"], text).await;
                }
                // Once this one is blamed, so are those before it.
                die(&["last"], "core-dump SEGV").await;
                until("the last is blamed", NOTED_WITHIN, async || {
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
                () = find_deaths(&broken, &note, &clock, blame) => {}
                () = deaths => {}
            }
            let pods: BTreeSet<PodUid> = [uid("a"), uid("b")].into();
            let mut want: Vec<_> = want.into_iter().map(|cause| (cause, pods.clone())).collect();
            want.push((ProcessExit::Crash("SIGSEGV".to_owned()), [uid("last")].into()));
            assert_eq!(*blamed.lock(), want, "{notes:?}");
        }
    }

    #[test]
    fn a_note_of_an_earlier_process_and_an_empty_one_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(CRI_PROXY);
        let now = Clock::system().wall();
        assert_eq!(take_if_newer(&path, now), None, "no supervisor");
        std::fs::write(&path, "").unwrap();
        assert_eq!(take_if_newer(&path, Timestamp::UNIX_EPOCH), None, "not written yet");
        std::fs::write(&path, "signal ABRT\n").unwrap();
        let later = now.checked_add(Duration::from_secs(60)).unwrap();
        assert_eq!(take_if_newer(&path, later), None);
        assert_eq!(take_if_newer(&path, now.checked_sub(NOTED_BEFORE).unwrap()).unwrap(), "signal ABRT\n");
        assert!(!path.exists());
    }
}
