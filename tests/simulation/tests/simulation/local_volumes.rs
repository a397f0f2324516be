//! Pods with volumes that need no driver: `local` and `hostPath` PersistentVolumes, nfs, and in-tree types
//! that became drivers.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pod_sync_csi::paths::attachment_name;
use quintlet_csi_driver::thread::DriverThread;
use quintlet_csi_driver::volumes::mounts_below;
use quintlet_kit::failpoint::{Kind, When};
use quintlet_kit::messages::whole;
use quintlet_proto::podsync::v1::storage_client::StorageClient;
use quintlet_proto::podsync::v1::volumes_client::VolumesClient;
use quintlet_proto::podsync::v1::{ListStorageRequest, ListVolumesRequest, VolumeState};
use quintlet_simulation::cuts::CutPoint;
use quintlet_simulation::{LONG, NODE, Options, Service, Sim, pods};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};

/// Starts the services, and waits for the Node: no pod is bound to a node before, and the affinity of a
/// volume is compared with it.
async fn started(options: Options) -> Sim {
    let sim = Sim::start(options).await;
    sim.api.wait_for("nodes", "", NODE, LONG, |node| !node.is_null()).await;
    sim
}

/// Creates the directory of a volume's files, outside of the root directory.
fn disk(sim: &Sim, name: &str) -> PathBuf {
    let disk = sim.root_dir().with_file_name(name);
    std::fs::create_dir_all(&disk).unwrap();
    disk
}

/// Creates a claim that is bound to a PersistentVolume `pv-<name>` with this source.
fn bound_claim(sim: &Sim, name: &str, source: Value) {
    let claim = json!({"metadata": {"name": name}, "spec": {
        "accessModes": ["ReadWriteOnce"], "volumeName": format!("pv-{name}"),
        "resources": {"requests": {"storage": "1Gi"}},
    }});
    let claim = sim.api.create("persistentvolumeclaims", "default", claim).unwrap();
    let mut volume = json!({"metadata": {"name": format!("pv-{name}")}, "spec": {
        "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"},
        "claimRef": {"namespace": "default", "name": name, "uid": claim["metadata"]["uid"]},
    }});
    volume["spec"].as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
    sim.api.create("persistentvolumes", "", volume).unwrap();
    let phase = |claim: &mut Value| claim["status"]["phase"] = json!("Bound");
    sim.api.edit("persistentvolumeclaims/status", "default", name, phase).unwrap();
}

fn local(path: &Path) -> Value {
    let on_node = json!([{"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}]);
    let affinity = json!({"required": {"nodeSelectorTerms": [{"matchExpressions": on_node}]}});
    json!({"local": {"path": path}, "nodeAffinity": affinity})
}

fn pod_with(name: &str, source: Value) -> Value {
    let mut pod = pods::single(name);
    let mut volume = json!({"name": "data"});
    volume.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
    pod["spec"]["terminationGracePeriodSeconds"] = json!(2);
    pod["spec"]["volumes"] = json!([volume]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    pod
}

fn with_claim(name: &str, claim: &str) -> Value {
    pod_with(name, json!({"persistentVolumeClaim": {"claimName": claim}}))
}

/// Returns the path of a pod's volume that its container mounts.
fn mounted_by(sim: &Sim, name: &str, uid: &str) -> PathBuf {
    let container = sim.runtime.newest(uid, &format!("c-{name}")).unwrap();
    let mount = container.config.mounts.iter().find(|mount| mount.container_path == "/data");
    PathBuf::from(&mount.unwrap().host_path)
}

fn mount_of(sim: &Sim, uid: &str, volume: &str) -> PathBuf {
    sim.root_dir().join("pods").join(uid).join("volumes/kubernetes.io~local-volume").join(volume)
}

fn is_mounted(path: &Path) -> bool {
    mounts_below(path).unwrap().iter().any(|mount| mount == path)
}

/// Deletes a pod, and waits until neither a mount nor a directory is left of its volumes.
async fn end(sim: &Sim, name: &str, uid: &str) {
    sim.delete(name, None);
    sim.wait_gone(name).await;
    sim.wait_nothing_left(uid).await;
    until("no mount left", LONG, async || {
        let left = mounts_below(&sim.root_dir()).unwrap();
        let left: Vec<_> = left.into_iter().filter(|path| path.to_string_lossy().contains(uid)).collect();
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_of_a_local_volume_survive_the_pod_and_have_its_group() {
    let sim = started(Options::default()).await;
    let disk = disk(&sim, "disk");
    std::fs::write(disk.join("f"), "kept").unwrap();
    bound_claim(&sim, "data", local(&disk));
    for name in ["web", "next"] {
        let mut pod = with_claim(name, "data");
        pod["spec"]["securityContext"] = json!({"fsGroup": 4711});
        let uid = sim.create(pod);
        sim.wait_ready(name).await;
        sim.assert_started_once(name, &uid);
        let mount = mount_of(&sim, &uid, "pv-data");
        assert_eq!(mounted_by(&sim, name, &uid), mount);
        assert!(is_mounted(&mount));
        assert_eq!(std::fs::read_to_string(mount.join("f")).unwrap(), "kept");
        assert_eq!(std::fs::metadata(disk.join("f")).unwrap().gid(), 4711);
        end(&sim, name, &uid).await;
    }
    assert_eq!(std::fs::read_to_string(disk.join("f")).unwrap(), "kept");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_usage_of_a_local_volume_is_that_of_its_file_system_and_has_its_claim() {
    let sim = started(Options::default()).await;
    let disk = disk(&sim, "disk");
    bound_claim(&sim, "data", local(&disk));
    let uid = sim.create(with_claim("web", "data"));
    sim.wait_ready("web").await;
    let client = StorageClient::new(quintlet_kit::socket::channel(sim.paths().podsync()));
    let volume = until("the volume is measured", LONG, async || {
        let mut client = client.clone();
        let reply = whole(client.list(ListStorageRequest {})).await.map_err(|e| e.to_string())?.into_inner();
        let of_pod = reply.pods.iter().find(|pod| pod.uid == uid);
        let volume = of_pod.and_then(|pod| pod.volumes.iter().find(|volume| volume.name == "data"));
        volume.cloned().ok_or_else(|| format!("{:?}", reply.pods))
    })
    .await;
    let claim = volume.claim.unwrap();
    assert_eq!((&*claim.namespace, &*claim.name, volume.is_ephemeral), ("default", "data", false));
    let capacity = nix::sys::statvfs::statvfs(&disk).unwrap();
    assert_eq!(volume.usage.unwrap().capacity_bytes, capacity.blocks() * capacity.fragment_size());
    end(&sim, "web", &uid).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_local_volume_whose_directory_is_missing_is_mounted_once_the_directory_exists() {
    let sim = started(Options::default()).await;
    let disk = sim.root_dir().with_file_name("late");
    bound_claim(&sim, "data", local(&disk));
    let uid = sim.create(with_claim("web", "data"));
    let text = format!(
        "MountVolume.NewMounter initialization failed for volume \"pv-data\" : path {disk:?} does not exist"
    );
    sim.wait_event("web", &text, |e| e.reason == "FailedMount" && e.message == text).await;
    std::fs::create_dir(&disk).unwrap();
    sim.wait_ready("web").await;
    end(&sim, "web", &uid).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_path_volume_of_a_claim_is_the_path_itself() {
    let sim = started(Options::default()).await;
    let disk = sim.root_dir().with_file_name("made");
    bound_claim(&sim, "data", json!({"hostPath": {"path": disk, "type": "DirectoryOrCreate"}}));
    let file = sim.root_dir().with_file_name("file");
    std::fs::write(&file, "").unwrap();
    bound_claim(&sim, "file", json!({"hostPath": {"path": file, "type": "Directory"}}));
    let uid = sim.create(with_claim("web", "data"));
    let wrong = sim.create(with_claim("wrong", "file"));
    sim.wait_ready("web").await;
    assert_eq!(mounted_by(&sim, "web", &uid), disk);
    let text = format!(
        "MountVolume.SetUp failed for volume \"pv-file\" : hostPath type check failed: {} is not a directory, \
         it's a File",
        file.display()
    );
    sim.wait_event("wrong", &text, |e| e.reason == "FailedMount" && e.message == text).await;
    std::fs::write(disk.join("f"), "kept").unwrap();
    end(&sim, "web", &uid).await;
    end(&sim, "wrong", &wrong).await;
    assert_eq!(std::fs::read_to_string(disk.join("f")).unwrap(), "kept");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_pod_sync_keeps_local_volumes_of_running_pods_and_unmounts_those_of_orphans() {
    let sim = started(Options::default()).await;
    let (kept, orphan) = (disk(&sim, "kept"), disk(&sim, "orphan"));
    bound_claim(&sim, "kept", local(&kept));
    bound_claim(&sim, "orphan", local(&orphan));
    let of_kept = sim.create(with_claim("kept", "kept"));
    let of_orphan = sim.create(with_claim("orphan", "orphan"));
    sim.wait_ready("kept").await;
    sim.wait_ready("orphan").await;
    std::fs::write(orphan.join("f"), "kept").unwrap();
    sim.kill(Service::PodSync).await;
    sim.delete("orphan", Some(0));
    // The claim of the other pod cannot be read for a while.
    sim.api.faults().block("get persistentvolumeclaims");
    sim.up(Service::PodSync);
    until("the orphan's volume is unmounted", LONG, async || {
        let dir = sim.root_dir().join("pods").join(&of_orphan);
        if dir.exists() { Err(dir) } else { Ok(()) }
    })
    .await;
    assert!(is_mounted(&mount_of(&sim, &of_kept, "pv-kept")));
    sim.api.faults().clear();
    assert_eq!(std::fs::read_to_string(orphan.join("f")).unwrap(), "kept");
    sim.assert_started_once("kept", &of_kept);
    end(&sim, "kept", &of_kept).await;
    sim.finish().await;
}

/// Steps of a local volume's life, each with a failpoint before and after it.
const MOUNT: [&str; 4] = [
    "directory of local volume created",
    "local volume bound",
    "options of local volume set",
    "group of local volume changed",
];
const UNMOUNT: [&str; 2] = ["mount of volume removed", "local device unmounted"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_sync_that_is_killed_at_any_step_of_a_local_volumes_life_is_replaced_by_one_that_finishes_the_work()
 {
    let sim = started(Options { cuts: true, ..Options::default() }).await;
    let mut number = 0;
    for (part, steps) in [("mount", &MOUNT[..]), ("unmount", &UNMOUNT)] {
        for step in steps {
            for when in [When::Before, When::After] {
                number += 1;
                let name = format!("p{number}");
                let disk = disk(&sim, &name);
                std::fs::write(disk.join("f"), "kept").unwrap();
                bound_claim(&sim, &name, local(&disk));
                let at = CutPoint { kind: (*step).to_owned(), number: 1 };
                let cut = async || {
                    let reached = tokio::time::timeout(Duration::from_secs(30), sim.cuts().reached()).await;
                    let passed = sim.cuts().disarm();
                    assert!(reached.is_ok(), "{part}: {when:?} {step} was not reached, but {passed:?}");
                    sim.restart(Service::PodSync).await;
                };
                let mut pod = with_claim(&name, &name);
                pod["spec"]["securityContext"] = json!({"fsGroup": 4711});
                if part == "mount" {
                    sim.cuts().arm(Kind::File, when, Some(at.clone()));
                }
                let uid = sim.create(pod);
                if part == "mount" {
                    cut().await;
                }
                sim.wait_ready(&name).await;
                assert!(is_mounted(&mount_of(&sim, &uid, &format!("pv-{name}"))), "{when:?} {step}");
                assert_eq!(std::fs::metadata(disk.join("f")).unwrap().gid(), 4711, "{when:?} {step}");
                if part == "unmount" {
                    sim.cuts().arm(Kind::File, when, Some(at));
                    sim.delete(&name, None);
                    cut().await;
                    sim.wait_gone(&name).await;
                    sim.wait_nothing_left(&uid).await;
                } else {
                    end(&sim, &name, &uid).await;
                }
                assert_eq!(std::fs::read_to_string(disk.join("f")).unwrap(), "kept", "{when:?} {step}");
            }
        }
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ebs_volume_is_mounted_by_its_driver_under_the_drivers_name() {
    let sim = started(Options::default()).await;
    let name = "ebs.csi.aws.com";
    let state = sim.root_dir().with_file_name("driver");
    let driver = DriverThread::start(&sim.root_dir(), &state, &["--name", name]);
    let object = json!({"metadata": {"name": name}, "spec": {"attachRequired": false}});
    sim.api.create("csidrivers", "", object).unwrap();
    bound_claim(&sim, "data", json!({"awsElasticBlockStore": {"volumeID": "aws://us-east-1a/vol-1"}}));
    let uid = sim.create(with_claim("web", "data"));
    sim.wait_ready("web").await;
    assert!(mounted_by(&sim, "web", &uid).ends_with("volumes/kubernetes.io~csi/pv-data/mount"));
    assert_eq!(driver.calls_of("NodePublishVolume vol-1"), 1);
    end(&sim, "web", &uid).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_of_a_pod_is_attached_and_mounted_by_the_driver_that_its_type_became() {
    let sim = started(Options::default()).await;
    let driver_name = "pd.csi.storage.gke.io";
    let state = sim.root_dir().with_file_name("driver");
    let driver = DriverThread::start(&sim.root_dir(), &state, &["--name", driver_name]);
    let uid = sim.create(pod_with("web", json!({"gcePersistentDisk": {"pdName": "disk-1"}})));
    let handle = "projects/UNSPECIFIED/zones/UNSPECIFIED/disks/disk-1";
    let name = format!("kubernetes.io/csi/{driver_name}^{handle}");
    sim.api.wait_for("nodes", "", NODE, LONG, |node| node["status"]["volumesInUse"] == json!([name])).await;
    let attachment = json!({
        "metadata": {"name": attachment_name(handle, driver_name, NODE)},
        "spec": {"attacher": driver_name, "nodeName": NODE, "source": {"inlineVolumeSpec": {}}},
        "status": {"attached": false},
    });
    let attachment = sim.api.create("volumeattachments", "", attachment).unwrap();
    let attachment = attachment["metadata"]["name"].as_str().unwrap();
    let attach = |object: &mut Value| object["status"] = json!({"attached": true});
    sim.api.edit("volumeattachments/status", "", attachment, attach).unwrap();
    let report = |node: &mut Value| {
        node["status"]["volumesAttached"] = json!([{"name": name, "devicePath": ""}]);
    };
    sim.api.edit("nodes/status", "", NODE, report).unwrap();
    sim.wait_ready("web").await;
    let mount = format!("volumes/kubernetes.io~csi/{driver_name}-disk-1/mount");
    assert!(mounted_by(&sim, "web", &uid).ends_with(mount));
    assert_eq!(driver.calls_of(&format!("NodePublishVolume {handle}")), 1);
    end(&sim, "web", &uid).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_of_a_pod_that_no_driver_accepts_has_the_kubelets_event() {
    let sim = started(Options::default()).await;
    let uid = sim.create(pod_with("web", json!({"awsElasticBlockStore": {"volumeID": "aws://z/disk"}})));
    let text = "Unable to attach or mount volumes: unmounted volumes=[data], unattached volumes=[], failed to process \
                volumes=[data]: failed to translate in-tree pv to CSI: failed to translate Kubernetes ID to EBS Volume \
                ID Invalid format for AWS volume (aws://z/disk)";
    sim.wait_event("web", text, |e| e.reason == "FailedMount" && e.message == text).await;
    end(&sim, "web", &uid).await;
    let object = json!({"metadata": {"name": "ebs.csi.aws.com"}, "spec": {"attachRequired": false}});
    sim.api.create("csidrivers", "", object).unwrap();
    let uid = sim.create(pod_with("next", json!({"awsElasticBlockStore": {"volumeID": "vol-1"}})));
    let text = "MountVolume.MountDevice failed for volume \"ebs.csi.aws.com-vol-1\" : \
                kubernetes.io/csi: attacher.MountDevice failed to create newCsiDriverClient: \
                driver name ebs.csi.aws.com not found in the list of registered CSI drivers";
    sim.wait_event("next", text, |e| e.reason == "FailedMount" && e.message == text).await;
    end(&sim, "next", &uid).await;
    sim.finish().await;
}

/// Another pod that can write the directory above a volume could swap the volume's directory for a link.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sources_that_are_swapped_while_they_are_mounted_are_neither_followed_nor_deleted() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&["--sync-frequency=1s"]);
    sim.start_all();
    sim.api.wait_for("nodes", "", NODE, LONG, |node| !node.is_null()).await;
    let precious = disk(&sim, "precious");
    std::fs::write(precious.join("f"), "precious").unwrap();
    let before = |path: &Path| {
        let attributes = std::fs::metadata(path).unwrap();
        (attributes.ino(), attributes.gid(), attributes.mode())
    };
    let kept = [before(&precious), before(&precious.join("f"))];
    let sources = ["local", "host-path", "inline"].map(|name| (name, disk(&sim, name)));
    let mut uids = Vec::new();
    for (name, source) in &sources {
        std::fs::write(source.join("f"), "own").unwrap();
        let mut pod = match *name {
            "local" => {
                bound_claim(&sim, name, local(source));
                with_claim(name, name)
            }
            "host-path" => {
                bound_claim(&sim, name, json!({"hostPath": {"path": source, "type": "Directory"}}));
                with_claim(name, name)
            }
            _ => pod_with(name, json!({"hostPath": {"path": source, "type": "Directory"}})),
        };
        pod["spec"]["securityContext"] = json!({"fsGroup": 4711});
        uids.push(sim.create(pod));
        sim.wait_ready(name).await;
    }
    for (name, source) in &sources {
        std::fs::rename(source, source.with_file_name(format!("{name}-own"))).unwrap();
        std::os::unix::fs::symlink(&precious, source).unwrap();
    }
    // Both the next syncs and another process set the volumes up again.
    sim.restart(Service::PodSync).await;
    let mount = mount_of(&sim, &uids[0], "pv-local");
    let client = VolumesClient::new(quintlet_kit::socket::channel(sim.paths().podsync()));
    until("the volumes are set up again", LONG, async || {
        let listed = whole(client.clone().list(ListVolumesRequest {})).await.map_err(|e| e.to_string())?;
        let volumes = listed.into_inner().volumes;
        let is_done = volumes.len() == 3 && volumes.iter().all(|v| v.state() == VolumeState::Mounted);
        if is_done { Ok(()) } else { Err(format!("{volumes:?}")) }
    })
    .await;
    assert_eq!(std::fs::read_to_string(mount.join("f")).unwrap(), "own");
    for ((name, source), uid) in sources.iter().zip(&uids) {
        sim.assert_started_once(name, uid);
        end(&sim, name, uid).await;
        assert!(source.is_symlink(), "{name}");
        let own = source.with_file_name(format!("{name}-own")).join("f");
        assert_eq!(std::fs::read_to_string(own).unwrap(), "own", "{name}");
    }
    assert_eq!([before(&precious), before(&precious.join("f"))], kept);
    assert_eq!(std::fs::read_to_string(precious.join("f")).unwrap(), "precious");
    sim.finish().await;
}
