//! Why volumes are not ready, in the kubelet's words.

use std::fmt;
use std::io;

/// Which part of setting up a volume failed; it stands before the event's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// `MountVolume.SetUp`
    SetUp,
    /// `MountVolume.FindPluginBySpec`
    FindPlugin,
    /// `MountVolume.NewMounter initialization`
    NewMounter,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SetUp => "MountVolume.SetUp",
            Self::FindPlugin => "MountVolume.FindPluginBySpec",
            Self::NewMounter => "MountVolume.NewMounter initialization",
        })
    }
}

/// One volume that failed. `Display` is the message of the Warning `FailedMount`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{step} failed for volume {volume:?} : {problem}")]
pub struct VolumeFailure {
    /// Name of the volume.
    pub volume: String,
    /// What was tried.
    pub step: Step,
    /// Why it failed.
    pub problem: String,
}

/// The volumes of a pod are not all ready.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// The pod's directories cannot be made: Warning `Failed` with this text.
    #[error("error making pod data directories: {0}")]
    PodDirs(io::Error),
    /// Some volumes failed; each has an event of its own, the sync fails with this text.
    #[error(
        "unmounted volumes=[{}], unattached volumes=[], failed to process volumes=[]: context deadline exceeded",
        names(.0)
    )]
    Volumes(Vec<VolumeFailure>),
}

fn names(failures: &[VolumeFailure]) -> String {
    let mut names: Vec<&str> = failures.iter().map(|f| f.volume.as_str()).collect();
    names.sort_unstable();
    names.join(" ")
}

/// A volume or directory cannot be taken down; it is tried again.
#[derive(Debug, thiserror::Error)]
#[error("{what} {path}: {source}")]
pub struct TearDownError {
    /// What was tried.
    pub what: &'static str,
    /// On what.
    pub path: String,
    /// Why it failed.
    pub source: io::Error,
}
