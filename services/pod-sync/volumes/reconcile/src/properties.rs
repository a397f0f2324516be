//! Invariants of the reconciler under random histories of pods, results of operations, and restarts.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use quintlet_model::ids::PodUid;
use tokio::time::Instant;

use crate::VolumeName;
use crate::actual::{Actual, Certainty};
use crate::desired::{Desired, DesiredVolume, Reach};
use crate::operations::{LONGEST_WAIT, Operations};
use crate::reconcile::{NodeVolumeFacts, Operation, reconcile, reconcile_direct};
use crate::reconstruct::{PodVolumeDir, reconstruct};

/// How an operation ends.
#[derive(Debug, Clone, Copy)]
enum End {
    Success,
    Failure(Certainty),
    /// An uncertain failure after which the effect is there.
    FailureWithEffect,
}

#[derive(Debug, Clone)]
enum Action {
    /// A pod with a volume is admitted.
    Want(u8, u8),
    /// The containers of a pod have terminated.
    Remove(u8),
    /// A pass of the reconciler.
    Pass,
    /// An operation in flight ends, in its device stage if it has one and the flag is set.
    End(prop::sample::Index, End, bool),
    /// The content of a pod's volumes is due for a refresh.
    Refresh(u8),
    /// The process is replaced. Operations in flight have or have not had their effect.
    Restart(bool),
    /// All sources of pods have delivered.
    PodsKnown,
    /// The Node's status was read.
    AttachmentsKnown,
}

fn action() -> impl Strategy<Value = Action> {
    let end = prop_oneof![
        4 => Just(End::Success),
        1 => Just(End::Failure(Certainty::Finished)),
        1 => Just(End::Failure(Certainty::Uncertain)),
        1 => Just(End::Failure(Certainty::Transient)),
        1 => Just(End::FailureWithEffect),
    ];
    prop_oneof![
        3 => (0_u8..3, 0_u8..4).prop_map(|(pod, volume)| Action::Want(pod, volume)),
        2 => (0_u8..3).prop_map(Action::Remove),
        6 => Just(Action::Pass),
        8 => (any::<prop::sample::Index>(), end, any::<bool>()).prop_map(|(n, end, device)| Action::End(n, end, device)),
        1 => (0_u8..3).prop_map(Action::Refresh),
        1 => any::<bool>().prop_map(Action::Restart),
        2 => Just(Action::PodsKnown),
        2 => Just(Action::AttachmentsKnown),
    ]
}

fn pod(n: u8) -> PodUid {
    PodUid::parse(&format!("u{n}")).unwrap()
}

fn volume(n: u8, pod: &PodUid) -> DesiredVolume {
    let (name, reach) = match n {
        0 => (VolumeName::shared("csi", "attachable"), Reach::Attachable),
        1 => (VolumeName::shared("csi", "device"), Reach::DeviceMountable),
        2 => (VolumeName::of_pod("nfs", pod, "n"), Reach::PerPod),
        _ => (VolumeName::of_pod("configmap", pod, "c"), Reach::Direct),
    };
    DesiredVolume { name, spec_name: format!("v{n}"), reach, size: None, label: None }
}

struct World {
    /// The mounts on the machine.
    mounts: BTreeMap<(VolumeName, PodUid), DesiredVolume>,
    devices: BTreeSet<VolumeName>,
    /// The volumes of the pods that run.
    wanted: BTreeMap<PodUid, BTreeMap<String, DesiredVolume>>,
    flying: Vec<Operation>,
    desired: Desired,
    actual: Actual,
    operations: Operations,
    node: NodeVolumeFacts,
    now: Instant,
}

impl World {
    fn new(controller_attaches: bool, now: Instant) -> Self {
        let attachable = BTreeSet::from([volume(0, &pod(0)).name]);
        let node = NodeVolumeFacts {
            pods_known: false,
            controller_attaches,
            reported_in_use: attachable.clone(),
            attached: attachable,
        };
        Self {
            mounts: BTreeMap::new(),
            devices: BTreeSet::new(),
            wanted: BTreeMap::new(),
            flying: Vec::new(),
            desired: Desired::default(),
            actual: Actual::default(),
            operations: Operations::default(),
            node,
            now,
        }
    }

    fn apply(&mut self, action: &Action) {
        match action {
            Action::Want(n, v) => {
                let (pod, volume) = (pod(*n), volume(*v, &pod(*n)));
                let volumes = self.wanted.entry(pod.clone()).or_default();
                volumes.insert(volume.spec_name.clone(), volume);
                // Before all sources have delivered, the pod may be unknown.
                if self.node.pods_known {
                    self.declare(&pod);
                }
            }
            Action::Remove(n) => {
                self.wanted.remove(&pod(*n));
                self.desired.remove(&pod(*n));
            }
            Action::Pass => self.pass(),
            Action::End(index, end, device) => {
                if !self.flying.is_empty() {
                    let operation = self.flying.remove(index.index(self.flying.len()));
                    self.end(&operation, *end, *device);
                }
            }
            Action::Refresh(n) => {
                self.actual.request_remount(&pod(*n), |_| true);
                self.actual.request_direct_remount(&pod(*n), |_| true);
            }
            Action::Restart(effect) => self.restart(*effect),
            Action::PodsKnown => self.pods_known(),
            Action::AttachmentsKnown => self.attachments_known(),
        }
    }

    fn declare(&mut self, pod: &PodUid) {
        let volumes = self.wanted.get(pod).cloned().unwrap_or_default();
        let is_direct = |volume: &DesiredVolume| volume.reach == Reach::Direct;
        let (direct, by_tasks) = volumes.into_iter().partition(|(_, volume)| is_direct(volume));
        let direct: BTreeMap<String, DesiredVolume> = direct;
        self.desired.set(pod, by_tasks, []);
        for (name, volume) in direct {
            self.desired.add_direct(pod, name, volume);
        }
    }

    fn pods_known(&mut self) {
        self.node.pods_known = true;
        for pod in self.wanted.keys().cloned().collect::<Vec<_>>() {
            self.declare(&pod);
        }
    }

    fn attachments_known(&mut self) {
        let attached: Vec<VolumeName> = self.node.attached.iter().cloned().collect();
        self.actual.attachments_known(&attached);
    }

    fn restart(&mut self, effect: bool) {
        for operation in std::mem::take(&mut self.flying) {
            if effect {
                self.effect(&operation, true);
            }
        }
        (self.desired, self.actual, self.operations) = Default::default();
        self.node.pods_known = false;
        let (direct, by_tasks): (Vec<_>, Vec<_>) =
            self.mounts.iter().partition(|(_, volume)| volume.reach == Reach::Direct);
        for ((name, pod), volume) in direct {
            self.actual.found_direct(name.clone(), pod, volume.spec_name.clone());
        }
        let found = by_tasks.into_iter().map(|((name, pod), volume)| PodVolumeDir {
            pod: pod.clone(),
            spec_name: volume.spec_name.clone(),
            volume: (name.clone(), volume.reach.is_shared()),
        });
        let devices: Vec<VolumeName> = self.devices.iter().cloned().collect();
        reconstruct(&mut self.actual, found.collect(), &devices);
    }

    fn pass(&mut self) {
        self.now += Duration::from_millis(700);
        let ready = self.node.pods_known && !self.actual.needs_attachments();
        let plan = reconcile(&self.desired, &self.actual, &self.operations, &self.node, self.now);
        for volume in &plan.attached {
            self.actual.attached(volume);
        }
        for name in &plan.detached {
            assert!(!self.is_used(name), "{name} is dropped while it is mounted");
            self.actual.detached(name);
        }
        self.start(plan.start, ready);
        // The worker of each pod compares after it has declared or released the pod.
        let known = if self.node.pods_known { 0..3 } else { 0..0 };
        for pod in known.map(pod) {
            let plan = reconcile_direct(&self.desired, &self.actual, &self.operations, &pod, self.now);
            assert!(plan.attached.is_empty() && plan.detached.is_empty());
            self.start(plan.start, true);
        }
    }

    fn start(&mut self, operations: Vec<Operation>, ready: bool) {
        let mut added = false;
        for operation in operations {
            match &operation {
                Operation::Unmount { volume, pod } => {
                    assert!(ready, "{volume} is unmounted before pods and attachments are known");
                    assert!(!added, "{volume} is unmounted after another volume is mounted");
                    assert!(!self.desired.has(pod, volume), "{volume} is unmounted though {pod} uses it");
                    let uses = self
                        .wanted
                        .get(pod)
                        .is_some_and(|volumes| volumes.values().any(|v| v.name == *volume));
                    assert!(!uses, "{volume} is unmounted though {pod} runs");
                }
                Operation::UnmountDevice { volume } | Operation::Detach { volume } => {
                    assert!(
                        ready,
                        "the device of {volume} is unmounted before pods and attachments are known"
                    );
                    let mounted = self.mounts.keys().any(|(name, _)| name == volume);
                    assert!(!mounted, "the device of {volume} is unmounted while a pod has the volume");
                }
                Operation::Mount { .. } | Operation::Attach { .. } | Operation::Expand { .. } => added = true,
            }
            let key = operation.key();
            assert!(!self.operations.is_pending(&key), "two operations at a time: {operation:?}");
            self.operations.started(key, operation.kind());
            self.flying.push(operation);
        }
    }

    fn is_used(&self, name: &VolumeName) -> bool {
        self.devices.contains(name) || self.mounts.keys().any(|(volume, _)| volume == name)
    }

    /// The effect of an operation, without its last stage if `whole` is not set.
    fn effect(&mut self, operation: &Operation, whole: bool) {
        match operation {
            Operation::Mount { volume, pod, device, .. } => {
                if *device {
                    self.devices.insert(volume.name.clone());
                }
                if whole || !device {
                    self.mounts.insert((volume.name.clone(), pod.clone()), volume.clone());
                }
            }
            Operation::Unmount { volume, pod } => drop(self.mounts.remove(&(volume.clone(), pod.clone()))),
            Operation::UnmountDevice { volume } => drop(self.devices.remove(volume)),
            Operation::Attach { .. } | Operation::Detach { .. } | Operation::Expand { .. } => {}
        }
    }

    fn end(&mut self, operation: &Operation, end: End, in_device_stage: bool) {
        let key = operation.key();
        let certainty = match end {
            End::Success => {
                self.effect(operation, true);
                self.succeed(operation);
                self.operations.succeeded(&key);
                return;
            }
            End::Failure(certainty) => certainty,
            End::FailureWithEffect => Certainty::Uncertain,
        };
        let wall = jiff::Timestamp::UNIX_EPOCH;
        assert!(self.operations.failed(&key, "boom", self.now, wall).contains("No retries permitted until"));
        let with_effect = matches!(end, End::FailureWithEffect);
        match operation {
            Operation::Mount { volume, pod, .. } if volume.reach == Reach::Direct => {
                if with_effect {
                    self.effect(operation, true);
                }
                self.actual.direct_mount_failed(volume, pod, certainty == Certainty::Uncertain);
            }
            Operation::Mount { volume, device: true, .. } if in_device_stage => {
                if with_effect {
                    self.effect(operation, false);
                }
                // A driver's final error says that the device is not mounted, unless it was mounted before.
                let proven = self.actual.volume(&volume.name).is_some_and(|v| !v.device_reconstructed)
                    && self.actual.volume(&volume.name).and_then(|v| v.device)
                        != Some(crate::actual::MountState::Mounted);
                if certainty == Certainty::Finished && proven {
                    self.devices.remove(&volume.name);
                }
                self.actual.device_mount_failed(&volume.name, certainty);
            }
            Operation::Mount { volume, pod, device, .. } => {
                if *device {
                    self.devices.insert(volume.name.clone());
                    self.actual.device_mounted(&volume.name);
                }
                if with_effect {
                    self.effect(operation, true);
                }
                let before =
                    self.actual.mount(&volume.name, pod).map(|mount| (mount.state, mount.reconstructed));
                if certainty == Certainty::Finished
                    && before == Some((crate::actual::MountState::Uncertain, false))
                {
                    self.mounts.remove(&(volume.name.clone(), pod.clone()));
                }
                self.actual.mount_failed(volume, pod, certainty);
            }
            Operation::Unmount { volume, pod } => {
                if with_effect {
                    self.effect(operation, true);
                }
                self.actual.unmount_failed(volume, pod);
            }
            Operation::UnmountDevice { volume } => {
                if with_effect {
                    self.effect(operation, true);
                }
                self.actual.device_unmount_failed(volume);
            }
            Operation::Attach { .. } | Operation::Detach { .. } | Operation::Expand { .. } => {}
        }
    }

    fn succeed(&mut self, operation: &Operation) {
        match operation {
            Operation::Mount { volume, pod, .. } if volume.reach == Reach::Direct => {
                self.actual.direct_mounted(volume, pod, false);
            }
            Operation::Mount { volume, pod, device, .. } => {
                if *device {
                    self.actual.device_mounted(&volume.name);
                }
                self.actual.mounted(volume, pod);
            }
            Operation::Unmount { volume, pod } => self.actual.unmounted(volume, pod),
            Operation::UnmountDevice { volume } => self.actual.device_unmounted(volume),
            Operation::Attach { volume: name } => {
                let known = volume(0, &pod(0));
                assert_eq!(known.name, *name);
                self.actual.attached(&known);
            }
            Operation::Detach { volume } => self.actual.detached(volume),
            Operation::Expand { .. } => {}
        }
    }

    /// Every mount is in the actual state, or an operation on it is in flight.
    fn check(&self) {
        for (name, pod) in self.mounts.keys() {
            let pending = self.flying.iter().any(|operation| operation.key().volume == *name);
            let known = self.actual.mount(name, pod).is_some();
            assert!(known || pending, "the mount of {name} in {pod} is forgotten");
        }
        for name in &self.devices {
            let pending = self.flying.iter().any(|operation| operation.key().volume == *name);
            let known = self.actual.volume(name).is_some_and(|volume| volume.device.is_some());
            assert!(known || pending, "the device of {name} is forgotten");
        }
    }

    /// Lets everything succeed, and compares the machine with the pods.
    fn settle(&mut self) {
        for _ in 0..12 {
            self.pods_known();
            self.attachments_known();
            self.now += LONGEST_WAIT;
            self.pass();
            for operation in std::mem::take(&mut self.flying) {
                self.end(&operation, End::Success, false);
            }
        }
        let names = |(pod, volumes): (&PodUid, &BTreeMap<String, DesiredVolume>)| {
            volumes.values().map(|volume| (volume.name.clone(), pod.clone())).collect::<Vec<_>>()
        };
        let wanted: BTreeSet<(VolumeName, PodUid)> = self.wanted.iter().flat_map(names).collect();
        let mounted: BTreeSet<(VolumeName, PodUid)> = self.mounts.keys().cloned().collect();
        assert_eq!(mounted, wanted, "mounts and pods differ");
        let shared =
            self.mounts.values().filter(|volume| volume.reach.is_shared()).map(|volume| volume.name.clone());
        assert_eq!(self.devices, shared.collect::<BTreeSet<_>>(), "devices and pods differ");
        let in_state = self.actual.volumes().count() + self.actual.all_direct().count();
        assert_eq!(in_state, self.mounts.keys().map(|(v, _)| v).collect::<BTreeSet<_>>().len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: quintlet_testkit::budget::cases(2_000), ..ProptestConfig::default() })]

    #[test]
    fn volumes_in_use_stay_mounted_no_mount_is_forgotten_and_all_become_those_of_the_pods(
        controller_attaches in any::<bool>(),
        actions in prop::collection::vec(action(), 0..60),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().start_paused(true).enable_time().build().unwrap();
        let _guard = runtime.enter();
        let mut world = World::new(controller_attaches, Instant::now());
        for action in &actions {
            world.apply(action);
            world.check();
        }
        world.settle();
    }
}
