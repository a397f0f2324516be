//! The merge of hints (`pkg/kubelet/cm/topologymanager: HintMerger`).

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use pod_sync_machine::{NumaNode, NumaNodes};

use crate::hint::Hint;

/// Distances between NUMA nodes.
pub(crate) type Distances = BTreeMap<NumaNode, BTreeMap<NumaNode, u64>>;

/// The order of sets of nodes: the smaller one is better.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Closeness<'a> {
    distances: Option<&'a Distances>,
}

impl<'a> Closeness<'a> {
    pub(crate) fn new(distances: Option<&'a Distances>) -> Self {
        Self { distances }
    }

    /// Compares by the number of nodes, then by the mean distance if distances count, then by the lowest
    /// nodes.
    fn compare(self, left: NumaNodes, right: NumaNodes) -> Ordering {
        let by_distance = || self.mean_distance(left).total_cmp(&self.mean_distance(right));
        left.len().cmp(&right.len()).then_with(by_distance).then_with(|| left.cmp(&right))
    }

    /// Returns the mean distance between each two of the nodes, each with itself included; 0 if distances do
    /// not count.
    fn mean_distance(self, nodes: NumaNodes) -> f64 {
        let Some(distances) = self.distances else { return 0.0 };
        let between =
            |first: NumaNode, second: NumaNode| distances.get(&first).and_then(|row| row.get(&second));
        let pairs = nodes.iter().flat_map(|first| nodes.iter().map(move |second| between(first, second)));
        let sum: u64 = pairs.flatten().fold(0, |sum, distance| sum.saturating_add(*distance));
        let count = nodes.len().saturating_mul(nodes.len()).max(1);
        sum as f64 / count as f64
    }
}

/// A possible intersection of one hint of each resource so far. Combinations with the same
/// result are one value, so that their number does not grow with each resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Partial {
    /// No hint had nodes.
    AnyNodes { is_preferred: bool },
    /// All hints with nodes had these, and each hint was preferred.
    Preferred(NumaNodes),
    /// A hint was not preferred, or two had different nodes.
    NotPreferred(NumaNodes),
}

impl Partial {
    fn with(self, hint: Hint) -> Self {
        match (self, hint.nodes) {
            (Self::AnyNodes { is_preferred }, None) => {
                Self::AnyNodes { is_preferred: is_preferred && hint.is_preferred }
            }
            (Self::AnyNodes { is_preferred: true }, Some(nodes)) if hint.is_preferred => {
                Self::Preferred(nodes)
            }
            (Self::AnyNodes { .. }, Some(nodes)) => Self::NotPreferred(nodes),
            (Self::Preferred(nodes), None) if hint.is_preferred => Self::Preferred(nodes),
            (Self::Preferred(nodes), Some(more)) if hint.is_preferred && more == nodes => {
                Self::Preferred(nodes)
            }
            (Self::Preferred(nodes) | Self::NotPreferred(nodes), more) => {
                Self::NotPreferred(more.map_or(nodes, |more| nodes.intersection(more)))
            }
        }
    }

    /// Returns the nodes of the machine that are left, and whether they are preferred.
    fn finish(self, all: NumaNodes) -> (NumaNodes, bool) {
        match self {
            Self::AnyNodes { is_preferred } => (all, is_preferred),
            Self::Preferred(nodes) => (nodes.intersection(all), true),
            Self::NotPreferred(nodes) => (nodes.intersection(all), false),
        }
    }
}

/// Returns the best intersection of one hint of each list. It is not preferred, and has all nodes, if each
/// intersection is empty.
pub(crate) fn best(all: NumaNodes, lists: &[Vec<Hint>], closeness: Closeness<'_>) -> Hint {
    let start = BTreeSet::from([Partial::AnyNodes { is_preferred: true }]);
    let merged = lists.iter().fold(start, |partials, list| {
        partials.iter().flat_map(|partial| list.iter().map(|hint| partial.with(*hint))).collect()
    });
    let aim = most_of_fewest(lists);
    let candidates =
        merged.into_iter().map(|partial| partial.finish(all)).filter(|(nodes, _)| !nodes.is_empty());
    let best = candidates.min_by(|(left, left_preferred), (right, right_preferred)| {
        right_preferred.cmp(left_preferred).then_with(|| {
            let by_aim = if *left_preferred { Ordering::Equal } else { compare_to_aim(aim, *left, *right) };
            by_aim.then_with(|| closeness.compare(*left, *right))
        })
    });
    let (nodes, is_preferred) = best.unwrap_or((all, false));
    Hint { nodes: Some(nodes), is_preferred }
}

/// Returns the number of nodes that a hint which is not preferred should have: the number that the resource
/// with the widest hints needs at least (`maxOfMinAffinityCounts`).
fn most_of_fewest(lists: &[Vec<Hint>]) -> usize {
    let fewest = |list: &Vec<Hint>| list.iter().filter_map(|hint| hint.nodes).map(NumaNodes::len).min();
    lists.iter().filter_map(fewest).max().unwrap_or(0)
}

/// Compares the numbers of nodes of two hints that are not preferred: the one that is nearer to the aim from
/// below is better, and one above the aim is worse than any below it.
fn compare_to_aim(aim: usize, left: NumaNodes, right: NumaNodes) -> Ordering {
    let rank = |nodes: NumaNodes| {
        let below = aim.checked_sub(nodes.len());
        (below.is_none(), below.unwrap_or_else(|| nodes.len()))
    };
    rank(left).cmp(&rank(right))
}
