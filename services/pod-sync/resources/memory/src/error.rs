//! Reasons why a container gets no memory, or why a state file cannot be used.

use pod_sync_decisions::status::KillCause;
use pod_sync_machine::{NumaNode, NumaNodes};

use crate::kind::MemoryKind;

/// A container of a pod that has memory as a whole would have none of it. The texts are the kubelet's
/// (`validatePodScopeResources`).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EmptyPodMemory {
    /// An init container requests more than the sidecars before it leave.
    #[error(
        "pod rejected, largest exclusive init container requests {requested} of {kind}, but only {available} available"
    )]
    InitContainer {
        /// The kind that is short.
        kind: MemoryKind,
        /// Bytes of the request.
        requested: u64,
        /// Bytes that are left.
        available: u64,
    },
    /// The sidecars before an init container leave nothing.
    #[error("pod rejected, pod has shared init containers but no {0} available for them")]
    SharedInitContainer(MemoryKind),
    /// The containers with memory of their own leave nothing.
    #[error(
        "pod rejected, sum of exclusive container {0} requests equals pod budget, leaving no memory for shared containers"
    )]
    SharedContainer(MemoryKind),
}

/// A container gets no memory. The texts are the kubelet's, since they become the message of a rejected pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// No set of NUMA nodes has enough free memory.
    #[error(
        "[memorymanager] failed to get the default NUMA affinity, no NUMA nodes with enough memory is available"
    )]
    NoNodes,
    /// The request fits, but not on as few nodes as the topology manager expects.
    #[error("[memorymanager] failed to find the default preferred hint")]
    NotPreferred,
    /// The nodes that the topology manager selected have too little memory, and no larger set of nodes has
    /// enough.
    #[error("[memorymanager] failed to find NUMA nodes to extend the current topology hint")]
    NoMoreNodes,
    /// With more nodes than the topology manager selected the request fits, but not on as few as it expects.
    #[error("[memorymanager] failed to find the extended preferred hint")]
    ExtendedNotPreferred,
    /// One of the nodes is in another group.
    #[error("[memorymanager] preferred hint violates NUMA node allocation")]
    OtherGroup,
    /// A container of the pod would have no memory.
    #[error(transparent)]
    EmptyPodMemory(#[from] EmptyPodMemory),
}

impl MemoryError {
    /// Returns the cause of the pod's rejection.
    #[must_use]
    pub fn cause(&self) -> KillCause {
        match self {
            Self::EmptyPodMemory(_) => KillCause::EmptyPodSharedPool,
            Self::NoNodes
            | Self::NotPreferred
            | Self::NoMoreNodes
            | Self::ExtendedNotPreferred
            | Self::OtherGroup => KillCause::UnexpectedAdmission,
        }
    }

    /// Returns the message of the pod's rejection.
    #[must_use]
    pub fn message(&self) -> String {
        match self {
            Self::EmptyPodMemory(error) => error.to_string(),
            Self::NoNodes
            | Self::NotPreferred
            | Self::NoMoreNodes
            | Self::ExtendedNotPreferred
            | Self::OtherGroup => format!("Allocate failed due to {self}, which is unexpected"),
        }
    }
}

/// The assignments of a state file do not fit the machine or the reservation. The node must be drained, and
/// the file removed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidMemoryState {
    /// There are assignments, and no NUMA nodes.
    #[error("[memorymanager] machine state can not be empty when it has memory assignments")]
    NoNodes,
    /// An assignment is on a NUMA node that does not exist.
    #[error(
        "[memorymanager] (pod: {pod}, container: {container}) the memory assignment uses the NUMA that does not exist"
    )]
    UnknownNode {
        /// UID of the pod.
        pod: String,
        /// Name of the container.
        container: String,
    },
    /// An assignment is of a kind that a NUMA node does not have.
    #[error(
        "[memorymanager] (pod: {pod}, container: {container}) the memory assignment uses memory resource that does not exist: {kind}"
    )]
    UnknownKind {
        /// UID of the pod.
        pod: String,
        /// Name of the container.
        container: String,
        /// Kind of memory of the assignment.
        kind: MemoryKind,
    },
    /// The reservation, the huge pages or the NUMA nodes have changed, or the assignments do not add up.
    #[error("[memorymanager] the expected machine state is different from the real one: {0}")]
    OtherMachine(#[from] StateDifference),
}

/// How a state file differs from the machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateDifference {
    /// NUMA nodes have come or gone.
    #[error("NUMA nodes {recorded} are recorded, the machine has {found}")]
    Nodes {
        /// NUMA nodes of the state file.
        recorded: NumaNodes,
        /// NUMA nodes of the machine.
        found: NumaNodes,
    },
    /// A NUMA node has another size.
    #[error("NUMA node {node} had {recorded} bytes of {kind} {use}, now {found}", use = field.text())]
    Size {
        /// The first NUMA node that has one.
        node: NumaNode,
        /// The kind of memory.
        kind: MemoryKind,
        /// Decides which of its sizes differs.
        field: SizeField,
        /// Bytes of the state file.
        recorded: u64,
        /// Bytes of the machine.
        found: u64,
    },
    /// The assignments of a NUMA node are not the ones that are taken from it.
    #[error("the assignments on NUMA node {0} do not add up to what it has given")]
    Assignments(NumaNode),
    /// The assignments need more memory than their NUMA nodes have.
    #[error("NUMA nodes {nodes} lack {missing} bytes of {kind} for their assignments")]
    TooSmall {
        /// NUMA nodes whose memory is given together.
        nodes: NumaNodes,
        /// The kind that is short.
        kind: MemoryKind,
        /// Bytes that are missing.
        missing: u64,
    },
}

/// A size of a NUMA node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SizeField {
    /// Bytes of the node, with those that no pod gets.
    Total,
    /// Reserved bytes, which no pod gets.
    SystemReserved,
    /// Bytes that pods can get.
    Allocatable,
}

impl SizeField {
    fn text(self) -> &'static str {
        match self {
            Self::Total => "in total",
            Self::SystemReserved => "reserved",
            Self::Allocatable => "for pods",
        }
    }
}
