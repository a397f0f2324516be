//! Objects that are watched one by one (`watch_based_manager.go`).

mod item;
mod reachability;
mod reflector;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kube::api::Api;
use parking_lot::Mutex;
use pod_sync_layout::ObjectError;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::item::{Content, Item, Phase};
use self::reachability::Reachability;
pub(crate) use self::reflector::Changed;
use self::reflector::Reflector;
use crate::kind::{Key, Kind};
use crate::ttl::{NodeTtl, TtlStore};

/// Longest wait of a read for the first list of its object.
const SYNC_WAIT: Duration = Duration::from_secs(1);
/// Interval between checks for watches of objects that are not read.
pub(crate) const IDLE_CHECK: Duration = Duration::from_secs(60);
/// Shortest time without a read that ends a watch.
const MIN_IDLE: Duration = Duration::from_secs(60);
/// The same in sync periods. Volumes read their objects in each period, so only objects of variables become
/// idle.
const IDLE_PERIODS: u32 = 5;

/// Watches of all objects together. Each holds a connection, so that without a limit pods could use up the
/// open files of pod-sync.
pub(crate) const MAX_WATCHES: usize = 1000;
/// Objects of one kind in a pod whose objects are watched. Those of a pod with more are not, so that it
/// leaves watches to others.
pub(crate) const MAX_WATCHED_PER_POD: usize = 100;

/// The objects of one kind.
pub(crate) struct WatchStore<K> {
    client: kube::Client,
    max_idle: Duration,
    changed: Changed,
    reachability: Arc<Reachability>,
    stop: CancellationToken,
    items: Mutex<HashMap<Key, Arc<Item<K>>>>,
    /// One permit per watch that may still be started.
    permits: Arc<Semaphore>,
    /// Objects that are read without a watch of their own.
    unwatched: TtlStore<K>,
}

impl<K: Kind> WatchStore<K> {
    pub(crate) fn new(
        client: &kube::Client,
        sync_frequency: Duration,
        changed: Changed,
        (permits, node_ttl): (Arc<Semaphore>, NodeTtl),
        stop: &CancellationToken,
    ) -> Self {
        Self {
            client: client.clone(),
            max_idle: sync_frequency.saturating_mul(IDLE_PERIODS).max(MIN_IDLE),
            changed,
            reachability: Arc::default(),
            stop: stop.clone(),
            items: Mutex::default(),
            permits,
            unwatched: TtlStore::new(client.clone(), node_ttl),
        }
    }

    /// Adds an object unless it is there. Without `is_started`, its first read starts the watch. Without
    /// `is_watchable`, no read does, and the object is read again in each sync of a pod and when its time to
    /// live has elapsed.
    pub(crate) fn add(&self, key: &Key, is_started: bool, is_watchable: bool) {
        let mut items = self.items.lock();
        if items.contains_key(key) {
            return;
        }
        let item = Arc::new(Item::new(key.clone(), is_watchable, Instant::now()));
        items.insert(key.clone(), Arc::clone(&item));
        self.unwatched.add(key);
        if is_started {
            self.start_if_stopped(&item);
        }
    }

    /// Records that a pod which refers to these objects is synced. The next read of each that has no watch is
    /// a request.
    pub(crate) fn synced<'a>(&self, keys: impl IntoIterator<Item = &'a Key>) {
        self.unwatched.synced(keys);
    }

    /// Removes an object and stops its watch.
    pub(crate) fn remove(&self, key: &Key) {
        let item = self.items.lock().remove(key);
        self.unwatched.remove(key);
        if let Some(item) = item {
            item.remove();
        }
    }

    /// Returns an object. Waits at most [`SYNC_WAIT`] if it has not been listed yet.
    ///
    /// Cancellation safety: a dropped read leaves the watch as it is.
    pub(crate) async fn get(&self, key: &Key) -> Result<Arc<K>, ObjectError> {
        let item = self.items.lock().get(key).cloned();
        let Some(item) = item else {
            return Err(ObjectError::NotRegistered {
                namespace: key.namespace.clone(),
                name: key.name.clone(),
            });
        };
        let mut content = item.subscribe();
        item.state.lock().last_read = Instant::now();
        if !self.start_if_stopped(&item) {
            return self.unwatched.get(key).await;
        }
        let synced = async {
            match content.wait_for(Content::is_synced).await {
                Ok(content) => content.object(),
                // The item has the sender.
                Err(_) => None,
            }
        };
        let object = match tokio::time::timeout(SYNC_WAIT, synced).await {
            Ok(object) => object,
            Err(_) => item.missed().ok_or(ObjectError::NotReady { kind: K::KIND })?,
        };
        let object = object.ok_or_else(|| ObjectError::NotFound { kind: K::KIND, name: key.name.clone() })?;
        if object.is_immutable() && item.keep(&object) {
            tracing::debug!(
                namespace = key.namespace,
                name = key.name,
                "object is immutable, stopped its watch"
            );
        }
        Ok(object)
    }

    /// Starts the watch of an object. Returns false if the object stays without one.
    fn start_if_stopped(&self, item: &Arc<Item<K>>) -> bool {
        let mut state = item.state.lock();
        match state.phase {
            Phase::Stopped => {}
            Phase::Watched(_) | Phase::Immutable | Phase::Removed => return true,
        }
        let permit = item.is_watchable.then(|| Arc::clone(&self.permits).try_acquire_owned().ok()).flatten();
        let Some(permit) = permit else { return false };
        let run = self.stop.child_token();
        state.phase = Phase::Watched(run.clone());
        let api = Api::namespaced(self.client.clone(), &item.key.namespace);
        let (changed, reachability) = (Arc::clone(&self.changed), Arc::clone(&self.reachability));
        let reflector = Reflector::new(api, Arc::clone(item), run, changed, reachability);
        // The token of the phase ends the task.
        drop(quintlet_kit::task::spawn("object-watch", async move {
            reflector.run().await;
            drop(permit);
        }));
        true
    }

    /// Stops the watches of objects that were not read for too long.
    pub(crate) fn stop_idle(&self) {
        let items: Vec<_> = self.items.lock().values().cloned().collect();
        for item in items {
            if item.stop_if_idle(self.max_idle) {
                let Key { namespace, name } = &item.key;
                tracing::debug!(namespace, name, idle = ?self.max_idle, "object is not read, stopped its watch");
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn watched(&self) -> std::collections::BTreeSet<Key> {
        let items = self.items.lock();
        let is_watched = |item: &Item<K>| matches!(item.state.lock().phase, Phase::Watched(_));
        items.values().filter(|item| is_watched(item)).map(|item| item.key.clone()).collect()
    }
}
