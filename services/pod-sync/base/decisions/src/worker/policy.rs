//! The conditions of the transitions.

use std::collections::BTreeSet;
use std::time::Duration;

use quintlet_model::ids::PodUid;

use super::{Termination, WorkOutcome, WorkerPhase, jitter};
use crate::grace::{self, EffectiveGrace, PodGrace};
use crate::sync::{FullNameWaiter, static_pod_may_start};

/// Waits after an interrupted call. The return of the peer wakes the worker earlier.
const INTERRUPTED_FIRST_WAIT: Duration = Duration::from_millis(100);
const INTERRUPTED_LONGEST_WAIT: Duration = Duration::from_secs(1);
/// Wait after an error of the pod (`pkg/kubelet: podWorkers.completeWork`), with jitter of up to half of it.
const ERROR_WAIT: Duration = Duration::from_secs(10);
/// Wait while the network is not ready.
const NETWORK_WAIT: Duration = Duration::from_secs(1);

/// Returns whether a static pod may start.
pub(super) fn may_start(uid: &PodUid, started: Option<&PodUid>, name_queue: &[FullNameWaiter]) -> bool {
    static_pod_may_start(uid, started, name_queue)
}

/// Returns whether a worker may take work.
pub(super) fn may_take(busy: bool) -> bool {
    !busy
}

/// Returns the effective grace period.
pub(super) fn grace(stored: i64, pod: PodGrace, wanted: Option<i64>) -> EffectiveGrace {
    grace::effective_grace(stored, pod, wanted)
}

/// Returns the deadline of a grace period that was shortened.
pub(super) fn deadline(old: Duration, now: Duration, seconds: i64) -> Duration {
    old.min(now.saturating_add(Duration::from_secs(u64::try_from(seconds).unwrap_or(1))))
}

/// Returns whether the sync in progress is cancelled.
pub(super) fn cancels(reached_runtime: bool, begins: bool, shortened: bool) -> bool {
    !reached_runtime && (begins || shortened)
}

/// Returns the phase after completed work.
pub(super) fn next_phase(phase: WorkerPhase) -> WorkerPhase {
    match phase {
        WorkerPhase::Sync => WorkerPhase::Terminating,
        WorkerPhase::Terminating => WorkerPhase::Terminated,
        WorkerPhase::Terminated | WorkerPhase::Finished => WorkerPhase::Finished,
    }
}

/// Returns whether a pod in this phase holds its full name.
pub(super) fn holds_name(phase: WorkerPhase) -> bool {
    phase < WorkerPhase::Finished
}

/// Returns whether a pod is not desired.
pub(super) fn is_orphan(desired: &BTreeSet<PodUid>, uid: &PodUid) -> bool {
    !desired.contains(uid)
}

/// Returns the termination to restore from a record.
pub(super) fn restored(termination: Option<Termination>, _now: Duration) -> Option<Termination> {
    termination
}

/// Returns whether an inspection that began at `observed` is newer than the last action.
pub(super) fn is_newer(observed: Duration, acted: Duration) -> bool {
    observed > acted
}

/// Returns whether an inspection has all IDs that were created since the last one.
pub(super) fn knows(ids: &[String], made: &[String]) -> bool {
    made.iter().all(|m| ids.contains(m))
}

/// Returns the wait after an outcome. `interruptions`: number of interrupted passes in a row before it.
pub(super) fn wait(outcome: WorkOutcome, interruptions: u32, resync: Duration, chance: f64) -> Duration {
    match outcome {
        WorkOutcome::Advance | WorkOutcome::Requeue => Duration::ZERO,
        WorkOutcome::Idle(within) => {
            let resync = jitter(resync, chance);
            within.map_or(resync, |w| w.min(resync))
        }
        WorkOutcome::NetworkNotReady => jitter(NETWORK_WAIT, chance),
        WorkOutcome::Failed(after) => after.unwrap_or_else(|| jitter(ERROR_WAIT, chance)),
        WorkOutcome::Interrupted => INTERRUPTED_FIRST_WAIT
            .saturating_mul(2_u32.saturating_pow(interruptions))
            .min(INTERRUPTED_LONGEST_WAIT),
        // If no change follows, a cancelled pass is retried like a failed one.
        WorkOutcome::Cancelled => jitter(ERROR_WAIT, chance),
    }
}
