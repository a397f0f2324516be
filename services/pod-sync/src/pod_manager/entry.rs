//! What the pod manager keeps of each pod, by UID.

use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_decisions::resize::allocation::PodResources;
use pod_sync_layout::SourceKind;
use quintlet_model::ids::PodUid;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use pod_sync_worker::context::Desired;

/// The worker of a pod.
#[derive(Debug)]
pub(super) struct WorkerHandle {
    /// The resources that the source asked for when they were last compared with the allocated ones.
    pub(super) desired_resources: PodResources,
    pub(super) desired: watch::Sender<Desired>,
    pub(super) task: JoinHandle<()>,
    pub(super) origin: WorkerOrigin,
}

impl WorkerHandle {
    /// The pod comes from a record of an earlier run or from the offline cache, and its source has not
    /// delivered a snapshot yet.
    pub(super) fn is_unconfirmed(&self) -> bool {
        match self.origin {
            WorkerOrigin::Record | WorkerOrigin::OfflineCache => true,
            WorkerOrigin::ConfirmedRecord | WorkerOrigin::Source => false,
        }
    }
}

/// The origin of the pod of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkerOrigin {
    /// A record of an earlier run.
    Record,
    /// The offline cache: the API server is away since the start.
    OfflineCache,
    /// A record or the offline cache, and the first snapshot of its source, which is being applied.
    ConfirmedRecord,
    /// A source that delivers pods in this run.
    Source,
}

/// A pod whose admission waits for the Node to be read again, or for the first status of the runtime.
#[derive(Debug)]
pub(super) struct PendingAdmission {
    pub(super) source: SourceKind,
    pub(super) pod: Arc<Pod>,
}

/// How far a pod has come.
#[derive(Debug, Default)]
enum Stage {
    /// No worker: the previous pod with this UID is terminating, the pod is set aside, or an orphan is being
    /// removed.
    #[default]
    WithoutWorker,
    /// Not admitted yet; admission is tried again.
    PendingAdmission(PendingAdmission),
    /// Admitted or rejected; the worker has the pod until nothing of it is left.
    Worker(WorkerHandle),
    /// A deleted pod of which nothing is left, and which the API server still has, because of a finalizer for
    /// example. Its changes have no effect (`pkg/kubelet: podWorkers.UpdatePod` of a pod that is finished).
    Ended,
}

/// The state of one pod UID in the pod manager.
#[derive(Debug, Default)]
pub(super) struct PodEntry {
    stage: Stage,
    /// Removes what an orphaned pod with this UID left on the node.
    pub(super) orphan_removal: Option<JoinHandle<()>>,
    /// The pod is set aside after a fault. Updates of this source are applied when that is over.
    pub(super) set_aside: Option<SourceKind>,
    /// The state machine of the workers knows the pod, but a fault came before its worker was made.
    pub(super) is_worker_missing: bool,
    /// The API server has a pod with this UID while the previous one terminates. It is added afterwards.
    /// Other pods of the API server without a worker have terminated; the watch may be behind.
    pub(super) is_restart_requested: bool,
}

impl PodEntry {
    pub(super) fn worker(&self) -> Option<&WorkerHandle> {
        match &self.stage {
            Stage::Worker(worker) => Some(worker),
            Stage::WithoutWorker | Stage::PendingAdmission(_) | Stage::Ended => None,
        }
    }

    fn worker_mut(&mut self) -> Option<&mut WorkerHandle> {
        match &mut self.stage {
            Stage::Worker(worker) => Some(worker),
            Stage::WithoutWorker | Stage::PendingAdmission(_) | Stage::Ended => None,
        }
    }

    fn is_pending(&self) -> bool {
        matches!(self.stage, Stage::PendingAdmission(_))
    }

    /// The pod is desired: it has a worker or waits for its admission.
    pub(super) fn is_desired(&self) -> bool {
        match self.stage {
            Stage::PendingAdmission(_) | Stage::Worker(_) => true,
            Stage::WithoutWorker | Stage::Ended => false,
        }
    }

    /// The pod has ended, and its source still has it.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self.stage, Stage::Ended)
    }

    fn is_vacant(&self) -> bool {
        matches!(self.stage, Stage::WithoutWorker)
            && self.orphan_removal.is_none()
            && self.set_aside.is_none()
            && !self.is_worker_missing
            && !self.is_restart_requested
    }
}

/// One [`PodEntry`] per UID.
#[derive(Debug, Default)]
pub(super) struct PodEntries(HashMap<PodUid, PodEntry>);

impl PodEntries {
    pub(super) fn get(&self, uid: &PodUid) -> Option<&PodEntry> {
        self.0.get(uid)
    }

    /// Returns the entry of a UID, made on first use.
    pub(super) fn entry(&mut self, uid: &PodUid) -> &mut PodEntry {
        self.0.entry(uid.clone()).or_default()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&PodUid, &PodEntry)> {
        self.0.iter()
    }

    pub(super) fn worker(&self, uid: &PodUid) -> Option<&WorkerHandle> {
        self.0.get(uid)?.worker()
    }

    pub(super) fn worker_mut(&mut self, uid: &PodUid) -> Option<&mut WorkerHandle> {
        self.0.get_mut(uid)?.worker_mut()
    }

    pub(super) fn workers(&self) -> impl Iterator<Item = (&PodUid, &WorkerHandle)> {
        self.0.iter().filter_map(|(uid, entry)| Some((uid, entry.worker()?)))
    }

    pub(super) fn workers_mut(&mut self) -> impl Iterator<Item = (&PodUid, &mut WorkerHandle)> {
        self.0.iter_mut().filter_map(|(uid, entry)| Some((uid, entry.worker_mut()?)))
    }

    pub(super) fn set_worker(&mut self, uid: &PodUid, worker: WorkerHandle) {
        self.entry(uid).stage = Stage::Worker(worker);
    }

    /// Ignores changes of a pod that has ended until its source removes it.
    pub(super) fn set_ended(&mut self, uid: &PodUid) {
        self.entry(uid).stage = Stage::Ended;
    }

    /// Forgets that a pod has ended: its source has removed it.
    pub(super) fn clear_ended(&mut self, uid: &PodUid) {
        if let Some(entry) = self.0.get_mut(uid).filter(|entry| entry.has_ended()) {
            entry.stage = Stage::WithoutWorker;
        }
    }

    /// Takes the workers whose task has ended.
    pub(super) fn take_ended_workers(&mut self) -> Vec<(PodUid, WorkerHandle)> {
        let ended = |entry: &PodEntry| entry.worker().is_some_and(|worker| worker.task.is_finished());
        self.take_stages(ended)
            .filter_map(|(uid, stage)| match stage {
                Stage::Worker(worker) => Some((uid, worker)),
                Stage::WithoutWorker | Stage::PendingAdmission(_) | Stage::Ended => None,
            })
            .collect()
    }

    fn take_stages(&mut self, which: impl Fn(&PodEntry) -> bool) -> impl Iterator<Item = (PodUid, Stage)> {
        let chosen = self.0.iter_mut().filter(move |(_, entry)| which(entry));
        chosen.map(|(uid, entry)| (uid.clone(), std::mem::take(&mut entry.stage)))
    }

    /// Returns the UIDs of pods without a worker that are to be admitted once their source has named them.
    pub(super) fn unadmitted(&self) -> Vec<PodUid> {
        let is_unadmitted = |entry: &PodEntry| entry.is_worker_missing && entry.set_aside.is_none();
        self.0
            .iter()
            .filter(|(_, e)| e.is_pending() || is_unadmitted(e))
            .map(|(uid, _)| uid.clone())
            .collect()
    }

    pub(super) fn is_any_pending(&self) -> bool {
        self.0.values().any(PodEntry::is_pending)
    }

    pub(super) fn pending_mut(&mut self, uid: &PodUid) -> Option<&mut PendingAdmission> {
        match &mut self.0.get_mut(uid)?.stage {
            Stage::PendingAdmission(pending) => Some(pending),
            Stage::WithoutWorker | Stage::Worker(_) | Stage::Ended => None,
        }
    }

    pub(super) fn set_pending(&mut self, uid: &PodUid, pending: PendingAdmission) {
        self.entry(uid).stage = Stage::PendingAdmission(pending);
    }

    pub(super) fn take_pending(&mut self, uid: &PodUid) -> Option<PendingAdmission> {
        let entry = self.0.get_mut(uid).filter(|entry| entry.is_pending())?;
        match std::mem::take(&mut entry.stage) {
            Stage::PendingAdmission(pending) => Some(pending),
            Stage::WithoutWorker | Stage::Worker(_) | Stage::Ended => None,
        }
    }

    pub(super) fn take_all_pending(&mut self) -> Vec<PendingAdmission> {
        self.take_stages(PodEntry::is_pending)
            .filter_map(|(_, stage)| match stage {
                Stage::PendingAdmission(pending) => Some(pending),
                Stage::WithoutWorker | Stage::Worker(_) | Stage::Ended => None,
            })
            .collect()
    }

    pub(super) fn is_set_aside(&self, uid: &PodUid) -> bool {
        self.0.get(uid).is_some_and(|entry| entry.set_aside.is_some())
    }

    pub(super) fn is_removing_orphan(&self, uid: &PodUid) -> bool {
        self.0.get(uid).is_some_and(|entry| entry.orphan_removal.is_some())
    }

    /// A pod with this UID is neither desired nor being removed.
    pub(super) fn may_be_orphan(&self, uid: &PodUid) -> bool {
        !self.get(uid).is_some_and(PodEntry::is_desired) && !self.is_removing_orphan(uid)
    }

    /// Forgets removals of orphans that have ended, then entries that say nothing any more. Returns whether a
    /// removal has ended.
    pub(super) fn prune(&mut self) -> bool {
        let mut has_ended = false;
        self.0.retain(|_, entry| {
            has_ended |= entry.orphan_removal.take_if(|task| task.is_finished()).is_some();
            !entry.is_vacant()
        });
        has_ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid(text: &str) -> PodUid {
        PodUid::parse(text).unwrap()
    }

    fn pending() -> PendingAdmission {
        PendingAdmission { source: SourceKind::Api, pod: Arc::default() }
    }

    #[test]
    fn an_entry_is_pruned_only_when_nothing_is_kept_of_its_pod() {
        let mut entries = PodEntries::default();
        entries.entry(&uid("vacant"));
        entries.entry(&uid("set-aside")).set_aside = Some(SourceKind::File);
        entries.entry(&uid("missing")).is_worker_missing = true;
        entries.entry(&uid("restart")).is_restart_requested = true;
        entries.set_pending(&uid("pending"), pending());
        entries.set_ended(&uid("ended"));
        entries.set_ended(&uid("removed"));
        entries.clear_ended(&uid("removed"));
        entries.clear_ended(&uid("pending"));
        assert!(!entries.prune(), "no removal has ended");
        let mut kept: Vec<&str> = entries.iter().map(|(uid, _)| uid.as_str()).collect();
        kept.sort_unstable();
        assert_eq!(kept, ["ended", "missing", "pending", "restart", "set-aside"]);
    }

    #[test]
    fn a_pending_admission_is_taken_once_and_leaves_the_rest_of_its_entry() {
        let mut entries = PodEntries::default();
        entries.set_pending(&uid("a"), pending());
        entries.entry(&uid("a")).set_aside = Some(SourceKind::Api);
        entries.set_pending(&uid("b"), pending());
        assert!(entries.take_pending(&uid("a")).is_some());
        assert!(entries.take_pending(&uid("a")).is_none());
        assert!(entries.is_set_aside(&uid("a")));
        assert_eq!(entries.take_all_pending().len(), 1);
        assert!(!entries.is_any_pending());
    }
}
