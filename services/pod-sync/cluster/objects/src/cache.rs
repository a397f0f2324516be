//! The handle: registration of pods, and reads by the strategy of the node.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use kube::api::GetParams;
use parking_lot::Mutex;
use pod_sync_clients::WorkerWakeups;
use pod_sync_layout::{ObjectError, ObjectKind};
use quintlet_model::ids::PodUid;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::get::get;
use crate::kind::{Key, Kind};
use crate::references::References;
use crate::registry::Registry;
use crate::ttl::{NodeTtl, TtlStore};
use crate::watched::{MAX_WATCHED_PER_POD, MAX_WATCHES, WatchStore};

/// How changes of ConfigMaps and Secrets are detected (`configMapAndSecretChangeDetectionStrategy`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "PascalCase")]
pub enum ChangeDetectionStrategy {
    /// Each read is a request.
    Get,
    /// An object is read again when its time to live has elapsed.
    Cache,
    /// Each object is watched.
    #[default]
    Watch,
}

/// Settings of an [`ObjectCache`].
#[derive(Clone)]
pub struct ObjectCacheSettings {
    /// `configMapAndSecretChangeDetectionStrategy`.
    pub strategy: ChangeDetectionStrategy,
    /// Pod resync interval (`syncFrequency`).
    pub sync_frequency: Duration,
    /// Returns the time to live from the Node's annotation `node.alpha.kubernetes.io/ttl`, for
    /// [`ChangeDetectionStrategy::Cache`].
    pub node_ttl: NodeTtl,
}

impl std::fmt::Debug for ObjectCacheSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ObjectCacheSettings").field("strategy", &self.strategy).finish_non_exhaustive()
    }
}

/// The ConfigMaps and Secrets that the registered pods refer to.
#[derive(Debug)]
pub struct ObjectCache {
    config_maps: Objects<ConfigMap>,
    secrets: Objects<Secret>,
    pods: Arc<Pods>,
}

/// Registered pods by UID.
#[derive(Debug)]
struct Pods {
    wakes: Arc<WorkerWakeups>,
    registered: Mutex<HashMap<PodUid, Registered>>,
}

#[derive(Debug, Default)]
struct Registered {
    pod: Option<Arc<Pod>>,
    // Changes of its objects so far.
    changes: u64,
}

impl Pods {
    fn changed(&self, uids: impl Iterator<Item = PodUid>) {
        for uid in uids {
            if let Some(pod) = self.registered.lock().get_mut(&uid) {
                pod.changes = pod.changes.saturating_add(1);
            }
            self.wakes.wake(&uid);
        }
    }
}

impl ObjectCache {
    /// Returns a cache without pods. The cancellation of `stop` ends all watches.
    #[must_use]
    pub fn new(
        client: &kube::Client,
        settings: &ObjectCacheSettings,
        wakes: Arc<WorkerWakeups>,
        stop: &CancellationToken,
    ) -> Self {
        let pods = Arc::new(Pods { wakes, registered: Mutex::default() });
        let permits = Arc::new(Semaphore::new(MAX_WATCHES));
        Self {
            config_maps: Objects::new(client, settings, &pods, &permits, stop),
            secrets: Objects::new(client, settings, &pods, &permits, stop),
            pods,
        }
    }

    /// Registers a pod at the beginning of a sync, or takes over its new spec. Does not wait. Objects without
    /// a watch are read again by this sync. `is_local` says which objects another source has: these are not
    /// watched before they are read.
    pub fn register(&self, uid: &PodUid, pod: &Arc<Pod>, is_local: impl Fn(ObjectKind, &str) -> bool) {
        let is_known = {
            let mut registered = self.pods.registered.lock();
            let known = registered.entry(uid.clone()).or_default();
            known.pod.replace(Arc::clone(pod)).is_some_and(|known| Arc::ptr_eq(&known, pod))
        };
        if is_known {
            self.config_maps.synced(uid);
            return self.secrets.synced(uid);
        }
        let names = References::of(pod);
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        self.config_maps.register(uid, namespace, &names.config_maps, &is_local);
        self.secrets.register(uid, namespace, &names.secrets, &is_local);
    }

    /// Removes a pod, and the objects that no other pod refers to. Does nothing for a pod that is not
    /// registered.
    pub fn unregister(&self, uid: &PodUid) {
        self.pods.registered.lock().remove(uid);
        self.config_maps.unregister(uid);
        self.secrets.unregister(uid);
    }

    /// Returns a number that grows with every change of an object that a registered pod refers to. Only
    /// [`ChangeDetectionStrategy::Watch`] notices changes.
    #[must_use]
    pub fn changes(&self, uid: &PodUid) -> u64 {
        self.pods.registered.lock().get(uid).map_or(0, |pod| pod.changes)
    }

    /// Returns a ConfigMap.
    ///
    /// # Errors
    /// See [`ObjectError`]. Except with [`ChangeDetectionStrategy::Get`], a registered pod has to refer to
    /// the object.
    ///
    /// Cancellation safety: a dropped read has no effect.
    pub async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<ConfigMap>, ObjectError> {
        self.config_maps.get(&Key::new(namespace, name)).await
    }

    /// Returns a Secret. See [`Self::config_map`].
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<Secret>, ObjectError> {
        self.secrets.get(&Key::new(namespace, name)).await
    }

    /// Stops watches of objects that were not read for a long time, until `stop`. Their next read starts them
    /// again.
    pub async fn stop_idle_watches(self: Arc<Self>, stop: CancellationToken) {
        loop {
            // Both arms only wait.
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(crate::watched::IDLE_CHECK) => {}
            }
            self.config_maps.stop_idle();
            self.secrets.stop_idle();
        }
    }

    #[cfg(test)]
    pub(crate) fn watched(&self) -> (BTreeSet<Key>, BTreeSet<Key>) {
        (self.config_maps.watched(), self.secrets.watched())
    }
}

/// The objects of one kind.
struct Objects<K> {
    registry: Arc<Mutex<Registry>>,
    store: Store<K>,
}

impl<K> std::fmt::Debug for Objects<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Objects").field("registry", &self.registry).finish_non_exhaustive()
    }
}

enum Store<K> {
    Get(kube::Client),
    Cache(TtlStore<K>),
    Watch(Box<WatchStore<K>>),
}

impl<K: Kind> Objects<K> {
    fn new(
        client: &kube::Client,
        settings: &ObjectCacheSettings,
        pods: &Arc<Pods>,
        permits: &Arc<Semaphore>,
        stop: &CancellationToken,
    ) -> Self {
        let registry: Arc<Mutex<Registry>> = Arc::default();
        let store = match settings.strategy {
            ChangeDetectionStrategy::Get => Store::Get(client.clone()),
            ChangeDetectionStrategy::Cache => {
                Store::Cache(TtlStore::new(client.clone(), Arc::clone(&settings.node_ttl)))
            }
            ChangeDetectionStrategy::Watch => {
                let (pods, referrers) = (Arc::clone(pods), Arc::clone(&registry));
                let changed = move |key: &Key| {
                    let uids: Vec<PodUid> = referrers.lock().pods(key).cloned().collect();
                    pods.changed(uids.into_iter());
                };
                let limits = (Arc::clone(permits), Arc::clone(&settings.node_ttl));
                Store::Watch(Box::new(WatchStore::new(
                    client,
                    settings.sync_frequency,
                    Arc::new(changed),
                    limits,
                    stop,
                )))
            }
        };
        Self { registry, store }
    }

    fn register(
        &self,
        uid: &PodUid,
        namespace: &str,
        names: &BTreeSet<String>,
        is_local: &impl Fn(ObjectKind, &str) -> bool,
    ) {
        let is_watchable = names.len() <= MAX_WATCHED_PER_POD;
        let keys = names.iter().map(|name| Key::new(namespace, name)).collect();
        // The store changes in the order of the registry.
        let mut registry = self.registry.lock();
        let changes = registry.register(uid, keys);
        for key in &changes.added {
            match &self.store {
                Store::Get(_) => {}
                Store::Cache(store) => store.add(key),
                Store::Watch(store) => store.add(key, !is_local(K::KIND, &key.name), is_watchable),
            }
        }
        self.remove(&changes.unreferenced);
        drop(registry);
        self.synced(uid);
    }

    fn synced(&self, uid: &PodUid) {
        let registry = self.registry.lock();
        match &self.store {
            // With `Cache`, the time to live alone decides.
            Store::Get(_) | Store::Cache(_) => {}
            Store::Watch(store) => store.synced(registry.objects(uid)),
        }
    }

    fn unregister(&self, uid: &PodUid) {
        let mut registry = self.registry.lock();
        let unreferenced = registry.unregister(uid);
        self.remove(&unreferenced);
    }

    fn remove(&self, unreferenced: &[Key]) {
        for key in unreferenced {
            match &self.store {
                Store::Get(_) => {}
                Store::Cache(store) => store.remove(key),
                Store::Watch(store) => store.remove(key),
            }
        }
    }

    async fn get(&self, key: &Key) -> Result<Arc<K>, ObjectError> {
        match &self.store {
            Store::Get(client) => get(client, key, &GetParams::default()).await.map(Arc::new),
            Store::Cache(store) => store.get(key).await,
            Store::Watch(store) => store.get(key).await,
        }
    }

    fn stop_idle(&self) {
        match &self.store {
            Store::Get(_) | Store::Cache(_) => {}
            Store::Watch(store) => store.stop_idle(),
        }
    }

    #[cfg(test)]
    fn watched(&self) -> BTreeSet<Key> {
        match &self.store {
            Store::Get(_) | Store::Cache(_) => BTreeSet::new(),
            Store::Watch(store) => store.watched(),
        }
    }
}
