//! Lets time pass at once in a test process while nothing in it runs.
//!
//! After [`start`], the process has a clock of its own. It follows the machine's clock while a thread of the
//! process runs. As soon as all threads sleep, it jumps to the nearest deadline of a thread that waits. So a
//! test that waits for a back-off of 5 minutes takes milliseconds, and a test on a busy machine does not
//! observe less time between two steps than on an idle one.
//!
//! tokio's paused clock belongs to one runtime, and advances although other threads work. This clock belongs
//! to the process: several runtimes, blocking threads, file systems, and sockets to other threads of the
//! process keep their order.
//!
//! # How it works
//! This crate defines `clock_gettime`, `epoll_wait`, `nanosleep` and `clock_nanosleep`, so that the linker
//! uses these functions instead of those of the C library. They call the kernel directly until [`start`].
//! After that, each waiting thread has an entry with its deadline (module `waits`), and one thread looks for
//! moments of rest (module `jumps`).
//!
//! # What still takes the machine's time
//! - Waits for a futex with a timeout (`Condvar::wait_timeout`, `recv_timeout`).
//! - Everything while the process has a child process: another process does not have this clock.
//! - Timestamps that the kernel makes, such as those of files.

mod clock;
mod functions;
mod jumps;
mod kernel;
mod waits;

use std::sync::Once;
use std::sync::atomic::Ordering;
use std::time::Duration;

use clock::{AHEAD, IS_VIRTUAL};

static STARTED: Once = Once::new();

/// Starts the process's own clock, once. It does not end before the process.
///
/// # Panics
/// The linker did not use the functions of this crate, or no thread can be created.
pub fn start() {
    STARTED.call_once(|| {
        functions::assert_linked();
        IS_VIRTUAL.store(true, Ordering::SeqCst);
        jumps::watch();
    });
}

/// Returns by how much the clock of the process is ahead of the machine's.
#[must_use]
pub fn ahead() -> Duration {
    Duration::from_nanos(u64::try_from(AHEAD.load(Ordering::SeqCst)).unwrap_or_default())
}
