//! Claims of volumes of the tests' own CSI driver, and pods that have them.

use quintlet_csi_driver::thread::DriverThread;
use serde_json::{Value, json};

use crate::{Node, pods};

/// Name of the driver.
pub const DRIVER: &str = "test.csi.quintlet.dev";

/// Starts the driver of a node, whose volumes need no attachment, for the first time.
///
/// # Panics
/// Panics if the driver cannot serve.
#[must_use]
pub fn start_driver(node: &Node) -> DriverThread {
    create_driver(node);
    restart_driver(node)
}

/// Creates the object of the driver.
///
/// # Panics
/// Panics if it exists.
pub fn create_driver(node: &Node) {
    // With the defaults of a real API server, without which a kubelet panics.
    let object = json!({"metadata": {"name": DRIVER}, "spec": {
        "attachRequired": false, "fsGroupPolicy": "ReadWriteOnceWithFSType", "podInfoOnMount": false,
        "requiresRepublish": false, "seLinuxMount": false, "storageCapacity": false,
        "volumeLifecycleModes": ["Persistent"],
    }});
    node.api().create("csidrivers", "", object).expect("the driver has no object yet");
}

/// Starts the driver of a node with the volumes that it had.
///
/// # Panics
/// Panics if the driver cannot serve.
#[must_use]
pub fn restart_driver(node: &Node) -> DriverThread {
    DriverThread::start(&node.root_dir(), &node.scratch().join("driver"), &[])
}

/// Creates a claim that is bound to a PersistentVolume `pv-<name>` with the handle `vol-<name>`, which
/// `change` completes.
///
/// # Panics
/// Panics if the objects exist.
pub fn bound_claim(node: &Node, name: &str, change: impl Fn(&mut Value)) {
    let claim = json!({"metadata": {"name": name}, "spec": {
        "accessModes": ["ReadWriteOnce"], "volumeName": format!("pv-{name}"),
        "resources": {"requests": {"storage": "1Gi"}},
    }});
    let claim = node.api().create("persistentvolumeclaims", "default", claim);
    let claim = claim.expect("there is no such claim");
    let mut volume = json!({"metadata": {"name": format!("pv-{name}")}, "spec": {
        "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}, "volumeMode": "Filesystem",
        "claimRef": {"namespace": "default", "name": name, "uid": claim["metadata"]["uid"]},
        "csi": {"driver": DRIVER, "volumeHandle": format!("vol-{name}"), "fsType": "ext4"},
    }});
    change(&mut volume);
    node.api().create("persistentvolumes", "", volume).expect("there is no such volume");
    let status =
        |claim: &mut Value| claim["status"] = json!({"phase": "Bound", "capacity": {"storage": "1Gi"}});
    node.api().edit("persistentvolumeclaims/status", "default", name, status).expect("the claim exists");
}

/// Returns a pod on the node that runs a script with a claim mounted at `/data`.
#[must_use]
pub fn with_claim(name: &str, claim: &str, script: &str) -> Value {
    let mut pod = pods::script(name, script);
    pod["spec"]["securityContext"] = json!({"fsGroup": 4711});
    pod["spec"]["volumes"] = json!([{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    pods::bound(pod)
}
