//! Admits or rejects a pod; the first rejection wins (`pkg/kubelet/allocation: canAdmitPod`).

mod app_armor;
mod features;
mod node;
mod resources;
mod sysctl;

pub use sysctl::normal_sysctl;

use k8s_openapi::api::core::v1::{Node, Pod, Taint};
use quintlet_model::pod;

use super::qos::{self, QosClass, ResourceList};

pub use node::{NODE_AFFINITY, predicate_failure, tolerates};
pub use resources::{InsufficientResource, insufficient_resources};

/// Reason and message of the event and status of a pod that is not admitted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// For example `OutOfcpu`.
    pub reason: String,
    /// Message without the prefix `Pod was rejected: `, which the status adds.
    pub message: String,
}

/// Result of admission (`pkg/kubelet/lifecycle: PodAdmitResult`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdmitResult {
    Admit,
    /// The pod is rejected and becomes Failed.
    Reject(Rejection),
    /// A critical pod that fits after other pods are preempted, with the resources that are insufficient.
    Preempt(Vec<InsufficientResource>),
}

/// A pressure condition of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PressureCondition {
    Memory,
    Disk,
    Pid,
}

impl PressureCondition {
    /// Returns the type of the condition in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "MemoryPressure",
            Self::Disk => "DiskPressure",
            Self::Pid => "PIDPressure",
        }
    }
}

/// Reason for a pod with supplementalGroupsPolicy Strict on a runtime that does not support it.
pub const SUPPLEMENTAL_GROUPS_POLICY_NOT_SUPPORTED: &str = "SupplementalGroupsPolicyNotSupported";

/// The facts about the node that admission uses.
#[derive(Debug, Clone, Copy)]
pub struct NodeView<'a> {
    /// The Node object, or the one to be registered. `None` rejects every pod.
    pub node: Option<&'a Node>,
    /// Allocatable resources, including `pods`.
    pub allocatable: &'a ResourceList,
    /// PressureCondition conditions that are True now.
    pub pressure: &'a [PressureCondition],
    /// `allowedUnsafeSysctls`; a trailing `*` matches any suffix.
    pub allowed_sysctls: &'a [String],
    /// Kernel version (major, minor).
    pub kernel: (u32, u32),
    /// Whether the runtime supports supplementalGroupsPolicy Strict.
    pub strict_supplemental_groups: bool,
    /// AppArmor is enabled in the kernel.
    pub app_armor: bool,
    /// `status.declaredFeatures` of the Node.
    pub declared: &'a [&'a str],
    /// Whether the node is shutting down.
    pub shutting_down: bool,
}

fn reject(reason: &str, message: impl Into<String>) -> AdmitResult {
    AdmitResult::Reject(Rejection { reason: reason.to_owned(), message: message.into() })
}

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
        return Some(reject("PodFeatureUnsupported", text));
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
