//! A pod in each state of waiting, and what pod-sync says of it.

use std::time::Duration;

use quintlet_proto::podsync::v1::ExplainRequest;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_simulation::sim::LONG;
use quintlet_simulation::{Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{Behaviour, ExecReply, Method, Rule, StopReply};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};
use tonic::Code;

/// Reason of what a pod waits for, as `quintctl explain` shows it.
async fn reason(sim: &Sim, pod: &str) -> String {
    let mut client = PodSyncClient::new(quintlet_kit::socket::channel(sim.paths().podsync()));
    match client.explain(ExplainRequest { pod: format!("default/{pod}") }).await {
        Ok(reply) => reply.into_inner().pod.and_then(|p| p.waiting).map(|w| w.reason).unwrap_or_default(),
        Err(status) => status.message().to_owned(),
    }
}

async fn explains(sim: &Sim, pod: &str, want: &str) {
    until(&format!("{pod} waits with {want}"), LONG, async || {
        let got = reason(sim, pod).await;
        if got == want { Ok(()) } else { Err(got) }
    })
    .await;
}

fn with(name: &str, edit: impl FnOnce(&mut Value)) -> Value {
    let mut pod = pods::single(name);
    edit(&mut pod["spec"]);
    pod
}

fn main_with(name: &str, field: &str, value: Value) -> Value {
    with(name, |spec| spec["containers"][0][field] = value)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_wait_of_a_start_is_named() {
    let sim = Sim::start(Options::default()).await;
    // Commands: `no` fails, `long` takes an hour.
    sim.runtime.on_exec(|_, command| match command.first().map(String::as_str) {
        Some("long") => ExecReply { after: Duration::from_secs(3600), ..ExecReply::default() },
        Some("no") => ExecReply { exit_code: 1, ..ExecReply::default() },
        _ => ExecReply::default(),
    });
    let exec =
        |command: &str| json!({"exec": {"command": [command]}, "periodSeconds": 1, "failureThreshold": 1000});
    let script = |rule: Rule| {
        let _until_the_end = sim.runtime.script(rule);
    };
    script(Rule::on(Method::RunPodSandbox).about("w-sandbox").hang());
    script(Rule::on(Method::RunPodSandbox).about("w-no-sandbox").fail(Code::Unknown, "no"));
    script(Rule::on(Method::PullImage).about("example.test/slow:1").hang());
    script(Rule::on(Method::PullImage).about("example.test/none:1").fail(Code::Unknown, "no"));
    script(Rule::on(Method::CreateContainer).about("c-w-create").fail(Code::Unknown, "no"));
    sim.runtime.behave(
        "c-w-crash",
        Behaviour { exit: Some((Duration::from_millis(10), 1)), ..Behaviour::default() },
    );
    let rows: Vec<(&str, Value)> = vec![
        ("SandboxCreating", pods::single("w-sandbox")),
        ("CreatePodSandboxError", pods::single("w-no-sandbox")),
        ("ImagePulling", main_with("w-pull", "image", json!("example.test/slow:1"))),
        ("ImagePullBackOff", main_with("w-no-image", "image", json!("example.test/none:1"))),
        (
            "ErrImageNeverPull",
            with("w-never", |spec| {
                spec["containers"][0]["image"] = json!("example.test/never:1");
                spec["containers"][0]["imagePullPolicy"] = json!("Never");
            }),
        ),
        ("InvalidImageName", main_with("w-name", "image", json!("Not A Name"))),
        (
            "CreateContainerConfigError",
            main_with("w-config", "envFrom", json!([{"secretRef": {"name": "none"}}])),
        ),
        ("CreateContainerError", pods::single("w-create")),
        ("CrashLoopBackOff", pods::single("w-crash")),
        (
            "PostStartHook",
            main_with("w-hook", "lifecycle", json!({"postStart": {"exec": {"command": ["long"]}}})),
        ),
        (
            "PodInitializing",
            with("w-init", |spec| spec["initContainers"] = json!([pods::container("init-for-ever")])),
        ),
        ("StartupProbe", main_with("w-startup", "startupProbe", exec("no"))),
        ("ReadinessProbe", main_with("w-ready", "readinessProbe", exec("no"))),
        (
            "ReadinessGates",
            with("w-gate", |spec| spec["readinessGates"] = json!([{"conditionType": "example.test/gate"}])),
        ),
        (
            "VolumesNotMounted",
            with("w-volume", |spec| {
                spec["volumes"] = json!([{"name": "v", "configMap": {"name": "none"}}]);
                spec["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
            }),
        ),
        ("Refused", with("w-refused", |spec| spec["nodeSelector"] = json!({"no": "such-label"}))),
    ];
    for (_, pod) in &rows {
        let _uid = sim.create(pod.clone());
    }
    for (want, pod) in &rows {
        explains(&sim, pod["metadata"]["name"].as_str().unwrap(), want).await;
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_wait_of_an_end_and_for_others_is_named() {
    let sim = Sim::start(Options::default()).await;
    let slow = StopReply::Exits { after: Duration::from_secs(20), code: 0 };
    sim.runtime.behave("c-w-stop", Behaviour { exit: None, stop: slow });
    let slow = StopReply::Exits { after: Duration::from_secs(20), code: 0 };
    sim.runtime.behave("c-w-static", Behaviour { exit: None, stop: slow });
    sim.runtime.behave(
        "c-w-done",
        Behaviour { exit: Some((Duration::from_millis(300), 0)), ..Behaviour::default() },
    );
    for name in ["w-stop", "w-delete"] {
        let _uid = sim.create(pods::single(name));
        sim.wait_ready(name).await;
    }
    sim.manifest("w-static", &pods::manifest("w-static"));
    sim.wait_ready("w-static-sim-node").await;

    sim.delete("w-stop", None);
    explains(&sim, "w-stop", "Terminating").await;
    sim.api.faults().block("delete pods");
    sim.delete("w-delete", None);
    explains(&sim, "w-delete", "FinalDelete").await;
    sim.api.faults().clear();

    let mut next = pods::manifest("w-static");
    next["metadata"]["labels"] = json!({"second": "one"});
    sim.manifest("w-static", &next);
    explains(&sim, "w-static", "StaticPodNameTaken").await;

    let hang = sim.runtime.script(Rule::on(Method::StopPodSandbox).hang());
    let mut done = pods::single("w-done");
    done["spec"]["restartPolicy"] = json!("Never");
    let _uid = sim.create(done);
    explains(&sim, "w-done", "SandboxStopping").await;
    sim.api.faults().block("patch pods/status");
    sim.runtime.unscript(hang);
    explains(&sim, "w-done", "StatusNotWritten").await;
    sim.api.faults().clear();

    sim.runtime.set_condition("NetworkReady", false, "NoNetwork", "no network");
    until("pod-sync knows", LONG, async || {
        let name = "w-network";
        if sim.pod(name).is_gone() {
            let _uid = sim.create(pods::single(name));
        }
        let got = reason(&sim, name).await;
        match got.as_str() {
            "NetworkNotReady" => Ok(()),
            // It was quicker than the runtime's state.
            "" => {
                if sim.pod(name).is_ready() {
                    sim.delete(name, Some(0));
                }
                Err(got)
            }
            _ => Err(got),
        }
    })
    .await;
    sim.runtime.set_condition("NetworkReady", true, "", "");

    sim.kill(Service::Pleg).await;
    let _uid = sim.create(pods::single("w-service"));
    explains(&sim, "w-service", "ServiceNotReachable").await;
    sim.up(Service::Pleg);
    sim.wait_ready("w-service").await;
    sim.finish().await;
}
