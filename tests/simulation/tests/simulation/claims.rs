//! Pods with claims and CSI volumes, with the tests' own driver on its real sockets.

use std::path::{Path, PathBuf};
use std::time::Duration;

use pod_sync_csi::paths::attachment_name;
use quintlet_csi_driver::fault::{self, Fault};
use quintlet_csi_driver::thread::DriverThread;
use quintlet_csi_driver::volumes::mounts_below;
use quintlet_kit::failpoint::{Kind, When};
use quintlet_kit::messages::whole;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::volumes_client::VolumesClient;
use quintlet_proto::podsync::v1::{ExplainRequest, ListVolumesRequest, VolumeState, VolumeView};
use quintlet_simulation::cuts::CutPoint;
use quintlet_simulation::{LONG, NODE, Options, Service, Sim, pods};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};

pub(super) const DRIVER: &str = "test.csi.quintlet.dev";
pub(super) const INTERNAL: i32 = 13;

pub(super) fn start_driver(sim: &Sim) -> DriverThread {
    start_driver_with(sim, &[])
}

/// Starts the driver with more arguments.
pub(super) fn start_driver_with(sim: &Sim, more: &[&str]) -> DriverThread {
    DriverThread::start(&sim.root_dir(), &sim.root_dir().with_file_name("driver"), more)
}

pub(super) fn csi_driver(sim: &Sim, spec: Value) {
    sim.api.create("csidrivers", "", json!({"metadata": {"name": DRIVER}, "spec": spec})).unwrap();
}

/// Creates a claim that is bound to a volume of the driver, `pv-<name>` with the handle `vol-<name>`.
pub(super) fn bound_claim(sim: &Sim, name: &str, change: impl Fn(&mut Value)) {
    let claim = json!({"metadata": {"name": name}, "spec": {
        "accessModes": ["ReadWriteOnce"], "volumeName": format!("pv-{name}"),
        "resources": {"requests": {"storage": "1Gi"}},
    }});
    let claim = sim.api.create("persistentvolumeclaims", "default", claim).unwrap();
    let mut volume = json!({"metadata": {"name": format!("pv-{name}")}, "spec": {
        "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"},
        "claimRef": {"namespace": "default", "name": name, "uid": claim["metadata"]["uid"]},
        "csi": {"driver": DRIVER, "volumeHandle": format!("vol-{name}")},
    }});
    change(&mut volume);
    sim.api.create("persistentvolumes", "", volume).unwrap();
    bind(sim, name);
}

fn bind(sim: &Sim, name: &str) {
    let phase =
        |claim: &mut Value| claim["status"] = json!({"phase": "Bound", "capacity": {"storage": "1Gi"}});
    sim.api.edit("persistentvolumeclaims/status", "default", name, phase).unwrap();
}

pub(super) fn pod_with(name: &str, source: Value) -> Value {
    let mut pod = pods::single(name);
    let mut volume = json!({"name": "data"});
    volume.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
    pod["spec"]["terminationGracePeriodSeconds"] = json!(2);
    pod["spec"]["volumes"] = json!([volume]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    pod
}

pub(super) fn with_claim(name: &str, claim: &str) -> Value {
    pod_with(name, json!({"persistentVolumeClaim": {"claimName": claim}}))
}

pub(super) fn mount_of(sim: &Sim, uid: &str, volume: &str) -> PathBuf {
    sim.root_dir().join("pods").join(uid).join("volumes/kubernetes.io~csi").join(volume).join("mount")
}

pub(super) fn is_mounted(path: &Path) -> bool {
    mounts_below(path).unwrap().iter().any(|mount| mount == path)
}

/// Waits until `quintctl volumes` lists one volume, which is as wanted.
pub(super) async fn wait_volume(sim: &Sim, what: &str, wanted: impl Fn(&VolumeView) -> bool) -> VolumeView {
    let client = VolumesClient::new(quintlet_kit::socket::channel(sim.paths().podsync()));
    until(what, LONG, async || {
        let listed = whole(client.clone().list(ListVolumesRequest {})).await.map_err(|e| e.to_string())?;
        match &listed.into_inner().volumes[..] {
            [one] if wanted(one) => Ok(one.clone()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
}

/// Waits until neither a mount nor a directory is left of the driver's volumes and of a pod.
pub(super) async fn nothing_left(sim: &Sim, uid: &str) {
    sim.wait_nothing_left(uid).await;
    let csi = sim.root_dir().join("plugins/kubernetes.io/csi");
    until("no mount and no directory of a volume left", LONG, async || {
        let mut left: Vec<String> =
            mounts_below(&csi).unwrap().iter().map(|m| m.display().to_string()).collect();
        let list = |dir: &Path| -> Vec<PathBuf> {
            std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
        };
        let below = list(&csi).into_iter().flat_map(|driver| list(&driver));
        left.extend(below.flat_map(|dir| list(&dir)).map(|path| path.display().to_string()));
        left.extend(
            mounts_below(&sim.root_dir().join("pods")).unwrap().iter().map(|m| m.display().to_string()),
        );
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_with_a_bound_claim_becomes_ready_with_its_volume_mounted_and_its_deletion_leaves_nothing() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false, "podInfoOnMount": true}));
    bound_claim(&sim, "data", |_| {});
    let uid = sim.create(with_claim("web", "data"));
    sim.wait_ready("web").await;
    sim.assert_started_once("web", &uid);
    let mount = mount_of(&sim, &uid, "pv-data");
    assert!(is_mounted(&mount));
    std::fs::write(mount.join("f"), "kept").unwrap();
    let container = sim.runtime.newest(&uid, "c-web").unwrap();
    let host_paths: Vec<&str> = container.config.mounts.iter().map(|m| m.host_path.as_str()).collect();
    assert!(host_paths.contains(&mount.to_str().unwrap()), "{host_paths:?}");
    let contexts = std::fs::read_to_string(driver.state().join("contexts.log")).unwrap();
    assert!(contexts.contains("\"csi.storage.k8s.io/pod.name\":\"web\""), "{contexts}");
    sim.delete("web", None);
    sim.wait_gone("web").await;
    nothing_left(&sim, &uid).await;
    assert_eq!(std::fs::read_to_string(driver.backing("vol-data").join("f")).unwrap(), "kept");
    // Another pod finds the file.
    let uid = sim.create(with_claim("next", "data"));
    sim.wait_ready("next").await;
    assert_eq!(std::fs::read_to_string(mount_of(&sim, &uid, "pv-data").join("f")).unwrap(), "kept");
    sim.delete("next", None);
    sim.wait_gone("next").await;
    nothing_left(&sim, &uid).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_waits_for_a_claim_that_is_bound_late_and_for_a_driver_that_is_registered_late() {
    let sim = Sim::start(Options::default()).await;
    csi_driver(&sim, json!({"attachRequired": false}));
    bound_claim(&sim, "data", |_| {});
    let phase = |claim: &mut Value| claim["status"]["phase"] = json!("Pending");
    sim.api.edit("persistentvolumeclaims/status", "default", "data", phase).unwrap();
    let uid = sim.create(with_claim("web", "data"));
    let text = "Unable to attach or mount volumes: unmounted volumes=[data], unattached volumes=[], \
                failed to process volumes=[data]: error processing PVC default/data: PVC is not bound";
    sim.wait_event("web", text, |e| e.reason == "FailedMount" && e.message == text).await;
    let view = wait_volume(&sim, "the claim that is not bound is listed", |volume| {
        volume.state() == VolumeState::Unresolved
    });
    let view = view.await;
    assert_eq!((&*view.pod, &*view.name, &*view.spec_name), ("default/web", "data", ""));
    assert_eq!(view.error, "error processing PVC default/data: PVC is not bound");
    assert!(view.needed_since_unix_ns > 0 && view.error_unix_ns >= view.needed_since_unix_ns, "{view:?}");
    bind(&sim, "data");
    let text = "driver name test.csi.quintlet.dev not found in the list of registered CSI drivers";
    let event = sim.wait_event("web", text, |e| e.reason == "FailedMount" && e.message.ends_with(text)).await;
    let prefix = "MountVolume.MountDevice failed for volume \"pv-data\" : kubernetes.io/csi: ";
    assert!(event.message.starts_with(prefix), "{event:?}");
    let _driver = start_driver(&sim);
    sim.wait_ready("web").await;
    assert!(is_mounted(&mount_of(&sim, &uid, "pv-data")));
    let mounted = wait_volume(&sim, "the volume is mounted", |volume| volume.state() == VolumeState::Mounted);
    assert_eq!(mounted.await.needed_since_unix_ns, view.needed_since_unix_ns);
    sim.delete("web", None);
    sim.wait_gone("web").await;
    nothing_left(&sim, &uid).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_mount_heals_and_a_driver_that_hangs_delays_no_other_pod() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    bound_claim(&sim, "data", |_| {});
    bound_claim(&sim, "slow", |_| {});
    fault::set(driver.state(), &[("NodeStageVolume", Fault::Code(INTERNAL))]).unwrap();
    let uid = sim.create(with_claim("web", "data"));
    let text = "MountVolume.MountDevice failed for volume \"pv-data\" : \
                rpc error: code = Internal desc = injected by the test";
    sim.wait_event("web", text, |e| e.reason == "FailedMount" && e.message == text).await;
    fault::set(driver.state(), &[]).unwrap();
    sim.wait_ready("web").await;
    fault::set(driver.state(), &[("NodePublishVolume", Fault::Hang)]).unwrap();
    let slow = sim.create(with_claim("slow", "slow"));
    until("the driver hangs", LONG, async || {
        if driver.calls_of("NodePublishVolume vol-slow") > 0 {
            Ok(())
        } else {
            Err(fault::calls(driver.state()))
        }
    })
    .await;
    let shows_call = |view: &quintlet_proto::podsync::v1::PodView| {
        view.waiting.as_ref().is_some_and(|w| w.message.contains("NodePublishVolume"))
    };
    sim.wait_view("slow", "the call that the pod waits for", shows_call).await;
    let other = sim.create(pods::single("other"));
    sim.wait_ready("other").await;
    sim.assert_started_once("other", &other);
    sim.delete("web", None);
    sim.wait_gone("web").await;
    sim.wait_nothing_left(&uid).await;
    assert!(!sim.pod("slow").is_ready() && sim.sandboxes(&slow).is_empty());
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_pod_sync_keeps_the_volumes_of_running_pods_and_unmounts_those_of_orphans() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    bound_claim(&sim, "kept", |_| {});
    bound_claim(&sim, "orphan", |_| {});
    let kept = sim.create(with_claim("kept", "kept"));
    let orphan = sim.create(with_claim("orphan", "orphan"));
    sim.wait_ready("kept").await;
    sim.wait_ready("orphan").await;
    sim.kill(Service::PodSync).await;
    sim.delete("orphan", Some(0));
    // Its claim cannot be read for a while.
    sim.api.faults().block("get persistentvolumeclaims");
    sim.up(Service::PodSync);
    until("the orphan's volume is unmounted", LONG, async || {
        let dir = sim.root_dir().join("pods").join(&orphan);
        if dir.exists() { Err(dir) } else { Ok(()) }
    })
    .await;
    sim.api.faults().clear();
    let unpublished = fault::calls(driver.state());
    assert!(unpublished.contains(&"NodeUnpublishVolume vol-orphan".to_owned()), "{unpublished:?}");
    assert!(!unpublished.contains(&"NodeUnpublishVolume vol-kept".to_owned()), "{unpublished:?}");
    assert!(is_mounted(&mount_of(&sim, &kept, "pv-kept")));
    sim.assert_started_once("kept", &kept);
    sim.delete("kept", None);
    sim.wait_gone("kept").await;
    nothing_left(&sim, &kept).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_inline_volume_needs_a_driver_that_provides_them_and_leaves_nothing() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    let inline = json!({"csi": {"driver": DRIVER, "volumeAttributes": {"medium": "tmpfs"}}});
    let uid = sim.create(pod_with("web", inline));
    let text = "MountVolume.SetUp failed for volume \"data\" : kubernetes.io/csi: mounter.SetupAt failed to check volume \
                lifecycle mode: volume mode \"Ephemeral\" not supported by driver test.csi.quintlet.dev (only supports \
                [\"Persistent\"])";
    sim.wait_event("web", text, |e| e.reason == "FailedMount" && e.message == text).await;
    let modes = |object: &mut Value| object["spec"]["volumeLifecycleModes"] = json!(["Ephemeral"]);
    sim.api.edit("csidrivers", "", DRIVER, modes).unwrap();
    sim.restart(Service::PodSync).await;
    sim.wait_ready("web").await;
    assert!(is_mounted(&mount_of(&sim, &uid, "data")));
    assert_eq!(driver.calls_of("NodeStageVolume"), 0);
    sim.delete("web", None);
    sim.wait_gone("web").await;
    nothing_left(&sim, &uid).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_generic_ephemeral_volume_is_mounted_only_from_the_pods_own_claim() {
    let sim = Sim::start(Options::default()).await;
    let _driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    bound_claim(&sim, "web-data", |_| {});
    let template =
        json!({"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}});
    let uid = sim.create(pod_with("web", json!({"ephemeral": {"volumeClaimTemplate": template}})));
    let text = "PVC default/web-data was not created for pod default/web (pod is not owner)";
    sim.wait_event("web", text, |e| e.reason == "FailedMount" && e.message.ends_with(text)).await;
    let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": uid, "controller": true});
    let own = |claim: &mut Value| claim["metadata"]["ownerReferences"] = json!([owner]);
    sim.api.edit("persistentvolumeclaims", "default", "web-data", own).unwrap();
    sim.wait_ready("web").await;
    assert!(is_mounted(&mount_of(&sim, &uid, "pv-web-data")));
    sim.delete("web", None);
    sim.wait_gone("web").await;
    nothing_left(&sim, &uid).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_volume_is_a_device_of_its_container() {
    let sim = Sim::start(Options::default()).await;
    let _driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    bound_claim(&sim, "disk", |volume| volume["spec"]["volumeMode"] = json!("Block"));
    let mut pod = with_claim("web", "disk");
    let container = &mut pod["spec"]["containers"][0];
    container["volumeMounts"] = json!([]);
    container["volumeDevices"] = json!([{"name": "data", "devicePath": "/dev/data"}]);
    let uid = sim.create(pod);
    sim.wait_ready("web").await;
    let container = sim.runtime.newest(&uid, "c-web").unwrap();
    let device = &container.config.devices[0];
    assert_eq!((&*device.container_path, &*device.permissions), ("/dev/data", "mrw"));
    let link = sim.root_dir().join("pods").join(&uid).join("volumeDevices/kubernetes.io~csi/pv-disk");
    assert_eq!(device.host_path, link.display().to_string());
    assert!(is_mounted(&std::fs::read_link(&link).unwrap()));
    let global = sim.root_dir().join("plugins/kubernetes.io/csi/volumeDevices/pv-disk/dev");
    for (kind, path) in [("globalMapPath", global.as_path()), ("volumeMapPath", link.parent().unwrap())] {
        let path = path.display();
        let text = format!("MapVolume.MapPodDevice succeeded for volume \"pv-disk\" {kind} \"{path}\"");
        sim.wait_event("web", &text, |e| e.reason == "SuccessfulMountVolume" && e.message == text).await;
    }
    sim.restart(Service::PodSync).await;
    sim.delete("web", None);
    sim.wait_gone("web").await;
    nothing_left(&sim, &uid).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_for_one_pod_waits_until_the_other_pod_is_gone() {
    let sim = Sim::start(Options::default()).await;
    let _driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    bound_claim(&sim, "data", |volume| volume["spec"]["accessModes"] = json!(["ReadWriteOncePod"]));
    let first = sim.create(with_claim("first", "data"));
    sim.wait_ready("first").await;
    let second = sim.create(with_claim("second", "data"));
    let text = "MountVolume.SetUp failed for volume \"pv-data\" : volume uses the ReadWriteOncePod access mode and is \
                already in use by another pod";
    sim.wait_event("second", text, |e| e.reason == "FailedMount" && e.message == text).await;
    sim.delete("first", None);
    sim.wait_gone("first").await;
    sim.wait_ready("second").await;
    assert!(!is_mounted(&mount_of(&sim, &first, "pv-data")));
    sim.delete("second", None);
    sim.wait_gone("second").await;
    nothing_left(&sim, &second).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attachable_volume_is_mounted_once_the_node_has_it_in_use_and_attached() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim);
    // Without a CSIDriver object, volumes are attached.
    bound_claim(&sim, "data", |_| {});
    let uid = sim.create(with_claim("web", "data"));
    let name = format!("kubernetes.io/csi/{DRIVER}^vol-data");
    let node = sim
        .api
        .wait_for("nodes", "", NODE, LONG, |node| node["status"]["volumesInUse"] == json!([name]))
        .await;
    assert_eq!(node["status"]["volumesAttached"], json!(null));
    assert_eq!(driver.calls_of("NodeStageVolume"), 0);
    let view = wait_volume(&sim, "the volume that is not attached is listed", |volume| {
        volume.state() == VolumeState::NotAttached
    });
    let view = view.await;
    assert_eq!((&*view.pod, &*view.spec_name, &*view.volume), ("default/web", "pv-data", &*name));
    assert!(view.needed_since_unix_ns > 0 && view.call.is_empty() && view.error.is_empty(), "{view:?}");
    let client = PodSyncClient::new(quintlet_kit::socket::channel(sim.paths().podsync()));
    until("the reason of the wait", LONG, async || {
        let reply = client.clone().explain(ExplainRequest { pod: "default/web".to_owned() }).await;
        let waiting = reply.map(|reply| format!("{:?}", reply.into_inner().pod.and_then(|pod| pod.waiting)));
        let waiting = waiting.unwrap_or_else(|error| error.to_string());
        if waiting.contains("is not attached according to the node's status") { Ok(()) } else { Err(waiting) }
    })
    .await;
    let object = json!({
        "metadata": {"name": attachment_name("vol-data", DRIVER, NODE)},
        "spec": {"attacher": DRIVER, "nodeName": NODE, "source": {"persistentVolumeName": "pv-data"}},
        "status": {"attached": false},
    });
    let attachment = sim.api.create("volumeattachments", "", object.clone()).unwrap();
    let attachment = attachment["metadata"]["name"].as_str().unwrap();
    let attach = |object: &mut Value| {
        object["status"] = json!({"attached": true, "attachmentMetadata": {"device": "sdz"}});
    };
    // The Node says that the volume is attached before its attachment does.
    let attached = json!([{"name": name, "devicePath": ""}]);
    let report = |node: &mut Value| node["status"]["volumesAttached"] = attached.clone();
    sim.api.edit("nodes/status", "", NODE, report).unwrap();
    let failed = "MountVolume.WaitForAttach failed for volume \"pv-data\" : ";
    let text = format!("{failed}volume vol-data is not attached for volume attachment {attachment}");
    // Each operation reads the attachment once, and the back-off ends with another operation.
    sim.wait_event("web", &text, |e| e.reason == "FailedMount" && e.message == text && e.count >= 2).await;
    let refuse = |object: &mut Value| {
        object["status"] = json!({"attached": false, "attachError": {"message": "no such disk"}});
    };
    sim.api.edit("volumeattachments/status", "", attachment, refuse).unwrap();
    let text = format!("{failed}no such disk");
    sim.wait_event("web", &text, |e| e.reason == "FailedMount" && e.message == text).await;
    sim.api.delete("volumeattachments", "", attachment, None).unwrap();
    let text = format!(
        "{failed}volume vol-data has GET error for volume attachment {attachment}: \
         volumeattachments.storage.k8s.io \"{attachment}\" not found"
    );
    sim.wait_event("web", &text, |e| e.reason == "FailedMount" && e.message == text).await;
    assert_eq!(driver.calls_of("NodeStageVolume"), 0);
    sim.api.create("volumeattachments", "", object).unwrap();
    sim.api.edit("volumeattachments/status", "", attachment, attach).unwrap();
    sim.wait_ready("web").await;
    let contexts = std::fs::read_to_string(driver.state().join("contexts.log")).unwrap();
    assert!(contexts.contains("\"device\":\"sdz\""), "{contexts}");
    // A restarted pod-sync keeps the volume in use and mounted.
    sim.restart(Service::PodSync).await;
    sim.delete("web", None);
    sim.wait_gone("web").await;
    nothing_left(&sim, &uid).await;
    sim.api
        .wait_for("nodes", "", NODE, LONG, |node| {
            node["status"]["volumesInUse"].as_array().is_none_or(Vec::is_empty)
        })
        .await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_lost_or_deleted_in_use_stops_new_pods_and_not_the_one_that_has_it() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&["--sync-frequency=1s"]);
    sim.start_all();
    let driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    bound_claim(&sim, "data", |_| {});
    let protect =
        |claim: &mut Value| claim["metadata"]["finalizers"] = json!(["kubernetes.io/pvc-protection"]);
    sim.api.edit("persistentvolumeclaims", "default", "data", protect).unwrap();
    let uid = sim.create(with_claim("web", "data"));
    sim.wait_ready("web").await;
    let mount = mount_of(&sim, &uid, "pv-data");
    let container = || sim.runtime.newest(&uid, "c-web").unwrap().id().to_owned();
    let before = container();
    let refused = async |name: &str, cause: &str| {
        let next = sim.create(with_claim(name, "data"));
        let text = format!(
            "Unable to attach or mount volumes: unmounted volumes=[data], unattached volumes=[], failed to process \
             volumes=[data]: error processing PVC default/data: {cause}"
        );
        sim.wait_event(name, &text, |e| e.reason == "FailedMount" && e.message == text).await;
        assert!(sim.sandboxes(&next).is_empty());
        sim.delete(name, None);
        sim.wait_gone(name).await;
        sim.wait_nothing_left(&next).await;
    };
    let phase = |phase: &'static str| move |claim: &mut Value| claim["status"]["phase"] = json!(phase);
    for unbound in ["Lost", "Pending"] {
        sim.api.edit("persistentvolumeclaims/status", "default", "data", phase(unbound)).unwrap();
        refused(&unbound.to_lowercase(), "PVC is not bound").await;
    }
    sim.api.edit("persistentvolumeclaims/status", "default", "data", phase("Bound")).unwrap();
    let elsewhere = |volume: &mut Value| volume["spec"]["claimRef"]["uid"] = json!("another");
    let own = sim.api.get("persistentvolumes", "", "pv-data").unwrap()["spec"]["claimRef"]["uid"].clone();
    sim.api.edit("persistentvolumes", "", "pv-data", elsewhere).unwrap();
    let text = format!(
        "found PV object pv-data but its pv.Spec.ClaimRef.UID another does not point to claim.UID {}",
        own.as_str().unwrap()
    );
    refused("elsewhere", &text).await;
    let back = |volume: &mut Value| volume["spec"]["claimRef"]["uid"] = own.clone();
    sim.api.edit("persistentvolumes", "", "pv-data", back).unwrap();
    // The protection keeps the claim of a pod that is deleted.
    sim.api.delete("persistentvolumeclaims", "default", "data", None).unwrap();
    let unprotect = |claim: &mut Value| claim["metadata"]["finalizers"] = json!(["example.com/other"]);
    sim.api.edit("persistentvolumeclaims", "default", "data", unprotect).unwrap();
    refused("deleted", "PVC is being deleted").await;
    sim.restart(Service::PodSync).await;
    assert_eq!(container(), before);
    assert!(is_mounted(&mount));
    assert_eq!(driver.calls_of("NodeUnpublishVolume vol-data"), 0);
    sim.delete("web", None);
    sim.wait_gone("web").await;
    nothing_left(&sim, &uid).await;
    sim.finish().await;
}

/// Steps of a volume's life, each with a failpoint before and after it.
const MOUNT: [&str; 5] = [
    "directory of staged volume created",
    "volume data written",
    "volume staged",
    "directory of volume created",
    "volume published",
];
const UNMOUNT: [&str; 6] = [
    "volume unpublished",
    "mount point removed",
    "volume data removed",
    "directory of volume removed",
    "volume unstaged",
    "record removed",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_sync_that_is_killed_at_any_step_of_a_volumes_life_is_replaced_by_one_that_finishes_the_work() {
    let sim = Sim::prepare(Options { cuts: true, ..Options::default() }).await;
    sim.start_all();
    let driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    bound_claim(&sim, "data", |_| {});
    let mut number = 0;
    for (part, steps) in [("mount", &MOUNT[..]), ("unmount", &UNMOUNT)] {
        for step in steps {
            for when in [When::Before, When::After] {
                number += 1;
                let name = format!("p{number}");
                let at = CutPoint { kind: (*step).to_owned(), number: 1 };
                let cut = async || {
                    let reached = tokio::time::timeout(Duration::from_secs(30), sim.cuts().reached()).await;
                    let passed = sim.cuts().disarm();
                    assert!(reached.is_ok(), "{part}: {when:?} {step} was not reached, but {passed:?}");
                    sim.restart(Service::PodSync).await;
                };
                if part == "mount" {
                    sim.cuts().arm(Kind::File, when, Some(at.clone()));
                }
                let uid = sim.create(with_claim(&name, "data"));
                if part == "mount" {
                    cut().await;
                }
                sim.wait_ready(&name).await;
                assert!(is_mounted(&mount_of(&sim, &uid, "pv-data")), "{when:?} {step}");
                std::fs::write(driver.backing("vol-data").join(&name), "kept").unwrap();
                if part == "unmount" {
                    sim.cuts().arm(Kind::File, when, Some(at));
                }
                sim.delete(&name, None);
                if part == "unmount" {
                    cut().await;
                }
                sim.wait_gone(&name).await;
                nothing_left(&sim, &uid).await;
                assert!(driver.backing("vol-data").join(&name).exists(), "{when:?} {step}");
            }
        }
    }
    sim.finish().await;
}
