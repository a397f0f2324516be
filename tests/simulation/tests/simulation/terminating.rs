//! What the API server and the containers of a pod see while the pod terminates.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use quintlet_cri_api::v1;
use quintlet_simulation::{Options, Sim, pods};
use quintlet_testkit::fake_runtime::{Behaviour, ExecReply, Method, StopReply};
use serde_json::{Value, json};

fn with_pre_stop(name: &str, grace: u64, handler: &Value) -> Value {
    let mut pod = pods::single(name);
    pod["spec"]["terminationGracePeriodSeconds"] = json!(grace);
    pod["spec"]["containers"][0]["lifecycle"] = json!({"preStop": handler});
    pod
}

fn stops_after(seconds: u64) -> Behaviour {
    let stop = StopReply::Exits { after: Duration::from_secs(seconds), code: 0 };
    Behaviour { exit: None, stop }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pre_stop_sleep_ends_with_its_container() {
    let sim = Sim::start(Options::default()).await;
    let uid = sim.create(with_pre_stop("nap", 600, &json!({"sleep": {"seconds": 500}})));
    sim.wait_ready("nap").await;
    let id = sim.runtime.newest(&uid, "c-nap").unwrap().id().to_owned();
    sim.delete("nap", None);
    sim.wait_event("nap", "Killing", |e| e.reason == "Killing").await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(sim.calls_about(Method::StopContainer, &id), 0, "the sleep is not over");
    let ended = Instant::now();
    assert!(sim.runtime.exit(&id, 0));
    sim.wait_gone("nap").await;
    assert!(ended.elapsed() < Duration::from_secs(20), "{:?} after the end", ended.elapsed());
    assert_eq!(sim.warnings("nap"), []);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sleep_before_a_restart_ends_with_its_container() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.on_exec(|_, _| ExecReply { exit_code: 1, ..ExecReply::default() });
    let mut pod = with_pre_stop("again", 600, &json!({"sleep": {"seconds": 500}}));
    pod["spec"]["containers"][0]["livenessProbe"] =
        json!({"exec": {"command": ["check"]}, "periodSeconds": 1, "failureThreshold": 1});
    let uid = sim.create(pod);
    sim.wait_event("again", "Killing", |e| e.reason == "Killing").await;
    let id = sim.runtime.newest(&uid, "c-again").unwrap().id().to_owned();
    let ended = Instant::now();
    assert!(sim.runtime.exit(&id, 3));
    sim.wait_pod("again", "restarted", |p| p.restarts() == 1).await;
    assert!(ended.elapsed() < Duration::from_secs(30), "{:?} after the end", ended.elapsed());
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_has_ended_is_not_ready_while_others_of_its_pod_still_stop() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.behave("quick", stops_after(1));
    sim.runtime.behave("slow", stops_after(25));
    let containers = [pods::container("quick"), pods::container("slow")];
    let _uid = sim.create(pods::pod("pair", &containers));
    sim.wait_ready("pair").await;
    let deleted = Instant::now();
    sim.delete("pair", None);
    let seen = sim.wait_pod("pair", "quick has ended", |p| p.container("quick").kind == "terminated").await;
    assert!(deleted.elapsed() < Duration::from_secs(15), "{:?} after the deletion", deleted.elapsed());
    let (quick, slow) = (seen.container("quick"), seen.container("slow"));
    assert_eq!((quick.ready, quick.exit_code), (false, Some(0)), "{seen:?}");
    assert_eq!((slow.kind.as_str(), slow.ready), ("running", true), "{seen:?}");
    assert_eq!(seen.condition("Ready").0, "False", "{seen:?}");
    assert_eq!(seen.condition("ContainersReady").0, "False", "{seen:?}");
    sim.wait_gone("pair").await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_is_reported_while_containers_stop() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.behave("c-drain", stops_after(25));
    let is_ready = Arc::new(AtomicUsize::new(0));
    let answer = Arc::clone(&is_ready);
    sim.runtime.on_exec(move |_, _| ExecReply {
        exit_code: i32::try_from(answer.load(Ordering::Relaxed)).unwrap(),
        ..ExecReply::default()
    });
    let mut pod = pods::single("drain");
    pod["spec"]["containers"][0]["readinessProbe"] =
        json!({"exec": {"command": ["check"]}, "periodSeconds": 1, "failureThreshold": 1});
    let _uid = sim.create(pod);
    sim.wait_ready("drain").await;
    let deleted = Instant::now();
    sim.delete("drain", None);
    sim.wait_event("drain", "Killing", |e| e.reason == "Killing").await;
    is_ready.store(1, Ordering::Relaxed);
    let seen = sim.wait_pod("drain", "not ready", |p| !p.is_gone() && !p.is_ready()).await;
    assert!(deleted.elapsed() < Duration::from_secs(15), "{:?} after the deletion", deleted.elapsed());
    assert_eq!(seen.container("c-drain").kind, "running", "{seen:?}");
    sim.wait_gone("drain").await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn liveness_probes_of_sidecars_end_when_the_termination_begins() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.behave("main", stops_after(20));
    let mut sidecar = pods::container("side");
    sidecar["restartPolicy"] = json!("Always");
    let probe = |word: &str| json!({"exec": {"command": [word]}, "periodSeconds": 1});
    sidecar["livenessProbe"] = probe("alive");
    sidecar["readinessProbe"] = probe("ready");
    let mut pod = pods::pod("probed", &[pods::container("main")]);
    pod["spec"]["initContainers"] = json!([sidecar]);
    let _uid = sim.create(pod);
    sim.wait_ready("probed").await;
    let probes = |word: &str| {
        let calls = sim.runtime.calls_of(Method::ExecSync);
        calls.iter().filter(|c| c.request::<v1::ExecSyncRequest>().cmd == [word]).count()
    };
    sim.delete("probed", None);
    sim.wait_event("probed", "Killing", |e| e.reason == "Killing").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (alive, ready) = (probes("alive"), probes("ready"));
    assert!(alive > 0, "the liveness probe ran before");
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(probes("alive"), alive, "the liveness probe has ended");
    assert!(probes("ready") >= ready + 8, "{} readiness probes after {ready}", probes("ready"));
    sim.wait_gone("probed").await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_only_probe_of_a_pod_ends_when_the_termination_begins() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.behave("main", stops_after(20));
    let mut main = pods::container("main");
    main["livenessProbe"] = json!({"exec": {"command": ["alive"]}, "periodSeconds": 1});
    let _uid = sim.create(pods::pod("alone", &[main]));
    sim.wait_ready("alone").await;
    let probes = || {
        let calls = sim.runtime.calls_of(Method::ExecSync);
        calls.iter().filter(|c| c.request::<v1::ExecSyncRequest>().cmd == ["alive"]).count()
    };
    tokio::time::sleep(Duration::from_secs(3)).await;
    sim.delete("alone", None);
    sim.wait_event("alone", "Killing", |e| e.reason == "Killing").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let before = probes();
    assert!(before > 0, "the probe ran before");
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(probes(), before, "the probe has ended");
    sim.wait_gone("alone").await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_cannot_start_containers_says_why() {
    let sim = Sim::start(Options::default()).await;
    let mut pod = pods::single("why");
    pod["spec"]["volumes"] = json!([{"name": "v", "configMap": {"name": "missing"}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    let _uid = sim.create(pod);
    let is_false = |p: &quintlet_simulation::Seen| p.condition("PodReadyToStartContainers").0 == "False";
    let seen = sim.wait_pod("why", "PodReadyToStartContainers is False", is_false).await;
    let list = seen.0["status"]["conditions"].as_array().unwrap();
    let condition = list.iter().find(|c| c["type"] == "PodReadyToStartContainers").unwrap();
    assert_eq!(condition["reason"], "PodSandboxNotReady", "{condition}");
    assert_eq!(condition["message"], "no pod sandbox exists", "{condition}");
    let config_map = json!({"apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "missing", "namespace": "default"}, "data": {"a": "b"}});
    sim.api.create("configmaps", "default", config_map).unwrap();
    let seen = sim.wait_ready("why").await;
    let list = seen.0["status"]["conditions"].as_array().unwrap();
    let condition = list.iter().find(|c| c["type"] == "PodReadyToStartContainers").unwrap();
    assert_eq!((&condition["status"], condition.get("message")), (&json!("True"), None), "{condition}");
    sim.finish().await;
}
