//! An admission policy refuses what the node writes, and is removed.

use quintlet_e2e::{LONG, Node, Options, pods, until};
use quintlet_testapi::Failure;
use serde_json::Value;

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions.into_iter().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

/// Waits until `quintctl explain` of a pod has a text.
async fn wait_explained(node: &Node, pod: &str, text: &str) {
    until(&format!("{text:?} in the explanation of {pod}"), LONG, async || {
        let output = node.quintctl(&["explain", pod]).output().await.map_err(|e| e.to_string())?;
        let output = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.contains(text) { Ok(()) } else { Err(output) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_that_a_policy_refuses_are_explained_and_follow_its_removal() {
    let node = Node::start(Options::with_api("refusals")).await;
    let (cluster, faults) = (node.cluster(), node.api().faults());
    let denied = |code| Failure::Declined {
        code,
        message: "ValidatingAdmissionPolicy 'freeze' with binding 'all' denied request".to_owned(),
    };
    // Its end takes a moment, in which the policy is made.
    cluster.create_pod(pods::script("held", "trap 'sleep 2; exit 0' TERM; sleep 3600 & wait")).await;
    cluster.wait_for("pods", "default", "held", LONG, is_ready).await;
    cluster.delete("pods", "default", "held").await;
    // 422 is the answer of a policy, 400 that of some webhooks.
    faults.fail("delete pods default/held", usize::MAX, denied(400));
    faults.fail("patch pods/status default/hidden", usize::MAX, denied(422));
    cluster.create_pod(pods::script("hidden", "trap 'exit 0' TERM; sleep 3600 & wait")).await;
    for pod in ["hidden", "held"] {
        wait_explained(&node, pod, "'freeze'").await;
    }
    let metrics = node.metrics("status-reporter").await;
    for code in [400, 422] {
        let series = format!("quintlet_status_write_failures_total{{code=\"{code}\"}}");
        let counted = metrics.lines().any(|line| line.starts_with(&series) && !line.ends_with(" 0"));
        assert!(counted, "{series} counts: {metrics}");
    }
    let held = cluster.get("pods", "default", "held").await.unwrap();
    assert!(held.is_some(), "the deletion was refused");

    faults.clear();
    cluster.wait_for("pods", "default", "hidden", LONG, is_ready).await;
    cluster.wait_for("pods", "default", "held", LONG, Value::is_null).await;
    node.down().await;
}
