//! Starts containers in a sandbox (`pkg/kubelet/kuberuntime: startContainer`).

use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod};
use pod_sync_clients::{CallError, EventType};
use pod_sync_decisions::actions::PodActions;
use pod_sync_decisions::backoff::{self, ImagePullBackoffs};
use pod_sync_decisions::container_status::WaitingReason;
use pod_sync_decisions::starts::{ContainerKind, StartHold};
use pod_sync_decisions::waiting::StartFailure;
use pod_sync_layout::paths;
use quintlet_cri_api::v1 as cri;
use quintlet_kit::clock::Clock;
use quintlet_kit::failpoint;
use quintlet_kit::task::blocking;
use quintlet_model::hash::container_hash;
use quintlet_model::ids::{ContainerId, SandboxId};
use quintlet_model::pod as pods;
use quintlet_model::runtime::ContainerState;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::halt::Halt;
use super::pass::Pass;
use super::retries::{ERROR_WAIT, RetryTimes, jitter};
use super::setup::PodSetup;
use super::stop::Stops;
use super::tracker::Tracker;
use crate::context::{
    Checkpoints, ImagePulls, NodeConfig, PodEnvironment, PullContext, Reporting, RuntimeAccess, StopContext,
    WorkerControl,
};

const START: &str = "StartContainer";

/// A container to start, and its sandbox (`pkg/kubelet/kuberuntime: startSpec`).
#[derive(Debug, Clone, Copy)]
pub(super) struct StartSpec<'a> {
    pub(super) kind: ContainerKind,
    pub(super) container: &'a Container,
    pub(super) sandbox: &'a SandboxId,
    pub(super) sandbox_config: &'a cri::PodSandboxConfig,
    /// Addresses of the pod.
    pub(super) ips: &'a [IpAddr],
}

impl StartSpec<'_> {
    /// Returns the field path of events about the container.
    pub(super) fn field_path(&self) -> String {
        self.kind.field_path(&self.container.name)
    }
}

/// A container did not start.
#[derive(Debug)]
pub(super) enum NotStarted {
    /// The container waits.
    Waits(FailedStart),
    /// Termination of the pod was requested during the pass.
    Ends,
    /// The whole pass ends.
    Halt(Halt),
}

/// The failure of a start, and what the record gets with its reason.
#[derive(Debug)]
pub(super) struct FailedStart {
    pub(super) reason: WaitingReason,
    pub(super) instance: FailedInstance,
    /// Image-pull back-offs with this failure; none if they have not changed.
    pub(super) pulls: Option<ImagePullBackoffs>,
}

/// The instance of a failed start.
#[derive(Debug)]
pub(super) enum FailedInstance {
    /// There is none, or the outcome of its start is unknown.
    None,
    /// The runtime refused to start the instance.
    Refused(ContainerId),
    /// The postStart hook failed, and the instance was stopped.
    HookFailed(ContainerId),
}

impl From<WaitingReason> for FailedStart {
    fn from(reason: WaitingReason) -> Self {
        Self { reason, instance: FailedInstance::None, pulls: None }
    }
}

impl From<Halt> for NotStarted {
    fn from(halt: Halt) -> Self {
        Self::Halt(halt)
    }
}

/// Returns the ephemeral containers of a pod, as containers.
pub(super) fn ephemeral_containers(pod: &Pod) -> Vec<Container> {
    let list = pods::spec(pod).ephemeral_containers.iter().flatten();
    list.map(pod_sync_cri_config::container::container_of_ephemeral).collect()
}

/// The starts of the containers of one pod.
pub(super) struct Starts<'a> {
    pub(super) clock: &'a Clock,
    pub(super) node: &'a Arc<NodeConfig>,
    pub(super) runtime: &'a RuntimeAccess,
    pub(super) reporting: &'a Arc<Reporting>,
    pub(super) checkpoints: &'a Checkpoints,
    pub(super) environment: &'a Arc<PodEnvironment>,
    pub(super) images: &'a Arc<ImagePulls>,
    pub(super) control: &'a WorkerControl,
    /// Wakes the worker.
    pub(super) wakeup: &'a Arc<Notify>,
    /// Ends the sync, unless it has reached the runtime.
    pub(super) cancel: &'a CancellationToken,
    pub(super) tracker: &'a mut Tracker,
    pub(super) retries: &'a mut RetryTimes,
    pub(super) setup: &'a mut PodSetup,
}

/// Returns the label of metrics.
fn label(kind: ContainerKind) -> &'static str {
    match kind {
        ContainerKind::Init => pod_sync_metrics::INIT,
        ContainerKind::Regular => pod_sync_metrics::REGULAR,
        ContainerKind::Ephemeral => pod_sync_metrics::EPHEMERAL,
    }
}

impl Starts<'_> {
    /// Starts the containers in order. Each start that fails is recorded, and the next one follows unless it
    /// depends on it.
    pub(super) async fn start_all(
        &mut self,
        pass: &Pass,
        actions: &PodActions,
        sandbox: &SandboxId,
        sandbox_config: &cri::PodSandboxConfig,
        ips: &[IpAddr],
    ) -> Result<(), Halt> {
        let pod = &pass.pod;
        let ephemeral = ephemeral_containers(pod);
        let starts: Vec<(ContainerKind, &Container)> = actions.starts_in_order(pod, &ephemeral);
        let containers: Vec<&Container> = starts.iter().map(|(_, c)| *c).collect();
        self.ensure_image_volumes(pod, &containers, sandbox_config).await?;
        for (kind, container) in starts {
            // A pod that is to terminate starts no more containers.
            if self.is_ending() {
                return Ok(());
            }
            self.reporting.metrics.container_starting(label(kind));
            match self
                .start_container(pass, StartSpec { kind, container, sandbox, sandbox_config, ips })
                .await
            {
                Ok(id) => self.record_start(container, &id),
                Err(NotStarted::Waits(failed)) => {
                    self.reporting.metrics.container_start_failed(label(kind), &failed.reason.reason);
                    self.record_failed_start(container, failed);
                    if kind.blocks_the_next(container) {
                        break;
                    }
                }
                Err(NotStarted::Ends) => return Ok(()),
                Err(NotStarted::Halt(halt)) => return Err(halt),
            }
        }
        Ok(())
    }

    /// Returns the stops of the pod.
    pub(super) fn stops(&mut self) -> Stops<'_> {
        Stops { ctx: self.stop_context(), tracker: self.tracker, wakeup: self.wakeup }
    }

    /// Returns what hooks use.
    pub(super) fn stop_context(&self) -> StopContext {
        StopContext {
            clock: self.clock.clone(),
            runtime: self.runtime.clone(),
            reporting: Arc::clone(self.reporting),
        }
    }

    /// Returns what image pulls use.
    pub(super) fn pull_context(&self) -> PullContext {
        PullContext {
            clock: self.clock.clone(),
            runtime: self.runtime.clone(),
            reporting: Arc::clone(self.reporting),
            environment: Arc::clone(self.environment),
            images: Arc::clone(self.images),
        }
    }

    /// Returns whether termination was requested during this pass.
    pub(super) fn is_ending(&self) -> bool {
        self.control.pod_workers.is_ending(&self.tracker.pod_ref.uid)
    }

    pub(super) async fn start_container(
        &mut self,
        pass: &Pass,
        spec: StartSpec<'_>,
    ) -> Result<ContainerId, NotStarted> {
        let (container, field_path) = (spec.container, spec.field_path());
        let existing = self.created_instance(pass, spec);
        let is_existing = existing.is_some();
        let (id, restarts) = match existing {
            Some(instance) => instance,
            None => self.create_container(pass, spec).await?,
        };
        self.unless_ending()?;
        // Recorded before the start: an interrupted start may end an instance that never ran.
        self.tracker.record.update(|record| {
            record.starting.insert(container.name.clone(), id.to_string());
            if container.lifecycle.as_ref().is_some_and(|l| l.post_start.is_some()) {
                record.post_starts.insert(id.to_string(), None);
            }
        });
        if let Err(error) = self.runtime.calls.start_container(&id).await {
            return Err(self.start_failed(pass, spec, &id, &error, is_existing));
        }
        self.retries.settled(&container.name, START);
        self.reporting.events.pod(&pass.pod, EventType::Normal, "Started", "Container started", &field_path);
        self.link_log(container, &id, restarts).await;
        self.post_start(&pass.pod, container, &id, spec.ips, &field_path).await?;
        Ok(id)
    }

    /// Returns the id and the restart count of an instance that was created and not started. The worker
    /// starts this instance and creates no other one. That includes an instance whose last start has an
    /// unknown outcome: the runtime may start it yet, and two instances must not run. An instance whose start
    /// the runtime refused is not started again, as in the kubelet.
    fn created_instance(&self, pass: &Pass, spec: StartSpec<'_>) -> Option<(ContainerId, u32)> {
        let container = spec.container;
        let newest = pass.runtime.newest(&container.name)?;
        let hash = container_hash(&container.name, container.image.as_deref().unwrap_or_default());
        let is_refused = self
            .tracker
            .record
            .refused_starts
            .get(&container.name)
            .is_some_and(|id| id == newest.id.as_str());
        let is_startable = newest.state == ContainerState::Created
            && newest.sandbox_id == *spec.sandbox
            && newest.hash() == hash
            && !is_refused;
        is_startable.then(|| (newest.id.clone(), newest.restart_count()))
    }

    fn start_failed(
        &mut self,
        pass: &Pass,
        spec: StartSpec<'_>,
        id: &ContainerId,
        error: &CallError,
        is_existing: bool,
    ) -> NotStarted {
        let name = &spec.container.name;
        // The refused start of an instance that an interrupted pass left: its first start may be in progress
        // in the runtime or have ended, or containerd finished its creation without the sandbox's namespaces.
        // The container is not at fault. The next pass creates an instance that has ended again.
        if error.is_refused_by_runtime()
            && is_existing
            && !self.retries.has_repeated(error, name, id.as_str(), self.clock.boot())
        {
            return Halt::Interrupted(format!("failed to start the existing instance: {error}")).into();
        }
        match self.call_failed(pass, spec, id.as_str(), error, StartFailure::RunContainerError) {
            NotStarted::Waits(failed) if error.is_refused_by_runtime() => {
                NotStarted::Waits(FailedStart { instance: FailedInstance::Refused(id.clone()), ..failed })
            }
            other @ (NotStarted::Waits(_) | NotStarted::Ends | NotStarted::Halt(_)) => other,
        }
    }

    /// Returns what follows an unsuccessful call for a container: the container waits, or the pass ends.
    /// `object` is the container or sandbox of the call.
    pub(super) fn call_failed(
        &mut self,
        pass: &Pass,
        spec: StartSpec<'_>,
        object: &str,
        error: &CallError,
        failure: StartFailure,
    ) -> NotStarted {
        if !self.retries.is_failure(error, &spec.container.name, object, self.clock.boot()) {
            return Halt::interrupted(error).into();
        }
        self.report_start_error(pass, spec, &error.to_string());
        NotStarted::Waits(failure.with_message(error.message.clone()).into())
    }

    /// Records the event for an error that keeps a container from starting.
    pub(super) fn report_start_error(&self, pass: &Pass, spec: StartSpec<'_>, error: &str) {
        self.reporting.events.pod(
            &pass.pod,
            EventType::Warning,
            "Failed",
            &format!("Error: {error}"),
            &spec.field_path(),
        );
    }

    /// Records that an instance of a container was started, and that its postStart hook has ended.
    pub(super) fn record_start(&mut self, container: &Container, id: &ContainerId) {
        let (key, name) = (backoff::crash_loop_key(&self.tracker.pod_ref, container), &container.name);
        self.tracker.record.update(|record| {
            record.crash_loop.end_restart(&key);
            record.waiting.remove(name);
            record.refused_starts.remove(name);
            record.starting.remove(name);
            record.post_starts.remove(id.as_str());
        });
    }

    /// Records why a container was not started.
    pub(super) fn record_failed_start(&mut self, container: &Container, failed: FailedStart) {
        let FailedStart { reason, instance, pulls } = failed;
        let hold = StartHold::after(&reason.reason, self.clock.boot(), jitter(ERROR_WAIT));
        if let Some(hold) = hold {
            self.retries.containers.insert(container.name.clone(), hold);
        }
        let (key, name) = (backoff::crash_loop_key(&self.tracker.pod_ref, container), &container.name);
        self.tracker.record.update(|record| {
            record.crash_loop.end_restart(&key);
            match instance {
                FailedInstance::None => {}
                FailedInstance::Refused(id) => {
                    record.starting.remove(name);
                    record.post_starts.remove(id.as_str());
                    record.refused_starts.insert(name.clone(), id.to_string());
                }
                FailedInstance::HookFailed(id) => {
                    record.post_starts.remove(id.as_str());
                }
            }
            if let Some(pulls) = pulls {
                record.pulls = pulls;
            }
            record.waiting.insert(name.clone(), reason);
        });
    }

    pub(super) fn unless_ending(&self) -> Result<(), NotStarted> {
        if self.is_ending() { Err(NotStarted::Ends) } else { Ok(()) }
    }

    // Log collectors read /var/log/containers.
    async fn link_log(&self, container: &Container, id: &ContainerId, restarts: u32) {
        let Some(dir) = self.node.container_logs_dir.as_deref() else { return };
        let log = paths::pod_log_dir(&self.node.settings.pod_logs_dir, &self.tracker.pod_ref)
            .join(paths::container_log_path(&container.name, restarts));
        let link = dir.join(paths::legacy_log_name(&self.tracker.pod_ref, &container.name, id.as_str()));
        let path = link.clone();
        let make = move || failpoint::file!("log linked", || std::os::unix::fs::symlink(&log, &path));
        if let Err(e) = blocking(make).await
            && e.kind() != std::io::ErrorKind::AlreadyExists
        {
            tracing::debug!(pod.uid = %self.tracker.pod_ref.uid, link = %link.display(), error = %e, "failed to link container log");
        }
    }
}
