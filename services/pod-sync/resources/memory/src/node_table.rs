//! The memory of each NUMA node, and how much of it is free
//! (`pkg/kubelet/cm/memorymanager/state: NUMANodeMap`).

use std::collections::BTreeMap;

use pod_sync_machine::{Machine, NumaNode, NumaNodes};

use crate::kind::MemoryKind;
use crate::reserved::ReservedMemory;

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

    /// Returns whether both are the same but for the nodes of a group that memory comes from
    /// (`areMachineStatesEqual`).
    pub(crate) fn is_equivalent(&self, other: &Self) -> bool {
        let sums = |tables: &Self, group: NumaNodes, kind: &MemoryKind| {
            (tables.sum(group, kind, |table| table.free), tables.sum(group, kind, |table| table.reserved))
        };
        let is_same = |(node, table): (&NumaNode, &NodeTable)| {
            let Some(found) = other.0.get(node) else { return false };
            let sizes = |table: &NodeTable| -> Vec<(MemoryKind, [u64; 3])> {
                let sizes = |t: &MemoryTable| [t.total, t.system_reserved, t.allocatable];
                table.kinds.iter().map(|(kind, table)| (kind.clone(), sizes(table))).collect()
            };
            (table.assignments, table.group) == (found.assignments, found.group)
                && sizes(table) == sizes(found)
                && table
                    .kinds
                    .keys()
                    .all(|kind| sums(self, table.group, kind) == sums(other, table.group, kind))
        };
        self.0.len() == other.0.len() && self.0.iter().all(is_same)
    }
}
