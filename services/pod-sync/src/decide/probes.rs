//! Probe results as the decisions read them.

use std::collections::HashMap;

use quintlet_model::ids::ContainerId;
use quintlet_model::probe::{ProbeMemory, ProbeResult, ProbeType};

/// Results after thresholds, by container instance. An instance that is not in it has no result yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProbeView {
    results: HashMap<(ContainerId, ProbeType), ProbeResult>,
}

impl ProbeView {
    /// Adds what a prober remembers; a memory without a result adds nothing.
    pub fn add(&mut self, probe: ProbeType, memory: &ProbeMemory) {
        if let Some(result) = memory.result {
            self.set(probe, memory.container_id.clone(), result);
        }
    }

    /// Sets one result.
    pub fn set(&mut self, probe: ProbeType, container: ContainerId, result: ProbeResult) {
        self.results.insert((container, probe), result);
    }

    /// The result of a probe of an instance.
    #[must_use]
    pub fn get(&self, probe: ProbeType, container: &ContainerId) -> Option<ProbeResult> {
        self.results.get(&(container.clone(), probe)).copied()
    }
}
