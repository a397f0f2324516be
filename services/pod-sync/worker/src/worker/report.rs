//! Hands the status of the pod to status-reporter, and restores it after changes by other clients.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use pod_sync_clients::{EventType, StatusAck};
use pod_sync_decisions::reconcile::{self, CorrectionDue, StatusCorrections};
use pod_sync_records::PodRecord;
use quintlet_kit::clock::Clock;
use quintlet_kit::failpoint;
use quintlet_model::ids::PodRef;
use quintlet_model::pod as pods;
use quintlet_proto::status::v1 as status_wire;

use super::record::RecordFile;
use crate::context::{NodeConfig, Reporting};

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

/// A status to report.
pub(super) struct StatusReport {
    /// The desired pod.
    pub(super) pod: Arc<Pod>,
    /// The mirror of a static pod, as the API server has it.
    pub(super) mirror: Option<Arc<Pod>>,
    pub(super) status: PodStatus,
    /// Whether the pod may be deleted from the API server once this status is written.
    pub(super) finished: bool,
}

/// The reports of one pod.
pub(super) struct Reporter {
    clock: Clock,
    node: Arc<NodeConfig>,
    reporting: Arc<Reporting>,
    pod_ref: PodRef,
    // Version of the last report.
    version: u64,
    last: Option<Reported>,
    corrections: StatusCorrections,
    compared: Option<Comparison>,
    recheck_at: Option<Duration>,
    // The last report was too large for a message.
    is_shortened: bool,
    // The last part of the status that was left out, in the event about it.
    without: Option<String>,
    // A status of the API object was reported.
    has_reported: bool,
}

/// A comparison with the status in the API server.
struct Comparison {
    resource_version: String,
    // Version of the report.
    version: u64,
    needs_reconcile: bool,
}

impl Reporter {
    /// Returns the reporter of a pod. Versions go on where those of a previous pod with this UID ended:
    /// status-reporter keeps the newest.
    pub(super) fn new(
        clock: Clock,
        node: Arc<NodeConfig>,
        reporting: Arc<Reporting>,
        pod_ref: PodRef,
    ) -> Self {
        Self {
            version: u64::try_from(clock.boot().as_nanos()).unwrap_or_default(),
            clock,
            node,
            reporting,
            pod_ref,
            last: None,
            corrections: StatusCorrections::default(),
            compared: None,
            recheck_at: None,
            is_shortened: false,
            without: None,
            has_reported: false,
        }
    }

    /// Returns whether a status was reported for an object of the API server.
    pub(super) fn has_reported(&self) -> bool {
        self.has_reported
    }

    /// Returns the answer to the last report.
    pub(super) fn ack(&self) -> Option<StatusAck> {
        self.reporting.statuses.ack(&self.pod_ref.uid, self.version)
    }

    /// Returns the answer of the API server if it declines the status.
    pub(super) fn declined(&self) -> Option<String> {
        self.reporting.statuses.declined(&self.pod_ref.uid)
    }

    /// CLOCK_BOOTTIME at which a status that another client changed is compared again.
    pub(super) fn recheck_at(&self) -> Option<Duration> {
        self.recheck_at
    }

    /// Hands a new status to status-reporter. Records it before, together with the pod and the changes of
    /// `change`.
    pub(super) fn report(
        &mut self,
        record: &mut RecordFile,
        report: StatusReport,
        change: impl FnOnce(&mut PodRecord),
    ) {
        let StatusReport { pod, mirror, status, finished } = report;
        let object = mirror.as_ref().unwrap_or(&pod);
        let mut api_uid = object.metadata.uid.clone().unwrap_or_default();
        if let Some(last) = &self.last
            && last.api_uid != self.pod_ref.uid.as_str()
            && failpoint::planted!("status of a former mirror pod")
        {
            api_uid.clone_from(&last.api_uid);
        }
        // Equal statuses share one allocation.
        let before = record.status.clone();
        let status = match &before {
            Some(last) if **last == status => Arc::clone(last),
            Some(_) | None => Arc::new(status),
        };
        let is_static = pods::is_static(&pod);
        let has_object = self.node.has_api && (!is_static || mirror.is_some());
        record.update(|record| {
            record.pod = Some(Arc::clone(&pod));
            record.unreported = !has_object && (record.unreported || before.is_none());
            record.status = Some(Arc::clone(&status));
            change(record);
        });
        let reported = Reported {
            status: Arc::clone(&status),
            finished,
            api_uid: api_uid.clone(),
            deleting: object.metadata.deletion_timestamp.is_some(),
        };
        let resource_version = object.metadata.resource_version.clone().unwrap_or_default();
        let boot = self.clock.boot();
        if let Some(StatusAck::Shortened(without)) = self.ack() {
            self.report_shortened(object, &without);
        }
        let could_run = record.termination.as_ref().is_none_or(|t| !t.stopped);
        self.recheck_at = None;
        if self.last.as_ref() == Some(&reported) {
            if !has_object || !self.is_changed_by_others(object, &status, could_run) {
                return;
            }
            let was_accepted = matches!(self.ack(), Some(StatusAck::Written));
            if let CorrectionDue::At(at) = self.corrections.due(&resource_version, was_accepted, boot) {
                self.recheck_at = Some(at);
                return;
            }
            tracing::info!(pod.uid = %self.pod_ref.uid, version = resource_version, "status changed by another client, restoring it");
            self.corrections.record_correction(&resource_version, boot);
        } else {
            self.corrections.record_report(&resource_version, boot);
        }
        self.count(&pod, before.as_deref(), &status, record.accepted);
        self.version = self.version.saturating_add(1);
        if has_object {
            self.has_reported = true;
            let base_status = object.status.as_ref().and_then(|s| serde_json::to_vec(s).ok());
            let update = status_wire::PodStatusUpdate {
                uid: self.pod_ref.uid.to_string(),
                api_uid,
                name: self.pod_ref.name.to_string(),
                namespace: self.pod_ref.namespace.to_string(),
                owner_epoch: self.node.epoch,
                version: self.version,
                base_status: base_status.unwrap_or_default(),
                base_resource_version: resource_version,
                desired_status: record.status_json(),
                could_run,
                finished,
                deleting: object.metadata.deletion_timestamp.is_some(),
                mirror: is_static,
            };
            let without = self.reporting.statuses.report(&self.pod_ref.uid, update);
            self.is_shortened = without.is_some();
            if let Some(part) = without {
                self.report_shortened(object, &part.to_string());
            }
        }
        self.last = Some(reported);
    }

    /// Emits an event about a status that is written without a part, once per part.
    fn report_shortened(&mut self, object: &Pod, without: &str) {
        if self.without.as_deref() == Some(without) {
            return;
        }
        let message = format!("The status of the pod is too large and is written without {without}");
        self.reporting.events.pod(object, EventType::Warning, "StatusTooLarge", &message, "");
        self.without = Some(without.to_owned());
    }

    // Whether another client changed the status in the API server. Unknown while a write is in flight or the
    // watch is behind it; the acknowledgement and the watch both wake the worker.
    fn is_changed_by_others(&mut self, object: &Pod, status: &PodStatus, could_run: bool) -> bool {
        let settled = match self.ack() {
            Some(StatusAck::Written | StatusAck::Refused(_)) => !self.is_shortened,
            // The object lacks what was left out.
            Some(StatusAck::Shortened(_)) => false,
            Some(StatusAck::Gone | StatusAck::UidMismatch | StatusAck::NoApi | StatusAck::Deleted) | None => {
                false
            }
        };
        let base = object.metadata.resource_version.as_deref().unwrap_or_default();
        let written = self.reporting.statuses.written_version(&self.pod_ref.uid);
        if !settled || reconcile::is_older(base, &written) {
            return false;
        }
        if let Some(compared) = &self.compared
            && compared.resource_version == base
            && compared.version == self.version
        {
            return compared.needs_reconcile;
        }
        let needs_reconcile = reconcile::needs_reconcile(object.status.as_ref(), status, could_run);
        let (resource_version, version) = (base.to_owned(), self.version);
        self.compared = Some(Comparison { resource_version, version, needs_reconcile });
        needs_reconcile
    }

    fn count(&self, pod: &Arc<Pod>, before: Option<&PodStatus>, status: &PodStatus, accepted: Duration) {
        let metrics = &self.reporting.metrics;
        let before = before.or(pod.status.as_ref());
        metrics.status_changed(before, status);
        metrics.start_latency.status_changed(&self.pod_ref.uid, pod, status, self.clock.wall());
        if pod_sync_metrics::began_to_run(before, status) {
            let since = self.clock.boot().saturating_sub(accepted);
            metrics.pod_start.observe(since.as_secs_f64());
        }
    }
}
