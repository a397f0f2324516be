//! Why a configuration cannot be made.

use std::io;

use super::objects::ObjectError;

/// A configuration cannot be made. The text is what the user reads on the container.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A rule of the spec is broken; the text is the kubelet's.
    #[error("{0}")]
    Invalid(String),
    /// An object a variable needs cannot be had.
    #[error("{0}")]
    Object(ObjectError),
    /// Services are not known yet.
    #[error("services have not yet been read at least once, cannot construct envvars")]
    ServicesNotReady,
    /// A file operation failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
}

impl ConfigError {
    /// Returns the error with this text, which becomes the message of the waiting container.
    pub fn invalid(text: impl Into<String>) -> Self {
        Self::Invalid(text.into())
    }

    pub(crate) fn io(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io { what: what.into(), source: source.into() }
    }
}
