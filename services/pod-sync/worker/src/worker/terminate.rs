//! Terminates a pod: containers, then volumes and cgroup, then the final status
//! (`pkg/kubelet/kubelet.go: SyncTerminatingPod, SyncTerminatedPod`).

use std::time::Duration;

use futures::future::join_all;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use pod_sync_clients::{EventType, StatusAck};
use pod_sync_decisions::{grace, status, waiting};
use pod_sync_layout::paths;
use pod_sync_metrics::CgroupOperation;
use pod_sync_node_decisions::admission::Rejection;
use pod_sync_node_decisions::gc::{self, PodDisposition};
use pod_sync_records::Termination;
use quintlet_kit::{failpoint, task, tree};
use quintlet_model::pod as pods;
use quintlet_model::runtime::{Container, ContainerState};

use super::{Halt, Next, Pass, Step, Worker};
use pod_sync_decisions::worker::TerminationCause;

impl Worker {
    pub(super) async fn terminating(&mut self) -> Result<Next, Halt> {
        let pass = self.look(false).await?;
        self.report_killed(&pass, |_| {});
        self.set_targets(&pass, true);
        let now = self.ctx.clock.boot();
        let termination = self.record.termination.clone();
        let (seconds, deadline) = match &termination {
            // The rest of the grace period, counted from the start of the termination.
            Some(t) => (grace::remaining_until(t.deadline, now).min(t.grace_seconds), t.deadline),
            None => (grace::MINIMUM_STOP_SECONDS, now),
        };
        let running: Vec<String> = pass
            .runtime
            .containers
            .iter()
            .filter(|c| c.state == ContainerState::Running)
            .map(|c| c.name.clone())
            .collect();
        self.decided(vec![format!("stop {} containers, grace {seconds}s", running.len())], &pass.runtime);
        if !pass.runtime.is_quiet() {
            let grace = termination.as_ref().map_or(seconds, |t| t.grace_seconds);
            if running.is_empty() {
                self.wait_for(&waiting::Waiting::SandboxStopping, None);
            } else {
                self.wait_for(&waiting::Waiting::Terminating { containers: running, grace }, Some(deadline));
            }
            self.show(false);
            let cancel = self.work_loop.cancel.clone();
            // A cancelled stop continues in the runtime. The next pass repeats it with the shorter grace period.
            let killed = tokio::select! {
                biased;
                killed = self.kill_pod(&pass.runtime, Some(seconds)) => killed,
                () = cancel.cancelled() => Err(Halt::Cancelled),
            };
            if matches!(killed, Err(Halt::Cancelled)) {
                self.acted();
                self.observed.freshness.require_full_inspection();
            }
            killed?;
        }
        let after = self.look(true).await?;
        if after.runtime.containers.iter().any(|c| c.state == ContainerState::Running) {
            let message = "detected running containers after a successful KillPod, CRI violation".to_owned();
            let waiting = waiting::Waiting::StopFailing { message: message.clone() };
            return Err(Halt::failed(waiting, message).after(Duration::from_secs(1)));
        }
        self.remove_targets();
        self.report_killed(&after, |termination| termination.stopped = true);
        Ok(Next::Advance)
    }

    /// Reports a pass of a terminating pod, together with a change of its recorded termination.
    pub(super) fn report_killed(&mut self, pass: &Pass, change: impl FnOnce(&mut Termination)) {
        self.report(self.overridden(&pass.pod, pass.status.clone()), false, |record| {
            pass.findings.record(record);
            if let Some(termination) = record.termination.as_mut() {
                change(termination);
            }
        });
    }

    /// Returns the status of a terminating pod. If the node killed the pod, phase, reason and message say so, whatever the exit codes
    /// of its containers are.
    pub(super) fn overridden(&self, pod: &Pod, status: PodStatus) -> PodStatus {
        let killed_as = self.record.termination.as_ref().and_then(|t| t.killed_as.as_ref());
        match killed_as {
            Some(why) => status::with_kill_override(pod, status, why, self.ctx.clock.wall()),
            None => status,
        }
    }

    pub(super) async fn terminated(&mut self) -> Result<Next, Halt> {
        let pass = self.look(true).await?;
        self.report_killed(&pass, |_| {});
        self.decided(vec!["remove volumes and cgroup".to_owned()], &pass.runtime);
        if let Err(e) = self.ctx.environment.volume_tasks.unmount(&self.pod_ref.uid).await {
            let wait = e.retry_after.map(super::jitter);
            let halt = Halt::failed(waiting::Waiting::VolumesUnmounting { error: e.to_string() }, e);
            return Err(match wait {
                Some(wait) => halt.after(wait),
                None => halt,
            });
        }
        self.ctx.environment.objects.unregister(&self.pod_ref.uid);
        let began = self.ctx.clock.boot();
        let removed = self.ctx.environment.cgroups.remove_by_uid(&self.pod_ref.uid).await;
        let took = self.ctx.clock.boot().saturating_sub(began);
        self.ctx.reporting.metrics.operations.cgroup(CgroupOperation::Destroy, took);
        if let Err(e) = removed {
            return Err(Halt::failed(waiting::Waiting::CgroupRemoval { error: e.to_string() }, e));
        }
        self.ctx.release_user_namespace(&self.pod_ref.uid).await;
        let last = status::terminate(&self.pod, self.record.status.as_deref(), self.ctx.clock.wall());
        self.report(last, true, |record| {
            if let Some(termination) = record.termination.as_mut() {
                termination.finished = true;
            }
        });
        Ok(Next::Advance)
    }

    // The pod has terminated. Removes the rest of it from the node once the source and the API server no longer need it.
    pub(super) async fn finished(&mut self, clean: bool) -> Result<Next, Halt> {
        if let Some(status) = self.record.status.as_deref().cloned() {
            self.report(status, true, |_| {});
        }
        let ack = self.ctx.reporting.statuses.ack(&self.pod_ref.uid, self.status_report.version);
        let refused = self.desired().rejected;
        // The removal of a mirror pod does not remove its static pod.
        let is_static = pods::is_static(&self.pod);
        let gone = clean
            || !is_static
                && matches!(ack, Some(StatusAck::Deleted | StatusAck::Gone | StatusAck::UidMismatch));
        if !gone {
            let deleting = self.pod.metadata.deletion_timestamp.is_some();
            // status-reporter repeats a declined write, and its next answer wakes this worker.
            let declined = self.ctx.reporting.statuses.declined(&self.pod_ref.uid);
            if deleting {
                self.wait_for(&waiting::Waiting::FinalDelete { declined }, None);
            } else if self.ctx.node.has_api && ack.is_none() && !pods::is_static(&self.pod) {
                self.wait_for(&waiting::Waiting::StatusWrite { declined }, None);
            } else if let Some(Rejection { reason, message }) = refused {
                self.wait_for(&waiting::Waiting::Rejected { reason, message }, None);
            } else {
                self.collect_dead().await?;
            }
            return Ok(Next::Idle(None));
        }
        let runtime = self.observe().await?;
        let removed =
            join_all(runtime.containers.iter().map(|c| self.ctx.runtime.calls.remove_container(&c.id))).await;
        for result in removed {
            result.map_err(|e| Halt::of(&e, Step::RemoveContainer))?;
        }
        for sandbox in &runtime.sandboxes {
            self.ctx
                .runtime
                .calls
                .stop_sandbox(&sandbox.id)
                .await
                .map_err(|e| Halt::of(&e, Step::StopSandbox))?;
            self.ctx
                .runtime
                .calls
                .remove_sandbox(&sandbox.id)
                .await
                .map_err(|e| Halt::of(&e, Step::RemoveSandbox))?;
        }
        if !runtime.sandboxes.is_empty() || !runtime.containers.is_empty() {
            self.acted();
        }
        // An interrupted call may still create a sandbox: only a full inspection shows that nothing is left.
        self.observed.freshness.require_full_inspection();
        let left = self.observe().await?;
        if !left.sandboxes.is_empty() || !left.containers.is_empty() {
            return Ok(Next::Again);
        }
        let mut links = Vec::new();
        if let Some(dir) = &self.ctx.node.container_logs_dir {
            let name = |c: &Container| paths::legacy_log_name(&self.pod_ref, &c.name, c.id.as_str());
            links.extend(runtime.containers.iter().map(|c| dir.join(name(c))));
        }
        let (volumes, uid) = (self.ctx.environment.volumes.clone(), self.pod_ref.uid.clone());
        let cleaned = task::blocking(move || {
            for link in links {
                let _ = failpoint::file!("log link removed", || std::fs::remove_file(link));
            }
            volumes.remove_orphaned_pod_dir(&uid).map_err(|e| e.to_string())
        });
        if let Err(e) = cleaned.await {
            return Err(Halt::failed(waiting::Waiting::DirectoriesRemoval { error: e.clone() }, e));
        }
        // The restart counts of a pod that its source added again continue from its logs (`calcRestartCountByLogDir`).
        if self.ctx.control.pod_workers.read(|workers| workers.is_restart_requested(&self.pod_ref.uid)) {
            return Ok(Next::Advance);
        }
        let logs = paths::pod_log_dir(&self.ctx.node.settings.pod_logs_dir, &self.pod_ref);
        let dir = logs.clone();
        if let Err(e) = task::blocking(move || failpoint::file!("logs removed", || tree::remove(&logs))).await
        {
            tracing::warn!(pod.name = self.name(), pod.uid = %self.pod_ref.uid, dir = %dir.display(), error = %e, "failed to remove pod logs");
        }
        Ok(Next::Advance)
    }

    // Removes dead instances that the status no longer shows, and sandboxes without containers. Instances in the status stay
    // until the API server has that status.
    pub(super) async fn collect_dead(&mut self) -> Result<(), Halt> {
        let collected = self.remove_dead().await;
        if let Err(Halt::Failed { error, .. }) = &collected {
            self.ctx.reporting.events.node_unlogged(
                &self.ctx.node.settings.node_name,
                EventType::Warning,
                "ContainerGCFailed",
                error,
            );
        }
        collected
    }

    async fn remove_dead(&mut self) -> Result<(), Halt> {
        let acked = self.ctx.reporting.statuses.ack(&self.pod_ref.uid, self.status_report.version).is_some();
        // A policy that declines statuses must not keep the disk of evicted pods full.
        let is_declined = self.ctx.reporting.statuses.declined(&self.pod_ref.uid).is_some();
        let is_reported = acked || is_declined || !self.ctx.node.has_api || pods::is_static(&self.pod);
        let evicted = self
            .record
            .termination
            .as_ref()
            .is_some_and(|t| t.stopped && t.cause == TerminationCause::Evicted);
        let fate = if evicted && is_reported { PodDisposition::Removed } else { PodDisposition::Kept };
        let Some(runtime) = self.observed.last.clone() else { return Ok(()) };
        let containers =
            gc::dead_containers(&runtime, fate, self.ctx.node.dead_containers, self.ctx.clock.wall());
        let sandboxes = gc::dead_sandboxes(&runtime, &containers, fate);
        if containers.is_empty() && sandboxes.is_empty() {
            return Ok(());
        }
        // Even if a removal fails, the next observation must be newer than it.
        self.acted();
        for id in &containers {
            self.remove_container(&self.pod, &runtime, id, true).await?;
        }
        for id in &sandboxes {
            self.ctx.runtime.calls.stop_sandbox(id).await.map_err(|e| Halt::of(&e, Step::StopSandbox))?;
            self.ctx.runtime.calls.remove_sandbox(id).await.map_err(|e| Halt::of(&e, Step::RemoveSandbox))?;
        }
        tracing::debug!(pod.uid = %self.pod_ref.uid, ?containers, ?sandboxes, "removed dead instances");
        self.acted();
        Ok(())
    }
}
