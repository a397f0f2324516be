//! The part of a node agent that prepares claims, without pods.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use pod_sync_claims::checkpoint::{CHECKPOINT, decode};
use pod_sync_claims::{
    ClaimContext, ClaimError, ClaimRecord, ClaimSource, Claims, FetchError, PLUGIN_TYPE, SliceWiper,
};
use pod_sync_clients::WorkerWakeups;
use pod_sync_plugins::PluginManager;
use quintlet_dra_driver::TestDriver;
use quintlet_kit::clock::Clock;
use quintlet_kit::{status_code, task};
use quintlet_model::ids::PodUid;
use quintlet_testkit::pods::pod_json;
use quintlet_testkit::wait::until;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use tonic::Code;

/// Bounds failures only.
pub(crate) const LONG: Duration = Duration::from_secs(60);
/// Name of the driver.
pub(crate) const GPU: &str = "gpu.example.com";

/// The claims of an API server.
#[derive(Debug, Default)]
pub(crate) struct TestClaims {
    claims: Mutex<BTreeMap<String, ResourceClaim>>,
    // The API server cannot be reached.
    is_away: AtomicBool,
}

impl TestClaims {
    pub(crate) fn set_away(&self, is_away: bool) {
        self.is_away.store(is_away, Ordering::Relaxed);
    }

    pub(crate) fn remove(&self, name: &str) {
        self.claims.lock().unwrap().remove(name);
    }
}

#[async_trait]
impl ClaimSource for TestClaims {
    async fn get(&self, namespace: &str, name: &str) -> Result<ResourceClaim, FetchError> {
        assert_eq!(namespace, "default");
        if self.is_away.load(Ordering::Relaxed) {
            return Err(FetchError::Failed("the server is down".to_owned()));
        }
        let found = self.claims.lock().unwrap().get(name).cloned();
        let missing = || format!("resourceclaims.resource.k8s.io {name:?} not found");
        found.ok_or_else(|| FetchError::NotFound(missing()))
    }
}

/// The ResourceSlices of an API server.
#[derive(Debug, Default)]
pub(crate) struct TestSlices {
    pub(crate) drivers: Mutex<BTreeSet<String>>,
    // Number of requests that fail.
    pub(crate) failures: Mutex<u32>,
}

impl TestSlices {
    fn fail(&self) -> Result<(), String> {
        let mut failures = self.failures.lock().unwrap();
        if *failures == 0 {
            return Ok(());
        }
        *failures -= 1;
        Err("the server is down".to_owned())
    }
}

#[async_trait]
impl SliceWiper for TestSlices {
    async fn drivers(&self) -> Result<BTreeSet<String>, String> {
        self.fail()?;
        Ok(self.drivers.lock().unwrap().clone())
    }

    async fn wipe(&self, driver: &str) -> Result<(), String> {
        self.fail()?;
        self.drivers.lock().unwrap().remove(driver);
        Ok(())
    }
}

pub(crate) struct Agent {
    temp: Arc<TempDir>,
    pub(crate) claims: Claims,
    pub(crate) source: Arc<TestClaims>,
    pub(crate) slices: Arc<TestSlices>,
    pub(crate) wakeups: Arc<WorkerWakeups>,
    stop: CancellationToken,
}

impl Agent {
    pub(crate) fn start() -> Self {
        quintlet_virtual_time::start();
        let temp = Arc::new(tempfile::tempdir().unwrap());
        std::fs::create_dir(temp.path().join("plugins_registry")).unwrap();
        std::fs::create_dir(temp.path().join("state")).unwrap();
        Self::start_in(temp, Arc::default(), Arc::default())
    }

    fn start_in(temp: Arc<TempDir>, source: Arc<TestClaims>, slices: Arc<TestSlices>) -> Self {
        let (stop, wakeups) = (CancellationToken::new(), Arc::new(WorkerWakeups::default()));
        let claims = Claims::open(ClaimContext {
            dir: temp.path().to_owned(),
            copy_dir: temp.path().join("state"),
            clock: Clock::system(),
            wakeups: Arc::clone(&wakeups),
            source: Arc::clone(&source) as Arc<dyn ClaimSource>,
            stop: stop.clone(),
        });
        let handlers = HashMap::from([(PLUGIN_TYPE.to_owned(), claims.handler())]);
        drop(PluginManager::start(temp.path().join("plugins_registry"), handlers, stop.clone()));
        let wiper = Arc::clone(&slices) as Arc<dyn SliceWiper>;
        drop(task::spawn("wipes", claims.clone().wipe_slices(wiper)));
        Self { temp, claims, source, slices, wakeups, stop }
    }

    /// Restarts the agent: nothing but its files is left.
    pub(crate) fn restart(self) -> Self {
        self.stop.cancel();
        let (source, slices) = (Arc::clone(&self.source), Arc::clone(&self.slices));
        Self::start_in(Arc::clone(&self.temp), source, slices)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    /// Tears the checkpoint, and removes its copy.
    pub(crate) fn lose_records(&self) -> Vec<u8> {
        let bytes = std::fs::read(self.path(CHECKPOINT)).unwrap();
        let torn = bytes[..bytes.len() / 2].to_vec();
        std::fs::write(self.path(CHECKPOINT), &torn).unwrap();
        std::fs::remove_file(self.path("state").join(format!(".{CHECKPOINT}"))).unwrap();
        torn
    }

    /// Returns a socket in the directory of all plugins.
    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.path("plugins_registry").join(format!("{name}.sock"))
    }

    /// Starts a driver, and waits until it is registered.
    pub(crate) async fn driver(&self, name: &str) -> TestDriver {
        self.driver_as(name, name, &["v1.DRAPlugin"]).await
    }

    /// Starts a driver with this socket and these services, and waits until it is registered.
    pub(crate) async fn driver_as(&self, socket: &str, name: &str, services: &[&str]) -> TestDriver {
        let socket = self.socket(socket);
        let _ = std::fs::remove_file(&socket);
        let driver = TestDriver::start_as(&socket, name, services);
        self.wait_connected(&driver, name).await;
        driver
    }

    /// Registers a driver with its service at another socket, at which no process listens yet. Returns the
    /// process that registers it, and the socket of its service.
    pub(crate) async fn registrar(&self, services: &[&str]) -> (TestDriver, PathBuf) {
        let (socket, service) = (self.path("registrar.sock"), self.path("service.sock"));
        let registrar = TestDriver::start_as(&socket, GPU, services);
        registrar.set_endpoint(&service.display().to_string());
        std::fs::rename(socket, self.socket("registrar")).unwrap();
        wait_informed(&registrar).await;
        self.wait_endpoints(GPU, &[false]).await;
        (registrar, service)
    }

    pub(crate) async fn wait_connected(&self, driver: &TestDriver, name: &str) {
        until("the driver is registered", LONG, async || {
            let views = self.claims.drivers();
            let endpoint = (driver.socket().to_owned(), true);
            let is_connected = views.get(name).is_some_and(|view| view.endpoints.contains(&endpoint));
            if is_connected { Ok(()) } else { Err((views, driver.informed())) }
        })
        .await;
    }

    /// Waits until the endpoints of a driver are connected or not, the latest last.
    pub(crate) async fn wait_endpoints(&self, driver: &str, connected: &[bool]) {
        until("the endpoints", LONG, async || {
            let view = self.claims.drivers().remove(driver).unwrap_or_default();
            let seen: Vec<bool> = view.endpoints.iter().map(|(_, connected)| *connected).collect();
            if seen == connected { Ok(()) } else { Err(seen) }
        })
        .await;
    }

    /// Adds a claim that is allocated and reserved for pods, with one device of each driver.
    pub(crate) fn claim(&self, name: &str, drivers: &[&str], pods: &[&str]) {
        self.claim_with(name, &format!("uid-{name}"), drivers, pods);
    }

    pub(crate) fn claim_with(&self, name: &str, uid: &str, drivers: &[&str], pods: &[&str]) {
        let result =
            |driver: &&str| json!({"driver": driver, "pool": "pool", "device": name, "request": "r"});
        self.allocated_claim(name, uid, drivers.iter().map(result).collect(), pods);
    }

    /// Adds a claim with these results of its allocation, which is reserved for pods.
    pub(crate) fn allocated_claim(&self, name: &str, uid: &str, results: Vec<Value>, pods: &[&str]) {
        let reserved = |pod: &&str| json!({"resource": "pods", "name": pod, "uid": format!("uid-{pod}")});
        let reserved: Vec<Value> = pods.iter().map(reserved).collect();
        let claim = json!({
            "metadata": {"namespace": "default", "name": name, "uid": uid},
            "spec": {"devices": {}},
            "status": {"reservedFor": reserved, "allocation": {"devices": {"results": results}}},
        });
        let claim = serde_json::from_value(claim).unwrap();
        self.source.claims.lock().unwrap().insert(name.to_owned(), claim);
    }

    pub(crate) async fn prepare(&self, pod: &Pod) -> Result<(), ClaimError> {
        self.claims.prepare(&uid(pod), pod, &CancellationToken::new()).await
    }

    /// Prepares the claims of a pod, and returns the text of the error.
    pub(crate) async fn refused(&self, pod: &Pod) -> String {
        self.prepare(pod).await.unwrap_err().to_string()
    }

    pub(crate) async fn unprepare(&self, pod: &Pod) -> Result<(), ClaimError> {
        self.claims.unprepare(&uid(pod), &[]).await
    }

    /// Returns the CDI devices of the pod's container.
    pub(crate) fn cdi(&self, pod: &Pod) -> Vec<String> {
        let container = &pod.spec.as_ref().unwrap().containers[0];
        self.claims.cdi_devices(&uid(pod), pod, container).unwrap()
    }

    /// Returns the record of a claim in the checkpoint.
    pub(crate) fn recorded(&self, claim: &str) -> Option<ClaimRecord> {
        let bytes = std::fs::read(self.path(CHECKPOINT)).unwrap();
        let records = decode(&bytes).unwrap();
        records.into_iter().find(|(key, _)| key.name == claim).map(|(_, record)| record)
    }

    /// Returns the health of the devices of the pod's container: name, resource, health and message.
    pub(crate) fn health(&self, pod: &Pod) -> Vec<String> {
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let statuses = self.claims.resource_statuses(pod, container);
        let entries = statuses.into_iter().flat_map(|status| {
            let resources = status.resources.unwrap_or_default().into_iter();
            resources.map(move |resource| {
                let health = resource.health.unwrap_or_default();
                let message = resource.message.map(|text| format!(" {text}")).unwrap_or_default();
                format!("{} {} {health}{message}", status.name, resource.resource_id)
            })
        });
        entries.collect()
    }

    pub(crate) async fn wait_health(&self, pod: &Pod, expected: &[&str]) {
        until("the health", LONG, async || {
            let seen = self.health(pod);
            if seen == expected { Ok(()) } else { Err(seen) }
        })
        .await;
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

pub(crate) fn uid(pod: &Pod) -> PodUid {
    PodUid::parse(pod.metadata.uid.as_deref().unwrap()).unwrap()
}

/// Returns each gRPC code of a failed call, with its name in the kubelet's texts.
pub(crate) fn codes() -> impl Iterator<Item = (Code, &'static str)> {
    (1..=16).map(Code::from).map(|code| (code, status_code::go_name(code)))
}

/// Returns a pod whose container uses all devices of these claims.
pub(crate) fn pod(name: &str, claims: &[&str]) -> Pod {
    let entry = |claim: &&str| json!({"name": claim, "resourceClaimName": claim});
    let entries: Vec<Value> = claims.iter().map(entry).collect();
    let used: Vec<Value> = claims.iter().map(|claim| json!({"name": claim})).collect();
    let containers = json!([{"name": "main", "image": "i", "resources": {"claims": used}}]);
    let mut pod = pod_json(json!({"containers": containers, "resourceClaims": entries}));
    pod.metadata.name = Some(name.to_owned());
    pod.metadata.uid = Some(format!("uid-{name}"));
    pod.metadata.namespace = Some("default".to_owned());
    pod
}

/// Waits until a driver has received the success of its registration, and no other result.
pub(crate) async fn wait_informed(driver: &TestDriver) {
    until("the registration", LONG, async || {
        let informed = driver.informed();
        if informed == [Ok(())] { Ok(()) } else { Err(informed) }
    })
    .await;
}

/// Waits until a driver has received this number of calls with a text.
pub(crate) async fn wait_calls(driver: &TestDriver, text: &str, count: usize) {
    until(
        "the calls",
        LONG,
        async || {
            if driver.calls_of(text) == count { Ok(()) } else { Err(driver.calls()) }
        },
    )
    .await;
}
