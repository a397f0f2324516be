//! Objects that are read again when their time to live has elapsed (`cache_based_manager.go`).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kube::api::GetParams;
use parking_lot::Mutex;
use pod_sync_layout::ObjectError;
use tokio::time::Instant;

use crate::get::get;
use crate::kind::{Key, Kind};

/// Time to live if the Node does not say one.
const DEFAULT_TTL: Duration = Duration::from_secs(60);

/// Returns the time to live that the Node says.
pub(crate) type NodeTtl = Arc<dyn Fn() -> Option<Duration> + Send + Sync>;

/// The last response for an object, and when it arrived. It may be a Secret, so there is no `Debug`.
struct Read<K> {
    object: Result<Arc<K>, ObjectError>,
    at: Instant,
    // The syncs of pods that had begun before the request.
    syncs: u64,
}

struct Item<K> {
    // Syncs of pods that refer to the object.
    syncs: AtomicU64,
    // Readers of one object wait for each other, so that one request serves them all.
    last: tokio::sync::Mutex<Option<Read<K>>>,
}

impl<K> Default for Item<K> {
    fn default() -> Self {
        Self { syncs: AtomicU64::new(0), last: tokio::sync::Mutex::new(None) }
    }
}

/// The objects of one kind.
pub(crate) struct TtlStore<K> {
    client: kube::Client,
    ttl: NodeTtl,
    items: Mutex<HashMap<Key, Arc<Item<K>>>>,
}

impl<K: Kind> TtlStore<K> {
    pub(crate) fn new(client: kube::Client, ttl: NodeTtl) -> Self {
        Self { client, ttl, items: Mutex::default() }
    }

    /// Adds a reference. The next read is a request.
    pub(crate) fn add(&self, key: &Key) {
        self.items.lock().insert(key.clone(), Arc::default());
    }

    /// Records that a pod which refers to these objects is synced: the next read of each is a request, as in
    /// the kubelet (`pkg/kubelet: SyncPod`, `RegisterPod`). So no container starts with an older version.
    pub(crate) fn synced<'a>(&self, keys: impl IntoIterator<Item = &'a Key>) {
        let items = self.items.lock();
        for item in keys.into_iter().filter_map(|key| items.get(key)) {
            item.syncs.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn remove(&self, key: &Key) {
        self.items.lock().remove(key);
    }

    pub(crate) async fn get(&self, key: &Key) -> Result<Arc<K>, ObjectError> {
        let Some(item) = self.items.lock().get(key).cloned() else {
            return Err(ObjectError::NotRegistered {
                namespace: key.namespace.clone(),
                name: key.name.clone(),
            });
        };
        let mut read = item.last.lock().await;
        let (ttl, syncs) = ((self.ttl)().unwrap_or(DEFAULT_TTL), item.syncs.load(Ordering::Relaxed));
        let is_of_sync = read.as_ref().is_some_and(|read| read.syncs == syncs);
        if let Some(Read { object: Ok(object), at, .. }) = &*read
            && is_of_sync
            && at.elapsed() < ttl
        {
            return Ok(Arc::clone(object));
        }
        // A repeated read may be answered from the cache of the API server.
        let known = read.as_ref().and_then(|read| read.object.as_ref().ok());
        let is_repeated = known.is_some() && is_of_sync;
        let params = if is_repeated { GetParams::any() } else { GetParams::default() };
        let fetched = get::<K>(&self.client, key, &params).await;
        let replaces = match (&fetched, known) {
            (Ok(new), Some(old)) => !is_older(new, old),
            (Ok(_), None) | (Err(ObjectError::NotFound { .. }), _) => true,
            (Err(_), _) => false,
        };
        if replaces {
            *read = Some(Read { object: fetched.map(Arc::new), at: Instant::now(), syncs });
        } else if read.is_none() {
            return fetched.map(Arc::new);
        }
        read.as_ref().map_or_else(|| Err(ObjectError::NotReady { kind: K::KIND }), |read| read.object.clone())
    }
}

/// Returns whether `new` is an older version than `old`. Versions that are no numbers count as zero.
fn is_older<K: Kind>(new: &K, old: &K) -> bool {
    let version = |object: &K| -> u64 {
        object.meta().resource_version.as_deref().and_then(|v| v.parse().ok()).unwrap_or_default()
    };
    version(new) < version(old)
}
