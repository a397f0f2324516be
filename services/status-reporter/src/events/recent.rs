//! Recognizes events that are sent again.

use std::collections::VecDeque;

/// IDs that are kept. pod-sync sends one event after the other, so that only the last event of a process that
/// ended can be sent again.
const KEPT: usize = 64;

/// IDs of the last events.
#[derive(Debug, Default)]
pub(crate) struct RecentIds(VecDeque<u64>);

impl RecentIds {
    /// Adds the ID of an event; 0 if it has none. Returns false if a recent event has the same ID.
    pub(crate) fn add(&mut self, id: u64) -> bool {
        if id == 0 {
            return true;
        }
        if self.0.contains(&id) {
            return false;
        }
        if self.0.len() >= KEPT {
            self.0.pop_front();
        }
        self.0.push_back(id);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recent_id_is_recognized() {
        let mut recent = RecentIds::default();
        assert!(recent.add(0) && recent.add(0), "events without an ID");
        assert!((1..=64).all(|id| recent.add(id)));
        assert!((1..=64).all(|id| !recent.add(id)));
        assert!(recent.add(65));
        assert!(!recent.add(2));
        assert!(recent.add(1), "it is no longer kept");
    }
}
