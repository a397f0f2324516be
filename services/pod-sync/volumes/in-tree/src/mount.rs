//! Volumes with a file system.
//!
//! | volume | stage | publish |
//! |---|---|---|
//! | `local`, directory | nothing | bind the directory; change its group for the first pod |
//! | `local`, block device | make a file system if the device has none; mount it | as a directory |
//! | `hostPath` | nothing | check the type of the path |
//! | `nfs` | nothing | mount with mount(8) |
//! | `iscsi`, `fc` | attach the disk; then as a block device | bind the mount of the disk |
//!
//! A mount is the last effect but for its options and the group of its files, which are applied again if the
//! mount exists.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pod_sync_direct_volumes::host_path;
use pod_sync_direct_volumes::ownership::GroupChange;
use quintlet_kit::failpoint::step;
use quintlet_kit::{mount_table, task};
use quintlet_model::ids::PodUid;
use rustix::mount::MountFlags;
use tokio_util::sync::CancellationToken;

use crate::commands::{self, Commands, SystemCommands, Until};
use crate::error::Error;
use crate::host::Host;
use crate::paths::Paths;
use crate::removal;
use crate::targets::Targets;
use crate::volume::{Plugin, Source, Volume};

/// Mode of a volume's directory.
const DIRECTORY_MODE: u32 = 0o750;
/// Limit of an orderly umount of an NFS volume, whose server may be gone.
const UMOUNT_LIMIT: Duration = Duration::from_secs(60);
/// File system of a `local` block device without `fsType`.
const DEFAULT_FS_TYPE: &str = "ext4";
/// Limit of tools that make, check or enlarge a file system. A device that hangs longer is gone.
pub(crate) const FILE_SYSTEM_LIMIT: Duration = Duration::from_hours(2);
/// Limit of reads of a device's format, and of mounts, which may replay a journal.
const DEVICE_LIMIT: Duration = Duration::from_mins(10);
/// `blkid` found nothing on the device.
const BLKID_NOTHING: i32 = 2;
/// `fsck` left errors on the device.
const FSCK_UNCORRECTED: i32 = 4;

/// Group that a pod requests for the files of a volume.
#[derive(Clone, Copy)]
pub struct Group<'a> {
    /// The pod's fsGroup.
    pub id: Option<u32>,
    /// The files are changed only if the group or mode of the root directory differs (`fsGroupChangePolicy`).
    pub only_if_root_differs: bool,
    /// Gets messages about a change that takes long.
    pub report: &'a (dyn Fn(String) + Send + Sync),
}

/// Mounts and unmounts volumes. Clones share the root directory.
#[derive(Clone)]
pub struct Mounter {
    pub(crate) paths: Paths,
    pub(crate) commands: Arc<dyn Commands>,
    pub(crate) host: Host,
    pub(crate) targets: Targets,
}

impl std::fmt::Debug for Mounter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mounter").field("paths", &self.paths).finish_non_exhaustive()
    }
}

/// Kind of the file at the path of a `local` volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileKind {
    Directory,
    BlockDevice,
}

pub(crate) fn kind_of(path: &str) -> Result<FileKind, Error> {
    if path.is_empty() {
        return Err(Error::NoPath);
    }
    let kind = match fs::metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(Error::Absent(path.to_owned()));
        }
        Err(error) => return Err(Error::file("read", Path::new(path))(error)),
    };
    if kind.is_dir() {
        Ok(FileKind::Directory)
    } else if kind.is_block_device() {
        Ok(FileKind::BlockDevice)
    } else {
        Err(Error::NotMountable)
    }
}

impl Mounter {
    /// Returns a mounter for the root directory of the node agent.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        Self::with_commands(root, Arc::new(SystemCommands::default()))
    }

    /// Like [`Mounter::new`], with other commands.
    #[must_use]
    pub fn with_commands(root: &Path, commands: Arc<dyn Commands>) -> Self {
        Self { paths: Paths::new(root), commands, host: Host::default(), targets: Targets::default() }
    }

    /// Returns the mounter with other directories of devices.
    #[must_use]
    pub fn on_host(self, host: Host) -> Self {
        Self { host, ..self }
    }

    /// Returns the paths of the volumes.
    #[must_use]
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Checks that the source of a volume with a file system exists (`NewMounter`).
    ///
    /// # Errors
    /// A `local` path does not exist, or is neither a directory nor a block device. An `iscsi` or `fc` volume
    /// has no disk, or a name that cannot be part of a path.
    pub async fn check(&self, volume: &Volume) -> Result<(), Error> {
        match &volume.source {
            Source::Local { path, .. } => {
                let path = path.clone();
                task::blocking(move || kind_of(&path)).await.map(drop)
            }
            Source::Fc(source) if source.disk().is_none() => Err(Error::NoDisk("mounter")),
            Source::Iscsi(_) | Source::Fc(_) => {
                self.paths.disk(volume.plugin(), volume.is_block, &volume.device_name()).map(drop)
            }
            Source::HostPath { .. } | Source::Nfs { .. } => Ok(()),
        }
    }

    /// Checks that the plugin supports the mount options of a volume (`checkMountOptionSupport`).
    ///
    /// # Errors
    /// A `hostPath` volume has mount options.
    pub fn check_options(&self, volume: &Volume) -> Result<(), Error> {
        match volume.plugin() {
            Plugin::HostPath if !volume.mount_options.is_empty() => Err(Error::MountOptions),
            Plugin::HostPath | Plugin::Local | Plugin::Nfs | Plugin::Iscsi | Plugin::Fc => Ok(()),
        }
    }

    /// Mounts the block device of a `local` volume, or the `device` of an attached disk, and makes a file
    /// system first if the device is empty (`MountDevice`). A disk is mounted with the SELinux `label`, if
    /// there is one; `local` volumes have none.
    ///
    /// # Errors
    /// The device cannot be read, formatted or mounted.
    pub async fn stage(
        &self,
        volume: &Volume,
        device: Option<&Path>,
        label: Option<&str>,
    ) -> Result<(), Error> {
        if let Some(device) = device {
            return self.stage_disk(volume, device, label).await;
        }
        let Source::Local { path, fs_type } = &volume.source else { return Ok(()) };
        let (device, target) = (path.clone(), self.paths.device_mount(&volume.name)?);
        let mount_point = target.clone();
        let is_needed = task::blocking(move || {
            Ok(kind_of(&device)? == FileKind::BlockDevice && !is_mounted(&mount_point)?)
        });
        if !is_needed.await? {
            return Ok(());
        }
        let mount_point = target.clone();
        step!("directory of local device created", task::blocking(move || make_directory(&mount_point)))?;
        let fs_type = fs_type.as_deref().unwrap_or(DEFAULT_FS_TYPE);
        let mounted =
            step!("local device mounted", self.format_and_mount(volume, path, &target, Some(fs_type), None));
        mounted.map_err(|source| Error::Device {
            device: path.clone(),
            target,
            fs_type: fs_type.to_owned(),
            source: Box::new(source),
        })
    }

    /// Makes a file system on a device that has none, repairs one that exists, and mounts it
    /// (`k8s.io/mount-utils: formatAndMountSensitive`). A device that is mounted read-only is neither
    /// formatted nor repaired. Without `fs_type`, mount(8) finds the type of one that exists.
    pub(crate) async fn format_and_mount(
        &self,
        volume: &Volume,
        device: &str,
        target: &Path,
        fs_type: Option<&str>,
        label: Option<&str>,
    ) -> Result<(), Error> {
        let commands = &*self.commands;
        let existing = disk_format(commands, device).await?;
        let differs = existing.as_deref().zip(fs_type).is_some_and(|(existing, wanted)| existing != wanted);
        let fs_type = match existing {
            None if volume.is_read_only() => return Err(Error::UnformattedReadOnly(device.to_owned())),
            None => {
                let fs_type = fs_type.unwrap_or(DEFAULT_FS_TYPE);
                make_file_system(commands, device, fs_type).await?;
                Some(fs_type)
            }
            Some(_) if volume.is_read_only() => fs_type,
            Some(_) => {
                repair(commands, device).await?;
                fs_type
            }
        };
        let read_only = volume.read_only.then_some("ro");
        // The quotes allow a label with a comma.
        let context = label.map(|label| format!("context=\"{label}\""));
        let more = context.as_deref().into_iter().chain(read_only).chain(["defaults"]);
        let options = joined(&volume.mount_options, more);
        let kind = fs_type.map(|fs_type| words(["-t", fs_type])).unwrap_or_default();
        let arguments = [kind, words(["-o", &options, device]), vec![target.into()]].concat();
        let mounted = commands::mount(commands, arguments, Until::Limit(DEVICE_LIMIT)).await;
        mounted.map_err(|error| if differs { Error::OtherFileSystem(Box::new(error)) } else { error })
    }

    /// Makes a volume available to a pod (`SetUp`). Returns a warning for the pod, if there is one. A mount
    /// of nfs in progress is killed when `released` is cancelled.
    ///
    /// # Errors
    /// The volume cannot be mounted, or its files cannot be changed. It may be mounted then.
    pub async fn publish(
        &self,
        volume: &Volume,
        pod: &PodUid,
        group: Group<'_>,
        released: &CancellationToken,
    ) -> Result<Option<String>, Error> {
        match &volume.source {
            Source::Local { path, .. } => self.publish_local(volume, path, pod, group).await,
            Source::HostPath { path, kind } => {
                let (path, kind) = (path.clone(), kind.clone());
                let checked = task::blocking(move || host_path::check_type(&path, &kind)).await;
                checked.map(|()| None).map_err(Error::HostPath)
            }
            Source::Nfs { server, path } => {
                self.publish_nfs(volume, server, path, pod, released).await.map(|()| None)
            }
            Source::Iscsi(_) | Source::Fc(_) => self.publish_disk(volume, pod, group).await.map(|()| None),
        }
    }

    async fn publish_local(
        &self,
        volume: &Volume,
        path: &str,
        pod: &PodUid,
        group: Group<'_>,
    ) -> Result<Option<String>, Error> {
        if Path::new(path).components().any(|part| part == Component::ParentDir) {
            return Err(Error::Backsteps(path.to_owned()));
        }
        let target = self.paths.mount(Plugin::Local, pod, &volume.name)?;
        let device = self.paths.device_mount(&volume.name)?;
        let local_path = PathBuf::from(path);
        let pods = self.paths.pods();
        let at = target.clone();
        let found = task::blocking(move || -> Result<_, Error> {
            let source = match kind_of(&local_path.display().to_string())? {
                FileKind::Directory => local_path,
                FileKind::BlockDevice => device,
            };
            // The mount table has no links.
            let real = fs::canonicalize(&source).map_err(Error::file("read", &source))?;
            let mounts = mount_table::read().map_err(Error::file("read", Path::new(mount_table::FILE)))?;
            let own = at.display().to_string();
            let mut others = mount_table::references(&mounts, &real, &pods);
            others.retain(|other| *other != own);
            let owner = fs::metadata(&source).map_err(Error::file("read", &source))?.gid();
            Ok((source, mount_table::is_mount_point(&mounts, &at), others, owner))
        });
        let (source, is_mounted, others, owner) = found.await?;
        let at = target.clone();
        step!("directory of local volume created", task::blocking(move || make_directory(&at)))?;
        if !is_mounted {
            let (source, mount_point) = (source, target.clone());
            let bind = move || {
                rustix::mount::mount_bind(&source, &mount_point)
                    .map_err(|e| Error::file("bind", &mount_point)(e.into()))
            };
            step!("local volume bound", task::blocking(bind))?;
        }
        step!("options of local volume set", self.remount(volume, &target))?;
        let Some(id) = group.id.filter(|_| !volume.is_read_only()) else { return Ok(None) };
        if !others.is_empty() {
            // The files belong to the pod that mounted the volume first.
            let text = || {
                let name = &volume.name;
                format!(
                    "The requested fsGroup is {id}, but the volume {name} has GID {owner}. The volume may not be shareable."
                )
            };
            return Ok((owner != id).then(text));
        }
        // The root directory is changed last. Its group shows whether an earlier process changed all files.
        let only_if_root_differs = group.only_if_root_differs || is_mounted;
        let change = GroupChange { root: target, group: id, only_if_root_differs, pod: pod.to_string() };
        let failed = Error::file("change the group of", &change.root);
        step!("group of local volume changed", async { change.run(group.report).await.map_err(failed) })?;
        Ok(None)
    }

    /// Sets the options of a bind mount, which mount(2) ignores when it binds.
    async fn remount(&self, volume: &Volume, target: &Path) -> Result<(), Error> {
        if volume.mount_options.is_empty() {
            if !volume.read_only {
                return Ok(());
            }
            let mount_point = target.to_owned();
            let remount = move || {
                let flags = MountFlags::BIND | MountFlags::RDONLY;
                let remounted = rustix::mount::mount_remount(&mount_point, flags, c"");
                remounted.map_err(|error| Error::file("remount read-only", &mount_point)(error.into()))
            };
            return task::blocking(remount).await;
        }
        let read_only = volume.read_only.then_some("ro");
        let options = joined(&volume.mount_options, read_only.into_iter());
        let arguments = words(["-o", &format!("bind,remount,{options}")]);
        commands::mount(
            &*self.commands,
            [arguments, vec![target.into()]].concat(),
            Until::Limit(DEVICE_LIMIT),
        )
        .await
    }

    /// Binds the mount of a disk (`diskSetUp`).
    async fn publish_disk(&self, volume: &Volume, pod: &PodUid, group: Group<'_>) -> Result<(), Error> {
        let device = self.paths.disk(volume.plugin(), false, &volume.device_name())?;
        let target = self.paths.mount(volume.plugin(), pod, &volume.name)?;
        let (staged, at) = (device.clone(), target.clone());
        let (is_staged, is_bound) =
            task::blocking(move || Ok::<_, Error>((is_mounted(&staged)?, is_mounted(&at)?))).await?;
        if !is_staged {
            return Err(Error::NotStaged(device));
        }
        let at = target.clone();
        step!("directory of disk volume created", task::blocking(move || make_directory(&at)))?;
        if !is_bound {
            let mount_point = target.clone();
            let bind = move || {
                rustix::mount::mount_bind(&device, &mount_point)
                    .map_err(|e| Error::file("bind", &mount_point)(e.into()))
            };
            step!("disk volume bound", task::blocking(bind))?;
        }
        step!("options of disk volume set", self.remount(volume, &target))?;
        let Some(id) = group.id.filter(|_| !volume.is_read_only()) else { return Ok(()) };
        let only_if_root_differs = group.only_if_root_differs || is_bound;
        let change = GroupChange { root: target, group: id, only_if_root_differs, pod: pod.to_string() };
        // As in the kubelet, a pod gets a volume whose file system has no groups.
        if let Err(error) = step!("group of disk volume changed", change.run(group.report)) {
            tracing::info!(volume = volume.name, error = %error, "group of a volume's files is not changed");
        }
        Ok(())
    }

    async fn publish_nfs(
        &self,
        volume: &Volume,
        server: &str,
        path: &str,
        pod: &PodUid,
        released: &CancellationToken,
    ) -> Result<(), Error> {
        // mount(8) would take the source for an option.
        if server.is_empty() || server.starts_with('-') {
            return Err(Error::Server(server.to_owned()));
        }
        let target = self.paths.mount(Plugin::Nfs, pod, &volume.name)?;
        let at = target.clone();
        if task::blocking(move || is_mounted(&at)).await? {
            return Ok(());
        }
        let at = target.clone();
        step!("directory of nfs volume created", task::blocking(move || make_directory(&at)))?;
        let is_ipv6 = server.parse::<std::net::Ipv6Addr>().is_ok();
        let server = if is_ipv6 { format!("[{server}]") } else { server.to_owned() };
        let read_only = volume.read_only.then_some("ro");
        let options = joined(&volume.mount_options, read_only.into_iter());
        let mut arguments = words(["-t", "nfs"]);
        if !options.is_empty() {
            arguments.extend(words(["-o", &options]));
        }
        arguments.extend([OsString::from(format!("{server}:{path}")), target.into()]);
        step!("nfs volume mounted", commands::mount(&*self.commands, arguments, Until::Cancelled(released)))
    }

    /// Unmounts a pod's volume, and removes its mount point (`TearDown`). Does nothing if the pod has no
    /// directory of the volume.
    ///
    /// # Errors
    /// The mount is busy. The volume then counts as mounted.
    pub async fn unpublish(&self, plugin: Plugin, pod: &PodUid, name: &str) -> Result<(), Error> {
        let target = match plugin {
            Plugin::HostPath => return Ok(()),
            Plugin::Local | Plugin::Nfs | Plugin::Iscsi | Plugin::Fc => {
                self.paths.mount(plugin, pod, name)?
            }
        };
        let at = target.clone();
        if plugin == Plugin::Nfs && task::blocking(move || is_mounted(&at)).await? {
            step!("nfs volume unmounted", self.umount(&target))?;
        }
        step!("mount of volume removed", task::blocking(move || removal::unmount(&target)))
    }

    /// Unmounts with umount(8), with force if the server does not answer (`CleanupMountWithForce`).
    async fn umount(&self, target: &Path) -> Result<(), Error> {
        let commands = &*self.commands;
        let ended = commands::run(commands, "umount", &[target.into()], Until::Limit(UMOUNT_LIMIT)).await?;
        if ended.code == Some(0) {
            return Ok(());
        }
        let forced = [OsString::from("-f"), target.into()];
        let forced = commands::run(commands, "umount", &forced, Until::Limit(UMOUNT_LIMIT)).await?;
        if forced.code == Some(0) {
            return Ok(());
        }
        let command = format!("umount {}", target.display());
        Err(Error::Command { command, cause: forced.cause(), output: forced.output })
    }

    /// Unmounts the device of a `local` volume (`UnmountDevice`). Does nothing for a directory.
    ///
    /// # Errors
    /// A pod has the volume, or the mount is busy.
    pub async fn unstage(&self, name: &str) -> Result<(), Error> {
        let (target, pods) = (self.paths.device_mount(name)?, self.paths.pods());
        let unmount = move || {
            let mounts = mount_table::read().map_err(Error::file("read", Path::new(mount_table::FILE)))?;
            if mount_table::is_mount_point(&mounts, &target) {
                let mounts = mount_table::references(&mounts, &target, &pods);
                if !mounts.is_empty() {
                    return Err(Error::InUse { path: target, mounts });
                }
            }
            removal::unmount(&target)
        };
        step!("local device unmounted", task::blocking(unmount))
    }
}

/// Returns whether something is mounted at a path. Blocks.
pub(crate) fn is_mounted(path: &Path) -> Result<bool, Error> {
    let mounts = mount_table::read().map_err(Error::file("read", Path::new(mount_table::FILE)))?;
    Ok(mount_table::is_mount_point(&mounts, path))
}

pub(crate) fn make_directory(path: &Path) -> Result<(), Error> {
    let made = fs::DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(path);
    made.map_err(Error::file("create directory", path))
}

fn words<const N: usize>(words: [&str; N]) -> Vec<OsString> {
    words.into_iter().map(OsString::from).collect()
}

/// Joins mount options, sorted and without duplicates (`JoinMountOptions`).
fn joined<'a>(options: &'a [String], more: impl Iterator<Item = &'a str>) -> String {
    let mut all: Vec<&str> = options.iter().map(String::as_str).chain(more).collect();
    all.sort_unstable();
    all.dedup();
    all.join(",")
}

/// Returns the file system on a device, or `None` if it has none. A partition table counts as one.
pub(crate) async fn disk_format(commands: &dyn Commands, device: &str) -> Result<Option<String>, Error> {
    let arguments = words(["-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", device]);
    let ended = commands::run(commands, "blkid", &arguments, Until::Limit(DEVICE_LIMIT)).await?;
    let failed = |cause: String| Error::Command {
        command: format!("failed to get disk format of disk {device}: blkid"),
        cause,
        output: ended.output.clone(),
    };
    match ended.code {
        Some(0) => {}
        Some(BLKID_NOTHING) => return Ok(None),
        Some(_) | None => return Err(failed(ended.cause())),
    }
    let mut fs_type = None;
    for line in ended.output.lines().filter(|line| !line.is_empty()) {
        match line.split_once('=') {
            Some(("TYPE", value)) => fs_type = Some(value.to_owned()),
            Some(("PTTYPE", _)) => return Ok(Some("unknown data, probably partitions".to_owned())),
            Some(_) => {}
            None => return Err(failed("blkid returns invalid output".to_owned())),
        }
    }
    Ok(fs_type)
}

/// Makes a file system.
async fn make_file_system(commands: &dyn Commands, device: &str, fs_type: &str) -> Result<(), Error> {
    let (program, arguments) = match fs_type {
        "ext4" => ("mkfs.ext4", words(["-F", "-m0", device])),
        "ext3" => ("mkfs.ext3", words(["-F", "-m0", device])),
        "xfs" => ("mkfs.xfs", words(["-f", device])),
        other => ("mkfs", words(["-t", other, device])),
    };
    tracing::info!(device, fs_type, "formatting volume");
    let ended = commands::run(commands, program, &arguments, Until::Limit(FILE_SYSTEM_LIMIT)).await?;
    if ended.code == Some(0) {
        return Ok(());
    }
    let command = format!("format of disk {device:?} as {fs_type}");
    Err(Error::Command { command, cause: ended.cause(), output: ended.output })
}

/// Repairs a file system before it is mounted. Without `fsck` it is mounted as it is.
async fn repair(commands: &dyn Commands, device: &str) -> Result<(), Error> {
    let ended = match commands::run(commands, "fsck", &words(["-a", device]), Until::Limit(FILE_SYSTEM_LIMIT))
        .await
    {
        Err(Error::NoCommand(_)) => {
            tracing::info!(device, "fsck is not installed, mounting without a check");
            return Ok(());
        }
        other => other?,
    };
    let command = match ended.code {
        Some(FSCK_UNCORRECTED) => {
            format!("'fsck' found errors on device {device} but could not correct them: fsck")
        }
        // A check that was killed may have left half of a repair.
        None => format!("'fsck' of device {device} did not end by itself: fsck"),
        // 1: errors were corrected. As in the kubelet, the volume is mounted if the check itself failed, such
        // as without a tool for the file system.
        Some(_) => return Ok(()),
    };
    Err(Error::Command { command, cause: ended.cause(), output: ended.output })
}
