//! Removal of orphaned pods, volumes, cgroups, images and logs.

use std::path::PathBuf;
use std::time::Duration;

use quintlet_cri_api::v1;
use quintlet_simulation::{Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{self, Behaviour, Method, Rule};
use quintlet_testkit::wait::until;
use serde_json::json;
use tonic::Code;

/// Returns the directories of a cgroup in all mounted hierarchies, with the file of its CPU shares.
pub(crate) fn groups(sim: &Sim, below: &str) -> Vec<PathBuf> {
    let mount = PathBuf::from("/sys/fs/cgroup");
    let hierarchies = if mount.join("cgroup.controllers").exists() {
        vec![mount]
    } else {
        let all = std::fs::read_dir(mount).unwrap().flatten().map(|e| e.path());
        all.filter(|p| p.join("cgroup.procs").exists()).collect()
    };
    let group = format!("{}/kubepods/{below}", sim.cgroup_root().trim_start_matches('/'));
    hierarchies.into_iter().map(|h| h.join(&group)).collect()
}

pub(crate) fn cpu(sim: &Sim, below: &str) -> Option<u64> {
    let files = groups(sim, below).into_iter().flat_map(|g| [g.join("cpu.shares"), g.join("cpu.weight")]);
    files.filter_map(|f| std::fs::read_to_string(f).ok()).find_map(|text| text.trim().parse().ok())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_instances_of_a_container_are_kept_and_older_ones_removed_with_logs_and_sandbox() {
    // Without events a lost sandbox is detected by a relist, once a second.
    let sim = Sim::start(Options { runtime: fake_runtime::Options::silent(), ..Options::default() }).await;
    let uid = sim.create(pods::single("remade"));
    sim.wait_ready("remade").await;
    let first = sim.runtime.newest(&uid, "c-remade").unwrap();
    let first_sandbox = sim.sandboxes(&uid).remove(0);
    let logs = first.status.log_path.clone();
    std::fs::create_dir_all(std::path::Path::new(&logs).parent().unwrap()).unwrap();
    for suffix in ["", ".20260101-000000"] {
        std::fs::write(format!("{logs}{suffix}"), "x").unwrap();
    }
    for restarts in 1..=2 {
        let newest = sim.sandboxes(&uid).into_iter().find(|s| s.ready()).unwrap();
        sim.runtime.edit_sandbox(newest.id(), |s| s.set_state(v1::PodSandboxState::SandboxNotready));
        sim.wait_pod("remade", "recreated", |p| p.is_ready() && p.restarts() == restarts).await;
        let kept = sim.runtime.container(first.id()).is_some();
        assert!(kept || restarts == 2, "the one before the newest stays");
    }
    sim.wait_runtime("the oldest instance and its sandbox are removed", |r| {
        r.container(first.id()).is_none() && !r.sandboxes().iter().any(|s| s.id() == first_sandbox.id())
    })
    .await;
    assert!(!std::path::Path::new(&logs).exists(), "with its log");
    assert!(!std::path::Path::new(&format!("{logs}.20260101-000000")).exists(), "and what was rotated");
    assert_eq!(sim.runtime.containers().iter().filter(|c| c.pod_uid() == uid).count(), 2);
    assert_eq!(sim.sandboxes(&uid).len(), 2, "an instance is left in the old sandbox");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fewer_dead_containers_are_kept_if_configured_and_a_failed_removal_is_reported_for_the_node() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&["--maximum-dead-containers-per-container=1"]);
    let stuck = sim.runtime.script(Rule::on(Method::RemoveContainer).fail(Code::Unknown, "device busy"));
    sim.start_all();
    let exits = Behaviour { exit: Some((Duration::from_millis(100), 1)), ..Behaviour::default() };
    sim.runtime.behave("c-crasher", exits);
    let uid = sim.create(pods::single("crasher"));
    let node = quintlet_simulation::NODE;
    sim.wait_event(node, "ContainerGCFailed", |e| {
        e.kind == "Warning" && e.reason == "ContainerGCFailed" && e.message.contains("device busy")
    })
    .await;
    assert_eq!(sim.runtime.containers().len(), 2);
    sim.runtime.unscript(stuck);
    sim.wait_runtime("the older one is removed", |r| {
        let left: Vec<_> = r.containers().into_iter().filter(|c| c.pod_uid() == uid).collect();
        left.len() == 1 && !left[0].running()
    })
    .await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containers_without_their_pods_cgroup_are_recreated_in_a_new_one() {
    let sim = Sim::start(Options::default()).await;
    let uid = sim.create(pods::single("lost"));
    sim.wait_ready("lost").await;
    let below = format!("besteffort/pod{uid}");
    assert!(cpu(&sim, &below).is_some());
    for group in groups(&sim, &below).iter().filter(|g| g.exists()) {
        std::fs::remove_dir(group).unwrap();
    }
    sim.api.edit("pods", "default", "lost", |p| p["metadata"]["labels"] = json!({"look": "now"})).unwrap();
    sim.wait_pod("lost", "recreated", |p| p.is_ready() && p.restarts() == 1).await;
    assert!(cpu(&sim, &below).is_some(), "the cgroup exists again");
    sim.wait_event("lost", "Killing", |e| e.reason == "Killing").await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cgroup_of_a_deleted_pod_with_remaining_volumes_has_the_least_cpu() {
    let sim = Sim::prepare(Options::default()).await;
    let volumes = sim.root_dir().join("pods/gone/volumes");
    std::fs::create_dir_all(&volumes).unwrap();
    // Content that must not be deleted.
    std::fs::write(volumes.join("precious"), "x").unwrap();
    for service in Service::ALL {
        sim.up(service);
    }
    let mut pod = pods::single("other");
    pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "500m"}});
    let uid = sim.create(pod);
    sim.wait_ready("other").await;
    let (mine, gone) = (format!("burstable/pod{uid}"), "burstable/podgone");
    let before = cpu(&sim, &mine).unwrap();
    for group in groups(&sim, gone) {
        // Not every hierarchy has the QoS cgroup.
        let _ = std::fs::create_dir(group);
    }
    let least = if before == 512 { 2 } else { 1 };
    until("the least CPU for what is gone", quintlet_simulation::LONG, async || {
        let now = cpu(&sim, gone);
        if now == Some(least) { Ok(()) } else { Err(now) }
    })
    .await;
    assert_eq!(cpu(&sim, &mine), Some(before), "without another owner");
    assert!(volumes.join("precious").exists());
    std::fs::remove_file(volumes.join("precious")).unwrap();
    until("nothing left of it", quintlet_simulation::LONG, async || {
        let left: Vec<_> = groups(&sim, gone).into_iter().filter(|g| g.exists()).collect();
        if left.is_empty() && !volumes.exists() { Ok(()) } else { Err(left) }
    })
    .await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owned_cgroup_without_its_pods_directory_is_removed_and_that_of_another_agent_stays() {
    let sim = Sim::start(Options::default()).await;
    let uid = sim.create(pods::single("left"));
    sim.wait_ready("left").await;
    sim.kill(Service::PodSync).await;
    // Everything but its cgroup is removed by the test.
    sim.delete("left", Some(0));
    for container in sim.runtime.containers() {
        sim.runtime.remove(container.id());
    }
    for sandbox in sim.runtime.sandboxes() {
        sim.runtime.remove(sandbox.id());
    }
    std::fs::remove_dir_all(sim.root_dir().join("pods").join(&uid)).unwrap();
    std::fs::remove_file(sim.paths().state_dir().join(&uid)).unwrap();
    let ours = groups(&sim, &format!("besteffort/pod{uid}"));
    assert!(ours.iter().any(|g| g.exists()));
    let theirs = groups(&sim, "besteffort/podforeign");
    let made = theirs.iter().filter(|g| std::fs::create_dir(g).is_ok()).count();
    assert!(made > 0);
    sim.up(Service::PodSync);
    until("nothing left of ours", quintlet_simulation::LONG, async || {
        let left: Vec<_> = ours.iter().filter(|g| g.exists()).collect();
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    })
    .await;
    // The pod would have been removed after two more passes, each of which removes a later leftover.
    for name in ["second", "third"] {
        let dir = sim.root_dir().join("pods").join(name);
        std::fs::create_dir_all(&dir).unwrap();
        until("another pass", quintlet_simulation::LONG, async || {
            if dir.exists() { Err("its directory is left") } else { Ok(()) }
        })
        .await;
    }
    assert_eq!(theirs.iter().filter(|g| g.exists()).count(), made);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logs_of_deleted_pods_are_removed_and_foreign_logs_stay() {
    let sim = Sim::prepare(Options::default()).await;
    sim.runtime.add_sandbox("stranger", "theirs", "default", 0);
    let dir = |name: &str| sim.pod_logs_dir().join(name);
    for name in ["default_gone_u-gone", "default_theirs_stranger", "unrelated"] {
        std::fs::create_dir_all(dir(name)).unwrap();
        std::fs::write(dir(name).join("0.log"), "x").unwrap();
    }
    for service in Service::ALL {
        sim.up(service);
    }
    let _uid = sim.create(pods::single("mine"));
    sim.wait_ready("mine").await;
    until("the dead one's logs are gone", quintlet_simulation::LONG, async || {
        if dir("default_gone_u-gone").exists() { Err("still there") } else { Ok(()) }
    })
    .await;
    assert!(dir("default_theirs_stranger").exists(), "its pod is in the runtime, though not ours");
    assert!(dir("unrelated").exists());
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unused_images_are_removed_if_disk_usage_exceeds_the_threshold() {
    let runtime = fake_runtime::Options { image_mountpoint: "/".to_owned(), ..Default::default() };
    let mut sim = Sim::prepare(Options { runtime, ..Options::default() }).await;
    sim.disturb();
    // Every disk exceeds this threshold, and every image is old enough.
    sim.set_pod_sync_args(&[
        "--image-gc-high-threshold=1",
        "--image-gc-low-threshold=0",
        "--minimum-image-ttl-duration=0s",
    ]);
    for name in ["old.test/a:1", "old.test/pinned:1"] {
        sim.runtime.add_image(name, 1 << 20);
    }
    sim.runtime.edit_image("old.test/pinned:1", |i| i.pinned = true);
    sim.runtime.add_image(pods::IMAGE, 1 << 20);
    for service in Service::ALL {
        sim.up(service);
    }
    let _uid = sim.create(pods::single("uses"));
    sim.wait_ready("uses").await;
    until("the unused image is gone", quintlet_simulation::LONG, async || {
        let images = sim.runtime.images();
        if images.iter().any(|i| i.contains("old.test/a")) { Err(images) } else { Ok(()) }
    })
    .await;
    let left = sim.runtime.images();
    assert!(left.iter().any(|i| i.contains("old.test/pinned")), "{left:?}");
    assert!(left.iter().any(|i| i.contains("example.test/app")), "one that is in use stays: {left:?}");
    until("the event of the node", quintlet_simulation::LONG, async || {
        let events = sim.events(quintlet_simulation::NODE);
        let is_reported = events.iter().any(|e| {
            e.reason == "FreeDiskSpaceFailed"
                && e.message.contains("Failed to free sufficient space by deleting unused images (freed ")
        });
        if is_reported { Ok(()) } else { Err(events) }
    })
    .await;
    sim.finish().await;
}
