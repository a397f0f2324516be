//! The error of a command and its exit code.

use std::io;
use std::path::PathBuf;

/// An object was not found, a service is unhealthy, or another failure.
pub(crate) const EXIT_FAILURE: u8 = 1;
/// The command line or a configuration is invalid (`EX_USAGE` of sysexits.h).
pub const EXIT_USAGE: u8 = 64;
/// A service does not answer (`EX_UNAVAILABLE` of sysexits.h).
pub const EXIT_UNAVAILABLE: u8 = 69;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The service's socket does not accept connections.
    #[error("failed to connect to {service} at {}", path.display())]
    Unreachable { service: String, path: PathBuf, source: io::Error },
    /// The service accepts connections and sends no response in time, or the connection closed.
    #[error("failed to get a response from {service} at {}: {reason}", path.display())]
    Unresponsive { service: String, path: PathBuf, reason: String },
    /// The service returned an error.
    #[error("{service}: {message}")]
    Rpc { service: String, code: tonic::Code, message: String },
    /// The pod, container or log does not exist. The text names it.
    #[error("{0}")]
    NotFound(String),
    /// A system call failed.
    #[error("failed to {action}")]
    Os { action: String, source: io::Error },
    /// The container's process has a terminal, and this process has none.
    #[error("standard input is not a terminal; omit --tty or --stdin")]
    NoStdinTerminal,
    /// The streams to a container failed, or the runtime reported an error on them.
    #[error("{0}")]
    Streaming(String),
    #[error("--watch needs a terminal; use quintctl watch to print changes as lines")]
    NoTerminal,
    /// The response cannot be serialized as JSON or YAML.
    #[error("failed to serialize the response: {0}")]
    Serialize(String),
    /// The response of a service violates its contract.
    #[error("{service} returned {what}")]
    InvalidResponse { service: &'static str, what: String },
}

impl Error {
    #[must_use]
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Unreachable { .. } | Self::Unresponsive { .. } => EXIT_UNAVAILABLE,
            Self::Rpc { .. }
            | Self::NotFound(_)
            | Self::Os { .. }
            | Self::NoTerminal
            | Self::NoStdinTerminal
            | Self::Streaming(_)
            | Self::Serialize(_)
            | Self::InvalidResponse { .. } => EXIT_FAILURE,
        }
    }

    /// Returns whether the reader of the output closed its end, which is not a failure of the command.
    #[must_use]
    pub(crate) fn is_closed_output(&self) -> bool {
        matches!(self, Self::Os { source, .. } if source.kind() == io::ErrorKind::BrokenPipe)
    }

    /// Returns a function that wraps an I/O error of `action`, a verb with its object.
    pub(crate) fn os(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Os { action, source }
    }
}
