//! Volumes without a driver in the desired state, and their unmounts.

use pod_sync_in_tree::block::BlockMapper;
use pod_sync_in_tree::mount::Mounter;
use pod_sync_in_tree::volume::{Plugin, Source, Volume};
use pod_sync_in_tree::{fc, iscsi};
use pod_sync_volume_reconcile::VolumeName;
use pod_sync_volume_reconcile::desired::{DesiredVolume, Reach};
use quintlet_model::ids::PodUid;

use crate::claims::Sizes;

/// Returns the unique name of a volume. Pods share those with a device.
pub(crate) fn unique_name(pod: &PodUid, volume: &Volume) -> VolumeName {
    let plugin = volume.plugin().name();
    match &volume.source {
        Source::Local { .. } => VolumeName::shared(plugin, &volume.name),
        Source::Iscsi(source) => VolumeName::shared(plugin, &source.unique_name()),
        Source::Fc(source) => VolumeName::shared(plugin, &source.unique_name()),
        Source::HostPath { .. } | Source::Nfs { .. } => VolumeName::of_pod(plugin, pod, &volume.name),
    }
}

/// Returns the unique name of a volume with this device, as the name of the device's directory gives it. It
/// may differ from that of the PersistentVolume: a directory has the port of a portal even if the volume has
/// none.
pub(crate) fn name_on_disk(plugin: Plugin, device: &str) -> VolumeName {
    let name = match plugin {
        Plugin::Iscsi => iscsi::Disk::of_directory(device).map(|disk| disk.unique_name()),
        Plugin::Fc => fc::Disk::of_directory(device).map(|disk| disk.unique_name()),
        Plugin::Local | Plugin::HostPath | Plugin::Nfs => None,
    };
    VolumeName::shared(plugin.name(), &name.unwrap_or_else(|| device.to_owned()))
}

/// Returns the volume for the desired state. With `controller_attaches`, a disk waits until the controller
/// has marked it as attached.
pub(crate) fn desired(
    pod: &PodUid,
    volume: &Volume,
    sizes: Option<&Sizes>,
    controller_attaches: bool,
) -> DesiredVolume {
    let reach = match volume.plugin() {
        Plugin::Local => Reach::DeviceMountable,
        Plugin::Iscsi | Plugin::Fc if controller_attaches => Reach::Attachable,
        Plugin::Iscsi | Plugin::Fc => Reach::DeviceMountable,
        Plugin::HostPath | Plugin::Nfs => Reach::PerPod,
    };
    // A volume is not expanded through a pod that only reads it.
    let sizes = sizes.filter(|_| !volume.is_read_only());
    let size = sizes.map(Sizes::capacity_bytes).filter(|bytes| *bytes > 0);
    DesiredVolume { name: unique_name(pod, volume), spec_name: volume.name.clone(), reach, size, label: None }
}

/// Unmounts a pod's volume. `device` is the name of the device's directory; empty if it is not known.
///
/// # Errors
/// Returns the text of the error. The volume then counts as mounted.
pub(crate) async fn unmount(
    mounter: &Mounter,
    (plugin, is_block, device): (Plugin, bool, &str),
    pod: &PodUid,
    name: &str,
) -> Result<(), String> {
    let device = Some(device).filter(|device| !device.is_empty());
    let unmounted = match is_block {
        true => BlockMapper::of(mounter).unmap(plugin, pod, name, device).await,
        false => mounter.unpublish(plugin, pod, name).await,
    };
    unmounted.map_err(|error| error.to_string())
}

/// Unmounts the device of a volume, and detaches a disk.
///
/// # Errors
/// Returns the text of the error. The device then counts as mounted.
pub(crate) async fn unmount_device(
    mounter: &Mounter,
    (plugin, is_block, device): (Plugin, bool, &str),
) -> Result<(), String> {
    let unmounted = match plugin {
        Plugin::Local if is_block => BlockMapper::of(mounter).unmap_device(device).await,
        Plugin::Local => mounter.unstage(device).await,
        Plugin::Iscsi | Plugin::Fc => mounter.detach(plugin, is_block, device).await,
        Plugin::HostPath | Plugin::Nfs => Ok(()),
    };
    unmounted.map_err(|error| error.to_string())
}
