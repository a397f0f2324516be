//! Metrics of the volumes that operations mount, under the kubelet's names.
//!
//! | metric | upstream |
//! |---|---|
//! | `storage_operation_duration_seconds` | `pkg/volume/util: OperationCompleteHook` |
//! | `volume_manager_selinux_*` | `cache/desired_state_of_world_selinux_metrics.go` |
//! | `reconstruct_volume_operations_*`, `force_cleaned_failed_volume_operation*` | `pkg/kubelet/volumemanager/metrics` |

use std::time::Duration;

use pod_sync_csi::PLUGIN;
use pod_sync_direct_volumes::metrics::VolumeMetrics;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_telemetry::metrics::{counter, gauge_family};

use crate::claims::{Provided, Source};
use crate::selinux::Finding;

/// Plugin of a volume that no pod declared and no directory describes.
pub(crate) const NO_PLUGIN: &str = "N/A";

/// The plugin of a volume, as metrics of operations name it (`GetFullQualifiedPluginNameForVolume`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PluginLabel {
    name: String,
    migrated: bool,
}

impl PluginLabel {
    pub(crate) fn of(provided: &Provided) -> Self {
        match &provided.source {
            Source::Csi(csi) => Self { migrated: csi.migrated, ..Self::of_driver(&csi.driver) },
            Source::InTree(volume) => Self::of_plugin(volume.plugin().name()),
        }
    }

    pub(crate) fn of_driver(driver: &str) -> Self {
        Self { name: format!("{PLUGIN}:{driver}"), migrated: false }
    }

    pub(crate) fn of_plugin(name: &str) -> Self {
        Self { name: name.to_owned(), migrated: false }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModeLabel {
    access_mode: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VolumeLabel {
    volume_plugin: String,
    access_mode: &'static str,
}

/// The metrics. Values made by `default` share the same series.
#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    operations: VolumeMetrics,
    pod_errors: Family<ModeLabel, Gauge>,
    pod_warnings: Family<ModeLabel, Gauge>,
    volume_errors: Family<VolumeLabel, Gauge>,
    volume_warnings: Family<VolumeLabel, Gauge>,
    admitted: Family<VolumeLabel, Gauge>,
    reconstructed: Counter,
    not_reconstructed: Counter,
    cleaned: Counter,
    not_cleaned: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            operations: VolumeMetrics::default(),
            pod_errors: gauge_family(
                "volume_manager_selinux_pod_context_mismatch_errors_total",
                "Declarations of pods that were refused since their containers have several SELinux labels of a volume",
            ),
            pod_warnings: gauge_family(
                "volume_manager_selinux_pod_context_mismatch_warnings_total",
                "Declarations of pods whose containers have several SELinux labels of a volume, which is not mounted with a label",
            ),
            volume_errors: gauge_family(
                "volume_manager_selinux_volume_context_mismatch_errors_total",
                "Declarations of pods that were refused since another pod has the volume with another SELinux label",
            ),
            volume_warnings: gauge_family(
                "volume_manager_selinux_volume_context_mismatch_warnings_total",
                "Declarations of pods that share a volume with a pod of another SELinux label, where no label is mounted",
            ),
            admitted: gauge_family(
                "volume_manager_selinux_volumes_admitted_total",
                "Volumes with one SELinux label that their plugin can mount them with",
            ),
            reconstructed: counter(
                "reconstruct_volume_operations",
                "Directories of volumes found when the process started",
            ),
            not_reconstructed: counter(
                "reconstruct_volume_operations_errors",
                "Directories of volumes found when the process started whose metadata could not be read",
            ),
            cleaned: counter(
                "force_cleaned_failed_volume_operations",
                "Removals of directories of volumes whose metadata could not be read",
            ),
            not_cleaned: counter(
                "force_cleaned_failed_volume_operation_errors",
                "Failed removals of directories of volumes whose metadata could not be read",
            ),
        }
    }
}

impl Metrics {
    /// Records a completed operation.
    pub(crate) fn completed(
        &self,
        plugin: Option<&PluginLabel>,
        operation: &'static str,
        ok: bool,
        took: Duration,
    ) {
        let plugin = plugin.map_or((NO_PLUGIN, false), |plugin| (plugin.name.as_str(), plugin.migrated));
        self.operations.observe_of(plugin, operation, ok, took);
    }

    /// Counts what was found about the labels of a volume. A mismatch is an error where labels are enforced,
    /// and a warning otherwise.
    pub(crate) fn found(&self, finding: Finding, provided: &Provided, is_enforced: bool) {
        let access_mode = provided.access_mode;
        // Unlike metrics of operations, these separate plugin and driver with a slash.
        let volume_plugin = match &provided.source {
            Source::Csi(csi) => format!("{PLUGIN}/{}", csi.driver),
            Source::InTree(volume) => volume.plugin().name().to_owned(),
        };
        let of_volume = VolumeLabel { volume_plugin, access_mode };
        match (finding, is_enforced) {
            (Finding::PodMismatch, true) => self.pod_errors.get_or_create(&ModeLabel { access_mode }).inc(),
            (Finding::PodMismatch, false) => {
                self.pod_warnings.get_or_create(&ModeLabel { access_mode }).inc()
            }
            (Finding::VolumeMismatch, true) => self.volume_errors.get_or_create(&of_volume).inc(),
            (Finding::VolumeMismatch, false) => self.volume_warnings.get_or_create(&of_volume).inc(),
            (Finding::Admitted, _) => self.admitted.get_or_create(&of_volume).inc(),
        };
    }

    /// Counts the directories that were found at the start, and those among them without readable metadata.
    pub(crate) fn reconstructed(&self, all: usize, unreadable: usize) {
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        self.reconstructed.inc_by(count(all));
        self.not_reconstructed.inc_by(count(unreadable));
    }

    /// Counts the removal of a directory without readable metadata.
    pub(crate) fn force_cleaned(&self, ok: bool) {
        self.cleaned.inc();
        if !ok {
            self.not_cleaned.inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::claims::of_object;

    fn provided(name: &str, source: Value, modes: &[&str]) -> Provided {
        let mut volume = json!({"metadata": {"name": name}, "spec": {
            "accessModes": modes, "capacity": {"storage": "1Gi"},
        }});
        volume["spec"].as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
        of_object(&serde_json::from_value(volume).unwrap(), false).unwrap()
    }

    /// Returns the value of a series with all of these labels, in the text of all metrics; zero if there is
    /// none.
    fn value(name: &str, labels: &[&str]) -> u64 {
        let text = quintlet_telemetry::metrics::text();
        let is_it = |line: &&str| {
            line.split(['{', ' ']).next() == Some(name) && labels.iter().all(|label| line.contains(label))
        };
        text.lines().find(is_it).map_or(0, |line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
    }

    #[test]
    fn findings_are_counted_by_access_mode_and_plugin_with_its_driver() {
        let metrics = Metrics::default();
        let csi = |modes: &[&str]| {
            provided("pv", json!({"csi": {"driver": "found.d", "volumeHandle": "h"}}), modes)
        };
        let nfs = provided("pv", json!({"nfs": {"server": "s", "path": "/a"}}), &["ReadOnlyMany"]);
        let one = csi(&["ReadWriteOncePod"]);
        let most = csi(&["ReadOnlyMany", "ReadWriteOnce", "ReadWriteMany"]);
        metrics.found(Finding::PodMismatch, &one, one.is_for_one_pod);
        metrics.found(Finding::PodMismatch, &most, most.is_for_one_pod);
        metrics.found(Finding::PodMismatch, &nfs, nfs.is_for_one_pod);
        metrics.found(Finding::VolumeMismatch, &one, one.is_for_one_pod);
        metrics.found(Finding::VolumeMismatch, &one, one.is_for_one_pod);
        metrics.found(Finding::VolumeMismatch, &most, most.is_for_one_pod);
        metrics.found(Finding::Admitted, &csi(&["ReadWriteOnce", "ReadOnlyMany"]), false);
        let csi = "volume_plugin=\"kubernetes.io/csi/found.d\"";
        for (name, labels, expected) in [
            ("pod_context_mismatch_errors", &["access_mode=\"RWOP\""][..], 1),
            ("pod_context_mismatch_warnings", &["access_mode=\"RWX\""], 1),
            ("pod_context_mismatch_warnings", &["access_mode=\"ROX\""], 1),
            ("volume_context_mismatch_errors", &["access_mode=\"RWOP\"", csi], 2),
            ("volume_context_mismatch_warnings", &["access_mode=\"RWX\"", csi], 1),
            ("volumes_admitted", &["access_mode=\"ROX\"", csi], 1),
            ("volumes_admitted", &["access_mode=\"RWO\"", csi], 0),
        ] {
            let name = format!("volume_manager_selinux_{name}_total");
            assert_eq!(value(&name, labels), expected, "{name} {labels:?}");
        }
    }

    #[test]
    fn operations_are_counted_by_plugin_with_its_driver_and_whether_the_type_was_migrated() {
        let metrics = Metrics::default();
        let mut ebs =
            provided("pv", json!({"csi": {"driver": "done.d", "volumeHandle": "h"}}), &["ReadWriteOnce"]);
        let count = |migrated: &str, status: &str| {
            let labels = ["kubernetes.io/csi:done.d\"", "\"volume_mount\"", migrated, status];
            value("storage_operation_duration_seconds_count", &labels)
        };
        metrics.completed(Some(&PluginLabel::of(&ebs)), "volume_mount", false, Duration::from_secs(1));
        if let Source::Csi(csi) = &mut ebs.source {
            csi.migrated = true;
        }
        for _ in 0..2 {
            metrics.completed(Some(&PluginLabel::of(&ebs)), "volume_mount", true, Duration::from_secs(1));
        }
        let (migrated, not) = ("migrated=\"true\"", "migrated=\"false\"");
        assert_eq!(count(not, "fail-unknown"), 1);
        assert_eq!(count(migrated, "success"), 2);
        assert_eq!(count(not, "success"), 0);
        let local = provided("pv", json!({"local": {"path": "/a"}}), &["ReadWriteOnce"]);
        assert_eq!(PluginLabel::of(&local), PluginLabel::of_plugin("kubernetes.io/local-volume"));
    }
}
