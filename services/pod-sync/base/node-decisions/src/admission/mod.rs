//! Admits or rejects a pod; the first rejection wins (`pkg/kubelet/allocation: canAdmitPod`).

mod app_armor;
mod features;
mod node;
mod rejection;
mod resources;
mod result;
mod sysctl;
mod view;

pub use features::missing_for_update;
pub use rejection::Rejection;
pub use result::AdmitResult;
pub use sysctl::normal_sysctl;
pub use view::{NodeView, PressureCondition};

use k8s_openapi::api::core::v1::{Pod, Taint};
use quintlet_model::pod;
use quintlet_model::qos::{self, QosClass};

use result::reject;

pub use node::{NODE_AFFINITY, predicate_failure, tolerates};
pub use resources::{InsufficientResource, insufficient_resources};

/// Reason for a pod with supplementalGroupsPolicy Strict on a runtime that does not support it.
pub const SUPPLEMENTAL_GROUPS_POLICY_NOT_SUPPORTED: &str = "SupplementalGroupsPolicyNotSupported";

/// Reason of a rejection: the pod requires a feature that the node does not declare.
pub const POD_FEATURE_UNSUPPORTED: &str = "PodFeatureUnsupported";

/// Decides whether to admit a pod. `others` are the other active pods with their allocated resources.
#[must_use]
pub fn admit(pod: &Pod, others: &[&Pod], view: &NodeView<'_>) -> AdmitResult {
    let critical = pod::is_critical(pod);
    if let Some(refused) = under_pressure(pod, view.pressure, critical) {
        return refused;
    }
    if let Some(sysctl) = sysctl::forbidden(pod, view) {
        return reject("SysctlForbidden", format!("forbidden sysctl: {sysctl}"));
    }
    let Some(node) = view.node else { return reject("InvalidNodeInfo", "Kubelet cannot get node info.") };
    if let Some(refused) = node::wrong_os(pod, node) {
        return refused;
    }
    let policy =
        pod::spec(pod).security_context.as_ref().and_then(|s| s.supplemental_groups_policy.as_deref());
    if policy == Some("Strict") && !view.strict_supplemental_groups {
        return reject(
            SUPPLEMENTAL_GROUPS_POLICY_NOT_SUPPORTED,
            "SupplementalGroupsPolicy=Strict is not supported in this node",
        );
    }
    let short = insufficient_resources(pod, others, view.allocatable, node);
    let verdict = match (short.first(), predicate_failure(pod, others, node)) {
        // Preemption solves insufficient resources only, and only for critical pods.
        (Some(_), None) if critical => AdmitResult::Preempt(short),
        (_, Some(other)) if critical => AdmitResult::Reject(other),
        (Some(short), _) => AdmitResult::Reject(short.rejection()),
        (None, Some(other)) => AdmitResult::Reject(other),
        (None, None) => AdmitResult::Admit,
    };
    match verdict {
        AdmitResult::Reject(_) => verdict,
        // No pod is preempted for one that the remaining checks reject.
        AdmitResult::Admit | AdmitResult::Preempt(_) => refused_by_node(pod, view).unwrap_or(verdict),
    }
}

// Admit handlers that run after the predicates.
fn refused_by_node(pod: &Pod, view: &NodeView<'_>) -> Option<AdmitResult> {
    if let Some(why) = app_armor::unenforceable(pod, view.app_armor) {
        return Some(reject("AppArmor", format!("Cannot enforce AppArmor: {why}")));
    }
    let missing = features::missing(pod, view.declared);
    if !missing.is_empty() {
        let missing = missing.join(", ");
        let text = format!("Pod requires node features that are not available: {missing}");
        return Some(reject(POD_FEATURE_UNSUPPORTED, text));
    }
    view.shutting_down.then(|| reject("NodeShutdown", "Pod was rejected as the node is shutting down."))
}

fn under_pressure(pod: &Pod, pressure: &[PressureCondition], critical: bool) -> Option<AdmitResult> {
    if pressure.is_empty() || critical {
        return None;
    }
    if pressure == [PressureCondition::Memory] {
        let taint = Taint {
            key: "node.kubernetes.io/memory-pressure".to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        };
        let tolerated = pod::spec(pod).tolerations.iter().flatten().any(|t| tolerates(t, &taint));
        if qos::qos_class(pod) != QosClass::BestEffort || tolerated {
            return None;
        }
    }
    let names: Vec<_> = pressure.iter().map(|p| p.as_str()).collect();
    Some(reject("Evicted", format!("The node had condition: [{}]. ", names.join(" "))))
}

#[cfg(test)]
mod tests;
