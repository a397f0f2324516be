//! Removes the ResourceSlices of drivers that stay away, so that the scheduler sends no pod that needs them.

use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::backoff::Backoff;
use tokio::time::sleep;

use crate::manager::{Claims, SliceWiper};
use crate::plugins::WIPE_DELAY;

/// First wait after a failed request.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// Longest wait after a failed request.
const LAST_RETRY: Duration = Duration::from_secs(300);
/// Interval between two checks while no removal is pending. A change wakes, too.
const CHECK: Duration = Duration::from_secs(3600);

impl Claims {
    /// Removes the ResourceSlices of drivers that stay away, until the stop. After a start, the drivers with
    /// ResourceSlices of this node have the same time to register; the kubelet removes all of them at once.
    pub async fn wipe_slices(self, wiper: Arc<dyn SliceWiper>) {
        let stop = self.shared.stop.clone();
        // A request that is dropped changes at most what the next process removes, too.
        tokio::select! {
            ((), ()) = async { tokio::join!(self.expect_drivers(&*wiper), self.wipe_when_due(&*wiper)) } => {}
            () = stop.cancelled() => {}
        }
    }

    async fn wipe_when_due(&self, wiper: &dyn SliceWiper) {
        let mut backoff = Backoff::new(FIRST_RETRY, 2.0, LAST_RETRY);
        loop {
            let changed = self.shared.changed.notified();
            let now = self.shared.clock.boot();
            let due = self.shared.state.lock().plugins.take_due_wipe(now);
            let Some(driver) = due else {
                let next = self.shared.state.lock().plugins.next_wipe();
                let wait = next.map_or(CHECK, |next| next.saturating_sub(now));
                // Both arms only wait. `changed` was made before the state was read, so that no change is
                // missed.
                tokio::select! {
                    () = changed => {}
                    () = sleep(wait) => {}
                }
                continue;
            };
            match wiper.wipe(&driver).await {
                Ok(()) => {
                    backoff.reset();
                    tracing::info!(driver, "removed ResourceSlices, DRA driver stays away");
                }
                Err(error) => {
                    let wait = backoff.next_wait();
                    tracing::warn!(
                        driver,
                        error,
                        "failed to remove ResourceSlices of a DRA driver, retrying"
                    );
                    let due = self.shared.clock.boot().saturating_add(wait);
                    self.shared.state.lock().plugins.retry_wipe(&driver, due);
                }
            }
        }
    }

    /// Gives the drivers with ResourceSlices time to register.
    async fn expect_drivers(&self, wiper: &dyn SliceWiper) {
        let mut backoff = Backoff::new(FIRST_RETRY, 2.0, LAST_RETRY);
        let mut is_reported = false;
        let drivers = loop {
            match wiper.drivers().await {
                Ok(drivers) => break drivers,
                // The API server may be away for long, and has one line.
                Err(error) if is_reported => {
                    tracing::debug!(error, "failed to list the ResourceSlices of this node again");
                }
                Err(error) => {
                    tracing::warn!(error, "failed to list the ResourceSlices of this node, retrying");
                    is_reported = true;
                }
            }
            sleep(backoff.next_wait()).await;
        };
        let due = self.shared.clock.boot().saturating_add(WIPE_DELAY);
        let mut state = self.shared.state.lock();
        for driver in drivers {
            state.plugins.retry_wipe(&driver, due);
        }
        self.shared.changed.notify_one();
    }
}
