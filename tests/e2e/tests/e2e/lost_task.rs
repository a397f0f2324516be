//! A task that containerd runs and its CRI plugin does not have, as an interrupted StartContainer may leave
//! it.

use containerd_client::services::v1::GetRequest;
use containerd_client::services::v1::tasks_client::TasksClient;
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_cri_api::v1::*;
use quintlet_e2e::{Node, Options};
use quintlet_localnode::images;
use tonic::transport::Channel;
use tonic::{Code, Request};

type Client = RuntimeServiceClient<Channel>;

async fn made(client: &mut Client, node: &Node) -> (String, String) {
    let config = PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: "lost".to_owned(),
            uid: "lost-uid".to_owned(),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        linux: Some(LinuxPodSandboxConfig {
            cgroup_parent: format!("{}/lost", node.containerd.cgroup_root()),
            ..LinuxPodSandboxConfig::default()
        }),
        ..PodSandboxConfig::default()
    };
    let run = RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: String::new() };
    let sandbox = client.run_pod_sandbox(run).await.unwrap().into_inner().pod_sandbox_id;
    let container = ContainerConfig {
        metadata: Some(ContainerMetadata { name: "main".to_owned(), attempt: 0 }),
        image: Some(ImageSpec { image: images::BUSYBOX.to_owned(), ..ImageSpec::default() }),
        command: ["sleep", "100000"].map(str::to_owned).to_vec(),
        ..ContainerConfig::default()
    };
    let create = CreateContainerRequest {
        pod_sandbox_id: sandbox.clone(),
        config: Some(container),
        sandbox_config: Some(config),
    };
    (sandbox, client.create_container(create).await.unwrap().into_inner().container_id)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_whose_task_was_lost_can_be_removed() {
    let node = Node::start(Options::standalone("lost-task")).await;
    let raw = node.containerd.channel().await.unwrap();
    let mut raw_cri = Client::new(raw.clone());
    let mut through_proxy = Client::new(node.cri());
    let (sandbox, container) = made(&mut through_proxy, &node).await;
    // Started without the CRI plugin, which therefore never started this container.
    let socket = node.containerd.endpoint().trim_start_matches("unix://").to_owned();
    let ctr = std::process::Command::new("ctr")
        .args([
            "--address",
            &socket,
            "--namespace",
            "k8s.io",
            "tasks",
            "start",
            "--detach",
            "--null-io",
            &container,
        ])
        .output()
        .unwrap();
    assert!(ctr.status.success(), "{ctr:?}");

    let remove = || RemoveContainerRequest { container_id: container.clone() };
    let refused = raw_cri.remove_container(remove()).await.unwrap_err();
    assert!(
        refused.message().contains("cannot delete running task"),
        "the runtime itself cannot: {refused:?}"
    );

    through_proxy.remove_container(remove()).await.unwrap();
    let mut get = Request::new(GetRequest { container_id: container.clone(), ..GetRequest::default() });
    get.metadata_mut().insert("containerd-namespace", "k8s.io".parse().unwrap());
    let gone = TasksClient::new(raw).get(get).await.unwrap_err();
    assert_eq!(gone.code(), Code::NotFound, "{gone:?}");
    assert!(node.listed().await.containers.is_empty());

    through_proxy.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() }).await.unwrap();
    through_proxy.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: sandbox }).await.unwrap();
    node.down().await;
}
