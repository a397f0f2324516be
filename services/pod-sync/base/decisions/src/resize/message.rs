//! Messages of resize events.

use std::borrow::Cow;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use quintlet_model::pod;
use serde::Serialize;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Summary<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    resources: Option<&'a ResourceRequirements>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    init_containers: Vec<ContainerSummary<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    containers: Vec<ContainerSummary<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    generation: Option<i64>,
    #[serde(skip_serializing_if = "str::is_empty")]
    error: &'a str,
}

#[derive(Serialize)]
struct ContainerSummary<'a> {
    name: &'a str,
    resources: Cow<'a, ResourceRequirements>,
}

fn summaries(containers: &[Container]) -> Vec<ContainerSummary<'_>> {
    containers
        .iter()
        .map(|c| ContainerSummary {
            name: &c.name,
            resources: c
                .resources
                .as_ref()
                .map_or_else(|| Cow::Owned(ResourceRequirements::default()), Cow::Borrowed),
        })
        .collect()
}

/// Returns `Pod resize <what>: <summary>`. `what` is `started`, `completed`, `error`, or the reason of
/// PodResizePending.
#[must_use]
pub fn resize_message(what: &str, pod: &Pod, generation: Option<i64>, error: &str) -> String {
    let summary = Summary {
        resources: pod::spec(pod).resources.as_ref(),
        init_containers: summaries(pod::init_containers(pod)),
        containers: summaries(&pod::spec(pod).containers),
        generation: generation.filter(|g| *g > 0),
        error,
    };
    match serde_json::to_string(&summary) {
        Ok(json) => format!("Pod resize {what}: {json}"),
        Err(_) => format!("Pod resize {what}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_testkit::pods::pod_json;
    use serde_json::json;

    #[test]
    fn the_summary_has_the_requested_resources_and_the_reason_against_them() {
        let limits = json!({"limits": {"cpu": "1"}});
        let p = pod_json(json!({
            "initContainers": [{"name": "i", "image": "i"}],
            "containers": [{"name": "a", "image": "i", "resources": limits}],
        }));
        assert_eq!(
            resize_message("started", &p, Some(4), ""),
            r#"Pod resize started: {"initContainers":[{"name":"i","resources":{}}],"containers":[{"name":"a","resources":{"limits":{"cpu":"1"}}}],"generation":4}"#
        );
        let p = pod_json(json!({"resources": limits, "containers": [{"name": "a", "image": "i"}]}));
        assert_eq!(
            resize_message("error", &p, None, "no"),
            r#"Pod resize error: {"resources":{"limits":{"cpu":"1"}},"containers":[{"name":"a","resources":{}}],"error":"no"}"#
        );
    }
}
