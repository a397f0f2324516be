//! Publishes the view of a pod: its status, its last decision, and what it waits for.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use pod_sync_decisions::waiting;
use pod_sync_views::{Decision, PodView, Waiting, is_same_view, unix_ns};
use quintlet_kit::clock::Clock;
use quintlet_model::ids::PodRef;
use quintlet_model::runtime::PodRuntime;

use crate::context::{Desired, Reporting};

/// The view of one pod, with the parts of it that are not in the record.
pub(super) struct ViewPublisher {
    clock: Clock,
    reporting: Arc<Reporting>,
    pod_ref: PodRef,
    decision: Arc<Decision>,
    waiting: Option<Waiting>,
    accepted_unix_ns: i64,
}

/// The rest of a view.
pub(super) struct Shown {
    pub(super) desired: Desired,
    /// The pod of the current or last pass.
    pub(super) pod: Arc<Pod>,
    pub(super) status: Option<Arc<PodStatus>>,
    pub(super) worker: &'static str,
}

impl ViewPublisher {
    /// Returns the view of a pod that was accepted at `accepted`, which is not published yet.
    pub(super) fn new(
        clock: Clock,
        reporting: Arc<Reporting>,
        pod_ref: PodRef,
        accepted: jiff::Timestamp,
    ) -> Self {
        let accepted_unix_ns = unix_ns(accepted);
        Self { clock, reporting, pod_ref, decision: Arc::default(), waiting: None, accepted_unix_ns }
    }

    /// Sets the wait of the pod. `until` is CLOCK_BOOTTIME.
    pub(super) fn wait_for(&mut self, what: waiting::Waiting, until: Option<Duration>) {
        let now = self.clock.wall();
        let left = until.map(|t| t.saturating_sub(self.clock.boot()));
        let until = left.and_then(|d| now.checked_add(d).ok());
        self.set_wait(&waiting::WaitingFor { what, since: Some(now), until });
    }

    /// Sets the wait of the pod.
    pub(super) fn set_wait(&mut self, wait: &waiting::WaitingFor) {
        self.waiting = Some(Waiting::of(wait, self.clock.wall()));
    }

    /// Returns whether the pod has a wait.
    pub(super) fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    /// Keeps the wait of the published view.
    pub(super) fn keep_waiting(&mut self) {
        self.waiting = self.reporting.views.get(&self.pod_ref.uid).and_then(|v| v.waiting.clone());
    }

    /// Publishes what a long step waits for, until the pass ends.
    pub(super) fn meanwhile(&self, what: waiting::Waiting) {
        let wait = waiting::WaitingFor { what, since: None, until: None };
        let wait = Waiting::of(&wait, self.clock.wall());
        self.reporting.views.set_waiting(&self.pod_ref.uid, Some(wait));
    }

    /// Begins a pass, which has no wait and no errors yet.
    pub(super) fn begin_pass(&mut self) {
        self.waiting = None;
        self.clear_errors();
    }

    /// Removes the errors of the last decision.
    pub(super) fn clear_errors(&mut self) {
        if !self.decision.errors.is_empty() {
            Arc::make_mut(&mut self.decision).errors.clear();
        }
    }

    /// Replaces the errors of the last decision.
    pub(super) fn set_error(&mut self, error: String) {
        Arc::make_mut(&mut self.decision).errors = vec![error];
    }

    /// Adds an error, once. A pass without a decision keeps the errors of the last one.
    pub(super) fn add_error(&mut self, error: String) {
        if !self.decision.errors.contains(&error) {
            Arc::make_mut(&mut self.decision).errors.push(error);
        }
    }

    /// Sets the last decision and the runtime state that it used.
    pub(super) fn decided(&mut self, lines: Vec<String>, runtime: &PodRuntime) {
        if self.decision.lines == lines && self.decision.saw == runtime.cursor {
            return;
        }
        let now = self.clock.boot();
        let decision = Arc::make_mut(&mut self.decision);
        decision.lines = lines;
        decision.at_unix_ns = unix_ns(self.clock.wall());
        decision.saw = runtime.cursor;
        decision.age_ms = now.saturating_sub(runtime.observed).as_secs_f64() * 1000.0;
        decision.trace_id = quintlet_telemetry::propagate::current_trace_id().unwrap_or_default();
    }

    /// Publishes the view if it has changed. Between two consecutive passes, the wait of the first is still
    /// valid.
    pub(super) fn publish(&mut self, shown: Shown, is_between_passes: bool) {
        let Shown { desired, pod, status, worker } = shown;
        let old = self.reporting.views.get(&self.pod_ref.uid);
        let shown_wait = old.as_ref().and_then(|view| view.waiting.as_ref());
        if let Some(wait) = self.waiting.as_mut() {
            wait.continue_from(shown_wait);
        }
        let waiting = match &self.waiting {
            None if is_between_passes => shown_wait.cloned(),
            waiting => waiting.clone(),
        };
        let view = PodView {
            pod_ref: self.pod_ref.clone(),
            source: desired.source,
            pod,
            status,
            deletion: desired.pod.metadata.deletion_timestamp.clone(),
            worker,
            is_removed: desired.removed,
            waiting,
            decision: Arc::clone(&self.decision),
            created_unix_ns: self.accepted_unix_ns,
            resource_version: self.reporting.statuses.written_version(&self.pod_ref.uid),
            mirror_uid: desired.mirror.and_then(|m| m.metadata.uid.clone()).unwrap_or_default(),
            version: 0,
        };
        if !old.is_some_and(|old| is_same_view(&old, &view)) {
            self.reporting.views.publish(&self.pod_ref.uid, view);
        }
    }

    /// Publishes a new status in the middle of a step, whose wait stays.
    pub(super) fn publish_progress(&mut self, shown: Shown) {
        let waiting = self.waiting.take();
        self.keep_waiting();
        self.publish(shown, false);
        self.waiting = waiting;
    }
}
