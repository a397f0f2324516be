//! Measures how long a pod has been active by CLOCK_BOOTTIME (ARCHITECTURE.md, invariant 7).

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

/// Start of a pod by both clocks. Wall time is used once, when the start is first observed; it may precede
/// this boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodStart {
    // `status.startTime`.
    start: Timestamp,
    // The same time by CLOCK_BOOTTIME; negative if it precedes this boot.
    boot: SignedDuration,
}

impl PodStart {
    /// Records a start at `start`. Returns `before` unchanged if it has the same start.
    #[must_use]
    pub fn at(start: Timestamp, before: Option<Self>, wall: Timestamp, boot: Duration) -> Self {
        match before {
            Some(before) if before.start == start => before,
            Some(_) | None => {
                let boot = SignedDuration::try_from(boot).unwrap_or(SignedDuration::MAX);
                Self { start, boot: boot.saturating_sub(wall.duration_since(start)) }
            }
        }
    }

    /// Returns the current wall time as it would be if the clock had not been set since the start.
    #[must_use]
    pub fn now(&self, boot: Duration) -> Timestamp {
        let boot = SignedDuration::try_from(boot).unwrap_or(SignedDuration::MAX);
        self.start.saturating_add(boot.saturating_sub(self.boot)).unwrap_or(self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_testkit::pods::at;

    #[test]
    fn a_clock_change_does_not_affect_the_active_deadline() {
        let secs = Duration::from_secs;
        let started = PodStart::at(at(1000), None, at(1010), secs(500));
        assert_eq!(started.now(secs(520)), at(1030));
        for wall in [0, 1_000_000] {
            let again = PodStart::at(at(1000), Some(started), at(wall), secs(520));
            assert_eq!(again.now(secs(520)), at(1030), "the clock says {wall}");
        }
        let before_boot = PodStart::at(at(1000), None, at(9000), secs(5));
        assert_eq!(before_boot.now(secs(6)), at(9001));
        let another = PodStart::at(at(2000), Some(started), at(2000), secs(600));
        assert_eq!(another.now(secs(601)), at(2001), "another start is another pod's");
    }
}
