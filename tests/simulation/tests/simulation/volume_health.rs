//! The health of volumes and of storage, with the tests' own driver.

use quintlet_csi_driver::fault::{self, Fault};
use quintlet_csi_driver::thread::DriverThread;
use quintlet_simulation::{LONG, NODE, Seen, Service, Sim};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};

use super::claims::{DRIVER, INTERNAL, bound_claim, csi_driver, mount_of, start_driver_with, with_claim};
use super::volume_features::{delete_all, requests, start_with};

/// Arguments of pod-sync with which drivers are asked once per second.
const EACH_SECOND: [&str; 2] = ["--feature-gates=CSIVolumeHealth=true", "--volume-stats-agg-period=1s"];

/// Returns the health of the volumes in the status of a pod, as text.
fn health_of(seen: &Seen) -> String {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let condition =
        |c: &Value| format!("{}/{}: {}", text(&c["status"]), text(&c["reason"]), text(&c["message"]));
    let volume = |volume: &Value| {
        let conditions: Vec<String> = list(&volume["healthConditions"]).iter().map(condition).collect();
        assert!(volume["lastTransitionTime"].is_string(), "{volume}");
        format!("{} {}", text(&volume["name"]), conditions.join(", "))
    };
    list(&seen.0["status"]["volumeHealth"]).iter().map(volume).collect::<Vec<_>>().join("; ")
}

/// Statuses of `VolumeHealthErrorType`; the last one is of a later version.
const DEGRADED: i32 = 1;
const INACCESSIBLE: i32 = 2;
const LATER: i32 = 99;

const HEALTH: [&str; 2] = ["--capabilities", "STAGE_UNSTAGE_VOLUME,GET_VOLUME_HEALTH"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_health_of_a_volume_is_in_the_status_of_its_pod_until_the_driver_reports_none() {
    let sim = start_with(&EACH_SECOND).await;
    let driver = start_driver_with(&sim, &HEALTH);
    csi_driver(&sim, json!({"attachRequired": false}));
    bound_claim(&sim, "data", |_| {});
    let uid = sim.create(with_claim("web", "data"));
    sim.wait_ready("web").await;
    let slow = (DEGRADED, "Slow", "one path of two");
    fault::set_health(driver.state(), &[slow, (DEGRADED, "Slow", "again"), (LATER, "New", "")]).unwrap();
    let shown = async |what: &str, expected: &str| {
        sim.wait_pod("web", what, |seen| health_of(seen) == expected).await
    };
    shown("a condition", "data Degraded/Slow: one path of two").await;
    let called = fault::requests(driver.state());
    let called = called.iter().find(|call| call["method"] == "NodeGetVolumeHealth").unwrap();
    assert_eq!(called["request"]["published"], json!(mount_of(&sim, &uid, "pv-data")));
    assert!(called["request"]["staged"].as_str().unwrap().ends_with("/globalmount"), "{called}");
    // The same status twice, which the keys of the patch alone would merge.
    fault::set_health(driver.state(), &[(DEGRADED, "Full", "99 %"), (DEGRADED, "Torn", "")]).unwrap();
    shown("other conditions", "data Degraded/Full: 99 %, Degraded/Torn: -").await;
    // A driver that does not answer, also after a restart, is no recovery.
    fault::set(driver.state(), &[("NodeGetVolumeHealth", Fault::Code(INTERNAL))]).unwrap();
    sim.restart(Service::PodSync).await;
    let calls = driver.calls_of("NodeGetVolumeHealth");
    let more = async || match driver.calls_of("NodeGetVolumeHealth") {
        now if now >= calls + 2 => Ok(()),
        now => Err(now),
    };
    until("calls after the restart", LONG, more).await;
    shown("the conditions before the restart", "data Degraded/Full: 99 %, Degraded/Torn: -").await;
    fault::set_health(driver.state(), &[]).unwrap();
    fault::set(driver.state(), &[]).unwrap();
    shown("the recovery", "").await;
    fault::set_health(driver.state(), &[(INACCESSIBLE, "Gone", "")]).unwrap();
    shown("another condition", "data Inaccessible/Gone: -").await;
    delete_all(&sim, &[("web", &uid)]).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_that_cannot_be_mounted_shows_its_health() {
    let sim = start_with(&EACH_SECOND).await;
    let driver = start_driver_with(&sim, &HEALTH);
    fault::set(driver.state(), &[("NodeStageVolume", Fault::Code(INTERNAL))]).unwrap();
    fault::set_health(driver.state(), &[(INACCESSIBLE, "PoolFull", "no space")]).unwrap();
    csi_driver(&sim, json!({"attachRequired": false}));
    bound_claim(&sim, "data", |_| {});
    let uid = sim.create(with_claim("web", "data"));
    let is_shown = |seen: &Seen| health_of(seen) == "data Inaccessible/PoolFull: no space";
    sim.wait_pod("web", "a condition", is_shown).await;
    fault::set(driver.state(), &[]).unwrap();
    fault::set_health(driver.state(), &[]).unwrap();
    sim.wait_ready("web").await;
    sim.wait_pod("web", "the recovery", |seen| health_of(seen).is_empty()).await;
    delete_all(&sim, &[("web", &uid)]).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_driver_is_called_for_the_health_of_volumes_without_the_gate_or_the_capability() {
    let without = ["--capabilities", "STAGE_UNSTAGE_VOLUME,GET_VOLUME_STATS"];
    let gate_off = ["--capabilities", "STAGE_UNSTAGE_VOLUME,GET_VOLUME_STATS,GET_VOLUME_HEALTH"];
    for (gate, capabilities) in [("true", without), ("false", gate_off)] {
        let gate = format!("--feature-gates=CSIVolumeHealth={gate}");
        let sim = start_with(&[gate.as_str(), "--volume-stats-agg-period=1s"]).await;
        let driver = start_driver_with(&sim, &capabilities);
        fault::set_health(driver.state(), &[(INACCESSIBLE, "Gone", "")]).unwrap();
        csi_driver(&sim, json!({"attachRequired": false}));
        bound_claim(&sim, "data", |_| {});
        let uid = sim.create(with_claim("web", "data"));
        sim.wait_ready("web").await;
        let more = async || match driver.calls_of("NodeGetVolumeStats") {
            calls if calls >= 3 => Ok(()),
            calls => Err(calls),
        };
        until("three measurements", LONG, more).await;
        assert_eq!(driver.calls_of("NodeGetVolumeHealth"), 0, "{gate}");
        assert_eq!(health_of(&sim.pod("web")), "", "{gate}");
        delete_all(&sim, &[("web", &uid)]).await;
        sim.finish().await;
    }
}

/// Statuses of `StorageHealthErrorType`.
const STORAGE_DEGRADED: i32 = 1;
const STORAGE_UNREACHABLE: i32 = 2;

/// Returns the health of storage in the CSINode, as text.
fn storage_of(csi_node: &Value) -> String {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let condition = |c: &Value| {
        assert!(c["lastTransitionTime"].is_string(), "{c}");
        let [status, reason, access, volume] =
            ["status", "reason", "accessMode", "volumeMode"].map(|field| text(&c[field]));
        format!("{status}/{reason} {access} {volume}")
    };
    let driver = |driver: &Value| {
        let conditions: Vec<String> = list(&driver["healthConditions"]).iter().map(condition).collect();
        format!("{} {}", text(&driver["name"]), conditions.join(", "))
    };
    list(&csi_node["status"]["storageHealth"]).iter().map(driver).collect::<Vec<_>>().join("; ")
}

async fn storage_shown(sim: &Sim, expected: &str) {
    sim.api.wait_for("csinodes", "", NODE, LONG, |csi_node| storage_of(csi_node) == expected).await;
}

/// Waits for more calls of a method.
async fn more_calls(driver: &DriverThread, method: &str, more: usize) {
    let least = driver.calls_of(method) + more;
    until(method, LONG, async || match driver.calls_of(method) {
        calls if calls >= least => Ok(()),
        calls => Err(calls),
    })
    .await;
}

/// Returns the series of a driver's storage in the metrics of this process.
fn storage_series(driver: &str) -> Vec<String> {
    let text = quintlet_telemetry::metrics::text();
    let driver = format!("csi_node_storage_health_status{{driver_name=\"{driver}\",");
    text.lines().filter_map(|line| line.strip_prefix(&driver)).map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_health_of_storage_is_in_the_csi_node_until_the_driver_reports_none() {
    let sim = start_with(&EACH_SECOND).await;
    let driver = start_driver_with(&sim, &["--capabilities", "STAGE_UNSTAGE_VOLUME,GET_STORAGE_HEALTH"]);
    let gone = (STORAGE_UNREACHABLE, "NetworkPartition", "no route", None);
    fault::set_storage_health(driver.state(), &[gone, gone, (LATER, "New", "", None)]).unwrap();
    storage_shown(&sim, &format!("{DRIVER} StorageUnreachable/NetworkPartition - -")).await;
    let series = |status: &str, reason: &str| format!("status=\"{status}\",reason=\"{reason}\"}} 1");
    until("the metric", LONG, async || match storage_series(DRIVER) {
        shown if shown == [series("StorageUnreachable", "NetworkPartition")] => Ok(()),
        shown => Err(shown),
    })
    .await;
    let many = (STORAGE_DEGRADED, "Slow", "", Some("MULTI_NODE_MULTI_WRITER"));
    fault::set_storage_health(driver.state(), &[many, (STORAGE_DEGRADED, "Slow", "", None)]).unwrap();
    let degraded = format!("{DRIVER} StorageDegraded/Slow ReadWriteMany Block, StorageDegraded/Slow - -");
    storage_shown(&sim, &degraded).await;
    // A driver that does not answer, also after a restart, is no recovery. The same answer is written once.
    fault::set(driver.state(), &[("NodeGetStorageHealth", Fault::Code(INTERNAL))]).unwrap();
    sim.restart(Service::PodSync).await;
    more_calls(&driver, "NodeGetStorageHealth", 2).await;
    sim.api.reset_counts();
    fault::set(driver.state(), &[]).unwrap();
    more_calls(&driver, "NodeGetStorageHealth", 3).await;
    assert_eq!(sim.api.counts().of("* csinodes/status"), 0, "{:?}", sim.api.counts());
    storage_shown(&sim, &degraded).await;
    fault::set_storage_health(driver.state(), &[]).unwrap();
    storage_shown(&sim, "").await;
    until("the metric", LONG, async || match storage_series(DRIVER) {
        shown if shown.is_empty() => Ok(()),
        shown => Err(shown),
    })
    .await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_driver_is_called_for_its_storage_without_the_gate_or_the_capability() {
    for (gate, capability) in [("true", "GET_VOLUME_HEALTH"), ("false", "GET_STORAGE_HEALTH")] {
        let gate = format!("--feature-gates=CSIVolumeHealth={gate}");
        let sim = start_with(&[gate.as_str(), "--volume-stats-agg-period=1s"]).await;
        let capabilities = format!("STAGE_UNSTAGE_VOLUME,GET_VOLUME_STATS,{capability}");
        let driver = start_driver_with(&sim, &["--capabilities", &capabilities]);
        fault::set_storage_health(driver.state(), &[(STORAGE_DEGRADED, "Slow", "", None)]).unwrap();
        csi_driver(&sim, json!({"attachRequired": false}));
        bound_claim(&sim, "data", |_| {});
        let uid = sim.create(with_claim("web", "data"));
        sim.wait_ready("web").await;
        more_calls(&driver, "NodeGetVolumeStats", 3).await;
        assert_eq!(storage_of(&sim.api.get("csinodes", "", NODE).unwrap()), "", "{gate}");
        // As in the kubelet, the health that an earlier configuration wrote stays.
        let old = json!({"status": "StorageDegraded", "reason": "Old", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let old = json!({"storageHealth": [{"name": DRIVER, "healthConditions": [old]}]});
        sim.api.edit("csinodes/status", "", NODE, |csi_node| csi_node["status"] = old.clone()).unwrap();
        sim.restart(Service::Status).await;
        more_calls(&driver, "NodeGetVolumeStats", 5).await;
        let kept = storage_of(&sim.api.get("csinodes", "", NODE).unwrap());
        assert_eq!(kept, format!("{DRIVER} StorageDegraded/Old - -"), "{gate}");
        assert_eq!(driver.calls_of("NodeGetStorageHealth"), 0, "{gate}");
        delete_all(&sim, &[("web", &uid)]).await;
        sim.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_that_hangs_in_the_health_of_a_volume_delays_nothing_else() {
    const OTHER: &str = "other.csi.quintlet.dev";
    const ALL: &str = "STAGE_UNSTAGE_VOLUME,GET_VOLUME_STATS,GET_VOLUME_HEALTH,GET_STORAGE_HEALTH";
    let sim = start_with(&EACH_SECOND).await;
    let hanging = start_driver_with(&sim, &["--capabilities", ALL]);
    let state = sim.root_dir().with_file_name("other-driver");
    let named = ["--capabilities", ALL, "--name", OTHER, "--registration", "other.sock"];
    let other = DriverThread::start(&sim.root_dir(), &state, &named);
    fault::set(hanging.state(), &[("NodeGetVolumeHealth", Fault::Hang)]).unwrap();
    fault::set_health(hanging.state(), &[(DEGRADED, "Slow", "")]).unwrap();
    csi_driver(&sim, json!({"attachRequired": false}));
    let spec = json!({"attachRequired": false});
    sim.api.create("csidrivers", "", json!({"metadata": {"name": OTHER}, "spec": spec})).unwrap();
    for claim in ["data", "late"] {
        bound_claim(&sim, claim, |_| {});
    }
    bound_claim(&sim, "other", |volume| volume["spec"]["csi"]["driver"] = json!(OTHER));
    let web = sim.create(with_claim("web", "data"));
    sim.wait_ready("web").await;
    until("the call that hangs", LONG, async || match hanging.calls_of("NodeGetVolumeHealth") {
        0 => Err(()),
        _ => Ok(()),
    })
    .await;
    // The health of the driver's storage, its other calls and its pods go on, as does the health of another
    // driver's volume.
    fault::set_storage_health(hanging.state(), &[(STORAGE_DEGRADED, "Slow", "", None)]).unwrap();
    storage_shown(&sim, &format!("{DRIVER} StorageDegraded/Slow - -")).await;
    let late = sim.create(with_claim("late", "late"));
    let beside = sim.create(with_claim("other", "other"));
    sim.wait_ready("late").await;
    sim.wait_ready("other").await;
    fault::set_health(other.state(), &[(INACCESSIBLE, "Gone", "")]).unwrap();
    let is_shown = |seen: &Seen| health_of(seen) == "data Inaccessible/Gone: -";
    sim.wait_pod("other", "the health of the other volume", is_shown).await;
    more_calls(&hanging, "NodeGetVolumeStats", 2).await;
    assert_eq!(hanging.calls_of("NodeGetVolumeHealth"), 1, "a driver that hangs gets no second call");
    assert_eq!([health_of(&sim.pod("web")), health_of(&sim.pod("late"))], ["", ""]);
    delete_all(&sim, &[("web", &web), ("late", &late), ("other", &beside)]).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_health_of_a_block_volume_is_in_the_status_of_its_pod() {
    let sim = start_with(&EACH_SECOND).await;
    let driver = start_driver_with(&sim, &HEALTH);
    fault::set_health(driver.state(), &[(INACCESSIBLE, "PathLost", "")]).unwrap();
    csi_driver(&sim, json!({"attachRequired": false}));
    bound_claim(&sim, "disk", |volume| volume["spec"]["volumeMode"] = json!("Block"));
    let mut pod = with_claim("web", "disk");
    let container = &mut pod["spec"]["containers"][0];
    container["volumeMounts"] = json!([]);
    container["volumeDevices"] = json!([{"name": "data", "devicePath": "/dev/data"}]);
    let uid = sim.create(pod);
    sim.wait_ready("web").await;
    let is_shown = |seen: &Seen| health_of(seen) == "data Inaccessible/PathLost: -";
    sim.wait_pod("web", "a condition", is_shown).await;
    more_calls(&driver, "NodeGetVolumeHealth", 2).await;
    let request = requests(&driver, "NodeGetVolumeHealth").pop().unwrap()["request"].clone();
    let staging = sim.root_dir().join("plugins/kubernetes.io/csi/volumeDevices/staging/pv-disk");
    assert_eq!(request, json!({"published": "", "staged": staging}));
    fault::set_health(driver.state(), &[]).unwrap();
    sim.wait_pod("web", "the recovery", |seen| health_of(seen).is_empty()).await;
    delete_all(&sim, &[("web", &uid)]).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_server_that_drops_the_health_of_volumes_does_not_get_it_in_a_loop() {
    let sim = start_with(&EACH_SECOND).await;
    sim.api.faults().set_unknown_fields(&["pods /status/volumeHealth"]);
    let driver = start_driver_with(&sim, &HEALTH);
    fault::set_health(driver.state(), &[(DEGRADED, "Slow", "")]).unwrap();
    csi_driver(&sim, json!({"attachRequired": false}));
    bound_claim(&sim, "data", |_| {});
    let uid = sim.create(with_claim("web", "data"));
    sim.wait_ready("web").await;
    let has_health = |sim: &Sim| {
        let patches = sim.api.requests("patch pods/status default/web");
        patches.iter().filter(|patch| patch.body.to_string().contains("\"Slow\"")).count()
    };
    until("the health is sent", LONG, async || if has_health(&sim) > 0 { Ok(()) } else { Err(()) }).await;
    // The kubelet compares every ten seconds.
    tokio::time::sleep(std::time::Duration::from_secs(180)).await;
    assert!(has_health(&sim) <= 3, "{:#?}", sim.api.requests("patch pods/status default/web"));
    assert_eq!(health_of(&sim.pod("web")), "");
    // Other changes are written as before, and the pod can be deleted.
    sim.api.edit("pods/status", "default", "web", |pod| pod["status"]["hostIP"] = json!("10.9.9.9")).unwrap();
    sim.wait_pod("web", "the address", |seen| seen.0["status"]["hostIP"] != "10.9.9.9").await;
    delete_all(&sim, &[("web", &uid)]).await;
    sim.finish().await;
}
