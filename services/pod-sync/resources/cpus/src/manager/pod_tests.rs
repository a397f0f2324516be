//! CPUs of whole pods, and their parts.

use std::collections::BTreeMap;

use proptest::prelude::*;

use pod_sync_decisions::status::KillCause;
use pod_sync_machine::NumaNode;
use pod_sync_topology::PolicyName;

use super::tests::{cpus, pod, shown};
use super::*;
use crate::error::EmptyPodPool;
use crate::options::CpuOptions;
use crate::policy::ReservedCpus;
use crate::test_machines::{DUAL_SOCKET, Shape, machine};

const WHOLE: CpuOptions = CpuOptions {
    full_cores: true,
    across_nodes: false,
    by_socket: false,
    across_cores: false,
    strict_reservation: false,
    by_cache: false,
};

fn manager(shape: Shape, options: CpuOptions) -> CpuManager {
    let reserved = ReservedCpus::These(cpus("0"));
    let policy = StaticPolicy::new(machine(shape), options, reserved, PolicyName::None).unwrap();
    CpuManager::new(policy, CpuAssignments::default(), PodLevel::Pod).unwrap()
}

/// Parses requests such as `6: i:init=2 main=3`.
fn whole(uid: &str, text: &str) -> PodCpuRequests {
    let (budget, containers) = text.split_once(": ").unwrap();
    PodCpuRequests { budget: Some(budget.parse().unwrap()), ..pod(uid, containers) }
}

// Returns the CPUs of the pod and of each container, those that are shared in brackets.
fn parts(manager: &CpuManager, requests: &PodCpuRequests) -> String {
    let part = |request: &CpuRequest| match manager.cpus(&requests.pod, &request.container) {
        ContainerCpus::Exclusive(cpus) => format!("{}={cpus}", request.container),
        ContainerCpus::PodShared(cpus) => format!("{}=({cpus})", request.container),
        ContainerCpus::Shared(_) => format!("{}=node", request.container),
    };
    let all: Vec<String> = requests.containers.iter().map(part).collect();
    let own = manager.assignments().pod(&requests.pod).map(ToString::to_string).unwrap_or_default();
    format!("{own}: {}", all.join(" "))
}

#[test]
fn a_pod_is_divided_among_its_containers() {
    for (text, expected) in [
        ("4: a=0 b=0", "1-2,9-10: a=(1-2,9-10) b=(1-2,9-10)"),
        ("4: a=2 b=0 c=0", "1-2,9-10: a=1,9 b=(2,10) c=(2,10)"),
        ("4: a=3 b=1", "1-2,9-10: a=1-2,9 b=10"),
        // What no container requests stays with the pod.
        ("4: a=2", "1-2,9-10: a=1,9"),
        // An init container leaves its CPUs, and one without a request has what the sidecars before it leave.
        ("4: i:init=4 s:sidecar=1 j:init=0 a=1 b=0", "1-2,9-10: i=1-2,9-10 s=1 j=(2,9-10) a=9 b=(2,10)"),
        // A sidecar without a request shares with the regular containers.
        ("4: s:sidecar=0 i:init=0 a=2", "1-2,9-10: s=(2,10) i=(1-2,9-10) a=1,9"),
    ] {
        let mut manager = manager(DUAL_SOCKET, CpuOptions::default());
        let requests = whole("p", text);
        manager.allocate_pod(&requests, None).unwrap();
        assert_eq!(parts(&manager, &requests), expected, "{text}");
        assert_eq!(manager.assignments().shared, cpus("0,3-8,11-15"));
        // Again: nothing changes.
        manager.allocate_pod(&requests, None).unwrap();
        assert_eq!(parts(&manager, &requests), expected, "{text}");
        for request in &requests.containers {
            assert_eq!(manager.assignments().shared, cpus("0,3-8,11-15"), "{text}");
            manager.release("p", &request.container);
        }
        assert_eq!(manager.assignments(), &CpuAssignments::new(cpus("0-15")), "{text}");
    }
}

#[test]
fn a_pod_with_a_container_without_cpus_is_refused() {
    let shared = "pod rejected, sum of exclusive container cpu requests equals pod budget, leaving no cpus for shared containers";
    let init = "pod rejected, pod has shared init containers but no cpus available for them";
    let large = "pod rejected, largest exclusive init container requests 3 cpus, but only 2 available";
    for (text, expected) in [
        ("4: a=3 b=1 c=0", shared),
        ("4: s:sidecar=0 a=4", shared),
        ("4: s:sidecar=4 i:init=0", init),
        ("4: s:sidecar=2 i:init=3 a=1", large),
    ] {
        let mut manager = manager(DUAL_SOCKET, CpuOptions::default());
        let requests = whole("p", text);
        assert_eq!(shown(&manager.hints(&requests, RequestScope::Pod)), "", "{text}");
        let error = manager.allocate_pod(&requests, None).unwrap_err();
        assert!(matches!(error, AllocateError::EmptyPodPool(_)), "{error:?}");
        assert_eq!((error.cause(), error.message().as_str()), (KillCause::EmptyPodSharedPool, expected));
        assert_eq!(manager.assignments(), &CpuAssignments::new(cpus("0-15")));
    }
    assert_eq!(whole("p", "4: s:sidecar=2 i:init=2 a=2").check_pool(4), Ok(()));
    assert_eq!(whole("p", "4: i:init=0 s:sidecar=4").check_pool(4), Ok(()));
    assert_eq!(whole("p", "4: a=4 b=0").check_pool(4), Err(EmptyPodPool::SharedContainer));
}

#[test]
fn hints_are_those_of_the_whole_pod_and_the_same_again_after_a_restart() {
    let mut manager = manager(DUAL_SOCKET, CpuOptions::default());
    let requests = whole("p", "8: a=2 b=0");
    assert_eq!(shown(&manager.hints(&requests, RequestScope::Pod)), "1! 0-1");
    let node = NumaNodes::from(NumaNode::try_from(1).unwrap());
    manager.allocate_pod(&requests, Some(node)).unwrap();
    assert_eq!(parts(&manager, &requests), "4-7,12-15: a=4,12 b=(5-7,13-15)");
    let written = crate::checkpoint::encode("static", manager.assignments(), true).unwrap();
    let restored = || crate::checkpoint::decode(&written, "static", |_| None).unwrap();
    let mut again = CpuManager::new(manager.policy().clone(), restored(), PodLevel::Pod).unwrap();
    assert_eq!(shown(&again.hints(&requests, RequestScope::Pod)), "1! 0-1");
    assert_eq!(shown(&again.hints(&whole("p", "7: a=2 b=0"), RequestScope::Pod)), "");
    // Which containers are exclusive is not in the file.
    assert_eq!(parts(&again, &requests), "4-7,12-15: a=(4,12) b=(5-7,13-15)");
    again.recognize(&requests);
    assert_eq!(again.assignments(), manager.assignments());
    // kubernetes/kubernetes#141041: the pod got CPUs a second time.
    again.allocate_pod(&requests, None).unwrap();
    assert_eq!(again.assignments(), manager.assignments());
    // Without the feature gate, the pod has none.
    let off = CpuManager::new(manager.policy().clone(), restored(), PodLevel::Unmanaged).unwrap();
    assert_eq!(off.assignments(), &CpuAssignments::new(cpus("0-15")));
}

#[test]
fn a_pod_without_containers_ends_wherever_a_kubelet_crashed() {
    let policy = manager(DUAL_SOCKET, CpuOptions::default()).policy().clone();
    for (name, own, shared) in [
        ("the last container is removed, or the pod has its CPUs and no container yet", "5", "0-3,6-15"),
        ("its CPUs are shared again", "5", "0-3,5-15"),
        ("its CPUs are those of another pod", "4-5", "0-3,5-15"),
        ("its CPUs are those of another pod as a whole", "5-7", "0-3,5,7-15"),
    ] {
        let mut restored = CpuAssignments::new(cpus(shared));
        restored.restore("q", "main", cpus("4"));
        restored.restore_pod("p", cpus(own));
        let mut expected = CpuAssignments::new(cpus("0-3,5-15"));
        expected.restore("q", "main", cpus("4"));
        if own == "5-7" {
            restored.restore_pod("whole", cpus("6"));
            restored.restore("whole", "main", cpus("6"));
            expected.restore("whole", "main", cpus("6"));
            expected.restore_pod("whole", cpus("6"));
            expected.shared = cpus("0-3,5,7-15");
        }
        for level in [PodLevel::Pod, PodLevel::Containers] {
            let started = CpuManager::new(policy.clone(), restored.clone(), level).expect(name);
            assert_eq!(started.assignments(), &expected, "{name}");
        }
    }
    // Nothing is shared before the first start with this policy.
    let mut restored = CpuAssignments::default();
    restored.restore_pod("p", cpus("5"));
    let started = CpuManager::new(policy.clone(), restored.clone(), PodLevel::Pod).unwrap();
    assert_eq!(started.assignments(), &CpuAssignments::new(cpus("0-15")));
    restored.restore("p", "main", cpus("5"));
    let refused = CpuManager::new(policy, restored, PodLevel::Pod).unwrap_err();
    assert!(matches!(refused, InvalidCpuState::NothingShared), "{refused:?}");
}

#[test]
fn a_pod_that_had_cpus_by_container_gets_them_as_a_whole_with_another_scope() {
    let mut manager = manager(DUAL_SOCKET, CpuOptions::default());
    manager.allocate(&pod("p", "a=12"), "a", None).unwrap();
    let requests = whole("p", "14: a=12 b=0");
    assert_eq!(shown(&manager.hints(&requests, RequestScope::Pod)), "0-1!", "its own CPUs count");
    manager.allocate_pod(&requests, None).unwrap();
    assert_eq!(manager.assignments().pod("p").unwrap().len(), 14);
    manager.release("p", "a");
    manager.release("p", "b");
    assert_eq!(manager.assignments(), &CpuAssignments::new(cpus("0-15")));
}

#[test]
fn whole_cores_are_required_of_the_pod_and_not_of_its_containers() {
    let mut manager = manager(DUAL_SOCKET, WHOLE);
    let error = manager.allocate_pod(&whole("p", "3: a=1 b=0"), None).unwrap_err();
    assert_eq!(error, AllocateError::NotWholeCores { requested: 3, per_core: 2 });
    let requests = whole("p", "4: a=1 b=0");
    manager.allocate_pod(&requests, None).unwrap();
    assert_eq!(parts(&manager, &requests), "1-2,9-10: a=1 b=(2,9-10)");
}

/// Divides CPUs one at a time: who holds each one while the regular containers run.
fn owners(manager: &CpuManager, requests: &PodCpuRequests) -> BTreeMap<u32, Vec<String>> {
    let mut owners: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    let running = requests.containers.iter().filter(|request| request.kind != ContainerKind::Init);
    for request in running {
        for cpu in manager.cpus(&requests.pod, &request.container).cpus().iter() {
            owners.entry(cpu.number()).or_default().push(request.container.clone());
        }
    }
    owners
}

proptest! {
    // Histories of whole pods and of containers: each CPU of the machine is shared, or of one pod, and of the
    // pod's CPUs each has one exclusive container or those without a request.
    #[test]
    fn each_cpu_of_a_pod_is_of_one_container_or_of_its_pool(
        steps in prop::collection::vec((0_u8..3, 0_u8..4, 0_usize..9, 0_usize..4, 0_usize..4, 0_usize..4), 1..25),
        full_cores: bool,
    ) {
        let mut manager = manager(DUAL_SOCKET, CpuOptions { full_cores, ..CpuOptions::default() });
        let mut admitted: BTreeMap<String, PodCpuRequests> = BTreeMap::new();
        for (action, uid, budget, init, side, main) in steps {
            let uid = format!("pod{uid}");
            let containers = format!("i:init={init} s:sidecar={side} main={main} log=0");
            match (action, admitted.contains_key(&uid)) {
                (0, _) => {
                    manager.retain(|pod, _| pod != uid);
                    admitted.remove(&uid);
                }
                (_, true) => {}
                (1, false) => {
                    let requests = pod(&uid, &format!("main={main}"));
                    if manager.allocate(&requests, "main", None).is_ok() {
                        admitted.insert(uid, requests);
                    }
                }
                (_, false) => {
                    let requests = whole(&uid, &format!("{}: {containers}", budget.max(1)));
                    let before = manager.assignments().clone();
                    match manager.allocate_pod(&requests, None) {
                        Ok(()) => { admitted.insert(uid, requests); }
                        Err(_) => prop_assert_eq!(manager.assignments(), &before),
                    }
                }
            }
            let mut seen = manager.assignments().shared.clone();
            for requests in admitted.values() {
                let own = match requests.budget {
                    Some(budget) => {
                        let own = manager.assignments().pod(&requests.pod).unwrap().clone();
                        prop_assert_eq!(own.len(), budget);
                        let owners = owners(&manager, requests);
                        for cpu in own.iter() {
                            let names = &owners[&cpu.number()];
                            let is_pool = names.iter().all(|name| requests.container(name).unwrap().count == 0);
                            prop_assert!(names.len() == 1 || is_pool, "{cpu:?} {names:?}");
                        }
                        prop_assert_eq!(owners.len(), budget);
                        for request in requests.containers.iter().filter(|request| request.count > 0) {
                            prop_assert_eq!(manager.cpus(&requests.pod, &request.container).cpus().len(), request.count);
                        }
                        own
                    }
                    None => manager.assignments().container(&requests.pod, "main").cloned().unwrap_or_default(),
                };
                prop_assert!(own.is_disjoint(&seen));
                seen = seen.union(&own);
            }
            prop_assert_eq!(seen, manager.policy().topology().cpus());
        }
    }
}
