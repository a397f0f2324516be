//! Predicates about a pod's worker (`pkg/kubelet: podWorkers.ShouldPodContainersBeTerminating` and others).
//! For an unknown UID the answer changes once every source is ready: before that, a running pod may still
//! turn out to be desired.

use quintlet_model::ids::PodUid;

use super::{
    ContentRemoval, PodSyncStatus, PodSyncStatuses, SourceState, Termination, TerminationProgress,
    WorkerPhase,
};

impl PodSyncStatuses {
    fn ask(&self, uid: &PodUid, before: bool, after: bool, known: impl Fn(&PodSyncStatus) -> bool) -> bool {
        self.pods.get(uid).map_or(if self.synced { after } else { before }, known)
    }

    /// Returns whether its containers have stopped for good (`IsPodKnownTerminated`).
    #[must_use]
    pub fn is_known_terminated(&self, uid: &PodUid) -> bool {
        self.ask(uid, false, false, |s| s.phase() >= WorkerPhase::Terminated)
    }

    /// Returns whether its containers may run (`CouldHaveRunningContainers`).
    #[must_use]
    pub fn could_have_running_containers(&self, uid: &PodUid) -> bool {
        self.ask(uid, true, false, |s| s.phase() < WorkerPhase::Terminated)
    }

    /// Returns whether nothing is left to do (`ShouldPodBeFinished`).
    #[must_use]
    pub fn should_be_finished(&self, uid: &PodUid) -> bool {
        self.ask(uid, false, true, |s| s.phase() == WorkerPhase::Finished)
    }

    /// Returns whether its termination was requested (`IsPodTerminationRequested`).
    #[must_use]
    pub fn is_termination_requested(&self, uid: &PodUid) -> bool {
        self.ask(uid, false, false, |s| s.termination.is_some())
    }

    /// Returns whether its worker has taken up the termination (`ShouldPodContainersBeTerminating`).
    #[must_use]
    pub fn should_containers_be_terminating(&self, uid: &PodUid) -> bool {
        self.ask(uid, false, true, |s| {
            s.termination.as_ref().is_some_and(|t| t.progress > TerminationProgress::Requested)
        })
    }

    /// Returns whether its sandboxes and dead containers may be removed (`ShouldPodRuntimeBeRemoved`).
    #[must_use]
    pub fn should_runtime_be_removed(&self, uid: &PodUid) -> bool {
        self.ask(uid, false, true, |s| s.phase() >= WorkerPhase::Terminated)
    }

    /// Returns whether its logs and dead containers may be removed (`ShouldPodContentBeRemoved`).
    #[must_use]
    pub fn should_content_be_removed(&self, uid: &PodUid) -> bool {
        self.ask(uid, false, true, |s| match s.content {
            ContentRemoval::Never => false,
            ContentRemoval::OnceTerminated => s.phase() >= WorkerPhase::Terminated,
            ContentRemoval::AtOnce => true,
        })
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
