//! A node that changes from Quintlet to a kubelet and back while its pods run.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use quintlet_csi_driver::thread::DriverThread;
use quintlet_csi_driver::volumes::mounts_below;
use quintlet_e2e::bins::SERVICES;
use quintlet_e2e::claims::{DRIVER, bound_claim, create_driver};
use quintlet_e2e::{LONG, NODE, Node, Options, Seen, pods, runtime, until};
use quintlet_recordings::kubelet::{Kubelet, KubeletCommand};
use quintlet_recordings::registrar;
use serde_json::{Value, json};

/// Environment variables with the paths of the kubelet and of csi-node-driver-registrar.
const PROGRAMS: [&str; 2] = ["QUINTLET_KUBELET", "QUINTLET_REGISTRAR"];

/// Returns a pod with a volume of each way of mounting: claims of file systems and of devices, subpaths,
/// files of objects, tmpfs.
fn pod(name: &str) -> Value {
    let script = "echo x >> /data/starts; echo x >> /empty/starts; trap 'exit 0' TERM; sleep 100000 & wait";
    let mut pod = pods::script(name, script);
    pod["spec"]["securityContext"] = json!({"fsGroup": 4711});
    pod["spec"]["volumes"] = json!([
        {"name": "data", "persistentVolumeClaim": {"claimName": format!("{name}-data")}},
        {"name": "disk", "persistentVolumeClaim": {"claimName": format!("{name}-disk")}},
        {"name": "conf", "configMap": {"name": "settings"}},
        {"name": "empty", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]);
    let main = &mut pod["spec"]["containers"][0];
    main["volumeMounts"] = json!([
        {"name": "data", "mountPath": "/data"},
        {"name": "data", "mountPath": "/part", "subPath": "part"},
        {"name": "conf", "mountPath": "/conf"},
        {"name": "conf", "mountPath": "/key", "subPath": "key"},
        {"name": "empty", "mountPath": "/empty"},
        {"name": "memory", "mountPath": "/memory"},
    ]);
    main["volumeDevices"] = json!([{"name": "disk", "devicePath": "/dev/data"}]);
    pods::bound(pod)
}

/// Creates a pod and its claims, and waits until it is Ready. Returns its UID.
async fn create(node: &Node, name: &str) -> String {
    let medium = json!({"medium": "loop"});
    bound_claim(node, &format!("{name}-data"), |volume| {
        volume["spec"]["csi"]["volumeAttributes"] = medium.clone();
    });
    bound_claim(node, &format!("{name}-disk"), |volume| {
        volume["spec"]["volumeMode"] = json!("Block");
        volume["spec"]["csi"]["volumeAttributes"] = medium.clone();
    });
    let made = node.api().create_pod(pod(name));
    let ready = |pod: &Value| Seen::from_api(pod.clone()).is_ready();
    node.api().wait_for("pods", "default", name, LONG, ready).await;
    made["metadata"]["uid"].as_str().unwrap().to_owned()
}

/// State of pods that a change of agents must not change.
#[derive(Debug, PartialEq, Eq)]
struct Running {
    containers: BTreeSet<String>,
    mounts: BTreeSet<PathBuf>,
}

async fn running(node: &Node, uids: &[&str]) -> Running {
    let of_pods = |text: &str| uids.iter().any(|uid| text.contains(uid));
    let listed = runtime::list(node.containerd.channel().await.unwrap()).await.unwrap();
    let containers = listed.containers.into_iter();
    let uid = |labels: &std::collections::HashMap<String, String>| labels["io.kubernetes.pod.uid"].clone();
    let containers =
        containers.filter(|c| of_pods(&uid(&c.labels))).map(|c| format!("{} {:?}", c.id, c.state()));
    let mounts = mounts_below(&node.root_dir()).unwrap();
    let mounts = mounts.into_iter().filter(|mount| of_pods(&mount.to_string_lossy()));
    Running { containers: containers.collect(), mounts: mounts.collect() }
}

/// Returns the driver's calls that remove a volume.
fn removals(driver: &DriverThread) -> usize {
    driver.calls_of("NodeUnpublishVolume") + driver.calls_of("NodeUnstageVolume")
}

/// Deletes a pod, and waits until nothing of it is left.
async fn delete(node: &Node, driver: &DriverThread, name: &str, uid: &str) {
    node.api().delete("pods", "default", name, None).unwrap();
    node.api().wait_for("pods", "default", name, LONG, Value::is_null).await;
    until("nothing of the pod is left", LONG, async || {
        let left = (running(node, &[uid]).await, node.root_dir().join("pods").join(uid).exists());
        let unstaged =
            ["data", "disk"].map(|volume| driver.calls_of(&format!("NodeUnstageVolume vol-{name}-{volume}")));
        let nothing = left.0.containers.is_empty() && left.0.mounts.is_empty() && !left.1;
        if nothing && unstaged == [1, 1] { Ok(()) } else { Err((left, unstaged)) }
    })
    .await;
}

fn start_kubelet(node: &Node, binary: &Path) -> Kubelet {
    let base = node.scratch().join("kubelet");
    let kubeconfig = base.join("kubeconfig");
    std::fs::create_dir_all(&base).unwrap();
    node.api().kubeconfig(&kubeconfig).unwrap();
    let config = json!({
        "cgroupRoot": node.containerd.cgroup_root(),
        "clusterDNS": [],
        // The API server reads JSON only.
        "contentType": "application/json",
        "podLogsDir": node.pod_logs_dir(),
    });
    Kubelet::start(&KubeletCommand {
        binary,
        kubeconfig: &kubeconfig,
        base: &base,
        root_dir: node.root_dir(),
        node: NODE,
        runtime: node.containerd.socket(),
        config,
    })
    .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a kubelet in QUINTLET_KUBELET and csi-node-driver-registrar in QUINTLET_REGISTRAR"]
async fn pods_and_their_volumes_survive_a_change_to_a_kubelet_and_back() {
    let program =
        |name: &str| PathBuf::from(std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set")));
    let [binary, registrar] = PROGRAMS.map(program);
    let mut node = Node::start(Options::with_api("agents")).await;
    create_driver(&node);
    let (driver, registrar) =
        registrar::start(&registrar, &node.root_dir(), &node.scratch().join("driver"), DRIVER).unwrap();
    let settings = json!({"metadata": {"name": "settings"}, "data": {"key": "value"}});
    node.api().create("configmaps", "default", settings).unwrap();
    let (ours, ours_too) = (create(&node, "ours").await, create(&node, "ours-too").await);
    let before = running(&node, &[&ours, &ours_too]).await;

    for name in SERVICES {
        node.end_service(name).await;
    }
    let kubelet = start_kubelet(&node, &binary);
    let (theirs, theirs_too) = (create(&node, "theirs").await, create(&node, "theirs-too").await);
    assert_eq!(running(&node, &[&ours, &ours_too]).await, before, "the kubelet has taken the pods over");
    assert_eq!(removals(&driver), 0);
    delete(&node, &driver, "ours", &ours).await;
    let before = running(&node, &[&ours_too, &theirs_too]).await;

    drop(kubelet);
    let removed = removals(&driver);
    for name in SERVICES {
        node.start_service(name, &[]).await;
    }
    for name in ["ours-too", "theirs", "theirs-too"] {
        node.wait_ready(name).await;
    }
    delete(&node, &driver, "theirs", &theirs).await;
    assert_eq!(running(&node, &[&ours_too, &theirs_too]).await, before, "Quintlet has taken the pods over");
    assert_eq!(removals(&driver), removed + 4, "two volumes of one pod were removed");
    for (name, uid) in [("ours-too", &ours_too), ("theirs-too", &theirs_too)] {
        let pod = node.api().get("pods", "default", name).unwrap();
        assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0, "{pod:#}");
        assert_eq!(node.empty_dir_file(uid, "empty", "starts"), "x\n", "{name} started once");
    }
    delete(&node, &driver, "ours-too", &ours_too).await;
    delete(&node, &driver, "theirs-too", &theirs_too).await;
    drop(registrar);
    node.down().await;
    drop(driver);
}
