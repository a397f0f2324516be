//! Gauges of pods by source and state (pkg/kubelet/kubelet_pods.go: HandlePodCleanups).

use std::collections::BTreeMap;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_telemetry::metrics::{counter, counter_family, gauge, gauge_family};

/// Label of the source of a pod: "true" for a static pod.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StaticLabel {
    r#static: &'static str,
}

/// Labels of the state of a pod worker, and of whether the pod is desired.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
struct WorkingLabel {
    lifecycle: &'static str,
    config: &'static str,
    r#static: &'static str,
}

const LIFECYCLES: [&str; 3] = ["sync", "terminating", "terminated"];
/// Whether a pod is desired, with whether it is static. Pods that only the runtime has may be either.
const CONFIGS: [(&str, &str); 5] =
    [("desired", "true"), ("desired", ""), ("orphan", "true"), ("orphan", ""), ("runtime_only", "unknown")];

/// A pod with a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counted {
    /// Phase of the worker: sync, terminating, terminated or finished; empty before its first sync.
    pub worker: &'static str,
    /// Whether the pod comes from a manifest.
    pub is_static: bool,
    /// Whether the source no longer has the pod.
    pub is_removed: bool,
    /// The pod has terminated and uses no resources.
    pub is_terminated: bool,
}

/// Numbers of pods, by the source that desires them and the phase of their workers.
#[derive(Debug, Clone)]
pub struct Census {
    desired: Family<StaticLabel, Gauge>,
    active: Family<StaticLabel, Gauge>,
    mirrors: Gauge,
    working: Family<WorkingLabel, Gauge>,
    orphaned: Counter,
    restarted: Family<StaticLabel, Counter>,
}

impl Default for Census {
    fn default() -> Self {
        Self {
            desired: gauge_family(
                "kubelet_desired_pods",
                "The number of pods the kubelet is being instructed to run. static is true if the pod is not from the apiserver",
            ),
            active: gauge_family(
                "kubelet_active_pods",
                "The number of pods the kubelet considers active and which are being considered when admitting new pods. static is \
                 true if the pod is not from the apiserver",
            ),
            mirrors: gauge(
                "kubelet_mirror_pods",
                "The number of mirror pods the kubelet will try to create (one per admitted static pod)",
            ),
            working: gauge_family(
                "kubelet_working_pods",
                "Number of pods the kubelet is actually running, broken down by lifecycle phase, whether the pod is desired, \
                 orphaned, or runtime only (also orphaned), and whether the pod is static. An orphaned pod has been removed from \
                 local configuration or force deleted in the API and consumes resources that are not otherwise visible",
            ),
            orphaned: counter(
                "kubelet_orphaned_runtime_pods",
                "Number of pods that have been detected in the container runtime without being already known to the pod worker. This \
                 typically indicates the kubelet was restarted while a pod was force deleted in the API or in the local \
                 configuration, which is unusual",
            ),
            restarted: counter_family(
                "kubelet_restarted_pods",
                "Number of pods that have been restarted because they were deleted and recreated with the same UID while the kubelet \
                 was watching them (common for static pods, extremely uncommon for API pods)",
            ),
        }
    }
}

impl Census {
    /// Sets the gauges. `runtime_only` is the number of pods that only the runtime has and that are being
    /// removed.
    pub fn set(&self, pods: &[Counted], mirrors: usize, runtime_only: usize) {
        let gauge = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        for (is_static, label) in [(false, ""), (true, "true")] {
            let count = |wanted: fn(&Counted) -> bool| {
                gauge(pods.iter().filter(|p| p.is_static == is_static && wanted(p)).count())
            };
            let label = StaticLabel { r#static: label };
            // A counter that exists from the start shows the first increase.
            drop(self.restarted.get_or_create(&label));
            self.desired.get_or_create(&label).set(count(|p| !p.is_removed));
            self.active.get_or_create(&label).set(count(|p| !p.is_removed && !p.is_terminated));
        }
        self.mirrors.set(gauge(mirrors));
        for (label, count) in working(pods, runtime_only) {
            self.working.get_or_create(&label).set(gauge(count));
        }
    }

    /// Counts a pod that starts after a previous pod with its UID terminated.
    pub fn count_restart(&self, is_static: bool) {
        let label = StaticLabel { r#static: if is_static { "true" } else { "" } };
        self.restarted.get_or_create(&label).inc();
    }

    /// Counts a pod that the runtime has and pod-sync does not know.
    pub fn count_orphan(&self) {
        self.orphaned.inc();
    }
}

/// Returns the counts of all label combinations, including zeros.
fn working(pods: &[Counted], runtime_only: usize) -> BTreeMap<WorkingLabel, usize> {
    let mut counts = BTreeMap::new();
    for lifecycle in LIFECYCLES {
        for (config, is_static) in CONFIGS {
            counts.insert(WorkingLabel { lifecycle, config, r#static: is_static }, 0);
        }
    }
    for pod in pods {
        let lifecycle = match pod.worker {
            "finished" => "terminated",
            known => known,
        };
        let config = if pod.is_removed { "orphan" } else { "desired" };
        let is_static = if pod.is_static { "true" } else { "" };
        // A pod without a phase has no worker yet and is not counted.
        if let Some(count) = counts.get_mut(&WorkingLabel { lifecycle, config, r#static: is_static }) {
            *count = usize::saturating_add(*count, 1);
        }
    }
    let of_runtime = WorkingLabel { lifecycle: "terminating", config: "runtime_only", r#static: "unknown" };
    counts.insert(of_runtime, runtime_only);
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_are_counted_by_phase_and_by_whether_they_are_desired() {
        let pod = |worker, is_static, is_removed, is_terminated| Counted {
            worker,
            is_static,
            is_removed,
            is_terminated,
        };
        let pods = [
            pod("sync", false, false, false),
            pod("sync", false, false, false),
            pod("finished", false, false, true),
            pod("terminating", false, true, false),
            pod("terminating", true, true, false),
            pod("terminated", true, false, true),
            pod("", true, false, false),
        ];
        let census = Census::default();
        census.set(&pods, 4, 5);
        census.count_restart(true);
        let text = quintlet_telemetry::metrics::text();
        let working = |lifecycle: &str, config: &str, is_static: &str| {
            format!(
                "kubelet_working_pods{{lifecycle=\"{lifecycle}\",config=\"{config}\",static=\"{is_static}\"}}"
            )
        };
        for (series, value) in [
            ("kubelet_desired_pods{static=\"\"}".to_owned(), 3),
            ("kubelet_desired_pods{static=\"true\"}".to_owned(), 2),
            ("kubelet_active_pods{static=\"\"}".to_owned(), 2),
            ("kubelet_active_pods{static=\"true\"}".to_owned(), 1),
            ("kubelet_mirror_pods".to_owned(), 4),
            (working("sync", "desired", ""), 2),
            (working("terminated", "desired", ""), 1),
            (working("terminated", "desired", "true"), 1),
            (working("terminating", "orphan", ""), 1),
            (working("terminating", "orphan", "true"), 1),
            (working("terminating", "runtime_only", "unknown"), 5),
            (working("sync", "runtime_only", "unknown"), 0),
            ("kubelet_restarted_pods_total{static=\"true\"}".to_owned(), 1),
            ("kubelet_restarted_pods_total{static=\"\"}".to_owned(), 0),
        ] {
            let line = format!("{series} {value}");
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        assert_eq!(text.lines().filter(|l| l.starts_with("kubelet_working_pods{")).count(), 15);
        census.set(&[], 0, 0);
        let text = quintlet_telemetry::metrics::text();
        assert!(
            text.lines().filter(|l| l.starts_with("kubelet_working_pods{")).all(|l| l.ends_with(" 0")),
            "removed pods count as zero: {text}"
        );
    }
}
