//! Reasons why a container gets no memory, or why a state file cannot be used.

use crate::kind::MemoryKind;

/// A container gets no memory. The texts are the kubelet's, since they become the message of a rejected pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// No set of NUMA nodes has enough free memory.
    #[error(
        "[memorymanager] failed to get the default NUMA affinity, no NUMA nodes with enough memory is available"
    )]
    NoNodes,
    /// The request fits, but not on as few nodes as the topology manager expects.
    #[error("[memorymanager] failed to find the default preferred hint")]
    NotPreferred,
    /// The nodes that the topology manager selected have too little memory, and no larger set of nodes has enough.
    #[error("[memorymanager] failed to find NUMA nodes to extend the current topology hint")]
    NoMoreNodes,
    /// With more nodes than the topology manager selected the request fits, but not on as few as it expects.
    #[error("[memorymanager] failed to find the extended preferred hint")]
    ExtendedNotPreferred,
    /// One of the nodes is in another group.
    #[error("[memorymanager] preferred hint violates NUMA node allocation")]
    OtherGroup,
}

impl MemoryError {
    /// Reason of the pod's rejection.
    pub const REASON: &'static str = "UnexpectedAdmissionError";

    /// Returns the message of the pod's rejection.
    #[must_use]
    pub fn message(self) -> String {
        format!("Allocate failed due to {self}, which is unexpected")
    }
}

/// The assignments of a state file do not fit the machine or the reservation. The node must be drained, and the file removed.
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
    /// The memory of the machine or its reservation have changed, or the assignments do not add up.
    #[error("[memorymanager] the expected machine state is different from the real one")]
    OtherMachine,
}
