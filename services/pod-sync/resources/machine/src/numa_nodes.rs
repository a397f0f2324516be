//! Sets of NUMA nodes.

use std::fmt;

use quintlet_model::cpu_list::CpuList;

use crate::ids::NumaNode;

/// A set of NUMA nodes (`pkg/kubelet/cm/topologymanager/bitmask`). Its text form is the kernel's list format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct NumaNodes(u64);

impl NumaNodes {
    /// The empty set.
    pub const EMPTY: Self = Self(0);

    /// Returns the number of nodes.
    #[must_use]
    pub fn len(self) -> usize {
        usize::try_from(self.0.count_ones()).unwrap_or(0)
    }

    /// Returns whether there is no node.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns whether the set has a node.
    #[must_use]
    pub fn contains(self, node: NumaNode) -> bool {
        self.0 & bit(node) != 0
    }

    /// Returns the nodes that both sets have.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the nodes of both sets.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns whether `other` has all nodes of this set.
    #[must_use]
    pub const fn is_subset(self, other: Self) -> bool {
        self.0 & !other.0 == 0
    }

    /// Returns the nodes in ascending order.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = NumaNode> {
        NumaNode::all().filter(move |node| self.contains(*node))
    }

    /// Returns each subset that is not empty: the small ones first, those of one size in the order of their
    /// nodes (`IterateBitMasks`).
    pub fn subsets(self) -> impl Iterator<Item = Self> {
        let nodes: Vec<NumaNode> = self.iter().collect();
        (1..=nodes.len()).flat_map(move |size| {
            Combinations::new(nodes.clone(), size).map(|subset| subset.into_iter().collect())
        })
    }
}

fn bit(node: NumaNode) -> u64 {
    1_u64.checked_shl(u32::from(node.number())).unwrap_or(0)
}

impl FromIterator<NumaNode> for NumaNodes {
    fn from_iter<T: IntoIterator<Item = NumaNode>>(nodes: T) -> Self {
        Self(nodes.into_iter().fold(0, |set, node| set | bit(node)))
    }
}

impl From<NumaNode> for NumaNodes {
    fn from(node: NumaNode) -> Self {
        Self(bit(node))
    }
}

impl fmt::Display for NumaNodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iter().map(|node| u32::from(node.number())).collect::<CpuList>().fmt(f)
    }
}

/// The combinations of some items, in the order of the items. Each is computed when it is needed, since there
/// may be many.
#[derive(Debug, Clone)]
pub struct Combinations<T> {
    items: Vec<T>,
    /// Positions of the next combination, ascending; none after the last one.
    next: Option<Vec<usize>>,
}

impl<T: Clone> Combinations<T> {
    /// Returns the combinations of `size` items. There is none of more items than there are, and none of no
    /// items.
    #[must_use]
    pub fn new(items: Vec<T>, size: usize) -> Self {
        let exists = (1..=items.len()).contains(&size);
        Self { items, next: exists.then(|| (0..size).collect()) }
    }

    fn following(&self, positions: &[usize]) -> Option<Vec<usize>> {
        // The last position that can still move, counted from the end.
        let can_move = |(from_end, position): (usize, &usize)| {
            position.saturating_add(from_end).saturating_add(1) < self.items.len()
        };
        let from_end = positions.iter().rev().enumerate().position(can_move)?;
        let kept = positions.len().saturating_sub(from_end).saturating_sub(1);
        let (head, tail) = positions.split_at_checked(kept)?;
        let first = tail.first()?.saturating_add(1);
        let moved = (first..).take(tail.len());
        Some(head.iter().copied().chain(moved).collect())
    }
}

impl<T: Clone> Iterator for Combinations<T> {
    type Item = Vec<T>;

    fn next(&mut self) -> Option<Vec<T>> {
        let positions = self.next.take()?;
        self.next = self.following(&positions);
        Some(positions.iter().filter_map(|position| self.items.get(*position)).cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(numbers: &[u64]) -> NumaNodes {
        numbers.iter().map(|number| NumaNode::try_from(*number).unwrap()).collect()
    }

    #[test]
    fn sets_of_as_many_nodes_are_ordered_by_their_highest_nodes() {
        for (low, high) in
            [(nodes(&[0]), nodes(&[1])), (nodes(&[0, 1]), nodes(&[0, 2])), (nodes(&[1, 2]), nodes(&[0, 3]))]
        {
            assert!(low < high, "{low} {high}");
        }
        assert_eq!(nodes(&[0, 1, 2, 63]).to_string(), "0-2,63");
        assert_eq!(NumaNode::try_from(64), Err(crate::InvalidNumaNode(64)));
    }

    #[test]
    fn subsets_come_by_size_and_in_the_order_of_their_nodes() {
        let subsets: Vec<String> = nodes(&[0, 2, 5]).subsets().map(|set| set.to_string()).collect();
        assert_eq!(subsets, ["0", "2", "5", "0,2", "0,5", "2,5", "0,2,5"]);
        assert_eq!(NumaNodes::EMPTY.subsets().count(), 0);
        assert_eq!(nodes(&[0, 1, 2, 3, 4, 5, 6, 7]).subsets().count(), 255);
    }

    #[test]
    fn combinations_keep_the_order_of_the_items() {
        let all: Vec<String> = Combinations::new(vec!["c", "a", "b", "d"], 3).map(|c| c.concat()).collect();
        assert_eq!(all, ["cab", "cad", "cbd", "abd"]);
        assert_eq!(Combinations::new(vec![1, 2], 0).count(), 0);
        assert_eq!(Combinations::new(vec![1, 2], 3).count(), 0);
        assert_eq!(Combinations::new((0..8).collect(), 4).count(), 70);
    }
}
