//! Containment: a panic or crash in the work of one pod affects only that pod.
//! [`pod_sync_decisions::containment`] has the rules.
//!
//! - [`Containment::contained`] runs the work of one pod: a sync of its worker, of its mirror pod, its
//!   removal. A panic ends that work alone, and the pod is retried after a back-off.
//! - The pods in work are in a file (module `work_file`), so that the next process knows which work the last
//!   one crashed in. How the last process ended is in a note of its supervisor (module `exits`).
//! - [`follow_cri_proxy`] is a future that the caller spawns. It attributes crashes of cri-proxy to the pods
//!   whose calls broke.
//!
//! There are no other tasks, and no channels.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod cri_proxy;
mod exits;
mod thread_gate;
mod work_file;

pub use crate::cri_proxy::{CRI_PROXY, follow_cri_proxy};

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_kit::args::paths::Paths;
use quintlet_kit::clock::Clock;
use quintlet_kit::contain::{self, Panic, Work};
use quintlet_model::ids::{PodRef, PodUid};
use serde::{Deserialize, Serialize};

use pod_sync_decisions::containment::{ContainmentRecords, ProcessExit, Suspension, WorkPermission};
use thread_gate::ThreadGate;
use work_file::{PreviousWork, Threads, WorkFile};

/// The pod that some work is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodWork {
    /// UID of the pod.
    pub uid: PodUid,
    /// `namespace/name`.
    pub name: String,
    /// The calls of a critical pod precede those of others.
    pub is_critical: bool,
}

impl PodWork {
    /// Returns work for a pod that is not critical.
    #[must_use]
    pub fn of(pod: &PodRef) -> Self {
        Self { name: format!("{}/{}", pod.namespace, pod.name), ..Self::unnamed(&pod.uid) }
    }

    /// Returns work for a pod of which only the UID is known.
    #[must_use]
    pub fn unnamed(uid: &PodUid) -> Self {
        Self { uid: uid.clone(), name: String::new(), is_critical: false }
    }
}

/// Name of this service in exit notes.
const SERVICE: &str = "pod-sync";
/// File of the ledger, in the state directory.
const LEDGER: &str = ".containment";
/// Work file, in the state directory.
const WORK_FILE: &str = ".work";

#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    boot: String,
    ledger: ContainmentRecords,
}

/// Runs the work of pods, and remembers panics and crashes in it.
#[derive(Debug)]
pub struct Containment {
    ledger: Mutex<ContainmentRecords>,
    file: PathBuf,
    boot: String,
    work_file: WorkFile,
    // Held by the work of a suspected pod: such pods are worked on one at a time.
    turn: tokio::sync::Mutex<()>,
    // Passed by each thread that executes work of a suspected pod, with or without the turn.
    gate: Arc<ThreadGate>,
    clock: Clock,
    panics: Counter,
    deaths: Counter,
    waiting: Gauge,
}

impl Containment {
    /// Reads the state of the previous process from the state directory, and attributes its crash to the pods
    /// in work.
    pub fn open(paths: &Paths, boot: String, clock: Clock) -> io::Result<Self> {
        let dir = paths.state_dir();
        let file = dir.join(LEDGER);
        let ledger = std::fs::read(&file)
            .ok()
            .and_then(|bytes| serde_json::from_slice::<Saved>(&bytes).ok())
            .filter(|saved| saved.boot == boot)
            .map(|saved| saved.ledger)
            .unwrap_or_default();
        let oom_kills = exits::oom_kills();
        let note = match oom_kills {
            Some(n) => format!("{boot} {n}"),
            None => boot.clone(),
        };
        let (work_file, previous) = WorkFile::open(&dir.join(WORK_FILE), &note)?;
        let new = Self {
            ledger: Mutex::new(ledger),
            file,
            boot,
            work_file,
            turn: tokio::sync::Mutex::default(),
            gate: Arc::default(),
            clock,
            panics: quintlet_telemetry::metrics::counter(
                "quintlet_contained_panics",
                "Panics that ended only the work of one pod",
            ),
            deaths: quintlet_telemetry::metrics::counter(
                "quintlet_deaths_in_pod_work",
                "Crashes of a service that are attributed to the pods in work",
            ),
            waiting: quintlet_telemetry::metrics::gauge(
                "quintlet_pods_set_aside",
                "Pods that wait after a panic or a crash of a service in their work",
            ),
        };
        let exit_note = exits::take(&paths.exit(SERVICE));
        new.attribute_exit(&exit_note, &previous, oom_kills);
        new.update_gauge();
        Ok(new)
    }

    /// Attributes a crash of the previous process to the pods whose work was in progress.
    fn attribute_exit(&self, exit_note: &str, left: &PreviousWork, oom_kills: Option<u64>) {
        let (boot, before) = left.note.split_once(' ').unwrap_or((&left.note, ""));
        if boot != self.boot {
            return;
        }
        let oom_killed = before.parse::<u64>().ok().zip(oom_kills).is_some_and(|(before, now)| now > before);
        let cause = exits::cause(exit_note, oom_killed);
        let in_work = match &cause {
            // A crash happens on the thread that runs the work.
            ProcessExit::Crash(_) => &left.on_thread,
            // Work that holds the memory need not be running on a thread.
            ProcessExit::OutOfMemory => &left.in_work,
            ProcessExit::External => return,
        };
        self.record_crash(SERVICE, &cause, in_work);
    }

    /// Records that a service crashed while it worked on these pods.
    pub fn record_crash(
        &self,
        process: &'static str,
        cause: &ProcessExit,
        in_work: &std::collections::BTreeSet<PodUid>,
    ) {
        self.deaths.inc();
        let aside = self.change(|ledger, now| ledger.process_exited(process, cause, in_work, now));
        tracing::warn!(process, ?cause, ?in_work, ?aside, "service crashed while it worked on pods");
    }

    // Blocks: the state directory is on a tmpfs, see `pod_sync_records::records`.
    fn change<T>(&self, change: impl FnOnce(&mut ContainmentRecords, Duration) -> T) -> T {
        let mut ledger = self.ledger.lock();
        let changed = change(&mut ledger, self.clock.boot());
        let saved = Saved { boot: self.boot.clone(), ledger: ledger.clone() };
        let written = serde_json::to_vec(&saved)
            .map_err(io::Error::from)
            .and_then(|bytes| quintlet_kit::atomic_file::write(&self.file, &bytes, 0o600));
        drop(ledger);
        if let Err(error) = written {
            tracing::error!(%error, "failed to write the ledger of panics and crashes");
        }
        self.update_gauge();
        changed
    }

    /// Updates the gauge of waiting pods, since waits end without a call.
    pub fn update_gauge(&self) {
        let waiting = self.ledger.lock().suspended_count(self.clock.boot());
        self.waiting.set(i64::try_from(waiting).unwrap_or(i64::MAX));
    }

    /// Returns the back-off of a pod after a panic or crash, if it is in one.
    #[must_use]
    pub fn suspension(&self, uid: &PodUid) -> Option<Suspension> {
        match self.ledger.lock().permission(uid, self.clock.boot()) {
            WorkPermission::Suspended(wait) => Some(wait),
            WorkPermission::Allowed | WorkPermission::OneAtATime => None,
        }
    }

    /// Records that work of a pod is in progress until the result is dropped.
    fn begin(&self, uid: &PodUid) -> Threads {
        let is_suspected = self.ledger.lock().is_suspected(uid);
        let gate = is_suspected.then(|| (uid.clone(), Arc::clone(&self.gate)));
        Arc::new(self.work_file.begin(uid)).threads(gate)
    }

    /// Runs work of one pod. The work of a suspected pod waits until no other suspected pod is in work.
    /// Cancel safe if the work is.
    ///
    /// # Errors
    /// The work panicked. Call [`Containment::record_panic`] for the back-off.
    pub async fn contained<T>(&self, pod: &PodWork, work: impl Future<Output = T>) -> Result<T, Panic> {
        let standing = self.ledger.lock().permission(&pod.uid, self.clock.boot());
        let _turn = match standing {
            WorkPermission::OneAtATime => Some(self.turn.lock().await),
            WorkPermission::Allowed | WorkPermission::Suspended(_) => None,
        };
        let named = Work::marked(pod.uid.as_str(), pod.name.clone(), self.begin(&pod.uid));
        let done = contain::contained(named.with_priority(pod.is_critical), work).await;
        if done.is_err() {
            self.panics.inc();
        }
        done
    }

    /// Like [`Containment::contained`], for work that is not async. It waits only while a thread executes
    /// work of another suspected pod.
    pub fn contained_now<T>(&self, uid: &PodUid, name: String, work: impl FnOnce() -> T) -> Result<T, Panic> {
        let done = contain::contained_now(&Work::marked(uid.as_str(), name, self.begin(uid)), work);
        if done.is_err() {
            self.panics.inc();
        }
        done
    }

    /// Runs work of a pod that is repeated periodically, unless the pod is in a back-off. A panic is logged
    /// and starts no back-off.
    pub fn unless_suspended<T>(&self, uid: &PodUid, work: impl FnOnce() -> T) -> Option<T> {
        if self.suspension(uid).is_some() {
            return None;
        }
        self.contained_now(uid, String::new(), work).ok()
    }

    /// Records a panic in the work of a pod, and returns the back-off.
    pub fn record_panic(&self, uid: &PodUid, panic: &Panic) -> Suspension {
        let message = format!("{SERVICE} {panic}");
        self.change(|ledger, now| ledger.record_panic(uid, message, now))
    }

    /// Records that a sync of a pod succeeded.
    pub fn record_success(&self, uid: &PodUid) {
        let is_known = self.ledger.lock().has_record(uid);
        if is_known {
            self.change(|ledger, now| ledger.record_success(uid, now));
        }
    }

    /// Ends the back-off of a pod after a panic, since its spec has changed. A pod that is set aside stays
    /// so.
    pub fn record_spec_change(&self, uid: &PodUid) {
        self.change(|ledger, _| ledger.pod_changed(uid));
    }

    /// Ends the back-off of a pod at the request of an operator. Returns whether there was one.
    pub fn end_suspension(&self, uid: &PodUid) -> bool {
        self.change(|ledger, now| ledger.retry(uid, now))
    }

    /// Removes the data of a pod that has been cleaned up.
    pub fn forget(&self, uid: &PodUid) {
        let is_known = self.ledger.lock().has_record(uid);
        if is_known {
            self.change(|ledger, _| ledger.forget(uid));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn uid(name: &str) -> PodUid {
        PodUid::parse(name).unwrap()
    }

    fn work(name: &str) -> PodWork {
        PodWork::unnamed(&uid(name))
    }

    fn open(run: &Path) -> Containment {
        let paths = Paths::new(run);
        std::fs::create_dir_all(paths.state_dir()).unwrap();
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(10_000));
        Containment::open(&paths, "boot".to_owned(), clock).unwrap()
    }

    // Simulates a process that ends while a thread executes work of `k`, and `other` waits.
    async fn dies(run: &Path, note: Option<&str>) {
        let process = open(run);
        let before = process.suspension(&uid("k"));
        let (other, k) = (work("other"), work("k"));
        let waiting = process.contained(&other, std::future::pending::<()>());
        let mut waiting = Box::pin(waiting);
        assert!(futures::poll!(&mut waiting).is_pending());
        let marks = run.join("state").join(WORK_FILE);
        let at_death = process.contained(&k, async {
            std::fs::copy(&marks, run.join("left")).unwrap();
        });
        if before.is_none() {
            at_death.await.unwrap();
        }
        // The next process finds the content of the file at this moment.
        std::fs::rename(run.join("left"), &marks).unwrap();
        if let Some(note) = note {
            let path = Paths::new(run).exit(SERVICE);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, note).unwrap();
        }
    }

    #[tokio::test]
    async fn a_pod_is_set_aside_after_two_crashes_in_its_work_and_not_after_kills() {
        for (note, is_aside) in [
            (Some("signal ABRT"), true),
            (Some("core-dump SEGV"), true),
            (Some("signal KILL"), false),
            (Some("exit-code 70"), false),
            (None, false),
        ] {
            let run = tempfile::tempdir().unwrap();
            for _ in 0..2 {
                dies(run.path(), note).await;
            }
            let after = open(run.path());
            let wait = after.suspension(&uid("k"));
            assert_eq!(wait.as_ref().map(|w| w.is_aside), is_aside.then_some(true), "{note:?}");
            assert_eq!(after.suspension(&uid("other")), None, "{note:?}: the work was on no thread");
            // The next process still has the record, and does not count the exit again.
            drop(after);
            assert_eq!(open(run.path()).suspension(&uid("k")), wait, "{note:?}");
        }
    }

    #[tokio::test]
    async fn suspected_pods_are_worked_on_one_at_a_time_and_others_concurrently() {
        let run = tempfile::tempdir().unwrap();
        let c = open(run.path());
        for _ in 0..2 {
            c.record_crash(SERVICE, &ProcessExit::Crash("SIGABRT".to_owned()), &[uid("a"), uid("b")].into());
        }
        let pending = std::future::pending::<()>;
        let (a, b) = (work("a"), work("b"));
        let first = c.contained(&a, pending());
        let second_runs = std::cell::Cell::new(false);
        let second = c.contained(&b, async { second_runs.set(true) });
        let (mut first, mut second) = (Box::pin(first), std::pin::pin!(second));
        assert!(futures::poll!(&mut first).is_pending());
        assert!(futures::poll!(&mut second).is_pending());
        assert!(!second_runs.get(), "another suspected pod is in work");
        c.contained(&work("free"), async {}).await.unwrap();
        drop(first);
        second.await.unwrap();
        assert!(second_runs.get());
    }

    #[test]
    fn no_thread_executes_work_of_a_suspected_pod_while_another_does() {
        let run = tempfile::tempdir().unwrap();
        let c = open(run.path());
        for _ in 0..2 {
            c.record_crash(SERVICE, &ProcessExit::Crash("SIGABRT".to_owned()), &[uid("a"), uid("b")].into());
        }
        let on_threads = || WorkFile::read(&run.path().join("state").join(WORK_FILE)).on_thread;
        std::thread::scope(|threads| {
            let (b_began, has_begun) = std::sync::mpsc::channel();
            c.contained_now(&uid("a"), String::new(), || {
                threads
                    .spawn(|| c.contained_now(&uid("b"), String::new(), move || b_began.send(on_threads())));
                assert!(
                    has_begun.recv_timeout(Duration::from_millis(100)).is_err(),
                    "work of `b` is executed"
                );
                assert_eq!(on_threads(), [uid("a")].into());
                c.contained_now(&uid("free"), String::new(), || {
                    assert_eq!(on_threads(), [uid("a"), uid("free")].into());
                })
                .unwrap();
            })
            .unwrap();
            let at_b = has_begun.recv_timeout(Duration::from_secs(10)).expect("work of `b` is executed");
            assert_eq!(at_b, [uid("b")].into());
        });
    }

    #[tokio::test]
    async fn a_panic_starts_a_back_off_of_its_pod_and_is_counted() {
        let run = tempfile::tempdir().unwrap();
        let c = open(run.path());
        let before = c.panics.get();
        let panic = c.contained(&work("a"), async { panic!("boom") }).await.map(|(): ()| ());
        let wait = c.record_panic(&uid("a"), &panic.unwrap_err());
        assert!(
            wait.message.starts_with("pod-sync panicked at ") && wait.message.ends_with(": boom"),
            "{wait:?}"
        );
        assert_eq!(c.suspension(&uid("a")), Some(wait));
        assert_eq!((c.panics.get() - before, c.waiting.get()), (1, 1));
        assert!(c.end_suspension(&uid("a")));
        assert_eq!((c.suspension(&uid("a")), c.waiting.get()), (None, 0));
    }
}
