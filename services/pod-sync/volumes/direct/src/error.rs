//! Errors of volumes, with the kubelet's messages.

use std::fmt;
use std::io;

/// The failed step of a volume's set-up; the prefix of the event's message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeStep {
    /// `MountVolume.SetUp`
    SetUp,
    /// `MountVolume.FindPluginBySpec`
    FindPlugin,
    /// `MountVolume.NewMounter initialization`
    NewMounter,
}

impl fmt::Display for VolumeStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SetUp => "MountVolume.SetUp",
            Self::FindPlugin => "MountVolume.FindPluginBySpec",
            Self::NewMounter => "MountVolume.NewMounter initialization",
        })
    }
}

/// A volume that failed. `Display` is the message of the Warning event `FailedMount`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{step} failed for volume {volume:?} : {problem}")]
pub struct VolumeFailure {
    /// Name of the volume in the pod.
    pub volume: String,
    /// The step that failed.
    pub step: VolumeStep,
    /// Text of the error with its sources.
    pub problem: String,
}

/// A volume or directory could not be torn down; the call can be repeated.
#[derive(Debug, thiserror::Error)]
#[error("{what} {path}: {source}")]
pub struct TearDownError {
    /// The failed operation.
    pub what: &'static str,
    /// Path of the file or directory.
    pub path: String,
    /// The error of the operating system.
    pub source: io::Error,
}
