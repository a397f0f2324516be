//! Metrics of volume operations, under the kubelet's names (`pkg/volume/util: StorageOperationMetric`).

use std::time::Duration;

use k8s_openapi::api::core::v1::Volume;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use quintlet_telemetry::metrics::{Buckets, histogram_family_of};

/// Buckets, in seconds.
const STORAGE: &[f64] = &[0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];

/// Labels of a volume operation.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct StorageLabel {
    migrated: &'static str,
    operation_name: &'static str,
    status: &'static str,
    volume_plugin: String,
}

/// Durations of volume operations. Clones, and other values made by `default`, share the same series.
#[derive(Debug, Clone)]
pub struct VolumeMetrics {
    storage: Family<StorageLabel, Histogram, Buckets>,
}

impl Default for VolumeMetrics {
    fn default() -> Self {
        Self {
            storage: histogram_family_of(
                "storage_operation_duration_seconds",
                "Storage operation duration",
                STORAGE,
            ),
        }
    }
}

impl VolumeMetrics {
    /// Records the duration of a completed operation.
    pub fn observe(&self, operation_name: &'static str, plugin: &str, ok: bool, took: Duration) {
        self.observe_of((plugin, false), operation_name, ok, took);
    }

    /// Records the duration of a completed operation on a volume of this plugin, which may replace an in-tree
    /// type.
    pub fn observe_of(
        &self,
        (plugin, migrated): (&str, bool),
        operation_name: &'static str,
        ok: bool,
        took: Duration,
    ) {
        let label = StorageLabel {
            migrated: if migrated { "true" } else { "false" },
            operation_name,
            status: if ok { "success" } else { "fail-unknown" },
            volume_plugin: plugin.to_owned(),
        };
        self.storage.get_or_create(&label).observe(took.as_secs_f64());
    }
}

/// Returns the name of the volume plugin for a volume.
#[must_use]
pub fn plugin(volume: &Volume) -> &'static str {
    if volume.config_map.is_some() {
        "kubernetes.io/configmap"
    } else if volume.secret.is_some() {
        "kubernetes.io/secret"
    } else if volume.projected.is_some() {
        "kubernetes.io/projected"
    } else if volume.downward_api.is_some() {
        "kubernetes.io/downward-api"
    } else if volume.empty_dir.is_some() {
        "kubernetes.io/empty-dir"
    } else if volume.host_path.is_some() {
        "kubernetes.io/host-path"
    } else if volume.image.is_some() {
        "kubernetes.io/image"
    } else {
        "unknown"
    }
}
