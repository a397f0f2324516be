//! The sync loop: merges the pods of all sources and keeps one worker per pod
//! (`pkg/kubelet: syncLoop, podManager`).
//!
//! One task owns the [`PodManager`]. Updates of the sources are its only queue; everything else wakes it. Its
//! parts have what they work with: `Stores` the pods of the sources, `PodEntries` the workers, `Mirrors`,
//! `Admitter`, `Resizes`, `Cleanup` and `OfflinePods`.

mod admission;
mod cleanup;
mod entry;
mod manifest_gate;
mod mirrors;
mod offline;
mod qos_cgroups;
mod resize;
mod starts;
mod stores;
mod updates;

pub(crate) use admission::Admission;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_decisions::resize::allocation::PodResources;
use pod_sync_decisions::worker::{Input, PodFacts};
use pod_sync_layout::SourceKind;
use pod_sync_records::{PodRecord, Termination};
use pod_sync_sources::SourceMessage;
use pod_sync_sources::objects::ManifestObjects;
use pod_sync_worker::Worker;
use pod_sync_worker::context::{Desired, WorkerContext};
use quintlet_kit::notify::Heartbeat;
use quintlet_kit::timers;
use quintlet_model::ids::{PodRef, PodUid};
use quintlet_model::{labels, pod as pods};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use self::admission::Admitter;
use self::cleanup::Cleanup;
use self::entry::{PodEntries, WorkerHandle, WorkerOrigin};
use self::manifest_gate::ManifestGate;
use self::mirrors::Mirrors;
use self::offline::OfflinePods;
use self::resize::Resizes;
use self::stores::Stores;

/// Interval of housekeeping (`pkg/kubelet/kubelet.go: housekeepingPeriod`).
const HOUSEKEEPING: Duration = Duration::from_secs(2);

/// All pods of this node and their workers.
pub(crate) struct PodManager {
    ctx: Arc<WorkerContext>,
    objects: Arc<ManifestObjects>,
    stores: Stores,
    manifests: ManifestGate,
    pods: PodEntries,
    mirrors: Mirrors,
    admitter: Admitter,
    resizes: Resizes,
    cleanup: Cleanup,
    offline: OfflinePods,
    draining: bool,
    heartbeat: Heartbeat,
}

impl std::fmt::Debug for PodManager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PodManager").field("pods", &self.pods).finish_non_exhaustive()
    }
}

/// Whether a record of an earlier run has a usable pod.
#[must_use]
pub(crate) fn has_pod(record: &PodRecord) -> bool {
    record.pod.as_ref().is_some_and(|pod| pods::pod_ref(pod).is_ok())
}

impl PodManager {
    /// Returns a pod manager without pods. Spawns the task that writes the cgroups of QoS classes.
    #[must_use]
    pub(crate) fn new(
        ctx: Arc<WorkerContext>,
        objects: Arc<ManifestObjects>,
        admission: Arc<dyn Admission>,
        sources: &[SourceKind],
    ) -> Self {
        Self {
            objects,
            stores: Stores::new(sources),
            manifests: ManifestGate::of(sources),
            pods: PodEntries::default(),
            mirrors: Mirrors::new(Arc::clone(&ctx)),
            admitter: Admitter::new(Arc::clone(&ctx), admission),
            resizes: Resizes::new(Arc::clone(&ctx)),
            cleanup: Cleanup::new(Arc::clone(&ctx)),
            offline: OfflinePods::new(Arc::clone(&ctx)),
            draining: false,
            heartbeat: Heartbeat::new(ctx.clock.clone()),
            ctx,
        }
    }

    /// Returns the heartbeat of the loop.
    #[must_use]
    pub(crate) fn heartbeat(&self) -> Heartbeat {
        self.heartbeat.clone()
    }

    /// Makes workers for the pods in the records of an earlier run, before any source has delivered a
    /// snapshot.
    pub(crate) fn restore(&mut self, records: Vec<(PodUid, PodRecord)>) {
        for (uid, record) in records {
            let Some(pod) = record.pod.clone() else {
                self.ctx.checkpoints.records.remove(&uid);
                continue;
            };
            let source = match pods::annotation(&pod, labels::CONFIG_SOURCE) {
                Some("file") => SourceKind::File,
                Some("http") => SourceKind::Http,
                Some(_) | None => SourceKind::Api,
            };
            let Ok(pod_ref) = pods::pod_ref(&pod) else { continue };
            tracing::info!(pod.uid = %uid, pod = %pod_ref, "restoring a recorded pod");
            let allocations = &self.ctx.checkpoints.allocations;
            if !allocations.is_allocated(&uid) {
                // The record has the pod as it was allocated.
                allocations.allocate(&uid, &pod);
            }
            allocations.recover(&uid, &pod, record.status.as_deref());
            let desired = Desired {
                pod: allocations.apply(&uid, &pod),
                source,
                mirror: None,
                removed: false,
                rejected: None,
                after: Vec::new(),
            };
            let facts = PodFacts::of(&desired.pod, pod_ref.full_name());
            let termination = record.termination.as_ref().map(Termination::to_worker);
            self.ctx.control.pod_workers.step(Input::Restore {
                uid,
                facts,
                termination,
                started: record.started,
            });
            self.spawn(pod_ref, desired, Some(record), WorkerOrigin::Record);
        }
    }

    fn spawn(&mut self, pod_ref: PodRef, desired: Desired, record: Option<PodRecord>, origin: WorkerOrigin) {
        let uid = pod_ref.uid.clone();
        let (tx, rx) = watch::channel(desired);
        let worker = Worker::new(Arc::clone(&self.ctx), pod_ref, rx, record);
        let task = quintlet_kit::task::spawn("pod-worker", worker.run());
        let desired_resources = PodResources::default();
        self.pods.set_worker(&uid, WorkerHandle { desired_resources, desired: tx, task, origin });
    }

    /// Runs until `stop`, or, after `drain` became true, until no pod of a manifest is left.
    pub(crate) async fn run(
        mut self,
        mut updates: mpsc::Receiver<SourceMessage>,
        mut drain: watch::Receiver<bool>,
        stop: CancellationToken,
    ) {
        let mut housekeeping = tokio::time::interval_at(timers::first_tick(HOUSEKEEPING), HOUSEKEEPING);
        housekeeping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        loop {
            let ctx = Arc::clone(&self.ctx);
            let node_read = self.admitter.node_read();
            let manifests_expired = self.manifests.expired();
            self.heartbeat.beat();
            // Updates stay queued and the rest is level-triggered: a dropped arm loses nothing.
            tokio::select! {
                () = stop.cancelled() => return,
                update = updates.recv() => match update {
                    Some((source, update)) => self.receive(source, update),
                    None => return,
                },
                () = manifests_expired => self.manifests_read(),
                _ = housekeeping.tick() => self.housekeeping(),
                () = ctx.control.wakeups.housekeeping_due() => self.cleanup.request(),
                () = self.cleanup.due() => self.housekeeping(),
                listed = self.cleanup.listed() => self.cleanup.remove_listed(&mut self.pods, listed),
                () = node_read.notified() => self.admit_pending(),
                () = ctx.checkpoints.allocations.room() => self.resizes.retry_soon(),
                () = self.resizes.due() => {}
                changed = drain.changed() => if changed.is_ok() && *drain.borrow() { self.begin_drain() },
            }
            self.collect_ended();
            self.resizes.retry(&self.pods, &self.stores, &self.admitter);
            if self.draining && self.is_drained() {
                return;
            }
        }
    }

    fn begin_drain(&mut self) {
        self.draining = true;
        tracing::info!(pods = self.pods.workers().count(), "removing the pods of manifests");
        for (uid, worker) in self.pods.workers() {
            if worker.desired.borrow().source != SourceKind::Api {
                self.remove(uid, worker);
            }
        }
    }

    // Pods of the API server keep running, as they do when the process is stopped.
    fn is_drained(&self) -> bool {
        self.pods.iter().all(|(_, entry)| {
            let is_from_api = |worker: &WorkerHandle| worker.desired.borrow().source == SourceKind::Api;
            entry.worker().is_none_or(is_from_api) && entry.orphan_removal.is_none()
        })
    }

    fn remove(&self, uid: &PodUid, worker: &WorkerHandle) {
        self.offline.removed(uid);
        self.ctx.control.pod_workers.step(Input::Remove(uid.clone()));
        worker.desired.send_modify(|d| d.removed = true);
        worker.desired.borrow().publish_removal(&self.ctx.reporting.views, uid);
    }

    fn housekeeping(&mut self) {
        self.cleanup.begin();
        let began = self.ctx.clock.boot();
        self.clean_up();
        self.add_pods_with_freed_uid();
        let took = self.ctx.clock.boot().saturating_sub(began);
        if self.cleanup.is_newly_slow(took) {
            tracing::warn!(?took, pods = self.pods.workers().count(), "housekeeping is slow");
        }
    }

    fn clean_up(&mut self) {
        self.cleanup.count(&self.pods, self.mirrors.len());
        self.ctx.faults.containment.update_gauge();
        self.retry_set_aside();
        self.offline.keep(&self.pods, self.stores.is_listed(SourceKind::Api));
        // A pod is an orphan only if every source has delivered a snapshot and the whole runtime state was
        // read.
        if !self.stores.is_ready() {
            return;
        }
        self.report_sources_ready();
        self.ctx.environment.volume_tasks.sources_ready();
        self.mirrors.delete_orphaned(&self.pods);
        self.cleanup.update_qos_cgroups(&self.pods);
        self.ctx.environment.volumes.remove_expired_tokens(self.ctx.clock.wall());
        let wanted = self.stores.pods().filter(|(_, _, pod)| !pods::is_mirror(pod));
        let wanted = wanted.map(|(_, uid, _)| uid.clone());
        self.ctx.control.pod_workers.step(Input::SyncKnownPods(wanted.collect()));
        self.cleanup.remove_orphans(&mut self.pods);
    }

    /// Forgets pods whose worker has ended and restarts workers that ended unexpectedly.
    fn collect_ended(&mut self) {
        let ended = self.pods.take_ended_workers();
        let mut has_freed = !ended.is_empty();
        for (uid, worker) in ended {
            self.ctx.control.wakeups.forget(&uid);
            let desired = worker.desired.borrow().clone();
            if self.ctx.control.pod_workers.read(|w| w.is_known(&uid)) {
                // The new worker starts from the record: the pod is still desired, or still to be terminated.
                if self.ctx.faults.containment.suspension(&uid).is_none() {
                    tracing::error!(pod.uid = %uid, "pod worker exited unexpectedly, restarting");
                }
                self.ctx.control.pod_workers.step(Input::WorkerExited(uid.clone()));
                if let Ok(pod_ref) = pods::pod_ref(&desired.pod) {
                    let record = self.ctx.checkpoints.records.read(&uid);
                    let desired = Desired { after: Vec::new(), ..desired };
                    self.spawn(pod_ref, desired, record, worker.origin);
                }
                continue;
            }
            self.resizes.remove(&uid);
            self.ctx.checkpoints.allocations.remove(&uid);
            self.ctx.environment.objects.unregister(&uid);
            self.offline.ended(&uid);
            tracing::info!(pod.uid = %uid, "pod is gone from this node");
            let source = self.stores.get(SourceKind::Api);
            let is_deleted = |pod: &Arc<Pod>| pod.metadata.deletion_timestamp.is_some();
            let is_held = source.and_then(|store| store.get(&uid)).is_some_and(is_deleted);
            if is_held && !self.pods.get(&uid).is_some_and(|entry| entry.is_restart_requested) {
                self.pods.set_ended(&uid);
            }
        }
        has_freed |= self.pods.prune();
        if has_freed {
            self.add_pods_with_freed_uid();
        }
    }
}
