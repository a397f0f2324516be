//! Selects CPUs so that few parts of the machine are used (`takeByTopologyNUMAPacked`).

use pod_sync_machine::{CpuSet, CpuTopology};

use crate::accumulator::{Accumulator, CpuOrder};
use crate::error::AllocateError;

/// Selects `count` of the free CPUs: whole NUMA nodes and sockets, then last-level caches with `by_cache`,
/// then whole cores, then the CPUs of cores that are in use.
pub(crate) fn take_packed(
    topology: &CpuTopology,
    free: &CpuSet,
    count: usize,
    order: CpuOrder,
    by_cache: bool,
) -> Result<CpuSet, AllocateError> {
    let mut accumulator = Accumulator::new(topology, free, count, order);
    if accumulator.is_failed() {
        return Err(AllocateError::NotEnough { requested: count, available: free.len() });
    }
    accumulator.take_full_nodes_and_sockets();
    if by_cache && !accumulator.is_satisfied() {
        accumulator.take_caches();
    }
    if order == CpuOrder::Packed && !accumulator.is_satisfied() {
        accumulator.take_full_cores();
    }
    accumulator.take_remaining();
    if accumulator.is_satisfied() { Ok(accumulator.into_taken()) } else { Err(AllocateError::Failed) }
}
