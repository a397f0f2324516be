//! Hostile pods beside an ordinary one, with the built binaries on a real containerd.
//!
//! The binaries are those of the tests' own profile, where an overflow is a panic. `QUINTLET_BIN_DIR=target/release` names release
//! binaries, where it wraps.
#![allow(
    clippy::disallowed_methods,
    clippy::large_futures,
    clippy::print_stdout,
    clippy::unwrap_used,
    missing_docs
)]

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::{Mode, mkdirat};
use quintlet_e2e::bins::SERVICES;
use quintlet_e2e::service::Process;
use quintlet_e2e::wait::LONG;
use quintlet_e2e::{Node, Options, Seen, pods, until};
use quintlet_hostile::class::LEVELS;
use quintlet_hostile::verdict::{self, Verdict};
use serde_json::{Value, json};

/// So much later than without hostile pods an ordinary one may be Ready.
const RATIO: u32 = 4;
/// Below this a ratio says nothing: it is what one look at the runtime takes.
const LEAST: Duration = Duration::from_millis(1500);

async fn start(name: &'static str) -> Node {
    let mut options = Options::with_api(name);
    options.extra.push(("pod-sync", "--max-pods=500".to_owned()));
    Node::start(options).await
}

/// All processes, each with how often it was started.
fn processes(node: &Node) -> BTreeMap<&'static str, Process> {
    SERVICES.into_iter().map(|name| (name, node.service(name).process())).collect()
}

/// Makes an ordinary pod and takes it away again. Returns how long it took to be Ready.
async fn ordinary(node: &Node, name: &str) -> Duration {
    let began = Instant::now();
    let made = node.api().create_pod(pods::bound(pods::sleeper(name)));
    let api = node.api();
    let is_ready = |o: &Value| Seen::from_api(o.clone()).is_ready();
    api.wait_for("pods", "default", name, LONG, is_ready).await;
    let took = began.elapsed();
    node.api().delete("pods", "default", name, Some(0)).unwrap();
    node.wait_gone(made["metadata"]["uid"].as_str().unwrap()).await;
    took
}

/// The median of three ordinary pods.
async fn usual(node: &Node, name: &str) -> Duration {
    let mut all = Vec::new();
    for n in 0..3 {
        all.push(ordinary(node, &format!("{name}-{n}")).await);
    }
    all.sort();
    all[1]
}

fn assert_usual(what: &str, took: Duration, before: Duration) {
    let most = (before * RATIO).max(LEAST);
    assert!(
        took <= most,
        "{what}: an ordinary pod is Ready after {took:?}, and without hostile pods after {before:?}"
    );
}

fn warnings(node: &Node, name: &str) -> Vec<String> {
    let events = node.api().list("events");
    let of_pod = events.iter().filter(|e| e["involvedObject"]["name"] == name && e["type"] == "Warning");
    of_pod.map(|e| e["reason"].as_str().unwrap_or_default().to_owned()).collect()
}

fn create(node: &Node, pod: Value) -> String {
    let made = node.api().create_pod(pods::bound(pod));
    made["metadata"]["uid"].as_str().unwrap().to_owned()
}

/// Waits until a pod has the reason.
async fn wait_reason(node: &Node, name: &str, reason: &str) {
    until(&format!("{name}: {reason}"), LONG, async || {
        let pod = node.api().get("pods", "default", name).unwrap_or_default();
        let warnings = warnings(node, name);
        match verdict::of(&pod, &warnings) {
            Some(Verdict::Reason(r) | Verdict::Warning(r)) if r == reason => Ok(()),
            Some(Verdict::Good) if reason == "Ready" => Ok(()),
            other => Err(format!("{other:?} {warnings:?} {}", pod["status"])),
        }
    })
    .await;
}

/// Makes directories in each other, as a container does with `mkdir` and `cd`: there is no path to the innermost.
fn nest(dir: &Path) {
    let mut at = open(dir, OFlag::O_DIRECTORY, Mode::empty()).unwrap();
    for _ in 0..LEVELS {
        mkdirat(&at, "d", Mode::S_IRWXU).unwrap();
        at = openat(&at, "d", OFlag::O_DIRECTORY, Mode::empty()).unwrap();
    }
}

/// Runs a scenario beside ordinary pods: no process ends, they are Ready as always, and nothing stays of the hostile ones.
async fn beside_ordinary_pods<F>(name: &'static str, hostile: F)
where
    F: AsyncFnOnce(&Node) -> Vec<String>,
{
    let node = start(name).await;
    let before = usual(&node, "before").await;
    let processes_before = processes(&node);
    let uids = hostile(&node).await;
    let during = usual(&node, "during").await;
    println!("{name}: an ordinary pod is Ready after {before:?} before and {during:?} beside");
    assert_eq!(processes(&node), processes_before, "a process has ended");
    assert_usual(name, during, before);
    for pod in node.api().list("pods") {
        let name = pod["metadata"]["name"].as_str().unwrap();
        // It may have gone by itself.
        let _gone = node.api().delete("pods", "default", name, None);
    }
    for uid in &uids {
        node.wait_gone(uid).await;
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
        let left: Vec<&str> = mounts.lines().filter(|l| l.contains(uid.as_str())).collect();
        assert_eq!(left, Vec::<&str>::new(), "mounts of {uid}");
    }
    assert_eq!(processes(&node), processes_before, "a process has ended with the deletion");
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_longest_grace_period_ends_no_process() {
    beside_ordinary_pods("hostile-grace", async |node| {
        let mut uids = Vec::new();
        let mut failing = pods::sleeper("failing");
        failing["spec"]["terminationGracePeriodSeconds"] = json!(i64::MAX);
        failing["spec"]["containers"][0]["livenessProbe"] =
            json!({"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1});
        uids.push(create(node, failing.clone()));
        let mut of_probe = failing.clone();
        of_probe["metadata"]["name"] = json!("of-probe");
        of_probe["spec"]["terminationGracePeriodSeconds"] = json!(2);
        of_probe["spec"]["containers"][0]["livenessProbe"]["terminationGracePeriodSeconds"] = json!(i64::MAX);
        uids.push(create(node, of_probe));
        for name in ["failing", "of-probe"] {
            node.wait_pod(name, "restarted by its probe", LONG, |p| {
                p.containers().get("main").is_some_and(|c| c.restarts > 0)
            })
            .await;
        }
        let mut deleted = pods::sleeper("deleted");
        deleted["spec"]["terminationGracePeriodSeconds"] = json!(i64::MAX);
        let uid = create(node, deleted);
        node.wait_ready("deleted").await;
        node.api().delete("pods", "default", "deleted", None).unwrap();
        node.wait_gone(&uid).await;
        let mut hooked = pods::sleeper("hooked");
        hooked["spec"]["terminationGracePeriodSeconds"] = json!(i64::MAX);
        hooked["spec"]["containers"][0]["lifecycle"] = json!({"preStop": {"exec": {"command": ["true"]}}});
        let uid = create(node, hooked);
        node.wait_ready("hooked").await;
        node.api().delete("pods", "default", "hooked", None).unwrap();
        node.wait_gone(&uid).await;
        uids
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_thousand_nested_directories_are_removed_with_their_pod() {
    beside_ordinary_pods("hostile-nested", async |node| {
        let mut pod = pods::sleeper("nested");
        pod["spec"]["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
        pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
        let uid = create(node, pod);
        node.wait_ready("nested").await;
        nest(&node.root_dir().join("pods").join(&uid).join("volumes/kubernetes.io~empty-dir/v"));
        node.api().delete("pods", "default", "nested", None).unwrap();
        node.wait_gone(&uid).await;
        vec![uid]
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pull_secret_of_many_stars_costs_nobody_time() {
    beside_ordinary_pods("hostile-secret", async |node| {
        let config = json!({"auths": {
            format!("{}b:5000", "*a".repeat(60)): {"username": "u", "password": "p"},
        }});
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/dockerconfigjson",
            "metadata": {"name": "stars", "namespace": "default"},
            "data": {".dockerconfigjson": STANDARD.encode(config.to_string())},
        });
        node.api().create("secrets", "default", secret).unwrap();
        // One for each thread of pod-sync, and one more.
        let mut uids = Vec::new();
        for n in 0..3 {
            let name = format!("stars-{n}");
            let mut pod = pods::sleeper(&name);
            pod["spec"]["imagePullSecrets"] = json!([{"name": "stars"}]);
            pod["spec"]["containers"][0]["image"] = json!(format!("{}:5000/app:{n}", "a".repeat(230)));
            uids.push(create(node, pod));
        }
        for n in 0..3 {
            wait_reason(node, &format!("stars-{n}"), "ErrImagePull").await;
        }
        uids
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_that_grow_when_they_are_expanded_are_refused() {
    beside_ordinary_pods("hostile-expansion", async |node| {
        let mut doubling = pods::sleeper("doubling");
        let mut env = vec![json!({"name": "A0", "value": "x".repeat(64)})];
        env.extend(
            (1..40).map(|n| json!({"name": format!("A{n}"), "value": format!("$(A{0})$(A{0})", n - 1)})),
        );
        doubling["spec"]["containers"][0]["env"] = json!(env);
        let mut arguments = pods::sleeper("arguments");
        arguments["spec"]["containers"][0]["env"] = json!([{"name": "A", "value": "x".repeat(100_000)}]);
        arguments["spec"]["containers"][0]["args"] = json!(["$(A)".repeat(250_000)]);
        let uids = vec![create(node, doubling), create(node, arguments)];
        for name in ["doubling", "arguments"] {
            wait_reason(node, name, "CreateContainerConfigError").await;
        }
        uids
    })
    .await;
}
