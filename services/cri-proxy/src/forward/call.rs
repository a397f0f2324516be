//! One call to the runtime, and what is recorded of its reply.

use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use quintlet_kit::clock::bounded;
use quintlet_model::outcome::Outcome;
use tonic::Code;
use tracing::Span;

use crate::budget::{ByteBudget, Exhausted, Reservation};
use crate::outcome;
use crate::policy::{Deadline, Policy};
use crate::reply::{self, Reply};
use crate::request_info::RequestInfo;

/// Maximum size of a unary reply: the CRI's limit of 16 MiB, which containerd enforces, too, and the gRPC
/// prefix.
pub(super) const MAX_REPLY: usize = (16 << 20) + 5;

/// A unary call that can be sent repeatedly.
#[derive(Debug, Clone)]
pub struct Call {
    /// The row of the method in [`crate::policy::TABLE`].
    pub policy: &'static Policy,
    /// Metadata for the runtime.
    pub headers: HeaderMap,
    /// The body, including the gRPC prefix.
    pub body: Bytes,
    /// Information from the request.
    pub info: RequestInfo,
    /// The byte limit for its reply.
    pub budget: ByteBudget,
    /// Reservation of its body.
    pub held: Reservation,
    /// Bytes of each output stream of a command that the caller reads; none if it reads all.
    pub short_output: Option<usize>,
}

impl Call {
    /// Returns the time limit of the call once it is sent, at most [`quintlet_kit::clock::FAR`]. The caller's
    /// `grpc-timeout` takes precedence over the table.
    pub(super) fn timeout(&self, usual: Duration) -> Option<Duration> {
        let timeout = reply::grpc_timeout(&self.headers).or(match self.policy.deadline {
            Deadline::Default => Some(usual),
            Deadline::DefaultPlusRequest { zero_is_unlimited } => {
                let seconds = u64::try_from(self.info.seconds.unwrap_or(0)).unwrap_or(0);
                (seconds > 0 || !zero_is_unlimited)
                    .then(|| usual.saturating_add(Duration::from_secs(seconds)))
            }
            Deadline::CallerOnly => None,
        });
        timeout.map(bounded)
    }
}

/// Records the outcome of a call in its span.
pub(super) fn record_reply(span: &Span, reply: &Reply) {
    span.record("outcome", reply.outcome.name());
    if reply.outcome != Outcome::Ok {
        let status = reply.status();
        span.record("otel.status_code", "ERROR");
        span.record("error", format!("{:?}: {}", status.code(), status.message()));
    }
}

// The call was sent, and its status follows the data that was not read: the outcome is unknown.
pub(super) fn too_large(method: &str, max: usize) -> Reply {
    let message = format!("the runtime's answer to {method} is larger than {max} bytes");
    Reply::local(Code::ResourceExhausted, message, Outcome::Unknown, Duration::ZERO)
}

pub(super) fn no_room(method: &str, full: Exhausted) -> Reply {
    let message = format!("the runtime's answer to {method} was discarded: {full}");
    Reply::local(Code::ResourceExhausted, message, Outcome::Unknown, Duration::ZERO)
}

/// Returns the outcome of a reply that was read completely.
pub(super) fn outcome_of(method: &'static str, reply: &Reply) -> Outcome {
    if reply.trailers.is_none() && reply::status_from(&reply.headers).is_none() {
        return Outcome::Unknown;
    }
    let status = reply.status();
    outcome::from_status(method, status.code(), status.message())
}
