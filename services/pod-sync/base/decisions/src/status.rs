//! Computes the API status of a pod (`pkg/kubelet: generateAPIPodStatus`, `pkg/kubelet/status`).
//!
//! [`generate`] builds on the previous status (`old`), so that transition times, start time and restart
//! counts only move forward. status-reporter merges the result with the status in the API server.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateTerminated, ContainerStatus, HostIP, Pod, PodCondition, PodIP,
    PodStatus, ResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use quintlet_model::ids::ContainerId;
use quintlet_model::runtime::PodRuntime;
use quintlet_model::{pod, text};

use super::conditions::{self, condition};
use super::container_status::{
    self as containers, Context, LOST_WHEN_TERMINATED, List, STATUS_UNKNOWN, UNKNOWN_EXIT_CODE,
    WaitingReason, forced, from_ephemeral,
};
use super::phase::{PodPhase, pod_phase};
use super::probes::ProbeResults;
use super::qos;
use super::resize::allocation::{self, PodResources};
use super::restart::{container_should_restart, has_restart_all_rule, init_has_completed};
use super::restart_all::restart_all_triggered;

/// Reason of a pod past its activeDeadlineSeconds.
pub const DEADLINE_EXCEEDED: &str = "DeadlineExceeded";
/// Reason of a pod whose volumes cannot be attached to this node.
pub const ATTACHMENT_LIMIT: &str = "VolumeAttachmentLimitExceeded";
/// Reason of a rejection for which Kubernetes has no other reason
/// (`pkg/kubelet/lifecycle: UnexpectedAdmissionError`).
pub const UNEXPECTED_ADMISSION: &str = "UnexpectedAdmissionError";
/// Message of status and event of the same.
pub const DEADLINE_MESSAGE: &str = "Pod was active on the node longer than the specified deadline";

/// Bytes of termination messages in one status, divided equally among its containers.
const TERMINATION_MESSAGES_MAX: usize = 12 * 1024;

/// Facts about the node that appear in a status.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// Scheme of container IDs: `containerd`, `cri-o`.
    pub runtime_name: String,
    /// Node addresses: the primary one, then the first of the other family. Empty while unknown.
    pub host_ips: Vec<IpAddr>,
    /// The runtime handler of the pod supports recursive read-only mounts.
    pub recursive_read_only: bool,
    /// The feature gate ContainerStopSignals is on.
    pub stop_signals: bool,
}

/// Input of [`generate`].
#[derive(Debug, Clone, Copy)]
pub struct StatusInput<'a> {
    /// The pod with its allocated resources, and with the status of the API server.
    pub pod: &'a Pod,
    /// The previous status; `None`: use the status of the API server.
    pub old: Option<&'a PodStatus>,
    /// State from the newest inspection.
    pub runtime: &'a PodRuntime,
    /// Last results of the pod's probes.
    pub probes: &'a ProbeResults,
    /// Waiting reasons of failed starts, by container name.
    pub waiting: &'a BTreeMap<String, WaitingReason>,
    /// Termination messages of exited instances, from their message file or log.
    pub termination_messages: &'a HashMap<ContainerId, String>,
    /// Resize conditions to include.
    pub resize: &'a [PodCondition],
    /// Resources last sent to the runtime; `None` if there is no record.
    pub actuated: Option<&'a PodResources>,
    /// Addresses and features of the node that appear in a pod's status.
    pub node: &'a NodeFacts,
    /// All containers were stopped for good.
    pub is_terminal: bool,
    /// Wall time.
    pub now: jiff::Timestamp,
    /// Wall time as it would be if the clock had not been set since the pod started.
    pub unstepped: jiff::Timestamp,
}

/// Returns the previous status, else that of the API server, else an empty one.
fn base<'a>(pod: &'a Pod, old: Option<&'a PodStatus>) -> &'a PodStatus {
    static EMPTY: std::sync::LazyLock<PodStatus> = std::sync::LazyLock::new(PodStatus::default);
    old.or(pod.status.as_ref()).unwrap_or(&EMPTY)
}

/// Computes the status. If it would move a terminated container back although nothing restarts it, the
/// previous status is returned unchanged: the runtime contradicts itself.
#[must_use]
pub fn generate(input: &StatusInput<'_>) -> PodStatus {
    let old = base(input.pod, input.old);
    let status = computed(input, old);
    if illegal_transition(input.pod, old, &status) {
        return old.clone();
    }
    finish(input.pod, old, status, input.now)
}

fn computed(input: &StatusInput<'_>, old: &PodStatus) -> PodStatus {
    let pod = input.pod;
    let spec = pod::spec(pod);
    let triggered = restart_all_triggered(pod, input.runtime, old);
    let context = Context {
        pod,
        runtime: input.runtime,
        probes: input.probes,
        waiting: input.waiting,
        termination_messages: input.termination_messages,
        runtime_name: &input.node.runtime_name,
        recursive_read_only: input.node.recursive_read_only,
        stop_signals: input.node.stop_signals,
        restarting_all: triggered,
        actuated: input.actuated,
    };
    let ContainerStatuses { regular, init, ephemeral } = container_statuses(&context, old);
    let is_initialized =
        input.runtime.active_containers().any(|c| spec.containers.iter().any(|s| s.name == c.name));
    let computed = pod_phase(pod, &init, &regular, is_initialized, input.is_terminal);
    let (phase, reason, message) = phase_with_reason(input, old, computed);
    let list = conditions_of(input, old, &init, &regular, phase, triggered);
    let (pod_ip, pod_ips) = addresses(input, old, phase);
    let requests = qos::pod_requests(pod);
    let resources = pod_resources(input, phase, &requests);
    let filled = |l: Vec<ContainerStatus>| Some(l).filter(|l| !l.is_empty());
    PodStatus {
        phase: Some(phase.as_str().to_owned()),
        reason,
        message,
        conditions: Some(list),
        container_statuses: filled(regular),
        init_container_statuses: filled(init),
        ephemeral_container_statuses: filled(ephemeral),
        host_ip: input.node.host_ips.first().map(ToString::to_string),
        host_ips: Some(
            input.node.host_ips.iter().map(|ip| HostIP { ip: ip.to_string() }).collect::<Vec<_>>(),
        )
        .filter(|l| !l.is_empty()),
        pod_ip,
        pod_ips,
        qos_class: Some(qos::qos_class(pod).as_str().to_owned()),
        allocated_resources: non_empty(&requests),
        resources: Some(resources),
        resource_claim_statuses: old.resource_claim_statuses.clone(),
        extended_resource_claim_status: old.extended_resource_claim_status.clone(),
        node_allocatable_resource_claim_statuses: old.node_allocatable_resource_claim_statuses.clone(),
        ..PodStatus::default()
    }
}

struct ContainerStatuses {
    regular: Vec<ContainerStatus>,
    init: Vec<ContainerStatus>,
    ephemeral: Vec<ContainerStatus>,
}

fn container_statuses(context: &Context<'_>, old: &PodStatus) -> ContainerStatuses {
    let spec = pod::spec(context.pod);
    let ephemeral: Vec<_> = spec.ephemeral_containers.iter().flatten().map(from_ephemeral).collect();
    let convert = |list, specs: &[Container], old: Option<&Vec<ContainerStatus>>| {
        containers::convert(context, list, specs, old.map(Vec::as_slice).unwrap_or_default())
    };
    ContainerStatuses {
        regular: convert(List::Regular, &spec.containers, old.container_statuses.as_ref()),
        init: convert(List::Init, pod::init_containers(context.pod), old.init_container_statuses.as_ref()),
        ephemeral: convert(List::Ephemeral, &ephemeral, old.ephemeral_container_statuses.as_ref()),
    }
}

/// Returns phase, reason and message for the phase that follows from the containers. A terminal phase stays,
/// and the deadline of an active pod makes it Failed.
fn phase_with_reason(
    input: &StatusInput<'_>,
    old: &PodStatus,
    computed: PodPhase,
) -> (PodPhase, Option<String>, Option<String>) {
    let api = input.pod.status.as_ref();
    let api_phase = api.and_then(|s| PodPhase::parse(s.phase.as_deref())).filter(|p| p.is_terminal());
    let old_phase = PodPhase::parse(old.phase.as_deref());
    let mut phase = computed;
    if !phase.is_terminal() {
        phase = old_phase.filter(|p| p.is_terminal()).or(api_phase).unwrap_or(phase);
    }
    let (mut reason, mut message) = (None, None);
    if Some(phase) == old_phase {
        let or_api = |own: &Option<String>, of_api: Option<&String>| {
            own.clone().filter(|r| !r.is_empty()).or_else(|| of_api.cloned())
        };
        reason = or_api(&old.reason, api.and_then(|s| s.reason.as_ref()));
        message = or_api(&old.message, api.and_then(|s| s.message.as_ref()));
    }
    if past_active_deadline(input.pod, old, input.unstepped) {
        phase = PodPhase::Failed;
        reason = Some(DEADLINE_EXCEEDED.to_owned());
        message = Some(DEADLINE_MESSAGE.to_owned());
    }
    (api_phase.unwrap_or(phase), reason, message)
}

fn non_empty(list: &qos::ResourceList) -> Option<BTreeMap<String, Quantity>> {
    Some(qos::to_api(list)).filter(|l| !l.is_empty())
}

// While the pod runs, its status has the resources of its cgroup, so a resize that is not actuated yet is
// not visible (`pkg/kubelet: generateAPIPodStatus`). A cgroup has no memory request. Without resources the
// status has an empty object.
fn pod_resources(
    input: &StatusInput<'_>,
    phase: PodPhase,
    allocated: &qos::ResourceList,
) -> ResourceRequirements {
    let has = input.actuated.filter(|_| phase == PodPhase::Running).map(|given| {
        let pod_level = given.pod_level.clone().or_else(|| pod::spec(input.pod).resources.clone());
        let containers = given.containers.clone();
        allocation::apply(input.pod, &PodResources { pod_level, containers, ..PodResources::default() })
    });
    let pod = has.as_deref().unwrap_or(input.pod);
    let mut requests = allocated.clone();
    if let (Some(own), Some(cpu)) = (requests.get_mut("cpu"), qos::pod_requests(pod).get("cpu")) {
        *own = *cpu;
    }
    let limits = non_empty(&qos::pod_limits(pod));
    ResourceRequirements { claims: None, limits, requests: non_empty(&requests) }
}

fn conditions_of(
    input: &StatusInput<'_>,
    old: &PodStatus,
    init: &[ContainerStatus],
    regular: &[ContainerStatus],
    phase: PodPhase,
    triggered: bool,
) -> Vec<PodCondition> {
    let pod = input.pod;
    let foreign = pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
    let mut list: Vec<PodCondition> = foreign
        .filter(|c| !conditions::is_owned(&c.type_) && c.type_ != conditions::DISRUPTION_TARGET)
        .cloned()
        .collect();
    let own_from = list.len();
    if !input.is_terminal {
        list.extend(input.resize.iter().cloned());
    }
    list.extend(
        old.conditions.iter().flatten().filter(|c| c.type_ == conditions::DISRUPTION_TARGET).cloned(),
    );
    let own_from_computed = list.len();
    let was_initialized = has_restart_all_rule(pod)
        && old.conditions.iter().flatten().any(|c| c.type_ == conditions::INITIALIZED && c.status == "True");
    list.push(conditions::ready_to_start(pod, input.runtime));
    list.push(conditions::initialized(pod, Some(init), regular, phase, was_initialized));
    let containers_ready = conditions::containers_ready(pod, init, Some(regular), phase);
    list.push(conditions::ready(pod, &containers_ready, &list[..own_from]));
    list.push(containers_ready);
    list.push(condition(conditions::POD_SCHEDULED, true, "", ""));
    for c in &mut list[own_from_computed..] {
        c.observed_generation = pod.metadata.generation.filter(|g| *g > 0);
    }
    // The kubelet sets no observedGeneration on this condition.
    if has_restart_all_rule(pod) {
        list.push(conditions::all_containers_restarting(pod, input.runtime, phase, triggered));
    }
    list
}

fn addresses(
    input: &StatusInput<'_>,
    old: &PodStatus,
    phase: PodPhase,
) -> (Option<String>, Option<Vec<PodIP>>) {
    let host = &input.node.host_ips;
    let primary_v6 = host.first().is_some_and(IpAddr::is_ipv6);
    let one_per_family = |ips: &[IpAddr]| -> Vec<String> {
        let first = ips.iter().find(|ip| ip.is_ipv6() == primary_v6);
        let second = ips.iter().find(|ip| ip.is_ipv6() != primary_v6);
        first.into_iter().chain(second).map(ToString::to_string).collect()
    };
    let ips_of = |status: &PodStatus| {
        let all = status.pod_ips.iter().flatten().map(|p| p.ip.clone());
        all.filter(|ip| !ip.is_empty()).collect::<Vec<_>>()
    };
    let mut ips = one_per_family(input.runtime.ips());
    if pod::host_network(input.pod) {
        if ips.is_empty() {
            ips = ips_of(old);
        }
        let host = one_per_family(host);
        if ips.is_empty() {
            ips = host;
        } else if ips.len() == 1 && host.len() == 2 {
            // The node became dual-stack. The addresses that the pod already has stay first.
            let v6 = ips[0].contains(':');
            ips.extend(host.into_iter().find(|ip| ip.contains(':') != v6));
        }
    } else if ips.is_empty() && input.runtime.active_sandbox().is_none() {
        // A stopped pod keeps its address: logs and endpoints are still looked up by it. An address that the
        // API server has from before a reboot may belong to another pod now, and no one sends to the address
        // of a pod with a terminal phase.
        let had_sandbox = !input.runtime.sandboxes.is_empty();
        if had_sandbox || input.is_terminal {
            let known = input.old.or(input.pod.status.as_ref().filter(|_| phase.is_terminal()));
            ips = known.map(ips_of).unwrap_or_default();
        }
    }
    let first = ips.first().cloned();
    let all: Vec<PodIP> = ips.into_iter().map(|ip| PodIP { ip }).collect();
    (first, Some(all).filter(|l| !l.is_empty()))
}

/// Returns the wall time at which activeDeadlineSeconds elapse; `None` without a deadline or a start time.
#[must_use]
pub fn active_deadline(pod: &Pod, status: &PodStatus) -> Option<jiff::Timestamp> {
    let seconds = pod::spec(pod).active_deadline_seconds?;
    let start = status.start_time.as_ref()?.0;
    let span = jiff::SignedDuration::from_secs(seconds.clamp(0, i64::from(i32::MAX)));
    start.checked_add(span).ok()
}

/// Returns whether the pod is past its deadline. Every status from then on is Failed and emits the event.
#[must_use]
pub fn past_active_deadline(pod: &Pod, status: &PodStatus, now: jiff::Timestamp) -> bool {
    active_deadline(pod, status).is_some_and(|deadline| now >= deadline)
}

/// Returns the time until the deadline, for the worker's next wake-up.
#[must_use]
pub fn until_active_deadline(pod: &Pod, status: &PodStatus, now: jiff::Timestamp) -> Option<Duration> {
    let left = active_deadline(pod, status)?.duration_since(now);
    Some(Duration::try_from(left).unwrap_or(Duration::ZERO))
}

/// Returns whether a container would leave Terminated although neither restart policy nor rule restarts it
/// (`pkg/kubelet/status: checkContainerStateTransition`).
#[must_use]
pub fn illegal_transition(pod: &Pod, old: &PodStatus, new: &PodStatus) -> bool {
    if pod::restart_policy(pod) == "Always" || has_restart_all_rule(pod) {
        return false;
    }
    type List = Option<Vec<ContainerStatus>>;
    fn ended<'a>(list: &'a List, name: &str) -> Option<&'a ContainerStateTerminated> {
        list.iter().flatten().find(|s| s.name == name)?.state.as_ref()?.terminated.as_ref()
    }
    /// Returns the terminated state that a container leaves.
    fn left<'a>(old: &'a List, new: &List, name: &str) -> Option<&'a ContainerStateTerminated> {
        let listed = new.iter().flatten().any(|s| s.name == name);
        ended(old, name).filter(|_| listed && ended(new, name).is_none())
    }
    let regular = pod::spec(pod).containers.iter().any(|c| {
        left(&old.container_statuses, &new.container_statuses, &c.name)
            .is_some_and(|t| !container_should_restart(c, pod, t.exit_code))
    });
    let init = pod::init_containers(pod).iter().filter(|c| !pod::is_sidecar(c)).any(|c| {
        // A successful init container runs again in a new sandbox; that is legal.
        left(&old.init_container_statuses, &new.init_container_statuses, &c.name)
            .is_some_and(|t| t.exit_code != 0 && !container_should_restart(c, pod, t.exit_code))
    });
    regular || init
}

/// Completes a status: transition times, start time, observedGeneration and normal form
/// (`pkg/kubelet/status: updateStatusInternal`).
#[must_use]
pub fn finish(pod: &Pod, old: &PodStatus, mut new: PodStatus, now: jiff::Timestamp) -> PodStatus {
    for c in new.conditions.iter_mut().flatten().filter(|c| conditions::has_transition_time(&c.type_)) {
        let before = old.conditions.iter().flatten().find(|o| o.type_ == c.type_ && o.status == c.status);
        c.last_transition_time = before.and_then(|o| o.last_transition_time.clone()).or(Some(Time(now)));
    }
    new.start_time = old.start_time.clone().or(new.start_time).or(Some(Time(now)));
    let generation = pod.metadata.generation.filter(|g| *g > 0);
    new.observed_generation = generation.max(old.observed_generation);
    normalize(pod, &mut new);
    new
}

/// Returns a status that no API object has had, with the times of the mirror pod's status: its start time,
/// and the transition times of conditions with the same value. A kubelet does the same if its watch has
/// delivered the mirror before the first status (`pkg/kubelet/status: updateStatusInternal`).
#[must_use]
pub fn with_times_of(mut status: PodStatus, shown: &PodStatus) -> PodStatus {
    status.start_time = shown.start_time.clone().or(status.start_time);
    for c in status.conditions.iter_mut().flatten() {
        let before = shown.conditions.iter().flatten().find(|o| o.type_ == c.type_ && o.status == c.status);
        if let Some(time) = before.and_then(|o| o.last_transition_time.clone()) {
            c.last_transition_time = Some(time);
        }
    }
    status
}

fn truncated(time: &mut Option<Time>) {
    if let Some(t) = time
        && let Ok(seconds) = jiff::Timestamp::from_second(t.0.as_second())
    {
        t.0 = seconds;
    }
}

fn normalize(pod: &Pod, status: &mut PodStatus) {
    let spec = pod::spec(pod);
    let ephemeral = spec.ephemeral_containers.as_ref().map_or(0, Vec::len);
    let count =
        spec.containers.len().saturating_add(pod::init_containers(pod).len()).saturating_add(ephemeral);
    let room = TERMINATION_MESSAGES_MAX.checked_div(count).unwrap_or(TERMINATION_MESSAGES_MAX);
    let room_of_waiting = text::MESSAGES.checked_div(count).unwrap_or(text::MESSAGE).min(text::MESSAGE);
    let shorten = |text: &mut Option<String>, max| {
        if let Some(text) = text {
            text::shorten(text, max);
        }
    };
    shorten(&mut status.message, text::MESSAGE);
    shorten(&mut status.reason, text::MESSAGE);
    truncated(&mut status.start_time);
    for c in status.conditions.iter_mut().flatten() {
        shorten(&mut c.message, text::MESSAGE);
        truncated(&mut c.last_probe_time);
        truncated(&mut c.last_transition_time);
    }
    let state = |state: &mut Option<ContainerState>| {
        let Some(state) = state else { return };
        if let Some(running) = &mut state.running {
            truncated(&mut running.started_at);
        }
        if let Some(ended) = &mut state.terminated {
            truncated(&mut ended.started_at);
            truncated(&mut ended.finished_at);
            shorten(&mut ended.message, room);
        }
        if let Some(waiting) = &mut state.waiting {
            shorten(&mut waiting.message, room_of_waiting);
        }
    };
    for list in [
        &mut status.container_statuses,
        &mut status.init_container_statuses,
        &mut status.ephemeral_container_statuses,
    ] {
        for s in list.iter_mut().flatten() {
            state(&mut s.state);
            state(&mut s.last_state);
        }
    }
    for list in
        [&mut status.container_statuses, &mut status.ephemeral_container_statuses].into_iter().flatten()
    {
        list.sort_by(|a, b| a.name.cmp(&b.name));
    }
    if let Some(list) = &mut status.init_container_statuses {
        let place = |s: &ContainerStatus| {
            pod::init_containers(pod).iter().position(|c| c.name == s.name).unwrap_or(usize::MAX)
        };
        list.sort_by_key(place);
    }
}

/// Computes the last status of a pod, whose containers have all stopped (`pkg/kubelet/status: TerminatePod`).
/// `old` is the previous status.
#[must_use]
pub fn terminate(pod: &Pod, old: Option<&PodStatus>, now: jiff::Timestamp) -> PodStatus {
    let old = base(pod, old);
    // The volumes are unmounted.
    let mut status = PodStatus { volume_health: None, ..old.clone() };
    let ended = |s: &ContainerStatus| s.state.as_ref().is_some_and(|s| s.terminated.is_some());
    let force = |s: &mut ContainerStatus| {
        s.state = Some(forced(STATUS_UNKNOWN, LOST_WHEN_TERMINATED, UNKNOWN_EXIT_CODE));
        s.ready = false;
        s.started = Some(false);
    };
    if has_initialized(pod) {
        status.container_statuses.iter_mut().flatten().filter(|s| !ended(s)).for_each(force);
    }
    if let Some(init) = &mut status.init_container_statuses {
        // Trailing init containers that never ran are not given a terminated state.
        let untouched = init.iter().rev().take_while(|s| never_began(s)).count();
        let until = init.len().saturating_sub(untouched).max(1).min(init.len());
        init[..until].iter_mut().filter(|s| !ended(s)).for_each(force);
    }
    if !pod::is_static(pod) && !PodPhase::parse(status.phase.as_deref()).is_some_and(PodPhase::is_terminal) {
        status.phase = Some(PodPhase::Failed.as_str().to_owned());
    }
    finish(pod, old, status, now)
}

fn last_end(s: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    s.last_state.as_ref().and_then(|s| s.terminated.as_ref())
}

fn never_began(s: &ContainerStatus) -> bool {
    let waits = s.state.as_ref().is_none_or(|s| s.running.is_none() && s.terminated.is_none());
    waits && last_end(s).is_none()
}

fn has_initialized(pod: &Pod) -> bool {
    let Some(last) = pod::init_containers(pod).last() else { return true };
    let Some(status) = pod.status.as_ref() else { return false };
    if status.container_statuses.iter().flatten().any(|s| !never_began(s)) {
        return true;
    }
    let Some(last_status) = status.init_container_statuses.iter().flatten().find(|s| s.name == last.name)
    else {
        return false;
    };
    if pod::is_sidecar(last) {
        return last_status.started == Some(true)
            && last_status.state.as_ref().is_some_and(|s| s.running.is_some());
    }
    let now = last_status.state.as_ref().and_then(|s| s.terminated.as_ref());
    now.is_some_and(init_has_completed) || last_end(last_status).is_some_and(init_has_completed)
}

/// Returns the runtime's name, from the scheme of the container IDs in a status.
#[must_use]
pub fn runtime_name(status: &PodStatus) -> Option<String> {
    let lists =
        [&status.init_container_statuses, &status.container_statuses, &status.ephemeral_container_statuses];
    let mut ids = lists.into_iter().flatten().flatten().filter_map(|c| c.container_id.as_deref());
    ids.find_map(|id| id.split_once("://")).map(|(name, _)| name.to_owned()).filter(|n| !n.is_empty())
}

/// Reason why the node agent terminates a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum KillCause {
    /// The node is under resource pressure.
    Evicted,
    /// A critical pod preempts it.
    Preempting,
    /// The node is shutting down.
    NodeShutdown,
    /// The volumes of the pod cannot be attached to this node.
    AttachmentLimit,
    /// The pod does not get its devices again, after a restart of the machine.
    UnexpectedAdmission,
    /// The resources of the pod cannot be aligned on NUMA nodes, after a restart of the machine.
    TopologyAffinity,
    /// The pod does not get whole cores, after a restart of the machine.
    SmtAlignment,
    /// The resources of the pod level leave nothing for a container, after a restart of the machine.
    EmptyPodSharedPool,
}

impl KillCause {
    /// Returns the reason in the status of the pod.
    #[must_use]
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Evicted => "Evicted",
            Self::Preempting => "Preempting",
            Self::NodeShutdown => "Terminated",
            Self::AttachmentLimit => ATTACHMENT_LIMIT,
            Self::UnexpectedAdmission => UNEXPECTED_ADMISSION,
            Self::TopologyAffinity => "TopologyAffinityError",
            Self::SmtAlignment => "SMTAlignmentError",
            Self::EmptyPodSharedPool => "EmptyPodSharedPoolError",
        }
    }
}

/// Effect of a kill by the node agent on the status of the terminating pod.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct KillOverride {
    /// The reason of the kill, which selects reason and phase of the status.
    pub cause: KillCause,
    /// Message of status and condition.
    pub message: String,
    /// Message of the DisruptionTarget condition if it differs; `None`: no condition (local storage limits).
    pub disruption: Option<String>,
}

/// Applies an override to a status of [`generate`].
#[must_use]
pub fn with_kill_override(
    pod: &Pod,
    mut status: PodStatus,
    why: &KillOverride,
    now: jiff::Timestamp,
) -> PodStatus {
    let old = status.clone();
    let keeps_success = why.cause == KillCause::NodeShutdown;
    if !(keeps_success && status.phase.as_deref() == Some(PodPhase::Succeeded.as_str())) {
        status.phase = Some(PodPhase::Failed.as_str().to_owned());
    }
    status.reason = Some(why.cause.reason().to_owned());
    status.message = Some(why.message.clone());
    if let Some(text) = &why.disruption {
        let list = status.conditions.get_or_insert_default();
        list.retain(|c| c.type_ != conditions::DISRUPTION_TARGET);
        let mut c = condition(conditions::DISRUPTION_TARGET, true, "TerminationByKubelet", text);
        c.observed_generation = pod.metadata.generation.filter(|g| *g > 0);
        list.push(c);
    }
    finish(pod, &old, status, now)
}

/// Returns the message of the status of a pod that was rejected.
#[must_use]
pub fn rejection_message(message: &str) -> String {
    format!("Pod was rejected: {message}")
}

/// Returns the status of a pod that was not admitted, without conditions and containers
/// (`pkg/kubelet: rejectPod`).
#[must_use]
pub fn rejected(pod: &Pod, reason: &str, message: &str, now: jiff::Timestamp) -> PodStatus {
    let status = PodStatus {
        phase: Some(PodPhase::Failed.as_str().to_owned()),
        reason: Some(reason.to_owned()),
        message: Some(rejection_message(message)),
        qos_class: Some(qos::qos_class(pod).as_str().to_owned()),
        ..PodStatus::default()
    };
    finish(pod, base(pod, None), status, now)
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
