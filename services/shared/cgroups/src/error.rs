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
    Missing {
        /// Path of the cgroup below the root of its hierarchy.
        group: String,
        /// Names of the controllers that it does not have.
        missing: Vec<String>,
    },
    /// A cgroup of the configuration does not exist, or not in all hierarchies.
    #[error("cgroup {group:?} has some missing paths: {}", missing.join(", "))]
    MissingPaths {
        /// Components of the name of the cgroup, from the root on.
        group: Vec<String>,
        /// Directories that do not exist, one for each hierarchy without the cgroup.
        missing: Vec<String>,
    },
    /// A directory could not be created, or a value not written.
    #[error("{what} {path}: {source}")]
    Io {
        /// The failed operation.
        what: &'static str,
        /// The file or directory of the cgroup.
        path: PathBuf,
        /// The error of the kernel.
        source: io::Error,
    },
    /// Processes survived five rounds of SIGKILL.
    #[error("failed to kill all the processes attached to the {group} cgroups : {left:?}")]
    Kill {
        /// Path of the cgroup below the root of its hierarchy.
        group: String,
        /// PIDs of the remaining processes.
        left: Vec<i32>,
    },
    /// A directory of a cgroup could not be removed, although no process is left in it.
    #[error("failed to delete cgroup paths for {group} : {source}")]
    Delete {
        /// Path of the cgroup below the root of its hierarchy.
        group: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// A call to systemd failed.
    #[error("systemd: {what} {unit}: {source}")]
    Systemd {
        /// The failed operation.
        what: &'static str,
        /// Name of the slice or scope.
        unit: String,
        /// The reason for the failure.
        source: SystemdError,
    },
}

pub(crate) fn io_error<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> CgroupError + 'a {
    move |source| CgroupError::Io { what, path: path.to_owned(), source }
}

/// The reason why systemd did not do what was requested.
#[derive(Debug, thiserror::Error)]
pub enum SystemdError {
    /// The call failed on the system bus, or systemd refused it.
    #[error(transparent)]
    Bus(#[from] zbus::Error),
    /// The async runtime for calls to systemd could not be started.
    #[error("failed to start a runtime: {0}")]
    Runtime(io::Error),
    /// systemd did not finish the call and its job in time.
    #[error("no answer within {} s", LIMIT.as_secs())]
    Timeout,
    /// The job ended with this result.
    #[error("the job ended with the result {0:?}")]
    Job(String),
    /// The connection ended before systemd finished the job.
    #[error("the system bus closed the connection")]
    Closed,
}
