//! Features of the runtime: handlers, user namespaces, image volumes, and fields that are passed through to
//! it.

use quintlet_cri_api::v1;
use quintlet_simulation::{LONG, NODE, Options, Sim, pods};
use quintlet_testkit::fake_runtime::{self, Method, Rule};
use quintlet_testkit::wait::until;
use serde_json::json;
use tonic::Code;

fn handler(name: &str, user_namespaces: bool) -> v1::RuntimeHandler {
    let features = v1::RuntimeHandlerFeatures { user_namespaces, ..v1::RuntimeHandlerFeatures::default() };
    v1::RuntimeHandler { name: name.to_owned(), features: Some(features) }
}

fn sandbox_request(sim: &Sim, uid: &str) -> v1::RunPodSandboxRequest {
    let calls = sim.runtime.calls_of(Method::RunPodSandbox);
    calls.iter().rfind(|c| c.subjects.iter().any(|s| s == uid)).unwrap().request()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_class_sets_handler_and_overhead() {
    let sim = Sim::start(Options::default()).await;
    let class = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "boxed"},
        "handler": "kata-v2"});
    sim.api.create("runtimeclasses", "", class).unwrap();
    let with_class = |name: &str, class: &str| {
        let mut pod = pods::single(name);
        pod["spec"]["runtimeClassName"] = json!(class);
        pod["spec"]["overhead"] = json!({"cpu": "250m", "memory": "64Mi"});
        pod["metadata"]["annotations"] =
            json!({"kubernetes.io/ingress-bandwidth": "1M", "kubernetes.io/egress-bandwidth": "2M"});
        pod
    };
    let uid = sim.create(with_class("boxed", "boxed"));
    sim.wait_ready("boxed").await;
    let request = sandbox_request(&sim, &uid);
    assert_eq!(request.runtime_handler, "kata-v2");
    let config = request.config.unwrap();
    let overhead = config.linux.unwrap().overhead.unwrap();
    assert_eq!((overhead.cpu_shares, overhead.memory_limit_in_bytes), (256, 64 << 20));
    // The runtime passes these to CNI.
    assert_eq!(config.annotations["kubernetes.io/ingress-bandwidth"], "1M");
    assert_eq!(config.annotations["kubernetes.io/egress-bandwidth"], "2M");

    let absent = sim.create(with_class("absent", "none-such"));
    sim.wait_event("absent", "no such class", |e| {
        e.reason == "FailedCreatePodSandBox"
            && e.message == "Failed to create pod sandbox: runtimeclass.node.k8s.io \"none-such\" not found"
    })
    .await;
    assert!(sim.sandboxes(&absent).is_empty());
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_namespace_is_mapped_if_the_handler_supports_it_and_refused_otherwise() {
    let handlers = vec![handler("", false), handler("mapped", true)];
    let sim = Sim::start(Options {
        runtime: fake_runtime::Options { handlers, ..Default::default() },
        ..Options::default()
    })
    .await;
    for (name, handler) in [("mapped", "mapped"), ("plain", "plain")] {
        let class = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name},
            "handler": handler});
        sim.api.create("runtimeclasses", "", class).unwrap();
    }
    let with_class = |name: &str, class: Option<&str>| {
        let mut pod = pods::single(name);
        pod["spec"]["hostUsers"] = json!(false);
        if let Some(class) = class {
            pod["spec"]["runtimeClassName"] = json!(class);
        }
        pod["spec"]["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
        pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
        pod
    };
    for (name, class, text) in [
        ("none", None, "can't set `spec.hostUsers: false`, runtime does not support user namespaces"),
        (
            "other",
            Some("plain"),
            "can't set `spec.hostUsers: false`, RuntimeClass handler \"plain\" does not support user namespaces",
        ),
    ] {
        let uid = sim.create(with_class(name, class));
        sim.wait_event(name, "refused", |e| {
            e.reason == "FailedCreatePodSandBox"
                && e.message == format!("Failed to create pod sandbox: {text}")
        })
        .await;
        assert!(sim.sandboxes(&uid).is_empty());
        assert!(!sim.root_dir().join("pods").join(&uid).join("userns").exists(), "no range is taken");
    }
    let mut ranges = Vec::new();
    for name in ["a", "b"] {
        let uid = sim.create(with_class(name, Some("mapped")));
        sim.wait_ready(name).await;
        let linux = sandbox_request(&sim, &uid).config.unwrap().linux.unwrap();
        let userns = linux.security_context.unwrap().namespace_options.unwrap().userns_options.unwrap();
        assert_eq!(userns.mode, v1::NamespaceMode::Pod as i32);
        assert_eq!((userns.uids[0].container_id, userns.uids[0].length), (0, 65_536));
        let container = sim.runtime.newest(&uid, &format!("c-{name}")).unwrap().config;
        assert!(!container.mounts.is_empty());
        assert!(
            container.mounts.iter().all(|m| m.uid_mappings == userns.uids && m.gid_mappings == userns.gids)
        );
        ranges.push(userns.uids[0].host_id);
    }
    assert_eq!(ranges, [65_536, 131_072]);
    // The ID range of a pod is free once the pod is gone, and not before.
    sim.restart(quintlet_simulation::Service::PodSync).await;
    sim.delete("a", None);
    sim.wait_gone("a").await;
    let uid = sim.create(with_class("c", Some("mapped")));
    sim.wait_ready("c").await;
    let file = std::fs::read_to_string(sim.root_dir().join("pods").join(&uid).join("userns")).unwrap();
    assert!(file.contains("\"hostId\":65536,"), "{file}");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_without_a_free_range_of_ids_waits_and_starts_when_another_pod_releases_one() {
    let handlers = vec![handler("", true)];
    let options =
        Options { runtime: fake_runtime::Options { handlers, ..Default::default() }, ..Options::default() };
    let mut sim = Sim::prepare(options).await;
    // Two ranges of this size fit behind that of the host.
    sim.set_pod_sync_args(&["--ids-per-pod=1073741824"]);
    sim.start_all();
    let with_users = |name: &str| {
        let mut pod = pods::single(name);
        pod["spec"]["hostUsers"] = json!(false);
        pod
    };
    for name in ["a", "b"] {
        let _uid = sim.create(with_users(name));
        sim.wait_ready(name).await;
    }
    let uid = sim.create(with_users("waits"));
    sim.wait_event("waits", "no range is free", |e| {
        e.reason == "FailedCreatePodSandBox"
            && e.message
                .contains("could not find an empty slot to allocate a user namespace: all 2 are in use")
    })
    .await;
    assert!(sim.sandboxes(&uid).is_empty());
    sim.delete("a", Some(1));
    sim.wait_gone("a").await;
    sim.wait_ready("waits").await;
    assert_eq!(sim.sandboxes(&uid).len(), 1);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_volume_is_pulled_and_its_failure_affects_only_containers_that_mount_it() {
    let sim = Sim::start(Options::default()).await;
    let volume = |reference: &str| json!([{"name": "data", "image": {"reference": reference, "pullPolicy": "Always"}}]);
    let mut pod = pods::pod("both", &[pods::container("mounts"), pods::container("plain")]);
    pod["spec"]["volumes"] = volume("data.test/set:1");
    pod["spec"]["containers"][0]["volumeMounts"] =
        json!([{"name": "data", "mountPath": "/data", "subPath": "part"}]);
    let uid = sim.create(pod.clone());
    sim.wait_ready("both").await;
    assert_eq!(sim.calls_about(Method::PullImage, "data.test/set:1"), 1);
    let config = sim.runtime.newest(&uid, "mounts").unwrap().config;
    let mount = config.mounts.iter().find(|m| m.container_path == "/data").unwrap();
    let image = mount.image.clone().unwrap();
    assert_eq!(image.user_specified_image, "data.test/set:1");
    assert!(image.image.starts_with("sha256:") && mount.readonly && mount.host_path.is_empty(), "{mount:?}");
    assert_eq!(mount.image_sub_path, "part");
    let plain = sim.runtime.newest(&uid, "plain").unwrap().config;
    assert!(!plain.mounts.iter().any(|m| m.container_path == "/data"));

    let refused =
        Rule::on(Method::PullImage).about("data.test/bad:1").fail(Code::Unknown, "no such manifest");
    let rule = sim.runtime.script(refused);
    pod["metadata"]["name"] = json!("half");
    pod["spec"]["volumes"] = volume("data.test/bad:1");
    let _uid = sim.create(pod);
    let seen = sim
        .wait_pod("half", "ImagePullBackOff", |p| {
            let c = p.container("mounts");
            c.reason == "ImagePullBackOff"
                && c.message.contains("no such manifest")
                && p.container("plain").kind == "running"
        })
        .await;
    assert_eq!(seen.container("plain").restarts, 0);
    sim.wait_event("half", "ErrImagePull", |e| e.reason == "Failed" && e.message == "Error: ErrImagePull")
        .await;
    let pulls = sim.calls_about(Method::PullImage, "data.test/bad:1");
    assert_eq!(pulls, 1, "it backs off");
    sim.runtime.unscript(rule);
    sim.wait_ready("half").await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_signals_reach_the_runtime_and_the_status_with_the_feature_gate() {
    type Case<'a> = (&'a [&'a str], bool, i32, [Option<&'a str>; 2]);
    let gate = ["--feature-gates=ContainerStopSignals=true"];
    let cases: [Case<'_>; 3] = [
        (&gate, true, 29, [Some("SIGUSR1"), Some("SIGTERM")]),
        // containerd 1.6, 1.7 and 2.1 do not report the signal.
        (&gate, false, 29, [None, None]),
        (&[], true, 0, [None, None]),
    ];
    for (args, reports, number, names) in cases {
        let runtime = fake_runtime::Options { stop_signals: reports, ..Default::default() };
        let mut sim = Sim::prepare(Options { runtime, ..Options::default() }).await;
        sim.set_pod_sync_args(args);
        sim.start_all();
        let mut pod = pods::pod("signalled", &[pods::container("own"), pods::container("plain")]);
        pod["spec"]["os"] = json!({"name": "linux"});
        pod["spec"]["containers"][0]["lifecycle"] = json!({"stopSignal": "SIGUSR1"});
        let uid = sim.create(pod);
        sim.wait_ready("signalled").await;
        let sent = ["own", "plain"].map(|name| sim.runtime.newest(&uid, name).unwrap().config.stop_signal);
        let shown = sim.api.get("pods", "default", "signalled").unwrap();
        let statuses = shown["status"]["containerStatuses"].as_array().unwrap();
        let shown = [0, 1].map(|i| statuses[i]["stopSignal"].as_str());
        assert_eq!((sent, shown), ([number, 0], names), "{args:?}, reported: {reports}");
        sim.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bind_mount_options_reach_a_runtime_that_applies_them_and_a_pod_is_rejected_without() {
    let gate = ["--feature-gates=VolumeBindMountOptions=true"];
    for (args, able) in [(&gate[..], true), (&gate[..], false), (&[][..], true)] {
        let features = v1::RuntimeFeatures { mount_options: able, ..Default::default() };
        let runtime = fake_runtime::Options { features: Some(features), ..Default::default() };
        let mut sim = Sim::prepare(Options { runtime, ..Options::default() }).await;
        sim.set_pod_sync_args(args);
        sim.start_all();
        let mut pod = pods::single("hardened");
        pod["spec"]["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
        pod["spec"]["containers"][0]["volumeMounts"] =
            json!([{"name": "v", "mountPath": "/v", "bindMountOptions": ["noexec", "nosuid"]}]);
        let uid = sim.create(pod);
        let container =
            pods::single("hardened")["spec"]["containers"][0]["name"].as_str().unwrap().to_owned();
        if able && !args.is_empty() {
            sim.wait_ready("hardened").await;
            let mounts = sim.runtime.newest(&uid, &container).unwrap().config.mounts;
            let mount = mounts.iter().find(|mount| mount.container_path == "/v").unwrap();
            assert_eq!(mount.mount_options, ["noexec", "nosuid"]);
        } else {
            let is_rejected = |p: &quintlet_simulation::Seen| {
                p.text("/status/reason") == "PodFeatureUnsupported"
                    && p.text("/status/message").ends_with("that are not available: VolumeBindMountOptions")
            };
            sim.wait_pod("hardened", "rejected", is_rejected).await;
            assert_eq!(sim.runtime.count(Method::RunPodSandbox), 0);
        }
        let declared = || {
            let node = sim.api.get("nodes", "", NODE)?;
            // Only a Node whose status was written says what it does not have.
            node["status"]["nodeInfo"].as_object()?;
            let declared = node["status"]["declaredFeatures"].as_array().cloned().unwrap_or_default();
            Some(declared.contains(&json!("VolumeBindMountOptions")))
        };
        let wanted = able && !args.is_empty();
        let settled = async || match declared() {
            Some(found) if found == wanted => Ok(()),
            other => Err(other),
        };
        until("the Node declares the feature if it has it", LONG, settled).await;
        sim.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandboxes_have_the_sysctls_of_the_node_with_the_feature_gate() {
    let sysctl = "--default-pod-sysctls=net.core.somaxconn=7";
    let gate = "--feature-gates=DefaultPodSysctls=true";
    for (args, want) in [(&[sysctl][..], None), (&[sysctl, gate][..], Some("7"))] {
        let mut sim = Sim::prepare(Options::default()).await;
        sim.set_pod_sync_args(args);
        sim.start_all();
        let uid = sim.create(pods::single("tuned"));
        sim.wait_ready("tuned").await;
        let sysctls = sandbox_request(&sim, &uid).config.unwrap().linux.unwrap().sysctls;
        assert_eq!(sysctls.get("net.core.somaxconn").map(String::as_str), want);
        sim.finish().await;
    }
}
