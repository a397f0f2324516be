//! Reasons why a pod does not get its devices.

use pod_sync_plugins::call::CallError;
use pod_sync_topology::TopologyAffinityError;

/// Reason why a container does not get its devices. The texts are the kubelet's, since they become the
/// message of a rejected pod (`pkg/kubelet/cm/devicemanager`).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The container holds another number of devices than it requests.
    #[error(
        "pod {pod:?} container {container:?} changed request for resource {resource:?} from {held} to {required}"
    )]
    Changed {
        /// UID of the pod.
        pod: String,
        /// Name of the container.
        container: String,
        /// Name of the resource.
        resource: String,
        /// Number of devices that the container holds.
        held: usize,
        /// Number of devices that the container requests.
        required: usize,
    },
    /// No plugin of the resource has registered, or the grace period of a stopped plugin is over.
    #[error("cannot allocate unregistered device {0}")]
    Unregistered(String),
    /// The plugin has no healthy device.
    #[error("no healthy devices present; cannot allocate unhealthy devices {0}")]
    NoHealthy(String),
    /// A device that the container holds is unhealthy, or is no longer listed.
    #[error("previously allocated devices are no longer healthy; cannot allocate unhealthy devices {0}")]
    HeldUnhealthy(String),
    /// Too few healthy devices are free.
    #[error(
        "requested number of devices unavailable for {resource}. Requested: {requested}, Available: {available}"
    )]
    Unavailable {
        /// Name of the resource.
        resource: String,
        /// Number of devices that the container needs, without those that it can reuse.
        requested: usize,
        /// Number of free healthy devices.
        available: usize,
    },
    /// The plugin was replaced or went away between the selection of the devices and the call.
    #[error("endpoint of {0} has been stopped")]
    Stopped(String),
    /// GetPreferredAllocation failed.
    #[error("device plugin GetPreferredAllocation rpc failed with err: {0}")]
    Preference(CallError),
    /// Allocate failed.
    #[error("{0}")]
    Allocate(CallError),
    /// Allocate returned no container.
    #[error("no containers return in allocation response of {0}")]
    NoResponse(String),
    /// PreStartContainer failed.
    #[error("device plugin PreStartContainer rpc failed with err: {0}")]
    PreStart(String),
    /// A container of an admitted pod has no devices.
    #[error(
        "no devices found allocated in local cache for pod {pod}, container {container}, resource {resource}"
    )]
    NotHeld {
        /// UID of the pod.
        pod: String,
        /// Name of the container.
        container: String,
        /// Name of the resource.
        resource: String,
    },
    /// The resources of the pod cannot be aligned on NUMA nodes.
    #[error(transparent)]
    Topology(#[from] TopologyAffinityError),
    /// The allocation could not be recorded, so no container may use it.
    #[error("failed to write checkpoint file \"kubelet_internal_checkpoint\": {0}")]
    Checkpoint(String),
}
