//! Pods with a device of a device plugin or of a claim, beside pods with neither, and a burst of pods with a
//! device each.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use anyhow::ensure;
use quintlet_device_plugin::TestPlugin;
use quintlet_dra_driver::TestDriver;
use quintlet_e2e::NODE;
use quintlet_e2e::work::{self, LIMIT};
use quintlet_e2e::{Seen, pods};
use quintlet_testapi::{ApiError, TestApi};
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use crate::figures::quantile;

/// The resource of the device plugin.
const DEVICE: &str = "example.com/device";

/// The driver of the claims.
const DRIVER: &str = "bench.example.com";

/// Interval between checks of the driver's registration.
const STEP: Duration = Duration::from_millis(20);

/// The kinds of pods that are compared.
#[derive(Debug, Clone, Copy)]
enum Has {
    Nothing,
    Device,
    Claim,
}

impl Has {
    const ALL: [Self; 3] = [Self::Nothing, Self::Device, Self::Claim];

    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "without",
            Self::Device => "device",
            Self::Claim => "claim",
        }
    }
}

/// Starts `count` pods of each kind one after the other, and then `burst` pods with a device each. `root` is
/// the root directory of the agent.
///
/// # Errors
/// A plugin cannot register, or a device was given to two pods of the burst.
pub(crate) async fn measure(api: &TestApi, root: &Path, count: usize, burst: usize) -> anyhow::Result<Value> {
    // A kubelet has the other directory of device plugins at a fixed path.
    let registry = root.join("plugins_registry");
    let names: Vec<String> = (0..burst.max(1)).map(|i| format!("d{i}")).collect();
    let plugin = TestPlugin::start(
        &registry.join("device.sock"),
        &names.iter().map(String::as_str).collect::<Vec<_>>(),
    );
    plugin.leave_out_cdi_devices();
    plugin.set_identity(DEVICE, "");
    let driver = TestDriver::start(&registry.join("claim.sock"), DRIVER);
    driver.leave_out_cdi_devices();
    let all = json!(names.len().to_string());
    let has_all = |node: &Value| node["status"]["allocatable"][DEVICE] == all;
    api.wait_for("nodes", "", NODE, LIMIT, has_all).await;
    let end = Instant::now() + LIMIT;
    while driver.informed().last() != Some(&Ok(())) {
        ensure!(Instant::now() < end, "the driver is not registered: {:?}", driver.informed());
        tokio::time::sleep(STEP).await;
    }
    let mut started = [const { Vec::new() }; 3];
    for i in 0..count {
        for (has, times) in Has::ALL.into_iter().zip(&mut started) {
            times.push(start(api, has, &format!("devices-{}-{i}", has.name())).await?);
        }
    }
    let quantiles = |all: &[f64]| json!({"p50": quantile(all, 0.5), "p99": quantile(all, 0.99)});
    let times = Has::ALL.iter().zip(&started).map(|(has, all)| (has.name().to_owned(), quantiles(all)));
    let times: Map<String, Value> = times.collect();
    let before = plugin.calls().len();
    let created = work::burst_of(api, burst, with_device).await;
    let calls = plugin.calls().split_off(before);
    let given = calls.iter().filter_map(|call| call.strip_prefix("Allocate ")).collect::<Vec<_>>();
    let distinct: BTreeSet<&&str> = given.iter().collect();
    ensure!(
        given.len() == burst && distinct.len() == burst,
        "{} calls of Allocate with {} devices for {burst} pods",
        given.len(),
        distinct.len()
    );
    let removed = work::remove(api, burst).await;
    Ok(json!({
        "bound_to_ready_ms": times,
        "burst": {
            "pods": burst,
            "create_to_half_ready_seconds": created.half_ready,
            "create_to_ready_seconds": created.ready,
            "delete_to_gone_seconds": removed,
        },
    }))
}

fn with_device(name: &str) -> Value {
    let mut pod = pods::sleeper(name);
    let device = json!({DEVICE: "1"});
    pod["spec"]["containers"][0]["resources"] = json!({"limits": device, "requests": device});
    pod
}

fn with_claim(name: &str) -> Value {
    let mut pod = pods::sleeper(name);
    pod["spec"]["resourceClaims"] = json!([{"name": "device", "resourceClaimName": name}]);
    pod["spec"]["containers"][0]["resources"] = json!({"claims": [{"name": "device"}]});
    pod
}

/// Binds a pod to the node, as a scheduler does once its claim is reserved. Returns the milliseconds until it
/// is Ready, and deletes it.
async fn start(api: &TestApi, has: Has, name: &str) -> anyhow::Result<f64> {
    let refused = |error: ApiError| anyhow::anyhow!("the API server refuses {name}: {error:?}");
    let pod = match has {
        Has::Nothing => pods::sleeper(name),
        Has::Device => with_device(name),
        Has::Claim => with_claim(name),
    };
    let uid = api.create_pod(pod)["metadata"]["uid"].clone();
    if matches!(has, Has::Claim) {
        let claim = json!({"metadata": {"name": name}, "spec": {"devices": {}}});
        api.create("resourceclaims", "default", claim).map_err(refused)?;
        let results = json!([{"driver": DRIVER, "pool": "pool", "device": name, "request": "r"}]);
        let reserved = json!([{"resource": "pods", "name": name, "uid": uid}]);
        let status = json!({"reservedFor": reserved, "allocation": {"devices": {"results": results}}});
        let reserve = |claim: &mut Value| claim["status"] = status;
        api.edit("resourceclaims/status", "default", name, reserve).map_err(refused)?;
    }
    let began = Instant::now();
    api.edit("pods/binding", "default", name, |pod| pod["spec"]["nodeName"] = json!(NODE))
        .map_err(refused)?;
    let is_ready = |pod: &Value| Seen::from_api(pod.clone()).is_ready();
    api.wait_for("pods", "default", name, LIMIT, is_ready).await;
    let took = began.elapsed().as_secs_f64() * 1000.0;
    // It was Ready just now.
    let _gone = api.delete("pods", "default", name, None);
    api.wait_for("pods", "default", name, LIMIT, Value::is_null).await;
    if matches!(has, Has::Claim) {
        api.delete("resourceclaims", "default", name, Some(0)).map_err(refused)?;
    }
    Ok(took)
}
