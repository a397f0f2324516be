//! Removes dead containers and sandboxes from the runtime.

use std::path::PathBuf;

use futures::future::join_all;
use pod_sync_clients::EventType;
use pod_sync_decisions::worker::TerminationCause;
use pod_sync_layout::paths;
use pod_sync_node_decisions::gc::{self, PodDisposition};
use quintlet_kit::clock::Clock;
use quintlet_kit::{failpoint, task};
use quintlet_model::ids::{ContainerId, SandboxId};
use quintlet_model::pod as pods;
use quintlet_model::runtime::{ContainerState, PodRuntime};

use super::halt::{Halt, RuntimeCall, tolerate_refusal};
use super::pass::Pass;
use super::record::forget_starts;
use super::runtime_files;
use super::tracker::Tracker;
use crate::context::{NodeConfig, Reporting, RuntimeAccess};

/// The removals of one pod.
pub(super) struct Removals<'a> {
    pub(super) clock: &'a Clock,
    pub(super) node: &'a NodeConfig,
    pub(super) runtime: &'a RuntimeAccess,
    pub(super) reporting: &'a Reporting,
    pub(super) tracker: &'a mut Tracker,
}

impl Removals<'_> {
    /// Removes a dead container, and its logs if `with_logs`.
    pub(super) async fn remove_container(
        &self,
        runtime: &PodRuntime,
        id: &ContainerId,
        with_logs: bool,
    ) -> Result<(), Halt> {
        let Some(instance) = runtime.containers.iter().find(|c| c.id == *id) else { return Ok(()) };
        let log = with_logs.then(|| PathBuf::from(&instance.log_path));
        let logs = paths::pod_log_dir(&self.node.settings.pod_logs_dir, &self.tracker.pod_ref);
        let links = self.node.container_logs_dir.as_ref();
        let link = links
            .map(|dir| dir.join(paths::legacy_log_name(&self.tracker.pod_ref, &instance.name, id.as_str())));
        task::blocking(move || {
            if let Some(log) = log
                && let Err(error) = runtime_files::remove_logs(&logs, &log)
                && error.kind() != std::io::ErrorKind::NotFound
            {
                tracing::info!(log = %log.display(), %error, "failed to remove logs of removed container");
            }
            if let Some(link) = link {
                let _ = failpoint::file!("log link removed", || std::fs::remove_file(link));
            }
        })
        .await;
        tracing::debug!(pod = %self.tracker.pod_ref, container.id = %id, "container removed");
        self.runtime.calls.remove_container(id).await.map_err(|e| Halt::of(&e, RuntimeCall::RemoveContainer))
    }

    /// Removes instances whose start was interrupted before they ran: containerd aborts a start when its
    /// caller's connection breaks. They are created again with the same attempt. Returns whether there were
    /// any.
    pub(super) async fn remove_interrupted_starts(&mut self, pass: &Pass) -> Result<bool, Halt> {
        let never_ran: Vec<_> = pass
            .runtime
            .containers
            .iter()
            .filter(|c| self.tracker.record.starting.get(&c.name).is_some_and(|id| id == c.id.as_str()))
            .filter(|c| c.state == ContainerState::Exited && c.started_unix_ns <= 0)
            .cloned()
            .collect();
        let mut forgotten = false;
        for instance in &never_ran {
            tracing::info!(pod.uid = %self.tracker.pod_ref.uid, container.id = %instance.id, "removing container whose start was interrupted");
            // containerd 1.6 may keep the task of such a start, and then refuses to remove the container. The
            // next instance is created beside it, with the next attempt.
            let removed = self.remove_container(&pass.runtime, &instance.id, true).await;
            forgotten |= tolerate_refusal(&self.tracker.pod_ref, removed)?;
        }
        if forgotten {
            self.tracker.record.update(|record| forget_starts(record, &pass.runtime));
            self.tracker.observer.acted();
        }
        Ok(forgotten)
    }

    /// Removes dead instances that the status no longer shows, and sandboxes without containers. Instances in
    /// the status stay until the API server has that status.
    pub(super) async fn collect_dead(&mut self) -> Result<(), Halt> {
        let collected = self.remove_dead().await;
        if let Err(Halt::Failed { error, .. }) = &collected {
            self.reporting.events.node_unlogged(
                &self.node.settings.node_name,
                EventType::Warning,
                "ContainerGCFailed",
                error,
            );
        }
        collected
    }

    async fn remove_dead(&mut self) -> Result<(), Halt> {
        let acked = self.tracker.reporter.ack().is_some();
        // A policy that declines statuses must not keep the disk of evicted pods full.
        let is_declined = self.tracker.reporter.declined().is_some();
        let is_reported = acked || is_declined || !self.node.has_api || pods::is_static(&self.tracker.pod);
        let evicted = self
            .tracker
            .record
            .termination
            .as_ref()
            .is_some_and(|t| t.stopped && t.cause == TerminationCause::Evicted);
        let fate = if evicted && is_reported { PodDisposition::Removed } else { PodDisposition::Kept };
        let Some(runtime) = self.tracker.observer.last().cloned() else { return Ok(()) };
        let containers = gc::dead_containers(&runtime, fate, self.node.dead_containers, self.clock.wall());
        let sandboxes = gc::dead_sandboxes(&runtime, &containers, fate);
        if containers.is_empty() && sandboxes.is_empty() {
            return Ok(());
        }
        // Even if a removal fails, the next observation must be newer than it.
        self.tracker.observer.acted();
        for id in &containers {
            self.remove_container(&runtime, id, true).await?;
        }
        for id in &sandboxes {
            self.remove_sandbox(id).await?;
        }
        tracing::debug!(pod.uid = %self.tracker.pod_ref.uid, ?containers, ?sandboxes, "removed dead instances");
        self.tracker.observer.acted();
        Ok(())
    }

    /// Stops a sandbox, as the kubelet does before each removal, and removes it.
    async fn remove_sandbox(&self, id: &SandboxId) -> Result<(), Halt> {
        let calls = &self.runtime.calls;
        calls.stop_sandbox(id).await.map_err(|e| Halt::of(&e, RuntimeCall::StopSandbox))?;
        calls.remove_sandbox(id).await.map_err(|e| Halt::of(&e, RuntimeCall::RemoveSandbox))
    }

    /// Removes all containers and sandboxes of a pod that has terminated.
    pub(super) async fn remove_all(&mut self, runtime: &PodRuntime) -> Result<(), Halt> {
        let calls = &self.runtime.calls;
        let removed = join_all(runtime.containers.iter().map(|c| calls.remove_container(&c.id))).await;
        for result in removed {
            result.map_err(|e| Halt::of(&e, RuntimeCall::RemoveContainer))?;
        }
        for sandbox in &runtime.sandboxes {
            self.remove_sandbox(&sandbox.id).await?;
        }
        if !runtime.sandboxes.is_empty() || !runtime.containers.is_empty() {
            self.tracker.observer.acted();
        }
        Ok(())
    }
}
