//! Growing waits.

use std::time::Duration;

/// A wait that grows by a factor up to a bound.
#[derive(Debug, Clone)]
pub struct Backoff {
    initial: Duration,
    factor: u32,
    max: Duration,
    next: Duration,
}

impl Backoff {
    /// Starts at `initial`, multiplies by `factor`, stays at `max`.
    ///
    /// # Panics
    /// `initial` is zero or above `max`, or `factor` is zero.
    #[must_use]
    pub fn new(initial: Duration, factor: u32, max: Duration) -> Self {
        assert!(
            !initial.is_zero() && initial <= max && factor > 0,
            "a back-off must grow from something to something"
        );
        Self { initial, factor, max, next: initial }
    }

    /// The next wait.
    pub fn next_wait(&mut self) -> Duration {
        let now = self.next;
        self.next = now.saturating_mul(self.factor).min(self.max);
        now
    }

    /// Starts over.
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
