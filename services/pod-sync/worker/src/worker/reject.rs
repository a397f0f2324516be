//! Rejects a pod that has something on this node (`pkg/kubelet: rejectPod`).

use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::EventType;
use pod_sync_decisions::status::{KillCause, KillOverride, rejection_message};
use pod_sync_decisions::worker::{Input, KillPodOptions, PodFacts, SyncPodType};

use super::halt::Halt;
use super::tracker::Tracker;
use crate::context::{Reporting, WorkerControl};

/// Terminates a pod that the node cannot run after all, with the status of a rejected pod. What the pod has
/// on the node is removed.
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
