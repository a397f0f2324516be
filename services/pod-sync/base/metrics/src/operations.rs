//! Metrics of the operations on pods: first syncs, image pulls and removals, image volumes, resizes, cgroups
//! (pkg/kubelet/metrics).

use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use quintlet_model::pod as pods;
use quintlet_model::quantity::Quantity;
use quintlet_telemetry::metrics::{
    Buckets, counter, counter_family, gauge, histogram_family_of, histogram_of,
};

/// Default buckets of Prometheus.
const SECONDS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
const PULLS: &[f64] = &[
    1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0,
    2700.0, 3600.0,
];
const RESIZES: &[f64] = &[
    10.0, 50.0, 100.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 30_000.0, 60_000.0, 120_000.0,
    300_000.0, 600_000.0,
];
const CONTAINERS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0];

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Labels of image sizes, each for images above this many bytes (`pkg/kubelet/metrics: GetImageSizeBucket`).
const SIZES: [(u64, &str); 12] = [
    (100 * GIB, "GT100GB"),
    (60 * GIB, "60GB-100GB"),
    (40 * GIB, "40GB-60GB"),
    (30 * GIB, "30GB-40GB"),
    (20 * GIB, "20GB-30GB"),
    (10 * GIB, "10GB-20GB"),
    (5 * GIB, "5GB-10GB"),
    (GIB, "1GB-5GB"),
    (500 * MIB, "500MB-1GB"),
    (100 * MIB, "100MB-500MB"),
    (10 * MIB, "10MB-100MB"),
    (0, "0-10MB"),
];

/// The cause of the removal of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageRemoval {
    /// The image was unused for longer than `imageMaximumGCAge`.
    Age,
    /// Disk space is needed.
    Space,
}

/// An operation on the cgroup of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupOperation {
    /// The cgroup is created with the limits of the pod.
    Create,
    /// Limits of an existing cgroup change.
    Update,
    /// The cgroup is removed.
    Destroy,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SizeLabel {
    image_size_in_bytes: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DetailLabel {
    reason_detail: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabel {
    operation_type: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SuccessLabel {
    success: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, EncodeLabelSet)]
struct ResizeLabel {
    resource: &'static str,
    requirement: &'static str,
    operation: &'static str,
}

/// Metrics of operations. All instances share the series of the process.
#[derive(Debug, Clone)]
pub struct Operations {
    containers: Histogram,
    worker_start: Histogram,
    /// preStop sleeps that ended with their container.
    pub sleeps_ended: Counter,
    /// Sandboxes of pods with a user namespace.
    pub user_namespaced_pods: Counter,
    /// Failed starts of sandboxes of pods with a user namespace.
    pub user_namespaced_pods_errors: Counter,
    /// Ephemeral containers of the desired pods.
    pub ephemeral_containers: Gauge,
    image_pulls: Family<SizeLabel, Histogram, Buckets>,
    image_removals: Family<ReasonLabel, Counter>,
    image_volumes: Counter,
    image_volumes_mounted: Counter,
    image_volumes_failed: Counter,
    cgroups: Family<OperationLabel, Histogram, Buckets>,
    resizes: Family<ResizeLabel, Counter>,
    resize_durations: Family<SuccessLabel, Histogram, Buckets>,
    infeasible: Family<DetailLabel, Counter>,
}

impl Default for Operations {
    fn default() -> Self {
        Self {
            containers: histogram_of(
                "kubelet_containers_per_pod_count",
                "The number of containers per pod",
                CONTAINERS,
            ),
            worker_start: histogram_of(
                "kubelet_pod_worker_start_duration_seconds",
                "Duration in seconds from kubelet seeing a pod to starting a worker",
                SECONDS,
            ),
            sleeps_ended: counter(
                "kubelet_sleep_action_terminated_early",
                "The number of times lifecycle sleep handler got terminated before it finishes",
            ),
            user_namespaced_pods: counter(
                "kubelet_started_user_namespaced_pods",
                "Cumulative number of pods with user namespaces started",
            ),
            user_namespaced_pods_errors: counter(
                "kubelet_started_user_namespaced_pods_errors",
                "Cumulative number of errors when starting pods with user namespaces",
            ),
            ephemeral_containers: gauge(
                "kubelet_managed_ephemeral_containers",
                "Current number of ephemeral containers in pods managed by this kubelet",
            ),
            image_pulls: histogram_family_of(
                "kubelet_image_pull_duration_seconds",
                "Duration in seconds to pull an image",
                PULLS,
            ),
            image_removals: counter_family(
                "kubelet_image_garbage_collected",
                "Total number of images garbage collected by the kubelet, whether through disk usage or image age",
            ),
            image_volumes: counter("kubelet_image_volume_requested", "Number of requested image volumes"),
            image_volumes_mounted: counter(
                "kubelet_image_volume_mounted_succeed",
                "Number of successful image volume mounts",
            ),
            image_volumes_failed: counter(
                "kubelet_image_volume_mounted_errors",
                "Number of failed image volume mounts",
            ),
            cgroups: histogram_family_of(
                "kubelet_cgroup_manager_duration_seconds",
                "Duration in seconds for cgroup manager operations. Broken down by method",
                SECONDS,
            ),
            resizes: counter_family(
                "kubelet_container_requested_resizes",
                "Number of requested resizes, counted at the container level. Different resources on the same container are counted \
                 separately",
            ),
            resize_durations: histogram_family_of(
                "kubelet_pod_resize_duration_milliseconds",
                "Duration in milliseconds to actuate a pod resize",
                RESIZES,
            ),
            infeasible: counter_family(
                "kubelet_pod_infeasible_resizes",
                "Number of infeasible resizes for pods",
            ),
        }
    }
}

impl Operations {
    /// Records the first sync of a pod, `waited` after the pod was accepted.
    pub fn pod_begins(&self, pod: &Pod, waited: Duration) {
        self.containers.observe(count(pods::spec(pod).containers.len()));
        self.worker_start.observe(waited.as_secs_f64());
    }

    /// Records the pull of an image of this size in bytes.
    pub fn image_pulled(&self, size: u64, took: Duration) {
        let label = SizeLabel { image_size_in_bytes: size_label(size) };
        self.image_pulls.get_or_create(&label).observe(took.as_secs_f64());
    }

    /// Counts the removal of an image.
    pub fn image_removed(&self, cause: ImageRemoval) {
        let reason = match cause {
            ImageRemoval::Age => "age",
            ImageRemoval::Space => "space",
        };
        self.image_removals.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// Counts the image volumes that a container mounts, after its creation. `error` is the error of the
    /// creation (`pkg/kubelet/kuberuntime: incrementImageVolumeMetrics`).
    pub fn image_volumes_mounted(&self, pod: &Pod, container: &Container, error: Option<&str>) {
        let is_image = |name: &str| {
            pods::spec(pod).volumes.iter().flatten().any(|v| v.name == name && v.image.is_some())
        };
        let mounts = container.volume_mounts.iter().flatten().filter(|mount| is_image(&mount.name));
        let has_failed = error.is_some_and(|error| error.starts_with(IMAGE_VOLUME_MOUNT_FAILED));
        for _ in mounts {
            self.image_volumes.inc();
            if has_failed {
                self.image_volumes_failed.inc();
            } else {
                self.image_volumes_mounted.inc();
            }
        }
    }

    /// Records an operation on the cgroup of a pod.
    pub fn cgroup(&self, operation: CgroupOperation, took: Duration) {
        let operation_type = match operation {
            CgroupOperation::Create => "create",
            CgroupOperation::Update => "update",
            CgroupOperation::Destroy => "destroy",
        };
        self.cgroups.get_or_create(&OperationLabel { operation_type }).observe(took.as_secs_f64());
    }

    /// Counts the resizes of containers between two specs (`pkg/kubelet: recordContainerResizeOperations`).
    pub fn resize_requested(&self, old: &Pod, new: &Pod) {
        for label in resizes(old, new) {
            self.resizes.get_or_create(&label).inc();
        }
    }

    /// Records the actuation of a resize.
    pub fn resized(&self, is_success: bool, took: Duration) {
        let label = SuccessLabel { success: if is_success { "true" } else { "false" } };
        self.resize_durations.get_or_create(&label).observe(took.as_secs_f64() * 1000.0);
    }

    /// Counts a resize that the node can never do.
    pub fn resize_infeasible(&self, reason_detail: &'static str) {
        self.infeasible.get_or_create(&DetailLabel { reason_detail }).inc();
    }
}

/// Begin of a runtime's error for an image volume
/// (`staging/src/k8s.io/cri-api/pkg/errors: ErrImageVolumeMountFailed`).
const IMAGE_VOLUME_MOUNT_FAILED: &str = "ImageVolumeMountFailed";

fn count(n: usize) -> f64 {
    f64::from(u32::try_from(n).unwrap_or(u32::MAX))
}

fn size_label(size: u64) -> &'static str {
    SIZES.iter().find(|(above, _)| size > *above).map_or("N/A", |(_, label)| label)
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let sidecars = pods::init_containers(pod).iter().filter(|c| pods::is_sidecar(c));
    pods::spec(pod).containers.iter().chain(sidecars)
}

fn resizes(old: &Pod, new: &Pod) -> Vec<ResizeLabel> {
    let mut all = Vec::new();
    for before in containers(old) {
        let Some(after) = containers(new).find(|c| c.name == before.name) else { continue };
        for resource in ["memory", "cpu"] {
            for requirement in ["requests", "limits"] {
                let amount_of = |c: &Container| amount(c.resources.as_ref(), requirement, resource);
                if let Some(operation) = operation(amount_of(before), amount_of(after)) {
                    all.push(ResizeLabel { resource, requirement, operation });
                }
            }
        }
    }
    all
}

fn amount(resources: Option<&ResourceRequirements>, requirement: &str, resource: &str) -> Option<Quantity> {
    let resources = resources?;
    let list = if requirement == "limits" { &resources.limits } else { &resources.requests };
    list.as_ref()?.get(resource).map(Quantity::of).filter(|amount| !amount.is_zero())
}

fn operation(old: Option<Quantity>, new: Option<Quantity>) -> Option<&'static str> {
    match (old, new) {
        (None, None) => None,
        (None, Some(_)) => Some("add"),
        (Some(_), None) => Some("remove"),
        (Some(old), Some(new)) if new > old => Some("increase"),
        (Some(old), Some(new)) if new < old => Some("decrease"),
        (Some(_), Some(_)) => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn sizes_of_images_have_the_labels_of_the_kubelet() {
        for (size, want) in [
            (0, "N/A"),
            (1, "0-10MB"),
            (10 * MIB, "0-10MB"),
            (10 * MIB + 1, "10MB-100MB"),
            (2 * GIB, "1GB-5GB"),
            (u64::MAX, "GT100GB"),
        ] {
            assert_eq!(size_label(size), want, "{size}");
        }
    }

    fn pod(containers: Value, init: Value) -> Pod {
        serde_json::from_value(json!({"spec": {"containers": containers, "initContainers": init}})).unwrap()
    }

    #[test]
    fn each_changed_amount_of_a_container_is_a_resize() {
        let a = |resources: Value| json!([{"name": "a", "image": "i", "resources": resources}]);
        let none = json!([]);
        let resized = |old: Value, new: Value| -> Vec<String> {
            let all = resizes(&pod(a(old), none.clone()), &pod(a(new), none.clone()));
            all.iter().map(|l| format!("{} {} {}", l.resource, l.requirement, l.operation)).collect()
        };
        let both = |cpu: &str, memory: &str| json!({"requests": {"cpu": cpu}, "limits": {"memory": memory}});
        assert_eq!(resized(both("1", "1Gi"), both("1000m", "1024Mi")), Vec::<String>::new());
        assert_eq!(
            resized(both("1", "1Gi"), both("2", "1Mi")),
            ["memory limits decrease", "cpu requests increase"]
        );
        assert_eq!(resized(json!({}), both("2", "1Mi")), ["memory limits add", "cpu requests add"]);
        assert_eq!(resized(both("2", "1Mi"), json!({})), ["memory limits remove", "cpu requests remove"]);
        let side = |policy: &str, cpu: &str| json!([{"name": "s", "image": "i", "restartPolicy": policy, "resources": {"requests": {"cpu": cpu}}}]);
        let changed = |policy: &str| {
            resizes(&pod(none.clone(), side(policy, "1")), &pod(none.clone(), side(policy, "2"))).len()
        };
        assert_eq!((changed("Always"), changed("Never")), (1, 0));
    }

    #[test]
    fn mounts_of_image_volumes_are_counted_by_result() {
        let operations = Operations::default();
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "containers": [{"name": "a", "image": "i", "volumeMounts": [
                {"name": "image", "mountPath": "/a"}, {"name": "other", "mountPath": "/b"}]}],
            "volumes": [{"name": "image", "image": {"reference": "r"}}, {"name": "other", "emptyDir": {}}]}}))
        .unwrap();
        let container = &pods::spec(&pod).containers[0];
        let before = (operations.image_volumes_mounted.get(), operations.image_volumes_failed.get());
        operations.image_volumes_mounted(&pod, container, None);
        operations.image_volumes_mounted(&pod, container, Some("something else"));
        operations.image_volumes_mounted(&pod, container, Some("ImageVolumeMountFailed: no"));
        let after = (operations.image_volumes_mounted.get(), operations.image_volumes_failed.get());
        assert_eq!((after.0 - before.0, after.1 - before.1), (2, 1));
    }
}
