//! Calls to cri-proxy that broke with its connection, and the pods that they were for.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::Mutex;
use quintlet_kit::clock::Clock;
use quintlet_kit::contain;
use quintlet_model::ids::PodUid;
use tokio::sync::Notify;

/// Calls that break within this time after the first one broke because of the same crash.
const SAME_CRASH: Duration = Duration::from_millis(100);

/// Collects the pods whose calls to cri-proxy broke without an answer.
#[derive(Debug, Default)]
pub struct BrokenCalls {
    pods: Mutex<BTreeSet<PodUid>>,
    added: Notify,
}

impl BrokenCalls {
    /// Adds the pod whose work is running on this thread. Does nothing outside of the work of a pod.
    pub fn add_current(&self) {
        let Some(uid) = contain::current().and_then(|work| PodUid::parse(work.uid()).ok()) else { return };
        self.pods.lock().insert(uid);
        self.added.notify_one();
    }

    /// Waits for a broken call. Returns the time at which it broke, and the pods of all calls that the same
    /// crash broke. Dropping the future after the first call broke keeps the pods, but not the wake-up.
    pub async fn next_crash(&self, clock: &Clock) -> (Timestamp, BTreeSet<PodUid>) {
        self.added.notified().await;
        let began = clock.wall();
        tokio::time::sleep(SAME_CRASH).await;
        (began, self.take())
    }

    /// Returns the pods of the calls that broke since the last crash was returned, without waiting.
    pub fn take(&self) -> BTreeSet<PodUid> {
        std::mem::take(&mut *self.pods.lock())
    }
}
