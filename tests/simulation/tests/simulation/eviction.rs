//! Evictions: pod-sync is killed in the middle of one, statistics hang, the node starts under pressure,
//! writable layers have a file system apart from images.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use quintlet_simulation::{LONG, NODE, Options, Seen, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{Behaviour, FakeRuntime, Method, Rule};
use quintlet_testkit::wait::until;
use serde_json::json;
use tokio::time::{Instant, sleep};

/// More process IDs than a machine has.
const PIDS_ARE_SHORT: &str = "--eviction-hard=pid.available<9999999999";
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

/// The runtime adds the registry to names.
fn has_image(runtime: &FakeRuntime, name: &str) -> bool {
    runtime.images().iter().any(|image| image.ends_with(&format!("/{name}")))
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
    sim.wait_runtime("the image is gone", |r| !has_image(r, "unused:1")).await;
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
    let calls = sim.runtime.calls_of(Method::ListContainerStats).len();
    // A round does not wait for the call forever. A later one asks again.
    until("a round that began with a full disk", LONG, async || {
        let now = sim.runtime.calls_of(Method::ListContainerStats).len();
        if now > calls { Ok(()) } else { Err(now) }
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_cannot_be_stopped_is_evicted_once_and_then_the_next_one() {
    let sim = node().await;
    sim.start_all();
    let mut first = pods::single("first");
    first["spec"]["priority"] = json!(-1);
    sim.runtime.script(Rule::on(Method::StartContainer).hang().times(1));
    let _uid = sim.create(first);
    sim.runtime.wait_count(Method::StartContainer, 1).await;
    let _uid = sim.create(pods::single("second"));
    sim.wait_ready("second").await;
    fill(&sim);
    // The wait for the stop and the one for the resources.
    sim.wait_event("first", "evicted", |e| e.reason == "Evicted").await;
    sim.wait_event("second", "evicted after it", |e| e.reason == "Evicted").await;
    std::fs::remove_file(filler(&sim)).unwrap();
    let evictions: Vec<_> = sim.events("first").into_iter().filter(|e| e.reason == "Evicted").collect();
    assert_eq!(evictions.len(), 1, "{evictions:?}");
    sim.runtime.unscript_all();
    sim.finish().await;
}

/// A file system that does not answer until this is dropped.
struct Hang {
    at: PathBuf,
    /// No process reads the requests of the file system. They end with an error when this is closed.
    requests: Option<File>,
}

impl Hang {
    fn over(at: &Path) -> Self {
        let requests = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", requests.as_raw_fd());
        mount(Some("hang"), at, Some("fuse"), MsFlags::empty(), Some(options.as_str())).unwrap();
        Self { at: at.to_owned(), requests: Some(requests) }
    }
}

impl Drop for Hang {
    fn drop(&mut self) {
        drop(self.requests.take());
        let _gone = umount2(&self.at, MntFlags::MNT_DETACH);
    }
}

/// Restarts pod-sync under a lack of process IDs, and returns once the pod is evicted for it.
async fn is_evicted_for_processes(sim: &mut Sim, disturb: impl FnOnce(&Sim)) {
    let _uid = sim.create(pods::single("web"));
    sim.wait_ready("web").await;
    sim.kill(Service::PodSync).await;
    sim.set_pod_sync_args(&[PIDS_ARE_SHORT]);
    disturb(sim);
    sim.up(Service::PodSync);
    let web = sim.wait_pod("web", "evicted", is_evicted).await;
    let message = web.text("/status/message");
    assert!(message.starts_with("The node was low on resource: pids. Threshold quantity: "), "{message}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_system_that_hangs_delays_no_eviction_for_process_ids() {
    let mut sim = node().await;
    sim.start_all();
    let mut hang = None;
    is_evicted_for_processes(&mut sim, |sim| hang = Some(Hang::over(filler(sim).parent().unwrap()))).await;
    drop(hang);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_that_does_not_report_its_file_systems_delays_no_eviction_for_process_ids() {
    let mut sim = node().await;
    sim.start_all();
    let mut hang = None;
    is_evicted_for_processes(&mut sim, |sim| hang = Some(sim.runtime.hang(Method::ImageFsInfo))).await;
    sim.runtime.unscript(hang.unwrap());
    sim.finish().await;
}

/// Mounts an ext4 file system of 48 MiB in a file.
fn mount_disk(at: &Path) {
    let image = at.with_extension("img");
    File::create(&image).unwrap().set_len(48 << 20).unwrap();
    std::fs::create_dir_all(at).unwrap();
    let run = |program: &str, args: &[&str]| {
        let done = Command::new(program).args(args).arg(&image).arg(at).output().unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    let made = Command::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&image).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    run("mount", &["-o", "loop"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writable_layers_apart_from_images_count_on_the_disk_of_the_node() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&[
        "--eviction-hard=nodefs.available<16Mi,imagefs.available<8Mi",
        "--eviction-pressure-transition-period=2s",
        "--volume-stats-agg-period=2s",
        "--image-gc-high-threshold=99",
        "--minimum-image-ttl-duration=0s",
    ]);
    mount_disk(&sim.root_dir());
    sim.runtime.separate_layers(&sim.root_dir());
    sim.start_all();
    let exits = Behaviour { exit: Some((Duration::from_millis(100), 0)), ..Behaviour::default() };
    sim.runtime.behave("c-done", exits);
    let mut done = pods::single("done");
    done["spec"]["restartPolicy"] = json!("Never");
    let done = sim.create(done);
    sim.wait_pod("done", "succeeded", |pod| pod.phase() == "Succeeded").await;
    let other = sim.create(pods::single("other"));
    let layer = sim.create(pods::single("layer"));
    let before = sim.wait_ready("other").await;
    sim.wait_ready("layer").await;
    sim.runtime.set_layer("c-layer", 10 << 20);
    // The pod with these logs is evicted first if writable layers do not count.
    let logs = sim.pod_logs_dir().join(format!("default_other_{other}/c-other"));
    std::fs::create_dir_all(&logs).unwrap();
    std::fs::write(logs.join("0.log"), vec![b'\n'; 1 << 20]).unwrap();

    // The disk of images is full: dead containers have nothing there.
    sim.runtime.add_image("unused:1", 1 << 20);
    let slow = sim.runtime.script(Rule::on(Method::RemoveImage).latency(Duration::from_secs(1)));
    fill(&sim);
    until("the image is being removed", LONG, async || {
        if sim.runtime.in_flight(Method::RemoveImage) > 0 { Ok(()) } else { Err(sim.runtime.images()) }
    })
    .await;
    std::fs::remove_file(filler(&sim)).unwrap();
    sim.runtime.unscript(slow);
    sim.wait_runtime("the image is gone", |r| !has_image(r, "unused:1")).await;
    assert!(sim.runtime.newest(&done, "c-done").is_some(), "dead containers are on the other disk");

    // The disk of the node is full: dead containers go, images have nothing there, then the pod with the
    // largest writable layer.
    sim.runtime.add_image("unused:2", 1 << 20);
    let container = sim.runtime.newest(&layer, "c-layer").unwrap().id().to_owned();
    let slow = Rule::on(Method::StopContainer).about(&container).latency(Duration::from_secs(2));
    let slow = sim.runtime.script(slow);
    let on_node = sim.root_dir().join("filler");
    std::fs::write(&on_node, vec![1; 28 << 20]).unwrap();
    sim.wait_calls(Method::StopContainer, &container, 1).await;
    std::fs::remove_file(on_node).unwrap();
    sim.runtime.unscript(slow);
    let layer = sim.wait_pod("layer", "evicted", is_evicted).await;
    let message = layer.text("/status/message");
    assert!(
        message.starts_with(
            "The node was low on resource: ephemeral-storage. Threshold quantity: 16Mi, available: "
        ) && message.contains("Container c-layer was using "),
        "{message}"
    );
    assert!(sim.runtime.newest(&done, "c-done").is_none(), "dead containers go first");
    assert!(has_image(&sim.runtime, "unused:2"), "{:?}", sim.runtime.images());
    let now = sim.pod("other");
    assert_eq!((now.text("/status/reason"), now.container("c-other")), ("", before.container("c-other")));
    sim.finish().await;
}
