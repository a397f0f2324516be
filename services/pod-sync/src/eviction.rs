//! Evictions: what the loop of [`pod_sync_evictor`] measures, deletes and terminates.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use pod_sync_clients::EventType;
use pod_sync_decisions::gc::{self, PodDisposition};
use pod_sync_decisions::status::{KillCause, KillOverride};
use pod_sync_decisions::worker::{KillPodOptions, PodFacts};
use pod_sync_eviction::layout::{Layout, Reclaim};
use pod_sync_eviction::manager::{Eviction, Snapshot};
use pod_sync_eviction::usage::{Candidate, FileUsage, Observations, PodUsages};
use pod_sync_eviction::{EVICTED, Resource, THRESHOLD_MET};
use pod_sync_evictor::Node;
use pod_sync_evictor::measure::{self, Paths, PodSources, RuntimeMounts};
use pod_sync_storage::Measured;
use pod_sync_views::PodView;
use quintlet_kit::clock::Clock;
use quintlet_kit::task::blocking;
use quintlet_model::ids::{ContainerId, PodUid};
use quintlet_model::pod as pods;
use quintlet_model::runtime::PodRuntime;
use quintlet_proto::podsync::v1 as wire;
use tokio::sync::Semaphore;

use crate::image_gc::{self, ImageGcContext};
use pod_sync_worker::context::{NodeConfig, Reporting, RuntimeAccess, WorkerControl};

/// Longest measurement of the node. While a file system hangs, no pod is evicted.
const MEASURE_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest measurement of the volumes of all pods before an eviction.
const VOLUMES_TIMEOUT: Duration = Duration::from_secs(10);
/// Text of the event when a pod did not stop in time.
const NOT_STOPPED: &str = "Container runtime did not kill the pod within specified grace period.";

/// The node as evictions see it.
pub(crate) struct EvictionNode {
    clock: Clock,
    node: Arc<NodeConfig>,
    runtime: RuntimeAccess,
    reporting: Arc<Reporting>,
    control: Arc<WorkerControl>,
    images: ImageGcContext,
    measured: Arc<Measured>,
    paths: Paths,
    /// Pods that were evicted and may still hold resources.
    evicted: Mutex<BTreeSet<PodUid>>,
    /// Mount points of the runtime. They change only with its configuration.
    mounts: Mutex<Option<RuntimeMounts>>,
    /// Held by the measurement that runs. One that hangs keeps it, so that no second one hangs beside it.
    measuring: Arc<Semaphore>,
}

/// Dependencies of an [`EvictionNode`].
pub(crate) struct EvictionInputs {
    pub(crate) clock: Clock,
    pub(crate) node: Arc<NodeConfig>,
    pub(crate) runtime: RuntimeAccess,
    pub(crate) reporting: Arc<Reporting>,
    pub(crate) control: Arc<WorkerControl>,
    pub(crate) images: ImageGcContext,
    pub(crate) measured: Arc<Measured>,
    pub(crate) paths: Paths,
    /// Pods whose eviction an earlier process began.
    pub(crate) evicted: BTreeSet<PodUid>,
}

impl EvictionNode {
    pub(crate) fn new(inputs: EvictionInputs) -> Self {
        let EvictionInputs { clock, node, runtime, reporting, control, images, measured, paths, evicted } =
            inputs;
        let (evicted, mounts) = (Mutex::new(evicted), Mutex::default());
        let measuring = Arc::new(Semaphore::new(1));
        Self { clock, node, runtime, reporting, control, images, measured, paths, evicted, mounts, measuring }
    }

    async fn mounts(&self) -> Option<RuntimeMounts> {
        if let Some(known) = self.mounts.lock().clone() {
            return Some(known);
        }
        let asked = self.runtime.calls.image_and_container_mounts().await;
        let (images, containers) =
            asked.inspect_err(|e| tracing::debug!(error = %e, "runtime did not answer")).ok()?;
        let mounts = RuntimeMounts { images: images.map(Into::into), containers: containers.map(Into::into) };
        *self.mounts.lock() = Some(mounts.clone());
        Some(mounts)
    }

    /// Runs a measurement on a blocking thread.
    async fn measure<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let Ok(permit) = Arc::clone(&self.measuring).try_acquire_owned() else {
            tracing::warn!("the last measurement of the node has not ended, nothing is evicted");
            return None;
        };
        let measurement = blocking(move || {
            let done = work();
            drop(permit);
            done
        });
        tokio::time::timeout(MEASURE_TIMEOUT, measurement)
            .await
            .inspect_err(|_| tracing::warn!(timeout = ?MEASURE_TIMEOUT, "measurement of the node timed out"))
            .ok()
    }

    async fn writable_layers(&self) -> Option<HashMap<ContainerId, FileUsage>> {
        let listed = self.runtime.calls.writable_layers().await;
        let layers = listed
            .inspect_err(|error| tracing::info!(%error, "failed to list container statistics, no pod is evicted for disk space"))
            .ok()?;
        Some(layers.into_iter().map(|(id, bytes, inodes)| (id, FileUsage { bytes, inodes })).collect())
    }

    async fn usages(
        &self,
        candidates: &[Candidate],
        writable_layers: HashMap<ContainerId, FileUsage>,
        volumes: Vec<wire::PodStorage>,
    ) -> Option<PodUsages> {
        let runtime = self.runtime.pleg.all()?;
        let runtime =
            runtime.iter().map(|pod| (pod.pod.uid.clone(), measure::running_containers(pod))).collect();
        let sources = PodSources { candidates: candidates.to_vec(), runtime, writable_layers, volumes };
        let paths = self.paths.clone();
        self.measure(move || measure::pods(&paths, &sources)).await
    }

    fn is_over(&self, uid: &PodUid) -> bool {
        self.control.pod_workers.is_over(&self.reporting.views, uid)
    }

    /// Returns the pods that may be evicted: those with a worker that have not terminated.
    fn candidates(&self) -> Vec<Candidate> {
        let is_active = |view: &Arc<PodView>| {
            let status = view.status.as_deref().or(view.pod.status.as_ref());
            let is_terminal = pods::is_terminal_phase(status.and_then(|s| s.phase.as_deref()));
            !view.worker.is_empty() && !is_terminal && !self.is_over(&view.pod_ref.uid)
        };
        let active = self.reporting.views.all().into_iter().filter(is_active);
        active.map(|v| Candidate { uid: v.pod_ref.uid.clone(), pod: Arc::clone(&v.pod) }).collect()
    }

    async fn remove_dead_containers(&self) {
        for pod in self.runtime.pleg.all().unwrap_or_default().iter().filter(|pod| self.node.is_ours(pod)) {
            let uid = &pod.pod.uid;
            let disposition = if self.is_over(uid) { PodDisposition::Removed } else { PodDisposition::Kept };
            self.remove_dead(pod, disposition).await;
        }
    }

    async fn remove_dead(&self, pod: &PodRuntime, disposition: PodDisposition) {
        let dead = gc::dead_containers(pod, disposition, self.node.dead_containers, self.clock.wall());
        let mut removed: Vec<ContainerId> = Vec::new();
        for id in dead {
            match self.runtime.calls.remove_container(&id).await {
                Ok(()) => removed.push(id),
                Err(error) => tracing::info!(container = %id, %error, "failed to remove dead container"),
            }
        }
        for id in gc::dead_sandboxes(pod, &removed, disposition) {
            if let Err(error) = self.runtime.calls.remove_sandbox(&id).await {
                tracing::info!(sandbox = %id, %error, "failed to remove dead sandbox");
            }
        }
    }
}

#[async_trait]
impl Node for EvictionNode {
    async fn layout(&self) -> Option<Layout> {
        let (paths, mounts) = (self.paths.clone(), self.mounts().await?);
        self.measure(move || measure::layout(&paths, &mounts)).await?
    }

    async fn snapshot(&self) -> Option<Snapshot> {
        let mut observations = self.observations().await?;
        let layers = self.writable_layers().await.unwrap_or_else(|| {
            // Without them the wrong pod could be evicted.
            observations.retain(|signal, _| matches!(signal.resource(), Resource::Memory | Resource::Pids));
            HashMap::new()
        });
        let candidates = self.candidates();
        let usages = self.usages(&candidates, layers, self.measured.all()).await?;
        Some(Snapshot { observations, usages, candidates })
    }

    async fn disk_usage(&self, snapshot: &Snapshot) -> Option<PodUsages> {
        let layers = self.writable_layers().await?;
        let (root_dir, now) = (self.paths.root_dir.clone(), self.clock.wall());
        let pods: Vec<_> = snapshot.candidates.iter().map(|c| (c.uid.clone(), Arc::clone(&c.pod))).collect();
        let mut volumes = self.measured.all();
        let measurement = self
            .measure(move || pod_sync_storage::measure_now(&root_dir, &pods, now, VOLUMES_TIMEOUT))
            .await?;
        for fresh in measurement {
            replace_measured(&mut volumes, fresh);
        }
        self.usages(&snapshot.candidates, layers, volumes).await
    }

    async fn observations(&self) -> Option<Observations> {
        let (paths, mounts, now) = (self.paths.clone(), self.mounts().await?, self.clock.boot());
        self.measure(move || measure::node(&paths, &mounts, now)).await
    }

    async fn reclaim(&self, what: Reclaim) {
        match what {
            Reclaim::DeadContainers => self.remove_dead_containers().await,
            // Who disables the collection of images does not want them removed: they may be impossible to pull.
            Reclaim::UnusedImages if self.images.policy.is_disabled() => {
                tracing::info!("image garbage collection is disabled, unused images are kept");
            }
            Reclaim::UnusedImages => image_gc::remove_unused(&self.images).await,
        }
    }

    async fn evict(&self, eviction: &Eviction) {
        let Candidate { uid, pod } = &eviction.candidate;
        let Ok(pod_ref) = pods::pod_ref(pod) else { return };
        let Eviction { message, annotations, .. } = eviction;
        self.evicted.lock().insert(uid.clone());
        self.reporting.events.pod_annotated(pod, EventType::Warning, EVICTED, message, annotations);
        let kill = KillPodOptions {
            evict: true,
            grace: Some(eviction.grace),
            killed_as: Some(KillOverride {
                cause: KillCause::Evicted,
                message: message.clone(),
                disruption: eviction.is_disruption.then(|| message.clone()),
            }),
            ..KillPodOptions::default()
        };
        let facts = PodFacts::of(pod, pod_ref.full_name());
        if let Err(error) = self.control.pod_workers.kill(uid, facts, kill).await {
            tracing::warn!(pod.uid = %uid, %error, "evicted pod did not terminate in time, no longer waiting");
            self.reporting.events.pod(pod, EventType::Warning, "ExceededGracePeriod", NOT_STOPPED, "");
        }
    }

    fn unfinished(&self) -> BTreeSet<PodUid> {
        let mut evicted = self.evicted.lock();
        self.control
            .pod_workers
            .read(|w| evicted.retain(|uid| w.is_known(uid) && !w.should_be_finished(uid)));
        evicted.clone()
    }

    fn reclaiming(&self, resource: Resource) {
        let text = format!("Attempting to reclaim {resource}");
        self.reporting.events.node(&self.node.settings.node_name, EventType::Warning, THRESHOLD_MET, &text);
    }

    fn now(&self) -> Duration {
        self.clock.boot()
    }
}

/// Replaces the measurements of a pod by later ones. A volume that was not measured again keeps its measurement.
fn replace_measured(all: &mut Vec<wire::PodStorage>, fresh: wire::PodStorage) {
    match all.iter_mut().find(|storage| storage.uid == fresh.uid) {
        None => all.push(fresh),
        Some(storage) => {
            storage.volumes.retain(|old| fresh.volumes.iter().all(|new| new.name != old.name));
            storage.volumes.extend(fresh.volumes);
            storage.hosts = fresh.hosts.or(storage.hosts.take());
        }
    }
}
