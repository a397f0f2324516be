//! Reads of one object from the API server.

use kube::api::{Api, GetParams};
use pod_sync_clients::{REQUEST_TIMEOUT, RequestError, retry_on_lag};
use pod_sync_layout::ObjectError;

use crate::kind::{Key, Kind};

/// Reads an object.
pub(crate) async fn get<K: Kind>(
    client: &kube::Client,
    key: &Key,
    params: &GetParams,
) -> Result<K, ObjectError> {
    let api = Api::<K>::namespaced(client.clone(), &key.namespace);
    let read = retry_on_lag(REQUEST_TIMEOUT, || api.get_with(&key.name, params)).await;
    read.map(trimmed).map_err(|error| match error {
        RequestError::Failed(kube::Error::Api(status)) if status.is_not_found() => {
            ObjectError::NotFound { kind: K::KIND, name: key.name.clone() }
        }
        error @ (RequestError::Failed(_) | RequestError::Silent(_)) => ObjectError::Api(error.to_string()),
    })
}

/// Removes what no pod can see.
pub(crate) fn trimmed<K: Kind>(mut object: K) -> K {
    object.meta_mut().managed_fields = None;
    object
}
