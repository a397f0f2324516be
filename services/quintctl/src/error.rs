//! Why a command did not do what it was asked for, and the exit code that says so.

use std::io;
use std::path::PathBuf;

/// Not found, unhealthy, or anything else that failed.
pub const EXIT_FAILURE: u8 = 1;
/// The command line or a configuration is wrong (sysexits.h).
pub const EXIT_USAGE: u8 = 64;
/// A service does not answer (sysexits.h).
pub const EXIT_UNAVAILABLE: u8 = 69;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Nobody listens.
    #[error("{service} does not answer at {}", path.display())]
    Unreachable {
        /// Name of the service.
        service: String,
        /// Its socket.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Somebody listens and says nothing, or the connection broke.
    #[error("{service} does not answer at {}: {why}", path.display())]
    Silent {
        /// Name of the service.
        service: String,
        /// Its socket.
        path: PathBuf,
        /// What happened.
        why: String,
    },
    /// The service answered with an error.
    #[error("{service}: {message}")]
    Refused {
        /// Name of the service.
        service: String,
        /// gRPC status.
        code: tonic::Code,
        /// In the service's words.
        message: String,
    },
    /// What was asked for is not there.
    #[error("{0}")]
    NotFound(String),
    /// The operating system failed.
    #[error("cannot {action}")]
    Os {
        /// What was tried.
        action: String,
        /// Why not.
        source: io::Error,
    },
    /// Files cannot be watched.
    #[error("cannot watch {}", path.display())]
    Watch {
        /// What.
        path: PathBuf,
        /// Why not.
        source: notify::Error,
    },
    /// A command cannot have a terminal where there is none.
    #[error("standard input is no terminal: without --tty it works")]
    NoStdinTerminal,
    /// Streams to a container broke, or its side says why it failed.
    #[error("{0}")]
    Streaming(String),
    /// A live table needs a terminal.
    #[error("a live table needs a terminal; quintctl watch prints lines")]
    NoTerminal,
    /// The answer cannot be written in the form asked for.
    #[error("cannot write the answer: {0}")]
    Form(String),
    /// A service's answer is not what the contract says.
    #[error("{service} answered with {what}")]
    Answer {
        /// Name of the service.
        service: &'static str,
        /// What is wrong.
        what: String,
    },
}

impl Error {
    /// The code a script can tell it by.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Unreachable { .. } | Self::Silent { .. } => EXIT_UNAVAILABLE,
            Self::Refused { .. }
            | Self::NotFound(_)
            | Self::Os { .. }
            | Self::Watch { .. }
            | Self::NoTerminal
            | Self::NoStdinTerminal
            | Self::Streaming(_)
            | Self::Form(_)
            | Self::Answer { .. } => EXIT_FAILURE,
        }
    }

    /// Whoever read our output went away: nothing to complain about.
    #[must_use]
    pub fn is_closed_output(&self) -> bool {
        matches!(self, Self::Os { source, .. } if source.kind() == io::ErrorKind::BrokenPipe)
    }

    /// The operating system failed at `action`.
    pub(crate) fn os(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Os { action, source }
    }
}
