//! A server on a real socket: health, who may connect, trace context, `debug.v1`, stopping.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, missing_docs)]

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use quintlet_kit::server::{HealthHandle, Server};
use quintlet_kit::socket::{Peer, PeerPolicy, bind_unix, channel, wait_ready};
use quintlet_proto::debug::v1::TracesRequest;
use quintlet_proto::debug::v1::debug_client::DebugClient;
use quintlet_proto::runtime::v1::probe_exec_client::ProbeExecClient;
use quintlet_proto::runtime::v1::probe_exec_server::{ProbeExec, ProbeExecServer};
use quintlet_proto::runtime::v1::{ProbeExecReply, ProbeExecRequest};
use quintlet_telemetry::propagate::{current_trace_id, set_parent};
use quintlet_telemetry::{PropagatingInterceptor, TelemetryOptions};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tracing::Instrument as _;

const LIMIT: Duration = Duration::from_secs(10);

/// Answers with the trace it runs in, the uid of who called and its own name; a timeout of 60 s never ends.
struct Echo(&'static str);

#[tonic::async_trait]
impl ProbeExec for Echo {
    async fn exec(&self, request: Request<ProbeExecRequest>) -> Result<Response<ProbeExecReply>, Status> {
        if request.get_ref().timeout_seconds == 60 {
            std::future::pending::<()>().await;
        }
        let span = tracing::info_span!("Exec", pod.uid = request.get_ref().container_id);
        set_parent(&span, request.metadata());
        let uid = request.extensions().get::<Peer>().map(|p| p.uid);
        let trace = async { current_trace_id() }.instrument(span).await;
        let output = format!("{} {uid:?} {}", trace.unwrap_or_default(), self.0);
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
    let server = Server::new("kit-test").add_service(ProbeExecServer::new(Echo("first")));
    let health = server.health();
    let stopped = stop.clone();
    let task = tokio::spawn(async move { server.serve(listener, policy, stopped).await.unwrap() });
    wait_ready(&path, LIMIT).await.unwrap();
    Running { path, health, stop, task, _dir: dir }
}

fn me() -> u32 {
    nix::unistd::geteuid().as_raw()
}

fn request(id: &str, timeout_seconds: u32) -> ProbeExecRequest {
    ProbeExecRequest { container_id: id.to_owned(), timeout_seconds, ..ProbeExecRequest::default() }
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
async fn a_trace_goes_from_client_to_server_and_into_the_ring() {
    quintlet_telemetry::init("kit-test", &TelemetryOptions::default()).unwrap();
    let server = start(PeerPolicy::Any).await;
    let mut client = ProbeExecClient::with_interceptor(channel(server.path.clone()), PropagatingInterceptor);
    let span = tracing::info_span!("pass", pod.uid = "u-1");
    let (mine, reply) =
        async { (current_trace_id().unwrap(), client.exec(request("u-1", 1)).await.unwrap()) }
            .instrument(span)
            .await;
    let output = String::from_utf8(reply.into_inner().output).unwrap();
    assert!(output.starts_with(&mine), "server ran in {output}, client in {mine}");

    let mut debug = DebugClient::new(channel(server.path.clone()));
    let asked = TracesRequest { trace_id: mine.clone(), pod_uid: "u-1".to_owned() };
    let spans = debug.traces(asked).await.unwrap().into_inner().spans;
    let find =
        |name: &str| spans.iter().find(|s| s.name == name).unwrap_or_else(|| panic!("{name}: {spans:?}"));
    let (pass, exec) = (find("pass"), find("Exec"));
    assert_eq!(exec.parent_span_id, pass.span_id);
    assert_eq!((pass.parent_span_id.as_str(), exec.service.as_str()), ("", "kit-test"));
}

#[tokio::test]
async fn a_call_that_never_ends_does_not_hold_the_server() {
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
async fn a_channel_outlives_its_server_and_reaches_the_next_one() {
    let server = start(PeerPolicy::Any).await;
    let mut client = ProbeExecClient::new(channel(server.path.clone()));
    client.exec(request("c", 1)).await.unwrap();
    server.stop.cancel();
    server.task.await.unwrap();

    let listener = bind_unix(&server.path, 0o600).unwrap();
    assert_eq!(std::fs::metadata(&server.path).unwrap().permissions().mode() & 0o777, 0o600);
    let next = Server::new("kit-test").add_service(ProbeExecServer::new(Echo("next")));
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
