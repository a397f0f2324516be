//! Failpoints: places at which a test may end a process.
//!
//! A process can end between any two instructions. The state that its successor finds depends only on which external effects
//! took place: changes of files and messages to other processes. Each external effect calls [`pass`] once before and once after
//! it. Outside of tests there is no watcher, and a call only reads a thread-local and a static.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

/// The kind of effect at a failpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Seam {
    /// A change of a file, a directory, a mount or a cgroup.
    File,
    /// A request with a status to status-reporter, or its response.
    Status,
    /// A step in the work of one pod that has no effect outside of the process.
    Work,
}

/// The panic payload with which a watcher ends the whole process of a test. Any other panic of a watcher counts as one of the step.
#[derive(Debug)]
pub struct Ended;

/// Whether a failpoint is before or after its step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum When {
    /// The step has not started.
    Before,
    /// The step is complete.
    After,
}

/// One execution of a failpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Passing {
    /// The kind of effect.
    pub seam: Seam,
    /// Whether the step is done.
    pub when: When,
    /// Name of the step.
    pub step: &'static str,
}

/// Observes the failpoints of its threads, on the thread itself. It may block or unwind. If it unwinds before a step, the step
/// is not executed.
pub trait Watcher: Send + Sync {
    /// Called when a thread reaches a failpoint.
    fn passes(&self, passing: Passing);
}

thread_local! {
    static WATCHER: RefCell<Option<Arc<dyn Watcher>>> = const { RefCell::new(None) };
}

// The watcher of all threads without their own.
static EVERYWHERE: OnceLock<Arc<dyn Watcher>> = OnceLock::new();

/// Sets the watcher of all threads of the process that have no watcher of their own. Only the first call has an effect.
pub fn watch_everywhere(watcher: Arc<dyn Watcher>) {
    let _ = EVERYWHERE.set(watcher);
}

/// Sets the watcher of this thread, until the thread ends.
pub fn watch(watcher: Arc<dyn Watcher>) {
    WATCHER.with(|w| *w.borrow_mut() = Some(watcher));
}

/// Notifies the watcher, if any, of a failpoint.
pub fn pass(seam: Seam, when: When, step: &'static str) {
    // The thread-local is gone while a thread ends.
    let watcher = WATCHER.try_with(|w| w.borrow().clone()).ok().flatten();
    if let Some(watcher) = watcher.as_ref().or_else(|| EVERYWHERE.get()) {
        watcher.passes(Passing { seam, when, step });
    }
}

/// Executes `work` with a failpoint before and after it.
pub fn around<T>(seam: Seam, step: &'static str, work: impl FnOnce() -> T) -> T {
    pass(seam, When::Before, step);
    let done = work();
    pass(seam, When::After, step);
    done
}

/// Executes a change of a file with a failpoint before and after it.
pub fn file<T>(step: &'static str, work: impl FnOnce() -> T) -> T {
    around(Seam::File, step, work)
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[derive(Default)]
    struct Log(Mutex<Vec<(When, &'static str)>>);

    impl Watcher for Log {
        fn passes(&self, passing: Passing) {
            self.0.lock().push((passing.when, passing.step));
            if passing.step == "ends here" {
                std::panic::resume_unwind(Box::new(()));
            }
        }
    }

    #[test]
    fn a_watcher_sees_both_sides_of_a_step_and_can_keep_it_from_being_done() {
        assert_eq!(file("unwatched", || 1), 1);
        let log = Arc::new(Log::default());
        let watcher = Arc::clone(&log);
        let watched = std::thread::spawn(move || {
            watch(watcher);
            file("done", || ());
            file("ends here", || panic!("it is not done"));
        });
        assert!(watched.join().is_err());
        file("of another thread", || ());
        let seen = [(When::Before, "done"), (When::After, "done"), (When::Before, "ends here")];
        assert_eq!(*log.0.lock(), seen);
    }
}
