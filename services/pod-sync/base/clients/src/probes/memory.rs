//! Probe memory: merging reports, and adding memory to targets.

use quintlet_model::convert;
use quintlet_model::probe::{ProbeMemory, ProbeType};
use quintlet_proto::probe::v1 as wire;

use std::collections::BTreeMap;

/// Memory of the probes of one pod, by container name and probe.
pub type PodMemory = BTreeMap<(String, ProbeType), ProbeMemory>;

/// Stores the memory of a probe, unless the stored one is of the same container with an equal or higher
/// counter. Returns whether it was stored.
pub(super) fn merge(memory: &mut PodMemory, container: &str, probe: ProbeType, new: ProbeMemory) -> bool {
    match memory.get(&(container.to_owned(), probe)) {
        Some(have) if have.container_id == new.container_id && have.counter >= new.counter => false,
        Some(_) | None => {
            memory.insert((container.to_owned(), probe), new);
            true
        }
    }
}

/// Stores the result of a probe that a status shows. A result of the same container that comes from
/// probe-service stays; if probe-service has none yet, the next one that it has counts.
pub(super) fn seed(memory: &mut PodMemory, container: &str, probe: ProbeType, new: ProbeMemory) {
    match memory.get_mut(&(container.to_owned(), probe)) {
        Some(have) if have.container_id == new.container_id && have.result.is_none() => {
            have.result = new.result
        }
        Some(_) | None => {
            merge(memory, container, probe, new);
        }
    }
}

/// Adds the memory of each container instance to a target.
pub(super) fn fill_memory(target: &mut wire::PodTarget, memory: &PodMemory) {
    for container in &mut target.containers {
        for spec in &mut container.probes {
            let Ok(probe) = convert::probe_type(spec.r#type) else { continue };
            spec.memory = memory
                .get(&(container.name.clone(), probe))
                .filter(|m| m.container_id.as_str() == container.container_id)
                .map(Into::into);
        }
    }
}

/// Removes the memory of a target.
pub(super) fn clear_memory(target: &mut wire::PodTarget) {
    for spec in target.containers.iter_mut().flat_map(|container| container.probes.iter_mut()) {
        spec.memory = None;
    }
}
