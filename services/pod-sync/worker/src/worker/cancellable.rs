//! Cancels the reads of objects and tokens with the sync that waits for them.
//!
//! Only reads are cancelled. Objects that were read are written completely, so that a removal of volumes
//! never meets a writer.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{ConfigMap, Secret, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use pod_sync_direct_volumes::certificates::TrustAnchors;
use pod_sync_layout::{ObjectError, ObjectSource, Token, TokenError, TokenKey, TokenSource};
use tokio_util::sync::CancellationToken;

const CANCELLED: &str = "the pod changed meanwhile";

/// A source of objects or tokens that returns an error once the sync is cancelled.
pub(super) struct Cancellable<S: ?Sized> {
    pub(super) inner: Arc<S>,
    pub(super) cancel: CancellationToken,
}

impl<S: ?Sized> Cancellable<S> {
    async fn unless<T, E>(&self, work: impl Future<Output = Result<T, E>>, error: E) -> Result<T, E> {
        // The next pass repeats a dropped read.
        tokio::select! {
            biased;
            () = self.cancel.cancelled() => Err(error),
            done = work => done,
        }
    }
}

#[async_trait]
impl ObjectSource for Cancellable<dyn ObjectSource> {
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<ConfigMap>, ObjectError> {
        self.unless(self.inner.config_map(namespace, name), ObjectError::Api(CANCELLED.to_owned())).await
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<Secret>, ObjectError> {
        self.unless(self.inner.secret(namespace, name), ObjectError::Api(CANCELLED.to_owned())).await
    }

    async fn services(&self, namespace: &str) -> Result<Vec<Arc<Service>>, ObjectError> {
        self.unless(self.inner.services(namespace), ObjectError::Api(CANCELLED.to_owned())).await
    }

    async fn runtime_handler(&self, class: &str) -> Result<String, ObjectError> {
        self.unless(self.inner.runtime_handler(class), ObjectError::Api(CANCELLED.to_owned())).await
    }

    async fn service_account_annotations(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<BTreeMap<String, String>, ObjectError> {
        let read = self.inner.service_account_annotations(namespace, name);
        self.unless(read, ObjectError::Api(CANCELLED.to_owned())).await
    }
}

#[async_trait]
impl TrustAnchors for Cancellable<dyn TrustAnchors> {
    async fn by_name(&self, name: &str, is_optional: bool) -> Result<String, String> {
        self.unless(self.inner.by_name(name, is_optional), CANCELLED.to_owned()).await
    }

    async fn by_signer(
        &self,
        signer: &str,
        selector: Option<&LabelSelector>,
        is_optional: bool,
    ) -> Result<String, String> {
        self.unless(self.inner.by_signer(signer, selector, is_optional), CANCELLED.to_owned()).await
    }
}

#[async_trait]
impl TokenSource for Cancellable<dyn TokenSource> {
    async fn request(&self, key: &TokenKey) -> Result<Token, TokenError> {
        self.unless(self.inner.request(key), TokenError::Api(CANCELLED.to_owned())).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Never;

    #[async_trait]
    impl ObjectSource for Never {
        async fn config_map(&self, _: &str, _: &str) -> Result<Arc<ConfigMap>, ObjectError> {
            std::future::pending().await
        }
        async fn secret(&self, _: &str, _: &str) -> Result<Arc<Secret>, ObjectError> {
            std::future::pending().await
        }
        async fn services(&self, _: &str) -> Result<Vec<Arc<Service>>, ObjectError> {
            std::future::pending().await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_fetch_that_hangs_ends_with_the_sync() {
        let cancel = CancellationToken::new();
        let inner: Arc<dyn ObjectSource> = Arc::new(Never);
        let source = Cancellable { inner, cancel: cancel.clone() };
        let fetch = tokio::time::timeout(std::time::Duration::from_secs(5), source.secret("a", "b"));
        let (fetched, ()) = tokio::join!(fetch, async { cancel.cancel() });
        assert!(fetched.unwrap().is_err());
    }
}
