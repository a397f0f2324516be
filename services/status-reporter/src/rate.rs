//! Configured rate limits of calls to the API server.

use std::time::Duration;

use parking_lot::Mutex;
use quintlet_kit::clock::deadline_after;
use tokio::time::Instant;

/// Calls per second, with a burst.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Never zero.
    per_second: u32,
    burst: u32,
}

impl Rate {
    /// Returns none, for no limit, if `per_second` is zero. The burst is at least one call.
    #[must_use]
    pub fn new(per_second: u32, burst: u32) -> Option<Self> {
        (per_second > 0).then(|| Self { per_second, burst: burst.max(1) })
    }
}

/// Delays calls to keep a rate, in their order.
#[derive(Debug)]
pub struct Limiter {
    /// Pause between calls after the burst.
    pause: Duration,
    /// Time by which a call may be early: the burst.
    credit: Duration,
    /// Time at which the next call is due without a burst.
    due: Mutex<Instant>,
}

impl Limiter {
    /// Creates a limiter with the whole burst left.
    #[must_use]
    pub fn new(rate: Rate) -> Self {
        let pause = Duration::from_secs(1).checked_div(rate.per_second).unwrap_or(Duration::ZERO);
        Self {
            pause,
            credit: pause.saturating_mul(rate.burst.saturating_sub(1)),
            due: Mutex::new(Instant::now()),
        }
    }

    /// Waits until a call is allowed. A dropped wait counts as a call.
    pub async fn take(&self) {
        let wait = {
            let mut due = self.due.lock();
            let now = Instant::now();
            // Unused time counts as credit up to the burst.
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
