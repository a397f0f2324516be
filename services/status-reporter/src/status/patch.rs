//! Computes the strategic merge patch from one status to another.

use quintlet_model::pod_status::canonical;
use serde_json::{Map, Value, json};

use super::{FOREIGN_FIELDS, OWNED, condition, list, text};

/// Optional fields of a condition.
const OPTIONAL_IN_CONDITION: [&str; 3] = ["reason", "message", "observedGeneration"];

/// Optional fields of a status that this service owns and may clear.
const OPTIONAL_IN_STATUS: [&str; 16] = [
    "reason",
    "message",
    "podIP",
    "podIPs",
    "hostIP",
    "hostIPs",
    "startTime",
    "resize",
    "nominatedNodeName",
    "observedGeneration",
    "initContainerStatuses",
    "containerStatuses",
    "ephemeralContainerStatuses",
    "resources",
    "allocatedResources",
    "volumeHealth",
];

/// Lists of a status that are written as a whole, since their order or the absence of an entry matters.
const WHOLE_LISTS: [&str; 3] = ["podIPs", "hostIPs", "volumeHealth"];

/// Trust in the base of a patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Base {
    /// The base is the last answer of the API server, or newer. The patch has the differences.
    Known,
    /// The base may be older than the last write. The patch has all owned fields, so that its result does not
    /// depend on the base.
    Claimed,
}

/// Returns the patch of `status` for the object with this UID, or none without a difference.
///
/// With `metadata.uid` the API server refuses the patch for another object of that name.
#[must_use]
pub fn pod_status(uid: &str, base: &Value, merged: &Value, trust: Base) -> Option<Value> {
    let mut status = Map::new();
    for field in fields(base, merged) {
        if FOREIGN_FIELDS.contains(&field.as_str()) {
            continue;
        }
        let (old, new) = (present(base, &field), present(merged, &field));
        let change = match field.as_str() {
            "conditions" => conditions(base, merged).map(Value::Array),
            list if WHOLE_LISTS.contains(&list) => whole_list(old, new),
            _ => difference(&field, old, new),
        };
        if let Some(change) = change {
            status.insert(field, change);
        }
    }
    if status.is_empty() {
        return None;
    }
    // An absent field equals an empty object, except `resources: {}`, which the kubelet sets.
    for (field, new) in merged.as_object().into_iter().flatten() {
        let is_empty_object = new.as_object().is_some_and(Map::is_empty);
        if is_empty_object && present(base, field).is_none() && !FOREIGN_FIELDS.contains(&field.as_str()) {
            status.insert(field.clone(), new.clone());
        }
    }
    let status = match trust {
        Base::Known => status,
        Base::Claimed => complete(status.remove("conditions"), merged),
    };
    Some(json!({"metadata": {"uid": uid}, "status": status}))
}

/// Returns whether the statuses differ in nothing but observed generations.
#[must_use]
pub fn is_of_generation_alone(base: &Value, merged: &Value) -> bool {
    let without_generations = |status: &Value| {
        let mut status = status.clone();
        let conditions = status.get_mut("conditions").and_then(Value::as_array_mut).into_iter().flatten();
        for condition in conditions.filter_map(Value::as_object_mut) {
            condition.remove("observedGeneration");
        }
        if let Some(fields) = status.as_object_mut() {
            fields.remove("observedGeneration");
        }
        status
    };
    pod_status("", &without_generations(base), &without_generations(merged), Base::Known).is_none()
}

/// Returns all owned fields, set or cleared. `changes` are those of all conditions.
fn complete(changes: Option<Value>, merged: &Value) -> Map<String, Value> {
    let mut status = Map::new();
    for field in OPTIONAL_IN_STATUS {
        status.insert(field.to_owned(), Value::Null);
    }
    for (field, value) in merged.as_object().into_iter().flatten() {
        let value = match (field.as_str(), value) {
            (field, _) if FOREIGN_FIELDS.contains(&field) => continue,
            (list, value) if WHOLE_LISTS.contains(&list) => {
                whole_list(None, Some(value)).unwrap_or(Value::Null)
            }
            // A directive alone must not create an object.
            ("resources", Value::Object(map)) if map.is_empty() => {
                json!({"claims": null, "limits": null, "requests": null})
            }
            (_, Value::Object(map)) => {
                let mut map = map.clone();
                map.insert("$patch".to_owned(), json!("replace"));
                Value::Object(map)
            }
            (_, value) => value.clone(),
        };
        status.insert(field.clone(), value);
    }
    let mut conditions: Vec<Value> = match changes {
        Some(Value::Array(changes)) => {
            changes.into_iter().filter(|c| !OWNED.contains(&text(c, "type"))).collect()
        }
        _ => Vec::new(),
    };
    for kind in OWNED {
        conditions.push(match condition(merged, kind) {
            Some(wanted) => whole_condition(wanted),
            None => json!({"$patch": "delete", "type": kind}),
        });
    }
    status.insert("conditions".to_owned(), Value::Array(conditions));
    status
}

fn whole_condition(wanted: &Value) -> Value {
    let mut whole = wanted.clone();
    if let Some(whole) = whole.as_object_mut() {
        for field in OPTIONAL_IN_CONDITION {
            whole.entry(field).or_insert(Value::Null);
        }
    }
    whole
}

fn fields(base: &Value, merged: &Value) -> Vec<String> {
    let names =
        |value: &Value| value.as_object().map(|o| o.keys().cloned().collect::<Vec<_>>()).unwrap_or_default();
    let mut all = names(base);
    all.extend(names(merged));
    all.sort();
    all.dedup();
    all
}

/// Returns none for null.
fn present<'a>(object: &'a Value, field: &str) -> Option<&'a Value> {
    object.get(field).filter(|v| !v.is_null())
}

fn same(field: &str, old: &Value, new: &Value) -> bool {
    // The name of the field determines the comparison. Most fields are equal without it.
    old == new || canonical(&json!({ field: old })) == canonical(&json!({ field: new }))
}

/// Returns the change of a field that is not a keyed list.
pub(crate) fn difference(field: &str, old: Option<&Value>, new: Option<&Value>) -> Option<Value> {
    let empty = Value::Null;
    if same(field, old.unwrap_or(&empty), new.unwrap_or(&empty)) {
        return None;
    }
    Some(match (old, new) {
        (Some(Value::Object(old)), Some(Value::Object(new))) => {
            let mut change = Map::new();
            for (field, value) in new {
                if let Some(inner) = difference(field, old.get(field), Some(value)) {
                    change.insert(field.clone(), inner);
                }
            }
            for field in old.keys().filter(|f| !new.contains_key(*f)) {
                change.insert(field.clone(), Value::Null);
            }
            Value::Object(change)
        }
        (_, Some(new)) => new.clone(),
        (_, None) => Value::Null,
    })
}

/// Returns the change of a list that is replaced as a whole.
fn whole_list(old: Option<&Value>, new: Option<&Value>) -> Option<Value> {
    let empty = Value::Null;
    if same("list", old.unwrap_or(&empty), new.unwrap_or(&empty)) {
        return None;
    }
    let mut items = new.and_then(Value::as_array).cloned().unwrap_or_default();
    items.push(json!({"$patch": "replace"}));
    Some(Value::Array(items))
}

/// Returns the changes of conditions by type: changed conditions as a whole, and deletions of missing ones.
fn conditions(base: &Value, merged: &Value) -> Option<Vec<Value>> {
    let mut changes = Vec::new();
    for wanted in list(merged, "conditions") {
        let old = condition(base, text(wanted, "type"));
        if old.is_some_and(|old| old == wanted || canonical(old) == canonical(wanted)) {
            continue;
        }
        let mut change = wanted.clone();
        if let (Some(change), Some(Value::Object(old))) = (change.as_object_mut(), old) {
            for (field, _) in old.iter().filter(|(_, v)| !v.is_null()) {
                change.entry(field).or_insert(Value::Null);
            }
        }
        changes.push(change);
    }
    for old in list(base, "conditions") {
        let kind = text(old, "type");
        if condition(merged, kind).is_none() {
            changes.push(json!({"$patch": "delete", "type": kind}));
        }
    }
    (!changes.is_empty()).then_some(changes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(base: Value, merged: Value) -> Option<Value> {
        pod_status("u", &base, &merged, Base::Known).map(|mut p| p["status"].take())
    }

    #[test]
    fn an_unchanged_status_needs_no_patch() {
        let base = json!({"phase": "Running", "message": "", "podIPs": [], "conditions": [{"type": "Ready", "status": "True", "lastProbeTime": null}],
            "containerStatuses": [{"name": "a", "lastState": {}, "imageID": ""}], "resourceClaimStatuses": [{"name": "c"}]});
        let merged = json!({"phase": "Running", "resources": {}, "conditions": [{"type": "Ready", "status": "True"}], "containerStatuses": [{"name": "a"}]});
        for trust in [Base::Known, Base::Claimed] {
            assert_eq!(pod_status("u", &base, &merged, trust), None);
        }
    }

    #[test]
    fn a_patch_has_the_differences_and_explicit_deletions() {
        let cases = [
            (
                "a scalar",
                json!({"phase": "Pending"}),
                json!({"phase": "Running"}),
                json!({"phase": "Running"}),
            ),
            (
                "a scalar that went",
                json!({"phase": "Running", "reason": "x"}),
                json!({"phase": "Running"}),
                json!({"reason": null}),
            ),
            (
                "a condition with a field less",
                json!({"conditions": [{"type": "Ready", "status": "False", "reason": "r", "lastProbeTime": null}]}),
                json!({"conditions": [{"type": "Ready", "status": "True"}]}),
                json!({"conditions": [{"type": "Ready", "status": "True", "reason": null}]}),
            ),
            (
                "one condition more, one less, one kept",
                json!({"conditions": [{"type": "A", "status": "True"}, {"type": "B", "status": "True"}]}),
                json!({"conditions": [{"type": "B", "status": "True"}, {"type": "C", "status": "True"}]}),
                json!({"conditions": [{"type": "C", "status": "True"}, {"$patch": "delete", "type": "A"}]}),
            ),
            (
                "addresses as a whole",
                json!({"podIPs": [{"ip": "a"}]}),
                json!({"podIPs": [{"ip": "b"}, {"ip": "a"}]}),
                json!({"podIPs": [{"ip": "b"}, {"ip": "a"}, {"$patch": "replace"}]}),
            ),
            (
                "addresses that went",
                json!({"podIPs": [{"ip": "a"}]}),
                json!({}),
                json!({"podIPs": [{"$patch": "replace"}]}),
            ),
            (
                "health of volumes as a whole, since two conditions of a volume may have the same status",
                json!({"volumeHealth": [{"name": "a", "healthConditions": [{"status": "S", "reason": "1"}]}, {"name": "b"}]}),
                json!({"volumeHealth": [{"name": "a", "healthConditions": [{"status": "S", "reason": "2"}]}]}),
                json!({"volumeHealth": [{"name": "a", "healthConditions": [{"status": "S", "reason": "2"}]}, {"$patch": "replace"}]}),
            ),
            (
                "health of volumes that went",
                json!({"volumeHealth": [{"name": "a"}]}),
                json!({}),
                json!({"volumeHealth": [{"$patch": "replace"}]}),
            ),
            (
                "containers as a whole",
                json!({"containerStatuses": [{"name": "a", "ready": false}]}),
                json!({"containerStatuses": [{"name": "a", "ready": true}]}),
                json!({"containerStatuses": [{"name": "a", "ready": true}]}),
            ),
            (
                "maps by key",
                json!({"resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}),
                json!({"resources": {"limits": {"cpu": "2"}}}),
                json!({"resources": {"limits": {"cpu": "2", "memory": null}}}),
            ),
            (
                "an empty object comes along",
                json!({"phase": "Pending"}),
                json!({"phase": "Running", "resources": {}}),
                json!({"phase": "Running", "resources": {}}),
            ),
        ];
        for (name, base, merged, want) in cases {
            assert_eq!(known(base, merged), Some(want), "{name}");
        }
    }

    #[test]
    fn a_change_of_observed_generations_alone_is_recognized() {
        let status = |generation: u64, ready: &str| {
            json!({"phase": "Running", "observedGeneration": generation,
                "conditions": [{"type": "Ready", "status": ready, "observedGeneration": generation}]})
        };
        let mut first = status(1, "True");
        first.as_object_mut().unwrap().remove("observedGeneration");
        let mut failed = status(2, "True");
        failed["phase"] = json!("Failed");
        let mut without_condition = status(2, "True");
        without_condition["conditions"] = json!([]);
        let cases = [
            ("both generations", status(1, "True"), status(2, "True"), true),
            ("a first generation", first, status(1, "True"), true),
            ("a condition, too", status(1, "True"), status(2, "False"), false),
            ("the phase, too", status(1, "True"), failed, false),
            ("a condition less", status(1, "True"), without_condition, false),
        ];
        for (name, base, merged, want) in cases {
            assert_eq!(is_of_generation_alone(&base, &merged), want, "{name}");
        }
    }

    #[test]
    fn the_uid_is_a_precondition() {
        let patch = pod_status("u-1", &json!({}), &json!({"phase": "Running"}), Base::Known).unwrap();
        assert_eq!(patch["metadata"], json!({"uid": "u-1"}));
    }

    #[test]
    fn a_patch_on_a_claimed_base_has_all_owned_fields() {
        let base = json!({"phase": "Pending", "conditions": [{"type": "Ready", "status": "True"}, {"type": "x/y", "status": "True"}]});
        let merged = json!({"phase": "Running", "podIPs": [{"ip": "a"}], "conditions": [{"type": "x/y", "status": "True"}, {"type": "Ready", "status": "True"}]});
        let patch = pod_status("u", &base, &merged, Base::Claimed).unwrap();
        let conditions = list(&patch["status"], "conditions");
        assert_eq!(
            conditions.len(),
            OWNED.len(),
            "each owned one is set or deleted, no foreign one is touched: {patch}"
        );
        assert!(conditions.contains(&json!({"type": "Ready", "status": "True", "reason": null, "message": null, "observedGeneration": null})));
        assert!(conditions.contains(&json!({"$patch": "delete", "type": "Initialized"})));
        assert_eq!(patch["status"]["reason"], Value::Null);
        assert_eq!(patch["status"]["podIPs"], json!([{"ip": "a"}, {"$patch": "replace"}]));
    }

    #[test]
    fn empty_resources_are_shown_from_the_first_patch_on_and_clear_what_was_there() {
        for live in [json!({}), json!({"resources": {"limits": {"cpu": "1"}}})] {
            let merged = json!({"phase": "Running", "resources": {}});
            let patch = pod_status("u-1", &json!({"phase": "Pending"}), &merged, Base::Claimed).unwrap();
            let mut pod = json!({"metadata": {"uid": "u-1"}, "status": live});
            quintlet_testapi::strategic_merge("pods", &mut pod, patch).unwrap();
            assert_eq!(pod["status"]["resources"], json!({}), "over {live}");
        }
    }
}
