//! Sandboxes and containers of the runtime.

use std::collections::{BTreeMap, BTreeSet};

use quintlet_cri_api::v1::image_service_client::ImageServiceClient;
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_cri_api::v1::{
    Container, ContainerState, ContainerStats, FilesystemUsage, ImageFsInfoRequest,
    ListContainerStatsRequest, ListContainersRequest, ListImagesRequest, ListPodSandboxRequest, PodSandbox,
    PodSandboxState, VersionRequest,
};
use tonic::Status;
use tonic::transport::Channel;

/// Label with the name of a container (`k8s.io/kubelet/pkg/types: KubernetesContainerNameLabel`).
const CONTAINER_NAME: &str = "io.kubernetes.container.name";
/// Largest answer, in bytes, as for `quintctl`. Pods of extreme sizes have lists above tonic's 4 MiB.
const MAX_ANSWER: usize = 64 << 20;
/// Label with the UID of a pod.
const POD_UID: &str = "io.kubernetes.pod.uid";

/// All sandboxes and containers of the runtime.
#[derive(Debug, Clone, Default)]
pub struct Listed {
    /// Sandboxes in any state.
    pub sandboxes: Vec<PodSandbox>,
    /// Containers in any state.
    pub containers: Vec<Container>,
}

/// Lists sandboxes and containers through a CRI endpoint.
///
/// # Errors
/// The error of the endpoint.
pub async fn list(channel: Channel) -> Result<Listed, Status> {
    let mut client = RuntimeServiceClient::new(channel).max_decoding_message_size(MAX_ANSWER);
    let sandboxes = client.list_pod_sandbox(ListPodSandboxRequest::default()).await?.into_inner().items;
    let containers = client.list_containers(ListContainersRequest::default()).await?.into_inner().containers;
    Ok(Listed { sandboxes, containers })
}

/// Returns the tags of all images.
///
/// # Errors
/// The error of the endpoint.
pub async fn images(channel: Channel) -> Result<Vec<String>, Status> {
    let mut client = ImageServiceClient::new(channel);
    let images = client.list_images(ListImagesRequest::default()).await?.into_inner().images;
    Ok(images.into_iter().flat_map(|image| image.repo_tags).collect())
}

/// Returns the mount points of images and of writable layers that the runtime reports.
///
/// # Errors
/// The error of the endpoint.
pub async fn file_systems(channel: Channel) -> Result<[Vec<String>; 2], Status> {
    let reply = ImageServiceClient::new(channel).image_fs_info(ImageFsInfoRequest {}).await?.into_inner();
    let paths =
        |all: Vec<FilesystemUsage>| all.into_iter().filter_map(|f| Some(f.fs_id?.mountpoint)).collect();
    Ok([paths(reply.image_filesystems), paths(reply.container_filesystems)])
}

/// Returns major and minor version of the runtime.
///
/// # Errors
/// The error of the endpoint.
pub async fn version(channel: Channel) -> Result<(u32, u32), Status> {
    let request = VersionRequest { version: "v1".to_owned() };
    let reply = RuntimeServiceClient::new(channel).version(request).await?.into_inner();
    let mut numbers =
        reply.runtime_version.trim_start_matches('v').split('.').map_while(|n| n.parse::<u32>().ok());
    Ok((numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default()))
}

/// Returns the size of the writable layers of a pod's containers in bytes, as last measured by the runtime.
///
/// # Errors
/// The error of the endpoint.
pub async fn written(channel: Channel, uid: &str) -> Result<u64, Status> {
    let reply = RuntimeServiceClient::new(channel)
        .list_container_stats(ListContainerStatsRequest::default())
        .await?
        .into_inner();
    let of_pod = |stats: &ContainerStats| {
        stats.attributes.as_ref().is_some_and(|attributes| label(&attributes.labels, POD_UID) == uid)
    };
    let bytes = |stats: ContainerStats| Some(stats.writable_layer?.used_bytes?.value);
    Ok(reply.stats.into_iter().filter(of_pod).filter_map(bytes).sum())
}

impl Listed {
    /// Returns the duplicates: live sandboxes of a pod, live containers of a name, attempts of either.
    ///
    /// Dead sandboxes do not count: the runtime leaves one if its client disconnects during RunPodSandbox.
    #[must_use]
    pub fn duplicates(&self) -> Vec<String> {
        let mut all: BTreeMap<(&str, &str), (usize, Vec<u32>)> = BTreeMap::new();
        for s in &self.sandboxes {
            let entry = all.entry((label(&s.labels, POD_UID), "")).or_default();
            entry.0 += usize::from(s.state() == PodSandboxState::SandboxReady);
            entry.1.extend(s.metadata.as_ref().map(|m| m.attempt));
        }
        for c in &self.containers {
            let entry = all.entry((label(&c.labels, POD_UID), label(&c.labels, CONTAINER_NAME))).or_default();
            entry.0 += usize::from(c.state() != ContainerState::ContainerExited);
            entry.1.extend(c.metadata.as_ref().map(|m| m.attempt));
        }
        all.into_iter()
            .filter(|(_, (live, attempts))| {
                *live > 1 || attempts.iter().collect::<BTreeSet<_>>().len() < attempts.len()
            })
            .map(|((uid, name), (live, attempts))| {
                format!("pod {uid}, container {name:?}: {live} live, attempts {attempts:?}")
            })
            .collect()
    }

    /// Returns the creation times of a container's instances, by attempt, in nanoseconds since 1970.
    #[must_use]
    pub fn attempts(&self, uid: &str, name: &str) -> BTreeMap<u32, i64> {
        self.containers
            .iter()
            .filter(|c| label(&c.labels, POD_UID) == uid && label(&c.labels, CONTAINER_NAME) == name)
            .filter_map(|c| Some((c.metadata.as_ref()?.attempt, c.created_at)))
            .collect()
    }

    /// Returns whether the runtime has anything of a pod.
    #[must_use]
    pub fn has_pod(&self, uid: &str) -> bool {
        let is_of_pod = |labels: &std::collections::HashMap<String, String>| label(labels, POD_UID) == uid;
        self.sandboxes.iter().any(|s| is_of_pod(&s.labels))
            || self.containers.iter().any(|c| is_of_pod(&c.labels))
    }
}

fn label<'a>(labels: &'a std::collections::HashMap<String, String>, key: &str) -> &'a str {
    labels.get(key).map_or("", String::as_str)
}
