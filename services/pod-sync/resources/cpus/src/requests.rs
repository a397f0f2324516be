//! The exclusive CPUs that the containers of a pod request.

use k8s_openapi::api::core::v1::{Container, Pod};
use pod_sync_topology::ContainerKind;
use quintlet_model::pod as pods;
use quintlet_model::qos::{QosClass, container_requests, qos_class};

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
}

impl PodCpuRequests {
    /// Returns the request of a container.
    #[must_use]
    pub fn container(&self, name: &str) -> Option<&CpuRequest> {
        self.containers.iter().find(|request| request.container == name)
    }

    /// Returns the number of CPUs that the pod needs at once (`podGuaranteedCPUs`).
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

/// Returns the exclusive CPUs that the containers of a pod request. Only containers of a Guaranteed pod without resources of the pod
/// level get some, if their request is a whole number (`guaranteedCPUs`).
#[must_use]
pub fn requests(pod: &Pod) -> PodCpuRequests {
    let may_have = qos_class(pod) == QosClass::Guaranteed && !has_pod_level_resources(pod);
    let request = |container: &Container, kind| CpuRequest {
        container: container.name.clone(),
        kind,
        count: if may_have { whole_cpus(container) } else { 0 },
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
    }
}

fn whole_cpus(container: &Container) -> usize {
    let amount = container_requests(container).get("cpu").copied().unwrap_or_default();
    let is_whole = amount.value().checked_mul(1000) == Some(amount.milli_value());
    if is_whole { usize::try_from(amount.value()).unwrap_or(0) } else { 0 }
}

/// Returns whether the pod has requests or limits of its own (`IsPodLevelResourcesSet`).
fn has_pod_level_resources(pod: &Pod) -> bool {
    let resources = pods::spec(pod).resources.as_ref();
    let lists = resources.into_iter().flat_map(|own| [&own.requests, &own.limits]);
    let mut names = lists.flatten().flat_map(|list| list.keys());
    names.any(|name| name == "cpu" || name == "memory" || name.starts_with("hugepages-"))
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
            requests(&pod_json(spec)).containers.iter().map(|request| request.count).collect()
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
    fn a_pod_needs_as_many_cpus_as_run_at_once() {
        let total = |init: Value, containers: Value| {
            requests(&pod_json(json!({"initContainers": init, "containers": containers}))).total()
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
