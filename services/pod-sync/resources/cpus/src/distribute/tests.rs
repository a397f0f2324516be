use super::*;
use crate::test_machines::{EIGHT_NODES, FOUR_NODES, machine};

fn cpus(text: &str) -> CpuSet {
    text.parse().unwrap()
}

fn distribution(group: usize) -> Distribution {
    let group = NonZeroUsize::new(group).unwrap();
    Distribution { group, order: CpuOrder::Packed, by_socket: false, least_nodes: 0 }
}

/// Returns the number of CPUs that each NUMA node gives.
fn per_node(topology: &CpuTopology, cpus: &CpuSet) -> Vec<usize> {
    let on = |node| cpus.iter().filter(|cpu| topology.places()[cpu].node == node).count();
    topology.nodes().iter().map(on).collect()
}

fn taken(topology: &CpuTopology, free: &str, count: usize, how: Distribution) -> Vec<usize> {
    per_node(topology, &take_distributed(topology, &cpus(free), count, how).unwrap())
}

#[test]
fn as_many_cpus_come_from_each_node_that_is_needed() {
    let topology = machine(FOUR_NODES);
    let all = "0-31";
    for (count, expected) in [
        (8, [8, 0, 0, 0]),
        (12, [6, 6, 0, 0]),
        (16, [8, 8, 0, 0]),
        (18, [6, 6, 6, 0]),
        (30, [8, 8, 7, 7]),
        (32, [8, 8, 8, 8]),
    ] {
        assert_eq!(taken(&topology, all, count, distribution(1)), expected, "{count}");
    }
    // In groups of a core; a number of CPUs that is none is packed.
    assert_eq!(taken(&topology, all, 10, distribution(2)), [6, 4, 0, 0]);
    assert_eq!(taken(&topology, all, 9, distribution(2)), [8, 1, 0, 0]);
}

#[test]
fn the_topology_managers_number_of_nodes_is_used_where_it_can_be() {
    // kubernetes/kubernetes#139430 and #139456: three nodes would do, and devices are on all four.
    let topology = machine(FOUR_NODES);
    let least = |least_nodes| Distribution { least_nodes, ..distribution(1) };
    assert_eq!(taken(&topology, "0-31", 20, least(0)), [7, 7, 6, 0]);
    assert_eq!(taken(&topology, "0-31", 20, least(4)), [5, 5, 5, 5]);
    assert_eq!(taken(&topology, "0-31", 20, least(2)), [7, 7, 6, 0]);
    // Two CPUs cannot be on three nodes, and only two have free CPUs.
    assert_eq!(taken(&topology, "0-31", 2, least(3)), [2, 0, 0, 0]);
    assert_eq!(taken(&topology, "0-7,16-23", 6, least(3)), [6, 0, 0, 0]);
}

#[test]
fn one_socket_is_used_with_align_by_socket() {
    // kubernetes/kubernetes#114642 and #141237: nodes 0 and 1 are on the first socket, and one of them is in
    // use.
    let topology = machine(FOUR_NODES);
    let free = "1-15,17-31";
    let unaligned = taken(&topology, free, 12, distribution(1));
    assert_eq!(unaligned.iter().filter(|count| **count > 0).count(), 2);
    let aligned = Distribution { by_socket: true, ..distribution(1) };
    for count in [9, 10, 12, 13, 14] {
        let counts = taken(&topology, free, count, aligned);
        let sockets = [counts[0] + counts[1], counts[2] + counts[3]];
        assert!(sockets.contains(&count), "{counts:?}");
    }
}

#[test]
fn a_remainder_that_fits_no_whole_core_does_not_hang() {
    // kubernetes/kubernetes#140730: three CPUs are left on each of two nodes, so that a group fits once on
    // each, not one and a half times.
    let topology = machine(FOUR_NODES);
    for free in
        ["0-2,4-6,8-11,12-13,24-27,28", "0,4,8,12,16,20,24,28,1-3,17-18", "0-2,16,4-6,20-21,8-9,24,12,28"]
    {
        for count in (2..=cpus(free).len()).step_by(2) {
            let got = take_distributed(&topology, &cpus(free), count, distribution(2)).unwrap();
            assert_eq!(got.len(), count, "{count} of {free}");
        }
    }
}

#[test]
fn the_best_nodes_of_many_are_not_overwritten_by_later_ones() {
    // The kubelet keeps a set of four or more nodes in memory that it writes the next set to, and fails with
    // "accounting error" or gives CPUs of other nodes than it selected.
    let topology = machine(EIGHT_NODES);
    assert_eq!(taken(&topology, "0-31", 16, distribution(1)), [4, 4, 4, 4, 0, 0, 0, 0]);
    assert_eq!(taken(&topology, "0-15,16,20,24,28", 14, distribution(1)), [4, 4, 3, 3, 0, 0, 0, 0]);
}

#[test]
fn deviations_are_rounded_to_thousandths() {
    let deviation = |numbers: &[usize]| standard_deviation(numbers.iter().copied());
    assert_eq!(deviation(&[4, 4, 4]), 0.0);
    assert_eq!(deviation(&[1, 2, 4]), 1.247);
    assert_eq!(deviation(&[]), 0.0);
}
