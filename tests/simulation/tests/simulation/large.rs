//! Pods with the largest messages that a tenant can cause, beside ordinary pods: each stream between services
//! continues.

use std::time::Duration;

use quintlet_kit::socket;
use quintlet_proto::podsync::v1::WatchPodsRequest;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::watch_pods_event::Event;
use quintlet_simulation::{Options, Sim, pods};
use quintlet_testkit::fake_runtime::{ExecReply, Method};
use serde_json::{Value, json};

/// Ordinary pods beside a large one.
const ORDINARY: usize = 8;

fn probed(name: &str) -> Value {
    let mut pod = pods::single(name);
    pod["spec"]["containers"][0]["readinessProbe"] =
        json!({"exec": {"command": ["true"]}, "periodSeconds": 1});
    pod
}

/// Starts and deletes ordinary pods with a readiness probe.
async fn ordinary_pods_come_and_go(sim: &Sim) {
    let names: Vec<String> = (0..ORDINARY).map(|n| format!("ordinary-{n}")).collect();
    let mut uids = Vec::new();
    for name in &names {
        uids.push(sim.create(probed(name)));
    }
    for name in &names {
        sim.wait_ready(name).await;
    }
    for name in &names {
        sim.delete(name, Some(0));
    }
    for (name, uid) in names.iter().zip(&uids) {
        sim.wait_gone(name).await;
        sim.wait_nothing_left(uid).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_probe_that_expands_to_megabytes_does_not_run_and_delays_no_pod() {
    let sim = Sim::start(Options::default()).await;
    let mut pod = probed("expands");
    let container = &mut pod["spec"]["containers"][0];
    container["env"] = json!([{"name": "V", "value": "x".repeat(100_000)}]);
    let command: Vec<&str> = std::iter::once("true").chain(std::iter::repeat_n("$(V)", 50)).collect();
    container["livenessProbe"] = json!({"exec": {"command": command}, "periodSeconds": 1});
    let _uid = sim.create(pod);
    ordinary_pods_come_and_go(&sim).await;
    // The other probe of the container runs.
    sim.wait_ready("expands").await;
    let event = sim.wait_event("expands", "the probe is reported", |e| e.reason == "Unhealthy").await;
    let want = "Liveness probe errored and resulted in unknown state: the commands of the pod's probes take more than 2097152 bytes";
    assert_eq!(event.message, want);
    assert_eq!(sim.events("expands").iter().filter(|e| e.reason == "Unhealthy").count(), 1, "reported once");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_name_of_a_megabyte_is_cut_in_messages_and_delays_no_pod() {
    let sim = Sim::start(Options::default()).await;
    let mut pod = pods::single("long-image");
    pod["spec"]["containers"][0]["image"] = json!("A".repeat(1_150_000));
    let _uid = sim.create(pod);
    ordinary_pods_come_and_go(&sim).await;
    let seen = sim
        .wait_pod("long-image", "the image is refused", |p| {
            p.container("c-long-image").reason == "InvalidImageName"
        })
        .await;
    assert_eq!(seen.container("c-long-image").message.len(), 4096);
    for event in sim.events("long-image") {
        assert!(event.message.len() <= 12 << 10, "{}: {} bytes", event.reason, event.message.len());
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_with_much_output_leave_room_for_those_of_other_pods() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.on_exec(|_, command| match command {
        [loud] if loud == "loud" => ExecReply { stdout: vec![b'o'; 15 << 20], ..ExecReply::default() },
        _ => ExecReply::default(),
    });
    for n in 0..4 {
        let mut pod = pods::single(&format!("loud-{n}"));
        pod["spec"]["containers"][0]["livenessProbe"] =
            json!({"exec": {"command": ["loud"]}, "periodSeconds": 1});
        let _uid = sim.create(pod);
    }
    for n in 0..4 {
        sim.wait_ready(&format!("loud-{n}")).await;
    }
    let before = sim.runtime.calls_of(Method::ExecSync).len();
    ordinary_pods_come_and_go(&sim).await;
    while sim.runtime.calls_of(Method::ExecSync).len() < before + 40 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    for n in 0..4 {
        let warnings = sim.warnings(&format!("loud-{n}"));
        assert!(warnings.is_empty(), "{:?}", warnings.iter().map(|w| &w.message).collect::<Vec<_>>());
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_status_that_the_api_server_does_not_take_is_shortened_and_the_pod_is_deleted() {
    let sim = Sim::start(Options::default()).await;
    sim.api.limit_objects(1536 << 10);
    // The status repeats the name of the image.
    let mut image = pods::single("image");
    image["spec"]["containers"][0]["image"] = json!("A".repeat(1_150_000));
    // No status fits beside the spec.
    let mut full = pods::single("full");
    full["spec"]["containers"][0]["env"] = json!([{"name": "V", "value": "x".repeat((1536 << 10) - 1500)}]);
    for pod in [image, full] {
        let _uid = sim.create(pod);
    }
    ordinary_pods_come_and_go(&sim).await;
    let reason = |p: &quintlet_simulation::Seen| p.container("c-image").reason == "InvalidImageName";
    let seen = sim.wait_pod("image", "the status is written", reason).await;
    assert_eq!(seen.text("/status/containerStatuses/0/image"), "A".repeat(128));
    let want = "The status of the pod is too large and is written without long messages and names of images";
    sim.wait_event("image", "the event", |e| e.reason == "StatusTooLarge" && e.message == want).await;
    sim.wait_view("full", "the answer of the API server", |view| view.status == "Running").await;
    assert_eq!(sim.pod("full").phase(), "Pending");
    let patches = || sim.api.requests("patch pods/status default/image").len();
    let written = patches();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(patches(), written, "the status is not written again because it differs");
    for name in ["image", "full"] {
        sim.delete(name, Some(0));
        sim.wait_gone(name).await;
    }
    ordinary_pods_come_and_go(&sim).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statistics_get_the_names_and_the_status_of_a_pod_of_a_megabyte_and_nothing_else() {
    let sim = Sim::start(Options::default()).await;
    let mut pod = probed("large");
    pod["metadata"]["annotations"] = json!({"large": "x".repeat(200_000)});
    pod["spec"]["hostNetwork"] = json!(true);
    pod["spec"]["containers"][0]["env"] = json!([{"name": "V", "value": "x".repeat(1_000_000)}]);
    let uid = sim.create(pod);
    sim.wait_ready("large").await;
    let mut client = PodSyncClient::new(socket::channel(sim.paths().podsync()));
    let request = WatchPodsRequest { for_statistics: true, ..WatchPodsRequest::default() };
    let mut events = client.watch_pods(request).await.unwrap().into_inner();
    let view = loop {
        if let Some(Event::Pod(view)) = events.message().await.unwrap().unwrap().event {
            break view;
        }
    };
    assert!(view.pod.len() < 10_000, "{} bytes", view.pod.len());
    let object: Value = serde_json::from_slice(&view.pod).unwrap();
    let names = ["name", "namespace", "uid"].map(|field| &object["metadata"][field]);
    assert_eq!(names, ["large", "default", uid.as_str()]);
    assert_eq!((&object["spec"]["hostNetwork"], &object["spec"]["containers"]), (&json!(true), &json!([])));
    let whole: Value = serde_json::from_slice(&sim.view("large").await.unwrap().pod).unwrap();
    assert_eq!(object["status"], whole["status"]);
    assert_eq!(object["status"]["qosClass"], "BestEffort");
    sim.finish().await;
}
