//! Statistics: `/stats/summary`, `/metrics/resource`, `/metrics/cadvisor`.
//!
//! Statistics of pods and containers come from the CRI, and from cgroups where it has none (`gather`). Those
//! of the node come from `/proc`, and its memory from the root cgroup, as for evictions. Volumes belong to
//! root, so pod-sync measures them.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod cadvisor;
mod cri_stats;
mod disk;
mod families;
mod gather;
mod host;
mod machine;
mod machine_info;
mod node_cgroups;
mod node_disks;
mod paths;
mod prometheus;
mod rates;
mod runtime_stats;
mod summary;
mod system;

use std::sync::Arc;

use http::StatusCode;
use node_api_base::answer::{Answer, METRICS_TEXT, with_type};
use node_api_base::services::Services;
use quintlet_kit::clock::Clock;
use quintlet_kit::task;

use gather::PodStatistics;
use machine::MachineStatistics;
pub use paths::{StatsPaths, SystemCgroups};
use system::SystemContainers;

/// The sources of statistics.
#[derive(Debug)]
pub struct Stats {
    /// Name of the Node object.
    pub node_name: String,
    /// Directories and cgroups to read.
    pub paths: StatsPaths,
    /// Wall time and CLOCK_BOOTTIME.
    pub clock: Clock,
    machine: MachineStatistics,
    pods: PodStatistics,
    system: SystemContainers,
}

impl Stats {
    /// Creates the statistics of a node.
    #[must_use]
    pub fn new(node_name: String, paths: StatsPaths, clock: Clock) -> Self {
        let pods = PodStatistics::new(paths.clone(), clock.clone());
        let system = SystemContainers::new(paths.clone(), clock.wall());
        let machine = MachineStatistics::new(&paths.cgroups, clock.clone());
        Self { node_name, paths, clock, machine, pods, system }
    }

    /// Responds to `/metrics/resource`.
    pub async fn resource(self: &Arc<Self>, node: &Services) -> Answer {
        let pods = self.pods.all(node, false).await;
        let stats = Arc::clone(self);
        let text = task::blocking(move || {
            prometheus::resources(pods.as_deref().ok().map(|pods| (stats.machine.read(), pods)))
        });
        with_type(StatusCode::OK, METRICS_TEXT, text.await)
    }
}
