//! Metrics of the API, under the names of the kubelet (`pkg/kubelet/metrics`).

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_telemetry::metrics::{counter_family, gauge_family};

/// A version of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ApiVersion {
    V1,
    V1Alpha1,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VersionLabel {
    server_api_version: &'static str,
}

impl From<ApiVersion> for VersionLabel {
    fn from(version: ApiVersion) -> Self {
        let server_api_version = match version {
            ApiVersion::V1 => "v1",
            ApiVersion::V1Alpha1 => "v1alpha1",
        };
        Self { server_api_version }
    }
}

/// Requests of one method. The kubelet's counters have no suffix `_total`, as a gauge here.
#[derive(Debug, Clone)]
pub(crate) struct MethodMetrics {
    requests: Family<VersionLabel, Gauge>,
    errors: Family<VersionLabel, Gauge>,
}

impl MethodMetrics {
    fn new(requests: (&'static str, &'static str), errors: (&'static str, &'static str)) -> Self {
        Self { requests: gauge_family(requests.0, requests.1), errors: gauge_family(errors.0, errors.1) }
    }

    pub(crate) fn requested(&self) {
        self.requests.get_or_create(&ApiVersion::V1.into()).inc();
    }

    pub(crate) fn failed(&self) {
        self.errors.get_or_create(&ApiVersion::V1.into()).inc();
    }
}

/// Counters of requests that the rate has admitted.
#[derive(Debug, Clone)]
pub(crate) struct ApiMetrics {
    all: Family<VersionLabel, Counter>,
    pub(crate) lists: MethodMetrics,
    pub(crate) gets: MethodMetrics,
    pub(crate) allocatable: MethodMetrics,
}

impl Default for ApiMetrics {
    fn default() -> Self {
        Self {
            all: counter_family(
                "kubelet_pod_resources_endpoint_requests",
                "Cumulative number of requests to the PodResource endpoint. Broken down by server api version",
            ),
            lists: MethodMetrics::new(
                (
                    "kubelet_pod_resources_endpoint_requests_list",
                    "Number of requests to the PodResource List endpoint. Broken down by server api version",
                ),
                (
                    "kubelet_pod_resources_endpoint_errors_list",
                    "Number of requests to the PodResource List endpoint which returned error. Broken down by server api version",
                ),
            ),
            gets: MethodMetrics::new(
                (
                    "kubelet_pod_resources_endpoint_requests_get",
                    "Number of requests to the PodResource Get endpoint. Broken down by server api version",
                ),
                (
                    "kubelet_pod_resources_endpoint_errors_get",
                    "Number of requests to the PodResource Get endpoint which returned error. Broken down by server api version",
                ),
            ),
            allocatable: MethodMetrics::new(
                (
                    "kubelet_pod_resources_endpoint_requests_get_allocatable",
                    "Number of requests to the PodResource GetAllocatableResources endpoint. Broken down by server api version",
                ),
                (
                    "kubelet_pod_resources_endpoint_errors_get_allocatable",
                    "Number of requests to the PodResource GetAllocatableResources endpoint which returned error. Broken down by server api version",
                ),
            ),
        }
    }
}

impl ApiMetrics {
    pub(crate) fn requested(&self, version: ApiVersion) {
        self.all.get_or_create(&version.into()).inc();
    }
}
