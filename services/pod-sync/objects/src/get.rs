//! Reads of one object from the API server.

use kube::api::{Api, GetParams};
use pod_sync_cri_config::objects::ObjectError;

use crate::kind::{Key, Kind};
use crate::lag::{ANSWER, NoAnswer, past_lag};

/// Reads an object.
pub(crate) async fn get<K: Kind>(
    client: &kube::Client,
    key: &Key,
    params: &GetParams,
) -> Result<K, ObjectError> {
    let api = Api::<K>::namespaced(client.clone(), &key.namespace);
    let read = past_lag(ANSWER, || api.get_with(&key.name, params)).await;
    read.map(trimmed).map_err(|error| match error {
        NoAnswer::Failed(kube::Error::Api(status)) if status.is_not_found() => {
            ObjectError::NotFound { kind: K::KIND, name: key.name.clone() }
        }
        error @ (NoAnswer::Failed(_) | NoAnswer::Silent(_)) => ObjectError::Api(error.to_string()),
    })
}

/// Removes what no pod can see.
pub(crate) fn trimmed<K: Kind>(mut object: K) -> K {
    object.meta_mut().managed_fields = None;
    object
}
