//! Slow clients, giant headers and half-open connections take no more than their share.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, missing_docs, unreachable_pub, dead_code)]

mod common;

use std::time::Duration;

use common::{Api, PATIENCE, tls};
use http::StatusCode;
use quintlet_nodeapi::limits::Limits;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

const OPEN: &[&str] = &["--anonymous-auth=true", "--authorization-mode=AlwaysAllow"];

async fn wait_open(api: &Api, want: usize) {
    let deadline = Instant::now() + PATIENCE;
    while api.gate.open() != want {
        assert!(Instant::now() < deadline, "{} connections are open, not {want}", api.gate.open());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Sends a header a byte at a time, until nobody takes it.
async fn drip(to: &mut (impl tokio::io::AsyncWrite + Unpin)) {
    while to.write_all(b"a").await.is_ok() && to.flush().await.is_ok() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_says_nothing_or_speaks_too_slowly_is_hung_up_on() {
    let limits = Limits {
        handshake: Duration::from_millis(300),
        header: Duration::from_millis(300),
        ..Limits::default()
    };
    let api = Api::start(limits, OPEN).await;
    // No handshake.
    let mut silent = TcpStream::connect(api.address).await.unwrap();
    // No header.
    let mut idle = api.tls(None).await;
    // A header, a byte at a time.
    let mut slow = api.tls(None).await;
    slow.write_all(b"GET /healthz HTTP/1.1\r\nx: ").await.unwrap();
    timeout(PATIENCE, drip(&mut slow)).await.expect("the slow header is taken for ever");
    // The same after a request that was answered.
    let mut second = api.tls(None).await;
    second.write_all(b"GET /healthz HTTP/1.1\r\nhost: n\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\nok") {
        answer.push(timeout(PATIENCE, second.read_u8()).await.expect("an answer").unwrap());
    }
    second.write_all(b"GET /healthz HTTP/1.1\r\nx: ").await.unwrap();
    timeout(PATIENCE, drip(&mut second)).await.expect("a slow second header is taken for ever");
    let mut rest = Vec::new();
    let _ = timeout(PATIENCE, silent.read_to_end(&mut rest)).await.expect("the silent client is kept");
    let _ = timeout(PATIENCE, idle.read_to_end(&mut rest)).await.expect("the idle client is kept");
    wait_open(&api, 0).await;
    assert_eq!(api.get("/healthz", None).await.0, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_giant_header_is_refused_without_being_read_to_its_end() {
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
    let _ = timeout(PATIENCE, client.read_to_end(&mut answer)).await.expect("no answer and no end");
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
    assert_eq!(api.get("/healthz", None).await.0, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_connections_than_allowed_are_closed_and_a_place_that_is_given_back_is_taken() {
    let limits = Limits { connections: 8, per_address: 4, ..Limits::default() };
    let api = Api::start(limits, OPEN).await;
    let mut open = Vec::new();
    for _ in 0..4 {
        open.push(api.tls(None).await);
    }
    assert!(tls(api.address, None).await.is_err(), "a fifth connection of one address was let in");
    open.pop();
    wait_open(&api, 3).await;
    assert_eq!(api.get("/healthz", None).await.0, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_ends_idle_connections_and_the_process() {
    let api = Api::start(Limits::default(), OPEN).await;
    let mut idle = api.tls(None).await;
    api.stop.cancel();
    timeout(PATIENCE, api.ended).await.expect("it does not end").unwrap();
    let mut rest = Vec::new();
    let _ = timeout(PATIENCE, idle.read_to_end(&mut rest)).await.expect("the connection is kept");
    assert!(tls(api.address, None).await.is_err());
}
