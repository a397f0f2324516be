//! In-place resize of pods.

use std::path::PathBuf;
use std::time::Duration;

use nix::mount::MsFlags;
use quintlet_cri_api::v1;
use quintlet_cri_api::v1::UpdatePodSandboxResourcesRequest;
use quintlet_simulation::{LONG, Options, Seen, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{Method, Rule};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};
use tonic::Code;

const UPDATE: Method = Method::UpdateContainerResources;

/// Allocatable CPU of the node, in millicores.
fn cpu_milli() -> usize {
    std::thread::available_parallelism().unwrap().get() * 1000
}

fn both(cpu: &str, memory: &str) -> Value {
    json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}})
}

fn milli(cpu: usize) -> Value {
    json!({"requests": {"cpu": format!("{cpu}m")}})
}

fn sized(name: &str, resources: Value) -> Value {
    let mut pod = pods::single(name);
    pod["spec"]["containers"][0]["resources"] = resources;
    pod
}

/// Resizes a pod, like `kubectl edit --subresource resize`.
fn resize(sim: &Sim, name: &str, resources: Value) {
    let edit = |pod: &mut Value| pod["spec"]["containers"][0]["resources"] = resources;
    sim.api.edit("pods/resize", "default", name, edit).unwrap();
}

fn condition(seen: &Seen, kind: &str) -> Value {
    let all = seen.0["status"]["conditions"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|c| c["type"] == kind).unwrap_or_default()
}

fn status(seen: &Seen) -> Value {
    seen.0["status"]["containerStatuses"][0].clone()
}

/// Returns whether the status has these resources and no resize condition.
fn has(seen: &Seen, resources: &Value) -> bool {
    let s = status(seen);
    s["resources"] == *resources
        && s["allocatedResources"] == resources["requests"]
        && condition(seen, "PodResizePending").is_null()
        && condition(seen, "PodResizeInProgress").is_null()
}

/// Returns a value of the pod's cgroup.
fn group(sim: &Sim, uid: &str, class: &str, v1: (&str, &str), v2: &str) -> String {
    let file = group_file(sim, uid, class, v1, v2);
    std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display())).trim().to_owned()
}

fn group_file(sim: &Sim, uid: &str, class: &str, v1: (&str, &str), v2: &str) -> PathBuf {
    let below = |dir: PathBuf| {
        let kubepods = dir.join(sim.cgroup_root().trim_start_matches('/')).join("kubepods");
        kubepods.join(class).join(format!("pod{uid}"))
    };
    let root = PathBuf::from("/sys/fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        below(root).join(v2)
    } else {
        below(root.join(v1.0)).join(v1.1)
    }
}

fn group_memory(sim: &Sim, uid: &str) -> String {
    group(sim, uid, "", ("memory", "memory.limit_in_bytes"), "memory.max")
}

/// Returns memory limit, CPU quota and shares of each update.
fn updates(sim: &Sim) -> Vec<(i64, i64, i64)> {
    let calls = sim.runtime.calls_of(UPDATE);
    let linux = |c: v1::UpdateContainerResourcesRequest| c.linux.unwrap_or_default();
    let requests = calls.iter().map(|c| linux(c.request()));
    requests.map(|l| (l.memory_limit_in_bytes, l.cpu_quota, l.cpu_shares)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_grows_and_shrinks_while_it_runs() {
    const MIB: i64 = 1 << 20;
    let sim = Sim::start(Options::default()).await;
    let uid = sim.create(sized("web", both("500m", "64Mi")));
    let before = sim.wait_ready("web").await;
    let id = before.container("c-web").id;
    assert_eq!(group_memory(&sim, &uid), (64 * MIB).to_string());

    // The cgroup grows before the container.
    let hung = sim.runtime.hang(UPDATE);
    let large = both("1", "96Mi");
    resize(&sim, "web", large.clone());
    sim.wait_runtime("an update", |r| r.in_flight(UPDATE) == 1).await;
    assert_eq!(group_memory(&sim, &uid), (96 * MIB).to_string());
    let seen =
        sim.wait_pod("web", "resize in progress", |p| !condition(p, "PodResizeInProgress").is_null()).await;
    let shown = condition(&seen, "PodResizeInProgress");
    assert_eq!((shown["status"].as_str(), shown["observedGeneration"].as_i64()), (Some("True"), Some(2)));
    assert_eq!(status(&seen)["allocatedResources"], large["requests"]);
    assert_eq!(
        status(&seen)["resources"]["limits"],
        both("500m", "64Mi")["limits"],
        "it runs with these still"
    );
    sim.runtime.unscript(hung);
    let seen = sim.wait_pod("web", "larger", |p| has(p, &large)).await;
    assert_eq!(updates(&sim), [(96 * MIB, 50_000, 512), (96 * MIB, 100_000, 1024)], "memory, then cpu");
    assert_eq!(seen.container("c-web").id, id);

    // It shrinks after it.
    let hung = sim.runtime.hang(UPDATE);
    resize(&sim, "web", both("500m", "64Mi"));
    sim.wait_runtime("an update", |r| r.in_flight(UPDATE) == 1).await;
    assert_eq!(group_memory(&sim, &uid), (96 * MIB).to_string());
    sim.runtime.unscript(hung);
    sim.wait_pod("web", "as before", |p| has(p, &both("500m", "64Mi"))).await;
    assert_eq!(group_memory(&sim, &uid), (64 * MIB).to_string());
    assert_eq!(updates(&sim)[2..], [(64 * MIB, 100_000, 1024), (64 * MIB, 50_000, 512)]);
    for (reason, generation) in [("ResizeStarted", 3), ("ResizeCompleted", 3)] {
        let text = format!(
            r#"Pod resize {}: {{"containers":[{{"name":"c-web","resources":{{"limits":{{"cpu":"500m","memory":"64Mi"}},"requests":{{"cpu":"500m","memory":"64Mi"}}}}}}],"generation":{generation}}}"#,
            reason.trim_start_matches("Resize").to_lowercase()
        );
        sim.wait_event("web", reason, |e| e.kind == "Normal" && e.reason == reason && e.message == text)
            .await;
    }
    sim.assert_started_once("web", &uid);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_of_a_downward_volume_follow_a_resize() {
    let mut sim = Sim::prepare(Options::default()).await;
    // No periodic refresh intervenes.
    sim.set_pod_sync_args(&["--sync-frequency=1h"]);
    sim.start_all();
    let mut pod = sized("web", both("100m", "64Mi"));
    let field = |path: &str, resource: &str, divisor: &str| {
        let reference = json!({"containerName": "c-web", "resource": resource, "divisor": divisor});
        json!({"path": path, "resourceFieldRef": reference})
    };
    let items = [field("cpu", "limits.cpu", "1m"), field("memory", "requests.memory", "1Mi")];
    pod["spec"]["volumes"] = json!([{"name": "d", "downwardAPI": {"items": items}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "d", "mountPath": "/d"}]);
    let _uid = sim.create(pod);
    let before = sim.wait_ready("web").await;
    let dir = sim.root_dir().join("pods").join(before.uid()).join("volumes/kubernetes.io~downward-api/d");
    let read = |file: &str| std::fs::read_to_string(dir.join(file)).unwrap_or_else(|e| e.to_string());
    assert_eq!((read("cpu"), read("memory")), ("100".to_owned(), "64".to_owned()));
    let wanted = both("150m", "80Mi");
    resize(&sim, "web", wanted.clone());
    sim.wait_pod("web", "resized", |p| has(p, &wanted)).await;
    until("the files follow", LONG, async || {
        let got = (read("cpu"), read("memory"));
        if got == ("150".to_owned(), "80".to_owned()) { Ok(()) } else { Err(format!("{got:?}")) }
    })
    .await;
    assert_eq!(sim.wait_ready("web").await.container("c-web").restarts, 0);
    sim.finish().await;
}

const MEMORY_VOLUMES: &str = "--feature-gates=InPlacePodVerticalScalingMemoryBackedVolumes=true";

fn with_memory_volumes(name: &str, first: &str, second: &str) -> Value {
    let mut pod = sized(name, both("100m", "64Mi"));
    let volume =
        |name: &str, limit: &str| json!({"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": limit}});
    pod["spec"]["volumes"] = json!([volume("first", first), volume("second", second)]);
    pod["spec"]["containers"][0]["volumeMounts"] =
        json!([{"name": "first", "mountPath": "/first"}, {"name": "second", "mountPath": "/second"}]);
    pod
}

/// Resizes a pod and its two volumes.
fn resize_with_volumes(sim: &Sim, name: &str, resources: &Value, limits: [&str; 2]) {
    let edit = |pod: &mut Value| {
        pod["spec"]["containers"][0]["resources"] = resources.clone();
        for (at, limit) in limits.into_iter().enumerate() {
            pod["spec"]["volumes"][at]["emptyDir"]["sizeLimit"] = json!(limit);
        }
    };
    sim.api.edit("pods/resize", "default", name, edit).unwrap();
}

fn volume_mib(sim: &Sim, uid: &str, name: &str) -> u64 {
    let volumes = sim.root_dir().join("pods").join(uid).join("volumes/kubernetes.io~empty-dir");
    let size = nix::sys::statvfs::statvfs(&volumes.join(name)).unwrap();
    (size.blocks() * size.fragment_size()) >> 20
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_backed_volumes_follow_a_resize_in_order_and_after_a_restart() {
    let planted = Some("memory volumes resized with cgroup v1");
    let mut sim = Sim::prepare(Options { planted, ..Options::default() }).await;
    sim.set_pod_sync_args(&[MEMORY_VOLUMES]);
    sim.start_all();
    let uid = sim.create(with_memory_volumes("web", "8Mi", "8Mi"));
    sim.wait_ready("web").await;
    assert_eq!(["first", "second"].map(|v| volume_mib(&sim, &uid, v)), [8, 8]);
    // The first volume shrinks before the runtime is asked, the second one grows after it has answered.
    let refusal = sim.runtime.script(Rule::on(UPDATE).fail(Code::Unknown, "no"));
    let wanted = both("100m", "80Mi");
    resize_with_volumes(&sim, "web", &wanted, ["4Mi", "16Mi"]);
    let failed = |p: &Seen| condition(p, "PodResizeInProgress")["reason"] == "Error";
    sim.wait_pod("web", "refused by the runtime", failed).await;
    assert_eq!(["first", "second"].map(|v| volume_mib(&sim, &uid, v)), [4, 8]);
    // The next process knows what was applied.
    sim.restart(Service::PodSync).await;
    sim.runtime.unscript(refusal);
    sim.wait_pod("web", "resized", |p| has(p, &wanted)).await;
    assert_eq!(["first", "second"].map(|v| volume_mib(&sim, &uid, v)), [4, 16]);
    // A volume alone, and one that holds more than its new limit.
    resize_with_volumes(&sim, "web", &wanted, ["6Mi", "16Mi"]);
    until("the volume has grown", LONG, async || match volume_mib(&sim, &uid, "first") {
        6 => Ok(()),
        other => Err(other.to_string()),
    })
    .await;
    sim.wait_pod("web", "resized", |p| has(p, &wanted)).await;
    let volumes = sim.root_dir().join("pods").join(&uid).join("volumes/kubernetes.io~empty-dir");
    std::fs::write(volumes.join("second/file"), vec![1; 8 << 20]).unwrap();
    resize_with_volumes(&sim, "web", &wanted, ["6Mi", "4Mi"]);
    let text = "failed to resize volume \"second\": mount point not mounted or bad option";
    sim.wait_pod("web", "the volume is too full", |p| condition(p, "PodResizeInProgress")["message"] == text)
        .await;
    assert_eq!(volume_mib(&sim, &uid, "second"), 16);
    std::fs::remove_file(volumes.join("second/file")).unwrap();
    sim.wait_pod("web", "resized", |p| has(p, &wanted)).await;
    assert_eq!(volume_mib(&sim, &uid, "second"), 4);
    assert_eq!(sim.wait_ready("web").await.container("c-web").restarts, 0);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_backed_volumes_are_resized_with_cgroup_v2_only() {
    if std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        return;
    }
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&[MEMORY_VOLUMES]);
    sim.start_all();
    let uid = sim.create(with_memory_volumes("web", "8Mi", "8Mi"));
    sim.wait_ready("web").await;
    resize_with_volumes(&sim, "web", &both("100m", "64Mi"), ["8Mi", "16Mi"]);
    let pending = sim.wait_pod("web", "infeasible", |p| !condition(p, "PodResizePending").is_null()).await;
    let pending = condition(&pending, "PodResizePending");
    assert_eq!(pending["reason"], "Infeasible");
    assert_eq!(pending["message"], "In-place resize of memory-backed volumes requires cgroup v2");
    assert_eq!(volume_mib(&sim, &uid, "second"), 8);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resize_of_a_memory_backed_volume_without_the_feature_is_an_event() {
    let sim = Sim::start(Options::default()).await;
    let _uid = sim.create(with_memory_volumes("web", "8Mi", "8Mi"));
    sim.wait_ready("web").await;
    resize_with_volumes(&sim, "web", &both("100m", "64Mi"), ["8Mi", "16Mi"]);
    let text =
        "Pod requires node features that are not available: InPlacePodVerticalScalingMemoryBackedVolumes";
    sim.wait_event("web", text, |e| e.reason == "FailedNodeDeclaredFeaturesCheck" && e.message == text).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resize_that_does_not_fit_waits_until_another_pod_terminates() {
    let sim = Sim::start(Options::default()).await;
    let large = cpu_milli() - 500;
    let _uid = sim.create(sized("large", milli(large)));
    for (name, priority) in [("low", 1), ("high", 2)] {
        let mut pod = sized(name, milli(100));
        pod["spec"]["priority"] = json!(priority);
        let _uid = sim.create(pod);
        sim.wait_ready(name).await;
    }
    sim.wait_ready("large").await;
    let wanted = cpu_milli() - 200;
    for name in ["low", "high"] {
        resize(&sim, name, milli(wanted));
        let seen = sim
            .wait_pod(name, "deferred", |p| condition(p, "PodResizePending")["reason"] == "Deferred")
            .await;
        let shown = condition(&seen, "PodResizePending");
        let text = format!(
            "Node didn't have enough resource: cpu, requested: {wanted}, used: {}, capacity: {}",
            large + 100,
            cpu_milli()
        );
        assert_eq!(shown["message"], text.as_str());
        assert_eq!((shown["status"].as_str(), shown["observedGeneration"].as_i64()), (Some("True"), Some(2)));
        assert_eq!(status(&seen)["allocatedResources"], milli(100)["requests"]);
        sim.wait_event(name, "deferred", |e| {
            e.kind == "Warning"
                && e.reason == "ResizeDeferred"
                && e.message.starts_with("Pod resize OutOfcpu: {")
                && e.message.contains(&text)
        })
        .await;
    }
    assert_eq!(updates(&sim), []);
    sim.delete("large", Some(0));
    // There is room for one resize, and the other one was requested first.
    sim.wait_pod("high", "resized", |p| has(p, &milli(wanted))).await;
    let low = sim.pod("low");
    assert_eq!(condition(&low, "PodResizePending")["reason"], "Deferred");
    // A resize to the allocated resources does not wait.
    resize(&sim, "low", milli(100));
    sim.wait_pod("low", "as it was", |p| has(p, &milli(100))).await;
    assert_eq!(updates(&sim).len(), 1);
    assert_eq!((sim.pod("low").restarts(), sim.pod("high").restarts()), (0, 0));
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shrunk_pod_holds_its_resources_until_the_runtime_has_reduced_them() {
    let sim = Sim::start(Options::default()).await;
    let large = cpu_milli() - 500;
    for (name, cpu) in [("large", large), ("small", 100)] {
        let _uid = sim.create(sized(name, milli(cpu)));
        sim.wait_ready(name).await;
    }
    let hung = sim.runtime.hang(UPDATE);
    resize(&sim, "large", milli(100));
    sim.wait_runtime("an update", |r| r.in_flight(UPDATE) == 1).await;
    resize(&sim, "small", milli(large));
    let deferred = |p: &Seen| condition(p, "PodResizePending")["reason"] == "Deferred";
    let seen = sim.wait_pod("small", "deferred", deferred).await;
    let text = format!(
        "Node didn't have enough resource: cpu, requested: {large}, used: {large}, capacity: {}",
        cpu_milli()
    );
    assert_eq!(condition(&seen, "PodResizePending")["message"], text.as_str());
    let _uid = sim.create(sized("new", milli(500)));
    let seen = sim.wait_pod("new", "rejected", |p| p.phase() == "Failed").await;
    assert_eq!(seen.text("/status/reason"), "OutOfcpu", "{seen:?}");
    sim.runtime.unscript(hung);
    sim.wait_pod("large", "smaller", |p| has(p, &milli(100))).await;
    let reduced = std::time::Instant::now();
    sim.wait_pod("small", "larger", |p| has(p, &milli(large))).await;
    assert!(reduced.elapsed() < Duration::from_secs(10), "{:?}", reduced.elapsed());
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_critical_pods_resize_preempts_other_pods() {
    let sim = Sim::start(Options::default()).await;
    let victim = cpu_milli() - 500;
    let _uid = sim.create(sized("victim", milli(victim)));
    let mut pod = sized("critical", milli(100));
    pod["spec"]["priority"] = json!(2_000_000_000);
    let _uid = sim.create(pod);
    for name in ["victim", "critical"] {
        sim.wait_ready(name).await;
    }
    resize(&sim, "critical", milli(1000));
    sim.wait_event("victim", "Preempting", |e| e.reason == "Preempting").await;
    sim.wait_pod("critical", "resized", |p| has(p, &milli(1000))).await;
    let seen = sim.wait_pod("victim", "over", |p| p.phase() == "Failed").await;
    assert_eq!(seen.text("/status/reason"), "Preempting");
    let preempted = sim.events("victim").into_iter().filter(|e| e.reason == "Preempting");
    assert_eq!(preempted.map(|e| e.count).sum::<i64>(), 1, "no pod is terminated twice");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_critical_pods_resize_preempts_no_pod_if_the_scheduler_does() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&["--feature-gates=InPlacePodVerticalScalingSchedulerPreemption=true"]);
    sim.start_all();
    let other = cpu_milli() - 500;
    let _uid = sim.create(sized("other", milli(other)));
    let mut pod = sized("critical", milli(100));
    pod["spec"]["priority"] = json!(2_000_000_000);
    let _uid = sim.create(pod);
    for name in ["other", "critical"] {
        sim.wait_ready(name).await;
    }
    resize(&sim, "critical", milli(1000));
    let pending = sim.wait_pod("critical", "deferred", |p| !condition(p, "PodResizePending").is_null()).await;
    let pending = condition(&pending, "PodResizePending");
    let text = format!(
        "Node didn't have enough resource: cpu, requested: 1000, used: {other}, capacity: {}",
        cpu_milli()
    );
    assert_eq!((&pending["reason"], &pending["message"]), (&json!("Deferred"), &json!(text)));
    assert!(sim.pod("other").is_ready());
    assert_eq!(sim.warnings("other"), []);
    // The scheduler preempts the other pod.
    sim.delete("other", Some(0));
    sim.wait_pod("critical", "resized", |p| has(p, &milli(1000))).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_critical_pods_resize_waits_for_a_preempted_pod_that_hangs_and_affects_no_other_pod() {
    let sim = Sim::start(Options::default()).await;
    let victim = cpu_milli() - 500;
    let uid = sim.create(sized("victim", milli(victim)));
    let mut pod = sized("critical", milli(100));
    pod["spec"]["priority"] = json!(2_000_000_000);
    let _uid = sim.create(pod);
    let _uid = sim.create(sized("small", milli(50)));
    for name in ["victim", "critical", "small"] {
        sim.wait_ready(name).await;
    }
    let id = sim.runtime.newest(&uid, "c-victim").unwrap().id().to_owned();
    let hung = sim.runtime.script(Rule::on(Method::StopContainer).about(&id).hang());
    resize(&sim, "critical", milli(1000));
    sim.wait_runtime("the victim's stop", |r| r.in_flight(Method::StopContainer) == 1).await;
    let waits = sim.wait_pod("critical", "deferred", |p| !condition(p, "PodResizePending").is_null()).await;
    assert_eq!(condition(&waits, "PodResizePending")["reason"], "Deferred");
    // Enough time for the resize to be retried: the smaller one, which comes after it, is actuated.
    resize(&sim, "small", milli(60));
    sim.wait_pod("small", "resized", |p| has(p, &milli(60))).await;
    assert_eq!(updates(&sim).len(), 1, "nothing is given to the critical one that is not free");
    assert_eq!(sim.pod("small").phase(), "Running", "no other makes room in its place");
    assert!(sim.pod("critical").is_ready());
    sim.runtime.unscript(hung);
    sim.wait_pod("critical", "resized", |p| has(p, &milli(1000))).await;
    let preempted = sim.events("victim").into_iter().filter(|e| e.reason == "Preempting");
    assert_eq!(preempted.map(|e| e.count).sum::<i64>(), 1, "no pod is terminated twice");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sandbox_gets_its_current_resources_if_its_cgroup_cannot_be_changed() {
    const MIB: i64 = 1 << 20;
    let sim = Sim::start(Options::default()).await;
    sim.runtime.update_sandboxes(true);
    let uid = sim.create(sized("web", both("500m", "64Mi")));
    sim.wait_ready("web").await;
    let file = group_file(&sim, &uid, "", ("memory", "memory.limit_in_bytes"), "memory.max");
    // The kernel rejects values for it from here on.
    let (none, bind) = (None::<&str>, MsFlags::MS_BIND);
    nix::mount::mount(Some(&file), &file, none, bind, none).unwrap();
    nix::mount::mount(none, &file, none, bind | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY, none).unwrap();
    let large = both("500m", "96Mi");
    resize(&sim, "web", large.clone());
    sim.wait_pod("web", "refused", |p| condition(p, "PodResizeInProgress")["reason"] == "Error").await;
    sim.wait_event("web", "ResizeError", |e| e.kind == "Warning" && e.reason == "ResizeError").await;
    let sent = || {
        let calls = sim.runtime.calls_of(Method::UpdatePodSandboxResources);
        let resources = calls.iter().map(|c| c.request::<UpdatePodSandboxResourcesRequest>().resources);
        resources.map(|r| r.unwrap_or_default()).collect::<Vec<_>>()
    };
    let memory: Vec<i64> = sent().iter().map(|r| r.memory_limit_in_bytes).collect();
    assert_eq!(memory[..2], [96 * MIB, 64 * MIB], "{memory:?}");
    let back = &sent()[1];
    assert_eq!((back.cpu_quota, back.cpu_period), (50_000, 100_000), "all values are unchanged: {back:?}");
    assert_eq!((updates(&sim), group_memory(&sim, &uid)), (vec![], (64 * MIB).to_string()));
    nix::mount::umount(&file).unwrap();
    sim.wait_pod("web", "larger", |p| has(p, &large)).await;
    assert_eq!(sent().last().unwrap().memory_limit_in_bytes, 96 * MIB);
    assert_eq!(group_memory(&sim, &uid), (96 * MIB).to_string());
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resize_to_another_qos_class_is_refused_by_the_api_server() {
    let sim = Sim::start(Options::default()).await;
    let _uid = sim.create(sized("web", milli(100)));
    sim.wait_ready("web").await;
    let edit = |pod: &mut Value| pod["spec"]["containers"][0]["resources"] = both("100m", "64Mi");
    let refused = format!("{:?}", sim.api.edit("pods/resize", "default", "web", edit).unwrap_err());
    assert!(refused.contains("Pod QOS Class may not change as a result of resizing"), "{refused}");
    resize(&sim, "web", milli(200));
    sim.wait_pod("web", "resized within its class", |p| has(p, &milli(200))).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_static_pod_is_not_resized() {
    let sim = Sim::start(Options::default()).await;
    let mut pod = pods::manifest("own");
    pod["metadata"]["uid"] = json!("fixed-1");
    pod["spec"]["containers"][0]["resources"] = milli(100);
    sim.manifest("own", &pod);
    let name = format!("own-{}", quintlet_simulation::NODE);
    let id = sim.wait_ready(&name).await.container("c-own").id;
    pod["spec"]["containers"][0]["resources"] = milli(200);
    sim.manifest("own", &pod);
    let infeasible = |p: &Seen| condition(p, "PodResizePending")["reason"] == "Infeasible";
    let seen = sim.wait_pod(&name, "infeasible", infeasible).await;
    let text = "In-place resize of static-pods is not supported";
    assert_eq!(condition(&seen, "PodResizePending")["message"], text);
    sim.wait_event(&name, "infeasible", |e| e.reason == "ResizeInfeasible" && e.message.contains(text)).await;
    sim.wait_ready(&name).await;
    assert_eq!(sim.pod(&name).container("c-own").id, id, "the container keeps running unchanged");
    assert_eq!(updates(&sim), []);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_with_a_restart_policy_for_resizes_is_restarted_with_its_new_resources() {
    let sim = Sim::start(Options::default()).await;
    let mut pod = sized("web", both("500m", "64Mi"));
    pod["spec"]["containers"][0]["resizePolicy"] =
        json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
    let uid = sim.create(pod);
    sim.wait_ready("web").await;
    resize(&sim, "web", both("500m", "96Mi"));
    sim.wait_pod("web", "resized", |p| p.is_ready() && has(p, &both("500m", "96Mi"))).await;
    assert_eq!(sim.pod("web").restarts(), 1);
    assert_eq!(updates(&sim), [], "by a new instance");
    let made = sim.runtime.calls_of(Method::CreateContainer);
    let memory = made.iter().map(|c| {
        let config = c.request::<v1::CreateContainerRequest>().config.unwrap_or_default();
        config.linux.and_then(|l| l.resources).unwrap_or_default().memory_limit_in_bytes
    });
    assert_eq!(memory.collect::<Vec<_>>(), [64 << 20, 96 << 20]);
    assert_eq!(group_memory(&sim, &uid), (96 << 20).to_string());
    sim.wait_event("web", "Killing", |e| e.message == "Container c-web resize requires restart").await;

    // The other resource does not require a restart.
    resize(&sim, "web", both("250m", "96Mi"));
    sim.wait_pod("web", "resized", |p| has(p, &both("250m", "96Mi"))).await;
    assert_eq!((sim.pod("web").restarts(), updates(&sim).len()), (1, 1));
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_call_is_reported_and_retried() {
    let sim = Sim::start(Options::default()).await;
    let uid = sim.create(sized("web", both("500m", "64Mi")));
    sim.wait_ready("web").await;
    let used = 40 << 20;
    sim.runtime.use_memory("c-web", used);
    resize(&sim, "web", both("500m", "32Mi"));
    let text = format!(
        "cannot decrease memory limits: attempting to set container \"c-web\" memory limit ({}) below current usage ({used})",
        32 << 20
    );
    let failing = |text: &str, p: &Seen| {
        let shown = condition(p, "PodResizeInProgress");
        shown["reason"] == "Error" && shown["message"] == text
    };
    sim.wait_pod("web", "refused", |p| failing(&text, p)).await;
    sim.wait_event("web", "refused", |e| {
        e.kind == "Warning"
            && e.reason == "ResizeError"
            && e.message.contains("cannot decrease memory limits")
    })
    .await;
    assert_eq!((updates(&sim), group_memory(&sim, &uid)), (vec![], (64 << 20).to_string()));

    // An error of the runtime, once usage is lower.
    let refusal = sim.runtime.script(Rule::on(UPDATE).fail(Code::Unknown, "no such cgroup"));
    sim.runtime.use_memory("c-web", 1 << 20);
    sim.wait_pod("web", "refused by the runtime", |p| failing("no such cgroup", p)).await;
    sim.runtime.unscript(refusal);
    sim.wait_pod("web", "smaller", |p| has(p, &both("500m", "32Mi"))).await;
    assert_eq!(group_memory(&sim, &uid), (32 << 20).to_string());
    assert_eq!(sim.pod("web").restarts(), 0);
    sim.finish().await;
}

/// Kills pod-sync when the `nth` update reaches the runtime, before or after its effect.
async fn killed_in_the_middle(sim: &Sim, nth: usize, after: bool) {
    let name = format!("p{nth}{after}");
    let _uid = sim.create(sized(&name, both("50m", "64Mi")));
    let id = sim.wait_ready(&name).await.container(&format!("c-{name}")).id;
    let bare = id.rsplit('/').next().unwrap().to_owned();
    let rule = Rule::on(UPDATE).about(&bare);
    let slow = (!after).then(|| sim.runtime.script(rule.latency(Duration::from_millis(40))));
    resize(sim, &name, both("100m", "96Mi"));
    until("the update", LONG, async || {
        let update_calls = sim.calls_about(UPDATE, &bare);
        let worked = update_calls - if update_calls > 0 { sim.runtime.in_flight(UPDATE) } else { 0 };
        if if after { worked } else { update_calls } >= nth { Ok(()) } else { Err(update_calls) }
    })
    .await;
    sim.restart(Service::PodSync).await;
    if let Some(slow) = slow {
        sim.runtime.unscript(slow);
    }
    let seen = sim.wait_pod(&name, "larger", |p| p.is_ready() && has(p, &both("100m", "96Mi"))).await;
    assert_eq!((seen.container(&format!("c-{name}")).id, seen.restarts()), (id, 0), "{name}");
    sim.wait_event(&name, "completed", |e| e.reason == "ResizeCompleted").await;
    assert_eq!(sim.warnings(&name), [], "{name}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resize_survives_a_kill_at_each_call_of_the_runtime() {
    let sim = Sim::start(Options::default()).await;
    for nth in [1, 2] {
        for after in [false, true] {
            killed_in_the_middle(&sim, nth, after).await;
        }
    }
    sim.finish().await;
}

/// A fault of the checkpoints while pod-sync is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spoilt {
    No,
    /// They are deleted.
    Lost,
    /// Their checksums are wrong.
    Corrupt,
    /// They and the records in the run directory are deleted, as after a reboot; containers keep running.
    AllLost,
}

async fn restarted_with(spoilt: Spoilt) {
    let sim = Sim::start(Options::default()).await;
    let name = "deferred";
    let _uid = sim.create(sized("large", milli(cpu_milli() - 500)));
    let uid = sim.create(sized(name, milli(100)));
    for name in ["large", name] {
        sim.wait_ready(name).await;
    }
    resize(&sim, name, milli(1000));
    let waits = |p: &Seen| condition(p, "PodResizePending")["reason"] == "Deferred";
    sim.wait_pod(name, "deferred", waits).await;
    sim.wait_event(name, "deferred", |e| e.reason == "ResizeDeferred").await;
    sim.stop(Service::PodSync).await;
    for file in ["allocated_pods_state", "actuated_pods_state"].map(|f| sim.root_dir().join(f)) {
        match spoilt {
            Spoilt::No => assert!(file.exists()),
            Spoilt::Lost | Spoilt::AllLost => std::fs::remove_file(&file).unwrap(),
            Spoilt::Corrupt => {
                let text = std::fs::read_to_string(&file).unwrap();
                std::fs::write(&file, text.replace("100m", "900m")).unwrap();
            }
        }
    }
    if spoilt == Spoilt::AllLost {
        std::fs::remove_dir_all(sim.paths().state_dir()).unwrap();
    }
    sim.up(Service::PodSync);
    // pod-sync has retried pending resizes once it has synced a pod that came later.
    let _uid = sim.create(sized("later", milli(10)));
    sim.wait_ready("later").await;
    let seen = sim.pod(name);
    assert!(waits(&seen) && seen.is_ready(), "{spoilt:?}: it runs on and waits on: {seen:?}");
    assert_eq!(status(&seen)["allocatedResources"], milli(100)["requests"], "{spoilt:?}");
    assert_eq!(updates(&sim), [], "{spoilt:?}: nothing was changed");
    let corrupt = sim.root_dir().join("allocated_pods_state.corrupt").exists();
    assert_eq!(corrupt, spoilt == Spoilt::Corrupt);
    sim.delete("large", Some(0));
    let seen = sim.wait_pod(name, "resized", |p| has(p, &milli(1000))).await;
    assert_eq!(seen.restarts(), 0);
    let deferrals = sim.events(name).into_iter().filter(|e| e.reason == "ResizeDeferred");
    assert_eq!(deferrals.map(|e| e.count).sum::<i64>(), 1, "{spoilt:?}: the event is not repeated");
    assert_eq!(sim.sandboxes(&uid).len(), 1);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pending_resize_survives_a_restart() {
    restarted_with(Spoilt::No).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_checkpoint_changes_nothing() {
    restarted_with(Spoilt::Lost).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_corrupt_checkpoint_is_moved_aside_and_changes_nothing() {
    restarted_with(Spoilt::Corrupt).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_record_the_allocation_is_taken_from_the_status() {
    restarted_with(Spoilt::AllLost).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_checkpoints_that_a_kubelet_reads_have_changes_from_before_a_crash() {
    let sim = Sim::start(Options::default()).await;
    let files = ["allocated_pods_state", "actuated_pods_state"].map(|f| sim.root_dir().join(f));
    let _uid = sim.create(sized("first", milli(100)));
    sim.wait_ready("first").await;
    // After a write, the files are not written for ten seconds.
    until("a file", LONG, async || if files[0].exists() { Ok(()) } else { Err("it is not written yet") })
        .await;
    let uid = sim.create(sized("second", milli(200)));
    sim.wait_ready("second").await;
    sim.restart(Service::PodSync).await;
    sim.wait_ready("second").await;
    sim.stop(Service::PodSync).await;
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(text.contains(&uid), "{}: {text}", file.display());
    }
    sim.up(Service::PodSync);
    sim.finish().await;
}
