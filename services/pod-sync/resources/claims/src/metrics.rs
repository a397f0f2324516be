//! Metrics of claims, under the names of the kubelet (`pkg/kubelet/metrics`).

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use quintlet_telemetry::metrics::{Buckets, gauge_family, histogram_family_of};

/// 15 exponential buckets from 0.1 to 40 s (`DRADurationBuckets`).
const SECONDS: &[f64] = &[
    0.1, 0.153_413, 0.235_355, 0.361_064, 0.553_918, 0.849_781, 1.303_673, 2.0, 3.068_255, 4.707_094,
    7.221_282, 11.078_366, 16.995_625, 26.073_454, 40.0,
];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabels {
    operation_name: &'static str,
    is_error: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    driver_name: String,
    method_name: &'static str,
    grpc_status_code: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DriverLabel {
    driver_name: String,
}

#[derive(Debug)]
pub(crate) struct ClaimMetrics {
    operations: Family<OperationLabels, Histogram, Buckets>,
    calls: Family<CallLabels, Histogram, Buckets>,
    in_use: Family<DriverLabel, Gauge>,
    // The drivers in `in_use`.
    shown: Mutex<BTreeMap<String, i64>>,
}

impl Default for ClaimMetrics {
    fn default() -> Self {
        Self {
            operations: histogram_family_of(
                "dra_operations_duration_seconds",
                "Latency in seconds of handling all ResourceClaims of a pod when it starts or stops, by operation",
                SECONDS,
            ),
            calls: histogram_family_of(
                "dra_grpc_operations_duration_seconds",
                "Duration in seconds of the DRA gRPC operations",
                SECONDS,
            ),
            in_use: gauge_family(
                "dra_resource_claims_in_use",
                "Number of ResourceClaims that are currently in use on the node, by driver, and for all drivers as <any>",
            ),
            shown: Mutex::default(),
        }
    }
}

impl ClaimMetrics {
    pub(crate) fn operated(&self, operation_name: &'static str, is_error: bool, took: Duration) {
        let is_error = if is_error { "true" } else { "false" };
        let labels = OperationLabels { operation_name, is_error };
        self.operations.get_or_create(&labels).observe(took.as_secs_f64());
    }

    pub(crate) fn called(&self, driver: &str, method: &'static str, code: &'static str, took: Duration) {
        let labels =
            CallLabels { driver_name: driver.to_owned(), method_name: method, grpc_status_code: code };
        self.calls.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// Shows the claims in use. Drivers without any are no longer shown.
    pub(crate) fn show_in_use(&self, counts: BTreeMap<String, i64>) {
        let mut shown = self.shown.lock();
        if *shown == counts {
            return;
        }
        let label = |driver: &String| DriverLabel { driver_name: driver.clone() };
        for gone in shown.keys().filter(|driver| !counts.contains_key(*driver)) {
            self.in_use.remove(&label(gone));
        }
        for (driver, count) in &counts {
            self.in_use.get_or_create(&label(driver)).set(*count);
        }
        *shown = counts;
    }
}

#[cfg(test)]
mod tests {
    use super::SECONDS;

    #[test]
    fn the_buckets_are_those_of_the_kubelet() {
        for (number, bucket) in (0_i32..).zip(SECONDS) {
            let exact = 0.1 * (40.0_f64 / 0.1).powf(f64::from(number) / 14.0);
            assert!((bucket - exact).abs() / exact < 1e-5, "{bucket} {exact}");
        }
    }
}
