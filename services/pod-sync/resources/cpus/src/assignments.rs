//! Who has which CPUs.

use std::collections::BTreeMap;

use pod_sync_machine::CpuSet;

/// The content of the state file: shared CPUs, and the exclusive CPUs of containers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpuAssignments {
    /// CPUs that containers without exclusive ones share, with the reserved ones (`defaultCpuSet`).
    pub shared: CpuSet,
    exclusive: BTreeMap<String, BTreeMap<String, CpuSet>>,
}

impl CpuAssignments {
    /// Returns assignments without exclusive CPUs.
    #[must_use]
    pub fn new(shared: CpuSet) -> Self {
        Self { shared, exclusive: BTreeMap::new() }
    }

    /// Returns the exclusive CPUs of a container.
    #[must_use]
    pub fn exclusive(&self, pod: &str, container: &str) -> Option<&CpuSet> {
        self.exclusive.get(pod)?.get(container)
    }

    /// Returns the exclusive CPUs of all containers: UID of the pod, name of the container, CPUs.
    pub fn all_exclusive(&self) -> impl Iterator<Item = (&str, &str, &CpuSet)> {
        self.exclusive.iter().flat_map(|(pod, containers)| {
            containers.iter().map(move |(container, cpus)| (pod.as_str(), container.as_str(), cpus))
        })
    }

    /// Gives a container exclusive CPUs. Those are no longer shared.
    pub fn assign(&mut self, pod: &str, container: &str, cpus: CpuSet) {
        self.shared = self.shared.difference(&cpus);
        self.restore(pod, container, cpus);
    }

    /// Records the exclusive CPUs of a container without a change of the shared ones.
    pub(crate) fn restore(&mut self, pod: &str, container: &str, cpus: CpuSet) {
        self.exclusive.entry(pod.to_owned()).or_default().insert(container.to_owned(), cpus);
    }

    /// Ends the assignment of a container. Its CPUs are shared again, except those that another container of the pod has, too: it
    /// got them from an init container.
    pub fn release(&mut self, pod: &str, container: &str) {
        let Some(containers) = self.exclusive.get_mut(pod) else { return };
        let Some(released) = containers.remove(container) else { return };
        let in_use = containers.values().fold(CpuSet::new(), |in_use, cpus| in_use.union(cpus));
        if containers.is_empty() {
            self.exclusive.remove(pod);
        }
        self.shared = self.shared.union(&released.difference(&in_use));
    }
}
