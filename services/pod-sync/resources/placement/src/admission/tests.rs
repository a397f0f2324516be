//! Tables and histories of admissions.

use pod_sync_machine::NumaNode;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::start::start;
use crate::tests::{container, pod, settings, single, write_machine};

fn node(topology: &str, scope: &str, nodes: u32) -> NodePlacement {
    let temp = tempfile::tempdir().unwrap();
    write_machine(&temp.path().join("sys"), nodes);
    start(&settings(topology, scope), temp.path(), &temp.path().join("sys")).unwrap().node
}

pub(super) fn no_devices(_: RequestScope<'_>) -> Vec<Hints> {
    Vec::new()
}

fn admit(node: &mut NodePlacement, pod: &Pod) -> Result<(), String> {
    let error = |error: PlacementError| format!("{}: {}", error.cause().reason(), error.message());
    node.admit(&node.requests(pod), &no_devices, &mut AdmissionCounts::default()).map_err(error)
}

// Returns the CPUs and the NUMA nodes of a container.
pub(super) fn held(node: &NodePlacement, pod: &str, container: &str) -> String {
    let cpus = match node.container_cpus(pod, container) {
        Some(ContainerCpus::Exclusive(cpus)) => cpus.to_string(),
        Some(ContainerCpus::PodShared(cpus)) => format!("({cpus})"),
        Some(ContainerCpus::Shared(_)) => "shared".to_owned(),
        None => "none".to_owned(),
    };
    let nodes = node.container_nodes(pod, container);
    format!("{cpus} on {}", nodes.map_or_else(|| "any".to_owned(), |nodes| nodes.to_string()))
}

#[test]
fn each_policy_and_scope_admits_or_rejects_a_pod() {
    const LOCALITY: &str = "TopologyAffinityError: Resources cannot be allocated with Topology locality";
    // Node 0 has three free CPUs, node 1 four.
    let pair = pod("p", json!([]), json!([container("a", "3", "1Gi"), container("b", "2", "1Gi")]));
    let wide = single("p", "5", "1Gi");
    for (topology, scope, pod, expected) in [
        ("none", "container", &pair, Ok(["1-3 on 0", "4-5 on 0"])),
        ("best-effort", "container", &pair, Ok(["1-3 on 0", "4-5 on 1"])),
        ("restricted", "container", &pair, Ok(["1-3 on 0", "4-5 on 1"])),
        ("single-numa-node", "container", &pair, Ok(["1-3 on 0", "4-5 on 1"])),
        ("single-numa-node", "pod", &pair, Err(LOCALITY)),
        ("restricted", "pod", &pair, Err(LOCALITY)),
        ("best-effort", "pod", &pair, Ok(["1-3 on 0-1", "4-5 on 0-1"])),
        ("single-numa-node", "container", &wide, Err(LOCALITY)),
    ] {
        let mut node = node(topology, scope, 2);
        let before = format!("{node:?}");
        let admitted =
            admit(&mut node, pod).map(|()| ["a", "b"].map(|container| held(&node, "p", container)));
        match expected {
            Ok(expected) => {
                assert_eq!(admitted, Ok(expected.map(str::to_owned)), "{topology} {scope}");
            }
            Err(expected) => {
                assert_eq!(admitted, Err(expected.to_owned()), "{topology} {scope}");
                assert_eq!(format!("{node:?}"), before, "a rejected pod has nothing");
            }
        }
    }
}

#[test]
fn a_pod_without_room_is_rejected_with_the_kubelets_text_and_leaves_nothing() {
    let mut node = node("none", "container", 1);
    assert_eq!(admit(&mut node, &single("first", "2", "1Gi")), Ok(()));
    let before = format!("{node:?}");
    let text = "not enough cpus available to satisfy request: requested=2, available=1";
    let expected = format!("UnexpectedAdmissionError: Allocate failed due to {text}, which is unexpected");
    assert_eq!(admit(&mut node, &single("second", "2", "1Gi")), Err(expected));
    let partly = pod("third", json!([]), json!([container("a", "1", "1Gi"), container("b", "1", "1Gi")]));
    assert!(admit(&mut node, &partly).is_err());
    let memory = admit(&mut node, &single("fourth", "1", "3Gi")).unwrap_err();
    assert!(
        memory.starts_with("UnexpectedAdmissionError: Allocate failed due to [memorymanager]"),
        "{memory}"
    );
    assert_eq!(format!("{node:?}"), before);
    assert!(node.release("first") && !node.release("first"));
    assert_eq!(admit(&mut node, &single("second", "2", "1Gi")), Ok(()));
}

#[test]
fn init_containers_leave_what_they_have_and_sidecars_keep_it() {
    let mut sidecar = container("sidecar", "1", "1Gi");
    sidecar["restartPolicy"] = json!("Always");
    let pod =
        pod("p", json!([container("init", "2", "2Gi"), sidecar]), json!([container("main", "2", "2Gi")]));
    let mut node = node("none", "container", 1);
    assert_eq!(admit(&mut node, &pod), Ok(()));
    assert_eq!(held(&node, "p", "init"), "1-2 on 0");
    assert_eq!(held(&node, "p", "sidecar"), "1 on 0");
    assert_eq!(held(&node, "p", "main"), "2-3 on 0");
    assert!(node.has_exclusive_cpus("p") && !node.has_exclusive_cpus("q"));
    let requests = node.requests(&pod);
    assert!(!node.start(&requests, "init") && node.start(&requests, "main"));
    assert_eq!(held(&node, "p", "init"), "1-2 on any", "its memory is that of main now");
    // All containers start again after a restart of the machine, with the same CPUs.
    let before = node.cpus().unwrap().assignments().clone();
    assert_eq!(admit(&mut node, &pod), Ok(()));
    assert_eq!(*node.cpus().unwrap().assignments(), before);
    assert_eq!(
        ["init", "sidecar", "main"].map(|name| held(&node, "p", name)),
        ["1-2 on 0", "1 on 0", "2-3 on 0"]
    );
}

#[test]
fn devices_take_part_in_the_alignment() {
    let on = |numbers: &[u64]| -> NumaNodes {
        numbers.iter().map(|number| NumaNode::try_from(*number).unwrap()).collect()
    };
    let second = move |_: RequestScope<'_>| {
        let hint = |numbers: &[u64], is_preferred| Hint { nodes: Some(on(numbers)), is_preferred };
        vec![Hints::OneOf(vec![hint(&[1], true), hint(&[0, 1], false)])]
    };
    let pod = single("p", "2", "1Gi");
    let mut aligned = node("single-numa-node", "container", 2);
    let requests = aligned.requests(&pod);
    let mut counts = AdmissionCounts::default();
    assert_eq!(aligned.clone().nodes_for(&requests, "main", &second, &mut counts), Ok(Some(on(&[1]))));
    aligned.admit(&requests, &second, &mut AdmissionCounts::default()).unwrap();
    assert_eq!(held(&aligned, "p", "main"), "4-5 on 1");
    let none = |_: RequestScope<'_>| vec![Hints::OneOf(Vec::new())];
    let other = aligned.requests(&single("q", "1", "1Gi"));
    let refused = TopologyAffinityError::Resources;
    let mut counts = AdmissionCounts::default();
    assert_eq!(aligned.clone().nodes_for(&other, "main", &none, &mut counts), Err(refused.into()));
    assert_eq!(aligned.admit(&other, &none, &mut counts), Err(refused.into()));
    assert_eq!((counts.cpus, counts.memory), (0, 0), "nothing was attempted");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever comes and goes: no CPU has two holders, the reserved one has none, and nothing is lost.
    #[test]
    fn histories_of_pods_give_each_cpu_to_one_pod(
        policy in 0_usize..4,
        is_pod_scope: bool,
        steps in prop::collection::vec((0_u8..6, 0_u8..4, 0_u8..6), 1..40),
    ) {
        let policy = ["none", "best-effort", "restricted", "single-numa-node"][policy];
        let mut node = node(policy, if is_pod_scope { "pod" } else { "container" }, 2);
        let unused = format!("{:?} {:?}", node.cpus().unwrap().assignments(), node.memory().unwrap().tables());
        for (uid, init, cpus) in steps {
            let uid = format!("p{uid}");
            if cpus == 0 {
                node.release(&uid);
            } else {
                let init = if init == 0 { json!([]) } else { json!([container("init", &init.to_string(), "1Gi")]) };
                let pod = pod(&uid, init, json!([container("main", &cpus.to_string(), "1Gi")]));
                if node.has_exclusive_cpus(&uid) {
                    continue;
                }
                let _ = admit(&mut node, &pod);
            }
            let assignments = node.cpus().unwrap().assignments();
            let mut seen = assignments.shared.clone();
            prop_assert!(seen.contains(pod_sync_machine::CpuId::new(0)));
            for owner in (0..6).map(|owner| format!("p{owner}")) {
                let own = assignments.containers().filter(|(pod, ..)| *pod == owner);
                let own = own.fold(CpuSet::new(), |all, (.., cpus)| all.union(cpus));
                prop_assert!(own.is_disjoint(&seen), "{owner} {own} {seen}");
                seen = seen.union(&own);
            }
            prop_assert_eq!(seen.to_string(), "0-7");
        }
        for uid in 0..6 {
            node.release(&format!("p{uid}"));
        }
        let end = format!("{:?} {:?}", node.cpus().unwrap().assignments(), node.memory().unwrap().tables());
        prop_assert_eq!(end, unused);
    }
}
