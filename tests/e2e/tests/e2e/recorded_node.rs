//! A node on which a kubelet has left its pods: its directories, cgroups and instances of the runtime.

use std::collections::{BTreeMap, BTreeSet};
use std::net::UdpSocket;
use std::path::Path;
use std::time::Duration;

use quintlet_cri_api::v1::image_service_client::ImageServiceClient;
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_cri_api::v1::{
    ContainerState, ContainerStatus, ContainerStatusRequest, CreateContainerRequest, ImageSpec,
    ImageStatusRequest, PodSandboxStatusRequest, RunPodSandboxRequest, StartContainerRequest,
    StopPodSandboxRequest, UpdateContainerResourcesRequest,
};
use quintlet_e2e::{LONG, Machine, NODE, Node, Options, runtime, until};
use quintlet_recordings::kubelet::{make_cgroup, remove_cgroup};
use quintlet_recordings::node::{self, ContainerState as RecordedContainer, NodeState};
use quintlet_testkit::fake_runtime::Method;
use serde_json::{Value, json};
use tonic::transport::Channel;

/// Time without any change, in which each pod is synced again, and housekeeping, the removal of dead
/// containers and the status of the Node have taken place several times.
const UNCHANGED: Duration = Duration::from_secs(60);

/// Operations that change something in the runtime, as the metric of a kubelet names them.
const MUTATING: [&str; 10] = [
    "run_podsandbox",
    "create_container",
    "start_container",
    "stop_container",
    "remove_container",
    "stop_podsandbox",
    "remove_podsandbox",
    "update_container",
    "pull_image",
    "remove_image",
];

/// The limit of a cgroup v1 without a limit of memory.
const NO_LIMIT: &str = "9007199254740988Ki";

/// Returns an address of this machine that is not a loopback one. Nothing is sent.
fn node_ip() -> String {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect("192.0.2.1:9").expect("the machine has a route");
    socket.local_addr().unwrap().ip().to_string()
}

/// Restores the recorded node.
struct Restore {
    runtime: RuntimeServiceClient<Channel>,
    names: Vec<(String, String)>,
}

impl Restore {
    async fn status(&mut self, container_id: &str) -> ContainerStatus {
        let request = ContainerStatusRequest { container_id: container_id.to_owned(), verbose: false };
        self.runtime.container_status(request).await.unwrap().into_inner().status.unwrap()
    }

    fn name(&mut self, value: String, name: String) {
        self.names.push((value, name));
    }

    async fn sandbox(&mut self, recorded: &NodeState, number: usize) {
        let sandbox = recorded.on(&self.names).unwrap().sandboxes[number].clone();
        let request: RunPodSandboxRequest = node::request(Method::RunPodSandbox, &sandbox.request).unwrap();
        let id = self.runtime.run_pod_sandbox(request).await.unwrap().into_inner().pod_sandbox_id;
        self.name(id.clone(), format!("<sandbox {number}>"));
        let request = PodSandboxStatusRequest { pod_sandbox_id: id.clone(), verbose: false };
        let status = self.runtime.pod_sandbox_status(request).await.unwrap().into_inner().status.unwrap();
        self.name(status.network.unwrap_or_default().ip, format!("<ip {number}>"));
        for place in 0..sandbox.containers.len() {
            let container = recorded.on(&self.names).unwrap().sandboxes[number].containers[place].clone();
            self.container(&container, format!("<container {number}.{place}>")).await;
        }
        if sandbox.stopped {
            let request = StopPodSandboxRequest { pod_sandbox_id: id };
            self.runtime.stop_pod_sandbox(request).await.unwrap();
        }
    }

    async fn container(&mut self, container: &RecordedContainer, name: String) {
        let request: CreateContainerRequest =
            node::request(Method::CreateContainer, &container.request).unwrap();
        let id = self.runtime.create_container(request).await.unwrap().into_inner().container_id;
        self.runtime.start_container(StartContainerRequest { container_id: id.clone() }).await.unwrap();
        for update in &container.updates {
            let mut update = update.clone();
            update["container_id"] = json!(id);
            let request: UpdateContainerResourcesRequest =
                node::request(Method::UpdateContainerResources, &update).unwrap();
            self.runtime.update_container_resources(request).await.unwrap();
        }
        if let Some(code) = container.exit {
            let ended = until("the container has ended", LONG, async || {
                let status = self.status(&id).await;
                if status.state() == ContainerState::ContainerExited { Ok(status) } else { Err(status) }
            })
            .await;
            assert_eq!(ended.exit_code, code, "{ended:?}");
        }
        self.name(id, name);
    }
}

/// Returns the ID of the image of all containers.
async fn image_id(channel: Channel) -> String {
    let image = Some(ImageSpec { image: node::IMAGE.to_owned(), ..ImageSpec::default() });
    let request = ImageStatusRequest { image, verbose: false };
    ImageServiceClient::new(channel).image_status(request).await.unwrap().into_inner().image.unwrap().id
}

async fn restore(machine: &Machine<'_>) -> NodeState {
    let recorded = NodeState::read().unwrap();
    let text = |path: &Path| path.display().to_string();
    let channel = machine.containerd.channel().await.unwrap();
    let names = [
        (text(&machine.base.join("root")), "<root>"),
        (text(&machine.base.join("pod-logs")), "<logs>"),
        (machine.containerd.cgroup_root(), "<cgroup>"),
        (NODE.to_owned(), "<node>"),
        (image_id(channel.clone()).await, "<image-id>"),
        (node_ip(), "<node-ip>"),
    ];
    let names = names.map(|(value, name)| (value, name.to_owned())).to_vec();
    let state = recorded.on(&names).unwrap();
    for file in &state.files {
        file.restore().unwrap();
    }
    for cgroup in &state.cgroups {
        make_cgroup(cgroup).unwrap();
    }
    for pod in &state.manifests {
        let file = format!("{}.json", pod["metadata"]["name"].as_str().unwrap());
        std::fs::write(machine.base.join("manifests").join(file), pod.to_string()).unwrap();
    }
    let mut restore = Restore { runtime: RuntimeServiceClient::new(channel), names };
    for number in 0..state.sandboxes.len() {
        restore.sandbox(&recorded, number).await;
    }
    let state = recorded.on(&restore.names).unwrap();
    let api = machine.api.unwrap();
    for object in &state.objects {
        let resource = if object["kind"] == "Secret" { "secrets" } else { "configmaps" };
        api.create(resource, "default", object.clone()).unwrap();
    }
    api.restore("nodes", "", state.node.clone()).unwrap();
    for pod in &state.pods {
        api.restore("pods", "default", pod.clone()).unwrap();
    }
    state
}

/// Removes fields without a value, which are equal to absent ones.
fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        Value::Array(list) => list.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

/// Returns a status without what another runtime and another run give (names of images, times of processes,
/// users, which containerd reports since 2.0), and without the changes in docs/replacing-the-kubelet.md.
fn comparable(mut status: Value) -> Value {
    for list in ["initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses"] {
        for container in status[list].as_array_mut().into_iter().flatten() {
            for field in ["image", "imageID", "user"] {
                container[field] = Value::Null;
            }
            for (state, kind) in [("state", "running"), ("state", "terminated"), ("lastState", "terminated")]
            {
                if let Some(state) = container[state][kind].as_object_mut() {
                    state.retain(|field, _| !["startedAt", "finishedAt"].contains(&field.as_str()));
                }
            }
        }
    }
    for condition in status["conditions"].as_array_mut().into_iter().flatten() {
        if condition["type"] == "PodReadyToStartContainers" {
            condition["reason"] = Value::Null;
            condition["message"] = Value::Null;
        }
    }
    if status["resources"]["limits"] == json!({"memory": NO_LIMIT}) {
        status["resources"]["limits"] = Value::Null;
    }
    drop_nulls(&mut status);
    status
}

/// Returns the number of mutating operations of each kind so far, without those that were not called.
async fn operations(node: &Node) -> BTreeMap<&'static str, u64> {
    let metrics = node.metrics("cri-proxy").await;
    let count = |operation: &str| {
        let line = format!("kubelet_runtime_operations_total{{operation_type=\"{operation}\"}} ");
        metrics.lines().find_map(|l| l.strip_prefix(&line)).map_or(0, |n| n.parse().unwrap())
    };
    MUTATING.into_iter().map(|name| (name, count(name))).filter(|(_, count)| *count > 0).collect()
}

/// Returns the instances of the runtime with their states.
async fn instances(node: &Node) -> BTreeSet<String> {
    let listed = runtime::list(node.containerd.channel().await.unwrap()).await.unwrap();
    let sandboxes = listed.sandboxes.iter().map(|s| format!("{} {:?}", s.id, s.state()));
    let containers = listed.containers.iter().map(|c| format!("{} {:?}", c.id, c.state()));
    sandboxes.chain(containers).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pods_of_a_kubelet_are_taken_over_without_a_call_and_removed_completely() {
    let mut state = None;
    let extra = vec![("pod-sync", format!("--node-ip={}", node_ip()))];
    let options = Options { extra, sync_frequency: "20s", ..Options::with_api("recorded-node") };
    let node = Node::start_on(options, async |machine| state = Some(restore(&machine).await)).await;
    let state = state.unwrap();
    let before = instances(&node).await;
    assert!(before.len() > state.pods.len(), "{before:?}");
    tokio::time::sleep(UNCHANGED).await;
    assert_eq!(operations(&node).await, BTreeMap::new());
    assert_eq!(instances(&node).await, before);
    for pod in &state.pods {
        let name = pod["metadata"]["name"].as_str().unwrap();
        let status = comparable(node.api().get("pods", "default", name).unwrap()["status"].clone());
        let mut recorded = pod["status"].clone();
        // After a resize, a kubelet before 1.37 shows the former one (kubernetes/kubernetes#140646).
        if let Some(memory) = recorded.pointer("/allocatedResources/memory").cloned() {
            recorded["resources"]["requests"]["memory"] = memory;
        }
        assert_eq!(status, comparable(recorded), "{name}");
    }

    let uids = state.sandboxes.iter().map(|s| s.request["config"]["metadata"]["uid"].as_str().unwrap());
    let file = format!("{}.json", state.manifests[0]["metadata"]["name"].as_str().unwrap());
    node.remove_manifest(&file);
    for pod in &state.pods {
        node.api().delete("pods", "default", pod["metadata"]["name"].as_str().unwrap(), None).unwrap();
    }
    for uid in uids {
        node.wait_gone(uid).await;
    }
    let removal = ["stop_container", "remove_container", "stop_podsandbox", "remove_podsandbox"];
    assert_eq!(operations(&node).await.into_keys().collect::<BTreeSet<_>>(), removal.into());
    for cgroup in state.cgroups.iter().rev() {
        remove_cgroup(cgroup);
    }
    node.down().await;
}
