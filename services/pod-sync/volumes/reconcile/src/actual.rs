//! The actual state of the world: attached and mounted volumes (`cache/actual_state_of_world.go`).

use std::collections::BTreeMap;

use quintlet_model::ids::PodUid;

use crate::VolumeName;
use crate::desired::{DesiredVolume, Reach};

/// Certainty about the state of a volume after a failed operation (`pkg/volume/util/types:
/// IsOperationFinishedError`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Certainty {
    /// The operation has ended without its effect.
    Finished,
    /// The operation may be in progress or complete.
    Uncertain,
    /// The operation was not attempted.
    Transient,
}

/// Mount state of a pod's volume or of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MountState {
    /// Possibly mounted: an operation had an uncertain outcome, or the mount was found on disk. The
    /// reconciler mounts the volume again if it is desired, and unmounts it if not.
    Uncertain,
    /// Certainly mounted.
    Mounted,
}

/// Attachment state of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Attachment {
    /// Found on disk: the Node's status has not been read yet.
    Unknown,
    /// Attached by a controller.
    Attached,
    /// The plugin does not attach volumes.
    NotAttachable,
}

/// A volume that a pod has, certainly or possibly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedPod {
    /// Name of the PersistentVolume, or of an inline volume in the pod.
    pub spec_name: String,
    /// Whether the pod's mount exists.
    pub state: MountState,
    /// The mount is to be repeated, to refresh the content.
    pub remount: bool,
    /// Found on disk and not mounted by this process since: a failed mount does not prove that nothing is
    /// mounted.
    pub reconstructed: bool,
}

/// Whether a volume may be expanded when a larger size is desired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Expansion {
    /// The volume may be expanded.
    Allowed,
    /// The last attempt had nothing to do, and the next one is after the next declaration of a pod.
    Postponed,
    /// The driver does not expand the volume while it is in use. This holds as long as the volume is on the
    /// node.
    RefusedInUse,
}

/// A volume on the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActualVolume {
    /// Whether the volume is attached to the node.
    pub attachment: Attachment,
    /// Mount state of the device that all pods share; `None` if it is not mounted.
    pub device: Option<MountState>,
    /// The device was found on disk and not mounted by this process since.
    pub device_reconstructed: bool,
    /// SELinux label that the device is mounted with.
    pub device_label: Option<String>,
    /// Size of the volume in bytes, if known.
    pub size: Option<u64>,
    /// Whether the volume may be expanded.
    pub expansion: Expansion,
    /// The driver has refused an expansion.
    pub expansion_failed: bool,
    /// Pods that have the volume.
    pub pods: BTreeMap<PodUid, MountedPod>,
}

/// The volumes on the node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Actual {
    /// Volumes that tasks mount.
    volumes: BTreeMap<VolumeName, ActualVolume>,
    /// Volumes that the workers of pods set up.
    direct: BTreeMap<PodUid, BTreeMap<VolumeName, MountedPod>>,
}

impl Actual {
    /// Returns the state of a volume; `None` if nothing of it is on the node.
    #[must_use]
    pub fn volume(&self, name: &VolumeName) -> Option<&ActualVolume> {
        self.volumes.get(name)
    }

    /// Returns all volumes that tasks mount, sorted by name.
    pub fn volumes(&self) -> impl Iterator<Item = (&VolumeName, &ActualVolume)> {
        self.volumes.iter()
    }

    /// Returns a pod's mount of a volume.
    #[must_use]
    pub fn mount(&self, name: &VolumeName, pod: &PodUid) -> Option<&MountedPod> {
        let direct = self.direct.get(pod).and_then(|volumes| volumes.get(name));
        direct.or_else(|| self.volumes.get(name).and_then(|volume| volume.pods.get(pod)))
    }

    /// Returns the volumes that a pod certainly has: those that tasks mount, then those that its worker sets
    /// up, both sorted by name.
    pub fn mounted_by<'a>(&'a self, pod: &'a PodUid) -> impl Iterator<Item = &'a VolumeName> {
        let by_tasks = self.volumes.iter().filter_map(|(name, volume)| Some((name, volume.pods.get(pod)?)));
        let all = by_tasks.chain(self.direct_of(pod));
        all.filter(|(_, mount)| mount.state == MountState::Mounted).map(|(name, _)| name)
    }

    /// Returns whether a pod has volumes, certainly or possibly.
    #[must_use]
    pub fn may_have_mounts(&self, pod: &PodUid) -> bool {
        self.direct.contains_key(pod) || self.volumes.values().any(|volume| volume.pods.contains_key(pod))
    }

    /// Returns the volumes that a pod's worker has set up, certainly or possibly, sorted by name.
    pub fn direct_of(&self, pod: &PodUid) -> impl Iterator<Item = (&VolumeName, &MountedPod)> {
        self.direct.get(pod).into_iter().flatten()
    }

    /// Returns all volumes that workers have set up, certainly or possibly, with their pods, sorted by pod.
    pub fn all_direct(&self) -> impl Iterator<Item = (&PodUid, &VolumeName, &MountedPod)> {
        let volumes_of_pod = |(pod, volumes)| {
            let volumes: &BTreeMap<VolumeName, MountedPod> = volumes;
            volumes.iter().map(move |(name, mount)| (pod, name, mount))
        };
        self.direct.iter().flat_map(volumes_of_pod)
    }

    /// Adds a volume that a worker has set up before a restart.
    pub fn found_direct(&mut self, name: VolumeName, pod: &PodUid, spec_name: String) {
        let state = MountState::Uncertain;
        let mount = MountedPod { spec_name, state, remount: false, reconstructed: true };
        self.direct.entry(pod.clone()).or_default().insert(name, mount);
    }

    /// Records that a worker has set up a volume, or, if `is_stale`, that its content is there and could not
    /// be refreshed.
    pub fn direct_mounted(&mut self, volume: &DesiredVolume, pod: &PodUid, is_stale: bool) {
        let spec_name = volume.spec_name.clone();
        let mount =
            MountedPod { spec_name, state: MountState::Mounted, remount: is_stale, reconstructed: false };
        self.direct.entry(pod.clone()).or_default().insert(volume.name.clone(), mount);
    }

    /// Records that a worker could not set up a volume. One that was there before, or of which a part
    /// `is_left`, is uncertain now.
    pub fn direct_mount_failed(&mut self, volume: &DesiredVolume, pod: &PodUid, is_left: bool) {
        let present = self.direct.get_mut(pod).and_then(|volumes| volumes.get_mut(&volume.name));
        match present {
            Some(mount) => mount.state = MountState::Uncertain,
            None if is_left => {
                let (spec_name, state) = (volume.spec_name.clone(), MountState::Uncertain);
                let mount = MountedPod { spec_name, state, remount: false, reconstructed: false };
                self.direct.entry(pod.clone()).or_default().insert(volume.name.clone(), mount);
            }
            None => {}
        }
    }

    /// Requests that the set-up of a pod's volumes for which `refreshes` holds is repeated by its worker
    /// (`MarkRemountRequired`).
    pub fn request_direct_remount(&mut self, pod: &PodUid, refreshes: impl Fn(&VolumeName) -> bool) {
        for (name, mount) in self.direct.get_mut(pod).into_iter().flatten() {
            mount.remount |= refreshes(name);
        }
    }

    /// Returns whether another pod has a volume, certainly or possibly, which a volume with the access mode
    /// ReadWriteOncePod does not allow.
    #[must_use]
    pub fn is_mounted_elsewhere(&self, name: &VolumeName, pod: &PodUid) -> bool {
        self.volumes.get(name).is_some_and(|volume| volume.pods.keys().any(|other| other != pod))
    }

    /// Adds a volume that is attached, or that its plugin does not attach.
    pub fn attached(&mut self, volume: &DesiredVolume) {
        let attachment = match volume.reach {
            Reach::Attachable => Attachment::Attached,
            Reach::DeviceMountable | Reach::PerPod | Reach::Direct => Attachment::NotAttachable,
        };
        self.entry(&volume.name).attachment = attachment;
    }

    /// Adds a mount that was found on disk.
    pub(crate) fn found(&mut self, name: &VolumeName, pod: &PodUid, spec_name: String, device: bool) {
        let volume = self.entry(name);
        if device && volume.device.is_none() {
            volume.device = Some(MountState::Uncertain);
            volume.device_reconstructed = true;
        }
        let mount =
            MountedPod { spec_name, state: MountState::Uncertain, remount: false, reconstructed: true };
        volume.pods.entry(pod.clone()).or_insert(mount);
    }

    /// Adds a device that was found on disk without a pod.
    pub(crate) fn found_device(&mut self, name: &VolumeName) {
        let volume = self.entry(name);
        if volume.device.is_none() {
            volume.device = Some(MountState::Uncertain);
            volume.device_reconstructed = true;
        }
    }

    /// Gives a pod's volume that was found on disk under another name its declared name. The device follows
    /// the last pod.
    pub fn rename(&mut self, old: &VolumeName, new: &VolumeName, pod: &PodUid) {
        let Some(found) = self.volumes.get_mut(old) else { return };
        let mount = found.pods.remove(pod);
        let attachment = found.attachment;
        let rest = if found.pods.is_empty() { self.volumes.remove(old) } else { None };
        if mount.is_none() && rest.is_none() {
            return;
        }
        let is_new = !self.volumes.contains_key(new);
        let volume = self.entry(new);
        if is_new {
            volume.attachment = attachment;
        }
        if let Some(rest) = rest.filter(|_| volume.device.is_none()) {
            volume.device = rest.device;
            volume.device_reconstructed = rest.device_reconstructed;
            volume.device_label = rest.device_label;
        }
        if let Some(mount) = mount {
            volume.pods.entry(pod.clone()).or_insert(mount);
        }
    }

    /// Completes volumes that were found on disk with the Node's `status.volumesAttached`.
    pub fn attachments_known(&mut self, attached: &[VolumeName]) {
        for (name, volume) in &mut self.volumes {
            if volume.attachment == Attachment::Unknown {
                let is_attached = attached.contains(name);
                volume.attachment =
                    if is_attached { Attachment::Attached } else { Attachment::NotAttachable };
            }
        }
    }

    /// Returns whether a volume that was found on disk waits for the Node's status.
    #[must_use]
    pub fn needs_attachments(&self) -> bool {
        self.volumes.values().any(|volume| volume.attachment == Attachment::Unknown)
    }

    /// Records the SELinux label with which the device of a volume is mounted, certainly or possibly.
    pub fn set_device_label(&mut self, name: &VolumeName, label: Option<String>) {
        if let Some(volume) = self.volumes.get_mut(name) {
            volume.device_label = label;
        }
    }

    /// Records that the device of a volume is mounted.
    pub fn device_mounted(&mut self, name: &VolumeName) {
        let volume = self.entry(name);
        volume.device = Some(MountState::Mounted);
        volume.device_reconstructed = false;
    }

    /// Records that a mount of a device failed (`markDeviceErrorState`).
    pub fn device_mount_failed(&mut self, name: &VolumeName, certainty: Certainty) {
        let Some(volume) = self.volumes.get_mut(name) else { return };
        match (certainty, volume.device) {
            (Certainty::Finished, Some(MountState::Uncertain)) if !volume.device_reconstructed => {
                volume.device = None
            }
            (Certainty::Uncertain, None) => volume.device = Some(MountState::Uncertain),
            (Certainty::Finished | Certainty::Uncertain | Certainty::Transient, _) => {}
        }
    }

    /// Records that the device of a volume is unmounted.
    pub fn device_unmounted(&mut self, name: &VolumeName) {
        if let Some(volume) = self.volumes.get_mut(name) {
            volume.device = None;
            volume.device_label = None;
            volume.device_reconstructed = false;
        }
    }

    /// Records that an unmount of a device failed. It may be in progress.
    pub fn device_unmount_failed(&mut self, name: &VolumeName) {
        if let Some(volume) = self.volumes.get_mut(name).filter(|volume| volume.device.is_some()) {
            volume.device = Some(MountState::Uncertain);
        }
    }

    /// Records that a pod has a volume.
    pub fn mounted(&mut self, volume: &DesiredVolume, pod: &PodUid) {
        let spec_name = volume.spec_name.clone();
        let mount =
            MountedPod { spec_name, state: MountState::Mounted, remount: false, reconstructed: false };
        self.entry(&volume.name).pods.insert(pod.clone(), mount);
    }

    /// Records that a mount failed (`markVolumeErrorState`). The mount of a running pod stays: a failed
    /// refresh changes nothing.
    pub fn mount_failed(&mut self, desired: &DesiredVolume, pod: &PodUid, certainty: Certainty) {
        let Some(volume) = self.volumes.get_mut(&desired.name) else { return };
        let state = volume.pods.get(pod).map(|mount| (mount.state, mount.reconstructed));
        match (certainty, state) {
            (Certainty::Finished, Some((MountState::Uncertain, false))) => drop(volume.pods.remove(pod)),
            (Certainty::Uncertain, None) => {
                let spec_name = desired.spec_name.clone();
                let state = MountState::Uncertain;
                volume.pods.insert(
                    pod.clone(),
                    MountedPod { spec_name, state, remount: false, reconstructed: false },
                );
            }
            (Certainty::Finished | Certainty::Uncertain | Certainty::Transient, _) => {}
        }
    }

    /// Records that a pod no longer has a volume.
    pub fn unmounted(&mut self, name: &VolumeName, pod: &PodUid) {
        if let Some(volume) = self.volumes.get_mut(name) {
            volume.pods.remove(pod);
        }
        if let Some(volumes) = self.direct.get_mut(pod) {
            volumes.remove(name);
            if volumes.is_empty() {
                self.direct.remove(pod);
            }
        }
    }

    /// Records that an unmount failed. It may be in progress.
    pub fn unmount_failed(&mut self, name: &VolumeName, pod: &PodUid) {
        let direct = self.direct.get_mut(pod).and_then(|volumes| volumes.get_mut(name));
        let by_tasks = self.volumes.get_mut(name).and_then(|volume| volume.pods.get_mut(pod));
        if let Some(mount) = direct.or(by_tasks) {
            mount.state = MountState::Uncertain;
        }
    }

    /// Records the size of a volume that was not known (`InitializeClaimSize`).
    pub fn initialize_size(&mut self, name: &VolumeName, size: u64) {
        if let Some(volume) = self.volumes.get_mut(name).filter(|volume| volume.size.is_none()) {
            volume.size = Some(size).filter(|size| *size > 0);
        }
    }

    /// Records whether a volume may be expanded.
    pub fn set_expansion(&mut self, name: &VolumeName, expansion: Expansion) {
        if let Some(volume) = self.volumes.get_mut(name) {
            volume.expansion = expansion;
        }
    }

    /// Allows an expansion that was postponed.
    pub fn resume_expansion(&mut self, name: &VolumeName) {
        if let Some(volume) = self.volumes.get_mut(name).filter(|v| v.expansion == Expansion::Postponed) {
            volume.expansion = Expansion::Allowed;
        }
    }

    /// Records that the driver refused an expansion.
    pub fn expansion_failed(&mut self, name: &VolumeName) {
        if let Some(volume) = self.volumes.get_mut(name) {
            volume.expansion_failed = true;
        }
    }

    /// Records the size of a volume.
    pub fn resized(&mut self, name: &VolumeName, size: u64) {
        if let Some(volume) = self.volumes.get_mut(name) {
            volume.size = Some(size);
        }
    }

    /// Requests that the mounts of a pod for which `refreshes` holds are repeated (`MarkRemountRequired`).
    pub fn request_remount(&mut self, pod: &PodUid, refreshes: impl Fn(&VolumeName) -> bool) {
        for (name, volume) in &mut self.volumes {
            if let Some(mount) = volume.pods.get_mut(pod).filter(|_| refreshes(name)) {
                mount.remount = true;
            }
        }
    }

    /// Removes a volume that no pod has and whose device is not mounted. Does nothing for another one.
    pub fn detached(&mut self, name: &VolumeName) {
        if self.volumes.get(name).is_some_and(|volume| volume.pods.is_empty() && volume.device.is_none()) {
            self.volumes.remove(name);
        }
    }

    fn entry(&mut self, name: &VolumeName) -> &mut ActualVolume {
        self.volumes.entry(name.clone()).or_insert_with(|| ActualVolume {
            attachment: Attachment::Unknown,
            device: None,
            device_reconstructed: false,
            device_label: None,
            size: None,
            expansion: Expansion::Allowed,
            expansion_failed: false,
            pods: BTreeMap::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume() -> DesiredVolume {
        let name = VolumeName::shared("kubernetes.io/csi", "d^h");
        DesiredVolume { name, spec_name: "pv".to_owned(), reach: Reach::Attachable, size: None, label: None }
    }

    fn pod() -> PodUid {
        PodUid::parse("u1").unwrap()
    }

    /// The table of `markVolumeErrorState`: state before, outcome, state after.
    #[test]
    fn a_failed_mount_changes_only_what_it_proves() {
        use MountState::{Mounted, Uncertain};
        let (v, p) = (volume(), pod());
        for (before, reconstructed, certainty, after) in [
            (None, false, Certainty::Finished, None),
            (None, false, Certainty::Uncertain, Some(Uncertain)),
            (None, false, Certainty::Transient, None),
            (Some(Uncertain), false, Certainty::Finished, None),
            (Some(Uncertain), false, Certainty::Uncertain, Some(Uncertain)),
            (Some(Uncertain), false, Certainty::Transient, Some(Uncertain)),
            (Some(Uncertain), true, Certainty::Finished, Some(Uncertain)),
            (Some(Mounted), false, Certainty::Finished, Some(Mounted)),
            (Some(Mounted), false, Certainty::Uncertain, Some(Mounted)),
            (Some(Mounted), false, Certainty::Transient, Some(Mounted)),
        ] {
            let mut actual = Actual::default();
            actual.attached(&v);
            match before {
                Some(Uncertain) if reconstructed => actual.found(&v.name, &p, "pv".to_owned(), true),
                Some(Uncertain) => actual.mount_failed(&v, &p, Certainty::Uncertain),
                Some(Mounted) => actual.mounted(&v, &p),
                None => {}
            }
            actual.mount_failed(&v, &p, certainty);
            let state = actual.mount(&v.name, &p).map(|mount| mount.state);
            assert_eq!(state, after, "{before:?} {reconstructed} {certainty:?}");

            let mut actual = Actual::default();
            actual.attached(&v);
            match before {
                Some(Uncertain) if reconstructed => actual.found_device(&v.name),
                Some(Uncertain) => actual.device_mount_failed(&v.name, Certainty::Uncertain),
                Some(Mounted) => actual.device_mounted(&v.name),
                None => {}
            }
            actual.device_mount_failed(&v.name, certainty);
            assert_eq!(
                actual.volume(&v.name).unwrap().device,
                after,
                "device {before:?} {reconstructed} {certainty:?}"
            );
        }
    }

    #[test]
    fn a_failed_set_up_by_a_worker_leaves_what_was_there_or_may_be_there_uncertain() {
        use MountState::{Mounted, Uncertain};
        let pod = pod();
        let name = VolumeName::of_pod("kubernetes.io/configmap", &pod, "c");
        let v = DesiredVolume { name, reach: Reach::Direct, ..volume() };
        for (before, is_left, after) in [
            (None, false, None),
            (None, true, Some(Uncertain)),
            (Some(Uncertain), false, Some(Uncertain)),
            (Some(Mounted), false, Some(Uncertain)),
            (Some(Mounted), true, Some(Uncertain)),
        ] {
            let mut actual = Actual::default();
            match before {
                Some(Uncertain) => actual.found_direct(v.name.clone(), &pod, "c".to_owned()),
                Some(Mounted) => actual.direct_mounted(&v, &pod, false),
                None => {}
            }
            actual.direct_mount_failed(&v, &pod, is_left);
            let state = actual.mount(&v.name, &pod).map(|mount| mount.state);
            assert_eq!(state, after, "{before:?} {is_left}");
            assert_eq!(actual.may_have_mounts(&pod), after.is_some());
            actual.unmounted(&v.name, &pod);
            assert_eq!(actual, Actual::default());
        }
    }

    #[test]
    fn a_renamed_volume_keeps_its_mounts_and_its_device_follows_the_last_pod() {
        let name = |text: &str| VolumeName::shared("kubernetes.io/iscsi", text);
        let (old, new) = (name("10.0.0.1:3260:iqn:0"), name("10.0.0.1:iqn:0"));
        let [first, second] = ["u1", "u2"].map(|uid| PodUid::parse(uid).unwrap());
        let mut actual = Actual::default();
        for pod in [&first, &second] {
            actual.found(&old, pod, "pv".to_owned(), true);
        }
        actual.rename(&old, &new, &first);
        let device = |actual: &Actual, name| actual.volume(name).map(|volume| volume.device);
        assert!(actual.mount(&new, &first).is_some_and(|mount| mount.reconstructed));
        assert_eq!(
            (device(&actual, &old), device(&actual, &new)),
            (Some(Some(MountState::Uncertain)), Some(None))
        );
        actual.rename(&old, &new, &second);
        assert!(actual.may_have_mounts(&first) && actual.may_have_mounts(&second));
        assert_eq!((device(&actual, &old), device(&actual, &new)), (None, Some(Some(MountState::Uncertain))));
        // What this process knows of the volume is not replaced.
        actual.device_mounted(&new);
        actual.found_device(&old);
        actual.rename(&old, &new, &first);
        assert_eq!((device(&actual, &old), device(&actual, &new)), (None, Some(Some(MountState::Mounted))));
        let before = actual.clone();
        actual.rename(&old, &new, &first);
        assert_eq!(actual, before);
    }

    #[test]
    fn a_failed_unmount_leaves_the_volume_uncertain_and_a_used_volume_is_never_dropped() {
        let (v, p) = (volume(), pod());
        let mut actual = Actual::default();
        actual.attached(&v);
        actual.device_mounted(&v.name);
        actual.mounted(&v, &p);
        actual.detached(&v.name);
        assert!(actual.volume(&v.name).is_some());
        assert!(actual.is_mounted_elsewhere(&v.name, &PodUid::parse("u2").unwrap()));
        actual.unmount_failed(&v.name, &p);
        assert_eq!(actual.mount(&v.name, &p).unwrap().state, MountState::Uncertain);
        assert!(actual.may_have_mounts(&p) && actual.mounted_by(&p).next().is_none());
        actual.unmounted(&v.name, &p);
        actual.device_unmount_failed(&v.name);
        actual.detached(&v.name);
        assert_eq!(actual.volume(&v.name).unwrap().device, Some(MountState::Uncertain));
        actual.device_unmounted(&v.name);
        actual.detached(&v.name);
        assert!(actual.volume(&v.name).is_none());
    }
}
