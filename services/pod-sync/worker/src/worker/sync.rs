//! A sync of a pod that is to run (`pkg/kubelet: SyncPod`): observes, decides, and acts or waits.

use std::sync::Arc;

use pod_sync_clients::EventType;
use pod_sync_decisions::actions::{ActionInput, PodActions, compute_pod_actions};
use pod_sync_decisions::backoff::BackoffDelays;
use pod_sync_decisions::conditions::READY_TO_START;
use pod_sync_decisions::resize::plan::ResizeActions;
use pod_sync_decisions::sandbox::sandbox_decision;
use pod_sync_decisions::sync::SyncGate;
use pod_sync_decisions::{conditions, status, sync as decide_sync, waiting};
use pod_sync_records::PodRecord;
use quintlet_kit::failpoint;
use quintlet_model::pod as pods;
use quintlet_model::runtime::{ContainerState, PodRuntime};
use tracing::{Instrument as _, Span};

use super::pending_starts::DueStarts;
use super::{ERROR_WAIT, Halt, Next, Pass, Worker, jitter};
use crate::context::Desired;
use crate::mirror::{MirrorContext, MirrorReconciler};

// Removes the notes about stops, hooks and starts whose containers have left the state of the note.
fn forget_ended(record: &mut PodRecord, runtime: &PodRuntime) {
    let is = |id: &str, state| runtime.containers.iter().any(|c| c.id.as_str() == id && c.state == state);
    record.stops.retain(|id, _| is(id, ContainerState::Running));
    // A container that is only created runs its hook when a pass starts it.
    record.post_starts.retain(|id, _| is(id, ContainerState::Running) || is(id, ContainerState::Created));
    forget_starts(record, runtime);
}

/// Removes the notes about starts whose instance has left the state Created, or has a successor.
pub(super) fn forget_starts(record: &mut PodRecord, runtime: &PodRuntime) {
    record.starting.retain(|name, id| {
        let newest = runtime.newest(name);
        newest.is_some_and(|c| c.id.as_str() == id && c.state == ContainerState::Created)
    });
}

impl Worker {
    pub(super) async fn sync(&mut self, desired: &Desired) -> Result<Next, Halt> {
        self.ctx.environment.objects.register(&self.pod_ref.uid, &self.pod);
        let mut pass = self.look(false).await?;
        if !self.record.starting.is_empty() && self.remove_interrupted_starts(&pass).await? {
            return Ok(Next::Again);
        }
        self.report_observed(&pass);
        let network_not_ready = self.ctx.runtime.state.borrow().network_not_ready.clone();
        let gate = decide_sync::gate(&pass.pod, &pass.status, network_not_ready.is_none());
        if gate == SyncGate::Terminal {
            return Ok(Next::Advance);
        }
        let (actions, due) = self.decide_actions(&mut pass);
        self.reconcile_mirror(desired);
        if !self.record.post_starts.is_empty() && self.finish_post_starts(&pass).await? {
            self.acted();
            return Ok(Next::Again);
        }
        if self.leave_lost_cgroup(&pass).await? {
            return Ok(Next::Again);
        }
        if due.is_idle(&actions, &pass.runtime) {
            return self.rest(&pass, &due).await;
        }
        self.retries.objects_changed(self.ctx.environment.volume_changes(&self.pod_ref.uid));
        self.retries.ranges_released(self.ctx.environment.user_namespaces.releases());
        let hold = self.retries.pod.saturating_sub(self.ctx.clock.boot());
        if !hold.is_zero() && actions.containers_to_kill.is_empty() {
            self.keep_waiting();
            return Ok(Next::Idle(Some(hold)));
        }
        if actions.create_sandbox {
            self.check_runtime(&pass, gate, network_not_ready)?;
        }
        self.perform(&pass, &actions, &due).await
    }

    // Reports the observed status, and distributes the probes of the pod.
    fn report_observed(&mut self, pass: &Pass) {
        if self.is_past_deadline(pass) {
            self.ctx.reporting.events.pod(
                &pass.pod,
                EventType::Normal,
                status::DEADLINE_EXCEEDED,
                status::DEADLINE_MESSAGE,
                "",
            );
        }
        self.report(pass.status.clone(), false, |record| {
            pass.findings.record(record);
            forget_ended(record, &pass.runtime);
        });
        self.set_targets(pass, false);
    }

    fn is_past_deadline(&self, pass: &Pass) -> bool {
        let old = self.record.status.as_deref();
        old.is_some_and(|old| {
            status::past_active_deadline(&pass.pod, old, self.steady_now(pass.findings.active))
        }) && old.is_some_and(|old| old.reason.as_deref() != Some(status::DEADLINE_EXCEEDED))
    }

    // Computes the actions of this pass and the starts that are due. Reports new waiting reasons of containers.
    fn decide_actions(&mut self, pass: &mut Pass) -> (PodActions, DueStarts) {
        let restart_all = decide_sync::restarts_all(&pass.status);
        failpoint::work!("actions decided");
        let mut actions = compute_pod_actions(&ActionInput {
            pod: &pass.pod,
            runtime: &pass.runtime,
            probes: &pass.probes,
            actuated: self.ctx.checkpoints.allocations.actuated(&self.pod_ref.uid).as_ref(),
            restart_all,
        });
        let sandbox = sandbox_decision(&pass.pod, &pass.runtime);
        let mut due = self.due(pass, &actions);
        let hold = self.retries.resize.saturating_sub(self.ctx.clock.boot());
        if !hold.is_zero() && !actions.resize.is_empty() {
            // The runtime refused it recently.
            actions.resize = ResizeActions::default();
            due.retry_after(hold);
        }
        if self.record.waiting != due.waiting {
            let active = pass.findings.active;
            pass.status = self.make_status(&pass.runtime, &pass.probes, active, &due.waiting, false);
            self.report(pass.status.clone(), false, |record| {
                record.waiting.clone_from(&due.waiting);
                record.crash_loop.clone_from(&due.crash_loop);
            });
        } else {
            self.record.update(|record| record.crash_loop.clone_from(&due.crash_loop));
        }
        self.decided(waiting::explain(&pass.pod, &actions, &sandbox, &due.start_backoffs), &pass.runtime);
        (actions, due)
    }

    // Fails if the runtime cannot create a sandbox now.
    fn check_runtime(
        &mut self,
        pass: &Pass,
        gate: SyncGate,
        network_not_ready: Option<String>,
    ) -> Result<(), Halt> {
        // The sandbox configuration needs the cgroup driver and the handlers of the runtime.
        if self.ctx.runtime.state.borrow().name.is_empty() {
            self.wait_for(&waiting::Waiting::Runtime { error: None }, None);
            return Err(Halt::Interrupted("the runtime's status has not been read".to_owned()));
        }
        // A pod that already has its network does not need another one (ARCHITECTURE.md, invariant 10).
        if gate == SyncGate::NetworkNotReady {
            let message = network_not_ready.unwrap_or_default();
            let text = format!("network is not ready: {message}");
            self.ctx.reporting.events.pod(&pass.pod, EventType::Warning, "NetworkNotReady", &text, "");
            return Err(Halt::NetworkNotReady(message));
        }
        Ok(())
    }

    // Performs the actions of this pass. After a failure, the pod waits before the next pass with actions.
    async fn perform(&mut self, pass: &Pass, actions: &PodActions, due: &DueStarts) -> Result<Next, Halt> {
        // The actions may hang, so the wait is published first.
        let now = self.ctx.clock.wall();
        if let Some(wait) = waiting::from_status(&pass.pod, &pass.status, &due.start_backoffs, now) {
            self.meanwhile(wait.what);
        }
        self.begin_operation("sync");
        let span = match &self.work_loop.operation {
            Some(operation) => tracing::info_span!(parent: operation, "act", pod.uid = %self.pod_ref.uid),
            None => Span::none(),
        };
        // Boxed, so that a pass without actions does not need the memory.
        let acted = Box::pin(self.act(pass, actions, due)).instrument(span).await;
        self.acted();
        if let Err(Halt::Failed { after, .. }) = &acted {
            // The failed action wakes the worker, too, which must not cause a retry.
            let wait = after.unwrap_or_else(|| jitter(ERROR_WAIT));
            self.retries.pod = self.ctx.clock.boot().saturating_add(wait);
            return acted.map(|()| Next::Again).map_err(|halt| halt.after(wait));
        }
        acted?;
        Ok(Next::Again)
    }

    // Finishes a pass without actions. Returns when the next pass is due.
    async fn rest(&mut self, pass: &Pass, due: &DueStarts) -> Result<Next, Halt> {
        let now = self.ctx.clock.wall();
        if let Some(wait) = waiting::from_status(&pass.pod, &pass.status, &due.start_backoffs, now) {
            self.wait_shown(&wait);
        }
        let refresh = self.refresh_volumes(pass).await;
        self.collect_dead().await?;
        let boot = self.ctx.clock.boot();
        self.record.update(|record| {
            record.crash_loop.remove_expired(boot);
            record.pulls.remove_expired(boot, BackoffDelays::default());
        });
        let held = due.start_backoffs.values().map(|h| h.remaining).min();
        let deadline =
            status::until_active_deadline(&pass.pod, &pass.status, self.steady_now(pass.findings.active));
        Ok(Next::Idle([held, due.retry, deadline, refresh].into_iter().flatten().min()))
    }

    /// Reports PodReadyToStartContainers before an image pull, which may take minutes.
    pub(super) fn report_sandbox_ready(&mut self) {
        let Some(mut status) = self.record.status.as_deref().cloned() else { return };
        if conditions::set_true(&mut status, READY_TO_START, self.ctx.clock.wall()) {
            self.report(status, false, |_| {});
        }
    }

    // Whether termination was requested during this pass.
    pub(super) fn is_ending(&self) -> bool {
        self.ctx.control.pod_workers.read(|w| w.is_termination_requested(&self.pod_ref.uid))
    }

    fn reconcile_mirror(&mut self, desired: &Desired) {
        if !self.ctx.node.has_api || !pods::is_static(&self.pod) {
            return;
        }
        match &self.mirror {
            Some(keeper) => keeper.set(&self.pod, desired.mirror.as_ref()),
            None => {
                let (ctx, pod) = (MirrorContext::from(&*self.ctx), Arc::clone(&self.pod));
                self.mirror = Some(MirrorReconciler::start(ctx, pod, desired.mirror.clone()));
            }
        }
    }
}
