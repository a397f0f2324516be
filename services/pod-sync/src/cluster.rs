//! Objects a pod refers to: from the manifests, else from the API server.

use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{ConfigMap, Secret, Service, ServiceAccount};
use kube::api::{Api, PostParams};

use crate::build::objects::{ObjectError, ObjectKind, ObjectSource};
use crate::source::api::ClusterView;
use crate::source::objects::ManifestObjects;
use crate::volumes::token::{Token, TokenKey, TokenSource};

/// Asks the manifests first, then the API server where there is one.
pub struct Objects {
    manifests: Arc<ManifestObjects>,
    client: Option<kube::Client>,
    view: Arc<ClusterView>,
}

impl std::fmt::Debug for Objects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Objects").field("api", &self.client.is_some()).finish_non_exhaustive()
    }
}

impl Objects {
    /// Objects of these manifests and this API server.
    #[must_use]
    pub fn new(
        manifests: Arc<ManifestObjects>,
        client: Option<kube::Client>,
        view: Arc<ClusterView>,
    ) -> Self {
        Self { manifests, client, view }
    }

    async fn get<K>(&self, kind: ObjectKind, namespace: &str, name: &str) -> Result<Arc<K>, ObjectError>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + serde::de::DeserializeOwned,
    {
        let Some(client) = self.client.clone() else {
            return Err(ObjectError::NoClient {
                kind,
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            });
        };
        match Api::<K>::namespaced(client, namespace).get_opt(name).await {
            Ok(Some(object)) => Ok(Arc::new(object)),
            Ok(None) => Err(ObjectError::NotFound { kind, name: name.to_owned() }),
            Err(e) => Err(ObjectError::Api(quintlet_kit::error_chain(&e))),
        }
    }
}

#[async_trait]
impl ObjectSource for Objects {
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<ConfigMap>, ObjectError> {
        match self.manifests.config_map(namespace, name) {
            Some(found) => Ok(found),
            None => self.get(ObjectKind::ConfigMap, namespace, name).await,
        }
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<Secret>, ObjectError> {
        match self.manifests.secret(namespace, name) {
            Some(found) => Ok(found),
            None => self.get(ObjectKind::Secret, namespace, name).await,
        }
    }

    async fn services(&self, namespace: &str) -> Result<Vec<Arc<Service>>, ObjectError> {
        if self.client.is_none() {
            return Ok(Vec::new());
        }
        let all = self.view.services().ok_or(ObjectError::NotReady { kind: ObjectKind::Service })?;
        Ok(all.iter().filter(|s| s.metadata.namespace.as_deref() == Some(namespace)).cloned().collect())
    }
}

/// Service account tokens by TokenRequest.
pub struct Tokens(pub kube::Client);

#[async_trait]
impl TokenSource for Tokens {
    async fn request(&self, key: &TokenKey) -> Result<Token, String> {
        let request = TokenRequest {
            spec: Some(TokenRequestSpec {
                audiences: Some(key.audiences.clone()),
                expiration_seconds: Some(key.expiration_seconds),
                bound_object_ref: Some(BoundObjectReference {
                    api_version: Some("v1".to_owned()),
                    kind: Some("Pod".to_owned()),
                    name: Some(key.pod_name.clone()),
                    uid: Some(key.pod_uid.clone()),
                }),
            }),
            ..TokenRequest::default()
        };
        let api = Api::<ServiceAccount>::namespaced(self.0.clone(), &key.namespace);
        let made = api
            .create_token_request(&key.service_account, &PostParams::default(), &request)
            .await
            .map_err(|e| quintlet_kit::error_chain(&e))?;
        let status = made.status.unwrap_or_default();
        let (Some(token), Some(expires)) = (status.token, status.expiration_timestamp) else {
            return Err("the API server gave no token".to_owned());
        };
        let granted = made.spec.and_then(|s| s.expiration_seconds);
        Ok(Token { token, expires: expires.0, expiration_seconds: granted.unwrap_or(key.expiration_seconds) })
    }
}
