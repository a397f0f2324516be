//! Selects CPUs evenly from several NUMA nodes (`takeByTopologyNUMADistributed`, KEP 2902).

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;

use pod_sync_machine::{Combinations, CpuSet, CpuTopology, NumaNode, SocketId};

use crate::accumulator::{Accumulator, CpuOrder};
use crate::error::AllocateError;
use crate::take::take_packed;

/// How CPUs are distributed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Distribution {
    /// CPUs are taken in groups of this size, which is 1 or the number of threads of a core.
    pub(crate) group: NonZeroUsize,
    pub(crate) order: CpuOrder,
    /// Whether the set on the fewest sockets is selected of sets with as many nodes.
    pub(crate) by_socket: bool,
    /// Number of NUMA nodes that the topology manager selected; at least as many are used if enough have free
    /// CPUs. 0 for none.
    pub(crate) least_nodes: usize,
}

/// Nodes that each give as many CPUs, and those among them that give a group more.
struct Choice {
    nodes: Vec<NumaNode>,
    /// The nodes that give the remainder, in this order.
    of_remainder: Vec<NumaNode>,
    score: Score,
}

/// The lower of two scores is better.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
struct Score {
    sockets: usize,
    /// Standard deviation of the numbers of CPUs that stay free on each node.
    balance: f64,
}

/// Selects `count` of the free CPUs from the fewest NUMA nodes that can give as many each. The rest of the
/// division comes from those of them that leave the free CPUs of all nodes in the best balance. CPUs are
/// packed where that is not possible.
pub(crate) fn take_distributed(
    topology: &CpuTopology,
    free: &CpuSet,
    count: usize,
    how: Distribution,
) -> Result<CpuSet, AllocateError> {
    let packed = || take_packed(topology, free, count, how.order, false);
    if !count.is_multiple_of(how.group.get()) {
        return packed();
    }
    let accumulator = Accumulator::new(topology, free, count, how.order);
    if accumulator.is_satisfied() || accumulator.is_failed() {
        return packed();
    }
    let search = Search::new(&accumulator, count, how);
    match search.sizes(topology).find_map(|size| search.best(size)) {
        Some(choice) => search.take(accumulator, &choice),
        None => packed(),
    }
}

struct Search {
    /// Nodes with free CPUs, in the order in which they are tried.
    nodes: Vec<NumaNode>,
    free: BTreeMap<NumaNode, usize>,
    sockets: BTreeMap<NumaNode, BTreeSet<SocketId>>,
    count: usize,
    how: Distribution,
}

impl Search {
    fn new(accumulator: &Accumulator<'_>, count: usize, how: Distribution) -> Self {
        let nodes = accumulator.sorted_nodes();
        let free = nodes.iter().map(|node| (*node, accumulator.free_on(*node))).collect();
        let topology = accumulator.topology();
        let sockets = nodes.iter().map(|node| (*node, topology.sockets_of((*node).into()))).collect();
        Self { nodes, free, sockets, count, how }
    }

    /// Returns the numbers of nodes to try (`rangeNUMANodesNeededToSatisfy`).
    fn sizes(&self, topology: &CpuTopology) -> RangeInclusive<usize> {
        let groups_needed = self.count.div_ceil(self.how.group.get());
        let groups = topology.places().len().div_ceil(self.how.group.get());
        let groups_per_node = groups.div_ceil(topology.nodes().len().max(1)).max(1);
        let most = groups_needed.min(self.nodes.len());
        let least = groups_needed.div_ceil(groups_per_node);
        let aligned = least.max(self.how.least_nodes);
        (if aligned <= most { aligned } else { least })..=most
    }

    fn free_on(&self, node: NumaNode) -> usize {
        self.free.get(&node).copied().unwrap_or(0)
    }

    /// Returns a number of CPUs without what is no whole group.
    fn whole_groups(&self, cpus: usize) -> usize {
        cpus.saturating_sub(cpus.checked_rem(self.how.group.get()).unwrap_or(0))
    }

    /// Returns the number of CPUs that each of `size` nodes gives.
    fn share(&self, size: usize) -> usize {
        self.whole_groups(self.count.checked_div(size).unwrap_or(0))
    }

    fn best(&self, size: usize) -> Option<Choice> {
        let mut best: Option<Choice> = None;
        for nodes in Combinations::new(self.nodes.clone(), size) {
            let is_perfect = |best: &Choice| best.score.balance == 0.0 && !self.how.by_socket;
            if best.as_ref().is_some_and(is_perfect) {
                break;
            }
            let choice = self.choice(nodes);
            if let Some(choice) = choice
                && best.as_ref().is_none_or(|best| choice.score < best.score)
            {
                best = Some(choice);
            }
        }
        best
    }

    /// Returns how these nodes give the CPUs, or none if they cannot.
    fn choice(&self, nodes: Vec<NumaNode>) -> Option<Choice> {
        let share = self.share(nodes.len());
        let in_groups = sum(nodes.iter().map(|node| self.whole_groups(self.free_on(*node))));
        if in_groups < self.count || nodes.iter().any(|node| self.free_on(*node) < share) {
            return None;
        }
        let mut left = self.free.clone();
        for node in &nodes {
            left.entry(*node).and_modify(|cpus| *cpus = cpus.saturating_sub(share));
        }
        let remainder = self.count.saturating_sub(share.saturating_mul(nodes.len()));
        let (balance, of_remainder) = if remainder == 0 {
            (standard_deviation(left.values().copied()), Vec::new())
        } else {
            self.best_remainder(&left, &nodes, remainder)?
        };
        let sockets: BTreeSet<SocketId> =
            nodes.iter().filter_map(|node| self.sockets.get(node)).flatten().copied().collect();
        let sockets = if self.how.by_socket { sockets.len() } else { 0 };
        Some(Choice { nodes, of_remainder, score: Score { sockets, balance } })
    }

    /// Returns the nodes that give the remainder, and the balance after that. More nodes are tried first.
    fn best_remainder(
        &self,
        left: &BTreeMap<NumaNode, usize>,
        nodes: &[NumaNode],
        remainder: usize,
    ) -> Option<(f64, Vec<NumaNode>)> {
        let cpus_left = |node: &NumaNode| left.get(node).copied().unwrap_or(0);
        let group = self.how.group.get();
        let able: Vec<NumaNode> = nodes.iter().copied().filter(|node| cpus_left(node) >= group).collect();
        let mut best: Option<(f64, Vec<NumaNode>)> = None;
        for size in (1..=able.len()).rev() {
            for subset in Combinations::new(able.clone(), size) {
                if sum(subset.iter().map(|node| self.whole_groups(cpus_left(node)))) < remainder {
                    continue;
                }
                let mut after = left.clone();
                let mut groups =
                    self.rounds(&subset, remainder, |node| after.get(&node).copied().unwrap_or(0));
                while let Some(node) = groups.pop() {
                    after.entry(node).and_modify(|cpus| *cpus = cpus.saturating_sub(group));
                }
                let balance = standard_deviation(after.values().copied());
                if best.as_ref().is_none_or(|(least, _)| balance < *least) {
                    best = Some((balance, subset));
                }
            }
        }
        best
    }

    /// Returns the node of each group of the remainder: one group of each node in turn, of those that still
    /// have one.
    fn rounds(
        &self,
        nodes: &[NumaNode],
        remainder: usize,
        free: impl Fn(NumaNode) -> usize,
    ) -> Vec<NumaNode> {
        let group = self.how.group.get();
        let mut left: Vec<(NumaNode, usize)> = nodes.iter().map(|node| (*node, free(*node))).collect();
        let mut missing = remainder;
        let mut turns = Vec::new();
        while missing > 0 && left.iter().any(|(_, cpus)| *cpus >= group) {
            for (node, cpus) in &mut left {
                if missing > 0 && *cpus >= group {
                    *cpus = cpus.saturating_sub(group);
                    missing = missing.saturating_sub(group);
                    turns.push(*node);
                }
            }
        }
        turns
    }

    fn take(&self, mut accumulator: Accumulator<'_>, choice: &Choice) -> Result<CpuSet, AllocateError> {
        let topology = accumulator.topology();
        let group = self.how.group.get();
        let share = self.share(choice.nodes.len());
        for node in &choice.nodes {
            let free = accumulator.free_where(|place| place.node == *node);
            accumulator.take(&take_packed(topology, &free, share, self.how.order, false)?);
        }
        let turns = self.rounds(&choice.of_remainder, accumulator.needed(), |node| accumulator.free_on(node));
        for node in turns {
            let free = accumulator.free_where(|place| place.node == node);
            accumulator.take(&take_packed(topology, &free, group, self.how.order, false)?);
        }
        if accumulator.is_satisfied() { Ok(accumulator.into_taken()) } else { Err(AllocateError::Failed) }
    }
}

fn sum(numbers: impl Iterator<Item = usize>) -> usize {
    numbers.fold(0, usize::saturating_add)
}

/// Returns the standard deviation. It and the mean are rounded to thousandths, so that equal balances compare
/// as equal.
fn standard_deviation(numbers: impl Iterator<Item = usize> + Clone) -> f64 {
    let rounded = |number: f64| (number * 1000.0).round() / 1000.0;
    let count = numbers.clone().count().max(1) as f64;
    let mean = rounded(numbers.clone().map(|number| number as f64).sum::<f64>() / count);
    let squares: f64 = numbers.map(|number| (number as f64 - mean) * (number as f64 - mean)).sum();
    rounded((squares / count).sqrt())
}

#[cfg(test)]
mod tests;
