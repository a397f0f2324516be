//! Samples of the CPU use of this process.
//!
//! A timer of the process's CPU time sends SIGPROF, and pprof's handler records the stack of the thread that
//! was interrupted. The handler allocates nothing and unwinds by the tables that every Rust program has, so
//! the code needs no frame pointers and no symbols.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use pprof::{ProfilerGuard, ProfilerGuardBuilder};

use crate::mappings;
use crate::scratch;
use crate::stacks::{self, Stack, Times};

/// Longest recording, in seconds.
pub const MAX_SECONDS: u32 = 60;
/// Highest rate, in samples per second of CPU time. The kernel sends no more signals than it has timer ticks.
pub const MAX_HERTZ: u32 = 999;
/// Rate where none is asked for. It is no divisor of the frequency of periodic work.
pub const DEFAULT_HERTZ: u32 = 99;

/// Libraries in whose code no stack is recorded. The loader and the unwinder hold their own locks there, and
/// the vdso of some kernels has wrong tables.
const UNSAFE_LIBRARIES: [&str; 3] = ["libgcc", "ld-linux", "vdso"];

/// A profile cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The duration or the rate is out of bounds.
    #[error("{name} must be from 1 to {most}, not {given}")]
    OutOfBounds {
        /// `seconds` or `hertz`.
        name: &'static str,
        /// Upper bound.
        most: u32,
        /// The value.
        given: u32,
    },
    /// Another profile of the process is being taken.
    #[error("another profile of this process is being taken; try again when it has ended")]
    Busy,
    /// The allocator of this build does not record allocations.
    #[error("{0}")]
    NoHeapProfile(&'static str),
    /// A directory or file of the profiler cannot be used.
    #[error("failed to {action}")]
    File {
        /// A verb with its object.
        action: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// The profiler failed.
    #[error("failed to {action}: {reason}")]
    Profiler {
        /// A verb with its object.
        action: &'static str,
        /// The cause.
        reason: String,
    },
}

/// Duration and rate of a recording, within their bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampling {
    seconds: u32,
    hertz: u32,
}

impl Sampling {
    /// Checks the bounds: [`MAX_SECONDS`] and [`MAX_HERTZ`].
    ///
    /// # Errors
    /// A value is zero or above its bound.
    pub fn new(seconds: u32, hertz: u32) -> Result<Self, ProfileError> {
        let within = |name, given, most| match given {
            0 => Err(ProfileError::OutOfBounds { name, most, given }),
            given if given > most => Err(ProfileError::OutOfBounds { name, most, given }),
            _ => Ok(()),
        };
        within("seconds", seconds, MAX_SECONDS)?;
        within("hertz", hertz, MAX_HERTZ)?;
        Ok(Self { seconds, hertz })
    }

    /// Returns the time for which samples are taken.
    #[must_use]
    pub fn duration(self) -> Duration {
        Duration::from_secs(self.seconds.into())
    }
}

/// Held while a profile is taken.
#[derive(Debug)]
pub(crate) struct Turn(());

static IS_TAKEN: AtomicBool = AtomicBool::new(false);

impl Turn {
    pub(crate) fn take() -> Result<Self, ProfileError> {
        if IS_TAKEN.swap(true, Ordering::AcqRel) { Err(ProfileError::Busy) } else { Ok(Self(())) }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        IS_TAKEN.store(false, Ordering::Release);
    }
}

/// A recording in progress. It ends when it is dropped. Its methods block for some hundredths of a second.
pub struct Recording {
    // Dropped in this order.
    guard: ProfilerGuard<'static>,
    _turn: Turn,
    /// CPU time of the process at the start.
    cpu: Duration,
    wall: Duration,
}

impl std::fmt::Debug for Recording {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recording").field("cpu", &self.cpu).finish_non_exhaustive()
    }
}

impl Recording {
    /// Starts the timer.
    ///
    /// # Errors
    /// Another profile is being taken, or no directory for temporary files can be written.
    pub fn start(sampling: Sampling) -> Result<Self, ProfileError> {
        let turn = Turn::take()?;
        scratch::directory().map_err(|source| ProfileError::File {
            action: "create a temporary file for the profiler",
            source,
        })?;
        let hertz = i32::try_from(sampling.hertz).unwrap_or(i32::MAX);
        let builder = ProfilerGuardBuilder::default().frequency(hertz).blocklist(&UNSAFE_LIBRARIES);
        let guard = builder.build().map_err(|error| ProfileError::Profiler {
            action: "start the profiler",
            reason: error.to_string(),
        })?;
        // The start of the profiler is no part of the profile.
        let (cpu, wall) = (clock(ClockId::CLOCK_PROCESS_CPUTIME_ID), clock(ClockId::CLOCK_REALTIME));
        Ok(Self { guard, _turn: turn, cpu, wall })
    }

    /// Ends the recording, and returns the samples as a compressed message of pprof
    /// ([`crate::format::Profile`]).
    ///
    /// # Errors
    /// The samples or the mappings of the process cannot be read.
    pub fn finish(self) -> Result<Vec<u8>, ProfileError> {
        let used = clock(ClockId::CLOCK_PROCESS_CPUTIME_ID).saturating_sub(self.cpu);
        let duration = clock(ClockId::CLOCK_REALTIME).saturating_sub(self.wall);
        let report = self.guard.report().build_unresolved().map_err(|error| ProfileError::Profiler {
            action: "read the samples",
            reason: error.to_string(),
        })?;
        let read = |source| ProfileError::File { action: "read the mappings of the process", source };
        let mappings = mappings::read().map_err(read)?;
        let own = mappings::own_file().map_err(read)?;
        let stacks: Vec<Stack> = report
            .data
            .iter()
            .map(|(seen, count)| {
                let addresses: Vec<u64> = seen.frames.iter().map(|frame| frame.ip().addr() as u64).collect();
                let name = seen.thread_name.get(..seen.thread_name_length).unwrap_or_default();
                Stack {
                    thread: String::from_utf8_lossy(name).into_owned(),
                    addresses: stacks::without_handler(&addresses, &mappings, &own),
                    count: i64::try_from(*count).unwrap_or(i64::MAX),
                }
            })
            .collect();
        let samples = stacks.iter().fold(0_i64, |sum, stack| sum.saturating_add(stack.count));
        // The kernel may have sent fewer signals than were asked for.
        let period_ns = nanoseconds(used).checked_div(samples).unwrap_or_default();
        let times = Times { start_ns: nanoseconds(self.wall), duration_ns: nanoseconds(duration), period_ns };
        drop(report);
        stacks::profile(&stacks, &mappings, times)
            .encode_compressed()
            .map_err(|source| ProfileError::File { action: "encode the profile", source })
    }
}

fn clock(id: ClockId) -> Duration {
    clock_gettime(id).map_or(Duration::ZERO, Duration::from)
}

fn nanoseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_or_rate_out_of_bounds_is_refused_by_name() {
        for (seconds, hertz, want) in [
            (1, 1, None),
            (60, 999, None),
            (0, 99, Some("seconds must be from 1 to 60, not 0")),
            (61, 99, Some("seconds must be from 1 to 60, not 61")),
            (1, 0, Some("hertz must be from 1 to 999, not 0")),
            (1, 1000, Some("hertz must be from 1 to 999, not 1000")),
            (u32::MAX, 1, Some("seconds must be from 1 to 60, not 4294967295")),
        ] {
            let error = Sampling::new(seconds, hertz).err().map(|error| error.to_string());
            assert_eq!(error.as_deref(), want, "{seconds} {hertz}");
        }
    }
}
