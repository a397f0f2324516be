//! Checks whether allocatable resources suffice for a pod (`pkg/kubelet/lifecycle`).

use k8s_openapi::api::core::v1::{Node, Pod};
use quintlet_model::qos::{self, ResourceList};
use quintlet_model::quantity::Quantity;

use super::rejection::Rejection;

/// A resource of which the node has too little (`pkg/kubelet/lifecycle: InsufficientResourceError`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InsufficientResource {
    /// Name of the resource, such as `cpu` or `pods`.
    pub resource: String,
    /// Requested amount: CPU in millicores, other resources in whole units.
    pub requested: i64,
    /// Amount requested by the other pods.
    pub used: i64,
    /// Allocatable amount of the node.
    pub capacity: i64,
}

impl InsufficientResource {
    /// Returns the amount to free.
    #[must_use]
    pub fn shortfall(&self) -> i64 {
        self.requested.saturating_sub(self.capacity.saturating_sub(self.used))
    }

    /// Returns the rejection for this resource, with reason `OutOf<resource>`.
    #[must_use]
    pub fn rejection(&self) -> Rejection {
        Rejection {
            reason: format!("OutOf{}", self.resource),
            message: format!(
                "Node didn't have enough resource: {}, requested: {}, used: {}, capacity: {}",
                self.resource, self.requested, self.used, self.capacity
            ),
        }
    }
}

/// Returns the insufficient resources, in the order in which they are reported. Extended resources and huge
/// pages that this node does not measure itself are those of the Node's status
/// (`pkg/kubelet/lifecycle: predicateAdmitHandler.Admit, removeMissingExtendedResources`).
#[must_use]
pub fn insufficient_resources(
    pod: &Pod,
    others: &[&Pod],
    own: &ResourceList,
    node: &Node,
) -> Vec<InsufficientResource> {
    let allocatable = &with_scalar_resources(own, node);
    let amount = |l: &ResourceList, name: &str| {
        let q = l.get(name).copied().unwrap_or_default();
        if name == "cpu" { q.milli_value() } else { q.value() }
    };
    let mut short = Vec::new();
    let pods = amount(allocatable, "pods");
    let used = i64::try_from(others.len()).unwrap_or(i64::MAX);
    if used.saturating_add(1) > pods {
        short.push(InsufficientResource { resource: "pods".to_owned(), requested: 1, used, capacity: pods });
    }
    let wanted = qos::pod_requests(pod);
    let taken: Vec<ResourceList> = others.iter().map(|p| qos::pod_requests(p)).collect();
    let fixed = ["cpu", "memory", "ephemeral-storage"];
    let scalar = wanted.keys().map(String::as_str).filter(|n| !fixed.contains(n));
    for name in fixed.into_iter().chain(scalar) {
        let requested = amount(&wanted, name);
        // An extended resource that the node does not list belongs to the cluster, or to a driver.
        if requested <= 0 || (!fixed.contains(&name) && !allocatable.contains_key(name)) {
            continue;
        }
        let capacity = amount(allocatable, name);
        let used = taken.iter().map(|l| amount(l, name)).fold(0_i64, i64::saturating_add);
        if requested > capacity.saturating_sub(used) {
            short.push(InsufficientResource { resource: name.to_owned(), requested, used, capacity });
        }
    }
    short
}

fn with_scalar_resources(own: &ResourceList, node: &Node) -> ResourceList {
    let of_node = node.status.as_ref().and_then(|s| s.allocatable.as_ref()).into_iter().flatten();
    let scalar = of_node.filter(|(name, _)| is_extended(name) || name.starts_with(HUGE_PAGES));
    let mut all: ResourceList = scalar.map(|(name, amount)| (name.clone(), Quantity::of(amount))).collect();
    all.extend(own.iter().map(|(name, amount)| (name.clone(), *amount)));
    all
}

const HUGE_PAGES: &str = "hugepages-";

/// Returns whether a name is that of an extended resource
/// (`pkg/apis/core/v1/helper: IsExtendedResourceName`).
fn is_extended(name: &str) -> bool {
    let is_native = |domain: &str| domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
    !name.starts_with("requests.") && name.split_once('/').is_some_and(|(domain, _)| !is_native(domain))
}
