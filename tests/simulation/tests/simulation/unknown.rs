//! Calls that took effect but whose response was lost.

use std::time::Duration;

use quintlet_simulation::{Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{Method, Rule};
use tonic::Code;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_reply_causes_no_duplicate_and_no_warning() {
    let sim = Sim::start(Options::default()).await;
    for (name, method) in [
        ("run", Method::RunPodSandbox),
        ("create", Method::CreateContainer),
        ("start", Method::StartContainer),
    ] {
        sim.runtime.script(Rule::on(method).fail_after(Code::Unavailable, "transport is closing").times(1));
        let uid = sim.create(pods::single(name));
        sim.wait_ready(name).await;
        sim.assert_started_once(name, &uid);
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_reply_to_a_stop_ends_the_pod_without_a_warning() {
    let sim = Sim::start(Options::default()).await;
    let uid = sim.create(pods::single("stop"));
    sim.wait_ready("stop").await;
    sim.runtime.script(Rule::on(Method::StopContainer).fail_after(Code::Unavailable, "closing").times(1));
    sim.runtime.script(Rule::on(Method::StopPodSandbox).fail_after(Code::Unavailable, "closing").times(1));
    sim.delete("stop", None);
    sim.wait_gone("stop").await;
    sim.wait_runtime("nothing of the pod is left", |r| r.sandboxes().is_empty() && r.containers().is_empty())
        .await;
    assert_eq!(sim.warnings("stop"), [], "{uid}");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_interrupted_before_its_effect_is_repeated_without_a_warning() {
    let sim = Sim::start(Options::default()).await;
    for (name, method) in [
        ("run", Method::RunPodSandbox),
        ("create", Method::CreateContainer),
        ("start", Method::StartContainer),
        ("pull", Method::PullImage),
    ] {
        sim.runtime.script(Rule::on(method).fail(Code::Unavailable, "transport is closing").times(2));
        let mut pod = pods::single(name);
        pod["spec"]["containers"][0]["image"] = serde_json::json!(format!("example.test/{name}:1"));
        let uid = sim.create(pod);
        sim.wait_ready(name).await;
        sim.assert_started_once(name, &uid);
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outcome_that_stays_unknown_has_a_reason_an_event_and_a_back_off() {
    const TEXT: &str = "transport is closing";
    let sim = Sim::start(Options::default()).await;
    let neighbour = sim.create(pods::single("neighbour"));
    sim.wait_ready("neighbour").await;
    let image = "example.test/rare:1";
    // The subject of StartContainer is the container ID. No other pod here reaches that call.
    let rules = [
        Rule::on(Method::RunPodSandbox).about("run").fail(Code::Unavailable, TEXT),
        Rule::on(Method::PullImage).about(image).fail(Code::DeadlineExceeded, TEXT),
        Rule::on(Method::CreateContainer).about("c-create").fail(Code::DeadlineExceeded, TEXT),
        Rule::on(Method::StartContainer).fail(Code::Unavailable, TEXT),
    ]
    .map(|rule| sim.runtime.script(rule));
    let names = ["run", "pull", "create", "start"];
    let _uids = names.map(|name| {
        let mut pod = pods::single(name);
        if name == "pull" {
            pod["spec"]["containers"][0]["image"] = serde_json::json!(image);
        }
        sim.create(pod)
    });
    for (name, reason, text) in [
        ("run", "FailedCreatePodSandBox", TEXT),
        ("pull", "Failed", "ErrImagePull"),
        ("create", "Failed", TEXT),
        ("start", "Failed", TEXT),
    ] {
        sim.wait_event(name, reason, |e| {
            e.kind == "Warning" && e.reason == reason && e.message.contains(text)
        })
        .await;
    }
    for (name, reason) in
        [("pull", "ImagePullBackOff"), ("create", "CreateContainerError"), ("start", "RunContainerError")]
    {
        let container = format!("c-{name}");
        let seen = sim.wait_pod(name, reason, |p| p.container(&container).reason == reason).await;
        assert!(seen.container(&container).message.contains(TEXT), "{seen:?}");
    }
    sim.wait_view("run", "the reason", |view| {
        view.waiting.as_ref().is_some_and(|w| w.reason == "CreatePodSandboxError" && w.message.contains(TEXT))
    })
    .await;
    let methods = [Method::RunPodSandbox, Method::PullImage, Method::CreateContainer, Method::StartContainer];
    let calls = || methods.map(|method| sim.runtime.count(method));
    let before = calls();
    // Without a back-off each call would be repeated every second.
    tokio::time::sleep(Duration::from_secs(6)).await;
    let after = calls();
    for (n, method) in methods.iter().enumerate() {
        assert!(after[n] - before[n] <= 1, "{method:?} is repeated: {before:?} {after:?}");
    }
    for rule in rules {
        sim.runtime.unscript(rule);
    }
    for name in names {
        let seen = sim.wait_ready(name).await;
        assert_eq!(seen.restarts(), 0, "{seen:?}");
    }
    assert_eq!(sim.runtime.containers().len(), 5, "one container of each pod: {:?}", sim.instances(""));
    assert_eq!(sim.runtime.sandboxes().len(), 5, "{:?}", sim.instances(""));
    sim.assert_started_once("neighbour", &neighbour);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reserved_name_is_retried_without_another_attempt_number() {
    let sim = Sim::start(Options::default()).await;
    for (name, method) in [("run", Method::RunPodSandbox), ("create", Method::CreateContainer)] {
        let text = r#"failed to reserve name "x_0": name "x_0" is reserved for "abc""#;
        sim.runtime.script(Rule::on(method).fail(Code::Unknown, text).times(3));
        let uid = sim.create(pods::single(name));
        sim.wait_ready(name).await;
        sim.assert_started_once(name, &uid);
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_created_after_its_client_disconnected_is_used() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.finish_abandoned_calls(true);
    let hang = sim.runtime.script(Rule::on(Method::RunPodSandbox).hang().times(1));
    let uid = sim.create(pods::single("late"));
    sim.wait_calls(Method::RunPodSandbox, &uid, 1).await;
    sim.restart(Service::CriProxy).await;
    // A repeated call finds the name reserved.
    sim.wait_calls(Method::RunPodSandbox, &uid, 2).await;
    sim.runtime.unscript(hang);
    sim.wait_ready("late").await;
    sim.assert_started_once("late", &uid);
    sim.finish().await;
}
