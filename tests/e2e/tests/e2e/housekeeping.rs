//! Housekeeping on a real runtime: images, leftovers of pods, dead instances, pods past their deadline.

use std::collections::{BTreeMap, BTreeSet};

use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::{GetImageRequest, UpdateImageRequest};
use jiff::Timestamp;
use quintlet_cri_api::v1::image_service_client::ImageServiceClient;
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_cri_api::v1::{
    LinuxPodSandboxConfig, ListImagesRequest, ListPodSandboxRequest, PodSandboxConfig, PodSandboxMetadata,
    RemovePodSandboxRequest, RunPodSandboxRequest, StopPodSandboxRequest,
};
use quintlet_e2e::registry::Registry;
use quintlet_e2e::{LONG, Machine, Node, Options, Seen, pods, until};
use quintlet_localnode::images;
use serde_json::{Value, json};
use tonic::Request;

/// Makes and stops the sandbox of a pod, as an agent does whose place the node's takes.
async fn dead_sandbox(machine: &Machine<'_>, name: &str, cgroup_root: &str) -> String {
    let mut client = RuntimeServiceClient::new(machine.containerd.channel().await.unwrap());
    let metadata =
        PodSandboxMetadata { name: name.into(), uid: name.into(), namespace: "default".into(), attempt: 0 };
    let labels = [("name", name), ("namespace", "default"), ("uid", name)];
    let config = PodSandboxConfig {
        metadata: Some(metadata),
        labels: labels.map(|(key, value)| (format!("io.kubernetes.pod.{key}"), value.to_owned())).into(),
        linux: Some(LinuxPodSandboxConfig {
            cgroup_parent: format!("{cgroup_root}/kubepods/besteffort/pod{name}"),
            ..LinuxPodSandboxConfig::default()
        }),
        ..PodSandboxConfig::default()
    };
    let run = RunPodSandboxRequest { config: Some(config), runtime_handler: String::new() };
    let id = client.run_pod_sandbox(run).await.unwrap().into_inner().pod_sandbox_id;
    client.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: id.clone() }).await.unwrap();
    id
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_pod_that_another_agent_left_is_removed_if_its_cgroup_is_one_of_this_node() {
    let mut made = Vec::new();
    let node = Node::start_on(Options::standalone("dead-foreign"), async |machine| {
        let root = machine.containerd.cgroup_root();
        made.push(dead_sandbox(&machine, "left", &root).await);
        made.push(dead_sandbox(&machine, "other", &format!("{root}/other")).await);
    })
    .await;
    let mut client = RuntimeServiceClient::new(node.cri());
    let mut sandboxes = async || {
        let list = client.list_pod_sandbox(ListPodSandboxRequest::default()).await.unwrap().into_inner();
        list.items.into_iter().map(|sandbox| sandbox.id).collect::<Vec<_>>()
    };
    until("one sandbox is left", LONG, async || {
        let ids = sandboxes().await;
        if ids == made[1..] { Ok(()) } else { Err(ids) }
    })
    .await;
    // Housekeeping has run again.
    node.pod_manifest(&pods::sleeper("later"));
    node.wait_ready("later").await;
    assert!(sandboxes().await.contains(&made[1]));
    let mut client = RuntimeServiceClient::new(node.cri());
    client.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: made[1].clone() }).await.unwrap();
    node.down().await;
}

/// Returns a pod of another image that runs until it is stopped.
fn of_image(name: &str, image: &str) -> Value {
    let mut pod = pods::sleeper(name);
    pod["spec"]["containers"][0]["image"] = json!(image);
    pod
}

/// Returns the tags in the runtime, and whether each is pinned.
async fn tags(node: &Node) -> BTreeMap<String, bool> {
    let mut client = ImageServiceClient::new(node.cri());
    let reply = client.list_images(ListImagesRequest::default()).await.unwrap().into_inner();
    reply.images.into_iter().flat_map(|i| i.repo_tags.into_iter().map(move |t| (t, i.pinned))).collect()
}

async fn wait_tags(node: &Node, want: &BTreeSet<String>) {
    until("only images that may not go", LONG, async || {
        let now = tags(node).await;
        if now.keys().eq(want) { Ok(()) } else { Err(now) }
    })
    .await;
}

/// Pins an image, as an administrator does. Returns whether this runtime supports it.
async fn pin(node: &Node, image: &str) -> bool {
    let mut client = ImagesClient::new(node.containerd.channel().await.unwrap());
    let named = |request: &mut tonic::metadata::MetadataMap| {
        request.insert("containerd-namespace", "k8s.io".parse().unwrap());
    };
    let mut get = Request::new(GetImageRequest { name: image.to_owned() });
    named(get.metadata_mut());
    let mut found = client.get(get).await.unwrap().into_inner().image.unwrap();
    found.labels.insert("io.cri-containerd.pinned".to_owned(), "pinned".to_owned());
    let mut update = Request::new(UpdateImageRequest { image: Some(found), ..UpdateImageRequest::default() });
    named(update.metadata_mut());
    client.update(update).await.unwrap();
    if node.runtime_version().await < (1, 7) {
        return false;
    }
    until("the image is pinned", LONG, async || {
        let now = tags(node).await;
        if now[image] { Ok(()) } else { Err(now) }
    })
    .await;
    true
}

/// Pulls an image by a pod that is then removed.
async fn pulled_and_left(node: &Node, name: &str, image: &str) {
    node.pod_manifest(&of_image(name, image));
    let uid = node.wait_ready(name).await.uid().to_owned();
    node.remove_manifest(&format!("{name}.yaml"));
    node.wait_gone(&uid).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_are_removed_for_space_and_by_age_unless_used_or_pinned() {
    let registry = Registry::start().await;
    let image = |name: &str| registry.reference(&format!("{name}:1"));
    for name in ["used", "ended", "pinned", "left"] {
        registry.push(&format!("{name}:1"));
    }
    let mut node = Node::start(Options::standalone("housekeeping-images")).await;
    node.pod_manifest(&of_image("user", &image("used")));
    // A terminated container still uses its image.
    let mut ended = of_image("ended", &image("ended"));
    ended["spec"]["restartPolicy"] = json!("Never");
    ended["spec"]["containers"][0]["command"] = json!(["sh", "-c", "exit 0"]);
    node.pod_manifest(&ended);
    pulled_and_left(&node, "pinner", &image("pinned")).await;
    pulled_and_left(&node, "leaver", &image("left")).await;
    let before = node.wait_ready("user").await;
    node.wait_pod("ended", "ended", LONG, |p| p.phase() == "Succeeded").await;
    let mut stay: BTreeSet<String> = [image("used"), image("ended"), images::PAUSE.to_owned()].into();
    if pin(&node, &image("pinned")).await {
        stay.insert(image("pinned"));
    }
    let there: BTreeSet<String> = tags(&node).await.into_keys().collect();
    assert!(there.is_superset(&stay), "{there:?}");
    assert!(there.contains(&image("left")), "by the thresholds of the harness nothing goes: {there:?}");

    // If more space is requested than exists, all unused images are removed, and the failure is reported.
    node.end_service("pod-sync").await;
    let room = [
        ("--image-gc-high-threshold", "1"),
        ("--image-gc-low-threshold", "0"),
        ("--minimum-image-ttl-duration", "0s"),
    ];
    node.start_service("pod-sync", &room).await;
    let enough = "Failed to free sufficient space by deleting unused images";
    node.wait_log("pod-sync", enough).await;
    assert_eq!(tags(&node).await.into_keys().collect::<BTreeSet<_>>(), stay);

    let resolved = registry.resolved("left:1");
    pulled_and_left(&node, "again", &image("left")).await;
    assert!(registry.resolved("left:1") > resolved, "it had to be pulled again");
    node.end_service("pod-sync").await;
    let age = [
        ("--image-gc-high-threshold", "100"),
        ("--minimum-image-ttl-duration", "1s"),
        ("--image-maximum-gc-age", "6s"),
    ];
    node.start_service("pod-sync", &age).await;
    wait_tags(&node, &stay).await;
    node.wait_log("pod-sync", "cause=Age").await;
    assert_eq!(node.pod("user").await.unwrap().container("main"), before.container("main"));
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leftovers_of_pods_on_the_node_are_removed() {
    let mut node = Node::start(Options::standalone("housekeeping-orphans")).await;
    let names = ["known", "unknown"];
    for name in names.into_iter().chain(["stays"]) {
        let mut pod = pods::script(
            name,
            "echo kept > /disk/file; echo kept > /memory/file; trap 'exit 0' TERM; sleep 100000 & wait",
        );
        pod["spec"]["volumes"] = json!([
            {"name": "disk", "emptyDir": {}}, {"name": "memory", "emptyDir": {"medium": "Memory"}}
        ]);
        pod["spec"]["containers"][0]["volumeMounts"] =
            json!([{"name": "disk", "mountPath": "/disk"}, {"name": "memory", "mountPath": "/memory"}]);
        node.pod_manifest(&pod);
    }
    let stays = node.wait_ready("stays").await;
    let mut left = Vec::new();
    for name in names {
        left.push(node.wait_ready(name).await);
    }
    // While pod-sync is down, the pods lose their manifests and containers, and one also loses its record.
    node.end_service("pod-sync").await;
    let mut runtime = RuntimeServiceClient::new(node.cri());
    for pod in &left {
        let sandboxes = node.listed().await.sandboxes.into_iter();
        let of_pod =
            |s: &quintlet_cri_api::v1::PodSandbox| s.metadata.as_ref().is_some_and(|m| m.uid == pod.uid());
        let id = sandboxes.filter(of_pod).map(|s| s.id).next().unwrap();
        runtime.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: id.clone() }).await.unwrap();
        runtime.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: id }).await.unwrap();
        assert!(!node.listed().await.has_pod(pod.uid()));
    }
    for name in names {
        node.remove_manifest(&format!("{name}.yaml"));
    }
    std::fs::remove_file(node.paths().state_dir().join(left[1].uid())).unwrap();
    for pod in &left {
        let traces = node.pod_traces(pod.uid());
        for part in ["/root/pods/", "/pod-logs/", "/sys/fs/cgroup/"] {
            assert!(traces.iter().any(|t| t.contains(part)), "no {part} in {traces:#?}");
        }
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(
            mounts.contains(&format!("{}/volumes/kubernetes.io~empty-dir/memory", pod.uid())),
            "{mounts}"
        );
    }
    node.start_service("pod-sync", &[]).await;
    for pod in &left {
        node.wait_gone(pod.uid()).await;
    }
    let after = node.wait_ready("stays").await;
    assert_eq!(after.steady(), stays.steady());
    assert_eq!(node.empty_dir_file(stays.uid(), "disk", "file"), "kept\n");
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_two_instances_of_a_failing_container_are_kept() {
    let extra = vec![("pod-sync", "--max-container-restart-period=1s".to_owned())];
    let node = Node::start(Options { extra, ..Options::standalone("housekeeping-instances") }).await;
    let mut pod = pods::script(
        "stumbles",
        "echo x >> /v/starts; [ $(wc -l < /v/starts) -gt 6 ] || exit 3
         trap 'exit 0' TERM; sleep 100000 & wait",
    );
    pod["spec"]["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    node.pod_manifest(&pod);
    let runs = |p: &Seen| p.is_ready() && p.container("main").restarts == 6;
    let seen = node.wait_pod("stumbles", "runs at last", LONG, runs).await;
    let logs = node.pod_logs_dir().join(format!("default_{}_{}/main", seen.name(), seen.uid()));
    until("two instances and their logs", LONG, async || {
        let kept: Vec<u32> = node.listed().await.attempts(seen.uid(), "main").into_keys().collect();
        let files = std::fs::read_dir(&logs).unwrap().flatten();
        let files: BTreeSet<String> = files.map(|f| f.file_name().to_string_lossy().into_owned()).collect();
        let two = kept == [5, 6] && files.iter().eq(&["5.log", "6.log"]);
        if two { Ok(()) } else { Err((kept, files)) }
    })
    .await;
    let last = &seen.pod["status"]["containerStatuses"][0]["lastState"]["terminated"];
    assert_eq!((&last["exitCode"], &last["reason"]), (&json!(3), &json!("Error")), "{last}");
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_ends_a_pod_in_time_although_pod_sync_was_killed() {
    let node = Node::start(Options::with_api("housekeeping-deadline")).await;
    let api = node.api();
    // A container that exits with 0 on SIGTERM has succeeded.
    let mut pod = pods::script("timed", "trap 'exit 143' TERM; sleep 100000 & wait");
    pod["spec"]["activeDeadlineSeconds"] = json!(12);
    api.create_pod(pods::bound(pod));
    node.wait_ready("timed").await;
    let starts = node.kill9("pod-sync");
    node.wait_back("pod-sync", starts, LONG).await;
    let ended = api.wait_for("pods", "default", "timed", LONG, |p| p["status"]["phase"] == "Failed").await;
    let status = &ended["status"];
    assert_eq!(status["reason"], "DeadlineExceeded", "{ended:#}");
    assert_eq!(status["message"], "Pod was active on the node longer than the specified deadline");
    let instance = &status["containerStatuses"][0];
    assert_eq!(
        (&instance["restartCount"], &instance["state"]["terminated"]["exitCode"]),
        (&json!(0), &json!(143))
    );
    let at = |time: &Value| time.as_str().unwrap().parse::<Timestamp>().unwrap().as_second();
    let lived = at(&instance["state"]["terminated"]["finishedAt"]) - at(&status["startTime"]);
    assert!(lived >= 12, "its 12 s were {lived} s: {ended:#}");
    node.down().await;
}
