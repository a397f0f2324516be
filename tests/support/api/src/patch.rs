//! JSON patch, JSON merge patch and strategic merge patch.
//!
//! Strategic merge follows `apimachinery/pkg/util/strategicpatch`. The merge keys are those of the served
//! types, by field name.

use serde_json::{Map, Value};

/// Type of a patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PatchKind {
    Json,
    Merge,
    Strategic,
}

impl PatchKind {
    pub(crate) fn from_content_type(text: &str) -> Option<Self> {
        match text.split(';').next().unwrap_or_default().trim() {
            "application/json-patch+json" => Some(Self::Json),
            "application/merge-patch+json" => Some(Self::Merge),
            "application/strategic-merge-patch+json" => Some(Self::Strategic),
            _ => None,
        }
    }
}

/// Applies a patch in place.
///
/// # Errors
/// Fails if the patch is malformed.
pub(crate) fn apply(kind: PatchKind, resource: &str, object: &mut Value, patch: Value) -> Result<(), String> {
    match kind {
        PatchKind::Json => {
            let patch: json_patch::Patch = serde_json::from_value(patch).map_err(|e| e.to_string())?;
            json_patch::patch(object, &patch).map_err(|e| e.to_string())
        }
        PatchKind::Merge => {
            if !patch.is_object() {
                return Err("the patch must be an object".to_owned());
            }
            json_patch::merge(object, &patch);
            Ok(())
        }
        PatchKind::Strategic => match (object, patch) {
            (Value::Object(object), Value::Object(patch)) => merge_map(resource, object, patch),
            _ => Err("the patch must be an object".to_owned()),
        },
    }
}

enum ListKey {
    /// Elements are objects that this field identifies.
    Field(&'static str),
    /// Elements are scalars of a set.
    Scalar,
}

fn list_key(resource: &str, field: &str) -> Option<ListKey> {
    Some(ListKey::Field(match field {
        "conditions" | "addresses" => "type",
        "containers"
        | "initContainers"
        | "ephemeralContainers"
        | "volumes"
        | "env"
        | "imagePullSecrets"
        | "resourceClaims"
        | "resourceClaimStatuses"
        | "schedulingGates"
        | "allocatedResourcesStatus"
        | "volumeHealth" => "name",
        "healthConditions" => "status",
        "secrets" if resource == "serviceaccounts" => "name",
        "volumeMounts" => "mountPath",
        "volumeDevices" => "devicePath",
        "hostAliases" | "podIPs" | "hostIPs" => "ip",
        "topologySpreadConstraints" => "topologyKey",
        "ownerReferences" => "uid",
        "ports" if resource == "services" => "port",
        "ports" => "containerPort",
        "finalizers" | "podCIDRs" => return Some(ListKey::Scalar),
        _ => return None,
    }))
}

fn merge_map(
    resource: &str,
    object: &mut Map<String, Value>,
    mut patch: Map<String, Value>,
) -> Result<(), String> {
    match patch.remove("$patch") {
        None => {}
        Some(Value::String(directive)) => match directive.as_str() {
            "replace" => {
                patch.retain(|_, value| !value.is_null());
                *object = patch;
                return Ok(());
            }
            "delete" => {
                object.clear();
                return Ok(());
            }
            "merge" => {}
            other => return Err(format!("Unknown patch type found: {other}")),
        },
        Some(_) => return Err("$patch must be a string".to_owned()),
    }
    if let Some(Value::Array(keep)) = patch.remove("$retainKeys") {
        object.retain(|key, _| keep.iter().any(|k| k.as_str() == Some(key)));
    }
    let mut orders = Map::new();
    let mut scalar_deletes = Map::new();
    patch.retain(|key, value| {
        if let Some(field) = key.strip_prefix("$setElementOrder/") {
            orders.insert(field.to_owned(), value.take());
            false
        } else if let Some(field) = key.strip_prefix("$deleteFromPrimitiveList/") {
            scalar_deletes.insert(field.to_owned(), value.take());
            false
        } else {
            true
        }
    });
    for (field, gone) in scalar_deletes {
        if let (Some(Value::Array(list)), Value::Array(gone)) = (object.get_mut(&field), gone) {
            list.retain(|item| !gone.contains(item));
        }
    }
    for (field, value) in patch {
        match value {
            Value::Null => {
                object.remove(&field);
            }
            // Like the API server: a directive alone does not create a field.
            Value::Object(inner)
                if inner.contains_key("$patch") && !has_more(&inner) && !object.contains_key(&field) => {}
            Value::Object(inner) => {
                let slot = object.entry(field).or_insert_with(|| Value::Object(Map::new()));
                if !slot.is_object() {
                    *slot = Value::Object(Map::new());
                }
                if let Value::Object(slot) = slot {
                    merge_map(resource, slot, inner)?;
                }
            }
            Value::Array(items) => {
                let order = orders.remove(&field);
                merge_list(resource, object, &field, items, order)?;
            }
            scalar @ (Value::Bool(_) | Value::Number(_) | Value::String(_)) => {
                object.insert(field, scalar);
            }
        }
    }
    for (field, order) in orders {
        if object.contains_key(&field) {
            merge_list(resource, object, &field, Vec::new(), Some(order))?;
        }
    }
    Ok(())
}

// Returns whether a patch sets a field besides directives.
fn has_more(patch: &Map<String, Value>) -> bool {
    patch.iter().any(|(key, value)| !key.starts_with('$') && !value.is_null())
}

fn merge_list(
    resource: &str,
    object: &mut Map<String, Value>,
    field: &str,
    items: Vec<Value>,
    order: Option<Value>,
) -> Result<(), String> {
    let Some(key) = list_key(resource, field) else {
        object.insert(field.to_owned(), Value::Array(items));
        return Ok(());
    };
    let live = match object.remove(field) {
        Some(Value::Array(live)) => live,
        _ => Vec::new(),
    };
    let mut merged = live.clone();
    match key {
        ListKey::Scalar => {
            for item in &items {
                if !merged.contains(item) {
                    merged.push(item.clone());
                }
            }
        }
        ListKey::Field(key) => merge_keyed(resource, &mut merged, key, items)?,
    }
    if let Some(Value::Array(order)) = order {
        merged = in_order(merged, &order, &live, &key);
    }
    object.insert(field.to_owned(), Value::Array(merged));
    Ok(())
}

fn merge_keyed(resource: &str, merged: &mut Vec<Value>, key: &str, items: Vec<Value>) -> Result<(), String> {
    let directive = |item: &Value| item.get("$patch").and_then(Value::as_str).map(str::to_owned);
    if items.iter().any(|item| directive(item).as_deref() == Some("replace")) {
        *merged = items.into_iter().filter(|item| directive(item).is_none()).collect();
        return Ok(());
    }
    for item in items {
        let Value::Object(mut item) = item else {
            return Err(format!("list elements must be objects with the merge key {key}"));
        };
        let Some(id) = item.get(key).cloned() else {
            return Err(format!("map: {} does not contain declared merge key: {key}", Value::Object(item)));
        };
        let same = |other: &Value| other.get(key) == Some(&id);
        if item.get("$patch").and_then(Value::as_str) == Some("delete") {
            merged.retain(|other| !same(other));
            continue;
        }
        item.remove("$patch");
        match merged.iter_mut().find(|other| same(other)) {
            Some(Value::Object(there)) => merge_map(resource, there, item)?,
            Some(_) | None => {
                let mut fresh = Map::new();
                merge_map(resource, &mut fresh, item)?;
                merged.push(Value::Object(fresh));
            }
        }
    }
    Ok(())
}

/// Returns the list with the elements of `order` in that order. The others keep their position relative to
/// their neighbours.
fn in_order(merged: Vec<Value>, order: &[Value], live: &[Value], key: &ListKey) -> Vec<Value> {
    let id = |value: &Value| match key {
        ListKey::Field(key) => value.get(*key).cloned().unwrap_or(Value::Null),
        ListKey::Scalar => value.clone(),
    };
    let order: Vec<Value> = order.iter().map(id).collect();
    let live: Vec<Value> = live.iter().map(id).collect();
    let (mut named, others): (Vec<Value>, Vec<Value>) =
        merged.into_iter().partition(|v| order.contains(&id(v)));
    named.sort_by_key(|v| order.iter().position(|o| *o == id(v)));
    let place = |value: &Value| live.iter().position(|l| *l == id(value));
    let mut result = Vec::with_capacity(named.len() + others.len());
    let (mut named, mut others) = (named.into_iter().peekable(), others.into_iter().peekable());
    loop {
        let next = match (named.peek(), others.peek()) {
            (Some(n), Some(o)) => match (place(n), place(o)) {
                (Some(n), Some(o)) if n < o => named.next(),
                _ => others.next(),
            },
            (Some(_), None) => named.next(),
            (None, _) => others.next(),
        };
        match next {
            Some(value) => result.push(value),
            None => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn strategic(object: Value, patch: Value) -> Value {
        let mut object = object;
        apply(PatchKind::Strategic, "pods", &mut object, patch).unwrap();
        object
    }

    #[test]
    fn strategic_merge_patches_observe_their_directives() {
        let conditions = json!({"status": {"conditions": [{"type": "A", "status": "True", "reason": "r"}, {"type": "B", "status": "True"}]}});
        let cases = [
            (
                "scalars replace and null removes",
                json!({"a": 1, "b": 2}),
                json!({"a": 3, "b": null}),
                json!({"a": 3}),
            ),
            (
                "keyed lists merge by key",
                conditions.clone(),
                json!({"status": {"conditions": [{"type": "A", "status": "False"}, {"type": "C", "status": "True"}]}}),
                json!({"status": {"conditions": [{"type": "A", "status": "False", "reason": "r"}, {"type": "B", "status": "True"}, {"type": "C", "status": "True"}]}}),
            ),
            (
                "an element is deleted by directive",
                conditions.clone(),
                json!({"status": {"conditions": [{"$patch": "delete", "type": "A"}]}}),
                json!({"status": {"conditions": [{"type": "B", "status": "True"}]}}),
            ),
            (
                "a list is replaced by directive",
                conditions.clone(),
                json!({"status": {"conditions": [{"type": "Z"}, {"$patch": "replace"}]}}),
                json!({"status": {"conditions": [{"type": "Z"}]}}),
            ),
            (
                "the order is set",
                conditions,
                json!({"status": {"$setElementOrder/conditions": [{"type": "B"}, {"type": "A"}]}}),
                json!({"status": {"conditions": [{"type": "B", "status": "True"}, {"type": "A", "status": "True", "reason": "r"}]}}),
            ),
            (
                "a list without key is replaced",
                json!({"status": {"containerStatuses": [{"name": "a"}, {"name": "b"}]}}),
                json!({"status": {"containerStatuses": [{"name": "c"}]}}),
                json!({"status": {"containerStatuses": [{"name": "c"}]}}),
            ),
            (
                "ips are keyed by themselves",
                json!({"podIPs": [{"ip": "10.0.0.1"}]}),
                json!({"podIPs": [{"ip": "10.0.0.1", "$patch": "delete"}, {"ip": "10.0.0.2"}]}),
                json!({"podIPs": [{"ip": "10.0.0.2"}]}),
            ),
            (
                "finalizers are a set",
                json!({"metadata": {"finalizers": ["a", "b"]}}),
                json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["a"], "finalizers": ["b", "c"]}}),
                json!({"metadata": {"finalizers": ["b", "c"]}}),
            ),
            (
                "only retained keys stay",
                json!({"volumes": [{"name": "v", "emptyDir": {}}]}),
                json!({"volumes": [{"name": "v", "hostPath": {"path": "/x"}, "$retainKeys": ["name", "hostPath"]}]}),
                json!({"volumes": [{"name": "v", "hostPath": {"path": "/x"}}]}),
            ),
            (
                "a map is replaced by directive",
                json!({"s": {"a": 1}}),
                json!({"s": {"b": 2, "$patch": "replace"}}),
                json!({"s": {"b": 2}}),
            ),
            (
                "a directive alone makes no map",
                json!({}),
                json!({"s": {"$patch": "replace", "a": null}}),
                json!({}),
            ),
            ("an empty map is made", json!({}), json!({"s": {"a": null}}), json!({"s": {}})),
            (
                "nulls do not reach new maps",
                json!({}),
                json!({"s": {"a": null, "b": 1}}),
                json!({"s": {"b": 1}}),
            ),
        ];
        for (name, object, patch, want) in cases {
            assert_eq!(strategic(object, patch), want, "{name}");
        }
    }

    #[test]
    fn an_element_without_its_key_is_an_error() {
        let mut object = json!({"status": {}});
        let patch = json!({"status": {"conditions": [{"status": "True"}]}});
        assert!(apply(PatchKind::Strategic, "pods", &mut object, patch).is_err());
    }
}
