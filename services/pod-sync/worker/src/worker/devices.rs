//! Gives a pod its devices before its sandbox.

use std::time::Duration;

use pod_sync_clients::EventType;
use pod_sync_decisions::waiting::Waiting;
use pod_sync_devices::{DeviceAdmission, DeviceError, may_need_devices, resource_names};
use pod_sync_node_decisions::admission::Rejection;
use quintlet_model::runtime::{ContainerState, PodRuntime, SandboxState};
use tokio_util::sync::CancellationToken;

use super::halt::Halt;
use super::pass::Pass;
use super::tracker::Tracker;
use crate::context::WorkerContext;

/// The devices of the pod, as far as its worker follows them.
#[derive(Debug, Default)]
pub(super) struct DeviceProgress {
    // The containers hold all devices that they request.
    is_admitted: bool,
    // The wait for a plugin was reported.
    is_reported: bool,
    /// The reason for the rejection of the pod.
    pub(super) rejected: Option<Rejection>,
}

/// The admission of a pod by its devices.
#[derive(Debug)]
pub(super) enum DevicesDecision {
    /// The pod holds its devices, or requests none.
    Held,
    /// The pod waits for a plugin, at most for this time.
    Wait(Duration),
    /// The node rejects the pod.
    Reject(Rejection),
}

impl DeviceProgress {
    /// Gives the containers of the pod their devices, once. A pod that runs keeps its devices whatever their plugins report.
    ///
    /// # Errors
    /// The pass is cancelled, or the devices of a pod that runs cannot be completed.
    pub(super) async fn admit(
        &mut self,
        ctx: &WorkerContext,
        tracker: &mut Tracker,
        pass: &Pass,
        cancel: &CancellationToken,
    ) -> Result<DevicesDecision, Halt> {
        if self.is_admitted || !may_need_devices(&pass.pod) {
            return Ok(DevicesDecision::Held);
        }
        let is_running = runs(&pass.runtime);
        let resource = resource_names(&pass.pod).into_iter().collect::<Vec<_>>().join(", ");
        tracker.view.meanwhile(Waiting::Devices { resource: resource.clone() });
        let devices = &ctx.environment.devices;
        match devices.admit(&tracker.pod_ref.uid, &pass.pod, is_running, cancel).await {
            Ok(DeviceAdmission::Admitted) => {
                self.is_admitted = true;
                Ok(DevicesDecision::Held)
            }
            Ok(DeviceAdmission::Waiting { resource, until }) => {
                if !std::mem::replace(&mut self.is_reported, true) {
                    let text = format!("Waiting for the device plugin of {resource} to register");
                    let events = &ctx.reporting.events;
                    events.pod(&pass.pod, EventType::Normal, "WaitingForDevicePlugin", &text, "");
                }
                tracker.view.wait_for(Waiting::Devices { resource }, Some(until));
                Ok(DevicesDecision::Wait(until.saturating_sub(ctx.clock.boot())))
            }
            Ok(DeviceAdmission::Cancelled) => Err(Halt::Cancelled),
            Err(error) if is_running => Err(Halt::failed(Waiting::Devices { resource }, error)),
            Err(error) => {
                let rejection = rejection(&error);
                ctx.reporting.metrics.pod_rejected(&rejection.reason);
                self.rejected = Some(rejection.clone());
                Ok(DevicesDecision::Reject(rejection))
            }
        }
    }
}

/// Returns whether containers of the pod run, or can run in its sandbox. A machine that has restarted has neither.
fn runs(runtime: &PodRuntime) -> bool {
    runtime.containers.iter().any(|container| container.state == ContainerState::Running)
        || runtime.sandboxes.iter().any(|sandbox| sandbox.state == SandboxState::Ready)
}

/// Returns the rejection for a pod that does not get its devices (`pkg/kubelet/cm/admission: unexpectedAdmissionError`).
fn rejection(error: &DeviceError) -> Rejection {
    Rejection {
        reason: "UnexpectedAdmissionError".to_owned(),
        message: format!("Allocate failed due to {error}, which is unexpected"),
    }
}
