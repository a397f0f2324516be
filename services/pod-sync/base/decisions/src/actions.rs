//! Computes the actions for a pod from its spec and its runtime state
//! (`pkg/kubelet/kuberuntime: computePodActions`).
//!
//! Crash-loop back-off is not decided here. A container in back-off is in the list of containers to start,
//! which keeps the pod running, and [`super::backoff`] decides when it may start.

use k8s_openapi::api::core::v1::{Container as SpecContainer, Pod};
use quintlet_kit::failpoint;
use quintlet_model::hash::container_hash;
use quintlet_model::ids::{ContainerId, SandboxId};
use quintlet_model::pod;
use quintlet_model::probe::{ProbeResult, ProbeType};
use quintlet_model::runtime::{Container, ContainerState, PodRuntime};

use super::probes::ProbeResults;
use super::resize::allocation::PodResources;
use super::resize::plan::{self, ContainerChange, ResizeActions};
use super::resize::volumes;
use super::restart::{
    container_should_restart, init_exit_code, is_restart_all_source, restarts_after_kill,
    should_container_be_restarted,
};
use super::sandbox::{SandboxDecision, sandbox_decision};

/// Input of [`compute_pod_actions`].
#[derive(Debug, Clone, Copy)]
pub struct ActionInput<'a> {
    /// The pod, with its allocated resources in the spec.
    pub pod: &'a Pod,
    /// State from the newest inspection; instances are sorted newest first.
    pub runtime: &'a PodRuntime,
    /// Last results of the pod's liveness, readiness and startup probes.
    pub probes: &'a ProbeResults,
    /// Resources last sent to the runtime; `None` if there is no record.
    pub actuated: Option<&'a PodResources>,
    /// Condition AllContainersRestarting is True in the status of this sync.
    pub restart_all: bool,
}

/// Reason why a running container is killed in a pod that is not terminated (`pkg/kubelet/kuberuntime:
/// computePodActions`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KillReason {
    /// The runtime reports an unknown state.
    UnknownState,
    /// Name or image differ from those that the instance was created with.
    DefinitionChanged,
    /// The liveness probe failed; the grace period of the probe applies.
    LivenessProbe,
    /// The startup probe failed; the grace period of the probe applies.
    StartupProbe,
    /// Resources changed and `resizePolicy` requires a restart.
    Resize,
}

/// A container to kill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerKill {
    /// The instance that runs.
    pub id: ContainerId,
    /// Name in the spec.
    pub name: String,
    /// Message of the Killing event.
    pub message: String,
    /// Reason that decides which grace period applies.
    pub reason: KillReason,
}

/// A container instance to remove before all containers restart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerReset {
    /// The removed instance.
    pub id: ContainerId,
    /// Name in the spec.
    pub name: String,
    /// The instance has not exited: kill it first, without a grace period.
    pub kill: bool,
}

/// Actions of one sync (`pkg/kubelet/kuberuntime: podActions`). Indexes refer to the lists of the spec.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodActions {
    /// Kill all containers and sandboxes. `containers_to_kill` is empty then. Without `create_sandbox`
    /// everything but `failed_probes` is empty as well.
    pub kill_pod: bool,
    /// The containers that `kill_pod` kills because their probe failed, with the reason. The grace period of
    /// the probe applies to them. In a kubelet, that of the pod does.
    pub failed_probes: Vec<(ContainerId, KillReason)>,
    /// Create a sandbox, after `kill_pod`.
    pub create_sandbox: bool,
    /// Attempt of the sandbox to create, or of the current one.
    pub attempt: u32,
    /// The sandbox that is kept or replaced. `None` if there is none, or if only the network mode changed,
    /// which emits no SandboxChanged event.
    pub sandbox_id: Option<SandboxId>,
    /// Init containers to start, in order. At most one of them is not a sidecar.
    pub init_containers_to_start: Vec<usize>,
    /// Regular containers to start.
    pub containers_to_start: Vec<usize>,
    /// Ephemeral containers to start.
    pub ephemeral_containers_to_start: Vec<usize>,
    /// Running containers to kill before anything starts.
    pub containers_to_kill: Vec<ContainerKill>,
    /// Instances to kill and remove, in this order, before all containers restart. Their logs are kept. No
    /// other action is set.
    pub reset: Vec<ContainerReset>,
    /// Resources to change in place before any container starts.
    pub resize: ResizeActions,
    /// Dead init container instances to remove: all of them with `create_sandbox`, since init containers must
    /// run again, otherwise all but the newest of each name. The worker keeps those whose status the API
    /// server does not have yet.
    pub prune: Vec<ContainerId>,
}

impl PodActions {
    /// Returns whether there is nothing to do. Removing dead init containers does not count, and neither does
    /// killing a pod of which nothing runs.
    #[must_use]
    pub fn is_idle(&self, runtime: &PodRuntime) -> bool {
        let stops = self.kill_pod && !runtime.is_quiet();
        !stops
            && !self.create_sandbox
            && !self.has_starts()
            && self.containers_to_kill.is_empty()
            && self.reset.is_empty()
            && self.resize.is_empty()
    }
}

/// Computes the actions for a pod that is not terminating (`pkg/kubelet/kuberuntime: computePodActions`).
#[must_use]
pub fn compute_pod_actions(input: &ActionInput<'_>) -> PodActions {
    let &ActionInput { pod, runtime, restart_all, .. } = input;
    let sandbox = sandbox_decision(pod, runtime);
    if restart_all {
        let (sandbox_id, attempt) = match sandbox {
            SandboxDecision::Keep { id, attempt } => (Some(id), attempt),
            SandboxDecision::Create { attempt, replaces, .. } => (replaces, attempt),
        };
        return PodActions { sandbox_id, attempt, reset: reset_list(pod, runtime), ..PodActions::default() };
    }
    match sandbox {
        SandboxDecision::Create { attempt, replaces, .. } => {
            with_new_sandbox(pod, runtime, attempt, replaces)
        }
        SandboxDecision::Keep { id, attempt } => in_kept_sandbox(input, id, attempt),
    }
}

fn reset_list(pod: &Pod, runtime: &PodRuntime) -> Vec<ContainerReset> {
    let spec = pod::spec(pod);
    let list = |containers: &[SpecContainer], sources: bool| -> Vec<ContainerReset> {
        containers
            .iter()
            .filter(|c| is_restart_all_source(c, runtime) == sources)
            .flat_map(|c| runtime.instances(&c.name))
            .map(|c| ContainerReset {
                id: c.id.clone(),
                name: c.name.clone(),
                kill: c.state != ContainerState::Exited,
            })
            .collect()
    };
    // The container that triggered the restart is removed last: its exit code is the only record of the
    // trigger.
    [
        list(&spec.containers, false),
        list(pod::init_containers(pod), false),
        list(&spec.containers, true),
        list(pod::init_containers(pod), true),
    ]
    .concat()
}

/// Returns whether any regular container was ever created, according to the newest instances.
pub(crate) fn any_regular_created(pod: &Pod, runtime: &PodRuntime) -> bool {
    pod::spec(pod)
        .containers
        .iter()
        .filter_map(|c| runtime.newest(&c.name))
        .any(|c| c.state != ContainerState::Unknown)
}

fn with_new_sandbox(
    pod: &Pod,
    runtime: &PodRuntime,
    attempt: u32,
    replaces: Option<SandboxId>,
) -> PodActions {
    let mut actions = PodActions {
        kill_pod: true,
        create_sandbox: true,
        attempt,
        sandbox_id: replaces,
        ..PodActions::default()
    };
    if pod::restart_policy(pod) == "Never" && attempt != 0 && !runtime.containers.is_empty() {
        actions.create_sandbox = false;
        return actions;
    }
    let start: Vec<usize> = pod::spec(pod)
        .containers
        .iter()
        .enumerate()
        .filter(|(_, c)| {
            let succeeded = runtime
                .newest(&c.name)
                .is_some_and(|s| s.state == ContainerState::Exited && s.exit_code == 0);
            !(succeeded && super::restart::effective_policy(c, pod) == "OnFailure")
        })
        .map(|(i, _)| i)
        .collect();
    if start.is_empty() && any_regular_created(pod, runtime) {
        actions.create_sandbox = false;
        return actions;
    }
    let inits = pod::init_containers(pod);
    if inits.is_empty() {
        actions.containers_to_start = start;
    } else {
        actions.init_containers_to_start = vec![0];
        actions.prune = inits.iter().flat_map(|c| runtime.instances(&c.name)).map(|c| c.id.clone()).collect();
    }
    actions
}

fn in_kept_sandbox(input: &ActionInput<'_>, id: SandboxId, attempt: u32) -> PodActions {
    let &ActionInput { pod, runtime, actuated, .. } = input;
    let mut actions = PodActions { sandbox_id: Some(id.clone()), attempt, ..PodActions::default() };
    actions.prune = prunable(pod, runtime);
    actions.resize.pod = plan::pod_level_changed(pod, actuated);
    actions.resize.volumes = volumes::updates(pod, actuated);
    actions.ephemeral_containers_to_start = pod::spec(pod)
        .ephemeral_containers
        .iter()
        .flatten()
        .enumerate()
        .filter(|(_, c)| runtime.newest(&c.name).is_none())
        .map(|(i, _)| i)
        .collect();

    match init_actions(input, &id, &mut actions) {
        InitProgress::Failed => return kill_only(actions),
        InitProgress::Waiting => return actions,
        InitProgress::Done => {}
    }

    let kept = regular_actions(input, &mut actions);
    if kept == 0 && actions.containers_to_start.is_empty() {
        return kill_only(actions);
    }
    actions
}

/// Adds the actions of regular containers. Returns the number of running containers that are kept as they
/// are.
fn regular_actions(input: &ActionInput<'_>, actions: &mut PodActions) -> usize {
    let &ActionInput { pod, runtime, actuated, .. } = input;
    let mut kept = 0_usize;
    for (index, container) in pod::spec(pod).containers.iter().enumerate() {
        let running = match runtime.newest(&container.name) {
            Some(newest) if newest.state == ContainerState::Running => newest,
            stopped => {
                if should_container_be_restarted(container, pod, runtime) {
                    actions.containers_to_start.push(index);
                    let unknown = stopped.filter(|c| c.state == ContainerState::Unknown);
                    actions.containers_to_kill.extend(unknown.map(|unknown| ContainerKill {
                        id: unknown.id.clone(),
                        name: unknown.name.clone(),
                        message:
                            "Container is in \"unknown\" state, try killing it before restart".to_owned(),
                        reason: KillReason::UnknownState,
                    }));
                }
                continue;
            }
        };
        if let Some((kill, is_restarted)) = kill_of_running(input, container, running) {
            if is_restarted {
                actions.containers_to_start.push(index);
            }
            actions.containers_to_kill.push(kill);
            continue;
        }
        match plan::plan_container(pod, container, running, actuated, &mut actions.resize) {
            ContainerChange::InPlace => kept = usize::saturating_add(kept, 1),
            ContainerChange::Restart => {
                actions.containers_to_kill.push(resize_kill(container, running));
                actions.containers_to_start.push(index);
            }
        }
    }
    kept
}

/// Returns the kill of a running container that has changed or failed a probe, and whether the container is
/// started again.
fn kill_of_running(
    input: &ActionInput<'_>,
    container: &SpecContainer,
    running: &Container,
) -> Option<(ContainerKill, bool)> {
    let failed = |probe| input.probes.get(probe, &running.id) == Some(ProbeResult::Failure);
    let (event, reason, is_restarted) = if definition_changed(container, running) {
        // A changed definition restarts the container whatever its restart policy.
        ("definition changed", KillReason::DefinitionChanged, true)
    } else if failed(ProbeType::Liveness) {
        ("failed liveness probe", KillReason::LivenessProbe, restarts_after_kill(container, input.pod))
    } else if failed(ProbeType::Startup) {
        ("failed startup probe", KillReason::StartupProbe, restarts_after_kill(container, input.pod))
    } else {
        return None;
    };
    let restart = if is_restarted { ", will be restarted" } else { "" };
    let message = format!("Container {} {event}{restart}", container.name);
    let kill = ContainerKill { id: running.id.clone(), name: container.name.clone(), message, reason };
    Some((kill, is_restarted))
}

// A resize whose policy is RestartContainer. The start that follows uses the new resources.
fn resize_kill(container: &SpecContainer, running: &Container) -> ContainerKill {
    ContainerKill {
        id: running.id.clone(),
        name: container.name.clone(),
        message: format!("Container {} resize requires restart", container.name),
        reason: KillReason::Resize,
    }
}

// A pod that is killed for good starts nothing. Its containers need no kill of their own.
fn kill_only(actions: PodActions) -> PodActions {
    let of_probe = |kill: ContainerKill| match kill.reason {
        KillReason::LivenessProbe | KillReason::StartupProbe => Some((kill.id, kill.reason)),
        KillReason::UnknownState | KillReason::DefinitionChanged | KillReason::Resize => None,
    };
    PodActions {
        kill_pod: true,
        failed_probes: actions.containers_to_kill.into_iter().filter_map(of_probe).collect(),
        attempt: actions.attempt,
        sandbox_id: actions.sandbox_id,
        prune: actions.prune,
        ..PodActions::default()
    }
}

fn prunable(pod: &Pod, runtime: &PodRuntime) -> Vec<ContainerId> {
    pod::init_containers(pod)
        .iter()
        .flat_map(|c| {
            runtime
                .instances(&c.name)
                .filter(|c| matches!(c.state, ContainerState::Exited | ContainerState::Unknown))
                .skip(1)
        })
        .map(|c| c.id.clone())
        .collect()
}

fn definition_changed(container: &SpecContainer, status: &Container) -> bool {
    status.hash() != container_hash(&container.name, container.image.as_deref().unwrap_or_default())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InitProgress {
    /// Initialization is complete: regular containers may start.
    Done,
    /// Initialization is in progress.
    Waiting,
    /// An init container failed and is not restarted.
    Failed,
}

/// Containers of a previous sandbox do not count for the initialization: after a reboot the runtime may still
/// report one as created (k/k#138514).
fn newest_in_sandbox<'a>(runtime: &'a PodRuntime, sandbox: &SandboxId, name: &str) -> Option<&'a Container> {
    runtime.containers.iter().find(|c| c.name == name && &c.sandbox_id == sandbox)
}

fn init_actions(input: &ActionInput<'_>, sandbox: &SandboxId, actions: &mut PodActions) -> InitProgress {
    let &ActionInput { pod, runtime, probes, actuated, .. } = input;
    let inits = pod::init_containers(pod);
    if inits.is_empty() {
        return InitProgress::Done;
    }
    let mut initialized = pod::spec(pod)
        .containers
        .iter()
        .filter_map(|c| {
            if failpoint::planted!("init skipped after a reboot") {
                runtime.newest(&c.name)
            } else {
                newest_in_sandbox(runtime, sandbox, &c.name)
            }
        })
        .any(|c| matches!(c.state, ContainerState::Created | ContainerState::Running));
    // Whether the next init container was reached before. True for all of them once a regular container
    // exists.
    let mut previous = initialized;
    let last = inits.len().saturating_sub(1);

    for (index, container) in inits.iter().enumerate().rev() {
        let sidecar = pod::is_sidecar(container);
        let Some(status) = newest_in_sandbox(runtime, sandbox, &container.name) else {
            if previous && sidecar {
                actions.init_containers_to_start.push(index);
            }
            continue;
        };
        if previous && !sidecar {
            continue;
        }
        match status.state {
            ContainerState::Created => actions.init_containers_to_start.push(index),
            ContainerState::Running if !sidecar => {
                let change = plan::plan_container(pod, container, status, actuated, &mut actions.resize);
                if change == ContainerChange::Restart {
                    actions.containers_to_kill.push(resize_kill(container, status));
                    actions.init_containers_to_start.push(index);
                }
            }
            ContainerState::Running => {
                let startup = match container.startup_probe {
                    Some(_) => probes.get(ProbeType::Startup, &status.id),
                    None => Some(ProbeResult::Success),
                };
                if startup == Some(ProbeResult::Success) {
                    if index == last {
                        initialized = true;
                    } else if !previous {
                        actions.init_containers_to_start.push(index.saturating_add(1));
                    }
                }
                if let Some(kill) = sidecar_kill(input, container, status, startup, &mut actions.resize) {
                    actions.containers_to_kill.push(kill);
                    actions.init_containers_to_start.push(index);
                }
            }
            ContainerState::Exited if sidecar => actions.init_containers_to_start.push(index),
            ContainerState::Exited => {
                let code = init_exit_code(status.exit_code, &status.reason);
                if code != 0 {
                    if !container_should_restart(container, pod, code) {
                        return InitProgress::Failed;
                    }
                    actions.init_containers_to_start.push(index);
                } else if index == last {
                    initialized = true;
                } else {
                    actions.init_containers_to_start.push(index.saturating_add(1));
                }
            }
            ContainerState::Unknown => {
                if !sidecar && !restarts_after_kill(container, pod) {
                    return InitProgress::Failed;
                }
                actions.containers_to_kill.push(ContainerKill {
                    id: status.id.clone(),
                    name: container.name.clone(),
                    message: "Init container is in \"unknown\" state, try killing it before restart"
                        .to_owned(),
                    reason: KillReason::UnknownState,
                });
                actions.init_containers_to_start.push(index);
            }
        }
        previous = true;
    }
    if !previous {
        actions.init_containers_to_start.push(0);
    }
    actions.init_containers_to_start.reverse();
    if initialized { InitProgress::Done } else { InitProgress::Waiting }
}

/// Returns the kill of a running sidecar that is restarted. `startup` is the result of its startup probe.
fn sidecar_kill(
    input: &ActionInput<'_>,
    container: &SpecContainer,
    running: &Container,
    startup: Option<ProbeResult>,
    resize: &mut ResizeActions,
) -> Option<ContainerKill> {
    let (event, reason) = match startup {
        None | Some(ProbeResult::Unknown) => return None,
        Some(ProbeResult::Failure) => ("failed startup probe", KillReason::StartupProbe),
        Some(ProbeResult::Success) => {
            let liveness = || input.probes.get(ProbeType::Liveness, &running.id);
            if definition_changed(container, running) {
                ("definition changed", KillReason::DefinitionChanged)
            } else if container.liveness_probe.is_some() && liveness() == Some(ProbeResult::Failure) {
                ("failed liveness probe", KillReason::LivenessProbe)
            } else {
                let change = plan::plan_container(input.pod, container, running, input.actuated, resize);
                return (change == ContainerChange::Restart).then(|| resize_kill(container, running));
            }
        }
    };
    let message = format!("Init container {} {event}", container.name);
    Some(ContainerKill { id: running.id.clone(), name: container.name.clone(), message, reason })
}

#[cfg(test)]
#[path = "actions_branches.rs"]
mod branches;
#[cfg(test)]
#[path = "actions_resize.rs"]
mod resize_branches;
#[cfg(test)]
#[path = "actions_tests.rs"]
mod tests;
