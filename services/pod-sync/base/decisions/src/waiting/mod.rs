//! All reasons for which a pod waits, and descriptions of the actions of a sync.

mod explain;
mod failure;
mod status;

use std::collections::BTreeSet;

use quintlet_model::go_duration;
use std::time::Duration;

use super::container_status::{CONTAINER_CREATING, POD_INITIALIZING};
use super::restart::RESTARTING_ALL;

pub use explain::explain;
pub use failure::StartFailure;
pub use status::{StartBackoff, StartBackoffs, WaitingFor, from_status};

/// A lifecycle hook in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Hook {
    /// The container runs, and its hook delays the start of the next container.
    PostStart,
    /// The container runs, and its hook delays the stop signal.
    PreStop,
}

/// The reason for which a pod waits. The worker sets the variants of its own steps; the others are derived
/// from the status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Waiting {
    /// Runtime state has not been inspected yet, or the inspection failed.
    Runtime {
        /// Error of the last inspection.
        error: Option<String>,
    },
    /// Another service, or the API server, does not answer.
    Service {
        /// Name of the service, as in its command line; `API server` for that one.
        name: &'static str,
    },
    /// Admission has not been decided yet.
    NotAdmitted {
        /// Description of the missing input.
        what: &'static str,
    },
    /// A previous pod with the same UID has not terminated yet.
    PreviousPod,
    /// Another static pod with the same full name has not terminated yet.
    StaticName {
        /// UID of the other pod.
        other: String,
    },
    /// Pods that are preempted for this one have not terminated yet.
    Preempting {
        /// UIDs of the pods that still run.
        victims: Vec<String>,
    },
    /// The plugin of a device has not registered, or has not listed its devices; or the devices are being
    /// allocated.
    Devices {
        /// Names of the resources, with the socket or the absence of each plugin.
        plugins: String,
    },
    /// The CPUs and the memory of the pod could not be recorded.
    Placement {
        /// Error of the last attempt.
        error: String,
    },
    /// The claims of the pod are being prepared, or could not be.
    Claims {
        /// Names of the claims, with their drivers if they are known.
        claims: String,
        /// Error of the last attempt.
        error: Option<String>,
    },
    /// The runtime reports that pods cannot have a network, and the pod needs one.
    NetworkNotReady {
        /// The runtime's message.
        message: String,
    },
    /// The pod's cgroup could not be created.
    Cgroup {
        /// Error of the last attempt.
        message: String,
    },
    /// The pod's directories could not be created.
    DataDirs {
        /// Error of the last attempt.
        message: String,
    },
    /// Volumes of the pod are not set up, attached or mounted.
    Volumes {
        /// Names of the volumes that are not mounted.
        unmounted: Vec<String>,
        /// The last error.
        error: Option<String>,
    },
    /// RunPodSandbox is in progress.
    SandboxCreating {
        /// Number of the sandbox, which starts at 0 for each pod.
        attempt: u32,
    },
    /// The sandbox could not be created.
    SandboxFailing {
        /// Error of the last attempt.
        message: String,
    },
    /// The runtime pulls an image.
    ImagePulling {
        /// Name in the spec.
        container: String,
        /// The image in the spec.
        image: String,
    },
    /// Crash-loop back-off of a container.
    CrashLoop {
        /// Name in the spec.
        container: String,
        /// Exit code of the last instance.
        exit_code: i32,
        /// Length of the whole back-off.
        delay: Duration,
    },
    /// The next attempt after a failed start.
    StartFailed {
        /// Name in the spec.
        container: String,
        /// The step that failed.
        failure: StartFailure,
        /// Error of the last attempt.
        message: String,
    },
    /// An init container has not completed, or a sidecar has not started.
    PodInitializing {
        /// Name of the container in the spec.
        container: String,
    },
    /// A container was not started yet.
    ContainerCreating {
        /// Name in the spec.
        container: String,
    },
    /// A lifecycle hook runs and has not answered.
    HookRunning {
        /// Name in the spec.
        container: String,
        /// The hook in progress.
        hook: Hook,
    },
    /// The startup probe of a running container has not succeeded.
    StartupProbe {
        /// Name in the spec.
        container: String,
    },
    /// The readiness probe of a running container fails, or has not run.
    ReadinessProbe {
        /// Name in the spec.
        container: String,
    },
    /// Readiness gates, which other clients set.
    ReadinessGates {
        /// Condition types that are not True.
        gates: Vec<String>,
    },
    /// All containers are removed before they restart.
    RestartingAll,
    /// Containers stop within the grace period.
    Terminating {
        /// Names of the running containers.
        containers: Vec<String>,
        /// The whole grace period, in seconds.
        grace: i64,
    },
    /// All containers have stopped. StopPodSandbox is in progress.
    SandboxStopping,
    /// The runtime failed to stop a container or a sandbox.
    StopFailing {
        /// Error of the last attempt.
        message: String,
    },
    /// The runtime failed to remove a container or a sandbox.
    RemovalFailing {
        /// Error of the last attempt.
        message: String,
    },
    /// The claims of the pod could not be unprepared.
    ClaimsUnpreparing {
        /// Error of the last attempt.
        error: String,
    },
    /// Volumes could not be unmounted.
    VolumesUnmounting {
        /// Error of the last attempt.
        error: String,
    },
    /// The cgroup could not be removed.
    CgroupRemoval {
        /// Error of the last attempt.
        error: String,
    },
    /// The pod's directory could not be removed.
    DirectoriesRemoval {
        /// Error of the last attempt.
        error: String,
    },
    /// The API server does not have the last status yet.
    StatusWrite {
        /// The API server's answer, if it declined the write.
        declined: Option<String>,
    },
    /// The API server has not deleted the object yet.
    FinalDelete {
        /// The API server's answer, if it declined the deletion.
        declined: Option<String>,
    },
    /// A resize is deferred; the pod keeps its allocated resources.
    ResizeDeferred {
        /// Message of the condition PodResizePending.
        message: String,
    },
    /// A resize is infeasible; the pod keeps its allocated resources.
    ResizeInfeasible {
        /// Message of the condition PodResizePending.
        message: String,
    },
    /// The work of the pod panicked or crashed a process, and the pod is suspended.
    InternalError {
        /// Message of the panic, or description of the crash.
        message: String,
    },
    /// Admission rejected the pod; it stays until it is deleted.
    Rejected {
        /// `status.reason`, for example `NodeAffinity` or `OutOfcpu`.
        reason: String,
        /// `status.message`.
        message: String,
    },
}

// Defines the reason of each variant once, so that `reason` and `reasons` cannot differ.
macro_rules! reasons {
    ($($pattern:pat => $word:expr,)*) => {
        /// Returns the reason: one stable word.
        #[must_use]
        pub fn reason(&self) -> &'static str {
            match self {
                Self::StartFailed { failure, .. } => failure.as_str(),
                $($pattern => $word,)*
            }
        }

        /// Returns every value of [`Self::reason`].
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
        Self::PreviousPod => "PreviousPodTerminating",
        Self::StaticName { .. } => "StaticPodNameTaken",
        Self::Preempting { .. } => "PreemptingPods",
        Self::Devices { .. } => "DevicesNotAllocated",
        Self::Placement { .. } => "ResourcesNotRecorded",
        Self::Claims { .. } => "ClaimsNotPrepared",
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
        Self::ClaimsUnpreparing { .. } => "ClaimsUnpreparing",
        Self::VolumesUnmounting { .. } => "VolumesUnmounting",
        Self::CgroupRemoval { .. } => "CgroupRemoval",
        Self::DirectoriesRemoval { .. } => "DirectoriesRemoval",
        Self::StatusWrite { .. } => "StatusNotWritten",
        Self::FinalDelete { .. } => "FinalDelete",
        Self::ResizeDeferred { .. } => "ResizeDeferred",
        Self::ResizeInfeasible { .. } => "ResizeInfeasible",
        Self::InternalError { .. } => "InternalError",
        Self::Rejected { .. } => "Refused",
    }

    /// Returns a description without times.
    #[must_use]
    pub fn message(&self) -> String {
        let with = |text: &str, error: &Option<String>| match error {
            Some(error) => format!("{text}: {error}"),
            None => text.to_owned(),
        };
        match self {
            Self::Runtime { error } => with("runtime state has not been inspected yet", error),
            Self::Service { name } => format!("{name} does not respond"),
            Self::NotAdmitted { what } => format!("not admitted yet: {what}"),
            Self::PreviousPod => "a previous pod with the same UID has not terminated yet".to_owned(),
            Self::StaticName { other } => {
                format!("static pod {other} with the same name has not terminated yet")
            }
            Self::Preempting { victims } => {
                format!("preempted pods have not terminated yet: {}", victims.join(", "))
            }
            Self::Devices { plugins } => format!("device plugin of {plugins} has not provided the devices"),
            Self::Placement { error } => error.clone(),
            Self::Claims { claims, error } => {
                with(&format!("resource claims are not prepared: {claims}"), error)
            }
            Self::NetworkNotReady { message } => format!("network is not ready: {message}"),
            Self::Cgroup { message } => format!("unable to ensure pod container exists: {message}"),
            Self::DataDirs { message } => format!("error making pod data directories: {message}"),
            Self::Volumes { unmounted, error } => {
                with(&format!("volumes not mounted: {}", unmounted.join(", ")), error)
            }
            Self::SandboxCreating { attempt } => format!("sandbox is being created, attempt {attempt}"),
            Self::SandboxFailing { message }
            | Self::StartFailed { message, .. }
            | Self::ResizeDeferred { message }
            | Self::ResizeInfeasible { message }
            | Self::InternalError { message }
            | Self::Rejected { message, .. } => message.clone(),
            Self::ImagePulling { image, .. } => format!("pulling image {image:?}"),
            Self::CrashLoop { exit_code, delay, .. } => {
                format!("restart after exit {exit_code}, back-off {}", go_duration::format(*delay))
            }
            Self::PodInitializing { container } => format!("init container {container} has not completed"),
            Self::ContainerCreating { container } => format!("container {container} is not started yet"),
            Self::HookRunning { container, hook: Hook::PostStart } => {
                format!("postStart hook of {container} is running")
            }
            Self::HookRunning { container, hook: Hook::PreStop } => {
                format!("preStop hook of {container} is running")
            }
            Self::StartupProbe { container } => format!("startup probe of {container} has not succeeded"),
            Self::ReadinessProbe { container } => format!("readiness probe of {container} has not succeeded"),
            Self::ReadinessGates { gates } => format!("readiness gates are not True: {}", gates.join(", ")),
            Self::RestartingAll => "all containers are restarted".to_owned(),
            Self::Terminating { containers, grace } => {
                format!("stopping {}, grace {grace}s", containers.join(", "))
            }
            Self::SandboxStopping => "sandbox is being stopped".to_owned(),
            Self::StopFailing { message } => format!("failed to stop: {message}"),
            Self::RemovalFailing { message } => format!("failed to remove: {message}"),
            Self::ClaimsUnpreparing { error } => format!("resource claims are still prepared: {error}"),
            Self::VolumesUnmounting { error } => format!("volumes still mounted: {error}"),
            Self::CgroupRemoval { error } => format!("failed to remove cgroup: {error}"),
            Self::DirectoriesRemoval { error } => format!("failed to remove directory: {error}"),
            Self::StatusWrite { declined } => {
                with("the API server does not have the last status yet", declined)
            }
            Self::FinalDelete { declined } => with("the API server has not deleted the object yet", declined),
        }
    }

    /// Returns the name of the container that it concerns.
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
            | Self::Devices { .. }
            | Self::Placement { .. }
            | Self::Claims { .. }
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
            | Self::ClaimsUnpreparing { .. }
            | Self::VolumesUnmounting { .. }
            | Self::CgroupRemoval { .. }
            | Self::DirectoriesRemoval { .. }
            | Self::StatusWrite { .. }
            | Self::FinalDelete { .. }
            | Self::ResizeDeferred { .. }
            | Self::ResizeInfeasible { .. }
            | Self::InternalError { .. }
            | Self::Rejected { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests;
