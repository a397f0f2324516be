//! The state of the loop of a pod worker.

use std::sync::Arc;
use std::time::Duration;

use pod_sync_records::PodRecord;
use quintlet_model::ids::PodRef;
use quintlet_telemetry::propagate;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::Span;

use crate::context::Desired;

/// Name of the span of a creation, up to the Ready pod.
const CREATE: &str = "create pod";
/// Name of the span of any other change of a pod that runs, up to the Ready pod.
pub(super) const SYNC: &str = "sync pod";
/// Name of the span of a termination, up to the last status of the pod.
pub(super) const TERMINATE: &str = "terminate pod";

/// The state of the loop between passes.
pub(super) struct WorkLoop {
    // Wakes the worker for another pass.
    pub(super) wakeup: Arc<Notify>,
    // The type of the next sync.
    pub(super) sync_type: SyncType,
    // Ends the current sync, unless it has reached the runtime.
    pub(super) cancel: CancellationToken,
    // The trace of the current operation, from its trigger until the pod is Ready or has terminated.
    pub(super) operation: Option<Span>,
    // W3C `traceparent` of the creation, to which later operations are linked.
    creation: Option<String>,
    pub(super) suspension: SuspensionReport,
}

impl WorkLoop {
    /// `restored`: the record of a pod that an earlier worker has created.
    pub(super) fn new(wakeup: Arc<Notify>, pod: &PodRef, restored: Option<&PodRecord>) -> Self {
        let (sync_type, operation, creation) = match restored {
            Some(record) => (SyncType::Sync, None, record.creation.clone()),
            None => {
                let span = operation_span(CREATE, pod, None);
                let trace = propagate::trace_of(&span);
                (SyncType::Create, Some(span), trace.map(|trace| trace.traceparent))
            }
        };
        let (cancel, suspension) = (CancellationToken::new(), SuspensionReport::default());
        Self { wakeup, sync_type, cancel, operation, creation, suspension }
    }

    /// Returns the W3C `traceparent` of the pod's creation.
    pub(super) fn creation(&self) -> Option<&str> {
        self.creation.as_deref()
    }

    /// Begins a traced operation, unless one is in progress.
    pub(super) fn begin_operation(&mut self, name: &'static str, pod: &PodRef) {
        let creation = self.creation.as_deref();
        self.operation.get_or_insert_with(|| operation_span(name, pod, creation));
    }

    /// Begins another traced operation.
    pub(super) fn change_operation(&mut self, name: &'static str, pod: &PodRef) {
        self.operation = Some(operation_span(name, pod, self.creation()));
    }
}

/// The last report of a suspension.
#[derive(Default)]
pub(super) struct SuspensionReport {
    // The desired pod at the last check, while the pod is suspended.
    pub(super) desired: Option<Desired>,
    // End of the suspension (CLOCK_BOOTTIME) that the last event was about.
    pub(super) reported_until: Duration,
}

/// The type of a sync, a label of metrics (`pkg/kubelet/types: SyncPodType`, and `terminated` for the last
/// pass: `pkg/kubelet: podWorkers.podWorkerLoop`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SyncType {
    Create,
    Update,
    Sync,
    Kill,
    Terminated,
}

impl SyncType {
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
            Self::Sync => "sync",
            Self::Kill => "kill",
            Self::Terminated => "terminated",
        }
    }
}

/// Returns the root of a trace, which is linked to the creation of the pod.
fn operation_span(name: &'static str, pod: &PodRef, creation: Option<&str>) -> Span {
    let span = tracing::info_span!(
        parent: None,
        "operation",
        otel.name = name,
        k8s.pod.uid = %pod.uid,
        k8s.namespace.name = &*pod.namespace,
        k8s.pod.name = &*pod.name,
    );
    if let Some(creation) = creation {
        propagate::add_link(&span, creation);
    }
    span
}

#[cfg(test)]
mod tests {
    use quintlet_model::ids::PodUid;
    use quintlet_telemetry::TelemetryOptions;

    use super::*;

    #[test]
    fn a_restored_pod_has_no_operation_and_the_creation_of_its_record() {
        quintlet_telemetry::init("pod-sync", &TelemetryOptions::default()).unwrap();
        let pod =
            PodRef { uid: PodUid::parse("u1").unwrap(), namespace: "default".into(), name: "web".into() };
        let created = WorkLoop::new(Arc::default(), &pod, None);
        let trace = created.operation.as_ref().and_then(propagate::trace_of).unwrap();
        assert_eq!(created.creation(), Some(trace.traceparent.as_str()));
        let record = PodRecord { creation: Some(trace.traceparent.clone()), ..PodRecord::default() };
        let mut restored = WorkLoop::new(Arc::default(), &pod, Some(&record));
        assert!(restored.operation.is_none());
        restored.change_operation(TERMINATE, &pod);
        assert_eq!(restored.creation(), Some(trace.traceparent.as_str()));
        let ended = restored.operation.as_ref().and_then(propagate::trace_of).unwrap();
        assert_ne!(ended.traceparent, trace.traceparent);
    }
}
