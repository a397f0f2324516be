//! Probe types, results and what a prober remembers.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{ContainerId, PodUid};

/// Which of the three probes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ProbeType {
    /// Gates the other two until it succeeded once.
    Startup,
    /// Makes a container Ready.
    Readiness,
    /// Restarts a container.
    Liveness,
}

impl fmt::Display for ProbeType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Startup => "Startup",
            Self::Readiness => "Readiness",
            Self::Liveness => "Liveness",
        })
    }
}

/// Result of one evaluation, or of a probe after thresholds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ProbeResult {
    /// Nothing known.
    Unknown,
    /// Passed.
    Success,
    /// Failed.
    Failure,
}

/// One probe of one container of one pod.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProbeKey {
    /// Pod.
    pub uid: PodUid,
    /// Container name.
    pub container: String,
    /// Which probe.
    pub probe: ProbeType,
}

/// Everything a prober knows of one probe of one container instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeMemory {
    /// The instance it is about.
    pub container_id: ContainerId,
    /// Evaluations that counted so far; of two memories the one with the higher counter is newer.
    pub counter: u64,
    /// Result after thresholds; `None`: no threshold was reached yet and nothing was seeded.
    pub result: Option<ProbeResult>,
    /// Last raw result.
    pub last: ProbeResult,
    /// How often `last` came in a row, saturated at its threshold.
    pub run: u32,
    /// Probing rests until a new container id.
    pub on_hold: bool,
}
