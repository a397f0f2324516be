//! pod-sync ended at the exact step, on either side of it: around calls of the runtime and statuses of a start, of a container made
//! anew, and of a stop, and before each change of a file in the removal of an orphan. Those of its files in the other parts are cut
//! one-sidedly in `failpoints`.
//!
//! The steps are not listed: each seam counts what passes it, the n-th passing ends pod-sync, and n grows until a whole life passes
//! without reaching it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1;
use parking_lot::Mutex;
use quintlet_kit::seam::{self, When};
use quintlet_simulation::sim::LONG;
use quintlet_simulation::{Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{Behaviour, Call, ExecReply, FakeRuntime, Method, Rule};
use quintlet_testkit::wait::until;
use serde_json::json;

/// What changes the runtime, and what a start waits for beside that.
const STEPS: [Method; 8] = [
    Method::RunPodSandbox,
    Method::PodSandboxStatus,
    Method::PullImage,
    Method::CreateContainer,
    Method::StartContainer,
    Method::StopContainer,
    Method::StopPodSandbox,
    Method::RemoveContainer,
];
/// A bound on what is enumerated: a step that begins anew after each kill would never come to an end.
const MANY: u64 = 200;
/// Between a call's arrival and its effect, so that a kill falls between the two.
const BEFORE: Duration = Duration::from_millis(40);

/// Where passings are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seam {
    /// A call of the runtime: it came and did nothing yet, or it did what it was for and its answer is on its way.
    Call(When),
    /// A change of a file, a directory, a mount or a cgroup.
    File(When),
    /// A status on its way to status-reporter, or its answer.
    Status(When),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Start,
    // A container that is not alive is stopped and made anew.
    Remake,
    Stop,
}

// Commands of its hooks and of its probe.
const FIRST: &str = "first";
const LAST: &str = "last";
const ALIVE: &str = "alive";

fn is_step(runtime: &FakeRuntime, hooks_in_flight: bool) -> u64 {
    let counts = runtime.counts();
    let calls: u64 = STEPS.iter().map(|m| counts.get(m).copied().unwrap_or(0)).sum();
    let hooks = runtime.calls_of(Method::ExecSync).iter().filter(|c| command(c) != ALIVE).count();
    // A probe in flight makes this too small for a moment only.
    let in_flight: usize = STEPS.iter().map(|m| runtime.in_flight(*m)).sum();
    let in_flight = if hooks_in_flight { in_flight + runtime.in_flight(Method::ExecSync) } else { 0 };
    (calls + hooks as u64).saturating_sub(in_flight as u64)
}

fn command(call: &Call) -> String {
    call.request::<v1::ExecSyncRequest>().cmd.concat()
}

/// Counts from now on; returns when the seam was passed so many times.
fn passed(sim: &Sim, seam: Seam, times: u64) -> impl Future<Output = ()> + '_ {
    let worked = seam == Seam::Call(When::After);
    let from = is_step(&sim.runtime, worked);
    match seam {
        Seam::Call(_) => {}
        Seam::File(when) => sim.cuts().arm(seam::Seam::File, when, times),
        Seam::Status(when) => sim.cuts().arm(seam::Seam::Status, when, times),
    }
    async move {
        match seam {
            // Nothing of the runtime changes when a call comes, so it is asked often.
            Seam::Call(_) => {
                while is_step(&sim.runtime, worked).saturating_sub(from) < times {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            Seam::File(_) | Seam::Status(_) => sim.cuts().reached().await,
        }
    }
}

fn pod(name: &str) -> serde_json::Value {
    let mut pod = pods::single(name);
    pod["spec"]["terminationGracePeriodSeconds"] = json!(5);
    pod["spec"]["initContainers"] = json!([pods::container("init")]);
    pod["spec"]["volumes"] = json!([
        {"name": "disk", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
        {"name": "settings", "configMap": {"name": "settings"}},
    ]);
    let main = &mut pod["spec"]["containers"][0];
    main["terminationMessagePath"] = json!("/dev/termination-log");
    main["volumeMounts"] = json!([
        {"name": "disk", "mountPath": "/disk"},
        {"name": "memory", "mountPath": "/part", "subPath": "part"},
        {"name": "settings", "mountPath": "/settings"},
    ]);
    main["resources"] = json!({"requests": {"cpu": "500m"}});
    main["lifecycle"] = json!({
        "postStart": {"exec": {"command": [FIRST]}},
        "preStop": {"exec": {"command": [LAST]}},
    });
    main["livenessProbe"] = json!({
        "exec": {"command": [ALIVE]}, "periodSeconds": 1, "failureThreshold": 1,
    });
    pod
}

/// A node, and which of its containers are not alive.
struct Scene {
    sim: Sim,
    sick: Arc<Mutex<Vec<String>>>,
}

impl Scene {
    async fn new(seam: Seam) -> Self {
        let mut sim = Sim::prepare(Options { cuts: true, ..Options::default() }).await;
        let links = sim.root_dir().with_file_name("container-logs");
        sim.set_pod_sync_args(&[&format!("--container-logs-dir={}", links.display())]);
        sim.runtime
            .behave("init", Behaviour { exit: Some((Duration::from_millis(20), 0)), ..Behaviour::default() });
        let sick = Arc::new(Mutex::new(Vec::<String>::new()));
        let told = Arc::clone(&sick);
        sim.runtime.on_exec(move |id, command| {
            let dead = command == [ALIVE] && told.lock().iter().any(|sick| sick == id);
            let after = if command == [ALIVE] { Duration::ZERO } else { Duration::from_millis(20) };
            ExecReply { after, exit_code: i32::from(dead), ..ExecReply::default() }
        });
        if seam == Seam::Call(When::Before) {
            for method in STEPS.into_iter().chain([Method::ExecSync]) {
                sim.runtime.script(Rule::on(method).latency(BEFORE));
            }
        }
        let settings = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": "settings", "namespace": "default"},
            "data": {"a": "1", "b": "2"},
        });
        sim.api.create("configmaps", "default", settings).unwrap();
        sim.start_all();
        Self { sim, sick }
    }

    // How often the hooks of each instance ran.
    fn hooks(&self) -> BTreeMap<(String, String), usize> {
        let mut ran = BTreeMap::new();
        for call in self.sim.runtime.calls_of(Method::ExecSync).iter().filter(|c| command(c) != ALIVE) {
            *ran.entry((call.subjects[0].clone(), command(call))).or_default() += 1;
        }
        ran
    }

    /// One life of a pod; pod-sync is killed at the `times`-th passing within `part`. False: it passed less often.
    async fn killed_at(&self, seam: Seam, part: Part, times: u64) -> bool {
        let sim = &self.sim;
        let name = format!("p{times}");
        let mut reached = false;
        let seam_at = |now: Part| (now == part).then(|| passed(sim, seam, times));
        let before = self.hooks().len();

        let at = seam_at(Part::Start);
        let uid = sim.create(pod(&name));
        if let Some(at) = at {
            reached = race(sim, at, sim.wait_ready(&name)).await;
        }
        sim.wait_ready(&name).await;
        sim.assert_started_once(&name, &uid);
        self.assert_limited(&uid);
        let first = sim.runtime.newest(&uid, &format!("c-{name}")).unwrap().id().to_owned();
        let mut instances = vec![first.clone()];

        if part == Part::Remake {
            let at = seam_at(Part::Remake);
            self.sick.lock().push(first);
            let remade = || sim.wait_pod(&name, "made anew", |p| p.is_ready() && p.restarts() == 1);
            if let Some(at) = at {
                reached = race(sim, at, remade()).await;
            }
            remade().await;
            instances.push(sim.runtime.newest(&uid, &format!("c-{name}")).unwrap().id().to_owned());
        }

        let made = sim.runtime.count(Method::RunPodSandbox);
        let at = seam_at(Part::Stop);
        sim.delete(&name, None);
        if let Some(at) = at {
            reached = race(sim, at, self.gone(&name, &uid)).await;
        }
        self.gone(&name, &uid).await;
        let cut = sim.cuts().last();
        assert_eq!(sim.runtime.count(Method::RunPodSandbox), made, "{name}: a pod that ends gets no sandbox");
        let after = self.hooks();
        for id in &instances {
            for hook in [FIRST, LAST] {
                let ran = after.get(&(id.clone(), hook.to_owned()));
                assert_eq!(ran, Some(&1), "{name}: hook {hook} of {id}, pod-sync cut at {cut:?}");
            }
        }
        assert_eq!(after.len(), before + 2 * instances.len(), "{name}: hooks of nothing else");
        let warned = sim.warnings(&name);
        assert!(warned.iter().all(|e| e.reason == "Unhealthy"), "{name}, cut at {cut:?}: {warned:?}");
        reached
    }

    // Half a CPU: a group that was made and not limited would have a whole one.
    fn assert_limited(&self, uid: &str) {
        let group = format!("burstable/pod{uid}");
        let cpu = crate::cleaning::cpu(&self.sim, &group);
        assert!(matches!(cpu, Some(512 | 20)), "{uid}: {cpu:?}, cut at {:?}", self.sim.cuts().last());
    }

    async fn gone(&self, name: &str, uid: &str) {
        self.sim.wait_gone(name).await;
        self.sim.wait_nothing_left(uid).await;
        until("no cgroup, mount, log or link left", LONG, async || {
            let mut left = Vec::new();
            let groups = crate::cleaning::groups(&self.sim, &format!("burstable/pod{uid}"));
            left.extend(groups.iter().filter(|g| g.exists()).map(|g| g.display().to_string()));
            let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
            left.extend(mounts.lines().filter(|l| l.contains(uid)).map(str::to_owned));
            for dir in [self.sim.pod_logs_dir(), self.sim.root_dir().with_file_name("container-logs")] {
                let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
                let names = entries.filter_map(|e| e.file_name().into_string().ok());
                left.extend(names.filter(|n| n.contains(uid) || n.starts_with(&format!("{name}_"))));
            }
            if left.is_empty() { Ok(()) } else { Err(left) }
        })
        .await;
    }
}

impl Scene {
    /// The removal of what is left of a pod that nobody knows, with pod-sync killed at the `times`-th change of a file.
    async fn orphan_killed_at(&self, when: When, times: u64) -> bool {
        let sim = &self.sim;
        let name = format!("o{times}");
        let uid = sim.create(pod(&name));
        sim.wait_ready(&name).await;
        sim.kill(Service::PodSync).await;
        sim.delete(&name, Some(0));
        let ids = |r: &FakeRuntime| {
            let containers = r.containers().into_iter().map(|c| c.id().to_owned()).collect::<Vec<_>>();
            [containers, r.sandboxes().into_iter().map(|s| s.id().to_owned()).collect()].concat()
        };
        ids(&sim.runtime).iter().for_each(|id| sim.runtime.remove(id));
        std::fs::remove_file(sim.paths().state_dir().join(&uid)).unwrap();
        sim.cuts().arm(seam::Seam::File, when, times);
        sim.up(Service::PodSync);
        let reached = tokio::select! {
            () = sim.cuts().reached() => true,
            () = self.gone(&name, &uid) => false,
        };
        sim.cuts().disarm();
        let reached = reached || sim.cuts().last().is_some();
        if reached {
            self.assert_order(&uid);
            sim.restart(Service::PodSync).await;
        }
        self.gone(&name, &uid).await;
        reached
    }

    // What is left leads to what has to go before it.
    fn assert_order(&self, uid: &str) {
        let dir = self.sim.root_dir().join("pods").join(uid);
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        let volumes = mounts.lines().any(|l| l.contains(uid)) || dir.join("volumes").exists();
        let groups = crate::cleaning::groups(&self.sim, &format!("burstable/pod{uid}"));
        let group = groups.iter().any(|g| g.exists());
        let cut = self.sim.cuts().last();
        assert!(!volumes || group, "volumes are left and no cgroup: {cut:?}");
        assert!(!group || dir.exists(), "a cgroup is left and no directory: {cut:?}");
    }
}

#[allow(clippy::print_stdout, reason = "the number of kills is what the test tells")]
async fn orphans_at_every_step(when: When) {
    let scene = Scene::new(Seam::File(when)).await;
    let (mut n, mut steps) = (0, Vec::new());
    while scene.orphan_killed_at(when, n + 1).await {
        n += 1;
        steps.extend(scene.sim.cuts().last().map(|p| p.step));
        assert!(n < MANY, "the removal never comes to its end: {steps:?}");
    }
    assert!(steps.contains(&"cgroup removed") && steps.contains(&"volume unmounted"), "{steps:?}");
    println!("failpoints: {n} kills {when:?} each change of a file of an orphan's removal {steps:?}");
    scene.sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_removal_of_an_orphan_is_taken_up_again_before_each_of_its_steps() {
    orphans_at_every_step(When::Before).await;
}

/// Kills pod-sync when `seam` is reached before `whole` is over, and starts it again.
async fn race<T>(sim: &Sim, seam: impl Future<Output = ()>, whole: impl Future<Output = T>) -> bool {
    let reached = tokio::select! {
        () = seam => true,
        _ = whole => false,
    };
    sim.cuts().disarm();
    // It may have ended in the very moment in which the whole was over.
    let reached = reached || sim.cuts().last().is_some();
    if reached {
        sim.restart(Service::PodSync).await;
    }
    reached
}

#[allow(clippy::print_stdout, reason = "the number of kills is what the test tells")]
async fn at_every_step(seam: Seam, part: Part) {
    let scene = Scene::new(seam).await;
    let (mut n, mut steps) = (0, Vec::new());
    while scene.killed_at(seam, part, n + 1).await {
        n += 1;
        steps.extend(scene.sim.cuts().last().map(|p| p.step));
        assert!(n < MANY, "a {part:?} never comes to its end: {steps:?}");
    }
    assert!(n > 1, "a {part:?} passes {seam:?}");
    println!("failpoints: {n} kills at seam {seam:?} of a {part:?} {steps:?}");
    scene.sim.finish().await;
}

macro_rules! at_every_step {
    ($($name:ident: $seam:ident $when:ident $part:ident;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            at_every_step(Seam::$seam(When::$when), Part::$part).await;
        }
    )*};
}

at_every_step! {
    a_start_survives_a_kill_before_each_call_of_the_runtime: Call Before Start;
    a_start_survives_a_kill_after_each_call_of_the_runtime: Call After Start;
    a_start_survives_a_kill_before_each_status: Status Before Start;
    a_container_made_anew_survives_a_kill_after_each_call_of_the_runtime: Call After Remake;
    a_container_made_anew_survives_a_kill_before_each_status: Status Before Remake;
    a_container_made_anew_survives_a_kill_after_each_status: Status After Remake;
    a_stop_survives_a_kill_after_each_call_of_the_runtime: Call After Stop;
    a_stop_survives_a_kill_before_each_status: Status Before Stop;
    a_stop_survives_a_kill_after_each_status: Status After Stop;
}
