//! An adaptive limit of concurrent mutations: it rises while the runtime answers faster, and falls when it
//! slows.
//!
//! By Little's law, latency divided by the calls in flight is the cost of one call. The median cost of a
//! window of answers is compared with that of the previous window. The limit rises while the cost falls, and
//! falls by a quarter when the cost rises. Only answers under load count.
//!
//! The start value and the bounds were measured on containerd 1.6 with two cores: 16 calls in flight made 100
//! pods faster than 8 in each of five runs of `make bench` (7.8 s and 10.5, 9.2 and 10.3, 10.0 and 11.4, 10.3
//! and 13.6, 11.3 and 13.1). In one other run, 4, 8, 16 and 100 in flight took 10.1, 7.4, 7.9 and 9.4 s.
use std::collections::HashMap;
use std::time::Duration;

/// Initial limit. The limit returns to it while the cost does not change.
pub const START: usize = 16;
/// Lowest limit: one call that hangs must not block all others.
pub const MIN: usize = 2;
/// Maximum of the limit.
pub const MAX: usize = 24;

/// Ratio of costs below which a window is better than the previous one.
const BETTER: f64 = 0.95;
/// Ratio of costs above which a window is worse than the previous one.
const WORSE: f64 = 1.10;
/// Weight of a new sample in the average cost of a method. It is small, so that the effect of a step is
/// measured before the average follows.
const USUAL_SHARE: f64 = 0.002;
/// Number of unchanged windows before the limit takes a step towards [`START`].
const QUIET_WINDOWS: u32 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Up,
    Down,
    Still,
}

/// The limit and its measurements. Latencies are inputs.
#[derive(Debug)]
pub struct Adaptive {
    limit: usize,
    usual: HashMap<&'static str, f64>,
    window: Vec<f64>,
    last_cost: Option<f64>,
    direction: Direction,
    quiet: u32,
}

impl Default for Adaptive {
    fn default() -> Self {
        Self {
            limit: START,
            usual: HashMap::new(),
            window: Vec::new(),
            last_cost: None,
            direction: Direction::Still,
            quiet: 0,
        }
    }
}

impl Adaptive {
    /// Returns the number of mutations that may be in flight now.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Records an answer: its method, its latency, the calls in flight when it was sent (including itself),
    /// and whether calls were waiting. Returns the new limit.
    pub fn answered(
        &mut self,
        method: &'static str,
        latency: Duration,
        in_flight: usize,
        waiting: bool,
    ) -> usize {
        if !waiting {
            return self.limit;
        }
        #[expect(clippy::cast_precision_loss, reason = "at most 24")]
        let cost = latency.as_secs_f64() / in_flight.max(1) as f64;
        if cost <= 0.0 {
            return self.limit;
        }
        // A sandbox costs ten times as much as a start, so each call is compared with the average of its
        // method.
        let usual = self.usual.entry(method).or_insert(cost);
        let relative = cost / *usual;
        *usual += (cost - *usual) * USUAL_SHARE;
        self.window.push(relative);
        if self.window.len() >= self.limit.saturating_mul(2).max(8) {
            self.close_window();
        }
        self.limit
    }

    fn close_window(&mut self) {
        self.window.sort_by(f64::total_cmp);
        // The median ignores a single call that hangs.
        let cost = self.window.get(self.window.len() / 2).copied().unwrap_or(1.0);
        self.window.clear();
        let Some(last) = self.last_cost.replace(cost) else {
            self.step(Direction::Up);
            return;
        };
        if cost < last * BETTER {
            self.quiet = 0;
            let onward = if self.direction == Direction::Down { Direction::Down } else { Direction::Up };
            self.step(onward);
        } else if cost > last * WORSE {
            self.quiet = 0;
            if self.direction == Direction::Down {
                self.step(Direction::Up);
            } else {
                self.limit = (self.limit.saturating_mul(3) / 4).max(MIN);
                self.direction = Direction::Down;
            }
        } else {
            self.direction = Direction::Still;
            self.quiet = self.quiet.saturating_add(1);
            if self.quiet >= QUIET_WINDOWS {
                self.quiet = 0;
                match self.limit.cmp(&START) {
                    std::cmp::Ordering::Less => self.limit = self.limit.saturating_add(1),
                    std::cmp::Ordering::Greater => self.limit = self.limit.saturating_sub(1),
                    std::cmp::Ordering::Equal => {}
                }
            }
        }
    }

    fn step(&mut self, direction: Direction) {
        self.direction = direction;
        // The effect of a smaller step would be too small to measure.
        let change = (self.limit / 8).max(1);
        self.limit = match direction {
            Direction::Up => self.limit.saturating_add(change).min(MAX),
            Direction::Down => self.limit.saturating_sub(change).max(MIN),
            Direction::Still => self.limit,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers `calls` calls of a runtime with latency `latency(n)` ms at n calls in flight.
    fn run(adaptive: &mut Adaptive, calls: usize, latency: impl Fn(usize) -> f64) -> (usize, usize) {
        let (mut low, mut high) = (adaptive.limit(), adaptive.limit());
        for _ in 0..calls {
            let n = adaptive.limit();
            adaptive.answered("RunPodSandbox", Duration::from_secs_f64(latency(n) / 1000.0), n, true);
            low = low.min(adaptive.limit());
            high = high.max(adaptive.limit());
        }
        (low, high)
    }

    #[test]
    fn the_limit_starts_at_its_initial_value_and_stays_within_its_bounds() {
        let mut adaptive = Adaptive::default();
        assert_eq!(adaptive.limit(), START);
        for (name, factor) in [("faster", 0.5), ("slower", 2.0)] {
            let mut ms = 100.0;
            for _ in 0..200 {
                ms = f64::clamp(ms * factor, 1e-3, 1e9);
                let (low, high) = run(&mut adaptive, 40, |_| ms);
                assert!(low >= MIN && high <= MAX, "{name}: {low}..{high}");
            }
        }
    }

    #[test]
    fn the_limit_rises_while_more_concurrency_reduces_the_cost() {
        // A runtime that waits rather than works: the latency does not depend on the calls in flight.
        let mut adaptive = Adaptive::default();
        run(&mut adaptive, 400, |_| 100.0);
        assert!(adaptive.limit() >= 8, "{}", adaptive.limit());
    }

    #[test]
    fn the_limit_falls_where_more_concurrency_raises_the_cost() {
        // The optimum is 4; each further call in flight makes all calls slower.
        let cost =
            |n: usize| f64::from(u32::try_from(n).unwrap_or(0)) * 25.0 * (1.0 + 0.2 * n.abs_diff(4) as f64);
        let mut adaptive = Adaptive::default();
        run(&mut adaptive, 2000, cost);
        assert!((MIN..=6).contains(&adaptive.limit()), "{}", adaptive.limit());
    }

    #[test]
    fn the_limit_falls_when_the_runtime_slows() {
        let mut adaptive = Adaptive::default();
        run(&mut adaptive, 100, |_| 100.0);
        let before = adaptive.limit();
        // Two windows, since the first may have begun before.
        run(&mut adaptive, 4 * before.max(4) + 4, |_| 500.0);
        assert!(adaptive.limit() < before, "{} then {}", before, adaptive.limit());
    }

    #[test]
    fn the_limit_stays_near_its_initial_value_if_the_cost_is_constant() {
        let mut adaptive = Adaptive::default();
        run(&mut adaptive, 3000, |n| 25.0 * n as f64);
        assert!((START - 1..=START + 1).contains(&adaptive.limit()), "{}", adaptive.limit());
    }

    #[test]
    fn calls_without_load_do_not_change_the_limit() {
        let mut adaptive = Adaptive::default();
        for _ in 0..1000 {
            adaptive.answered("RunPodSandbox", Duration::from_secs(9), 1, false);
        }
        assert_eq!(adaptive.limit(), START);
    }
}
