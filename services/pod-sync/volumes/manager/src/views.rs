//! The volumes of all pods, for display.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use pod_sync_volume_reconcile::VolumeName;
use pod_sync_volume_reconcile::actual::MountState;
use pod_sync_volume_reconcile::desired::{DesiredVolume, Reach};
use pod_sync_volume_reconcile::operations::OperationKey;
use quintlet_model::ids::PodUid;
use tokio::time::Instant;

use crate::metrics::{NO_PLUGIN, PluginLabel};
use crate::state::ManagerState;
use crate::work::OperationStep;

/// How far a volume of a pod is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeState {
    /// The claim, the PersistentVolume or the driver's object cannot be used, or could not be read.
    Unresolved,
    /// The volume is not attached according to the Node's status.
    NotAttached,
    /// The pod does not have the volume.
    NotMounted,
    /// An operation may have mounted the volume, or the volume was found on disk.
    Uncertain,
    /// The pod can use the volume.
    Mounted,
}

/// A volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeView {
    /// UID of the pod.
    pub pod: PodUid,
    /// Name in the pod; empty if the pod no longer needs the volume.
    pub name: String,
    /// Name of the PersistentVolume, or of the inline volume; empty if it is not known.
    pub spec_name: String,
    /// Unique name; empty if it is not known.
    pub volume: String,
    /// How far the set-up is.
    pub state: VolumeState,
    /// When the pod was first found to need the volume; `None` if the pod no longer needs it.
    pub needed_since: Option<Timestamp>,
    /// Step of the operation in flight, and since when.
    pub step: Option<(OperationStep, Duration)>,
    /// Last error and its time, until an operation succeeds.
    pub error: Option<(String, Timestamp)>,
}

/// Returns the volumes of all pods or of one, sorted by pod.
pub(crate) fn of(state: &ManagerState, shown: Option<&PodUid>, now: Instant) -> Vec<VolumeView> {
    let is_shown = |pod: &PodUid| shown.is_none_or(|shown| shown == pod);
    let mut views: Vec<VolumeView> = Vec::new();
    let all = state.desired.pods().filter(|pod| is_shown(pod));
    for (pod, (name, volume)) in
        all.flat_map(|pod| state.desired.volumes_of(pod).map(move |volume| (pod, volume)))
    {
        let view = view(state, now, pod, name, &volume.spec_name, &volume.name);
        let is_unattached = view.state == VolumeState::NotMounted && is_unattached(state, volume);
        let of_view = if is_unattached { VolumeState::NotAttached } else { view.state };
        views.push(VolumeView { state: of_view, ..view });
    }
    for ((pod, name), error) in state.unresolved.iter().filter(|((pod, _), _)| is_shown(pod)) {
        // A volume that was resolved before stays desired.
        if state.desired.volumes_of(pod).all(|(desired, _)| desired != name) {
            views.push(VolumeView {
                pod: pod.clone(),
                name: name.clone(),
                spec_name: String::new(),
                volume: String::new(),
                state: VolumeState::Unresolved,
                needed_since: state.needed_since(pod, name),
                step: None,
                error: Some(error.clone()),
            });
        }
    }
    let by_tasks = state.actual.volumes();
    let by_tasks =
        by_tasks.flat_map(|(name, volume)| volume.pods.iter().map(move |(pod, mount)| (pod, name, mount)));
    for (pod, name, mount) in by_tasks.chain(state.actual.all_direct()) {
        if is_shown(pod) && !state.desired.has(pod, name) {
            views.push(view(state, now, pod, "", &mount.spec_name, name));
        }
    }
    views.sort_by(|a, b| (&a.pod, &a.name, &a.volume).cmp(&(&b.pod, &b.name, &b.volume)));
    views
}

/// Returns whether a volume waits for its attachment.
fn is_unattached(state: &ManagerState, volume: &DesiredVolume) -> bool {
    match volume.reach {
        Reach::Attachable => state.actual.volume(&volume.name).is_none(),
        Reach::DeviceMountable | Reach::PerPod | Reach::Direct => false,
    }
}

fn view(
    state: &ManagerState,
    now: Instant,
    pod: &PodUid,
    name: &str,
    spec_name: &str,
    volume: &VolumeName,
) -> VolumeView {
    let whole = OperationKey { volume: volume.clone(), pod: None };
    let of_pod = OperationKey { volume: volume.clone(), pod: Some(pod.clone()) };
    let running = state.running.get(&whole).or_else(|| state.running.get(&of_pod));
    let in_pod = (pod.clone(), name.to_owned());
    let error = state.errors.get(&whole).or_else(|| state.errors.get(&of_pod));
    VolumeView {
        pod: pod.clone(),
        name: name.to_owned(),
        spec_name: spec_name.to_owned(),
        volume: volume.to_string(),
        state: match state.actual.mount(volume, pod).map(|mount| mount.state) {
            None => VolumeState::NotMounted,
            Some(MountState::Uncertain) => VolumeState::Uncertain,
            Some(MountState::Mounted) => VolumeState::Mounted,
        },
        needed_since: state.needed_since(pod, name),
        step: running.and_then(|r| Some((r.step?, now.saturating_duration_since(r.since)))),
        error: error.or_else(|| state.unresolved.get(&in_pod)).cloned(),
    }
}

/// Numbers of volumes of pods, by plugin.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VolumeCounts {
    /// Volumes that pods should have.
    pub desired: BTreeMap<String, i64>,
    /// Volumes that are mounted for pods.
    pub actual: BTreeMap<String, i64>,
}

impl VolumeCounts {
    pub(crate) fn of(state: &ManagerState) -> Self {
        let mut counts = Self::default();
        let add = |counts: &mut BTreeMap<String, i64>, plugin: Option<&PluginLabel>| {
            let plugin = plugin.map_or(NO_PLUGIN, PluginLabel::name);
            let count = counts.entry(plugin.to_owned()).or_default();
            *count = count.saturating_add(1);
        };
        for (_, volume) in state.desired.all_by_tasks() {
            add(&mut counts.desired, state.plugin(&volume.name));
        }
        let add_direct = |counts: &mut BTreeMap<String, i64>, volume: &VolumeName| {
            let plugin = volume.plugin_of_pod();
            match counts.get_mut(plugin) {
                Some(count) => *count = count.saturating_add(1),
                None => drop(counts.insert(plugin.to_owned(), 1)),
            }
        };
        for (_, volume) in state.desired.pods().flat_map(|pod| state.desired.direct_of(pod)) {
            add_direct(&mut counts.desired, &volume.name);
        }
        for (_, volume, mount) in state.actual.all_direct() {
            if mount.state == MountState::Mounted {
                add_direct(&mut counts.actual, volume);
            }
        }
        for (name, volume) in state.actual.volumes() {
            for _ in volume.pods.values().filter(|mount| mount.state == MountState::Mounted) {
                add(&mut counts.actual, state.plugin(name));
            }
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use pod_sync_volume_reconcile::actual::Certainty;

    use super::*;
    use crate::state::Running;

    fn desired(name: &str, reach: Reach) -> DesiredVolume {
        let unique = VolumeName::shared("kubernetes.io/csi", &format!("d^{name}"));
        DesiredVolume { name: unique, spec_name: format!("pv-{name}"), reach, size: None, label: None }
    }

    #[tokio::test]
    async fn each_volume_has_its_state_its_age_and_its_last_error() {
        let pod = PodUid::parse("u1").unwrap();
        let (now, wall) = (Instant::now(), |second| Timestamp::from_second(second).unwrap());
        let mut state = ManagerState::default();
        let attachable = |name| desired(name, Reach::Attachable);
        let volumes = [
            ("a-unattached", attachable("a")),
            ("b-attached", attachable("b")),
            ("c-mounting", desired("c", Reach::DeviceMountable)),
            ("d-mounted", attachable("d")),
            ("e-per-pod", desired("e", Reach::PerPod)),
        ];
        let of_pod: BTreeMap<String, DesiredVolume> =
            volumes.iter().map(|(name, volume)| ((*name).to_owned(), volume.clone())).collect();
        state.desired.set(&pod, of_pod, ["PVC is not bound".to_owned()]);
        state
            .unresolved
            .insert((pod.clone(), "0-pending".to_owned()), ("PVC is not bound".to_owned(), wall(7)));
        state.unresolved.insert((pod.clone(), "d-mounted".to_owned()), ("no answer".to_owned(), wall(8)));
        for (second, name) in [(1, "0-pending"), (2, "a-unattached")] {
            state.need(&pod, name, wall(second));
        }
        for volume in [&volumes[1].1, &volumes[2].1, &volumes[3].1] {
            state.actual.attached(volume);
        }
        state.actual.mounted(&volumes[3].1, &pod);
        let key = |volume: &DesiredVolume| OperationKey { volume: volume.name.clone(), pod: None };
        let running = Running { pod: Some(pod.clone()), step: Some(OperationStep::Stage), since: now };
        state.running.insert(key(&volumes[2].1), running);
        state.errors.insert(key(&volumes[1].1), ("boom".to_owned(), wall(9)));
        // A volume that the pod no longer needs.
        let left = desired("left", Reach::DeviceMountable);
        state.actual.attached(&left);
        state.actual.mount_failed(&left, &pod, Certainty::Uncertain);
        let views = of(&state, None, now);
        let brief = views.iter().map(|view| {
            let error = view.error.as_ref().map(|(error, at)| (error.as_str(), at.as_second()));
            let since = view.needed_since.map(Timestamp::as_second);
            (
                view.name.as_str(),
                view.spec_name.as_str(),
                view.state,
                since,
                view.step.map(|(step, _)| step),
                error,
            )
        });
        assert_eq!(
            brief.collect::<Vec<_>>(),
            [
                ("", "pv-left", VolumeState::Uncertain, None, None, None),
                ("0-pending", "", VolumeState::Unresolved, Some(1), None, Some(("PVC is not bound", 7))),
                ("a-unattached", "pv-a", VolumeState::NotAttached, Some(2), None, None),
                ("b-attached", "pv-b", VolumeState::NotMounted, None, None, Some(("boom", 9))),
                ("c-mounting", "pv-c", VolumeState::NotMounted, None, Some(OperationStep::Stage), None),
                ("d-mounted", "pv-d", VolumeState::Mounted, None, None, Some(("no answer", 8))),
                ("e-per-pod", "pv-e", VolumeState::NotMounted, None, None, None),
            ]
        );
        state.release(&pod);
        assert!(
            of(&state, None, now).iter().all(|view| view.name.is_empty()),
            "a released pod needs nothing"
        );
    }

    #[test]
    fn volumes_of_pods_are_counted_by_plugin_and_only_mounted_ones_are_actual() {
        let mut state = ManagerState::default();
        let volume = |name: &str| DesiredVolume {
            name: VolumeName::shared("kubernetes.io/csi", name),
            spec_name: name.to_owned(),
            reach: Reach::DeviceMountable,
            size: None,
            label: None,
        };
        let (known, unknown) = (volume("d^known"), volume("d^unknown"));
        state.set_plugin(&known.name, PluginLabel::of_driver("d"));
        let pods: Vec<PodUid> = ["u1", "u2"].iter().map(|uid| PodUid::parse(uid).unwrap()).collect();
        for pod in &pods {
            state.desired.set(pod, BTreeMap::from([("v".to_owned(), known.clone())]), []);
        }
        state.desired.set(&pods[0], BTreeMap::from([("w".to_owned(), unknown.clone())]), []);
        state.actual.mounted(&known, &pods[0]);
        state.actual.mount_failed(&known, &pods[1], Certainty::Uncertain);
        let counts = VolumeCounts::of(&state);
        let pairs = |counts: &BTreeMap<String, i64>| counts.clone().into_iter().collect::<Vec<_>>();
        let csi = || "kubernetes.io/csi:d".to_owned();
        assert_eq!(pairs(&counts.desired), [("N/A".to_owned(), 1), (csi(), 2)]);
        assert_eq!(pairs(&counts.actual), [(csi(), 1)]);
    }
}
