//! A patch between any two statuses converts one into the other.

use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use proptest::test_runner::FileFailurePersistence;
use quintlet_model::pod_status::{FOREIGN_FIELDS, equal};
use serde_json::{Map, Value, json};
use status_reporter::status::merge::merge;
use status_reporter::status::patch::{Base, pod_status};

const NOW: &str = "2026-01-01T00:00:00Z";
const KINDS: [&str; 5] = ["Ready", "ContainersReady", "PodScheduled", "DisruptionTarget", "example.com/gate"];

fn condition(kind: &'static str) -> impl Strategy<Value = Value> {
    (
        select(vec!["True", "False"]),
        proptest::option::of(select(vec!["r1", "r2"])),
        proptest::option::of(1..3_u8),
    )
        .prop_map(move |(status, reason, generation)| {
            let mut condition = json!({"type": kind, "status": status, "lastTransitionTime": NOW});
            if let Some(reason) = reason {
                condition["reason"] = json!(reason);
            }
            if let Some(generation) = generation {
                condition["observedGeneration"] = json!(generation);
            }
            condition
        })
}

fn status() -> impl Strategy<Value = Value> {
    let conditions = subsequence(KINDS.to_vec(), 0..=KINDS.len())
        .prop_flat_map(|kinds| kinds.into_iter().map(condition).collect::<Vec<_>>())
        .prop_map(Value::Array);
    let ips = subsequence(vec!["10.0.0.1", "10.0.0.2", "fd00::1"], 0..=2)
        .prop_shuffle()
        .prop_map(|ips| ips.into_iter().map(|ip| json!({ "ip": ip })).collect::<Value>());
    let containers = (0..3_u8, any::<bool>()).prop_map(|(restarts, ready)| {
        json!([{"name": "a", "ready": ready, "restartCount": restarts, "state": {"running": {}}, "lastState": {}}])
    });
    let optional = |values: Vec<&'static str>| proptest::option::of(select(values));
    (
        select(vec!["Pending", "Running", "Succeeded", "Failed"]),
        optional(vec!["Evicted", "DeadlineExceeded"]),
        optional(vec!["n1"]),
        proptest::option::of(conditions),
        proptest::option::of(ips),
        proptest::option::of(containers),
        proptest::option::of(
            (1..3_u8).prop_map(|cpu| json!({"requests": {"cpu": cpu.to_string(), "memory": "1Gi"}})),
        ),
        subsequence(FOREIGN_FIELDS.to_vec(), 0..=FOREIGN_FIELDS.len()),
        1..3_u8,
    )
        .prop_map(
            |(phase, reason, nominated, conditions, ips, containers, resources, claims, version)| {
                let mut status = Map::new();
                status.insert("phase".into(), json!(phase));
                for (field, value) in [
                    ("reason", reason.map(Value::from)),
                    ("nominatedNodeName", nominated.map(Value::from)),
                    ("conditions", conditions),
                    ("podIPs", ips),
                    ("containerStatuses", containers),
                    ("resources", resources),
                ] {
                    if let Some(value) = value {
                        status.insert(field.into(), value);
                    }
                }
                for field in claims {
                    status.insert(
                        field.to_owned(),
                        json!([{"name": "a", "resourceClaimName": format!("v{version}")}]),
                    );
                }
                Value::Object(status)
            },
        )
}

fn apply(live: &Value, patch: Option<Value>) -> Value {
    let mut pod = json!({"metadata": {"uid": "u"}, "status": live});
    if let Some(patch) = patch {
        quintlet_testapi::strategic_merge("pods", &mut pod, patch).unwrap();
    }
    pod["status"].take()
}

// The conditions and fields that other components own.
fn foreign(status: &Value) -> (Vec<Value>, [Option<Value>; 3]) {
    let all = status["conditions"].as_array().cloned().unwrap_or_default();
    let conditions = all.into_iter().filter(|c| c["type"] == "example.com/gate").collect();
    let fields =
        ["resourceClaimStatuses", "extendedResourceClaimStatus", "nodeAllocatableResourceClaimStatuses"];
    (conditions, fields.map(|field| status.get(field).cloned()))
}

proptest! {
    // Failing cases are written beside this file, to be committed.
    #![proptest_config(ProptestConfig {
        cases: quintlet_testkit::budget::cases(2000),
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_patch_of_the_live_status_results_in_the_desired_status(live in status(), desired in status(), could_run: bool) {
        let merged = merge(&live, &desired, could_run, NOW);
        let after = apply(&live, pod_status("u", &live, &merged, Base::Known));
        prop_assert!(equal(&after, &merged), "{after:#}\n{merged:#}");
        prop_assert_eq!(foreign(&after), foreign(&live));
        prop_assert_eq!(pod_status("u", &after, &merge(&after, &desired, could_run, NOW), Base::Known), None, "a second write is none");
    }

    #[test]
    fn a_patch_on_a_claimed_base_results_in_the_desired_status(
        claimed in status(), live in status(), desired in status(),
    ) {
        // The live status differs from the claimed one only by our own writes: phases and foreign parts are
        // equal.
        let mut claimed = claimed;
        claimed["phase"] = live["phase"].clone();
        let ours = |c: &Value| !matches!(c["type"].as_str(), Some("DisruptionTarget" | "example.com/gate"));
        let conditions = |status: &Value| status["conditions"].as_array().cloned().unwrap_or_default();
        let own = conditions(&claimed).into_iter().filter(ours);
        claimed["conditions"] = conditions(&live).into_iter().filter(|c| !ours(c)).chain(own).collect();
        let merged = merge(&claimed, &desired, false, NOW);
        let patch = pod_status("u", &claimed, &merged, Base::Claimed);
        prop_assume!(patch.is_some());
        let after = apply(&live, patch);
        prop_assert!(equal(&after, &merged), "{after:#}\n{merged:#}");
        prop_assert_eq!(foreign(&after), foreign(&live));
    }
}
