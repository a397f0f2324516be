//! Time as an input: the machine's clocks, or a clock that a test advances.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// The longest wait: 30 years, which tokio itself uses for a deadline that it cannot represent.
///
/// A wait of this length never ends while the process runs, and a deadline at this distance can be added to,
/// rounded up and converted to a timer's ticks without an overflow.
pub const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 3600);

/// Returns `wait`, at most [`FAR`]. Use it for durations that come from a pod, a runtime or a file.
#[must_use]
pub fn bounded(wait: Duration) -> Duration {
    wait.min(FAR)
}

/// Returns the instant at the end of `wait` from `now`, at most [`FAR`] away.
#[must_use]
pub fn deadline_after(now: Instant, wait: Duration) -> Instant {
    // An instant 30 years from now can be represented.
    now.checked_add(bounded(wait)).unwrap_or(now)
}

/// Converts a number of seconds from a pod or a runtime to a duration. A negative number becomes zero; the
/// maximum is [`FAR`].
#[must_use]
pub fn seconds(seconds: i64) -> Duration {
    bounded(Duration::from_secs(u64::try_from(seconds).unwrap_or(0)))
}

/// A source of wall-clock time and of CLOCK_BOOTTIME. Clones share a fixed clock.
#[derive(Debug, Clone)]
pub struct Clock(Source);

#[derive(Debug, Clone)]
enum Source {
    System,
    Fixed(Arc<Mutex<(jiff::Timestamp, Duration)>>),
}

impl Clock {
    /// Returns the machine's clocks.
    #[must_use]
    pub fn system() -> Self {
        Self(Source::System)
    }

    /// Returns a clock that only [`Clock::advance`] moves.
    #[must_use]
    pub fn fixed(wall: jiff::Timestamp, boot: Duration) -> Self {
        Self(Source::Fixed(Arc::new(Mutex::new((wall, boot)))))
    }

    /// Advances a fixed clock and all its clones. Has no effect on the machine's clocks.
    pub fn advance(&self, duration: Duration) {
        if let Source::Fixed(now) = &self.0 {
            let mut now = now.lock();
            now.1 = now.1.saturating_add(duration);
            now.0 = now.0.checked_add(duration).unwrap_or(jiff::Timestamp::MAX);
        }
    }

    /// Returns the wall-clock time, for display and for comparison with times from other machines.
    #[must_use]
    pub fn wall(&self) -> jiff::Timestamp {
        match &self.0 {
            Source::System => jiff::Timestamp::now(),
            Source::Fixed(now) => now.lock().0,
        }
    }

    /// Returns the time since boot by CLOCK_BOOTTIME, for waits and deadlines: it cannot be set and continues
    /// during suspend.
    #[must_use]
    pub fn boot(&self) -> Duration {
        match &self.0 {
            Source::System => nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME)
                .map(Duration::from)
                .unwrap_or_default(),
            Source::Fixed(now) => now.lock().1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_end_of_any_wait_fits_into_a_timer() {
        let now = Instant::now();
        assert_eq!(deadline_after(now, Duration::from_secs(7)), now + Duration::from_secs(7));
        let longest = Duration::from_secs(i64::MAX.unsigned_abs());
        for wait in [FAR + Duration::from_nanos(1), longest, Duration::MAX] {
            assert_eq!(deadline_after(now, wait), now + FAR);
            let pending = tokio::time::timeout_at(deadline_after(now, wait), std::future::pending::<()>());
            let waited = tokio::time::timeout(Duration::from_secs(3600), pending).await;
            assert!(waited.is_err(), "{wait:?} does not end within an hour");
        }
        for (given, want) in [(i64::MIN, 0), (-1, 0), (0, 0), (30, 30), (i64::MAX, FAR.as_secs())] {
            assert_eq!(seconds(given), Duration::from_secs(want));
        }
    }

    #[test]
    fn a_fixed_clock_moves_with_all_its_clones() {
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(5));
        let other = clock.clone();
        clock.advance(Duration::from_secs(2));
        assert_eq!((other.boot(), other.wall().as_second()), (Duration::from_secs(7), 2));
        assert!(Clock::system().boot() > Duration::ZERO);
    }
}
