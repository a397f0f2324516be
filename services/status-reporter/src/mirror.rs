//! Mirror pods, which represent static pods in the API server.

use serde_json::{Value, json};

use crate::api::{ApiClient, ApiFailure, node_path, pod_path};
use crate::status::text;

const MIRROR: &str = "kubernetes.io/config.mirror";

/// Creates the mirror pod of a static pod if it is missing or outdated. Returns its UID, and whether it was
/// created.
///
/// A mirror pod of an older manifest is deleted first. The Node is its only owner: without a Node, or while
/// that is being deleted, no mirror pod is created.
///
/// # Errors
/// The API server refuses a call or does not answer.
pub(crate) async fn ensure(api: &ApiClient, node: &str, pod: &Value) -> Result<(String, bool), ApiFailure> {
    let (namespace, name) = (text(&pod["metadata"], "namespace"), text(&pod["metadata"], "name"));
    let mut pod = pod.clone();
    let owner = api.get(&node_path(node)).await?;
    if !owner["metadata"]["deletionTimestamp"].is_null() {
        return Err(ApiFailure::Refused(format!("node {node} is being deleted").into()));
    }
    if uid(&owner).is_empty() {
        return Err(ApiFailure::Refused(format!("node {node} has no UID").into()));
    }
    pod["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "v1", "kind": "Node", "name": node, "uid": uid(&owner), "controller": true,
    }]);
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
        return Err(ApiFailure::Refused(
            format!("pod {namespace}/{name} exists and is not a mirror pod").into(),
        ));
    }
    if hash(&there) == hash(&pod) && there["metadata"]["deletionTimestamp"].is_null() {
        return Ok((uid(&there), false));
    }
    delete(api, namespace, name, &uid(&there)).await?;
    let made = api.create(&collection, &pod).await?;
    Ok((uid(&made), true))
}

/// Deletes a mirror pod with grace period 0. Returns false if it does not exist or has another UID.
///
/// # Errors
/// The API server refuses a call or does not answer.
pub(crate) async fn delete(
    api: &ApiClient,
    namespace: &str,
    name: &str,
    uid: &str,
) -> Result<bool, ApiFailure> {
    match api.delete_now(&pod_path(namespace, name), uid).await {
        Ok(()) => Ok(true),
        Err(ApiFailure::NotFound(_) | ApiFailure::Conflict(_)) => Ok(false),
        Err(failure) => Err(failure),
    }
}

fn uid(pod: &Value) -> String {
    text(&pod["metadata"], "uid").to_owned()
}

#[cfg(test)]
mod tests {
    use quintlet_testapi::TestApi;

    use super::*;

    fn pod(hash: &str) -> Value {
        json!({
            "metadata": {"name": "web", "namespace": "default", "annotations": {MIRROR: hash},
                "ownerReferences": [{"apiVersion": "v1", "kind": "Other", "name": "x", "uid": "y"}]},
            "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "i:1"}]},
        })
    }

    #[tokio::test]
    async fn a_mirror_pod_is_owned_by_the_node_and_not_created_without_it() {
        let server = TestApi::start().await;
        let api = ApiClient::new(server.client());
        let ensure = async |hash: &str| ensure(&api, "n1", &pod(hash)).await;
        assert!(matches!(ensure("h").await, Err(ApiFailure::NotFound(_))));
        assert!(server.list("pods").is_empty(), "no node, no mirror");

        let node = json!({"metadata": {"name": "n1", "finalizers": ["test/stays"]}});
        let node = server.create("nodes", "", node).unwrap();
        let (first, made) = ensure("h").await.unwrap();
        assert!(made);
        let owner = json!([{"apiVersion": "v1", "kind": "Node", "name": "n1", "controller": true,
            "uid": node["metadata"]["uid"]}]);
        let seen = server.get("pods", "default", "web").unwrap();
        assert_eq!(seen["metadata"]["ownerReferences"], owner, "whatever the manifest says");
        assert_eq!(ensure("h").await.unwrap(), (first.clone(), false), "one that is right stays");
        let (second, made) = ensure("other").await.unwrap();
        assert!(made && second != first, "one of another manifest is replaced");

        server.delete("nodes", "", "n1", None).unwrap();
        assert!(matches!(ensure("third").await, Err(ApiFailure::Refused(_))), "the node is on its way out");
        assert_eq!(server.get("pods", "default", "web").unwrap()["metadata"]["uid"], json!(second));
    }
}
