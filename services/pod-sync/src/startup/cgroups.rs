//! The tasks that keep the cgroups of the node.

use std::sync::Arc;

use pod_sync_layout::RuntimeState;
use pod_sync_node_object::{EnforcedReservation, NodeCgroups, ProcessCgroups};
use pod_sync_worker::context::WorkerContext;
use tokio::sync::watch;

use super::process_tasks::ProcessTasks;
use crate::args::Args;
use crate::start_refusal::StartRefusal;

/// Mount point of the cgroup hierarchies.
pub(crate) const CGROUP_FS: &str = "/sys/fs/cgroup";

/// Starts the tasks that keep the cgroups of the node.
pub(super) struct CgroupTasks<'a> {
    pub(super) tasks: &'a ProcessTasks,
    pub(super) ctx: &'a Arc<WorkerContext>,
    pub(super) args: &'a Args,
}

impl CgroupTasks<'_> {
    /// Starts the poll of the runtime, which sets up the cgroups of the node, and the tasks that keep these
    /// cgroups.
    pub(super) fn start(
        &self,
        reservations: Vec<EnforcedReservation>,
        runtime_state: watch::Sender<RuntimeState>,
    ) {
        let (ctx, stop) = (self.ctx, &self.tasks.stop);
        let resources = &self.args.resources;
        let cgroups = NodeCgroups::new(
            ctx.environment.cgroups.clone(),
            pod_sync_node_object::pod_limits(&ctx.node.settings),
            reservations,
            ctx.reporting.events.clone(),
            ctx.node.settings.node_name.clone(),
        );
        self.tasks.spawn("node-cgroups", cgroups.clone().keep(ctx.runtime.state.clone(), stop.clone()));
        let (own, system) = (&resources.kubelet_cgroups, &resources.system_cgroups);
        let paths = self.args.common.paths();
        if let Some(processes) = ProcessCgroups::new(&ctx.environment.cgroups, own, system, paths) {
            self.tasks.spawn("process-cgroups", processes.keep(stop.clone()));
        }
        let (runtime, clock) = (ctx.runtime.calls.clone(), ctx.clock.clone());
        let poll = pod_sync_node_object::poll_runtime(runtime, clock, runtime_state, cgroups, stop.clone());
        let stop_with = self.tasks.stopper();
        self.tasks.spawn("runtime-poll", async move {
            if let Err(error) = poll.await {
                stop_with(StartRefusal::Enforcement(error));
            }
        });
    }
}
