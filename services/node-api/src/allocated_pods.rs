//! `/allocatedPods` and `/allocatedPods/{namespace}/{name}[/{uid}]`: pods with the resources that the node
//! has allocated to them, without a status (`pkg/kubelet/allocation: GetAllocatedPods`).

use std::collections::BTreeMap;

use http::StatusCode;
use quintlet_proto::podsync::v1::PodView;
use serde::Deserialize;
use serde_json::value::{RawValue, to_raw_value};

use node_api_base::answer::{Answer, error, json, not_found, text};
use node_api_base::services::Services;

use crate::pods::{list_each, unavailable};

/// The fields of a pod. Their values are scanned for their ends, and passed on as text.
type Fields = BTreeMap<String, Box<RawValue>>;

/// Handles a request. `segments` is the path after its first segment.
pub(crate) async fn allocated(node: &Services, segments: &[String]) -> Answer {
    match segments {
        [] => all(node).await,
        [empty] if empty.is_empty() => all(node).await,
        [namespace, name] if !namespace.is_empty() && !name.is_empty() => {
            one(node, namespace, name, None).await
        }
        [namespace, name, uid] if [namespace, name, uid].into_iter().all(|s| !s.is_empty()) => {
            one(node, namespace, name, Some(uid)).await
        }
        _ => not_found(),
    }
}

async fn all(node: &Services) -> Answer {
    list_each(node, |view| serde_json::to_vec(&allocated_pod(&view)?).ok()).await
}

async fn one(node: &Services, namespace: &str, name: &str, uid: Option<&str>) -> Answer {
    let view = match node.pod(namespace, name).await {
        Ok(view) => view,
        Err(status) => return unavailable(&status),
    };
    let found = view.filter(|view| uid.is_none_or(|uid| is_uid_of(view, uid)));
    match found.as_ref().and_then(allocated_pod) {
        Some(pod) => match serde_json::to_vec(&pod) {
            Ok(body) => json(body),
            Err(e) => error(StatusCode::INTERNAL_SERVER_ERROR, e),
        },
        None => text(StatusCode::NOT_FOUND, "pod does not exist"),
    }
}

// A client of the API server has the UID of the mirror pod.
fn is_uid_of(view: &PodView, uid: &str) -> bool {
    view.uid == uid || (!view.mirror_uid.is_empty() && view.mirror_uid == uid)
}

/// Returns the pod with an empty status. `None` if nothing is allocated to it: it waits for its admission,
/// was rejected or has ended. The object of pod-sync has the allocated resources.
fn allocated_pod(view: &PodView) -> Option<Fields> {
    #[derive(Default, Deserialize)]
    struct Status {
        #[serde(default)]
        phase: Option<String>,
    }
    let mut fields: Fields = serde_json::from_slice(&view.pod).ok()?;
    let status: Option<Status> = fields.get("status").and_then(|s| serde_json::from_str(s.get()).ok());
    let has_ended = matches!(status.unwrap_or_default().phase.as_deref(), Some("Succeeded" | "Failed"));
    let is_allocated = match view.worker.as_str() {
        "sync" => !has_ended,
        // Its resources are held until its containers have ended.
        "terminating" => true,
        _ => false,
    };
    fields.insert("status".to_owned(), to_raw_value(&serde_json::json!({})).ok()?);
    is_allocated.then_some(fields)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn admitted_pods_that_have_not_ended_are_allocated() {
        for (worker, phase, want) in [
            ("sync", "Pending", true),
            ("sync", "Running", true),
            ("sync", "Failed", false),
            ("sync", "Succeeded", false),
            ("terminating", "Running", true),
            ("terminating", "Failed", true),
            ("terminated", "Running", false),
            ("finished", "Failed", false),
            ("", "Pending", false),
        ] {
            let pod = json!({"kind": "Pod", "spec": {"containers": []}, "status": {"phase": phase}});
            let view = PodView { worker: worker.into(), pod: pod.to_string().into(), ..PodView::default() };
            let shown = allocated_pod(&view).map(|pod| serde_json::to_value(pod).unwrap());
            let without_status: Value = json!({"kind": "Pod", "spec": {"containers": []}, "status": {}});
            assert_eq!(shown, want.then_some(without_status), "{worker} {phase}");
        }
    }
}
