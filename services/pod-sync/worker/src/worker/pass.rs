//! The input of one pass.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use pod_sync_decisions::active::PodStart;
use pod_sync_decisions::probes::{ContainerStarts, ProbeResults};
use pod_sync_records::PodRecord;
use quintlet_model::probe::{ProbeMemory, ProbeType};
use quintlet_model::runtime::SharedPodRuntime;

/// The input of one pass: the pod, an observation, and the status that was computed from both.
pub(super) struct Pass {
    pub(super) pod: Arc<Pod>,
    pub(super) runtime: SharedPodRuntime,
    pub(super) probes: ProbeResults,
    pub(super) findings: Findings,
    pub(super) status: PodStatus,
}

/// Memory of the probes of a pod: container, type, memory.
pub(super) type Memories = Vec<(String, ProbeType, ProbeMemory)>;

/// Observations of a pass, recorded together with the status that was computed from them.
pub(super) struct Findings {
    pub(super) container_starts: ContainerStarts,
    /// New memories of probes, or `None` if only counters have changed.
    pub(super) probes: Option<Memories>,
    pub(super) active: Option<PodStart>,
}

impl Findings {
    /// Adds the observations to the record.
    pub(super) fn record(&self, record: &mut PodRecord) {
        record.container_starts.clone_from(&self.container_starts);
        if let Some(probes) = &self.probes {
            record.probes.clone_from(probes);
        }
        record.active = self.active;
    }
}

/// Returns the memories to record, or none if only the counters differ from those in the record. Counters
/// grow with every probe, and a restart may lose them.
pub(super) fn changed_memories(recorded: &Memories, new: Memories) -> Option<Memories> {
    let is_same = recorded.len() == new.len()
        && recorded.iter().zip(&new).all(|((container, probe, memory), (new_container, new_probe, new))| {
            (container, probe) == (new_container, new_probe)
                && *memory == ProbeMemory { counter: memory.counter, ..new.clone() }
        });
    (!is_same).then_some(new)
}
