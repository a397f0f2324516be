//! Volumes of the driver's process: real mounts, faults, and ends of the node agent between steps.

use std::fs;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::FutureExt as _;
use pod_sync_csi::error::Certainty;
use pod_sync_csi::mount::Expand;
use pod_sync_csi::paths::Root;
use pod_sync_csi::reconstruct;
use pod_sync_csi::volume::Secrets;
use pod_sync_csi::volume_data::LifecycleMode;
use quintlet_csi_driver::fault::{self, Fault};
use quintlet_csi_driver::volumes;
use quintlet_kit::failpoint::{self, Failpoint, Observer, ProcessEnded};

use crate::common::{Agent, DRIVER, Machine, POD, publish, stage, volume};

async fn mount_all(agent: &Agent) {
    agent.mounter.stage(&stage()).await.unwrap();
    agent.mounter.publish(&publish()).await.unwrap();
}

async fn unmount_all(machine: &Machine, agent: &Agent) {
    agent.mounter.unpublish(POD, "pv-1").await.unwrap();
    agent.mounter.unstage(&machine.global_mount()).await.unwrap();
}

/// Returns the remaining entries in the directories of the CSI plugin and of the pod's volumes, apart from
/// the parents of all volumes.
fn left(machine: &Machine) -> Vec<String> {
    let parents = ["plugins/kubernetes.io/csi", "pods"];
    let all = parents.iter().flat_map(|dir| machine.tree(dir));
    let volumes = "/volumes/kubernetes.io~csi";
    let is_parent = |path: &str| {
        path.ends_with(DRIVER) || path.ends_with(POD) || path.ends_with("/volumes") || path.ends_with(volumes)
    };
    all.filter(|path| !is_parent(path)).collect()
}

#[tokio::test]
async fn a_volume_is_staged_published_and_removed_with_the_kubelets_files() {
    let machine = Machine::new();
    let agent = machine.agent();
    let _driver = machine.driver(&[]);
    agent.registered().await;

    assert_eq!(agent.mounter.stage(&stage()).await.unwrap(), Some(machine.global_mount()));
    let published = agent.mounter.publish(&publish()).await.unwrap();
    assert_eq!((published.path.clone(), published.group_applied), (machine.mount(), false));
    assert_eq!(machine.mounts(), [machine.global_mount(), machine.mount()]);
    fs::write(machine.mount().join("data"), "kept").unwrap();
    let data = fs::read_to_string(machine.global_mount().with_file_name("vol_data.json")).unwrap();
    assert_eq!(data, format!("{{\"driverName\":\"{DRIVER}\",\"volumeHandle\":\"vol-1\"}}\n"));
    let data = fs::read_to_string(machine.mount().with_file_name("vol_data.json")).unwrap();
    let attachment = pod_sync_csi::paths::attachment_name("vol-1", DRIVER, "node-1");
    let expected = format!(
        "{{\"attachmentID\":\"{attachment}\",\"driverName\":\"{DRIVER}\",\"nodeName\":\"node-1\",\
         \"specVolID\":\"pv-1\",\"volumeHandle\":\"vol-1\",\"volumeLifecycleMode\":\"Persistent\"}}\n"
    );
    assert_eq!(data, expected);

    let stats = agent.mounter.stats(DRIVER, "vol-1", &published.path).await.unwrap();
    assert!(stats.bytes.unwrap().total > 0 && stats.inodes.unwrap().used > 0, "{stats:?}");
    let expand = Expand {
        volume: volume(),
        pod: POD.to_owned(),
        is_block: false,
        bytes: 1 << 30,
        secrets: Secrets::default(),
    };
    assert_eq!(agent.mounter.expand(&expand).await.unwrap(), 1 << 30);

    // Both operations can be repeated.
    mount_all(&agent).await;
    assert_eq!(machine.mounts().len(), 2);
    unmount_all(&machine, &agent).await;
    unmount_all(&machine, &agent).await;
    assert_eq!((machine.mounts(), left(&machine)), (vec![], vec![]));
    mount_all(&agent).await;
    assert_eq!(fs::read_to_string(machine.mount().join("data")).unwrap(), "kept");
    unmount_all(&machine, &agent).await;
}

#[tokio::test]
async fn a_read_only_volume_on_tmpfs_and_a_volume_on_a_loop_device_are_mounted() {
    let machine = Machine::new();
    let agent = machine.agent();
    let _driver = machine.driver(&[]);
    agent.registered().await;
    for (medium, read_only) in [("tmpfs", true), ("loop", false)] {
        let mut args = (stage(), publish());
        for volume in [&mut args.0.volume, &mut args.1.volume] {
            volume.handle = format!("vol-{medium}");
            volume.attributes.insert(volumes::MEDIUM.to_owned(), medium.to_owned());
            volume.read_only = read_only;
        }
        let staged = agent.mounter.stage(&args.0).await.unwrap().unwrap();
        let published = agent.mounter.publish(&args.1).await.unwrap();
        let written = fs::write(published.path.join("file"), "");
        assert_eq!(written.is_err(), read_only, "{medium}: {written:?}");
        agent.mounter.unpublish(POD, "pv-1").await.unwrap();
        agent.mounter.unstage(&staged).await.unwrap();
        assert_eq!((machine.mounts(), left(&machine)), (vec![], vec![]), "{medium}");
    }
}

#[tokio::test]
async fn a_driver_that_does_not_stage_gets_volumes_published_only() {
    let machine = Machine::new();
    let agent = machine.agent();
    let _driver = machine.driver(&["--capabilities=VOLUME_MOUNT_GROUP"]);
    agent.registered().await;
    assert_eq!(agent.mounter.stage(&stage()).await.unwrap(), None);
    let mut args = publish();
    args.fs_group = Some(2000);
    args.secrets = Secrets([("key".to_owned(), "hunter2".to_owned())].into());
    assert!(agent.mounter.publish(&args).await.unwrap().group_applied);
    let contexts = fs::read_to_string(machine.state.join("contexts.log")).unwrap();
    assert!(contexts.contains("volume_mount_group: \\\"2000\\\""), "{contexts}");
    assert!(contexts.contains("[\"key\"]"), "{contexts}");
    for name in ["stats", "expand"] {
        let error = match name {
            "stats" => agent.mounter.stats(DRIVER, "vol-1", &machine.mount()).await.map(drop).unwrap_err(),
            _ => {
                let pod = POD.to_owned();
                let expand =
                    Expand { volume: volume(), pod, is_block: false, bytes: 1, secrets: Secrets::default() };
                agent.mounter.expand(&expand).await.map(drop).unwrap_err()
            }
        };
        assert!(
            error.to_string().ends_with(&format!("is not supported by the CSI driver {DRIVER}")),
            "{error}"
        );
    }
    unmount_all(&machine, &agent).await;
    assert_eq!((machine.mounts(), left(&machine)), (vec![], vec![]));
    let calls = fault::calls(&machine.state);
    assert!(!calls.iter().any(|call| call.contains("stage")), "{calls:?}");
}

#[tokio::test]
async fn an_inline_volume_is_published_without_staging() {
    let machine = Machine::new();
    let agent = machine.agent();
    let _driver = machine.driver(&[]);
    agent.registered().await;
    let mut args = publish();
    args.volume.lifecycle = LifecycleMode::Ephemeral;
    args.volume.handle = pod_sync_csi::paths::inline_handle(POD, "pv-1");
    agent.mounter.publish(&args).await.unwrap();
    let found = reconstruct::published(&Root::new(&machine.root)).unwrap();
    let [volume] = &found[..] else { panic!("{found:?}") };
    let data = volume.found.data.as_ref().unwrap().as_ref().unwrap();
    assert_eq!((volume.pod.as_str(), volume.name.as_str(), data.is_ephemeral()), (POD, "pv-1", true));
    agent.mounter.unpublish(POD, "pv-1").await.unwrap();
    assert_eq!((machine.mounts(), left(&machine)), (vec![], vec![]));
}

#[tokio::test]
async fn without_its_driver_no_volume_is_mounted_or_removed() {
    let machine = Machine::new();
    let agent = machine.agent();
    let error = agent.mounter.publish(&publish()).await.unwrap_err();
    let missing = format!("driver name {DRIVER} not found in the list of registered CSI drivers");
    assert_eq!(
        error.text(),
        format!("kubernetes.io/csi: mounter.SetUpAt failed to get CSI client: {missing}")
    );
    assert_eq!(error.certainty(), Certainty::Transient);
    assert_eq!(left(&machine), Vec::<String>::new());
    let _driver = machine.driver(&[]);
    agent.registered().await;
    mount_all(&agent).await;
    let before = (machine.mounts(), left(&machine));
    fs::remove_file(machine.root.join("plugins_registry/reg.sock")).unwrap();
    crate::common::eventually("the driver is deregistered", || agent.drivers.get(DRIVER).is_err()).await;
    let error = agent.mounter.unpublish(POD, "pv-1").await.unwrap_err();
    assert_eq!(
        error.text(),
        format!("kubernetes.io/csi: Unmounter.TearDownAt failed to get CSI client: {missing}")
    );
    assert_eq!(error.certainty(), Certainty::Transient);
    assert_eq!((machine.mounts(), left(&machine)), before);
    volumes::unmount(&machine.mount()).unwrap();
    let before = (machine.mounts(), left(&machine));
    let error = agent.mounter.unstage(&machine.global_mount()).await.unwrap_err();
    let step = "attacher.UnmountDevice failed to create newCsiDriverClient";
    assert_eq!(error.text(), format!("kubernetes.io/csi: {step}: {missing}"));
    assert_eq!(error.certainty(), Certainty::Transient);
    assert_eq!((machine.mounts(), left(&machine)), before);
}

/// Injects every fault into every mutating call. The error states what is certain. After the fault, both
/// mounting again and unmounting succeed and leave nothing.
#[tokio::test]
async fn after_every_fault_the_volume_can_be_mounted_again_and_unmounted() {
    let faults = [
        Fault::Hang,
        Fault::HangAfter,
        Fault::DieBefore,
        Fault::DieAfter,
        Fault::Code(13),
        Fault::CodeAfter(13),
        Fault::Code(10),
        Fault::CodeAfter(4),
        Fault::Code(14),
    ];
    for call in ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"] {
        for fault in &faults {
            one_fault(call, fault).await;
        }
    }
}

/// Injects each gRPC code into every mutating call, before and after its effect.
#[tokio::test]
async fn after_each_grpc_code_the_volume_can_be_mounted_again_and_unmounted() {
    for call in ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"] {
        for code in 1..=16 {
            for fault in [Fault::Code(code), Fault::CodeAfter(code)] {
                one_fault(call, &fault).await;
            }
        }
    }
}

/// gRPC codes after which the driver may have executed the call.
const UNCERTAIN: [i32; 5] = [1, 4, 8, 10, 14];

/// Names of the gRPC codes from 1 on, as Go prints them.
const NAMES: [&str; 16] = [
    "Canceled",
    "Unknown",
    "InvalidArgument",
    "DeadlineExceeded",
    "NotFound",
    "AlreadyExists",
    "PermissionDenied",
    "ResourceExhausted",
    "FailedPrecondition",
    "Aborted",
    "OutOfRange",
    "Unimplemented",
    "Internal",
    "Unavailable",
    "DataLoss",
    "Unauthenticated",
];

async fn one_fault(call: &str, fault: &Fault) {
    let machine = Machine::new();
    let agent = machine.agent();
    let mut driver = machine.driver(&[]);
    agent.registered().await;
    fault::set(&machine.state, &[(call, fault.clone())]).unwrap();
    // Only the call that hangs has a short limit: any other one takes long on a busy machine, too.
    let limited = match fault {
        Fault::Hang | Fault::HangAfter => agent.impatient(),
        _ => agent.mounter.clone(),
    };
    let mounter = |step: &str| if step == call { &limited } else { &agent.mounter };
    let staged = mounter("NodeStageVolume").stage(&stage()).await;
    let published = match &staged {
        Ok(_) => mounter("NodePublishVolume").publish(&publish()).await.map(drop),
        Err(_) => Ok(()),
    };
    let error = match call {
        "NodeStageVolume" => staged.unwrap_err(),
        "NodePublishVolume" => published.unwrap_err(),
        "NodeUnpublishVolume" => limited.unpublish(POD, "pv-1").await.unwrap_err(),
        _ => {
            agent.mounter.unpublish(POD, "pv-1").await.unwrap();
            limited.unstage(&machine.global_mount()).await.unwrap_err()
        }
    };
    let context = format!("{call} {fault:?}: {}", error.text());
    // A driver that says that it did nothing, and whose mount is there, leaves the volume uncertain.
    let is_final = matches!(fault, Fault::Code(code) if !UNCERTAIN.contains(code));
    let unmounting = call.starts_with("NodeUn");
    let expected = if is_final && !unmounting { Certainty::Finished } else { Certainty::Uncertain };
    assert_eq!(error.certainty(), expected, "{context}");
    let text = match fault {
        Fault::Hang | Fault::HangAfter => {
            "rpc error: code = DeadlineExceeded desc = context deadline exceeded".to_owned()
        }
        Fault::DieBefore | Fault::DieAfter => "rpc error: code = Unavailable desc = ".to_owned(),
        Fault::Code(code) | Fault::CodeAfter(code) => {
            let name = NAMES[usize::try_from(*code - 1).unwrap()];
            format!("rpc error: code = {name} desc = injected by the test")
        }
        Fault::Lie => unreachable!("no call fails"),
    };
    assert!(error.text().contains(&text), "{context}");
    if !unmounting && !is_final {
        // An unmount needs the metadata of the volume.
        let mount = if call == "NodeStageVolume" { machine.global_mount() } else { machine.mount() };
        assert!(mount.with_file_name("vol_data.json").exists(), "{context}");
    }
    if call == "NodeStageVolume" && is_final {
        assert_eq!(left(&machine), Vec::<String>::new(), "{context}");
    }
    fault::set(&machine.state, &[]).unwrap();
    if matches!(fault, Fault::DieBefore | Fault::DieAfter) {
        driver.kill();
        driver = machine.driver(&["--node-id=after-the-fault"]);
        crate::common::eventually("the driver is registered again", || {
            agent.drivers.get(DRIVER).is_ok_and(|driver| driver.node.node_id == "after-the-fault")
        })
        .await;
    }
    if !unmounting {
        mount_all(&agent).await;
        assert_eq!(machine.mounts().len(), 2, "{context}");
    }
    unmount_all(&machine, &agent).await;
    assert_eq!((machine.mounts(), left(&machine)), (vec![], vec![]), "{context}");
    drop(driver);
}

/// Mounts a file system that is full on the directory of all staged volumes.
struct FullDisk(std::path::PathBuf);

impl FullDisk {
    fn new(dir: std::path::PathBuf, options: &std::ffi::CStr) -> Self {
        fs::create_dir_all(&dir).unwrap();
        rustix::mount::mount(c"tmpfs", &dir, c"tmpfs", rustix::mount::MountFlags::empty(), Some(options))
            .unwrap();
        Self(dir)
    }

    fn enlarge(&self) {
        rustix::mount::mount_remount(&self.0, rustix::mount::MountFlags::empty(), c"size=1m,nr_inodes=99")
            .unwrap();
    }

    fn entries(&self) -> Vec<std::ffi::OsString> {
        fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    }
}

#[tokio::test]
async fn a_full_disk_fails_a_mount_which_leaves_nothing_and_succeeds_once_there_is_space() {
    for (options, failed) in [
        // There is room for the first directory only.
        (c"nr_inodes=2", "failed to create directory"),
        // There is room for directories, and none for a file.
        (c"size=4k", "failed to save volume data file"),
    ] {
        for is_staged in [false, true] {
            let machine = Machine::new();
            let agent = machine.agent();
            let _driver = machine.driver(&[]);
            agent.registered().await;
            let error = match is_staged {
                false => {
                    let disk = FullDisk::new(machine.root.join("plugins/kubernetes.io/csi"), options);
                    if options == c"size=4k" {
                        fs::write(disk.0.join("full"), [0_u8; 4096]).unwrap();
                    }
                    let error = agent.mounter.stage(&stage()).await.unwrap_err();
                    disk.enlarge();
                    let before: Vec<_> = disk.entries();
                    let left = before.iter().filter(|name| *name != "full" && *name != DRIVER).count();
                    assert_eq!(left, 0, "{before:?}");
                    let driver = fs::read_dir(disk.0.join(DRIVER)).into_iter().flatten().count();
                    assert_eq!(driver, 0, "the directory of the volume");
                    error
                }
                true => {
                    agent.mounter.stage(&stage()).await.unwrap();
                    let disk = FullDisk::new(machine.root.join("pods"), options);
                    if options == c"size=4k" {
                        fs::write(disk.0.join("full"), [0_u8; 4096]).unwrap();
                    }
                    let error = agent.mounter.publish(&publish()).await.unwrap_err();
                    assert!(!machine.mount().with_file_name("").exists(), "the directory of the volume");
                    disk.enlarge();
                    error
                }
            };
            assert!(error.text().contains(failed), "{options:?} {is_staged}: {}", error.text());
            assert!(error.text().contains("No space left on device"), "{}", error.text());
            assert_eq!(error.certainty(), Certainty::Finished);
            mount_all(&agent).await;
            unmount_all(&machine, &agent).await;
        }
    }
}

#[tokio::test]
async fn a_full_disk_fails_a_block_volume_which_leaves_nothing() {
    for (options, failed) in
        [(c"nr_inodes=2", "failed to create directory"), (c"size=4k", "failed to save volume data file")]
    {
        let machine = Machine::new();
        let agent = machine.agent();
        let _driver = machine.driver(&[]);
        agent.registered().await;
        let disk = FullDisk::new(machine.root.join("plugins/kubernetes.io/csi"), options);
        if options == c"size=4k" {
            fs::write(disk.0.join("full"), [0_u8; 4096]).unwrap();
        }
        let error = agent.mounter.stage_block(&stage()).await.unwrap_err();
        assert!(error.text().contains(failed), "{options:?}: {}", error.text());
        assert_eq!(error.certainty(), Certainty::Finished);
        disk.enlarge();
        let mut left = left_of_block(&machine);
        left.retain(|path| !path.ends_with("/full"));
        assert_eq!(left, Vec::<String>::new(), "{options:?}");
        map_all(&agent).await;
        unmap_all(&agent).await;
    }
}

/// The volume is mounted by a call that was uncertain, and its repetition fails before the driver is called.
#[tokio::test]
async fn a_mount_of_an_uncertain_publish_is_not_forgotten_by_an_error_before_the_next_call() {
    let machine = Machine::new();
    let agent = machine.agent();
    let _driver = machine.driver(&[]);
    agent.registered().await;
    agent.mounter.stage(&stage()).await.unwrap();
    fault::set(&machine.state, &[("NodePublishVolume", Fault::CodeAfter(14))]).unwrap();
    agent.mounter.publish(&publish()).await.unwrap_err();
    fault::set(&machine.state, &[]).unwrap();
    let data = machine.mount().with_file_name("vol_data.json");
    let good = fs::read(&data).unwrap();
    fs::remove_file(&data).unwrap();
    fs::create_dir(&data).unwrap();
    let error = agent.mounter.publish(&publish()).await.unwrap_err();
    assert!(error.text().contains("failed to save volume data file"), "{}", error.text());
    assert_eq!(error.certainty(), Certainty::Uncertain);
    assert_eq!(machine.mounts().len(), 2);
    fs::remove_dir(&data).unwrap();
    fs::write(&data, good).unwrap();
    unmount_all(&machine, &agent).await;
    assert_eq!((machine.mounts(), left(&machine)), (vec![], vec![]));
}

#[tokio::test]
async fn an_uncertain_publish_is_undone_without_being_repeated() {
    for fault in [Fault::HangAfter, Fault::CodeAfter(14), Fault::Hang] {
        let machine = Machine::new();
        let agent = machine.agent();
        let _driver = machine.driver(&[]);
        agent.registered().await;
        fault::set(&machine.state, &[("NodePublishVolume", fault.clone())]).unwrap();
        agent.mounter.stage(&stage()).await.unwrap();
        let error = agent.impatient().publish(&publish()).await.unwrap_err();
        assert_eq!(error.certainty(), Certainty::Uncertain, "{fault:?}");
        unmount_all(&machine, &agent).await;
        assert_eq!((machine.mounts(), left(&machine)), (vec![], vec![]), "{fault:?}");
    }
}

#[tokio::test]
async fn a_mount_that_the_driver_left_is_an_error_and_its_content_is_not_deleted() {
    let machine = Machine::new();
    let agent = machine.agent();
    let _driver = machine.driver(&[]);
    agent.registered().await;
    mount_all(&agent).await;
    fs::write(machine.mount().join("data"), "precious").unwrap();
    fault::set(&machine.state, &[("NodeUnpublishVolume", Fault::Lie), ("NodeUnstageVolume", Fault::Lie)])
        .unwrap();
    let lie = |error: pod_sync_csi::error::CsiError| {
        assert_eq!(error.certainty(), Certainty::Uncertain);
        assert!(error.text().contains("is still mounted after Node"), "{}", error.text());
    };
    lie(agent.mounter.unpublish(POD, "pv-1").await.unwrap_err());
    assert_eq!(fs::read_to_string(machine.mount().join("data")).unwrap(), "precious");
    volumes::unmount(&machine.mount()).unwrap();
    lie(agent.mounter.unstage(&machine.global_mount()).await.unwrap_err());
    assert_eq!(fs::read_to_string(machine.global_mount().join("data")).unwrap(), "precious");
    fault::set(&machine.state, &[]).unwrap();
    unmount_all(&machine, &agent).await;
    assert_eq!((machine.mounts(), left(&machine)), (vec![], vec![]));
}

#[tokio::test]
async fn a_staged_volume_that_a_pod_has_is_not_unstaged() {
    let machine = Machine::new();
    let agent = machine.agent();
    let _driver = machine.driver(&[]);
    agent.registered().await;
    mount_all(&agent).await;
    let error = agent.mounter.unstage(&machine.global_mount()).await.unwrap_err();
    let (global, mount) = (machine.global_mount(), machine.mount());
    let expected = format!(
        "the device mount path {:?} is still mounted by other references [{}]",
        global.display().to_string(),
        mount.display()
    );
    assert_eq!(error.text(), expected);
    assert_eq!(error.certainty(), Certainty::Transient);
    let calls = fault::calls(&machine.state);
    assert!(!calls.iter().any(|call| call.starts_with("NodeUnstageVolume")), "{calls:?}");
    unmount_all(&machine, &agent).await;
}

#[tokio::test]
async fn a_mount_point_with_a_foreign_file_is_not_removed() {
    let machine = Machine::new();
    let agent = machine.agent();
    let _driver = machine.driver(&[]);
    agent.registered().await;
    mount_all(&agent).await;
    agent.mounter.unpublish(POD, "pv-1").await.unwrap();
    volumes::unmount(&machine.global_mount()).unwrap();
    fs::write(machine.global_mount().join("foreign"), "mine").unwrap();
    let error = agent.mounter.unstage(&machine.global_mount()).await.unwrap_err();
    assert!(error.text().contains("failed to remove mount point"), "{}", error.text());
    assert_eq!(fs::read_to_string(machine.global_mount().join("foreign")).unwrap(), "mine");
    fs::remove_file(machine.global_mount().join("foreign")).unwrap();
    agent.mounter.unstage(&machine.global_mount()).await.unwrap();
    assert_eq!(left(&machine), Vec::<String>::new());
}

/// A driver that makes mistakes could leave a link in place of a mount point.
#[tokio::test]
async fn a_mount_point_that_became_a_link_is_removed_and_not_followed() {
    let machine = Machine::new();
    let agent = machine.agent();
    let _driver = machine.driver(&[]);
    agent.registered().await;
    let precious = machine.root.join("precious");
    fs::create_dir(&precious).unwrap();
    fs::write(precious.join("f"), "precious").unwrap();
    mount_all(&agent).await;
    fault::set(&machine.state, &[("NodeUnpublishVolume", Fault::Lie), ("NodeUnstageVolume", Fault::Lie)])
        .unwrap();
    for path in [machine.mount(), machine.global_mount()] {
        volumes::unmount(&path).unwrap();
        fs::remove_dir(&path).unwrap();
        std::os::unix::fs::symlink(&precious, &path).unwrap();
    }
    unmount_all(&machine, &agent).await;
    assert_eq!((machine.mounts(), left(&machine)), (vec![], vec![]));
    assert_eq!(fs::read_to_string(precious.join("f")).unwrap(), "precious");
}

#[tokio::test]
async fn a_failing_republish_leaves_the_mount_of_the_running_pod() {
    let machine = Machine::new();
    let agent = machine.agent();
    let _driver = machine.driver(&[]);
    agent.registered().await;
    mount_all(&agent).await;
    volumes::unmount(&machine.mount()).unwrap();
    fault::set(&machine.state, &[("NodePublishVolume", Fault::Code(13))]).unwrap();
    let mut again = publish();
    again.mounted_before = true;
    agent.mounter.publish(&again).await.unwrap_err();
    assert!(machine.mount().is_dir() && machine.mount().with_file_name("vol_data.json").exists());
    agent.mounter.publish(&publish()).await.unwrap_err();
    assert!(!machine.mount().exists());
}

#[tokio::test]
async fn mounts_without_volume_data_are_left_and_empty_directories_are_removed() {
    let machine = Machine::new();
    let agent = machine.agent();
    let _driver = machine.driver(&[]);
    agent.registered().await;
    mount_all(&agent).await;
    let data = machine.mount().with_file_name("vol_data.json");
    let good = fs::read(&data).unwrap();
    for torn in [None, Some(&b"{\"driverName\""[..])] {
        match torn {
            None => fs::remove_file(&data).unwrap(),
            Some(bytes) => fs::write(&data, bytes).unwrap(),
        }
        let error = agent.mounter.unpublish(POD, "pv-1").await.unwrap_err();
        assert!(error.text().ends_with("is mounted, but its driver is unknown"), "{}", error.text());
        assert_eq!(machine.mounts().len(), 2);
    }
    fs::write(&data, good).unwrap();
    unmount_all(&machine, &agent).await;
    // The process ended after it created the directory, or while it wrote the metadata.
    fs::create_dir_all(machine.mount()).unwrap();
    fs::write(&data, b"").unwrap();
    fs::create_dir_all(machine.global_mount()).unwrap();
    for dir in [machine.mount(), machine.global_mount()] {
        fs::write(dir.with_file_name(".vol_data.json.x1Yz"), b"{\"driverName\"").unwrap();
    }
    unmount_all(&machine, &agent).await;
    assert_eq!(left(&machine), Vec::<String>::new());
}

/// Ends the agent at its n-th failpoint.
struct EndAt {
    left: AtomicUsize,
}

impl Observer for EndAt {
    fn reached(&self, _: Failpoint) {
        if self.left.fetch_sub(1, Ordering::SeqCst) == 0 {
            std::panic::resume_unwind(Box::new(ProcessEnded));
        }
    }
}

impl EndAt {
    fn observe(n: usize) {
        let observer = Arc::new(Self { left: AtomicUsize::new(n) });
        failpoint::observe(observer);
    }
}

/// Runs `operations` once for each failpoint that they reach, and ends the agent there. `resume` then gets a
/// new agent and the number of the failpoint. Nothing must be mounted or left at the end of each run. Returns
/// the number of failpoints.
async fn end_at_each_step(
    operations: impl AsyncFn(&Machine, &Agent),
    resume: impl AsyncFn(&Machine, &Agent, usize),
    left: fn(&Machine) -> Vec<String>,
) -> usize {
    let mut n = 0;
    loop {
        let machine = Machine::new();
        let _driver = machine.driver(&[]);
        let agent = machine.agent();
        agent.registered().await;
        EndAt::observe(n);
        let ended = AssertUnwindSafe(operations(&machine, &agent)).catch_unwind().await.is_err();
        EndAt::observe(usize::MAX);
        agent.crash();
        if ended {
            let agent = machine.agent();
            agent.registered().await;
            resume(&machine, &agent, n).await;
        }
        assert_eq!((machine.mounts(), left(&machine)), (vec![], vec![]), "failpoint {n}");
        if !ended {
            return n;
        }
        n += 1;
    }
}

/// Asserts that each mount has a readable `vol_data.json`, which names its driver.
fn assert_drivers_known(machine: &Machine, n: usize) {
    let root = Root::new(&machine.root);
    let staged = reconstruct::staged(&root).unwrap();
    let published = reconstruct::published(&root).unwrap();
    let known: Vec<_> = staged.iter().chain(published.iter().map(|volume| &volume.found)).collect();
    for mount in &machine.mounts() {
        let found = known.iter().find(|found| found.path == *mount);
        assert!(
            found.is_some_and(|found| matches!(found.data, Ok(Some(_)))),
            "failpoint {n}: {mount:?} {known:?}"
        );
    }
}

/// Ends the agent before and after each step of mounting and unmounting. A new agent finds the volume on
/// disk. It mounts a desired volume with its data, and removes any other volume completely.
#[tokio::test]
async fn an_agent_that_ends_at_any_step_is_replaced_by_one_that_finishes_the_work() {
    let operations = async |machine: &Machine, agent: &Agent| {
        mount_all(agent).await;
        unmount_all(machine, agent).await;
    };
    let resume = async |machine: &Machine, agent: &Agent, n: usize| {
        assert_drivers_known(machine, n);
        if n.is_multiple_of(2) {
            mount_all(agent).await;
            assert_eq!(machine.mounts(), [machine.global_mount(), machine.mount()], "failpoint {n}");
        }
        unmount_all(machine, agent).await;
    };
    // Before and after each of 3 + 3 + 4 + 4 steps.
    assert_eq!(end_at_each_step(operations, resume, left).await, 28);
}

async fn map_all(agent: &Agent) {
    agent.mounter.stage_block(&stage()).await.unwrap();
    agent.mounter.publish_block(&publish()).await.unwrap();
}

async fn unmap_all(agent: &Agent) {
    agent.mounter.unpublish_block(POD, "pv-1").await.unwrap();
    agent.mounter.unstage_block("pv-1").await.unwrap();
}

/// Returns the remaining entries of a block volume, apart from the parents of all volumes.
fn left_of_block(machine: &Machine) -> Vec<String> {
    let parents = ["/volumeDevices", "/staging", "/publish", "/kubernetes.io~csi", POD];
    let all = ["plugins/kubernetes.io/csi", "pods"].iter().flat_map(|dir| machine.tree(dir));
    all.filter(|path| !parents.iter().any(|parent| path.ends_with(parent))).collect()
}

#[tokio::test]
async fn a_block_volume_is_staged_published_and_removed_with_the_kubelets_files() {
    let machine = Machine::new();
    let agent = machine.agent();
    let _driver = machine.driver(&[]);
    agent.registered().await;
    let devices = machine.root.join("plugins/kubernetes.io/csi/volumeDevices");
    assert_eq!(agent.mounter.stage_block(&stage()).await.unwrap(), Some(devices.join("staging/pv-1")));
    let link = agent.mounter.publish_block(&publish()).await.unwrap();
    assert_eq!(link, machine.root.join("pods").join(POD).join("volumeDevices/kubernetes.io~csi/pv-1"));
    let published = devices.join("publish/pv-1").join(POD);
    assert_eq!(fs::read_link(&link).unwrap(), published);
    assert_eq!(machine.mounts(), [published, devices.join("pv-1/dev").join(POD)]);
    let contexts = fs::read_to_string(machine.state.join("contexts.log")).unwrap();
    assert_eq!(contexts.matches("access_type: Some(Block(").count(), 2, "{contexts}");
    let found = reconstruct::block_volumes(&Root::new(&machine.root)).unwrap();
    let [volume] = &found[..] else { panic!("{found:?}") };
    let data = volume.found.data.as_ref().unwrap().as_ref().unwrap();
    assert_eq!(
        (volume.pod.as_str(), data.spec_volume_id.as_str(), data.volume_handle.as_str()),
        (POD, "pv-1", "vol-1")
    );
    // A volume that a pod uses keeps its directories.
    map_all(&agent).await;
    let error = agent.mounter.unstage_block("pv-1").await.unwrap_err();
    assert!(
        error.text().contains("failed to remove the directories of the volume's devices"),
        "{}",
        error.text()
    );
    assert_eq!(machine.mounts().len(), 2);
    let calls = fault::calls(&machine.state);
    assert!(!calls.iter().any(|call| call.starts_with("NodeUnstageVolume")), "{calls:?}");
    map_all(&agent).await;
    unmap_all(&agent).await;
    unmap_all(&agent).await;
    assert_eq!((machine.mounts(), left_of_block(&machine)), (vec![], vec![]));
}

#[tokio::test]
async fn a_block_volume_that_a_kubelet_mapped_is_unmapped_with_the_kubelets_loop_device() {
    let machine = Machine::new();
    let agent = machine.agent();
    let _driver = machine.driver(&[]);
    agent.registered().await;
    let mut args = (stage(), publish());
    for volume in [&mut args.0.volume, &mut args.1.volume] {
        volume.attributes.insert(volumes::MEDIUM.to_owned(), "loop".to_owned());
    }
    agent.mounter.stage_block(&args.0).await.unwrap();
    agent.mounter.publish_block(&args.1).await.unwrap();
    let mapped = machine.root.join("plugins/kubernetes.io/csi/volumeDevices/pv-1/dev").join(POD);
    let device = volumes::loop_device(&mapped).unwrap();
    let number = device.file_name().unwrap().to_owned();
    let backing = std::path::Path::new("/sys/block").join(number).join("loop/backing_file");
    assert_eq!(fs::read_to_string(&backing).unwrap().trim_end(), mapped.to_str().unwrap());
    let busy = rustix::mount::unmount(&mapped, rustix::mount::UnmountFlags::NOFOLLOW);
    assert_eq!(busy, Err(rustix::io::Errno::BUSY), "the loop device holds the mount");
    // The next agent takes the volume over.
    unmap_all(&agent).await;
    let attached = fs::read_to_string(&backing).unwrap_or_default();
    assert_ne!(attached.trim_end(), mapped.to_str().unwrap());
    assert_eq!((machine.mounts(), left_of_block(&machine)), (vec![], vec![]));
}

#[tokio::test]
async fn an_agent_that_ends_at_any_step_of_a_block_volume_is_replaced_by_one_that_finishes_the_work() {
    let operations = async |_: &Machine, agent: &Agent| {
        map_all(agent).await;
        unmap_all(agent).await;
    };
    let resume = async |machine: &Machine, agent: &Agent, n: usize| {
        if n.is_multiple_of(2) {
            map_all(agent).await;
            assert_eq!(machine.mounts().len(), 2, "failpoint {n}");
        }
        unmap_all(agent).await;
    };
    // Before and after each of 4 + 4 + 4 + 6 steps.
    assert_eq!(end_at_each_step(operations, resume, left_of_block).await, 36);
}
