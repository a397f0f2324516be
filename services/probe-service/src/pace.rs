//! Bounds what a probe with a period below one second causes in other services to what a period of one second
//! causes.
//!
//! A changed result is reported at once. The rest waits: a streak that does not change the result, further
//! failures for the pod's events, and the return of a pod to readiness. So neither a failing nor an
//! alternating probe multiplies passes of pod-sync, events and writes to the API server. No I/O; the time is
//! an argument.

use std::time::Duration;

use quintlet_model::probe::{ProbeMemory, ProbeResult, ProbeType};
use tokio::time::Instant;

use crate::target::Probe;

/// Shortest interval between two reports, two events and two losses of readiness of a probe. Probes with this
/// period or a longer one are not bounded.
const INTERVAL: Duration = Duration::from_secs(1);

/// Returns whether the reports of probes with this period are bounded.
pub(crate) fn is_bounded(period: Duration) -> bool {
    period < INTERVAL
}

/// The last reports of one probe.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    reported: Option<Instant>,
    /// The memory has changed since the last report.
    is_report_due: bool,
    event: Option<Instant>,
    /// Last loss of the readiness of this container instance.
    lost_readiness: Option<Instant>,
}

impl Pace {
    /// Forgets the readiness of the previous container instance.
    pub(crate) fn begin_container(&mut self) {
        self.lost_readiness = None;
    }

    /// Returns whether the memory `new` is reported now. `is_changed`: the driver needs a report of `new` in
    /// place of `old`.
    pub(crate) fn admits_report(
        &mut self,
        period: Duration,
        old: Option<&ProbeMemory>,
        new: &ProbeMemory,
        is_changed: bool,
        now: Instant,
    ) -> bool {
        self.is_report_due |= is_changed;
        let decisive = |m: &ProbeMemory| (m.container_id.clone(), m.result, m.on_hold);
        let is_urgent = !is_bounded(period) || old.map(decisive) != Some(decisive(new));
        let admitted = self.is_report_due && (is_urgent || has_passed(self.reported, now));
        if admitted {
            self.reported = Some(now);
            self.is_report_due = false;
        }
        admitted
    }

    /// Returns whether a failed evaluation becomes an event.
    pub(crate) fn admits_event(&mut self, period: Duration, now: Instant) -> bool {
        let admitted = !is_bounded(period) || has_passed(self.event, now);
        if admitted {
            self.event = Some(now);
        }
        admitted
    }

    /// Returns the memory after an evaluation: `new`, but without its new result while a readiness probe
    /// would make its container ready again less than [`INTERVAL`] after the loss. The streak continues, so a
    /// later success makes the container ready.
    pub(crate) fn settled(
        &mut self,
        probe: &Probe,
        old: &ProbeMemory,
        new: ProbeMemory,
        now: Instant,
    ) -> ProbeMemory {
        if probe.kind != ProbeType::Readiness || !is_bounded(probe.period) || old.result == new.result {
            return new;
        }
        match new.result {
            Some(ProbeResult::Success) if !has_passed(self.lost_readiness, now) => {
                ProbeMemory { result: old.result, ..new }
            }
            Some(ProbeResult::Failure) => {
                self.lost_readiness = Some(now);
                new
            }
            Some(ProbeResult::Success | ProbeResult::Unknown) | None => new,
        }
    }
}

fn has_passed(last: Option<Instant>, now: Instant) -> bool {
    last.is_none_or(|last| now.saturating_duration_since(last) >= INTERVAL)
}
