//! Who has memory on which NUMA nodes.

use std::collections::{BTreeMap, BTreeSet};

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

/// The memory that a pod has as a whole.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct PodMemory {
    blocks: Vec<MemoryBlock>,
    /// Containers whose part no other container of the pod uses. Empty after a restart, until the pod is
    /// seen: the state file does not have them.
    exclusive: BTreeSet<String>,
}

/// The memory of containers and of whole pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryAssignments {
    containers: BTreeMap<String, BTreeMap<String, Vec<MemoryBlock>>>,
    pods: BTreeMap<String, PodMemory>,
}

impl MemoryAssignments {
    /// Returns the memory that a container has alone, or with others of its pod.
    #[must_use]
    pub fn container(&self, pod: &str, container: &str) -> Option<&[MemoryBlock]> {
        self.containers.get(pod)?.get(container).map(Vec::as_slice)
    }

    /// Returns whether a container shares its memory with others of its pod.
    #[must_use]
    pub fn is_pod_shared(&self, pod: &str, container: &str) -> bool {
        self.pods.get(pod).is_some_and(|own| !own.exclusive.contains(container))
    }

    /// Returns the memory that a pod has as a whole.
    #[must_use]
    pub fn pod(&self, pod: &str) -> Option<&[MemoryBlock]> {
        self.pods.get(pod).map(|own| own.blocks.as_slice())
    }

    /// Returns the pods that have memory as a whole: UID, blocks.
    pub fn pods(&self) -> impl Iterator<Item = (&str, &[MemoryBlock])> {
        self.pods.iter().map(|(pod, own)| (pod.as_str(), own.blocks.as_slice()))
    }

    /// Returns the containers that have memory, alone or with others of their pod: UID of the pod, name of
    /// the container, blocks.
    pub fn all(&self) -> impl Iterator<Item = (&str, &str, &[MemoryBlock])> {
        self.containers.iter().flat_map(|(pod, containers)| {
            containers.iter().map(move |(name, blocks)| (pod.as_str(), name.as_str(), blocks.as_slice()))
        })
    }

    /// Returns what is taken from the NUMA nodes: the memory of whole pods, and that of the containers of
    /// other pods. The name of the container is empty for a pod.
    pub(crate) fn taken(&self) -> impl Iterator<Item = (&str, &str, &[MemoryBlock])> {
        let pods = self.pods().map(|(pod, blocks)| (pod, "", blocks));
        pods.chain(self.all().filter(|(pod, ..)| !self.pods.contains_key(*pod)))
    }

    /// Sets the memory of a container.
    pub fn insert(&mut self, pod: &str, container: &str, blocks: Vec<MemoryBlock>) {
        self.containers.entry(pod.to_owned()).or_default().insert(container.to_owned(), blocks);
    }

    /// Sets the memory that a pod has as a whole.
    pub fn insert_pod(&mut self, pod: &str, blocks: Vec<MemoryBlock>) {
        self.pods.insert(pod.to_owned(), PodMemory { blocks, exclusive: BTreeSet::new() });
    }

    /// Records which containers have their part of the pod's memory alone.
    pub(crate) fn set_exclusive(&mut self, pod: &str, exclusive: BTreeSet<String>) {
        if let Some(own) = self.pods.get_mut(pod) {
            own.exclusive = exclusive;
        }
    }

    /// Removes a container, and returns the memory that is free then: that of a whole pod after its last
    /// container.
    pub(crate) fn remove(&mut self, pod: &str, container: &str) -> Option<Vec<MemoryBlock>> {
        let containers = self.containers.get_mut(pod)?;
        let removed = containers.remove(container);
        let is_last = containers.is_empty();
        if is_last {
            self.containers.remove(pod);
        }
        match self.pods.contains_key(pod) {
            false => removed,
            true => is_last.then(|| self.remove_pod(pod)),
        }
    }

    /// Removes the pods that have memory as a whole and no container, and returns the memory of each.
    pub(crate) fn remove_ended_pods(&mut self) -> Vec<Vec<MemoryBlock>> {
        let containers = &self.containers;
        let ended = self.pods.extract_if(.., |pod, _| !containers.contains_key(pod));
        ended.map(|(_, own)| own.blocks).collect()
    }

    /// Removes a pod that has memory as a whole, and returns that memory.
    pub(crate) fn remove_pod(&mut self, pod: &str) -> Vec<MemoryBlock> {
        let Some(own) = self.pods.remove(pod) else { return Vec::new() };
        self.containers.remove(pod);
        own.blocks
    }
}
