use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use quintlet_model::ids::PodUid;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use crate::block::BlockMapper;
use crate::commands::{Commands, Ended, SystemCommands, Until};
use crate::error::Error;
use crate::found::{self, FoundDevice, FoundInPod};
use crate::mount::{Group, Mounter, is_mounted};
use crate::volume::{Plugin, Source, Volume};

mod disks;

/// Result of a command that a signal ended.
const KILLED: i32 = i32::MIN;

/// Commands that record their arguments and end as scripted, or successfully.
#[derive(Debug, Default)]
struct FakeCommands {
    ran: Mutex<Vec<String>>,
    results: Mutex<VecDeque<(i32, &'static str)>>,
    are_missing: bool,
}

#[async_trait]
impl Commands for FakeCommands {
    async fn run(
        &self,
        program: &'static str,
        arguments: &[OsString],
        _: Until<'_>,
    ) -> std::io::Result<Ended> {
        if self.are_missing {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        let words = arguments.iter().map(|word| word.to_string_lossy());
        self.ran.lock().push(std::iter::once(program.into()).chain(words).collect::<Vec<_>>().join(" "));
        let (code, output) = self.results.lock().pop_front().unwrap_or((0, ""));
        Ok(Ended { code: (code != KILLED).then_some(code), output: output.to_owned() })
    }
}

/// A root directory with a directory for the content of volumes. Mounts are removed when it is dropped.
struct Node {
    base: TempDir,
}

impl Node {
    fn new() -> Self {
        let base = tempfile::tempdir().unwrap();
        fs::create_dir(base.path().join("root")).unwrap();
        fs::create_dir(base.path().join("disk")).unwrap();
        Self { base }
    }

    fn root(&self) -> PathBuf {
        self.base.path().join("root")
    }

    fn disk(&self) -> PathBuf {
        self.base.path().join("disk")
    }

    fn mounter(&self) -> Mounter {
        Mounter::new(&self.root())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let mounts = quintlet_kit::mount_table::read().unwrap();
        for mount in mounts.into_iter().rev().filter(|mount| mount.path.starts_with(self.base.path())) {
            let _gone = rustix::mount::unmount(&mount.path, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

/// A loop device over a file of 16 MiB.
struct LoopDevice(String);

impl LoopDevice {
    fn new(dir: &Path) -> Self {
        let file = dir.join("image");
        fs::File::create(&file).unwrap().set_len(16 << 20).unwrap();
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        Self(String::from_utf8(made.stdout).unwrap().trim().to_owned())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _gone = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

fn uid(n: u8) -> PodUid {
    PodUid::parse(&format!("u{n}")).unwrap()
}

fn volume(source: Source) -> Volume {
    Volume { name: "pv-1".to_owned(), source, is_block: false, read_only: false, mount_options: Vec::new() }
}

fn local(path: &Path) -> Volume {
    volume(Source::Local { path: path.display().to_string(), fs_type: None })
}

fn group(id: u32) -> Group<'static> {
    Group { id: Some(id), only_if_root_differs: false, report: &|_| {} }
}

fn none() -> Group<'static> {
    Group { id: None, only_if_root_differs: false, report: &|_| {} }
}

fn in_pod(pod: PodUid, is_block: bool) -> FoundInPod {
    let name = "pv-1".to_owned();
    FoundInPod { pod, plugin: Plugin::Local, device: Some(name.clone()), name, is_block }
}

/// Waits until a killed process has ended, which may take longer than the call on a busy machine.
async fn killed(pid: &str) {
    let has_ended = async {
        loop {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            if stat.is_empty() || stat.contains(") Z ") {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), has_ended).await.expect("the process ends");
}

fn mode_of(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[tokio::test]
async fn a_local_directory_is_bound_for_each_pod_and_keeps_its_files() {
    let node = Node::new();
    let (mounter, volume) = (node.mounter(), local(&node.disk()));
    let mut paths = Vec::new();
    for pod in [uid(1), uid(2)] {
        mounter.check(&volume).await.unwrap();
        mounter.stage(&volume, None, None).await.unwrap();
        assert_eq!(mounter.publish(&volume, &pod, none(), &CancellationToken::new()).await.unwrap(), None);
        // A repetition changes nothing.
        mounter.publish(&volume, &pod, none(), &CancellationToken::new()).await.unwrap();
        paths.push(mounter.paths().host_path(&volume, &pod).unwrap());
    }
    assert_eq!(paths[0], node.root().join("pods/u1/volumes/kubernetes.io~local-volume/pv-1"));
    fs::write(paths[0].join("f"), "kept").unwrap();
    assert_eq!(fs::read_to_string(paths[1].join("f")).unwrap(), "kept");
    let in_pod = |pod| in_pod(pod, false);
    assert_eq!(found::read(&node.root()).unwrap(), (vec![in_pod(uid(1)), in_pod(uid(2))], Vec::new()));
    for pod in [uid(1), uid(2)] {
        mounter.unpublish(Plugin::Local, &pod, "pv-1").await.unwrap();
        mounter.unpublish(Plugin::Local, &pod, "pv-1").await.unwrap();
    }
    mounter.unstage("pv-1").await.unwrap();
    assert!(paths.iter().all(|path| !path.exists()));
    assert_eq!(fs::read_to_string(node.disk().join("f")).unwrap(), "kept");
}

#[tokio::test]
async fn a_local_directory_that_is_swapped_while_it_is_mounted_is_neither_followed_nor_deleted() {
    let node = Node::new();
    let (mounter, volume) = (node.mounter(), local(&node.disk()));
    let precious = node.base.path().join("precious");
    fs::create_dir(&precious).unwrap();
    for dir in [&precious, &node.disk()] {
        fs::write(dir.join("f"), dir.file_name().unwrap().to_str().unwrap()).unwrap();
    }
    mounter.publish(&volume, &uid(1), group(4711), &CancellationToken::new()).await.unwrap();
    let path = mounter.paths().host_path(&volume, &uid(1)).unwrap();
    let moved = node.base.path().join("moved");
    fs::rename(node.disk(), &moved).unwrap();
    std::os::unix::fs::symlink(&precious, node.disk()).unwrap();
    // An agent that starts again sets the volume up again, here with another group.
    mounter.publish(&volume, &uid(1), group(4712), &CancellationToken::new()).await.unwrap();
    assert_eq!(fs::read_to_string(path.join("f")).unwrap(), "disk");
    assert_eq!(fs::metadata(moved.join("f")).unwrap().gid(), 4712);
    for kept in [precious.clone(), precious.join("f")] {
        assert!(![4711, 4712].contains(&fs::metadata(kept).unwrap().gid()));
    }
    mounter.unpublish(Plugin::Local, &uid(1), "pv-1").await.unwrap();
    assert!(!path.exists());
    assert_eq!(fs::read_to_string(moved.join("f")).unwrap(), "disk");
    assert_eq!(fs::read_to_string(precious.join("f")).unwrap(), "precious");
}

#[tokio::test]
async fn a_read_only_local_volume_cannot_be_written_even_if_an_earlier_process_only_bound_it() {
    let node = Node::new();
    let mounter = node.mounter();
    let volume = Volume { read_only: true, ..local(&node.disk()) };
    let path = mounter.paths().host_path(&volume, &uid(1)).unwrap();
    fs::create_dir_all(&path).unwrap();
    rustix::mount::mount_bind(node.disk(), &path).unwrap();
    mounter.publish(&volume, &uid(1), group(4711), &CancellationToken::new()).await.unwrap();
    let error = fs::write(path.join("f"), "").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    // The group of a read-only volume is not changed.
    assert_ne!(fs::metadata(node.disk()).unwrap().gid(), 4711);
}

#[tokio::test]
async fn the_first_pod_gets_the_files_of_its_group_and_the_next_one_a_warning() {
    let node = Node::new();
    let (mounter, volume) = (node.mounter(), local(&node.disk()));
    let file = node.disk().join("f");
    fs::write(&file, "").unwrap();
    assert_eq!(
        mounter.publish(&volume, &uid(1), group(4711), &CancellationToken::new()).await.unwrap(),
        None
    );
    assert_eq!(fs::metadata(&file).unwrap().gid(), 4711);
    assert_eq!(mode_of(&node.disk()) & 0o2070, 0o2070);
    assert_eq!(
        mounter.publish(&volume, &uid(2), group(4711), &CancellationToken::new()).await.unwrap(),
        None
    );
    let warning =
        mounter.publish(&volume, &uid(3), group(4712), &CancellationToken::new()).await.unwrap().unwrap();
    assert_eq!(
        warning,
        "The requested fsGroup is 4712, but the volume pv-1 has GID 4711. The volume may not be shareable."
    );
    assert_eq!(fs::metadata(&file).unwrap().gid(), 4711);
}

#[tokio::test]
async fn a_process_that_ended_before_the_group_was_changed_is_replaced_by_one_that_changes_it() {
    let node = Node::new();
    let (mounter, volume) = (node.mounter(), local(&node.disk()));
    let file = node.disk().join("f");
    fs::write(&file, "").unwrap();
    mounter.publish(&volume, &uid(1), none(), &CancellationToken::new()).await.unwrap();
    mounter.publish(&volume, &uid(1), group(4711), &CancellationToken::new()).await.unwrap();
    assert_eq!(fs::metadata(&file).unwrap().gid(), 4711);
    // A repetition does not walk through the files again.
    std::os::unix::fs::chown(&file, None, Some(0)).unwrap();
    mounter.publish(&volume, &uid(1), group(4711), &CancellationToken::new()).await.unwrap();
    assert_eq!(fs::metadata(&file).unwrap().gid(), 0);
}

#[tokio::test]
async fn a_path_that_cannot_be_mounted_has_the_kubelets_text() {
    let node = Node::new();
    let mounter = node.mounter();
    let file = node.disk().join("f");
    fs::write(&file, "").unwrap();
    let text = |result: Result<(), Error>| result.unwrap_err().to_string();
    let at = |path: &Path| path.display().to_string();
    let absent = node.disk().join("absent");
    assert_eq!(text(mounter.check(&local(&absent)).await), format!("path {:?} does not exist", at(&absent)));
    assert_eq!(text(mounter.check(&local(&file)).await), "only directory and block device are supported");
    assert_eq!(
        text(mounter.check(&local(Path::new(""))).await),
        "local volume source is nil or local path is not set"
    );
    let upwards = node.disk().join("../disk");
    let published =
        mounter.publish(&local(&upwards), &uid(1), none(), &CancellationToken::new()).await.map(drop);
    assert_eq!(text(published), format!("invalid path: {} must not contain '..'", at(&upwards)));
    let directory = Source::HostPath { path: at(&file), kind: "Directory".to_owned() };
    let published = mounter
        .publish(&volume(directory.clone()), &uid(1), none(), &CancellationToken::new())
        .await
        .map(drop);
    let expected = format!("hostPath type check failed: {} is not a directory, it's a File", at(&file));
    assert_eq!(text(published), expected);
    let with_options = Volume { mount_options: vec!["noatime".to_owned()], ..volume(directory.clone()) };
    assert_eq!(
        text(mounter.check_options(&with_options)),
        "mount options are not supported for this volume type"
    );
    let block = Volume { is_block: true, ..volume(directory) };
    assert_eq!(
        text(BlockMapper::of(&mounter).check(&block).await),
        "kubernetes.io/host-path does not support volumeMode Block"
    );
    let block = Volume { is_block: true, ..local(&file) };
    assert_eq!(
        text(BlockMapper::of(&mounter).check(&block).await),
        format!("{} is not a block device", at(&file))
    );
    let escaping = Volume { name: "..".to_owned(), ..local(&node.disk()) };
    let published = mounter.publish(&escaping, &uid(1), none(), &CancellationToken::new()).await.map(drop);
    assert_eq!(text(published), "volume name \"..\" cannot be part of a path");
}

#[tokio::test]
async fn a_host_path_volume_is_the_path_itself_and_is_created_if_its_type_says_so() {
    let node = Node::new();
    let mounter = node.mounter();
    let made = node.disk().join("made");
    let source = Source::HostPath { path: made.display().to_string(), kind: "DirectoryOrCreate".to_owned() };
    let volume = volume(source);
    mounter.publish(&volume, &uid(1), none(), &CancellationToken::new()).await.unwrap();
    assert!(made.is_dir());
    assert_eq!(mounter.paths().host_path(&volume, &uid(1)).unwrap(), made);
    mounter.unpublish(Plugin::HostPath, &uid(1), "pv-1").await.unwrap();
    assert!(made.is_dir());
}

#[tokio::test]
async fn an_empty_device_gets_a_file_system_once_and_is_unmounted_after_its_last_pod() {
    let node = Node::new();
    let device = LoopDevice::new(node.base.path());
    let (mounter, volume) = (node.mounter(), local(Path::new(&device.0)));
    let unformatted = Volume { read_only: true, ..volume.clone() };
    let error = mounter.stage(&unformatted, None, None).await.unwrap_err().to_string();
    let target = mounter.paths().device_mount("pv-1").unwrap();
    assert_eq!(
        error,
        format!(
            "local: failed to mount device {0} at {1} (fstype: ext4), error cannot mount unformatted disk {0} as we are \
             manipulating it in read-only mode",
            device.0,
            target.display()
        )
    );
    for content in ["first", "second"] {
        mounter.check(&volume).await.unwrap();
        mounter.stage(&volume, None, None).await.unwrap();
        mounter.stage(&volume, None, None).await.unwrap();
        mounter.publish(&volume, &uid(1), group(4711), &CancellationToken::new()).await.unwrap();
        let path = mounter.paths().host_path(&volume, &uid(1)).unwrap();
        assert_eq!(path.join("first").exists(), content == "second", "the file system is kept");
        fs::write(path.join(content), "").unwrap();
        let found = found::read(&node.root()).unwrap();
        assert_eq!(
            found.1,
            [FoundDevice { plugin: Plugin::Local, name: "pv-1".to_owned(), is_block: false, label: None }]
        );
        let error = mounter.unstage("pv-1").await.unwrap_err().to_string();
        assert!(error.contains("is still mounted by other references"), "{error}");
        mounter.unpublish(Plugin::Local, &uid(1), "pv-1").await.unwrap();
        mounter.unstage("pv-1").await.unwrap();
        assert!(!target.exists());
    }
}

#[tokio::test]
async fn a_block_volume_is_bound_and_linked_for_each_pod() {
    let node = Node::new();
    let device = LoopDevice::new(node.base.path());
    let mounter = node.mounter();
    let volume = Volume { is_block: true, ..local(Path::new(&device.0)) };
    BlockMapper::of(&mounter).check(&volume).await.unwrap();
    for pod in [uid(1), uid(2)] {
        BlockMapper::of(&mounter).map(&volume, None, &pod).await.unwrap();
        BlockMapper::of(&mounter).map(&volume, None, &pod).await.unwrap();
        let link = mounter.paths().host_path(&volume, &pod).unwrap();
        assert_eq!(fs::read_link(&link).unwrap(), Path::new(&device.0));
        let bound = mounter.paths().block_volume(Plugin::Local, "pv-1").unwrap().join(pod.as_str());
        assert!(is_mounted(&bound).unwrap());
        assert_eq!(fs::metadata(bound).unwrap().rdev(), fs::metadata(&device.0).unwrap().rdev());
    }
    let in_pod = |pod| in_pod(pod, true);
    let devices =
        vec![FoundDevice { plugin: Plugin::Local, name: "pv-1".to_owned(), is_block: true, label: None }];
    assert_eq!(found::read(&node.root()).unwrap(), (vec![in_pod(uid(1)), in_pod(uid(2))], devices));
    BlockMapper::of(&mounter).unmap(Plugin::Local, &uid(1), "pv-1", Some("pv-1")).await.unwrap();
    assert!(BlockMapper::of(&mounter).unmap_device("pv-1").await.is_err(), "a pod has the device");
    BlockMapper::of(&mounter).unmap(Plugin::Local, &uid(2), "pv-1", Some("pv-1")).await.unwrap();
    BlockMapper::of(&mounter).unmap(Plugin::Local, &uid(2), "pv-1", Some("pv-1")).await.unwrap();
    BlockMapper::of(&mounter).unmap_device("pv-1").await.unwrap();
    let left = fs::read_dir(node.root().join("plugins/kubernetes.io~local-volume/volumeDevices")).unwrap();
    assert_eq!(left.count(), 0);
    assert!(Path::new(&device.0).exists());
}

#[tokio::test]
async fn a_block_volume_that_a_kubelet_mapped_is_unmapped_with_the_kubelets_loop_device() {
    let node = Node::new();
    let device = LoopDevice::new(node.base.path());
    let mounter = node.mounter();
    let volume = Volume { is_block: true, ..local(Path::new(&device.0)) };
    BlockMapper::of(&mounter).map(&volume, None, &uid(1)).await.unwrap();
    let bound = mounter.paths().block_volume(Plugin::Local, "pv-1").unwrap().join(uid(1).as_str());
    let made = std::process::Command::new("losetup").args(["--find", "--show"]).arg(&bound).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let of_kubelet = String::from_utf8(made.stdout).unwrap().trim().replace("/dev/", "/sys/block/");
    let backing = Path::new(&of_kubelet).join("loop/backing_file");
    let is_attached =
        || fs::read_to_string(&backing).unwrap_or_default().trim_end() == bound.to_str().unwrap();
    assert!(is_attached());
    // The kernel detaches the device once the last process closes it.
    let reader = fs::File::open(of_kubelet.replace("/sys/block/", "/dev/")).unwrap();
    let reader = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(200));
        drop(reader);
    });
    BlockMapper::of(&mounter).unmap(Plugin::Local, &uid(1), "pv-1", Some("pv-1")).await.unwrap();
    assert!(!is_attached() && !bound.exists());
    reader.join().unwrap();
    BlockMapper::of(&mounter).unmap_device("pv-1").await.unwrap();
    assert!(Path::new(&device.0).exists(), "the device of the volume stays");
}

fn nfs(server: &str) -> Volume {
    volume(Source::Nfs { server: server.to_owned(), path: "/exports/a".to_owned() })
}

fn with_results(node: &Node, results: &[(i32, &'static str)]) -> (Arc<FakeCommands>, Mounter) {
    let results = Mutex::new(results.iter().copied().collect());
    let commands = Arc::new(FakeCommands { results, ..FakeCommands::default() });
    (Arc::clone(&commands), Mounter::with_commands(&node.root(), commands))
}

#[tokio::test]
async fn nfs_is_mounted_with_the_kubelets_arguments() {
    let node = Node::new();
    let (commands, mounter) = with_results(&node, &[]);
    let target = node.root().join("pods/u1/volumes/kubernetes.io~nfs/pv-1").display().to_string();
    mounter.publish(&nfs("server.example"), &uid(1), none(), &CancellationToken::new()).await.unwrap();
    let options = vec!["nfsvers=4.1".to_owned(), "hard".to_owned(), "ro".to_owned()];
    let read_only = Volume { read_only: true, mount_options: options, ..nfs("2001:db8::1") };
    mounter.publish(&read_only, &uid(1), none(), &CancellationToken::new()).await.unwrap();
    assert_eq!(
        *commands.ran.lock(),
        [
            format!("mount -t nfs server.example:/exports/a {target}"),
            format!("mount -t nfs -o hard,nfsvers=4.1,ro [2001:db8::1]:/exports/a {target}"),
        ]
    );
    mounter.unpublish(Plugin::Nfs, &uid(1), "pv-1").await.unwrap();
    assert!(!Path::new(&target).exists());
}

#[tokio::test]
async fn a_node_that_cannot_mount_nfs_says_so_with_the_kubelets_text() {
    let node = Node::new();
    let output = "mount: bad option; you might need a /sbin/mount.nfs helper program.\n";
    let (_, mounter) = with_results(&node, &[(32, output)]);
    let target = node.root().join("pods/u1/volumes/kubernetes.io~nfs/pv-1");
    let error =
        mounter.publish(&nfs("s"), &uid(1), none(), &CancellationToken::new()).await.unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "mount failed: exit status 32\nMounting command: mount\nMounting arguments: -t nfs s:/exports/a {}\n\
             Output: {output}",
            target.display()
        )
    );
    let (commands, mounter) = with_results(&node, &[]);
    let error = mounter
        .publish(&nfs("-obind"), &uid(1), none(), &CancellationToken::new())
        .await
        .unwrap_err()
        .to_string();
    assert_eq!(error, "invalid server \"-obind\" of an nfs volume");
    assert!(commands.ran.lock().is_empty(), "the server must not be taken for an option");
    let commands = Arc::new(FakeCommands { are_missing: true, ..FakeCommands::default() });
    let mounter = Mounter::with_commands(&node.root(), commands);
    let error =
        mounter.publish(&nfs("s"), &uid(1), none(), &CancellationToken::new()).await.unwrap_err().to_string();
    assert_eq!(error, "exec: \"mount\": executable file not found in $PATH");
}

#[tokio::test]
async fn nfs_of_a_server_that_does_not_answer_is_unmounted_with_force() {
    let node = Node::new();
    let (commands, mounter) = with_results(&node, &[(16, "busy"), (0, "")]);
    let target = mounter.paths().host_path(&nfs("s"), &uid(1)).unwrap();
    fs::create_dir_all(&target).unwrap();
    rustix::mount::mount_bind(node.disk(), &target).unwrap();
    // The fake umount leaves the mount, which is then unmounted by the node agent itself.
    mounter.unpublish(Plugin::Nfs, &uid(1), "pv-1").await.unwrap();
    let path = target.display();
    assert_eq!(*commands.ran.lock(), [format!("umount {path}"), format!("umount -f {path}")]);
    assert!(!target.exists());
}

/// A mount(8) that has a child, like one that runs mount.nfs, and ends only by a signal. It writes both
/// numbers to `pids`.
const HANGING_MOUNT: &str = "#!/bin/sh\nsleep 1000 & echo $$ $! > BASE/new; mv BASE/new BASE/pids; wait\n";

#[tokio::test]
async fn a_mount_of_nfs_in_progress_is_killed_with_its_children_when_the_pod_is_released() {
    let node = Node::new();
    let (base, tools) = (node.base.path(), node.base.path().join("tools"));
    fs::create_dir(&tools).unwrap();
    fs::write(tools.join("mount"), HANGING_MOUNT.replace("BASE", &base.display().to_string())).unwrap();
    fs::set_permissions(tools.join("mount"), fs::Permissions::from_mode(0o755)).unwrap();
    let commands = Arc::new(SystemCommands { first: Some(tools) });
    let mounter = Mounter::with_commands(&node.root(), commands);
    let volume = nfs("s");
    let pod = uid(1);
    let released = CancellationToken::new();
    let started = async {
        while !base.join("pids").exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        released.cancel();
    };
    let limit = Duration::from_secs(60);
    let both = async { tokio::join!(mounter.publish(&volume, &pod, none(), &released), started).0 };
    let error = tokio::time::timeout(limit, both).await.unwrap().unwrap_err().to_string();
    assert!(error.starts_with("mount failed: signal: killed\n"), "{error}");
    // The parent is reaped. The child is, by another process, soon.
    let pids = fs::read_to_string(base.join("pids")).unwrap();
    for pid in pids.split_whitespace() {
        killed(pid).await;
    }
    mounter.unpublish(Plugin::Nfs, &pod, "pv-1").await.unwrap();
    assert!(!mounter.paths().host_path(&volume, &pod).unwrap().exists());
}

#[tokio::test]
async fn a_device_with_a_file_system_is_repaired_and_never_formatted() {
    let node = Node::new();
    let device = LoopDevice::new(node.base.path());
    for (results, expected) in [
        (&[(0, "TYPE=xfs\n")][..], Ok("fsck")),
        (&[(0, "PTTYPE=dos\n")], Ok("fsck")),
        (&[(2, "")], Ok("mkfs.ext4")),
        (&[(4, "no such device")], Err("failed to get disk format of disk")),
        (&[(0, "TYPE=ext4\n"), (1, "corrected")], Ok("fsck")),
        (&[(0, "TYPE=ext4\n"), (8, "fsck.ext4 is not installed")], Ok("fsck")),
        (&[(0, "TYPE=ext4\n"), (4, "bad")], Err("'fsck' found errors on device")),
        (&[(0, "TYPE=ext4\n"), (KILLED, "")], Err("did not end by itself: fsck")),
        (&[(KILLED, "")], Err("failed to get disk format of disk")),
        (&[(2, ""), (KILLED, "")], Err("format of disk")),
        (&[(2, ""), (1, "too small")], Err("format of disk")),
    ] {
        let (commands, mounter) = with_results(&node, results);
        let staged = mounter.stage(&local(Path::new(&device.0)), None, None).await;
        let ran = commands.ran.lock();
        match expected {
            Ok(second) => {
                staged.unwrap();
                assert!(ran[0].starts_with("blkid -p") && ran[1].starts_with(second), "{ran:?}");
                assert!(ran[2].starts_with("mount -t ext4 -o defaults /dev/loop"), "{ran:?}");
            }
            Err(text) => {
                let error = staged.unwrap_err().to_string();
                assert!(error.contains(text), "{error}");
                assert!(!ran.iter().any(|command| command.starts_with("mount")), "{ran:?}");
            }
        }
    }
}

#[tokio::test]
async fn a_failed_mount_says_whether_the_device_has_another_file_system() {
    let node = Node::new();
    let device = LoopDevice::new(node.base.path());
    let ok = (0, "");
    for (results, expected) in [
        (&[(0, "TYPE=xfs\n"), ok, (32, "bad superblock")][..], true),
        (&[(0, "TYPE=ext4\n"), ok, (32, "bad superblock")], false),
        (&[(2, ""), ok, (32, "bad superblock")], false),
        (&[(0, "TYPE=xfs\n"), (4, "bad")], false),
    ] {
        let (_, mounter) = with_results(&node, results);
        let error = mounter.stage(&local(Path::new(&device.0)), None, None).await.unwrap_err();
        assert_eq!(error.is_other_file_system(), expected, "{results:?}: {error}");
    }
}

#[tokio::test]
async fn a_device_that_a_mount_option_makes_read_only_is_neither_formatted_nor_repaired() {
    let node = Node::new();
    let device = LoopDevice::new(node.base.path());
    for options in [&["ro"][..], &["noatime", "ro"], &["noatime,ro"]] {
        let mount_options = options.iter().map(|option| (*option).to_owned()).collect();
        let volume = Volume { mount_options, ..local(Path::new(&device.0)) };
        let (commands, mounter) = with_results(&node, &[(2, "")]);
        let error = mounter.stage(&volume, None, None).await.unwrap_err().to_string();
        assert!(error.contains("cannot mount unformatted disk"), "{options:?}: {error}");
        assert_eq!(commands.ran.lock().len(), 1, "{options:?}: {:?}", commands.ran.lock());
        let (commands, mounter) = with_results(&node, &[(0, "TYPE=ext4\n")]);
        mounter.stage(&volume, None, None).await.unwrap();
        let ran = commands.ran.lock();
        assert!(ran.len() == 2 && ran[1].starts_with("mount -t ext4 -o "), "{options:?}: {ran:?}");
    }
}

#[tokio::test]
async fn the_files_of_a_volume_that_a_mount_option_makes_read_only_keep_their_group() {
    let node = Node::new();
    let file = node.disk().join("f");
    fs::write(&file, "").unwrap();
    let volume = Volume { mount_options: vec!["ro".to_owned()], ..local(&node.disk()) };
    let (_, mounter) = with_results(&node, &[]);
    // The scripted mount leaves the mount writable, so that a change of the group is seen.
    assert_eq!(
        mounter.publish(&volume, &uid(1), group(4711), &CancellationToken::new()).await.unwrap(),
        None
    );
    assert_ne!(fs::metadata(file).unwrap().gid(), 4711);
}

#[tokio::test]
async fn the_file_system_of_a_local_device_is_enlarged_and_a_directory_is_not() {
    let node = Node::new();
    let device = LoopDevice::new(node.base.path());
    let volume = local(Path::new(&device.0));
    // Growth of a mounted ext4 needs CAP_SYS_RESOURCE, which a container may lack.
    for (format, expected) in [
        ("TYPE=ext4\n", format!("resize2fs {}", device.0)),
        (
            "TYPE=xfs\n",
            format!("xfs_growfs -d {}/plugins/kubernetes.io/local-volume/mounts/pv-1", node.root().display()),
        ),
    ] {
        let (commands, mounter) = with_results(&node, &[(0, format)]);
        mounter.expand(&volume).await.unwrap();
        assert_eq!(commands.ran.lock()[1..], [expected]);
    }
    let (commands, mounter) = with_results(&node, &[]);
    mounter.expand(&local(&node.disk())).await.unwrap();
    mounter.expand(&Volume { is_block: true, ..volume }).await.unwrap();
    assert!(commands.ran.lock().is_empty());
}

#[tokio::test]
async fn a_file_system_that_does_not_grow_has_the_kubelets_text() {
    let node = Node::new();
    let device = LoopDevice::new(node.base.path());
    let (volume, path) = (local(Path::new(&device.0)), &device.0);
    let mount = node.root().join("plugins/kubernetes.io/local-volume/mounts/pv-1");
    for (results, expected) in [
        (&[(2, "")][..], Ok(())),
        (&[(0, "TYPE=ext4\n"), (0, "")], Ok(())),
        (
            &[(0, "TYPE=ext4\n"), (1, "bad magic")],
            Err(format!("resize of device {path} failed: exit status 1. resize2fs output: bad magic")),
        ),
        (
            &[(0, "TYPE=vfat\n")],
            Err(format!(
                "ResizeFS.Resize - resize of format vfat is not supported for device {path} mounted at {}",
                mount.display()
            )),
        ),
    ] {
        let (_, mounter) = with_results(&node, results);
        let expanded = mounter.expand(&volume).await.map_err(|error| error.to_string());
        assert_eq!(expanded, expected);
    }
    let (_, mounter) = with_results(&node, &[(4, "gone")]);
    let error = mounter.expand(&volume).await.unwrap_err().to_string();
    assert!(
        error.starts_with(&format!("ResizeFS.Resize - error checking format for device {path}: ")),
        "{error}"
    );
}
