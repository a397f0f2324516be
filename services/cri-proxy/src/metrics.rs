//! Metrics of this service.
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use quintlet_model::outcome::Outcome;
use quintlet_telemetry::metrics::{
    Buckets, LatencyBuckets, counter, counter_family, gauge, gauge_family, histogram_family,
    histogram_family_of,
};

use crate::lanes::Lanes;
use crate::policy::{Lane, Socket};

/// Labels by method. Unknown methods share one label, since callers choose their names.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MethodLabel {
    method: &'static str,
}

/// A method, and how its call ended ([`Outcome::name`]).
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    method: &'static str,
    outcome: &'static str,
}

/// The kubelet's name of a method.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabel {
    operation_type: &'static str,
}

/// A method, and the socket that does not allow it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SocketLabel {
    method: &'static str,
    socket: &'static str,
}

/// Label of the metrics of lanes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LaneLabel {
    lane: &'static str,
}

/// The reason for which the fence refused a mutation.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

/// The kind of change that the runtime reported, such as an exit.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HintLabel {
    kind: &'static str,
}

/// Label of methods that are not in the table.
pub const OTHER: &str = "other";

/// Buckets of the kubelet's metric: 5 ms, growing by a factor of 2.5 (`pkg/kubelet/metrics`).
const OPERATION_BUCKETS: &[f64] = &[
    0.005,
    0.0125,
    0.03125,
    0.078_125,
    0.195_312_5,
    0.488_281_25,
    1.220_703_125,
    3.051_757_812_5,
    7.629_394_531_25,
    19.073_486_328_125,
    47.683_715_820_312_5,
    119.209_289_550_781_25,
    298.023_223_876_953_1,
    745.058_059_692_382_8,
];

/// Returns the kubelet's name of a method, if the kubelet counts it
/// (`pkg/kubelet/kuberuntime: instrumentedRuntimeService`).
fn operation(method: &str) -> Option<&'static str> {
    Some(match method {
        "Version" => "version",
        "Status" => "status",
        "RunPodSandbox" => "run_podsandbox",
        "StopPodSandbox" => "stop_podsandbox",
        "RemovePodSandbox" => "remove_podsandbox",
        "PodSandboxStatus" => "podsandbox_status",
        "ListPodSandbox" | "StreamPodSandboxes" => "list_podsandbox",
        "PodSandboxStats" => "podsandbox_stats",
        "ListPodSandboxStats" | "StreamPodSandboxStats" => "list_podsandbox_stats",
        "ListPodSandboxMetrics" | "StreamPodSandboxMetrics" => "list_podsandbox_metrics",
        "ListMetricDescriptors" => "list_metric_descriptors",
        "CreateContainer" => "create_container",
        "StartContainer" => "start_container",
        "StopContainer" => "stop_container",
        "RemoveContainer" => "remove_container",
        "ListContainers" | "StreamContainers" => "list_containers",
        "ContainerStatus" => "container_status",
        "UpdateContainerResources" => "update_container",
        "UpdatePodSandboxResources" => "update_podsandbox",
        "UpdateRuntimeConfig" => "update_runtime_config",
        "ReopenContainerLog" => "reopen_container_log",
        "CheckpointContainer" => "checkpoint_container",
        "ExecSync" => "exec_sync",
        "Exec" => "exec",
        "Attach" => "attach",
        "PortForward" => "port_forward",
        "ContainerStats" => "container_stats",
        "ListContainerStats" | "StreamContainerStats" => "list_container_stats",
        "GetContainerEvents" => "container_events",
        "ListImages" | "StreamImages" => "list_images",
        "ImageStatus" => "image_status",
        "PullImage" => "pull_image",
        "RemoveImage" => "remove_image",
        "ImageFsInfo" => "image_fs_info",
        _ => return None,
    })
}

/// The metrics. Clones share them.
#[derive(Debug, Clone)]
pub struct Metrics {
    outcomes: Family<OutcomeLabel, Counter>,
    operations: Family<OperationLabel, Counter>,
    operation_errors: Family<OperationLabel, Counter>,
    operation_seconds: Family<OperationLabel, Histogram, Buckets>,
    latency: Family<MethodLabel, Histogram, LatencyBuckets>,
    wait: Family<LaneLabel, Histogram, LatencyBuckets>,
    depth: Family<LaneLabel, Gauge>,
    in_flight: Family<LaneLabel, Gauge>,
    denied: Family<SocketLabel, Counter>,
    fenced: Family<ReasonLabel, Counter>,
    /// `quintlet_cri_joined`.
    pub joined: Counter,
    /// `quintlet_cri_conflicts`.
    pub conflicts: Counter,
    /// `quintlet_cri_refused_peers`.
    pub refused_peers: Counter,
    /// `quintlet_cri_refused_bytes`.
    pub refused_bytes: Counter,
    /// `quintlet_cri_refused_connections`.
    pub refused_connections: Counter,
    /// `quintlet_cri_streams`.
    pub streams: Gauge,
    /// `quintlet_cri_cut_streams`.
    pub cut_streams: Counter,
    /// `quintlet_cri_closed_streams`.
    pub closed_streams: Counter,
    /// `quintlet_cri_list_bytes`.
    pub list_bytes: Gauge,
    /// `quintlet_cri_list_bytes_most`.
    pub list_bytes_most: Gauge,
    /// `quintlet_cri_list_message_largest_bytes`.
    pub list_message_largest: Gauge,
    /// `quintlet_cri_lost_tasks`.
    pub lost_tasks: Counter,
    /// `quintlet_cri_mutation_limit`.
    pub mutation_limit: Gauge,
    /// `quintlet_cri_connected`.
    pub connected: Gauge,
    hints: Family<HintLabel, Counter>,
    /// `quintlet_cri_hints_missed`.
    pub hints_missed: Counter,
    /// `quintlet_cri_hint_subscribers`.
    pub subscribers: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            outcomes: counter_family("quintlet_cri_calls", "CRI calls by method and outcome"),
            operations: counter_family(
                "kubelet_runtime_operations",
                "Cumulative number of runtime operations by operation type",
            ),
            operation_errors: counter_family(
                "kubelet_runtime_operations_errors",
                "Cumulative number of runtime operation errors by operation type",
            ),
            operation_seconds: histogram_family_of(
                "kubelet_runtime_operations_duration_seconds",
                "Duration in seconds of runtime operations by operation type",
                OPERATION_BUCKETS,
            ),
            latency: histogram_family(
                "quintlet_cri_latency_seconds",
                "Time from sending a call to its reply, by method",
            ),
            wait: histogram_family(
                "quintlet_cri_queue_seconds",
                "Time that calls wait before they are sent, by lane",
            ),
            depth: gauge_family("quintlet_cri_queue_depth", "Calls waiting to be sent, by lane"),
            in_flight: gauge_family("quintlet_cri_in_flight", "Calls in flight, by lane"),
            denied: counter_family(
                "quintlet_cri_denied",
                "Calls refused because the socket does not allow their method",
            ),
            fenced: counter_family("quintlet_cri_fenced", "Mutations refused by the fence, by reason"),
            joined: counter("quintlet_cri_joined", "Calls that joined an identical call in flight"),
            conflicts: counter(
                "quintlet_cri_conflicts",
                "Calls refused because a different call for the same object is in flight",
            ),
            refused_peers: counter("quintlet_cri_refused_peers", "Connections refused because of their user"),
            refused_bytes: counter(
                "quintlet_cri_refused_bytes",
                "Requests and replies refused because of the byte limit of their socket",
            ),
            refused_connections: counter(
                "quintlet_cri_refused_connections",
                "Connections refused because of the connection limit of their socket",
            ),
            streams: gauge("quintlet_cri_streams", "Open streams that are passed through"),
            cut_streams: counter(
                "quintlet_cri_cut_streams",
                "Streams interrupted because the runtime disconnected",
            ),
            closed_streams: counter(
                "quintlet_cri_closed_streams",
                "Streams ended because this process stops",
            ),
            list_bytes: gauge("quintlet_cri_list_bytes", "Buffered bytes of lists"),
            list_bytes_most: gauge(
                "quintlet_cri_list_bytes_most",
                "Maximum of buffered bytes of a single list",
            ),
            list_message_largest: gauge(
                "quintlet_cri_list_message_largest_bytes",
                "Largest message of a list, in bytes",
            ),
            lost_tasks: counter(
                "quintlet_cri_lost_tasks",
                "Orphaned containerd tasks killed before the removal of a container",
            ),
            mutation_limit: gauge("quintlet_cri_mutation_limit", "Limit of concurrent mutations"),
            connected: gauge("quintlet_cri_connected", "1 while the runtime is connected"),
            hints: counter_family("quintlet_cri_hints", "Hints read from the runtime, by kind"),
            hints_missed: counter("quintlet_cri_hints_missed", "Hints that slow subscribers missed"),
            subscribers: gauge("quintlet_cri_hint_subscribers", "Subscribers of hints"),
        }
    }
}

impl Metrics {
    /// Counts a completed call.
    pub fn done(&self, method: &'static str, outcome: Outcome, latency: Option<Duration>) {
        self.outcomes.get_or_create(&OutcomeLabel { method, outcome: outcome.name() }).inc();
        if let Some(latency) = latency {
            self.latency.get_or_create(&MethodLabel { method }).observe(latency.as_secs_f64());
        }
        if let Some(operation_type) = operation(method) {
            let label = OperationLabel { operation_type };
            self.operations.get_or_create(&label).inc();
            match outcome {
                Outcome::Ok => {}
                Outcome::RuntimeError | Outcome::NotDispatched | Outcome::Unknown => {
                    self.operation_errors.get_or_create(&label).inc();
                }
            }
            // A call that was not sent took none of the runtime's time.
            if let Some(latency) = latency {
                self.operation_seconds.get_or_create(&label).observe(latency.as_secs_f64());
            }
        }
    }

    /// Records the time that a call waited, whether it was sent or not.
    pub fn waited(&self, lane: Lane, wait: Duration) {
        self.wait.get_or_create(&LaneLabel { lane: lane.name() }).observe(wait.as_secs_f64());
    }

    /// Sets the load of a lane.
    pub fn lane(&self, lane: Lane, lanes: &Lanes) {
        let (in_flight, depth) = lanes.load(lane);
        let label = LaneLabel { lane: lane.name() };
        self.in_flight.get_or_create(&label).set(i64::try_from(in_flight).unwrap_or(i64::MAX));
        self.depth.get_or_create(&label).set(i64::try_from(depth).unwrap_or(i64::MAX));
    }

    /// Counts a call that is not allowed on its socket.
    pub fn denied(&self, method: &'static str, socket: Socket) {
        self.denied.get_or_create(&SocketLabel { method, socket: socket.name() }).inc();
    }

    /// Counts a mutation that the fence refused.
    pub fn fenced(&self, reason: &'static str) {
        self.fenced.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// Counts a hint.
    pub fn hint(&self, kind: &'static str) {
        self.hints.get_or_create(&HintLabel { kind }).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::TABLE;

    #[test]
    fn every_method_that_the_kubelet_counts_has_an_operation_name() {
        for row in TABLE {
            // Called once at the start; the kubelet does not count it either.
            let counted = row.method != "RuntimeConfig";
            assert_eq!(operation(row.method).is_some(), counted, "{}", row.method);
        }
    }

    #[test]
    fn the_buckets_are_those_of_the_kubelet() {
        assert_eq!(OPERATION_BUCKETS.len(), 14);
        for pair in OPERATION_BUCKETS.windows(2) {
            assert!((pair[1] / pair[0] - 2.5).abs() < 1e-9, "{pair:?}");
        }
    }
}
