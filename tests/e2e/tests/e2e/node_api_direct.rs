//! node-api's HTTPS port on a real runtime, without kubectl: requests that kubectl does not send, and silent
//! clients.

use std::sync::Arc;

use futures::{SinkExt as _, StreamExt as _};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use quintlet_e2e::otlp::Receiver;
use quintlet_e2e::sockets::{of_node_api, of_runtime};
use quintlet_e2e::{LONG, Node, Options, Seen, pods, until};
use quintlet_spdy::Connection;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_util::sync::CancellationToken;

const TOKEN: &str = "operator-token";

async fn start(name: &'static str, extra: &[&str]) -> Node {
    start_with(name, extra, None).await
}

async fn start_with(name: &'static str, extra: &[&str], otlp_endpoint: Option<String>) -> Node {
    let extra = extra.iter().map(|flag| ("node-api", (*flag).to_owned())).collect();
    let node = Node::start(Options { node_api: true, extra, otlp_endpoint, ..Options::with_api(name) }).await;
    node.api().set_token(TOKEN, "operator", &[]);
    node.api().allow("operator", "*", "nodes/proxy");
    for right in ["metrics", "checkpoint"] {
        node.api().allow("operator", "*", &format!("nodes/{right}"));
    }
    node
}

async fn tls(node: &Node) -> TlsStream<TcpStream> {
    let stream = TcpStream::connect(node.node_api()).await.unwrap();
    let connector = TlsConnector::from(Arc::new(quintlet_kit::tls::unverified()));
    connector.connect(ServerName::try_from("node").unwrap(), stream).await.unwrap()
}

async fn ask(node: &Node, method: Method, path: &str) -> (StatusCode, String) {
    let exchange = async {
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(tls(node).await)).await.unwrap();
        quintlet_kit::task::spawn("connection", connection);
        let request = Request::builder().method(method).uri(path).header("host", "node");
        let request = request.header("authorization", format!("Bearer {TOKEN}"));
        let answer = sender.send_request(request.body(Empty::<bytes::Bytes>::new()).unwrap()).await.unwrap();
        let status = answer.status();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8_lossy(&body).into_owned())
    };
    tokio::time::timeout(LONG, exchange).await.unwrap_or_else(|_| panic!("no answer to {path}"))
}

async fn get(node: &Node, path: &str) -> (StatusCode, String) {
    ask(node, Method::GET, path).await
}

fn ok(text: &str) -> (StatusCode, String) {
    (StatusCode::OK, text.to_owned())
}

async fn ready(node: &Node, pod: serde_json::Value) -> Seen {
    let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
    node.api().create_pod(pods::bound(pod));
    node.wait_ready(&name).await
}

/// Prints its lines in a known order, one stream after the other, and keeps running.
const TALKER: &str =
    "echo one; sleep 0.1; echo two; sleep 0.1; echo three; trap 'exit 0' TERM; sleep 100000 & wait";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_parameter_of_a_log_request_limits_its_output() {
    let node = start("node-api-log-parameters", &[]).await;
    ready(&node, pods::script("talker", TALKER)).await;
    let log = "/containerLogs/default/talker/main";
    until("the whole log", LONG, async || {
        let answer = get(&node, log).await;
        if answer == ok("one\ntwo\nthree\n") { Ok(()) } else { Err(answer) }
    })
    .await;
    // Timestamps are those of the runtime, in any zone.
    let (_, stamped) = get(&node, &format!("{log}?timestamps=true")).await;
    let times: Vec<jiff::Timestamp> =
        stamped.lines().map(|l| l.split(' ').next().unwrap().parse().unwrap()).collect();
    assert!(times.len() == 3 && times.is_sorted(), "{stamped}");
    let since = |time: jiff::Timestamp| format!("{log}?sinceTime={time}");
    assert_eq!(get(&node, &since(times[1])).await, ok("two\nthree\n"), "a line of that very time counts");
    let second = jiff::SignedDuration::from_secs(1);
    assert_eq!(get(&node, &since(times[0] - second)).await, ok("one\ntwo\nthree\n"));
    assert_eq!(get(&node, &since(times[2] + second)).await, ok(""));
    assert_eq!(get(&node, &format!("{log}?sinceSeconds=86400")).await, ok("one\ntwo\nthree\n"));
    until("a time when all lines are older than a second", LONG, async || {
        let answer = get(&node, &format!("{log}?sinceSeconds=1")).await;
        if answer == ok("") { Ok(()) } else { Err(answer) }
    })
    .await;
    for (query, want) in [
        ("limitBytes=5", "one\nt"),
        ("limitBytes=1000", "one\ntwo\nthree\n"),
        ("tailLines=0", ""),
        ("tailLines=2", "two\nthree\n"),
        ("tailLines=100", "one\ntwo\nthree\n"),
        ("tailLines=2&limitBytes=4", "two\n"),
        ("tail=1", "three\n"),
        ("tail=all", "one\ntwo\nthree\n"),
        ("stream=All", "one\ntwo\nthree\n"),
    ] {
        assert_eq!(get(&node, &format!("{log}?{query}")).await, ok(want), "{query}");
    }
    let gate = "unable to return the given log stream: \"Stderr\". Please enable PodLogsQuerySplitStreams \
                feature gate in kubelet";
    let refused = get(&node, &format!("{log}?stream=Stderr")).await;
    assert_eq!(refused, (StatusCode::BAD_REQUEST, gate.to_owned()));
    for query in
        ["tailLines=-1", "limitBytes=0", "sinceSeconds=0", "sinceSeconds=1&sinceTime=2026-01-01T00:00:00Z"]
    {
        let want = (StatusCode::UNPROCESSABLE_ENTITY, r#"{"message": "Invalid request."}"#.to_owned());
        assert_eq!(get(&node, &format!("{log}?{query}")).await, want, "{query}");
    }
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_streams_of_a_log_are_read_separately_with_the_feature_gate() {
    let node = start("node-api-streams", &["--feature-gates=PodLogsQuerySplitStreams=true"]).await;
    let script =
        "echo out 1; echo err 1 >&2; echo out 2; echo err 2 >&2; trap 'exit 0' TERM; sleep 100000 & wait";
    ready(&node, pods::script("both", script)).await;
    let log = "/containerLogs/default/both/main";
    for (stream, want) in [("Stdout", "out 1\nout 2\n"), ("Stderr", "err 1\nerr 2\n")] {
        until(&format!("the lines of {stream}"), LONG, async || {
            let answer = get(&node, &format!("{log}?stream={stream}")).await;
            if answer == ok(want) { Ok(()) } else { Err(answer) }
        })
        .await;
    }
    assert_eq!(get(&node, &format!("{log}?stream=Stderr&limitBytes=7")).await, ok("err 1\ne"));
    let (_, all) = get(&node, &format!("{log}?stream=All")).await;
    assert_eq!(all.lines().count(), 4, "{all}");
    for query in ["stream=Stdout&tailLines=1", "stream=Both"] {
        assert_eq!(
            get(&node, &format!("{log}?{query}")).await.0,
            StatusCode::UNPROCESSABLE_ENTITY,
            "{query}"
        );
    }
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_returns_the_output_of_a_command_and_its_failure() {
    let node = start("node-api-run", &[]).await;
    let seen = ready(&node, pods::sleeper("shell")).await;
    let run = async |path: &str| ask(&node, Method::POST, &format!("/run/default/{path}")).await;
    assert_eq!(run("shell/main?cmd=echo%20a%20%20b").await, ok("a  b\n"), "one blank parts two arguments");
    let by_uid = format!("shell/{}/main?cmd=hostname", seen.uid());
    assert_eq!(run(&by_uid).await, ok("shell\n"));
    let (code, body) = run("shell/main?cmd=cat%20/nothing").await;
    assert_eq!(code, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(body.contains("exited with 1") && body.contains("/nothing"), "{body}");
    assert_eq!(
        run("shell/other-uid/main?cmd=true").await,
        (StatusCode::NOT_FOUND, "pod does not exist".to_owned())
    );
    assert_eq!(run("nobody/main?cmd=true").await, (StatusCode::NOT_FOUND, "pod does not exist".to_owned()));
    assert_eq!(get(&node, "/run/default/shell/main?cmd=true").await.0, StatusCode::METHOD_NOT_ALLOWED);
    until("a line for each, the wrong method too", LONG, async || {
        let log = node.log("node-api");
        let lines = log.lines().filter(|l| l.contains("action=run") && l.contains("user=operator")).count();
        if lines == 6 { Ok(()) } else { Err(log) }
    })
    .await;
    node.down().await;
}

/// Sends an upgrade to SPDY, and returns the header of the response.
async fn upgrade(stream: &mut TlsStream<TcpStream>, path: &str) -> String {
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: node\r\nauthorization: Bearer {TOKEN}\r\nconnection: Upgrade\r\n\
         upgrade: SPDY/3.1\r\nx-stream-protocol-version: v4.channel.k8s.io\r\ncontent-length: 0\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let byte = tokio::time::timeout(LONG, stream.read_u8()).await.expect("an answer to the upgrade");
        head.push(byte.unwrap());
    }
    String::from_utf8(head).unwrap()
}

/// Asserts that an open stream echoes its input.
async fn echo(spdy: &Connection) {
    let open = async |kind| spdy.stream(&[("streamType", kind)]).await.expect("a stream");
    let (_error, stdin) = (open("error").await, open("stdin").await);
    let (mut stdout, _stderr) = (open("stdout").await, open("stderr").await);
    assert!(stdin.writer.send(b"ping").await);
    let received = tokio::time::timeout(LONG, stdout.blocks.recv()).await.expect("the echo");
    assert_eq!(received.as_deref(), Some(b"ping".as_slice()));
}

/// Waits until neither side has a connection. containerd closes its own when the process in the container has
/// exited.
async fn nothing_left(node: &Node, why: &str) {
    until(&format!("nothing left after {why}"), LONG, async || {
        let (ours, theirs) = (of_node_api(node), of_runtime(node));
        if ours.is_empty() && theirs.is_empty() { Ok(()) } else { Err((ours, theirs)) }
    })
    .await;
    until("a count of none", LONG, async || {
        let figures = get(node, "/metrics").await.1;
        let open = figures.lines().find(|l| l.starts_with("quintlet_node_api_upgrades{")).map(str::to_owned);
        if open.as_ref().is_some_and(|l| l.ends_with(" 0")) { Ok(()) } else { Err(open) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_half_open_upgrade_is_cleaned_up_in_node_api_and_in_the_runtime() {
    let node = start("node-api-half-open", &[]).await;
    ready(&node, pods::sleeper("shell")).await;
    let exec = "/exec/default/shell/main?input=1&output=1&error=1&command=cat";
    nothing_left(&node, "the start").await;

    // Disconnects during an open session.
    let mut gone = tls(&node).await;
    assert!(upgrade(&mut gone, exec).await.starts_with("HTTP/1.1 101"));
    let (read, write) = tokio::io::split(gone);
    let spdy = Connection::over(read, write);
    echo(&spdy).await;
    assert!(!of_runtime(&node).is_empty(), "an upgrade that is open has a connection at the runtime");
    spdy.close();
    drop(spdy);
    nothing_left(&node, "a client that is gone").await;

    // Closes its half, and waits for the other side.
    let mut half = tls(&node).await;
    assert!(upgrade(&mut half, exec).await.starts_with("HTTP/1.1 101"));
    let (near, far) = tokio::io::duplex(64 << 10);
    let (read, write) = tokio::io::split(near);
    let spdy = Connection::over(read, write);
    let (mut from_spdy, mut to_spdy) = tokio::io::split(far);
    let (mut from_node, mut to_node) = tokio::io::split(half);
    let half_is_over = CancellationToken::new();
    let over = half_is_over.clone();
    let up = tokio::spawn(async move {
        let _ = over.run_until_cancelled(tokio::io::copy(&mut from_spdy, &mut to_node)).await;
        to_node.shutdown().await.unwrap();
        to_node
    });
    let down = tokio::spawn(async move { tokio::io::copy(&mut from_node, &mut to_spdy).await });
    echo(&spdy).await;
    half_is_over.cancel();
    let kept = up.await.unwrap();
    // Any end is accepted.
    let _ = tokio::time::timeout(LONG, down).await.expect("the other half ends, too");
    nothing_left(&node, "a client that ended its half").await;
    drop((spdy, kept));

    // Upgrades and stays silent. containerd gives up after 30 s but keeps its connection for the idle
    // timeout of streams, so node-api has to detect it.
    let mut silent = tls(&node).await;
    assert!(upgrade(&mut silent, exec).await.starts_with("HTTP/1.1 101"));
    let mut rest = Vec::new();
    let _ = tokio::time::timeout(LONG, silent.read_to_end(&mut rest)).await.expect("silence is not for ever");
    drop(silent);
    until("no connection of node-api", LONG, async || {
        let ours = of_node_api(&node);
        if ours.is_empty() { Ok(()) } else { Err(ours) }
    })
    .await;

    // Disconnects in the middle of a header, before an upgrade.
    let mut cut = tls(&node).await;
    cut.write_all(format!("POST {exec} HTTP/1.1\r\nconnection: Upgr").as_bytes()).await.unwrap();
    drop(cut);
    until("no connection of node-api", LONG, async || {
        let ours = of_node_api(&node);
        if ours.is_empty() { Ok(()) } else { Err(ours) }
    })
    .await;
    assert_eq!(ask(&node, Method::POST, "/run/default/shell/main?cmd=echo%20still").await, ok("still\n"));
    node.down().await;
}

type WebSocket = WebSocketStream<TlsStream<TcpStream>>;

async fn websocket(node: &Node, path: &str, protocol: &str) -> WebSocket {
    let mut request = format!("ws://node{path}").into_client_request().unwrap();
    let headers = request.headers_mut();
    headers.insert("sec-websocket-protocol", protocol.parse().unwrap());
    headers.insert("authorization", format!("Bearer {TOKEN}").parse().unwrap());
    let (socket, answer) = tokio_tungstenite::client_async(request, tls(node).await).await.unwrap();
    assert_eq!(answer.headers()["sec-websocket-protocol"], protocol);
    socket
}

/// Returns the data of each channel until the other side closes.
async fn rest(socket: &mut WebSocket) -> [String; 4] {
    let mut all: [Vec<u8>; 4] = Default::default();
    let reading = async {
        loop {
            match socket.next().await.expect("a close before the end").unwrap() {
                Message::Binary(data) => all[usize::from(data[0])].extend(&data[1..]),
                // kubectl treats any other close code as a failure.
                Message::Close(frame) => return assert_eq!(frame.map(|f| f.code), Some(CloseCode::Normal)),
                Message::Ping(_) | Message::Pong(_) => {}
                other => panic!("{other:?}"),
            }
        }
    };
    tokio::time::timeout(LONG, reading).await.expect("the connection ends with the process");
    all.map(|bytes| String::from_utf8(bytes).unwrap())
}

fn message(channel: u8, text: &str) -> Message {
    Message::Binary([&[channel], text.as_bytes()].concat().into())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_web_socket_client_of_version_5_closes_only_stdin_and_gets_the_exit_code() {
    let node = start("node-api-v5", &[]).await;
    ready(&node, pods::sleeper("shell")).await;
    let exec = |flags: &str, script: &str| {
        format!("/exec/default/shell/main?{flags}&command=sh&command=-c&command={script}")
    };
    let protocol = "v5.channel.k8s.io";
    // `wc` prints the count only after the end of its input; that output still arrives.
    let script = "wc%20-c;%20echo%20odd%20%3E%262;%20exit%207";
    let mut socket = websocket(&node, &exec("input=1&output=1&error=1", script), protocol).await;
    for block in ["hello ", "world"] {
        socket.send(message(0, block)).await.unwrap();
    }
    socket.send(Message::Binary(vec![255, 0].into())).await.unwrap();
    let [_, out, err, status] = rest(&mut socket).await;
    assert_eq!((out.trim(), err.as_str()), ("11", "odd\n"));
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["reason"], "NonZeroExitCode", "{status}");
    assert_eq!(status["details"]["causes"][0]["message"], "7", "{status}");

    let mut socket = websocket(&node, &exec("output=1", "true"), protocol).await;
    let [_, _, _, status] = rest(&mut socket).await;
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["status"], "Success", "{status}");

    // A new size reaches the terminal.
    let ask = "until%20%5B%20%22%24(stty%20size)%22%20=%20%2245%20123%22%20%5D;%20do%20sleep%200.1;%20done;%20exit%203";
    let mut socket = websocket(&node, &exec("input=1&output=1&tty=1", ask), protocol).await;
    socket.send(message(4, r#"{"Width":123,"Height":45}"#)).await.unwrap();
    let [_, _, _, status] = rest(&mut socket).await;
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["details"]["causes"][0]["message"], "3", "{status}");

    // A client that disconnects is cleaned up.
    let mut socket = websocket(&node, &exec("input=1&output=1", "cat"), protocol).await;
    socket.send(message(0, "ping")).await.unwrap();
    let received = async {
        loop {
            if let Message::Binary(data) = socket.next().await.unwrap().unwrap() {
                return data;
            }
        }
    };
    let received = tokio::time::timeout(LONG, received).await.expect("the echo");
    assert_eq!(received.as_ref(), b"\x01ping");
    drop(socket);
    nothing_left(&node, "a client of version 5 that is gone").await;
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_is_forwarded_through_a_web_socket_tunnel() {
    let node = start("node-api-tunnel", &[]).await;
    let script = "echo hello > /tmp/index.html; trap 'exit 0' TERM; httpd -f -p 8080 -h /tmp & wait";
    ready(&node, pods::script("web", script)).await;
    let socket = websocket(&node, "/portForward/default/web", "SPDY/3.1+portforward.k8s.io").await;
    let (mut to_node, mut from_node) = socket.split();
    // This side of the tunnel speaks SPDY.
    let (near, far) = tokio::io::duplex(64 << 10);
    let (mut read, mut write) = tokio::io::split(far);
    tokio::spawn(async move {
        let mut block = vec![0; 16 << 10];
        while let Ok(n @ 1..) = read.read(&mut block).await {
            to_node.send(Message::Binary(block[..n].to_vec().into())).await.unwrap();
        }
        to_node.close().await.unwrap();
    });
    tokio::spawn(async move {
        while let Some(Ok(message)) = from_node.next().await {
            if let Message::Binary(data) = message {
                write.write_all(&data).await.unwrap();
            }
        }
    });
    let (read, write) = tokio::io::split(near);
    let spdy = Connection::over(read, write);
    for request in ["0", "1", "2"] {
        let page = until("the page through the tunnel", LONG, async || {
            let headers = |kind| [("streamType", kind), ("port", "8080"), ("requestID", request)];
            let error = spdy.stream(&headers("error")).await.expect("the tunnel is open");
            let mut data = spdy.stream(&headers("data")).await.expect("the tunnel is open");
            error.writer.end().await;
            data.writer.send(b"GET / HTTP/1.0\r\n\r\n").await;
            let mut page = Vec::new();
            while let Some(block) = data.blocks.recv().await {
                page.extend(block);
            }
            let page = String::from_utf8(page).unwrap();
            if page.is_empty() { Err("nothing") } else { Ok(page) }
        });
        assert!(page.await.ends_with("hello\n"));
    }
    spdy.close();
    drop(spdy);
    nothing_left(&node, "a tunnel").await;
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_node_api_restarts_without_an_effect_on_containers() {
    let node = start("node-api-killed", &[]).await;
    let script = "i=0; trap 'exit 0' TERM; while :; do echo line $i; i=$((i+1)); sleep 0.2; done";
    ready(&node, pods::script("ticker", script)).await;
    let before = node.steady(&["ticker"]).await;
    let mut follow = tls(&node).await;
    let request = format!(
        "GET /containerLogs/default/ticker/main?follow=true HTTP/1.1\r\nhost: node\r\nauthorization: Bearer {TOKEN}\r\n\r\n"
    );
    follow.write_all(request.as_bytes()).await.unwrap();
    let mut received = String::new();
    while !received.contains("line 3\n") {
        let mut block = [0; 1024];
        let n = tokio::time::timeout(LONG, follow.read(&mut block))
            .await
            .expect("the follower is notified")
            .unwrap();
        assert!(n > 0, "the follower was cut: {received}");
        received.push_str(&String::from_utf8_lossy(&block[..n]));
    }
    let starts = node.kill9("node-api");
    let mut rest = Vec::new();
    // The follower receives a reset or an end of stream.
    let _ = tokio::time::timeout(LONG, follow.read_to_end(&mut rest)).await.expect("the follower is cut");
    node.wait_back("node-api", starts, LONG).await;
    let (code, log) = get(&node, "/containerLogs/default/ticker/main").await;
    assert!(code == StatusCode::OK && log.starts_with("line 0\nline 1\nline 2\nline 3\n"), "{code} {log}");
    let goes_on = log.lines().count();
    until("more lines", LONG, async || {
        let (_, log) = get(&node, "/containerLogs/default/ticker/main").await;
        if log.lines().count() > goes_on { Ok(()) } else { Err(log) }
    })
    .await;
    assert_eq!(node.steady(&["ticker"]).await, before);
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_that_cannot_checkpoint_is_quoted() {
    let node = start("node-api-checkpoint", &[]).await;
    ready(&node, pods::script("talker", TALKER)).await;
    let path = "/checkpoint/default/talker/main";
    let (code, body_text) = ask(&node, Method::POST, path).await;
    // containerd needs CRIU, which this machine does not have. The error messages differ by version.
    assert_eq!(code, StatusCode::INTERNAL_SERVER_ERROR, "{body_text}");
    let quoted = "checkpointing of default/talker/main failed (rpc error: code = ";
    assert!(body_text.starts_with(quoted) && body_text.ends_with(')'), "{body_text}");
    assert_eq!(get(&node, path).await.0, StatusCode::METHOD_NOT_ALLOWED);
    let (code, body_text) = ask(&node, Method::POST, "/checkpoint/default/talker/other").await;
    assert_eq!((code.as_u16(), body_text.as_str()), (404, "container other does not exist"));
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exec_is_one_trace_of_the_client_node_api_and_cri_proxy() {
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const PARENT: &str = "00f067aa0ba902b7";
    let receiver = Receiver::start().await;
    let node = start_with("node-api-trace", &[], Some(receiver.endpoint().to_owned())).await;
    let pod = ready(&node, pods::sleeper("traced")).await;
    let mut stream = tls(&node).await;
    let request = format!(
        "POST /exec/default/traced/main?output=1&command=true HTTP/1.1\r\nhost: n\r\nauthorization: Bearer {TOKEN}\r\n\
         traceparent: 00-{TRACE}-{PARENT}-01\r\nconnection: Upgrade\r\nupgrade: SPDY/3.1\r\n\
         x-stream-protocol-version: v4.channel.k8s.io\r\ncontent-length: 0\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = [0; 12];
    tokio::time::timeout(LONG, stream.read_exact(&mut head)).await.expect("an answer").unwrap();
    assert_eq!(&head, b"HTTP/1.1 101");
    drop(stream);
    let uid = pod.text("/metadata/uid").to_owned();
    until("the spans of both services", LONG, async || {
        let spans: Vec<_> = receiver.spans().into_iter().filter(|span| span.trace == TRACE).collect();
        let of_service = |service: &str| spans.iter().find(|span| span.service == service);
        let (Some(request), Some(call)) = (of_service("node-api"), of_service("cri-proxy")) else {
            return Err(spans);
        };
        let is_right = request.name == "POST /exec"
            && request.parent == PARENT
            && request.attributes.get("k8s.pod.uid") == Some(&uid)
            && call.name == "Exec"
            && call.parent == request.id
            && spans.len() == 2;
        if is_right { Ok(()) } else { Err(spans) }
    })
    .await;
    node.down().await;
}
