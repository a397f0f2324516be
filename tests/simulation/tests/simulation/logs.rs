//! Log lines of the services: none at WARN in a clean run, and one line a minute for each fault: at WARN if
//! the node fails, at INFO if the pod is at fault.

use std::time::Duration;

use quintlet_kit::messages::whole;
use quintlet_kit::socket;
use quintlet_proto::podsync::v1::ListEventsRequest;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_simulation::{Options, Sim, pods};
use quintlet_testkit::fake_runtime::{Behaviour, ExecReply, Method, Rule};
use serde_json::{Value, json};
use tonic::Code;

fn with(name: &str, edit: impl FnOnce(&mut Value)) -> Value {
    let mut pod = pods::single(name);
    edit(&mut pod["spec"]);
    pod
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clean_run_logs_nothing_at_warn_or_above() {
    let sim = Sim::start(Options::default()).await;
    sim.api.create("configmaps", "default", json!({"metadata": {"name": "c"}, "data": {"a": "b"}})).unwrap();
    let main = "c-l-all";
    let hooks = json!({"postStart": {"exec": {"command": ["x"]}}, "preStop": {"exec": {"command": ["x"]}}});
    let uid = sim.create(with("l-all", |spec| {
        spec["automountServiceAccountToken"] = json!(true);
        spec["volumes"] = json!([{"name": "c", "configMap": {"name": "c"}}, {"name": "e", "emptyDir": {}}]);
        spec["initContainers"] = json!([pods::container("l-init")]);
        spec["containers"][0]["volumeMounts"] = json!([{"name": "c", "mountPath": "/c"}]);
        spec["containers"][0]["lifecycle"] = hooks;
        spec["containers"][0]["readinessProbe"] = json!({"exec": {"command": ["x"]}, "periodSeconds": 3600});
    }));
    sim.runtime
        .behave("l-init", Behaviour { exit: Some((Duration::from_millis(50), 0)), ..Behaviour::default() });
    sim.runtime.behave(main, Behaviour::default());
    sim.manifest("l-static", &pods::manifest("l-static"));
    for name in ["l-all", "l-static-sim-node"] {
        sim.wait_ready(name).await;
    }
    sim.delete("l-all", None);
    sim.remove_manifest("l-static");
    sim.wait_nothing_left(&uid).await;
    sim.wait_gone("l-static-sim-node").await;
    assert_eq!(sim.log(), Vec::<Value>::new());
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standalone_node_without_cluster_dns_reports_it_for_pods_and_logs_nothing_at_warn() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_standalone();
    sim.set_pod_sync_args(&["--cluster-dns="]);
    sim.start_all();
    sim.manifest("alone", &pods::manifest("alone"));
    sim.wait_view("alone", "runs", |v| v.status == "Running").await;
    let mut client = PodSyncClient::new(socket::channel(sim.paths().podsync()));
    let events = whole(client.list_events(ListEventsRequest::default())).await.unwrap().into_inner().events;
    let is_reported = events.iter().any(|e| e.r#type == "Warning" && e.reason == "MissingClusterDNS");
    assert!(is_reported, "{events:?}");
    assert_eq!(sim.log(), Vec::<Value>::new());
    sim.finish().await;
}

/// A fault: its pod, and the level, the reason and a part of the error in its log line.
type Row = (&'static str, &'static str, &'static str, &'static str, Value);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_fault_is_one_line_a_minute_with_the_pod_and_the_cause() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.on_exec(|_, command| ExecReply {
        exit_code: i32::from(command.first().is_some_and(|c| c == "no")),
        ..ExecReply::default()
    });
    let script = |rule: Rule| {
        let _until_the_end = sim.runtime.script(rule);
    };
    script(Rule::on(Method::RunPodSandbox).about("l-sandbox").fail(Code::Unknown, "no room"));
    script(Rule::on(Method::PullImage).about("example.test/none:1").fail(Code::Unknown, "no such image"));
    script(Rule::on(Method::CreateContainer).about("c-l-create").fail(Code::Unknown, "no device"));
    let crash = Behaviour { exit: Some((Duration::from_millis(10), 1)), ..Behaviour::default() };
    sim.runtime.behave("c-l-crash", crash);
    let edit = |name: &str, field: &str, value: Value| with(name, |s| s["containers"][0][field] = value);
    let rows: Vec<Row> = vec![
        ("l-sandbox", "warn", "FailedCreatePodSandBox", "no room", pods::single("l-sandbox")),
        (
            "l-class",
            "warn",
            "FailedCreatePodSandBox",
            "not found",
            with("l-class", |s| s["runtimeClassName"] = json!("none")),
        ),
        ("l-pull", "info", "Failed", "no such image", edit("l-pull", "image", json!("example.test/none:1"))),
        ("l-create", "info", "Failed", "no device", pods::single("l-create")),
        (
            "l-config",
            "info",
            "Failed",
            "secret \"none\" not found",
            edit("l-config", "envFrom", json!([{"secretRef": {"name": "none"}}])),
        ),
        (
            "l-volume",
            "info",
            "FailedMount",
            "configmap \"none\" not found",
            with("l-volume", |s| {
                s["volumes"] = json!([{"name": "v", "configMap": {"name": "none"}}]);
                s["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
            }),
        ),
        ("l-crash", "info", "BackOff", "Back-off restarting failed container", pods::single("l-crash")),
        (
            "l-probe",
            "info",
            "Unhealthy",
            "Readiness probe failed",
            edit("l-probe", "readinessProbe", json!({"exec": {"command": ["no"]}, "periodSeconds": 1})),
        ),
    ];
    for (.., pod) in &rows {
        let _uid = sim.create(pod.clone());
    }
    // Faults of a termination.
    let mut ends = Vec::new();
    for (name, method, reason, times) in [
        // Stopping its sandbox stops the container.
        ("l-stop", Method::StopContainer, "FailedKillPod", 1),
        ("l-removal", Method::RemoveContainer, "RemovalFailing", 2),
    ] {
        let uid = sim.create(pods::single(name));
        sim.wait_ready(name).await;
        let id = sim.runtime.newest(&uid, &format!("c-{name}")).expect("it runs").id().to_owned();
        script(Rule::on(method).about(&id).fail(Code::Unknown, "not now"));
        sim.delete(name, Some(0));
        ends.push((name, reason, method, id, times));
    }

    // Each fault is repeated without another line.
    for (method, about) in [
        (Method::RunPodSandbox, "l-sandbox"),
        (Method::PullImage, "example.test/none:1"),
        (Method::CreateContainer, "c-l-create"),
        (Method::CreateContainer, "c-l-crash"),
    ] {
        sim.wait_calls(method, about, 2).await;
    }
    for (_, _, method, id, times) in &ends {
        sim.wait_calls(*method, id, *times).await;
    }
    // A Normal event has no log line, and other log lines have no reason.
    let log: Vec<Value> = sim.lines().into_iter().filter(|l| l["reason"].is_string()).collect();
    let all = rows.iter().map(|(name, level, reason, cause, _)| (*name, *level, *reason, *cause));
    let ends = ends.iter().map(|(name, reason, ..)| (*name, "warn", *reason, "not now"));
    for (name, level, reason, cause) in all.chain(ends) {
        let pod = format!("default/{name}");
        let lines: Vec<&Value> = log.iter().filter(|l| l["pod.name"] == pod.as_str()).collect();
        let at = |l: &Value| l["ts"].as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
        let first = lines.first().unwrap_or_else(|| panic!("no line about {name}: {log:#?}"));
        let minute = lines.iter().filter(|l| at(l).duration_since(at(first)).as_secs() < 59);
        assert_eq!(minute.count(), 1, "lines about {name}: {lines:#?}");
        assert_eq!((&first["reason"], &first["level"]), (&json!(reason), &json!(level)), "{first:#}");
        assert!(first["pod.uid"].is_string(), "{first:#}");
        assert!(first.to_string().replace("\\\"", "\"").contains(cause), "{cause}: {first:#}");
    }
    sim.finish().await;
}
