//! Metrics: those that the kubelet has for probes, and further ones.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use quintlet_model::ids::PodRef;
use quintlet_model::probe::{ProbeKey, ProbeType};
use quintlet_telemetry::metrics::{self, Buckets};

/// The default buckets of the Prometheus library, which the kubelet uses for probes
/// (`pkg/kubelet/prober: ProberDuration`).
const KUBELET_BUCKETS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

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

/// The counters of one probe, each from its first evaluation on. Its durations are not here: their series has
/// no UID, so that the end of another pod with the same name removes it.
#[derive(Debug, Default)]
pub struct Counters([Option<Counter>; 3]);

/// The label `result` of an evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counted {
    /// `successful`.
    Successful,
    /// `failed`.
    Failed,
    /// `unknown`.
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

/// The metrics. Clones share their values.
#[derive(Debug, Clone)]
pub struct Metrics {
    total: Family<Total, Counter>,
    seconds: Family<Seconds, Histogram, Buckets>,
    /// Seconds from the time that an evaluation was due to its start.
    pub lag: Histogram,
    /// Running workers, one per probe.
    pub workers: Gauge,
    /// `quintlet_probe_stalls`: attempts that did not count because the prober stalled.
    pub stalls: Counter,
    /// Failed evaluations that no driver took in time.
    pub dropped: Counter,
    /// Evaluations that slow observers missed.
    pub missed: Counter,
}

impl Metrics {
    /// Registers the metrics, or returns those that are registered.
    #[must_use]
    pub fn new() -> Self {
        Self {
            total: metrics::counter_family(
                "prober_probe",
                "Cumulative number of a liveness, readiness or startup probe for a container by result",
            ),
            seconds: metrics::histogram_family_of(
                "prober_probe_duration_seconds",
                "Duration in seconds for a probe response",
                KUBELET_BUCKETS,
            ),
            lag: metrics::histogram(
                "quintlet_probe_lag_seconds",
                "Time from the scheduled start of a probe to its start",
            ),
            workers: metrics::gauge("quintlet_probe_workers", "Number of probes"),
            stalls: metrics::counter(
                "quintlet_probe_stalls",
                "Probe attempts that did not count because the prober stalled",
            ),
            dropped: metrics::counter(
                "quintlet_probe_unhealthy_dropped",
                "Failed evaluations that were dropped because pod-sync did not read them in time; 1024 are kept",
            ),
            missed: metrics::counter(
                "quintlet_probe_watch_missed",
                "Evaluations that slow observers missed; 1024 are kept",
            ),
        }
    }

    /// Counts one evaluation. Failures have no duration (`pkg/kubelet/prober: prober.probe`).
    pub fn evaluated(
        &self,
        counters: &mut Counters,
        pod: &PodRef,
        key: &ProbeKey,
        counted: Counted,
        took: Duration,
    ) {
        let Counters([successful, failed, unknown]) = counters;
        let counter = match counted {
            Counted::Successful => successful,
            Counted::Failed => failed,
            Counted::Unknown => unknown,
        };
        counter.get_or_insert_with(|| self.total.get_or_create_owned(&total(pod, key, counted))).inc();
        match counted {
            Counted::Successful | Counted::Unknown => {
                self.seconds.get_or_create(&seconds(pod, key)).observe(took.as_secs_f64());
            }
            Counted::Failed => {}
        }
    }

    /// Removes the series of a probe.
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

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_model::ids::PodUid;

    /// Returns the values of the families whose names begin with `name`, for pods named `twin`.
    fn of_twins(name: &str) -> Vec<String> {
        let text = metrics::text();
        let lines = text.lines().filter(|l| l.starts_with(name) && l.contains("twin"));
        lines.filter_map(|l| l.rsplit(' ').next().map(str::to_owned)).collect()
    }

    #[test]
    fn durations_have_the_buckets_of_the_kubelet() {
        let metrics = Metrics::new();
        let pod = PodRef {
            uid: PodUid::parse("bucketed").unwrap(),
            namespace: "default".into(),
            name: "bucketed".into(),
        };
        let key = ProbeKey { uid: pod.uid.clone(), container: "c".into(), probe: ProbeType::Liveness };
        let took = Duration::from_millis(30);
        metrics.evaluated(&mut Counters::default(), &pod, &key, Counted::Successful, took);
        let text = metrics::text();
        let of_pod = |l: &&str| {
            l.starts_with("prober_probe_duration_seconds_bucket{") && l.contains("pod=\"bucketed\"")
        };
        let bounds: Vec<_> = text
            .lines()
            .filter(of_pod)
            .filter_map(|l| l.split_once("le=\"").and_then(|(_, rest)| rest.split('"').next()))
            .collect();
        let numbers: Vec<f64> =
            bounds.iter().filter_map(|b| b.parse().ok()).filter(|b: &f64| b.is_finite()).collect();
        let of_kubelet = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
        assert_eq!(numbers, of_kubelet, "{bounds:?}");
    }

    #[test]
    fn the_end_of_a_pod_leaves_the_metrics_of_another_one_with_its_name() {
        let metrics = Metrics::new();
        let [first, second] = ["twin-1", "twin-2"].map(|uid| {
            let uid = PodUid::parse(uid).unwrap();
            let key = ProbeKey { uid: uid.clone(), container: "c".into(), probe: ProbeType::Liveness };
            (PodRef { uid, namespace: "default".into(), name: "twin".into() }, key, Counters::default())
        });
        let [(old_pod, old_key, mut old), (pod, key, mut new)] = [first, second];
        let took = Duration::from_millis(1);
        metrics.evaluated(&mut old, &old_pod, &old_key, Counted::Successful, took);
        metrics.evaluated(&mut new, &pod, &key, Counted::Successful, took);
        metrics.remove(&old_pod, &old_key);
        metrics.evaluated(&mut new, &pod, &key, Counted::Successful, took);
        assert_eq!(of_twins("prober_probe_total"), ["2"]);
        assert_eq!(of_twins("prober_probe_duration_seconds_count"), ["1"], "since the removal");
    }
}
