//! Objects that are watched one by one (`watch_based_manager.go`).

mod item;
mod reachability;
mod reflector;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kube::api::Api;
use parking_lot::Mutex;
use pod_sync_cri_config::objects::ObjectError;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::item::{Content, Item, Phase};
use self::reachability::Reachability;
use self::reflector::Reflector;
use crate::kind::{Key, Kind};

/// Longest wait of a read for the first list of its object.
const SYNC_WAIT: Duration = Duration::from_secs(1);
/// Interval between checks for watches of objects that are not read.
pub(crate) const IDLE_CHECK: Duration = Duration::from_secs(60);
/// Shortest time without a read that ends a watch.
const MIN_IDLE: Duration = Duration::from_secs(60);
/// The same in sync periods. Volumes read their objects in each period, so only objects of variables become idle.
const IDLE_PERIODS: u32 = 5;

/// Called after each change of an object, at most every [`reflector::NOTIFY_INTERVAL`].
pub(crate) type Changed = Arc<dyn Fn(&Key) + Send + Sync>;

/// The objects of one kind.
pub(crate) struct WatchStore<K> {
    client: kube::Client,
    max_idle: Duration,
    changed: Changed,
    reachability: Arc<Reachability>,
    stop: CancellationToken,
    items: Mutex<HashMap<Key, Arc<Item<K>>>>,
}

impl<K: Kind> WatchStore<K> {
    pub(crate) fn new(
        client: &kube::Client,
        sync_frequency: Duration,
        changed: Changed,
        stop: &CancellationToken,
    ) -> Self {
        Self {
            client: client.clone(),
            max_idle: sync_frequency.saturating_mul(IDLE_PERIODS).max(MIN_IDLE),
            changed,
            reachability: Arc::default(),
            stop: stop.clone(),
            items: Mutex::default(),
        }
    }

    /// Adds an object unless it is there. Without `is_started`, its first read starts the watch.
    pub(crate) fn add(&self, key: &Key, is_started: bool) {
        let mut items = self.items.lock();
        if items.contains_key(key) {
            return;
        }
        let item = Arc::new(Item::new(key.clone(), Instant::now()));
        items.insert(key.clone(), Arc::clone(&item));
        if is_started {
            self.start_if_stopped(&item);
        }
    }

    /// Removes an object and stops its watch.
    pub(crate) fn remove(&self, key: &Key) {
        let item = self.items.lock().remove(key);
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
        self.start_if_stopped(&item);
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

    fn start_if_stopped(&self, item: &Arc<Item<K>>) {
        let mut state = item.state.lock();
        match state.phase {
            Phase::Stopped => {}
            Phase::Watched(_) | Phase::Immutable | Phase::Removed => return,
        }
        let run = self.stop.child_token();
        state.phase = Phase::Watched(run.clone());
        let api = Api::namespaced(self.client.clone(), &item.key.namespace);
        let (changed, reachability) = (Arc::clone(&self.changed), Arc::clone(&self.reachability));
        let reflector = Reflector::new(api, Arc::clone(item), run, changed, reachability);
        // The token of the phase ends the task.
        drop(quintlet_kit::task::spawn("object-watch", reflector.run()));
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
