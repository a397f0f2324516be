use std::io;
use std::path::PathBuf;

/// An error of a private containerd or of its images.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A required program is not installed.
    #[error("{program} is not installed: looked in {looked_in}")]
    Missing {
        /// Name of the program as it is searched.
        program: &'static str,
        /// Directories that were searched.
        looked_in: String,
    },
    /// A file or directory could not be used.
    #[error("failed to {action} {}", path.display())]
    File {
        /// Verb of what failed.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A program failed.
    #[error("{program} failed: {message}")]
    Program {
        /// File name of the program.
        program: String,
        /// Output on stderr, or the exit status.
        message: String,
    },
    /// The path of a unix socket is longer than the kernel supports.
    #[error("{} is too long for a unix socket ({} bytes, at most {max}): choose a shorter directory", path.display(), path.as_os_str().len())]
    SocketPath {
        /// Path of the socket that is too long.
        path: PathBuf,
        /// Largest number of bytes.
        max: usize,
    },
    /// Every index is in use.
    #[error("all {0} indices for private containerds are in use")]
    NoIndex(u8),
    /// Another process runs a containerd in this directory.
    #[error("{} is in use by another run", .0.display())]
    InUse(PathBuf),
    /// containerd exited, or did not respond in time.
    #[error("containerd did not answer within {seconds} s: {why}; end of its log:\n{log}")]
    NotReady {
        /// Time that it had, in seconds.
        seconds: u64,
        /// Last error of the health check.
        why: String,
        /// End of its log.
        log: String,
    },
    /// A call failed.
    #[error("{call} failed: {} ({:?})", status.message(), status.code())]
    Call {
        /// Name of the call.
        call: &'static str,
        /// Status that the runtime returned.
        status: Box<tonic::Status>,
    },
    /// No connection to the socket.
    #[error("failed to connect to {}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Error of the transport.
        source: tonic::transport::Error,
    },
    /// An image archive cannot be read.
    #[error("not a usable OCI image archive: {0}")]
    Archive(String),
    /// The image was written, but the runtime does not show it.
    #[error("the runtime did not show image {image} within {seconds} s: {why}")]
    NotVisible {
        /// Name of the image.
        image: String,
        /// Time that it had, in seconds.
        seconds: u64,
        /// Last error of the list of images.
        why: String,
    },
    /// Something could not be removed.
    #[error("failed to remove: {}", .0.join("; "))]
    Leftovers(Vec<String>),
}

impl Error {
    /// For `map_err` on file operations.
    pub(crate) fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }

    /// For `map_err` on calls.
    pub(crate) fn call(call: &'static str) -> impl FnOnce(tonic::Status) -> Self {
        move |status| Self::Call { call, status: Box::new(status) }
    }
}
