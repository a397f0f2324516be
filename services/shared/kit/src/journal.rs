//! The latest value of each key, in the order of changes, for readers that come later and read at their own
//! pace.
//!
//! A reader is a position in the order of changes, not a queue: it gets a snapshot, then the latest value of
//! each key that has changed since. A slow reader skips values. A removed key is kept as a tombstone for
//! readers that reconnect; a reader that is behind the tombstones starts over with a snapshot.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::clock::Clock;

/// Removed keys that are kept for readers that reconnect.
pub const TOMBSTONES: usize = 4096;

/// Interval of [`JournalEvent::Beat`] on a stream without changes.
pub const BEAT: Duration = Duration::from_secs(5);

/// Reasons of a resync, which a subscriber reads. docs/subscribing.md has a row for each.
pub mod reason {
    /// The cursor is of another run of the service.
    pub const RESTARTED: &str = "the service was restarted";
    /// The cursor is larger than that of the newest change.
    pub const AHEAD: &str = "the cursor is ahead of this service";
    /// A stream cannot begin at the cursor: removals after it are no longer kept.
    pub const OLD: &str = "the cursor is older than the changes kept";
    /// An open stream cannot continue: removals that the reader has not read are no longer kept.
    pub const SLOW: &str = "the reader was too slow";
}

/// A position in the order of changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JournalCursor {
    /// The run of the process. Later runs of one boot have larger epochs.
    pub epoch: u64,
    /// Number of the change.
    pub seq: u64,
}

/// The next event for a reader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JournalEvent<K, V> {
    /// A snapshot follows.
    SnapshotBegin,
    /// The latest value of a key.
    Value(Arc<V>),
    /// The key was removed.
    Gone(K),
    /// The snapshot is complete.
    SnapshotEnd,
    /// The reader cannot continue, for the given reason. A snapshot follows.
    Resync(&'static str),
    /// Sent each [`BEAT`] while nothing changes.
    Beat,
}

/// An event, with the position after it if a reader can resume there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalItem<K, V> {
    /// A change, or a step of the stream.
    pub event: JournalEvent<K, V>,
    /// The position after it.
    pub cursor: Option<JournalCursor>,
}

#[derive(Debug)]
struct Change<K, V> {
    key: K,
    /// The value, or none if the key was removed.
    value: Option<Arc<V>>,
}

/// The event after a cursor.
#[derive(Debug, PartialEq, Eq)]
enum Next<K, V> {
    /// The oldest change after the cursor that is the latest of its key.
    Change(u64, JournalEvent<K, V>),
    /// There is no change after the cursor.
    End,
    /// The cursor is of another run.
    Restarted,
    /// The cursor is larger than that of the newest change.
    Ahead,
    /// Removals after the cursor are no longer kept.
    Lost,
}

#[derive(Debug)]
struct Inner<K, V> {
    seq: u64,
    /// Number of the newest tombstone that was dropped. Cursors below it are invalid.
    floor: u64,
    keys: HashMap<K, u64>,
    changes: BTreeMap<u64, Change<K, V>>,
    tombstones: VecDeque<u64>,
}

/// Values by key. Writers never wait for a reader.
#[derive(Debug)]
pub struct Journal<K, V> {
    epoch: u64,
    tombstones: usize,
    inner: Mutex<Inner<K, V>>,
    seq: watch::Sender<u64>,
    /// The values are complete.
    primed: watch::Sender<bool>,
}

impl<K: Clone + Eq + Hash, V: PartialEq> Journal<K, V> {
    /// Returns a journal without values. Its epoch is larger than that of earlier journals since the boot.
    #[must_use]
    pub fn new(clock: &Clock) -> Self {
        // CLOCK_BOOTTIME grows over the runs of one boot. A cursor of an earlier boot has another number of
        // nanoseconds.
        Self::with(u64::try_from(clock.boot().as_nanos()).unwrap_or(u64::MAX).max(1), TOMBSTONES)
    }

    fn with(epoch: u64, tombstones: usize) -> Self {
        let (keys, changes) = (HashMap::new(), BTreeMap::new());
        let inner = Inner { seq: 0, floor: 0, keys, changes, tombstones: VecDeque::new() };
        let (seq, primed) = (watch::Sender::new(0), watch::Sender::new(false));
        Self { epoch, tombstones, inner: Mutex::new(inner), seq, primed }
    }

    /// Lets readers begin: the values are complete. Further calls have no effect.
    pub fn set_primed(&self) {
        self.primed.send_if_modified(|primed| !std::mem::replace(primed, true));
    }

    /// Sets the value of a key. An equal value is no change.
    pub fn put(&self, key: K, value: V) {
        let mut inner = self.inner.lock();
        if inner.value(&key).is_some_and(|old| **old == value) {
            return;
        }
        inner.unlink(&key);
        let seq = inner.link(Change { key, value: Some(Arc::new(value)) });
        drop(inner);
        self.announce(seq);
    }

    /// Removes a key. One that is not there is no change.
    pub fn remove(&self, key: &K) {
        let mut inner = self.inner.lock();
        if inner.value(key).is_none() {
            return;
        }
        inner.unlink(key);
        let seq = inner.link(Change { key: key.clone(), value: None });
        inner.tombstones.push_back(seq);
        while inner.tombstones.len() > self.tombstones {
            inner.drop_oldest_tombstone();
        }
        drop(inner);
        self.announce(seq);
    }

    /// Removes the keys that `keep` does not want.
    pub fn retain(&self, keep: impl Fn(&K) -> bool) {
        let is_gone = |change: &&Change<K, V>| change.value.is_some() && !keep(&change.key);
        let gone: Vec<K> = {
            let inner = self.inner.lock();
            inner.changes.values().filter(is_gone).map(|change| change.key.clone()).collect()
        };
        for key in gone {
            self.remove(&key);
        }
    }

    /// Writers may announce in another order than they have written.
    fn announce(&self, seq: u64) {
        self.seq.send_if_modified(|last| {
            let newest = seq.max(*last);
            std::mem::replace(last, newest) < seq
        });
    }

    /// Returns the value of a key.
    fn get(&self, key: &K) -> Option<Arc<V>> {
        self.inner.lock().value(key).cloned()
    }

    /// Returns the keys that have a value, in the order of changes, and the cursor of this snapshot.
    fn snapshot(&self) -> (Vec<K>, JournalCursor) {
        let inner = self.inner.lock();
        let present = inner.changes.values().filter(|change| change.value.is_some());
        let keys = present.map(|change| change.key.clone()).collect();
        (keys, JournalCursor { epoch: self.epoch, seq: inner.seq })
    }

    /// Returns the event after a cursor. The cursor is checked under the lock of the change: a removal that
    /// is dropped between the two would be lost.
    fn next_after(&self, at: JournalCursor) -> Next<K, V> {
        let inner = self.inner.lock();
        if at.epoch != self.epoch {
            return Next::Restarted;
        }
        if at.seq > inner.seq {
            return Next::Ahead;
        }
        if at.seq < inner.floor {
            return Next::Lost;
        }
        let Some((seq, change)) = inner.changes.range(at.seq.saturating_add(1)..).next() else {
            return Next::End;
        };
        let event = match &change.value {
            Some(value) => JournalEvent::Value(Arc::clone(value)),
            None => JournalEvent::Gone(change.key.clone()),
        };
        Next::Change(*seq, event)
    }
}

impl<K: Clone + Eq + Hash + Send + Sync + 'static, V: PartialEq + Send + Sync + 'static> Journal<K, V> {
    /// Returns a stream of changes after `resume` or, without it, of a snapshot and the changes after it. It
    /// begins once the journal is primed.
    pub fn read(
        self: &Arc<Self>,
        resume: Option<JournalCursor>,
    ) -> impl Stream<Item = JournalItem<K, V>> + Send + use<K, V> {
        let reader = Reader {
            journal: Arc::clone(self),
            seqs: self.seq.subscribe(),
            primed: self.primed.subscribe(),
            at: None,
            resume,
            is_open: false,
            out: VecDeque::new(),
        };
        futures::stream::unfold(reader, |mut reader| async move {
            let item = reader.next().await;
            Some((item, reader))
        })
    }
}

impl<K: Clone + Eq + Hash, V> Inner<K, V> {
    fn value(&self, key: &K) -> Option<&Arc<V>> {
        self.changes.get(self.keys.get(key)?)?.value.as_ref()
    }

    fn unlink(&mut self, key: &K) {
        let Some(seq) = self.keys.remove(key) else { return };
        if self.changes.remove(&seq).is_some_and(|change| change.value.is_none()) {
            self.tombstones.retain(|tombstone| *tombstone != seq);
        }
    }

    fn link(&mut self, change: Change<K, V>) -> u64 {
        self.seq = self.seq.saturating_add(1);
        self.keys.insert(change.key.clone(), self.seq);
        self.changes.insert(self.seq, change);
        self.seq
    }

    fn drop_oldest_tombstone(&mut self) {
        let Some(oldest) = self.tombstones.pop_front() else { return };
        if let Some(change) = self.changes.remove(&oldest) {
            self.keys.remove(&change.key);
        }
        self.floor = oldest;
    }
}

/// One stream: its position and its queued events.
struct Reader<K, V> {
    journal: Arc<Journal<K, V>>,
    seqs: watch::Receiver<u64>,
    primed: watch::Receiver<bool>,
    /// Cursor of the last event; none before the first snapshot or the resumption.
    at: Option<JournalCursor>,
    resume: Option<JournalCursor>,
    /// The reader has got an event after its snapshot or at its resumption.
    is_open: bool,
    out: VecDeque<Queued<K>>,
}

/// An event that is due. A snapshot is queued as keys: values would be kept for a reader that stalls.
#[derive(Debug)]
enum Queued<K> {
    Resync(&'static str),
    SnapshotBegin,
    /// The value that the key has when the event is read. A key without one is left out: its removal is a
    /// later change.
    Key(K),
    SnapshotEnd(JournalCursor),
}

impl<K: Clone + Eq + Hash, V: PartialEq> Reader<K, V> {
    /// Queues a snapshot. Only its last event has a cursor, since a partial snapshot cannot be resumed.
    fn snapshot(&mut self) {
        let (keys, cursor) = self.journal.snapshot();
        self.out.push_back(Queued::SnapshotBegin);
        self.out.extend(keys.into_iter().map(Queued::Key));
        self.out.push_back(Queued::SnapshotEnd(cursor));
        self.at = Some(cursor);
        self.is_open = true;
    }

    fn resync(&mut self, reason: &'static str) {
        self.out.push_back(Queued::Resync(reason));
        self.snapshot();
    }

    /// Returns the first queued event.
    fn queued(&mut self) -> Option<JournalItem<K, V>> {
        loop {
            let (event, cursor) = match self.out.pop_front()? {
                Queued::Resync(reason) => (JournalEvent::Resync(reason), None),
                Queued::SnapshotBegin => (JournalEvent::SnapshotBegin, None),
                Queued::Key(key) => {
                    let Some(value) = self.journal.get(&key) else { continue };
                    (JournalEvent::Value(value), None)
                }
                Queued::SnapshotEnd(cursor) => (JournalEvent::SnapshotEnd, Some(cursor)),
            };
            return Some(JournalItem { event, cursor });
        }
    }

    async fn next(&mut self) -> JournalItem<K, V> {
        loop {
            if let Some(item) = self.queued() {
                return item;
            }
            let beat = crate::timers::pause(BEAT);
            self.seqs.mark_unchanged();
            let Some(at) = self.at else {
                if *self.primed.borrow_and_update() {
                    self.at = self.resume.take();
                    if self.at.is_none() {
                        self.snapshot();
                    }
                    continue;
                }
                // A dropped wait loses nothing.
                tokio::select! {
                    _ = self.primed.changed() => {}
                    () = beat => return JournalItem { event: JournalEvent::Beat, cursor: None },
                }
                continue;
            };
            match self.journal.next_after(at) {
                Next::Change(seq, event) => {
                    let cursor = JournalCursor { seq, ..at };
                    (self.at, self.is_open) = (Some(cursor), true);
                    return JournalItem { event, cursor: Some(cursor) };
                }
                Next::Restarted => self.resync(reason::RESTARTED),
                Next::Ahead => self.resync(reason::AHEAD),
                Next::Lost => self.resync(if self.is_open { reason::SLOW } else { reason::OLD }),
                Next::End => {
                    self.is_open = true;
                    // A dropped wait loses nothing.
                    tokio::select! {
                        changed = self.seqs.changed() => {
                            // The journal lives as long as this reader.
                            let _ = changed;
                        }
                        () = beat => return JournalItem { event: JournalEvent::Beat, cursor: Some(at) },
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap as Map;

    use futures::StreamExt as _;
    use proptest::prelude::*;

    use super::*;

    type Small = Arc<Journal<u8, (u8, u32)>>;

    fn journal(tombstones: usize) -> Small {
        let journal = Journal::with(7, tombstones);
        journal.set_primed();
        Arc::new(journal)
    }

    fn at(epoch: u64, seq: u64) -> Option<JournalCursor> {
        Some(JournalCursor { epoch, seq })
    }

    /// Reads until the journal has nothing new.
    async fn events(journal: &Small, resume: Option<JournalCursor>) -> Vec<JournalItem<u8, (u8, u32)>> {
        let items = journal.read(resume).take_while(|item| {
            let is_beat = item.event == JournalEvent::Beat;
            std::future::ready(!is_beat)
        });
        items.collect().await
    }

    fn words(items: &[JournalItem<u8, (u8, u32)>]) -> Vec<String> {
        let word = |item: &JournalItem<u8, (u8, u32)>| match &item.event {
            JournalEvent::SnapshotBegin => "begin".to_owned(),
            JournalEvent::Value(value) => format!("{}={}", value.0, value.1),
            JournalEvent::Gone(key) => format!("-{key}"),
            JournalEvent::SnapshotEnd => "end".to_owned(),
            JournalEvent::Resync(reason) => (*reason).to_owned(),
            JournalEvent::Beat => "beat".to_owned(),
        };
        items.iter().map(word).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_resumes_at_its_cursor_or_starts_over() {
        let journal = journal(1);
        for (key, value) in [(1, 10), (2, 20), (1, 11), (1, 11)] {
            journal.put(key, (key, value));
        }
        let snapshot = events(&journal, None).await;
        assert_eq!(words(&snapshot), ["begin", "2=20", "1=11", "end"]);
        assert_eq!(snapshot[3].cursor, at(7, 3), "an equal value is no change");
        journal.remove(&2);
        journal.remove(&2);
        assert_eq!(words(&events(&journal, at(7, 3)).await), ["-2"]);
        assert_eq!(words(&events(&journal, at(7, 4)).await), [""; 0]);
        for (resume, reason) in [
            (at(6, 3), "the service was restarted"),
            (at(8, 3), "the service was restarted"),
            (at(7, 5), "the cursor is ahead of this service"),
        ] {
            assert_eq!(words(&events(&journal, resume).await), [reason, "begin", "1=11", "end"]);
        }
        journal.retain(|_| false);
        let lost = "the cursor is older than the changes kept";
        assert_eq!(words(&events(&journal, at(7, 3)).await), [lost, "begin", "end"]);
        assert_eq!(words(&events(&journal, at(7, 4)).await), ["-1"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_waits_until_the_values_are_complete() {
        let journal: Small = Arc::new(Journal::with(7, 1));
        let mut reader = Box::pin(journal.read(None));
        assert_eq!(reader.next().await.unwrap().event, JournalEvent::Beat);
        journal.put(1, (1, 1));
        journal.set_primed();
        assert_eq!(reader.next().await.unwrap().event, JournalEvent::SnapshotBegin);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_stalls_skips_values_and_starts_over_when_removals_are_forgotten() {
        let journal = journal(8);
        let mut reader = Box::pin(journal.read(None));
        for _ in ["begin", "end"] {
            reader.next().await.unwrap();
        }
        for value in 0..100_000 {
            journal.put(1, (1, value));
        }
        assert_eq!(reader.next().await.unwrap().event, JournalEvent::Value(Arc::new((1, 99_999))));
        for key in 0..20 {
            journal.put(key, (key, 1));
            journal.remove(&key);
        }
        let next = reader.next().await.unwrap().event;
        assert_eq!(next, JournalEvent::Resync("the reader was too slow"));
    }

    #[test]
    fn a_cursor_is_checked_together_with_the_change_after_it() {
        let journal = journal(1);
        for key in [1, 2, 3] {
            journal.put(key, (key, 0));
        }
        let after = |seq| journal.next_after(JournalCursor { epoch: 7, seq });
        assert_eq!((after(3), after(4)), (Next::End, Next::Ahead));
        journal.remove(&1);
        assert_eq!(after(3), Next::Change(4, JournalEvent::Gone(1)));
        // The removal of 1 is no longer kept.
        journal.remove(&2);
        assert_eq!((after(3), after(4)), (Next::Lost, Next::Change(5, JournalEvent::Gone(2))));
        assert_eq!(journal.next_after(JournalCursor { epoch: 6, seq: 4 }), Next::Restarted);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_stalls_in_a_snapshot_keeps_no_value_and_reads_the_latest() {
        let journal: Arc<Journal<u8, Arc<u32>>> = Arc::new(Journal::with(7, 8));
        journal.set_primed();
        let first = Arc::new(1);
        journal.put(1, Arc::clone(&first));
        journal.put(2, Arc::new(1));
        let mut reader = Box::pin(journal.read(None));
        assert_eq!(reader.next().await.unwrap().event, JournalEvent::SnapshotBegin);
        journal.put(1, Arc::new(2));
        assert_eq!(Arc::strong_count(&first), 1, "the queue of the reader has the value");
        journal.remove(&2);
        let mut items = Vec::new();
        while items.len() < 4 {
            items.push(reader.next().await.unwrap());
        }
        let newest = || JournalEvent::Value(Arc::new(Arc::new(2)));
        let item = |event, cursor| JournalItem { event, cursor };
        let wanted = [
            item(newest(), None),
            item(JournalEvent::SnapshotEnd, at(7, 2)),
            item(newest(), at(7, 3)),
            item(JournalEvent::Gone(2), at(7, 4)),
        ];
        assert_eq!(items, wanted);
    }

    #[test]
    fn the_page_for_subscribers_has_each_reason() {
        let page = include_str!("../../../../docs/subscribing.md");
        for reason in [reason::RESTARTED, reason::AHEAD, reason::OLD, reason::SLOW] {
            assert!(page.contains(&format!("\n| {reason} |")), "{reason}");
        }
    }

    proptest! {
        #[test]
        fn a_reader_ends_with_the_values_of_the_journal_wherever_it_resumes(
            steps in prop::collection::vec((0_u8..6, prop::option::of(0_u32..4)), 1..40),
            stops in prop::collection::vec(any::<bool>(), 40),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
            runtime.unwrap().block_on(async {
                let journal = journal(2);
                let (mut wanted, mut seen) = (Map::new(), Map::new());
                let mut cursor = None;
                for ((key, value), stop) in steps.into_iter().zip(stops) {
                    match value {
                        Some(value) => {
                            journal.put(key, (key, value));
                            wanted.insert(key, value);
                        }
                        None => {
                            journal.remove(&key);
                            wanted.remove(&key);
                        }
                    }
                    if !stop {
                        continue;
                    }
                    for item in events(&journal, cursor).await {
                        match item.event {
                            JournalEvent::SnapshotBegin => seen.clear(),
                            JournalEvent::Value(value) => {
                                seen.insert(value.0, value.1);
                            }
                            JournalEvent::Gone(key) => {
                                seen.remove(&key);
                            }
                            JournalEvent::SnapshotEnd | JournalEvent::Resync(_) | JournalEvent::Beat => {}
                        }
                        cursor = item.cursor.or(cursor);
                    }
                    assert_eq!(seen, wanted);
                }
            });
        }

        #[test]
        fn a_reader_that_reads_between_changes_ends_with_the_values_of_the_journal(
            steps in prop::collection::vec((0_u8..6, prop::option::of(0_u32..4), 0_usize..4), 1..40),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
            runtime.unwrap().block_on(async {
                let journal = journal(2);
                let mut reader = Box::pin(journal.read(None));
                let (mut wanted, mut seen) = (Map::new(), Map::new());
                let mut take = async |seen: &mut Map<u8, u32>| {
                    let event = reader.next().await.unwrap().event;
                    match &event {
                        JournalEvent::SnapshotBegin => seen.clear(),
                        JournalEvent::Value(value) => drop(seen.insert(value.0, value.1)),
                        JournalEvent::Gone(key) => drop(seen.remove(key)),
                        JournalEvent::SnapshotEnd | JournalEvent::Resync(_) | JournalEvent::Beat => {}
                    }
                    event == JournalEvent::Beat
                };
                for (key, value, reads) in steps {
                    match value {
                        Some(value) => {
                            journal.put(key, (key, value));
                            wanted.insert(key, value);
                        }
                        None => {
                            journal.remove(&key);
                            wanted.remove(&key);
                        }
                    }
                    for _ in 0..reads {
                        take(&mut seen).await;
                    }
                }
                while !take(&mut seen).await {}
                assert_eq!(seen, wanted);
            });
        }
    }
}
