//! Pods with iscsi and fc volumes, with a fake iscsiadm and directories in place of `/dev` and `/sys`, and
//! `local` volumes that grow. The devices are loop devices.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::stat::{Mode, SFlag, mknod};
use quintlet_csi_driver::volumes::mounts_below;
use quintlet_simulation::{LONG, NODE, Options, Service, Sim, pods};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};

pub(super) const IQN: &str = "iqn.2017-05.com.example:a";
const PORTAL: &str = "10.0.0.1:3260";

/// A login makes a session and the link to the device, a logout removes both.
const ISCSIADM: &str = r#"#!/bin/sh
cd BASE
echo "$*" >> calls
session=sys/class/iscsi_host/host7/device/session1
link=dev/disk/by-path/ip-10.0.0.1:3260-iscsi-iqn.2017-05.com.example:a-lun-0
case "$*" in
  *"-o show"*) printf 'iface.transport_name = tcp\n' ;;
  *--login*)
    connection=$session/connection1:0/iscsi_connection/connection1:0
    mkdir -p $connection $session/iscsi_session/session1 sys/class/scsi_host/host7 $session/target7:0:0/7:0:0:0/block/sd0
    echo iqn.2017-05.com.example:a > $session/iscsi_session/session1/targetname
    echo 10.0.0.1 > $connection/address; echo 3260 > $connection/port
    : > sys/class/scsi_host/host7/scan
    ln -sf ../../sd0 $link ;;
  *--logout*) rm -r $session $link ;;
esac
"#;

/// A loop device over a file of 16 MiB.
pub(super) struct LoopDevice {
    path: String,
}

impl LoopDevice {
    fn new(image: &Path) -> Self {
        std::fs::File::create(image).unwrap().set_len(16 << 20).unwrap();
        let made = Command::new("losetup").args(["--find", "--show"]).arg(image).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        Self { path: String::from_utf8(made.stdout).unwrap().trim().to_owned() }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _gone = Command::new("losetup").args(["--detach", &self.path]).status();
    }
}

/// A simulation whose machine has the device `sd0` and no iscsiadm.
async fn started() -> (Sim, LoopDevice, PathBuf) {
    let (sim, mut devices, machine) = started_with(Options::default(), 1).await;
    (sim, devices.remove(0), machine)
}

/// A simulation whose machine has the devices `sd0` … and no iscsiadm.
pub(super) async fn started_with(options: Options, devices: usize) -> (Sim, Vec<LoopDevice>, PathBuf) {
    let mut sim = Sim::prepare(options).await;
    let machine = sim.root_dir().with_file_name("machine");
    for dir in ["dev/disk/by-path", "sys/class/scsi_host", "tools"] {
        std::fs::create_dir_all(machine.join(dir)).unwrap();
    }
    let device = |number: usize| {
        let device = LoopDevice::new(&machine.join(format!("image{number}")));
        let (name, numbers) = (format!("sd{number}"), std::fs::metadata(&device.path).unwrap().rdev());
        let node = machine.join("dev").join(&name);
        mknod(&node, SFlag::S_IFBLK, Mode::from_bits_truncate(0o600), numbers).unwrap();
        let block = machine.join("sys/block").join(name);
        std::fs::create_dir_all(block.join("device")).unwrap();
        std::fs::write(block.join("device/delete"), "").unwrap();
        let numbers = format!("{}:{}\n", nix::sys::stat::major(numbers), nix::sys::stat::minor(numbers));
        std::fs::write(block.join("dev"), numbers).unwrap();
        device
    };
    let devices = (0..devices).map(device).collect();
    sim.set_pod_sync_args(&[
        "--sync-frequency=1s",
        &format!("--device-dir={}", machine.join("dev").display()),
        &format!("--sysfs-dir={}", machine.join("sys").display()),
        &format!("--volume-tools-dir={}", machine.join("tools").display()),
    ]);
    sim.start_all();
    sim.api.wait_for("nodes", "", NODE, LONG, |node| !node.is_null()).await;
    (sim, devices, machine)
}

/// Installs a tool, at once.
pub(super) fn install(machine: &Path, name: &str, script: &str) {
    let new = machine.join("new");
    std::fs::write(&new, script).unwrap();
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::rename(new, machine.join("tools").join(name)).unwrap();
}

fn bound_claim(sim: &Sim, source: Value) {
    let claim = json!({"metadata": {"name": "data"}, "spec": {
        "accessModes": ["ReadWriteOnce"], "volumeName": "pv-data",
        "resources": {"requests": {"storage": "1Gi"}},
    }});
    let claim = sim.api.create("persistentvolumeclaims", "default", claim).unwrap();
    let mut volume = json!({"metadata": {"name": "pv-data"}, "spec": {
        "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"},
        "claimRef": {"namespace": "default", "name": "data", "uid": claim["metadata"]["uid"]},
    }});
    volume["spec"].as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
    sim.api.create("persistentvolumes", "", volume).unwrap();
    let status = |claim: &mut Value| {
        claim["status"] = json!({"phase": "Bound", "capacity": {"storage": "1Gi"}});
    };
    sim.api.edit("persistentvolumeclaims/status", "default", "data", status).unwrap();
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

/// Reports a volume as attached once the node has it in use, as the controller does.
async fn attach(sim: &Sim, name: &str) {
    let is_in_use = |node: &Value| node["status"]["volumesInUse"] == json!([name]);
    sim.api.wait_for("nodes", "", NODE, LONG, is_in_use).await;
    let report = |node: &mut Value| {
        node["status"]["volumesAttached"] = json!([{"name": name, "devicePath": ""}]);
    };
    sim.api.edit("nodes/status", "", NODE, report).unwrap();
}

pub(super) fn is_mounted(path: &Path) -> bool {
    mounts_below(path).unwrap().iter().any(|mount| mount == path)
}

async fn end(sim: &Sim, name: &str, uid: &str) {
    sim.delete(name, None);
    sim.wait_gone(name).await;
    sim.wait_nothing_left(uid).await;
    until("no mount left", LONG, async || {
        let mut left = mounts_below(&sim.root_dir()).unwrap();
        // The root directory is a mount of the simulation.
        left.retain(|mount| *mount != sim.root_dir());
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_iscsi_volume_is_logged_in_once_iscsiadm_exists_and_out_after_its_pod() {
    let (sim, _device, machine) = started().await;
    bound_claim(&sim, json!({"iscsi": {"targetPortal": "10.0.0.1", "iqn": IQN, "lun": 0, "fsType": "ext4"}}));
    let uid = sim.create(pod_with("web", json!({"persistentVolumeClaim": {"claimName": "data"}})));
    attach(&sim, &format!("kubernetes.io/iscsi/10.0.0.1:{IQN}:0")).await;
    let text = "MountVolume.WaitForAttach failed for volume \"pv-data\" : \
                exec: \"iscsiadm\": executable file not found in $PATH";
    sim.wait_event("web", text, |e| e.reason == "FailedMount" && e.message == text).await;
    install(&machine, "iscsiadm", &ISCSIADM.replace("BASE", &machine.display().to_string()));
    sim.wait_ready("web").await;
    let mount = sim.root_dir().join("pods").join(&uid).join("volumes/kubernetes.io~iscsi/pv-data");
    let global = format!("plugins/kubernetes.io/iscsi/iface-default/{PORTAL}-{IQN}-lun-0");
    let global = sim.root_dir().join(global);
    assert!(is_mounted(&mount) && is_mounted(&global));
    std::fs::write(mount.join("f"), "kept").unwrap();
    let calls = || std::fs::read_to_string(machine.join("calls")).unwrap();
    let container = || sim.runtime.newest(&uid, "c-web").unwrap().id().to_owned();
    let before = container();
    // The directory has the port that the volume's name does not have.
    sim.restart(Service::PodSync).await;
    until("the volume is mounted again", LONG, async || {
        let node = sim.api.get("nodes", "", NODE).unwrap();
        let in_use = node["status"]["volumesInUse"].clone();
        if in_use == json!([format!("kubernetes.io/iscsi/10.0.0.1:{IQN}:0")]) { Ok(()) } else { Err(in_use) }
    })
    .await;
    assert_eq!(container(), before);
    assert!(is_mounted(&mount) && is_mounted(&global));
    assert_eq!((calls().matches("--login").count(), calls().matches("--logout").count()), (1, 0));
    end(&sim, "web", &uid).await;
    until("the target is logged out", LONG, async || {
        let calls = calls();
        if calls.contains("--logout") && calls.ends_with("-o delete\n") { Ok(()) } else { Err(calls) }
    })
    .await;
    until("the directory of the disk is gone", LONG, async || if global.exists() { Err(()) } else { Ok(()) })
        .await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_fc_volume_of_a_pod_is_found_by_its_port_and_removed_after_the_pod() {
    let (sim, _device, machine) = started().await;
    let source = json!({"fc": {"targetWWNs": ["50060e801049cfd1"], "lun": 0, "fsType": "ext4"}});
    let uid = sim.create(pod_with("web", source));
    attach(&sim, "kubernetes.io/fc/[50060e801049cfd1]:0").await;
    let text = "MountVolume.WaitForAttach failed for volume \"data\" : no fc disk found";
    sim.wait_event("web", text, |e| e.reason == "FailedMount" && e.message == text).await;
    let link = machine.join("dev/disk/by-path/pci-0000:41:00.0-fc-0x50060e801049cfd1-lun-0");
    symlink("../../sd0", link).unwrap();
    sim.wait_ready("web").await;
    let mount = sim.root_dir().join("pods").join(&uid).join("volumes/kubernetes.io~fc/data");
    let global = sim.root_dir().join("plugins/kubernetes.io/fc/50060e801049cfd1-lun-0");
    assert!(is_mounted(&mount) && is_mounted(&global));
    end(&sim, "web", &uid).await;
    until("the device is removed", LONG, async || {
        let deleted = std::fs::read_to_string(machine.join("sys/block/sd0/device/delete")).unwrap();
        if deleted == "1" && !global.exists() { Ok(()) } else { Err(deleted) }
    })
    .await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_file_system_of_a_local_volume_grows_while_its_pod_runs() {
    let (sim, device, machine) = started().await;
    let on_node = json!([{"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}]);
    let affinity = json!({"required": {"nodeSelectorTerms": [{"matchExpressions": on_node}]}});
    bound_claim(&sim, json!({"local": {"path": device.path}, "nodeAffinity": affinity}));
    let uid = sim.create(pod_with("web", json!({"persistentVolumeClaim": {"claimName": "data"}})));
    sim.wait_ready("web").await;
    // Growth of a mounted ext4 needs CAP_SYS_RESOURCE, which a container may lack.
    let script = format!(
        "#!/bin/sh\necho \"$*\" >> {}\n[ ! -e {}/fail ]\n",
        machine.join("resized").display(),
        machine.display()
    );
    install(&machine, "resize2fs", &script);
    std::fs::write(machine.join("fail"), "").unwrap();
    let capacity = |volume: &mut Value| volume["spec"]["capacity"]["storage"] = json!("2Gi");
    sim.api.edit("persistentvolumes", "", "pv-data", capacity).unwrap();
    let pending = |claim: &mut Value| {
        claim["status"]["allocatedResources"] = json!({"storage": "2Gi"});
        claim["status"]["allocatedResourceStatuses"] = json!({"storage": "NodeResizePending"});
    };
    sim.api.edit("persistentvolumeclaims/status", "default", "data", pending).unwrap();
    let text = format!(
        "NodeExpandVolume.NodeExpandVolume failed for volume \"pv-data\" : resize of device {} failed: exit status 1. \
         resize2fs output: ",
        device.path
    );
    sim.wait_event("web", &text, |e| e.reason == "VolumeResizeFailed" && e.message == text).await;
    let has_failed = |claim: &Value| {
        let conditions = claim["status"]["conditions"].as_array();
        conditions.is_some_and(|all| all.iter().any(|one| one["type"] == "NodeResizeError"))
    };
    sim.api.wait_for("persistentvolumeclaims", "default", "data", LONG, has_failed).await;
    std::fs::remove_file(machine.join("fail")).unwrap();
    let is_expanded = |claim: &Value| claim["status"]["capacity"]["storage"] == "2Gi" && !has_failed(claim);
    sim.api.wait_for("persistentvolumeclaims", "default", "data", LONG, is_expanded).await;
    let resized = std::fs::read_to_string(machine.join("resized")).unwrap();
    assert!(resized.lines().all(|line| line == device.path) && resized.lines().count() >= 2, "{resized}");
    let text = format!("MountVolume.NodeExpandVolume succeeded for volume \"pv-data\" {NODE}");
    sim.wait_event("web", &text, |e| e.reason == "FileSystemResizeSuccessful" && e.message == text).await;
    end(&sim, "web", &uid).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_with_another_file_system_that_cannot_be_mounted_is_reported_for_its_persistent_volume() {
    let (sim, device, _machine) = started().await;
    let made = Command::new("mkfs.ext4").args(["-q", "-F", &device.path]).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let on_node = json!([{"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}]);
    let affinity = json!({"required": {"nodeSelectorTerms": [{"matchExpressions": on_node}]}});
    bound_claim(
        &sim,
        json!({"local": {"path": device.path, "fsType": "squashfs"}, "nodeAffinity": affinity}),
    );
    let uid = sim.create(pod_with("web", json!({"persistentVolumeClaim": {"claimName": "data"}})));
    let is_it = |e: &quintlet_simulation::EventSeen| {
        e.reason == "FailedMountOnFilesystemMismatch"
            && e.message
                .starts_with("MountVolume failed for volume \"pv-data\" local: failed to mount device")
    };
    sim.wait_event("pv-data", "of the PersistentVolume", is_it).await;
    let is_failed = |e: &quintlet_simulation::EventSeen| e.reason == "FailedMount";
    sim.wait_event("web", "of the pod", is_failed).await;
    end(&sim, "web", &uid).await;
    sim.finish().await;
}

/// Writes its number, and never ends. A child like mount.nfs does not end either.
const HANGING_MOUNT: &str =
    "#!/bin/sh\nsleep 1000 & echo $$ $! > BASE/new; mv BASE/new BASE/mounting; wait\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_is_deleted_while_nfs_is_being_mounted_does_not_wait_for_the_mount() {
    let (sim, _device, machine) = started().await;
    install(&machine, "mount", &HANGING_MOUNT.replace("BASE", &machine.display().to_string()));
    let uid = sim.create(pod_with("web", json!({"nfs": {"server": "nfs.example", "path": "/a"}})));
    let processes = until("a mount in progress", LONG, async || {
        std::fs::read_to_string(machine.join("mounting")).map_err(|error| error.to_string())
    })
    .await;
    sim.delete("web", None);
    sim.wait_gone("web").await;
    sim.wait_nothing_left(&uid).await;
    for process in processes.split_whitespace() {
        until("the process has ended", LONG, async || {
            let state = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
            if state.is_empty() || state.contains(") Z ") { Ok(()) } else { Err(state) }
        })
        .await;
    }
    assert!(mounts_below(&sim.root_dir().join("pods").join(&uid)).unwrap().is_empty());
    sim.finish().await;
}
