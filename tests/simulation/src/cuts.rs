//! Kills pod-sync at an exact failpoint. No code after that failpoint is executed.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;

use parking_lot::{Condvar, Mutex};
use quintlet_kit::contain;
use quintlet_kit::failpoint::{Failpoint, FileWrite, Kind, Observer, ProcessEnded, When};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

#[derive(Debug)]
struct Armed {
    effect: Kind,
    when: When,
    // `None`: failpoints are only counted.
    at: Option<CutPoint>,
    passed: Vec<&'static str>,
}

/// A step of a kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CutPoint {
    /// Name of the step, as the failpoint gives it.
    pub kind: String,
    /// Number among the steps of its kind, from 1.
    pub number: usize,
}

/// The failpoint at which pod-sync is killed.
#[derive(Debug)]
pub struct Cuts {
    // Held while `reached` changes: once disarmed, no kill can follow.
    armed: Mutex<Option<Armed>>,
    reached: watch::Sender<Option<Failpoint>>,
    // A kind of step, and the name of the pod whose work panics there.
    panic: Mutex<Option<(String, String)>>,
    // A kind of step, and the name of the pod whose work hangs there, like a file system or systemd that does
    // not answer.
    hang: Mutex<Option<(String, String)>>,
    answers: Condvar,
    hanging: watch::Sender<usize>,
    // Files that services have replaced, in order; `None`: they are not recorded.
    written: Mutex<Option<Vec<WrittenFile>>>,
}

/// A file that a service replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenFile {
    /// Path of the replaced file.
    pub path: PathBuf,
    /// The new content.
    pub bytes: Vec<u8>,
    /// Whether the content survives the loss of power.
    pub is_durable: bool,
}

impl Default for Cuts {
    fn default() -> Self {
        Self {
            armed: Mutex::default(),
            reached: watch::Sender::new(None),
            panic: Mutex::default(),
            hang: Mutex::default(),
            answers: Condvar::new(),
            hanging: watch::Sender::new(0),
            written: Mutex::default(),
        }
    }
}

fn is_at(step: Option<&(String, String)>, failpoint: Failpoint) -> bool {
    let is_step = |(step, name): &(String, String)| {
        failpoint.when == When::Before
            && step == failpoint.name
            && contain::current().is_some_and(|work| work.name() == name)
    };
    step.is_some_and(is_step)
}

impl Cuts {
    /// Kills pod-sync at this step, before or after effects of this kind, counted from now. Without a step,
    /// failpoints are only counted.
    pub fn arm(&self, effect: Kind, when: When, at: Option<CutPoint>) {
        let mut armed = self.armed.lock();
        self.reached.send_replace(None);
        *armed = Some(Armed { effect, when, at, passed: Vec::new() });
    }

    /// Disarms the failpoint. Returns the steps that were passed since it was armed, until the kill.
    pub fn disarm(&self) -> Vec<&'static str> {
        self.armed.lock().take().map(|armed| armed.passed).unwrap_or_default()
    }

    /// Returns whether a step of this kind was passed since a failpoint was armed.
    #[must_use]
    pub fn has_passed(&self, kind: &str) -> bool {
        self.armed.lock().as_ref().is_some_and(|armed| armed.passed.contains(&kind))
    }

    /// Waits until pod-sync was killed there.
    pub async fn reached(&self) {
        // The sender exists as long as `self`.
        let _ = self.reached.subscribe().wait_for(Option::is_some).await;
    }

    /// Returns the failpoint of the last kill.
    #[must_use]
    pub fn last(&self) -> Option<Failpoint> {
        *self.reached.borrow()
    }

    /// Makes each step of this kind panic in the work of pod `name` in namespace `default`; `None` ends that.
    pub fn panic_at(&self, at: Option<(&str, &str)>) {
        *self.panic.lock() = at.map(|(step, name)| (step.to_owned(), format!("default/{name}")));
    }

    fn panics(&self, failpoint: Failpoint) -> bool {
        is_at(self.panic.lock().as_ref(), failpoint)
    }

    /// Makes each step of this kind hang in the work of pod `name` in namespace `default`. `None` ends that,
    /// also for those that hang.
    pub fn hang_at(&self, at: Option<(&str, &str)>) {
        *self.hang.lock() = at.map(|(step, name)| (step.to_owned(), format!("default/{name}")));
        self.answers.notify_all();
    }

    /// Waits until a step hangs.
    pub async fn hung(&self) {
        // The sender exists as long as `self`.
        let _ = self.hanging.subscribe().wait_for(|steps| *steps > 0).await;
    }

    fn hang(&self, failpoint: Failpoint) {
        let mut hang = self.hang.lock();
        if is_at(hang.as_ref(), failpoint) {
            self.hanging.send_modify(|steps| *steps = steps.saturating_add(1));
            self.answers.wait_while(&mut hang, |hang| is_at(hang.as_ref(), failpoint));
            self.hanging.send_modify(|steps| *steps = steps.saturating_sub(1));
        }
    }

    /// Records the files that services replace from now on.
    pub fn record_files(&self) {
        *self.written.lock() = Some(Vec::new());
    }

    /// Returns the files that services have replaced since they are recorded, in order.
    #[must_use]
    pub fn written_files(&self) -> Vec<WrittenFile> {
        self.written.lock().clone().unwrap_or_default()
    }

    fn wrote(&self, write: &FileWrite<'_>) {
        if let Some(written) = self.written.lock().as_mut() {
            let FileWrite { path, bytes, is_durable } = *write;
            written.push(WrittenFile { path: path.to_owned(), bytes: bytes.to_owned(), is_durable });
        }
    }

    fn is_here(&self, failpoint: Failpoint) -> bool {
        let mut armed = self.armed.lock();
        let Some(at) = armed.as_mut().filter(|a| a.effect == failpoint.kind && a.when == failpoint.when)
        else {
            return false;
        };
        // A later run of pod-sync is not killed again.
        if self.reached.borrow().is_some() {
            return false;
        }
        at.passed.push(failpoint.name);
        let passed = |kind: &str| at.passed.iter().filter(|step| **step == kind).count();
        let here =
            at.at.as_ref().is_some_and(|at| at.kind == failpoint.name && at.number == passed(failpoint.name));
        if here {
            self.reached.send_replace(Some(failpoint));
        }
        here
    }
}

/// One run of pod-sync. Once it is killed, its threads end at their next failpoint, like those of a killed
/// process.
#[derive(Debug)]
pub(crate) struct Life {
    cuts: Arc<Cuts>,
    kill: CancellationToken,
    main: ThreadId,
    over: AtomicBool,
    // All tasks of its runtime were dropped.
    gone: Mutex<bool>,
    went: Condvar,
}

impl Life {
    /// Returns a run on the calling thread.
    pub(crate) fn new(cuts: Arc<Cuts>, kill: CancellationToken) -> Self {
        let main = std::thread::current().id();
        Self { cuts, kill, main, over: AtomicBool::new(false), gone: Mutex::new(false), went: Condvar::new() }
    }

    /// Makes all its threads end.
    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Marks the runtime as dropped: the end of a thread is no longer observed as an error.
    pub(crate) fn is_gone(&self) {
        *self.gone.lock() = true;
        self.went.notify_all();
    }
}

impl Observer for Life {
    fn reached(&self, failpoint: Failpoint) {
        if !self.is_over() {
            assert!(!self.cuts.panics(failpoint), "injected into {:?}", failpoint.name);
            self.cuts.hang(failpoint);
            if !self.cuts.is_here(failpoint) {
                return;
            }
            self.end();
            self.kill.cancel();
        }
        // A task that waits for another thread's work must not continue without it.
        if std::thread::current().id() != self.main {
            let mut gone = self.gone.lock();
            self.went.wait_while(&mut gone, |gone| !*gone);
        }
        std::panic::resume_unwind(Box::new(ProcessEnded));
    }

    fn wrote(&self, write: &FileWrite<'_>) {
        self.cuts.wrote(write);
    }
}

/// Records the files that a service replaces which is not killed at failpoints.
#[derive(Debug)]
pub(crate) struct FileRecorder(pub(crate) Arc<Cuts>);

impl Observer for FileRecorder {
    fn reached(&self, _failpoint: Failpoint) {}

    fn wrote(&self, write: &FileWrite<'_>) {
        self.0.wrote(write);
    }
}
