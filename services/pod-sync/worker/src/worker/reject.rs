//! Rejects a pod (`pkg/kubelet: rejectPod`).

use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::EventType;
use pod_sync_decisions::status::{self, KillCause, KillOverride, rejection_message};
use pod_sync_decisions::worker::{Input, KillPodOptions, PodFacts, SyncPodType};
use pod_sync_node_decisions::admission::Rejection;

use super::Worker;
use super::halt::{Halt, Next};
use super::tracker::Tracker;
use crate::context::{Reporting, WorkerControl};

impl Worker {
    /// Rejects a pod that has nothing on this node.
    pub(super) fn reject(&mut self, rejection: &Rejection) -> Result<Next, Halt> {
        let Rejection { reason, message } = rejection;
        self.ctx.reporting.events.pod(&self.tracker.pod, EventType::Warning, reason, message, "");
        let status = status::rejected(&self.tracker.pod, reason, message, self.ctx.clock.wall());
        self.ctx.control.pod_workers.step(Input::Reject(self.tracker.pod_ref.uid.clone()));
        self.record_termination();
        self.tracker.report(status, true, |_| {});
        Ok(Next::Again)
    }
}

/// Terminates a pod that the node cannot run after all, with the status of a rejected pod. What the pod has on the node is removed.
pub(super) fn terminate_rejected(
    reporting: &Reporting,
    control: &WorkerControl,
    tracker: &Tracker,
    pod: &Pod,
    cause: KillCause,
    message: &str,
) -> Halt {
    reporting.events.pod(pod, EventType::Warning, cause.reason(), message, "");
    let killed_as = KillOverride { cause, message: rejection_message(message), disruption: None };
    let kill = KillPodOptions { killed_as: Some(killed_as), ..KillPodOptions::default() };
    let facts = PodFacts::of(pod, tracker.pod_ref.full_name());
    let (uid, kind) = (tracker.pod_ref.uid.clone(), SyncPodType::Kill(kill));
    control.pod_workers.step(Input::Update { uid, facts, kind, quiet: false });
    Halt::Cancelled
}
