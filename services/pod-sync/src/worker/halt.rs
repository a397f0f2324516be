//! How a pass ends, and why it ends early.

use std::time::Duration;

use pod_sync_decisions::waiting;

use crate::clients::runtime::CallError;

/// What comes after a pass.
#[derive(Debug)]
pub(crate) enum Next {
    /// Another pass at once.
    Again,
    /// Nothing to do: look again after so long, or after the resync period, or when the bell rings.
    Idle(Option<Duration>),
    /// This phase of the pod's life is over.
    Advance,
}

/// Why a pass ended early.
#[derive(Debug)]
pub(crate) enum Halt {
    /// A call was cut or could not be made; nothing is known. No event, no back-off.
    Cut(String),
    /// Something about this pod failed; tried again later.
    Failed {
        /// Text, for `explain`.
        error: String,
        /// What the pod waits for now.
        waiting: waiting::Waiting,
        /// When to look again; none for the default.
        after: Option<Duration>,
    },
    /// The runtime's network is away.
    NetworkNotReady(String),
    /// Something came that this pass must not go on for.
    Cancelled,
}

impl Halt {
    pub(super) fn failed(waiting: waiting::Waiting, error: impl std::fmt::Display) -> Self {
        Self::Failed { error: error.to_string(), waiting, after: None }
    }

    pub(super) fn after(self, wait: Duration) -> Self {
        match self {
            Self::Failed { error, waiting, .. } => Self::Failed { error, waiting, after: Some(wait) },
            other @ (Self::Cut(_) | Self::NetworkNotReady(_) | Self::Cancelled) => other,
        }
    }

    /// A verdict of the runtime is an error of the pod, anything else says nothing.
    pub(super) fn of(error: &CallError, step: Step) -> Self {
        if error.is_verdict() {
            Self::failed(step.waiting(error.message.clone()), format!("{}: {error}", step.name()))
        } else {
            Self::cut(error)
        }
    }

    /// A call of which nothing is known.
    pub(super) fn cut(error: &CallError) -> Self {
        Self::Cut(format!("{} {}: {error}", error.method, error.outcome))
    }
}

/// What the runtime was asked for when it refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    StopContainer,
    StopSandbox,
    RemoveContainer,
    RemoveSandbox,
    MakeSandbox,
    ReadSandbox,
}

impl Step {
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
