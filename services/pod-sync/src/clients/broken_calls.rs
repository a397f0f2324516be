//! Calls to cri-proxy that broke with its connection, and the pods that they were for.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::Mutex;
use quintlet_kit::clock::Clock;
use quintlet_kit::contain;
use quintlet_model::ids::PodUid;
use tokio::sync::Notify;

/// Calls that break within this time after the first one broke with the same death.
const TOGETHER: Duration = Duration::from_millis(100);
/// Pods whose calls to cri-proxy broke without an answer.
#[derive(Debug, Default)]
pub struct BrokenCalls {
    pods: Mutex<BTreeSet<PodUid>>,
    added: Notify,
}

impl BrokenCalls {
    /// Adds the pod whose work this thread executes. Calls outside of the work of a pod add none.
    pub fn add_current(&self) {
        let Some(uid) = contain::current().and_then(|work| PodUid::parse(work.uid()).ok()) else { return };
        self.pods.lock().insert(uid);
        self.added.notify_one();
    }

    /// Waits for a broken call. Returns when it broke, and the pods of all calls that broke together with it.
    pub async fn together(&self, clock: &Clock) -> (Timestamp, BTreeSet<PodUid>) {
        self.added.notified().await;
        let began = clock.wall();
        tokio::time::sleep(TOGETHER).await;
        (began, std::mem::take(&mut *self.pods.lock()))
    }
}
