//! Allocates resizes: compares desired with allocated resources and admits the change
//! (`pkg/kubelet/allocation`).

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::EventType;
use pod_sync_decisions::resize::allocation;
use pod_sync_decisions::resize::feasibility::{self, PendingReason, QueuedResize};
use pod_sync_decisions::resize::message::resize_message;
use pod_sync_decisions::worker::{Input, PodFacts, SyncPodType};
use pod_sync_records::DeferralEnd;
use pod_sync_worker::context::WorkerContext;
use quintlet_model::ids::PodUid;
use quintlet_model::pod as pods;

use super::admission::{Admitter, is_ending};
use super::entry::PodEntries;
use super::stores::Stores;
use crate::pending_resizes::PendingResizes;

/// The resizes that are not allocated yet.
pub(super) struct Resizes {
    ctx: Arc<WorkerContext>,
    queue: PendingResizes,
}

impl Resizes {
    pub(super) fn new(ctx: Arc<WorkerContext>) -> Self {
        Self { ctx, queue: PendingResizes::new() }
    }

    /// Sleeps until the next retry without a trigger; for ever while no resize is pending.
    pub(super) async fn due(&self) {
        self.queue.due().await;
    }

    /// Marks that resources may have become available.
    pub(super) fn retry_soon(&mut self) {
        self.queue.retry_soon();
    }

    /// Forgets the resize of a pod that is gone, and lets others have its resources.
    pub(super) fn remove(&mut self, uid: &PodUid) {
        let now = self.ctx.clock.wall();
        self.ctx.checkpoints.allocations.deferral_ended(uid, DeferralEnd::Terminated, now);
        self.queue.drop(uid);
        self.queue.retry_soon();
    }

    /// Queues a resize if the desired resources of a pod have changed and differ from the allocated ones.
    pub(super) fn compare(&mut self, pods: &mut PodEntries, uid: &PodUid, desired: &Arc<Pod>) {
        let resources = self.ctx.checkpoints.allocations.resources_of(desired);
        let Some(worker) = pods.worker_mut(uid).filter(|w| w.desired_resources != resources) else {
            return;
        };
        let before = allocation::apply(desired, &worker.desired_resources);
        self.ctx.reporting.metrics.operations.resize_requested(&before, desired);
        worker.desired_resources = resources;
        if worker.desired.borrow().rejected.is_some() || is_ending(desired) {
            return;
        }
        if !Arc::ptr_eq(&self.ctx.checkpoints.allocations.apply(uid, desired), desired) {
            return self.queue.push(uid);
        }
        self.queue.drop(uid);
        self.revert(uid, desired);
    }

    // The spec has the allocated resources again.
    fn revert(&self, uid: &PodUid, desired: &Arc<Pod>) {
        let allocations = &self.ctx.checkpoints.allocations;
        allocations.deferral_ended(uid, DeferralEnd::Reverted, self.ctx.clock.wall());
        if allocations.conditions(uid, |c| c.clear_pending()) {
            self.sync(uid, desired);
        }
    }

    /// Retries pending resizes, if a trigger or the interval allows it.
    pub(super) fn retry(&mut self, pods: &PodEntries, stores: &Stores, admitter: &Admitter) {
        let waiting = self.queue.take(stores.is_ready());
        let mut queue: Vec<QueuedResize> = waiting
            .into_iter()
            .filter_map(|uid| {
                let desired = stores.pod(&uid)?;
                let allocated = self.ctx.checkpoints.allocations.apply(&uid, desired);
                let since = self.ctx.checkpoints.allocations.conditions(&uid, |c| c.pending_since());
                Some(QueuedResize::of(uid, desired, &allocated, since))
            })
            .collect();
        if queue.is_empty() {
            return;
        }
        feasibility::sort_queue(&mut queue);
        let is_pending = |uid: &PodUid| {
            stores.pod(uid).is_some_and(|desired| self.retry_one(pods, admitter, uid, desired))
        };
        let waiting = queue.into_iter().map(|c| c.uid).filter(is_pending).collect();
        self.queue.set_pending(waiting);
    }

    /// Returns true if the resize stays pending.
    fn retry_one(&self, pods: &PodEntries, admitter: &Admitter, uid: &PodUid, desired: &Arc<Pod>) -> bool {
        let Some(worker) = pods.worker(uid) else { return false };
        if self.ctx.control.pod_workers.read(|w| w.is_termination_requested(uid)) {
            return false;
        }
        let ctx = &self.ctx;
        let (generation, now) = (desired.metadata.generation, ctx.clock.wall());
        let allocated = ctx.checkpoints.allocations.apply(uid, desired);
        if Arc::ptr_eq(&allocated, desired) {
            self.revert(uid, desired);
            return false;
        }
        let pending = feasibility::infeasible(desired, &allocated, admitter.resize_rules())
            .or_else(|| admitter.deferred(pods, uid, desired));
        let Some(pending) = pending else {
            ctx.checkpoints.allocations.allocate(uid, desired);
            ctx.checkpoints.allocations.deferral_ended(uid, DeferralEnd::Accepted, now);
            ctx.checkpoints.allocations.conditions(uid, |c| c.set_in_progress(generation, now));
            let message = resize_message("started", desired, generation, "");
            ctx.reporting.events.pod(desired, EventType::Normal, "ResizeStarted", &message, "");
            worker.desired.send_modify(|d| d.pod = Arc::clone(desired));
            worker.desired.borrow().publish_removal(&ctx.reporting.views, uid);
            self.sync(uid, desired);
            return false;
        };
        if pending.reason == PendingReason::Infeasible {
            ctx.reporting.metrics.operations.resize_infeasible(pending.detail);
        }
        let priority = pods::spec(desired).priority.unwrap_or(0);
        let is_news = ctx.checkpoints.allocations.conditions(uid, |c| {
            c.set_priority(priority);
            c.set_pending(&pending, generation, now)
        });
        if is_news {
            let message = resize_message(&pending.cause, desired, generation, &pending.message);
            ctx.reporting.events.pod(desired, EventType::Warning, pending.reason.event(), &message, "");
        }
        self.sync(uid, desired);
        pending.reason == PendingReason::Deferred
    }

    /// Makes the pod's worker sync.
    fn sync(&self, uid: &PodUid, pod: &Pod) {
        let Ok(pod_ref) = pods::pod_ref(pod) else { return };
        let facts = PodFacts::of(pod, pod_ref.full_name());
        self.ctx.control.pod_workers.step(Input::Update {
            uid: uid.clone(),
            facts,
            kind: SyncPodType::Update,
            quiet: false,
        });
    }
}
