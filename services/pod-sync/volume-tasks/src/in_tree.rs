//! Volumes without a driver in the desired state, and their unmounts.

use pod_sync_in_tree::mount::Mounter;
use pod_sync_in_tree::volume::{Plugin, Volume};
use pod_sync_volume_manager::VolumeName;
use pod_sync_volume_manager::desired::{DesiredVolume, Reach};
use quintlet_model::ids::PodUid;

/// Returns the unique name of a volume. Pods share a `local` one, because of its device.
pub(crate) fn unique_name(pod: &PodUid, plugin: Plugin, name: &str) -> VolumeName {
    match plugin {
        Plugin::Local => VolumeName::shared(plugin.name(), name),
        Plugin::HostPath | Plugin::Nfs => VolumeName::of_pod(plugin.name(), pod, name),
    }
}

/// Returns the volume for the desired state.
pub(crate) fn desired(pod: &PodUid, volume: &Volume) -> DesiredVolume {
    let reach = match volume.plugin() {
        Plugin::Local => Reach::DeviceMountable,
        Plugin::HostPath | Plugin::Nfs => Reach::PerPod,
    };
    let name = unique_name(pod, volume.plugin(), &volume.name);
    DesiredVolume { name, spec_name: volume.name.clone(), reach, size: None, label: None }
}

/// Unmounts a pod's volume.
///
/// # Errors
/// Returns the text of the error. The volume then counts as mounted.
pub(crate) async fn unmount(
    mounter: &Mounter,
    plugin: Plugin,
    is_block: bool,
    pod: &PodUid,
    name: &str,
) -> Result<(), String> {
    let unmounted = match is_block {
        true => mounter.unmap(pod, name).await,
        false => mounter.unpublish(plugin, pod, name).await,
    };
    unmounted.map_err(|error| error.to_string())
}

/// Unmounts the device of a volume.
///
/// # Errors
/// Returns the text of the error. The device then counts as mounted.
pub(crate) async fn unmount_device(
    mounter: &Mounter,
    plugin: Plugin,
    is_block: bool,
    name: &str,
) -> Result<(), String> {
    let unmounted = match plugin {
        Plugin::Local if is_block => mounter.unmap_device(name).await,
        Plugin::Local => mounter.unstage(name).await,
        Plugin::HostPath | Plugin::Nfs => Ok(()),
    };
    unmounted.map_err(|error| error.to_string())
}
