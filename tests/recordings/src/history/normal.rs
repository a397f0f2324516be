//! A history without values that differ between runs. It has up to four sequences:
//!
//! - `statuses`: the different statuses of the pod that the API server delivered, in order; `deleting` once
//!   the pod has a deletion timestamp, `gone` at its end. Equal statuses in a row are one.
//! - `events`: the node's events of the pod in the order of their first occurrence. `count` is `once` or
//!   `repeated`: the number of repetitions depends on the time until the next step.
//! - `calls`: the calls that mount and unmount volumes at the driver, in order. If a fault of the scenario
//!   has no number of times, equal calls in a row are one: their number depends on the time until the next
//!   step.
//! - `node`: the different `volumesInUse` and `volumesAttached` of the Node, in order, with the volumes of
//!   the scenario's driver. Absent if there are none.
//!
//! IDs, addresses, times and directories are replaced by names. Conditions are ordered by type. Not recorded
//! are:
//!
//! - a status that differs from the one before only in the condition `PodReadyToStartContainers`, the pod's
//!   addresses or `observedGeneration`: whether it is written before the next one depends on timing;
//! - `resources` of the pod, which a kubelet reads from cgroups that are about to be removed;
//! - empty objects, which the API server adds.

use std::path::Path;
use std::sync::LazyLock;

use quintlet_csi_driver::fault;
use regex::Regex;
use serde_json::{Map, Value, json};

use super::observe::{NodeVolumes, Seen};
use super::scenario::{Scenario, driver};
use crate::facts::Names;
use crate::runtime::NODE;

/// Calls of a driver that are recorded. Others read, and their number has no meaning.
const CALLS: [&str; 5] =
    ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume", "NodeExpandVolume"];

static TIME: LazyLock<Regex> = LazyLock::new(|| {
    let time = Regex::new(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$");
    time.expect("the expression is right")
});

/// Returns the facts of a history. `state` is the state directory of the scenario's driver.
#[must_use]
pub fn facts(
    scenario: &Scenario,
    seen: &Seen,
    volumes: &[NodeVolumes],
    names: &Names,
    state: &Path,
) -> Value {
    let uid = seen.pods.first().map_or("", |pod| pod["metadata"]["uid"].as_str().unwrap_or_default());
    let mut names = names.clone();
    names.push((uid.to_owned(), "<uid>".to_owned()));
    let mut statuses: Vec<Value> = Vec::new();
    for pod in &seen.pods {
        let status = if pod.is_null() { json!({"gone": true}) } else { status(pod, &names) };
        if statuses.last().map(lasting) != Some(lasting(&status)) {
            statuses.push(status);
        }
    }
    let mut calls: Vec<String> = fault::calls(state)
        .into_iter()
        .filter(|line| CALLS.iter().any(|call| line.split(' ').next() == Some(call)))
        .collect();
    if scenario.has_endless_fault() {
        calls.dedup();
    }
    let mut facts = json!({"statuses": statuses, "events": events(&seen.events, &names), "calls": calls});
    let node = node(&driver(&scenario.name), volumes, &names);
    if !node.is_empty() {
        facts["node"] = json!(node);
    }
    facts
}

/// Returns the Node's volumes of a driver, from its first one.
fn node(driver: &str, volumes: &[NodeVolumes], names: &Names) -> Vec<Value> {
    let own = |list: &[Value]| -> Vec<Value> {
        let own = list.iter().filter(|volume| volume.to_string().contains(&format!("/{driver}^")));
        own.map(|volume| normal("", volume.clone(), names)).collect()
    };
    let versions = volumes.iter().map(|at| (own(&at.in_use), own(&at.attached)));
    let mut node: Vec<Value> = versions
        .skip_while(|(in_use, attached)| in_use.is_empty() && attached.is_empty())
        .map(|(in_use, attached)| json!({"volumesInUse": in_use, "volumesAttached": attached}))
        .collect();
    node.dedup();
    node
}

/// Returns the parts of a status that are written however soon the next status follows.
fn lasting(status: &Value) -> Value {
    match status {
        Value::Object(map) => {
            let passing = ["observedGeneration", "PodReadyToStartContainers", "podIP", "podIPs"];
            let kept = map.iter().filter(|(key, _)| !passing.contains(&key.as_str()));
            Value::Object(kept.map(|(key, v)| (key.clone(), lasting(v))).collect())
        }
        Value::Array(list) => list.iter().map(lasting).collect(),
        other => other.clone(),
    }
}

fn status(pod: &Value, names: &Names) -> Value {
    let mut status = normal("", pod["status"].clone(), names);
    status.as_object_mut().map(|fields| fields.remove("resources"));
    if let Some(conditions) = status["conditions"].as_array() {
        let by_type = conditions.iter().map(|condition| {
            let mut condition = condition.clone();
            let kind = condition.as_object_mut().and_then(|fields| fields.remove("type"));
            (kind.as_ref().and_then(Value::as_str).unwrap_or_default().to_owned(), condition)
        });
        status["conditions"] = Value::Object(by_type.collect::<Map<_, _>>());
    }
    if pod["metadata"]["deletionTimestamp"].is_string() {
        status["deleting"] = json!(true);
    }
    status
}

/// Returns the number of different events of the node.
#[must_use]
pub fn event_count(seen: &Seen) -> usize {
    events(&seen.events, &Names::default()).len()
}

fn events(versions: &[Value], names: &Names) -> Vec<Value> {
    let mut events: Vec<(Value, Value)> = Vec::new();
    for event in versions.iter().filter(|event| event["source"]["host"] == NODE) {
        let mut shown = json!({
            "type": event["type"], "reason": event["reason"],
            "message": normal("", event["message"].clone(), names),
            "count": if event["count"].as_i64() > Some(1) { "repeated" } else { "once" },
        });
        if let Some(part) = event["involvedObject"]["fieldPath"].as_str() {
            shown["part"] = json!(part);
        }
        let id = event["metadata"]["uid"].clone();
        match events.iter_mut().find(|(other, _)| *other == id) {
            Some((_, before)) => *before = shown,
            None => events.push((id, shown)),
        }
    }
    events.into_iter().map(|(_, shown)| shown).collect()
}

fn normal(key: &str, value: Value, names: &Names) -> Value {
    match value {
        Value::String(text) => json!(match key {
            "containerID" => "<id>".to_owned(),
            "podIP" | "hostIP" | "ip" => "<ip>".to_owned(),
            _ => replaced(&text, names),
        }),
        Value::Array(list) => list.into_iter().map(|item| normal(key, item, names)).collect(),
        Value::Object(map) => Value::Object(
            map.into_iter()
                .filter(|(_, v)| !v.is_null() && *v != json!({}))
                .map(|(key, v)| {
                    let v = normal(&key, v, names);
                    (key, v)
                })
                .collect(),
        ),
        other => other,
    }
}

fn replaced(text: &str, names: &Names) -> String {
    let mut out = TIME.replace(text, "<time>").into_owned();
    for (value, name) in names {
        out = out.replace(value, name);
    }
    out
}
