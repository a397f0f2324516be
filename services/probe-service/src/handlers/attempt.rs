//! The outcome of an attempt, and what the handlers share.

pub use quintlet_model::kubernetes::PROBE_USER_AGENT as USER_AGENT;

/// Longest output of an HTTP body or a command that is kept, in bytes.
pub const MAX_OUTPUT: usize = 10 * 1024;

/// The outcome of one attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attempt {
    /// The output of an attempt that passed.
    Success(String),
    /// The output of an attempt that passed and is reported as an event.
    Warning(String),
    /// The output or the error of an attempt that failed.
    Failure(String),
    /// The attempt could not be made: the result is unknown.
    Broken(Broken),
}

/// The error of an attempt that could not be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    /// The result that the kubelet reports with the error: `unknown` or `failure`.
    pub state: &'static str,
    /// Text of the error, as the kubelet formats it.
    pub error: String,
    /// Whether to record an event of the pod. False if a service or the runtime is unavailable, which is no
    /// fault of the pod.
    pub event: bool,
}

impl Attempt {
    /// Returns an unknown outcome that is recorded as an event.
    pub(crate) fn unknown(error: impl Into<String>) -> Self {
        Self::Broken(Broken { state: "unknown", error: error.into(), event: true })
    }
}

/// Formats a gRPC status as Go does.
pub(super) fn go_status(status: &tonic::Status) -> String {
    format!("rpc error: code = {:?} desc = {}", status.code(), status.message())
}
