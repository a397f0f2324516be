//! Commands in the container, which cri-proxy runs if they have a grant.

use std::time::Duration;

use quintlet_kit::stack::Caller;
use quintlet_model::go_duration;
use quintlet_model::text::cut;
use quintlet_proto::runtime::v1::ProbeExecRequest;
use quintlet_proto::runtime::v1::probe_exec_client::ProbeExecClient;
use tonic::Code;
use tonic::transport::Channel;

use super::attempt::{Attempt, Broken, MAX_OUTPUT, go_status};

/// Limit of a call beyond the timeout of the command, which the runtime enforces (`runtimeRequestTimeout` of
/// the kubelet).
const CALL_MARGIN: Duration = Duration::from_secs(120);

pub(super) async fn probe(
    channel: Channel,
    container_id: String,
    command: Vec<String>,
    grant: Vec<u8>,
    timeout: Duration,
) -> Attempt {
    // The event has at most that much of the command.
    let line = cut(&command.join(" "), MAX_OUTPUT).to_owned();
    let timeout_seconds = u32::try_from(timeout.as_secs()).unwrap_or(u32::MAX);
    let mut request = tonic::Request::new(ProbeExecRequest { container_id, command, timeout_seconds, grant });
    request.set_timeout(timeout.saturating_add(CALL_MARGIN));
    let mut client = ProbeExecClient::new(Caller::new(channel));
    let reply = match client.exec(request).await {
        Ok(reply) => reply.into_inner(),
        Err(status) => {
            // An unavailable proxy or runtime is no event of the pod. A status with a source comes from a
            // broken connection.
            let unavailable =
                status.code() == Code::Unavailable || std::error::Error::source(&status).is_some();
            let event = !unavailable;
            return Attempt::Broken(Broken { state: "unknown", error: go_status(&status), event });
        }
    };
    if reply.timed_out {
        let after = go_duration::format(timeout);
        return Attempt::Failure(format!("command timed out: {line:?} timed out after {after}"));
    }
    let output = String::from_utf8_lossy(&reply.output);
    let output = cut(&output, MAX_OUTPUT).to_owned();
    if reply.exit_code == 0 { Attempt::Success(output) } else { Attempt::Failure(output) }
}
