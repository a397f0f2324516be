//! Pods that their owners change without a pause, in the simulation beside ordinary pods.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use quintlet_simulation::{NODE, Options, Sim, pods};
use quintlet_testkit::fake_runtime::{ExecReply, Method};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::repeated::{opened, ordinary};

/// Interval of the changes, which the pods have in turn: 50 a second.
const EVERY: Duration = Duration::from_millis(20);
/// Changes between two that begin a life of a pod: one a second.
const LIFE: usize = 50;
/// Ordinary pods that start and end during the changes, one after the other.
const ORDINARY: usize = 4;
/// Largest ratio of the fastest of them to the fastest without changes.
const RATIO: u32 = 4;
/// Lives below this have no meaningful ratio: a busy machine makes an unoptimized build slow.
const LEAST: Duration = Duration::from_secs(5);

/// A change of an object, by its number.
type Change = Box<dyn Fn(&Sim, usize)>;

/// Starts and deletes ordinary pods. Returns the time of the fastest.
async fn lives(sim: &Sim, round: &str) -> Duration {
    let mut fastest = Duration::MAX;
    for n in 0..ORDINARY {
        let name = format!("{round}-{n}");
        let began = Instant::now();
        let uid = sim.create(ordinary(&name));
        sim.wait_ready(&name).await;
        sim.assert_started_once(&name, &uid);
        assert_eq!(sim.warnings(&name), [], "{name}");
        sim.delete(&name, Some(0));
        sim.wait_gone(&name).await;
        sim.wait_nothing_left(&uid).await;
        fastest = fastest.min(began.elapsed());
    }
    fastest
}

/// Runs ordinary pods while the changes are made in turn. Returns how many were made.
async fn beside_changes(sim: &Sim, changes: &[(&str, Change)]) -> usize {
    let stays = sim.create(ordinary("stays"));
    sim.wait_ready("stays").await;
    let usual = lives(sim, "before").await;
    let before = opened();
    let made = AtomicU64::new(0);
    let change = async {
        loop {
            let n = usize::try_from(made.fetch_add(1, Ordering::Relaxed)).unwrap();
            let (_, change) = &changes[n % changes.len()];
            change(sim, n);
            tokio::time::sleep(EVERY).await;
        }
    };
    let took = tokio::select! {
        took = lives(sim, "beside") => took,
        () = change => unreachable!("it has no end"),
    };
    let names: Vec<&str> = changes.iter().map(|(name, _)| *name).collect();
    let most = (usual * RATIO).max(LEAST);
    assert!(took <= most, "beside {names:?}: the life of an ordinary pod took {took:?}, else {usual:?}");
    assert!(sim.pod("stays").is_ready());
    sim.assert_started_once("stays", &stays);
    assert_eq!(opened(), before, "a stream between services has ended");
    usize::try_from(made.into_inner()).unwrap()
}

/// Edits the pod with this name by a subresource.
fn edit(what: &'static str, name: &'static str, edit: impl Fn(&mut Value, usize) + 'static) -> Change {
    Box::new(move |sim, n| {
        sim.api.edit(what, "default", name, |pod| edit(pod, n)).unwrap();
    })
}

/// A pod with its annotations in a file.
fn annotated(name: &str) -> Value {
    let mut pod = pods::single(name);
    pod["metadata"]["annotations"] = json!({"large": "x".repeat(20_000)});
    let file = json!({"path": "a", "fieldRef": {"fieldPath": "metadata.annotations"}});
    pod["spec"]["volumes"] = json!([{"name": "v", "downwardAPI": {"items": [file], "defaultMode": 0o644}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    pod
}

async fn delete_all(sim: &Sim, uids: &BTreeMap<&str, String>) {
    for name in uids.keys() {
        sim.delete(name, Some(0));
    }
    for (name, uid) in uids {
        sim.wait_gone(name).await;
        sim.wait_nothing_left(uid).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_whose_metadata_spec_and_status_change_without_a_pause_delay_no_ordinary_pod() {
    let sim = Sim::start(Options { api_history: Some(500), ..Options::default() }).await;
    sim.disturb();
    let mut uids = BTreeMap::new();
    for name in ["annotations", "image", "resources", "status"] {
        let mut pod = if name == "annotations" { annotated(name) } else { pods::single(name) };
        pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "1m"}});
        uids.insert(name, sim.create(pod));
        sim.wait_ready(name).await;
    }
    let not_ready = json!([{"type": "Ready", "status": "False"}]);
    let changes: Vec<(&str, Change)> = vec![
        (
            "annotations",
            edit("pods", "annotations", |pod, n| pod["metadata"]["annotations"]["n"] = json!(n.to_string())),
        ),
        (
            "image",
            edit("pods", "image", |pod, n| {
                pod["spec"]["containers"][0]["image"] = json!(format!("example.test/app:{}", n % 3));
            }),
        ),
        (
            "resources",
            edit("pods/resize", "resources", |pod, n| {
                pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] =
                    json!(format!("{}m", 1 + n % 7));
            }),
        ),
        (
            "status",
            edit("pods/status", "status", move |pod, _| pod["status"]["conditions"] = not_ready.clone()),
        ),
    ];
    sim.api.reset_counts();
    let made = beside_changes(&sim, &changes).await;
    let written = sim.api.counts().of("patch pods/status");
    assert!(made > 50, "{made} changes");
    assert!(
        written < u64::try_from(2 * made).unwrap() + 100,
        "{written} writes for {made} changes of four pods"
    );
    // The last change counts.
    sim.wait_pod("status", "Ready", quintlet_simulation::Seen::is_ready).await;
    sim.wait_pod("image", "Ready", quintlet_simulation::Seen::is_ready).await;
    sim.assert_started_once("annotations", &uids["annotations"]);
    let file =
        sim.root_dir().join("pods").join(&uids["annotations"]).join("volumes/kubernetes.io~downward-api/v/a");
    let last = format!("n=\"{}\"", (made - 1) / changes.len() * changes.len());
    quintlet_testkit::wait::until("the last annotation in the file", quintlet_simulation::LONG, async || {
        let text = std::fs::read_to_string(&file).unwrap();
        if text.contains(&last) { Ok(()) } else { Err(text.lines().last().unwrap_or_default().to_owned()) }
    })
    .await;
    delete_all(&sim, &uids).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ephemeral_containers_that_are_added_without_a_pause_delay_no_ordinary_pod() {
    const MOST: usize = 150;
    let sim = Sim::start(Options { api_history: Some(500), ..Options::default() }).await;
    sim.disturb();
    let uids = BTreeMap::from([("debugged", sim.create(pods::single("debugged")))]);
    sim.wait_ready("debugged").await;
    let add = edit("pods/ephemeralcontainers", "debugged", |pod, n| {
        if n < MOST {
            let list = &mut pod["spec"]["ephemeralContainers"];
            if list.is_null() {
                *list = json!([]);
            }
            list.as_array_mut().unwrap().push(pods::container(&format!("e-{n}")));
        }
    });
    let added = beside_changes(&sim, &[("ephemeral containers", add)]).await.min(MOST);
    // Each is started once.
    let uid = &uids["debugged"];
    sim.wait_runtime("all were created", |runtime| {
        (0..added).all(|n| runtime.newest(uid, &format!("e-{n}")).is_some_and(|c| c.running()))
    })
    .await;
    let created =
        sim.runtime.containers().iter().filter(|c| c.pod_uid() == uid && c.name().starts_with("e-")).count();
    assert_eq!(created, added);
    delete_all(&sim, &uids).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_are_replaced_and_probes_that_alternate_without_a_pause_delay_no_ordinary_pod() {
    const FLAPPING: usize = 10;
    let mut sim = Sim::prepare(Options { api_history: Some(500), ..Options::default() }).await;
    sim.set_pod_sync_args(&["--sub-second-exec-probe-rate=200"]);
    sim.disturb();
    sim.start_all();
    let attempts = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&attempts);
    sim.runtime.on_exec(move |_, command| {
        let n = if command[0] == "flap" { counter.fetch_add(1, Ordering::Relaxed) } else { 0 };
        // About one attempt of each container passes, then one fails.
        let exit_code = i32::from((n / u64::try_from(FLAPPING).unwrap()) % 2 == 1);
        ExecReply { exit_code, ..ExecReply::default() }
    });
    for n in 0..FLAPPING {
        let name = format!("flapping-{n}");
        let mut pod = pods::single(&name);
        pod["metadata"]["annotations"] = json!({"quintlet.dev/probe-period-ms": "100"});
        pod["spec"]["containers"][0]["readinessProbe"] =
            json!({"exec": {"command": ["flap"]}, "periodSeconds": 1, "failureThreshold": 1});
        let _uid = sim.create(pod);
        sim.wait_ready(&name).await;
    }
    let replace: Change = Box::new(|sim, n| {
        if n % LIFE > 1 {
            return;
        }
        let _none = sim.api.delete("pods", "default", "replaced", Some(0));
        // It exists until its containers have ended.
        let mut pod = pods::single("replaced");
        pod["spec"]["nodeName"] = json!(NODE);
        let _exists = sim.api.create("pods", "default", pod);
    });
    let manifest: Change = Box::new(|sim, n| match (n % LIFE, n / LIFE % 2) {
        (1, 0) => sim.manifest("rewritten", &pods::manifest("rewritten")),
        (1, _) => sim.remove_manifest("rewritten"),
        _ => {}
    });
    sim.api.reset_counts();
    let began = Instant::now();
    let _made = beside_changes(&sim, &[("replaced", replace), ("rewritten", manifest)]).await;
    let seconds = began.elapsed().as_secs_f64();
    let written = sim.api.counts().of("patch pods/status");
    let tried = attempts.load(Ordering::Relaxed);
    assert!(tried > 100, "{tried} attempts");
    // Two writes a second for each pod that alternates, and those of the others.
    let most = 3.0 * f64::from(u32::try_from(FLAPPING).unwrap()) * seconds + 200.0;
    assert!(f64::from(u32::try_from(written).unwrap()) < most, "{written} writes in {seconds} s");
    assert!(sim.runtime.count(Method::RunPodSandbox) > 0);
    sim.finish().await;
}
