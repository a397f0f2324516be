//! Computes container statuses from runtime state and the previous status
//! (`pkg/kubelet: convertToAPIContainerStatuses`).

use std::collections::{BTreeMap, HashMap};

use k8s_openapi::api::core::v1::{
    Container as SpecContainer, ContainerState, ContainerStateRunning, ContainerStateTerminated,
    ContainerStateWaiting, ContainerStatus, ContainerUser, EphemeralContainer, LinuxContainerUser, Pod,
    ResourceRequirements, VolumeMountStatus,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use quintlet_kit::failpoint;
use quintlet_model::ids::ContainerId;
use quintlet_model::pod;
use quintlet_model::probe::{ProbeResult, ProbeType};
use quintlet_model::runtime::{Container, ContainerState as RuntimeState, PodRuntime};

use super::probes::ProbeResults;
use super::qos;
use super::quantity::{Format, Quantity};
use super::resize::allocation::PodResources;
use super::restart::{
    RESTARTING_ALL, container_should_restart, init_exit_code, init_has_completed,
    should_container_be_restarted,
};

/// Waiting reason of a container that has not been started.
pub const CONTAINER_CREATING: &str = "ContainerCreating";
/// Waiting reason of the same in a pod with init containers.
pub const POD_INITIALIZING: &str = "PodInitializing";
/// Reason of a terminated state that was not observed.
pub const STATUS_UNKNOWN: &str = "ContainerStatusUnknown";
/// Exit code of a terminated state that was not observed.
pub const UNKNOWN_EXIT_CODE: i32 = 137;

/// Message of a terminated state that was not observed, for a pod that has terminated.
pub const LOST_WHEN_TERMINATED: &str = "The container could not be located when the pod was terminated";
// The two spaces are the kubelet's; tools match on the text.
const LOST_WHEN_DELETED: &str =
    "The container could not be located when the pod was deleted.  The container used to be Running";
const REMOVED_TO_RESTART: &str = "The container is removed because RestartAllContainers in place";
const LOST_INIT: &str = "Unable to get init container status from container runtime and pod has been initialized, treat it as exited normally";

/// Reason why a container is waiting, from the last attempt to start it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct WaitingReason {
    /// For example `CrashLoopBackOff` or `ErrImagePull`.
    pub reason: String,
    /// Description of the failure, cut to the length that a status may have.
    pub message: String,
}

/// The part of [`super::status::StatusInput`] that the conversion reads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) runtime: &'a PodRuntime,
    pub(crate) probes: &'a ProbeResults,
    pub(crate) waiting: &'a BTreeMap<String, WaitingReason>,
    pub(crate) termination_messages: &'a HashMap<ContainerId, String>,
    pub(crate) runtime_name: &'a str,
    pub(crate) recursive_read_only: bool,
    /// Whether a status has the stop signal that the runtime reports.
    pub(crate) stop_signals: bool,
    /// Whether all containers are being restarted.
    pub(crate) restarting_all: bool,
    /// Resources last sent to the runtime; `None` if there is no record.
    pub(crate) actuated: Option<&'a PodResources>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum List {
    Init,
    Regular,
    Ephemeral,
}

/// Returns the fields that an ephemeral container shares with a container.
#[must_use]
pub fn from_ephemeral(c: &EphemeralContainer) -> SpecContainer {
    SpecContainer {
        name: c.name.clone(),
        image: c.image.clone(),
        resources: c.resources.clone(),
        volume_mounts: c.volume_mounts.clone(),
        ..SpecContainer::default()
    }
}

/// Returns a container ID of a status without its scheme, such as `containerd://`.
#[must_use]
pub fn bare_id(container_id: Option<&str>) -> &str {
    let text = container_id.unwrap_or_default();
    text.split_once("://").map_or(text, |(_, id)| id)
}

fn waiting(reason: &str, message: &str) -> ContainerState {
    ContainerState {
        waiting: Some(ContainerStateWaiting { reason: some(reason), message: some(message) }),
        ..ContainerState::default()
    }
}

/// Returns a terminated state for a container whose end was not observed.
#[must_use]
pub fn forced(reason: &str, message: &str, exit_code: i32) -> ContainerState {
    ContainerState {
        terminated: Some(ContainerStateTerminated {
            reason: some(reason),
            message: some(message),
            exit_code,
            ..ContainerStateTerminated::default()
        }),
        ..ContainerState::default()
    }
}

fn some(text: &str) -> Option<String> {
    Some(text.to_owned()).filter(|t| !t.is_empty())
}

fn time(unix_ns: i64) -> Option<Time> {
    if unix_ns == 0 { None } else { time_of(unix_ns) }
}

fn time_of(unix_ns: i64) -> Option<Time> {
    jiff::Timestamp::from_nanosecond(i128::from(unix_ns)).ok().map(Time)
}

fn is_running(s: &ContainerStatus) -> bool {
    s.state.as_ref().is_some_and(|s| s.running.is_some())
}

fn terminated(s: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    s.state.as_ref()?.terminated.as_ref()
}

fn last_terminated(s: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    s.last_state.as_ref()?.terminated.as_ref()
}

fn is_waiting(s: &ContainerStatus) -> bool {
    s.state.as_ref().is_none_or(|s| s.running.is_none() && s.terminated.is_none())
}

/// Returns the statuses of one list of containers of the spec, in its order.
pub(crate) fn convert(
    context: &Context<'_>,
    list: List,
    containers: &[SpecContainer],
    old: &[ContainerStatus],
) -> Vec<ContainerStatus> {
    containers
        .iter()
        .map(|c| {
            let old = old.iter().find(|s| s.name == c.name);
            let mut status = one(context, list, c, old);
            started_and_ready(context, list, c, old, &mut status);
            status
        })
        .collect()
}

fn one(
    context: &Context<'_>,
    list: List,
    container: &SpecContainer,
    old: Option<&ContainerStatus>,
) -> ContainerStatus {
    let mut instances = context.runtime.instances(&container.name);
    let mut status = match instances.next() {
        None => without_instance(context, container, old),
        Some(newest) => {
            let mut status = from_instance(context, container, newest, old);
            if let Some(previous) = instances.next() {
                let state = state_of(context, previous, None);
                // Only a terminated state becomes lastState: a running instance belongs to a sandbox that is
                // about to be removed.
                if state.terminated.is_some() {
                    status.last_state = Some(state);
                }
            }
            status
        }
    };
    let newest = context.runtime.newest(&container.name);
    let mut is_restarted = should_container_be_restarted(container, context.pod, context.runtime);
    if list == List::Init {
        if let Some(exited) = newest.filter(|c| c.state == RuntimeState::Exited) {
            let code = init_exit_code(exited.exit_code, &exited.reason);
            if code == 0 {
                return status;
            }
            is_restarted = context.pod.metadata.deletion_timestamp.is_none()
                && container_should_restart(container, context.pod, code);
        }
        if newest.is_none()
            && !pod::is_sidecar(container)
            && is_waiting(&status)
            && super::actions::any_regular_created(context.pod, context.runtime)
        {
            status.state = Some(forced("Completed", LOST_INIT, 0));
            return status;
        }
    }
    if let Some(why) = context.waiting.get(&container.name).filter(|_| is_restarted) {
        if terminated(&status).is_some() {
            status.last_state = status.state.take();
        }
        status.state = Some(waiting(&why.reason, &why.message));
    }
    status
}

fn without_instance(
    context: &Context<'_>,
    container: &SpecContainer,
    old: Option<&ContainerStatus>,
) -> ContainerStatus {
    let mut status = ContainerStatus {
        name: container.name.clone(),
        image: container.image.clone().unwrap_or_default(),
        state: Some(waiting(default_reason(context.pod), "")),
        volume_mounts: volume_mounts(context, container),
        ..ContainerStatus::default()
    };
    let Some(old) = old else { return status };
    if context.restarting_all && !is_waiting(old) {
        status.restart_count = old.restart_count.saturating_add(1);
        status.state = Some(waiting(RESTARTING_ALL, REMOVED_TO_RESTART));
        status.last_state = Some(forced(RESTARTING_ALL, REMOVED_TO_RESTART, UNKNOWN_EXIT_CODE));
        return status;
    }
    if terminated(old).is_some() {
        return old.clone();
    }
    status.restart_count = old.restart_count;
    status.last_state = old.last_state.clone();
    if is_running(old) && last_terminated(&status).is_none() {
        // The container counts as terminated instead of never started, so the pod does not fall back to
        // Pending.
        status.last_state = Some(forced(STATUS_UNKNOWN, LOST_WHEN_DELETED, UNKNOWN_EXIT_CODE));
        if context.pod.metadata.deletion_timestamp.is_none() {
            status.restart_count = status.restart_count.saturating_add(1);
        }
    }
    status
}

fn default_reason(pod: &Pod) -> &'static str {
    if pod::init_containers(pod).is_empty() { CONTAINER_CREATING } else { POD_INITIALIZING }
}

fn state_of(context: &Context<'_>, instance: &Container, old: Option<&ContainerStatus>) -> ContainerState {
    match instance.state {
        RuntimeState::Running => ContainerState {
            running: Some(ContainerStateRunning { started_at: time(instance.started_unix_ns) }),
            ..ContainerState::default()
        },
        RuntimeState::Created => waiting("", ""),
        RuntimeState::Exited => {
            let mut message = instance.message.clone();
            if let Some(own) = context.termination_messages.get(&instance.id).filter(|m| !m.is_empty()) {
                if !message.is_empty() {
                    message.push_str(": ");
                }
                message.push_str(own);
            }
            ContainerState {
                terminated: Some(ContainerStateTerminated {
                    exit_code: instance.exit_code,
                    reason: some(&instance.reason),
                    message: some(&message),
                    // An instance that never ran has the epoch here instead of nothing: clients expect a
                    // time.
                    started_at: time_of(instance.started_unix_ns),
                    finished_at: time_of(instance.finished_unix_ns),
                    container_id: Some(full_id(context, instance)),
                    signal: None,
                }),
                ..ContainerState::default()
            }
        }
        // The state stays terminated once it was forced: the runtime still does not know this instance.
        RuntimeState::Unknown
            if old.is_some_and(|o| {
                terminated(o).is_some() && bare_id(o.container_id.as_deref()) == instance.id.as_str()
            }) =>
        {
            old.and_then(|o| o.state.clone()).unwrap_or_default()
        }
        RuntimeState::Unknown if old.is_some_and(is_running) => {
            let reason = if context.restarting_all { RESTARTING_ALL } else { STATUS_UNKNOWN };
            forced(reason, LOST_WHEN_TERMINATED, UNKNOWN_EXIT_CODE)
        }
        RuntimeState::Unknown => waiting("", ""),
    }
}

fn full_id(context: &Context<'_>, instance: &Container) -> String {
    format!("{}://{}", context.runtime_name, instance.id)
}

fn from_instance(
    context: &Context<'_>,
    container: &SpecContainer,
    instance: &Container,
    old: Option<&ContainerStatus>,
) -> ContainerStatus {
    let state = state_of(context, instance, old);
    let mut status = ContainerStatus {
        name: instance.name.clone(),
        image: instance.image.clone(),
        image_id: instance.image_ref.clone(),
        container_id: Some(full_id(context, instance)),
        restart_count: i32::try_from(instance.restart_count()).unwrap_or(i32::MAX),
        volume_mounts: old
            .and_then(|o| o.volume_mounts.clone())
            .or_else(|| volume_mounts(context, container)),
        state: Some(state),
        user: instance.user.as_ref().map(|u| ContainerUser {
            linux: Some(LinuxContainerUser {
                uid: u.uid,
                gid: u.gid,
                supplemental_groups: Some(u.supplemental_groups.clone()).filter(|g| !g.is_empty()),
            }),
        }),
        stop_signal: some(&instance.stop_signal).filter(|_| context.stop_signals),
        ..ContainerStatus::default()
    };
    if let Some(old) = old {
        let same_instance = bare_id(old.container_id.as_deref()) == instance.id.as_str();
        let came_back = is_running(&status)
            && !same_instance
            && terminated(old).is_some()
            && old.restart_count >= status.restart_count;
        let lost = instance.state == RuntimeState::Unknown && is_running(old);
        status.restart_count = if came_back || lost {
            old.restart_count.saturating_add(1)
        } else {
            status.restart_count.max(old.restart_count)
        };
        let last = match terminated(old) {
            Some(ended) if !same_instance => Some(ended),
            // A waiting reason moves a terminated state to lastState. Once it is the state again, it is not
            // repeated there.
            Some(_) | None => last_terminated(old).filter(|t| {
                instance.state == RuntimeState::Running
                    || bare_id(t.container_id.as_deref()) != instance.id.as_str()
            }),
        };
        status.last_state =
            last.map(|t| ContainerState { terminated: Some(t.clone()), ..ContainerState::default() });
    }
    let given = context.actuated.and_then(|a| a.containers.get(&instance.name));
    resources(container, instance, old, given, &mut status);
    status
}

fn resources(
    container: &SpecContainer,
    instance: &Container,
    old: Option<&ContainerStatus>,
    given: Option<&ResourceRequirements>,
    status: &mut ContainerStatus,
) {
    // A container without resources has an empty object once it has an instance.
    let allocated = container.resources.clone().unwrap_or_default();
    status.allocated_resources = allocated.requests.clone();
    let mut shown =
        ResourceRequirements { claims: None, limits: allocated.limits, requests: allocated.requests };
    if instance.state == RuntimeState::Running {
        let before = old
            .filter(|o| is_running(o) && bare_id(o.container_id.as_deref()) == instance.id.as_str())
            .and_then(|o| o.resources.as_ref());
        let actual = instance.resources.unwrap_or_default();
        let milli = |m: i64| Some(m).filter(|m| *m > 0).map(Quantity::from_milli);
        overlay(
            shown.limits.as_mut(),
            "cpu",
            milli(qos::quota_to_milli(actual.cpu_quota, actual.cpu_period)),
            10,
            before.and_then(|r| r.limits.as_ref()),
        );
        overlay(
            shown.limits.as_mut(),
            "memory",
            Some(actual.memory_limit_bytes)
                .filter(|m| *m > 0)
                .map(|m| Quantity::from_units(m, Format::Binary)),
            0,
            before.and_then(|r| r.limits.as_ref()),
        );
        overlay(
            shown.requests.as_mut(),
            "cpu",
            milli(qos::shares_to_milli(actual.cpu_shares)),
            2,
            before.and_then(|r| r.requests.as_ref()),
        );
        // Runtimes do not report memory requests: before a resize is actuated, the previous request is shown.
        let memory = given.and_then(|g| g.requests.as_ref()?.get("memory"));
        if let (Some(shown), Some(memory)) =
            (shown.requests.as_mut().and_then(|r| r.get_mut("memory")), memory)
        {
            shown.clone_from(memory);
        }
    }
    status.resources = Some(shown);
}

/// Differences of up to `blur` milli-units in either direction are rounding of the runtime.
fn overlay(
    shown: Option<&mut BTreeMap<String, ApiQuantity>>,
    name: &str,
    actual: Option<Quantity>,
    blur: i64,
    before: Option<&BTreeMap<String, ApiQuantity>>,
) {
    let Some(shown) = shown else { return };
    match actual {
        Some(actual) => {
            let allocated = shown.get(name).map(Quantity::of).unwrap_or_default();
            let rounding = actual.milli_value() <= blur && allocated.milli_value() <= blur;
            // An equal amount keeps the spelling of the spec.
            if !rounding && actual != allocated {
                shown.insert(name.to_owned(), actual.to_api());
            }
        }
        None => {
            if let Some(value) = before.and_then(|b| b.get(name)) {
                shown.insert(name.to_owned(), value.clone());
            }
        }
    }
}

fn volume_mounts(context: &Context<'_>, container: &SpecContainer) -> Option<Vec<VolumeMountStatus>> {
    let mounts = container.volume_mounts.as_ref().filter(|m| !m.is_empty())?;
    Some(
        mounts
            .iter()
            .map(|m| {
                let read_only = m.read_only.unwrap_or(false);
                let recursive = match m.recursive_read_only.as_deref() {
                    Some("Enabled" | "IfPossible") if context.recursive_read_only => "Enabled",
                    Some(_) | None => "Disabled",
                };
                VolumeMountStatus {
                    name: m.name.clone(),
                    mount_path: m.mount_path.clone(),
                    read_only: read_only.then_some(true),
                    recursive_read_only: read_only.then(|| recursive.to_owned()),
                    volume_status: None,
                }
            })
            .collect(),
    )
}

/// Sets `started` and `ready` (`pkg/kubelet/prober: UpdatePodStatus`) by container ID, so that nothing
/// carries over from a previous instance.
fn started_and_ready(
    context: &Context<'_>,
    list: List,
    container: &SpecContainer,
    old: Option<&ContainerStatus>,
    status: &mut ContainerStatus,
) {
    if list == List::Ephemeral {
        return;
    }
    let plain_init = list == List::Init && !pod::is_sidecar(container);
    let running = is_running(status);
    let result = |probe| {
        ContainerId::parse(bare_id(status.container_id.as_deref()))
            .ok()
            .and_then(|id| context.probes.get(probe, &id))
    };
    // The previous status of this instance is used if no prober has a result.
    let seed = old.filter(|o| o.container_id.is_some() && o.container_id == status.container_id);
    let started = running
        && match result(ProbeType::Startup) {
            Some(ProbeResult::Unknown) | None
                if container.startup_probe.is_some() && failpoint::planted!("liveness before startup") =>
            {
                old.and_then(|o| o.started) == Some(true)
            }
            Some(result) => result == ProbeResult::Success,
            None => seed.and_then(|o| o.started) == Some(true) || container.startup_probe.is_none(),
        };
    let ready = if plain_init {
        terminated(status).is_some_and(init_has_completed)
    } else {
        started
            && match result(ProbeType::Readiness) {
                Some(result) => result == ProbeResult::Success,
                None => container.readiness_probe.is_none() || seed.is_some_and(|o| o.ready),
            }
    };
    status.started = Some(started);
    status.ready = ready;
}

#[cfg(test)]
#[path = "container_status_tests.rs"]
mod tests;
