//! The gRPC services that the proxy implements itself: runtime events, information, probe execs.
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use parking_lot::RwLock;
use prost::Message as _;
use quintlet_cri_api::v1;
use quintlet_kit::grant::GrantKey;
use quintlet_kit::messages::Bounded;
use quintlet_kit::task;
use quintlet_proto::runtime::v1 as pb;
use tokio::sync::watch;
use tonic::{Code, Request, Response, Status};
use tracing::Instrument as _;

use crate::budget::Reservation;
use crate::forward::{self, Call, Forwarder, MAX_OUTPUT};
use crate::hints::Hub;
use crate::policy::{PROBE_EXEC, Socket};
use crate::reply;
use crate::request_info::RequestInfo;
use crate::runtime_info::RuntimeInfo;

/// The service `RuntimeEvents` of `quintlet.runtime.v1`: a stream of hints per subscriber.
#[derive(Debug, Clone)]
pub(crate) struct RuntimeEventsService(pub Hub);

#[tonic::async_trait]
impl pb::runtime_events_server::RuntimeEvents for RuntimeEventsService {
    type WatchStream = Bounded<pb::RuntimeEvent>;

    async fn watch(&self, _: Request<pb::WatchHintsRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let subscriber = self.0.subscribe();
        let events = futures::stream::unfold(subscriber, |mut subscriber| async move {
            let event = subscriber.next().await?;
            Some((Ok(pb::RuntimeEvent { event: Some(event), trace: None }), subscriber))
        });
        Ok(Response::new(Bounded::new("RuntimeEvents.Watch", events)))
    }
}

/// The service `ProxyInfo` of `quintlet.runtime.v1`: the state of the proxy and the runtime.
#[derive(Debug, Clone)]
pub(crate) struct ProxyInfoService {
    /// The runtime's identity and the state of the connection.
    pub runtime: watch::Receiver<RuntimeInfo>,
    /// The hints, whose source and losses are part of the reply.
    pub hub: Hub,
    /// The calls in flight, and the owner epoch.
    pub forwarder: Arc<Forwarder>,
    /// Endpoint of the runtime.
    pub endpoint: String,
}

#[tonic::async_trait]
impl pb::proxy_info_server::ProxyInfo for ProxyInfoService {
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

/// Verifies exec grants. The key is read again if a grant does not fit: pod-sync may have created another one
/// after the directory of the key was removed.
#[derive(Debug)]
pub(crate) struct GrantVerifier {
    path: PathBuf,
    key: RwLock<Option<GrantKey>>,
}

impl GrantVerifier {
    /// Verifies grants with the key at `path`, which is created if it does not exist.
    #[must_use]
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, key: RwLock::new(None) }
    }

    /// Returns whether a request has the grant for its command.
    ///
    /// # Errors
    /// UNAVAILABLE: no key could be read or created. It is read again at the next call.
    async fn allows(&self, request: &pb::ProbeExecRequest) -> Result<bool, Status> {
        let fits = |key: &GrantKey| {
            key.verify(&request.grant, &request.container_id, &request.command, request.timeout_seconds)
        };
        let known = self.key.read().clone();
        if known.as_ref().is_some_and(fits) {
            return Ok(true);
        }
        let (path, is_known) = (self.path.clone(), known.is_some());
        let read = move || {
            // A key that only this process has would fit no grant of pod-sync, so a known one is not replaced
            // by it.
            if is_known { GrantKey::load(&path) } else { GrantKey::load_or_create(&path) }
        };
        match task::blocking(read).await {
            Ok(key) => {
                let fits = fits(&key);
                if fits || !is_known {
                    *self.key.write() = Some(key);
                }
                Ok(fits)
            }
            Err(_) if is_known => Ok(false),
            Err(error) => {
                let path = self.path.display();
                Err(Status::unavailable(format!("failed to load the key of grants: {path}: {error}")))
            }
        }
    }
}

/// The service `ProbeExec` of `quintlet.runtime.v1`: runs the commands that pod-sync has signed.
#[derive(Debug, Clone)]
pub(crate) struct ProbeExecService {
    /// Sends the ExecSync.
    pub forwarder: Arc<Forwarder>,
    /// Verifies the signature of a command.
    pub grants: Arc<GrantVerifier>,
}

#[tonic::async_trait]
impl pb::probe_exec_server::ProbeExec for ProbeExecService {
    async fn exec(
        &self,
        request: Request<pb::ProbeExecRequest>,
    ) -> Result<Response<pb::ProbeExecReply>, Status> {
        let request = request.into_inner();
        if request.timeout_seconds == 0 {
            return Err(Status::invalid_argument("timeout_seconds must be at least 1"));
        }
        if !self.grants.allows(&request).await? {
            self.forwarder.metrics().fenced("grant");
            return Err(Status::permission_denied(format!(
                "the grant does not allow this command in container {:?}",
                request.container_id
            )));
        }
        let seconds = i64::from(request.timeout_seconds);
        let span = forward::span(PROBE_EXEC.service, PROBE_EXEC.method, Socket::Probe);
        span.record("container.id", request.container_id.as_str());
        let exec = v1::ExecSyncRequest {
            container_id: request.container_id,
            cmd: request.command,
            timeout: seconds,
        };
        let call = Call {
            policy: &PROBE_EXEC,
            headers: request_headers(),
            body: reply::frame(&exec),
            info: RequestInfo { seconds: Some(seconds), ..RequestInfo::default() },
            budget: self.forwarder.budget(Socket::Probe),
            held: Reservation::default(),
            short_output: Some(MAX_OUTPUT),
        };
        let reply = self.forwarder.run(&call).instrument(span).await;
        let status = reply.status();
        match status.code() {
            Code::Ok => {
                let body = reply.data.concat().into();
                let message = reply::unframe(&body).map_err(|e| Status::internal(e.to_string()))?;
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
            // The runtime reports that the command exceeded its time limit. A runtime that hangs does not
            // answer.
            Code::DeadlineExceeded if !reply.is_local() => {
                Ok(Response::new(pb::ProbeExecReply { timed_out: true, ..Default::default() }))
            }
            Code::Cancelled => Err(Status::unavailable(status.message())),
            code => Err(Status::new(code, status.message())),
        }
    }
}

/// Returns the metadata of calls that the proxy makes itself.
pub(crate) fn request_headers() -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/grpc"));
    headers.insert(http::header::TE, http::HeaderValue::from_static("trailers"));
    headers
}

/// Interval at which the load of lanes is written to the metrics.
pub(crate) const OBSERVE_INTERVAL: Duration = Duration::from_secs(10);
