//! The machine loses power: files that were not synced are missing, incomplete, empty or of an earlier
//! version at the next start.
//!
//! The file layer is [`quintlet_simulation::cuts::Cuts::written_files`]: each file that a service replaced
//! with `atomic_file`, and whether it was synced. All other files of the root directory count as not synced.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use quintlet_csi_driver::thread::DriverThread;
use quintlet_csi_driver::volumes::mounts_below;
use quintlet_device_plugin::TestPlugin;
use quintlet_dra_driver::TestDriver;
use quintlet_kit::failpoint::{Kind, When};
use quintlet_simulation::cuts::{CutPoint, WrittenFile};
use quintlet_simulation::{Options, Seen, Service, Sim, pods};
use quintlet_testkit::budget;
use quintlet_testkit::fake_runtime::Method;
use serde_json::{Value, json};

use crate::devices::{DEVICE, devices_of, start_plugin_with, wait_node};
use crate::resource_claims::{allocate_named, create_named_claim};
use crate::{claims, edges, resource_claims};

mod ends;

/// The preStop hook of each pod.
const HOOK: &str = "hook";
const DEVICES: [&str; 3] = ["d1", "d2", "d3"];

/// State of files that were not synced, after the loss of power.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// The last synced version, or no file.
    Dropped,
    /// An empty file.
    Emptied,
    /// The first half of the file, and the temporary files of writes in progress.
    Torn,
    /// Every second file as it was, and none of the others: later writes may reach the disk first.
    Reordered,
    /// No directory of the pod that was started last, with its synced files.
    DirectoryDropped,
}

const LOSSES: [Loss; 5] = [Loss::Dropped, Loss::Emptied, Loss::Torn, Loss::Reordered, Loss::DirectoryDropped];

/// Returns the files and links below a directory.
fn files_below(dir: &Path) -> BTreeMap<PathBuf, std::fs::FileType> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            found.append(&mut files_below(&entry.path()));
        } else {
            found.insert(entry.path(), kind);
        }
    }
    found
}

fn tear(path: &Path) {
    let bytes = std::fs::read(path).unwrap();
    std::fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
}

/// Changes the files below `root` to a state that the loss of power may leave.
fn lose(root: &Path, written: &[WrittenFile], loss: Loss, last_pod: &str) {
    let last: BTreeMap<&Path, &WrittenFile> = written.iter().map(|w| (w.path.as_path(), w)).collect();
    let synced: BTreeMap<&Path, &WrittenFile> =
        written.iter().filter(|w| w.is_durable).map(|w| (w.path.as_path(), w)).collect();
    for (number, (path, kind)) in files_below(root).into_iter().enumerate() {
        if last.get(path.as_path()).is_some_and(|write| write.is_durable) {
            if loss == Loss::Torn {
                let name = path.file_name().unwrap().to_string_lossy();
                let temporary = path.with_file_name(format!(".{name}.Xy12aB"));
                std::fs::copy(&path, &temporary).unwrap();
                tear(&temporary);
            }
            continue;
        }
        let drops = match loss {
            Loss::Dropped | Loss::DirectoryDropped => true,
            Loss::Reordered => number % 2 == 0,
            Loss::Emptied | Loss::Torn => false,
        };
        match (drops, synced.get(path.as_path())) {
            (true, Some(earlier)) => std::fs::write(&path, &earlier.bytes).unwrap(),
            (true, None) => std::fs::remove_file(&path).unwrap(),
            (false, _) if loss == Loss::Emptied && kind.is_file() => std::fs::write(&path, "").unwrap(),
            (false, _) if loss == Loss::Torn && kind.is_file() => tear(&path),
            (false, _) => {}
        }
    }
    let directory = root.join("pods").join(last_pod);
    if loss == Loss::DirectoryDropped && directory.exists() {
        std::fs::remove_dir_all(directory).unwrap();
    }
}

/// A node with a pod that keeps its device, its claim and its volume.
struct Scene {
    sim: Sim,
    drivers: Option<(TestPlugin, TestDriver, DriverThread)>,
    keeper: String,
    losses: i64,
    /// Calls of the drivers of claims before the last boot.
    claim_calls: Vec<String>,
}

impl Scene {
    async fn new() -> Self {
        let sim = Sim::prepare(Options { cuts: true, ..Options::default() }).await;
        sim.cuts().record_files();
        let settings = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": "settings", "namespace": "default"}, "data": {"a": "1", "b": "2"},
        });
        sim.api.create("configmaps", "default", settings).unwrap();
        sim.manifest("static", &pods::manifest("static"));
        claims::csi_driver(&sim, json!({"attachRequired": false}));
        sim.start_all();
        let mut scene =
            Self { sim, drivers: None, keeper: String::new(), losses: 0, claim_calls: Vec::new() };
        scene.start_drivers().await;
        scene.keeper = scene.create("keeper");
        scene.sim.wait_ready("keeper").await;
        scene.sim.wait_ready("static-sim-node").await;
        scene
    }

    async fn start_drivers(&mut self) {
        drop(self.drivers.take());
        let all_calls = |plugin: &TestPlugin| plugin.set_options(true, true);
        let plugin = start_plugin_with(&self.sim, &DEVICES, all_calls).await;
        let driver = resource_claims::start_driver(&self.sim).await;
        self.drivers = Some((plugin, driver, claims::start_driver(&self.sim)));
        wait_node(&self.sim, "3", "3").await;
    }

    /// Creates a pod with a probe, a device, a claim for a device, and volumes of several types.
    fn create(&self, name: &str) -> String {
        let mut pod = pods::single(name);
        pod["spec"]["terminationGracePeriodSeconds"] = json!(2);
        pod["spec"]["volumes"] = json!([
            {"name": "disk", "emptyDir": {}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
            {"name": "settings", "configMap": {"name": "settings"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": name}},
        ]);
        pod["spec"]["resourceClaims"] = json!([{"name": "device", "resourceClaimName": name}]);
        let main = &mut pod["spec"]["containers"][0];
        // Each pod pulls its image.
        main["image"] = json!(format!("example.test/{name}:1"));
        main["volumeMounts"] = json!([
            {"name": "disk", "mountPath": "/disk"},
            {"name": "memory", "mountPath": "/part", "subPath": "part"},
            {"name": "settings", "mountPath": "/settings"},
            {"name": "data", "mountPath": "/data"},
        ]);
        let devices = json!({DEVICE: "1"});
        main["resources"] = json!({"limits": devices, "requests": devices, "claims": [{"name": "device"}]});
        main["readinessProbe"] = json!({"exec": {"command": ["probe"]}, "periodSeconds": 1});
        main["lifecycle"] = json!({"preStop": {"exec": {"command": [HOOK]}}});
        claims::bound_claim(&self.sim, name, |_| {});
        create_named_claim(&self.sim, name);
        let uid = self.sim.create(pod);
        allocate_named(&self.sim, name, &[&uid]);
        uid
    }

    /// Loses the power, and starts the machine again. Returns the containers of the last boot.
    async fn reboot(&mut self, loss: Loss, last_pod: &str) -> BTreeSet<String> {
        edges::go_down(&self.sim).await;
        let before = self.sim.runtime.containers().iter().map(|c| c.id().to_owned()).collect();
        if let Some((_, driver, _)) = self.drivers.take() {
            self.claim_calls.extend(driver.calls());
        }
        self.sim.runtime.unscript_all();
        self.sim.api.faults().clear();
        for path in mounts_below(&self.sim.root_dir()).unwrap().iter().rev() {
            assert!(Command::new("umount").arg(path).status().unwrap().success(), "{}", path.display());
        }
        lose(&self.sim.root_dir(), &self.sim.cuts().written_files(), loss, last_pod);
        self.losses += 1;
        self.sim.start_all();
        self.start_drivers().await;
        before
    }

    /// Returns the number of calls of the drivers of claims that contain a text.
    fn calls_of_claims(&self, text: &str) -> usize {
        let now = self.drivers.as_ref().map(|(_, driver, _)| driver.calls()).unwrap_or_default();
        self.claim_calls.iter().chain(&now).filter(|call| call.contains(text)).count()
    }

    /// Asserts that a pod has a single container besides those of the last boot.
    fn assert_one(&self, what: &str, uid: &str, before: &BTreeSet<String>) {
        let of_pod = self.sim.runtime.containers().into_iter().filter(|c| c.pod_uid() == uid);
        let new: Vec<String> =
            of_pod.filter(|c| !before.contains(c.id())).map(|c| c.name().to_owned()).collect();
        assert_eq!(new.len(), 1, "{what}: {:#?}", self.sim.instances(uid));
    }

    /// Loses the power at this step of the start of a pod. Returns whether the pod reached the step.
    async fn at(&mut self, name: &str, (when, kind, loss): (When, &str, Loss)) -> bool {
        let what = format!("{name}: {when:?} {kind}, {loss:?}");
        let point = CutPoint { kind: kind.to_owned(), number: 1 };
        self.sim.cuts().arm(Kind::File, when, Some(point));
        let uid = self.create(name);
        let is_reached = tokio::select! {
            () = self.sim.cuts().reached() => true,
            _ = self.sim.wait_ready(name) => false,
        };
        self.sim.cuts().disarm();
        let device = devices_of(&self.sim, &self.keeper, "keeper");
        let lines = self.sim.log().len();
        let before = self.reboot(loss, &uid).await;

        let restarts = self.losses;
        self.sim.wait_pod("keeper", &what, |pod| pod.is_ready() && pod.restarts() == restarts).await;
        self.sim.wait_pod("static-sim-node", &what, |pod| pod.is_ready() && pod.restarts() == restarts).await;
        self.sim.wait_pod(name, &what, Seen::is_ready).await;
        for uid in [&uid, &self.keeper] {
            self.assert_one(&what, uid, &before);
        }
        assert_eq!(devices_of(&self.sim, &self.keeper, "keeper"), device, "{what}");
        assert_ne!(devices_of(&self.sim, &uid, name), device, "{what}");
        for volume in ["a", "b"] {
            let file = format!("pods/{uid}/volumes/kubernetes.io~configmap/settings/{volume}");
            let text = std::fs::read_to_string(self.sim.root_dir().join(file)).unwrap();
            assert_eq!(text.len(), 1, "{what}");
        }
        assert_logged_once(&self.sim.log()[lines..], &what);
        self.sim.delete(name, None);
        self.sim.wait_gone(name).await;
        self.sim.wait_nothing_left(&uid).await;
        is_reached
    }
}

/// Asserts that no line about a file is repeated.
fn assert_logged_once(lines: &[Value], what: &str) {
    let mut logged = BTreeSet::new();
    for line in lines.iter().filter(|line| line["path"].is_string()) {
        let line = ["service", "msg", "path"].map(|field| line[field].to_string());
        assert!(logged.insert(line.clone()), "{what}: logged again: {line:?}");
    }
}

/// Steps that no cut reaches.
const UNREACHED: [&str; 0] = [];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_loss_of_power_at_any_step_of_its_start_a_pod_starts_once_and_another_keeps_its_own() {
    let mut scene = Scene::new().await;
    // The first start has no loss. Its steps are those at which the power is lost later.
    scene.sim.cuts().arm(Kind::File, When::After, None);
    let uid = scene.create("whole");
    scene.sim.wait_ready("whole").await;
    let mut steps: Vec<&str> = Vec::new();
    for step in scene.sim.cuts().disarm() {
        if !steps.contains(&step) {
            steps.push(step);
        }
    }
    scene.sim.delete("whole", None);
    scene.sim.wait_gone("whole").await;
    scene.sim.wait_nothing_left(&uid).await;
    eprintln!("steps: {steps:?}");
    let all = steps.iter().flat_map(|step| [When::Before, When::After].map(|when| (when, *step)));
    let all: Vec<_> = all.flat_map(|(when, step)| LOSSES.map(|loss| (when, step, loss))).collect();
    // Each step at least once, and each loss several times. A long run has each pair of them.
    let every = if budget::is_long_run() { 1 } else { 9 };
    let mut reached = BTreeSet::new();
    let cuts: Vec<_> = all.into_iter().step_by(every).collect();
    for (number, cut) in cuts.iter().enumerate() {
        if scene.at(&format!("start-{number}"), *cut).await {
            reached.insert(cut.1);
        }
    }
    let missed: Vec<&str> = steps.into_iter().filter(|step| !reached.contains(step)).collect();
    assert_eq!(missed, UNREACHED, "steps that no cut has reached");
    scene.sim.finish().await;
}

/// The files of the root directory that hold a state which a start needs.
const STATES: [&str; 5] = [
    "allocated_pods_state",
    "actuated_pods_state",
    "dra_manager_state",
    "kubelet_internal_checkpoint",
    "quintlet-static-pod-uids",
];

/// Files with which pod-sync does not start if they are unusable, as a kubelet, so that no CPU has two
/// holders. They are synced, and may be missing.
const REFUSED: [&str; 2] = ["cpu_manager_state", "memory_manager_state"];

// The disk loses what was synced, too. The run directory is on that disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn services_start_whatever_is_left_of_their_files_and_log_each_unusable_state_once() {
    let mut scene = Scene::new().await;
    for (number, loss) in [Loss::Emptied, Loss::Torn, Loss::Dropped].into_iter().enumerate() {
        // The files are written at most every ten seconds.
        tokio::time::sleep(Duration::from_secs(30)).await;
        for service in Service::ALL {
            scene.sim.kill(service).await;
        }
        let mut states = BTreeMap::new();
        for dir in [scene.sim.root_dir(), scene.sim.paths().run().to_owned()] {
            for (path, kind) in files_below(&dir) {
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                let is_volume = path.components().any(|part| part.as_os_str() == "mount");
                let is_refused = loss != Loss::Dropped && REFUSED.contains(&name.as_str());
                if !kind.is_file() || is_volume || is_refused {
                    continue;
                }
                let is_state = loss != Loss::Dropped && STATES.contains(&name.as_str());
                assert!(!is_state || std::fs::metadata(&path).unwrap().len() > 1, "{loss:?} {name}");
                match loss {
                    Loss::Emptied => std::fs::write(&path, "").unwrap(),
                    Loss::Torn => tear(&path),
                    Loss::Dropped | Loss::Reordered | Loss::DirectoryDropped => {
                        std::fs::remove_file(&path).unwrap();
                    }
                }
                if is_state {
                    states.insert(name, path.display().to_string());
                }
            }
        }
        let found: BTreeSet<&str> = states.keys().map(String::as_str).collect();
        let mut wanted = BTreeSet::from(STATES);
        if loss == Loss::Dropped {
            // A missing state is no fault.
            wanted.clear();
        }
        assert_eq!(found, wanted, "{loss:?}");
        let lines = scene.sim.log().len();
        let started = scene.sim.runtime.count(Method::StartContainer);
        scene.sim.start_all();
        scene.start_drivers().await;
        // All services work again.
        let name = format!("later-{number}");
        let _uid = scene.sim.create(pods::single(&name));
        scene.sim.wait_ready(&name).await;
        scene.sim.wait_ready("keeper").await;
        assert_eq!(scene.sim.runtime.count(Method::StartContainer), started + 1, "{loss:?}");
        let log = scene.sim.log().split_off(lines);
        for state in states.into_values() {
            let about = log.iter().filter(|line| line["path"] == *state).count();
            assert_eq!(about, 1, "{loss:?} {state}: {log:#?}");
        }
        assert_logged_once(&log, &format!("{loss:?}"));
    }
    scene.sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_loss_of_power_at_any_write_the_offline_cache_has_each_pod_whole_or_not_at_all() {
    let mut sim = Sim::prepare(Options { cuts: true, ..Options::default() }).await;
    sim.set_pod_sync_args(&["--offline-cache"]);
    sim.cuts().record_files();
    sim.disturb();
    let secret = json!({"metadata": {"name": "s"}, "data": {"k": "c2VjcmV0"}});
    sim.api.create("secrets", "default", secret).unwrap();
    let create = |name: &str| {
        let mut pod = pods::single(name);
        pod["spec"]["volumes"] = json!([{"name": "v", "secret": {"secretName": "s"}}]);
        sim.create(pod)
    };
    sim.start_all();
    let keeper = create("keeper");
    sim.wait_ready("keeper").await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    let is_running = |uid: &str, name: &str| {
        sim.runtime.newest(uid, &format!("c-{name}")).is_some_and(|container| container.running())
    };
    let (mut cut, mut started) = (0, 0);
    // The write that follows the start of a pod, and in a long run one more, which few starts have.
    let writes = if budget::is_long_run() { 2 } else { 1 };
    for number in 1..=writes {
        for when in [When::Before, When::After] {
            for loss in [Loss::Dropped, Loss::Emptied, Loss::Torn, Loss::Reordered] {
                let what = format!("{when:?} write {number}, {loss:?}");
                let name = format!("late-{number}-{when:?}-{loss:?}").to_lowercase();
                let point = CutPoint { kind: "offline cache written".to_owned(), number };
                sim.cuts().arm(Kind::File, when, Some(point));
                let late = create(&name);
                tokio::select! {
                    () = sim.cuts().reached() => cut += 1,
                    () = tokio::time::sleep(Duration::from_secs(20)) => {}
                }
                sim.cuts().disarm();
                sim.api.faults().set_down(true);
                edges::go_down(&sim).await;
                for path in mounts_below(&sim.root_dir()).unwrap().iter().rev() {
                    assert!(
                        Command::new("umount").arg(path).status().unwrap().success(),
                        "{}",
                        path.display()
                    );
                }
                lose(&sim.root_dir(), &sim.cuts().written_files(), loss, &late);
                let lines = sim.log().len();
                sim.start_all();
                sim.wait_runtime(&what, |_| is_running(&keeper, "keeper")).await;
                tokio::time::sleep(Duration::from_secs(10)).await;
                started += u32::from(is_running(&late, &name));
                let ignored = |line: &&Value| line["msg"] == "file of the offline cache ignored";
                let ignored: Vec<Value> = sim.log()[lines..].iter().filter(ignored).cloned().collect();
                assert_eq!(ignored, Vec::<Value>::new(), "{what}: files are written whole");
                for uid in [&keeper, &late] {
                    let file = format!("pods/{uid}/volumes/kubernetes.io~secret/v/k");
                    let content = std::fs::read_to_string(sim.root_dir().join(file)).ok();
                    assert!(content.as_deref().is_none_or(|text| text == "secret"), "{what}: {content:?}");
                }
                sim.api.faults().set_down(false);
                sim.wait_pod(&name, &what, Seen::is_ready).await;
                sim.delete(&name, Some(0));
                sim.wait_gone(&name).await;
                sim.wait_nothing_left(&late).await;
            }
        }
    }
    eprintln!("{cut} cuts, {started} late pods started without the API server");
    assert!(cut > 0);
    sim.finish().await;
}
