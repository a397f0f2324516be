//! The registered resources with their devices, and who holds them: plain functions of time and of what
//! plugins report.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pod_sync_decisions::device_status::{DeviceHealth, PodDeviceHealth};
use pod_sync_layout::{ExtendedResources, ResourceCount};
use pod_sync_machine::NumaNodes;

use crate::allocations::{Allocation, PodDevices};
use crate::checkpoint::DeviceCheckpoint;
use crate::device::{Device, DeviceId, DeviceIds, NO_NUMA_NODE};
use crate::error::DeviceError;
use crate::select::{DeviceGroups, DeviceShortage, Preference, PreferenceQuery, SelectDecision, select};

/// Time that the devices of a stopped plugin stay in the capacity of the node (`endpointStopGracePeriod`).
/// For as long a pod waits for the plugins of its devices.
pub const GRACE: Duration = Duration::from_secs(5 * 60);

/// Options of a plugin (`DevicePluginOptions`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PluginOptions {
    /// PreStartContainer precedes each start of a container.
    pub pre_start: bool,
    /// GetPreferredAllocation is implemented.
    pub preferences: bool,
}

/// Number of a registration, unique in the process.
pub(crate) type RegistrationNumber = u64;

/// The plugin of a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PluginPhase {
    /// The plugin has stopped, or has not registered since the start of this process.
    Away {
        /// CLOCK_BOOTTIME of the end of the last registration, or of the start of this process.
        since: Duration,
        /// Options of the last registration; none after a restart.
        options: Option<PluginOptions>,
    },
    /// The plugin is registered and has not listed its devices yet.
    Registered { number: RegistrationNumber, options: PluginOptions, since: Duration },
    /// The plugin has listed its devices.
    Serving { number: RegistrationNumber, options: PluginOptions },
}

impl PluginPhase {
    fn registration(self) -> Option<(RegistrationNumber, PluginOptions)> {
        match self {
            Self::Away { .. } => None,
            Self::Registered { number, options, .. } | Self::Serving { number, options } => {
                Some((number, options))
            }
        }
    }
}

/// The phase of a plugin, for views.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PluginPhaseView {
    /// The plugin has stopped, or has not registered since the start of this process.
    Away,
    /// The plugin is registered and has not listed its devices yet.
    Registered,
    /// The plugin has listed its devices.
    Serving,
    /// The plugin has been away for longer than the grace period, or never registered.
    Removed,
}

#[derive(Debug, Clone)]
struct ResourceDevices {
    devices: BTreeMap<DeviceId, Device>,
    phase: PluginPhase,
}

impl ResourceDevices {
    fn healthy(&self) -> DeviceIds {
        self.devices.iter().filter(|(_, device)| device.is_healthy).map(|(id, _)| id.clone()).collect()
    }
}

/// The devices that one container requests of one resource.
#[derive(Debug, Clone, Copy)]
pub struct DeviceRequest<'a> {
    /// UID of the pod.
    pub pod: &'a str,
    /// Name of the container.
    pub container: &'a str,
    /// Name of the resource.
    pub resource: &'a str,
    /// Number of devices.
    pub required: usize,
    /// Devices that earlier init containers leave.
    pub reusable: &'a DeviceIds,
    /// The pod was admitted: it keeps the devices that it holds, whatever their plugin reports.
    pub is_admitted: bool,
    /// NUMA nodes that the topology manager selected for the container, if it did.
    pub nodes: Option<NumaNodes>,
}

/// The next step for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceDecision {
    /// The resource is none of a device plugin, or the container holds its devices.
    Nothing,
    /// The plugin is away, or has not listed its devices. The request fails after this time (CLOCK_BOOTTIME).
    Wait {
        /// End of the wait.
        until: Duration,
    },
    /// Call GetPreferredAllocation of this registration, and decide again.
    Query(RegistrationNumber, PreferenceQuery),
    /// Reserve the devices and call Allocate of this registration.
    Allocate(RegistrationNumber, DeviceIds),
}

/// Whether PreStartContainer precedes the start of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreStartNeed {
    /// The plugin does not need the call.
    None,
    /// The plugin needs the call.
    Call,
    /// The plugin needs the call and is away.
    PluginAway,
}

/// Devices that are reserved while Allocate is in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reservation(u64);

/// The registered resources, and the devices that containers hold.
#[derive(Debug, Default)]
pub struct DeviceInventory {
    resources: BTreeMap<String, ResourceDevices>,
    /// Resources whose plugin stayed away for longer than the grace period. The Node shows zero of them.
    removed: BTreeSet<String>,
    held: PodDevices,
    reserved: BTreeMap<Reservation, (String, DeviceIds)>,
    last_number: u64,
}

impl DeviceInventory {
    /// Returns the state after a restart. The resources of the checkpoint have no devices until their plugins
    /// register again.
    #[must_use]
    pub fn restored(checkpoint: DeviceCheckpoint, now: Duration) -> Self {
        let away = |(name, _)| {
            (
                name,
                ResourceDevices {
                    devices: BTreeMap::new(),
                    phase: PluginPhase::Away { since: now, options: None },
                },
            )
        };
        let resources = checkpoint.registered.into_iter().map(away).collect();
        Self { resources, held: checkpoint.held, ..Self::default() }
    }

    /// Returns the content of the checkpoint.
    #[must_use]
    pub fn checkpoint(&self) -> DeviceCheckpoint {
        let healthy = |devices: &ResourceDevices| devices.healthy().into_iter().collect();
        let registered = self.resources.iter().map(|(name, devices)| (name.clone(), healthy(devices)));
        DeviceCheckpoint { held: self.held.clone(), registered: registered.collect() }
    }

    /// Returns the devices that containers hold.
    #[must_use]
    pub fn held(&self) -> &PodDevices {
        &self.held
    }

    /// Begins a registration, which replaces an earlier one of the resource. The devices stay as they are
    /// until the plugin lists others, and none is healthy until then.
    pub fn register(&mut self, resource: &str, options: PluginOptions, now: Duration) -> RegistrationNumber {
        let number = self.next_number();
        let phase = PluginPhase::Registered { number, options, since: now };
        self.removed.remove(resource);
        let devices = self.resources.remove(resource).map(|known| known.devices).unwrap_or_default();
        let mut known = ResourceDevices { devices, phase };
        known.devices.values_mut().for_each(|device| device.is_healthy = false);
        self.resources.insert(resource.to_owned(), known);
        number
    }

    /// Takes over the list of a plugin. Returns the pods that hold a device whose health has changed; none if
    /// the registration is no longer the current one.
    pub fn list(
        &mut self,
        resource: &str,
        number: RegistrationNumber,
        devices: BTreeMap<DeviceId, Device>,
    ) -> Option<BTreeSet<String>> {
        let known = self.resources.get_mut(resource)?;
        let (current, options) = known.phase.registration()?;
        if current != number {
            return None;
        }
        let is_first = matches!(known.phase, PluginPhase::Registered { .. });
        let health = |devices: &BTreeMap<DeviceId, Device>, id: &DeviceId| {
            devices.get(id).map(|device| device.is_healthy)
        };
        let ids: BTreeSet<&DeviceId> = known.devices.keys().chain(devices.keys()).collect();
        let changed =
            ids.into_iter().filter(|id| is_first || health(&known.devices, id) != health(&devices, id));
        let holders = changed.flat_map(|id| self.held.holders(resource, id));
        let pods = holders.map(|(pod, _)| pod.to_owned()).collect();
        known.devices = devices;
        known.phase = PluginPhase::Serving { number, options };
        Some(pods)
    }

    /// Ends a registration: all devices are unhealthy until the plugin registers again. Returns whether it
    /// was the current one.
    pub fn stop(&mut self, resource: &str, number: RegistrationNumber, now: Duration) -> bool {
        let Some(known) = self.resources.get_mut(resource) else { return false };
        match known.phase.registration() {
            Some((current, options)) if current == number => {
                known.devices.values_mut().for_each(|device| device.is_healthy = false);
                known.phase = PluginPhase::Away { since: now, options: Some(options) };
                true
            }
            Some(_) | None => false,
        }
    }

    /// Removes the resources whose plugin has been away for longer than the grace period. Returns whether
    /// there were any.
    pub fn expire(&mut self, now: Duration) -> bool {
        let is_expired = |_: &String, known: &mut ResourceDevices| match known.phase {
            PluginPhase::Away { since, .. } => now.saturating_sub(since) > GRACE,
            PluginPhase::Registered { .. } | PluginPhase::Serving { .. } => false,
        };
        let expired: Vec<String> =
            self.resources.extract_if(.., is_expired).map(|(resource, _)| resource).collect();
        let any = !expired.is_empty();
        self.removed.extend(expired);
        any
    }

    /// Returns the time at which the next resource is removed, unless its plugin registers before.
    #[must_use]
    pub fn next_expiry(&self) -> Option<Duration> {
        let away = self.resources.values().filter_map(|known| match known.phase {
            PluginPhase::Away { since, .. } => Some(since.saturating_add(GRACE)),
            PluginPhase::Registered { .. } | PluginPhase::Serving { .. } => None,
        });
        away.min()
    }

    /// Returns the number of devices of each resource. A resource that was removed has none (`GetCapacity`).
    #[must_use]
    pub fn capacity(&self) -> ExtendedResources {
        let count = |known: &ResourceDevices| ResourceCount {
            capacity: known.devices.len(),
            allocatable: known.healthy().len(),
        };
        let known = self.resources.iter().map(|(name, known)| (name.clone(), count(known)));
        let removed = self.removed.iter().map(|name| (name.clone(), ResourceCount::default()));
        known.chain(removed).collect()
    }

    /// Returns the number of devices that a pod finds on the node, by resource: the healthy ones. A pod that
    /// holds devices finds at least all that are held, whatever their plugins report
    /// (`sanitizeNodeAllocatable`). While a plugin is away there is no limit, since the pod waits for it.
    #[must_use]
    pub fn allocatable_for(&self, pod: &str) -> BTreeMap<String, usize> {
        let held = |name: &str| self.held.in_use(name).len();
        let holds = self.held.has_pod(pod);
        let mut all: BTreeMap<String, usize> = self.removed.iter().map(|name| (name.clone(), 0)).collect();
        for (name, known) in &self.resources {
            let count = match known.phase {
                PluginPhase::Serving { .. } => known.healthy().len(),
                PluginPhase::Away { .. } | PluginPhase::Registered { .. } => usize::MAX,
            };
            all.insert(name.clone(), count);
        }
        if holds {
            for name in self.held.resources() {
                let count = all.entry(name.to_owned()).or_default();
                *count = (*count).max(held(name));
            }
        }
        all
    }

    /// Returns the current registration of a resource.
    #[must_use]
    pub fn registration(&self, resource: &str) -> Option<(RegistrationNumber, PluginOptions)> {
        self.resources.get(resource)?.phase.registration()
    }

    /// Returns whether the plugin of a resource is registered and has listed its devices.
    #[must_use]
    pub fn is_serving(&self, resource: &str) -> bool {
        let phase = self.resources.get(resource).map(|known| known.phase);
        matches!(phase, Some(PluginPhase::Serving { .. }))
    }

    /// Returns whether a device plugin provides or has provided the resource, or a container holds devices of
    /// it (`isDevicePluginResource`). A pod that waited for a plugin that stays away must not start without
    /// its devices.
    #[must_use]
    pub fn is_known(&self, resource: &str) -> bool {
        self.resources.contains_key(resource)
            || self.removed.contains(resource)
            || self.held.resources().contains(resource)
    }

    /// Returns the devices of a resource, and whether each one is healthy.
    #[must_use]
    pub fn devices(&self, resource: &str) -> Option<&BTreeMap<DeviceId, Device>> {
        self.resources.get(resource).map(|known| &known.devices)
    }

    /// Returns the names of the resources, with those that were removed.
    pub fn resources(&self) -> impl Iterator<Item = &str> {
        self.resources.keys().chain(&self.removed).map(String::as_str)
    }

    /// Returns the phase of the plugin of a resource.
    #[must_use]
    pub fn phase(&self, resource: &str) -> PluginPhaseView {
        match self.resources.get(resource).map(|known| known.phase) {
            None => PluginPhaseView::Removed,
            Some(PluginPhase::Away { .. }) => PluginPhaseView::Away,
            Some(PluginPhase::Registered { .. }) => PluginPhaseView::Registered,
            Some(PluginPhase::Serving { .. }) => PluginPhaseView::Serving,
        }
    }

    /// Returns the health of the devices that the containers of a pod hold, for its status. A device that its
    /// plugin no longer lists is unhealthy, as for an admission.
    #[must_use]
    pub fn health(&self, pod: &str) -> PodDeviceHealth {
        let health = |resource: &str, id: &DeviceId| match self.phase(resource) {
            PluginPhaseView::Removed => DeviceHealth::Unknown,
            PluginPhaseView::Away | PluginPhaseView::Registered => DeviceHealth::Unchanged,
            PluginPhaseView::Serving => {
                match self.devices(resource).is_some_and(|d| d.get(id).is_some_and(|d| d.is_healthy)) {
                    true => DeviceHealth::Healthy,
                    false => DeviceHealth::Unhealthy,
                }
            }
        };
        let mut all = PodDeviceHealth::new();
        for (container, resource, held) in self.held.of_pod(pod) {
            let ids = held.ids();
            let devices = ids.iter().map(|id| (id.to_string(), health(resource, id))).collect();
            all.entry(container.to_owned()).or_default().insert(resource.to_owned(), devices);
        }
        all
    }

    /// Decides whether PreStartContainer is called before a container with this resource starts
    /// (`callPreStartContainerIfNeeded`). As with the kubelet, a plugin that has not registered since the
    /// restart is not called.
    #[must_use]
    pub fn pre_start(&self, resource: &str) -> PreStartNeed {
        let Some(known) = self.resources.get(resource) else { return PreStartNeed::None };
        let need = |options: PluginOptions, need| if options.pre_start { need } else { PreStartNeed::None };
        match known.phase {
            PluginPhase::Registered { options, .. } | PluginPhase::Serving { options, .. } => {
                need(options, PreStartNeed::Call)
            }
            PluginPhase::Away { options: Some(options), .. } => need(options, PreStartNeed::PluginAway),
            PluginPhase::Away { options: None, .. } => PreStartNeed::None,
        }
    }

    /// Decides what comes next for a request (`devicesToAllocate`).
    ///
    /// # Errors
    /// Returns the reason for which the container cannot have the devices.
    pub fn decide(
        &self,
        request: &DeviceRequest<'_>,
        preference: Preference<'_>,
        now: Duration,
    ) -> Result<DeviceDecision, DeviceError> {
        let resource = request.resource;
        if request.required == 0 || !self.is_known(resource) {
            return Ok(DeviceDecision::Nothing);
        }
        let held = self.held.held(request.pod, request.container, resource);
        if let Some(held) = held.as_ref().filter(|held| held.len() != request.required) {
            return Err(DeviceError::Changed {
                pod: request.pod.to_owned(),
                container: request.container.to_owned(),
                resource: resource.to_owned(),
                held: held.len(),
                required: request.required,
            });
        }
        if request.is_admitted && held.is_some() {
            return Ok(DeviceDecision::Nothing);
        }
        let unregistered = || DeviceError::Unregistered(resource.to_owned());
        let known = self.resources.get(resource).ok_or_else(unregistered)?;
        let (number, options) = match known.phase {
            PluginPhase::Away { .. } | PluginPhase::Registered { .. } => {
                let until = self.awaited(resource, now).ok_or_else(unregistered)?;
                return Ok(DeviceDecision::Wait { until });
            }
            PluginPhase::Serving { number, options } => (number, options),
        };
        let healthy = known.healthy();
        if healthy.is_empty() {
            return Err(DeviceError::NoHealthy(resource.to_owned()));
        }
        if let Some(held) = held {
            return match held.is_subset(&healthy) {
                true => Ok(DeviceDecision::Nothing),
                false => Err(DeviceError::HeldUnhealthy(resource.to_owned())),
            };
        }
        let preference = if options.preferences { preference } else { Preference::None };
        let groups = self.groups(resource, request.nodes);
        match select(request.required, request.reusable, &groups, preference) {
            Ok(SelectDecision::Selected(ids)) => Ok(DeviceDecision::Allocate(number, ids)),
            Ok(SelectDecision::Query(query)) => Ok(DeviceDecision::Query(number, query)),
            Err(DeviceShortage { requested, available }) => {
                Err(DeviceError::Unavailable { resource: resource.to_owned(), requested, available })
            }
        }
    }

    /// Returns the time until which pods wait for the plugin of a resource; `None` if it has listed its
    /// devices, or stayed away for too long.
    #[must_use]
    pub fn awaited(&self, resource: &str, now: Duration) -> Option<Duration> {
        let until = match self.resources.get(resource)?.phase {
            PluginPhase::Away { since, .. } | PluginPhase::Registered { since, .. } => {
                since.saturating_add(GRACE)
            }
            PluginPhase::Serving { .. } => return None,
        };
        Some(until).filter(|until| now < *until)
    }

    /// Returns the free healthy devices by their distance to the nodes of a hint (`filterByAffinity`).
    fn groups(&self, resource: &str, nodes: Option<NumaNodes>) -> DeviceGroups {
        let available = self.available(resource);
        let Some(nodes) = nodes else { return DeviceGroups::without_hint(available) };
        let listed = self.devices(resource);
        let mut groups = DeviceGroups::default();
        for id in available {
            let device = listed.and_then(|listed| listed.get(&id));
            let group = match device {
                Some(device) if !device.nodes().intersection(nodes).is_empty() => &mut groups.aligned,
                Some(device) if !device.numa_nodes.is_empty() => &mut groups.unaligned,
                Some(_) | None => &mut groups.without_affinity,
            };
            group.insert(id);
        }
        groups
    }

    /// Returns the healthy devices that are free.
    pub(crate) fn available(&self, resource: &str) -> DeviceIds {
        let healthy = self.resources.get(resource).map(ResourceDevices::healthy).unwrap_or_default();
        healthy.difference(&self.in_use(resource)).cloned().collect()
    }

    /// Reserves devices, so that no other pod gets them while Allocate is in flight.
    pub fn reserve(&mut self, resource: &str, ids: DeviceIds) -> Reservation {
        let reservation = Reservation(self.next_number());
        self.reserved.insert(reservation, (resource.to_owned(), ids));
        reservation
    }

    /// Frees reserved devices: the call failed, or the pod is going.
    pub fn cancel(&mut self, reservation: Reservation) {
        self.reserved.remove(&reservation);
    }

    /// Gives reserved devices to a container, with the plugin's encoded response.
    pub fn commit(&mut self, reservation: Reservation, pod: &str, container: &str, response: Vec<u8>) {
        let Some((resource, ids)) = self.reserved.remove(&reservation) else { return };
        let listed = self.resources.get(&resource).map(|known| &known.devices);
        let mut devices: BTreeMap<i64, Vec<DeviceId>> = BTreeMap::new();
        for id in ids {
            let nodes = listed.and_then(|listed| listed.get(&id)).map(|device| &device.numa_nodes[..]);
            for node in nodes.filter(|nodes| !nodes.is_empty()).unwrap_or(&[NO_NUMA_NODE]) {
                devices.entry(*node).or_default().push(id.clone());
            }
        }
        self.held.insert(pod, container, &resource, Allocation { devices, response });
    }

    /// Frees the devices of a pod whose containers have ended. Returns whether it held any.
    pub fn release(&mut self, pod: &str) -> bool {
        self.held.remove_pod(pod)
    }

    /// Returns the devices that containers hold or that are reserved.
    fn in_use(&self, resource: &str) -> DeviceIds {
        let reserved = self.reserved.values().filter(|(name, _)| name == resource);
        let mut all = self.held.in_use(resource);
        all.extend(reserved.flat_map(|(_, ids)| ids.iter().cloned()));
        all
    }

    fn next_number(&mut self) -> u64 {
        self.last_number = self.last_number.saturating_add(1);
        self.last_number
    }
}

#[cfg(test)]
mod tests;
