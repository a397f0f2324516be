//! Pods with resources of the pod level.

use pod_sync_machine::NumaNode;
use serde_json::{Value, json};

use super::tests::{held, no_devices};
use super::*;
use crate::args::PlacementSettings;
use crate::files::PlacementContent;
use crate::start::{StartedPlacement, start};
use crate::tests::{container, pod, settings, single, write_machine};

const AS_A_WHOLE: &str = "TopologyAffinityError: Pod Scope pod with pod-level resources failed admission under pod-scope topology manager";
const BY_CONTAINER: &str = "TopologyAffinityError: Pod Scope pod with pod-level resources failed admission with a container-level topology manager";

fn node(topology: &str, scope: &str, change: impl FnOnce(&mut PlacementSettings)) -> NodePlacement {
    let temp = tempfile::tempdir().unwrap();
    write_machine(&temp.path().join("sys"), 2);
    let mut settings = PlacementSettings { has_pod_level: true, ..settings(topology, scope) };
    change(&mut settings);
    start(&settings, temp.path(), &temp.path().join("sys")).unwrap().node
}

fn whole(uid: &str, cpu: &str, memory: &str, init: Value, containers: Value) -> Pod {
    let mut pod = pod(uid, init, containers);
    let amounts = json!({"cpu": cpu, "memory": memory});
    let resources = serde_json::from_value(json!({"requests": amounts, "limits": amounts})).unwrap();
    pod.spec.as_mut().unwrap().resources = Some(resources);
    pod
}

fn plain(name: &str) -> Value {
    json!({"name": name, "image": "i"})
}

fn admit(node: &mut NodePlacement, pod: &Pod) -> (Result<(), String>, AdmissionCounts) {
    let mut counts = AdmissionCounts::default();
    let error = |error: PlacementError| format!("{}: {}", error.cause().reason(), error.message());
    let admitted = node.admit(&node.requests(pod), &no_devices, &mut counts).map_err(error);
    (admitted, counts)
}

#[test]
fn each_scope_divides_a_pod_or_its_containers() {
    // Node 0 has three free CPUs, node 1 four.
    let mixed = whole("p", "4", "2Gi", json!([]), json!([container("a", "2", "1Gi"), plain("b")]));
    let full =
        whole("p", "4", "2Gi", json!([]), json!([container("a", "3", "1Gi"), container("b", "1", "1Gi")]));
    let empty = json!([container("a", "4", "1Gi"), plain("b")]);
    let empty = whole("p", "4", "2Gi", json!([]), empty);
    let no_memory = whole("p", "4", "2Gi", json!([]), json!([container("a", "2", "2Gi"), plain("b")]));
    let half = whole("p", "2500m", "2Gi", json!([]), json!([container("a", "2", "1Gi"), plain("b")]));
    let wide = whole("p", "5", "2Gi", json!([]), json!([container("a", "2", "1Gi"), plain("b")]));
    let large = whole("p", "6", "2Gi", json!([]), json!([container("a", "5", "1Gi"), plain("b")]));
    let no_pool = "EmptyPodSharedPoolError: pod rejected, sum of exclusive container cpu requests equals pod budget, leaving no cpus for shared containers";
    let no_memory_pool = "EmptyPodSharedPoolError: pod rejected, sum of exclusive container memory requests equals pod budget, leaving no memory for shared containers";
    for (topology, scope, pod, expected) in [
        ("single-numa-node", "pod", &mixed, Ok(["4-5 on 1", "(6-7) on 1"])),
        ("restricted", "pod", &full, Ok(["4-6 on 1", "7 on 1"])),
        // A request for more CPUs than a NUMA node has takes a free node as a whole first.
        ("best-effort", "pod", &wide, Ok(["1,4 on 0-1", "(5-7) on 0-1"])),
        ("single-numa-node", "pod", &wide, Err(AS_A_WHOLE)),
        ("restricted", "pod", &empty, Err(AS_A_WHOLE)),
        ("best-effort", "pod", &empty, Err(no_pool)),
        ("restricted", "pod", &no_memory, Err(AS_A_WHOLE)),
        ("best-effort", "pod", &no_memory, Err(no_memory_pool)),
        ("restricted", "pod", &half, Ok(["shared on 0", "shared on 0"])),
        ("restricted", "container", &mixed, Ok(["1-2 on 0", "shared on any"])),
        ("none", "pod", &mixed, Ok(["1-2 on 0", "shared on any"])),
        ("restricted", "container", &empty, Ok(["4-7 on 1", "shared on any"])),
        ("single-numa-node", "container", &large, Err(BY_CONTAINER)),
    ] {
        let mut node = node(topology, scope, |_| {});
        let before = format!("{node:?}");
        let (admitted, _) = admit(&mut node, pod);
        let admitted = admitted.map(|()| ["a", "b"].map(|container| held(&node, "p", container)));
        let name = format!("{topology} {scope} {:?}", pod.spec.as_ref().unwrap().resources);
        match expected {
            Ok(expected) => {
                assert_eq!(admitted, Ok(expected.map(str::to_owned)), "{name}");
                assert_eq!(node.has_exclusive_cpus("p"), !expected[0].starts_with("shared"), "{name}");
                assert!(node.release("p"), "{name}");
            }
            Err(expected) => assert_eq!(admitted, Err(expected.to_owned()), "{name}"),
        }
        assert_eq!(format!("{node:?}"), before, "{name}");
    }
}

#[test]
fn without_the_gate_a_pod_with_resources_of_its_own_has_nothing_alone() {
    for (topology, scope) in [("restricted", "pod"), ("single-numa-node", "container")] {
        let mut node = node(topology, scope, |settings| settings.has_pod_level = false);
        let pod = whole("p", "4", "2Gi", json!([]), json!([container("a", "2", "1Gi"), plain("b")]));
        assert_eq!(admit(&mut node, &pod).0, Ok(()));
        assert_eq!(held(&node, "p", "a"), "shared on any");
        // Its containers have devices on no common node.
        let none = |_: RequestScope<'_>| vec![Hints::OneOf(Vec::new())];
        let refused = node.admit(&node.requests(&pod), &none, &mut AdmissionCounts::default());
        assert_eq!(refused, Err(TopologyAffinityError::Resources.into()));
    }
}

#[test]
fn a_pod_is_divided_again_after_a_restart_of_the_machine() {
    let mut sidecar = container("s", "1", "256Mi");
    sidecar["restartPolicy"] = json!("Always");
    let init = json!([container("i", "3", "1Gi"), sidecar, plain("j")]);
    let pod = whole("p", "4", "2Gi", init, json!([container("a", "1", "1Gi"), plain("b")]));
    let mut node = node("restricted", "pod", |_| {});
    assert_eq!(admit(&mut node, &pod).0, Ok(()));
    let all = ["i", "s", "j", "a", "b"];
    let expected = ["4-6 on 1", "4 on 1", "(5-7) on 1", "5 on 1", "(6-7) on 1"];
    assert_eq!(all.map(|name| held(&node, "p", name)), expected);
    let requests = node.requests(&pod);
    assert!(node.start(&requests, "a"), "the init containers have ended");
    assert_eq!(held(&node, "p", "i"), "4-6 on any");
    assert_eq!(admit(&mut node, &pod).0, Ok(()));
    assert_eq!(all.map(|name| held(&node, "p", name)), expected);
}

#[test]
fn a_pod_as_a_whole_is_divided_by_container_after_a_restart_with_another_scope() {
    let init = json!([container("i", "1", "1Gi")]);
    let pod = whole("p", "4", "2Gi", init, json!([container("a", "2", "1Gi"), plain("b")]));
    for (topology, scope) in [("restricted", "container"), ("none", "pod")] {
        let temp = tempfile::tempdir().unwrap();
        let sys = temp.path().join("sys");
        write_machine(&sys, 2);
        let open = |topology, scope| {
            let settings = PlacementSettings { has_pod_level: true, ..settings(topology, scope) };
            start(&settings, temp.path(), &sys).unwrap()
        };
        let write = |started: &mut StartedPlacement| {
            started.files.write(PlacementContent::of(&started.node).unwrap()).unwrap();
        };
        let mut first = open("restricted", "pod");
        assert_eq!(admit(&mut first.node, &pod).0, Ok(()));
        let requests = first.node.requests(&pod);
        assert!(first.node.start(&requests, "a"), "the init container has ended");
        write(&mut first);

        // The devices of the pod are aligned as if it had nothing.
        let mut second = open(topology, scope);
        let requests = second.node.requests(&pod);
        let nodes =
            second.node.clone().nodes_for(&requests, "a", &no_devices, &mut AdmissionCounts::default());
        let expected = (scope == "container").then(|| NumaNodes::from(NumaNode::try_from(0).unwrap()));
        assert_eq!(nodes, Ok(expected), "{topology} {scope}");
        assert_eq!(admit(&mut second.node, &pod).0, Ok(()));
        let all = ["i", "a", "b"];
        let expected = ["1 on 0", "1-2 on 0", "shared on any"];
        assert_eq!(all.map(|name| held(&second.node, "p", name)), expected, "{topology} {scope}");
        assert!(second.node.has_exclusive_cpus("p"));
        write(&mut second);
        let mut third = open(topology, scope);
        assert_eq!(all.map(|name| held(&third.node, "p", name)), expected, "{topology} {scope}");
        assert!(third.node.release("p"));
        write(&mut third);
        let nothing = PlacementContent::of(&third.node).unwrap();
        assert_eq!(nothing, PlacementContent::of(&node(topology, scope, |_| {})).unwrap());
    }
}

fn shown(tally: &crate::counts::Tally) -> String {
    let one = |((first, second), count): (&crate::counts::Labels, &u64)| format!("{first} {second}={count}");
    tally.0.iter().map(one).collect::<Vec<_>>().join(", ")
}

#[test]
fn allocations_and_alignments_are_counted_as_in_the_kubelet() {
    // As since kubernetes/kubernetes#141261.
    let pair = pod("q", json!([]), json!([container("a", "2", "1Gi"), container("b", "1", "1Gi")]));
    let mixed = whole("p", "4", "2Gi", json!([plain("i")]), json!([container("a", "2", "1Gi"), plain("b")]));
    let wide = single("w", "5", "1Gi");
    let eight = single("e", "8", "1Gi");
    let cores = |settings: &mut PlacementSettings| {
        settings.cpu_options = [("full-pcpus-only".to_owned(), "true".to_owned())].into();
    };
    let none = |_: &mut PlacementSettings| {};
    type Change<'a> = &'a dyn Fn(&mut PlacementSettings);
    // Topology policy and scope, CPU options, pod, CPUs and memory that are requested, and: aligned, not
    // aligned, allocations, errors, assignments.
    type Row<'a> = (&'a str, &'a str, Change<'a>, &'a Pod, [u64; 2], [&'a str; 5]);
    let rows: [Row<'_>; 7] = [
        (
            "single-numa-node",
            "container",
            &none,
            &pair,
            [2, 2],
            [
                "container numa_node=2, container uncore_cache=2",
                "",
                "cpu node=2, memory node=2",
                "",
                "cpu node_exclusive=2, memory node_exclusive=2",
            ],
        ),
        (
            "single-numa-node",
            "pod",
            &none,
            &pair,
            [2, 2],
            [
                "container uncore_cache=2, pod numa_node=1",
                "",
                "cpu node=2, memory node=2",
                "",
                "cpu node_exclusive=2, memory node_exclusive=2",
            ],
        ),
        (
            "restricted",
            "container",
            &cores,
            &pair,
            [2, 2],
            [
                "container physical_cpu=2, container uncore_cache=2",
                "",
                "cpu node=2, memory node=2",
                "",
                "cpu node_exclusive=2, memory node_exclusive=2",
            ],
        ),
        ("single-numa-node", "container", &none, &wide, [0, 0], ["", "container numa_node=1", "", "", ""]),
        ("single-numa-node", "pod", &none, &wide, [0, 0], ["", "pod numa_node=1", "", "", ""]),
        ("none", "container", &cores, &eight, [1, 0], ["", "container physical_cpu=1", "", "cpu node=1", ""]),
        (
            "single-numa-node",
            "pod",
            &none,
            &mixed,
            [1, 3],
            [
                "container uncore_cache=1, pod numa_node=1",
                "",
                "cpu pod=3, memory pod=3",
                "",
                "cpu pod_exclusive=1, cpu pod_shared=2, memory pod_exclusive=1, memory pod_shared=2",
            ],
        ),
    ];
    for (topology, scope, change, pod, requested, expected) in rows {
        let mut node = node(topology, scope, change);
        let (_, counts) = admit(&mut node, pod);
        let name = format!("{topology} {scope} {:?}", pod.metadata.uid);
        assert_eq!([counts.cpus, counts.memory], requested, "{name}");
        let AdmissionCounts { aligned, unaligned, allocations, errors, assignments, .. } = &counts;
        assert_eq!([aligned, unaligned, allocations, errors, assignments].map(shown), expected, "{name}");
        if expected[4].is_empty() {
            continue;
        }
        // Again, as after a restart: nothing new is allocated.
        let (_, again) = admit(&mut node, pod);
        assert_eq!([shown(&again.allocations), shown(&again.assignments)], ["", ""], "{name}");
    }
    let mut node = node("best-effort", "pod", none);
    let empty = whole("p", "4", "2Gi", json!([]), json!([container("a", "4", "1Gi"), plain("b")]));
    assert_eq!(shown(&admit(&mut node, &empty).1.errors), "cpu pod=1");
}
