use proptest::prelude::*;

use pod_sync_machine::{CpuId, NumaNode};
use pod_sync_topology::{Hint, PolicyName, RequestScope};

use super::*;
use crate::options::CpuOptions;
use crate::policy::ReservedCpus;
use crate::requests::CpuRequest;
use crate::test_machines::{DUAL_SOCKET, FOUR_NODES, SINGLE_SOCKET_SMT, Shape, machine};

pub(super) fn cpus(text: &str) -> CpuSet {
    text.parse().unwrap()
}

fn manager(shape: Shape, options: CpuOptions) -> CpuManager {
    let reserved = ReservedCpus::These(cpus("0"));
    let policy = StaticPolicy::new(machine(shape), options, reserved, PolicyName::None).unwrap();
    CpuManager::new(policy, CpuAssignments::default(), PodLevel::Pod).unwrap()
}

/// Parses requests such as `i:init=2 s:sidecar=1 main=3`.
pub(super) fn pod(uid: &str, text: &str) -> PodCpuRequests {
    let request = |word: &str| {
        let (name, count) = word.split_once('=').unwrap();
        let (container, kind) = match name.split_once(':') {
            Some((container, "init")) => (container, ContainerKind::Init),
            Some((container, _)) => (container, ContainerKind::Sidecar),
            None => (name, ContainerKind::Regular),
        };
        CpuRequest { container: container.to_owned(), kind, count: count.parse().unwrap() }
    };
    PodCpuRequests {
        pod: uid.to_owned(),
        containers: text.split_whitespace().map(request).collect(),
        budget: None,
    }
}

fn admit(manager: &mut CpuManager, pod: &PodCpuRequests) -> Result<(), AllocateError> {
    pod.containers.iter().try_for_each(|request| manager.allocate(pod, &request.container, None))
}

fn held(manager: &CpuManager, pod: &str, container: &str) -> String {
    manager.cpus(pod, container).cpus().to_string()
}

pub(super) fn shown(hints: &Hints) -> String {
    let Hints::OneOf(hints) = hints else { return "any".to_owned() };
    let hint = |hint: &Hint| format!("{}{}", hint.nodes.unwrap(), if hint.is_preferred { "!" } else { "" });
    hints.iter().map(hint).collect::<Vec<_>>().join(" ")
}

#[test]
fn a_container_gets_cpus_and_gives_them_back() {
    let mut manager = manager(SINGLE_SOCKET_SMT, CpuOptions::default());
    let pod = pod("p", "main=2 log=0");
    admit(&mut manager, &pod).unwrap();
    assert_eq!(manager.cpus("p", "main"), ContainerCpus::Exclusive(cpus("1,5")));
    assert_eq!(manager.cpus("p", "log"), ContainerCpus::Shared(cpus("0,2-4,6-7")));
    // Again: nothing changes.
    admit(&mut manager, &pod).unwrap();
    assert_eq!(held(&manager, "p", "main"), "1,5");
    manager.release("p", "main");
    assert_eq!(manager.assignments().shared, cpus("0-7"));
    assert_eq!(manager.assignments().containers().count(), 0);
    manager.release("p", "main");
}

#[test]
fn init_containers_leave_their_cpus_to_later_containers_of_their_pod() {
    let mut manager = manager(SINGLE_SOCKET_SMT, CpuOptions::default());
    admit(&mut manager, &pod("p", "i:init=4 s:sidecar=2 main=2")).unwrap();
    assert_eq!(held(&manager, "p", "i"), "1-2,5-6");
    assert_eq!(held(&manager, "p", "s"), "1,5");
    assert_eq!(held(&manager, "p", "main"), "2,6");
    // The CPUs of the sidecar were not left for the main container, and those of this pod are not left for
    // another one.
    admit(&mut manager, &pod("q", "main=2")).unwrap();
    assert_eq!(held(&manager, "q", "main"), "3,7");
    assert_eq!(manager.assignments().shared, cpus("0,4"));
    // CPUs that another container of the pod has are not free when the init container is gone.
    manager.release("p", "i");
    assert_eq!(manager.assignments().shared, cpus("0,4"));
    manager.release("p", "main");
    assert_eq!(manager.assignments().shared, cpus("0,2,4,6"));
}

#[test]
fn a_container_whose_request_becomes_whole_gets_no_cpus_of_its_pod_that_are_in_use() {
    let mut manager = manager(SINGLE_SOCKET_SMT, CpuOptions::default());
    admit(&mut manager, &pod("p", "i:init=2 main=0 s=2")).unwrap();
    assert_eq!([held(&manager, "p", "i"), held(&manager, "p", "s")], ["1,5", "1,5"]);
    admit(&mut manager, &pod("p", "i:init=2 main=2 s=2")).unwrap();
    assert_eq!(held(&manager, "p", "main"), "2,6");
}

#[test]
fn a_pod_that_does_not_fit_is_refused_and_holds_what_it_had() {
    let mut manager = manager(SINGLE_SOCKET_SMT, CpuOptions::default());
    admit(&mut manager, &pod("p", "main=5")).unwrap();
    let before = manager.assignments().clone();
    let error = manager.allocate(&pod("q", "main=3"), "main", None).unwrap_err();
    assert_eq!(error, AllocateError::NotEnough { requested: 3, available: 2 });
    assert_eq!(*manager.assignments(), before);
    // The pod that holds most CPUs is not active any more.
    manager.retain(|pod, container| (pod, container) != ("p", "main"));
    admit(&mut manager, &pod("q", "main=3")).unwrap();
}

#[test]
fn a_container_keeps_its_cpus_where_whole_cores_are_required() {
    let options = CpuOptions { full_cores: true, ..CpuOptions::default() };
    let mut first = manager(SINGLE_SOCKET_SMT, options);
    let pod = pod("p", "main=6");
    admit(&mut first, &pod).unwrap();
    // After a restart the container holds all free cores.
    let mut second =
        CpuManager::new(first.policy().clone(), first.assignments().clone(), PodLevel::Pod).unwrap();
    assert_eq!(admit(&mut second, &pod), Ok(()));
    assert_eq!(held(&second, "p", "main"), "1-3,5-7");
}

#[test]
fn hints_name_the_numa_nodes_with_enough_free_cpus() {
    let mut manager = manager(FOUR_NODES, CpuOptions::default());
    let hints = |manager: &CpuManager, text: &str| {
        shown(&manager.hints(&pod("p", text), RequestScope::Container("main")))
    };
    assert_eq!(hints(&manager, "main=0"), "any");
    assert_eq!(hints(&manager, "main=8"), "1! 2! 3! 0-1 0,2 0,3 1-2 1,3 2-3 0-2 0-1,3 0,2-3 1-3 0-3");
    assert_eq!(hints(&manager, "main=16"), "1-2! 1,3! 2-3! 0-2 0-1,3 0,2-3 1-3 0-3");
    assert_eq!(hints(&manager, "main=32"), "");
    let node = NumaNodes::from(NumaNode::try_from(2).unwrap());
    manager.allocate(&pod("p", "main=8"), "main", Some(node)).unwrap();
    assert_eq!(held(&manager, "p", "main"), "8-11,24-27");
    // The same nodes again, also after a restart; none if the request has changed.
    assert_eq!(hints(&manager, "main=8"), "2! 0,2 1-2 2-3 0-2 0,2-3 1-3 0-3");
    assert_eq!(hints(&manager, "main=7"), "");
    assert_eq!(shown(&manager.hints(&pod("p", "main=7"), RequestScope::Pod)), "");
    assert_eq!(
        shown(&manager.hints(&pod("p", "main=8"), RequestScope::Pod)),
        "2! 0,2 1-2 2-3 0-2 0,2-3 1-3 0-3"
    );
    assert_eq!(
        shown(&manager.hints(&pod("q", "i:init=8 main=0"), RequestScope::Pod)),
        "1! 3! 0-1 0,3 1-2 1,3 2-3 0-2 0-1,3 0,2-3 1-3 0-3"
    );
    assert_eq!(shown(&manager.hints(&pod("q", "main=0"), RequestScope::Pod)), "any");
}

#[test]
fn hints_keep_the_nodes_of_cpus_that_an_init_container_leaves() {
    let mut manager = manager(DUAL_SOCKET, CpuOptions::default());
    let pod = pod("p", "i:init=2 main=2 more=7");
    let node = NumaNodes::from(NumaNode::try_from(1).unwrap());
    manager.allocate(&pod, "i", Some(node)).unwrap();
    assert_eq!(shown(&manager.hints(&pod, RequestScope::Container("main"))), "1! 0-1");
    assert_eq!(shown(&manager.hints(&pod, RequestScope::Container("more"))), "1! 0-1");
    assert_eq!(shown(&manager.hints(&pod, RequestScope::Pod)), "0-1!");
}

#[test]
fn hints_on_one_socket_are_preferred_with_align_by_socket() {
    let options = CpuOptions { by_socket: true, ..CpuOptions::default() };
    let manager = manager(FOUR_NODES, options);
    let hints = shown(&manager.hints(&pod("p", "main=4"), RequestScope::Container("main")));
    assert_eq!(hints, "0! 1! 2! 3! 0-1! 0,2 0,3 1-2 1,3 2-3! 0-2 0-1,3 0,2-3 1-3 0-3");
}

#[test]
fn running_containers_get_the_cpus_that_have_changed() {
    let mut manager = manager(SINGLE_SOCKET_SMT, CpuOptions::default());
    let running = |container: &str, applied: Option<&str>| RunningContainer {
        pod: "p".to_owned(),
        container: container.to_owned(),
        id: format!("id-{container}"),
        applied: applied.map(cpus),
    };
    let containers = [running("main", None), running("log", Some("0-7")), running("old", Some("0,2-4,6-7"))];
    let update = |id: &str, text: &str| CpuUpdate { id: id.to_owned(), cpus: cpus(text) };
    assert_eq!(manager.updates(&containers), [update("id-main", "0-7"), update("id-old", "0-7")]);
    admit(&mut manager, &pod("p", "main=2")).unwrap();
    assert_eq!(manager.updates(&containers), [update("id-main", "1,5"), update("id-log", "0,2-4,6-7")]);
}

#[test]
fn the_shared_cpus_are_never_taken_from_a_container_without_others() {
    let options = CpuOptions { strict_reservation: true, ..CpuOptions::default() };
    let mut manager = manager(SINGLE_SOCKET_SMT, options);
    admit(&mut manager, &pod("p", "main=7")).unwrap();
    assert!(manager.assignments().shared.is_empty());
    let id = "c".to_owned();
    let container =
        RunningContainer { pod: "q".to_owned(), container: id.clone(), id, applied: Some(cpus("1-7")) };
    assert_eq!(manager.updates(&[container]), []);
}

proptest! {
    // A history of admissions and ends: no CPU is exclusive twice, none is lost, and a restart changes
    // nothing.
    #[test]
    fn no_cpu_is_given_twice_and_none_is_lost(
        steps in prop::collection::vec((0_u8..5, 0_u8..4, 1_usize..6, 0_usize..6, any::<bool>()), 1..30),
        full_cores: bool,
    ) {
        let options = CpuOptions { full_cores, ..CpuOptions::default() };
        let mut manager = manager(DUAL_SOCKET, options);
        for (action, uid, init, main, restarts) in steps {
            let uid = format!("pod{uid}");
            if action == 0 {
                manager.retain(|pod, _| pod != uid);
            } else {
                let _ = admit(&mut manager, &pod(&uid, &format!("i:init={init} main={main} side:sidecar=1")));
            }
            let mut all: Vec<CpuId> = manager.assignments().shared.iter().collect();
            for number in 0..4 {
                let uid = format!("pod{number}");
                let of_pod = manager.assignments().containers().filter(|(pod, _, _)| *pod == uid);
                let kept = of_pod.fold(CpuSet::new(), |kept, (_, _, cpus)| kept.union(cpus));
                all.extend(kept.iter());
                let regular = ["main", "side"].map(|name| manager.assignments().container(&uid, name).cloned());
                if let [Some(main), Some(side)] = regular {
                    prop_assert!(main.is_disjoint(&side));
                }
            }
            all.sort_unstable();
            prop_assert_eq!(all, manager.policy().topology().cpus().iter().collect::<Vec<_>>());
            prop_assert!(manager.assignments().shared.contains(CpuId::new(0)));
            if restarts {
                let written = crate::checkpoint::encode("static", manager.assignments(), false).unwrap();
                let read = crate::checkpoint::decode(&written, "static", |_| None).unwrap();
                let again = CpuManager::new(manager.policy().clone(), read, PodLevel::Unmanaged).unwrap();
                prop_assert_eq!(again.assignments(), manager.assignments());
                manager = again;
            }
        }
    }
}
