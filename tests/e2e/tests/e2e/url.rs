//! Pods from a manifest URL.

use std::sync::Arc;

use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use parking_lot::Mutex;
use quintlet_e2e::{LONG, Node, Options, pods, until};
use serde_json::json;

/// A page that a test can change.
#[derive(Clone)]
struct Page(Arc<Mutex<(StatusCode, String)>>);

impl Page {
    fn set(&self, status: StatusCode, body: impl ToString) {
        *self.0.lock() = (status, body.to_string());
    }
}

async fn serve() -> (String, Page) {
    let page = Page(Arc::new(Mutex::new((StatusCode::OK, String::new()))));
    let shown = page.clone();
    let answer = move |headers: HeaderMap| {
        // The server requires the header that pod-sync was configured to send.
        let allowed = headers.get("x-key").is_some_and(|v| v == "open sesame");
        let answer = if allowed { shown.0.lock().clone() } else { (StatusCode::FORBIDDEN, String::new()) };
        async move { answer }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/pods", listener.local_addr().unwrap());
    let router = Router::new().route("/pods", axum::routing::get(answer));
    tokio::spawn(async move { axum::serve(listener, router).await });
    (url, page)
}

async fn wait_problem(node: &Node, url: &str, wanted: &str) {
    until(&format!("a problem of {url} with {wanted:?}"), LONG, async || {
        let (_, problems) = node.list().await.map_err(|e| e.to_string())?;
        let found =
            problems.iter().any(|p| p.source == "http" && p.origin == url && p.message.contains(wanted));
        if found { Ok(()) } else { Err(format!("{problems:?}")) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_a_url_start_change_survive_its_failures_and_are_removed() {
    let (url, page) = serve().await;
    let extra = [
        "--manifest-url",
        &url,
        "--manifest-url-header",
        "X-Key: open sesame",
        "--http-check-frequency",
        "200ms",
    ];
    let extra = extra.map(|a| ("pod-sync", a.to_owned())).to_vec();
    let pod = |command: &str| {
        pods::script("remote", &format!("trap 'exit 0' TERM; echo {command}; sleep 100000 & wait"))
    };
    page.set(StatusCode::OK, pod("first"));
    let node = Node::start(Options { extra, ..Options::standalone("url") }).await;
    let first = node.wait_ready("remote").await;
    assert_eq!(first.view.source, "http");

    // An invalid page and a failed request are reported and change no pod.
    let before = node.steady(&["remote"]).await;
    let recorder = node.record().await;
    page.set(
        StatusCode::OK,
        r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "remote"}, "spec": {}}"#,
    );
    wait_problem(&node, &url, "").await;
    page.set(StatusCode::INTERNAL_SERVER_ERROR, "");
    wait_problem(&node, &url, "500").await;
    page.set(StatusCode::OK, pod("first"));
    until("no problems", LONG, async || {
        let (_, problems) = node.list().await.map_err(|e| e.to_string())?;
        if problems.is_empty() { Ok(()) } else { Err(format!("{problems:?}")) }
    })
    .await;
    recorder.assert_steady("while the URL failed", &before);

    // Another pod of the same name replaces the pod; a list may have several pods.
    let list =
        json!({"apiVersion": "v1", "kind": "PodList", "items": [pod("second"), pods::sleeper("other")]});
    page.set(StatusCode::OK, list);
    let second = node.wait_pod("remote", "replaced", LONG, |p| p.uid() != first.uid() && p.is_ready()).await;
    node.wait_gone(first.uid()).await;
    let other = node.wait_ready("other").await;

    page.set(StatusCode::OK, json!({"apiVersion": "v1", "kind": "PodList", "items": [pod("second")]}));
    node.wait_gone(other.uid()).await;
    assert_eq!(node.pod("remote").await.unwrap().container("main"), second.container("main"));
    page.set(StatusCode::OK, json!({"apiVersion": "v1", "kind": "PodList", "items": []}));
    node.wait_gone(second.uid()).await;
    node.down().await;
}
