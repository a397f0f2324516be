use std::collections::{BTreeMap, BTreeSet};

use pod_sync_decisions::status::KillCause;
use pod_sync_machine::{CacheId, CoreId, CpuId, CpuPlace, NumaNode, SocketId};
use proptest::prelude::*;
use serde::Deserialize;

use super::*;
use crate::options::CpuGates;
use crate::test_machines::{
    DUAL_SOCKET, FOUR_CACHES, FOUR_NODES, FOUR_SOCKETS_IN_TWO_NODES, SINGLE_SOCKET_SMT, Shape, machine,
};

fn cpus(text: &str) -> CpuSet {
    text.parse().unwrap()
}

fn nodes(text: &str) -> Option<NumaNodes> {
    let numbers = cpus(text).into_iter().map(|cpu| NumaNode::try_from(u64::from(cpu.number())).unwrap());
    (!text.is_empty()).then(|| numbers.collect())
}

fn options(names: &str) -> CpuOptions {
    let pairs = names.split_whitespace().map(|name| (name.to_owned(), "true".to_owned()));
    CpuOptions::parse(&pairs.collect(), CpuGates { alpha: true, beta: true }).unwrap()
}

fn shared(cpus: CpuSet) -> CpuAssignments {
    CpuAssignments::new(cpus)
}

fn policy(shape: Shape, names: &str, reserved: &str) -> StaticPolicy {
    let reserved = ReservedCpus::These(cpus(reserved));
    StaticPolicy::new(machine(shape), options(names), reserved, PolicyName::None).unwrap()
}

#[test]
fn cpus_are_selected_by_the_options() {
    // Machine, options, reserved CPUs, shared CPUs, NUMA nodes, count, result.
    let table = [
        (SINGLE_SOCKET_SMT, "", "0", "0-7", "", 1, "4"),
        (SINGLE_SOCKET_SMT, "", "0", "0-7", "", 2, "1,5"),
        (SINGLE_SOCKET_SMT, "", "0", "0-7", "", 3, "1,4-5"),
        (SINGLE_SOCKET_SMT, "", "0", "0-7", "", 7, "1-7"),
        (SINGLE_SOCKET_SMT, "distribute-cpus-across-cores", "0", "0-7", "", 3, "1-3"),
        (DUAL_SOCKET, "", "0", "0-15", "", 8, "4-7,12-15"),
        (DUAL_SOCKET, "", "0", "0-15", "1", 2, "4,12"),
        (DUAL_SOCKET, "", "0", "0-15", "1", 10, "1,4-7,9,12-15"),
        (FOUR_NODES, "", "0", "0-31", "2-3", 4, "8-9,24-25"),
        (FOUR_NODES, "align-by-socket", "0", "0-31", "2", 10, "8-12,24-28"),
        (FOUR_NODES, "distribute-cpus-across-numa", "0", "0-31", "", 12, "4-6,8-10,20-22,24-26"),
        (FOUR_CACHES, "prefer-align-cpus-by-uncorecache", "0", "0-15", "", 4, "2-3,10-11"),
        (FOUR_CACHES, "prefer-align-cpus-by-uncorecache", "0", "0-15", "", 6, "2-4,10-12"),
        (FOUR_CACHES, "", "0", "0-15", "", 6, "1-3,9-11"),
        (FOUR_SOCKETS_IN_TWO_NODES, "", "0", "0-15", "", 4, "2-3,10-11"),
    ];
    for (shape, names, reserved, free, on_nodes, count, expected) in table {
        let policy = policy(shape, names, reserved);
        let got = policy.allocate(&shared(cpus(free)), count, nodes(on_nodes), &CpuSet::new());
        let got = got.map(|cpus| cpus.to_string());
        assert_eq!(
            got.as_deref(),
            Ok(expected),
            "{count} of {free} with {names:?} on {on_nodes:?} of {shape:?}"
        );
    }
}

/// A result that the allocator of kubelet 1.36 returned. `tests` of this crate were not involved.
#[derive(Debug, Deserialize)]
struct Recorded {
    shape: [i32; 5],
    kind: String,
    #[serde(default)]
    options: Vec<String>,
    #[serde(default)]
    reserved: String,
    free: String,
    #[serde(default)]
    reusable: String,
    count: usize,
    #[serde(default)]
    nodes: String,
    result: serde_json::Value,
}

impl Recorded {
    fn machine(&self) -> CpuTopology {
        let [sockets, nodes_per_socket, caches_per_node, cores_per_cache, threads] = self.shape;
        let nodes =
            if nodes_per_socket > 0 { sockets * nodes_per_socket } else { sockets / -nodes_per_socket };
        let [sockets, nodes, caches_per_node, cores_per_cache, threads] =
            [sockets, nodes, caches_per_node, cores_per_cache, threads].map(|n| u32::try_from(n).unwrap());
        machine(Shape { sockets, nodes, caches_per_node, cores_per_cache, threads })
    }

    /// Returns the policy, without the check that some CPUs are reserved.
    fn policy(&self) -> StaticPolicy {
        let reserved = cpus(&self.reserved);
        let options = options(&self.options.join(" "));
        StaticPolicy { topology: self.machine(), options, reserved, reserved_cores: CpuSet::new() }
    }

    fn check(&self) {
        let mut policy = self.policy();
        let free = shared(cpus(&self.free));
        if self.kind == "hints" {
            let hints = policy.hints_for(&policy.available(&free), &cpus(&self.reusable), self.count);
            let shown = hints
                .iter()
                .map(|hint| format!("{}{}", hint.nodes.unwrap(), if hint.is_preferred { "!" } else { "" }));
            assert_eq!(serde_json::json!(shown.collect::<Vec<_>>()), self.result, "{self:?}");
            return;
        }
        // The recorded function is below the check of whole cores. Its group size depends on the option.
        let distributes = policy.options.across_nodes;
        policy.options.full_cores &= distributes;
        let got = if distributes {
            policy.select(&policy.available(&free).union(&cpus(&self.reusable)), self.count, 0)
        } else {
            policy.allocate(&free, self.count, nodes(&self.nodes), &cpus(&self.reusable))
        };
        let got = got.map_or_else(|error| format!("error: {error}"), |cpus| cpus.to_string());
        let result = self.result.as_str().unwrap();
        if policy.options.across_cores && got != result {
            // The kubelet takes two CPUs of a core although another core of the socket is free.
            let cores = |text: &str| cores_of(policy.topology(), &cpus(text)).len();
            assert!(cores(&got) > cores(result), "{got} {self:?}");
            return;
        }
        assert_eq!(result, got, "{self:?}");
    }
}

/// Returns the cores that CPUs are on.
fn cores_of(topology: &CpuTopology, cpus: &CpuSet) -> BTreeSet<CoreId> {
    cpus.iter().map(|cpu| topology.places()[&cpu].core).collect()
}

#[test]
fn cores_are_shared_only_when_none_is_left_whatever_the_numbers_of_their_threads() {
    // kubernetes/kubernetes#140766: the threads of a core have adjacent numbers, and both were taken.
    let [adjacent, interleaved, mixed] = [
        &[[0, 1], [2, 3], [4, 5], [6, 7]],
        &[[0, 4], [1, 5], [2, 6], [3, 7]],
        &[[0, 7], [1, 2], [3, 6], [4, 5]],
    ];
    let table = [
        (adjacent, "0-7", 1, "0"),
        (adjacent, "0-7", 4, "0,2,4,6"),
        (adjacent, "0-7", 5, "0-2,4,6"),
        (adjacent, "1-3,6-7", 3, "1-2,6"),
        (adjacent, "2-3,5", 2, "2,5"),
        (interleaved, "0-7", 4, "0-3"),
        (interleaved, "1,5,7", 2, "1,7"),
        (mixed, "0-7", 4, "0-1,3-4"),
        (mixed, "0-7", 6, "0-5"),
    ];
    for (threads, free, count, expected) in table {
        let place = |core| CpuPlace {
            node: NumaNode::try_from(0_u64).unwrap(),
            socket: SocketId::new(0),
            cache: CacheId::new(0),
            core: CoreId::new(core),
        };
        let places = threads.iter().flat_map(|[first, second]| {
            [(CpuId::new(*first), place(*first)), (CpuId::new(*second), place(*first))]
        });
        let topology = CpuTopology::new(places.collect());
        let got = take_packed(&topology, &cpus(free), count, CpuOrder::Spread, false).unwrap();
        assert_eq!(got, cpus(expected), "{count} of {free} on {threads:?}");
    }
}

#[test]
fn results_are_those_of_the_kubelet() {
    let recorded = include_str!("kubelet-1.36.jsonl");
    // Another file of the same form, for a longer run.
    let more = std::env::var("QUINTLET_RECORDED_CPUS").map(|path| std::fs::read_to_string(path).unwrap());
    for line in recorded.lines().chain(more.unwrap_or_default().lines()) {
        serde_json::from_str::<Recorded>(line).unwrap().check();
    }
    assert!(recorded.lines().count() > 200);
}

#[test]
fn whole_cores_are_required_with_full_pcpus_only() {
    let policy = policy(SINGLE_SOCKET_SMT, "full-pcpus-only", "0");
    let allocate = |count, free: &str| policy.allocate(&shared(cpus(free)), count, None, &CpuSet::new());
    assert_eq!(allocate(2, "0-7"), Ok(cpus("1,5")));
    let odd = allocate(3, "0-7").unwrap_err();
    assert_eq!(odd.cause(), KillCause::SmtAlignment);
    assert_eq!(odd.message(), "SMT Alignment Error: requested 3 cpus not multiple cpus per core = 2");
    // CPU 4 shares its core with the reserved CPU 0.
    let few = allocate(8, "0-7").unwrap_err();
    assert_eq!(few.cause(), KillCause::SmtAlignment);
    let text = "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = 6, requested CPUs = 8, CPUs per core = 2";
    assert_eq!(few.message(), text);
    let shortage =
        self::policy(SINGLE_SOCKET_SMT, "", "0").allocate(&shared(cpus("0-2")), 3, None, &CpuSet::new());
    let shortage = shortage.unwrap_err();
    assert_eq!(shortage.cause(), KillCause::UnexpectedAdmission);
    let text = "Allocate failed due to not enough cpus available to satisfy request: requested=3, available=2, which is unexpected";
    assert_eq!(shortage.message(), text);
}

#[test]
fn reserved_cpus_are_on_the_lowest_cores_or_those_of_the_configuration() {
    let new =
        |reserved| StaticPolicy::new(machine(SINGLE_SOCKET_SMT), options(""), reserved, PolicyName::None);
    let reserved = |count| new(ReservedCpus::Count(count)).map(|policy| policy.reserved().to_string());
    assert_eq!(reserved(1).as_deref(), Ok("0"));
    assert_eq!(reserved(2).as_deref(), Ok("0,4"));
    assert_eq!(reserved(3).as_deref(), Ok("0-1,4"));
    assert_eq!(reserved(0), Err(PolicyError::NothingReserved));
    assert!(matches!(reserved(9), Err(PolicyError::Reservation(9, AllocateError::NotEnough { .. }))));
    assert_eq!(new(ReservedCpus::These(cpus("3,5"))).unwrap().allocatable(), cpus("0-2,4,6-7"));
    assert_eq!(new(ReservedCpus::These(cpus("8"))).err(), Some(PolicyError::UnknownCpu(CpuId::new(8))));
}

#[test]
fn assignments_that_do_not_fit_the_machine_are_refused() {
    let start = |names: &str, free: &str, held: &[(&str, &str)]| {
        let mut restored = shared(cpus(free));
        for (container, exclusive) in held {
            restored.restore("pod", container, cpus(exclusive));
        }
        let started = policy(SINGLE_SOCKET_SMT, names, "0,4").start(restored);
        started.map(|assignments| assignments.shared.to_string()).map_err(|error| error.to_string())
    };
    let strict = "strict-cpu-reservation";
    assert_eq!(start("", "", &[]).as_deref(), Ok("0-7"));
    assert_eq!(start(strict, "", &[]).as_deref(), Ok("1-3,5-7"));
    assert_eq!(start("", "0,2-7", &[("a", "1")]).as_deref(), Ok("0,2-7"));
    assert_eq!(start(strict, "2-3,5-7", &[("a", "1")]).as_deref(), Ok("2-3,5-7"));
    let refused = |names, free, held: &[(&str, &str)]| start(names, free, held).unwrap_err();
    assert_eq!(refused("", "", &[("a", "1")]), "default cpuset cannot be empty");
    let missing = "not all reserved cpus: \"0,4\" are present in defaultCpuSet: \"1-3,5-7\"";
    assert_eq!(refused("", "1-3,5-7", &[("a", "0,4")]), missing);
    let present = "some of strictly reserved cpus: \"0\" are present in defaultCpuSet: \"0-3,5-7\"";
    assert_eq!(refused(strict, "0-3,5-7", &[]), present);
    let overlap = "pod: pod, container: a cpuset: \"1-2\" overlaps with default cpuset \"0,2-7\"";
    assert_eq!(refused("", "0,2-7", &[("a", "1-2")]), overlap);
    let other = "current set of available CPUs \"0-7\" doesn't match with CPUs in state \"0-8\"";
    assert_eq!(refused("", "0-8", &[]), other);
    assert!(refused("", "0,2-7", &[]).contains("doesn't match"));
}

/// The obvious way without options: the CPUs in the order of their parts, and whole parts first.
fn slow(topology: &CpuTopology, free: &CpuSet, count: usize) -> CpuSet {
    let mut left: Vec<CpuId> = free.iter().collect();
    let mut taken: Vec<CpuId> = Vec::new();
    let place = |cpu: &CpuId| topology.places()[cpu];
    let sockets_first = topology.socket_count() < topology.nodes().len();
    type Part = fn(&pod_sync_machine::CpuPlace) -> i64;
    let node: Part = |p| i64::from(p.node.number());
    let socket: Part = |p| p.socket.number();
    let core: Part = |p| i64::from(p.core.number());
    let (outer, inner) = if sockets_first { (socket, node) } else { (node, socket) };
    for (part, path) in [(outer, vec![outer]), (inner, vec![outer, inner]), (core, vec![outer, inner, core])]
    {
        // The order of the parts is that of the start of this level.
        let start = left.clone();
        let rank = |cpu: &CpuId| -> Vec<(usize, i64)> {
            let free_in =
                |level: &Part| start.iter().filter(|c| level(&place(c)) == level(&place(cpu))).count();
            path.iter().map(|level| (free_in(level), level(&place(cpu)))).collect()
        };
        let parts: BTreeMap<_, i64> = start.iter().map(|cpu| (rank(cpu), part(&place(cpu)))).collect();
        for id in parts.into_values() {
            let whole: Vec<CpuId> =
                topology.cpus().into_iter().filter(|cpu| part(&place(cpu)) == id).collect();
            if whole.iter().all(|cpu| left.contains(cpu)) && count - taken.len() >= whole.len() {
                left.retain(|cpu| !whole.contains(cpu));
                taken.extend(whole);
            }
        }
    }
    let start = left.clone();
    let rank = |cpu: &CpuId| {
        let free_in = |level: Part| {
            (start.iter().filter(|c| level(&place(c)) == level(&place(cpu))).count(), level(&place(cpu)))
        };
        (free_in(outer), free_in(inner), free_in(core), *cpu)
    };
    left.sort_by_key(rank);
    let missing = count - taken.len();
    taken.extend(left.into_iter().take(missing));
    taken.into_iter().collect()
}

fn any_shape() -> impl Strategy<Value = Shape> {
    let parts = (1_u32..3, 1_u32..3, 1_u32..3, 1_u32..4, 1_u32..3, any::<bool>());
    parts.prop_map(|(sockets, per_socket, caches_per_node, cores_per_cache, threads, nodes_hold_sockets)| {
        let (sockets, nodes) = if nodes_hold_sockets {
            (sockets * per_socket, sockets)
        } else {
            (sockets, sockets * per_socket)
        };
        // A node that holds sockets has as many cores in each.
        let cores_per_cache = if nodes_hold_sockets { cores_per_cache * per_socket } else { cores_per_cache };
        Shape { sockets, nodes, caches_per_node, cores_per_cache, threads }
    })
}

fn any_options() -> impl Strategy<Value = CpuOptions> {
    prop::array::uniform6(any::<bool>()).prop_map(
        |[full_cores, across_nodes, by_socket, across_cores, strict_reservation, by_cache]| CpuOptions {
            full_cores,
            across_nodes,
            by_socket,
            across_cores: across_cores && !full_cores && !across_nodes && !by_cache,
            strict_reservation,
            by_cache: by_cache && !across_nodes,
        },
    )
}

proptest! {
    #[test]
    fn packed_cpus_are_those_of_a_slow_obvious_way(shape in any_shape(), bits: u64, count in 1_usize..12) {
        let topology = machine(shape);
        let free: CpuSet = topology.cpus().into_iter().filter(|cpu| bits >> (cpu.number() % 64) & 1 == 1).collect();
        prop_assume!(count <= free.len());
        let got = take_packed(&topology, &free, count, CpuOrder::Packed, false).unwrap();
        prop_assert_eq!(got, slow(&topology, &free, count));
    }

    /// With one socket, so that no socket is taken as a whole.
    #[test]
    fn spread_cpus_are_on_as_many_cores_as_possible(
        threads in prop::collection::vec(0_u32..6, 1..16),
        bits: u16,
        count in 1_usize..12,
    ) {
        let node = NumaNode::try_from(0_u64).unwrap();
        let place = |core: &u32| CpuPlace {
            node,
            socket: SocketId::new(0),
            cache: CacheId::new(0),
            core: CoreId::new(*core),
        };
        let all = (0_u32..).zip(&threads).map(|(cpu, core)| (CpuId::new(cpu), place(core)));
        let topology = CpuTopology::new(all.collect());
        let free: CpuSet =
            topology.cpus().into_iter().filter(|cpu| bits >> (cpu.number() % 16) & 1 == 1).collect();
        prop_assume!(count < free.len());
        let got = take_packed(&topology, &free, count, CpuOrder::Spread, false).unwrap();
        prop_assert_eq!(got.len(), count);
        prop_assert_eq!(cores_of(&topology, &got).len(), count.min(cores_of(&topology, &free).len()));
    }

    #[test]
    fn each_option_gives_as_many_free_cpus_as_requested(
        shape in any_shape(),
        bits: u64,
        count in 0_usize..20,
        options in any_options(),
        on in prop::option::of(0_u64..4),
    ) {
        let topology = machine(shape);
        prop_assume!(options.check(&topology, PolicyName::None).is_ok());
        let reserved = ReservedCpus::These(cpus("0"));
        let policy = StaticPolicy::new(topology, options, reserved, PolicyName::None).unwrap();
        let all = policy.topology().cpus();
        let free: CpuSet = all.into_iter().filter(|cpu| cpu.number() == 0 || bits >> (cpu.number() % 64) & 1 == 1).collect();
        let on = on.map(|node| NumaNodes::from(NumaNode::try_from(node).unwrap()));
        let assignments = shared(free.clone());
        match policy.allocate(&assignments, count, on, &CpuSet::new()) {
            Ok(got) => {
                prop_assert_eq!(got.len(), count);
                prop_assert!(got.is_subset(&policy.available(&assignments)));
            }
            Err(error) => {
                let is_smt = options.full_cores && error.cause() == KillCause::SmtAlignment;
                prop_assert!(is_smt || count > policy.available(&assignments).len(), "{}", error);
            }
        }
    }
}
