//! Faults of a driver and of the disk, as the pods of a node experience them, and the metrics that show them.

use std::path::Path;
use std::process::Command;

use quintlet_csi_driver::fault::{self, Fault};
use quintlet_csi_driver::volumes::{mounts_below, unmount};
use quintlet_kit::messages::whole;
use quintlet_proto::podsync::v1::volumes_client::VolumesClient;
use quintlet_proto::podsync::v1::{ListVolumesRequest, VolumeState};
use quintlet_simulation::{LONG, Options, Service, Sim};
use quintlet_testkit::wait::until;
use serde_json::json;

use super::claims::{
    DRIVER, INTERNAL, bound_claim, csi_driver, is_mounted, mount_of, nothing_left, start_driver, wait_volume,
    with_claim,
};
use super::edges::go_down;

/// Runs another pod whose volume needs an operation and no driver, from its start to its end.
async fn one_more_pod(sim: &Sim, name: &str) {
    let dir = sim.root_dir().with_file_name(name);
    std::fs::create_dir_all(&dir).unwrap();
    bound_claim(sim, name, |volume| {
        let spec = volume["spec"].as_object_mut().unwrap();
        spec.remove("csi");
        spec.insert("hostPath".to_owned(), json!({"path": dir, "type": "Directory"}));
    });
    let uid = sim.create(with_claim(name, name));
    sim.wait_ready(name).await;
    sim.delete(name, None);
    sim.wait_gone(name).await;
    sim.wait_nothing_left(&uid).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_that_hangs_in_any_call_is_named_and_delays_no_other_pod() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    for name in ["unpublish", "unstage"] {
        bound_claim(&sim, name, |_| {});
        let _uid = sim.create(with_claim(name, name));
        sim.wait_ready(name).await;
    }
    for (call, name, shown) in [
        ("NodeUnpublishVolume", "unpublish", Some("NodeUnpublishVolume")),
        // The pod is gone before its volume is unstaged.
        ("NodeUnstageVolume", "unstage", None),
        ("NodePublishVolume", "publish", Some("NodePublishVolume")),
        ("NodeStageVolume", "stage", Some("NodeStageVolume")),
        ("NodeGetCapabilities", "capabilities", Some("NodeStageVolume")),
    ] {
        fault::set(driver.state(), &[(call, Fault::Hang)]).unwrap();
        let before = driver.calls_of(call);
        let unmounts = call.starts_with("NodeUn");
        if unmounts {
            sim.delete(name, None);
        } else {
            bound_claim(&sim, name, |_| {});
            let _uid = sim.create(with_claim(name, name));
        }
        until("the driver hangs", LONG, async || {
            if driver.calls_of(call) > before { Ok(()) } else { Err(fault::calls(driver.state())) }
        })
        .await;
        if let Some(shown) = shown {
            let client = VolumesClient::new(quintlet_kit::socket::channel(sim.paths().podsync()));
            until("the call is listed", LONG, async || {
                let listed =
                    whole(client.clone().list(ListVolumesRequest {})).await.map_err(|e| e.to_string())?;
                let volumes = listed.into_inner().volumes;
                let spec_name = format!("pv-{name}");
                let is_it = volumes.iter().any(|v| v.spec_name == spec_name && v.call == shown);
                if is_it { Ok(()) } else { Err(format!("{volumes:?}")) }
            })
            .await;
        }
        one_more_pod(&sim, &format!("beside-{name}")).await;
        if call == "NodeUnstageVolume" {
            // The other calls of the driver work.
            bound_claim(&sim, "other", |_| {});
            let _uid = sim.create(with_claim("other", "other"));
            sim.wait_ready("other").await;
        }
        if !unmounts {
            assert!(!sim.pod(name).is_ready());
        }
    }
    sim.finish().await;
}

/// The kubelet takes the driver at its word, and leaves the mount.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_that_its_driver_mounts_and_refuses_is_unmounted_with_its_pod() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    for (call, undo) in
        [("NodePublishVolume", "NodeUnpublishVolume"), ("NodeStageVolume", "NodeUnstageVolume")]
    {
        let name = if call == "NodeStageVolume" { "stage" } else { "publish" };
        bound_claim(&sim, name, |_| {});
        fault::set(driver.state(), &[(call, Fault::CodeAfter(INTERNAL))]).unwrap();
        let uid = sim.create(with_claim(name, name));
        let failed = "rpc error: code = Internal desc = injected by the test";
        let is_it = |text: &str| text.ends_with(failed);
        sim.wait_event(name, failed, |e| e.reason == "FailedMount" && is_it(&e.message) && e.count >= 2)
            .await;
        assert_eq!(driver.calls_of(&format!("{undo} vol-{name}")), 0);
        sim.delete(name, None);
        sim.wait_gone(name).await;
        nothing_left(&sim, &uid).await;
        assert!(driver.calls_of(&format!("{undo} vol-{name}")) > 0, "{:?}", fault::calls(driver.state()));
    }
    sim.finish().await;
}

/// Without a mount of its own, the second path would be a directory of the node that the runtime creates.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_volumes_of_a_pod_with_one_handle_are_one_mount() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    let mut pod = with_claim("web", "first");
    for name in ["first", "second"] {
        bound_claim(&sim, name, |volume| volume["spec"]["csi"]["volumeHandle"] = json!("vol-one"));
    }
    let second = json!({"name": "second", "persistentVolumeClaim": {"claimName": "second"}});
    pod["spec"]["volumes"].as_array_mut().unwrap().push(second);
    let mounts = pod["spec"]["containers"][0]["volumeMounts"].as_array_mut().unwrap();
    mounts.push(json!({"name": "second", "mountPath": "/second"}));
    let uid = sim.create(pod);
    sim.wait_ready("web").await;
    let container = sim.runtime.newest(&uid, "c-web").unwrap();
    let mut mounts = container.config.mounts.clone();
    mounts.retain(|mount| ["/data", "/second"].contains(&&*mount.container_path));
    assert_eq!(mounts.len(), 2, "{mounts:?}");
    for mount in &mounts {
        assert_eq!(Path::new(&mount.host_path), mount_of(&sim, &uid, "pv-first"), "{mounts:?}");
    }
    sim.restart(Service::PodSync).await;
    sim.delete("web", None);
    sim.wait_gone("web").await;
    nothing_left(&sim, &uid).await;
    assert_eq!(driver.calls_of("NodePublishVolume vol-one"), driver.calls_of("NodePublishVolume"));
    sim.finish().await;
}

fn mount_with(arguments: &[&str], path: &Path) {
    let status = Command::new("mount").args(arguments).arg(path).status().unwrap();
    assert!(status.success(), "{arguments:?} {path:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_and_a_foreign_file_stop_one_pod_until_they_are_gone() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    bound_claim(&sim, "data", |_| {});
    // pod-sync binds the root directory to itself, with all mounts below it.
    until(
        "the root directory is shared",
        LONG,
        async || {
            if is_mounted(&sim.root_dir()) { Ok(()) } else { Err(()) }
        },
    )
    .await;
    // A file system without a free inode has the directories of staged volumes.
    let csi = sim.root_dir().join("plugins/kubernetes.io/csi");
    std::fs::create_dir_all(&csi).unwrap();
    mount_with(&["-t", "tmpfs", "-o", "nr_inodes=1", "tmpfs"], &csi);
    let uid = sim.create(with_claim("web", "data"));
    let is_full = |text: &str| {
        text.starts_with(
            "MountVolume.MountDevice failed for volume \"pv-data\" : kubernetes.io/csi: attacher.MountDevice failed to create dir",
        ) && text.contains("No space left on device")
    };
    sim.wait_event("web", "the full disk", |e| e.reason == "FailedMount" && is_full(&e.message)).await;
    assert_eq!(driver.calls_of("NodeStageVolume"), 0);
    assert_eq!(std::fs::read_dir(&csi).unwrap().count(), 0);
    one_more_pod(&sim, "beside-full").await;
    mount_with(&["-o", "remount,nr_inodes=99"], &csi);
    sim.wait_ready("web").await;
    sim.delete("web", None);
    sim.wait_gone("web").await;
    sim.wait_nothing_left(&uid).await;
    until("only the disk is mounted", LONG, async || {
        let mounts = mounts_below(&csi).unwrap();
        if mounts.iter().all(|mount| *mount == csi) { Ok(()) } else { Err(mounts) }
    })
    .await;
    unmount(&csi).unwrap();
    nothing_left(&sim, &uid).await;

    // The mount point of a volume has a file that the agent did not create.
    let uid = sim.create(with_claim("web", "data"));
    sim.wait_ready("web").await;
    let mount = mount_of(&sim, &uid, "pv-data");
    unmount(&mount).unwrap();
    let foreign = mount.join("foreign");
    std::fs::write(&foreign, "mine").unwrap();
    fault::set(driver.state(), &[("NodeUnpublishVolume", Fault::Lie)]).unwrap();
    sim.delete("web", None);
    let view = wait_volume(&sim, "the volume cannot be removed", |view| view.error.contains("not empty"));
    let view = view.await;
    assert!(view.error.contains("Unmounter.TearDownAt failed to clean mount dir"), "{view:?}");
    assert_eq!(view.state(), VolumeState::Uncertain);
    one_more_pod(&sim, "beside-foreign").await;
    assert_eq!(std::fs::read_to_string(&foreign).unwrap(), "mine");
    std::fs::remove_file(&foreign).unwrap();
    sim.wait_gone("web").await;
    nothing_left(&sim, &uid).await;
    sim.finish().await;
}

/// Returns the value of a series of this process with all of these labels; zero if there is none.
fn metric(name: &str, labels: &[&str]) -> u64 {
    let text = quintlet_telemetry::metrics::text();
    let is_it = |line: &&str| {
        line.split(['{', ' ']).next() == Some(name) && labels.iter().all(|label| line.contains(label))
    };
    text.lines().find(is_it).map_or(0, |line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
}

async fn wait_metric(name: &str, labels: &[&str], least: u64) {
    until(name, LONG, async || {
        let value = metric(name, labels);
        if value >= least { Ok(()) } else { Err(format!("{value} {labels:?}")) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operations_calls_volumes_and_leftovers_of_drivers_are_counted() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    bound_claim(&sim, "data", |_| {});
    fault::set(driver.state(), &[("NodeStageVolume", Fault::Code(INTERNAL))]).unwrap();
    let uid = sim.create(with_claim("web", "data"));
    sim.wait_event("web", "the failed call", |e| e.reason == "FailedMount").await;
    fault::set(driver.state(), &[]).unwrap();
    sim.wait_ready("web").await;
    let plugin = format!("\"kubernetes.io/csi:{DRIVER}\"");
    let operation = async |name: &str, status: &str| {
        let (name, status) = (format!("operation_name=\"{name}\""), format!("status=\"{status}\""));
        let labels = [&*name, &*status, &*plugin];
        wait_metric("storage_operation_duration_seconds_count", &labels, 1).await;
    };
    operation("volume_mount", "fail-unknown").await;
    operation("volume_mount", "success").await;
    for code in ["Internal", "OK"] {
        let code = format!("grpc_status_code=\"{code}\"");
        let labels = [&*code, "method_name=\"/csi.v1.Node/NodeStageVolume\"", "migrated=\"false\"", DRIVER];
        wait_metric("csi_operations_seconds_count", &labels, 1).await;
    }
    for state in ["desired", "actual"] {
        let state = format!("state=\"{state}_state_of_world\"");
        wait_metric("volume_manager_total_volumes", &[&*state, &*plugin], 1).await;
    }

    sim.kill(Service::PodSync).await;
    let torn =
        sim.root_dir().join("pods/8b1b0c9e-0000-4000-8000-00000000000f/volumes/kubernetes.io~csi/torn");
    std::fs::create_dir_all(torn.join("mount")).unwrap();
    let (found, unreadable) =
        ("reconstruct_volume_operations_total", "reconstruct_volume_operations_errors_total");
    let before = (metric(found, &[]), metric(unreadable, &[]));
    sim.up(Service::PodSync);
    wait_metric(found, &[], before.0 + 2).await;
    wait_metric(unreadable, &[], before.1 + 1).await;
    wait_metric("force_cleaned_failed_volume_operations_total", &[], 1).await;
    assert_eq!((metric(found, &[]), metric(unreadable, &[])), (before.0 + 2, before.1 + 1));
    assert_eq!(metric("force_cleaned_failed_volume_operation_errors_total", &[]), 0);
    until("the leftover is removed", LONG, async || if torn.exists() { Err(()) } else { Ok(()) }).await;
    sim.delete("web", None);
    sim.wait_gone("web").await;
    nothing_left(&sim, &uid).await;
    operation("volume_unmount", "success").await;
    operation("unmount_device", "success").await;
    sim.finish().await;
}

/// A reboot removes mounts, processes and `/run`, and keeps the directories of volumes with their metadata.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_reboot_volumes_are_mounted_again_and_those_of_deleted_pods_are_removed() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    let mut uids = Vec::new();
    for name in ["kept", "deleted"] {
        bound_claim(&sim, name, |_| {});
        uids.push(sim.create(with_claim(name, name)));
        sim.wait_ready(name).await;
    }
    let mount = mount_of(&sim, &uids[0], "pv-kept");
    std::fs::write(mount.join("f"), "kept").unwrap();
    go_down(&sim).await;
    drop(driver);
    for path in mounts_below(&sim.root_dir()).unwrap().iter().rev() {
        let _gone = Command::new("umount").arg(path).status();
    }
    assert_eq!(mounts_below(&sim.root_dir().join("pods")).unwrap(), Vec::<std::path::PathBuf>::new());
    assert!(mount.is_dir() && mount.with_file_name("vol_data.json").exists());
    sim.delete("deleted", Some(0));
    for service in Service::ALL {
        sim.up(service);
    }
    // The driver is a pod, which starts after the node agent.
    let driver = start_driver(&sim);
    sim.wait_pod("kept", "Ready again", |pod| pod.is_ready() && pod.restarts() == 1).await;
    assert_eq!(std::fs::read_to_string(mount.join("f")).unwrap(), "kept");
    sim.wait_gone("deleted").await;
    sim.wait_nothing_left(&uids[1]).await;
    assert!(!fault::calls(driver.state()).contains(&"NodeUnpublishVolume vol-kept".to_owned()));
    sim.delete("kept", None);
    sim.wait_gone("kept").await;
    nothing_left(&sim, &uids[0]).await;
    sim.finish().await;
}
