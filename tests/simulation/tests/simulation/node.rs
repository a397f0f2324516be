//! The Node object, and UpdateRuntimeConfig.

use clap::Parser as _;
use quintlet_cri_api::v1;
use quintlet_simulation::{LONG, NODE, Options, Service, Sim};
use quintlet_testkit::fake_runtime::Method;
use quintlet_testkit::wait::until;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Code;

async fn wait_node(sim: &Sim, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    until(what, LONG, async || {
        let node = sim.api.get("nodes", "", NODE).unwrap_or(Value::Null);
        if wanted(&node) { Ok(node) } else { Err(node) }
    })
    .await
}

fn ready(node: &Value) -> (&str, &str) {
    let conditions = node["status"]["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
    let ready = conditions.iter().find(|c| c["type"] == "Ready").unwrap_or(&Value::Null);
    (ready["status"].as_str().unwrap_or_default(), ready["message"].as_str().unwrap_or_default())
}

/// Returns the pod CIDRs that the runtime was sent, in order.
fn sent_cidrs(sim: &Sim) -> Vec<String> {
    let calls = sim.runtime.calls_of(Method::UpdateRuntimeConfig);
    let cidr = |r: v1::UpdateRuntimeConfigRequest| Some(r.runtime_config?.network_config?.pod_cidr);
    calls.iter().filter_map(|c| cidr(c.request())).collect()
}

async fn wait_sent(sim: &Sim, wanted: &[&str]) {
    until("the runtime receives the CIDRs", LONG, async || {
        let sent_cidrs = sent_cidrs(sim);
        if sent_cidrs == wanted { Ok(()) } else { Err(sent_cidrs) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_becomes_ready_as_soon_as_its_network_is() {
    let sim = Sim::prepare(Options::default()).await;
    sim.runtime.set_condition("NetworkReady", false, "NetworkPluginNotReady", "no plugin");
    Service::ALL.into_iter().for_each(|service| sim.up(service));
    let late = |n: &Value| ready(n).1.contains("NetworkReady=false");
    wait_node(&sim, "not ready for want of a network", late).await;
    // It is polled every 100 ms. With the interval of a node that was ready once, this many responses take
    // four minutes.
    sim.runtime.forget_calls();
    until("the runtime is asked often", LONG, async || {
        let calls = sim.runtime.count(Method::Status);
        if calls >= 50 { Ok(()) } else { Err(calls) }
    })
    .await;
    sim.runtime.set_condition("NetworkReady", true, "", "");
    wait_node(&sim, "Ready", |n| ready(n).0 == "True").await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_runtime_receives_the_pod_cidrs() {
    let sim = Sim::start(Options::default()).await;
    wait_node(&sim, "Ready", |n| ready(n).0 == "True").await;
    assert_eq!(sent_cidrs(&sim), [""; 0], "there is nothing to send yet");
    sim.runtime.fail(Method::UpdateRuntimeConfig, Code::Unavailable, "not now", 2);
    let (v4, v6) = ("10.5.0.0/24", "fd00:5::/64");
    let both = format!("{v4},{v6}");
    sim.api.edit("nodes", "", NODE, |n| n["spec"]["podCIDRs"] = json!([v4, v6])).unwrap();
    wait_sent(&sim, &[&both, &both, &both]).await;
    // Another change of the Node sends nothing to the runtime. The next CIDR is sent after it.
    sim.api.edit("nodes", "", NODE, |n| n["metadata"]["labels"]["a"] = json!("b")).unwrap();
    sim.api.edit("nodes", "", NODE, |n| n["spec"]["podCIDRs"] = json!(["10.6.0.0/24"])).unwrap();
    wait_sent(&sim, &[&both, &both, &both, "10.6.0.0/24"]).await;
    // A new process does not know what its predecessor sent.
    sim.restart(Service::PodSync).await;
    wait_sent(&sim, &[&both, &both, &both, "10.6.0.0/24", "10.6.0.0/24"]).await;
    sim.finish().await;

    let mut alone = Sim::prepare(Options::default()).await;
    alone.set_standalone();
    alone.set_pod_sync_args(&["--pod-cidr=10.7.0.0/24"]);
    Service::ALL.into_iter().for_each(|service| alone.up(service));
    wait_sent(&alone, &["10.7.0.0/24"]).await;
    alone.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn configured_labels_apply_only_to_a_new_node() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&["--node-label=tier=edge"]);
    Service::ALL.into_iter().for_each(|service| sim.up(service));
    wait_node(&sim, "Ready", |n| ready(n).0 == "True").await;
    sim.api
        .edit("nodes", "", NODE, |n| {
            n["metadata"]["labels"]["tier"] = json!("core");
            n["metadata"]["labels"]["kubernetes.io/os"] = json!("plan9");
        })
        .unwrap();
    // System labels are restored, and no other ones.
    let mended = |n: &Value| n["metadata"]["labels"]["kubernetes.io/os"] == "linux";
    let node = wait_node(&sim, "its label of the system back", mended).await;
    assert_eq!(node["metadata"]["labels"]["tier"], "core");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_that_the_machine_does_not_have_is_not_reported() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&["--node-ip=192.0.2.77"]);
    // An error about the address is logged.
    sim.disturb();
    Service::ALL.into_iter().for_each(|service| sim.up(service));
    let node = wait_node(&sim, "Ready", |n| ready(n).0 == "True").await;
    assert_eq!(node["status"]["addresses"], Value::Null, "{node:#}");
    sim.finish().await;
}

/// Returns the limit of memory of a cgroup below the cgroup root of the node.
fn memory_limit(sim: &Sim, cgroup: &str) -> String {
    let below = format!("{}/{cgroup}", sim.cgroup_root());
    let files = [
        format!("/sys/fs/cgroup/memory{below}/memory.limit_in_bytes"),
        format!("/sys/fs/cgroup{below}/memory.max"),
    ];
    let limit = files.iter().find_map(|file| std::fs::read_to_string(file).ok());
    limit.unwrap_or_default().trim().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reservations_limit_their_cgroups_and_the_pods() {
    let mut sim = Sim::prepare(Options::default()).await;
    // Any existing cgroup will do, and pod-sync creates this one before.
    let cgroup = format!("{}/kubepods/besteffort", sim.cgroup_root());
    let cgroup_flag = format!("--system-reserved-cgroup={cgroup}");
    sim.set_pod_sync_args(&[
        "--system-reserved=memory=64Mi",
        "--enforce-node-allocatable=pods,system-reserved",
        &cgroup_flag,
    ]);
    sim.start_all();
    wait_node(&sim, "Ready", |n| ready(n).0 == "True").await;
    let want = [
        "Updated Node Allocatable limit across pods".to_owned(),
        format!("Updated limits on system reserved cgroup {cgroup}"),
    ];
    until("events", LONG, async || {
        let events = sim.events(NODE);
        let messages: Vec<String> =
            events.into_iter().filter(|e| e.reason == "NodeAllocatableEnforced").map(|e| e.message).collect();
        if want.iter().all(|w| messages.contains(w)) { Ok(()) } else { Err(messages) }
    })
    .await;
    assert_eq!(memory_limit(&sim, "kubepods/besteffort"), (64 << 20).to_string());
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let kib = text.lines().find_map(|l| l.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")).unwrap();
    let all = kib.parse::<u64>().unwrap() * 1024;
    assert_eq!(memory_limit(&sim, "kubepods"), (all - (64 << 20)).to_string());
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reservation_without_its_cgroup_ends_pod_sync_with_an_error() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&[
        "--kube-reserved=cpu=100m",
        "--kube-reserved-cgroup=/quintlet-absent",
        "--enforce-node-allocatable=kube-reserved",
    ]);
    for service in Service::ALL.into_iter().filter(|service| *service != Service::PodSync) {
        sim.up(service);
    }
    let args = <pod_sync::args::Args as clap::Parser>::try_parse_from(sim.pod_sync_line()).unwrap();
    let (_never, drain) = tokio::sync::watch::channel(false);
    let ended = pod_sync::run(args, drain, tokio_util::sync::CancellationToken::new());
    let error = tokio::time::timeout(LONG, ended).await.expect("pod-sync ends").unwrap_err().to_string();
    let want = "Failed to enforce Kube Reserved Cgroup Limits on \"/quintlet-absent\": ";
    assert!(error.starts_with(want), "{error}");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_sync_that_cannot_start_records_an_event_of_the_node() {
    let mut sim = Sim::prepare(Options::default()).await;
    let file = sim.root_dir().with_file_name("file");
    std::fs::write(&file, "").unwrap();
    sim.set_pod_sync_args(&[&format!("--root-dir={}", file.join("root").display())]);
    sim.up(Service::Status);
    let args = pod_sync::args::Args::try_parse_from(sim.pod_sync_line()).unwrap();
    let (_never, drain) = watch::channel(false);
    let error = pod_sync::run(args, drain, CancellationToken::new()).await.unwrap_err();
    let text = quintlet_kit::error_chain(&*error);
    assert!(text.starts_with("failed to access ") && text.contains("Not a directory"), "{text}");
    // The event is written before the process ends.
    let events: Vec<_> = sim.events(NODE).into_iter().filter(|e| e.reason == "KubeletSetupFailed").collect();
    let seen: Vec<_> = events.iter().map(|e| (e.kind.as_str(), e.message.as_str())).collect();
    assert_eq!(seen, [("Warning", text.as_str())]);
    sim.finish().await;
}
