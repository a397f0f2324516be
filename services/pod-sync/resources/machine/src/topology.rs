//! Where the logical CPUs of a machine are (`pkg/kubelet/cm/cpumanager/topology`).

use std::collections::{BTreeMap, BTreeSet};

use crate::cpu_set::CpuSet;
use crate::ids::{CacheId, CoreId, CpuId, NumaNode, SocketId};
use crate::numa_nodes::NumaNodes;

/// The place of a logical CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuPlace {
    /// NUMA node of the CPU.
    pub node: NumaNode,
    /// Physical package of the CPU.
    pub socket: SocketId,
    /// Last-level cache of the CPU.
    pub cache: CacheId,
    /// Physical core of the CPU.
    pub core: CoreId,
}

/// The logical CPUs that are online, with their places.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpuTopology {
    places: BTreeMap<CpuId, CpuPlace>,
    nodes: NumaNodes,
    sockets: usize,
    caches: usize,
    cores: usize,
}

impl CpuTopology {
    /// Returns the topology of these CPUs.
    #[must_use]
    pub fn new(places: BTreeMap<CpuId, CpuPlace>) -> Self {
        let nodes = places.values().map(|place| place.node).collect();
        let sockets = count(&places, |place| place.socket);
        let caches = count(&places, |place| place.cache);
        let cores = count(&places, |place| place.core);
        Self { places, nodes, sockets, caches, cores }
    }

    /// Returns the CPUs with their places.
    #[must_use]
    pub fn places(&self) -> &BTreeMap<CpuId, CpuPlace> {
        &self.places
    }

    /// Returns all CPUs.
    #[must_use]
    pub fn cpus(&self) -> CpuSet {
        self.places.keys().copied().collect()
    }

    /// Returns the CPUs whose place fulfils a condition.
    pub fn cpus_where(&self, condition: impl Fn(&CpuPlace) -> bool) -> CpuSet {
        self.places.iter().filter(|(_, place)| condition(place)).map(|(cpu, _)| *cpu).collect()
    }

    /// Returns the NUMA nodes that have CPUs.
    #[must_use]
    pub fn nodes(&self) -> NumaNodes {
        self.nodes
    }

    /// Returns the number of sockets.
    #[must_use]
    pub fn socket_count(&self) -> usize {
        self.sockets
    }

    /// Returns the sockets of NUMA nodes.
    #[must_use]
    pub fn sockets_of(&self, nodes: NumaNodes) -> BTreeSet<SocketId> {
        self.places.values().filter(|place| nodes.contains(place.node)).map(|place| place.socket).collect()
    }

    /// Returns the mean number of CPUs per core, rounded down; 0 without CPUs.
    #[must_use]
    pub fn cpus_per_core(&self) -> usize {
        self.places.len().checked_div(self.cores).unwrap_or(0)
    }

    /// Returns the mean number of CPUs per socket, rounded down; 0 without CPUs.
    #[must_use]
    pub fn cpus_per_socket(&self) -> usize {
        self.places.len().checked_div(self.sockets).unwrap_or(0)
    }

    /// Returns the mean number of CPUs per last-level cache, rounded down; 0 without CPUs.
    #[must_use]
    pub fn cpus_per_cache(&self) -> usize {
        self.places.len().checked_div(self.caches).unwrap_or(0)
    }
}

fn count<T: Ord>(places: &BTreeMap<CpuId, CpuPlace>, part: impl Fn(&CpuPlace) -> T) -> usize {
    places.values().map(part).collect::<BTreeSet<T>>().len()
}
