//! Rate limits: calls per second with a burst, by the generic cell rate algorithm.

use std::time::Duration;

use parking_lot::Mutex;
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

/// Decides when calls are allowed. The time is an input, as the duration since any fixed point.
#[derive(Debug)]
pub struct RateLimiter {
    /// Interval between calls after the burst.
    interval: Duration,
    /// Time by which a call may be early: the burst.
    credit: Duration,
    /// Time at which the next call is due without a burst.
    due: Duration,
}

impl RateLimiter {
    /// Creates a limiter with the whole burst left.
    #[must_use]
    pub fn new(rate: Rate) -> Self {
        let interval = Duration::from_secs(1).checked_div(rate.per_second).unwrap_or(Duration::ZERO);
        let credit = interval.saturating_mul(rate.burst.saturating_sub(1));
        Self { interval, credit, due: Duration::ZERO }
    }

    /// Reserves the next call. Returns how long to wait before it.
    pub fn reserve(&mut self, now: Duration) -> Duration {
        // Unused time counts as credit up to the burst.
        let due = self.due.max(now);
        self.due = due.saturating_add(self.interval);
        due.saturating_sub(now).saturating_sub(self.credit)
    }

    /// Takes a call if it is allowed now. Returns whether it is.
    pub fn try_take(&mut self, now: Duration) -> bool {
        let due = self.due.max(now);
        let is_allowed = due.saturating_sub(now) <= self.credit;
        if is_allowed {
            self.due = due.saturating_add(self.interval);
        }
        is_allowed
    }
}

/// Delays calls to keep a rate, in their order.
#[derive(Debug)]
pub struct Throttle {
    limiter: Mutex<RateLimiter>,
    start: Instant,
}

impl Throttle {
    /// Creates a throttle with the whole burst left.
    #[must_use]
    pub fn new(rate: Rate) -> Self {
        Self { limiter: Mutex::new(RateLimiter::new(rate)), start: Instant::now() }
    }

    /// Waits until a call is allowed. A dropped wait counts as a call.
    pub async fn take(&self) {
        let wait = self.limiter.lock().reserve(self.start.elapsed());
        tokio::time::sleep(wait).await;
    }
}

/// Lets one of many equal log lines through per interval, and counts the others.
#[derive(Debug)]
pub struct LogInterval {
    interval: Duration,
    last: Option<Instant>,
    /// Occurrences since the last line.
    count: u64,
}

impl LogInterval {
    /// Creates an interval whose first line is due.
    #[must_use]
    pub const fn new(interval: Duration) -> Self {
        Self { interval, last: None, count: 0 }
    }

    /// Counts an occurrence. Returns the number since the last line, this one included, if a line is due.
    pub fn count(&mut self) -> Option<u64> {
        self.count = self.count.saturating_add(1);
        if self.last.is_some_and(|last| last.elapsed() < self.interval) {
            return None;
        }
        self.last = Some(Instant::now());
        Some(std::mem::take(&mut self.count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn calls_come_at_once_up_to_the_burst_and_then_at_the_rate() {
        let limiter = Throttle::new(Rate::new(10, 5).unwrap());
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

    #[tokio::test(start_paused = true)]
    async fn one_line_per_interval_has_the_number_of_all() {
        let mut interval = LogInterval::new(Duration::from_secs(60));
        let counts: Vec<_> = (0..4).map(|_| interval.count()).collect();
        assert_eq!(counts, [Some(1), None, None, None]);
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!([interval.count(), interval.count()], [Some(4), None]);
    }

    #[test]
    fn zero_is_no_limit() {
        assert_eq!(Rate::new(0, 10), None);
        assert_eq!(Rate::new(1, 0), Rate::new(1, 1));
    }

    #[test]
    fn a_call_is_refused_once_the_burst_is_used_up() {
        let mut limiter = RateLimiter::new(Rate::new(5, 10).unwrap());
        let mut taken = |seconds| (0..20).filter(|_| limiter.try_take(Duration::from_secs(seconds))).count();
        assert_eq!([taken(100), taken(101), taken(200)], [10, 5, 10]);
    }
}
