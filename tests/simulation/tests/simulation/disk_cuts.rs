//! pod-sync is killed before and after each mount, unmount, command and record of iscsi and fc volumes.
//!
//! The machine is that of `disks`: a fake iscsiadm, and directories in place of `/dev` and `/sys`. Another
//! pod has the volume of another target or port meanwhile.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use quintlet_csi_driver::volumes::mounts_below;
use quintlet_kit::failpoint::{Kind, When};
use quintlet_proto::podsync::v1::{VolumeState, VolumeView};
use quintlet_simulation::cuts::CutPoint;
use quintlet_simulation::{LONG, NODE, Options, Service, Sim};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};

use crate::claims::wait_volume;
use crate::disks::{LoopDevice, install, is_mounted, pod_with, started_with};

/// The targets `…:a` and `…:b` with the disks `sd0` and `sd1`. Sessions and records are files, and a command
/// that has nothing to do fails as that of open-iscsi.
const ISCSIADM: &str = r#"#!/bin/sh
cd BASE
echo "$*" >> calls
for word in "$@"; do
  case $word in --login) operation=login;; --logout) operation=logout;; --discover) operation=discover;; esac
  case $previous in -m) mode=$word;; -o) operation=$word;; -I) iface=$word;; -T) target=${word##*:};; esac
  previous=$word
done
case $target in a) number=0;; *) number=1;; esac
session=sys/class/iscsi_host/host7/device/session$number
link=dev/disk/by-path/ip-10.0.0.1:3260-iscsi-iqn.2017-05.com.example:$target-lun-0
node=records/node-$target-$iface
case $mode-$operation in
  iface-show) printf 'iface.transport_name = tcp\n' ;;
  iface-new) [ ! -e "records/iface-$iface" ] || exit 15; : > "records/iface-$iface" ;;
  iface-update) [ -e "records/iface-$iface" ] || exit 21 ;;
  iface-delete) [ -e "records/iface-$iface" ] || exit 21; rm "records/iface-$iface" ;;
  discoverydb-discover) t=a; [ $iface != default ] || t=b; : > records/node-$t-$iface ;;
  node-update) [ -e "$node" ] || exit 21 ;;
  node-login)
    [ -e "$node" ] || exit 21
    [ ! -e $session ] || exit 15
    connection=new/connection1:0/iscsi_connection/connection1:0
    mkdir -p $connection new/iscsi_session/session$number new/target7:0:0/7:0:0:0/block/sd$number
    echo iqn.2017-05.com.example:$target > new/iscsi_session/session$number/targetname
    echo 10.0.0.1 > $connection/address; echo 3260 > $connection/port
    mv new $session
    ln -sf ../../sd$number $link ;;
  node-logout) [ -e $session ] || exit 2; rm -r $session $link ;;
  node-delete) [ ! -e $session ] || exit 15; [ -e "$node" ] || exit 21; rm "$node" ;;
esac
"#;

/// Ports of fc disks.
const PORTS: [&str; 2] = ["50060e801049cfd1", "50060e801049cfd2"];

/// Steps with the number of their failpoints before or after.
type Steps = &'static [(&'static str, usize)];

/// A type of volumes.
#[derive(Debug, Clone, Copy)]
struct Shape {
    plugin: &'static str,
    is_block: bool,
    mount: Steps,
    unmount: Steps,
}

const ISCSI: Shape = Shape {
    plugin: "iscsi",
    is_block: false,
    mount: &[
        ("volume command run", 12),
        ("iscsi configuration written", 1),
        ("iscsi interface copied", 1),
        ("iscsi target logged in", 1),
        ("iscsi lun scanned", 1),
        ("directory of disk created", 1),
        ("disk mounted", 1),
        ("directory of disk volume created", 1),
        ("disk volume bound", 1),
        ("options of disk volume set", 1),
        ("group of disk volume changed", 1),
    ],
    unmount: &[
        ("mount of volume removed", 1),
        ("disk unmounted", 1),
        ("disk removed", 1),
        ("volume command run", 3),
        ("iscsi target logged out", 2),
        ("directory of disk removed", 1),
    ],
};

const ISCSI_BLOCK: Shape = Shape {
    is_block: true,
    mount: &[
        ("volume command run", 9),
        ("iscsi configuration written", 1),
        ("iscsi interface copied", 1),
        ("iscsi target logged in", 1),
        ("iscsi lun scanned", 1),
        ("block device bound", 1),
        ("block device linked", 1),
    ],
    unmount: &[
        ("link to block device removed", 1),
        ("block device unmounted", 1),
        ("disk unmounted", 1),
        ("disk removed", 1),
        ("volume command run", 3),
        ("iscsi target logged out", 2),
        ("directory of disk removed", 1),
    ],
    ..ISCSI
};

const FC: Shape = Shape {
    plugin: "fc",
    is_block: false,
    mount: &[
        ("volume command run", 3),
        ("fc disk searched", 1),
        ("directory of disk created", 1),
        ("disk mounted", 1),
        ("directory of disk volume created", 1),
        ("disk volume bound", 1),
        ("options of disk volume set", 1),
        ("group of disk volume changed", 1),
    ],
    unmount: &[
        ("mount of volume removed", 1),
        ("disk unmounted", 1),
        ("volume command run", 1),
        ("disk removed", 1),
        ("directory of disk removed", 1),
    ],
};

const FC_BLOCK: Shape = Shape {
    is_block: true,
    mount: &[("fc disk searched", 1), ("block device bound", 1), ("block device linked", 1)],
    unmount: &[
        ("link to block device removed", 1),
        ("block device unmounted", 1),
        ("disk unmounted", 1),
        ("volume command run", 1),
        ("disk removed", 1),
        ("directory of disk removed", 1),
    ],
    ..FC
};

/// Part of a pod's life in which pod-sync is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// While its volume is mounted. The pod becomes ready.
    Mount,
    /// While its volume is mounted. The pod is gone when pod-sync starts again.
    Abandon,
    /// While its volume is unmounted.
    Unmount,
}

struct Scene {
    sim: Sim,
    machine: PathBuf,
    shape: Shape,
    /// UID and container of the pod that has the other volume.
    keeper: (String, String),
    _devices: Vec<LoopDevice>,
}

fn bound_claim(sim: &Sim, name: &str, source: &Value, is_block: bool) {
    let mode = if is_block { "Block" } else { "Filesystem" };
    let claim = json!({"metadata": {"name": name}, "spec": {
        "accessModes": ["ReadWriteOnce"], "volumeName": format!("pv-{name}"), "volumeMode": mode,
        "resources": {"requests": {"storage": "1Gi"}},
    }});
    let claim = sim.api.create("persistentvolumeclaims", "default", claim).unwrap();
    let mut volume = json!({"metadata": {"name": format!("pv-{name}")}, "spec": {
        "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}, "volumeMode": mode,
        "claimRef": {"namespace": "default", "name": name, "uid": claim["metadata"]["uid"]},
    }});
    volume["spec"].as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
    sim.api.create("persistentvolumes", "", volume).unwrap();
    let status = |claim: &mut Value| {
        claim["status"] = json!({"phase": "Bound", "capacity": {"storage": "1Gi"}});
    };
    sim.api.edit("persistentvolumeclaims/status", "default", name, status).unwrap();
}

/// Returns the paths below a directory, `depth` levels deep.
fn below(dir: &Path, depth: usize) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let deeper = |path: PathBuf| {
        let nested = if depth > 1 { below(&path, depth - 1) } else { Vec::new() };
        std::iter::once(path).chain(nested)
    };
    entries.flat_map(deeper).collect()
}

impl Scene {
    async fn new(shape: Shape) -> Self {
        let options = Options { cuts: true, ..Options::default() };
        let (sim, devices, machine) = started_with(options, 2).await;
        std::fs::create_dir_all(machine.join("records")).unwrap();
        std::fs::create_dir_all(machine.join("sys/class/iscsi_host/host7/device")).unwrap();
        std::fs::create_dir_all(machine.join("sys/class/scsi_host/host7")).unwrap();
        std::fs::write(machine.join("sys/class/scsi_host/host7/scan"), "").unwrap();
        let base = machine.display().to_string();
        install(&machine, "iscsiadm", &ISCSIADM.replace("BASE", &base));
        install(&machine, "blockdev", "#!/bin/sh\n");
        let mut attached = Vec::new();
        for (number, name) in ["web", "keeper"].into_iter().enumerate() {
            let (source, unique) = match shape.plugin {
                "iscsi" => {
                    let iqn = format!("iqn.2017-05.com.example:{}", ["a", "b"][number]);
                    let mut source =
                        json!({"targetPortal": "10.0.0.1", "iqn": iqn, "lun": 0, "fsType": "ext4"});
                    if name == "web" {
                        source["initiatorName"] = json!("iqn.2017-05.com.example:node");
                    }
                    (json!({"iscsi": source}), format!("10.0.0.1:{iqn}:0"))
                }
                _ => {
                    let port = PORTS[number];
                    let link = machine.join(format!("dev/disk/by-path/pci-0000:41:00.0-fc-0x{port}-lun-0"));
                    symlink(format!("../../sd{number}"), link).unwrap();
                    let source = json!({"fc": {"targetWWNs": [port], "lun": 0, "fsType": "ext4"}});
                    (source, format!("[{port}]:0"))
                }
            };
            bound_claim(&sim, name, &source, shape.is_block);
            let unique = format!("kubernetes.io/{}/{unique}", shape.plugin);
            attached.push(json!({"name": unique, "devicePath": ""}));
        }
        let report = |node: &mut Value| node["status"]["volumesAttached"] = json!(attached);
        sim.api.edit("nodes/status", "", NODE, report).unwrap();
        let mut scene =
            Self { sim, machine, shape, keeper: (String::new(), String::new()), _devices: devices };
        let uid = scene.sim.create(scene.pod("keeper", "keeper"));
        scene.sim.wait_ready("keeper").await;
        let container = scene.sim.runtime.newest(&uid, "c-keeper").unwrap().id().to_owned();
        scene.keeper = (uid, container);
        scene
    }

    fn pod(&self, name: &str, claim: &str) -> Value {
        let mut pod = pod_with(name, json!({"persistentVolumeClaim": {"claimName": claim}}));
        pod["spec"]["securityContext"] = json!({"fsGroup": 4711});
        if self.shape.is_block {
            let container = &mut pod["spec"]["containers"][0];
            container["volumeMounts"] = json!([]);
            container["volumeDevices"] = json!([{"name": "data", "devicePath": "/dev/data"}]);
        }
        pod
    }

    fn volume_of(&self, uid: &str, volume: &str) -> PathBuf {
        let dir = if self.shape.is_block { "volumeDevices" } else { "volumes" };
        let of_plugin = format!("{dir}/kubernetes.io~{}", self.shape.plugin);
        self.sim.root_dir().join("pods").join(uid).join(of_plugin).join(volume)
    }

    fn assert_mounted(&self, uid: &str, volume: &str, device: &str) {
        let path = self.volume_of(uid, volume);
        match self.shape.is_block {
            true => assert_eq!(
                std::fs::canonicalize(path).unwrap(),
                std::fs::canonicalize(self.machine.join("dev").join(device)).unwrap()
            ),
            false => assert!(is_mounted(&path), "{}", path.display()),
        }
    }

    /// Waits until pod-sync has taken the other pod's volume over, which has steps, too.
    async fn settled(&self) {
        let is_mounted = |one: &VolumeView| one.state() == VolumeState::Mounted && one.call.is_empty();
        wait_volume(&self.sim, "the volume of the other pod is mounted, and no other one", is_mounted).await;
    }

    /// Asserts that nothing was done with the volume of the other pod.
    fn assert_kept(&self) {
        let (uid, container) = &self.keeper;
        self.assert_mounted(uid, "pv-keeper", "sd1");
        assert_eq!(self.sim.runtime.newest(uid, "c-keeper").unwrap().id(), container);
        let calls = std::fs::read_to_string(self.machine.join("calls")).unwrap_or_default();
        let ends = |call: &&str| call.contains(":b ") && call.contains("--logout");
        assert_eq!(calls.lines().find(ends), None);
        assert_eq!(std::fs::read_to_string(self.machine.join("sys/block/sd1/device/delete")).unwrap(), "");
    }

    /// Waits until nothing is left of a pod and of its volume.
    async fn nothing_left(&self, uid: &str) {
        self.sim.wait_nothing_left(uid).await;
        let (root, machine) = (self.sim.root_dir(), &self.machine);
        until("no mount, directory, session or record left", LONG, async || {
            let mut left = mounts_below(&root.join("pods").join(uid)).unwrap();
            let directories = below(&root.join("plugins/kubernetes.io").join(self.shape.plugin), 3);
            let of_volume = |path: &&PathBuf| {
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                ["example:a", PORTS[0], "pv-web"].iter().any(|part| name.contains(part)) || name == uid
            };
            left.extend(directories.iter().filter(of_volume).cloned());
            if self.shape.plugin == "iscsi" {
                let session = machine.join("sys/class/iscsi_host/host7/device/session0");
                left.extend(Some(session).filter(|path| path.exists()));
                let records = below(&machine.join("records"), 1);
                let is_own = |path: &&PathBuf| {
                    let name = path.file_name().unwrap().to_string_lossy().into_owned();
                    name.starts_with("iface-") || name.starts_with("node-a-")
                };
                left.extend(records.iter().filter(is_own).cloned());
            }
            if left.is_empty() { Ok(()) } else { Err(left) }
        })
        .await;
        self.assert_kept();
    }

    async fn ready(&self, name: &str, uid: &str) {
        self.sim.wait_ready(name).await;
        self.assert_mounted(uid, "pv-web", "sd0");
        if self.shape.is_block {
            return;
        }
        let file = self.volume_of(uid, "pv-web").join("f");
        match std::fs::read_to_string(&file) {
            // The first pod formats the disk.
            Err(_) if name == "whole" => std::fs::write(file, "kept").unwrap(),
            read => assert_eq!(read.unwrap(), "kept"),
        }
    }

    /// Runs a pod without a kill, and asserts which steps it has.
    async fn whole(&self, when: When) {
        let has = |steps: Vec<&'static str>, expected: Steps| {
            let mut passed = BTreeMap::<&str, usize>::new();
            for step in steps.into_iter().filter(|step| expected.iter().any(|(name, _)| name == step)) {
                *passed.entry(step).or_insert(0) += 1;
            }
            let expected: BTreeMap<&str, usize> = expected.iter().copied().collect();
            assert_eq!(passed, expected, "{when:?} {:?}", self.shape);
        };
        self.sim.cuts().arm(Kind::File, when, None);
        let uid = self.sim.create(self.pod("whole", "web"));
        self.ready("whole", &uid).await;
        has(self.sim.cuts().disarm(), self.shape.mount);
        self.sim.cuts().arm(Kind::File, when, None);
        self.sim.delete("whole", None);
        self.sim.wait_gone("whole").await;
        self.nothing_left(&uid).await;
        // The last step has its effect before it is counted.
        let last = "directory of disk removed";
        until("the last step has passed", LONG, async || {
            if self.sim.cuts().has_passed(last) { Ok(()) } else { Err("it has not") }
        })
        .await;
        has(self.sim.cuts().disarm(), self.shape.unmount);
    }

    async fn reached(&self, when: When, step: &CutPoint) {
        let reached = tokio::time::timeout(Duration::from_secs(60), self.sim.cuts().reached()).await;
        let passed = self.sim.cuts().disarm();
        assert!(reached.is_ok(), "{when:?} {step:?} was not reached, but {passed:?}");
    }

    /// Runs a pod whose volume's life is cut at a step.
    async fn cut(&self, name: &str, part: Part, when: When, step: &CutPoint) {
        let sim = &self.sim;
        self.settled().await;
        std::fs::write(self.machine.join("sys/block/sd0/device/delete"), "").unwrap();
        let arm = || sim.cuts().arm(Kind::File, when, Some(step.clone()));
        if part != Part::Unmount {
            arm();
        }
        let uid = sim.create(self.pod(name, "web"));
        match part {
            Part::Mount => {
                self.reached(when, step).await;
                sim.restart(Service::PodSync).await;
                self.ready(name, &uid).await;
                sim.delete(name, None);
            }
            Part::Abandon => {
                self.reached(when, step).await;
                sim.kill(Service::PodSync).await;
                sim.delete(name, Some(0));
                sim.up(Service::PodSync);
            }
            Part::Unmount => {
                self.ready(name, &uid).await;
                arm();
                sim.delete(name, None);
                self.reached(when, step).await;
                sim.restart(Service::PodSync).await;
            }
        }
        sim.wait_gone(name).await;
        self.nothing_left(&uid).await;
        // A disk that was only found is not changed.
        if part != Part::Abandon {
            let removed = std::fs::read_to_string(self.machine.join("sys/block/sd0/device/delete"));
            assert_eq!(removed.unwrap(), "1", "{when:?} {step:?}");
        }
    }
}

async fn at_every_step(shape: Shape, part: Part) {
    let scene = Scene::new(shape).await;
    scene.settled().await;
    scene.whole(When::After).await;
    let steps = if part == Part::Unmount { shape.unmount } else { shape.mount };
    let mut number = 0;
    for (kind, count) in steps {
        for of_kind in 1..=*count {
            for when in [When::Before, When::After] {
                number += 1;
                let step = CutPoint { kind: (*kind).to_owned(), number: of_kind };
                scene.cut(&format!("p{number}"), part, when, &step).await;
            }
        }
    }
    scene.sim.finish().await;
}

macro_rules! at_every_step {
    ($($name:ident: $shape:ident $part:ident;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            at_every_step($shape, Part::$part).await;
        }
    )*};
}

at_every_step! {
    a_mount_of_an_iscsi_volume_survives_a_kill_at_each_step: ISCSI Mount;
    a_mount_of_an_iscsi_volume_that_is_not_needed_any_more_is_undone_after_a_kill_at_each_step: ISCSI Abandon;
    an_unmount_of_an_iscsi_volume_survives_a_kill_at_each_step: ISCSI Unmount;
    a_mount_of_an_iscsi_device_survives_a_kill_at_each_step: ISCSI_BLOCK Mount;
    a_mount_of_an_iscsi_device_that_is_not_needed_any_more_is_undone_after_a_kill_at_each_step: ISCSI_BLOCK Abandon;
    an_unmount_of_an_iscsi_device_survives_a_kill_at_each_step: ISCSI_BLOCK Unmount;
    a_mount_of_an_fc_volume_survives_a_kill_at_each_step: FC Mount;
    a_mount_of_an_fc_volume_that_is_not_needed_any_more_is_undone_after_a_kill_at_each_step: FC Abandon;
    an_unmount_of_an_fc_volume_survives_a_kill_at_each_step: FC Unmount;
    a_mount_of_an_fc_device_survives_a_kill_at_each_step: FC_BLOCK Mount;
    a_mount_of_an_fc_device_that_is_not_needed_any_more_is_undone_after_a_kill_at_each_step: FC_BLOCK Abandon;
    an_unmount_of_an_fc_device_survives_a_kill_at_each_step: FC_BLOCK Unmount;
}
