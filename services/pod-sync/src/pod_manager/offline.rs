//! The pods of the offline cache: which are kept, and what is shown of those that were started from it.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::EventType;
use pod_sync_layout::{ManifestProblem, SourceKind};
use pod_sync_offline::OfflineCache;
use pod_sync_views::unix_ns;
use pod_sync_worker::context::WorkerContext;
use quintlet_model::ids::PodUid;
use quintlet_model::pod as pods;

use super::entry::{PodEntries, WorkerOrigin};

/// Reason of the event of a pod that was started from the cache.
const STARTED: &str = "StartedFromOfflineCache";
/// Name of the source in the list of problems.
const ORIGIN: &str = "API server";

/// The pods of the offline cache, if it is on.
pub(super) struct OfflinePods {
    ctx: Arc<WorkerContext>,
}

impl OfflinePods {
    pub(super) fn new(ctx: Arc<WorkerContext>) -> Self {
        Self { ctx }
    }

    fn cache(&self) -> Option<&Arc<OfflineCache>> {
        self.ctx.environment.offline.as_ref()
    }

    /// Keeps an admitted pod for the next start, and marks one that was started from the cache.
    pub(super) fn admitted(&self, uid: &PodUid, pod: &Arc<Pod>, origin: WorkerOrigin) {
        let Some(cache) = self.cache() else { return };
        cache.keep(uid, pod);
        if origin == WorkerOrigin::OfflineCache {
            cache.mark_started(uid);
            let message =
                "The API server does not answer: started as it was when the API server answered last";
            self.ctx.reporting.events.pod(pod, EventType::Normal, STARTED, message, "");
        }
    }

    /// Forgets a pod that its source has removed.
    pub(super) fn removed(&self, uid: &PodUid) {
        if let Some(cache) = self.cache() {
            cache.forget(uid);
        }
    }

    /// Forgets a pod of which nothing is left.
    pub(super) fn ended(&self, uid: &PodUid) {
        if let Some(cache) = self.cache() {
            cache.forget(uid);
            cache.forget_start(uid);
        }
    }

    /// Shows how many pods were started from the cache, until the first snapshot of the API server.
    pub(super) fn show_started(&self) {
        let started = self.cache().map_or(0, |cache| cache.unconfirmed());
        if started == 0 {
            return;
        }
        let message = format!("no answer since the start, {started} pods run from the offline cache");
        let problem = ManifestProblem { origin: ORIGIN.to_owned(), field: String::new(), message };
        let now = unix_ns(self.ctx.clock.wall());
        self.ctx.reporting.views.set_problems(SourceKind::Api, vec![problem], now);
    }

    /// Records that the API server has delivered its pods.
    pub(super) fn confirm(&self) {
        if let Some(cache) = self.cache() {
            cache.confirm();
        }
    }

    /// Keeps the newest version of each pod of the API server, and forgets those that are not to be started
    /// again. `is_listed`: the API server has delivered its pods.
    pub(super) fn keep(&self, entries: &PodEntries, is_listed: bool) {
        let Some(cache) = self.cache() else { return };
        for (uid, worker) in entries.workers() {
            let desired = worker.desired.borrow();
            if desired.source != SourceKind::Api {
                continue;
            }
            let view = self.ctx.reporting.views.get(uid);
            let phase = view.as_ref().and_then(|view| view.status.as_ref()?.phase.as_deref());
            if desired.removed || desired.rejected.is_some() || pods::is_terminal_phase(phase) {
                cache.forget(uid);
            } else {
                cache.keep(uid, &desired.pod);
            }
        }
        if is_listed {
            cache.retain(|uid| entries.worker(uid).is_some());
        }
    }
}
