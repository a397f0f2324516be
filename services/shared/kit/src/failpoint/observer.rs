//! Observers of failpoints.

use std::cell::RefCell;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// The kind of effect at a failpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A change of a file, a directory, a mount or a cgroup.
    File,
    /// A request with a status to status-reporter, or its response.
    Status,
    /// A step in the work of one pod that has no effect outside of the process.
    Work,
}

/// The panic payload with which an observer ends the whole process of a test. Any other panic of an observer
/// counts as a panic of the work at the failpoint.
#[derive(Debug)]
pub struct ProcessEnded;

/// Whether a failpoint is before or after its effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum When {
    /// The effect has not started.
    Before,
    /// The effect is complete.
    After,
}

/// One execution of a failpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Failpoint {
    /// The kind of effect.
    pub kind: Kind,
    /// Whether the effect is complete.
    pub when: When,
    /// Name of the effect.
    pub name: &'static str,
}

/// A file that was replaced by [`crate::atomic_file`].
#[derive(Debug, Clone, Copy)]
pub struct FileWrite<'a> {
    /// The file.
    pub path: &'a Path,
    /// The content after the replacement.
    pub bytes: &'a [u8],
    /// Whether the file and its directory were synced: the content survives the loss of power.
    pub is_durable: bool,
}

/// Observes the failpoints of its threads, on the thread itself. It may block or unwind. If it unwinds before
/// an effect, the effect does not happen.
pub trait Observer: Send + Sync {
    /// Called when a thread reaches a failpoint.
    fn reached(&self, failpoint: Failpoint);

    /// Called after a thread has replaced a file.
    fn wrote(&self, _write: &FileWrite<'_>) {}
}

thread_local! {
    static OBSERVER: RefCell<Option<Arc<dyn Observer>>> = const { RefCell::new(None) };
}

// The observer of all threads without their own.
static EVERYWHERE: OnceLock<Arc<dyn Observer>> = OnceLock::new();

/// Sets the observer of all threads of the process that have no observer of their own. Only the first call
/// has an effect.
pub fn observe_everywhere(observer: Arc<dyn Observer>) {
    let _ = EVERYWHERE.set(observer);
}

/// Sets the observer of this thread, until the thread ends.
pub fn observe(observer: Arc<dyn Observer>) {
    OBSERVER.with(|o| *o.borrow_mut() = Some(observer));
}

/// Notifies the observer, if any, of a failpoint.
pub fn reached(kind: Kind, when: When, name: &'static str) {
    notify(|observer| observer.reached(Failpoint { kind, when, name }));
}

/// Notifies the observer, if any, of a file that was replaced.
pub fn wrote(write: &FileWrite<'_>) {
    notify(|observer| observer.wrote(write));
}

fn notify(event: impl FnOnce(&dyn Observer)) {
    // The thread-local is gone while a thread ends.
    let observer = OBSERVER.try_with(|o| o.borrow().clone()).ok().flatten();
    if let Some(observer) = observer.as_ref().or_else(|| EVERYWHERE.get()) {
        event(observer.as_ref());
    }
}

/// Executes `work` with a failpoint before and after it.
pub fn around<T>(kind: Kind, name: &'static str, work: impl FnOnce() -> T) -> T {
    reached(kind, When::Before, name);
    let done = work();
    reached(kind, When::After, name);
    done
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;
    use crate::failpoint;

    #[derive(Default)]
    struct Log(Mutex<Vec<(When, &'static str)>>);

    impl Observer for Log {
        fn reached(&self, failpoint: Failpoint) {
            self.0.lock().push((failpoint.when, failpoint.name));
            if failpoint.name == "ends here" {
                std::panic::resume_unwind(Box::new(()));
            }
        }
    }

    #[test]
    fn an_observer_sees_both_sides_of_an_effect_and_can_prevent_it() {
        assert_eq!(failpoint::file!("unobserved", || 1), 1);
        let log = Arc::new(Log::default());
        let observer = Arc::clone(&log);
        let observed = std::thread::spawn(move || {
            observe(observer);
            failpoint::file!("done", || ());
            failpoint::file!("ends here", || panic!("the effect is prevented"));
        });
        assert!(observed.join().is_err());
        failpoint::file!("of another thread", || ());
        let seen = [(When::Before, "done"), (When::After, "done"), (When::Before, "ends here")];
        assert_eq!(*log.0.lock(), seen);
    }
}
