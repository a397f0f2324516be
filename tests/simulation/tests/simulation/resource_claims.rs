//! Pods with claims of dynamic resource allocation, with a driver of the tests on its real socket.

use std::time::Duration;

use pod_sync_claims::checkpoint::{CHECKPOINT, decode};
use quintlet_cri_api::v1;
use quintlet_dra_driver::{Fault, HealthStatus, Method as DriverMethod, TestDriver};
use quintlet_kit::messages::whole;
use quintlet_proto::podsync::v1::claims_client::ClaimsClient;
use quintlet_proto::podsync::v1::{ClaimState, ClaimView, ListClaimsReply, ListClaimsRequest};
use quintlet_simulation::{LONG, Options, Seen, Service, Sim, pods};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};
use tonic::Code;

use crate::edges;

pub(crate) const DRIVER: &str = "gpu.example.com";
const FAILED: &str = "FailedPrepareDynamicResources";

/// Starts a driver in the directory of all plugins, and waits until it is registered.
pub(crate) async fn start_driver(sim: &Sim) -> TestDriver {
    start_driver_as(sim, &["v1.DRAPlugin"]).await
}

/// Starts a driver with these services in the directory of all plugins, and waits until it is registered.
async fn start_driver_as(sim: &Sim, services: &[&str]) -> TestDriver {
    let socket = sim.root_dir().join("plugins_registry").join("gpu.sock");
    until("the directory of plugins", LONG, async || {
        if socket.parent().is_some_and(|dir| dir.exists()) { Ok(()) } else { Err(()) }
    })
    .await;
    let _ = std::fs::remove_file(&socket);
    let driver = TestDriver::start_as(&socket, DRIVER, services);
    until("the registration", LONG, async || {
        let informed = driver.informed();
        if informed.last() == Some(&Ok(())) { Ok(()) } else { Err(informed) }
    })
    .await;
    driver
}

fn create_claim(sim: &Sim) {
    create_named_claim(sim, "gpu");
}

pub(crate) fn create_named_claim(sim: &Sim, name: &str) {
    let claim = json!({"metadata": {"name": name}, "spec": {"devices": {}}});
    sim.api.create("resourceclaims", "default", claim).unwrap();
}

/// Allocates the claim, and reserves it for pods.
fn allocate(sim: &Sim, uids: &[&str]) {
    allocate_named(sim, "gpu", uids);
}

/// Allocates a claim, and reserves it for pods.
pub(crate) fn allocate_named(sim: &Sim, name: &str, uids: &[&str]) {
    let reserved: Vec<Value> =
        uids.iter().map(|uid| json!({"resource": "pods", "name": "p", "uid": uid})).collect();
    let results = json!([{"driver": DRIVER, "pool": "pool", "device": name, "request": "r"}]);
    let status = json!({"reservedFor": reserved, "allocation": {"devices": {"results": results}}});
    sim.api.edit("resourceclaims/status", "default", name, |claim| claim["status"] = status).unwrap();
}

fn with_claim(name: &str) -> Value {
    with_named_claim(name, "gpu")
}

pub(crate) fn with_named_claim(name: &str, claim: &str) -> Value {
    let mut pod = pods::single(name);
    pod["spec"]["terminationGracePeriodSeconds"] = json!(2);
    pod["spec"]["resourceClaims"] = json!([{"name": "device", "resourceClaimName": claim}]);
    pod["spec"]["containers"][0]["resources"] = json!({"claims": [{"name": "device"}]});
    pod
}

/// Creates a pod whose claim is allocated and reserved for it, and waits until it is ready.
async fn start_pod(sim: &Sim, name: &str) -> String {
    let uid = sim.create(with_claim(name));
    allocate(sim, &[&uid]);
    sim.wait_ready(name).await;
    uid
}

pub(crate) fn cdi_devices(sim: &Sim, uid: &str, name: &str) -> Vec<v1::CdiDevice> {
    sim.runtime.newest(uid, &format!("c-{name}")).unwrap().config.cdi_devices
}

pub(crate) fn holders(sim: &Sim) -> Vec<String> {
    let records = decode(&std::fs::read(sim.root_dir().join(CHECKPOINT)).unwrap()).unwrap();
    records.into_values().flat_map(|record| record.pods).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_gets_the_devices_of_its_claim_once_it_may_use_it_and_gives_them_back() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim).await;
    create_claim(&sim);
    let uid = sim.create(with_claim("web"));
    let claim = sim.api.get("resourceclaims", "default", "gpu").unwrap();
    let claim_uid = claim["metadata"]["uid"].as_str().unwrap();
    let text = format!("pod web ({uid}) is not allowed to use ResourceClaim gpu ({claim_uid})");
    let message = format!("Failed to prepare dynamic resources: prepare dynamic resources: {text}");
    let event = sim.wait_event("web", &message, |e| e.reason == FAILED && e.message == message).await;
    assert_eq!(event.kind, "Warning");
    let waiting = sim.view("web").await.unwrap().waiting.unwrap();
    assert_eq!(waiting.reason, "ClaimsNotPrepared");
    assert!(sim.sandboxes(&uid).is_empty() && driver.calls().is_empty());
    allocate(&sim, &[&uid]);
    sim.wait_ready("web").await;
    assert_eq!(sim.sandboxes(&uid).len(), 1);
    assert_eq!(cdi_devices(&sim, &uid, "web"), [v1::CdiDevice { name: format!("{DRIVER}/claim=gpu") }]);
    assert_eq!(holders(&sim), [uid.as_str()]);
    // The pod has not ended before its claim is unprepared.
    sim.disturb();
    driver.set_fault(DriverMethod::NodeUnprepareResources, Some(Fault::Fail(Code::Internal)));
    sim.delete("web", None);
    sim.wait_view("web", "its claim is still prepared", |view| {
        view.waiting.as_ref().is_some_and(|waiting| waiting.reason == "ClaimsUnpreparing")
    })
    .await;
    assert!(sim.api.get("pods", "default", "web").is_some());
    driver.set_fault(DriverMethod::NodeUnprepareResources, None);
    sim.wait_gone("web").await;
    assert!(driver.prepared().is_empty() && holders(&sim).is_empty());
    sim.finish().await;
}

/// Waits until the status of a pod has this health of the device of its claim.
async fn wait_health(sim: &Sim, health: &Value) {
    let device = json!({"resourceID": format!("{DRIVER}/claim=gpu")});
    let mut device = device.as_object().unwrap().clone();
    device.extend(health.as_object().unwrap().clone());
    let expected = json!([{"name": "claim:device", "resources": [device]}]);
    until("the health of the device", LONG, async || {
        let pod = sim.api.get("pods", "default", "web").unwrap_or_default();
        let seen = pod["status"]["containerStatuses"][0]["allocatedResourcesStatus"].clone();
        if seen == expected { Ok(()) } else { Err(seen) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_status_of_a_pod_has_the_health_of_the_devices_of_its_claims() {
    let sim = Sim::start(Options::default()).await;
    sim.disturb();
    let driver = start_driver_as(&sim, &["v1.DRAPlugin", "v1.DRAResourceHealth"]).await;
    create_claim(&sim);
    let _uid = start_pod(&sim, "web").await;
    wait_health(&sim, &json!({"health": "Unknown"})).await;
    driver.report_health(&[("pool", "gpu", HealthStatus::Unhealthy, "too hot", 600)]);
    wait_health(&sim, &json!({"health": "Unhealthy", "message": "too hot"})).await;
    driver.report_health(&[("pool", "gpu", HealthStatus::Healthy, "", 600)]);
    wait_health(&sim, &json!({"health": "Healthy"})).await;
    sim.finish().await;
}

/// Returns the name of the only driver, whose plugin is connected, and the only claim, as pod-sync lists
/// them.
async fn claims(sim: &Sim) -> (String, ClaimView) {
    let mut client = ClaimsClient::new(quintlet_kit::socket::channel(sim.paths().podsync()));
    let listed = whole(client.list(ListClaimsRequest {})).await.unwrap().into_inner();
    let ListClaimsReply { mut drivers, mut claims } = listed;
    let (driver, claim) = (drivers.pop().unwrap(), claims.pop().unwrap());
    assert!(drivers.is_empty() && claims.is_empty());
    assert!(driver.plugins.iter().any(|plugin| plugin.is_connected && plugin.endpoint.ends_with("gpu.sock")));
    (driver.name, claim)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_waits_for_a_driver_names_its_claims_and_the_driver() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim).await;
    driver.set_fault(DriverMethod::NodePrepareResources, Some(Fault::Wait));
    create_claim(&sim);
    let uid = sim.create(with_claim("web"));
    allocate(&sim, &[&uid]);
    let text = format!("resource claims are not prepared: gpu ({DRIVER})");
    sim.wait_view("web", "its driver is named", |view| {
        view.waiting.as_ref().is_some_and(|waiting| waiting.message == text)
    })
    .await;
    let (listed, claim) = claims(&sim).await;
    assert_eq!((listed, claim.state()), (DRIVER.to_owned(), ClaimState::Busy));
    driver.set_fault(DriverMethod::NodePrepareResources, None);
    sim.wait_ready("web").await;
    let (_, claim) = claims(&sim).await;
    assert_eq!((claim.name.as_str(), claim.state()), ("gpu", ClaimState::Prepared));
    assert_eq!(
        (claim.drivers, claim.cdi_devices),
        (vec![DRIVER.to_owned()], vec![format!("{DRIVER}/claim=gpu")])
    );
    assert_eq!((claim.users[0].pod_uid.as_str(), claim.users[0].pod.as_str()), (uid.as_str(), "default/web"));
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_pod_keeps_its_claim_over_a_restart_and_a_reboot_prepares_it_again() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim).await;
    create_claim(&sim);
    let uid = start_pod(&sim, "web").await;
    let before = sim.instances(&uid);
    sim.kill(Service::PodSync).await;
    sim.up(Service::PodSync);
    let _other = sim.create(pods::single("other"));
    sim.wait_ready("other").await;
    assert_eq!(sim.instances(&uid), before);
    // A container that starts again has the same device, without a call.
    let container = sim.runtime.newest(&uid, "c-web").unwrap();
    sim.runtime.exit(container.id(), 1);
    until("the container starts again", LONG, async || {
        let newest = sim.runtime.newest(&uid, "c-web").unwrap();
        if newest.id() != container.id() { Ok(()) } else { Err(newest.status) }
    })
    .await;
    assert_eq!(cdi_devices(&sim, &uid, "web").len(), 1);
    assert_eq!(driver.calls_of("NodePrepareResources"), 1);
    drop(driver);
    edges::go_down(&sim).await;
    sim.start_all();
    let driver = start_driver(&sim).await;
    let is_back = |pod: &Seen| pod.is_ready() && pod.restarts() == 2;
    sim.wait_pod("web", "Ready again", is_back).await;
    assert_eq!(driver.calls(), ["v1 NodePrepareResources gpu"]);
    assert_eq!(cdi_devices(&sim, &uid, "web").len(), 1);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_was_created_while_pod_sync_was_down_gets_its_claim() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim).await;
    create_claim(&sim);
    sim.kill(Service::PodSync).await;
    let uid = sim.create(with_claim("web"));
    allocate(&sim, &[&uid]);
    sim.up(Service::PodSync);
    sim.wait_ready("web").await;
    assert_eq!(cdi_devices(&sim, &uid, "web").len(), 1);
    assert_eq!(driver.prepared().len(), 1);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_claim_of_a_pod_that_is_gone_after_a_restart_is_unprepared() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim).await;
    create_claim(&sim);
    let uid = start_pod(&sim, "web").await;
    assert_eq!(driver.prepared().len(), 1);
    edges::go_down(&sim).await;
    sim.api.delete("pods", "default", "web", Some(0)).unwrap();
    sim.start_all();
    // The record follows the answer of the driver, so that a kill between them repeats the call.
    until("the claim is unprepared, and its record is gone", LONG, async || {
        let is_held = holders(&sim).contains(&uid);
        if driver.prepared().is_empty() && !is_held { Ok(()) } else { Err((driver.calls(), is_held)) }
    })
    .await;
    sim.finish().await;
}

/// Ends pod-sync, tears its record of claims, and removes the copy of the record if `has_copy` is false.
async fn lose_record(sim: &Sim, has_copy: bool) {
    sim.kill(Service::PodSync).await;
    let path = sim.root_dir().join(CHECKPOINT);
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    if !has_copy {
        std::fs::remove_file(sim.paths().state_dir().join(format!(".{CHECKPOINT}"))).unwrap();
    }
}

async fn wait_holders(sim: &Sim, expected: &[&str]) {
    until("the record", LONG, async || {
        let Ok(bytes) = std::fs::read(sim.root_dir().join(CHECKPOINT)) else { return Err(Vec::new()) };
        let records = decode(&bytes).unwrap();
        let seen: Vec<String> = records.into_values().flat_map(|record| record.pods).collect();
        if seen == expected { Ok(()) } else { Err(seen) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_claim_of_a_pod_that_went_with_the_record_torn_is_unprepared() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim).await;
    create_claim(&sim);
    let _uid = start_pod(&sim, "web").await;
    lose_record(&sim, true).await;
    // Nothing but the copy of the record names the claim.
    sim.api.delete("pods", "default", "web", Some(0)).unwrap();
    sim.api.delete("resourceclaims", "default", "gpu", Some(0)).unwrap();
    sim.up(Service::PodSync);
    until("the claim is unprepared", LONG, async || {
        if driver.prepared().is_empty() { Ok(()) } else { Err(driver.calls()) }
    })
    .await;
    wait_holders(&sim, &[]).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_runs_without_any_record_is_recorded_again_and_unprepared_at_its_end() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim).await;
    create_claim(&sim);
    let uid = start_pod(&sim, "web").await;
    let before = sim.instances(&uid);
    // The driver fails at first, which changes nothing of the pod.
    driver.set_fault(DriverMethod::NodePrepareResources, Some(Fault::Fail(Code::Internal)));
    lose_record(&sim, false).await;
    sim.up(Service::PodSync);
    let message = "rpc error: code = Internal";
    let event = |e: &quintlet_simulation::EventSeen| e.reason == FAILED && e.message.contains(message);
    let _failed = sim.wait_event("web", "the driver fails", event).await;
    driver.set_fault(DriverMethod::NodePrepareResources, None);
    wait_holders(&sim, &[&uid]).await;
    until("the claim is prepared", LONG, async || {
        let (_, claim) = claims(&sim).await;
        if claim.state() == ClaimState::Prepared { Ok(()) } else { Err(claim) }
    })
    .await;
    assert_eq!((sim.instances(&uid), driver.calls_of("NodeUnprepareResources")), (before, 0));
    sim.wait_view("web", "it waits for nothing", |view| view.waiting.is_none()).await;
    // The record is lost again, and the pod has ended before it is written.
    lose_record(&sim, false).await;
    sim.api.delete("pods", "default", "web", None).unwrap();
    sim.up(Service::PodSync);
    sim.wait_gone("web").await;
    assert!(driver.prepared().is_empty(), "{:?}", driver.calls());
    wait_holders(&sim, &[]).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_pod_does_not_unprepare_the_claim_of_another_that_runs_without_any_record() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim).await;
    create_claim(&sim);
    let [first, second] = ["first", "second"].map(|name| sim.create(with_claim(name)));
    allocate(&sim, &[&first, &second]);
    for name in ["first", "second"] {
        sim.wait_ready(name).await;
    }
    let before = sim.instances(&second);
    lose_record(&sim, false).await;
    sim.api.delete("pods", "default", "first", None).unwrap();
    sim.up(Service::PodSync);
    sim.wait_gone("first").await;
    wait_holders(&sim, &[&second]).await;
    assert_eq!(driver.calls_of("NodeUnprepareResources"), 0);
    assert_eq!(sim.instances(&second), before);
    sim.delete("second", None);
    sim.wait_gone("second").await;
    assert_eq!(driver.calls_of("NodeUnprepareResources"), 1);
    assert!(driver.prepared().is_empty());
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_slices_of_a_driver_that_stays_away_are_removed() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim).await;
    let slice = |name: &str, node: &str| {
        let pool = json!({"name": "pool", "generation": 1, "resourceSliceCount": 1});
        let spec = json!({"driver": DRIVER, "nodeName": node, "pool": pool, "devices": []});
        sim.api.create("resourceslices", "", json!({"metadata": {"name": name}, "spec": spec})).unwrap();
    };
    slice("here", quintlet_simulation::NODE);
    slice("elsewhere", "other-node");
    drop(driver);
    until("the slices", LONG, async || {
        let all = sim.api.list("resourceslices");
        let names: Vec<_> = all.iter().map(|slice| slice["metadata"]["name"].clone()).collect();
        if names == [json!("elsewhere")] { Ok(()) } else { Err(names) }
    })
    .await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_server_without_resource_slices_has_one_line_and_no_warning() {
    let sim = Sim::start(Options::default()).await;
    edges::go_down(&sim).await;
    sim.api.faults().set_unserved(&["resource.k8s.io/v1/resourceslices"]);
    let before = sim.lines().len();
    sim.start_all();
    let about_slices = || {
        let mut lines = sim.lines().split_off(before);
        lines.retain(|line| line["msg"].as_str().is_some_and(|text| text.contains("ResourceSlices")));
        lines
    };
    until("the line", LONG, async || if about_slices().is_empty() { Err(()) } else { Ok(()) }).await;
    let _uid = sim.create(pods::single("web"));
    sim.wait_ready("web").await;
    // Longer than the first pauses of a request that is tried again.
    tokio::time::sleep(Duration::from_secs(10)).await;
    let levels: Vec<Value> = about_slices().iter().map(|line| line["level"].clone()).collect();
    assert_eq!(levels, [json!("info")]);
    sim.finish().await;
}
