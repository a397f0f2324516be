//! Pod statuses as JSON: the owners of their fields, and the comparison of two statuses.

pub mod shorten;

use serde_json::{Map, Value};

/// Conditions that only the node agent writes (`pkg/kubelet/types: PodConditionByKubelet`).
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

/// The condition that both the node agent and controllers write
/// (`pkg/kubelet/types: PodConditionSharedByKubelet`).
pub const SHARED: &str = "DisruptionTarget";

/// Fields of the status that other components own.
pub const FOREIGN_FIELDS: &[&str] =
    &["resourceClaimStatuses", "extendedResourceClaimStatus", "nodeAllocatableResourceClaimStatuses"];

/// Returns the text of a field, or an empty one.
#[must_use]
pub fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or_default()
}

/// Returns the list in a field, or an empty one.
#[must_use]
pub fn list<'a>(value: &'a Value, field: &str) -> &'a [Value] {
    value.get(field).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

/// Returns whether a phase is final: Succeeded or Failed.
#[must_use]
pub fn is_terminal(phase: &str) -> bool {
    matches!(phase, "Succeeded" | "Failed")
}

/// Returns whether two statuses are equal, ignoring the times of conditions and the conditions and fields
/// that other components own (`pkg/kubelet/status: isPodStatusByKubeletEqual`).
#[must_use]
pub fn equal(a: &Value, b: &Value) -> bool {
    strip(a) == strip(b)
}

fn strip(status: &Value) -> Value {
    let mut conditions: Vec<(String, String, String, String)> = list(status, "conditions")
        .iter()
        .filter(|c| OWNED.contains(&text(c, "type")) || text(c, "type") == SHARED)
        .map(|c| ["type", "status", "reason", "message"].map(|f| text(c, f).to_owned()).into())
        .collect();
    conditions.sort();
    let mut rest = canonical(status);
    if let Some(rest) = rest.as_object_mut() {
        rest.retain(|field, _| field != "conditions" && !FOREIGN_FIELDS.contains(&field.as_str()));
        let conditions = conditions.into_iter().map(|(t, s, r, m)| Value::from(vec![t, s, r, m])).collect();
        rest.insert("conditions".to_owned(), Value::Array(conditions));
    }
    rest
}

/// Returns a canonical form, in which null and empty fields are absent and quantities are exact numbers.
#[must_use]
pub fn canonical(value: &Value) -> Value {
    match value {
        Value::Object(map) => Value::Object(canonical_map(map)),
        Value::Array(items) => Value::Array(items.iter().map(canonical).collect()),
        scalar @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_)) => scalar.clone(),
    }
}

fn canonical_map(map: &Map<String, Value>) -> Map<String, Value> {
    let mut result = Map::new();
    for (field, value) in map {
        let value = match value {
            Value::Object(quantities) if is_quantities(field) => {
                let exact = quantities.iter().map(|(name, q)| (name.clone(), exact_quantity(q)));
                Value::Object(exact.collect())
            }
            value => canonical(value),
        };
        // The name of an empty container state carries information.
        let is_container_state = matches!(field.as_str(), "running" | "waiting" | "terminated");
        if is_container_state && value.is_object() || !is_empty(&value) {
            result.insert(field.clone(), value);
        }
    }
    result
}

fn is_quantities(field: &str) -> bool {
    matches!(field, "limits" | "requests" | "allocatedResources" | "capacity" | "allocatable")
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

fn exact_quantity(value: &Value) -> Value {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        other => return other.clone(),
    };
    nano(&text).map_or(Value::String(text), |nano| Value::String(format!("{nano}n")))
}

/// Parses a quantity in units of 10⁻⁹. Returns `None` if the text is not a quantity or is out of range.
fn nano(text: &str) -> Option<i128> {
    let end =
        text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '-' || c == '+')).unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    // (numerator, denominator) of one unit, in units of 10⁻⁹.
    let (unit, divisor): (i128, i128) = match suffix {
        "n" => (1, 1),
        "u" => (1_000, 1),
        "m" => (1_000_000, 1),
        "" => (1_000_000_000, 1),
        "k" => (10_i128.pow(12), 1),
        "M" => (10_i128.pow(15), 1),
        "G" => (10_i128.pow(18), 1),
        "T" => (10_i128.pow(21), 1),
        "P" => (10_i128.pow(24), 1),
        "E" => (10_i128.pow(27), 1),
        "Ki" => (1_000_000_000 << 10, 1),
        "Mi" => (1_000_000_000 << 20, 1),
        "Gi" => (1_000_000_000 << 30, 1),
        "Ti" => (1_000_000_000 << 40, 1),
        "Pi" => (1_000_000_000 << 50, 1),
        "Ei" => (1_000_000_000 << 60, 1),
        exponent => {
            let power: i32 = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
            let factor = 10_i128.checked_pow(power.unsigned_abs())?;
            if power < 0 { (1_000_000_000, factor) } else { (1_000_000_000_i128.checked_mul(factor)?, 1) }
        }
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let scale = 10_i128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let digits: i128 = format!("{whole}{fraction}").parse().ok()?;
    digits.checked_mul(unit)?.checked_div(scale.checked_mul(divisor)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_fields_that_the_agent_owns_are_compared() {
        let base = json!({"phase": "Running", "observedGeneration": 1, "conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": "a", "lastProbeTime": null, "observedGeneration": 1}]});
        let with = |field: &str, value: Value| {
            let mut status = base.clone();
            status[field] = value;
            status
        };
        let ready = |extra: Value| {
            let mut condition = json!({"type": "Ready", "status": "True", "lastTransitionTime": "a"});
            condition.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            with("conditions", json!([condition]))
        };
        let cases = [
            ("the same", base.clone(), true),
            ("another transition time", ready(json!({"lastTransitionTime": "b"})), true),
            ("another observed generation of a condition", ready(json!({"observedGeneration": 7})), true),
            ("another reason", ready(json!({"reason": "r"})), false),
            ("another message", ready(json!({"message": "r"})), false),
            ("another status", ready(json!({"status": "False"})), false),
            (
                "a foreign condition",
                with("conditions", json!([base["conditions"][0], {"type": "x/y", "status": "True"}])),
                true,
            ),
            (
                "the shared condition",
                with("conditions", json!([base["conditions"][0], {"type": SHARED, "status": "True"}])),
                false,
            ),
            ("one owned condition less", with("conditions", json!([])), false),
            ("another observed generation", with("observedGeneration", json!(2)), false),
            ("claims", with("resourceClaimStatuses", json!([{"name": "c"}])), true),
            ("nothing and empty", with("podIPs", json!([])), true),
            ("a null", with("message", Value::Null), true),
            ("a field the agent never fills", with("nominatedNodeName", json!("n")), false),
        ];
        for (name, other, want) in cases {
            assert_eq!(equal(&base, &other), want, "{name}");
            assert_eq!(equal(&other, &base), want, "{name}, turned round");
        }
    }

    #[test]
    fn quantities_compare_by_value_and_states_by_kind() {
        let status =
            |cpu: Value| json!({"containerStatuses": [{"name": "a", "allocatedResources": {"cpu": cpu}}]});
        assert!(equal(&status(json!("100m")), &status(json!("0.1"))));
        assert!(equal(&status(json!("1Gi")), &status(json!("1024Mi"))));
        assert!(equal(&status(json!("1e3")), &status(json!("1k"))));
        assert!(equal(&status(json!(2)), &status(json!("2"))));
        assert!(!equal(&status(json!("100m")), &status(json!("101m"))));
        let state = |state: Value| json!({"containerStatuses": [{"name": "a", "state": state}]});
        assert!(!equal(&state(json!({"waiting": {}})), &state(json!({"running": {}}))));
        assert!(!equal(&state(json!({"waiting": {}})), &state(json!({}))));
    }
}
