//! The allocation of devices to the containers of a pod, with the calls of plugins that it needs.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_machine::NumaNodes;
use pod_sync_plugins::call::CallError;
use prost::Message as _;
use quintlet_model::ids::PodUid;
use tokio_util::sync::CancellationToken;

use super::{Alignment, DeviceAdmission, Devices, Shared};
use crate::device::DeviceIds;
use crate::error::DeviceError;
use crate::inventory::{DeviceDecision, DeviceRequest, PreStartNeed, Reservation};
use crate::plugin::{CallEnd, DevicePlugin};
use crate::requests::{ContainerRequest, requests, resource_names};
use crate::select::Preference;

/// The allocation of the devices of one container.
#[derive(Clone, Copy)]
struct ContainerAllocation<'a> {
    uid: &'a PodUid,
    all: &'a [ContainerRequest],
    request: &'a ContainerRequest,
    // The pod was admitted.
    is_admitted: bool,
    nodes: Option<NumaNodes>,
}

/// The next call for a request.
enum NextCall<'a> {
    None,
    Wait(Duration),
    Prefer(Arc<DevicePlugin>, crate::select::PreferenceQuery),
    Allocate(Arc<DevicePlugin>, DeviceIds, Reserved<'a>),
}

/// The end of the allocation for one container and resource.
enum AllocationEnd {
    // True if the container has new devices.
    Held(bool),
    Waits(Duration),
    Cancelled,
}

/// Devices that are reserved until they are given to a container. Dropping frees them.
struct Reserved<'a> {
    shared: &'a Shared,
    reservation: Option<Reservation>,
}

impl Reserved<'_> {
    fn commit(mut self, uid: &PodUid, container: &str, response: Vec<u8>) {
        if let Some(reservation) = self.reservation.take() {
            self.shared.state.lock().inventory.commit(reservation, uid.as_str(), container, response);
        }
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        if let Some(reservation) = self.reservation.take() {
            self.shared.state.lock().inventory.cancel(reservation);
        }
    }
}

impl Devices {
    /// Returns the first resource of a pod whose plugin is away. The pod is woken when that changes.
    pub(super) fn awaits_plugin(&self, uid: &PodUid, pod: &Pod) -> Option<(String, Duration)> {
        let now = self.shared.clock.boot();
        let mut state = self.shared.state.lock();
        let awaited = resource_names(pod)
            .into_iter()
            .find_map(|resource| Some((state.inventory.awaited(&resource, now)?, resource)));
        let (until, resource) = awaited?;
        state.waiting.insert(uid.clone());
        Some((resource, until))
    }

    /// Allocates for all containers of a pod that is admitted, or for one container of a pod that was
    /// admitted.
    pub(super) async fn allocate_all(
        &self,
        uid: &PodUid,
        pod: &Pod,
        alignment: Option<Alignment<'_>>,
        only: Option<&str>,
        cancel: &CancellationToken,
    ) -> Result<DeviceAdmission, DeviceError> {
        let all = requests(pod);
        let is_admitted = only.is_some();
        let mut is_changed = false;
        let mut end = Ok(DeviceAdmission::Admitted);
        'containers: for request in all.iter().filter(|r| only.is_none_or(|only| r.name == only)) {
            let container = ContainerAllocation { uid, all: &all, request, is_admitted, nodes: None };
            let container = match alignment.filter(|_| !request.resources.is_empty()) {
                None => container,
                Some(nodes) => match nodes(&request.name) {
                    Ok(nodes) => ContainerAllocation { nodes, ..container },
                    Err(error) => {
                        end = Err(error.into());
                        break 'containers;
                    }
                },
            };
            for (resource, required) in &request.resources {
                match self.allocate(container, resource, *required, cancel).await {
                    Ok(AllocationEnd::Held(is_new)) => is_changed |= is_new,
                    Ok(AllocationEnd::Waits(until)) => {
                        end = Ok(DeviceAdmission::Waiting { resource: resource.clone(), until });
                        break 'containers;
                    }
                    Ok(AllocationEnd::Cancelled) => {
                        end = Ok(DeviceAdmission::Cancelled);
                        break 'containers;
                    }
                    Err(error) => {
                        end = Err(error);
                        break 'containers;
                    }
                }
            }
        }
        if is_changed {
            self.shared.persist().await.map_err(|error| DeviceError::Checkpoint(error.to_string()))?;
        }
        end
    }

    async fn allocate(
        &self,
        container: ContainerAllocation<'_>,
        resource: &str,
        required: usize,
        cancel: &CancellationToken,
    ) -> Result<AllocationEnd, DeviceError> {
        let mut preferred: Option<DeviceIds> = None;
        let (uid, name) = (container.uid, container.request.name.as_str());
        loop {
            let next = self.next_call(container, resource, required, preferred.as_ref())?;
            match next {
                NextCall::None => return Ok(AllocationEnd::Held(false)),
                NextCall::Wait(until) => return Ok(AllocationEnd::Waits(until)),
                NextCall::Prefer(plugin, query) => match plugin.prefer(query, cancel).await {
                    CallEnd::Answered(ids) => preferred = Some(ids),
                    CallEnd::Failed(error) => {
                        return Err(self.shared.call_failed(resource, error, DeviceError::Preference));
                    }
                    CallEnd::PluginEnded => {}
                    CallEnd::Cancelled => return Ok(AllocationEnd::Cancelled),
                },
                NextCall::Allocate(plugin, ids, reserved) => {
                    let began = self.shared.clock.boot();
                    let answer = plugin.allocate(&ids, cancel).await;
                    let took = self.shared.clock.boot().saturating_sub(began);
                    self.shared.metrics.allocated(resource, took);
                    match answer {
                        CallEnd::Answered(Some(response)) => {
                            reserved.commit(uid, name, response.encode_to_vec());
                            return Ok(AllocationEnd::Held(true));
                        }
                        CallEnd::Answered(None) => {
                            return Err(DeviceError::NoResponse(resource.to_owned()));
                        }
                        CallEnd::Failed(error) => {
                            return Err(self.shared.call_failed(resource, error, DeviceError::Allocate));
                        }
                        // The plugin may register again: the pod waits, or gets devices of the next
                        // registration.
                        CallEnd::PluginEnded => {}
                        CallEnd::Cancelled => return Ok(AllocationEnd::Cancelled),
                    }
                }
            }
        }
    }

    // Decides, and reserves the devices in the same moment.
    fn next_call(
        &self,
        allocation: ContainerAllocation<'_>,
        resource: &str,
        required: usize,
        preferred: Option<&DeviceIds>,
    ) -> Result<NextCall<'_>, DeviceError> {
        let mut state = self.shared.state.lock();
        let state = &mut *state;
        let ContainerAllocation { uid, all, request, is_admitted, nodes } = allocation;
        let (pod, container) = (uid.as_str(), request.name.as_str());
        let reusable = state.inventory.held().reusable(pod, all, container, resource);
        let request =
            DeviceRequest { pod, container, resource, required, reusable: &reusable, is_admitted, nodes };
        let preference = preferred.map_or(Preference::Open, Preference::Known);
        let decision = state.inventory.decide(&request, preference, self.shared.clock.boot())?;
        let plugin = |number| {
            let plugin = state.plugins.get(resource).filter(|plugin| plugin.number == number);
            plugin.map(Arc::clone).ok_or_else(|| DeviceError::Stopped(resource.to_owned()))
        };
        match decision {
            DeviceDecision::Nothing => Ok(NextCall::None),
            DeviceDecision::Wait { until } => {
                state.waiting.insert(uid.clone());
                Ok(NextCall::Wait(until))
            }
            DeviceDecision::Query(number, query) => Ok(NextCall::Prefer(plugin(number)?, query)),
            DeviceDecision::Allocate(number, ids) => {
                let plugin = plugin(number)?;
                let reservation = Some(state.inventory.reserve(resource, ids.clone()));
                Ok(NextCall::Allocate(plugin, ids, Reserved { shared: &self.shared, reservation }))
            }
        }
    }

    pub(super) async fn pre_start(
        &self,
        uid: &PodUid,
        container: &str,
        resource: &str,
        cancel: &CancellationToken,
    ) -> Result<(), DeviceError> {
        let (plugin, ids) = {
            let state = self.shared.state.lock();
            let stopped = || DeviceError::Stopped(resource.to_owned());
            match state.inventory.pre_start(resource) {
                PreStartNeed::None => return Ok(()),
                PreStartNeed::PluginAway => return Err(DeviceError::PreStart(stopped().to_string())),
                PreStartNeed::Call => {}
            }
            let held = state.inventory.held().held(uid.as_str(), container, resource);
            let ids = held.ok_or_else(|| DeviceError::NotHeld {
                pod: uid.to_string(),
                container: container.to_owned(),
                resource: resource.to_owned(),
            })?;
            let plugin = state.plugins.get(resource).map(Arc::clone);
            (plugin.ok_or_else(stopped)?, ids)
        };
        match plugin.pre_start(&ids, cancel).await {
            CallEnd::Answered(()) => Ok(()),
            CallEnd::Failed(error) => {
                let failed = |error: CallError| DeviceError::PreStart(error.to_string());
                Err(self.shared.call_failed(resource, error, failed))
            }
            CallEnd::PluginEnded => {
                Err(DeviceError::PreStart(DeviceError::Stopped(resource.to_owned()).to_string()))
            }
            CallEnd::Cancelled => Err(DeviceError::PreStart("the pod is ending".to_owned())),
        }
    }
}
