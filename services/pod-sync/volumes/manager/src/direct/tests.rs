use k8s_openapi::api::core::v1::Pod;
use pod_sync_volume_reconcile::operations::OperationKind;
use serde_json::json;

use super::*;
use crate::views::{self, VolumeCounts, VolumeState};

fn uid() -> PodUid {
    PodUid::parse("u1").unwrap()
}

fn pod() -> Pod {
    let names = ["config", "late", "scratch", "host"];
    let mounts: Vec<_> = names.map(|n| json!({"name": n, "mountPath": format!("/{n}")})).into();
    serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {
        "containers": [{"name": "c", "volumeMounts": mounts}],
        "volumes": [
            {"name": "config", "configMap": {"name": "c"}}, {"name": "late", "configMap": {"name": "l"}},
            {"name": "scratch", "emptyDir": {}}, {"name": "host", "hostPath": {"path": "/"}},
            {"name": "unused", "emptyDir": {}}, {"name": "claim", "persistentVolumeClaim": {"claimName": "c"}},
        ],
    }}))
    .unwrap()
}

/// The worker of a pod, whose volume `late` cannot be set up.
struct World {
    state: ManagerState,
    now: Instant,
    text: String,
}

impl World {
    fn new() -> Self {
        let text = "MountVolume.SetUp failed for volume \"late\" : configmap \"l\" not found".to_owned();
        Self { state: ManagerState::default(), now: Instant::now(), text }
    }

    /// Returns the names of the volumes that are due, after `wait`.
    fn begin(&mut self, again: Again, wait: Duration) -> Vec<Operation> {
        self.now += wait;
        let pod = pod();
        let mut volumes = referenced(&pod);
        volumes.retain(|volume| is_direct(volume));
        self.state.declare_direct(&uid(), &volumes, again, Timestamp::UNIX_EPOCH);
        self.state.begin_direct(&uid(), self.now)
    }

    fn end(&mut self, operations: Vec<Operation>) {
        for operation in operations {
            let is_late = matches!(&operation, Operation::Mount { volume, .. } if volume.spec_name == "late");
            let ended = match is_late {
                true => Ended::Failed { text: self.text.clone(), is_partial: false },
                false => Ended::Done,
            };
            self.state.direct_ended(&operation, ended, self.now, Timestamp::UNIX_EPOCH);
        }
    }

    /// Executes what is due after `wait`, and returns the names of the volumes.
    fn pass(&mut self, again: Again, wait: Duration) -> Vec<String> {
        let operations = self.begin(again, wait);
        let names = names(&operations);
        self.end(operations);
        names
    }
}

fn names(operations: &[Operation]) -> Vec<String> {
    let name = |operation: &Operation| match operation {
        Operation::Mount { volume, .. } => volume.spec_name.clone(),
        other => format!("{:?} {}", other.kind(), other.key().volume),
    };
    operations.iter().map(name).collect()
}

const MS: Duration = Duration::from_millis(1);

#[tokio::test(start_paused = true)]
async fn a_volume_that_fails_is_set_up_again_alone_until_its_content_may_have_changed() {
    let mut world = World::new();
    assert_eq!(world.pass(Again::All, MS), ["config", "host", "late", "scratch"]);
    assert_eq!(world.pass(Again::None, 400 * MS), [""; 0]);
    assert_eq!(world.state.direct_wait(&uid(), world.now), Some(100 * MS));
    assert_eq!(world.pass(Again::None, 100 * MS), ["late"]);
    // A refresh does not end the back-off of the failed volume.
    assert_eq!(world.pass(Again::Content, MS), ["config"]);
    assert_eq!(world.state.direct_wait(&uid(), world.now), Some(999 * MS));
    assert_eq!(world.pass(Again::Changed, MS), ["config", "late"]);
    assert_eq!(world.state.direct_wait(&uid(), world.now), Some(500 * MS), "the back-off begins anew");
    for _ in 0..8 {
        let wait = world.state.direct_wait(&uid(), world.now).unwrap();
        assert_eq!(world.pass(Again::None, wait), ["late"]);
    }
    assert_eq!(world.state.direct_wait(&uid(), world.now), Some(LONGEST_WAIT_OF_A_POD));
    assert_eq!(world.pass(Again::All, MS), ["config", "host", "late", "scratch"]);
    // One operation at a time, also if the worker was replaced meanwhile.
    assert_eq!(names(&world.begin(Again::All, MS)), ["config", "host", "late", "scratch"]);
    assert_eq!(world.begin(Again::All, MS), []);
}

#[tokio::test(start_paused = true)]
async fn direct_volumes_are_in_the_views_the_counts_and_the_error_of_a_pod_that_waits() {
    let mut world = World::new();
    assert_eq!(world.state.missing_direct(&uid()), None);
    let operations = world.begin(Again::All, MS);
    assert_eq!(world.state.missing_direct(&uid()), Some(None));
    for operation in operations.iter().take(1) {
        world.state.direct_step(operation, OperationStep::SetUp, world.now);
    }
    let brief = |world: &World| {
        let views = views::of(&world.state, Some(&uid()), world.now).into_iter();
        views
            .map(|view| (view.name, view.state, view.step.is_some(), view.error.is_some()))
            .collect::<Vec<_>>()
    };
    let row = |name: &str, state, step, error| (name.to_owned(), state, step, error);
    use VolumeState::{Mounted, NotMounted};
    let missing = |name, step| row(name, NotMounted, step, false);
    assert_eq!(
        brief(&world),
        [missing("config", true), missing("host", false), missing("late", false), missing("scratch", false)]
    );
    world.end(operations);
    let mounted = |name| row(name, Mounted, false, false);
    let late = row("late", NotMounted, false, true);
    assert_eq!(brief(&world), [mounted("config"), mounted("host"), late.clone(), mounted("scratch")]);
    assert_eq!(world.state.missing_direct(&uid()), Some(Some(world.text.clone())));
    assert_eq!(views::of(&world.state, None, world.now).len(), 4);
    assert_eq!(views::of(&world.state, Some(&PodUid::parse("u2").unwrap()), world.now), []);
    let counts = VolumeCounts::of(&world.state);
    let counted = |counts: &BTreeMap<String, i64>| {
        counts.iter().map(|(plugin, n)| (plugin.replace("kubernetes.io/", ""), *n)).collect::<Vec<_>>()
    };
    let count = |plugin: &str, n| (plugin.to_owned(), n);
    let rest = [count("empty-dir", 1), count("host-path", 1)];
    assert_eq!(counted(&counts.desired), [&[count("configmap", 2)][..], &rest].concat());
    assert_eq!(counted(&counts.actual), [&[count("configmap", 1)][..], &rest].concat());

    // A refresh that fails leaves the volume to its pod, and has an error until it succeeds.
    let refresh = world.begin(Again::Content, MS);
    let stale = Ended::Stale("configmap \"c\" not found".to_owned());
    world.state.direct_ended(&refresh[0], stale, world.now, Timestamp::UNIX_EPOCH);
    assert_eq!(brief(&world)[0], row("config", Mounted, false, true));
    let longest = (0..10).map(|_| {
        let wait = world.state.direct_wait(&uid(), world.now).unwrap();
        for operation in world.begin(Again::None, wait) {
            let stale = Ended::Stale("configmap \"c\" not found".to_owned());
            world.state.direct_ended(&operation, stale, world.now, Timestamp::UNIX_EPOCH);
        }
        wait
    });
    assert!(longest.max() <= Some(LONGEST_WAIT));
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_released_has_its_volumes_removed_and_forgets_those_it_never_had() {
    let mut world = World::new();
    world.pass(Again::All, MS);
    world.state.release_direct(&uid());
    let removals = world.state.begin_direct(&uid(), world.now);
    assert!(removals.iter().all(|operation| operation.kind() == OperationKind::Unmount));
    let name = |kind: &str, name| VolumeName::of_pod(&format!("kubernetes.io/{kind}"), &uid(), name);
    let volumes: Vec<VolumeName> = removals.iter().map(|operation| operation.key().volume).collect();
    assert_eq!(
        volumes,
        [name("configmap", "config"), name("empty-dir", "scratch"), name("host-path", "host")]
    );
    assert!(world.state.errors.is_empty(), "{:?}", world.state.errors);
    let busy = Ended::Failed { text: "busy".to_owned(), is_partial: true };
    world.state.direct_ended(&removals[0], busy, world.now, Timestamp::UNIX_EPOCH);
    for removal in &removals[1..] {
        world.state.direct_ended(removal, Ended::Done, world.now, Timestamp::UNIX_EPOCH);
    }
    let error = "UnmountVolume.TearDown failed for volume \"kubernetes.io/configmap/u1-config\" : busy";
    assert_eq!(world.state.still_mounted(&uid()).text, format!("volumes may still be mounted: {error}"));
    assert_eq!(world.state.begin_direct(&uid(), world.now), []);
    world.now += world.state.direct_wait(&uid(), world.now).unwrap();
    for removal in world.state.begin_direct(&uid(), world.now) {
        world.state.direct_ended(&removal, Ended::Done, world.now, Timestamp::UNIX_EPOCH);
    }
    world.state.release(&uid());
    assert!(!world.state.may_have_mounts(&uid()) && world.state.errors.is_empty());
    assert_eq!(views::of(&world.state, None, world.now), []);
    assert_eq!(world.state.needed_since(&uid(), "config"), None);
}

#[tokio::test(start_paused = true)]
async fn an_operation_of_a_cancelled_worker_counts_as_not_attempted() {
    let mut world = World::new();
    let operations = world.begin(Again::All, MS);
    for operation in &operations {
        world.state.direct_ended(operation, Ended::Abandoned, world.now, Timestamp::UNIX_EPOCH);
    }
    assert!(world.state.errors.is_empty() && !world.state.may_have_mounts(&uid()));
    assert_eq!(world.begin(Again::None, Duration::ZERO), operations, "without a back-off");
}

#[tokio::test(start_paused = true)]
async fn volumes_found_on_disk_are_set_up_again_and_stay_if_that_fails() {
    let mut world = World::new();
    let name = |name: &str| VolumeName::of_pod("kubernetes.io/configmap", &uid(), name);
    for found in ["config", "late"] {
        world.state.actual.found_direct(name(found), &uid(), found.to_owned());
    }
    assert_eq!(world.pass(Again::Changed, MS), ["config", "host", "late", "scratch"]);
    let state = |volume: &str| world.state.actual.mount(&name(volume), &uid()).map(|mount| mount.state);
    assert_eq!((state("config"), state("late")), (Some(MountState::Mounted), Some(MountState::Uncertain)));
}
