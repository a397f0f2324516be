//! Pod statuses as JSON: what is merged, compared, tidied and patched. No I/O, no clock.
//!
//! Statuses stay JSON here, so that a field this build does not know survives.

pub mod equal;
pub mod merge;
pub mod normalize;
pub mod patch;

use serde_json::Value;

/// Conditions only the node agent writes (`pkg/kubelet/types/pod_status.go`).
pub const OWNED: &[&str] = &[
    "PodScheduled",
    "Ready",
    "Initialized",
    "ContainersReady",
    "PodResizeInProgress",
    "PodResizePending",
    "PodReadyToStartContainers",
    "AllContainersRestarting",
];

/// The one condition the node agent shares with controllers.
pub const SHARED: &str = "DisruptionTarget";

/// Fields of the status that other components own.
pub(crate) const FOREIGN_FIELDS: &[&str] =
    &["resourceClaimStatuses", "extendedResourceClaimStatus", "nodeAllocatableResourceClaimStatuses"];

/// Whether a phase is final.
#[must_use]
pub fn is_terminal(phase: &str) -> bool {
    matches!(phase, "Succeeded" | "Failed")
}

pub(crate) fn phase(status: &Value) -> &str {
    text(status, "phase")
}

pub(crate) fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or_default()
}

pub(crate) fn list<'a>(value: &'a Value, field: &str) -> &'a [Value] {
    value.get(field).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

pub(crate) fn condition<'a>(status: &'a Value, kind: &str) -> Option<&'a Value> {
    list(status, "conditions").iter().find(|c| text(c, "type") == kind)
}

/// Whether a condition is there and True.
#[must_use]
pub fn is_true(status: &Value, kind: &str) -> bool {
    condition(status, kind).is_some_and(|c| text(c, "status") == "True")
}
