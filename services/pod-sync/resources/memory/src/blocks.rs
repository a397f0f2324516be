//! Who has memory on which NUMA nodes.

use std::collections::BTreeMap;

use pod_sync_machine::NumaNodes;

use crate::kind::MemoryKind;

/// Memory of one kind of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryBlock {
    /// The NUMA nodes it comes from.
    pub nodes: NumaNodes,
    /// Ordinary memory, or huge pages of one size.
    pub kind: MemoryKind,
    /// Size in bytes. For an init container it is without what later containers use again.
    pub bytes: u64,
}

/// The memory of containers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryAssignments(BTreeMap<String, BTreeMap<String, Vec<MemoryBlock>>>);

impl MemoryAssignments {
    /// Returns the memory of a container.
    #[must_use]
    pub fn container(&self, pod: &str, container: &str) -> Option<&[MemoryBlock]> {
        self.0.get(pod)?.get(container).map(Vec::as_slice)
    }

    /// Returns the memory of all containers: UID of the pod, name of the container, blocks.
    pub fn all(&self) -> impl Iterator<Item = (&str, &str, &[MemoryBlock])> {
        self.0.iter().flat_map(|(pod, containers)| {
            containers.iter().map(move |(name, blocks)| (pod.as_str(), name.as_str(), blocks.as_slice()))
        })
    }

    /// Sets the memory of a container.
    pub fn insert(&mut self, pod: &str, container: &str, blocks: Vec<MemoryBlock>) {
        self.0.entry(pod.to_owned()).or_default().insert(container.to_owned(), blocks);
    }

    /// Removes a container, and returns its memory.
    pub(crate) fn remove(&mut self, pod: &str, container: &str) -> Option<Vec<MemoryBlock>> {
        let containers = self.0.get_mut(pod)?;
        let removed = containers.remove(container);
        if containers.is_empty() {
            self.0.remove(pod);
        }
        removed
    }
}
