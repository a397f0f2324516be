//! A panic in one request.

use std::sync::Arc;

use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use node_api_access::limits::Limits;
use quintlet_kit::contain;
use quintlet_kit::failpoint::{self, Failpoint, Observer};

use crate::common::Api;

/// Panics in requests that are for the pod `default/web`.
struct Panics;

impl Observer for Panics {
    fn reached(&self, failpoint: Failpoint) {
        let is_it = contain::current().is_some_and(|work| work.name() == "default/web");
        assert!(!is_it, "injected into {:?}", failpoint.name);
    }
}

#[tokio::test]
async fn a_panic_in_one_request_ends_only_that_request_with_500_and_its_text() {
    let flags = ["--authorization-mode=AlwaysAllow", "--anonymous-auth=true"];
    let api = Api::start(Limits::default(), &flags).await;
    // Applies to this thread, which runs the whole test.
    failpoint::observe(Arc::new(Panics));
    let stream = api.tls(None).await;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    quintlet_kit::task::spawn("connection", connection);
    let failed = StatusCode::INTERNAL_SERVER_ERROR;
    for (path, want) in [
        ("/containerLogs/default/web/main", failed),
        ("/containerLogs/default/none/main", StatusCode::NOT_FOUND),
        ("/exec/default/web/main?output=1&command=true", failed),
        ("/pods", StatusCode::OK),
    ] {
        let request = Request::builder().uri(path).header("host", "node");
        let answer = sender.send_request(request.body(Empty::<bytes::Bytes>::new()).unwrap()).await.unwrap();
        let status = answer.status();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        let text = String::from_utf8_lossy(&body);
        assert_eq!(status, want, "{path}: {text}");
        let is_panic = text.starts_with("node-api panicked at ") && text.contains("injected into");
        assert_eq!(is_panic, want == failed, "{path}: {text}");
    }
}
