//! Disks with a fake iscsiadm, and with directories in place of `/dev` and `/sys`. The devices are loop
//! devices.

use std::os::unix::fs::symlink;

use quintlet_kit::task;
use rustix::fs::{CWD, FileType, Mode};

use super::*;
use crate::commands::SystemCommands;
use crate::fc::FcSource;
use crate::host::{Host, Limits};
use crate::iscsi::{Chap, IscsiSource};

/// A target with the portals `10.0.0.1:3260` and `10.0.0.2:3260`. A login makes a session and the links of
/// its LUNs, a logout removes both. Files in `$BASE` change what happens: `fail-<operation>`,
/// `hang-<operation>`.
const ISCSIADM: &str = r#"#!/bin/sh
cd BASE
echo "$*" >> calls
operation=other
for word in "$@"; do
  case $word in --login) operation=login;; --logout) operation=logout;; --discover) operation=discover;; esac
  [ "$previous" = -o ] && operation=$word
  [ "$previous" = -p ] && portal=$word
  [ "$previous" = -T ] && target=$word
  [ "$previous" = -v ] && value=$word
  previous=$word
done
if [ -e hang-$operation ]; then sleep 1000 & echo $! > sleeper; wait; fi
if [ -e fail-$operation ]; then echo "iscsiadm: cannot $operation $value"; exit 8; fi
session=sys/class/iscsi_host/host7/device/session-$portal
case $operation in
  show) printf '# BEGIN RECORD\niface.iscsi_ifacename = default\niface.transport_name = tcp\niface.mtu = 1500\n' ;;
  login)
    connection=$session/connection1:0/iscsi_connection/connection1:0
    mkdir -p $connection $session/iscsi_session/session-$portal sys/class/scsi_host/host7
    echo $target > $session/iscsi_session/session-$portal/targetname
    echo ${portal%:*} > $connection/address; echo ${portal##*:} > $connection/port
    : > sys/class/scsi_host/host7/scan
    for lun in 0 1; do
      [ -e dev/sd$lun ] || continue
      mkdir -p $session/target7:0:0/7:0:0:$lun/block/sd$lun
      ln -sf ../../sd$lun dev/disk/by-path/ip-$portal-iscsi-$target-lun-$lun
    done ;;
  logout)
    [ -e $session ] || exit 21
    rm -r $session dev/disk/by-path/ip-$portal-* ;;
esac
"#;

const RECORDING: &str =
    "#!/bin/sh\ncd BASE\necho \"$(basename $0) $*\" >> calls\n[ ! -e fail-$(basename $0) ]\n";

const IQN: &str = "iqn.2017-05.com.example:a";
const PORTAL: &str = "10.0.0.1:3260";

/// A node with the directories of a machine. Dropped before its loop devices.
struct Machine {
    node: Node,
    _loops: Vec<LoopDevice>,
}

impl Machine {
    /// Makes the devices `sd0` … of the machine.
    fn new(devices: usize) -> Self {
        let node = Node::new();
        let base = node.base.path();
        for dir in ["dev/disk/by-path", "dev/disk/by-id", "sys/block", "sys/class/scsi_host/host3", "tools"] {
            fs::create_dir_all(base.join(dir)).unwrap();
        }
        fs::write(base.join("sys/class/scsi_host/host3/scan"), "").unwrap();
        let mut loops = Vec::new();
        for number in 0..devices {
            let image = base.join(format!("loop{number}"));
            fs::create_dir(&image).unwrap();
            let device = LoopDevice::new(&image);
            let numbers = fs::metadata(&device.0).unwrap().rdev();
            let name = format!("sd{number}");
            let mode = Mode::from_raw_mode(0o600);
            rustix::fs::mknodat(CWD, base.join("dev").join(&name), FileType::BlockDevice, mode, numbers)
                .unwrap();
            let block = base.join("sys/block").join(&name);
            fs::create_dir_all(block.join("device")).unwrap();
            fs::write(block.join("device/delete"), "").unwrap();
            let numbers = (rustix::fs::major(numbers), rustix::fs::minor(numbers));
            fs::write(block.join("dev"), format!("{}:{}\n", numbers.0, numbers.1)).unwrap();
            loops.push(device);
        }
        let machine = Self { node, _loops: loops };
        machine.tool("iscsiadm", ISCSIADM);
        machine.tool("multipath", RECORDING);
        machine.tool("blockdev", RECORDING);
        machine
    }

    fn at(&self, path: &str) -> PathBuf {
        self.node.base.path().join(path)
    }

    fn tool(&self, name: &str, script: &str) {
        let file = self.at("tools").join(name);
        let script = script.replace("BASE", &self.node.base.path().display().to_string());
        fs::write(&file, script).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// A mounter like that of a new process.
    fn mounter(&self) -> Mounter {
        let commands = SystemCommands { first: Some(self.at("tools")) };
        let limits = Limits {
            iscsiadm: Duration::from_secs(20),
            device: Duration::from_millis(50),
            multipath: Duration::from_millis(50),
        };
        let host = Host { dev: self.at("dev"), sys: self.at("sys"), limits };
        Mounter::with_commands(&self.node.root(), Arc::new(commands)).on_host(host)
    }

    fn set(&self, file: &str) {
        fs::write(self.at(file), "").unwrap();
    }

    fn unset(&self, file: &str) {
        fs::remove_file(self.at(file)).unwrap();
    }

    /// Returns the calls since the last one.
    fn calls(&self) -> Vec<String> {
        let calls = fs::read_to_string(self.at("calls")).unwrap_or_default();
        let _none = fs::remove_file(self.at("calls"));
        calls.lines().map(str::to_owned).collect()
    }

    fn is_deleted(&self, device: &str) -> bool {
        fs::read_to_string(self.at("sys/block").join(device).join("device/delete")).unwrap() == "1"
    }

    fn global(&self, path: &str) -> PathBuf {
        self.node.root().join("plugins/kubernetes.io").join(path)
    }
}

fn iscsi(lun: i32) -> Volume {
    let source = IscsiSource {
        target_portal: "10.0.0.1".to_owned(),
        portals: Vec::new(),
        iqn: IQN.to_owned(),
        lun,
        interface: "default".to_owned(),
        initiator_name: String::new(),
        chap_discovery: false,
        chap_session: false,
        secret: None,
        fs_type: None,
    };
    volume(Source::Iscsi(source))
}

fn changed(change: impl FnOnce(&mut IscsiSource)) -> Volume {
    let mut volume = iscsi(0);
    if let Source::Iscsi(source) = &mut volume.source {
        change(source);
    }
    volume
}

async fn attach(mounter: &Mounter, volume: &Volume) -> Result<Option<PathBuf>, String> {
    mounter.attach(volume, &Chap::default()).await.map_err(|error| error.to_string())
}

async fn mount(mounter: &Mounter, volume: &Volume, pod: &PodUid) -> PathBuf {
    let device = attach(mounter, volume).await.unwrap();
    mounter.stage(volume, device.as_deref(), None).await.unwrap();
    mounter.publish(volume, pod, group(4711), &CancellationToken::new()).await.unwrap();
    mounter.paths().host_path(volume, pod).unwrap()
}

async fn detach(mounter: &Mounter, volume: &Volume) -> Result<(), String> {
    let detached = mounter.detach(volume.plugin(), volume.is_block, &volume.device_name()).await;
    detached.map_err(|error| error.to_string())
}

fn with(calls: &[String], word: &str) -> usize {
    calls.iter().filter(|call| call.contains(word)).count()
}

#[tokio::test]
async fn volumes_of_a_target_share_a_session_which_ends_with_the_last_volume() {
    let machine = Machine::new(2);
    let mounter = machine.mounter();
    let disk = iscsi(0);
    let block = Volume { is_block: true, name: "pv-2".to_owned(), ..iscsi(1) };
    let path = mount(&mounter, &disk, &uid(1)).await;
    assert_eq!(path, machine.node.root().join("pods/u1/volumes/kubernetes.io~iscsi/pv-1"));
    fs::write(path.join("f"), "kept").unwrap();
    assert_eq!(fs::metadata(path.join("f")).unwrap().gid(), 4711);
    let global = machine.global(&format!("iscsi/iface-default/{PORTAL}-{IQN}-lun-0"));
    assert!(is_mounted(&global).unwrap());
    let record = format!("-p {PORTAL} -T {IQN} -I default");
    assert_eq!(
        machine.calls(),
        [
            "-m iface -I default -o show".to_owned(),
            format!("-m discoverydb -t sendtargets -p {PORTAL} -I default -o new"),
            format!("-m discoverydb -t sendtargets -p {PORTAL} -I default --discover"),
            format!("-m node {record} -o update -n node.session.scan -v manual"),
            format!("-m node {record} --login"),
            format!("-m node {record} -o update -n node.startup -v manual"),
        ]
    );
    assert_eq!(fs::read_to_string(machine.at("sys/class/scsi_host/host7/scan")).unwrap(), "0 0 0");

    let device = attach(&mounter, &block).await.unwrap();
    BlockMapper::of(&mounter).map(&block, device.as_deref(), &uid(2)).await.unwrap();
    assert_eq!(with(&machine.calls(), "--login"), 0, "the session exists");
    assert_eq!(fs::read_to_string(machine.at("sys/class/scsi_host/host7/scan")).unwrap(), "0 0 1");
    let link = mounter.paths().host_path(&block, &uid(2)).unwrap();
    assert_eq!(fs::canonicalize(link).unwrap(), fs::canonicalize(machine.at("dev/sd1")).unwrap());

    // A new process finds both.
    let mounter = machine.mounter();
    let (volumes, devices) = found::read(&machine.node.root()).unwrap();
    let in_pod = |n, volume: &Volume| FoundInPod {
        pod: uid(n),
        plugin: Plugin::Iscsi,
        name: volume.name.clone(),
        is_block: volume.is_block,
        device: Some(volume.device_name()),
    };
    assert_eq!(volumes, [in_pod(1, &disk), in_pod(2, &block)]);
    let device = |volume: &Volume| FoundDevice {
        plugin: Plugin::Iscsi,
        name: volume.device_name(),
        is_block: volume.is_block,
        label: None,
    };
    assert_eq!(devices, [device(&disk), device(&block)]);
    mount(&mounter, &disk, &uid(1)).await;
    assert_eq!(machine.calls(), Vec::<String>::new(), "a mounted disk is attached");

    assert!(detach(&mounter, &disk).await.unwrap_err().contains("is still mounted by other references"));
    mounter.unpublish(Plugin::Iscsi, &uid(1), "pv-1").await.unwrap();
    detach(&mounter, &disk).await.unwrap();
    assert_eq!(machine.calls(), Vec::<String>::new(), "another volume has the session");
    assert!(machine.is_deleted("sd0") && !machine.is_deleted("sd1") && !global.exists());

    assert!(detach(&mounter, &block).await.is_err(), "a pod has the device");
    BlockMapper::of(&mounter)
        .unmap(Plugin::Iscsi, &uid(2), "pv-2", Some(&block.device_name()))
        .await
        .unwrap();
    detach(&mounter, &block).await.unwrap();
    assert_eq!(
        machine.calls(),
        [format!("-m node {record} --logout"), format!("-m node {record} -o delete")]
    );
    assert_eq!(found::read(&machine.node.root()).unwrap(), (Vec::new(), Vec::new()));
    detach(&mounter, &block).await.unwrap();
    assert_eq!(machine.calls(), Vec::<String>::new());
}

#[tokio::test]
async fn a_block_disk_whose_session_and_link_are_gone_is_detached() {
    // kubernetes/kubernetes#141863: the volume stayed in use.
    let machine = Machine::new(2);
    let mounter = machine.mounter();
    let block = Volume { is_block: true, ..iscsi(1) };
    let device = attach(&mounter, &block).await.unwrap();
    let mapper = BlockMapper::of(&mounter);
    mapper.map(&block, device.as_deref(), &uid(1)).await.unwrap();
    mapper.unmap(Plugin::Iscsi, &uid(1), "pv-1", Some(&block.device_name())).await.unwrap();
    let session = machine.at("sys/class/iscsi_host/host7/device").join(format!("session-{PORTAL}"));
    fs::remove_dir_all(session).unwrap();
    for lun in 0..2 {
        machine.unset(&format!("dev/disk/by-path/ip-{PORTAL}-iscsi-{IQN}-lun-{lun}"));
    }
    detach(&mounter, &block).await.unwrap();
    assert_eq!(found::read(&machine.node.root()).unwrap(), (Vec::new(), Vec::new()));
}

#[tokio::test]
async fn a_failed_login_has_the_kubelets_text_and_leaves_no_record() {
    let machine = Machine::new(1);
    let (mounter, disk) = (machine.mounter(), iscsi(0));
    let prefix = "failed to get any path for iscsi disk, last err seen:\n";
    machine.set("fail-login");
    assert_eq!(
        attach(&mounter, &disk).await,
        Err(format!(
            "{prefix}iscsi: failed to attach disk: Error: iscsiadm: cannot login manual\n (exit status 8)"
        )
        .replace(" manual", " "))
    );
    assert!(machine.calls().last().unwrap().ends_with("-I default -o delete"));
    machine.unset("fail-login");
    machine.set("fail-discover");
    assert_eq!(
        attach(&mounter, &disk).await,
        Err(format!(
            "{prefix}iscsi: failed to sendtargets to portal {PORTAL} output: iscsiadm: cannot discover \n, err exit status 8"
        ))
    );
    machine.unset("fail-discover");
    // The LUN does not exist.
    assert_eq!(
        attach(&mounter, &iscsi(5)).await,
        Err(format!(
            "{prefix}Timed out waiting for device at path /dev/disk/by-path/ip-{PORTAL}-iscsi-{IQN}-lun-5 after 0s"
        ))
    );
    machine.calls();
    // The session belongs to both directories.
    detach(&mounter, &disk).await.unwrap();
    assert_eq!(with(&machine.calls(), "--logout"), 0);
    detach(&mounter, &iscsi(5)).await.unwrap();
    assert_eq!(with(&machine.calls(), "--logout"), 1);
    machine.set("fail-show");
    assert_eq!(attach(&mounter, &disk).await, Err("exit status 8".to_owned()));
    assert!(!machine.global(&format!("iscsi/iface-default/{PORTAL}-{IQN}-lun-0")).exists());
}

#[tokio::test]
async fn a_hanging_login_is_killed_with_its_children_and_delays_no_other_target() {
    let machine = Machine::new(1);
    machine.set("hang-login");
    let mut mounter = machine.mounter();
    mounter.host.limits.iscsiadm = Duration::from_secs(10);
    let (slow, disk) = (mounter.clone(), iscsi(0));
    let hanging = task::spawn("login", async move { attach(&slow, &disk).await });
    while !machine.at("sleeper").exists() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    machine.unset("hang-login");
    attach(&mounter, &changed(|source| source.iqn = "iqn.2017-05.com.example:b".to_owned())).await.unwrap();
    assert!(!hanging.is_finished());
    let error = hanging.await.unwrap().unwrap_err();
    assert!(error.ends_with("iscsi: failed to attach disk: Error:  (signal: killed)"), "{error}");
    let sleeper = fs::read_to_string(machine.at("sleeper")).unwrap();
    killed(sleeper.trim()).await;
    attach(&mounter, &iscsi(0)).await.unwrap();
}

#[tokio::test]
async fn a_node_without_iscsiadm_says_so_and_changes_nothing() {
    let machine = Machine::new(0);
    let commands = Arc::new(FakeCommands { are_missing: true, ..FakeCommands::default() });
    let mounter = Mounter::with_commands(&machine.node.root(), commands);
    let text = "exec: \"iscsiadm\": executable file not found in $PATH";
    assert_eq!(attach(&mounter, &iscsi(0)).await, Err(text.to_owned()));
    assert!(!machine.global("iscsi").exists());
    // What an earlier process left is removed, as there is no session.
    fs::create_dir_all(machine.global(&format!("iscsi/{}", iscsi(0).device_name()))).unwrap();
    let host = Host { sys: machine.at("sys"), ..Host::default() };
    detach(&mounter.on_host(host), &iscsi(0)).await.unwrap();
    assert_eq!(found::read(&machine.node.root()).unwrap().1, []);
}

#[tokio::test]
async fn credentials_reach_the_records_and_no_error() {
    let machine = Machine::new(1);
    let mounter = machine.mounter();
    let disk = changed(|source| (source.chap_discovery, source.chap_session) = (true, true));
    let chap = Chap(
        [
            "discovery.sendtargets.auth.username",
            "node.session.auth.password",
            "node.session.auth.password_in",
        ]
        .into_iter()
        .zip(["u5er", "s3cret", ""])
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect(),
    );
    mounter.attach(&disk, &chap).await.unwrap();
    let calls = machine.calls();
    let set: Vec<&str> =
        calls.iter().filter_map(|call| call.split_once(" -n ")).map(|(_, set)| set).collect();
    assert_eq!(
        set,
        [
            "discovery.sendtargets.auth.authmethod -v CHAP",
            "discovery.sendtargets.auth.username -v u5er",
            "node.session.scan -v manual",
            "node.session.auth.authmethod -v CHAP",
            "node.session.auth.password -v s3cret",
            "node.startup -v manual",
        ]
    );
    let file = machine.global(&format!("iscsi/{}/iscsi.json", disk.device_name()));
    assert!(!fs::read_to_string(file).unwrap().contains("s3cret"));
    detach(&mounter, &disk).await.unwrap();
    machine.tool(
        "iscsiadm",
        &ISCSIADM.replace("cd BASE", "cd BASE\ncase \"$*\" in *s3cret*) echo no s3cret; exit 6;; esac"),
    );
    let error = mounter.attach(&disk, &chap).await.unwrap_err().to_string();
    assert!(
        error.ends_with(
            "iscsi: failed to update node session key \"node.session.auth.password\" error: no <redacted>\n"
        ),
        "{error}"
    );
}

#[tokio::test]
async fn a_volume_with_an_initiator_name_has_its_own_interface_until_it_is_detached() {
    let machine = Machine::new(1);
    let mounter = machine.mounter();
    let disk = changed(|source| source.initiator_name = "iqn.me".to_owned());
    let iface = format!("{PORTAL}:pv-1");
    attach(&mounter, &disk).await.unwrap();
    let calls = machine.calls();
    assert_eq!(
        calls[..5],
        [
            "-m iface -I default -o show".to_owned(),
            format!("-m iface -I {iface} -o new"),
            format!("-m iface -I {iface} -o update -n iface.initiatorname -v iqn.me"),
            format!("-m iface -I {iface} -o update -n iface.mtu -v 1500"),
            format!("-m iface -I {iface} -o update -n iface.transport_name -v tcp"),
        ]
    );
    // A process that ends before the mount is replaced by one that detaches the disk.
    let mounter = machine.mounter();
    let found = found::read(&machine.node.root()).unwrap().1;
    assert_eq!(found[0].name, format!("iface-{iface}/{PORTAL}-{IQN}-lun-0"));
    mounter.detach(Plugin::Iscsi, false, &found[0].name).await.unwrap();
    let calls = machine.calls();
    assert_eq!(calls[0], format!("-m node -p {PORTAL} -T {IQN} -I {iface} --logout"));
    assert_eq!(calls.last().unwrap(), &format!("-m iface -I {iface} -o delete"));
}

#[tokio::test]
async fn a_disk_with_several_portals_is_used_through_its_multipath_device() {
    let machine = Machine::new(1);
    let mounter = machine.mounter();
    let disk = changed(|source| source.portals = vec!["10.0.0.2".to_owned()]);
    let first = attach(&mounter, &disk).await.unwrap();
    let link = machine.at("dev/disk/by-path").join(format!("ip-{PORTAL}-iscsi-{IQN}-lun-0"));
    assert_eq!(first, Some(link), "multipathd does not run");
    assert_eq!(with(&machine.calls(), "--login"), 2);
    fs::create_dir_all(machine.at("sys/block/dm-0/slaves/sd0")).unwrap();
    assert_eq!(attach(&mounter, &disk).await.unwrap(), Some(machine.at("dev/dm-0")));
    machine.calls();
    detach(&mounter, &disk).await.unwrap();
    let calls = machine.calls();
    assert_eq!(calls[0], format!("multipath -f {}", machine.at("dev/dm-0").display()));
    assert_eq!(with(&calls, "--logout"), 2);
    assert!(machine.is_deleted("sd0"));
}

#[tokio::test]
async fn a_device_that_is_mounted_elsewhere_is_neither_removed_nor_logged_out() {
    let machine = Machine::new(1);
    let (mounter, disk) = (machine.mounter(), iscsi(0));
    mount(&mounter, &disk, &uid(1)).await;
    let elsewhere = machine.at("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let global = machine.global(&format!("iscsi/{}", disk.device_name()));
    rustix::mount::mount_bind(&global, &elsewhere).unwrap();
    mounter.unpublish(Plugin::Iscsi, &uid(1), "pv-1").await.unwrap();
    machine.calls();
    detach(&mounter, &disk).await.unwrap();
    assert!(!machine.is_deleted("sd0") && machine.calls().is_empty() && !global.exists());
}

fn fc(source: FcSource) -> Volume {
    volume(Source::Fc(source))
}

fn ports(wwns: &[&str]) -> FcSource {
    let target_wwns = wwns.iter().map(|wwn| (*wwn).to_owned()).collect();
    FcSource { target_wwns, lun: Some(0), wwids: Vec::new(), fs_type: Some("ext4".to_owned()) }
}

#[tokio::test]
async fn an_fc_disk_is_searched_by_ports_and_identifiers_and_scanned_for() {
    let machine = Machine::new(1);
    let mounter = machine.mounter();
    let disk = fc(ports(&["5a", "5b"]));
    assert_eq!(attach(&mounter, &disk).await, Err("no fc disk found".to_owned()));
    assert_eq!(fs::read_to_string(machine.at("sys/class/scsi_host/host3/scan")).unwrap(), "- - -");
    assert!(!machine.global("fc").exists());
    // Only the first of two ports has a path.
    symlink("../../sd0", machine.at("dev/disk/by-path/pci-0000:41:00.0-fc-0x5a-lun-0")).unwrap();
    let device = fs::canonicalize(machine.at("dev/sd0")).unwrap();
    assert_eq!(attach(&mounter, &disk).await, Ok(Some(device.clone())));
    symlink("../../sd0", machine.at("dev/disk/by-id/scsi-A_VENDOR_36")).unwrap();
    let by_id = FcSource { target_wwns: Vec::new(), wwids: vec!["A VENDOR 36".to_owned()], ..ports(&[]) };
    assert_eq!(attach(&mounter, &fc(by_id.clone())).await, Ok(Some(device)));
    fs::create_dir_all(machine.at("sys/block/dm-3/slaves/sd0")).unwrap();
    let absent = machine.at("dev/dm-3");
    let text = format!("device {} does not exist", absent.display());
    assert_eq!(attach(&mounter, &fc(by_id)).await, Err(text));
    fs::write(&absent, "").unwrap();
    assert_eq!(attach(&mounter, &disk).await, Ok(Some(absent)));
    let none = fc(FcSource { lun: None, ..ports(&["5a"]) });
    let text = "fc: no fc disk information found. failed to make a new";
    assert_eq!(mounter.check(&none).await.unwrap_err().to_string(), format!("{text} mounter"));
    let none = Volume { is_block: true, ..none };
    assert_eq!(
        BlockMapper::of(&mounter).check(&none).await.unwrap_err().to_string(),
        format!("{text} mapper")
    );
}

#[tokio::test]
async fn an_fc_disk_is_mounted_for_its_pods_and_removed_after_the_last_one() {
    let machine = Machine::new(1);
    symlink("../../sd0", machine.at("dev/disk/by-path/fc-0x5a-lun-0")).unwrap();
    let (mounter, disk) = (machine.mounter(), fc(ports(&["5a"])));
    let read_only = Volume { read_only: true, ..disk.clone() };
    let path = mount(&mounter, &disk, &uid(1)).await;
    fs::write(path.join("f"), "kept").unwrap();
    let path = mount(&mounter, &read_only, &uid(2)).await;
    assert_eq!(fs::read_to_string(path.join("f")).unwrap(), "kept");
    assert_eq!(fs::write(path.join("g"), "").unwrap_err().kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    assert!(is_mounted(&machine.global("fc/5a-lun-0")).unwrap());
    let (volumes, devices) = found::read(&machine.node.root()).unwrap();
    assert_eq!(
        volumes.iter().map(|found| found.device.as_deref()).collect::<Vec<_>>(),
        [Some("5a-lun-0"); 2]
    );
    assert_eq!(
        devices,
        [FoundDevice { plugin: Plugin::Fc, name: "5a-lun-0".to_owned(), is_block: false, label: None }]
    );
    for pod in [uid(1), uid(2)] {
        assert!(detach(&mounter, &disk).await.unwrap_err().contains("is still mounted by other references"));
        mounter.unpublish(Plugin::Fc, &pod, "pv-1").await.unwrap();
    }
    detach(&mounter, &disk).await.unwrap();
    assert_eq!(machine.calls(), [format!("blockdev --flushbufs {}", machine.at("dev/sd0").display())]);
    assert!(machine.is_deleted("sd0"));
    assert_eq!(found::read(&machine.node.root()).unwrap(), (Vec::new(), Vec::new()));
}

#[tokio::test]
async fn an_fc_multipath_device_that_is_busy_is_flushed_again_and_its_paths_are_removed() {
    let machine = Machine::new(1);
    symlink("../../sd0", machine.at("dev/disk/by-path/fc-0x5a-lun-0")).unwrap();
    fs::create_dir_all(machine.at("sys/block/dm-0/slaves/sd0")).unwrap();
    symlink("sd0", machine.at("dev/dm-0")).unwrap();
    let (mounter, disk) = (machine.mounter(), Volume { is_block: true, ..fc(ports(&["5a"])) });
    let device = attach(&mounter, &disk).await.unwrap();
    assert_eq!(device, Some(machine.at("dev/dm-0")));
    BlockMapper::of(&mounter).map(&disk, device.as_deref(), &uid(1)).await.unwrap();
    BlockMapper::of(&mounter).unmap(Plugin::Fc, &uid(1), "pv-1", Some("5a-lun-0")).await.unwrap();
    machine.set("fail-multipath");
    let error = detach(&mounter, &disk).await.unwrap_err();
    let map = machine.at("dev/dm-0").display().to_string();
    assert!(error.contains(&format!("failed to flush multipath device {map}")), "{error}");
    assert!(!machine.is_deleted("sd0"));
    machine.unset("fail-multipath");
    machine.calls();
    // A new process completes the work.
    detach(&machine.mounter(), &disk).await.unwrap();
    assert_eq!(machine.calls()[0], format!("multipath -f {map}"));
    assert!(machine.is_deleted("sd0") && !machine.global("fc/volumeDevices/5a-lun-0").exists());
}

#[tokio::test]
async fn a_disk_is_mounted_with_its_label_and_the_volume_of_a_pod_has_no_such_option() {
    let label = "system_u:object_r:container_file_t:s0:c1,c2";
    // The options that mount(8) gets of the volume, with and without a label.
    for (read_only, label, expected) in [
        (false, None, "defaults,noatime"),
        (false, Some(label), "context=\"system_u:object_r:container_file_t:s0:c1,c2\",defaults,noatime"),
        (true, Some(label), "context=\"system_u:object_r:container_file_t:s0:c1,c2\",defaults,noatime,ro"),
    ] {
        let machine = Machine::new(1);
        symlink("../../sd0", machine.at("dev/disk/by-path/fc-0x5a-lun-0")).unwrap();
        machine.tool("mount", RECORDING);
        machine.tool("blkid", "#!/bin/sh\necho TYPE=ext4\n");
        machine.tool("fsck", "#!/bin/sh\n");
        let (mounter, disk) = (machine.mounter(), fc(ports(&["5a"])));
        let disk = Volume { mount_options: vec!["noatime".to_owned()], read_only, ..disk };
        let device = attach(&mounter, &disk).await.unwrap();
        mounter.stage(&disk, device.as_deref(), label).await.unwrap();
        let (device, target) = (device.unwrap(), machine.global("fc/5a-lun-0"));
        let staged = format!("mount -t ext4 -o {expected} {} {}", device.display(), target.display());
        assert_eq!(machine.calls(), [staged]);
        rustix::mount::mount_bind(machine.at("tools"), &target).unwrap();
        mounter.publish(&disk, &uid(1), none(), &CancellationToken::new()).await.unwrap();
        let path = mounter.paths().host_path(&disk, &uid(1)).unwrap();
        let options = if read_only { "bind,remount,noatime,ro" } else { "bind,remount,noatime" };
        assert_eq!(machine.calls(), [format!("mount -o {options} {}", path.display())]);
    }
}

#[tokio::test]
async fn a_disk_whose_name_leads_out_of_its_directory_is_refused() {
    let machine = Machine::new(0);
    let mounter = machine.mounter();
    for volume in [
        changed(|source| source.target_portal = "../../x".to_owned()),
        changed(|source| source.iqn = "iqn.2017-05.com.example:a/../../b".to_owned()),
        changed(|source| source.interface = "a/b".to_owned()),
        fc(ports(&["../.."])),
        fc(FcSource { target_wwns: Vec::new(), wwids: vec!["..".to_owned()], ..ports(&[]) }),
        fc(FcSource { target_wwns: Vec::new(), wwids: vec!["volumeDevices".to_owned()], ..ports(&[]) }),
    ] {
        let error = mounter.check(&volume).await.unwrap_err().to_string();
        assert!(error.ends_with("cannot be part of a path"), "{error}");
        assert!(attach(&mounter, &volume).await.is_err());
    }
    assert!(!machine.global("").exists());
}
