//! Allocates resizes: compares desired with allocated resources and admits the change (`pkg/kubelet/allocation`).

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::EventType;
use pod_sync_decisions::admission::{AdmitResult, InsufficientResource, Rejection};
use pod_sync_decisions::preempt;
use pod_sync_decisions::resize::allocation;
use pod_sync_decisions::resize::feasibility::{self, PendingReason, PendingResize, QueuedResize};
use pod_sync_decisions::resize::message::resize_message;
use pod_sync_decisions::worker::{Input, PodFacts, SyncPodType};
use quintlet_model::ids::PodUid;
use quintlet_model::pod as pods;

use super::{PodManager, UNEXPECTED, is_ending};

impl PodManager {
    /// Takes note of what a pod asks for, where that is not what it asked for before.
    pub(super) fn compare(&mut self, uid: &PodUid, asked: &Arc<Pod>) {
        let asks = allocation::of_pod(asked);
        let Some(entry) = self.pods.get_mut(uid).filter(|e| e.asks != asks) else { return };
        entry.asks = asks;
        if entry.desired.borrow().rejected.is_some() || is_ending(asked) {
            return;
        }
        if !Arc::ptr_eq(&self.ctx.allocations.apply(uid, asked), asked) {
            return self.resizes.push(uid);
        }
        self.resizes.drop(uid);
        if self.ctx.allocations.conditions(uid, |c| c.clear_pending()) {
            self.sync(uid, asked);
        }
    }

    /// Looks at what waits, where there is cause to.
    pub(super) fn look_at_resizes(&mut self) {
        let waiting = self.resizes.take(self.sources_ready());
        let mut queue: Vec<QueuedResize> = waiting
            .into_iter()
            .filter_map(|uid| {
                let asked = self.asked(&uid)?;
                let allocated = self.ctx.allocations.apply(&uid, &asked);
                let since = self.ctx.allocations.conditions(&uid, |c| c.pending_since());
                Some(QueuedResize::of(uid, &asked, &allocated, since))
            })
            .collect();
        if queue.is_empty() {
            return;
        }
        feasibility::sort_queue(&mut queue);
        let waiting = queue.into_iter().map(|c| c.uid).filter(|uid| self.look_at_resize(uid)).collect();
        self.resizes.set_pending(waiting);
    }

    fn asked(&self, uid: &PodUid) -> Option<Arc<Pod>> {
        self.stores.values().find_map(|s| s.get(uid)).cloned()
    }

    // True where it is to be looked at again.
    fn look_at_resize(&self, uid: &PodUid) -> bool {
        let (Some(asked), Some(entry)) = (self.asked(uid), self.pods.get(uid)) else { return false };
        if self.ctx.pod_workers.read(|w| w.is_termination_requested(uid)) {
            return false;
        }
        let (ctx, generation, now) = (&self.ctx, asked.metadata.generation, self.ctx.clock.wall());
        let allocated = ctx.allocations.apply(uid, &asked);
        if Arc::ptr_eq(&allocated, &asked) {
            if ctx.allocations.conditions(uid, |c| c.clear_pending()) {
                self.sync(uid, &asked);
            }
            return false;
        }
        let pending = feasibility::infeasible(&asked, &allocated, self.admission.resize_rules())
            .or_else(|| self.deferred(uid, &asked));
        let Some(pending) = pending else {
            ctx.allocations.allocate(uid, &asked);
            ctx.allocations.conditions(uid, |c| c.set_in_progress(generation, now));
            let message = resize_message("started", &asked, generation, "");
            ctx.events.pod(&asked, EventType::Normal, "ResizeStarted", &message, "");
            entry.desired.send_modify(|d| d.pod = Arc::clone(&asked));
            ctx.views.wanted(uid, &entry.desired.borrow());
            self.sync(uid, &asked);
            return false;
        };
        if ctx.allocations.conditions(uid, |c| c.set_pending(&pending, generation, now)) {
            let message = resize_message(&pending.cause, &asked, generation, &pending.message);
            ctx.events.pod(&asked, EventType::Warning, pending.reason.event(), &message, "");
        }
        self.sync(uid, &asked);
        pending.reason == PendingReason::Deferred
    }

    // Why it does not fit beside the others now. Those a critical pod may displace are ended, and it waits for that.
    fn deferred(&self, uid: &PodUid, asked: &Pod) -> Option<PendingResize> {
        let others = self.active(Some(uid));
        let others: Vec<&Pod> = others.iter().map(AsRef::as_ref).collect();
        let rejection = match self.admission.admit(asked, &others) {
            AdmitResult::Admit => return None,
            AdmitResult::Reject(rejection) => rejection,
            AdmitResult::Preempt(short) => match preempt::pods_to_preempt(asked, &others, &short) {
                Err(e) => Rejection { reason: UNEXPECTED.to_owned(), message: e.to_string() },
                Ok(victims) => {
                    for victim in victims.into_iter().filter(|v| !self.is_going(v)) {
                        self.preempt(victim, asked);
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
        })
    }

    fn is_going(&self, pod: &Pod) -> bool {
        pods::pod_ref(pod).is_ok_and(|r| self.ctx.pod_workers.read(|w| w.is_termination_requested(&r.uid)))
    }

    // Has its worker look at it.
    fn sync(&self, uid: &PodUid, pod: &Pod) {
        let Ok(pod_ref) = pods::pod_ref(pod) else { return };
        let facts = PodFacts::of(pod, pod_ref.full_name());
        self.ctx.pod_workers.step(Input::Update {
            uid: uid.clone(),
            facts,
            kind: SyncPodType::Update,
            quiet: false,
        });
    }
}
