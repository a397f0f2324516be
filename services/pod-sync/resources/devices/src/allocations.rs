//! The devices that containers hold (`pkg/kubelet/cm/devicemanager: podDevices`).

use std::collections::{BTreeMap, BTreeSet};

use crate::device::{DeviceId, DeviceIds};
use crate::requests::ContainerRequest;

/// The devices of one resource that a container holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    /// The devices by NUMA node. A device of several nodes is in each of them.
    pub devices: BTreeMap<i64, Vec<DeviceId>>,
    /// The plugin's `ContainerAllocateResponse`, encoded.
    pub response: Vec<u8>,
}

impl Allocation {
    /// Returns the devices of all NUMA nodes.
    #[must_use]
    pub fn ids(&self) -> DeviceIds {
        self.devices.values().flatten().cloned().collect()
    }
}

/// Allocations of a container by resource.
pub(crate) type ContainerAllocations = BTreeMap<String, Allocation>;

/// The devices that the containers of all pods hold. A pod is named by its UID.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodDevices {
    pods: BTreeMap<String, BTreeMap<String, ContainerAllocations>>,
}

impl PodDevices {
    /// Records an allocation, in place of an earlier one.
    pub fn insert(&mut self, pod: &str, container: &str, resource: &str, allocation: Allocation) {
        let containers = self.pods.entry(pod.to_owned()).or_default();
        containers.entry(container.to_owned()).or_default().insert(resource.to_owned(), allocation);
    }

    /// Removes all allocations of a pod. Returns whether there were any.
    pub fn remove_pod(&mut self, pod: &str) -> bool {
        self.pods.remove(pod).is_some()
    }

    /// Returns whether a pod holds devices.
    #[must_use]
    pub fn has_pod(&self, pod: &str) -> bool {
        self.pods.contains_key(pod)
    }

    /// Returns the UIDs of the pods that hold devices.
    pub fn pods(&self) -> impl Iterator<Item = &str> {
        self.pods.keys().map(String::as_str)
    }

    /// Returns the allocations of a container.
    #[must_use]
    pub fn container(&self, pod: &str, container: &str) -> Option<&ContainerAllocations> {
        self.pods.get(pod)?.get(container)
    }

    /// Returns the allocations of a pod, with container and resource.
    pub fn of_pod(&self, pod: &str) -> impl Iterator<Item = (&str, &str, &Allocation)> {
        self.pods.get(pod).into_iter().flatten().flat_map(|(container, resources)| {
            resources.iter().map(|(resource, held)| (container.as_str(), resource.as_str(), held))
        })
    }

    /// Returns the devices of a resource that a container holds, if it holds any.
    #[must_use]
    pub fn held(&self, pod: &str, container: &str, resource: &str) -> Option<DeviceIds> {
        self.container(pod, container)?.get(resource).map(Allocation::ids)
    }

    /// Returns the devices of a resource that any container holds.
    #[must_use]
    pub fn in_use(&self, resource: &str) -> DeviceIds {
        self.all().filter(|(_, _, name, _)| *name == resource).flat_map(|(.., held)| held.ids()).collect()
    }

    /// Returns the resources of which any container holds devices.
    #[must_use]
    pub fn resources(&self) -> BTreeSet<&str> {
        self.all().map(|(_, _, resource, _)| resource).collect()
    }

    /// Returns the pod and the container that hold a device.
    #[must_use]
    pub fn holders(&self, resource: &str, device: &DeviceId) -> Vec<(&str, &str)> {
        let held = self.all().filter(|(_, _, name, held)| *name == resource && held.ids().contains(device));
        held.map(|(pod, container, ..)| (pod, container)).collect()
    }

    /// Returns all allocations, with pod, container and resource.
    pub fn all(&self) -> impl Iterator<Item = (&str, &str, &str, &Allocation)> {
        self.pods.iter().flat_map(|(pod, containers)| {
            containers.iter().flat_map(move |(container, resources)| {
                resources
                    .iter()
                    .map(move |(resource, held)| (pod.as_str(), container.as_str(), resource.as_str(), held))
            })
        })
    }

    /// Returns the devices that earlier init containers leave to `container`: those of init containers that
    /// end, without those that a container keeps which starts before this one (`devicesToReuse`).
    #[must_use]
    pub fn reusable(
        &self,
        pod: &str,
        requests: &[ContainerRequest],
        container: &str,
        resource: &str,
    ) -> DeviceIds {
        let mut reusable = DeviceIds::new();
        for earlier in requests.iter().take_while(|request| request.name != container) {
            let held = self.held(pod, &earlier.name, resource).unwrap_or_default();
            if earlier.gives_devices_on {
                reusable.extend(held);
            } else {
                reusable.retain(|device| !held.contains(device));
            }
        }
        reusable
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocation(names: &str) -> Allocation {
        let devices = names.split_whitespace().map(DeviceId::from).collect();
        Allocation { devices: [(-1, devices)].into(), response: Vec::new() }
    }

    fn request(name: &str, gives_devices_on: bool) -> ContainerRequest {
        ContainerRequest { name: name.to_owned(), gives_devices_on, resources: BTreeMap::new() }
    }

    #[test]
    fn devices_of_init_containers_are_left_until_a_container_keeps_them() {
        let mut held = PodDevices::default();
        held.insert("u", "init", "r", allocation("a b c"));
        held.insert("u", "sidecar", "r", allocation("a"));
        held.insert("u", "more", "r", allocation("d"));
        held.insert("u", "main", "r", allocation("b"));
        held.insert("other", "init", "r", allocation("z"));
        let requests = [
            request("init", true),
            request("sidecar", false),
            request("more", true),
            request("main", false),
            request("last", false),
        ];
        let reusable = |container: &str| {
            let ids = held.reusable("u", &requests, container, "r");
            ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        let all = ["init", "sidecar", "more", "main", "last"].map(reusable);
        assert_eq!(all, ["", "a b c", "b c", "b c d", "c d"]);
    }

    #[test]
    fn a_device_is_in_use_until_its_pod_is_removed() {
        let mut held = PodDevices::default();
        held.insert("u", "c", "r", allocation("a"));
        held.insert("v", "c", "s", allocation("a"));
        assert_eq!(held.in_use("r").len(), 1);
        assert_eq!(held.holders("r", &DeviceId::from("a")), [("u", "c")]);
        assert_eq!(held.resources(), ["r", "s"].into());
        assert!(held.remove_pod("u") && !held.remove_pod("u"));
        assert!(held.in_use("r").is_empty() && held.has_pod("v"));
    }
}
