//! Objects a pod refers to: from the manifests, else from the API server.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{ConfigMap, Secret, Service, ServiceAccount};
use kube::api::{Api, PostParams};
use parking_lot::Mutex;
use pod_sync_cri_config::objects::{ObjectError, ObjectKind, ObjectSource};
use pod_sync_volumes::token::{Token, TokenError, TokenKey, TokenSource};
use tokio::time::Instant;

use crate::api::ClusterView;
use crate::objects::ManifestObjects;

/// The API server's authorizer and admission follow the pods by watches of their own. Just after a pod came they may
/// not know that it is this node's, and refuse what it needs: that is asked again after these pauses.
const LAG: [Duration; 5] = [
    Duration::from_millis(10),
    Duration::from_millis(30),
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(400),
];

/// How long an object is kept that nobody asks for. Pods are looked at about once a minute, so what they refer to is
/// asked for more often.
const KEEP: Duration = Duration::from_secs(600);

/// How long one answer is waited for.
pub const ANSWER: Duration = Duration::from_secs(10);
/// The same where what was last read can stand in.
const ANSWER_OR_KEPT: Duration = Duration::from_secs(1);
/// For how long a server that did not answer is not asked for what is kept: a pod may refer to many objects.
const SILENCE: Duration = Duration::from_secs(10);

/// Why there is no answer, in words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoAnswer {
    #[error("{0}")]
    Refused(String),
    #[error("the API server did not answer within {}", humantime::format_duration(*.0))]
    Silent(Duration),
}

/// Repeats a request while the answer is a refusal that may be due to the server's lag behind its pods. Each answer may take
/// `limit`.
///
/// # Errors
/// Returns the last refusal, or that the server did not answer in time.
pub async fn past_lag<T, F>(limit: Duration, mut ask: impl FnMut() -> F) -> Result<T, NoAnswer>
where
    F: Future<Output = kube::Result<T>>,
{
    let mut pauses = LAG.into_iter();
    loop {
        match tokio::time::timeout(limit, ask()).await {
            Err(_) => return Err(NoAnswer::Silent(limit)),
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => match (&error, pauses.next()) {
                (kube::Error::Api(status), Some(pause)) if may_be_lag(status) => {
                    tokio::time::sleep(pause).await;
                }
                _ => return Err(NoAnswer::Refused(said(&error))),
            },
        }
    }
}

fn may_be_lag(status: &kube::core::Status) -> bool {
    // Its storage says pods, its NodeRestriction pod.
    let of_pod =
        || status.details.as_ref().is_some_and(|details| matches!(details.kind.as_str(), "pods" | "pod"));
    status.code == 403 || status.code == 404 && of_pod()
}

/// The API server's own words where it answered.
fn said(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => quintlet_kit::error_chain(other),
    }
}

/// Namespace and name.
type Key = (String, String);

/// Objects as last read and when they were last asked for, for when the API server cannot be asked.
struct Kept<K>(Mutex<HashMap<Key, (Arc<K>, Instant)>>);

impl<K> Default for Kept<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K> Kept<K> {
    /// Takes in an answer. Without one what was last read stands in; what the server says is gone is gone.
    fn settle(
        &self,
        kind: ObjectKind,
        namespace: &str,
        name: &str,
        answer: Result<Option<K>, NoAnswer>,
    ) -> Result<Arc<K>, ObjectError> {
        let now = Instant::now();
        let mut kept = self.0.lock();
        let key = (namespace.to_owned(), name.to_owned());
        match answer {
            Ok(Some(object)) => {
                kept.retain(|_, (_, used)| now.duration_since(*used) < KEEP);
                let object = Arc::new(object);
                kept.insert(key, (Arc::clone(&object), now));
                Ok(object)
            }
            Ok(None) => {
                kept.remove(&key);
                Err(ObjectError::NotFound { kind, name: name.to_owned() })
            }
            Err(error) => match kept.get_mut(&key) {
                Some((object, used)) => {
                    tracing::debug!(namespace, name, %error, "the object as last read stands in");
                    *used = now;
                    Ok(Arc::clone(object))
                }
                None => Err(ObjectError::Api(error.to_string())),
            },
        }
    }

    fn has(&self, namespace: &str, name: &str) -> bool {
        self.0.lock().contains_key(&(namespace.to_owned(), name.to_owned()))
    }
}

/// Asks the manifests first, then the API server where there is one.
pub struct Objects {
    manifests: Arc<ManifestObjects>,
    client: Option<kube::Client>,
    view: Arc<ClusterView>,
    config_maps: Kept<ConfigMap>,
    secrets: Kept<Secret>,
    // When the API server was last asked and did not answer in time.
    silent: Mutex<Option<Instant>>,
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
        let (config_maps, secrets) = (Kept::default(), Kept::default());
        Self { manifests, client, view, config_maps, secrets, silent: Mutex::default() }
    }

    async fn get<K>(
        &self,
        kept: &Kept<K>,
        kind: ObjectKind,
        namespace: &str,
        name: &str,
    ) -> Result<Arc<K>, ObjectError>
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
        let api = Api::<K>::namespaced(client, namespace);
        let limit = if kept.has(namespace, name) { ANSWER_OR_KEPT } else { ANSWER };
        let is_silent = self.silent.lock().is_some_and(|at| at.elapsed() < SILENCE);
        let answer = if is_silent && limit == ANSWER_OR_KEPT {
            Err(NoAnswer::Silent(limit))
        } else {
            let answer = past_lag(limit, || api.get_opt(name)).await;
            let is_silent = matches!(answer, Err(NoAnswer::Silent(_)));
            *self.silent.lock() = is_silent.then(Instant::now);
            answer
        };
        kept.settle(kind, namespace, name, answer)
    }
}

#[async_trait]
impl ObjectSource for Objects {
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<ConfigMap>, ObjectError> {
        match self.manifests.config_map(namespace, name) {
            Some(found) => Ok(found),
            None => self.get(&self.config_maps, ObjectKind::ConfigMap, namespace, name).await,
        }
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<Secret>, ObjectError> {
        match self.manifests.secret(namespace, name) {
            Some(found) => Ok(found),
            None => self.get(&self.secrets, ObjectKind::Secret, namespace, name).await,
        }
    }

    async fn services(&self, namespace: &str) -> Result<Vec<Arc<Service>>, ObjectError> {
        if self.client.is_none() {
            return Ok(Vec::new());
        }
        let all = self.view.services().ok_or(ObjectError::NotReady { kind: ObjectKind::Service })?;
        Ok(all.iter().filter(|s| s.metadata.namespace.as_deref() == Some(namespace)).cloned().collect())
    }

    async fn runtime_handler(&self, class: &str) -> Result<String, ObjectError> {
        if self.client.is_none() {
            return Ok(class.to_owned());
        }
        let kind = ObjectKind::RuntimeClass;
        let handler = self.view.runtime_handler(class).ok_or(ObjectError::NotReady { kind })?;
        handler.ok_or_else(|| ObjectError::NotFound { kind, name: class.to_owned() })
    }

    async fn service_account_annotations(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<BTreeMap<String, String>, ObjectError> {
        let kind = ObjectKind::ServiceAccount;
        let Some(client) = &self.client else {
            return Err(ObjectError::NoClient {
                kind,
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            });
        };
        let api = Api::<ServiceAccount>::namespaced(client.clone(), namespace);
        match past_lag(ANSWER, || api.get_opt(name)).await {
            Ok(Some(account)) => Ok(account.metadata.annotations.unwrap_or_default()),
            Ok(None) => Err(ObjectError::NotFound { kind, name: name.to_owned() }),
            Err(e) => Err(ObjectError::Api(e.to_string())),
        }
    }
}

/// Service account tokens by TokenRequest.
pub struct Tokens(pub kube::Client);

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
            }),
            ..TokenRequest::default()
        };
        let api = Api::<ServiceAccount>::namespaced(self.0.clone(), &key.namespace);
        let params = PostParams::default();
        let made = past_lag(ANSWER, || api.create_token_request(&key.service_account, &params, &request))
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
        Objects::new(Arc::default(), Some(api.client()), Arc::default())
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
    async fn a_refusal_because_the_server_does_not_know_the_pod_yet_is_asked_again() {
        let api = TestApi::start().await;
        make(&api, "configmaps", "c");
        make(&api, "secrets", "s");
        let (objects, key) = (objects(&api), key(&api));
        for requests in ["get configmaps", "get secrets", "create serviceaccounts/token"] {
            api.faults().fail(requests, 4, Failure::Forbidden);
        }
        objects.config_map("default", "c").await.unwrap();
        objects.secret("default", "s").await.unwrap();
        Tokens(api.client()).request(&key).await.unwrap();
    }

    #[test]
    fn a_pod_that_is_not_found_may_be_one_that_the_server_does_not_know_yet() {
        let not_found = |kind: &str| -> kube::core::Status {
            serde_json::from_value(json!({"status": "Failure", "code": 404, "details": {"kind": kind}}))
                .unwrap()
        };
        assert!(may_be_lag(&not_found("pods")) && may_be_lag(&not_found("pod")));
        assert!(!may_be_lag(&not_found("configmaps")));
    }

    #[tokio::test]
    async fn a_refusal_that_stays_is_told_in_the_servers_words() {
        let api = TestApi::start().await;
        let key = key(&api);
        api.faults().fail("*", 100, Failure::Forbidden);
        let error = objects(&api).secret("default", "s").await.unwrap_err();
        assert_eq!(error.to_string(), "secrets \"s\" is forbidden: on demand");
        let error = Tokens(api.client()).request(&key).await.unwrap_err();
        assert_eq!(error.to_string(), "serviceaccounts \"default\" is forbidden: on demand");
    }

    #[tokio::test]
    async fn what_was_read_stands_in_while_the_server_cannot_be_asked_and_not_once_it_is_gone() {
        let api = TestApi::start().await;
        make(&api, "configmaps", "c");
        make(&api, "configmaps", "never-read");
        let objects = objects(&api);
        objects.config_map("default", "c").await.unwrap();
        for failure in [Failure::Forbidden, Failure::Disconnect] {
            api.faults().fail("get configmaps", 100, failure);
            objects.config_map("default", "c").await.unwrap();
            objects.config_map("default", "never-read").await.unwrap_err();
            api.faults().clear();
        }
        api.delete("configmaps", "default", "c", None).unwrap();
        assert!(objects.config_map("default", "c").await.unwrap_err().is_not_found());
        api.faults().set_down(true);
        assert!(!objects.config_map("default", "c").await.unwrap_err().is_not_found(), "it is forgotten");
    }

    #[tokio::test]
    async fn what_was_read_stands_in_while_the_server_does_not_answer_and_is_not_waited_for_twice() {
        let api = TestApi::start().await;
        make(&api, "configmaps", "c");
        let objects = objects(&api);
        objects.config_map("default", "c").await.unwrap();
        api.faults().block("get configmaps");
        let asked = || api.counts().of("get configmaps");
        let before = asked();
        for _ in 0..20 {
            objects.config_map("default", "c").await.unwrap();
        }
        assert_eq!(asked(), before + 1, "a server that is silent is left alone for a while");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_not_waited_for_without_end() {
        let began = Instant::now();
        let answer = past_lag(ANSWER, std::future::pending::<kube::Result<()>>).await;
        assert_eq!(answer, Err(NoAnswer::Silent(ANSWER)));
        assert_eq!(began.elapsed(), ANSWER);
    }

    #[tokio::test(start_paused = true)]
    async fn an_object_that_nobody_asks_for_is_dropped() {
        let kept = Kept::default();
        let read = |name: &str| kept.settle(ObjectKind::ConfigMap, "default", name, Ok(Some(()))).unwrap();
        read("old");
        tokio::time::advance(KEEP).await;
        read("new");
        assert_eq!(kept.0.lock().keys().map(|k| k.1.as_str()).collect::<Vec<_>>(), ["new"]);
    }
}
