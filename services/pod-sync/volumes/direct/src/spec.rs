//! What the specification of a pod says about its volumes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Pod, Volume, VolumeMount};
use quintlet_model::pod;

pub(crate) fn fs_group(pod: &Pod) -> Option<u32> {
    let group = pod::spec(pod).security_context.as_ref()?.fs_group?;
    u32::try_from(group).ok()
}

fn mounts_of(pod: &Pod) -> Vec<&[VolumeMount]> {
    let spec = pod::spec(pod);
    let own = spec.containers.iter().chain(pod::init_containers(pod)).map(|c| c.volume_mounts.as_deref());
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|c| c.volume_mounts.as_deref());
    own.chain(ephemeral).flatten().collect()
}

/// Returns whether a pod's worker sets a volume up in its pass, by this crate. The others can hang, and tasks
/// mount them: that of a claim, a generic ephemeral or inline CSI one, nfs, iscsi, fc, or a type that became
/// a CSI driver.
#[must_use]
pub fn is_direct(volume: &Volume) -> bool {
    volume.nfs.is_none()
        && volume.iscsi.is_none()
        && volume.fc.is_none()
        && volume.persistent_volume_claim.is_none()
        && volume.ephemeral.is_none()
        && volume.csi.is_none()
        && !became_csi(volume)
}

/// Returns whether the in-tree plugin of a volume became a CSI driver
/// (`pkg/volume/csimigration: IsMigratable`).
#[must_use]
pub fn became_csi(volume: &Volume) -> bool {
    volume.aws_elastic_block_store.is_some()
        || volume.azure_disk.is_some()
        || volume.azure_file.is_some()
        || volume.cinder.is_some()
        || volume.gce_persistent_disk.is_some()
        || volume.portworx_volume.is_some()
        || volume.vsphere_volume.is_some()
}

/// Returns the volumes that a container mounts or uses as a device. The others are ignored.
#[must_use]
pub fn referenced(pod: &Pod) -> Vec<&Volume> {
    let spec = pod::spec(pod);
    let mut names: BTreeSet<&str> = mounts_of(pod).into_iter().flatten().map(|m| m.name.as_str()).collect();
    let devices =
        spec.containers.iter().chain(pod::init_containers(pod)).filter_map(|c| c.volume_devices.as_ref());
    names.extend(devices.flatten().map(|d| d.name.as_str()));
    spec.volumes.iter().flatten().filter(|v| names.contains(v.name.as_str())).collect()
}

/// Returns, by volume, the outermost directories on which other volumes of a container are mounted. Linear in
/// the mounts of the pod except for sorting them, since a pod may have thousands.
pub(crate) fn nested_mount_points(pod: &Pod) -> BTreeMap<String, BTreeSet<PathBuf>> {
    let clean = |path: &str| -> PathBuf { Path::new("/").join(path).components().collect() };
    let mut out: BTreeMap<String, BTreeSet<PathBuf>> = BTreeMap::new();
    for mounts in mounts_of(pod) {
        let mut all: Vec<(PathBuf, &str)> =
            mounts.iter().map(|m| (clean(&m.mount_path), m.name.as_str())).collect();
        all.sort();
        for (at, (own, volume)) in all.iter().enumerate() {
            let mut outermost: Option<&PathBuf> = None;
            // Sorted by components, descendants follow their ancestor.
            let behind = all.iter().skip(at).map(|(point, _)| point);
            for point in behind.take_while(|point| point.starts_with(own)).filter(|point| *point != own) {
                let Ok(inside) = point.strip_prefix(own) else { continue };
                if outermost.is_none_or(|o| !point.starts_with(o)) {
                    outermost = Some(point);
                    out.entry((*volume).to_owned()).or_default().insert(inside.to_owned());
                }
            }
        }
    }
    out
}
