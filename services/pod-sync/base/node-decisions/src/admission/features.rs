//! Infers the declared node features that a pod requires (`component-helpers/nodedeclaredfeatures`).
//!
//! Only creation is checked: every node of this agent declares the features that a resize can require. The gate
//! PodLevelResources is fixed, so PodLevelResourcesNotSupported is never a reason.

use k8s_openapi::api::core::v1::Pod;
use quintlet_model::pod;

use pod_sync_decisions::restart::has_restart_all_rule;

/// Returns the features that the pod requires and the node does not declare, sorted by name.
pub(super) fn missing(pod: &Pod, declared: &[&str]) -> Vec<&'static str> {
    let maps_ids = pod::spec(pod).host_users == Some(false);
    let needed = [
        ("RestartAllContainersOnContainerExits", has_restart_all_rule(pod)),
        ("UserNamespacesHostNetworkSupport", maps_ids && pod::host_network(pod)),
    ];
    let missing = needed.into_iter().filter(|(name, needed)| *needed && !declared.contains(name));
    missing.map(|(name, _)| name).collect()
}
