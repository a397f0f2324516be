//! Decides when runtime calls whose outcome stays unknown count as a failure of their container or sandbox.
//!
//! A single unknown outcome comes from a restart of a service or of the runtime. The caller repeats such a
//! call without an event.

use std::collections::BTreeMap;
use std::time::Duration;

/// Calls in a row from which unknown outcomes count as a failure.
pub const CALLS: u32 = 3;
/// Least time from the first of these calls to the last.
pub const LEAST_TIME: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
struct Streak {
    method: &'static str,
    object: String,
    // CLOCK_BOOTTIME of the first outcome.
    since: Duration,
    calls: u32,
}

/// Unknown outcomes in a row, by container name; the sandbox has the empty name.
///
/// A container or sandbox has one streak: its calls follow each other.
#[derive(Debug, Clone, Default)]
pub struct UnknownCalls(BTreeMap<String, Streak>);

impl UnknownCalls {
    /// Records an unknown outcome of `method` on `object` at `now` (CLOCK_BOOTTIME). Returns whether it
    /// counts as a failure.
    pub fn add(&mut self, container: &str, method: &'static str, object: &str, now: Duration) -> bool {
        let streak = self.0.entry(container.to_owned()).or_insert_with(|| Streak::new(method, object, now));
        if (streak.method, streak.object.as_str()) != (method, object) {
            *streak = Streak::new(method, object, now);
        }
        streak.calls = streak.calls.saturating_add(1);
        streak.is_failure(now)
    }

    /// Ends the streak of a container whose call of `method` has a known outcome.
    pub fn settled(&mut self, container: &str, method: &str) {
        if self.0.get(container).is_some_and(|streak| streak.method == method) {
            self.0.remove(container);
        }
    }
}

impl Streak {
    fn new(method: &'static str, object: &str, since: Duration) -> Self {
        Self { method, object: object.to_owned(), since, calls: 0 }
    }

    fn is_failure(&self, now: Duration) -> bool {
        self.calls >= CALLS && now.saturating_sub(self.since) >= LEAST_TIME
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn unknown_outcomes_count_as_a_failure_after_three_calls_and_ten_seconds() {
        for (times, last) in [
            (&[0, 100][..], false),
            (&[0, 1, 2, 3, 9], false),
            (&[0, 1, 2, 3, 10], true),
            (&[0, 5, 10], true),
            (&[100, 220, 340], true),
        ] {
            let mut calls = UnknownCalls::default();
            let counted: Vec<bool> =
                times.iter().map(|t| calls.add("web", "StartContainer", "id-1", at(*t))).collect();
            let (end, begin) = counted.split_last().unwrap();
            assert_eq!(*end, last, "{times:?}");
            assert!(begin.iter().all(|is_failure| !is_failure), "{times:?}: {counted:?}");
        }
    }

    #[test]
    fn every_further_unknown_outcome_counts_until_one_is_known() {
        let mut calls = UnknownCalls::default();
        let add = |calls: &mut UnknownCalls, t| calls.add("web", "StartContainer", "id-1", at(t));
        assert_eq!([0, 5, 10, 25].map(|t| add(&mut calls, t)), [false, false, true, true]);
        calls.settled("web", "PullImage");
        assert!(add(&mut calls, 40), "the outcome of another method changes nothing");
        calls.settled("web", "StartContainer");
        assert!(!add(&mut calls, 55), "a new streak");
    }

    #[test]
    fn unknown_outcomes_are_counted_per_method_object_and_container() {
        for (container, method, object) in [
            ("web", "StartContainer", "id-2"),
            ("web", "CreateContainer", "id-1"),
            ("db", "StartContainer", "id-1"),
        ] {
            let mut calls = UnknownCalls::default();
            for t in [0, 5] {
                assert!(!calls.add("web", "StartContainer", "id-1", at(t)));
            }
            assert!(!calls.add(container, method, object, at(10)), "{container} {method} {object}");
        }
    }
}
