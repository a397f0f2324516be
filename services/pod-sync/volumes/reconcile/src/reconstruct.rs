//! Rebuilds the actual state from the directories of pods after a restart (`reconciler/reconstruct.go`).

use quintlet_model::ids::PodUid;

use crate::VolumeName;
use crate::actual::Actual;
use crate::desired::Desired;

/// A volume directory of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodVolumeDir {
    pub pod: PodUid,
    /// Name of the directory: that of the PersistentVolume or inline volume.
    pub spec_name: String,
    /// The unique name, and whether the plugin mounts a device for all pods, as the plugin derived them.
    /// `None` if the plugin is unknown or cannot read its metadata.
    pub volume: Option<(VolumeName, bool)>,
}

/// A directory that no plugin could make a volume of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Orphan {
    pub pod: PodUid,
    /// Name of the directory.
    pub spec_name: String,
}

/// Adds the volumes that were found on disk to the actual state, as uncertain mounts, and the devices that
/// are mounted without a pod. Returns the directories to remove once it is known that no pod uses them.
pub fn reconstruct(actual: &mut Actual, found: Vec<PodVolumeDir>, devices: &[VolumeName]) -> Vec<Orphan> {
    let mut orphans = Vec::new();
    for PodVolumeDir { pod, spec_name, volume } in found {
        match volume {
            Some((name, device)) => actual.found(&name, &pod, spec_name, device),
            None => orphans.push(Orphan { pod, spec_name }),
        }
    }
    for device in devices {
        actual.found_device(device);
    }
    orphans
}

/// Returns the orphans that may be removed: those that no pod has. Call this once the desired state is complete. The others are
/// mounted again, which completes their metadata.
#[must_use]
pub fn removable(orphans: Vec<Orphan>, desired: &Desired) -> Vec<Orphan> {
    orphans.into_iter().filter(|orphan| !desired.has_spec_name(&orphan.pod, &orphan.spec_name)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::actual::MountState;
    use crate::desired::{DesiredVolume, Reach};

    #[test]
    fn volumes_on_disk_are_uncertain_and_unreadable_ones_are_removed_only_if_no_pod_has_them() {
        let uid = |n: u8| PodUid::parse(&format!("u{n}")).unwrap();
        let name = VolumeName::shared("kubernetes.io/csi", "d^h");
        let lone = VolumeName::shared("kubernetes.io/csi", "d^lone");
        let mut actual = Actual::default();
        let found = |n, spec_name: &str, volume| PodVolumeDir {
            pod: uid(n),
            spec_name: spec_name.to_owned(),
            volume,
        };
        let orphans = reconstruct(
            &mut actual,
            vec![
                found(1, "pv", Some((name.clone(), true))),
                found(2, "pv", Some((name.clone(), true))),
                found(1, "torn", None),
                found(2, "torn", None),
            ],
            &[name.clone(), lone.clone()],
        );
        let volume = actual.volume(&name).unwrap();
        assert_eq!((volume.device, volume.pods.len()), (Some(MountState::Uncertain), 2));
        assert!(
            volume.pods.values().all(|mount| mount.reconstructed && mount.state == MountState::Uncertain)
        );
        assert!(actual.volume(&lone).unwrap().pods.is_empty());
        assert!(actual.needs_attachments());
        let mut desired = Desired::default();
        let torn = VolumeName::of_pod("kubernetes.io/csi", &uid(1), "torn");
        let torn = DesiredVolume {
            name: torn,
            spec_name: "torn".to_owned(),
            reach: Reach::PerPod,
            size: None,
            label: None,
        };
        desired.set(&uid(1), BTreeMap::from([("t".to_owned(), torn)]), []);
        assert_eq!(removable(orphans, &desired), [Orphan { pod: uid(2), spec_name: "torn".to_owned() }]);
    }
}
