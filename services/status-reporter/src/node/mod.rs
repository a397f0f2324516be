//! The Node object: facts of the services become its status.

pub mod cloud;
pub mod csi_node;
pub mod health;
pub mod keeper;
pub mod own;
pub mod setters;
pub mod skew;
pub mod startup;
pub mod storage_health;
pub mod volumes;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::Notify;

/// Facts of the node from one service.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// Name of the service.
    pub source: String,
    /// A v1 Node with the fields of this service.
    pub node: Value,
    /// Reasons for which the node is not ready, in order.
    pub not_ready: Vec<String>,
    /// CLOCK_BOOTTIME of the observation.
    pub observed: Duration,
}

/// Capacity in sources. There are five services.
const SOURCES: usize = 16;

/// The newest facts of each source. Clones share them.
#[derive(Clone, Default)]
pub struct FactBoard {
    inner: Arc<Board>,
}

#[derive(Default)]
struct Board {
    facts: Mutex<Vec<Facts>>,
    // W3C `traceparent` of the newest report that has a trace, until a write is linked to it.
    trace: Mutex<Option<String>>,
    changed: Notify,
}

impl FactBoard {
    /// Stores facts, unless newer ones of the same source exist. Returns false if there are too many sources.
    pub fn put(&self, facts: Facts) -> bool {
        let mut all = self.inner.facts.lock();
        let room = all.len() < SOURCES;
        match all.iter_mut().find(|f| f.source == facts.source) {
            Some(there) if there.observed <= facts.observed => *there = facts,
            Some(_) => return true,
            None if room => all.push(facts),
            None => return false,
        }
        self.inner.changed.notify_one();
        true
    }

    /// Sets the W3C `traceparent` of a report, for [`FactBoard::take_trace`].
    pub fn set_trace(&self, traceparent: String) {
        *self.inner.trace.lock() = Some(traceparent);
    }

    /// Returns the W3C `traceparent` of the newest report with a trace, once.
    #[must_use]
    pub fn take_trace(&self) -> Option<String> {
        self.inner.trace.lock().take()
    }

    /// Returns the newest facts of every service that has reported.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Facts> {
        self.inner.facts.lock().clone()
    }

    /// Reports whether no facts have arrived yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inner.facts.lock().is_empty()
    }

    /// Waits for new facts since the last wait.
    pub async fn changed(&self) {
        self.inner.changed.notified().await;
    }
}
