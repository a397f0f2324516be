//! The exclusive CPUs and the memory of containers, for the PodResources API.

use pod_sync_cpus::ContainerCpus;
use pod_sync_machine::{CpuSet, NumaNodes};
use pod_sync_memory::MemoryManager;
use pod_sync_placement::{NodePlacement, Placement};
use pod_sync_pod_resources::{ExclusiveResources, MemoryBlock};

/// The assignments of the CPU manager and the memory manager, of containers and of whole pods; none with the
/// policies `none` and `None`.
#[derive(Debug, Clone)]
pub(crate) struct PlacedResources(pub(crate) Placement);

impl ExclusiveResources for PlacedResources {
    fn cpus(&self, pod: &str, container: &str) -> Vec<i64> {
        self.0.read(|node| match node.container_cpus(pod, container) {
            Some(ContainerCpus::Exclusive(cpus)) => numbers(&cpus),
            Some(ContainerCpus::PodShared(_) | ContainerCpus::Shared(_)) | None => Vec::new(),
        })
    }

    fn memory(&self, pod: &str, container: &str) -> Vec<MemoryBlock> {
        self.0.read(|node| assigned_memory(node, pod, container))
    }

    fn pod_cpus(&self, pod: &str) -> Vec<i64> {
        self.0.read(|node| {
            let own = node.cpus().and_then(|cpus| cpus.assignments().pod(pod));
            own.map(numbers).unwrap_or_default()
        })
    }

    fn pod_memory(&self, pod: &str) -> Vec<MemoryBlock> {
        self.0.read(|node| {
            let own = node.memory().and_then(|memory| memory.assignments().pod(pod));
            blocks(own.unwrap_or_default())
        })
    }

    fn allocatable_cpus(&self) -> Vec<i64> {
        let all = self.0.machine().cpus.cpus();
        self.0.read(|node| {
            node.cpus().map(|cpus| numbers(&all.difference(cpus.policy().reserved()))).unwrap_or_default()
        })
    }

    fn allocatable_memory(&self) -> Vec<MemoryBlock> {
        self.0.read(|node| node.memory().map(allocatable).unwrap_or_default())
    }
}

/// Returns the memory that a container has alone. That which it shares with others of its pod is in the
/// memory of the pod.
fn assigned_memory(node: &NodePlacement, pod: &str, container: &str) -> Vec<MemoryBlock> {
    let Some(memory) = node.memory() else { return Vec::new() };
    let assignments = memory.assignments();
    if assignments.is_pod_shared(pod, container) {
        return Vec::new();
    }
    blocks(assignments.container(pod, container).unwrap_or_default())
}

fn blocks(blocks: &[pod_sync_memory::MemoryBlock]) -> Vec<MemoryBlock> {
    let block = |block: &pod_sync_memory::MemoryBlock| MemoryBlock {
        kind: block.kind.to_string(),
        bytes: block.bytes,
        numa_nodes: nodes(block.nodes),
    };
    blocks.iter().map(block).collect()
}

fn allocatable(memory: &MemoryManager) -> Vec<MemoryBlock> {
    let tables = memory.tables().0.iter();
    tables
        .flat_map(|(number, table)| {
            table.kinds.iter().map(|(kind, table)| MemoryBlock {
                kind: kind.to_string(),
                bytes: table.allocatable,
                numa_nodes: vec![number.number().into()],
            })
        })
        .collect()
}

fn numbers(cpus: &CpuSet) -> Vec<i64> {
    cpus.iter().map(|cpu| cpu.number().into()).collect()
}

fn nodes(nodes: NumaNodes) -> Vec<i64> {
    nodes.iter().map(|node| node.number().into()).collect()
}
