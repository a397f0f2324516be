//! Infers the declared node features that a pod requires (`component-helpers/nodedeclaredfeatures`).
//!
//! Every node of this agent declares the features that a resize of containers can require. The gate
//! PodLevelResources is fixed, so PodLevelResourcesNotSupported is never a reason.

use k8s_openapi::api::core::v1::Pod;
use pod_sync_decisions::resize::allocation::resizes_volumes;
use pod_sync_decisions::restart::has_restart_all_rule;
use pod_sync_decisions::unsupported::FieldGates;
use quintlet_model::pod;

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

/// Returns the features that an update of a pod requires and the node does not declare
/// (`nodedeclaredfeatures: InferForPodUpdate`).
#[must_use]
pub fn missing_for_update(old: &Pod, new: &Pod, gates: FieldGates) -> Vec<&'static str> {
    let is_missing = !gates.memory_volume_resize && resizes_volumes(new, old);
    is_missing.then_some("InPlacePodVerticalScalingMemoryBackedVolumes").into_iter().collect()
}

fn has_bind_mount_options(pod: &Pod) -> bool {
    let spec = pod::spec(pod);
    let own = spec.containers.iter().chain(pod::init_containers(pod)).map(|c| &c.volume_mounts);
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|c| &c.volume_mounts);
    let mut options = own.chain(ephemeral).flatten().flatten().filter_map(|m| m.bind_mount_options.as_ref());
    options.any(|options| !options.is_empty())
}

#[cfg(test)]
mod tests {
    use quintlet_testkit::pods::pod_json;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_changed_limit_of_a_volume_in_memory_requires_its_feature() {
        let pod = |medium: &str, limit: &str| {
            pod_json(json!({"containers": [{"name": "c", "image": "i"}],
                "volumes": [{"name": "v", "emptyDir": {"medium": medium, "sizeLimit": limit}}]}))
        };
        let off = FieldGates::default();
        let on = FieldGates { memory_volume_resize: true, ..off };
        let name = "InPlacePodVerticalScalingMemoryBackedVolumes";
        for (medium, limit, gates, want) in [
            ("Memory", "2Mi", off, vec![name]),
            ("Memory", "2Mi", on, vec![]),
            ("Memory", "1024Ki", off, vec![]),
            ("", "2Mi", off, vec![]),
        ] {
            let missing = missing_for_update(&pod(medium, "1Mi"), &pod(medium, limit), gates);
            assert_eq!(missing, want, "{medium} {limit}");
        }
    }
}
