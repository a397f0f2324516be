//! The desired state of the world: the volumes that pods should have (`cache/desired_state_of_world.go`).

use std::collections::{BTreeMap, BTreeSet};

use quintlet_model::ids::PodUid;

use crate::VolumeName;

/// Largest number of errors that are kept per pod.
const MOST_ERRORS: usize = 10;

/// Operations of a volume's plugin before a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reach {
    /// The volume is attached to the node, and its device is mounted once for all pods.
    Attachable,
    /// The device is mounted once for all pods.
    DeviceMountable,
    /// The volume is mounted for each pod.
    PerPod,
    /// The pod's worker sets the volume up in its pass.
    Direct,
}

impl Reach {
    /// Returns whether pods share the volume, so that one operation at a time is for the whole volume.
    #[must_use]
    pub fn is_shared(self) -> bool {
        match self {
            Self::Attachable | Self::DeviceMountable => true,
            Self::PerPod | Self::Direct => false,
        }
    }
}

/// A volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredVolume {
    /// Unique name.
    pub name: VolumeName,
    /// Name of the PersistentVolume, or of an inline volume in the pod.
    pub spec_name: String,
    /// How the volume comes to the node: attached, staged or mounted alone.
    pub reach: Reach,
    /// Capacity of the PersistentVolume in bytes, if the volume can be expanded on the node.
    pub size: Option<u64>,
    /// SELinux label that the volume is mounted with.
    pub label: Option<String>,
}

/// A pod with volumes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct DesiredPod {
    /// Volumes that tasks mount, by the name in the pod.
    volumes: BTreeMap<String, DesiredVolume>,
    /// Volumes that the pod's worker sets up, by the name in the pod. They are apart since a node has many of
    /// them, and a comparison is for one pod.
    direct: BTreeMap<String, DesiredVolume>,
    errors: BTreeSet<String>,
    /// Volumes of the pod are not known.
    is_incomplete: bool,
}

/// The desired volumes of all pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Desired {
    pods: BTreeMap<PodUid, DesiredPod>,
}

impl Desired {
    /// Sets the volumes of a pod that tasks mount by their names in the pod, and the errors of those that
    /// could not be resolved.
    ///
    /// A volume that was resolved before and fails now stays desired: the pod may use it.
    pub fn set(
        &mut self,
        pod: &PodUid,
        volumes: BTreeMap<String, DesiredVolume>,
        errors: impl IntoIterator<Item = String>,
    ) {
        let entry = self.pods.entry(pod.clone()).or_default();
        entry.volumes.extend(volumes);
        entry.is_incomplete = false;
        for error in errors {
            entry.is_incomplete = true;
            if entry.errors.len() < MOST_ERRORS {
                entry.errors.insert(error);
            }
        }
    }

    /// Adds a pod whose volumes are not known yet. Nothing of the pod is unmounted before [`Desired::set`]
    /// without errors, or [`Desired::remove`].
    pub fn expect(&mut self, pod: &PodUid) {
        self.pods.entry(pod.clone()).or_default().is_incomplete = true;
    }

    /// Returns whether volumes of a pod are not known: some could not be resolved, or the pod is only
    /// expected.
    #[must_use]
    pub fn is_incomplete(&self, pod: &PodUid) -> bool {
        self.pods.get(pod).is_some_and(|pod| pod.is_incomplete)
    }

    /// Adds a volume that the pod's worker sets up.
    pub fn add_direct(&mut self, pod: &PodUid, name: String, volume: DesiredVolume) {
        self.pods.entry(pod.clone()).or_default().direct.insert(name, volume);
    }

    /// Returns the volume with this name in the pod, if the pod's worker sets it up.
    #[must_use]
    pub fn direct(&self, pod: &PodUid, name: &str) -> Option<&DesiredVolume> {
        self.pods.get(pod)?.direct.get(name)
    }

    /// Returns the volumes that a pod's worker sets up with their names in the pod, sorted by these.
    pub fn direct_of(&self, pod: &PodUid) -> impl Iterator<Item = (&str, &DesiredVolume)> {
        let volumes = self.pods.get(pod).map(|pod| &pod.direct);
        volumes.into_iter().flatten().map(|(name, volume)| (name.as_str(), volume))
    }

    /// Removes and returns the volumes that a pod's worker sets up. The containers of the pod have
    /// terminated.
    pub fn remove_direct(&mut self, pod: &PodUid) -> impl Iterator<Item = DesiredVolume> + use<> {
        let volumes = self.pods.get_mut(pod).map(|pod| std::mem::take(&mut pod.direct));
        volumes.unwrap_or_default().into_values()
    }

    /// Removes a pod whose containers have terminated.
    pub fn remove(&mut self, pod: &PodUid) {
        self.pods.remove(pod);
    }

    /// Removes and returns the errors of a pod (`PopPodErrors`).
    pub fn take_errors(&mut self, pod: &PodUid) -> Vec<String> {
        self.pods
            .get_mut(pod)
            .map(|pod| std::mem::take(&mut pod.errors).into_iter().collect())
            .unwrap_or_default()
    }

    /// Returns whether a pod has a volume.
    #[must_use]
    pub fn has(&self, pod: &PodUid, volume: &VolumeName) -> bool {
        self.volumes_of(pod).any(|(_, desired)| desired.name == *volume)
    }

    /// Returns whether a pod has a volume of that name of a PersistentVolume or inline volume.
    #[must_use]
    pub fn has_spec_name(&self, pod: &PodUid, spec_name: &str) -> bool {
        self.volumes_of(pod).any(|(_, desired)| desired.spec_name == spec_name)
    }

    /// Returns whether any pod has a volume that tasks mount.
    #[must_use]
    pub fn has_volume(&self, volume: &VolumeName) -> bool {
        self.all_by_tasks().any(|(_, desired)| desired.name == *volume)
    }

    /// Returns the volumes of a pod with their names in the pod: those that tasks mount, then those that its
    /// worker sets up.
    pub fn volumes_of(&self, pod: &PodUid) -> impl Iterator<Item = (&str, &DesiredVolume)> {
        self.by_tasks_of(pod).chain(self.direct_of(pod))
    }

    /// Returns the volumes of a pod that tasks mount with their names in the pod, sorted by these.
    pub fn by_tasks_of(&self, pod: &PodUid) -> impl Iterator<Item = (&str, &DesiredVolume)> {
        let volumes = self.pods.get(pod).map(|pod| &pod.volumes);
        volumes.into_iter().flatten().map(|(name, volume)| (name.as_str(), volume))
    }

    /// Returns the pods that have volumes or are expected, sorted.
    pub fn pods(&self) -> impl Iterator<Item = &PodUid> {
        self.pods.keys()
    }

    /// Returns all volumes that tasks mount with their pods, sorted by pod. A volume that has two names in a
    /// pod appears twice.
    pub fn all_by_tasks(&self) -> impl Iterator<Item = (&PodUid, &DesiredVolume)> {
        self.pods.iter().flat_map(|(uid, pod)| pod.volumes.values().map(move |volume| (uid, volume)))
    }
}
