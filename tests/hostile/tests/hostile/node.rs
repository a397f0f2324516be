//! Runs hostile pods beside an ordinary one, with the built binaries on a real containerd.
//!
//! `make test` uses the binary of `make quick`, whose crates of this repository have the semantics of a
//! release. Without `QUINTLET_BIN_DIR` the tests use those of their own profile, in which an overflow is a
//! panic.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::{Mode, mkdirat};
use quintlet_e2e::NODE;
use quintlet_e2e::bins::SERVICES;
use quintlet_e2e::service::Process;
use quintlet_e2e::{LONG, Node, Options, Seen, pods, until};
use quintlet_hostile::cases::{Cases, drivers_of_migrated_types};
use quintlet_hostile::class::{LEVELS, MIB};
use quintlet_hostile::outcomes::Outcomes;
use quintlet_hostile::verdict::{self, PodOutcome};
use quintlet_localnode::images;
use serde_json::{Value, json};

/// Largest ratio of an ordinary pod's start time with hostile pods to that without.
const RATIO: u32 = 4;
/// Time for a pod with a Warning event to become Ready.
const YET: Duration = Duration::from_secs(10);
/// Start times below this have no meaningful ratio: they are dominated by one runtime call.
const LEAST: Duration = Duration::from_millis(1500);

async fn start(name: &'static str) -> Node {
    let mut options = Options::with_api(name);
    options.extra.push(("pod-sync", "--max-pods=500".to_owned()));
    Node::start(options).await
}

/// Returns the processes of all services, with the number of their starts.
fn processes(node: &Node) -> BTreeMap<&'static str, Process> {
    SERVICES.into_iter().map(|name| (name, node.service(name).process())).collect()
}

/// Creates and deletes an ordinary pod. Returns its time to Ready.
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

/// Returns the time of the fastest of five ordinary pods. What delays pods delays all of them; a runtime that
/// restarts hostile containers at that moment delays some.
async fn usual(node: &Node, name: &str) -> Duration {
    let mut fastest = Duration::MAX;
    for n in 0..5 {
        fastest = fastest.min(ordinary(node, &format!("{name}-{n}")).await);
    }
    fastest
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

/// Waits until a pod has this reason.
async fn wait_reason(node: &Node, name: &str, reason: &str) {
    until(&format!("{name}: {reason}"), LONG, async || {
        let pod = node.api().get("pods", "default", name).unwrap_or_default();
        let warnings = warnings(node, name);
        match verdict::of(&pod, &warnings) {
            Some(PodOutcome::Reason(r) | PodOutcome::Warning(r)) if r == reason => Ok(()),
            Some(PodOutcome::Good) if reason == "Ready" => Ok(()),
            other => Err(format!("{other:?} {warnings:?} {}", pod["status"])),
        }
    })
    .await;
}

/// Creates nested directories, like a container with `mkdir` and `cd`: the innermost has no usable path.
fn nest(dir: &Path) {
    let mut at = open(dir, OFlag::O_DIRECTORY, Mode::empty()).unwrap();
    for _ in 0..LEVELS {
        mkdirat(&at, "d", Mode::S_IRWXU).unwrap();
        at = openat(&at, "d", OFlag::O_DIRECTORY, Mode::empty()).unwrap();
    }
}

/// Runs a scenario beside ordinary pods: no process exits, ordinary pods start as fast as before, and nothing
/// of the hostile pods remains.
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
        // It may have been deleted before.
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
async fn a_pull_secret_with_many_wildcards_delays_no_pod() {
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
async fn variables_that_expand_too_far_are_rejected() {
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

/// The expanded commands of a probe, the name of an image in a status, and the output of probes were once
/// more than a message between services may have, and ended the stream of all pods.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_that_are_expanded_copied_or_read_delay_no_ordinary_pod() {
    beside_ordinary_pods("hostile-messages", async |node| {
        let probe = |command: Value| json!({"exec": {"command": command}, "periodSeconds": 1});
        let mut expanded = pods::sleeper("expanded");
        let container = &mut expanded["spec"]["containers"][0];
        container["env"] = json!([{"name": "V", "value": "x".repeat(100_000)}]);
        let command: Vec<&str> = std::iter::once("true").chain(std::iter::repeat_n("$(V)", 50)).collect();
        container["livenessProbe"] = probe(json!(command));
        let mut image = pods::sleeper("image");
        image["spec"]["containers"][0]["image"] = json!("A".repeat(1_150_000));
        let mut uids = vec![create(node, expanded), create(node, image)];
        for n in 0..4 {
            let mut output = pods::sleeper(&format!("output-{n}"));
            let command = json!(["sh", "-c", "head -c 15000000 /dev/zero"]);
            output["spec"]["containers"][0]["readinessProbe"] = probe(command);
            uids.push(create(node, output));
        }
        wait_reason(node, "image", "InvalidImageName").await;
        for name in ["expanded", "output-0", "output-1", "output-2", "output-3"] {
            wait_reason(node, name, "Ready").await;
        }
        uids
    })
    .await;
}

/// Pods of the largest sizes that an API server accepts, each with a name for its extreme value.
fn extremes() -> Vec<(&'static str, Value)> {
    let with = |name: &str, change: &dyn Fn(&mut Value)| {
        let mut pod = pods::sleeper(name);
        pod["spec"]["dnsPolicy"] = json!("Default");
        change(&mut pod);
        pod
    };
    let main = |pod: &mut Value, field: &str, value: Value| pod["spec"]["containers"][0][field] = value;
    let failing = json!({"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1});
    vec![
        // A node lacks the processes for 1,000 containers: most of them wait for an image that does not
        // exist.
        (
            "1,000 containers",
            with("containers", &|pod| {
                let first = pod["spec"]["containers"][0].clone();
                let all = (0..1000).map(|n| {
                    let mut container = first.clone();
                    container["name"] = json!(format!("c{n}"));
                    if n >= 10 {
                        container["image"] = json!("example.test/absent:1");
                        container["imagePullPolicy"] = json!("Never");
                    }
                    container
                });
                pod["spec"]["containers"] = all.collect();
            }),
        ),
        (
            "10,000 variables",
            with("variables", &|pod| {
                let all = (0..10_000).map(|n| json!({"name": format!("A{n}"), "value": "x"}));
                main(pod, "env", all.collect());
            }),
        ),
        (
            "an annotation of 1 MiB",
            with("annotation", &|pod| {
                pod["metadata"]["annotations"] = json!({"a": "x".repeat(MIB)});
            }),
        ),
        ("an argument of 1 MiB", with("argument", &|pod| main(pod, "args", json!(["x".repeat(MIB)])))),
        (
            "a variable of 1 MiB",
            with("variable", &|pod| main(pod, "env", json!([{"name": "A", "value": "x".repeat(MIB)}]))),
        ),
        (
            "a working directory of 20,000 levels",
            with("directory", &|pod| {
                main(pod, "workingDir", json!("/a".repeat(LEVELS)));
            }),
        ),
        (
            "a termination message at 20,000 levels",
            with("message", &|pod| {
                main(pod, "terminationMessagePath", json!("/a".repeat(LEVELS)));
            }),
        ),
        ("a name of 253 letters", with(&"x".repeat(253), &|_| {})),
        ("a container's name of 253 letters", with("name", &|pod| main(pod, "name", json!("x".repeat(253))))),
        (
            "the shortest grace period",
            with("grace", &|pod| {
                pod["spec"]["terminationGracePeriodSeconds"] = json!(i64::MIN);
                main(pod, "livenessProbe", failing.clone());
            }),
        ),
        (
            "the shortest grace period of a probe",
            with("probe-grace", &|pod| {
                let mut probe = failing.clone();
                probe["terminationGracePeriodSeconds"] = json!(i64::MIN);
                main(pod, "livenessProbe", probe);
            }),
        ),
        (
            "the longest deadline",
            with("deadline", &|pod| pod["spec"]["activeDeadlineSeconds"] = json!(i64::MAX)),
        ),
        (
            "the longest times of a probe",
            with("times", &|pod| {
                main(
                    pod,
                    "readinessProbe",
                    json!({
                        "exec": {"command": ["true"]}, "timeoutSeconds": i32::MAX, "failureThreshold": i32::MAX,
                    }),
                );
            }),
        ),
    ]
}

/// Waits for the outcome of each pod: pod name, name of the extreme value, extreme value.
async fn verdicts(node: &Node, mut open: Vec<(String, String, String)>, outcomes: &mut Outcomes) {
    let mut warned: BTreeMap<String, Instant> = BTreeMap::new();
    let mut ready: BTreeMap<String, Instant> = BTreeMap::new();
    until("a verdict on each pod", LONG * 3, async || {
        open.retain(|(name, what, extreme)| {
            let pod = node.api().get("pods", "default", name).unwrap_or_default();
            // Such a pod is Ready until its probe fails.
            if what.contains("grace period") {
                let is_restarted = pod["status"]["containerStatuses"][0]["restartCount"].as_i64() > Some(0);
                if is_restarted {
                    outcomes.note(what, extreme, "restarted by its probe");
                }
                return !is_restarted;
            }
            let warnings = warnings(node, name);
            let outcome = match verdict::of(&pod, &warnings) {
                // A runtime reports a container as running before it executes the command, which may fail.
                Some(PodOutcome::Good)
                    if ready.entry(name.clone()).or_insert_with(Instant::now).elapsed() < YET =>
                {
                    return true;
                }
                Some(PodOutcome::Good) if warnings.iter().any(|reason| reason == "FieldNotEnforced") => {
                    "Ready, FieldNotEnforced".to_owned()
                }
                Some(PodOutcome::Good) => "Ready".to_owned(),
                // The observed reason depends on the time of the check.
                Some(PodOutcome::Reason(reason))
                    if ["RunContainerError", "PostStartHookError", "ended"].contains(&reason.as_str()) =>
                {
                    "RunContainerError, PostStartHookError or ended".to_owned()
                }
                Some(PodOutcome::Reason(reason)) => reason,
                Some(PodOutcome::Warning(reason)) => {
                    if warned.entry(name.clone()).or_insert_with(Instant::now).elapsed() < YET {
                        return true;
                    }
                    reason
                }
                None => return true,
            };
            outcomes.note(what, extreme, outcome);
            false
        });
        let left: Vec<&str> = open.iter().map(|(name, ..)| &name[..name.len().min(40)]).collect();
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_with_extreme_sizes_or_unknown_values_get_their_reason() {
    let mut outcomes = Outcomes::default();
    beside_ordinary_pods("hostile-extremes", async |node| {
        for driver in drivers_of_migrated_types() {
            node.api().create("csidrivers", "", driver).unwrap();
        }
        let (mut uids, mut open) = (Vec::new(), Vec::new());
        for (what, pod) in extremes() {
            let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
            uids.push(create(node, pod));
            open.push((name, what.to_owned(), "API server".to_owned()));
        }
        let cases = Cases::of_pod();
        let mut owners = BTreeSet::new();
        for case in cases.all().iter().filter(|case| case.extreme == "unknown-word") {
            if !owners.insert(cases.owner(case)) {
                continue;
            }
            let name = format!("word-{}", owners.len());
            let mut pod = cases.pod(case, &name);
            for kind in ["containers", "initContainers"] {
                for container in pod["spec"][kind].as_array_mut().into_iter().flatten() {
                    container["image"] = json!(images::BUSYBOX);
                    if container["command"].is_null() {
                        container["command"] = json!(["sh", "-c", "trap 'exit 0' TERM; sleep 100000 & wait"]);
                    }
                }
            }
            if pod["spec"]["dnsPolicy"].is_null() {
                pod["spec"]["dnsPolicy"] = json!("Default");
            }
            match node.api().create("pods", "default", pods::bound(pod)) {
                Ok(made) => {
                    uids.push(made["metadata"]["uid"].as_str().unwrap().to_owned());
                    open.push((name, case.path.clone(), case.extreme.clone()));
                }
                Err(_) => outcomes.note(&case.path, &case.extreme, "refused by the API server"),
            }
        }
        verdicts(node, open, &mut outcomes).await;
        uids
    })
    .await;
    outcomes.assert_expected("node.txt");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn manifests_of_extreme_sizes_are_rejected_or_their_pods_get_their_reason() {
    let mut outcomes = Outcomes::default();
    beside_ordinary_pods("hostile-manifests", async |node| {
        let mut nested = pods::sleeper("nested");
        nested["spec"]["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
        nested["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
        let mut all = extremes();
        all.push(("an emptyDir of 20,000 levels", nested));
        for (n, (_, pod)) in all.iter().enumerate() {
            node.manifest(&format!("m{n}.yaml"), pod.to_string());
        }
        let mut open = Vec::new();
        for (n, (what, pod)) in all.iter().enumerate() {
            let file = format!("/m{n}.yaml");
            let name = format!("{}-{}", pod["metadata"]["name"].as_str().unwrap(), NODE);
            let problem = until(&format!("pod or problem of {what}"), LONG, async || {
                let (pods, problems) = node.list().await.map_err(|e| e.to_string())?;
                let problem = problems.into_iter().find(|p| p.origin.ends_with(&file));
                match problem {
                    Some(problem) => Ok(Some(problem)),
                    None if pods.iter().any(|p| p.pod["metadata"]["name"] == name) => Ok(None),
                    None => Err("neither".to_owned()),
                }
            })
            .await;
            match problem {
                Some(problem) => {
                    let kind: String = problem.message.chars().take(40).collect();
                    outcomes.note(what, "manifest", format!("refused: {}: {kind}", problem.field));
                }
                None => open.push((name, (*what).to_owned(), "manifest".to_owned())),
            }
        }
        let hash = |name: &str| {
            let mirror = node.api().get("pods", "default", name).unwrap_or_default();
            mirror["metadata"]["annotations"]["kubernetes.io/config.hash"].as_str().map(str::to_owned)
        };
        verdicts(node, open.clone(), &mut outcomes).await;
        let uids: Vec<String> = open.iter().map(|(name, ..)| hash(name).unwrap()).collect();
        let nested = hash(&format!("nested-{}", NODE)).unwrap();
        nest(&node.root_dir().join("pods").join(&nested).join("volumes/kubernetes.io~empty-dir/v"));
        for n in 0..all.len() {
            node.remove_manifest(&format!("m{n}.yaml"));
        }
        for uid in &uids {
            node.wait_gone(uid).await;
        }
        uids
    })
    .await;
    outcomes.assert_expected("node-manifests.txt");
}
