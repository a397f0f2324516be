//! The largest pods that an API server takes, in the simulation beside ordinary pods: texts that are
//! expanded, that are copied into a status or an event, or that each container repeats.

use std::collections::BTreeMap;
use std::time::Duration;

use quintlet_hostile::verdict::{self, PodOutcome};
use quintlet_simulation::{Options, Sim, pods};
use quintlet_testkit::fake_runtime::ExecReply;
use quintlet_testkit::wait::until;
use serde_json::{Value, json};

/// Bytes of the largest objects: [`ETCD`] without room for more than a short status.
const OBJECT: usize = 1_400_000;
/// Largest object that etcd takes.
const ETCD: usize = 1536 << 10;
/// Ordinary pods of a round.
const ORDINARY: usize = 4;
/// Bounds a failure only.
const LIMIT: Duration = Duration::from_secs(240);
/// Streams that stay open as long as both services run.
const STREAMS: [&str; 5] = [
    "Pleg.Watch",
    "Probe.Drive",
    "RuntimeEvents.Watch",
    "StatusReporter.NodeVolumes",
    "StatusReporter.Report",
];

/// A hostile pod and its verdict.
struct Hostile {
    name: &'static str,
    pod: Value,
    verdict: PodOutcome,
}

fn reason(reason: &str) -> PodOutcome {
    PodOutcome::Reason(reason.to_owned())
}

fn warning(reason: &str) -> PodOutcome {
    PodOutcome::Warning(reason.to_owned())
}

/// Returns a pod whose first container is changed.
fn with(name: &'static str, verdict: PodOutcome, change: impl FnOnce(&mut Value)) -> Hostile {
    let mut pod = pods::single(name);
    change(&mut pod["spec"]["containers"][0]);
    Hostile { name, pod, verdict }
}

fn text(bytes: usize) -> String {
    "x".repeat(bytes)
}

/// Returns a variable with half of the object, and the references to it that fill the other half.
fn variable() -> (Value, String) {
    (json!([{"name": "V", "value": text(OBJECT / 2)}]), "$(V)".repeat(OBJECT / 2 / 4))
}

/// Pods whose texts become longer where they are used.
fn expanded() -> Vec<Hostile> {
    let in_container = |name, field: &'static str, value: fn(String) -> Value| {
        with(name, reason("CreateContainerConfigError"), |container| {
            let (env, references) = variable();
            container["env"] = env;
            container[field] = value(references);
        })
    };
    let in_probe = |name, verdict, probe: &'static str| {
        with(name, verdict, |container| {
            let (env, references) = variable();
            container["env"] = env;
            container[probe] = json!({"exec": {"command": ["true", references]}, "periodSeconds": 1});
        })
    };
    vec![
        in_container("command", "command", |references| json!([references])),
        in_container("args", "args", |references| json!([references])),
        with("env", reason("CreateContainerConfigError"), |container| {
            let (env, references) = variable();
            container["env"] = env;
            container["env"].as_array_mut().unwrap().push(json!({"name": "W", "value": references}));
        }),
        with("prefix", reason("CreateContainerConfigError"), |container| {
            container["envFrom"] = json!([{"prefix": text(OBJECT), "configMapRef": {"name": "keys"}}]);
        }),
        with("field-refs", reason("CreateContainerConfigError"), |container| {
            let field = json!({"fieldRef": {"fieldPath": "metadata.annotations['large']"}});
            let variable = |n: usize| json!({"name": format!("V{n}"), "valueFrom": field});
            container["env"] = (0..5000).map(variable).collect();
        }),
        in_probe("liveness", PodOutcome::Good, "livenessProbe"),
        in_probe("readiness", warning("Unhealthy"), "readinessProbe"),
    ]
}

/// Pods whose texts are copied into a status, an event or a request.
fn copied() -> Vec<Hostile> {
    let probe = |handler: Value| json!({"httpGet": handler, "periodSeconds": 1});
    let hook = |kind: &str| json!({kind: {"exec": {"command": ["hook-fails", text(OBJECT)]}}});
    vec![
        with("image", reason("InvalidImageName"), |c| c["image"] = json!(format!("A{}", text(OBJECT)))),
        with("post-start", reason("PostStartHookError"), |c| c["lifecycle"] = hook("postStart")),
        with("pre-stop", PodOutcome::Good, |c| c["lifecycle"] = hook("preStop")),
        with("probe-path", warning("Unhealthy"), |c| {
            c["readinessProbe"] = probe(json!({"port": 1, "path": format!("/{}", text(OBJECT))}));
        }),
        with("probe-header", warning("Unhealthy"), |c| {
            c["readinessProbe"] =
                probe(json!({"port": 1, "httpHeaders": [{"name": "x", "value": text(OBJECT)}]}));
        }),
        with("probe-command", PodOutcome::Good, |c| {
            c["readinessProbe"] = json!({"exec": {"command": ["true", text(OBJECT)]}, "periodSeconds": 1});
        }),
        with("working-dir", PodOutcome::Good, |c| c["workingDir"] = json!(format!("/{}", text(OBJECT)))),
        with("variable", PodOutcome::Good, |c| c["env"] = json!([{"name": "V", "value": text(OBJECT)}])),
        with("long-command", PodOutcome::Good, |c| c["command"] = json!(["true", text(OBJECT)])),
    ]
}

/// Pods with many items, which fill the object.
fn repeated() -> Vec<Hostile> {
    let mut volumes = pods::single("volumes");
    let name = |n: usize| format!("v{n}-{}", text(55));
    let secret = |n: usize| {
        let items = json!([{"key": "k", "path": text(OBJECT / 600)}]);
        json!({"name": name(n), "secret": {"secretName": "missing", "items": items}})
    };
    let mount = |n: usize| json!({"name": name(n), "mountPath": format!("/v{n}")});
    volumes["spec"]["volumes"] = (0..500).map(secret).collect();
    volumes["spec"]["containers"][0]["volumeMounts"] = (0..500).map(mount).collect();
    let mut containers = pods::single("containers");
    let one = containers["spec"]["containers"][0].clone();
    let container = |n: usize| {
        let mut container = one.clone();
        container["name"] = json!(format!("c{n}"));
        container["env"] = json!([{"name": "V", "value": text(OBJECT / 60)},
            {"name": "W", "valueFrom": {"configMapKeyRef": {"name": "missing", "key": "k"}}}]);
        container
    };
    containers["spec"]["containers"] = (0..50).map(container).collect();
    let mut aliases = pods::single("host-aliases");
    aliases["spec"]["hostAliases"] = json!([{"ip": "192.0.2.1", "hostnames": vec![text(250); OBJECT / 260]}]);
    vec![
        Hostile { name: "volumes", pod: volumes, verdict: warning("FailedMount") },
        Hostile { name: "containers", pod: containers, verdict: reason("CreateContainerConfigError") },
        Hostile { name: "host-aliases", pod: aliases, verdict: PodOutcome::Good },
    ]
}

/// Returns how often each of [`STREAMS`] was opened.
pub(super) fn opened() -> BTreeMap<&'static str, u64> {
    let metrics = quintlet_telemetry::metrics::text();
    let count = |stream: &str| {
        let series = format!("quintlet_streams_opened_total{{stream=\"{stream}\"}} ");
        metrics.lines().find_map(|line| line.strip_prefix(&series)?.parse().ok()).unwrap_or_default()
    };
    STREAMS.map(|stream| (stream, count(stream))).into()
}

fn verdict(sim: &Sim, name: &str) -> Option<PodOutcome> {
    let warnings: Vec<String> = sim.warnings(name).into_iter().map(|event| event.reason).collect();
    verdict::of(&sim.pod(name).0, &warnings)
}

pub(super) fn ordinary(name: &str) -> Value {
    let mut pod = pods::single(name);
    pod["spec"]["containers"][0]["readinessProbe"] =
        json!({"exec": {"command": ["true"]}, "periodSeconds": 1});
    pod
}

/// Starts ordinary pods and deletes them.
async fn ordinary_pods_come_and_go(sim: &Sim, round: usize) {
    let names: Vec<String> = (0..ORDINARY).map(|n| format!("ordinary-{round}-{n}")).collect();
    let uids: Vec<String> = names.iter().map(|name| sim.create(ordinary(name))).collect();
    for (name, uid) in names.iter().zip(&uids) {
        sim.wait_ready(name).await;
        sim.assert_started_once(name, uid);
        assert_eq!(sim.warnings(name), [], "{name}");
        sim.delete(name, Some(0));
    }
    for (name, uid) in names.iter().zip(&uids) {
        sim.wait_gone(name).await;
        sim.wait_nothing_left(uid).await;
    }
}

/// Runs hostile pods beside ordinary ones: each has its verdict and can be deleted, ordinary pods come and go
/// and one stays Ready, and no stream between services ends.
async fn beside_ordinary_pods(hostile: Vec<Hostile>) {
    let sim = Sim::start(Options::default()).await;
    sim.api.limit_objects(ETCD);
    sim.runtime.on_exec(|_, command| ExecReply {
        exit_code: i32::from(command[0] == "hook-fails"),
        stdout: b"output of the hook".to_vec(),
        ..ExecReply::default()
    });
    let keys: BTreeMap<String, &str> = (0..1000).map(|n| (format!("K{n}"), "v")).collect();
    sim.api.create("configmaps", "default", json!({"metadata": {"name": "keys"}, "data": keys})).unwrap();
    let stays = sim.create(ordinary("stays"));
    sim.wait_ready("stays").await;
    let before = opened();
    assert!(before.values().all(|count| *count > 0), "{before:?}");
    let mut made = Vec::new();
    for Hostile { name, pod, .. } in &hostile {
        let mut pod = pod.clone();
        if *name == "field-refs" {
            pod["metadata"]["annotations"] = json!({"large": text(250_000)});
        }
        made.push((*name, sim.create(pod)));
    }
    ordinary_pods_come_and_go(&sim, 0).await;
    for Hostile { name, verdict: want, .. } in &hostile {
        until(&format!("{name}: {want:?}"), LIMIT, async || {
            let seen = verdict(&sim, name);
            if seen.as_ref() == Some(want) { Ok(()) } else { Err(seen) }
        })
        .await;
    }
    ordinary_pods_come_and_go(&sim, 1).await;
    for (name, _) in &made {
        sim.delete(name, Some(1));
    }
    ordinary_pods_come_and_go(&sim, 2).await;
    for (name, uid) in &made {
        sim.wait_gone(name).await;
        sim.wait_nothing_left(uid).await;
    }
    assert!(sim.pod("stays").is_ready());
    sim.assert_started_once("stays", &stays);
    assert_eq!(opened(), before, "a stream between services has ended");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_largest_expanded_texts_delay_no_ordinary_pod() {
    beside_ordinary_pods(expanded()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_largest_copied_texts_delay_no_ordinary_pod() {
    beside_ordinary_pods(copied()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_most_volumes_containers_and_host_names_delay_no_ordinary_pod() {
    beside_ordinary_pods(repeated()).await;
}
