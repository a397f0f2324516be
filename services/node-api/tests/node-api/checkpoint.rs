//! `/checkpoint/`: requests to pod-sync, and responses to users.

use http::{Method, StatusCode};
use node_api_access::limits::Limits;

use crate::common::Api;

async fn start(more: &[&str]) -> Api {
    let api = Api::start(Limits::default(), more).await;
    api.test_api.set_token("right", "right", &[]);
    api.test_api.allow("right", "create", "nodes/checkpoint");
    api
}

async fn post(api: &Api, path: &str) -> (u16, String) {
    let (code, body) = api.request(Method::POST, path, Some("right"), None).await;
    (code.as_u16(), body)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_container_is_checkpointed_and_each_failure_has_the_kubelets_text() {
    let api = start(&[]).await;
    for (path, code, body) in [
        ("/checkpoint/default/none/main", 404, "pod does not exist"),
        ("/checkpoint/other/web/main", 404, "pod does not exist"),
        ("/checkpoint/default/web/none", 404, "container none does not exist"),
        ("/checkpoint/default/web/main?timeout=1s", 404, "cannot parse value of timeout parameter"),
        (
            "/checkpoint/default/web/main?timeout=-1",
            500,
            "checkpointing of default/web/main failed (the reason)",
        ),
        ("/checkpoint/default/web", 404, "404 page not found\n"),
        ("/checkpoint/default/web/u1/main", 404, "404 page not found\n"),
        ("/checkpoint/default/web/", 404, "404 page not found\n"),
        ("/checkpoint/default/web/main?timeout=9&timeout=7", 200, "{\"items\":[\"/a \\\"file\\\".tar\"]}"),
        ("/checkpoint/default/web/main", 200, "{\"items\":[\"/a \\\"file\\\".tar\"]}"),
    ] {
        assert_eq!(post(&api, path).await, (code, body.to_owned()), "{path}");
    }
    let requests: Vec<_> = api.checkpoints.0.lock().drain(..).collect();
    let requests: Vec<_> =
        requests.iter().map(|r| (r.pod_uid.as_str(), r.container.as_str(), r.timeout_seconds)).collect();
    assert_eq!(requests, [("u1", "main", -1), ("u1", "main", 7), ("u1", "main", 0)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn checkpoints_need_their_feature_gate() {
    for off in ["--feature-gates=ContainerCheckpoint=false", "--enable-debugging-handlers=false"] {
        let api = start(&[off]).await;
        let (code, _) = post(&api, "/checkpoint/default/web/main").await;
        assert_eq!(code, StatusCode::NOT_FOUND.as_u16(), "{off}");
        assert_eq!(api.checkpoints.0.lock().len(), 0, "{off}");
    }
}
