//! Terminates a pod: containers, then volumes and cgroup, then the final status
//! (`pkg/kubelet/kubelet.go: SyncTerminatingPod, SyncTerminatedPod`).

use std::sync::Arc;
use std::time::Duration;

use pod_sync_clients::StatusAck;
use pod_sync_decisions::finish::{self, FinalStatus, FinishedInput, FinishedWork, GracePeriod};
use pod_sync_decisions::status;
use pod_sync_decisions::waiting::Waiting;
use pod_sync_layout::paths;
use pod_sync_metrics::CgroupOperation;
use pod_sync_node_decisions::admission::Rejection;
use quintlet_kit::clock::Clock;
use quintlet_kit::{failpoint, task, tree};
use quintlet_model::pod as pods;
use quintlet_model::runtime::{ContainerState, PodRuntime};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::halt::{Halt, NextPass};
use super::removal::Removals;
use super::retries::jitter;
use super::stop::Stops;
use super::tracker::Tracker;
use crate::context::{
    NodeConfig, PodEnvironment, Reporting, RuntimeAccess, StopContext, WorkerControl, release_user_namespace,
};

/// Interval of retries while containers run after their stop.
const STILL_RUNNING: Duration = Duration::from_secs(1);

/// The termination of one pod.
pub(super) struct Termination<'a> {
    pub(super) clock: &'a Clock,
    pub(super) node: &'a NodeConfig,
    pub(super) runtime: &'a RuntimeAccess,
    pub(super) reporting: &'a Arc<Reporting>,
    pub(super) environment: &'a Arc<PodEnvironment>,
    pub(super) control: &'a WorkerControl,
    /// Ends a stop, to repeat it with a shorter grace period.
    pub(super) cancel: &'a CancellationToken,
    /// Wakes the worker.
    pub(super) wakeup: &'a Arc<Notify>,
    pub(super) tracker: &'a mut Tracker,
}

impl Termination<'_> {
    /// Stops the containers.
    pub(super) async fn stop(&mut self) -> Result<NextPass, Halt> {
        let pass = self.tracker.look(false).await?;
        self.tracker.report_terminating(&pass, |_| {});
        self.tracker.probes.set_targets(&pass, true);
        let termination = self.tracker.record.termination.as_ref();
        let period = termination.map(|t| GracePeriod { seconds: t.grace_seconds, deadline: t.deadline });
        let stop = finish::pod_stop(period, self.clock.boot());
        let running = pass.runtime.containers.iter().filter(|c| c.state == ContainerState::Running);
        let running: Vec<String> = running.map(|c| c.name.clone()).collect();
        let decision = format!("stop {} containers, grace {}s", running.len(), stop.seconds);
        self.tracker.view.decided(vec![decision], &pass.runtime);
        if !pass.runtime.is_quiet() {
            if running.is_empty() {
                self.tracker.view.wait_for(Waiting::SandboxStopping, None);
            } else {
                let wait = Waiting::Terminating { containers: running, grace: stop.grace_seconds };
                self.tracker.view.wait_for(wait, Some(stop.deadline));
            }
            self.tracker.show(false);
            let cancel = self.cancel.clone();
            // A cancelled stop continues in the runtime. The next pass repeats it with the shorter grace
            // period.
            let killed = tokio::select! {
                biased;
                killed = self.kill(&pass.runtime, stop.seconds) => killed,
                () = cancel.cancelled() => Err(Halt::Cancelled),
            };
            if matches!(killed, Err(Halt::Cancelled)) {
                self.tracker.observer.acted();
                self.tracker.observer.require_full_inspection();
            }
            killed?;
        }
        let after = self.tracker.look(true).await?;
        if after.runtime.containers.iter().any(|c| c.state == ContainerState::Running) {
            let message = "detected running containers after a successful KillPod, CRI violation".to_owned();
            let waiting = Waiting::StopFailing { message: message.clone() };
            return Err(Halt::failed(waiting, message).after(STILL_RUNNING));
        }
        self.tracker.probes.remove_targets();
        self.tracker.report_terminating(&after, |termination| termination.stopped = true);
        Ok(NextPass::Advance)
    }

    async fn kill(&mut self, runtime: &PodRuntime, seconds: i64) -> Result<(), Halt> {
        let ctx = StopContext {
            clock: self.clock.clone(),
            runtime: self.runtime.clone(),
            reporting: Arc::clone(self.reporting),
        };
        Stops { ctx, tracker: self.tracker, wakeup: self.wakeup }.kill_pod(runtime, Some(seconds)).await
    }

    /// Removes volumes and cgroup, then reports the final status.
    pub(super) async fn release(&mut self) -> Result<NextPass, Halt> {
        let pass = self.tracker.look(true).await?;
        self.tracker.report_terminating(&pass, |_| {});
        self.tracker.view.decided(vec!["remove volumes and cgroup".to_owned()], &pass.runtime);
        let uid = self.tracker.pod_ref.uid.clone();
        // No container runs. A volume that cannot be unmounted holds neither the devices nor the CPUs.
        self.environment.devices.release(&uid).await;
        self.environment.placement.release(&uid).await;
        // Before the final status, after which the claims may be deallocated.
        self.unprepare_claims(&pass).await?;
        if let Err(e) = self.environment.volume_tasks.unmount(&uid).await {
            let wait = e.retry_after.map(jitter);
            let halt = Halt::failed(Waiting::VolumesUnmounting { error: e.to_string() }, e);
            return Err(match wait {
                Some(wait) => halt.after(wait),
                None => halt,
            });
        }
        self.environment.objects.unregister(&uid);
        let began = self.clock.boot();
        let removed = self.environment.cgroups.remove_by_uid(&uid).await;
        let took = self.clock.boot().saturating_sub(began);
        self.reporting.metrics.operations.cgroup(CgroupOperation::Destroy, took);
        if let Err(e) = removed {
            return Err(Halt::failed(Waiting::CgroupRemoval { error: e.to_string() }, e));
        }
        release_user_namespace(self.environment, &self.control.wakeups, &uid).await;
        let recorded = self.tracker.record.status.as_deref();
        let last = status::terminate(&self.tracker.pod, recorded, self.clock.wall());
        self.tracker.report(last, true, |record| {
            if let Some(termination) = record.termination.as_mut() {
                termination.finished = true;
            }
        });
        Ok(NextPass::Advance)
    }

    /// Removes the rest of a pod that has terminated from the node, once its source and the API server no
    /// longer need it.
    pub(super) async fn finish(
        &mut self,
        is_clean: bool,
        rejected: Option<Rejection>,
    ) -> Result<NextPass, Halt> {
        if let Some(status) = self.tracker.record.status.as_deref().cloned() {
            self.tracker.report(status, true, |_| {});
        }
        let work = finish::finished_work(FinishedInput {
            is_clean,
            is_static: pods::is_static(&self.tracker.pod),
            is_deleted: self.tracker.pod.metadata.deletion_timestamp.is_some(),
            has_api: self.node.has_api,
            status: match self.tracker.reporter.ack() {
                None => FinalStatus::Sent,
                Some(StatusAck::Deleted | StatusAck::Gone | StatusAck::UidMismatch) => FinalStatus::Gone,
                Some(
                    StatusAck::Written | StatusAck::Refused(_) | StatusAck::Shortened(_) | StatusAck::NoApi,
                ) => FinalStatus::Settled,
            },
            declined: self.tracker.reporter.declined(),
            rejected: rejected.map(|rejection| (rejection.reason, rejection.message)),
        });
        match work {
            FinishedWork::Remove => self.remove().await,
            FinishedWork::Wait(waiting) => {
                self.tracker.view.wait_for(waiting, None);
                Ok(NextPass::Idle(None))
            }
            FinishedWork::CollectDead => {
                self.removals().collect_dead().await?;
                Ok(NextPass::Idle(None))
            }
        }
    }

    fn removals(&mut self) -> Removals<'_> {
        Removals {
            clock: self.clock,
            node: self.node,
            runtime: self.runtime,
            reporting: self.reporting,
            tracker: self.tracker,
        }
    }

    async fn remove(&mut self) -> Result<NextPass, Halt> {
        let runtime = self.tracker.observe().await?;
        self.removals().remove_all(&runtime).await?;
        // An interrupted call may still create a sandbox: only a full inspection shows that nothing is left.
        self.tracker.observer.require_full_inspection();
        let left = self.tracker.observe().await?;
        if !left.sandboxes.is_empty() || !left.containers.is_empty() {
            return Ok(NextPass::Again);
        }
        self.remove_directories(&runtime).await?;
        // The restart counts of a pod that its source added again continue from its logs
        // (`calcRestartCountByLogDir`).
        let uid = &self.tracker.pod_ref.uid;
        if !self.control.pod_workers.read(|workers| workers.is_restart_requested(uid)) {
            self.remove_logs().await;
        }
        Ok(NextPass::Advance)
    }

    async fn remove_directories(&self, runtime: &PodRuntime) -> Result<(), Halt> {
        let pod_ref = &self.tracker.pod_ref;
        let mut links = Vec::new();
        if let Some(dir) = &self.node.container_logs_dir {
            let names = runtime.containers.iter().map(|c| (&c.name, c.id.as_str()));
            links.extend(names.map(|(name, id)| dir.join(paths::legacy_log_name(pod_ref, name, id))));
        }
        let (volumes, uid) = (self.environment.volumes.clone(), pod_ref.uid.clone());
        let removed = task::blocking(move || {
            for link in links {
                let _ = failpoint::file!("log link removed", || std::fs::remove_file(link));
            }
            volumes.remove_orphaned_pod_dir(&uid).map_err(|e| e.to_string())
        });
        removed.await.map_err(|e| Halt::failed(Waiting::DirectoriesRemoval { error: e.clone() }, e))
    }

    async fn remove_logs(&self) {
        let logs = paths::pod_log_dir(&self.node.settings.pod_logs_dir, &self.tracker.pod_ref);
        let dir = logs.clone();
        if let Err(e) = task::blocking(move || failpoint::file!("logs removed", || tree::remove(&logs))).await
        {
            let (name, uid) = (self.tracker.name(), &self.tracker.pod_ref.uid);
            tracing::warn!(pod.name = name, pod.uid = %uid, dir = %dir.display(), error = %e, "failed to remove pod logs");
        }
    }
}
