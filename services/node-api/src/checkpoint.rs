//! `POST /checkpoint/{namespace}/{pod}/{container}`: writes the state of a running container to a file on the
//! node (`pkg/kubelet/server: checkpoint`).
//!
//! pod-sync makes the checkpoint and chooses the file. This process passes only the name of the container: a
//! caller that could name the file could write anywhere with the runtime's rights.

use http::StatusCode;
use serde_json::{Value, json};

use node_api_base::answer::{Answer, json as json_answer, not_found, text};
use node_api_base::pod_lookup;
use node_api_base::services::Services;

/// Handles a request. `segments` is the path after its first segment.
pub(crate) async fn checkpoint(node: &Services, segments: &[String], query: &[(String, String)]) -> Answer {
    let [namespace, pod, container] = segments else { return not_found() };
    if [namespace, pod, container].into_iter().any(String::is_empty) {
        return not_found();
    }
    match make_checkpoint(node, namespace, pod, container, query).await {
        Ok(location) => json_answer(json!({"items": [location]}).to_string()),
        Err(answer) => answer,
    }
}

async fn make_checkpoint(
    node: &Services,
    namespace: &str,
    pod: &str,
    container: &str,
    query: &[(String, String)],
) -> Result<String, Answer> {
    let not_found_with = |message: String| text(StatusCode::NOT_FOUND, message);
    let failed = |why: &str| {
        let message = format!("checkpointing of {namespace}/{pod}/{container} failed ({why})");
        text(StatusCode::INTERNAL_SERVER_ERROR, message)
    };
    let view = node.pod(namespace, pod).await;
    let view = view.map_err(|status| failed(&format!("pod-sync: {}", status.message())))?;
    let view = view.ok_or_else(|| not_found_with("pod does not exist".to_owned()))?;
    let object: Value = serde_json::from_slice(&view.pod).unwrap_or_default();
    if pod_lookup::spec(&object, container).is_none() {
        return Err(not_found_with(format!("container {container} does not exist")));
    }
    // The kubelet answers an invalid timeout with 404, too.
    let timeout_seconds = timeout_seconds(query).map_err(|error| not_found_with(error.to_string()))?;
    node.checkpoint(&view.uid, container, timeout_seconds).await.map_err(|status| failed(status.message()))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("cannot parse value of timeout parameter")]
struct InvalidTimeout;

/// Returns the timeout in seconds; 0 means the runtime's default. The last of several values applies.
fn timeout_seconds(query: &[(String, String)]) -> Result<i64, InvalidTimeout> {
    match query.iter().rfind(|(k, _)| k == "timeout") {
        Some((_, seconds)) => seconds.parse().map_err(|_| InvalidTimeout),
        None => Ok(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use node_api_base::uri::decode_form;

    #[test]
    fn the_last_of_several_timeouts_applies() {
        for (query, want) in [
            ("", Ok(0)),
            ("timeout=5", Ok(5)),
            ("timeout=x&timeout=7", Ok(7)),
            ("timeout=-3", Ok(-3)),
            ("timeout=", Err(InvalidTimeout)),
            ("timeout=5s", Err(InvalidTimeout)),
        ] {
            assert_eq!(timeout_seconds(&decode_form(query)), want, "{query}");
        }
    }
}
