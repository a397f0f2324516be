//! Metrics, under the kubelet's names where it has one (pkg/kubelet/metrics/metrics.go).

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use quintlet_telemetry::metrics::{counter, counter_family, gauge, gauge_family, histogram_of};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct StateLabel {
    pub(crate) container_state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct KindLabel {
    pub(crate) kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ResultLabel {
    pub(crate) result: &'static str,
}

/// The kubelet's buckets of these: the Prometheus library's own.
const KUBELET_BUCKETS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

fn kubelet_histogram(name: &'static str, help: &'static str) -> Histogram {
    histogram_of(name, help, &KUBELET_BUCKETS)
}

#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    pub(crate) relist_duration: Histogram,
    pub(crate) relist_interval: Histogram,
    pub(crate) inspect_duration: Histogram,
    pub(crate) last_seen: Gauge,
    pub(crate) stream_errors: Gauge,
    pub(crate) stream_opens: Gauge,
    pub(crate) hint_latency: Histogram,
    pub(crate) running_pods: Gauge,
    pub(crate) running_containers: Family<StateLabel, Gauge>,
    pub(crate) unlabelled: Gauge,
    pub(crate) inspections: Family<ResultLabel, Counter>,
    pub(crate) hints: Family<KindLabel, Counter>,
    pub(crate) hints_lost: Counter,
    pub(crate) hints_unknown: Counter,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        Self {
            relist_duration: kubelet_histogram(
                "kubelet_pleg_relist_duration_seconds",
                "Duration of full lists",
            ),
            relist_interval: kubelet_histogram(
                "kubelet_pleg_relist_interval_seconds",
                "Time between the begins of full lists",
            ),
            inspect_duration: kubelet_histogram(
                "kubelet_pleg_pod_relist_duration_seconds",
                "Duration of inspections of one pod",
            ),
            last_seen: gauge(
                "kubelet_pleg_last_seen_seconds",
                "When the last successful list began, seconds since 1970",
            ),
            // Gauges, since counters would not bear the kubelet's names: OpenMetrics adds _total.
            stream_errors: gauge(
                "kubelet_evented_pleg_connection_error_count",
                "Hint streams that failed or ended",
            ),
            stream_opens: gauge("kubelet_evented_pleg_connection_success_count", "Hint streams opened"),
            hint_latency: kubelet_histogram(
                "kubelet_evented_pleg_connection_latency_seconds",
                "From the runtime's time of an event to its hint here",
            ),
            running_pods: gauge("kubelet_running_pods", "Pods with a ready sandbox"),
            running_containers: gauge_family("kubelet_running_containers", "Containers by state"),
            unlabelled: gauge(
                "quintlet_pleg_unlabelled_entries",
                "Sandboxes and containers without a pod uid, skipped",
            ),
            inspections: counter_family("quintlet_pleg_inspections", "Inspections by result"),
            hints: counter_family("quintlet_pleg_hints", "Hints received"),
            hints_lost: counter(
                "quintlet_pleg_hints_lost",
                "Hints lost on the way; each loss makes a full list",
            ),
            hints_unknown: counter("quintlet_pleg_hints_unknown", "Hints about ids that belong to no pod"),
        }
    }
}

/// What is counted of readers.
#[derive(Debug, Clone)]
pub(crate) struct ReaderMetrics {
    pub(crate) watchers: Gauge,
    pub(crate) resyncs: Counter,
    lifecycle_missed: Counter,
    discarded: Gauge,
}

impl ReaderMetrics {
    pub(crate) fn new() -> Self {
        Self {
            watchers: gauge("quintlet_pleg_watchers", "Open Watch streams"),
            resyncs: counter("quintlet_pleg_resyncs", "Watch streams that could not be resumed"),
            lifecycle_missed: counter(
                "quintlet_pleg_lifecycle_missed",
                "Lifecycle events slow readers missed",
            ),
            // A gauge for its name, as above. Nothing that decides reads these events, so none is lost to it.
            discarded: gauge("kubelet_pleg_discard_events", "Lifecycle events slow readers missed"),
        }
    }

    /// A reader missed so many lifecycle events.
    pub(crate) fn missed(&self, count: u64) {
        self.lifecycle_missed.inc_by(count);
        self.discarded.inc_by(i64::try_from(count).unwrap_or(i64::MAX));
    }
}

/// What is counted of following a leader.
#[derive(Debug, Clone)]
pub(crate) struct FollowerMetrics {
    pub(crate) connected: Gauge,
    pub(crate) connects: Counter,
}

impl FollowerMetrics {
    pub(crate) fn new() -> Self {
        Self {
            connected: gauge(
                "quintlet_pleg_leader_followed",
                "1 while what is served is what the leader has",
            ),
            connects: counter("quintlet_pleg_leader_connects", "Watch streams of the leader opened"),
        }
    }
}
