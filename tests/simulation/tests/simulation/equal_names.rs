//! A node whose name an agent on another machine has, or had.

use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use quintlet_kit::clock::Clock;
use quintlet_simulation::{LONG, NODE, Options, Service, Sim, pods};
use quintlet_testapi::Failure;
use quintlet_testkit::wait::until;
use serde_json::{Value, json};

const LEASES: &str = "kube-node-lease";
fn now() -> String {
    Clock::system().wall().strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string()
}

/// Returns a node whose Node and Lease were written by the agent of a machine, a moment ago.
async fn prepare(info: &Value) -> Sim {
    let sim = Sim::prepare(Options::default()).await;
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}});
    sim.api.create("nodes", "", node).unwrap();
    let status = json!({"nodeInfo": info, "addresses": [{"type": "InternalIP", "address": "10.0.0.5"}]});
    sim.api.edit("nodes/status", "", NODE, |node| node["status"] = status).unwrap();
    sim.api.create_namespace(LEASES);
    let spec = json!({"holderIdentity": NODE, "leaseDurationSeconds": 40, "renewTime": now()});
    let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": NODE, "namespace": LEASES}, "spec": spec});
    sim.api.create("leases", LEASES, lease).unwrap();
    let _uid = sim.create(pods::single("web"));
    sim
}

fn elsewhere() -> Value {
    json!({"machineID": "m", "systemUUID": "s", "bootID": "b", "kubeletVersion": "v1.36.2"})
}

/// Returns the IDs of the machine that runs the test.
fn here() -> Value {
    let read = |path: &str| std::fs::read_to_string(Path::new(path)).unwrap_or_default().trim().to_owned();
    json!({
        "machineID": read("/etc/machine-id"), "systemUUID": read("/sys/class/dmi/id/product_uuid"),
        "bootID": "that of an earlier boot", "kubeletVersion": "v1.36.2",
    })
}

fn renewed(sim: &Sim) -> Value {
    sim.api.get("leases", LEASES, NODE).unwrap()["spec"]["renewTime"].clone()
}

fn elapsed(began: Timestamp) -> Duration {
    Clock::system().wall().duration_since(began).unsigned_abs()
}

/// Returns the number of starts that waited for the Lease. Time would depend on the machine.
fn waits(sim: &Sim) -> usize {
    let text = "another machine had this node name, waiting for its lease to expire";
    sim.lines().iter().filter(|line| line["msg"] == text).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_name_another_machine_uses_is_refused_and_changes_nothing_of_the_other() {
    let sim = prepare(&elsewhere()).await;
    sim.disturb();
    let before = sim.api.get("nodes", "", NODE).unwrap();
    sim.start_all();
    let message = until("the refusal", LONG, async || {
        // The other agent renews its Lease every 10 s, or faster.
        let own = renewed(&sim);
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(renewed(&sim), own, "the Lease is renewed by its holder alone");
        sim.api.edit("leases", LEASES, NODE, |lease| lease["spec"]["renewTime"] = json!(now())).unwrap();
        let log = sim.log();
        let refusal = log.iter().find(|line| line["msg"] == "service failed").cloned();
        refusal.map(|line| line["error"].as_str().unwrap_or_default().to_owned()).ok_or(log)
    })
    .await;
    assert_eq!(
        message,
        "the node name sim-node is that of an agent that runs on another machine, version v1.36.2 at 10.0.0.5 (machine ID m, system \
         UUID s): stop it, or choose another --node-name"
    );
    assert_eq!(sim.api.get("nodes", "", NODE).unwrap(), before);
    assert!(sim.runtime.containers().is_empty(), "the pod is not started twice");
    assert!(sim.api.get("csinodes", "", NODE).is_none());
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_name_of_a_machine_that_is_gone_is_taken_over_once_its_lease_expires() {
    let sim = prepare(&elsewhere()).await;
    let began = Clock::system().wall();
    sim.start_all();
    sim.wait_ready("web").await;
    let waited = elapsed(began);
    assert!(waited >= Duration::from_secs(38), "{waited:?}");
    assert_eq!(waits(&sim), 1);
    until("the Node of this machine", LONG, async || {
        let node = sim.api.get("nodes", "", NODE).unwrap();
        if node["status"]["nodeInfo"]["machineID"] == here()["machineID"] { Ok(()) } else { Err(node) }
    })
    .await;
    // The name is that of this machine now.
    sim.restart(Service::Status).await;
    sim.restart(Service::PodSync).await;
    let _uid = sim.create(pods::single("next"));
    sim.wait_ready("next").await;
    assert_eq!(waits(&sim), 1);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reboot_or_a_kubelet_that_has_just_stopped_on_this_machine_delays_nothing() {
    let sim = prepare(&here()).await;
    sim.start_all();
    sim.wait_ready("web").await;
    assert_eq!(waits(&sim), 0);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_server_that_fails_to_read_the_lease_does_not_keep_the_node_from_starting() {
    let sim = prepare(&elsewhere()).await;
    sim.api.faults().fail("get leases", 3, Failure::Internal);
    sim.start_all();
    sim.wait_ready("web").await;
    assert_eq!(waits(&sim), 0);
    assert!(sim.log().iter().any(|line| line["msg"] == "node name not checked, starting"));
    sim.disturb();
    sim.finish().await;
}

// The heartbeat of this node must not look like that of another agent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_server_that_is_away_at_the_start_does_not_make_a_node_refuse_its_own_lease() {
    let sim = prepare(&elsewhere()).await;
    let expired = json!("2020-01-01T00:00:00.000000Z");
    sim.api.edit("leases", LEASES, NODE, |lease| lease["spec"]["renewTime"] = expired).unwrap();
    sim.api.faults().set_down(true);
    sim.start_all();
    tokio::time::sleep(Duration::from_secs(30)).await;
    sim.api.faults().set_down(false);
    sim.wait_ready("web").await;
    assert_eq!(waits(&sim), 0, "the renewal of this node is not read");
    sim.disturb();
    sim.finish().await;
}
