//! The tasks of registered plugins: their lists of devices, and the end of a registration.

use std::collections::BTreeMap;

use pod_sync_plugins::call::CallError;
use quintlet_model::ids::PodUid;
use quintlet_plugin_api::device_plugin::ListAndWatchResponse;

use super::{MOST_RESOURCES, Shared};
use crate::device::{Device, DeviceId};
use crate::error::DeviceError;
use crate::inventory::RegistrationNumber;
use crate::plugin::DevicePlugin;

/// Longest ID of a device in bytes. The API says 63; an ID goes into the checkpoint and into each call.
const LONGEST_ID: usize = 1024;
/// Largest number of devices of a resource. Plugins that share memory list one device per MiB.
const MOST_DEVICES: usize = 1 << 17;
/// Value of `health` of a healthy device.
const HEALTHY: &str = "Healthy";

impl Shared {
    /// Follows the lists of a plugin until its registration ends.
    pub(super) async fn follow(&self, resource: &str, plugin: &DevicePlugin) {
        let lists = async {
            let mut lists = plugin.lists().await?;
            while let Some(list) = lists.message().await.map_err(CallError::from)? {
                if !self.listed(resource, plugin.number, list) {
                    break;
                }
                self.persist_or_log().await;
            }
            Ok::<(), CallError>(())
        };
        // A list that is dropped belongs to a registration that has ended.
        let end = tokio::select! {
            end = lists => end,
            () = plugin.ended.cancelled() => Ok(()),
        };
        let error = end.err().map(|error| format!("ListAndWatch ended: {error}"));
        self.ended(resource, plugin.number, error);
    }

    /// Takes over a list. Returns false if the registration is no longer the current one.
    fn listed(&self, resource: &str, number: RegistrationNumber, list: ListAndWatchResponse) -> bool {
        let (devices, problem) = usable_devices(list);
        let (all, healthy) = (devices.len(), devices.values().filter(|device| device.is_healthy).count());
        let Some(pods) = self.state.lock().inventory.list(resource, number, devices) else { return false };
        tracing::info!(resource, devices = all, healthy, "device plugin listed its devices");
        if let Some(problem) = problem {
            self.failed(resource, &problem);
        }
        self.changed();
        self.wake(pods);
        true
    }

    /// Ends a registration, if it is the current one.
    pub(super) fn ended(&self, resource: &str, number: RegistrationNumber, error: Option<String>) {
        {
            let mut state = self.state.lock();
            if !state.inventory.stop(resource, number, self.clock.boot()) {
                return;
            }
            if let Some(plugin) = state.plugins.remove(resource) {
                plugin.ended.cancel();
            }
        }
        if self.stop.is_cancelled() {
            return;
        }
        tracing::warn!(resource, error, "device plugin has stopped");
        if let Some(error) = error {
            self.set_error(resource, error);
        }
        self.stopped.notify_one();
        self.changed();
    }

    /// Publishes the capacity, and wakes the pods that wait.
    pub(super) fn changed(&self) {
        let (capacity, waiting) = {
            let mut state = self.state.lock();
            (state.inventory.capacity(), std::mem::take(&mut state.waiting))
        };
        self.capacity.send_if_modified(|current| {
            let is_changed = *current != capacity;
            *current = capacity;
            is_changed
        });
        for uid in waiting {
            self.wakeups.wake(&uid);
        }
    }

    /// Wakes the pods that hold devices.
    pub(super) fn wake_holders(&self) {
        let holders: Vec<String> = self.state.lock().inventory.held().pods().map(str::to_owned).collect();
        self.wake(holders);
    }

    fn wake(&self, pods: impl IntoIterator<Item = String>) {
        for uid in pods.into_iter().filter_map(|pod| PodUid::parse(&pod).ok()) {
            self.wakeups.wake(&uid);
        }
    }

    pub(super) fn failed(&self, resource: &str, error: &str) {
        tracing::warn!(resource, error, "device plugin failed");
        self.set_error(resource, error.to_owned());
    }

    fn set_error(&self, resource: &str, error: String) {
        let mut state = self.state.lock();
        if state.errors.contains_key(resource) || state.errors.len() < MOST_RESOURCES {
            state.errors.insert(resource.to_owned(), error);
        }
    }

    pub(super) fn call_failed(
        &self,
        resource: &str,
        error: CallError,
        reason: impl FnOnce(CallError) -> DeviceError,
    ) -> DeviceError {
        self.failed(resource, &error.to_string());
        reason(error)
    }
}

/// Returns the devices of a list that can be used, and the first problem. The last of two devices with one ID
/// counts.
fn usable_devices(list: ListAndWatchResponse) -> (BTreeMap<DeviceId, Device>, Option<String>) {
    let mut devices = BTreeMap::new();
    let mut problem = None;
    for device in list.devices {
        let length = device.id.len();
        if length == 0 || length > LONGEST_ID {
            problem.get_or_insert_with(|| format!("a device with an ID of {length} bytes is ignored"));
            continue;
        }
        if devices.len() >= MOST_DEVICES {
            problem.get_or_insert_with(|| format!("devices after the first {MOST_DEVICES} are ignored"));
            break;
        }
        let nodes = device.topology.into_iter().flat_map(|topology| topology.nodes);
        let is_healthy = device.health == HEALTHY;
        let numa_nodes = nodes.map(|node| node.id).collect();
        devices.insert(DeviceId::from(device.id), Device { is_healthy, numa_nodes });
    }
    (devices, problem)
}
