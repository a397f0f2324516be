//! Metrics, with the kubelet's names where it has them (`pkg/kubelet/metrics`).

use std::fmt;
use std::sync::{Arc, Once, Weak};

use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use quintlet_model::runtime::{ContainerState, SandboxState, SharedPodRuntime};
use quintlet_telemetry::metrics::{counter, counter_family, gauge, histogram_of, registry};

use crate::store::Store;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    container_state: &'static str,
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

/// The newest store of the process, whose pods and containers are counted at each scrape.
static COUNTED: Mutex<Weak<Store>> = Mutex::new(Weak::new());

/// Counts the pods and containers of a store at each scrape from now on.
pub(crate) fn count_at_scrapes(store: &Arc<Store>) {
    static ONCE: Once = Once::new();
    *COUNTED.lock() = Arc::downgrade(store);
    ONCE.call_once(|| registry().register_collector(Box::new(Running)));
}

#[derive(Debug)]
struct Running;

impl Collector for Running {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let pods = COUNTED.lock().upgrade().map(|store| store.pods()).unwrap_or_default();
        let is_running =
            |pod: &&SharedPodRuntime| pod.sandboxes.iter().any(|s| s.state == SandboxState::Ready);
        let gauge = |n: usize| ConstGauge::new(i64::try_from(n).unwrap_or(i64::MAX));
        let running = gauge(pods.iter().filter(is_running).count());
        let help = "Pods with a ready sandbox";
        running.encode(encoder.encode_descriptor(
            "kubelet_running_pods",
            help,
            None,
            running.metric_type(),
        )?)?;
        let name = "kubelet_running_containers";
        let mut family = encoder.encode_descriptor(name, "Containers by state", None, MetricType::Gauge)?;
        for (container_state, state) in [
            ("created", ContainerState::Created),
            ("running", ContainerState::Running),
            ("exited", ContainerState::Exited),
            ("unknown", ContainerState::Unknown),
        ] {
            let containers = pods.iter().flat_map(|pod| &pod.containers);
            let count = gauge(containers.filter(|c| c.state == state).count());
            count.encode(family.encode_family(&StateLabel { container_state })?)?;
        }
        Ok(())
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
