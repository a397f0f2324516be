//! Limits of pods and pressure on the node, on a real runtime: a full file system of images, local storage,
//! memory, CPU, process IDs.

use std::path::PathBuf;
use std::time::Duration;

use quintlet_e2e::NODE;
use quintlet_e2e::registry::Registry;
use quintlet_e2e::{LONG, Node, Options, Seen, pods, until};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

/// Runs until it is stopped.
const WAIT: &str = "trap 'exit 0' TERM; sleep 100000 & wait";

/// Options of a node whose figures about volumes are at most 2 s old.
pub(crate) fn options(name: &'static str, pod_sync: &[&str]) -> Options {
    let args = ["--eviction-pressure-transition-period=5s", "--volume-stats-agg-period=2s"];
    let extra = args.iter().chain(pod_sync).map(|arg| ("pod-sync", (*arg).to_owned())).collect();
    Options { extra, ..Options::with_api(name) }
}

/// A pod that runs a command, then waits.
pub(crate) fn after(name: &str, command: &str) -> Value {
    pods::bound(pods::script(name, &format!("{command}; {WAIT}")))
}

fn with_volume(mut pod: Value, volume: &Value) -> Value {
    pod["spec"]["volumes"] = json!([{"name": "v", "emptyDir": volume}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    pod
}

fn with_limits(mut pod: Value, limits: &Value) -> Value {
    pod["spec"]["containers"][0]["resources"] = json!({"limits": limits});
    pod
}

fn condition(object: &Value, kind: &str) -> Value {
    let all = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|c| c["type"] == kind).unwrap_or_default()
}

fn is_evicted(pod: &Value) -> bool {
    pod["status"]["phase"] == "Failed" && pod["status"]["reason"] == "Evicted"
}

/// Interval between two rounds of evictions that a test requests.
const ROUND: Duration = Duration::from_millis(500);

/// Waits, and requests rounds of evictions meanwhile. Rounds without a request are 10 s apart; `eviction.rs`
/// waits for those.
async fn with_rounds<T>(node: &Node, wait: impl Future<Output = T>) -> T {
    let rounds = async {
        loop {
            // pod-sync may be restarting.
            let _refused = node.quintctl(&["pressure", "-o", "json"]).output().await;
            sleep(ROUND).await;
        }
    };
    // Either arm may be dropped: a request is repeated.
    tokio::select! {
        found = wait => found,
        () = rounds => unreachable!("rounds have no end"),
    }
}

async fn evicted(node: &Node, name: &str) -> String {
    let pod = node.api().wait_for("pods", "default", name, LONG, is_evicted).await;
    pod["status"]["message"].as_str().unwrap_or_default().to_owned()
}

/// Waits for the eviction of a pod, and requests rounds of evictions meanwhile.
pub(crate) async fn evicted_by_request(node: &Node, name: &str) -> String {
    with_rounds(node, evicted(node, name)).await
}

pub(crate) async fn ready(node: &Node, name: &str) -> Seen {
    let is_ready = |p: &Value| Seen::from_api(p.clone()).is_ready();
    Seen::from_api(node.api().wait_for("pods", "default", name, LONG, is_ready).await)
}

pub(crate) fn now(node: &Node, name: &str) -> Seen {
    Seen::from_api(node.api().get("pods", "default", name).unwrap())
}

/// A container's wait for [`let_go`].
const HOLD: &str = "until [ -e /go/now ]; do sleep 0.05; done";

/// Adds the directory of [`let_go`] to all containers of a pod.
fn held(node: &Node, pod: Value) -> Value {
    pods::with_dir(pod, &node.scratch(), "/go")
}

/// Ends the wait of held pods once the runtime has started the first container of each. A runtime subscribes
/// to the kernel's notification of a lack of memory after it has executed the container's process, and misses
/// an earlier kill.
async fn let_go(node: &Node, names: &[&str]) {
    for name in names {
        let runs = |pod: &Value| {
            ["initContainerStatuses", "containerStatuses"]
                .into_iter()
                .any(|kind| pod["status"][kind][0]["state"]["running"].is_object())
        };
        node.api().wait_for("pods", "default", name, LONG, runs).await;
    }
    std::fs::write(node.scratch().join("now"), "").unwrap();
}

/// The state of the first container once it has terminated.
async fn terminated(node: &Node, name: &str) -> Value {
    let state = |p: &Value| p["status"]["containerStatuses"][0]["state"]["terminated"].clone();
    let pod = node.api().wait_for("pods", "default", name, LONG, |p| !state(p).is_null()).await;
    state(&pod)
}

pub(crate) async fn node_condition(node: &Node, kind: &str, status: &str) {
    let wait = node.api().wait_for("nodes", "", NODE, LONG, |n| condition(n, kind)["status"] == status);
    with_rounds(node, wait).await;
}

async fn pressure(node: &Node) -> Value {
    let done = node.quintctl(&["pressure", "-o", "json"]).output().await.unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    serde_json::from_slice(&done.stdout).unwrap()
}

/// The signal in the output of `quintctl pressure`, once it was measured.
async fn signal(node: &Node, name: &str) -> Value {
    until("a measurement of the node", LONG, async || {
        let all = pressure(node).await;
        let found = all["signals"].as_array().unwrap().iter().find(|s| s["signal"] == name).cloned();
        found.ok_or(all)
    })
    .await
}

/// Directory of a pod's cgroup in a hierarchy of cgroup v1, or in the only one of v2.
fn cgroup(node: &Node, controller: &str, pod: &Seen) -> PathBuf {
    let class = pod.text("/status/qosClass").to_lowercase();
    let mut dir = PathBuf::from("/sys/fs/cgroup");
    if !is_v2() {
        dir.push(controller);
    }
    dir.push(node.containerd.cgroup_root().trim_start_matches('/'));
    dir.push("kubepods");
    if class != "guaranteed" {
        dir.push(class);
    }
    dir.join(format!("pod{}", pod.uid()))
}

fn is_v2() -> bool {
    std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists()
}

fn number(file: &std::path::Path) -> u64 {
    std::fs::read_to_string(file).unwrap().trim().parse().unwrap()
}

fn field(file: &std::path::Path, name: &str) -> u64 {
    let text = std::fs::read_to_string(file).unwrap();
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_file_system_of_images_costs_the_pod_that_filled_its_writable_layer() {
    let registry = Registry::start().await;
    registry.push("unused:1");
    let unused = registry.reference("unused:1");
    let mut options = options(
        "pressure-images",
        &[
            "--eviction-hard=imagefs.available<100Mi",
            "--image-gc-high-threshold=99",
            "--minimum-image-ttl-duration=0s",
        ],
    );
    (options.root_disk_mib, options.image_disk_mib) = (Some(256), Some(256));
    let node = Node::start(options).await;
    let api = node.api();

    let mut left = after("left", "true");
    left["spec"]["containers"][0]["image"] = json!(unused);
    api.create_pod(left);
    let left = ready(&node, "left").await;
    api.delete("pods", "default", "left", None).unwrap();
    node.wait_gone(left.uid()).await;
    let mut done = pods::bound(pods::script("done", "true"));
    done["spec"]["restartPolicy"] = json!("Never");
    api.create_pod(done);
    terminated(&node, "done").await;
    let done = now(&node, "done");
    // The first container fails and stays: a running pod keeps one dead container.
    let restarted = "test -e /v/again || { touch /v/again; exit 3; }";
    api.create_pod(with_volume(after("restarted", restarted), &json!({})));
    let is_restarted = |p: &Value| {
        p["status"]["containerStatuses"][0]["restartCount"] == 1 && Seen::from_api(p.clone()).is_ready()
    };
    let restarted = Seen::from_api(api.wait_for("pods", "default", "restarted", LONG, is_restarted).await);
    for (pod, containers) in [(&done, 1), (&restarted, 2)] {
        assert_eq!(node.listed().await.attempts(pod.uid(), "main").len(), containers);
    }
    // A volume is on another file system.
    api.create_pod(with_volume(after("neighbour", "dd if=/dev/zero of=/v/file bs=1M count=60"), &json!({})));
    let neighbour = ready(&node, "neighbour").await;

    // The runtime measures layers every 10 s. Before the threshold is crossed, it has measured that this one
    // is the largest.
    let write = |file: &str| format!("dd if=/dev/zero of={file} bs=1M count=80");
    api.create_pod(held(&node, after("filler", &format!("{}; {HOLD}; {}", write("/file"), write("/more")))));
    let filler = ready(&node, "filler").await;
    until("the writable layer is measured", LONG, async || {
        match quintlet_e2e::runtime::written(node.cri(), filler.uid()).await {
            Ok(bytes) if bytes >= 80 << 20 => Ok(()),
            other => Err(other),
        }
    })
    .await;
    let_go(&node, &["filler"]).await;
    let message = evicted_by_request(&node, "filler").await;
    assert!(
        message.starts_with(
            "The node was low on resource: ephemeral-storage. Threshold quantity: 100Mi, available: "
        ),
        "{message}"
    );
    let listed = node.listed().await;
    assert!(listed.attempts(done.uid(), "main").is_empty(), "the containers of terminated pods go first");
    assert_eq!(listed.attempts(restarted.uid(), "main").len(), 2);
    let [of_images, of_layers] = quintlet_e2e::runtime::file_systems(node.cri()).await.unwrap();
    assert!(
        !of_images.is_empty() && of_layers.is_empty(),
        "containerd reports none for layers: {of_layers:?}"
    );
    let images = quintlet_e2e::runtime::images(node.cri()).await.unwrap();
    assert!(!images.contains(&unused), "the unused image went first: {images:?}");
    node_condition(&node, "DiskPressure", "True").await;
    node_condition(&node, "DiskPressure", "False").await;
    for (name, before) in [("neighbour", &neighbour), ("restarted", &restarted)] {
        assert_eq!(now(&node, name).container("main"), before.container("main"), "{name}");
    }
    let evictions = "kubelet_evictions{eviction_signal=\"imagefs.available\"}";
    assert_eq!(node.counter("pod-sync", evictions).await, 1);
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_above_a_limit_of_local_storage_is_evicted_and_its_neighbour_is_not() {
    let node = Node::start(options("pressure-storage", &["--eviction-hard=memory.available<0%"])).await;
    let api = node.api();
    let write = |file: &str, mib: u32| format!("dd if=/dev/zero of={file} bs=1M count={mib}");
    let storage = |limit: &str| json!({"ephemeral-storage": limit});

    // The sum of the limits is not exceeded.
    let mut one = with_limits(after("container", &write("/file", 8)), &storage("4Mi"));
    let mut other = with_limits(after("x", "true"), &storage("1Gi"))["spec"]["containers"][0].clone();
    other["name"] = json!("other");
    one["spec"]["containers"].as_array_mut().unwrap().push(other);
    api.create_pod(one);
    let mut sidecar =
        with_limits(after("x", &write("/file", 8)), &storage("4Mi"))["spec"]["containers"][0].clone();
    sidecar["name"] = json!("side");
    sidecar["restartPolicy"] = json!("Always");
    let mut with_sidecar = with_limits(after("sidecar", "true"), &storage("1Gi"));
    with_sidecar["spec"]["initContainers"] = json!([sidecar]);
    api.create_pod(with_sidecar);
    // Neither the writable layer nor the volume is above the limit.
    let both = format!("{}; {}", write("/file", 4), write("/v/file", 4));
    api.create_pod(with_volume(with_limits(after("pod", &both), &storage("6Mi")), &json!({})));
    api.create_pod(with_volume(
        with_limits(after("below", &both), &storage("20Mi")),
        &json!({"sizeLimit": "5Mi"}),
    ));
    let size = "dd if=/dev/zero of=/v/file bs=1M count=8 2>/tmp/error; stat -c %s /v/file; cat /tmp/error";
    let memory = json!({"medium": "Memory", "sizeLimit": "4Mi"});
    let mut limited = after("memory", &format!("{{ {size}; }} >/dev/termination-log; exit 0"));
    limited["spec"]["restartPolicy"] = json!("Never");
    api.create_pod(with_volume(limited, &memory));

    assert_eq!(
        evicted_by_request(&node, "container").await,
        "Container main exceeded its local ephemeral storage limit \"4Mi\". "
    );
    assert_eq!(
        evicted_by_request(&node, "sidecar").await,
        "Container side exceeded its local ephemeral storage limit \"4Mi\". "
    );
    assert_eq!(
        evicted_by_request(&node, "pod").await,
        "Pod ephemeral local storage usage exceeds the total limit of containers 6Mi. "
    );
    let disruption = condition(&api.get("pods", "default", "pod").unwrap(), "DisruptionTarget");
    assert_eq!(disruption, Value::Null, "the pod itself is the cause");
    let memory = terminated(&node, "memory").await;
    let written = memory["message"].as_str().unwrap();
    assert!(written.starts_with("4194304\n") && written.contains("No space left on device"), "{written}");
    let below = now(&node, "below");
    assert!(below.is_ready(), "{:?}", below.pod["status"]);
    for (signal, want) in
        [("ephemeralcontainerfs.limit", 2), ("ephemeralpodfs.limit", 1), ("emptydirfs.limit", 0)]
    {
        let name = format!("kubelet_evictions{{eviction_signal=\"{signal}\"}}");
        assert_eq!(node.counter("pod-sync", &name).await, want, "{signal}");
    }
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_above_its_memory_limit_is_killed_and_a_child_that_is_killed_leaves_its_container() {
    let node = Node::start(options("pressure-oom", &["--single-process-oom-kill=true"])).await;
    let api = node.api();
    let limit = json!({"memory": "32Mi"});
    let hog = "tail -c 67108864 /dev/zero";
    let once = |name: &str, script: &str| {
        let mut pod = with_limits(pods::bound(pods::script(name, script)), &limit);
        pod["spec"]["restartPolicy"] = json!("Never");
        pod
    };
    api.create_pod(held(&node, once("main", &format!("{HOLD}; exec {hog}"))));
    // The runtime receives the kernel's event of the kill apart from the end of the container.
    let script = format!("{HOLD}; {hog}; echo $? >/dev/termination-log; sleep 2; exit 5");
    api.create_pod(held(&node, once("child", &script)));
    let mut init = once("init", "true");
    let mut container = once("x", &format!("{HOLD}; exec {hog}"))["spec"]["containers"][0].clone();
    container["name"] = json!("first");
    init["spec"]["initContainers"] = json!([container]);
    // Otherwise the pod has a limit, which ends the init container as well.
    init["spec"]["containers"][0]["resources"] = json!({});
    api.create_pod(held(&node, init));
    let_go(&node, &["main", "child", "init"]).await;
    let main = terminated(&node, "main").await;
    assert_eq!((&main["reason"], &main["exitCode"]), (&json!("OOMKilled"), &json!(137)));
    let child = terminated(&node, "child").await;
    assert_eq!(child["message"], "137\n", "the kernel killed the child");
    // The code is that of the container's process, and the reason is the runtime's, as with the kubelet.
    assert_eq!((&child["reason"], &child["exitCode"]), (&json!("OOMKilled"), &json!(5)));
    let state = |p: &Value| p["status"]["initContainerStatuses"][0]["state"]["terminated"].clone();
    let init = api.wait_for("pods", "default", "init", LONG, |p| !state(p).is_null()).await;
    let init = state(&init);
    assert_eq!((&init["reason"], &init["exitCode"]), (&json!("OOMKilled"), &json!(137)));
    let events = api.list("events");
    assert!(!events.iter().any(|e| e["reason"] == "SystemOOM"), "only containers were above their limits");
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cpu_limit_of_200m_throttles_a_busy_container_to_a_fifth_of_a_core() {
    let node = Node::start(options("pressure-cpu", &[])).await;
    node.api().create_pod(with_limits(
        pods::bound(pods::script("busy", "while :; do :; done")),
        &json!({"cpu": "200m"}),
    ));
    let pod = ready(&node, "busy").await;
    let used = || {
        if is_v2() {
            return field(&cgroup(&node, "", &pod).join("cpu.stat"), "usage_usec") * 1000;
        }
        number(&cgroup(&node, "cpuacct", &pod).join("cpuacct.usage"))
    };
    let throttled = || {
        // The limit is set on the container and on the pod. Either may throttle first.
        let dir = cgroup(&node, "cpu", &pod);
        let containers = std::fs::read_dir(&dir).unwrap().flatten().map(|e| e.path().join("cpu.stat"));
        let all = containers.chain([dir.join("cpu.stat")]).filter(|file| file.exists());
        all.map(|file| field(&file, "nr_throttled")).sum::<u64>()
    };
    // Other processes of the machine may take the CPU from the container. It never gets more than its limit.
    until("5 s at a fifth of a core", LONG, async || {
        let began = Instant::now();
        let before = used();
        let throttled_before = throttled();
        sleep(Duration::from_secs(5)).await;
        let cores = Duration::from_nanos(used() - before).as_secs_f64() / began.elapsed().as_secs_f64();
        assert!(cores <= 0.25, "{cores} cores with a limit of 0.2");
        let grew = throttled() > throttled_before;
        if cores >= 0.15 && grew { Ok(()) } else { Err((cores, grew)) }
    })
    .await;
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fork_bomb_ends_at_the_limit_of_process_ids_of_its_pod() {
    let node = Node::start(options("pressure-fork", &["--pod-max-pids=30"])).await;
    let api = node.api();
    api.create_pod(pods::bound(pods::sleeper("neighbour")));
    ready(&node, "neighbour").await;
    let mut bomb = pods::bound(pods::script(
        "bomb",
        "i=0; while [ $i -lt 200 ]; do sleep 1000 & i=$((i+1)); done; exit 0",
    ));
    bomb["spec"]["restartPolicy"] = json!("Never");
    bomb["spec"]["containers"][0]["terminationMessagePolicy"] = json!("FallbackToLogsOnError");
    api.create_pod(bomb);
    let ended = terminated(&node, "bomb").await;
    assert_ne!(ended["exitCode"], 0, "{ended}");
    let message = ended["message"].as_str().unwrap();
    assert!(message.contains("can't fork: Resource temporarily unavailable"), "{message}");
    assert!(now(&node, "neighbour").is_ready());
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_of_all_pods_above_the_threshold_costs_the_pod_with_the_largest_excess() {
    let total = machine_memory();
    let kept = 800 << 20;
    // All pods together may use 800 MiB. The memory that others use on this machine does not matter.
    let reserved = format!("--system-reserved=memory={}", total - kept);
    let args = [&*reserved, "--eviction-hard=memory.available<400Mi", "--kernel-memcg-notification"];
    let node = Node::start(options("pressure-memory", &args)).await;
    let api = node.api();
    let fill = |mib: u32| format!("dd if=/dev/zero of=/v/file bs=1M count={mib}");
    let memory = json!({"medium": "Memory"});
    api.create_pod(with_volume(after("neighbour", &fill(60)), &memory));
    let neighbour = ready(&node, "neighbour").await;
    let before = signal(&node, "allocatableMemory.available").await;
    assert_eq!(before["thresholds"][0]["value"], 400 << 20);
    assert!(before["available"].as_i64().unwrap() > 400 << 20, "{before}");

    let mut hog = with_volume(after("hog", &fill(500)), &memory);
    hog["spec"]["containers"][0]["resources"] = json!({"requests": {"memory": "50Mi"}});
    api.create_pod(hog);
    // A requested round would precede the kernel's notification.
    let message = evicted(&node, "hog").await;
    assert!(
        message.starts_with("The node was low on resource: memory. Threshold quantity: 400Mi, available: "),
        "{message}"
    );
    assert!(
        message.contains("Container main was using ") && message.contains(", request is 50Mi, "),
        "{message}"
    );
    node_condition(&node, "MemoryPressure", "True").await;
    api.create_pod(pods::bound(pods::sleeper("besteffort")));
    assert_eq!(
        evicted_by_request(&node, "besteffort").await,
        "Pod was rejected: The node had condition: [MemoryPressure]. "
    );
    node_condition(&node, "MemoryPressure", "False").await;
    assert_eq!(now(&node, "neighbour").container("main"), neighbour.container("main"));
    let metrics = "kubelet_evictions{eviction_signal=\"allocatableMemory.available\"}";
    assert_eq!(node.counter("pod-sync", metrics).await, 1);
    let notified = node.counter("pod-sync", "quintlet_eviction_memory_notifications_total").await;
    assert!(notified > 0, "the kernel reported the usage");
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_without_a_limit_is_killed_at_the_memory_of_all_pods() {
    let reserved = format!("--system-reserved=memory={}", machine_memory() - (300 << 20));
    let args = [&*reserved, "--eviction-hard=memory.available<0%"];
    let node = Node::start(options("pressure-allocatable", &args)).await;
    let api = node.api();
    api.create_pod(pods::bound(pods::sleeper("neighbour")));
    let neighbour = ready(&node, "neighbour").await;
    let mut hog = pods::bound(pods::script("hog", &format!("{HOLD}; exec tail -c 419430400 /dev/zero")));
    hog["spec"]["restartPolicy"] = json!("Never");
    api.create_pod(held(&node, hog));
    let_go(&node, &["hog"]).await;
    let ended = terminated(&node, "hog").await;
    assert_eq!((&ended["reason"], &ended["exitCode"]), (&json!("OOMKilled"), &json!(137)));
    assert_eq!(now(&node, "neighbour").container("main"), neighbour.container("main"));
    let events = api.list("events");
    assert!(!events.iter().any(|e| e["reason"] == "SystemOOM"), "the limit of all pods caused the kill");
    node.down().await;
}

fn machine_memory() -> i64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<i64>().unwrap() * 1024
}

pub(crate) fn machine_processes() -> i64 {
    let number = |file: &str| std::fs::read_to_string(file).unwrap().trim().parse::<i64>().unwrap();
    number("/proc/sys/kernel/pid_max").min(number("/proc/sys/kernel/threads-max"))
}

/// The cgroup of a container that is below no cgroup of a pod, in a hierarchy of cgroup v1, or in the only
/// one of v2.
fn own_cgroup(controller: &str, pod: &Seen) -> PathBuf {
    let id = pod.text("/status/containerStatuses/0/containerID").rsplit('/').next().unwrap();
    let mut root = PathBuf::from("/sys/fs/cgroup");
    if !is_v2() {
        root.push(controller);
    }
    root.join("k8s.io").join(id)
}

/// Restarts pod-sync with these fields of a KubeletConfiguration.
async fn configure(node: &Node, drop_ins: &std::path::Path, fields: &str) {
    let text = format!("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n{fields}\n");
    std::fs::write(drop_ins.join("10.conf"), text).unwrap();
    let starts = node.kill9("pod-sync");
    node.wait_back("pod-sync", starts, LONG).await;
}

/// Returns the UIDs of the pods that pod-sync evicted, in their order.
fn evictions(node: &Node) -> Vec<String> {
    let log = node.log("pod-sync");
    let uid = |line: &str| {
        Some(line.split_once("pod.uid=")?.1.split_whitespace().next()?.trim_matches('"').to_owned())
    };
    log.lines().filter(|line| line.contains("evicting pod")).filter_map(uid).collect()
}

async fn statistics(node: &Node, name: &str) -> Value {
    let address = node.api().url().replace("http://", "");
    let (host, port) = address.rsplit_once(':').unwrap();
    let path = format!("/api/v1/nodes/{NODE}/proxy/stats/summary");
    until("statistics of the pod and its container", LONG, async || {
        let page = quintlet_e2e::page(host, port.parse().unwrap(), &path).await;
        let page = page.map_err(|error| error.to_string())?;
        let summary: Value = serde_json::from_str(&page).map_err(|_| page.clone())?;
        let pods = summary["pods"].as_array().cloned().unwrap_or_default();
        let pod = pods.into_iter().find(|pod| pod["podRef"]["name"] == name).ok_or(page)?;
        let is_complete = |usage: &Value| {
            usage["cpu"]["usageCoreNanoSeconds"].as_u64() > Some(0)
                && usage["memory"]["workingSetBytes"].as_u64() > Some(0)
        };
        if is_complete(&pod) && is_complete(&pod["containers"][0]) { Ok(pod) } else { Err(pod.to_string()) }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_cgroups_of_pods_limits_evictions_and_statistics_are_those_of_containers() {
    let drop_ins = tempfile::tempdir().unwrap();
    let dir = format!("--config-dir={}", drop_ins.path().display());
    let args = [
        &*dir,
        "--cgroups-per-qos=false",
        "--enforce-node-allocatable=none",
        "--fail-swap-on=false",
        "--fail-cgroup-v1=false",
        "--set-kernel-tunables=false",
    ];
    let node = Node::start(Options { node_api: true, ..options("pressure-containers", &args) }).await;
    let api = node.api();

    let mut oom = with_limits(
        pods::bound(pods::script("oom", &format!("{HOLD}; exec tail -c 67108864 /dev/zero"))),
        &json!({"memory": "32Mi"}),
    );
    oom["spec"]["restartPolicy"] = json!("Never");
    api.create_pod(held(&node, oom));
    let_go(&node, &["oom"]).await;
    let busy = with_limits(
        pods::bound(pods::script("busy", "while :; do :; done")),
        &json!({"cpu": "200m", "memory": "64Mi"}),
    );
    api.create_pod(busy);
    let ended = terminated(&node, "oom").await;
    assert_eq!((&ended["reason"], &ended["exitCode"]), (&json!("OOMKilled"), &json!(137)));
    let busy = ready(&node, "busy").await;
    let stat = own_cgroup("cpu", &busy).join("cpu.stat");
    until("the container is throttled", LONG, async || match field(&stat, "nr_throttled") {
        0 => Err("never"),
        _ => Ok(()),
    })
    .await;
    assert!(!cgroup(&node, "memory", &busy).exists() && !cgroup(&node, "cpu", &busy).exists());
    let pods_of = |controller: &str| {
        let root = cgroup(&node, controller, &busy);
        root.ancestors().find(|dir| dir.ends_with("kubepods")).unwrap().to_owned()
    };
    assert!(!pods_of("memory").exists() && !pods_of("cpu").exists());

    let of_busy = statistics(&node, "busy").await;
    let figures = |usage: &Value| {
        let number = |value: &Value| value.as_u64().unwrap();
        (number(&usage["cpu"]["usageCoreNanoSeconds"]), number(&usage["memory"]["workingSetBytes"]))
    };
    assert_eq!(figures(&of_busy), figures(&of_busy["containers"][0]), "the sum of its containers");
    api.delete("pods", "default", "busy", None).unwrap();

    // Whatever other programs use, less is available than the machine has. The first pod to go is that with
    // the most, the second one is the only other one that is not critical.
    let mut neighbour = pods::bound(pods::sleeper("neighbour"));
    neighbour["spec"]["priority"] = json!(2_000_000_000);
    api.create_pod(neighbour);
    let neighbour = ready(&node, "neighbour").await;
    node.wait_gone(busy.uid()).await;
    let memory = json!({"medium": "Memory"});
    let fill = |name: &str, mib: u32| {
        with_volume(after(name, &format!("dd if=/dev/zero of=/v/file bs=1M count={mib}")), &memory)
    };
    let forks = |name: &str, count: u32| {
        after(name, &format!("i=0; while [ $i -lt {count} ]; do sleep 100000 & i=$((i+1)); done"))
    };
    let usage = if is_v2() { "memory.current" } else { "memory.usage_in_bytes" };
    for (signal, capacity, resource, condition, [first, second], (controller, file, least)) in [
        (
            "memory.available",
            machine_memory(),
            "memory",
            "MemoryPressure",
            [fill("hog", 150), fill("little", 20)],
            ("memory", usage, 150 << 20),
        ),
        (
            "pid.available",
            machine_processes(),
            "pids",
            "PIDPressure",
            [forks("bomb", 200), forks("few", 2)],
            ("pids", "pids.current", 200),
        ),
    ] {
        let names = [&first, &second].map(|pod| pod["metadata"]["name"].as_str().unwrap().to_owned());
        api.create_pod(second);
        api.create_pod(first);
        let mut uids = Vec::new();
        for name in &names {
            uids.push(ready(&node, name).await.uid().to_owned());
        }
        let used = own_cgroup(controller, &now(&node, &names[0])).join(file);
        until("the first pod uses most", LONG, async || match number(&used) {
            used if used >= least => Ok(()),
            used => Err(used),
        })
        .await;
        let before = evictions(&node).len();
        let thresholds =
            format!("evictionSoft: {{{signal}: \"{capacity}\"}}\nevictionSoftGracePeriod: {{{signal}: 0s}}");
        configure(&node, drop_ins.path(), &thresholds).await;
        for name in &names {
            let message = evicted_by_request(&node, name).await;
            assert!(message.starts_with(&format!("The node was low on resource: {resource}. ")), "{message}");
            assert_eq!(message.contains("Container main was using "), resource == "memory", "{message}");
        }
        assert_eq!(evictions(&node)[before..], uids, "{signal}");
        node_condition(&node, condition, "True").await;
        configure(&node, drop_ins.path(), "").await;
        node_condition(&node, condition, "False").await;
    }
    assert_eq!(now(&node, "neighbour").container("main"), neighbour.container("main"));
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_soft_threshold_of_inodes_evicts_after_its_grace_period_and_lets_the_pod_end_by_itself() {
    let args = [
        "--eviction-hard=memory.available<0%",
        "--eviction-soft=nodefs.inodesFree<50000",
        "--eviction-soft-grace-period=nodefs.inodesFree=8s",
        "--eviction-max-pod-grace-period=30",
    ];
    // A file system of this size has 65,536 inodes.
    let node = Node::start(Options { root_disk_mib: Some(256), ..options("pressure-inodes", &args) }).await;
    let api = node.api();
    api.create_pod(with_volume(after("neighbour", "dd if=/dev/zero of=/v/file bs=1M count=60"), &json!({})));
    let neighbour = ready(&node, "neighbour").await;
    let files = "i=0; while [ $i -lt 20000 ]; do : >/v/$i; i=$((i+1)); done";
    let end = "trap 'sleep 1; echo by itself >/dev/termination-log; exit 0' TERM";
    let script = format!("{end}; {files}; sleep 100000 & wait");
    let mut hog = with_volume(pods::bound(pods::script("hog", &script)), &json!({}));
    hog["spec"]["terminationGracePeriodSeconds"] = json!(20);
    api.create_pod(hog);
    let crossed = until("the threshold is crossed", LONG, async || {
        let inodes = signal(&node, "nodefs.inodesFree").await;
        if inodes["thresholds"][0]["crossedSince"].is_null() { Err(inodes) } else { Ok(inodes) }
    })
    .await;
    assert_eq!(crossed["thresholds"][0]["graceSeconds"], 8.0);
    assert_ne!(crossed["thresholds"][0]["due"], crossed["thresholds"][0]["crossedSince"], "{crossed}");
    assert!(now(&node, "hog").is_ready(), "the grace period is not over");
    let message = evicted_by_request(&node, "hog").await;
    assert!(
        message.starts_with("The node was low on resource: inodes. Threshold quantity: 50k, available: "),
        "{message}"
    );
    assert_eq!(terminated(&node, "hog").await["message"], "by itself\n");
    node_condition(&node, "DiskPressure", "False").await;
    assert_eq!(now(&node, "neighbour").container("main"), neighbour.container("main"));
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_sync_protects_itself_or_says_which_setting_is_missing() {
    let node =
        Node::start(options("pressure-own", &["--oom-score-adj=-998", "--max-open-files=12345"])).await;
    let process = PathBuf::from(format!("/proc/{}", node.service("pod-sync").process().pid.unwrap()));
    let score = std::fs::read_to_string(process.join("oom_score_adj")).unwrap();
    let limits = std::fs::read_to_string(process.join("limits")).unwrap();
    let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    for (setting, is_set) in [
        ("oom_score_adj", score.trim() == "-998"),
        ("open_files", files.split_whitespace().nth(3) == Some("12345")),
    ] {
        let gauge = format!("quintlet_process_setting_missing{{setting=\"{setting}\"}}");
        let missing = node.counter("pod-sync", &gauge).await;
        assert_eq!(missing == 0, is_set, "{setting}: {score} {files}");
        let warnings = node
            .log("pod-sync")
            .lines()
            .filter(|line| line.contains("failed to apply a setting") && line.contains(setting))
            .count();
        assert_eq!(warnings, usize::from(!is_set), "{setting}");
    }
    assert_eq!(files.split_whitespace().nth(3), Some("12345"), "the soft limit needs no capability");
    assert_eq!(
        node.counter("pod-sync", "quintlet_kernel_log_unreadable").await,
        0,
        "root reads the kernel's log"
    );
    node.down().await;
}
