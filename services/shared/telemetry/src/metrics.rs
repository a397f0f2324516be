//! The metrics registry of the process. Each name is registered once.
//!
//! The helpers return the existing metric of a name, so that a service that a test starts twice in one
//! process continues the same series.
use std::any::Any;
use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::atomic::AtomicU64;
use std::sync::{Once, OnceLock};

use parking_lot::{Mutex, MutexGuard};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Metric;
pub use prometheus_client::registry::Registry;

/// Histogram buckets in seconds for calls on the node: 0.5 ms to 32.8 s, doubling.
pub const LATENCY_BUCKETS: [f64; 17] = [
    0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096, 8.192,
    16.384, 32.768,
];

/// The content type of [`text`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

static REGISTRY: OnceLock<Mutex<Registry>> = OnceLock::new();

/// Adds the metrics of the process itself to the registry. Further calls have no effect. Called in `main`: a
/// library that runs in a test is not the process.
pub fn register_process_metrics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| registry().register_collector(Box::new(crate::process::Process)));
}

/// Returns the locked registry of the process, for metrics that the helpers do not cover. Register such a
/// metric only once.
pub fn registry() -> MutexGuard<'static, Registry> {
    REGISTRY.get_or_init(Mutex::default).lock()
}

/// Returns the counter `name`. Its series has the suffix `_total`.
pub fn counter(name: &'static str, help: &'static str) -> Counter {
    named(name, help, Counter::default)
}

/// Returns counters by labels. Their series has the suffix `_total`.
pub fn counter_family<L>(name: &'static str, help: &'static str) -> Family<L, Counter>
where
    L: Clone + Hash + Eq + EncodeLabelSet + Debug + Send + Sync + 'static,
{
    named(name, help, Family::default)
}

/// Returns an integer gauge.
pub fn gauge(name: &'static str, help: &'static str) -> Gauge {
    named(name, help, Gauge::default)
}

/// Returns integer gauges by labels.
pub fn gauge_family<L>(name: &'static str, help: &'static str) -> Family<L, Gauge>
where
    L: Clone + Hash + Eq + EncodeLabelSet + Debug + Send + Sync + 'static,
{
    named(name, help, Family::default)
}

/// Returns a histogram of seconds with [`LATENCY_BUCKETS`].
pub fn histogram(name: &'static str, help: &'static str) -> Histogram {
    named(name, help, || Histogram::new(LATENCY_BUCKETS))
}

/// Returns a histogram with the given buckets.
pub fn histogram_of(name: &'static str, help: &'static str, buckets: &[f64]) -> Histogram {
    named(name, help, || Histogram::new(buckets.iter().copied()))
}

/// Returns histograms of seconds by labels, with [`LATENCY_BUCKETS`].
pub fn histogram_family<L>(name: &'static str, help: &'static str) -> Family<L, Histogram, LatencyBuckets>
where
    L: Clone + Hash + Eq + EncodeLabelSet + Debug + Send + Sync + 'static,
{
    named(name, help, || Family::new_with_constructor(LatencyBuckets))
}

/// Returns histograms by labels, with the given buckets.
pub fn histogram_family_of<L>(
    name: &'static str,
    help: &'static str,
    buckets: &'static [f64],
) -> Family<L, Histogram, Buckets>
where
    L: Clone + Hash + Eq + EncodeLabelSet + Debug + Send + Sync + 'static,
{
    named(name, help, || Family::new_with_constructor(Buckets(buckets)))
}

/// Returns a floating-point gauge.
pub fn float_gauge(name: &'static str, help: &'static str) -> Gauge<f64, AtomicU64> {
    named(name, help, Gauge::default)
}

/// Constructs histograms with fixed buckets.
#[derive(Debug, Clone, Copy)]
pub struct Buckets(&'static [f64]);

impl MetricConstructor<Histogram> for Buckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(self.0.iter().copied())
    }
}

/// Constructs histograms with [`LATENCY_BUCKETS`].
#[derive(Debug, Clone, Copy)]
pub struct LatencyBuckets;

impl MetricConstructor<Histogram> for LatencyBuckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(LATENCY_BUCKETS)
    }
}

/// Encodes all metrics of the process as OpenMetrics text.
pub fn text() -> String {
    let mut out = String::new();
    match prometheus_client::encoding::text::encode(&mut out, &registry()) {
        Ok(()) => out,
        // Only a label that cannot be encoded fails; writing to a String does not.
        Err(_) => "# EOF\n".to_owned(),
    }
}

fn named<M: Metric + Clone>(name: &'static str, help: &'static str, make: impl FnOnce() -> M) -> M {
    static NAMED: OnceLock<Mutex<HashMap<&'static str, Box<dyn Any + Send>>>> = OnceLock::new();
    let mut known = NAMED.get_or_init(Mutex::default).lock();
    let existing = known.get(name).and_then(|m| m.downcast_ref::<M>());
    if let Some(metric) = existing {
        return metric.clone();
    }
    let metric = make();
    registry().register(name, help.trim_end_matches('.'), metric.clone());
    known.insert(name, Box::new(metric.clone()));
    metric
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_registered_twice_is_one_series() {
        counter("quintlet_test_things", "Things.").inc();
        counter("quintlet_test_things", "Things.").inc();
        let text = text();
        assert!(text.contains("quintlet_test_things_total 2"), "{text}");
        assert_eq!(text.matches("# TYPE quintlet_test_things ").count(), 1, "{text}");
        assert!(text.ends_with("# EOF\n"), "{text}");
    }
}
