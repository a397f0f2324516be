//! Limits repeated log lines about the same fault of a pod, or of a watch of the API server, to one per
//! minute.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::callsite::Identifier;

/// Interval between two lines about the same fault.
pub const REPEAT_INTERVAL: Duration = Duration::from_secs(60);
/// Faults remembered: 500 pods with eight each. When it is exceeded, faults last logged a minute ago are
/// dropped, then all.
const CAPACITY: usize = 4096;

/// Identifies a fault: the object, the place in the code that logs it, and the line's `reason`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Fault {
    /// UID or name of the pod, or name of the watch.
    pub(crate) object: String,
    pub(crate) site: Identifier,
    pub(crate) reason: String,
}

#[derive(Debug)]
struct LastLine {
    at: Instant,
    held_back: u64,
}

/// Remembers when each fault was last logged.
#[derive(Debug, Default)]
pub(crate) struct RepeatFilter(Mutex<HashMap<Fault, LastLine>>);

impl RepeatFilter {
    /// Returns `None` if the line must be suppressed, otherwise the number of suppressed lines since the last
    /// one.
    pub(crate) fn pass(&self, fault: Fault) -> Option<u64> {
        let now = Instant::now();
        let mut logged = self.0.lock();
        if logged.len() >= CAPACITY && !logged.contains_key(&fault) {
            logged.retain(|_, last| now.duration_since(last.at) < REPEAT_INTERVAL);
            if logged.len() >= CAPACITY {
                logged.clear();
            }
        }
        match logged.get_mut(&fault) {
            Some(last) if now.duration_since(last.at) < REPEAT_INTERVAL => {
                last.held_back = last.held_back.saturating_add(1);
                None
            }
            other => {
                let held_back = other.map_or(0, |last| last.held_back);
                logged.insert(fault, LastLine { at: now, held_back: 0 });
                Some(held_back)
            }
        }
    }
}
