//! The benchmark, with a few pods: it ends, leaves nothing, and its report has every figure of
//! docs/benchmarks.md.

use std::process::{Command, Stdio};

use serde_json::Value;

const PODS: &str = "3";

/// System calls of all services in a pod's life, without those that depend on the scheduler, measured with
/// this test. A change that lowers them lowers this number.
const COMMITTED_SYSTEM_CALLS: f64 = 1_350.0;

#[test]
fn a_short_run_reports_every_figure() {
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(["--pods", PODS, "--rounds", "1", "--in-flight", "4", "--exits", "2", "--idle-seconds", "2"])
        .args(["--device-starts", "2", "--device-pods", "3"])
        .arg("--system-calls")
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    for figure in [
        "/create_to_half_ready/seconds/quintlet",
        "/create_to_half_ready/seconds/raw 4 in flight",
        "/create_to_ready/seconds/quintlet",
        "/create_to_ready/seconds/raw 4 in flight",
        "/create_to_ready/ratios/raw",
        "/delete_to_gone/ratios/raw",
        "/one_processor_each/create_to_ready/ratios/raw",
        "/one_processor_each/delete_to_gone/ratios/raw",
        "/per_pod_start/quintlet/cpu_ms all",
        "/per_pod_start/raw 4 in flight/cpu_ms whole machine",
        "/per_pod_life/quintlet/cpu_ms all",
        "/per_pod_life/quintlet/write_calls all",
        "/per_pod_life/quintlet/written_bytes all",
        "/full_node/quintlet/idle/all/pss_kib",
        "/full_node/quintlet/idle/all/wake_ups_per_second",
        "/full_node/quintlet/two_http_probes_each/all/wake_ups_per_second",
        "/full_node/quintlet/one_more_create_to_ready_ms",
        "/full_node/quintlet/one_more_raw_ms",
        "/full_node/quintlet/exit_to_status_ms/p50",
        "/full_node/quintlet/exit_to_status_ms/p99",
        "/devices/quintlet/bound_to_ready_ms/without/p50",
        "/devices/quintlet/bound_to_ready_ms/device/p99",
        "/devices/quintlet/bound_to_ready_ms/claim/p99",
        "/devices/quintlet/burst/create_to_ready_seconds",
        "/devices/quintlet/burst/delete_to_gone_seconds",
        "/five_volumes/with/create_to_ready_seconds",
    ] {
        let value = report.pointer(figure).and_then(Value::as_f64);
        assert!(value.is_some_and(|value| value > 0.0), "{figure}: {value:?} in {report:#}");
    }
    // A status that the next one replaces within a burst may be skipped, so there are no exact counts of
    // PATCHes here.
    let life = &report["per_pod_life"]["quintlet"];
    for (request, count) in [("create serviceaccounts/token", 1.0), ("delete pods", 1.0), ("get pods", 0.0)] {
        let counted = life[format!("api {request}")].as_f64().unwrap_or_default();
        assert!((counted - count).abs() < f64::EPSILON, "{request}: {counted} a pod, not {count}");
    }
    let system_calls = &report["system_calls_per_pod_life"];
    assert!(
        system_calls["all"].as_f64().is_some_and(|all| all > 0.0 && all <= COMMITTED_SYSTEM_CALLS * 1.2),
        "more than 1.2 times {COMMITTED_SYSTEM_CALLS}: {system_calls:#}"
    );
}
