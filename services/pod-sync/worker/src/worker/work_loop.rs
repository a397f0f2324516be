//! The state of the loop of a pod worker.

use std::sync::Arc;
use std::time::Duration;

use quintlet_model::ids::PodRef;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::Span;

use crate::context::Desired;

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
    pub(super) suspension: SuspensionReport,
}

impl WorkLoop {
    pub(super) fn new(wakeup: Arc<Notify>, pod: &PodRef, is_restored: bool) -> Self {
        Self {
            wakeup,
            sync_type: if is_restored { SyncType::Sync } else { SyncType::Create },
            cancel: CancellationToken::new(),
            operation: (!is_restored).then(|| operation("create", pod)),
            suspension: SuspensionReport::default(),
        }
    }

    /// Begins a traced operation, unless one is in progress.
    pub(super) fn begin_operation(&mut self, name: &'static str, pod: &PodRef) {
        self.operation.get_or_insert_with(|| operation(name, pod));
    }

    /// Begins another traced operation.
    pub(super) fn change_operation(&mut self, name: &'static str, pod: &PodRef) {
        self.operation = Some(operation(name, pod));
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

fn operation(name: &'static str, pod: &PodRef) -> Span {
    let title = format!("{name} {}/{}", pod.namespace, pod.name);
    let name = format!("{}/{}", pod.namespace, pod.name);
    tracing::info_span!(parent: None, "operation", otel.name = title, pod.uid = %pod.uid, pod.name = name)
}
