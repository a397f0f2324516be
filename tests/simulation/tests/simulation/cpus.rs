//! Pods with CPUs of their own, on machines of the tests.

use std::path::Path;
use std::time::Duration;

use quintlet_cri_api::v1;
use quintlet_kit::failpoint::{Kind, When};
use quintlet_proto::podsync::v1::cpus_client::CpusClient;
use quintlet_proto::podsync::v1::{CpuHolder, ListCpusReply, ListCpusRequest};
use quintlet_simulation::cuts::CutPoint;
use quintlet_simulation::{Options, Seen, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{Method, Rule};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};
use tonic::Code;

use crate::devices::{DEVICE, devices_of, start_plugin_with, wait_node};
use crate::edges;

const UPDATE: Method = Method::UpdateContainerResources;
const STATIC: &str = "--cpu-manager-policy=static";
// The number of the machine's own CPUs decides what the node takes, so that tests have at most one CPU in
// use.
const RESERVED: &str = "--system-reserved=cpu=100m";
const STATIC_MEMORY: &[&str] =
    &["--memory-manager-policy=Static", "--kube-reserved=memory=100Mi", "--reserved-memory=0:memory=100Mi"];

/// Core and NUMA node of each CPU of a machine.
type Machine = [(u32, u32)];

/// Two cores of one NUMA node.
const PAIR: &Machine = &[(0, 0), (1, 0)];

fn write_machine(sys: &Path, machine: &Machine) {
    let write = |path: String, text: String| {
        let path = sys.join("devices/system").join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write("cpu/online".to_owned(), format!("0-{}", machine.len() - 1));
    for (cpu, (core, node)) in machine.iter().enumerate() {
        write(format!("cpu/cpu{cpu}/topology/core_id"), core.to_string());
        write(format!("cpu/cpu{cpu}/topology/physical_package_id"), "0".to_owned());
        write(format!("node/node{node}/meminfo"), format!("Node {node} MemTotal: 4194304 kB"));
        std::fs::create_dir_all(sys.join(format!("devices/system/node/node{node}/cpu{cpu}"))).unwrap();
    }
}

/// Starts a node on a machine, with the first CPU reserved.
async fn start(options: Options, machine: &Machine, args: &[&str]) -> Sim {
    let mut sim = Sim::prepare(options).await;
    let sys = sim.root_dir().with_file_name("sys");
    write_machine(&sys, machine);
    let sys = format!("--sysfs-dir={}", sys.display());
    sim.set_pod_sync_args(&[&[STATIC, RESERVED, &sys], args].concat());
    sim.start_all();
    sim
}

fn guaranteed(name: &str, cpu: &str) -> Value {
    let mut pod = pods::single(name);
    pod["spec"]["terminationGracePeriodSeconds"] = json!(2);
    let amounts = json!({"cpu": cpu, "memory": "32Mi"});
    pod["spec"]["containers"][0]["resources"] = json!({"limits": amounts, "requests": amounts});
    pod
}

/// Returns the resources that the runtime has for the container of a pod.
fn resources(sim: &Sim, uid: &str, name: &str) -> v1::LinuxContainerResources {
    let container = sim.runtime.newest(uid, &format!("c-{name}")).unwrap();
    let created = container.config.linux.and_then(|linux| linux.resources).unwrap_or_default();
    container.status.resources.and_then(|resources| resources.linux).unwrap_or(created)
}

fn cpus(sim: &Sim, uid: &str, name: &str) -> String {
    resources(sim, uid, name).cpuset_cpus
}

async fn wait_cpus(sim: &Sim, uid: &str, name: &str, expected: &str) {
    until("the CPUs of a container", quintlet_simulation::LONG, async || {
        let seen = cpus(sim, uid, name);
        if seen == expected { Ok(()) } else { Err(seen) }
    })
    .await;
}

/// Returns the shared CPUs and the pods with exclusive ones, as the state file has them.
fn state(sim: &Sim) -> (String, Vec<String>) {
    let text = std::fs::read(sim.root_dir().join("cpu_manager_state")).unwrap();
    let state: Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(state["policyName"], "static");
    let pods = state["entries"].as_object().map(|pods| pods.keys().cloned().collect()).unwrap_or_default();
    (state["defaultCpuSet"].as_str().unwrap().to_owned(), pods)
}

async fn list(sim: &Sim) -> ListCpusReply {
    let mut client = CpusClient::new(quintlet_kit::socket::channel(sim.paths().podsync()));
    let mut stream = client.list(ListCpusRequest {}).await.unwrap().into_inner();
    let mut all = ListCpusReply::default();
    while let Some(next) = stream.message().await.unwrap() {
        quintlet_kit::messages::Chunk::append(&mut all, next);
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_gets_cpus_of_its_own_until_its_end() {
    let sim = start(Options::default(), PAIR, &[]).await;
    let other = sim.create(pods::single("other"));
    sim.wait_ready("other").await;
    assert_eq!(cpus(&sim, &other, "other"), "0-1");
    let uid = sim.create(guaranteed("web", "1"));
    sim.wait_ready("web").await;
    let web = resources(&sim, &uid, "web");
    assert_eq!((web.cpuset_cpus.as_str(), web.cpu_quota, web.cpu_period), ("1", -1, 100_000));
    let sandbox = sim.sandboxes(&uid)[0].config.linux.clone().unwrap().resources.unwrap();
    assert_eq!(sandbox.cpu_quota, -1);
    assert_eq!(state(&sim), ("0".to_owned(), vec![uid.clone()]));
    wait_cpus(&sim, &other, "other", "0").await;
    let updates = |uid: &str, container: &str| {
        sim.calls_about(UPDATE, sim.runtime.newest(uid, container).unwrap().id())
    };
    assert_eq!((updates(&other, "c-other"), updates(&uid, "c-web")), (1, 0));
    let listed = list(&sim).await;
    let holder = CpuHolder {
        pod_uid: uid.clone(),
        pod: "default/web".to_owned(),
        container: "c-web".to_owned(),
        cpus: "1".to_owned(),
        ..CpuHolder::default()
    };
    assert_eq!(listed.holders, [holder]);
    assert_eq!(listed.cpus.iter().map(|cpu| cpu.is_reserved).collect::<Vec<_>>(), [true, false]);

    // After a restart, the pods keep their containers and their CPUs.
    let kept = [sim.instances(&uid), sim.instances(&other)];
    sim.restart(Service::PodSync).await;
    let next = sim.create(pods::single("next"));
    sim.wait_ready("next").await;
    assert_eq!(cpus(&sim, &next, "next"), "0");
    assert_eq!([sim.instances(&uid), sim.instances(&other)], kept);
    assert_eq!((cpus(&sim, &uid, "web"), cpus(&sim, &other, "other")), ("1".to_owned(), "0".to_owned()));
    assert_eq!(state(&sim), ("0".to_owned(), vec![uid.clone()]));

    sim.delete("web", None);
    sim.wait_gone("web").await;
    wait_cpus(&sim, &other, "other", "0-1").await;
    wait_cpus(&sim, &next, "next", "0-1").await;
    assert_eq!(state(&sim), ("0-1".to_owned(), Vec::new()));
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_without_a_free_cpu_or_core_is_rejected_with_the_kubelets_text() {
    const FEW: &str = "not enough cpus available to satisfy request: requested=1, available=0";
    const CORES: &str = "SMT Alignment Error: requested 1 cpus not multiple cpus per core = 2";
    let few = format!("Allocate failed due to {FEW}, which is unexpected");
    let cores: &[&str] = &["--cpu-manager-policy-options=full-pcpus-only=true"];
    for (machine, args, reason, text) in [
        (&[(0, 0)][..], &[][..], "UnexpectedAdmissionError", few.as_str()),
        (&[(0, 0), (0, 0)][..], cores, "SMTAlignmentError", CORES),
    ] {
        let sim = start(Options::default(), machine, args).await;
        let uid = sim.create(guaranteed("web", "1"));
        let rejected = sim.wait_pod("web", "it is rejected", |pod| pod.phase() == "Failed").await;
        assert_eq!(rejected.text("/status/reason"), reason);
        assert_eq!(rejected.text("/status/message"), format!("Pod was rejected: {text}"));
        sim.wait_event("web", text, |e| e.reason == reason && e.message == text).await;
        assert!(sim.sandboxes(&uid).is_empty());
        let _uid = sim.create(guaranteed("part", "500m"));
        sim.wait_ready("part").await;
        sim.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_device_and_the_cpu_of_a_pod_are_on_one_numa_node_or_the_pod_is_rejected() {
    // The reserved CPU is on node 0, the other one on node 1.
    let args = ["--topology-manager-policy=single-numa-node"];
    let sim = start(Options::default(), &[(0, 0), (1, 1)], &args).await;
    let plugin = start_plugin_with(&sim, &["a@0", "b@1"], |_| {}).await;
    wait_node(&sim, "2", "2").await;
    let with_device = |name: &str| {
        let mut pod = guaranteed(name, "1");
        for kind in ["limits", "requests"] {
            pod["spec"]["containers"][0]["resources"][kind][DEVICE] = json!("1");
        }
        pod
    };
    let uid = sim.create(with_device("web"));
    sim.wait_ready("web").await;
    assert_eq!((cpus(&sim, &uid, "web").as_str(), devices_of(&sim, &uid, "web").as_str()), ("1", "b"));
    sim.delete("web", None);
    sim.wait_gone("web").await;
    plugin.list(&["a@0"]);
    wait_node(&sim, "1", "1").await;
    let uid = sim.create(with_device("far"));
    let rejected = sim.wait_pod("far", "it is rejected", |pod| pod.phase() == "Failed").await;
    assert_eq!(rejected.text("/status/reason"), "TopologyAffinityError");
    let text = "Pod was rejected: Resources cannot be allocated with Topology locality";
    assert_eq!(rejected.text("/status/message"), text);
    assert!(sim.sandboxes(&uid).is_empty());
    assert_eq!(state(&sim), ("0-1".to_owned(), Vec::new()));
    sim.disturb();
    drop(plugin);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_devices_of_all_containers_of_a_pod_are_on_one_numa_node_with_the_scope_pod() {
    let args = ["--topology-manager-policy=single-numa-node", "--topology-manager-scope=pod"];
    let sim = start(Options::default(), &[(0, 0), (1, 1)], &args).await;
    let plugin = start_plugin_with(&sim, &["a@0", "b@1", "c@1"], |_| {}).await;
    wait_node(&sim, "3", "3").await;
    let mut pod = pods::pod("web", &[pods::container("c-one"), pods::container("c-two")]);
    for container in 0..2 {
        pod["spec"]["containers"][container]["resources"] =
            json!({"limits": {DEVICE: "1"}, "requests": {DEVICE: "1"}});
    }
    let uid = sim.create(pod);
    sim.wait_ready("web").await;
    let mut devices = [devices_of(&sim, &uid, "one"), devices_of(&sim, &uid, "two")];
    devices.sort();
    assert_eq!(devices, ["b", "c"]);
    sim.disturb();
    drop(plugin);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containers_of_a_pod_with_a_cpu_as_a_whole_share_it_until_its_end() {
    let gate = "--feature-gates=PodLevelResourceManagers=true";
    let args = ["--topology-manager-policy=restricted", "--topology-manager-scope=pod", gate];
    let sim = start(Options::default(), PAIR, &args).await;
    let other = sim.create(pods::single("other"));
    sim.wait_ready("other").await;
    let amounts = json!({"cpu": "1", "memory": "64Mi"});
    let whole = |mut pod: Value| {
        pod["spec"]["terminationGracePeriodSeconds"] = json!(2);
        pod["spec"]["resources"] = json!({"limits": amounts, "requests": amounts});
        pod
    };
    let uid = sim.create(whole(pods::pod("web", &[pods::container("c-one"), pods::container("c-two")])));
    sim.wait_ready("web").await;
    let check = || {
        for name in ["one", "two"] {
            let resources = resources(&sim, &uid, name);
            assert_eq!((resources.cpuset_cpus.as_str(), resources.cpu_quota), ("1", 100_000), "{name}");
        }
    };
    check();
    let sandbox = sim.sandboxes(&uid)[0].config.linux.clone().unwrap().resources.unwrap();
    assert_eq!(sandbox.cpu_quota, 100_000);
    wait_cpus(&sim, &other, "other", "0").await;
    let kept = sim.instances(&uid);
    sim.restart(Service::PodSync).await;
    let next = sim.create(pods::single("next"));
    sim.wait_ready("next").await;
    assert_eq!((cpus(&sim, &next, "next").as_str(), sim.instances(&uid)), ("0", kept));
    check();
    let holders = list(&sim).await.holders;
    let shown = |holder: &CpuHolder| (holder.cpus.clone(), holder.is_pod_shared, holder.pod_cpus.clone());
    assert_eq!(
        holders.iter().map(shown).collect::<Vec<_>>(),
        [("1".to_owned(), true, "1".to_owned()), ("1".to_owned(), true, "1".to_owned())]
    );

    // A pod whose container takes all that the pod has leaves nothing to the other one.
    let mut empty = whole(pods::pod("empty", &[pods::container("c-one"), pods::container("c-two")]));
    empty["spec"]["containers"][0]["resources"] = json!({"limits": amounts, "requests": amounts});
    sim.delete("web", None);
    sim.wait_gone("web").await;
    wait_cpus(&sim, &other, "other", "0-1").await;
    let _uid = sim.create(empty);
    let rejected = sim.wait_pod("empty", "it is rejected", |pod| pod.phase() == "Failed").await;
    assert_eq!(rejected.text("/status/reason"), "TopologyAffinityError");
    let text = "Pod Scope pod with pod-level resources failed admission under pod-scope topology manager";
    assert!(rejected.text("/status/message").ends_with(text), "{}", rejected.text("/status/message"));
    sim.finish().await;
}

/// Resizes a pod, like `kubectl edit --subresource resize`.
fn resize(sim: &Sim, name: &str, cpu: &str, memory: &str) {
    let amounts = json!({"cpu": cpu, "memory": memory});
    let edit = |pod: &mut Value| {
        pod["spec"]["containers"][0]["resources"] = json!({"limits": amounts, "requests": amounts});
    };
    sim.api.edit("pods/resize", "default", name, edit).unwrap();
}

/// Returns a condition of a pod's resize.
fn resize_condition(seen: &Seen, kind: &str) -> Value {
    let all = seen.0["status"]["conditions"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|condition| condition["type"] == kind).unwrap_or_default()
}

/// Returns whether the resources of a pod's container are these, and no resize is pending or in progress.
fn is_resized(seen: &Seen, cpu: &str, memory: &str) -> bool {
    let amounts = json!({"cpu": cpu, "memory": memory});
    seen.0["status"]["containerStatuses"][0]["resources"]["requests"] == amounts
        && ["PodResizePending", "PodResizeInProgress"]
            .iter()
            .all(|kind| resize_condition(seen, kind).is_null())
}

async fn wait_infeasible(sim: &Sim, name: &str, text: &str) {
    let is_infeasible = |seen: &Seen| {
        let condition = resize_condition(seen, "PodResizePending");
        condition["reason"] == "Infeasible" && condition["message"] == text
    };
    sim.wait_pod(name, "its resize is infeasible", is_infeasible).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cpus_of_a_guaranteed_pod_are_not_resized_and_its_memory_is_without_its_cpus() {
    let text = "Resize is infeasible for Guaranteed Pods alongside CPU Manager policy \"static\"";
    let sim = start(Options::default(), PAIR, &[]).await;
    let uid = sim.create(guaranteed("web", "1"));
    let part = sim.create(guaranteed("part", "100m"));
    let mut pod = pods::single("other");
    pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "50m"}});
    let other = sim.create(pod);
    for name in ["web", "part", "other"] {
        sim.wait_ready(name).await;
    }
    wait_cpus(&sim, &part, "part", "0").await;
    wait_cpus(&sim, &other, "other", "0").await;
    let web = sim.runtime.newest(&uid, "c-web").unwrap().id().to_owned();
    let kept = [sim.instances(&uid), sim.instances(&part)];
    // A pod without exclusive CPUs is refused, too: with another size it might get some.
    for (name, cpu) in [("web", "500m"), ("part", "200m")] {
        resize(&sim, name, cpu, "32Mi");
        wait_infeasible(&sim, name, text).await;
        sim.wait_event(name, "its resize is infeasible", |e| {
            // The text is in JSON there.
            let text = text.replace('"', "\\\"");
            e.kind == "Warning" && e.reason == "ResizeInfeasible" && e.message.contains(&text)
        })
        .await;
    }
    let seen = sim.pod("web");
    assert_eq!(seen.0["status"]["containerStatuses"][0]["allocatedResources"]["cpu"], "1");
    assert_eq!(sim.calls_about(UPDATE, &web), 0);
    // Other pods are resized, and keep the shared CPUs.
    let edit = |pod: &mut Value| {
        pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "60m"}});
    };
    sim.api.edit("pods/resize", "default", "other", edit).unwrap();
    sim.wait_pod("other", "it is resized", |seen| {
        seen.0["status"]["containerStatuses"][0]["resources"]["requests"] == json!({"cpu": "60m"})
    })
    .await;
    assert_eq!(cpus(&sim, &other, "other"), "0");

    sim.restart(Service::PodSync).await;
    let next = sim.create(pods::single("next"));
    sim.wait_ready("next").await;
    assert_eq!((cpus(&sim, &next, "next"), cpus(&sim, &uid, "web")), ("0".to_owned(), "1".to_owned()));
    wait_infeasible(&sim, "web", text).await;

    // The memory is resized, and the container keeps its CPU without a quota.
    resize(&sim, "web", "1", "48Mi");
    sim.wait_pod("web", "its memory is resized", |seen| is_resized(seen, "1", "48Mi")).await;
    let seen = resources(&sim, &uid, "web");
    let seen = (seen.memory_limit_in_bytes, seen.cpu_quota, seen.cpuset_cpus.as_str());
    assert_eq!((seen.0, seen.1), (48 << 20, -1));
    assert!(["", "1"].contains(&seen.2), "the runtime keeps the CPU: {seen:?}");
    resize(&sim, "part", "100m", "32Mi");
    sim.wait_pod("part", "it is as before", |seen| is_resized(seen, "100m", "32Mi")).await;
    assert_eq!([sim.instances(&uid), sim.instances(&part)], kept);
    assert_eq!(state(&sim), ("0".to_owned(), vec![uid]));
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_memory_of_a_guaranteed_pod_is_not_resized_with_the_policy_static() {
    let text = "Resize is infeasible for Guaranteed Pods alongside Memory Manager policy \"Static\"";
    let sim = start(Options::default(), PAIR, STATIC_MEMORY).await;
    let uid = sim.create(guaranteed("web", "1"));
    sim.wait_ready("web").await;
    assert_eq!(resources(&sim, &uid, "web").cpuset_mems, "0");
    let state = || std::fs::read(sim.root_dir().join("memory_manager_state")).unwrap();
    let kept = (state(), sim.instances(&uid));
    resize(&sim, "web", "1", "48Mi");
    wait_infeasible(&sim, "web", text).await;
    sim.restart(Service::PodSync).await;
    let _next = sim.create(pods::single("next"));
    sim.wait_ready("next").await;
    wait_infeasible(&sim, "web", text).await;
    assert_eq!(resources(&sim, &uid, "web").memory_limit_in_bytes, 32 << 20);
    resize(&sim, "web", "1", "32Mi");
    sim.wait_pod("web", "it is as before", |seen| is_resized(seen, "1", "32Mi")).await;
    assert_eq!((state(), sim.instances(&uid)), kept);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_boot_with_other_sizes_of_numa_nodes_keeps_the_memory_of_pods() {
    let sim = start(Options::default(), PAIR, STATIC_MEMORY).await;
    let uid = sim.create(guaranteed("web", "1"));
    sim.wait_ready("web").await;
    let table = || {
        let text = std::fs::read(sim.root_dir().join("memory_manager_state")).unwrap();
        let state: Value = serde_json::from_slice(&text).unwrap();
        let table = &state["machineState"]["0"]["memoryMap"]["memory"];
        ["total", "reserved"].map(|size| table[size].as_u64().unwrap() >> 20)
    };
    assert_eq!(table(), [4096, 32]);
    edges::go_down(&sim).await;
    let node = sim.root_dir().with_file_name("sys").join("devices/system/node/node0");
    std::fs::write(node.join("meminfo"), "Node 0 MemTotal: 4190208 kB").unwrap();
    sim.start_all();
    let is_back = |pod: &Seen| pod.is_ready() && pod.restarts() == 1;
    sim.wait_pod("web", "Ready again", is_back).await;
    assert_eq!(resources(&sim, &uid, "web").cpuset_mems, "0");
    assert_eq!(table(), [4092, 32]);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_the_runtime_did_not_move_is_moved_after_the_period() {
    let sim = start(Options::default(), PAIR, &["--cpu-manager-reconcile-period=7s"]).await;
    let other = sim.create(pods::single("other"));
    sim.wait_ready("other").await;
    let refusal = sim.runtime.script(Rule::on(UPDATE).fail(Code::Unknown, "no such cgroup"));
    let uid = sim.create(guaranteed("web", "1"));
    sim.wait_ready("web").await;
    let id = sim.runtime.newest(&other, "c-other").unwrap().id().to_owned();
    sim.wait_calls(UPDATE, &id, 2).await;
    assert_eq!(cpus(&sim, &other, "other"), "0-1");
    let times: Vec<_> = sim.runtime.calls_of(UPDATE).iter().map(|call| call.at).collect();
    assert!(times[1].duration_since(times[0]) >= Duration::from_secs(6), "{times:?}");
    sim.runtime.unscript(refusal);
    wait_cpus(&sim, &other, "other", "0").await;
    assert_eq!(cpus(&sim, &uid, "web"), "1");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_cpus_cannot_be_recorded_waits() {
    let sim = start(Options::default(), PAIR, &[]).await;
    let other = sim.create(pods::single("other"));
    sim.wait_ready("other").await;
    // A directory cannot be replaced by a file.
    let path = sim.root_dir().join("cpu_manager_state");
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    let uid = sim.create(guaranteed("web", "1"));
    let waits = |view: &quintlet_proto::podsync::v1::PodView| {
        view.waiting.as_ref().is_some_and(|waiting| waiting.reason == "ResourcesNotRecorded")
    };
    let view = sim.wait_view("web", "it waits", waits).await;
    let message = view.waiting.unwrap().message;
    assert!(message.starts_with("failed to write the state of CPUs and memory: "), "{message}");
    assert!(sim.sandboxes(&uid).is_empty());
    std::fs::remove_dir(&path).unwrap();
    sim.wait_ready("web").await;
    assert_eq!(state(&sim), ("0".to_owned(), vec![uid]));
    wait_cpus(&sim, &other, "other", "0").await;
    sim.disturb();
    sim.finish().await;
}

/// Returns the pods with memory of certain NUMA nodes, as the state file has them.
fn memory_holders(sim: &Sim) -> Vec<String> {
    let text = std::fs::read(sim.root_dir().join("memory_manager_state")).unwrap();
    let state: Value = serde_json::from_slice(&text).unwrap();
    state["entries"].as_object().map(|pods| pods.keys().cloned().collect()).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cpu_and_memory_have_one_holder_whenever_pod_sync_is_killed() {
    const WRITTEN: [&str; 2] = ["CPU state written", "memory state written"];
    let sim = start(Options { cuts: true, ..Options::default() }, PAIR, STATIC_MEMORY).await;
    let other = sim.create(pods::single("other"));
    sim.wait_ready("other").await;
    let cut = async |written: &str, when| {
        let reached = tokio::time::timeout(Duration::from_secs(60), sim.cuts().reached()).await;
        let passed = sim.cuts().disarm();
        assert!(reached.is_ok(), "{when:?} {written} was not reached, but {passed:?}");
        sim.restart(Service::PodSync).await;
    };
    let arm = |written: &str, when| {
        sim.cuts().arm(Kind::File, when, Some(CutPoint { kind: written.to_owned(), number: 1 }));
    };
    // Without a kill: each state is written once at the start of a pod, before its sandbox.
    sim.cuts().arm(Kind::File, When::After, None);
    let uid = sim.create(guaranteed("whole", "1"));
    sim.wait_ready("whole").await;
    let mut steps = sim.cuts().disarm();
    steps.retain(|step| WRITTEN.contains(step));
    assert_eq!(steps, WRITTEN);
    assert_eq!(resources(&sim, &uid, "whole").cpuset_mems, "0");
    sim.delete("whole", None);
    sim.wait_gone("whole").await;
    sim.wait_nothing_left(&uid).await;
    for (name, written, when) in [
        ("cpu-before", WRITTEN[0], When::Before),
        ("cpu-after", WRITTEN[0], When::After),
        ("memory-before", WRITTEN[1], When::Before),
        ("memory-after", WRITTEN[1], When::After),
    ] {
        arm(written, when);
        let uid = sim.create(guaranteed(name, "1"));
        cut(written, when).await;
        sim.wait_ready(name).await;
        sim.assert_started_once(name, &uid);
        let seen = resources(&sim, &uid, name);
        assert_eq!((seen.cpuset_cpus.as_str(), seen.cpuset_mems.as_str()), ("1", "0"), "{name}");
        assert_eq!(state(&sim), ("0".to_owned(), vec![uid.clone()]), "{name}");
        assert_eq!(memory_holders(&sim), std::slice::from_ref(&uid), "{name}");
        wait_cpus(&sim, &other, "other", "0").await;
        arm(written, when);
        sim.delete(name, None);
        cut(written, when).await;
        sim.wait_gone(name).await;
        sim.wait_nothing_left(&uid).await;
        wait_cpus(&sim, &other, "other", "0-1").await;
        assert_eq!(state(&sim), ("0-1".to_owned(), Vec::new()), "{name}");
        assert_eq!(memory_holders(&sim), [""; 0], "{name}");
    }
    sim.finish().await;
}
