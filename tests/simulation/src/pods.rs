//! Pods of the tests.

use serde_json::{Value, json};

use crate::service::NODE;

/// The image of all of them; the fake registry has everything.
pub const IMAGE: &str = "example.test/app:1";

/// A container.
#[must_use]
pub fn container(name: &str) -> Value {
    json!({"name": name, "image": IMAGE, "imagePullPolicy": "IfNotPresent"})
}

/// A pod bound to the node, with these containers.
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

/// A pod with one container, named `c-` and the pod's name, since the fake runtime tells containers' behaviour by name.
#[must_use]
pub fn single(name: &str) -> Value {
    pod(name, &[container(&format!("c-{name}"))])
}

/// A pod as a manifest has it: without a node.
#[must_use]
pub fn manifest(name: &str) -> Value {
    let mut pod = single(name);
    if let Some(spec) = pod["spec"].as_object_mut() {
        spec.remove("nodeName");
    }
    pod
}
