//! The result of the preparation of a pod, which later passes read and refresh.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, ResourceRequirements, Secret, Volume};
use pod_sync_clients::EventType;
use pod_sync_cri_config::mounts::MountedVolumes;
use pod_sync_decisions::container_status::WaitingReason;
use pod_sync_decisions::waiting::StartFailure;
use pod_sync_volume_manager::Again;
use quintlet_cri_api::v1 as cri;

use crate::context::Reporting;
use crate::image;

/// The set-up of the pod by the last sync that started something.
#[derive(Default)]
pub(super) struct PodSetup {
    pub(super) volumes: Option<MountedVolumes>,
    // The last set-up or refresh of the volumes with content.
    pub(super) refreshed: Option<VolumeRefresh>,
    // Time (CLOCK_BOOTTIME) at which a failed refresh is due.
    pub(super) refresh_retry: Option<Duration>,
    pub(super) pull_secrets: Vec<Arc<Secret>>,
    // Names of pull secrets that could not be read, until a failed pull has reported them.
    pub(super) missing_pull_secrets: Vec<String>,
    pub(super) runtime_handler: String,
    pub(super) user_namespace: Option<cri::UserNamespace>,
    pub(super) image_volumes: image::Volumes,
}

impl PodSetup {
    /// Reports the pull secrets that could not be read, after a container waits for this reason. Does so once
    /// per preparation, and only if a pull has failed, as kubelet 1.37 (`pkg/kubelet: Kubelet.SyncPod`).
    pub(super) fn report_missing_pull_secrets(
        &mut self,
        reporting: &Reporting,
        pod: &Pod,
        waiting: &WaitingReason,
    ) {
        let failures = [
            StartFailure::ErrImagePull,
            StartFailure::RegistryUnavailable,
            StartFailure::SignatureValidationFailed,
        ];
        let is_failed_pull = failures.iter().any(|failure| failure.as_str() == waiting.reason);
        if !is_failed_pull || self.missing_pull_secrets.is_empty() {
            return;
        }
        let missing = std::mem::take(&mut self.missing_pull_secrets).join(", ");
        let text = format!(
            "Unable to retrieve some image pull secrets ({missing}); attempting to pull the image may not succeed."
        );
        let reason = "FailedToRetrieveImagePullSecret";
        reporting.events.pod(pod, EventType::Warning, reason, &text, "");
    }
}

type Map = Option<BTreeMap<String, String>>;

/// The last set-up or refresh of the volumes.
#[derive(Debug, PartialEq)]
pub(super) struct VolumeRefresh {
    // CLOCK_BOOTTIME.
    at: Duration,
    labels: Map,
    annotations: Map,
    // Resources that files of the downward API show.
    resources: ShownResources,
    // Number of changes of the ConfigMaps, Secrets and certificates of the pod.
    object_changes: u64,
}

type ShownResources = Vec<Option<ResourceRequirements>>;

/// Returns the resources of the pod and its containers if a volume shows one of them (`resourceFieldRef`).
fn shown_resources(pod: &Pod) -> ShownResources {
    let spec = quintlet_model::pod::spec(pod);
    let projected = |v: &Volume| {
        let sources = v.projected.iter().flat_map(|p| p.sources.iter().flatten());
        sources.filter_map(|s| s.downward_api.as_ref()?.items.clone()).flatten().collect::<Vec<_>>()
    };
    let files =
        |v: &Volume| v.downward_api.iter().filter_map(|d| d.items.clone()).flatten().collect::<Vec<_>>();
    let mut shown = spec.volumes.iter().flatten().flat_map(|v| files(v).into_iter().chain(projected(v)));
    if !shown.any(|file| file.resource_field_ref.is_some()) {
        return ShownResources::new();
    }
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    containers.map(|c| c.resources.clone()).chain([spec.resources.clone()]).collect()
}

impl VolumeRefresh {
    /// `object_changes` is taken before the objects are read: a change during a refresh causes another one.
    pub(super) fn of(pod: &Pod, object_changes: u64, at: Duration) -> Self {
        let (labels, annotations) = (pod.metadata.labels.clone(), pod.metadata.annotations.clone());
        Self { at, labels, annotations, resources: shown_resources(pod), object_changes }
    }

    /// The volumes may be outdated: labels, annotations, resources or objects have changed, or the interval
    /// has passed. A kubelet sets up these volumes in each sync of the pod
    /// (`pkg/volume/downwardapi: RequiresRemount`).
    pub(super) fn due(&self, pod: &Pod, object_changes: u64, now: Duration, interval: Duration) -> Again {
        let has_changed = self.object_changes != object_changes
            || self.labels != pod.metadata.labels
            || self.annotations != pod.metadata.annotations
            || self.resources != shown_resources(pod);
        if has_changed {
            Again::Changed
        } else if now.saturating_sub(self.at) >= interval {
            Again::Content
        } else {
            Again::None
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn pod(cpu: &str, volume: &Value) -> Pod {
        let resources = json!({"limits": {"cpu": cpu}});
        let pod = json!({"metadata": {"name": "p", "labels": {"a": "1"}}, "spec": {
            "containers": [{"name": "c", "resources": resources}], "volumes": [volume]}});
        serde_json::from_value(pod).unwrap()
    }

    #[test]
    fn files_of_resources_are_outdated_after_a_resize_and_others_are_not() {
        let file =
            json!({"path": "cpu", "resourceFieldRef": {"containerName": "c", "resource": "limits.cpu"}});
        let label = json!({"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}});
        for (volume, want) in [
            (json!({"name": "v", "downwardAPI": {"items": [label, file]}}), Again::Changed),
            (
                json!({"name": "v", "projected": {"sources": [{"downwardAPI": {"items": [file]}}]}}),
                Again::Changed,
            ),
            (json!({"name": "v", "downwardAPI": {"items": [label]}}), Again::None),
            (json!({"name": "v", "emptyDir": {}}), Again::None),
        ] {
            let (before, after) = (pod("1", &volume), pod("2", &volume));
            let refresh = VolumeRefresh::of(&before, 0, Duration::ZERO);
            assert_eq!(refresh.due(&before, 0, Duration::ZERO, HOUR), Again::None, "{volume}");
            assert_eq!(refresh.due(&after, 0, Duration::ZERO, HOUR), want, "{volume}");
        }
    }

    #[test]
    fn volumes_are_outdated_after_a_change_of_the_pod_or_its_objects_and_after_the_interval() {
        let before = pod("1", &json!({"name": "v", "emptyDir": {}}));
        let refresh = VolumeRefresh::of(&before, 3, HOUR);
        let mut labelled = before.clone();
        labelled.metadata.labels = None;
        assert_eq!(refresh.due(&labelled, 3, HOUR, HOUR), Again::Changed);
        assert_eq!(refresh.due(&before, 4, HOUR, HOUR), Again::Changed);
        assert_eq!(refresh.due(&before, 3, HOUR, HOUR), Again::None);
        assert_eq!(refresh.due(&before, 3, HOUR.saturating_mul(2), HOUR), Again::Content);
    }
}
