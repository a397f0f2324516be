//! The assignments of a running node.

use pod_sync_machine::{CpuSet, NumaNodes};
use pod_sync_topology::{ContainerKind, Hints, PodLevel, RequestScope};

use crate::assignments::CpuAssignments;
use crate::error::{AllocateError, InvalidCpuState};
use crate::policy::StaticPolicy;
use crate::requests::{CpuRequest, PodCpuRequests};

/// The CPUs of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ContainerCpus {
    /// CPUs that no other container may use. The container has no CPU quota, which would only throttle it.
    Exclusive(CpuSet),
    /// CPUs that other containers of the pod may use, too, and no other pod.
    PodShared(CpuSet),
    /// The CPUs that all other containers share.
    Shared(CpuSet),
}

impl ContainerCpus {
    /// Returns the CPUs.
    #[must_use]
    pub fn cpus(&self) -> &CpuSet {
        match self {
            Self::Exclusive(cpus) | Self::PodShared(cpus) | Self::Shared(cpus) => cpus,
        }
    }
}

/// A running container, with the CPUs that the runtime was given for it last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunningContainer {
    /// UID of the pod.
    pub pod: String,
    /// Name of the container.
    pub container: String,
    /// ID in the runtime.
    pub id: String,
    /// The CPUs; none if that is not known, as after a restart.
    pub applied: Option<CpuSet>,
}

/// The runtime must give a container other CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuUpdate {
    /// ID of the container in the runtime.
    pub id: String,
    /// The new CPUs.
    pub cpus: CpuSet,
}

/// Assigns CPUs with the policy `static`.
#[derive(Debug, Clone)]
pub struct CpuManager {
    policy: StaticPolicy,
    assignments: CpuAssignments,
    /// CPUs that init containers leave to later containers of their pod, for the pod that is being admitted.
    reusable: Option<(String, CpuSet)>,
}

impl CpuManager {
    /// Returns a manager that continues with the assignments of the state file, which may be empty. Those of
    /// whole pods end if `level` has none, or if no container is left.
    ///
    /// # Errors
    /// The assignments do not fit the machine or the reservation.
    pub fn new(
        policy: StaticPolicy,
        restored: CpuAssignments,
        level: PodLevel,
    ) -> Result<Self, InvalidCpuState> {
        let mut assignments = policy.start(restored)?;
        if level == PodLevel::Unmanaged {
            let pods: Vec<String> = assignments.pods().map(|(pod, _)| pod.to_owned()).collect();
            for pod in &pods {
                assignments.release_pod(pod);
            }
        }
        Ok(Self { policy, assignments, reusable: None })
    }

    /// Returns the policy with its machine, options and reservation.
    #[must_use]
    pub fn policy(&self) -> &StaticPolicy {
        &self.policy
    }

    /// Returns the content of the state file.
    #[must_use]
    pub fn assignments(&self) -> &CpuAssignments {
        &self.assignments
    }

    /// Returns the CPUs of a container.
    #[must_use]
    pub fn cpus(&self, pod: &str, container: &str) -> ContainerCpus {
        match self.assignments.container(pod, container) {
            Some(cpus) if self.assignments.is_pod_shared(pod, container) => {
                ContainerCpus::PodShared(cpus.clone())
            }
            Some(cpus) => ContainerCpus::Exclusive(cpus.clone()),
            None => ContainerCpus::Shared(self.assignments.shared.clone()),
        }
    }

    /// Returns the NUMA nodes that can satisfy a request (`GetTopologyHints`, `GetPodTopologyHints`). For
    /// CPUs that are already held these are the same again; there are none if the request has changed.
    #[must_use]
    pub fn hints(&self, requests: &PodCpuRequests, scope: RequestScope<'_>) -> Hints {
        if let (Some(budget), RequestScope::Pod) = (requests.budget, scope) {
            return self.pod_hints(requests, budget);
        }
        let in_scope = |request: &&CpuRequest| match scope {
            RequestScope::Container(name) => request.container == name,
            RequestScope::Pod => true,
        };
        let count = match scope {
            RequestScope::Container(name) => requests.container(name).map_or(0, |request| request.count),
            RequestScope::Pod => requests.total(),
        };
        if count == 0 {
            return Hints::AnyNodes;
        }
        let mut held = CpuSet::new();
        for request in requests.containers.iter().filter(in_scope) {
            if let Some(cpus) = self.assignments.container(&requests.pod, &request.container) {
                if cpus.len() != request.count {
                    return Hints::OneOf(Vec::new());
                }
                held.extend(cpus.iter());
            }
        }
        if held.len() == count {
            return Hints::OneOf(self.policy.hints_for(&held, &CpuSet::new(), count));
        }
        let available = self.policy.available(&self.assignments);
        let reusable = self.reusable(&requests.pod).union(&held);
        Hints::OneOf(self.policy.hints_for(&available, &reusable, count))
    }

    /// Returns the NUMA nodes for the CPUs of a pod as a whole. Unlike the kubelet, this counts the CPUs that
    /// the pod has, not those of each container: those of containers that share some differ from their
    /// requests.
    fn pod_hints(&self, requests: &PodCpuRequests, budget: usize) -> Hints {
        if requests.check_pool(budget).is_err() {
            return Hints::OneOf(Vec::new());
        }
        let none = CpuSet::new();
        let hints = match self.assignments.pod(&requests.pod) {
            Some(held) if held.len() == budget => self.policy.hints_for(held, &none, budget),
            Some(_) => Vec::new(),
            None => {
                // With another scope, its containers had some on their own.
                let held = requests
                    .containers
                    .iter()
                    .filter_map(|request| self.assignments.container(&requests.pod, &request.container));
                let own = held.fold(CpuSet::new(), |own, cpus| own.union(cpus));
                self.policy.hints_for(&self.policy.available(&self.assignments), &own, budget)
            }
        };
        Hints::OneOf(hints)
    }

    /// Gives a pod its CPUs as a whole, and its containers parts of them (`AllocatePod`). A pod that has CPUs
    /// keeps them, and so do its containers if each has some.
    ///
    /// # Errors
    /// Too few CPUs are free, the request does not fit `full-pcpus-only`, or a container would have none. No
    /// assignment has changed.
    pub fn allocate_pod(
        &mut self,
        requests: &PodCpuRequests,
        nodes: Option<NumaNodes>,
    ) -> Result<(), AllocateError> {
        let Some(budget) = requests.budget else { return Ok(()) };
        requests.check_pool(budget)?;
        let pod = requests.pod.as_str();
        let has_part = |request: &CpuRequest| self.assignments.container(pod, &request.container).is_some();
        let held = self.assignments.pod(pod).cloned();
        if held.is_none() || !requests.containers.iter().all(has_part) {
            let mut next = self.assignments.clone();
            let cpus = match held {
                Some(held) => held,
                None => {
                    // With another scope, its containers had some on their own.
                    requests.containers.iter().for_each(|request| next.release(pod, &request.container));
                    self.policy.allocate(&next, budget, nodes, &CpuSet::new())?
                }
            };
            let parts = self.policy.divide(requests, &cpus)?;
            next.assign_pod(pod, cpus, parts);
            self.assignments = next;
        }
        self.recognize(requests);
        Ok(())
    }

    /// Takes over which containers have exclusive CPUs, for a pod that has CPUs as a whole: the state file
    /// does not have it.
    pub fn recognize(&mut self, requests: &PodCpuRequests) {
        let exclusive = requests.containers.iter().filter(|request| request.count > 0);
        let exclusive = exclusive.map(|request| request.container.clone()).collect();
        self.assignments.set_exclusive(&requests.pod, exclusive);
    }

    /// Gives a container its exclusive CPUs, on the NUMA nodes that the topology manager selected if it did.
    /// A container that has CPUs keeps them. The containers of a pod must be given their CPUs in the order of
    /// their starts, and those of one pod before those of the next, so that init containers leave theirs.
    ///
    /// Unlike the kubelet, this does not check `full-pcpus-only` for a container that has CPUs: after a
    /// restart its own CPUs would count as missing (kubernetes/kubernetes#129078).
    ///
    /// # Errors
    /// Too few CPUs are free, or the request does not fit `full-pcpus-only`. No assignment has changed.
    pub fn allocate(
        &mut self,
        requests: &PodCpuRequests,
        container: &str,
        nodes: Option<NumaNodes>,
    ) -> Result<(), AllocateError> {
        let Some(request) = requests.container(container).filter(|request| request.count > 0) else {
            return Ok(());
        };
        let pod = requests.pod.as_str();
        let reusable = self.reusable(pod);
        let cpus = match self.assignments.container(pod, container) {
            Some(held) => held.clone(),
            None => {
                let cpus = self.policy.allocate(&self.assignments, request.count, nodes, &reusable)?;
                self.assignments.assign(pod, container, cpus.clone());
                cpus
            }
        };
        let reusable = match request.kind {
            ContainerKind::Init => reusable.union(&cpus).difference(&self.in_use(requests)),
            ContainerKind::Sidecar | ContainerKind::Regular => reusable.difference(&cpus),
        };
        self.reusable = Some((pod.to_owned(), reusable));
        Ok(())
    }

    /// Ends the assignment of a container that does not start again. The admission of its pod is over: what
    /// its init containers leave is no longer held for it.
    pub fn release(&mut self, pod: &str, container: &str) {
        self.reusable.take_if(|(owner, _)| owner == pod);
        self.assignments.release(pod, container);
    }

    /// Ends the assignments of all containers that are not active (`removeStaleState`). Containers of a pod
    /// that is being admitted are active.
    pub fn retain(&mut self, is_active: impl Fn(&str, &str) -> bool) {
        let stale = self.assignments.containers().filter(|(pod, container, _)| !is_active(pod, container));
        let stale: Vec<_> = stale.map(|(pod, container, _)| (pod.to_owned(), container.to_owned())).collect();
        for (pod, container) in stale {
            self.release(&pod, &container);
        }
    }

    /// Returns the containers whose CPUs the runtime must change: the shared CPUs have changed since, or are
    /// not known to be those that the container has (`reconcileState`). A container is never left without a
    /// CPU.
    #[must_use]
    pub fn updates(&self, running: &[RunningContainer]) -> Vec<CpuUpdate> {
        let update = |container: &RunningContainer| {
            let wanted = self.cpus(&container.pod, &container.container).cpus().clone();
            let is_due = !wanted.is_empty() && container.applied.as_ref() != Some(&wanted);
            is_due.then(|| CpuUpdate { id: container.id.clone(), cpus: wanted })
        };
        running.iter().filter_map(update).collect()
    }

    /// Returns the CPUs of the containers of a pod that run at once. The kubelet gives some of them twice if
    /// the request of a container becomes a whole number, and its pod is admitted again after a restart.
    fn in_use(&self, requests: &PodCpuRequests) -> CpuSet {
        let running = requests.containers.iter().filter(|request| request.kind != ContainerKind::Init);
        let held =
            running.filter_map(|request| self.assignments.container(&requests.pod, &request.container));
        held.fold(CpuSet::new(), |in_use, cpus| in_use.union(cpus))
    }

    fn reusable(&self, pod: &str) -> CpuSet {
        let of_pod = self.reusable.as_ref().filter(|(owner, _)| owner == pod);
        of_pod.map(|(_, cpus)| cpus.clone()).unwrap_or_default()
    }
}

#[cfg(test)]
mod pod_tests;
#[cfg(test)]
mod tests;
