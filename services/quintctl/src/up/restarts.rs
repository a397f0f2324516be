//! Computes the delay before the restart of a service. Reads no clock.

use std::collections::VecDeque;
use std::time::Duration;

use quintlet_kit::backoff::Backoff;
use tokio::time::Instant;

/// Delay of a restart outside a crash loop.
const DELAY: Duration = Duration::from_millis(200);

const MAX_DELAY: Duration = Duration::from_secs(5);

/// Number of exits within [`WINDOW`] that are a crash loop.
const EXITS: usize = 5;

/// Period in which exits count. A process that ran this long resets the back-off.
const WINDOW: Duration = Duration::from_secs(10);

/// The exits of one service.
#[derive(Debug, Default)]
pub(super) struct Restarts {
    recent: VecDeque<Instant>,
    /// Present in a crash loop.
    backoff: Option<Backoff>,
}

impl Restarts {
    /// Returns the delay after an exit at `now` of a process that ran for `ran`.
    pub(super) fn after_exit(&mut self, now: Instant, ran: Duration) -> Duration {
        if ran >= WINDOW {
            *self = Self::default();
        }
        self.recent.push_back(now);
        while self.recent.front().is_some_and(|at| now.duration_since(*at) > WINDOW) {
            self.recent.pop_front();
        }
        if self.backoff.is_none() && self.recent.len() < EXITS {
            return DELAY;
        }
        self.backoff.get_or_insert_with(|| Backoff::new(DELAY * 2, 2.0, MAX_DELAY)).next_wait()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delays(runs_ms: &[u64]) -> Vec<u64> {
        let mut restarts = Restarts::default();
        let mut now = Instant::now();
        runs_ms
            .iter()
            .map(|ms| {
                let ran = Duration::from_millis(*ms);
                now += ran;
                let delay = restarts.after_exit(now, ran);
                now += delay;
                u64::try_from(delay.as_millis()).unwrap()
            })
            .collect()
    }

    #[test]
    fn only_the_fifth_exit_within_ten_seconds_waits_longer() {
        assert_eq!(delays(&[0; 12]), [200, 200, 200, 200, 400, 800, 1600, 3200, 5000, 5000, 5000, 5000]);
        assert_eq!(delays(&[3000; 8]), [200; 8]);
    }

    #[test]
    fn a_run_of_ten_seconds_ends_the_back_off() {
        assert_eq!(delays(&[0, 0, 0, 0, 0, 0, 10_000, 0]), [200, 200, 200, 200, 400, 800, 200, 200]);
    }
}
