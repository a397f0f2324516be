//! Why an installation or its removal ended.

use std::io;
use std::path::PathBuf;

use crate::refusal::Refusal;

/// An installation or its removal failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InstallError {
    /// The installation would break something. Nothing was changed.
    #[error("{}", lines(.0))]
    Refused(Vec<Refusal>),
    /// There is no journal.
    #[error("quintctl install has installed nothing here: {} does not exist", .0.display())]
    NotInstalled(PathBuf),
    /// No upgrade was interrupted.
    #[error("no upgrade was interrupted here: {} does not exist", .0.display())]
    NotInterrupted(PathBuf),
    /// A service was not restarted.
    #[error("{service} did not restart within {seconds} s")]
    NotRestarted {
        /// Name of its program.
        service: String,
        /// Time limit in seconds.
        seconds: u64,
    },
    /// Steps of an upgrade could not be undone. The journal keeps them.
    #[error("failed to go back: {}; remove the cause, then run quintctl upgrade --undo", .0.join("; "))]
    NotDowngraded(Vec<String>),
    /// A file could not be used.
    #[error("failed to {action} {}", path.display())]
    File {
        /// Verb of the failed operation.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The journal is damaged.
    #[error("{} is not a journal of quintctl: restore it, or undo by hand what it lists", .0.display())]
    Journal(PathBuf),
    /// A program failed.
    #[error("{command} failed: {reason}")]
    Command {
        /// Program and arguments.
        command: String,
        /// Last line of the output, or the exit status.
        reason: String,
    },
    /// The services are not healthy.
    #[error("the services are not healthy after {seconds} s: {reason}")]
    Unhealthy {
        /// Time limit in seconds.
        seconds: u64,
        /// Output of the last check.
        reason: String,
    },
    /// A step failed, and all steps were undone.
    #[error("failed to {step}: {}; the steps before it are undone", quintlet_kit::error_chain(cause))]
    Undone {
        /// Text of the step.
        step: String,
        /// Error of the step.
        cause: Box<InstallError>,
    },
    /// Steps could not be undone. The journal keeps them.
    #[error("failed to undo: {}; remove the cause, then run quintctl uninstall", .0.join("; "))]
    NotUndone(Vec<String>),
}

impl InstallError {
    /// Returns the exit code: 64 for an invalid file or option, 69 for a missing file or another agent, and 1
    /// for other failures.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Refused(refusals) => {
                // What has to be changed by hand precedes what may be there later.
                let has = |code: u8| refusals.iter().any(|refusal| refusal.code == code);
                [64, 69].into_iter().find(|code| has(*code)).unwrap_or(1)
            }
            Self::NotInstalled(_)
            | Self::File { .. }
            | Self::Journal(_)
            | Self::Command { .. }
            | Self::Unhealthy { .. }
            | Self::Undone { .. }
            | Self::NotInterrupted(_)
            | Self::NotRestarted { .. }
            | Self::NotDowngraded(_)
            | Self::NotUndone(_) => 1,
        }
    }
}

/// Returns a line per refusal. The caller prints the name of the program before the first.
fn lines(refusals: &[Refusal]) -> String {
    let texts: Vec<&str> = refusals.iter().map(|refusal| refusal.text.as_str()).collect();
    texts.join("\nquintctl: ")
}
