//! Exponential back-off.

use std::time::Duration;

/// A delay that grows by a factor up to a maximum.
#[derive(Debug, Clone)]
pub struct Backoff {
    initial: Duration,
    factor: u32,
    max: Duration,
    next: Duration,
}

impl Backoff {
    /// Returns a back-off that starts at `initial`, grows by `factor` and stays at `max`.
    ///
    /// # Panics
    /// Panics if `initial` is zero or above `max`, or if `factor` is zero.
    #[must_use]
    pub fn new(initial: Duration, factor: u32, max: Duration) -> Self {
        assert!(
            !initial.is_zero() && initial <= max && factor > 0,
            "a back-off needs a positive factor and 0 < initial <= max"
        );
        Self { initial, factor, max, next: initial }
    }

    /// Returns the next delay and increases the one after it.
    pub fn next_wait(&mut self) -> Duration {
        let now = self.next;
        self.next = now.saturating_mul(self.factor).min(self.max);
        now
    }

    /// Sets the next delay to the initial one.
    pub fn reset(&mut self) {
        self.next = self.initial;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_doubles_to_its_bound_and_starts_over() {
        let ms = Duration::from_millis;
        let mut b = Backoff::new(ms(100), 2, ms(500));
        assert_eq!(
            [b.next_wait(), b.next_wait(), b.next_wait(), b.next_wait(), b.next_wait()],
            [ms(100), ms(200), ms(400), ms(500), ms(500)]
        );
        b.reset();
        assert_eq!(b.next_wait(), ms(100));
    }
}
