use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;
use quintlet_model::ids::PodUid;
use tokio::sync::Notify;

/// Wakes pod workers by UID, and the housekeeping of pods that have no worker.
///
/// A wake-up carries no data: the worker observes its pod again. Wake-ups of one pod that arrive before the
/// worker runs are merged into one, and none is lost.
#[derive(Debug, Default)]
pub struct WorkerWakeups {
    workers: RwLock<HashMap<PodUid, Arc<Notify>>>,
    housekeeping: Notify,
}

impl WorkerWakeups {
    /// Returns the `Notify` that the worker of a pod waits on, created on first use.
    #[must_use]
    pub fn register(&self, uid: &PodUid) -> Arc<Notify> {
        Arc::clone(self.workers.write().entry(uid.clone()).or_default())
    }

    /// Removes a worker that has exited. Later changes of its pod wake housekeeping.
    pub fn forget(&self, uid: &PodUid) {
        self.workers.write().remove(uid);
    }

    /// Wakes the worker of a pod, or housekeeping if the pod has no worker.
    pub fn wake(&self, uid: &PodUid) {
        match self.workers.read().get(uid) {
            Some(worker) => worker.notify_one(),
            None => self.housekeeping.notify_one(),
        }
    }

    /// Wakes every worker and housekeeping, when a service that they may be waiting for is back.
    pub fn wake_all(&self) {
        for worker in self.workers.read().values() {
            worker.notify_one();
        }
        self.housekeeping.notify_one();
    }

    /// Wakes housekeeping, when a worker may have exited.
    pub fn wake_housekeeping(&self) {
        self.housekeeping.notify_one();
    }

    /// Waits until a pod without a worker changes or a worker may have exited. Dropping the future loses no
    /// wake-up.
    pub async fn housekeeping_due(&self) {
        self.housekeeping.notified().await;
    }
}
