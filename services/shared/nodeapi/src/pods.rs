//! `/pods` and `/runningpods/`.

use std::collections::BTreeMap;

use http::StatusCode;
use k8s_cri::v1::{ContainerState, ContainerStateValue, ListContainersRequest, ListPodSandboxRequest};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::answer::{Answer, error, json};
use crate::node::Node;

const POD_NAME: &str = "io.kubernetes.pod.name";
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
const POD_UID: &str = "io.kubernetes.pod.uid";
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

#[derive(serde::Serialize)]
struct PodList<T> {
    kind: &'static str,
    #[serde(rename = "apiVersion")]
    api_version: &'static str,
    metadata: Value,
    /// Null when there is none.
    items: Option<Vec<T>>,
}

fn list<T: serde::Serialize>(items: Vec<T>) -> Answer {
    let items = Some(items).filter(|i| !i.is_empty());
    let list = PodList { kind: "PodList", api_version: "v1", metadata: json!({}), items };
    match serde_json::to_vec(&list) {
        Ok(body) => json(body),
        Err(e) => error(StatusCode::INTERNAL_SERVER_ERROR, e),
    }
}

/// The pods of this node as pod-sync has them, with their newest status.
pub async fn pods(node: &Node) -> Answer {
    let mut pods = match node.pods().await {
        Ok(pods) => pods,
        Err(status) => {
            return error(StatusCode::INTERNAL_SERVER_ERROR, format!("pod-sync: {}", status.message()));
        }
    };
    pods.sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
    // Passed on as they are: there may be hundreds, and nothing here reads them.
    list(
        pods.into_iter().filter_map(|p| RawValue::from_string(String::from_utf8(p.pod).ok()?).ok()).collect(),
    )
}

/// What runs, as the runtime says.
pub async fn running(node: &Node) -> Answer {
    match find_running(node).await {
        Ok(pods) => list(pods),
        Err(status) => error(StatusCode::INTERNAL_SERVER_ERROR, status.message()),
    }
}

async fn find_running(node: &Node) -> Result<Vec<Value>, tonic::Status> {
    let mut runtime = node.runtime();
    let sandboxes = runtime.list_pod_sandbox(ListPodSandboxRequest::default()).await?.into_inner().items;
    let filter = k8s_cri::v1::ContainerFilter {
        state: Some(ContainerStateValue { state: ContainerState::ContainerRunning.into() }),
        ..Default::default()
    };
    let request = ListContainersRequest { filter: Some(filter) };
    let containers = runtime.list_containers(request).await?.into_inner().containers;
    let mut pods: BTreeMap<(String, String, String), Vec<Value>> = BTreeMap::new();
    for sandbox in sandboxes.iter().filter(|s| s.state == 0) {
        if let Some(pod) = pod_of(&sandbox.labels) {
            pods.entry(pod).or_default();
        }
    }
    for container in &containers {
        let image = container.image.as_ref().map_or("", |i| i.image.as_str());
        if let (Some(pod), Some(name)) = (pod_of(&container.labels), container.labels.get(CONTAINER_NAME)) {
            pods.entry(pod).or_default().push(json!({"name": name, "image": image, "resources": {}}));
        }
    }
    Ok(pods
        .into_iter()
        .map(|((namespace, name, uid), mut containers)| {
            containers.sort_by(|a, b| a["name"].as_str().cmp(&b["name"].as_str()));
            json!({
                "metadata": {"name": name, "namespace": namespace, "uid": uid, "creationTimestamp": null},
                "spec": {"containers": containers},
                "status": {},
            })
        })
        .collect())
}

fn pod_of(labels: &std::collections::HashMap<String, String>) -> Option<(String, String, String)> {
    let label = |name: &str| labels.get(name).cloned();
    Some((label(POD_NAMESPACE)?, label(POD_NAME)?, label(POD_UID)?))
}
