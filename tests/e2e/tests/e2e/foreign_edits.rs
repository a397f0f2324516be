//! A client changes fields of a pod's status that the node agent owns, as `kubectl patch
//! --subresource=status` does.

use std::time::{Duration, Instant};

use quintlet_e2e::{LONG, Node, Options, pods};
use serde_json::{Value, json};

fn condition<'a>(pod: &'a Value, kind: &str) -> Option<&'a Value> {
    pod["status"]["conditions"].as_array()?.iter().find(|c| c["type"] == kind)
}

fn is(pod: &Value, kind: &str, status: &str) -> bool {
    condition(pod, kind).is_some_and(|c| c["status"] == status)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ready_and_phase_changed_by_another_client_are_restored_within_a_second() {
    put_right(Options::with_api("foreign")).await;
}

/// See `api.rs` for the environment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a real cluster in QUINTLET_KUBECONFIG, QUINTLET_NODE_KUBECONFIG and QUINTLET_NODE"]
async fn ready_and_phase_at_a_real_api_server_are_restored_within_a_second() {
    put_right(Options::with_real_api("foreign-real")).await;
}

async fn put_right(options: Options) {
    let node = Node::start(options).await;
    let api = node.cluster();
    api.create_pod(pods::script("edited", "trap 'exit 0' TERM; sleep 3600 & wait")).await;
    api.wait_for("pods", "default", "edited", LONG, |p| is(p, "Ready", "True")).await;
    type Change = fn(&mut Value);
    let not_ready: Change = |pod| {
        for c in pod["status"]["conditions"].as_array_mut().unwrap().iter_mut() {
            if c["type"] == "Ready" {
                c["status"] = json!("False");
            }
        }
    };
    let pending: Change = |pod| pod["status"]["phase"] = json!("Pending");
    for change in [not_ready, pending] {
        // The pause after a correction has passed.
        tokio::time::sleep(Duration::from_secs(3)).await;
        api.edit("pods", "default", "edited/status", change).await;
        let began = Instant::now();
        api.wait_for("pods", "default", "edited", LONG, |p| {
            is(p, "Ready", "True") && p["status"]["phase"] == "Running"
        })
        .await;
        assert!(began.elapsed() < Duration::from_secs(1), "put right after {:?}", began.elapsed());
    }
    let foreign =
        json!({"type": "example.com/mine", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"});
    api.edit("pods", "default", "edited/status", |pod| {
        pod["status"]["conditions"].as_array_mut().unwrap().push(foreign.clone());
    })
    .await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let pod = api.get("pods", "default", "edited").await.unwrap().unwrap();
    assert!(is(&pod, "example.com/mine", "True") && is(&pod, "Ready", "True"), "{pod:#}");
    node.down().await;
}
