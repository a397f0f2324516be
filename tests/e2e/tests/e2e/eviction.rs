//! Evictions on a real runtime: a full disk, a volume above its limit.

use quintlet_e2e::{LONG, NODE, Node, Options, Seen, pods, until};
use serde_json::{Value, json};

/// A pod that writes a file of `mib` MiB into its volume, then waits.
fn writer(name: &str, mib: u32, volume: &Value) -> Value {
    let script =
        format!("dd if=/dev/zero of=/v/file bs=1M count={mib}; trap 'exit 0' TERM; sleep 100000 & wait");
    let mut pod = pods::script(name, &script);
    pod["spec"]["volumes"] = json!([{"name": "v", "emptyDir": volume}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    pods::bound(pod)
}

fn condition(object: &Value, kind: &str) -> Value {
    let all = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|c| c["type"] == kind).unwrap_or_default()
}

fn is_evicted(pod: &Value) -> bool {
    pod["status"]["phase"] == "Failed" && pod["status"]["reason"] == "Evicted"
}

async fn ready(node: &Node, name: &str) -> Seen {
    let is_ready = |p: &Value| Seen::from_api(p.clone()).is_ready();
    Seen::from_api(node.api().wait_for("pods", "default", name, LONG, is_ready).await)
}

/// Waits for the event of an eviction, and returns it.
async fn evicted_event(node: &Node, pod: &str) -> Value {
    until("the event of the eviction", LONG, async || {
        let events = node.api().list("events");
        let is_it = |e: &&Value| e["reason"] == "Evicted" && e["involvedObject"]["name"] == pod;
        events.iter().find(is_it).cloned().ok_or(events.len())
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_costs_the_pod_that_filled_it_and_a_volume_limit_its_own_pod() {
    let mut options = Options { root_disk_mib: Some(256), ..Options::with_api("eviction") };
    options.extra = [
        "--eviction-hard=nodefs.available<100Mi",
        "--eviction-pressure-transition-period=5s",
        "--volume-stats-agg-period=2s",
    ]
    .map(|arg| ("pod-sync", arg.to_owned()))
    .to_vec();
    let node = Node::start(options).await;
    let api = node.api();

    api.create_pod(writer("neighbour", 1, &json!({})));
    api.create_pod(writer("limited", 8, &json!({"sizeLimit": "4Mi"})));
    let neighbour = ready(&node, "neighbour").await;
    let limited = api.wait_for("pods", "default", "limited", LONG, is_evicted).await;
    assert_eq!(limited["status"]["message"], "Usage of EmptyDir volume \"v\" exceeds the limit \"4Mi\". ");
    assert_eq!(condition(&limited, "DisruptionTarget"), Value::Null);
    assert_eq!(condition(&api.get("nodes", "", NODE).unwrap(), "DiskPressure")["status"], "False");

    api.create_pod(writer("filler", 160, &json!({})));
    let filler = api.wait_for("pods", "default", "filler", LONG, is_evicted).await;
    let message = filler["status"]["message"].as_str().unwrap();
    assert!(
        message.starts_with(
            "The node was low on resource: ephemeral-storage. Threshold quantity: 100Mi, available: "
        ),
        "{message}"
    );
    let disruption = condition(&filler, "DisruptionTarget");
    assert_eq!(
        (&disruption["status"], &disruption["reason"]),
        (&json!("True"), &json!("TerminationByKubelet"))
    );
    assert_eq!(disruption["message"], message);
    let event = evicted_event(&node, "filler").await;
    assert_eq!((&event["type"], event["message"].as_str().unwrap()), (&json!("Warning"), message));
    assert_eq!(event["metadata"]["annotations"]["starved_resource"], "ephemeral-storage");

    let is = |status: &'static str| move |n: &Value| condition(n, "DiskPressure")["status"] == status;
    api.wait_for("nodes", "", NODE, LONG, is("True")).await;
    api.create_pod(writer("late", 1, &json!({})));
    let late = api.wait_for("pods", "default", "late", LONG, is_evicted).await;
    assert_eq!(late["status"]["message"], "Pod was rejected: The node had condition: [DiskPressure]. ");
    api.wait_for("nodes", "", NODE, LONG, is("False")).await;
    api.create_pod(writer("after", 1, &json!({})));
    ready(&node, "after").await;
    let now = Seen::from_api(api.get("pods", "default", "neighbour").unwrap());
    assert_eq!(now.container("main"), neighbour.container("main"), "the neighbour goes on");
    assert_eq!(node.counter("pod-sync", "kubelet_evictions{eviction_signal=\"nodefs.available\"}").await, 1);
    assert_eq!(node.counter("pod-sync", "kubelet_evictions{eviction_signal=\"emptydirfs.limit\"}").await, 1);
    node.down().await;
}
