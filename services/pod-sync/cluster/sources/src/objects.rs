//! ConfigMaps and Secrets from manifests.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use parking_lot::{Mutex, RwLock};
use pod_sync_clients::WorkerWakeups;
use pod_sync_objects::References;
use quintlet_model::ids::PodUid;

type Key = (String, String);

/// ConfigMaps and Secrets from manifests, by namespace and name.
#[derive(Debug, Default)]
pub struct ManifestObjects {
    inner: RwLock<Maps>,
    pods: Mutex<HashMap<PodUid, Registered>>,
    wakes: Arc<WorkerWakeups>,
}

/// A pod whose objects may change.
#[derive(Debug, Default)]
struct Registered {
    pod: Option<Arc<Pod>>,
    /// Changes of its objects so far.
    changes: u64,
}

impl Registered {
    fn refers_to(&self, config_maps: &BTreeSet<Key>, secrets: &BTreeSet<Key>) -> bool {
        let Some(pod) = &self.pod else { return false };
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let names = References::of(pod);
        let has = |changed: &BTreeSet<Key>, names: &BTreeSet<String>| {
            names.iter().any(|name| changed.contains(&(namespace.clone(), name.clone())))
        };
        has(config_maps, &names.config_maps) || has(secrets, &names.secrets)
    }
}

#[derive(Debug, Default)]
struct Maps {
    config_maps: HashMap<Key, Arc<ConfigMap>>,
    secrets: HashMap<Key, Arc<Secret>>,
}

fn key(meta: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) -> Key {
    (meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default())
}

/// Returns the keys of objects that were added, removed or changed.
fn changed<T: PartialEq>(before: &HashMap<Key, T>, after: &HashMap<Key, T>) -> BTreeSet<Key> {
    let all = before.keys().chain(after.keys());
    all.filter(|key| before.get(*key) != after.get(*key)).cloned().collect()
}

impl ManifestObjects {
    /// Returns an empty set of objects whose changes wake the workers of pods.
    #[must_use]
    pub fn new(wakes: Arc<WorkerWakeups>) -> Self {
        Self { wakes, ..Self::default() }
    }

    /// Replaces all objects. Wakes the pods whose objects were added, removed or changed.
    pub fn set(&self, config_maps: Vec<ConfigMap>, secrets: Vec<Secret>) {
        let config_maps = config_maps.into_iter().map(|o| (key(&o.metadata), Arc::new(o))).collect();
        let secrets = secrets.into_iter().map(|o| (key(&o.metadata), Arc::new(o))).collect();
        let before = std::mem::replace(&mut *self.inner.write(), Maps { config_maps, secrets });
        let (config_maps, secrets) = {
            let after = self.inner.read();
            (changed(&before.config_maps, &after.config_maps), changed(&before.secrets, &after.secrets))
        };
        if config_maps.is_empty() && secrets.is_empty() {
            return;
        }
        for (uid, pod) in &mut *self.pods.lock() {
            if pod.refers_to(&config_maps, &secrets) {
                pod.changes = pod.changes.saturating_add(1);
                self.wakes.wake(uid);
            }
        }
    }

    /// Registers a pod, or takes over its new spec.
    pub fn register(&self, uid: &PodUid, pod: &Arc<Pod>) {
        self.pods.lock().entry(uid.clone()).or_default().pod = Some(Arc::clone(pod));
    }

    /// Removes a pod. Does nothing for a pod that is not registered.
    pub fn unregister(&self, uid: &PodUid) {
        self.pods.lock().remove(uid);
    }

    /// Returns a number that grows with every change of an object that a registered pod refers to.
    #[must_use]
    pub fn changes(&self, uid: &PodUid) -> u64 {
        self.pods.lock().get(uid).map_or(0, |pod| pod.changes)
    }

    /// Returns a ConfigMap from the manifests; `None` if no manifest has it.
    #[must_use]
    pub fn config_map(&self, namespace: &str, name: &str) -> Option<Arc<ConfigMap>> {
        self.inner.read().config_maps.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    /// Returns a Secret from the manifests; `None` if no manifest has it.
    #[must_use]
    pub fn secret(&self, namespace: &str, name: &str) -> Option<Arc<Secret>> {
        self.inner.read().secrets.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }
}

#[cfg(test)]
mod tests {
    use quintlet_testkit::pods::pod_of;
    use serde_json::{Value, json};

    use super::*;

    fn config_map(name: &str, value: &str) -> ConfigMap {
        serde_json::from_value(
            json!({"metadata": {"name": name, "namespace": "default"}, "data": {"k": value}}),
        )
        .unwrap()
    }

    fn mounting(source: Value) -> Arc<Pod> {
        let mut volume = json!({"name": "v"});
        volume.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
        let containers = json!([{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]);
        Arc::new(pod_of(json!({"containers": containers, "volumes": [volume]})))
    }

    #[test]
    fn a_changed_object_counts_for_the_pods_that_refer_to_it_and_an_unchanged_one_for_none() {
        let objects = ManifestObjects::default();
        let [a, b] = ["a", "b"].map(|uid| PodUid::parse(uid).unwrap());
        objects.register(&a, &mounting(json!({"configMap": {"name": "x"}})));
        objects.register(&b, &mounting(json!({"secret": {"secretName": "x"}})));
        let changes = || (objects.changes(&a), objects.changes(&b));
        let secret = || -> Secret {
            serde_json::from_value(json!({"metadata": {"name": "x", "namespace": "default"}})).unwrap()
        };
        objects.set(vec![config_map("x", "1")], Vec::new());
        assert_eq!(changes(), (1, 0));
        objects.set(vec![config_map("x", "1"), config_map("y", "1")], vec![secret()]);
        assert_eq!(changes(), (1, 1));
        objects.set(vec![config_map("x", "2")], vec![secret()]);
        assert_eq!(changes(), (2, 1));
        objects.set(Vec::new(), vec![secret()]);
        assert_eq!(changes(), (3, 1));
        objects.unregister(&a);
        assert_eq!(changes(), (0, 1));
    }
}
