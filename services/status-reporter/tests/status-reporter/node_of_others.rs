//! Other clients write the Node, too: its controller, users, other agents.

use std::time::Duration;

use quintlet_kit::clock::Clock;
use quintlet_testapi::TestApi;
use serde_json::{Value, json};
use status_reporter::run::NodeReportSettings;

use crate::common::{Running, TEST_TIMEOUT, ready};

/// Starts a node that is Ready, compared often and reported only after a change.
async fn ready_node(api: &TestApi) -> Running {
    let settings = NodeReportSettings {
        update_every: Duration::from_millis(100),
        report_every: Duration::from_secs(3600),
        ..NodeReportSettings::default()
    };
    let mut service = Running::start_with(Some(api), Clock::system(), true, settings).await;
    service.facts(&[]).await;
    api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).0 == "True").await;
    service
}

/// Sets Ready to Unknown, as node-lifecycle does for a node whose lease was not renewed.
fn call_unknown(api: &TestApi) {
    api.edit("nodes/status", "", "n1", |n| {
        for condition in n["status"]["conditions"].as_array_mut().unwrap() {
            condition["status"] = json!("Unknown");
            condition["reason"] = json!("NodeStatusUnknown");
        }
    })
    .unwrap();
}

fn has_event(api: &TestApi, reason: &str) -> bool {
    api.list("events").iter().any(|e| e["reason"] == reason && e["involvedObject"]["kind"] == "Node")
}

async fn wait_event(api: &TestApi, reason: &str) {
    api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |_| has_event(api, reason)).await;
}

#[tokio::test]
async fn a_node_set_to_unknown_by_the_node_controller_becomes_ready_again() {
    let api = TestApi::start().await;
    let service = ready_node(&api).await;
    assert!(!has_event(&api, "NodeReady"));
    call_unknown(&api);
    let node = api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).0 == "True").await;
    for condition in node["status"]["conditions"].as_array().unwrap() {
        let want = if condition["type"] == "Ready" { "True" } else { "False" };
        assert_eq!(condition["status"], want, "{node:#}");
    }
    wait_event(&api, "NodeReady").await;
    service.stop().await;
}

#[tokio::test]
async fn a_node_set_to_unknown_while_the_api_server_was_unreachable_becomes_ready_again() {
    let api = TestApi::start().await;
    let service = ready_node(&api).await;
    api.faults().set_down(true);
    call_unknown(&api);
    api.faults().set_down(false);
    api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).0 == "True").await;
    service.stop().await;
}

#[tokio::test]
async fn changes_by_other_clients_are_reverted_in_owned_fields_and_kept_in_others() {
    let api = TestApi::start().await;
    let mut service = ready_node(&api).await;
    let taint = json!({"key": "maintenance", "effect": "NoExecute"});
    api.edit("nodes", "", "n1", |n| {
        n["spec"]["unschedulable"] = json!(true);
        n["spec"]["taints"] = json!([taint]);
        n["metadata"]["labels"]["kubernetes.io/os"] = json!("plan9");
        n["metadata"]["labels"]["team"] = json!("blue");
    })
    .unwrap();
    // Repeated reports have equal facts: only the Node differs.
    let labels = json!({"kubernetes.io/os": "linux"});
    service.facts_with(json!({"labels": labels}), Clock::system().boot(), &[]).await;
    let os = |n: &Value| n["metadata"]["labels"]["kubernetes.io/os"] == "linux";
    let node = api.wait_for("nodes", "", "n1", TEST_TIMEOUT, os).await;
    assert_eq!(node["metadata"]["labels"]["team"], "blue");
    assert_eq!(node["spec"]["taints"], json!([taint]));
    wait_event(&api, "NodeNotSchedulable").await;
    // Again, with facts that were reported before.
    api.edit("nodes", "", "n1", |n| {
        n["spec"]["unschedulable"] = json!(false);
        n["metadata"]["labels"]["kubernetes.io/os"] = json!("plan9");
    })
    .unwrap();
    api.edit("nodes/status", "", "n1", |n| n["status"]["addresses"] = json!([])).unwrap();
    let mended = |n: &Value| os(n) && n["status"]["addresses"][0]["address"] == "127.0.0.1";
    api.wait_for("nodes", "", "n1", TEST_TIMEOUT, mended).await;
    wait_event(&api, "NodeSchedulable").await;
    service.stop().await;
}
