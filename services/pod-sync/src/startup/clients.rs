//! Starts the clients of the other services and of the runtime.

use std::collections::BTreeSet;
use std::sync::Arc;

use pod_sync_clients::{EventType, ProbeFailure};
use pod_sync_cri_config::dns;
use pod_sync_decisions::containment::ProcessExit;
use pod_sync_layout::RuntimeState;
use pod_sync_node_object::EnforcedReservation;
use pod_sync_worker::context::{Reporting, WorkerContext};
use quintlet_kit::args::paths::Paths;
use quintlet_kit::task::blocking;
use quintlet_model::ids::PodUid;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::cgroups::CgroupTasks;
use super::process_tasks::ProcessTasks;
use crate::args::Args;

/// The reservations to enforce, and the ends of channels that the tasks of the clients own.
pub(crate) struct ClientChannels {
    pub(super) reservations: Vec<EnforcedReservation>,
    pub(super) runtime_state: watch::Sender<RuntimeState>,
    pub(super) probe_failures: mpsc::Receiver<ProbeFailure>,
}

/// Starts the clients of the other services and of the runtime.
pub(crate) struct ClientTasks<'a> {
    pub(super) tasks: &'a ProcessTasks,
    pub(super) ctx: &'a Arc<WorkerContext>,
    pub(super) args: &'a Args,
    pub(super) paths: &'a Paths,
}

impl ClientTasks<'_> {
    /// Starts all clients. The node has the event `Starting` before theirs.
    pub(crate) fn start(&self, inputs: ClientChannels) {
        let (ctx, stop) = (self.ctx, &self.tasks.stop);
        let node_name = ctx.node.settings.node_name.clone();
        ctx.reporting.events.node(&node_name, EventType::Normal, "Starting", "Starting kubelet.");
        self.check_resolv_conf();
        let cgroups = CgroupTasks { tasks: self.tasks, ctx, args: self.args };
        cgroups.start(inputs.reservations, inputs.runtime_state);
        let exit_note = self.paths.exit(pod_sync_containment::CRI_PROXY);
        let (faults, control) = (Arc::clone(&ctx.faults), Arc::clone(&ctx.control));
        let record_crash = move |cause: &ProcessExit, pods: &BTreeSet<PodUid>| {
            faults.containment.record_crash(pod_sync_containment::CRI_PROXY, cause, pods);
            pods.iter().for_each(|uid| control.wakeups.wake(uid));
        };
        let crashes = pod_sync_containment::follow_cri_proxy(
            ctx.runtime.calls.broken(),
            exit_note,
            ctx.clock.clone(),
            record_crash,
            stop.clone(),
        );
        self.tasks.spawn("cri-proxy-crashes", crashes);
        self.tasks.spawn("pleg-follow", Arc::clone(&ctx.runtime.pleg).follow(stop.clone()));
        self.tasks.spawn("probes", Arc::clone(&ctx.probes).run(stop.clone()));
        self.tasks.spawn("statuses", Arc::clone(&ctx.reporting.statuses).run(stop.clone()));
        let failures = report_probe_failures(Arc::clone(&ctx.reporting), inputs.probe_failures, stop.clone());
        self.tasks.spawn("probe-failures", failures);
    }

    // The limits are those of the node, not of a pod, so they are checked once.
    fn check_resolv_conf(&self) {
        let ctx = Arc::clone(self.ctx);
        let Some(path) = ctx.node.settings.resolv_conf.clone() else { return };
        self.tasks.spawn("resolv-conf", async move {
            let file = path.clone();
            let host = blocking(move || dns::read_resolv_conf(&file)).await;
            let settings = &ctx.node.settings;
            if let Some(text) = dns::limits_problem(&path, &host, &settings.cluster_domain) {
                let reason = "CheckLimitsForResolvConf";
                ctx.reporting.events.node(&settings.node_name, EventType::Warning, reason, &text);
            }
        });
    }
}

async fn report_probe_failures(
    reporting: Arc<Reporting>,
    mut failures: mpsc::Receiver<ProbeFailure>,
    stop: CancellationToken,
) {
    loop {
        // Failures in the queue are lost at the end, as events in flight are.
        let failure = tokio::select! {
            () = stop.cancelled() => return,
            failure = failures.recv() => failure,
        };
        let Some(failure) = failure else { return };
        let Some(view) = reporting.views.get(&failure.uid) else { continue };
        let is_init =
            quintlet_model::pod::init_containers(&view.pod).iter().any(|c| c.name == failure.container);
        let list = if is_init { "initContainers" } else { "containers" };
        let path = format!("spec.{list}{{{}}}", failure.container);
        reporting.events.pod(&view.pod, EventType::Warning, &failure.reason, &failure.message, &path);
    }
}
