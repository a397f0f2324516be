//! Metrics of device plugins, under the names of the kubelet (`pkg/kubelet/metrics`).

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use quintlet_telemetry::metrics::{Buckets, counter_family, histogram_family_of};

/// Default buckets of Prometheus.
const SECONDS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResourceLabel {
    resource_name: String,
}

impl From<&str> for ResourceLabel {
    fn from(resource: &str) -> Self {
        Self { resource_name: resource.to_owned() }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct DeviceMetrics {
    registrations: Family<ResourceLabel, Counter>,
    allocations: Family<ResourceLabel, Histogram, Buckets>,
}

impl Default for DeviceMetrics {
    fn default() -> Self {
        Self {
            registrations: counter_family(
                "kubelet_device_plugin_registration",
                "Cumulative number of device plugin registrations. Broken down by resource name",
            ),
            allocations: histogram_family_of(
                "kubelet_device_plugin_alloc_duration_seconds",
                "Duration in seconds to serve a device plugin Allocation request. Broken down by resource name",
                SECONDS,
            ),
        }
    }
}

impl DeviceMetrics {
    pub(crate) fn registered(&self, resource: &str) {
        self.registrations.get_or_create(&resource.into()).inc();
    }

    pub(crate) fn allocated(&self, resource: &str, took: Duration) {
        self.allocations.get_or_create(&resource.into()).observe(took.as_secs_f64());
    }
}
