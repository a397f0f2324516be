//! Pod features other than containers on a real runtime: order, sysctls, user namespaces, image volumes, pull
//! secrets, admission, deadlines.

use base64::Engine as _;
use quintlet_e2e::NODE;
use quintlet_e2e::registry::Registry;
use quintlet_e2e::{LONG, Node, Options, Seen, pods, until};
use quintlet_localnode::images;
use serde_json::{Value, json};

/// Returns a container that runs until SIGTERM, and appends a line to the file `lines` of [`pods::with_dir`]
/// at its start and end.
fn logging_container(name: &str) -> Value {
    json!({
        "name": name, "image": images::BUSYBOX, "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", format!(
            "trap 'echo {name} ends >> /v/lines; exit 0' TERM; echo {name} >> /v/lines; sleep 100000 & wait"
        )],
        "volumeMounts": [{"name": "dir", "mountPath": "/v"}],
    })
}

fn lines(dir: &std::path::Path) -> Vec<String> {
    let text = std::fs::read_to_string(dir.join("lines")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

async fn wait_api(node: &Node, name: &str, what: impl Fn(&Value) -> bool) -> Value {
    node.api().wait_for("pods", "default", name, LONG, what).await
}

fn is_ready(pod: &Value) -> bool {
    Seen::from_api(pod.clone()).is_ready()
}

fn waiting(pod: &Value) -> (&str, &str) {
    let waiting = &pod["status"]["containerStatuses"][0]["state"]["waiting"];
    (waiting["reason"].as_str().unwrap_or_default(), waiting["message"].as_str().unwrap_or_default())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn init_containers_and_sidecars_start_in_order_and_an_ephemeral_container_can_be_added() {
    let node = Node::start(Options::with_api("features-order")).await;
    let dir = node.scratch();
    let mut pod = pods::with_dir(pods::script("ordered", ""), &dir, "/v");
    let mut first = logging_container("first");
    first["command"] = json!(["sh", "-c", "echo first >> /v/lines"]);
    let sidecar = |name: &str| {
        let mut c = logging_container(name);
        c["restartPolicy"] = json!("Always");
        c
    };
    pod["spec"]["initContainers"] = json!([first, sidecar("side-1"), sidecar("side-2")]);
    pod["spec"]["containers"] = json!([logging_container("main")]);
    pod["spec"]["terminationGracePeriodSeconds"] = json!(30);
    node.api().create_pod(pods::bound(pod));
    wait_api(&node, "ordered", is_ready).await;

    let mut debugger = logging_container("debugger");
    debugger["command"] =
        json!(["sh", "-c", "cat /proc/1/cmdline > /v/first-process; echo debugger >> /v/lines"]);
    debugger["targetContainerName"] = json!("main");
    node.api()
        .edit("pods/ephemeralcontainers", "default", "ordered", |p| {
            p["spec"]["ephemeralContainers"] = json!([debugger])
        })
        .unwrap();
    wait_api(&node, "ordered", |p| {
        p["status"]["ephemeralContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 0
    })
    .await;
    let seen = std::fs::read_to_string(dir.join("first-process")).unwrap();
    assert!(seen.contains("echo main ends"), "it is in the process namespace of its target: {seen:?}");

    let uid = node.pod("ordered").await.unwrap().uid().to_owned();
    node.api().delete("pods", "default", "ordered", None).unwrap();
    node.wait_gone(&uid).await;
    let want = ["first", "side-1", "side-2", "main", "debugger", "main ends", "side-2 ends", "side-1 ends"];
    assert_eq!(lines(&dir), want);
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandbox_features_of_a_pod_are_provided_or_refused_according_to_the_runtime() {
    let node = Node::start(Options::with_api("features-sandbox")).await;
    let api = node.api();
    let dir = node.scratch();
    let script_with_dir = |name: &str, command: &str| {
        let script = format!("{command}; trap 'exit 0' TERM; sleep 100000 & wait");
        pods::with_dir(pods::script(name, &script), &dir, "/v")
    };

    let mut sysctl = script_with_dir("sysctl", "cat /proc/sys/net/ipv4/ip_unprivileged_port_start > /v/port");
    sysctl["spec"]["securityContext"] =
        json!({"sysctls": [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "77"}]});
    api.create_pod(pods::bound(sysctl.clone()));
    sysctl["metadata"]["name"] = json!("unsafe");
    sysctl["spec"]["securityContext"] = json!({"sysctls": [{"name": "kernel.msgmax", "value": "65536"}]});
    api.create_pod(pods::bound(sysctl));

    for (class, handler) in [("plain", "runc"), ("strange", "nobody-has-this")] {
        let object = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": class}, "handler": handler});
        api.create("runtimeclasses", "", object).unwrap();
        let mut pod = pods::sleeper(class);
        pod["spec"]["runtimeClassName"] = json!(class);
        api.create_pod(pods::bound(pod));
    }

    let mut mapped = script_with_dir("mapped", "cat /proc/self/uid_map > /v/map");
    mapped["spec"]["hostUsers"] = json!(false);
    // Users of the pod's user namespace may not write to the node's directory.
    mapped["spec"]["volumes"] = json!([{"name": "dir", "emptyDir": {}}]);
    api.create_pod(pods::bound(mapped));

    let mut volume = script_with_dir("image", "cp /image/etc/passwd /v/passwd");
    volume["spec"]["volumes"].as_array_mut().unwrap().push(json!({
        "name": "image", "image": {"reference": images::BUSYBOX, "pullPolicy": "IfNotPresent"}
    }));
    volume["spec"]["containers"][0]["volumeMounts"]
        .as_array_mut()
        .unwrap()
        .push(json!({"name": "image", "mountPath": "/image", "readOnly": true}));
    api.create_pod(pods::bound(volume));

    wait_api(&node, "sysctl", is_ready).await;
    until("what the sandbox has", LONG, async || {
        let text = std::fs::read_to_string(dir.join("port")).unwrap_or_default();
        if text == "77\n" { Ok(()) } else { Err(text) }
    })
    .await;
    let refused = wait_api(&node, "unsafe", |p| p["status"]["phase"] == "Failed").await;
    assert_eq!(refused["status"]["reason"], "SysctlForbidden");

    wait_api(&node, "plain", is_ready).await;
    let event = |name: &str, part: &str| {
        let found = api.list("events").into_iter().find(|e| {
            e["involvedObject"]["name"] == name && e["message"].as_str().is_some_and(|m| m.contains(part))
        });
        found.ok_or_else(|| format!("{name}: no event has {part:?}"))
    };
    until("a handler that the runtime lacks", LONG, async || event("strange", "nobody-has-this")).await;

    let object = api.get("nodes", "", NODE).unwrap();
    // Image volumes exist since containerd 2.1.
    if node.runtime_version().await >= (2, 1) {
        wait_api(&node, "image", is_ready).await;
        until("what the image has", LONG, async || {
            let text = std::fs::read_to_string(dir.join("passwd")).unwrap_or_default();
            if text.starts_with("root:") { Ok(()) } else { Err(text) }
        })
        .await;
    } else {
        let fails = |p: &Value| waiting(p).0 == "CreateContainerError";
        wait_api(&node, "image", fails).await;
    }
    let handlers = object["status"]["runtimeHandlers"].as_array().cloned().unwrap_or_default();
    let has_namespaces = handlers.iter().any(|h| h["name"] == "" && h["features"]["userNamespaces"] == true);
    if has_namespaces {
        let pod = wait_api(&node, "mapped", is_ready).await;
        let uid = pod["metadata"]["uid"].as_str().unwrap();
        let map = until("the map", LONG, async || {
            let map = node.empty_dir_file(uid, "dir", "map");
            if map.is_empty() { Err(map) } else { Ok(map) }
        })
        .await;
        let fields: Vec<u32> = map.split_whitespace().map(|f| f.parse().unwrap()).collect();
        assert!(fields[0] == 0 && fields[1] >= 65_536 && fields[2] == 65_536, "{map:?}");
    } else {
        let text = "can't set `spec.hostUsers: false`, runtime does not support user namespaces";
        until("the refusal", LONG, async || event("mapped", text)).await;
    }
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn private_images_run_only_for_pods_with_credentials() {
    let registry = Registry::start().await;
    registry.push("secret:1");
    registry.require("somebody", "right");
    let node = Node::start(Options::with_api("features-secrets")).await;
    let api = node.api();
    let image = registry.reference("secret:1");
    let pod = |name: &str, secret: Option<&str>| {
        let mut pod = pods::sleeper(name);
        pod["spec"]["containers"][0]["image"] = json!(image);
        if let Some(secret) = secret {
            pod["spec"]["imagePullSecrets"] = json!([{"name": secret}]);
        }
        pods::bound(pod)
    };
    for (name, password) in [("good", "right"), ("bad", "wrong")] {
        let auth = base64::engine::general_purpose::STANDARD.encode(format!("somebody:{password}"));
        let host = image.split('/').next().unwrap();
        let config = json!({"auths": {host: {"auth": auth}}}).to_string();
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": "default"},
            "type": "kubernetes.io/dockerconfigjson",
            "data": {".dockerconfigjson": base64::engine::general_purpose::STANDARD.encode(config)},
        });
        api.create("secrets", "default", secret).unwrap();
    }
    api.create_pod(pod("without", None));
    api.create_pod(pod("wrong", Some("bad")));
    let fails = |p: &Value| ["ErrImagePull", "ImagePullBackOff"].contains(&waiting(p).0);
    wait_api(&node, "without", fails).await;
    wait_api(&node, "wrong", fails).await;
    api.create_pod(pod("right", Some("good")));
    wait_api(&node, "right", is_ready).await;
    // The image is present now, and still not accessible to every pod.
    api.create_pod(pod("late", None));
    wait_api(&node, "late", fails).await;
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_are_admitted_a_critical_pod_preempts_another_and_a_deadline_ends_one() {
    let node = Node::start(Options::with_api("features-place")).await;
    let api = node.api();
    let object =
        api.wait_for("nodes", "", NODE, LONG, |n| n["status"]["allocatable"]["cpu"].is_string()).await;
    let cpu: u32 = object["status"]["allocatable"]["cpu"].as_str().unwrap().parse().unwrap();
    let wants = |name: &str, cpu: u32| {
        // A container that exits with 0 on SIGTERM has succeeded.
        let mut pod = pods::script(name, "trap 'exit 143' TERM; sleep 100000 & wait");
        pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": cpu.to_string()}});
        pods::bound(pod)
    };
    api.create_pod(wants("fits", cpu));
    wait_api(&node, "fits", is_ready).await;
    api.create_pod(wants("late", 1));
    let refused = wait_api(&node, "late", |p| p["status"]["phase"] == "Failed").await;
    assert_eq!(refused["status"]["reason"], "OutOfcpu", "{refused:#}");

    let mut critical = wants("critical", 1);
    critical["metadata"]["namespace"] = json!("kube-system");
    critical["spec"]["priorityClassName"] = json!("system-node-critical");
    critical["spec"]["priority"] = json!(2_000_001_000);
    api.create_pod(critical);
    let evicted = wait_api(&node, "fits", |p| p["status"]["phase"] == "Failed").await;
    assert_eq!(evicted["status"]["reason"], "Preempting", "{evicted:#}");
    api.wait_for("pods", "kube-system", "critical", LONG, is_ready).await;

    let mut timed = pods::script("timed", "trap 'exit 143' TERM; sleep 100000 & wait");
    timed["spec"]["activeDeadlineSeconds"] = json!(2);
    api.create_pod(pods::bound(timed));
    let ended = wait_api(&node, "timed", |p| p["status"]["phase"] == "Failed").await;
    assert_eq!(ended["status"]["reason"], "DeadlineExceeded", "{ended:#}");

    // An orphaned directory: no pod has this UID.
    let orphan = node.root_dir().join("pods/0d1f7cbe-7a55-4a3e-9d77-6a27cf6a3c11");
    std::fs::create_dir_all(orphan.join("plugins/kubernetes.io~empty-dir/wrapped")).unwrap();
    until("the orphaned directory is removed", LONG, async || if orphan.exists() { Err(()) } else { Ok(()) })
        .await;
    node.down().await;
}
