//! The NUMA nodes that can satisfy a request (`generateCPUTopologyHints`).

use pod_sync_machine::{CpuSet, NumaNodes};
use pod_sync_topology::Hint;

use crate::policy::StaticPolicy;

impl StaticPolicy {
    /// Returns a hint for each set of NUMA nodes that has all `reusable` CPUs and enough free ones. Hints
    /// with the fewest nodes that could satisfy the request on an empty machine are preferred; with
    /// `align-by-socket`, those on the fewest sockets, too.
    pub(crate) fn hints_for(&self, available: &CpuSet, reusable: &CpuSet, count: usize) -> Vec<Hint> {
        let all = self.topology().nodes();
        let total = |nodes: NumaNodes| self.cpus_on(nodes, &self.topology().cpus());
        let is_large_enough = |nodes: &NumaNodes| total(*nodes) >= count;
        let fewest = all.subsets().find(is_large_enough).map_or(all.len(), NumaNodes::len);
        let has_enough = |nodes: &NumaNodes| {
            let reused = self.cpus_on(*nodes, reusable);
            reused == reusable.len() && reused.saturating_add(self.cpus_on(*nodes, available)) >= count
        };
        let hint = |nodes: NumaNodes| {
            let is_preferred = nodes.len() == fewest || self.is_on_fewest_sockets(nodes, fewest);
            Hint { nodes: Some(nodes), is_preferred }
        };
        all.subsets().filter(has_enough).map(hint).collect()
    }

    fn cpus_on(&self, nodes: NumaNodes, cpus: &CpuSet) -> usize {
        let places = self.topology().places();
        cpus.iter().filter(|cpu| places.get(cpu).is_some_and(|place| nodes.contains(place.node))).count()
    }

    /// Returns whether nodes are on as few sockets as `fewest` nodes can be, if sockets count
    /// (`isHintSocketAligned`).
    fn is_on_fewest_sockets(&self, nodes: NumaNodes, fewest: usize) -> bool {
        let topology = self.topology();
        let per_socket = topology.nodes().len().checked_div(topology.socket_count()).unwrap_or(0);
        self.options().by_socket
            && per_socket > 0
            && topology.sockets_of(nodes).len() == fewest.div_ceil(per_socket)
    }
}
