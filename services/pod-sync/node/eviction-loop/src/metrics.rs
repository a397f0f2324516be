//! Metrics of evictions, under the names of the kubelet.

use std::collections::BTreeSet;
use std::time::Duration;

use pod_sync_eviction::limits::ExceededLimit;
use pod_sync_eviction::{PressureCondition, Signal};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use quintlet_telemetry::metrics::{Buckets, counter, gauge_family, histogram_family_of};

/// Bounds of the age of statistics, in seconds (`k8s.io/component-base/metrics: DefBuckets`).
const AGES: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SignalLabel {
    eviction_signal: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConditionLabel {
    condition: &'static str,
}

/// Metrics of evictions. All instances share the series of the process.
#[derive(Debug, Clone)]
pub struct EvictionMetrics {
    // A gauge, since OpenMetrics adds _total to the names of counters, unlike the kubelet.
    evictions: Family<SignalLabel, Gauge>,
    stats_age: Family<SignalLabel, Histogram, Buckets>,
    alarms: Counter,
    pressure: Family<ConditionLabel, Gauge>,
}

impl Default for EvictionMetrics {
    fn default() -> Self {
        let evictions =
            gauge_family("kubelet_evictions", "Cumulative number of pod evictions by eviction signal");
        for eviction_signal in Signal::ALL.map(Signal::as_str).into_iter().chain(ExceededLimit::SIGNALS) {
            // A series that exists from the start shows the first increase.
            drop(evictions.get_or_create(&SignalLabel { eviction_signal }));
        }
        Self {
            evictions,
            stats_age: histogram_family_of(
                "kubelet_eviction_stats_age_seconds",
                "Time between when stats are collected, and when pod is evicted based on those stats by eviction signal",
                AGES,
            ),
            alarms: counter(
                "quintlet_eviction_memory_notifications",
                "Notifications of the kernel about memory usage that led to a measurement of the node",
            ),
            pressure: gauge_family(
                "quintlet_node_pressure",
                "Whether a pressure condition of the node is true (1 or 0)",
            ),
        }
    }
}

impl EvictionMetrics {
    pub(crate) fn evicted(&self, signal: &'static str) {
        self.evictions.get_or_create(&SignalLabel { eviction_signal: signal }).inc();
    }

    /// Sets the gauges of all pressure conditions.
    pub(crate) fn set_pressure(&self, conditions: &BTreeSet<PressureCondition>) {
        for condition in [PressureCondition::Memory, PressureCondition::Disk, PressureCondition::Pid] {
            let label = ConditionLabel { condition: condition.as_str() };
            self.pressure.get_or_create(&label).set(i64::from(conditions.contains(&condition)));
        }
    }

    pub(crate) fn alarmed(&self) {
        self.alarms.inc();
    }

    pub(crate) fn acted_on(&self, signal: &'static str, age: Duration) {
        self.stats_age.get_or_create(&SignalLabel { eviction_signal: signal }).observe(age.as_secs_f64());
    }
}
