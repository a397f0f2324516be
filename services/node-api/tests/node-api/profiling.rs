//! Profiles of node-api at `/debug/pprof/`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use node_api_access::limits::Limits;
use quintlet_profile::format::Profile;
use tokio::time::Instant;

use crate::common::{Api, TEST_TIMEOUT};

const OPEN: [&str; 3] =
    ["--authentication-token-webhook=false", "--anonymous-auth=true", "--authorization-mode=AlwaysAllow"];

async fn get(api: &Api, path: &str) -> (StatusCode, HeaderMap, Bytes) {
    let stream = api.tls(None).await;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    let serving = tokio::spawn(connection);
    let request = Request::builder().uri(path).header("host", "node").body(Empty::<Bytes>::new()).unwrap();
    let (parts, body) = sender.send_request(request).await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    serving.abort();
    (parts.status, parts.headers, body)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_profile_of_node_api_has_samples_and_a_second_one_is_refused_meanwhile() {
    let api = Api::start(Limits::default(), &OPEN).await;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let burning = std::thread::spawn(move || while !stopped.load(Ordering::Relaxed) {});
    let first = get(&api, "/debug/pprof/profile?seconds=2");
    let second = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        get(&api, "/debug/pprof/profile?seconds=1").await
    };
    let (first, second) = tokio::join!(first, second);
    stop.store(true, Ordering::Relaxed);
    burning.join().unwrap();
    assert_eq!(second.0, StatusCode::INTERNAL_SERVER_ERROR);
    let message = String::from_utf8_lossy(&second.2).into_owned();
    assert!(message.starts_with("Could not enable CPU profiling: another profile"), "{message}");
    assert_eq!(second.1["x-go-pprof"], "1");

    let (status, headers, body) = first;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(headers["content-type"], "application/octet-stream");
    assert_eq!(headers["content-disposition"], "attachment; filename=\"profile\"");
    let profile = Profile::decode_compressed(&body).unwrap();
    let samples: i64 = profile.sample.iter().map(|sample| sample.value[0]).sum();
    assert!(samples >= 20, "{samples}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_profile_ends_when_its_client_disconnects() {
    let api = Api::start(Limits::default(), &OPEN).await;
    let stream = api.tls(None).await;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    let serving = tokio::spawn(connection);
    let path = "/debug/pprof/profile?seconds=60";
    let request = Request::builder().uri(path).header("host", "node").body(Empty::<Bytes>::new()).unwrap();
    let waiting = tokio::spawn(async move { sender.send_request(request).await });
    let until = async |wanted: StatusCode| {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            let (status, _, body) = get(&api, "/debug/pprof/profile?seconds=1").await;
            if status == wanted {
                return;
            }
            assert!(Instant::now() < deadline, "{status}: {body:?}");
        }
    };
    until(StatusCode::INTERNAL_SERVER_ERROR).await;
    assert!(!waiting.is_finished());
    serving.abort();
    waiting.abort();
    until(StatusCode::OK).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn profiles_are_served_unless_their_handler_is_off() {
    let api = Api::start(Limits::default(), &OPEN).await;
    for path in ["/debug/pprof", "/debug/pprof/"] {
        let (status, headers, body) = get(&api, path).await;
        assert_eq!(
            (status, &headers["content-type"]),
            (StatusCode::OK, &"text/html; charset=utf-8".parse().unwrap())
        );
        assert!(String::from_utf8_lossy(&body).contains("<a href='profile'>"), "{body:?}");
    }
    let command_line: Vec<String> = std::env::args().collect();
    let (_, _, body) = get(&api, "/debug/pprof/cmdline").await;
    assert_eq!(String::from_utf8_lossy(&body), command_line.join("\0"));
    for (path, status, want) in [
        ("/debug/pprof/symbol", StatusCode::OK, "num_symbols: 0\n"),
        (
            "/debug/pprof/profile?seconds=61",
            StatusCode::BAD_REQUEST,
            "seconds must be from 1 to 60, not 61\n",
        ),
        ("/debug/pprof/trace", StatusCode::NOT_FOUND, "Unknown profile\n"),
        ("/debug/pprof/goroutine?debug=2", StatusCode::NOT_FOUND, "Unknown profile\n"),
    ] {
        assert_eq!(api.get(path, None).await, (status, want.to_owned()), "{path}");
    }
    let (status, body) = api.get("/debug/pprof/heap", None).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert!(body.contains("this build has no heap profile"), "{body}");
    let (status, _) = api.request(Method::POST, "/debug/pprof/profile", None, None).await;
    assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);

    let off = [&OPEN[..], &["--enable-profiling-handler=false"]].concat();
    let api = Api::start(Limits::default(), &off).await;
    for path in ["/debug/pprof/", "/debug/pprof/profile", "/debug/pprof/cmdline"] {
        let want = (StatusCode::METHOD_NOT_ALLOWED, "profiling endpoint is disabled.\n".to_owned());
        assert_eq!(api.get(path, None).await, want, "{path}");
    }
}
