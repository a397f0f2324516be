//! The latest state of every pod, in the order of changes.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use quintlet_kit::journal::reason;
use quintlet_model::ids::PodUid;
use quintlet_model::runtime::{Cursor, PodRuntime, SharedPodRuntime};
use quintlet_proto::common::v1::Trace;
use tokio::sync::watch;

/// Removed pods that are kept for readers that reconnect. A node replaces a few hundred pods in the minutes
/// of a disconnection.
pub(crate) const TOMBSTONES: usize = 4096;

/// The latest change of one pod.
#[derive(Debug, Clone)]
pub(crate) struct Latest {
    pub(crate) rev: u64,
    pub(crate) uid: PodUid,
    /// The state, or none if the pod is gone.
    pub(crate) pod: Option<SharedPodRuntime>,
    /// CLOCK_BOOTTIME at which the pod was found to be gone. Zero for an existing pod, and in a follower.
    pub(crate) gone: Duration,
    pub(crate) trace: Option<Trace>,
}

#[derive(Debug, Default)]
struct Inner {
    epoch: u64,
    rev: u64,
    /// Revision of the newest tombstone that was dropped. Cursors at or below it are invalid.
    floor: u64,
    pods: HashMap<PodUid, u64>,
    by_rev: BTreeMap<u64, Latest>,
    tombstones: VecDeque<u64>,
    /// Pods by container and sandbox ID.
    ids: HashMap<String, PodUid>,
}

/// The next change for a reader.
#[derive(Debug)]
pub(crate) enum NextChange {
    /// The oldest change after the cursor that is the latest of its pod.
    Change(Latest),
    /// There is no change after the cursor.
    End,
    /// Changes after the cursor are no longer kept.
    Lost,
    /// The cursor has the epoch of an earlier run.
    Restarted,
}

/// Whether a reader can resume from its cursor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resume {
    Possible,
    /// The cursor is ahead of the store. A follower may reach it later.
    NotYet,
    /// The cursor is invalid, for the given reason.
    Impossible(&'static str),
}

/// The published states. The owner of a pod is the only writer of its state; in a follower, the task that
/// reads the leader.
#[derive(Debug)]
pub(crate) struct Store {
    tombstones: usize,
    /// The store is that of a follower.
    follows: bool,
    inner: RwLock<Inner>,
    rev: watch::Sender<u64>,
    /// The first full list is complete.
    primed: watch::Sender<bool>,
    /// Number of the leader's beats.
    beats: watch::Sender<u64>,
}

impl Store {
    pub(crate) fn new(epoch: u64, tombstones: usize) -> Self {
        Self {
            tombstones,
            follows: false,
            inner: RwLock::new(Inner { epoch, ..Inner::default() }),
            rev: watch::Sender::new(0),
            primed: watch::Sender::new(false),
            beats: watch::Sender::new(0),
        }
    }

    /// Creates the store of a follower, which takes the epoch of the leader.
    pub(crate) fn following(tombstones: usize) -> Self {
        Self { follows: true, ..Self::new(0, tombstones) }
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.inner.read().epoch
    }

    pub(crate) fn cursor(&self) -> Cursor {
        self.inner.read().cursor()
    }

    pub(crate) fn beats(&self) -> watch::Receiver<u64> {
        self.beats.subscribe()
    }

    /// Counts a beat of the leader.
    pub(crate) fn note_beat(&self) {
        self.beats.send_modify(|n| *n = n.saturating_add(1));
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

    /// Returns the CLOCK_BOOTTIME at which the pod was found to be gone, or none if it exists or has no
    /// tombstone.
    pub(crate) fn gone_at(&self, uid: &PodUid) -> Option<Duration> {
        let inner = self.inner.read();
        inner.by_rev.get(inner.pods.get(uid)?).filter(|l| l.pod.is_none()).map(|l| l.gone)
    }

    pub(crate) fn pod_of(&self, id: &str) -> Option<PodUid> {
        self.inner.read().ids.get(id).cloned()
    }

    pub(crate) fn len(&self) -> usize {
        // One guard, since a second read lock behind a waiting writer deadlocks.
        let inner = self.inner.read();
        inner.pods.len().saturating_sub(inner.tombstones.len())
    }

    /// Publishes a state of a pod. Returns it with its cursor.
    pub(crate) fn publish(&self, mut pod: PodRuntime, trace: Option<Trace>) -> SharedPodRuntime {
        let mut inner = self.inner.write();
        let at = inner.next();
        pod.cursor = at;
        let pod = Arc::new(pod);
        inner.put(Arc::clone(&pod), trace);
        drop(inner);
        self.rev.send_replace(at.rev);
        pod
    }

    /// Publishes that a pod is gone. `gone` is the CLOCK_BOOTTIME of the end of the inspection.
    pub(crate) fn remove(&self, uid: &PodUid, gone: Duration, trace: Option<Trace>) -> Cursor {
        let mut inner = self.inner.write();
        let at = inner.next();
        inner.bury(uid, at.rev, gone, trace, self.tombstones);
        drop(inner);
        self.rev.send_replace(at.rev);
        at
    }

    /// Stores a state of the leader with its cursor.
    pub(crate) fn follow(&self, pod: PodRuntime, trace: Option<Trace>) {
        let rev = pod.cursor.rev;
        self.inner.write().put(Arc::new(pod), trace);
        self.rev.send_replace(rev);
    }

    /// Stores the leader's removal of a pod.
    pub(crate) fn follow_gone(&self, uid: &PodUid, rev: u64, trace: Option<Trace>) {
        self.inner.write().bury(uid, rev, Duration::ZERO, trace, self.tombstones);
        self.rev.send_replace(rev);
    }

    /// Replaces all states by a snapshot of the leader. Earlier cursors become invalid.
    pub(crate) fn replace(&self, at: Cursor, pods: Vec<(PodRuntime, Option<Trace>)>) {
        let mut new = Inner { epoch: at.epoch, ..Inner::default() };
        for (pod, trace) in pods {
            new.put(Arc::new(pod), trace);
        }
        (new.rev, new.floor) = (at.rev, at.rev);
        *self.inner.write() = new;
        self.rev.send_replace(at.rev);
    }

    /// Replaces a state by an equal one of a newer inspection, without a change for readers.
    pub(crate) fn touch(&self, pod: SharedPodRuntime) {
        let mut inner = self.inner.write();
        if let Some(latest) = inner.by_rev.get_mut(&pod.cursor.rev).filter(|l| l.uid == pod.pod.uid) {
            latest.pod = Some(pod);
        }
    }

    /// Returns the change after a cursor.
    pub(crate) fn next_after(&self, at: Cursor) -> NextChange {
        let inner = self.inner.read();
        if at.epoch != inner.epoch {
            // A follower may not know the leader's new epoch yet.
            return if at.epoch > inner.epoch { NextChange::End } else { NextChange::Restarted };
        }
        if at.rev < inner.floor {
            return NextChange::Lost;
        }
        match inner.by_rev.range(at.rev.saturating_add(1)..).next() {
            Some((_, latest)) => NextChange::Change(latest.clone()),
            None => NextChange::End,
        }
    }

    /// Reports whether a reader can resume from `cursor`.
    pub(crate) fn resumable(&self, cursor: Cursor) -> Resume {
        let inner = self.inner.read();
        if self.follows && cursor > inner.cursor() {
            return Resume::NotYet;
        }
        if cursor.epoch != inner.epoch {
            return Resume::Impossible(reason::RESTARTED);
        }
        if cursor.rev > inner.rev {
            return Resume::Impossible(reason::AHEAD);
        }
        if cursor.rev < inner.floor {
            return Resume::Impossible(reason::OLD);
        }
        Resume::Possible
    }

    /// Returns all existing pods, and the cursor of this snapshot.
    pub(crate) fn snapshot(&self) -> (Vec<Latest>, Cursor) {
        let inner = self.inner.read();
        let pods = inner.by_rev.values().filter(|l| l.pod.is_some()).cloned().collect();
        (pods, inner.cursor())
    }

    /// Returns the UIDs of all existing pods in the order of changes, and the cursor of this snapshot.
    pub(crate) fn uids(&self) -> (Vec<PodUid>, Cursor) {
        let inner = self.inner.read();
        let uids = inner.by_rev.values().filter(|l| l.pod.is_some()).map(|l| l.uid.clone()).collect();
        (uids, inner.cursor())
    }

    /// Returns the latest change of an existing pod.
    pub(crate) fn latest(&self, uid: &PodUid) -> Option<Latest> {
        let inner = self.inner.read();
        inner.by_rev.get(inner.pods.get(uid)?).filter(|l| l.pod.is_some()).cloned()
    }

    /// Returns all existing pods.
    pub(crate) fn pods(&self) -> Vec<SharedPodRuntime> {
        self.inner.read().by_rev.values().filter_map(|l| l.pod.clone()).collect()
    }
}

impl Inner {
    fn cursor(&self) -> Cursor {
        Cursor { epoch: self.epoch, rev: self.rev }
    }

    /// Returns the cursor of the next change.
    fn next(&self) -> Cursor {
        Cursor { epoch: self.epoch, rev: self.rev.saturating_add(1) }
    }

    fn put(&mut self, pod: SharedPodRuntime, trace: Option<Trace>) {
        let uid = pod.pod.uid.clone();
        self.unlink(&uid);
        for id in pod.ids() {
            self.ids.insert(id, uid.clone());
        }
        self.link(Latest { rev: pod.cursor.rev, uid, pod: Some(pod), gone: Duration::ZERO, trace });
    }

    fn bury(&mut self, uid: &PodUid, rev: u64, gone: Duration, trace: Option<Trace>, tombstones: usize) {
        self.unlink(uid);
        self.link(Latest { rev, uid: uid.clone(), pod: None, gone, trace });
        self.tombstones.push_back(rev);
        while self.tombstones.len() > tombstones {
            if let Some(old) = self.tombstones.pop_front() {
                if let Some(gone) = self.by_rev.remove(&old) {
                    self.pods.remove(&gone.uid);
                }
                self.floor = old;
            }
        }
    }

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
        while let NextChange::Change(latest) = store.next_after(Cursor { epoch: 7, rev }) {
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
        store.remove(&PodUid::parse("b").unwrap(), Duration::ZERO, None);
        let all = [(3, "a".to_owned(), true), (4, "c".to_owned(), true), (5, "b".to_owned(), false)];
        assert_eq!(after(&store, 0), all);
        assert_eq!(after(&store, 3), all[1..]);
        assert_eq!(store.len(), 2);
        store.publish(pod("b"), None);
        assert_eq!(after(&store, 4), [(6, "b".to_owned(), true)], "a pod that is back has no tombstone");
        assert_eq!(store.len(), 3);
    }

    #[test]
    fn a_cursor_resumes_only_within_its_epoch_and_the_retained_tombstones() {
        let store = Store::new(7, 1);
        for uid in ["a", "b"] {
            store.publish(pod(uid), None);
        }
        let at = |epoch, rev| store.resumable(Cursor { epoch, rev });
        assert_eq!(at(7, 0), Resume::Possible);
        let not = |start| matches!(start, Resume::Impossible(_));
        assert!(not(at(6, 2)) && not(at(8, 2)) && not(at(7, 3)));
        store.remove(&PodUid::parse("a").unwrap(), Duration::ZERO, None);
        assert_eq!(at(7, 2), Resume::Possible);
        store.remove(&PodUid::parse("b").unwrap(), Duration::ZERO, None);
        assert!(not(at(7, 2)), "the end of a is forgotten");
        assert!(matches!(store.next_after(Cursor { epoch: 7, rev: 2 }), NextChange::Lost));
        assert_eq!(at(7, 3), Resume::Possible);
        assert_eq!(after(&store, 3), [(4, "b".to_owned(), false)]);
    }

    #[test]
    fn a_follower_has_the_leaders_cursors_and_waits_for_a_later_cursor_of_a_reader() {
        let store = Store::following(8);
        let placed = |uid: &str, rev| {
            let mut pod = pod(uid);
            pod.cursor = Cursor { epoch: 7, rev };
            pod
        };
        store.replace(Cursor { epoch: 7, rev: 9 }, vec![(placed("a", 4), None), (placed("b", 8), None)]);
        let at = |epoch, rev| store.resumable(Cursor { epoch, rev });
        assert!(matches!(at(7, 8), Resume::Impossible(_)), "removals before the snapshot are not known");
        assert_eq!((at(7, 9), at(7, 10), at(8, 0)), (Resume::Possible, Resume::NotYet, Resume::NotYet));
        store.follow(placed("a", 11), None);
        store.follow_gone(&PodUid::parse("b").unwrap(), 12, None);
        assert_eq!(after(&store, 9), [(11, "a".to_owned(), true), (12, "b".to_owned(), false)]);
        assert_eq!((store.len(), store.cursor()), (1, Cursor { epoch: 7, rev: 12 }));
        store.replace(
            Cursor { epoch: 8, rev: 2 },
            vec![(PodRuntime { cursor: Cursor { epoch: 8, rev: 1 }, ..pod("a") }, None)],
        );
        assert!(matches!(store.next_after(Cursor { epoch: 7, rev: 12 }), NextChange::Restarted));
        assert!(matches!(store.next_after(Cursor { epoch: 9, rev: 0 }), NextChange::End));
    }

    #[test]
    fn being_seen_again_is_no_news() {
        let store = Store::new(7, 1);
        store.publish(pod("a"), None);
        let uid = PodUid::parse("a").unwrap();
        let seen =
            PodRuntime { observed: Duration::from_secs(3), ..PodRuntime::clone(&store.get(&uid).unwrap()) };
        store.touch(Arc::new(seen));
        let seen = store.get(&uid).unwrap();
        assert_eq!((seen.observed, seen.cursor.rev, store.cursor().rev), (Duration::from_secs(3), 1, 1));
    }
}
