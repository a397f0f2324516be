//! CRI calls of a private containerd.

use std::path::Path;
use std::time::Duration;

use futures::StreamExt as _;
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_cri_api::v1::{
    CgroupDriver, ListContainersRequest, ListPodSandboxRequest, RemovePodSandboxRequest,
    RuntimeConfigRequest, StatusRequest, StopContainerRequest, StopPodSandboxRequest, VersionRequest,
};
use tonic::Code;
use tonic::transport::Channel;

use crate::Error;

/// Concurrent removals of pods. More would only queue in the runtime.
const REMOVALS: usize = 16;

/// Connects to an existing unix socket.
pub async fn connect(socket: &Path) -> Result<Channel, Error> {
    containerd_client::connect(socket)
        .await
        .map_err(|source| Error::Connect { path: socket.to_path_buf(), source })
}

/// Returns the runtime's version. A reply means that the CRI works.
pub async fn version(channel: Channel) -> Result<String, Error> {
    let reply = RuntimeServiceClient::new(channel)
        .version(VersionRequest { version: "v1".to_owned() })
        .await
        .map_err(Error::call("Version"))?
        .into_inner();
    Ok(format!("{} {}", reply.runtime_name, reply.runtime_version))
}

/// Returns the cgroup driver of the runtime, `systemd` or `cgroupfs`, or none if the runtime does not report
/// it.
///
/// containerd before 2.0 does not implement RuntimeConfig. It reports its configuration in the verbose
/// status.
pub async fn cgroup_driver(channel: Channel) -> Result<Option<&'static str>, Error> {
    let mut client = RuntimeServiceClient::new(channel);
    match client.runtime_config(RuntimeConfigRequest {}).await {
        Ok(reply) => {
            return Ok(reply.into_inner().linux.map(|linux| match linux.cgroup_driver() {
                CgroupDriver::Systemd => "systemd",
                CgroupDriver::Cgroupfs => "cgroupfs",
            }));
        }
        Err(status) if status.code() == Code::Unimplemented => {}
        Err(status) => return Err(Error::call("RuntimeConfig")(status)),
    }
    let status = client.status(StatusRequest { verbose: true }).await.map_err(Error::call("Status"))?;
    Ok(status.into_inner().info.get("config").and_then(|config| configured_driver(config)))
}

/// Returns the cgroup driver in the JSON of containerd's configuration: that of the default runtime.
fn configured_driver(config: &str) -> Option<&'static str> {
    let config: serde_json::Value = serde_json::from_str(config).ok()?;
    let containerd = &config["containerd"];
    let name = containerd["defaultRuntimeName"].as_str().unwrap_or("runc");
    let options = &containerd["runtimes"][name]["options"];
    // Without the option, runc uses cgroupfs.
    let is_systemd = options.as_object()?.get("SystemdCgroup").is_some_and(|set| set.as_bool() == Some(true));
    Some(if is_systemd { "systemd" } else { "cgroupfs" })
}

/// Removes every pod, without a grace period. Returns the number of pods. A pod that cannot be removed is
/// logged.
pub async fn remove_all_pods(channel: Channel, each: Duration) -> Result<usize, Error> {
    let mut client = RuntimeServiceClient::new(channel);
    let containers = client
        .list_containers(ListContainersRequest::default())
        .await
        .map_err(Error::call("ListContainers"))?;
    let containers = containers.into_inner().containers;
    let pods = client
        .list_pod_sandbox(ListPodSandboxRequest::default())
        .await
        .map_err(Error::call("ListPodSandbox"))?;
    let pods = pods.into_inner().items;
    let count = pods.len();
    futures::stream::iter(pods)
        .for_each_concurrent(REMOVALS, |pod| {
            let client = client.clone();
            let of_pod: Vec<String> =
                containers.iter().filter(|c| c.pod_sandbox_id == pod.id).map(|c| c.id.clone()).collect();
            async move {
                let removed = tokio::time::timeout(each, remove_pod(client, pod.id.clone(), of_pod)).await;
                match removed {
                    Ok(Ok(())) => {}
                    Ok(Err(e)) => tracing::warn!(sandbox = %pod.id, error = %e, "pod not removed"),
                    Err(_) => tracing::warn!(sandbox = %pod.id, "pod removal timed out"),
                }
            }
        })
        .await;
    Ok(count)
}

async fn remove_pod(
    mut client: RuntimeServiceClient<Channel>,
    pod_sandbox_id: String,
    containers: Vec<String>,
) -> Result<(), Error> {
    for container_id in containers {
        // An error is ignored, since stopping the sandbox kills the container.
        let _ = client.stop_container(StopContainerRequest { container_id, timeout: 0 }).await;
    }
    client
        .stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: pod_sandbox_id.clone() })
        .await
        .map_err(Error::call("StopPodSandbox"))?;
    client
        .remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id })
        .await
        .map_err(Error::call("RemovePodSandbox"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_is_that_of_the_default_runtime() {
        for (config, want) in [
            (
                r#"{"containerd": {"runtimes": {"runc": {"options": {"SystemdCgroup": true}}}}}"#,
                Some("systemd"),
            ),
            (
                r#"{"containerd": {"runtimes": {"runc": {"options": {"SystemdCgroup": false}}}}}"#,
                Some("cgroupfs"),
            ),
            (
                r#"{"containerd": {"defaultRuntimeName": "crun", "runtimes": {"runc": {"options": {"SystemdCgroup": true}}, "crun": {"options": {}}}}}"#,
                Some("cgroupfs"),
            ),
            (r#"{"containerd": {"runtimes": {}}}"#, None),
            ("{", None),
        ] {
            assert_eq!(configured_driver(config), want, "{config}");
        }
    }
}
