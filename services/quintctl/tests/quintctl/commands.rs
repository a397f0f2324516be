//! The binary against services of the test, on temporary sockets.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use quintlet_kit::args::paths::{CriSocket, Paths};
use quintlet_kit::neighbour::Neighbour;
use quintlet_kit::server::{HealthHandle, NODE, SYNC_LOOP, Server};
use quintlet_kit::socket::{PeerPolicy, bind_unix};
use quintlet_kit::task;
use quintlet_proto::common::v1::Hello;
use quintlet_proto::debug::v1::debug_server::{Debug, DebugServer};
use quintlet_proto::debug::v1::{self as debug};
use quintlet_proto::pleg::v1::pleg_server::{Pleg, PlegServer};
use quintlet_proto::pleg::v1::{self as pleg, lifecycle_event};
use quintlet_proto::podsync::v1::claims_server::{Claims, ClaimsServer};
use quintlet_proto::podsync::v1::cpus_server::{Cpus, CpusServer};
use quintlet_proto::podsync::v1::devices_server::{Devices, DevicesServer};
use quintlet_proto::podsync::v1::pod_sync_server::{PodSync, PodSyncServer};
use quintlet_proto::podsync::v1::pressure_server::{Pressure, PressureServer};
use quintlet_proto::podsync::v1::volumes_server::{Volumes, VolumesServer};
use quintlet_proto::podsync::v1::{self as podsync, watch_pods_event};
use quintlet_proto::probe::v1::probe_server::{Probe, ProbeServer};
use quintlet_proto::probe::v1::{self as probe, watch_event};
use quintlet_proto::runtime::v1::proxy_info_server::{ProxyInfo, ProxyInfoServer};
use quintlet_proto::runtime::v1::{HintSource, ProxyInfoReply, ProxyInfoRequest, SourceState};
use quintlet_testkit::fake_runtime::{ContainerSeed, FakeRuntime, Options};
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

type Events<T> = std::pin::Pin<Box<dyn futures::Stream<Item = Result<T, Status>> + Send>>;

/// Returns a stream of these events that stays open.
fn events<T: Send + 'static>(events: Vec<T>) -> Response<Events<T>> {
    let open = tokio_stream::iter(events.into_iter().map(Ok)).chain(tokio_stream::pending());
    Response::new(Box::pin(open))
}

/// Returns an answer that these chunks make up.
fn chunks<T: Send + 'static>(chunks: Vec<T>) -> Response<Events<T>> {
    Response::new(Box::pin(tokio_stream::iter(chunks.into_iter().map(Ok))))
}

/// Returns a stream of these events that stays open until `stop`, like that of a process.
fn events_until<T: Send + 'static>(all: Vec<T>, stop: &CancellationToken) -> Response<Events<T>> {
    let stop = stop.clone();
    let death = futures::stream::once(async move {
        stop.cancelled().await;
        Err(Status::unavailable("died"))
    });
    Response::new(Box::pin(tokio_stream::iter(all.into_iter().map(Ok)).chain(death)))
}

const UID: &str = "5f0c5f0c-0000-0000-0000-000000000000";

fn pod() -> podsync::PodView {
    podsync::PodView {
        uid: UID.into(),
        name: "web".into(),
        namespace: "default".into(),
        source: "file".into(),
        pod: br#"{"spec":{"containers":[{"name":"app"}]},"status":{"phase":"Running","containerStatuses":[{"name":"app","restartCount":1}]}}"#.to_vec(),
        worker: "sync".into(),
        ready: "1/1".into(),
        status: "Running".into(),
        restarts: 1,
        pod_ip: "10.77.0.4".into(),
        created_unix_ns: 1,
        version: 1,
        ..podsync::PodView::default()
    }
}

#[derive(Default)]
struct FakePodSync {
    /// The object of the pod, instead of the default.
    pod: Option<String>,
    /// Message of the pod's event, instead of the default.
    event: String,
}

impl FakePodSync {
    fn pod(&self) -> podsync::PodView {
        let usual = pod();
        podsync::PodView { pod: self.pod.clone().map_or(usual.pod, String::into_bytes), ..usual }
    }

    fn find(&self, selector: &str) -> Result<podsync::PodView, Status> {
        if [UID, "web", "default/web"].contains(&selector) {
            return Ok(self.pod());
        }
        Err(Status::not_found(format!("no pod {selector:?} on this node")))
    }
}

#[tonic::async_trait]
impl PodSync for FakePodSync {
    type ListPodsStream = Events<podsync::ListPodsReply>;

    async fn list_pods(
        &self,
        _: Request<podsync::ListPodsRequest>,
    ) -> Result<Response<Self::ListPodsStream>, Status> {
        let problem = podsync::SourceProblem {
            source: "file".into(),
            origin: "/m/broken.yaml".into(),
            field: "spec".into(),
            message: "required".into(),
            since_unix_ns: 1,
        };
        let pods = podsync::ListPodsReply { pods: vec![self.pod()], problems: Vec::new() };
        Ok(chunks(vec![pods, podsync::ListPodsReply { pods: Vec::new(), problems: vec![problem] }]))
    }

    type WatchPodsStream = Events<podsync::WatchPodsEvent>;

    async fn watch_pods(
        &self,
        _: Request<podsync::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        let all = [
            watch_pods_event::Event::Hello(quintlet_proto::hello()),
            watch_pods_event::Event::Pod(self.pod()),
            watch_pods_event::Event::SnapshotEnd(podsync::SnapshotEnd {}),
        ];
        Ok(events(all.into_iter().map(|e| podsync::WatchPodsEvent { event: Some(e), trace: None }).collect()))
    }

    async fn get_pod(
        &self,
        request: Request<podsync::GetPodRequest>,
    ) -> Result<Response<podsync::PodView>, Status> {
        Ok(Response::new(self.find(&request.get_ref().pod)?))
    }

    async fn explain(
        &self,
        request: Request<podsync::ExplainRequest>,
    ) -> Result<Response<podsync::ExplainReply>, Status> {
        let pod = Some(self.find(&request.get_ref().pod)?);
        Ok(Response::new(podsync::ExplainReply { pod, ..podsync::ExplainReply::default() }))
    }

    type ListEventsStream = Events<podsync::ListEventsReply>;

    async fn list_events(
        &self,
        request: Request<podsync::ListEventsRequest>,
    ) -> Result<Response<Self::ListEventsStream>, Status> {
        let usual = || format!("of {:?}", request.get_ref().uid);
        let message = if self.event.is_empty() { usual() } else { self.event.clone() };
        let event = podsync::EventView { message, reason: "Started".into(), ..podsync::EventView::default() };
        Ok(chunks(vec![podsync::ListEventsReply { events: vec![event] }]))
    }

    async fn retry(
        &self,
        request: Request<podsync::RetryRequest>,
    ) -> Result<Response<podsync::RetryReply>, Status> {
        let uid = self.find(&request.get_ref().pod)?.uid;
        Ok(Response::new(podsync::RetryReply { uid, waited: true }))
    }
}

struct FakeVolumes;

#[tonic::async_trait]
impl Volumes for FakeVolumes {
    type ListStream = Events<podsync::ListVolumesReply>;

    async fn list(
        &self,
        _: Request<podsync::ListVolumesRequest>,
    ) -> Result<Response<Self::ListStream>, Status> {
        let volume = |pod: &str| podsync::VolumeView {
            pod_uid: UID.into(),
            pod: pod.into(),
            name: "data".into(),
            spec_name: "pv-1".into(),
            volume: "kubernetes.io/csi/d.csi^h".into(),
            state: podsync::VolumeState::NotMounted.into(),
            call: "NodeStageVolume".into(),
            call_since_unix_ns: 1,
            ..podsync::VolumeView::default()
        };
        let chunk = |pod: &str| podsync::ListVolumesReply { volumes: vec![volume(pod)] };
        Ok(chunks(vec![chunk("default/web"), chunk("other/db")]))
    }
}

struct FakeCpus;

#[tonic::async_trait]
impl Cpus for FakeCpus {
    type ListStream = Events<podsync::ListCpusReply>;

    async fn list(&self, _: Request<podsync::ListCpusRequest>) -> Result<Response<Self::ListStream>, Status> {
        let policies = podsync::ResourcePolicies { cpu: "static".into(), ..Default::default() };
        let cpu = |number, usage: podsync::CpuUse| podsync::MachineCpu {
            number,
            core: number,
            r#use: usage.into(),
            is_reserved: number == 0,
            ..Default::default()
        };
        let holder = podsync::CpuHolder {
            pod_uid: UID.into(),
            pod: "default/web".into(),
            container: "main".into(),
            cpus: "1".into(),
            ..Default::default()
        };
        let first = podsync::ListCpusReply {
            policies: Some(policies),
            cpus: vec![cpu(0, podsync::CpuUse::Shared), cpu(1, podsync::CpuUse::Exclusive)],
            ..Default::default()
        };
        let second = podsync::ListCpusReply { holders: vec![holder], ..Default::default() };
        Ok(chunks(vec![first, second]))
    }
}

struct FakeDevices;

#[tonic::async_trait]
impl Devices for FakeDevices {
    type ListStream = Events<podsync::ListDevicesReply>;

    async fn list(
        &self,
        _: Request<podsync::ListDevicesRequest>,
    ) -> Result<Response<Self::ListStream>, Status> {
        let resource = podsync::DeviceResource {
            name: "a.com/gpu".into(),
            plugin: podsync::DevicePluginState::Serving.into(),
            socket: "/d/gpu.sock".into(),
            capacity: 2,
            healthy: 1,
            allocated: 1,
            error: String::new(),
        };
        let holder = podsync::DeviceHolder {
            pod_uid: UID.into(),
            pod: "default/web".into(),
            container: "main".into(),
            resource: "a.com/gpu".into(),
            count: 1,
            devices: vec!["g1".into()],
        };
        let first = podsync::ListDevicesReply { resources: vec![resource], holders: Vec::new() };
        let second = podsync::ListDevicesReply { resources: Vec::new(), holders: vec![holder] };
        Ok(chunks(vec![first, second]))
    }
}

struct FakeClaims;

#[tonic::async_trait]
impl Claims for FakeClaims {
    type ListStream = Events<podsync::ListClaimsReply>;

    async fn list(
        &self,
        _: Request<podsync::ListClaimsRequest>,
    ) -> Result<Response<Self::ListStream>, Status> {
        let plugin = podsync::ClaimDriverPlugin { endpoint: "/p/gpu.sock".into(), is_connected: true };
        let driver = podsync::ClaimDriver {
            name: "gpu.example.com".into(),
            plugins: vec![plugin],
            error: String::new(),
        };
        let claim = podsync::ClaimView {
            namespace: "default".into(),
            name: "gpu".into(),
            uid: "uid-c".into(),
            state: podsync::ClaimState::Prepared.into(),
            drivers: vec!["gpu.example.com".into()],
            users: vec![podsync::ClaimUser { pod_uid: UID.into(), pod: "default/web".into() }],
            user_count: 1,
            cdi_devices: vec!["a.com/gpu=0".into()],
            cdi_device_count: 1,
        };
        let first = podsync::ListClaimsReply { drivers: vec![driver], claims: Vec::new() };
        let second = podsync::ListClaimsReply { drivers: Vec::new(), claims: vec![claim] };
        Ok(chunks(vec![first, second]))
    }
}

struct FakePressure;

#[tonic::async_trait]
impl Pressure for FakePressure {
    async fn get(
        &self,
        _: Request<podsync::GetPressureRequest>,
    ) -> Result<Response<podsync::GetPressureReply>, Status> {
        let threshold = podsync::PressureThreshold { value: Some(1 << 20), ..Default::default() };
        let next = podsync::EvictionCandidate {
            namespace: "default".into(),
            name: "leak".into(),
            is_measured: true,
            used: 5 << 20,
            exceeds_request: true,
            ..Default::default()
        };
        let memory = podsync::PressureSignal {
            signal: "memory.available".into(),
            resource: "memory".into(),
            available: Some(3 << 30),
            capacity: Some(4 << 30),
            thresholds: vec![threshold],
            next: Some(next),
            ..Default::default()
        };
        Ok(Response::new(podsync::GetPressureReply {
            is_enabled: true,
            measured_unix_ns: 1,
            conditions: Vec::new(),
            signals: vec![memory],
        }))
    }
}

struct FakePleg {
    healthy: bool,
    epoch: u64,
    stop: CancellationToken,
    /// Notified when a client watches the records.
    watched: std::sync::Arc<tokio::sync::Notify>,
}

#[tonic::async_trait]
impl Pleg for FakePleg {
    type WatchStream = Events<pleg::WatchEvent>;

    async fn watch(&self, _: Request<pleg::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        use pleg::watch_event::Event;
        let cursor = Some(pleg::Cursor { epoch: self.epoch, rev: 1182 });
        let record = pleg::PodRecord { uid: UID.into(), ..pleg::PodRecord::default() };
        let all = [
            Event::SnapshotBegin(pleg::SnapshotBegin {}),
            Event::Pod(record),
            Event::SnapshotEnd(pleg::SnapshotEnd {}),
        ];
        self.watched.notify_one();
        let all = all.into_iter().map(|e| pleg::WatchEvent { event: Some(e), cursor, trace: None });
        Ok(events_until(all.collect(), &self.stop))
    }

    async fn observe(
        &self,
        _: Request<pleg::ObserveRequest>,
    ) -> Result<Response<pleg::ObserveReply>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    type LifecycleStream = Events<pleg::LifecycleEvent>;

    async fn lifecycle(
        &self,
        _: Request<pleg::LifecycleRequest>,
    ) -> Result<Response<Self::LifecycleStream>, Status> {
        let died = pleg::Lifecycle {
            kind: pleg::LifecycleKind::Died.into(),
            uid: UID.into(),
            pod_name: "web".into(),
            pod_namespace: "default".into(),
            container: "app".into(),
            exit_code: 3,
            ..pleg::Lifecycle::default()
        };
        let cursor = Some(pleg::Cursor { epoch: self.epoch, rev: 1182 });
        let event = lifecycle_event::Event::Lifecycle(died);
        Ok(events_until(vec![pleg::LifecycleEvent { event: Some(event), cursor, trace: None }], &self.stop))
    }

    async fn health(&self, _: Request<pleg::HealthRequest>) -> Result<Response<pleg::HealthReply>, Status> {
        let message = "pleg was last seen active 3m5s ago".to_owned();
        Ok(Response::new(pleg::HealthReply {
            healthy: self.healthy,
            message,
            epoch: 7,
            ..pleg::HealthReply::default()
        }))
    }
}

struct FakeProbe;

#[tonic::async_trait]
impl Probe for FakeProbe {
    type DriveStream = Events<probe::DriveReport>;

    async fn drive(
        &self,
        _: Request<tonic::Streaming<probe::DriveRequest>>,
    ) -> Result<Response<Self::DriveStream>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    type WatchStream = Events<probe::WatchEvent>;

    async fn watch(&self, _: Request<probe::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let evaluation = probe::Evaluation {
            uid: UID.into(),
            pod_name: "web".into(),
            pod_namespace: "default".into(),
            container: "app".into(),
            r#type: probe::ProbeType::Readiness.into(),
            outcome: probe::Outcome::Failure.into(),
            run: 3,
            output: "connection refused".into(),
            ..probe::Evaluation::default()
        };
        let event = watch_event::Event::Evaluation(evaluation);
        Ok(events(vec![probe::WatchEvent { event: Some(event), cursor: None, trace: None }]))
    }
}

struct FakeProxy;

#[tonic::async_trait]
impl ProxyInfo for FakeProxy {
    async fn get(&self, _: Request<ProxyInfoRequest>) -> Result<Response<ProxyInfoReply>, Status> {
        let source = SourceState { source: HintSource::Cri.into(), live: true, detail: String::new() };
        Ok(Response::new(ProxyInfoReply {
            connected: true,
            runtime_name: "containerd".into(),
            runtime_version: "2.1".into(),
            source: Some(source),
            ..ProxyInfoReply::default()
        }))
    }
}

/// Five services in this process.
struct Node {
    dir: tempfile::TempDir,
    stop: CancellationToken,
    /// Health of status-reporter.
    reported: Option<HealthHandle>,
}

impl Node {
    fn start(pleg_is_healthy: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths::new(dir.path());
        let mut node = Self { dir, stop: CancellationToken::new(), reported: None };
        let pleg = FakePleg {
            healthy: pleg_is_healthy,
            epoch: 7,
            stop: node.stop.clone(),
            watched: Default::default(),
        };
        node.serve(
            &paths.cri(CriSocket::Read),
            Server::new("cri-proxy").add_service(ProxyInfoServer::new(FakeProxy)),
        );
        node.serve(&paths.pleg(), Server::new("pleg-service").add_service(PlegServer::new(pleg)));
        node.serve(
            &paths.probe("probe-0"),
            Server::new("probe-service").add_service(ProbeServer::new(FakeProbe)),
        );
        let reporter = Server::new("status-reporter");
        node.reported = Some(reporter.health());
        node.serve(&paths.status(), reporter);
        node.serve(
            &paths.podsync(),
            Server::new("pod-sync")
                .add_service(PodSyncServer::new(FakePodSync::default()))
                .add_service(PressureServer::new(FakePressure))
                .add_service(VolumesServer::new(FakeVolumes))
                .add_service(DevicesServer::new(FakeDevices))
                .add_service(CpusServer::new(FakeCpus))
                .add_service(ClaimsServer::new(FakeClaims)),
        );
        node
    }

    fn serve(&self, path: &Path, server: Server) -> CancellationToken {
        let listener = bind_unix(path, 0o600).unwrap();
        let stop = self.stop.child_token();
        let stopped = stop.clone();
        tokio::spawn(async move { server.serve(listener, PeerPolicy::Any, stopped).await });
        stop
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quintctl"));
        command.env_remove("QUINTLET_RUN_DIR").arg("--run-dir").arg(self.dir.path()).args(args);
        command.stdin(Stdio::null());
        command
    }

    async fn run(&self, args: &[&str]) -> (i32, String, String) {
        let mut command = self.command(args);
        let output = task::blocking(move || command.output().unwrap()).await;
        output_parts(&output)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn output_parts(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_are_listed_in_every_form() {
    let node = Node::start(true);
    let (code, out, _) = node.run(&["pods"]).await;
    assert_eq!(code, 0);
    assert!(out.starts_with("NAME         READY  STATUS"), "{out}");
    assert!(out.contains("broken.yaml  –      InvalidManifest"), "{out}");
    let (_, out, _) = node.run(&["pods", "-o", "json"]).await;
    let value: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(value["pods"][0]["pod"]["status"]["phase"], "Running");
    let (_, out, _) = node.run(&["-o", "yaml", "pods"]).await;
    assert!(out.contains("\n  podIP: ") && out.contains("10.77.0.4"), "{out}");
    let (_, out, _) = node.run(&["pods", "-o", "wide"]).await;
    assert!(out.contains(UID), "{out}");
    let (code, out, error) = node.run(&["pods", "--watch"]).await;
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(error.contains("needs a terminal"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_is_found_by_name_or_uid_and_a_missing_pod_exits_with_1() {
    let node = Node::start(true);
    for pod in ["web", "default/web", UID] {
        let (code, out, error) = node.run(&["explain", pod]).await;
        assert_eq!(code, 0, "{error}");
        assert!(out.starts_with(&format!("pod default/web  uid {UID}  phase Running")), "{out}");
    }
    let (code, out, error) = node.run(&["retry", "default/web"]).await;
    assert_eq!((code, out), (0, format!("pod default/web (uid {UID}) is retried now\n")), "{error}");
    for args in
        [["explain", "gone"], ["retry", "gone"], ["logs", "gone"], ["trace", "gone"], ["events", "gone"]]
    {
        let (code, _, error) = node.run(&args).await;
        assert_eq!((code, error.as_str()), (1, "quintctl: no pod \"gone\" on this node\n"), "{args:?}");
    }
    let (_, out, _) = node.run(&["events", "web"]).await;
    assert!(out.contains(&format!("of \"{UID}\"")), "{out}");
    let (code, out, _) = node.run(&["trace", "web"]).await;
    assert_eq!((code, out.as_str()), (0, "no recorded operations of default/web\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn health_exits_with_1_unless_all_services_are_healthy() {
    let node = Node::start(true);
    let (code, out, _) = node.run(&["health"]).await;
    assert_eq!(code, 0, "{out}");
    assert_eq!(out.matches("serving").count(), 5, "{out}");
    let ill = Node::start(false);
    let (code, out, _) = ill.run(&["health"]).await;
    assert_eq!(code, 1);
    assert!(out.contains("unhealthy  pleg was last seen active 3m5s ago"), "{out}");
    let reported = node.reported.as_ref().unwrap();
    reported.set_serving(NODE).await;
    let (code, out, _) = node.run(&["health"]).await;
    assert_eq!((code, out.contains("serving  the API server accepts the Node")), (0, true), "{out}");
    reported.set_not_serving(NODE).await;
    let (code, out, _) = node.run(&["health"]).await;
    assert_eq!(code, 1);
    assert!(out.contains("unhealthy  the API server rejects the Node"), "{out}");
    std::fs::remove_file(Paths::new(node.dir.path()).status()).unwrap();
    let (code, out, _) = node.run(&["health"]).await;
    assert_eq!(code, 1);
    assert!(out.contains("unreachable  failed to connect to status-reporter at"), "{out}");
    let (code, out, _) = node.run(&["version"]).await;
    assert_eq!(code, 0);
    assert!(out.contains("pod-sync               0.1.0"), "{out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn health_names_the_peer_that_a_service_refuses() {
    let node = Node::start(true);
    // The fake services share this process, and thus refuse the same peers.
    let peer = Neighbour::new("pleg-service", &[]);
    let hello = Hello { schema: quintlet_proto::SCHEMA + 2, build: "3.0.0".into(), features: Vec::new() };
    peer.greeted(&hello).unwrap_err();
    let (code, out, _) = node.run(&["health"]).await;
    assert_eq!(code, 1);
    let row = out.lines().find(|line| line.starts_with("pod-sync")).unwrap();
    assert!(
        row.contains("unhealthy  pleg-service 3.0.0 is too new: its schema is 3, and this service"),
        "{row}"
    );
    drop(peer);
    assert_eq!(node.run(&["health"]).await.0, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn health_of_one_service_with_live_fails_only_if_a_restart_would_help() {
    let node = Node::start(false);
    let paths = Paths::new(node.dir.path());
    let pod_sync = Server::new("pod-sync");
    let health = pod_sync.health();
    health.set_serving(SYNC_LOOP).await;
    node.serve(&paths.podsync(), pod_sync);
    let codes = async |service: &str| {
        let (ready, _, _) = node.run(&["health", service]).await;
        let (live, out, _) = node.run(&["health", "--live", service]).await;
        (ready, live, out)
    };
    let (ready, live, out) = codes("pleg-service").await;
    assert_eq!((ready, live), (1, 0), "a restart does not help against failing lists: {out}");
    for service in ["cri-proxy", "probe-service", "status-reporter", "pod-sync"] {
        let (ready, live, out) = codes(service).await;
        assert_eq!((ready, live), (0, 0), "{out}");
    }
    health.set_not_serving(SYNC_LOOP).await;
    let (_, live, out) = codes("pod-sync").await;
    assert_eq!(live, 1);
    assert!(out.contains("stalled  syncloop is reported as not serving"), "{out}");
    std::fs::remove_file(paths.status()).unwrap();
    let (ready, live, out) = codes("status-reporter").await;
    assert_eq!((ready, live), (1, 1), "{out}");
    assert_eq!(codes("node-api").await.1, 1, "there is none");
    for wrong in [&["health", "--live"][..], &["health", "kubelet"]] {
        assert_eq!(node.run(wrong).await.0, 64, "{wrong:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unavailable_service_exits_with_69_and_a_usage_error_with_64() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node { dir, stop: CancellationToken::new(), reported: None };
    let socket = Paths::new(node.dir.path()).podsync();
    for args in [["pods"].as_slice(), &["explain", "web"], &["logs", "web"], &["events"], &["watch"]] {
        let (code, out, error) = node.run(args).await;
        assert_eq!((code, out.as_str()), (69, ""), "{args:?}");
        let want = format!("quintctl: failed to connect to pod-sync at {}: No such file", socket.display());
        assert!(error.starts_with(&want), "{error}");
    }
    let wrong = [
        ["nonsense"].as_slice(),
        &["explain"],
        &["pods", "-o", "xml"],
        &["logs", "web", "-f", "-p"],
        &["install"],
        &["install", "--beside"],
        &["install", "--replace-kubelet", "--port", "1"],
    ];
    for args in wrong {
        assert_eq!(node.run(args).await.0, 64, "{args:?}");
    }
    let (code, out, _) = node.run(&["completions", "bash"]).await;
    assert_eq!(code, 0);
    assert!(out.contains("_quintctl") && out.contains("--replace-kubelet"), "{out}");
    // Programs are looked for before anything else of the machine.
    let absent = node.dir.path().join("absent").display().to_string();
    let (code, _, error) =
        node.run(&["install", "--replace-kubelet", "--dry-run", "--bin-dir", &absent]).await;
    assert_eq!(code, 69, "{error}");
    assert!(
        error.contains(&format!("quintctl: {absent}/pod-sync does not exist: install the package quintlet")),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn watch_merges_all_streams() {
    let node = Node::start(true);
    let mut child = node.command(&["watch", "-o", "json"]).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let output_parts: Vec<String> = task::blocking(move || {
        let mut output_parts: Vec<String> = lines
            .take(3)
            .map(|l| {
                let v: serde_json::Value = serde_json::from_str(&l.unwrap()).unwrap();
                format!(
                    "{} {} {}",
                    v["source"].as_str().unwrap(),
                    v["subject"].as_str().unwrap(),
                    v["text"].as_str().unwrap()
                )
            })
            .collect();
        output_parts.sort();
        output_parts
    })
    .await;
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(output_parts[0].starts_with("pleg web ContainerDied app exit=3"), "{output_parts:?}");
    assert!(output_parts[1].starts_with("probe web readiness app failure (streak 3)"), "{output_parts:?}");
    assert_eq!(output_parts[2], "status web 1/1 Running, 1 restart");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_pleg_service_is_reported_with_its_cost() {
    let node = Node { dir: tempfile::tempdir().unwrap(), stop: CancellationToken::new(), reported: None };
    let socket = Paths::new(node.dir.path()).pleg();
    let watched = std::sync::Arc::new(tokio::sync::Notify::new());
    let pleg = |epoch, stop: &CancellationToken| {
        let fake = FakePleg { healthy: true, epoch, stop: stop.clone(), watched: watched.clone() };
        Server::new("pleg-service").add_service(PlegServer::new(fake))
    };
    let death = CancellationToken::new();
    let first = node.serve(&socket, pleg(7, &death));
    let mut child = node.command(&["watch"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // Ends the output, and thus the test, if nothing arrives.
    let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
    let limit = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(30)).await;
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
    });
    let mut seen = Vec::new();
    let mut until = |part: &str| loop {
        let Some(line) = lines.next() else { panic!("no {part:?} in {seen:#?}") };
        let line = line.unwrap();
        if line.contains(part) {
            return line;
        }
        seen.push(line);
    };
    tokio::task::block_in_place(|| until("ContainerDied app exit=3"));
    // The snapshot precedes the end of the stream.
    tokio::time::timeout(Duration::from_secs(10), watched.notified()).await.unwrap();
    first.cancel();
    death.cancel();
    tokio::task::block_in_place(|| until("pleg-service unreachable"));
    node.serve(&socket, pleg(8, &node.stop));
    let line = tokio::task::block_in_place(|| until("pleg-service restarted"));
    limit.abort();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(line.contains("------ pleg-service restarted: epoch 8, reachable after "), "{line}");
    assert!(line.ends_with(", 0 pods changed meanwhile"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_that_hangs_makes_cri_proxy_unhealthy() {
    let node = Node::start(true);
    let hang = axum::Router::new().fallback(std::future::pending::<String>);
    let proxy = Server::new("cri-proxy").add_service(ProxyInfoServer::new(FakeProxy)).fallback(hang);
    let path = Paths::new(node.dir.path()).cri(CriSocket::Read);
    std::fs::remove_file(&path).unwrap();
    node.serve(&path, proxy);
    let (code, out, _) = node.run(&["health"]).await;
    assert_eq!(code, 1);
    let row = out.lines().find(|l| l.starts_with("cri-proxy")).unwrap();
    assert!(row.contains("unhealthy  the runtime does not answer within 2s; containerd 2.1"), "{row}");
}

/// Spans of the node as one service returns them.
struct FakeDebug;

#[tonic::async_trait]
impl Debug for FakeDebug {
    type TracesStream = Events<debug::TracesReply>;

    async fn traces(&self, _: Request<debug::TracesRequest>) -> Result<Response<Self::TracesStream>, Status> {
        let span = |ids: [&str; 3], service: &str, name: &str, start: i64, uid: &str| debug::Span {
            trace_id: ids[0].into(),
            span_id: ids[1].into(),
            parent_span_id: ids[2].into(),
            service: service.into(),
            name: name.into(),
            start_unix_ns: start * 1_000_000,
            end_unix_ns: 1_000_000_000,
            attributes: [("k8s.pod.uid".to_owned(), uid.to_owned())].into(),
            error: String::new(),
        };
        let spans = vec![
            span(["11111111aa", "a", ""], "pod-sync", "pod pass", 900, UID),
            span(["11111111aa", "b", "a"], "cri-proxy", "StartContainer", 950, ""),
            span(["22222222aa", "c", ""], "pod-sync", "pod pass", 950, UID),
            span(["33333333aa", "d", ""], "pod-sync", "pod pass", 950, "another"),
        ];
        Ok(chunks(
            spans.into_iter().map(|span| debug::TracesReply { spans: vec![span], dropped: 0 }).collect(),
        ))
    }

    type MetricsStream = Events<debug::MetricsReply>;

    async fn metrics(
        &self,
        _: Request<debug::MetricsRequest>,
    ) -> Result<Response<Self::MetricsStream>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    async fn config(&self, _: Request<debug::ConfigRequest>) -> Result<Response<debug::ConfigReply>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    async fn build(&self, _: Request<debug::BuildRequest>) -> Result<Response<debug::BuildReply>, Status> {
        Err(Status::unimplemented("not scripted"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_shows_the_spans_of_a_pod_even_if_services_are_unavailable() {
    let node = Node { dir: tempfile::tempdir().unwrap(), stop: CancellationToken::new(), reported: None };
    let paths = Paths::new(node.dir.path());
    node.serve(
        &paths.podsync(),
        Server::new("pod-sync").add_service(PodSyncServer::new(FakePodSync::default())),
    );
    let listener = bind_unix(&paths.status(), 0o600).unwrap();
    let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
    let server = tonic::transport::Server::builder().add_service(DebugServer::new(FakeDebug));
    let server = tokio::spawn(server.serve_with_incoming(incoming));
    let (code, out, error) = node.run(&["trace", "web"]).await;
    assert_eq!(code, 0, "{error}");
    assert!(
        out.starts_with("pod pass default/web  1970-01-01T00:00:00.900Z  total 100.0ms  trace 11111111\n"),
        "{out}"
    );
    assert!(out.contains("cri-proxy    StartContainer  "), "{out}");
    assert_eq!(out.matches("total").count(), 1, "{out}");
    assert!(out.contains("missing spans: failed to connect to cri-proxy"), "{out}");
    let (_, out, _) = node.run(&["trace", UID, "--all", "-o", "json"]).await;
    let value: serde_json::Value = serde_json::from_str(&out).unwrap();
    let ids: Vec<&str> = value.as_array().unwrap().iter().map(|o| o["traceId"].as_str().unwrap()).collect();
    assert_eq!(ids, ["22222222aa", "11111111aa"]);
    server.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_are_those_of_the_newest_instance_and_follow_it_into_the_next() {
    let node = Node::start(true);
    let dir = node.dir.path().join("logs").join(format!("default_web_{UID}")).join("app");
    std::fs::create_dir_all(&dir).unwrap();
    let write = |file: &str, text: &str| {
        std::fs::write(dir.join(file), format!("2026-11-21T02:31:07Z stdout F {text}\n")).unwrap()
    };
    write("0.log", "first instance");
    write("1.log", "second instance");
    let logs = node.dir.path().join("logs").display().to_string();
    let (_, out, _) = node.run(&["logs", "web", "--pod-logs-dir", &logs]).await;
    assert_eq!(out, "second instance\n");
    let (_, out, _) = node.run(&["logs", "web", "-c", "app", "--previous", "--pod-logs-dir", &logs]).await;
    assert_eq!(out, "first instance\n");
    let (code, _, error) = node.run(&["logs", "web", "-c", "other", "--pod-logs-dir", &logs]).await;
    assert_eq!((code, error.as_str()), (1, "quintctl: pod has no container \"other\"; containers: app\n"));
    let began = Instant::now();
    let mut child = node.command(&["logs", "web", "-f", "--tail", "1", "--pod-logs-dir", &logs]);
    let mut child = child.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = || lines.next().unwrap().unwrap();
    assert_eq!(tokio::task::block_in_place(&mut next), "second instance");
    write("2.log", "third instance");
    assert_eq!(tokio::task::block_in_place(&mut next), "third instance");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(began.elapsed() < Duration::from_secs(10));
}

/// Secrets planted in each source of a bundle, in different forms.
const PLANTED: [&str; 11] = [
    "key-ref-hunter2",
    "env-from-hunter2",
    "env-hunter2",
    "args-hunter2",
    "annotation-hunter2",
    "message-hunter2",
    "volume-hunter2",
    "abc.bearer-hunter2",
    "eyJhbGciOiJub25lIn0.eyJzdWIiOiJ4In0.c2lnbmF0dXJl",
    "MIIEowIBAAKCAQEA",
    "kubeconfig-hunter2",
];

#[tokio::test(flavor = "multi_thread")]
async fn a_debug_bundle_has_everything_but_secrets() {
    let node = Node::start(true);
    let base = node.dir.path();
    let [key_ref, env_from, env, args, annotation, message, volume, bearer, jwt, pem, kubeconfig] = PLANTED;
    let secret_pod = serde_json::json!({
        "metadata": {"name": "web", "uid": UID, "annotations": {"kubectl.kubernetes.io/last-applied-configuration": annotation}},
        "spec": {"containers": [{"name": "app", "image": "shop:1", "args": [format!("--password={args}")], "env": [
            {"name": "PASSWORD", "value": env},
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "PIN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "pin"}}},
        ], "envFrom": [{"secretRef": {"name": "s"}}]}]},
        "status": {"phase": "Running", "containerStatuses": [
            {"name": "app", "restartCount": 1, "lastState": {"terminated": {"exitCode": 3, "message": message}}}]}
    });
    let fake = FakePodSync {
        pod: Some(secret_pod.to_string()),
        event: format!("{env}, {volume}, {key_ref}, {env_from} and <q7> leaked into an event"),
    };
    // Only the runtime knows the values of Secrets in the environment.
    let runtime = FakeRuntime::start(&Paths::new(base).cri(CriSocket::Admin), Options::silent()).unwrap();
    let sandbox = runtime.add_sandbox(UID, "web", "default", 0);
    let envs = [("KEY", key_ref), ("PIN", "q7"), ("TAKEN_WHOLE", env_from)];
    let envs = envs.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    let _id = runtime.add_container(&sandbox, &ContainerSeed { envs, ..ContainerSeed::running("app") });
    std::fs::remove_file(Paths::new(base).podsync()).unwrap();
    node.serve(&Paths::new(base).podsync(), Server::new("pod-sync").add_service(PodSyncServer::new(fake)));
    let (logs, root) = (base.join("logs"), base.join("root"));
    let secret = root.join("pods").join(UID).join("volumes/kubernetes.io~secret/creds/..2026/password");
    std::fs::create_dir_all(secret.parent().unwrap()).unwrap();
    std::fs::write(secret, format!("{volume}\n")).unwrap();
    std::fs::create_dir(&logs).unwrap();
    let log = format!(
        "pod-sync starts\nAuthorization: Bearer {bearer}\ntoken {jwt}\n-----BEGIN RSA PRIVATE KEY-----\n{pem}\n-----END RSA PRIVATE KEY-----\nstarted with {args}\nlast line\n"
    );
    std::fs::write(logs.join("pod-sync.log"), log).unwrap();
    std::fs::write(logs.join("kubeconfig"), format!("client-key-data: {kubeconfig}\n")).unwrap();
    let file = base.join("bundle.tar.gz").display().to_string();
    let (logs, root) = (logs.display().to_string(), root.display().to_string());
    let line = ["debug-bundle", "--file", &file, "--log-dir", &logs, "--root-dir", &root];
    let (code, out, error) = node.run(&line).await;
    assert_eq!(code, 0, "{error}");
    assert!(out.starts_with(&file), "{out}");
    assert_eq!(std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&file).unwrap()) & 0o777, 0o600);

    let mut members = std::collections::BTreeMap::new();
    let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(std::fs::File::open(&file).unwrap()));
    for entry in tar.entries().unwrap() {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().into_owned();
        let mut text = String::new();
        std::io::Read::read_to_string(&mut entry, &mut text).unwrap();
        members.insert(path.components().skip(1).collect::<std::path::PathBuf>().display().to_string(), text);
    }
    for (name, text) in &members {
        for planted in PLANTED {
            assert!(!text.contains(planted), "{planted} is in {name}:\n{text}");
        }
    }
    // The bundle is not merely empty.
    for (name, part) in [
        ("pods.json", "shop:1"),
        ("pods.json", "PASSWORD"),
        ("events.json", "<[redacted]> leaked into an event"),
        ("health.txt", "pleg-service"),
        ("version.json", "\"service\": \"pod-sync\""),
        ("metrics/pod-sync.txt", "# EOF"),
        ("traces/pod-sync.json", "["),
        ("logs/pod-sync.log", "last line"),
        ("machine.txt", "/proc/meminfo"),
        ("missing.txt", ""),
    ] {
        assert!(
            members.get(name).is_some_and(|text| text.contains(part)),
            "{part:?} in {name}: {members:#?}"
        );
    }
    assert!(members.keys().any(|name| name.starts_with("explain/")), "{:?}", members.keys());
    let (code, _, error) = node.run(&line).await;
    assert_eq!(code, 1, "an existing bundle is not replaced");
    assert!(error.contains("File exists"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_are_listed_with_the_call_in_progress() {
    let node = Node::start(true);
    let (code, out, error) = node.run(&["volumes"]).await;
    assert_eq!((code, error.as_str()), (0, ""));
    let lines: Vec<&str> = out.lines().collect();
    assert!(lines[1].starts_with("web       data    pv-1    not mounted  NodeStageVolume"), "{out}");
    assert!(lines[2].starts_with("other/db"), "{out}");
    let (code, out, _) = node.run(&["volumes", "-n", "other", "-o", "json"]).await;
    let data: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, data.as_array().map(Vec::len)), (0, Some(1)), "{out}");
    assert_eq!((&data[0]["state"], &data[0]["call"]), (&"NotMounted".into(), &"NodeStageVolume".into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn devices_are_listed_with_their_plugin_and_their_holders() {
    let node = Node::start(true);
    let (code, out, error) = node.run(&["devices"]).await;
    assert_eq!((code, error.as_str()), (0, ""));
    let lines: Vec<Vec<&str>> = out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[1], ["a.com/gpu", "2", "1", "1", "/d/gpu.sock"], "{out}");
    assert_eq!(lines[4], ["web", "main", "a.com/gpu", "g1"], "{out}");
    let (code, out, _) = node.run(&["devices", "-o", "json"]).await;
    let data: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &data["resources"][0]["plugin"]), (0, &"Serving".into()), "{out}");
    assert_eq!(
        (&data["holders"][0]["pod"], &data["holders"][0]["count"]),
        (&"default/web".into(), &1.into())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_are_listed_with_their_driver_and_their_pods() {
    let node = Node::start(true);
    let (code, out, error) = node.run(&["claims"]).await;
    assert_eq!((code, error.as_str()), (0, ""));
    let lines: Vec<Vec<&str>> = out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[1], ["gpu.example.com", "/p/gpu.sock"], "{out}");
    assert_eq!(lines[4], ["gpu", "prepared", "gpu.example.com", "web", "a.com/gpu=0"], "{out}");
    let (code, out, _) = node.run(&["claims", "-o", "json"]).await;
    let data: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &data["claims"][0]["state"]), (0, &"Prepared".into()), "{out}");
    assert_eq!(data["drivers"][0]["plugins"][0]["endpoint"], "/p/gpu.sock");
}

#[tokio::test(flavor = "multi_thread")]
async fn cpus_are_listed_with_the_containers_that_have_some_of_their_own() {
    let node = Node::start(true);
    let (code, out, error) = node.run(&["cpus"]).await;
    assert_eq!((code, error.as_str()), (0, ""));
    let lines: Vec<Vec<&str>> = out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[3], ["0", "0", "0-1", "0", "1", "0"], "{out}");
    assert_eq!(lines[6], ["web", "main", "1", "–"], "{out}");
    let (code, out, _) = node.run(&["cpus", "-o", "json"]).await;
    let data: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &data["policies"]["cpu"]), (0, &"static".into()), "{out}");
    assert_eq!((&data["holders"][0]["cpus"], &data["cpus"][1]["use"]), (&"1".into(), &"Exclusive".into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn pressure_shows_each_signal_and_the_pod_that_is_evicted_next() {
    let node = Node::start(true);
    let (code, out, error) = node.run(&["pressure"]).await;
    assert_eq!((code, error.as_str()), (0, ""));
    let row = out.lines().find(|line| line.starts_with("memory.available")).unwrap();
    assert!(row.contains("3Gi of 4Gi (75%)") && row.contains("leak"), "{out}");
    let (code, out, _) = node.run(&["pressure", "-o", "json"]).await;
    let data: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &data["signals"][0]["next"]["name"]), (0, &"leak".into()), "{out}");
}
