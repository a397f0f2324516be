//! Why a container was not started.

use quintlet_model::text;

use crate::container_status::WaitingReason;

/// Start failures that become a container's waiting reason (`pkg/kubelet/container: SyncResult`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StartFailure {
    /// The container exited before, and the back-off of its restart has not elapsed.
    CrashLoopBackOff,
    /// Pulling the image failed before, and the back-off has not elapsed.
    ImagePullBackOff,
    /// Pulling the image failed, for a reason without a variant of its own.
    ErrImagePull,
    /// The image is not present, and imagePullPolicy is Never.
    ErrImageNeverPull,
    /// The image in the spec is no valid reference.
    InvalidImageName,
    /// The runtime failed to report whether the image is present.
    ImageInspectError,
    /// The registry could not be reached.
    RegistryUnavailable,
    /// The runtime's policy refuses the signature of the image.
    SignatureValidationFailed,
    /// The container config could not be generated, for example because a ConfigMap is missing.
    CreateContainerConfigError,
    /// The runtime failed to create the container.
    CreateContainerError,
    /// The runtime failed to start the created container.
    RunContainerError,
    /// The postStart hook failed, and the container was killed.
    PostStartHookError,
}

impl StartFailure {
    /// Every variant, for tests and for [`Self::parse`].
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

    /// Returns the waiting reason.
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

    /// Returns the variant of a waiting reason; `None` for a reason that is no failed start, such as
    /// ContainerCreating.
    #[must_use]
    pub fn parse(reason: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.as_str() == reason)
    }

    /// Returns the reason with a message, of which at most [`text::MESSAGE`] bytes are kept.
    #[must_use]
    pub fn with_message(self, message: impl Into<String>) -> WaitingReason {
        let message = text::shortened(message.into(), text::MESSAGE);
        WaitingReason { reason: self.as_str().to_owned(), message }
    }
}
