//! The messages of the API. Plain functions of pods, and of what they hold.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Container;
use pod_sync_claims::{ClaimKey, Claims, PreparedDevice, container_requests};
use pod_sync_devices::{Allocation, DeviceInventory, Devices, NO_NUMA_NODE};
use pod_sync_views::PodView;
use prost::Message;
use quintlet_model::pod as pods;
use quintlet_pod_resources_api::{v1, v1alpha1};

use crate::exclusive::{ExclusiveResources, MemoryBlock};

/// Largest answer: the limit that agents of nodes set for theirs.
pub(crate) const MOST_BYTES: usize = 16 << 20;

/// Bytes that an answer has for an item beside those of the item itself.
const FRAME: usize = 8;

/// An answer exceeds [`MOST_BYTES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnswerTooLarge;

/// The devices, claims, CPUs and memory of pods.
#[derive(Debug, Clone)]
pub struct HeldResources {
    /// Devices of device plugins.
    pub devices: Devices,
    /// Claims of dynamic resource allocation.
    pub claims: Claims,
    /// Exclusive CPUs and memory.
    pub exclusive: Arc<dyn ExclusiveResources>,
}

impl HeldResources {
    /// Returns the resources of a pod: those of its sidecars and containers (`v1PodResourcesServer.List`).
    /// Init containers have ended, and ephemeral containers have no resources.
    #[must_use]
    pub fn of_pod(&self, view: &PodView) -> v1::PodResources {
        let spec = pods::spec(&view.pod);
        let sidecars = spec.init_containers.iter().flatten().filter(|container| pods::is_sidecar(container));
        let containers = sidecars.chain(&spec.containers);
        let uid = view.pod_ref.uid.as_str();
        v1::PodResources {
            name: view.pod_ref.name.to_string(),
            namespace: view.pod_ref.namespace.to_string(),
            containers: containers.map(|container| self.of_container(view, container)).collect(),
            cpu_ids: self.exclusive.pod_cpus(uid),
            memory: memory(self.exclusive.pod_memory(uid)),
        }
    }

    /// Returns the resources of a pod in the first version of the API, which has the devices of containers
    /// alone.
    #[must_use]
    pub fn of_pod_alpha(&self, view: &PodView) -> v1alpha1::PodResources {
        let devices = |container: &Container| {
            let devices = self.devices_of(view, container).into_iter();
            let devices = devices.map(|v1::ContainerDevices { resource_name, device_ids, .. }| {
                v1alpha1::ContainerDevices { resource_name, device_ids }
            });
            v1alpha1::ContainerResources { name: container.name.clone(), devices: devices.collect() }
        };
        v1alpha1::PodResources {
            name: view.pod_ref.name.to_string(),
            namespace: view.pod_ref.namespace.to_string(),
            containers: pods::spec(&view.pod).containers.iter().map(devices).collect(),
        }
    }

    /// Returns what containers may have, whether they have it or not.
    ///
    /// # Errors
    /// The plugins list too many devices for an answer.
    pub fn allocatable(&self) -> Result<v1::AllocatableResourcesResponse, AnswerTooLarge> {
        let names: BTreeSet<String> =
            self.devices.read(|inventory, _| inventory.resources().map(str::to_owned).collect());
        // The devices are not locked during all of it.
        let healthy = |name: &String| self.devices.read(|inventory, _| healthy_devices(inventory, name));
        Ok(v1::AllocatableResourcesResponse {
            devices: bounded(names.iter().flat_map(healthy))?,
            cpu_ids: self.exclusive.allocatable_cpus(),
            memory: memory(self.exclusive.allocatable_memory()),
        })
    }

    fn of_container(&self, view: &PodView, container: &Container) -> v1::ContainerResources {
        let uid = view.pod_ref.uid.as_str();
        v1::ContainerResources {
            name: container.name.clone(),
            devices: self.devices_of(view, container),
            cpu_ids: self.exclusive.cpus(uid, &container.name),
            memory: memory(self.exclusive.memory(uid, &container.name)),
            dynamic_resources: self.claims_of(view, container),
        }
    }

    fn devices_of(&self, view: &PodView, container: &Container) -> Vec<v1::ContainerDevices> {
        self.devices.read(|inventory, _| {
            let held = inventory.held().container(view.pod_ref.uid.as_str(), &container.name);
            let held = held.into_iter().flatten();
            held.flat_map(|(resource, allocation)| allocated_devices(resource, allocation)).collect()
        })
    }

    /// Returns the prepared devices that a container may use, by claim. None if a claim is not prepared for
    /// the pod.
    fn claims_of(&self, view: &PodView, container: &Container) -> Vec<v1::DynamicResource> {
        let requests = container_requests(&view.pod, container).unwrap_or_default();
        if requests.is_empty() {
            return Vec::new();
        }
        self.claims.read(|inventory| {
            let mut resources = Vec::new();
            for (name, requests) in requests {
                let key = ClaimKey { namespace: view.pod_ref.namespace.to_string(), name };
                let record = inventory.record(&key);
                let record = record.filter(|record| record.pods.contains(view.pod_ref.uid.as_str()));
                let Some(record) = record else { return Vec::new() };
                // Two requests may name one device.
                let mut seen = BTreeSet::new();
                let devices = requests.iter().flat_map(|request| record.devices_of(request));
                let devices = devices.filter(|(driver, device)| {
                    seen.insert((
                        (*driver).to_owned(),
                        device.pool.clone(),
                        device.device.clone(),
                        device.share.clone(),
                    ))
                });
                let claim_resources =
                    devices.map(|(driver, device)| claim_resource(driver, device)).collect();
                let ClaimKey { namespace: claim_namespace, name: claim_name } = key;
                resources.push(v1::DynamicResource { claim_name, claim_namespace, claim_resources });
            }
            resources
        })
    }
}

/// Returns an entry per device and NUMA node (`containerDevicesFromResourceDeviceInstances`).
fn allocated_devices(resource: &str, allocation: &Allocation) -> Vec<v1::ContainerDevices> {
    let nodes = allocation.devices.iter();
    nodes.flat_map(|(node, ids)| ids.iter().map(|id| device(resource, id.as_str(), Some(*node)))).collect()
}

fn healthy_devices(inventory: &DeviceInventory, resource: &str) -> Vec<v1::ContainerDevices> {
    let mut entries = Vec::new();
    for (id, listed) in
        inventory.devices(resource).into_iter().flatten().filter(|(_, listed)| listed.is_healthy)
    {
        if listed.numa_nodes.is_empty() {
            entries.push(device(resource, id.as_str(), None));
        }
        entries.extend(listed.numa_nodes.iter().map(|node| device(resource, id.as_str(), Some(*node))));
    }
    entries
}

fn device(resource: &str, id: &str, node: Option<i64>) -> v1::ContainerDevices {
    let node = node.filter(|node| *node != NO_NUMA_NODE);
    v1::ContainerDevices {
        resource_name: resource.to_owned(),
        device_ids: vec![id.to_owned()],
        topology: node.map(|node| topology(vec![node])),
    }
}

fn claim_resource(driver: &str, device: &PreparedDevice) -> v1::ClaimResource {
    v1::ClaimResource {
        cdi_devices: device.cdi.iter().map(|name| v1::CdiDevice { name: name.clone() }).collect(),
        driver_name: driver.to_owned(),
        pool_name: device.pool.clone(),
        device_name: device.device.clone(),
        share_id: device.share.clone(),
    }
}

fn memory(blocks: Vec<MemoryBlock>) -> Vec<v1::ContainerMemory> {
    let block = |MemoryBlock { kind, bytes, numa_nodes }| v1::ContainerMemory {
        memory_type: kind,
        size: bytes,
        topology: Some(topology(numa_nodes)),
    };
    blocks.into_iter().map(block).collect()
}

fn topology(nodes: Vec<i64>) -> v1::TopologyInfo {
    v1::TopologyInfo { nodes: nodes.into_iter().map(|id| v1::NumaNode { id }).collect() }
}

/// Collects the items of an answer.
///
/// # Errors
/// They exceed [`MOST_BYTES`]. No further item is made then.
pub(crate) fn bounded<T: Message>(items: impl Iterator<Item = T>) -> Result<Vec<T>, AnswerTooLarge> {
    let mut bytes = 0_usize;
    let mut all = Vec::new();
    for item in items {
        bytes = bytes.saturating_add(item.encoded_len()).saturating_add(FRAME);
        if bytes > MOST_BYTES {
            return Err(AnswerTooLarge);
        }
        all.push(item);
    }
    Ok(all)
}

#[cfg(test)]
mod tests;
