//! Who has which CPUs.

use std::collections::{BTreeMap, BTreeSet};

use pod_sync_machine::CpuSet;

/// The CPUs that a pod has as a whole.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct PodCpus {
    cpus: CpuSet,
    /// Containers whose part no other container of the pod uses. Empty after a restart, until the pod is
    /// seen: the state file does not have them.
    exclusive: BTreeSet<String>,
}

/// The content of the state file: shared CPUs, and the CPUs of containers and of whole pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpuAssignments {
    /// CPUs that containers without CPUs of their own share, with the reserved ones (`defaultCpuSet`).
    pub shared: CpuSet,
    entries: BTreeMap<String, BTreeMap<String, CpuSet>>,
    pods: BTreeMap<String, PodCpus>,
}

impl CpuAssignments {
    /// Returns assignments without CPUs of containers or pods.
    #[must_use]
    pub fn new(shared: CpuSet) -> Self {
        Self { shared, ..Self::default() }
    }

    /// Returns the CPUs that a container has alone, or with others of its pod.
    #[must_use]
    pub fn container(&self, pod: &str, container: &str) -> Option<&CpuSet> {
        self.entries.get(pod)?.get(container)
    }

    /// Returns whether a container shares its CPUs with others of its pod.
    #[must_use]
    pub fn is_pod_shared(&self, pod: &str, container: &str) -> bool {
        self.pods.get(pod).is_some_and(|own| !own.exclusive.contains(container))
    }

    /// Returns the CPUs that a pod has as a whole.
    #[must_use]
    pub fn pod(&self, pod: &str) -> Option<&CpuSet> {
        self.pods.get(pod).map(|own| &own.cpus)
    }

    /// Returns the pods that have CPUs as a whole: UID, CPUs.
    pub fn pods(&self) -> impl Iterator<Item = (&str, &CpuSet)> {
        self.pods.iter().map(|(pod, own)| (pod.as_str(), &own.cpus))
    }

    /// Returns the containers that have CPUs, alone or with others of their pod: UID of the pod, name of the
    /// container, CPUs.
    pub fn containers(&self) -> impl Iterator<Item = (&str, &str, &CpuSet)> {
        self.entries.iter().flat_map(|(pod, containers)| {
            containers.iter().map(move |(container, cpus)| (pod.as_str(), container.as_str(), cpus))
        })
    }

    /// Gives a container exclusive CPUs. Those are no longer shared.
    pub fn assign(&mut self, pod: &str, container: &str, cpus: CpuSet) {
        self.shared = self.shared.difference(&cpus);
        self.restore(pod, container, cpus);
    }

    /// Gives a pod CPUs as a whole, and its containers parts of them.
    pub(crate) fn assign_pod(&mut self, pod: &str, cpus: CpuSet, parts: BTreeMap<String, CpuSet>) {
        self.shared = self.shared.difference(&cpus);
        self.restore_pod(pod, cpus);
        self.entries.insert(pod.to_owned(), parts);
    }

    /// Records which containers have their part of the pod's CPUs alone.
    pub(crate) fn set_exclusive(&mut self, pod: &str, exclusive: BTreeSet<String>) {
        if let Some(own) = self.pods.get_mut(pod) {
            own.exclusive = exclusive;
        }
    }

    /// Records the CPUs of a container without a change of the shared ones.
    pub(crate) fn restore(&mut self, pod: &str, container: &str, cpus: CpuSet) {
        self.entries.entry(pod.to_owned()).or_default().insert(container.to_owned(), cpus);
    }

    /// Records the CPUs of a pod as a whole without a change of the shared ones.
    pub(crate) fn restore_pod(&mut self, pod: &str, cpus: CpuSet) {
        self.pods.insert(pod.to_owned(), PodCpus { cpus, exclusive: BTreeSet::new() });
    }

    /// Ends the assignment of a container. Its CPUs are shared again, except those that another container of
    /// the pod has, too: it got them from an init container. The CPUs that a pod has as a whole are shared
    /// again after its last container.
    pub fn release(&mut self, pod: &str, container: &str) {
        let Some(containers) = self.entries.get_mut(pod) else { return };
        let Some(released) = containers.remove(container) else { return };
        let in_use = containers.values().fold(CpuSet::new(), |in_use, cpus| in_use.union(cpus));
        let is_last = containers.is_empty();
        if is_last {
            self.entries.remove(pod);
        }
        if !self.pods.contains_key(pod) {
            self.shared = self.shared.union(&released.difference(&in_use));
        } else if is_last {
            self.release_pod(pod);
        }
    }

    /// Ends the assignments of pods that have CPUs as a whole and no container. A kubelet removes the last
    /// container, frees the CPUs and removes the pod with three writes, so that the CPUs of such a pod may be
    /// shared already, or those of another pod.
    pub(crate) fn release_ended_pods(&mut self) {
        let entries = &self.entries;
        let ended: Vec<_> = self.pods.extract_if(.., |pod, _| !entries.contains_key(pod)).collect();
        let of_pods = self.pods.values().map(|own| &own.cpus);
        let held = self.entries.values().flat_map(BTreeMap::values).chain(of_pods);
        let held = held.fold(CpuSet::new(), |held, cpus| held.union(cpus));
        for (_, own) in ended {
            self.shared = self.shared.union(&own.cpus.difference(&held));
        }
    }

    /// Ends all assignments of a pod that has CPUs as a whole.
    pub(crate) fn release_pod(&mut self, pod: &str) {
        let Some(own) = self.pods.remove(pod) else { return };
        self.entries.remove(pod);
        self.shared = self.shared.union(&own.cpus);
    }
}
