//! Checks the machine, and starts the tasks that keep the limits of its cgroups.

use std::path::Path;
use std::sync::Arc;

use pod_sync_clients::{EventType, Events};
use pod_sync_node_object::{
    EnforcedReservation, Machine, MachineWarning, NodeCgroups, ProcessCgroups, RuntimeState,
};
use tokio::sync::watch;

use super::Agent;
use crate::args::Args;

impl Agent {
    /// Writes the allocations that changed last to the files that a kubelet reads.
    pub(crate) async fn write_allocations(&self) {
        self.ctx.checkpoints.allocations.write_files().await;
    }

    /// Returns the error that stopped this process, if one did.
    pub(crate) fn refusal(&self) -> anyhow::Result<()> {
        match self.refusal.get() {
            Some(error) => Err(anyhow::Error::msg(quintlet_kit::error_chain(error))),
            None => Ok(()),
        }
    }

    /// Starts the poll of the runtime, which sets up the cgroups of the node, and the tasks that keep these cgroups.
    pub(super) fn start_cgroups(
        &self,
        reservations: Vec<EnforcedReservation>,
        runtime_state: watch::Sender<RuntimeState>,
    ) {
        let (ctx, stop, resources) = (&self.ctx, &self.stop, &self.args.resources);
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
                // There is no other writer.
                let _ = refusal.set(error);
                stop.cancel();
            }
        });
    }
}

/// Checks that the machine is what the configuration requires, and sets kernel tunables.
pub(super) fn check(args: &Args, cgroup_v2: bool) -> anyhow::Result<Vec<MachineWarning>> {
    let rules = args.machine.rules(args.resources.memory_swap_behavior == "LimitedSwap");
    if args.machine.has_defaults_without_file() {
        tracing::info!(
            fail_swap_on = rules.fail_swap_on,
            fail_cgroup_v1 = rules.fail_cgroup_v1,
            set_kernel_tunables = rules.set_kernel_tunables,
            "no KubeletConfiguration, using requirements that any machine fulfils"
        );
    }
    let machine =
        Machine { root: Path::new("/"), cgroup_v2, tmpfs_noswap: pod_sync_node_object::has_tmpfs_noswap };
    Ok(machine.check(rules)?)
}

/// Records events of the Node about the machine. Nothing is degraded, so the log has no warning.
pub(super) fn warn(warnings: &[MachineWarning], events: &Events, node: &str) {
    for MachineWarning { reason, message } in warnings {
        tracing::info!(reason, message, "recording an event about the machine");
        events.node_unlogged(node, EventType::Warning, reason, message);
    }
}
