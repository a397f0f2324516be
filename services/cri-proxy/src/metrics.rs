//! What this service counts.
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

/// A method. Unknown ones share one label: the caller chooses their names.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct MethodLabel {
    method: &'static str,
}

/// A method and its outcome.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OutcomeLabel {
    method: &'static str,
    outcome: &'static str,
}

/// What the kubelet calls a method.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OperationLabel {
    operation_type: &'static str,
}

/// A method and the socket it came by.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct SocketLabel {
    method: &'static str,
    socket: &'static str,
}

/// A lane.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct LaneLabel {
    lane: &'static str,
}

/// Why a mutation was fenced off.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabel {
    reason: &'static str,
}

/// What became of hints.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct HintLabel {
    kind: &'static str,
}

/// Label of methods the table does not have.
pub const OTHER: &str = "other";

/// Buckets of the kubelet's metric: 5 ms, each 2.5 times the one before (pkg/kubelet/metrics).
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

/// What the kubelet calls the methods that it makes operations of (pkg/kubelet/kuberuntime/instrumented_services.go).
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

/// All of them; clones count in the same series.
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
    /// Calls that joined an identical one.
    pub joined: Counter,
    /// Calls refused because another under the same key was in flight.
    pub conflicts: Counter,
    /// Connections refused by their peer's uid.
    pub refused_peers: Counter,
    /// Requests and answers refused because the calls of their socket held all the bytes that they may.
    pub refused_bytes: Counter,
    /// Connections refused because their socket had as many as it may.
    pub refused_connections: Counter,
    /// Streams passed through now.
    pub streams: Gauge,
    /// Streams cut because the runtime went away.
    pub cut_streams: Counter,
    /// Streams ended because this process stops.
    pub closed_streams: Counter,
    /// Bytes of lists on their way to callers.
    pub list_bytes: Gauge,
    /// The most bytes of one list that were here at once.
    pub list_bytes_most: Gauge,
    /// The largest message made of a list, bytes.
    pub list_message_largest: Gauge,
    /// Tasks that containerd had lost and that were in the way of a removal.
    pub lost_tasks: Counter,
    /// Calls the mutation lane may have in flight now.
    pub mutation_limit: Gauge,
    /// 1 while the runtime is connected.
    pub connected: Gauge,
    hints: Family<HintLabel, Counter>,
    /// Hints that slow subscribers missed.
    pub hints_missed: Counter,
    /// Subscribers to hints.
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
            latency: histogram_family("quintlet_cri_latency_seconds", "From sending to answer, by method"),
            wait: histogram_family("quintlet_cri_queue_seconds", "Time before sending, by lane"),
            depth: gauge_family("quintlet_cri_queue_depth", "Calls waiting to be sent, by lane"),
            in_flight: gauge_family("quintlet_cri_in_flight", "Slots taken, by lane"),
            denied: counter_family("quintlet_cri_denied", "Calls on the wrong socket"),
            fenced: counter_family("quintlet_cri_fenced", "Mutations fenced off, by reason"),
            joined: counter("quintlet_cri_joined", "Calls that joined an identical one in flight"),
            conflicts: counter("quintlet_cri_conflicts", "Calls refused for another one under the same key"),
            refused_peers: counter("quintlet_cri_refused_peers", "Connections refused by uid"),
            refused_bytes: counter(
                "quintlet_cri_refused_bytes",
                "Requests and answers refused because their socket held all the bytes that it may",
            ),
            refused_connections: counter(
                "quintlet_cri_refused_connections",
                "Connections refused because their socket had as many as it may",
            ),
            streams: gauge("quintlet_cri_streams", "Streams passed through now"),
            cut_streams: counter("quintlet_cri_cut_streams", "Streams cut by a runtime that went away"),
            closed_streams: counter("quintlet_cri_closed_streams", "Streams ended by a stop of this process"),
            list_bytes: gauge("quintlet_cri_list_bytes", "Bytes of lists on their way to callers"),
            list_bytes_most: gauge("quintlet_cri_list_bytes_most", "Most bytes of one list here at once"),
            list_message_largest: gauge("quintlet_cri_list_message_largest_bytes", "Largest part of a list"),
            lost_tasks: counter("quintlet_cri_lost_tasks", "Lost tasks of containerd ended before a removal"),
            mutation_limit: gauge("quintlet_cri_mutation_limit", "Mutations allowed in flight now"),
            connected: gauge("quintlet_cri_connected", "1 while the runtime is connected"),
            hints: counter_family("quintlet_cri_hints", "Hints read from the runtime, by kind"),
            hints_missed: counter("quintlet_cri_hints_missed", "Hints that slow subscribers missed"),
            subscribers: gauge("quintlet_cri_hint_subscribers", "Subscribers to hints"),
        }
    }
}

impl Metrics {
    /// One call is over.
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
            // One that was never sent took no time of the runtime's.
            if let Some(latency) = latency {
                self.operation_seconds.get_or_create(&label).observe(latency.as_secs_f64());
            }
        }
    }

    /// One call left the queue, sent or not.
    pub fn waited(&self, lane: Lane, wait: Duration) {
        self.wait.get_or_create(&LaneLabel { lane: lane.name() }).observe(wait.as_secs_f64());
    }

    /// Reads the lanes.
    pub fn lane(&self, lane: Lane, lanes: &Lanes) {
        let (in_flight, depth) = lanes.load(lane);
        let label = LaneLabel { lane: lane.name() };
        self.in_flight.get_or_create(&label).set(i64::try_from(in_flight).unwrap_or(i64::MAX));
        self.depth.get_or_create(&label).set(i64::try_from(depth).unwrap_or(i64::MAX));
    }

    /// A call on the wrong socket.
    pub fn denied(&self, method: &'static str, socket: Socket) {
        self.denied.get_or_create(&SocketLabel { method, socket: socket.name() }).inc();
    }

    /// Calls denied so far.
    #[must_use]
    pub fn denied_count(&self, method: &'static str, socket: Socket) -> u64 {
        self.denied.get_or_create(&SocketLabel { method, socket: socket.name() }).get()
    }

    /// A mutation fenced off.
    pub fn fenced(&self, reason: &'static str) {
        self.fenced.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// A hint read.
    pub fn hint(&self, kind: &'static str) {
        self.hints.get_or_create(&HintLabel { kind }).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::TABLE;

    #[test]
    fn every_call_that_the_kubelet_makes_is_one_of_its_operations() {
        for row in TABLE {
            // It is asked for once, at the start, and the kubelet does not count it either.
            let counted = row.method != "RuntimeConfig";
            assert_eq!(operation(row.method).is_some(), counted, "{}", row.method);
        }
    }

    #[test]
    fn buckets_grow_as_the_kubelets_do() {
        assert_eq!(OPERATION_BUCKETS.len(), 14);
        for pair in OPERATION_BUCKETS.windows(2) {
            assert!((pair[1] / pair[0] - 2.5).abs() < 1e-9, "{pair:?}");
        }
    }
}
