//! The other services as pod-sync sees them. Wire types end here.

pub mod broken_calls;
pub mod events;
pub mod pleg;
pub mod probes;
pub mod runtime;
pub mod status;

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;
use quintlet_model::ids::PodUid;
use tokio::sync::Notify;

/// Wakes the worker of a pod. A wake says only "look again"; it is never lost and never queued.
#[derive(Debug, Default)]
pub struct Wakes {
    map: RwLock<HashMap<PodUid, Arc<Notify>>>,
    strangers: Notify,
}

impl Wakes {
    /// The bell of a pod's worker, made on first use.
    #[must_use]
    pub fn register(&self, uid: &PodUid) -> Arc<Notify> {
        Arc::clone(self.map.write().entry(uid.clone()).or_default())
    }

    /// Forgets a worker that ended.
    pub fn forget(&self, uid: &PodUid) {
        self.map.write().remove(uid);
    }

    /// Rings for one pod; where it has no worker, for housekeeping.
    pub fn wake(&self, uid: &PodUid) {
        match self.map.read().get(uid) {
            Some(bell) => bell.notify_one(),
            None => self.strangers.notify_one(),
        }
    }

    /// Rings for every worker: a service they may wait for is back.
    pub fn wake_all(&self) {
        for bell in self.map.read().values() {
            bell.notify_one();
        }
        self.strangers.notify_one();
    }

    /// A worker ended, or may have: the table is to look.
    pub fn worker_ended(&self) {
        self.strangers.notify_one();
    }

    /// Waits until something happened to a pod without a worker.
    pub async fn stranger(&self) {
        self.strangers.notified().await;
    }
}
