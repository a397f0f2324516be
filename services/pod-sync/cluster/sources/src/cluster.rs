//! Objects a pod refers to: from the manifests, else from the API server.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, Secret, Service, ServiceAccount};
use kube::api::{Api, PostParams};
use pod_sync_clients::{REQUEST_TIMEOUT, WorkerWakeups, retry_on_lag};
use pod_sync_layout::{ObjectError, ObjectKind, ObjectSource, Token, TokenError, TokenKey, TokenSource};
use pod_sync_objects::{ChangeDetectionStrategy, ObjectCache, ObjectCacheSettings};
use quintlet_model::ids::PodUid;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::api::ClusterView;
use crate::objects::ManifestObjects;

/// Annotation of the Node with the time to live of cached objects, in seconds
/// (`k8s.io/api/core/v1: ObjectTTLAnnotationKey`).
const TTL_ANNOTATION: &str = "node.alpha.kubernetes.io/ttl";

/// Returns the time to live that the Node says for cached objects; zero if it is negative.
fn object_ttl(node: &Node) -> Option<Duration> {
    let seconds: i64 = node.metadata.annotations.as_ref()?.get(TTL_ANNOTATION)?.parse().ok()?;
    Some(quintlet_kit::clock::seconds(seconds))
}

/// Objects that pods refer to: from the manifests, else from the API server if there is one.
#[derive(Debug)]
pub struct Objects {
    manifests: Arc<ManifestObjects>,
    api: Option<ApiSources>,
}

/// The sources of objects of the API server.
pub struct ApiSources {
    /// Client of the API server.
    pub client: kube::Client,
    /// Node, Services and RuntimeClasses.
    pub view: Arc<ClusterView>,
    /// ConfigMaps and Secrets of the node's pods.
    pub cache: Arc<ObjectCache>,
}

impl ApiSources {
    /// Returns the objects of an API server. Changes are detected by the strategy, and wake pods. `detection`
    /// is the strategy and the pod resync interval. The cancellation of `stop` ends all watches.
    #[must_use]
    pub fn new(
        client: kube::Client,
        view: &Arc<ClusterView>,
        detection: (ChangeDetectionStrategy, Duration),
        wakes: &Arc<WorkerWakeups>,
        stop: &CancellationToken,
    ) -> Self {
        let (strategy, sync_frequency) = detection;
        let of_node = Arc::clone(view);
        let node_ttl = Arc::new(move || of_node.node().and_then(|node| object_ttl(&node)));
        let settings = ObjectCacheSettings { strategy, sync_frequency, node_ttl };
        let cache = Arc::new(ObjectCache::new(&client, &settings, Arc::clone(wakes), stop));
        Self { client, view: Arc::clone(view), cache }
    }
}

impl std::fmt::Debug for ApiSources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiSources").field("cache", &self.cache).finish_non_exhaustive()
    }
}

impl Objects {
    /// Returns the objects of these manifests and of an API server.
    #[must_use]
    pub fn new(manifests: Arc<ManifestObjects>, api: Option<ApiSources>) -> Self {
        Self { manifests, api }
    }

    fn api(&self, kind: ObjectKind, namespace: &str, name: &str) -> Result<&ApiSources, ObjectError> {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        self.api.as_ref().ok_or(ObjectError::NoClient { kind, namespace, name })
    }
}

#[async_trait]
impl ObjectSource for Objects {
    fn register(&self, uid: &PodUid, pod: &Arc<Pod>) {
        self.manifests.register(uid, pod);
        let Some(api) = &self.api else { return };
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let is_static = quintlet_model::pod::is_static(pod);
        api.cache.register(uid, pod, |kind, name| {
            is_static
                || match kind {
                    ObjectKind::ConfigMap => self.manifests.config_map(namespace, name).is_some(),
                    ObjectKind::Secret => self.manifests.secret(namespace, name).is_some(),
                    ObjectKind::Service | ObjectKind::RuntimeClass | ObjectKind::ServiceAccount => false,
                }
        });
    }

    fn unregister(&self, uid: &PodUid) {
        self.manifests.unregister(uid);
        if let Some(api) = &self.api {
            api.cache.unregister(uid);
        }
    }

    fn changes(&self, uid: &PodUid) -> u64 {
        let of_api = self.api.as_ref().map_or(0, |api| api.cache.changes(uid));
        self.manifests.changes(uid).saturating_add(of_api)
    }

    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<ConfigMap>, ObjectError> {
        match self.manifests.config_map(namespace, name) {
            Some(found) => Ok(found),
            None => self.api(ObjectKind::ConfigMap, namespace, name)?.cache.config_map(namespace, name).await,
        }
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<Secret>, ObjectError> {
        match self.manifests.secret(namespace, name) {
            Some(found) => Ok(found),
            None => self.api(ObjectKind::Secret, namespace, name)?.cache.secret(namespace, name).await,
        }
    }

    async fn services(&self, namespace: &str) -> Result<Vec<Arc<Service>>, ObjectError> {
        let Some(api) = &self.api else { return Ok(Vec::new()) };
        let all = api.view.services().ok_or(ObjectError::NotReady { kind: ObjectKind::Service })?;
        Ok(all.iter().filter(|s| s.metadata.namespace.as_deref() == Some(namespace)).cloned().collect())
    }

    async fn runtime_handler(&self, class: &str) -> Result<String, ObjectError> {
        let Some(api) = &self.api else { return Ok(class.to_owned()) };
        let kind = ObjectKind::RuntimeClass;
        let handler = api.view.runtime_handler(class).ok_or(ObjectError::NotReady { kind })?;
        handler.ok_or_else(|| ObjectError::NotFound { kind, name: class.to_owned() })
    }

    async fn service_account_annotations(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<BTreeMap<String, String>, ObjectError> {
        let kind = ObjectKind::ServiceAccount;
        let client = self.api(kind, namespace, name)?.client.clone();
        let api = Api::<ServiceAccount>::namespaced(client, namespace);
        match retry_on_lag(REQUEST_TIMEOUT, || api.get_opt(name)).await {
            Ok(Some(account)) => Ok(account.metadata.annotations.unwrap_or_default()),
            Ok(None) => Err(ObjectError::NotFound { kind, name: name.to_owned() }),
            Err(e) => Err(ObjectError::Api(e.to_string())),
        }
    }
}

/// Concurrent requests for tokens. With HTTP/1.1 each takes a connection.
const TOKEN_REQUESTS: usize = 16;

/// Service account tokens by TokenRequest.
pub struct Tokens {
    client: kube::Client,
    slots: Semaphore,
}

impl Tokens {
    /// Returns a source of service account tokens. At most `TOKEN_REQUESTS` requests are in flight.
    #[must_use]
    pub fn new(client: kube::Client) -> Self {
        Self { client, slots: Semaphore::new(TOKEN_REQUESTS) }
    }
}

#[async_trait]
impl TokenSource for Tokens {
    async fn request(&self, key: &TokenKey) -> Result<Token, TokenError> {
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
                ..TokenRequestSpec::default()
            }),
            ..TokenRequest::default()
        };
        let api = Api::<ServiceAccount>::namespaced(self.client.clone(), &key.namespace);
        let params = PostParams::default();
        // The semaphore is never closed.
        let _slot = self.slots.acquire().await;
        let made = retry_on_lag(REQUEST_TIMEOUT, || {
            api.create_token_request(&key.service_account, &params, &request)
        })
        .await
        .map_err(|e| TokenError::Api(e.to_string()))?;
        let status = made.status.unwrap_or_default();
        let (Some(token), Some(expires)) = (status.token, status.expiration_timestamp) else {
            return Err(TokenError::Missing);
        };
        let granted = made.spec.and_then(|s| s.expiration_seconds);
        Ok(Token { token, expires: expires.0, expiration_seconds: granted.unwrap_or(key.expiration_seconds) })
    }
}

#[cfg(test)]
mod tests {
    use quintlet_testapi::{Failure, TestApi};
    use serde_json::json;

    use super::*;

    fn objects(api: &TestApi) -> Objects {
        let detection = (ChangeDetectionStrategy::Get, Duration::from_secs(60));
        let stop = CancellationToken::new();
        let api = ApiSources::new(api.client(), &Arc::default(), detection, &Arc::default(), &stop);
        Objects::new(Arc::default(), Some(api))
    }

    fn make(api: &TestApi, resource: &str, name: &str) {
        api.create(resource, "default", json!({"metadata": {"name": name}})).unwrap();
    }

    fn key(api: &TestApi) -> TokenKey {
        let pod = api.create_pod(json!({
            "metadata": {"name": "p"}, "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "i:1"}]},
        }));
        TokenKey {
            namespace: "default".to_owned(),
            service_account: "default".to_owned(),
            audiences: Vec::new(),
            expiration_seconds: 3607,
            pod_name: "p".to_owned(),
            pod_uid: pod["metadata"]["uid"].as_str().unwrap().to_owned(),
        }
    }

    #[tokio::test]
    async fn a_refusal_because_the_server_does_not_know_the_pod_yet_is_retried() {
        let api = TestApi::start().await;
        make(&api, "configmaps", "c");
        make(&api, "secrets", "s");
        let (objects, key) = (objects(&api), key(&api));
        for requests in ["get configmaps", "get secrets", "create serviceaccounts/token"] {
            api.faults().fail(requests, 4, Failure::Forbidden);
        }
        objects.config_map("default", "c").await.unwrap();
        objects.secret("default", "s").await.unwrap();
        Tokens::new(api.client()).request(&key).await.unwrap();
    }

    #[tokio::test]
    async fn a_lasting_refusal_has_the_text_of_the_server() {
        let api = TestApi::start().await;
        let key = key(&api);
        api.faults().fail("*", 100, Failure::Forbidden);
        let error = objects(&api).secret("default", "s").await.unwrap_err();
        assert_eq!(error.to_string(), "secrets \"s\" is forbidden: on demand");
        let error = Tokens::new(api.client()).request(&key).await.unwrap_err();
        assert_eq!(error.to_string(), "serviceaccounts \"default\" is forbidden: on demand");
    }

    #[test]
    fn the_time_to_live_of_objects_is_an_annotation_of_the_node() {
        for (value, ttl) in [("15", Some(15)), ("0", Some(0)), ("-1", Some(0)), ("15s", None), ("", None)] {
            let node = json!({"metadata": {"annotations": {TTL_ANNOTATION: value}}});
            let node: Node = serde_json::from_value(node).unwrap();
            assert_eq!(object_ttl(&node), ttl.map(Duration::from_secs), "{value}");
        }
        assert_eq!(object_ttl(&Node::default()), None);
    }
}
