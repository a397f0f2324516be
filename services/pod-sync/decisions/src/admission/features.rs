//! Infers the declared node features that a pod requires (`component-helpers/nodedeclaredfeatures`).
//!
//! Updates need nothing more: what a resize may need is declared by every node of this agent. The gate PodLevelResources is
//! fixed, so that PodLevelResourcesNotSupported is never a reason.

use k8s_openapi::api::core::v1::Pod;
use quintlet_model::pod;

use crate::restart::has_restart_all_rule;

/// Names of features that the pod needs and the node does not declare, in the order of the alphabet.
pub(super) fn missing(pod: &Pod, declared: &[&str]) -> Vec<&'static str> {
    let maps_ids = pod::spec(pod).host_users == Some(false);
    let needed = [
        ("RestartAllContainersOnContainerExits", has_restart_all_rule(pod)),
        ("UserNamespacesHostNetworkSupport", maps_ids && pod::host_network(pod)),
    ];
    let missing = needed.into_iter().filter(|(name, needed)| *needed && !declared.contains(name));
    missing.map(|(name, _)| name).collect()
}
