//! Evictions: what the loop of [`pod_sync_evictor`] measures, deletes and terminates.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use pod_sync_clients::EventType;
use pod_sync_decisions::gc::{self, PodDisposition};
use pod_sync_decisions::status::{KillCause, KillOverride};
use pod_sync_decisions::worker::{KillPodOptions, PodFacts};
use pod_sync_eviction::layout::{Layout, Reclaim};
use pod_sync_eviction::limits;
use pod_sync_eviction::manager::{Eviction, Snapshot};
use pod_sync_eviction::thresholds::Threshold;
use pod_sync_eviction::usage::{Candidate, FileUsage, Observations, PodUsages};
use pod_sync_eviction::{EVICTED, Resource, Signal, THRESHOLD_MET};
use pod_sync_evictor::measure::{self, Paths, PodSources, RuntimeMounts};
use pod_sync_evictor::memory_alarm;
use pod_sync_evictor::{Node, Scope};
use pod_sync_storage::Measured;
use pod_sync_views::PodView;
use pod_sync_volumes::quotas::ProjectQuotas;
use quintlet_kit::clock::Clock;
use quintlet_kit::task::blocking;
use quintlet_model::ids::{ContainerId, PodUid};
use quintlet_model::pod as pods;
use quintlet_model::runtime::PodRuntime;
use quintlet_proto::podsync::v1 as wire;
use tokio::sync::Semaphore;

use crate::image_gc::{self, ImageGcContext};
use pod_sync_worker::context::{NodeConfig, Reporting, RuntimeAccess, WorkerControl};

/// Longest measurement of the node. While a file system hangs, no pod is evicted for disk space.
const MEASURE_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest wait for the statistics of containers. Evictions for memory and process IDs do not need them.
const STATISTICS_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest measurement of the volumes of all pods before an eviction.
const VOLUMES_TIMEOUT: Duration = Duration::from_secs(10);
/// Text of the event when a pod did not stop in time.
const NOT_STOPPED: &str = "Container runtime did not kill the pod within specified grace period.";

/// The node as evictions see it.
pub(crate) struct EvictionNode {
    inputs: EvictionInputs,
    /// Pods that were evicted and may still hold resources.
    evicted: Mutex<BTreeSet<PodUid>>,
    /// Mount points of the runtime. They change only with its configuration.
    mounts: Mutex<Option<RuntimeMounts>>,
    measurement: Measurement,
    /// Measurements of memory and processes while a file system hangs.
    without_files: Measurement,
}

/// Runs measurements on blocking threads, one at a time.
struct Measurement {
    /// Held by the measurement that runs. One that hangs keeps it, so that no second one hangs beside it.
    running: Arc<Semaphore>,
    timeout: Duration,
}

impl Measurement {
    fn new(timeout: Duration) -> Self {
        Self { running: Arc::new(Semaphore::new(1)), timeout }
    }

    /// Returns `None` if the measurement takes too long, or if an earlier one has not ended.
    async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let Ok(permit) = Arc::clone(&self.running).try_acquire_owned() else {
            tracing::warn!(
                "the last measurement of the node has not ended, no pod is evicted for disk space"
            );
            return None;
        };
        let measurement = blocking(move || {
            let done = work();
            drop(permit);
            done
        });
        let timeout = self.timeout;
        tokio::time::timeout(timeout, measurement)
            .await
            .inspect_err(|_| tracing::warn!(?timeout, "measurement of the node timed out"))
            .ok()
    }
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
    pub(crate) quotas: ProjectQuotas,
    pub(crate) paths: Paths,
    /// Pods whose eviction an earlier process began.
    pub(crate) evicted: BTreeSet<PodUid>,
    /// The kernel reports when memory usage crosses a threshold.
    pub(crate) has_memory_alarm: bool,
}

impl EvictionNode {
    pub(crate) fn new(inputs: EvictionInputs) -> Self {
        Self {
            evicted: Mutex::new(inputs.evicted.clone()),
            inputs,
            mounts: Mutex::default(),
            measurement: Measurement::new(MEASURE_TIMEOUT),
            without_files: Measurement::new(MEASURE_TIMEOUT),
        }
    }

    async fn mounts(&self) -> Option<RuntimeMounts> {
        if let Some(known) = self.mounts.lock().clone() {
            return Some(known);
        }
        let listed = self.inputs.runtime.calls.mount_points().await;
        let listed = listed.inspect_err(|e| tracing::debug!(error = %e, "runtime did not answer")).ok()?;
        let first = |all: Vec<String>| all.into_iter().next().map(PathBuf::from);
        let mounts = RuntimeMounts { images: first(listed.images), containers: first(listed.containers) };
        *self.mounts.lock() = Some(mounts.clone());
        Some(mounts)
    }

    async fn writable_layers(&self) -> Option<HashMap<ContainerId, FileUsage>> {
        let listed =
            tokio::time::timeout(STATISTICS_TIMEOUT, self.inputs.runtime.calls.writable_layers()).await;
        let layers = listed
            .inspect_err(|_| tracing::info!(timeout = ?STATISTICS_TIMEOUT, "runtime did not list container statistics, no pod is evicted for disk space"))
            .ok()?
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
        let runtime = self.running_containers()?;
        let candidates = candidates.to_vec();
        let sources = PodSources { candidates, runtime, writable_layers, volumes, has_files: true };
        let paths = self.inputs.paths.clone();
        self.measurement.run(move || measure::pods(&paths, &sources)).await
    }

    /// Measures memory and processes of pods.
    async fn usages_without_files(&self, candidates: &[Candidate]) -> Option<PodUsages> {
        let runtime = self.running_containers()?;
        let sources = PodSources { candidates: candidates.to_vec(), runtime, ..PodSources::default() };
        let paths = self.inputs.paths.clone();
        self.without_files.run(move || measure::pods(&paths, &sources)).await
    }

    fn running_containers(&self) -> Option<HashMap<PodUid, Vec<(String, ContainerId)>>> {
        let runtime = self.inputs.runtime.pleg.all()?;
        Some(runtime.iter().map(|pod| (pod.pod.uid.clone(), measure::running_containers(pod))).collect())
    }

    fn is_over(&self, uid: &PodUid) -> bool {
        self.inputs.control.pod_workers.has_terminated(&self.inputs.reporting.views, uid)
    }

    /// Returns the pods that may be evicted: those with a worker that have not terminated.
    fn candidates(&self) -> Vec<Candidate> {
        let is_active = |view: &Arc<PodView>| {
            let status = view.status.as_deref().or(view.pod.status.as_ref());
            let is_terminal = pods::is_terminal_phase(status.and_then(|s| s.phase.as_deref()));
            !view.worker.is_empty() && !is_terminal && !self.is_over(&view.pod_ref.uid)
        };
        let active = self.inputs.reporting.views.all().into_iter().filter(is_active);
        active.map(|v| Candidate { uid: v.pod_ref.uid.clone(), pod: Arc::clone(&v.pod) }).collect()
    }

    async fn remove_dead_containers(&self) {
        for pod in self
            .inputs
            .runtime
            .pleg
            .all()
            .unwrap_or_default()
            .iter()
            .filter(|pod| self.inputs.node.is_ours(pod))
        {
            let uid = &pod.pod.uid;
            let disposition = if self.is_over(uid) { PodDisposition::Removed } else { PodDisposition::Kept };
            self.remove_dead(pod, disposition).await;
        }
    }

    async fn remove_dead(&self, pod: &PodRuntime, disposition: PodDisposition) {
        let dead =
            gc::dead_containers(pod, disposition, self.inputs.node.dead_containers, self.inputs.clock.wall());
        let mut removed: Vec<ContainerId> = Vec::new();
        for id in dead {
            match self.inputs.runtime.calls.remove_container(&id).await {
                Ok(()) => removed.push(id),
                Err(error) => tracing::info!(container = %id, %error, "failed to remove dead container"),
            }
        }
        for id in gc::dead_sandboxes(pod, &removed, disposition) {
            if let Err(error) = self.inputs.runtime.calls.remove_sandbox(&id).await {
                tracing::info!(sandbox = %id, %error, "failed to remove dead sandbox");
            }
        }
    }
}

#[async_trait]
impl Node for EvictionNode {
    async fn layout(&self) -> Option<Layout> {
        let (paths, mounts) = (self.inputs.paths.clone(), self.mounts().await?);
        self.measurement.run(move || measure::layout(&paths, &mounts)).await?
    }

    async fn snapshot(&self, mut observations: Observations, scope: Scope) -> Option<Snapshot> {
        let candidates = self.candidates();
        let is_measured = |candidate: &&Candidate| match scope {
            Scope::Limited => {
                limits::limits_volumes(&candidate.pod) || limits::limits_containers(&candidate.pod)
            }
            Scope::All => true,
        };
        let measured: Vec<_> = candidates.iter().filter(is_measured).cloned().collect();
        if measured.is_empty() {
            return Some(Snapshot { observations, usages: PodUsages::new(), candidates });
        }
        let needs_layers = scope == Scope::All || measured.iter().any(|c| limits::limits_containers(&c.pod));
        let layers = if needs_layers { self.writable_layers().await } else { Some(HashMap::new()) };
        let layers = layers.unwrap_or_else(|| {
            // Without them the wrong pod could be evicted.
            observations.retain(|signal, _| !is_of_disk(*signal));
            HashMap::new()
        });
        let usages = match self.usages(&measured, layers, self.inputs.measured.all()).await {
            Some(usages) => usages,
            // A file system that hangs delays no eviction for memory and process IDs.
            None => {
                observations.retain(|signal, _| !is_of_disk(*signal));
                self.usages_without_files(&measured).await?
            }
        };
        Some(Snapshot { observations, usages, candidates })
    }

    async fn disk_usage(&self, snapshot: &Snapshot) -> Option<PodUsages> {
        let layers = self.writable_layers().await?;
        let (root_dir, now) = (self.inputs.paths.root_dir.clone(), self.inputs.clock.wall());
        let quotas = self.inputs.quotas.clone();
        let pods: Vec<_> = snapshot.candidates.iter().map(|c| (c.uid.clone(), Arc::clone(&c.pod))).collect();
        let mut volumes = self.inputs.measured.all();
        let measurement = self
            .measurement
            .run(move || pod_sync_storage::measure_now(&root_dir, &quotas, &pods, now, VOLUMES_TIMEOUT))
            .await?;
        for fresh in measurement {
            replace_measured(&mut volumes, fresh);
        }
        self.usages(&snapshot.candidates, layers, volumes).await
    }

    async fn observations(&self) -> Option<Observations> {
        let (paths, mounts, now) =
            (self.inputs.paths.clone(), self.mounts().await?, self.inputs.clock.boot());
        let whole = self.measurement.run(move || measure::node(&paths, &mounts, now)).await;
        if whole.is_some() {
            return whole;
        }
        let (paths, now) = (self.inputs.paths.clone(), self.inputs.clock.boot());
        self.without_files.run(move || measure::memory_and_processes(&paths, now)).await
    }

    async fn reclaim(&self, what: Reclaim) {
        match what {
            Reclaim::DeadContainers => self.remove_dead_containers().await,
            // Who disables the collection of images does not want them removed: they may be impossible to pull.
            Reclaim::UnusedImages if self.inputs.images.policy.is_disabled() => {
                tracing::info!("image garbage collection is disabled, unused images are kept");
            }
            Reclaim::UnusedImages => image_gc::remove_unused(&self.inputs.images).await,
        }
    }

    async fn evict(&self, eviction: &Eviction) {
        let Candidate { uid, pod } = &eviction.candidate;
        let Ok(pod_ref) = pods::pod_ref(pod) else { return };
        let Eviction { message, annotations, .. } = eviction;
        self.evicted.lock().insert(uid.clone());
        self.inputs.reporting.events.pod_annotated(pod, EventType::Warning, EVICTED, message, annotations);
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
        if let Err(error) = self.inputs.control.pod_workers.kill(uid, facts, kill).await {
            tracing::warn!(pod.uid = %uid, %error, "evicted pod did not terminate in time, no longer waiting");
            self.inputs.reporting.events.pod(pod, EventType::Warning, "ExceededGracePeriod", NOT_STOPPED, "");
        }
    }

    fn unfinished(&self) -> BTreeSet<PodUid> {
        let mut evicted = self.evicted.lock();
        self.inputs
            .control
            .pod_workers
            .read(|w| evicted.retain(|uid| w.is_known(uid) && !w.should_be_finished(uid)));
        evicted.clone()
    }

    fn reclaiming(&self, resource: Resource) {
        let text = format!("Attempting to reclaim {resource}");
        self.inputs.reporting.events.node(
            &self.inputs.node.settings.node_name,
            EventType::Warning,
            THRESHOLD_MET,
            &text,
        );
    }

    async fn memory_alarm(&self, thresholds: &[Threshold], observations: &Observations) {
        if self.inputs.has_memory_alarm {
            memory_alarm::wait(&self.inputs.paths, thresholds, observations).await;
        } else {
            std::future::pending().await
        }
    }

    fn now(&self) -> Duration {
        self.inputs.clock.boot()
    }
}

fn is_of_disk(signal: Signal) -> bool {
    match signal.resource() {
        Resource::EphemeralStorage | Resource::Inodes => true,
        Resource::Memory | Resource::Pids => false,
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
            storage.termination_logs = fresh.termination_logs.or(storage.termination_logs.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn fresh_figures_replace_those_of_volumes_and_of_the_files_of_the_pod() {
        let usage = |bytes| Some(wire::DiskUsage { used_bytes: bytes, ..Default::default() });
        let volume = |name: &str, bytes| wire::VolumeStorage {
            name: name.to_owned(),
            usage: usage(bytes),
            ..Default::default()
        };
        let storage = |volumes: Vec<wire::VolumeStorage>, hosts, termination_logs| wire::PodStorage {
            uid: "u".to_owned(),
            volumes,
            hosts,
            termination_logs,
        };
        let old = || storage(vec![volume("a", 1), volume("b", 1)], usage(1), usage(1));
        for (fresh, want) in [
            (
                storage(vec![volume("b", 2)], usage(2), usage(2)),
                storage(vec![volume("a", 1), volume("b", 2)], usage(2), usage(2)),
            ),
            // What was not measured in time keeps its figures.
            (storage(vec![], None, None), old()),
        ] {
            let mut all = vec![old()];
            replace_measured(&mut all, fresh);
            assert_eq!(all, [want]);
        }
        let mut none = Vec::new();
        replace_measured(&mut none, old());
        assert_eq!(none, [old()]);
    }

    #[tokio::test]
    async fn a_measurement_that_hangs_gives_no_result_and_no_second_one_begins_beside_it() {
        let measurement = Measurement::new(Duration::from_millis(50));
        assert_eq!(measurement.run(|| 1).await, Some(1));
        let (release, hangs) = mpsc::channel::<()>();
        assert_eq!(measurement.run(move || hangs.recv().is_ok()).await, None);
        assert_eq!(measurement.run(|| panic!("beside the one that hangs")).await, None::<()>);
        release.send(()).unwrap();
        let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
        while measurement.run(|| 2).await.is_none() {
            assert!(tokio::time::Instant::now() < deadline, "the measurement has ended");
            tokio::task::yield_now().await;
        }
    }
}
