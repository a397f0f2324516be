//! The services this proxy answers itself: hints, information, probe execs.
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::Stream;
use http::HeaderMap;
use k8s_cri::v1;
use prost::Message as _;
use quintlet_kit::grant::GrantKey;
use quintlet_proto::runtime::v1 as pb;
use tokio::sync::watch;
use tonic::{Code, Request, Response, Status};
use tracing::Instrument as _;

use crate::budget::Held;
use crate::facts::Facts;
use crate::forward::{self, Call, Forwarder};
use crate::hints::Hub;
use crate::policy::{PROBE_EXEC, Socket};
use crate::reply;
use crate::source::RuntimeInfo;

/// `RuntimeEvents`.
#[derive(Debug, Clone)]
pub struct Events(pub Hub);

#[tonic::async_trait]
impl pb::runtime_events_server::RuntimeEvents for Events {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<pb::RuntimeEvent, Status>> + Send>>;

    async fn watch(&self, _: Request<pb::WatchHintsRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let subscriber = self.0.subscribe();
        let events = futures::stream::unfold(subscriber, |mut subscriber| async move {
            let event = subscriber.next().await?;
            Some((Ok(pb::RuntimeEvent { event: Some(event), trace: None }), subscriber))
        });
        Ok(Response::new(Box::pin(events)))
    }
}

/// `ProxyInfo`.
#[derive(Debug, Clone)]
pub struct Info {
    /// The runtime's state.
    pub runtime: watch::Receiver<RuntimeInfo>,
    /// The source's state.
    pub hub: Hub,
    /// The owner's epoch.
    pub forwarder: Arc<Forwarder>,
    /// The runtime's endpoint.
    pub endpoint: String,
}

#[tonic::async_trait]
impl pb::proxy_info_server::ProxyInfo for Info {
    async fn get(&self, _: Request<pb::ProxyInfoRequest>) -> Result<Response<pb::ProxyInfoReply>, Status> {
        let runtime = self.runtime.borrow().clone();
        Ok(Response::new(pb::ProxyInfoReply {
            connected: runtime.connected,
            runtime_name: runtime.name,
            runtime_version: runtime.version,
            runtime_api_version: runtime.api_version,
            endpoint: self.endpoint.clone(),
            source: Some(self.hub.state()),
            error: runtime.error,
            owner_epoch: self.forwarder.owner_epoch(),
        }))
    }
}

/// The key that grants are checked with. A key that cannot be read yet is tried again at the next call.
#[derive(Debug)]
pub struct Grants {
    path: PathBuf,
    key: OnceLock<GrantKey>,
}

impl Grants {
    /// Grants by the key at `path`, which is made if it is not there.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path, key: OnceLock::new() }
    }

    fn key(&self) -> Result<&GrantKey, Status> {
        if let Some(key) = self.key.get() {
            return Ok(key);
        }
        let key = GrantKey::load_or_create(&self.path).map_err(|error| {
            Status::unavailable(format!("grants cannot be checked: {}: {error}", self.path.display()))
        })?;
        Ok(self.key.get_or_init(|| key))
    }
}

/// Output of a probe is cut to this many bytes, as the kubelet does.
pub const MAX_OUTPUT: usize = 10 * 1024;

/// `ProbeExec`.
#[derive(Debug, Clone)]
pub struct ProbeExec {
    /// Sends the exec.
    pub forwarder: Arc<Forwarder>,
    /// Checks the grant.
    pub grants: Arc<Grants>,
}

#[tonic::async_trait]
impl pb::probe_exec_server::ProbeExec for ProbeExec {
    async fn exec(
        &self,
        request: Request<pb::ProbeExecRequest>,
    ) -> Result<Response<pb::ProbeExecReply>, Status> {
        let (metadata, _, request) = request.into_parts();
        if request.timeout_seconds == 0 {
            return Err(Status::invalid_argument("timeout_seconds must be at least 1"));
        }
        let key = self.grants.key()?;
        if !key.verify(&request.grant, &request.container_id, &request.command, request.timeout_seconds) {
            self.forwarder.metrics().fenced("grant");
            return Err(Status::permission_denied(format!(
                "the grant does not allow this command in container {:?}",
                request.container_id
            )));
        }
        let seconds = i64::from(request.timeout_seconds);
        let exec = v1::ExecSyncRequest {
            container_id: request.container_id,
            cmd: request.command,
            timeout: seconds,
        };
        let call = Call {
            policy: &PROBE_EXEC,
            headers: own_headers(),
            body: reply::framed(&exec),
            facts: Facts { seconds: Some(seconds), ..Facts::default() },
            budget: self.forwarder.budget(Socket::Probe),
            held: Held::default(),
        };
        let span = forward::span(call.policy.service, call.policy.method, Socket::Probe, metadata.as_ref());
        let reply = self.forwarder.run(&call, None).instrument(span).await;
        let status = reply.status();
        match status.code() {
            Code::Ok => {
                let body = reply.data.concat().into();
                let message = reply::message(&body).map_err(|e| Status::internal(e.to_string()))?;
                let answer =
                    v1::ExecSyncResponse::decode(message).map_err(|e| Status::internal(e.to_string()))?;
                let mut output = answer.stdout;
                output.extend_from_slice(&answer.stderr);
                output.truncate(MAX_OUTPUT);
                Ok(Response::new(pb::ProbeExecReply {
                    exit_code: answer.exit_code,
                    output,
                    timed_out: false,
                }))
            }
            // The runtime's own word: the command ran out of time. A runtime that hangs says nothing.
            Code::DeadlineExceeded if !reply.is_ours() => {
                Ok(Response::new(pb::ProbeExecReply { timed_out: true, ..Default::default() }))
            }
            Code::Cancelled => Err(Status::unavailable(status.message())),
            code => Err(Status::new(code, status.message())),
        }
    }
}

/// Metadata of calls that the proxy itself makes.
pub(crate) fn own_headers() -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/grpc"));
    headers.insert(http::header::TE, http::HeaderValue::from_static("trailers"));
    headers
}

/// How often depths are written to the metrics.
pub const OBSERVE_EVERY: Duration = Duration::from_secs(1);
