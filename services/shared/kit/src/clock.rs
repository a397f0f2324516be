//! Time as an input: the machine's, or one that tests move.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

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
            now.1 += by;
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

    #[test]
    fn a_fixed_clock_moves_with_all_its_clones() {
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(5));
        let other = clock.clone();
        clock.advance(Duration::from_secs(2));
        assert_eq!((other.boot(), other.wall().as_second()), (Duration::from_secs(7), 2));
        assert!(Clock::system().boot() > Duration::ZERO);
    }
}
