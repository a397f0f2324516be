//! Compares the states, and returns what to do (`reconciler/reconciler.go`).

use std::collections::BTreeSet;

use quintlet_model::ids::PodUid;
use tokio::time::Instant;

use crate::VolumeName;
use crate::actual::{Actual, ActualVolume, Attachment, Expansion, MountState, MountedPod};
use crate::desired::{Desired, DesiredVolume, Reach};
use crate::operations::{OperationKey, OperationKind, Operations, StartDecision};

/// An operation to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Unmount a pod's volume.
    Unmount {
        /// Unique name of the volume.
        volume: VolumeName,
        /// UID of the pod to unmount from.
        pod: PodUid,
    },
    /// Attach a volume from the node.
    Attach {
        /// Unique name of the volume.
        volume: VolumeName,
    },
    /// Mount a volume for a pod, and its device before it.
    Mount {
        /// The volume, as the pod wants it.
        volume: DesiredVolume,
        /// UID of the pod to mount for.
        pod: PodUid,
        /// The pod may use the mount: an error must not remove it.
        mounted_before: bool,
        /// The device is to be mounted first, even if it may be mounted.
        device: bool,
    },
    /// Expand the file system of a volume.
    Expand {
        /// The volume, with its new size.
        volume: DesiredVolume,
        /// A pod that uses the volume.
        pod: PodUid,
    },
    /// Unmount the device of a volume that no pod has.
    UnmountDevice {
        /// Unique name of the volume.
        volume: VolumeName,
    },
    /// Detach a volume from the node.
    Detach {
        /// Unique name of the volume.
        volume: VolumeName,
    },
}

impl Operation {
    /// Returns what the operation excludes.
    #[must_use]
    pub fn key(&self) -> OperationKey {
        match self {
            Self::Unmount { volume, pod } => OperationKey { volume: volume.clone(), pod: Some(pod.clone()) },
            Self::Mount { volume, pod, .. } => OperationKey {
                volume: volume.name.clone(),
                pod: (!volume.reach.is_shared()).then(|| pod.clone()),
            },
            Self::Expand { volume, .. } => OperationKey { volume: volume.name.clone(), pod: None },
            Self::Attach { volume } | Self::UnmountDevice { volume } | Self::Detach { volume } => {
                OperationKey { volume: volume.clone(), pod: None }
            }
        }
    }

    /// Returns volume and pod of the mount of a volume that pods share.
    #[must_use]
    pub fn turn(&self) -> Option<(&VolumeName, &PodUid)> {
        let Self::Mount { volume, pod, .. } = self else { return None };
        volume.reach.is_shared().then_some((&volume.name, pod))
    }

    /// Returns the kind of the operation.
    #[must_use]
    pub fn kind(&self) -> OperationKind {
        match self {
            Self::Unmount { .. } => OperationKind::Unmount,
            Self::Attach { .. } => OperationKind::Attach,
            Self::Mount { .. } => OperationKind::Mount,
            Self::Expand { .. } => OperationKind::Expand,
            Self::UnmountDevice { .. } => OperationKind::UnmountDevice,
            Self::Detach { .. } => OperationKind::Detach,
        }
    }
}

/// Facts about the node that the reconciler needs.
#[derive(Debug, Clone, Default)]
pub struct NodeVolumeFacts {
    /// The desired state is complete: all sources of pods have delivered, and all pods were processed once.
    /// Nothing is unmounted before.
    pub pods_known: bool,
    /// A controller attaches volumes (`enableControllerAttachDetach`).
    pub controller_attaches: bool,
    /// Volumes that the API server has in `status.volumesInUse`.
    pub reported_in_use: BTreeSet<VolumeName>,
    /// Volumes that the API server has in `status.volumesAttached`.
    pub attached: BTreeSet<VolumeName>,
}

/// The result of a comparison.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReconcilePlan {
    /// Operations to start, in order: those that remove come before those that add.
    pub start: Vec<Operation>,
    /// Volumes that are attached now, and were not in the actual state.
    pub attached: Vec<DesiredVolume>,
    /// Volumes that can leave the actual state: no pod has them, and a controller detaches them.
    pub detached: Vec<VolumeName>,
    /// Time at which a failed operation is due.
    pub next: Option<Instant>,
}

/// Compares the states of the volumes that tasks mount. The caller applies `attached` and `detached`, records
/// each operation in [`Operations`], and starts it.
#[must_use]
pub fn reconcile(
    desired: &Desired,
    actual: &Actual,
    operations: &Operations,
    node: &NodeVolumeFacts,
    now: Instant,
) -> ReconcilePlan {
    let mut pass = Pass { operations: operations.clone(), plan: ReconcilePlan::default(), now };
    let ready_to_unmount = node.pods_known && !actual.needs_attachments();
    if ready_to_unmount {
        unmount_volumes(&mut pass, desired, actual);
    }
    for had_turn in [false, true] {
        for (pod, volume) in
            desired.all_by_tasks().filter(|(pod, volume)| operations.had_turn(&volume.name, pod) == had_turn)
        {
            let other = actual.mount(&volume.name, pod).filter(|mount| mount.spec_name != volume.spec_name);
            // Two PersistentVolumes of a pod with one handle are one volume, which is mounted once for the
            // pod.
            if other.is_none_or(|mount| !desired.has_spec_name(pod, &mount.spec_name)) {
                add(&mut pass, actual, node, pod, volume);
            }
        }
    }
    if ready_to_unmount {
        unmount_devices(&mut pass, desired, actual, node);
    }
    pass.plan
}

/// Compares the states of the volumes that the worker of `pod` sets up, which has declared or released the
/// pod. The caller records each operation in [`Operations`], and executes it.
///
/// The volumes of other pods are not looked at, so that the costs of a pod do not grow with the node.
#[must_use]
pub fn reconcile_direct(
    desired: &Desired,
    actual: &Actual,
    operations: &Operations,
    pod: &PodUid,
    now: Instant,
) -> ReconcilePlan {
    let mut plan = ReconcilePlan::default();
    for (name, mount) in actual.direct_of(pod) {
        if desired.direct(pod, &mount.spec_name).is_none_or(|volume| volume.name != *name) {
            plan.offer(operations, Operation::Unmount { volume: name.clone(), pod: pod.clone() }, now);
        }
    }
    for (_, volume) in desired.direct_of(pod) {
        let is_missing = |mount: &MountedPod| mount.state == MountState::Uncertain || mount.remount;
        let operation = match actual.mount(&volume.name, pod) {
            None => mount_operation(volume, pod, false),
            Some(mount) if is_missing(mount) => mount_operation(volume, pod, true),
            Some(_) => continue,
        };
        plan.offer(operations, operation, now);
    }
    plan
}

/// Returns the volumes for `status.volumesInUse`: all attachable ones that are desired or attached, sorted.
#[must_use]
pub fn volumes_in_use(desired: &Desired, actual: &Actual) -> Vec<VolumeName> {
    let wanted = desired.all_by_tasks().filter(|(_, volume)| volume.reach == Reach::Attachable);
    let wanted = wanted.map(|(_, volume)| volume.name.clone());
    // A volume that was found on disk counts until its attachment is known.
    let has = |volume: &ActualVolume| match volume.attachment {
        Attachment::Attached | Attachment::Unknown => true,
        Attachment::NotAttachable => false,
    };
    let present = actual.volumes().filter(|(_, volume)| has(volume)).map(|(name, _)| name.clone());
    let all: BTreeSet<VolumeName> = wanted.chain(present).collect();
    all.into_iter().collect()
}

struct Pass {
    /// With the operations of this pass.
    operations: Operations,
    plan: ReconcilePlan,
    now: Instant,
}

impl Pass {
    fn start(&mut self, operation: Operation) {
        let (key, kind) = (operation.key(), operation.kind());
        if self.plan.offer(&self.operations, operation, self.now) {
            self.operations.started(key, kind);
        }
    }
}

impl ReconcilePlan {
    /// Adds an operation if it may start now, and returns whether it may.
    fn offer(&mut self, operations: &Operations, operation: Operation, now: Instant) -> bool {
        let start = operations.may_start(&operation.key(), operation.kind(), now);
        match start {
            StartDecision::Now => self.start.push(operation),
            StartDecision::At(at) => self.next = Some(self.next.map_or(at, |next| next.min(at))),
            StartDecision::Pending => {}
        }
        start == StartDecision::Now
    }
}

fn unmount_volumes(pass: &mut Pass, desired: &Desired, actual: &Actual) {
    for (name, volume) in actual.volumes() {
        // Mounted or uncertain: both are unmounted.
        for pod in volume.pods.keys() {
            if !desired.has(pod, name) && !desired.is_incomplete(pod) {
                pass.start(Operation::Unmount { volume: name.clone(), pod: pod.clone() });
            }
        }
    }
}

/// Attaches, mounts, mounts again or expands a desired volume.
fn add(pass: &mut Pass, actual: &Actual, node: &NodeVolumeFacts, pod: &PodUid, desired: &DesiredVolume) {
    let name = &desired.name;
    let present = actual.volume(name).filter(|volume| is_attached(volume, desired.reach));
    if present.is_none() {
        match desired.reach {
            Reach::Attachable if !node.controller_attaches => {
                pass.start(Operation::Attach { volume: name.clone() });
                return;
            }
            // The controller detaches a volume that is not reported in use.
            Reach::Attachable if !node.reported_in_use.contains(name) || !node.attached.contains(name) => {
                return;
            }
            Reach::Attachable | Reach::DeviceMountable | Reach::PerPod | Reach::Direct => {
                pass.plan.attached.push(desired.clone())
            }
        }
    }
    // Also of a volume that was found on disk and whose attachment is not known yet.
    let mount = actual.mount(name, pod);
    if mount.is_none() && present.is_some_and(|volume| has_other_label(volume, desired)) {
        // The device is unmounted first.
        return;
    }
    let expansion = |volume: &ActualVolume| {
        volume.expansion == Expansion::Allowed
            && matches!((volume.size, desired.size), (Some(now), Some(wanted)) if wanted > now)
    };
    let operation = match mount {
        None => mount_operation(desired, pod, false),
        Some(mount) if mount.state == MountState::Uncertain => {
            mount_operation(desired, pod, mount.reconstructed)
        }
        Some(mount) if mount.remount => mount_operation(desired, pod, true),
        Some(_) if present.is_some_and(expansion) => {
            Operation::Expand { volume: desired.clone(), pod: pod.clone() }
        }
        Some(_) => return,
    };
    pass.start(operation);
}

fn mount_operation(volume: &DesiredVolume, pod: &PodUid, mounted_before: bool) -> Operation {
    let device = volume.reach.is_shared();
    Operation::Mount { volume: volume.clone(), pod: pod.clone(), mounted_before, device }
}

/// Returns whether the device of a volume is mounted with another SELinux label than the desired one.
fn has_other_label(volume: &ActualVolume, desired: &DesiredVolume) -> bool {
    volume.device.is_some() && volume.device_label != desired.label
}

/// Whether a volume in the actual state needs no attachment.
fn is_attached(volume: &ActualVolume, reach: Reach) -> bool {
    match (volume.attachment, reach) {
        (Attachment::Attached, _)
        | (Attachment::NotAttachable, Reach::DeviceMountable | Reach::PerPod | Reach::Direct) => true,
        (Attachment::NotAttachable, Reach::Attachable) | (Attachment::Unknown, _) => false,
    }
}

/// Unmounts the devices of volumes that no pod has or should have, and drops or detaches the volumes.
fn unmount_devices(pass: &mut Pass, desired: &Desired, actual: &Actual, node: &NodeVolumeFacts) {
    for (name, volume) in actual.volumes() {
        let whole = OperationKey { volume: name.clone(), pod: None };
        let mut wanted = desired.all_by_tasks().filter(|(_, desired)| desired.name == *name);
        let is_wanted =
            wanted.any(|(_, desired)| volume.device.is_none() || !has_other_label(volume, desired));
        if !volume.pods.is_empty() || is_wanted || pass.operations.is_pending(&whole) {
            continue;
        }
        if volume.device.is_some() {
            pass.start(Operation::UnmountDevice { volume: name.clone() });
        } else if node.controller_attaches || volume.attachment != Attachment::Attached {
            pass.plan.detached.push(name.clone());
        } else {
            pass.start(Operation::Detach { volume: name.clone() });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::actual::Certainty;

    fn uid(n: u8) -> PodUid {
        PodUid::parse(&format!("u{n}")).unwrap()
    }

    fn volume(reach: Reach) -> DesiredVolume {
        DesiredVolume {
            name: VolumeName::shared("p", "v"),
            spec_name: "v".to_owned(),
            reach,
            size: None,
            label: None,
        }
    }

    fn desire(desired: &mut Desired, pod: &PodUid, volume: &DesiredVolume) {
        desired.set(pod, BTreeMap::from([("v".to_owned(), volume.clone())]), []);
    }

    fn ready() -> NodeVolumeFacts {
        NodeVolumeFacts { pods_known: true, controller_attaches: true, ..NodeVolumeFacts::default() }
    }

    fn plan(desired: &Desired, actual: &Actual, node: &NodeVolumeFacts) -> ReconcilePlan {
        reconcile(desired, actual, &Operations::default(), node, Instant::now())
    }

    #[tokio::test(start_paused = true)]
    async fn two_volumes_of_a_pod_with_one_handle_are_mounted_once() {
        let pod = uid(1);
        let named =
            |name: &str| DesiredVolume { spec_name: name.to_owned(), ..volume(Reach::DeviceMountable) };
        let (first, second) = (named("pv-1"), named("pv-2"));
        let mut desired = Desired::default();
        let both = [("a".to_owned(), first.clone()), ("b".to_owned(), second.clone())];
        desired.set(&pod, BTreeMap::from(both), []);
        // The second volume was resolved and mounted before the first one.
        let mut actual = Actual::default();
        actual.attached(&second);
        actual.device_mounted(&second.name);
        actual.mounted(&second, &pod);
        let start = |actual: &Actual| plan(&desired, actual, &ready()).start;
        assert_eq!(start(&actual), []);
        actual.request_remount(&pod, |_| true);
        let mounted = |actual: &Actual| match &start(actual)[..] {
            [Operation::Mount { volume, .. }] => volume.clone(),
            other => panic!("{other:?}"),
        };
        assert_eq!(mounted(&actual), second);
        actual.unmounted(&second.name, &pod);
        assert_eq!(mounted(&actual), first);
    }

    #[tokio::test(start_paused = true)]
    async fn a_volume_waits_until_it_is_reported_in_use_and_attached() {
        let v = volume(Reach::Attachable);
        let mut desired = Desired::default();
        let mut actual = Actual::default();
        let mut node = ready();
        desire(&mut desired, &uid(1), &v);
        assert_eq!(volumes_in_use(&desired, &actual), std::slice::from_ref(&v.name));
        assert_eq!(plan(&desired, &actual, &node), ReconcilePlan::default());
        node.attached.insert(v.name.clone());
        assert_eq!(plan(&desired, &actual, &node), ReconcilePlan::default());
        node.reported_in_use.insert(v.name.clone());
        let next = plan(&desired, &actual, &node);
        assert_eq!(next.attached, std::slice::from_ref(&v));
        assert!(
            matches!(&next.start[..], [Operation::Mount { device: true, mounted_before: false, .. }]),
            "{next:?}"
        );
        actual.attached(&v);
        desired.remove(&uid(1));
        assert_eq!(plan(&desired, &actual, &node).detached, std::slice::from_ref(&v.name));
        node.controller_attaches = false;
        assert_eq!(plan(&desired, &actual, &node).start, [Operation::Detach { volume: v.name.clone() }]);
        let mut other = Desired::default();
        desire(&mut other, &uid(2), &v);
        let attach = plan(&other, &Actual::default(), &node).start;
        assert_eq!(attach, [Operation::Attach { volume: v.name }]);
    }

    #[tokio::test(start_paused = true)]
    async fn pods_of_a_volume_take_turns_when_mounts_fail() {
        let v = volume(Reach::DeviceMountable);
        let mut desired = Desired::default();
        let mut actual = Actual::default();
        let mut operations = Operations::default();
        for n in 1..=3 {
            desire(&mut desired, &uid(n), &v);
        }
        actual.attached(&v);
        let mut order = Vec::new();
        for _ in 0..5 {
            let next = reconcile(&desired, &actual, &operations, &ready(), Instant::now());
            let [operation] = &next.start[..] else { panic!("one mount at a time: {next:?}") };
            let (name, pod) = operation.turn().unwrap();
            operations.took_turn(name, pod);
            operations.started(operation.key(), operation.kind());
            operations.failed(&operation.key(), "boom", Instant::now(), jiff::Timestamp::UNIX_EPOCH);
            order.push(pod.clone());
            tokio::time::advance(crate::operations::LONGEST_WAIT).await;
        }
        assert_eq!(order, [1, 2, 3, 1, 2].map(uid));
    }

    #[tokio::test(start_paused = true)]
    async fn a_volume_without_attachment_is_mounted_in_the_first_pass() {
        let v = volume(Reach::PerPod);
        let mut desired = Desired::default();
        desire(&mut desired, &uid(1), &v);
        let node = NodeVolumeFacts { pods_known: false, ..ready() };
        let next = plan(&desired, &Actual::default(), &node);
        assert!(matches!(&next.start[..], [Operation::Mount { device: false, .. }]), "{next:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_volume_of_a_removed_pod_is_unmounted_before_another_pod_gets_it() {
        let v = volume(Reach::DeviceMountable);
        let (mut desired, mut actual) = (Desired::default(), Actual::default());
        actual.attached(&v);
        actual.device_mounted(&v.name);
        actual.mounted(&v, &uid(1));
        desire(&mut desired, &uid(2), &v);
        let unmount = Operation::Unmount { volume: v.name.clone(), pod: uid(1) };
        assert_eq!(plan(&desired, &actual, &ready()).start, [unmount]);
        actual.unmounted(&v.name, &uid(1));
        assert!(matches!(&plan(&desired, &actual, &ready()).start[..], [Operation::Mount { .. }]));
        desired.remove(&uid(2));
        let device = Operation::UnmountDevice { volume: v.name.clone() };
        assert_eq!(plan(&desired, &actual, &ready()).start, [device]);
        actual.device_unmounted(&v.name);
        assert_eq!(plan(&desired, &actual, &ready()).detached, [v.name]);
    }

    #[tokio::test(start_paused = true)]
    async fn volumes_of_a_worker_are_removed_before_others_are_added_and_fail_one_by_one() {
        let pod = uid(1);
        let named = |name: &str| DesiredVolume {
            name: VolumeName::of_pod("kubernetes.io/configmap", &pod, name),
            spec_name: name.to_owned(),
            ..volume(Reach::Direct)
        };
        let mut desired = Desired::default();
        let mut actual = Actual::default();
        let mut operations = Operations::default();
        let left = VolumeName::of_pod("kubernetes.io/secret", &pod, "a");
        actual.found_direct(left.clone(), &pod, "a".to_owned());
        actual.found_direct(named("b").name, &pod, "b".to_owned());
        for name in ["a", "b"] {
            desired.add_direct(&pod, name.to_owned(), named(name));
        }
        let now = Instant::now();
        let plan = |desired: &Desired, actual: &Actual, operations: &Operations, now| {
            reconcile_direct(desired, actual, operations, &pod, now)
        };
        let mount = |name, mounted_before| mount_operation(&named(name), &pod, mounted_before);
        let unmount = |volume: &VolumeName| Operation::Unmount { volume: volume.clone(), pod: pod.clone() };
        let first = plan(&desired, &actual, &operations, now);
        assert_eq!(first.start, [unmount(&left), mount("a", false), mount("b", true)]);
        for operation in first.start {
            operations.started(operation.key(), operation.kind());
        }
        assert_eq!(
            plan(&desired, &actual, &operations, now),
            ReconcilePlan::default(),
            "one operation per volume"
        );
        // The volumes of other pods and those that tasks mount have other comparisons.
        assert_eq!(reconcile(&desired, &actual, &operations, &ready(), now), ReconcilePlan::default());
        assert_eq!(reconcile_direct(&desired, &actual, &operations, &uid(2), now), ReconcilePlan::default());
        operations.succeeded(&unmount(&left).key());
        actual.unmounted(&left, &pod);
        operations.succeeded(&mount("b", true).key());
        actual.direct_mounted(&named("b"), &pod, false);
        let text = operations.failed(&mount("a", false).key(), "boom", now, jiff::Timestamp::UNIX_EPOCH);
        assert!(text.contains("durationBeforeRetry 500ms"), "{text}");
        actual.direct_mount_failed(&named("a"), &pod, false);
        let waits = plan(&desired, &actual, &operations, now);
        assert_eq!((waits.start, waits.next), (vec![], Some(now + crate::operations::FIRST_WAIT)));
        let due = now + crate::operations::FIRST_WAIT;
        assert_eq!(plan(&desired, &actual, &operations, due).start, [mount("a", false)]);
        // A stale volume is mounted, and its refresh is due again. A removal does not wait for the back-off
        // of a mount.
        actual.direct_mounted(&named("a"), &pod, true);
        assert_eq!(actual.mounted_by(&pod).count(), 2);
        assert_eq!(plan(&desired, &actual, &operations, due).start, [mount("a", true)]);
        assert_eq!(desired.remove_direct(&pod).count(), 2);
        let plan_of_end = plan(&desired, &actual, &operations, now);
        assert_eq!(plan_of_end.start, [unmount(&named("a").name), unmount(&named("b").name)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_device_with_another_label_is_unmounted_before_a_pod_gets_the_volume() {
        let labelled = |label: Option<&str>| DesiredVolume {
            label: label.map(str::to_owned),
            ..volume(Reach::DeviceMountable)
        };
        for (mounted, wanted, unmounts) in [
            (None, None, false),
            (Some("a"), Some("a"), false),
            (Some("a"), Some("b"), true),
            (None, Some("a"), true),
        ] {
            let (mut desired, mut actual) = (Desired::default(), Actual::default());
            let before = labelled(mounted);
            actual.attached(&before);
            actual.device_mounted(&before.name);
            actual.set_device_label(&before.name, before.label.clone());
            desire(&mut desired, &uid(2), &labelled(wanted));
            // A pod that has the volume keeps it.
            actual.mounted(&before, &uid(1));
            let start = plan(&desired, &actual, &ready()).start;
            assert!(matches!(&start[..], [Operation::Unmount { .. }]), "{start:?}");
            actual.unmounted(&before.name, &uid(1));
            let start = plan(&desired, &actual, &ready()).start;
            let is_device = matches!(&start[..], [Operation::UnmountDevice { .. }]);
            assert_eq!(is_device, unmounts, "{mounted:?} {wanted:?} {start:?}");
            actual.device_unmounted(&before.name);
            let start = plan(&desired, &actual, &ready()).start;
            assert!(matches!(&start[..], [Operation::Mount { .. }]), "{start:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_unmounted_before_all_pods_and_attachments_are_known() {
        let v = volume(Reach::Attachable);
        let mut actual = Actual::default();
        actual.found(&v.name, &uid(1), "v".to_owned(), true);
        let unknown = NodeVolumeFacts { pods_known: false, ..ready() };
        assert_eq!(plan(&Desired::default(), &actual, &unknown), ReconcilePlan::default());
        assert_eq!(plan(&Desired::default(), &actual, &ready()), ReconcilePlan::default());
        actual.attachments_known(std::slice::from_ref(&v.name));
        assert_eq!(plan(&Desired::default(), &actual, &unknown), ReconcilePlan::default());
        assert_eq!(plan(&Desired::default(), &actual, &ready()).start.len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_of_a_pod_is_unmounted_while_its_volumes_cannot_be_resolved() {
        let v = volume(Reach::DeviceMountable);
        let (mut desired, mut actual) = (Desired::default(), Actual::default());
        actual.found(&v.name, &uid(1), "v".to_owned(), true);
        actual.attachments_known(&[]);
        desired.expect(&uid(1));
        assert_eq!(plan(&desired, &actual, &ready()), ReconcilePlan::default());
        desired.set(&uid(1), BTreeMap::new(), ["the API server is down".to_owned()]);
        assert_eq!(plan(&desired, &actual, &ready()), ReconcilePlan::default());
        desired.set(&uid(1), BTreeMap::new(), []);
        assert!(matches!(&plan(&desired, &actual, &ready()).start[..], [Operation::Unmount { .. }]));
        desired.expect(&uid(1));
        desired.remove(&uid(1));
        assert!(matches!(&plan(&desired, &actual, &ready()).start[..], [Operation::Unmount { .. }]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_mount_found_on_disk_is_repeated_and_not_removed_on_failure() {
        for reach in [Reach::PerPod, Reach::DeviceMountable] {
            let v = volume(reach);
            let (mut desired, mut actual) = (Desired::default(), Actual::default());
            actual.found(&v.name, &uid(1), "v".to_owned(), reach.is_shared());
            desire(&mut desired, &uid(1), &v);
            let node = NodeVolumeFacts { pods_known: false, ..ready() };
            let next = plan(&desired, &actual, &node);
            assert!(matches!(&next.start[..], [Operation::Mount { mounted_before: true, .. }]), "{next:?}");
            actual.attached(&v);
            assert!(!actual.needs_attachments());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_uncertain_mount_is_repeated_where_desired_and_unmounted_where_not() {
        let v = volume(Reach::DeviceMountable);
        let (mut desired, mut actual) = (Desired::default(), Actual::default());
        actual.attached(&v);
        actual.mount_failed(&v, &uid(1), Certainty::Uncertain);
        assert!(matches!(&plan(&desired, &actual, &ready()).start[..], [Operation::Unmount { .. }]));
        desire(&mut desired, &uid(1), &v);
        let next = plan(&desired, &actual, &ready()).start;
        assert!(matches!(&next[..], [Operation::Mount { mounted_before: false, .. }]), "{next:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_refresh_and_an_expansion_leave_the_volume_mounted() {
        let mut v = volume(Reach::DeviceMountable);
        let (mut desired, mut actual) = (Desired::default(), Actual::default());
        actual.attached(&v);
        actual.mounted(&v, &uid(1));
        actual.resized(&v.name, 10);
        v.size = Some(10);
        desire(&mut desired, &uid(1), &v);
        assert_eq!(plan(&desired, &actual, &ready()), ReconcilePlan::default());
        v.size = Some(20);
        desire(&mut desired, &uid(1), &v);
        assert!(matches!(&plan(&desired, &actual, &ready()).start[..], [Operation::Expand { .. }]));
        for held in [Expansion::Postponed, Expansion::RefusedInUse] {
            actual.set_expansion(&v.name, held);
            assert_eq!(plan(&desired, &actual, &ready()), ReconcilePlan::default(), "{held:?}");
            actual.resume_expansion(&v.name);
            assert_eq!(
                plan(&desired, &actual, &ready()).start.len(),
                usize::from(held == Expansion::Postponed)
            );
        }
        actual.set_expansion(&v.name, Expansion::Allowed);
        actual.resized(&v.name, 20);
        actual.request_remount(&uid(1), |_| true);
        let next = plan(&desired, &actual, &ready()).start;
        assert!(matches!(&next[..], [Operation::Mount { mounted_before: true, .. }]), "{next:?}");
        assert_eq!(actual.mounted_by(&uid(1)).count(), 1);
    }
}
