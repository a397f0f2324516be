//! Memory and huge pages of containers on NUMA nodes (`pkg/kubelet/cm/memorymanager`): plain functions.
//!
//! With the policy `Static`, each container of a Guaranteed pod gets the NUMA nodes that its memory comes
//! from, and the sum of the requests on a node does not exceed its memory. A node is in one group of nodes at
//! a time: its memory is given either on its own, or together with that of the others. [`MemoryManager`] has
//! the assignments, [`checkpoint`] is the kubelet's state file.

// A value of a pod or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod blocks;
pub mod checkpoint;
mod error;
mod kind;
mod manager;
mod node_table;
mod requests;
mod reserved;

pub use crate::blocks::{MemoryAssignments, MemoryBlock};
pub use crate::error::{EmptyPodMemory, InvalidMemoryState, MemoryError, SizeField, StateDifference};
pub use crate::kind::MemoryKind;
pub use crate::manager::MemoryManager;
pub use crate::node_table::{MemoryTable, NodeTable, NodeTables};
pub use crate::requests::{MemoryRequest, PodMemoryRequests, requests};
pub use crate::reserved::{Amounts, ReservedError, ReservedMemory};
