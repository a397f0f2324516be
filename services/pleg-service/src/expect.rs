//! Expected changes after hints, and the pauses between inspections that look for them.

use std::time::Duration;

use crate::traits::HintKind;

/// Delay of the inspection after a hint that is most often about a call of pod-sync, which calls `Observe` afterwards, so that a burst
/// of calls is not inspected twice. It is also the longest wait for the hint of an exit that follows the one of its beginning.
const FIRST_LOOK_LATER: Duration = Duration::from_millis(50);
/// Delay of the first list for an ID that is in no entry. containerd reports a sandbox when its creation begins, and the CRI shows it
/// when the creation is complete, 100 to 500 ms later.
const UNKNOWN_FIRST: Duration = Duration::from_millis(250);
/// First pause.
const FIRST: Duration = Duration::from_millis(2);
/// Longest pause while pauses double.
const DOUBLING_MAX: Duration = Duration::from_millis(200);
/// Pause after that.
const SLOW: Duration = Duration::from_secs(1);

/// Returns the pause after `last`: 2 ms doubling to 200 ms, then one second.
pub(crate) fn next_pause(last: Option<Duration>) -> Duration {
    match last {
        None => FIRST,
        Some(last) if last >= DOUBLING_MAX => SLOW,
        Some(last) => last.saturating_mul(2).min(DOUBLING_MAX),
    }
}

/// Returns the delay of the first inspection after a hint of this kind. The inspection is left out if the entry shows the change by
/// then. A hint without a delay is always inspected.
pub(crate) fn first_look(kind: HintKind) -> Option<Duration> {
    match kind {
        HintKind::Created | HintKind::Started | HintKind::Exiting | HintKind::Deleted => {
            Some(FIRST_LOOK_LATER)
        }
        HintKind::Exited => Some(Duration::ZERO),
        HintKind::Oom => None,
    }
}

/// Returns the pause before the first list for an ID that is in no entry, after a hint of this kind.
///
/// An exit has no pause, since its pod may be missing in the store.
pub(crate) fn unknown_pause(kind: HintKind) -> Option<Duration> {
    match kind {
        HintKind::Created | HintKind::Started => Some(UNKNOWN_FIRST),
        HintKind::Exiting | HintKind::Exited | HintKind::Deleted | HintKind::Oom => None,
    }
}

/// Returns how long an expected change is looked for, or none for no limit.
///
/// An exit is certain, since the process has ended. A creation or a start may fail after its event, and a deleted ID may belong to an
/// object that the CRI does not have.
pub(crate) fn wait_limit(kind: HintKind) -> Option<Duration> {
    match kind {
        HintKind::Created => Some(Duration::from_secs(2)),
        HintKind::Started => Some(Duration::from_secs(10)),
        HintKind::Exiting | HintKind::Exited => None,
        HintKind::Deleted => Some(Duration::from_secs(60)),
        HintKind::Oom => Some(Duration::ZERO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_from_2_to_200_ms_and_are_a_second_from_then_on() {
        let mut last = None;
        let pauses: Vec<u128> = (0..10)
            .map(|_| {
                last = Some(next_pause(last));
                last.map_or(0, |p| p.as_millis())
            })
            .collect();
        assert_eq!(pauses, [2, 4, 8, 16, 32, 64, 128, 200, 1000, 1000]);
    }
}
