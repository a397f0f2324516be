//! The tasks that keep the cgroups of the node.

use std::sync::Arc;

use pod_sync_layout::RuntimeState;
use pod_sync_node_object::{EnforcedReservation, NodeCgroups, ProcessCgroups};
use tokio::sync::watch;

use super::Agent;
use crate::start_refusal::StartRefusal;

impl Agent {
    /// Writes the allocations that changed last to the files that a kubelet reads.
    pub(crate) async fn write_allocations(&self) {
        self.ctx.checkpoints.allocations.write_files().await;
    }

    /// Returns the error that stopped this process, if one did.
    pub(crate) fn refusal(&self) -> anyhow::Result<()> {
        match self.refusal.get() {
            Some(StartRefusal::Enforcement(error)) => {
                Err(anyhow::Error::msg(quintlet_kit::error_chain(error)))
            }
            Some(StartRefusal::NodeName(taken)) => Err(anyhow::Error::new(taken.clone())),
            None => Ok(()),
        }
    }

    /// Starts the poll of the runtime, which sets up the cgroups of the node, and the tasks that keep these
    /// cgroups.
    pub(super) fn start_cgroups(
        &self,
        reservations: Vec<EnforcedReservation>,
        runtime_state: watch::Sender<RuntimeState>,
    ) {
        let ctx = &self.ctx;
        let stop = &self.stop;
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
        let (refusal, stop) = (Arc::clone(&self.refusal), stop.clone());
        self.tasks.spawn("runtime-poll", async move {
            if let Err(error) = poll.await {
                // The first refusal counts.
                let _ = refusal.set(StartRefusal::Enforcement(error));
                stop.cancel();
            }
        });
    }
}
