//! Probe types, probe results and the state of a probe.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{ContainerId, PodUid};

/// The type of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ProbeType {
    /// Delays the other two probes until it has succeeded once.
    Startup,
    /// Determines whether a container is ready.
    Readiness,
    /// Causes a restart of the container when it fails.
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

/// The result of one attempt, or of a probe after its thresholds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ProbeResult {
    /// No result is available.
    Unknown,
    /// The probe succeeded.
    Success,
    /// The probe failed.
    Failure,
}

/// Identifies a probe by pod, container and type.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProbeKey {
    /// UID of the pod.
    pub uid: PodUid,
    /// Name of the container in the pod's spec.
    pub container: String,
    /// Type of the probe.
    pub probe: ProbeType,
}

/// The state of one probe of one container instance (`pkg/kubelet/prober: worker`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeMemory {
    /// The probed container instance.
    pub container_id: ContainerId,
    /// Number of evaluations so far. Of two memories, the one with the higher counter is newer.
    pub counter: u64,
    /// Result after thresholds. `None` until a threshold is reached, unless an initial result was set.
    pub result: Option<ProbeResult>,
    /// Result of the last attempt.
    pub last: ProbeResult,
    /// Number of consecutive attempts with the result `last`, at most its threshold.
    pub run: u32,
    /// The probe is paused until the container has a new id.
    pub on_hold: bool,
}
