//! Exponential back-off.

use std::time::Duration;

use crate::clock::FAR;

/// A delay that grows by a factor up to a maximum.
#[derive(Debug, Clone)]
pub struct Backoff {
    initial: Duration,
    factor: f64,
    max: Duration,
    next: Duration,
}

impl Backoff {
    /// Returns a back-off that starts at `initial`, grows by `factor` and stays at `max`.
    ///
    /// # Panics
    /// Panics if `initial` is zero or above `max`, if `max` is above [`FAR`], or if `factor` is not between 1
    /// and 10.
    #[must_use]
    pub fn new(initial: Duration, factor: f64, max: Duration) -> Self {
        assert!(
            !initial.is_zero() && initial <= max && max <= FAR && (1.0..=10.0).contains(&factor),
            "a back-off needs 0 < initial <= max and a factor of at least 1"
        );
        Self { initial, factor, max, next: initial }
    }

    /// Returns the next delay and increases the one after it.
    pub fn next_wait(&mut self) -> Duration {
        let now = self.next;
        self.next = now.mul_f64(self.factor).min(self.max);
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
    fn a_delay_doubles_up_to_its_maximum_and_starts_over() {
        let ms = Duration::from_millis;
        let mut b = Backoff::new(ms(100), 2.0, ms(500));
        assert_eq!(
            [b.next_wait(), b.next_wait(), b.next_wait(), b.next_wait(), b.next_wait()],
            [ms(100), ms(200), ms(400), ms(500), ms(500)]
        );
        b.reset();
        assert_eq!(b.next_wait(), ms(100));
    }
}
