//! Memory that no pod gets (`reservedMemory`).

use std::collections::{BTreeMap, BTreeSet};

use pod_sync_machine::{Machine, NumaNode};

use crate::kind::MemoryKind;

/// Bytes of each kind.
pub type Amounts = BTreeMap<MemoryKind, u64>;

/// The reserved memory of each NUMA node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReservedMemory(BTreeMap<NumaNode, Amounts>);

/// `reservedMemory` does not fit the machine or the other reservations. The texts are the kubelet's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReservedError {
    /// The NUMA node does not exist.
    #[error(
        "the reserved memory configuration references a NUMA node {0} that does not exist on this machine"
    )]
    UnknownNode(NumaNode),
    /// The sum over all NUMA nodes is not the reservation of the node.
    #[error(
        "the total amount \"{total}\" of type \"{kind}\" is not equal to the value \"{expected}\" determined by Node Allocatable feature"
    )]
    OtherTotal {
        /// The kind of memory.
        kind: MemoryKind,
        /// Sum in bytes.
        total: u64,
        /// Reservation of the node in bytes.
        expected: u64,
    },
    /// No ordinary memory is reserved.
    #[error("[memorymanager] you should specify the system reserved memory")]
    NoMemory,
}

impl ReservedMemory {
    /// Returns the reservations if they fit. `of_node` is the sum of the system's and kube's reservation and
    /// the eviction threshold.
    ///
    /// # Errors
    /// See [`ReservedError`].
    pub fn new(
        reservations: BTreeMap<NumaNode, Amounts>,
        of_node: &Amounts,
        machine: &Machine,
    ) -> Result<Self, ReservedError> {
        if let Some(unknown) = reservations.keys().find(|node| !machine.nodes.contains_key(node)) {
            return Err(ReservedError::UnknownNode(*unknown));
        }
        let kinds: BTreeSet<&MemoryKind> =
            reservations.values().flat_map(BTreeMap::keys).chain(of_node.keys()).collect();
        for kind in kinds {
            let amounts = reservations.values().filter_map(|amounts| amounts.get(kind));
            let total = amounts.fold(0_u64, |sum, amount| sum.saturating_add(*amount));
            let expected = of_node.get(kind).copied().unwrap_or(0);
            if total != expected {
                return Err(ReservedError::OtherTotal { kind: kind.clone(), total, expected });
            }
        }
        if of_node.get(&MemoryKind::memory()).copied().unwrap_or(0) == 0 {
            return Err(ReservedError::NoMemory);
        }
        Ok(Self(reservations))
    }

    /// Returns the reserved bytes of a kind on a NUMA node.
    #[must_use]
    pub fn on(&self, node: NumaNode, kind: &MemoryKind) -> u64 {
        self.0.get(&node).and_then(|amounts| amounts.get(kind)).copied().unwrap_or(0)
    }
}
