//! `POST /checkpoint/{namespace}/{pod}/{container}`: writes the state of a running container to a file on the node
//! (`pkg/kubelet/server: checkpoint`).
//!
//! pod-sync makes the checkpoint and chooses the file. This process passes only the name of the container: a caller that could name
//! the file could write anywhere with the runtime's rights.

use http::StatusCode;
use serde_json::{Value, json};

use crate::answer::{Answer, json as json_answer, not_found, text};
use crate::pod_lookup;
use crate::services::Services;

/// Handles a request. `segments` is the path after its first segment.
pub async fn checkpoint(node: &Services, segments: &[String], query: &[(String, String)]) -> Answer {
    let [namespace, pod, container] = segments else { return not_found() };
    if [namespace, pod, container].into_iter().any(String::is_empty) {
        return not_found();
    }
    match checkpointed(node, namespace, pod, container, query).await {
        Ok(location) => json_answer(json!({"items": [location]}).to_string()),
        Err(answer) => answer,
    }
}

async fn checkpointed(
    node: &Services,
    namespace: &str,
    pod: &str,
    container: &str,
    query: &[(String, String)],
) -> Result<String, Answer> {
    let missing = |what: String| text(StatusCode::NOT_FOUND, what);
    let fault = |why: &str| {
        let message = format!("checkpointing of {namespace}/{pod}/{container} failed ({why})");
        text(StatusCode::INTERNAL_SERVER_ERROR, message)
    };
    let view = node.pod(namespace, pod).await;
    let view = view.map_err(|status| fault(&format!("pod-sync: {}", status.message())))?;
    let view = view.ok_or_else(|| missing("pod does not exist".to_owned()))?;
    let object: Value = serde_json::from_slice(&view.pod).unwrap_or_default();
    if pod_lookup::spec(&object, container).is_none() {
        return Err(missing(format!("container {container} does not exist")));
    }
    let seconds = timeout(query).map_err(|why| missing(why.to_owned()))?;
    node.checkpoint(&view.uid, container, seconds).await.map_err(|status| fault(status.message()))
}

/// Returns the timeout. The last of several values applies; 0 means the runtime's default.
fn timeout(query: &[(String, String)]) -> Result<i64, &'static str> {
    match query.iter().rfind(|(k, _)| k == "timeout") {
        Some((_, seconds)) => seconds.parse().map_err(|_| "cannot parse value of timeout parameter"),
        None => Ok(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uri::decode_form;

    #[test]
    fn the_last_of_several_timeouts_applies() {
        for (query, want) in [
            ("", Ok(0)),
            ("timeout=5", Ok(5)),
            ("timeout=x&timeout=7", Ok(7)),
            ("timeout=-3", Ok(-3)),
            ("timeout=", Err("cannot parse value of timeout parameter")),
            ("timeout=5s", Err("cannot parse value of timeout parameter")),
        ] {
            assert_eq!(timeout(&decode_form(query)), want, "{query}");
        }
    }
}
