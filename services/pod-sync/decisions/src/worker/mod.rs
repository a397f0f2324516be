//! Decides the next work of each pod worker with one pure transition function, [`PodSyncStatuses::step`] (`pkg/kubelet: podWorkers`).
//!
//! State and input give state and [`Effect`]s; time and chance are arguments. The driver (`worker`, `table`) tells what
//! happened and carries the effects out, nothing else. Each line of the table that was taken is named by a [`Rule`].
//!
//! A worker asks for work by [`Input::TakeWork`], says where its cancellation ends by [`Input::RuntimeReached`], and how the work went
//! by [`Input::Done`]. The judgements inside are methods of [`Judge`], so that a test can plant a wrong one.

pub mod freshness;
mod full_name_queue;
mod predicates;
mod step;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use quintlet_model::ids::PodUid;
use quintlet_model::pod as pods;
use serde::{Deserialize, Serialize};

use super::grace::{self, EffectiveGrace, PodGrace};
use super::status::KillOverride;
use super::sync::{FullNameWaiter, static_pod_may_start};
use full_name_queue::FullNameQueue;

/// After a call that was cut: look again soon, then less often. What it waits for wakes it when it is back.
const INTERRUPTED_FIRST_WAIT: Duration = Duration::from_millis(100);
const INTERRUPTED_LONGEST_WAIT: Duration = Duration::from_secs(1);
/// After an error of this pod (pkg/kubelet/pod_workers.go), with jitter up to half of it.
const ERROR_WAIT: Duration = Duration::from_secs(10);
/// While the network is away.
const NETWORK_WAIT: Duration = Duration::from_secs(1);
/// While another static pod has its name. It is woken when the name is free.
const NAME_WAIT: Duration = Duration::from_secs(10);
/// Grace of a pod of which only the runtime knows, seconds.
const ORPHAN_GRACE: i64 = 1;

/// Why a pod must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TerminationCause {
    /// `metadata.deletionTimestamp` is set.
    Deleted,
    /// Its source no longer has it, or never had it.
    Removed,
    /// Its containers came to their end, or admission refused it.
    Completed,
    /// The node evicted it.
    Evicted,
}

/// What a decision needs of a pod. Nothing of its content is kept.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodFacts {
    /// Name and namespace in one.
    pub full_name: String,
    /// From a manifest.
    pub is_static: bool,
    /// `metadata.deletionTimestamp` is set.
    pub deleted: bool,
    /// Its grace periods.
    pub grace: PodGrace,
    /// The API server says that it is over.
    pub terminal: bool,
}

impl PodFacts {
    /// Reads a pod.
    #[must_use]
    pub fn of(pod: &Pod, full_name: String) -> Self {
        let is_static = pods::is_static(pod);
        let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
        Self {
            full_name,
            is_static,
            deleted: pod.metadata.deletion_timestamp.is_some(),
            grace: PodGrace::of_pod(pod),
            // What a manifest says of a status is not the API server's word.
            terminal: !is_static && pods::is_terminal_phase(phase),
        }
    }
}

/// An end that began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Termination {
    /// Why.
    pub cause: TerminationCause,
    /// Effective grace, seconds; it can only shrink.
    pub grace_seconds: i64,
    /// CLOCK_BOOTTIME at which the grace is over; it can only come sooner.
    pub deadline: Duration,
    /// CLOCK_BOOTTIME at which it began.
    pub since: Duration,
    /// Containers have stopped; what is left is volumes, cgroup and status.
    pub stopped: bool,
    /// Nothing is left but the final status.
    pub finished: bool,
    /// What the status says, where the node killed it.
    pub killed_as: Option<KillOverride>,
}

/// How far a pod is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkerPhase {
    /// It is to run.
    Sync,
    /// Its containers are to stop.
    Terminating,
    /// They have stopped; volumes and cgroup are to go.
    Terminated,
    /// Nothing is left but the object and the records.
    Finished,
}

impl WorkerPhase {
    /// As `podsync.v1` names it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sync => "sync",
            Self::Terminating => "terminating",
            Self::Terminated => "terminated",
            Self::Finished => "finished",
        }
    }

    /// Of a pod with this end.
    #[must_use]
    pub fn of(termination: Option<&Termination>) -> Self {
        match termination {
            None => Self::Sync,
            Some(e) if e.finished => Self::Finished,
            Some(e) if e.stopped => Self::Terminated,
            Some(_) => Self::Terminating,
        }
    }
}

/// What a worker is to do now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// Nothing: another static pod has its name.
    WaitForFullName {
        /// Who has it, or is before it in line.
        other: Option<PodUid>,
    },
    /// Make it run.
    Sync,
    /// Stop its containers.
    Terminating,
    /// Take down volumes and cgroup, say the last status.
    Terminated,
    /// Wait until nobody wants its remains any more, then remove them.
    Finished {
        /// Nobody does: its source does not have it, or has it anew.
        clean: bool,
    },
}

/// How a piece of work went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Done, and the next phase comes: the pod is over, has stopped, is taken down, or is gone.
    Advance,
    /// Something was done: look again at once.
    Requeue,
    /// Nothing to do; look again after so long, or after the resync period.
    Idle(Option<Duration>),
    /// The network is away.
    NetworkNotReady,
    /// Something about this pod failed; tried again after so long, or after the default.
    Failed(Option<Duration>),
    /// A call was cut or could not be made; nothing is known.
    Interrupted,
    /// It ended early because something changed.
    Cancelled,
}

/// Kind of an update.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SyncPodType {
    /// The pod is new in its source.
    Create,
    /// It changed, or is to be looked at.
    Update,
    /// The node wants it to end.
    Kill(KillPodOptions),
}

/// How the node ends a pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KillPodOptions {
    /// It is an eviction: its containers go at once when they have stopped.
    pub evict: bool,
    /// Seconds, instead of the pod's own where less.
    pub grace: Option<i64>,
    /// Who waits until its containers have stopped.
    pub waiter: Option<u64>,
    /// What its status says. The last one said counts.
    pub killed_as: Option<KillOverride>,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// The source, or the node, says something of a pod.
    Update {
        /// UID.
        uid: PodUid,
        /// The pod.
        facts: PodFacts,
        /// What kind.
        kind: SyncPodType,
        /// The runtime has no ready sandbox and no running container of it.
        quiet: bool,
    },
    /// Its source no longer has it.
    Remove(PodUid),
    /// Admission refused it.
    Reject(PodUid),
    /// The runtime has a pod of ours that no source names.
    Orphan {
        /// UID.
        uid: PodUid,
        /// Name and namespace in one.
        full_name: String,
    },
    /// An earlier run left a record.
    Restore {
        /// UID.
        uid: PodUid,
        /// The pod.
        facts: PodFacts,
        /// Its end, if it began.
        termination: Option<Termination>,
        /// It had begun to run, and has its name.
        started: bool,
    },
    /// Every source has spoken, and these are all they want.
    SyncKnownPods(BTreeSet<PodUid>),
    /// Its worker asks what to do.
    TakeWork(PodUid),
    /// Its worker reached the runtime: the sync in flight goes on to its end.
    RuntimeReached(PodUid),
    /// Its worker is done with what it took.
    Done {
        /// UID.
        uid: PodUid,
        /// How it went.
        outcome: Outcome,
    },
    /// Its worker ended without having been told to.
    WorkerExited(PodUid),
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Make a worker.
    Spawn(PodUid),
    /// Its worker is to ask for work, or to ask again when it is done with what it has.
    Wake(PodUid),
    /// The sync in flight is to end where it has not reached the runtime, the stop in flight is to be asked for anew.
    Cancel(PodUid),
    /// The answer to [`Input::TakeWork`].
    Work(PodUid, Work),
    /// Ask again after so long; at once for zero.
    Wait(PodUid, Duration),
    /// Its containers have stopped; these waited for it.
    NotifyStopped(PodUid, Vec<u64>),
    /// Its worker ends, nothing is known of it any more.
    Forget(PodUid),
    /// Its source has it anew under the same UID: it is to be added again.
    Restart(PodUid),
}

/// A line of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "each name is the sentence")]
pub enum Rule {
    Created,
    CreatedAlreadyTerminal,
    CreatedTerminating,
    CreateWhileTerminatingRequestsRestart,
    UpdateOfFinishedIgnored,
    UpdateWhileRunning,
    TerminatesOnDeletion,
    TerminatesOnTerminalPhase,
    TerminatesOnKill,
    TerminatesOnEviction,
    KillOfStoppedAnsweredAtOnce,
    KillWhileTerminatingJoins,
    GraceShortened,
    GraceKept,
    SyncCancelled,
    SyncNotCancellable,
    StopInterruptedByShorterGrace,
    TerminatesOnRemove,
    RemoveWhileTerminating,
    RemoveOfUnknown,
    Rejected,
    OrphanOfUnknown,
    TerminatesKnownOrphan,
    OrphanAgain,
    RestoredRunning,
    RestoredTerminating,
    RestoredWaitingForName,
    SyncKeepsDesired,
    SyncForgetsNeverStarted,
    SyncTerminatesOrphan,
    SyncOfTerminatingOrphan,
    SyncReleasesFinished,
    TakeOfUnknown,
    TakeWhileBusy,
    TakeStartsPod,
    TakeStartsStatic,
    TakeNameHeld,
    TakeNeverStarted,
    TakeSync,
    TakeTerminating,
    TakeTerminated,
    TakeFinished,
    TakeFinishedClean,
    RuntimeReached,
    SyncCompleted,
    ContainersStopped,
    OrphanStopped,
    PodTornDown,
    NameFreed,
    PodForgotten,
    PodForgottenAndRestarted,
    DoneRequeue,
    DoneIdle,
    DoneNetwork,
    DoneFailed,
    DoneInterrupted,
    DoneCancelled,
    DoneSuperseded,
    DoneOfUnknown,
    ExitedWorkerReplaced,
}

#[cfg(test)]
impl Rule {
    const ALL: [Self; 60] = [
        Self::Created,
        Self::CreatedAlreadyTerminal,
        Self::CreatedTerminating,
        Self::CreateWhileTerminatingRequestsRestart,
        Self::UpdateOfFinishedIgnored,
        Self::UpdateWhileRunning,
        Self::TerminatesOnDeletion,
        Self::TerminatesOnTerminalPhase,
        Self::TerminatesOnKill,
        Self::TerminatesOnEviction,
        Self::KillOfStoppedAnsweredAtOnce,
        Self::KillWhileTerminatingJoins,
        Self::GraceShortened,
        Self::GraceKept,
        Self::SyncCancelled,
        Self::SyncNotCancellable,
        Self::StopInterruptedByShorterGrace,
        Self::TerminatesOnRemove,
        Self::RemoveWhileTerminating,
        Self::RemoveOfUnknown,
        Self::Rejected,
        Self::OrphanOfUnknown,
        Self::TerminatesKnownOrphan,
        Self::OrphanAgain,
        Self::RestoredRunning,
        Self::RestoredTerminating,
        Self::RestoredWaitingForName,
        Self::SyncKeepsDesired,
        Self::SyncForgetsNeverStarted,
        Self::SyncTerminatesOrphan,
        Self::SyncOfTerminatingOrphan,
        Self::SyncReleasesFinished,
        Self::TakeOfUnknown,
        Self::TakeWhileBusy,
        Self::TakeStartsPod,
        Self::TakeStartsStatic,
        Self::TakeNameHeld,
        Self::TakeNeverStarted,
        Self::TakeSync,
        Self::TakeTerminating,
        Self::TakeTerminated,
        Self::TakeFinished,
        Self::TakeFinishedClean,
        Self::RuntimeReached,
        Self::SyncCompleted,
        Self::ContainersStopped,
        Self::OrphanStopped,
        Self::PodTornDown,
        Self::NameFreed,
        Self::PodForgotten,
        Self::PodForgottenAndRestarted,
        Self::DoneRequeue,
        Self::DoneIdle,
        Self::DoneNetwork,
        Self::DoneFailed,
        Self::DoneInterrupted,
        Self::DoneCancelled,
        Self::DoneSuperseded,
        Self::DoneOfUnknown,
        Self::ExitedWorkerReplaced,
    ];
}

/// What a step did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Step {
    /// In order.
    pub effects: Vec<Effect>,
    /// Lines of the table that were taken.
    pub rules: Vec<Rule>,
}

/// The judgements within the table. The defaults are the product's; tests plant wrong ones.
pub trait Judge {
    /// A static pod may start.
    fn may_start(&self, uid: &PodUid, started: Option<&PodUid>, name_queue: &[FullNameWaiter]) -> bool {
        static_pod_may_start(uid, started, name_queue)
    }

    /// A worker may take work beside what it has.
    fn may_take(&self, busy: bool) -> bool {
        !busy
    }

    /// The effective grace.
    fn grace(&self, stored: i64, pod: PodGrace, wanted: Option<i64>) -> EffectiveGrace {
        grace::effective_grace(stored, pod, wanted)
    }

    /// The end of a grace that was shortened.
    fn deadline(&self, old: Duration, now: Duration, seconds: i64) -> Duration {
        old.min(now.saturating_add(Duration::from_secs(u64::try_from(seconds).unwrap_or(1))))
    }

    /// The sync in flight is cancelled.
    fn cancels(&self, reached_runtime: bool, begins: bool, shortened: bool) -> bool {
        !reached_runtime && (begins || shortened)
    }

    /// The phase after work that came to its end.
    fn next_phase(&self, phase: WorkerPhase) -> WorkerPhase {
        match phase {
            WorkerPhase::Sync => WorkerPhase::Terminating,
            WorkerPhase::Terminating => WorkerPhase::Terminated,
            WorkerPhase::Terminated | WorkerPhase::Finished => WorkerPhase::Finished,
        }
    }

    /// In this phase a pod still has its name.
    fn holds_name(&self, phase: WorkerPhase) -> bool {
        phase < WorkerPhase::Finished
    }

    /// A pod that no source names is to end.
    fn is_orphan(&self, desired: &BTreeSet<PodUid>, uid: &PodUid) -> bool {
        !desired.contains(uid)
    }

    /// What is made of the end an earlier run had begun.
    fn restored(&self, termination: Option<Termination>, _now: Duration) -> Option<Termination> {
        termination
    }

    /// A look that began then is newer than the last action.
    fn is_newer(&self, observed: Duration, acted: Duration) -> bool {
        observed > acted
    }

    /// A look knows of all that was made since the last.
    fn knows(&self, ids: &[String], made: &[String]) -> bool {
        made.iter().all(|m| ids.contains(m))
    }

    /// How long to wait after an outcome. `interruptions`: that many in a row before it.
    fn wait(&self, outcome: Outcome, interruptions: u32, resync: Duration, chance: f64) -> Duration {
        match outcome {
            Outcome::Advance | Outcome::Requeue => Duration::ZERO,
            Outcome::Idle(within) => {
                let resync = jitter(resync, chance);
                within.map_or(resync, |w| w.min(resync))
            }
            Outcome::NetworkNotReady => jitter(NETWORK_WAIT, chance),
            Outcome::Failed(after) => after.unwrap_or_else(|| jitter(ERROR_WAIT, chance)),
            Outcome::Interrupted => INTERRUPTED_FIRST_WAIT
                .saturating_mul(2_u32.saturating_pow(interruptions))
                .min(INTERRUPTED_LONGEST_WAIT),
            // Where nothing came after all it is as an error.
            Outcome::Cancelled => jitter(ERROR_WAIT, chance),
        }
    }
}

/// The product's judgement.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sound;

impl Judge for Sound {}

/// `d` and up to half of it more, so that pods that failed together do not come back together. `chance` is in `[0, 1)`.
#[must_use]
pub fn jitter(d: Duration, chance: f64) -> Duration {
    d.saturating_add(d.mul_f64(chance * 0.5))
}

/// What a worker has taken.
#[derive(Debug, Clone, PartialEq, Eq)]
struct InFlightWork {
    phase: WorkerPhase,
    // Only a sync that has not reached the runtime is cancelled.
    cancellable: bool,
}

/// One pod.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PodSyncStatus {
    facts: PodFacts,
    termination: Option<Termination>,
    // It began to run, or to end; a static pod has its name then.
    started: bool,
    // Only the runtime knows of it.
    runtime_only: bool,
    // It was seen in the runtime while no source named it.
    observed: bool,
    // Its termination was taken up by its worker.
    acknowledged: bool,
    evicted: bool,
    deleted: bool,
    removed: bool,
    restart_requested: bool,
    busy: Option<InFlightWork>,
    // Something came while it was busy.
    superseded: bool,
    interruptions: u32,
    waiters: Vec<u64>,
}

impl PodSyncStatus {
    fn new(facts: PodFacts) -> Self {
        Self {
            facts,
            termination: None,
            started: false,
            runtime_only: false,
            observed: false,
            acknowledged: false,
            evicted: false,
            deleted: false,
            removed: false,
            restart_requested: false,
            busy: None,
            superseded: false,
            interruptions: 0,
            waiters: Vec::new(),
        }
    }

    fn phase(&self) -> WorkerPhase {
        WorkerPhase::of(self.termination.as_ref())
    }
}

/// The workers of all pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSyncStatuses {
    resync: Duration,
    pods: BTreeMap<PodUid, PodSyncStatus>,
    name_queue: FullNameQueue,
    synced: bool,
}
