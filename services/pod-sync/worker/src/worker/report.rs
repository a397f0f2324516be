//! Hands the status of the pod to status-reporter, and restores it after changes by other clients.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use pod_sync_clients::{EventType, StatusAck};
use pod_sync_decisions::reconcile::{self, CorrectionDue, StatusCorrections};
use pod_sync_records::PodRecord;
use quintlet_model::pod as pods;
use quintlet_proto::status::v1 as status_wire;

use super::Worker;

/// The last report to status-reporter.
#[derive(Debug)]
struct Reported {
    status: Arc<PodStatus>,
    finished: bool,
    api_uid: String,
    deleting: bool,
}

impl PartialEq for Reported {
    fn eq(&self, other: &Self) -> bool {
        let Self { status, finished, api_uid, deleting } = self;
        *finished == other.finished
            && *api_uid == other.api_uid
            && *deleting == other.deleting
            // Equal statuses mostly share one allocation.
            && (Arc::ptr_eq(status, &other.status) || *status == other.status)
    }
}

/// The reports of one pod.
pub(super) struct StatusReport {
    /// Version of the last report.
    pub(super) version: u64,
    last: Option<Reported>,
    corrections: StatusCorrections,
    // The last comparison with the API server: version of the object, version of the report, and whether they differ.
    compared: Option<(String, u64, bool)>,
    /// CLOCK_BOOTTIME at which a status that another client changed is compared again.
    pub(super) recheck_at: Option<Duration>,
    /// The last report was too large for a message.
    is_shortened: bool,
    /// The last part of the status that was left out, in the event about it.
    without: Option<String>,
}

impl StatusReport {
    pub(super) fn new(version: u64) -> Self {
        Self {
            version,
            last: None,
            corrections: StatusCorrections::default(),
            compared: None,
            recheck_at: None,
            is_shortened: false,
            without: None,
        }
    }
}

impl Worker {
    /// Hands a new status to status-reporter. Records it before, together with the pod and the changes of `record`.
    pub(super) fn report(&mut self, status: PodStatus, finished: bool, record: impl FnOnce(&mut PodRecord)) {
        let mirror = self.desired().mirror;
        let object = Arc::clone(mirror.as_ref().unwrap_or(&self.pod));
        // Equal statuses share one allocation.
        let status = match &self.record.status {
            Some(last) if **last == status => Arc::clone(last),
            Some(_) | None => Arc::new(status),
        };
        let reported = Reported {
            status: Arc::clone(&status),
            finished,
            api_uid: object.metadata.uid.clone().unwrap_or_default(),
            deleting: object.metadata.deletion_timestamp.is_some(),
        };
        let before = self.record.status.clone();
        self.record.update(|all| {
            all.pod = Some(Arc::clone(&self.pod));
            all.status = Some(Arc::clone(&status));
            record(all);
        });
        let base = object.metadata.resource_version.as_deref().unwrap_or_default();
        let boot = self.ctx.clock.boot();
        if let Some(StatusAck::Shortened(without)) =
            self.ctx.reporting.statuses.ack(&self.pod_ref.uid, self.status_report.version)
        {
            self.report_shortened(&object, &without);
        }
        self.status_report.recheck_at = None;
        if self.status_report.last.as_ref() == Some(&reported) {
            if !self.is_changed_by_others(&object, &status) {
                return;
            }
            if let CorrectionDue::At(at) = self.status_report.corrections.due(base, boot) {
                self.status_report.recheck_at = Some(at);
                return;
            }
            tracing::info!(pod.uid = %self.pod_ref.uid, version = base, "status changed by another client, restoring it");
            self.status_report.corrections.record_correction(base, boot);
        } else {
            self.status_report.corrections.record_report(base, boot);
        }
        self.count(before.as_deref(), &status);
        self.status_report.version = self.status_report.version.saturating_add(1);
        let could_run = self.could_run();
        let is_static = pods::is_static(&self.pod);
        if self.ctx.node.has_api && (!is_static || mirror.is_some()) {
            let base_status = object.status.as_ref().and_then(|s| serde_json::to_vec(s).ok());
            let update = status_wire::PodStatusUpdate {
                uid: self.pod_ref.uid.to_string(),
                api_uid: object.metadata.uid.clone().unwrap_or_default(),
                name: self.pod_ref.name.to_string(),
                namespace: self.pod_ref.namespace.to_string(),
                owner_epoch: self.ctx.node.epoch,
                version: self.status_report.version,
                base_status: base_status.unwrap_or_default(),
                base_resource_version: object.metadata.resource_version.clone().unwrap_or_default(),
                desired_status: self.record.status_json(),
                could_run,
                finished,
                deleting: object.metadata.deletion_timestamp.is_some(),
                mirror: is_static,
            };
            let without = self.ctx.reporting.statuses.report(&self.pod_ref.uid, update);
            self.status_report.is_shortened = without.is_some();
            if let Some(part) = without {
                self.report_shortened(&object, &part.to_string());
            }
        }
        self.status_report.last = Some(reported);
    }

    // Emits an event about a status that is written without a part, once per part.
    fn report_shortened(&mut self, object: &Pod, without: &str) {
        if self.status_report.without.as_deref() == Some(without) {
            return;
        }
        let message = format!("The status of the pod is too large and is written without {without}");
        self.ctx.reporting.events.pod(object, EventType::Warning, "StatusTooLarge", &message, "");
        self.status_report.without = Some(without.to_owned());
    }

    pub(super) fn could_run(&self) -> bool {
        self.record.termination.as_ref().is_none_or(|t| !t.stopped)
    }

    // Whether another client changed the status in the API server. Unknown while a write is in flight or the watch is behind
    // it; the acknowledgement and the watch both wake the worker.
    pub(super) fn is_changed_by_others(&mut self, object: &Pod, status: &PodStatus) -> bool {
        let is_there = !pods::is_static(&self.pod) || self.desired().mirror.is_some();
        if !self.ctx.node.has_api || !is_there {
            return false;
        }
        let settled = match self.ctx.reporting.statuses.ack(&self.pod_ref.uid, self.status_report.version) {
            Some(StatusAck::Written | StatusAck::Refused(_)) => !self.status_report.is_shortened,
            // The object lacks what was left out.
            Some(StatusAck::Shortened(_)) => false,
            Some(StatusAck::Gone | StatusAck::UidMismatch | StatusAck::NoApi | StatusAck::Deleted) | None => {
                false
            }
        };
        let base = object.metadata.resource_version.as_deref().unwrap_or_default();
        if !settled
            || reconcile::is_older(base, &self.ctx.reporting.statuses.written_version(&self.pod_ref.uid))
        {
            return false;
        }
        if let Some((of, version, needs_reconcile)) = &self.status_report.compared
            && of == base
            && *version == self.status_report.version
        {
            return *needs_reconcile;
        }
        let needs_reconcile = reconcile::needs_reconcile(object.status.as_ref(), status, self.could_run());
        self.status_report.compared = Some((base.to_owned(), self.status_report.version, needs_reconcile));
        needs_reconcile
    }

    fn count(&self, before: Option<&PodStatus>, status: &PodStatus) {
        let old = before.or(self.pod.status.as_ref());
        self.ctx.reporting.metrics.status_changed(old, status);
        self.ctx.reporting.metrics.start_latency.status_changed(
            &self.pod_ref.uid,
            &self.pod,
            status,
            self.ctx.clock.wall(),
        );
        if pod_sync_metrics::began_to_run(old, status) {
            let since = self.ctx.clock.boot().saturating_sub(self.record.accepted);
            self.ctx.reporting.metrics.pod_start.observe(since.as_secs_f64());
        }
    }
}
