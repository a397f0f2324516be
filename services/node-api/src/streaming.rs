//! `/exec`, `/attach`, `/portForward`: the runtime's streaming server, with bytes passed on both ways as they are.
//!
//! The runtime gives a URL for one use; the client's request goes there with its upgrade, and after a 101 neither SPDY nor
//! WebSocket is looked into, but for the two protocols of [`crate::websocket`]. Whatever says who the client is, is taken
//! out before.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use k8s_cri::v1;
use quintlet_kit::{contain, task};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadHalf, WriteHalf};
use tonic::{Code, Status};

use crate::answer::{Answer, error, text};
use crate::auth::authn;
use crate::counters::UnderWay;
use crate::routes::{State, query, segments};
use crate::select;
use crate::server::Peer;
use crate::websocket::{self, Form, TUNNEL};

/// Bytes in flight in one direction of one connection.
const BUFFER: usize = 32 << 10;

/// What a client wants of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// A new process.
    Exec,
    /// The streams of the main process.
    Attach,
    /// A connection to a port.
    PortForward,
}

/// Which streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Streams {
    pub(crate) stdin: bool,
    pub(crate) stdout: bool,
    pub(crate) stderr: bool,
    pub(crate) tty: bool,
}

impl Streams {
    const NONE: Self = Self { stdin: false, stdout: false, stderr: false, tty: false };
}

/// What the runtime has ready.
struct Place {
    url: String,
    /// The streams it waits for; none of a port-forward's are known before.
    streams: Streams,
}

impl Streams {
    fn parse(query: &[(String, String)]) -> Option<Self> {
        let flag = |name: &str| query.iter().any(|(k, v)| k == name && v == "1");
        let tty = flag("tty");
        let streams =
            Self { stdin: flag("input"), stdout: flag("output"), stderr: flag("error") && !tty, tty };
        (streams.stdin || streams.stdout || streams.stderr).then_some(streams)
    }
}

/// What a path names.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Target {
    namespace: String,
    pod: String,
    uid: Option<String>,
    container: String,
}

impl Target {
    /// `{namespace}/{pod}[/{uid}][/{container}]`.
    fn parse(path: &str, has_container: bool) -> Option<Self> {
        let parts = segments(path);
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        let (namespace, pod, uid, container) = match (parts.as_slice(), has_container) {
            ([ns, pod, container], true) => (ns, pod, None, *container),
            ([ns, pod, uid, container], true) => (ns, pod, Some(*uid), *container),
            ([ns, pod], false) => (ns, pod, None, ""),
            ([ns, pod, uid], false) => (ns, pod, Some(*uid), ""),
            _ => return None,
        };
        let there = |s: &str| !s.is_empty();
        if !there(namespace) || !there(pod) || (has_container && !there(container)) || uid == Some("") {
            return None;
        }
        Some(Self {
            namespace: (*namespace).to_owned(),
            pod: (*pod).to_owned(),
            uid: uid.map(str::to_owned),
            container: container.to_owned(),
        })
    }
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
                    Form::Runtime => copy(client, runtime, first, half_open).await,
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

/// Copies both ways until both have ended, or one has and the other does not within `half_open`. A client that has to speak
/// within `first` and does not has ended.
async fn copy<A, B>(client: A, runtime: B, first: Option<Duration>, half_open: Duration)
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    let (client_in, client_out) = tokio::io::split(client);
    let (runtime_in, runtime_out) = tokio::io::split(runtime);
    let mut up = std::pin::pin!(one_way(client_in, runtime_out, first));
    let mut down = std::pin::pin!(one_way(runtime_in, client_out, None));
    // What has ended is not polled again; the other gets the rest of the time.
    tokio::select! {
        () = up.as_mut() => drop(tokio::time::timeout(half_open, down).await),
        () = down.as_mut() => drop(tokio::time::timeout(half_open, up).await),
    }
}

async fn one_way<R: AsyncRead, W: AsyncWrite>(
    mut from: ReadHalf<R>,
    mut to: WriteHalf<W>,
    mut first: Option<Duration>,
) {
    let mut buffer = vec![0; BUFFER];
    loop {
        let read = from.read(&mut buffer);
        let read = match first.take() {
            Some(limit) => tokio::time::timeout(limit, read).await.unwrap_or(Ok(0)),
            None => read.await,
        };
        match read {
            Ok(n) if n > 0 => {
                if to.write_all(&buffer[..n]).await.is_err() || to.flush().await.is_err() {
                    return;
                }
            }
            _ => {
                // The other end may be gone, too.
                let _ = to.shutdown().await;
                return;
            }
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_those_that_are_exactly_one_and_a_terminal_has_no_stderr() {
        let parse = |q: &str| Streams::parse(&crate::routes::decode_form(q));
        let streams = |stdin, stdout, stderr, tty| Some(Streams { stdin, stdout, stderr, tty });
        assert_eq!(parse("input=1&output=1&error=1&tty=1"), streams(true, true, false, true));
        assert_eq!(parse("output=1&error=1&input=true"), streams(false, true, true, false));
        assert_eq!(parse("error=1&tty=1"), None);
        assert_eq!(parse("stdin=1"), None);
    }

    #[test]
    fn paths_name_pod_and_container_and_maybe_the_uid() {
        let target = |uid: Option<&str>, container: &str| Target {
            namespace: "ns".into(),
            pod: "p".into(),
            uid: uid.map(str::to_owned),
            container: container.into(),
        };
        assert_eq!(Target::parse("/exec/ns/p/c", true), Some(target(None, "c")));
        assert_eq!(Target::parse("/exec/ns/p/u/c", true), Some(target(Some("u"), "c")));
        assert_eq!(Target::parse("/portForward/ns/p", false), Some(target(None, "")));
        assert_eq!(Target::parse("/portForward/ns/p/u", false), Some(target(Some("u"), "")));
        for bad in ["/exec/ns/p", "/exec/ns/p/c/", "/exec//p/c", "/exec/ns/p/u/c/x", "/exec"] {
            assert_eq!(Target::parse(bad, true), None, "{bad}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn when_one_direction_has_ended_the_other_has_a_moment_and_no_more() {
        let (client, mut far_client) = tokio::io::duplex(64);
        let (runtime, mut far_runtime) = tokio::io::duplex(64);
        let copied = task::spawn("copy", copy(client, runtime, None, Duration::from_secs(10)));
        far_client.write_all(b"ping").await.unwrap();
        let mut four = [0; 4];
        far_runtime.read_exact(&mut four).await.unwrap();
        assert_eq!(&four, b"ping");
        far_client.shutdown().await.unwrap();
        // The runtime neither answers nor hangs up.
        let before = tokio::time::Instant::now();
        copied.await.unwrap();
        assert_eq!(before.elapsed(), Duration::from_secs(10));
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_to_speak_first_and_does_not_is_hung_up_on_and_who_spoke_may_be_silent() {
        let (first, half_open) = (Duration::from_secs(30), Duration::from_secs(10));
        for (speaks, kept) in [(false, false), (true, true)] {
            let (client, mut far_client) = tokio::io::duplex(64);
            let (runtime, _far_runtime) = tokio::io::duplex(64);
            let copied = task::spawn("copy", copy(client, runtime, Some(first), half_open));
            if speaks {
                far_client.write_all(b"ping").await.unwrap();
            }
            let ended = tokio::time::timeout(Duration::from_secs(3600), copied).await.is_ok();
            assert_eq!(ended, !kept, "speaks: {speaks}");
        }
    }
}
