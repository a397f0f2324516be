//! The loop of a pod worker: takes work, runs a pass, reports the outcome.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::PodStatus;
use pod_sync_clients::{EventNumber, EventType};
use pod_sync_containment::PodWork;
use pod_sync_decisions::conditions::READY;
use pod_sync_decisions::containment::Suspension;
use pod_sync_decisions::worker::{Input, Outcome, Work};
use pod_sync_decisions::{status, waiting};
use pod_sync_records::Termination;
use quintlet_kit::failpoint;
use quintlet_model::ids::PodRef;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, Span};

use super::{Halt, Next, Worker};
use crate::context::{Desired, INTERNAL_ERROR};
use crate::pod_workers::NextWork;

/// The state of the loop between passes.
pub(super) struct WorkLoop {
    // Wakes the worker for another pass.
    pub(super) wakeup: Arc<Notify>,
    // The type of the next sync.
    pub(super) sync_type: SyncType,
    // Ends the current sync, unless it has reached the runtime.
    pub(super) cancel: CancellationToken,
    // The trace of the current operation, from its trigger until the pod is Ready or has terminated.
    pub(super) operation: Option<Span>,
    suspension: SuspensionReport,
}

impl WorkLoop {
    pub(super) fn new(wakeup: Arc<Notify>, pod: &PodRef, is_restored: bool) -> Self {
        Self {
            wakeup,
            sync_type: if is_restored { SyncType::Sync } else { SyncType::Create },
            cancel: CancellationToken::new(),
            operation: (!is_restored).then(|| operation("create", pod)),
            suspension: SuspensionReport::default(),
        }
    }
}

/// The last report of a suspension.
#[derive(Default)]
struct SuspensionReport {
    // The desired pod at the last check, while the pod is suspended.
    desired: Option<Desired>,
    // End of the suspension (CLOCK_BOOTTIME) that the last event was about.
    reported_until: Duration,
}

/// The type of a sync, a label of metrics (`pkg/kubelet/types: SyncPodType`, and `terminated` for the last pass: `pkg/kubelet:
/// podWorkers.podWorkerLoop`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SyncType {
    Create,
    Update,
    Sync,
    Kill,
    Terminated,
}

impl SyncType {
    fn label(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
            Self::Sync => "sync",
            Self::Kill => "kill",
            Self::Terminated => "terminated",
        }
    }
}

impl Worker {
    /// Works until nothing of the pod is left on the node.
    pub async fn run(mut self) {
        if self.ctx.faults.containment.suspension(&self.pod_ref.uid).is_none() {
            // The first pass may hang in a call to the runtime.
            self.show(false);
        }
        loop {
            if let Some(wait) = self.ctx.faults.containment.suspension(&self.pod_ref.uid) {
                if !self.wait_suspended(&wait).await {
                    return;
                }
                continue;
            }
            self.work_loop.suspension.desired = None;
            let wait = match self.ctx.control.pod_workers.next_work(&self.pod_ref.uid) {
                NextWork::Exit => break,
                NextWork::Idle(wait) => wait,
                NextWork::Blocked(work, wait) => {
                    self.report_blocked(&work);
                    wait
                }
                NextWork::Run(work, cancel) => {
                    self.work_loop.cancel = cancel;
                    let ctx = Arc::clone(&self.ctx);
                    let is_critical = quintlet_model::pod::is_critical(&self.pod);
                    let pod = PodWork { is_critical, ..PodWork::of(&self.pod_ref) };
                    let worked = Box::pin(self.work(work));
                    let Some(next_work) = ctx.faults.contained(&pod, worked).await else {
                        // The state may be half-changed: the pod manager makes another worker from the record.
                        return;
                    };
                    match next_work {
                        NextWork::Idle(wait) => wait,
                        NextWork::Exit | NextWork::Run(..) | NextWork::Blocked(..) => break,
                    }
                }
            };
            self.show(wait.is_zero());
            if wait.is_zero() {
                // Consecutive passes must not starve other tasks.
                tokio::task::yield_now().await;
                continue;
            }
            // Each outcome leads to another pass, which reads everything again.
            tokio::select! {
                () = self.work_loop.wakeup.notified() => {}
                changed = self.desired.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(wait) => {}
            }
        }
        self.ctx.control.static_pod_gate.release(&self.pod_ref.uid);
        self.ctx.reporting.statuses.forget(&self.pod_ref.uid);
        self.remove_targets();
        self.ctx.reporting.views.remove(&self.pod_ref.uid);
        self.record.remove();
        self.ctx.faults.containment.forget(&self.pod_ref.uid);
    }

    // Publishes why the pod is suspended, and waits until the suspension may be over. Returns false if the pod manager has
    // dropped the pod.
    pub(super) async fn wait_suspended(&mut self, wait: &Suspension) -> bool {
        self.ctx.control.static_pod_gate.release(&self.pod_ref.uid);
        let before = self.work_loop.suspension.desired.take().unwrap_or_else(|| self.desired());
        if wait.is_aside && self.work_loop.suspension.reported_until != wait.until {
            self.work_loop.suspension.reported_until = wait.until;
            self.ctx.reporting.events.pod(&self.pod, EventType::Warning, INTERNAL_ERROR, &wait.message, "");
        }
        self.wait_for(&waiting::Waiting::InternalError { message: wait.message.clone() }, Some(wait.until));
        Arc::make_mut(&mut self.published.decision).errors = vec![wait.message.clone()];
        self.show(false);
        // Each outcome leads to another check.
        tokio::select! {
            () = self.work_loop.wakeup.notified() => {}
            changed = self.desired.changed() => if changed.is_err() { return false },
            () = tokio::time::sleep(wait.until.saturating_sub(self.ctx.clock.boot())) => {}
        }
        let now = self.desired();
        let ends = |d: &Desired| (d.removed, d.pod.metadata.deletion_timestamp.is_some());
        if now.pod.spec != before.pod.spec || ends(&now) != ends(&before) {
            self.ctx.faults.containment.record_spec_change(&self.pod_ref.uid);
        }
        self.work_loop.suspension.desired = Some(now);
        true
    }

    // Publishes that another pod blocks this one: static pods of the same name run one after the other.
    pub(super) fn report_blocked(&mut self, work: &Work) {
        self.ctx.control.static_pod_gate.release(&self.pod_ref.uid);
        let desired = self.desired.borrow_and_update().clone();
        self.accept(&desired);
        self.no_errors();
        if let Work::WaitForFullName { other } = work {
            let other = other.as_ref().map(ToString::to_string).unwrap_or_default();
            self.wait_for(&waiting::Waiting::StaticName { other }, None);
        }
    }

    pub(super) async fn work(&mut self, work: Work) -> NextWork {
        self.record_termination();
        let span = self.work_loop.operation.as_ref().map_or_else(Span::none, |operation| {
            let name = self.name();
            tracing::info_span!(parent: operation, "pass", pod.uid = %self.pod_ref.uid, pod.name = name, worker = self.phase())
        });
        if work == Work::Sync && self.work_loop.sync_type == SyncType::Create {
            let waited = self.ctx.clock.boot().saturating_sub(self.record.accepted);
            self.ctx.reporting.metrics.operations.pod_begins(&self.pod, waited);
        }
        // Boxed, so that an idle worker does not hold the memory of a pass.
        let began = Instant::now();
        let first_event = self.ctx.reporting.events.next_number();
        let next = Box::pin(self.pass(&work)).instrument(span).await;
        match &next {
            // Another service is down, which is no fault of this pod.
            Err(Halt::Interrupted(_)) => self.ctx.control.static_pod_gate.extend(&self.pod_ref.uid),
            Ok(Next::Again) => {}
            Ok(Next::Idle(_) | Next::Advance)
            | Err(Halt::Failed { .. } | Halt::NetworkNotReady(_) | Halt::Cancelled) => {
                self.ctx.control.static_pod_gate.release(&self.pod_ref.uid);
            }
        }
        let kind = match work {
            Work::Sync => std::mem::replace(&mut self.work_loop.sync_type, SyncType::Sync),
            // A pass that fails has the type of the update that caused it.
            Work::Terminated if matches!(next, Ok(Next::Advance)) => SyncType::Terminated,
            Work::Terminating | Work::Terminated | Work::Finished { .. } | Work::WaitForFullName { .. } => {
                SyncType::Kill
            }
        };
        self.ctx.reporting.metrics.sync_completed(kind.label(), began.elapsed());
        if self.is_settled() {
            self.work_loop.operation = None;
        }
        // A pass that ends before its report leaves the pod to this update.
        self.record.update(|record| record.pod = Some(Arc::clone(&self.pod)));
        let outcome = self.outcome(next, first_event);
        // An interrupted pass does not clear the suspicion against a pod.
        if outcome != Outcome::Interrupted {
            self.ctx.faults.containment.record_success(&self.pod_ref.uid);
        }
        let next_work = self.ctx.control.pod_workers.complete_work(&self.pod_ref.uid, outcome);
        if outcome == Outcome::Advance {
            self.ctx.checkpoints.allocations.freed();
        }
        next_work
    }

    // `first_event` is the number of the first event of this pass. A failure with a warning event is already in the log.
    pub(super) fn outcome(&mut self, next: Result<Next, Halt>, first_event: EventNumber) -> Outcome {
        match next {
            Ok(Next::Again) => Outcome::Requeue,
            Ok(Next::Idle(within)) => {
                self.explain_declined_status();
                self.explain_left_out();
                let now = self.ctx.clock.boot();
                let recheck = self.status_report.recheck_at.map(|at| at.saturating_sub(now));
                Outcome::Idle(within.into_iter().chain(recheck).min())
            }
            Ok(Next::Advance) => Outcome::Advance,
            Err(Halt::Interrupted(why)) => {
                tracing::debug!(pod.uid = %self.pod_ref.uid, why, "pod sync interrupted");
                self.observed.freshness.require_full_inspection();
                Arc::make_mut(&mut self.published.decision).errors = vec![why];
                if self.published.waiting.is_none() {
                    self.wait_for(&waiting::Waiting::Service { name: "cri-proxy" }, None);
                }
                Outcome::Interrupted
            }
            Err(Halt::Failed { error, waiting, after }) => {
                let (uid, pod) = (self.pod_ref.uid.as_str(), self.name());
                if self.ctx.reporting.events.has_warning_since(uid, first_event) {
                    tracing::debug!(pod.name = pod, pod.uid = uid, error, "pod sync failed, retrying");
                } else {
                    let reason = waiting.reason();
                    tracing::warn!(pod.name = pod, pod.uid = uid, reason, error, "pod sync failed, retrying");
                }
                Arc::make_mut(&mut self.published.decision).errors = vec![error];
                self.wait_for(&waiting, None);
                Outcome::Failed(after)
            }
            Err(Halt::NetworkNotReady(message)) => {
                Arc::make_mut(&mut self.published.decision).errors =
                    vec![format!("network is not ready: {message}")];
                self.wait_for(&waiting::Waiting::NetworkNotReady { message }, None);
                Outcome::NetworkNotReady
            }
            Err(Halt::Cancelled) => Outcome::Cancelled,
        }
    }

    // Adds the API server's answer to the errors of the view while it declines the status. A finished pod has it in its wait.
    fn explain_declined_status(&mut self) {
        let is_finished = self.record.termination.as_ref().is_some_and(|t| t.finished);
        if !is_finished && let Some(answer) = self.ctx.reporting.statuses.declined(&self.pod_ref.uid) {
            let error = format!("failed to write the status: {answer}");
            // A pass without a decision keeps the errors of the last one.
            if !self.published.decision.errors.contains(&error) {
                Arc::make_mut(&mut self.published.decision).errors.push(error);
            }
        }
    }

    // Returns whether an optional removal was done. A refusal is logged and ignored; an interruption ends the pass.
    pub(super) fn tolerate_refusal(&self, removed: Result<(), Halt>) -> Result<bool, Halt> {
        match removed {
            Ok(()) => Ok(true),
            Err(Halt::Failed { error, .. }) => {
                let (pod, uid) = (self.name(), self.pod_ref.uid.as_str());
                tracing::warn!(pod.name = pod, pod.uid = uid, error, "failed to remove dead instances");
                Ok(false)
            }
            Err(cut @ (Halt::Interrupted(_) | Halt::NetworkNotReady(_) | Halt::Cancelled)) => Err(cut),
        }
    }

    // Records the decided termination of the pod before any action of the pass.
    pub(super) fn record_termination(&mut self) {
        let uid = &self.pod_ref.uid;
        let (ending, started) =
            self.ctx.control.pod_workers.read(|w| (w.termination(uid).cloned(), w.is_started(uid)));
        if ending.is_some() && self.record.termination.is_none() {
            self.work_loop.operation = Some(operation("terminate", &self.pod_ref));
        }
        self.record.update(|record| {
            record.termination = ending.map(|e| Termination::of(&e, record.termination.as_ref()));
            record.started = started;
        });
    }

    // The traced operation has ended: the pod is Ready or has terminated.
    pub(super) fn is_settled(&self) -> bool {
        let ready =
            |s: &PodStatus| s.conditions.iter().flatten().any(|c| c.type_ == READY && c.status == "True");
        match &self.record.termination {
            None => self.record.status.as_deref().is_some_and(ready),
            Some(t) => t.finished,
        }
    }

    pub(super) fn begin_operation(&mut self, name: &'static str) {
        if self.work_loop.operation.is_none() {
            self.work_loop.operation = Some(operation(name, &self.pod_ref));
        }
    }

    pub(super) async fn pass(&mut self, work: &Work) -> Result<Next, Halt> {
        let desired = self.desired.borrow_and_update().clone();
        self.accept(&desired);
        self.published.waiting = None;
        self.no_errors();
        if *work != Work::Sync {
            self.mirror = None;
        }
        failpoint::work!("pod worker pass");
        match work {
            Work::Sync => match &desired.rejected {
                Some(rejection) => self.reject(rejection),
                None => match self.wait_for_preempted(&desired) {
                    Some(wait) => Ok(Next::Idle(Some(wait))),
                    None => self.sync(&desired).await,
                },
            },
            Work::Terminating => self.terminating().await,
            Work::Terminated => self.terminated().await,
            Work::Finished { clean } => self.finished(*clean).await,
            Work::WaitForFullName { .. } => Ok(Next::Idle(None)),
        }
    }

    // Returns how long to wait for the pods that were preempted for this one. The wait has a deadline.
    pub(super) fn wait_for_preempted(&mut self, desired: &Desired) -> Option<Duration> {
        let now = self.ctx.clock.boot();
        let left: Vec<_> = desired
            .after
            .iter()
            .filter(|v| !self.ctx.control.pod_workers.has_terminated(&self.ctx.reporting.views, &v.uid))
            .collect();
        let until = left.iter().map(|v| v.until).max().filter(|until| *until > now)?;
        let victims = left.iter().map(|v| v.uid.to_string()).collect();
        self.wait_for(&waiting::Waiting::Preempting { victims }, Some(until));
        Some(until.saturating_sub(now))
    }

    // Takes over the pod of the source. A changed spec ends all back-offs.
    pub(super) fn accept(&mut self, desired: &Desired) {
        if self.pod.spec != desired.pod.spec {
            if self.work_loop.sync_type == SyncType::Sync {
                self.work_loop.sync_type = SyncType::Update;
            }
            self.retries.reset();
        }
        self.pod = Arc::clone(&desired.pod);
    }

    pub(super) fn reject(
        &mut self,
        rejection: &pod_sync_node_decisions::admission::Rejection,
    ) -> Result<Next, Halt> {
        self.ctx.reporting.events.pod(
            &self.pod,
            EventType::Warning,
            &rejection.reason,
            &rejection.message,
            "",
        );
        let status =
            status::rejected(&self.pod, &rejection.reason, &rejection.message, self.ctx.clock.wall());
        self.ctx.control.pod_workers.step(Input::Reject(self.pod_ref.uid.clone()));
        self.record_termination();
        self.report(status, true, |_| {});
        Ok(Next::Again)
    }
}

fn operation(name: &'static str, pod: &PodRef) -> Span {
    let title = format!("{name} {}/{}", pod.namespace, pod.name);
    let name = format!("{}/{}", pod.namespace, pod.name);
    tracing::info_span!(parent: None, "operation", otel.name = title, pod.uid = %pod.uid, pod.name = name)
}
