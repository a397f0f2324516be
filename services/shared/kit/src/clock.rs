//! Time as an input: the machine's, or one that tests move.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// The longest wait: 30 years, the distance at which tokio itself puts a deadline that it cannot represent.
///
/// A wait of this length never ends while the process runs, and a deadline at this distance can be added to, rounded up and
/// converted to a timer's ticks without an overflow.
pub const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 3600);

/// Returns `wait`, or [`FAR`] where it is longer: for a wait whose length comes from a pod, a runtime or a file.
#[must_use]
pub fn bounded(wait: Duration) -> Duration {
    wait.min(FAR)
}

/// Returns the instant at the end of `wait` from `now`, at most [`FAR`] away.
#[must_use]
pub fn deadline_after(now: Instant, wait: Duration) -> Instant {
    // 30 years from any instant of this machine can be represented.
    now.checked_add(bounded(wait)).unwrap_or(now)
}

/// Returns a number of seconds of a pod or a runtime as a wait: zero where it is negative, [`FAR`] where it is longer.
#[must_use]
pub fn seconds(seconds: i64) -> Duration {
    bounded(Duration::from_secs(u64::try_from(seconds).unwrap_or(0)))
}

/// Wall time and boottime.
#[derive(Debug, Clone)]
pub struct Clock(Source);

#[derive(Debug, Clone)]
enum Source {
    System,
    Fixed(Arc<Mutex<(jiff::Timestamp, Duration)>>),
}

impl Clock {
    /// The machine's clocks.
    #[must_use]
    pub fn system() -> Self {
        Self(Source::System)
    }

    /// A clock that stands still until moved.
    #[must_use]
    pub fn fixed(wall: jiff::Timestamp, boot: Duration) -> Self {
        Self(Source::Fixed(Arc::new(Mutex::new((wall, boot)))))
    }

    /// Moves a fixed clock, and all its clones. The machine's stays.
    pub fn advance(&self, by: Duration) {
        if let Source::Fixed(now) = &self.0 {
            let mut now = now.lock();
            now.1 = now.1.saturating_add(by);
            now.0 = now.0.checked_add(by).unwrap_or(jiff::Timestamp::MAX);
        }
    }

    /// Wall time: for display, and for what other machines said.
    #[must_use]
    pub fn wall(&self) -> jiff::Timestamp {
        match &self.0 {
            Source::System => jiff::Timestamp::now(),
            Source::Fixed(now) => now.lock().0,
        }
    }

    /// CLOCK_BOOTTIME since boot: for every wait and deadline; it cannot be stepped and does not stop in suspend.
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
    async fn a_wait_of_any_length_has_an_end_that_a_timer_can_hold() {
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
