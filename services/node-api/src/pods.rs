//! `/pods` and `/runningpods/`.

use std::collections::BTreeMap;

use http::StatusCode;
use quintlet_cri_api::v1::{
    ContainerState, ContainerStateValue, ListContainersRequest, ListContainersResponse,
    ListPodSandboxRequest, ListPodSandboxResponse, PodSandboxState,
};
use quintlet_kit::lists;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tonic::Request;

use node_api_base::answer::{Answer, error, json};
use node_api_base::services::Services;

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
    /// Omitted if it is null.
    items: Option<Vec<T>>,
}

/// Returns a PodList.
pub fn list<T: serde::Serialize>(items: Vec<T>) -> Answer {
    let items = Some(items).filter(|i| !i.is_empty());
    let list = PodList { kind: "PodList", api_version: "v1", metadata: json!({}), items };
    match serde_json::to_vec(&list) {
        Ok(body) => json(body),
        Err(e) => error(StatusCode::INTERNAL_SERVER_ERROR, e),
    }
}

/// Returns the pods of the node as pod-sync has them, with their newest status.
pub async fn pods(node: &Services) -> Answer {
    let mut pods = match node.pods().await {
        Ok(pods) => pods,
        Err(status) => {
            return error(StatusCode::INTERNAL_SERVER_ERROR, format!("pod-sync: {}", status.message()));
        }
    };
    pods.sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
    // The objects are passed through without parsing: there may be hundreds.
    list(
        pods.into_iter().filter_map(|p| RawValue::from_string(String::from_utf8(p.pod).ok()?).ok()).collect(),
    )
}

/// Returns the pods that the runtime runs.
pub async fn running(node: &Services) -> Answer {
    match find_running(node).await {
        Ok(pods) => list(pods),
        Err(status) => error(StatusCode::INTERNAL_SERVER_ERROR, status.message()),
    }
}

async fn find_running(node: &Services) -> Result<Vec<Value>, tonic::Status> {
    let mut pods: BTreeMap<(String, String, String), Vec<Value>> = BTreeMap::new();
    // Only this part of each message is kept: the full messages of a full node are much larger than the
    // response.
    let take = |message: ListPodSandboxResponse| {
        let ready = message.items.iter().filter(|s| s.state == PodSandboxState::SandboxReady as i32);
        for pod in ready.filter_map(|s| pod_of(&s.labels)) {
            pods.entry(pod).or_default();
        }
    };
    lists::SANDBOXES.each(node.cri(), Request::new(ListPodSandboxRequest::default()), take).await?;
    let filter = quintlet_cri_api::v1::ContainerFilter {
        state: Some(ContainerStateValue { state: ContainerState::ContainerRunning.into() }),
        ..Default::default()
    };
    let request = ListContainersRequest { filter: Some(filter) };
    let take = |message: ListContainersResponse| {
        for container in &message.containers {
            let image = container.image.as_ref().map_or("", |i| i.image.as_str());
            if let (Some(pod), Some(name)) = (pod_of(&container.labels), container.labels.get(CONTAINER_NAME))
            {
                pods.entry(pod).or_default().push(json!({"name": name, "image": image, "resources": {}}));
            }
        }
    };
    lists::CONTAINERS.each(node.cri(), Request::new(request), take).await?;
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
