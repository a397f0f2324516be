//! Applies the updates of the sources.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::EventType;
use pod_sync_containment::PodWork;
use pod_sync_decisions::merge::{MergeResult, PodChange, PodOperation, SourceStore};
use pod_sync_decisions::waiting::{Waiting, WaitingFor};
use pod_sync_decisions::worker::{Effect, Input, PodFacts, SyncPodType};
use pod_sync_layout::SourceKind;
use pod_sync_node_decisions::admission;
use pod_sync_sources::SourceEvent;
use pod_sync_views::{self as view, Decision, PodView, unix_ns};
use quintlet_kit::failpoint;
use quintlet_model::ids::{PodRef, PodUid};
use quintlet_model::pod as pods;

use super::PodManager;
use super::entry::{PendingAdmission, PodEntry, WorkerOrigin};

impl PodManager {
    pub(super) fn receive(&mut self, source: SourceKind, update: SourceEvent) {
        let Some(update) = self.manifests.hold(source, update) else { return };
        self.update(source, update);
        if source == SourceKind::File {
            self.manifests_read();
        }
    }

    pub(super) fn manifests_read(&mut self) {
        for update in self.manifests.open() {
            self.update(SourceKind::Api, update);
        }
    }

    fn update(&mut self, source: SourceKind, update: SourceEvent) {
        let now = self.ctx.clock.wall();
        match update {
            SourceEvent::Problems(problems) => {
                self.ctx.reporting.views.set_problems(source, problems, unix_ns(now));
            }
            SourceEvent::Offline(pods) => self.start_offline(pods),
            SourceEvent::Changed(pod) => self.merge(source, |store| store.apply(pod, now)),
            SourceEvent::Removed(uid) => self.merge(source, |store| store.remove(&uid)),
            SourceEvent::Snapshot(snapshot) => {
                self.ctx.reporting.views.set_problems(source, snapshot.reported(), unix_ns(now));
                for undecodable in snapshot.undecodable {
                    let pod = Pod { metadata: *undecodable.metadata, ..Pod::default() };
                    let (field, error) = (undecodable.field, undecodable.error);
                    let message = format!("failed to decode the pod: {field}: {error}");
                    self.ctx.reporting.events.pod(&pod, EventType::Warning, "FailedValidation", &message, "");
                }
                if source == SourceKind::File {
                    self.objects.set(snapshot.config_maps, snapshot.secrets);
                }
                self.merge(source, |store| store.set(snapshot.pods, &snapshot.unchanged, now));
            }
        }
    }

    fn merge(&mut self, source: SourceKind, merge: impl FnOnce(&mut SourceStore) -> MergeResult) {
        if self.draining && source != SourceKind::Api {
            return;
        }
        let Some(store) = self.stores.get_mut(source) else { return };
        let merged = merge(store);
        self.report_ignored(source, &merged.duplicates, &merged.unusable);
        if merged.is_first {
            // Before the additions: a static pod that was changed while pod-sync was down has a new UID, and
            // needs the ports of the old one.
            self.confirm_restored(source);
            if source == SourceKind::Api {
                self.offline.confirm();
                self.remove_unadmitted();
            }
        }
        for PodChange { op, pod } in merged.changes {
            self.change(source, op, pod);
        }
        if merged.is_first && self.stores.is_ready() {
            self.report_sources_ready();
        }
    }

    /// Reports that every source has delivered its pods.
    pub(super) fn report_sources_ready(&self) {
        let views = &self.ctx.reporting.views;
        if !views.are_sources_ready() {
            let run = self.stores.pods().filter(|(_, _, pod)| !pods::is_mirror(pod));
            views.set_sources_ready(run.map(|(_, uid, _)| uid.clone()));
        }
    }

    /// Records events for pods of a source that are not run.
    fn report_ignored(&self, source: SourceKind, duplicates: &[Arc<Pod>], unusable: &[Arc<Pod>]) {
        let ignored = |pod: &Pod, problem: String| {
            let text = format!("{problem}, ignoring");
            self.ctx.reporting.events.pod(pod, EventType::Warning, "FailedValidation", &text, "");
        };
        let source = source.name();
        for pod in duplicates {
            let name = pods::pod_ref(pod).map(|r| r.full_name()).unwrap_or_default();
            let problem =
                format!("Error validating pod {name} from {source} due to duplicate pod name {name:?}");
            ignored(pod, problem);
        }
        for pod in unusable {
            let name = pod.metadata.name.as_deref().unwrap_or_default();
            let uid = pod.metadata.uid.as_deref().unwrap_or_default();
            let problem = format!("Error validating pod {name} from {source}: its UID {uid:?} is not usable");
            ignored(pod, problem);
        }
    }

    /// Applies a change of one pod. A panic affects this pod only, whose change is applied again later.
    fn change(&mut self, source: SourceKind, op: PodOperation, pod: Arc<Pod>) {
        let Ok(pod_ref) = pods::pod_ref(&pod) else { return };
        let uid = pod_ref.uid.clone();
        let ctx = Arc::clone(&self.ctx);
        let is_maintained = self.pods.worker(&uid).is_some() && !self.pods.is_set_aside(&uid);
        if !is_maintained && op != PodOperation::Remove && ctx.faults.containment.suspension(&uid).is_some() {
            return self.set_aside(&pod_ref, source, &pod);
        }
        self.pods.entry(&uid).set_aside = None;
        let work = PodWork::of(&pod_ref);
        let changed = ctx.faults.containment.contained_now(&uid, work.name.clone(), || {
            self.apply(source, op, Arc::clone(&pod), pod_ref.clone());
        });
        if let Err(panic) = changed {
            ctx.faults.panicked(&work, &panic, Some(&pod));
            self.set_aside(&pod_ref, source, &pod);
        }
    }

    /// Postpones the updates of a pod until its wait after a fault is over.
    fn set_aside(&mut self, pod_ref: &PodRef, source: SourceKind, pod: &Arc<Pod>) {
        let uid = &pod_ref.uid;
        let is_known = self.ctx.control.pod_workers.read(|w| w.is_known(uid));
        let entry = self.pods.entry(uid);
        entry.set_aside = Some(source);
        if entry.worker().is_some() {
            return;
        }
        entry.is_worker_missing |= is_known;
        if let Some(wait) = self.ctx.faults.containment.suspension(uid) {
            let left = wait.until.saturating_sub(self.ctx.clock.boot());
            let until = self.ctx.clock.wall().checked_add(left).ok();
            let what = Waiting::InternalError { message: wait.message.clone() };
            let decision = Decision { errors: vec![wait.message], ..Decision::default() };
            self.show_wait(pod_ref, source, pod, &WaitingFor { what, since: None, until }, decision);
        }
    }

    /// Applies the newest state of pods whose wait after a fault is over.
    pub(super) fn retry_set_aside(&mut self) {
        let due: Vec<(PodUid, SourceKind)> = self
            .pods
            .iter()
            .filter_map(|(uid, entry)| Some((uid.clone(), entry.set_aside?)))
            .filter(|(uid, _)| self.ctx.faults.containment.suspension(uid).is_none())
            .collect();
        for (uid, source) in due {
            self.pods.entry(&uid).set_aside = None;
            let pod = self.stores.get(source).and_then(|store| store.get(&uid).cloned());
            match pod {
                Some(pod) => self.change(source, PodOperation::Update, pod),
                None => self.ctx.reporting.views.remove(&uid),
            }
        }
    }

    fn apply(&mut self, source: SourceKind, op: PodOperation, pod: Arc<Pod>, pod_ref: PodRef) {
        failpoint::work!("pod taken over");
        if pods::is_mirror(&pod) {
            return self.mirrors.change(op, pod, &self.pods);
        }
        match op {
            PodOperation::Remove => self.apply_removal(&pod_ref),
            PodOperation::Add | PodOperation::Update | PodOperation::Delete | PodOperation::Reconcile => {
                self.apply_update(source, op, pod, pod_ref)
            }
        }
    }

    fn apply_removal(&mut self, pod_ref: &PodRef) {
        let uid = &pod_ref.uid;
        self.pods.clear_ended(uid);
        self.pods.entry(uid).is_restart_requested = false;
        if let Some(PendingAdmission { source, pod }) = self.pods.take_pending(uid) {
            // Its worker finds nothing to remove and reports so.
            self.start(pod_ref.clone(), source, pod, Ok(Vec::new()));
        }
        self.resizes.remove(uid);
        // A source removes only after its first snapshot, so no other source can have the pod.
        match self.pods.worker(uid) {
            Some(worker) => self.remove(uid, worker),
            None => self.ctx.reporting.views.remove(uid),
        }
    }

    fn apply_update(&mut self, source: SourceKind, op: PodOperation, pod: Arc<Pod>, pod_ref: PodRef) {
        let uid = pod_ref.uid.clone();
        if self.pods.get(&uid).is_some_and(PodEntry::has_ended) {
            return;
        }
        let facts = PodFacts::of(&pod, pod_ref.full_name());
        // A restored pod is not new to its worker.
        let is_restored = self.pods.worker(&uid).is_some_and(|w| w.origin != WorkerOrigin::Source);
        let kind =
            if op == PodOperation::Add && !is_restored { SyncPodType::Create } else { SyncPodType::Update };
        let is_quiet = facts.terminal
            && self.ctx.runtime.pleg.all().is_some()
            && self.ctx.runtime.pleg.get(&uid).is_none_or(|runtime| runtime.is_quiet());
        let effects = self.ctx.control.pod_workers.step(Input::Update {
            uid: uid.clone(),
            facts,
            kind,
            quiet: is_quiet,
        });
        if self.ctx.control.pod_workers.read(|w| w.is_restart_requested(&uid)) {
            // The worker of the previous pod ends without the new pod. Without a worker the pod is shown
            // here.
            if self.pods.worker(&uid).is_none() {
                self.show_waiting(&pod_ref, source, &pod, Waiting::PreviousPod);
            }
            self.pods.entry(&uid).is_restart_requested = true;
            return;
        }
        // Without a checkpoint, the status has the resources that the pod was allocated.
        self.ctx.checkpoints.allocations.recover(&uid, &pod, pod.status.as_ref());
        let desired = pod;
        let pod = self.ctx.checkpoints.allocations.apply(&uid, &desired);
        if let Some(worker) = self.pods.worker_mut(&uid) {
            worker.origin = WorkerOrigin::Source;
            let gates = self.ctx.node.settings.field_gates;
            let missing = admission::missing_for_update(&worker.desired.borrow().pod, &desired, gates);
            if !missing.is_empty() {
                let missing = missing.join(", ");
                let text = format!("Pod requires node features that are not available: {missing}");
                let reason = "FailedNodeDeclaredFeaturesCheck";
                self.ctx.reporting.events.pod(&desired, EventType::Warning, reason, &text, "");
            }
            worker.desired.send_modify(|d| {
                d.pod = pod;
                d.source = source;
                d.removed = false;
            });
            worker.desired.borrow().publish_removal(&self.ctx.reporting.views, &uid);
            self.resizes.compare(&mut self.pods, &uid, &desired);
            return;
        }
        if let Some(pending) = self.pods.pending_mut(&uid) {
            pending.pod = pod;
            return;
        }
        let entry = self.pods.entry(&uid);
        let is_worker_missing = std::mem::take(&mut entry.is_worker_missing);
        if !effects.contains(&Effect::Spawn(uid.clone())) && !is_worker_missing {
            // The runtime still has a previous pod with this UID, which is removed first.
            entry.is_restart_requested = true;
            return self.show_waiting(&pod_ref, source, &pod, Waiting::PreviousPod);
        }
        if std::mem::take(&mut entry.is_restart_requested) {
            self.ctx.reporting.metrics.census.count_restart(pods::is_static(&pod));
        }
        let admitted = self.admitter.admit(&self.pods, &pod);
        let awaits_runtime = self.admitter.awaits_runtime(&admitted);
        if awaits_runtime || admitted.as_ref().is_err_and(|r| r.reason == admission::NODE_AFFINITY) {
            return self.postpone_admission(uid, PendingAdmission { source, pod }, awaits_runtime);
        }
        self.ctx.reporting.metrics.pod_decided(&pod, admitted.is_ok());
        self.start(pod_ref, source, pod, admitted);
        self.resizes.compare(&mut self.pods, &uid, &desired);
    }

    /// Removes restored pods that are not in the first snapshot of their source: they were removed while
    /// pod-sync was down.
    fn confirm_restored(&mut self, source: SourceKind) {
        for (uid, worker) in self.pods.workers_mut().filter(|(_, w)| w.is_unconfirmed()) {
            let origin = worker.desired.borrow().source;
            if origin == source && self.stores.get(origin).is_some_and(|store| store.get(uid).is_some()) {
                worker.origin = WorkerOrigin::ConfirmedRecord;
            } else if origin == source || self.stores.get(origin).is_none() {
                worker.origin = WorkerOrigin::Source;
                self.ctx.control.pod_workers.step(Input::Remove(uid.clone()));
                worker.desired.send_modify(|d| d.removed = true);
                self.offline.removed(uid);
            }
        }
    }

    // Starts the pods of the offline cache that have no record, unless the API server has delivered its pods.
    fn start_offline(&mut self, cached: Vec<Arc<Pod>>) {
        if self.stores.is_listed(SourceKind::Api) {
            return;
        }
        for pod in cached {
            let Ok(pod_ref) = pods::pod_ref(&pod) else { continue };
            if !self.pods.get(&pod_ref.uid).is_some_and(PodEntry::is_desired) {
                self.change(SourceKind::Api, PodOperation::Add, pod);
            }
        }
        self.offline.show_started();
    }

    // Forgets pods of the offline cache that wait for their admission and that the API server does not have.
    fn remove_unadmitted(&mut self) {
        let is_gone = |uid: &PodUid| self.stores.get(SourceKind::Api).is_some_and(|s| s.get(uid).is_none());
        let gone: Vec<PodUid> = self.pods.unadmitted().into_iter().filter(is_gone).collect();
        for uid in gone {
            let view = self.ctx.reporting.views.get(&uid);
            let Some(view) = view.filter(|view| view.source == SourceKind::Api) else { continue };
            let _ = self.pods.take_pending(&uid);
            self.pods.entry(&uid).is_worker_missing = false;
            // Its worker finds nothing to remove and reports so.
            self.start(view.pod_ref.clone(), view.source, Arc::clone(&view.pod), Ok(Vec::new()));
            if let Some(worker) = self.pods.worker(&uid) {
                self.remove(&uid, worker);
            }
        }
    }

    /// Adds pods whose UID was in use by a pod that has terminated.
    pub(super) fn add_pods_with_freed_uid(&mut self) {
        if self.draining {
            return;
        }
        let is_returned = |source: SourceKind, uid: &PodUid| {
            let entry = self.pods.get(uid);
            entry.is_none_or(|entry| entry.set_aside.is_none() && entry.worker().is_none())
                && (source != SourceKind::Api || entry.is_some_and(|entry| entry.is_restart_requested))
                && !self.ctx.control.pod_workers.read(|w| w.is_known(uid))
        };
        let returned: Vec<(SourceKind, Arc<Pod>)> = self
            .stores
            .pods()
            .filter(|(source, uid, _)| is_returned(*source, uid))
            .map(|(source, _, pod)| (source, Arc::clone(pod)))
            .collect();
        for (source, pod) in returned {
            self.change(source, PodOperation::Add, pod);
        }
    }

    /// Publishes why a pod without a worker waits.
    pub(super) fn show_waiting(&self, pod_ref: &PodRef, source: SourceKind, pod: &Arc<Pod>, what: Waiting) {
        let old = self.ctx.reporting.views.get(&pod_ref.uid);
        if old.as_ref().and_then(|v| v.waiting.as_ref()).is_some_and(|w| w.reason == what.reason()) {
            return;
        }
        let wait = WaitingFor { what, since: None, until: None };
        self.show_wait(pod_ref, source, pod, &wait, Decision::default());
    }

    fn show_wait(
        &self,
        pod_ref: &PodRef,
        source: SourceKind,
        pod: &Arc<Pod>,
        wait: &WaitingFor,
        decision: Decision,
    ) {
        let now = self.ctx.clock.wall();
        let view = PodView {
            pod_ref: pod_ref.clone(),
            source,
            pod: Arc::clone(pod),
            status: None,
            deletion: pod.metadata.deletion_timestamp.clone(),
            worker: "",
            is_removed: false,
            mirror_uid: String::new(),
            waiting: Some(view::Waiting::of(wait, now)),
            decision: Arc::new(decision),
            created_unix_ns: unix_ns(now),
            resource_version: String::new(),
            version: 0,
        };
        self.ctx.reporting.views.publish(&pod_ref.uid, view);
    }
}
