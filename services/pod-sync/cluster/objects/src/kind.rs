//! The kinds of objects.

use std::fmt::Debug;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Resource;
use pod_sync_layout::ObjectKind;
use serde::de::DeserializeOwned;

/// Namespace and name of an object of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl Key {
    pub(crate) fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned() }
    }
}

/// A kind of objects that pods refer to.
pub(crate) trait Kind:
    Resource<Scope = NamespaceResourceScope, DynamicType = ()>
    + Clone
    + Debug
    + DeserializeOwned
    + Send
    + Sync
    + 'static
{
    const KIND: ObjectKind;

    fn is_immutable(&self) -> bool;
}

impl Kind for ConfigMap {
    const KIND: ObjectKind = ObjectKind::ConfigMap;

    fn is_immutable(&self) -> bool {
        self.immutable == Some(true)
    }
}

impl Kind for Secret {
    const KIND: ObjectKind = ObjectKind::Secret;

    fn is_immutable(&self) -> bool {
        self.immutable == Some(true)
    }
}
