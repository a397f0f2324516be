//! Periodic cleanup: orphaned pods, QoS cgroups, stale mirror pods (`pkg/kubelet: HandlePodCleanups`).

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_decisions::merge::SourceStore;
use pod_sync_decisions::qos::qos_tiers;
use pod_sync_decisions::worker::Input;
use quintlet_model::ids::PodUid;
use quintlet_model::pod as pods;

use super::PodManager;
use super::entry::PodEntry;
use crate::housekeeping;
use pod_sync_containment::PodWork;
use pod_sync_metrics::Counted;

impl PodManager {
    pub(super) fn housekeeping(&mut self) {
        self.pace.begin();
        let began = self.ctx.clock.boot();
        self.clean_up();
        self.add_pods_with_freed_uid();
        let took = self.ctx.clock.boot().saturating_sub(began);
        if self.pace.is_newly_slow(took) {
            tracing::warn!(?took, pods = self.pods.workers().count(), "housekeeping is slow");
        }
    }

    fn clean_up(&mut self) {
        self.count();
        self.ctx.faults.containment.update_gauge();
        self.retry_set_aside();
        // A pod is an orphan only if every source has delivered a snapshot and the whole runtime state was read.
        if !self.sources_ready() {
            return;
        }
        self.ctx.environment.volume_tasks.sources_ready();
        self.delete_orphaned_mirrors();
        self.update_qos_cgroups();
        self.ctx.environment.volumes.remove_expired_tokens(self.ctx.clock.wall());
        let wanted = self.stores.values().flat_map(SourceStore::iter);
        let wanted = wanted.filter(|(_, pod)| !pods::is_mirror(pod)).map(|(uid, _)| uid.clone());
        self.ctx.control.pod_workers.step(Input::SyncKnownPods(wanted.collect()));
        let Some(runtime) = self.ctx.runtime.pleg.all() else { return };
        let mut present = HashSet::new();
        for pod in runtime {
            let uid = pod.pod.uid.clone();
            present.insert(uid.clone());
            if !self.may_be_orphan(&uid)
                || !self.ctx.node.is_ours(&pod)
                || self.ctx.faults.containment.suspension(&uid).is_some()
            {
                continue;
            }
            tracing::info!(pod.uid = %uid, pod = %pod.pod, "removing an orphaned pod");
            let full_name = pod.pod.full_name();
            self.ctx.control.pod_workers.step(Input::Orphan { uid: uid.clone(), full_name });
            self.ctx.reporting.metrics.census.count_orphan();
            let ctx = Arc::clone(&self.ctx);
            let task = quintlet_kit::task::spawn("orphan", housekeeping::remove_orphan(ctx, pod));
            self.pods.entry(&uid).orphan_removal = Some(task);
        }
        let managed = self.pods.iter().filter(|(_, e)| e.is_desired() || e.orphan_removal.is_some());
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
        let allocations = &self.ctx.checkpoints.allocations;
        allocations.retain(&known.iter().map(PodUid::as_str).collect());
        if allocations.begin_interval(self.ctx.clock.boot()) {
            let ctx = Arc::clone(&self.ctx);
            let write = async move { ctx.checkpoints.allocations.write_files().await };
            drop(quintlet_kit::task::spawn("write-allocations", write));
        }
        self.sweeper.tick(&self.ctx, &known);
    }

    // A pod with this UID is neither desired nor being removed.
    fn may_be_orphan(&self, uid: &PodUid) -> bool {
        !self.pods.get(uid).is_some_and(PodEntry::is_desired) && !self.pods.is_removing_orphan(uid)
    }

    // Removes the listed directories, unless a pod with the UID has been added since.
    pub(super) fn remove_listed(&mut self, listed: BTreeSet<PodUid>) {
        self.listing = None;
        self.orphan_listing.ended(!listed.is_empty());
        let Some(runtime) = self.ctx.runtime.pleg.all() else { return };
        let present: HashSet<&PodUid> = runtime.iter().map(|pod| &pod.pod.uid).collect();
        for uid in listed {
            if !self.may_be_orphan(&uid)
                || present.contains(&uid)
                || self.ctx.faults.containment.suspension(&uid).is_some()
            {
                continue;
            }
            let ctx = Arc::clone(&self.ctx);
            let task = quintlet_kit::task::spawn("orphan-dir", housekeeping::remove_dir(ctx, uid.clone()));
            self.pods.entry(&uid).orphan_removal = Some(task);
        }
    }

    // Counts every pod that is shown, whether the sources have delivered a snapshot or not.
    fn count(&self) {
        let views = self.ctx.reporting.views.all();
        let counted: Vec<Counted> = views
            .iter()
            .map(|view| Counted {
                worker: view.worker,
                is_static: pods::is_static(&view.pod),
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
            desired.map(|view| pods::spec(&view.pod).ephemeral_containers.as_ref().map_or(0, Vec::len));
        let operations = &self.ctx.reporting.metrics.operations;
        operations.ephemeral_containers.set(i64::try_from(ephemeral.sum::<usize>()).unwrap_or(i64::MAX));
        let removals = self.pods.iter().filter_map(|(_, entry)| entry.orphan_removal.as_ref());
        let orphans = removals.filter(|task| !task.is_finished()).count();
        self.ctx.reporting.metrics.census.set(&counted, self.mirrors.len(), orphans);
    }

    // Publishes what the active pods request together, for the cgroups of QoS classes.
    fn update_qos_cgroups(&self) {
        let active: Vec<Arc<Pod>> = self
            .pods
            .workers()
            .filter(|(uid, _)| !self.is_over(uid))
            .map(|(_, worker)| Arc::clone(&worker.desired.borrow().pod))
            .collect();
        let tiers = qos_tiers(active.iter().map(AsRef::as_ref), self.ctx.node.settings.qos_tiers());
        if !self.qos_cgroups.set(tiers) {
            return;
        }
        if let (Some(all), Some(low)) = (tiers.memory_min, tiers.memory_low) {
            // memory.min of all pods includes the requests of burstable pods.
            pod_sync_metrics::set_memory_qos(all.saturating_sub(low), low);
        }
    }

    fn delete_orphaned_mirrors(&self) {
        for ((namespace, name), mirror) in &self.mirrors {
            let wanted = self.pods.workers().any(|(_, worker)| {
                let d = worker.desired.borrow();
                pods::is_static(&d.pod)
                    && d.pod.metadata.namespace.as_ref() == Some(namespace)
                    && d.pod.metadata.name.as_ref() == Some(name)
            });
            // The mirror shows the status of its pod until the pod has terminated.
            let ending = self
                .ctx
                .control
                .pod_workers
                .read(|w| w.is_static_terminating(&format!("{name}_{namespace}")));
            if !wanted && !ending {
                let ctx = Arc::clone(&self.ctx);
                let mirror = Arc::clone(mirror);
                let Ok(work) = pods::pod_ref(&mirror).map(|mirror| PodWork::of(&mirror)) else { continue };
                if self.ctx.faults.containment.suspension(&work.uid).is_some() {
                    continue;
                }
                quintlet_kit::task::spawn("orphan-mirror", async move {
                    let deleted = ctx
                        .faults
                        .contained(&work, Box::pin(ctx.reporting.statuses.delete_mirror(&mirror.metadata)))
                        .await;
                    if let Some(Err(error)) = deleted {
                        tracing::info!(
                            mirror.uid = mirror.metadata.uid,
                            %error,
                            "failed to delete an orphaned mirror pod, retrying"
                        );
                    }
                });
            }
        }
    }
}
