//! Computes the phase of a pod from its container statuses (`pkg/kubelet: getPhase`).

use std::fmt;
use std::num::Saturating;

use k8s_openapi::api::core::v1::{Container, ContainerStateTerminated, ContainerStatus, Pod};
use quintlet_model::pod;

use super::restart::{RESTARTING_ALL, container_should_restart, init_exit_code};

/// `status.phase` of a pod (`pkg/kubelet: getPhase`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PodPhase {
    /// Some containers have not been started.
    Pending,
    /// A container runs or will be restarted.
    Running,
    /// All containers exited with code 0.
    Succeeded,
    /// All containers exited, at least one of them with a failure.
    Failed,
}

impl PodPhase {
    /// Returns the phase as in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Running => "Running",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
        }
    }

    /// Parses a phase; `None` for `Unknown` and anything else.
    #[must_use]
    pub fn parse(text: Option<&str>) -> Option<Self> {
        match text? {
            "Pending" => Some(Self::Pending),
            "Running" => Some(Self::Running),
            "Succeeded" => Some(Self::Succeeded),
            "Failed" => Some(Self::Failed),
            _ => None,
        }
    }

    /// Returns whether the phase is Succeeded or Failed.
    #[must_use]
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

impl fmt::Display for PodPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The part of a container's status that the phase depends on.
enum Seen<'a> {
    Missing,
    NoState,
    Running {
        started: bool,
    },
    Terminated(&'a ContainerStateTerminated),
    /// Waiting after it has terminated before.
    WaitingAgain(&'a ContainerStateTerminated),
    Waiting,
}

fn see<'a>(statuses: &'a [ContainerStatus], name: &str) -> Seen<'a> {
    let Some(status) = statuses.iter().find(|s| s.name == name) else { return Seen::Missing };
    let Some(state) = &status.state else { return Seen::NoState };
    if state.running.is_some() {
        Seen::Running { started: status.started == Some(true) }
    } else if let Some(terminated) = &state.terminated {
        Seen::Terminated(terminated)
    } else if state.waiting.is_some() {
        match status.last_state.as_ref().and_then(|s| s.terminated.as_ref()) {
            Some(last) => Seen::WaitingAgain(last),
            None => Seen::Waiting,
        }
    } else {
        Seen::NoState
    }
}

fn restartable(container: &Container, pod: &Pod, ended: &ContainerStateTerminated) -> bool {
    ended.reason.as_deref() == Some(RESTARTING_ALL)
        || container_should_restart(container, pod, ended.exit_code)
}

/// Returns whether an init container has failed and is not restarted.
fn init_failed(container: &Container, pod: &Pod, ended: &ContainerStateTerminated) -> bool {
    let reason = ended.reason.as_deref().unwrap_or_default();
    let code = init_exit_code(ended.exit_code, reason);
    code != 0 && reason != RESTARTING_ALL && !container_should_restart(container, pod, code)
}

// The containers of a pod by their state.
#[derive(Default)]
struct ContainerCounts {
    pending_init: Saturating<u32>,
    failed_init: Saturating<u32>,
    pending_sidecar: Saturating<u32>,
    unknown: Saturating<u32>,
    running: Saturating<u32>,
    waiting: Saturating<u32>,
    stopped: Saturating<u32>,
    succeeded: Saturating<u32>,
    // Stopped, and not to be restarted.
    stopped_final: Saturating<u32>,
}

/// Computes the phase (`pkg/kubelet: getPhase`). `initialized_in_sandbox`: a regular container of the active
/// sandbox has an instance. `is_terminal`: all containers were stopped for good.
#[must_use]
pub(crate) fn pod_phase(
    pod: &Pod,
    init: &[ContainerStatus],
    regular: &[ContainerStatus],
    initialized_in_sandbox: bool,
    is_terminal: bool,
) -> PodPhase {
    let none = Saturating(0);
    let mut count = ContainerCounts::default();

    for c in pod::init_containers(pod) {
        let seen = see(init, &c.name);
        if pod::is_sidecar(c) {
            match seen {
                Seen::Missing => count.unknown += 1,
                Seen::NoState => {
                    count.unknown += 1;
                    count.pending_sidecar += 1;
                }
                Seen::Running { started } => {
                    count.running += 1;
                    count.pending_sidecar += u32::from(!started);
                }
                Seen::Waiting => {
                    count.waiting += 1;
                    count.pending_sidecar += 1;
                }
                Seen::Terminated(_) | Seen::WaitingAgain(_) => {}
            }
        } else {
            match seen {
                Seen::Missing | Seen::NoState | Seen::Running { .. } | Seen::Waiting => {
                    count.pending_init += 1
                }
                Seen::Terminated(t) | Seen::WaitingAgain(t) => {
                    count.failed_init += u32::from(init_failed(c, pod, t));
                }
            }
        }
    }
    for c in &pod::spec(pod).containers {
        match see(regular, &c.name) {
            Seen::Missing | Seen::NoState => count.unknown += 1,
            Seen::Running { .. } => count.running += 1,
            Seen::Terminated(t) => {
                count.stopped += 1;
                count.succeeded += u32::from(t.exit_code == 0);
                count.stopped_final += u32::from(!restartable(c, pod, t));
            }
            Seen::WaitingAgain(t) => {
                count.stopped += 1;
                count.stopped_final += u32::from(!restartable(c, pod, t));
            }
            Seen::Waiting => count.waiting += 1,
        }
    }

    let ended = if count.stopped == count.succeeded { PodPhase::Succeeded } else { PodPhase::Failed };
    if count.failed_init > none {
        PodPhase::Failed
    } else if count.pending_init > none
        || (count.pending_sidecar > none && !initialized_in_sandbox)
        || count.waiting > none
    {
        PodPhase::Pending
    } else if count.running > none && count.unknown == none {
        PodPhase::Running
    } else if count.running == none && count.stopped > none && count.unknown == none {
        if is_terminal && !pod::is_static(pod) {
            ended
        } else if count.stopped != count.stopped_final {
            PodPhase::Running
        } else {
            ended
        }
    } else {
        PodPhase::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_testkit::pods::pod_json;
    use serde_json::{Value, json};

    fn running() -> Value {
        json!({"state": {"running": {}}, "started": true})
    }
    fn unstarted() -> Value {
        json!({"state": {"running": {}}, "started": false})
    }
    fn ended(code: i32) -> Value {
        json!({"state": {"terminated": {"exitCode": code}}})
    }
    fn killed() -> Value {
        json!({"state": {"terminated": {"exitCode": 0, "reason": "OOMKilled"}}})
    }
    fn waiting(reason: &str) -> Value {
        json!({"state": {"waiting": {"reason": reason}}})
    }
    fn again(reason: &str, code: i32) -> Value {
        json!({"state": {"waiting": {"reason": reason}}, "lastState": {"terminated": {"exitCode": code}}})
    }

    /// `null` stands for a container without a status.
    fn statuses(list: &[Value], prefix: &str) -> Vec<ContainerStatus> {
        list.iter()
            .enumerate()
            .filter(|(_, v)| !v.is_null())
            .map(|(i, v)| {
                let mut v = v.clone();
                v["name"] = json!(format!("{prefix}{i}"));
                v["image"] = json!("i");
                v["imageID"] = json!("");
                v["ready"] = json!(false);
                v["restartCount"] = json!(0);
                serde_json::from_value(v).unwrap()
            })
            .collect()
    }

    struct Case {
        name: &'static str,
        policy: &'static str,
        /// Whether the init container is a sidecar, and its status.
        init: Vec<(bool, Value)>,
        regular: Vec<Value>,
        initialized: bool,
        terminal: bool,
        is_static: bool,
        want: PodPhase,
    }

    fn case(name: &'static str, policy: &'static str, regular: Vec<Value>, want: PodPhase) -> Case {
        Case {
            name,
            policy,
            init: vec![],
            regular,
            initialized: false,
            terminal: false,
            is_static: false,
            want,
        }
    }

    #[test]
    fn every_row_of_the_phase_table_holds() {
        use PodPhase::{Failed, Pending, Running, Succeeded};
        let with_init =
            |name, policy, init, regular, want| Case { init, ..case(name, policy, regular, want) };
        let fresh = || waiting("PodInitializing");
        let cases = vec![
            case("nothing created yet", "Always", vec![waiting("ContainerCreating"); 2], Pending),
            case("one of two created but not started", "Always", vec![running(), waiting("")], Pending),
            case("both crash looping under Always", "Always", vec![again("CrashLoopBackOff", 1); 2], Running),
            case(
                "OnFailure, one ended well, one backs off",
                "OnFailure",
                vec![ended(0), again("CrashLoopBackOff", 1)],
                Running,
            ),
            case("OnFailure, all ended well", "OnFailure", vec![ended(0), ended(0)], Succeeded),
            case("OnFailure, one failed", "OnFailure", vec![ended(0), ended(1)], Running),
            case("Never, 0 and 1", "Never", vec![ended(0), ended(1)], Failed),
            case("Never, 0 and 0", "Never", vec![ended(0), ended(0)], Succeeded),
            case("Never, one runs, one failed", "Never", vec![running(), ended(1)], Running),
            case("Always, all ended well", "Always", vec![ended(0)], Running),
            case("all run", "Always", vec![running(), running()], Running),
            case("image cannot be pulled, first start", "Always", vec![waiting("ErrImagePull")], Pending),
            case("image cannot be pulled after an exit", "Always", vec![again("ErrImagePull", 1)], Running),
            case("gone from the runtime under Never", "Never", vec![again("ContainerCreating", 137)], Failed),
            case(
                "gone from the runtime under OnFailure",
                "OnFailure",
                vec![again("ContainerCreating", 137)],
                Running,
            ),
            case("one of two has no entry", "Always", vec![running(), Value::Null], Pending),
            case("no entry at all", "Always", vec![Value::Null], Pending),
            case("a status without a state", "Always", vec![json!({})], Pending),
            Case {
                terminal: true,
                ..case("deleting Always, all ended well", "Always", vec![ended(0), ended(0)], Succeeded)
            },
            Case {
                terminal: true,
                ..case("deleting Always, one failed", "Always", vec![ended(0), ended(137)], Failed)
            },
            Case {
                terminal: true,
                is_static: true,
                ..case("the same of a static pod", "Always", vec![ended(0)], Running)
            },
            Case {
                terminal: true,
                ..case("deleting a crash looping one", "Always", vec![again("CrashLoopBackOff", 0)], Failed)
            },
            with_init("init missing", "Always", vec![(false, Value::Null)], vec![fresh()], Pending),
            with_init("init running", "Always", vec![(false, running())], vec![fresh()], Pending),
            with_init(
                "init waiting for the first time",
                "Never",
                vec![(false, fresh())],
                vec![fresh()],
                Pending,
            ),
            with_init(
                "init failed under OnFailure",
                "OnFailure",
                vec![(false, ended(1))],
                vec![fresh()],
                Pending,
            ),
            with_init(
                "init backs off under Always",
                "Always",
                vec![(false, again("CrashLoopBackOff", 1))],
                vec![fresh()],
                Pending,
            ),
            with_init("init failed under Never", "Never", vec![(false, ended(1))], vec![fresh()], Failed),
            with_init(
                "init waits again after a failure under Never",
                "Never",
                vec![(false, again("x", 1))],
                vec![fresh()],
                Failed,
            ),
            with_init(
                "init OOMKilled with code 0 under Never",
                "Never",
                vec![(false, killed())],
                vec![fresh()],
                Failed,
            ),
            with_init(
                "init OOMKilled with code 0 under OnFailure",
                "OnFailure",
                vec![(false, killed())],
                vec![fresh()],
                Pending,
            ),
            with_init("init done", "Never", vec![(false, ended(0))], vec![running()], Running),
            with_init("init done, nothing started", "Never", vec![(false, ended(0))], vec![fresh()], Pending),
            with_init(
                "sidecar not started",
                "Always",
                vec![(true, unstarted())],
                vec![again("x", 1)],
                Pending,
            ),
            with_init("sidecar waiting", "Always", vec![(true, fresh())], vec![running()], Pending),
            with_init("sidecar missing", "Always", vec![(true, Value::Null)], vec![running()], Pending),
            with_init(
                "sidecar ended does not fail the pod",
                "Never",
                vec![(true, ended(1))],
                vec![ended(0)],
                Succeeded,
            ),
            with_init("sidecar keeps it running", "Never", vec![(true, running())], vec![ended(0)], Running),
            with_init("sidecar without a state", "Always", vec![(true, json!({}))], vec![running()], Pending),
            Case {
                initialized: true,
                ..with_init(
                    "sidecar restarting after init",
                    "Always",
                    vec![(true, unstarted())],
                    vec![running()],
                    Running,
                )
            },
        ];
        for c in cases {
            let init: Vec<Value> = c.init.iter().map(|(_, v)| v.clone()).collect();
            let mut p = pod_json(json!({
                "restartPolicy": c.policy,
                "containers": (0..c.regular.len()).map(|i| json!({"name": format!("c{i}"), "image": "i"})).collect::<Vec<_>>(),
                "initContainers": c.init.iter().enumerate().map(|(i, (sidecar, _))| {
                    let mut v = json!({"name": format!("i{i}"), "image": "i"});
                    if *sidecar { v["restartPolicy"] = json!("Always"); }
                    v
                }).collect::<Vec<_>>(),
            }));
            if c.is_static {
                p.metadata.annotations =
                    Some([("kubernetes.io/config.source".to_owned(), "file".to_owned())].into());
            }
            let got =
                pod_phase(&p, &statuses(&init, "i"), &statuses(&c.regular, "c"), c.initialized, c.terminal);
            assert_eq!(got, c.want, "{}", c.name);
        }
    }

    #[test]
    fn the_containers_own_rules_and_a_restart_of_all_keep_the_pod_running() {
        let p = pod_json(json!({"restartPolicy": "Never", "containers": [{"name": "c0", "image": "i",
            "restartPolicy": "Never", "restartPolicyRules":
                [{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]}]}));
        assert_eq!(pod_phase(&p, &[], &statuses(&[ended(42)], "c"), false, false), PodPhase::Running);
        assert_eq!(pod_phase(&p, &[], &statuses(&[ended(1)], "c"), false, false), PodPhase::Failed);
        let restarting =
            json!({"state": {"terminated": {"exitCode": 137, "reason": "RestartingAllContainers"}}});
        assert_eq!(pod_phase(&p, &[], &statuses(&[restarting], "c"), false, false), PodPhase::Running);
    }
}
