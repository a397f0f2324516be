//! Reasons why a container gets no CPUs, or why the policy cannot be used.

use pod_sync_decisions::status::KillCause;
use pod_sync_machine::{CpuId, CpuSet};

use crate::options::CpuOptionError;

/// A container of a pod that has CPUs as a whole would have none of them. The texts are the kubelet's
/// (`validatePodScopeResources`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EmptyPodPool {
    /// An init container requests more CPUs than the sidecars before it leave.
    #[error(
        "pod rejected, largest exclusive init container requests {requested} cpus, but only {available} available"
    )]
    InitContainer {
        /// Number of CPUs of the request.
        requested: usize,
        /// Number of CPUs that are left.
        available: usize,
    },
    /// The sidecars before an init container leave none.
    #[error("pod rejected, pod has shared init containers but no cpus available for them")]
    SharedInitContainer,
    /// The containers with exclusive CPUs leave none.
    #[error(
        "pod rejected, sum of exclusive container cpu requests equals pod budget, leaving no cpus for shared containers"
    )]
    SharedContainer,
}

/// A container does not get exclusive CPUs. The texts are the kubelet's, since they become the message of a
/// rejected pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// Too few CPUs are free.
    #[error("not enough cpus available to satisfy request: requested={requested}, available={available}")]
    NotEnough {
        /// Number of CPUs of the request.
        requested: usize,
        /// Number of free CPUs.
        available: usize,
    },
    /// The free CPUs could not be selected.
    #[error("failed to allocate cpus")]
    Failed,
    /// With `full-pcpus-only`, a request must be a whole number of cores.
    #[error("SMT Alignment Error: requested {requested} cpus not multiple cpus per core = {per_core}")]
    NotWholeCores {
        /// Number of CPUs of the request.
        requested: usize,
        /// Number of CPUs per core.
        per_core: usize,
    },
    /// With `full-pcpus-only`, too few CPUs are free that share no core with a reserved one.
    #[error(
        "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = {available}, requested CPUs = {requested}, CPUs per core = {per_core}"
    )]
    TooFewCores {
        /// Number of CPUs of the request.
        requested: usize,
        /// Number of CPUs per core.
        per_core: usize,
        /// Number of such CPUs.
        available: usize,
    },
    /// A container of the pod would have no CPU.
    #[error(transparent)]
    EmptyPodPool(#[from] EmptyPodPool),
}

impl AllocateError {
    /// Returns the cause of the pod's rejection (`pkg/kubelet/cm/admission: GetPodAdmitResult`).
    #[must_use]
    pub fn cause(&self) -> KillCause {
        match self {
            Self::NotEnough { .. } | Self::Failed => KillCause::UnexpectedAdmission,
            Self::NotWholeCores { .. } | Self::TooFewCores { .. } => KillCause::SmtAlignment,
            Self::EmptyPodPool(_) => KillCause::EmptyPodSharedPool,
        }
    }

    /// Returns the message of the pod's rejection.
    #[must_use]
    pub fn message(&self) -> String {
        match self {
            Self::NotEnough { .. } | Self::Failed => {
                format!("Allocate failed due to {self}, which is unexpected")
            }
            Self::NotWholeCores { .. } | Self::TooFewCores { .. } | Self::EmptyPodPool(_) => self.to_string(),
        }
    }
}

/// The policy cannot be used with the configuration on this machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// No CPU is reserved, so that the shared CPUs could run out.
    #[error(
        "[cpumanager] the static policy requires systemreserved.cpu + kubereserved.cpu to be greater than zero"
    )]
    NothingReserved,
    /// The machine has fewer CPUs than are reserved.
    #[error("failed to reserve {0} CPUs")]
    Reservation(usize, #[source] AllocateError),
    /// A reserved CPU is not online.
    #[error("reserved CPU {0} is not online")]
    UnknownCpu(CpuId),
    /// An option cannot be used.
    #[error(transparent)]
    Option(#[from] CpuOptionError),
}

/// The assignments of a state file do not fit the machine or the reservation. The node must be drained, and
/// the file removed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCpuState {
    /// There are assignments, and no shared CPUs.
    #[error("default cpuset cannot be empty")]
    NothingShared,
    /// With `strict-cpu-reservation`, reserved CPUs are shared.
    #[error("some of strictly reserved cpus: \"{0}\" are present in defaultCpuSet: \"{1}\"")]
    ReservedShared(CpuSet, CpuSet),
    /// Reserved CPUs are not shared.
    #[error("not all reserved cpus: \"{0}\" are present in defaultCpuSet: \"{1}\"")]
    ReservedMissing(CpuSet, CpuSet),
    /// A CPU is shared and exclusive.
    #[error(
        "pod: {pod}, container: {container} cpuset: \"{cpus}\" overlaps with default cpuset \"{shared}\""
    )]
    Overlap {
        /// UID of the pod.
        pod: String,
        /// Name of the container.
        container: String,
        /// CPUs of the container.
        cpus: CpuSet,
        /// Shared CPUs.
        shared: CpuSet,
    },
    /// The machine has other CPUs.
    #[error("current set of available CPUs \"{0}\" doesn't match with CPUs in state \"{1}\"")]
    OtherCpus(CpuSet, CpuSet),
}
