//! Random sequences of actions of users, containers, the runtime and supervisors. Then all faults end and the
//! pods are checked.

mod calm;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use futures::StreamExt as _;
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use quintlet_cri_api::v1::ContainerState;
use quintlet_simulation::LONG;
use quintlet_simulation::rules::{Rules, probe};
use quintlet_simulation::watch::actions_on;
use quintlet_simulation::{Options, Seen, Service, Sim, pods};
use quintlet_testapi::Failure;
use quintlet_testkit::fake_runtime::{Behaviour, ContainerRecord, ContainerSeed, FakeRuntime, Method, Rule};
use quintlet_testkit::wait::until;
use serde_json::json;
use tokio::task::LocalSet;
use tonic::Code;

/// Number of sequences, unless `QSIM_CASES` is set. `make histories` runs thousands.
const CASES: usize = 60;
/// One sequence of [`Family::Calm`] runs for so many of [`Family::Faults`].
const CALM_SHARE: usize = 10;
/// Concurrent nodes, unless `QSIM_AT_ONCE` is set: sequences wait for back-offs and grace periods for a part
/// of the time. On a busy machine they take so long that their limits pass.
const AT_ONCE: usize = 8;
/// Limit of the time until status-reporter has received the status of a container that exited.
const UNWRITTEN: Duration = Duration::from_secs(5);
/// Limit of the time until a container that exited is replaced: its back-off is a second at most.
const REPLACED: Duration = Duration::from_millis(1_500);
/// Limit of the time until a pod is Ready, with the initial delays of its probes.
const READY: Duration = Duration::from_secs(8);
/// Time in which probes that fail at the end of a sequence go on to fail: containers are replaced for them.
const FAILING: Duration = Duration::from_secs(3);
/// Number of pod names in a sequence of [`Family::Faults`].
const PODS: usize = 4;
/// Number of pod names in any sequence.
const ALL_PODS: usize = 7;
/// Pods with probes.
const PROBED: [usize; 2] = [1, 3];
const PROBES: [&str; 3] = ["startup", "readiness", "liveness"];
/// Length of a sequence.
const LENGTH: Range<usize> = 4..24;
/// Sequences that a search for a planted bug runs at most.
const MOST_SEQUENCES: u32 = 2_000;
/// Planted bugs, the family of sequences that has their actions, a sequence that finds the bug, and a part of
/// its failure. Whether a sequence finds one of the others depends on the time that the machine takes.
/// tests/simulation/planted.rs finds all bugs.
const PLANTED: [(&str, Family, Option<u32>, &str); 11] = [
    ("liveness before startup", Family::Faults, None, "before its startup probe passed"),
    ("ready before its own probe", Family::Faults, None, "its probe began to pass"),
    ("init skipped after a reboot", Family::Faults, Some(1968), "has not succeeded"),
    ("sidecar's startup is forgotten", Family::Faults, None, ""),
    ("ready without a prober", Family::Faults, None, ""),
    ("rejected pods counted", Family::Faults, Some(54), "Pod was rejected"),
    ("status of a former mirror pod", Family::Faults, Some(18), "mirror pod: "),
    ("readiness frozen in termination", Family::Calm, Some(40), "its readiness probe fails, it is Ready"),
    ("event in each sync", Family::Calm, Some(69), "which is at rest"),
    ("failed publish removes the mount", Family::Calm, Some(8), "of a running container does not exist"),
    (
        "observation waits for a tick",
        Family::Calm,
        Some(57),
        "is not deleted after its containers have ended",
    ),
];

/// Name of the manifest, and of its pod in the API server.
const STATIC: &str = "static";
const MIRROR: &str = "static-sim-node";

/// Kinds of sequences. A number means another sequence in each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    /// Faults follow one another until the end.
    Faults,
    /// Faults end within the sequence, too: `calm`.
    Calm,
}

#[derive(Debug, Clone)]
enum Action {
    Create(usize, Policy),
    Label(usize, u32),
    Image(usize, u32),
    Delete(usize, i64),
    Exit(usize, i32),
    SandboxExit(usize),
    Fault(Method, Fault, u32),
    LoseHints(u64),
    CutHints,
    // The containers of a pod exit, and the stream of events ends before it has delivered that.
    ExitWithHints(usize, i32),
    // The containers of a pod exit while cri-proxy, which forwards events, does not run.
    ExitWithProxy(usize, i32),
    // The containers of a pod exit, and status-reporter is killed before it has written that.
    ExitWithReporter(usize, i32),
    // The containers of a pod that may be Ready exit and are replaced while no status can be written, and
    // pod-sync is restarted before that ends.
    ExitWithOutage(usize, i32),
    RuntimeRestart,
    ApiFault(&'static str, usize),
    ApiRestart(u64),
    DoubleHints(bool),
    // A kind of probe of a pod begins to fail or to pass.
    Probe(&'static str, usize, bool),
    // pod-sync is restarted while the readiness probe of a pod fails.
    RestartUnready(usize),
    // The sandbox of a pod ends while a container is created and not started. That container stays as it is.
    SandboxLoss(usize),
    // A pod that no node has room for.
    TooLarge,
    Manifest,
    DeleteMirror(i64),
    Restart(Service),
    Pause(u64),
    // All faults end, and all pods become as they should be.
    Rest,
    // The driver of a pod's volume loses its mount and refuses NodePublishVolume for a time.
    RefusePublish(u64),
    // A pod that may be Ready is deleted, and its readiness probe fails from then on.
    DeleteUnready(i64),
}

#[derive(Debug, Clone, Copy)]
enum Policy {
    Always,
    OnFailure,
    Never,
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    Refused,
    CutBefore,
    CutAfter,
    Slow,
}

fn action() -> impl Strategy<Value = Action> {
    let pod = 0..PODS;
    let policy = prop_oneof![Just(Policy::Always), Just(Policy::OnFailure), Just(Policy::Never)];
    let method = prop::sample::select(vec![
        Method::RunPodSandbox,
        Method::StopPodSandbox,
        Method::RemovePodSandbox,
        Method::CreateContainer,
        Method::StartContainer,
        Method::StopContainer,
        Method::RemoveContainer,
        Method::PullImage,
        Method::ContainerStatus,
        Method::PodSandboxStatus,
        Method::ListContainers,
    ]);
    let fault = prop::sample::select(vec![Fault::Refused, Fault::CutBefore, Fault::CutAfter, Fault::Slow]);
    prop_oneof![
        6 => (pod.clone(), policy).prop_map(|(p, policy)| Action::Create(p, policy)),
        1 => (pod.clone(), any::<u32>()).prop_map(|(p, n)| Action::Label(p, n)),
        1 => (pod.clone(), 0..3u32).prop_map(|(p, n)| Action::Image(p, n)),
        2 => (pod.clone(), 1..3i64).prop_map(|(p, grace)| Action::Delete(p, grace)),
        2 => (pod.clone(), 0..2).prop_map(|(p, code)| Action::Exit(p, code)),
        1 => pod.clone().prop_map(Action::SandboxExit),
        4 => (method, fault, 1..3u32).prop_map(|(m, f, n)| Action::Fault(m, f, n)),
        1 => (1..20u64).prop_map(Action::LoseHints),
        1 => Just(Action::CutHints),
        1 => (pod.clone(), 0..2).prop_map(|(p, code)| Action::ExitWithHints(p, code)),
        1 => (pod.clone(), 0..2).prop_map(|(p, code)| Action::ExitWithProxy(p, code)),
        1 => (pod.clone(), 0..2).prop_map(|(p, code)| Action::ExitWithReporter(p, code)),
        1 => (pod.clone(), 0..2).prop_map(|(p, code)| Action::ExitWithOutage(p, code)),
        1 => Just(Action::RuntimeRestart),
        1 => (prop::sample::select(vec!["patch pods/status", "delete pods", "list *", "watch *", "* *"]), 1..4usize)
            .prop_map(|(r, n)| Action::ApiFault(r, n)),
        1 => (0..300u64).prop_map(Action::ApiRestart),
        1 => any::<bool>().prop_map(Action::DoubleHints),
        4 => (prop::sample::select(PROBES.to_vec()), prop::sample::select(PROBED.to_vec()), any::<bool>())
            .prop_map(|(kind, p, fails)| Action::Probe(kind, p, fails)),
        1 => prop::sample::select(PROBED.to_vec()).prop_map(Action::RestartUnready),
        1 => pod.prop_map(Action::SandboxLoss),
        1 => Just(Action::TooLarge),
        1 => Just(Action::Manifest),
        1 => (1..3i64).prop_map(Action::DeleteMirror),
        3 => prop::sample::select(Service::ALL.to_vec()).prop_map(Action::Restart),
        4 => (0..400u64).prop_map(Action::Pause),
        2 => (1_000..3_000u64).prop_map(Action::Pause),
    ]
}

fn name(pod: usize) -> String {
    format!("p{pod}")
}

fn uid(sim: &Sim, pod: usize) -> String {
    sim.pod(&name(pod)).uid().to_owned()
}

/// Ends the containers of a pod.
fn exit(sim: &Sim, pod: usize, code: i32) {
    for prefix in ["c", "d"] {
        if let Some(c) = sim.runtime.newest(&uid(sim, pod), &format!("{prefix}-{}", name(pod))) {
            sim.runtime.exit(c.id(), code);
        }
    }
}

/// Waits until a pod is as wanted, unless it does not exist. It may never be.
async fn may_become(sim: &Sim, pod: usize, wanted: impl Fn(&Seen) -> bool) {
    if !uid(sim, pod).is_empty() {
        let name = name(pod);
        let _never = tokio::time::timeout(READY, sim.wait_pod(&name, "as wanted", wanted)).await;
    }
}

/// Ends the containers of a pod, and waits until the first one has a replacement in this state. A pod may
/// restart nothing.
async fn replace(sim: &Sim, pod: usize, code: i32, state: ContainerState) {
    let (uid, name) = (uid(sim, pod), format!("c-{}", name(pod)));
    let Some(before) = sim.runtime.newest(&uid, &name) else { return };
    exit(sim, pod, code);
    let is_replaced = |runtime: &FakeRuntime| {
        runtime.newest(&uid, &name).is_some_and(|c| c.id() != before.id() && c.status.state() == state)
    };
    let _late = tokio::time::timeout(REPLACED, sim.runtime.wait(is_replaced)).await;
}

/// Adds probes to two of the pods. One has all three in its container, the other one a sidecar that must
/// start first.
fn add_probes(pod: usize, object: &mut serde_json::Value) {
    let name = name(pod);
    match pod {
        1 => {
            for kind in PROBES {
                object["spec"]["containers"][0][format!("{kind}Probe")] = probe(kind, &name);
            }
            object["spec"]["containers"][0]["startupProbe"]["initialDelaySeconds"] = json!(1);
        }
        3 => {
            let mut sidecar = pods::container(&format!("s-{name}"));
            sidecar["restartPolicy"] = json!("Always");
            sidecar["startupProbe"] = probe("startup", &name);
            object["spec"]["initContainers"] = json!([sidecar]);
            object["spec"]["containers"][0]["readinessProbe"] = probe("readiness", &name);
            object["spec"]["containers"][0]["readinessProbe"]["initialDelaySeconds"] = json!(4);
        }
        _ => {}
    }
}

async fn act(sim: &Sim, rules: &Rules, action: Action) {
    match action {
        Action::Create(pod, policy) => {
            let name = name(pod);
            let side = format!("d-{name}");
            let mut object =
                pods::pod(&name, &[pods::container(&format!("c-{name}")), pods::container(&side)]);
            // Two of the pods have a second container, which exits with the first.
            object["spec"]["containers"].as_array_mut().unwrap().truncate(1 + pod % 2);
            if pod == 2 {
                object["spec"]["initContainers"] = json!([pods::container(&format!("i-{name}"))]);
                sim.runtime.behave(
                    &format!("i-{name}"),
                    Behaviour { exit: Some((Duration::from_secs(1), 0)), ..Behaviour::default() },
                );
            }
            if pod == 0 {
                // A pod without requests fits on a full node.
                object["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "1m"}});
            }
            object["spec"]["restartPolicy"] = json!(format!("{policy:?}"));
            add_probes(pod, &mut object);
            calm::add(sim, pod, &mut object);
            // The pod may exist.
            let _exists = sim.api.create("pods", "default", object);
        }
        Action::Label(pod, n) => {
            let _none = sim.api.edit("pods", "default", &name(pod), |p| {
                p["metadata"]["labels"]["n"] = json!(n.to_string());
            });
        }
        // A changed container is restarted whatever the restart policy. Restarts are counted for policy
        // Always only.
        Action::Image(pod, n) if sim.pod(&name(pod)).text("/spec/restartPolicy") == "Always" => {
            let _none = sim.api.edit("pods", "default", &name(pod), |p| {
                p["spec"]["containers"][0]["image"] = json!(format!("example.test/app:{n}"));
            });
        }
        Action::Image(..) => {}
        Action::Delete(pod, grace) => {
            let _none = sim.api.delete("pods", "default", &name(pod), Some(grace));
        }
        Action::Exit(pod, code) => exit(sim, pod, code),
        Action::SandboxExit(pod) => {
            if let Some(s) = sim.sandboxes(&uid(sim, pod)).into_iter().find(|s| s.ready()) {
                for c in sim.runtime.containers().iter().filter(|c| c.sandbox_id == s.id()) {
                    sim.runtime.exit(c.id(), 137);
                }
                sim.runtime.exit(s.id(), 137);
            }
        }
        Action::Fault(method, fault, times) => {
            let rule = Rule::on(method).times(times);
            sim.runtime.script(match fault {
                Fault::Refused => rule.fail(Code::Unknown, "refused"),
                Fault::CutBefore => rule.fail(Code::Unavailable, "cut"),
                Fault::CutAfter => rule.fail_after(Code::Unavailable, "cut"),
                Fault::Slow => rule.latency(Duration::from_millis(300)),
            });
        }
        Action::LoseHints(n) => sim.runtime.drop_events(n),
        Action::CutHints => sim.runtime.cut_event_streams(),
        Action::ExitWithHints(pod, code) => {
            sim.runtime.drop_events(u64::MAX);
            exit(sim, pod, code);
            sim.runtime.cut_event_streams();
            sim.runtime.drop_events(0);
        }
        Action::ExitWithProxy(pod, code) => {
            sim.kill(Service::CriProxy).await;
            exit(sim, pod, code);
            sim.up(Service::CriProxy);
        }
        Action::ExitWithReporter(pod, code) => {
            let running = sim.runtime.containers().into_iter().filter(|c| c.running());
            let is_running = running.into_iter().any(|c| c.pod_uid() == uid(sim, pod));
            sim.api.faults().fail("patch pods/status", 1_000, Failure::Internal);
            let before = sim.api.counts().of("patch pods/status");
            exit(sim, pod, code);
            if is_running {
                // The third attempt has the end of all containers.
                let failed = async || {
                    let attempts = sim.api.counts().of("patch pods/status") - before;
                    if attempts >= 3 { Ok(()) } else { Err(attempts) }
                };
                // A pod that is being deleted may be gone before.
                let _late = tokio::time::timeout(UNWRITTEN, until("a status is refused", LONG, failed)).await;
            }
            sim.kill(Service::Status).await;
            sim.api.faults().clear();
            sim.up(Service::Status);
        }
        Action::ExitWithOutage(pod, code) => {
            may_become(sim, pod, Seen::is_ready).await;
            sim.api.faults().fail("patch pods/status", 1_000, Failure::Internal);
            replace(sim, pod, code, ContainerState::ContainerRunning).await;
            sim.restart(Service::PodSync).await;
            sim.api.faults().clear();
        }
        Action::RuntimeRestart => {
            sim.runtime.down();
            sim.runtime.up().unwrap();
        }
        Action::ApiFault(requests, times) => sim.api.faults().fail(requests, times, Failure::Internal),
        Action::ApiRestart(ms) => {
            sim.api.faults().set_down(true);
            tokio::time::sleep(Duration::from_millis(ms)).await;
            sim.api.faults().set_down(false);
        }
        Action::DoubleHints(yes) => sim.runtime.duplicate_events(yes),
        Action::Probe(kind, pod, fails) => rules.set_failing(kind, &name(pod), fails),
        Action::RestartUnready(pod) => {
            rules.set_failing("readiness", &name(pod), true);
            tokio::time::sleep(REPLACED).await;
            sim.restart(Service::PodSync).await;
        }
        Action::SandboxLoss(pod) => {
            may_become(sim, pod, |p| p.phase() == "Running").await;
            sim.runtime.script(Rule::on(Method::StartContainer).fail(Code::Unknown, "refused").times(1));
            replace(sim, pod, 1, ContainerState::ContainerCreated).await;
            let name = format!("c-{}", name(pod));
            may_become(sim, pod, |p| p.container(&name).reason == "RunContainerError").await;
            if let Some(s) = sim.sandboxes(&uid(sim, pod)).into_iter().find(|s| s.ready()) {
                let inside = |c: &&ContainerRecord| c.sandbox_id == s.id() && c.running();
                for c in sim.runtime.containers().iter().filter(inside) {
                    sim.runtime.exit(c.id(), 137);
                }
                sim.runtime.exit(s.id(), 137);
            }
        }
        Action::TooLarge => {
            let mut object = pods::single("too-large");
            object["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "1000000"}});
            // The pod may exist.
            let _exists = sim.api.create("pods", "default", object);
        }
        Action::Manifest => sim.manifest(STATIC, &pods::manifest(STATIC)),
        Action::DeleteMirror(grace) => {
            // The mirror may not exist.
            let _none = sim.api.delete("pods", "default", MIRROR, Some(grace));
        }
        Action::Restart(service) => sim.restart(service).await,
        // The time between two actions is part of the sequence.
        Action::Pause(ms) => tokio::time::sleep(Duration::from_millis(ms)).await,
        Action::Rest | Action::RefusePublish(_) | Action::DeleteUnready(_) => {
            unreachable!("only sequences of `calm` have them")
        }
    }
}

/// Returns why a pod of the API server is not settled. `lost` are the pods whose sandbox was stopped so far.
fn unsettled(sim: &Sim, lost: &BTreeSet<usize>) -> Vec<String> {
    let mut out = Vec::new();
    let mut known = BTreeMap::new();
    for pod in 0..ALL_PODS {
        let seen = sim.pod(&name(pod));
        if seen.is_gone() {
            continue;
        }
        known.insert(seen.uid().to_owned(), ());
        let finished = matches!(seen.phase(), "Succeeded" | "Failed");
        let policy = seen.text("/spec/restartPolicy");
        let as_policy = match policy {
            "Always" => false,
            "OnFailure" => seen.phase() == "Succeeded",
            _ => true,
        };
        let instances: Vec<_> =
            sim.runtime.containers().into_iter().filter(|c| c.pod_uid() == seen.uid()).collect();
        let names: Vec<&str> = seen.0["spec"]["containers"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|c| c["name"].as_str())
            .collect();
        let running = instances.iter().filter(|c| c.running() && names.contains(&c.name())).count();
        let sidecars = instances.iter().filter(|c| c.running() && !names.contains(&c.name())).count();
        let is_done = |name: &str| {
            let newest = sim.runtime.newest(seen.uid(), name);
            newest.is_some_and(|c| {
                let exited = c.status.state() == ContainerState::ContainerExited;
                exited && (policy == "Never" || policy == "OnFailure" && c.status.exit_code == 0)
            })
        };
        let done = names.iter().filter(|n| is_done(n)).count();
        let good = if finished {
            as_policy && running + sidecars == 0 && !seen.text("/status/reason").starts_with("OutOf")
        } else {
            let as_wanted = running + done == names.len() && running > 0 && (done > 0 || seen.is_ready());
            // As in the kubelet (`computePodActions`), a lost sandbox of a pod that never restarts is not
            // recreated. Containers that were not started in it never start.
            let has_sandbox = sim.sandboxes(seen.uid()).iter().any(|s| s.ready());
            let stranded = policy == "Never"
                && lost.contains(&pod)
                && !has_sandbox
                && !instances.is_empty()
                && done < names.len();
            as_wanted || stranded && running == 0 && seen.phase() == "Pending"
        };
        // A container that is not restarted ran once.
        for n in names.iter().filter(|_| policy == "Never") {
            let ran = instances.iter().filter(|c| c.name() == *n && c.status.started_at > 0).count();
            if ran > 1 {
                out.push(format!("{n} ran {ran} times: {seen:?}"));
            }
        }
        if !good || !seen.text("/metadata/deletionTimestamp").is_empty() {
            out.push(format!("{policy} {running} running: {seen:?} {:?}", sim.events(&name(pod))));
        }
    }
    if sim.manifests_dir().join(format!("{STATIC}.yaml")).exists() {
        let mirror = sim.pod(MIRROR);
        if !mirror.is_ready() || !mirror.text("/metadata/deletionTimestamp").is_empty() {
            out.push(format!("mirror pod: {mirror:?}"));
        }
        known.insert(mirror.text("/metadata/annotations/kubernetes.io~1config.hash").to_owned(), ());
    }
    for s in sim.runtime.sandboxes() {
        if s.pod_uid() != "foreign-uid" && !known.contains_key(s.pod_uid()) {
            out.push(format!("unwanted sandbox of {}", s.pod_uid()));
        }
    }
    out
}

async fn settle(sim: &Sim, lost: &BTreeSet<usize>) {
    settle_within(LONG, sim, lost).await;
}

async fn settle_within(limit: Duration, sim: &Sim, lost: &BTreeSet<usize>) {
    until("every pod as it should be", limit, async || {
        let left = unsettled(sim, lost);
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
}

async fn case(family: Family, actions: Vec<Action>, planted: Option<&'static str>) {
    let loses_hints = actions.iter().any(|a| matches!(a, Action::LoseHints(_)));
    let mut sim = Sim::prepare(Options { planted, ..Options::default() }).await;
    // With the default back-off of 10 s, a sequence would mostly wait.
    let restarts_soon = "--max-container-restart-period=1s";
    if family == Family::Calm {
        // Volumes are published again in each sync.
        sim.set_pod_sync_args(&[restarts_soon, "--sync-frequency=1s"]);
    } else {
        sim.set_pod_sync_args(&[restarts_soon]);
    }
    let repairs = loses_hints || family == Family::Calm;
    if !repairs {
        // A relist or a resync would hide a change that a service lost.
        sim.without_periodic_repairs();
    }
    let actions_fail_probes =
        actions.iter().any(|a| matches!(a, Action::Probe(_, _, true) | Action::RestartUnready(_)));
    let mut rules = Rules::start(&sim);
    sim.start_all();
    let driver = (family == Family::Calm).then(|| {
        rules.watch_mounts_and_calm(&sim);
        // The driver is another process for the node, and may answer late.
        sim.disturb();
        calm::driver(&sim)
    });
    let foreign = sim.runtime.add_sandbox("foreign-uid", "foreign", "default", 0);
    let theirs = sim.runtime.add_container(&foreign, &ContainerSeed::running("theirs"));
    sim.runtime.behave("theirs", Behaviour::default());
    let mut lost = BTreeSet::new();
    for action in actions {
        if let Action::SandboxExit(pod) | Action::SandboxLoss(pod) = &action {
            lost.insert(*pod);
        }
        match &driver {
            Some(driver) => calm::act(&sim, &rules, driver, &lost, action).await,
            None => act(&sim, &rules, action).await,
        }
    }
    // A node that violates a statement may never settle.
    rules.assert_kept();
    rules.set_calm(false);
    if actions_fail_probes {
        tokio::time::sleep(FAILING).await;
    }
    sim.runtime.unscript_all();
    calm::pass_all(&rules);
    if loses_hints {
        // A lost event is compensated by the next relist, half a minute later. That relist is not tested
        // here.
        sim.runtime.cut_event_streams();
    }
    settle(&sim, &lost).await;
    if !repairs {
        // Nothing else happens, so that nothing else repairs what one of these faults loses.
        let last = [
            Action::Exit(2, 0),
            Action::ExitWithProxy(0, 0),
            Action::ExitWithHints(3, 0),
            Action::ExitWithReporter(1, 0),
        ];
        for action in last {
            act(&sim, &rules, action).await;
            settle(&sim, &lost).await;
        }
    }
    rules.assert_kept();
    let subjects = ["foreign-uid".to_owned(), foreign, theirs.clone()];
    assert_eq!(actions_on(&sim.runtime, &subjects), Vec::<String>::new(), "a foreign pod was touched");
    assert!(sim.runtime.container(&theirs).unwrap().running());
    sim.finish().await;
}

/// Returns the seed in `QSIM_SEED` (64 hex digits), or a random one.
fn seed() -> [u8; 32] {
    let mut seed = [0; 32];
    match std::env::var("QSIM_SEED") {
        Ok(text) => {
            for (byte, digits) in seed.iter_mut().zip(text.as_bytes().chunks(2)) {
                *byte = u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap();
            }
        }
        Err(_) => seed = rand::random(),
    }
    seed
}

/// Returns the number in a variable of the environment.
fn number_of(variable: &str, default: usize) -> usize {
    std::env::var(variable)
        .map_or(default, |n| n.parse().unwrap_or_else(|_| panic!("{variable} is a number")))
}

/// Returns the CPU time of this process.
fn cpu() -> Duration {
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF).unwrap();
    let time = |t: nix::sys::time::TimeVal| {
        Duration::new(t.tv_sec().unsigned_abs(), 1000 * u32::try_from(t.tv_usec()).unwrap())
    };
    time(usage.user_time()) + time(usage.system_time())
}

/// Generates the sequences of a seed.
fn sequences(family: Family, seed: &[u8; 32]) -> impl Iterator<Item = Vec<Action>> + use<> {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, seed);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let action = match family {
        Family::Faults => action().boxed(),
        Family::Calm => calm::action().boxed(),
    };
    let strategy = prop::collection::vec(action, LENGTH);
    std::iter::repeat_with(move || strategy.new_tree(&mut runner).unwrap().current())
}

/// Generates a sequence from its number alone.
fn numbered(family: Family, number: u32) -> Vec<Action> {
    let mut seed = [0; 32];
    seed[..4].copy_from_slice(&number.to_be_bytes());
    sequences(family, &seed).next().unwrap()
}

/// Runs a sequence, in a [`LocalSet`]. Returns what does not hold after it.
async fn failure(family: Family, actions: Vec<Action>, planted: Option<&'static str>) -> Option<String> {
    let history = format!("{actions:?}");
    let panic = tokio::task::spawn_local(case(family, actions, planted)).await.err()?.into_panic();
    let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
    Some(format!("{family:?} after {history}:\n{text}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::print_stderr)]
async fn pods_settle_after_any_sequence_of_faults_and_nothing_exists_twice() {
    let seed = seed();
    let hex: String = seed.iter().map(|b| format!("{b:02x}")).collect();
    eprintln!("QSIM_SEED={hex}");
    let (count, at_once) = (number_of("QSIM_CASES", CASES), number_of("QSIM_AT_ONCE", AT_ONCE));
    let began = tokio::time::Instant::now();
    let faults = sequences(Family::Faults, &seed).take(count).map(|s| (Family::Faults, s));
    let calm = sequences(Family::Calm, &seed).take(count.div_ceil(CALM_SHARE)).map(|s| (Family::Calm, s));
    let trials = futures::stream::iter(faults.chain(calm))
        .map(|(family, actions)| failure(family, actions, None))
        .buffer_unordered(at_once)
        .filter_map(std::future::ready)
        .collect::<Vec<String>>();
    let failed = LocalSet::new().run_until(trials).await;
    let took = began.elapsed();
    eprintln!("{count} sequences in {took:.1?}, {at_once} at once; CPU time {:.1?}", cpu());
    assert!(
        failed.is_empty(),
        "QSIM_SEED={hex}: {} of {count} failed:\n{}",
        failed.len(),
        failed.join("\n\n")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recorded_sequences_find_their_planted_bugs() {
    LocalSet::new()
        .run_until(async {
            for (bug, family, number, text) in PLANTED {
                let Some(number) = number else { continue };
                let run = |planted| failure(family, numbered(family, number), planted);
                let (correct, planted) = tokio::join!(run(None), run(Some(bug)));
                assert_eq!(correct, None, "{family:?} sequence {number} without {bug:?}");
                let found = planted.unwrap_or_default();
                assert!(found.contains(text), "{family:?} sequence {number} does not find {bug:?}: {found}");
            }
        })
        .await;
}

/// Prints the first sequence that finds each planted bug, or the one in `QSIM_PLANTED`. `QSIM_NUMBERS` has
/// the numbers of the sequences if not all are to run: `7,12`. With `QSIM_WITH`, sequences without all of
/// these actions do not run: `Create(2;SandboxLoss(2)`. Runs with `QUINTLET_SOAK` only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::print_stderr)]
async fn sequences_find_the_planted_bugs() {
    if std::env::var_os("QUINTLET_SOAK").is_none() {
        return;
    }
    let wanted = std::env::var("QSIM_PLANTED").ok();
    let numbers: Vec<u32> = match std::env::var("QSIM_NUMBERS") {
        Ok(text) => text.split(',').map(|n| n.parse().expect("QSIM_NUMBERS has numbers")).collect(),
        Err(_) => (1..=MOST_SEQUENCES).collect(),
    };
    let needed = std::env::var("QSIM_WITH").unwrap_or_default();
    let mut missed = Vec::new();
    for (bug, family, _, text) in
        PLANTED.into_iter().filter(|(bug, ..)| wanted.as_deref().is_none_or(|w| w == *bug))
    {
        let (began, cpu_before) = (tokio::time::Instant::now(), cpu());
        let chosen = numbers.iter().map(|number| (*number, numbered(family, *number)));
        let has_all = |(_, s): &(u32, Vec<Action>)| {
            let text = format!("{s:?}");
            needed.split(';').all(|action| text.contains(action))
        };
        let trials = futures::stream::iter(chosen.filter(has_all))
            .map(|(number, s)| async move {
                let why = failure(family, s, Some(bug)).await?;
                why.contains(text).then_some((number, why))
            })
            .buffered(number_of("QSIM_AT_ONCE", AT_ONCE))
            .filter_map(std::future::ready);
        let first = LocalSet::new().run_until(async { std::pin::pin!(trials).next().await }).await;
        let (took, used) = (began.elapsed(), cpu().saturating_sub(cpu_before));
        match first {
            Some((number, why)) => {
                eprintln!("{bug}: found by sequence {number} in {took:.1?}, CPU time {used:.1?}, {why}");
            }
            None => missed.push(bug),
        }
    }
    assert_eq!(missed, Vec::<&str>::new(), "not found in {} sequences", numbers.len());
}
