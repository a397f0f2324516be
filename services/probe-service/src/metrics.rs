//! The kubelet's probe metrics and our own.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use quintlet_model::ids::PodRef;
use quintlet_model::probe::{ProbeKey, ProbeType};
use quintlet_telemetry::metrics::{self, LatencyBuckets};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Total {
    probe_type: &'static str,
    result: &'static str,
    container: String,
    pod: String,
    namespace: String,
    pod_uid: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Seconds {
    probe_type: &'static str,
    container: String,
    pod: String,
    namespace: String,
}

/// What an evaluation counts as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counted {
    /// Passed.
    Successful,
    /// Failed.
    Failed,
    /// It says nothing.
    Unknown,
}

impl Counted {
    const ALL: [Self; 3] = [Self::Successful, Self::Failed, Self::Unknown];

    fn label(self) -> &'static str {
        match self {
            Self::Successful => "successful",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }
}

/// All of them.
#[derive(Debug, Clone)]
pub struct Metrics {
    total: Family<Total, Counter>,
    seconds: Family<Seconds, Histogram, LatencyBuckets>,
    /// Probes there are.
    pub workers: Gauge,
    /// Attempts that overlapped a stall of this process.
    pub stalls: Counter,
    /// Evaluations that no driver heard of in time.
    pub dropped: Counter,
    /// Evaluations that an observer was too slow for.
    pub missed: Counter,
}

impl Metrics {
    /// Registers them, or finds them registered.
    #[must_use]
    pub fn new() -> Self {
        Self {
            total: metrics::counter_family(
                "prober_probe",
                "Cumulative number of a liveness, readiness or startup probe for a container by result",
            ),
            seconds: metrics::histogram_family(
                "prober_probe_duration_seconds",
                "Duration in seconds for a probe response",
            ),
            workers: metrics::gauge("quintlet_probe_workers", "Probes there are"),
            stalls: metrics::counter(
                "quintlet_probe_stalls",
                "Attempts that overlapped a stall of the prober itself and were not counted as failures",
            ),
            dropped: metrics::counter(
                "quintlet_probe_unhealthy_dropped",
                "Failed evaluations dropped since the driver did not take them, bound 1024",
            ),
            missed: metrics::counter(
                "quintlet_probe_watch_missed",
                "Evaluations that observers missed by being slow, bound 1024 each",
            ),
        }
    }

    /// Counts one evaluation that took `took`; failures have no duration, as in the kubelet.
    pub fn evaluated(&self, pod: &PodRef, key: &ProbeKey, counted: Counted, took: Duration) {
        self.total.get_or_create(&total(pod, key, counted)).inc();
        match counted {
            Counted::Successful | Counted::Unknown => {
                self.seconds.get_or_create(&seconds(pod, key)).observe(took.as_secs_f64());
            }
            Counted::Failed => {}
        }
    }

    /// Removes the series of a probe that ended.
    pub fn remove(&self, pod: &PodRef, key: &ProbeKey) {
        for counted in Counted::ALL {
            self.total.remove(&total(pod, key, counted));
        }
        self.seconds.remove(&seconds(pod, key));
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

fn label(probe: ProbeType) -> &'static str {
    match probe {
        ProbeType::Startup => "Startup",
        ProbeType::Readiness => "Readiness",
        ProbeType::Liveness => "Liveness",
    }
}

fn total(pod: &PodRef, key: &ProbeKey, counted: Counted) -> Total {
    Total {
        probe_type: label(key.probe),
        result: counted.label(),
        container: key.container.clone(),
        pod: pod.name.to_string(),
        namespace: pod.namespace.to_string(),
        pod_uid: pod.uid.to_string(),
    }
}

fn seconds(pod: &PodRef, key: &ProbeKey) -> Seconds {
    Seconds {
        probe_type: label(key.probe),
        container: key.container.clone(),
        pod: pod.name.to_string(),
        namespace: pod.namespace.to_string(),
    }
}
