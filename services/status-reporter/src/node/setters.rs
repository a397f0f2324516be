//! Computes the Node object from facts (`pkg/kubelet/nodestatus`). No I/O, no clock.

mod conditions;
mod readiness;
#[cfg(test)]
mod tests;
mod urgency;

use quintlet_model::pod_status::canonical;
use serde_json::{Map, Value, json};

use self::conditions::{PRESSURES, is_own, set_pressure, set_ready};
pub use self::readiness::{
    FACTS_LIMIT, MAIN_SOURCE, NO_CSI_NODE, Peer, Readiness, START_GRACE, View, csi_node_problem, readiness,
};
pub use self::urgency::{Ages, Due, REPORT_EVERY, UPDATE_EVERY, VOLUMES_EVERY, Weight, due, weigh};
use super::Facts;
use crate::events::Occurrence;
use crate::status::{condition, list, text};

const STORAGE: &str = "ephemeral-storage";
const RESOURCES: [&str; 4] = ["cpu", "memory", "pods", STORAGE];

/// Status fields that facts replace as a whole.
const WHOLE_FIELDS: [&str; 8] = [
    "addresses",
    "daemonEndpoints",
    "images",
    "volumesInUse",
    "runtimeHandlers",
    "features",
    "declaredFeatures",
    "config",
];

/// Status fields that facts set key by key. Keys of other clients stay.
const KEYED_FIELDS: [&str; 3] = ["capacity", "allocatable", "nodeInfo"];

/// Prefix of the resources of huge pages, one for each page size. All of them belong to the facts.
const HUGE_PAGES: &str = "hugepages-";

/// Returns the desired Node, and the events of its changes.
///
/// `now` is RFC 3339 in seconds. Conditions, labels and capacity of other clients stay as in `live`.
#[must_use]
pub fn desired(live: &Value, facts: &[Facts], readiness: &Readiness, now: &str) -> (Value, Vec<Occurrence>) {
    let mut node = live.clone();
    let mut events = Vec::new();
    for source in facts {
        overlay(&mut node, &source.node);
    }
    remove_huge_pages(&mut node, facts);
    let name = text(&live["metadata"], "name").to_owned();
    let old_boot = text(&live["status"]["nodeInfo"], "bootID");
    let new_boot = text(&node["status"]["nodeInfo"], "bootID");
    if !old_boot.is_empty() && old_boot != new_boot {
        let message = format!("Node {name} has been rebooted, boot id: {new_boot}");
        events.push(Occurrence::of_node(&name, "Warning", "Rebooted", message));
    }
    let mut add_event = |reason: &str| {
        let message = format!("Node {name} status is now: {reason}");
        events.push(Occurrence::of_node(&name, "Normal", reason, message));
    };
    if !facts.is_empty() {
        for pressure in &PRESSURES {
            let on = facts.iter().any(|f| crate::status::is_true(&f.node["status"], pressure.kind));
            if set_pressure(&mut node, pressure, on, now) {
                add_event(if on { pressure.on.2 } else { pressure.off.2 });
            }
        }
    }
    let mut problems = match readiness {
        Readiness::Ready => Vec::new(),
        Readiness::NotReady(problems) => problems.clone(),
        // A Node without the condition is not ready; otherwise the condition stays.
        Readiness::Unknown if condition(&live["status"], "Ready").is_some() => return (node, events),
        Readiness::Unknown => vec![format!("{MAIN_SOURCE} has not reported yet")],
    };
    let capacity = &node["status"]["capacity"];
    let missing: Vec<&str> = RESOURCES.into_iter().filter(|r| capacity.get(*r).is_none()).collect();
    // pod-sync leaves out local storage alone, with `localStorageCapacityIsolation: false`.
    if !missing.is_empty() && missing != [STORAGE] {
        problems.push(format!("missing node capacity for resources: {}", missing.join(", ")));
    }
    if let Some(reason) = set_ready(&mut node, &problems, now) {
        add_event(reason);
    }
    (node, events)
}

fn overlay(node: &mut Value, facts: &Value) {
    for field in ["labels", "annotations"] {
        overlay_map(&mut node["metadata"], &facts["metadata"], field);
    }
    for field in KEYED_FIELDS {
        overlay_map(&mut node["status"], &facts["status"], field);
    }
    for field in WHOLE_FIELDS {
        if let Some(value) = facts["status"].get(field) {
            node["status"][field] = value.clone();
        }
    }
}

/// Removes huge pages of sizes that the machine no longer has (`pkg/kubelet: reconcileHugePageResource`).
fn remove_huge_pages(node: &mut Value, facts: &[Facts]) {
    let capacities = || facts.iter().filter_map(|f| f.node["status"]["capacity"].as_object());
    if capacities().next().is_none() {
        return;
    }
    for field in ["capacity", "allocatable"] {
        if let Some(map) = node["status"][field].as_object_mut() {
            map.retain(|key, _| !key.starts_with(HUGE_PAGES) || capacities().any(|c| c.contains_key(key)));
        }
    }
}

/// Sets the keys of a map. Null in the facts removes a key.
fn overlay_map(node: &mut Value, facts: &Value, field: &str) {
    let Some(Value::Object(wanted)) = facts.get(field) else { return };
    if !node[field].is_object() {
        node[field] = Value::Object(Map::new());
    }
    for (key, value) in wanted {
        if let Some(map) = node[field].as_object_mut() {
            match value {
                Value::Null => map.remove(key),
                value => map.insert(key.clone(), value.clone()),
            };
        }
    }
}

/// Returns the strategic merge patch for `nodes/status`. With `heartbeat`, differing heartbeats suffice for a
/// patch.
#[must_use]
pub fn patch(live: &Value, desired: &Value, heartbeat: bool) -> Option<Value> {
    let mut metadata = Map::new();
    for field in ["labels", "annotations"] {
        if let Some(change) = crate::status::patch::difference(
            field,
            live["metadata"].get(field),
            desired["metadata"].get(field),
        ) {
            metadata.insert(field.to_owned(), change);
        }
    }
    let mut status = Map::new();
    for field in KEYED_FIELDS.iter().chain(&WHOLE_FIELDS) {
        let (old, new) = (live["status"].get(*field), desired["status"].get(*field));
        if let Some(mut change) = crate::status::patch::difference(field, old, new) {
            if *field == "addresses"
                && let Some(addresses) = change.as_array_mut()
            {
                // Addresses merge by type, which two addresses may share.
                addresses.push(json!({"$patch": "replace"}));
            }
            status.insert((*field).to_owned(), change);
        }
    }
    let conditions: Vec<&Value> =
        list(&desired["status"], "conditions").iter().filter(|c| is_own(c)).collect();
    let moved = conditions.iter().any(|c| {
        condition(&live["status"], text(c, "type"))
            .is_none_or(|old| without_heartbeat(old) != without_heartbeat(c))
    });
    if moved || heartbeat || !status.is_empty() || !metadata.is_empty() {
        status.insert("conditions".to_owned(), json!(conditions));
    } else {
        return None;
    }
    let mut patch = json!({ "status": status });
    if !metadata.is_empty() {
        patch["metadata"] = Value::Object(metadata);
    }
    Some(patch)
}

fn without_heartbeat(condition: &Value) -> Value {
    let mut condition = canonical(condition);
    if let Some(condition) = condition.as_object_mut() {
        condition.remove("lastHeartbeatTime");
    }
    condition
}

/// Annotation of a Node whose volumes a controller attaches.
pub const CONTROLLER_ATTACHES: &str = "volumes.kubernetes.io/controller-managed-attach-detach";

/// Returns the Node to register, before any setter.
#[must_use]
pub fn initial(name: &str, arch: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": arch,
                "beta.kubernetes.io/os": "linux", "beta.kubernetes.io/arch": arch,
            },
            "annotations": {CONTROLLER_ATTACHES: "true"},
        },
        "spec": {}, "status": {},
    })
}

/// Labels that an existing Node takes from the initial one (`pkg/kubelet: updateDefaultLabels`).
const ADOPTED_LABELS: [&str; 12] = [
    "kubernetes.io/hostname",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/instance-type",
    "kubernetes.io/os",
    "kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "beta.kubernetes.io/arch",
    "node.kubernetes.io/windows-build",
];

/// Adds the default labels and the annotation of the initial Node to an existing one. Other labels belong to
/// the clients that manage the Node.
#[must_use]
pub fn adopt(live: &Value, initial: &Value) -> Value {
    let mut node = live.clone();
    let mut wanted = initial["metadata"].clone();
    if let Some(labels) = wanted["labels"].as_object_mut() {
        labels.retain(|key, _| ADOPTED_LABELS.contains(&key.as_str()));
    }
    for field in ["labels", "annotations"] {
        overlay_map(&mut node["metadata"], &wanted, field);
    }
    if wanted["annotations"].get(CONTROLLER_ATTACHES).is_none()
        && let Some(annotations) = node["metadata"]["annotations"].as_object_mut()
    {
        annotations.remove(CONTROLLER_ATTACHES);
    }
    node
}

/// Returns Go's name of an architecture.
#[must_use]
pub fn go_arch(arch: &str) -> &str {
    match arch {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

/// Returns the event of a Node whose `spec.unschedulable` changed.
#[must_use]
pub fn schedulable_event(before: Option<&Value>, after: &Value) -> Option<Occurrence> {
    let unschedulable = |node: &Value| node["spec"]["unschedulable"].as_bool().unwrap_or(false);
    let (was, is) = (before.is_some_and(unschedulable), unschedulable(after));
    let reason = if is { "NodeNotSchedulable" } else { "NodeSchedulable" };
    let name = text(&after["metadata"], "name");
    (was != is)
        .then(|| Occurrence::of_node(name, "Normal", reason, format!("Node {name} status is now: {reason}")))
}
