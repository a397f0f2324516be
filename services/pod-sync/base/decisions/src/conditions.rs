//! Computes the pod conditions that the kubelet owns (`pkg/kubelet/status: generate.go`).

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, PodCondition, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use quintlet_model::pod;
use quintlet_model::runtime::PodRuntime;

use super::phase::PodPhase;
use super::sandbox::{SandboxChange, SandboxDecision, sandbox_decision};

/// All regular containers and sidecars are ready.
pub const CONTAINERS_READY: &str = "ContainersReady";
/// ContainersReady is True, and so is every readiness gate.
pub const READY: &str = "Ready";
/// All init containers completed; sidecars started.
pub const INITIALIZED: &str = "Initialized";
/// Sandbox and network are ready.
pub const READY_TO_START: &str = "PodReadyToStartContainers";
/// Always True: the pod is bound to this node.
pub const POD_SCHEDULED: &str = "PodScheduled";
/// The pod is about to be terminated by a disruption. Other clients write it as well.
pub const DISRUPTION_TARGET: &str = "DisruptionTarget";
/// A restart rule restarts all containers in place.
pub const ALL_CONTAINERS_RESTARTING: &str = "AllContainersRestarting";
/// A resize is deferred or infeasible.
pub const RESIZE_PENDING: &str = "PodResizePending";
/// An allocated resize is not actuated yet.
pub const RESIZE_IN_PROGRESS: &str = "PodResizeInProgress";

/// Returns whether only the kubelet writes conditions of this type
/// (`pkg/kubelet/types: PodConditionByKubelet`).
#[must_use]
pub fn is_owned(type_: &str) -> bool {
    matches!(
        type_,
        CONTAINERS_READY
            | READY
            | INITIALIZED
            | READY_TO_START
            | POD_SCHEDULED
            | ALL_CONTAINERS_RESTARTING
            | RESIZE_PENDING
            | RESIZE_IN_PROGRESS
    )
}

/// Returns whether conditions of this type have a transition time that follows their status.
#[must_use]
pub fn has_transition_time(type_: &str) -> bool {
    matches!(
        type_,
        CONTAINERS_READY
            | READY
            | INITIALIZED
            | READY_TO_START
            | POD_SCHEDULED
            | DISRUPTION_TARGET
            | ALL_CONTAINERS_RESTARTING
    )
}

/// Returns a condition without times.
#[must_use]
pub fn condition(type_: &str, status: bool, reason: &str, message: &str) -> PodCondition {
    PodCondition {
        type_: type_.to_owned(),
        status: if status { "True" } else { "False" }.to_owned(),
        reason: Some(reason.to_owned()).filter(|r| !r.is_empty()),
        message: Some(message.to_owned()).filter(|m| !m.is_empty()),
        ..PodCondition::default()
    }
}

/// Sets a condition of the status to True as of `now`. Returns false if it was True or does not exist.
pub fn set_true(status: &mut PodStatus, type_: &str, now: jiff::Timestamp) -> bool {
    let all = status.conditions.iter_mut().flatten();
    let Some(found) = all.into_iter().find(|c| c.type_ == type_ && c.status != "True") else { return false };
    let last_transition_time = Some(Time(now));
    *found = PodCondition {
        last_transition_time,
        observed_generation: found.observed_generation,
        ..condition(type_, true, "", "")
    };
    true
}

/// Sets the message of PodReadyToStartContainers to the reason for which the pod has no sandbox. Returns
/// false if the condition is True, does not exist, or has the message.
pub fn explain_missing_sandbox(status: &mut PodStatus, message: &str) -> bool {
    let mut all = status.conditions.iter_mut().flatten();
    let found = all.find(|c| c.type_ == READY_TO_START && c.status != "True");
    let Some(found) = found.filter(|c| c.message.as_deref() != Some(message)) else { return false };
    found.message = Some(message.to_owned());
    true
}

fn names(list: &[&str]) -> String {
    format!("[{}]", list.join(" "))
}

fn join(parts: &[(&str, &[&str])]) -> String {
    let parts: Vec<String> = parts
        .iter()
        .filter(|(_, list)| !list.is_empty())
        .map(|(text, list)| format!("{text}: {}", names(list)))
        .collect();
    parts.join(", ")
}

fn find<'a>(statuses: &'a [ContainerStatus], name: &str) -> Option<&'a ContainerStatus> {
    statuses.iter().find(|s| s.name == name)
}

/// Computes ContainersReady. `regular` is `None` if the status has no list of containers.
#[must_use]
pub fn containers_ready(
    pod: &Pod,
    init: &[ContainerStatus],
    regular: Option<&[ContainerStatus]>,
    phase: PodPhase,
) -> PodCondition {
    let Some(regular) = regular else {
        return condition(CONTAINERS_READY, false, "UnknownContainerStatuses", "");
    };
    let mut unknown = Vec::new();
    let mut unready = Vec::new();
    let mut look = |container: &'_ str, status: Option<&ContainerStatus>| match status {
        None => unknown.push(container.to_owned()),
        Some(s) if !s.ready => unready.push(container.to_owned()),
        Some(_) => {}
    };
    for c in pod::init_containers(pod).iter().filter(|c| pod::is_sidecar(c)) {
        look(&c.name, find(init, &c.name));
    }
    for c in &pod::spec(pod).containers {
        look(&c.name, find(regular, &c.name));
    }
    let (unknown, unready) = (as_strs(&unknown), as_strs(&unready));
    match phase {
        PodPhase::Succeeded if unknown.is_empty() => {
            return condition(CONTAINERS_READY, false, "PodCompleted", "");
        }
        PodPhase::Failed => return condition(CONTAINERS_READY, false, "PodFailed", ""),
        PodPhase::Pending | PodPhase::Running | PodPhase::Succeeded => {}
    }
    let message =
        join(&[("containers with unknown status", &unknown), ("containers with unready status", &unready)]);
    if message.is_empty() {
        condition(CONTAINERS_READY, true, "", "")
    } else {
        condition(CONTAINERS_READY, false, "ContainersNotReady", &message)
    }
}

fn as_strs(list: &[String]) -> Vec<&str> {
    list.iter().map(String::as_str).collect()
}

/// Computes Ready. `conditions` are those of the status, including readiness gates.
#[must_use]
pub fn ready(pod: &Pod, containers_ready: &PodCondition, conditions: &[PodCondition]) -> PodCondition {
    if containers_ready.status != "True" {
        return PodCondition { type_: READY.to_owned(), ..containers_ready.clone() };
    }
    let closed: Vec<String> = pod::spec(pod)
        .readiness_gates
        .iter()
        .flatten()
        .filter_map(|gate| {
            let name = &gate.condition_type;
            match conditions.iter().find(|c| &c.type_ == name) {
                None => {
                    Some(format!("corresponding condition of pod readiness gate {name:?} does not exist."))
                }
                Some(c) if c.status != "True" => Some(format!(
                    "the status of pod readiness gate {name:?} is not \"True\", but {}",
                    c.status
                )),
                Some(_) => None,
            }
        })
        .collect();
    if closed.is_empty() {
        condition(READY, true, "", "")
    } else {
        condition(READY, false, "ReadinessGatesNotReady", &closed.join(", "))
    }
}

/// Computes Initialized. `was_true`: it is True in the previous status, and a restart of all containers keeps
/// it so.
#[must_use]
pub fn initialized(
    pod: &Pod,
    init: Option<&[ContainerStatus]>,
    regular: &[ContainerStatus],
    phase: PodPhase,
    was_true: bool,
) -> PodCondition {
    let containers = pod::init_containers(pod);
    if init.is_none() && !containers.is_empty() {
        return condition(INITIALIZED, false, "UnknownContainerStatuses", "");
    }
    let init = init.unwrap_or_default();
    let done = |c: &Container, s: &ContainerStatus| {
        if pod::is_sidecar(c) { s.started == Some(true) } else { s.ready }
    };
    let mut unknown = Vec::new();
    let mut incomplete = Vec::new();
    for c in containers {
        match find(init, &c.name) {
            None => unknown.push(c.name.as_str()),
            Some(s) if !done(c, s) => incomplete.push(c.name.as_str()),
            Some(_) => {}
        }
    }
    if phase == PodPhase::Succeeded && unknown.is_empty() {
        return condition(INITIALIZED, true, "PodCompleted", "");
    }
    let regular_ran = pod::spec(pod)
        .containers
        .iter()
        .filter_map(|c| find(regular, &c.name))
        .any(|s| s.state.as_ref().is_some_and(|s| s.running.is_some() || s.terminated.is_some()));
    if regular_ran {
        return condition(INITIALIZED, true, "", "");
    }
    let message = join(&[
        ("containers with unknown status", &unknown),
        ("containers with incomplete status", &incomplete),
    ]);
    if message.is_empty() || was_true {
        condition(INITIALIZED, true, "", "")
    } else {
        condition(INITIALIZED, false, "ContainersNotInitialized", &message)
    }
}

/// Computes PodReadyToStartContainers: whether the newest sandbox is ready, and if not, why
/// (`pkg/kubelet/status: GeneratePodReadyToStartContainersCondition`, with the reason of 1.37).
#[must_use]
pub fn ready_to_start(pod: &Pod, runtime: &PodRuntime) -> PodCondition {
    let message = match sandbox_decision(pod, runtime) {
        SandboxDecision::Keep { .. } => return condition(READY_TO_START, true, "", ""),
        SandboxDecision::Create { why, .. } => match why {
            SandboxChange::None => "no pod sandbox exists",
            SandboxChange::SeveralReady => "multiple pod sandboxes are ready",
            SandboxChange::NotReady => "pod sandbox is not ready",
            SandboxChange::NetworkMode => "pod sandbox has another network mode than the pod",
            SandboxChange::NoAddress => "pod sandbox has no IP address",
        },
    };
    condition(READY_TO_START, false, "PodSandboxNotReady", message)
}

/// Computes AllContainersRestarting for a pod that has such a rule. `triggered` is the result of
/// `restart_all_triggered`.
#[must_use]
pub fn all_containers_restarting(
    pod: &Pod,
    runtime: &PodRuntime,
    phase: PodPhase,
    triggered: bool,
) -> PodCondition {
    // Ephemeral containers are not restarted.
    let left = pod::spec(pod)
        .containers
        .iter()
        .chain(pod::init_containers(pod))
        .any(|c| runtime.newest(&c.name).is_some());
    match phase {
        PodPhase::Succeeded => condition(ALL_CONTAINERS_RESTARTING, false, "PodCompleted", ""),
        PodPhase::Failed => condition(ALL_CONTAINERS_RESTARTING, false, "PodFailed", ""),
        PodPhase::Pending | PodPhase::Running if triggered && left => condition(
            ALL_CONTAINERS_RESTARTING,
            true,
            "RestartAllContainersStarted",
            "container exited with restart policy rule",
        ),
        PodPhase::Pending | PodPhase::Running => condition(ALL_CONTAINERS_RESTARTING, false, "", ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_model::runtime::SandboxState;
    use quintlet_testkit::pods::{RuntimeBuilder, pod_json};
    use serde_json::{Value, json};

    fn statuses(list: Value) -> Vec<ContainerStatus> {
        let list = list.as_array().unwrap();
        list.iter()
            .map(|v| {
                let mut all = json!({"image": "", "imageID": "", "ready": false, "restartCount": 0});
                all.as_object_mut().unwrap().extend(v.as_object().unwrap().clone());
                serde_json::from_value(all).unwrap()
            })
            .collect()
    }

    fn brief(c: &PodCondition) -> (&str, &str, &str) {
        (&c.status, c.reason.as_deref().unwrap_or(""), c.message.as_deref().unwrap_or(""))
    }

    fn two() -> Pod {
        pod_json(json!({"containers": [{"name": "a", "image": "i"}, {"name": "b", "image": "i"}],
            "initContainers": [{"name": "s", "image": "i", "restartPolicy": "Always"}, {"name": "p", "image": "i"}]}))
    }

    #[test]
    fn containers_ready_names_the_containers_that_are_not_ready() {
        let p = two();
        let side = statuses(json!([{"name": "s", "ready": true}]));
        let both = statuses(json!([{"name": "a", "ready": true}, {"name": "b", "ready": true}]));
        let one = statuses(json!([{"name": "a"}]));
        for (name, init, regular, phase, want) in [
            ("no list", &side, None, PodPhase::Running, ("False", "UnknownContainerStatuses", "")),
            ("all", &side, Some(&both), PodPhase::Running, ("True", "", "")),
            ("succeeded", &side, Some(&both), PodPhase::Succeeded, ("False", "PodCompleted", "")),
            ("failed", &side, Some(&one), PodPhase::Failed, ("False", "PodFailed", "")),
            (
                "some",
                &Vec::new(),
                Some(&one),
                PodPhase::Succeeded,
                (
                    "False",
                    "ContainersNotReady",
                    "containers with unknown status: [s b], containers with unready status: [a]",
                ),
            ),
        ] {
            let got = containers_ready(&p, init, regular.map(Vec::as_slice), phase);
            assert_eq!(brief(&got), want, "{name}");
        }
    }

    #[test]
    fn ready_follows_containers_ready_and_the_gates() {
        let p = pod_json(
            json!({"containers": [], "readinessGates": [{"conditionType": "x/y"}, {"conditionType": "z"}]}),
        );
        let yes = condition(CONTAINERS_READY, true, "", "");
        let no = condition(CONTAINERS_READY, false, "R", "m");
        assert_eq!(brief(&ready(&p, &no, &[])), ("False", "R", "m"));
        let got = ready(&p, &yes, &[condition("z", false, "", "")]);
        assert_eq!(
            brief(&got),
            (
                "False",
                "ReadinessGatesNotReady",
                "corresponding condition of pod readiness gate \"x/y\" does not exist., the status of pod readiness gate \"z\" is not \"True\", but False"
            )
        );
        let open = [condition("z", true, "", ""), condition("x/y", true, "", "")];
        assert_eq!(brief(&ready(&p, &yes, &open)), ("True", "", ""));
    }

    #[test]
    fn initialized_waits_for_ready_inits_and_started_sidecars() {
        let p = two();
        let done = statuses(json!([{"name": "s", "started": true}, {"name": "p", "ready": true}]));
        let half = statuses(json!([{"name": "s", "started": false}]));
        let ran = statuses(json!([{"name": "a", "state": {"running": {}}}]));
        for (name, init, regular, phase, was, want) in [
            (
                "no list",
                None,
                &Vec::new(),
                PodPhase::Pending,
                false,
                ("False", "UnknownContainerStatuses", ""),
            ),
            ("done", Some(&done), &Vec::new(), PodPhase::Pending, false, ("True", "", "")),
            ("regular ran", Some(&half), &ran, PodPhase::Running, false, ("True", "", "")),
            ("succeeded", Some(&done), &ran, PodPhase::Succeeded, false, ("True", "PodCompleted", "")),
            ("was true", Some(&half), &Vec::new(), PodPhase::Pending, true, ("True", "", "")),
            (
                "half",
                Some(&half),
                &Vec::new(),
                PodPhase::Pending,
                false,
                (
                    "False",
                    "ContainersNotInitialized",
                    "containers with unknown status: [p], containers with incomplete status: [s]",
                ),
            ),
        ] {
            let got = initialized(&p, init.map(Vec::as_slice), regular, phase, was);
            assert_eq!(brief(&got), want, "{name}");
        }
    }

    #[test]
    fn a_pod_is_ready_to_start_containers_while_its_sandbox_is_usable() {
        let p = two();
        let condition = |runtime: RuntimeBuilder| ready_to_start(&p, &runtime.build());
        assert_eq!(brief(&condition(RuntimeBuilder::ready())), ("True", "", ""));
        let no = |message| ("False", "PodSandboxNotReady", message);
        assert_eq!(brief(&condition(RuntimeBuilder::none())), no("no pod sandbox exists"));
        let stopped = RuntimeBuilder::none().sandbox(SandboxState::NotReady);
        assert_eq!(brief(&condition(stopped)), no("pod sandbox is not ready"));
        let two = RuntimeBuilder::none().sandbox(SandboxState::Ready).sandbox(SandboxState::Ready);
        assert_eq!(brief(&condition(two)), no("multiple pod sandboxes are ready"));
    }

    #[test]
    fn the_reason_for_a_missing_sandbox_is_shown_until_there_is_one() {
        let p = two();
        let status = |runtime: RuntimeBuilder| PodStatus {
            conditions: Some(vec![
                condition(POD_SCHEDULED, true, "", ""),
                ready_to_start(&p, &runtime.build()),
            ]),
            ..PodStatus::default()
        };
        let mut missing = status(RuntimeBuilder::none());
        assert!(explain_missing_sandbox(&mut missing, "waiting"));
        assert!(!explain_missing_sandbox(&mut missing, "waiting"));
        let shown = brief(&missing.conditions.as_ref().unwrap()[1]);
        assert_eq!(shown, ("False", "PodSandboxNotReady", "waiting"));
        for mut other in [status(RuntimeBuilder::ready()), PodStatus::default()] {
            let before = other.clone();
            assert!(!explain_missing_sandbox(&mut other, "waiting"));
            assert_eq!(other, before);
        }
    }

    #[test]
    fn a_restart_of_all_containers_lasts_until_the_last_instance_is_removed() {
        let some = RuntimeBuilder::ready().exited("a", 1).build();
        let none = RuntimeBuilder::ready().exited("e", 0).build();
        let p = two();
        assert_eq!(brief(&all_containers_restarting(&p, &some, PodPhase::Running, true)).0, "True");
        assert_eq!(brief(&all_containers_restarting(&p, &some, PodPhase::Running, false)).0, "False");
        assert_eq!(brief(&all_containers_restarting(&p, &none, PodPhase::Running, true)).0, "False");
        assert_eq!(brief(&all_containers_restarting(&p, &some, PodPhase::Failed, true)).1, "PodFailed");
        assert_eq!(brief(&all_containers_restarting(&p, &some, PodPhase::Succeeded, true)).1, "PodCompleted");
    }
}
