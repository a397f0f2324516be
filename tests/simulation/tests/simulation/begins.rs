//! Events that are reported while a container start is in progress.

use quintlet_proto::podsync::v1::PodView;
use quintlet_simulation::{Options, Sim, pods};
use quintlet_testkit::fake_runtime::{Method, Rule};
use serde_json::json;

fn waits(view: &PodView) -> &str {
    view.waiting.as_ref().map(|w| w.reason.as_str()).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_is_reported_before_its_images_are_present() {
    let sim = Sim::start(Options::default()).await;
    let mut pod = pods::single("pulls");
    pod["spec"]["containers"][0]["image"] = json!("example.test/large:1");
    let hung = sim.runtime.script(Rule::on(Method::PullImage).about("example.test/large:1").hang());
    let _uid = sim.create(pod);
    let ready = |p: &quintlet_simulation::Seen| p.condition("PodReadyToStartContainers");
    let early = sim.wait_pod("pulls", "ready to start", |p| ready(p).0 == "True").await;
    assert_eq!(sim.runtime.count(Method::CreateContainer), 0);
    sim.runtime.unscript(hung);
    let late = sim.wait_ready("pulls").await;
    assert_eq!(ready(&late), ready(&early), "it became so once");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_pull_is_reported_only_if_the_image_is_pulled() {
    let sim = Sim::start(Options::default()).await;
    let _uid = sim.create(pods::single("first"));
    sim.wait_ready("first").await;
    let hung = sim.runtime.hang(Method::ImageStatus);
    let _uid = sim.create(pods::single("there"));
    sim.wait_view("there", "is made", |v| waits(v) == "ContainerCreating").await;
    let pull = sim.runtime.hang(Method::PullImage);
    let mut pod = pods::single("pulls");
    pod["spec"]["containers"][0]["image"] = json!("example.test/large:1");
    let _uid = sim.create(pod);
    sim.wait_view("pulls", "is made", |v| waits(v) == "ContainerCreating").await;
    sim.runtime.unscript(hung);
    sim.wait_view("pulls", "is pulled for", |v| waits(v) == "ImagePulling").await;
    sim.wait_ready("there").await;
    sim.runtime.unscript(pull);
    sim.wait_ready("pulls").await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_directory_that_cannot_be_created_is_reported_as_a_failed_sandbox() {
    let sim = Sim::start(Options::default()).await;
    let _uid = sim.create(pods::single("first"));
    sim.wait_ready("first").await;
    std::fs::remove_dir_all(sim.pod_logs_dir()).unwrap();
    std::fs::write(sim.pod_logs_dir(), "in the way").unwrap();
    let uid = sim.create(pods::single("nowhere"));
    sim.wait_event("nowhere", "FailedCreatePodSandBox", |e| {
        e.kind == "Warning"
            && e.reason == "FailedCreatePodSandBox"
            && e.message.starts_with("Failed to create pod sandbox: ")
    })
    .await;
    assert!(sim.sandboxes(&uid).is_empty());
    std::fs::remove_file(sim.pod_logs_dir()).unwrap();
    sim.wait_ready("nowhere").await;
    sim.finish().await;
}
