//! Access to API objects that pods refer to.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret, Service};
use quintlet_model::ids::PodUid;

/// Kind of an object, as in error messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectKind {
    /// `configmap`
    ConfigMap,
    /// `secret`
    Secret,
    /// `services`
    Service,
    /// `runtimeclass.node.k8s.io`
    RuntimeClass,
    /// `serviceaccount`
    ServiceAccount,
}

impl ObjectKind {
    fn singular(self) -> &'static str {
        match self {
            Self::ConfigMap => "configmap",
            Self::Secret => "secret",
            Self::Service => "service",
            Self::RuntimeClass => "runtimeclass.node.k8s.io",
            Self::ServiceAccount => "serviceaccount",
        }
    }

    // The kubelet spells the kind in `no kubeClient` messages in another way.
    fn camel(self) -> &'static str {
        match self {
            Self::ConfigMap => "configMap",
            Self::Secret => "secret",
            Self::Service => "service",
            Self::RuntimeClass => "runtimeClass",
            Self::ServiceAccount => "serviceAccount",
        }
    }
}

/// Reason why an object is not available.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ObjectError {
    /// The object does not exist. `optional` references tolerate only this error.
    #[error("{} {name:?} not found", kind.singular())]
    NotFound {
        /// Kind of the object.
        kind: ObjectKind,
        /// Name of the object, which is in the namespace of the pod.
        name: String,
    },
    /// The first list has not been received.
    #[error("failed to sync {} cache: timed out waiting for the condition", kind.singular())]
    NotReady {
        /// Kind of the object.
        kind: ObjectKind,
    },
    /// The object cache does not have the pod.
    #[error("object {namespace:?}/{name:?} not registered")]
    NotRegistered {
        /// Namespace of the object and of the pods.
        namespace: String,
        /// Name of the object.
        name: String,
    },
    /// There is no API server, and no manifest defines the object.
    #[error("couldn't get {} {namespace}/{name}, no kubeClient defined", kind.camel())]
    NoClient {
        /// Kind of the object.
        kind: ObjectKind,
        /// Namespace of the object and of the pod.
        namespace: String,
        /// Name of the object.
        name: String,
    },
    /// Error of the API server.
    #[error("{0}")]
    Api(String),
}

impl ObjectError {
    /// Returns whether the object does not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        match self {
            Self::NotFound { .. } => true,
            Self::NotReady { .. } | Self::NotRegistered { .. } | Self::NoClient { .. } | Self::Api(_) => {
                false
            }
        }
    }
}

/// A source of API objects: manifests without an API server, watches with one.
#[async_trait]
pub trait ObjectSource: Send + Sync {
    /// Registers a pod, or takes over its new spec: its ConfigMaps and Secrets are about to be read. Does not
    /// wait.
    fn register(&self, _uid: &PodUid, _pod: &Arc<Pod>) {}

    /// Removes a pod whose ConfigMaps and Secrets are not read any more.
    fn unregister(&self, _uid: &PodUid) {}

    /// Returns a number that grows when a ConfigMap or Secret of a registered pod changes and has to be read
    /// again.
    fn changes(&self, _uid: &PodUid) -> u64 {
        0
    }

    /// Returns a ConfigMap.
    ///
    /// # Errors
    /// See [`ObjectError`].
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<ConfigMap>, ObjectError>;

    /// Returns a Secret. If it comes from a manifest, `stringData` is merged into `data`.
    ///
    /// # Errors
    /// See [`ObjectError`].
    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<Secret>, ObjectError>;

    /// Returns all services of a namespace; none without an API server.
    ///
    /// # Errors
    /// [`ObjectError::NotReady`] until the first list was received.
    async fn services(&self, namespace: &str) -> Result<Vec<Arc<Service>>, ObjectError>;

    /// Returns the handler of a RuntimeClass. Without an API server the name is that of the handler, and the
    /// runtime rejects an unknown one.
    ///
    /// # Errors
    /// The class does not exist, or the first list was not received.
    async fn runtime_handler(&self, class: &str) -> Result<String, ObjectError> {
        Ok(class.to_owned())
    }

    /// Reads the annotations of a service account from the API server.
    ///
    /// # Errors
    /// See [`ObjectError`]. There are none without an API server.
    async fn service_account_annotations(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<BTreeMap<String, String>, ObjectError> {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        Err(ObjectError::NoClient { kind: ObjectKind::ServiceAccount, namespace, name })
    }
}
