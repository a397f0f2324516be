//! A peer that is not there yet: nobody orders the start of the services.

use std::time::Duration;

use tokio::time::Instant;

use crate::clock::deadline_after;

/// For how long after a start a peer that was never there is no fault.
pub const START_UP: Duration = Duration::from_secs(30);

/// What a try to reach a peer is worth saying.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Say {
    /// It is new: for INFO.
    Waiting,
    /// It is new, and a fault: for WARN.
    Fault,
    /// It was said before: for DEBUG.
    Again,
}

/// Knows of a peer what was said of it.
#[derive(Debug)]
pub struct Patience {
    until: Instant,
    last: Option<Say>,
}

impl Default for Patience {
    fn default() -> Self {
        Self { until: deadline_after(Instant::now(), START_UP), last: None }
    }
}

impl Patience {
    /// It was reached: from now on its absence is a fault at once. True if it was away before.
    pub fn reached(&mut self) -> bool {
        self.until = Instant::now();
        self.last.take().is_some()
    }

    /// It was not reached.
    pub fn missed(&mut self) -> Say {
        let now = if Instant::now() < self.until { Say::Waiting } else { Say::Fault };
        if self.last == Some(now) {
            return Say::Again;
        }
        self.last = Some(now);
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_was_never_there_is_a_fault_after_the_start_up_and_one_that_was_is_one_at_once() {
        let mut peer = Patience::default();
        assert_eq!((peer.missed(), peer.missed()), (Say::Waiting, Say::Again));
        tokio::time::sleep(START_UP).await;
        assert_eq!((peer.missed(), peer.missed()), (Say::Fault, Say::Again));
        assert!(peer.reached());
        assert!(!peer.reached());
        assert_eq!((peer.missed(), peer.missed()), (Say::Fault, Say::Again));
    }
}
