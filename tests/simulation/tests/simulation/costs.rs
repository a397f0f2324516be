//! What the life of a pod costs: requests to the API server, calls of the runtime, changes of files, and
//! allocations.

use std::alloc::System;
use std::collections::BTreeMap;
use std::time::Duration;

use quintlet_kit::failpoint::{Kind, When};
use quintlet_simulation::{NODE, Options, Sim, pods};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tokio::time::sleep;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Allocations of a pod's life, measured with this test. A change that lowers them lowers this number.
const COMMITTED_ALLOCATIONS: usize = 16_800;

type Counts = BTreeMap<String, u64>;

/// Returns requests and calls since the start, by name.
fn counts(sim: &Sim) -> Counts {
    let requests = sim.api.counts();
    let requests = requests.iter().map(|(request, count)| (format!("api {request}"), count));
    let calls = sim.runtime.counts();
    let calls = calls.iter().map(|(method, count)| (format!("cri {method:?}"), *count));
    requests.chain(calls).collect()
}

/// Returns what was added since `before`, without work that the node does at intervals.
fn since(sim: &Sim, before: &Counts) -> Counts {
    let periodic = ["cri Status", "cri Version", "cri ListImages", "cri ImageFsInfo", "leases", " nodes"];
    let mut added = counts(sim);
    added.retain(|name, count| {
        *count -= before.get(name).copied().unwrap_or_default();
        *count > 0 && periodic.iter().all(|of_node| !name.ends_with(of_node))
    });
    added
}

/// Removes the calls that read the pod's state, and returns their number: (statuses of sandboxes, statuses of
/// containers).
fn take_inspections(counts: &mut Counts) -> (u64, u64) {
    let mut take = |name| counts.remove(name).unwrap_or_default();
    (take("cri PodSandboxStatus"), take("cri ContainerStatus"))
}

fn counted(expected: &[(&str, u64)]) -> Counts {
    expected.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_life_of_a_pod_costs_these_requests_and_calls() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.without_periodic_repairs();
    sim.start_all();
    // The start of the node writes its status and events, which are not costs of a pod.
    for reason in ["Starting", "NodeAllocatableEnforced", "NodeReady"] {
        sim.wait_event(NODE, reason, |event| event.reason == reason).await;
    }
    let mut inspections = Vec::new();
    // The first pod of a node costs requests that later pods do not.
    for name in ["first", "second", "third", "fourth", "fifth"] {
        let before = counts(&sim);
        let uid = sim.create(pods::single(name));
        sim.wait_ready(name).await;
        sim.wait_event(name, "Started", |event| event.reason == "Started").await;
        let mut start = since(&sim, &before);
        let before_end = counts(&sim);
        sim.delete(name, None);
        sim.wait_gone(name).await;
        sim.wait_nothing_left(&uid).await;
        let mut end = since(&sim, &before_end);
        if name == "first" {
            continue;
        }
        let to_start = take_inspections(&mut start);
        let expected = [
            ("api create events", 3),
            ("api patch pods/status", 2),
            // Nothing may be left of an earlier agent.
            ("cri ListPodSandbox", 1),
            ("cri ListContainers", 1),
            ("cri RunPodSandbox", 1),
            ("cri ImageStatus", 1),
            ("cri CreateContainer", 1),
            ("cri StartContainer", 1),
        ];
        assert_eq!(start, counted(&expected), "start of {name}");
        inspections.push((to_start, take_inspections(&mut end)));
        let expected = [
            ("api create events", 1),
            // The observed generation of the deletion is written together with the end of the containers.
            ("api patch pods/status", 1),
            ("api delete pods", 1),
            ("cri StopContainer", 1),
            // As in the kubelet: once to stop the pod, and once before the removal.
            ("cri StopPodSandbox", 2),
            ("cri RemoveContainer", 1),
            ("cri RemovePodSandbox", 1),
            // Nothing may be left of interrupted calls.
            ("cri ListPodSandbox", 1),
            ("cri ListContainers", 1),
        ];
        assert_eq!(end, counted(&expected), "end of {name}");
    }
    // Once after all stops, and a list after the removals. A busy machine delays some hints, which then cause
    // an inspection.
    let few =
        |(start, end): &((u64, u64), (u64, u64))| start.0 <= 2 && start.1 <= 1 && end.0 <= 1 && end.1 <= 1;
    assert!(
        inspections.iter().any(few),
        "statuses of sandboxes and containers, to start and to end: {inspections:?}"
    );
    sim.finish().await;
}

/// Counts steps by name, and takes the number of replaced files.
fn tally(steps: Vec<&'static str>) -> (BTreeMap<&'static str, u64>, u64) {
    let mut counts = BTreeMap::new();
    for step in steps {
        *counts.entry(step).or_default() += 1;
    }
    let replaced = counts.remove("file replaced").unwrap_or_default();
    (counts, replaced)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_life_of_a_pod_changes_these_files() {
    let sim = Sim::start(Options::default()).await;
    let (mut replaced, mut appended) = (Vec::new(), Vec::new());
    for name in ["first", "second", "third", "fourth"] {
        sim.cuts().arm(Kind::File, When::After, None);
        let uid = sim.create(pods::single(name));
        sim.wait_ready(name).await;
        sim.wait_event(name, "Started", |event| event.reason == "Started").await;
        let (mut start, to_start) = tally(sim.cuts().disarm());
        // Of the pod before.
        start.remove("record removed");
        appended.extend(start.remove("journal appended"));
        let expected = [
            ("cgroup limited", 1),
            ("cgroup made", 1),
            ("container's log directory made", 1),
            ("hosts file written", 1),
            ("log directory made", 1),
            ("pod directory made", 2),
            ("termination log made", 1),
        ];
        if name != "first" {
            assert_eq!(start, expected.into(), "start of {name}");
        }
        sim.cuts().arm(Kind::File, When::After, None);
        sim.delete(name, None);
        sim.wait_gone(name).await;
        sim.wait_nothing_left(&uid).await;
        let (_, to_end) = tally(sim.cuts().disarm());
        replaced.push(to_start + to_end);
    }
    // One line for the allocated resources and one for those of the container. A write of the checkpoints may
    // add two.
    assert!(appended.contains(&2), "journal lines of the start of each pod: {appended:?}");
    // Records of the pod, each before the action that it describes. What happens meanwhile may join or part
    // some.
    assert!(replaced.iter().any(|count| *count <= 19), "replaced files of each pod: {replaced:?}");
    sim.finish().await;
}

/// Time after which a pod of the simulation is Ready, or gone.
const STEP: Duration = Duration::from_millis(1500);
/// Time after which nothing follows changes of pods. Directories and cgroups of unknown pods are listed 5 s
/// after them, once for all changes. This list is not counted, although it grows with the pods of the node.
const SETTLE: Duration = Duration::from_secs(6);
/// Pods that start together. Unknown pods are listed once after several changes.
const TOGETHER: usize = 5;
/// Pods of a node on which a pod costs as much as on an empty one.
const MANY: usize = 250;

/// Returns the allocations of the whole process (the services, the API server, and the runtime) from now on.
fn allocations() -> impl Fn() -> usize {
    let before = ALLOCATOR.stats().allocations;
    move || ALLOCATOR.stats().allocations - before
}

/// Sleeps for steps until `is_reached`, and returns their number and the allocations during them.
///
/// A wait for a state would allocate, and so does the look at it, which is not counted. A busy machine needs
/// more steps than an idle one.
async fn steps_until(is_reached: impl Fn() -> bool) -> (u32, usize) {
    let (mut steps, mut allocated) = (0, 0);
    loop {
        let counted = allocations();
        sleep(STEP).await;
        allocated += counted();
        steps += 1;
        if is_reached() {
            return (steps, allocated);
        }
    }
}

/// Returns the allocations of the lives of [`TOGETHER`] pods, and of as much time without a change.
async fn lives_and_rest(sim: &Sim, prefix: &str) -> (usize, usize) {
    let names: Vec<String> = (0..TOGETHER).map(|i| format!("{prefix}-{i}")).collect();
    let counted = allocations();
    let uids: Vec<String> = names.iter().map(|name| sim.create(pods::single(name))).collect();
    let to_create = counted();
    let (steps_to_start, to_start) = steps_until(|| names.iter().all(|name| sim.pod(name).is_ready())).await;
    let counted = allocations();
    for name in &names {
        sim.delete(name, None);
    }
    let to_delete = counted();
    let (steps_to_end, to_end) = steps_until(|| names.iter().all(|name| sim.pod(name).is_gone())).await;
    for uid in &uids {
        sim.wait_nothing_left(uid).await;
    }
    sleep(SETTLE).await;
    let counted = allocations();
    sleep((steps_to_start + steps_to_end) * STEP).await;
    (to_create + to_start + to_delete + to_end, counted())
}

/// Returns what a life adds to the time at rest: the difference between the medians of three.
async fn allocations_of_a_life(sim: &Sim, prefix: &str) -> usize {
    let (mut lives, mut rests) = (Vec::new(), Vec::new());
    for i in 0..3 {
        let (of_lives, of_rest) = lives_and_rest(sim, &format!("{prefix}-{i}")).await;
        lives.push(of_lives);
        rests.push(of_rest);
    }
    lives.sort_unstable();
    rests.sort_unstable();
    lives[1].saturating_sub(rests[1]) / TOGETHER
}

#[allow(clippy::print_stdout, reason = "the test prints its figures")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_allocations_of_a_pods_life_are_few_and_do_not_grow_with_the_pods_of_the_node() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&["--max-pods=300"]);
    sim.without_periodic_repairs();
    sim.start_all();
    // The first pod of a node costs more than later ones.
    lives_and_rest(&sim, "first").await;
    let alone = allocations_of_a_life(&sim, "alone").await;
    let names: Vec<String> = (0..MANY).map(|i| format!("many-{i}")).collect();
    for name in &names {
        // Only its name is used.
        let _uid = sim.create(pods::single(name));
    }
    for name in &names {
        sim.wait_ready(name).await;
        // At most 50 events per second are written, so they follow the pods for a while.
        sim.wait_event(name, "Started", |event| event.reason == "Started").await;
    }
    sleep(SETTLE).await;
    let beside_many = allocations_of_a_life(&sim, "beside-many").await;
    let figures = format!("{alone} on an empty node, {beside_many} beside {MANY} pods");
    println!("allocations of a pod's life: {figures}");
    assert!(
        alone * 10 <= COMMITTED_ALLOCATIONS * 12,
        "more than 1.2 times {COMMITTED_ALLOCATIONS}: {figures}"
    );
    assert!(beside_many * 10 <= alone * 12, "they grow with the pods of the node: {figures}");
    sim.finish().await;
}
