//! Spans of requests, and the verbosity of log lines. A binary of its own, since it installs the process's
//! subscriber.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, unreachable_pub, dead_code)]

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use node_api_access::limits::Limits;
use quintlet_proto::debug::v1::Span;
use quintlet_telemetry::{TelemetryOptions, log_filter, ring};
use quintlet_testkit::fake_runtime::{FakeRuntime, Method};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::Instant;

use common::{Api, TEST_TIMEOUT};

/// The trace of the client, and its span.
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

/// Starts node-api with a user `alice`, whose token is `t`.
async fn start(more: &[&str]) -> (Api, FakeRuntime) {
    let _telemetry = quintlet_telemetry::init("node-api", &TelemetryOptions::default()).unwrap();
    let (api, runtime) = Api::with_runtime(Limits::default(), more).await;
    api.test_api.set_token("t", "alice", &[]);
    api.test_api.allow("alice", "*", "nodes/proxy");
    (api, runtime)
}

fn headers(token: &str) -> String {
    format!("authorization: Bearer {token}\r\ntraceparent: 00-{TRACE}-{PARENT}-01\r\n")
}

fn spans() -> Vec<Span> {
    ring().query(TRACE, "").spans
}

/// Waits for the only span of the trace.
async fn only_span() -> Span {
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        if let [span] = &spans()[..] {
            return span.clone();
        }
        assert!(Instant::now() < deadline, "{:?}", spans());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exec_is_a_span_of_its_clients_trace_until_the_stream_ends() {
    let (api, runtime) = start(&[]).await;
    let path = "/exec/default/web/main?output=1&command=true";
    let (head, stream) = api.upgrade(path, &headers("t")).await;
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    assert_eq!(spans(), [], "the stream is open");
    drop(stream);
    let span = only_span().await;
    assert_eq!((span.name.as_str(), span.parent_span_id.as_str()), ("POST /exec", PARENT));
    assert_eq!(span.error, "");
    let want = [
        ("http.request.method", "POST"),
        ("http.response.status_code", "101"),
        ("http.route", "/exec"),
        ("k8s.container.name", "main"),
        ("k8s.namespace.name", "default"),
        ("k8s.pod.name", "web"),
        ("k8s.pod.uid", "u1"),
    ];
    let named = span.attributes.iter().filter(|(key, _)| want.iter().any(|(wanted, _)| wanted == key));
    let named: BTreeMap<&str, &str> = named.map(|(key, value)| (key.as_str(), value.as_str())).collect();
    assert_eq!(named, want.into());
    // The command is not an attribute: it may have a password.
    assert!(span.attributes.values().all(|value| !value.contains("command")), "{span:?}");

    let carried = format!("00-{TRACE}-{}-01", span.span_id);
    let calls = runtime.calls_of(Method::Exec);
    assert_eq!(calls[0].metadata.get("traceparent").unwrap().to_str().unwrap(), carried);
    assert_eq!(*api.pod_traces.lock(), [carried]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_of_the_runtime_is_that_of_the_span() {
    let (api, runtime) = start(&[]).await;
    runtime.fail(Method::Exec, tonic::Code::Internal, "no shim", 1);
    let (head, _stream) = api.upgrade("/exec/default/web/main?output=1&command=true", &headers("t")).await;
    assert!(head.starts_with("HTTP/1.1 500"), "{head}");
    let span = only_span().await;
    assert!(!span.error.is_empty(), "{span:?}");
    let attribute = |key: &str| span.attributes.get(key).map(String::as_str);
    assert_eq!(attribute("error"), Some("Internal: no shim"));
    assert_eq!(attribute("error.type"), Some("500"));
    assert_eq!(attribute("http.response.status_code"), Some("500"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_without_permission_adds_no_span_to_a_trace() {
    let (api, _runtime) = start(&[]).await;
    api.test_api.set_token("other", "mallory", &[]);
    let path = "/exec/default/web/main?output=1&command=true";
    for (token, code) in [("bad", "401"), ("other", "403")] {
        let (head, _stream) = api.upgrade(path, &headers(token)).await;
        assert_eq!(head.split(' ').nth(1), Some(code), "{head}");
    }
    let (head, _stream) = api.upgrade("/exec/default/none/main?output=1", &headers("t")).await;
    assert!(head.starts_with("HTTP/1.1 404"), "{head}");
    assert_eq!(only_span().await.attributes["http.response.status_code"], "404");
}

/// Sends a verbosity. Returns the status code and the body of the response.
async fn send_verbosity(api: &Api, method: &str, token: &str, verbosity: &str) -> (String, String) {
    let mut stream = api.tls(None).await;
    let request = format!(
        "{method} /debug/flags/v HTTP/1.1\r\nhost: n\r\nauthorization: Bearer {token}\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n{verbosity}",
        verbosity.len()
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    tokio::time::timeout(TEST_TIMEOUT, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().to_owned(), body.to_owned())
}

fn answer(code: &str, body: &str) -> (String, String) {
    (code.to_owned(), body.to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_verbosity_is_set_by_who_may_update_the_proxy_of_the_node() {
    let (api, _runtime) = start(&[]).await;
    api.test_api.set_token("reader", "bob", &[]);
    api.test_api.allow("bob", "get", "nodes/proxy");
    let filter = || log_filter::current().unwrap();
    assert_eq!(send_verbosity(&api, "PUT", "reader", "4").await.0, "403");
    assert_eq!(filter(), "info");
    for (verbosity, want) in [("4", "debug"), ("10", "trace"), ("2", "info")] {
        let set = format!("successfully set klog.logging.verbosity to {verbosity}");
        assert_eq!(send_verbosity(&api, "PUT", "t", verbosity).await, answer("200", &set));
        assert_eq!(filter(), want);
    }
    let syntax = "strconv.ParseUint: parsing \"debug\": invalid syntax";
    assert_eq!(send_verbosity(&api, "PUT", "t", "debug").await, answer("400", syntax));
    assert_eq!(send_verbosity(&api, "GET", "t", "").await, answer("406", "unsupported http method"));
    let huge = "1".repeat(Limits::default().body_bytes + 1);
    assert_eq!(send_verbosity(&api, "PUT", "t", &huge).await.0, "413");
    assert_eq!(filter(), "info");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_verbosity_handler_that_is_off_sets_nothing() {
    for (flag, want) in [
        ("--enable-debug-flags-handler=false", answer("405", "flags endpoint is disabled.\n")),
        ("--enable-debugging-handlers=false", answer("404", "404 page not found\n")),
    ] {
        let (api, _runtime) = start(&[flag]).await;
        assert_eq!(send_verbosity(&api, "PUT", "t", "4").await, want, "{flag}");
        assert_eq!(log_filter::current().as_deref(), Some("info"), "{flag}");
    }
}
