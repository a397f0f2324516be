//! `/exec`, `/attach`, `/portForward`: connects the client to the runtime's streaming server.
//!
//! The runtime returns a URL that is valid once. The client's request is sent there with its upgrade. After
//! the 101, bytes are copied unchanged, except for the two protocols of [`crate::websocket`]. Credentials of
//! the client are removed from the request.

use std::sync::Arc;

use axum::body::Body;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use node_api_access::authn;
use node_api_access::limits::Limits;
use node_api_base::answer::{Answer, error, text};
use node_api_base::pod_lookup;
use node_api_base::services::{Services, record_error};
use node_api_base::uri::query;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_cri_api::v1;
use quintlet_kit::{contain, task};
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Code, Status};

use crate::relay;
use crate::remote_command::{Action, Streams, Target};
use crate::run_output;
use crate::websocket::{self, StreamProtocol, TUNNEL};

/// The parts of the server that streams use.
#[derive(Debug)]
pub struct StreamServer {
    /// Clients of cri-proxy and pod-sync.
    pub services: Services,
    /// Limits of the listener that accepts the requests.
    pub limits: Limits,
    /// Slots for upgraded connections.
    pub slots: Arc<Semaphore>,
    /// Upgraded connections that are open now.
    pub open: Gauge,
    /// Tasks of connections.
    pub tasks: TaskTracker,
    /// Cancelled when open connections are closed.
    pub abort: CancellationToken,
}

/// The runtime's streaming URL for a request.
struct StreamingEndpoint {
    url: String,
    /// The streams that the runtime expects. A port-forward has none.
    streams: Streams,
}

/// Handles exec, attach and port-forward. An upgraded connection keeps the value of `hold` until it ends.
pub async fn stream<H: Send + 'static>(
    server: &StreamServer,
    action: Action,
    mut request: Request<Incoming>,
    hold: impl FnOnce() -> H + Send,
) -> Answer {
    let Some(target) = Target::parse(request.uri().path(), action != Action::PortForward) else {
        return node_api_base::answer::not_found();
    };
    match endpoint(server, action, &target, &request).await {
        Ok(endpoint) => proxy(server, action, endpoint, &mut request, hold).await,
        Err(answer) => answer,
    }
}

fn server_error(why: impl std::fmt::Display) -> Answer {
    text(StatusCode::INTERNAL_SERVER_ERROR, why.to_string())
}

/// Returns an error as the kubelet's upgrade-aware proxy does, with a line end.
fn proxy_error(why: impl std::fmt::Display) -> Answer {
    error(StatusCode::INTERNAL_SERVER_ERROR, why)
}

/// Returns the object and UID of the pod that a path names.
///
/// # Errors
/// Fails if there is no such pod, or if pod-sync does not answer.
async fn pod(server: &StreamServer, target: &Target, mismatch: &str) -> Result<(Value, String), Answer> {
    let view = server.services.pod(&target.namespace, &target.pod).await;
    // The format of a runtime error: kubectl parses `pod-sync: …` as YAML of an empty Status and prints
    // nothing.
    let view = view.map_err(|status| {
        server_error(format!("rpc error: code = {:?} desc = pod-sync: {}", status.code(), status.message()))
    })?;
    let view = view.ok_or_else(|| text(StatusCode::NOT_FOUND, "pod does not exist"))?;
    let pod: Value = serde_json::from_slice(&view.pod).unwrap_or_default();
    // The API server knows a static pod by the UID of its mirror pod.
    if let Some(uid) = &target.uid
        && *uid != view.uid
        && (view.mirror_uid.is_empty() || *uid != view.mirror_uid)
    {
        return Err(text(StatusCode::NOT_FOUND, mismatch));
    }
    Ok((pod, view.uid))
}

/// Requests the streaming URL from the runtime.
async fn endpoint(
    server: &StreamServer,
    action: Action,
    target: &Target,
    request: &Request<Incoming>,
) -> Result<StreamingEndpoint, Answer> {
    let query = query(request);
    let mut streams = Streams::parse(&query);
    if action != Action::PortForward && streams.is_none() {
        let message = "you must specify at least 1 of stdin, stdout, stderr";
        return Err(text(StatusCode::BAD_REQUEST, message));
    }
    let mismatch = if action == Action::PortForward { "pod not found" } else { "pod does not exist" };
    let (object, uid) = pod(server, target, mismatch).await?;
    let id = match action {
        Action::Exec => pod_lookup::running(&object, &target.container)
            .ok_or_else(|| server_error(format!("container not found ({:?})", target.container)))?,
        Action::Attach => pod_lookup::running(&object, &target.container).ok_or_else(|| {
            let full = format!("{}_{}", target.pod, target.namespace);
            server_error(format!("container {} not found in pod {full}", target.container))
        })?,
        Action::PortForward => sandbox(server, &uid).await?.ok_or_else(|| {
            server_error(format!("pod not found (\"{}_{}\")", target.pod, target.namespace))
        })?,
    };
    if !is_upgrade(request.headers()) {
        return Err(proxy_error("Upgrade request required"));
    }
    let mut runtime = server.services.runtime();
    let url = match (action, streams) {
        (Action::Exec, Some(s)) => {
            let cmd = query.into_iter().filter(|(k, _)| k == "command").map(|(_, v)| v).collect();
            let request = v1::ExecRequest {
                container_id: id,
                cmd,
                tty: s.tty,
                stdin: s.stdin,
                stdout: s.stdout,
                stderr: s.stderr,
            };
            runtime.exec(request).await.map(|r| r.into_inner().url)
        }
        (Action::Attach, Some(s)) => {
            // Whether the container has a terminal was decided at its creation.
            let spec = pod_lookup::spec(&object, &target.container);
            let tty = spec.is_some_and(|c| c["tty"] == true);
            let s = Streams { tty, stderr: s.stderr && !tty, ..s };
            streams = Some(s);
            let request = v1::AttachRequest {
                container_id: id,
                stdin: s.stdin,
                tty,
                stdout: s.stdout,
                stderr: s.stderr,
            };
            runtime.attach(request).await.map(|r| r.into_inner().url)
        }
        (Action::PortForward, _) | (_, None) => {
            let request = v1::PortForwardRequest { pod_sandbox_id: id, port: ports(&query) };
            runtime.port_forward(request).await.map(|r| r.into_inner().url)
        }
    };
    let url = url.map_err(|status| runtime_error(&status))?;
    Ok(StreamingEndpoint { url, streams: streams.unwrap_or(Streams::NONE) })
}

/// Returns the ports that a WebSocket client requests. A SPDY client names them in its streams.
fn ports(query: &[(String, String)]) -> Vec<i32> {
    let named = query.iter().filter(|(k, _)| k == "port" || k == "ports");
    named.flat_map(|(_, v)| v.split(',')).filter_map(|p| p.trim().parse().ok()).collect()
}

async fn sandbox(server: &StreamServer, uid: &str) -> Result<Option<String>, Answer> {
    let filter = v1::PodSandboxFilter {
        state: Some(v1::PodSandboxStateValue { state: v1::PodSandboxState::SandboxReady.into() }),
        label_selector: [("io.kubernetes.pod.uid".to_owned(), uid.to_owned())].into(),
        ..Default::default()
    };
    let request = v1::ListPodSandboxRequest { filter: Some(filter) };
    let listed = server.services.runtime().list_pod_sandbox(request).await.map_err(|s| runtime_error(&s))?;
    let newest = listed.into_inner().items.into_iter().max_by_key(|s| s.created_at);
    Ok(newest.map(|s| s.id))
}

/// Converts an error of the runtime to the kubelet's response.
fn runtime_error(status: &Status) -> Answer {
    record_error(status);
    let code = match status.code() {
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    let mut answer = text(code, format!("rpc error: code = {:?} desc = {}", status.code(), status.message()));
    if code == StatusCode::TOO_MANY_REQUESTS {
        answer.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("60"));
    }
    answer
}

fn is_upgrade(headers: &HeaderMap) -> bool {
    let words = headers.get_all(header::CONNECTION).iter().filter_map(|v| v.to_str().ok());
    words.flat_map(|v| v.split(',')).any(|w| w.trim().eq_ignore_ascii_case("upgrade"))
        && headers.contains_key(header::UPGRADE)
}

fn is_spdy(headers: &HeaderMap) -> bool {
    let upgrade = headers.get(header::UPGRADE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    upgrade.get(..4).is_some_and(|u| u.eq_ignore_ascii_case("spdy"))
}

async fn proxy<H: Send + 'static>(
    server: &StreamServer,
    action: Action,
    endpoint: StreamingEndpoint,
    request: &mut Request<Incoming>,
    hold: impl FnOnce() -> H + Send,
) -> Answer {
    let Ok(permit) = server.slots.clone().try_acquire_owned() else {
        return error(StatusCode::TOO_MANY_REQUESTS, "too many exec, attach and port-forward connections");
    };
    let client = hyper::upgrade::on(&mut *request);
    let stream_protocol = StreamProtocol::negotiate(action, request.headers());
    let dialled =
        tokio::time::timeout(server.limits.upgrade, dial(&endpoint.url, request, &stream_protocol)).await;
    let mut answer = match dialled {
        Ok(Ok(answer)) => answer,
        Ok(Err(why)) => return proxy_error(format!("error dialing backend: {why}")),
        Err(_) => return proxy_error("the runtime's streaming server does not answer"),
    };
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        if answer.status().is_redirection() {
            return proxy_error("the runtime's streaming server redirects, which is not followed");
        }
        return answer.map(Body::new);
    }
    let runtime = hyper::upgrade::on(&mut answer);
    if let Some(headers) = stream_protocol.client_headers() {
        *answer.headers_mut() = headers;
    }
    // The connection remains in use after the response.
    let held = hold();
    let open = server.open.clone();
    let abort = server.abort.clone();
    let half_open = server.limits.half_open;
    let wait = server.limits.upgrade;
    // A client that upgrades to SPDY opens streams at once. The runtime would keep a silent one for its
    // stream idle timeout.
    let first = is_spdy(request.headers()).then_some(wait);
    let work = async move {
        open.inc();
        // A client that does not read the 101 holds its slot for as long as a header may take.
        let both = tokio::time::timeout(wait, async { tokio::try_join!(client, runtime) }).await;
        if let Ok(Ok((client, runtime))) = both {
            let (client, runtime) = (TokioIo::new(client), TokioIo::new(runtime));
            let carried = async {
                match stream_protocol {
                    StreamProtocol::PassThrough => {
                        relay::copy(client, runtime, first, half_open, &abort).await;
                    }
                    StreamProtocol::Translated { protocol: TUNNEL, .. } => {
                        websocket::tunnel(client, runtime, wait, &abort).await;
                    }
                    StreamProtocol::Translated { .. } => {
                        websocket::channels(client, runtime, endpoint.streams, &abort).await;
                    }
                }
            };
            // `abort` is cancelled only when the process ends, which waits a second for the sessions.
            carried.await;
        }
        open.dec();
        drop((permit, held));
    };
    drop(task::spawn_contained("node-api-upgraded", contain::current(), server.tasks.track_future(work)));
    answer.map(|_| Body::empty())
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

async fn dial(
    url: &str,
    request: &Request<Incoming>,
    stream_protocol: &StreamProtocol,
) -> Result<Response<Incoming>, BoxError> {
    let uri: Uri = url.parse()?;
    let authority = uri.authority().ok_or("the runtime's URL has no address")?;
    let stream = quintlet_spdy::dial(&uri).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake::<_, Body>(TokioIo::new(stream)).await?;
    drop(task::spawn_contained("node-api-to-runtime", contain::current(), async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "connection to the runtime's streaming server failed");
        }
    }));
    let (method, mut headers) = match stream_protocol.runtime_headers() {
        Some(headers) => (Method::POST, headers),
        None => (request.method().clone(), request.headers().clone()),
    };
    authn::remove_credentials(&mut headers);
    headers.insert(header::HOST, HeaderValue::from_str(authority.as_str())?);
    // SPDY and WebSocket clients send no body before the upgrade.
    headers.remove(header::TRANSFER_ENCODING);
    headers.remove(header::CONTENT_LENGTH);
    let mut sent = Request::new(Body::empty());
    *sent.method_mut() = method;
    *sent.uri_mut() = uri.path_and_query().map_or("/", |p| p.as_str()).parse()?;
    *sent.headers_mut() = headers;
    Ok(sender.send_request(sent).await?)
}

/// Handles `/run/{namespace}/{pod}[/{uid}]/{container}?cmd=`: responds with the output of a command when it
/// has exited.
pub async fn run(server: &StreamServer, request: &Request<Incoming>) -> Answer {
    let Some(target) = Target::parse(request.uri().path(), true) else {
        return node_api_base::answer::not_found();
    };
    run_in(server, &target, &query(request)).await.unwrap_or_else(|answer| answer)
}

async fn run_in(
    server: &StreamServer,
    target: &Target,
    query: &[(String, String)],
) -> Result<Answer, Answer> {
    let (object, _) = pod(server, target, "pod does not exist").await?;
    let id = pod_lookup::running(&object, &target.container)
        .ok_or_else(|| server_error(format!("container not found ({:?})", target.container)))?;
    let cmd = query.iter().find(|(k, _)| k == "cmd").map(|(_, v)| v.as_str()).unwrap_or_default();
    let request = v1::ExecSyncRequest {
        container_id: id,
        cmd: cmd.split(' ').map(str::to_owned).collect(),
        timeout: 0,
    };
    let reply =
        server.services.runtime().exec_sync(request).await.map_err(|s| runtime_error(&s))?.into_inner();
    Ok(run_output::response(cmd, reply))
}
