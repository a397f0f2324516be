//! Manifests the tests share.

use quintlet_localnode::images;
use serde_json::{Value, json};

/// A pod of one container `main` that runs a shell script.
#[must_use]
pub fn script(name: &str, script: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "terminationGracePeriodSeconds": 2,
            "containers": [{
                "name": "main", "image": images::BUSYBOX, "imagePullPolicy": "IfNotPresent",
                "command": ["sh", "-c", script],
            }],
        },
    })
}

/// A pod that runs until it is told to stop, and then stops at once.
#[must_use]
pub fn sleeper(name: &str) -> Value {
    script(name, "trap 'exit 0' TERM; sleep 100000 & wait")
}

/// A web server whose startup and liveness probes leave a line each time they run, in the emptyDir `probes`, and whose readiness is
/// asked over HTTP, all every second.
#[must_use]
pub fn probed(name: &str) -> Value {
    let mut pod =
        script(name, "trap 'exit 0' TERM; echo hello > /tmp/index.html; httpd -f -p 8080 -h /tmp & wait");
    let probe = |kind: &str| json!({"exec": {"command": ["sh", "-c", format!("echo x >> /probes/{kind}")]}, "periodSeconds": 1, "timeoutSeconds": 5});
    pod["spec"]["volumes"] = json!([{"name": "probes", "emptyDir": {}}]);
    let main = &mut pod["spec"]["containers"][0];
    main["volumeMounts"] = json!([{"name": "probes", "mountPath": "/probes"}]);
    main["startupProbe"] = probe("startup");
    main["livenessProbe"] = probe("liveness");
    main["readinessProbe"] =
        json!({"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1, "timeoutSeconds": 5});
    pod
}

/// The pod, bound to the node of the tests, as the API server wants it.
#[must_use]
pub fn bound(mut pod: Value) -> Value {
    pod["spec"]["nodeName"] = json!(crate::node::NODE);
    pod
}
