//! Results of a pass of a pod worker.

use std::time::Duration;

use pod_sync_clients::CallError;
use pod_sync_decisions::waiting;
use quintlet_model::ids::PodRef;
use quintlet_telemetry::propagate;
use tracing::Span;

/// The continuation after a pass.
#[derive(Debug)]
pub(crate) enum NextPass {
    /// Another pass at once.
    Again,
    /// There is nothing to do. The next pass runs after this time, after the resync period, or when the
    /// worker is woken.
    Idle(Option<Duration>),
    /// The current phase (sync, terminating, terminated, finished) is complete.
    Advance,
}

/// The cause of an early end of a pass.
#[derive(Debug)]
pub enum Halt {
    /// A call was interrupted or could not be made, so its outcome is unknown. No event and no back-off.
    Interrupted(String),
    /// Something about this pod failed; the next pass retries.
    Failed {
        /// Error text, shown by `explain`.
        error: String,
        /// The wait of the pod from now on.
        waiting: waiting::Waiting,
        /// Time until the next pass; none for the default.
        after: Option<Duration>,
    },
    /// The runtime's network is not ready.
    NetworkNotReady(String),
    /// The sync was cancelled before it reached the runtime.
    Cancelled,
}

impl Halt {
    pub(super) fn failed(waiting: waiting::Waiting, error: impl std::fmt::Display) -> Self {
        Self::Failed { error: error.to_string(), waiting, after: None }
    }

    pub(super) fn after(self, wait: Duration) -> Self {
        match self {
            Self::Failed { error, waiting, .. } => Self::Failed { error, waiting, after: Some(wait) },
            other @ (Self::Interrupted(_) | Self::NetworkNotReady(_) | Self::Cancelled) => other,
        }
    }

    /// Maps a refusal by the runtime to a failure of the pod, any other error to an interruption.
    pub(super) fn of(error: &CallError, call: RuntimeCall) -> Self {
        if error.is_refused_by_runtime() { Self::refused(error, call) } else { Self::interrupted(error) }
    }

    /// Returns a failure because the runtime refused a call; the pod waits and tries again.
    pub(super) fn refused(error: &CallError, call: RuntimeCall) -> Self {
        Self::failed(call.waiting(error.message.clone()), format!("{}: {error}", call.name()))
    }

    /// Returns the interruption of a call whose outcome is unknown.
    pub(super) fn interrupted(error: &CallError) -> Self {
        Self::Interrupted(format!("{} {}: {error}", error.method, error.outcome))
    }
}

/// Records the cause of an early end in the span of a pass or of its actions. A pass that was cancelled has
/// not failed.
pub(super) fn record_halt<T>(span: &Span, done: &Result<T, Halt>) {
    match done {
        Err(Halt::Interrupted(error) | Halt::Failed { error, .. } | Halt::NetworkNotReady(error)) => {
            propagate::record_error(span, error);
        }
        Err(Halt::Cancelled) | Ok(_) => {}
    }
}

/// The call that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RuntimeCall {
    StopContainer,
    StopSandbox,
    RemoveContainer,
    RemoveSandbox,
    MakeSandbox,
    ReadSandbox,
}

impl RuntimeCall {
    fn name(self) -> &'static str {
        match self {
            Self::StopContainer => "KillContainerError",
            Self::StopSandbox => "KillPodSandboxError",
            Self::RemoveContainer => "RemoveContainerError",
            Self::RemoveSandbox => "RemovePodSandboxError",
            Self::MakeSandbox => "failed to \"CreatePodSandbox\"",
            Self::ReadSandbox => "PodSandboxStatus",
        }
    }

    fn waiting(self, message: String) -> waiting::Waiting {
        match self {
            Self::StopContainer | Self::StopSandbox => waiting::Waiting::StopFailing { message },
            Self::RemoveContainer | Self::RemoveSandbox => waiting::Waiting::RemovalFailing { message },
            Self::MakeSandbox | Self::ReadSandbox => waiting::Waiting::SandboxFailing { message },
        }
    }
}

/// Returns whether an optional removal was done. A refusal is logged and ignored; an interruption ends the
/// pass.
pub(super) fn tolerate_refusal(pod: &PodRef, removed: Result<(), Halt>) -> Result<bool, Halt> {
    match removed {
        Ok(()) => Ok(true),
        Err(Halt::Failed { error, .. }) => {
            let (name, uid) = (format!("{}/{}", pod.namespace, pod.name), pod.uid.as_str());
            tracing::warn!(pod.name = name, pod.uid = uid, error, "failed to remove dead instances");
            Ok(false)
        }
        Err(interrupted @ (Halt::Interrupted(_) | Halt::NetworkNotReady(_) | Halt::Cancelled)) => {
            Err(interrupted)
        }
    }
}
