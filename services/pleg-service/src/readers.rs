//! Readers: `Watch` as a position in the order of changes, and lifecycle events. Readers of a leader and of a
//! follower are served alike. No writer waits for a reader.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use quintlet_kit::clock::Clock;
use quintlet_kit::journal::reason;
use quintlet_kit::messages;
use quintlet_model::ids::{PodRef, PodUid};
use quintlet_model::runtime::Cursor;
use quintlet_proto::common::v1::Trace;
use quintlet_proto::pleg::v1 as pb;
use quintlet_proto::pleg::v1::lifecycle_event::Event as LifecycleOneof;
use quintlet_proto::pleg::v1::watch_event::Event;
use tokio::sync::{broadcast, watch};
use tonic::Status;

use crate::entry::{Change, ChangeKind};
use crate::metrics::ReaderMetrics;
use crate::store::{Latest, NextChange, Resume, Store};

/// Lifecycle events that are kept for a slow reader (`pkg/kubelet: plegChannelCapacity`).
const LIFECYCLE_EVENTS: usize = 1000;

/// Beats of the leader for which a follower waits to reach the cursor of a reader. Between two beats the
/// leader has nothing to send, so the cursor does not exist.
const CURSOR_WAIT_BEATS: u64 = 2;

/// A lifecycle event with its cursor.
#[derive(Debug)]
pub(crate) struct LifecycleChange {
    pub(crate) kind: ChangeKind,
    pub(crate) pod: PodRef,
    pub(crate) id: String,
    pub(crate) container: String,
    pub(crate) exit_code: i32,
    pub(crate) at: jiff::Timestamp,
    pub(crate) cursor: Cursor,
    pub(crate) trace: Option<Trace>,
}

/// The data that readers are served from. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Readers {
    pub(crate) store: Arc<Store>,
    pub(crate) metrics: ReaderMetrics,
    pub(crate) clock: Clock,
    lifecycle: broadcast::Sender<Arc<LifecycleChange>>,
    beat: Duration,
}

impl Readers {
    pub(crate) fn new(store: Store, clock: Clock, beat: Duration) -> Self {
        let lifecycle = broadcast::Sender::new(LIFECYCLE_EVENTS);
        Self { store: Arc::new(store), metrics: ReaderMetrics::new(), clock, lifecycle, beat }
    }

    /// Sends lifecycle events of a pod.
    pub(crate) fn announce(&self, changes: Vec<Change>, pod: &PodRef, cursor: Cursor, trace: Option<&Trace>) {
        let at = self.clock.wall();
        for change in changes {
            tracing::debug!(kind = ?change.kind, id = change.id, container = change.container, "pod lifecycle event");
            // There may be no receiver; that is not an error.
            let _ = self.lifecycle.send(Arc::new(LifecycleChange {
                kind: change.kind,
                pod: pod.clone(),
                id: change.id,
                container: change.container,
                exit_code: change.exit_code,
                at,
                cursor,
                trace: trace.cloned(),
            }));
        }
    }

    /// Opens a Watch stream.
    pub(crate) fn watch(
        &self,
        resume: Option<Cursor>,
    ) -> impl Stream<Item = Result<pb::WatchEvent, Status>> + Send + use<> {
        self.items(resume, ReaderKind::Service).map(|item| Ok(wire(item)))
    }

    /// Opens a stream of the order of changes, for [`Readers::watch`] and subscribers.
    pub(crate) fn items(
        &self,
        resume: Option<Cursor>,
        kind: ReaderKind,
    ) -> impl Stream<Item = ReaderItem> + Send + use<> {
        let watcher = Watcher::new(self.clone(), resume, kind);
        futures::stream::unfold(watcher, |mut watcher| async move {
            let item = watcher.next().await;
            Some((item, watcher))
        })
    }

    /// Opens a stream of lifecycle events, of one pod or of all.
    pub(crate) fn events(
        &self,
        uid: Option<PodUid>,
    ) -> impl Stream<Item = Result<pb::LifecycleEvent, Status>> + Send + use<> {
        let receiver = self.lifecycle.subscribe();
        let hello = pb::LifecycleEvent {
            event: Some(LifecycleOneof::Hello(quintlet_proto::hello())),
            cursor: Some(self.store.cursor().into()),
            trace: None,
        };
        let state = (self.metrics.clone(), uid, receiver, Some(hello));
        futures::stream::unfold(state, |(metrics, uid, mut receiver, hello)| async move {
            if let Some(hello) = hello {
                return Some((Ok(hello), (metrics, uid, receiver, None)));
            }
            loop {
                let event = match receiver.recv().await {
                    Ok(change) if uid.as_ref().is_none_or(|uid| *uid == change.pod.uid) => lifecycle(&change),
                    Ok(_) => continue,
                    Err(broadcast::error::RecvError::Lagged(count)) => {
                        metrics.missed(count);
                        let missed = LifecycleOneof::Missed(pb::Missed { count });
                        pb::LifecycleEvent { event: Some(missed), cursor: None, trace: None }
                    }
                    Err(broadcast::error::RecvError::Closed) => return None,
                };
                return Some((Ok(event), (metrics, uid, receiver, None)));
            }
        })
    }
}

/// A kind of reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReaderKind {
    /// A service or a follower. Its snapshot has the states at the cursor of the snapshot: a follower serves
    /// other readers from it, and a later state would make a reader of the follower skip changes.
    Service,
    /// A program that is not part of Quintlet. Its snapshot has the states at the time of reading: the states
    /// of an earlier time would be kept for a subscriber that stalls. Metrics of readers do not count it.
    Subscriber,
}

/// The next event for a reader.
#[derive(Debug)]
pub(crate) enum ReaderEvent {
    Hello,
    SnapshotBegin,
    /// The latest state of a pod, or that it is gone.
    Pod(Latest),
    SnapshotEnd,
    /// The stream cannot resume, for the given reason. A snapshot follows.
    Resync(String),
    Beat,
}

/// An event with the position after it, if a reader can resume there.
#[derive(Debug)]
pub(crate) struct ReaderItem {
    pub(crate) event: ReaderEvent,
    pub(crate) cursor: Option<Cursor>,
}

/// An event that is due.
#[derive(Debug)]
enum Queued {
    Item(ReaderItem),
    /// The state that the pod has when the event is read. A pod that is gone is left out: its removal is a
    /// later change.
    Pod(PodUid),
}

/// One stream of a reader: its position and its queued events.
struct Watcher {
    kind: ReaderKind,
    readers: Readers,
    revs: watch::Receiver<u64>,
    primed: watch::Receiver<bool>,
    beats: watch::Receiver<u64>,
    /// Number of the leader's beats when the stream was opened.
    seen_beat: u64,
    /// Cursor of the last message; none before the first snapshot or the resumption.
    at: Option<Cursor>,
    resume: Option<Cursor>,
    /// The reader has got an event after its snapshot or at its resumption.
    is_open: bool,
    out: VecDeque<Queued>,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        if self.kind == ReaderKind::Service {
            self.readers.metrics.watchers.dec();
        }
    }
}

/// Converts an event when it is sent, since a snapshot may have thousands.
fn wire(item: ReaderItem) -> pb::WatchEvent {
    let (event, trace) = match item.event {
        ReaderEvent::Hello => (Event::Hello(quintlet_proto::hello()), None),
        ReaderEvent::SnapshotBegin => (Event::SnapshotBegin(pb::SnapshotBegin {}), None),
        ReaderEvent::Pod(Latest { pod: Some(pod), trace, .. }) => {
            (Event::Pod(bounded(pod.as_ref().into())), trace)
        }
        ReaderEvent::Pod(Latest { uid, trace, .. }) => {
            (Event::Gone(pb::PodGone { uid: uid.to_string() }), trace)
        }
        ReaderEvent::SnapshotEnd => (Event::SnapshotEnd(pb::SnapshotEnd {}), None),
        ReaderEvent::Resync(reason) => (Event::Resync(pb::Resync { reason }), None),
        ReaderEvent::Beat => (Event::Beat(pb::Beat {}), None),
    };
    pb::WatchEvent { event: Some(event), cursor: item.cursor.map(Into::into), trace }
}

/// Returns a record that fits into the stream. One that is too large becomes an error of its pod: its reader
/// decides nothing on an incomplete record, and other pods are not delayed.
fn bounded(record: pb::PodRecord) -> pb::PodRecord {
    let Err(error) = messages::fits(&record) else { return record };
    messages::count_left_out("Pleg.Watch");
    tracing::info!(pod.uid = record.uid, bytes = error.bytes, "runtime state of the pod is too large");
    pb::PodRecord {
        uid: record.uid,
        name: record.name,
        namespace: record.namespace,
        error: format!("the runtime state of the pod is too large: {error}"),
        observed_boottime_ns: record.observed_boottime_ns,
        rev: record.rev,
        ..pb::PodRecord::default()
    }
}

impl Watcher {
    fn new(readers: Readers, resume: Option<Cursor>, kind: ReaderKind) -> Self {
        if kind == ReaderKind::Service {
            readers.metrics.watchers.inc();
        }
        let store = &readers.store;
        let revs = store.revs();
        let primed = store.primed();
        let beats = store.beats();
        let hello = ReaderItem { event: ReaderEvent::Hello, cursor: None };
        let seen_beat = *beats.borrow();
        let out = VecDeque::from([Queued::Item(hello)]);
        Self { kind, readers, revs, primed, beats, seen_beat, at: None, resume, is_open: false, out }
    }

    fn push(&mut self, event: ReaderEvent, cursor: Option<Cursor>) {
        self.out.push_back(Queued::Item(ReaderItem { event, cursor }));
    }

    /// Queues a snapshot. Its messages have no cursor but the last, since a partial snapshot cannot be
    /// resumed.
    fn snapshot(&mut self) {
        self.push(ReaderEvent::SnapshotBegin, None);
        let cursor = match self.kind {
            ReaderKind::Service => {
                let (pods, cursor) = self.readers.store.snapshot();
                pods.into_iter().for_each(|pod| self.push(ReaderEvent::Pod(pod), None));
                cursor
            }
            ReaderKind::Subscriber => {
                let (uids, cursor) = self.readers.store.uids();
                self.out.extend(uids.into_iter().map(Queued::Pod));
                cursor
            }
        };
        self.push(ReaderEvent::SnapshotEnd, Some(cursor));
        (self.at, self.is_open) = (Some(cursor), true);
    }

    /// Returns the first queued event.
    fn queued(&mut self) -> Option<ReaderItem> {
        loop {
            match self.out.pop_front()? {
                Queued::Item(item) => return Some(item),
                Queued::Pod(uid) => {
                    let Some(latest) = self.readers.store.latest(&uid) else { continue };
                    return Some(ReaderItem { event: ReaderEvent::Pod(latest), cursor: None });
                }
            }
        }
    }

    fn resync(&mut self, reason: &str) {
        if self.kind == ReaderKind::Service {
            self.readers.metrics.resyncs.inc();
        }
        self.push(ReaderEvent::Resync(reason.to_owned()), None);
        self.snapshot();
    }

    /// Resumes from the reader's cursor, or sends a snapshot, once the store has enough to decide.
    fn begin(&mut self, waited: u64) {
        let Some(cursor) = self.resume else { return self.snapshot() };
        match self.readers.store.resumable(cursor) {
            Resume::Possible => self.at = Some(cursor),
            Resume::NotYet if waited < CURSOR_WAIT_BEATS => return,
            Resume::NotYet => self.resync(reason::AHEAD),
            Resume::Impossible(reason) => self.resync(reason),
        }
        self.resume = None;
    }

    async fn next(&mut self) -> ReaderItem {
        loop {
            if let Some(item) = self.queued() {
                return item;
            }
            let beat = quintlet_kit::timers::pause(self.readers.beat);
            self.revs.mark_unchanged();
            let Some(at) = self.at else {
                if *self.primed.borrow() {
                    let waited = self.beats.borrow_and_update().saturating_sub(self.seen_beat);
                    self.begin(waited);
                    if self.at.is_some() {
                        continue;
                    }
                }
                // A dropped wait loses nothing.
                tokio::select! {
                    // The store is incomplete before the first full list.
                    _ = self.primed.changed() => {}
                    // A follower may be behind the cursor of another instance.
                    _ = self.revs.changed() => {}
                    _ = self.beats.changed() => {}
                    () = beat => return ReaderItem { event: ReaderEvent::Beat, cursor: None },
                }
                continue;
            };
            match self.readers.store.next_after(at) {
                NextChange::Change(latest) => {
                    let cursor = Cursor { epoch: at.epoch, rev: latest.rev };
                    (self.at, self.is_open) = (Some(cursor), true);
                    return ReaderItem { event: ReaderEvent::Pod(latest), cursor: Some(cursor) };
                }
                NextChange::Restarted => self.resync(reason::RESTARTED),
                NextChange::Lost => self.resync(if self.is_open { reason::SLOW } else { reason::OLD }),
                NextChange::End => {
                    self.is_open = true;
                    // A dropped wait loses nothing.
                    tokio::select! {
                        changed = self.revs.changed() => {
                            let _ = changed;
                        }
                        () = beat => return ReaderItem { event: ReaderEvent::Beat, cursor: Some(at) },
                    }
                }
            }
        }
    }
}

fn lifecycle(change: &LifecycleChange) -> pb::LifecycleEvent {
    let kind = match change.kind {
        ChangeKind::Started => pb::LifecycleKind::Started,
        ChangeKind::Died => pb::LifecycleKind::Died,
        ChangeKind::Removed => pb::LifecycleKind::Removed,
        ChangeKind::Changed => pb::LifecycleKind::Changed,
    };
    let event = pb::Lifecycle {
        kind: kind as i32,
        uid: change.pod.uid.to_string(),
        pod_name: change.pod.name.to_string(),
        pod_namespace: change.pod.namespace.to_string(),
        id: change.id.clone(),
        container: change.container.clone(),
        exit_code: change.exit_code,
        at_unix_ns: i64::try_from(change.at.as_nanosecond()).unwrap_or(0),
    };
    pb::LifecycleEvent {
        event: Some(LifecycleOneof::Lifecycle(event)),
        cursor: Some(change.cursor.into()),
        trace: change.trace.clone(),
    }
}

#[cfg(test)]
mod tests {
    use quintlet_model::runtime::PodRuntime;

    use super::*;

    fn readers() -> Readers {
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(1));
        Readers::new(Store::new(7, crate::store::TOMBSTONES), clock, Duration::from_secs(5))
    }

    fn pod(uid: &PodUid) -> PodRef {
        PodRef { uid: uid.clone(), namespace: "default".into(), name: "web".into() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_lifecycle_reader_receives_the_number_of_missed_events() {
        let readers = readers();
        let mut events = std::pin::pin!(readers.events(None));
        let uid = PodUid::parse("u1").unwrap();
        for n in 0..2000 {
            let died =
                Change { kind: ChangeKind::Died, id: n.to_string(), container: String::new(), exit_code: 0 };
            readers.announce(vec![died], &pod(&uid), Cursor::default(), None);
        }
        let (mut missed, mut seen) = (0, Vec::new());
        while missed + seen.len() as u64 != 2000 {
            match events.next().await.unwrap().unwrap().event.unwrap() {
                LifecycleOneof::Hello(_) => {}
                LifecycleOneof::Missed(m) => missed += m.count,
                LifecycleOneof::Lifecycle(e) => seen.push(e.id.parse::<u64>().unwrap()),
            }
        }
        assert!(missed > 0 && seen.is_sorted() && seen.last() == Some(&1999), "{missed}");
        let text = quintlet_telemetry::metrics::text();
        assert!(text.contains(&format!("\nkubelet_pleg_discard_events {missed}\n")), "{text}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_subscriber_that_stalls_in_a_snapshot_keeps_no_state_and_counts_for_no_reader() {
        let readers = readers();
        readers.store.set_primed();
        let uid = |name: &str| PodUid::parse(name).unwrap();
        let publish = |name: &str| {
            readers.store.publish(PodRuntime::empty(pod(&uid(name)), Cursor::default(), Duration::ZERO), None)
        };
        let first = publish("a");
        publish("b");
        let mut watcher = Watcher::new(readers.clone(), None, ReaderKind::Subscriber);
        assert!(matches!(watcher.next().await.event, ReaderEvent::Hello));
        assert!(matches!(watcher.next().await.event, ReaderEvent::SnapshotBegin));
        publish("a");
        readers.store.remove(&uid("b"), Duration::ZERO, None);
        assert_eq!(Arc::strong_count(&first), 1, "the queue of the subscriber has the state");
        let mut seen = Vec::new();
        while seen.len() < 4 {
            let ReaderItem { event, cursor } = watcher.next().await;
            let event = match event {
                ReaderEvent::Pod(latest) => (latest.uid.to_string(), latest.rev, latest.pod.is_some()),
                ReaderEvent::SnapshotEnd => ("end".to_owned(), 0, false),
                other => panic!("{other:?}"),
            };
            seen.push((event, cursor.map(|at| at.rev)));
        }
        let item = |name: &str, rev, is_present, at| ((name.to_owned(), rev, is_present), at);
        let wanted = [
            item("a", 3, true, None),
            item("end", 0, false, Some(2)),
            item("a", 3, true, Some(3)),
            item("b", 4, false, Some(4)),
        ];
        assert_eq!(seen, wanted);
        assert_eq!(readers.metrics.watchers.get(), 0);
        let resyncs = readers.metrics.resyncs.get();
        let mut lost =
            Watcher::new(readers.clone(), Some(Cursor { epoch: 6, rev: 1 }), ReaderKind::Subscriber);
        assert!(matches!(lost.next().await.event, ReaderEvent::Hello));
        assert!(matches!(lost.next().await.event, ReaderEvent::Resync(_)));
        assert_eq!(readers.metrics.resyncs.get(), resyncs);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_falls_behind_the_tombstones_is_resynced() {
        let readers = readers();
        readers.store.set_primed();
        let mut watcher = Watcher::new(readers.clone(), None, ReaderKind::Service);
        while !matches!(watcher.next().await.event, ReaderEvent::SnapshotEnd) {}
        for n in 0..=crate::store::TOMBSTONES {
            let uid = PodUid::parse(&format!("u{n}")).unwrap();
            readers.store.publish(PodRuntime::empty(pod(&uid), Cursor::default(), Duration::ZERO), None);
            readers.store.remove(&uid, Duration::ZERO, None);
        }
        assert!(matches!(watcher.next().await.event, ReaderEvent::Resync(_)));
        assert!(matches!(watcher.next().await.event, ReaderEvent::SnapshotBegin));
        let end = watcher.next().await;
        assert!(matches!(end.event, ReaderEvent::SnapshotEnd));
        assert_eq!(end.cursor.unwrap(), readers.store.cursor());
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_ahead_of_its_follower_waits_and_one_with_an_unknown_cursor_is_resynced() {
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(1));
        let readers = Readers::new(Store::following(8), clock, Duration::from_secs(5));
        let at = |rev| Cursor { epoch: 7, rev };
        let placed = |name: &str, rev| {
            let mut pod = PodRuntime::empty(pod(&PodUid::parse(name).unwrap()), at(rev), Duration::ZERO);
            pod.cursor = at(rev);
            pod
        };
        readers.store.replace(at(5), vec![(placed("a", 5), None)]);
        readers.store.set_primed();
        let mut ahead = Watcher::new(readers.clone(), Some(at(7)), ReaderKind::Service);
        assert!(matches!(ahead.next().await.event, ReaderEvent::Hello));
        assert!(matches!(ahead.next().await.event, ReaderEvent::Beat));
        readers.store.note_beat();
        readers.store.follow(placed("a", 6), None);
        readers.store.follow(placed("a", 7), None);
        readers.store.follow(placed("a", 8), None);
        let next = ahead.next().await;
        assert_eq!(next.cursor, Some(at(8)), "no event is repeated");
        let mut lost = Watcher::new(readers.clone(), Some(at(900)), ReaderKind::Service);
        assert!(matches!(lost.next().await.event, ReaderEvent::Hello));
        readers.store.note_beat();
        assert!(matches!(lost.next().await.event, ReaderEvent::Beat));
        readers.store.note_beat();
        assert!(matches!(lost.next().await.event, ReaderEvent::Resync(_)));
    }
}
