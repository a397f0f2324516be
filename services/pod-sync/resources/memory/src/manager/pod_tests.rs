//! Memory of whole pods, and its parts.

use pod_sync_decisions::status::KillCause;
use pod_sync_machine::NumaNode;

use super::tests::{ANY, GIB, amounts, manager, on, pod, unused};
use super::*;
use crate::checkpoint::{decode, encode};

/// Parses requests such as `6+1: i:init=2 main=3`, in GiB.
fn whole(uid: &str, text: &str) -> PodMemoryRequests {
    let (budget, containers) = text.split_once(": ").unwrap();
    PodMemoryRequests { budget: Some(amounts(budget)), ..pod(uid, containers) }
}

// Returns the memory of the pod and of each container, that of those without a request in brackets.
fn parts(manager: &MemoryManager, requests: &PodMemoryRequests) -> String {
    let shown = |blocks: &[MemoryBlock]| {
        let block = |block: &MemoryBlock| format!("{}@{}", block.bytes / GIB, block.nodes);
        blocks.iter().map(block).collect::<Vec<_>>().join("+")
    };
    let assignments = manager.assignments();
    let part = |request: &MemoryRequest| {
        let blocks = assignments.container(&requests.pod, &request.container).map(shown).unwrap_or_default();
        let is_shared = assignments.is_pod_shared(&requests.pod, &request.container);
        if is_shared {
            format!("{}=({blocks})", request.container)
        } else {
            format!("{}={blocks}", request.container)
        }
    };
    let all: Vec<String> = requests.containers.iter().map(part).collect();
    format!("{}: {}", assignments.pod(&requests.pod).map(shown).unwrap_or_default(), all.join(" "))
}

#[test]
fn the_memory_of_a_pod_is_divided_among_its_containers() {
    for (text, hint, expected) in [
        ("4: a= b=", ANY, "4@0: a=(4@0) b=(4@0)"),
        ("4: a=2 b=", on("1", true), "4@1: a=2@1 b=(2@1)"),
        ("4+1: a=2+1 b=1", ANY, "1@0+4@0: a=1@0+2@0 b=1@0"),
        ("4: i:init=4 s:sidecar=1 j:init= a=1 b=", ANY, "4@0: i=4@0 s=1@0 j=(3@0) a=1@0 b=(2@0)"),
        ("4: s:sidecar= i:init= a=2", ANY, "4@0: s=(2@0) i=(4@0) a=2@0"),
        ("9: a=2 b=", on("01", true), "9@0-1: a=2@0-1 b=(7@0-1)"),
    ] {
        let mut manager = manager(2);
        let requests = whole("p", text);
        manager.allocate_pod(&requests, hint).unwrap();
        assert_eq!(parts(&manager, &requests), expected, "{text}");
        let tables = manager.tables().clone();
        // The containers that ended before start again after a restart of the machine.
        manager.start(&requests, "a");
        manager.allocate_pod(&requests, ANY).unwrap();
        assert_eq!((parts(&manager, &requests).as_str(), manager.tables()), (expected, &tables), "{text}");
        for request in &requests.containers {
            assert_eq!(manager.tables(), &tables, "{text}");
            manager.release("p", &request.container);
        }
        assert_eq!(manager.tables(), &unused(2), "{text}");
        assert_eq!(manager.assignments(), &MemoryAssignments::default());
    }
}

#[test]
fn a_pod_with_a_container_without_memory_is_refused() {
    let shared = "pod rejected, sum of exclusive container memory requests equals pod budget, leaving no memory for shared containers";
    let init = "pod rejected, pod has shared init containers but no memory available for them";
    let large = "pod rejected, largest exclusive init container requests 3221225472 of memory, but only 2147483648 available";
    for (text, expected) in [
        ("4: a=3 b=1 c=", shared),
        ("4: s:sidecar= a=4", shared),
        ("4: s:sidecar=4 i:init=", init),
        ("4: s:sidecar=2 i:init=3 a=1", large),
    ] {
        let mut manager = manager(2);
        let requests = whole("p", text);
        assert_eq!(manager.hints(&requests, RequestScope::Pod), [Hints::OneOf(Vec::new())], "{text}");
        let error = manager.allocate_pod(&requests, ANY).unwrap_err();
        assert_eq!((error.cause(), error.message().as_str()), (KillCause::EmptyPodSharedPool, expected));
        assert_eq!(manager.tables(), &unused(2));
    }
    let no_room = manager(1).allocate_pod(&whole("p", "9: a="), ANY).unwrap_err();
    assert_eq!((no_room.cause(), no_room), (KillCause::UnexpectedAdmission, MemoryError::NoNodes));
}

#[test]
fn a_pod_keeps_its_memory_over_a_restart_and_has_none_without_the_gate() {
    let mut first = manager(2);
    let requests = whole("p", "4: a=2 b=");
    first.allocate_pod(&requests, on("1", true)).unwrap();
    let written = encode("Static", first.tables(), first.assignments(), true).unwrap();
    let open = |level| {
        let (tables, assignments) = decode(&written, "Static").unwrap();
        MemoryManager::new(unused(2), tables, assignments, level).unwrap()
    };
    let mut again = open(PodLevel::Pod);
    let held = Hint { nodes: Some(NumaNodes::from(NumaNode::try_from(1).unwrap())), is_preferred: true };
    // kubernetes/kubernetes#141070: the memory of a container was compared with the request of the pod.
    assert_eq!(again.hints(&requests, RequestScope::Pod), [Hints::OneOf(vec![held])]);
    assert_eq!(again.hints(&whole("p", "5: a=2 b="), RequestScope::Pod), [Hints::AnyNodes]);
    again.recognize(&requests);
    assert_eq!(again.assignments(), first.assignments());
    again.allocate_pod(&requests, ANY).unwrap();
    assert_eq!(again.tables(), first.tables());
    let off = open(PodLevel::Unmanaged);
    assert_eq!((off.tables(), off.assignments()), (&unused(2), &MemoryAssignments::default()));
}

#[test]
fn a_pod_without_containers_ends_wherever_a_kubelet_crashed() {
    for hint in [on("1", true), on("01", false)] {
        let mut others = manager(2);
        others.allocate_pod(&whole("other", "2: a="), hint).unwrap();
        let mut all = others.clone();
        let requests = whole("p", "4+1: a=2 b=");
        all.allocate_pod(&requests, hint).unwrap();
        let blocks = all.assignments().pod("p").unwrap().to_vec();
        // The pod of an earlier crash, whose memory is free.
        let mut lost = others.assignments().clone();
        lost.insert_pod("earlier", blocks_on(NumaNodes::from(NumaNode::try_from(0).unwrap()), &amounts("3")));
        lost.insert_pod("p", blocks.clone());
        for (name, tables) in [
            ("the last container is removed", all.tables()),
            ("the memory is free, or the pod is written and has not taken it yet", others.tables()),
        ] {
            for level in [PodLevel::Pod, PodLevel::Containers] {
                let started = MemoryManager::new(unused(2), tables.clone(), lost.clone(), level).expect(name);
                assert_eq!(started.tables(), others.tables(), "{name}");
                assert_eq!(started.assignments().pods().count(), 1, "{name}");
                let mut again = started.clone();
                again.allocate_pod(&requests, hint).unwrap();
                assert_eq!(again.tables(), all.tables(), "{name}");
            }
        }
        let mut changed = all.tables().clone();
        changed.take(blocks[0].nodes, &blocks[0].kind, 1);
        let refused = MemoryManager::new(unused(2), changed, lost, PodLevel::Pod).unwrap_err();
        assert!(matches!(refused, InvalidMemoryState::OtherMachine(_)), "{refused:?}");
    }
}

#[test]
fn a_pod_that_had_memory_by_container_gets_it_as_a_whole_with_another_scope() {
    let mut manager = manager(2);
    manager.allocate(&pod("p", "a=6"), "a", on("1", true)).unwrap();
    manager.allocate(&pod("other", "a=3"), "a", on("0", true)).unwrap();
    let requests = whole("p", "8: a=6 b=");
    assert_eq!(manager.hints(&requests, RequestScope::Pod), [Hints::OneOf(vec![on("1", true)])]);
    manager.allocate_pod(&requests, on("1", true)).unwrap();
    assert_eq!(parts(&manager, &requests), "8@1: a=6@1 b=(2@1)");
    manager.release("p", "a");
    manager.release("p", "b");
    manager.release("other", "a");
    assert_eq!(manager.tables(), &unused(2));
}
