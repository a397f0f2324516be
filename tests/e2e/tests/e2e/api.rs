//! The lifecycle of a pod with an API server, and the traces of its start and termination through the
//! services.

use std::collections::{BTreeMap, BTreeSet};

use quintlet_e2e::bins::SERVICES;
use quintlet_e2e::otlp::{Receiver, Span, root};
use quintlet_e2e::{LONG, Node, Options, Seen, page, pods, until};
use quintlet_localnode::images;
use serde_json::{Value, json};

/// Returns a pod that serves its whole file system, so that its mounts can be read from outside.
fn full_pod(node: &Node) -> Value {
    let mut pod = pods::script("full", "env > /tmp/env; trap 'exit 0' TERM; httpd -f -p 8080 -h / & wait");
    pod["metadata"]["labels"] = json!({"tier": "first"});
    let spec = &mut pod["spec"];
    spec["terminationGracePeriodSeconds"] = json!(20);
    spec["volumes"] = json!([
        {"name": "config", "configMap": {"name": "settings"}},
        {"name": "secret", "secret": {"secretName": "keys"}},
        {"name": "info", "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
        {"name": "out", "hostPath": {"path": node.scratch()}},
    ]);
    let main = &mut spec["containers"][0];
    main["env"] = json!([
        {"name": "FROM_CONFIG", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "colour"}}},
        {"name": "FROM_SECRET", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
        {"name": "BYTES", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "bytes"}}},
        {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
    ]);
    main["volumeMounts"] = json!([
        {"name": "config", "mountPath": "/etc/settings"},
        {"name": "secret", "mountPath": "/etc/keys"},
        {"name": "info", "mountPath": "/etc/info"},
        {"name": "out", "mountPath": "/out"},
    ]);
    main["resources"] = json!({"requests": {"cpu": "10m"}});
    main["readinessProbe"] = json!({"tcpSocket": {"port": 8080}, "periodSeconds": 1});
    main["lifecycle"] = json!({"preStop": {"exec": {"command": ["sh", "-c", "echo ran > /out/pre-stop"]}}});
    pod
}

async fn wait_file(pod: &Seen, path: &str, want: &str) {
    until(&format!("{want:?} in {path}"), LONG, async || match page(pod.ip(), 8080, path).await {
        Ok(body) if body.contains(want) => Ok(()),
        Ok(body) => Err(body),
        Err(e) => Err(e.to_string()),
    })
    .await;
}

/// Returns the reasons of the events about the object whose reference has this value in a field.
async fn reasons(node: &Node, (field, value): (&str, &str)) -> BTreeSet<String> {
    let events = node.cluster().list("events").await;
    let of_object = events.iter().filter(|e| e["involvedObject"][field] == value);
    of_object.filter_map(|e| e["reason"].as_str().map(str::to_owned)).collect()
}

async fn wait_reasons(node: &Node, object: (&str, &str), want: &[&str]) {
    until(&format!("events {want:?}"), LONG, async || {
        let got = reasons(node, object).await;
        if want.iter().all(|r| got.contains(*r)) { Ok(()) } else { Err(got) }
    })
    .await;
}

/// Status fields that a kubelet reports for a running pod.
fn assert_running_status(pod: &Seen) {
    assert_eq!(pod.phase(), "Running");
    for kind in ["PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled"] {
        let (status, since) = pod.condition(kind);
        assert_eq!(status, "True", "{kind} of {pod}");
        assert!(!since.is_empty(), "{kind} of {pod}");
    }
    let status = &pod.pod["status"];
    assert_eq!(status["podIPs"], json!([{"ip": pod.ip()}]));
    assert_eq!(status["hostIPs"], json!([{"ip": pod.text("/status/hostIP")}]));
    assert_eq!(status["qosClass"], "Burstable");
    assert!(!pod.text("/status/startTime").is_empty(), "{status}");
    let main = pod.container("main");
    assert_eq!((main.state.as_str(), main.ready, main.started, main.restarts), ("running", true, true, 0));
    assert!(main.id.starts_with("containerd://") && !main.started_at.is_empty(), "{main:?}");
    let raw = &status["containerStatuses"][0];
    assert_eq!(raw["image"], "localhost/busybox:1");
    assert!(raw["imageID"].as_str().is_some_and(|id| id.contains("sha256:")), "{raw}");
}

/// Waits until the trace with this root is complete and has spans of these services.
async fn wait_trace(receiver: &Receiver, root: &str, uid: &str, services: &[&str]) -> Vec<Span> {
    until(&format!("the whole trace {root:?}"), LONG, async || {
        let spans = receiver.tree(root, uid)?;
        let seen: BTreeSet<&str> = spans.iter().map(|s| s.service.as_str()).collect();
        if services.iter().all(|s| seen.contains(s)) { Ok(spans) } else { Err(format!("{seen:?}")) }
    })
    .await
}

/// Returns whether the trace has this call by cri-proxy.
fn has_call(spans: &[Span], method: &str) -> bool {
    spans.iter().any(|s| s.service == "cri-proxy" && s.name.contains(method))
}

/// Each process has its own instance ID, and names the node.
fn assert_processes_are_named(spans: &[Span], node: &str) {
    let mut instances = BTreeMap::new();
    for span in spans {
        let text = |key: &str| span.resource.get(key).map(String::as_str);
        let instance = text("service.instance.id").unwrap_or_default();
        let of_service: &mut BTreeSet<&str> = instances.entry(span.service.as_str()).or_default();
        of_service.insert(instance);
        assert!(text("host.name").is_some_and(|name| !name.is_empty()), "{span:?}");
        assert_eq!(text("service.version"), Some(env!("CARGO_PKG_VERSION")), "{span:?}");
        assert_eq!(text("k8s.node.name"), Some(node), "{span:?}");
    }
    let all: BTreeSet<&str> = instances.values().flatten().copied().collect();
    assert!(!all.contains("") && all.len() == instances.len(), "{instances:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_and_termination_of_an_api_pod_are_one_trace_each() {
    lives_and_goes(Options::with_api("api")).await;
}

/// `QUINTLET_KUBECONFIG=admin.kubeconfig QUINTLET_NODE=NAME QUINTLET_NODE_KUBECONFIG=node.kubeconfig cargo nextest run -p quintlet-e2e --run-ignored only real`,
/// where no node NAME runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a real cluster in QUINTLET_KUBECONFIG, QUINTLET_NODE_KUBECONFIG and QUINTLET_NODE"]
async fn start_and_termination_of_a_pod_of_a_real_api_server_are_one_trace_each() {
    lives_and_goes(Options::with_real_api("api-real")).await;
}

async fn lives_and_goes(options: Options) {
    let receiver = Receiver::start().await;
    let options =
        Options { otlp_endpoint: Some(receiver.endpoint().to_owned()), sync_frequency: "5s", ..options };
    let node = Node::start(options).await;
    let api = node.cluster();
    let name = api.node.as_str();

    let object = api
        .wait_for("nodes", "", name, LONG, |n| {
            let conditions = n["status"]["conditions"].as_array();
            conditions.is_some_and(|c| c.iter().any(|c| c["type"] == "Ready" && c["status"] == "True"))
        })
        .await;
    assert!(object["status"]["nodeInfo"]["kubeletVersion"].as_str().is_some_and(|v| v.starts_with("v1.37")));
    // The first of them have no UID, since the Node was not known.
    wait_reasons(&node, ("name", name), &["Starting", "NodeAllocatableEnforced"]).await;
    let named = |n: &Value| {
        let images = n["status"]["images"].as_array().cloned().unwrap_or_default();
        let names = images.iter().flat_map(|i| i["names"].as_array().cloned().unwrap_or_default());
        names.filter_map(|n| n.as_str().map(str::to_owned)).any(|n| n == images::BUSYBOX)
    };
    let object = api.wait_for("nodes", "", name, LONG, named).await;
    let declared = object["status"]["declaredFeatures"].as_array().cloned().unwrap_or_default();
    assert!(declared.contains(&json!("InPlacePodLevelResourcesVerticalScaling")), "{declared:?}");
    let lease =
        api.wait_for("leases", "kube-node-lease", name, LONG, |l| !l["spec"]["renewTime"].is_null()).await;

    api.create(
        "configmaps",
        "default",
        json!({"metadata": {"name": "settings"}, "data": {"colour": "green"}}),
    )
    .await;
    let secret =
        json!({"metadata": {"name": "keys"}, "data": {"token": "c2VjcmV0LXZhbHVl", "bytes": "QUL//oBa"}});
    api.create("secrets", "default", secret).await;
    let created = api.create_pod(full_pod(&node)).await;
    let uid = created["metadata"]["uid"].as_str().unwrap().to_owned();
    let is_ready = |p: &Value| Seen::from_api(p.clone()).is_ready();
    let pod = Seen::from_api(api.wait_for("pods", "default", "full", LONG, is_ready).await);
    assert_running_status(&pod);

    for line in ["FROM_CONFIG=green", "FROM_SECRET=secret-value", &format!("POD_UID={uid}")] {
        wait_file(&pod, "/tmp/env", line).await;
    }
    // The runtime's JSON replaces the bytes that are not UTF-8.
    wait_file(&pod, "/tmp/env", "BYTES=AB").await;
    wait_file(&pod, "/tmp/env", &format!("HOST_IP={}", pod.text("/status/hostIP"))).await;
    wait_file(&pod, "/etc/settings/colour", "green").await;
    wait_file(&pod, "/etc/keys/token", "secret-value").await;
    wait_file(&pod, "/etc/info/labels", "tier=\"first\"").await;
    let account = "/var/run/secrets/kubernetes.io/serviceaccount";
    wait_file(&pod, &format!("{account}/namespace"), "default").await;
    wait_file(&pod, &format!("{account}/ca.crt"), "CERTIFICATE").await;
    let token = page(pod.ip(), 8080, &format!("{account}/token")).await.unwrap();
    assert_eq!(token.split('.').count(), 3, "not a JWT: {token:?}");
    wait_reasons(&node, ("uid", &uid), &["Pulled", "Created", "Started"]).await;

    let created = wait_trace(&receiver, "create pod", &uid, &SERVICES).await;
    assert!(has_call(&created, "StartContainer"), "{created:#?}");
    assert_processes_are_named(&created, name);

    // A label does not affect containers.
    let container = pod.container("main");
    api.edit("pods", "default", "full", |p| p["metadata"]["labels"]["tier"] = json!("second")).await;
    wait_file(&pod, "/etc/info/labels", "tier=\"second\"").await;
    assert_eq!(node.pod("full").await.unwrap().container("main"), container);

    // The mirror pod of a manifest is removed with it.
    node.pod_manifest(&pods::sleeper("static"));
    let mirror = format!("static-{name}");
    let object = api.wait_for("pods", "default", &mirror, LONG, is_ready).await;
    assert!(object["metadata"]["annotations"]["kubernetes.io/config.mirror"].is_string(), "{object:#}");
    node.remove_manifest("static.yaml");
    api.wait_for("pods", "default", &mirror, LONG, Value::is_null).await;

    // A job.
    let mut job = pods::script("job", "exit 7");
    job["spec"]["restartPolicy"] = json!("Never");
    api.create_pod(job).await;
    let job = api.wait_for("pods", "default", "job", LONG, |p| p["status"]["phase"] == "Failed").await;
    let ended = &job["status"]["containerStatuses"][0]["state"]["terminated"];
    assert_eq!((&ended["exitCode"], &ended["reason"]), (&json!(7), &json!("Error")), "{job:#}");
    api.delete("pods", "default", "job").await;

    api.delete("pods", "default", "full").await;
    api.wait_for("pods", "default", "full", LONG, Value::is_null).await;
    assert_eq!(std::fs::read_to_string(node.scratch().join("pre-stop")).unwrap().trim(), "ran");
    wait_reasons(&node, ("uid", &uid), &["Killing"]).await;
    node.wait_gone(&uid).await;
    let services = ["cri-proxy", "pleg-service", "status-reporter", "pod-sync"];
    let ended = wait_trace(&receiver, "terminate pod", &uid, &services).await;
    // The trace ends with the last status. Removals in the runtime follow the deletion of the API object.
    assert!(has_call(&ended, "StopContainer") && has_call(&ended, "StopPodSandbox"), "{ended:#?}");
    let (first, last) = (root(&created), root(&ended));
    assert_eq!(last.links, [(first.trace.clone(), first.id.clone())], "{last:#?}");
    assert_ne!(last.trace, first.trace);
    api.wait_for("pods", "default", "job", LONG, Value::is_null).await;

    let renewed = |l: &Value| l["spec"]["renewTime"] != lease["spec"]["renewTime"];
    api.wait_for("leases", "kube-node-lease", name, LONG, renewed).await;
    for (resource, name) in [("configmaps", "settings"), ("secrets", "keys")] {
        api.delete(resource, "default", name).await;
    }
    node.down().await;
}
