//! Who has a full name, and who waits for it: two static pods of one name never run at once.

use std::collections::BTreeMap;

use quintlet_model::ids::PodUid;

/// Names in use and the lines before them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct FullNameQueue {
    started: BTreeMap<String, PodUid>,
    waiting: BTreeMap<String, Vec<PodUid>>,
}

impl FullNameQueue {
    pub(super) fn holder(&self, name: &str) -> Option<&PodUid> {
        self.started.get(name)
    }

    pub(super) fn waiting(&self, name: &str) -> &[PodUid] {
        self.waiting.get(name).map(Vec::as_slice).unwrap_or_default()
    }

    pub(super) fn join(&mut self, name: &str, uid: &PodUid) {
        let name_queue = self.waiting.entry(name.to_owned()).or_default();
        if !name_queue.contains(uid) {
            name_queue.push(uid.clone());
        }
    }

    pub(super) fn start(&mut self, name: &str, uid: &PodUid) {
        self.leave(name, uid);
        self.started.insert(name.to_owned(), uid.clone());
    }

    fn leave(&mut self, name: &str, uid: &PodUid) {
        if let Some(name_queue) = self.waiting.get_mut(name) {
            name_queue.retain(|u| u != uid);
            if name_queue.is_empty() {
                self.waiting.remove(name);
            }
        }
    }

    /// Takes a pod out of the line, and its name from it. True if it had the name.
    pub(super) fn free(&mut self, name: &str, uid: &PodUid) -> bool {
        self.leave(name, uid);
        let held = self.started.get(name) == Some(uid);
        if held {
            self.started.remove(name);
        }
        held
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.started.len() + self.waiting.values().map(Vec::len).sum::<usize>()
    }
}
