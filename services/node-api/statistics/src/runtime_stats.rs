//! Pod statistics from the runtime.

use std::collections::BTreeMap;

use futures::stream::{self, StreamExt as _};
use quintlet_cri_api::v1;
use quintlet_kit::lists;
use quintlet_model::labels::{POD_NAME, POD_NAMESPACE, POD_UID};
use tonic::{Code, Request, Status};

use node_api_base::services::Services;

/// Maximum number of pods that are requested concurrently if there is no list.
const AT_ONCE: usize = 8;

/// The statistics of a pod.
#[derive(Debug)]
pub(crate) struct SandboxStats {
    pub(crate) metadata: v1::PodSandboxMetadata,
    /// ID of the sandbox; empty if the runtime has statistics of containers only.
    pub(crate) sandbox: String,
    pub(crate) stats: v1::LinuxPodSandboxStats,
}

/// Returns the statistics of all pods.
///
/// containerd 1.6 fails to list statistics while a terminated sandbox exists whose cgroup is gone, as of
/// every finished pod. Then the statistics of ready sandboxes are requested one by one. cri-proxy refuses
/// both as unimplemented before containerd 1.6.22, which may end while it answers.
///
/// # Errors
/// Fails if the runtime does not answer, or has no statistics of any pod.
pub(crate) async fn all(node: &Services) -> Result<Vec<SandboxStats>, Status> {
    let mut listed = Vec::new();
    let take = |message: v1::ListPodSandboxStatsResponse| {
        listed.extend(message.stats.into_iter().filter_map(kept));
    };
    let request = Request::new(v1::ListPodSandboxStatsRequest::default());
    match lists::SANDBOX_STATS.each(node.cri(), request, take).await {
        Ok(_) => Ok(listed),
        Err(status) if status.code() == Code::Unimplemented => by_containers(node).await,
        // There are no ready sandboxes, or the runtime is too slow.
        Err(status) if matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded) => Err(status),
        Err(status) => {
            tracing::debug!(%status, "failed to list pod statistics, requesting them one by one");
            one_by_one(node, status).await
        }
    }
}

fn kept(stats: v1::PodSandboxStats) -> Option<SandboxStats> {
    let attributes = stats.attributes?;
    Some(SandboxStats { metadata: attributes.metadata?, sandbox: attributes.id, stats: stats.linux? })
}

/// Returns whether a container has statistics. containerd 1.6 lists those that do not run, without any.
pub(crate) fn has_usage(container: &v1::ContainerStats) -> bool {
    container.cpu.is_some() || container.memory.is_some()
}

/// Collects statistics by pod from a runtime that has them for containers only. Labels name the pod.
async fn by_containers(node: &Services) -> Result<Vec<SandboxStats>, Status> {
    let mut all = Vec::new();
    let take =
        |message: v1::ListContainerStatsResponse| all.extend(message.stats.into_iter().filter(has_usage));
    let request = Request::new(v1::ListContainerStatsRequest::default());
    lists::CONTAINER_STATS.each(node.cri(), request, take).await?;
    let mut pods: BTreeMap<String, SandboxStats> = BTreeMap::new();
    for container in all {
        let Some(labels) = container.attributes.as_ref().map(|a| &a.labels) else { continue };
        let label_value = |label: &str| labels.get(label).cloned().unwrap_or_default();
        let uid = label_value(POD_UID);
        let name = label_value(POD_NAME);
        let namespace = label_value(POD_NAMESPACE);
        let metadata = v1::PodSandboxMetadata { name, namespace, uid: uid.clone(), attempt: 0 };
        let pod = pods.entry(uid).or_insert_with(|| SandboxStats {
            metadata,
            sandbox: String::new(),
            stats: v1::LinuxPodSandboxStats::default(),
        });
        pod.stats.containers.push(container);
    }
    Ok(pods.into_values().collect())
}

async fn one_by_one(node: &Services, why: Status) -> Result<Vec<SandboxStats>, Status> {
    let mut ready = Vec::new();
    let state = v1::PodSandboxStateValue { state: v1::PodSandboxState::SandboxReady.into() };
    let filter = v1::PodSandboxFilter { state: Some(state), ..Default::default() };
    let take = |message: v1::ListPodSandboxResponse| {
        ready.extend(message.items.into_iter().map(|sandbox| sandbox.id));
    };
    let request = Request::new(v1::ListPodSandboxRequest { filter: Some(filter) });
    lists::SANDBOXES.each(node.cri(), request, take).await?;
    let ask = |pod_sandbox_id| {
        let mut runtime = node.runtime();
        async move { runtime.pod_sandbox_stats(v1::PodSandboxStatsRequest { pod_sandbox_id }).await }
    };
    let answers: Vec<_> = stream::iter(ready).map(ask).buffer_unordered(AT_ONCE).collect().await;
    // A sandbox that terminated meanwhile has no statistics. If none has any, the runtime does not support
    // them, or pods have no cgroups (`cgroupsPerQOS: false`): containerd takes the statistics of a pod from
    // its cgroup.
    if !answers.is_empty() && answers.iter().all(Result::is_err) {
        return by_containers(node).await.map_err(|_| why);
    }
    Ok(answers.into_iter().filter_map(|answer| kept(answer.ok()?.into_inner().stats?)).collect())
}

#[cfg(test)]
mod tests {
    use quintlet_kit::args::paths::{CriSocket, Paths};
    use quintlet_testkit::fake_runtime::{ContainerSeed, FakeRuntime, Method, Options};

    use super::*;

    const NO_CGROUP: &str = "failed to get cgroup metrics for sandbox abc because cgroupPath is empty";
    const GONE: &str = "failed to load sandbox cgroup /kubepods/pod1: cgroups: cgroup deleted";

    fn with_two_pods(dir: &std::path::Path) -> (FakeRuntime, Services) {
        let paths = Paths::new(dir);
        let runtime = FakeRuntime::start(&paths.cri(CriSocket::NodeApi), Options::silent()).unwrap();
        runtime.add_sandbox("u1", "runs", "default", 0);
        let done = runtime.add_sandbox("u2", "done", "default", 0);
        runtime.edit_sandbox(&done, |s| s.state = v1::PodSandboxState::SandboxNotready.into());
        (runtime, Services::new(paths))
    }

    #[tokio::test]
    async fn a_finished_pod_does_not_hide_the_statistics_of_other_pods() {
        let dir = tempfile::tempdir().unwrap();
        let (runtime, node) = with_two_pods(dir.path());
        assert_eq!(all(&node).await.unwrap().len(), 2, "the list");
        assert_eq!(runtime.count(Method::PodSandboxStats), 0);
        runtime.fail(Method::ListPodSandboxStats, Code::Unknown, GONE, 1);
        let found = all(&node).await.unwrap();
        let names: Vec<&str> = found.iter().map(|found| found.metadata.name.as_str()).collect();
        assert_eq!(names, ["runs"]);
        assert!(found.iter().all(|found| !found.sandbox.is_empty()), "{found:?}");
        assert_eq!(runtime.count(Method::PodSandboxStats), 1, "one that has ended has no figures");
    }

    #[tokio::test]
    async fn pods_of_which_the_runtime_has_no_statistics_have_those_of_their_containers() {
        let dir = tempfile::tempdir().unwrap();
        let (runtime, node) = with_two_pods(dir.path());
        let sandbox = runtime.add_sandbox("u3", "busy", "default", 0);
        runtime.add_container(&sandbox, &ContainerSeed::running("main"));
        runtime.add_container(&sandbox, &ContainerSeed::created("next"));
        let idle = runtime.add_sandbox("u4", "idle", "default", 0);
        runtime.add_container(&idle, &ContainerSeed::created("main"));
        runtime.fail(Method::ListPodSandboxStats, Code::Unknown, NO_CGROUP, 1);
        runtime.fail(Method::PodSandboxStats, Code::Unknown, NO_CGROUP, 3);
        let found = all(&node).await.unwrap();
        let [SandboxStats { metadata, sandbox: _, stats }] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!((metadata.name.as_str(), metadata.uid.as_str()), ("busy", "u3"));
        assert_eq!((stats.containers.len(), stats.cpu), (1, None));
    }

    #[tokio::test]
    async fn a_runtime_without_pod_statistics_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let (runtime, node) = with_two_pods(dir.path());
        runtime.fail(Method::ListPodSandboxStats, Code::Unknown, GONE, 1);
        runtime.fail(Method::PodSandboxStats, Code::Unknown, "other", 1);
        for method in [Method::ListContainerStats, Method::StreamContainerStats] {
            runtime.fail(method, Code::Unknown, "other", 1);
        }
        assert_eq!(all(&node).await.unwrap_err().message(), GONE);
        runtime.fail(Method::ListPodSandboxStats, Code::Unavailable, "away", 1);
        runtime.forget_calls();
        assert_eq!(all(&node).await.unwrap_err().message(), "away");
        assert_eq!(runtime.count(Method::PodSandboxStats), 0);
    }
}
