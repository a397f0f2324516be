//! The memory that the containers of a pod request.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod};
use pod_sync_topology::ContainerKind;
use quintlet_model::pod as pods;
use quintlet_model::qos::{QosClass, container_requests, qos_class};

use crate::kind::MemoryKind;
use crate::reserved::Amounts;

/// The request of one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryRequest {
    /// Name of the container.
    pub container: String,
    /// Kind of the container.
    pub kind: ContainerKind,
    /// Bytes of each kind of memory.
    pub amounts: Amounts,
}

/// The requests of the containers of a Guaranteed pod, in the order of their starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodMemoryRequests {
    /// UID of the pod.
    pub pod: String,
    /// One for each container.
    pub containers: Vec<MemoryRequest>,
}

impl PodMemoryRequests {
    /// Returns the request of a container.
    #[must_use]
    pub fn container(&self, name: &str) -> Option<&MemoryRequest> {
        self.containers.iter().find(|request| request.container == name)
    }

    /// Returns the memory that the pod needs at once, of the kinds that a regular container requests (`getPodRequestedResources`).
    #[must_use]
    pub fn total(&self) -> Amounts {
        let regular = self.containers.iter().filter(|request| request.kind == ContainerKind::Regular);
        let kinds = regular.flat_map(|request| request.amounts.keys());
        kinds.map(|kind| (kind.clone(), self.total_of(kind))).collect()
    }

    fn total_of(&self, kind: &MemoryKind) -> u64 {
        let amount = |request: &MemoryRequest| request.amounts.get(kind).copied().unwrap_or(0);
        let running = self.containers.iter().filter(|request| request.kind != ContainerKind::Init);
        let mut most = running.map(amount).fold(0, u64::saturating_add);
        let mut started: u64 = 0;
        for request in &self.containers {
            match request.kind {
                ContainerKind::Init => most = most.max(started.saturating_add(amount(request))),
                ContainerKind::Sidecar => started = started.saturating_add(amount(request)),
                ContainerKind::Regular => {}
            }
        }
        most
    }
}

/// Returns the requests of a pod; none if its memory comes from any node: it is not Guaranteed, or has resources of the pod level.
#[must_use]
pub fn requests(pod: &Pod) -> Option<PodMemoryRequests> {
    if qos_class(pod) != QosClass::Guaranteed || has_pod_level_resources(pod) {
        return None;
    }
    let request = |container: &Container, kind| {
        let amounts = container_requests(container).into_iter().filter_map(|(name, amount)| {
            Some((MemoryKind::parse(&name)?, u64::try_from(amount.value()).unwrap_or(0)))
        });
        MemoryRequest {
            container: container.name.clone(),
            kind,
            amounts: amounts.collect::<BTreeMap<_, _>>(),
        }
    };
    let init = pods::init_containers(pod).iter().map(|container| {
        let kind = if pods::is_sidecar(container) { ContainerKind::Sidecar } else { ContainerKind::Init };
        request(container, kind)
    });
    let regular =
        pods::spec(pod).containers.iter().map(|container| request(container, ContainerKind::Regular));
    let containers = init.chain(regular).collect();
    Some(PodMemoryRequests { pod: pod.metadata.uid.clone().unwrap_or_default(), containers })
}

/// Returns whether the pod has requests or limits of its own (`IsPodLevelResourcesSet`).
fn has_pod_level_resources(pod: &Pod) -> bool {
    let resources = pods::spec(pod).resources.as_ref();
    let lists = resources.into_iter().flat_map(|own| [&own.requests, &own.limits]);
    let mut names = lists.flatten().flat_map(|list| list.keys());
    names.any(|name| name == "cpu" || MemoryKind::parse(name).is_some())
}

#[cfg(test)]
mod tests {
    use quintlet_testkit::pods::pod_json;
    use serde_json::{Value, json};

    use super::*;

    fn container(name: &str, memory: &str, pages: &str) -> Value {
        let amounts = json!({"cpu": "1", "memory": memory, "hugepages-2Mi": pages});
        json!({"name": name, "image": "i", "resources": {"requests": amounts, "limits": amounts}})
    }

    #[test]
    fn a_guaranteed_pod_needs_as_much_as_its_containers_use_at_once() {
        let total = |init: Value, containers: Value| -> Vec<(String, u64)> {
            let pod = pod_json(json!({"initContainers": init, "containers": containers}));
            let total = requests(&pod).unwrap().total().into_iter();
            total.map(|(kind, bytes)| (kind.to_string(), bytes >> 20)).collect()
        };
        let amounts =
            |pages, memory| vec![("hugepages-2Mi".to_owned(), pages), ("memory".to_owned(), memory)];
        let main = json!([container("a", "100Mi", "4Mi"), container("b", "50Mi", "2Mi")]);
        assert_eq!(total(json!([]), main.clone()), amounts(6, 150));
        assert_eq!(total(json!([container("i", "200Mi", "2Mi")]), main.clone()), amounts(6, 200));
        let mut sidecar = container("s", "30Mi", "2Mi");
        sidecar["restartPolicy"] = json!("Always");
        assert_eq!(total(json!([sidecar, container("i", "200Mi", "8Mi")]), main), amounts(10, 230));
    }

    #[test]
    fn other_pods_get_memory_from_any_node() {
        let mut burstable = container("a", "1Gi", "2Mi");
        burstable["resources"]["limits"]["memory"] = json!("2Gi");
        assert_eq!(requests(&pod_json(json!({"containers": [burstable]}))), None);
        let own = json!({"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}});
        let pod = pod_json(json!({"containers": [container("a", "1Gi", "2Mi")], "resources": own}));
        assert_eq!(requests(&pod), None);
    }
}
