//! The worst case of every field through the five services, with the runtime and the API server in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use quintlet_hostile::cases::{Case, Cases, drivers_of_migrated_types};
use quintlet_hostile::outcomes::{Expected, Outcomes};
use quintlet_hostile::verdict::{self, PodOutcome};
use quintlet_simulation::{NODE, Options, Sim, pods};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};

/// Test functions that the cases are divided among, so that they run beside each other.
const PARTS: usize = 5;
/// Pods at a time.
const BATCH: usize = 60;
/// Interval between two reads of the pods: a read copies megabytes.
const READ_EVERY: Duration = Duration::from_millis(300);
/// A pod with a Warning event and no reason in its status may become Ready until then. So may one that
/// executes a hook. One that is expected to become Ready has longer: a busy machine delays that, and not the
/// event.
const SETTLES_WITHIN: Duration = Duration::from_secs(4);
/// Bounds a failure only.
const LIMIT: Duration = Duration::from_secs(240);
/// Changes that the API server keeps for watches. Each holds a whole object.
const HISTORY: usize = 500;
/// Fields that the API server sets, or that keep the object from being removed.
const NOT_THE_NODES: [&str; 3] = ["metadata.finalizers", "metadata.deletion", "metadata.namespace"];

const EXPECTED: &str = "simulation.txt";

/// Returns the worst case of each field of each type, and of its items and entries.
fn worst(cases: &Cases) -> Vec<&Case> {
    let mut seen = BTreeSet::new();
    let is_worst = |case: &&Case| {
        let not_the_nodes = NOT_THE_NODES.iter().any(|path| case.path.starts_with(path));
        !not_the_nodes && seen.insert(cases.owner(case))
    };
    cases.all().iter().filter(is_worst).collect()
}

struct Run<'a> {
    case: &'a Case,
    name: String,
    uid: String,
    has_post_start: bool,
    settles: Option<Instant>,
}

impl Run<'_> {
    fn has_settled(&mut self) -> bool {
        self.settles.get_or_insert_with(Instant::now).elapsed() > SETTLES_WITHIN
    }
}

/// Type and reason of an event.
type Event = (String, String);

/// Returns the events of each pod, oldest first.
fn events(sim: &Sim) -> BTreeMap<String, Vec<Event>> {
    let mut by_pod: BTreeMap<String, Vec<Event>> = BTreeMap::new();
    for event in sim.api.share_all("events") {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let name = text(&event["involvedObject"]["name"]);
        by_pod.entry(name).or_default().push((text(&event["type"]), text(&event["reason"])));
    }
    by_pod
}

/// Returns what became of a pod, or what was seen last where that is open.
fn outcome(
    sim: &Sim,
    run: &mut Run<'_>,
    events: &[Event],
    expected: &Expected,
) -> Result<String, Option<PodOutcome>> {
    let is_expected = |outcome: &str| expected.has(&run.case.path, &run.case.extreme, outcome);
    let warnings: Vec<String> =
        events.iter().filter(|(kind, _)| kind == "Warning").map(|(_, reason)| reason.clone()).collect();
    let is_started = events.iter().any(|(_, reason)| reason == "Started");
    match verdict::of(&sim.pod(&run.name).0, &warnings) {
        Some(PodOutcome::Good) => Ok("Ready".to_owned()),
        // It alternates with the back-off of the container, and is seen again after the next restart.
        Some(PodOutcome::Reason(reason)) if reason == "ended" && is_expected("PostStartHookError") => {
            Err(Some(PodOutcome::Reason(reason)))
        }
        Some(PodOutcome::Reason(reason)) => Ok(reason),
        Some(PodOutcome::Warning(reason)) if run.has_settled() && is_expected(&format!("event {reason}")) => {
            Ok(format!("event {reason}"))
        }
        None if run.has_post_start && is_started && run.has_settled() => {
            Ok("executes its postStart hook".to_owned())
        }
        other => Err(other),
    }
}

/// Waits until an ordinary pod is Ready beside pods whose objects take an unoptimized build seconds to
/// decode.
async fn wait_ready(sim: &Sim, name: &str) {
    until(&format!("{name} Ready"), LIMIT, async || {
        let seen = sim.pod(name);
        if seen.is_ready() { Ok(()) } else { Err(seen) }
    })
    .await;
}

/// Waits until the runtime and pod-sync have no record of these pods.
async fn wait_nothing_left(sim: &Sim, made: &[(String, String, String)]) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let sandboxes = sim.runtime.sandboxes().into_iter().map(|s| s.pod_uid().to_owned());
        let mut left: BTreeSet<String> = sandboxes.collect();
        left.extend(sim.runtime.containers().into_iter().map(|c| c.pod_uid().to_owned()));
        let has_files = |uid: &str| {
            [sim.root_dir().join("pods"), sim.paths().state_dir()].iter().any(|dir| dir.join(uid).exists())
        };
        let stays: Vec<&(String, String, String)> =
            made.iter().filter(|(_, uid, _)| left.contains(uid) || has_files(uid)).collect();
        if stays.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "something is left of {stays:?}");
        tokio::time::sleep(READ_EVERY).await;
    }
}

async fn run_batch(
    sim: &Sim,
    cases: &Cases,
    batch: &[&Case],
    first: usize,
    expected: &Expected,
    outcomes: &mut Outcomes,
) {
    let mut runs = Vec::new();
    for (at, case) in batch.iter().enumerate() {
        let mut pod = cases.pod(case, &format!("hostile-{}", first + at));
        if case.path != "spec.nodeName" {
            pod["spec"]["nodeName"] = json!(NODE);
        }
        let has_post_start = case.path.contains(".postStart.");
        match sim.api.create("pods", "default", pod) {
            Ok(made) if made["spec"]["nodeName"] != NODE => {
                outcomes.note(&case.path, &case.extreme, "for another node");
            }
            Ok(made) => {
                let text = |field: &str| made["metadata"][field].as_str().unwrap_or_default().to_owned();
                let (name, uid) = (text("name"), text("uid"));
                runs.push(Run { case, name, uid, has_post_start, settles: None });
            }
            Err(_) => outcomes.note(&case.path, &case.extreme, "refused by the API server"),
        }
    }
    let made: Vec<(String, String, String)> =
        runs.iter().map(|r| (r.name.clone(), r.uid.clone(), r.case.path.clone())).collect();
    // An ordinary pod becomes Ready at the same time.
    let ordinary = format!("ordinary-{first}");
    let uid = sim.create(pods::single(&ordinary));
    wait_ready(sim, &ordinary).await;
    sim.assert_started_once(&ordinary, &uid);
    let deadline = Instant::now() + LIMIT;
    while !runs.is_empty() {
        let mut open = Vec::new();
        let events = events(sim);
        for mut run in runs {
            let of_pod = events.get(&run.name).map(Vec::as_slice).unwrap_or_default();
            match outcome(sim, &mut run, of_pod, expected) {
                Ok(outcome) => outcomes.note(&run.case.path, &run.case.extreme, outcome),
                Err(last) if Instant::now() > deadline => {
                    let seen: String = format!("{:?}", sim.pod(&run.name)).chars().take(2000).collect();
                    let outcome = format!("no reason: {last:?}, {seen}");
                    outcomes.note(&run.case.path, &run.case.extreme, outcome);
                }
                Err(_) => open.push(run),
            }
        }
        runs = open;
        tokio::time::sleep(READ_EVERY).await;
    }
    let late = format!("late-{first}");
    let _uid = sim.create(pods::single(&late));
    wait_ready(sim, &late).await;
    let seen = sim.pod(&ordinary);
    assert!(seen.is_ready() && seen.restarts() == 0, "{seen:?}");
    for name in [&ordinary, &late].into_iter().chain(made.iter().map(|(name, ..)| name)) {
        let _gone_by_itself = sim.api.delete("pods", "default", name, None);
    }
    wait_nothing_left(sim, &made).await;
}

async fn run_part(part: usize) {
    let mut sim = Sim::prepare(Options { api_history: Some(HISTORY), ..Options::default() }).await;
    // Objects of megabytes in an unoptimized build: a service may respond late, and log it.
    sim.disturb();
    // No controller of the tests attaches disks, and the kubelet waits two minutes for one.
    sim.set_pod_sync_args(&["--max-pods=500", "--enable-controller-attach-detach=false"]);
    sim.start_all();
    for driver in drivers_of_migrated_types() {
        sim.api.create("csidrivers", "", driver).unwrap();
    }
    let cases = Cases::of_pod();
    let (expected, mut outcomes) = (Expected::read(EXPECTED), Outcomes::default());
    let of_part: Vec<&Case> = worst(&cases).into_iter().skip(part).step_by(PARTS).collect();
    for (at, batch) in of_part.chunks(BATCH).enumerate() {
        run_batch(&sim, &cases, batch, at * BATCH, &expected, &mut outcomes).await;
    }
    expected.assert_has(&outcomes);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn extreme_values_part_1_get_their_reason_and_are_cleaned_up() {
    run_part(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn extreme_values_part_2_get_their_reason_and_are_cleaned_up() {
    run_part(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn extreme_values_part_3_get_their_reason_and_are_cleaned_up() {
    run_part(2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn extreme_values_part_4_get_their_reason_and_are_cleaned_up() {
    run_part(3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn extreme_values_part_5_get_their_reason_and_are_cleaned_up() {
    run_part(4).await;
}

#[test]
fn the_expected_outcomes_are_those_of_the_worst_cases() {
    let cases = Cases::of_pod();
    let worst = worst(&cases);
    let names = worst.iter().map(|case| (case.path.as_str(), case.extreme.as_str()));
    Expected::read(EXPECTED).assert_names(names);
}
