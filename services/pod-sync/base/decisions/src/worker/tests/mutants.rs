//! Every history passes with the real conditions. Each wrong condition is detected by the invariant that it
//! violates.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use quintlet_model::ids::{ContainerId, PodUid, SandboxId};
use quintlet_model::runtime::{Cursor, PodRuntime};
use quintlet_testkit::pods::RuntimeBuilder;

use super::super::freshness::{Freshness, NextObservation};
use super::super::{
    Effect, FullNameWaiter, Input, PodGrace, PodSyncStatuses, Rule, Termination, WorkOutcome, WorkerPhase,
    jitter,
};
use super::faulty_policy::{self, Policy, Sound};
use super::history::{HistoryEvent, Tamper, happens, play, play_spoilt};
use crate::grace::EffectiveGrace;

const LENGTH: usize = 120;
const HISTORIES: usize = 600;

fn histories() -> impl Iterator<Item = Vec<HistoryEvent>> {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let strategy = prop::collection::vec(happens(), 1..LENGTH);
    (0..HISTORIES).map(move |_| strategy.new_tree(&mut runner).unwrap().current())
}

#[test]
fn every_line_of_the_table_is_taken_and_no_history_breaks_an_invariant() {
    let mut taken: BTreeMap<Rule, u32> = BTreeMap::new();
    for (n, history) in histories().enumerate() {
        let (wrong, rules) = play(&Sound, &history);
        assert!(wrong.is_empty(), "history {n}: {wrong:#?}\n{history:#?}");
        for (rule, times) in rules {
            *taken.entry(rule).or_default() += times;
        }
    }
    let never: Vec<Rule> = Rule::ALL.into_iter().filter(|r| !taken.contains_key(r)).collect();
    assert!(never.is_empty(), "lines never taken: {never:?}");
    println!("{} lines of the table, taken {} times", taken.len(), taken.values().sum::<u32>());
}

proptest! {
    #[test]
    fn no_history_violates_an_invariant(history in prop::collection::vec(happens(), 1..LENGTH)) {
        let (wrong, _) = play(&Sound, &history);
        prop_assert!(wrong.is_empty(), "{:#?}", wrong);
    }
}

macro_rules! planted {
    ($($name:ident: $(fn $method:ident(&self $(, $arg:ident: $type:ty)*) -> $out:ty $body:block)+)*) => {
        $(
            struct $name;
            impl Policy for $name {
                $(#[allow(unused_variables)] fn $method(&self $(, $arg: $type)*) -> $out $body)+
            }
        )*
    };
}

planted! {
    NamesAreNotKept:
        fn may_start(&self, uid: &PodUid, started: Option<&PodUid>, name_queue: &[FullNameWaiter]) -> bool { true }
    TwoAtOnce:
        fn may_take(&self, busy: bool) -> bool { true }
    GraceGrows:
        fn grace(&self, stored: i64, pod: PodGrace, wanted: Option<i64>) -> EffectiveGrace {
            let seconds = wanted.or(pod.deletion).or(pod.termination).unwrap_or(1).max(1);
            EffectiveGrace { seconds, shortened: stored != 0 && stored != seconds }
        }
    DeadlineIsCountedAnew:
        fn deadline(&self, old: Duration, now: Duration, seconds: i64) -> Duration {
            now + Duration::from_secs(u64::try_from(seconds).unwrap())
        }
    CutsTheRuntime:
        fn cancels(&self, reached_runtime: bool, begins: bool, shortened: bool) -> bool { true }
    CutsNothing:
        fn cancels(&self, reached_runtime: bool, begins: bool, shortened: bool) -> bool { false }
    NothingIsTakenDown:
        fn next_phase(&self, phase: WorkerPhase) -> WorkerPhase { WorkerPhase::Finished }
    NameIsFreedTooSoon:
        fn holds_name(&self, phase: WorkerPhase) -> bool { phase < WorkerPhase::Terminated }
    NameIsNeverFreed:
        fn holds_name(&self, phase: WorkerPhase) -> bool { true }
    OrphansAreKept:
        fn is_orphan(&self, desired: &BTreeSet<PodUid>, uid: &PodUid) -> bool { false }
    AllAreOrphans:
        fn is_orphan(&self, desired: &BTreeSet<PodUid>, uid: &PodUid) -> bool { true }
    RestartForgetsEnds:
        fn restored(&self, termination: Option<Termination>, now: Duration) -> Option<Termination> { None }
    RestartBeginsGraceAnew:
        fn restored(&self, termination: Option<Termination>, now: Duration) -> Option<Termination> {
            termination.map(|e| Termination {
                deadline: now + Duration::from_secs(u64::try_from(e.grace_seconds).unwrap()),
                since: now,
                ..e
            })
        }
    CutIsAnError:
        fn wait(&self, outcome: WorkOutcome, interruptions: u32, resync: Duration, chance: f64) -> Duration {
            if outcome == WorkOutcome::Interrupted { jitter(resync, chance) } else { Sound.wait(outcome, interruptions, resync, chance) }
        }
    NoPauseAfterErrors:
        fn wait(&self, outcome: WorkOutcome, interruptions: u32, resync: Duration, chance: f64) -> Duration {
            Duration::ZERO
        }
}

fn caught(policy: &'static dyn Policy, name: &str, invariant: &str) {
    caught_spoilt(policy, |_, _, _| {}, name, invariant);
}

fn caught_spoilt(policy: &'static dyn Policy, tamper: Tamper, name: &str, invariant: &str) {
    let found = histories().enumerate().find_map(|(n, history)| {
        let (wrong, _) = play_spoilt(policy, tamper, &history);
        wrong.first().map(|w| (n, w.clone()))
    });
    let (n, wrong) = found.unwrap_or_else(|| panic!("{name} passes every history"));
    let violated = wrong.split_inclusive(':').next().unwrap();
    assert!(invariant.split(' ').any(|i| i == violated), "{name} is caught by another invariant: {wrong}");
    println!("{name}: history {n}, invariant {violated}");
}

#[test]
fn each_faulty_policy_is_caught_by_the_invariant_it_breaks() {
    caught(&NamesAreNotKept, "NamesAreNotKept", "1:");
    caught(&TwoAtOnce, "TwoAtOnce", "1:");
    caught(&GraceGrows, "GraceGrows", "3:");
    caught(&DeadlineIsCountedAnew, "DeadlineIsCountedAnew", "3:");
    caught(&CutsTheRuntime, "CutsTheRuntime", "1:");
    caught(&CutsNothing, "CutsNothing", "10:");
    caught(&NothingIsTakenDown, "NothingIsTakenDown", "1:");
    caught(&NameIsFreedTooSoon, "NameIsFreedTooSoon", "1:");
    // After a restart it even takes the name from the pod that holds it.
    caught(&NameIsNeverFreed, "NameIsNeverFreed", "1: 9:");
    caught(&OrphansAreKept, "OrphansAreKept", "9:");
    caught(&AllAreOrphans, "AllAreOrphans", "10:");
    caught(&RestartForgetsEnds, "RestartForgetsEnds", "3:");
    caught(&RestartBeginsGraceAnew, "RestartBeginsGraceAnew", "3:");
    caught(&CutIsAnError, "CutIsAnError", "9:");
    caught(&NoPauseAfterErrors, "NoPauseAfterErrors", "5:");
}

// Returns a pod that an update does not concern.
fn another(workers: &PodSyncStatuses, input: &Input) -> Option<PodUid> {
    let Input::Update { uid, .. } = input else { return None };
    workers.pods.keys().find(|other| *other != uid).cloned()
}

#[test]
fn a_step_that_affects_another_pod_is_caught() {
    let changes: Tamper = |workers, input, _| {
        if let Some(state) = another(workers, input).and_then(|uid| workers.pods.get_mut(&uid)) {
            state.interruptions += 1;
        }
    };
    let acts: Tamper = |workers, input, step| {
        step.effects.extend(another(workers, input).map(|uid| Effect::Wait(uid, Duration::ZERO)));
    };
    let wakes_nobody: Tamper = |_, input, step| {
        if matches!(input, Input::Update { .. }) {
            step.effects.push(Effect::Wake(PodUid::parse("nobody").unwrap()));
        }
    };
    caught_spoilt(&Sound, changes, "ChangesAnother", "6:");
    caught_spoilt(&Sound, acts, "ActsOnAnother", "6:");
    caught_spoilt(&Sound, wakes_nobody, "ActsOnNobody", "4:");
}

/// An event between a worker, the runtime and pleg-service.
#[derive(Debug, Clone, Copy)]
enum Seen {
    Acts,
    Makes,
    Interrupted,
    // The result of an inspection that began so many seconds ago arrives.
    Inspects(u64),
    PlegRestarts,
    InspectionFails,
    Looks,
}

// 2: nothing is decided on state that is older than the last action or lacks a created ID.
fn decide_on_old(policy: &'static dyn Policy, history: &[Seen]) -> Option<String> {
    faulty_policy::with(policy, || play_inspections(history))
}

fn play_inspections(history: &[Seen]) -> Option<String> {
    let mut freshness = Freshness::default();
    let (mut now, mut acted) = (Duration::from_secs(100), Duration::ZERO);
    let (mut epoch, mut rev) = (1_u64, 0_u64);
    let (mut cut, mut seen_epoch) = (true, 0_u64);
    let (mut made, mut observed) = (0_u32, 0_u32);
    let mut record: Option<PodRuntime> = None;
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let inspect = |began: Duration, epoch: u64, rev: u64, made: u32| {
        let builder = RuntimeBuilder::ready();
        let all = names.iter().take(made as usize).fold(builder, |b, n| b.running(n)).build();
        PodRuntime { observed: began, cursor: Cursor { epoch, rev }, ..all }
    };
    for what in history {
        now += Duration::from_secs(1);
        match what {
            Seen::Acts => {
                acted = now;
                freshness.action_ended(now);
            }
            Seen::Makes if made < 8 => {
                let id = ContainerId::parse(&format!("{}-0", names[made as usize])).unwrap();
                freshness.container_created(&id, &SandboxId::parse("s").unwrap());
                made += 1;
            }
            Seen::Makes => {}
            Seen::Interrupted => {
                cut = true;
                freshness.require_full_inspection();
            }
            Seen::Inspects(ago) => {
                rev += 1;
                // It may have begun before the last container was created. An older one than the current
                // state is not applied.
                let began = now.saturating_sub(Duration::from_secs(*ago));
                if record.as_ref().is_none_or(|r| r.observed < began) {
                    record = Some(inspect(began, epoch, rev, if *ago > 0 { observed } else { made }));
                }
            }
            Seen::PlegRestarts => {
                epoch += 1;
                record = None;
            }
            Seen::InspectionFails => {
                if let Some(record) = record.as_mut() {
                    record.error = Some("down".to_owned());
                }
            }
            Seen::Looks => match freshness.next_observation(record.as_ref()) {
                NextObservation::UseCached => {
                    let record = record.as_ref()?;
                    let knows = names.iter().take(made as usize).all(|n| record.newest(n).is_some());
                    if record.observed <= acted
                        || cut
                        || !knows
                        || record.error.is_some()
                        || record.cursor.epoch != seen_epoch
                    {
                        return Some(format!("2: decided on {record:?}, acted at {acted:?}"));
                    }
                    freshness.observed(record.cursor.epoch);
                    observed = made;
                }
                NextObservation::Inspect { full } => {
                    if (cut || epoch != seen_epoch && record.is_some()) && !full {
                        return Some("2: a look at known ids only".to_owned());
                    }
                    rev += 1;
                    record = Some(inspect(now, epoch, rev, made));
                    (cut, seen_epoch, observed) = (false, epoch, made);
                    freshness.observed(epoch);
                }
            },
        }
    }
    None
}

fn seen() -> impl Strategy<Value = Vec<Seen>> {
    let one = prop_oneof![
        2 => Just(Seen::Acts),
        2 => Just(Seen::Makes),
        1 => Just(Seen::Interrupted),
        4 => (0..4_u64).prop_map(Seen::Inspects),
        1 => Just(Seen::PlegRestarts),
        1 => Just(Seen::InspectionFails),
        5 => Just(Seen::Looks),
    ];
    prop::collection::vec(one, 1..40)
}

proptest! {
    #[test]
    fn nothing_is_decided_on_state_older_than_the_last_action(history in seen()) {
        prop_assert_eq!(decide_on_old(&Sound, &history), None);
    }
}

planted! {
    OldWillDo:
        fn is_newer(&self, observed: Duration, acted: Duration) -> bool { true }
    AsOldWillDo:
        fn is_newer(&self, observed: Duration, acted: Duration) -> bool { observed >= acted }
    UnseenWillDo:
        fn knows(&self, ids: &[String], made: &[String]) -> bool { true }
}

#[test]
fn each_faulty_policy_of_freshness_is_caught() {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[3; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let all: Vec<Vec<Seen>> = (0..2000).map(|_| seen().new_tree(&mut runner).unwrap().current()).collect();
    assert!(all.iter().any(|h| decide_on_old(&OldWillDo, h).is_some()));
    assert!(all.iter().any(|h| decide_on_old(&AsOldWillDo, h).is_some()));
    assert!(all.iter().any(|h| decide_on_old(&UnseenWillDo, h).is_some()));
    assert!(all.iter().all(|h| decide_on_old(&Sound, h).is_none()));
}
