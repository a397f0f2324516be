//! Calls of a plugin's gRPC services: channel, deadline, errors.

use std::path::PathBuf;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use quintlet_kit::{clock, socket, status_code};
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Response, Status};

/// Time by which the deadline sent to a plugin exceeds the caller's own deadline, so that a timeout always
/// has the caller's text.
const SLACK: Duration = Duration::from_secs(1);

/// Returns a channel to a plugin's socket that connects on first use and reconnects as needed. A call fails
/// at once while no process listens, or if the server is neither root nor the owner of the socket's
/// directory.
///
/// The channel sends no HTTP/2 pings: servers of grpc-go close a connection with more than one ping in 5
/// minutes.
#[must_use]
pub fn channel(path: PathBuf) -> Channel {
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { socket::connect(&path).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://plugin.local")
        .http2_max_header_list_size(socket::MAX_TRAILERS)
        .connect_with_connector_lazy(connector)
}

/// The time by which an operation of one or more calls must end.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(Instant);

impl Deadline {
    /// Returns the deadline at the end of `limit` from now.
    #[must_use]
    pub fn after(limit: Duration) -> Self {
        Self(clock::deadline_after(Instant::now(), limit))
    }

    fn remaining(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }
}

/// A call that failed. The text is that of gRPC in Go, which users of Kubernetes know from events.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rpc error: code = {} desc = {message}", status_code::go_name(*.code))]
pub struct CallError {
    /// The gRPC code.
    pub code: Code,
    /// The description.
    pub message: String,
}

impl CallError {
    fn deadline() -> Self {
        Self { code: Code::DeadlineExceeded, message: "context deadline exceeded".to_owned() }
    }

    /// Returns the name of the code as gRPC in Go prints it.
    #[must_use]
    pub fn code_name(&self) -> &'static str {
        status_code::go_name(self.code)
    }

    /// Returns whether the plugin has certainly stopped working on the call. After another error the
    /// operation may be in progress, or complete (`pkg/volume/csi: isFinalError`).
    #[must_use]
    pub fn is_final(&self) -> bool {
        match self.code {
            Code::Cancelled
            | Code::DeadlineExceeded
            | Code::Unavailable
            | Code::ResourceExhausted
            | Code::Aborted => false,
            Code::Ok
            | Code::Unknown
            | Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::PermissionDenied
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::Unimplemented
            | Code::Internal
            | Code::DataLoss
            | Code::Unauthenticated => true,
        }
    }
}

impl From<Status> for CallError {
    /// An error of the connection becomes `Unavailable`: the plugin may have received the call. Only the
    /// plugin's own statuses have no source.
    fn from(status: Status) -> Self {
        let mut message = status.message().to_owned();
        let Some(source) = std::error::Error::source(&status) else {
            return Self { code: status.code(), message };
        };
        let cause = quintlet_kit::error_chain(source);
        if cause != message {
            message = format!("{message}: {cause}");
        }
        let code = match status.code() {
            code @ (Code::Cancelled | Code::DeadlineExceeded) => code,
            _ => Code::Unavailable,
        };
        Self { code, message }
    }
}

/// Executes a call. It is cancelled at the deadline.
///
/// # Errors
/// Returns the plugin's status, or that of the connection or the deadline.
pub async fn call<Q, A, F>(
    deadline: Deadline,
    request: Q,
    rpc: impl FnOnce(Request<Q>) -> F,
) -> Result<A, CallError>
where
    F: Future<Output = Result<Response<A>, Status>>,
{
    let mut request = Request::new(request);
    request.set_timeout(deadline.remaining().saturating_add(SLACK));
    match tokio::time::timeout_at(deadline.0, rpc(request)).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(status.into()),
        Err(_) => Err(CallError::deadline()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_printed_as_in_go() {
        let error = CallError::from(Status::internal("disk is on fire"));
        assert_eq!(error.to_string(), "rpc error: code = Internal desc = disk is on fire");
        assert!(error.is_final());
        assert!(CallError::deadline().to_string().starts_with("rpc error: code = DeadlineExceeded"));
    }

    #[test]
    fn five_codes_leave_the_state_uncertain() {
        let uncertain: Vec<Code> = (0..=16)
            .map(Code::from)
            .filter(|code| !CallError { code: *code, message: String::new() }.is_final())
            .collect();
        let expected = [
            Code::Cancelled,
            Code::DeadlineExceeded,
            Code::ResourceExhausted,
            Code::Aborted,
            Code::Unavailable,
        ];
        assert_eq!(uncertain, expected);
    }

    #[test]
    fn an_error_of_the_connection_is_not_final_whatever_code_it_was_given() {
        let broken = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        let error = CallError::from(Status::from_error(Box::new(broken)));
        assert_eq!(error.code, Code::Unavailable, "{error}");
        assert!(!error.is_final());
    }
}
