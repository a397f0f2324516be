//! What goes wrong with a pod, or with a watch of the API server, again and again is logged once a minute.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::callsite::Identifier;

/// A fault that goes on is logged again after this.
pub const EVERY: Duration = Duration::from_secs(60);
/// Faults known at once: 500 pods with a few each. Beyond it those of which a minute ago was told are forgotten, and then all.
const KEPT: usize = 4096;

/// A fault of something that has a name: where it is logged, and the `reason` that the line gives.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Fault {
    pub(crate) of: String,
    pub(crate) site: Identifier,
    pub(crate) reason: String,
}

#[derive(Debug)]
struct Told {
    at: Instant,
    held_back: u64,
}

/// The faults that were logged of late.
#[derive(Debug, Default)]
pub(crate) struct Gate(Mutex<HashMap<Fault, Told>>);

impl Gate {
    /// Whether the line is to be written, and how many like it were not since the last.
    pub(crate) fn pass(&self, fault: Fault) -> Option<u64> {
        let now = Instant::now();
        let mut told = self.0.lock();
        if told.len() >= KEPT && !told.contains_key(&fault) {
            told.retain(|_, t| now.duration_since(t.at) < EVERY);
            if told.len() >= KEPT {
                told.clear();
            }
        }
        match told.get_mut(&fault) {
            Some(last) if now.duration_since(last.at) < EVERY => {
                last.held_back = last.held_back.saturating_add(1);
                None
            }
            other => {
                let held_back = other.map_or(0, |last| last.held_back);
                told.insert(fault, Told { at: now, held_back: 0 });
                Some(held_back)
            }
        }
    }
}
