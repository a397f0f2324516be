//! The devices of containers in the status of a pod
//! (`pkg/kubelet/cm/devicemanager: UpdateAllocatedResourcesStatus`).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{PodStatus, ResourceHealth, ResourceStatus};

/// Health of a device that a container holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceHealth {
    /// The plugin lists the device as healthy.
    Healthy,
    /// The plugin lists the device as unhealthy, or lists others.
    Unhealthy,
    /// The plugin has been away for longer than its grace period.
    Unknown,
    /// The plugin is away: the last reported health applies.
    Unchanged,
}

/// Health of the devices of a pod: by container, resource and ID.
pub type PodDeviceHealth = BTreeMap<String, BTreeMap<String, BTreeMap<String, DeviceHealth>>>;

/// Health that cannot be determined.
const UNKNOWN: &str = "Unknown";

/// Start of the name of an entry for a claim of dynamic resource allocation.
const CLAIM: &str = "claim:";

/// Adds the devices of each regular container to its status, then those of its claims. A container without
/// devices or without claims keeps those of the old status. So do all containers of a pod that has ended: its
/// devices are free, and its status has their last health, also while a killed process has not recorded that.
pub fn add_device_health(
    status: &mut PodStatus,
    old: Option<&PodStatus>,
    devices: &PodDeviceHealth,
    claims: &BTreeMap<String, Vec<ResourceStatus>>,
) {
    let phase = old.and_then(|old| old.phase.as_deref());
    let has_ended = phase.is_some_and(|phase| ["Failed", "Succeeded"].contains(&phase));
    let old = |container: &str| {
        let mut statuses = old.into_iter().flat_map(|old| old.container_statuses.iter().flatten());
        let status = statuses.find(|status| status.name == container);
        status.and_then(|status| status.allocated_resources_status.clone()).unwrap_or_default()
    };
    for container in status.container_statuses.iter_mut().flatten() {
        let (claims_before, before): (Vec<_>, Vec<_>) =
            old(&container.name).into_iter().partition(|entry| entry.name.starts_with(CLAIM));
        let mut entries = match devices.get(&container.name).filter(|_| !has_ended) {
            Some(resources) => resources.iter().map(|(name, ids)| resource(name, ids, &before)).collect(),
            None => before,
        };
        let claims = claims.get(&container.name).filter(|entries| !has_ended && !entries.is_empty());
        entries.extend(claims.cloned().unwrap_or(claims_before));
        container.allocated_resources_status = Some(entries).filter(|entries| !entries.is_empty());
    }
}

fn resource(name: &str, ids: &BTreeMap<String, DeviceHealth>, before: &[ResourceStatus]) -> ResourceStatus {
    let mut resources = before.iter();
    let before = resources.find(|resource| resource.name == name).and_then(|r| r.resources.as_ref());
    let last = |id: &str| {
        let mut devices = before.into_iter().flatten();
        devices.find(|device| device.resource_id == id)?.health.as_deref()
    };
    let health = |(id, health): (&String, &DeviceHealth)| {
        let health = match health {
            DeviceHealth::Healthy => "Healthy",
            DeviceHealth::Unhealthy => "Unhealthy",
            DeviceHealth::Unknown => UNKNOWN,
            DeviceHealth::Unchanged => last(id).unwrap_or(UNKNOWN),
        };
        ResourceHealth { resource_id: id.clone(), health: Some(health.to_owned()), message: None }
    };
    ResourceStatus { name: name.to_owned(), resources: Some(ids.iter().map(health).collect()) }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ContainerStatus;

    use super::*;

    fn status() -> PodStatus {
        let container = |name: &str| ContainerStatus { name: name.to_owned(), ..ContainerStatus::default() };
        PodStatus { container_statuses: Some(vec![container("a"), container("b")]), ..PodStatus::default() }
    }

    fn held(devices: &[(&str, DeviceHealth)]) -> PodDeviceHealth {
        let devices = devices.iter().map(|(id, health)| ((*id).to_owned(), *health)).collect();
        [("a".to_owned(), [("x.com/r".to_owned(), devices)].into())].into()
    }

    fn shown(status: &PodStatus) -> String {
        let container = |status: &ContainerStatus| {
            let resources = status.allocated_resources_status.iter().flatten();
            let devices = resources.flat_map(|r| r.resources.iter().flatten().map(move |d| (&r.name, d)));
            let texts = devices.map(|(name, device)| {
                format!("{name} {}={}", device.resource_id, device.health.as_deref().unwrap_or_default())
            });
            format!("{}: {}", status.name, texts.collect::<Vec<_>>().join(", "))
        };
        status.container_statuses.iter().flatten().map(container).collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn a_container_shows_its_devices_and_the_last_health_while_the_plugin_is_away() {
        use DeviceHealth::{Healthy, Unchanged, Unhealthy, Unknown};
        // Devices now, and the status after that of the row before.
        let table = [
            (held(&[("1", Healthy), ("2", Unhealthy)]), "a: x.com/r 1=Healthy, x.com/r 2=Unhealthy; b: "),
            (held(&[("1", Unchanged), ("2", Unchanged)]), "a: x.com/r 1=Healthy, x.com/r 2=Unhealthy; b: "),
            (held(&[("1", Unhealthy), ("2", Healthy)]), "a: x.com/r 1=Unhealthy, x.com/r 2=Healthy; b: "),
            // The pod has ended.
            (PodDeviceHealth::new(), "a: x.com/r 1=Unhealthy, x.com/r 2=Healthy; b: "),
            (held(&[("1", Unknown), ("3", Unchanged)]), "a: x.com/r 1=Unknown, x.com/r 3=Unknown; b: "),
        ];
        let mut old = None;
        for (devices, expected) in table {
            let mut now = status();
            add_device_health(&mut now, old.as_ref(), &devices, &BTreeMap::new());
            assert_eq!(shown(&now), expected);
            old = Some(now);
        }
    }

    #[test]
    fn a_pod_that_has_ended_keeps_the_last_health_of_devices_that_it_still_holds() {
        for (phase, want) in [
            ("Running", "a: x.com/r 1=Healthy; b: "),
            ("Failed", "a: x.com/r 1=Unhealthy; b: "),
            ("Succeeded", "a: x.com/r 1=Unhealthy; b: "),
        ] {
            let mut old = status();
            add_device_health(&mut old, None, &held(&[("1", DeviceHealth::Unhealthy)]), &BTreeMap::new());
            old.phase = Some(phase.to_owned());
            let mut now = status();
            add_device_health(&mut now, Some(&old), &held(&[("1", DeviceHealth::Healthy)]), &BTreeMap::new());
            assert_eq!(shown(&now), want, "{phase}");
        }
    }

    #[test]
    fn resources_and_devices_have_a_fixed_order_whatever_that_of_the_last_status_is() {
        // Kubernetes 1.38 sorts them, too (kubernetes/kubernetes#142340).
        let held = |health: DeviceHealth| {
            let resource = |name: &str, ids: [&str; 3]| {
                (name.to_owned(), BTreeMap::from(ids.map(|id| (id.to_owned(), health))))
            };
            let resources = [resource("y.com/r", ["c", "a", "b"]), resource("x.com/r", ["3", "10", "2"])];
            PodDeviceHealth::from([("a".to_owned(), BTreeMap::from(resources))])
        };
        let mut first = status();
        add_device_health(&mut first, None, &held(DeviceHealth::Healthy), &BTreeMap::new());
        let expected = [("x.com/r", ["10", "2", "3"]), ("y.com/r", ["a", "b", "c"])];
        let devices = expected.map(|(name, ids)| ids.map(|id| format!("{name} {id}=Healthy")).join(", "));
        assert_eq!(shown(&first), format!("a: {}; b: ", devices.join(", ")));

        let mut reversed = first.clone();
        let entries = reversed.container_statuses.as_mut().unwrap()[0].allocated_resources_status.as_mut();
        let entries = entries.unwrap();
        entries.reverse();
        for entry in entries {
            entry.resources.as_mut().unwrap().reverse();
        }
        assert_ne!(reversed, first);
        let mut next = status();
        add_device_health(&mut next, Some(&reversed), &held(DeviceHealth::Unchanged), &BTreeMap::new());
        assert_eq!(next, first);
    }

    #[test]
    fn a_container_shows_its_claims_beside_its_devices_and_each_keeps_its_last_health() {
        let claim = |health: &str| {
            let device = ResourceHealth {
                resource_id: "d".to_owned(),
                health: Some(health.to_owned()),
                message: None,
            };
            let entry = ResourceStatus { name: "claim:gpu/r".to_owned(), resources: Some(vec![device]) };
            BTreeMap::from([("a".to_owned(), vec![entry])])
        };
        let devices = held(&[("1", DeviceHealth::Healthy)]);
        let (no_devices, no_claims) = (PodDeviceHealth::new(), BTreeMap::new());
        // Devices and claims now, and the status after that of the row before.
        let table = [
            (&no_devices, &claim("Healthy"), "a: claim:gpu/r d=Healthy; b: "),
            (&devices, &claim("Unhealthy"), "a: x.com/r 1=Healthy, claim:gpu/r d=Unhealthy; b: "),
            (&no_devices, &claim("Unknown"), "a: x.com/r 1=Healthy, claim:gpu/r d=Unknown; b: "),
            (&devices, &no_claims, "a: x.com/r 1=Healthy, claim:gpu/r d=Unknown; b: "),
            (&no_devices, &no_claims, "a: x.com/r 1=Healthy, claim:gpu/r d=Unknown; b: "),
        ];
        let mut old = None;
        for (devices, claims, expected) in table {
            let mut now = status();
            add_device_health(&mut now, old.as_ref(), devices, claims);
            assert_eq!(shown(&now), expected);
            old = Some(now);
        }
        let mut now = status();
        add_device_health(&mut now, None, &no_devices, &no_claims);
        assert_eq!(now, status());
    }
}
