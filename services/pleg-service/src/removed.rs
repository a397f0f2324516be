//! Removals of IDs that are in no entry.

use std::collections::VecDeque;

use quintlet_model::runtime::PodRuntime;

use crate::entry::is_visible;

/// Removals that are kept until newer ones replace them: more than follow each other during an inspection.
const MAX: usize = 256;

/// IDs whose removal was reported while no entry had them. An inspection that began before the removal may still add such an ID.
/// The runtime uses no ID twice.
#[derive(Debug, Default)]
pub(crate) struct RemovedIds {
    ids: VecDeque<String>,
}

impl RemovedIds {
    pub(crate) fn add(&mut self, id: String) {
        if self.ids.len() == MAX {
            self.ids.pop_front();
        }
        self.ids.push_back(id);
    }

    /// Removes and returns the IDs that an entry has.
    pub(crate) fn take_visible(&mut self, record: Option<&PodRuntime>) -> Vec<String> {
        let mut visible = Vec::new();
        if record.is_some() {
            self.ids.retain(|id| {
                let is_visible = is_visible(id, record);
                if is_visible {
                    visible.push(id.clone());
                }
                !is_visible
            });
        }
        visible
    }
}
