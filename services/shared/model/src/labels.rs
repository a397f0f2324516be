//! Labels and annotations that the kubelet sets on sandboxes, containers and pods
//! (`pkg/kubelet/kuberuntime/labels.go`, `pkg/kubelet/types`).

/// Label: name of the pod.
pub const POD_NAME: &str = "io.kubernetes.pod.name";
/// Label: namespace of the pod.
pub const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
/// Label: UID of the pod.
pub const POD_UID: &str = "io.kubernetes.pod.uid";
/// Label: name of the container in the pod's spec.
pub const CONTAINER_NAME: &str = "io.kubernetes.container.name";
/// Annotation: hash of the container's definition, hexadecimal.
pub const CONTAINER_HASH: &str = "io.kubernetes.container.hash";
/// Annotation: restart count, decimal.
pub const RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
/// Annotation: path of the termination message inside the container.
pub const TERMINATION_MESSAGE_PATH: &str = "io.kubernetes.container.terminationMessagePath";
/// Annotation: `File` or `FallbackToLogsOnError`.
pub const TERMINATION_MESSAGE_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";
/// Annotation: the preStop handler as JSON.
pub const PRE_STOP_HANDLER: &str = "io.kubernetes.container.preStopHandler";
/// Annotation: the container's ports as JSON.
pub const CONTAINER_PORTS: &str = "io.kubernetes.container.ports";
/// Annotation: `metadata.deletionGracePeriodSeconds`, decimal seconds.
pub const POD_DELETION_GRACE: &str = "io.kubernetes.pod.deletionGracePeriod";
/// Annotation: `spec.terminationGracePeriodSeconds`, decimal seconds.
pub const POD_TERMINATION_GRACE: &str = "io.kubernetes.pod.terminationGracePeriod";

/// Pod annotation: the source of the pod (`file`, `http` or `api`).
pub const CONFIG_SOURCE: &str = "kubernetes.io/config.source";
/// Pod annotation of a mirror pod: UID of its static pod.
pub const CONFIG_MIRROR: &str = "kubernetes.io/config.mirror";
/// Pod annotation: UID that the source assigned to a static pod.
pub const CONFIG_HASH: &str = "kubernetes.io/config.hash";
/// Pod annotation: time at which the node first saw the pod.
pub const CONFIG_SEEN: &str = "kubernetes.io/config.seen";

/// Sandbox annotation: the node that created the sandbox. A sandbox without it and without a pod directory
/// belongs to another client of the runtime.
pub const OWNER_NODE: &str = "quintlet.dev/node";
/// Pod annotation: period of the probes with `periodSeconds: 1`, in milliseconds.
pub const PROBE_PERIOD_MS: &str = "quintlet.dev/probe-period-ms";
/// Pod annotation: the outcome that `quintctl up --once` expects of the pod.
pub const EXPECT: &str = "quintlet.dev/expect";
