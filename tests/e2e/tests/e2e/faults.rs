//! Services that hang and a runtime that crashes: no pod changes, and all new work is done afterwards.

use std::time::Duration;

use quintlet_e2e::bins::SERVICES;
use quintlet_e2e::{LONG, Node, Options, pods};
use quintlet_test_runtime::Faults as _;
use serde_json::Value;
use tokio::time::Instant;

/// Duration of a hang.
const HANG: Duration = Duration::from_secs(5);

/// Time that a pod created during a fault may take after its end, in addition to twice that of an ordinary
/// pod: on a busy machine, the connections and the lists that precede its start are slow, too.
const CAUGHT_UP: Duration = Duration::from_secs(2);

const NAMES: [&str; 3] = ["web-0", "web-1", "plain"];

/// Asserts that a pod created during a fault is Ready soon after its end. `before` is the start time of a pod
/// before the faults. Other tests may have made the machine busy since then: a pod that takes longer is
/// compared with one that is created after it.
async fn assert_catches_up(node: &Node, what: &str, pod: &Value, ended: Instant, before: Duration) {
    let name = pod["metadata"]["name"].as_str().unwrap();
    node.wait_ready(name).await;
    let took = ended.elapsed();
    println!("{what}: {name} Ready {} ms after the end", took.as_millis());
    let mut limit = 2 * before + CAUGHT_UP;
    if took > limit {
        limit = limit.max(2 * ordinary(node, &format!("beside-{name}")).await + CAUGHT_UP);
    }
    assert!(
        took <= limit,
        "{what}: {name} became Ready only {took:?} after the end of the fault, not {limit:?}"
    );
}

/// Returns the time of a pod from its manifest to Ready without a fault.
async fn ordinary(node: &Node, name: &str) -> Duration {
    let began = Instant::now();
    node.pod_manifest(&pods::sleeper(name));
    node.wait_ready(name).await;
    println!("a pod without a fault: Ready after {} ms", began.elapsed().as_millis());
    began.elapsed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hangs_and_a_dead_runtime_change_no_pod() {
    let node = Node::start(Options::with_api("faults")).await;
    node.pod_manifest(&pods::probed("web-0"));
    for pod in [pods::probed("web-1"), pods::sleeper("plain")] {
        node.api().create_pod(pods::bound(pod));
    }
    for name in NAMES {
        node.wait_ready(name).await;
    }
    let ordinary = ordinary(&node, "ordinary").await;
    let before = node.steady(&NAMES).await;
    let recorder = node.record().await;

    for (i, name) in SERVICES.into_iter().enumerate() {
        let pod = pods::sleeper(&format!("during-{i}"));
        node.stop(name);
        node.pod_manifest(&pod);
        // The hang lasts this long.
        tokio::time::sleep(HANG).await;
        let ended = Instant::now();
        node.cont(name);
        let what = format!("{name} hung for {HANG:?}");
        assert_catches_up(&node, &what, &pod, ended, ordinary).await;
        node.wait_serving(name, LONG).await;
        assert_eq!(node.steady(&NAMES).await, before, "{what}");
        recorder.assert_steady(&what, &before);
        assert_eq!(node.service(name).process().starts, 1, "{name} did not survive");
    }
    node.assert_no_duplicates().await;

    let mut node = node;
    let pod = pods::sleeper("without-runtime");
    node.containerd.kill9().await;
    node.pod_manifest(&pod);
    tokio::time::sleep(HANG).await;
    node.containerd.launch().await.unwrap();
    let ended = Instant::now();
    assert_catches_up(&node, "containerd was dead", &pod, ended, ordinary).await;
    assert_eq!(node.steady(&NAMES).await, before, "containerd was dead");
    recorder.assert_steady("containerd was dead", &before);
    node.assert_no_duplicates().await;

    let pod = pods::sleeper("frozen-runtime");
    node.containerd.pause().await;
    node.pod_manifest(&pod);
    tokio::time::sleep(HANG).await;
    node.containerd.resume();
    let ended = Instant::now();
    assert_catches_up(&node, "containerd hung", &pod, ended, ordinary).await;
    assert_eq!(node.steady(&NAMES).await, before, "containerd hung");
    recorder.assert_steady("containerd hung", &before);
    node.assert_no_duplicates().await;

    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containerd_restarted_under_fifty_pods_changes_none_of_them() {
    let mut node = Node::start(Options::standalone("faults-fifty")).await;
    let names: Vec<String> = (0..50).map(|i| format!("many-{i}")).collect();
    for name in &names {
        node.pod_manifest(&pods::sleeper(name));
    }
    for name in &names {
        node.wait_ready(name).await;
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let before = node.steady(&names).await;
    let recorder = node.record().await;
    for restart in ["first", "second"] {
        node.containerd.kill9().await;
        node.containerd.launch().await.unwrap();
        // A pod created meanwhile is started by the restarted runtime, whose lists have all other pods, too.
        let name = format!("after-the-{restart}");
        node.pod_manifest(&pods::sleeper(&name));
        node.wait_ready(&name).await;
        assert_eq!(node.steady(&names).await, before, "{restart} restart");
        recorder.assert_steady(restart, &before);
    }
    assert_eq!(node.listed().await.sandboxes.len(), names.len() + 2);
    node.assert_no_duplicates().await;
    node.down().await;
}
