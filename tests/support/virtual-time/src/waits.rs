//! The threads that wait, and their deadlines.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::libc;
use nix::poll::{PollFd, PollFlags};
use nix::sys::time::TimeSpec;

use crate::clock::AHEAD;
use crate::kernel::{self, Nanos, Wake};

/// A waiting thread.
#[derive(Debug)]
struct Wait {
    /// Time of the process's monotonic clock.
    deadline: Nanos,
    /// Wakes the thread.
    wake: Arc<Wake>,
}

static WAITS: Mutex<Vec<Wait>> = Mutex::new(Vec::new());

fn waits() -> MutexGuard<'static, Vec<Wait>> {
    WAITS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the nearest deadline of a waiting thread.
pub(crate) fn nearest() -> Option<Nanos> {
    waits().iter().map(|wait| wait.deadline).min()
}

/// Wakes the threads whose deadline has passed.
pub(crate) fn wake(now: Nanos) {
    for wait in waits().iter().filter(|wait| wait.deadline <= now) {
        wait.wake.wake();
    }
}

/// Returns the time of the process's monotonic clock.
pub(crate) fn now() -> Nanos {
    kernel::now(libc::CLOCK_MONOTONIC) + AHEAD.load(std::sync::atomic::Ordering::SeqCst)
}

/// Cause of the end of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Ready,
    Deadline,
    Signal,
}

thread_local! {
    // A thread waits for one thing at a time.
    static WAKE: Arc<Wake> = Arc::new(Wake::new());
}

/// Removes the entry of the calling thread.
struct Entered(Arc<Wake>);

impl Drop for Entered {
    fn drop(&mut self) {
        waits().retain(|wait| !Arc::ptr_eq(&wait.wake, &self.0));
        // A wake-up that arrived after the end of the wait.
        self.0.clear();
    }
}

/// Waits until `ready` is readable or the deadline has passed.
pub(crate) fn wait(ready: Option<BorrowedFd<'_>>, deadline: Option<Nanos>) -> End {
    let wake = WAKE.with(Arc::clone);
    let entered = Entered(Arc::clone(&wake));
    if let Some(deadline) = deadline {
        waits().push(Wait { deadline, wake: Arc::clone(&wake) });
    }
    loop {
        let left = deadline.map(|deadline| deadline - now());
        if left.is_some_and(|left| left <= 0) {
            return End::Deadline;
        }
        let wake = entered.0.as_fd();
        // A wait for nothing else polls the wake-up twice.
        let mut polled = [wake, ready.unwrap_or(wake)].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        // The machine's time passes, too, while something runs.
        let limit = left.map(|left| TimeSpec::from(kernel::timespec(left)));
        match nix::poll::ppoll(&mut polled, limit, None) {
            Err(nix::errno::Errno::EINTR) => return End::Signal,
            other => drop(other.expect("the descriptors are open")),
        }
        if ready.is_some() && polled[1].any().unwrap_or_default() {
            return End::Ready;
        }
        entered.0.clear();
    }
}

/// Borrows a descriptor of a caller of the C library.
///
/// # Safety
/// The descriptor is open as long as it is borrowed.
pub(crate) unsafe fn borrow<'a>(descriptor: libc::c_int) -> BorrowedFd<'a> {
    // SAFETY: the caller keeps it open.
    let fd = unsafe { BorrowedFd::borrow_raw(descriptor) };
    debug_assert!(fd.as_raw_fd() >= 0, "the caller has opened it");
    fd
}
