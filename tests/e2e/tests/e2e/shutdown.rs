//! A node shutdown that is executed or cancelled, with pods of a real runtime.

use std::path::Path;
use std::time::Duration;

use nix::sys::stat::Mode;
use quintlet_e2e::{LONG, NODE, Node, Options, Seen, pods, until};
use quintlet_kit::task;
use quintlet_testkit::logind::FakeLogind;
use serde_json::{Value, json};

/// Returns a pod that prints a line when it terminates. If `held`, it first waits for a line in its FIFO.
fn ends(name: &str, priority: i64, dir: &Path, held: bool) -> Value {
    let wait = if held { format!("read line < /v/{name}; ") } else { String::new() };
    let script = format!("trap '{wait}echo {name} >> /v/lines; exit 143' TERM; sleep 100000 & wait");
    if held {
        nix::unistd::mkfifo(&dir.join(name), Mode::S_IRWXU).unwrap();
    }
    let mut pod = pods::script(name, &script);
    pod["spec"]["priority"] = json!(priority);
    pod["spec"]["terminationGracePeriodSeconds"] = json!(300);
    pods::bound(pods::with_dir(pod, dir, "/v"))
}

/// Lets a held pod terminate. Returns once the pod has read its FIFO.
async fn let_go(dir: &Path, name: &str) {
    let fifo = dir.join(name);
    task::blocking(move || std::fs::write(fifo, "go\n")).await.unwrap();
}

async fn wait_ready(node: &Node, status: &str, message: &str) {
    node.api()
        .wait_for("nodes", "", NODE, LONG, |n| {
            let conditions = n["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let ready = conditions.into_iter().find(|c| c["type"] == "Ready").unwrap_or_default();
            ready["status"] == status && ready["message"].as_str().is_some_and(|m| m.contains(message))
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

/// Waits until pod-sync terminates a pod.
async fn wait_ending(node: &Node, name: &str) {
    node.wait_pod(name, "is being ended", LONG, |p| p.view.worker == "terminating").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_terminate_by_priority_before_a_shutdown_and_restart_if_it_is_cancelled() {
    let bus = tempfile::tempdir().unwrap();
    let drop_ins = bus.path().join("drop-ins");
    let logind = FakeLogind::start(bus.path(), &drop_ins, Duration::from_secs(600)).await;
    let extra = [
        format!("--system-bus={}", logind.address()),
        format!("--logind-drop-ins={}", drop_ins.display()),
        "--shutdown-grace-period-by-pod-priority=0=120,1000=120,2000000000=120".to_owned(),
    ];
    let extra = extra.map(|arg| ("pod-sync", arg)).to_vec();
    let node = Node::start(Options { extra, ..Options::with_api("shutdown") }).await;
    let api = node.api();
    let dir = node.scratch();
    wait_inhibited(&logind, 1, true).await;

    let order = [("plain", 0), ("high", 1000), ("critical", 2_000_001_000)];
    for (name, priority) in order {
        api.create_pod(ends(name, priority, &dir, name != "critical"));
    }
    for (name, _) in order {
        node.wait_ready(name).await;
    }
    wait_ready(&node, "True", "").await;
    let before = node.steady(&["high", "critical"]).await;

    logind.prepare_for_shutdown(true).await;
    wait_ready(&node, "False", "node is shutting down").await;
    api.create_pod(pods::bound(pods::sleeper("late")));
    let late = api.wait_for("pods", "default", "late", LONG, |p| p["status"]["phase"] == "Failed").await;
    assert_eq!(
        (&late["status"]["reason"], &late["status"]["message"]),
        (&json!("NodeShutdown"), &json!("Pod was rejected: Pod was rejected as the node is shutting down."))
    );
    // Each group is terminated once the previous one has ended.
    wait_ending(&node, "plain").await;
    assert_eq!(node.steady(&["high", "critical"]).await, before, "the first has not ended yet");
    let_go(&dir, "plain").await;
    wait_ending(&node, "high").await;
    let first = Seen::from_api(api.get("pods", "default", "critical").unwrap());
    assert!(first.is_ready(), "the second has not ended yet: {first}");
    assert!(logind.is_inhibited(), "pods still run");
    let_go(&dir, "high").await;
    for (name, _) in order {
        let pod = api.wait_for("pods", "default", name, LONG, |p| p["status"]["phase"] == "Failed").await;
        let message = "Pod was terminated in response to imminent node shutdown.";
        let status = &pod["status"];
        assert_eq!(
            (&status["reason"], &status["message"]),
            (&json!("Terminated"), &json!(message)),
            "{pod:#}"
        );
        let conditions = status["conditions"].as_array().unwrap();
        let target = conditions.iter().find(|c| c["type"] == "DisruptionTarget").unwrap();
        assert_eq!((&target["status"], &target["reason"]), (&json!("True"), &json!("TerminationByKubelet")));
        assert_eq!(status["containerStatuses"][0]["state"]["terminated"]["exitCode"], 143, "{pod:#}");
    }
    assert_eq!(std::fs::read_to_string(dir.join("lines")).unwrap(), "plain\nhigh\ncritical\n");
    wait_inhibited(&logind, 1, false).await;

    // The next shutdown is cancelled while its first group terminates.
    logind.prepare_for_shutdown(false).await;
    wait_inhibited(&logind, 2, true).await;
    wait_ready(&node, "True", "").await;
    for (name, priority) in [("first", 0), ("second", 1000)] {
        api.create_pod(ends(name, priority, &dir, name == "first"));
        node.wait_ready(name).await;
    }
    let before = node.steady(&["second"]).await;
    logind.prepare_for_shutdown(true).await;
    wait_ending(&node, "first").await;
    logind.prepare_for_shutdown(false).await;
    wait_inhibited(&logind, 3, true).await;
    wait_ready(&node, "True", "").await;
    let_go(&dir, "first").await;
    api.wait_for("pods", "default", "first", LONG, |p| p["status"]["phase"] == "Failed").await;
    api.create_pod(pods::bound(pods::sleeper("after")));
    node.wait_ready("after").await;
    assert_eq!(node.steady(&["second"]).await, before, "its turn never came");
    node.down().await;
}
