//! Predicates about a pod's worker (`pkg/kubelet: podWorkers.ShouldPodBeFinished` and others).

use quintlet_model::ids::PodUid;

use super::{PodSyncStatus, PodSyncStatuses, SourceState, Termination, WorkerPhase};

impl PodSyncStatuses {
    fn is(&self, uid: &PodUid, predicate: impl Fn(&PodSyncStatus) -> bool) -> bool {
        self.pods.get(uid).is_some_and(predicate)
    }

    /// Returns whether its containers have stopped for good (`IsPodKnownTerminated`).
    #[must_use]
    pub fn is_known_terminated(&self, uid: &PodUid) -> bool {
        self.is(uid, |s| s.phase() >= WorkerPhase::Terminated)
    }

    /// Returns whether nothing is left to do (`ShouldPodBeFinished`). An unknown pod counts once every source
    /// is ready: before that, it may still turn out to be desired.
    #[must_use]
    pub fn should_be_finished(&self, uid: &PodUid) -> bool {
        self.pods.get(uid).map_or(self.synced, |s| s.phase() == WorkerPhase::Finished)
    }

    /// Returns whether its termination was requested (`IsPodTerminationRequested`).
    #[must_use]
    pub fn is_termination_requested(&self, uid: &PodUid) -> bool {
        self.is(uid, |s| s.termination.is_some())
    }

    /// Returns whether the static pod with this full name is terminating. Its mirror pod stays until it has
    /// terminated (`IsPodForMirrorPodTerminatingByFullName`).
    #[must_use]
    pub fn is_static_terminating(&self, full_name: &str) -> bool {
        self.name_queue
            .holder(full_name)
            .and_then(|uid| self.pods.get(uid))
            .is_some_and(|s| s.phase() == WorkerPhase::Terminating)
    }

    /// Returns whether it has a worker.
    #[must_use]
    pub fn is_known(&self, uid: &PodUid) -> bool {
        self.pods.contains_key(uid)
    }

    /// Returns its termination, if it has begun.
    #[must_use]
    pub fn termination(&self, uid: &PodUid) -> Option<&Termination> {
        self.pods.get(uid)?.termination.as_ref()
    }

    /// Returns whether its source added a pod with the same UID during the termination.
    #[must_use]
    pub fn is_restart_requested(&self, uid: &PodUid) -> bool {
        self.pods.get(uid).is_some_and(|s| matches!(s.source, SourceState::AddedAgain { .. }))
    }

    /// Returns whether it started to run or to terminate.
    #[must_use]
    pub fn is_started(&self, uid: &PodUid) -> bool {
        self.pods.get(uid).is_some_and(|s| s.started)
    }
}
