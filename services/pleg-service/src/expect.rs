//! Expected changes after hints, and the pauses between inspections that look for them.

use std::time::Duration;

use crate::traits::HintKind;

/// Delay of the first look for a change that is most often made by a call of pod-sync, which calls `Observe`
/// after it. A call takes seconds on a busy machine, and earlier looks would find nothing. Of what remains,
/// by other clients, only exits are urgent. It is also the longest wait for the hint of an exit that follows
/// the one of its beginning.
const FIRST_LOOK_LATER: Duration = Duration::from_secs(5);
/// Delay of the first lookup of a created or started ID that is in no entry. Most often pod-sync created it
/// and observes its pod when the last container has started, which takes longer in a burst.
const FIRST_LOOKUP: Duration = Duration::from_secs(10);
/// How long an ID that is in no entry is looked up after the first lookup.
pub(crate) const UNKNOWN_LIMIT: Duration = Duration::from_secs(2);
/// First pause.
const FIRST: Duration = Duration::from_millis(2);
/// Longest pause while pauses double.
const DOUBLING_MAX: Duration = Duration::from_millis(200);
/// Pause after that, and after a longer first one: the kubelet's relist period.
const SLOW: Duration = Duration::from_secs(1);

/// Returns the pause after `last`: 2 ms doubling to 200 ms, then one second.
pub(crate) fn next_pause(last: Option<Duration>) -> Duration {
    match last {
        None => FIRST,
        Some(last) if last >= DOUBLING_MAX => SLOW,
        Some(last) => last.saturating_mul(2).min(DOUBLING_MAX),
    }
}

/// Returns the delay of the first inspection after a hint of this kind. The inspection is left out if the
/// entry shows the change by then. A hint without a delay is always inspected.
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
        HintKind::Created | HintKind::Started => Some(FIRST_LOOKUP),
        // The end of the exit follows.
        HintKind::Exiting => Some(SLOW),
        HintKind::Exited | HintKind::Deleted | HintKind::Oom => None,
    }
}

/// Returns how long an expected change is looked for after the first look, or none for no limit.
///
/// An exit is certain, since the process has ended. A creation or a start may fail after its event, and a
/// deleted ID may belong to an object that the CRI does not have.
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
    fn exits_are_looked_for_soon_and_other_changes_at_the_period_of_a_relist() {
        let pauses = |mut last: Option<Duration>| -> Vec<u128> {
            let mut pause = || {
                last = Some(next_pause(last));
                last.map_or(0, |p| p.as_millis())
            };
            (0..10).map(|_| pause()).collect()
        };
        assert_eq!(pauses(None), [2, 4, 8, 16, 32, 64, 128, 200, 1000, 1000]);
        for kind in [HintKind::Created, HintKind::Started, HintKind::Exiting, HintKind::Deleted] {
            assert_eq!(pauses(first_look(kind)), [1000; 10], "{kind:?}");
        }
        for kind in [HintKind::Created, HintKind::Started, HintKind::Exiting] {
            assert_eq!(pauses(unknown_pause(kind)), [1000; 10], "{kind:?}");
        }
    }
}
