//! Failpoints: places in the code at which a test can end the process or panic.
//!
//! A process can end between any two instructions. The state that the next process finds depends only on
//! which external effects took place: changes of files and messages to other processes. A failpoint is before
//! and after each external effect.
//!
//! Failpoints exist only with the cargo feature `failpoints`, which test crates enable. Without it, the
//! macros expand to the work alone, and the names of failpoints are not in the binary.
//!
//! A planted bug is a branch with a bug that another node agent had: [`planted!`]. A test selects it for the
//! threads of a node, and shows that its checks find it. Without the feature, the macro is the constant
//! false, and the branch is not in the binary.

#[cfg(feature = "failpoints")]
mod observer;
#[cfg(feature = "failpoints")]
mod plant;

#[cfg(feature = "failpoints")]
pub use observer::{
    Failpoint, FileWrite, Kind, Observer, ProcessEnded, When, around, observe, observe_everywhere, reached,
    wrote,
};

#[cfg(feature = "failpoints")]
pub use plant::{is_planted, plant};

pub use crate::{
    failpoint_around as around, failpoint_file as file, failpoint_planted as planted,
    failpoint_reached as reached, failpoint_step as step, failpoint_work as work,
};

/// Executes `work`. The macros expand to this function without the feature `failpoints`.
#[cfg(not(feature = "failpoints"))]
#[doc(hidden)]
#[inline(always)]
pub fn execute<T>(work: impl FnOnce() -> T) -> T {
    work()
}

/// Executes a function with a failpoint before and after it:
/// `around!(Status, "status sent", || send(status))`.
#[cfg(feature = "failpoints")]
#[macro_export]
macro_rules! failpoint_around {
    ($kind:ident, $name:literal, $work:expr) => {
        $crate::failpoint::around($crate::failpoint::Kind::$kind, $name, $work)
    };
}

/// Executes a function with a failpoint before and after it:
/// `around!(Status, "status sent", || send(status))`.
#[cfg(not(feature = "failpoints"))]
#[macro_export]
macro_rules! failpoint_around {
    ($kind:ident, $name:literal, $work:expr) => {
        $crate::failpoint::execute($work)
    };
}

/// Executes a change of a file with a failpoint before and after it:
/// `file!("record removed", || remove_file(&path))`.
#[macro_export]
macro_rules! failpoint_file {
    ($name:literal, $work:expr) => {
        $crate::failpoint::around!(File, $name, $work)
    };
}

/// Executes a future that changes files with a failpoint before and after it:
/// `step!("volume staged", driver.stage(call))`.
#[macro_export]
macro_rules! failpoint_step {
    ($name:literal, $work:expr) => {{
        $crate::failpoint::reached!(File, Before, $name);
        let done = $work.await;
        $crate::failpoint::reached!(File, After, $name);
        done
    }};
}

/// Places a failpoint in work that has no effect outside of the process: `work!("actions decided")`.
#[macro_export]
macro_rules! failpoint_work {
    ($name:literal) => {
        $crate::failpoint::around!(Work, $name, || ())
    };
}

/// Places one side of a failpoint, for an effect that is no single function:
/// `reached!(Status, Before, "status sent")`.
#[cfg(feature = "failpoints")]
#[macro_export]
macro_rules! failpoint_reached {
    ($kind:ident, $when:ident, $name:literal) => {
        $crate::failpoint::reached($crate::failpoint::Kind::$kind, $crate::failpoint::When::$when, $name)
    };
}

/// Places one side of a failpoint, for an effect that is no single function:
/// `reached!(Status, Before, "status sent")`.
#[cfg(not(feature = "failpoints"))]
#[macro_export]
macro_rules! failpoint_reached {
    ($kind:ident, $when:ident, $name:literal) => {};
}

/// Returns whether the test selected this bug for the thread: `if planted!("liveness before startup") { … }`.
#[cfg(feature = "failpoints")]
#[macro_export]
macro_rules! failpoint_planted {
    ($bug:literal) => {
        $crate::failpoint::is_planted($bug)
    };
}

/// Returns whether the test selected this bug for the thread: never, without the feature `failpoints`.
#[cfg(not(feature = "failpoints"))]
#[macro_export]
macro_rules! failpoint_planted {
    ($bug:literal) => {
        false
    };
}
