//! Evictions: what the loop of [`pod_sync_eviction_loop`] measures, deletes and terminates.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use pod_sync_clients::{EventType, RuntimeMountPoints};
use pod_sync_decisions::status::{KillCause, KillOverride};
use pod_sync_decisions::worker::{KillPodOptions, PodFacts};
use pod_sync_direct_volumes::quotas::ProjectQuotas;
use pod_sync_eviction::layout::{Layout, Reclaim};
use pod_sync_eviction::manager::{Eviction, Snapshot};
use pod_sync_eviction::thresholds::Threshold;
use pod_sync_eviction::usage::{Candidate, FileUsage, Observations, PodUsages};
use pod_sync_eviction::{EVICTED, Resource, Signal, THRESHOLD_MET, limits};
use pod_sync_eviction_loop::measure::{self, Paths, PodSources, RuntimeMounts};
use pod_sync_eviction_loop::{NodeControl, Scope, memory_alarm};
use pod_sync_node_decisions::gc::{self, PodDisposition};
use pod_sync_views::PodView;
use pod_sync_volume_usage::Measured;
use pod_sync_worker::context::{NodeConfig, Reporting, RuntimeAccess, WorkerControl};
use quintlet_kit::clock::Clock;
use quintlet_kit::task::blocking;
use quintlet_model::ids::{ContainerId, PodUid};
use quintlet_model::pod as pods;
use quintlet_model::runtime::PodRuntime;
use quintlet_proto::podsync::v1 as wire;
use tokio::sync::Semaphore;

use crate::image_gc::{self, ImageGcContext};

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
    inputs: EvictionContext,
    /// Pods that were evicted and may still hold resources.
    evicted: Mutex<BTreeSet<PodUid>>,
    /// Mount points of the runtime. They change only with its configuration.
    mounts: Mutex<Option<RuntimeMounts>>,
    measurements: Measurements,
}

/// Measurements of the node, and of memory and processes alone while a file system hangs.
struct Measurements {
    with_files: Measurement,
    without_files: Measurement,
}

/// Whether the files of a measurement were measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Files {
    Measured,
    Hang,
}

impl Measurements {
    fn new(timeout: Duration) -> Self {
        Self { with_files: Measurement::new(timeout), without_files: Measurement::new(timeout) }
    }

    /// Returns the result of `whole`, or that of `rest` if `whole` takes too long or an earlier one has not
    /// ended.
    async fn run<T: Send + 'static>(
        &self,
        whole: impl FnOnce() -> T + Send + 'static,
        rest: impl FnOnce() -> T + Send + 'static,
    ) -> Option<(T, Files)> {
        if let Some(done) = self.with_files.run(whole).await {
            return Some((done, Files::Measured));
        }
        Some((self.without_files.run(rest).await?, Files::Hang))
    }
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
pub(crate) struct EvictionContext {
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
    pub(crate) fn new(inputs: EvictionContext) -> Self {
        Self {
            evicted: Mutex::new(inputs.evicted.clone()),
            inputs,
            mounts: Mutex::default(),
            measurements: Measurements::new(MEASURE_TIMEOUT),
        }
    }

    async fn mounts(&self) -> Option<RuntimeMounts> {
        if let Some(known) = self.mounts.lock().clone() {
            return Some(known);
        }
        let listed = self.inputs.runtime.calls.mount_points();
        let listed = tokio::time::timeout(STATISTICS_TIMEOUT, listed).await.ok()?;
        let listed = listed.inspect_err(|e| tracing::debug!(error = %e, "runtime did not answer")).ok()?;
        let mounts = runtime_mounts(listed)?;
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
        layers_capacity: Option<i64>,
    ) -> Option<(PodUsages, Files)> {
        let runtime = self.running_containers()?;
        let candidates = candidates.to_vec();
        let rest =
            PodSources { candidates: candidates.clone(), runtime: runtime.clone(), ..PodSources::default() };
        let whole =
            PodSources { candidates, runtime, writable_layers, volumes, layers_capacity, has_files: true };
        let usages = |sources: PodSources| {
            let paths = self.inputs.paths.clone();
            move || measure::pods(&paths, &sources)
        };
        self.measurements.run(usages(whole), usages(rest)).await
    }

    fn running_containers(&self) -> Option<HashMap<PodUid, Vec<(String, ContainerId)>>> {
        let runtime = self.inputs.runtime.pleg.all()?;
        Some(runtime.iter().map(|pod| (pod.pod.uid.clone(), measure::running_containers(pod))).collect())
    }

    fn is_over(&self, uid: &PodUid) -> bool {
        self.inputs.control.pod_workers.has_terminated(&self.inputs.reporting.views, uid)
    }

    /// Returns the pods that may be evicted: those with a worker that have not terminated, and are not being
    /// evicted.
    fn candidates(&self) -> Vec<Candidate> {
        let evicted = self.unfinished();
        let is_active = |view: &Arc<PodView>| {
            let status = view.status.as_deref().or(view.pod.status.as_ref());
            let is_terminal = pods::is_terminal_phase(status.and_then(|s| s.phase.as_deref()));
            let uid = &view.pod_ref.uid;
            // The status of a pod whose worker is busy does not show the eviction yet.
            !view.worker.is_empty() && !is_terminal && !evicted.contains(uid) && !self.is_over(uid)
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
impl NodeControl for EvictionNode {
    async fn layout(&self) -> Option<Layout> {
        let (paths, mounts) = (self.inputs.paths.clone(), self.mounts().await?);
        self.measurements.with_files.run(move || measure::layout(&paths, &mounts)).await?
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
            observations.retain(|signal, _| !signal.is_of_disk());
            HashMap::new()
        });
        let capacity = layers_capacity(&observations);
        let (usages, files) = self.usages(&measured, layers, self.inputs.measured.all(), capacity).await?;
        if files == Files::Hang {
            // A file system that hangs delays no eviction for memory and process IDs.
            observations.retain(|signal, _| !signal.is_of_disk());
        }
        Some(Snapshot { observations, usages, candidates })
    }

    async fn disk_usage(&self, snapshot: &Snapshot) -> Option<PodUsages> {
        let layers = self.writable_layers().await?;
        let (root_dir, now) = (self.inputs.paths.root_dir.clone(), self.inputs.clock.wall());
        let quotas = self.inputs.quotas.clone();
        let pods: Vec<_> = snapshot.candidates.iter().map(|c| (c.uid.clone(), Arc::clone(&c.pod))).collect();
        let mut volumes = self.inputs.measured.all();
        let measurement = self
            .measurements
            .with_files
            .run(move || pod_sync_volume_usage::measure_now(&root_dir, &quotas, &pods, now, VOLUMES_TIMEOUT))
            .await?;
        for fresh in measurement {
            replace_measured(&mut volumes, fresh);
        }
        let capacity = layers_capacity(&snapshot.observations);
        let (usages, files) = self.usages(&snapshot.candidates, layers, volumes, capacity).await?;
        (files == Files::Measured).then_some(usages)
    }

    async fn observations(&self) -> Option<Observations> {
        let (paths, clock) = (self.inputs.paths.clone(), self.inputs.clock.clone());
        let rest = move || measure::memory_and_processes(&paths, clock.boot());
        // The mount points are those that the layout was found with. A runtime that hangs delays no
        // measurement.
        let mounts = self.mounts.lock().clone();
        let Some(mounts) = mounts else { return self.measurements.without_files.run(rest).await };
        let (paths, now) = (self.inputs.paths.clone(), self.inputs.clock.boot());
        let whole = move || measure::node(&paths, &mounts, now);
        Some(self.measurements.run(whole, rest).await?.0)
    }

    async fn reclaim(&self, what: Reclaim) {
        match what {
            Reclaim::DeadContainers => self.remove_dead_containers().await,
            // Who disables the collection of images does not want them removed: they may be impossible to
            // pull.
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

fn layers_capacity(observations: &Observations) -> Option<i64> {
    observations.get(&Signal::ContainerFsAvailable).map(|observed| observed.capacity.value())
}

/// Returns the first mount points that a runtime reports, as the kubelet takes them, or `None` if it reports
/// none for images.
fn runtime_mounts(listed: RuntimeMountPoints) -> Option<RuntimeMounts> {
    let first = |all: Vec<String>| all.into_iter().find(|path| !path.is_empty()).map(PathBuf::from);
    let images = Some(first(listed.images)?);
    Some(RuntimeMounts { images, containers: first(listed.containers) })
}

/// Replaces the measurements of a pod by later ones. A volume that was not measured again keeps its
/// measurement.
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

    #[tokio::test]
    async fn memory_and_processes_are_measured_while_a_file_system_hangs() {
        let measurements = Measurements::new(Duration::from_millis(500));
        let now = async || measurements.run(|| "all", || "memory and processes").await;
        assert_eq!(now().await, Some(("all", Files::Measured)));
        let (release, hangs) = mpsc::channel::<()>();
        let whole = move || {
            let _released = hangs.recv();
            "too late"
        };
        let rest = Some(("memory and processes", Files::Hang));
        assert_eq!(measurements.run(whole, || "memory and processes").await, rest);
        assert_eq!(now().await, rest, "the first one still hangs");
        let (release_rest, rest_hangs) = mpsc::channel::<()>();
        let hanging_rest = move || {
            let _released = rest_hangs.recv();
            "too late"
        };
        assert_eq!(measurements.run(|| "beside the one that hangs", hanging_rest).await, None);
        release_rest.send(()).unwrap();
        release.send(()).unwrap();
        let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
        while now().await != Some(("all", Files::Measured)) {
            assert!(tokio::time::Instant::now() < deadline, "the file system answers again");
            tokio::task::yield_now().await;
        }
    }

    #[test]
    fn a_runtime_without_a_file_system_of_images_is_queried_again() {
        let paths = |all: &[&str]| all.iter().map(|path| (*path).to_owned()).collect();
        for (images, containers, want) in [
            (vec![], vec![], None),
            (vec![""], vec![], None),
            (vec![], vec!["/layers"], None),
            (vec!["/images"], vec![], Some(("/images", None))),
            (vec!["/images", "/other"], vec!["/layers"], Some(("/images", Some("/layers")))),
        ] {
            let listed = RuntimeMountPoints { images: paths(&images), containers: paths(&containers) };
            let want = want.map(|(images, containers)| RuntimeMounts {
                images: Some(images.into()),
                containers: containers.map(PathBuf::from),
            });
            assert_eq!(runtime_mounts(listed), want, "{images:?} {containers:?}");
        }
    }
}
