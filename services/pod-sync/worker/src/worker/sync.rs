//! A sync of a pod that is to run (`pkg/kubelet: SyncPod`): observes, decides, and acts or waits.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::EventType;
use pod_sync_decisions::actions::{ActionInput, PodActions, compute_pod_actions};
use pod_sync_decisions::backoff::BackoffDelays;
use pod_sync_decisions::resize::plan::ResizeActions;
use pod_sync_decisions::sandbox::sandbox_decision;
use pod_sync_decisions::starts::{DueStarts, NewBackoff, StartInput, due_starts};
use pod_sync_decisions::sync::SyncGate;
use pod_sync_decisions::{status, sync as decide_sync, waiting};
use quintlet_kit::failpoint;
use quintlet_model::pod as pods;
use tracing::{Instrument as _, Span};

use super::Worker;
use super::claims::RunningClaims;
use super::halt::{Halt, NextPass, record_halt};
use super::pass::Pass;
use super::record::forget_ended;
use super::resources::ResourceDecision;
use super::retries::{ERROR_WAIT, jitter};
use super::start::ephemeral_containers;
use super::view::ViewPublisher;
use super::work_loop::SYNC;
use crate::context::{Desired, Reporting, RuntimeAccess};
use crate::image;
use crate::mirror::{MirrorContext, MirrorReconciler};

impl Worker {
    /// Runs one pass of a pod that is to run.
    pub(super) async fn sync(&mut self, desired: &Desired) -> Result<NextPass, Halt> {
        let uid = self.tracker.pod_ref.uid.clone();
        self.ctx.environment.objects.register(&uid, &self.tracker.pod);
        let mut pass = self.tracker.look(false).await?;
        if !self.tracker.record.starting.is_empty()
            && self.removals().remove_interrupted_starts(&pass).await?
        {
            return Ok(NextPass::Again);
        }
        self.tracker.report_running(&pass, |record| forget_ended(record, &pass.runtime));
        let network_not_ready = self.ctx.runtime.state.borrow().network_not_ready.clone();
        let gate = decide_sync::gate(&pass.pod, &pass.status, network_not_ready.is_none());
        if gate == SyncGate::Terminal {
            return Ok(NextPass::Advance);
        }
        // A static pod that waits for its devices is in the API, too.
        self.reconcile_mirror(desired);
        let cancel = self.work_loop.cancel.clone();
        match self.resources.admit(&self.ctx, &mut self.tracker, &pass, &cancel).await? {
            ResourceDecision::Held => {}
            ResourceDecision::Wait(wait) => return Ok(NextPass::Idle(Some(wait))),
            ResourceDecision::Reject(rejection) => return self.reject(&rejection),
        }
        let (actions, due) = self.decide_actions(&mut pass);
        if !self.tracker.record.post_starts.is_empty() && self.starts().finish_post_starts(&pass).await? {
            self.tracker.observer.acted();
            return Ok(NextPass::Again);
        }
        if self.preparation().has_lost_cgroup(&pass).await {
            self.stops().kill_pod(&pass.runtime, None).await?;
            return Ok(NextPass::Again);
        }
        if actions.is_idle(&pass.runtime) {
            return self.rest(&pass, &due).await;
        }
        self.retries.objects_changed(self.ctx.environment.volume_changes(&uid));
        self.retries.ranges_released(self.ctx.environment.user_namespaces.releases());
        let hold = self.retries.pod.saturating_sub(self.ctx.clock.boot());
        if !hold.is_zero() && actions.containers_to_kill.is_empty() {
            self.tracker.view.keep_waiting();
            return Ok(NextPass::Idle(Some(hold)));
        }
        if actions.create_sandbox {
            let (runtime, view) = (&self.ctx.runtime, &mut self.tracker.view);
            check_runtime(runtime, &self.ctx.reporting, view, &pass.pod, gate, network_not_ready)?;
        }
        self.perform(&pass, &actions, &due).await
    }

    /// Computes the actions of this pass with the starts that are due. Reports new waiting reasons of
    /// containers.
    fn decide_actions(&mut self, pass: &mut Pass) -> (PodActions, DueStarts) {
        let restart_all = decide_sync::restarts_all(&pass.status);
        failpoint::work!("actions decided");
        let mut actions = compute_pod_actions(&ActionInput {
            pod: &pass.pod,
            runtime: &pass.runtime,
            probes: &pass.probes,
            actuated: self.ctx.checkpoints.allocations.actuated(&self.tracker.pod_ref.uid).as_ref(),
            restart_all,
        });
        let sandbox = sandbox_decision(&pass.pod, &pass.runtime);
        let record = &self.tracker.record;
        let mut due = due_starts(&StartInput {
            pod: &pass.pod,
            pod_ref: &self.tracker.pod_ref,
            ephemeral: &ephemeral_containers(&pass.pod),
            actions: &actions,
            runtime: &pass.runtime,
            waiting: &record.waiting,
            crash_loop: &record.crash_loop,
            pulls: &record.pulls,
            holds: &self.retries.containers,
            image_key: |image| image::with_tag(image).ok(),
            wall: self.ctx.clock.wall(),
            boot: self.ctx.clock.boot(),
        });
        for backoff in &due.new_backoffs {
            report_backoff(&self.ctx.reporting, &pass.pod, backoff);
        }
        let hold = self.retries.resize.saturating_sub(self.ctx.clock.boot());
        if !hold.is_zero() && !actions.resize.is_empty() {
            // The runtime refused it recently.
            actions.resize = ResizeActions::default();
            due.retry_after(hold);
        }
        if self.tracker.record.waiting == due.waiting {
            self.tracker.record.update(|record| record.crash_loop.clone_from(&due.crash_loop));
        } else {
            let crash_loop = &due.crash_loop;
            self.tracker
                .report_waiting(pass, &due.waiting, |record| record.crash_loop.clone_from(crash_loop));
        }
        let lines = waiting::explain(&pass.pod, &actions, &sandbox, &due.start_backoffs);
        self.tracker.view.decided(lines, &pass.runtime);
        due.limit(&mut actions);
        (actions, due)
    }

    /// Performs the actions of this pass. After a failure, the pod waits before the next pass with actions.
    async fn perform(
        &mut self,
        pass: &Pass,
        actions: &PodActions,
        due: &DueStarts,
    ) -> Result<NextPass, Halt> {
        // The actions may hang, so the wait is published first.
        let now = self.ctx.clock.wall();
        if let Some(wait) = waiting::from_status(&pass.pod, &pass.status, &due.start_backoffs, now) {
            self.tracker.view.meanwhile(wait.what);
        }
        let pod_ref = &self.tracker.pod_ref;
        self.work_loop.begin_operation(SYNC, pod_ref);
        let span = match &self.work_loop.operation {
            Some(operation) => tracing::info_span!(
                parent: operation,
                "act",
                k8s.pod.uid = %pod_ref.uid,
                k8s.namespace.name = &*pod_ref.namespace,
                k8s.pod.name = &*pod_ref.name,
            ),
            None => Span::none(),
        };
        // Boxed, so that a pass without actions does not need the memory.
        let acted = Box::pin(self.act(pass, actions)).instrument(span.clone()).await;
        record_halt(&span, &acted);
        drop(span);
        self.tracker.observer.acted();
        if let Err(Halt::Failed { after, .. }) = &acted {
            // The failed action wakes the worker, too, which must not cause a retry.
            let wait = after.unwrap_or_else(|| jitter(ERROR_WAIT));
            self.retries.pod = self.ctx.clock.boot().saturating_add(wait);
            return acted.map(|()| NextPass::Again).map_err(|halt| halt.after(wait));
        }
        acted?;
        Ok(NextPass::Again)
    }

    /// Finishes a pass without actions. Returns when the next pass is due.
    async fn rest(&mut self, pass: &Pass, due: &DueStarts) -> Result<NextPass, Halt> {
        let claims = match self.preparation().restore_claims(pass).await? {
            RunningClaims::Recorded => None,
            RunningClaims::Restored => return Ok(NextPass::Again),
            RunningClaims::Missing(wait) => Some(wait),
        };
        let now = self.ctx.clock.wall();
        if let Some(wait) = waiting::from_status(&pass.pod, &pass.status, &due.start_backoffs, now) {
            self.tracker.view.set_wait(&wait);
        }
        let refresh = self.preparation().refresh_volumes(pass).await;
        self.removals().collect_dead().await?;
        let boot = self.ctx.clock.boot();
        self.tracker.record.update(|record| {
            record.crash_loop.remove_expired(boot);
            record.pulls.remove_expired(boot, BackoffDelays::default());
        });
        let steady_now = self.tracker.steady_now(pass.findings.active);
        let deadline = status::until_active_deadline(&pass.pod, &pass.status, steady_now);
        if failpoint::planted!("event in each sync") {
            let volumes = pods::spec(&pass.pod).volumes.iter().flatten().filter_map(|v| v.image.as_ref());
            for image in volumes {
                let text = format!("Container image {:?} already present on machine", image.reference);
                self.ctx.reporting.events.pod(&pass.pod, EventType::Normal, "Pulled", &text, "");
            }
            return Ok(NextPass::Idle(Some(Duration::from_secs(1))));
        }
        Ok(NextPass::Idle([due.next(), deadline, refresh, claims].into_iter().flatten().min()))
    }

    fn reconcile_mirror(&mut self, desired: &Desired) {
        let pod = &self.tracker.pod;
        if !self.ctx.node.has_api || !pods::is_static(pod) {
            return;
        }
        match &self.mirror {
            Some(keeper) => keeper.set(pod, desired.mirror.as_ref()),
            None => {
                let ctx = MirrorContext::from(&*self.ctx);
                self.mirror = Some(MirrorReconciler::start(ctx, Arc::clone(pod), desired.mirror.clone()));
            }
        }
    }
}

/// Emits the events about a new back-off of a container.
fn report_backoff(reporting: &Reporting, pod: &Pod, backoff: &NewBackoff) {
    let events = &reporting.events;
    match backoff {
        NewBackoff::CrashLoop { kind, container } => {
            let name = pods::pod_ref(pod).map(|pod_ref| pod_ref.to_string()).unwrap_or_default();
            let text = format!("Back-off restarting failed container {container} in pod {name}");
            events.pod(pod, EventType::Warning, "BackOff", &text, &kind.field_path(container));
        }
        NewBackoff::ImagePull { kind, container, image } => {
            let (path, text) = (kind.field_path(container), format!("Back-off pulling image {image:?}"));
            events.pod(pod, EventType::Normal, "BackOff", &text, &path);
            events.pod(pod, EventType::Warning, "Failed", "Error: ImagePullBackOff", &path);
        }
    }
}

/// Fails if the runtime cannot create a sandbox now.
fn check_runtime(
    runtime: &RuntimeAccess,
    reporting: &Reporting,
    view: &mut ViewPublisher,
    pod: &Pod,
    gate: SyncGate,
    network_not_ready: Option<String>,
) -> Result<(), Halt> {
    // The sandbox configuration needs the cgroup driver and the handlers of the runtime.
    if runtime.state.borrow().name.is_empty() {
        view.wait_for(waiting::Waiting::Runtime { error: None }, None);
        return Err(Halt::Interrupted("the runtime's status has not been read".to_owned()));
    }
    // A pod that already has its network does not need another one (ARCHITECTURE.md, invariant 10).
    if gate == SyncGate::NetworkNotReady {
        let message = network_not_ready.unwrap_or_default();
        let text = format!("network is not ready: {message}");
        reporting.events.pod(pod, EventType::Warning, "NetworkNotReady", &text, "");
        return Err(Halt::NetworkNotReady(message));
    }
    Ok(())
}
