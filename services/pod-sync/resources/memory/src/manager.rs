//! The assignments of a running node, with the policy `Static`.

use std::collections::BTreeMap;

use pod_sync_machine::NumaNodes;
use pod_sync_topology::{ContainerKind, Hint, Hints, PodLevel, RequestScope};

use crate::blocks::{MemoryAssignments, MemoryBlock};
use crate::error::{InvalidMemoryState, MemoryError, StateDifference};
use crate::kind::MemoryKind;
use crate::node_table::NodeTables;
use crate::requests::{MemoryRequest, PodMemoryRequests};
use crate::reserved::Amounts;

/// Memory that init containers leave to later containers of their pod. It can only be used on the same nodes.
type Reusable = BTreeMap<(NumaNodes, MemoryKind), u64>;

/// Assigns memory.
#[derive(Debug, Clone)]
pub struct MemoryManager {
    tables: NodeTables,
    assignments: MemoryAssignments,
    /// For the pod that is being admitted.
    reusable: Option<(String, Reusable)>,
}

impl MemoryManager {
    /// Name of the policy in the configuration and in the state file.
    pub const POLICY: &'static str = "Static";

    /// Returns a manager that continues with the content of the state file, which may be empty
    /// (`validateState`). `unused` is the memory of this machine. NUMA nodes may have more or less memory
    /// than recorded as long as the assignments fit: it differs by some MiB from one boot to the next, since
    /// the kernel is loaded at another address. The memory of whole pods is free if `level` has none, or if
    /// no container is left.
    ///
    /// # Errors
    /// See [`InvalidMemoryState`]. The node must be drained, and the file removed.
    pub fn new(
        unused: NodeTables,
        restored: NodeTables,
        mut assignments: MemoryAssignments,
        level: PodLevel,
    ) -> Result<Self, InvalidMemoryState> {
        let ended = assignments.remove_ended_pods();
        let expected = with_assignments(unused.with_memory_of(&restored), &assignments)?;
        let has_assignments = assignments.taken().next().is_some();
        let tables = if restored.0.is_empty() && has_assignments {
            return Err(InvalidMemoryState::NoNodes);
        } else if restored.0.is_empty() {
            unused
        } else {
            let is_resized = restored.sizes() != unused.sizes();
            let recorded = without_ended_pods(restored, &expected, &ended)?;
            if is_resized {
                let tables = with_assignments(unused, &assignments)?;
                tables.check_given(&expected)?;
                tables
            } else {
                recorded
            }
        };
        let mut manager = Self { tables, assignments, reusable: None };
        if level == PodLevel::Unmanaged {
            manager.end_pods();
        }
        Ok(manager)
    }

    fn end_pods(&mut self) {
        let pods: Vec<String> = self.assignments.pods().map(|(pod, _)| pod.to_owned()).collect();
        for pod in &pods {
            let blocks = self.assignments.remove_pod(pod);
            self.give_back(&blocks);
        }
    }

    fn give_back(&mut self, blocks: &[MemoryBlock]) {
        for block in blocks {
            self.tables.give_back(block.nodes, &block.kind, block.bytes);
        }
    }

    /// Returns the memory of each NUMA node.
    #[must_use]
    pub fn tables(&self) -> &NodeTables {
        &self.tables
    }

    /// Returns the memory of containers.
    #[must_use]
    pub fn assignments(&self) -> &MemoryAssignments {
        &self.assignments
    }

    /// Returns the NUMA nodes of a container, for its `cpuset.mems`; none if its memory comes from any node.
    #[must_use]
    pub fn nodes(&self, pod: &str, container: &str) -> Option<NumaNodes> {
        let blocks = self.assignments.container(pod, container)?;
        let nodes = blocks.iter().fold(NumaNodes::EMPTY, |nodes, block| nodes.union(block.nodes));
        (!nodes.is_empty()).then_some(nodes)
    }

    /// Returns the hints for a request, one list for each kind of memory (`GetTopologyHints`,
    /// `GetPodTopologyHints`).
    #[must_use]
    pub fn hints(&self, requests: &PodMemoryRequests, scope: RequestScope<'_>) -> Vec<Hints> {
        if let (Some(budget), RequestScope::Pod) = (&requests.budget, scope) {
            return self.pod_hints(requests, budget);
        }
        let amounts = match scope {
            RequestScope::Container(name) => {
                requests.container(name).map(|r| r.amounts.clone()).unwrap_or_default()
            }
            RequestScope::Pod => requests.total(),
        };
        let in_scope = |request: &&MemoryRequest| match scope {
            RequestScope::Container(name) => request.container == name,
            RequestScope::Pod => true,
        };
        let in_scope = requests.containers.iter().filter(in_scope);
        let mut held =
            in_scope.filter_map(|request| self.assignments.container(&requests.pod, &request.container));
        match held.next() {
            Some(blocks) if !amounts.is_empty() => hints_again(blocks, &amounts),
            _ => self.hints_of_each(&requests.pod, &amounts),
        }
    }

    fn pod_hints(&self, requests: &PodMemoryRequests, budget: &Amounts) -> Vec<Hints> {
        if requests.check_pool(budget).is_err() {
            return vec![Hints::OneOf(Vec::new()); budget.len()];
        }
        match self.assignments.pod(&requests.pod) {
            Some(blocks) => hints_again(blocks, budget),
            None => self.without_containers(requests).hints_of_each(&requests.pod, budget),
        }
    }

    /// Returns the manager without the memory that containers of a pod have on their own, as with another
    /// scope.
    fn without_containers(&self, requests: &PodMemoryRequests) -> Self {
        let mut next = self.clone();
        requests.containers.iter().for_each(|request| next.release(&requests.pod, &request.container));
        next
    }

    /// Gives a pod its memory as a whole, and its containers parts of it (`AllocatePod`). A pod that has
    /// memory keeps it.
    ///
    /// # Errors
    /// No nodes have enough memory, not the nodes that the hint requires, or a container would have none. No
    /// assignment has changed.
    pub fn allocate_pod(&mut self, requests: &PodMemoryRequests, hint: Hint) -> Result<(), MemoryError> {
        let Some(budget) = &requests.budget else { return Ok(()) };
        requests.check_pool(budget)?;
        let pod = requests.pod.as_str();
        if self.assignments.pod(pod).is_none() {
            let mut next = self.without_containers(requests);
            let nodes = next.select(pod, budget, hint)?;
            for (kind, bytes) in budget {
                next.tables.take(nodes, kind, *bytes);
            }
            next.assignments.insert_pod(pod, blocks_on(nodes, budget));
            *self = next;
        }
        let own = self.assignments.pod(pod).unwrap_or_default();
        let nodes = own.iter().fold(NumaNodes::EMPTY, |nodes, block| nodes.union(block.nodes));
        let held: Amounts = own.iter().map(|block| (block.kind.clone(), block.bytes)).collect();
        for (container, amounts) in requests.divide(&held) {
            self.assignments.insert(pod, &container, blocks_on(nodes, &amounts));
        }
        self.recognize(requests);
        Ok(())
    }

    /// Takes over which containers have memory of their own, for a pod that has memory as a whole: the state
    /// file does not have it.
    pub fn recognize(&mut self, requests: &PodMemoryRequests) {
        let exclusive = requests.containers.iter().filter(|request| !request.amounts.is_empty());
        let exclusive = exclusive.map(|request| request.container.clone()).collect();
        self.assignments.set_exclusive(&requests.pod, exclusive);
    }

    fn hints_of_each(&self, pod: &str, amounts: &Amounts) -> Vec<Hints> {
        let hints = self.hints_for(pod, amounts);
        // As in the kubelet, a request that fits nowhere has no preference: its allocation fails later, with
        // a text that says why.
        if hints.is_empty() { vec![Hints::AnyNodes] } else { vec![Hints::OneOf(hints); amounts.len()] }
    }

    /// Returns a hint for each set of nodes that has enough free memory of each kind (`calculateHints`).
    fn hints_for(&self, pod: &str, amounts: &Amounts) -> Vec<Hint> {
        let all = self.tables.nodes();
        if amounts.is_empty() {
            return Vec::new();
        }
        let could_fit = |nodes: &NumaNodes| {
            amounts
                .iter()
                .all(|(kind, bytes)| self.tables.sum(*nodes, kind, |table| table.allocatable) >= *bytes)
        };
        let fewest = all.subsets().find(could_fit).map_or(all.len(), NumaNodes::len);
        let fits = |nodes: &NumaNodes| {
            amounts.iter().all(|(kind, bytes)| {
                let free = self.tables.sum(*nodes, kind, |table| table.free);
                free.saturating_add(self.reusable(pod, *nodes, kind)) >= *bytes
            })
        };
        let subsets =
            all.subsets().filter(could_fit).filter(|nodes| self.tables.may_group(*nodes)).filter(fits);
        subsets.map(|nodes| Hint { nodes: Some(nodes), is_preferred: nodes.len() == fewest }).collect()
    }

    /// Gives a container its memory, on the NUMA nodes that the topology manager selected if it did. A
    /// container that has memory keeps it. The containers of a pod must be given their memory in the order of
    /// their starts, and those of one pod before those of the next, so that init containers leave theirs.
    ///
    /// # Errors
    /// No nodes have enough memory, or not the nodes that the hint requires. No assignment has changed.
    pub fn allocate(
        &mut self,
        requests: &PodMemoryRequests,
        container: &str,
        hint: Hint,
    ) -> Result<(), MemoryError> {
        let Some(request) = requests.container(container) else { return Ok(()) };
        let pod = requests.pod.as_str();
        if let Some(held) = self.assignments.container(pod, container) {
            let held = held.to_vec();
            self.update_reusable(pod, request.kind, &held);
            return Ok(());
        }
        if request.amounts.is_empty() {
            return Ok(());
        }
        let nodes = self.select(pod, &request.amounts, hint)?;
        let mut blocks = Vec::new();
        for (kind, bytes) in &request.amounts {
            let reused = self.reusable(pod, nodes, kind);
            self.tables.take(nodes, kind, bytes.saturating_sub(reused));
            blocks.push(MemoryBlock { nodes, kind: kind.clone(), bytes: *bytes });
        }
        self.update_reusable(pod, request.kind, &blocks);
        self.shrink_init_containers(requests, request, &blocks);
        self.assignments.insert(pod, container, blocks);
        Ok(())
    }

    /// Returns the nodes for a request: those of the hint, or more if they do not suffice.
    fn select(&self, pod: &str, amounts: &Amounts, hint: Hint) -> Result<NumaNodes, MemoryError> {
        let best = |hints: Vec<Hint>| {
            let nodes = hints.into_iter().filter_map(|hint| Some((!hint.is_preferred, hint.nodes?)));
            nodes.min_by_key(|(is_not_preferred, nodes)| (*is_not_preferred, nodes.len(), *nodes))
        };
        let (is_preferred, nodes) = match hint.nodes {
            Some(nodes) => (hint.is_preferred, nodes),
            None => match best(self.hints_for(pod, amounts)) {
                None => return Err(MemoryError::NoNodes),
                Some((true, _)) if hint.is_preferred => return Err(MemoryError::NotPreferred),
                Some((is_not_preferred, nodes)) => (!is_not_preferred, nodes),
            },
        };
        let is_free =
            |(kind, bytes): (&MemoryKind, &u64)| self.tables.sum(nodes, kind, |table| table.free) >= *bytes;
        let nodes = if amounts.iter().all(is_free) {
            nodes
        } else {
            let mut larger = self.hints_for(pod, amounts);
            larger.retain(|hint| hint.nodes.is_some_and(|larger| nodes.is_subset(larger)));
            match best(larger) {
                None => return Err(MemoryError::NoMoreNodes),
                Some((true, _)) if is_preferred => return Err(MemoryError::ExtendedNotPreferred),
                Some((_, larger)) => larger,
            }
        };
        if self.tables.breaks_group(nodes) { Err(MemoryError::OtherGroup) } else { Ok(nodes) }
    }

    fn reusable(&self, pod: &str, nodes: NumaNodes, kind: &MemoryKind) -> u64 {
        let of_pod = self.reusable.as_ref().filter(|(owner, _)| owner == pod);
        of_pod.and_then(|(_, reusable)| reusable.get(&(nodes, kind.clone()))).copied().unwrap_or(0)
    }

    /// Adds the memory of an init container to what later containers can use, or takes away what a container
    /// uses (`updatePodReusableMemory`).
    fn update_reusable(&mut self, pod: &str, kind: ContainerKind, blocks: &[MemoryBlock]) {
        let mut reusable = match self.reusable.take() {
            Some((owner, reusable)) if owner == pod => reusable,
            _ => Reusable::new(),
        };
        for block in blocks {
            let key = (block.nodes, block.kind.clone());
            let bytes = reusable.entry(key).or_default();
            *bytes = match kind {
                ContainerKind::Init => block.bytes.max(*bytes),
                ContainerKind::Sidecar | ContainerKind::Regular => bytes.saturating_sub(block.bytes),
            };
        }
        self.reusable = Some((pod.to_owned(), reusable));
    }

    /// Takes what a container uses again away from the blocks of the init containers before it, so that the
    /// blocks of a pod add up to what it has (`updateInitContainersMemoryBlocks`).
    fn shrink_init_containers(
        &mut self,
        requests: &PodMemoryRequests,
        request: &MemoryRequest,
        blocks: &[MemoryBlock],
    ) {
        let before = requests.containers.iter().take_while(|earlier| earlier.container != request.container);
        let init: Vec<&MemoryRequest> =
            before.filter(|earlier| earlier.kind == ContainerKind::Init).collect();
        for block in blocks {
            let mut left = block.bytes;
            for earlier in &init {
                let Some(held) = self.assignments.container(&requests.pod, &earlier.container) else {
                    continue;
                };
                let mut held = held.to_vec();
                for own in held.iter_mut().filter(|own| own.kind == block.kind && own.nodes == block.nodes) {
                    let reused = own.bytes.min(left);
                    own.bytes = own.bytes.saturating_sub(reused);
                    left = left.saturating_sub(reused);
                }
                self.assignments.insert(&requests.pod, &earlier.container, held);
            }
        }
    }

    /// Ends the assignments of the init containers that ended before a container of their pod starts
    /// (`AddContainer`).
    pub fn start(&mut self, requests: &PodMemoryRequests, container: &str) {
        let before = requests.containers.iter().take_while(|earlier| earlier.container != container);
        for earlier in before.filter(|earlier| earlier.kind == ContainerKind::Init) {
            self.release(&requests.pod, &earlier.container);
        }
    }

    /// Ends the assignment of a container that does not start again. The admission of its pod is over: what
    /// its init containers leave is no longer held for it.
    pub fn release(&mut self, pod: &str, container: &str) {
        self.reusable.take_if(|(owner, _)| owner == pod);
        let blocks = self.assignments.remove(pod, container).unwrap_or_default();
        self.give_back(&blocks);
    }

    /// Ends the assignments of all containers that are not active (`removeStaleState`). Containers of a pod
    /// that is being admitted are active.
    pub fn retain(&mut self, is_active: impl Fn(&str, &str) -> bool) {
        let stale = self.assignments.all().filter(|(pod, container, _)| !is_active(pod, container));
        let stale: Vec<_> = stale.map(|(pod, container, _)| (pod.to_owned(), container.to_owned())).collect();
        for (pod, container) in stale {
            self.release(&pod, &container);
        }
    }
}

/// Takes the memory of all assignments.
fn with_assignments(
    mut tables: NodeTables,
    assignments: &MemoryAssignments,
) -> Result<NodeTables, InvalidMemoryState> {
    for (pod, container, blocks) in assignments.taken() {
        let (pod, container) = (pod.to_owned(), container.to_owned());
        for MemoryBlock { nodes, kind, bytes } in blocks.iter().cloned() {
            if !nodes.is_subset(tables.nodes()) {
                return Err(InvalidMemoryState::UnknownNode { pod, container });
            }
            let has_kind = |node| tables.0.get(&node).is_some_and(|table| table.kinds.contains_key(&kind));
            if !nodes.iter().all(has_kind) {
                return Err(InvalidMemoryState::UnknownKind { pod, container, kind });
            }
            tables.take(nodes, &kind, bytes);
        }
    }
    Ok(tables)
}

/// Returns the memory of a state file without that of the pods that have ended. A kubelet removes the last
/// container, frees the memory and removes the pod with three writes: the memory of most pods is free
/// already, and that of the last one may not be.
fn without_ended_pods(
    restored: NodeTables,
    expected: &NodeTables,
    ended: &[Vec<MemoryBlock>],
) -> Result<NodeTables, StateDifference> {
    let Err(difference) = restored.compare(expected) else { return Ok(restored) };
    let without = |blocks: &Vec<MemoryBlock>| {
        let mut with_pod = expected.clone();
        for block in blocks {
            with_pod.take(block.nodes, &block.kind, block.bytes);
        }
        let mut tables = restored.clone();
        for block in blocks {
            tables.give_back(block.nodes, &block.kind, block.bytes);
        }
        (restored.compare(&with_pod).is_ok() && tables.compare(expected).is_ok()).then_some(tables)
    };
    ended.iter().find_map(without).ok_or(difference)
}

fn blocks_on(nodes: NumaNodes, amounts: &Amounts) -> Vec<MemoryBlock> {
    let block = |(kind, bytes): (&MemoryKind, &u64)| MemoryBlock { nodes, kind: kind.clone(), bytes: *bytes };
    amounts.iter().map(block).collect()
}

/// Returns the nodes that a container or a pod has as hints. A request that has changed has no preference:
/// the container keeps what it has (`regenerateHints`).
fn hints_again(blocks: &[MemoryBlock], amounts: &Amounts) -> Vec<Hints> {
    let is_same = |block: &MemoryBlock| amounts.get(&block.kind) == Some(&block.bytes);
    if blocks.len() != amounts.len() || !blocks.iter().all(is_same) {
        return vec![Hints::AnyNodes];
    }
    let hint = |block: &MemoryBlock| Hint { nodes: Some(block.nodes), is_preferred: true };
    blocks.iter().map(|block| Hints::OneOf(vec![hint(block)])).collect()
}

#[cfg(test)]
mod pod_tests;
#[cfg(test)]
mod tests;
