//! Starts containers in a sandbox (`pkg/kubelet/kuberuntime: startContainer`).

use std::net::IpAddr;

use k8s_cri::v1 as cri;
use k8s_openapi::api::core::v1::Container;
use pod_sync_clients::{CallError, EventType};
use pod_sync_decisions::backoff::ImagePullBackoffs;
use pod_sync_decisions::container_status::WaitingReason;
use pod_sync_decisions::waiting::StartFailure;
use pod_sync_layout::paths;
use quintlet_kit::failpoint;
use quintlet_kit::task::blocking;
use quintlet_model::hash::container_hash;
use quintlet_model::ids::{ContainerId, SandboxId};
use quintlet_model::outcome::Outcome;
use quintlet_model::runtime::ContainerState;

use super::pending_starts::ContainerKind;
use super::sync::forget_starts;
use super::{Halt, Pass, Worker};

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

impl Worker {
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
        self.record.update(|record| {
            record.starting.insert(container.name.clone(), id.to_string());
            if container.lifecycle.as_ref().is_some_and(|l| l.post_start.is_some()) {
                record.post_starts.insert(id.to_string(), None);
            }
        });
        if let Err(error) = self.ctx.runtime.calls.start_container(&id).await {
            return Err(self.start_failed(pass, spec, &id, &error, is_existing));
        }
        self.retries.unknown_calls.settled(&container.name, START);
        self.ctx.reporting.events.pod(
            &pass.pod,
            EventType::Normal,
            "Started",
            "Container started",
            &field_path,
        );
        self.link_log(container, &id, restarts).await;
        self.post_start(&pass.pod, container, &id, spec.ips, &field_path).await?;
        Ok(id)
    }

    // Returns the id and the restart count of an instance that was created and not started. The worker starts this instance and
    // creates no other one. That includes an instance whose last start has an unknown outcome: the runtime may start it yet, and
    // two instances must not run. An instance whose start the runtime refused is not started again, as in the kubelet.
    fn created_instance(&self, pass: &Pass, spec: StartSpec<'_>) -> Option<(ContainerId, u32)> {
        let container = spec.container;
        let newest = pass.runtime.newest(&container.name)?;
        let hash = container_hash(&container.name, container.image.as_deref().unwrap_or_default());
        let is_refused =
            self.record.refused_starts.get(&container.name).is_some_and(|id| id == newest.id.as_str());
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
        // The refused start of an instance that an interrupted pass left: its first start may be in progress in the runtime or
        // have ended, or containerd finished its creation without the sandbox's namespaces. The container is not at fault.
        // The next pass creates an instance that has ended again.
        if error.is_refused_by_runtime() && is_existing && !self.has_repeated(error, name, id.as_str()) {
            return Halt::Interrupted(format!("failed to start the existing instance: {error}")).into();
        }
        match self.call_failed(pass, spec, id.as_str(), error, StartFailure::RunContainerError) {
            NotStarted::Waits(failed) if error.is_refused_by_runtime() => {
                NotStarted::Waits(FailedStart { instance: FailedInstance::Refused(id.clone()), ..failed })
            }
            other @ (NotStarted::Waits(_) | NotStarted::Ends | NotStarted::Halt(_)) => other,
        }
    }

    /// Returns what follows an unsuccessful call for a container: the container waits, or the pass ends. `object` is the container or
    /// sandbox of the call.
    pub(super) fn call_failed(
        &mut self,
        pass: &Pass,
        spec: StartSpec<'_>,
        object: &str,
        error: &CallError,
        failure: StartFailure,
    ) -> NotStarted {
        if !self.is_failure(error, &spec.container.name, object) {
            return Halt::interrupted(error).into();
        }
        self.report_start_error(pass, spec, &error.to_string());
        NotStarted::Waits(failure.with_message(error.message.clone()).into())
    }

    /// Records the event for an error that keeps a container from starting.
    pub(super) fn report_start_error(&self, pass: &Pass, spec: StartSpec<'_>, error: &str) {
        self.ctx.reporting.events.pod(
            &pass.pod,
            EventType::Warning,
            "Failed",
            &format!("Error: {error}"),
            &spec.field_path(),
        );
    }

    /// Removes instances whose start was interrupted before they ran: containerd aborts a start when its caller's connection
    /// breaks. They are created again with the same attempt. Returns whether there were any.
    pub(super) async fn remove_interrupted_starts(&mut self, pass: &Pass) -> Result<bool, Halt> {
        let never_ran: Vec<_> = pass
            .runtime
            .containers
            .iter()
            .filter(|c| self.record.starting.get(&c.name).is_some_and(|id| id == c.id.as_str()))
            .filter(|c| c.state == ContainerState::Exited && c.started_unix_ns <= 0)
            .cloned()
            .collect();
        let mut forgotten = false;
        for instance in &never_ran {
            tracing::info!(pod.uid = %self.pod_ref.uid, container.id = %instance.id, "removing container whose start was interrupted");
            // containerd 1.6 may keep the task of such a start, and then refuses to remove the container. The next instance is
            // created beside it, with the next attempt.
            let removed = self.remove_container(&pass.pod, &pass.runtime, &instance.id, true).await;
            forgotten |= self.tolerate_refusal(removed)?;
        }
        if forgotten {
            self.record.update(|record| forget_starts(record, &pass.runtime));
            self.acted();
        }
        Ok(forgotten)
    }

    pub(super) fn unless_ending(&self) -> Result<(), NotStarted> {
        if self.is_ending() { Err(NotStarted::Ends) } else { Ok(()) }
    }

    /// Returns whether an unsuccessful call counts as a failure of `container`, with a reason and a back-off: the runtime
    /// refused it, or its outcome stays unknown.
    pub(super) fn is_failure(&mut self, e: &CallError, container: &str, object: &str) -> bool {
        match e.outcome {
            Outcome::Ok | Outcome::NotDispatched => false,
            Outcome::RuntimeError => {
                self.retries.unknown_calls.settled(container, e.method);
                true
            }
            Outcome::Unknown => self.has_repeated(e, container, object),
        }
    }

    fn has_repeated(&mut self, e: &CallError, container: &str, object: &str) -> bool {
        self.retries.unknown_calls.add(container, e.method, object, self.ctx.clock.boot())
    }

    // Log collectors read /var/log/containers.
    async fn link_log(&self, container: &Container, id: &ContainerId, restarts: u32) {
        let Some(dir) = self.ctx.node.container_logs_dir.as_deref() else { return };
        let log = paths::pod_log_dir(&self.ctx.node.settings.pod_logs_dir, &self.pod_ref)
            .join(paths::container_log_path(&container.name, restarts));
        let link = dir.join(paths::legacy_log_name(&self.pod_ref, &container.name, id.as_str()));
        let path = link.clone();
        let make = move || failpoint::file!("log linked", || std::os::unix::fs::symlink(&log, &path));
        if let Err(e) = blocking(make).await
            && e.kind() != std::io::ErrorKind::AlreadyExists
        {
            tracing::debug!(pod.uid = %self.pod_ref.uid, link = %link.display(), error = %e, "failed to link container log");
        }
    }
}
