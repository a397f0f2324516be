//! Metrics, with the kubelet's names where it has them (`pkg/kubelet/metrics`).

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
pub(crate) struct InspectionLabel {
    pub(crate) result: &'static str,
    pub(crate) cause: &'static str,
}

/// The default buckets of the Prometheus library, which the kubelet uses for these metrics.
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
    pub(crate) inspections: Family<InspectionLabel, Counter>,
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
                "Interval between the starts of full lists",
            ),
            inspect_duration: kubelet_histogram(
                "kubelet_pleg_pod_relist_duration_seconds",
                "Duration of the inspection of one pod",
            ),
            last_seen: gauge(
                "kubelet_pleg_last_seen_seconds",
                "Start of the last successful list, in seconds since 1970",
            ),
            // Gauges, since OpenMetrics adds _total to the names of counters, unlike the kubelet.
            stream_errors: gauge(
                "kubelet_evented_pleg_connection_error_count",
                "Hint streams that failed or ended",
            ),
            stream_opens: gauge("kubelet_evented_pleg_connection_success_count", "Hint streams opened"),
            hint_latency: kubelet_histogram(
                "kubelet_evented_pleg_connection_latency_seconds",
                "Latency from an event of the runtime to its hint",
            ),
            running_pods: gauge("kubelet_running_pods", "Pods with a ready sandbox"),
            running_containers: gauge_family("kubelet_running_containers", "Containers by state"),
            unlabelled: gauge(
                "quintlet_pleg_unlabelled_entries",
                "Sandboxes and containers that are ignored because they have no pod UID",
            ),
            inspections: counter_family("quintlet_pleg_inspections", "Inspections by result and cause"),
            hints: counter_family("quintlet_pleg_hints", "Hints received"),
            hints_lost: counter(
                "quintlet_pleg_hints_lost",
                "Hints that were lost; each loss triggers a full list",
            ),
            hints_unknown: counter("quintlet_pleg_hints_unknown", "Hints about IDs that belong to no pod"),
        }
    }
}

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
                "Lifecycle events that slow readers missed",
            ),
            // A gauge for the reason above.
            discarded: gauge("kubelet_pleg_discard_events", "Lifecycle events that slow readers missed"),
        }
    }

    pub(crate) fn missed(&self, count: u64) {
        self.lifecycle_missed.inc_by(count);
        self.discarded.inc_by(i64::try_from(count).unwrap_or(i64::MAX));
    }
}

/// Metrics of a follower.
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
                "1 while this follower serves the current state of the leader",
            ),
            connects: counter("quintlet_pleg_leader_connects", "Watch streams of the leader opened"),
        }
    }
}
