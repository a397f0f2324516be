//! Removals of IDs that are in no entry.

use quintlet_model::runtime::PodRuntime;

use crate::entry::is_visible;

/// Most IDs that are kept: those of a hundred pods with a container each. What a dropped one leaves is
/// noticed by the next relist.
const MAX: usize = 256;

/// IDs whose removal was reported while no entry had them, oldest first. An inspection that began before the
/// removal may still add such an ID. The runtime uses no ID twice.
#[derive(Debug, Default)]
pub(crate) struct RemovedIds(Vec<String>);

impl RemovedIds {
    /// Adds an ID, and drops the oldest if there are too many.
    pub(crate) fn add(&mut self, id: String) {
        if self.0.len() == MAX {
            self.0.remove(0);
        }
        self.0.push(id);
    }

    /// Removes and returns the IDs that an entry has.
    pub(crate) fn take_visible(&mut self, record: Option<&PodRuntime>) -> Vec<String> {
        self.0.extract_if(.., |id| is_visible(id, record)).collect()
    }
}
