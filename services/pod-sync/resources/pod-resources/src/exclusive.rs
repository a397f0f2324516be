//! Exclusive CPUs, and memory on NUMA nodes.

use std::fmt;

/// Memory or huge pages on NUMA nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryBlock {
    /// `memory`, or `hugepages-` and a size.
    pub kind: String,
    /// Size in bytes.
    pub bytes: u64,
    /// The NUMA nodes that the block is on.
    pub numa_nodes: Vec<i64>,
}

/// The assignments of the CPU manager and of the memory manager. Pods are named by their UID.
pub trait ExclusiveResources: Send + Sync + fmt::Debug {
    /// Returns the exclusive CPUs of a container (`GetExclusiveCPUs`).
    fn cpus(&self, pod: &str, container: &str) -> Vec<i64>;

    /// Returns the memory of a container (`GetMemory`).
    fn memory(&self, pod: &str, container: &str) -> Vec<MemoryBlock>;

    /// Returns the CPUs that a pod has as a whole, by its pod-level resources.
    fn pod_cpus(&self, pod: &str) -> Vec<i64>;

    /// Returns the memory that a pod has as a whole, by its pod-level resources.
    fn pod_memory(&self, pod: &str) -> Vec<MemoryBlock>;

    /// Returns the CPUs that containers may have exclusively, assigned or not.
    fn allocatable_cpus(&self) -> Vec<i64>;

    /// Returns the memory that containers may have, assigned or not.
    fn allocatable_memory(&self) -> Vec<MemoryBlock>;
}
