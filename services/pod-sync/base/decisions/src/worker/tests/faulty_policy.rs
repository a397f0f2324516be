//! The policy, with faults that a test injects.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::time::Duration;

use quintlet_model::ids::PodUid;

use super::super::{FullNameWaiter, PodGrace, Termination, WorkOutcome, WorkerPhase, policy};
use crate::grace::EffectiveGrace;

/// The conditions of the transitions. The default methods are those of the product.
pub(in super::super) trait Policy {
    fn may_start(&self, uid: &PodUid, started: Option<&PodUid>, name_queue: &[FullNameWaiter]) -> bool {
        policy::may_start(uid, started, name_queue)
    }
    fn may_take(&self, busy: bool) -> bool {
        policy::may_take(busy)
    }
    fn grace(&self, stored: i64, pod: PodGrace, wanted: Option<i64>) -> EffectiveGrace {
        policy::grace(stored, pod, wanted)
    }
    fn deadline(&self, old: Duration, now: Duration, seconds: i64) -> Duration {
        policy::deadline(old, now, seconds)
    }
    fn cancels(&self, reached_runtime: bool, begins: bool, shortened: bool) -> bool {
        policy::cancels(reached_runtime, begins, shortened)
    }
    fn next_phase(&self, phase: WorkerPhase) -> WorkerPhase {
        policy::next_phase(phase)
    }
    fn holds_name(&self, phase: WorkerPhase) -> bool {
        policy::holds_name(phase)
    }
    fn is_orphan(&self, desired: &BTreeSet<PodUid>, uid: &PodUid) -> bool {
        policy::is_orphan(desired, uid)
    }
    fn restored(&self, termination: Option<Termination>, now: Duration) -> Option<Termination> {
        policy::restored(termination, now)
    }
    fn is_newer(&self, observed: Duration, acted: Duration) -> bool {
        policy::is_newer(observed, acted)
    }
    fn knows(&self, ids: &[String], made: &[String]) -> bool {
        policy::knows(ids, made)
    }
    fn wait(&self, outcome: WorkOutcome, interruptions: u32, resync: Duration, chance: f64) -> Duration {
        policy::wait(outcome, interruptions, resync, chance)
    }
}

/// The policy of the product.
pub(in super::super) struct Sound;

impl Policy for Sound {}

thread_local! {
    static ACTIVE: Cell<&'static dyn Policy> = const { Cell::new(&Sound) };
}

/// Executes `act` with another policy on this thread.
pub(in super::super) fn with<T>(policy: &'static dyn Policy, act: impl FnOnce() -> T) -> T {
    let previous = ACTIVE.replace(policy);
    let done = act();
    ACTIVE.set(previous);
    done
}

pub(in super::super) fn may_start(
    uid: &PodUid,
    started: Option<&PodUid>,
    name_queue: &[FullNameWaiter],
) -> bool {
    ACTIVE.get().may_start(uid, started, name_queue)
}

pub(in super::super) fn may_take(busy: bool) -> bool {
    ACTIVE.get().may_take(busy)
}

pub(in super::super) fn grace(stored: i64, pod: PodGrace, wanted: Option<i64>) -> EffectiveGrace {
    ACTIVE.get().grace(stored, pod, wanted)
}

pub(in super::super) fn deadline(old: Duration, now: Duration, seconds: i64) -> Duration {
    ACTIVE.get().deadline(old, now, seconds)
}

pub(in super::super) fn cancels(reached_runtime: bool, begins: bool, shortened: bool) -> bool {
    ACTIVE.get().cancels(reached_runtime, begins, shortened)
}

pub(in super::super) fn next_phase(phase: WorkerPhase) -> WorkerPhase {
    ACTIVE.get().next_phase(phase)
}

pub(in super::super) fn holds_name(phase: WorkerPhase) -> bool {
    ACTIVE.get().holds_name(phase)
}

pub(in super::super) fn is_orphan(desired: &BTreeSet<PodUid>, uid: &PodUid) -> bool {
    ACTIVE.get().is_orphan(desired, uid)
}

pub(in super::super) fn restored(termination: Option<Termination>, now: Duration) -> Option<Termination> {
    ACTIVE.get().restored(termination, now)
}

pub(in super::super) fn is_newer(observed: Duration, acted: Duration) -> bool {
    ACTIVE.get().is_newer(observed, acted)
}

pub(in super::super) fn knows(ids: &[String], made: &[String]) -> bool {
    ACTIVE.get().knows(ids, made)
}

pub(in super::super) fn wait(
    outcome: WorkOutcome,
    interruptions: u32,
    resync: Duration,
    chance: f64,
) -> Duration {
    ACTIVE.get().wait(outcome, interruptions, resync, chance)
}
