//! Rebuilds the actual state from the directories of pods after a restart (`reconciler/reconstruct.go`).

use quintlet_model::ids::PodUid;

use crate::VolumeName;
use crate::actual::Actual;

/// A volume directory of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodVolumeDir {
    /// UID in the path of the pod's directory.
    pub pod: PodUid,
    /// Name of the directory: that of the PersistentVolume or inline volume.
    pub spec_name: String,
    /// The unique name, and whether the plugin mounts a device for all pods, as the plugin derived them.
    pub volume: (VolumeName, bool),
}

/// Adds the volumes that were found on disk to the actual state, as uncertain mounts, and the devices that
/// are mounted without a pod.
pub fn reconstruct(actual: &mut Actual, found: Vec<PodVolumeDir>, devices: &[VolumeName]) {
    for PodVolumeDir { pod, spec_name, volume: (name, has_device) } in found {
        actual.found(&name, &pod, spec_name, has_device);
    }
    for device in devices {
        actual.found_device(device);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actual::MountState;

    #[test]
    fn volumes_on_disk_are_uncertain() {
        let uid = |n: u8| PodUid::parse(&format!("u{n}")).unwrap();
        let name = VolumeName::shared("kubernetes.io/csi", "d^h");
        let lone = VolumeName::shared("kubernetes.io/csi", "d^lone");
        let mut actual = Actual::default();
        let found = |n, spec_name: &str, volume| PodVolumeDir {
            pod: uid(n),
            spec_name: spec_name.to_owned(),
            volume,
        };
        reconstruct(
            &mut actual,
            vec![found(1, "pv", (name.clone(), true)), found(2, "pv", (name.clone(), true))],
            &[name.clone(), lone.clone()],
        );
        let volume = actual.volume(&name).unwrap();
        assert_eq!((volume.device, volume.pods.len()), (Some(MountState::Uncertain), 2));
        assert!(
            volume.pods.values().all(|mount| mount.reconstructed && mount.state == MountState::Uncertain)
        );
        assert!(actual.volume(&lone).unwrap().pods.is_empty());
        assert!(actual.needs_attachments());
    }
}
