//! Errors of operations on CSI volumes.

use std::io;
use std::path::{Path, PathBuf};

use pod_sync_plugins::call::CallError;

/// Certainty about the state of a volume after a failed operation (`pkg/volume/util/types:
/// IsOperationFinishedError`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Certainty {
    /// The operation has ended without its effect.
    Finished,
    /// The operation may be in progress or complete: the volume counts as mounted until it is unmounted.
    Uncertain,
    /// The operation was not attempted: the state of the volume is the one before it.
    Transient,
}

/// Reason why an operation failed. The texts of the error and its sources form the kubelet's text.
#[derive(Debug, thiserror::Error)]
pub enum CsiError {
    /// The driver is not registered.
    #[error("driver name {0} not found in the list of registered CSI drivers")]
    NotRegistered(String),
    /// The driver, the connection or the deadline ended the call.
    #[error("{0}")]
    Call(CallError),
    /// The driver's capabilities could not be read, and the operation was not attempted.
    #[error("{0}")]
    NotCalled(CallError),
    /// The driver does not provide volumes of this mode.
    #[error("{0}")]
    Refused(String),
    /// The driver does not have a capability that the operation needs.
    #[error("{operation} is not supported by the CSI driver {driver}")]
    Unsupported {
        /// Name of the operation.
        operation: &'static str,
        /// Name of the driver.
        driver: String,
    },
    /// The driver does not name this node.
    #[error("driverNodeID must not be empty")]
    NoNodeId,
    /// A field of the volume is empty or cannot be part of a path.
    #[error("{0}")]
    Volume(#[from] crate::paths::PathError),
    /// A file or directory could not be read or changed.
    #[error("failed to {action} {}", .path.display())]
    File {
        /// The failed action, a verb.
        action: &'static str,
        /// Path of the file or directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The driver reported success, but its mount is still there. Nothing below it was removed.
    #[error("{} is still mounted after {call} succeeded, nothing was removed", .path.display())]
    StillMounted {
        /// Path of the mount.
        path: PathBuf,
        /// Name of the call that succeeded.
        call: &'static str,
    },
    /// Pods have the volume, so its device stays mounted.
    #[error(
        "the device mount path {:?} is still mounted by other references [{}]",
        .path.display().to_string(),
        .mounts.join(" ")
    )]
    InUse {
        /// Staging path of the volume.
        path: PathBuf,
        /// The mounts of pods.
        mounts: Vec<String>,
    },
    /// There are mounts of a volume whose `vol_data.json` is missing or unreadable, so its driver is unknown.
    #[error("{} is mounted, but its driver is unknown", .0.display())]
    UnknownDriver(PathBuf),
    /// An operation failed, and what it made could not be removed: a driver may have mounted the volume
    /// although its error is final.
    #[error(transparent)]
    Left(Box<Self>),
    /// A step of an operation failed.
    #[error("kubernetes.io/csi: {step}")]
    Step {
        /// Name of the step, as the kubelet prints it.
        step: String,
        /// Certainty about the volume's state.
        certainty: Certainty,
        /// The error of the step.
        source: Box<Self>,
    },
}

impl CsiError {
    /// Returns what is certain about the volume.
    #[must_use]
    pub fn certainty(&self) -> Certainty {
        match self {
            // The operation continues when the driver is registered again.
            Self::NotRegistered(_) | Self::NotCalled(_) | Self::Refused(_) | Self::InUse { .. } => {
                Certainty::Transient
            }
            Self::Call(error) if error.is_final() => Certainty::Finished,
            Self::Call(_) | Self::StillMounted { .. } | Self::UnknownDriver(_) | Self::Left(_) => {
                Certainty::Uncertain
            }
            Self::Unsupported { .. } | Self::NoNodeId | Self::Volume(_) | Self::File { .. } => {
                Certainty::Finished
            }
            Self::Step { certainty, .. } => *certainty,
        }
    }

    /// Returns the text with all sources, as events and conditions show it.
    #[must_use]
    pub fn text(&self) -> String {
        quintlet_kit::error_chain(self)
    }

    /// Adds the name of the step in which the error occurred.
    pub(crate) fn at(self, step: impl Into<String>) -> Self {
        let certainty = self.certainty();
        Self::Step { step: step.into(), certainty, source: Box::new(self) }
    }

    /// Adds the name of a step of an unmount, after which the volume counts as mounted.
    pub(crate) fn while_unmounting(self, step: impl Into<String>) -> Self {
        let certainty = match self.certainty() {
            Certainty::Transient => Certainty::Transient,
            Certainty::Finished | Certainty::Uncertain => Certainty::Uncertain,
        };
        Self::Step { step: step.into(), certainty, source: Box::new(self) }
    }

    pub(crate) fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { action, path, source }
    }
}

impl From<CallError> for CsiError {
    fn from(error: CallError) -> Self {
        Self::Call(error)
    }
}
