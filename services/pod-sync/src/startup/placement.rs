//! Opens the managers of CPUs, memory and NUMA nodes.

use pod_sync_layout::NodeSettings;
use pod_sync_placement::{Placement, PlacementContext, ReservedAmounts, StartError};
use quintlet_kit::clock::Clock;

use crate::args::Args;

/// Reads the machine and the state files of the managers.
pub(super) fn open(args: &Args, settings: &NodeSettings, clock: &Clock) -> Result<Placement, StartError> {
    let reserved = ReservedAmounts {
        reserved: &settings.reserved,
        eviction: &settings.eviction_reserve,
        cpus: &args.resources.reserved_cpus,
    };
    Placement::open(PlacementContext {
        settings: args.placement.settings(&args.resources.feature_gates, reserved),
        root_dir: args.root_dir.clone(),
        sys: args.disks.sysfs_dir.clone(),
        clock: clock.clone(),
    })
}
