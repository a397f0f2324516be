//! Computes the Node object from facts (`pkg/kubelet/nodestatus`). No I/O, no clock.

use std::time::Duration;

use quintlet_model::pod_status::canonical;
use serde_json::{Map, Value, json};

use super::Facts;
use crate::events::Occurrence;
use crate::status::{condition, list, text};

/// Age of facts at which the node is not ready.
pub const FACTS_LIMIT: Duration = Duration::from_secs(30);

/// Time after a start of this service for which Ready stays unchanged without facts.
pub const START_GRACE: Duration = Duration::from_secs(30);

/// The source whose facts are required.
pub const MAIN_SOURCE: &str = "pod-sync";

const RESOURCES: [&str; 4] = ["cpu", "memory", "pods", "ephemeral-storage"];

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

/// Health of another service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    pub name: &'static str,
    /// Time since the service stopped serving; none while it serves.
    pub down_for: Option<Duration>,
    /// Time without health after which the node is not ready.
    pub limit: Duration,
}

/// The input of [`readiness`].
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    pub facts: &'a [Facts],
    pub peers: &'a [Peer],
    /// Current CLOCK_BOOTTIME.
    pub boot: Duration,
    /// CLOCK_BOOTTIME of the start of this service.
    pub started: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Readiness {
    Ready,
    /// The reasons.
    NotReady(Vec<String>),
    /// This service has just started and has no facts: the condition in the API server stays.
    Unknown,
}

/// Computes readiness, without the check of the capacity.
#[must_use]
pub fn readiness(view: View<'_>) -> Readiness {
    let known = view.facts.iter().any(|f| f.source == MAIN_SOURCE);
    if !known && view.boot.saturating_sub(view.started) < START_GRACE {
        return Readiness::Unknown;
    }
    let mut problems: Vec<String> = Vec::new();
    let mut add = |problem: String| {
        if !problems.contains(&problem) {
            problems.push(problem);
        }
    };
    for facts in view.facts {
        facts.not_ready.iter().cloned().for_each(&mut add);
    }
    for peer in view.peers {
        if peer.down_for.is_some_and(|d| d > peer.limit) {
            add(format!(
                "{} is not healthy: not serving for more than {} s",
                peer.name,
                peer.limit.as_secs()
            ));
        }
    }
    if !known {
        add(format!("{MAIN_SOURCE} has not reported yet"));
    }
    for facts in view.facts {
        if view.boot.saturating_sub(facts.observed) > FACTS_LIMIT {
            add(format!("{} has not reported for more than {} s", facts.source, FACTS_LIMIT.as_secs()));
        }
    }
    if problems.is_empty() { Readiness::Ready } else { Readiness::NotReady(problems) }
}

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
    let name = text(&live["metadata"], "name").to_owned();
    let old_boot = text(&live["status"]["nodeInfo"], "bootID");
    let new_boot = text(&node["status"]["nodeInfo"], "bootID");
    if !old_boot.is_empty() && old_boot != new_boot {
        let message = format!("Node {name} has been rebooted, boot id: {new_boot}");
        events.push(Occurrence::of_node(&name, "Warning", "Rebooted", message));
    }
    let mut told = |reason: &str| {
        let message = format!("Node {name} status is now: {reason}");
        events.push(Occurrence::of_node(&name, "Normal", reason, message));
    };
    if !facts.is_empty() {
        for pressure in &PRESSURES {
            let on = facts.iter().any(|f| crate::status::is_true(&f.node["status"], pressure.kind));
            if set_pressure(&mut node, pressure, on, now) {
                told(if on { pressure.on.2 } else { pressure.off.2 });
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
    if !missing.is_empty() {
        problems.push(format!("missing node capacity for resources: {}", missing.join(", ")));
    }
    if let Some(reason) = set_ready(&mut node, &problems, now) {
        told(reason);
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

/// Reason, message and event of a state.
type Words = (&'static str, &'static str, &'static str);

struct Pressure {
    kind: &'static str,
    on: Words,
    off: Words,
}

const PRESSURES: [Pressure; 3] = [
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

/// Sets a pressure condition. Its text and transition time change only with its status. Returns whether the status changed.
fn set_pressure(node: &mut Value, pressure: &Pressure, on: bool, now: &str) -> bool {
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

/// Sets the condition Ready. Its text is always set; its transition time changes only with its status. Returns the reason of an
/// event if the status changed.
fn set_ready(node: &mut Value, problems: &[String], now: &str) -> Option<&'static str> {
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

/// Urgency of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Weight {
    /// Only heartbeats differ.
    Nothing,
    /// A field differs.
    Changed,
    /// `volumesInUse` lacks a volume, which waits for it to be mounted.
    Volumes,
    /// The status of a condition differs.
    Turned,
}

/// Default interval between writes of a changed status.
pub const UPDATE_EVERY: Duration = Duration::from_secs(10);

/// Shortest interval between writes of volumes that come into use, so that a burst of pods causes few writes.
pub const VOLUMES_EVERY: Duration = Duration::from_secs(1);

/// Default interval between writes of an unchanged status.
pub const REPORT_EVERY: Duration = Duration::from_secs(300);

/// The write that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    Nothing,
    /// The changed fields.
    Change,
    /// The changed fields and the heartbeats.
    Report,
}

/// Ages of the last write and of the last report; `None` before the first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ages {
    pub update: Option<Duration>,
    pub report: Option<Duration>,
}

/// Returns the write that is due: changed conditions immediately, volumes that come into use every [`VOLUMES_EVERY`], other changes
/// every `update_every`, heartbeats every `report_every`. Without facts no heartbeat is due.
#[must_use]
pub fn due(
    weight: Weight,
    has_facts: bool,
    ages: Ages,
    update_every: Duration,
    report_every: Duration,
) -> Due {
    let passed = |since: Option<Duration>, every: Duration| since.is_none_or(|since| since >= every);
    if has_facts && passed(ages.report, report_every) {
        return Due::Report;
    }
    let is_due = match weight {
        Weight::Turned => true,
        Weight::Volumes => passed(ages.update, VOLUMES_EVERY.min(update_every)),
        Weight::Changed => passed(ages.update, update_every),
        Weight::Nothing => false,
    };
    if is_due { Due::Change } else { Due::Nothing }
}

/// Compares the desired Node with the live one.
#[must_use]
pub fn weigh(live: &Value, desired: &Value) -> Weight {
    let statuses = |node: &Value| -> Vec<(String, String)> {
        let own = list(&node["status"], "conditions").iter().filter(|c| is_own(c));
        let mut all: Vec<_> =
            own.map(|c| (text(c, "type").to_owned(), text(c, "status").to_owned())).collect();
        all.sort();
        all
    };
    // The first address is urgent, since a Node without an address is unreachable.
    let has_address = |node: &Value| !list(&node["status"], "addresses").is_empty();
    if statuses(live) != statuses(desired) || has_address(desired) && !has_address(live) {
        return Weight::Turned;
    }
    if super::volumes::adds_in_use(live, desired) {
        return Weight::Volumes;
    }
    if patch(live, desired, false).is_some() { Weight::Changed } else { Weight::Nothing }
}

fn is_own(condition: &Value) -> bool {
    text(condition, "type") == "Ready" || PRESSURES.iter().any(|p| p.kind == text(condition, "type"))
}

/// Returns the strategic merge patch for `nodes/status`. With `heartbeat`, differing heartbeats suffice for a patch.
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
            "annotations": {"volumes.kubernetes.io/controller-managed-attach-detach": "true"},
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

/// Adds the default labels and the annotation of the initial Node to an existing one. Other labels belong to the clients
/// that manage the Node.
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

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: &str = "2026-01-01T00:01:00Z";

    fn facts(observed: u64, not_ready: &[&str]) -> Facts {
        Facts {
            source: MAIN_SOURCE.into(),
            node: json!({
                "metadata": {"labels": {"a": "b"}},
                "status": {
                    "capacity": {"cpu": "2", "memory": "1Gi", "pods": "110", "ephemeral-storage": "9Gi"},
                    "nodeInfo": {"bootID": "boot-1"}, "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
                },
            }),
            not_ready: not_ready.iter().map(|s| (*s).to_owned()).collect(),
            observed: Duration::from_secs(observed),
        }
    }

    fn judge(facts: &[Facts], peers: &[Peer], boot: u64, started: u64) -> Readiness {
        let seconds = Duration::from_secs;
        readiness(View { facts, peers, boot: seconds(boot), started: seconds(started) })
    }

    #[test]
    fn the_ready_condition_names_the_reasons_against_it() {
        let not = |problems: &[&str]| Readiness::NotReady(problems.iter().map(|s| (*s).to_owned()).collect());
        let peer = |down: Option<u64>, limit: u64| Peer {
            name: "pleg-service",
            down_for: down.map(Duration::from_secs),
            limit: Duration::from_secs(limit),
        };
        assert_eq!(judge(&[], &[], 129, 100), Readiness::Unknown);
        assert_eq!(judge(&[], &[], 130, 100), not(&["pod-sync has not reported yet"]));
        assert_eq!(judge(&[facts(100, &[])], &[], 130, 100), Readiness::Ready);
        assert_eq!(
            judge(&[facts(100, &[])], &[], 131, 100),
            not(&["pod-sync has not reported for more than 30 s"])
        );
        assert_eq!(judge(&[facts(500, &[])], &[], 131, 100), Readiness::Ready, "the future is fresh");
        assert_eq!(
            judge(&[facts(100, &["runtime down", "no network", "runtime down"])], &[], 101, 100),
            not(&["runtime down", "no network"])
        );
        assert_eq!(judge(&[facts(100, &[])], &[peer(Some(180), 180)], 101, 100), Readiness::Ready);
        assert_eq!(
            judge(&[facts(100, &["x"])], &[peer(Some(181), 180)], 101, 100),
            not(&["x", "pleg-service is not healthy: not serving for more than 180 s"])
        );
        assert_eq!(judge(&[facts(100, &[])], &[peer(None, 180)], 101, 100), Readiness::Ready);
    }

    fn cond<'a>(node: &'a Value, kind: &str) -> &'a Value {
        condition(&node["status"], kind).unwrap()
    }

    fn reasons(events: &[Occurrence]) -> Vec<&str> {
        events.iter().map(|e| e.reason.as_str()).collect()
    }

    #[test]
    fn a_fresh_node_gets_pressures_first_and_ready_last() {
        let live = initial("n1", "amd64");
        let (node, events) = desired(&live, &[facts(1, &[])], &Readiness::Ready, NOW);
        let kinds: Vec<&str> = list(&node["status"], "conditions").iter().map(|c| text(c, "type")).collect();
        assert_eq!(kinds, ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"]);
        assert_eq!(
            *cond(&node, "Ready"),
            json!({"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status",
                "lastHeartbeatTime": NOW, "lastTransitionTime": NOW})
        );
        assert_eq!(text(cond(&node, "DiskPressure"), "reason"), "KubeletHasNoDiskPressure");
        assert_eq!(
            reasons(&events),
            ["NodeHasSufficientMemory", "NodeHasNoDiskPressure", "NodeHasSufficientPID"]
        );
        assert_eq!(
            (&node["metadata"]["labels"]["a"], &node["status"]["capacity"]["cpu"]),
            (&json!("b"), &json!("2"))
        );
    }

    #[test]
    fn conditions_change_as_in_the_kubelet() {
        let old = "2026-01-01T00:00:00Z";
        let (first, _) = desired(&initial("n1", "amd64"), &[facts(1, &[])], &Readiness::Ready, old);
        let (same, events) = desired(&first, &[facts(1, &[])], &Readiness::Ready, NOW);
        assert!(events.is_empty());
        for kind in ["Ready", "MemoryPressure"] {
            let c = cond(&same, kind);
            assert_eq!((text(c, "lastTransitionTime"), text(c, "lastHeartbeatTime")), (old, NOW), "{kind}");
        }
        let problems = |p: &[&str]| Readiness::NotReady(p.iter().map(|s| (*s).to_owned()).collect());
        let (down, events) = desired(&first, &[facts(1, &[])], &problems(&["a", "b"]), NOW);
        let ready = cond(&down, "Ready");
        assert_eq!(
            (text(ready, "status"), text(ready, "message"), text(ready, "lastTransitionTime")),
            ("False", "[a, b]", NOW)
        );
        assert_eq!(
            events,
            [Occurrence::of_node(
                "n1",
                "Normal",
                "NodeNotReady",
                "Node n1 status is now: NodeNotReady".into()
            )]
        );
        let (other, events) = desired(&down, &[facts(1, &[])], &problems(&["c"]), "2026-01-01T00:02:00Z");
        assert_eq!(
            (text(cond(&other, "Ready"), "message"), text(cond(&other, "Ready"), "lastTransitionTime")),
            ("c", NOW)
        );
        assert!(events.is_empty(), "another message is no transition");

        let mut low = facts(1, &[]);
        low.node["status"]["conditions"] = json!([{"type": "MemoryPressure", "status": "True"}]);
        let (pressed, events) = desired(&first, &[low], &Readiness::Ready, NOW);
        assert_eq!(
            text(cond(&pressed, "MemoryPressure"), "message"),
            "kubelet has insufficient memory available"
        );
        assert_eq!(reasons(&events), ["NodeHasInsufficientMemory"]);
    }

    #[test]
    fn ready_names_missing_capacity_and_is_kept_while_readiness_is_unknown() {
        let mut bare = facts(1, &[]);
        bare.node = json!({"status": {"capacity": {"cpu": "1"}}});
        let (node, _) = desired(&initial("n1", "amd64"), &[bare], &Readiness::Ready, NOW);
        assert_eq!(
            text(cond(&node, "Ready"), "message"),
            "missing node capacity for resources: memory, pods, ephemeral-storage"
        );

        let mut live = initial("n1", "amd64");
        live["status"]["conditions"] = json!([{"type": "Ready", "status": "True", "lastHeartbeatTime": "x"}]);
        let (left, events) = desired(&live, &[], &Readiness::Unknown, NOW);
        assert_eq!((&left, events.len()), (&live, 0), "after a restart the API's word stands");
        let (fresh, _) = desired(&initial("n1", "amd64"), &[], &Readiness::Unknown, NOW);
        assert_eq!(text(cond(&fresh, "Ready"), "status"), "False");
    }

    #[test]
    fn a_reboot_is_reported_when_the_boot_id_changes() {
        let mut live = initial("n1", "amd64");
        live["status"]["nodeInfo"] = json!({"bootID": "boot-0", "architecture": "amd64"});
        let (node, events) = desired(&live, &[facts(1, &[])], &Readiness::Ready, NOW);
        assert_eq!(events[0].message, "Node n1 has been rebooted, boot id: boot-1");
        assert_eq!(node["status"]["nodeInfo"], json!({"bootID": "boot-1", "architecture": "amd64"}));
        let (_, events) = desired(&node, &[facts(1, &[])], &Readiness::Ready, NOW);
        assert!(events.is_empty());
    }

    #[test]
    fn a_patch_has_only_owned_fields() {
        let mut live = initial("n1", "amd64");
        live["status"] = json!({"capacity": {"example.com/gpu": "1"}, "conditions": [{"type": "KernelDeadlock", "status": "False"}]});
        let (node, _) = desired(&live, &[facts(1, &[])], &Readiness::Ready, NOW);
        assert_eq!(node["status"]["capacity"]["example.com/gpu"], "1", "capacity of others stays");
        assert_eq!(weigh(&live, &node), Weight::Turned);
        let first = patch(&live, &node, false).unwrap();
        assert_eq!(first["metadata"], json!({"labels": {"a": "b"}}));
        assert_eq!(
            first["status"]["addresses"],
            json!([{"type": "InternalIP", "address": "10.0.0.1"}, {"$patch": "replace"}])
        );
        assert_eq!(first["status"]["conditions"].as_array().unwrap().len(), 4, "no foreign condition");
        assert_eq!(first["status"]["capacity"].get("example.com/gpu"), None);

        let (later, _) = desired(&node, &[facts(2, &[])], &Readiness::Ready, "2026-01-01T00:09:00Z");
        assert_eq!((weigh(&node, &later), patch(&node, &later, false)), (Weight::Nothing, None));
        let beat = patch(&node, &later, true).unwrap();
        assert_eq!(beat["status"].as_object().unwrap().len(), 1, "only conditions: {beat}");
        let mut moved = facts(3, &[]);
        moved.node["status"]["capacity"]["memory"] = json!("2Gi");
        let (moved, _) = desired(&node, &[moved], &Readiness::Ready, NOW);
        assert_eq!(weigh(&node, &moved), Weight::Changed);
        let mut nowhere = node.clone();
        nowhere["status"]["addresses"] = json!([]);
        assert_eq!(weigh(&nowhere, &node), Weight::Turned, "the first address");
        let mut same = facts(3, &[]);
        same.node["status"]["capacity"]["memory"] = json!("1024Mi");
        let (same, _) = desired(&node, &[same], &Readiness::Ready, NOW);
        assert_eq!(weigh(&node, &same), Weight::Nothing, "the same quantity in other words");
    }

    #[test]
    fn readiness_is_written_at_once_other_changes_soon_and_heartbeats_rarely() {
        let s = |seconds: u64| Some(Duration::from_secs(seconds));
        let cases = [
            (Weight::Nothing, true, s(299), s(299), Due::Nothing),
            (Weight::Nothing, true, s(300), s(300), Due::Report),
            (Weight::Nothing, true, None, None, Due::Report),
            (Weight::Nothing, false, None, None, Due::Nothing),
            (Weight::Changed, true, s(9), s(9), Due::Nothing),
            (Weight::Changed, true, s(10), s(10), Due::Change),
            (Weight::Changed, false, None, None, Due::Change),
            (Weight::Volumes, true, Some(Duration::from_millis(999)), s(9), Due::Nothing),
            (Weight::Volumes, true, s(1), s(9), Due::Change),
            (Weight::Volumes, false, None, None, Due::Change),
            (Weight::Turned, true, s(0), s(0), Due::Change),
            (Weight::Turned, true, s(0), s(300), Due::Report),
            (Weight::Turned, false, s(0), None, Due::Change),
        ];
        for (weight, facts, update, report, want) in cases {
            assert_eq!(
                due(weight, facts, Ages { update, report }, UPDATE_EVERY, REPORT_EVERY),
                want,
                "{weight:?} {facts} {update:?} {report:?}"
            );
        }
    }

    #[test]
    fn an_existing_node_keeps_its_labels_and_gets_the_default_ones() {
        let mut live = initial("n1", "amd64");
        live["metadata"]["labels"] = json!({"mine": "1", "kubernetes.io/arch": "old"});
        let mut initial = initial("n1", "arm64");
        initial["metadata"]["labels"]["tier"] = json!("blue");
        initial["metadata"]["labels"]["topology.kubernetes.io/zone"] = json!("z1");
        let labels = &adopt(&live, &initial)["metadata"]["labels"];
        assert_eq!((&labels["mine"], &labels["kubernetes.io/arch"]), (&json!("1"), &json!("arm64")));
        assert_eq!(labels["topology.kubernetes.io/zone"], "z1");
        assert_eq!(labels.get("tier"), None, "only a node that is made gets custom labels");
    }

    #[test]
    fn a_change_of_unschedulable_is_an_event() {
        let node = |unschedulable: bool| json!({"metadata": {"name": "n1"}, "spec": {"unschedulable": unschedulable}});
        assert_eq!(schedulable_event(None, &node(true)).unwrap().reason, "NodeNotSchedulable");
        assert_eq!(schedulable_event(Some(&node(true)), &node(false)).unwrap().reason, "NodeSchedulable");
        assert_eq!(schedulable_event(None, &node(false)), None);
    }
}
