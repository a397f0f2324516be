//! The machine as the managers of CPUs, memory and topology use it: sockets, NUMA nodes, caches and cores,
//! with memory, huge pages and distances of each NUMA node.
//!
//! [`discover()`] reads them from sysfs, by the rules of cAdvisor, so that a kubelet on the same machine has
//! the same values. [`CpuSet`] and [`NumaNodes`] are the sets that the managers compute with.

// A value of a machine or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod cpu_set;
mod discover;
mod ids;
mod numa_nodes;
mod topology;

pub use crate::cpu_set::CpuSet;
pub use crate::discover::{DiscoverError, Machine, NodeMemory, discover};
pub use crate::ids::{CacheId, CoreId, CpuId, InvalidNumaNode, NumaNode, SocketId};
pub use crate::numa_nodes::{Combinations, NumaNodes};
pub use crate::topology::{CpuPlace, CpuTopology};
