//! The policy `static`: which CPUs a request gets.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;

use pod_sync_machine::{CpuSet, CpuTopology, NumaNodes};
use pod_sync_topology::{ContainerKind, PolicyName};

use crate::accumulator::CpuOrder;
use crate::assignments::CpuAssignments;
use crate::distribute::{Distribution, take_distributed};
use crate::error::{AllocateError, InvalidCpuState, PolicyError};
use crate::options::CpuOptions;
use crate::requests::PodCpuRequests;
use crate::take::take_packed;

/// The CPUs that are never exclusive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReservedCpus {
    /// A number of CPUs, on the cores with the lowest numbers: the CPU amounts of both reservations, rounded
    /// up.
    Count(usize),
    /// `reservedSystemCPUs`.
    These(CpuSet),
}

/// The policy on a machine (`staticPolicy`).
#[derive(Debug, Clone)]
pub struct StaticPolicy {
    topology: CpuTopology,
    options: CpuOptions,
    reserved: CpuSet,
    /// The reserved CPUs with all that share a core with one.
    reserved_cores: CpuSet,
}

impl StaticPolicy {
    /// Name of the policy in the configuration and in the state file.
    pub const NAME: &'static str = "static";

    /// Returns the policy for a machine.
    ///
    /// # Errors
    /// See [`PolicyError`].
    pub fn new(
        topology: CpuTopology,
        options: CpuOptions,
        reserved: ReservedCpus,
        topology_policy: PolicyName,
    ) -> Result<Self, PolicyError> {
        options.check(&topology, topology_policy)?;
        let mut policy = Self { topology, options, reserved: CpuSet::new(), reserved_cores: CpuSet::new() };
        let all = policy.topology.cpus();
        policy.reserved = match reserved {
            ReservedCpus::These(cpus) => match cpus.difference(&all).iter().next() {
                Some(unknown) => return Err(PolicyError::UnknownCpu(unknown)),
                None => cpus,
            },
            ReservedCpus::Count(count) => {
                policy.select(&all, count, 0).map_err(|error| PolicyError::Reservation(count, error))?
            }
        };
        if policy.reserved.is_empty() {
            return Err(PolicyError::NothingReserved);
        }
        let places = policy.topology.places();
        let cores: Vec<_> =
            policy.reserved.iter().filter_map(|cpu| places.get(&cpu)).map(|p| p.core).collect();
        policy.reserved_cores = policy.topology.cpus_where(|place| cores.contains(&place.core));
        Ok(policy)
    }

    /// Returns the CPUs of the machine.
    #[must_use]
    pub fn topology(&self) -> &CpuTopology {
        &self.topology
    }

    /// Returns the options that the configuration sets.
    #[must_use]
    pub fn options(&self) -> CpuOptions {
        self.options
    }

    /// Returns the CPUs that are never exclusive.
    #[must_use]
    pub fn reserved(&self) -> &CpuSet {
        &self.reserved
    }

    /// Returns the CPUs that can be exclusive (`GetAllocatableCPUs`).
    #[must_use]
    pub fn allocatable(&self) -> CpuSet {
        self.topology.cpus().difference(&self.reserved)
    }

    /// Returns the CPUs that are free (`GetAvailableCPUs`).
    #[must_use]
    pub fn available(&self, assignments: &CpuAssignments) -> CpuSet {
        assignments.shared.difference(&self.reserved)
    }

    /// Returns the assignments of a state file if they fit this machine and reservation; for a new file, the
    /// first assignments (`validateState`). Those of a pod as a whole end if none of its containers is left.
    ///
    /// # Errors
    /// See [`InvalidCpuState`]. The node must be drained, and the file removed.
    pub fn start(&self, mut restored: CpuAssignments) -> Result<CpuAssignments, InvalidCpuState> {
        let strict = self.options.strict_reservation;
        let all = if strict { self.allocatable() } else { self.topology.cpus() };
        if restored.shared.is_empty() {
            let has_assignments = restored.containers().next().is_some();
            let first = CpuAssignments::new(all);
            return if has_assignments { Err(InvalidCpuState::NothingShared) } else { Ok(first) };
        }
        restored.release_ended_pods();
        let shared = &restored.shared;
        let reserved_and_shared = self.reserved.intersection(shared);
        if strict && !reserved_and_shared.is_empty() {
            return Err(InvalidCpuState::ReservedShared(reserved_and_shared, shared.clone()));
        }
        if !strict && reserved_and_shared != self.reserved {
            return Err(InvalidCpuState::ReservedMissing(self.reserved.clone(), shared.clone()));
        }
        let mut known = shared.clone();
        let pods = restored.pods().map(|(pod, cpus)| (pod, "", cpus));
        for (pod, container, cpus) in restored.containers().chain(pods) {
            if !cpus.is_disjoint(shared) {
                let (pod, container) = (pod.to_owned(), container.to_owned());
                let (cpus, shared) = (cpus.clone(), shared.clone());
                return Err(InvalidCpuState::Overlap { pod, container, cpus, shared });
            }
            known.extend(cpus.iter());
        }
        if known == all { Ok(restored) } else { Err(InvalidCpuState::OtherCpus(all, known)) }
    }

    /// Selects CPUs for a request from those that are free and those that earlier init containers of the pod
    /// leave: first from the NUMA nodes that the topology manager selected, then from the others
    /// (`allocateCPUs`).
    ///
    /// # Errors
    /// Too few CPUs are free, or the request does not fit `full-pcpus-only`.
    pub fn allocate(
        &self,
        assignments: &CpuAssignments,
        count: usize,
        nodes: Option<NumaNodes>,
        reusable: &CpuSet,
    ) -> Result<CpuSet, AllocateError> {
        self.check_whole_cores(assignments, count)?;
        let free = self.available(assignments).union(reusable);
        let mut selected = CpuSet::new();
        if let Some(nodes) = nodes {
            let aligned = self.on_nodes(nodes).intersection(&free);
            selected = self.select(&aligned, count.min(aligned.len()), nodes.len())?;
        }
        let missing = count.saturating_sub(selected.len());
        let others = self.select(&free.difference(&selected), missing, 0)?;
        Ok(selected.union(&others))
    }

    /// Divides the CPUs that a pod has as a whole (`AllocatePod`). Containers with a request get CPUs that
    /// none runs on beside them. Other init containers get what the sidecars before them leave, all others
    /// get what is left in the end.
    ///
    /// # Errors
    /// The requests exceed the CPUs.
    pub(crate) fn divide(
        &self,
        requests: &PodCpuRequests,
        cpus: &CpuSet,
    ) -> Result<BTreeMap<String, CpuSet>, AllocateError> {
        let mut parts = BTreeMap::new();
        let mut pool = cpus.clone();
        for request in &requests.containers {
            let part = match (request.kind, request.count) {
                (ContainerKind::Init, 0) => pool.clone(),
                (ContainerKind::Sidecar | ContainerKind::Regular, 0) => continue,
                (ContainerKind::Init, count) => self.select(&pool, count, 0)?,
                (ContainerKind::Sidecar | ContainerKind::Regular, count) => {
                    let own = self.select(&pool, count, 0)?;
                    pool = pool.difference(&own);
                    own
                }
            };
            parts.insert(request.container.clone(), part);
        }
        for request in &requests.containers {
            parts.entry(request.container.clone()).or_insert_with(|| pool.clone());
        }
        Ok(parts)
    }

    /// Returns whether CPUs have one last-level cache (`isAlignedAtUncoreCache`).
    #[must_use]
    pub fn shares_cache(&self, cpus: &CpuSet) -> bool {
        let places = self.topology.places();
        let caches: BTreeSet<_> = cpus.iter().map(|cpu| places.get(&cpu).map(|place| place.cache)).collect();
        caches.len() <= 1
    }

    fn check_whole_cores(&self, assignments: &CpuAssignments, requested: usize) -> Result<(), AllocateError> {
        if !self.options.full_cores {
            return Ok(());
        }
        let per_core = self.topology.cpus_per_core();
        if !requested.is_multiple_of(per_core) {
            return Err(AllocateError::NotWholeCores { requested, per_core });
        }
        // A core with a reserved CPU cannot be given as a whole.
        let available = assignments.shared.difference(&self.reserved_cores).len();
        if requested > available {
            return Err(AllocateError::TooFewCores { requested, per_core, available });
        }
        Ok(())
    }

    /// Returns the CPUs of NUMA nodes; with `align-by-socket`, those of their sockets (`getAlignedCPUs`).
    fn on_nodes(&self, nodes: NumaNodes) -> CpuSet {
        if self.options.by_socket {
            let sockets = self.topology.sockets_of(nodes);
            self.topology.cpus_where(|place| sockets.contains(&place.socket))
        } else {
            self.topology.cpus_where(|place| nodes.contains(place.node))
        }
    }

    /// Selects `count` of the free CPUs (`takeByTopology`).
    fn select(&self, free: &CpuSet, count: usize, least_nodes: usize) -> Result<CpuSet, AllocateError> {
        let order = if self.options.across_cores { CpuOrder::Spread } else { CpuOrder::Packed };
        if !self.options.across_nodes {
            return take_packed(&self.topology, free, count, order, self.options.by_cache);
        }
        let per_core = if self.options.full_cores { self.topology.cpus_per_core() } else { 1 };
        let group = NonZeroUsize::new(per_core).unwrap_or(NonZeroUsize::MIN);
        let how = Distribution { group, order, by_socket: self.options.by_socket, least_nodes };
        take_distributed(&self.topology, free, count, how)
    }
}

#[cfg(test)]
mod tests;
