//! The pod worker: syncs and terminates one pod (`pkg/kubelet: SyncPod, SyncTerminatingPod, SyncTerminatedPod`).
//!
//! Each worker is a task, and only this task acts on its pod, one action at a time. Everything else wakes the worker. Each
//! pass takes the newest desired pod, a runtime state no older than the last action, probe memory and back-offs, decides
//! with the functions of [`pod_sync_decisions`], acts, and returns when the next pass is due.
//!
//! [`lifecycle`] is the loop, [`observe`] reads the runtime and computes the status, [`report`] hands it to
//! status-reporter, [`sync`] and [`terminate`] are the passes, and [`act`], [`start`] and [`stop`] perform their actions.

mod act;
mod cancellable;
mod create;
mod halt;
mod hook_http;
mod hooks;
mod image_volumes;
mod lifecycle;
mod observe;
mod pending_starts;
mod post_start;
mod prepare;
mod probe_targets;
mod publish_view;
mod record;
mod report;
mod resize;
mod retries;
mod runtime_files;
mod sandbox;
mod start;
mod stop;
mod sync;
mod terminate;
mod termination_message;

pub use halt::Halt;
pub(crate) use halt::{Next, Step};
pub use stop::stop_all_containers;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use pod_sync_decisions::probes::ProbeResults;
use pod_sync_decisions::worker;
use pod_sync_records::PodRecord;
use pod_sync_views::unix_ns;
use quintlet_model::ids::PodRef;
use quintlet_model::runtime::SharedPodRuntime;
use rand::RngExt as _;
use tokio::sync::watch;

use self::lifecycle::WorkLoop;
use self::observe::{Findings, ObservedRuntime};
use self::prepare::PodSetup;
use self::publish_view::Published;
use self::record::RecordFile;
use self::report::StatusReport;
use self::retries::RetryTimes;
use crate::context::{Desired, WorkerContext};
use crate::mirror::MirrorReconciler;

/// Time until the next pass after an error of this pod, before jitter (`pkg/kubelet/pod_workers.go: workerBackOffPeriod`).
const ERROR_WAIT: Duration = Duration::from_secs(10);

/// The worker of one pod.
pub struct Worker {
    ctx: Arc<WorkerContext>,
    pod_ref: PodRef,
    desired: watch::Receiver<Desired>,
    // The desired pod of the current or last pass.
    pod: Arc<Pod>,
    record: RecordFile,
    observed: ObservedRuntime,
    status_report: StatusReport,
    published: Published,
    retries: RetryTimes,
    setup: PodSetup,
    // Reconciles the mirror of a static pod that is to run.
    mirror: Option<MirrorReconciler>,
    work_loop: WorkLoop,
}

/// The input of one pass.
pub(crate) struct Pass {
    pod: Arc<Pod>,
    runtime: SharedPodRuntime,
    probes: ProbeResults,
    findings: Findings,
    status: PodStatus,
}

impl Worker {
    /// Returns a worker for `desired`, which continues from `record` after a restart.
    #[must_use]
    pub fn new(
        ctx: Arc<WorkerContext>,
        pod_ref: PodRef,
        desired: watch::Receiver<Desired>,
        record: Option<PodRecord>,
    ) -> Self {
        let wakeup = ctx.control.wakeups.register(&pod_ref.uid);
        let pod = Arc::clone(&desired.borrow().pod);
        let is_restored = record.is_some();
        let mut record = record.unwrap_or_default();
        if is_restored {
            let memory = record.probes.iter().map(|(c, t, m)| ((c.clone(), *t), m.clone())).collect();
            ctx.probes.restore(&pod_ref.uid, memory);
        } else {
            record.accepted = ctx.clock.boot();
        }
        let age = ctx.clock.boot().saturating_sub(record.accepted);
        let accepted = ctx.clock.wall().checked_sub(age).unwrap_or_else(|_| ctx.clock.wall());
        // Versions go on where those of a previous pod with this UID ended: status-reporter keeps the newest.
        let version = u64::try_from(ctx.clock.boot().as_nanos()).unwrap_or_default();
        Self {
            work_loop: WorkLoop::new(wakeup, &pod_ref, is_restored),
            published: Published::new(unix_ns(accepted)),
            desired,
            pod,
            record: RecordFile::new(Arc::clone(&ctx.checkpoints), pod_ref.clone(), record),
            observed: ObservedRuntime::default(),
            status_report: StatusReport::new(version),
            retries: RetryTimes::default(),
            setup: PodSetup::default(),
            mirror: None,
            pod_ref,
            ctx,
        }
    }

    // A copy: with one read guard held, a second one would block behind a pod manager that waits to write.
    pub(super) fn desired(&self) -> Desired {
        self.desired.borrow().clone()
    }

    // `namespace/name`, for log lines.
    pub(super) fn name(&self) -> String {
        format!("{}/{}", self.pod_ref.namespace, self.pod_ref.name)
    }

    pub(super) fn phase(&self) -> &'static str {
        match &self.record.termination {
            None => "sync",
            Some(t) if t.finished => "finished",
            Some(t) if t.stopped => "terminated",
            Some(_) => "terminating",
        }
    }
}

/// Returns `d`, increased by a random part of up to one half.
pub(crate) fn jitter(d: Duration) -> Duration {
    worker::jitter(d, rand::rng().random_range(0.0..1.0))
}
