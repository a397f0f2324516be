//! The NUMA nodes that can satisfy the requests of devices
//! (`pkg/kubelet/cm/devicemanager: generateDeviceTopologyHints`).

use std::collections::{BTreeMap, BTreeSet};

use pod_sync_machine::{NumaNode, NumaNodes};
use pod_sync_topology::{Hint, Hints, RequestScope};

use crate::device::{Device, DeviceId, DeviceIds};
use crate::inventory::DeviceInventory;
use crate::requests::ContainerRequest;

impl Device {
    /// Returns the NUMA nodes of the device; empty if it belongs to none.
    #[must_use]
    pub fn nodes(&self) -> NumaNodes {
        let numbers = self.numa_nodes.iter().filter_map(|number| u64::try_from(*number).ok());
        numbers.filter_map(|number| NumaNode::try_from(number).ok()).collect()
    }
}

impl DeviceInventory {
    /// Returns the hints for the devices of a container or of a whole pod, one for each resource. `machine`
    /// are the NUMA nodes of the machine: others, which a plugin may list, do not count. Devices that are
    /// held have the hints of their own nodes.
    #[must_use]
    pub fn hints(
        &self,
        pod: &str,
        requests: &[ContainerRequest],
        scope: RequestScope<'_>,
        machine: NumaNodes,
    ) -> Vec<Hints> {
        let amounts = match scope {
            RequestScope::Container(name) => {
                let request = requests.iter().find(|request| request.name == name);
                request.map(|request| request.resources.clone()).unwrap_or_default()
            }
            RequestScope::Pod => totals(requests),
        };
        let known = amounts.into_iter().filter(|(resource, _)| self.is_known(resource));
        known
            .map(|(resource, count)| self.hints_for(pod, requests, scope, machine, &resource, count))
            .collect()
    }

    fn hints_for(
        &self,
        pod: &str,
        requests: &[ContainerRequest],
        scope: RequestScope<'_>,
        machine: NumaNodes,
        resource: &str,
        count: usize,
    ) -> Hints {
        let Some(listed) = self.devices(resource) else { return Hints::AnyNodes };
        if listed.values().all(|device| device.numa_nodes.is_empty()) {
            return Hints::AnyNodes;
        }
        let (held, reusable) = match scope {
            RequestScope::Container(name) => {
                let held = self.held().held(pod, name, resource).unwrap_or_default();
                (held, self.held().reusable(pod, requests, name, resource))
            }
            RequestScope::Pod => {
                let all = self.held().of_pod(pod).filter(|(_, name, _)| *name == resource);
                let held: DeviceIds = all.flat_map(|(.., held)| held.ids()).collect();
                // Later containers add to what earlier ones have.
                if held.len() < count { (DeviceIds::new(), held) } else { (held, DeviceIds::new()) }
            }
        };
        if !held.is_empty() {
            let is_same = held.len() == count;
            let hints = if is_same {
                nodes_with(listed, &held, &DeviceIds::new(), machine, count)
            } else {
                Vec::new()
            };
            return Hints::OneOf(hints);
        }
        let available = self.available(resource);
        let is_possible = available.union(&reusable).count() >= count;
        let hints =
            if is_possible { nodes_with(listed, &available, &reusable, machine, count) } else { Vec::new() };
        Hints::OneOf(hints)
    }
}

/// Returns a hint for each set of NUMA nodes that has all reusable devices and enough available ones. Those
/// with as few nodes as could satisfy the request with all devices free are preferred.
fn nodes_with(
    listed: &BTreeMap<DeviceId, Device>,
    available: &DeviceIds,
    reusable: &DeviceIds,
    machine: NumaNodes,
    count: usize,
) -> Vec<Hint> {
    let nodes_of = |id: &DeviceId| listed.get(id).map(Device::nodes).unwrap_or_default();
    let is_on = |nodes: NumaNodes, id: &DeviceId| !nodes_of(id).intersection(nodes).is_empty();
    let with_devices = listed.values().fold(NumaNodes::EMPTY, |all, device| all.union(device.nodes()));
    let with_devices = with_devices.intersection(machine);
    let considered = if with_devices.is_empty() { machine } else { with_devices };
    let could_fit = |nodes: &NumaNodes| listed.keys().filter(|id| is_on(*nodes, id)).count() >= count;
    let fewest = considered.subsets().find(could_fit).map_or(considered.len(), NumaNodes::len);
    let bound: BTreeSet<&DeviceId> = reusable
        .iter()
        .filter(|id| listed.get(*id).is_some_and(|device| !device.numa_nodes.is_empty()))
        .collect();
    let fits = |nodes: &NumaNodes| {
        let free = available.iter().filter(|id| is_on(*nodes, id)).count();
        bound.iter().all(|id| is_on(*nodes, id)) && bound.len().saturating_add(free) >= count
    };
    let hint = |nodes: NumaNodes| Hint { nodes: Some(nodes), is_preferred: nodes.len() == fewest };
    considered.subsets().filter(fits).map(hint).collect()
}

/// Returns the number of devices that a pod needs at once, by resource (`getPodDeviceRequest`).
fn totals(requests: &[ContainerRequest]) -> BTreeMap<String, usize> {
    let resources: BTreeSet<&String> = requests.iter().flat_map(|request| request.resources.keys()).collect();
    let total = |resource: &String| {
        let mut kept: usize = 0;
        let mut most: usize = 0;
        for request in requests {
            let count = request.resources.get(resource).copied().unwrap_or(0);
            most = most.max(kept.saturating_add(count));
            if !request.gives_devices_on {
                kept = kept.saturating_add(count);
            }
        }
        most
    };
    resources.into_iter().map(|resource| (resource.clone(), total(resource))).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::inventory::{DeviceDecision, DeviceRequest, PluginOptions};
    use crate::select::Preference;

    const GPU: &str = "a.com/gpu";

    // `a0` is a device on node 0, `b01` one on both nodes, `c` one on no node.
    fn inventory(devices: &str) -> DeviceInventory {
        let mut inventory = DeviceInventory::default();
        let number = inventory.register(GPU, PluginOptions::default(), Duration::ZERO);
        let device = |name: &str| {
            let numa_nodes = name.chars().filter_map(|c| c.to_digit(10)).map(i64::from).collect();
            (DeviceId::from(name), Device { is_healthy: true, numa_nodes })
        };
        inventory.list(GPU, number, devices.split_whitespace().map(device).collect()).unwrap();
        inventory
    }

    fn give(inventory: &mut DeviceInventory, pod: &str, container: &str, names: &str) {
        let ids = names.split_whitespace().map(DeviceId::from).collect();
        let reservation = inventory.reserve(GPU, ids);
        inventory.commit(reservation, pod, container, Vec::new());
    }

    fn request(name: &str, gives_devices_on: bool, count: usize) -> ContainerRequest {
        let resources = if count == 0 { BTreeMap::new() } else { [(GPU.to_owned(), count)].into() };
        ContainerRequest { name: name.to_owned(), gives_devices_on, resources }
    }

    fn machine(nodes: u64) -> NumaNodes {
        (0..nodes).map(|number| NumaNode::try_from(number).unwrap()).collect()
    }

    // Preferred hints have a star.
    fn shown(hints: &[Hints]) -> String {
        let hint = |hint: &Hint| {
            let star = if hint.is_preferred { "*" } else { "" };
            format!("{}{star}", hint.nodes.unwrap_or_default())
        };
        let one = |hints: &Hints| match hints {
            Hints::AnyNodes => "any".to_owned(),
            Hints::OneOf(list) => list.iter().map(hint).collect::<Vec<_>>().join(" "),
        };
        hints.iter().map(one).collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn hints_are_the_nodes_with_enough_free_devices_as_in_the_kubelet() {
        // Devices, devices of another pod, number, hints on a machine with two nodes.
        for (devices, taken, count, hints) in [
            ("a0 b1", "", 1, "0* 1* 0-1"),
            ("a0 b1", "", 2, "0-1*"),
            ("a0 b0 c1", "a0", 1, "0* 1* 0-1"),
            ("a0 b0 c1", "a0", 2, "0-1"),
            ("a0 b1", "a0", 2, ""),
            ("a b", "", 1, "any"),
            ("a0 b", "", 1, "0*"),
            ("a0 b", "", 2, ""),
            ("a01 b1", "", 1, "0* 1* 0-1"),
            ("a0 b7", "", 1, "0*"),
        ] {
            let mut inventory = inventory(devices);
            if !taken.is_empty() {
                give(&mut inventory, "other", "main", taken);
            }
            let requests = [request("main", false, count)];
            let scope = RequestScope::Container("main");
            assert_eq!(
                shown(&inventory.hints("p", &requests, scope, machine(2))),
                hints,
                "{devices} {count}"
            );
            let whole = inventory.hints("p", &requests, RequestScope::Pod, machine(2));
            assert_eq!(shown(&whole), hints, "{devices} {count}");
        }
        let none = inventory("a0").hints("p", &[request("main", false, 0)], RequestScope::Pod, machine(2));
        assert!(none.is_empty());
    }

    #[test]
    fn devices_that_are_held_or_left_by_an_init_container_decide_the_nodes() {
        let mut inventory = inventory("a0 b0 c1 d1");
        let requests = [request("init", true, 1), request("main", false, 1), request("other", false, 1)];
        give(&mut inventory, "p", "init", "c1");
        let hints =
            |inventory: &DeviceInventory, scope| shown(&inventory.hints("p", &requests, scope, machine(2)));
        assert_eq!(hints(&inventory, RequestScope::Container("init")), "1* 0-1");
        assert_eq!(hints(&inventory, RequestScope::Container("main")), "1* 0-1", "c1 is used again");
        give(&mut inventory, "p", "main", "c1");
        assert_eq!(hints(&inventory, RequestScope::Container("other")), "0* 1* 0-1");
        assert_eq!(hints(&inventory, RequestScope::Pod), "1* 0-1", "the pod adds a device to c1");
        give(&mut inventory, "p", "other", "a0");
        assert_eq!(hints(&inventory, RequestScope::Pod), "0-1");
    }

    #[test]
    fn devices_on_the_nodes_of_the_hint_are_selected_first() {
        let selected = |devices: &str, nodes: u64, required| {
            let none = DeviceIds::new();
            let nodes = Some(NumaNode::try_from(nodes).unwrap().into());
            let (pod, container) = ("p", "main");
            let request = DeviceRequest {
                pod,
                container,
                resource: GPU,
                required,
                reusable: &none,
                is_admitted: false,
                nodes,
            };
            match inventory(devices).decide(&request, Preference::None, Duration::ZERO) {
                Ok(DeviceDecision::Allocate(_, ids)) => {
                    ids.iter().map(DeviceId::as_str).collect::<Vec<_>>().join(" ")
                }
                other => format!("{other:?}"),
            }
        };
        assert_eq!(selected("a0 b1 c", 1, 1), "b1");
        assert_eq!(selected("a0 b1 c", 1, 2), "a0 b1");
        assert_eq!(selected("a0 b01 c", 1, 1), "b01");
        assert_eq!(selected("a b", 1, 1), "a");
    }
}
