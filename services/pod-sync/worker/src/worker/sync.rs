//! A sync of a pod that is to run (`pkg/kubelet: SyncPod`).

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};
use pod_sync_clients::EventType;
use pod_sync_decisions::actions::{ActionInput, PodActions, compute_pod_actions};
use pod_sync_decisions::backoff::BackoffDelays;
use pod_sync_decisions::conditions::READY_TO_START;
use pod_sync_decisions::resize::plan::ResizeActions;
use pod_sync_decisions::sandbox::sandbox_decision;
use pod_sync_decisions::sync::SyncGate;
use pod_sync_decisions::worker::Input;
use pod_sync_decisions::{conditions, status, sync as decide_sync, unsupported, waiting};
use quintlet_kit::failpoint;
use quintlet_model::ids::SandboxId;
use quintlet_model::pod as pods;
use quintlet_model::runtime::ContainerState;
use tracing::{Instrument as _, Span};

use super::pending_starts::{ContainerKind, DueStarts, ephemeral_containers};
use super::start::NotStarted;
use super::{ERROR_WAIT, Halt, Next, Pass, Step, Worker, jitter};
use crate::context::Desired;
use crate::mirror::{MirrorContext, MirrorReconciler};

impl Worker {
    pub(super) async fn sync(&mut self, desired: &Desired) -> Result<Next, Halt> {
        self.ctx.environment.objects.register(&self.pod_ref.uid, &self.pod);
        let mut pass = self.look(false).await?;
        if !self.record.starting.is_empty() && self.remove_interrupted_starts(&pass).await? {
            return Ok(Next::Again);
        }
        if self.is_past_deadline(&pass) {
            self.ctx.reporting.events.pod(
                &pass.pod,
                EventType::Normal,
                status::DEADLINE_EXCEEDED,
                status::DEADLINE_MESSAGE,
                "",
            );
        }
        self.report(pass.status.clone(), false);
        self.set_targets(&pass, false);
        let network = self.ctx.runtime.state.borrow().network_not_ready.clone();
        let gate = decide_sync::gate(&pass.pod, &pass.status, network.is_none());
        if gate == SyncGate::Terminal {
            return Ok(Next::Advance);
        }
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
        let mut due = self.due(&pass, &actions);
        let held = self.retries.resize.saturating_sub(self.ctx.clock.boot());
        if !held.is_zero() && !actions.resize.is_empty() {
            // The runtime refused it recently.
            actions.resize = ResizeActions::default();
            due.retry = Some(due.retry.map_or(held, |r| r.min(held)));
        }
        if self.record.waiting != due.waiting {
            self.record.waiting.clone_from(&due.waiting);
            pass.status = self.make_status(&pass.runtime, &pass.probes, false);
            self.report(pass.status.clone(), false);
        }
        self.decided(waiting::explain(&pass.pod, &actions, &sandbox, &due.start_backoffs), &pass.runtime);
        self.reconcile_mirror(desired);
        // Forgets the stops of containers that no longer run.
        self.record.stops.retain(|id, _| {
            pass.runtime.containers.iter().any(|c| c.id.as_str() == id && c.state == ContainerState::Running)
        });
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
        let hold = self.retries.pod.saturating_sub(self.ctx.clock.boot());
        if !hold.is_zero() && actions.containers_to_kill.is_empty() {
            self.keep_waiting();
            return Ok(Next::Idle(Some(hold)));
        }
        // The sandbox configuration needs the cgroup driver and the handlers of the runtime.
        if actions.create_sandbox && self.ctx.runtime.state.borrow().name.is_empty() {
            self.wait_for(&waiting::Waiting::Runtime { error: None }, None);
            return Err(Halt::Interrupted("the runtime's status has not been read".to_owned()));
        }
        // A pod that already has its network does not need another one (ARCHITECTURE.md, invariant 10).
        if gate == SyncGate::NetworkNotReady && actions.create_sandbox {
            let message = network.unwrap_or_default();
            let text = format!("network is not ready: {message}");
            self.ctx.reporting.events.pod(&pass.pod, EventType::Warning, "NetworkNotReady", &text, "");
            return Err(Halt::NetworkNotReady(message));
        }
        // The next steps may hang, so the wait is published first.
        if let Some(wait) =
            waiting::from_status(&pass.pod, &pass.status, &due.start_backoffs, self.ctx.clock.wall())
        {
            self.meanwhile(wait.what);
        }
        // Boxed, so that a pass without actions does not need the memory.
        self.begin_operation("sync");
        let span = match &self.work_loop.operation {
            Some(operation) => tracing::info_span!(parent: operation, "act", pod.uid = %self.pod_ref.uid),
            None => Span::none(),
        };
        let acted = Box::pin(self.act(&pass, &actions, &due)).instrument(span).await;
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

    fn is_past_deadline(&self, pass: &Pass) -> bool {
        let old = self.record.status.as_deref();
        old.is_some_and(|old| status::past_active_deadline(&pass.pod, old, self.steady_now()))
            && old.is_some_and(|old| old.reason.as_deref() != Some(status::DEADLINE_EXCEEDED))
    }

    // Finishes a pass without actions. Returns when the next pass is due.
    async fn rest(&mut self, pass: &Pass, due: &DueStarts) -> Result<Next, Halt> {
        let now = self.ctx.clock.wall();
        if let Some(wait) = waiting::from_status(&pass.pod, &pass.status, &due.start_backoffs, now) {
            self.wait_shown(&wait);
        }
        self.refresh_volumes(pass).await;
        self.collect_dead().await?;
        let boot = self.ctx.clock.boot();
        self.record.crash_loop.remove_expired(boot);
        self.record.pulls.remove_expired(boot, BackoffDelays::default());
        let held = due.start_backoffs.values().map(|h| h.remaining).min();
        let deadline = status::until_active_deadline(&pass.pod, &pass.status, self.steady_now());
        Ok(Next::Idle([held, due.retry, deadline].into_iter().flatten().min()))
    }

    async fn act(&mut self, pass: &Pass, actions: &PodActions, due: &DueStarts) -> Result<(), Halt> {
        let (pod, runtime) = (&pass.pod, &pass.runtime);
        if actions.kill_pod {
            if actions.create_sandbox && actions.sandbox_id.is_some() {
                self.ctx.reporting.events.pod(
                    pod,
                    EventType::Normal,
                    "SandboxChanged",
                    "Pod sandbox changed, it will be killed and re-created.",
                    "",
                );
            }
            if !runtime.is_quiet() {
                self.kill_pod(runtime, None).await?;
            }
            if !actions.create_sandbox {
                return Ok(());
            }
        } else {
            for kill in &actions.containers_to_kill {
                self.kill_one(pod, runtime, &kill.id, &kill.message, Some(kill.reason), None).await?;
            }
            for reset in &actions.reset {
                if reset.kill {
                    self.kill_one(pod, runtime, &reset.id, "killing", None, Some(0)).await?;
                }
                self.ctx
                    .runtime
                    .calls
                    .remove_container(&reset.id)
                    .await
                    .map_err(|e| Halt::of(&e, Step::RemoveContainer))?;
            }
            if !actions.reset.is_empty() {
                return Ok(());
            }
        }
        // The cgroup grows before containers with larger requests start in it.
        if let Some(sandbox) = actions.sandbox_id.as_ref().filter(|_| !actions.resize.is_empty()) {
            self.resize(pass, &actions.resize, sandbox).await?;
        }
        for id in &actions.prune {
            self.remove_container(pod, runtime, id, actions.create_sandbox).await?;
        }
        let starts = actions.create_sandbox
            || !due.init.is_empty()
            || !due.regular.is_empty()
            || !due.ephemeral.is_empty();
        if !starts {
            return Ok(());
        }
        // A pod whose sandboxes keep failing never has a pass without actions, which would collect them.
        if actions.create_sandbox {
            let collected = self.collect_dead().await;
            self.tolerate_refusal(collected)?;
        }
        self.refuse_claims(pod)?;
        if actions.create_sandbox {
            for text in unsupported::not_enforced(pod) {
                self.ctx.reporting.events.pod(pod, EventType::Warning, unsupported::NOT_ENFORCED, &text, "");
            }
        }
        self.prepare(pass).await?;
        self.resolve(pod).await?;
        if actions.create_sandbox && !pods::is_static(pod) {
            // Nothing has started yet. The next step checks for cancellation.
            tokio::select! {
                () = self.ctx.control.static_pod_gate.opened() => {}
                () = self.work_loop.cancel.cancelled() => {}
            }
        }
        self.enter_runtime()?;
        let config = self.sandbox_config(pod, actions.attempt, actions.create_sandbox)?;
        let (sandbox, ips) = if actions.create_sandbox {
            self.meanwhile(waiting::Waiting::SandboxCreating { attempt: actions.attempt });
            let created = self.create_sandbox(pod, config.clone()).await?;
            self.ctx.control.static_pod_gate.release(&self.pod_ref.uid);
            created
        } else {
            let id = actions.sandbox_id.clone().ok_or_else(|| {
                let message = "no sandbox to start containers in".to_owned();
                Halt::failed(waiting::Waiting::SandboxFailing { message: message.clone() }, message)
            })?;
            (id, runtime.ips().to_vec())
        };
        self.start_all(pass, due, &sandbox, &config, &ips).await
    }

    // Refuses pods with resource claims, with one event per minute until the pod is deleted.
    fn refuse_claims(&self, pod: &Pod) -> Result<(), Halt> {
        const AGAIN: Duration = Duration::from_secs(60);
        let Some(message) = unsupported::unprepared_claims(pod) else { return Ok(()) };
        self.ctx.reporting.events.pod(pod, EventType::Warning, unsupported::CLAIMS_FAILED, &message, "");
        let waiting = waiting::Waiting::SandboxFailing { message: message.clone() };
        Err(Halt::failed(waiting, message).after(jitter(AGAIN)))
    }

    async fn start_all(
        &mut self,
        pass: &Pass,
        due: &DueStarts,
        sandbox: &SandboxId,
        config: &k8s_cri::v1::PodSandboxConfig,
        ips: &[std::net::IpAddr],
    ) -> Result<(), Halt> {
        let pod = &pass.pod;
        let ephemeral = ephemeral_containers(pod);
        let pick = |list: &[Container], indexes: &[usize]| -> Vec<Container> {
            indexes.iter().filter_map(|i| list.get(*i).cloned()).collect()
        };
        let mut plan: Vec<(ContainerKind, Container)> = Vec::new();
        plan.extend(pick(&ephemeral, &due.ephemeral).into_iter().map(|c| (ContainerKind::Ephemeral, c)));
        plan.extend(
            pick(pods::init_containers(pod), &due.init).into_iter().map(|c| (ContainerKind::Init, c)),
        );
        plan.extend(
            pick(&pods::spec(pod).containers, &due.regular).into_iter().map(|c| (ContainerKind::Regular, c)),
        );
        let containers: Vec<&Container> = plan.iter().map(|(_, c)| c).collect();
        self.ensure_image_volumes(pod, &containers, config).await?;
        for (kind, container) in plan {
            // A pod that is to terminate starts no more containers.
            if self.is_ending() {
                return Ok(());
            }
            self.ctx.reporting.metrics.container_starting(kind.label());
            match self.start_container(pass, kind, &container, sandbox, config, ips).await {
                Ok(()) => {
                    self.record.waiting.remove(&container.name);
                }
                Err(NotStarted::Waits(reason)) => {
                    self.ctx.reporting.metrics.container_start_failed(kind.label(), &reason.reason);
                    self.record_failed_start(&container.name, reason);
                    if kind == ContainerKind::Init && !pods::is_sidecar(&container) {
                        break;
                    }
                }
                Err(NotStarted::Ends) => return Ok(()),
                Err(NotStarted::Halt(halt)) => return Err(halt),
            }
            self.save();
        }
        Ok(())
    }

    /// Reports PodReadyToStartContainers before an image pull, which may take minutes.
    pub(super) fn report_sandbox_ready(&mut self) {
        let Some(mut status) = self.record.status.as_deref().cloned() else { return };
        if conditions::set_true(&mut status, READY_TO_START, self.ctx.clock.wall()) {
            self.report(status, false);
        }
    }

    // Whether termination was requested during this pass.
    pub(super) fn is_ending(&self) -> bool {
        self.ctx.control.pod_workers.read(|w| w.is_termination_requested(&self.pod_ref.uid))
    }

    // From here on, the pass can no longer be cancelled.
    fn enter_runtime(&self) -> Result<(), Halt> {
        self.ctx.control.pod_workers.step(Input::RuntimeReached(self.pod_ref.uid.clone()));
        if self.work_loop.cancel.is_cancelled() { Err(Halt::Cancelled) } else { Ok(()) }
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
