//! The Node object: facts in, status out.

pub mod health;
pub mod keeper;
pub mod setters;
pub mod startup;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::Notify;

/// What one source knows of the node.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// The service that says so.
    pub source: String,
    /// A v1 Node with the fields the source answers for.
    pub node: Value,
    /// What holds Ready back, in order.
    pub not_ready: Vec<String>,
    /// CLOCK_BOOTTIME at which it was true.
    pub observed: Duration,
}

/// Sources kept: there are five services.
const SOURCES: usize = 16;

/// The newest facts of each source. Clones share them.
#[derive(Clone, Default)]
pub struct FactBoard {
    inner: Arc<Board>,
}

#[derive(Default)]
struct Board {
    facts: Mutex<Vec<Facts>>,
    changed: Notify,
}

impl FactBoard {
    /// Takes facts over, unless newer ones of the same source are there. False: there are too many sources.
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

    /// The facts as they are.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Facts> {
        self.inner.facts.lock().clone()
    }

    /// Whether nothing was ever said.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inner.facts.lock().is_empty()
    }

    /// Waits for facts put since the last wait.
    pub async fn changed(&self) {
        self.inner.changed.notified().await;
    }
}
