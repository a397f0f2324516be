//! Checks the machine.

use std::path::Path;

use pod_sync_clients::{EventType, Events};
use pod_sync_node_object::{Machine, MachineWarning};

use crate::args::Args;

/// Checks that the machine is what the configuration requires, and sets kernel tunables.
pub(super) fn check(args: &Args, cgroup_v2: bool) -> anyhow::Result<Vec<MachineWarning>> {
    let limited_swap = args.resources.memory_swap_behavior == "LimitedSwap";
    let rules = args.machine.rules(limited_swap, args.resources.tolerates_user_namespace());
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
