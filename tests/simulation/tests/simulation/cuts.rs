//! Steps: the pod is added, its actions are computed, work runs on a blocking thread, and the last step.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use quintlet_cri_api::v1;
use quintlet_kit::failpoint::{self, When};
use quintlet_simulation::cuts::CutPoint;
use quintlet_simulation::{LONG, Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{Behaviour, Call, ExecReply, FakeRuntime, Method, Rule};
use quintlet_testkit::wait::until;
use serde_json::json;

/// Calls that change the runtime, and calls that a start waits for.
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
/// Delay between the arrival of a call and its effect, or its effect and the response, so that a kill falls
/// between the two.
const LATENCY: Duration = Duration::from_millis(40);
/// Interval between looks at the calls.
const LOOK: Duration = Duration::from_millis(5);

/// Kind of failpoints that are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// At a runtime call: before its effect, or after it and before the response.
    Call(When),
    /// At a change of a file, a directory, a mount or a cgroup.
    File(When),
    /// At a status report, or its response.
    Status(When),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Start,
    // A container that fails its liveness probe is stopped and restarted.
    Remake,
    Stop,
}

/// The last file change of a deleted pod.
const LAST_STEP: &str = "record removed";

// The command of its hooks and its probe.
const FIRST: &str = "first";
const LAST: &str = "last";
const ALIVE: &str = "alive";

/// Returns how many calls of a kind arrived, or had their effect.
fn calls(runtime: &FakeRuntime, when: When, kind: &str) -> usize {
    let method = STEPS.into_iter().chain([Method::ExecSync]).find(|m| format!("{m:?}") == kind);
    let Some(method) = method else { panic!("{kind} is no call of the runtime") };
    let arrived = runtime.count_calls(|call| call.method == method && is_step(call));
    let in_flight = match when {
        When::Before => 0,
        // Probes in flight make this too small for a moment only.
        When::After => runtime.in_flight(method),
    };
    arrived.saturating_sub(in_flight)
}

// Exec probes are not steps.
fn is_step(call: &Call) -> bool {
    STEPS.contains(&call.method) || (call.method == Method::ExecSync && command(call) != ALIVE)
}

fn steps(calls: &[Call]) -> Vec<String> {
    calls.iter().filter(|call| is_step(call)).map(|call| format!("{:?}", call.method)).collect()
}

fn command(call: &Call) -> String {
    call.request::<v1::ExecSyncRequest>().cmd.concat()
}

/// Failpoints that are reached from now on.
struct Watched<'a> {
    sim: &'a Sim,
    effect: Effect,
    at: Option<CutPoint>,
    // Number of earlier calls.
    before: usize,
    of_kind: usize,
}

impl<'a> Watched<'a> {
    /// Arms a kill at this step; `None` only counts.
    fn new(sim: &'a Sim, effect: Effect, at: Option<&CutPoint>) -> Self {
        let of_kind = match (effect, at) {
            (Effect::Call(when), Some(at)) => calls(&sim.runtime, when, &at.kind),
            (Effect::Call(_) | Effect::File(_) | Effect::Status(_), _) => 0,
        };
        let before = sim.runtime.calls().len();
        match effect {
            Effect::Call(_) => {}
            Effect::File(when) => sim.cuts().arm(failpoint::Kind::File, when, at.cloned()),
            Effect::Status(when) => sim.cuts().arm(failpoint::Kind::Status, when, at.cloned()),
        }
        Self { sim, effect, at: at.cloned(), before, of_kind }
    }

    async fn reached(&self) {
        match (self.effect, &self.at) {
            // The runtime does not change when a call arrives, so it is polled often.
            (Effect::Call(when), Some(at)) => {
                while calls(&self.sim.runtime, when, &at.kind).saturating_sub(self.of_kind) < at.number {
                    tokio::time::sleep(LOOK).await;
                }
            }
            (Effect::Call(_), None) => std::future::pending().await,
            (Effect::File(_) | Effect::Status(_), _) => self.sim.cuts().reached().await,
        }
    }

    /// Disarms the kill. Returns the steps that were passed, and whether pod-sync was killed.
    fn over(&self, reached: bool) -> Passed {
        match self.effect {
            Effect::Call(_) => Passed { reached, steps: steps(&self.sim.runtime.calls()[self.before..]) },
            Effect::File(_) | Effect::Status(_) => {
                let steps = self.sim.cuts().disarm().into_iter().map(str::to_owned).collect();
                // It may have been killed at the moment at which the whole completed.
                Passed { reached: reached || self.sim.cuts().last().is_some(), steps }
            }
        }
    }

    /// Returns whether pod-sync was killed before `whole` completed.
    async fn ends<T>(&self, whole: impl Future<Output = T>, last: Option<&str>) -> Passed {
        let whole = async {
            whole.await;
            // The last step has its effect before it is counted.
            if let (Effect::File(_), Some(last)) = (self.effect, last) {
                let passed =
                    async || if self.sim.cuts().has_passed(last) { Ok(()) } else { Err("it has not") };
                until(&format!("{last} has passed"), LONG, passed).await;
            }
        };
        let reached = tokio::select! {
            () = self.reached() => true,
            () = whole => false,
        };
        self.over(reached)
    }

    /// Kills pod-sync if the failpoint is reached before `whole` completes, and starts it again.
    async fn race<T>(self, whole: impl Future<Output = T>, last: Option<&str>) -> Passed {
        let passed = self.ends(whole, last).await;
        if passed.reached {
            self.sim.restart(Service::PodSync).await;
        }
        passed
    }
}

/// Failpoints that were passed in a part of a run.
#[derive(Debug, Default)]
struct Passed {
    reached: bool,
    steps: Vec<String>,
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

/// A node, and which of its containers fail their liveness probe.
struct Scene {
    sim: Sim,
    sick: Arc<Mutex<Vec<String>>>,
}

impl Scene {
    async fn new(effect: Effect) -> Self {
        let mut sim = Sim::prepare(Options { cuts: true, ..Options::default() }).await;
        let links = sim.root_dir().with_file_name("container-logs");
        sim.set_pod_sync_args(&[&format!("--container-logs-dir={}", links.display())]);
        sim.runtime
            .behave("init", Behaviour { exit: Some((Duration::from_millis(20), 0)), ..Behaviour::default() });
        let sick = Arc::new(Mutex::new(Vec::<String>::new()));
        let sick_containers = Arc::clone(&sick);
        sim.runtime.on_exec(move |id, command| {
            let dead = command == [ALIVE] && sick_containers.lock().iter().any(|sick| sick == id);
            let after = if command == [ALIVE] { Duration::ZERO } else { Duration::from_millis(20) };
            ExecReply { after, exit_code: i32::from(dead), ..ExecReply::default() }
        });
        for method in STEPS.into_iter().chain([Method::ExecSync]) {
            let rule = match effect {
                Effect::Call(When::Before) => Rule::on(method).latency(LATENCY),
                Effect::Call(When::After) => Rule::on(method).answer_latency(LATENCY),
                Effect::File(_) | Effect::Status(_) => continue,
            };
            sim.runtime.script(rule);
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

    // Returns how often the hooks of each instance ran.
    fn hooks(&self) -> BTreeMap<(String, String), usize> {
        let mut ran = BTreeMap::new();
        for call in self.sim.runtime.calls_of(Method::ExecSync).iter().filter(|c| command(c) != ALIVE) {
            *ran.entry((call.subjects[0].clone(), command(call))).or_default() += 1;
        }
        ran
    }

    /// Runs one pod from start to removal; pod-sync is killed at this step of `part`.
    async fn life(&self, name: &str, effect: Effect, part: Part, at: Option<&CutPoint>) -> Passed {
        let sim = &self.sim;
        let mut passed = Passed::default();
        let watched = |now: Part| (now == part).then(|| Watched::new(sim, effect, at));
        let before = self.hooks().len();

        let at = watched(Part::Start);
        let uid = sim.create(pod(name));
        if let Some(at) = at {
            passed = at.race(sim.wait_ready(name), None).await;
        }
        sim.wait_ready(name).await;
        sim.assert_started_once(name, &uid);
        self.assert_limited(&uid);
        let first = sim.runtime.newest(&uid, &format!("c-{name}")).unwrap().id().to_owned();
        let mut instances = vec![first.clone()];

        if part == Part::Remake {
            let at = watched(Part::Remake);
            self.sick.lock().push(first);
            let remade = || sim.wait_pod(name, "recreated", |p| p.is_ready() && p.restarts() == 1);
            if let Some(at) = at {
                passed = at.race(remade(), None).await;
            }
            remade().await;
            instances.push(sim.runtime.newest(&uid, &format!("c-{name}")).unwrap().id().to_owned());
        }

        let made = sim.runtime.count(Method::RunPodSandbox);
        let at = watched(Part::Stop);
        sim.delete(name, None);
        if let Some(at) = at {
            passed = at.race(self.gone(name, &uid), Some(LAST_STEP)).await;
        }
        self.gone(name, &uid).await;
        let cut = &passed;
        assert_eq!(sim.runtime.count(Method::RunPodSandbox), made, "{name}: a pod that ends gets no sandbox");
        let after = self.hooks();
        for id in &instances {
            for hook in [FIRST, LAST] {
                let ran = after.get(&(id.clone(), hook.to_owned()));
                assert_eq!(ran, Some(&1), "{name}: hook {hook} of {id}, pod-sync cut at {cut:?}");
            }
        }
        assert_eq!(after.len(), before + 2 * instances.len(), "{name}: hooks of nothing else");
        let warned = sim.warnings(name);
        assert!(warned.iter().all(|e| e.reason == "Unhealthy"), "{name}, cut at {cut:?}: {warned:?}");
        passed
    }

    // Half a CPU: a cgroup without its limit would have more.
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
    /// Removes an orphaned pod; pod-sync is killed at this file change.
    async fn orphan(&self, name: &str, when: When, at: Option<&CutPoint>) -> Passed {
        let sim = &self.sim;
        let uid = sim.create(pod(name));
        sim.wait_ready(name).await;
        sim.kill(Service::PodSync).await;
        sim.delete(name, Some(0));
        let ids = |r: &FakeRuntime| {
            let containers = r.containers().into_iter().map(|c| c.id().to_owned()).collect::<Vec<_>>();
            [containers, r.sandboxes().into_iter().map(|s| s.id().to_owned()).collect()].concat()
        };
        ids(&sim.runtime).iter().for_each(|id| sim.runtime.remove(id));
        std::fs::remove_file(sim.paths().state_dir().join(&uid)).unwrap();
        let watched = Watched::new(sim, Effect::File(when), at);
        sim.up(Service::PodSync);
        let passed = watched.ends(self.gone(name, &uid), Some(LAST_STEP)).await;
        if passed.reached {
            self.assert_order(&uid);
            sim.restart(Service::PodSync).await;
        }
        self.gone(name, &uid).await;
        passed
    }

    // Files that lead to others are removed last.
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

/// Runs without a kill, one of which must pass all steps.
const WHOLE_RUNS: usize = 3;

/// The part of the steps that one test covers: every `of`-th from this one, counted from 1.
#[derive(Debug, Clone, Copy)]
struct Share {
    first: usize,
    of: usize,
}

/// Runs once without a kill, which must pass all of `must`, and then once for each step of this share.
#[allow(clippy::print_stdout, reason = "the test prints the number of kills")]
async fn enumerate(
    what: &str,
    must: &Must,
    share: Share,
    mut live: impl AsyncFnMut(String, Option<&CutPoint>) -> Passed,
) {
    let mut passes = BTreeMap::<String, usize>::new();
    let mut too_few = Vec::new();
    // A busy machine may join two steps of a kind.
    for attempt in 1..=WHOLE_RUNS {
        passes.clear();
        for kind in live(format!("whole-{attempt}"), None).await.steps {
            *passes.entry(kind).or_default() += 1;
        }
        too_few = must.iter().filter(|(kind, n)| passes.get(*kind).is_none_or(|p| p < n)).collect();
        if too_few.is_empty() {
            break;
        }
    }
    assert!(too_few.is_empty(), "{what} passes too few of {too_few:?}: {passes:?}");
    // Steps beyond the least number depend on timing. They come last, so that all tests share alike.
    let of_kind = |kind: &str, numbers: std::ops::RangeInclusive<usize>| -> Vec<CutPoint> {
        numbers.map(|number| CutPoint { kind: kind.to_owned(), number }).collect()
    };
    let owed: Vec<CutPoint> = must.iter().flat_map(|(kind, n)| of_kind(kind, 1..=*n)).collect();
    let least = |kind: &str| must.iter().find(|(k, _)| *k == kind).map_or(0, |(_, n)| *n);
    let more: Vec<CutPoint> =
        passes.iter().flat_map(|(kind, n)| of_kind(kind, least(kind) + 1..=*n)).collect();
    let mine = |all: Vec<CutPoint>| all.into_iter().skip(share.first - 1).step_by(share.of);
    let mut killed = Vec::new();
    for (i, step) in mine(owed.clone()).chain(mine(more)).enumerate() {
        let reached = live(format!("p{i}"), Some(&step)).await.reached;
        assert!(reached || !owed.contains(&step), "{what}: {step:?} was not reached");
        killed.extend(reached.then_some(step));
    }
    assert!(!killed.is_empty(), "{what}: pod-sync was not killed");
    let all: usize = passes.values().sum();
    println!(
        "failpoints: {} kills in {what}, {share:?} of its {all} steps {passes:?}: {killed:?}",
        killed.len()
    );
}

async fn at_every_step(effect: Effect, part: Part, must: &Must, share: Share) {
    let scene = Scene::new(effect).await;
    let what = format!("a {part:?} at {effect:?}");
    enumerate(&what, must, share, async |name, at| scene.life(&name, effect, part, at).await).await;
    scene.sim.finish().await;
}

async fn orphans_at_every_step(when: When, share: Share) {
    let scene = Scene::new(Effect::File(when)).await;
    let what = format!("the removal of an orphan at File({when:?})");
    enumerate(&what, &FILES_OF_AN_ORPHAN, share, async |name, at| scene.orphan(&name, when, at).await).await;
    scene.sim.finish().await;
}

/// Steps that a run must have, with their least numbers.
type Must = [(&'static str, usize)];

const CALLS_OF_A_START: [(&str, usize); 4] =
    [("RunPodSandbox", 1), ("CreateContainer", 2), ("StartContainer", 2), ("ExecSync", 1)];
const FILES_OF_A_START: [(&str, usize); 17] = [
    ("file replaced", 9),
    ("cgroup made", 1),
    ("cgroup limited", 1),
    ("pod directory made", 3),
    ("volume directory made", 3),
    ("volume mounted", 1),
    ("volume marked ready", 2),
    ("version made", 1),
    ("version written", 2),
    ("version switched to", 1),
    ("file of a version linked", 2),
    ("sub path bound", 1),
    ("log directory made", 1),
    ("container's log directory made", 2),
    ("log linked", 2),
    ("hosts file written", 2),
    ("termination log made", 2),
];
const STATUSES_OF_A_START: [(&str, usize); 3] =
    [("status handed over", 2), ("status sent", 2), ("status acked", 1)];
const CALLS_OF_A_REMAKE: [(&str, usize); 4] =
    [("ExecSync", 2), ("StopContainer", 1), ("CreateContainer", 1), ("StartContainer", 1)];
const FILES_OF_A_REMAKE: [(&str, usize); 6] = [
    ("file replaced", 4),
    ("pod directory made", 2),
    ("hosts file written", 1),
    ("termination log made", 1),
    ("container's log directory made", 1),
    ("log linked", 1),
];
const STATUSES_OF_A_REMAKE: [(&str, usize); 2] = [("status handed over", 1), ("status sent", 1)];
const CALLS_OF_A_STOP: [(&str, usize); 4] =
    [("ExecSync", 1), ("StopContainer", 1), ("StopPodSandbox", 1), ("RemoveContainer", 2)];
// A cgroup is removed once per hierarchy.
const FILES_OF_A_STOP: [(&str, usize); 8] = [
    ("file replaced", 3),
    ("volume unmounted", 2),
    ("mount point removed", 2),
    ("tree removed", 12),
    ("cgroup removed", 1),
    ("log link removed", 1),
    ("logs removed", 1),
    ("record removed", 1),
];
const STATUSES_OF_A_STOP: [(&str, usize); 3] =
    [("status handed over", 2), ("status sent", 2), ("status acked", 2)];
const FILES_OF_AN_ORPHAN: [(&str, usize); 5] = [
    ("volume unmounted", 2),
    ("mount point removed", 2),
    ("tree removed", 12),
    ("cgroup removed", 1),
    ("record removed", 1),
];

macro_rules! shares {
    (@run [$run:ident, $($arg:expr),*], $share:expr) => {
        $run($($arg),*, $share).await
    };
    (@each $call:tt $($name:ident $first:literal of $of:literal),*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            shares!(@run $call, Share { first: $first, of: $of });
        }
    )*};
    ($run:ident($($arg:expr),*); $($shares:tt)*) => {
        shares!(@each [$run, $($arg),*] $($shares)*);
    };
}

macro_rules! at_every_step {
    ($($name:ident: $effect:ident $when:ident $part:ident $must:ident [$($shares:tt)*];)*) => {$(
        mod $name {
            use super::*;
            shares!(at_every_step(Effect::$effect(When::$when), Part::$part, &$must); $($shares)*);
        }
    )*};
}

at_every_step! {
    a_start_survives_a_kill_before_each_call_of_the_runtime:
        Call Before Start CALLS_OF_A_START [all 1 of 1];
    a_start_survives_a_kill_after_each_call_of_the_runtime:
        Call After Start CALLS_OF_A_START [all 1 of 1];
    a_start_survives_a_kill_before_each_change_of_a_file:
        File Before Start FILES_OF_A_START [first 1 of 2, second 2 of 2];
    a_start_survives_a_kill_after_each_change_of_a_file:
        File After Start FILES_OF_A_START [first 1 of 2, second 2 of 2];
    a_start_survives_a_kill_before_each_status:
        Status Before Start STATUSES_OF_A_START [all 1 of 1];
    a_start_survives_a_kill_after_each_status:
        Status After Start STATUSES_OF_A_START [all 1 of 1];
    a_container_made_anew_survives_a_kill_before_each_call_of_the_runtime:
        Call Before Remake CALLS_OF_A_REMAKE [all 1 of 1];
    a_container_made_anew_survives_a_kill_after_each_call_of_the_runtime:
        Call After Remake CALLS_OF_A_REMAKE [all 1 of 1];
    a_container_made_anew_survives_a_kill_before_each_change_of_a_file:
        File Before Remake FILES_OF_A_REMAKE [all 1 of 1];
    a_container_made_anew_survives_a_kill_after_each_change_of_a_file:
        File After Remake FILES_OF_A_REMAKE [all 1 of 1];
    a_container_made_anew_survives_a_kill_before_each_status:
        Status Before Remake STATUSES_OF_A_REMAKE [all 1 of 1];
    a_container_made_anew_survives_a_kill_after_each_status:
        Status After Remake STATUSES_OF_A_REMAKE [all 1 of 1];
    a_stop_survives_a_kill_before_each_call_of_the_runtime:
        Call Before Stop CALLS_OF_A_STOP [all 1 of 1];
    a_stop_survives_a_kill_after_each_call_of_the_runtime:
        Call After Stop CALLS_OF_A_STOP [all 1 of 1];
    a_stop_survives_a_kill_before_each_change_of_a_file:
        File Before Stop FILES_OF_A_STOP [first 1 of 2, second 2 of 2];
    a_stop_survives_a_kill_after_each_change_of_a_file:
        File After Stop FILES_OF_A_STOP [first 1 of 2, second 2 of 2];
    a_stop_survives_a_kill_before_each_status:
        Status Before Stop STATUSES_OF_A_STOP [all 1 of 1];
    a_stop_survives_a_kill_after_each_status:
        Status After Stop STATUSES_OF_A_STOP [all 1 of 1];
}

mod the_removal_of_an_orphan_is_taken_up_again_before_each_of_its_steps {
    use super::*;
    shares!(orphans_at_every_step(When::Before); first 1 of 2, second 2 of 2);
}

mod the_removal_of_an_orphan_is_taken_up_again_after_each_of_its_steps {
    use super::*;
    shares!(orphans_at_every_step(When::After); first 1 of 2, second 2 of 2);
}
