//! Why the services cannot be started.

use std::io;
use std::path::PathBuf;

use quintlet_agents::{AgentProcess, EXIT_OTHER_AGENT, OtherAgent};

use crate::error::EXIT_FAILURE;

/// Longest path of a unix socket, in bytes (`sun_path` of unix(7), without the terminating null byte).
pub(super) const SOCKET_PATH_MAX: usize = 107;

/// The reason why the services cannot be started, or ended other than by a stop.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
#[non_exhaustive]
pub enum UpError {
    #[error("failed to find {} in {}: build them (cargo build) or set --bin-dir", names.join(", "), dir.display())]
    NoBinaries { names: Vec<&'static str>, dir: PathBuf },
    #[error("failed to use directory {}", path.display())]
    Directory { path: PathBuf, source: io::Error },
    /// The kubeconfig cannot be read or copied for a service.
    #[error("failed to copy kubeconfig {}", path.display())]
    Kubeconfig { path: PathBuf, source: io::Error },
    /// The user of a service cannot enter `dir`, which is an ancestor of `path`. `flag` is the option of the
    /// user.
    #[error(
        "{service} runs as uid {uid}, which cannot enter {}, a parent of {}: choose other directories (--run-dir, \
         --bin-dir), permit entering it (chmod o+x), or run the service as root ({flag} 0)",
        dir.display(),
        path.display()
    )]
    Inaccessible { service: &'static str, uid: u32, dir: PathBuf, path: PathBuf, flag: &'static str },
    /// Another supervisor holds the lock of the directory.
    #[error("another quintctl up is running in {}, {process}", dir.display())]
    AlreadyRunning { dir: PathBuf, process: AgentProcess },
    /// A kubelet or another Quintlet uses the root directory.
    #[error("{0}")]
    OtherAgent(OtherAgent),
    #[error("{} is too long for a unix socket (at most {SOCKET_PATH_MAX} bytes): choose a shorter --run-dir", .0.display())]
    SocketPath(PathBuf),
    /// The private containerd failed, or its files cannot be removed.
    #[error("private containerd failed")]
    Containerd(#[source] quintlet_localnode::Error),
    #[error("failed to {action}")]
    Os { action: &'static str, source: io::Error },
    /// `--once` without an expectation.
    #[error("no manifest in {} has the annotation quintlet.dev/expect", .0.display())]
    NothingExpected(PathBuf),
}

impl UpError {
    /// Returns the exit code: 69 if another agent runs, else 1.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::AlreadyRunning { .. } | Self::OtherAgent(_) => EXIT_OTHER_AGENT,
            Self::NoBinaries { .. }
            | Self::Directory { .. }
            | Self::Kubeconfig { .. }
            | Self::Inaccessible { .. }
            | Self::SocketPath(_)
            | Self::Containerd(_)
            | Self::Os { .. }
            | Self::NothingExpected(_) => EXIT_FAILURE,
        }
    }
}
