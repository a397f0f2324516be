//! Allocates resizes: compares desired with allocated resources and admits the change (`pkg/kubelet/allocation`).

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::EventType;
use pod_sync_decisions::resize::allocation;
use pod_sync_decisions::resize::feasibility::{self, PendingReason, PendingResize, QueuedResize};
use pod_sync_decisions::resize::message::resize_message;
use pod_sync_decisions::worker::{Input, PodFacts, SyncPodType};
use pod_sync_node_decisions::admission::{AdmitResult, InsufficientResource, Rejection};
use pod_sync_node_decisions::preempt;
use quintlet_model::ids::PodUid;
use quintlet_model::pod as pods;

use super::PodManager;
use super::admission::{UNEXPECTED, is_ending};

impl PodManager {
    /// Queues a resize if the desired resources of a pod have changed and differ from the allocated ones.
    pub(super) fn compare_resources(&mut self, uid: &PodUid, asked: &Arc<Pod>) {
        let resources = allocation::of_pod(asked);
        let Some(worker) = self.pods.worker_mut(uid).filter(|w| w.desired_resources != resources) else {
            return;
        };
        let before = allocation::apply(asked, &worker.desired_resources);
        self.ctx.reporting.metrics.operations.resize_requested(&before, asked);
        worker.desired_resources = resources;
        if worker.desired.borrow().rejected.is_some() || is_ending(asked) {
            return;
        }
        if !Arc::ptr_eq(&self.ctx.checkpoints.allocations.apply(uid, asked), asked) {
            return self.resizes.push(uid);
        }
        self.resizes.drop(uid);
        if self.ctx.checkpoints.allocations.conditions(uid, |c| c.clear_pending()) {
            self.sync(uid, asked);
        }
    }

    /// Retries pending resizes, if a trigger or the interval allows it.
    pub(super) fn retry_resizes(&mut self) {
        let waiting = self.resizes.take(self.sources_ready());
        let mut queue: Vec<QueuedResize> = waiting
            .into_iter()
            .filter_map(|uid| {
                let asked = self.asked(&uid)?;
                let allocated = self.ctx.checkpoints.allocations.apply(&uid, &asked);
                let since = self.ctx.checkpoints.allocations.conditions(&uid, |c| c.pending_since());
                Some(QueuedResize::of(uid, &asked, &allocated, since))
            })
            .collect();
        if queue.is_empty() {
            return;
        }
        feasibility::sort_queue(&mut queue);
        let waiting = queue.into_iter().map(|c| c.uid).filter(|uid| self.retry_resize(uid)).collect();
        self.resizes.set_pending(waiting);
    }

    fn asked(&self, uid: &PodUid) -> Option<Arc<Pod>> {
        self.stores.values().find_map(|s| s.get(uid)).cloned()
    }

    // Returns true if the resize stays pending.
    fn retry_resize(&self, uid: &PodUid) -> bool {
        let (Some(asked), Some(worker)) = (self.asked(uid), self.pods.worker(uid)) else { return false };
        if self.ctx.control.pod_workers.read(|w| w.is_termination_requested(uid)) {
            return false;
        }
        let (ctx, generation, now) = (&self.ctx, asked.metadata.generation, self.ctx.clock.wall());
        let allocated = ctx.checkpoints.allocations.apply(uid, &asked);
        if Arc::ptr_eq(&allocated, &asked) {
            if ctx.checkpoints.allocations.conditions(uid, |c| c.clear_pending()) {
                self.sync(uid, &asked);
            }
            return false;
        }
        let pending = feasibility::infeasible(&asked, &allocated, self.admission.resize_rules())
            .or_else(|| self.deferred(uid, &asked));
        let Some(pending) = pending else {
            ctx.checkpoints.allocations.allocate(uid, &asked);
            ctx.checkpoints.allocations.conditions(uid, |c| c.set_in_progress(generation, now));
            let message = resize_message("started", &asked, generation, "");
            ctx.reporting.events.pod(&asked, EventType::Normal, "ResizeStarted", &message, "");
            worker.desired.send_modify(|d| d.pod = Arc::clone(&asked));
            worker.desired.borrow().publish_removal(&ctx.reporting.views, uid);
            self.sync(uid, &asked);
            return false;
        };
        if pending.reason == PendingReason::Infeasible {
            ctx.reporting.metrics.operations.resize_infeasible(pending.detail);
        }
        if ctx.checkpoints.allocations.conditions(uid, |c| c.set_pending(&pending, generation, now)) {
            let message = resize_message(&pending.cause, &asked, generation, &pending.message);
            ctx.reporting.events.pod(&asked, EventType::Warning, pending.reason.event(), &message, "");
        }
        self.sync(uid, &asked);
        pending.reason == PendingReason::Deferred
    }

    // Returns why the resize does not fit beside the other pods now. A critical pod preempts others, and waits for them.
    fn deferred(&self, uid: &PodUid, asked: &Pod) -> Option<PendingResize> {
        let others = self.active(Some(uid));
        let others: Vec<&Pod> = others.iter().map(AsRef::as_ref).collect();
        let rejection = match self.admission.admit(asked, &others) {
            AdmitResult::Admit => return None,
            AdmitResult::Reject(rejection) => rejection,
            AdmitResult::Preempt(short) => match preempt::pods_to_preempt(asked, &others, &short) {
                Err(e) => Rejection { reason: UNEXPECTED.to_owned(), message: e.to_string() },
                Ok(victims) => {
                    for victim in victims.into_iter().filter(|v| !self.is_terminating(v)) {
                        self.preempt(victim, asked, &short);
                    }
                    let unknown = || Rejection { reason: UNEXPECTED.to_owned(), message: String::new() };
                    short.first().map_or_else(unknown, InsufficientResource::rejection)
                }
            },
        };
        Some(PendingResize {
            reason: PendingReason::Deferred,
            cause: rejection.reason,
            message: rejection.message,
            detail: "",
        })
    }

    fn is_terminating(&self, pod: &Pod) -> bool {
        pods::pod_ref(pod)
            .is_ok_and(|r| self.ctx.control.pod_workers.read(|w| w.is_termination_requested(&r.uid)))
    }

    // Makes the pod's worker sync.
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
