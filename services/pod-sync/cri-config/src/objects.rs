//! The API objects that a pod refers to, behind one trait.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{ConfigMap, Secret, Service};

/// Kind of an object, as its resource is written in messages.
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

    // The kubelet writes the kind of `no kubeClient` messages in another case.
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

/// Why an object cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ObjectError {
    /// There is none of that name. Only this is tolerated by `optional`.
    #[error("{} {name:?} not found", kind.singular())]
    NotFound {
        /// Kind.
        kind: ObjectKind,
        /// Name.
        name: String,
    },
    /// The first list has not come yet.
    #[error("failed to sync {} cache: timed out waiting for the condition", kind.singular())]
    NotReady {
        /// Kind.
        kind: ObjectKind,
    },
    /// The pod is not registered with the cache.
    #[error("object {namespace:?}/{name:?} not registered")]
    NotRegistered {
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
    },
    /// Standalone, and no manifest defines it.
    #[error("couldn't get {} {namespace}/{name}, no kubeClient defined", kind.camel())]
    NoClient {
        /// Kind.
        kind: ObjectKind,
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
    },
    /// The API server's answer.
    #[error("{0}")]
    Api(String),
}

impl ObjectError {
    /// No object of that name exists.
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

/// Where objects come from: manifests in standalone mode, watches elsewhere.
#[async_trait]
pub trait ObjectSource: Send + Sync {
    /// A ConfigMap.
    ///
    /// # Errors
    /// See [`ObjectError`].
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<ConfigMap>, ObjectError>;

    /// A Secret, with `stringData` already merged into `data` where it comes from a manifest.
    ///
    /// # Errors
    /// See [`ObjectError`].
    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<Secret>, ObjectError>;

    /// All services of a namespace; none in standalone mode.
    ///
    /// # Errors
    /// [`ObjectError::NotReady`] until the first list has come.
    async fn services(&self, namespace: &str) -> Result<Vec<Arc<Service>>, ObjectError>;

    /// The handler of a RuntimeClass. Without an API server there are no classes: the name is the handler's own, which
    /// the runtime refuses if it has none of it.
    ///
    /// # Errors
    /// There is no such class, or the first list has not come.
    async fn runtime_handler(&self, class: &str) -> Result<String, ObjectError> {
        Ok(class.to_owned())
    }

    /// The annotations of a service account, as the API server has them now.
    ///
    /// # Errors
    /// See [`ObjectError`]; there are none without an API server.
    async fn service_account_annotations(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<BTreeMap<String, String>, ObjectError> {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        Err(ObjectError::NoClient { kind: ObjectKind::ServiceAccount, namespace, name })
    }
}
