//! How often the API server may be called, where the configuration says so.

use std::time::Duration;

use parking_lot::Mutex;
use quintlet_kit::clock::deadline_after;
use tokio::time::Instant;

/// Calls per second, and calls at once before that counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Never zero.
    per_second: u32,
    burst: u32,
}

impl Rate {
    /// None where `per_second` is zero: no limit. A burst of less than one call counts as one.
    #[must_use]
    pub fn new(per_second: u32, burst: u32) -> Option<Self> {
        (per_second > 0).then(|| Self { per_second, burst: burst.max(1) })
    }
}

/// Spaces calls, in the order they ask.
#[derive(Debug)]
pub struct Limiter {
    /// Between two calls once the burst is used up.
    pause: Duration,
    /// So much earlier than that a call may come.
    credit: Duration,
    /// When a call would be due if there were no burst.
    due: Mutex<Instant>,
}

impl Limiter {
    /// With the whole burst to give.
    #[must_use]
    pub fn new(rate: Rate) -> Self {
        let pause = Duration::from_secs(1).checked_div(rate.per_second).unwrap_or(Duration::ZERO);
        Self {
            pause,
            credit: pause.saturating_mul(rate.burst.saturating_sub(1)),
            due: Mutex::new(Instant::now()),
        }
    }

    /// Waits for its turn. A wait that is given up has used its turn.
    pub async fn take(&self) {
        let wait = {
            let mut due = self.due.lock();
            let now = Instant::now();
            // Time nobody used is credit, and no more of it than that.
            let mine = (*due).max(now);
            *due = deadline_after(mine, self.pause);
            mine.duration_since(now).saturating_sub(self.credit)
        };
        tokio::time::sleep(wait).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn calls_come_at_once_up_to_the_burst_and_then_at_the_rate() {
        let limiter = Limiter::new(Rate::new(10, 5).unwrap());
        let start = Instant::now();
        let mut times = Vec::new();
        for _ in 0..8 {
            limiter.take().await;
            times.push(start.elapsed().as_millis());
        }
        assert_eq!(times, [0, 0, 0, 0, 0, 100, 200, 300]);
        // A second without calls gives the burst back, and no more.
        tokio::time::advance(Duration::from_secs(60)).await;
        let start = Instant::now();
        for _ in 0..6 {
            limiter.take().await;
        }
        assert_eq!(start.elapsed().as_millis(), 100);
    }

    #[test]
    fn zero_is_no_limit() {
        assert_eq!(Rate::new(0, 10), None);
        assert_eq!(Rate::new(1, 0), Rate::new(1, 1));
    }
}
