//! The device part of a node agent, without pods.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::WorkerWakeups;
use pod_sync_devices::checkpoint::{CHECKPOINT, DeviceCheckpoint, decode};
use pod_sync_devices::{DeviceAdmission, DeviceContext, DeviceError, DeviceOptions, Devices};
use pod_sync_layout::ResourceCount;
use quintlet_device_plugin::TestPlugin;
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
pub(crate) const GPU: &str = "a.com/gpu";

pub(crate) struct Agent {
    temp: Arc<TempDir>,
    pub(crate) devices: Devices,
    pub(crate) wakeups: Arc<WorkerWakeups>,
    stop: CancellationToken,
}

impl Agent {
    pub(crate) fn start() -> Self {
        quintlet_virtual_time::start();
        Self::start_in(Arc::new(tempfile::tempdir().unwrap()))
    }

    fn start_in(temp: Arc<TempDir>) -> Self {
        let (stop, wakeups) = (CancellationToken::new(), Arc::new(WorkerWakeups::default()));
        let devices = Devices::open(DeviceContext {
            dir: temp.path().join("device-plugins"),
            copy_dir: temp.path().to_owned(),
            clock: Clock::system(),
            wakeups: Arc::clone(&wakeups),
            stop: stop.clone(),
        });
        let devices = devices.unwrap();
        let listener = devices.listen().unwrap();
        let server = devices.clone().serve(listener, stop.clone());
        drop(task::spawn("registration", async move { server.await.unwrap() }));
        drop(task::spawn("expiry", devices.clone().expire_resources()));
        Self { temp, devices, wakeups, stop }
    }

    /// Restarts the agent: nothing but its files is left.
    pub(crate) fn restart(self) -> Self {
        self.stop.cancel();
        Self::start_in(Arc::clone(&self.temp))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.devices.dir().join("kubelet.sock")
    }

    pub(crate) fn plugin(&self, name: &str, devices: &[&str]) -> TestPlugin {
        TestPlugin::start(&self.devices.dir().join(name), devices)
    }

    /// Starts a plugin, registers it for a resource, and waits until its devices are known.
    pub(crate) async fn serving(&self, resource: &str, devices: &[&str]) -> TestPlugin {
        let name = resource.rsplit('/').next().unwrap();
        let socket = self.devices.dir().join(format!("{name}.sock"));
        let _ = std::fs::remove_file(&socket);
        let plugin = TestPlugin::start(&socket, devices);
        self.register(&plugin, resource, devices).await;
        plugin
    }

    pub(crate) async fn register(&self, plugin: &TestPlugin, resource: &str, devices: &[&str]) {
        plugin.register(&self.socket(), resource).await.unwrap();
        let healthy = devices.iter().filter(|name| !name.starts_with('!')).count();
        self.wait_count(resource, devices.len(), healthy).await;
    }

    pub(crate) async fn wait_count(&self, resource: &str, capacity: usize, allocatable: usize) {
        let expected = ResourceCount { capacity, allocatable };
        let capacity = self.devices.capacity();
        until("the capacity", LONG, async || {
            let all = capacity.borrow().clone();
            if all.get(resource) == Some(&expected) { Ok(()) } else { Err(all) }
        })
        .await;
    }

    pub(crate) async fn admit(&self, pod: &Pod) -> Result<DeviceAdmission, DeviceError> {
        self.devices.admit(&uid(pod), pod, None, &CancellationToken::new()).await
    }

    pub(crate) async fn prepare(&self, pod: &Pod) -> Result<DeviceOptions, DeviceError> {
        self.devices.prepare_container(&uid(pod), pod, "main", &CancellationToken::new()).await
    }

    /// Returns the devices of a pod's container in the checkpoint.
    pub(crate) fn recorded(&self, pod: &Pod) -> Vec<String> {
        let held = self.checkpoint().held.held(uid(pod).as_str(), "main", GPU);
        held.into_iter().flatten().map(|id| id.to_string()).collect()
    }

    pub(crate) fn checkpoint(&self) -> DeviceCheckpoint {
        read_checkpoint(self.devices.dir())
    }

    pub(crate) fn last_error(&self, resource: &str) -> String {
        self.devices.read(|_, plugin| plugin(resource)).error.unwrap_or_default()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn read_checkpoint(dir: &Path) -> DeviceCheckpoint {
    decode(&std::fs::read(dir.join(CHECKPOINT)).unwrap()).unwrap()
}

pub(crate) fn uid(pod: &Pod) -> PodUid {
    PodUid::parse(pod.metadata.uid.as_deref().unwrap()).unwrap()
}

/// Returns a pod with one container that requests devices.
pub(crate) fn pod(name: &str, resource: &str, count: usize) -> Pod {
    pod_of(name, json!({"containers": [container("main", resource, count)]}))
}

pub(crate) fn container(name: &str, resource: &str, count: usize) -> Value {
    json!({"name": name, "image": "i", "resources": {"limits": {resource: count.to_string()}}})
}

pub(crate) fn pod_of(name: &str, spec: Value) -> Pod {
    let mut pod = pod_json(spec);
    pod.metadata.name = Some(name.to_owned());
    pod.metadata.uid = Some(format!("uid-{name}"));
    pod
}

/// Returns each gRPC code of a failed call, with its name in the kubelet's texts.
pub(crate) fn codes() -> impl Iterator<Item = (Code, &'static str)> {
    (1..=16).map(Code::from).map(|code| (code, status_code::go_name(code)))
}

/// Returns the text of a rejection.
pub(crate) fn rejected(admitted: Result<DeviceAdmission, DeviceError>) -> String {
    match admitted {
        Err(error) => error.to_string(),
        other => panic!("not rejected: {other:?}"),
    }
}

pub(crate) fn is_waiting(admitted: &Result<DeviceAdmission, DeviceError>) -> bool {
    matches!(admitted, Ok(DeviceAdmission::Waiting { .. }))
}
