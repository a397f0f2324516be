//! Gives a pod its devices, its CPUs and its memory before its sandbox.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::EventType;
use pod_sync_decisions::status::KillCause;
use pod_sync_decisions::waiting::Waiting;
use pod_sync_devices::{Alignment, DeviceAdmission, DeviceError, may_need_devices};
use pod_sync_node_decisions::admission::Rejection;
use pod_sync_placement::{AdmissionFailure, PlacementError};
use pod_sync_topology::RequestScope;
use quintlet_model::ids::PodUid;
use quintlet_model::runtime::{ContainerState, PodRuntime, SandboxState};
use tokio_util::sync::CancellationToken;

use super::halt::Halt;
use super::pass::Pass;
use super::reject::terminate_rejected;
use super::tracker::Tracker;
use crate::context::{PodEnvironment, WorkerContext};

/// Number of attempts to align the devices of a pod with its CPUs: another pod may get these CPUs while a
/// plugin is called.
const ALIGNMENTS: usize = 3;

/// The devices, the CPUs and the memory of the pod, as far as its worker follows them.
#[derive(Debug, Default)]
pub(super) struct ResourceProgress {
    // The containers hold all that they request.
    is_admitted: bool,
    // The wait for a plugin was reported.
    is_reported: bool,
    /// The reason for the rejection of the pod.
    pub(super) rejected: Option<Rejection>,
}

/// The admission of a pod by its resources.
#[derive(Debug)]
pub(super) enum ResourceDecision {
    /// The pod holds what it requests.
    Held,
    /// The pod waits for a plugin, at most for this time.
    Wait(Duration),
    /// The node rejects the pod, which has nothing on it.
    Reject(Rejection),
}

/// The end of one attempt.
enum Attempt {
    Held,
    Waits { resource: String, until: Duration },
    Rejected { cause: KillCause, message: String },
}

impl ResourceProgress {
    /// Gives the containers of the pod what they request, once. A pod that runs was admitted, and keeps its
    /// devices whatever their plugins report, and its CPUs.
    ///
    /// # Errors
    /// The pass is cancelled: the pod ends, or it is rejected and has containers or a sandbox from before a
    /// restart of the machine. Or the assignments cannot be recorded.
    pub(super) async fn admit(
        &mut self,
        ctx: &WorkerContext,
        tracker: &mut Tracker,
        pass: &Pass,
        cancel: &CancellationToken,
    ) -> Result<ResourceDecision, Halt> {
        if self.is_admitted {
            return Ok(ResourceDecision::Held);
        }
        let (uid, pod) = (tracker.pod_ref.uid.clone(), &pass.pod);
        let environment = &ctx.environment;
        if runs(&pass.runtime) {
            environment.placement.keep(pod, &device_hints(environment, &uid, pod)).await;
            self.is_admitted = true;
            return Ok(ResourceDecision::Held);
        }
        if let Some(plugins) = environment.devices.describe_plugins(pod) {
            tracker.view.meanwhile(Waiting::Devices { plugins });
        }
        match attempt(environment, &uid, pod, cancel).await? {
            Attempt::Held => {
                tracker.report_plugin_wait(None);
                self.is_admitted = true;
                Ok(ResourceDecision::Held)
            }
            Attempt::Waits { resource, until } => {
                let text = format!("Waiting for the device plugin of {resource} to register");
                if !std::mem::replace(&mut self.is_reported, true) {
                    let events = &ctx.reporting.events;
                    events.pod(pod, EventType::Normal, "WaitingForDevicePlugin", &text, "");
                }
                tracker.report_plugin_wait(Some(text));
                let plugins = environment.devices.describe_plugins(pod).unwrap_or(resource);
                tracker.view.wait_for(Waiting::Devices { plugins }, Some(until));
                Ok(ResourceDecision::Wait(until.saturating_sub(ctx.clock.boot())))
            }
            Attempt::Rejected { cause, message } => {
                tracker.report_plugin_wait(None);
                let rejection = Rejection { reason: cause.reason().to_owned(), message };
                ctx.reporting.metrics.pod_rejected(&rejection.reason);
                self.rejected = Some(rejection.clone());
                if pass.runtime.sandboxes.is_empty() && pass.runtime.containers.is_empty() {
                    // An attempt before a restart, or one that was not recorded, may have assigned some. No
                    // termination follows.
                    environment.placement.release(&uid).await;
                    return Ok(ResourceDecision::Reject(rejection));
                }
                let (reporting, control) = (&ctx.reporting, &ctx.control);
                Err(terminate_rejected(reporting, control, tracker, pod, cause, &rejection.message))
            }
        }
    }
}

/// Gives a pod its devices, then its CPUs and memory on their NUMA nodes.
async fn attempt(
    environment: &PodEnvironment,
    uid: &PodUid,
    pod: &Pod,
    cancel: &CancellationToken,
) -> Result<Attempt, Halt> {
    let PodEnvironment { devices, placement, .. } = environment;
    let hints = device_hints(environment, uid, pod);
    let nodes = |container: &str| placement.nodes_for_devices(pod, container, &hints);
    let alignment: Option<Alignment<'_>> = if placement.aligns_devices() { Some(&nodes) } else { None };
    let has_devices = may_need_devices(pod);
    let mut left = ALIGNMENTS;
    loop {
        match devices.admit(uid, pod, alignment, cancel).await {
            Ok(DeviceAdmission::Admitted) => {}
            Ok(DeviceAdmission::Waiting { resource, until }) => {
                return Ok(Attempt::Waits { resource, until });
            }
            Ok(DeviceAdmission::Cancelled) => return Err(Halt::Cancelled),
            Err(error) => return Ok(rejected(&error)),
        }
        let error = match placement.admit(pod, &hints).await {
            Ok(()) => return Ok(Attempt::Held),
            Err(AdmissionFailure::Rejected(error)) => error,
            Err(error @ AdmissionFailure::State(_)) => {
                let error = quintlet_kit::error_chain(&error);
                return Err(Halt::failed(Waiting::Placement { error: error.clone() }, error));
            }
        };
        if has_devices {
            devices.release(uid).await;
        }
        left = left.saturating_sub(1);
        if !has_devices || left == 0 || !matches!(error, PlacementError::Topology(_)) {
            return Ok(Attempt::Rejected { cause: error.cause(), message: error.message() });
        }
    }
}

/// Returns the hints for the devices of a pod.
fn device_hints(
    environment: &PodEnvironment,
    uid: &PodUid,
    pod: &Pod,
) -> impl Fn(RequestScope<'_>) -> Vec<pod_sync_topology::Hints> + Send + Sync {
    let (devices, machine) = (&environment.devices, environment.placement.numa_nodes());
    move |scope| devices.hints(uid, pod, scope, machine)
}

/// Returns whether containers of the pod run, or can run in its sandbox. A machine that has restarted has
/// neither.
pub(super) fn runs(runtime: &PodRuntime) -> bool {
    runtime.containers.iter().any(|container| container.state == ContainerState::Running)
        || runtime.sandboxes.iter().any(|sandbox| sandbox.state == SandboxState::Ready)
}

/// Returns the rejection for a pod that does not get its devices
/// (`pkg/kubelet/cm/admission: GetPodAdmitResult`).
fn rejected(error: &DeviceError) -> Attempt {
    match error {
        DeviceError::Topology(error) => {
            Attempt::Rejected { cause: KillCause::TopologyAffinity, message: error.to_string() }
        }
        other => Attempt::Rejected {
            cause: KillCause::UnexpectedAdmission,
            message: format!("Allocate failed due to {other}, which is unexpected"),
        },
    }
}
