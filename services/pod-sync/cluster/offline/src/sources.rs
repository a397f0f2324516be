//! Sources of objects and tokens that give the last known answer while the API server is away.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::Poll;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolume, PersistentVolumeClaim, Pod, Secret, Service};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use pod_sync_clients::RequestError;
use pod_sync_direct_volumes::certificates::TrustAnchors;
use pod_sync_layout::{ObjectError, ObjectKind, ObjectSource, Token, TokenError, TokenKey, TokenSource};
use pod_sync_volume_manager::objects::VolumeObjects;
use quintlet_model::ids::PodUid;
use serde_json::Value;

use crate::answer::{Answer, AnswerKey, Services};
use crate::cache::OfflineCache;

/// A source whose answers are kept for the pods of the cache. While the API server is away, it answers what
/// it has at hand, else what is kept, else what it says itself.
pub struct WithOffline<S: ?Sized> {
    inner: Arc<S>,
    cache: Arc<OfflineCache>,
}

impl<S: ?Sized> std::fmt::Debug for WithOffline<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WithOffline").finish_non_exhaustive()
    }
}

impl<S: ?Sized> WithOffline<S> {
    /// Returns the source with this cache.
    #[must_use]
    pub fn new(inner: Arc<S>, cache: Arc<OfflineCache>) -> Self {
        Self { inner, cache }
    }

    /// Reads an object, or none if it does not exist. A read that is dropped has no effect.
    async fn answer<V: Answer + Send + Sync, E: Send>(
        &self,
        key: AnswerKey,
        read: impl Future<Output = Result<Option<V>, E>> + Send,
    ) -> Result<Option<V>, E> {
        let mut read = std::pin::pin!(read);
        if self.cache.contact().is_away() {
            // An object that is watched is at hand. Other reads would wait for the server.
            match futures::poll!(read.as_mut()) {
                Poll::Ready(result) => return self.result(&key, result),
                Poll::Pending => {
                    if let Some(known) = self.cache.recall(&key) {
                        return Ok(known);
                    }
                }
            }
        }
        let result = read.await;
        self.result(&key, result)
    }

    fn result<V: Answer, E>(&self, key: &AnswerKey, result: Result<Option<V>, E>) -> Result<Option<V>, E> {
        match result {
            Ok(answer) => {
                self.cache.remember(key, answer.as_ref());
                Ok(answer)
            }
            // A refusal is an answer: the server is not away then.
            Err(error) if self.cache.contact().is_away() => self.cache.recall(key).ok_or(error),
            Err(error) => Err(error),
        }
    }
}

// An object that does not exist is an answer, too.
fn existing<V>(read: Result<V, ObjectError>) -> Result<Option<V>, ObjectError> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

fn found<V>(answer: Option<V>, kind: ObjectKind, name: &str) -> Result<V, ObjectError> {
    answer.ok_or_else(|| ObjectError::NotFound { kind, name: name.to_owned() })
}

#[async_trait]
impl ObjectSource for WithOffline<dyn ObjectSource> {
    fn register(&self, uid: &PodUid, pod: &Arc<Pod>) {
        self.inner.register(uid, pod);
    }

    fn unregister(&self, uid: &PodUid) {
        self.inner.unregister(uid);
    }

    // When the server is back, volumes are read again.
    fn changes(&self, uid: &PodUid) -> u64 {
        self.inner.changes(uid).saturating_add(self.cache.contact().returns())
    }

    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<ConfigMap>, ObjectError> {
        let key = AnswerKey::ConfigMap(namespace.to_owned(), name.to_owned());
        let read = async { existing(self.inner.config_map(namespace, name).await) };
        found(self.answer(key, read).await?, ObjectKind::ConfigMap, name)
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<Secret>, ObjectError> {
        let key = AnswerKey::Secret(namespace.to_owned(), name.to_owned());
        let read = async { existing(self.inner.secret(namespace, name).await) };
        found(self.answer(key, read).await?, ObjectKind::Secret, name)
    }

    async fn services(&self, namespace: &str) -> Result<Vec<Arc<Service>>, ObjectError> {
        let key = AnswerKey::Services(namespace.to_owned());
        let read = async { self.inner.services(namespace).await.map(|all| Some(Services(all))) };
        Ok(self.answer(key, read).await?.map(|all| all.0).unwrap_or_default())
    }

    async fn runtime_handler(&self, class: &str) -> Result<String, ObjectError> {
        let key = AnswerKey::RuntimeClass(class.to_owned());
        let read = async { existing(self.inner.runtime_handler(class).await) };
        found(self.answer(key, read).await?, ObjectKind::RuntimeClass, class)
    }

    async fn service_account_annotations(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<BTreeMap<String, String>, ObjectError> {
        let key = AnswerKey::ServiceAccount(namespace.to_owned(), name.to_owned());
        let read = async { existing(self.inner.service_account_annotations(namespace, name).await) };
        found(self.answer(key, read).await?, ObjectKind::ServiceAccount, name)
    }
}

#[async_trait]
impl TokenSource for WithOffline<dyn TokenSource> {
    // An expired token is better than no start: it is renewed once the server is back.
    async fn request(&self, key: &TokenKey) -> Result<Token, TokenError> {
        let read = async { self.inner.request(key).await.map(Some) };
        self.answer(AnswerKey::Token(key.into()), read).await?.ok_or(TokenError::Missing)
    }
}

#[async_trait]
impl TrustAnchors for WithOffline<dyn TrustAnchors> {
    async fn by_name(&self, name: &str, is_optional: bool) -> Result<String, String> {
        let read = async { self.inner.by_name(name, is_optional).await.map(Some) };
        Ok(self.answer(AnswerKey::TrustBundle(name.to_owned()), read).await?.unwrap_or_default())
    }

    async fn by_signer(
        &self,
        signer: &str,
        selector: Option<&LabelSelector>,
        is_optional: bool,
    ) -> Result<String, String> {
        let read = async { self.inner.by_signer(signer, selector, is_optional).await.map(Some) };
        let selector = serde_json::to_string(&selector).unwrap_or_default();
        let key = AnswerKey::TrustBundles(signer.to_owned(), selector);
        Ok(self.answer(key, read).await?.unwrap_or_default())
    }
}

fn not_found(name: &str) -> RequestError {
    let status = kube::core::Status {
        message: format!("{name:?} not found when the API server answered last"),
        reason: "NotFound".to_owned(),
        code: 404,
        ..kube::core::Status::default()
    };
    RequestError::Failed(kube::Error::Api(Box::new(status)))
}

#[async_trait]
impl VolumeObjects for WithOffline<dyn VolumeObjects> {
    async fn claim(&self, namespace: &str, name: &str) -> Result<PersistentVolumeClaim, RequestError> {
        let key = AnswerKey::Claim(namespace.to_owned(), name.to_owned());
        let read = async { self.inner.claim(namespace, name).await.map(Some) };
        self.answer(key, read).await?.ok_or_else(|| not_found(name))
    }

    async fn patch_claim_status(
        &self,
        namespace: &str,
        name: &str,
        patch: Value,
    ) -> Result<PersistentVolumeClaim, RequestError> {
        self.inner.patch_claim_status(namespace, name, patch).await
    }

    async fn volume(&self, name: &str) -> Result<PersistentVolume, RequestError> {
        let read = async { self.inner.volume(name).await.map(Some) };
        self.answer(AnswerKey::Volume(name.to_owned()), read).await?.ok_or_else(|| not_found(name))
    }

    async fn driver(&self, name: &str) -> Result<Option<CSIDriver>, RequestError> {
        self.answer(AnswerKey::Driver(name.to_owned()), self.inner.driver(name)).await
    }

    async fn attachment(&self, name: &str) -> Result<VolumeAttachment, RequestError> {
        let read = async { self.inner.attachment(name).await.map(Some) };
        self.answer(AnswerKey::Attachment(name.to_owned()), read).await?.ok_or_else(|| not_found(name))
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<BTreeMap<String, String>, RequestError> {
        let key = AnswerKey::VolumeSecret(namespace.to_owned(), name.to_owned());
        let read = async { self.inner.secret(namespace, name).await.map(Some) };
        self.answer(key, read).await?.ok_or_else(|| not_found(name))
    }
}
