//! Limits for slow clients, huge headers and half-open connections.

use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use http::{Method, Request, StatusCode};
use node_api_access::limits::{Limits, Share};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_rustls::client::TlsStream;

use crate::common::{Api, TEST_TIMEOUT, get_on, new_ca, tls};

const OPEN: &[&str] = &["--anonymous-auth=true", "--authorization-mode=AlwaysAllow"];

async fn wait_open(api: &Api, want: usize) {
    let deadline = Instant::now() + TEST_TIMEOUT;
    while api.gate.open() != want {
        assert!(Instant::now() < deadline, "{} connections are open, not {want}", api.gate.open());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Sends a header byte by byte until the connection is closed.
async fn drip(connection: &mut (impl tokio::io::AsyncWrite + Unpin)) {
    while connection.write_all(b"a").await.is_ok() && connection.flush().await.is_ok() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_or_slow_client_is_disconnected() {
    let limits = Limits {
        handshake: Duration::from_millis(300),
        header: Duration::from_millis(300),
        ..Limits::default()
    };
    let api = Api::start(limits, OPEN).await;
    // A client that does not handshake.
    let mut silent = TcpStream::connect(api.address).await.unwrap();
    // A client that sends no header.
    let mut idle = api.tls(None).await;
    // A client that sends a header byte by byte.
    let mut slow = api.tls(None).await;
    slow.write_all(b"GET /healthz HTTP/1.1\r\nx: ").await.unwrap();
    timeout(TEST_TIMEOUT, drip(&mut slow)).await.expect("the slow header is taken for ever");
    // The same on a connection with an earlier request.
    let mut second = api.tls(None).await;
    second.write_all(b"GET /healthz HTTP/1.1\r\nhost: n\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\nok") {
        answer.push(timeout(TEST_TIMEOUT, second.read_u8()).await.expect("an answer").unwrap());
    }
    second.write_all(b"GET /healthz HTTP/1.1\r\nx: ").await.unwrap();
    timeout(TEST_TIMEOUT, drip(&mut second)).await.expect("a slow second header is taken for ever");
    let mut rest = Vec::new();
    let _ = timeout(TEST_TIMEOUT, silent.read_to_end(&mut rest)).await.expect("the silent client is kept");
    let _ = timeout(TEST_TIMEOUT, idle.read_to_end(&mut rest)).await.expect("the idle client is kept");
    wait_open(&api, 0).await;
    assert_eq!(api.get("/healthz", None).await.0, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_huge_header_is_rejected_before_it_is_read_completely() {
    let api = Api::start(Limits::default(), OPEN).await;
    let mut client = api.tls(None).await;
    client.write_all(b"GET /healthz HTTP/1.1\r\nhost: n\r\n").await.unwrap();
    let line = format!("x-filler: {}\r\n", "y".repeat(1000));
    let mut sent = 0;
    while sent < 64 << 20 {
        if client.write_all(line.as_bytes()).await.is_err() {
            break;
        }
        sent += line.len();
    }
    assert!(sent < 16 << 20, "{sent} bytes of header were taken");
    let mut answer = Vec::new();
    let _ = timeout(TEST_TIMEOUT, client.read_to_end(&mut answer)).await.expect("no answer and no end");
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
    assert_eq!(api.get("/healthz", None).await.0, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endless_target_is_rejected() {
    let api = Api::start(Limits::default(), OPEN).await;
    let mut client = api.tls(None).await;
    client.write_all(b"GET /healthz?filler=").await.unwrap();
    let mut sent = 0;
    while sent < 64 << 20 && client.write_all(&[b'y'; 1000]).await.is_ok() {
        sent += 1000;
    }
    assert!(sent < 16 << 20, "{sent} bytes of target were taken");
    assert_eq!(api.get("/healthz", None).await.0, StatusCode::OK);
}

/// Opens a connection with an authenticated user.
async fn trusted(api: &Api) -> TlsStream<TcpStream> {
    let mut stream = api.tls(None).await;
    stream.write_all(b"GET /healthz/ping HTTP/1.1\r\nhost: n\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\nok") {
        answer.push(timeout(TEST_TIMEOUT, stream.read_u8()).await.expect("an answer").unwrap());
    }
    stream
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn untrusted_connections_at_their_limit_do_not_exclude_users() {
    let limits = Limits { strangers: 3, ..Limits::default() };
    let api = Api::start(limits, OPEN).await;
    let mut working = trusted(&api).await;
    // Some clients are silent before and some after their handshake.
    let mut silent = TcpStream::connect(api.address).await.unwrap();
    wait_open(&api, 2).await;
    let (mut first, mut second) = (api.tls(None).await, api.tls(None).await);
    assert_eq!(api.get("/healthz", None).await.0, StatusCode::OK);
    let mut rest = Vec::new();
    let _ = timeout(TEST_TIMEOUT, silent.read_to_end(&mut rest)).await.expect("the oldest has to go");
    let _newest = api.tls(None).await;
    let _one_more = api.tls(None).await;
    let _ = timeout(TEST_TIMEOUT, first.read_to_end(&mut rest)).await.expect("then the next");
    let still = timeout(Duration::from_millis(100), second.read_u8()).await;
    assert!(still.is_err(), "one too many had to go: {still:?}");
    assert_eq!(get_on(&mut working, "/healthz").await, "ok", "an authenticated connection stays open");
}

/// Opens an HTTP/2 client, which answers pings. Also returns the end of its connection.
///
/// The client of hyper 1.12 may fail a request whose answer follows a GOAWAY, even if the frame allows the
/// request.
async fn http2(api: &Api) -> (SendRequest<Bytes>, JoinHandle<Result<(), h2::Error>>) {
    let (sender, connection) = h2::client::handshake(api.tls(None).await).await.unwrap();
    (sender, quintlet_kit::task::spawn("client", connection))
}

async fn ask(sender: &SendRequest<Bytes>, path: &str) -> (StatusCode, Bytes) {
    let request = Request::get(format!("https://n{path}")).body(()).unwrap();
    let (answer, _) = sender.clone().ready().await.unwrap().send_request(request, true).unwrap();
    let (head, mut body) = timeout(TEST_TIMEOUT, answer).await.expect("an answer").unwrap().into_parts();
    let mut bytes = Vec::new();
    while let Some(piece) = body.data().await {
        bytes.extend_from_slice(&piece.unwrap());
    }
    (head.status, bytes.into())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_untrusted_connection_is_closed_after_its_first_refusal() {
    // No other limit may end the connection.
    let hour = Duration::from_secs(3600);
    let limits = Limits { header: hour, stranger: hour, idle: hour, ..Limits::default() };
    let api = Api::start(limits, &[]).await;
    let mut one = api.tls(None).await;
    one.write_all(b"GET /pods HTTP/1.1\r\nhost: n\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    timeout(TEST_TIMEOUT, one.read_to_string(&mut answer)).await.expect("it is kept").unwrap();
    assert!(answer.starts_with("HTTP/1.1 401") && answer.ends_with("\r\n\r\nUnauthorized"), "{answer}");

    let (two, ended) = http2(&api).await;
    assert_eq!(ask(&two, "/pods").await, (StatusCode::UNAUTHORIZED, "Unauthorized".into()));
    let _ = timeout(TEST_TIMEOUT, ended).await.expect("it is kept");

    // A user without any permission is untrusted, too.
    api.test_api.set_token("pod", "pod", &[]);
    let mut three = api.tls(None).await;
    three.write_all(b"GET /pods HTTP/1.1\r\nhost: n\r\nauthorization: Bearer pod\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    timeout(TEST_TIMEOUT, three.read_to_string(&mut answer)).await.expect("it is kept").unwrap();
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");

    api.test_api.allow("pod", "get", "nodes/healthz");
    let mut four = api.tls(None).await;
    for (path, want) in [("/healthz/ping", "200"), ("/pods", "403"), ("/healthz/ping", "200")] {
        let request = format!("GET {path} HTTP/1.1\r\nhost: n\r\nauthorization: Bearer pod\r\n\r\n");
        four.write_all(request.as_bytes()).await.unwrap();
        let mut answer = vec![0; 4096];
        let n = timeout(TEST_TIMEOUT, four.read(&mut answer)).await.expect("an answer").unwrap();
        let answer = String::from_utf8_lossy(&answer[..n]).into_owned();
        assert!(answer.starts_with(&format!("HTTP/1.1 {want}")), "{path}: {answer}");
    }
    drop(four);
    wait_open(&api, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_untrusted_connection_is_closed_at_its_time_limit() {
    let limits = Limits { stranger: Duration::from_millis(500), ..Limits::default() };
    let api = Api::start(limits, &[]).await;
    // The API server does not respond, so no request is rejected.
    api.test_api.faults().block("create tokenreviews");
    let mut client = api.tls(None).await;
    client.write_all(b"GET /pods HTTP/1.1\r\nhost: n\r\nauthorization: Bearer x\r\n\r\n").await.unwrap();
    let mut rest = Vec::new();
    let before = Instant::now();
    let _ = timeout(TEST_TIMEOUT, client.read_to_end(&mut rest)).await.expect("it is kept");
    assert_eq!(String::from_utf8_lossy(&rest), "");
    assert!(before.elapsed() < Duration::from_secs(10), "the review has taken its time");
    wait_open(&api, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_http_2_connection_is_closed_although_its_client_answers_pings() {
    let limits = Limits { idle: Duration::from_millis(300), ..Limits::default() };
    let api = Api::start(limits, OPEN).await;
    let (sender, ended) = http2(&api).await;
    assert_eq!(ask(&sender, "/healthz").await, (StatusCode::OK, "ok".into()));
    timeout(TEST_TIMEOUT, ended).await.expect("it is kept").unwrap().unwrap();
    wait_open(&api, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_without_flow_control_window_is_aborted_and_other_responses_are_not() {
    // No other limit may end the connection.
    let hour = Duration::from_secs(3600);
    let (write, linger) = (Duration::from_millis(300), Duration::from_millis(300));
    let limits = Limits { write, linger, idle: hour, body: hour, ..Limits::default() };
    let api = Api::start_with(limits, |dir| {
        std::fs::create_dir(dir.join("logs")).unwrap();
        std::fs::write(dir.join("logs/large"), vec![b'x'; 1 << 20]).unwrap();
        let dir = format!("--system-log-dir={}", dir.join("logs").display());
        OPEN.iter().map(|flag| (*flag).to_owned()).chain([dir]).collect()
    })
    .await;
    let mut builder = h2::client::Builder::new();
    let io = api.tls(None).await;
    let (mut client, connection) = builder.initial_window_size(100).handshake::<_, Bytes>(io).await.unwrap();
    let ended = quintlet_kit::task::spawn("client", connection);
    let ask = |method: Method, path: &str| {
        Request::builder().method(method).uri(format!("https://n{path}")).body(()).unwrap()
    };
    // A request that is not complete yet.
    let (other, mut question) = client.send_request(ask(Method::POST, "/stats/summary"), false).unwrap();
    // A response of which only the first hundred bytes are read.
    let (answer, _) = client.send_request(ask(Method::GET, "/logs/large"), true).unwrap();
    let mut waiting = timeout(TEST_TIMEOUT, answer).await.expect("an answer").unwrap().into_body();
    let first = timeout(TEST_TIMEOUT, waiting.data()).await.expect("its beginning").unwrap().unwrap();
    assert_eq!(first.len(), 100);
    let deadline = Instant::now() + TEST_TIMEOUT;
    while client.clone().ready().await.is_ok() {
        assert!(Instant::now() < deadline, "the connection is never closed");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    question.send_data(Bytes::new(), true).unwrap();
    let other = timeout(TEST_TIMEOUT, other).await.expect("the other answer").unwrap();
    // The request fails only because there is no runtime.
    assert_eq!(other.status(), StatusCode::INTERNAL_SERVER_ERROR);
    timeout(TEST_TIMEOUT, ended).await.expect("the connection is kept").unwrap().unwrap_or_default();
    wait_open(&api, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_responses_is_disconnected() {
    let limits = Limits { write: Duration::from_millis(300), ..Limits::default() };
    let api = Api::start(limits, OPEN).await;
    // Data in kernel buffers counts as read, so these are small.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let stream = socket.connect(api.address).await.unwrap();
    let mut client = crate::common::tls_over(stream, None).await.unwrap();
    let request = "GET /flagz HTTP/1.1\r\nhost: n\r\n\r\n".repeat(10_000);
    // The client may not be able to send all of its requests, and never reads.
    let asking = quintlet_kit::task::spawn("asking", async move {
        let _ = client.write_all(request.as_bytes()).await;
        std::future::pending::<()>().await;
        drop(client);
    });
    let deadline = Instant::now() + 3 * TEST_TIMEOUT;
    while api.gate.open() > 0 {
        assert!(Instant::now() < deadline, "the response never ends");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    asking.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_unknown_tokens_does_not_affect_cached_users() {
    let ca = new_ca();
    let limits = Limits { reviews: Share { all: 64, each: 40 }, ..Limits::default() };
    let api = Api::start_with(limits, |dir| {
        std::fs::write(dir.join("ca.pem"), ca.pem()).unwrap();
        vec![format!("--client-ca-file={}", dir.join("ca.pem").display())]
    })
    .await;
    let operator =
        ca.client("operator", "team", quintlet_testkit::certificates::ExtendedKeyUsagePurpose::ClientAuth);
    api.test_api.allow("team", "get", "nodes/pods");
    api.test_api.faults().block("create tokenreviews");
    // More requests than may be reviewed concurrently and may wait.
    let mut flood: Vec<_> = (0..50)
        .map(|i| {
            let address = api.address;
            quintlet_kit::task::spawn("flood", async move {
                let mut client = tls(address, None).await.unwrap();
                let request = format!("GET /pods HTTP/1.1\r\nhost: n\r\nauthorization: Bearer {i}\r\n\r\n");
                client.write_all(request.as_bytes()).await.unwrap();
                let mut answer = String::new();
                client.read_to_string(&mut answer).await.unwrap();
                answer
            })
        })
        .collect();
    for _ in 0..10 {
        let (answer, _, rest) =
            timeout(TEST_TIMEOUT, futures::future::select_all(flood)).await.expect("an answer");
        let answer = answer.unwrap();
        assert!(answer.starts_with("HTTP/1.1 429") && answer.contains("retry-after: 1\r\n"), "{answer}");
        flood = rest;
    }
    let known = api.request(Method::GET, "/pods", None, Some(&operator));
    let (code, _) =
        timeout(Duration::from_secs(5), known).await.expect("unknown tokens precede a cached user");
    assert_eq!(code, StatusCode::OK);
    assert!(flood.iter().all(|f| !f.is_finished()), "the flood was not there when it counted");
    flood.iter().for_each(JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_upgrades_than_allowed_are_refused_until_one_ends() {
    let limits = Limits { upgrades: 2, ..Limits::default() };
    let (api, _runtime) = Api::with_runtime(limits, OPEN).await;
    let exec = "/exec/default/web/main?output=1&command=cat";
    let mut open = Vec::new();
    for _ in 0..2 {
        let (head, mut stream) = api.upgrade(exec, "").await;
        assert!(head.starts_with("HTTP/1.1 101"), "{head}");
        stream.write_all(b"ping").await.unwrap();
        let mut echo = [0; 4];
        timeout(TEST_TIMEOUT, stream.read_exact(&mut echo)).await.expect("the echo").unwrap();
        open.push(stream);
    }
    let (head, _) = api.upgrade("/portForward/default/web", "").await;
    assert!(head.starts_with("HTTP/1.1 429"), "{head}");
    open.pop();
    let deadline = Instant::now() + TEST_TIMEOUT;
    while !api.upgrade(exec, "").await.0.starts_with("HTTP/1.1 101") {
        assert!(Instant::now() < deadline, "the place is not given back");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let (head, _) = api.upgrade("/run/default/web/main?cmd=true", "").await;
    assert!(head.starts_with("HTTP/1.1 200"), "what is no upgrade needs no place: {head}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_is_neither_too_long_nor_too_slow() {
    let limits = Limits { body_bytes: 1000, body: Duration::from_millis(300), ..Limits::default() };
    let api = Api::start(limits, OPEN).await;
    for (length, sent, want) in
        [(1001, 1001, "HTTP/1.1 413"), (500, 10, "HTTP/1.1 408"), (500, 500, "HTTP/1.1 500")]
    {
        let mut client = api.tls(None).await;
        let request = format!("POST /stats/summary HTTP/1.1\r\nhost: n\r\ncontent-length: {length}\r\n\r\n");
        client.write_all(request.as_bytes()).await.unwrap();
        client.write_all(&vec![b'x'; sent]).await.unwrap();
        let head = crate::common::head(&mut client).await;
        // The last request fails only because there is no runtime.
        assert!(head.starts_with(want), "{length}: {head}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_ends_idle_connections_and_the_process() {
    let api = Api::start(Limits::default(), OPEN).await;
    let mut idle = api.tls(None).await;
    api.stop.cancel();
    timeout(TEST_TIMEOUT, api.ended).await.expect("it does not end").unwrap();
    let mut rest = Vec::new();
    let _ = timeout(TEST_TIMEOUT, idle.read_to_end(&mut rest)).await.expect("the connection is kept");
    assert!(tls(api.address, None).await.is_err());
}
