//! Calls of the kernel, past the functions that this crate replaces.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd as _};
use std::ptr;

use nix::libc;

/// Nanoseconds.
pub(crate) type Nanos = i64;

const PER_SECOND: Nanos = 1_000_000_000;

pub(crate) fn nanos(time: &libc::timespec) -> Nanos {
    time.tv_sec.saturating_mul(PER_SECOND).saturating_add(time.tv_nsec)
}

pub(crate) fn timespec(nanos: Nanos) -> libc::timespec {
    libc::timespec { tv_sec: nanos.div_euclid(PER_SECOND), tv_nsec: nanos.rem_euclid(PER_SECOND) }
}

/// Calls `clock_gettime`.
///
/// # Safety
/// `time` points to memory for a `timespec`.
pub(crate) unsafe fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> libc::c_int {
    // SAFETY: the caller upholds the contract of the system call, which writes to `time` only.
    unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) as libc::c_int }
}

/// Returns the time of a clock of the machine.
pub(crate) fn now(clock: libc::clockid_t) -> Nanos {
    let mut time = timespec(0);
    // SAFETY: `time` is a `timespec`.
    let status = unsafe { clock_gettime(clock, &raw mut time) };
    assert_eq!(status, 0, "the machine has the clock {clock}");
    nanos(&time)
}

/// Calls `epoll_wait`.
///
/// # Safety
/// `events` points to memory for `max` events.
pub(crate) unsafe fn epoll_wait(
    epoll: libc::c_int,
    events: *mut libc::epoll_event,
    max: libc::c_int,
    timeout: libc::c_int,
) -> libc::c_int {
    let no_mask = ptr::null::<libc::sigset_t>();
    // SAFETY: the caller upholds the contract of the system call, which writes to `events` only.
    unsafe {
        libc::syscall(libc::SYS_epoll_pwait, epoll, events, max, timeout, no_mask, 8usize) as libc::c_int
    }
}

/// Calls `clock_nanosleep`, which returns an error number.
///
/// # Safety
/// `time` points to a `timespec`, `left` to memory for one or to nothing.
pub(crate) unsafe fn clock_nanosleep(
    clock: libc::clockid_t,
    flags: libc::c_int,
    time: *const libc::timespec,
    left: *mut libc::timespec,
) -> libc::c_int {
    // SAFETY: the caller upholds the contract of the system call, which writes to `left` only.
    match unsafe { libc::syscall(libc::SYS_clock_nanosleep, clock, flags, time, left) } {
        0 => 0,
        _ => nix::errno::Errno::last_raw(),
    }
}

/// Sleeps by the machine's clock.
pub(crate) fn sleep(duration: Nanos) {
    let time = timespec(duration);
    // SAFETY: `time` is a `timespec`, and no time that is left is asked for.
    let _interrupted = unsafe { clock_nanosleep(libc::CLOCK_MONOTONIC, 0, &raw const time, ptr::null_mut()) };
}

/// Returns whether the process has a child process, running or not yet waited for.
pub(crate) fn has_children() -> bool {
    // SAFETY: all zeros are a valid `siginfo_t`.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `info` is a `siginfo_t`. The child stays to be waited for.
    unsafe { libc::waitid(libc::P_ALL, 0, &raw mut info, flags) == 0 }
}

/// Returns the ID of the calling thread.
pub(crate) fn thread() -> i32 {
    nix::unistd::gettid().as_raw()
}

/// Wakes a thread that polls it (`eventfd`).
#[derive(Debug)]
pub(crate) struct Wake(File);

impl Wake {
    pub(crate) fn new() -> Self {
        // SAFETY: the call has no pointer.
        let descriptor = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        assert!(descriptor >= 0, "an eventfd can be made");
        // SAFETY: the descriptor is open and belongs to nothing else.
        Self(unsafe { File::from_raw_fd(descriptor) })
    }

    pub(crate) fn wake(&self) {
        (&self.0).write_all(&1_u64.to_ne_bytes()).expect("the counter of an eventfd has 64 bits");
    }

    /// Takes the wake-ups that were not observed.
    pub(crate) fn clear(&self) {
        // Fails if there is none.
        let _none = (&self.0).read(&mut [0; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
