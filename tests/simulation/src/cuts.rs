//! Ends pod-sync at one exact failpoint. Nothing after that failpoint is executed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;

use parking_lot::{Condvar, Mutex};
use quintlet_kit::contain;
use quintlet_kit::failpoint::{Failpoint, Kind, Observer, ProcessEnded, When};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

#[derive(Debug)]
struct Armed {
    effect: Kind,
    when: When,
    // None: it only counts.
    at: Option<Step>,
    passed: Vec<&'static str>,
}

/// One step of a kind among those of that kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Which kind.
    pub kind: String,
    /// Which of them, counted from 1.
    pub number: usize,
}

/// Where pod-sync is to end.
#[derive(Debug)]
pub struct Cuts {
    // Who changes `reached` holds this: a cut has either happened when somebody disarms, or never does.
    armed: Mutex<Option<Armed>>,
    reached: watch::Sender<Option<Failpoint>>,
    // A kind of step, and the name of the pod in whose work it panics.
    panic: Mutex<Option<(String, String)>>,
}

impl Default for Cuts {
    fn default() -> Self {
        Self { armed: Mutex::default(), reached: watch::Sender::new(None), panic: Mutex::default() }
    }
}

impl Cuts {
    /// Ends pod-sync at this step before or after effects of this kind, counted from now on. Without a step, failpoints are only counted.
    pub fn arm(&self, effect: Kind, when: When, at: Option<Step>) {
        let mut armed = self.armed.lock();
        self.reached.send_replace(None);
        *armed = Some(Armed { effect, when, at, passed: Vec::new() });
    }

    /// It ends nowhere any more; what passed since it was armed, or until it ended.
    pub fn disarm(&self) -> Vec<&'static str> {
        self.armed.lock().take().map(|armed| armed.passed).unwrap_or_default()
    }

    /// Whether a step of this kind has passed since it was armed.
    #[must_use]
    pub fn has_passed(&self, kind: &str) -> bool {
        self.armed.lock().as_ref().is_some_and(|armed| armed.passed.contains(&kind))
    }

    /// Waits until pod-sync ended there.
    pub async fn reached(&self) {
        // The sender lives as long as `self`.
        let _ = self.reached.subscribe().wait_for(Option::is_some).await;
    }

    /// Where pod-sync ended last.
    #[must_use]
    pub fn last(&self) -> Option<Failpoint> {
        *self.reached.borrow()
    }

    /// From now on each step of this kind in the work of the pod `name` of namespace `default` panics; none without.
    pub fn panic_at(&self, at: Option<(&str, &str)>) {
        *self.panic.lock() = at.map(|(step, name)| (step.to_owned(), format!("default/{name}")));
    }

    fn panics(&self, failpoint: Failpoint) -> bool {
        let panic = self.panic.lock().clone();
        let is_step = |(step, name): &(String, String)| {
            failpoint.when == When::Before
                && step == failpoint.name
                && contain::current().is_some_and(|work| work.name() == name)
        };
        panic.as_ref().is_some_and(is_step)
    }

    fn is_here(&self, failpoint: Failpoint) -> bool {
        let mut armed = self.armed.lock();
        let Some(at) = armed.as_mut().filter(|a| a.effect == failpoint.kind && a.when == failpoint.when)
        else {
            return false;
        };
        // Another life of pod-sync goes on from the cut.
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

/// One run of pod-sync. Its threads end at their next passing once it is over, as the threads of a process that was killed.
#[derive(Debug)]
pub(crate) struct Life {
    cuts: Arc<Cuts>,
    kill: CancellationToken,
    main: ThreadId,
    over: AtomicBool,
    // Everything of its executor is dropped.
    gone: Mutex<bool>,
    went: Condvar,
}

impl Life {
    /// One of the thread that calls.
    pub(crate) fn new(cuts: Arc<Cuts>, kill: CancellationToken) -> Self {
        let main = std::thread::current().id();
        Self { cuts, kill, main, over: AtomicBool::new(false), gone: Mutex::new(false), went: Condvar::new() }
    }

    /// Nothing of it is to be done any more.
    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Nobody is left who could take the end of a thread for an error.
    pub(crate) fn is_gone(&self) {
        *self.gone.lock() = true;
        self.went.notify_all();
    }
}

impl Observer for Life {
    fn reached(&self, failpoint: Failpoint) {
        if !self.is_over() {
            assert!(!self.cuts.panics(failpoint), "injected into {:?}", failpoint.name);
            if !self.cuts.is_here(failpoint) {
                return;
            }
            self.end();
            self.kill.cancel();
        }
        // Who waits for another thread's work must not go on for want of it.
        if std::thread::current().id() != self.main {
            let mut gone = self.gone.lock();
            self.went.wait_while(&mut gone, |gone| !*gone);
        }
        std::panic::resume_unwind(Box::new(ProcessEnded));
    }
}
