//! Limits attempts while the API server does not answer.

use std::time::Duration;

use parking_lot::Mutex;
use quintlet_kit::backoff::Backoff;
use quintlet_kit::clock::deadline_after;
use tokio::sync::Notify;
use tokio::time::Instant;

/// First pause after a failure.
const FIRST: Duration = Duration::from_millis(50);
/// Longest pause. A server that answers again is noticed within it.
const LONGEST: Duration = Duration::from_secs(1);

/// Allows all attempts while the server answers, and one attempt per pause while it does not.
#[derive(Debug)]
pub(crate) struct Gate {
    state: Mutex<State>,
    opened: Notify,
}

#[derive(Debug)]
struct State {
    /// The current pause; none while the server answers.
    pause: Option<Duration>,
    backoff: Backoff,
    next: Instant,
    /// End of the time that the server requested with `Retry-After`.
    hold: Option<Instant>,
}

impl Default for Gate {
    fn default() -> Self {
        Self {
            state: Mutex::new(State {
                pause: None,
                backoff: Backoff::new(FIRST, 2.0, LONGEST),
                next: Instant::now(),
                hold: None,
            }),
            opened: Notify::new(),
        }
    }
}

impl Gate {
    /// Waits until an attempt is allowed.
    pub(crate) async fn enter(&self) {
        loop {
            let opened = self.opened.notified();
            let until = {
                let mut state = self.state.lock();
                let now = Instant::now();
                match (state.hold.filter(|h| *h > now), state.pause) {
                    (Some(hold), _) => hold,
                    (None, None) => return,
                    (None, Some(pause)) if state.next <= now => {
                        state.next = deadline_after(now, pause);
                        return;
                    }
                    (None, Some(_)) => state.next,
                }
            };
            // A dropped arm loses nothing: the state is read again.
            tokio::select! {
                () = opened => {}
                () = tokio::time::sleep_until(until) => {}
            }
        }
    }

    /// Records an answer.
    pub(crate) fn answered(&self) {
        let mut state = self.state.lock();
        if state.pause.take().is_some() {
            state.backoff.reset();
            self.opened.notify_waiters();
        }
    }

    /// Records a missing answer, or a `Retry-After`.
    pub(crate) fn failed(&self, retry_after: Option<Duration>) {
        let mut state = self.state.lock();
        let now = Instant::now();
        let pause = state.backoff.next_wait();
        state.pause = Some(pause);
        state.next = deadline_after(now, pause);
        if let Some(after) = retry_after {
            let until = deadline_after(now, after);
            state.hold = Some(state.hold.map_or(until, |h| h.max(until)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[tokio::test(start_paused = true)]
    async fn attempts_are_delayed_while_the_server_fails_and_immediate_once_it_replies() {
        let gate = Arc::new(Gate::default());
        let start = Instant::now();
        gate.enter().await;
        assert_eq!(start.elapsed(), Duration::ZERO);
        let mut pauses = Vec::new();
        for _ in 0..7 {
            gate.failed(None);
            let before = Instant::now();
            gate.enter().await;
            pauses.push(before.elapsed().as_millis());
        }
        assert_eq!(pauses, [50, 100, 200, 400, 800, 1000, 1000]);
        let waiter = {
            let gate = gate.clone();
            async move { gate.enter().await }
        };
        tokio::pin!(waiter);
        assert!(tokio::time::timeout(Duration::from_millis(1), &mut waiter).await.is_err());
        gate.answered();
        let before = Instant::now();
        waiter.await;
        assert_eq!(before.elapsed(), Duration::ZERO, "waiting calls continue at once");
    }

    #[tokio::test(start_paused = true)]
    async fn retry_after_is_observed_even_if_another_call_succeeds() {
        let gate = Gate::default();
        gate.failed(Some(Duration::from_secs(7)));
        gate.answered();
        let start = Instant::now();
        gate.enter().await;
        assert_eq!(start.elapsed(), Duration::from_secs(7));
    }
}
