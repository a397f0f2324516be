//! Publishes the view of a pod: its status, its last decision, and what it waits for.

use std::sync::Arc;
use std::time::Duration;

use pod_sync_decisions::waiting;
use quintlet_model::runtime::PodRuntime;

use super::Worker;
use pod_sync_views::{Decision, PodView, Waiting, unix_ns};

/// The parts of the view besides the status.
pub(super) struct Published {
    pub(super) decision: Arc<Decision>,
    pub(super) waiting: Option<Waiting>,
    accepted_unix_ns: i64,
}

impl Published {
    pub(super) fn new(accepted_unix_ns: i64) -> Self {
        Self { decision: Arc::default(), waiting: None, accepted_unix_ns }
    }
}

impl Worker {
    // `until` is CLOCK_BOOTTIME.
    pub(crate) fn wait_for(&mut self, what: &waiting::Waiting, until: Option<Duration>) {
        let now = self.ctx.clock.wall();
        let left = until.map(|t| t.saturating_sub(self.ctx.clock.boot()));
        let until = left.and_then(|d| now.checked_add(d).ok());
        self.wait_shown(&waiting::WaitingFor { what: what.clone(), since: Some(now), until });
    }

    // Keeps the wait of the published view.
    pub(crate) fn keep_waiting(&mut self) {
        self.published.waiting =
            self.ctx.reporting.views.get(&self.pod_ref.uid).and_then(|v| v.waiting.clone());
    }

    pub(crate) fn wait_shown(&mut self, wait: &waiting::WaitingFor) {
        self.published.waiting = Some(Waiting::of(wait, self.ctx.clock.wall()));
    }

    // Publishes what a long step waits for, until the pass ends.
    pub(super) fn meanwhile(&self, what: waiting::Waiting) {
        let wait = waiting::WaitingFor { what, since: None, until: None };
        self.ctx
            .reporting
            .views
            .set_waiting(&self.pod_ref.uid, Some(Waiting::of(&wait, self.ctx.clock.wall())));
    }

    // Publishes a new status in the middle of a step, whose wait stays.
    pub(super) fn show_progress(&mut self) {
        let waiting = self.published.waiting.take();
        self.keep_waiting();
        self.show(false);
        self.published.waiting = waiting;
    }

    pub(super) fn show(&mut self, between: bool) {
        let desired = self.desired();
        let old = self.ctx.reporting.views.get(&self.pod_ref.uid);
        // A wait that continues keeps its start time.
        if let (Some(new), Some(old)) =
            (self.published.waiting.as_mut(), old.as_ref().and_then(|v| v.waiting.as_ref()))
            && new.reason == old.reason
            && new.container == old.container
        {
            new.since_unix_ns = old.since_unix_ns;
        }
        // Between two consecutive passes, the wait of the first is still valid.
        let waiting = match (&self.published.waiting, between) {
            (None, true) => old.as_ref().and_then(|v| v.waiting.clone()),
            (waiting, _) => waiting.clone(),
        };
        let view = PodView {
            pod_ref: self.pod_ref.clone(),
            source: desired.source,
            pod: Arc::clone(&self.pod),
            status: self.record.status.clone(),
            deletion: desired.pod.metadata.deletion_timestamp.clone(),
            worker: self.phase(),
            is_removed: desired.removed,
            waiting,
            decision: Arc::clone(&self.published.decision),
            created_unix_ns: self.published.accepted_unix_ns,
            resource_version: self.ctx.reporting.statuses.written_version(&self.pod_ref.uid),
            mirror_uid: desired.mirror.and_then(|m| m.metadata.uid.clone()).unwrap_or_default(),
            version: 0,
        };
        let same = old.is_some_and(|o| {
            (Arc::ptr_eq(&o.pod, &view.pod) || o.pod == view.pod)
                && o.status == view.status
                && o.deletion == view.deletion
                && o.worker == view.worker
                && same_wait(o.waiting.as_ref(), view.waiting.as_ref())
                && o.decision == view.decision
                && o.resource_version == view.resource_version
                && o.mirror_uid == view.mirror_uid
        });
        if !same {
            self.ctx.reporting.views.publish(&self.pod_ref.uid, view);
        }
    }

    pub(super) fn no_errors(&mut self) {
        if !self.published.decision.errors.is_empty() {
            Arc::make_mut(&mut self.published.decision).errors.clear();
        }
    }

    // Records a decision and the runtime state that it used.
    pub(crate) fn decided(&mut self, lines: Vec<String>, runtime: &PodRuntime) {
        let same = self.published.decision.lines == lines;
        if same && self.published.decision.saw == runtime.cursor {
            return;
        }
        let now = self.ctx.clock.boot();
        let decision = Arc::make_mut(&mut self.published.decision);
        decision.lines = lines;
        decision.at_unix_ns = unix_ns(self.ctx.clock.wall());
        decision.saw = runtime.cursor;
        decision.age_ms = now.saturating_sub(runtime.observed).as_secs_f64() * 1000.0;
        decision.trace_id = quintlet_telemetry::propagate::current_trace_id().unwrap_or_default();
    }
}

// Whether two waits look the same to a reader. Their ends differ by the jitter between two clocks.
fn same_wait(a: Option<&Waiting>, b: Option<&Waiting>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => {
            a.reason == b.reason
                && a.message == b.message
                && a.container == b.container
                && a.until_unix_ns.abs_diff(b.until_unix_ns) < 100_000_000
        }
        (None, None) => true,
        (Some(_), None) | (None, Some(_)) => false,
    }
}
