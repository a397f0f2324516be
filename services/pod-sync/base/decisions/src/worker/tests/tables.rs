//! Transitions with details that no invariant covers.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use quintlet_model::ids::PodUid;
use serde_json::json;

use super::super::{
    Effect, Input, KillPodOptions, PodFacts, PodGrace, PodSyncStatuses, SyncPodType, TerminationCause, Work,
    WorkOutcome, WorkerTransition, policy,
};
use super::history::{RESYNC, uid};
use crate::status::{KillCause, KillOverride};

fn workers() -> PodSyncStatuses {
    PodSyncStatuses::new(RESYNC)
}

fn api(grace: i64) -> PodFacts {
    PodFacts {
        full_name: "a_n".into(),
        grace: PodGrace { deletion: None, termination: Some(grace) },
        ..PodFacts::default()
    }
}

fn step(w: &mut PodSyncStatuses, input: Input, at: u64) -> WorkerTransition {
    w.step(input, Duration::from_secs(at), 0.0)
}

fn update(facts: PodFacts, kind: SyncPodType) -> Input {
    Input::Update { uid: uid(0), facts, kind, quiet: true }
}

fn running(facts: PodFacts) -> PodSyncStatuses {
    let mut w = workers();
    step(&mut w, update(facts, SyncPodType::Create), 1);
    step(&mut w, Input::TakeWork(uid(0)), 1);
    step(&mut w, Input::Done { uid: uid(0), outcome: WorkOutcome::Idle(None) }, 1);
    w
}

fn work(w: &mut PodSyncStatuses, pod: u8, at: u64) -> Option<Work> {
    step(w, Input::TakeWork(uid(pod)), at).effects.into_iter().find_map(|e| match e {
        Effect::Work(_, work) => Some(work),
        _ => None,
    })
}

fn advance(w: &mut PodSyncStatuses, pod: u8, at: u64) -> Vec<Effect> {
    step(w, Input::Done { uid: uid(pod), outcome: WorkOutcome::Advance }, at).effects
}

#[test]
fn a_deletion_goes_through_all_phases_and_a_second_one_only_shortens_it() {
    let mut w = running(api(30));
    let deleted = |seconds| PodFacts {
        deleted: true,
        grace: PodGrace { deletion: Some(seconds), termination: Some(30) },
        ..api(30)
    };
    step(&mut w, update(deleted(30), SyncPodType::Update), 10);
    let end = |w: &PodSyncStatuses| {
        w.termination(&uid(0)).map(|e| (e.cause, e.grace_seconds, e.deadline.as_secs())).unwrap()
    };
    assert_eq!(end(&w), (TerminationCause::Deleted, 30, 40));
    assert_eq!(work(&mut w, 0, 10), Some(Work::Terminating));
    step(&mut w, update(deleted(5), SyncPodType::Update), 12);
    assert_eq!(end(&w), (TerminationCause::Deleted, 5, 17));
    step(&mut w, update(deleted(60), SyncPodType::Update), 13);
    assert_eq!(end(&w), (TerminationCause::Deleted, 5, 17));
    assert_eq!(advance(&mut w, 0, 14), [Effect::Wait(uid(0), Duration::ZERO)]);
    assert_eq!(work(&mut w, 0, 14), Some(Work::Terminated));
    advance(&mut w, 0, 14);
    assert_eq!(work(&mut w, 0, 14), Some(Work::Finished { clean: false }));
    assert_eq!(advance(&mut w, 0, 14), [Effect::Forget(uid(0))]);
}

#[test]
fn of_several_kills_the_smallest_grace_and_the_last_word_count_and_all_are_answered() {
    let mut w = running(api(30));
    let kill = |grace, waiter, message: &str| {
        let why = KillOverride { cause: KillCause::Evicted, message: message.into(), disruption: None };
        SyncPodType::Kill(KillPodOptions { evict: true, grace, waiter: Some(waiter), killed_as: Some(why) })
    };
    step(&mut w, update(api(30), kill(Some(20), 1, "first")), 10);
    step(&mut w, update(api(30), kill(Some(3), 2, "second")), 11);
    step(&mut w, update(api(30), kill(None, 3, "third")), 12);
    let end = w.termination(&uid(0)).unwrap();
    assert_eq!((end.cause, end.grace_seconds), (TerminationCause::Evicted, 3));
    assert_eq!(end.killed_as.as_ref().unwrap().message, "third");
    assert_eq!(work(&mut w, 0, 12), Some(Work::Terminating));
    assert!(advance(&mut w, 0, 13).contains(&Effect::NotifyStopped(uid(0), vec![1, 2, 3])));
    let late = step(&mut w, update(api(30), kill(None, 4, "late")), 14);
    assert_eq!(late.effects, [Effect::NotifyStopped(uid(0), vec![4])]);
}

#[test]
fn a_static_pod_waits_for_its_name_and_is_woken_when_it_is_free() {
    let facts = || PodFacts { full_name: "s_n".into(), is_static: true, ..api(30) };
    let mut w = workers();
    for pod in 0..3 {
        step(
            &mut w,
            Input::Update { uid: uid(pod), facts: facts(), kind: SyncPodType::Create, quiet: true },
            1,
        );
    }
    assert_eq!(work(&mut w, 0, 1), Some(Work::Sync));
    assert_eq!(work(&mut w, 1, 1), Some(Work::WaitForFullName { other: Some(uid(0)) }));
    step(&mut w, Input::Done { uid: uid(0), outcome: WorkOutcome::Idle(None) }, 1);
    step(&mut w, Input::Remove(uid(0)), 2);
    // The next pod in the queue is removed before its turn: it never runs.
    step(&mut w, Input::Remove(uid(1)), 2);
    assert_eq!(work(&mut w, 1, 2), Some(Work::Finished { clean: true }));
    assert_eq!(work(&mut w, 0, 2), Some(Work::Terminating));
    advance(&mut w, 0, 3);
    assert_eq!(work(&mut w, 2, 3), Some(Work::WaitForFullName { other: Some(uid(0)) }));
    assert_eq!(work(&mut w, 0, 3), Some(Work::Terminated));
    assert!(advance(&mut w, 0, 4).contains(&Effect::Wake(uid(2))));
    assert_eq!(work(&mut w, 2, 4), Some(Work::Sync));
}

#[test]
fn a_reused_uid_starts_once_the_previous_pod_has_terminated() {
    let facts = || PodFacts { full_name: "s_n".into(), is_static: true, ..api(30) };
    let mut w = workers();
    step(&mut w, update(facts(), SyncPodType::Create), 1);
    assert_eq!(work(&mut w, 0, 1), Some(Work::Sync));
    step(&mut w, Input::Done { uid: uid(0), outcome: WorkOutcome::Idle(None) }, 1);
    step(&mut w, Input::Remove(uid(0)), 2);
    step(&mut w, update(facts(), SyncPodType::Create), 3);
    for want in [Work::Terminating, Work::Terminated] {
        assert_eq!(work(&mut w, 0, 4), Some(want));
        advance(&mut w, 0, 4);
    }
    assert_eq!(work(&mut w, 0, 4), Some(Work::Finished { clean: true }));
    assert_eq!(advance(&mut w, 0, 4), [Effect::Forget(uid(0)), Effect::Restart(uid(0))]);
    let added = step(&mut w, update(facts(), SyncPodType::Create), 5);
    assert_eq!(added.effects[0], Effect::Spawn(uid(0)));
    assert_eq!(work(&mut w, 0, 5), Some(Work::Sync));
}

#[test]
fn the_predicates_are_as_the_kubelets() {
    type Ask = fn(&PodSyncStatuses, &PodUid) -> bool;
    let rows: [(&str, Ask, [bool; 7]); 3] = [
        // An unknown pod before and after the sources are ready; then sync, termination requested,
        // terminating, terminated, finished.
        (
            "known terminated",
            PodSyncStatuses::is_known_terminated,
            [false, false, false, false, false, true, true],
        ),
        ("finished", PodSyncStatuses::should_be_finished, [false, true, false, false, false, false, true]),
        (
            "requested",
            PodSyncStatuses::is_termination_requested,
            [false, false, false, true, true, true, true],
        ),
    ];
    let mut stages = vec![workers()];
    let mut w = workers();
    step(&mut w, Input::SyncKnownPods(Default::default()), 0);
    stages.push(w);
    let mut w = running(api(30));
    stages.push(w.clone());
    step(&mut w, update(PodFacts { deleted: true, ..api(30) }, SyncPodType::Update), 2);
    stages.push(w.clone());
    for _ in 0..2 {
        work(&mut w, 0, 2);
        stages.push(w.clone());
        advance(&mut w, 0, 2);
    }
    stages.push(w);
    for (name, ask, want) in rows {
        let got: Vec<bool> = stages.iter().map(|w| ask(w, &uid(0))).collect();
        assert_eq!(got, want, "{name}");
    }
    let mut w = running(PodFacts { is_static: true, ..api(30) });
    assert!(!w.is_static_terminating("a_n"));
    step(&mut w, Input::Remove(uid(0)), 2);
    assert!(w.is_static_terminating("a_n"));
}

#[test]
fn waits_are_the_kubelets_with_jitter_and_short_where_nothing_is_known() {
    let wait =
        |outcome, interruptions, chance| policy::wait(outcome, interruptions, RESYNC, chance).as_millis();
    for (name, outcome, interruptions, low, high) in [
        ("resync", WorkOutcome::Idle(None), 0, 60_000, 90_000),
        ("sooner", WorkOutcome::Idle(Some(Duration::from_secs(7))), 0, 7_000, 7_000),
        ("not later than the resync", WorkOutcome::Idle(Some(Duration::from_secs(700))), 0, 60_000, 90_000),
        ("error", WorkOutcome::Failed(None), 0, 10_000, 15_000),
        ("error with its own time", WorkOutcome::Failed(Some(Duration::from_secs(3))), 0, 3_000, 3_000),
        ("network", WorkOutcome::NetworkNotReady, 0, 1_000, 1_500),
        ("first cut", WorkOutcome::Interrupted, 0, 100, 100),
        ("third cut", WorkOutcome::Interrupted, 2, 400, 400),
        ("many cuts", WorkOutcome::Interrupted, 99, 1_000, 1_000),
        ("cancelled for nothing", WorkOutcome::Cancelled, 0, 10_000, 15_000),
        ("done", WorkOutcome::Requeue, 0, 0, 0),
    ] {
        assert_eq!(
            (wait(outcome, interruptions, 0.0), wait(outcome, interruptions, 1.0)),
            (low, high),
            "{name}"
        );
    }
}

#[test]
fn no_content_of_a_pod_is_stored_or_logged() {
    let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "a", "namespace": "n", "uid": "u0"},
        "spec": {"containers": [{"name": "c", "env": [{"name": "PASSWORD", "value": "hunter2"}]}]}}))
    .unwrap();
    let mut w = workers();
    let out = step(&mut w, update(PodFacts::of(&pod, "a_n".into()), SyncPodType::Create), 1);
    assert!(!format!("{w:?} {out:?}").contains("hunter2"));
}
