//! The same sandboxes and containers, created and removed by direct calls to the runtime.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use futures::StreamExt as _;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_cri_api::v1::security_profile::ProfileType;
use quintlet_cri_api::v1::{
    ContainerConfig, ContainerMetadata, ContainerState, ContainerStatusRequest, CreateContainerRequest,
    ImageSpec, LinuxContainerConfig, LinuxContainerResources, LinuxContainerSecurityContext,
    LinuxPodSandboxConfig, LinuxSandboxSecurityContext, Mount, NamespaceMode, NamespaceOption,
    PodSandboxConfig, PodSandboxMetadata, RemovePodSandboxRequest, RunPodSandboxRequest, SecurityProfile,
    StartContainerRequest, StopContainerRequest, StopPodSandboxRequest,
};
use quintlet_e2e::cost::Cost;
use quintlet_e2e::{Node, pods, work};
use quintlet_kit::clock::Clock;
use quintlet_localnode::images;
use tokio::time::Instant;
use tonic::transport::Channel;

/// Paths of `/proc` and `/sys` that are masked, or read only, in each container of a pod.
const MASKED: [&str; 12] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
const READ_ONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

pub(crate) type Runtime = RuntimeServiceClient<Channel>;

/// Seconds and costs of all pods with the runtime alone.
pub(crate) struct Burst {
    pub(crate) created: work::Burst,
    pub(crate) remove_seconds: f64,
    /// The cost of the machine until all are started.
    pub(crate) start_cost: Cost,
}

/// Sends the same sandbox, create and start calls directly to the runtime, and removes all pods.
pub(crate) async fn burst(
    node: &Node,
    runtime: &Runtime,
    n: usize,
    in_flight: usize,
    round: usize,
) -> anyhow::Result<Burst> {
    let before = Cost::of_machine()?;
    let began = Instant::now();
    let made: Vec<anyhow::Result<(Made, f64)>> = futures::stream::iter(0..n)
        .map(async |i| {
            let name = format!("raw-{in_flight}-{round}-{i}");
            let made = Box::pin(create(node, runtime.clone(), name, sleeper())).await?;
            Ok((made, began.elapsed().as_secs_f64()))
        })
        .buffer_unordered(in_flight)
        .collect()
        .await;
    let start_cost = Cost::of_machine()?.since(&before);
    let made = made.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    let (made, seconds): (Vec<_>, Vec<_>) = made.into_iter().unzip();
    let began = Instant::now();
    let removed: Vec<anyhow::Result<()>> = futures::stream::iter(made)
        .map(|made| remove(runtime.clone(), made))
        .buffer_unordered(in_flight)
        .collect()
        .await;
    removed.into_iter().collect::<anyhow::Result<()>>()?;
    Ok(Burst { created: work::Burst::of(seconds), remove_seconds: began.elapsed().as_secs_f64(), start_cost })
}

/// Files of a pod and the file system of its token, which exist before the runtime gets the pod. Dropping it
/// removes them.
struct PodFiles(PathBuf);

impl PodFiles {
    fn make(node: &Node, name: &str) -> anyhow::Result<Self> {
        let files = Self(node.root_dir().join("raw").join(name));
        std::fs::create_dir_all(files.token())?;
        for file in ["hosts", "termination-log"] {
            std::fs::write(files.0.join(file), "")?;
        }
        mount(Some("tmpfs"), &files.token(), Some("tmpfs"), MsFlags::empty(), None::<&str>)?;
        Ok(files)
    }

    fn token(&self) -> PathBuf {
        self.0.join("token")
    }
}

impl Drop for PodFiles {
    fn drop(&mut self) {
        // What is left is removed with the node.
        let _busy = umount2(&self.token(), MntFlags::MNT_DETACH);
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

/// A pod in the runtime.
struct Made {
    sandbox: String,
    container: String,
    _files: PodFiles,
}

/// Returns the milliseconds from the exit of each of `n` containers until the runtime reports it. Each is
/// asked for every millisecond.
pub(crate) async fn exits(node: &Node, runtime: &Runtime, n: usize) -> anyhow::Result<Vec<f64>> {
    let clock = Clock::system();
    let mut took = Vec::new();
    for i in 0..n {
        let command = ["sleep", "1"].map(str::to_owned).to_vec();
        let made = Box::pin(create(node, runtime.clone(), format!("raw-exit-{i}"), command)).await?;
        let request = ContainerStatusRequest {
            container_id: made.container.clone(),
            ..ContainerStatusRequest::default()
        };
        loop {
            let reply = runtime.clone().container_status(request.clone()).await?;
            let seen = clock.wall().as_nanosecond();
            let status = reply.into_inner().status.context("the runtime has the container")?;
            if status.state() == ContainerState::ContainerExited {
                took.push((seen - i128::from(status.finished_at)) as f64 / 1e6);
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        remove(runtime.clone(), made).await?;
    }
    Ok(took)
}

/// Returns the command of the pods of a burst.
fn sleeper() -> Vec<String> {
    let command = pods::sleeper("raw")["spec"]["containers"][0]["command"].clone();
    let words = command.as_array().into_iter().flatten();
    words.filter_map(|word| word.as_str().map(str::to_owned)).collect()
}

async fn create(
    node: &Node,
    mut runtime: Runtime,
    name: String,
    command: Vec<String>,
) -> anyhow::Result<Made> {
    let files = PodFiles::make(node, &name)?;
    let config = sandbox_config(node, &name);
    let run = RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: String::new() };
    let sandbox = runtime.run_pod_sandbox(run).await?.into_inner().pod_sandbox_id;
    let create = CreateContainerRequest {
        pod_sandbox_id: sandbox.clone(),
        config: Some(container_config(&files, command)),
        sandbox_config: Some(config),
    };
    let container = runtime.create_container(create).await?.into_inner().container_id;
    runtime.start_container(StartContainerRequest { container_id: container.clone() }).await?;
    Ok(Made { sandbox, container, _files: files })
}

fn sandbox_config(node: &Node, name: &str) -> PodSandboxConfig {
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: name.to_owned(),
            uid: format!("{name}-uid"),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        hostname: name.to_owned(),
        log_directory: node.pod_logs_dir().join(name).display().to_string(),
        linux: Some(LinuxPodSandboxConfig {
            cgroup_parent: format!("{}/raw/{name}", node.containerd.cgroup_root()),
            security_context: Some(LinuxSandboxSecurityContext {
                namespace_options: Some(namespaces()),
                seccomp: Some(seccomp(ProfileType::RuntimeDefault)),
                ..LinuxSandboxSecurityContext::default()
            }),
            ..LinuxPodSandboxConfig::default()
        }),
        ..PodSandboxConfig::default()
    }
}

/// Returns the container of such a pod with what costs the runtime time: mounts, masked paths, namespaces and
/// resources.
fn container_config(files: &PodFiles, command: Vec<String>) -> ContainerConfig {
    let mount = |container_path: &str, host_path: PathBuf, readonly: bool| Mount {
        container_path: container_path.to_owned(),
        host_path: host_path.display().to_string(),
        readonly,
        ..Mount::default()
    };
    ContainerConfig {
        metadata: Some(ContainerMetadata { name: "main".to_owned(), attempt: 0 }),
        image: Some(ImageSpec { image: images::BUSYBOX.to_owned(), ..ImageSpec::default() }),
        command,
        log_path: "main.log".to_owned(),
        mounts: vec![
            mount("/etc/hosts", files.0.join("hosts"), false),
            mount("/dev/termination-log", files.0.join("termination-log"), false),
            mount("/var/run/secrets/kubernetes.io/serviceaccount", files.token(), true),
        ],
        linux: Some(LinuxContainerConfig {
            resources: Some(LinuxContainerResources {
                cpu_period: 100_000,
                cpu_shares: 2,
                oom_score_adj: 1000,
                ..LinuxContainerResources::default()
            }),
            security_context: Some(LinuxContainerSecurityContext {
                namespace_options: Some(namespaces()),
                seccomp: Some(seccomp(ProfileType::Unconfined)),
                masked_paths: MASKED.map(str::to_owned).to_vec(),
                readonly_paths: READ_ONLY.map(str::to_owned).to_vec(),
                ..LinuxContainerSecurityContext::default()
            }),
        }),
        ..ContainerConfig::default()
    }
}

fn namespaces() -> NamespaceOption {
    NamespaceOption {
        network: NamespaceMode::Pod.into(),
        pid: NamespaceMode::Container.into(),
        ipc: NamespaceMode::Pod.into(),
        ..NamespaceOption::default()
    }
}

fn seccomp(kind: ProfileType) -> SecurityProfile {
    SecurityProfile { profile_type: kind.into(), localhost_ref: String::new() }
}

async fn remove(mut runtime: Runtime, made: Made) -> anyhow::Result<()> {
    let Made { sandbox, container, _files } = made;
    runtime.stop_container(StopContainerRequest { container_id: container, timeout: 2 }).await?;
    runtime.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() }).await?;
    runtime.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: sandbox }).await?;
    Ok(())
}
