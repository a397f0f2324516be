//! Decides which pods may be worked on after panics and process crashes (docs/containment.md).
//!
//! A panic in the work of a pod suspends that pod. A crash of a process only shows which pods were in work at
//! the time:
//!
//! 1. After two crashes in a row, each pod that was in work at one of them is *suspected*. Suspected pods are
//!    worked on one at a time, all others as usual. Three successful passes clear the suspicion.
//! 2. A pod that was the only one in work, or the only suspected one, at two crashes is *set aside*: it is
//!    suspended, and each further such crash doubles the suspension.
//! 3. Exits caused from outside (a signal of an operator, an ordered stop) and exits with an unknown cause do
//!    not count.
//!
//! Crashes more than [`FORGET_AFTER`] apart are not in a row. The record of a pod that was worked on for that
//! long without a panic or a crash is removed. `now` is CLOCK_BOOTTIME.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use quintlet_model::ids::PodUid;
use serde::{Deserialize, Serialize};

/// First suspension after a panic; each further panic doubles it.
const PANIC_SUSPENSION: Duration = Duration::from_secs(10);
/// First suspension of a pod that is set aside; each further one doubles it.
const SET_ASIDE_SUSPENSION: Duration = Duration::from_secs(300);
/// Longest suspension of either kind.
const LONGEST_SUSPENSION: Duration = Duration::from_secs(3600);
/// Time without a panic or a crash after which earlier ones no longer count.
pub const FORGET_AFTER: Duration = Duration::from_secs(600);
/// Crashes in a row after which the pods in work are suspected.
const CRASHES_TO_SUSPECT: u32 = 2;
/// Crashes with one pod alone in work after which it is set aside.
const CRASHES_TO_SET_ASIDE: u32 = 2;
/// Successful passes that clear a suspicion.
const PASSES_TO_CLEAR: u32 = 3;

/// Cause of the end of a pod-sync or cri-proxy process while pods were in work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessExit {
    /// The process crashed: an abort, a memory fault, or a panic outside the work of a pod. With a
    /// description.
    Crash(String),
    /// The kernel's OOM killer killed it.
    OutOfMemory,
    /// The process was stopped from outside, or the cause is unknown.
    External,
}

impl ProcessExit {
    fn description(&self) -> Option<&str> {
        match self {
            Self::Crash(how) => Some(how),
            Self::OutOfMemory => Some("out of memory"),
            Self::External => None,
        }
    }
}

/// Whether the work of a pod may begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkPermission {
    /// Without restriction.
    Allowed,
    /// While no other suspected pod is in work.
    OneAtATime,
    /// Not before the suspension has ended.
    Suspended(Suspension),
}

/// Cause and end of a suspension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suspension {
    /// CLOCK_BOOTTIME at which the suspension ends.
    pub until: Duration,
    /// Description of the failure.
    pub message: String,
    /// The pod is set aside after crashes of a process. Otherwise its work panicked.
    pub is_aside: bool,
}

/// History of one pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct PodRecord {
    // Consecutive panics.
    panics: u32,
    // Crashes in a row with the pod in work.
    deaths: u32,
    // Crashes with the pod alone in work.
    alone: u32,
    // Times that the pod was set aside.
    asides: u32,
    is_suspected: bool,
    is_aside: bool,
    // Successful passes since the last crash.
    passes: u32,
    // CLOCK_BOOTTIME of the last panic or crash.
    last: Duration,
    until: Duration,
    message: String,
}

/// Records of all pods that were involved in a panic or a crash.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainmentRecords {
    // Consecutive crashes.
    deaths: u32,
    last_death: Duration,
    pods: BTreeMap<PodUid, PodRecord>,
}

impl ContainmentRecords {
    /// Records a process exit with these pods in work. Returns the pods that are set aside because of it.
    pub fn process_exited(
        &mut self,
        process: &str,
        cause: &ProcessExit,
        in_work: &BTreeSet<PodUid>,
        now: Duration,
    ) -> Vec<PodUid> {
        let Some(how) = cause.description() else { return Vec::new() };
        if now.saturating_sub(self.last_death) > FORGET_AFTER {
            self.deaths = 0;
            self.pods.values_mut().for_each(|record| record.deaths = 0);
        }
        self.deaths = self.deaths.saturating_add(1);
        self.last_death = now;
        let suspected: Vec<&PodUid> = in_work.iter().filter(|uid| self.is_suspected(uid)).collect();
        let alone = match (in_work.len(), &suspected[..]) {
            (1, _) => in_work.first().cloned(),
            (_, [only]) => Some((*only).clone()),
            (_, _) => None,
        };
        let mut aside = Vec::new();
        for uid in in_work {
            let record = self.pods.entry(uid.clone()).or_default();
            record.deaths = record.deaths.saturating_add(1);
            record.passes = 0;
            record.last = now;
            record.message = format!("{process} crashed while it worked on this pod: {how}");
            if alone.as_ref() != Some(uid) {
                continue;
            }
            record.alone = record.alone.saturating_add(1);
            if record.alone >= CRASHES_TO_SET_ASIDE {
                record.until = now.saturating_add(doubled(SET_ASIDE_SUSPENSION, record.asides));
                record.asides = record.asides.saturating_add(1);
                record.is_aside = true;
                record.is_suspected = true;
                aside.push(uid.clone());
            }
        }
        if self.deaths >= CRASHES_TO_SUSPECT {
            self.pods.values_mut().filter(|t| t.deaths > 0).for_each(|t| t.is_suspected = true);
        }
        aside
    }

    /// Records a panic in the work of a pod. Returns its suspension.
    pub fn record_panic(&mut self, uid: &PodUid, message: String, now: Duration) -> Suspension {
        let record = self.pods.entry(uid.clone()).or_default();
        let wait = doubled(PANIC_SUSPENSION, record.panics);
        record.panics = record.panics.saturating_add(1);
        record.last = now;
        // A pod that is set aside stays so.
        record.until = record.until.max(now.saturating_add(wait));
        record.message = message;
        Suspension { until: record.until, message: record.message.clone(), is_aside: record.is_aside }
    }

    /// Records a successful pass over a pod. Returns whether its record changed.
    pub fn record_success(&mut self, uid: &PodUid, now: Duration) -> bool {
        let Some(record) = self.pods.get_mut(uid) else { return false };
        if now.saturating_sub(record.last.max(record.until)) > FORGET_AFTER {
            self.pods.remove(uid);
            return true;
        }
        record.passes = record.passes.saturating_add(1);
        let is_released = (record.is_suspected || record.is_aside) && record.passes >= PASSES_TO_CLEAR;
        if is_released {
            (record.is_suspected, record.is_aside) = (false, false);
        }
        is_released
    }

    /// Ends a suspension after a panic because the pod's spec changed. A pod that is set aside stays so:
    /// otherwise any user who may change a pod could crash the process at will.
    pub fn pod_changed(&mut self, uid: &PodUid) {
        if let Some(record) = self.pods.get_mut(uid).filter(|record| !record.is_aside) {
            record.until = Duration::ZERO;
        }
    }

    /// Ends the suspension of a pod for an operator, and resets the lengths of further ones. Returns whether
    /// it was suspended.
    ///
    /// A pod that was set aside is worked on one at a time. One more crash with it alone in work sets it
    /// aside again.
    pub fn retry(&mut self, uid: &PodUid, now: Duration) -> bool {
        let Some(record) = self.pods.get_mut(uid) else { return false };
        let waited = record.until > now;
        record.until = Duration::ZERO;
        (record.panics, record.asides, record.passes) = (0, 0, 0);
        record.is_aside = false;
        record.alone = record.alone.min(CRASHES_TO_SET_ASIDE.saturating_sub(1));
        waited
    }

    /// Removes the record of a pod that no longer exists. Returns whether there was one.
    pub fn forget(&mut self, uid: &PodUid) -> bool {
        self.pods.remove(uid).is_some()
    }

    /// Returns whether the pod's work may begin. `now` is CLOCK_BOOTTIME.
    #[must_use]
    pub fn permission(&self, uid: &PodUid, now: Duration) -> WorkPermission {
        match self.pods.get(uid) {
            Some(t) if t.until > now => WorkPermission::Suspended(Suspension {
                until: t.until,
                message: t.message.clone(),
                is_aside: t.is_aside,
            }),
            Some(t) if t.is_suspected => WorkPermission::OneAtATime,
            Some(_) | None => WorkPermission::Allowed,
        }
    }

    /// Returns whether there is a record of this pod.
    #[must_use]
    pub fn has_record(&self, uid: &PodUid) -> bool {
        self.pods.contains_key(uid)
    }

    /// Returns the number of suspended pods.
    #[must_use]
    pub fn suspended_count(&self, now: Duration) -> usize {
        self.pods.values().filter(|record| record.until > now).count()
    }

    /// Returns whether the pod was in work at one of the crashes in a row, and has not been cleared since.
    #[must_use]
    pub fn is_suspected(&self, uid: &PodUid) -> bool {
        self.pods.get(uid).is_some_and(|record| record.is_suspected)
    }
}

/// Returns `first` doubled `times` times, bounded by LONGEST_SUSPENSION.
fn doubled(first: Duration, times: u32) -> Duration {
    first.saturating_mul(2_u32.saturating_pow(times)).min(LONGEST_SUSPENSION)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn uid(name: &str) -> PodUid {
        PodUid::parse(name).unwrap()
    }

    fn uids(names: &[&str]) -> BTreeSet<PodUid> {
        names.iter().map(|name| uid(name)).collect()
    }

    fn secs(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    fn crash() -> ProcessExit {
        ProcessExit::Crash("SIGABRT".to_owned())
    }

    fn word(ledger: &ContainmentRecords, name: &str, now: Duration) -> &'static str {
        match ledger.permission(&uid(name), now) {
            WorkPermission::Allowed => "free",
            WorkPermission::OneAtATime => "one at a time",
            WorkPermission::Suspended(Suspension { is_aside: true, .. }) => "aside",
            WorkPermission::Suspended(Suspension { is_aside: false, .. }) => "waits",
        }
    }

    #[test]
    fn crashes_and_the_pods_in_work_determine_the_permission_of_each_pod() {
        type Row<'a> = (&'a str, &'a [(u64, ProcessExit, &'a [&'a str])], &'a [(&'a str, &'a str)]);
        let rows: &[Row<'_>] = &[
            ("one death says nothing", &[(0, crash(), &["a", "b"])], &[("a", "free"), ("b", "free")]),
            (
                "after two, all that were in work go one at a time",
                &[(0, crash(), &["a", "b"]), (9, crash(), &["b", "c"])],
                &[("a", "one at a time"), ("b", "one at a time"), ("c", "one at a time"), ("d", "free")],
            ),
            (
                "deaths that are far apart are not in a row",
                &[(0, crash(), &["a", "b"]), (700, crash(), &["a", "b"])],
                &[("a", "free"), ("b", "free")],
            ),
            (
                "alone twice is aside",
                &[(0, crash(), &["a"]), (9, ProcessExit::OutOfMemory, &["a"])],
                &[("a", "aside")],
            ),
            (
                "the only suspected one counts as alone",
                &[
                    (0, crash(), &["a", "b"]),
                    (1, crash(), &["a", "b"]),
                    (2, crash(), &["a", "x"]),
                    (3, crash(), &["a", "y"]),
                ],
                &[("a", "aside"), ("b", "one at a time"), ("x", "one at a time"), ("y", "one at a time")],
            ),
            (
                "two suspected ones at once blame neither",
                &[
                    (0, crash(), &["a", "b"]),
                    (1, crash(), &["a", "b"]),
                    (2, crash(), &["a", "b"]),
                    (3, crash(), &["a", "b"]),
                ],
                &[("a", "one at a time"), ("b", "one at a time")],
            ),
            (
                "kills from outside count for nothing, not even in between",
                &[
                    (0, ProcessExit::External, &["a"]),
                    (1, ProcessExit::External, &["a"]),
                    (2, crash(), &["a", "b"]),
                    (3, ProcessExit::External, &["a"]),
                ],
                &[("a", "free"), ("b", "free")],
            ),
            ("no pod was in work", &[(0, crash(), &[]), (1, crash(), &[])], &[("a", "free")]),
        ];
        for (name, deaths, want) in rows {
            let mut ledger = ContainmentRecords::default();
            let mut now = Duration::ZERO;
            for (at, cause, in_work) in *deaths {
                now = secs(1_000 + at);
                ledger.process_exited("pod-sync", cause, &uids(in_work), now);
            }
            for (pod, word_wanted) in *want {
                assert_eq!(word(&ledger, pod, now), *word_wanted, "{name}: {pod}");
            }
        }
    }

    #[test]
    fn waits_double_up_to_an_hour_and_a_pod_that_kills_again_is_aside_at_once() {
        let mut ledger = ContainmentRecords::default();
        let mut now = secs(10_000);
        let mut waits = Vec::new();
        for _ in 0..11 {
            let wait = ledger.record_panic(&uid("a"), "boom".to_owned(), now);
            waits.push(wait.until.saturating_sub(now).as_secs());
            assert_eq!(word(&ledger, "a", now), "waits");
            now = wait.until;
            assert_eq!(word(&ledger, "a", now), "free");
        }
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600]);

        let mut aside = Vec::new();
        ledger.process_exited("pod-sync", &crash(), &uids(&["k"]), now);
        for _ in 0..6 {
            assert_eq!(ledger.process_exited("pod-sync", &crash(), &uids(&["k"]), now), [uid("k")]);
            let WorkPermission::Suspended(wait) = ledger.permission(&uid("k"), now) else {
                panic!("not aside")
            };
            aside.push(wait.until.saturating_sub(now).as_secs());
            assert_eq!(wait.message, "pod-sync crashed while it worked on this pod: SIGABRT");
            now = wait.until;
            assert_eq!(word(&ledger, "k", now), "one at a time");
        }
        assert_eq!(aside, [300, 600, 1200, 2400, 3600, 3600]);
    }

    #[test]
    fn a_changed_pod_is_retried_at_once_unless_it_crashed_the_process() {
        let mut ledger = ContainmentRecords::default();
        let now = secs(10_000);
        ledger.record_panic(&uid("a"), "boom".to_owned(), now);
        ledger.pod_changed(&uid("a"));
        assert_eq!(word(&ledger, "a", now), "free");
        for _ in 0..2 {
            ledger.process_exited("pod-sync", &crash(), &uids(&["k"]), now);
        }
        ledger.pod_changed(&uid("k"));
        assert_eq!(word(&ledger, "k", now), "aside");
        ledger.record_panic(&uid("k"), "boom".to_owned(), now);
        ledger.pod_changed(&uid("k"));
        assert_eq!(word(&ledger, "k", now), "aside", "a panic does not shorten it");
    }

    #[test]
    fn a_retry_ends_the_back_off_and_the_next_crash_suspends_the_pod_again() {
        let mut ledger = ContainmentRecords::default();
        let now = secs(10_000);
        assert!(!ledger.retry(&uid("a"), now), "nothing is known of it");
        for _ in 0..4 {
            ledger.record_panic(&uid("a"), "boom".to_owned(), now);
            ledger.process_exited("pod-sync", &crash(), &uids(&["k"]), now);
        }
        assert!(ledger.retry(&uid("a"), now) && ledger.retry(&uid("k"), now));
        assert!(!ledger.retry(&uid("k"), now), "it waits no more");
        assert_eq!((word(&ledger, "a", now), word(&ledger, "k", now)), ("free", "one at a time"));
        let wait = ledger.record_panic(&uid("a"), "boom".to_owned(), now);
        assert_eq!(wait.until.saturating_sub(now), PANIC_SUSPENSION, "it starts over");
        ledger.process_exited("pod-sync", &crash(), &uids(&["k"]), now);
        assert_eq!(word(&ledger, "k", now), "aside");
    }

    #[test]
    fn a_pod_that_works_is_released_and_forgotten() {
        let mut ledger = ContainmentRecords::default();
        let now = secs(10_000);
        for _ in 0..2 {
            ledger.process_exited("pod-sync", &crash(), &uids(&["a", "b"]), now);
        }
        let record_success: Vec<bool> = (0..4).map(|_| ledger.record_success(&uid("a"), now)).collect();
        assert_eq!(record_success, [false, false, true, false], "the third pass releases it");
        assert_eq!((word(&ledger, "a", now), word(&ledger, "b", now)), ("free", "one at a time"));
        assert!(ledger.record_success(&uid("b"), now.saturating_add(FORGET_AFTER).saturating_add(secs(1))));
        assert!(ledger.forget(&uid("a")));
        assert_eq!(
            ledger,
            ContainmentRecords { deaths: 2, last_death: now, ..ContainmentRecords::default() }
        );
    }

    // A process with several pods in work at a time, as their permissions allow.
    #[derive(Debug, Clone)]
    struct Round {
        beside: Vec<usize>,
        passes: usize,
        killed_first: bool,
    }

    fn round() -> impl Strategy<Value = Round> {
        (proptest::collection::vec(0..8_usize, 0..6), 0..3_usize, any::<bool>())
            .prop_map(|(beside, passes, killed_first)| Round { beside, passes, killed_first })
    }

    proptest! {
        // Pod `k` crashes the process whenever it is worked on; others are in work beside it.
        #[test]
        fn a_pod_that_always_crashes_is_suspended_after_four_crashes_and_the_others_are_released(
            rounds in proptest::collection::vec(round(), 8)
        ) {
            let mut ledger = ContainmentRecords::default();
            let mut now = secs(10_000);
            let mut deaths = 0;
            for round in &rounds {
                now = now.saturating_add(secs(1));
                if round.killed_first {
                    // An operator's kill finds some pods in work.
                    let before = ledger.clone();
                    let all = round.beside.iter().map(|n| uid(&format!("p{n}"))).chain([uid("k")]).collect();
                    ledger.process_exited("pod-sync", &ProcessExit::External, &all, now);
                    prop_assert_eq!(&ledger, &before);
                }
                if word(&ledger, "k", now) == "aside" {
                    break;
                }
                let k_is_suspected = word(&ledger, "k", now) == "one at a time";
                let mut in_work = uids(&["k"]);
                for n in &round.beside {
                    let other = format!("p{n}");
                    // Suspected pods are worked on one at a time, and it is the turn of `k`.
                    let fits = word(&ledger, &other, now) == "free"
                        || !k_is_suspected && word(&ledger, &other, now) == "one at a time"
                            && in_work.iter().all(|u| word(&ledger, u.as_str(), now) == "free");
                    if fits {
                        in_work.insert(uid(&other));
                    }
                }
                ledger.process_exited("pod-sync", &crash(), &in_work, now);
                deaths += 1;
                for n in 0..round.passes {
                    ledger.record_success(&uid(&format!("p{n}")), now);
                }
            }
            prop_assert_eq!(word(&ledger, "k", now), "aside");
            prop_assert!(deaths <= 4, "{} deaths", deaths);
            for n in 0..8 {
                let other = format!("p{n}");
                prop_assert_ne!(word(&ledger, &other, now), "aside", "{} is innocent", other);
                (0..3).for_each(|_| { ledger.record_success(&uid(&other), now); });
                prop_assert_eq!(word(&ledger, &other, now), "free");
            }
        }

        #[test]
        fn kills_from_outside_set_nothing_aside_however_many(
            kills in proptest::collection::vec((0..100_u64, proptest::collection::btree_set(0..4_u8, 0..4)), 0..50)
        ) {
            let mut ledger = ContainmentRecords::default();
            let mut now = secs(10_000);
            for (later, in_work) in kills {
                now = now.saturating_add(secs(later));
                let in_work = in_work.iter().map(|n| uid(&format!("p{n}"))).collect();
                prop_assert!(ledger.process_exited("pod-sync", &ProcessExit::External, &in_work, now).is_empty());
            }
            prop_assert_eq!(ledger, ContainmentRecords::default());
        }
    }
}
