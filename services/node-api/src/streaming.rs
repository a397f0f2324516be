//! `/exec`, `/attach`, `/portForward`: the runtime's streaming server, with bytes passed on both ways as they are.
//!
//! The runtime gives a URL for one use; the client's request goes there with its upgrade, and after a 101 neither SPDY nor
//! WebSocket is looked into, but for the two protocols of [`crate::websocket`]. Whatever says who the client is, is taken
//! out before.

use std::sync::Arc;

use axum::body::Body;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use k8s_cri::v1;
use quintlet_kit::{contain, task};
use serde_json::Value;
use tonic::{Code, Status};

use crate::answer::{Answer, error, text};
use crate::auth::authn;
use crate::counters::UnderWay;
use crate::relay;
use crate::remote_command::{Action, Streams, Target};
use crate::select;
use crate::server::Peer;
use crate::state::State;
use crate::uri::query;
use crate::websocket::{self, Form, TUNNEL};

/// What the runtime has ready.
struct Place {
    url: String,
    /// The streams it waits for; none of a port-forward's are known before.
    streams: Streams,
}

/// Answers.
pub async fn stream(state: &State, action: Action, mut request: Request<Incoming>) -> Answer {
    let Some(target) = Target::parse(request.uri().path(), action != Action::PortForward) else {
        return crate::answer::not_found();
    };
    match place(state, action, &target, &request).await {
        Ok(place) => pass_on(state, action, place, &mut request).await,
        Err(answer) => answer,
    }
}

fn fault(why: impl std::fmt::Display) -> Answer {
    text(StatusCode::INTERNAL_SERVER_ERROR, why.to_string())
}

/// What the proxy of the kubelet says, which ends its lines.
fn proxy_fault(why: impl std::fmt::Display) -> Answer {
    error(StatusCode::INTERNAL_SERVER_ERROR, why)
}

/// The pod that a path names.
///
/// # Errors
/// There is none, or pod-sync does not answer.
async fn pod(state: &State, target: &Target, unlike: &str) -> Result<(Value, String), Answer> {
    let view = state.node.pod(&target.namespace, &target.pod).await;
    // In the runtime's form: kubectl reads `pod-sync: why` as YAML of an empty Status and tells nothing.
    let view = view.map_err(|status| {
        fault(format!("rpc error: code = {:?} desc = pod-sync: {}", status.code(), status.message()))
    })?;
    let view = view.ok_or_else(|| text(StatusCode::NOT_FOUND, "pod does not exist"))?;
    let pod: Value = serde_json::from_slice(&view.pod).unwrap_or_default();
    // The API server knows a static pod by the UID of its copy.
    if let Some(uid) = &target.uid
        && *uid != view.uid
        && (view.mirror_uid.is_empty() || *uid != view.mirror_uid)
    {
        return Err(text(StatusCode::NOT_FOUND, unlike));
    }
    Ok((pod, view.uid))
}

/// Where the runtime serves what is asked for.
async fn place(
    state: &State,
    action: Action,
    target: &Target,
    request: &Request<Incoming>,
) -> Result<Place, Answer> {
    let query = query(request);
    let mut streams = Streams::parse(&query);
    if action != Action::PortForward && streams.is_none() {
        let message = "you must specify at least 1 of stdin, stdout, stderr";
        return Err(text(StatusCode::BAD_REQUEST, message));
    }
    let unlike = if action == Action::PortForward { "pod not found" } else { "pod does not exist" };
    let (object, uid) = pod(state, target, unlike).await?;
    let id = match action {
        Action::Exec => select::running(&object, &target.container)
            .ok_or_else(|| fault(format!("container not found ({:?})", target.container)))?,
        Action::Attach => select::running(&object, &target.container).ok_or_else(|| {
            let full = format!("{}_{}", target.pod, target.namespace);
            fault(format!("container {} not found in pod {full}", target.container))
        })?,
        Action::PortForward => sandbox(state, &uid)
            .await?
            .ok_or_else(|| fault(format!("pod not found (\"{}_{}\")", target.pod, target.namespace)))?,
    };
    if !is_upgrade(request.headers()) {
        return Err(proxy_fault("Upgrade request required"));
    }
    let mut runtime = state.node.runtime();
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
            // Whether there is a terminal was settled when the container was made.
            let spec = select::spec(&object, &target.container);
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
    let url = url.map_err(|status| of_runtime(&status))?;
    Ok(Place { url, streams: streams.unwrap_or(Streams::NONE) })
}

/// Ports of a WebSocket client; a SPDY client names them in its streams.
fn ports(query: &[(String, String)]) -> Vec<i32> {
    let named = query.iter().filter(|(k, _)| k == "port" || k == "ports");
    named.flat_map(|(_, v)| v.split(',')).filter_map(|p| p.trim().parse().ok()).collect()
}

async fn sandbox(state: &State, uid: &str) -> Result<Option<String>, Answer> {
    let filter = v1::PodSandboxFilter {
        state: Some(v1::PodSandboxStateValue { state: v1::PodSandboxState::SandboxReady.into() }),
        label_selector: [("io.kubernetes.pod.uid".to_owned(), uid.to_owned())].into(),
        ..Default::default()
    };
    let request = v1::ListPodSandboxRequest { filter: Some(filter) };
    let listed = state.node.runtime().list_pod_sandbox(request).await.map_err(|s| of_runtime(&s))?;
    let newest = listed.into_inner().items.into_iter().max_by_key(|s| s.created_at);
    Ok(newest.map(|s| s.id))
}

/// An error of the runtime, as the kubelet answers it.
fn of_runtime(status: &Status) -> Answer {
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

async fn pass_on(state: &State, action: Action, place: Place, request: &mut Request<Incoming>) -> Answer {
    let Ok(permit) = state.upgrades.clone().try_acquire_owned() else {
        return error(StatusCode::TOO_MANY_REQUESTS, "too many exec, attach and port-forward connections");
    };
    let client = hyper::upgrade::on(&mut *request);
    let form = Form::of(action, request.headers());
    let dialled = tokio::time::timeout(state.limits.upgrade, dial(&place.url, request, &form)).await;
    let mut answer = match dialled {
        Ok(Ok(answer)) => answer,
        Ok(Err(why)) => return proxy_fault(format!("error dialing backend: {why}")),
        Err(_) => return proxy_fault("the runtime's streaming server does not answer"),
    };
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        if answer.status().is_redirection() {
            return proxy_fault("the runtime's streaming server redirects, which is not followed");
        }
        return answer.map(Body::new);
    }
    let runtime = hyper::upgrade::on(&mut answer);
    if let Some(headers) = form.towards_client() {
        *answer.headers_mut() = headers;
    }
    let life = request.extensions().get::<Peer>().map(|p| p.life.clone());
    let under_way = request.extensions().get::<Arc<UnderWay>>().cloned();
    let open = state.counters.upgrades.clone();
    let (cut, half_open, wait) = (state.cut.clone(), state.limits.half_open, state.limits.upgrade);
    // Who switches to SPDY opens streams; a runtime keeps one that does not for as long as a stream may be idle.
    let first = is_spdy(request.headers()).then_some(wait);
    let work = async move {
        open.inc();
        // A client that never takes the 101 holds its place for no longer than a header may take.
        let both = tokio::time::timeout(wait, async { tokio::try_join!(client, runtime) }).await;
        if let Ok(Ok((client, runtime))) = both {
            let (client, runtime) = (TokioIo::new(client), TokioIo::new(runtime));
            let carried = async {
                match form {
                    Form::Runtime => relay::copy(client, runtime, first, half_open).await,
                    Form::Translated { protocol: TUNNEL, .. } => {
                        websocket::tunnel(client, runtime, wait).await
                    }
                    Form::Translated { .. } => websocket::channels(client, runtime, place.streams).await,
                }
            };
            // Cut at the end of the process only.
            let _ = cut.run_until_cancelled(carried).await;
        }
        open.dec();
        drop((permit, life, under_way));
    };
    drop(task::spawn_contained("node-api-upgraded", contain::current(), state.tasks.track_future(work)));
    answer.map(|_| Body::empty())
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

async fn dial(url: &str, request: &Request<Incoming>, form: &Form) -> Result<Response<Incoming>, BoxError> {
    let uri: Uri = url.parse()?;
    let authority = uri.authority().ok_or("the runtime's URL has no address")?;
    let stream = quintlet_spdy::dial(&uri).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake::<_, Body>(TokioIo::new(stream)).await?;
    drop(task::spawn_contained("node-api-to-runtime", contain::current(), async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "the runtime's streaming server hung up");
        }
    }));
    let (method, mut headers) = match form.towards_runtime() {
        Some(headers) => (Method::POST, headers),
        None => (request.method().clone(), request.headers().clone()),
    };
    authn::strip(&mut headers);
    headers.insert(header::HOST, HeaderValue::from_str(authority.as_str())?);
    // Neither SPDY nor WebSocket clients send a body before the upgrade.
    headers.remove(header::TRANSFER_ENCODING);
    headers.remove(header::CONTENT_LENGTH);
    let mut sent = Request::new(Body::empty());
    *sent.method_mut() = method;
    *sent.uri_mut() = uri.path_and_query().map_or("/", |p| p.as_str()).parse()?;
    *sent.headers_mut() = headers;
    Ok(sender.send_request(sent).await?)
}

/// `/run/{namespace}/{pod}[/{uid}]/{container}?cmd=`: a command's output, once it has ended.
pub async fn run(state: &State, request: &Request<Incoming>) -> Answer {
    let Some(target) = Target::parse(request.uri().path(), true) else { return crate::answer::not_found() };
    run_in(state, &target, &query(request)).await.unwrap_or_else(|answer| answer)
}

async fn run_in(state: &State, target: &Target, query: &[(String, String)]) -> Result<Answer, Answer> {
    let (object, _) = pod(state, target, "pod does not exist").await?;
    let id = select::running(&object, &target.container)
        .ok_or_else(|| fault(format!("container not found ({:?})", target.container)))?;
    let cmd = query.iter().find(|(k, _)| k == "cmd").map(|(_, v)| v.as_str()).unwrap_or_default();
    let request = v1::ExecSyncRequest {
        container_id: id,
        cmd: cmd.split(' ').map(str::to_owned).collect(),
        timeout: 0,
    };
    let reply = state.node.runtime().exec_sync(request).await.map_err(|s| of_runtime(&s))?.into_inner();
    let mut out = reply.stdout;
    out.extend(reply.stderr);
    if reply.exit_code != 0 {
        let out = String::from_utf8_lossy(&out);
        return Err(fault(format!("command '{cmd}' exited with {}: {out}", reply.exit_code)));
    }
    Ok(crate::answer::json(out))
}
