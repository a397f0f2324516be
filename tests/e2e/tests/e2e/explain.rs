//! `quintctl explain` for waiting pods on a real runtime.

use nix::sys::stat::Mode;
use quintlet_e2e::registry::Registry;
use quintlet_e2e::{LONG, Node, Options, pods, until};
use quintlet_kit::task;
use serde_json::{Value, json};

async fn explain(node: &Node, pod: &str, more: &[&str]) -> Result<String, String> {
    let output = node.quintctl(&[&["explain", pod], more].concat()).output().await.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

/// Waits until both output forms show that the pod waits for this reason, and returns the description.
async fn waits(node: &Node, pod: &str, reason: &str) -> Value {
    let explanation = until(&format!("{pod}: {reason}"), LONG, async || {
        let explanation = explain(node, pod, &["-o", "json"]).await?;
        let explanation: Value = serde_json::from_str(&explanation).map_err(|e| e.to_string())?;
        let waiting = explanation["pod"]["waiting"].clone();
        if waiting["reason"] == reason { Ok(waiting) } else { Err(explanation.to_string()) }
    })
    .await;
    until(&format!("{pod}: {reason} on the screen"), LONG, async || {
        let screen = explain(node, pod, &[]).await?;
        let line = screen.lines().find(|l| l.trim_start().starts_with("waits for")).unwrap_or_default();
        if line.contains(reason) { Ok(()) } else { Err(screen) }
    })
    .await;
    explanation
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_wait_of_a_real_pod_is_reported_with_reason_container_and_cause() {
    let registry = Registry::start().await;
    let node = Node::start(Options { sync_frequency: "5s", ..Options::with_api("explain") }).await;
    let api = node.api();
    let dir = node.scratch();
    nix::unistd::mkfifo(&dir.join("go"), Mode::S_IRWXU).unwrap();

    let mut nowhere = pods::sleeper("nowhere");
    let missing = registry.reference("missing:1");
    nowhere["spec"]["containers"][0]["image"] = json!(missing);
    let mut config = pods::sleeper("config");
    config["spec"]["containers"][0]["envFrom"] = json!([{"secretRef": {"name": "absent"}}]);
    let mut volume = pods::sleeper("volume");
    volume["spec"]["volumes"] = json!([{"name": "keys", "secret": {"secretName": "absent"}}]);
    volume["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "keys", "mountPath": "/keys"}]);
    let mut unready = pods::sleeper("unready");
    unready["spec"]["containers"][0]["readinessProbe"] =
        json!({"exec": {"command": ["false"]}, "periodSeconds": 1, "timeoutSeconds": 5});
    let mut stopping = pods::sleeper("stopping");
    stopping["spec"]["terminationGracePeriodSeconds"] = json!(300);
    let wait = json!(["sh", "-c", "read line < /v/go"]);
    stopping["spec"]["containers"][0]["lifecycle"] = json!({"preStop": {"exec": {"command": wait}}});
    let stopping = pods::with_dir(stopping, &dir, "/v");
    for pod in [nowhere, config, volume, unready, stopping, pods::script("crasher", "exit 3")] {
        api.create_pod(pods::bound(pod));
    }

    for (pod, reason, container, text) in [
        ("nowhere", "ImagePullBackOff", "main", missing.as_str()),
        ("crasher", "CrashLoopBackOff", "main", "back-off"),
        ("config", "CreateContainerConfigError", "main", r#"secret "absent" not found"#),
        ("volume", "VolumesNotMounted", "", "keys"),
        ("unready", "ReadinessProbe", "main", ""),
    ] {
        let explanation = waits(&node, pod, reason).await;
        assert_eq!(explanation["container"], container, "{pod}: {explanation:#}");
        assert!(explanation["message"].as_str().is_some_and(|m| m.contains(text)), "{pod}: {explanation:#}");
        if reason.ends_with("BackOff") {
            assert!(explanation["until"].is_string(), "{pod}: {explanation:#}");
        }
    }
    let screen = explain(&node, "volume", &[]).await.unwrap();
    assert!(screen.contains(r#"secret "absent" not found"#), "{screen}");

    // Once the missing object exists, the wait ends.
    let secret = json!({"metadata": {"name": "absent"}, "data": {"token": "c2VjcmV0"}});
    api.create("secrets", "default", secret).unwrap();
    for pod in ["config", "volume"] {
        node.wait_ready(pod).await;
        let explanation: Value =
            serde_json::from_str(&explain(&node, pod, &["-o", "json"]).await.unwrap()).unwrap();
        assert!(explanation["pod"]["waiting"].is_null(), "{explanation:#}");
    }

    let uid = node.wait_ready("stopping").await.uid().to_owned();
    api.delete("pods", "default", "stopping", None).unwrap();
    let explanation = waits(&node, "stopping", "PreStopHook").await;
    assert_eq!(explanation["container"], "main", "{explanation:#}");
    let go = dir.join("go");
    task::blocking(move || std::fs::write(go, "go\n")).await.unwrap();
    node.wait_gone(&uid).await;
    let gone = explain(&node, "stopping", &[]).await.unwrap_err();
    assert!(gone.contains("no pod \"stopping\""), "{gone}");
    node.down().await;
}
