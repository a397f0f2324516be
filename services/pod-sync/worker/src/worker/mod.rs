//! The pod worker: syncs and terminates one pod
//! (`pkg/kubelet: SyncPod, SyncTerminatingPod, SyncTerminatedPod`).
//!
//! Each worker is a task, and only this task acts on its pod, one action at a time. Everything else wakes the
//! worker. Each pass takes the newest desired pod, a runtime state no older than the last action, probe
//! memory and back-offs, decides with the functions of [`pod_sync_decisions`], acts, and returns when the
//! next pass is due.
//!
//! [`Worker`] itself is the loop ([`lifecycle`]), the pass of a pod that is to run ([`sync`]), and the order
//! of its actions ([`act`]). The rest are parts, each with the groups of the context that it uses:
//!
//! - [`tracker`] follows the pod. It owns the [`record`], the [observer](observe) of the runtime, the
//!   [`probes`], the [reports](report) to status-reporter, and the [`view`].
//! - [`prepare`], [`sandbox`], [`resize`], [`start`], [`stop`] and [`removal`] perform actions. They borrow
//!   the tracker.
//! - [`terminate`] has the passes of a pod that ends.

mod act;
mod cancellable;
mod claims;
mod container_stop;
mod create;
mod halt;
mod hook_http;
mod hooks;
mod lifecycle;
mod observe;
mod pass;
mod post_start;
mod prepare;
mod probe_targets;
mod probes;
mod record;
mod reject;
mod removal;
mod report;
mod resize;
mod resources;
mod retries;
mod runtime_files;
mod sandbox;
mod setup;
mod start;
mod stop;
mod sync;
mod terminate;
mod termination_message;
mod tracker;
mod view;
mod work_loop;

pub use claims::possible_users;
pub use container_stop::stop_all_containers;
pub use halt::Halt;

use std::sync::Arc;

use self::resources::ResourceProgress;
use self::retries::RetryTimes;
use self::setup::PodSetup;
use self::tracker::Tracker;
use self::work_loop::WorkLoop;
use crate::context::WorkerContext;
use crate::mirror::MirrorReconciler;

/// The worker of one pod.
pub struct Worker {
    ctx: Arc<WorkerContext>,
    tracker: Tracker,
    retries: RetryTimes,
    setup: PodSetup,
    // Reconciles the mirror of a static pod that is to run.
    mirror: Option<MirrorReconciler>,
    work_loop: WorkLoop,
    resources: ResourceProgress,
}
