//! Predicates about a pod's worker (`pkg/kubelet: podWorkers.ShouldPodContainersBeTerminating` and others). For an unknown UID the
//! answer changes once every source is ready: before that, a running pod may still turn out to be desired.

use quintlet_model::ids::PodUid;

use super::{PodSyncStatus, PodSyncStatuses, Termination, WorkerPhase};

impl PodSyncStatuses {
    fn ask(&self, uid: &PodUid, before: bool, after: bool, known: impl Fn(&PodSyncStatus) -> bool) -> bool {
        self.pods.get(uid).map_or(if self.synced { after } else { before }, known)
    }

    /// Its containers have stopped, and it does not run again.
    #[must_use]
    pub fn is_known_terminated(&self, uid: &PodUid) -> bool {
        self.ask(uid, false, false, |s| s.phase() >= WorkerPhase::Terminated)
    }

    /// Containers of it may run.
    #[must_use]
    pub fn could_have_running_containers(&self, uid: &PodUid) -> bool {
        self.ask(uid, true, false, |s| s.phase() < WorkerPhase::Terminated)
    }

    /// Nothing of it is left to be done.
    #[must_use]
    pub fn should_be_finished(&self, uid: &PodUid) -> bool {
        self.ask(uid, false, true, |s| s.phase() == WorkerPhase::Finished)
    }

    /// It is to end.
    #[must_use]
    pub fn is_termination_requested(&self, uid: &PodUid) -> bool {
        self.ask(uid, false, false, |s| s.termination.is_some())
    }

    /// Its worker took the termination up.
    #[must_use]
    pub fn should_containers_be_terminating(&self, uid: &PodUid) -> bool {
        self.ask(uid, false, true, |s| s.acknowledged)
    }

    /// Its sandboxes and dead containers may go.
    #[must_use]
    pub fn should_runtime_be_removed(&self, uid: &PodUid) -> bool {
        self.ask(uid, false, true, |s| s.phase() >= WorkerPhase::Terminated)
    }

    /// Its logs and dead containers are of no use to anybody.
    #[must_use]
    pub fn should_content_be_removed(&self, uid: &PodUid) -> bool {
        self.ask(uid, false, true, |s| s.evicted || (s.deleted && s.phase() >= WorkerPhase::Terminated))
    }

    /// The static pod of this name is on its way out: its mirror stays until it is.
    #[must_use]
    pub fn is_static_terminating(&self, full_name: &str) -> bool {
        self.name_queue
            .holder(full_name)
            .and_then(|uid| self.pods.get(uid))
            .is_some_and(|s| s.phase() == WorkerPhase::Terminating)
    }

    /// There is a worker for it.
    #[must_use]
    pub fn is_known(&self, uid: &PodUid) -> bool {
        self.pods.contains_key(uid)
    }

    /// Its end, once it began.
    #[must_use]
    pub fn termination(&self, uid: &PodUid) -> Option<&Termination> {
        self.pods.get(uid)?.termination.as_ref()
    }

    /// It ends, and its source has the same UID anew.
    #[must_use]
    pub fn is_restart_requested(&self, uid: &PodUid) -> bool {
        self.pods.get(uid).is_some_and(|s| s.restart_requested)
    }

    /// It began to run, or to end.
    #[must_use]
    pub fn is_started(&self, uid: &PodUid) -> bool {
        self.pods.get(uid).is_some_and(|s| s.started)
    }

    /// Its source no longer has it.
    #[must_use]
    pub fn is_removed(&self, uid: &PodUid) -> bool {
        self.pods.get(uid).is_some_and(|s| s.removed)
    }
}
