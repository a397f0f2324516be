//! Periodic cleanup: orphaned pods, QoS cgroups, stale mirror pods (`pkg/kubelet: HandlePodCleanups`).

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_decisions::merge::SourceStore;
use pod_sync_decisions::qos::burstable_shares;
use pod_sync_decisions::worker::Input;
use quintlet_model::ids::PodUid;
use quintlet_model::pod as pods;

use super::PodManager;
use pod_sync_containment::PodWork;
use pod_sync_metrics::Counted;

impl PodManager {
    pub(super) fn housekeeping(&mut self) {
        let began = self.ctx.clock.boot();
        self.clean_up();
        let took = self.ctx.clock.boot().saturating_sub(began);
        if self.pace.is_slow_anew(took) {
            tracing::warn!(?took, pods = self.pods.len(), "housekeeping takes long");
        }
    }

    // As HandlePodCleanups: what nobody wants any more, each kind after those it follows from.
    fn clean_up(&mut self) {
        self.count();
        self.ctx.containment.update_gauge();
        self.change_held();
        // Nothing is an orphan before every source has spoken and the runtime was read as a whole.
        if !self.sources_ready() {
            return;
        }
        self.delete_orphaned_mirrors();
        self.update_qos_cgroups();
        self.ctx.volumes.remove_expired_tokens(self.ctx.clock.wall());
        let wanted = self.stores.values().flat_map(SourceStore::pods).filter_map(|p| {
            let named = !pods::is_mirror(p);
            named.then(|| PodUid::parse(p.metadata.uid.as_deref().unwrap_or_default()).ok()).flatten()
        });
        self.ctx.pod_workers.step(Input::SyncKnownPods(wanted.collect()));
        let Some(runtime) = self.ctx.pleg.all() else { return };
        let mut present = HashSet::new();
        for pod in runtime {
            let uid = pod.pod.uid.clone();
            present.insert(uid.clone());
            let wanted = self.pods.contains_key(&uid) || self.pending_admission.contains_key(&uid);
            if wanted || self.orphans.contains_key(&uid) || !self.ctx.is_ours(&pod) {
                continue;
            }
            if self.ctx.containment.wait(&uid).is_some() {
                continue;
            }
            tracing::info!(pod.uid = %uid, pod = %pod.pod, "a pod of ours that no source wants is removed");
            let full_name = pod.pod.full_name();
            self.ctx.pod_workers.step(Input::Orphan { uid: uid.clone(), full_name });
            self.ctx.metrics.census.count_orphan();
            let ctx = Arc::clone(&self.ctx);
            let task = quintlet_kit::task::spawn("orphan", crate::housekeeping::remove_orphan(ctx, pod));
            self.orphans.insert(uid, task);
        }
        let wanted = self.pods.keys().chain(self.pending_admission.keys());
        let known: HashSet<PodUid> = wanted.chain(self.orphans.keys()).cloned().chain(present).collect();
        if self.listing.is_none() {
            let listing = crate::housekeeping::orphaned(Arc::clone(&self.ctx), known.clone());
            self.listing = Some(quintlet_kit::task::spawn("list-orphans", listing));
        }
        self.ctx.metrics.start_latency.retain(&known);
        self.ctx.allocations.retain(&known.iter().map(PodUid::as_str).collect());
        self.sweeper.tick(&self.ctx, &known);
    }

    // Removes directories that were listed as orphans and still are: a pod may have come since.
    pub(super) fn remove_listed(&mut self, listed: BTreeSet<PodUid>) {
        self.listing = None;
        let Some(runtime) = self.ctx.pleg.all() else { return };
        let present: HashSet<&PodUid> = runtime.iter().map(|pod| &pod.pod.uid).collect();
        for uid in listed {
            let wanted = self.pods.contains_key(&uid) || self.pending_admission.contains_key(&uid);
            if wanted || self.orphans.contains_key(&uid) || present.contains(&uid) {
                continue;
            }
            if self.ctx.containment.wait(&uid).is_some() {
                continue;
            }
            let ctx = Arc::clone(&self.ctx);
            let task =
                quintlet_kit::task::spawn("orphan-dir", crate::housekeeping::remove_dir(ctx, uid.clone()));
            self.orphans.insert(uid, task);
        }
    }

    // Every pod of the table, whatever the sources have said.
    fn count(&self) {
        let views = self.ctx.views.all();
        let counted: Vec<Counted> = views
            .iter()
            .map(|view| Counted {
                worker: view.worker,
                is_static: pods::is_static(&view.pod),
                is_removed: view.is_removed,
                is_terminated: self.ctx.is_over(&view.pod_ref.uid),
            })
            .collect();
        let orphans = self.orphans.values().filter(|task| !task.is_finished()).count();
        self.ctx.metrics.census.set(&counted, self.mirrors.len(), orphans);
    }

    // The burstable tier gets what its pods ask for together.
    fn update_qos_cgroups(&mut self) {
        let active: Vec<Arc<Pod>> = self
            .pods
            .iter()
            .filter(|(uid, _)| !self.is_over(uid))
            .map(|(_, e)| Arc::clone(&e.desired.borrow().pod))
            .collect();
        let shares = burstable_shares(active.iter().map(AsRef::as_ref));
        if self.burstable == Some(shares) {
            return;
        }
        match self.ctx.cgroups.update_qos_cgroups(shares) {
            Ok(()) => self.burstable = Some(shares),
            Err(e) => tracing::warn!(
                error = quintlet_kit::error_chain(&e),
                "shares of the burstable tier not written"
            ),
        }
    }

    fn delete_orphaned_mirrors(&self) {
        for ((namespace, name), mirror) in &self.mirrors {
            let wanted = self.pods.values().any(|e| {
                let d = e.desired.borrow();
                pods::is_static(&d.pod)
                    && d.pod.metadata.namespace.as_ref() == Some(namespace)
                    && d.pod.metadata.name.as_ref() == Some(name)
            });
            // It tells of the end of its pod until that is over.
            let ending =
                self.ctx.pod_workers.read(|w| w.is_static_terminating(&format!("{name}_{namespace}")));
            if !wanted && !ending {
                let ctx = Arc::clone(&self.ctx);
                let mirror = Arc::clone(mirror);
                let Ok(work) = pods::pod_ref(&mirror).map(|mirror| PodWork::of(&mirror)) else { continue };
                if self.ctx.containment.wait(&work.uid).is_some() {
                    continue;
                }
                quintlet_kit::task::spawn("orphan-mirror", async move {
                    let deleted = ctx.contained(&work, Box::pin(crate::mirror::delete(&ctx, &mirror))).await;
                    if let Some(Err(error)) = deleted {
                        tracing::info!(mirror.uid = mirror.metadata.uid, error, "tried again");
                    }
                });
            }
        }
    }
}
