//! Selects the planted bug of a thread.

use std::cell::Cell;

thread_local! {
    static PLANTED: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Selects the bug of this thread until the thread ends; `None` for no bug.
pub fn plant(bug: Option<&'static str>) {
    PLANTED.set(bug);
}

/// Returns whether this bug is selected for this thread.
#[must_use]
pub fn is_planted(bug: &str) -> bool {
    // The thread-local is gone while a thread ends.
    PLANTED.try_with(Cell::get).is_ok_and(|planted| planted == Some(bug))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failpoint;

    #[test]
    fn a_bug_is_planted_only_on_the_thread_that_selected_it() {
        assert!(!failpoint::planted!("a bug of a test"));
        plant(Some("a bug of a test"));
        assert!(failpoint::planted!("a bug of a test"));
        assert!(!failpoint::planted!("another bug of a test"));
        let other = std::thread::spawn(|| failpoint::planted!("a bug of a test"));
        assert!(!other.join().unwrap(), "another thread has its own");
        plant(None);
        assert!(!failpoint::planted!("a bug of a test"));
    }
}
