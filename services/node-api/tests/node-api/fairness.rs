//! Shares of users: connections, and requests in flight.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use node_api_access::limits::{Limits, Share, Shares};
use quintlet_testkit::certificates::ExtendedKeyUsagePurpose::ClientAuth;
use quintlet_testkit::certificates::{Authority, Identity};
use quintlet_testkit::fake_runtime::FakeRuntime;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tokio_rustls::client::TlsStream;

use crate::common::{Api, TEST_TIMEOUT, head, new_ca};

const EXEC: &str = "/exec/default/web/main?output=1&command=cat";

fn share(all: usize, each: usize) -> Share {
    Share { all, each }
}

/// node-api with a client CA, and with tokens `one` to `four` that may read `/healthz` only.
struct Node {
    api: Api,
    ca: Authority,
    _ca_file: tempfile::NamedTempFile,
    /// The certificate of the API server.
    server: Identity,
    _runtime: FakeRuntime,
}

async fn start(limits: Limits) -> Node {
    let ca = new_ca();
    let ca_file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(ca_file.path(), ca.pem()).unwrap();
    let flag = format!("--client-ca-file={}", ca_file.path().display());
    let (api, runtime) = Api::with_runtime(limits, &[&flag]).await;
    for user in ["one", "two", "three", "four"] {
        api.test_api.set_token(user, user, &[]);
        api.test_api.allow(user, "get", "nodes/healthz");
    }
    api.test_api.allow("masters", "*", "nodes/proxy");
    let server = ca.client("kube-apiserver-kubelet-client", "masters", ClientAuth);
    Node { api, ca, _ca_file: ca_file, server, _runtime: runtime }
}

async fn wait_open(api: &Api, want: usize) {
    let deadline = Instant::now() + TEST_TIMEOUT;
    while api.gate.open() != want {
        assert!(Instant::now() < deadline, "{} connections are open, not {want}", api.gate.open());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A request whose response its client does not read, so that it remains in flight.
struct Held {
    _connection: tokio::task::JoinHandle<Result<(), h2::Error>>,
    _sender: h2::client::SendRequest<Bytes>,
    _body: h2::RecvStream,
}

/// Requests `/healthz` with a token, over HTTP/2 and without a window for the response.
async fn hold(api: &Api, token: &str) -> Result<Held, StatusCode> {
    let mut builder = h2::client::Builder::new();
    let io = api.tls(None).await;
    let (mut sender, connection) = builder.initial_window_size(0).handshake::<_, Bytes>(io).await.unwrap();
    let connection = quintlet_kit::task::spawn("client", connection);
    let request = Request::get("https://n/healthz").header("authorization", format!("Bearer {token}"));
    let (answer, _) = sender.send_request(request.body(()).unwrap(), true).unwrap();
    let answer = timeout(TEST_TIMEOUT, answer).await.expect("an answer").unwrap();
    match answer.status() {
        StatusCode::OK => Ok(Held { _connection: connection, _sender: sender, _body: answer.into_body() }),
        other => Err(other),
    }
}

/// Sends a request on a connection that stays open. Returns the header of the response.
async fn ask(stream: &mut TlsStream<TcpStream>, token: &str) -> String {
    let request = format!("GET /healthz/ping HTTP/1.1\r\nhost: n\r\nauthorization: Bearer {token}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    head(stream).await
}

/// Opens a connection of a user that has no request in flight afterwards.
async fn idle(api: &Api, token: &str) -> TlsStream<TcpStream> {
    let mut stream = api.tls(None).await;
    let head = ask(&mut stream, token).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let mut body = [0; 2];
    timeout(TEST_TIMEOUT, stream.read_exact(&mut body)).await.expect("the body").unwrap();
    stream
}

async fn ends(stream: &mut TlsStream<TcpStream>) {
    let mut rest = Vec::new();
    let _ = timeout(TEST_TIMEOUT, stream.read_to_end(&mut rest)).await.expect("the connection is kept");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn users_with_tokens_lock_out_neither_the_api_server_nor_one_another() {
    let limits = Limits {
        strangers: 4,
        connections: Shares { certificates: share(3, 2), others: share(4, 2) },
        ..Limits::default()
    };
    let node = start(limits).await;
    let api = &node.api;
    let mut held = Vec::new();
    for user in ["one", "one", "two"] {
        held.push(hold(api, user).await.unwrap());
    }
    assert_eq!(hold(api, "one").await.err(), Some(StatusCode::TOO_MANY_REQUESTS), "a share per user");
    held.push(hold(api, "three").await.unwrap());
    assert_eq!(hold(api, "four").await.err(), Some(StatusCode::TOO_MANY_REQUESTS), "all are in use");

    // Connections that do not authenticate fill the rest.
    let mut silent = Vec::new();
    for _ in 0..6 {
        silent.push(TcpStream::connect(api.address).await.unwrap());
    }
    let (head, mut stream) = api.upgrade_as(Some(&node.server), EXEC, "").await;
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    stream.write_all(b"ping").await.unwrap();
    let mut echo = [0; 4];
    timeout(TEST_TIMEOUT, stream.read_exact(&mut echo)).await.expect("the echo").unwrap();
    let (head, _second) = api.upgrade_as(Some(&node.server), EXEC, "").await;
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    let (head, _) = api.upgrade_as(Some(&node.server), EXEC, "").await;
    assert!(head.starts_with("HTTP/1.1 429"), "a stream has a slot for as long as it is open: {head}");
    let other = node.ca.client("other", "masters", ClientAuth);
    let (code, _) = api.request(Method::GET, "/healthz", None, Some(&other)).await;
    assert_eq!(code, StatusCode::OK, "the API server leaves a slot to other certificates");
    drop(stream);
    let deadline = Instant::now() + TEST_TIMEOUT;
    while !api.upgrade_as(Some(&node.server), EXEC, "").await.0.starts_with("HTTP/1.1 101") {
        assert!(Instant::now() < deadline, "the slot of a stream that ended is lost");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_longest_idle_connection_of_the_user_with_most_gives_way() {
    let limits = Limits {
        connections: Shares { certificates: share(2, 2), others: share(3, 2) },
        ..Limits::default()
    };
    let node = start(limits).await;
    let api = &node.api;
    let (mut first, mut second) = (idle(api, "one").await, idle(api, "one").await);
    let mut third = idle(api, "one").await;
    ends(&mut first).await;
    let _of_two = idle(api, "two").await;
    wait_open(api, 3).await;
    let _of_three = idle(api, "three").await;
    ends(&mut second).await;
    assert!(ask(&mut third, "one").await.starts_with("HTTP/1.1 200"), "the last one of its user is kept");
    wait_open(api, 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_counts_for_its_first_user_and_each_request_for_its_own() {
    let limits = Limits {
        connections: Shares { certificates: share(2, 2), others: share(2, 1) },
        requests: Shares { certificates: share(2, 2), others: share(2, 1) },
        ..Limits::default()
    };
    let node = start(limits).await;
    let api = &node.api;
    let mut shared = idle(api, "one").await;
    assert!(ask(&mut shared, "two").await.starts_with("HTTP/1.1 200"), "a proxy of several users");
    let mut body = [0; 2];
    timeout(TEST_TIMEOUT, shared.read_exact(&mut body)).await.expect("the body").unwrap();
    let held = hold(api, "two").await.unwrap();
    let head = ask(&mut shared, "two").await;
    assert!(head.starts_with("HTTP/1.1 429") && head.contains("retry-after: 1\r\n"), "{head}");
    let mut body = [0; 44];
    timeout(TEST_TIMEOUT, shared.read_exact(&mut body)).await.expect("the body").unwrap();
    assert_eq!(&body, b"too many requests of this user are in flight");
    assert!(ask(&mut shared, "one").await.starts_with("HTTP/1.1 200"), "the connection stays open");
    let (code, _) = api.request(Method::GET, "/healthz", None, Some(&node.server)).await;
    assert_eq!(code, StatusCode::OK);
    drop(held);
    let deadline = Instant::now() + TEST_TIMEOUT;
    while hold(api, "two").await.is_err() {
        assert!(Instant::now() < deadline, "the slot of a request that ended is lost");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
