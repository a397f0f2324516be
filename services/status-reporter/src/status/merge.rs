//! Merges the desired status into the live one (`pkg/kubelet/status: mergePodStatus`).

use serde_json::{Value, json};

use super::{FOREIGN_FIELDS, OWNED, SHARED, condition, is_terminal, is_true, list, phase, text};

/// Merges `desired` into `live`.
///
/// Conditions and fields of other clients stay as in `live`. While containers `could_run`, the phase does not
/// become terminal. A terminal pod is never ready. `now` is RFC 3339 in seconds, for conditions that change.
#[must_use]
pub fn merge(live: &Value, desired: &Value, could_run: bool, now: &str) -> Value {
    let mut merged = desired.clone();
    let ending = !is_terminal(phase(live)) && is_terminal(phase(desired));
    let mut conditions: Vec<Value> =
        list(live, "conditions").iter().filter(|c| !is_owned(c)).cloned().collect();
    for wanted in list(desired, "conditions") {
        if is_owned(wanted) {
            conditions.push(wanted.clone());
        } else if text(wanted, "type") == SHARED && ending && !could_run {
            let wanted = with_transition_time(wanted, condition(live, SHARED), now);
            match conditions.iter_mut().find(|c| text(c, "type") == SHARED) {
                Some(there) => *there = wanted,
                None => conditions.push(wanted),
            }
        }
    }
    set(&mut merged, "conditions", (!conditions.is_empty()).then_some(Value::Array(conditions)));
    for field in FOREIGN_FIELDS {
        set(&mut merged, field, live.get(*field).cloned());
    }
    if merged.get("qosClass").is_none() {
        // The field is immutable after the creation of the pod.
        set(&mut merged, "qosClass", live.get("qosClass").cloned());
    }
    if ending && could_run {
        for field in ["phase", "reason", "message"] {
            set(&mut merged, field, live.get(field).cloned());
        }
    }
    if is_terminal(phase(&merged)) && (is_true(&merged, "Ready") || is_true(&merged, "ContainersReady")) {
        let reason = if phase(&merged) == "Failed" { "PodFailed" } else { "PodCompleted" };
        for kind in ["ContainersReady", "Ready"] {
            force_false(&mut merged, kind, reason, now);
        }
    }
    merged
}

fn is_owned(condition: &Value) -> bool {
    OWNED.contains(&text(condition, "type"))
}

fn set(object: &mut Value, field: &str, value: Option<Value>) {
    if let Some(object) = object.as_object_mut() {
        match value {
            Some(value) => object.insert(field.to_owned(), value),
            None => object.remove(field),
        };
    }
}

/// Sets a condition. Its transition time changes only with its status.
fn with_transition_time(wanted: &Value, live: Option<&Value>, now: &str) -> Value {
    let mut wanted = wanted.clone();
    let kept = live
        .filter(|l| text(l, "status") == text(&wanted, "status"))
        .and_then(|l| l.get("lastTransitionTime"));
    wanted["lastTransitionTime"] = kept.cloned().unwrap_or_else(|| json!(now));
    wanted
}

fn force_false(status: &mut Value, kind: &str, reason: &str, now: &str) {
    let before = condition(status, kind).cloned();
    let mut forced = json!({"type": kind, "status": "False", "reason": reason, "lastTransitionTime": now});
    if let Some(before) = &before {
        if text(before, "status") == "False" {
            set(&mut forced, "lastTransitionTime", before.get("lastTransitionTime").cloned());
        }
        set(&mut forced, "observedGeneration", before.get("observedGeneration").cloned());
    }
    let Some(conditions) = status.get_mut("conditions").and_then(Value::as_array_mut) else { return };
    match conditions.iter_mut().find(|c| text(c, "type") == kind) {
        Some(there) => *there = forced,
        None => conditions.push(forced),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: &str = "2026-01-01T00:01:00Z";

    fn cond(kind: &str, status: &str) -> Value {
        json!({"type": kind, "status": status, "lastTransitionTime": "2026-01-01T00:00:00Z"})
    }

    fn kinds(status: &Value) -> Vec<String> {
        list(status, "conditions")
            .iter()
            .map(|c| format!("{}={}", text(c, "type"), text(c, "status")))
            .collect()
    }

    #[test]
    fn foreign_conditions_come_first_and_owned_ones_are_replaced_or_dropped() {
        let live = json!({"phase": "Running", "conditions": [
            cond("PodScheduled", "True"), cond("example.com/gate", "True"), cond("Ready", "False"), cond(SHARED, "True"),
        ]});
        let desired = json!({"phase": "Running", "conditions": [
            cond("Ready", "True"), cond("example.com/gate", "False"), cond("Initialized", "True"),
        ]});
        let merged = merge(&live, &desired, true, NOW);
        assert_eq!(
            kinds(&merged),
            ["example.com/gate=True", "DisruptionTarget=True", "Ready=True", "Initialized=True"],
            "PodScheduled is owned and not wanted; the foreign one is the API's"
        );
    }

    #[test]
    fn a_terminal_phase_waits_until_nothing_can_run() {
        let live = json!({"phase": "Running", "message": "m"});
        let desired = json!({"phase": "Failed", "reason": "Evicted", "message": "low", "containerStatuses": [{"name": "a"}]});
        let early = merge(&live, &desired, true, NOW);
        assert_eq!(early, json!({"phase": "Running", "message": "m", "containerStatuses": [{"name": "a"}]}));
        let late = merge(&live, &desired, false, NOW);
        assert_eq!(
            (phase(&late), text(&late, "reason"), text(&late, "message")),
            ("Failed", "Evicted", "low")
        );
    }

    #[test]
    fn a_terminal_phase_in_the_api_is_replaced_at_once() {
        let live = json!({"phase": "Failed", "reason": "Old"});
        let desired = json!({"phase": "Succeeded", "conditions": [cond(SHARED, "True")]});
        let merged = merge(&live, &desired, true, NOW);
        assert_eq!((phase(&merged), kinds(&merged).len()), ("Succeeded", 0));
    }

    #[test]
    fn the_disruption_condition_is_set_only_with_the_terminal_phase() {
        let desired = json!({"phase": "Failed", "conditions": [cond(SHARED, "True")]});
        // (live conditions, could run, wanted conditions, wanted time)
        let cases = [
            (vec![], true, vec![], ""),
            (vec![], false, vec!["DisruptionTarget=True"], NOW),
            (vec![cond(SHARED, "False")], false, vec!["DisruptionTarget=True"], NOW),
            (vec![cond(SHARED, "True")], false, vec!["DisruptionTarget=True"], "2026-01-01T00:00:00Z"),
            (vec![cond(SHARED, "False")], true, vec!["DisruptionTarget=False"], "2026-01-01T00:00:00Z"),
        ];
        for (conditions, could_run, want, time) in cases {
            let live = json!({"phase": "Running", "conditions": conditions});
            let merged = merge(&live, &desired, could_run, NOW);
            assert_eq!(kinds(&merged), want);
            assert_eq!(
                condition(&merged, SHARED).map(|c| text(c, "lastTransitionTime")).unwrap_or_default(),
                time
            );
        }
        let running = json!({"phase": "Running", "conditions": [cond(SHARED, "True")]});
        assert!(kinds(&merge(&json!({"phase": "Running"}), &running, false, NOW)).is_empty());
    }

    #[test]
    fn a_terminal_pod_is_never_ready() {
        for (phase, reason) in [("Failed", "PodFailed"), ("Succeeded", "PodCompleted")] {
            let mut ready = cond("Ready", "True");
            ready["observedGeneration"] = json!(4);
            let desired = json!({"phase": phase, "conditions": [ready, cond("ContainersReady", "False")]});
            let merged = merge(&json!({"phase": "Running"}), &desired, false, NOW);
            let ready = condition(&merged, "Ready").unwrap();
            assert_eq!(
                *ready,
                json!({"type": "Ready", "status": "False", "reason": reason, "lastTransitionTime": NOW, "observedGeneration": 4})
            );
            let containers = condition(&merged, "ContainersReady").unwrap();
            assert_eq!(
                (text(containers, "reason"), text(containers, "lastTransitionTime")),
                (reason, "2026-01-01T00:00:00Z"),
                "the status was False before: the time stays"
            );
        }
    }

    #[test]
    fn fields_of_other_writers_are_kept_and_obsolete_ones_removed() {
        let live = json!({"phase": "Running", "resourceClaimStatuses": [{"name": "c"}], "nominatedNodeName": "n", "resize": "Proposed", "qosClass": "Burstable"});
        let merged =
            merge(&live, &json!({"phase": "Running", "resourceClaimStatuses": [{"name": "x"}]}), true, NOW);
        assert_eq!(
            merged,
            json!({"phase": "Running", "resourceClaimStatuses": [{"name": "c"}], "qosClass": "Burstable"})
        );
    }
}
