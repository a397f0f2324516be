//! Collects CPUs for one request (`pkg/kubelet/cm/cpumanager: cpuAccumulator`).

use std::collections::{BTreeMap, BTreeSet};

use pod_sync_machine::{CacheId, CoreId, CpuId, CpuPlace, CpuSet, CpuTopology, NumaNode, SocketId};

/// The order of CPUs that do not make up a whole core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CpuOrder {
    /// Core by core.
    Packed,
    /// Socket by socket: a thread of each core, then another one of each core, by number. Released kubelets
    /// take the threads by number alone, which is the same where second threads have the higher numbers and
    /// all cores are free (kubernetes/kubernetes#140766).
    Spread,
}

/// The free CPUs, and those that are taken for the request.
#[derive(Debug, Clone)]
pub(crate) struct Accumulator<'a> {
    topology: &'a CpuTopology,
    free: BTreeMap<CpuId, CpuPlace>,
    taken: CpuSet,
    needed: usize,
    order: CpuOrder,
}

impl<'a> Accumulator<'a> {
    pub(crate) fn new(topology: &'a CpuTopology, free: &CpuSet, needed: usize, order: CpuOrder) -> Self {
        let places = topology.places().iter().filter(|(cpu, _)| free.contains(**cpu));
        let free = places.map(|(cpu, place)| (*cpu, *place)).collect();
        Self { topology, free, taken: CpuSet::new(), needed, order }
    }

    pub(crate) fn topology(&self) -> &'a CpuTopology {
        self.topology
    }

    pub(crate) fn is_satisfied(&self) -> bool {
        self.needed == 0
    }

    /// Returns whether too few CPUs are free.
    pub(crate) fn is_failed(&self) -> bool {
        self.needed > self.free.len()
    }

    pub(crate) fn needed(&self) -> usize {
        self.needed
    }

    pub(crate) fn into_taken(self) -> CpuSet {
        self.taken
    }

    /// Returns the free CPUs whose place fulfils a condition.
    pub(crate) fn free_where(&self, condition: impl Fn(&CpuPlace) -> bool) -> CpuSet {
        self.free.iter().filter(|(_, place)| condition(place)).map(|(cpu, _)| *cpu).collect()
    }

    /// Returns the number of free CPUs of a NUMA node.
    pub(crate) fn free_on(&self, node: NumaNode) -> usize {
        self.free.values().filter(|place| place.node == node).count()
    }

    pub(crate) fn take(&mut self, cpus: &CpuSet) {
        self.free.retain(|cpu, _| !cpus.contains(*cpu));
        self.needed = self.needed.saturating_sub(cpus.difference(&self.taken).len());
        self.taken.extend(cpus.iter());
    }

    /// Takes the larger of the parts that NUMA nodes and sockets are, where one is free as a whole, and then
    /// the smaller.
    pub(crate) fn take_full_nodes_and_sockets(&mut self) {
        if self.nodes_hold_sockets() {
            self.take_full_nodes();
            self.take_full_sockets();
        } else {
            self.take_full_sockets();
            self.take_full_nodes();
        }
    }

    fn take_full_nodes(&mut self) {
        for node in self.sorted_nodes() {
            let all = self.topology.cpus_where(|place| place.node == node);
            self.take_if_free(all.len(), &all, |place| place.node == node);
        }
    }

    fn take_full_sockets(&mut self) {
        let per_socket = self.topology.cpus_per_socket();
        for socket in self.sorted_sockets() {
            let all = self.topology.cpus_where(|place| place.socket == socket);
            self.take_if_free(per_socket, &all, |place| place.socket == socket);
        }
    }

    /// Takes each core that is free as a whole while as many CPUs are needed.
    pub(crate) fn take_full_cores(&mut self) {
        let per_core = self.topology.cpus_per_core();
        for core in self.sorted_cores() {
            let all = self.topology.cpus_where(|place| place.core == core);
            self.take_if_free(per_core, &all, |place| place.core == core);
        }
    }

    /// Takes a part of the machine if `size` of its CPUs are free and all of them are needed.
    fn take_if_free(&mut self, size: usize, all: &CpuSet, is_in_part: impl Fn(&CpuPlace) -> bool) {
        let free = self.free.values().filter(|place| is_in_part(place)).count();
        if free == size && self.needed >= all.len() {
            self.take(all);
        }
    }

    /// Takes whole last-level caches, then CPUs of one that has enough of them.
    pub(crate) fn take_caches(&mut self) {
        for cache in self.sorted_caches() {
            if self.needed >= self.topology.cpus_per_cache() {
                self.take_full_caches();
            }
            if self.is_satisfied() {
                return;
            }
            self.take_part_of_cache(cache);
            if self.is_satisfied() {
                return;
            }
        }
    }

    fn take_full_caches(&mut self) {
        for cache in self.sorted_caches() {
            let all = self.topology.cpus_where(|place| place.cache == cache);
            self.take_if_free(all.len(), &all, |place| place.cache == cache);
        }
    }

    /// Takes the rest of the request from the cores of a cache with the lowest numbers, if these have exactly
    /// as many free CPUs; for an odd number of CPUs, one more.
    fn take_part_of_cache(&mut self, cache: CacheId) {
        let per_core = self.topology.cpus_per_core();
        let cores_needed = if per_core == 0 { 0 } else { self.needed.div_ceil(per_core) };
        let in_cache = self.free.values().filter(|place| place.cache == cache).map(|place| place.core);
        let cores: BTreeSet<CoreId> =
            in_cache.collect::<BTreeSet<_>>().into_iter().take(cores_needed).collect();
        let mut cpus: Vec<CpuId> = self.free_where(|place| cores.contains(&place.core)).into_iter().collect();
        if !self.needed.is_multiple_of(2) && per_core > 1 && cpus.len() > self.needed {
            cpus.pop();
        }
        if cpus.len() == self.needed {
            self.take(&cpus.into_iter().collect());
        }
    }

    /// Takes single CPUs until the request is satisfied or none is left.
    pub(crate) fn take_remaining(&mut self) {
        let cpus = match self.order {
            CpuOrder::Packed => self.sorted_cpus_by_core(),
            CpuOrder::Spread => self.sorted_cpus_by_thread(),
        };
        for cpu in cpus {
            if self.is_satisfied() {
                return;
            }
            self.take(&CpuSet::from_iter([cpu]));
        }
    }

    /// Returns whether a NUMA node has at least one whole socket. Otherwise a socket has several nodes.
    fn nodes_hold_sockets(&self) -> bool {
        self.topology.socket_count() >= self.topology.nodes().len()
    }

    /// Returns the parts of the machine that have free CPUs and fulfil a condition: those with the fewest
    /// free CPUs first, then those with the lowest numbers.
    fn sorted<T: Ord + Copy>(
        &self,
        part: impl Fn(&CpuPlace) -> T,
        condition: impl Fn(&CpuPlace) -> bool,
    ) -> Vec<T> {
        let mut counts: BTreeMap<T, usize> = BTreeMap::new();
        for place in self.free.values() {
            let count = counts.entry(part(place)).or_default();
            *count = count.saturating_add(1);
        }
        let wanted: BTreeSet<T> = self.free.values().filter(|place| condition(place)).map(&part).collect();
        let mut parts: Vec<(usize, T)> =
            wanted.into_iter().map(|id| (counts.get(&id).copied().unwrap_or(0), id)).collect();
        parts.sort_unstable();
        parts.into_iter().map(|(_, id)| id).collect()
    }

    pub(crate) fn sorted_nodes(&self) -> Vec<NumaNode> {
        if self.nodes_hold_sockets() {
            return self.sorted(|place| place.node, |_| true);
        }
        let sockets = self.sorted(|place| place.socket, |_| true);
        unique(sockets.into_iter().flat_map(|socket| self.sorted(|p| p.node, move |p| p.socket == socket)))
    }

    fn sorted_sockets(&self) -> Vec<SocketId> {
        if !self.nodes_hold_sockets() {
            return self.sorted(|place| place.socket, |_| true);
        }
        let nodes = self.sorted(|place| place.node, |_| true);
        unique(nodes.into_iter().flat_map(|node| self.sorted(|p| p.socket, move |p| p.node == node)))
    }

    fn sorted_caches(&self) -> Vec<CacheId> {
        let nodes = self.sorted_nodes().into_iter();
        unique(nodes.flat_map(|node| self.sorted(|place| place.cache, move |place| place.node == node)))
    }

    fn sorted_cores(&self) -> Vec<CoreId> {
        if self.nodes_hold_sockets() {
            let sockets = self.sorted_sockets().into_iter();
            unique(sockets.flat_map(|socket| self.sorted(|p| p.core, move |p| p.socket == socket)))
        } else {
            let nodes = self.sorted_nodes().into_iter();
            unique(nodes.flat_map(|node| self.sorted(|p| p.core, move |p| p.node == node)))
        }
    }

    fn sorted_cpus_by_core(&self) -> Vec<CpuId> {
        let cores = self.sorted_cores().into_iter();
        cores.flat_map(|core| self.free_where(|place| place.core == core)).collect()
    }

    fn sorted_cpus_by_thread(&self) -> Vec<CpuId> {
        let sockets = self.sorted_sockets().into_iter();
        sockets.flat_map(|socket| self.sorted_threads(socket)).collect()
    }

    /// Returns the free CPUs of a socket: the first of each core, then the second of each core, and so on.
    fn sorted_threads(&self, socket: SocketId) -> Vec<CpuId> {
        let mut seen: BTreeMap<CoreId, usize> = BTreeMap::new();
        let on_socket = self.free.iter().filter(|(_, place)| place.socket == socket);
        let mut threads: Vec<(usize, CpuId)> = on_socket
            .map(|(cpu, place)| {
                let before = seen.entry(place.core).or_default();
                let round = *before;
                *before = before.saturating_add(1);
                (round, *cpu)
            })
            .collect();
        threads.sort_unstable();
        threads.into_iter().map(|(_, cpu)| cpu).collect()
    }
}

/// Returns the items without those that came before.
fn unique<T: Ord + Copy>(items: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = BTreeSet::new();
    items.filter(|item| seen.insert(*item)).collect()
}
