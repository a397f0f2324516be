//! Full names of static pods: the pod that holds each, and the queue of pods that wait for it. Two static
//! pods of one full name never run at once
//! (`pkg/kubelet: startedStaticPodsByFullname, waitingToStartStaticPodsByFullname`).

use std::collections::BTreeMap;

use quintlet_model::ids::PodUid;

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

    /// Removes a pod from the queue and frees its name. Returns whether it held the name.
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
