//! Pods with devices, with a device plugin of the tests on its real socket.

use std::path::{Path, PathBuf};
use std::time::Duration;

use pod_sync_devices::GRACE;
use pod_sync_devices::checkpoint::{CHECKPOINT, decode};
use quintlet_cri_api::v1;
use quintlet_device_plugin::{Fault, Method as PluginMethod, TestPlugin};
use quintlet_proto::podsync::v1::PodView;
use quintlet_simulation::{LONG, NODE, Options, Seen, Service, Sim, pods};
use quintlet_testkit::fake_runtime::Behaviour;
use quintlet_testkit::wait::until;
use serde_json::{Value, json};
use tonic::Code;

use crate::edges;

pub(crate) const DEVICE: &str = "example.com/device";

pub(crate) fn dir(sim: &Sim) -> PathBuf {
    sim.root_dir().join("device-plugins")
}

/// Starts a plugin and registers it, once pod-sync listens.
async fn start_plugin(sim: &Sim, devices: &[&str]) -> TestPlugin {
    start_plugin_with(sim, devices, |_| {}).await
}

/// Starts a plugin that `change` completes, and registers it, once pod-sync listens.
pub(crate) async fn start_plugin_with(
    sim: &Sim,
    devices: &[&str],
    change: impl FnOnce(&TestPlugin),
) -> TestPlugin {
    let agent = dir(sim).join("kubelet.sock");
    until("the socket of device plugins", LONG, async || {
        tokio::net::UnixStream::connect(&agent).await.map(drop).map_err(|error| error.to_string())
    })
    .await;
    let socket = dir(sim).join("test.sock");
    let _ = std::fs::remove_file(&socket);
    let plugin = TestPlugin::start(&socket, devices);
    change(&plugin);
    plugin.register(&agent, DEVICE).await.unwrap();
    plugin
}

/// Waits until the Node shows this number of devices.
pub(crate) async fn wait_node(sim: &Sim, capacity: &str, allocatable: &str) {
    until("the devices of the Node", LONG, async || {
        let status = sim.api.get("nodes", "", NODE).map(|node| node["status"].clone()).unwrap_or_default();
        let seen = ["capacity", "allocatable"].map(|field| status[field][DEVICE].clone());
        if seen == [json!(capacity), json!(allocatable)] { Ok(()) } else { Err(seen) }
    })
    .await;
}

pub(crate) fn with_devices(name: &str, count: usize) -> Value {
    let mut pod = pods::single(name);
    pod["spec"]["terminationGracePeriodSeconds"] = json!(2);
    let count = json!({DEVICE: count.to_string()});
    pod["spec"]["containers"][0]["resources"] = json!({"limits": count, "requests": count});
    pod
}

fn config(sim: &Sim, uid: &str, name: &str) -> v1::ContainerConfig {
    sim.runtime.newest(uid, &format!("c-{name}")).unwrap().config
}

/// Returns the devices of a pod by its environment.
pub(crate) fn devices_of(sim: &Sim, uid: &str, name: &str) -> String {
    let envs = config(sim, uid, name).envs;
    let env = envs.into_iter().find(|env| env.key == "DEVICES").unwrap();
    String::from_utf8(env.value).unwrap()
}

pub(crate) fn holders(dir: &Path) -> Vec<String> {
    let checkpoint = decode(&std::fs::read(dir.join(CHECKPOINT)).unwrap()).unwrap();
    checkpoint.held.pods().map(str::to_owned).collect()
}

fn waits(view: &PodView) -> bool {
    view.waiting.as_ref().is_some_and(|waiting| waiting.reason == "DevicesNotAllocated")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_gets_its_devices_before_its_container_and_gives_them_back_with_its_end() {
    let sim = Sim::start(Options::default()).await;
    let plugin = start_plugin(&sim, &["d1", "!d2"]).await;
    wait_node(&sim, "2", "1").await;
    let uid = sim.create(with_devices("web", 1));
    sim.wait_ready("web").await;
    sim.assert_started_once("web", &uid);
    let config = config(&sim, &uid, "web");
    assert_eq!(devices_of(&sim, &uid, "web"), "d1");
    assert!(config.mounts.iter().any(|m| m.container_path == "/device" && m.readonly), "{:?}", config.mounts);
    let device = v1::Device {
        container_path: "/dev/d1".to_owned(),
        host_path: "/dev/null".to_owned(),
        permissions: "rw".to_owned(),
    };
    assert_eq!(config.devices, [device]);
    assert_eq!(config.annotations["example.com/devices"], "d1");
    assert_eq!(config.cdi_devices, [v1::CdiDevice { name: "example.com/device=d1".to_owned() }]);
    assert_eq!(holders(&dir(&sim)), std::slice::from_ref(&uid));
    // The scheduler does not send a second pod; a pod with a node name is rejected.
    let _late = sim.create(with_devices("late", 1));
    let rejected = sim.wait_pod("late", "it is rejected", |pod| pod.phase() == "Failed").await;
    assert_eq!(rejected.text("/status/reason"), format!("OutOf{DEVICE}"));
    sim.delete("web", None);
    sim.wait_gone("web").await;
    assert_eq!(holders(&dir(&sim)), [""; 0]);
    let uid = sim.create(with_devices("next", 1));
    sim.wait_ready("next").await;
    assert_eq!(devices_of(&sim, &uid, "next"), "d1");
    assert_eq!(plugin.calls_of("Allocate d1"), 2);
    sim.disturb();
    drop(plugin);
    wait_node(&sim, "2", "0").await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_whose_holder_runs_is_not_given_away_after_the_checkpoint_was_torn() {
    let sim = Sim::start(Options::default()).await;
    let plugin = start_plugin(&sim, &["d1", "d2"]).await;
    let holder = sim.create(with_devices("holder", 1));
    sim.wait_ready("holder").await;
    let before = sim.instances(&holder);
    assert_eq!(devices_of(&sim, &holder, "holder"), "d1");
    sim.kill(Service::PodSync).await;
    drop(plugin);
    let path = dir(&sim).join(CHECKPOINT);
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    sim.up(Service::PodSync);
    let _plugin = start_plugin(&sim, &["d1", "d2"]).await;
    wait_node(&sim, "2", "2").await;
    let new = sim.create(with_devices("new", 1));
    sim.wait_ready("new").await;
    assert_eq!(devices_of(&sim, &new, "new"), "d2");
    assert_eq!(sim.instances(&holder), before);
    let mut both = [holder, new];
    both.sort();
    assert_eq!(holders(&dir(&sim)), both);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_has_succeeded_is_not_admitted_again_after_a_restart_without_its_plugin() {
    let sim = Sim::start(Options::default()).await;
    let plugin = start_plugin(&sim, &["d1"]).await;
    wait_node(&sim, "1", "1").await;
    let mut pod = with_devices("job", 1);
    pod["spec"]["restartPolicy"] = json!("Never");
    let uid = sim.create(pod);
    sim.wait_ready("job").await;
    assert!(sim.runtime.exit(sim.runtime.newest(&uid, "c-job").unwrap().id(), 0));
    sim.wait_pod("job", "it has succeeded", |pod| pod.phase() == "Succeeded").await;
    sim.kill(Service::PodSync).await;
    drop(plugin);
    sim.up(Service::PodSync);
    let _other = sim.create(pods::single("other"));
    sim.wait_ready("other").await;
    // Longer than a pod waits for its plugin.
    tokio::time::sleep(GRACE * 2).await;
    let pod = sim.pod("job");
    assert_eq!((pod.phase(), pod.text("/status/reason")), ("Succeeded", ""));
    assert!(sim.view("job").await.is_ok_and(|view| !waits(&view)));
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_allocation_fails_is_rejected_with_the_kubelets_text() {
    let sim = Sim::start(Options::default()).await;
    let plugin = start_plugin(&sim, &["d1"]).await;
    wait_node(&sim, "1", "1").await;
    plugin.set_fault(PluginMethod::Allocate, Some(Fault::Fail(Code::Internal)));
    let uid = sim.create(with_devices("web", 1));
    let rejected = sim.wait_pod("web", "it is rejected", |pod| pod.phase() == "Failed").await;
    assert_eq!(rejected.text("/status/reason"), "UnexpectedAdmissionError");
    let text = "Allocate failed due to rpc error: code = Internal desc = Allocate fails, which is unexpected";
    assert_eq!(rejected.text("/status/message"), format!("Pod was rejected: {text}"));
    sim.wait_event("web", text, |e| e.reason == "UnexpectedAdmissionError" && e.message == text).await;
    assert!(sim.sandboxes(&uid).is_empty());
    plugin.set_fault(PluginMethod::Allocate, None);
    let _uid = sim.create(with_devices("next", 1));
    sim.wait_ready("next").await;
    sim.finish().await;
}

/// Returns status, reason and message of PodReadyToStartContainers.
fn ready_to_start(pod: &Seen) -> [Value; 3] {
    let all = pod.0["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let found = all.into_iter().find(|condition| condition["type"] == "PodReadyToStartContainers");
    let found = found.unwrap_or_default();
    ["status", "reason", "message"].map(|field| found[field].clone())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_waits_for_its_plugin_and_says_so_while_others_start() {
    let sim = Sim::start(Options::default()).await;
    sim.disturb();
    let plugin = start_plugin(&sim, &["d1"]).await;
    wait_node(&sim, "1", "1").await;
    drop(plugin);
    wait_node(&sim, "1", "0").await;
    let uid = sim.create(with_devices("web", 1));
    sim.wait_view("web", "it waits for the plugin", waits).await;
    let text = "Waiting for the device plugin of example.com/device to register";
    sim.wait_event("web", text, |e| e.reason == "WaitingForDevicePlugin" && e.message == text).await;
    let says_so =
        |pod: &Seen| ready_to_start(pod) == [json!("False"), json!("PodSandboxNotReady"), json!(text)];
    sim.wait_pod("web", "its condition says so", says_so).await;
    // The next process waits, and says so, too.
    sim.restart(Service::PodSync).await;
    sim.wait_view("web", "it waits for the plugin", waits).await;
    sim.wait_pod("web", "its condition says so", says_so).await;
    let waiting = sim.view("web").await.unwrap().waiting.unwrap();
    assert_eq!(
        waiting.message,
        "device plugin of example.com/device (not registered) has not provided the devices"
    );
    let _other = sim.create(pods::single("other"));
    sim.wait_ready("other").await;
    assert!(sim.sandboxes(&uid).is_empty());
    let _plugin = start_plugin(&sim, &["d1"]).await;
    sim.wait_ready("web").await;
    assert_eq!(ready_to_start(&sim.pod("web")), [json!("True"), Value::Null, Value::Null]);
    assert_eq!(devices_of(&sim, &uid, "web"), "d1");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_pod_keeps_its_device_over_restarts_of_pod_sync_and_of_the_plugin() {
    let sim = Sim::start(Options::default()).await;
    let ended = Behaviour { exit: Some((Duration::from_millis(20), 0)), ..Behaviour::default() };
    sim.runtime.behave("init", ended);
    let plugin = start_plugin(&sim, &["d1", "d2"]).await;
    wait_node(&sim, "2", "2").await;
    // The init container has ended, and has left its device to the other one (kubernetes/kubernetes#138446).
    let mut web = with_devices("web", 1);
    let mut init = pods::container("init");
    init["resources"] = web["spec"]["containers"][0]["resources"].clone();
    web["spec"]["initContainers"] = json!([init]);
    let uid = sim.create(web);
    sim.wait_ready("web").await;
    let held = devices_of(&sim, &uid, "web");
    let before = sim.instances(&uid);
    sim.kill(Service::PodSync).await;
    drop(plugin);
    sim.up(Service::PodSync);
    wait_node(&sim, "0", "0").await;
    assert_eq!(sim.instances(&uid), before);
    // The new pod is admitted once the plugin is back, and gets the other device.
    let other = sim.create(with_devices("other", 1));
    sim.wait_view("other", "it waits for the plugin", waits).await;
    let _plugin = start_plugin(&sim, &["d1", "d2"]).await;
    sim.wait_ready("other").await;
    assert_ne!(devices_of(&sim, &other, "other"), held);
    assert_eq!(sim.instances(&uid), before);
    // A container that starts again has the same device.
    let container = sim.runtime.newest(&uid, "c-web").unwrap();
    sim.runtime.exit(container.id(), 1);
    until("the container starts again", LONG, async || {
        let newest = sim.runtime.newest(&uid, "c-web").unwrap();
        if newest.id() != container.id() { Ok(()) } else { Err(newest.status) }
    })
    .await;
    assert_eq!(devices_of(&sim, &uid, "web"), held);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_reboot_a_pod_waits_for_its_plugin_and_gets_the_same_device_again() {
    let sim = Sim::start(Options::default()).await;
    let plugin = start_plugin(&sim, &["d1", "d2"]).await;
    wait_node(&sim, "2", "2").await;
    let first = sim.create(with_devices("first", 1));
    sim.wait_ready("first").await;
    let second = sim.create(with_devices("second", 1));
    sim.wait_ready("second").await;
    sim.delete("first", None);
    sim.wait_gone("first").await;
    assert_eq!(devices_of(&sim, &second, "second"), "d2");
    drop((plugin, first));
    edges::go_down(&sim).await;
    sim.start_all();
    sim.wait_view("second", "it waits for the plugin", waits).await;
    let _other = sim.create(pods::single("other"));
    sim.wait_ready("other").await;
    assert_ne!(sim.pod("second").phase(), "Failed", "it is not rejected");
    let _plugin = start_plugin(&sim, &["d1", "d2"]).await;
    let is_back = |pod: &Seen| pod.is_ready() && pod.restarts() == 1;
    sim.wait_pod("second", "Ready again", is_back).await;
    assert_eq!(devices_of(&sim, &second, "second"), "d2");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_device_is_gone_after_a_reboot_is_rejected_once_the_plugin_is_back() {
    let sim = Sim::start(Options::default()).await;
    let plugin = start_plugin(&sim, &["d1"]).await;
    wait_node(&sim, "1", "1").await;
    let _uid = sim.create(with_devices("web", 1));
    sim.wait_ready("web").await;
    drop(plugin);
    edges::go_down(&sim).await;
    sim.start_all();
    sim.wait_view("web", "it waits for the plugin", waits).await;
    let _plugin = start_plugin(&sim, &["d2"]).await;
    let rejected = sim.wait_pod("web", "it is rejected", |pod| pod.phase() == "Failed").await;
    assert_eq!(rejected.text("/status/reason"), "UnexpectedAdmissionError");
    let text = "Allocate failed due to previously allocated devices are no longer healthy; cannot allocate unhealthy devices example.com/device, which is unexpected";
    assert!(rejected.text("/status/message").ends_with(text), "{rejected:?}");
    sim.finish().await;
}

/// Waits until the status of the pod shows these devices of its container.
async fn wait_health(sim: &Sim, name: &str, devices: &[(&str, &str)]) {
    let devices = devices.iter().map(|(id, health)| json!({"resourceID": id, "health": health}));
    let expected = json!([{"name": DEVICE, "resources": devices.collect::<Vec<_>>()}]);
    until("the health of the devices", LONG, async || {
        let pod = sim.api.get("pods", "default", name).unwrap_or_default();
        let seen = pod["status"]["containerStatuses"][0]["allocatedResourcesStatus"].clone();
        if seen == expected { Ok(()) } else { Err(seen) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_status_of_a_pod_has_the_health_of_its_devices() {
    let sim = Sim::start(Options::default()).await;
    sim.disturb();
    let plugin = start_plugin(&sim, &["d1", "d2"]).await;
    wait_node(&sim, "2", "2").await;
    let _uid = sim.create(with_devices("web", 2));
    sim.wait_ready("web").await;
    wait_health(&sim, "web", &[("d1", "Healthy"), ("d2", "Healthy")]).await;
    plugin.list(&["!d1", "d2"]);
    wait_health(&sim, "web", &[("d1", "Unhealthy"), ("d2", "Healthy")]).await;
    // The last health stays while pod-sync and the plugin are away, for the grace period.
    drop(plugin);
    sim.restart(Service::PodSync).await;
    wait_node(&sim, "0", "0").await;
    wait_health(&sim, "web", &[("d1", "Unhealthy"), ("d2", "Healthy")]).await;
    tokio::time::sleep(GRACE).await;
    wait_health(&sim, "web", &[("d1", "Unknown"), ("d2", "Unknown")]).await;
    let _plugin = start_plugin(&sim, &["d1"]).await;
    wait_health(&sim, "web", &[("d1", "Healthy"), ("d2", "Unhealthy")]).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_status_of_a_failed_pod_keeps_the_health_of_its_devices() {
    let sim = Sim::start(Options::default()).await;
    sim.disturb();
    let plugin = start_plugin(&sim, &["d1"]).await;
    wait_node(&sim, "1", "1").await;
    let mut pod = with_devices("web", 1);
    pod["spec"]["restartPolicy"] = json!("Never");
    let uid = sim.create(pod);
    sim.wait_ready("web").await;
    plugin.list(&["!d1"]);
    wait_health(&sim, "web", &[("d1", "Unhealthy")]).await;
    let container = sim.runtime.newest(&uid, "c-web").unwrap().id().to_owned();
    assert!(sim.runtime.exit(&container, 1));
    sim.wait_pod("web", "it has failed", |seen| seen.phase() == "Failed").await;
    wait_health(&sim, "web", &[("d1", "Unhealthy")]).await;
    // The device is free, and its later health is not that of the pod.
    plugin.list(&["d1"]);
    wait_node(&sim, "1", "1").await;
    sim.restart(Service::PodSync).await;
    let _plugin = start_plugin(&sim, &["d1"]).await;
    let _next = sim.create(with_devices("next", 1));
    sim.wait_ready("next").await;
    wait_health(&sim, "web", &[("d1", "Unhealthy")]).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_gate_the_status_of_a_pod_has_no_health() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&["--feature-gates=ResourceHealthStatus=false"]);
    sim.start_all();
    let plugin = start_plugin(&sim, &["d1"]).await;
    wait_node(&sim, "1", "1").await;
    let uid = sim.create(with_devices("web", 1));
    sim.wait_ready("web").await;
    plugin.list(&["!d1"]);
    wait_node(&sim, "1", "0").await;
    // A status that is written later has none, either.
    let mut pod = pods::single("next");
    pod["spec"]["terminationGracePeriodSeconds"] = json!(2);
    let _next = sim.create(pod);
    sim.wait_ready("next").await;
    let container = sim.runtime.newest(&uid, "c-web").unwrap().id().to_owned();
    assert!(sim.runtime.exit(&container, 1));
    let seen = sim.wait_pod("web", "it has restarted", |seen| seen.restarts() == 1 && seen.is_ready()).await;
    assert_eq!(seen.0["status"]["containerStatuses"][0]["allocatedResourcesStatus"], Value::Null);
    sim.finish().await;
}
