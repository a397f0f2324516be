//! What pod workers and the other tasks of pod-sync share, grouped by purpose.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use parking_lot::RwLock;
use pod_sync_claims::Claims;
use pod_sync_clients::{EventType, Events, Pleg, Probes, Runtime, Statuses, WorkerWakeups};
use pod_sync_containment::{Containment, PodWork};
use pod_sync_decisions::backoff::BackoffDelays;
use pod_sync_devices::Devices;
use pod_sync_direct_volumes::Volumes;
use pod_sync_direct_volumes::certificates::TrustAnchors;
use pod_sync_images::credentials::Credentials;
use pod_sync_images::pull_records::PullRecords;
use pod_sync_images::pulls::PullLimits;
use pod_sync_layout::{HandlerFeatures, NodeSettings, ObjectSource, RuntimeState, SourceKind, TokenSource};
use pod_sync_metrics::PodMetrics;
use pod_sync_node_decisions::admission::Rejection;
use pod_sync_node_decisions::gc::GcPolicy;
use pod_sync_offline::OfflineCache;
use pod_sync_placement::Placement;
use pod_sync_records::{Allocations, StateDir, UserNamespaces};
use pod_sync_views::PodViews;
use pod_sync_volume_manager::VolumeTasks;
use quintlet_cgroups::Cgroups;
use quintlet_kit::clock::Clock;
use quintlet_kit::contain::Panic;
use quintlet_kit::grant::GrantKey;
use quintlet_kit::stalls::Stalls;
use quintlet_kit::task::blocking;
use quintlet_model::ids::PodUid;
use quintlet_model::runtime::PodRuntime;
use tokio::sync::watch;

use crate::ProbeRates;
use crate::pod_workers::PodWorkers;
use crate::static_pod_gate::StaticPodGate;

/// Reason of the event and of the wait after a panic or a crash of a process in the work of a pod.
pub const INTERNAL_ERROR: &str = "InternalError";

/// Longest read of the files that variables of a container refer to.
pub const ENV_FILES: Duration = Duration::from_secs(10);

/// Settings of this node, which do not change while pod-sync runs.
#[derive(Debug)]
pub struct NodeConfig {
    /// Settings that the CRI configuration of pods is made from.
    pub settings: Arc<NodeSettings>,
    /// Whether there is an API server.
    pub has_api: bool,
    /// Epoch of this owner of the root directory.
    pub epoch: u64,
    /// Interval between syncs of a pod at rest (`syncFrequency`).
    pub sync_frequency: Duration,
    /// Directory of the links to container logs; none if there are no links.
    pub container_logs_dir: Option<PathBuf>,
    /// How many dead containers are kept.
    pub dead_containers: GcPolicy,
    /// Delays of the crash-loop back-off.
    pub crash_loop: BackoffDelays,
    /// Signs the commands of exec probes.
    pub grant_key: GrantKey,
    /// Directories of pods that are on disk.
    pub pod_dirs: PodDirs,
}

/// The pods that have a directory below the root directory, as of the last list.
#[derive(Debug, Default)]
pub struct PodDirs(RwLock<HashSet<PodUid>>);

impl PodDirs {
    /// Lists the directories. Blocks.
    pub fn list(&self, root_dir: &Path) -> HashSet<PodUid> {
        let entries = std::fs::read_dir(pod_sync_layout::paths::pods_dir(root_dir));
        let names = entries.into_iter().flatten().flatten().map(|entry| entry.file_name());
        let all: HashSet<PodUid> = names.filter_map(|name| PodUid::parse(name.to_str()?).ok()).collect();
        self.0.write().clone_from(&all);
        all
    }

    fn contains(&self, uid: &PodUid) -> bool {
        self.0.read().contains(uid)
    }
}

impl NodeConfig {
    /// Returns the directory of a pod.
    #[must_use]
    pub fn pod_dir(&self, uid: &PodUid) -> PathBuf {
        pod_sync_layout::paths::pod_dir(&self.settings.root_dir, uid)
    }

    /// Whether a pod of the runtime belongs to this node: its sandbox has this node's label, or its directory
    /// is below this root directory, as of the last list.
    #[must_use]
    pub fn is_ours(&self, runtime: &PodRuntime) -> bool {
        let marked = |key: &BTreeMap<String, String>| {
            key.get(quintlet_model::labels::OWNER_NODE).is_some_and(|node| *node == self.settings.node_name)
        };
        runtime.sandboxes.iter().any(|s| marked(&s.annotations)) || self.pod_dirs.contains(&runtime.pod.uid)
    }
}

/// Access to the container runtime.
#[derive(Debug, Clone)]
pub struct RuntimeAccess {
    /// CRI calls, made through cri-proxy.
    pub calls: Runtime,
    /// The observed state of all pods, from pleg-service.
    pub pleg: Arc<Pleg>,
    /// The status of the runtime itself.
    pub state: watch::Receiver<RuntimeState>,
}

impl RuntimeAccess {
    /// Returns the features of a runtime handler; none before the runtime's status was read.
    pub(crate) fn features(&self, handler: &str) -> HandlerFeatures {
        let state = self.state.borrow();
        let of_handler = state.handlers.get(handler).copied().unwrap_or_default();
        HandlerFeatures { mount_options: state.mount_options, ..of_handler }
    }
}

/// Reports about pods: statuses, events, views and metrics.
#[derive(Debug)]
pub struct Reporting {
    /// Statuses for the API server, through status-reporter.
    pub statuses: Arc<Statuses>,
    /// Events about pods and the node.
    pub events: Events,
    /// The published state of each pod.
    pub views: PodViews,
    /// Metrics under the names of the kubelet.
    pub metrics: PodMetrics,
}

/// Files that outlive the process.
#[derive(Debug)]
pub struct Checkpoints {
    /// One record per pod.
    pub records: StateDir,
    /// Allocated and actuated resources of each pod.
    pub allocations: Allocations,
}

/// Resources of the node that a pod needs before its containers start.
pub struct PodEnvironment {
    /// Cgroups of pods.
    pub cgroups: Cgroups,
    /// Directories, tokens and projects of direct volumes, whose state `volume_tasks` has.
    pub volumes: Volumes,
    /// Volumes of pods.
    pub volume_tasks: VolumeTasks,
    /// Devices of device plugins.
    pub devices: Devices,
    /// Claims of dynamic resource allocation.
    pub claims: Claims,
    /// CPUs, memory and NUMA nodes.
    pub placement: Placement,
    /// ConfigMaps, Secrets, Services and RuntimeClasses.
    pub objects: Arc<dyn ObjectSource>,
    /// Service account tokens; none without an API server.
    pub tokens: Option<Arc<dyn TokenSource>>,
    /// The offline cache; none if it is off.
    pub offline: Option<Arc<OfflineCache>>,
    /// Certificates of ClusterTrustBundles; none without an API server, and while the feature gate is off.
    pub trust_anchors: Option<Arc<dyn TrustAnchors>>,
    /// User and group id ranges of pods with a user namespace.
    pub user_namespaces: UserNamespaces,
    /// Reads of the files that variables of containers refer to.
    pub env_files: Stalls,
}

impl PodEnvironment {
    /// Returns the cgroups for the values of a pod's cgroup: without a CPU quota if a container of the pod
    /// has exclusive CPUs.
    #[must_use]
    pub(crate) fn pod_cgroups(&self, uid: &PodUid) -> Cgroups {
        if self.placement.has_exclusive_cpus(uid) {
            self.cgroups.without_quota()
        } else {
            self.cgroups.clone()
        }
    }

    /// Returns the number of changes of the ConfigMaps, Secrets and certificates of a pod.
    #[must_use]
    pub fn volume_changes(&self, uid: &PodUid) -> u64 {
        self.objects.changes(uid).saturating_add(self.volumes.changes(uid))
    }
}

/// Pulls of images, their limits and credentials.
pub struct ImagePulls {
    /// The images that pod-sync pulled, with the credentials that may use them.
    pub pull_records: PullRecords,
    /// Pulls in flight, per registry and in total.
    pub pulls: PullLimits,
    /// Credentials of the node.
    pub credentials: Credentials,
}

/// Scheduling of the pod workers.
#[derive(Debug)]
pub struct WorkerControl {
    /// The next work of each pod worker.
    pub pod_workers: PodWorkers,
    /// Wake-ups of the workers and of housekeeping.
    pub wakeups: Arc<WorkerWakeups>,
    /// Static pods whose sandbox other pods wait for.
    pub static_pod_gate: StaticPodGate,
}

/// Releases the range of a pod's user namespace, and wakes the pods that wait for one.
pub(crate) async fn release_user_namespace(
    environment: &Arc<PodEnvironment>,
    wakeups: &WorkerWakeups,
    uid: &PodUid,
) {
    let (environment, uid) = (Arc::clone(environment), uid.clone());
    for waiting in blocking(move || environment.user_namespaces.release(&uid)).await {
        wakeups.wake(&waiting);
    }
}

/// Confines panics and crashes to the pod in whose work they happened.
#[derive(Debug)]
pub struct FaultIsolation {
    /// Faults of each pod, and the waits that follow.
    pub containment: Containment,
    reporting: Arc<Reporting>,
    wakeups: Arc<WorkerWakeups>,
}

impl FaultIsolation {
    /// Reports faults as events and wakes the workers of the pods concerned.
    #[must_use]
    pub fn new(containment: Containment, reporting: Arc<Reporting>, wakeups: Arc<WorkerWakeups>) -> Self {
        Self { containment, reporting, wakeups }
    }

    /// Runs work of a pod. After a panic the pod waits, and the result is none.
    pub async fn contained<T>(&self, pod: &PodWork, work: impl Future<Output = T>) -> Option<T> {
        match self.containment.contained(pod, work).await {
            Ok(done) => Some(done),
            Err(panic) => {
                self.panicked(pod, &panic, None);
                None
            }
        }
    }

    /// Runs short work of a pod, unless the pod waits after a fault. A panic is logged, and the pod does not
    /// wait: the work is repeated periodically.
    pub fn unless_suspended<T>(&self, uid: &PodUid, work: impl FnOnce() -> T) -> Option<T> {
        self.containment.unless_suspended(uid, work)
    }

    /// Records a panic in the work of a pod. `object` is the pod, needed only if it has no view yet.
    pub fn panicked(&self, pod: &PodWork, panic: &Panic, object: Option<&Arc<Pod>>) {
        let wait = self.containment.record_panic(&pod.uid, panic);
        let shown = self.reporting.views.get(&pod.uid).map(|view| Arc::clone(&view.pod));
        if let Some(object) = object.or(shown.as_ref()) {
            self.reporting.events.pod(object, EventType::Warning, INTERNAL_ERROR, &wait.message, "");
        }
        // The worker publishes the wait. If the worker itself panicked, the pod manager makes another one.
        self.wakeups.wake(&pod.uid);
        self.wakeups.wake_housekeeping();
    }
}

/// All groups, for pod workers and the pod manager. Other tasks get the groups that they use.
pub struct WorkerContext {
    /// Wall time and CLOCK_BOOTTIME.
    pub clock: Clock,
    /// Settings of this node.
    pub node: Arc<NodeConfig>,
    /// Access to the container runtime.
    pub runtime: RuntimeAccess,
    /// Statuses, events, views and metrics.
    pub reporting: Arc<Reporting>,
    /// Records and allocations on disk.
    pub checkpoints: Arc<Checkpoints>,
    /// Cgroups, volumes and id ranges.
    pub environment: Arc<PodEnvironment>,
    /// Pulls of images, their limits and credentials.
    pub images: Arc<ImagePulls>,
    /// Probes, run by probe-service.
    pub probes: Arc<Probes>,
    /// Attempts of the probes with a period below one second.
    pub probe_rates: Arc<ProbeRates>,
    /// Scheduling of the workers.
    pub control: Arc<WorkerControl>,
    /// Containment of panics and crashes.
    pub faults: Arc<FaultIsolation>,
}

impl std::fmt::Debug for WorkerContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerContext").field("node", &self.node).finish_non_exhaustive()
    }
}

impl WorkerContext {
    /// Releases the range of a pod's user namespace, and wakes the pods that wait for one.
    pub async fn release_user_namespace(&self, uid: &PodUid) {
        release_user_namespace(&self.environment, &self.control.wakeups, uid).await;
    }

    /// Returns what stops of containers use.
    #[must_use]
    pub fn stop_context(&self) -> StopContext {
        StopContext {
            clock: self.clock.clone(),
            runtime: self.runtime.clone(),
            reporting: Arc::clone(&self.reporting),
        }
    }
}

/// The groups that an image pull uses.
#[derive(Clone)]
pub struct PullContext {
    /// Wall time and CLOCK_BOOTTIME.
    pub clock: Clock,
    /// Access to the container runtime.
    pub runtime: RuntimeAccess,
    /// Events and metrics.
    pub reporting: Arc<Reporting>,
    /// ConfigMaps, Secrets and tokens.
    pub environment: Arc<PodEnvironment>,
    /// Pulls of images, their limits and credentials.
    pub images: Arc<ImagePulls>,
}

/// The groups that a stop of a container and a lifecycle hook use.
#[derive(Debug, Clone)]
pub struct StopContext {
    /// Wall time and CLOCK_BOOTTIME.
    pub clock: Clock,
    /// Access to the container runtime.
    pub runtime: RuntimeAccess,
    /// Events, views and metrics.
    pub reporting: Arc<Reporting>,
}

/// The desired state of a pod, as its worker sees it.
#[derive(Debug, Clone)]
pub struct Desired {
    /// The pod; its status is the API server's.
    pub pod: Arc<Pod>,
    /// The source of the pod.
    pub source: SourceKind,
    /// The mirror of a static pod, as the API server has it.
    pub mirror: Option<Arc<Pod>>,
    /// The source no longer has the pod.
    pub removed: bool,
    /// Admission rejected the pod.
    pub rejected: Option<Rejection>,
    /// Preempted pods that must terminate first.
    pub after: Vec<Victim>,
}

impl Desired {
    /// Publishes whether the source removes or deletes the pod.
    pub fn publish_removal(&self, views: &PodViews, uid: &PodUid) {
        views.set_removal(uid, self.removed, self.pod.metadata.deletion_timestamp.as_ref());
    }
}

/// A pod that is preempted for another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Victim {
    /// UID of the preempted pod.
    pub uid: PodUid,
    /// CLOCK_BOOTTIME at which the wait for this pod ends.
    pub until: Duration,
}
