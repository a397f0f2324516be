//! Pods that hold resources, for tests.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::api::resource::v1::ResourceClaim;
use parking_lot::Mutex;
use pod_sync_claims::{ClaimContext, ClaimKey, ClaimRecord, ClaimSource, Claims, FetchError, PreparedDevice};
use pod_sync_clients::WorkerWakeups;
use pod_sync_devices::checkpoint::DeviceCheckpoint;
use pod_sync_devices::{Allocation, DeviceContext, DeviceId, Devices};
use pod_sync_layout::SourceKind;
use pod_sync_views::PodView;
use quintlet_kit::clock::Clock;
use quintlet_model::ids::{PodRef, PodUid};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use crate::answers::HeldResources;
use crate::exclusive::{ExclusiveResources, MemoryBlock};
use crate::service::PodSource;

pub(crate) const GPU: &str = "example.com/gpu";
pub(crate) const DRIVER: &str = "nic.example.com";

/// Returns the view of a pod with this specification.
pub(crate) fn view(uid: &str, name: &str, spec: Value) -> PodView {
    let pod = json!({"metadata": {"name": name, "namespace": "ns", "uid": uid}, "spec": spec});
    PodView {
        pod_ref: PodRef { uid: PodUid::parse(uid).unwrap(), namespace: "ns".into(), name: name.into() },
        source: SourceKind::Api,
        pod: Arc::new(serde_json::from_value(pod).unwrap()),
        status: None,
        deletion: None,
        worker: "sync",
        is_removed: false,
        waiting: None,
        decision: Arc::default(),
        created_unix_ns: 1,
        resource_version: String::new(),
        mirror_uid: String::new(),
        version: 1,
    }
}

pub(crate) fn with_phase(view: PodView, phase: &str) -> PodView {
    let status = PodStatus { phase: Some(phase.to_owned()), ..PodStatus::default() };
    PodView { status: Some(Arc::new(status)), ..view }
}

/// Pods without workers.
#[derive(Debug, Default)]
pub(crate) struct TestPods {
    pub(crate) views: Mutex<Vec<Arc<PodView>>>,
    pub(crate) terminated: Mutex<BTreeSet<String>>,
    pub(crate) ending: Mutex<BTreeSet<String>>,
}

impl TestPods {
    pub(crate) fn add(&self, view: PodView) {
        self.views.lock().push(Arc::new(view));
    }
}

#[async_trait]
impl PodSource for TestPods {
    async fn pods(&self) -> Vec<Arc<PodView>> {
        self.views.lock().clone()
    }

    fn has_terminated(&self, uid: &PodUid) -> bool {
        self.terminated.lock().contains(uid.as_str())
    }

    fn is_ending(&self, uid: &PodUid) -> bool {
        self.ending.lock().contains(uid.as_str())
    }
}

#[derive(Debug)]
struct NoClaims;

#[async_trait]
impl ClaimSource for NoClaims {
    async fn get(&self, _: &str, name: &str) -> Result<ResourceClaim, FetchError> {
        Err(FetchError::NotFound(format!("no claim {name}")))
    }
}

/// The assignments of the policy `none`: there are none.
#[derive(Debug)]
struct NoExclusiveResources;

impl ExclusiveResources for NoExclusiveResources {
    fn cpus(&self, _: &str, _: &str) -> Vec<i64> {
        Vec::new()
    }

    fn memory(&self, _: &str, _: &str) -> Vec<MemoryBlock> {
        Vec::new()
    }

    fn pod_cpus(&self, _: &str) -> Vec<i64> {
        Vec::new()
    }

    fn pod_memory(&self, _: &str) -> Vec<MemoryBlock> {
        Vec::new()
    }

    fn allocatable_cpus(&self) -> Vec<i64> {
        Vec::new()
    }

    fn allocatable_memory(&self) -> Vec<MemoryBlock> {
        Vec::new()
    }
}

/// Checkpoints, from which the devices and claims of pods are read.
pub(crate) struct Checkpoints {
    pub(crate) devices: DeviceCheckpoint,
    pub(crate) claims: std::collections::BTreeMap<ClaimKey, ClaimRecord>,
    pub(crate) exclusive: Arc<dyn ExclusiveResources>,
}

impl fmt::Debug for Checkpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoints").finish_non_exhaustive()
    }
}

impl Checkpoints {
    pub(crate) fn new() -> Self {
        let claims = std::collections::BTreeMap::new();
        Self { devices: DeviceCheckpoint::default(), claims, exclusive: Arc::new(NoExclusiveResources) }
    }

    /// Gives devices of a NUMA node to a container; -1 is none.
    pub(crate) fn allocate(&mut self, pod: &str, container: &str, resource: &str, devices: &[(i64, &str)]) {
        let mut allocation = Allocation { devices: [].into(), response: Vec::new() };
        for (node, id) in devices {
            allocation.devices.entry(*node).or_default().push(DeviceId::from(*id));
        }
        self.devices.held.insert(pod, container, resource, allocation);
    }

    /// Prepares a claim for a pod: device, request, CDI device.
    pub(crate) fn prepare(&mut self, pod: &str, claim: &str, devices: &[(&str, &str, &str)]) {
        let device = |(device, request, cdi): &(&str, &str, &str)| PreparedDevice {
            pool: "pool".to_owned(),
            device: (*device).to_owned(),
            share: None,
            requests: vec![(*request).to_owned()],
            cdi: vec![(*cdi).to_owned()],
        };
        let record = ClaimRecord {
            uid: format!("uid-{claim}"),
            pods: [pod.to_owned()].into(),
            drivers: [(DRIVER.to_owned(), devices.iter().map(device).collect())].into(),
        };
        self.claims.insert(ClaimKey { namespace: "ns".to_owned(), name: claim.to_owned() }, record);
    }

    /// Returns what the pods hold, and the directory of the files.
    pub(crate) fn restore(self) -> (HeldResources, TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let devices = pod_sync_devices::checkpoint::encode(&self.devices).unwrap();
        std::fs::write(dir.path().join(pod_sync_devices::checkpoint::CHECKPOINT), devices).unwrap();
        let claims = pod_sync_claims::checkpoint::encode(&self.claims).unwrap();
        std::fs::write(dir.path().join(pod_sync_claims::checkpoint::CHECKPOINT), claims).unwrap();
        let (clock, stop) = (Clock::system(), CancellationToken::new());
        let wakeups = Arc::new(WorkerWakeups::default());
        let devices = Devices::open(DeviceContext {
            dir: dir.path().to_owned(),
            copy_dir: dir.path().to_owned(),
            clock: clock.clone(),
            wakeups: Arc::clone(&wakeups),
            stop: stop.clone(),
        });
        let claims = Claims::open(ClaimContext {
            dir: dir.path().to_owned(),
            copy_dir: dir.path().to_owned(),
            clock,
            wakeups,
            source: Arc::new(NoClaims),
            stop,
        });
        (HeldResources { devices: devices.unwrap(), claims, exclusive: self.exclusive }, dir)
    }
}
