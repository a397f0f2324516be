//! Decides the next work of each pod worker (`pkg/kubelet: podWorkers`) with one pure transition function,
//! [`PodSyncStatuses::step`].
//!
//! State and [`Input`] give a new state and [`Effect`]s; time and randomness are arguments. The caller
//! (`pod_workers` of pod-sync-worker) reports inputs and executes the effects. Each transition that a step
//! takes is named by a [`Rule`].
//!
//! A worker asks for work with [`Input::TakeWork`], reports with [`Input::RuntimeReached`] that its sync can
//! no longer be cancelled, and reports the outcome with [`Input::Done`]. The conditions inside are functions
//! of `policy`, which unit tests replace with faulty ones.

pub mod freshness;
mod full_name_queue;
mod policy;
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

use super::grace::PodGrace;
use super::status::KillOverride;
use super::sync::FullNameWaiter;
use full_name_queue::FullNameQueue;

/// Wait while another static pod has the full name. The worker is woken when the name is free.
const NAME_WAIT: Duration = Duration::from_secs(10);
/// Grace period of a pod that only the runtime has, in seconds.
const ORPHAN_GRACE: i64 = 1;

/// Reason why a pod is terminated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TerminationCause {
    /// `metadata.deletionTimestamp` is set.
    Deleted,
    /// No source has the pod.
    Removed,
    /// The pod's phase became terminal, or admission rejected the pod.
    Completed,
    /// The node agent evicts the pod: pressure of the node, a limit of local storage, or preemption.
    Evicted,
}

/// The facts about a pod that transitions depend on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodFacts {
    /// `<name>_<namespace>`.
    pub full_name: String,
    /// Whether the pod is static.
    pub is_static: bool,
    /// Whether `metadata.deletionTimestamp` is set.
    pub deleted: bool,
    /// Grace periods of the object.
    pub grace: PodGrace,
    /// Whether the pod's phase in the API server is terminal.
    pub terminal: bool,
}

impl PodFacts {
    /// Reads the facts from an object of a source. `full_name` is `<name>_<namespace>`.
    #[must_use]
    pub fn of(pod: &Pod, full_name: String) -> Self {
        let is_static = pods::is_static(pod);
        let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
        Self {
            full_name,
            is_static,
            deleted: pod.metadata.deletion_timestamp.is_some(),
            grace: PodGrace::of_pod(pod),
            // A status in a manifest is not that of the API server.
            terminal: !is_static && pods::is_terminal_phase(phase),
        }
    }
}

/// A termination in progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Termination {
    /// The cause that was first; later ones do not replace it.
    pub cause: TerminationCause,
    /// Effective grace period, in seconds; it can only shrink.
    pub grace_seconds: i64,
    /// CLOCK_BOOTTIME at which the grace period ends; it can only move earlier.
    pub deadline: Duration,
    /// CLOCK_BOOTTIME at which the termination began.
    pub since: Duration,
    /// How far the termination has come.
    pub progress: TerminationProgress,
    /// Overrides of the status, if the node agent terminates the pod.
    pub killed_as: Option<KillOverride>,
}

/// How far a termination has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TerminationProgress {
    /// The worker has not taken up the termination yet.
    Requested,
    /// The worker stops the containers.
    Stopping,
    /// The containers have stopped. Volumes, cgroup and the final status remain.
    Stopped,
    /// Only the object and the records remain.
    Finished,
}

/// State of a pod's worker (`pkg/kubelet: PodWorkerState`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkerPhase {
    /// The pod runs, or should run.
    Sync,
    /// The containers are being stopped.
    Terminating,
    /// The containers have stopped. Volumes, cgroup and the final status remain.
    Terminated,
    /// Only the object and the records remain.
    Finished,
}

impl WorkerPhase {
    /// Returns the name that `podsync.v1` uses.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sync => "sync",
            Self::Terminating => "terminating",
            Self::Terminated => "terminated",
            Self::Finished => "finished",
        }
    }

    /// Returns the phase of a pod with this termination.
    #[must_use]
    pub fn of(termination: Option<&Termination>) -> Self {
        match termination.map(|termination| termination.progress) {
            None => Self::Sync,
            Some(TerminationProgress::Requested | TerminationProgress::Stopping) => Self::Terminating,
            Some(TerminationProgress::Stopped) => Self::Terminated,
            Some(TerminationProgress::Finished) => Self::Finished,
        }
    }
}

/// Work for a pod worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// The pod waits: another static pod has the full name.
    WaitForFullName {
        /// The pod that has the name, or is before this one in the queue.
        other: Option<PodUid>,
    },
    /// `pkg/kubelet: SyncPod`.
    Sync,
    /// `pkg/kubelet: SyncTerminatingPod`.
    Terminating,
    /// `pkg/kubelet: SyncTerminatedPod`.
    Terminated,
    /// Wait until the pod is no longer desired, then remove its remains.
    Finished {
        /// The pod is no longer desired, or its source added it again.
        clean: bool,
    },
}

/// Outcome of a piece of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkOutcome {
    /// The phase is complete: the next phase follows, or the pod is forgotten.
    Advance,
    /// An action was executed: run again at once.
    Requeue,
    /// The worker runs again after this wait or the resync interval, whichever is shorter.
    Idle(Option<Duration>),
    /// The runtime reports that pods cannot have a network: the pod is retried soon.
    NetworkNotReady,
    /// The pod failed: retry after this wait, or after a default.
    Failed(Option<Duration>),
    /// A call was interrupted or could not be made; its effect is unknown.
    Interrupted,
    /// The work was cancelled because of a change.
    Cancelled,
}

/// Type of an update (`pkg/kubelet/types: SyncPodType`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SyncPodType {
    /// The source added the pod.
    Create,
    /// The pod changed, or is to be synced.
    Update,
    /// The node agent terminates the pod.
    Kill(KillPodOptions),
}

/// Parameters of the termination of a pod (`pkg/kubelet: KillPodOptions`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KillPodOptions {
    /// Whether the pod is evicted: its containers are removed once they have stopped.
    pub evict: bool,
    /// Grace period in seconds, if shorter than the pod's own.
    pub grace: Option<i64>,
    /// Number of the caller that waits until the containers have stopped.
    pub waiter: Option<u64>,
    /// Overrides of the status. The last one applies.
    pub killed_as: Option<KillOverride>,
}

/// An event for the workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// A source or the node agent updates a pod.
    Update {
        /// UID of the pod, which keys its worker.
        uid: PodUid,
        /// Facts of the object as it is now.
        facts: PodFacts,
        /// Kind of the update, with the parameters of a kill.
        kind: SyncPodType,
        /// The runtime has no ready sandbox and no running container of the pod.
        quiet: bool,
    },
    /// The pod's source no longer has it.
    Remove(PodUid),
    /// Admission rejected the pod.
    Reject(PodUid),
    /// The runtime has a pod of this node that no source has.
    Orphan {
        /// UID in the labels of the runtime's sandbox.
        uid: PodUid,
        /// `<name>_<namespace>`.
        full_name: String,
    },
    /// A record of a previous process.
    Restore {
        /// UID in the name of the record.
        uid: PodUid,
        /// Facts from the record.
        facts: PodFacts,
        /// The termination, if it had begun.
        termination: Option<Termination>,
        /// The pod had started, and holds its full name if it is static.
        started: bool,
    },
    /// Every source is ready, and these are all desired pods (`pkg/kubelet: SyncKnownPods`).
    SyncKnownPods(BTreeSet<PodUid>),
    /// The worker asks for work.
    TakeWork(PodUid),
    /// The worker's sync reached the runtime and is no longer cancelled.
    RuntimeReached(PodUid),
    /// The worker finished its work.
    Done {
        /// UID of the pod, which keys its worker.
        uid: PodUid,
        /// Result of the work.
        outcome: WorkOutcome,
    },
    /// The worker exited unexpectedly.
    WorkerExited(PodUid),
}

/// An effect for the caller to execute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Start a worker.
    Spawn(PodUid),
    /// Make the worker ask for work, now or after its current work.
    Wake(PodUid),
    /// Cancel a sync that has not reached the runtime, or make a worker issue its stops again.
    Cancel(PodUid),
    /// Answers [`Input::TakeWork`].
    Work(PodUid, Work),
    /// Ask for work after this time; at once if zero.
    Wait(PodUid, Duration),
    /// The containers have stopped: notify these callers.
    NotifyStopped(PodUid, Vec<u64>),
    /// The pod is forgotten and its worker exits.
    Forget(PodUid),
    /// The source added a pod with the same UID during the termination: add it now.
    Restart(PodUid),
}

/// A row of the table of transitions. Tests check that each one was applied.
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

/// Changes of the workers that one input caused.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WorkerTransition {
    /// Effects for the caller to execute, in order.
    pub effects: Vec<Effect>,
    /// Rules that were applied, in order.
    pub rules: Vec<Rule>,
}

/// Adds up to half of `d`, so that pods that failed together are not retried together. `chance` is in
/// `[0, 1)`.
#[must_use]
pub fn jitter(d: Duration, chance: f64) -> Duration {
    d.saturating_add(d.mul_f64(chance * 0.5))
}

/// Work that a worker has taken.
#[derive(Debug, Clone, PartialEq, Eq)]
struct InFlightWork {
    phase: WorkerPhase,
    // Only a sync that has not reached the runtime is cancelled.
    cancellable: bool,
    // An input arrived during this work.
    superseded: bool,
}

/// Whether the source has the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SourceState {
    Present,
    /// The source removed the pod, or never had it.
    Removed,
    /// The source added a pod with the same UID during the termination.
    AddedAgain {
        /// The source had removed the previous pod.
        was_removed: bool,
    },
}

impl SourceState {
    fn was_removed(self) -> bool {
        matches!(self, Self::Removed | Self::AddedAgain { was_removed: true })
    }
}

/// Whether housekeeping has found the pod in the runtime while no source had it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OrphanState {
    NotFound,
    /// Found, and the spec is known.
    Found,
    /// Found, and only the runtime has the pod: the spec is unknown.
    RuntimeOnly,
}

/// State of one pod (`pkg/kubelet: podSyncStatus`).
#[derive(Debug, Clone, PartialEq, Eq)]
struct PodSyncStatus {
    facts: PodFacts,
    termination: Option<Termination>,
    // It started to run or to terminate. A static pod then holds its full name.
    started: bool,
    orphan: OrphanState,
    source: SourceState,
    busy: Option<InFlightWork>,
    // Interrupted passes in a row.
    interruptions: u32,
    waiters: Vec<u64>,
}

impl PodSyncStatus {
    fn new(facts: PodFacts) -> Self {
        Self {
            facts,
            termination: None,
            started: false,
            orphan: OrphanState::NotFound,
            source: SourceState::Present,
            busy: None,
            interruptions: 0,
            waiters: Vec::new(),
        }
    }

    fn phase(&self) -> WorkerPhase {
        WorkerPhase::of(self.termination.as_ref())
    }

    fn is_runtime_only(&self) -> bool {
        self.orphan == OrphanState::RuntimeOnly
    }

    /// Sets the progress of the termination, if there is one.
    fn set_progress(&mut self, progress: TerminationProgress) {
        if let Some(termination) = self.termination.as_mut() {
            termination.progress = progress;
        }
    }
}

/// State of all pod workers (`pkg/kubelet: podWorkers.podSyncStatuses`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSyncStatuses {
    resync: Duration,
    pods: BTreeMap<PodUid, PodSyncStatus>,
    name_queue: FullNameQueue,
    synced: bool,
}
