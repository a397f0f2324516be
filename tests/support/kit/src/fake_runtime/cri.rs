//! The runtime service.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use quintlet_cri_api::v1;
use quintlet_cri_api::v1::runtime_service_server::RuntimeService;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::lists::{self, ListStream};
use super::script::Method;
use super::shared::Shared;
use super::world::{no_container, no_sandbox};

pub(crate) struct Cri(pub(crate) Arc<Shared>);

/// Fails like a runtime without the method.
fn not_implemented<T>(method: &str) -> Result<T, Status> {
    Err(Status::unimplemented(format!("method {method} not implemented")))
}

#[tonic::async_trait]
impl RuntimeService for Cri {
    type GetContainerEventsStream = ReceiverStream<Result<v1::ContainerEventResponse, Status>>;
    type StreamContainerStatsStream = ListStream<v1::StreamContainerStatsResponse>;
    type StreamContainersStream = ListStream<v1::StreamContainersResponse>;
    type StreamPodSandboxMetricsStream = ListStream<v1::StreamPodSandboxMetricsResponse>;
    type StreamPodSandboxStatsStream = ListStream<v1::StreamPodSandboxStatsResponse>;
    type StreamPodSandboxesStream = ListStream<v1::StreamPodSandboxesResponse>;

    async fn stream_pod_sandboxes(
        &self,
        q: Request<v1::StreamPodSandboxesRequest>,
    ) -> Result<Response<Self::StreamPodSandboxesStream>, Status> {
        let subjects = lists::sandbox_subjects(q.get_ref().filter.as_ref());
        let find =
            |shared: &Shared, q: v1::StreamPodSandboxesRequest| lists::found_sandboxes(shared, q.filter);
        let message =
            |s: Arc<_>| v1::StreamPodSandboxesResponse { pod_sandboxes: vec![lists::sandbox_item(&s)] };
        lists::stream(&self.0, Method::StreamPodSandboxes, q, subjects, find, message).await
    }

    async fn stream_containers(
        &self,
        q: Request<v1::StreamContainersRequest>,
    ) -> Result<Response<Self::StreamContainersStream>, Status> {
        let subjects = lists::container_subjects(q.get_ref().filter.as_ref());
        let find =
            |shared: &Shared, q: v1::StreamContainersRequest| lists::found_containers(shared, q.filter);
        let message =
            |c: Arc<_>| v1::StreamContainersResponse { containers: vec![lists::container_item(&c)] };
        lists::stream(&self.0, Method::StreamContainers, q, subjects, find, message).await
    }

    async fn stream_container_stats(
        &self,
        q: Request<v1::StreamContainerStatsRequest>,
    ) -> Result<Response<Self::StreamContainerStatsStream>, Status> {
        let find = |shared: &Shared, _| lists::container_stats(shared);
        let message = |item| v1::StreamContainerStatsResponse { container_stats: vec![item] };
        lists::stream(&self.0, Method::StreamContainerStats, q, Vec::new(), find, message).await
    }

    async fn stream_pod_sandbox_stats(
        &self,
        q: Request<v1::StreamPodSandboxStatsRequest>,
    ) -> Result<Response<Self::StreamPodSandboxStatsStream>, Status> {
        let find = |shared: &Shared, _| lists::all_sandbox_stats(shared);
        let message = |item| v1::StreamPodSandboxStatsResponse { pod_sandbox_stats: vec![item] };
        lists::stream(&self.0, Method::StreamPodSandboxStats, q, Vec::new(), find, message).await
    }

    async fn stream_pod_sandbox_metrics(
        &self,
        _: Request<v1::StreamPodSandboxMetricsRequest>,
    ) -> Result<Response<Self::StreamPodSandboxMetricsStream>, Status> {
        not_implemented("StreamPodSandboxMetrics")
    }

    async fn checkpoint_pod(
        &self,
        _: Request<v1::CheckpointPodRequest>,
    ) -> Result<Response<v1::CheckpointPodResponse>, Status> {
        not_implemented("CheckpointPod")
    }

    async fn restore_pod(
        &self,
        _: Request<v1::RestorePodRequest>,
    ) -> Result<Response<v1::RestorePodResponse>, Status> {
        not_implemented("RestorePod")
    }

    async fn update_pod_sandbox_resources(
        &self,
        q: Request<v1::UpdatePodSandboxResourcesRequest>,
    ) -> Result<Response<v1::UpdatePodSandboxResourcesResponse>, Status> {
        if !self.0.sandbox_updates.load(Ordering::Relaxed) {
            return not_implemented("UpdatePodSandboxResources");
        }
        self.0
            .simple(
                Method::UpdatePodSandboxResources,
                q,
                |q| vec![q.pod_sandbox_id.clone()],
                |_, _| Ok(v1::UpdatePodSandboxResourcesResponse {}),
            )
            .await
    }

    async fn version(&self, q: Request<v1::VersionRequest>) -> Result<Response<v1::VersionResponse>, Status> {
        self.0
            .simple(
                Method::Version,
                q,
                |_| Vec::new(),
                |shared, _| {
                    Ok(v1::VersionResponse {
                        version: "0.1.0".to_owned(),
                        runtime_name: shared.options.name.clone(),
                        runtime_version: shared.options.version.clone(),
                        runtime_api_version: "v1".to_owned(),
                    })
                },
            )
            .await
    }

    async fn status(&self, q: Request<v1::StatusRequest>) -> Result<Response<v1::StatusResponse>, Status> {
        self.0
            .simple(
                Method::Status,
                q,
                |_| Vec::new(),
                |shared, _| {
                    let conditions = shared.world.lock().conditions.clone();
                    Ok(v1::StatusResponse {
                        status: Some(v1::RuntimeStatus { conditions }),
                        runtime_handlers: shared.options.handlers.clone(),
                        features: shared.options.features,
                        ..Default::default()
                    })
                },
            )
            .await
    }

    async fn run_pod_sandbox(
        &self,
        q: Request<v1::RunPodSandboxRequest>,
    ) -> Result<Response<v1::RunPodSandboxResponse>, Status> {
        let subjects = q.get_ref().config.as_ref().and_then(|c| c.metadata.clone());
        let subjects = subjects.map(|m| vec![m.uid, m.name]).unwrap_or_default();
        self.0
            .call(Method::RunPodSandbox, q, subjects, |shared, mut plan, q| async move {
                let result = shared.run_sandbox(&mut plan, q).await;
                (plan, result.map(|pod_sandbox_id| v1::RunPodSandboxResponse { pod_sandbox_id }))
            })
            .await
    }

    async fn stop_pod_sandbox(
        &self,
        q: Request<v1::StopPodSandboxRequest>,
    ) -> Result<Response<v1::StopPodSandboxResponse>, Status> {
        let subjects = vec![q.get_ref().pod_sandbox_id.clone()];
        self.0
            .call(Method::StopPodSandbox, q, subjects, |shared, mut plan, q| async move {
                let result = shared.script.pass(&mut plan).await;
                if result.is_ok() {
                    shared.stop_sandbox(&q.pod_sandbox_id).await;
                }
                (plan, result.map(|()| v1::StopPodSandboxResponse {}))
            })
            .await
    }

    async fn remove_pod_sandbox(
        &self,
        q: Request<v1::RemovePodSandboxRequest>,
    ) -> Result<Response<v1::RemovePodSandboxResponse>, Status> {
        self.0
            .simple(
                Method::RemovePodSandbox,
                q,
                |q| vec![q.pod_sandbox_id.clone()],
                |shared, q| {
                    shared.remove(&q.pod_sandbox_id);
                    Ok(v1::RemovePodSandboxResponse {})
                },
            )
            .await
    }

    async fn pod_sandbox_status(
        &self,
        q: Request<v1::PodSandboxStatusRequest>,
    ) -> Result<Response<v1::PodSandboxStatusResponse>, Status> {
        self.0
            .simple(
                Method::PodSandboxStatus,
                q,
                |q| vec![q.pod_sandbox_id.clone()],
                |shared, q| {
                    let world = shared.world.lock();
                    let sandbox = world
                        .sandboxes
                        .get(&q.pod_sandbox_id)
                        .ok_or_else(|| no_sandbox(&q.pod_sandbox_id))?;
                    Ok(v1::PodSandboxStatusResponse {
                        status: Some(sandbox.status.clone()),
                        info: verbose_info(&sandbox.config, q.verbose),
                        ..Default::default()
                    })
                },
            )
            .await
    }

    async fn list_pod_sandbox(
        &self,
        q: Request<v1::ListPodSandboxRequest>,
    ) -> Result<Response<v1::ListPodSandboxResponse>, Status> {
        self.0
            .simple(
                Method::ListPodSandbox,
                q,
                |q| lists::sandbox_subjects(q.filter.as_ref()),
                |shared, q| Ok(v1::ListPodSandboxResponse { items: lists::sandboxes(shared, q) }),
            )
            .await
    }

    async fn create_container(
        &self,
        q: Request<v1::CreateContainerRequest>,
    ) -> Result<Response<v1::CreateContainerResponse>, Status> {
        let mut subjects = vec![q.get_ref().pod_sandbox_id.clone()];
        if let Some(config) = &q.get_ref().config {
            subjects.extend(config.metadata.iter().map(|m| m.name.clone()));
            subjects.extend(config.labels.values().cloned());
        }
        let call = self.0.call(Method::CreateContainer, q, subjects, move |shared, mut plan, q| async move {
            let result = Box::pin(shared.create(&mut plan, q)).await;
            (plan, result.map(|container_id| v1::CreateContainerResponse { container_id }))
        });
        Box::pin(call).await
    }

    async fn start_container(
        &self,
        q: Request<v1::StartContainerRequest>,
    ) -> Result<Response<v1::StartContainerResponse>, Status> {
        let subjects = vec![q.get_ref().container_id.clone()];
        self.0
            .call(Method::StartContainer, q, subjects, |shared, mut plan, q| async move {
                let result = shared.start(&mut plan, &q.container_id).await;
                (plan, result.map(|()| v1::StartContainerResponse {}))
            })
            .await
    }

    async fn stop_container(
        &self,
        q: Request<v1::StopContainerRequest>,
    ) -> Result<Response<v1::StopContainerResponse>, Status> {
        let subjects = vec![q.get_ref().container_id.clone()];
        self.0
            .call(Method::StopContainer, q, subjects, |shared, mut plan, q| async move {
                let result = shared.script.pass(&mut plan).await;
                if result.is_ok() {
                    let grace = Duration::from_secs(u64::try_from(q.timeout).unwrap_or(0));
                    shared.stop_container(&q.container_id, grace).await;
                }
                (plan, result.map(|()| v1::StopContainerResponse {}))
            })
            .await
    }

    async fn remove_container(
        &self,
        q: Request<v1::RemoveContainerRequest>,
    ) -> Result<Response<v1::RemoveContainerResponse>, Status> {
        self.0
            .simple(
                Method::RemoveContainer,
                q,
                |q| vec![q.container_id.clone()],
                |shared, q| {
                    shared.remove(&q.container_id);
                    Ok(v1::RemoveContainerResponse {})
                },
            )
            .await
    }

    async fn list_containers(
        &self,
        q: Request<v1::ListContainersRequest>,
    ) -> Result<Response<v1::ListContainersResponse>, Status> {
        self.0
            .simple(
                Method::ListContainers,
                q,
                |q| lists::container_subjects(q.filter.as_ref()),
                |shared, q| Ok(v1::ListContainersResponse { containers: lists::containers(shared, q) }),
            )
            .await
    }

    async fn container_status(
        &self,
        q: Request<v1::ContainerStatusRequest>,
    ) -> Result<Response<v1::ContainerStatusResponse>, Status> {
        self.0
            .simple(
                Method::ContainerStatus,
                q,
                |q| vec![q.container_id.clone()],
                |shared, q| {
                    let world = shared.world.lock();
                    let container =
                        world.containers.get(&q.container_id).ok_or_else(|| no_container(&q.container_id))?;
                    let mut status = container.status.clone();
                    if shared.options.stop_signals {
                        let default = v1::Signal::Sigterm as i32;
                        status.stop_signal =
                            Some(container.config.stop_signal).filter(|s| *s != 0).unwrap_or(default);
                    }
                    Ok(v1::ContainerStatusResponse {
                        status: Some(status),
                        info: if q.verbose { container.info() } else { HashMap::new() },
                    })
                },
            )
            .await
    }

    async fn update_container_resources(
        &self,
        q: Request<v1::UpdateContainerResourcesRequest>,
    ) -> Result<Response<v1::UpdateContainerResourcesResponse>, Status> {
        self.0
            .simple(
                Method::UpdateContainerResources,
                q,
                |q| vec![q.container_id.clone()],
                |shared, q| {
                    let mut world = shared.world.lock();
                    let container = world
                        .containers
                        .get_mut(&q.container_id)
                        .map(Arc::make_mut)
                        .ok_or_else(|| no_container(&q.container_id))?;
                    let before = container.status.resources.take().and_then(|r| r.linux).unwrap_or_default();
                    let linux = Some(updated(before, q.linux.unwrap_or_default()));
                    container.status.resources = Some(v1::ContainerResources { linux, windows: None });
                    Ok(v1::UpdateContainerResourcesResponse {})
                },
            )
            .await
    }

    async fn reopen_container_log(
        &self,
        q: Request<v1::ReopenContainerLogRequest>,
    ) -> Result<Response<v1::ReopenContainerLogResponse>, Status> {
        self.0
            .simple(
                Method::ReopenContainerLog,
                q,
                |q| vec![q.container_id.clone()],
                |shared, q| {
                    let running =
                        shared.world.lock().containers.get(&q.container_id).is_some_and(|c| c.running());
                    if running {
                        Ok(v1::ReopenContainerLogResponse {})
                    } else {
                        Err(Status::unknown("container is not running"))
                    }
                },
            )
            .await
    }

    async fn exec_sync(
        &self,
        q: Request<v1::ExecSyncRequest>,
    ) -> Result<Response<v1::ExecSyncResponse>, Status> {
        let subjects = vec![q.get_ref().container_id.clone()];
        self.0
            .call(Method::ExecSync, q, subjects, |shared, mut plan, q| async move {
                let result = match shared.script.pass(&mut plan).await {
                    Ok(()) => shared.exec_sync(q).await,
                    Err(status) => Err(status),
                };
                (plan, result)
            })
            .await
    }

    async fn exec(&self, q: Request<v1::ExecRequest>) -> Result<Response<v1::ExecResponse>, Status> {
        self.0
            .simple(
                Method::Exec,
                q,
                |q| vec![q.container_id.clone()],
                |shared, _| shared.streaming_url("exec").map(|url| v1::ExecResponse { url }),
            )
            .await
    }

    async fn attach(&self, q: Request<v1::AttachRequest>) -> Result<Response<v1::AttachResponse>, Status> {
        self.0
            .simple(
                Method::Attach,
                q,
                |q| vec![q.container_id.clone()],
                |shared, _| shared.streaming_url("attach").map(|url| v1::AttachResponse { url }),
            )
            .await
    }

    async fn port_forward(
        &self,
        q: Request<v1::PortForwardRequest>,
    ) -> Result<Response<v1::PortForwardResponse>, Status> {
        self.0
            .simple(
                Method::PortForward,
                q,
                |q| vec![q.pod_sandbox_id.clone()],
                |shared, _| shared.streaming_url("portforward").map(|url| v1::PortForwardResponse { url }),
            )
            .await
    }

    async fn container_stats(
        &self,
        q: Request<v1::ContainerStatsRequest>,
    ) -> Result<Response<v1::ContainerStatsResponse>, Status> {
        self.0
            .simple(
                Method::ContainerStats,
                q,
                |q| vec![q.container_id.clone()],
                |shared, q| {
                    let world = shared.world.lock();
                    let container =
                        world.containers.get(&q.container_id).ok_or_else(|| no_container(&q.container_id))?;
                    let used = world.memory.get(container.name()).copied();
                    let memory = used.map(|value| v1::MemoryUsage {
                        usage_bytes: Some(v1::UInt64Value { value }),
                        ..Default::default()
                    });
                    let stats = v1::ContainerStats { memory, ..lists::attributes(container) };
                    Ok(v1::ContainerStatsResponse { stats: Some(stats) })
                },
            )
            .await
    }

    async fn list_container_stats(
        &self,
        q: Request<v1::ListContainerStatsRequest>,
    ) -> Result<Response<v1::ListContainerStatsResponse>, Status> {
        self.0
            .simple(
                Method::ListContainerStats,
                q,
                |_| Vec::new(),
                |shared, _| Ok(v1::ListContainerStatsResponse { stats: lists::container_stats(shared) }),
            )
            .await
    }

    async fn pod_sandbox_stats(
        &self,
        q: Request<v1::PodSandboxStatsRequest>,
    ) -> Result<Response<v1::PodSandboxStatsResponse>, Status> {
        self.0
            .simple(
                Method::PodSandboxStats,
                q,
                |q| vec![q.pod_sandbox_id.clone()],
                |shared, q| {
                    let world = shared.world.lock();
                    let sandbox = world
                        .sandboxes
                        .get(&q.pod_sandbox_id)
                        .ok_or_else(|| no_sandbox(&q.pod_sandbox_id))?;
                    Ok(v1::PodSandboxStatsResponse { stats: Some(lists::sandbox_stats(sandbox)) })
                },
            )
            .await
    }

    async fn list_pod_sandbox_stats(
        &self,
        q: Request<v1::ListPodSandboxStatsRequest>,
    ) -> Result<Response<v1::ListPodSandboxStatsResponse>, Status> {
        self.0
            .simple(
                Method::ListPodSandboxStats,
                q,
                |_| Vec::new(),
                |shared, _| Ok(v1::ListPodSandboxStatsResponse { stats: lists::all_sandbox_stats(shared) }),
            )
            .await
    }

    async fn update_runtime_config(
        &self,
        q: Request<v1::UpdateRuntimeConfigRequest>,
    ) -> Result<Response<v1::UpdateRuntimeConfigResponse>, Status> {
        self.0
            .simple(
                Method::UpdateRuntimeConfig,
                q,
                |_| Vec::new(),
                |_, _| Ok(v1::UpdateRuntimeConfigResponse {}),
            )
            .await
    }

    async fn checkpoint_container(
        &self,
        q: Request<v1::CheckpointContainerRequest>,
    ) -> Result<Response<v1::CheckpointContainerResponse>, Status> {
        self.0
            .simple(
                Method::CheckpointContainer,
                q,
                |q| vec![q.container_id.clone()],
                |shared, q| {
                    if !shared.options.checkpoints {
                        return not_implemented("CheckpointContainer");
                    }
                    std::fs::write(&q.location, q.container_id)
                        .map_err(|e| Status::internal(e.to_string()))?;
                    Ok(v1::CheckpointContainerResponse {})
                },
            )
            .await
    }

    async fn get_container_events(
        &self,
        q: Request<v1::GetEventsRequest>,
    ) -> Result<Response<Self::GetContainerEventsStream>, Status> {
        self.0
            .simple(Method::GetContainerEvents, q, |_| Vec::new(), |shared, _| shared.bus.subscribe_cri())
            .await
    }

    async fn list_metric_descriptors(
        &self,
        q: Request<v1::ListMetricDescriptorsRequest>,
    ) -> Result<Response<v1::ListMetricDescriptorsResponse>, Status> {
        self.0
            .simple(
                Method::ListMetricDescriptors,
                q,
                |_| Vec::new(),
                |_, _| not_implemented("ListMetricDescriptors"),
            )
            .await
    }

    async fn list_pod_sandbox_metrics(
        &self,
        q: Request<v1::ListPodSandboxMetricsRequest>,
    ) -> Result<Response<v1::ListPodSandboxMetricsResponse>, Status> {
        self.0
            .simple(
                Method::ListPodSandboxMetrics,
                q,
                |_| Vec::new(),
                |_, _| not_implemented("ListPodSandboxMetrics"),
            )
            .await
    }

    async fn runtime_config(
        &self,
        q: Request<v1::RuntimeConfigRequest>,
    ) -> Result<Response<v1::RuntimeConfigResponse>, Status> {
        self.0
            .simple(
                Method::RuntimeConfig,
                q,
                |_| Vec::new(),
                |shared, _| match shared.options.cgroup_driver {
                    Some(driver) => Ok(v1::RuntimeConfigResponse {
                        linux: Some(v1::LinuxRuntimeConfiguration { cgroup_driver: driver as i32 }),
                    }),
                    None => not_implemented("RuntimeConfig"),
                },
            )
            .await
    }
}

/// Returns the resources of a container after an update, which leaves what it does not set, as containerd
/// does.
/// Returns what containerd adds to the status of a sandbox if it is asked to be verbose.
fn verbose_info(config: &v1::PodSandboxConfig, verbose: bool) -> HashMap<String, String> {
    let parent = config.linux.as_ref().map(|linux| &linux.cgroup_parent);
    let info = serde_json::json!({"config": {"linux": {"cgroup_parent": parent}}});
    verbose.then(|| ("info".to_owned(), info.to_string())).into_iter().collect()
}

fn updated(
    before: v1::LinuxContainerResources,
    update: v1::LinuxContainerResources,
) -> v1::LinuxContainerResources {
    let number = |new: i64, old: i64| if new == 0 { old } else { new };
    let text = |new: String, old: String| if new.is_empty() { old } else { new };
    let pages =
        if update.hugepage_limits.is_empty() { before.hugepage_limits } else { update.hugepage_limits };
    let mut unified = before.unified;
    unified.extend(update.unified);
    v1::LinuxContainerResources {
        cpu_period: number(update.cpu_period, before.cpu_period),
        cpu_quota: number(update.cpu_quota, before.cpu_quota),
        cpu_shares: number(update.cpu_shares, before.cpu_shares),
        memory_limit_in_bytes: number(update.memory_limit_in_bytes, before.memory_limit_in_bytes),
        oom_score_adj: number(update.oom_score_adj, before.oom_score_adj),
        cpuset_cpus: text(update.cpuset_cpus, before.cpuset_cpus),
        cpuset_mems: text(update.cpuset_mems, before.cpuset_mems),
        hugepage_limits: pages,
        unified,
        memory_swap_limit_in_bytes: number(
            update.memory_swap_limit_in_bytes,
            before.memory_swap_limit_in_bytes,
        ),
    }
}
