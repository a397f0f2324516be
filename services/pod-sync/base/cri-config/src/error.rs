//! Errors of configurations.

use std::io;

use pod_sync_layout::ObjectError;

/// A configuration cannot be generated. The message is shown to the user as that of the waiting container.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The spec is invalid; with the kubelet's message.
    #[error("{0}")]
    Invalid(String),
    /// An API object is not available.
    #[error("{0}")]
    Object(ObjectError),
    /// Services have not been listed yet.
    #[error("services have not yet been read at least once, cannot construct envvars")]
    ServicesNotReady,
    /// A file of the node agent cannot be read or written.
    #[error("{what}: {source}")]
    Io {
        /// The failed operation.
        what: String,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl ConfigError {
    /// Returns an error with this message.
    pub fn invalid(text: impl Into<String>) -> Self {
        Self::Invalid(text.into())
    }

    pub(crate) fn io(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io { what: what.into(), source: source.into() }
    }
}
