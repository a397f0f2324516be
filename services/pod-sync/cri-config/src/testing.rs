//! Pods for the tables of this folder.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

/// Pod `web` in `default`, defaulted where the rules here need it.
pub(crate) fn pod_of(mut spec: Value) -> Pod {
    if spec.get("enableServiceLinks").is_none() {
        spec["enableServiceLinks"] = json!(true);
    }
    if spec.get("securityContext").is_none() {
        spec["securityContext"] = json!({});
    }
    serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "default", "uid": "u1",
            "annotations": {"kubernetes.io/config.source": "api"}},
        "spec": spec,
    }))
    .unwrap()
}
