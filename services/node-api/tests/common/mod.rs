//! node-api in this process, with a test API server, a pod-sync that has one pod, and no runtime.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use node_api::{NodeApi, NodeApiArgs};
use node_api_access::limits::{ConnectionLimiter, Limits};
use parking_lot::Mutex;
use quintlet_config::Loaded;
use quintlet_config::table::Service;
use quintlet_kit::args::paths::{CriSocket, Paths};
use quintlet_kit::clock::Clock;
use quintlet_kit::server::{HealthHandle, Server};
use quintlet_kit::socket::{PeerPolicy, bind_unix};
use quintlet_proto::podsync::v1 as wire;
use quintlet_proto::podsync::v1::checkpoints_server::{Checkpoints, CheckpointsServer};
use quintlet_proto::podsync::v1::pod_sync_server::{PodSync, PodSyncServer};
use quintlet_proto::podsync::v1::storage_server::{Storage, StorageServer};
use quintlet_testapi::TestApi;
use quintlet_testkit::certificates::{Authority, Identity};
use quintlet_testkit::fake_runtime::{ContainerSeed, FakeRuntime, Options};
use rustls::pki_types::ServerName;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Response, Status};

pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) struct Api {
    /// ID of the only container.
    pub(crate) container: Arc<Mutex<String>>,
    pub(crate) address: SocketAddr,
    pub(crate) test_api: TestApi,
    pub(crate) gate: ConnectionLimiter,
    pub(crate) dir: tempfile::TempDir,
    pub(crate) podsync: HealthHandle,
    pub(crate) checkpoints: Checkpointed,
    /// The `traceparent` of each request for a pod.
    #[allow(dead_code, reason = "each test binary uses a part of this module")]
    pub(crate) pod_traces: Arc<Mutex<Vec<String>>>,
    /// The requests for the stream of pods.
    #[allow(dead_code, reason = "each test binary uses a part of this module")]
    pub(crate) watched: Arc<Mutex<Vec<wire::WatchPodsRequest>>>,
    pub(crate) stop: CancellationToken,
    pub(crate) ended: tokio::task::JoinHandle<()>,
    _guard: DropGuard,
}

pub(crate) fn args(dir: &std::path::Path, more: &[&str]) -> Loaded<NodeApiArgs> {
    let run = dir.join("run");
    let pki = dir.join("pki");
    let own = ["--port=0", "--address=127.0.0.1", "--healthz-port=0", "--node-name=n1"];
    let (run, pki) = (format!("--run-dir={}", run.display()), format!("--cert-dir={}", pki.display()));
    let is_given = |flag: &str| more.iter().any(|m| m.split('=').next() == flag.split('=').next());
    let mut line = vec!["node-api"];
    line.extend(own.iter().filter(|flag| !is_given(flag)));
    line.extend([run.as_str(), pki.as_str()]);
    line.extend(more);
    quintlet_config::read(Service::NodeApi, line.into_iter().map(Into::into).collect()).unwrap()
}

impl Api {
    pub(crate) async fn start(limits: Limits, more: &[&str]) -> Self {
        Self::start_with(limits, |_| more.iter().map(|s| (*s).to_owned()).collect()).await
    }

    pub(crate) async fn start_with(
        limits: Limits,
        more: impl FnOnce(&std::path::Path) -> Vec<String>,
    ) -> Self {
        let test_api = TestApi::start().await;
        let dir = tempfile::tempdir().unwrap();
        let kubeconfig = dir.path().join("kubeconfig");
        test_api.kubeconfig(&kubeconfig).unwrap();
        let stop = CancellationToken::new();
        let container = Arc::new(Mutex::new("abc".to_owned()));
        let pods = OnePod::new(container.clone(), 0, Duration::ZERO);
        let pod_traces = pods.traces.clone();
        let watched = pods.watched.clone();
        let checkpoints = Checkpointed::default();
        let paths = Paths::new(&dir.path().join("run"));
        let podsync = serve_podsync(pods, checkpoints.clone(), &paths, stop.clone()).await;
        let mut line = more(dir.path());
        line.push(format!("--kubeconfig={}", kubeconfig.display()));
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        let api = NodeApi::bind(&args(dir.path(), &line), limits, Clock::system()).await.unwrap();
        let (address, gate) = (api.address().unwrap(), api.gate());
        let ended = quintlet_kit::task::spawn("node-api", api.serve(stop.clone()));
        let guard = stop.clone().drop_guard();
        Self {
            container,
            address,
            test_api,
            gate,
            dir,
            podsync,
            checkpoints,
            pod_traces,
            watched,
            stop,
            ended,
            _guard: guard,
        }
    }

    /// Starts node-api with a runtime that has the pod's sandbox and container, and with a streaming server
    /// that echoes everything.
    pub(crate) async fn with_runtime(limits: Limits, more: &[&str]) -> (Self, FakeRuntime) {
        let echo = echo_server().await;
        Self::with_streaming_server(limits, more, echo).await
    }

    /// Starts node-api in front of a runtime that has the pod's sandbox and container, and whose streaming
    /// server is at `streaming`.
    pub(crate) async fn with_streaming_server(
        limits: Limits,
        more: &[&str],
        streaming: SocketAddr,
    ) -> (Self, FakeRuntime) {
        let mut runtime = None;
        let api = Self::start_with(limits, |dir| {
            let socket = Paths::new(&dir.join("run")).cri(CriSocket::NodeApi);
            std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
            let options =
                Options { streaming_base: Some(format!("http://{streaming}")), ..Options::silent() };
            runtime = Some(FakeRuntime::start(&socket, options).unwrap());
            more.iter().map(|s| (*s).to_owned()).collect()
        })
        .await;
        let runtime = runtime.unwrap();
        let sandbox = runtime.add_sandbox("u1", "web", "default", 0);
        *api.container.lock() = runtime.add_container(&sandbox, &ContainerSeed::running("main"));
        (api, runtime)
    }

    /// Requests an upgrade to SPDY. Returns the header of the response and the connection.
    pub(crate) async fn upgrade(&self, path: &str, more: &str) -> (String, TlsStream<TcpStream>) {
        self.upgrade_as(None, path, more).await
    }

    /// Does the same as [`Api::upgrade`] with a client certificate.
    pub(crate) async fn upgrade_as(
        &self,
        identity: Option<&Identity>,
        path: &str,
        more: &str,
    ) -> (String, TlsStream<TcpStream>) {
        let mut stream = self.tls(identity).await;
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: n\r\nconnection: Upgrade\r\nupgrade: SPDY/3.1\r\n{more}content-length: 0\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        (head(&mut stream).await, stream)
    }

    pub(crate) async fn tls(&self, identity: Option<&Identity>) -> TlsStream<TcpStream> {
        tls(self.address, identity).await.unwrap()
    }

    pub(crate) async fn get(&self, path: &str, token: Option<&str>) -> (StatusCode, String) {
        self.request(Method::GET, path, token, None).await
    }

    pub(crate) async fn request(
        &self,
        method: Method,
        path: &str,
        token: Option<&str>,
        identity: Option<&Identity>,
    ) -> (StatusCode, String) {
        let stream = self.tls(identity).await;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        quintlet_kit::task::spawn("connection", connection);
        let mut request = Request::builder().method(method).uri(path).header("host", "node");
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let answer = sender.send_request(request.body(Empty::<bytes::Bytes>::new()).unwrap()).await.unwrap();
        let status = answer.status();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8_lossy(&body).into_owned())
    }
}

/// Returns a new CA for test certificates.
pub(crate) fn new_ca() -> Authority {
    Authority::new("test ca")
}

/// Sends a request without TLS.
pub(crate) async fn plain(
    address: SocketAddr,
    method: Method,
    path: &str,
) -> std::io::Result<(StatusCode, String)> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(std::io::Error::other)?;
    quintlet_kit::task::spawn("connection", connection);
    let request = Request::builder().method(method).uri(path).header("host", "node");
    let request = request.body(Empty::<bytes::Bytes>::new()).unwrap();
    let answer = sender.send_request(request).await.map_err(std::io::Error::other)?;
    let status = answer.status();
    let body = answer.into_body().collect().await.map_err(std::io::Error::other)?.to_bytes();
    Ok((status, String::from_utf8_lossy(&body).into_owned()))
}

/// Returns the body of a short response on an open connection.
pub(crate) async fn get_on(stream: &mut TlsStream<TcpStream>, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nhost: n\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default()
}

pub(crate) async fn tls(
    address: SocketAddr,
    identity: Option<&Identity>,
) -> std::io::Result<TlsStream<TcpStream>> {
    tls_over(TcpStream::connect(address).await?, identity).await
}

pub(crate) async fn tls_over(
    stream: TcpStream,
    identity: Option<&Identity>,
) -> std::io::Result<TlsStream<TcpStream>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(quintlet_kit::tls::unverified_certificate());
    let config = match identity {
        None => builder.with_no_client_auth(),
        Some(identity) => builder.with_client_auth_cert(vec![identity.der()], identity.key_der()).unwrap(),
    };
    let name = ServerName::try_from("n1").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

/// Returns the header of a response.
pub(crate) async fn head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(tokio::time::timeout(TEST_TIMEOUT, stream.read_u8()).await.expect("an answer").unwrap());
    }
    String::from_utf8(head).unwrap()
}

/// Starts a server that accepts any upgrade and echoes everything.
async fn echo_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    quintlet_kit::task::spawn("echo", async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            quintlet_kit::task::spawn("echo", async move {
                head(&mut stream).await;
                let switched =
                    "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: SPDY/3.1\r\n\r\n";
                stream.write_all(switched.as_bytes()).await.unwrap();
                let (mut read, mut write) = stream.split();
                // The client may have disconnected.
                let _ = tokio::io::copy(&mut read, &mut write).await;
            });
        }
    });
    address
}

/// A pod-sync with one pod, which has this container, or with more pods that it sends one by one.
struct OnePod {
    container: Arc<Mutex<String>>,
    more: usize,
    /// Bytes of an annotation of the other pods.
    bytes: usize,
    /// Time before each event of a watch after the first `prompt` ones.
    pause: Duration,
    prompt: usize,
    /// The `traceparent` of each request for a pod.
    traces: Arc<Mutex<Vec<String>>>,
    /// The requests for the stream of pods.
    watched: Arc<Mutex<Vec<wire::WatchPodsRequest>>>,
}

impl OnePod {
    fn new(container: Arc<Mutex<String>>, more: usize, pause: Duration) -> Self {
        let (traces, watched) = (Arc::default(), Arc::default());
        Self { container, more, bytes: 0, pause, prompt: 0, traces, watched }
    }
}

fn pod(container: &str) -> wire::PodView {
    let pod = json!({
        "kind": "Pod", "apiVersion": "v1",
        "metadata": {"name": "web", "namespace": "default", "uid": "u1"},
        "spec": {"containers": [{"name": "main"}]},
        "status": {"phase": "Running", "containerStatuses": [
            {"name": "main", "containerID": format!("containerd://{container}"), "state": {"running": {}}}]},
    });
    wire::PodView {
        uid: "u1".into(),
        mirror_uid: "m1".into(),
        name: "web".into(),
        namespace: "default".into(),
        pod: pod.to_string().into_bytes(),
        worker: "sync".into(),
        ..wire::PodView::default()
    }
}

type Stream<T> = Pin<Box<dyn futures::Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl PodSync for OnePod {
    type WatchPodsStream = Stream<wire::WatchPodsEvent>;

    type ListPodsStream = Stream<wire::ListPodsReply>;

    async fn list_pods(
        &self,
        _: tonic::Request<wire::ListPodsRequest>,
    ) -> Result<Response<Self::ListPodsStream>, Status> {
        Err(Status::unimplemented("not asked for"))
    }

    async fn get_pod(
        &self,
        request: tonic::Request<wire::GetPodRequest>,
    ) -> Result<Response<wire::PodView>, Status> {
        let trace = request.metadata().get("traceparent").and_then(|value| value.to_str().ok());
        self.traces.lock().extend(trace.map(str::to_owned));
        match request.into_inner().pod.as_str() {
            "default/web" => Ok(Response::new(pod(&self.container.lock()))),
            other => Err(Status::not_found(other.to_owned())),
        }
    }

    async fn watch_pods(
        &self,
        request: tonic::Request<wire::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        use wire::watch_pods_event::Event;
        self.watched.lock().push(request.into_inner());
        let first = pod(&self.container.lock());
        let mut events = vec![Event::Hello(quintlet_proto::hello()), Event::Pod(first.clone())];
        let large = json!({"metadata": {"annotations": {"notes": "x".repeat(self.bytes)}}}).to_string();
        let object = if self.bytes == 0 { first.pod.clone() } else { large.into_bytes() };
        events.extend((0..self.more).map(|n| {
            Event::Pod(wire::PodView { uid: format!("more{n}"), pod: object.clone(), ..first.clone() })
        }));
        events.push(Event::SnapshotEnd(wire::SnapshotEnd {}));
        let (pause, prompt) = (self.pause, self.prompt);
        let events = futures::stream::iter(events.into_iter().enumerate());
        let events = futures::StreamExt::then(events, move |(at, event)| async move {
            if at >= prompt {
                tokio::time::sleep(pause).await;
            }
            Ok(wire::WatchPodsEvent { event: Some(event), trace: None })
        });
        // As in pod-sync, the stream does not end.
        let events = futures::StreamExt::chain(events, futures::stream::pending());
        Ok(Response::new(Box::pin(events)))
    }

    async fn explain(
        &self,
        _: tonic::Request<wire::ExplainRequest>,
    ) -> Result<Response<wire::ExplainReply>, Status> {
        Err(Status::unimplemented("not asked for"))
    }

    type ListEventsStream = Stream<wire::ListEventsReply>;

    async fn list_events(
        &self,
        _: tonic::Request<wire::ListEventsRequest>,
    ) -> Result<Response<Self::ListEventsStream>, Status> {
        Err(Status::unimplemented("not asked for"))
    }

    async fn retry(
        &self,
        _: tonic::Request<wire::RetryRequest>,
    ) -> Result<Response<wire::RetryReply>, Status> {
        Err(Status::unimplemented("not asked for"))
    }
}

/// Records the checkpoint requests to pod-sync. One with a timeout of zero fails.
#[derive(Debug, Clone, Default)]
pub(crate) struct Checkpointed(pub(crate) Arc<Mutex<Vec<wire::CheckpointRequest>>>);

#[tonic::async_trait]
impl Checkpoints for Checkpointed {
    async fn checkpoint(
        &self,
        request: tonic::Request<wire::CheckpointRequest>,
    ) -> Result<Response<wire::CheckpointReply>, Status> {
        let request = request.into_inner();
        let seconds = request.timeout_seconds;
        self.0.lock().push(request);
        if seconds < 0 {
            Err(Status::unimplemented("the reason"))
        } else {
            Ok(Response::new(wire::CheckpointReply { location: "/a \"file\".tar".to_owned() }))
        }
    }
}

/// Statistics of a volume on disk and of a volume of a claim.
struct TwoVolumes {
    /// Number of chunks of a list.
    chunks: usize,
    /// Time before each chunk.
    pause: Duration,
}

#[tonic::async_trait]
impl Storage for TwoVolumes {
    type ListStream = Stream<wire::ListStorageReply>;

    async fn list(
        &self,
        _: tonic::Request<wire::ListStorageRequest>,
    ) -> Result<Response<Self::ListStream>, Status> {
        let usage = |used_bytes| Some(wire::DiskUsage { used_bytes, ..wire::DiskUsage::default() });
        let volume = wire::VolumeStorage {
            name: "scratch".into(),
            is_ephemeral: true,
            measured_unix_ns: 1_000_000_000,
            usage: usage(4096),
            claim: None,
        };
        let claim = wire::ClaimReference { namespace: "default".into(), name: "c1".into() };
        let claimed = wire::VolumeStorage {
            name: "data".into(),
            is_ephemeral: false,
            usage: usage(8192),
            claim: Some(claim),
            ..volume.clone()
        };
        let volumes = vec![volume, claimed];
        let pod = wire::PodStorage { uid: "u1".into(), volumes, hosts: usage(512), termination_logs: None };
        let reply = wire::ListStorageReply { pods: vec![pod], runtime: Vec::new() };
        let pause = self.pause;
        let chunks = futures::stream::iter(vec![reply; self.chunks]);
        Ok(Response::new(Box::pin(futures::StreamExt::then(chunks, move |chunk| async move {
            tokio::time::sleep(pause).await;
            Ok(chunk)
        }))))
    }
}

/// Serves a pod-sync with `pods` pods that pauses before each event of a watch and before each chunk of a
/// list.
#[allow(dead_code, reason = "each test binary uses a part of this module")]
pub(crate) async fn serve_slow_podsync(paths: &Paths, pods: usize, pause: Duration) -> DropGuard {
    let stop = CancellationToken::new();
    let pods = OnePod::new(Arc::default(), pods.saturating_sub(1), pause);
    serve_podsync(pods, Checkpointed::default(), paths, stop.clone()).await;
    stop.drop_guard()
}

/// Serves a pod-sync with `pods` pods that have annotations of `bytes`. It pauses before each event of a
/// watch after the first `prompt` ones.
#[allow(dead_code, reason = "each test binary uses a part of this module")]
pub(crate) async fn serve_large_podsync(
    paths: &Paths,
    pods: usize,
    bytes: usize,
    prompt: usize,
    pause: Duration,
) -> DropGuard {
    let stop = CancellationToken::new();
    let pods = OnePod { bytes, prompt, ..OnePod::new(Arc::default(), pods.saturating_sub(1), pause) };
    serve_podsync(pods, Checkpointed::default(), paths, stop.clone()).await;
    stop.drop_guard()
}

async fn serve_podsync(
    pods: OnePod,
    checkpoints: Checkpointed,
    paths: &Paths,
    stop: CancellationToken,
) -> HealthHandle {
    let path: PathBuf = paths.podsync();
    let listener = bind_unix(&path, 0o600).unwrap();
    let volumes = TwoVolumes { chunks: 1 + pods.more, pause: pods.pause };
    let server = Server::new("pod-sync").add_service(PodSyncServer::new(pods));
    let server = server.add_service(CheckpointsServer::new(checkpoints));
    let server = server.add_service(StorageServer::new(volumes));
    let health = server.health();
    health.set_serving("").await;
    health.set_serving("syncloop").await;
    quintlet_kit::task::spawn("pod-sync", server.serve(listener, PeerPolicy::Any, stop));
    health
}
