//! Machines of regular shape for the tests of this crate.

use std::collections::BTreeMap;

use pod_sync_machine::{CacheId, CoreId, CpuId, CpuPlace, CpuTopology, NumaNode, SocketId};

/// A machine whose parts all have as many parts of the next kind.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) sockets: u32,
    pub(crate) nodes: u32,
    pub(crate) caches_per_node: u32,
    pub(crate) cores_per_cache: u32,
    pub(crate) threads: u32,
}

const fn shape(sockets: u32, nodes: u32, caches_per_node: u32, cores_per_cache: u32, threads: u32) -> Shape {
    Shape { sockets, nodes, caches_per_node, cores_per_cache, threads }
}

/// CPUs 0-7, of which 4-7 are the siblings of 0-3.
pub(crate) const SINGLE_SOCKET_SMT: Shape = shape(1, 1, 1, 4, 2);
/// CPUs 0-3 and 8-11 are on the first socket.
pub(crate) const DUAL_SOCKET: Shape = shape(2, 2, 1, 4, 2);
pub(crate) const FOUR_NODES: Shape = shape(2, 4, 1, 4, 2);
pub(crate) const EIGHT_NODES: Shape = shape(2, 8, 1, 4, 1);
pub(crate) const FOUR_SOCKETS_IN_TWO_NODES: Shape = shape(4, 2, 1, 4, 2);
/// One socket with four caches of four CPUs.
pub(crate) const FOUR_CACHES: Shape = shape(1, 1, 4, 2, 2);

/// Returns the machine. Cores are numbered one after the other, and second threads after all first ones.
pub(crate) fn machine(shape: Shape) -> CpuTopology {
    let per_node = shape.caches_per_node * shape.cores_per_cache;
    let cores = shape.nodes * per_node;
    let place = |core: u32| CpuPlace {
        node: NumaNode::try_from(u64::from(core / per_node)).unwrap(),
        socket: SocketId::new(i64::from(core / (cores / shape.sockets))),
        cache: CacheId::new(i64::from(core / shape.cores_per_cache)),
        core: CoreId::new(core),
    };
    let cpus = (0..shape.threads).flat_map(|t| (0..cores).map(move |core| (t * cores + core, core)));
    CpuTopology::new(cpus.map(|(cpu, core)| (CpuId::new(cpu), place(core))).collect::<BTreeMap<_, _>>())
}
