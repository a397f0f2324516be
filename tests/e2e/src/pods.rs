//! Manifests that tests share.

use std::path::Path;

use quintlet_localnode::images;
use serde_json::{Value, json};

/// Returns a pod with one container `main` that runs a shell script.
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

/// Returns the pod with a directory of the node at `path` in each of its containers. Through its files, a
/// test and a container wait for each other.
///
/// A command that a test runs in the container cannot do that: the end of the container that it causes may
/// kill it first, and it fails.
#[must_use]
pub fn with_dir(mut pod: Value, dir: &Path, path: &str) -> Value {
    pod["spec"]["volumes"] = json!([{"name": "dir", "hostPath": {"path": dir}}]);
    for kind in ["containers", "initContainers"] {
        for container in pod["spec"][kind].as_array_mut().into_iter().flatten() {
            container["volumeMounts"] = json!([{"name": "dir", "mountPath": path}]);
        }
    }
    pod
}

/// Returns a pod that runs until it is stopped, and then exits at once.
#[must_use]
pub fn sleeper(name: &str) -> Value {
    script(name, "trap 'exit 0' TERM; sleep 100000 & wait")
}

/// A web server with a page.
const WEB: &str = "trap 'exit 0' TERM; echo hello > /tmp/index.html; httpd -f -p 8080 -h /tmp & wait";

fn http_probe() -> Value {
    json!({"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1, "timeoutSeconds": 5})
}

/// Returns a web server with a readiness and a liveness probe over HTTP every second.
#[must_use]
pub fn http_probed(name: &str) -> Value {
    let mut pod = script(name, WEB);
    let main = &mut pod["spec"]["containers"][0];
    main["readinessProbe"] = http_probe();
    main["livenessProbe"] = http_probe();
    pod
}

/// Returns a web server with probes every second: startup and liveness probes append a line to a file in the
/// emptyDir `probes`, and the readiness probe uses HTTP.
#[must_use]
pub fn probed(name: &str) -> Value {
    let mut pod = script(name, WEB);
    let probe = |kind: &str| json!({"exec": {"command": ["sh", "-c", format!("echo x >> /probes/{kind}")]}, "periodSeconds": 1, "timeoutSeconds": 5});
    pod["spec"]["volumes"] = json!([{"name": "probes", "emptyDir": {}}]);
    let main = &mut pod["spec"]["containers"][0];
    main["volumeMounts"] = json!([{"name": "probes", "mountPath": "/probes"}]);
    main["startupProbe"] = probe("startup");
    main["livenessProbe"] = probe("liveness");
    main["readinessProbe"] = http_probe();
    pod
}

/// Returns the pod bound to the test's node, for the API server.
#[must_use]
pub fn bound(mut pod: Value) -> Value {
    pod["spec"]["nodeName"] = json!(crate::node::NODE);
    pod
}
