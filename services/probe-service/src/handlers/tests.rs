#![allow(clippy::disallowed_methods)]
use std::io;
use std::net::SocketAddr;

use quintlet_kit::url_scheme::UrlScheme;
use quintlet_proto::runtime::v1 as runtime;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::target::HttpGet;

/// Behaviour of a scripted server: it writes these bytes and closes the connection, or never replies.
#[derive(Clone)]
enum Reply {
    Close(String),
    Hang(String),
}

fn page(status: &str, headers: &str, body: &str) -> Reply {
    Reply::Close(format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n{headers}\r\n{body}", body.len()))
}

fn redirect(status: u16, location: &str) -> Reply {
    page(&format!("{status} Moved"), &format!("Location: {location}\r\n"), "moved")
}

/// Answers every connection by the path of its one request; the requests are passed on.
async fn serve(
    tls: Option<TlsAcceptor>,
    answer: impl Fn(&str) -> Reply + Send + Sync + 'static,
) -> (SocketAddr, mpsc::UnboundedReceiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (seen, requests) = mpsc::unbounded_channel();
    let answer = Arc::new(answer);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let seen = seen.clone();
            let answer = Arc::clone(&answer);
            let tls = tls.clone();
            tokio::spawn(async move {
                match tls {
                    Some(tls) => one(tls.accept(stream).await?, &*answer, seen).await,
                    None => one(stream, &*answer, seen).await,
                }
            });
        }
    });
    (address, requests)
}

async fn one(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    answer: &(dyn Fn(&str) -> Reply + Send + Sync),
    seen: mpsc::UnboundedSender<String>,
) -> io::Result<()> {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        request.push(stream.read_u8().await?);
    }
    let request = String::from_utf8_lossy(&request).into_owned();
    let reply = answer(request.split(' ').nth(1).unwrap_or_default());
    let _ = seen.send(request);
    match reply {
        Reply::Close(bytes) => {
            stream.write_all(bytes.as_bytes()).await?;
            stream.shutdown().await
        }
        Reply::Hang(bytes) => {
            stream.write_all(bytes.as_bytes()).await?;
            stream.flush().await?;
            std::future::pending().await
        }
    }
}

fn get(address: SocketAddr, path: &str) -> HttpGet {
    HttpGet {
        scheme: UrlScheme::Http,
        host: None,
        port: address.port().into(),
        path: path.into(),
        headers: Vec::new(),
        h2c: false,
    }
}

fn real() -> RealAttempts {
    RealAttempts::new(Path::new("/nonexistent/cri.sock"))
}

async fn attempt(attempts: &RealAttempts, handler: Handler, timeout: Duration) -> Attempt {
    let probe = Probe {
        kind: quintlet_model::probe::ProbeType::Readiness,
        handler,
        initial_delay: Duration::ZERO,
        period: Duration::from_secs(10),
        timeout,
        success_threshold: 1,
        failure_threshold: 3,
    };
    attempts.attempt(Arc::new(probe), "c1".into(), "127.0.0.1".into()).await
}

async fn http_get(get: HttpGet) -> Attempt {
    attempt(&real(), Handler::Http(get), Duration::from_secs(5)).await
}

fn failure(text: impl Into<String>) -> Attempt {
    Attempt::Failure(text.into())
}

fn warning(body: &str) -> Attempt {
    Attempt::Warning(format!("Probe terminated redirects, Response body: {body}"))
}

/// Returns an unused port.
async fn closed_port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

#[tokio::test]
async fn an_answer_may_have_a_thousand_headers() {
    let many: String = (0..1000).map(|n| format!("X-{n}: {}\r\n", "v".repeat(100))).collect();
    let (address, _requests) = serve(None, move |_| page("200 OK", &many, "fine")).await;
    assert_eq!(http_get(get(address, "/")).await, Attempt::Success("fine".into()));
    // Above the limit that hyper has by default.
    let large = format!("X: {}\r\n", "v".repeat(800 << 10));
    let (address, _requests) = serve(None, move |_| page("200 OK", &large, "fine")).await;
    assert_eq!(http_get(get(address, "/")).await, Attempt::Success("fine".into()));
    let huge = format!("X: {}\r\n", "v".repeat(2 << 20));
    let (address, _requests) = serve(None, move |_| page("200 OK", &huge, "fine")).await;
    let Attempt::Failure(error) = http_get(get(address, "/")).await else { panic!("2 MiB are too much") };
    assert!(error.contains("Get"), "{error}");
}

#[tokio::test]
async fn an_answer_over_http2_may_have_more_than_16_kib_of_headers() {
    let acceptor = tls_acceptor(&[b"h2"]);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let stream = acceptor.accept(stream).await.unwrap();
        let service = hyper::service::service_fn(|_| async {
            let mut answer =
                ::http::Response::new(http_body_util::Full::new(bytes::Bytes::from_static(b"fine")));
            for n in 0..400 {
                let name = ::http::HeaderName::from_bytes(format!("x-{n}").as_bytes()).unwrap();
                answer.headers_mut().insert(name, ::http::HeaderValue::from_str(&"v".repeat(100)).unwrap());
            }
            Ok::<_, std::convert::Infallible>(answer)
        });
        let server = hyper::server::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new());
        server.serve_connection(hyper_util::rt::TokioIo::new(stream), service).await
    });
    let https = HttpGet { scheme: UrlScheme::Https, ..get(address, "/") };
    assert_eq!(http_get(https).await, Attempt::Success("fine".into()));
}

/// Serves HTTP/2 without TLS. The body has the version, the authority and the header `x-muffins` of the
/// request.
async fn serve_h2c() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let service =
                hyper::service::service_fn(|request: ::http::Request<hyper::body::Incoming>| async move {
                    let muffins = request.headers().get("x-muffins").map(|v| v.to_str().unwrap());
                    let text = format!("{:?} {} {muffins:?}", request.version(), request.uri());
                    let body = http_body_util::Full::new(bytes::Bytes::from(text));
                    let mut answer = ::http::Response::new(body);
                    let status = if request.uri().path() == "/500" { 500 } else { 200 };
                    *answer.status_mut() = ::http::StatusCode::from_u16(status).unwrap();
                    Ok::<_, std::convert::Infallible>(answer)
                });
            let server = hyper::server::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new());
            tokio::spawn(server.serve_connection(hyper_util::rt::TokioIo::new(stream), service));
        }
    });
    address
}

#[tokio::test]
async fn an_http_probe_speaks_http2_without_tls_only_with_that_protocol() {
    let address = serve_h2c().await;
    let h2c = |address, path| HttpGet { h2c: true, ..get(address, path) };
    let headers = vec![("X-Muffins".to_owned(), "two".to_owned())];
    let probe = HttpGet { headers, ..h2c(address, "/ready?full") };
    let text = format!("HTTP/2.0 http://{address}/ready?full Some(\"two\")");
    assert_eq!(http_get(probe).await, Attempt::Success(text));
    let broken = http_get(h2c(address, "/500")).await;
    assert_eq!(broken, failure("HTTP probe failed with statuscode: 500"));
    let Attempt::Failure(_) = http_get(get(address, "/")).await else {
        panic!("the server does not speak HTTP/1.1")
    };

    let (old, _requests) = serve(None, |_| page("200 OK", "", "fine")).await;
    let Attempt::Failure(text) = http_get(h2c(old, "/")).await else {
        panic!("the server does not speak HTTP/2")
    };
    assert!(text.starts_with(&format!("Get \"http://{old}/\": ")), "{text}");
    let closed = closed_port().await;
    let refused = format!("Get \"http://{closed}/\": dial tcp {closed}: connect: connection refused");
    assert_eq!(http_get(h2c(closed, "/")).await, failure(refused));
}

#[tokio::test]
async fn the_status_decides_and_the_body_is_the_output() {
    let (address, _requests) = serve(None, |path| match path {
        "/200" => page("200 OK", "", "fine"),
        "/204" => page("204 No Content", "", ""),
        "/299" => page("299 Odd", "", "odd"),
        "/304" => page("304 Not Modified", "", ""),
        "/302" => page("302 Found", "", "nowhere"),
        "/400" => page("400 Bad Request", "", "secret"),
        "/500" => page("500 Internal Server Error", "", "secret"),
        _ => page("404 Not Found", "", ""),
    })
    .await;
    for (path, expected) in [
        ("/200", Attempt::Success("fine".into())),
        ("/204", Attempt::Success(String::new())),
        ("/299", Attempt::Success("odd".into())),
        ("/304", warning("")),
        ("/302", warning("nowhere")),
        ("/400", failure("HTTP probe failed with statuscode: 400")),
        ("/500", failure("HTTP probe failed with statuscode: 500")),
        ("", failure("HTTP probe failed with statuscode: 404")),
    ] {
        assert_eq!(http_get(get(address, path)).await, expected, "{path}");
    }
}

#[tokio::test]
async fn headers_are_canonical_and_replace_the_defaults() {
    let (address, mut requests) = serve(None, |_| page("200 OK", "", "")).await;
    let host = format!("Host: {address}");
    type Headers = &'static [(&'static str, &'static str)];
    let cases: [(Headers, &[&str], &[&str]); 5] = [
        (
            &[],
            &[&format!("User-Agent: {USER_AGENT}"), "Accept: */*", "Connection: close", &host],
            &["Accept-Encoding"],
        ),
        (
            &[("X-muffins-OR-not", "a"), ("x-Muffins-or-not", "b")],
            &["X-Muffins-Or-Not: a", "X-Muffins-Or-Not: b"],
            &[],
        ),
        (&[("user-agent", "foo/1.0")], &["User-Agent: foo/1.0"], &["kube-probe"]),
        (&[("Accept", "")], &[], &["Accept"]),
        (&[("host", "muffins.cupcakes.org")], &["Host: muffins.cupcakes.org"], &[&host]),
    ];
    for (headers, present, absent) in cases {
        let headers = headers.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        assert_eq!(http_get(HttpGet { headers, ..get(address, "/") }).await, Attempt::Success(String::new()));
        let request = requests.recv().await.unwrap();
        let has = |wanted: &str| request.lines().any(|line| line.starts_with(wanted));
        assert!(present.iter().all(|line| has(line)), "{present:?} in {request}");
        assert!(!absent.iter().any(|line| request.contains(line)), "{absent:?} not in {request}");
    }
    let bad = HttpGet { headers: vec![("a b".into(), "c".into())], ..get(address, "/") };
    let text = format!("Get \"http://{address}/\": net/http: invalid header field name \"a b\"");
    assert_eq!(http_get(bad).await, failure(text));
}

#[tokio::test]
async fn redirects_are_followed_within_the_host_name() {
    let (other, _other_requests) = serve(None, |_| page("200 OK", "", "other port")).await;
    let (address, _requests) = serve(None, move |path| match path {
        "/301" | "/302" | "/303" | "/307" | "/308" => redirect(path[1..].parse().unwrap(), "/ok"),
        "/bad" => redirect(302, "/500"),
        "/300" => page("300 Choices", "Location: /ok\r\n", "choices"),
        "/port" => redirect(302, &format!("http://{other}/")),
        "/foreign" => redirect(302, "http://example.invalid/"),
        "/loop" => redirect(302, "/loop"),
        "/ftp" => redirect(302, "ftp://127.0.0.1/"),
        "/ok" => page("200 OK", "", "ok"),
        _ => page("500 Broken", "", ""),
    })
    .await;
    let ok = Attempt::Success("ok".into());
    for (path, expected) in [
        ("/301", ok.clone()),
        ("/302", ok.clone()),
        ("/303", ok.clone()),
        ("/307", ok.clone()),
        ("/308", ok),
        ("/bad", failure("HTTP probe failed with statuscode: 500")),
        ("/300", warning("choices")),
        ("/port", Attempt::Success("other port".into())),
        ("/foreign", warning("moved")),
        ("/loop", failure("Get \"/loop\": stopped after 10 redirects")),
        ("/ftp", failure("Get \"ftp://127.0.0.1/\": unsupported protocol scheme \"ftp\"")),
    ] {
        assert_eq!(http_get(get(address, path)).await, expected, "{path}");
    }
}

#[tokio::test]
async fn a_host_header_is_kept_on_relative_redirects_only() {
    let (address, mut requests) = serve(None, |path| match path {
        "/relative" => redirect(302, "/ok"),
        "/absolute" => Reply::Close(String::new()),
        _ => page("200 OK", "", ""),
    })
    .await;
    let headers = vec![("Host".to_owned(), "example.com".to_owned())];
    http_get(HttpGet { headers, ..get(address, "/relative") }).await;
    requests.recv().await.unwrap();
    assert!(requests.recv().await.unwrap().contains("Host: example.com\r\n"));
}

#[tokio::test]
async fn a_long_body_is_truncated_without_an_error() {
    let (address, _requests) = serve(None, |_| page("200 OK", "", &"x".repeat(MAX_OUTPUT + 5000))).await;
    assert_eq!(http_get(get(address, "/")).await, Attempt::Success("x".repeat(MAX_OUTPUT)));
}

#[tokio::test]
async fn an_http_fault_before_the_headers_is_a_failure_and_one_after_them_an_error() {
    let (address, _requests) = serve(None, |path| match path {
        "/silent" => Reply::Hang(String::new()),
        "/closed" => Reply::Close(String::new()),
        "/garbage" => Reply::Close("hello there\r\n\r\n".into()),
        "/half" => Reply::Close("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf".into()),
        _ => Reply::Hang("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf".into()),
    })
    .await;
    let url = |path: &str| format!("Get \"http://{address}{path}\": ");
    let error =
        |error: &str| Attempt::Broken(Broken { state: "failure", error: error.to_owned(), event: true });
    for (path, expected) in [
        (
            "/silent",
            failure(
                url("/silent") + "context deadline exceeded (Client.Timeout exceeded while awaiting headers)",
            ),
        ),
        ("/closed", failure(url("/closed") + "EOF")),
        (
            "/garbage",
            failure(
                url("/garbage") + "net/http: HTTP/1.x transport connection broken: malformed HTTP response",
            ),
        ),
        ("/half", error("unexpected EOF")),
        (
            "/stuck",
            error("context deadline exceeded (Client.Timeout or context cancellation while reading body)"),
        ),
    ] {
        let handler = Handler::Http(get(address, path));
        assert_eq!(attempt(&real(), handler, Duration::from_millis(200)).await, expected, "{path}");
    }
    let closed = closed_port().await;
    let text = format!("Get \"http://{closed}/\": dial tcp {closed}: connect: connection refused");
    assert_eq!(http_get(get(closed, "/")).await, failure(text));
}

#[tokio::test]
async fn an_unsupported_scheme_fails_without_a_connection() {
    let (address, mut requests) = serve(None, |_| page("200 OK", "", "")).await;
    let protocol = format!("Get \"sideways://{address}/x\": unsupported protocol scheme \"sideways\"");
    let parse = format!("parse \"two words://{address}/x\": first path segment in URL cannot contain colon");
    for (scheme, expected) in [
        ("Sideways", failure(protocol)),
        ("Two words", Attempt::unknown(parse)),
        ("", Attempt::Success(String::new())),
    ] {
        let get = HttpGet { scheme: UrlScheme::parse(scheme), ..get(address, "/x") };
        assert_eq!(http_get(get).await, expected, "{scheme:?}");
    }
    assert!(requests.try_recv().is_ok(), "the request without a scheme is sent");
    assert!(requests.try_recv().is_err(), "no other request is sent");
}

/// Returns an acceptor for a certificate of another name, with these application protocols.
fn tls_acceptor(protocols: &[&[u8]]) -> TlsAcceptor {
    let certified = rcgen::generate_simple_self_signed(vec!["somebody.else".into()]).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::try_from(certified.signing_key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certified.cert.der().clone()], key)
        .unwrap();
    config.alpn_protocols = protocols.iter().map(|p| p.to_vec()).collect();
    TlsAcceptor::from(Arc::new(config))
}

#[tokio::test]
async fn any_certificate_is_accepted_and_plain_http_is_detected() {
    let (address, _requests) = serve(Some(tls_acceptor(&[])), |_| page("200 OK", "", "sealed")).await;
    let tls = |address| HttpGet { scheme: UrlScheme::Https, ..get(address, "/") };
    assert_eq!(http_get(tls(address)).await, Attempt::Success("sealed".into()));

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let plain = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await?;
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await?;
        stream.read_to_end(&mut Vec::new()).await
    });
    let text = format!("Get \"https://{plain}/\": tls: first record does not look like a TLS handshake");
    assert_eq!(http_get(tls(plain)).await, failure(text));
}

/// Returns how many TCP segments the network namespace of this thread has sent.
fn segments_sent() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: ")).map(str::split_whitespace);
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let (_, sent) = names.zip(values).find(|(name, _)| *name == "OutSegs").unwrap();
    sent.parse().unwrap()
}

const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nfine";

#[test]
fn an_exchange_has_no_segment_that_only_acknowledges() {
    // In a network namespace of this thread, where no other process sends.
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    assert!(std::process::Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let exchange = async |purpose| {
            let before = segments_sent();
            let (mut connection, _) = dial::dial("127.0.0.1", port, purpose).await.unwrap();
            connection.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
            let (mut server, _) = listener.accept().await.unwrap();
            server.read_exact(&mut [0; 18]).await.unwrap();
            server.write_all(ANSWER).await.unwrap();
            connection.read_exact(&mut [0; ANSWER.len()]).await.unwrap();
            drop(connection);
            assert_eq!(server.read(&mut [0; 1]).await.unwrap(), 0, "closed");
            drop(server);
            segments_sent() - before
        };
        // The least of several, since a late acknowledgement is a segment of its own.
        let (mut with, mut without) = (u64::MAX, u64::MAX);
        for _ in 0..20 {
            with = with.min(exchange(Purpose::Request).await);
            without = without.min(exchange(Purpose::Handshake).await);
        }
        assert_eq!(with + 2, without, "segments of both ends: those for the handshake and the answer");
    });
}

/// A server with Nagle's algorithm sends the second part of its answer when the first is acknowledged.
#[tokio::test]
async fn a_part_of_an_answer_is_acknowledged_at_once() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (mut connection, _) = dial::dial("127.0.0.1", port, Purpose::Request).await.unwrap();
    connection.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let (mut server, _) = listener.accept().await.unwrap();
    let (first, second) = ANSWER.split_at(10);
    let mut answer = [0; ANSWER.len()];
    // Nothing has arrived yet.
    assert!(futures::poll!(std::pin::pin!(connection.read(&mut answer))).is_pending());
    server.write_all(first).await.unwrap();
    connection.read_exact(&mut answer[..first.len()]).await.unwrap();
    assert!(!connection.acknowledges_at_once());
    assert!(futures::poll!(std::pin::pin!(connection.read(&mut answer))).is_pending());
    assert!(connection.acknowledges_at_once());
    server.write_all(second).await.unwrap();
    connection.read_exact(&mut answer[first.len()..]).await.unwrap();
    assert_eq!(answer, ANSWER);
}

#[tokio::test]
async fn a_tcp_probe_distinguishes_an_open_port_from_a_closed_one() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let open = listener.local_addr().unwrap();
    let closed = closed_port().await;
    let unresolved = "dial tcp: lookup no-such-host.invalid: no such host";
    for (host, port, expected) in [
        (None, u32::from(open.port()), Attempt::Success(String::new())),
        (Some("localhost".to_owned()), open.port().into(), Attempt::Success(String::new())),
        (None, closed.port().into(), failure(format!("dial tcp {closed}: connect: connection refused"))),
        (Some("no-such-host.invalid".into()), 80, failure(unresolved)),
        (None, 0, Attempt::unknown("invalid port number: 0")),
        (None, 65536, Attempt::unknown("invalid port number: 65536")),
    ] {
        let handler = Handler::Tcp { host, port };
        assert_eq!(attempt(&real(), handler.clone(), Duration::from_secs(5)).await, expected, "{handler:?}");
    }
}

/// Returns an address that drops further connections, as long as the sockets are held.
async fn full_backlog() -> (SocketAddr, (TcpListener, Vec<tokio::net::TcpStream>)) {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let full = listener.local_addr().unwrap();
    let mut held = Vec::new();
    while let Ok(Ok(stream)) =
        tokio::time::timeout(Duration::from_millis(200), tokio::net::TcpStream::connect(full)).await
    {
        held.push(stream);
    }
    (full, (listener, held))
}

#[tokio::test]
async fn a_tcp_probe_without_a_reply_times_out() {
    let (full, _held) = full_backlog().await;
    let handler = Handler::Tcp { host: None, port: full.port().into() };
    let outcome = attempt(&real(), handler, Duration::from_millis(200)).await;
    assert_eq!(outcome, failure(format!("dial tcp {full}: i/o timeout")));
}

#[tokio::test]
async fn a_grpc_probe_succeeds_only_if_the_status_is_serving() {
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_service_status("up", tonic_health::ServingStatus::Serving).await;
    reporter.set_service_status("down", tonic_health::ServingStatus::NotServing).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    tokio::spawn(tonic::transport::Server::builder().add_service(health).serve_with_incoming(incoming));
    let bare = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let unimplemented = bare.local_addr().unwrap();
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(bare);
    let none = tonic::service::Routes::default();
    tokio::spawn(tonic::transport::Server::builder().add_routes(none).serve_with_incoming(incoming));
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let closed = closed_port().await;
    for (port, service, expected) in [
        (address.port(), "up", Attempt::Success("service healthy".into())),
        (address.port(), "down", failure("service unhealthy (responded with \"NOT_SERVING\")")),
        (
            address.port(),
            "none",
            failure(
                "error: health rpc probe failed: rpc error: code = NotFound desc = service not registered",
            ),
        ),
        (
            unimplemented.port(),
            "",
            failure(
                "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): ",
            ),
        ),
        (silent.local_addr().unwrap().port(), "", failure("timeout: health rpc did not complete within 1s")),
        (
            closed.port(),
            "",
            failure(format!(
                "error: health rpc probe failed: rpc error: code = Unavailable desc = connection error: desc = \
                 \"transport: Error while dialing: dial tcp {closed}: connect: connection refused\""
            )),
        ),
    ] {
        let handler = Handler::Grpc { port: port.into(), service: service.into(), tls: false };
        let outcome = attempt(&real(), handler, Duration::from_secs(1)).await;
        assert_eq!(outcome, expected, "{service:?}");
    }
}

/// Serves the health protocol over TLS with these application protocols: a proxy in front of a server without
/// TLS.
async fn serve_grpc_tls(protocols: &[&[u8]]) -> u16 {
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let behind = server.local_addr().unwrap();
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_service_status("down", tonic_health::ServingStatus::NotServing).await;
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(server);
    tokio::spawn(tonic::transport::Server::builder().add_service(health).serve_with_incoming(incoming));

    let acceptor = tls_acceptor(protocols);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            // A client without TLS ends here.
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            let mut plain = tokio::net::TcpStream::connect(behind).await.unwrap();
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut stream, &mut plain).await });
        }
    });
    port
}

#[tokio::test]
async fn a_grpc_probe_uses_tls_only_in_that_mode_and_accepts_any_certificate() {
    let sealed = serve_grpc_tls(&[b"h2"]).await;
    let probe = async |port: u16, service: &str, tls| {
        let handler = Handler::Grpc { port: port.into(), service: service.into(), tls };
        attempt(&real(), handler, Duration::from_secs(5)).await
    };
    assert_eq!(probe(sealed, "", true).await, Attempt::Success("service healthy".into()));
    let down = failure("service unhealthy (responded with \"NOT_SERVING\")");
    assert_eq!(probe(sealed, "down", true).await, down);
    let Attempt::Failure(_) = probe(sealed, "", false).await else { panic!("a plain request to TLS") };

    let broken = |text: &str| {
        failure(format!(
            "error: health rpc probe failed: rpc error: code = Unavailable desc = connection error: desc = \
             \"transport: authentication handshake failed: {text}\""
        ))
    };
    // A server of HTTP/2 without TLS begins with its settings.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let plain = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
        std::future::pending::<()>().await;
    });
    let record = broken("tls: first record does not look like a TLS handshake");
    assert_eq!(probe(plain, "", true).await, record);
    let without = serve_grpc_tls(&[]).await;
    let missing = broken("credentials: cannot check peer: missing selected ALPN property");
    assert_eq!(probe(without, "", true).await, missing);
}

#[tokio::test]
async fn a_grpc_probe_of_a_closed_port_does_not_wait_for_its_timeout() {
    let port = closed_port().await.port().into();
    let handler = Handler::Grpc { port, service: String::new(), tls: false };
    let transport = real();
    let attempted = attempt(&transport, handler, Duration::from_secs(3600));
    let outcome = tokio::time::timeout(Duration::from_secs(60), attempted).await;
    let Ok(Attempt::Failure(text)) = outcome else { panic!("{outcome:?}") };
    assert!(text.ends_with("connect: connection refused\""), "{text}");
}

#[tokio::test]
async fn a_grpc_probe_without_a_connection_times_out_as_one_without_an_answer() {
    let (full, _held) = full_backlog().await;
    let handler = Handler::Grpc { port: full.port().into(), service: String::new(), tls: false };
    let outcome = attempt(&real(), handler, Duration::from_millis(200)).await;
    assert_eq!(outcome, failure("timeout: health rpc did not complete within 200ms"));
}

/// Answers each call with a message of this size and a header of this size, and counts what it has sent.
async fn serve_large_grpc(message: usize, header: usize) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut connection = h2::server::handshake(stream).await.unwrap();
                while let Some(Ok((_, mut respond))) = connection.accept().await {
                    let answer = ::http::Response::builder()
                        .header("content-type", "application/grpc")
                        .header("x", "h".repeat(header))
                        .body(())
                        .unwrap();
                    // The client may have reset the stream.
                    let Ok(mut stream) = respond.send_response(answer, false) else { continue };
                    let mut bytes = vec![0];
                    bytes.extend(u32::try_from(message).unwrap().to_be_bytes());
                    bytes.resize(5 + message, 0);
                    let _ = stream.send_data(bytes.into(), true);
                }
            });
        }
    });
    port
}

#[tokio::test]
async fn a_grpc_probe_reads_no_large_answer() {
    for (message, header, want) in [
        (1 << 20, 0, "decoded message length too large: found 1048576 bytes, the limit is: 65536 bytes"),
        (0, 4 << 20, ""),
    ] {
        let port = serve_large_grpc(message, header).await.into();
        let handler = Handler::Grpc { port, service: String::new(), tls: false };
        let outcome = attempt(&real(), handler, Duration::from_secs(5)).await;
        let Attempt::Failure(text) = &outcome else { panic!("{outcome:?}") };
        assert!(text.contains(want) && text.starts_with("error: health rpc probe failed"), "{text}");
    }
}

/// The body comes byte by byte, and has no end.
#[tokio::test]
async fn an_answer_that_comes_byte_by_byte_takes_no_longer_than_the_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let closed = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n";
        stream.write_all(head).await.unwrap();
        while stream.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let probing = attempt(&real(), Handler::Http(get(address, "/")), Duration::from_millis(300)).await;
    assert_eq!(
        probing,
        Attempt::Broken(Broken { state: "failure", error: http::BODY_TIMED_OUT.into(), event: true })
    );
    closed.await.unwrap();
}

/// Answers by the first word of the command.
struct FakeExec;

#[tonic::async_trait]
impl runtime::probe_exec_server::ProbeExec for FakeExec {
    async fn exec(
        &self,
        request: tonic::Request<runtime::ProbeExecRequest>,
    ) -> Result<tonic::Response<runtime::ProbeExecReply>, tonic::Status> {
        let request = request.into_inner();
        assert_eq!((request.container_id.as_str(), request.timeout_seconds), ("c1", 90));
        let reply = |exit_code, output: &str, timed_out| {
            Ok(tonic::Response::new(runtime::ProbeExecReply { exit_code, output: output.into(), timed_out }))
        };
        match request.command[0].as_str() {
            "true" => reply(0, "fine", false),
            "false" => reply(1, "not fine", false),
            "loud" => reply(0, &"x".repeat(MAX_OUTPUT + 10), false),
            "sleep" => reply(0, "", true),
            "away" => Err(tonic::Status::unavailable("no runtime")),
            _ => Err(tonic::Status::permission_denied("no such grant")),
        }
    }
}

#[tokio::test]
async fn a_command_fails_by_its_exit_code_and_never_by_a_missing_runtime() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("cri.sock");
    let listener = quintlet_kit::socket::bind_unix(&socket, 0o600).unwrap();
    let server = quintlet_kit::server::Server::new("fake")
        .add_service(runtime::probe_exec_server::ProbeExecServer::new(FakeExec));
    let stop = tokio_util::sync::CancellationToken::new();
    tokio::spawn(server.serve(listener, quintlet_kit::socket::PeerPolicy::Any, stop));
    let broken = |error: &str, event| {
        Attempt::Broken(Broken { state: "unknown", error: format!("rpc error: code = {error}"), event })
    };
    let attempts = RealAttempts::new(&socket);
    for (command, expected) in [
        ("true", Attempt::Success("fine".into())),
        ("false", failure("not fine")),
        ("loud", Attempt::Success("x".repeat(MAX_OUTPUT))),
        ("sleep 100", failure("command timed out: \"sleep 100\" timed out after 1m30s")),
        ("away", broken("Unavailable desc = no runtime", false)),
        ("forbidden", broken("PermissionDenied desc = no such grant", true)),
    ] {
        let command = command.split(' ').map(str::to_owned).collect();
        let handler = Handler::Exec { command, grant: vec![1] };
        let outcome = attempt(&attempts, handler.clone(), Duration::from_secs(90)).await;
        assert_eq!(outcome, expected, "{handler:?}");
    }
    let handler = Handler::Exec { command: vec!["true".into()], grant: Vec::new() };
    let outcome = attempt(&real(), handler, Duration::from_secs(90)).await;
    assert!(matches!(outcome, Attempt::Broken(Broken { event: false, .. })), "no proxy at all: {outcome:?}");
    let missing = attempt(&real(), Handler::Missing, Duration::from_secs(1)).await;
    assert_eq!(missing, Attempt::unknown("missing probe handler"));
}
