//! What an admission did, for metrics.

use std::collections::BTreeMap;

/// A value of the label `scope` or `source`, and one of the other label of a metric.
pub(crate) type Labels = (&'static str, &'static str);

/// Resources in the label `resource_name`.
pub(crate) const CPU: &str = "cpu";
pub(crate) const MEMORY: &str = "memory";
/// Source of an allocation in the label `source`, and the aligned object in the label `scope`.
pub(crate) const NODE: &str = "node";
pub(crate) const POD: &str = "pod";
pub(crate) const CONTAINER: &str = "container";
/// Boundary of an alignment in the label `boundary`.
pub(crate) const NUMA_NODE: &str = "numa_node";
pub(crate) const PHYSICAL_CPU: &str = "physical_cpu";
pub(crate) const UNCORE_CACHE: &str = "uncore_cache";
/// Kind of a container's assignment in the label `assignment_type`.
pub(crate) const NODE_EXCLUSIVE: &str = "node_exclusive";
pub(crate) const POD_EXCLUSIVE: &str = "pod_exclusive";
pub(crate) const POD_SHARED: &str = "pod_shared";

/// Counts of one admission.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AdmissionCounts {
    /// Containers that request exclusive CPUs.
    pub(crate) cpus: u64,
    /// Containers, and pods as a whole, that request memory of certain NUMA nodes.
    pub(crate) memory: u64,
    /// Allocations that are aligned, by scope and boundary.
    pub(crate) aligned: Tally,
    /// Allocations that could not be aligned, by scope and boundary.
    pub(crate) unaligned: Tally,
    /// New allocations, by resource and source.
    pub(crate) allocations: Tally,
    /// Failed allocations, by resource and source.
    pub(crate) errors: Tally,
    /// Containers with a new allocation, by resource and type.
    pub(crate) assignments: Tally,
}

/// Numbers by labels.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Tally(pub(crate) BTreeMap<Labels, u64>);

impl Tally {
    pub(crate) fn add(&mut self, first: &'static str, second: &'static str) {
        let count = self.0.entry((first, second)).or_default();
        *count = count.saturating_add(1);
    }
}
