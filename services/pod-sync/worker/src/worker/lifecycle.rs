//! The loop of a pod worker: takes work, runs a pass, reports the outcome.

use std::sync::Arc;
use std::time::Duration;

use pod_sync_clients::{EventNumber, EventType};
use pod_sync_containment::PodWork;
use pod_sync_decisions::containment::Suspension;
use pod_sync_decisions::worker::{Input, Work, WorkOutcome};
use pod_sync_decisions::{status, waiting};
use pod_sync_node_decisions::admission::Rejection;
use pod_sync_records::{PodRecord, Termination};
use quintlet_kit::failpoint;
use quintlet_model::ids::PodRef;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{Instrument as _, Span};

use super::Worker;
use super::halt::{Halt, NextPass, record_halt};
use super::resources::ResourceProgress;
use super::retries::RetryTimes;
use super::setup::PodSetup;
use super::tracker::Tracker;
use super::view::ViewPublisher;
use super::work_loop::{SyncType, TERMINATE, WorkLoop};
use crate::context::{Desired, INTERNAL_ERROR, WorkerContext};
use crate::pod_workers::NextWork;

impl Worker {
    /// Returns a worker for `desired`, which continues from `record` after a restart.
    #[must_use]
    pub fn new(
        ctx: Arc<WorkerContext>,
        pod_ref: PodRef,
        desired: watch::Receiver<Desired>,
        record: Option<PodRecord>,
    ) -> Self {
        let wakeup = ctx.control.wakeups.register(&pod_ref.uid);
        let work_loop = WorkLoop::new(wakeup, &pod_ref, record.as_ref());
        if let Some(record) = &record {
            let memory = record.probes.iter().map(|(c, t, m)| ((c.clone(), *t), m.clone())).collect();
            ctx.probes.restore(&pod_ref.uid, memory);
        }
        let record = record.unwrap_or_else(|| PodRecord {
            accepted: ctx.clock.boot(),
            creation: work_loop.creation().map(str::to_owned),
            ..PodRecord::default()
        });
        Self {
            work_loop,
            tracker: Tracker::new(&ctx, pod_ref, desired, record),
            retries: RetryTimes::default(),
            setup: PodSetup::default(),
            mirror: None,
            resources: ResourceProgress::default(),
            ctx,
        }
    }

    /// Works until nothing of the pod is left on the node.
    pub async fn run(mut self) {
        if self.ctx.faults.containment.suspension(&self.tracker.pod_ref.uid).is_none() {
            // The first pass may hang in a call to the runtime.
            self.tracker.show(false);
        }
        loop {
            if let Some(wait) = self.ctx.faults.containment.suspension(&self.tracker.pod_ref.uid) {
                if !self.wait_suspended(&wait).await {
                    return;
                }
                continue;
            }
            self.work_loop.suspension.desired = None;
            let wait = match self.ctx.control.pod_workers.next_work(&self.tracker.pod_ref.uid) {
                NextWork::Exit => break,
                NextWork::Idle(wait) => wait,
                NextWork::Blocked(work, wait) => {
                    self.report_blocked(&work);
                    wait
                }
                NextWork::Run(work, cancel) => {
                    self.work_loop.cancel = cancel;
                    let ctx = Arc::clone(&self.ctx);
                    let is_critical = quintlet_model::pod::is_critical(&self.tracker.pod);
                    let pod = PodWork { is_critical, ..PodWork::of(&self.tracker.pod_ref) };
                    let worked = Box::pin(self.work(work));
                    let Some(next_work) = ctx.faults.contained(&pod, worked).await else {
                        // The state may be half-changed: the pod manager makes another worker from the
                        // record.
                        return;
                    };
                    match next_work {
                        NextWork::Idle(wait) => wait,
                        NextWork::Exit | NextWork::Run(..) | NextWork::Blocked(..) => break,
                    }
                }
            };
            self.tracker.show(wait.is_zero());
            if wait.is_zero() {
                // Consecutive passes must not starve other tasks.
                tokio::task::yield_now().await;
                continue;
            }
            // Each outcome leads to another pass, which reads everything again.
            tokio::select! {
                () = self.work_loop.wakeup.notified() => {}
                changed = self.tracker.desired.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(wait) => {}
            }
        }
        self.ctx.control.static_pod_gate.release(&self.tracker.pod_ref.uid);
        self.ctx.reporting.statuses.forget(&self.tracker.pod_ref.uid);
        self.tracker.probes.remove_targets();
        self.ctx.reporting.views.remove(&self.tracker.pod_ref.uid);
        self.ctx.faults.containment.forget(&self.tracker.pod_ref.uid);
        self.tracker.record.delete();
    }

    /// Publishes why the pod is suspended, and waits until the suspension may be over. Returns false if the
    /// pod manager has dropped the pod.
    pub(super) async fn wait_suspended(&mut self, wait: &Suspension) -> bool {
        self.ctx.control.static_pod_gate.release(&self.tracker.pod_ref.uid);
        let before = self.work_loop.suspension.desired.take().unwrap_or_else(|| self.tracker.desired());
        if wait.is_aside && self.work_loop.suspension.reported_until != wait.until {
            self.work_loop.suspension.reported_until = wait.until;
            self.ctx.reporting.events.pod(
                &self.tracker.pod,
                EventType::Warning,
                INTERNAL_ERROR,
                &wait.message,
                "",
            );
        }
        self.tracker
            .view
            .wait_for(waiting::Waiting::InternalError { message: wait.message.clone() }, Some(wait.until));
        self.tracker.view.set_error(wait.message.clone());
        self.tracker.show(false);
        // Each outcome leads to another check.
        tokio::select! {
            () = self.work_loop.wakeup.notified() => {}
            changed = self.tracker.desired.changed() => if changed.is_err() { return false },
            () = tokio::time::sleep(wait.until.saturating_sub(self.ctx.clock.boot())) => {}
        }
        let now = self.tracker.desired();
        let ends = |d: &Desired| (d.removed, d.pod.metadata.deletion_timestamp.is_some());
        if now.pod.spec != before.pod.spec || ends(&now) != ends(&before) {
            self.ctx.faults.containment.record_spec_change(&self.tracker.pod_ref.uid);
        }
        self.work_loop.suspension.desired = Some(now);
        true
    }

    /// Publishes that another pod blocks this one: static pods of the same name run one after the other.
    pub(super) fn report_blocked(&mut self, work: &Work) {
        self.ctx.control.static_pod_gate.release(&self.tracker.pod_ref.uid);
        let desired = self.tracker.desired.borrow_and_update().clone();
        accept(&desired, &mut self.tracker, &mut self.work_loop, &mut self.retries);
        self.tracker.view.clear_errors();
        if let Work::WaitForFullName { other } = work {
            let other = other.as_ref().map(ToString::to_string).unwrap_or_default();
            self.tracker.view.wait_for(waiting::Waiting::StaticName { other }, None);
        }
    }

    pub(super) async fn work(&mut self, work: Work) -> NextWork {
        self.record_termination();
        let span = self.work_loop.operation.as_ref().map_or_else(Span::none, |operation| {
            let pod = &self.tracker.pod_ref;
            tracing::info_span!(
                parent: operation,
                "pass",
                k8s.pod.uid = %pod.uid,
                k8s.namespace.name = &*pod.namespace,
                k8s.pod.name = &*pod.name,
                worker = self.tracker.phase(),
            )
        });
        if work == Work::Sync && self.work_loop.sync_type == SyncType::Create {
            let waited = self.ctx.clock.boot().saturating_sub(self.tracker.record.accepted);
            self.ctx.reporting.metrics.operations.pod_begins(&self.tracker.pod, waited);
        }
        // Boxed, so that an idle worker does not hold the memory of a pass.
        let began = Instant::now();
        let first_event = self.ctx.reporting.events.next_number();
        let next = Box::pin(self.pass(&work)).instrument(span.clone()).await;
        record_halt(&span, &next);
        drop(span);
        match &next {
            // Another service is down, which is no fault of this pod.
            Err(Halt::Interrupted(_)) => self.ctx.control.static_pod_gate.extend(&self.tracker.pod_ref.uid),
            Ok(NextPass::Again) => {}
            Ok(NextPass::Idle(_) | NextPass::Advance)
            | Err(Halt::Failed { .. } | Halt::NetworkNotReady(_) | Halt::Cancelled) => {
                self.ctx.control.static_pod_gate.release(&self.tracker.pod_ref.uid);
            }
        }
        let kind = match work {
            Work::Sync => std::mem::replace(&mut self.work_loop.sync_type, SyncType::Sync),
            // A pass that fails has the type of the update that caused it.
            Work::Terminated if matches!(next, Ok(NextPass::Advance)) => SyncType::Terminated,
            Work::Terminating | Work::Terminated | Work::Finished { .. } | Work::WaitForFullName { .. } => {
                SyncType::Kill
            }
        };
        self.ctx.reporting.metrics.sync_completed(kind.label(), began.elapsed());
        if self.tracker.is_settled() {
            self.work_loop.operation = None;
        }
        // A pass that ends before its report leaves the pod to this update.
        self.tracker.record.update(|record| record.pod = Some(Arc::clone(&self.tracker.pod)));
        let outcome = self.outcome(next, first_event);
        // An interrupted pass does not clear the suspicion against a pod.
        if outcome != WorkOutcome::Interrupted {
            self.ctx.faults.containment.record_success(&self.tracker.pod_ref.uid);
        }
        let next_work = self.ctx.control.pod_workers.complete_work(&self.tracker.pod_ref.uid, outcome);
        if outcome == WorkOutcome::Advance {
            self.ctx.checkpoints.allocations.freed();
        }
        next_work
    }

    // `first_event` is the number of the first event of this pass. A failure with a warning event is already
    // in the log.
    pub(super) fn outcome(&mut self, next: Result<NextPass, Halt>, first_event: EventNumber) -> WorkOutcome {
        match next {
            Ok(NextPass::Again) => WorkOutcome::Requeue,
            Ok(NextPass::Idle(within)) => {
                self.tracker.explain_errors();
                let now = self.ctx.clock.boot();
                let recheck = self.tracker.reporter.recheck_at().map(|at| at.saturating_sub(now));
                WorkOutcome::Idle(within.into_iter().chain(recheck).min())
            }
            Ok(NextPass::Advance) => WorkOutcome::Advance,
            Err(Halt::Interrupted(why)) => {
                tracing::debug!(pod.uid = %self.tracker.pod_ref.uid, why, "pod sync interrupted");
                self.tracker.observer.require_full_inspection();
                self.tracker.view.set_error(why);
                if !self.tracker.view.is_waiting() {
                    self.tracker.view.wait_for(waiting::Waiting::Service { name: "cri-proxy" }, None);
                }
                WorkOutcome::Interrupted
            }
            Err(Halt::Failed { error, waiting, after }) => {
                let (uid, pod) = (self.tracker.pod_ref.uid.as_str(), self.tracker.name());
                if self.ctx.reporting.events.has_warning_since(uid, first_event) {
                    tracing::debug!(pod.name = pod, pod.uid = uid, error, "pod sync failed, retrying");
                } else {
                    let reason = waiting.reason();
                    tracing::warn!(pod.name = pod, pod.uid = uid, reason, error, "pod sync failed, retrying");
                }
                self.tracker.view.set_error(error);
                self.tracker.view.wait_for(waiting, None);
                WorkOutcome::Failed(after)
            }
            Err(Halt::NetworkNotReady(message)) => {
                self.tracker.view.set_error(format!("network is not ready: {message}"));
                self.tracker.view.wait_for(waiting::Waiting::NetworkNotReady { message }, None);
                WorkOutcome::NetworkNotReady
            }
            Err(Halt::Cancelled) => WorkOutcome::Cancelled,
        }
    }

    /// Records the decided termination of the pod before any action of the pass.
    pub(super) fn record_termination(&mut self) {
        let uid = &self.tracker.pod_ref.uid;
        let (ending, started) =
            self.ctx.control.pod_workers.read(|w| (w.termination(uid).cloned(), w.is_started(uid)));
        if ending.is_some() && self.tracker.record.termination.is_none() {
            self.work_loop.change_operation(TERMINATE, &self.tracker.pod_ref);
        }
        self.tracker.record.update(|record| {
            record.termination = ending.map(|e| Termination::of(&e, record.termination.as_ref()));
            record.started = started;
        });
    }

    pub(super) async fn pass(&mut self, work: &Work) -> Result<NextPass, Halt> {
        let desired = self.tracker.desired.borrow_and_update().clone();
        accept(&desired, &mut self.tracker, &mut self.work_loop, &mut self.retries);
        self.tracker.view.begin_pass();
        if *work != Work::Sync {
            self.mirror = None;
        }
        failpoint::work!("pod worker pass");
        match work {
            Work::Sync => match &desired.rejected {
                Some(rejection) => self.reject(rejection),
                None => match wait_for_preempted(&self.ctx, &desired, &mut self.tracker.view) {
                    Some(wait) => Ok(NextPass::Idle(Some(wait))),
                    None => self.sync(&desired).await,
                },
            },
            Work::Terminating => self.termination().stop().await,
            Work::Terminated => self.termination().release().await,
            Work::Finished { clean } => {
                let rejected = desired.rejected.clone().or_else(|| self.resources.rejected.clone());
                self.termination().finish(*clean, rejected).await
            }
            Work::WaitForFullName { .. } => Ok(NextPass::Idle(None)),
        }
    }

    /// Rejects a pod that has nothing on this node.
    pub(super) fn reject(&mut self, rejection: &Rejection) -> Result<NextPass, Halt> {
        let Rejection { reason, message } = rejection;
        self.ctx.reporting.events.pod(&self.tracker.pod, EventType::Warning, reason, message, "");
        let status = status::rejected(&self.tracker.pod, reason, message, self.ctx.clock.wall());
        self.ctx.control.pod_workers.step(Input::Reject(self.tracker.pod_ref.uid.clone()));
        self.record_termination();
        self.tracker.report(status, true, |_| {});
        Ok(NextPass::Again)
    }
}

/// Takes over the pod of the source. A changed spec ends all back-offs.
fn accept(desired: &Desired, tracker: &mut Tracker, work_loop: &mut WorkLoop, retries: &mut RetryTimes) {
    if tracker.pod.spec != desired.pod.spec {
        if work_loop.sync_type == SyncType::Sync {
            work_loop.sync_type = SyncType::Update;
        }
        retries.reset();
    }
    tracker.pod = Arc::clone(&desired.pod);
}

/// Returns how long to wait for the pods that were preempted for this one. The wait has a deadline.
fn wait_for_preempted(ctx: &WorkerContext, desired: &Desired, view: &mut ViewPublisher) -> Option<Duration> {
    let now = ctx.clock.boot();
    let left: Vec<_> = desired
        .after
        .iter()
        .filter(|v| !ctx.control.pod_workers.has_terminated(&ctx.reporting.views, &v.uid))
        .collect();
    let until = left.iter().map(|v| v.until).max().filter(|until| *until > now)?;
    let victims = left.iter().map(|v| v.uid.to_string()).collect();
    view.wait_for(waiting::Waiting::Preempting { victims }, Some(until));
    Some(until.saturating_sub(now))
}
