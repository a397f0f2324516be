//! The objects of the API server that describe volumes. Each pod and operation reads them again, as in the
//! kubelet.

use std::collections::BTreeMap;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Secret};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use kube::api::{Api, Patch, PatchParams};
use pod_sync_clients::{REQUEST_TIMEOUT, RequestError, retry_on_lag};
use serde_json::Value;

/// Reads objects that describe volumes.
#[async_trait]
pub trait VolumeObjects: Send + Sync {
    /// Returns a PersistentVolumeClaim.
    ///
    /// # Errors
    /// Fails if the claim does not exist or cannot be read.
    async fn claim(&self, namespace: &str, name: &str) -> Result<PersistentVolumeClaim, RequestError>;

    /// Applies a merge patch to the status of a PersistentVolumeClaim, and returns the claim.
    ///
    /// # Errors
    /// Fails if the claim does not exist, was changed meanwhile, or cannot be written.
    async fn patch_claim_status(
        &self,
        namespace: &str,
        name: &str,
        patch: Value,
    ) -> Result<PersistentVolumeClaim, RequestError>;

    /// Returns a PersistentVolume.
    ///
    /// # Errors
    /// Fails if the volume does not exist or cannot be read.
    async fn volume(&self, name: &str) -> Result<PersistentVolume, RequestError>;

    /// Returns a CSIDriver, or `None` if it does not exist.
    ///
    /// # Errors
    /// Fails if the object cannot be read.
    async fn driver(&self, name: &str) -> Result<Option<CSIDriver>, RequestError>;

    /// Returns a VolumeAttachment.
    ///
    /// # Errors
    /// Fails if the object does not exist or cannot be read.
    async fn attachment(&self, name: &str) -> Result<VolumeAttachment, RequestError>;

    /// Returns the data of a Secret.
    ///
    /// # Errors
    /// Fails if the Secret does not exist or cannot be read.
    async fn secret(&self, namespace: &str, name: &str) -> Result<BTreeMap<String, String>, RequestError>;
}

/// Objects of an API server.
#[derive(Clone)]
pub struct ApiObjects(pub kube::Client);

impl std::fmt::Debug for ApiObjects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiObjects").finish_non_exhaustive()
    }
}

impl ApiObjects {
    async fn get<K>(&self, api: Api<K>, name: &str) -> Result<K, RequestError>
    where
        K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
    {
        retry_on_lag(REQUEST_TIMEOUT, || api.get(name)).await
    }
}

#[async_trait]
impl VolumeObjects for ApiObjects {
    async fn claim(&self, namespace: &str, name: &str) -> Result<PersistentVolumeClaim, RequestError> {
        self.get(Api::namespaced(self.0.clone(), namespace), name).await
    }

    async fn patch_claim_status(
        &self,
        namespace: &str,
        name: &str,
        patch: Value,
    ) -> Result<PersistentVolumeClaim, RequestError> {
        let api = Api::<PersistentVolumeClaim>::namespaced(self.0.clone(), namespace);
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        retry_on_lag(REQUEST_TIMEOUT, || api.patch_status(name, &params, &patch)).await
    }

    async fn volume(&self, name: &str) -> Result<PersistentVolume, RequestError> {
        self.get(Api::all(self.0.clone()), name).await
    }

    async fn driver(&self, name: &str) -> Result<Option<CSIDriver>, RequestError> {
        let api = Api::<CSIDriver>::all(self.0.clone());
        retry_on_lag(REQUEST_TIMEOUT, || api.get_opt(name)).await
    }

    async fn attachment(&self, name: &str) -> Result<VolumeAttachment, RequestError> {
        self.get(Api::all(self.0.clone()), name).await
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<BTreeMap<String, String>, RequestError> {
        let secret: Secret = self.get(Api::namespaced(self.0.clone(), namespace), name).await?;
        let data = secret.data.unwrap_or_default().into_iter();
        Ok(data.map(|(key, value)| (key, String::from_utf8_lossy(&value.0).into_owned())).collect())
    }
}
