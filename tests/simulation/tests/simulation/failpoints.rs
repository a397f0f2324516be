//! pod-sync killed at every step of a start and of a stop.
//!
//! The steps are not listed: a seam counts what passes it (calls that change the runtime, changes of pod-sync's files,
//! status writes), the n-th passing kills pod-sync, and n grows until a whole start or stop passes without reaching it.

use std::time::Duration;

use k8s_cri::v1;
use notify::Watcher as _;
use quintlet_simulation::{Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{Behaviour, ExecReply, FakeRuntime, Method, Rule};
use serde_json::json;
use tokio::sync::watch;

/// What changes the runtime, and what a start waits for beside that.
const STEPS: [Method; 9] = [
    Method::RunPodSandbox,
    Method::PodSandboxStatus,
    Method::PullImage,
    Method::CreateContainer,
    Method::StartContainer,
    Method::ExecSync,
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
    /// A call came to the runtime and did nothing yet.
    CallCame,
    /// A call did what it was for, and its answer is on its way.
    CallWorked,
    /// pod-sync made, renamed or removed a file or directory of its own.
    File,
    /// A status came to the API server.
    Status,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Start,
    // A container that is not alive is stopped and made anew.
    Remake,
    Stop,
}

fn calls(runtime: &FakeRuntime) -> u64 {
    let counts = runtime.counts();
    STEPS.iter().map(|m| counts.get(m).copied().unwrap_or(0)).sum()
}

fn in_flight(runtime: &FakeRuntime) -> usize {
    STEPS.iter().map(|m| runtime.in_flight(*m)).sum()
}

/// Counts the changes of files under pod-sync's root and its state.
struct Files {
    count: watch::Sender<u64>,
    _watcher: notify::RecommendedWatcher,
}

impl Files {
    fn of(sim: &Sim) -> Self {
        let count = watch::Sender::new(0);
        let seen = count.clone();
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            let changes = |e: &notify::Event| {
                e.kind.is_create()
                    || e.kind.is_remove()
                    || matches!(e.kind, notify::EventKind::Modify(notify::event::ModifyKind::Name(_)))
            };
            if event.is_ok_and(|e| changes(&e)) {
                seen.send_modify(|n| *n += 1);
            }
        })
        .unwrap();
        for dir in [sim.root_dir(), sim.paths().state_dir()] {
            std::fs::create_dir_all(&dir).unwrap();
            watcher.watch(&dir, notify::RecursiveMode::Recursive).unwrap();
        }
        Self { count, _watcher: watcher }
    }
}

/// Returns when the seam was passed so many times more.
async fn passed(sim: &Sim, files: &Files, seam: Seam, times: u64) {
    match seam {
        Seam::CallCame | Seam::CallWorked => {
            let from = calls(&sim.runtime);
            // Nothing of the runtime changes when a call comes, so it is asked often.
            loop {
                let came = calls(&sim.runtime) - from;
                let worked = came.saturating_sub(in_flight(&sim.runtime) as u64);
                if if seam == Seam::CallCame { came } else { worked } >= times {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        Seam::File => {
            let mut count = files.count.subscribe();
            let from = *count.borrow();
            let _ = count.wait_for(|n| *n >= from + times).await;
        }
        Seam::Status => {
            let which = "patch pods/status";
            let from = sim.api.counts().of(which);
            sim.api.wait_for_requests(which, from + times, Duration::from_secs(3600)).await;
        }
    }
}

fn pod(name: &str) -> serde_json::Value {
    let mut pod = pods::single(name);
    pod["spec"]["initContainers"] = json!([pods::container("init")]);
    pod["spec"]["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
    let main = &mut pod["spec"]["containers"][0];
    main["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    main["lifecycle"] = json!({
        "postStart": {"exec": {"command": ["first"]}},
        "preStop": {"exec": {"command": ["last"]}},
    });
    pod
}

fn execs(sim: &Sim, word: &str) -> usize {
    let calls = sim.runtime.calls_of(Method::ExecSync);
    calls.iter().filter(|c| c.request::<v1::ExecSyncRequest>().cmd == [word]).count()
}

/// One start and one stop; pod-sync is killed at the `times`-th passing within `part`. False: it passed less often.
async fn killed_at(sim: &Sim, files: &Files, seam: Seam, part: Part, times: u64) -> bool {
    let name = format!("p{times}");
    let hooks = || (execs(sim, "first"), execs(sim, "last"));
    let before = hooks();
    let mut reached = false;
    let uid = sim.create(pod(&name));
    if part == Part::Start {
        reached = race(sim, passed(sim, files, seam, times), sim.wait_ready(&name)).await;
    }
    sim.wait_ready(&name).await;
    sim.assert_started_once(&name, &uid);
    let mut instances = 1;
    if part == Part::Remake {
        instances = 2;
        let image = |p: &mut serde_json::Value| {
            p["spec"]["containers"][0]["image"] = json!("example.test/app:2");
        };
        sim.api.edit("pods", "default", &name, image).unwrap();
        let remade = || sim.wait_pod(&name, "made anew", |p| p.is_ready() && p.restarts() == 1);
        reached = race(sim, passed(sim, files, seam, times), remade()).await;
        remade().await;
        assert!(execs(sim, "last") <= before.1 + 1, "{name}: the hook of what was stopped ran twice");
    }
    let made = sim.runtime.count(Method::RunPodSandbox);
    sim.delete(&name, None);
    if part == Part::Stop {
        reached = race(sim, passed(sim, files, seam, times), assert_gone(sim, &name, &uid)).await;
    }
    assert_gone(sim, &name, &uid).await;
    assert_eq!(sim.runtime.count(Method::RunPodSandbox), made, "{name}: a pod that ends gets no sandbox");
    let after = hooks();
    assert!(after.0 <= before.0 + instances, "{name}: a postStart hook ran twice");
    assert!(after.1 <= before.1 + instances, "{name}: a preStop hook ran twice");
    assert_eq!(sim.warnings(&name), [], "{name}");
    reached
}

async fn assert_gone(sim: &Sim, name: &str, uid: &str) {
    sim.wait_gone(name).await;
    sim.wait_nothing_left(uid).await;
}

/// Kills pod-sync when `seam` is reached before `whole` is over, and starts it again.
async fn race<T>(sim: &Sim, seam: impl Future<Output = ()>, whole: impl Future<Output = T>) -> bool {
    let reached = tokio::select! {
        () = seam => true,
        _ = whole => false,
    };
    if reached {
        sim.restart(Service::PodSync).await;
    }
    reached
}

#[allow(clippy::print_stdout, reason = "the number of kills is what the test tells")]
async fn at_every_step(seam: Seam, part: Part) {
    let sim = Sim::start(Options::default()).await;
    sim.runtime
        .behave("init", Behaviour { exit: Some((Duration::from_millis(20), 0)), ..Behaviour::default() });
    sim.runtime.on_exec(|_, _| ExecReply { after: Duration::from_millis(20), ..ExecReply::default() });
    if seam == Seam::CallCame {
        for method in STEPS {
            sim.runtime.script(Rule::on(method).latency(BEFORE));
        }
    }
    if seam == Seam::Status {
        sim.api.faults().latency("patch pods/status", BEFORE);
    }
    let files = Files::of(&sim);
    let mut n = 0;
    for times in 1..=MANY {
        if !killed_at(&sim, &files, seam, part, times).await {
            break;
        }
        n = times;
    }
    assert!((1..MANY).contains(&n), "{n} steps");
    println!("failpoints: {n} kills at seam {seam:?} of a {part:?}");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_survives_a_kill_before_each_call_of_the_runtime() {
    at_every_step(Seam::CallCame, Part::Start).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_survives_a_kill_after_each_call_of_the_runtime() {
    at_every_step(Seam::CallWorked, Part::Start).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_made_anew_survives_a_kill_before_each_call_of_the_runtime() {
    at_every_step(Seam::CallCame, Part::Remake).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_made_anew_survives_a_kill_after_each_call_of_the_runtime() {
    at_every_step(Seam::CallWorked, Part::Remake).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_made_anew_survives_a_kill_at_each_change_of_a_file() {
    at_every_step(Seam::File, Part::Remake).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_survives_a_kill_before_each_call_of_the_runtime() {
    at_every_step(Seam::CallCame, Part::Stop).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_survives_a_kill_after_each_call_of_the_runtime() {
    at_every_step(Seam::CallWorked, Part::Stop).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_survives_a_kill_at_each_change_of_a_file() {
    at_every_step(Seam::File, Part::Start).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_survives_a_kill_at_each_change_of_a_file() {
    at_every_step(Seam::File, Part::Stop).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_survives_a_kill_at_each_status() {
    at_every_step(Seam::Status, Part::Start).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_survives_a_kill_at_each_status() {
    at_every_step(Seam::Status, Part::Stop).await;
}
