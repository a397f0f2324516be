//! Errors of operations on cgroups.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time limit of a call to systemd with its job.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// A cgroup operation failed.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// A controller is not available in a cgroup.
    #[error("cgroup {group:?} has some missing controllers: {}", missing.join(", "))]
    Missing { group: String, missing: Vec<String> },
    /// A cgroup of the configuration does not exist, or not in all hierarchies.
    #[error("cgroup {group:?} has some missing paths: {}", missing.join(", "))]
    MissingPaths { group: Vec<String>, missing: Vec<String> },
    /// A directory could not be created, or a value not written.
    #[error("{what} {path}: {source}")]
    Io {
        /// The failed operation.
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// Processes survived five rounds of SIGKILL.
    #[error("failed to kill all the processes attached to the {group} cgroups : {left:?}")]
    Kill {
        group: String,
        /// PIDs of the remaining processes.
        left: Vec<i32>,
    },
    #[error("failed to delete cgroup paths for {group} : {source}")]
    Delete { group: String, source: io::Error },
    /// A call to systemd failed.
    #[error("systemd: {what} {unit}: {source}")]
    Systemd {
        /// The failed operation.
        what: &'static str,
        unit: String,
        source: SystemdError,
    },
}

pub(crate) fn io_error<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> CgroupError + 'a {
    move |source| CgroupError::Io { what, path: path.to_owned(), source }
}

/// The reason why systemd did not do what was requested.
#[derive(Debug, thiserror::Error)]
pub enum SystemdError {
    #[error(transparent)]
    Bus(#[from] zbus::Error),
    #[error("failed to start a runtime: {0}")]
    Runtime(io::Error),
    #[error("no answer within {} s", LIMIT.as_secs())]
    Timeout,
    /// The job ended with this result.
    #[error("the job ended with the result {0:?}")]
    Job(String),
    #[error("the system bus closed the connection")]
    Closed,
}
