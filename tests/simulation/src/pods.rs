//! Pods of the tests.

use serde_json::{Value, json};

use crate::service::NODE;

/// Image of all pods; the fake registry has every image.
pub const IMAGE: &str = "example.test/app:1";

/// Returns a container of a pod spec with the image [`IMAGE`].
#[must_use]
pub fn container(name: &str) -> Value {
    json!({"name": name, "image": IMAGE, "imagePullPolicy": "IfNotPresent"})
}

/// Returns a pod that is bound to the node.
#[must_use]
pub fn pod(name: &str, containers: &[Value]) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "nodeName": NODE,
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": 30,
            "containers": containers,
        },
    })
}

/// Returns a pod with one container `c-<pod>`. The fake runtime selects the behaviour of containers by name.
#[must_use]
pub fn single(name: &str) -> Value {
    pod(name, &[container(&format!("c-{name}"))])
}

/// Returns a pod for a manifest, without a node name.
#[must_use]
pub fn manifest(name: &str) -> Value {
    let mut pod = single(name);
    if let Some(spec) = pod["spec"].as_object_mut() {
        spec.remove("nodeName");
    }
    pod
}
