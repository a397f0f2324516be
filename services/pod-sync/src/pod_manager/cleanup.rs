//! Periodic cleanup: orphaned pods, QoS cgroups, files of earlier pods (`pkg/kubelet: HandlePodCleanups`).

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_decisions::qos::qos_tiers;
use pod_sync_decisions::worker::Input;
use pod_sync_layout::paths;
use pod_sync_metrics::Counted;
use pod_sync_worker::context::WorkerContext;
use pod_sync_worker::possible_users;
use quintlet_model::ids::PodUid;
use quintlet_model::pod;
use tokio::task::JoinHandle;

use super::entry::PodEntries;
use super::qos_cgroups::QosCgroups;
use crate::dead_foreign::DeadForeignPods;
use crate::housekeeping::{self, HousekeepingPace, LogSweeper};
use crate::orphan_listing::OrphanListing;

/// The state of periodic cleanup between two runs.
pub(super) struct Cleanup {
    ctx: Arc<WorkerContext>,
    qos_cgroups: QosCgroups,
    // Lists directories of unknown pods.
    listing: Option<JoinHandle<BTreeSet<PodUid>>>,
    orphan_listing: OrphanListing,
    dead_foreign: DeadForeignPods,
    sweeper: LogSweeper,
    pace: HousekeepingPace,
}

impl Cleanup {
    /// Spawns the task that writes the cgroups of QoS classes.
    pub(super) fn new(ctx: Arc<WorkerContext>) -> Self {
        let cgroups = ctx.environment.cgroups.clone();
        let write =
            move |tiers: &_| cgroups.update_qos_cgroups(tiers).map_err(|e| quintlet_kit::error_chain(&e));
        Self {
            qos_cgroups: QosCgroups::spawn(write),
            listing: None,
            orphan_listing: OrphanListing::new(paths::pods_dir(&ctx.node.settings.root_dir)),
            dead_foreign: DeadForeignPods::default(),
            sweeper: LogSweeper::default(),
            pace: HousekeepingPace::default(),
            ctx,
        }
    }

    /// Requests a run before the next interval.
    pub(super) fn request(&mut self) {
        self.pace.request();
    }

    /// Completes when a requested run is due.
    pub(super) fn due(&self) -> impl Future<Output = ()> + use<> {
        self.pace.due()
    }

    /// Begins a run.
    pub(super) fn begin(&mut self) {
        self.pace.begin();
    }

    /// Returns whether a run took too long, and the one before did not.
    pub(super) fn is_newly_slow(&mut self, took: Duration) -> bool {
        self.pace.is_newly_slow(took)
    }

    /// Returns the result of a listing, once it has ended. Cancellation safety: the listing continues.
    pub(super) async fn listed(&mut self) -> BTreeSet<PodUid> {
        match &mut self.listing {
            // A panic in the listing ends the process.
            Some(listing) => listing.await.unwrap_or_default(),
            None => std::future::pending().await,
        }
    }

    /// Removes what pods that no source has left on the node. Every source has delivered a snapshot.
    pub(super) fn remove_orphans(&mut self, pods: &mut PodEntries) {
        let Some(runtime) = self.ctx.runtime.pleg.all() else { return };
        let with_claims = self.ctx.environment.claims.pods();
        let mut present = HashSet::new();
        self.dead_foreign.forget_gone(&runtime);
        for found in runtime {
            let uid = found.pod.uid.clone();
            present.insert(uid.clone());
            if !pods.may_be_orphan(&uid)
                || !(self.ctx.node.is_ours(&found) || self.dead_foreign.has(&found))
                || self.ctx.faults.containment.suspension(&uid).is_some()
            {
                continue;
            }
            tracing::info!(pod.uid = %uid, pod = %found.pod, "removing an orphaned pod");
            let full_name = found.pod.full_name();
            self.ctx.control.pod_workers.step(Input::Orphan { uid: uid.clone(), full_name });
            self.ctx.reporting.metrics.census.count_orphan();
            let ctx = Arc::clone(&self.ctx);
            let task = quintlet_kit::task::spawn("orphan", housekeeping::remove_orphan(ctx, found));
            pods.entry(&uid).orphan_removal = Some(task);
        }
        self.dead_foreign.ask(&self.ctx);
        let managed = pods.iter().filter(|(_, e)| e.is_desired() || e.orphan_removal.is_some());
        let known: HashSet<PodUid> = managed.map(|(uid, _)| uid.clone()).chain(present).collect();
        if self.listing.is_none() && self.orphan_listing.begin(&known, self.ctx.clock.boot()) {
            let listing = housekeeping::orphaned(
                Arc::clone(&self.ctx.node),
                Arc::clone(&self.ctx.environment),
                known.clone(),
            );
            self.listing = Some(quintlet_kit::task::spawn("list-orphans", listing));
        }
        self.ctx.reporting.metrics.start_latency.retain(&known);
        self.release_devices(&known);
        self.release_cpus(&known);
        self.unprepare_claims(with_claims, &known);
        let allocations = &self.ctx.checkpoints.allocations;
        allocations.retain(&known.iter().map(PodUid::as_str).collect());
        if allocations.begin_interval(self.ctx.clock.boot()) {
            let ctx = Arc::clone(&self.ctx);
            let write = async move { ctx.checkpoints.allocations.write_files().await };
            drop(quintlet_kit::task::spawn("write-allocations", write));
        }
        self.sweeper.tick(&self.ctx, &known);
    }

    /// Frees the devices of pods that are gone. Usually their workers have done so.
    fn release_devices(&self, known: &HashSet<PodUid>) {
        let devices = self.ctx.environment.devices.clone();
        if devices.retain(|pod| known.contains(pod)) {
            let write = async move { devices.write_checkpoint().await };
            drop(quintlet_kit::task::spawn("write-devices", write));
        }
    }

    /// Ends the assignments of CPUs and memory of pods that are gone. Usually their workers have done so.
    fn release_cpus(&self, known: &HashSet<PodUid>) {
        let placement = self.ctx.environment.placement.clone();
        if placement.retain(|pod| known.contains(pod)) {
            let write = async move { placement.write_state().await };
            drop(quintlet_kit::task::spawn("write-placement", write));
        }
    }

    /// Unprepares the claims of pods that are gone, such as those that a force deletion removed during a
    /// restart.
    fn unprepare_claims(&self, held: BTreeSet<String>, known: &HashSet<PodUid>) {
        if held.iter().all(|pod| known.contains(pod.as_str())) {
            return;
        }
        let known: BTreeSet<String> = known.iter().map(ToString::to_string).collect();
        let claims = self.ctx.environment.claims.clone();
        let mut others = Vec::new();
        if claims.lacks_pods() {
            let Some(pods) = possible_users(&self.ctx.reporting, &self.ctx.control) else { return };
            others = pods;
        }
        if claims.begin_reconciliation() {
            let reconcile = async move { claims.reconcile(&held, &known, &others).await };
            drop(quintlet_kit::task::spawn("reconcile-claims", reconcile));
        }
    }

    /// Removes the listed directories, unless a pod with the UID has been added since.
    pub(super) fn remove_listed(&mut self, pods: &mut PodEntries, listed: BTreeSet<PodUid>) {
        self.listing = None;
        self.orphan_listing.ended(!listed.is_empty());
        let Some(runtime) = self.ctx.runtime.pleg.all() else { return };
        let present: HashSet<&PodUid> = runtime.iter().map(|found| &found.pod.uid).collect();
        for uid in listed {
            if !pods.may_be_orphan(&uid)
                || present.contains(&uid)
                || self.ctx.faults.containment.suspension(&uid).is_some()
            {
                continue;
            }
            let ctx = Arc::clone(&self.ctx);
            let task = quintlet_kit::task::spawn("orphan-dir", housekeeping::remove_dir(ctx, uid.clone()));
            pods.entry(&uid).orphan_removal = Some(task);
        }
    }

    /// Counts every pod that is shown, whether the sources have delivered a snapshot or not.
    pub(super) fn count(&self, pods: &PodEntries, mirrors: usize) {
        let views = self.ctx.reporting.views.all();
        let counted: Vec<Counted> = views
            .iter()
            .map(|view| Counted {
                worker: view.worker,
                is_static: pod::is_static(&view.pod),
                is_removed: view.is_removed,
                is_terminated: self
                    .ctx
                    .control
                    .pod_workers
                    .has_terminated(&self.ctx.reporting.views, &view.pod_ref.uid),
            })
            .collect();
        let desired = views.iter().filter(|view| !view.is_removed);
        let ephemeral =
            desired.map(|view| pod::spec(&view.pod).ephemeral_containers.as_ref().map_or(0, Vec::len));
        let operations = &self.ctx.reporting.metrics.operations;
        operations.ephemeral_containers.set(i64::try_from(ephemeral.sum::<usize>()).unwrap_or(i64::MAX));
        let removals = pods.iter().filter_map(|(_, entry)| entry.orphan_removal.as_ref());
        let orphans = removals.filter(|task| !task.is_finished()).count();
        self.ctx.reporting.metrics.census.set(&counted, mirrors, orphans);
    }

    /// Publishes what the active pods request together, for the cgroups of QoS classes.
    pub(super) fn update_qos_cgroups(&self, pods: &PodEntries) {
        let active: Vec<Arc<Pod>> = pods
            .workers()
            .filter(|(uid, _)| !self.ctx.control.pod_workers.read(|w| w.is_known_terminated(uid)))
            .map(|(_, worker)| Arc::clone(&worker.desired.borrow().pod))
            .collect();
        let tiers = qos_tiers(active.iter().map(AsRef::as_ref), self.ctx.node.settings.qos_tiers());
        if !self.qos_cgroups.set(tiers) {
            return;
        }
        if self.ctx.node.settings.memory_qos.is_none() {
            return;
        }
        if let (Some(all), Some(low)) = (tiers.memory_min, tiers.memory_low) {
            // memory.min of all pods includes the requests of burstable pods.
            pod_sync_metrics::set_memory_qos(all.saturating_sub(low), low);
        }
    }
}
