//! What a hint makes us expect, and when to look for it again.

use std::time::Duration;

use crate::seams::HintKind;

/// What was created or started is looked for after this. Who did it looks at once (`Observe`); for what others did this is soon
/// enough, and a burst of starts is not inspected twice.
pub(crate) const STARTS_LATER: Duration = Duration::from_millis(50);
/// The first list for an id that nobody here knows. containerd tells of a sandbox when its making begins, and the CRI shows it
/// when that is done, some 100 to 500 ms later.
const UNKNOWN_FIRST: Duration = Duration::from_millis(250);
/// First look again after this.
const FIRST: Duration = Duration::from_millis(2);
/// Doubling ends here.
const DOUBLING_MAX: Duration = Duration::from_millis(200);
/// From then on.
const SLOW: Duration = Duration::from_secs(1);

/// The pause after a pause, until what is expected shows: 2 ms doubling to 200 ms, then every second.
pub(crate) fn next_pause(last: Option<Duration>) -> Duration {
    match last {
        None => FIRST,
        Some(last) if last >= DOUBLING_MAX => SLOW,
        Some(last) => last.saturating_mul(2).min(DOUBLING_MAX),
    }
}

/// The pause before the first look for an id that nobody here knows, after a hint of this kind.
///
/// An exit is looked for at once: its pod may have been missed altogether.
pub(crate) fn unknown_pause(kind: HintKind) -> Option<Duration> {
    match kind {
        HintKind::Created | HintKind::Started => Some(UNKNOWN_FIRST),
        HintKind::Exited | HintKind::Deleted | HintKind::Oom => None,
    }
}

/// How long an effect is waited for; None: until it shows.
///
/// An exit is certain: the process has ended. A creation or start may fail after its event, and a deleted id may be of
/// something the CRI never shows.
pub(crate) fn patience(kind: HintKind) -> Option<Duration> {
    match kind {
        HintKind::Created => Some(Duration::from_secs(2)),
        HintKind::Started => Some(Duration::from_secs(10)),
        HintKind::Exited => None,
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
