//! The assignments of a node, and the decision about a pod (`pkg/kubelet/cm/topologymanager: scope`).

use k8s_openapi::api::core::v1::Pod;
use pod_sync_cpus::requests::PodCpuRequests;
use pod_sync_cpus::{AllocateError, ContainerCpus, CpuManager};
use pod_sync_machine::{CpuSet, NumaNodes};
use pod_sync_memory::requests::PodMemoryRequests;
use pod_sync_memory::{MemoryError, MemoryManager};
use pod_sync_topology::{
    Hint, Hints, Merged, PolicyName, RequestScope, TopologyAffinityError, TopologyPolicy, TopologyScope,
};

/// Returns the hints for the devices of a container or of the whole pod.
pub type DeviceHints<'a> = &'a (dyn Fn(RequestScope<'_>) -> Vec<Hints> + Send + Sync);

/// The CPUs and the memory that the containers of a pod request.
#[derive(Debug, Clone)]
pub struct PodRequests {
    cpus: PodCpuRequests,
    memory: Option<PodMemoryRequests>,
}

impl PodRequests {
    /// Returns the requests of a pod.
    #[must_use]
    pub fn of(pod: &Pod) -> Self {
        Self { cpus: pod_sync_cpus::requests(pod), memory: pod_sync_memory::requests(pod) }
    }

    /// Returns the names of the containers in the order of their starts.
    fn containers(&self) -> impl Iterator<Item = &str> {
        self.cpus.containers.iter().map(|request| request.container.as_str())
    }
}

/// Reason why a pod does not get its CPUs or its memory. The texts are the kubelet's, since they become the message of a rejected pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// The resources cannot be aligned on NUMA nodes.
    #[error(transparent)]
    Topology(#[from] TopologyAffinityError),
    /// A container does not get exclusive CPUs.
    #[error(transparent)]
    Cpus(#[from] AllocateError),
    /// A container does not get its memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl PlacementError {
    /// Returns the reason of the pod's rejection (`pkg/kubelet/cm/admission: GetPodAdmitResult`).
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Topology(_) => TopologyAffinityError::REASON,
            Self::Cpus(error) => error.reason(),
            Self::Memory(_) => MemoryError::REASON,
        }
    }

    /// Returns the message of the pod's rejection.
    #[must_use]
    pub fn message(&self) -> String {
        match self {
            Self::Topology(error) => error.to_string(),
            Self::Cpus(error) => error.message(),
            Self::Memory(error) => error.message(),
        }
    }
}

/// Number of allocations that an admission attempted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AttemptCounts {
    /// Containers that request exclusive CPUs.
    pub cpus: u64,
    /// Containers that request memory of certain NUMA nodes.
    pub memory: u64,
}

/// The policies of a node with the assignments of its pods.
#[derive(Debug, Clone)]
pub struct NodePlacement {
    cpus: Option<CpuManager>,
    memory: Option<MemoryManager>,
    topology: TopologyPolicy,
    scope: TopologyScope,
}

impl NodePlacement {
    /// Returns the placement with these managers; `None` for the policies `none` and `None`.
    #[must_use]
    pub fn new(
        cpus: Option<CpuManager>,
        memory: Option<MemoryManager>,
        topology: TopologyPolicy,
        scope: TopologyScope,
    ) -> Self {
        Self { cpus, memory, topology, scope }
    }

    /// Returns the exclusive CPUs of containers; `None` with the policy `none`.
    #[must_use]
    pub fn cpus(&self) -> Option<&CpuManager> {
        self.cpus.as_ref()
    }

    /// Returns the memory of containers; `None` with the policy `None`.
    #[must_use]
    pub fn memory(&self) -> Option<&MemoryManager> {
        self.memory.as_ref()
    }

    /// Returns how resources are aligned.
    #[must_use]
    pub fn topology(&self) -> &TopologyPolicy {
        &self.topology
    }

    /// Returns whether containers are aligned together or on their own.
    #[must_use]
    pub fn scope(&self) -> TopologyScope {
        self.scope
    }

    /// Returns whether a policy is set: otherwise each pod is admitted, and nothing is assigned.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.cpus.is_some() || self.memory.is_some() || self.aligns()
    }

    /// Returns whether devices take part in an alignment.
    #[must_use]
    pub fn aligns(&self) -> bool {
        self.topology.name() != PolicyName::None
    }

    /// Returns the shared CPUs; `None` with the policy `none`.
    #[must_use]
    pub fn shared(&self) -> Option<&CpuSet> {
        self.cpus.as_ref().map(|cpus| &cpus.assignments().shared)
    }

    /// Returns whether a container of the pod has exclusive CPUs.
    #[must_use]
    pub fn has_exclusive_cpus(&self, pod: &str) -> bool {
        let mut all = self.cpus.iter().flat_map(|cpus| cpus.assignments().all_exclusive());
        all.any(|(owner, ..)| owner == pod)
    }

    /// Returns the CPUs of a container; `None` with the policy `none`.
    #[must_use]
    pub fn container_cpus(&self, pod: &str, container: &str) -> Option<ContainerCpus> {
        self.cpus.as_ref().map(|cpus| cpus.cpus(pod, container))
    }

    /// Returns the NUMA nodes of a container's memory; `None` if it comes from any node.
    #[must_use]
    pub fn container_nodes(&self, pod: &str, container: &str) -> Option<NumaNodes> {
        self.memory.as_ref()?.nodes(pod, container)
    }

    /// Gives the containers of a pod their CPUs and memory. Containers that have some keep them.
    ///
    /// # Errors
    /// The reason for the rejection of the pod. No assignment has changed.
    pub fn admit(
        &mut self,
        requests: &PodRequests,
        devices: DeviceHints<'_>,
        counts: &mut AttemptCounts,
    ) -> Result<(), PlacementError> {
        let mut next = self.clone();
        next.end_partial_memory(requests);
        next.allocate(requests, devices, None, counts)?;
        *self = next;
        Ok(())
    }

    /// Returns the containers with exclusive CPUs, then those with memory of certain NUMA nodes: UID of the pod, name of the container.
    pub fn holders(&self) -> impl Iterator<Item = (&str, &str)> {
        let exclusive = self.cpus.iter().flat_map(|cpus| cpus.assignments().all_exclusive());
        let memory = self.memory.iter().flat_map(|memory| memory.assignments().all());
        let exclusive = exclusive.map(|(pod, container, _)| (pod, container));
        exclusive.chain(memory.map(|(pod, container, _)| (pod, container)))
    }

    /// Returns whether a container of the pod has exclusive CPUs, or memory of certain NUMA nodes.
    #[must_use]
    pub fn holds(&self, pod: &str) -> bool {
        self.holders().any(|(owner, _)| owner == pod)
    }

    /// Ends the memory of a pod whose init containers have left theirs to later containers: all of them start again, and would not find
    /// as much.
    fn end_partial_memory(&mut self, requests: &PodRequests) {
        let (Some(memory), Some(requests)) = (&mut self.memory, &requests.memory) else { return };
        let is_held = |name: &str| memory.assignments().container(&requests.pod, name).is_some();
        let wanted = requests.containers.iter().filter(|request| !request.amounts.is_empty());
        let (held, missing): (Vec<_>, Vec<_>) = wanted.partition(|request| is_held(&request.container));
        if !missing.is_empty() {
            for request in held {
                memory.release(&requests.pod, &request.container);
            }
        }
    }

    /// Returns the NUMA nodes for the devices of a container, if the containers before it get what they request.
    ///
    /// # Errors
    /// The reason for the rejection of the pod.
    pub fn nodes_for(
        mut self,
        requests: &PodRequests,
        container: &str,
        devices: DeviceHints<'_>,
    ) -> Result<Option<NumaNodes>, PlacementError> {
        let hint = self.allocate(requests, devices, Some(container), &mut AttemptCounts::default())?;
        Ok(hint.nodes)
    }

    /// Ends the assignments of a pod. Returns whether it had any.
    pub fn release(&mut self, pod: &str) -> bool {
        let held = self.holders().filter(|(owner, _)| *owner == pod);
        let held: Vec<String> = held.map(|(_, container)| container.to_owned()).collect();
        for container in &held {
            if let Some(cpus) = &mut self.cpus {
                cpus.release(pod, container);
            }
            if let Some(memory) = &mut self.memory {
                memory.release(pod, container);
            }
        }
        !held.is_empty()
    }

    /// Ends the assignments of the pods that are not known. Returns whether there were any.
    pub fn retain(&mut self, is_known: impl Fn(&str) -> bool) -> bool {
        let pods = self.holders().map(|(pod, _)| pod);
        let gone: Vec<String> = pods.filter(|pod| !is_known(pod)).map(str::to_owned).collect();
        let mut any = false;
        for pod in &gone {
            any |= self.release(pod);
        }
        any
    }

    /// Ends the memory of the init containers that ended before a container of their pod starts. Returns whether there was any.
    pub fn start(&mut self, requests: &PodRequests, container: &str) -> bool {
        let (Some(memory), Some(requests)) = (&mut self.memory, &requests.memory) else { return false };
        let before = memory.assignments().clone();
        memory.start(requests, container);
        before != *memory.assignments()
    }

    /// Allocates for the containers up to the one with this name, without it; for all if there is no name. Returns the hint for that one.
    fn allocate(
        &mut self,
        requests: &PodRequests,
        devices: DeviceHints<'_>,
        until: Option<&str>,
        counts: &mut AttemptCounts,
    ) -> Result<Hint, PlacementError> {
        let none = Hint { nodes: None, is_preferred: false };
        let of_pod = match self.scope {
            TopologyScope::Pod if self.aligns() => Some(self.merge(requests, RequestScope::Pod, devices)?),
            TopologyScope::Pod | TopologyScope::Container => None,
        };
        for container in requests.containers() {
            let hint = match of_pod {
                Some(hint) => hint,
                None if self.aligns() => self.merge(requests, RequestScope::Container(container), devices)?,
                None => none,
            };
            if until == Some(container) {
                return Ok(hint);
            }
            self.allocate_container(requests, container, hint, counts)?;
        }
        Ok(none)
    }

    fn merge(
        &self,
        requests: &PodRequests,
        scope: RequestScope<'_>,
        devices: DeviceHints<'_>,
    ) -> Result<Hint, TopologyAffinityError> {
        let mut hints = devices(scope);
        hints.extend(self.cpus.iter().map(|cpus| cpus.hints(&requests.cpus, scope)));
        if let (Some(memory), Some(requests)) = (&self.memory, &requests.memory) {
            hints.extend(memory.hints(requests, scope));
        }
        let Merged { hint, is_admitted } = self.topology.merge(&hints);
        if is_admitted { Ok(hint) } else { Err(TopologyAffinityError) }
    }

    fn allocate_container(
        &mut self,
        requests: &PodRequests,
        container: &str,
        hint: Hint,
        counts: &mut AttemptCounts,
    ) -> Result<(), PlacementError> {
        let is_exclusive = requests.cpus.container(container).is_some_and(|request| request.count > 0);
        if let Some(cpus) = self.cpus.as_mut().filter(|_| is_exclusive) {
            counts.cpus = counts.cpus.saturating_add(1);
            cpus.allocate(&requests.cpus, container, hint.nodes)?;
        }
        if let (Some(memory), Some(requests)) = (&mut self.memory, &requests.memory) {
            counts.memory = counts.memory.saturating_add(1);
            memory.allocate(requests, container, hint)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
