//! The memory of each NUMA node, and how much of it is free
//! (`pkg/kubelet/cm/memorymanager/state: NUMANodeMap`).

use std::collections::{BTreeMap, BTreeSet};

use pod_sync_machine::{Machine, NumaNode, NumaNodes};

use crate::error::{SizeField, StateDifference};
use crate::kind::MemoryKind;
use crate::reserved::{Amounts, ReservedMemory};

/// Memory of one kind on a NUMA node, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryTable {
    /// Size.
    pub total: u64,
    /// Bytes that no pod gets.
    pub system_reserved: u64,
    /// Bytes that pods can get.
    pub allocatable: u64,
    /// Bytes that pods have.
    pub reserved: u64,
    /// Bytes that are free for pods.
    pub free: u64,
}

impl MemoryTable {
    fn new(total: u64, system_reserved: u64, huge_pages: u64) -> Self {
        let allocatable = total.saturating_sub(system_reserved).saturating_sub(huge_pages);
        Self { total, system_reserved, allocatable, reserved: 0, free: allocatable }
    }

    /// Takes up to `bytes`, and returns how many are still missing.
    fn take(&mut self, bytes: u64) -> u64 {
        let taken = bytes.min(self.free);
        self.free = self.free.saturating_sub(taken);
        self.reserved = self.reserved.saturating_add(taken);
        bytes.saturating_sub(taken)
    }

    /// Gives up to `bytes` back, and returns how many are left.
    fn give_back(&mut self, bytes: u64) -> u64 {
        let given = bytes.min(self.reserved);
        self.free = self.free.saturating_add(given);
        self.reserved = self.reserved.saturating_sub(given);
        bytes.saturating_sub(given)
    }
}

/// The memory of a NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeTable {
    /// Number of blocks on this node. A container has one for each kind of memory.
    pub assignments: u64,
    /// The nodes whose memory is given together; this one on its own if it is given alone, or not at all.
    pub group: NumaNodes,
    /// Each kind of memory.
    pub kinds: BTreeMap<MemoryKind, MemoryTable>,
}

/// The memory of all NUMA nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeTables(pub BTreeMap<NumaNode, NodeTable>);

impl NodeTables {
    /// Returns the memory of a machine without any assignment (`getDefaultMachineState`).
    #[must_use]
    pub fn unused(machine: &Machine, reserved: &ReservedMemory) -> Self {
        let nodes = machine.nodes.iter().map(|(node, memory)| {
            let pages = memory
                .huge_pages
                .iter()
                .map(|(size, count)| (MemoryKind::huge_pages(*size), size.saturating_mul(*count)));
            let pages: Vec<(MemoryKind, u64)> = pages.collect();
            let in_pages = pages.iter().fold(0_u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
            let table = |kind: MemoryKind, total, huge_pages| {
                let system_reserved = reserved.on(*node, &kind);
                (kind, MemoryTable::new(total, system_reserved, huge_pages))
            };
            let ordinary = table(MemoryKind::memory(), memory.bytes, in_pages);
            let kinds = pages.into_iter().map(|(kind, bytes)| table(kind, bytes, 0)).chain([ordinary]);
            (*node, NodeTable { assignments: 0, group: (*node).into(), kinds: kinds.collect() })
        });
        Self(nodes.collect())
    }

    /// Returns the NUMA nodes.
    #[must_use]
    pub fn nodes(&self) -> NumaNodes {
        self.0.keys().copied().collect()
    }

    /// Returns the table of a kind of memory on a node, which is empty if the node has none of it.
    #[must_use]
    pub fn table(&self, node: NumaNode, kind: &MemoryKind) -> MemoryTable {
        self.0.get(&node).and_then(|table| table.kinds.get(kind)).copied().unwrap_or_default()
    }

    /// Returns the sum of a value over some nodes.
    pub(crate) fn sum(&self, nodes: NumaNodes, kind: &MemoryKind, value: impl Fn(MemoryTable) -> u64) -> u64 {
        nodes.iter().fold(0, |sum, node| sum.saturating_add(value(self.table(node, kind))))
    }

    /// Returns whether the memory of these nodes may be given together: a node alone unless it is in a group,
    /// and several nodes if each is unused or in this very group.
    pub(crate) fn may_group(&self, nodes: NumaNodes) -> bool {
        if nodes.len() == 1 {
            return nodes.iter().all(|node| self.group(node).len() <= 1);
        }
        !self.breaks_group(nodes)
    }

    /// Returns whether several nodes are given together although one of them is in use in another way
    /// (`isAffinityViolatingNUMAAllocations`).
    pub(crate) fn breaks_group(&self, nodes: NumaNodes) -> bool {
        let is_used_otherwise = |node: NumaNode| {
            let assignments = self.0.get(&node).map_or(0, |table| table.assignments);
            assignments > 0 && (self.group(node).len() == 1 || self.group(node) != nodes)
        };
        nodes.len() != 1 && nodes.iter().any(is_used_otherwise)
    }

    fn group(&self, node: NumaNode) -> NumaNodes {
        self.0.get(&node).map(|table| table.group).unwrap_or_default()
    }

    /// Takes memory from nodes, from the lowest one first (`updateMachineState`).
    pub(crate) fn take(&mut self, nodes: NumaNodes, kind: &MemoryKind, bytes: u64) {
        let mut missing = bytes;
        for node in nodes.iter() {
            let Some(table) = self.0.get_mut(&node) else { continue };
            table.assignments = table.assignments.saturating_add(1);
            table.group = nodes;
            if let Some(table) = table.kinds.get_mut(kind) {
                missing = table.take(missing);
            }
        }
    }

    /// Gives memory back to nodes (`releaseMemory`).
    pub(crate) fn give_back(&mut self, nodes: NumaNodes, kind: &MemoryKind, bytes: u64) {
        let mut left = bytes;
        for node in nodes.iter() {
            let Some(table) = self.0.get_mut(&node) else { continue };
            table.assignments = table.assignments.saturating_sub(1);
            if table.assignments == 0 {
                table.group = node.into();
            }
            if let Some(table) = table.kinds.get_mut(kind) {
                left = table.give_back(left);
            }
        }
    }

    /// Returns these tables, which have no assignments, with as much ordinary memory as `recorded` has.
    pub(crate) fn with_memory_of(&self, recorded: &Self) -> Self {
        let kind = MemoryKind::memory();
        let node = |(number, table): (&NumaNode, &NodeTable)| {
            let mut table = table.clone();
            let recorded = recorded.0.get(number).and_then(|recorded| recorded.kinds.get(&kind));
            if let (Some(recorded), Some(found)) = (recorded, table.kinds.get(&kind)) {
                let pages = table.kinds.iter().filter(|(other, _)| **other != kind);
                let in_pages = pages.fold(0_u64, |sum, (_, pages)| sum.saturating_add(pages.total));
                let memory = MemoryTable::new(recorded.total, found.system_reserved, in_pages);
                table.kinds.insert(kind.clone(), memory);
            }
            (*number, table)
        };
        Self(self.0.iter().map(node).collect())
    }

    /// Returns the size of each kind of memory on each node.
    #[must_use]
    pub fn sizes(&self) -> BTreeMap<NumaNode, Amounts> {
        let sizes =
            |table: &NodeTable| table.kinds.iter().map(|(kind, table)| (kind.clone(), table.total)).collect();
        self.0.iter().map(|(node, table)| (*node, sizes(table))).collect()
    }

    /// Returns whether these nodes have given as much as those of other sizes.
    ///
    /// # Errors
    /// Returns the first nodes that could not.
    pub(crate) fn check_given(&self, other: &Self) -> Result<(), StateDifference> {
        let groups = other.0.values().flat_map(|table| table.kinds.keys().map(|kind| (table.group, kind)));
        for (nodes, kind) in groups {
            let given = |tables: &Self| tables.sum(nodes, kind, |table| table.reserved);
            let missing = given(other).saturating_sub(given(self));
            if missing > 0 {
                return Err(StateDifference::TooSmall { nodes, kind: kind.clone(), missing });
            }
        }
        Ok(())
    }

    /// Compares the tables of a state file with those of the machine (`areMachineStatesEqual`). Which nodes
    /// of a group memory comes from does not count.
    ///
    /// # Errors
    /// Returns the first difference.
    pub(crate) fn compare(&self, machine: &Self) -> Result<(), StateDifference> {
        let (recorded, found) = (self.nodes(), machine.nodes());
        if recorded != found {
            return Err(StateDifference::Nodes { recorded, found });
        }
        self.0.iter().zip(machine.0.values()).try_for_each(|((node, recorded), found)| {
            compare_sizes(*node, recorded, found)?;
            let given = |tables: &Self| -> Vec<(MemoryKind, [u64; 2])> {
                let sums = |kind| {
                    let free = tables.sum(recorded.group, kind, |table| table.free);
                    [free, tables.sum(recorded.group, kind, |table| table.reserved)]
                };
                recorded.kinds.keys().map(|kind| (kind.clone(), sums(kind))).collect()
            };
            let is_same = (recorded.assignments, recorded.group) == (found.assignments, found.group)
                && given(self) == given(machine);
            if is_same { Ok(()) } else { Err(StateDifference::Assignments(*node)) }
        })
    }
}

/// Compares the sizes of each kind of memory. A kind that one side does not have is empty.
fn compare_sizes(node: NumaNode, recorded: &NodeTable, found: &NodeTable) -> Result<(), StateDifference> {
    let kinds: BTreeSet<&MemoryKind> = recorded.kinds.keys().chain(found.kinds.keys()).collect();
    for kind in kinds {
        let table = |node: &NodeTable| node.kinds.get(kind).copied().unwrap_or_default();
        let (recorded, found) = (table(recorded), table(found));
        for (field, recorded, found) in [
            (SizeField::Total, recorded.total, found.total),
            (SizeField::SystemReserved, recorded.system_reserved, found.system_reserved),
            (SizeField::Allocatable, recorded.allocatable, found.allocatable),
        ] {
            if recorded != found {
                return Err(StateDifference::Size { node, kind: kind.clone(), field, recorded, found });
            }
        }
    }
    Ok(())
}
