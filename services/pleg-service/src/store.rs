//! The latest state of every pod, in the order of change.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use quintlet_model::ids::PodUid;
use quintlet_model::runtime::{Cursor, PodRuntime, SharedPodRuntime};
use quintlet_proto::common::v1::Trace;
use tokio::sync::watch;

/// Pods whose end is remembered, so that a reader who was away learns of just that. A node turns over a few hundred pods in
/// the minutes a reader may be away.
pub(crate) const TOMBSTONES: usize = 4096;

/// The last change of one pod.
#[derive(Debug, Clone)]
pub(crate) struct Latest {
    pub(crate) rev: u64,
    pub(crate) uid: PodUid,
    /// None: gone.
    pub(crate) pod: Option<SharedPodRuntime>,
    /// Trace of the inspection that saw it.
    pub(crate) trace: Option<Trace>,
}

#[derive(Debug, Default)]
struct Inner {
    rev: u64,
    /// Nothing at or below this may be resumed from: a tombstone was dropped there.
    floor: u64,
    pods: HashMap<PodUid, u64>,
    by_rev: BTreeMap<u64, Latest>,
    tombstones: VecDeque<u64>,
    /// Container and sandbox ids to their pods.
    ids: HashMap<String, PodUid>,
}

/// What a reader at a cursor is to be sent.
#[derive(Debug)]
pub(crate) enum Next {
    /// The oldest change after the cursor that is still the pod's latest.
    Change(Latest),
    /// The cursor is at the end.
    End,
    /// The cursor is before the buffer.
    Lost,
}

/// The published states. Each pod's owner is the only one to write about it.
#[derive(Debug)]
pub(crate) struct Store {
    epoch: u64,
    tombstones: usize,
    inner: RwLock<Inner>,
    rev: watch::Sender<u64>,
    /// The first full list is in.
    primed: watch::Sender<bool>,
}

impl Store {
    pub(crate) fn new(epoch: u64, tombstones: usize) -> Self {
        Self {
            epoch,
            tombstones,
            inner: RwLock::default(),
            rev: watch::Sender::new(0),
            primed: watch::Sender::new(false),
        }
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(crate) fn cursor(&self) -> Cursor {
        Cursor { epoch: self.epoch, rev: self.inner.read().rev }
    }

    pub(crate) fn revs(&self) -> watch::Receiver<u64> {
        self.rev.subscribe()
    }

    pub(crate) fn primed(&self) -> watch::Receiver<bool> {
        self.primed.subscribe()
    }

    pub(crate) fn is_primed(&self) -> bool {
        *self.primed.borrow()
    }

    pub(crate) fn set_primed(&self) {
        self.primed.send_if_modified(|p| !std::mem::replace(p, true));
    }

    pub(crate) fn get(&self, uid: &PodUid) -> Option<SharedPodRuntime> {
        let inner = self.inner.read();
        inner.by_rev.get(inner.pods.get(uid)?)?.pod.clone()
    }

    pub(crate) fn pod_of(&self, id: &str) -> Option<PodUid> {
        self.inner.read().ids.get(id).cloned()
    }

    pub(crate) fn len(&self) -> usize {
        self.inner.read().pods.len() - self.inner.read().tombstones.len()
    }

    /// A new state of a pod. Returns it with its place.
    pub(crate) fn publish(&self, mut pod: PodRuntime, trace: Option<Trace>) -> SharedPodRuntime {
        let mut inner = self.inner.write();
        let rev = inner.rev + 1;
        pod.cursor = Cursor { epoch: self.epoch, rev };
        let pod = Arc::new(pod);
        let uid = pod.pod.uid.clone();
        inner.unlink(&uid);
        for id in pod.ids() {
            inner.ids.insert(id, uid.clone());
        }
        inner.link(Latest { rev, uid, pod: Some(Arc::clone(&pod)), trace });
        drop(inner);
        self.rev.send_replace(rev);
        pod
    }

    /// A pod is gone.
    pub(crate) fn remove(&self, uid: &PodUid, trace: Option<Trace>) -> Cursor {
        let mut inner = self.inner.write();
        let rev = inner.rev + 1;
        inner.unlink(uid);
        inner.link(Latest { rev, uid: uid.clone(), pod: None, trace });
        inner.tombstones.push_back(rev);
        while inner.tombstones.len() > self.tombstones {
            if let Some(old) = inner.tombstones.pop_front() {
                if let Some(gone) = inner.by_rev.remove(&old) {
                    inner.pods.remove(&gone.uid);
                }
                inner.floor = old;
            }
        }
        drop(inner);
        self.rev.send_replace(rev);
        Cursor { epoch: self.epoch, rev }
    }

    /// The same state, seen later: no news for readers, but newer for who asks.
    pub(crate) fn touch(&self, uid: &PodUid, observed: Duration) -> Option<SharedPodRuntime> {
        let mut inner = self.inner.write();
        let rev = *inner.pods.get(uid)?;
        let pod = inner.by_rev.get_mut(&rev)?.pod.as_mut()?;
        let mut seen = PodRuntime::clone(pod);
        seen.observed = observed;
        *pod = Arc::new(seen);
        Some(Arc::clone(pod))
    }

    /// What comes after `rev`.
    pub(crate) fn next_after(&self, rev: u64) -> Next {
        let inner = self.inner.read();
        if rev < inner.floor {
            return Next::Lost;
        }
        match inner.by_rev.range(rev + 1..).next() {
            Some((_, latest)) => Next::Change(latest.clone()),
            None => Next::End,
        }
    }

    /// Whether changes after `cursor` can be told apart from those before; the reason where not.
    pub(crate) fn resumable(&self, cursor: Cursor) -> Result<(), &'static str> {
        let inner = self.inner.read();
        if cursor.epoch != self.epoch {
            return Err("pleg-service was restarted since");
        }
        if cursor.rev > inner.rev {
            return Err("the cursor is ahead of this service");
        }
        if cursor.rev < inner.floor {
            return Err("the cursor is older than the changes kept");
        }
        Ok(())
    }

    /// All pods that are there, and the place of that picture.
    pub(crate) fn snapshot(&self) -> (Vec<Latest>, Cursor) {
        let inner = self.inner.read();
        let pods = inner.by_rev.values().filter(|l| l.pod.is_some()).cloned().collect();
        (pods, Cursor { epoch: self.epoch, rev: inner.rev })
    }

    /// All pods that are there.
    pub(crate) fn pods(&self) -> Vec<SharedPodRuntime> {
        self.inner.read().by_rev.values().filter_map(|l| l.pod.clone()).collect()
    }
}

impl Inner {
    fn unlink(&mut self, uid: &PodUid) {
        let Some(rev) = self.pods.remove(uid) else { return };
        match self.by_rev.remove(&rev) {
            Some(Latest { pod: Some(pod), .. }) => {
                for id in pod.ids() {
                    self.ids.remove(&id);
                }
            }
            Some(Latest { pod: None, .. }) => self.tombstones.retain(|t| *t != rev),
            None => {}
        }
    }

    fn link(&mut self, latest: Latest) {
        self.rev = latest.rev;
        self.pods.insert(latest.uid.clone(), latest.rev);
        self.by_rev.insert(latest.rev, latest);
    }
}

#[cfg(test)]
mod tests {
    use quintlet_model::ids::PodRef;

    use super::*;

    fn pod(uid: &str) -> PodRuntime {
        let pod = PodRef { uid: PodUid::parse(uid).unwrap(), namespace: "default".into(), name: uid.into() };
        PodRuntime::empty(pod, Cursor::default(), Duration::ZERO)
    }

    fn after(store: &Store, mut rev: u64) -> Vec<(u64, String, bool)> {
        let mut out = Vec::new();
        while let Next::Change(latest) = store.next_after(rev) {
            rev = latest.rev;
            out.push((latest.rev, latest.uid.to_string(), latest.pod.is_some()));
        }
        out
    }

    #[test]
    fn a_reader_gets_the_last_change_of_each_pod_once() {
        let store = Store::new(7, 8);
        for uid in ["a", "b", "a", "c"] {
            store.publish(pod(uid), None);
        }
        store.remove(&PodUid::parse("b").unwrap(), None);
        let all = [(3, "a".to_owned(), true), (4, "c".to_owned(), true), (5, "b".to_owned(), false)];
        assert_eq!(after(&store, 0), all);
        assert_eq!(after(&store, 3), all[1..]);
        assert_eq!(store.len(), 2);
        store.publish(pod("b"), None);
        assert_eq!(after(&store, 4), [(6, "b".to_owned(), true)], "a pod that is back has no tombstone");
        assert_eq!(store.len(), 3);
    }

    #[test]
    fn a_cursor_resumes_only_within_its_epoch_and_the_tombstones_kept() {
        let store = Store::new(7, 1);
        for uid in ["a", "b"] {
            store.publish(pod(uid), None);
        }
        let at = |epoch, rev| store.resumable(Cursor { epoch, rev });
        assert_eq!(at(7, 0), Ok(()));
        assert!(at(6, 2).is_err() && at(8, 2).is_err() && at(7, 3).is_err());
        store.remove(&PodUid::parse("a").unwrap(), None);
        assert_eq!(at(7, 2), Ok(()));
        store.remove(&PodUid::parse("b").unwrap(), None);
        assert!(at(7, 2).is_err(), "the end of a is forgotten");
        assert!(matches!(store.next_after(2), Next::Lost));
        assert_eq!(at(7, 3), Ok(()));
        assert_eq!(after(&store, 3), [(4, "b".to_owned(), false)]);
    }

    #[test]
    fn being_seen_again_is_no_news() {
        let store = Store::new(7, 1);
        store.publish(pod("a"), None);
        let seen = store.touch(&PodUid::parse("a").unwrap(), Duration::from_secs(3)).unwrap();
        assert_eq!((seen.observed, seen.cursor.rev, store.cursor().rev), (Duration::from_secs(3), 1, 1));
    }
}
