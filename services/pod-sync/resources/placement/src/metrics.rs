//! Metrics of the managers, under the names of the kubelet (`pkg/kubelet/metrics`).

use std::collections::BTreeMap;
use std::time::Duration;

use pod_sync_cpus::CpuManager;
use pod_sync_machine::NumaNode;
use pod_sync_topology::{PodLevel, PolicyName};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use quintlet_telemetry::metrics::{counter, counter_family, gauge, gauge_family, histogram_of};

use crate::admission::{NodePlacement, PlacementError};
use crate::counts::{AdmissionCounts, CONTAINER, NUMA_NODE, PHYSICAL_CPU, POD, Tally, UNCORE_CACHE};

/// Upper bounds in milliseconds: 0.05, doubled 14 times.
const MILLISECONDS: &[f64] =
    &[0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4, 204.8, 409.6, 819.2];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NumaNodeLabel {
    numa_node: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AlignmentLabels {
    boundary: &'static str,
    scope: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SourceLabels {
    resource_name: &'static str,
    source: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AssignmentLabels {
    assignment_type: &'static str,
    resource_name: &'static str,
}

/// Metrics that a kubelet has with the feature gate `PodLevelResourceManagers` only.
#[derive(Debug, Clone)]
struct PodLevelMetrics {
    allocations: Family<SourceLabels, Counter>,
    errors: Family<SourceLabels, Counter>,
    // The kubelet's counters without the suffix `_total` are gauges here.
    assignments: Family<AssignmentLabels, Gauge>,
}

impl PodLevelMetrics {
    fn new() -> Self {
        Self {
            allocations: counter_family(
                "resource_manager_allocations",
                "Total number of exclusive resource allocations, by resource and the pool that they come from",
            ),
            errors: counter_family(
                "resource_manager_allocation_errors",
                "Total number of failed exclusive resource allocations, by resource and the pool that they would come from",
            ),
            assignments: gauge_family(
                "resource_manager_container_assignments",
                "Cumulative number of containers by the type of their resource assignment",
            ),
        }
    }

    fn count(&self, counts: &AdmissionCounts) {
        let source = |(resource_name, source)| SourceLabels { resource_name, source };
        add(&self.allocations, &counts.allocations, source);
        add(&self.errors, &counts.errors, source);
        let labels = |(resource_name, assignment_type)| AssignmentLabels { assignment_type, resource_name };
        add(&self.assignments, &counts.assignments, labels);
    }
}

/// Adds the counts of a tally to a family.
fn add<L, M>(family: &Family<L, M>, tally: &Tally, labels: impl Fn(crate::counts::Labels) -> L)
where
    L: Clone + std::hash::Hash + Eq,
    M: Add + Default,
{
    for (pair, count) in &tally.0 {
        family.get_or_create(&labels(*pair)).add(*count);
    }
}

/// A metric that only rises.
trait Add {
    fn add(&self, count: u64);
}

impl Add for Counter {
    fn add(&self, count: u64) {
        self.inc_by(count);
    }
}

impl Add for Gauge {
    fn add(&self, count: u64) {
        self.inc_by(i64::try_from(count).unwrap_or(i64::MAX));
    }
}

fn alignment((scope, boundary): crate::counts::Labels) -> AlignmentLabels {
    AlignmentLabels { boundary, scope }
}

#[derive(Debug, Clone)]
pub(crate) struct PlacementMetrics {
    cpu_requests: Counter,
    cpu_errors: Counter,
    shared_pool: Gauge,
    exclusive_cpus: Gauge,
    exclusive_per_node: Family<NumaNodeLabel, Gauge>,
    memory_requests: Counter,
    memory_errors: Counter,
    admissions: Counter,
    admission_errors: Counter,
    admission_duration: Histogram,
    aligned: Family<AlignmentLabels, Gauge>,
    unaligned: Family<AlignmentLabels, Gauge>,
    pod_level: Option<PodLevelMetrics>,
}

impl PlacementMetrics {
    /// Returns the metrics of a node. Series of its policies exist from the start.
    pub(crate) fn new(node: &NodePlacement) -> Self {
        let metrics = Self::registered(node.pod_level() != PodLevel::Unmanaged);
        let (aligned, unaligned) = (&metrics.aligned, &metrics.unaligned);
        if node.topology().name() != PolicyName::None {
            for scope in [CONTAINER, POD] {
                drop(aligned.get_or_create(&alignment((scope, NUMA_NODE))));
                drop(unaligned.get_or_create(&alignment((scope, NUMA_NODE))));
            }
        }
        if node.cpus().is_some() {
            drop(aligned.get_or_create(&alignment((CONTAINER, PHYSICAL_CPU))));
            drop(unaligned.get_or_create(&alignment((CONTAINER, PHYSICAL_CPU))));
            drop(aligned.get_or_create(&alignment((CONTAINER, UNCORE_CACHE))));
        }
        metrics
    }

    fn registered(has_pod_level: bool) -> Self {
        Self {
            cpu_requests: counter(
                "kubelet_cpu_manager_pinning_requests",
                "The number of cpu core allocations which required pinning",
            ),
            cpu_errors: counter(
                "kubelet_cpu_manager_pinning_errors",
                "The number of cpu core allocations which required pinning failed",
            ),
            shared_pool: gauge(
                "kubelet_cpu_manager_shared_pool_size_millicores",
                "The size of the shared CPU pool for non-guaranteed QoS pods, in millicores",
            ),
            exclusive_cpus: gauge(
                "kubelet_cpu_manager_exclusive_cpu_allocation_count",
                "The total number of CPUs exclusively allocated to containers running on this node",
            ),
            exclusive_per_node: gauge_family(
                "kubelet_cpu_manager_allocation_per_numa",
                "Number of CPUs allocated per NUMA node",
            ),
            memory_requests: counter(
                "kubelet_memory_manager_pinning_requests",
                "The number of memory pages allocations which required pinning",
            ),
            memory_errors: counter(
                "kubelet_memory_manager_pinning_errors",
                "The number of memory pages allocations which required pinning that failed",
            ),
            admissions: counter(
                "kubelet_topology_manager_admission_requests",
                "The number of admission requests where resources have to be aligned",
            ),
            admission_errors: counter(
                "kubelet_topology_manager_admission_errors",
                "The number of admission request failures where resources could not be aligned",
            ),
            admission_duration: histogram_of(
                "kubelet_topology_manager_admission_duration_ms",
                "Duration in milliseconds to serve a pod admission request",
                MILLISECONDS,
            ),
            aligned: gauge_family(
                "kubelet_container_aligned_compute_resources_count",
                "Cumulative number of aligned compute resources allocated to containers by alignment type",
            ),
            unaligned: gauge_family(
                "kubelet_container_aligned_compute_resources_failure_count",
                "Cumulative number of failures to allocate aligned compute resources to containers by alignment type",
            ),
            pod_level: has_pod_level.then(PodLevelMetrics::new),
        }
    }

    /// Counts an admission.
    pub(crate) fn admitted(
        &self,
        counts: &AdmissionCounts,
        result: &Result<(), PlacementError>,
        took: Duration,
    ) {
        self.admissions.inc();
        self.admission_duration.observe(took.as_secs_f64() * 1000.0);
        self.cpu_requests.inc_by(counts.cpus);
        self.memory_requests.inc_by(counts.memory);
        add(&self.aligned, &counts.aligned, alignment);
        add(&self.unaligned, &counts.unaligned, alignment);
        if let Some(metrics) = &self.pod_level {
            metrics.count(counts);
        }
        let Err(error) = result else { return };
        self.admission_errors.inc();
        match error {
            PlacementError::Topology(_) => {}
            PlacementError::Cpus(_) => {
                self.cpu_errors.inc();
            }
            PlacementError::Memory(_) => {
                self.memory_errors.inc();
            }
        }
    }

    /// Counts an admission that failed before anything was allocated.
    pub(crate) fn not_aligned(&self, counts: &AdmissionCounts) {
        add(&self.unaligned, &counts.unaligned, alignment);
        self.admissions.inc();
        self.admission_errors.inc();
    }

    /// Publishes the CPUs of a node.
    pub(crate) fn publish(&self, node: &NodePlacement) {
        let Some(cpus) = node.cpus() else { return };
        let gauge_value = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let available = cpus.policy().available(cpus.assignments()).len();
        self.shared_pool.set(gauge_value(available).saturating_mul(1000));
        let per_node = exclusive_per_node(cpus);
        self.exclusive_cpus
            .set(gauge_value(per_node.values().fold(0_usize, |sum, count| sum.saturating_add(*count))));
        for (node, count) in per_node {
            let label = NumaNodeLabel { numa_node: node.to_string() };
            self.exclusive_per_node.get_or_create(&label).set(gauge_value(count));
        }
    }
}

/// Returns the number of exclusive CPUs on each NUMA node. CPUs that an init container left to a later one
/// count once.
fn exclusive_per_node(cpus: &CpuManager) -> BTreeMap<NumaNode, usize> {
    let topology = cpus.policy().topology();
    let exclusive = topology.cpus().difference(&cpus.assignments().shared);
    // With strict-cpu-reservation, reserved CPUs are not shared.
    let exclusive = exclusive.difference(cpus.policy().reserved());
    let mut counts: BTreeMap<NumaNode, usize> = topology.nodes().iter().map(|node| (node, 0)).collect();
    for place in exclusive.iter().filter_map(|cpu| topology.places().get(&cpu)) {
        let count = counts.entry(place.node).or_default();
        *count = count.saturating_add(1);
    }
    counts
}
