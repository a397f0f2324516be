//! Sets the conditions of the Node.

use serde_json::{Value, json};

use crate::status::{list, text};

/// Reason, message and event of a state.
pub(super) type Words = (&'static str, &'static str, &'static str);

/// A pressure condition with its two states.
pub(super) struct Pressure {
    pub(super) kind: &'static str,
    pub(super) on: Words,
    pub(super) off: Words,
}

pub(super) const PRESSURES: [Pressure; 3] = [
    Pressure {
        kind: "MemoryPressure",
        on: (
            "KubeletHasInsufficientMemory",
            "kubelet has insufficient memory available",
            "NodeHasInsufficientMemory",
        ),
        off: (
            "KubeletHasSufficientMemory",
            "kubelet has sufficient memory available",
            "NodeHasSufficientMemory",
        ),
    },
    Pressure {
        kind: "DiskPressure",
        on: ("KubeletHasDiskPressure", "kubelet has disk pressure", "NodeHasDiskPressure"),
        off: ("KubeletHasNoDiskPressure", "kubelet has no disk pressure", "NodeHasNoDiskPressure"),
    },
    Pressure {
        kind: "PIDPressure",
        on: ("KubeletHasInsufficientPID", "kubelet has insufficient PID available", "NodeHasInsufficientPID"),
        off: ("KubeletHasSufficientPID", "kubelet has sufficient PID available", "NodeHasSufficientPID"),
    },
];

/// Sets a pressure condition. Its text and transition time change only with its status. Returns whether the
/// status changed.
pub(super) fn set_pressure(node: &mut Value, pressure: &Pressure, on: bool, now: &str) -> bool {
    let condition = condition_mut(node, pressure.kind);
    condition["lastHeartbeatTime"] = json!(now);
    let status = if on { "True" } else { "False" };
    if text(condition, "status") == status {
        return false;
    }
    let (reason, message, _) = if on { pressure.on } else { pressure.off };
    condition["status"] = json!(status);
    condition["reason"] = json!(reason);
    condition["message"] = json!(message);
    condition["lastTransitionTime"] = json!(now);
    true
}

/// Sets the condition Ready. Its text is always set; its transition time changes only with its status.
/// Returns the reason of an event if the status changed.
pub(super) fn set_ready(node: &mut Value, problems: &[String], now: &str) -> Option<&'static str> {
    let condition = condition_mut(node, "Ready");
    let before = text(condition, "status").to_owned();
    let (status, reason, message, event) = if problems.is_empty() {
        ("True", "KubeletReady", "kubelet is posting ready status".to_owned(), "NodeReady")
    } else {
        ("False", "KubeletNotReady", aggregate(problems), "NodeNotReady")
    };
    let turned = before != status;
    condition["status"] = json!(status);
    condition["reason"] = json!(reason);
    condition["message"] = json!(message);
    condition["lastHeartbeatTime"] = json!(now);
    if turned {
        condition["lastTransitionTime"] = json!(now);
    }
    (turned && !before.is_empty()).then_some(event)
}

/// Joins errors as Go's `errors.NewAggregate` does: several are in brackets.
fn aggregate(problems: &[String]) -> String {
    match problems {
        [one] => one.clone(),
        several => format!("[{}]", several.join(", ")),
    }
}

fn condition_mut<'a>(node: &'a mut Value, kind: &str) -> &'a mut Value {
    let conditions = &mut node["status"]["conditions"];
    if !conditions.is_array() {
        *conditions = json!([]);
    }
    let at = list(&json!({ "c": conditions }), "c").iter().position(|c| text(c, "type") == kind);
    let at = at.unwrap_or_else(|| {
        let all = conditions.as_array_mut().map(|all| {
            all.push(json!({ "type": kind }));
            all.len().saturating_sub(1)
        });
        all.unwrap_or_default()
    });
    &mut conditions[at]
}

/// Returns whether the node agent owns a condition.
pub(super) fn is_own(condition: &Value) -> bool {
    text(condition, "type") == "Ready" || PRESSURES.iter().any(|p| p.kind == text(condition, "type"))
}
