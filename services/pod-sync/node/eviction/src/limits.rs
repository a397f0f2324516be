//! Pods above their own limits of local storage (`pkg/kubelet/eviction: localStorageEviction`).

use k8s_openapi::api::core::v1::{Pod, Volume};
use pod_sync_decisions::qos;
use quintlet_model::pod;
use quintlet_model::quantity::{Format, Quantity};

use crate::layout::Layout;
use crate::signal::Resource;
use crate::usage::PodUsage;

/// A limit that a pod exceeds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExceededLimit {
    /// `sizeLimit` of an emptyDir volume.
    EmptyDir {
        /// Name of the volume.
        volume: String,
        /// `sizeLimit` of the volume.
        limit: Quantity,
    },
    /// Sum of the ephemeral-storage limits of the pod.
    Pod {
        /// Sum of the limits of the containers.
        limit: Quantity,
    },
    /// Ephemeral-storage limit of a container.
    Container {
        /// Name of the container.
        container: String,
        /// Limit of the container.
        limit: Quantity,
    },
}

impl ExceededLimit {
    /// Labels of `kubelet_evictions` for limits of volumes, pods and containers.
    pub const SIGNALS: [&str; 3] = ["emptydirfs.limit", "ephemeralpodfs.limit", "ephemeralcontainerfs.limit"];

    /// Returns the label of `kubelet_evictions`.
    #[must_use]
    pub fn signal(&self) -> &'static str {
        let [volume, pod, container] = Self::SIGNALS;
        match self {
            Self::EmptyDir { .. } => volume,
            Self::Pod { .. } => pod,
            Self::Container { .. } => container,
        }
    }

    /// Returns the message of the event and of the pod's status. The space at the end is the kubelet's.
    #[must_use]
    pub fn message(&self) -> String {
        match self {
            Self::EmptyDir { volume, limit } => {
                format!("Usage of EmptyDir volume {volume:?} exceeds the limit {:?}. ", limit.to_string())
            }
            Self::Pod { limit } => {
                format!("Pod ephemeral local storage usage exceeds the total limit of containers {limit}. ")
            }
            Self::Container { container, limit } => {
                let limit = limit.to_string();
                format!("Container {container} exceeded its local ephemeral storage limit {limit:?}. ")
            }
        }
    }
}

/// Returns whether a pod has a volume with a limit of local storage.
#[must_use]
pub fn limits_volumes(pod: &Pod) -> bool {
    let has_size_limit = |volume: &Volume| volume.empty_dir.as_ref().is_some_and(|v| v.size_limit.is_some());
    pod::spec(pod).volumes.iter().flatten().any(has_size_limit)
}

/// Returns whether a pod or a container of it has a limit of local storage.
#[must_use]
pub fn limits_containers(pod: &Pod) -> bool {
    qos::pod_limits(pod).contains_key(Resource::EphemeralStorage.as_str())
}

/// Returns the first limit of local storage that a pod exceeds.
#[must_use]
pub fn exceeded(
    pod: &Pod,
    usage: &PodUsage,
    layout: Layout,
    skips_memory_volumes: bool,
) -> Option<ExceededLimit> {
    empty_dir(pod, usage, skips_memory_volumes)
        .or_else(|| whole_pod(pod, usage))
        .or_else(|| container(pod, usage, layout))
}

fn bytes(count: i64) -> Quantity {
    Quantity::from_units(count.max(0), Format::Binary)
}

fn empty_dir(pod: &Pod, usage: &PodUsage, skips_memory: bool) -> Option<ExceededLimit> {
    pod::spec(pod).volumes.iter().flatten().find_map(|volume| {
        let source = volume.empty_dir.as_ref()?;
        if skips_memory && source.medium.as_deref() == Some("Memory") {
            return None;
        }
        let limit = Quantity::of(source.size_limit.as_ref()?);
        let used = bytes(usage.volumes.get(&volume.name)?.bytes?);
        (limit.is_positive() && used > limit)
            .then(|| ExceededLimit::EmptyDir { volume: volume.name.clone(), limit })
    })
}

fn whole_pod(pod: &Pod, usage: &PodUsage) -> Option<ExceededLimit> {
    let limit = *qos::pod_limits(pod).get(Resource::EphemeralStorage.as_str())?;
    (bytes(usage.ephemeral_storage?) > limit).then_some(ExceededLimit::Pod { limit })
}

// Restartable init containers have limits of their own, as in kubelet 1.37
// (`pkg/kubelet/eviction: containerEphemeralStorageLimitEviction`). Writable layers on a file system of
// images do not count, as in the kubelet.
fn container(pod: &Pod, usage: &PodUsage, layout: Layout) -> Option<ExceededLimit> {
    usage.containers.iter().find_map(|used| {
        let sidecars = pod::init_containers(pod).iter().filter(|c| pod::is_sidecar(c));
        let container = pod::spec(pod).containers.iter().chain(sidecars).find(|c| c.name == used.name)?;
        let limit = *qos::container_limits(container).get(Resource::EphemeralStorage.as_str())?;
        let layer = match layout {
            Layout::Single => used.writable_layer.bytes.unwrap_or(0),
            Layout::SeparateImages | Layout::Split => 0,
        };
        let total = used.logs.bytes.unwrap_or(0).saturating_add(layer);
        (!limit.is_zero() && bytes(total) > limit)
            .then(|| ExceededLimit::Container { container: used.name.clone(), limit })
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;
    use crate::support::{MIB, pod};
    use crate::usage::{ContainerUsage, FileUsage};

    fn mib(count: i64) -> FileUsage {
        FileUsage { bytes: Some(count * MIB), inodes: Some(1) }
    }

    #[test]
    fn the_first_limit_that_is_exceeded_is_named_with_the_text_of_the_kubelet() {
        let limit = json!({ "limits": { "ephemeral-storage": "100Mi" } });
        let pod = pod(
            "p",
            json!({
                "containers": [{ "name": "a", "resources": limit }, { "name": "b", "resources": limit }],
                "volumes": [
                    { "name": "scratch", "emptyDir": { "sizeLimit": "50Mi" } },
                    { "name": "memory", "emptyDir": { "medium": "Memory", "sizeLimit": "10Mi" } },
                    { "name": "free", "emptyDir": {} },
                    { "name": "zero", "emptyDir": { "sizeLimit": "0" } },
                ],
            }),
        );
        let none = (None, None);
        // Volumes, the whole pod, layer and logs of container a.
        for (volumes, whole, layer, logs, single, separate) in [
            (vec![("scratch", 50), ("free", 900), ("zero", 900)], 200, 100, 0, none.0, none.1),
            (
                vec![("scratch", 51)],
                300,
                0,
                0,
                Some("Usage of EmptyDir volume \"scratch\" exceeds the limit \"50Mi\". "),
                Some("Usage of EmptyDir volume \"scratch\" exceeds the limit \"50Mi\". "),
            ),
            (
                vec![("memory", 11)],
                0,
                0,
                0,
                Some("Usage of EmptyDir volume \"memory\" exceeds the limit \"10Mi\". "),
                Some("Usage of EmptyDir volume \"memory\" exceeds the limit \"10Mi\". "),
            ),
            (
                vec![],
                201,
                150,
                0,
                Some("Pod ephemeral local storage usage exceeds the total limit of containers 200Mi. "),
                Some("Pod ephemeral local storage usage exceeds the total limit of containers 200Mi. "),
            ),
            (
                vec![],
                150,
                60,
                41,
                Some("Container a exceeded its local ephemeral storage limit \"100Mi\". "),
                None,
            ),
            (
                vec![],
                150,
                0,
                101,
                Some("Container a exceeded its local ephemeral storage limit \"100Mi\". "),
                Some("Container a exceeded its local ephemeral storage limit \"100Mi\". "),
            ),
        ] {
            let volumes: BTreeMap<_, _> = volumes.into_iter().map(|(n, m)| (n.to_owned(), mib(m))).collect();
            let a = ContainerUsage {
                name: "a".into(),
                writable_layer: mib(layer),
                logs: mib(logs),
                ..ContainerUsage::default()
            };
            let usage = PodUsage {
                ephemeral_storage: Some(whole * MIB),
                containers: vec![a],
                volumes,
                ..PodUsage::default()
            };
            for (layout, want) in [(Layout::Single, single), (Layout::SeparateImages, separate)] {
                let found = exceeded(&pod, &usage, layout, false).map(|limit| limit.message());
                assert_eq!(found.as_deref(), want, "{layout:?} {usage:?}");
            }
        }
    }

    #[test]
    fn the_limit_of_a_restartable_init_container_counts_by_itself() {
        let limits = |amount: &str| json!({ "limits": { "ephemeral-storage": amount } });
        let pod = pod(
            "p",
            json!({
                "initContainers": [
                    { "name": "side", "restartPolicy": "Always", "resources": limits("5Mi") },
                    { "name": "init", "resources": limits("5Mi") },
                ],
                "containers": [{ "name": "main", "resources": limits("500Mi") }],
            }),
        );
        for (name, want) in [
            ("side", Some("Container side exceeded its local ephemeral storage limit \"5Mi\". ")),
            ("init", None),
            ("main", None),
        ] {
            let container =
                ContainerUsage { name: name.into(), writable_layer: mib(20), ..ContainerUsage::default() };
            let usage = PodUsage {
                ephemeral_storage: Some(20 * MIB),
                containers: vec![container],
                ..PodUsage::default()
            };
            let found = exceeded(&pod, &usage, Layout::Single, false).map(|limit| limit.message());
            assert_eq!(found.as_deref(), want, "{name}");
        }
    }

    #[test]
    fn limits_of_memory_backed_volumes_are_left_to_the_kernel_if_they_can_be_resized() {
        let volume = |medium: &str| json!({"name": "v", "emptyDir": {"medium": medium, "sizeLimit": "1Mi"}});
        let usage = PodUsage { volumes: [("v".to_owned(), mib(2))].into(), ..PodUsage::default() };
        for (medium, skips, want) in
            [("Memory", false, true), ("Memory", true, false), ("", true, true), ("", false, true)]
        {
            let pod = pod("p", json!({"containers": [{"name": "c"}], "volumes": [volume(medium)]}));
            assert_eq!(exceeded(&pod, &usage, Layout::Single, skips).is_some(), want, "{medium} {skips}");
        }
    }

    #[test]
    fn a_pod_without_figures_exceeds_nothing() {
        let spec = json!({
            "containers": [{ "name": "c", "resources": { "limits": { "ephemeral-storage": "1" } } }],
            "volumes": [{ "name": "v", "emptyDir": { "sizeLimit": "1" } }],
        });
        assert_eq!(exceeded(&pod("p", spec), &PodUsage::default(), Layout::Single, false), None);
    }

    #[test]
    fn one_container_without_a_limit_leaves_the_limit_to_the_others() {
        let limit = json!({ "limits": { "ephemeral-storage": "100Mi" } });
        let pod = pod("p", json!({ "containers": [{ "name": "a", "resources": limit }, { "name": "b" }] }));
        let usage = PodUsage { ephemeral_storage: Some(101 * MIB), ..PodUsage::default() };
        // As in the kubelet: the sum of the limits that exist.
        let limit = Quantity::parse("100Mi").unwrap();
        assert_eq!(exceeded(&pod, &usage, Layout::Single, false), Some(ExceededLimit::Pod { limit }));
    }
}
