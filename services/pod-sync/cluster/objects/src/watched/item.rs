//! One object that is watched.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::kind::{Key, Kind};

/// The known state of an object, which may be a Secret: there is no `Debug`.
pub(super) enum Content<K> {
    /// The object has not been listed since its watch was started.
    Unsynced,
    /// The object as of the last event; `None` if it does not exist.
    Synced(Option<Arc<K>>),
}

impl<K> Content<K> {
    pub(super) fn is_synced(&self) -> bool {
        match self {
            Self::Unsynced => false,
            Self::Synced(_) => true,
        }
    }

    pub(super) fn object(&self) -> Option<Arc<K>> {
        match self {
            Self::Unsynced => None,
            Self::Synced(object) => object.clone(),
        }
    }
}

/// Whether an object is watched.
#[derive(Debug)]
pub(super) enum Phase {
    /// No task watches the object: it was never read, or not for long. A read starts the watch.
    Stopped,
    /// A task watches the object until the token is cancelled.
    Watched(CancellationToken),
    /// The object was read and is immutable. It is never watched again.
    Immutable,
    /// No pod refers to the object any more. A read that is in progress does not start the watch.
    Removed,
}

/// UID and resource version.
type Version = (Option<String>, Option<String>);

#[derive(Debug)]
pub(super) struct ItemState {
    pub(super) phase: Phase,
    pub(super) last_read: Instant,
    // The last version, also while the object is not watched; the outer none before the first list.
    known: Option<Option<Version>>,
    // A read failed because the object was not listed in time.
    is_missed: bool,
}

/// An object and the state of its watch. Lock order: `state` before `content`.
pub(super) struct Item<K> {
    pub(super) key: Key,
    pub(super) is_watchable: bool,
    pub(super) state: Mutex<ItemState>,
    content: watch::Sender<Content<K>>,
}

impl<K: Kind> Item<K> {
    pub(super) fn new(key: Key, is_watchable: bool, now: Instant) -> Self {
        let state = ItemState { phase: Phase::Stopped, last_read: now, known: None, is_missed: false };
        Self { key, is_watchable, state: Mutex::new(state), content: watch::Sender::new(Content::Unsynced) }
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Content<K>> {
        self.content.subscribe()
    }

    /// Stores the object that the watch `run` has read; none if it does not exist. Returns whether readers of
    /// an earlier version, or readers that failed, have to read again. Does nothing after the end of the
    /// watch.
    pub(super) fn apply(&self, run: &CancellationToken, object: Option<K>) -> bool {
        let mut state = self.state.lock();
        if run.is_cancelled() {
            return false;
        }
        let version = object.as_ref().map(|object| {
            let meta = object.meta();
            (meta.uid.clone(), meta.resource_version.clone())
        });
        let is_changed = state.known.as_ref().is_some_and(|known| *known != version);
        let is_missed = std::mem::take(&mut state.is_missed);
        state.known = Some(version);
        self.content.send_replace(Content::Synced(object.map(Arc::new)));
        is_changed || is_missed
    }

    /// Records a read that waited for the first list in vain. Returns the content if the list has arrived
    /// meanwhile.
    pub(super) fn missed(&self) -> Option<Option<Arc<K>>> {
        let mut state = self.state.lock();
        match &*self.content.borrow() {
            Content::Synced(object) => Some(object.clone()),
            Content::Unsynced => {
                state.is_missed = true;
                None
            }
        }
    }

    /// Ends the watch of an immutable object and keeps the object. Returns false if it has changed since it
    /// was read, or is kept already.
    pub(super) fn keep(&self, object: &Arc<K>) -> bool {
        let mut state = self.state.lock();
        let is_current = self.content.borrow().object().is_some_and(|current| Arc::ptr_eq(&current, object));
        match &state.phase {
            Phase::Watched(run) if is_current => run.cancel(),
            Phase::Stopped | Phase::Watched(_) | Phase::Immutable | Phase::Removed => return false,
        }
        state.phase = Phase::Immutable;
        true
    }

    /// Ends the watch for good.
    pub(super) fn remove(&self) {
        let mut state = self.state.lock();
        self.stop_locked(&mut state);
        state.phase = Phase::Removed;
    }

    /// Ends the watch if there was no read for `max_idle`. A watch before its first list continues, so that
    /// the request is not wasted. Returns whether the watch was ended.
    pub(super) fn stop_if_idle(&self, max_idle: Duration) -> bool {
        let mut state = self.state.lock();
        let is_synced = self.content.borrow().is_synced();
        is_synced && state.last_read.elapsed() > max_idle && self.stop_locked(&mut state)
    }

    fn stop_locked(&self, state: &mut ItemState) -> bool {
        match &state.phase {
            Phase::Watched(run) => run.cancel(),
            Phase::Stopped | Phase::Immutable | Phase::Removed => return false,
        }
        state.phase = Phase::Stopped;
        self.content.send_replace(Content::Unsynced);
        true
    }
}
