//! What a resource prefers.

use pod_sync_machine::NumaNodes;

/// A set of NUMA nodes that can satisfy a request (`TopologyHint`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hint {
    /// The nodes; none if any nodes will do.
    pub nodes: Option<NumaNodes>,
    /// Whether no set of fewer nodes could satisfy the request on this machine.
    pub is_preferred: bool,
}

/// The hints of one resource for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hints {
    /// The resource is on no NUMA node, or the request is not bound to one.
    AnyNodes,
    /// One of these can satisfy the request. If there is none, only a policy that requires no alignment
    /// admits the pod.
    OneOf(Vec<Hint>),
}

impl Hints {
    /// Returns the hints in the form that the merge takes, which has at least one (`filterProvidersHints`).
    pub(crate) fn normalized(&self) -> Vec<Hint> {
        match self {
            Self::AnyNodes => vec![Hint { nodes: None, is_preferred: true }],
            Self::OneOf(hints) if hints.is_empty() => vec![Hint { nodes: None, is_preferred: false }],
            Self::OneOf(hints) => hints.clone(),
        }
    }
}
