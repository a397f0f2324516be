//! The ResourceClaims and ResourceSlices of the API server.

use std::collections::BTreeSet;
use std::fmt;

use async_trait::async_trait;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{Api, DeleteParams, ListParams};
use pod_sync_claims::{ClaimSource, FetchError, SliceWiper};
use pod_sync_clients::{REQUEST_TIMEOUT, RequestError, retry_on_lag};

/// Code of a response to a request for an object that does not exist, or of a kind that the API server does
/// not serve.
const NOT_FOUND: u16 = 404;

/// The ResourceClaims of the API server, if there is one.
pub(super) struct ApiClaims(pub(super) Option<kube::Client>);

impl fmt::Debug for ApiClaims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiClaims").finish_non_exhaustive()
    }
}

#[async_trait]
impl ClaimSource for ApiClaims {
    async fn get(&self, namespace: &str, name: &str) -> Result<ResourceClaim, FetchError> {
        let no_server = || FetchError::Failed("this node has no API server".to_owned());
        let client = self.0.clone().ok_or_else(no_server)?;
        let api = Api::<ResourceClaim>::namespaced(client, namespace);
        retry_on_lag(REQUEST_TIMEOUT, || api.get(name)).await.map_err(|error| match &error {
            RequestError::Failed(kube::Error::Api(status)) if status.code == NOT_FOUND => {
                FetchError::NotFound(error.to_string())
            }
            _ => FetchError::Failed(error.to_string()),
        })
    }
}

/// The ResourceSlices of this node.
pub(super) struct NodeSlices {
    pub(super) client: kube::Client,
    pub(super) node: String,
}

impl fmt::Debug for NodeSlices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeSlices").field("node", &self.node).finish_non_exhaustive()
    }
}

#[async_trait]
impl SliceWiper for NodeSlices {
    async fn drivers(&self) -> Result<BTreeSet<String>, String> {
        let api = Api::<ResourceSlice>::all(self.client.clone());
        let params = ListParams::default().fields(&format!("spec.nodeName={}", self.node));
        let slices = match retry_on_lag(REQUEST_TIMEOUT, || api.list(&params)).await {
            Ok(slices) => slices,
            Err(RequestError::Failed(kube::Error::Api(status))) if status.code == NOT_FOUND => {
                tracing::info!(
                    "the API server does not serve resource.k8s.io/v1, this node has no ResourceSlices"
                );
                return Ok(BTreeSet::new());
            }
            Err(error) => return Err(error.to_string()),
        };
        Ok(slices.items.into_iter().map(|slice| slice.spec.driver).collect())
    }

    async fn wipe(&self, driver: &str) -> Result<(), String> {
        let api = Api::<ResourceSlice>::all(self.client.clone());
        let (delete, node) = (DeleteParams::default(), &self.node);
        let params = ListParams::default().fields(&format!("spec.nodeName={node},spec.driver={driver}"));
        let wiped = retry_on_lag(REQUEST_TIMEOUT, || api.delete_collection(&delete, &params)).await;
        wiped.map(drop).map_err(|error| error.to_string())
    }
}
