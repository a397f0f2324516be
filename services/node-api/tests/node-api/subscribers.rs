//! Subscribers over TCP: who is refused and how, what is passed on, what one client takes from others.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use h2::RecvStream;
use h2::client::SendRequest;
use hyper_util::rt::TokioIo;
use node_api::NodeApi;
use node_api_access::limits::Limits;
use quintlet_kit::args::SubscriberArgs;
use quintlet_kit::args::paths::Paths;
use quintlet_kit::clock::Clock;
use quintlet_kit::messages::Bounded;
use quintlet_kit::subscribe::{Subscribers, serve};
use quintlet_proto::debug::v1::BuildRequest;
use quintlet_proto::debug::v1::debug_client::DebugClient;
use quintlet_proto::subscribe::v1 as wire;
use quintlet_proto::subscribe::v1::containers_client::ContainersClient;
use quintlet_proto::subscribe::v1::containers_server::{Containers, ContainersServer};
use quintlet_proto::subscribe::v1::pods_client::PodsClient;
use quintlet_proto::subscribe::v1::probes_client::ProbesClient;
use quintlet_proto::subscribe::v1::probes_server::{Probes, ProbesServer};
use quintlet_testkit::certificates::ExtendedKeyUsagePurpose::ClientAuth;
use quintlet_testkit::certificates::{Authority, Identity};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Response, Status};

use crate::common::{TEST_TIMEOUT, args, new_ca, tls};

/// Beginnings of user agents whose requests the service handles in another way. tonic appends its own name.
const FAILS: &str = "fails";
const IS_SLOW: &str = "is slow";

/// Sends a greeting, and a beat each 10 ms.
struct Service {
    subscribers: Subscribers,
    build: &'static str,
}

impl Service {
    fn new(build: &'static str) -> Self {
        Self { subscribers: Subscribers::new("node-api-test"), build }
    }

    fn hello(&self) -> quintlet_proto::common::v1::Hello {
        quintlet_proto::common::v1::Hello { build: self.build.to_owned(), ..Default::default() }
    }
}

/// Returns the first event, and beats by their number from 1.
fn beats<T: Send + 'static>(
    first: T,
    beat: impl Fn(u64) -> T + Send,
) -> impl futures::Stream<Item = T> + Send {
    let beats = futures::stream::unfold((1, beat), |(number, beat)| async move {
        tokio::time::sleep(Duration::from_millis(10)).await;
        Some((beat(number), (number + 1, beat)))
    });
    futures::stream::iter([first]).chain(beats)
}

#[tonic::async_trait]
impl Containers for Service {
    type WatchStream = Bounded<wire::WatchContainersEvent>;

    async fn watch(
        &self,
        request: Request<wire::WatchContainersRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        use wire::watch_containers_event::Event;
        let subscription = self.subscribers.admit(&request)?;
        match request.metadata().get("user-agent").and_then(|agent| agent.to_str().ok()) {
            Some(agent) if agent.starts_with(FAILS) => return Err(Status::aborted("as it should")),
            Some(agent) if agent.starts_with(IS_SLOW) => std::future::pending().await,
            _ => {}
        }
        let epoch = request.get_ref().resume.map_or(0, |at| at.epoch);
        let event = move |event, seq| wire::WatchContainersEvent {
            event: Some(event),
            cursor: Some(wire::Cursor { epoch, seq }),
        };
        let beat = move |number| event(Event::Beat(wire::Beat {}), number);
        let events = beats(event(Event::Hello(self.hello()), 0), beat).map(move |event| {
            let _ = &subscription;
            Ok(event)
        });
        Ok(Response::new(Bounded::new("Containers.Watch", events)))
    }
}

#[tonic::async_trait]
impl Probes for Service {
    type WatchStream = Bounded<wire::WatchProbesEvent>;

    async fn watch(
        &self,
        request: Request<wire::WatchProbesRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        use wire::watch_probes_event::Event;
        let subscription = self.subscribers.admit(&request)?;
        let event = |event| wire::WatchProbesEvent { event: Some(event), cursor: None };
        let beat = move |_| event(Event::Beat(wire::Beat {}));
        let events = beats(event(Event::Hello(self.hello())), beat);
        let events = events.map(move |event| {
            let _ = &subscription;
            Ok(event)
        });
        Ok(Response::new(Bounded::new("Probes.Watch", events)))
    }
}

/// A node-api with a port for the subscriber `watcher` and for `other`, and services with sockets for
/// subscribers.
struct Node {
    address: SocketAddr,
    ca: Authority,
    dir: tempfile::TempDir,
    stop: CancellationToken,
    ended: tokio::task::JoinHandle<()>,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn write_files(dir: &Path, ca: &Authority, server: &str) {
    let server = ca.server(server);
    for (name, text) in [("s.key", &*server.key_pem()), ("s.crt", &*server.pem()), ("s-ca.crt", ca.pem())] {
        std::fs::write(dir.join(name), text).unwrap();
    }
}

fn flags(dir: &Path, listen: &str) -> Vec<String> {
    let file = |flag: &str, name: &str| format!("--subscriber-{flag}={}", dir.join(name).display());
    vec![
        format!("--subscriber-listen={listen}"),
        file("cert-file", "s.crt"),
        file("key-file", "s.key"),
        file("client-ca-file", "s-ca.crt"),
        "--subscriber-name=watcher".to_owned(),
        "--subscriber-name=other".to_owned(),
        // The port of subscribers does not depend on the settings of the main one.
        "--authentication-token-webhook=false".to_owned(),
        "--anonymous-auth".to_owned(),
        "--authorization-mode=AlwaysAllow".to_owned(),
    ]
}

impl Node {
    async fn start(listen: &str) -> Self {
        let (dir, ca) = (tempfile::tempdir().unwrap(), new_ca());
        let stop = CancellationToken::new();
        write_files(dir.path(), &ca, "n1");
        let paths = Paths::new(&dir.path().join("run"));
        let uid = nix::unistd::geteuid().as_raw();
        let own = SubscriberArgs { subscriber_uid: vec![uid], ..SubscriberArgs::default() };
        let containers = ContainersServer::new(Service::new("pleg"));
        serve(&paths.pleg_subscribers(), &own, &stop, |server| server.add_service(containers));
        for (id, build) in [("a", "probe-a"), ("b", "probe-b")] {
            let probes = ProbesServer::new(Service::new(build));
            serve(&paths.probe_subscribers(id), &own, &stop, |server| server.add_service(probes));
        }
        let line = flags(dir.path(), listen);
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        let api = NodeApi::bind(&args(dir.path(), &line), Limits::default(), Clock::system()).await.unwrap();
        let address = api.subscriber_address().unwrap();
        let ended = quintlet_kit::task::spawn("node-api", api.serve(stop.clone()));
        Self { address, ca, dir, stop, ended }
    }

    /// Returns a channel of a client whose certificate has this name.
    async fn client(&self, name: &str) -> Channel {
        connect(self.address, Some(self.ca.client(name, "g", ClientAuth))).await
    }
}

async fn connect(address: SocketAddr, identity: Option<Identity>) -> Channel {
    let identity = std::sync::Arc::new(identity);
    let connector = tower::service_fn(move |_| {
        let identity = std::sync::Arc::clone(&identity);
        async move { Ok::<_, std::io::Error>(TokioIo::new(tls(address, identity.as_ref().as_ref()).await?)) }
    });
    Endpoint::from_static("http://n1").connect_with_connector(connector).await.unwrap()
}

type ContainerEvents = tonic::Streaming<wire::WatchContainersEvent>;

async fn watch(channel: Channel) -> Result<ContainerEvents, Status> {
    let request = wire::WatchContainersRequest::default();
    Ok(ContainersClient::new(channel).watch(request).await?.into_inner())
}

/// Returns the build of the service that greets.
async fn greeting(events: &mut ContainerEvents) -> String {
    let first = timeout(TEST_TIMEOUT, events.message()).await.expect("a greeting").unwrap().unwrap();
    let Some(wire::watch_containers_event::Event::Hello(hello)) = first.event else { panic!("{first:?}") };
    hello.build
}

/// Returns a counter of the process with this series.
fn counter(series: &str) -> u64 {
    let text = quintlet_telemetry::metrics::text();
    let line = text.lines().find_map(|line| line.strip_prefix(series)?.trim().parse::<f64>().ok());
    line.map_or(0, |value| value as u64)
}

fn refused(reason: &str) -> u64 {
    counter(&format!("quintlet_node_api_refused_subscribers_total{{reason=\"{reason}\"}} "))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listed_client_subscribes_at_any_kind_of_address() {
    for listen in ["127.0.0.1:0", "[::1]:0", "0.0.0.0:0", "[::]:0"] {
        let node = Node::start(listen).await;
        let at = |ip: &str| SocketAddr::new(ip.parse().unwrap(), node.address.port());
        let targets = match listen {
            "127.0.0.1:0" | "0.0.0.0:0" => vec![at("127.0.0.1")],
            "[::1]:0" => vec![at("::1")],
            _ => vec![at("::1"), at("127.0.0.1")],
        };
        for target in targets {
            let client = connect(target, Some(node.ca.client("watcher", "g", ClientAuth))).await;
            let mut events = watch(client).await.unwrap();
            assert_eq!(greeting(&mut events).await, "pleg", "{listen}, {target}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_sees_what_the_services_send_and_nothing_else_of_the_node() {
    let node = Node::start("127.0.0.1:0").await;
    let client = node.client("watcher").await;
    let resume = Some(wire::Cursor { epoch: 7, seq: 9 });
    let request = wire::WatchContainersRequest { hello: None, resume };
    let mut events = ContainersClient::new(client.clone()).watch(request).await.unwrap().into_inner();
    let first = events.message().await.unwrap().unwrap();
    assert_eq!(first.cursor.unwrap().epoch, 7, "the request arrives: {first:?}");

    // There are two instances of probe-service.
    let mut probes = ProbesClient::new(client.clone());
    let several = probes.watch(wire::WatchProbesRequest::default()).await.map(drop).unwrap_err();
    assert_eq!(several.code(), Code::FailedPrecondition);
    assert!(several.message().ends_with("quintlet-probe-instance: a, b"), "{several}");
    for (id, build) in [("a", "probe-a"), ("b", "probe-b")] {
        let mut request = Request::new(wire::WatchProbesRequest::default());
        request.metadata_mut().insert("quintlet-probe-instance", id.parse().unwrap());
        let first = probes.watch(request).await.unwrap().into_inner().message().await.unwrap().unwrap();
        let Some(wire::watch_probes_event::Event::Hello(hello)) = first.event else { panic!("{first:?}") };
        assert_eq!(hello.build, build);
    }
    let mut request = Request::new(wire::WatchProbesRequest::default());
    request.metadata_mut().insert("quintlet-probe-instance", "../../node-api/node-api".parse().unwrap());
    assert_eq!(probes.watch(request).await.map(drop).unwrap_err().code(), Code::NotFound);

    // pod-sync does not run.
    let pods = PodsClient::new(client.clone()).watch(wire::WatchPodsRequest::default()).await;
    assert_eq!(pods.map(drop).unwrap_err().code(), Code::Unavailable);
    let build = DebugClient::new(client.clone()).build(BuildRequest {}).await.unwrap_err();
    assert_eq!(build.code(), Code::Unimplemented);
    let hello = quintlet_proto::common::v1::Hello { build: "x".repeat(70 << 10), ..Default::default() };
    let large = wire::WatchContainersRequest { hello: Some(hello), resume: None };
    let large = ContainersClient::new(client).watch(large).await.map(drop).unwrap_err();
    assert_eq!(large.code(), Code::OutOfRange, "{large}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_client_that_may_not_subscribe_is_refused_by_name_and_delays_no_other_one() {
    let node = Node::start("127.0.0.1:0").await;
    let mut watched = watch(node.client("watcher").await).await.unwrap();
    greeting(&mut watched).await;
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    let beats = tokio::spawn(async move {
        let mut numbers = Vec::new();
        while !stopped.is_cancelled() {
            let beat = timeout(TEST_TIMEOUT, watched.message()).await.expect("a beat").unwrap().unwrap();
            numbers.push(beat.cursor.unwrap().seq);
        }
        numbers
    });

    // Clients that never finish a handshake, and take more places than there are for strangers.
    let mut idle = Vec::new();
    for part in 0..80_usize {
        let mut stream = TcpStream::connect(node.address).await.unwrap();
        let hello: &[u8] = &[22, 3, 1, 2, 0, 1][..part % 6];
        stream.write_all(hello).await.unwrap();
        idle.push(stream);
    }
    let other_ca = new_ca();
    for (who, identity, reason, code, message) in [
        ("no certificate", None, "no_certificate", Code::Unauthenticated, "a client certificate is required"),
        (
            "another CA",
            Some(other_ca.client("watcher", "g", ClientAuth)),
            "authority",
            Code::Unauthenticated,
            "the client certificate is signed by another CA",
        ),
        (
            "an expired certificate",
            Some(node.ca.client_until("watcher", "g", 2020)),
            "expired",
            Code::Unauthenticated,
            "the client certificate has expired, or is not valid yet",
        ),
        (
            "a certificate of a server",
            Some(node.ca.client(
                "watcher",
                "g",
                quintlet_testkit::certificates::ExtendedKeyUsagePurpose::ServerAuth,
            )),
            "certificate",
            Code::Unauthenticated,
            "the client certificate is not valid",
        ),
        (
            "another name",
            Some(node.ca.client("Watcher", "watcher", ClientAuth)),
            "name",
            Code::PermissionDenied,
            "\"Watcher\" may not subscribe",
        ),
    ] {
        let before = refused(reason);
        let status = watch(connect(node.address, identity).await).await.map(drop).unwrap_err();
        assert_eq!((status.code(), status.message()), (code, message), "{who}");
        assert!(refused(reason) > before, "{who} is counted");
    }
    // Plain text, and gRPC without TLS.
    for text in ["GET /metrics HTTP/1.1\r\nhost: n\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
        let before = counter("quintlet_node_api_failed_handshakes_total ");
        let mut stream = TcpStream::connect(node.address).await.unwrap();
        stream.write_all(text.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let _ = timeout(TEST_TIMEOUT, stream.read_to_end(&mut answer)).await.expect("the connection ends");
        assert!(!answer.windows(4).any(|part| part == b"HTTP"), "{answer:?}");
        // The connection is closed before it is counted.
        let deadline = Instant::now() + TEST_TIMEOUT;
        while counter("quintlet_node_api_failed_handshakes_total ") == before {
            assert!(Instant::now() < deadline, "{text:?} is not counted");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    // HTTP/1 with a valid certificate.
    let identity = node.ca.client("watcher", "g", ClientAuth);
    let mut stream = tls(node.address, Some(&identity)).await.unwrap();
    let answer = crate::common::get_on(&mut stream, "/pods").await;
    assert_eq!(answer, "only gRPC is served here");

    stop.cancel();
    let beats = beats.await.unwrap();
    assert_eq!(beats, (1..=beats.len() as u64).collect::<Vec<_>>(), "a beat is missing");
    drop(idle);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_has_eight_streams_of_a_kind_and_a_stalled_one_delays_no_other() {
    let node = Node::start("127.0.0.1:0").await;
    let mut open = Vec::new();
    for _ in 0..8 {
        // Nothing reads these streams.
        open.push(watch(node.client("watcher").await).await.unwrap());
    }
    let before = refused("client_streams");
    let ninth = watch(node.client("watcher").await).await.map(drop).unwrap_err();
    assert_eq!(ninth.code(), Code::ResourceExhausted);
    assert_eq!(ninth.message(), "\"watcher\" has 8 streams of this kind already");
    assert!(refused("client_streams") > before);
    let mut other = watch(node.client("other").await).await.unwrap();
    greeting(&mut other).await;
    for _ in 0..50 {
        timeout(Duration::from_secs(5), other.message()).await.expect("a beat").unwrap().unwrap();
    }
    // A stream that its client closes is free again.
    drop(open.pop());
    let deadline = Instant::now() + TEST_TIMEOUT;
    while watch(node.client("watcher").await).await.is_err() {
        assert!(Instant::now() < deadline, "the place of a closed stream is not free");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_are_renewed_without_a_restart() {
    let node = Node::start("127.0.0.1:0").await;
    let mut kept = watch(node.client("watcher").await).await.unwrap();
    greeting(&mut kept).await;
    let first = served(node.address).await;
    let renewed = new_ca();
    write_files(node.dir.path(), &renewed, "n1");
    let deadline = Instant::now() + TEST_TIMEOUT;
    let reached = || assert!(Instant::now() < deadline, "the new files are not used");
    while served(node.address).await == first {
        reached();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    loop {
        let client = connect(node.address, Some(renewed.client("watcher", "g", ClientAuth))).await;
        if let Ok(mut events) = watch(client).await {
            greeting(&mut events).await;
            break;
        }
        reached();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let old = watch(node.client("watcher").await).await.map(drop).unwrap_err();
    assert_eq!(old.message(), "the client certificate is signed by another CA");
    kept.message().await.unwrap().unwrap();
}

/// Returns the certificate that the port serves.
async fn served(address: SocketAddr) -> Vec<u8> {
    let stream = tls(address, None).await.unwrap();
    stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
}

/// Opens a stream of containers on a connection of its own, with a client of HTTP/2 whose windows have this
/// size. Returns its connection, too.
async fn watch_with_window(
    node: &Node,
    window: u32,
    headers: &[(&'static str, &'static str)],
) -> (SendRequest<Bytes>, http::Response<RecvStream>) {
    let identity = node.ca.client("watcher", "g", ClientAuth);
    let stream = tls(node.address, Some(&identity)).await.unwrap();
    let mut builder = h2::client::Builder::new();
    let (client, connection) =
        builder.initial_window_size(window).handshake::<_, Bytes>(stream).await.unwrap();
    quintlet_kit::task::spawn("client", connection);
    let mut request = http::Request::post("https://n1/quintlet.subscribe.v1.Containers/Watch")
        .header("content-type", "application/grpc")
        .header("te", "trailers");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let mut client = client.ready().await.unwrap();
    let (answer, mut body) = client.send_request(request.body(()).unwrap(), false).unwrap();
    body.send_data(Bytes::from_static(&[0; 5]), true).unwrap();
    (client, timeout(TEST_TIMEOUT, answer).await.expect("an answer").unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_of_a_service_is_a_header_that_ends_the_stream() {
    let node = Node::start("127.0.0.1:0").await;
    let (_client, answer) = watch_with_window(&node, 1 << 16, &[("user-agent", FAILS)]).await;
    let status = Status::from_header_map(answer.headers()).expect("a status");
    assert_eq!((status.code(), status.message()), (Code::Aborted, "as it should"));
    assert!(answer.body().is_end_stream(), "an empty piece of data follows");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_time_limit_of_a_request_is_reported_as_such() {
    let node = Node::start("127.0.0.1:0").await;
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        let headers = [("user-agent", IS_SLOW), ("grpc-timeout", "20m")];
        let (_client, answer) = watch_with_window(&node, 1 << 16, &headers).await;
        let status = Status::from_header_map(answer.headers()).expect("a status");
        match status.code() {
            Code::DeadlineExceeded => break,
            // The time expired in the service first. tonic has this status for it.
            Code::Cancelled => assert!(Instant::now() < deadline, "{status}"),
            _ => panic!("{status}"),
        }
    }
}

/// Stops the node, and returns whether it had to close connections that were still open after the grace
/// period.
async fn stop_with_force(node: &mut Node) -> bool {
    let lines = quintlet_testkit::logs::Lines::default();
    let log = quintlet_testkit::logs::capture("test", tracing::Level::INFO, &lines);
    // node-api runs on this thread.
    let _of_this_thread = tracing::dispatcher::set_default(&log);
    node.stop.cancel();
    timeout(TEST_TIMEOUT, &mut node.ended).await.expect("node-api ends").unwrap();
    lines.all().iter().any(|line| line.contains("closing connections that are still open"))
}

#[tokio::test]
async fn a_client_whose_window_is_closed_does_not_delay_a_stop() {
    let mut node = Node::start("127.0.0.1:0").await;
    let (_client, stalled) = watch_with_window(&node, 0, &[]).await;
    assert_eq!(stalled.status(), 200);
    assert!(!stop_with_force(&mut node).await, "the stream was open until the end of the grace period");
}

#[tokio::test]
async fn streams_end_with_ok_at_a_stop_and_hold_nothing_up() {
    let mut node = Node::start("127.0.0.1:0").await;
    let mut events = watch(node.client("watcher").await).await.unwrap();
    greeting(&mut events).await;
    let read =
        async { while timeout(TEST_TIMEOUT, events.message()).await.expect("an end").unwrap().is_some() {} };
    let ((), forced) = tokio::join!(read, stop_with_force(&mut node));
    assert!(!forced, "a connection had to be closed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_node_api_serves_without_the_port_for_subscribers_until_its_files_are_valid() {
    let (dir, ca) = (tempfile::tempdir().unwrap(), new_ca());
    let stop = CancellationToken::new();
    // Nothing listens at this socket. It holds the port against other processes until node-api has it: both
    // may reuse the address.
    let held = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    held.set_reuse_address(true).unwrap();
    held.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let free = held.local_addr().unwrap().as_socket().unwrap();
    let line = flags(dir.path(), &free.to_string());
    let line: Vec<&str> = line.iter().map(String::as_str).collect();
    let api = NodeApi::bind(&args(dir.path(), &line), Limits::default(), Clock::system()).await.unwrap();
    let main = api.address().unwrap();
    assert_eq!(api.subscriber_address(), None);
    let ended = quintlet_kit::task::spawn("node-api", api.serve(stop.clone()));
    let mut stream = tls(main, None).await.unwrap();
    let health = crate::common::get_on(&mut stream, "/healthz").await;
    assert!(health.contains("[+]ping ok"), "{health}");
    assert!(TcpStream::connect(free).await.is_err(), "no port without its certificate");
    write_files(dir.path(), &ca, "n1");
    let deadline = Instant::now() + TEST_TIMEOUT;
    let identity = ca.client("watcher", "g", ClientAuth);
    while tls(free, Some(&identity)).await.is_err() {
        assert!(Instant::now() < deadline, "the port is not opened");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    stop.cancel();
    ended.await.unwrap();
}
