//! Keys the kubelet puts on sandboxes and containers (pkg/kubelet/kuberuntime/labels.go, pkg/kubelet/types).

/// Label: name of the pod.
pub const POD_NAME: &str = "io.kubernetes.pod.name";
/// Label: namespace of the pod.
pub const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
/// Label: UID of the pod.
pub const POD_UID: &str = "io.kubernetes.pod.uid";
/// Label: name of the container in the pod's spec.
pub const CONTAINER_NAME: &str = "io.kubernetes.container.name";
/// Annotation: hash of the container's definition, hex.
pub const CONTAINER_HASH: &str = "io.kubernetes.container.hash";
/// Annotation: restart count, decimal.
pub const RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
/// Annotation: path of the termination message inside the container.
pub const TERMINATION_MESSAGE_PATH: &str = "io.kubernetes.container.terminationMessagePath";
/// Annotation: `File` or `FallbackToLogsOnError`.
pub const TERMINATION_MESSAGE_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";
/// Annotation: JSON of the preStop handler.
pub const PRE_STOP_HANDLER: &str = "io.kubernetes.container.preStopHandler";
/// Annotation: JSON of the container's ports.
pub const CONTAINER_PORTS: &str = "io.kubernetes.container.ports";
/// Annotation: `metadata.deletionGracePeriodSeconds`, decimal.
pub const POD_DELETION_GRACE: &str = "io.kubernetes.pod.deletionGracePeriod";
/// Annotation: `spec.terminationGracePeriodSeconds`, decimal.
pub const POD_TERMINATION_GRACE: &str = "io.kubernetes.pod.terminationGracePeriod";

/// Pod annotation: which source a pod came from (`file`, `http`, `api`).
pub const CONFIG_SOURCE: &str = "kubernetes.io/config.source";
/// Pod annotation: UID of the static pod a mirror stands for.
pub const CONFIG_MIRROR: &str = "kubernetes.io/config.mirror";
/// Pod annotation: UID a source gave a static pod.
pub const CONFIG_HASH: &str = "kubernetes.io/config.hash";
/// Pod annotation: when the pod was first seen.
pub const CONFIG_SEEN: &str = "kubernetes.io/config.seen";

/// Sandbox annotation: the node that made the sandbox. What does not bear it and has no directory is not ours.
pub const OWNER_NODE: &str = "quintlet.dev/node";
/// Pod annotation: what `quintctl up --once` expects of the pod.
pub const EXPECT: &str = "quintlet.dev/expect";
