//! Accessors and predicates for a v1 Pod that several services use.

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};

use crate::ids::{InvalidId, PodRef, PodUid};
use crate::labels;

/// Returns the UID, namespace and name of a pod. The namespace defaults to `default`.
///
/// # Errors
/// Fails if the UID is missing or invalid.
pub fn pod_ref(pod: &Pod) -> Result<PodRef, InvalidId> {
    Ok(PodRef {
        uid: PodUid::parse(pod.metadata.uid.as_deref().unwrap_or_default())?,
        namespace: pod.metadata.namespace.as_deref().unwrap_or("default").into(),
        name: pod.metadata.name.as_deref().unwrap_or_default().into(),
    })
}

/// Returns the value of an annotation.
#[must_use]
pub fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

/// Returns whether the pod comes from a file or a URL (`pkg/kubelet/types: IsStaticPod`).
#[must_use]
pub fn is_static(pod: &Pod) -> bool {
    annotation(pod, labels::CONFIG_SOURCE).is_some_and(|s| s != "api")
}

/// Returns whether the pod is the mirror of a static pod at the API server.
#[must_use]
pub fn is_mirror(pod: &Pod) -> bool {
    annotation(pod, labels::CONFIG_MIRROR).is_some()
}

/// Returns `spec`, or an empty spec.
#[must_use]
pub fn spec(pod: &Pod) -> &PodSpec {
    static EMPTY: std::sync::LazyLock<PodSpec> = std::sync::LazyLock::new(PodSpec::default);
    pod.spec.as_ref().unwrap_or(&EMPTY)
}

/// Returns the init containers.
#[must_use]
pub fn init_containers(pod: &Pod) -> &[Container] {
    spec(pod).init_containers.as_deref().unwrap_or_default()
}

/// Returns whether the pod uses the node's network namespace.
#[must_use]
pub fn host_network(pod: &Pod) -> bool {
    spec(pod).host_network.unwrap_or(false)
}

/// Returns whether an init container keeps running beside the regular containers (`restartPolicy: Always`).
#[must_use]
pub fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// Returns `spec.restartPolicy`, by default `Always`.
#[must_use]
pub fn restart_policy(pod: &Pod) -> &str {
    spec(pod).restart_policy.as_deref().unwrap_or("Always")
}

/// Returns whether the phase is Succeeded or Failed.
#[must_use]
pub fn is_terminal_phase(phase: Option<&str>) -> bool {
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Lowest priority of critical pods (`pkg/apis/scheduling: SystemCriticalPriority`).
pub const SYSTEM_CRITICAL_PRIORITY: i32 = 2_000_000_000;

/// Returns whether a pod is static, a mirror, or of system priority (`pkg/kubelet/types: IsCriticalPod`).
#[must_use]
pub fn is_critical(pod: &Pod) -> bool {
    is_static(pod) || is_mirror(pod) || spec(pod).priority.is_some_and(|p| p >= SYSTEM_CRITICAL_PRIORITY)
}
