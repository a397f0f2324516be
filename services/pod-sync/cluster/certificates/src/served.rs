//! The version of the API group `certificates.k8s.io` that an API server serves.

use kube::api::{ApiResource, GroupVersionKind};
use kube::runtime::watcher;
use pod_sync_clients::{REQUEST_TIMEOUT, RequestError, retry_on_lag};

pub(crate) const GROUP: &str = "certificates.k8s.io";
/// Versions of the API, the preferred one first: `v1` since Kubernetes 1.37. The fields that a node agent
/// uses are the same.
const VERSIONS: [&str; 2] = ["v1", "v1beta1"];

/// Returns the preferred version of a kind that the API server serves, or `None` if it serves none.
pub(crate) async fn served(
    client: &kube::Client,
    kind: &str,
    plural: &str,
) -> Result<Option<ApiResource>, RequestError> {
    for version in VERSIONS {
        let group_version = format!("{GROUP}/{version}");
        let ask = || client.list_api_group_resources(&group_version);
        match retry_on_lag(REQUEST_TIMEOUT, ask).await {
            Ok(list) if list.resources.iter().any(|resource| resource.name == plural) => {
                let kind = GroupVersionKind::gvk(GROUP, version, kind);
                return Ok(Some(ApiResource::from_gvk_with_plural(&kind, plural)));
            }
            Ok(_) => {}
            Err(RequestError::Failed(kube::Error::Api(status))) if status.code == 404 => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Returns whether a watch failed since the API server does not serve its version, as after an upgrade that
/// removes one.
pub(crate) fn is_absent(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status.code == 404,
        _ => false,
    }
}
