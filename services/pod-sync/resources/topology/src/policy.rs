//! The policies: which merged hint a pod gets, and whether it is admitted.

use std::collections::BTreeMap;
use std::str::FromStr;

use pod_sync_machine::{Machine, NumaNode, NumaNodes};

use crate::hint::{Hint, Hints};
use crate::merge::{Closeness, best};
use crate::options::TopologyOptions;

/// The value of `topologyManagerPolicy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyName {
    /// Resources are not aligned.
    None,
    /// Resources are aligned where that is possible.
    BestEffort,
    /// A pod is rejected if its resources need more NUMA nodes than the machine would need with all of them
    /// free.
    Restricted,
    /// A pod is rejected if its resources need more than one NUMA node.
    SingleNumaNode,
}

/// The value of `topologyManagerScope`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TopologyScope {
    /// Each container is aligned on its own.
    Container,
    /// All containers of a pod get the same nodes.
    Pod,
}

/// A name of a policy or scope is unknown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {kind}: {name:?}")]
pub struct UnknownName {
    kind: &'static str,
    name: String,
}

impl PolicyName {
    /// All policies.
    pub const ALL: [Self; 4] = [Self::None, Self::BestEffort, Self::Restricted, Self::SingleNumaNode];

    /// Returns the name in the configuration.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::BestEffort => "best-effort",
            Self::Restricted => "restricted",
            Self::SingleNumaNode => "single-numa-node",
        }
    }
}

impl FromStr for PolicyName {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let known = Self::ALL.into_iter().find(|policy| policy.as_str() == name);
        known.ok_or_else(|| UnknownName { kind: "policy", name: name.to_owned() })
    }
}

impl TopologyScope {
    /// All scopes.
    pub const ALL: [Self; 2] = [Self::Container, Self::Pod];

    /// Returns the name in the configuration.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::Pod => "pod",
        }
    }
}

impl FromStr for TopologyScope {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let known = Self::ALL.into_iter().find(|scope| scope.as_str() == name);
        known.ok_or_else(|| UnknownName { kind: "scope", name: name.to_owned() })
    }
}

/// The machine cannot be used with the options. The texts are the kubelet's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnsupportedMachine {
    /// The machine has too many NUMA nodes.
    #[error("unsupported on machines with more than {0} NUMA Nodes")]
    TooManyNodes(usize),
    /// `prefer-closest-numa-nodes` is set, and the kernel does not report distances.
    #[error("cannot discover NUMA topology: error getting NUMA distances from cadvisor")]
    NoDistances,
}

/// The resources of a pod cannot be aligned. The pod is rejected with this reason and text, which are the
/// kubelet's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TopologyAffinityError {
    /// The pod has no resources of the pod level, or they do not count.
    #[error("Resources cannot be allocated with Topology locality")]
    Resources,
    /// The pod has resources of the pod level, and its containers are aligned on their own.
    #[error(
        "Pod Scope pod with pod-level resources failed admission with a container-level topology manager"
    )]
    PodLevelByContainer,
    /// The pod has resources of the pod level, and is aligned as a whole.
    #[error("Pod Scope pod with pod-level resources failed admission under pod-scope topology manager")]
    PodLevel,
}

/// The result of a merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Merged {
    /// The nodes on which each resource is allocated first.
    pub hint: Hint,
    /// Whether the policy admits the pod.
    pub is_admitted: bool,
}

/// A policy on a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopologyPolicy {
    name: PolicyName,
    nodes: NumaNodes,
    distances: Option<BTreeMap<NumaNode, BTreeMap<NumaNode, u64>>>,
}

impl TopologyPolicy {
    /// Returns a policy for a machine.
    ///
    /// # Errors
    /// See [`UnsupportedMachine`]; the policy `none` works on every machine.
    pub fn new(
        name: PolicyName,
        options: TopologyOptions,
        machine: &Machine,
    ) -> Result<Self, UnsupportedMachine> {
        let nodes = machine.nodes.keys().copied().collect();
        if name == PolicyName::None {
            return Ok(Self { name, nodes, distances: None });
        }
        if machine.nodes.len() > options.max_nodes {
            return Err(UnsupportedMachine::TooManyNodes(options.max_nodes));
        }
        if options.prefer_closest && machine.nodes.values().any(|node| node.distances.is_empty()) {
            return Err(UnsupportedMachine::NoDistances);
        }
        // A single node is as near as can be.
        let uses_distances = options.prefer_closest && name != PolicyName::SingleNumaNode;
        let distances = machine.nodes.iter().map(|(node, memory)| (*node, memory.distances.clone()));
        Ok(Self { name, nodes, distances: uses_distances.then(|| distances.collect()) })
    }

    /// Returns the name of the policy in the configuration.
    #[must_use]
    pub fn name(&self) -> PolicyName {
        self.name
    }

    /// Returns the NUMA nodes of the machine.
    #[must_use]
    pub fn nodes(&self) -> NumaNodes {
        self.nodes
    }

    /// Merges the hints of all resources (`Merge`).
    #[must_use]
    pub fn merge(&self, hints: &[Hints]) -> Merged {
        let mut lists: Vec<Vec<Hint>> = hints.iter().map(Hints::normalized).collect();
        let closeness = Closeness::new(self.distances.as_ref());
        match self.name {
            PolicyName::None => Merged { hint: Hint { nodes: None, is_preferred: false }, is_admitted: true },
            PolicyName::BestEffort => Merged { hint: best(self.nodes, &lists, closeness), is_admitted: true },
            PolicyName::Restricted => {
                let hint = best(self.nodes, &lists, closeness);
                Merged { hint, is_admitted: hint.is_preferred }
            }
            PolicyName::SingleNumaNode => {
                for list in &mut lists {
                    list.retain(|hint| hint.is_preferred && hint.nodes.is_none_or(|nodes| nodes.len() == 1));
                }
                let mut hint = best(self.nodes, &lists, closeness);
                if hint.nodes == Some(self.nodes) {
                    hint.nodes = None;
                }
                Merged { hint, is_admitted: hint.is_preferred }
            }
        }
    }
}

#[cfg(test)]
mod tests;
