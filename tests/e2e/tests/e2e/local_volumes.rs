//! Pods that read and write local PersistentVolumes, on a real runtime.

use std::path::Path;
use std::process::Command;

use quintlet_csi_driver::volumes::mounts_below;
use quintlet_e2e::{LONG, Node, Options, pods, until};
use serde_json::{Value, json};

/// Creates a claim that is bound to a local PersistentVolume.
fn bound_claim(node: &Node, name: &str, path: &Path) {
    let claim = json!({"metadata": {"name": name}, "spec": {
        "accessModes": ["ReadWriteOnce"], "volumeName": format!("pv-{name}"),
        "resources": {"requests": {"storage": "1Gi"}},
    }});
    let claim = node.api().create("persistentvolumeclaims", "default", claim).unwrap();
    let volume = json!({"metadata": {"name": format!("pv-{name}")}, "spec": {
        "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"},
        "claimRef": {"namespace": "default", "name": name, "uid": claim["metadata"]["uid"]},
        "local": {"path": path},
    }});
    node.api().create("persistentvolumes", "", volume).unwrap();
    let phase = |claim: &mut Value| claim["status"]["phase"] = json!("Bound");
    node.api().edit("persistentvolumeclaims/status", "default", name, phase).unwrap();
}

/// Returns a pod that appends its name to a file of each claim, and runs until it is deleted.
fn writer(name: &str) -> Value {
    let script = format!(
        "trap 'exit 0' TERM; for v in dir device; do echo {name} >> /$v/names; done; touch /dir/$(stat -c %g /dir/names); \
         sleep 100000 & wait"
    );
    let mut pod = pods::script(name, &script);
    pod["spec"]["securityContext"] = json!({"fsGroup": 4711});
    let volume = |name: &str| json!({"name": name, "persistentVolumeClaim": {"claimName": name}});
    pod["spec"]["volumes"] = json!([volume("dir"), volume("dev")]);
    pod["spec"]["containers"][0]["volumeMounts"] =
        json!([{"name": "dir", "mountPath": "/dir"}, {"name": "dev", "mountPath": "/device"}]);
    pods::bound(pod)
}

/// A loop device over a new file.
struct LoopDevice(String);

impl LoopDevice {
    fn new(file: &Path) -> Self {
        std::fs::File::create(file).unwrap().set_len(32 << 20).unwrap();
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        Self(String::from_utf8(made.stdout).unwrap().trim().to_owned())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _gone = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_of_a_local_directory_and_of_a_local_device_survive_their_pod() {
    let node = Node::start(Options::with_api("local-volumes")).await;
    let directory = node.scratch().join("disk");
    std::fs::create_dir_all(&directory).unwrap();
    let device = LoopDevice::new(&node.scratch().join("image"));
    bound_claim(&node, "dir", &directory);
    bound_claim(&node, "dev", Path::new(&device.0));
    let global = node.root_dir().join("plugins/kubernetes.io/local-volume/mounts/pv-dev");
    let mut expected = String::new();
    for name in ["first", "second"] {
        let made = node.cluster().create_pod(writer(name)).await;
        let uid = made["metadata"]["uid"].as_str().unwrap().to_owned();
        node.wait_ready(name).await;
        expected.push_str(&format!("{name}\n"));
        until("the pod has written to both volumes", LONG, async || {
            let read = |dir: &Path| std::fs::read_to_string(dir.join("names")).unwrap_or_default();
            let written = (read(&directory), read(&global), directory.join("4711").exists());
            if written == (expected.clone(), expected.clone(), true) { Ok(()) } else { Err(written) }
        })
        .await;
        // A killed pod-sync keeps the volumes of the running pod, and its successor unmounts them at the end.
        let starts = node.kill9("pod-sync");
        node.wait_back("pod-sync", starts, LONG).await;
        node.cluster().delete("pods", "default", name).await;
        node.wait_gone(&uid).await;
        until("no mount of the volumes left", LONG, async || {
            let mounts = mounts_below(&node.root_dir()).unwrap();
            let is_left = |path: &str| path.contains(&uid) || path.contains("local-volume");
            let left: Vec<_> = mounts.into_iter().filter(|m| is_left(&m.to_string_lossy())).collect();
            if left.is_empty() { Ok(()) } else { Err(left) }
        })
        .await;
    }
    assert_eq!(std::fs::read_to_string(directory.join("names")).unwrap(), expected);
    node.down().await;
    drop(device);
}
