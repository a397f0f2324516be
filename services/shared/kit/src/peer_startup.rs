//! Classifies failures to reach a peer: the services start in any order, so a peer may not be running yet.

use std::time::Duration;

use tokio::time::Instant;

use crate::clock::deadline_after;

/// Time after the start of this process during which an unreachable peer is expected.
pub const START_UP: Duration = Duration::from_secs(30);

/// How a failure to reach a peer is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerFailure {
    /// The peer may still be starting. Logged at INFO.
    Starting,
    /// The peer is down. Logged at WARN.
    Down,
    /// The same failure was logged before. Logged at DEBUG.
    Repeated,
}

/// Tracks whether a peer was reached and which failure was logged last.
#[derive(Debug)]
pub struct PeerStartup {
    until: Instant,
    last: Option<PeerFailure>,
}

impl Default for PeerStartup {
    fn default() -> Self {
        Self { until: deadline_after(Instant::now(), START_UP), last: None }
    }
}

impl PeerStartup {
    /// Records that the peer was reached. Later failures are [`PeerFailure::Down`] at once. Returns whether a
    /// failure came before.
    pub fn reached(&mut self) -> bool {
        self.until = Instant::now();
        self.last.take().is_some()
    }

    /// Records a failure to reach the peer, and returns how to log it.
    pub fn failed(&mut self) -> PeerFailure {
        let now = if Instant::now() < self.until { PeerFailure::Starting } else { PeerFailure::Down };
        if self.last == Some(now) {
            return PeerFailure::Repeated;
        }
        self.last = Some(now);
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_unreachable_peer_is_down_after_the_start_up_time_or_at_once_if_it_was_reached_before() {
        let mut peer = PeerStartup::default();
        assert_eq!((peer.failed(), peer.failed()), (PeerFailure::Starting, PeerFailure::Repeated));
        tokio::time::sleep(START_UP).await;
        assert_eq!((peer.failed(), peer.failed()), (PeerFailure::Down, PeerFailure::Repeated));
        assert!(peer.reached());
        assert!(!peer.reached());
        assert_eq!((peer.failed(), peer.failed()), (PeerFailure::Down, PeerFailure::Repeated));
    }
}
