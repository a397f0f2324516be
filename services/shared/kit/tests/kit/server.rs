//! A server on a real socket: health, permissions, trace context, `debug.v1`, shutdown.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use quintlet_kit::control::ControlService;
use quintlet_kit::messages::whole;
use quintlet_kit::server::{GuestLimits, HealthHandle, Server};
use quintlet_kit::slots::Share;
use quintlet_kit::socket::{Peer, PeerPolicy, bind_unix, caller, channel, wait_ready};
use quintlet_proto::debug::v1::control_client::ControlClient;
use quintlet_proto::debug::v1::control_server::Control;
use quintlet_proto::debug::v1::debug_client::DebugClient;
use quintlet_proto::debug::v1::{SetLogFilterRequest, TracesRequest};
use quintlet_proto::runtime::v1::probe_exec_client::ProbeExecClient;
use quintlet_proto::runtime::v1::probe_exec_server::{ProbeExec, ProbeExecServer};
use quintlet_proto::runtime::v1::{ProbeExecReply, ProbeExecRequest};
use quintlet_telemetry::TelemetryOptions;
use quintlet_telemetry::propagate::current_trace_id;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tracing::Instrument as _;

const LIMIT: Duration = Duration::from_secs(10);

/// Returns the trace of the call, the UID of the caller and its own name. A timeout of 60 s never ends, and
/// is counted; one of 61 s panics.
#[derive(Default)]
struct Echo {
    name: &'static str,
    open: watch::Sender<usize>,
}

impl Echo {
    fn new(name: &'static str) -> Self {
        Self { name, ..Self::default() }
    }
}

#[tonic::async_trait]
impl ProbeExec for Echo {
    async fn exec(&self, request: Request<ProbeExecRequest>) -> Result<Response<ProbeExecReply>, Status> {
        if request.get_ref().timeout_seconds == 60 {
            self.open.send_modify(|n| *n += 1);
            std::future::pending::<()>().await;
        }
        assert_ne!(request.get_ref().timeout_seconds, 61, "no such timeout");
        let span = tracing::info_span!("Exec", k8s.pod.uid = request.get_ref().container_id);
        let uid = request.extensions().get::<Peer>().map(|p| p.uid);
        let trace = async { current_trace_id() }.instrument(span).await;
        let output = format!("{} {uid:?} {}", trace.unwrap_or_default(), self.name);
        Ok(Response::new(ProbeExecReply { output: output.into_bytes(), ..ProbeExecReply::default() }))
    }
}

struct Running {
    path: PathBuf,
    health: HealthHandle,
    stop: CancellationToken,
    task: JoinHandle<()>,
    _dir: tempfile::TempDir,
}

async fn start(policy: PeerPolicy) -> Running {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("area/area.sock");
    let listener = bind_unix(&path, 0o660).unwrap();
    let stop = CancellationToken::new();
    let server = Server::new("kit-test").add_service(ProbeExecServer::new(Echo::new("first")));
    let health = server.health();
    let stopped = stop.clone();
    let task = tokio::spawn(async move { server.serve(listener, policy, stopped).await.unwrap() });
    // The socket is bound: a client that connects before the first accept waits.
    Running { path, health, stop, task, _dir: dir }
}

fn me() -> u32 {
    nix::unistd::geteuid().as_raw()
}

fn request(id: &str, timeout_seconds: u32) -> ProbeExecRequest {
    ProbeExecRequest { container_id: id.to_owned(), timeout_seconds, ..ProbeExecRequest::default() }
}

#[tokio::test]
async fn a_panic_in_a_call_ends_that_call_alone() {
    let server = start(PeerPolicy::Any).await;
    let mut one = ProbeExecClient::new(channel(server.path.clone()));
    // Both calls use one connection.
    let mut other = one.clone();
    let exec_request = |timeout_seconds| ProbeExecRequest { timeout_seconds, ..ProbeExecRequest::default() };
    one.exec(exec_request(1)).await.unwrap();
    let hangs = tokio::spawn(async move { other.exec(exec_request(60)).await });
    let panicked = one.exec(exec_request(61)).await.unwrap_err();
    assert_eq!(panicked.code(), Code::Internal);
    assert!(panicked.message().contains("no such timeout"), "{panicked}");
    assert!(!hangs.is_finished(), "the connection is unaffected");
    one.exec(exec_request(1)).await.unwrap();
    hangs.abort();
    server.stop.cancel();
    server.task.await.unwrap();
}

#[tokio::test]
async fn health_over_the_socket_follows_its_handle() {
    let server = start(PeerPolicy::Any).await;
    let mut client = HealthClient::new(channel(server.path.clone()));
    for (name, serving) in [("", true), ("", false), ("quintlet.pleg.v1.Pleg", true)] {
        if serving {
            server.health.set_serving(name).await;
        } else {
            server.health.set_not_serving(name).await;
        }
        let reply = client.check(HealthCheckRequest { service: name.to_owned() }).await.unwrap();
        let want = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        assert_eq!(reply.get_ref().status(), want, "{name:?}");
    }
    let unknown = client.check(HealthCheckRequest { service: "nobody".to_owned() }).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
}

#[tokio::test]
async fn a_peer_whose_user_is_not_allowed_gets_no_answer_and_is_counted() {
    let refused = || {
        let text = quintlet_telemetry::metrics::text();
        let line = text.lines().find(|l| l.starts_with("quintlet_socket_refused_total "));
        line.and_then(|l| l.rsplit(' ').next()?.parse::<u64>().ok()).unwrap_or(0)
    };
    let server = start(PeerPolicy::Uids(vec![me() + 1])).await;
    let before = refused();
    let call = ProbeExecClient::new(channel(server.path.clone())).exec(request("c", 1)).await;
    assert!(call.is_err(), "{call:?}");
    assert!(refused() > before, "refusals are counted: {} after {before}", refused());

    let server = start(PeerPolicy::Uids(vec![me()])).await;
    let reply = ProbeExecClient::new(channel(server.path.clone())).exec(request("c", 1)).await.unwrap();
    let output = String::from_utf8(reply.into_inner().output).unwrap();
    assert!(output.contains(&format!(" Some({}) ", me())), "the handler sees who calls: {output}");
}

#[tokio::test]
async fn a_server_for_guests_has_its_services_alone_and_few_connections_and_calls() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("guests.sock");
    let listener = bind_unix(&path, 0o600).unwrap();
    let echo = Echo::new("guests");
    let mut open = echo.open.subscribe();
    let server = Server::for_guests(GuestLimits { connections: Share { all: 2, each: 2 }, calls: 2 });
    let server = server.add_service(ProbeExecServer::new(echo));
    let stop = CancellationToken::new();
    let (policy, stopped) = (PeerPolicy::Any, stop.clone());
    let task = tokio::spawn(async move { server.serve(listener, policy, stopped).await.unwrap() });

    let mut first = ProbeExecClient::new(channel(path.clone()));
    first.exec(request("c", 1)).await.unwrap();
    let health = HealthClient::new(channel(path.clone())).check(HealthCheckRequest::default()).await;
    assert_eq!(health.unwrap_err().code(), Code::Unimplemented);
    // The health client has closed its connection.
    let mut second = ProbeExecClient::new(channel(path.clone()));
    while second.exec(request("c", 1)).await.is_err() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let third = ProbeExecClient::new(channel(path.clone())).exec(request("c", 1)).await;
    assert!(third.is_err(), "{third:?}");

    // The third call of a connection waits in the client until another one has ended.
    let hung: Vec<_> = (0..3)
        .map(|_| {
            let mut client = first.clone();
            tokio::spawn(async move { client.exec(request("c", 60)).await })
        })
        .collect();
    open.wait_for(|open| *open == 2).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(*open.borrow(), 2);
    second.exec(request("c", 1)).await.unwrap();
    hung.iter().for_each(JoinHandle::abort);
    drop((first, second));
    stop.cancel();
    task.await.unwrap();
}

#[tokio::test]
async fn a_call_beyond_the_streams_of_a_connection_waits() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("streams.sock");
    let listener = bind_unix(&path, 0o600).unwrap();
    let echo = Echo::new("streams");
    let mut open = echo.open.subscribe();
    let server = Server::new("streams").streams(2).add_service(ProbeExecServer::new(echo));
    let stop = CancellationToken::new();
    let (policy, stopped) = (PeerPolicy::Any, stop.clone());
    let task = tokio::spawn(async move { server.serve(listener, policy, stopped).await.unwrap() });
    let mut client = ProbeExecClient::new(channel(path));
    // The client has the settings of the server after this call.
    client.exec(request("c", 1)).await.unwrap();
    let hung: Vec<_> = (0..3)
        .map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move { client.exec(request("c", 60)).await })
        })
        .collect();
    open.wait_for(|open| *open == 2).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(*open.borrow(), 2);
    hung.iter().for_each(JoinHandle::abort);
    drop(client);
    stop.cancel();
    task.await.unwrap();
}

#[tokio::test]
async fn a_trace_propagates_from_client_to_server_and_into_the_ring() {
    quintlet_telemetry::init("kit-test", &TelemetryOptions::default()).unwrap();
    let server = start(PeerPolicy::Any).await;
    let mut client = ProbeExecClient::new(caller(server.path.clone()));
    let span = tracing::info_span!("pass", k8s.pod.uid = "u-1");
    let (mine, reply) =
        async { (current_trace_id().unwrap(), client.exec(request("u-1", 1)).await.unwrap()) }
            .instrument(span)
            .await;
    let output = String::from_utf8(reply.into_inner().output).unwrap();
    assert!(output.starts_with(&mine), "server ran in {output}, client in {mine}");

    let mut debug = DebugClient::new(channel(server.path.clone()));
    let exec_request = TracesRequest { trace_id: mine.clone(), pod_uid: "u-1".to_owned() };
    let spans = whole(debug.traces(exec_request)).await.unwrap().into_inner().spans;
    let find =
        |name: &str| spans.iter().find(|s| s.name == name).unwrap_or_else(|| panic!("{name}: {spans:?}"));
    let (pass, exec) = (find("pass"), find("Exec"));
    assert_eq!(exec.parent_span_id, pass.span_id);
    assert_eq!((pass.parent_span_id.as_str(), exec.service.as_str()), ("", "kit-test"));
}

#[tokio::test]
async fn a_guest_whose_deadline_passes_gets_deadline_exceeded_and_is_counted_once() {
    let server = start(PeerPolicy::Any).await;
    let stream = tokio::net::UnixStream::connect(&server.path).await.unwrap();
    let (executor, io) = (hyper_util::rt::TokioExecutor::new(), hyper_util::rt::TokioIo::new(stream));
    // tonic's client has a timer of its own for the header.
    let (mut client, connection) = hyper::client::conn::http2::handshake(executor, io).await.unwrap();
    let connection = tokio::spawn(connection);
    let message = prost::Message::encode_to_vec(&request("c", 60));
    let head = [&[0], u32::try_from(message.len()).unwrap().to_be_bytes().as_slice()].concat();
    let body = axum::body::Body::from([head, message].concat());
    let call = http::Request::post("http://x/quintlet.runtime.v1.ProbeExec/Exec")
        .header("content-type", "application/grpc")
        .header("grpc-timeout", "100m")
        .body(body)
        .unwrap();
    let answer = tokio::time::timeout(LIMIT, client.send_request(call)).await.unwrap().unwrap();
    assert_eq!(answer.headers()["grpc-status"], "4", "{answer:?}");
    drop(answer);
    let counted = || {
        let text = quintlet_telemetry::metrics::text();
        let line = text.lines().find(|line| line.contains("method=\"Exec\",code=\"DeadlineExceeded\""));
        line.map(|line| line.rsplit(' ').next().unwrap().to_owned())
    };
    let ended = async {
        while counted().is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LIMIT, ended).await.expect("the call is counted");
    assert_eq!(counted().as_deref(), Some("1"));
    connection.abort();
}

#[tokio::test]
async fn a_client_that_sends_the_path_of_the_socket_as_authority_is_answered() {
    let server = start(PeerPolicy::Any).await;
    for authority in [server.path.to_str().unwrap().to_owned(), "%2Frun%2Fx.sock".to_owned()] {
        let mut stream = tokio::net::UnixStream::connect(&server.path).await.unwrap();
        let field = |index: u8, value: &str| {
            [&[index, u8::try_from(value.len()).unwrap()], value.as_bytes()].concat()
        };
        let fields = [
            // POST, http.
            vec![0x83, 0x86],
            field(0x04, "/quintlet.debug.v1.Debug/Build"),
            field(0x41, &authority),
            [&[0x40, 12], b"content-type".as_slice(), &[16], b"application/grpc"].concat(),
        ];
        let fields = fields.concat();
        let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
            let length = u8::try_from(payload.len()).unwrap();
            [&[0, 0, length, kind, flags, 0, 0, 0, stream], payload].concat()
        };
        let request = [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
            frame(4, 0, 0, b""),
            frame(1, 4, 1, &fields),
            frame(0, 1, 1, &[0; 5]),
        ];
        stream.write_all(&request.concat()).await.unwrap();
        let ended = async {
            loop {
                let mut head = [0; 9];
                stream.read_exact(&mut head).await.unwrap();
                let mut payload = vec![0; usize::from(u16::from_be_bytes([head[1], head[2]]))];
                stream.read_exact(&mut payload).await.unwrap();
                assert_ne!(head[3], 3, "{authority}: RST_STREAM {payload:?}");
                // The end of the stream with the reply.
                if head[4] & 1 != 0 && head[8] == 1 {
                    return;
                }
            }
        };
        tokio::time::timeout(LIMIT, ended).await.expect("an answer");
    }
}

#[tokio::test]
async fn the_log_filter_changes_until_its_time_is_over_and_only_for_the_user_of_the_process() {
    quintlet_telemetry::init("kit-test", &TelemetryOptions::default()).unwrap();
    let server = start(PeerPolicy::Any).await;
    let mut control = ControlClient::new(channel(server.path.clone()));
    let mut set = async |filter: &str, seconds| {
        let request = SetLogFilterRequest { filter: filter.to_owned(), seconds };
        let reply = control.set_log_filter(request).await.map(Response::into_inner);
        reply.map(|reply| (reply.filter, reply.previous)).map_err(|status| status.code())
    };
    let reply = |filter: &str, previous: &str| Ok((filter.to_owned(), previous.to_owned()));
    assert_eq!(set("", 0).await, reply("info", "info"));
    assert_eq!(set("warn", 0).await, reply("warn", "info"));
    assert_eq!(set("a=b=c", 0).await, Err(Code::InvalidArgument));
    assert_eq!(set("debug", 1).await, reply("debug", "warn"));
    let restored = async {
        while set("", 0).await != reply("warn", "warn") {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(LIMIT, restored).await.expect("the filter of before applies again");
    assert_eq!(set("info", 0).await, reply("info", "warn"));

    // A request without a connection has no user.
    let request = Request::new(SetLogFilterRequest::default());
    let refused = Control::set_log_filter(&ControlService, request).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let mut request = Request::new(SetLogFilterRequest::default());
    request.extensions_mut().insert(Peer { uid: me() + 1, pid: None });
    let refused = Control::set_log_filter(&ControlService, request).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
}

#[tokio::test]
async fn a_call_that_never_ends_does_not_delay_the_shutdown_of_the_server() {
    let server = start(PeerPolicy::Any).await;
    let mut client = ProbeExecClient::new(channel(server.path.clone()));
    let stuck = tokio::spawn(async move { client.exec(request("c", 60)).await });
    let mut other = ProbeExecClient::new(channel(server.path.clone()));
    other.exec(request("c", 1)).await.unwrap();
    server.stop.cancel();
    tokio::time::timeout(LIMIT, server.task).await.expect("the server stops in time").unwrap();
    stuck.abort();
}

#[tokio::test]
async fn a_channel_reconnects_to_the_next_server() {
    let server = start(PeerPolicy::Any).await;
    let mut client = ProbeExecClient::new(channel(server.path.clone()));
    client.exec(request("c", 1)).await.unwrap();
    server.stop.cancel();
    server.task.await.unwrap();

    let listener = bind_unix(&server.path, 0o600).unwrap();
    assert_eq!(std::fs::metadata(&server.path).unwrap().permissions().mode() & 0o777, 0o600);
    let next = Server::new("kit-test").add_service(ProbeExecServer::new(Echo::new("next")));
    tokio::spawn(next.serve(listener, PeerPolicy::Any, CancellationToken::new()));
    let again = async {
        loop {
            if let Ok(reply) = client.exec(request("c", 1)).await {
                return String::from_utf8(reply.into_inner().output).unwrap();
            }
        }
    };
    let output = tokio::time::timeout(LIMIT, again).await.expect("the channel connects again");
    assert!(output.ends_with(" next"), "answered by the next server: {output}");
}

#[tokio::test]
async fn after_the_server_stops_every_service_is_not_serving() {
    let server = start(PeerPolicy::Any).await;
    let name = "quintlet.pleg.v1.Pleg";
    server.health.set_serving(name).await;
    let mut client = HealthClient::new(channel(server.path.clone()));
    let check = |service: &str| HealthCheckRequest { service: service.to_owned() };
    let mut watches = Vec::new();
    for name in ["", name] {
        let mut watch = client.watch(check(name)).await.unwrap().into_inner();
        assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::Serving, "{name:?}");
        watches.push(watch);
    }
    server.stop.cancel();
    for watch in &mut watches {
        let update = tokio::time::timeout(LIMIT, watch.message()).await.unwrap().unwrap().unwrap();
        assert_eq!(update.status(), ServingStatus::NotServing);
    }
    server.health.set_serving("").await;
    let late = tokio::time::timeout(Duration::from_millis(100), watches[0].message()).await;
    assert!(late.is_err() || late.unwrap().is_err(), "a stopping server does not serve again");
}

#[tokio::test]
async fn a_service_is_ready_once_it_reports_ready() {
    let server = start(PeerPolicy::Any).await;
    server.health.set_not_serving("").await;
    let error = wait_ready(&server.path, Duration::from_millis(200)).await.unwrap_err();
    assert!(error.to_string().ends_with("is not ready: NOT_SERVING"), "{error}");
    let (path, health) = (server.path.clone(), server.health.clone());
    let waiting = tokio::spawn(async move { wait_ready(&path, LIMIT).await });
    health.set_serving("").await;
    waiting.await.unwrap().unwrap();
    let nobody = server.path.with_file_name("nobody.sock");
    assert_eq!(
        wait_ready(&nobody, Duration::from_millis(50)).await.unwrap_err().kind(),
        std::io::ErrorKind::TimedOut
    );
}

#[tokio::test]
async fn one_connection_may_have_more_calls_open_than_hyper_allows_by_itself() {
    const CALLS: usize = 300;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("area.sock");
    let echo = Echo::new("many");
    let mut open = echo.open.subscribe();
    let server = Server::new("kit-test").add_service(ProbeExecServer::new(echo));
    let listener = bind_unix(&path, 0o600).unwrap();
    let stop = CancellationToken::new();
    let serving = tokio::spawn(server.serve(listener, PeerPolicy::Any, stop.clone()));
    let client = ProbeExecClient::new(channel(path));
    let calls: Vec<_> = (0..CALLS)
        .map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move { client.exec(request("c", 60)).await })
        })
        .collect();
    let all = tokio::time::timeout(LIMIT, open.wait_for(|n| *n == CALLS)).await.map(drop);
    assert!(all.is_ok(), "{} of {CALLS} calls reached the server", *open.borrow());
    calls.iter().for_each(JoinHandle::abort);
    stop.cancel();
    serving.await.unwrap().unwrap();
}

/// Listens at `path` in another process until it is killed.
fn listen_elsewhere(path: &std::path::Path) -> std::process::Child {
    let script = "import socket,sys\ns=socket.socket(socket.AF_UNIX)\ns.bind(sys.argv[1])\ns.listen()\nprint('there',flush=True)\nsys.stdin.read()";
    let mut child = std::process::Command::new("python3")
        .args(["-c", script])
        .arg(path)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line)
        .unwrap();
    assert_eq!(line, "there\n");
    child
}

#[tokio::test]
async fn the_socket_of_a_running_instance_is_kept_and_a_stale_one_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("area.sock");
    let mut other = listen_elsewhere(&path);
    let error = bind_unix(&path, 0o600).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
    assert_eq!(
        error.to_string(),
        format!("{} is in use by another instance (pid {})", path.display(), other.id())
    );
    assert!(std::os::unix::net::UnixStream::connect(&path).is_ok(), "the server is still reachable");
    other.kill().unwrap();
    other.wait().unwrap();
    let _ours = bind_unix(&path, 0o600).unwrap();
    assert!(std::os::unix::net::UnixStream::connect(&path).is_ok());
    drop(bind_unix(&path, 0o600).expect("one of this process is replaced"));
}
