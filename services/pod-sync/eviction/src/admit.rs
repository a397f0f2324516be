//! Admission of pods while the node is under pressure (`pkg/kubelet/eviction: Admit`).

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Pod, Taint};
use pod_sync_decisions::admission::tolerates;
use pod_sync_decisions::qos::{self, QosClass};
use quintlet_model::pod;

use crate::signal::Condition;

/// Taint of the node under memory pressure.
const MEMORY_PRESSURE_TAINT: &str = "node.kubernetes.io/memory-pressure";

/// Returns the message of the rejection if the node does not take the pod under these conditions.
#[must_use]
pub fn rejection(pod: &Pod, conditions: &BTreeSet<Condition>) -> Option<String> {
    if conditions.is_empty() || pod::is_critical(pod) {
        return None;
    }
    let only_memory = conditions.iter().all(|condition| *condition == Condition::MemoryPressure);
    if only_memory && (qos::qos_class(pod) != QosClass::BestEffort || tolerates_memory_pressure(pod)) {
        return None;
    }
    let names: Vec<_> = conditions.iter().map(|condition| condition.as_str()).collect();
    Some(format!("The node had condition: [{}]. ", names.join(" ")))
}

fn tolerates_memory_pressure(pod: &Pod) -> bool {
    let taint =
        Taint { key: MEMORY_PRESSURE_TAINT.to_owned(), effect: "NoSchedule".to_owned(), ..Taint::default() };
    pod::spec(pod).tolerations.iter().flatten().any(|toleration| tolerates(toleration, &taint))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::support::pod;

    #[test]
    fn pods_are_admitted_by_class_toleration_and_priority() {
        let burstable =
            json!({ "containers": [{ "name": "c", "resources": { "requests": { "cpu": "1m" } } }] });
        let tolerant = |key: &str, effect: &str| json!({ "tolerations": [{ "key": key, "operator": "Exists", "effect": effect }] });
        let memory = [Condition::MemoryPressure].as_slice();
        let disk = [Condition::DiskPressure].as_slice();
        let both = [Condition::DiskPressure, Condition::MemoryPressure].as_slice();
        let (in_memory, in_disk) =
            ("The node had condition: [MemoryPressure]. ", "The node had condition: [DiskPressure]. ");
        for (spec, conditions, want) in [
            (json!({}), &[][..], None),
            (json!({}), memory, Some(in_memory)),
            (burstable.clone(), memory, None),
            (burstable.clone(), disk, Some(in_disk)),
            (burstable, both, Some("The node had condition: [MemoryPressure DiskPressure]. ")),
            (tolerant(MEMORY_PRESSURE_TAINT, "NoSchedule"), memory, None),
            (tolerant(MEMORY_PRESSURE_TAINT, ""), memory, None),
            (tolerant(MEMORY_PRESSURE_TAINT, "NoExecute"), memory, Some(in_memory)),
            (tolerant("node.kubernetes.io/disk-pressure", "NoSchedule"), memory, Some(in_memory)),
            (tolerant("node.kubernetes.io/disk-pressure", "NoSchedule"), disk, Some(in_disk)),
            (json!({ "priority": 2_000_000_000 }), disk, None),
            (
                json!({ "priority": 1_999_999_999 }),
                &[Condition::PidPressure][..],
                Some("The node had condition: [PIDPressure]. "),
            ),
        ] {
            let found = rejection(&pod("p", spec.clone()), &conditions.iter().copied().collect());
            assert_eq!(found.as_deref(), want, "{spec} {conditions:?}");
        }
    }

    #[test]
    fn a_static_pod_is_admitted_under_every_condition() {
        let mut pod = pod("p", json!({}));
        let source = ("kubernetes.io/config.source".to_owned(), "file".to_owned());
        pod.metadata.annotations = Some([source].into());
        let all = [Condition::MemoryPressure, Condition::DiskPressure, Condition::PidPressure];
        assert_eq!(rejection(&pod, &all.into()), None);
    }
}
