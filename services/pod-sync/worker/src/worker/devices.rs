//! Gives a pod its devices before its sandbox.

use std::time::Duration;

use pod_sync_clients::EventType;
use pod_sync_decisions::status::{KillCause, UNEXPECTED_ADMISSION};
use pod_sync_decisions::waiting::Waiting;
use pod_sync_devices::{DeviceAdmission, DeviceError, may_need_devices};
use pod_sync_node_decisions::admission::Rejection;
use quintlet_model::runtime::{ContainerState, PodRuntime, SandboxState};
use tokio_util::sync::CancellationToken;

use super::halt::Halt;
use super::pass::Pass;
use super::reject::terminate_rejected;
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
    /// The node rejects the pod, which has nothing on it.
    Reject(Rejection),
}

impl DeviceProgress {
    /// Gives the containers of the pod their devices, once. A pod that runs was admitted, and keeps its devices whatever their plugins
    /// report.
    ///
    /// # Errors
    /// The pass is cancelled: the pod ends, or it is rejected and has containers or a sandbox from before a restart of the machine.
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
        if runs(&pass.runtime) {
            self.is_admitted = true;
            return Ok(DevicesDecision::Held);
        }
        let devices = &ctx.environment.devices;
        if let Some(plugins) = devices.describe_plugins(&pass.pod) {
            tracker.view.meanwhile(Waiting::Devices { plugins });
        }
        match devices.admit(&tracker.pod_ref.uid, &pass.pod, cancel).await {
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
                let plugins = devices.describe_plugins(&pass.pod).unwrap_or(resource);
                tracker.view.wait_for(Waiting::Devices { plugins }, Some(until));
                Ok(DevicesDecision::Wait(until.saturating_sub(ctx.clock.boot())))
            }
            Ok(DeviceAdmission::Cancelled) => Err(Halt::Cancelled),
            Err(error) => {
                let rejection = rejection(&error);
                ctx.reporting.metrics.pod_rejected(&rejection.reason);
                self.rejected = Some(rejection.clone());
                if pass.runtime.sandboxes.is_empty() && pass.runtime.containers.is_empty() {
                    return Ok(DevicesDecision::Reject(rejection));
                }
                let (reporting, control) = (&ctx.reporting, &ctx.control);
                let cause = KillCause::UnexpectedAdmission;
                Err(terminate_rejected(reporting, control, tracker, &pass.pod, cause, &rejection.message))
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
        reason: UNEXPECTED_ADMISSION.to_owned(),
        message: format!("Allocate failed due to {error}, which is unexpected"),
    }
}
