//! Mirror pods: what the API server shows of static pods.

use serde_json::{Value, json};

use crate::api::{ApiClient, ApiFailure, node_path, pod_path};
use crate::status::text;

const MIRROR: &str = "kubernetes.io/config.mirror";

/// Makes sure the mirror of a static pod is there and as given; returns its UID and whether it was made now.
///
/// A mirror of an older manifest is deleted first. The node becomes its owner unless the pod names one.
///
/// # Errors
/// As the API server answers.
pub async fn ensure(api: &ApiClient, node: &str, pod: &Value) -> Result<(String, bool), ApiFailure> {
    let (namespace, name) = (text(&pod["metadata"], "namespace"), text(&pod["metadata"], "name"));
    let mut pod = pod.clone();
    if pod["metadata"]["ownerReferences"].as_array().is_none_or(Vec::is_empty)
        && let Ok(owner) = api.get(&node_path(node)).await
    {
        pod["metadata"]["ownerReferences"] = json!([{
            "apiVersion": "v1", "kind": "Node", "name": node, "uid": owner["metadata"]["uid"], "controller": true,
        }]);
    }
    for field in ["uid", "resourceVersion", "creationTimestamp"] {
        if let Some(meta) = pod["metadata"].as_object_mut() {
            meta.remove(field);
        }
    }
    let collection = format!("/api/v1/namespaces/{namespace}/pods");
    match api.create(&collection, &pod).await {
        Ok(made) => return Ok((uid(&made), true)),
        Err(ApiFailure::AlreadyExists(_)) => {}
        Err(failure) => return Err(failure),
    }
    let path = pod_path(namespace, name);
    let there = api.get(&path).await?;
    let hash = |pod: &Value| pod["metadata"]["annotations"][MIRROR].as_str().map(str::to_owned);
    if hash(&there).is_none() {
        return Err(ApiFailure::Refused(format!("pod {namespace}/{name} is there and is no mirror")));
    }
    if hash(&there) == hash(&pod) && there["metadata"]["deletionTimestamp"].is_null() {
        return Ok((uid(&there), false));
    }
    delete(api, namespace, name, &uid(&there)).await?;
    let made = api.create(&collection, &pod).await?;
    Ok((uid(&made), true))
}

/// Deletes a mirror at once. False: it was not there, or it is another one by now.
///
/// # Errors
/// As the API server answers.
pub async fn delete(api: &ApiClient, namespace: &str, name: &str, uid: &str) -> Result<bool, ApiFailure> {
    match api.delete_now(&pod_path(namespace, name), uid).await {
        Ok(_) => Ok(true),
        Err(ApiFailure::NotFound(_) | ApiFailure::Conflict(_)) => Ok(false),
        Err(failure) => Err(failure),
    }
}

fn uid(pod: &Value) -> String {
    text(&pod["metadata"], "uid").to_owned()
}
