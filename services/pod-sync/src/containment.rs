//! Keeps what goes wrong in the work of one pod to that pod: see [`pod_sync_decisions::containment`] for the rules.
//!
//! [`Containment::contained`] runs all work that is for one pod: a pass of its worker, its mirror, its removal. The pods in
//! work are in a file ([`marks`]); how the last process ended is in another, by its supervisor ([`exits`]). A death of cri-proxy
//! is held against the pods whose calls broke with it ([`peers`]).

pub mod exits;
pub mod marks;
pub mod peers;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_kit::clock::Clock;
use quintlet_kit::contain::{self, Panic, Work};
use quintlet_kit::paths::Paths;
use quintlet_model::ids::PodUid;
use serde::{Deserialize, Serialize};

use marks::{Left, Marks};
use pod_sync_decisions::containment::{ContainmentRecords, ProcessExit, Suspension, WorkPermission};

/// Name of the service, as its supervisor has it.
const SERVICE: &str = "pod-sync";
/// What is known of pods, beside their records.
const LEDGER: &str = ".containment";
/// Pods in work.
const MARKS: &str = ".work";

#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    boot: String,
    ledger: ContainmentRecords,
}

/// Panics and deaths in the work of pods.
#[derive(Debug)]
pub struct Containment {
    ledger: Mutex<ContainmentRecords>,
    file: PathBuf,
    boot: String,
    marks: Marks,
    // Held by the one suspected pod in work.
    turn: tokio::sync::Mutex<()>,
    clock: Clock,
    panics: Counter,
    deaths: Counter,
    waiting: Gauge,
}

impl Containment {
    /// Goes on with what an earlier process left in the state directory.
    ///
    /// # Errors
    /// The state directory cannot be written.
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
        let (marks, left) = Marks::open(&dir.join(MARKS), &note)?;
        let new = Self {
            ledger: Mutex::new(ledger),
            file,
            boot,
            marks,
            turn: tokio::sync::Mutex::default(),
            clock,
            panics: quintlet_telemetry::metrics::counter(
                "quintlet_contained_panics",
                "Panics in the work of one pod that ended that work alone",
            ),
            deaths: quintlet_telemetry::metrics::counter(
                "quintlet_deaths_in_pod_work",
                "Deaths of a process that are held against the pods in work",
            ),
            waiting: quintlet_telemetry::metrics::gauge(
                "quintlet_pods_set_aside",
                "Pods that wait after a panic or a death of a process in their work",
            ),
        };
        let told = exits::take(&paths.exit(SERVICE));
        new.find_death(&told, &left, oom_kills);
        new.count();
        Ok(new)
    }

    // Blames the last process' death on the pods it left in work.
    fn find_death(&self, told: &str, left: &Left, oom_kills: Option<u64>) {
        let (boot, before) = left.note.split_once(' ').unwrap_or((&left.note, ""));
        if boot != self.boot {
            return;
        }
        let oom_killed = before.parse::<u64>().ok().zip(oom_kills).is_some_and(|(before, now)| now > before);
        let cause = exits::cause(told, oom_killed);
        let in_work = match &cause {
            // What a process does to itself, it does on the thread that executes the work.
            ProcessExit::Crash(_) => &left.on_thread,
            // Whoever holds the memory need not be on a thread.
            ProcessExit::OutOfMemory => &left.in_work,
            ProcessExit::External => return,
        };
        self.died(SERVICE, &cause, in_work);
    }

    /// A process died while it worked on these pods.
    pub fn died(
        &self,
        process: &'static str,
        cause: &ProcessExit,
        in_work: &std::collections::BTreeSet<PodUid>,
    ) {
        self.deaths.inc();
        let aside = self.change(|ledger, now| ledger.process_exited(process, cause, in_work, now));
        tracing::warn!(process, ?cause, ?in_work, ?aside, "process died while it worked on pods");
    }

    fn change<T>(&self, change: impl FnOnce(&mut ContainmentRecords, Duration) -> T) -> T {
        let mut ledger = self.ledger.lock();
        let changed = change(&mut ledger, self.clock.boot());
        let saved = Saved { boot: self.boot.clone(), ledger: ledger.clone() };
        let written = serde_json::to_vec(&saved)
            .map_err(io::Error::from)
            .and_then(|bytes| quintlet_kit::atomic_file::write(&self.file, &bytes, 0o600));
        drop(ledger);
        if let Err(error) = written {
            tracing::error!(%error, "panics and deaths of pods not saved");
        }
        self.count();
        changed
    }

    /// Brings the gauge up to date: waits end by themselves.
    pub fn count(&self) {
        let waiting = self.ledger.lock().suspended_count(self.clock.boot());
        self.waiting.set(i64::try_from(waiting).unwrap_or(i64::MAX));
    }

    /// What the pod waits for before it may be worked on.
    #[must_use]
    pub fn wait(&self, uid: &PodUid) -> Option<Suspension> {
        match self.ledger.lock().permission(uid, self.clock.boot()) {
            WorkPermission::Suspended(wait) => Some(wait),
            WorkPermission::Allowed | WorkPermission::OneAtATime => None,
        }
    }

    /// Runs work of one pod. A suspected pod waits here until no other such pod is in work.
    ///
    /// Cancellation safety: that of the work.
    ///
    /// # Errors
    /// The work panicked: [`Containment::panicked`] says what the pod waits for now.
    pub async fn contained<T>(
        &self,
        uid: &PodUid,
        name: String,
        work: impl Future<Output = T>,
    ) -> Result<T, Panic> {
        let standing = self.ledger.lock().permission(uid, self.clock.boot());
        let _turn = match standing {
            WorkPermission::OneAtATime => Some(self.turn.lock().await),
            WorkPermission::Allowed | WorkPermission::Suspended(_) => None,
        };
        let mark = Arc::new(self.marks.begin(uid));
        let done = contain::contained(Work::marked(uid.as_str(), name, mark.threads()), work).await;
        if done.is_err() {
            self.panics.inc();
        }
        done
    }

    /// As [`Containment::contained`], for work that does not wait.
    ///
    /// # Errors
    /// The work panicked.
    pub fn contained_now<T>(&self, uid: &PodUid, name: String, work: impl FnOnce() -> T) -> Result<T, Panic> {
        let mark = Arc::new(self.marks.begin(uid));
        let done = contain::contained_now(&Work::marked(uid.as_str(), name, mark.threads()), work);
        if done.is_err() {
            self.panics.inc();
        }
        done
    }

    /// The work of a pod panicked; returns what the pod waits for now.
    pub fn panicked(&self, uid: &PodUid, panic: &Panic) -> Suspension {
        let message = format!("{SERVICE} {panic}");
        self.change(|ledger, now| ledger.record_panic(uid, message, now))
    }

    /// A pass over a pod ended well.
    pub fn worked(&self, uid: &PodUid) {
        let is_known = self.ledger.lock().has_record(uid);
        if is_known {
            self.change(|ledger, now| ledger.record_success(uid, now));
        }
    }

    /// The pod is another one now.
    pub fn changed(&self, uid: &PodUid) {
        self.change(|ledger, _| ledger.pod_changed(uid));
    }

    /// An operator wants the pod to be tried now. Returns whether it waited.
    pub fn retry(&self, uid: &PodUid) -> bool {
        self.change(|ledger, now| ledger.retry(uid, now))
    }

    /// Nothing is left of the pod.
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

    fn open(run: &Path) -> Containment {
        let paths = Paths::new(run);
        std::fs::create_dir_all(paths.state_dir()).unwrap();
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(10_000));
        Containment::open(&paths, "boot".to_owned(), clock).unwrap()
    }

    // A process that ends while a thread executes work of `k`, and `other` waits.
    async fn dies(run: &Path, note: Option<&str>) {
        let process = open(run);
        let before = process.wait(&uid("k"));
        let (other, k) = (uid("other"), uid("k"));
        let waiting = process.contained(&other, String::new(), std::future::pending::<()>());
        let mut waiting = Box::pin(waiting);
        assert!(futures::poll!(&mut waiting).is_pending());
        let marks = run.join("state").join(MARKS);
        let at_death = process.contained(&k, String::new(), async {
            std::fs::copy(&marks, run.join("left")).unwrap();
        });
        if before.is_none() {
            at_death.await.unwrap();
        }
        // What the file had at that moment is what the next process finds.
        std::fs::rename(run.join("left"), &marks).unwrap();
        if let Some(note) = note {
            let path = Paths::new(run).exit(SERVICE);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, note).unwrap();
        }
    }

    #[tokio::test]
    async fn a_pod_with_which_the_process_dies_twice_is_set_aside_and_a_kill_sets_none_aside() {
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
            let wait = after.wait(&uid("k"));
            assert_eq!(wait.as_ref().map(|w| w.is_aside), is_aside.then_some(true), "{note:?}");
            assert_eq!(after.wait(&uid("other")), None, "{note:?}: it was on no thread");
            // The next one still knows, and does not count the death again.
            drop(after);
            assert_eq!(open(run.path()).wait(&uid("k")), wait, "{note:?}");
        }
    }

    #[tokio::test]
    async fn suspected_pods_are_worked_on_one_at_a_time_and_others_beside_them() {
        let run = tempfile::tempdir().unwrap();
        let c = open(run.path());
        for _ in 0..2 {
            c.died(SERVICE, &ProcessExit::Crash("SIGABRT".to_owned()), &[uid("a"), uid("b")].into());
        }
        let (pending, none) = (std::future::pending::<()>, String::new);
        let (a, b) = (uid("a"), uid("b"));
        let first = c.contained(&a, none(), pending());
        let second_runs = std::cell::Cell::new(false);
        let second = c.contained(&b, none(), async { second_runs.set(true) });
        let (mut first, mut second) = (Box::pin(first), std::pin::pin!(second));
        assert!(futures::poll!(&mut first).is_pending());
        assert!(futures::poll!(&mut second).is_pending());
        assert!(!second_runs.get(), "it is not its turn");
        c.contained(&uid("free"), none(), async {}).await.unwrap();
        drop(first);
        second.await.unwrap();
        assert!(second_runs.get());
    }

    #[tokio::test]
    async fn a_panic_makes_its_pod_wait_and_is_counted() {
        let run = tempfile::tempdir().unwrap();
        let c = open(run.path());
        let before = c.panics.get();
        let panic = c.contained(&uid("a"), String::new(), async { panic!("boom") }).await.map(|(): ()| ());
        let wait = c.panicked(&uid("a"), &panic.unwrap_err());
        assert!(
            wait.message.starts_with("pod-sync panicked at ") && wait.message.ends_with(": boom"),
            "{wait:?}"
        );
        assert_eq!(c.wait(&uid("a")), Some(wait));
        assert_eq!((c.panics.get() - before, c.waiting.get()), (1, 1));
        assert!(c.retry(&uid("a")));
        assert_eq!((c.wait(&uid("a")), c.waiting.get()), (None, 0));
    }
}
