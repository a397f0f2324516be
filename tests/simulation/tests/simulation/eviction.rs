//! Evictions: pod-sync is killed in the middle of one, statistics hang, the node starts under pressure.

use std::path::PathBuf;
use std::time::Duration;

use quintlet_simulation::service::NODE;
use quintlet_simulation::sim::LONG;
use quintlet_simulation::{Options, Seen, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{Method, Rule};
use quintlet_testkit::wait::until;
use serde_json::json;
use tokio::time::{Instant, sleep};

/// File system of images, 16 MiB.
const IMAGES: &str = "images";
/// More than the threshold leaves.
const FILLED: usize = 12 << 20;

/// A node on which less than 8 MiB may not be free on the file system of images.
async fn node() -> Sim {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&[
        "--eviction-hard=imagefs.available<8Mi",
        "--eviction-pressure-transition-period=2s",
        "--volume-stats-agg-period=2s",
    ]);
    sim
}

fn filler(sim: &Sim) -> PathBuf {
    sim.root_dir().with_file_name(IMAGES).join("filler")
}

fn fill(sim: &Sim) {
    std::fs::write(filler(sim), vec![1; FILLED]).unwrap();
}

fn is_evicted(pod: &Seen) -> bool {
    pod.phase() == "Failed" && pod.text("/status/reason") == "Evicted"
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_of_pod_sync_in_the_middle_of_an_eviction_costs_no_second_pod() {
    let sim = node().await;
    sim.start_all();
    // Pods with equal usage are evicted by priority.
    let mut first = pods::single("first");
    first["spec"]["priority"] = json!(-1);
    let first = sim.create(first);
    // A pod with a limit is measured in each round.
    let mut second = pods::single("second");
    second["spec"]["containers"][0]["resources"] = json!({"limits": {"ephemeral-storage": "1Gi"}});
    let _uid = sim.create(second);
    sim.wait_ready("first").await;
    let before = sim.wait_ready("second").await;
    let container = sim.runtime.newest(&first, "c-first").unwrap().id().to_owned();
    let slow = Rule::on(Method::StopContainer).about(&container).latency(Duration::from_secs(12));
    let slow = sim.runtime.script(slow);
    fill(&sim);
    sim.wait_calls(Method::StopContainer, &container, 1).await;

    sim.restart(Service::PodSync).await;
    sim.wait_view("second", "known to the new process", |_| true).await;
    // The stop takes longer than a round of evictions needs, and the disk is full all that time.
    let end = Instant::now() + Duration::from_secs(4);
    while Instant::now() < end {
        assert_eq!(sim.pod("second").text("/status/reason"), "", "the first pod is still being evicted");
        sleep(Duration::from_millis(50)).await;
    }
    std::fs::remove_file(filler(&sim)).unwrap();
    sim.wait_pod("first", "evicted", is_evicted).await;
    sim.runtime.unscript(slow);
    let measured = sim.runtime.calls_of(Method::ListContainerStats).len();
    until("two more measurements", LONG, async || {
        let now = sim.runtime.calls_of(Method::ListContainerStats).len();
        if now >= measured + 2 { Ok(()) } else { Err(now) }
    })
    .await;
    assert_eq!(sim.pod("second").container("c-second"), before.container("c-second"));
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_pod_is_evicted_if_deleting_unused_images_suffices() {
    let mut sim = node().await;
    sim.set_pod_sync_args(&[
        "--eviction-hard=imagefs.available<8Mi",
        "--eviction-pressure-transition-period=2s",
        "--image-gc-high-threshold=99",
        "--minimum-image-ttl-duration=0s",
    ]);
    sim.start_all();
    let _uid = sim.create(pods::single("web"));
    let before = sim.wait_ready("web").await;
    sim.runtime.add_image("unused:1", 1 << 20);
    // The file system is full until the runtime has removed the image.
    let slow = sim.runtime.script(Rule::on(Method::RemoveImage).latency(Duration::from_secs(1)));
    fill(&sim);
    until("the image is being removed", LONG, async || {
        if sim.runtime.in_flight(Method::RemoveImage) > 0 { Ok(()) } else { Err(sim.runtime.images()) }
    })
    .await;
    std::fs::remove_file(filler(&sim)).unwrap();
    sim.runtime.unscript(slow);
    sim.wait_event(NODE, "EvictionThresholdMet", |e| {
        e.reason == "EvictionThresholdMet" && e.message == "Attempting to reclaim ephemeral-storage"
    })
    .await;
    for status in ["NodeHasDiskPressure", "NodeHasNoDiskPressure"] {
        sim.wait_event(NODE, status, |e| e.reason == status).await;
    }
    assert!(!sim.runtime.images().contains(&"unused:1".to_owned()), "{:?}", sim.runtime.images());
    let now = sim.pod("web");
    assert_eq!((now.text("/status/reason"), now.container("c-web")), ("", before.container("c-web")));
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_pod_is_evicted_for_disk_space_while_statistics_of_containers_hang() {
    let sim = node().await;
    let hang = Rule::on(Method::ListContainerStats).latency(Duration::from_secs(3600));
    let hang = sim.runtime.script(hang);
    sim.start_all();
    let _uid = sim.create(pods::single("web"));
    let before = sim.wait_ready("web").await;
    fill(&sim);
    let asked = sim.runtime.calls_of(Method::ListContainerStats).len();
    // A round does not wait for the call forever. A later one asks again.
    until("a round that began with a full disk", LONG, async || {
        let now = sim.runtime.calls_of(Method::ListContainerStats).len();
        if now > asked { Ok(()) } else { Err(now) }
    })
    .await;
    let now = sim.pod("web");
    assert_eq!((now.text("/status/reason"), now.container("c-web")), ("", before.container("c-web")));
    sim.runtime.unscript(hang);
    sim.wait_pod("web", "evicted when statistics are there again", is_evicted).await;
    std::fs::remove_file(filler(&sim)).unwrap();
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_starts_under_pressure_runs_static_pods_and_evicts_the_others() {
    let sim = node().await;
    fill(&sim);
    sim.manifest("static", &pods::manifest("static"));
    let _uid = sim.create(pods::single("early"));
    sim.start_all();
    sim.wait_pod("early", "evicted or refused", is_evicted).await;
    let _uid = sim.create(pods::single("late"));
    let late = sim.wait_pod("late", "refused", is_evicted).await;
    assert_eq!(late.text("/status/message"), "Pod was rejected: The node had condition: [DiskPressure]. ");
    sim.wait_view("static", "running", |view| view.ready == "1/1").await;
    sim.manifest("later", &pods::manifest("later"));
    sim.wait_view("later", "running under pressure", |view| view.ready == "1/1").await;
    sim.restart(Service::PodSync).await;
    let mut critical = pods::single("critical");
    critical["spec"]["priority"] = json!(2_000_000_000);
    let _uid = sim.create(critical);
    sim.wait_ready("critical").await;
    sim.wait_view("static", "running after a restart", |view| view.ready == "1/1").await;
    std::fs::remove_file(filler(&sim)).unwrap();
    sim.finish().await;
}
