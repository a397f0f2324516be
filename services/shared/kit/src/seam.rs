//! Where a test may end a process.
//!
//! A process can die between any two instructions. What its successor meets depends only on which of the things that outlive
//! it were done: changes of files, and what other processes were told. Each of these passes here, once before it and once
//! after. Outside of tests nobody watches, and a passing is one look at a thread-local and one at a static.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

/// What outlives the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Seam {
    /// A change of a file, a directory, a mount or a cgroup.
    File,
    /// A status on its way to status-reporter, or its answer.
    Status,
    /// A step in the work of one pod that changes nothing outside of the process.
    Work,
}

/// What a watcher unwinds with where the whole process of a test is to end. Any other panic of a watcher is one of the step.
#[derive(Debug)]
pub struct Ended;

/// Which side of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum When {
    /// Nothing of it is done.
    Before,
    /// All of it is.
    After,
}

/// One passing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Passing {
    /// The seam.
    pub seam: Seam,
    /// Its side.
    pub when: When,
    /// What is done.
    pub step: &'static str,
}

/// Learns of every passing on its threads, on the thread itself. It may block or unwind, and then the step is not done, or
/// nothing after it.
pub trait Watcher: Send + Sync {
    /// Something passes.
    fn passes(&self, passing: Passing);
}

thread_local! {
    static WATCHER: RefCell<Option<Arc<dyn Watcher>>> = const { RefCell::new(None) };
}

// Of all threads without one of their own.
static EVERYWHERE: OnceLock<Arc<dyn Watcher>> = OnceLock::new();

/// Has the passings of every thread of this process that has no watcher of its own told to `watcher`: for a test's process.
/// The first call counts.
pub fn watch_everywhere(watcher: Arc<dyn Watcher>) {
    let _ = EVERYWHERE.set(watcher);
}

/// Has all passings of this thread told to `watcher`, until the thread ends.
pub fn watch(watcher: Arc<dyn Watcher>) {
    WATCHER.with(|w| *w.borrow_mut() = Some(watcher));
}

/// Tells of a passing.
pub fn pass(seam: Seam, when: When, step: &'static str) {
    // A thread that ends has no watcher any more.
    let watcher = WATCHER.try_with(|w| w.borrow().clone()).ok().flatten();
    if let Some(watcher) = watcher.as_ref().or_else(|| EVERYWHERE.get()) {
        watcher.passes(Passing { seam, when, step });
    }
}

/// Does `work`, with a passing on either side.
pub fn around<T>(seam: Seam, step: &'static str, work: impl FnOnce() -> T) -> T {
    pass(seam, When::Before, step);
    let done = work();
    pass(seam, When::After, step);
    done
}

/// A change of a file.
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
