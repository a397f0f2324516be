//! pod-sync is killed at each record and call of a pod's claim.

use std::time::Duration;

use pod_sync_claims::checkpoint::CHECKPOINT;
use quintlet_cri_api::v1;
use quintlet_dra_driver::TestDriver;
use quintlet_kit::failpoint::{Kind, When};
use quintlet_simulation::cuts::CutPoint;
use quintlet_simulation::{LONG, Options, Service, Sim};
use quintlet_testkit::wait::until;

use crate::resource_claims::{
    DRIVER, allocate_named, cdi_devices, create_named_claim, holders, start_driver, with_named_claim,
};

/// A kill: its kind, its side, the step, and its number among the steps of the kind.
type Cut = (Kind, When, &'static str, usize);

const RECORD: &str = "claim checkpoint written";

/// Kills during the start of a pod: at the record of the pod, the call, and the record of the devices.
const START: [Cut; 6] = [
    (Kind::Work, When::Before, "claims recorded", 1),
    (Kind::File, When::Before, RECORD, 1),
    (Kind::File, When::After, RECORD, 1),
    (Kind::Work, When::Before, "claims prepared", 1),
    (Kind::File, When::Before, RECORD, 2),
    (Kind::File, When::After, RECORD, 2),
];

/// Kills during the end of a pod: before and after the call, and at the record.
const END: [Cut; 4] = [
    (Kind::Work, When::Before, "claims released", 1),
    (Kind::Work, When::Before, "claims unprepared", 1),
    (Kind::File, When::Before, RECORD, 1),
    (Kind::File, When::After, RECORD, 1),
];

/// The files with the record of claims that a kill leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    Whole,
    /// The checkpoint is torn.
    Copy,
    /// The checkpoint is torn, and its copy is gone.
    Nothing,
}

/// A node with a pod that keeps its claim.
struct Scene {
    sim: Sim,
    driver: TestDriver,
    keeper: String,
}

impl Scene {
    async fn new() -> Self {
        let sim = Sim::start(Options { cuts: true, ..Options::default() }).await;
        let driver = start_driver(&sim).await;
        let mut scene = Self { sim, driver, keeper: String::new() };
        scene.keeper = scene.create("keeper");
        scene.sim.wait_ready("keeper").await;
        scene
    }

    /// Creates a pod with a claim of its own, which has its name.
    fn create(&self, name: &str) -> String {
        create_named_claim(&self.sim, name);
        let uid = self.sim.create(with_named_claim(name, name));
        allocate_named(&self.sim, name, &[&uid]);
        uid
    }

    fn arm(&self, (effect, when, kind, number): Cut) {
        self.sim.cuts().arm(effect, when, Some(CutPoint { kind: kind.to_owned(), number }));
    }

    /// Waits until pod-sync is killed, and starts it again, on what the kill left of its record.
    async fn cut(&self, cut: Cut, left: Left) {
        let reached = tokio::time::timeout(Duration::from_secs(60), self.sim.cuts().reached()).await;
        let passed = self.sim.cuts().disarm();
        assert!(reached.is_ok(), "{cut:?} was not reached, but {passed:?}");
        self.sim.kill(Service::PodSync).await;
        let path = self.sim.root_dir().join(CHECKPOINT);
        let copy = self.sim.paths().state_dir().join(format!(".{CHECKPOINT}"));
        if left != Left::Whole {
            let bytes = std::fs::read(&path).unwrap();
            std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        }
        if left == Left::Nothing {
            std::fs::remove_file(copy).unwrap();
        }
        self.sim.up(Service::PodSync);
    }

    /// Asserts that a pod has the device of its claim.
    async fn ready(&self, name: &str, uid: &str) {
        self.sim.wait_ready(name).await;
        self.sim.assert_started_once(name, uid);
        assert_eq!(
            cdi_devices(&self.sim, uid, name),
            [v1::CdiDevice { name: format!("{DRIVER}/claim={name}") }]
        );
        self.held(&[&self.keeper, uid]).await;
        assert_eq!(self.driver.prepared().len(), 2);
    }

    async fn gone(&self, name: &str, uid: &str) {
        self.sim.wait_gone(name).await;
        self.sim.wait_nothing_left(uid).await;
        self.held(&[&self.keeper]).await;
        assert_eq!(self.driver.prepared().len(), 1, "{:?}", self.driver.calls());
    }

    /// Waits until these pods are recorded.
    async fn held(&self, pods: &[&str]) {
        let mut expected = pods.to_vec();
        expected.sort_unstable();
        until("the pods of the record", LONG, async || {
            let mut held = holders(&self.sim);
            held.sort();
            if held == expected { Ok(()) } else { Err(held) }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_is_prepared_and_unprepared_whenever_pod_sync_is_killed_and_another_pod_keeps_its_own() {
    let calls = kill_at_each_step(Left::Whole).await;
    assert_eq!(calls, ["v1 NodePrepareResources keeper"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_that_tears_the_record_loses_no_claim() {
    let calls = kill_at_each_step(Left::Copy).await;
    assert_eq!(calls, ["v1 NodePrepareResources keeper"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_that_tears_the_record_and_its_copy_loses_no_claim() {
    // The pod is recorded again after each kill. Its claim is never unprepared.
    let calls = kill_at_each_step(Left::Nothing).await;
    assert!(calls.iter().all(|call| call == "v1 NodePrepareResources keeper"), "{calls:?}");
}

/// Kills pod-sync at each step of pods with a claim. Returns the calls for the claim of the pod that stays.
async fn kill_at_each_step(left: Left) -> Vec<String> {
    let scene = Scene::new().await;
    let kept = scene.sim.instances(&scene.keeper);
    for (number, cut) in START.into_iter().enumerate() {
        let name = format!("start-{number}");
        scene.arm(cut);
        let uid = scene.create(&name);
        scene.cut(cut, left).await;
        scene.ready(&name, &uid).await;
        scene.sim.delete(&name, None);
        scene.gone(&name, &uid).await;
    }
    for (number, cut) in END.into_iter().enumerate() {
        let name = format!("end-{number}");
        let uid = scene.create(&name);
        scene.ready(&name, &uid).await;
        scene.arm(cut);
        scene.sim.delete(&name, None);
        scene.cut(cut, left).await;
        scene.gone(&name, &uid).await;
    }
    assert_eq!(scene.sim.instances(&scene.keeper), kept);
    assert_eq!(scene.driver.overlaps(), [""; 0]);
    let mut calls = scene.driver.calls();
    calls.retain(|call| call.contains("keeper"));
    scene.sim.finish().await;
    calls
}
