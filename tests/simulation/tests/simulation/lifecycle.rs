//! Start order, restart policies, probes and deadlines.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use quintlet_cri_api::v1;
use quintlet_simulation::{Options, Sim, pods};
use quintlet_testkit::fake_runtime::{Behaviour, ExecReply, Method, StopReply};
use serde_json::{Value, json};

fn exits(code: i32) -> Behaviour {
    Behaviour { exit: Some((Duration::from_millis(50), code)), ..Behaviour::default() }
}

/// Returns the containers for which a method was called, in order.
fn order(sim: &Sim, method: Method, names: &[(String, String)]) -> Vec<String> {
    let calls = sim.runtime.calls_of(method);
    let name = |id: &str| names.iter().find(|(i, _)| i == id).map(|(_, name)| name.clone());
    calls.iter().filter_map(|c| c.subjects.iter().find_map(|s| name(s))).collect()
}

fn names(sim: &Sim) -> Vec<(String, String)> {
    sim.runtime.containers().iter().map(|c| (c.id().to_owned(), c.name().to_owned())).collect()
}

fn sidecar(name: &str) -> Value {
    let mut c = pods::container(name);
    c["restartPolicy"] = json!("Always");
    c
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn init_containers_and_sidecars_start_in_order_and_sidecars_end_last_in_reverse() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.behave("init-a", exits(0));
    sim.runtime.behave("init-b", exits(0));
    let slow = StopReply::Exits { after: Duration::from_millis(700), code: 0 };
    sim.runtime.behave("main", Behaviour { exit: None, stop: slow });
    let mut pod = pods::pod("ordered", &[pods::container("main")]);
    pod["spec"]["initContainers"] =
        json!([pods::container("init-a"), sidecar("side-1"), pods::container("init-b"), sidecar("side-2")]);
    let _uid = sim.create(pod);
    sim.wait_ready("ordered").await;
    let all = names(&sim);
    assert_eq!(order(&sim, Method::StartContainer, &all), ["init-a", "side-1", "init-b", "side-2", "main"]);
    sim.delete("ordered", None);
    sim.wait_gone("ordered").await;
    let mut stops = order(&sim, Method::StopContainer, &all);
    stops.dedup();
    assert_eq!(stops, ["main", "side-2", "side-1"]);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_operations_of_a_pods_life_are_counted_under_the_names_of_the_kubelet() {
    let sim = Sim::start(Options::default()).await;
    let mut pod = pods::single("counted");
    pod["spec"]["terminationGracePeriodSeconds"] = json!(600);
    pod["spec"]["containers"][0]["imagePullPolicy"] = json!("Always");
    pod["spec"]["containers"][0]["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 500}}});
    let uid = sim.create(pod);
    sim.wait_ready("counted").await;
    let id = sim.runtime.newest(&uid, "c-counted").unwrap().id().to_owned();
    sim.delete("counted", None);
    sim.wait_event("counted", "Killing", |e| e.reason == "Killing").await;
    assert!(sim.runtime.exit(&id, 0));
    sim.wait_gone("counted").await;
    sim.wait_nothing_left(&uid).await;
    let text = quintlet_telemetry::metrics::text();
    for line in [
        "kubelet_containers_per_pod_count_count 1",
        "kubelet_pod_worker_start_duration_seconds_count 1",
        "kubelet_pod_worker_duration_seconds_count{operation_type=\"create\"} 1",
        "kubelet_pod_worker_duration_seconds_count{operation_type=\"terminated\"} 1",
        "kubelet_cgroup_manager_duration_seconds_count{operation_type=\"create\"} 1",
        "kubelet_cgroup_manager_duration_seconds_count{operation_type=\"destroy\"} 1",
        "kubelet_sleep_action_terminated_early_total 1",
        "kubelet_managed_ephemeral_containers 0",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\n{text}");
    }
    let pulls = "kubelet_image_pull_duration_seconds_count{image_size_in_bytes=";
    assert!(text.lines().any(|l| l.starts_with(pulls) && l.ends_with(" 1")), "{text}");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_phase_of_a_pod_follows_its_restart_policy() {
    let sim = Sim::start(Options::default()).await;
    for (name, policy, code) in [
        ("never-0", "Never", 0),
        ("never-1", "Never", 1),
        ("onf-0", "OnFailure", 0),
        ("onf-1", "OnFailure", 1),
    ] {
        sim.runtime.behave(&format!("c-{name}"), exits(code));
        let mut pod = pods::single(name);
        pod["spec"]["restartPolicy"] = json!(policy);
        let _uid = sim.create(pod);
    }
    sim.runtime.behave("bad-init", exits(1));
    let mut pod = pods::single("init");
    pod["spec"]["restartPolicy"] = json!("Never");
    pod["spec"]["initContainers"] = json!([pods::container("bad-init")]);
    let _uid = sim.create(pod);
    sim.wait_pod("never-0", "Succeeded", |p| p.phase() == "Succeeded").await;
    sim.wait_pod("never-1", "Failed", |p| p.phase() == "Failed").await;
    sim.wait_pod("onf-0", "Succeeded", |p| p.phase() == "Succeeded").await;
    sim.wait_pod("init", "Failed", |p| p.phase() == "Failed" && p.container("c-init").kind != "running")
        .await;
    sim.wait_pod("onf-1", "restarted", |p| p.restarts() >= 1).await;
    sim.runtime.behave("c-onf-1", exits(0));
    sim.wait_pod("onf-1", "Succeeded", |p| p.phase() == "Succeeded").await;
    for (name, restarts) in [("never-0", 0), ("never-1", 0), ("onf-0", 0), ("init", 0)] {
        assert_eq!(sim.pod(name).restarts(), restarts, "{name}");
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_liveness_probe_restarts_with_the_probes_grace_period() {
    let sim = Sim::start(Options::default()).await;
    let healthy = Arc::new(AtomicBool::new(true));
    let answer = Arc::clone(&healthy);
    sim.runtime.on_exec(move |_, _| ExecReply {
        exit_code: i32::from(!answer.load(Ordering::Relaxed)),
        stdout: b"not well".to_vec(),
        ..ExecReply::default()
    });
    let mut pod = pods::single("live");
    pod["spec"]["containers"][0]["livenessProbe"] = json!({
        "exec": {"command": ["check"]}, "periodSeconds": 1, "failureThreshold": 1,
        "terminationGracePeriodSeconds": 7,
    });
    let uid = sim.create(pod);
    sim.wait_ready("live").await;
    let first = sim.runtime.newest(&uid, "c-live").unwrap().id().to_owned();
    healthy.store(false, Ordering::Relaxed);
    sim.wait_calls(Method::StopContainer, &first, 1).await;
    healthy.store(true, Ordering::Relaxed);
    let stop = sim.runtime.calls_of(Method::StopContainer).remove(0).request::<v1::StopContainerRequest>();
    assert!((1..=7).contains(&stop.timeout), "{stop:?}");
    assert!(stop.timeout >= 6, "the probe's grace, not less: {stop:?}");
    sim.wait_event("live", "Unhealthy", |e| e.reason == "Unhealthy" && e.message.contains("not well")).await;
    sim.wait_event("live", "Killing", |e| {
        e.reason == "Killing" && e.message.contains("failed liveness probe")
    })
    .await;
    sim.wait_pod("live", "restarted", |p| p.is_ready() && p.restarts() == 1).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_probe_ends_a_pod_that_is_not_restarted_with_the_probes_grace_period() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.on_exec(|_, _| ExecReply { exit_code: 1, ..ExecReply::default() });
    for kind in ["livenessProbe", "startupProbe"] {
        let name = kind.to_lowercase();
        let mut pod = pods::single(&name);
        pod["spec"]["restartPolicy"] = json!("Never");
        pod["spec"]["terminationGracePeriodSeconds"] = json!(300);
        pod["spec"]["containers"][0][kind] = json!({
            "exec": {"command": ["check"]}, "periodSeconds": 1, "failureThreshold": 1,
            "terminationGracePeriodSeconds": 7,
        });
        let uid = sim.create(pod);
        sim.wait_pod(&name, "Failed", |p| p.phase() == "Failed").await;
        let id = sim.runtime.newest(&uid, &format!("c-{name}")).unwrap().id().to_owned();
        let stops = sim.runtime.calls_of(Method::StopContainer).into_iter();
        let mut stops = stops.map(|call| call.request::<v1::StopContainerRequest>());
        let stop = stops.find(|stop| stop.container_id == id).unwrap();
        assert!((6..=7).contains(&stop.timeout), "{kind}: {stop:?}");
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_past_its_deadline_is_failed_and_stopped() {
    let sim = Sim::start(Options::default()).await;
    let mut pod = pods::single("timed");
    pod["spec"]["activeDeadlineSeconds"] = json!(2);
    let uid = sim.create(pod);
    sim.wait_pod("timed", "DeadlineExceeded", |p| {
        p.phase() == "Failed" && p.text("/status/reason") == "DeadlineExceeded"
    })
    .await;
    sim.wait_runtime("stopped", |r| !r.containers().iter().any(|c| c.pod_uid() == uid && c.running())).await;
    sim.wait_event("timed", "DeadlineExceeded", |e| e.reason == "DeadlineExceeded").await;
    sim.finish().await;
}
