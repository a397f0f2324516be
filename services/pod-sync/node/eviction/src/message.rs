//! Texts and annotations of an eviction for a threshold (`pkg/kubelet/eviction: evictionMessage`).

use std::collections::BTreeMap;
use std::fmt::Write as _;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_decisions::qos;
use quintlet_model::pod;
use quintlet_model::quantity::{Format, Quantity};

use crate::signal::Resource;
use crate::thresholds::Threshold;
use crate::usage::{ContainerUsage, Observations, PodUsage};

/// Text of the event, the status and the DisruptionTarget condition of an evicted pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EvictionMessage {
    /// The message. The space at the end is the kubelet's.
    pub text: String,
    /// Annotations of the event.
    pub annotations: BTreeMap<String, String>,
}

/// Returns the message of an eviction. `crossed` are the thresholds of this round in their order.
#[must_use]
pub(crate) fn eviction_message(
    resource: Resource,
    pod: &Pod,
    usage: Option<&PodUsage>,
    crossed: &[Threshold],
    observations: &Observations,
) -> EvictionMessage {
    let mut text = format!("The node was low on resource: {resource}. ");
    let observed = crossed
        .iter()
        .filter(|threshold| threshold.signal.resource() == resource)
        .find_map(|threshold| Some((threshold, observations.get(&threshold.signal)?)));
    if let Some((threshold, observed)) = observed {
        let limit = threshold.value.of(observed.capacity);
        let _ = write!(text, "Threshold quantity: {limit}, available: {}. ", observed.available);
    }
    let mut annotations = BTreeMap::new();
    let Some(usage) = usage else { return EvictionMessage { text, annotations } };
    if let Some((used, requested)) = pod_level_memory(resource, pod, usage) {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let _ = write!(
            text,
            "Pod {name} was using {used}, request is {requested}, has larger consumption of {resource}. "
        );
        annotations.insert("offending_pod".to_owned(), name.to_owned());
        annotations.insert("offending_pod_usage".to_owned(), used.to_string());
    }
    let (mut names, mut amounts) = (Vec::new(), Vec::new());
    for (container, used, requested) in containers_above_request(resource, pod, usage) {
        let _ = write!(
            text,
            "Container {container} was using {used}, request is {requested}, has larger consumption of {resource}. "
        );
        names.push(container);
        amounts.push(used.to_string());
    }
    annotations.insert("offending_containers".to_owned(), names.join(","));
    annotations.insert("offending_containers_usage".to_owned(), amounts.join(","));
    annotations.insert("starved_resource".to_owned(), resource.to_string());
    EvictionMessage { text, annotations }
}

// The kubelet names the pod whether it is above its request or not.
fn pod_level_memory(resource: Resource, pod: &Pod, usage: &PodUsage) -> Option<(Quantity, Quantity)> {
    let requests = pod::spec(pod).resources.as_ref()?.requests.as_ref()?;
    let requested = requests.get(resource.as_str()).filter(|_| resource == Resource::Memory)?;
    Some((Quantity::from_units(usage.working_set?, Format::Binary), Quantity::of(requested)))
}

fn containers_above_request<'a>(
    resource: Resource,
    pod: &'a Pod,
    usage: &'a PodUsage,
) -> impl Iterator<Item = (&'a str, Quantity, Quantity)> {
    let spec = pod::spec(pod);
    usage.containers.iter().filter_map(move |used| {
        let mut all = spec.containers.iter().chain(spec.init_containers.iter().flatten());
        let container = all.find(|c| c.name == used.name)?;
        let requested =
            qos::container_requests(container).get(resource.as_str()).copied().unwrap_or_default();
        let amount = Quantity::from_units(used_by(resource, used)?, Format::Binary);
        (amount > requested).then_some((container.name.as_str(), amount, requested))
    })
}

fn used_by(resource: Resource, container: &ContainerUsage) -> Option<i64> {
    match resource {
        Resource::Memory => container.working_set,
        Resource::EphemeralStorage => {
            Some(container.writable_layer.bytes?.saturating_add(container.logs.bytes?))
        }
        Resource::Inodes | Resource::Pids => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::signal::Signal;
    use crate::support::{MIB, free, hard, pod};
    use crate::usage::FileUsage;

    fn mib(count: i64) -> FileUsage {
        FileUsage { bytes: Some(count * MIB), inodes: Some(7) }
    }

    fn usage() -> PodUsage {
        let container = |name: &str, memory, layer, logs| ContainerUsage {
            name: name.into(),
            working_set: Some(memory * MIB),
            writable_layer: mib(layer),
            logs: mib(logs),
        };
        PodUsage {
            working_set: Some(300 * MIB),
            containers: vec![container("a", 150, 30, 2), container("b", 50, 0, 1), container("i", 5, 0, 0)],
            ..PodUsage::default()
        }
    }

    fn spec() -> serde_json::Value {
        let requests = json!({ "requests": { "memory": "100Mi", "ephemeral-storage": "1Mi" } });
        json!({
            "containers": [{ "name": "a", "resources": requests }, { "name": "b", "resources": requests }],
            "initContainers": [{ "name": "i", "restartPolicy": "Always" }],
        })
    }

    #[test]
    fn the_message_names_threshold_and_containers_above_their_request() {
        let observed = free(Signal::MemoryAvailable, 90 * MIB, 1000 * MIB, Duration::ZERO);
        let thresholds = [hard(Signal::MemoryAvailable, 100 * MIB)];
        let message =
            eviction_message(Resource::Memory, &pod("p", spec()), Some(&usage()), &thresholds, &observed);
        assert_eq!(
            message.text,
            "The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Mi. \
             Container a was using 150Mi, request is 100Mi, has larger consumption of memory. \
             Container i was using 5Mi, request is 0, has larger consumption of memory. "
        );
        let want = [
            ("offending_containers", "a,i"),
            ("offending_containers_usage", "150Mi,5Mi"),
            ("starved_resource", "memory"),
        ];
        let want: BTreeMap<_, _> = want.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        assert_eq!(message.annotations, want);
    }

    #[test]
    fn disks_count_layers_and_logs_and_inodes_no_container() {
        let observed = free(Signal::NodeFsAvailable, 5 * MIB, 1000 * MIB, Duration::ZERO);
        let thresholds = [hard(Signal::NodeFsAvailable, 100 * MIB)];
        let pod = pod("p", spec());
        let message =
            |resource| eviction_message(resource, &pod, Some(&usage()), &thresholds, &observed).text;
        assert_eq!(
            message(Resource::EphemeralStorage),
            "The node was low on resource: ephemeral-storage. Threshold quantity: 100Mi, available: 5Mi. \
             Container a was using 32Mi, request is 1Mi, has larger consumption of ephemeral-storage. "
        );
        assert_eq!(message(Resource::Inodes), "The node was low on resource: inodes. ");
        assert_eq!(message(Resource::Pids), "The node was low on resource: pids. ");
    }

    #[test]
    fn a_pod_with_a_request_of_its_own_is_named() {
        let mut spec = spec();
        spec["resources"] = json!({ "requests": { "memory": "400Mi" } });
        let message =
            eviction_message(Resource::Memory, &pod("p", spec), Some(&usage()), &[], &Observations::new());
        assert!(
            message.text.starts_with(
                "The node was low on resource: memory. \
                 Pod p was using 300Mi, request is 400Mi, has larger consumption of memory. "
            ),
            "{}",
            message.text
        );
        assert_eq!(message.annotations["offending_pod"], "p");
        assert_eq!(message.annotations["offending_pod_usage"], "300Mi");
    }

    #[test]
    fn a_pod_without_statistics_has_only_the_resource() {
        let message = eviction_message(Resource::Pids, &pod("p", spec()), None, &[], &Observations::new());
        assert_eq!(message.text, "The node was low on resource: pids. ");
        assert!(message.annotations.is_empty());
    }
}
