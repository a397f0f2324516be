//! Progress of the set-up of volumes.

use crate::error::VolumeFailure;

/// Progress of the set-up of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SetUp {
    /// The objects of the volume are being read.
    Begun,
    /// The volume is ready and has the content of its objects.
    Ready,
    /// The volume is ready, and keeps its old content.
    Stale(VolumeFailure),
    /// The volume is not ready.
    Failed {
        /// The reason.
        failure: VolumeFailure,
        /// Directories, files or a mount may be left.
        is_partial: bool,
    },
}

impl SetUp {
    pub(crate) fn failure(&self) -> Option<&VolumeFailure> {
        match self {
            Self::Begun | Self::Ready => None,
            Self::Stale(failure) | Self::Failed { failure, .. } => Some(failure),
        }
    }
}
