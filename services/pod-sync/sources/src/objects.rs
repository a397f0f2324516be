//! ConfigMaps and Secrets from manifests.

use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use parking_lot::RwLock;

type Key = (String, String);

/// ConfigMaps and Secrets from manifests, by namespace and name.
#[derive(Debug, Default)]
pub struct ManifestObjects {
    inner: RwLock<Maps>,
}

#[derive(Debug, Default)]
struct Maps {
    config_maps: HashMap<Key, Arc<ConfigMap>>,
    secrets: HashMap<Key, Arc<Secret>>,
}

fn key(meta: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) -> Key {
    (meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default())
}

impl ManifestObjects {
    /// Replaces all objects.
    pub fn set(&self, config_maps: Vec<ConfigMap>, secrets: Vec<Secret>) {
        let config_maps = config_maps.into_iter().map(|o| (key(&o.metadata), Arc::new(o))).collect();
        let secrets = secrets.into_iter().map(|o| (key(&o.metadata), Arc::new(o))).collect();
        *self.inner.write() = Maps { config_maps, secrets };
    }

    #[must_use]
    pub fn config_map(&self, namespace: &str, name: &str) -> Option<Arc<ConfigMap>> {
        self.inner.read().config_maps.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    #[must_use]
    pub fn secret(&self, namespace: &str, name: &str) -> Option<Arc<Secret>> {
        self.inner.read().secrets.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }
}
