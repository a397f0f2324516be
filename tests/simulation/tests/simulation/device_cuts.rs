//! pod-sync is killed before and after each call and record of a pod's device.

use std::collections::BTreeMap;
use std::time::Duration;

use quintlet_device_plugin::TestPlugin;
use quintlet_kit::failpoint::{Kind, When};
use quintlet_simulation::cuts::CutPoint;
use quintlet_simulation::{Options, Service, Sim};

use crate::devices::{devices_of, dir, holders, start_plugin_with, wait_node, with_devices};

const DEVICES: [&str; 3] = ["d1", "d2", "d3"];

/// Steps of the start of a pod, each of which it has once.
const START: [&str; 4] =
    ["preferred devices read", "devices allocated", "device checkpoint written", "devices prepared"];

/// The step at the end of a pod.
const END: &str = "device checkpoint written";

/// A node with a pod that keeps its device.
struct Scene {
    sim: Sim,
    plugin: Option<TestPlugin>,
    keeper: String,
}

impl Scene {
    async fn new() -> Self {
        let sim = Sim::start(Options { cuts: true, ..Options::default() }).await;
        let mut scene = Self { sim, plugin: None, keeper: String::new() };
        scene.start_plugin().await;
        scene.keeper = scene.sim.create(with_devices("keeper", 1));
        scene.sim.wait_ready("keeper").await;
        scene
    }

    async fn start_plugin(&mut self) {
        // A plugin finds out by its socket that pod-sync has restarted.
        drop(self.plugin.take());
        let all_calls = |plugin: &TestPlugin| plugin.set_options(true, true);
        self.plugin = Some(start_plugin_with(&self.sim, &DEVICES, all_calls).await);
        wait_node(&self.sim, "3", "3").await;
    }

    /// Waits until pod-sync is killed at a step, and starts it again.
    async fn cut(&mut self, when: When, kind: &str) {
        let reached = tokio::time::timeout(Duration::from_secs(60), self.sim.cuts().reached()).await;
        let passed = self.sim.cuts().disarm();
        assert!(reached.is_ok(), "{when:?} {kind} was not reached, but {passed:?}");
        self.sim.restart(Service::PodSync).await;
        self.start_plugin().await;
    }

    /// Asserts that a pod has a device of its own.
    async fn ready(&self, name: &str, uid: &str) {
        self.sim.wait_ready(name).await;
        self.sim.assert_started_once(name, uid);
        let device = devices_of(&self.sim, uid, name);
        assert!(DEVICES.contains(&device.as_str()), "{device}");
        assert_ne!(device, devices_of(&self.sim, &self.keeper, "keeper"));
        let mut both = vec![self.keeper.clone(), uid.to_owned()];
        both.sort();
        assert_eq!(holders(&dir(&self.sim)), both);
    }

    async fn gone(&self, name: &str, uid: &str) {
        self.sim.wait_gone(name).await;
        self.sim.wait_nothing_left(uid).await;
        assert_eq!(holders(&dir(&self.sim)), [self.keeper.as_str()]);
    }
}

fn arm(sim: &Sim, when: When, kind: &str) {
    sim.cuts().arm(Kind::File, when, Some(CutPoint { kind: kind.to_owned(), number: 1 }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_gets_one_device_whenever_pod_sync_is_killed_and_another_pod_keeps_its_own() {
    let mut scene = Scene::new().await;
    let kept = scene.sim.instances(&scene.keeper);

    // Without a kill.
    scene.sim.cuts().arm(Kind::File, When::After, None);
    let uid = scene.sim.create(with_devices("whole", 1));
    scene.ready("whole", &uid).await;
    let mut passed = BTreeMap::<&str, usize>::new();
    for step in scene.sim.cuts().disarm().into_iter().filter(|step| START.contains(step)) {
        *passed.entry(step).or_insert(0) += 1;
    }
    assert_eq!(passed, START.map(|step| (step, 1)).into());
    scene.sim.delete("whole", None);
    scene.gone("whole", &uid).await;

    let cuts = [When::Before, When::After].into_iter().flat_map(|when| START.map(|kind| (when, kind)));
    for (number, (when, kind)) in cuts.enumerate() {
        let name = format!("start-{number}");
        arm(&scene.sim, when, kind);
        let uid = scene.sim.create(with_devices(&name, 1));
        scene.cut(when, kind).await;
        scene.ready(&name, &uid).await;
        scene.sim.delete(&name, None);
        scene.gone(&name, &uid).await;
    }
    for when in [When::Before, When::After] {
        let name = format!("end-{when:?}").to_lowercase();
        let uid = scene.sim.create(with_devices(&name, 1));
        scene.ready(&name, &uid).await;
        arm(&scene.sim, when, END);
        scene.sim.delete(&name, None);
        scene.cut(when, END).await;
        scene.gone(&name, &uid).await;
    }
    assert_eq!(scene.sim.instances(&scene.keeper), kept);
    // All devices but one are free.
    let last = scene.sim.create(with_devices("last", 2));
    scene.sim.wait_ready("last").await;
    assert_eq!(devices_of(&scene.sim, &last, "last").split(',').count(), 2);
    scene.sim.finish().await;
}
