//! Small questions about a v1 Pod that several services ask.

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};

use crate::ids::{InvalidId, PodRef, PodUid};
use crate::labels;

/// The names of a pod.
///
/// # Errors
/// The UID is missing or not usable.
pub fn pod_ref(pod: &Pod) -> Result<PodRef, InvalidId> {
    Ok(PodRef {
        uid: PodUid::parse(pod.metadata.uid.as_deref().unwrap_or_default())?,
        namespace: pod.metadata.namespace.as_deref().unwrap_or("default").into(),
        name: pod.metadata.name.as_deref().unwrap_or_default().into(),
    })
}

/// Value of an annotation.
#[must_use]
pub fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

/// A pod of a file or URL: it has a source and that is not the API server.
#[must_use]
pub fn is_static(pod: &Pod) -> bool {
    annotation(pod, labels::CONFIG_SOURCE).is_some_and(|s| s != "api")
}

/// The API server's copy of a static pod.
#[must_use]
pub fn is_mirror(pod: &Pod) -> bool {
    annotation(pod, labels::CONFIG_MIRROR).is_some()
}

/// `spec`, or an empty one.
#[must_use]
pub fn spec(pod: &Pod) -> &PodSpec {
    static EMPTY: std::sync::LazyLock<PodSpec> = std::sync::LazyLock::new(PodSpec::default);
    pod.spec.as_ref().unwrap_or(&EMPTY)
}

/// Init containers, none where the field is absent.
#[must_use]
pub fn init_containers(pod: &Pod) -> &[Container] {
    spec(pod).init_containers.as_deref().unwrap_or_default()
}

/// The pod uses the node's network namespace.
#[must_use]
pub fn host_network(pod: &Pod) -> bool {
    spec(pod).host_network.unwrap_or(false)
}

/// An init container that keeps running beside the regular ones.
#[must_use]
pub fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// `spec.restartPolicy`, `Always` where absent.
#[must_use]
pub fn restart_policy(pod: &Pod) -> &str {
    spec(pod).restart_policy.as_deref().unwrap_or("Always")
}

/// Phase Succeeded or Failed.
#[must_use]
pub fn is_terminal_phase(phase: Option<&str>) -> bool {
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Priority at and above which a pod is critical (pkg/apis/scheduling).
pub const SYSTEM_CRITICAL_PRIORITY: i32 = 2_000_000_000;

/// Static, mirror, or of system priority (pkg/kubelet/types/pod_update.go: IsCriticalPod).
#[must_use]
pub fn is_critical(pod: &Pod) -> bool {
    is_static(pod) || is_mirror(pod) || spec(pod).priority.is_some_and(|p| p >= SYSTEM_CRITICAL_PRIORITY)
}
