//! The assignments of a node, and the decision about a pod (`pkg/kubelet/cm/topologymanager: scope`).

use k8s_openapi::api::core::v1::Pod;
use pod_sync_cpus::{AllocateError, ContainerCpus, CpuManager, PodCpuRequests};
use pod_sync_decisions::status::KillCause;
use pod_sync_machine::{CpuSet, NumaNodes};
use pod_sync_memory::{MemoryError, MemoryManager, PodMemoryRequests};
use pod_sync_topology::{
    ContainerKind, Hint, Hints, Merged, PodLevel, PolicyName, RequestScope, TopologyAffinityError,
    TopologyPolicy, TopologyScope,
};
use quintlet_model::qos::has_pod_level_resources;

use crate::args::{CpuPolicyName, MemoryPolicyName};
use crate::counts::{
    AdmissionCounts, CONTAINER, CPU, MEMORY, NODE, NODE_EXCLUSIVE, NUMA_NODE, PHYSICAL_CPU, POD,
    POD_EXCLUSIVE, POD_SHARED, UNCORE_CACHE,
};

/// Returns the hints for the devices of a container or of the whole pod.
pub(crate) type DeviceHints<'a> = &'a (dyn Fn(RequestScope<'_>) -> Vec<Hints> + Send + Sync);

/// The CPUs and the memory that the containers of a pod request.
#[derive(Debug, Clone)]
pub struct PodRequests {
    cpus: PodCpuRequests,
    memory: Option<PodMemoryRequests>,
    /// Treatment of the resources of the pod level, if the pod has some.
    pod_level: Option<PodLevel>,
}

impl PodRequests {
    /// Returns the requests of a pod.
    #[must_use]
    pub fn of(pod: &Pod, level: PodLevel) -> Self {
        Self {
            cpus: pod_sync_cpus::requests(pod, level),
            memory: pod_sync_memory::requests(pod, level),
            pod_level: has_pod_level_resources(pod).then_some(level),
        }
    }

    /// Returns the names of the containers in the order of their starts.
    fn containers(&self) -> impl Iterator<Item = &str> {
        self.cpus.containers.iter().map(|request| request.container.as_str())
    }
}

/// Reason why a pod does not get its CPUs or its memory. The texts are the kubelet's, since they become the
/// message of a rejected pod.
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
    /// Returns the cause of the pod's rejection (`pkg/kubelet/cm/admission: GetPodAdmitResult`).
    #[must_use]
    pub fn cause(&self) -> KillCause {
        match self {
            Self::Topology(_) => KillCause::TopologyAffinity,
            Self::Cpus(error) => error.cause(),
            Self::Memory(error) => error.cause(),
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

/// The policies of a node with the assignments of its pods.
#[derive(Debug, Clone)]
pub struct NodePlacement {
    cpus: Option<CpuManager>,
    memory: Option<MemoryManager>,
    topology: TopologyPolicy,
    scope: TopologyScope,
    pod_level: PodLevel,
}

impl NodePlacement {
    /// Returns the placement with these managers; `None` for the policies `none` and `None`.
    #[must_use]
    pub fn new(
        cpus: Option<CpuManager>,
        memory: Option<MemoryManager>,
        topology: TopologyPolicy,
        scope: TopologyScope,
        pod_level: PodLevel,
    ) -> Self {
        Self { cpus, memory, topology, scope, pod_level }
    }

    /// Returns the requests of a pod, as far as they count on this node.
    #[must_use]
    pub fn requests(&self, pod: &Pod) -> PodRequests {
        PodRequests::of(pod, self.pod_level)
    }

    /// Returns what is done with resources of the pod level.
    #[must_use]
    pub fn pod_level(&self) -> PodLevel {
        self.pod_level
    }

    /// Returns the name of the CPU policy.
    #[must_use]
    pub fn cpu_policy(&self) -> CpuPolicyName {
        if self.cpus.is_some() { CpuPolicyName::Static } else { CpuPolicyName::None }
    }

    /// Returns the name of the memory policy.
    #[must_use]
    pub fn memory_policy(&self) -> MemoryPolicyName {
        if self.memory.is_some() { MemoryPolicyName::Static } else { MemoryPolicyName::None }
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
        let Some(cpus) = &self.cpus else { return false };
        let is_exclusive = |container| matches!(cpus.cpus(pod, container), ContainerCpus::Exclusive(_));
        cpus.assignments().containers().any(|(owner, container, _)| owner == pod && is_exclusive(container))
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
        counts: &mut AdmissionCounts,
    ) -> Result<(), PlacementError> {
        let mut next = self.clone();
        next.prepare(requests);
        next.allocate(requests, devices, None, counts)?;
        *self = next;
        Ok(())
    }

    /// Takes over which containers of a pod have resources alone: the state files do not have it for those of
    /// a pod as a whole.
    pub fn recognize(&mut self, requests: &PodRequests) {
        if let Some(cpus) = &mut self.cpus {
            cpus.recognize(&requests.cpus);
        }
        if let (Some(memory), Some(requests)) = (&mut self.memory, &requests.memory) {
            memory.recognize(requests);
        }
    }

    /// Returns the containers with CPUs of their own or of their pod, then those with memory of certain NUMA
    /// nodes: UID of the pod, name of the container.
    pub fn holders(&self) -> impl Iterator<Item = (&str, &str)> {
        let exclusive = self.cpus.iter().flat_map(|cpus| cpus.assignments().containers());
        let memory = self.memory.iter().flat_map(|memory| memory.assignments().all());
        let exclusive = exclusive.map(|(pod, container, _)| (pod, container));
        exclusive.chain(memory.map(|(pod, container, _)| (pod, container)))
    }

    /// Returns whether a container of the pod has CPUs of its own or of the pod, or memory of certain NUMA
    /// nodes.
    #[must_use]
    pub fn holds(&self, pod: &str) -> bool {
        self.holders().any(|(owner, _)| owner == pod)
    }

    /// Ends what a pod holds and cannot keep, since all its containers start again.
    fn prepare(&mut self, requests: &PodRequests) {
        let pod = requests.cpus.pod.as_str();
        if self.pod_level != PodLevel::Pod && self.holds_whole(pod) {
            // The topology policy or its scope has changed: the containers have resources on their own now.
            self.release(pod);
        }
        self.end_partial_memory(requests);
    }

    /// Returns whether the pod has CPUs or memory as a whole.
    fn holds_whole(&self, pod: &str) -> bool {
        self.cpus.as_ref().is_some_and(|cpus| cpus.assignments().pod(pod).is_some())
            || self.memory.as_ref().is_some_and(|memory| memory.assignments().pod(pod).is_some())
    }

    /// Ends the memory of a pod whose init containers have left theirs to later containers: all of them start
    /// again, and would not find as much.
    fn end_partial_memory(&mut self, requests: &PodRequests) {
        let (Some(memory), Some(requests)) = (&mut self.memory, &requests.memory) else { return };
        if requests.budget.is_some() {
            // The pod keeps its memory as a whole, and is divided again.
            return;
        }
        let is_held = |name: &str| memory.assignments().container(&requests.pod, name).is_some();
        let wanted = requests.containers.iter().filter(|request| !request.amounts.is_empty());
        let (held, missing): (Vec<_>, Vec<_>) = wanted.partition(|request| is_held(&request.container));
        if !missing.is_empty() {
            for request in held {
                memory.release(&requests.pod, &request.container);
            }
        }
    }

    /// Returns the NUMA nodes for the devices of a container, if the containers before it get what they
    /// request.
    ///
    /// # Errors
    /// The reason for the rejection of the pod.
    pub fn nodes_for(
        mut self,
        requests: &PodRequests,
        container: &str,
        devices: DeviceHints<'_>,
        counts: &mut AdmissionCounts,
    ) -> Result<Option<NumaNodes>, PlacementError> {
        self.prepare(requests);
        let hint = self.allocate(requests, devices, Some(container), counts)?;
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

    /// Ends the memory of the init containers that ended before a container of their pod starts. Returns
    /// whether there was any.
    pub fn start(&mut self, requests: &PodRequests, container: &str) -> bool {
        let (Some(memory), Some(requests)) = (&mut self.memory, &requests.memory) else { return false };
        let before = memory.assignments().clone();
        memory.start(requests, container);
        before != *memory.assignments()
    }

    /// Allocates for the containers up to the one with this name, without it; for all if there is no name.
    /// Returns the hint for that one.
    fn allocate(
        &mut self,
        requests: &PodRequests,
        devices: DeviceHints<'_>,
        until: Option<&str>,
        counts: &mut AdmissionCounts,
    ) -> Result<Hint, PlacementError> {
        let none = Hint { nodes: None, is_preferred: false };
        let of_pod = match self.scope {
            TopologyScope::Pod if self.aligns() => {
                Some(self.merge(requests, RequestScope::Pod, devices, counts)?)
            }
            TopologyScope::Pod | TopologyScope::Container => None,
        };
        if let Some(hint) = of_pod.filter(|_| requests.pod_level == Some(PodLevel::Pod)) {
            if until.is_none() {
                self.allocate_pod(requests, hint, counts)?;
                self.count_aligned(POD, counts);
            }
            return Ok(hint);
        }
        for container in requests.containers() {
            let hint = match of_pod {
                Some(hint) => hint,
                None if self.aligns() => {
                    self.merge(requests, RequestScope::Container(container), devices, counts)?
                }
                None => none,
            };
            if until == Some(container) {
                return Ok(hint);
            }
            self.allocate_container(requests, container, hint, counts)?;
            if of_pod.is_none() {
                self.count_aligned(CONTAINER, counts);
            }
        }
        if of_pod.is_some() {
            self.count_aligned(POD, counts);
        }
        Ok(none)
    }

    /// Returns whether the policy admits no pod whose resources are on several NUMA nodes
    /// (`IsAlignmentGuaranteed`).
    fn guarantees_alignment(&self) -> bool {
        self.topology.name() == PolicyName::SingleNumaNode
    }

    fn count_aligned(&self, scope: &'static str, counts: &mut AdmissionCounts) {
        if self.guarantees_alignment() {
            counts.aligned.add(scope, NUMA_NODE);
        }
    }

    fn merge(
        &self,
        requests: &PodRequests,
        scope: RequestScope<'_>,
        devices: DeviceHints<'_>,
        counts: &mut AdmissionCounts,
    ) -> Result<Hint, TopologyAffinityError> {
        let mut hints = devices(scope);
        hints.extend(self.cpus.iter().map(|cpus| cpus.hints(&requests.cpus, scope)));
        if let (Some(memory), Some(requests)) = (&self.memory, &requests.memory) {
            hints.extend(memory.hints(requests, scope));
        }
        let Merged { hint, is_admitted } = self.topology.merge(&hints);
        if is_admitted {
            return Ok(hint);
        }
        let (label, by_level) = match scope {
            RequestScope::Pod => (POD, TopologyAffinityError::PodLevel),
            RequestScope::Container(_) => (CONTAINER, TopologyAffinityError::PodLevelByContainer),
        };
        if self.guarantees_alignment() {
            counts.unaligned.add(label, NUMA_NODE);
        }
        Err(match requests.pod_level {
            None | Some(PodLevel::Unmanaged) => TopologyAffinityError::Resources,
            Some(PodLevel::Containers | PodLevel::Pod) => by_level,
        })
    }

    /// Gives a pod CPUs and memory as a whole, and its containers parts of them.
    fn allocate_pod(
        &mut self,
        requests: &PodRequests,
        hint: Hint,
        counts: &mut AdmissionCounts,
    ) -> Result<(), PlacementError> {
        let uid = requests.cpus.pod.as_str();
        if let (Some(cpus), Some(_)) = (&mut self.cpus, requests.cpus.budget) {
            let is_new = cpus.assignments().pod(uid).is_none();
            cpus.allocate_pod(&requests.cpus, hint.nodes).inspect_err(|_| counts.errors.add(CPU, POD))?;
            let own = cpus.assignments().pod(uid).filter(|_| is_new);
            if own.is_some_and(|own| cpus.policy().shares_cache(own)) {
                counts.aligned.add(CONTAINER, UNCORE_CACHE);
            }
            for request in requests.cpus.containers.iter().filter(|_| is_new) {
                counts.of_pod(CPU, request.count > 0);
                counts.cpus = counts.cpus.saturating_add(u64::from(request.count > 0));
            }
        }
        if let (Some(memory), Some(requests)) = (&mut self.memory, &requests.memory) {
            let is_new = memory.assignments().pod(uid).is_none();
            counts.memory = counts.memory.saturating_add(1);
            memory.allocate_pod(requests, hint).inspect_err(|_| counts.errors.add(MEMORY, POD))?;
            for request in requests.containers.iter().filter(|_| is_new) {
                let has_request = !request.amounts.is_empty();
                counts.of_pod(MEMORY, has_request);
                let is_attempt = has_request || request.kind != ContainerKind::Regular;
                counts.memory = counts.memory.saturating_add(u64::from(is_attempt));
            }
        }
        Ok(())
    }

    fn allocate_container(
        &mut self,
        requests: &PodRequests,
        container: &str,
        hint: Hint,
        counts: &mut AdmissionCounts,
    ) -> Result<(), PlacementError> {
        let uid = requests.cpus.pod.as_str();
        let is_exclusive = requests.cpus.container(container).is_some_and(|request| request.count > 0);
        if let Some(cpus) = self.cpus.as_mut().filter(|_| is_exclusive) {
            counts.cpus = counts.cpus.saturating_add(1);
            let is_new = cpus.assignments().container(uid, container).is_none();
            let has_full_cores = cpus.policy().options().full_cores;
            let allocated = cpus.allocate(&requests.cpus, container, hint.nodes);
            if has_full_cores {
                let tally = if allocated.is_ok() { &mut counts.aligned } else { &mut counts.unaligned };
                tally.add(CONTAINER, PHYSICAL_CPU);
            }
            allocated.inspect_err(|_| counts.errors.add(CPU, NODE))?;
            let own = cpus.assignments().container(uid, container).filter(|_| is_new);
            if let Some(own) = own {
                if cpus.policy().shares_cache(own) {
                    counts.aligned.add(CONTAINER, UNCORE_CACHE);
                }
                counts.allocations.add(CPU, NODE);
                counts.assignments.add(CPU, NODE_EXCLUSIVE);
            }
        }
        if let (Some(memory), Some(requests)) = (&mut self.memory, &requests.memory) {
            counts.memory = counts.memory.saturating_add(1);
            let is_new = memory.assignments().container(uid, container).is_none();
            memory.allocate(requests, container, hint).inspect_err(|_| counts.errors.add(MEMORY, NODE))?;
            let own = memory.assignments().container(uid, container).filter(|_| is_new);
            if let Some(own) = own {
                own.iter().for_each(|_| counts.allocations.add(MEMORY, NODE));
                counts.assignments.add(MEMORY, NODE_EXCLUSIVE);
            }
        }
        Ok(())
    }
}

impl AdmissionCounts {
    /// Counts the part of a container in the resources of its pod.
    fn of_pod(&mut self, resource: &'static str, is_exclusive: bool) {
        self.allocations.add(resource, POD);
        self.assignments.add(resource, if is_exclusive { POD_EXCLUSIVE } else { POD_SHARED });
    }
}

#[cfg(test)]
mod pod_tests;
#[cfg(test)]
mod tests;
