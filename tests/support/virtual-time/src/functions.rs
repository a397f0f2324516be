//! The functions that the linker uses instead of those of the C library.

use std::sync::atomic::Ordering;

use nix::errno::Errno;
use nix::libc;

use crate::clock::{AHEAD, is_virtual};
use crate::kernel::{self, Nanos};
use crate::waits::{self, End};

/// Clocks that measure time, rather than the work of a processor.
fn is_ahead(clock: libc::clockid_t) -> bool {
    matches!(
        clock,
        libc::CLOCK_REALTIME
            | libc::CLOCK_REALTIME_COARSE
            | libc::CLOCK_MONOTONIC
            | libc::CLOCK_MONOTONIC_COARSE
            | libc::CLOCK_MONOTONIC_RAW
            | libc::CLOCK_BOOTTIME
    )
}

/// `clock_gettime(2)`.
///
/// # Safety
/// `time` points to memory for a `timespec`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn clock_gettime(
    clock: libc::clockid_t,
    time: *mut libc::timespec,
) -> libc::c_int {
    // SAFETY: the contract is the same.
    let status = unsafe { kernel::clock_gettime(clock, time) };
    let ahead = AHEAD.load(Ordering::SeqCst);
    if status == 0 && ahead != 0 && is_ahead(clock) {
        // SAFETY: the kernel has written to `time`.
        unsafe { *time = kernel::timespec(kernel::nanos(&*time) + ahead) };
    }
    status
}

/// `epoll_wait(2)`.
///
/// # Safety
/// `events` points to memory for `max` events.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn epoll_wait(
    epoll: libc::c_int,
    events: *mut libc::epoll_event,
    max: libc::c_int,
    timeout: libc::c_int,
) -> libc::c_int {
    // SAFETY: the contract is the same.
    let wait = |timeout| unsafe { kernel::epoll_wait(epoll, events, max, timeout) };
    if !is_virtual() || timeout == 0 {
        return wait(timeout);
    }
    let deadline = (timeout > 0).then(|| waits::now() + Nanos::from(timeout) * 1_000_000);
    loop {
        let count = wait(0);
        if count != 0 {
            return count;
        }
        // SAFETY: the caller keeps the descriptor open during the call.
        match waits::wait(Some(unsafe { waits::borrow(epoll) }), deadline) {
            End::Ready => {}
            End::Deadline => return wait(0),
            End::Signal => {
                Errno::EINTR.set();
                return -1;
            }
        }
    }
}

/// `clock_nanosleep(2)`.
///
/// # Safety
/// `time` points to a `timespec`, `left` to memory for one or to nothing.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn clock_nanosleep(
    clock: libc::clockid_t,
    flags: libc::c_int,
    time: *const libc::timespec,
    left: *mut libc::timespec,
) -> libc::c_int {
    if !is_virtual() || !is_ahead(clock) {
        // SAFETY: the contract is the same.
        return unsafe { kernel::clock_nanosleep(clock, flags, time, left) };
    }
    // SAFETY: `time` points to a `timespec`.
    let time = kernel::nanos(unsafe { &*time });
    let of_clock = kernel::now(clock) + AHEAD.load(Ordering::SeqCst);
    let is_absolute = flags & libc::TIMER_ABSTIME != 0;
    let deadline = waits::now() + if is_absolute { time - of_clock } else { time };
    match waits::wait(None, Some(deadline)) {
        End::Ready | End::Deadline => 0,
        End::Signal => {
            if !is_absolute && !left.is_null() {
                // SAFETY: `left` points to memory for a `timespec`.
                unsafe { *left = kernel::timespec((deadline - waits::now()).max(0)) };
            }
            libc::EINTR
        }
    }
}

/// `nanosleep(2)`.
///
/// # Safety
/// `time` points to a `timespec`, `left` to memory for one or to nothing.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nanosleep(
    time: *const libc::timespec,
    left: *mut libc::timespec,
) -> libc::c_int {
    // SAFETY: the contract is the same.
    match unsafe { clock_nanosleep(libc::CLOCK_MONOTONIC, 0, time, left) } {
        0 => 0,
        error => {
            Errno::from_raw(error).set();
            -1
        }
    }
}

/// Panics if other code in the process calls other functions of these names.
pub(crate) fn assert_linked() {
    let linked = [
        (libc::clock_gettime as *const (), clock_gettime as *const ()),
        (libc::epoll_wait as *const (), epoll_wait as *const ()),
        (libc::clock_nanosleep as *const (), clock_nanosleep as *const ()),
        (libc::nanosleep as *const (), nanosleep as *const ()),
    ];
    assert!(linked.iter().all(|(of_others, own)| of_others == own), "the linker used the C library");
}
