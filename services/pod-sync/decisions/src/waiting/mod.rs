//! What a pod waits for, in one list without an "other", and what was decided, in words.

mod explain;
mod failure;
mod status;

use std::collections::BTreeSet;
use std::time::Duration;

use super::backoff::go_duration;
use super::container_status::{CONTAINER_CREATING, POD_INITIALIZING};
use super::restart::RESTARTING_ALL;

pub use explain::explain;
pub use failure::StartFailure;
pub use status::{StartBackoff, StartBackoffs, WaitingFor, from_status};

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
    /// Nobody decided yet whether this node takes it.
    NotAdmitted {
        /// Who is to tell what first.
        what: &'static str,
    },
    /// What is left of an earlier pod of the same UID has to be gone first.
    PreviousPod,
    /// Another static pod of the same full name has to be gone first.
    StaticName {
        /// UID of the other.
        other: String,
    },
    /// Other pods are to go first, so that this one fits.
    Preempting {
        /// Their UIDs.
        victims: Vec<String>,
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
    /// The runtime refused to stop a container or a sandbox.
    StopFailing {
        /// Its text.
        message: String,
    },
    /// The runtime refused to remove a container or a sandbox.
    RemovalFailing {
        /// Its text.
        message: String,
    },
    /// Volumes could not be unmounted.
    VolumesUnmounting {
        /// Error.
        error: String,
    },
    /// The cgroup could not be removed.
    CgroupRemoval {
        /// Error.
        error: String,
    },
    /// The pod's directory could not be removed.
    DirectoriesRemoval {
        /// Error.
        error: String,
    },
    /// The API server has not got the last status yet.
    StatusWrite,
    /// The API server is to delete the object.
    FinalDelete,
    /// A resize that does not fit now; the pod runs with what it has.
    ResizeDeferred {
        /// Text.
        message: String,
    },
    /// A resize that this node never makes; the pod runs with what it has.
    ResizeInfeasible {
        /// Text.
        message: String,
    },
    /// A panic or a death of a process in the work of the pod; it is left alone for a while.
    InternalError {
        /// What happened.
        message: String,
    },
    /// Admission refused it; it stays until somebody deletes it.
    Rejected {
        /// Reason.
        reason: String,
        /// Text.
        message: String,
    },
}

/// The word of each wait, in one list that the compiler holds against the enum.
macro_rules! reasons {
    ($($pattern:pat => $word:expr,)*) => {
        /// One word, stable.
        #[must_use]
        pub fn reason(&self) -> &'static str {
            match self {
                Self::StartFailed { failure, .. } => failure.as_str(),
                $($pattern => $word,)*
            }
        }

        /// Every word that [`Self::reason`] has.
        #[must_use]
        pub fn reasons() -> BTreeSet<&'static str> {
            [$($word,)*].into_iter().chain(StartFailure::ALL.map(StartFailure::as_str)).collect()
        }
    };
}

impl Waiting {
    reasons! {
        Self::Runtime { .. } => "RuntimeNotRead",
        Self::Service { .. } => "ServiceNotReachable",
        Self::NotAdmitted { .. } => "NotAdmitted",
        Self::PreviousPod => "EarlierLifeEnding",
        Self::StaticName { .. } => "StaticPodNameTaken",
        Self::Preempting { .. } => "MakingRoom",
        Self::NetworkNotReady { .. } => "NetworkNotReady",
        Self::Cgroup { .. } => "CgroupFailing",
        Self::DataDirs { .. } => "DirectoriesFailing",
        Self::Volumes { .. } => "VolumesNotMounted",
        Self::SandboxCreating { .. } => "SandboxCreating",
        Self::SandboxFailing { .. } => "CreatePodSandboxError",
        Self::ImagePulling { .. } => "ImagePulling",
        Self::CrashLoop { .. } => "CrashLoopBackOff",
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
        Self::StopFailing { .. } => "StopFailing",
        Self::RemovalFailing { .. } => "RemovalFailing",
        Self::VolumesUnmounting { .. } => "VolumesUnmounting",
        Self::CgroupRemoval { .. } => "CgroupRemoval",
        Self::DirectoriesRemoval { .. } => "DirectoriesRemoval",
        Self::StatusWrite => "StatusNotWritten",
        Self::FinalDelete => "FinalDelete",
        Self::ResizeDeferred { .. } => "ResizeDeferred",
        Self::ResizeInfeasible { .. } => "ResizeInfeasible",
        Self::InternalError { .. } => "InternalError",
        Self::Rejected { .. } => "Refused",
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
            Self::NotAdmitted { what } => format!("not admitted yet: {what}"),
            Self::PreviousPod => "an earlier pod of the same UID is not gone yet".to_owned(),
            Self::StaticName { other } => format!("static pod {other} of the same name is not gone yet"),
            Self::Preempting { victims } => {
                format!("pods that make room are not gone: {}", victims.join(", "))
            }
            Self::NetworkNotReady { message } => format!("network is not ready: {message}"),
            Self::Cgroup { message } => format!("unable to ensure pod container exists: {message}"),
            Self::DataDirs { message } => format!("error making pod data directories: {message}"),
            Self::Volumes { unmounted, error } => {
                with(&format!("volumes not mounted: {}", unmounted.join(", ")), error)
            }
            Self::SandboxCreating { attempt } => format!("sandbox is being made, attempt {attempt}"),
            Self::SandboxFailing { message }
            | Self::StartFailed { message, .. }
            | Self::ResizeDeferred { message }
            | Self::ResizeInfeasible { message }
            | Self::InternalError { message }
            | Self::Rejected { message, .. } => message.clone(),
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
            Self::StopFailing { message } => format!("cannot be stopped: {message}"),
            Self::RemovalFailing { message } => format!("cannot be removed: {message}"),
            Self::VolumesUnmounting { error } => format!("volumes still mounted: {error}"),
            Self::CgroupRemoval { error } => format!("cgroup not removed: {error}"),
            Self::DirectoriesRemoval { error } => format!("directory not removed: {error}"),
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
            | Self::NotAdmitted { .. }
            | Self::PreviousPod
            | Self::StaticName { .. }
            | Self::Preempting { .. }
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
            | Self::StopFailing { .. }
            | Self::RemovalFailing { .. }
            | Self::VolumesUnmounting { .. }
            | Self::CgroupRemoval { .. }
            | Self::DirectoriesRemoval { .. }
            | Self::StatusWrite
            | Self::FinalDelete
            | Self::ResizeDeferred { .. }
            | Self::ResizeInfeasible { .. }
            | Self::InternalError { .. }
            | Self::Rejected { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests;
