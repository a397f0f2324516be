//! The state of the clock of the process.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

pub(crate) static IS_VIRTUAL: AtomicBool = AtomicBool::new(false);
/// Nanoseconds by which the clock of the process is ahead of the machine's.
pub(crate) static AHEAD: AtomicI64 = AtomicI64::new(0);

pub(crate) fn is_virtual() -> bool {
    IS_VIRTUAL.load(Ordering::SeqCst)
}
