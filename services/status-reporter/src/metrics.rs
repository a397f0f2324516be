//! Metrics of status-reporter.

use std::sync::OnceLock;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use quintlet_telemetry::metrics as registry;

use crate::update::UpdateOutcome;

/// Buckets of the kubelet's metric, in seconds.
const SYNC_BUCKETS: [f64; 11] = [0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0];

/// Codes of answers that a policy, a webhook, an overloaded API server or missing credentials give. Their
/// series exist from the start: `rate()` does not observe the first increase of a series that appears with
/// it.
const CODES: [u16; 12] = [400, 401, 403, 405, 413, 415, 422, 429, 500, 502, 503, 504];

/// Label of the outcome of an update.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct AckLabel {
    verdict: &'static str,
}

/// Label of a failed write.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CodeLabel {
    /// HTTP status code, or `none` without an answer.
    code: String,
}

impl CodeLabel {
    fn new(code: Option<u16>) -> Self {
        Self { code: code.map_or_else(|| "none".to_owned(), |code| code.to_string()) }
    }
}

/// The metrics. Clones share their values.
#[derive(Debug, Clone)]
pub struct Metrics {
    /// Pods with a status.
    pub pods: Gauge,
    /// Requests for pods that the API server has not answered.
    pub in_flight: Gauge,
    /// Acknowledged updates by outcome.
    pub acks: Family<AckLabel, Counter>,
    /// Failed attempts that are retried.
    pub failures: Family<CodeLabel, Counter>,
    /// Latency from the first unwritten change to the write.
    pub sync_seconds: Histogram,
    /// Events that were lost because the queue was full.
    pub events_dropped: Counter,
    /// Events that the spam filter dropped.
    pub events_filtered: Counter,
    /// Events in the queue.
    pub events_queued: Gauge,
}

impl Metrics {
    /// Registers the metrics, or returns those that are registered.
    #[must_use]
    pub fn register() -> Self {
        let metrics = Self {
            pods: registry::gauge("quintlet_status_pods", "Pods with a status known to status-reporter"),
            in_flight: registry::gauge("quintlet_status_writes_in_flight", "Status writes in flight"),
            acks: registry::counter_family("quintlet_status_acks", "Acks sent to pod-sync by verdict"),
            failures: registry::counter_family(
                "quintlet_status_write_failures",
                "Writes of statuses and final deletions that must be repeated, by HTTP status code of the answer",
            ),
            sync_seconds: sync_seconds(),
            events_dropped: registry::counter(
                "quintlet_events_dropped",
                "Events lost because the queue was full",
            ),
            events_filtered: registry::counter(
                "quintlet_events_filtered",
                "Events held back by the spam filter",
            ),
            events_queued: registry::gauge("quintlet_events_queued", "Events waiting to be written"),
        };
        for code in CODES.map(Some).into_iter().chain([None]) {
            drop(metrics.failures.get_or_create(&CodeLabel::new(code)));
        }
        metrics
    }

    pub(crate) fn failed(&self, code: Option<u16>) {
        self.failures.get_or_create(&CodeLabel::new(code)).inc();
    }

    pub(crate) fn acked(&self, verdict: &UpdateOutcome) {
        let verdict = match verdict {
            UpdateOutcome::Written(_) | UpdateOutcome::Shortened { .. } => "written",
            UpdateOutcome::Gone => "gone",
            UpdateOutcome::UidMismatch(_) => "uid_mismatch",
            UpdateOutcome::Refused(_) => "refused",
            UpdateOutcome::Retrying(_) => "retrying",
            UpdateOutcome::NoApi => "no_api",
            UpdateOutcome::Queued(_) => "queued",
            UpdateOutcome::Deleted => "deleted",
        };
        self.acks.get_or_create(&AckLabel { verdict }).inc();
    }
}

/// Registers a histogram with the kubelet's buckets.
fn sync_seconds() -> Histogram {
    static SYNC_SECONDS: OnceLock<Histogram> = OnceLock::new();
    let made = SYNC_SECONDS.get_or_init(|| {
        let histogram = Histogram::new(SYNC_BUCKETS);
        registry::registry().register(
            "kubelet_pod_status_sync_duration_seconds",
            "Seconds from a changed pod status to its write",
            histogram.clone(),
        );
        histogram
    });
    made.clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_series_of_failed_writes_exist_before_the_first_failure() {
        let _registered = Metrics::register();
        let text = registry::text();
        for code in ["none", "400", "403", "422", "503"] {
            let series = format!("quintlet_status_write_failures_total{{code=\"{code}\"}} ");
            assert!(text.contains(&series), "{series}: {text}");
        }
    }
}
