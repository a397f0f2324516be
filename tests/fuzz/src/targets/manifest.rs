//! Manifests of pods.

use k8s_openapi::api::core::v1::Pod;
use pod_sync_layout::SourceKind;
use pod_sync_sources::decode::{self, ManifestOrigin};
use pod_sync_sources::{Snapshot, validate};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use quintlet_hostile::cases::Cases;
use serde_json::Value;

use super::Target;
use crate::bytes::TargetInputs;

/// See [`Target`].
pub const TARGET: Target = Target { name: "manifest", inputs, check, planted };

/// Tests of every field cover longer values.
const SHORT: usize = 4_096;

const GOOD: &str =
    "apiVersion: v1\nkind: Pod\nmetadata: {name: good}\nspec: {containers: [{name: main, image: app}]}\n";

fn inputs() -> TargetInputs {
    let cases: Vec<String> = {
        let all = Cases::of_pod();
        let is_small = |extreme: &str| !extreme.contains("000") && !extreme.ends_with("1-mib");
        let small = all.all().iter().filter(|case| is_small(&case.extreme));
        small.map(|case| all.pod(case, "hostile").to_string()).filter(|pod| pod.len() < SHORT).collect()
    };
    // Most cases are rejected. Half of the pods are built from accepted cases, so that code after validation
    // is reached.
    let accepted: Vec<String> =
        cases.iter().filter(|case| !product(case.as_bytes()).pods.is_empty()).cloned().collect();
    let one = prop_oneof![select(accepted), select(cases)];
    let pod = (one.clone(), one, any::<bool>()).prop_map(|(a, b, both)| {
        let parse = |text: &str| serde_json::from_str::<Value>(text).expect("a case is JSON");
        let (mut a, b) = (parse(&a), parse(&b));
        if both {
            merge(&mut a, &b);
        }
        a.to_string()
    });
    let document = prop_oneof![
        6 => pod,
        1 => Just(GOOD.to_owned()),
        1 => select(vec!["", "# remark", "null", "[]", "kind: Pod", "a: &a [*a]", "{}", "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n"])
            .prop_map(str::to_owned),
    ];
    let shape = vec(document, 1..4).prop_map(|documents| documents.join("\n---\n").into_bytes()).boxed();
    TargetInputs {
        shape,
        words: &[
            "\n---\n", "---", "...", "&a", "*a", "!!binary", "|\n", "\t", "{", "}", "[", "]", ": ", "null",
            "~", "0440", "1e999", "-0", "\"", "<<: ",
        ],
    }
}

/// Copies fields that only `source` has into `target`.
fn merge(target: &mut Value, source: &Value) {
    match (target, source) {
        (Value::Object(target), Value::Object(source)) => {
            for (name, value) in source {
                merge(target.entry(name.clone()).or_insert(Value::Null), value);
            }
        }
        (Value::Array(target), Value::Array(source)) => {
            for (target, source) in target.iter_mut().zip(source) {
                merge(target, source);
            }
        }
        (target @ Value::Null, source) => *target = source.clone(),
        _ => {}
    }
}

type Decode = fn(&[u8]) -> Snapshot;

fn product(bytes: &[u8]) -> Snapshot {
    let mut out = Snapshot::default();
    decode::manifest(
        bytes,
        ManifestOrigin { kind: SourceKind::File, place: "/m/a.yaml", node: "node" },
        &mut out,
    );
    out
}

fn check(input: &[u8]) -> Result<(), String> {
    against(product, input)
}

fn planted(input: &[u8]) -> Result<(), String> {
    // A planted bug: a panic, as from a multiplication that overflows.
    fn panics(bytes: &[u8]) -> Snapshot {
        let out = product(bytes);
        for spec in out.pods.iter().filter_map(|pod| pod.spec.as_ref()) {
            let probes = spec.containers.iter().filter_map(|c| c.liveness_probe.as_ref());
            let graces = probes.map(|p| p.termination_grace_period_seconds);
            for seconds in graces.chain([spec.termination_grace_period_seconds]).flatten() {
                assert!(seconds.checked_mul(3).is_some(), "attempt to multiply with overflow");
            }
        }
        out
    }
    against(panics, input)
}

fn against(decode: Decode, input: &[u8]) -> Result<(), String> {
    let out = decode(input);
    let again = decode(input);
    if (&out.pods, &out.problems) != (&again.pods, &again.problems) {
        return Err("the same manifest is not decoded to the same twice".to_owned());
    }
    if out.pods.is_empty() && out.problems.is_empty() && out.secrets.is_empty() && out.config_maps.is_empty()
    {
        return Err("neither an object nor a problem".to_owned());
    }
    for pod in &out.pods {
        let errors = validate::static_pod(pod);
        if !errors.is_empty() {
            return Err(format!("an accepted pod is not valid: {errors:?}"));
        }
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        if !name.ends_with("-node") {
            return Err(format!("the name {name:?} has not the node in it"));
        }
        let json = serde_json::to_string(&**pod).map_err(|e| e.to_string())?;
        let back: Pod = serde_json::from_str(&json).map_err(|e| format!("{e} in {json}"))?;
        if back != **pod {
            return Err("an accepted pod differs from its encoding".to_owned());
        }
    }
    // A second JSON parser must agree that the input is a pod.
    if let Ok(value @ Value::Object(_)) = serde_json::from_slice::<Value>(input)
        && let Err(e) = serde_json::from_value::<Pod>(value)
        && !out.pods.is_empty()
    {
        return Err(format!("a pod is accepted that is none: {e}"));
    }
    // A document does not affect other documents.
    let is_text = !out.problems.iter().any(|p| p.message.starts_with("not "));
    let with_good = [input, b"\n---\n", GOOD.as_bytes()].concat();
    let more = decode(&with_good);
    let unreadable = more.problems.iter().any(|p| p.message.starts_with("not "));
    if is_text && !unreadable && !more.pods.iter().any(|p| p.metadata.name.as_deref() == Some("good-node")) {
        return Err(format!("a good document after it is lost: {:?}", more.problems));
    }
    Ok(())
}
