//! The volumes that the directories describe, after a restart.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use pod_sync_csi::PLUGIN;
use pod_sync_csi::error::CsiError;
use pod_sync_csi::paths::Root;
use pod_sync_csi::reconstruct::{block_volumes, published, staged, staged_blocks};
use pod_sync_csi::volume_data::VolumeData;
use pod_sync_direct_volumes::found::FoundVolume;
use pod_sync_in_tree::found::{FoundDevice, FoundInPod};
use pod_sync_volume_reconcile::VolumeName;
use pod_sync_volume_reconcile::reconstruct::PodVolumeDir;
use quintlet_model::ids::PodUid;

use crate::claims::shared_name;
use crate::in_tree;
use crate::metrics::PluginLabel;
use crate::work::Form;

/// The content of the directories.
#[derive(Debug, Default)]
pub(crate) struct OnDisk {
    /// The volumes of pods.
    pub(crate) volumes: Vec<PodVolumeDir>,
    /// Volumes that workers of pods set up.
    pub(crate) direct: Vec<FoundVolume>,
    /// Volumes that are staged.
    pub(crate) devices: Vec<VolumeName>,
    /// SELinux labels of staged volumes that are mounted with one.
    pub(crate) labels: BTreeMap<VolumeName, String>,
    /// How each volume is mounted.
    pub(crate) forms: BTreeMap<VolumeName, Form>,
    /// The plugin of each volume.
    pub(crate) plugins: BTreeMap<VolumeName, PluginLabel>,
    /// Volumes of pods without readable metadata.
    pub(crate) unreadable: BTreeSet<VolumeName>,
}

/// Reads the directories. Blocks.
///
/// # Errors
/// Fails if a directory cannot be read.
pub(crate) fn read(root: &Root) -> io::Result<OnDisk> {
    let mut disk = OnDisk::default();
    for found in published(root)? {
        let Ok(pod) = PodUid::parse(&found.pod) else { continue };
        let spec_name = found.name.replace('~', "/");
        let data = known(found.found.data);
        let is_unreadable = data.is_none();
        let plugin = data.as_ref().map(|data| PluginLabel::of_driver(&data.driver_name));
        let volume = match data {
            Some(data) if !data.is_ephemeral() => {
                let name = shared_name(&data.driver_name, &data.volume_handle);
                let global_mount = root.global_mount(&data.driver_name, &data.volume_handle).ok();
                disk.forms.insert(name.clone(), Form::FileSystem { global_mount });
                (name, true)
            }
            // An inline volume, or one without metadata, which is removed like one.
            Some(_) | None => {
                let name = VolumeName::of_pod(PLUGIN, &pod, &spec_name);
                disk.forms.insert(name.clone(), Form::FileSystem { global_mount: None });
                (name, false)
            }
        };
        disk.plugins.extend(plugin.map(|plugin| (volume.0.clone(), plugin)));
        if is_unreadable {
            disk.unreadable.insert(volume.0.clone());
        }
        disk.volumes.push(PodVolumeDir { pod, spec_name, volume });
    }
    for found in staged(root)? {
        let name = match known(found.data) {
            Some(data) => {
                let name = shared_name(&data.driver_name, &data.volume_handle);
                disk.plugins.insert(name.clone(), PluginLabel::of_driver(&data.driver_name));
                if !data.selinux_mount_context.is_empty() {
                    disk.labels.insert(name.clone(), data.selinux_mount_context);
                }
                name
            }
            // Its directory is removed if nothing is mounted there.
            None => VolumeName::shared(PLUGIN, &found.path.display().to_string()),
        };
        let form = Form::FileSystem { global_mount: Some(found.path) };
        disk.forms.insert(name.clone(), form);
        disk.devices.push(name);
    }
    let links = block_volumes(root)?;
    for found in staged_blocks(root)? {
        let name = match known(found.data) {
            Some(data) => {
                let name = shared_name(&data.driver_name, &data.volume_handle);
                disk.plugins.insert(name.clone(), PluginLabel::of_driver(&data.driver_name));
                name
            }
            None => VolumeName::shared(PLUGIN, &format!("volumeDevices/{}", found.name)),
        };
        disk.forms.insert(name.clone(), Form::Block { spec_name: found.name.clone() });
        let linked = links.iter().filter(|link| link.name == found.name).map(|link| link.pod.as_str());
        let mut pods: Vec<&str> = found.pods.iter().map(String::as_str).chain(linked).collect();
        pods.sort_unstable();
        pods.dedup();
        for pod in pods.into_iter().filter_map(|pod| PodUid::parse(pod).ok()) {
            let volume = (name.clone(), true);
            disk.volumes.push(PodVolumeDir { pod, spec_name: found.name.clone(), volume });
        }
        disk.devices.push(name);
    }
    Ok(disk)
}

/// A file that cannot be read is the trace of a process that ended while it wrote the file, if nothing is
/// mounted.
fn known(data: Result<Option<VolumeData>, CsiError>) -> Option<VolumeData> {
    data.unwrap_or_else(|error| {
        tracing::warn!(error = error.text(), "volume data is unreadable");
        None
    })
}

/// Adds the volumes without a driver. Blocks.
///
/// # Errors
/// Fails if a directory cannot be read.
pub(crate) fn read_in_tree(root: &Path, disk: &mut OnDisk) -> io::Result<()> {
    let (volumes, devices) = pod_sync_in_tree::found::read(root)?;
    for FoundInPod { pod, plugin, name, is_block, device } in volumes {
        let (volume, device) = match device {
            Some(device) => (in_tree::name_on_disk(plugin, &device), Some(device)),
            None => (VolumeName::of_pod(plugin.name(), &pod, &name), None),
        };
        let has_device = device.is_some();
        disk.plugins.insert(volume.clone(), PluginLabel::of_plugin(plugin.name()));
        let form = Form::InTree { plugin, is_block, device: device.unwrap_or_default() };
        disk.forms.insert(volume.clone(), form);
        disk.volumes.push(PodVolumeDir { pod, spec_name: name, volume: (volume, has_device) });
    }
    for FoundDevice { plugin, name, is_block, label } in devices {
        let volume = in_tree::name_on_disk(plugin, &name);
        disk.labels.extend(label.map(|label| (volume.clone(), label)));
        disk.plugins.insert(volume.clone(), PluginLabel::of_plugin(plugin.name()));
        disk.forms.insert(volume.clone(), Form::InTree { plugin, is_block, device: name });
        disk.devices.push(volume);
    }
    Ok(())
}
