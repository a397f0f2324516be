//! Block volumes: staged once per node, published to each pod as a device (`pkg/volume/csi/csi_block.go`).
//!
//! | operation | steps |
//! |---|---|
//! | stage | create the data directory; write `vol_data.json`; create the staging directory; call the driver |
//! | publish | create the publish directory; call the driver; bind the device to `dev/<pod UID>`; link it in the pod's directory |
//! | unpublish | remove the link; unmount `dev/<pod UID>`, with a loop device on it; call the driver; remove what it left |
//! | unstage | remove the publish directory and `dev`; call the driver; remove the staging directory, `vol_data.json` and its directory |
//!
//! The kubelet also attaches a loop device to `dev/<pod UID>`, which holds the device open. This crate
//! attaches none, and detaches that of a kubelet whose volumes it takes over.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use pod_sync_plugins::call::Deadline;
use quintlet_kit::failpoint::step;
use quintlet_kit::{task, tree};

use crate::client::Access;
use crate::error::{Certainty, CsiError};
use crate::mount::{Mounter, Publish, Stage, after, make_directory, mount_call};
use crate::paths::{self, BlockPaths};
use crate::removal;
use crate::volume_data::VolumeData;

impl Mounter {
    /// Stages a block volume (`SetUpDevice`). Returns the staging directory, or `None` if the driver does not
    /// stage volumes. Call this for those drivers, too: it writes the metadata.
    ///
    /// # Errors
    /// Fails as [`Mounter::stage`] does.
    pub async fn stage_block(&self, args: &Stage) -> Result<Option<PathBuf>, CsiError> {
        let volume = &args.volume;
        let paths = self.root.block(&volume.name)?;
        let driver = self
            .drivers
            .get(&volume.driver)
            .map_err(|e| e.at("blockMapper.SetUpDevice failed to get CSI client"))?;
        let deadline = Deadline::after(self.limit);
        let capabilities = driver.client.capabilities(deadline).await.map_err(|e| {
            let step = "blockMapper.stageVolumeForBlock failed to check STAGE_UNSTAGE_VOLUME capability";
            CsiError::NotCalled(e).at(step)
        })?;
        let data_dir = paths.data();
        let made = data_dir.clone();
        let created =
            step!("directory of block volume created", task::blocking(move || make_directory(&made)));
        let data = VolumeData {
            attachment_id: paths::attachment_name(&volume.handle, &volume.driver, &self.node),
            driver_name: volume.driver.clone(),
            node_name: self.node.clone(),
            spec_volume_id: volume.name.clone(),
            volume_handle: volume.handle.clone(),
            ..VolumeData::default()
        };
        let saved = match created {
            Ok(()) => self.save(&data_dir, data).await,
            Err(error) => Err(error),
        };
        if let Err(error) = saved {
            return Err(block_failed(error, paths).await);
        }
        if !capabilities.stage_unstage {
            return Ok(None);
        }
        let made = paths.staging.clone();
        let created =
            step!("staging directory of block volume created", task::blocking(move || make_directory(&made)));
        if let Err(error) = created {
            return Err(block_failed(error, paths).await);
        }
        let call = mount_call(volume, &args.publish_context, &args.secrets, Access::Block, capabilities);
        match step!("block volume staged", driver.client.stage(deadline, call, &paths.staging)) {
            Ok(()) => Ok(Some(paths.staging)),
            Err(error) => Err(block_failed(CsiError::Call(error), paths).await),
        }
    }

    /// Publishes a staged block volume to a pod (`MapPodDevice`), and returns the path of the pod's link to
    /// its device.
    ///
    /// # Errors
    /// Fails as [`Mounter::publish`] does. After an error, the volume counts as published.
    pub async fn publish_block(&self, args: &Publish) -> Result<PathBuf, CsiError> {
        let volume = &args.volume;
        let paths = self.root.block(&volume.name)?;
        let published = paths.published(&args.pod)?;
        let mapped = paths.mapped(&args.pod)?;
        let link = self.root.pod_device(&args.pod, &volume.name)?;
        let driver = self
            .drivers
            .get(&volume.driver)
            .map_err(|e| e.at("blockMapper.MapPodDevice failed to get CSI client"))?;
        let deadline = Deadline::after(self.limit);
        let capabilities = driver.client.capabilities(deadline).await.map_err(CsiError::NotCalled)?;
        let made = paths.publish.clone();
        step!("publish directory of block volume created", task::blocking(move || make_directory(&made)))?;
        let staging = capabilities.stage_unstage.then_some(paths.staging.as_path());
        let call = mount_call(volume, &args.publish_context, &args.secrets, Access::Block, capabilities);
        let publish = driver.client.publish(deadline, call, staging, &published, volume.read_only);
        step!("block volume published", publish)?;
        let source = published.clone();
        step!("device of block volume bound", task::blocking(move || bind(&source, &mapped)))?;
        let made = link.clone();
        step!("device of block volume linked", task::blocking(move || make_link(&published, &made)))?;
        Ok(link)
    }

    /// Unpublishes a pod's block volume (`UnmapPodDevice`). Does nothing if the pod has no directory of the
    /// volume.
    ///
    /// # Errors
    /// Fails as [`Mounter::unpublish`] does. The volume then counts as published.
    pub async fn unpublish_block(&self, pod: &str, volume: &str) -> Result<(), CsiError> {
        let paths = self.root.block(volume)?;
        let (published, mapped) = (paths.published(pod)?, paths.mapped(pod)?);
        let link = self.root.pod_device(pod, volume)?;
        let data_dir = paths.data();
        let data = task::blocking(move || VolumeData::load(&data_dir)).await;
        let data = data.map_err(|e| e.while_unmounting("unmapper failed to load volume data file"))?;
        step!("link to device removed", task::blocking(move || removal::file(&link)))?;
        step!("device of block volume unmounted", task::blocking(move || removal::unmount_device(&mapped)))?;
        if let Some(data) = data {
            let driver = self
                .drivers
                .get(&data.driver_name)
                .map_err(|e| e.while_unmounting("blockMapper.UnmapPodDevice failed to get CSI client"))?;
            let deadline = Deadline::after(self.limit);
            step!(
                "block volume unpublished",
                driver.client.unpublish(deadline, &data.volume_handle, &published)
            )
            .map_err(|e| CsiError::Call(e).while_unmounting("blockMapper.unpublishVolumeForBlock failed"))?;
        }
        let target = published.clone();
        if !step!("published device removed", task::blocking(move || removal::mount_point(&target)))? {
            return Err(CsiError::StillMounted { path: published, call: "NodeUnpublishVolume" });
        }
        Ok(())
    }

    /// Unstages a block volume, and removes its directories (`TearDownDevice`). Does nothing if the volume
    /// has no directory. The driver is not called while a pod has a device of the volume.
    ///
    /// # Errors
    /// Fails as [`Mounter::unstage`] does. The volume then counts as staged.
    pub async fn unstage_block(&self, volume: &str) -> Result<(), CsiError> {
        let paths = self.root.block(volume)?;
        let (data_dir, staging) = (paths.data(), paths.staging.clone());
        let data = task::blocking(move || VolumeData::load(&data_dir)).await;
        let data = data.map_err(|e| e.while_unmounting("unmapper failed to load volume data file"))?;
        let in_use = "blockMapper.TearDownDevice failed to remove the directories of the volume's devices";
        remove_published(&paths).await.map_err(|e| e.while_unmounting(in_use))?;
        let is_staged = task::blocking(move || staging.exists()).await;
        if let Some(data) = data.filter(|_| is_staged) {
            let driver = self
                .drivers
                .get(&data.driver_name)
                .map_err(|e| e.while_unmounting("blockMapper.TearDownDevice failed to get CSI client"))?;
            let deadline = Deadline::after(self.limit);
            let capabilities = driver.client.capabilities(deadline).await.map_err(|e| {
                let step =
                    "blockMapper.unstageVolumeForBlock failed to check STAGE_UNSTAGE_VOLUME capability";
                CsiError::Call(e).while_unmounting(step)
            })?;
            if capabilities.stage_unstage {
                let unstaged = driver.client.unstage(deadline, &data.volume_handle, &paths.staging);
                step!("block volume unstaged", unstaged).map_err(|e| {
                    CsiError::Call(e).while_unmounting("blockMapper.unstageVolumeForBlock failed")
                })?;
            }
        }
        remove_staged(paths)
            .await
            .map_err(|e| e.while_unmounting("failed to clean up block volume directory"))
    }
}

/// Removes the directories of a block volume after an error that is final, and returns the error.
async fn block_failed(error: CsiError, paths: BlockPaths) -> CsiError {
    match error.certainty() {
        Certainty::Finished => after(error, remove_all(paths).await),
        Certainty::Uncertain | Certainty::Transient => error,
    }
}

async fn remove_all(paths: BlockPaths) -> Result<(), CsiError> {
    remove_published(&paths).await?;
    remove_staged(paths).await
}

/// Removes the directories of a block volume's devices. Fails if a pod has a device.
async fn remove_published(paths: &BlockPaths) -> Result<(), CsiError> {
    let (publish, devices) = (paths.publish.clone(), paths.devices());
    step!("publish directory of block volume removed", task::blocking(move || removal::directory(&publish)))?;
    step!("devices of block volume removed", task::blocking(move || removal::directory(&devices)))
}

/// Removes the other directories of a block volume, and the metadata file after everything that needs it.
async fn remove_staged(paths: BlockPaths) -> Result<(), CsiError> {
    let (staging, data) = (paths.staging.clone(), paths.data());
    // Some drivers leave files behind. A mount in the directory is an error.
    step!(
        "staging directory of block volume removed",
        task::blocking(
            move || tree::remove(&staging).map_err(CsiError::file("remove staging path", &staging))
        )
    )?;
    let of_data = data.clone();
    step!("data of block volume removed", task::blocking(move || removal::data(&of_data)))?;
    step!(
        "directory of block volume removed",
        task::blocking(move || removal::directory(&data).and_then(|()| removal::directory(&paths.volume)))
    )
}

/// Creates a file and bind-mounts a device on it. Does nothing if the file is a mount point already, since an
/// earlier process may have bound the device.
fn bind(device: &Path, target: &Path) -> Result<(), CsiError> {
    if !removal::mount_point(target)? {
        return Ok(());
    }
    if let Some(dir) = target.parent() {
        make_directory(dir)?;
    }
    fs::File::create_new(target).map_err(CsiError::file("create file", target))?;
    rustix::mount::mount_bind(device, target)
        .map_err(|e| CsiError::file("bind the device to", target)(e.into()))
}

/// Creates a symbolic link, or replaces an existing one.
fn make_link(device: &Path, link: &Path) -> Result<(), CsiError> {
    if let Some(dir) = link.parent() {
        make_directory(dir)?;
    }
    removal::file(link)?;
    let made: io::Result<()> = std::os::unix::fs::symlink(device, link);
    made.map_err(CsiError::file("create link", link))
}
