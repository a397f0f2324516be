//! pod-sync ended before and after each step: calls of the runtime, changes of files and statuses, of a start, of a container made
//! anew, of a stop, and of the removal of an orphan.
//!
//! The steps are not listed: each seam counts what passes it, the n-th passing ends pod-sync, and n grows until a whole life passes
//! without reaching it. Where a life has many steps, several tests share them. A life that is not disturbed comes first, and says
//! what there is to pass: a seam that nobody passes any more, or that some step has left, fails the test.

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

/// How many calls have come, or, on the other side, have done what they were for.
fn calls(runtime: &FakeRuntime, when: When) -> u64 {
    let counts = runtime.counts();
    let calls: u64 = STEPS.iter().map(|m| counts.get(m).copied().unwrap_or(0)).sum();
    let hooks = runtime.calls_of(Method::ExecSync).iter().filter(|c| command(c) != ALIVE).count();
    let in_flight: usize = match when {
        When::Before => 0,
        // A probe in flight makes this too small for a moment only.
        When::After => STEPS.iter().chain([&Method::ExecSync]).map(|m| runtime.in_flight(*m)).sum(),
    };
    (calls + hooks as u64).saturating_sub(in_flight as u64)
}

fn command(call: &Call) -> String {
    call.request::<v1::ExecSyncRequest>().cmd.concat()
}

/// What passes a seam from now on.
struct Watched<'a> {
    sim: &'a Sim,
    seam: Seam,
    from: u64,
    calls: usize,
    times: Option<u64>,
}

impl<'a> Watched<'a> {
    /// pod-sync ends at the `times`-th passing; nowhere without.
    fn new(sim: &'a Sim, seam: Seam, times: Option<u64>) -> Self {
        let from = match seam {
            Seam::Call(when) => calls(&sim.runtime, when),
            Seam::File(_) | Seam::Status(_) => 0,
        };
        let all = match seam {
            Seam::Call(_) => sim.runtime.calls().len(),
            Seam::File(when) => arm(sim, seam::Seam::File, when, times),
            Seam::Status(when) => arm(sim, seam::Seam::Status, when, times),
        };
        Self { sim, seam, from, calls: all, times }
    }

    async fn reached(&self) {
        match (self.seam, self.times) {
            // Nothing of the runtime changes when a call comes, so it is asked often.
            (Seam::Call(when), Some(times)) => {
                while calls(&self.sim.runtime, when).saturating_sub(self.from) < times {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            (Seam::Call(_), None) => std::future::pending().await,
            (Seam::File(_) | Seam::Status(_), _) => self.sim.cuts().reached().await,
        }
    }

    /// Nothing ends pod-sync any more; what has passed, and whether it was ended at the last of it.
    fn over(&self, reached: bool) -> Passed {
        match self.seam {
            Seam::Call(_) => {
                let is_step = |c: &&Call| {
                    STEPS.contains(&c.method) || (c.method == Method::ExecSync && command(c) != ALIVE)
                };
                let calls = self.sim.runtime.calls();
                let steps = calls[self.calls..].iter().filter(is_step);
                Passed { reached, steps: steps.map(|c| format!("{:?}", c.method)).collect() }
            }
            Seam::File(_) | Seam::Status(_) => {
                let steps = self.sim.cuts().disarm().into_iter().map(str::to_owned).collect();
                // It may have ended in the very moment in which the whole was over.
                Passed { reached: reached || self.sim.cuts().last().is_some(), steps }
            }
        }
    }

    /// Kills pod-sync when the seam is reached before `whole` is over, and starts it again.
    async fn race<T>(self, whole: impl Future<Output = T>) -> Passed {
        let reached = tokio::select! {
            () = self.reached() => true,
            _ = whole => false,
        };
        let passed = self.over(reached);
        if passed.reached {
            self.sim.restart(Service::PodSync).await;
        }
        passed
    }
}

fn arm(sim: &Sim, seam: seam::Seam, when: When, times: Option<u64>) -> usize {
    match times {
        Some(times) => sim.cuts().arm(seam, when, times),
        None => sim.cuts().count(seam, when),
    }
    0
}

/// What passed a seam in a part of a life.
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

    /// One life of a pod; pod-sync is killed at the `times`-th passing within `part`, where it passes so often.
    async fn life(&self, name: &str, seam: Seam, part: Part, times: Option<u64>) -> Passed {
        let sim = &self.sim;
        let mut passed = Passed::default();
        let watched = |now: Part| (now == part).then(|| Watched::new(sim, seam, times));
        let before = self.hooks().len();

        let at = watched(Part::Start);
        let uid = sim.create(pod(name));
        if let Some(at) = at {
            passed = at.race(sim.wait_ready(name)).await;
        }
        sim.wait_ready(name).await;
        sim.assert_started_once(name, &uid);
        self.assert_limited(&uid);
        let first = sim.runtime.newest(&uid, &format!("c-{name}")).unwrap().id().to_owned();
        let mut instances = vec![first.clone()];

        if part == Part::Remake {
            let at = watched(Part::Remake);
            self.sick.lock().push(first);
            let remade = || sim.wait_pod(name, "made anew", |p| p.is_ready() && p.restarts() == 1);
            if let Some(at) = at {
                passed = at.race(remade()).await;
            }
            remade().await;
            instances.push(sim.runtime.newest(&uid, &format!("c-{name}")).unwrap().id().to_owned());
        }

        let made = sim.runtime.count(Method::RunPodSandbox);
        let at = watched(Part::Stop);
        sim.delete(name, None);
        if let Some(at) = at {
            passed = at.race(self.gone(name, &uid)).await;
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
    async fn orphan(&self, name: &str, when: When, times: Option<u64>) -> Passed {
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
        let watched = Watched::new(sim, Seam::File(when), times);
        sim.up(Service::PodSync);
        let reached = tokio::select! {
            () = watched.reached() => true,
            () = self.gone(name, &uid) => false,
        };
        let passed = watched.over(reached);
        if passed.reached {
            self.assert_order(&uid);
            sim.restart(Service::PodSync).await;
        }
        self.gone(name, &uid).await;
        passed
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

/// The steps of one test among those that share them: every `of`-th from this one, counted from 1.
#[derive(Debug, Clone, Copy)]
struct Share {
    first: u64,
    of: u64,
}

/// Lives one life without a kill, which has to pass all of `must`, and then one for each step of this share.
#[allow(clippy::print_stdout, reason = "the number of kills is what the test tells")]
async fn enumerate(
    what: &str,
    must: &Must,
    share: Share,
    mut live: impl AsyncFnMut(String, Option<u64>) -> Passed,
) {
    let whole = live("whole".to_owned(), None).await.steps;
    let passes = |step: &str| whole.iter().filter(|s| *s == step).count();
    let missing: Vec<_> = must.iter().filter(|(step, times)| passes(step) < *times).collect();
    assert!(missing.is_empty(), "{what}: too little passes of {missing:?}: {whole:?}");
    let (mut n, mut cut) = (share.first, Vec::new());
    loop {
        let mut passed = live(format!("p{n}"), Some(n)).await;
        if !passed.reached {
            break;
        }
        cut.extend(passed.steps.pop());
        n += share.of;
        assert!(n < MANY, "{what} never comes to its end: {cut:?}");
    }
    println!(
        "failpoints: {} kills of {share:?}, {what}, {} steps when nobody is killed: {cut:?}",
        cut.len(),
        whole.len()
    );
    // How many steps there are depends on what comes together; no life has less than these.
    let least: usize = must.iter().map(|(_, times)| times).sum();
    assert!(n > least as u64, "{what}: only {n} steps were reached, there must be {least}");
}

async fn at_every_step(seam: Seam, part: Part, must: &Must, share: Share) {
    let scene = Scene::new(seam).await;
    let what = format!("a {part:?} at {seam:?}");
    enumerate(&what, must, share, async |name, times| scene.life(&name, seam, part, times).await).await;
    scene.sim.finish().await;
}

async fn orphans_at_every_step(when: When, share: Share) {
    let scene = Scene::new(Seam::File(when)).await;
    let what = format!("the removal of an orphan at File({when:?})");
    enumerate(&what, &FILES_OF_AN_ORPHAN, share, async |name, times| scene.orphan(&name, when, times).await)
        .await;
    scene.sim.finish().await;
}

/// Steps that a life must have, and how often at least.
type Must = [(&'static str, usize)];

const CALLS_OF_A_START: [(&str, usize); 4] =
    [("RunPodSandbox", 1), ("CreateContainer", 2), ("StartContainer", 2), ("ExecSync", 1)];
const FILES_OF_A_START: [(&str, usize); 17] = [
    ("file replaced", 9),
    ("cgroup made", 1),
    ("cgroup limited", 1),
    ("pod directory made", 5),
    ("volume directory made", 3),
    ("volume mounted", 1),
    ("volume marked ready", 3),
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
    ("file replaced", 5),
    ("volume unmounted", 2),
    ("mount point removed", 3),
    ("tree removed", 15),
    ("cgroup removed", 1),
    ("log link removed", 2),
    ("logs removed", 1),
    ("record removed", 1),
];
const STATUSES_OF_A_STOP: [(&str, usize); 3] =
    [("status handed over", 2), ("status sent", 2), ("status acked", 2)];
const FILES_OF_AN_ORPHAN: [(&str, usize); 5] = [
    ("volume unmounted", 2),
    ("mount point removed", 3),
    ("tree removed", 15),
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
    ($($name:ident: $seam:ident $when:ident $part:ident $must:ident [$($shares:tt)*];)*) => {$(
        mod $name {
            use super::*;
            shares!(at_every_step(Seam::$seam(When::$when), Part::$part, &$must); $($shares)*);
        }
    )*};
}

at_every_step! {
    a_start_survives_a_kill_before_each_call_of_the_runtime:
        Call Before Start CALLS_OF_A_START [first 1 of 2, second 2 of 2];
    a_start_survives_a_kill_after_each_call_of_the_runtime:
        Call After Start CALLS_OF_A_START [first 1 of 2, second 2 of 2];
    a_start_survives_a_kill_before_each_change_of_a_file:
        File Before Start FILES_OF_A_START [first 1 of 4, second 2 of 4, third 3 of 4, fourth 4 of 4];
    a_start_survives_a_kill_after_each_change_of_a_file:
        File After Start FILES_OF_A_START [first 1 of 4, second 2 of 4, third 3 of 4, fourth 4 of 4];
    a_start_survives_a_kill_before_each_status:
        Status Before Start STATUSES_OF_A_START [all 1 of 1];
    a_start_survives_a_kill_after_each_status:
        Status After Start STATUSES_OF_A_START [all 1 of 1];
    a_container_made_anew_survives_a_kill_before_each_call_of_the_runtime:
        Call Before Remake CALLS_OF_A_REMAKE [all 1 of 1];
    a_container_made_anew_survives_a_kill_after_each_call_of_the_runtime:
        Call After Remake CALLS_OF_A_REMAKE [all 1 of 1];
    a_container_made_anew_survives_a_kill_before_each_change_of_a_file:
        File Before Remake FILES_OF_A_REMAKE [first 1 of 2, second 2 of 2];
    a_container_made_anew_survives_a_kill_after_each_change_of_a_file:
        File After Remake FILES_OF_A_REMAKE [first 1 of 2, second 2 of 2];
    a_container_made_anew_survives_a_kill_before_each_status:
        Status Before Remake STATUSES_OF_A_REMAKE [all 1 of 1];
    a_container_made_anew_survives_a_kill_after_each_status:
        Status After Remake STATUSES_OF_A_REMAKE [all 1 of 1];
    a_stop_survives_a_kill_before_each_call_of_the_runtime:
        Call Before Stop CALLS_OF_A_STOP [first 1 of 2, second 2 of 2];
    a_stop_survives_a_kill_after_each_call_of_the_runtime:
        Call After Stop CALLS_OF_A_STOP [first 1 of 2, second 2 of 2];
    a_stop_survives_a_kill_before_each_change_of_a_file:
        File Before Stop FILES_OF_A_STOP [first 1 of 4, second 2 of 4, third 3 of 4, fourth 4 of 4];
    a_stop_survives_a_kill_after_each_change_of_a_file:
        File After Stop FILES_OF_A_STOP [first 1 of 4, second 2 of 4, third 3 of 4, fourth 4 of 4];
    a_stop_survives_a_kill_before_each_status:
        Status Before Stop STATUSES_OF_A_STOP [all 1 of 1];
    a_stop_survives_a_kill_after_each_status:
        Status After Stop STATUSES_OF_A_STOP [all 1 of 1];
}

mod the_removal_of_an_orphan_is_taken_up_again_before_each_of_its_steps {
    use super::*;
    shares!(orphans_at_every_step(When::Before); first 1 of 3, second 2 of 3, third 3 of 3);
}

mod the_removal_of_an_orphan_is_taken_up_again_after_each_of_its_steps {
    use super::*;
    shares!(orphans_at_every_step(When::After); first 1 of 3, second 2 of 3, third 3 of 3);
}
