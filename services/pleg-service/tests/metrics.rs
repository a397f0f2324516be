//! The kubelet's metrics of PLEG, under its names, types, labels and buckets
//! (pkg/kubelet/metrics/metrics.go). A binary of its own, whose counters no other test changes.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

mod common;

use std::time::Duration;

use pleg_service::traits::{HintEvent, HintKind};
use quintlet_kit::clock::Clock;
use quintlet_testkit::fake_runtime::ContainerSeed;

use common::{Bench, options};

fn value(text: &str, series: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
}

#[tokio::test(start_paused = true)]
async fn the_kubelets_metrics_are_all_there_and_count() {
    let (mut ids, mut sandbox) = (Vec::new(), String::new());
    let bench = Bench::new(options(Duration::ZERO), true, |r| {
        sandbox = r.add_sandbox("u1", "web", "default", 0);
        ids.push(r.add_container(&sandbox, &ContainerSeed::running("main")));
        ids.push(r.add_container(&sandbox, &ContainerSeed::created("later")));
        let done = r.add_sandbox("u2", "done", "default", 0);
        ids.push(r.add_container(&done, &ContainerSeed::running("main")));
        r.exit(&ids[2], 0);
        r.exit(&done, 0);
    });
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    let at = i64::try_from(Clock::system().wall().as_nanosecond()).unwrap() - 30_000_000;
    let (kind, id) = (HintKind::Exited, ids[0].clone());
    bench.hints.event(HintEvent::Hint { kind, id, pod: None, trace: None, at_unix_ns: at });
    // No hint reports this one.
    bench.runtime.add_container(&sandbox, &ContainerSeed::created("later still"));
    bench.hints.cut();
    // An interruption and the return of hints cause two more lists.
    tokio::time::sleep(Duration::from_secs(3)).await;
    bench.observe("u1", false).await.unwrap();
    let text = quintlet_telemetry::metrics::text();
    for cause in ["observe", "relist", "event"] {
        let series = format!("quintlet_pleg_inspections_total{{result=\"ok\",cause=\"{cause}\"}}");
        assert!(value(&text, &series) > Some(0.0), "{series}: {text}");
    }
    for name in [
        "kubelet_pleg_relist_duration_seconds",
        "kubelet_pleg_relist_interval_seconds",
        "kubelet_pleg_pod_relist_duration_seconds",
        "kubelet_evented_pleg_connection_latency_seconds",
    ] {
        assert!(text.contains(&format!("# TYPE {name} histogram\n")), "{name}: {text}");
        let buckets: Vec<&str> = text
            .lines()
            .filter_map(|l| l.strip_prefix(&format!("{name}_bucket{{le=\"")))
            .filter_map(|l| l.split('"').next())
            .collect();
        let expected =
            ["0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1.0", "2.5", "5.0", "10.0", "+Inf"];
        assert_eq!(buckets, expected, "{name}");
        assert!(value(&text, &format!("{name}_count")) > Some(0.0), "{name}: {text}");
    }
    let latency = value(&text, "kubelet_evented_pleg_connection_latency_seconds_sum").unwrap();
    assert!(latency >= 0.03, "{latency}");
    // Events that a slow reader misses are counted in the test of slow readers.
    assert_eq!(value(&text, "kubelet_pleg_discard_events"), Some(0.0), "{text}");
    for name in [
        "kubelet_pleg_last_seen_seconds",
        "kubelet_evented_pleg_connection_error_count",
        "kubelet_evented_pleg_connection_success_count",
    ] {
        assert!(value(&text, name) > Some(0.0), "{name}: {text}");
    }
    let counts = |text: &str| {
        let states = ["created", "running", "exited", "unknown"];
        let count = |series: &str| value(text, series).unwrap();
        let containers =
            states.map(|s| count(&format!("kubelet_running_containers{{container_state=\"{s}\"}}")));
        (count("kubelet_running_pods"), containers)
    };
    assert_eq!(counts(&text), (1.0, [2.0, 1.0, 1.0, 0.0]), "{text}");
    // A change counts once it is observed, not at the next list.
    bench.runtime.exit(&ids[0], 0);
    bench.runtime.exit(&sandbox, 0);
    bench.observe("u1", false).await.unwrap();
    let text = quintlet_telemetry::metrics::text();
    assert_eq!(counts(&text), (0.0, [2.0, 0.0, 2.0, 0.0]), "{text}");
}
