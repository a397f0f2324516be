//! Failed runtime calls.

use std::time::Duration;

use quintlet_simulation::{Options, Sim, pods};
use quintlet_testkit::fake_runtime::{self, Method, Rule};
use serde_json::json;
use tonic::Code;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_pull_backs_off_with_its_error_and_succeeds_later() {
    let sim = Sim::start(Options::default()).await;
    let mut pod = pods::single("pull");
    pod["spec"]["containers"][0]["image"] = json!("example.test/rare:1");
    let rule = sim.runtime.script(Rule::on(Method::PullImage).fail(Code::Unknown, "no such manifest"));
    let uid = sim.create(pod);
    sim.wait_event("pull", "Failed to pull", |e| {
        e.reason == "Failed"
            && e.message.starts_with("Failed to pull image")
            && e.message.contains("no such manifest")
    })
    .await;
    sim.wait_event("pull", "ErrImagePull", |e| e.reason == "Failed" && e.message == "Error: ErrImagePull")
        .await;
    sim.wait_pod("pull", "ImagePullBackOff", |p| {
        let c = p.container("c-pull");
        c.reason == "ImagePullBackOff" && c.message.contains("no such manifest")
    })
    .await;
    sim.wait_event("pull", "BackOff", |e| e.kind == "Normal" && e.reason == "BackOff").await;
    sim.runtime.unscript(rule);
    let seen = sim.wait_ready("pull").await;
    assert_eq!(seen.restarts(), 0, "{seen:?}");
    assert_eq!(sim.runtime.count(Method::PullImage), 2, "once refused, once after the back-off");
    assert_eq!(sim.sandboxes(&uid).len(), 1);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_sandboxes_and_containers_are_reported_and_retried_with_a_back_off() {
    let sim = Sim::start(Options::default()).await;
    for (name, method) in [
        ("sandbox", Method::RunPodSandbox),
        ("create", Method::CreateContainer),
        ("start", Method::StartContainer),
    ] {
        // Container IDs are not known before, so two of three starts fail by their order.
        if method != Method::StartContainer {
            let subject = if method == Method::RunPodSandbox { name.to_owned() } else { format!("c-{name}") };
            sim.runtime.script(Rule::on(method).about(&subject).fail(Code::Unknown, "disk is full").times(1));
            let _uid = sim.create(pods::single(name));
        }
    }
    sim.wait_event("sandbox", "FailedCreatePodSandBox", |e| {
        e.kind == "Warning" && e.reason == "FailedCreatePodSandBox" && e.message.contains("disk is full")
    })
    .await;
    sim.wait_pod("create", "CreateContainerError", |p| {
        let c = p.container("c-create");
        c.reason == "CreateContainerError" && c.message == "disk is full"
    })
    .await;
    sim.runtime.script(Rule::on(Method::StartContainer).fail(Code::Unknown, "no such command").times(1));
    let _uid = sim.create(pods::single("start"));
    sim.wait_pod("start", "RunContainerError", |p| {
        let c = p.container("c-start");
        c.reason == "RunContainerError" && c.message == "no such command"
    })
    .await;
    sim.wait_event("create", "Failed", |e| e.reason == "Failed" && e.message.contains("disk is full")).await;
    sim.wait_event("start", "Failed", |e| e.reason == "Failed" && e.message.contains("no such command"))
        .await;
    for name in ["sandbox", "create", "start"] {
        sim.wait_ready(name).await;
    }
    assert_eq!(sim.calls_about(Method::RunPodSandbox, "sandbox"), 2);
    assert_eq!(sim.calls_about(Method::CreateContainer, "c-create"), 2);
    assert_eq!(sim.runtime.count(Method::RunPodSandbox), 4);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_container_is_observed_without_an_event() {
    let sim = Sim::start(Options { runtime: fake_runtime::Options::silent(), ..Options::default() }).await;
    sim.runtime.script(Rule::on(Method::StartContainer).fail(Code::Unknown, "no such command").times(1));
    let uid = sim.create(pods::single("start"));
    sim.wait_pod("start", "RunContainerError", |p| p.container("c-start").reason == "RunContainerError")
        .await;
    sim.wait_ready("start").await;
    // The first one, which did not start, stays as created.
    assert_eq!(sim.runtime.count(Method::CreateContainer), 2, "{:#?}", sim.instances(&uid));
    assert_eq!(sim.runtime.count(Method::StartContainer), 2, "{:#?}", sim.instances(&uid));
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ephemeral_container_that_cannot_start_is_retried_with_a_back_off() {
    let sim = Sim::start(Options::default()).await;
    let _uid = sim.create(pods::single("debugged"));
    sim.wait_ready("debugged").await;
    let absent = json!([{"name": "e", "image": "example.test/absent:1", "imagePullPolicy": "Never"}]);
    sim.api
        .edit("pods/ephemeralcontainers", "default", "debugged", |p| {
            p["spec"]["ephemeralContainers"] = absent
        })
        .unwrap();
    sim.wait_event("debugged", "no image", |e| e.message == "Error: ErrImageNeverPull").await;
    // Enough time for all attempts.
    let _uid = sim.create(pods::single("other"));
    sim.wait_ready("other").await;
    let tries = sim.calls_about(Method::ImageStatus, "example.test/absent:1");
    assert!(tries <= 2, "{tries} looks for the image");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failing_volumes_are_retried_with_a_growing_back_off() {
    let sim = Sim::start(Options::default()).await;
    let began = std::time::Instant::now();
    let mut pod = pods::single("wrong");
    pod["spec"]["volumes"] = json!([{"name": "v", "hostPath": {"path": "/no/such", "type": "Directory"}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    let _uid = sim.create(pod);
    sim.wait_event("wrong", "six tries", |e| e.reason == "FailedMount" && e.count >= 6).await;
    // 0.5 + 1 + 2 + 4 + 8 s with jitter.
    assert!(began.elapsed() >= Duration::from_millis(15_500), "{:?}", began.elapsed());
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_error_of_200_kib_becomes_a_reason_and_a_back_off() {
    let sim = Sim::start(Options::default()).await;
    let refusal = Rule::on(Method::StartContainer).fail(Code::Unknown, &"/a".repeat(100 << 10));
    let rule = sim.runtime.script(refusal);
    let _uid = sim.create(pods::single("long"));
    sim.wait_pod("long", "the reason", |p| p.container("c-long").reason == "RunContainerError").await;
    assert_eq!(sim.runtime.count(Method::StartContainer), 1, "the next start waits");
    sim.runtime.unscript(rule);
    sim.wait_ready("long").await;
    sim.finish().await;
}
