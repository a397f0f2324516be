//! The handle, with its state files.

use pod_sync_topology::{Hints, RequestScope};

use super::*;
use crate::tests::{settings, single, write_machine};

fn no_devices(_: RequestScope<'_>) -> Vec<Hints> {
    Vec::new()
}

fn open(dir: &std::path::Path) -> Placement {
    open_with(dir, "none")
}

fn open_with(dir: &std::path::Path, topology: &str) -> Placement {
    let (settings, sys) = (settings(topology, "container"), dir.join("sys"));
    let context = PlacementContext { settings, root_dir: dir.to_owned(), sys, clock: Clock::system() };
    Placement::open(context).unwrap()
}

fn running(pod: &str, id: &str) -> RunningContainer {
    RunningContainer { pod: pod.to_owned(), container: "main".to_owned(), id: id.to_owned(), applied: None }
}

// Returns the updates of two running containers, and applies them.
fn updates(placement: &Placement) -> Vec<String> {
    let updates = placement.updates(&mut [running("p", "1"), running("q", "2")]);
    let text = |update: CpuUpdate| {
        let text = format!("{} {}", update.id, update.cpus);
        placement.applied(update);
        text
    };
    updates.into_iter().map(text).collect()
}

#[tokio::test]
async fn running_containers_follow_the_shared_cpus_and_a_restart_changes_nothing() {
    let temp = tempfile::tempdir().unwrap();
    write_machine(&temp.path().join("sys"), 1);
    let placement = open(temp.path());
    let (uid, other) = (PodUid::parse("p").unwrap(), PodUid::parse("q").unwrap());
    let shared = placement.container(&other, "main");
    assert_eq!((shared.cpus.as_str(), shared.has_exclusive_cpus), ("0-3", false));
    placement.created(&other, "main", "2", &shared.cpus);
    let pod = single("p", "2", "1Gi");
    placement.admit(&pod, &no_devices).await.unwrap();
    let own = placement.container(&uid, "main");
    let seen = (own.cpus.as_str(), own.memory_nodes.as_str(), own.has_exclusive_cpus);
    assert_eq!(seen, ("1-2", "0", true));
    placement.created(&uid, "main", "1", &own.cpus);
    placement.changed().await;
    assert_eq!(updates(&placement), ["2 0,3"]);
    assert_eq!(updates(&placement), [""; 0]);

    // Another process, which does not know what the runtime was given.
    let placement = open(temp.path());
    assert!(placement.has_exclusive_cpus(&uid) && !placement.has_exclusive_cpus(&other));
    placement.keep(&pod, &no_devices).await;
    assert_eq!(placement.container(&uid, "main"), own);
    assert_eq!(updates(&placement), ["1 1-2", "2 0,3"]);
    placement.release(&uid).await;
    placement.changed().await;
    assert_eq!(updates(&placement), ["1 0-3", "2 0-3"]);

    // A pod that no longer exists is released by the housekeeping.
    placement.admit(&pod, &no_devices).await.unwrap();
    assert!(!placement.retain(|pod| pod == "p") && placement.retain(|_| false));
    placement.write_state().await;
    assert!(!open(temp.path()).has_exclusive_cpus(&uid));
}

/// Returns the shared CPUs in thousandths, the exclusive CPUs, and those of each NUMA node, as metrics.
fn gauges() -> [i64; 4] {
    let text = quintlet_telemetry::metrics::text();
    let value = |name: &str| {
        let prefix = format!("kubelet_cpu_manager_{name} ");
        text.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap().parse().unwrap()
    };
    [
        value("shared_pool_size_millicores"),
        value("exclusive_cpu_allocation_count"),
        value(r#"allocation_per_numa{numa_node="0"}"#),
        value(r#"allocation_per_numa{numa_node="1"}"#),
    ]
}

#[tokio::test]
async fn the_metrics_of_cpus_follow_pods_and_are_the_same_after_a_restart() {
    let temp = tempfile::tempdir().unwrap();
    write_machine(&temp.path().join("sys"), 2);
    let placement = open(temp.path());
    // One of the eight CPUs is reserved.
    assert_eq!(gauges(), [7000, 0, 0, 0]);
    placement.admit(&single("p", "2", "1Gi"), &no_devices).await.unwrap();
    assert_eq!(gauges(), [5000, 2, 2, 0]);
    let rejected = placement.admit(&single("r", "6", "1Gi"), &no_devices).await;
    assert!(rejected.is_err());
    placement.admit(&single("q", "3", "1Gi"), &no_devices).await.unwrap();
    assert_eq!(placement.container(&PodUid::parse("q").unwrap(), "main").cpus, "3-5");
    assert_eq!(gauges(), [2000, 5, 3, 2]);
    let placement = open(temp.path());
    assert_eq!(gauges(), [2000, 5, 3, 2]);
    placement.release(&PodUid::parse("p").unwrap()).await;
    assert_eq!(gauges(), [4000, 3, 1, 2]);
    placement.release(&PodUid::parse("q").unwrap()).await;
    assert_eq!(gauges(), [7000, 0, 0, 0]);
}

/// Returns the requests and errors of the CPU manager, of the memory manager and of the topology manager, and
/// the number of measured durations, as metrics.
fn counters() -> [u64; 7] {
    let text = quintlet_telemetry::metrics::text();
    let names = [
        "cpu_manager_pinning_requests_total",
        "cpu_manager_pinning_errors_total",
        "memory_manager_pinning_requests_total",
        "memory_manager_pinning_errors_total",
        "topology_manager_admission_requests_total",
        "topology_manager_admission_errors_total",
        "topology_manager_admission_duration_ms_count",
    ];
    names.map(|name| {
        let prefix = format!("kubelet_{name} ");
        text.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap().parse().unwrap()
    })
}

#[tokio::test]
async fn requests_and_errors_of_each_manager_are_counted_under_the_names_of_the_kubelet() {
    let temp = tempfile::tempdir().unwrap();
    write_machine(&temp.path().join("sys"), 1);
    let placement = open(temp.path());
    assert_eq!(counters(), [0; 7]);
    placement.admit(&single("p", "2", "1Gi"), &no_devices).await.unwrap();
    assert_eq!(counters(), [1, 0, 1, 0, 1, 0, 1]);
    // A pod whose CPUs fail requests no memory.
    let rejected = placement.admit(&single("q", "2", "1Gi"), &no_devices).await;
    assert!(matches!(rejected, Err(AdmissionFailure::Rejected(PlacementError::Cpus(_)))), "{rejected:?}");
    assert_eq!(counters(), [2, 1, 1, 0, 2, 1, 2]);
    let rejected = placement.admit(&single("r", "1", "3Gi"), &no_devices).await;
    assert!(matches!(rejected, Err(AdmissionFailure::Rejected(PlacementError::Memory(_)))), "{rejected:?}");
    assert_eq!(counters(), [3, 1, 2, 1, 3, 2, 3]);

    // Nothing is requested of the other managers once the resources cannot be aligned.
    let temp = tempfile::tempdir().unwrap();
    write_machine(&temp.path().join("sys"), 2);
    let placement = open_with(temp.path(), "single-numa-node");
    let wide = single("w", "5", "1Gi");
    let rejected = placement.admit(&wide, &no_devices).await;
    assert!(matches!(rejected, Err(AdmissionFailure::Rejected(PlacementError::Topology(_)))), "{rejected:?}");
    assert_eq!(counters(), [3, 1, 2, 1, 4, 3, 4]);
    // An alignment for the devices of the pod fails before its admission, which is then not measured.
    placement.nodes_for_devices(&wide, "main", &no_devices).unwrap_err();
    assert_eq!(counters(), [3, 1, 2, 1, 5, 4, 4]);
    let text = quintlet_telemetry::metrics::text();
    let durations = "kubelet_topology_manager_admission_duration_ms_bucket{le=\"+Inf\"} 4";
    assert!(text.lines().any(|line| line == durations), "{text}");
}

#[tokio::test]
async fn a_running_pod_is_not_rejected_if_its_cpus_are_lost() {
    let temp = tempfile::tempdir().unwrap();
    write_machine(&temp.path().join("sys"), 1);
    let placement = open(temp.path());
    placement.keep(&single("p", "9", "1Gi"), &no_devices).await;
    assert!(!placement.has_exclusive_cpus(&PodUid::parse("p").unwrap()));
    placement.keep(&single("q", "2", "1Gi"), &no_devices).await;
    assert!(placement.has_exclusive_cpus(&PodUid::parse("q").unwrap()));
    let rejected = placement.admit(&single("r", "2", "1Gi"), &no_devices).await;
    assert!(matches!(rejected, Err(AdmissionFailure::Rejected(PlacementError::Cpus(_)))));
}
