//! What a pod waits for, in one list without an "other", and what was decided, in words.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use quintlet_model::pod;

use super::actions::{PodActions, SandboxDecision};
use super::backoff::go_duration;
use super::container_status::{CONTAINER_CREATING, POD_INITIALIZING, WaitingReason};
use super::restart::RESTARTING_ALL;
use super::{actions, conditions};

/// How a start failed: the reasons that become a container's waiting reason (pod-sync.md §6.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StartFailure {
    /// It exits again and again.
    CrashLoopBackOff,
    /// Pulling failed before, and is tried again later.
    ImagePullBackOff,
    /// Pulling failed.
    ErrImagePull,
    /// Not there, and the policy forbids pulling.
    ErrImageNeverPull,
    /// The reference cannot be read.
    InvalidImageName,
    /// The runtime cannot say whether it is there.
    ImageInspectError,
    /// The registry does not answer.
    RegistryUnavailable,
    /// The signature is wrong.
    SignatureValidationFailed,
    /// The config could not be made: a missing ConfigMap or Secret, a bad user…
    CreateContainerConfigError,
    /// Refused before it was created.
    PreCreateHookError,
    /// The runtime did not create it.
    CreateContainerError,
    /// Refused before it was started.
    PreStartHookError,
    /// The runtime did not start it.
    RunContainerError,
    /// Its postStart hook failed.
    PostStartHookError,
    /// Its image volume could not be mounted.
    ImageVolumeMountFailed,
    /// A recursive read-only mount is not supported.
    RroUnsupported,
}

impl StartFailure {
    /// All of them.
    pub const ALL: [Self; 16] = [
        Self::CrashLoopBackOff,
        Self::ImagePullBackOff,
        Self::ErrImagePull,
        Self::ErrImageNeverPull,
        Self::InvalidImageName,
        Self::ImageInspectError,
        Self::RegistryUnavailable,
        Self::SignatureValidationFailed,
        Self::CreateContainerConfigError,
        Self::PreCreateHookError,
        Self::CreateContainerError,
        Self::PreStartHookError,
        Self::RunContainerError,
        Self::PostStartHookError,
        Self::ImageVolumeMountFailed,
        Self::RroUnsupported,
    ];

    /// The reason in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::CrashLoopBackOff => "CrashLoopBackOff",
            Self::ImagePullBackOff => "ImagePullBackOff",
            Self::ErrImagePull => "ErrImagePull",
            Self::ErrImageNeverPull => "ErrImageNeverPull",
            Self::InvalidImageName => "InvalidImageName",
            Self::ImageInspectError => "ImageInspectError",
            Self::RegistryUnavailable => "RegistryUnavailable",
            Self::SignatureValidationFailed => "SignatureValidationFailed",
            Self::CreateContainerConfigError => "CreateContainerConfigError",
            Self::PreCreateHookError => "PreCreateHookError",
            Self::CreateContainerError => "CreateContainerError",
            Self::PreStartHookError => "PreStartHookError",
            Self::RunContainerError => "RunContainerError",
            Self::PostStartHookError => "PostStartHookError",
            Self::ImageVolumeMountFailed => "ImageVolumeMountFailed",
            Self::RroUnsupported => "RROUnsupported",
        }
    }

    /// Reads a reason.
    #[must_use]
    pub fn parse(reason: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.as_str() == reason)
    }

    /// For the overlay of the container's status.
    #[must_use]
    pub fn with_message(self, message: impl Into<String>) -> WaitingReason {
        WaitingReason { reason: self.as_str().to_owned(), message: message.into() }
    }
}

/// A hook that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Hook {
    /// After the start.
    PostStart,
    /// Before the stop.
    PreStop,
}

/// What a pod waits for. The driver sets those of its own steps, the rest follow from the status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Waiting {
    /// First inspection of the runtime, or one that failed. Entered when there is no usable record.
    Runtime {
        /// Error of the last one, if any.
        error: Option<String>,
    },
    /// One of the other services, or the API server, does not answer.
    Service {
        /// Its name.
        name: &'static str,
    },
    /// Another static pod of the same full name has to be gone first.
    StaticName {
        /// UID of the other.
        other: String,
    },
    /// The runtime's network.
    NetworkNotReady {
        /// The runtime's text.
        message: String,
    },
    /// The pod's cgroup could not be made.
    Cgroup {
        /// Error.
        message: String,
    },
    /// The pod's directories could not be made.
    DataDirs {
        /// Error.
        message: String,
    },
    /// Volumes.
    Volumes {
        /// Names of those that are missing.
        unmounted: Vec<String>,
        /// Last error, if any.
        error: Option<String>,
    },
    /// RunPodSandbox is under way.
    SandboxCreating {
        /// Attempt.
        attempt: u32,
    },
    /// The sandbox could not be made.
    SandboxFailing {
        /// Error.
        message: String,
    },
    /// An image is pulled.
    ImagePulling {
        /// Container.
        container: String,
        /// Image.
        image: String,
    },
    /// The end of a container's back-off.
    CrashLoop {
        /// Container.
        container: String,
        /// How it ended last.
        exit_code: i32,
        /// The whole delay.
        delay: Duration,
    },
    /// The next attempt after a start that failed.
    StartFailed {
        /// Container.
        container: String,
        /// How.
        failure: StartFailure,
        /// Text.
        message: String,
    },
    /// An init container is to end, or a sidecar to start.
    PodInitializing {
        /// Which.
        container: String,
    },
    /// A container that was not tried yet.
    ContainerCreating {
        /// Which.
        container: String,
    },
    /// A hook is to end.
    HookRunning {
        /// Container.
        container: String,
        /// Which.
        hook: Hook,
    },
    /// A startup probe.
    StartupProbe {
        /// Container.
        container: String,
    },
    /// A readiness probe.
    ReadinessProbe {
        /// Container.
        container: String,
    },
    /// Readiness gates; others set them.
    ReadinessGates {
        /// Condition types that are not True.
        gates: Vec<String>,
    },
    /// All containers are removed to be started again.
    RestartingAll,
    /// Containers are to stop within the grace period.
    Terminating {
        /// Those that run.
        containers: Vec<String>,
        /// Seconds in all.
        grace: i64,
    },
    /// Sandboxes are to stop.
    SandboxStopping,
    /// Volumes are unmounted.
    VolumesUnmounting {
        /// Names.
        mounted: Vec<String>,
    },
    /// The cgroup is removed.
    CgroupRemoval {
        /// Error, if any.
        error: Option<String>,
    },
    /// The API server has not got the last status yet.
    StatusWrite,
    /// The API server is to delete the object.
    FinalDelete,
    /// Admission refused it; it stays until somebody deletes it.
    Refused {
        /// Reason.
        reason: String,
        /// Text.
        message: String,
    },
}

impl Waiting {
    /// One word, stable.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Runtime { .. } => "RuntimeNotRead",
            Self::Service { .. } => "ServiceNotReachable",
            Self::StaticName { .. } => "StaticPodNameTaken",
            Self::NetworkNotReady { .. } => "NetworkNotReady",
            Self::Cgroup { .. } => "CgroupFailing",
            Self::DataDirs { .. } => "DirectoriesFailing",
            Self::Volumes { .. } => "VolumesNotMounted",
            Self::SandboxCreating { .. } => "SandboxCreating",
            Self::SandboxFailing { .. } => "CreatePodSandboxError",
            Self::ImagePulling { .. } => "ImagePulling",
            Self::CrashLoop { .. } => "CrashLoopBackOff",
            Self::StartFailed { failure, .. } => failure.as_str(),
            Self::PodInitializing { .. } => POD_INITIALIZING,
            Self::ContainerCreating { .. } => CONTAINER_CREATING,
            Self::HookRunning { hook: Hook::PostStart, .. } => "PostStartHook",
            Self::HookRunning { hook: Hook::PreStop, .. } => "PreStopHook",
            Self::StartupProbe { .. } => "StartupProbe",
            Self::ReadinessProbe { .. } => "ReadinessProbe",
            Self::ReadinessGates { .. } => "ReadinessGates",
            Self::RestartingAll => RESTARTING_ALL,
            Self::Terminating { .. } => "Terminating",
            Self::SandboxStopping => "SandboxStopping",
            Self::VolumesUnmounting { .. } => "VolumesUnmounting",
            Self::CgroupRemoval { .. } => "CgroupRemoval",
            Self::StatusWrite => "StatusNotWritten",
            Self::FinalDelete => "FinalDelete",
            Self::Refused { .. } => "Refused",
        }
    }

    /// A sentence without the times.
    #[must_use]
    pub fn message(&self) -> String {
        let with = |text: &str, error: &Option<String>| match error {
            Some(error) => format!("{text}: {error}"),
            None => text.to_owned(),
        };
        match self {
            Self::Runtime { error } => with("the runtime has not been read", error),
            Self::Service { name } => format!("{name} does not answer"),
            Self::StaticName { other } => format!("static pod {other} of the same name is not gone yet"),
            Self::NetworkNotReady { message } => format!("network is not ready: {message}"),
            Self::Cgroup { message } => format!("unable to ensure pod container exists: {message}"),
            Self::DataDirs { message } => format!("error making pod data directories: {message}"),
            Self::Volumes { unmounted, error } => {
                with(&format!("volumes not mounted: {}", unmounted.join(", ")), error)
            }
            Self::SandboxCreating { attempt } => format!("sandbox is being made, attempt {attempt}"),
            Self::SandboxFailing { message }
            | Self::StartFailed { message, .. }
            | Self::Refused { message, .. } => message.clone(),
            Self::ImagePulling { image, .. } => format!("pulling image {image:?}"),
            Self::CrashLoop { exit_code, delay, .. } => {
                format!("restart after exit {exit_code}, back-off {}", go_duration(*delay))
            }
            Self::PodInitializing { container } => format!("init container {container} is not done"),
            Self::ContainerCreating { container } => format!("container {container} is not started yet"),
            Self::HookRunning { container, hook: Hook::PostStart } => {
                format!("postStart hook of {container} runs")
            }
            Self::HookRunning { container, hook: Hook::PreStop } => {
                format!("preStop hook of {container} runs")
            }
            Self::StartupProbe { container } => format!("startup probe of {container} has not succeeded"),
            Self::ReadinessProbe { container } => format!("readiness probe of {container} does not succeed"),
            Self::ReadinessGates { gates } => format!("readiness gates not open: {}", gates.join(", ")),
            Self::RestartingAll => "all containers are restarted".to_owned(),
            Self::Terminating { containers, grace } => {
                format!("stopping {}, grace {grace}s", containers.join(", "))
            }
            Self::SandboxStopping => "sandbox is being stopped".to_owned(),
            Self::VolumesUnmounting { mounted } => format!("volumes still mounted: {}", mounted.join(", ")),
            Self::CgroupRemoval { error } => with("cgroup is being removed", error),
            Self::StatusWrite => "the API server has not got the last status".to_owned(),
            Self::FinalDelete => "the API server is to delete the object".to_owned(),
        }
    }

    /// The container it is about.
    #[must_use]
    pub fn container(&self) -> Option<&str> {
        match self {
            Self::ImagePulling { container, .. }
            | Self::CrashLoop { container, .. }
            | Self::StartFailed { container, .. }
            | Self::PodInitializing { container }
            | Self::ContainerCreating { container }
            | Self::HookRunning { container, .. }
            | Self::StartupProbe { container }
            | Self::ReadinessProbe { container } => Some(container),
            Self::Runtime { .. }
            | Self::Service { .. }
            | Self::StaticName { .. }
            | Self::NetworkNotReady { .. }
            | Self::Cgroup { .. }
            | Self::DataDirs { .. }
            | Self::Volumes { .. }
            | Self::SandboxCreating { .. }
            | Self::SandboxFailing { .. }
            | Self::ReadinessGates { .. }
            | Self::RestartingAll
            | Self::Terminating { .. }
            | Self::SandboxStopping
            | Self::VolumesUnmounting { .. }
            | Self::CgroupRemoval { .. }
            | Self::StatusWrite
            | Self::FinalDelete
            | Self::Refused { .. } => None,
        }
    }
}

/// A wait and its times.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingFor {
    /// For what.
    pub what: Waiting,
    /// Since when.
    pub since: Option<jiff::Timestamp>,
    /// It ends then at the latest; `None`: no fixed time.
    pub until: Option<jiff::Timestamp>,
}

/// A start that is held back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hold {
    /// Time left.
    pub remaining: Duration,
    /// The whole delay.
    pub delay: Duration,
}

/// Starts held back, by container name.
pub type Holds = BTreeMap<String, Hold>;

fn later(now: jiff::Timestamp, by: Duration) -> Option<jiff::Timestamp> {
    now.checked_add(jiff::SignedDuration::try_from(by).ok()?).ok()
}

/// What the status of a pod says it waits for: the first thing in the order in which things happen. A terminal pod waits
/// for nothing.
#[must_use]
pub fn from_status(pod: &Pod, status: &PodStatus, holds: &Holds, now: jiff::Timestamp) -> Option<WaitingFor> {
    if pod::is_terminal_phase(status.phase.as_deref()) {
        return None;
    }
    let start = status.start_time.as_ref().map(|t| t.0);
    let restarting = status
        .conditions
        .iter()
        .flatten()
        .find(|c| c.type_ == conditions::ALL_CONTAINERS_RESTARTING && c.status == "True");
    if let Some(c) = restarting {
        let since = c.last_transition_time.as_ref().map(|t| t.0);
        return Some(WaitingFor { what: Waiting::RestartingAll, since, until: None });
    }
    let find = |list: &Option<Vec<ContainerStatus>>, name: &str| {
        list.iter().flatten().find(|s| s.name == name).cloned()
    };
    let inits = || {
        pod::init_containers(pod)
            .iter()
            .filter_map(|c| Some((c, find(&status.init_container_statuses, &c.name)?)))
    };
    for (c, s) in inits() {
        let sidecar = pod::is_sidecar(c);
        let done = if sidecar { s.started == Some(true) } else { s.ready };
        if done {
            continue;
        }
        // A plain one has no probes: while it runs, its end is what is waited for.
        let running = s.state.as_ref().is_some_and(|s| s.running.is_some());
        let own = if running && !sidecar { None } else { of_container(&s, holds, now, start) };
        return own.or_else(|| {
            let what = Waiting::PodInitializing { container: c.name.clone() };
            Some(WaitingFor { what, since: since_of(&s).or(start), until: None })
        });
    }
    let regular = pod::spec(pod).containers.iter().filter_map(|c| find(&status.container_statuses, &c.name));
    // A started sidecar holds up nobody, but the pod is not Ready before it is.
    let sidecars = inits().filter(|(c, _)| pod::is_sidecar(c)).map(|(_, s)| s);
    if let Some(w) = regular.chain(sidecars).find_map(|s| of_container(&s, holds, now, start)) {
        return Some(w);
    }
    let true_condition =
        |name: &str| status.conditions.iter().flatten().any(|c| c.type_ == name && c.status == "True");
    let gates: Vec<String> = pod::spec(pod)
        .readiness_gates
        .iter()
        .flatten()
        .map(|g| g.condition_type.clone())
        .filter(|g| !true_condition(g))
        .collect();
    if gates.is_empty() {
        return None;
    }
    let since = status
        .conditions
        .iter()
        .flatten()
        .find(|c| c.type_ == conditions::READY)
        .and_then(|c| c.last_transition_time.as_ref())
        .map(|t| t.0);
    Some(WaitingFor { what: Waiting::ReadinessGates { gates }, since, until: None })
}

fn since_of(s: &ContainerStatus) -> Option<jiff::Timestamp> {
    let state = s.state.as_ref()?;
    if let Some(running) = &state.running {
        return running.started_at.as_ref().map(|t| t.0);
    }
    let ended = state.terminated.as_ref().or_else(|| s.last_state.as_ref()?.terminated.as_ref());
    ended.and_then(|t| t.finished_at.as_ref()).map(|t| t.0)
}

fn of_container(
    s: &ContainerStatus,
    holds: &Holds,
    now: jiff::Timestamp,
    start: Option<jiff::Timestamp>,
) -> Option<WaitingFor> {
    let container = s.name.clone();
    let since = since_of(s).or(start);
    let hold = holds.get(&s.name);
    let until = hold.and_then(|h| later(now, h.remaining));
    let state = s.state.as_ref()?;
    let ended = state.terminated.as_ref().or_else(|| s.last_state.as_ref()?.terminated.as_ref());
    let what = if let Some(w) = &state.waiting {
        let reason = w.reason.as_deref().unwrap_or_default();
        let message = w.message.clone().unwrap_or_default();
        match StartFailure::parse(reason) {
            Some(StartFailure::CrashLoopBackOff) | None if hold.is_some() => Waiting::CrashLoop {
                container,
                exit_code: ended.map_or(0, |t| t.exit_code),
                delay: hold.map_or(Duration::ZERO, |h| h.delay),
            },
            Some(failure) => Waiting::StartFailed { container, failure, message },
            None if reason == RESTARTING_ALL => Waiting::RestartingAll,
            // Nobody gets to a regular container before init is done, which was looked at first.
            None => Waiting::ContainerCreating { container },
        }
    } else if state.running.is_some() {
        if s.started != Some(true) {
            Waiting::StartupProbe { container }
        } else if !s.ready {
            Waiting::ReadinessProbe { container }
        } else {
            return None;
        }
    } else {
        let hold = hold?;
        Waiting::CrashLoop { container, exit_code: ended.map_or(0, |t| t.exit_code), delay: hold.delay }
    };
    Some(WaitingFor { what, since, until })
}

/// What was decided, a line each; nothing to do is one line too.
#[must_use]
pub fn explain(pod: &Pod, actions: &PodActions, sandbox: &SandboxDecision, holds: &Holds) -> Vec<String> {
    let spec = pod::spec(pod);
    let mut lines = Vec::new();
    if actions.kill_pod && !actions.create_sandbox {
        lines.push("stop the pod: nothing in it is to run again".to_owned());
    }
    if actions.create_sandbox {
        let why = match sandbox {
            SandboxDecision::Keep { .. } => "",
            SandboxDecision::Create { why, .. } => match why {
                actions::SandboxChange::None => "there is none",
                actions::SandboxChange::SeveralReady => "more than one is ready",
                actions::SandboxChange::NotReady => "the newest is not ready",
                actions::SandboxChange::NetworkMode => "its network mode differs from the spec",
                actions::SandboxChange::NoAddress => "it has no address",
            },
        };
        lines.push(format!("make sandbox, attempt {}: {why}", actions.attempt));
    }
    lines.extend(actions.to_kill.iter().map(|k| format!("kill {}: {}", k.name, k.message)));
    lines.extend(actions.reset.iter().map(|r| {
        format!(
            "{} {} ({}) to restart all containers",
            if r.kill { "kill and remove" } else { "remove" },
            r.name,
            r.id
        )
    }));
    let start = |kind: &str, name: &str| match holds.get(name) {
        Some(h) => format!("start {kind}{name} at +{:.1}s", h.remaining.as_secs_f64()),
        None => format!("start {kind}{name}"),
    };
    let ephemeral: Vec<_> = spec.ephemeral_containers.iter().flatten().map(|c| &c.name).collect();
    let name = |list: &[&String], i: usize| list.get(i).map_or_else(String::new, |n| (*n).clone());
    let inits: Vec<_> = pod::init_containers(pod).iter().map(|c| &c.name).collect();
    let regular: Vec<_> = spec.containers.iter().map(|c| &c.name).collect();
    lines.extend(actions.ephemeral_to_start.iter().map(|i| start("ephemeral ", &name(&ephemeral, *i))));
    lines.extend(actions.init_to_start.iter().map(|i| start("init ", &name(&inits, *i))));
    lines.extend(actions.to_start.iter().map(|i| start("", &name(&regular, *i))));
    if lines.is_empty() {
        lines.push("keep everything as it is".to_owned());
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::actions::{ActionInput, compute_actions, sandbox_decision};
    use crate::decide::probes::ProbeView;
    use crate::decide::testing::{RuntimeBuilder, at, pod_json, status_json};
    use serde_json::{Value, json};

    fn status(list: Value, init: Value) -> PodStatus {
        let fill = |l: Value| {
            l.as_array()
                .unwrap()
                .iter()
                .map(|s| {
                    let mut all = json!({"image": "", "imageID": "", "ready": false, "restartCount": 0});
                    all.as_object_mut().unwrap().extend(s.as_object().unwrap().clone());
                    all
                })
                .collect::<Vec<_>>()
        };
        status_json(json!({"phase": "Pending", "startTime": "2026-01-01T00:00:00Z",
            "containerStatuses": fill(list), "initContainerStatuses": fill(init)}))
    }

    fn pod() -> Pod {
        pod_json(json!({"containers": [{"name": "c", "image": "i"}],
            "initContainers": [{"name": "n", "image": "i"}, {"name": "s", "image": "i", "restartPolicy": "Always"}]}))
    }

    fn hold(seconds: u64, delay: u64) -> Hold {
        Hold { remaining: Duration::from_secs(seconds), delay: Duration::from_secs(delay) }
    }

    #[test]
    fn the_first_thing_in_the_way_is_named() {
        let waits = |reason: &str| json!({"waiting": {"reason": reason, "message": "m"}});
        let done = json!({"name": "n", "ready": true, "state": {"terminated": {"exitCode": 0}}});
        let sidecar = json!({"name": "s", "ready": true, "started": true, "state": {"running": {}}});
        let runs = |started: bool, ready: bool| json!({"name": "c", "started": started, "ready": ready, "state": {"running": {"startedAt": "2026-01-01T00:00:07Z"}}});
        let c = |state: Value| json!([{"name": "c", "state": state}]);
        let fresh = || c(waits("PodInitializing"));
        let inits = || json!([done, sidecar]);
        for (name, regular, init, want) in [
            (
                "init fails",
                fresh(),
                json!([{"name": "n", "state": waits("ErrImagePull")}]),
                Some(("ErrImagePull", "n")),
            ),
            (
                "init runs",
                fresh(),
                json!([{"name": "n", "started": true, "ready": true, "state": {"terminated": {"exitCode": 0}}}, {"name": "s", "started": false, "state": {"running": {}}}]),
                Some(("StartupProbe", "s")),
            ),
            (
                "init ended badly",
                fresh(),
                json!([{"name": "n", "state": {"terminated": {"exitCode": 1}}}]),
                Some(("PodInitializing", "n")),
            ),
            (
                "plain init runs",
                fresh(),
                json!([{"name": "n", "started": true, "state": {"running": {}}}]),
                Some(("PodInitializing", "n")),
            ),
            (
                "sidecar not ready",
                json!([runs(true, true)]),
                json!([done, {"name": "s", "started": true, "state": {"running": {}}}]),
                Some(("ReadinessProbe", "s")),
            ),
            ("not tried yet", fresh(), inits(), Some(("ContainerCreating", "c"))),
            ("no image", c(waits("ImagePullBackOff")), inits(), Some(("ImagePullBackOff", "c"))),
            ("startup", json!([runs(false, false)]), inits(), Some(("StartupProbe", "c"))),
            ("readiness", json!([runs(true, false)]), inits(), Some(("ReadinessProbe", "c"))),
            ("ready", json!([runs(true, true)]), inits(), None),
            ("ended", c(json!({"terminated": {"exitCode": 0}})), inits(), None),
        ] {
            let got = from_status(&pod(), &status(regular, init), &Holds::new(), at(9));
            let short = got.as_ref().map(|w| (w.what.reason(), w.what.container().unwrap()));
            assert_eq!(short, want, "{name}");
        }
        let got =
            from_status(&pod(), &status(json!([runs(true, false)]), inits()), &Holds::new(), at(9)).unwrap();
        assert_eq!((got.since, got.until), (Some(at(7)), None));
        let mut ended = status(fresh(), inits());
        ended.phase = Some("Failed".into());
        assert_eq!(from_status(&pod(), &ended, &Holds::new(), at(9)), None);
    }

    #[test]
    fn a_back_off_has_an_end() {
        let p = pod_json(json!({"containers": [{"name": "c", "image": "i"}]}));
        let s = status(
            json!([{"name": "c", "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "m"}},
                "lastState": {"terminated": {"exitCode": 3, "finishedAt": "2026-01-01T00:00:05Z"}}}]),
            json!([]),
        );
        let holds = Holds::from([("c".to_owned(), hold(36, 40))]);
        let got = from_status(&p, &s, &holds, at(9)).unwrap();
        assert_eq!(got.what.reason(), "CrashLoopBackOff");
        assert_eq!(got.what.message(), "restart after exit 3, back-off 40s");
        assert_eq!((got.since, got.until), (Some(at(5)), Some(at(45))));
    }

    #[test]
    fn readiness_gates_come_last() {
        let p = pod_json(json!({"containers": [], "readinessGates": [{"conditionType": "x/y"}]}));
        let got = from_status(&p, &status(json!([]), json!([])), &Holds::new(), at(0)).unwrap();
        assert_eq!(got.what, Waiting::ReadinessGates { gates: vec!["x/y".into()] });
    }

    #[test]
    fn every_start_failure_reads_back() {
        for failure in StartFailure::ALL {
            assert_eq!(StartFailure::parse(failure.as_str()), Some(failure));
        }
        assert_eq!(StartFailure::parse("ContainerCreating"), None);
    }

    #[test]
    fn a_decision_reads_as_what_will_be_done() {
        let explained = |p: &Pod, r: RuntimeBuilder, holds: &Holds| {
            let runtime = r.build();
            let probes = ProbeView::default();
            let input = ActionInput { pod: p, runtime: &runtime, probes: &probes, restart_all: false };
            explain(p, &compute_actions(&input), &sandbox_decision(p, &runtime), holds)
        };
        let p = pod_json(json!({"containers": [{"name": "c", "image": "i"}]}));
        let none = Holds::new();
        assert_eq!(
            explained(&p, RuntimeBuilder::none(), &none),
            ["make sandbox, attempt 0: there is none", "start c"]
        );
        assert_eq!(explained(&p, RuntimeBuilder::ready().running("c"), &none), ["keep everything as it is"]);
        let holds = Holds::from([(
            "c".to_owned(),
            Hold { remaining: Duration::from_millis(35_800), delay: Duration::from_secs(40) },
        )]);
        assert_eq!(explained(&p, RuntimeBuilder::ready().exited("c", 3), &holds), ["start c at +35.8s"]);
        assert_eq!(
            explained(&p, RuntimeBuilder::ready().running("c").edit(|c| c.annotations.clear()), &none),
            ["kill c: Container c definition changed, will be restarted", "start c"]
        );
        let never = pod_json(json!({"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}));
        assert_eq!(
            explained(&never, RuntimeBuilder::ready().exited("c", 0), &none),
            ["stop the pod: nothing in it is to run again"]
        );
        assert_eq!(explained(&pod(), RuntimeBuilder::ready(), &none), ["start init n"]);
    }
}
