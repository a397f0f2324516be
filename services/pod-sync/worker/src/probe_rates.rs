//! The attempts per second that the probes with a period below one second may make on this node.

use std::sync::Arc;

use parking_lot::Mutex;
use pod_sync_clients::WorkerWakeups;
use pod_sync_decisions::probe_period::{FastProbes, GrantedPeriods, RateGrant, RateLimits, RateShares};
use quintlet_model::ids::PodUid;

/// The shares of all pods. The workers request them, and are woken when there is room for a request that was
/// not granted.
#[derive(Debug)]
pub struct ProbeRates {
    shares: Mutex<RateShares>,
    wakeups: Arc<WorkerWakeups>,
}

impl ProbeRates {
    /// Returns the shares of a node whose pods have none yet.
    #[must_use]
    pub fn new(limits: RateLimits, wakeups: Arc<WorkerWakeups>) -> Self {
        Self { shares: Mutex::new(RateShares::new(limits)), wakeups }
    }

    /// Returns the limits of the node.
    pub(crate) fn limits(&self) -> RateLimits {
        self.shares.lock().limits()
    }

    /// Replaces the share of a pod, and returns the periods of its probes. `None` gives the share back.
    pub(crate) fn request(
        &self,
        uid: &PodUid,
        namespace: &str,
        wanted: Option<FastProbes>,
    ) -> GrantedPeriods {
        let RateGrant { periods, again } = self.shares.lock().request(uid, namespace, wanted);
        for uid in again {
            self.wakeups.wake(&uid);
        }
        periods
    }
}
