//! State that all probes share.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use quintlet_kit::clock::Clock;

use crate::evaluations::Evaluations;
use crate::handlers::Attempts;
use crate::mailbox::Mailbox;
use crate::metrics::Metrics;
use crate::subscribe::ProbeJournal;

/// Returns a random number from 0 to 1 for the jitter of a probe.
pub(crate) type JitterSource = Box<dyn Fn() -> f64 + Send + Sync>;

/// State that all probes share. Lock order: table, slot, driver.
pub(crate) struct Shared {
    pub(crate) attempts: Arc<dyn Attempts>,
    pub(crate) clock: Clock,
    /// CLOCK_BOOTTIME of the start of this service.
    pub(crate) service_started: Duration,
    pub(crate) metrics: Metrics,
    pub(crate) jitter: JitterSource,
    pub(crate) driver: Mutex<Option<Arc<Mailbox>>>,
    pub(crate) evaluations: Evaluations,
    /// The states of the probes. Empty unless a user or a group may subscribe.
    pub(crate) journal: OnceLock<Arc<ProbeJournal>>,
}

impl Shared {
    /// Calls `act` with the mailbox of the driver, if there is one.
    pub(crate) fn with_driver(&self, act: impl FnOnce(&Mailbox)) {
        if let Some(driver) = self.driver.lock().as_deref() {
            act(driver);
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("service_started", &self.service_started).finish_non_exhaustive()
    }
}
