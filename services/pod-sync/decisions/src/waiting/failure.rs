//! Why a container was not started.

use crate::container_status::WaitingReason;

/// How a start failed: the reasons that become a container's waiting reason
/// (`pkg/kubelet/container: SyncResult`).
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
    /// The runtime did not create it.
    CreateContainerError,
    /// The runtime did not start it.
    RunContainerError,
    /// Its postStart hook failed.
    PostStartHookError,
}

impl StartFailure {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::CrashLoopBackOff,
        Self::ImagePullBackOff,
        Self::ErrImagePull,
        Self::ErrImageNeverPull,
        Self::InvalidImageName,
        Self::ImageInspectError,
        Self::RegistryUnavailable,
        Self::SignatureValidationFailed,
        Self::CreateContainerConfigError,
        Self::CreateContainerError,
        Self::RunContainerError,
        Self::PostStartHookError,
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
            Self::CreateContainerError => "CreateContainerError",
            Self::RunContainerError => "RunContainerError",
            Self::PostStartHookError => "PostStartHookError",
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
