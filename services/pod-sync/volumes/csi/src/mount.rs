//! Volumes with a file system: staged once per node, published to each pod.
//!
//! Each operation is a list of steps, each with at most one effect:
//!
//! | operation | steps |
//! |---|---|
//! | stage, publish | create the directory; write `vol_data.json`; call the driver |
//! | after an error that is final | remove the mount point; remove `vol_data.json`; remove the directory |
//! | unpublish, unstage | call the driver; remove the mount point; remove `vol_data.json`; remove the directory |
//!
//! `vol_data.json` exists before the first call and until the mount point is gone, so that a process that
//! starts after any step knows the driver of each mount. A failpoint is before and after each step.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pod_sync_plugins::call::{CallError, Deadline};
use quintlet_kit::failpoint::step;
use quintlet_kit::{failpoint, mount_table, task};

use crate::client::{
    Access, Capabilities, ExpandCall, HealthCall, HealthEntry, LIMIT, MountCall, StorageEntry, VolumeStats,
};
use crate::drivers::{Driver, Drivers};
use crate::error::{Certainty, CsiError};
use crate::paths::{self, Root};
use crate::removal;
use crate::volume::{Secrets, Volume};
use crate::volume_data::{LifecycleMode, VolumeData};

/// Mode of a volume's directory.
const DIRECTORY_MODE: u32 = 0o750;

/// Arguments of [`Mounter::stage`].
#[derive(Debug, Clone)]
pub struct Stage {
    /// The volume to stage.
    pub volume: Volume,
    /// Metadata of the attachment.
    pub publish_context: BTreeMap<String, String>,
    /// Content of `nodeStageSecretRef`.
    pub secrets: Secrets,
    /// `fsGroup` of the pod, which the driver or the node agent applies.
    pub fs_group: Option<i64>,
    /// SELinux label to mount with, if the driver supports it.
    pub selinux_label: Option<String>,
}

/// Arguments of [`Mounter::publish`].
#[derive(Debug, Clone)]
pub struct Publish {
    /// The volume. Its attributes include those of the pod and its tokens, if the driver asks for them.
    pub volume: Volume,
    /// UID of the pod.
    pub pod: String,
    /// Metadata of the attachment.
    pub publish_context: BTreeMap<String, String>,
    /// Content of `nodePublishSecretRef`.
    pub secrets: Secrets,
    /// The pod's fsGroup.
    pub fs_group: Option<i64>,
    /// SELinux label to mount with, if the driver supports it.
    pub selinux_label: Option<String>,
    /// Whether the volume may be mounted already: it was published before, or found on disk. An error then
    /// removes nothing.
    pub mounted_before: bool,
    /// The reason why the driver does not provide volumes of this mode, if it does not. Such a volume is not
    /// published.
    pub refusal: Option<String>,
}

/// Result of [`Mounter::publish`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// The mount point.
    pub path: PathBuf,
    /// Whether the driver applied fsGroup.
    pub group_applied: bool,
}

/// Arguments of [`Mounter::expand`].
#[derive(Debug, Clone)]
pub struct Expand {
    /// The volume to expand.
    pub volume: Volume,
    /// UID of a pod that has the volume.
    pub pod: String,
    /// The pod has the volume as a block device.
    pub is_block: bool,
    /// Requested size in bytes.
    pub bytes: i64,
    /// Content of `nodeExpandSecretRef`.
    pub secrets: Secrets,
}

/// Mounts and unmounts volumes. It keeps no state: all is on disk and in the drivers.
///
/// Cancellation safety: an operation whose future is dropped ends after its current step. It can be repeated
/// or undone.
#[derive(Debug, Clone)]
pub struct Mounter {
    pub(crate) root: Root,
    pub(crate) node: String,
    pub(crate) drivers: Arc<Drivers>,
    pub(crate) limit: Duration,
}

impl Mounter {
    /// Returns a mounter for the volumes below a root directory, on the node with this name.
    #[must_use]
    pub fn new(root: Root, node: String, drivers: Arc<Drivers>) -> Self {
        Self { root, node, drivers, limit: LIMIT }
    }

    /// Returns a mounter whose operations take at most `limit` instead of two minutes.
    #[must_use]
    pub fn with_limit(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// Stages a volume for all pods of the node (`MountDevice`). Returns its mount point, or `None` if the
    /// driver does not stage volumes.
    ///
    /// # Errors
    /// Fails if the driver is not registered or refuses, or if a file cannot be written.
    /// [`CsiError::certainty`] says whether the volume may be staged.
    pub async fn stage(&self, args: &Stage) -> Result<Option<PathBuf>, CsiError> {
        let volume = &args.volume;
        let path = self.root.global_mount(&volume.driver, &volume.handle)?;
        let driver = self
            .drivers
            .get(&volume.driver)
            .map_err(|e| e.at("attacher.MountDevice failed to create newCsiDriverClient"))?;
        let deadline = Deadline::after(self.limit);
        let capabilities = driver.client.capabilities(deadline).await.map_err(CsiError::NotCalled)?;
        if !capabilities.stage_unstage {
            return Ok(None);
        }
        let dir = parent(&path);
        let made = path.clone();
        let created =
            step!("directory of staged volume created", task::blocking(move || make_directory(&made)))
                .map_err(|e| e.at("attacher.MountDevice failed to create dir"));
        let data = VolumeData {
            driver_name: volume.driver.clone(),
            volume_handle: volume.handle.clone(),
            selinux_mount_context: args.selinux_label.clone().unwrap_or_default(),
            ..VolumeData::default()
        };
        self.prepared(created, &dir, data, Some(&*path)).await?;
        let access = file_system(volume, args.selinux_label.as_deref(), args.fs_group, capabilities);
        let call = mount_call(volume, &args.publish_context, &args.secrets, access, capabilities);
        match step!("volume staged", driver.client.stage(deadline, call, &path)) {
            Ok(()) => Ok(Some(path)),
            Err(error) => Err(self.failed(error, &path, true).await),
        }
    }

    /// Publishes a volume to a pod (`SetUpAt`). The volume was staged before, if its driver stages volumes.
    ///
    /// # Errors
    /// Fails if the driver is not registered or refuses, or if a file cannot be written.
    /// [`CsiError::certainty`] says whether the volume may be mounted.
    pub async fn publish(&self, args: &Publish) -> Result<Published, CsiError> {
        let volume = &args.volume;
        let path = self.root.mount(&args.pod, &volume.name)?;
        let driver =
            self.drivers.get(&volume.driver).map_err(|e| e.at("mounter.SetUpAt failed to get CSI client"))?;
        if let Some(refusal) = &args.refusal {
            let refused = CsiError::Refused(refusal.clone());
            return Err(refused.at("mounter.SetupAt failed to check volume lifecycle mode"));
        }
        let deadline = Deadline::after(self.limit);
        let capabilities = driver.client.capabilities(deadline).await.map_err(|e| {
            CsiError::NotCalled(e).at("mounter.SetUpAt failed to check for STAGE_UNSTAGE_VOLUME capability")
        })?;
        let staged = match volume.lifecycle {
            LifecycleMode::Persistent if capabilities.stage_unstage => {
                Some(self.root.global_mount(&volume.driver, &volume.handle)?)
            }
            LifecycleMode::Persistent | LifecycleMode::Ephemeral => None,
        };
        let dir = parent(&path);
        let made = dir.clone();
        let created = step!("directory of volume created", task::blocking(move || make_directory(&made)))
            .map_err(|e| e.at("mounter.SetUpAt failed to create dir"));
        let data = VolumeData {
            attachment_id: paths::attachment_name(&volume.handle, &volume.driver, &self.node),
            driver_name: volume.driver.clone(),
            node_name: self.node.clone(),
            selinux_mount_context: args.selinux_label.clone().unwrap_or_default(),
            spec_volume_id: volume.name.clone(),
            volume_handle: volume.handle.clone(),
            volume_lifecycle_mode: format!("{:?}", volume.lifecycle),
        };
        self.prepared(created, &dir, data, Some(&*path).filter(|_| !args.mounted_before)).await?;
        let access = file_system(volume, args.selinux_label.as_deref(), args.fs_group, capabilities);
        let call = mount_call(volume, &args.publish_context, &args.secrets, access, capabilities);
        let published = driver.client.publish(deadline, call, staged.as_deref(), &path, volume.read_only);
        match step!("volume published", published) {
            Ok(()) => Ok(Published { path, group_applied: capabilities.volume_mount_group }),
            Err(error) => {
                let removes = !args.mounted_before || failpoint::planted!("failed publish removes the mount");
                Err(self.failed(error, &path, removes).await)
            }
        }
    }

    /// Unpublishes a pod's volume and removes its directory (`TearDownAt`). Does nothing if the directory
    /// does not exist.
    ///
    /// # Errors
    /// Fails if the driver is not registered or refuses, if a mount is left, or if the directory has other
    /// content. The volume then counts as mounted.
    pub async fn unpublish(&self, pod: &str, volume: &str) -> Result<(), CsiError> {
        let path = self.root.mount(pod, volume)?;
        let data = match self.load(&path).await {
            Ok(Some(data)) => data,
            unknown => return self.remove_unknown(&path, unknown.err()).await,
        };
        let driver = self
            .drivers
            .get(&data.driver_name)
            .map_err(|e| e.while_unmounting("Unmounter.TearDownAt failed to get CSI client"))?;
        let deadline = Deadline::after(self.limit);
        step!("volume unpublished", driver.client.unpublish(deadline, &data.volume_handle, &path))
            .map_err(|e| CsiError::Call(e).while_unmounting("Unmounter.TearDownAt failed"))?;
        remove(&path, "NodeUnpublishVolume").await.map_err(|e| {
            e.while_unmounting(format!("Unmounter.TearDownAt failed to clean mount dir [{}]", path.display()))
        })
    }

    /// Unstages the volume at a global mount point and removes its directory (`UnmountDevice`). Does nothing
    /// if the directory does not exist.
    ///
    /// # Errors
    /// Returns [`CsiError::InUse`] if a pod has a mount of the volume. Fails if the driver is not registered
    /// or refuses, if a mount is left, or if the directory has other content. The volume then counts as
    /// staged.
    pub async fn unstage(&self, global_mount: &Path) -> Result<(), CsiError> {
        let data = match self.load(global_mount).await {
            Ok(Some(data)) => data,
            unknown => return self.remove_unknown(global_mount, unknown.err()).await,
        };
        let (path, pods) = (global_mount.to_owned(), self.root.pods());
        let references = move || -> std::io::Result<_> {
            let mounts = mount_table::read()?;
            let is_mounted = mount_table::is_mount_point(&mounts, &path);
            Ok(if is_mounted { mount_table::references(&mounts, &path, &pods) } else { Vec::new() })
        };
        let mounts =
            task::blocking(references).await.map_err(CsiError::file("read the mounts of", global_mount))?;
        if !mounts.is_empty() {
            return Err(CsiError::InUse { path: global_mount.to_owned(), mounts });
        }
        let driver = self
            .drivers
            .get(&data.driver_name)
            .map_err(|e| e.while_unmounting("attacher.UnmountDevice failed to create newCsiDriverClient"))?;
        let deadline = Deadline::after(self.limit);
        let capabilities = driver.client.capabilities(deadline).await.map_err(|e| {
            let step = "attacher.UnmountDevice failed to check whether STAGE_UNSTAGE_VOLUME set";
            CsiError::Call(e).while_unmounting(step)
        })?;
        if capabilities.stage_unstage {
            step!("volume unstaged", driver.client.unstage(deadline, &data.volume_handle, global_mount))
                .map_err(|e| CsiError::Call(e).while_unmounting("attacher.UnmountDevice failed"))?;
        }
        remove(global_mount, "NodeUnstageVolume").await.map_err(|e| {
            let dir = parent(global_mount);
            e.while_unmounting(format!("failed to clean up global mount {}", dir.display()))
        })
    }

    /// Returns the usage of a published volume (`NodeGetVolumeStats`).
    ///
    /// # Errors
    /// Fails if the driver is not registered, does not support statistics, or refuses.
    pub async fn stats(&self, driver: &str, handle: &str, path: &Path) -> Result<VolumeStats, CsiError> {
        let driver = self.drivers.get(driver)?;
        let deadline = Deadline::after(self.limit);
        if !driver.client.capabilities(deadline).await?.volume_stats {
            return Err(unsupported("NodeGetVolumeStats", &driver));
        }
        Ok(driver.client.volume_stats(deadline, handle, path).await?)
    }

    /// Returns the usage of the volume at a mount point, or `None` if its driver is unknown or does not
    /// report it.
    ///
    /// # Errors
    /// Fails if the driver is not registered, or refuses.
    pub async fn stats_at(&self, path: &Path) -> Result<Option<VolumeStats>, CsiError> {
        // Unreadable metadata was logged when the volume was found.
        let Ok(Some(data)) = self.load(path).await else { return Ok(None) };
        let driver = self.drivers.get(&data.driver_name)?;
        let deadline = Deadline::after(self.limit);
        let capabilities = driver.client.capabilities(deadline).await?;
        if !capabilities.volume_stats {
            return Ok(None);
        }
        Ok(Some(driver.client.volume_stats(deadline, &data.volume_handle, path).await?))
    }

    /// Returns whether a driver reports the health of volumes.
    ///
    /// # Errors
    /// Fails if the driver is not registered, or refuses.
    pub async fn reports_health(&self, driver: &str) -> Result<bool, CsiError> {
        let driver = self.drivers.get(driver)?;
        Ok(driver.client.capabilities(Deadline::after(self.limit)).await?.volume_health)
    }

    /// Returns what is wrong with a volume of a driver that reports the health of volumes
    /// (`NodeGetVolumeHealth`).
    ///
    /// # Errors
    /// Fails if the driver is not registered, or refuses.
    pub async fn health(&self, driver: &str, args: &HealthCall) -> Result<Vec<HealthEntry>, CsiError> {
        let driver = self.drivers.get(driver)?;
        Ok(driver.client.volume_health(Deadline::after(self.limit), args).await?)
    }

    /// Returns what is wrong with the storage of a driver (`NodeGetStorageHealth`), or `None` if the driver
    /// does not report it.
    ///
    /// # Errors
    /// Fails if the driver is not registered, or refuses.
    pub async fn storage_health(&self, driver: &str) -> Result<Option<Vec<StorageEntry>>, CsiError> {
        let driver = self.drivers.get(driver)?;
        if !driver.client.capabilities(Deadline::after(self.limit)).await?.storage_health {
            return Ok(None);
        }
        Ok(Some(driver.client.storage_health(Deadline::after(self.limit)).await?))
    }

    /// Expands a published volume (`NodeExpand`), and returns its new size in bytes.
    ///
    /// # Errors
    /// Fails if the driver is not registered, does not support expansion on the node, or refuses;
    /// [`crate::client::ExpansionFailure`] says what a refusal means.
    pub async fn expand(&self, args: &Expand) -> Result<i64, CsiError> {
        let volume = &args.volume;
        let driver = self.drivers.get(&volume.driver)?;
        let deadline = Deadline::after(self.limit);
        let capabilities = driver.client.capabilities(deadline).await.map_err(|e| {
            CsiError::Call(e).at("Expander.NodeExpand failed to check if node supports expansion")
        })?;
        if !capabilities.expand {
            return Err(unsupported("NodeExpand", &driver));
        }
        let (path, staging, access) = if args.is_block {
            let paths = self.root.block(&volume.name)?;
            (paths.published(&args.pod)?, paths.staging, Access::Block)
        } else {
            let (fs_type, options) = (volume.fs_type.clone(), volume.mount_options.clone());
            let staging = self.root.global_mount(&volume.driver, &volume.handle)?;
            let access = Access::Mount { fs_type, options, group: None };
            (self.root.mount(&args.pod, &volume.name)?, staging, access)
        };
        let call = ExpandCall {
            handle: &volume.handle,
            path: &path,
            staging: capabilities.stage_unstage.then_some(staging.as_path()),
            bytes: args.bytes.max(0),
            access,
            mode: volume.access_mode(),
            secrets: &args.secrets,
            capabilities,
            migrated: volume.migrated,
        };
        Ok(step!("volume expanded", driver.client.expand(deadline, call))?)
    }

    /// Writes the metadata if the directory could be created. After an error, as on a full disk, the
    /// directory of the mount point `new` is removed again, unless something is mounted there.
    async fn prepared(
        &self,
        created: Result<(), CsiError>,
        dir: &Path,
        data: VolumeData,
        new: Option<&Path>,
    ) -> Result<(), CsiError> {
        let prepared = match created {
            Ok(()) => self.save(dir, data).await,
            Err(error) => Err(error),
        };
        match (prepared, new) {
            (Err(error), Some(path)) => Err(after(error, remove(path, "an error").await)),
            (prepared, _) => prepared,
        }
    }

    pub(crate) async fn save(&self, dir: &Path, data: VolumeData) -> Result<(), CsiError> {
        let dir = dir.to_owned();
        step!("volume data written", task::blocking(move || data.save(&dir)))
    }

    /// Reads the metadata of the volume at a mount point.
    async fn load(&self, path: &Path) -> Result<Option<VolumeData>, CsiError> {
        let dir = parent(path);
        task::blocking(move || VolumeData::load(&dir)).await
    }

    /// Removes the directory of a volume whose driver is unknown, if nothing is mounted there. `unreadable`
    /// is what is wrong with its metadata: the process ended while it wrote the file, which is before the
    /// first call of the driver, or the machine lost its power.
    async fn remove_unknown(&self, path: &Path, unreadable: Option<CsiError>) -> Result<(), CsiError> {
        match (remove(path, "").await, unreadable) {
            (Ok(()), Some(error)) => {
                let path = path.display();
                tracing::warn!(%path, error = error.text(), "volume with unreadable data removed");
                Ok(())
            }
            (Err(CsiError::StillMounted { path, .. }), _) => Err(CsiError::UnknownDriver(path)),
            (removed, _) => removed,
        }
    }

    /// Removes the directory of a volume after an error that is final, if `remove_directory` is set, and
    /// returns the error.
    async fn failed(&self, error: CallError, path: &Path, remove_directory: bool) -> CsiError {
        let error = CsiError::Call(error);
        if !remove_directory || error.certainty() != Certainty::Finished {
            return error;
        }
        after(error, remove(path, "an error of the driver").await)
    }
}

/// Returns the error of an operation after the removal of what it made. If something is left, nothing is
/// certain about the volume, so that it is unmounted with its pod.
pub(crate) fn after(error: CsiError, removed: Result<(), CsiError>) -> CsiError {
    match removed {
        Ok(()) => error,
        Err(left) => {
            tracing::info!(
                error = left.text(),
                "failed to remove volume directory, the volume counts as mounted"
            );
            CsiError::Left(Box::new(error))
        }
    }
}

fn unsupported(operation: &'static str, driver: &Driver) -> CsiError {
    CsiError::Unsupported { operation, driver: driver.name.clone() }
}

pub(crate) fn mount_call<'a>(
    volume: &'a Volume,
    publish_context: &'a BTreeMap<String, String>,
    secrets: &'a Secrets,
    access: Access,
    capabilities: Capabilities,
) -> MountCall<'a> {
    MountCall {
        handle: &volume.handle,
        publish_context,
        attributes: volume.attributes.clone(),
        access,
        mode: volume.access_mode(),
        secrets,
        capabilities,
        migrated: volume.migrated,
    }
}

/// Access as a file system, with fsGroup if the driver applies it.
fn file_system(
    volume: &Volume,
    selinux_label: Option<&str>,
    fs_group: Option<i64>,
    capabilities: Capabilities,
) -> Access {
    let group = fs_group.filter(|_| capabilities.volume_mount_group);
    Access::Mount { fs_type: volume.fs_type.clone(), options: volume.options(selinux_label), group }
}

/// Returns the directory of a mount point, which has the metadata file.
fn parent(path: &Path) -> PathBuf {
    path.parent().unwrap_or(path).to_owned()
}

pub(crate) fn make_directory(dir: &Path) -> Result<(), CsiError> {
    use std::os::unix::fs::DirBuilderExt as _;
    let made = std::fs::DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(dir);
    made.map_err(CsiError::file("create directory", dir))
}

/// Removes the mount point, the metadata file and the directory of a volume. Stops before the metadata file
/// if a mount is left.
async fn remove(path: &Path, call: &'static str) -> Result<(), CsiError> {
    let (target, dir) = (path.to_owned(), parent(path));
    if !step!("mount point removed", task::blocking(move || removal::mount_point(&target)))? {
        return Err(CsiError::StillMounted { path: path.to_owned(), call });
    }
    let data = dir.clone();
    step!("volume data removed", task::blocking(move || removal::data(&data)))?;
    step!("directory of volume removed", task::blocking(move || removal::directory(&dir)))
}
