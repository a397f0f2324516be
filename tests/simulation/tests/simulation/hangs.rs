//! A runtime that does not respond, or lacks information.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use quintlet_simulation::{LONG, NODE, Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{ExecReply, Method, Rule};
use quintlet_testkit::wait::until;
use serde_json::json;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_hangs_for_one_pod_delays_no_other() {
    let sim = Sim::start(Options::default()).await;
    let probes = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&probes);
    sim.runtime.on_exec(move |_, _| {
        counted.fetch_add(1, Ordering::Relaxed);
        ExecReply::default()
    });
    let mut probed = pods::single("probed");
    probed["spec"]["containers"][0]["livenessProbe"] =
        json!({"exec": {"command": ["true"]}, "periodSeconds": 1});
    let _uid = sim.create(probed);
    let _uid = sim.create(pods::single("leaves"));
    sim.wait_ready("probed").await;
    sim.wait_ready("leaves").await;
    let hang = sim.runtime.script(Rule::on(Method::RunPodSandbox).about("stuck").hang());
    let stuck = sim.create(pods::single("stuck"));
    sim.wait_calls(Method::RunPodSandbox, "stuck", 1).await;
    let before = probes.load(Ordering::Relaxed);
    let _uid = sim.create(pods::single("other"));
    sim.wait_ready("other").await;
    sim.delete("leaves", None);
    sim.wait_gone("leaves").await;
    until("two more probes", LONG, async || {
        let now = probes.load(Ordering::Relaxed);
        if now >= before + 2 { Ok(()) } else { Err(now) }
    })
    .await;
    assert_eq!(sim.calls_about(Method::RunPodSandbox, "stuck"), 1, "a call that hangs is not made again");
    sim.runtime.unscript(hang);
    sim.wait_ready("stuck").await;
    sim.assert_started_once("stuck", &stuck);
    sim.finish().await;
}

/// Steps of a start on files and cgroups: those of the node, and one that a container writes.
const STARTS: [&str; 9] = [
    "pod directory made",
    "cgroup made",
    "cgroup limited",
    "volume directory made",
    "log directory made",
    "variable files read",
    "sub path bound",
    "hosts file written",
    "container's log directory made",
];
/// Steps of a removal.
const REMOVALS: [&str; 2] = ["cgroup removed", "logs removed"];

/// Returns a pod with a variable from a file that a container may write, and with a sub path of a volume.
fn with_files(name: &str) -> serde_json::Value {
    let mut pod = pods::single(name);
    pod["spec"]["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
    let container = &mut pod["spec"]["containers"][0];
    container["volumeMounts"] = json!([{"name": "v", "mountPath": "/v", "subPath": "sub"}]);
    let file = json!({"volumeName": "v", "path": "f", "key": "K", "optional": true});
    container["env"] = json!([{"name": "E", "valueFrom": {"fileKeyRef": file}}]);
    pod
}

/// Starts and removes a pod, while a step of another one hangs.
async fn come_and_go(sim: &Sim, name: &str, step: &str) {
    tokio::time::timeout(LONG, sim.cuts().hung())
        .await
        .unwrap_or_else(|_| panic!("{step}: it is not reached"));
    let _uid = sim.create(with_files(name));
    sim.wait_ready(name).await;
    sim.delete(name, Some(1));
    sim.wait_gone(name).await;
}

// pod-sync has one thread for its tasks here, so a step that hangs on it stops everything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_or_a_cgroup_that_hangs_for_one_pod_delays_no_other() {
    let sim = Sim::start(Options::default()).await;
    for (number, step) in STARTS.iter().enumerate() {
        let stuck = format!("stuck{number}");
        sim.cuts().hang_at(Some((step, &stuck)));
        let _uid = sim.create(with_files(&stuck));
        come_and_go(&sim, &format!("other{number}"), step).await;
        assert!(!sim.pod(&stuck).is_ready(), "{step}");
        sim.cuts().hang_at(None);
        sim.wait_ready(&stuck).await;
    }
    for (number, step) in REMOVALS.iter().enumerate() {
        let stuck = format!("stuck{number}");
        sim.cuts().hang_at(Some((step, &stuck)));
        sim.delete(&stuck, Some(1));
        come_and_go(&sim, &format!("last{number}"), step).await;
        sim.cuts().hang_at(None);
        sim.wait_gone(&stuck).await;
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_can_be_deleted_while_its_start_hangs() {
    let sim = Sim::start(Options::default()).await;
    let hang = sim.runtime.script(Rule::on(Method::RunPodSandbox).about("stuck").hang());
    let uid = sim.create(pods::single("stuck"));
    sim.wait_calls(Method::RunPodSandbox, "stuck", 1).await;
    sim.delete("stuck", Some(1));
    // If it were released before pod-sync has seen the deletion, the start would rightly continue.
    sim.wait_view("stuck", "Terminating", |v| v.status == "Terminating").await;
    assert!(sim.runtime.sandboxes().is_empty(), "the call still hangs");
    sim.runtime.unscript(hang);
    sim.wait_gone("stuck").await;
    sim.wait_runtime("nothing of the pod is left", |r| r.sandboxes().is_empty()).await;
    assert_eq!(sim.runtime.count(Method::CreateContainer), 0, "{uid}: nothing is started in a pod that ends");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_manifest_removed_while_its_start_hangs_is_terminating() {
    let sim = Sim::start(Options::default()).await;
    let name = format!("stuck-{NODE}");
    let hang = sim.runtime.script(Rule::on(Method::RunPodSandbox).about(&name).hang());
    sim.manifest("stuck", &pods::manifest("stuck"));
    sim.wait_view("stuck", "shown while its first call hangs", |v| v.ready == "0/1").await;
    sim.wait_calls(Method::RunPodSandbox, &name, 1).await;
    sim.remove_manifest("stuck");
    sim.wait_view("stuck", "Terminating", |v| v.status == "Terminating").await;
    assert!(sim.runtime.sandboxes().is_empty(), "the call still hangs");
    sim.runtime.unscript(hang);
    sim.wait_no_view("stuck").await;
    sim.wait_runtime("nothing of the pod is left", |r| r.sandboxes().is_empty()).await;
    assert_eq!(sim.runtime.count(Method::CreateContainer), 0, "nothing is started in a pod that ends");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_while_the_runtime_was_down_are_observed_afterwards() {
    let sim = Sim::start(Options::default()).await;
    let mut uids = Vec::new();
    for name in ["stays", "dies", "leaves"] {
        uids.push(sim.create(pods::single(name)));
    }
    for name in ["stays", "dies", "leaves"] {
        sim.wait_ready(name).await;
    }
    let stays = sim.pod("stays");
    sim.runtime.down();
    let dies = sim.runtime.newest(&uids[1], "c-dies").unwrap();
    assert!(sim.runtime.exit(dies.id(), 1));
    sim.delete("leaves", None);
    let _uid = sim.create(pods::single("comes"));
    sim.runtime.up().unwrap();
    sim.wait_gone("leaves").await;
    sim.wait_ready("comes").await;
    sim.wait_pod("dies", "running again", |p| p.is_ready() && p.container("c-dies").restarts == 1).await;
    let now = sim.pod("stays");
    assert_eq!(now.condition("Ready"), stays.condition("Ready"));
    assert_eq!(now.container("c-stays"), stays.container("c-stays"));
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_lost_or_duplicated_hints_lose_no_change() {
    let sim = Sim::start(Options::default()).await;
    let names = ["cut", "lost", "twice"];
    let mut uids = Vec::new();
    for name in names {
        uids.push(sim.create(pods::single(name)));
    }
    for name in names {
        sim.wait_ready(name).await;
    }
    let exit = |i: usize| {
        let newest = sim.runtime.newest(&uids[i], &format!("c-{}", names[i])).unwrap();
        assert!(sim.runtime.exit(newest.id(), 3));
    };
    sim.runtime.cut_event_streams();
    exit(0);
    sim.wait_pod("cut", "restarted", |p| p.is_ready() && p.container("c-cut").restarts == 1).await;
    sim.runtime.duplicate_events(true);
    exit(2);
    sim.wait_pod("twice", "restarted", |p| p.is_ready() && p.container("c-twice").restarts == 1).await;
    sim.runtime.duplicate_events(false);
    sim.runtime.drop_events(1000);
    exit(1);
    sim.wait_pod("lost", "restarted", |p| p.is_ready() && p.container("c-lost").restarts == 1).await;
    for name in names {
        assert_eq!(sim.pod(name).restarts(), 1, "{name}");
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_sync_waits_for_a_runtime_that_starts_late() {
    let sim = Sim::prepare(Options::default()).await;
    sim.runtime.down();
    for service in Service::ALL {
        sim.up(service);
    }
    let uid = sim.create(pods::single("early"));
    sim.wait_pod("early", "pending", |p| p.phase() == "Pending").await;
    sim.runtime.up().unwrap();
    sim.wait_ready("early").await;
    sim.assert_started_once("early", &uid);
    sim.finish().await;
}
