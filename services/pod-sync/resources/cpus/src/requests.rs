//! The exclusive CPUs that the containers of a pod request.

use k8s_openapi::api::core::v1::{Container, Pod};
use pod_sync_topology::{ContainerKind, PodLevel};
use quintlet_model::pod as pods;
use quintlet_model::qos::{self, QosClass, ResourceList, container_requests, qos_class};

use crate::error::EmptyPodPool;

/// The request of one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuRequest {
    /// Name of the container.
    pub container: String,
    /// Kind of the container.
    pub kind: ContainerKind,
    /// Number of exclusive CPUs; 0 if the container runs on the shared ones.
    pub count: usize,
}

/// The requests of a pod's containers, in the order of their starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodCpuRequests {
    /// UID of the pod.
    pub pod: String,
    /// One for each container.
    pub containers: Vec<CpuRequest>,
    /// Number of CPUs that the pod requests as a whole; none if its containers request them.
    pub budget: Option<usize>,
}

impl PodCpuRequests {
    /// Returns the request of a container.
    #[must_use]
    pub fn container(&self, name: &str) -> Option<&CpuRequest> {
        self.containers.iter().find(|request| request.container == name)
    }

    /// Checks that each container of a pod with this budget has a CPU (`validatePodScopeResources`).
    ///
    /// # Errors
    /// The first container kind that has none.
    pub fn check_pool(&self, budget: usize) -> Result<(), EmptyPodPool> {
        let mut exclusive: usize = 0;
        let mut needs_pool = false;
        for request in &self.containers {
            let available = budget.saturating_sub(exclusive);
            match (request.kind, request.count) {
                (ContainerKind::Init, 0) if available == 0 => return Err(EmptyPodPool::SharedInitContainer),
                (ContainerKind::Init, requested) if requested > available => {
                    return Err(EmptyPodPool::InitContainer { requested, available });
                }
                (ContainerKind::Init, _) => {}
                (ContainerKind::Sidecar | ContainerKind::Regular, 0) => needs_pool = true,
                (ContainerKind::Sidecar | ContainerKind::Regular, count) => {
                    exclusive = exclusive.saturating_add(count);
                }
            }
        }
        if needs_pool && exclusive >= budget { Err(EmptyPodPool::SharedContainer) } else { Ok(()) }
    }

    /// Returns the number of CPUs that the containers of the pod need at once (`podGuaranteedCPUs`).
    #[must_use]
    pub fn total(&self) -> usize {
        let of_kind = |kind| self.containers.iter().filter(move |c| c.kind == kind).map(|c| c.count);
        let sidecars = of_kind(ContainerKind::Sidecar).fold(0, usize::saturating_add);
        let running = of_kind(ContainerKind::Regular).fold(sidecars, usize::saturating_add);
        let mut started: usize = 0;
        let mut most = running;
        for request in &self.containers {
            match request.kind {
                ContainerKind::Init => most = most.max(started.saturating_add(request.count)),
                ContainerKind::Sidecar => started = started.saturating_add(request.count),
                ContainerKind::Regular => {}
            }
        }
        most
    }
}

/// Returns the exclusive CPUs that the containers of a pod request: those of a Guaranteed pod whose request
/// is a whole number (`guaranteedCPUs`). Of a pod with resources of the pod level, only Guaranteed containers
/// get some, if `level` admits it.
#[must_use]
pub fn requests(pod: &Pod, level: PodLevel) -> PodCpuRequests {
    let is_guaranteed = qos_class(pod) == QosClass::Guaranteed;
    let has_own = qos::has_pod_level_resources(pod);
    let own = if is_guaranteed && has_own { whole_cpus(&qos::pod_level_requests(pod)) } else { 0 };
    let may_have = match (has_own, level) {
        (false, _) | (true, PodLevel::Containers) => is_guaranteed,
        (true, PodLevel::Unmanaged) => false,
        (true, PodLevel::Pod) => own > 0,
    };
    let count = |container: &Container| {
        let may_have = may_have && (!has_own || qos::is_guaranteed_container(container));
        if may_have { whole_cpus(&container_requests(container)) } else { 0 }
    };
    let request = |container: &Container, kind| CpuRequest {
        container: container.name.clone(),
        kind,
        count: count(container),
    };
    let init = pods::init_containers(pod).iter().map(|container| {
        let kind = if pods::is_sidecar(container) { ContainerKind::Sidecar } else { ContainerKind::Init };
        request(container, kind)
    });
    let regular =
        pods::spec(pod).containers.iter().map(|container| request(container, ContainerKind::Regular));
    PodCpuRequests {
        pod: pod.metadata.uid.clone().unwrap_or_default(),
        containers: init.chain(regular).collect(),
        budget: Some(own).filter(|own| *own > 0 && level == PodLevel::Pod),
    }
}

fn whole_cpus(requests: &ResourceList) -> usize {
    let amount = requests.get("cpu").copied().unwrap_or_default();
    let is_whole = amount.value().checked_mul(1000) == Some(amount.milli_value());
    if is_whole { usize::try_from(amount.value()).unwrap_or(0) } else { 0 }
}

#[cfg(test)]
mod tests {
    use quintlet_testkit::pods::pod_json;
    use serde_json::{Value, json};

    use super::*;

    fn container(name: &str, cpu: &str) -> Value {
        let amounts = json!({"cpu": cpu, "memory": "1Gi"});
        json!({"name": name, "image": "i", "resources": {"requests": amounts, "limits": amounts}})
    }

    fn sidecar(name: &str, cpu: &str) -> Value {
        let mut container = container(name, cpu);
        container["restartPolicy"] = json!("Always");
        container
    }

    #[test]
    fn whole_cpus_of_guaranteed_pods_are_exclusive() {
        let counts = |spec: Value| -> Vec<usize> {
            let requests = requests(&pod_json(spec), PodLevel::Unmanaged);
            requests.containers.iter().map(|request| request.count).collect()
        };
        let containers = json!([container("a", "2"), container("b", "1500m"), container("c", "3000m")]);
        assert_eq!(counts(json!({"containers": containers})), [2, 0, 3]);
        let mut burstable = container("a", "2");
        burstable["resources"]["limits"]["cpu"] = json!("3");
        assert_eq!(counts(json!({"containers": [burstable]})), [0]);
        assert_eq!(counts(json!({"containers": [{"name": "a", "image": "i"}]})), [0]);
        let own = json!({"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "1Gi"}});
        assert_eq!(counts(json!({"containers": [container("a", "2")], "resources": own})), [0]);
    }

    #[test]
    fn resources_of_the_pod_level_count_as_far_as_they_are_managed() {
        let mut burstable = container("b", "2");
        burstable["resources"]["limits"]["memory"] = json!("2Gi");
        let containers =
            json!([container("a", "2"), burstable, {"name": "c", "image": "i"}, container("d", "500m")]);
        let shown = |own: &str, level| {
            let own = json!({"cpu": own, "memory": "8Gi"});
            let resources = json!({"requests": own, "limits": own});
            let pod = pod_json(json!({"resources": resources, "containers": containers}));
            let PodCpuRequests { containers, budget, .. } = requests(&pod, level);
            (containers.iter().map(|request| request.count).collect::<Vec<_>>(), budget)
        };
        assert_eq!(shown("6", PodLevel::Unmanaged), (vec![0, 0, 0, 0], None));
        assert_eq!(shown("6", PodLevel::Containers), (vec![2, 0, 0, 0], None));
        assert_eq!(shown("6500m", PodLevel::Containers), (vec![2, 0, 0, 0], None));
        assert_eq!(shown("6", PodLevel::Pod), (vec![2, 0, 0, 0], Some(6)));
        // Half a CPU cannot be exclusive, so that the pod has none.
        assert_eq!(shown("6500m", PodLevel::Pod), (vec![0, 0, 0, 0], None));
    }

    #[test]
    fn a_pod_needs_as_many_cpus_as_run_at_once() {
        let total = |init: Value, containers: Value| {
            let pod = pod_json(json!({"initContainers": init, "containers": containers}));
            requests(&pod, PodLevel::Unmanaged).total()
        };
        let (main, none) = (json!([container("m", "2"), container("n", "1")]), json!([]));
        assert_eq!(total(none, main.clone()), 3);
        assert_eq!(total(json!([container("i", "2"), container("j", "1")]), main.clone()), 3);
        assert_eq!(total(json!([container("i", "5")]), main.clone()), 5);
        assert_eq!(total(json!([sidecar("s", "2"), container("i", "2")]), main.clone()), 5);
        assert_eq!(total(json!([sidecar("s", "2"), container("i", "4")]), main.clone()), 6);
        // A sidecar that starts later does not run beside the init container.
        assert_eq!(total(json!([container("i", "4"), sidecar("s", "1")]), main), 4);
    }
}
