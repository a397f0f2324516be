//! The memory that the containers of a pod request.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod};
use pod_sync_topology::{ContainerKind, PodLevel};
use quintlet_model::pod as pods;
use quintlet_model::qos::{self, QosClass, ResourceList, container_requests, qos_class};

use crate::error::EmptyPodMemory;
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
    /// Bytes of each kind of memory that the pod requests as a whole; none if its containers request them.
    pub budget: Option<Amounts>,
}

impl PodMemoryRequests {
    /// Returns the request of a container.
    #[must_use]
    pub fn container(&self, name: &str) -> Option<&MemoryRequest> {
        self.containers.iter().find(|request| request.container == name)
    }

    /// Returns the memory that the pod needs at once, of the kinds that a regular container requests
    /// (`getPodRequestedResources`).
    #[must_use]
    pub fn total(&self) -> Amounts {
        let regular = self.containers.iter().filter(|request| request.kind == ContainerKind::Regular);
        let kinds = regular.flat_map(|request| request.amounts.keys());
        kinds.map(|kind| (kind.clone(), self.total_of(kind))).collect()
    }

    /// Checks that each container of a pod with this budget has memory of each kind
    /// (`validatePodScopeResources`).
    ///
    /// # Errors
    /// The first kind of memory that a container has none of.
    pub fn check_pool(&self, budget: &Amounts) -> Result<(), EmptyPodMemory> {
        budget.iter().try_for_each(|(kind, bytes)| self.check_pool_of(kind, *bytes))
    }

    fn check_pool_of(&self, kind: &MemoryKind, budget: u64) -> Result<(), EmptyPodMemory> {
        let mut exclusive: u64 = 0;
        let mut needs_pool = false;
        for request in &self.containers {
            let available = budget.saturating_sub(exclusive);
            let requested = request.amounts.get(kind).copied().unwrap_or(0);
            match (request.kind, request.amounts.is_empty()) {
                (ContainerKind::Init, true) if available == 0 => {
                    return Err(EmptyPodMemory::SharedInitContainer(kind.clone()));
                }
                (ContainerKind::Init, false) if requested > available => {
                    return Err(EmptyPodMemory::InitContainer { kind: kind.clone(), requested, available });
                }
                (ContainerKind::Init, _) => {}
                (ContainerKind::Sidecar | ContainerKind::Regular, true) => needs_pool = true,
                (ContainerKind::Sidecar | ContainerKind::Regular, false) => {
                    exclusive = exclusive.saturating_add(requested);
                }
            }
        }
        let is_empty = needs_pool && exclusive >= budget;
        if is_empty { Err(EmptyPodMemory::SharedContainer(kind.clone())) } else { Ok(()) }
    }

    /// Divides the memory that a pod has as a whole (`AllocatePod`). Containers with a request get as much as
    /// they request. Other init containers get what the sidecars before them leave, all others get what is
    /// left in the end.
    pub(crate) fn divide(&self, budget: &Amounts) -> BTreeMap<String, Amounts> {
        let without = |pool: &Amounts, taken: &Amounts| -> Amounts {
            let left = |(kind, bytes): (&MemoryKind, &u64)| {
                let left = bytes.saturating_sub(taken.get(kind).copied().unwrap_or(0));
                (left > 0).then(|| (kind.clone(), left))
            };
            pool.iter().filter_map(left).collect()
        };
        let mut parts = BTreeMap::new();
        let mut pool = budget.clone();
        for request in &self.containers {
            match (request.kind, request.amounts.is_empty()) {
                (ContainerKind::Init, true) => parts.insert(request.container.clone(), pool.clone()),
                (ContainerKind::Sidecar | ContainerKind::Regular, true) => None,
                (kind, false) => {
                    if kind != ContainerKind::Init {
                        pool = without(&pool, &request.amounts);
                    }
                    parts.insert(request.container.clone(), request.amounts.clone())
                }
            };
        }
        for request in &self.containers {
            parts.entry(request.container.clone()).or_insert_with(|| pool.clone());
        }
        parts
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

/// Returns the requests of a pod; none if its memory comes from any node: it is not Guaranteed, or has
/// resources of the pod level that `level` does not admit. Of a pod with such resources, only Guaranteed
/// containers have requests.
#[must_use]
pub fn requests(pod: &Pod, level: PodLevel) -> Option<PodMemoryRequests> {
    let has_own = qos::has_pod_level_resources(pod);
    if qos_class(pod) != QosClass::Guaranteed || has_own && level == PodLevel::Unmanaged {
        return None;
    }
    let request = |container: &Container, kind| {
        let has_request = !has_own || qos::is_guaranteed_container(container);
        let amounts = if has_request { amounts(container_requests(container)) } else { Amounts::new() };
        MemoryRequest { container: container.name.clone(), kind, amounts }
    };
    let init = pods::init_containers(pod).iter().map(|container| {
        let kind = if pods::is_sidecar(container) { ContainerKind::Sidecar } else { ContainerKind::Init };
        request(container, kind)
    });
    let regular =
        pods::spec(pod).containers.iter().map(|container| request(container, ContainerKind::Regular));
    let containers = init.chain(regular).collect();
    let pod_uid = pod.metadata.uid.clone().unwrap_or_default();
    let mut requests = PodMemoryRequests { pod: pod_uid, containers, budget: None };
    if has_own && level == PodLevel::Pod {
        // The API server sets the huge pages of a pod from those of its containers; a manifest may lack them.
        let mut budget = requests.total();
        budget.extend(amounts(qos::pod_level_requests(pod)));
        budget.retain(|_, bytes| *bytes > 0);
        requests.budget = Some(budget);
    }
    Some(requests)
}

fn amounts(list: ResourceList) -> Amounts {
    let amounts = list.into_iter().filter_map(|(name, amount)| {
        Some((MemoryKind::parse(&name)?, u64::try_from(amount.value()).unwrap_or(0)))
    });
    amounts.collect()
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
            let total = requests(&pod, PodLevel::Unmanaged).unwrap().total().into_iter();
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
        let burstable = pod_json(json!({"containers": [burstable]}));
        assert_eq!(requests(&burstable, PodLevel::Pod), None);
        let own = json!({"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}});
        let pod = pod_json(json!({"containers": [container("a", "1Gi", "2Mi")], "resources": own}));
        assert_eq!(requests(&pod, PodLevel::Unmanaged), None);
    }

    #[test]
    fn resources_of_the_pod_level_count_as_far_as_they_are_managed() {
        let mut burstable = container("b", "1Gi", "2Mi");
        burstable["resources"]["limits"]["memory"] = json!("2Gi");
        let own = json!({"cpu": "4", "memory": "8Gi"});
        let containers = json!([container("a", "1Gi", "2Mi"), burstable, {"name": "c", "image": "i"}]);
        let pod = pod_json(json!({"containers": containers, "resources": {"requests": own, "limits": own}}));
        let shown = |amounts: &Amounts| -> Vec<String> {
            amounts.iter().map(|(kind, bytes)| format!("{kind}={}", bytes >> 20)).collect()
        };
        let by_container = requests(&pod, PodLevel::Containers).unwrap();
        let first = &by_container.containers[0].amounts;
        assert_eq!(by_container.budget, None);
        assert_eq!(shown(first), ["hugepages-2Mi=2", "memory=1024"]);
        assert!(by_container.containers[1..].iter().all(|request| request.amounts.is_empty()));
        let whole = requests(&pod, PodLevel::Pod).unwrap();
        assert_eq!(shown(&whole.budget.unwrap()), ["hugepages-2Mi=2", "memory=8192"]);
        assert_eq!(whole.containers, by_container.containers);
    }
}
