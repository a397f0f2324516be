//! Infers the declared node features that a pod requires (`component-helpers/nodedeclaredfeatures`).
//!
//! Only creation is checked: every node of this agent declares the features that a resize can require. The
//! gate PodLevelResources is fixed, so PodLevelResourcesNotSupported is never a reason.

use k8s_openapi::api::core::v1::Pod;
use quintlet_model::pod;

use pod_sync_decisions::restart::has_restart_all_rule;

/// Returns the features that the pod requires and the node does not declare, sorted by name.
pub(super) fn missing(pod: &Pod, declared: &[&str]) -> Vec<&'static str> {
    let maps_ids = pod::spec(pod).host_users == Some(false);
    let needed = [
        ("RestartAllContainersOnContainerExits", has_restart_all_rule(pod)),
        ("UserNamespacesHostNetworkSupport", maps_ids && pod::host_network(pod)),
        ("VolumeBindMountOptions", has_bind_mount_options(pod)),
    ];
    let missing = needed.into_iter().filter(|(name, needed)| *needed && !declared.contains(name));
    missing.map(|(name, _)| name).collect()
}

fn has_bind_mount_options(pod: &Pod) -> bool {
    let spec = pod::spec(pod);
    let own = spec.containers.iter().chain(pod::init_containers(pod)).map(|c| &c.volume_mounts);
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|c| &c.volume_mounts);
    let mut options = own.chain(ephemeral).flatten().flatten().filter_map(|m| m.bind_mount_options.as_ref());
    options.any(|options| !options.is_empty())
}
