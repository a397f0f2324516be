//! The devices that the containers of a pod request.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container, Pod};
use quintlet_model::pod as pods;
use quintlet_model::quantity::Quantity;

/// The requests of one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerRequest {
    /// Name of the container.
    pub name: String,
    /// Whether a later container can use the devices of this one: it is an init container that ends.
    pub gives_devices_on: bool,
    /// Number of devices by resource.
    pub resources: BTreeMap<String, usize>,
}

/// Returns the requests of the containers of a pod in the order of their starts. Resources without a domain,
/// and those that are mapped to a claim, are left out. A request equals its limit, since extended resources
/// cannot be overcommitted.
#[must_use]
pub(crate) fn requests(pod: &Pod) -> Vec<ContainerRequest> {
    let spec = pods::spec(pod);
    let init = spec.init_containers.iter().flatten().map(|container| {
        let is_restartable = container.restart_policy.as_deref() == Some("Always");
        request(pod, container, !is_restartable)
    });
    init.chain(spec.containers.iter().map(|container| request(pod, container, false))).collect()
}

/// Returns whether a container of the pod may request a device.
#[must_use]
pub fn may_need_devices(pod: &Pod) -> bool {
    let spec = pods::spec(pod);
    let mut containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    containers.any(|container| limits(container).any(|(name, _)| name.contains('/')))
}

/// Returns the names of the resources of which a container of the pod may request devices.
#[must_use]
pub fn resource_names(pod: &Pod) -> BTreeSet<String> {
    requests(pod).into_iter().flat_map(|request| request.resources.into_keys()).collect()
}

fn limits(container: &Container) -> impl Iterator<Item = (&String, Quantity)> {
    let limits = container.resources.as_ref().and_then(|r| r.limits.as_ref());
    limits.into_iter().flatten().map(|(name, amount)| (name, Quantity::of(amount)))
}

fn request(pod: &Pod, container: &Container, gives_devices_on: bool) -> ContainerRequest {
    let wanted = limits(container)
        .filter(|(name, _)| name.contains('/') && !is_mapped_to_claim(pod, &container.name, name));
    let counts = wanted.map(|(name, amount)| (name.clone(), usize::try_from(amount.value()).unwrap_or(0)));
    let resources = counts.filter(|(_, count)| *count > 0).collect();
    ContainerRequest { name: container.name.clone(), gives_devices_on, resources }
}

/// Returns whether a driver of dynamic resource allocation provides the resource (`isDRAExtendedResource`).
fn is_mapped_to_claim(pod: &Pod, container: &str, resource: &str) -> bool {
    let claim = pod.status.as_ref().and_then(|s| s.extended_resource_claim_status.as_ref());
    let mut mappings = claim.into_iter().flat_map(|claim| &claim.request_mappings);
    mappings.any(|mapping| mapping.container_name == container && mapping.resource_name == resource)
}

#[cfg(test)]
mod tests {
    use quintlet_testkit::pods::pod_json;
    use serde_json::json;

    use super::*;

    fn container(name: &str, resource: &str, count: &str) -> serde_json::Value {
        json!({"name": name, "image": "i", "resources": {"limits": {resource: count}}})
    }

    #[test]
    fn extended_resources_of_all_containers_are_requested_in_the_order_of_starts() {
        let mut sidecar = container("proxy", "a.com/nic", "1");
        sidecar["restartPolicy"] = json!("Always");
        let pod = pod_json(json!({
            "initContainers": [container("init", "a.com/gpu", "2"), sidecar],
            "containers": [container("main", "a.com/gpu", "1"), container("cpu", "cpu", "2"),
                container("none", "a.com/gpu", "0")],
        }));
        let got = requests(&pod);
        let names: Vec<_> = got.iter().map(|r| (r.name.as_str(), r.gives_devices_on)).collect();
        let expected = [("init", true), ("proxy", false), ("main", false), ("cpu", false), ("none", false)];
        assert_eq!(names, expected);
        let counts: Vec<_> = got.iter().map(|r| r.resources.values().sum::<usize>()).collect();
        assert_eq!(counts, [2, 1, 1, 0, 0]);
        assert_eq!(resource_names(&pod), ["a.com/gpu".to_owned(), "a.com/nic".to_owned()].into());
        assert!(may_need_devices(&pod));
        assert!(!may_need_devices(&pod_json(json!({"containers": [container("cpu", "cpu", "2")]}))));
    }

    #[test]
    fn a_resource_that_is_mapped_to_a_claim_is_not_requested() {
        // Also if a device plugin had the resource before (kubernetes/kubernetes#141426).
        let mut pod = pod_json(json!({"containers": [container("a", "a.com/gpu", "1"),
            container("b", "a.com/gpu", "1")]}));
        let status = json!({"extendedResourceClaimStatus": {"resourceClaimName": "c", "requestMappings":
            [{"containerName": "a", "resourceName": "a.com/gpu", "requestName": "r"}]}});
        pod.status = Some(serde_json::from_value(status).unwrap());
        let counts: Vec<_> = requests(&pod).iter().map(|r| r.resources.len()).collect();
        assert_eq!(counts, [0, 1]);
    }
}
