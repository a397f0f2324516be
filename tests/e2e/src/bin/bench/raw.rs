//! The same sandboxes and containers, created and removed by direct calls to the runtime.

use futures::StreamExt as _;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use k8s_cri::v1::{
    ContainerConfig, ContainerMetadata, CreateContainerRequest, ImageSpec, LinuxPodSandboxConfig,
    PodSandboxConfig, PodSandboxMetadata, RemovePodSandboxRequest, RunPodSandboxRequest,
    StartContainerRequest, StopContainerRequest, StopPodSandboxRequest,
};
use quintlet_e2e::{Node, pods};
use quintlet_localnode::images;
use tokio::time::Instant;
use tonic::transport::Channel;

pub(crate) type Runtime = RuntimeServiceClient<Channel>;

/// Sends the same sandbox, create and start calls directly to the runtime. Returns the seconds to create and to remove all.
pub(crate) async fn burst(
    node: &Node,
    runtime: &Runtime,
    n: usize,
    in_flight: usize,
    round: usize,
) -> anyhow::Result<(f64, f64)> {
    let began = Instant::now();
    let made: Vec<anyhow::Result<(String, String)>> = futures::stream::iter(0..n)
        .map(|i| create(node, runtime.clone(), format!("raw-{in_flight}-{round}-{i}")))
        .buffer_unordered(in_flight)
        .collect()
        .await;
    let took = began.elapsed().as_secs_f64();
    let made = made.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    let began = Instant::now();
    let removed: Vec<anyhow::Result<()>> = futures::stream::iter(made)
        .map(|(sandbox, container)| remove(runtime.clone(), sandbox, container))
        .buffer_unordered(in_flight)
        .collect()
        .await;
    removed.into_iter().collect::<anyhow::Result<()>>()?;
    Ok((took, began.elapsed().as_secs_f64()))
}

async fn create(node: &Node, mut runtime: Runtime, name: String) -> anyhow::Result<(String, String)> {
    let command = pods::sleeper(&name)["spec"]["containers"][0]["command"].clone();
    let config = PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: name.clone(),
            uid: format!("{name}-uid"),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        hostname: name.clone(),
        log_directory: node.pod_logs_dir().join(&name).display().to_string(),
        linux: Some(LinuxPodSandboxConfig {
            cgroup_parent: format!("{}/raw/{name}", node.containerd.cgroup_root()),
            ..LinuxPodSandboxConfig::default()
        }),
        ..PodSandboxConfig::default()
    };
    let run = RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: String::new() };
    let sandbox = runtime.run_pod_sandbox(run).await?.into_inner().pod_sandbox_id;
    let container = ContainerConfig {
        metadata: Some(ContainerMetadata { name: "main".to_owned(), attempt: 0 }),
        image: Some(ImageSpec { image: images::BUSYBOX.to_owned(), ..ImageSpec::default() }),
        command: command
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|c| c.as_str().map(str::to_owned))
            .collect(),
        log_path: "main.log".to_owned(),
        ..ContainerConfig::default()
    };
    let create = CreateContainerRequest {
        pod_sandbox_id: sandbox.clone(),
        config: Some(container),
        sandbox_config: Some(config),
    };
    let container = runtime.create_container(create).await?.into_inner().container_id;
    runtime.start_container(StartContainerRequest { container_id: container.clone() }).await?;
    Ok((sandbox, container))
}

async fn remove(mut runtime: Runtime, sandbox: String, container: String) -> anyhow::Result<()> {
    runtime.stop_container(StopContainerRequest { container_id: container, timeout: 2 }).await?;
    runtime.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() }).await?;
    runtime.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: sandbox }).await?;
    Ok(())
}
