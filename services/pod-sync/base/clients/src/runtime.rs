//! CRI calls through the `sync` socket of cri-proxy. Each has the owner epoch, a deadline and an outcome.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pod_sync_node_decisions::image_gc::Image;
use prometheus_client::metrics::counter::Counter;
use quintlet_cgroups::CgroupDriver;
use quintlet_cri_api::v1 as cri;
use quintlet_cri_api::v1::image_service_client::ImageServiceClient;
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_kit::clock::{self, Clock, FAR, bounded};
use quintlet_kit::lists;
use quintlet_kit::stack::Caller;
use quintlet_model::ids::{ContainerId, SandboxId};
use quintlet_model::outcome::{
    DEADLINE_HEADER, JOIN_ONLY_HEADER, OUTCOME_TRAILER, OWNER_EPOCH_HEADER, Outcome,
};
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use crate::broken_calls::BrokenCalls;

/// Limit of RunPodSandbox, as a multiple of the limit of other calls, since it sets up networking and may
/// pull the pause image.
const RUN_SANDBOX: u32 = 2;
/// Limit of one pull. The runtime has a limit of its own for a pull that makes no progress.
const PULL: Duration = Duration::from_secs(3600);
/// Time that cri-proxy has to answer after a deadline has passed.
const SLACK: Duration = Duration::from_secs(5);
/// Largest reply, in bytes (staging/src/k8s.io/cri-client/pkg/utils.go).
const MAX_MESSAGE: usize = 16 << 20;

/// A CRI call failed, or its outcome is unknown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct CallError {
    /// Method of the CRI, without its service.
    pub method: &'static str,
    /// Whether the runtime received and executed the call.
    pub outcome: Outcome,
    /// gRPC code of the answer.
    pub code: Code,
    /// Message of the runtime, or of cri-proxy if the runtime did not answer.
    pub message: String,
}

impl CallError {
    /// Returns whether the runtime answered that the sandbox, container or image does not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.code == Code::NotFound && self.outcome == Outcome::RuntimeError
    }

    /// Returns whether the runtime itself refused the call. Other errors say nothing about the pod.
    #[must_use]
    pub fn is_refused_by_runtime(&self) -> bool {
        self.outcome == Outcome::RuntimeError
    }
}

/// Client of the container runtime, through cri-proxy, with the rights of the owner of the pods.
#[derive(Debug, Clone)]
pub struct Runtime {
    runtime: RuntimeServiceClient<Caller<Channel>>,
    images: ImageServiceClient<Caller<Channel>>,
    channel: Caller<Channel>,
    epoch: u64,
    clock: Clock,
    /// Limit of a call (`runtimeRequestTimeout`).
    call: Duration,
    unknown: Counter,
    broken: Arc<BrokenCalls>,
}

/// Result of a command in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecOutput {
    /// Exit code of the command.
    pub exit_code: i32,
    /// The beginning of its standard output.
    pub stdout: Vec<u8>,
    /// The beginning of its standard error.
    pub stderr: Vec<u8>,
}

impl ExecOutput {
    fn of(reply: cri::ExecSyncResponse) -> Self {
        Self { exit_code: reply.exit_code, stdout: reply.stdout, stderr: reply.stderr }
    }
}

macro_rules! call {
    ($self:ident, $client:ident, $method:ident, $name:literal, $limit:expr, $request:expr) => {{
        let mut client = $self.$client.clone();
        let request = $self.request($request, $limit);
        // Boxed, so that the future of a worker does not have the size of its largest call.
        let sent = Box::pin(client.$method(request));
        $self.counted($self.finish($name, $limit, sent).await)
    }};
}

/// Returns the time limit of a call that runs a command with this limit of its own. A lifecycle hook has
/// none: its grace period may be longer than any limit here, and it ends with its container
/// (`pkg/kubelet/kuberuntime: executePreStopHook`).
fn exec_wait(limit: Option<Duration>, call: Duration) -> Duration {
    limit.map_or(FAR, |limit| limit.saturating_add(call))
}

/// No process listens on the socket of cri-proxy, so the call was not sent: only connect(2) returns these
/// kinds.
fn is_unconnected(status: &Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return matches!(io.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused);
        }
        source = error.source();
    }
    false
}

/// ID of a container, and bytes and inodes of its writable layer as far as the runtime knows them.
pub type WritableLayer = (ContainerId, Option<i64>, Option<i64>);

/// Mount points of the file systems that a runtime uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuntimeMountPoints {
    /// File systems of images.
    pub images: Vec<String>,
    /// File systems of writable container layers.
    pub containers: Vec<String>,
}

impl RuntimeMountPoints {
    /// Returns all mount points, each once.
    #[must_use]
    pub fn distinct(self) -> Vec<String> {
        let all: BTreeSet<String> = self.images.into_iter().chain(self.containers).collect();
        all.into_iter().collect()
    }
}

impl Runtime {
    /// Creates a client of the socket at `path`, which need not exist yet. A call is limited to `call`.
    #[must_use]
    pub fn new(path: PathBuf, epoch: u64, clock: Clock, call: Duration) -> Self {
        let channel = quintlet_kit::socket::caller(path);
        let unknown = quintlet_telemetry::metrics::counter(
            "quintlet_runtime_calls_unknown",
            "Runtime calls that were sent and whose outcome is unknown",
        );
        Self {
            unknown,
            runtime: RuntimeServiceClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE),
            channel: channel.clone(),
            images: ImageServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE),
            epoch,
            clock,
            call,
            broken: Arc::default(),
        }
    }

    /// Returns the record of pods whose calls broke with the connection to cri-proxy.
    #[must_use]
    pub fn broken(&self) -> Arc<BrokenCalls> {
        Arc::clone(&self.broken)
    }

    fn request<T>(&self, message: T, limit: Duration) -> Request<T> {
        let mut request = Request::new(message);
        let metadata = request.metadata_mut();
        metadata.insert(OWNER_EPOCH_HEADER, MetadataValue::from(self.epoch));
        let deadline = self.clock.boot().saturating_add(limit);
        metadata.insert(
            DEADLINE_HEADER,
            MetadataValue::from(u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX)),
        );
        request
    }

    async fn finish<T>(
        &self,
        method: &'static str,
        limit: Duration,
        sent: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, CallError> {
        match tokio::time::timeout(bounded(limit.saturating_add(SLACK)), sent).await {
            Ok(Ok(response)) => match outcome(response.metadata()) {
                // A connection that breaks after the reply loses only the trailer.
                Some(Outcome::Ok) | None => Ok(response.into_inner()),
                Some(outcome) => Err(CallError {
                    method,
                    outcome,
                    code: Code::Unknown,
                    message: "cri-proxy sent a reply for a call that did not succeed".to_owned(),
                }),
            },
            Ok(Err(status)) => {
                let outcome = outcome(status.metadata()).unwrap_or_else(|| {
                    if is_unconnected(&status) {
                        return Outcome::NotDispatched;
                    }
                    self.broken.add_current();
                    Outcome::Unknown
                });
                let message = status.message().to_owned();
                Err(CallError { method, outcome, code: status.code(), message })
            }
            Err(_) => Err(CallError {
                method,
                outcome: Outcome::Unknown,
                code: Code::DeadlineExceeded,
                message: format!("no answer within {}", humantime::format_duration(limit)),
            }),
        }
    }

    /// Counts calls whose outcome is unknown.
    fn counted<T>(&self, answer: Result<T, CallError>) -> Result<T, CallError> {
        if answer.as_ref().is_err_and(|error| error.outcome == Outcome::Unknown) {
            self.unknown.inc();
        }
        answer
    }

    /// Creates and starts a sandbox with a runtime handler; an empty one is the default.
    pub async fn run_sandbox(
        &self,
        config: cri::PodSandboxConfig,
        handler: &str,
    ) -> Result<SandboxId, CallError> {
        let request = cri::RunPodSandboxRequest { config: Some(config), runtime_handler: handler.to_owned() };
        let reply = call!(
            self,
            runtime,
            run_pod_sandbox,
            "RunPodSandbox",
            self.call.saturating_mul(RUN_SANDBOX),
            request
        )?;
        SandboxId::parse(&reply.pod_sandbox_id).map_err(|e| invalid_reply("RunPodSandbox", &e))
    }

    /// Succeeds if the sandbox does not exist.
    pub async fn stop_sandbox(&self, id: &SandboxId) -> Result<(), CallError> {
        let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.to_string() };
        ignore_not_found(
            call!(self, runtime, stop_pod_sandbox, "StopPodSandbox", self.call, request).map(|_| ()),
        )
    }

    /// Succeeds if the sandbox does not exist.
    pub async fn remove_sandbox(&self, id: &SandboxId) -> Result<(), CallError> {
        let request = cri::RemovePodSandboxRequest { pod_sandbox_id: id.to_string() };
        ignore_not_found(
            call!(self, runtime, remove_pod_sandbox, "RemovePodSandbox", self.call, request).map(|_| ()),
        )
    }

    /// Returns the status of a sandbox. Fails if the reply has none.
    pub async fn sandbox_status(&self, id: &SandboxId) -> Result<cri::PodSandboxStatus, CallError> {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_string(), verbose: false };
        call!(self, runtime, pod_sandbox_status, "PodSandboxStatus", self.call, request)?
            .status
            .ok_or_else(|| invalid_reply("PodSandboxStatus", &"no status"))
    }

    /// Returns the cgroup in which the runtime made a sandbox, or `None` if it does not say. Its verbose
    /// answer has the request of the agent (containerd) or the specification of the OCI (CRI-O).
    pub async fn sandbox_cgroup_parent(&self, id: &SandboxId) -> Result<Option<String>, CallError> {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_string(), verbose: true };
        let reply = call!(self, runtime, pod_sandbox_status, "PodSandboxStatus", self.call, request)?;
        Ok(reply.info.get("info").and_then(|info| cgroup_parent(info)))
    }

    /// Creates a container without starting it.
    pub async fn create_container(
        &self,
        sandbox: &SandboxId,
        config: cri::ContainerConfig,
        sandbox_config: cri::PodSandboxConfig,
    ) -> Result<ContainerId, CallError> {
        let request = cri::CreateContainerRequest {
            pod_sandbox_id: sandbox.to_string(),
            config: Some(config),
            sandbox_config: Some(sandbox_config),
        };
        let reply = call!(self, runtime, create_container, "CreateContainer", self.call, request)?;
        ContainerId::parse(&reply.container_id).map_err(|e| invalid_reply("CreateContainer", &e))
    }

    /// Starts a container that was created.
    pub async fn start_container(&self, id: &ContainerId) -> Result<(), CallError> {
        let request = cri::StartContainerRequest { container_id: id.to_string() };
        call!(self, runtime, start_container, "StartContainer", self.call, request).map(|_| ())
    }

    /// Stops a container, with `grace` seconds before SIGKILL. Succeeds if the container does not exist.
    pub async fn stop_container(&self, id: &ContainerId, grace: i64) -> Result<(), CallError> {
        let limit = self.call.saturating_add(clock::seconds(grace));
        let request = cri::StopContainerRequest { container_id: id.to_string(), timeout: grace };
        ignore_not_found(call!(self, runtime, stop_container, "StopContainer", limit, request).map(|_| ()))
    }

    /// Changes the resources of a running container in place.
    pub async fn update_container(
        &self,
        id: &ContainerId,
        resources: cri::LinuxContainerResources,
    ) -> Result<(), CallError> {
        let request = cri::UpdateContainerResourcesRequest {
            container_id: id.to_string(),
            linux: Some(resources),
            ..cri::UpdateContainerResourcesRequest::default()
        };
        call!(self, runtime, update_container_resources, "UpdateContainerResources", self.call, request)
            .map(|_| ())
    }

    /// # Errors
    /// `Unimplemented` from a runtime that does not support UpdatePodSandboxResources.
    pub async fn update_sandbox(
        &self,
        id: &SandboxId,
        overhead: cri::LinuxContainerResources,
        resources: cri::LinuxContainerResources,
    ) -> Result<(), CallError> {
        let request = cri::UpdatePodSandboxResourcesRequest {
            pod_sandbox_id: id.to_string(),
            overhead: Some(overhead),
            resources: Some(resources),
        };
        let mut client = self.runtime.clone();
        let sent = Box::pin(client.update_pod_sandbox_resources(self.request(request, self.call)));
        self.finish("UpdatePodSandboxResources", self.call, sent).await.map(|_| ())
    }

    /// Returns the bytes of memory that a container uses, or `None` if the runtime does not report them.
    pub async fn container_memory(&self, id: &ContainerId) -> Result<Option<i64>, CallError> {
        let request = cri::ContainerStatsRequest { container_id: id.to_string() };
        let stats = call!(self, runtime, container_stats, "ContainerStats", self.call, request)?.stats;
        let memory = stats.and_then(|s| s.memory);
        // Older runtimes report only the working set.
        let bytes = memory.and_then(|m| m.usage_bytes.or(m.working_set_bytes)).map(|v| v.value);
        Ok(bytes.map(|b| i64::try_from(b).unwrap_or(i64::MAX)))
    }

    /// Writes the state of a running container to a file at `location`. The limit is `timeout`, but at least
    /// that of other calls.
    ///
    /// # Errors
    /// `Unimplemented` from a runtime that does not support checkpoints.
    pub async fn checkpoint_container(
        &self,
        id: &ContainerId,
        location: &Path,
        timeout: Duration,
    ) -> Result<(), CallError> {
        let limit = self.call.max(timeout);
        let request = cri::CheckpointContainerRequest {
            container_id: id.to_string(),
            location: location.display().to_string(),
            timeout: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        };
        call!(self, runtime, checkpoint_container, "CheckpointContainer", limit, request).map(|_| ())
    }

    /// Succeeds if the container does not exist.
    pub async fn remove_container(&self, id: &ContainerId) -> Result<(), CallError> {
        let request = cri::RemoveContainerRequest { container_id: id.to_string() };
        ignore_not_found(
            call!(self, runtime, remove_container, "RemoveContainer", self.call, request).map(|_| ()),
        )
    }

    /// Makes the runtime write to a new log file after a rotation.
    pub async fn reopen_container_log(&self, id: &ContainerId) -> Result<(), CallError> {
        let request = cri::ReopenContainerLogRequest { container_id: id.to_string() };
        call!(self, runtime, reopen_container_log, "ReopenContainerLog", self.call, request).map(|_| ())
    }

    /// Runs a command. Without `limit`, as for lifecycle hooks, the command ends with its container, or when
    /// this future is dropped.
    pub async fn exec(
        &self,
        id: &ContainerId,
        command: &[String],
        limit: Option<Duration>,
    ) -> Result<ExecOutput, CallError> {
        let seconds = limit.map_or(0, |d| i64::try_from(d.as_secs()).unwrap_or(i64::MAX));
        let request =
            cri::ExecSyncRequest { container_id: id.to_string(), cmd: command.to_vec(), timeout: seconds };
        let wait = exec_wait(limit, self.call);
        call!(self, runtime, exec_sync, "ExecSync", wait, request).map(ExecOutput::of)
    }

    /// Repeats [`Runtime::exec`] without a limit, when an earlier pod-sync may have sent the same request at
    /// `began` (CLOCK_BOOTTIME) or later. cri-proxy waits for the earlier exec, returns its result, or starts
    /// the command if it never received the request. Returns `None` if cri-proxy cannot know whether the
    /// command ran.
    pub async fn exec_once(
        &self,
        id: &ContainerId,
        command: &[String],
        began: Duration,
    ) -> Result<Option<ExecOutput>, CallError> {
        let message =
            cri::ExecSyncRequest { container_id: id.to_string(), cmd: command.to_vec(), timeout: 0 };
        let wait = exec_wait(None, self.call);
        let mut request = self.request(message, wait);
        let began = u64::try_from(began.as_nanos()).unwrap_or(u64::MAX);
        request.metadata_mut().insert(JOIN_ONLY_HEADER, MetadataValue::from(began));
        let mut client = self.runtime.clone();
        let sent = Box::pin(client.exec_sync(request));
        match self.finish("ExecSync", wait, sent).await {
            Ok(reply) => Ok(Some(ExecOutput::of(reply))),
            Err(e) if e.outcome == Outcome::NotDispatched && e.code == Code::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Returns `None` if the image does not exist.
    pub async fn image_status(&self, image: cri::ImageSpec) -> Result<Option<cri::Image>, CallError> {
        let request = cri::ImageStatusRequest { image: Some(image), verbose: false };
        Ok(call!(self, images, image_status, "ImageStatus", self.call, request)?.image)
    }

    /// Returns the reference of the pulled image.
    pub async fn pull_image(
        &self,
        image: cri::ImageSpec,
        auth: Option<cri::AuthConfig>,
        sandbox_config: cri::PodSandboxConfig,
    ) -> Result<String, CallError> {
        let request =
            cri::PullImageRequest { image: Some(image), auth, sandbox_config: Some(sandbox_config) };
        Ok(call!(self, images, pull_image, "PullImage", PULL, request)?.image_ref)
    }

    /// Returns what `select` makes of each sandbox.
    pub async fn sandboxes<T>(
        &self,
        select: impl Fn(cri::PodSandbox) -> Option<T>,
    ) -> Result<Vec<T>, CallError> {
        let request = self.request(cri::ListPodSandboxRequest::default(), self.call);
        let listing = async {
            let mut sandboxes = Vec::new();
            let take =
                |m: cri::ListPodSandboxResponse| sandboxes.extend(m.items.into_iter().filter_map(&select));
            let metadata = lists::SANDBOXES.each(self.channel.clone(), request, take).await?;
            Ok(Response::from_parts(metadata, sandboxes, tonic::Extensions::default()))
        };
        self.finish("ListPodSandbox", self.call, Box::pin(listing)).await
    }

    /// Returns what `select` makes of each container.
    pub async fn containers<T>(
        &self,
        select: impl Fn(cri::Container) -> Option<T>,
    ) -> Result<Vec<T>, CallError> {
        let request = self.request(cri::ListContainersRequest::default(), self.call);
        let listing = async {
            let mut containers = Vec::new();
            let take = |m: cri::ListContainersResponse| {
                containers.extend(m.containers.into_iter().filter_map(&select));
            };
            let metadata = lists::CONTAINERS.each(self.channel.clone(), request, take).await?;
            Ok(Response::from_parts(metadata, containers, tonic::Extensions::default()))
        };
        self.finish("ListContainers", self.call, Box::pin(listing)).await
    }

    /// Lists the images of the runtime.
    pub async fn images(&self) -> Result<Vec<Image>, CallError> {
        let request = cri::ListImagesRequest { filter: None };
        let image = |i: cri::Image| {
            let names = i.repo_digests.into_iter().chain(i.repo_tags).collect();
            Image { id: i.id, names, size: i.size, pinned: i.pinned }
        };
        let request = self.request(request, self.call);
        let listing = async {
            let mut images = Vec::new();
            let take = |m: cri::ListImagesResponse| images.extend(m.images.into_iter().map(image));
            let metadata = lists::IMAGES.each(self.channel.clone(), request, take).await?;
            Ok(Response::from_parts(metadata, images, tonic::Extensions::default()))
        };
        self.finish("ListImages", self.call, Box::pin(listing)).await
    }

    /// Succeeds if the image does not exist.
    pub async fn remove_image(&self, id: &str) -> Result<(), CallError> {
        let image = cri::ImageSpec { image: id.to_owned(), ..cri::ImageSpec::default() };
        let request = cri::RemoveImageRequest { image: Some(image) };
        ignore_not_found(call!(self, images, remove_image, "RemoveImage", self.call, request).map(|_| ()))
    }

    /// Returns the mount points of the runtime's file systems (ImageFsInfo).
    pub async fn mount_points(&self) -> Result<RuntimeMountPoints, CallError> {
        let reply = call!(self, images, image_fs_info, "ImageFsInfo", self.call, cri::ImageFsInfoRequest {})?;
        let mount_points = |all: Vec<cri::FilesystemUsage>| {
            all.into_iter().filter_map(|usage| Some(usage.fs_id?.mountpoint)).collect()
        };
        Ok(RuntimeMountPoints {
            images: mount_points(reply.image_filesystems),
            containers: mount_points(reply.container_filesystems),
        })
    }

    /// Returns bytes and inodes of the writable layer of each container (ListContainerStats).
    pub async fn writable_layers(&self) -> Result<Vec<WritableLayer>, CallError> {
        let request = cri::ListContainerStatsRequest::default();
        let reply = call!(self, runtime, list_container_stats, "ListContainerStats", self.call, request)?;
        Ok(reply.stats.into_iter().filter_map(writable_layer).collect())
    }

    /// Returns the sandbox image, if the verbose Status of the runtime has it, as that of containerd does.
    pub async fn sandbox_image(&self) -> Result<Option<String>, CallError> {
        let reply = call!(self, runtime, status, "Status", self.call, cri::StatusRequest { verbose: true })?;
        let config = reply.info.get("config").and_then(|c| serde_json::from_str::<serde_json::Value>(c).ok());
        Ok(config.and_then(|c| c["sandboxImage"].as_str().map(str::to_owned)).filter(|i| !i.is_empty()))
    }

    /// Returns the cgroup driver of the runtime, or `None` if the runtime does not implement RuntimeConfig.
    pub async fn cgroup_driver(&self) -> Result<Option<CgroupDriver>, CallError> {
        let request = cri::RuntimeConfigRequest {};
        match call!(self, runtime, runtime_config, "RuntimeConfig", self.call, request) {
            Ok(reply) => Ok(reply.linux.map(|linux| match linux.cgroup_driver() {
                cri::CgroupDriver::Systemd => CgroupDriver::Systemd,
                cri::CgroupDriver::Cgroupfs => CgroupDriver::Cgroupfs,
            })),
            Err(e) if e.is_refused_by_runtime() && e.code == Code::Unimplemented => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Sends the address ranges of pods, separated by commas (UpdateRuntimeConfig).
    pub async fn update_config(&self, pod_cidrs: &str) -> Result<(), CallError> {
        let network_config = Some(cri::NetworkConfig { pod_cidr: pod_cidrs.to_owned() });
        let runtime_config = Some(cri::RuntimeConfig { network_config });
        let request = cri::UpdateRuntimeConfigRequest { runtime_config };
        call!(self, runtime, update_runtime_config, "UpdateRuntimeConfig", self.call, request).map(|_| ())
    }

    /// Returns name and versions of the runtime.
    pub async fn version(&self) -> Result<cri::VersionResponse, CallError> {
        let request = cri::VersionRequest { version: "v1".to_owned() };
        call!(self, runtime, version, "Version", self.call, request)
    }

    /// Returns the conditions and handlers of the runtime.
    pub async fn status(&self) -> Result<cri::StatusResponse, CallError> {
        call!(self, runtime, status, "Status", self.call, cri::StatusRequest { verbose: false })
    }
}

/// A figure that does not fit is unknown: runtimes subtract unsigned numbers, so that a negative one is very
/// large.
fn writable_layer(stats: cri::ContainerStats) -> Option<WritableLayer> {
    let number = |value: Option<cri::UInt64Value>| i64::try_from(value?.value).ok();
    let layer = stats.writable_layer?;
    let id = ContainerId::parse(&stats.attributes?.id).ok()?;
    Some((id, number(layer.used_bytes), number(layer.inodes_used)))
}

fn cgroup_parent(info: &str) -> Option<String> {
    let info: serde_json::Value = serde_json::from_str(info).ok()?;
    let requested = info.pointer("/config/linux/cgroup_parent").and_then(serde_json::Value::as_str);
    // CRI-O: a directory with the cgroup of the sandbox in it, or SLICE:PREFIX:ID.
    let path = info.pointer("/runtimeSpec/linux/cgroupsPath").and_then(serde_json::Value::as_str);
    let parent = path.and_then(|path| path.split_once(':').or_else(|| path.rsplit_once('/')));
    requested.or(parent.map(|(parent, _)| parent)).filter(|parent| !parent.is_empty()).map(str::to_owned)
}

fn outcome(metadata: &MetadataMap) -> Option<Outcome> {
    metadata.get(OUTCOME_TRAILER).map(|v| Outcome::from_name(v.to_str().ok()))
}

fn invalid_reply(method: &'static str, why: &dyn std::fmt::Display) -> CallError {
    CallError {
        method,
        outcome: Outcome::Unknown,
        code: Code::Internal,
        message: format!("invalid reply: {why}"),
    }
}

fn ignore_not_found(result: Result<(), CallError>) -> Result<(), CallError> {
    match result {
        Err(e) if e.is_not_found() => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cgroup_of_a_sandbox_is_in_the_verbose_answers_of_containerd_and_cri_o() {
        for (info, want) in [
            (r#"{"config": {"linux": {"cgroup_parent": "/kubepods/podu1"}}}"#, Some("/kubepods/podu1")),
            (r#"{"config": {"linux": {"cgroup_parent": ""}}}"#, None),
            (
                r#"{"runtimeSpec": {"linux": {"cgroupsPath": "kubepods-podu1.slice:crio:8c"}}}"#,
                Some("kubepods-podu1.slice"),
            ),
            (
                r#"{"runtimeSpec": {"linux": {"cgroupsPath": "/kubepods/podu1/crio-8c"}}}"#,
                Some("/kubepods/podu1"),
            ),
            (r#"{"pid": 7}"#, None),
            ("no JSON", None),
        ] {
            assert_eq!(cgroup_parent(info).as_deref(), want, "{info}");
        }
    }

    #[test]
    fn a_command_without_a_limit_is_waited_for_longer_than_any_grace_period() {
        let call = Duration::from_secs(120);
        let (minute, week) = (Duration::from_secs(60), Duration::from_secs(7 * 24 * 3600));
        assert_eq!(exec_wait(Some(minute), call), Duration::from_secs(180));
        assert!(exec_wait(None, call) > week, "{:?}", exec_wait(None, call));
    }

    #[test]
    fn a_negative_figure_of_a_writable_layer_is_unknown() {
        let number = |value| Some(cri::UInt64Value { value });
        for (bytes, inodes, want) in [
            (number(5), number(2), (Some(5), Some(2))),
            (number(0), None, (Some(0), None)),
            (number(0_u64.wrapping_sub(4096)), number(u64::MAX), (None, None)),
        ] {
            let stats = cri::ContainerStats {
                attributes: Some(cri::ContainerAttributes { id: "c".to_owned(), ..Default::default() }),
                writable_layer: Some(cri::FilesystemUsage {
                    used_bytes: bytes,
                    inodes_used: inodes,
                    ..Default::default()
                }),
                ..Default::default()
            };
            let (id, bytes, inodes) = writable_layer(stats).unwrap();
            assert_eq!((id.as_str(), (bytes, inodes)), ("c", want));
        }
        assert_eq!(writable_layer(cri::ContainerStats::default()), None, "the runtime has no figures");
    }
}
