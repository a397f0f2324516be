//! Reasons why the claims of a pod cannot be prepared or unprepared.

use pod_sync_plugins::call::CallError;

/// A call of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverMethod {
    /// NodePrepareResources.
    Prepare,
    /// NodeUnprepareResources.
    Unprepare,
}

impl DriverMethod {
    /// Returns the name of the method.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Prepare => "NodePrepareResources",
            Self::Unprepare => "NodeUnprepareResources",
        }
    }
}

/// Reason why a claim cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// There is no claim with this name.
    #[error("{0}")]
    NotFound(String),
    /// The API server cannot be reached, or refuses the request.
    #[error("{0}")]
    Failed(String),
}

/// Reason why the claims of a pod cannot be prepared or unprepared. The texts are the kubelet's, since they
/// become the message of an event (`pkg/kubelet/cm/dra`, `k8s.io/dynamic-resource-allocation/resourceclaim`).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// The controller has not created the claim of a template.
    #[error("pod \"{namespace}/{pod}\": ResourceClaim not created yet")]
    NotCreated {
        /// Namespace of the pod.
        namespace: String,
        /// Name of the pod.
        pod: String,
    },
    /// An entry of `spec.resourceClaims` has neither a claim nor a template.
    #[error("pod \"{namespace}/{pod}\", spec.resourceClaim {entry:?}: none of the supported fields are set")]
    Unsupported {
        /// Namespace of the pod.
        namespace: String,
        /// Name of the pod.
        pod: String,
        /// Name of the entry.
        entry: String,
    },
    /// The claim cannot be read.
    #[error("fetch ResourceClaim {name}: {reason}")]
    Fetch {
        /// Name of the claim.
        name: String,
        /// The cause.
        reason: String,
    },
    /// The claim of a template has another namespace or owner.
    #[error("{0}")]
    NotForPod(String),
    /// The claim is not reserved for the pod.
    #[error("pod {pod} ({pod_uid}) is not allowed to use ResourceClaim {name} ({uid})")]
    NotReserved {
        /// Name of the pod.
        pod: String,
        /// UID of the pod.
        pod_uid: String,
        /// Name of the claim.
        name: String,
        /// UID of the claim.
        uid: String,
    },
    /// The claim has no devices.
    #[error("ResourceClaim {0}: not allocated")]
    NotAllocated(String),
    /// The claim has devices of a driver without a name.
    #[error("DRA driver name is empty")]
    NoDriverName,
    /// No plugin of the driver has registered.
    #[error("DRA driver {0} is not registered")]
    NotRegistered(String),
    /// An earlier claim with the same name is prepared.
    #[error(
        "old ResourceClaim with same name {name} and different UID {uid} still exists (previous pod force-deleted?!)"
    )]
    Replaced {
        /// Name of the claim.
        name: String,
        /// UID of the earlier claim.
        uid: String,
    },
    /// The claim has other devices than those that are prepared. The kubelet would start the pod with the
    /// earlier ones.
    #[error("ResourceClaim {0} was allocated again while its earlier devices are prepared for another pod")]
    Reallocated(String),
    /// An operation for another pod takes too long.
    #[error("ResourceClaim {0} is being prepared or unprepared for another pod")]
    Busy(String),
    /// A call failed.
    #[error("{}: {error}", .method.name())]
    Call {
        /// Call that failed.
        method: DriverMethod,
        /// The cause.
        error: CallError,
    },
    /// The driver returned a result for a claim that was not in the request.
    #[error("{} returned result for unknown claim UID {uid}", .method.name())]
    UnknownClaim {
        /// Call that failed.
        method: DriverMethod,
        /// UID in the response, shortened.
        uid: String,
    },
    /// The driver failed for one claim.
    #[error("{} failed for ResourceClaim {name}: {error}", .method.name())]
    Failed {
        /// Call that failed.
        method: DriverMethod,
        /// Name of the claim.
        name: String,
        /// Text of the driver, shortened.
        error: String,
    },
    /// The driver returned no result for some claims.
    #[error("{} skipped {count} ResourceClaims", .method.name())]
    Skipped {
        /// Call that failed.
        method: DriverMethod,
        /// Number of claims.
        count: usize,
    },
    /// The driver returned a device that no container can get.
    #[error("NodePrepareResources returned an unusable device for ResourceClaim {name}: {reason}")]
    Unusable {
        /// Name of the claim.
        name: String,
        /// The cause.
        reason: String,
    },
    /// A container needs a claim that is not prepared for the pod.
    #[error("internal error: unable to get claim info for ResourceClaim {name} in namespace {namespace}")]
    NotPrepared {
        /// Namespace of the claim.
        namespace: String,
        /// Name of the claim.
        name: String,
    },
    /// The record could not be written.
    #[error("checkpoint ResourceClaim state: {0}")]
    Checkpoint(String),
    /// The pod ends, or this process does.
    #[error("the pod is ending")]
    Ending,
}

impl ClaimError {
    /// Returns the message of the event `FailedPrepareDynamicResources`.
    #[must_use]
    pub fn prepare_message(&self) -> String {
        format!("Failed to prepare dynamic resources: prepare dynamic resources: {self}")
    }
}
