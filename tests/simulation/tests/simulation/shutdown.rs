//! Shutdown of the machine.

use std::time::Duration;

use quintlet_cri_api::v1::StopContainerRequest;
use quintlet_simulation::{LONG, NODE, Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{Method, Rule};
use quintlet_testkit::logind::FakeLogind;
use quintlet_testkit::wait::until;
use serde_json::{Value, json};

fn with_priority(name: &str, priority: i64) -> Value {
    let mut pod = pods::single(name);
    pod["spec"]["priority"] = json!(priority);
    pod
}

// Returns status and message of the Node's condition Ready.
fn ready(sim: &Sim) -> (String, String) {
    let node = sim.api.get("nodes", "", NODE).unwrap_or_default();
    let all = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let ready = all.into_iter().find(|c| c["type"] == "Ready").unwrap_or_default();
    let text = |field: &str| ready[field].as_str().unwrap_or_default().to_owned();
    (text("status"), text("message"))
}

async fn wait_ready(sim: &Sim, status: &str, message: &str) {
    until("Ready of the node", LONG, async || {
        let now = ready(sim);
        if now.0 == status && now.1.contains(message) { Ok(()) } else { Err(now) }
    })
    .await;
}

async fn wait_inhibited(logind: &FakeLogind, taken: usize, held: bool) {
    until(&format!("inhibitor {taken} is held: {held}"), LONG, async || {
        let now = (logind.inhibitors_taken(), logind.is_inhibited());
        if now == (taken, held) { Ok(()) } else { Err(now) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_waits_until_pods_have_ended_by_their_priority() {
    let mut sim = Sim::prepare(Options::default()).await;
    let dir = sim.root_dir().with_file_name("logind");
    let drop_ins = dir.join("logind.conf.d");
    let mut logind = FakeLogind::start(&dir, &drop_ins, Duration::from_secs(5)).await;
    sim.set_pod_sync_args(&[
        &format!("--system-bus={}", logind.address()),
        &format!("--logind-drop-ins={}", drop_ins.display()),
        "--shutdown-grace-period=30s",
        "--shutdown-grace-period-critical-pods=10s",
    ]);
    for service in Service::ALL {
        sim.up(service);
    }
    wait_inhibited(&logind, 1, true).await;
    let text = std::fs::read_to_string(drop_ins.join("99-kubelet.conf")).unwrap();
    assert!(text.ends_with("[Login]\nInhibitDelayMaxSec=30\n"), "{text}");

    let _uid = sim.create(pods::single("plain"));
    let _uid = sim.create(with_priority("critical", 2_000_000_000));
    sim.wait_ready("plain").await;
    sim.wait_ready("critical").await;
    wait_ready(&sim, "True", "").await;
    let plain = sim.runtime.newest(sim.pod("plain").uid(), "c-plain").unwrap().id().to_owned();
    let critical = sim.runtime.newest(sim.pod("critical").uid(), "c-critical").unwrap().id().to_owned();
    let held = sim.runtime.script(Rule::on(Method::StopContainer).about(&plain).hang());

    logind.prepare_for_shutdown(true).await;
    sim.wait_calls(Method::StopContainer, &plain, 1).await;
    wait_ready(&sim, "False", "node is shutting down").await;
    let _uid = sim.create(pods::single("late"));
    sim.wait_pod("late", "is rejected", |p| {
        p.phase() == "Failed" && p.text("/status/reason") == "NodeShutdown"
    })
    .await;
    assert!(logind.is_inhibited(), "pods still run");
    assert_eq!(sim.calls_about(Method::StopContainer, &critical), 0, "critical pods come last");
    sim.runtime.unscript(held);
    for (name, id, group) in [("plain", &plain, 20), ("critical", &critical, 10)] {
        let seen = sim.wait_pod(name, "terminated", |p| p.phase() == "Failed").await;
        let message = "Pod was terminated in response to imminent node shutdown.";
        assert_eq!((seen.text("/status/reason"), seen.text("/status/message")), ("Terminated", message));
        assert_eq!(seen.condition("DisruptionTarget").0, "True");
        let stops = sim.runtime.calls_of(Method::StopContainer);
        let stop = stops.iter().find(|c| c.subjects.contains(id)).unwrap();
        let timeout = stop.request::<StopContainerRequest>().timeout;
        assert!(timeout <= group && timeout > group - 5, "{name}: {timeout}");
    }
    wait_inhibited(&logind, 1, false).await;
    let kept = std::fs::read(sim.root_dir().join("graceful_node_shutdown_state")).unwrap();
    let kept: Value = serde_json::from_slice(&kept).unwrap();
    let (start, end) = (kept["startTime"].as_str().unwrap(), kept["endTime"].as_str().unwrap());
    assert!("2000" < start && start < end, "{kept}");
    let events = format!("{:?}", sim.api.list("events"));
    assert!(events.contains("Shutdown manager detected shutdown event"), "{events}");

    logind.prepare_for_shutdown(false).await;
    wait_inhibited(&logind, 2, true).await;
    wait_ready(&sim, "True", "").await;
    let _uid = sim.create(pods::single("after"));
    sim.wait_ready("after").await;
    logind.restart().await;
    wait_inhibited(&logind, 3, true).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_sync_started_during_a_node_shutdown_detects_it() {
    let mut sim = Sim::prepare(Options::default()).await;
    let dir = sim.root_dir().with_file_name("logind");
    let drop_ins = dir.join("logind.conf.d");
    let logind = FakeLogind::start(&dir, &drop_ins, Duration::from_secs(60)).await;
    sim.set_pod_sync_args(&[
        &format!("--system-bus={}", logind.address()),
        &format!("--logind-drop-ins={}", drop_ins.display()),
        "--shutdown-grace-period=30s",
    ]);
    for service in Service::ALL {
        sim.up(service);
    }
    wait_inhibited(&logind, 1, true).await;
    let uid = sim.create(pods::single("runs"));
    sim.wait_ready("runs").await;
    let id = sim.runtime.newest(&uid, "c-runs").unwrap().id().to_owned();
    sim.kill(Service::PodSync).await;
    // The signal has no receiver.
    logind.prepare_for_shutdown(true).await;
    sim.up(Service::PodSync);
    sim.wait_calls(Method::StopContainer, &id, 1).await;
    wait_ready(&sim, "False", "node is shutting down").await;
    let _uid = sim.create(pods::single("late"));
    sim.wait_pod("late", "is rejected", |p| p.text("/status/reason") == "NodeShutdown").await;
    logind.prepare_for_shutdown(false).await;
    wait_ready(&sim, "True", "").await;
    let _uid = sim.create(pods::single("after"));
    sim.wait_ready("after").await;
    sim.finish().await;
}
