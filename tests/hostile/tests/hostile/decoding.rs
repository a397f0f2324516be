//! Decodes and validates the cases of the gate as manifests and as objects of the API server.
//! `QUINTLET_SOAK=1` has all cases.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use pod_sync_layout::SourceKind;
use pod_sync_sources::Snapshot;
use pod_sync_sources::decode::{self, ManifestOrigin};
use quintlet_hostile::cases::{Case, Cases};
use quintlet_hostile::outcomes::{Expected, Outcomes};

/// Limit per case. It bounds failures only: the slowest case takes a tenth of it in a debug build.
const LIMIT: Duration = Duration::from_secs(20);

fn accepted_or_why(bytes: &[u8], kind: SourceKind) -> String {
    let mut out = Snapshot::default();
    decode::manifest(bytes, ManifestOrigin { kind, place: "/m/hostile.yaml", node: "node" }, &mut out);
    let problems: Vec<String> =
        out.problems.iter().map(|p| format!("{}: {}", p.field, shortened(&p.message))).collect();
    match (out.pods.len(), problems.is_empty()) {
        (1, true) => "accepted".to_owned(),
        (0, false) => {
            let more = problems.len() - 1;
            let more = if more > 0 { format!(" (and {more} more)") } else { String::new() };
            format!("{}{more}", problems[0])
        }
        other => panic!("{other:?}: a pod is either accepted or has a problem"),
    }
}

fn shortened(message: &str) -> String {
    let line: String = message.chars().take(120).map(|c| if c.is_control() { '?' } else { c }).collect();
    if line.len() < message.len() { format!("{line}...") } else { line }
}

/// Calls `each` on the cases of the gate, with one thread per processor. Asserts that each has the outcome of
/// a file.
fn assert_outcomes(file: &str, each: impl Fn(&Cases, &Case) -> String + Sync) {
    let cases = Cases::of_pod();
    let chosen = cases.of_gate();
    let left = Mutex::new(chosen.iter());
    let outcomes = Mutex::new(Outcomes::default());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let Some(case) = left.lock().unwrap().next() else { return };
                    let began = Instant::now();
                    let outcome = each(&cases, case);
                    let took = began.elapsed();
                    assert!(took < LIMIT, "{} {} takes {took:?}", case.path, case.extreme);
                    outcomes.lock().unwrap().note(&case.path, &case.extreme, outcome);
                }
            });
        }
    });
    Expected::read(file).assert_has(&outcomes.into_inner().unwrap());
}

#[test]
fn each_case_has_an_expected_outcome() {
    let cases = Cases::of_pod();
    for file in ["manifests.txt", "api.txt"] {
        let names = cases.all().iter().map(|case| (case.path.as_str(), case.extreme.as_str()));
        Expected::read(file).assert_names(names);
    }
}

#[test]
fn a_manifest_with_an_extreme_value_is_accepted_or_its_field_is_named() {
    assert_outcomes("manifests.txt", |cases, case| {
        accepted_or_why(cases.pod(case, "hostile").to_string().as_bytes(), SourceKind::File)
    });
}

#[test]
fn a_pod_of_the_api_server_with_an_extreme_value_is_decoded_or_refused_as_a_whole() {
    assert_outcomes("api.txt", |cases, case| {
        let bytes = cases.pod(case, "hostile").to_string();
        match serde_json::from_str::<Pod>(&bytes) {
            Ok(mut pod) => {
                pod_sync_sources::defaults::set_defaults(&mut pod);
                let again: Pod = serde_json::from_value(serde_json::to_value(&pod).unwrap()).unwrap();
                assert_eq!(again, pod, "what is decoded is encoded as it was");
                "decoded".to_owned()
            }
            Err(e) => shortened(&e.to_string()),
        }
    });
}

#[test]
fn every_manifest_of_the_repository_that_a_kubelet_accepts_is_accepted() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut accepted = 0;
    for file in
        ["examples/crasher.yaml", "examples/once.yaml", "examples/web.yaml", "tests/manifests/bad/good.yaml"]
    {
        let bytes = std::fs::read(root.join(file)).unwrap();
        let mut out = Snapshot::default();
        let origin = ManifestOrigin { kind: SourceKind::File, place: file, node: "node" };
        decode::manifest(&bytes, origin, &mut out);
        assert!(out.problems.is_empty(), "{file}: {:?}", out.problems);
        accepted += out.pods.len();
    }
    assert!(accepted >= 4, "{accepted} pods");
}
