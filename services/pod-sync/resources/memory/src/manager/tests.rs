use pod_sync_machine::{Machine, NodeMemory, NumaNode};
use proptest::prelude::*;
use serde::Deserialize;

use super::*;
use crate::checkpoint::{decode, encode};
use crate::node_table::MemoryTable;
use crate::reserved::{ReservedError, ReservedMemory};

pub(super) const GIB: u64 = 1 << 30;

fn node(number: u64) -> NumaNode {
    NumaNode::try_from(number).unwrap()
}

fn nodes(text: &str) -> NumaNodes {
    text.bytes().map(|digit| node(u64::from(digit - b'0'))).collect()
}

/// A machine with 10 GiB on each node, of which 1 GiB is in huge pages of 2 MiB.
fn machine(count: u64) -> Machine {
    let memory = NodeMemory { bytes: 10 * GIB, huge_pages: [(2 << 20, 512)].into(), ..NodeMemory::default() };
    Machine { nodes: (0..count).map(|number| (node(number), memory.clone())).collect(), ..Machine::default() }
}

/// Parses amounts in GiB, such as `4` or `4+1` with huge pages.
pub(super) fn amounts(text: &str) -> Amounts {
    let (memory, pages) = text.split_once('+').unwrap_or((text, ""));
    let amount = |kind, text: &str| (!text.is_empty()).then(|| (kind, text.parse::<u64>().unwrap() * GIB));
    let pages = amount(MemoryKind::huge_pages(2 << 20), pages);
    pages.into_iter().chain(amount(MemoryKind::memory(), memory)).collect()
}

pub(super) fn unused(count: u64) -> NodeTables {
    let machine = machine(count);
    // 1 GiB of each node is reserved, so that 8 GiB are left for pods.
    let reserved = (0..count).map(|number| (node(number), amounts("1"))).collect();
    let reserved = ReservedMemory::new(reserved, &amounts(&count.to_string()), &machine).unwrap();
    NodeTables::unused(&machine, &reserved)
}

pub(super) fn manager(count: u64) -> MemoryManager {
    MemoryManager::new(unused(count), NodeTables::default(), MemoryAssignments::default(), PodLevel::Pod)
        .unwrap()
}

/// Parses requests such as `i:init=2 s:sidecar=1 main=4+1`, in GiB.
pub(super) fn pod(uid: &str, text: &str) -> PodMemoryRequests {
    let request = |word: &str| {
        let (name, size) = word.split_once('=').unwrap();
        let (container, kind) = match name.split_once(':') {
            Some((container, "init")) => (container, ContainerKind::Init),
            Some((container, _)) => (container, ContainerKind::Sidecar),
            None => (name, ContainerKind::Regular),
        };
        MemoryRequest { container: container.to_owned(), kind, amounts: amounts(size) }
    };
    PodMemoryRequests {
        pod: uid.to_owned(),
        containers: text.split_whitespace().map(request).collect(),
        budget: None,
    }
}

pub(super) const ANY: Hint = Hint { nodes: None, is_preferred: false };

pub(super) fn on(text: &str, is_preferred: bool) -> Hint {
    Hint { nodes: Some(nodes(text)), is_preferred }
}

fn admit(manager: &mut MemoryManager, pod: &PodMemoryRequests) -> Result<(), MemoryError> {
    pod.containers.iter().try_for_each(|request| manager.allocate(pod, &request.container, ANY))
}

fn held(manager: &MemoryManager, uid: &str, container: &str) -> String {
    manager.nodes(uid, container).map_or("any".to_owned(), |nodes| nodes.to_string())
}

/// Returns the free GiB of each node.
fn free(manager: &MemoryManager) -> Vec<u64> {
    let tables = manager.tables();
    tables.nodes().iter().map(|node| tables.table(node, &MemoryKind::memory()).free / GIB).collect()
}

fn shown(hints: &[Hints]) -> Vec<String> {
    let hint = |hint: &Hint| format!("{}{}", hint.nodes.unwrap(), if hint.is_preferred { "!" } else { "" });
    let list = |hints: &Hints| match hints {
        Hints::AnyNodes => "any".to_owned(),
        Hints::OneOf(hints) => hints.iter().map(hint).collect::<Vec<_>>().join(" "),
    };
    hints.iter().map(list).collect()
}

#[test]
fn the_unused_memory_is_that_of_the_machine_without_pages_and_reservations() {
    let tables = unused(2);
    let memory = tables.table(node(1), &MemoryKind::memory());
    assert_eq!(
        [memory.total, memory.system_reserved, memory.allocatable, memory.free],
        [10, 1, 8, 8].map(|n| n * GIB)
    );
    let pages = tables.table(node(1), &MemoryKind::huge_pages(2 << 20));
    assert_eq!(
        [pages.total, pages.system_reserved, pages.allocatable, pages.free],
        [1, 0, 1, 1].map(|n| n * GIB)
    );
    assert_eq!(MemoryKind::huge_pages(2 << 20).to_string(), "hugepages-2Mi");
    assert_eq!(MemoryKind::huge_pages(1 << 30).to_string(), "hugepages-1Gi");
    assert_eq!(MemoryKind::parse("cpu"), None);
}

#[test]
fn reservations_that_do_not_fit_are_refused() {
    let new = |on: u64, size: &str, of_node: &str| {
        ReservedMemory::new([(node(on), amounts(size))].into(), &amounts(of_node), &machine(2)).map(|_| ())
    };
    assert_eq!(new(1, "1", "1"), Ok(()));
    assert_eq!(new(2, "1", "1"), Err(ReservedError::UnknownNode(node(2))));
    let text = "the total amount \"1073741824\" of type \"memory\" is not equal to the value \"2147483648\" determined by Node Allocatable feature";
    assert_eq!(new(1, "1", "2").unwrap_err().to_string(), text);
    assert!(matches!(new(1, "1+1", "1"), Err(ReservedError::OtherTotal { total, .. }) if total == GIB));
    assert_eq!(new(1, "0", "0"), Err(ReservedError::NoMemory));
}

#[test]
fn memory_comes_from_few_nodes_and_is_given_back() {
    let mut manager = manager(2);
    admit(&mut manager, &pod("p", "main=6+1")).unwrap();
    assert_eq!(held(&manager, "p", "main"), "0");
    assert_eq!(free(&manager), [2, 8]);
    assert_eq!(manager.tables().0[&node(0)].assignments, 2);
    // Again: nothing changes. A node in use alone does not join a group.
    admit(&mut manager, &pod("p", "main=6+1")).unwrap();
    admit(&mut manager, &pod("q", "main=4")).unwrap();
    assert_eq!(held(&manager, "q", "main"), "1");
    assert_eq!(admit(&mut manager, &pod("r", "main=5")), Err(MemoryError::NoNodes));
    assert_eq!(held(&manager, "r", "main"), "any");
    assert_eq!(free(&manager), [2, 4]);
    manager.retain(|pod, _| pod == "none");
    assert_eq!(free(&manager), [8, 8]);
    assert_eq!(manager.tables().compare(&unused(2)), Ok(()));
    let text = "Allocate failed due to [memorymanager] failed to get the default NUMA affinity, no NUMA nodes with enough memory is available, which is unexpected";
    assert_eq!(MemoryError::NoNodes.message(), text);
}

#[test]
fn several_nodes_are_a_group_until_their_memory_is_given_back() {
    let mut manager = manager(4);
    admit(&mut manager, &pod("p", "main=12")).unwrap();
    assert_eq!(held(&manager, "p", "main"), "0-1");
    assert_eq!(free(&manager), [0, 4, 8, 8]);
    // Small requests are on other nodes, those of two nodes in the same group.
    admit(&mut manager, &pod("q", "main=2")).unwrap();
    assert_eq!(held(&manager, "q", "main"), "2");
    let hints = |text: &str| shown(&manager.hints(&pod("r", text), RequestScope::Container("main")));
    assert_eq!(hints("main=3"), ["2! 3! 0-1"]);
    assert_eq!(hints("main=9"), ["any"]);
    assert_eq!(hints("main=4+1"), ["2! 3! 0-1", "2! 3! 0-1"]);
    assert_eq!(hints("main=0+2"), ["0-1!", "0-1!"]);
    manager.release("p", "main");
    assert_eq!(free(&manager), [8, 8, 6, 8]);
    assert_eq!(manager.tables().0[&node(0)].group, nodes("0"));
}

#[test]
fn the_hint_of_the_topology_manager_decides_and_is_extended() {
    let mut manager = manager(4);
    let allocate = |manager: &mut MemoryManager, uid: &str, text: &str, hint| {
        manager.allocate(&pod(uid, text), "main", hint)
    };
    allocate(&mut manager, "p", "main=2", on("3", true)).unwrap();
    assert_eq!(held(&manager, "p", "main"), "3");
    // Node 1 is too small alone: the smallest set with it that has enough.
    allocate(&mut manager, "q", "main=10", on("1", false)).unwrap();
    assert_eq!(held(&manager, "q", "main"), "0-1");
    let refused = |hint, text: &str| manager.clone().allocate(&pod("r", text), "main", hint);
    assert_eq!(refused(on("3", true), "main=8"), Err(MemoryError::NoMoreNodes));
    assert_eq!(refused(on("2", true), "main=10"), Err(MemoryError::NoMoreNodes));
    assert_eq!(refused(on("13", true), "main=3"), Err(MemoryError::OtherGroup));
    let preferred = Hint { nodes: None, is_preferred: true };
    // Alone, 4 GiB would fit on one node, and only the group is left.
    let mut full = manager.clone();
    allocate(&mut full, "s", "main=6", on("3", true)).unwrap();
    allocate(&mut full, "t", "main=8", on("2", true)).unwrap();
    assert_eq!(full.clone().allocate(&pod("r", "main=4"), "main", preferred), Err(MemoryError::NotPreferred));
    assert_eq!(full.clone().allocate(&pod("r", "main=4"), "main", ANY), Ok(()));
    full.release("q", "main");
    allocate(&mut full, "u", "main=10", ANY).unwrap();
    let too_narrow = full.allocate(&pod("r", "main=7"), "main", on("0", true));
    assert_eq!(too_narrow, Err(MemoryError::NoMoreNodes));
    let narrow = full.allocate(&pod("r", "main=5"), "main", on("0", true));
    assert_eq!(narrow, Err(MemoryError::ExtendedNotPreferred));
}

#[test]
fn init_containers_leave_their_memory_to_later_containers_of_their_pod() {
    let mut manager = manager(2);
    let requests = pod("p", "i:init=6 s:sidecar=1 main=3");
    admit(&mut manager, &requests).unwrap();
    assert_eq!(free(&manager), [2, 8]);
    let bytes = |manager: &MemoryManager, name: &str| {
        manager.assignments().container("p", name).map(|b| b[0].bytes / GIB)
    };
    assert_eq!(["i", "s", "main"].map(|name| bytes(&manager, name)), [Some(2), Some(1), Some(3)]);
    // Another pod does not get it before the container has started.
    assert_eq!(admit(&mut manager.clone(), &pod("q", "a=6 b=2")), Ok(()));
    assert_eq!(admit(&mut manager.clone(), &pod("q", "a=8 b=3")), Err(MemoryError::NoNodes));
    manager.start(&requests, "s");
    assert_eq!(free(&manager), [4, 8]);
    assert_eq!(bytes(&manager, "i"), None);
    assert_eq!(admit(&mut manager, &pod("q", "a=8 b=3")), Ok(()));
}

#[test]
fn hints_of_what_a_container_has_are_the_same_again() {
    let mut manager = manager(2);
    admit(&mut manager, &pod("p", "main=2+1")).unwrap();
    let hints = |manager: &MemoryManager, text: &str, scope| shown(&manager.hints(&pod("p", text), scope));
    assert_eq!(hints(&manager, "main=2+1", RequestScope::Container("main")), ["0!", "0!"]);
    assert_eq!(hints(&manager, "main=2+1", RequestScope::Pod), ["0!", "0!"]);
    assert_eq!(hints(&manager, "main=3+1", RequestScope::Container("main")), ["any"]);
    assert_eq!(hints(&manager, "main=2", RequestScope::Pod), ["any"]);
    assert_eq!(
        hints(&manager, "other=2+1", RequestScope::Pod),
        ["1! 0-1".replace(" 0-1", ""), "1!".to_owned()]
    );
}

#[test]
fn assignments_that_do_not_fit_the_machine_are_refused() {
    let mut used = manager(2);
    admit(&mut used, &pod("p", "main=2+1")).unwrap();
    let new = |unused: NodeTables, tables: &NodeTables, assignments: &MemoryAssignments| {
        MemoryManager::new(unused, tables.clone(), assignments.clone(), PodLevel::Pod)
            .map(|_| ())
            .map_err(|error| error.to_string())
    };
    let (tables, assignments) = (used.tables(), used.assignments());
    assert_eq!(new(unused(2), tables, assignments), Ok(()));
    let other = |text: &str| {
        Err(format!("[memorymanager] the expected machine state is different from the real one: {text}"))
    };
    assert_eq!(
        new(unused(3), tables, assignments),
        other("NUMA nodes 0-1 are recorded, the machine has 0-2")
    );
    assert_eq!(
        new(unused(2), tables, &MemoryAssignments::default()),
        other("the assignments on NUMA node 0 do not add up to what it has given")
    );
    let change = |kind, change: fn(&mut MemoryTable)| {
        let mut changed = unused(2);
        change(changed.0.get_mut(&node(1)).unwrap().kinds.get_mut(&kind).unwrap());
        new(changed, tables, assignments)
    };
    let pages = MemoryKind::huge_pages(2 << 20);
    assert_eq!(
        change(pages, |pages| pages.total *= 2),
        other("NUMA node 1 had 1073741824 bytes of hugepages-2Mi in total, now 2147483648")
    );
    assert_eq!(
        change(MemoryKind::memory(), |memory| memory.system_reserved = 0),
        other("NUMA node 1 had 1073741824 bytes of memory reserved, now 0")
    );
    let none = new(unused(2), &NodeTables::default(), assignments).unwrap_err();
    assert_eq!(none, "[memorymanager] machine state can not be empty when it has memory assignments");
    let mut elsewhere = MemoryAssignments::default();
    let block = |nodes, kind| vec![MemoryBlock { nodes, kind, bytes: 1 }];
    elsewhere.insert("p", "main", block(nodes("5"), MemoryKind::memory()));
    assert!(new(unused(2), tables, &elsewhere).unwrap_err().ends_with("uses the NUMA that does not exist"));
    elsewhere.insert("p", "main", block(nodes("0"), MemoryKind::huge_pages(GIB)));
    assert!(new(unused(2), tables, &elsewhere).unwrap_err().ends_with("does not exist: hugepages-1Gi"));
}

/// Returns the memory of a machine like [`unused`] whose nodes have these MiB more.
fn resized(more: &[i64]) -> NodeTables {
    let mut machine = machine(more.len().try_into().unwrap());
    for (memory, more) in machine.nodes.values_mut().zip(more) {
        memory.bytes = memory.bytes.checked_add_signed(more << 20).unwrap();
    }
    let reserved = machine.nodes.keys().map(|number| (*number, amounts("1"))).collect();
    let reserved = ReservedMemory::new(reserved, &amounts(&more.len().to_string()), &machine).unwrap();
    NodeTables::unused(&machine, &reserved)
}

#[test]
fn assignments_are_kept_while_they_fit_nodes_that_a_boot_has_made_larger_or_smaller() {
    let restart = |pods: &[(&str, Hint)], more: &[i64]| {
        let mut before = manager(more.len().try_into().unwrap());
        for (index, (text, hint)) in pods.iter().enumerate() {
            before.allocate(&pod(&index.to_string(), text), "main", *hint).unwrap();
        }
        let (tables, assignments) = (before.tables().clone(), before.assignments().clone());
        let after = MemoryManager::new(resized(more), tables, assignments, PodLevel::Pod);
        let after = after.map_err(|error| error.to_string())?;
        assert_eq!(after.assignments(), before.assignments());
        let again = MemoryManager::new(
            resized(more),
            after.tables().clone(),
            after.assignments().clone(),
            PodLevel::Pod,
        );
        assert_eq!(again.unwrap().tables(), after.tables());
        let memory = MemoryKind::memory();
        let tables = after.tables().0.keys().map(|node| after.tables().table(*node, &memory));
        Ok(tables.map(|table| (table.free >> 20, table.reserved >> 20)).collect::<Vec<_>>())
    };
    let lack = |text: &str| {
        Err(format!(
            "[memorymanager] the expected machine state is different from the real one: NUMA nodes {text} for their assignments"
        ))
    };
    // Each node has 8192 MiB for pods.
    let alone: &[_] = &[("main=6", on("1", true))];
    assert_eq!(restart(alone, &[3, -3]), Ok(vec![(8195, 0), (2045, 6144)]));
    assert_eq!(restart(alone, &[-8192, -2048]), Ok(vec![(0, 0), (0, 6144)]));
    assert_eq!(restart(alone, &[0, -2049]), lack("1 lack 1048576 bytes of memory"));
    // What one node of a group no longer has comes from the other.
    let group: &[_] = &[("main=8", on("01", false)), ("main=4", on("01", false))];
    assert_eq!(restart(group, &[0, 0]), Ok(vec![(0, 8192), (4096, 4096)]));
    assert_eq!(restart(group, &[-5, 5]), Ok(vec![(0, 8187), (4096, 4101)]));
    assert_eq!(restart(group, &[-4096, -1]), lack("0-1 lack 1048576 bytes of memory"));
    // Without assignments there is nothing that could not fit.
    assert_eq!(restart(&[], &[-1, 1]), Ok(vec![(8191, 0), (8193, 0)]));
}

#[test]
fn a_size_of_pages_that_a_new_kernel_adds_without_a_page_is_no_other_machine() {
    let mut used = manager(1);
    admit(&mut used, &pod("p", "main=2+1")).unwrap();
    let mut newer = unused(1);
    let kinds = &mut newer.0.get_mut(&node(0)).unwrap().kinds;
    kinds.insert(MemoryKind::huge_pages(16 << 10), MemoryTable::default());
    let after =
        MemoryManager::new(newer, used.tables().clone(), used.assignments().clone(), PodLevel::Pod).unwrap();
    assert_eq!((free(&after), after.tables().sizes()[&node(0)].len()), (vec![6], 3));
}

/// A history that the policy of kubelet 1.36 went through, on a machine whose nodes each have 8 units of
/// memory and one of pages.
#[derive(Debug, Deserialize)]
struct RecordedHistory {
    nodes: u64,
    steps: Vec<RecordedStep>,
}

/// A pod that is admitted or ends.
#[derive(Debug, Deserialize)]
struct RecordedStep {
    pod: String,
    #[serde(default)]
    release: bool,
    #[serde(default)]
    containers: Vec<RecordedContainer>,
    /// The nodes of the hint.
    #[serde(default)]
    nodes: String,
    #[serde(default)]
    preferred: bool,
    /// For each container its nodes, or an error, after which the others are not tried.
    #[serde(default)]
    results: Vec<String>,
    /// Free memory and pages of each node after it.
    free: Vec<u64>,
}

#[derive(Debug, Deserialize)]
struct RecordedContainer {
    name: String,
    kind: String,
    memory: u64,
    pages: u64,
}

impl RecordedStep {
    fn requests(&self) -> PodMemoryRequests {
        let request = |container: &RecordedContainer| MemoryRequest {
            container: container.name.clone(),
            kind: match container.kind.as_str() {
                "init" => ContainerKind::Init,
                "sidecar" => ContainerKind::Sidecar,
                _ => ContainerKind::Regular,
            },
            amounts: [
                (MemoryKind::memory(), container.memory),
                (MemoryKind::huge_pages(2 << 20), container.pages),
            ]
            .into_iter()
            .filter(|(_, amount)| *amount > 0)
            .collect(),
        };
        PodMemoryRequests {
            pod: self.pod.clone(),
            containers: self.containers.iter().map(request).collect(),
            budget: None,
        }
    }

    fn check(&self, manager: &mut MemoryManager) {
        let nodes = self.nodes.split(',').flat_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            first.parse::<u64>().unwrap()..=last.parse().unwrap()
        });
        let nodes = (!self.nodes.is_empty()).then(|| nodes.map(node).collect());
        let hint = Hint { nodes, is_preferred: self.preferred };
        if self.release {
            manager.retain(|pod, _| pod != self.pod);
        }
        let requests = self.requests();
        for (request, expected) in requests.containers.iter().zip(&self.results) {
            let got = match manager.allocate(&requests, &request.container, hint) {
                Ok(()) => held(manager, &self.pod, &request.container),
                Err(error) => format!("error: {error}"),
            };
            assert_eq!(got, *expected, "{self:?}");
        }
        let kinds = [MemoryKind::memory(), MemoryKind::huge_pages(2 << 20)];
        let free = manager
            .tables()
            .nodes()
            .iter()
            .flat_map(|node| kinds.iter().map(move |kind| (node, kind)).collect::<Vec<_>>());
        let free: Vec<u64> = free.map(|(node, kind)| manager.tables().table(node, kind).free).collect();
        assert_eq!(free, self.free, "{self:?}");
    }
}

#[test]
fn histories_are_those_of_the_kubelet() {
    let recorded = include_str!("kubelet-1.36.jsonl");
    for line in recorded.lines() {
        let history: RecordedHistory = serde_json::from_str(line).unwrap();
        let mut tables = unused(history.nodes);
        for table in tables.0.values_mut().flat_map(|node| node.kinds.values_mut()) {
            table.allocatable /= GIB;
            table.free /= GIB;
        }
        let mut manager =
            MemoryManager::new(tables, NodeTables::default(), MemoryAssignments::default(), PodLevel::Pod)
                .unwrap();
        history.steps.iter().for_each(|step| step.check(&mut manager));
    }
    assert!(recorded.lines().count() > 50);
}

/// The obvious way: what each node can give, from the assignments of all containers.
fn slow_free(count: u64, assignments: &MemoryAssignments, of_group: NumaNodes, kind: &MemoryKind) -> u64 {
    let total = unused(count).sum(of_group, kind, |table| table.allocatable);
    let pods = assignments.pods().flat_map(|(_, blocks)| blocks);
    let others = assignments.all().filter(|(pod, ..)| assignments.pod(pod).is_none());
    let blocks = pods.chain(others.flat_map(|(_, _, blocks)| blocks));
    let used: u64 = blocks.filter(|b| b.kind == *kind && b.nodes.is_subset(of_group)).map(|b| b.bytes).sum();
    total.checked_sub(used).expect("more memory is given than there is")
}

proptest! {
    // A history of admissions, starts and ends. No memory is given twice, none is lost, no node is in two
    // groups, and a restart changes nothing. A boot with other sizes keeps what fits, and nothing else.
    #[test]
    fn the_free_memory_is_what_no_container_has(
        steps in prop::collection::vec((0_u8..8, 0_u8..4, 0_u64..9, 1_u64..20, 0_u64..2, any::<bool>()), 1..30),
        count in 1_u64..5,
        more in prop::array::uniform4(-9000_i64..2000),
    ) {
        let mut manager = manager(count);
        let mut wholes = BTreeMap::new();
        for (action, uid, init, main, pages, restarts) in steps {
            let uid = format!("pod{uid}");
            if action == 0 {
                wholes.remove(&uid);
            }
            if action > 5 {
                let requests = PodMemoryRequests {
                    budget: Some(amounts(&format!("{}+{pages}", main + 2))),
                    ..pod(&uid, &format!("i:init={init} main={main} s:sidecar=1 log="))
                };
                let is_new = manager.assignments().all().all(|(pod, ..)| pod != uid);
                if is_new && manager.allocate_pod(&requests, ANY).is_ok() {
                    wholes.insert(uid, requests);
                }
                continue;
            }
            if wholes.contains_key(&uid) {
                continue;
            }
            let requests = pod(&uid, &format!("i:init={init} main={main}+{pages} s:sidecar=1"));
            match action {
                0 => manager.retain(|pod, _| pod != uid),
                1 => manager.start(&requests, "main"),
                _ => {
                    if admit(&mut manager, &requests).is_err() {
                        manager.retain(|pod, _| pod != uid);
                    }
                }
            }
            for (node, table) in &manager.tables().0 {
                for kind in table.kinds.keys() {
                    let free = manager.tables().sum(table.group, kind, |table| table.free);
                    prop_assert_eq!(free, slow_free(count, manager.assignments(), table.group, kind));
                }
                prop_assert!(table.group.iter().all(|other| manager.tables().0[&other].group == table.group));
                prop_assert!(table.group.contains(*node));
            }
            if restarts {
                let written = encode("Static", manager.tables(), manager.assignments(), true).unwrap();
                let (tables, assignments) = decode(&written, "Static").unwrap();
                let mut again = MemoryManager::new(unused(count), tables, assignments, PodLevel::Pod).unwrap();
                // The file does not have which parts of pods are shared.
                wholes.values().for_each(|requests| again.recognize(requests));
                prop_assert_eq!(again.assignments(), manager.assignments());
                manager = again;
            }
        }

        let memory = MemoryKind::memory();
        let machine = resized(&more[..usize::try_from(count).unwrap()]);
        let sum = |tables: &NodeTables, group, value: fn(MemoryTable) -> u64| tables.sum(group, &memory, value);
        let groups: Vec<NumaNodes> = manager.tables().0.values().map(|table| table.group).collect();
        let given = |group| sum(manager.tables(), group, |table| table.reserved);
        let fits = groups.iter().all(|group| given(*group) <= sum(&machine, *group, |table| table.allocatable));
        let (tables, assignments) = (manager.tables().clone(), manager.assignments().clone());
        let after = MemoryManager::new(machine.clone(), tables, assignments, PodLevel::Pod);
        prop_assert_eq!(after.is_ok(), fits, "{:?}", after);
        let Ok(after) = after else { return Ok(()) };
        prop_assert_eq!(after.assignments(), manager.assignments());
        for group in groups {
            let left = sum(&machine, group, |table| table.allocatable) - given(group);
            prop_assert_eq!(sum(after.tables(), group, |table| table.free), left);
        }
    }
}
