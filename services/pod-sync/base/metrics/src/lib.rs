//! Metrics of pods, under the names of the kubelet (pkg/kubelet/metrics, pkg/volume/util).
//!
//! [`PodMetrics`] has counters and histograms of starts, restarts and syncs; [`Census`] counts pods by state;
//! [`StartLatency`] measures the start latency of the scalability SLO; [`Operations`] measures what is done
//! for pods. There are no tasks and no channels.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod census;
mod operations;
mod sli;

pub use crate::census::{Census, Counted};
pub use crate::operations::{CgroupOperation, ImageRemoval, Operations};
pub use crate::sli::StartLatency;

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus, ResourceRequirements};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use quintlet_model::pod;
use quintlet_model::qos::{self, QosClass};
use quintlet_telemetry::metrics::{
    Buckets, counter, counter_family, float_gauge, gauge, gauge_family, histogram_family_of, histogram_of,
};

/// Buckets of the pod start duration, in seconds.
const POD_START: [f64; 25] = [
    0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0,
    480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
];
/// Default buckets of Prometheus.
const WORKER: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
/// Label of the list of the spec that has the container.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ContainerLabel {
    container_type: &'static str,
}

/// Labels of a failed container start.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct StartErrorLabel {
    container_type: &'static str,
    code: String,
}

/// Labels of a container exit.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct TerminatedLabel {
    container_type: &'static str,
    exit_code: i32,
    reason: String,
}

/// Label of a sync of a pod worker.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OperationLabel {
    operation_type: &'static str,
}

/// Label of the runtime handler of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct HandlerLabel {
    runtime_handler: String,
}

/// Label of the reason of a rejection.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RejectionLabel {
    reason: String,
}

/// Labels of an admission (KEP-2837).
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct AdmissionLabels {
    config_mode: &'static str,
    status: &'static str,
    qos_class: &'static str,
}

/// Label of the resource for which a pod was preempted.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct PreemptionLabel {
    preemption_signal: String,
}

/// Label of the method by which a volume was measured.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct SourceLabel {
    metric_source: &'static str,
}

/// Value of `container_type` for init containers.
pub const INIT: &str = "init_container";
/// Value of `container_type` for the containers of `spec.containers`.
pub const REGULAR: &str = "container";
/// Value of `container_type` for ephemeral containers.
pub const EPHEMERAL: &str = "ephemeral_container";

/// Metrics of pods. All instances share the series of the process.
#[derive(Debug, Clone)]
pub struct PodMetrics {
    /// Requests to the runtime to start the sandbox of a pod.
    pub started_pods: Counter,
    /// Pods whose sandbox the runtime refused to start.
    pub started_pods_errors: Counter,
    /// HTTPS lifecycle hooks that fell back to HTTP, because the server answered in HTTP.
    pub http_fallbacks: Counter,
    started_containers: Family<ContainerLabel, Counter>,
    started_containers_errors: Family<StartErrorLabel, Counter>,
    terminated: Family<TerminatedLabel, Counter>,
    /// Seconds from the first observation of a pod until it runs.
    pub pod_start: Histogram,
    worker: Family<OperationLabel, Histogram, Buckets>,
    measured: Family<SourceLabel, Histogram, Buckets>,
    sandboxes: Family<HandlerLabel, Histogram, Buckets>,
    sandbox_errors: Family<HandlerLabel, Counter>,
    admissions: Family<AdmissionLabels, Counter>,
    rejections: Family<RejectionLabel, Counter>,
    // A gauge, since OpenMetrics adds _total to the names of counters, unlike the kubelet.
    preemptions: Family<PreemptionLabel, Gauge>,
    /// Numbers of pods.
    pub census: Census,
    /// Service level indicators of pod starts.
    pub start_latency: StartLatency,
    /// Operations on images, volumes, cgroups and resources of pods.
    pub operations: Operations,
    /// Start of the last graceful node shutdown, in seconds since 1970.
    pub shutdown_start: Gauge<f64, AtomicU64>,
    /// Time at which all pods had terminated in that shutdown, in seconds since 1970.
    pub shutdown_end: Gauge<f64, AtomicU64>,
}

impl Default for PodMetrics {
    fn default() -> Self {
        Self {
            started_pods: counter("kubelet_started_pods", "Cumulative number of pods started"),
            http_fallbacks: counter(
                "kubelet_lifecycle_handler_http_fallbacks",
                "The number of times lifecycle handlers successfully fell back to http from https",
            ),
            started_pods_errors: counter(
                "kubelet_started_pods_errors",
                "Cumulative number of errors when starting pods",
            ),
            started_containers: counter_family(
                "kubelet_started_containers",
                "Cumulative number of containers started",
            ),
            started_containers_errors: counter_family(
                "kubelet_started_containers_errors",
                "Cumulative number of errors when starting containers",
            ),
            terminated: counter_family(
                "kubelet_terminated_containers",
                "Cumulative number of containers that ended, by type, exit code and reason",
            ),
            pod_start: histogram_of(
                "kubelet_pod_start_duration_seconds",
                "Duration in seconds from seeing a pod for the first time to the pod running",
                &POD_START,
            ),
            measured: histogram_family_of(
                "kubelet_volume_metric_collection_duration_seconds",
                "Duration in seconds to calculate volume stats",
                WORKER,
            ),
            sandboxes: histogram_family_of(
                "kubelet_run_podsandbox_duration_seconds",
                "Duration in seconds of the run_podsandbox operations. Broken down by RuntimeClass.Handler",
                WORKER,
            ),
            sandbox_errors: counter_family(
                "kubelet_run_podsandbox_errors",
                "Cumulative number of the run_podsandbox operation errors by RuntimeClass.Handler",
            ),
            admissions: counter_family(
                "kubelet_pod_level_resources_admission",
                "Number of pods that admission has decided on, by where they have their resources, result and QoS class",
            ),
            rejections: counter_family(
                "kubelet_admission_rejections",
                "Cumulative number pod admission rejections by the Kubelet",
            ),
            preemptions: gauge_family(
                "kubelet_preemptions",
                "Cumulative number of pod preemptions by preemption resource",
            ),
            census: Census::default(),
            start_latency: StartLatency::default(),
            operations: Operations::default(),
            worker: histogram_family_of(
                "kubelet_pod_worker_duration_seconds",
                "Duration in seconds of a pass over a pod, by operation type: create, update, sync, kill or terminated",
                WORKER,
            ),
            shutdown_start: float_gauge(
                "kubelet_graceful_shutdown_start_time_seconds",
                "Last graceful shutdown start time since unix epoch in seconds",
            ),
            shutdown_end: float_gauge(
                "kubelet_graceful_shutdown_end_time_seconds",
                "Last graceful shutdown end time since unix epoch in seconds",
            ),
        }
    }
}

impl PodMetrics {
    /// Counts an attempt to start a container.
    pub fn container_starting(&self, container_type: &'static str) {
        self.started_containers.get_or_create(&ContainerLabel { container_type }).inc();
    }

    /// Counts a failed start of a container.
    pub fn container_start_failed(&self, container_type: &'static str, reason: &str) {
        let label = StartErrorLabel { container_type, code: reason.to_owned() };
        self.started_containers_errors.get_or_create(&label).inc();
    }

    /// Records the duration of a sync of a pod worker.
    pub fn sync_completed(&self, operation_type: &'static str, took: Duration) {
        self.worker.get_or_create(&OperationLabel { operation_type }).observe(took.as_secs_f64());
    }

    /// Records a RunPodSandbox call.
    pub fn sandbox_started(&self, handler: &str, took: Duration, ok: bool) {
        let label = HandlerLabel { runtime_handler: handler.to_owned() };
        self.sandboxes.get_or_create(&label).observe(took.as_secs_f64());
        if !ok {
            self.sandbox_errors.get_or_create(&label).inc();
        }
    }

    /// Counts a pod that admission rejected.
    pub fn pod_rejected(&self, reason: &str) {
        self.rejections.get_or_create(&RejectionLabel { reason: rejection(reason).to_owned() }).inc();
    }

    /// Counts a pod that admission has decided on, by where it has its resources.
    pub fn pod_decided(&self, pod: &Pod, is_admitted: bool) {
        let labels = AdmissionLabels {
            config_mode: config_mode(pod),
            status: if is_admitted { "admitted" } else { "rejected" },
            qos_class: match qos::qos_class(pod) {
                QosClass::Guaranteed => "guaranteed",
                QosClass::Burstable => "burstable",
                QosClass::BestEffort => "best_effort",
            },
        };
        self.admissions.get_or_create(&labels).inc();
    }

    /// Counts a pod that was preempted for the first resource that was insufficient.
    pub fn pod_preempted(&self, resource: &str) {
        self.preemptions.get_or_create(&PreemptionLabel { preemption_signal: resource.to_owned() }).inc();
    }

    /// Records a measurement of a volume, by its project or by walking it.
    pub fn volume_measured(&self, by_project: bool, took: Duration) {
        let metric_source = if by_project { "fsquota" } else { "du" };
        self.measured.get_or_create(&SourceLabel { metric_source }).observe(took.as_secs_f64());
    }

    /// Counts the containers that have terminated since the `old` status of a pod.
    pub fn status_changed(&self, old: Option<&PodStatus>, new: &PodStatus) {
        for ended in terminations(old, new) {
            self.terminated.get_or_create(&ended).inc();
        }
    }
}

fn config_mode(pod: &Pod) -> &'static str {
    let spec = pod::spec(pod);
    let has_resources = |resources: Option<&ResourceRequirements>| {
        resources.is_some_and(|r| {
            [&r.requests, &r.limits].into_iter().flatten().any(|amounts| !amounts.is_empty())
        })
    };
    let mut containers = spec.containers.iter().chain(pod::init_containers(pod));
    match (has_resources(spec.resources.as_ref()), containers.any(|c| has_resources(c.resources.as_ref()))) {
        (false, _) => "container_level",
        (true, false) => "pod_level_only",
        (true, true) => "pod_and_container_level",
    }
}

/// Reasons that are label values (pkg/kubelet/kubelet.go: admissionRejectionReasons).
const REJECTIONS: [&str; 21] = [
    "AppArmor",
    "Evicted",
    "InitContainerRestartPolicyForbidden",
    "InvalidNodeInfo",
    "NodeShutdown",
    "OutOfcpu",
    "OutOfephemeral-storage",
    "OutOfmemory",
    "OutOfpods",
    "PodFeatureUnsupported",
    "PodLevelResourcesNotSupported",
    "PodOSNotSupported",
    "PodOSSelectorNodeLabelDoesNotMatch",
    "SupplementalGroupsPolicyNotSupported",
    "SysctlForbidden",
    "TopologyAffinityError",
    "UnexpectedAdmissionError",
    "UnexpectedPredicateFailureType",
    "UnknownReason",
    "VolumeAttachmentLimitExceeded",
    "node(s) had taints that the pod didn't tolerate",
];

/// Returns the label value of a reason. Names of extended resources are unbounded and share one value.
fn rejection(reason: &str) -> &str {
    match reason {
        known if REJECTIONS.contains(&known) => known,
        extended if extended.starts_with("OutOf") => "OutOfExtendedResources",
        _ => "Other",
    }
}

/// Returns the containers that are terminated in the new status and were not in the old one.
fn terminations(old: Option<&PodStatus>, new: &PodStatus) -> Vec<TerminatedLabel> {
    type List = fn(&PodStatus) -> Option<&Vec<ContainerStatus>>;
    let lists: [(&'static str, List); 3] = [
        (INIT, |s| s.init_container_statuses.as_ref()),
        (REGULAR, |s| s.container_statuses.as_ref()),
        (EPHEMERAL, |s| s.ephemeral_container_statuses.as_ref()),
    ];
    let ended = |c: &ContainerStatus| c.state.as_ref().and_then(|s| s.terminated.clone());
    let mut out = Vec::new();
    for (container_type, list) in lists {
        let before = old.and_then(list);
        for container in list(new).into_iter().flatten() {
            let had_ended =
                before.into_iter().flatten().any(|b| b.name == container.name && ended(b).is_some());
            let Some(now) = ended(container).filter(|_| !had_ended) else { continue };
            let reason = now.reason.unwrap_or_default();
            out.push(TerminatedLabel { container_type, exit_code: now.exit_code, reason });
        }
    }
    out
}

/// Sets the gauge of the machine's cgroup version.
pub fn set_cgroup_version(is_v2: bool) {
    gauge("kubelet_cgroup_version", "cgroup version on the hosts").set(if is_v2 { 2 } else { 1 });
}

/// Sets the gauges of the memory that cgroups protect, in bytes: that of Guaranteed pods and that of
/// Burstable pods.
pub fn set_memory_qos(min: i64, low: i64) {
    let help = "Total memory.min bytes (hard protection) set at the node level for Guaranteed pods";
    gauge("kubelet_memory_qos_node_memory_min_bytes", help).set(min);
    let help = "Total memory.low bytes (soft protection) set at the node level for Burstable pods";
    gauge("kubelet_memory_qos_node_memory_low_bytes", help).set(low);
}

/// Returns whether a pod has begun to run since the old status.
#[must_use]
pub fn began_to_run(old: Option<&PodStatus>, new: &PodStatus) -> bool {
    let phase = |s: &PodStatus| s.phase.clone().unwrap_or_default();
    let waited = old.is_none_or(|s| matches!(phase(s).as_str(), "" | "Pending" | "Unknown"));
    waited && phase(new) == "Running"
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status(value: serde_json::Value) -> PodStatus {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_terminated_container_is_counted_once() {
        let container = |name: &str, state: serde_json::Value| json!({"name": name, "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": state});
        let ended = |code: i32| json!({"terminated": {"exitCode": code, "reason": "Error"}});
        let running = json!({"running": {}});
        let before = status(json!({
            "initContainerStatuses": [container("i", ended(0)), container("s", running.clone())],
            "containerStatuses": [container("a", running.clone()), container("b", running)],
        }));
        let after = status(json!({
            "initContainerStatuses": [container("i", ended(0)), container("s", ended(137))],
            "containerStatuses": [container("a", ended(1)), container("b", json!({"waiting": {"reason": "x"}}))],
            "ephemeralContainerStatuses": [container("e", ended(2))],
        }));
        let labels = |old: Option<&PodStatus>, new: &PodStatus| -> Vec<(&str, i32)> {
            terminations(old, new).iter().map(|l| (l.container_type, l.exit_code)).collect()
        };
        assert_eq!(labels(Some(&before), &after), [(INIT, 137), (REGULAR, 1), (EPHEMERAL, 2)]);
        assert_eq!(labels(Some(&after), &after), []);
        assert_eq!(labels(None, &before), [(INIT, 0)]);
        assert_eq!(terminations(Some(&before), &after)[0].reason, "Error");
    }

    #[test]
    fn rejections_are_counted_by_reasons_of_a_fixed_list() {
        for (reason, want) in [
            ("OutOfcpu", "OutOfcpu"),
            ("OutOfexample.com/gpu", "OutOfExtendedResources"),
            ("NodeShutdown", "NodeShutdown"),
            ("NodeAffinity", "Other"),
        ] {
            assert_eq!(rejection(reason), want);
        }
        let metrics = PodMetrics::default();
        let series = "kubelet_admission_rejections_total{reason=\"OutOfExtendedResources\"} ";
        let count = || {
            let text = quintlet_telemetry::metrics::text();
            text.lines().find_map(|l| l.strip_prefix(series)?.parse::<u64>().ok()).unwrap_or(0)
        };
        let before = count();
        metrics.pod_rejected("OutOfexample.com/gpu");
        assert_eq!(count(), before + 1);
    }

    #[test]
    fn admissions_are_counted_by_where_pods_have_their_resources() {
        let metrics = PodMetrics::default();
        let amounts = json!({"requests": {"memory": "1Mi"}});
        let full =
            json!({"requests": {"cpu": "1", "memory": "1Mi"}, "limits": {"cpu": "1", "memory": "1Mi"}});
        for (pod_level, container, is_admitted, want) in [
            (json!({}), json!({}), true, ["container_level", "admitted", "best_effort"]),
            (json!({}), amounts.clone(), false, ["container_level", "rejected", "burstable"]),
            (full, json!({}), true, ["pod_level_only", "admitted", "guaranteed"]),
            (amounts.clone(), amounts, true, ["pod_and_container_level", "admitted", "burstable"]),
        ] {
            let pod: Pod = serde_json::from_value(
                json!({"spec": {"resources": pod_level, "containers": [{"name": "c", "resources": container}]}}),
            )
            .unwrap();
            let [mode, status, class] = want;
            let series = format!(
                "kubelet_pod_level_resources_admission_total{{config_mode=\"{mode}\",status=\"{status}\",qos_class=\"{class}\"}} "
            );
            let count = || {
                let text = quintlet_telemetry::metrics::text();
                text.lines().find_map(|l| l.strip_prefix(&series)?.parse::<u64>().ok()).unwrap_or(0)
            };
            let before = count();
            metrics.pod_decided(&pod, is_admitted);
            assert_eq!(count(), before + 1, "{series}");
        }
    }

    #[test]
    fn sandboxes_are_counted_by_their_runtime_handler() {
        let metrics = PodMetrics::default();
        metrics.sandbox_started("kata", Duration::from_secs(3), true);
        metrics.sandbox_started("kata", Duration::from_secs(4), false);
        let text = quintlet_telemetry::metrics::text();
        for line in [
            "kubelet_run_podsandbox_duration_seconds_sum{runtime_handler=\"kata\"} 7.0",
            "kubelet_run_podsandbox_duration_seconds_count{runtime_handler=\"kata\"} 2",
            "kubelet_run_podsandbox_errors_total{runtime_handler=\"kata\"} 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
    }

    #[test]
    fn a_pod_begins_to_run_once() {
        let phase = |phase: &str| status(json!({"phase": phase}));
        for (old, new, want) in [
            (None, "Running", true),
            (Some("Pending"), "Running", true),
            (Some("Pending"), "Pending", false),
            (Some("Running"), "Running", false),
            (Some("Running"), "Failed", false),
        ] {
            assert_eq!(began_to_run(old.map(phase).as_ref(), &phase(new)), want, "{old:?} {new}");
        }
    }
}
