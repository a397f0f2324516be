use pod_sync_machine::NodeMemory;
use proptest::prelude::*;
use serde::Deserialize;

use super::*;

fn node(number: u64) -> NumaNode {
    NumaNode::try_from(number).unwrap()
}

fn nodes(numbers: &str) -> NumaNodes {
    numbers.bytes().map(|digit| node(u64::from(digit - b'0'))).collect()
}

/// A machine with these distances between its nodes.
fn machine(distances: &[Vec<u64>]) -> Machine {
    let memory = |row: &Vec<u64>| {
        let distances = row.iter().enumerate().map(|(number, distance)| (node(number as u64), *distance));
        NodeMemory { distances: distances.collect(), ..NodeMemory::default() }
    };
    let nodes = distances.iter().enumerate().map(|(number, row)| (node(number as u64), memory(row)));
    Machine { nodes: nodes.collect(), ..Machine::default() }
}

fn flat(count: usize) -> Machine {
    machine(&vec![vec![10; count]; count])
}

fn policy(name: PolicyName, prefer_closest: bool, machine: &Machine) -> TopologyPolicy {
    TopologyPolicy::new(name, TopologyOptions { prefer_closest, ..TopologyOptions::default() }, machine)
        .unwrap()
}

/// Parses hints: `-` for any nodes, else words of node numbers, with `!` if preferred. `*` is a hint without
/// nodes.
fn hints(text: &str) -> Hints {
    if text == "-" {
        return Hints::AnyNodes;
    }
    let hint = |word: &str| {
        let numbers = word.trim_end_matches('!');
        Hint { nodes: (numbers != "*").then(|| nodes(numbers)), is_preferred: word.ends_with('!') }
    };
    Hints::OneOf(text.split_whitespace().map(hint).collect())
}

fn shown(merged: Merged) -> String {
    let nodes = merged.hint.nodes.map_or("*".to_owned(), |nodes| nodes.to_string());
    let preferred = if merged.hint.is_preferred { "!" } else { "" };
    let admitted = if merged.is_admitted { "" } else { " rejected" };
    format!("{nodes}{preferred}{admitted}")
}

const ALL: [PolicyName; 3] = [PolicyName::BestEffort, PolicyName::Restricted, PolicyName::SingleNumaNode];

#[test]
fn hints_are_merged_as_in_the_kubelet() {
    // Nodes of the machine, hints of the resources, results of best-effort, restricted and single-numa-node.
    let table: &[(usize, &[&str], [&str; 3])] = &[
        (2, &[], ["0-1!", "0-1!", "*!"]),
        (2, &["-"], ["0-1!", "0-1!", "*!"]),
        // A resource that no nodes can satisfy.
        (2, &[""], ["0-1", "0-1 rejected", "* rejected"]),
        (2, &["*!"], ["0-1!", "0-1!", "*!"]),
        (2, &["0!"], ["0!", "0!", "0!"]),
        (2, &["0!", "1!"], ["0-1", "0-1 rejected", "* rejected"]),
        (2, &["0! 1!"], ["0!", "0!", "0!"]),
        (2, &["0! 1!", "1! 01"], ["1!", "1!", "1!"]),
        (2, &["0! 1!", ""], ["0", "0 rejected", "* rejected"]),
        (2, &["0! 1!", "-"], ["0!", "0!", "0!"]),
        (2, &["0! 1!", "*!"], ["0!", "0!", "0!"]),
        (2, &["0! 01", "1! 01"], ["0", "0 rejected", "* rejected"]),
        (2, &["0! 01", "1! 01!"], ["0", "0 rejected", "* rejected"]),
        (2, &["01!", "01!"], ["0-1!", "0-1!", "* rejected"]),
        // A hint that is preferred is better than a narrower one that is not.
        (4, &["0 01!", "01!"], ["0-1!", "0-1!", "* rejected"]),
        // Equal nodes are preferred, an intersection is not.
        (4, &["01! 12!", "12! 23!"], ["1-2!", "1-2!", "* rejected"]),
        (4, &["012!", "123!"], ["1-2", "1-2 rejected", "* rejected"]),
        // Without preferred hints the number of nodes comes near to what the widest resource needs, from
        // below.
        (4, &["0 1 01 12", "01 12 0123"], ["0-1", "0-1 rejected", "* rejected"]),
        (4, &["0 1 2 3", "01 23"], ["0", "0 rejected", "* rejected"]),
        (4, &["0123", "0 12"], ["1-2", "1-2 rejected", "* rejected"]),
        (4, &["0123 123", "012 0123"], ["0-2", "0-2 rejected", "* rejected"]),
        (4, &["0!", "0 01! 0123"], ["0", "0 rejected", "* rejected"]),
        (1, &["0!", "0!"], ["0!", "0!", "*!"]),
    ];
    for (count, resources, expected) in table {
        let lists: Vec<Hints> = resources.iter().map(|text| hints(text)).collect();
        let got = ALL.map(|name| shown(policy(name, false, &flat(*count)).merge(&lists)));
        assert_eq!(got, *expected, "{resources:?} on {count} nodes");
    }
    let none = policy(PolicyName::None, false, &flat(2)).merge(&[hints("0!"), hints("1!")]);
    assert_eq!(shown(none), "*");
}

/// A hint in a record: a list of nodes, or `any`.
#[derive(Debug, Deserialize)]
struct RecordedHint {
    nodes: String,
    preferred: bool,
}

impl RecordedHint {
    fn hint(&self) -> Hint {
        let mut set = NumaNodes::EMPTY;
        for range in self.nodes.split(',').filter(|range| *range != "any") {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let numbers = first.parse::<u64>().unwrap()..=last.parse().unwrap();
            set = set.union(numbers.map(node).collect());
        }
        Hint { nodes: (self.nodes != "any").then_some(set), is_preferred: self.preferred }
    }
}

/// A merge by the policies of kubelet 1.36. A list that is null has no preference.
#[derive(Debug, Deserialize)]
struct RecordedMerge {
    nodes: usize,
    policy: String,
    closest: bool,
    #[serde(default)]
    distances: Vec<Vec<u64>>,
    hints: Option<Vec<Option<Vec<RecordedHint>>>>,
    result: RecordedHint,
    admit: bool,
}

#[test]
fn merges_are_those_of_the_kubelet() {
    let recorded = include_str!("kubelet-1.36.jsonl");
    for line in recorded.lines() {
        let record: RecordedMerge = serde_json::from_str(line).unwrap();
        let machine = if record.closest { machine(&record.distances) } else { flat(record.nodes) };
        let list = |list: &Option<Vec<RecordedHint>>| match list {
            None => Hints::AnyNodes,
            Some(hints) => Hints::OneOf(hints.iter().map(RecordedHint::hint).collect()),
        };
        let lists: Vec<Hints> = record.hints.iter().flatten().map(list).collect();
        let merged = policy(record.policy.parse().unwrap(), record.closest, &machine).merge(&lists);
        assert_eq!(merged, Merged { hint: record.result.hint(), is_admitted: record.admit }, "{record:?}");
    }
    assert!(recorded.lines().count() > 100);
}

#[test]
fn the_closest_nodes_are_preferred_with_the_option() {
    let rows = [[10, 11, 12, 12], [11, 10, 12, 12], [12, 12, 10, 11], [12, 12, 11, 10]];
    let near = machine(&rows.map(|row| row.to_vec()));
    let merged =
        |name, prefer_closest, text: &str| shown(policy(name, prefer_closest, &near).merge(&[hints(text)]));
    let (best, restricted) = (PolicyName::BestEffort, PolicyName::Restricted);
    // 0 and 2 are 12 apart, 2 and 3 are 11 apart.
    assert_eq!(merged(best, false, "02! 23!"), "0,2!");
    assert_eq!(merged(best, true, "02! 23!"), "2-3!");
    assert_eq!(merged(restricted, true, "02! 23!"), "2-3!");
    assert_eq!(merged(best, true, "02 23 13"), "2-3");
    // As far, and lower numbers; fewer nodes, and farther.
    assert_eq!(merged(best, true, "23! 01!"), "0-1!");
    assert_eq!(merged(best, true, "012! 13!"), "1,3!");
    assert_eq!(merged(PolicyName::SingleNumaNode, true, "3! 1!"), "1!");
}

#[test]
fn a_machine_needs_distances_and_not_too_many_nodes() {
    let new = |name, prefer_closest, max_nodes, machine: &Machine| {
        TopologyPolicy::new(name, TopologyOptions { prefer_closest, max_nodes }, machine).map(|_| ())
    };
    let unknown = Machine { nodes: [(node(0), NodeMemory::default())].into(), ..Machine::default() };
    for name in ALL {
        assert_eq!(new(name, true, 8, &unknown), Err(UnsupportedMachine::NoDistances));
        assert_eq!(new(name, false, 8, &unknown), Ok(()));
        assert_eq!(new(name, false, 8, &flat(9)), Err(UnsupportedMachine::TooManyNodes(8)));
        assert_eq!(new(name, false, 9, &flat(9)), Ok(()));
    }
    assert_eq!(new(PolicyName::None, true, 8, &flat(9)), Ok(()));
}

#[test]
fn names_are_those_of_the_configuration() {
    assert_eq!(PolicyName::ALL.map(|policy| policy.as_str().parse()), PolicyName::ALL.map(Ok));
    assert_eq!(TopologyScope::ALL.map(|scope| scope.as_str().parse()), TopologyScope::ALL.map(Ok));
    assert_eq!("single-numa-node".parse(), Ok(PolicyName::SingleNumaNode));
    assert_eq!("pod".parse(), Ok(TopologyScope::Pod));
    assert_eq!("x".parse::<PolicyName>().unwrap_err().to_string(), "unknown policy: \"x\"");
    assert_eq!("x".parse::<TopologyScope>().unwrap_err().to_string(), "unknown scope: \"x\"");
    let text = "Resources cannot be allocated with Topology locality";
    assert_eq!(TopologyAffinityError::Resources.to_string(), text);
}

#[test]
fn many_resources_on_a_wide_machine_are_merged_at_once() {
    // 255 hints of each of 12 resources: every combination would be 10^28 of them.
    let all = nodes("01234567");
    let list = Hints::OneOf(
        all.subsets().map(|nodes| Hint { nodes: Some(nodes), is_preferred: nodes.len() == 2 }).collect(),
    );
    let merged = policy(PolicyName::Restricted, true, &flat(8)).merge(&vec![list; 12]);
    assert_eq!(shown(merged), "0-1!");
}

/// The obvious way: each combination of hints, one after the other.
fn slow(name: PolicyName, prefer_closest: bool, machine: &Machine, lists: &[Hints]) -> Hint {
    let all: NumaNodes = machine.nodes.keys().copied().collect();
    let mut lists: Vec<Vec<Hint>> = lists.iter().map(Hints::normalized).collect();
    if name == PolicyName::SingleNumaNode {
        lists.iter_mut().for_each(|l| l.retain(|h| h.is_preferred && h.nodes.is_none_or(|n| n.len() == 1)));
    }
    let fewest = |list: &Vec<Hint>| list.iter().filter_map(|h| h.nodes).map(NumaNodes::len).min();
    let aim = lists.iter().filter_map(fewest).max().unwrap_or(0);
    let mut combinations: Vec<Vec<Hint>> = vec![vec![]];
    for list in &lists {
        combinations = combinations
            .iter()
            .flat_map(|combination| list.iter().map(|hint| [combination.as_slice(), &[*hint]].concat()))
            .collect();
    }
    let mut best: Option<(NumaNodes, bool)> = None;
    for combination in combinations {
        let with_nodes: Vec<NumaNodes> = combination.iter().filter_map(|hint| hint.nodes).collect();
        let merged = with_nodes.iter().fold(all, |merged, nodes| merged.intersection(*nodes));
        let is_preferred = combination.iter().all(|hint| hint.is_preferred)
            && with_nodes.windows(2).all(|two| two[0] == two[1]);
        if merged.is_empty() {
            continue;
        }
        let is_better = best.is_none_or(|best| {
            is_better(
                aim,
                prefer_closest && name != PolicyName::SingleNumaNode,
                machine,
                best,
                (merged, is_preferred),
            )
        });
        if is_better {
            best = Some((merged, is_preferred));
        }
    }
    let (nodes, is_preferred) = best.unwrap_or((all, false));
    let any_nodes = name == PolicyName::SingleNumaNode && nodes == all;
    Hint { nodes: (!any_nodes).then_some(nodes), is_preferred }
}

fn is_better(
    aim: usize,
    closest: bool,
    machine: &Machine,
    best: (NumaNodes, bool),
    new: (NumaNodes, bool),
) -> bool {
    let mean = |nodes: NumaNodes| {
        let pairs: Vec<u64> = nodes
            .iter()
            .flat_map(|a| nodes.iter().map(move |b| (a, b)))
            .map(|(a, b)| machine.nodes[&a].distances[&b])
            .collect();
        pairs.iter().sum::<u64>() as f64 / pairs.len() as f64
    };
    let fitter = match (closest && best.0.len() == new.0.len(), mean(best.0), mean(new.0)) {
        (true, best_mean, new_mean) if best_mean != new_mean => new_mean < best_mean,
        _ => (new.0.len(), new.0) < (best.0.len(), best.0),
    };
    let (best_len, new_len) = (best.0.len(), new.0.len());
    match (best.1, new.1) {
        (false, true) => true,
        (true, false) => false,
        (true, true) => fitter,
        (false, false) if best_len > aim => fitter,
        (false, false) if best_len == aim => new_len == aim && fitter,
        (false, false) if new_len > aim => false,
        (false, false) if new_len == aim || new_len > best_len => true,
        (false, false) => new_len == best_len && fitter,
    }
}

fn any_hints(count: u64) -> impl Strategy<Value = Hints> {
    let nodes = prop::collection::btree_set(0..count, 1..=count as usize)
        .prop_map(|set| set.into_iter().map(node).collect::<NumaNodes>());
    let hint = (prop::option::weighted(0.9, nodes), any::<bool>())
        .prop_map(|(nodes, is_preferred)| Hint { nodes, is_preferred });
    prop_oneof![
        1 => Just(Hints::AnyNodes),
        6 => prop::collection::vec(hint, 0..5).prop_map(Hints::OneOf),
    ]
}

proptest! {
    #[test]
    fn the_merge_is_that_of_every_combination_one_after_the_other(
        lists in prop::collection::vec(any_hints(4), 0..4),
        name in prop::sample::select(ALL.to_vec()),
        prefer_closest: bool,
        distances in prop::collection::vec(prop::collection::vec(10_u64..14, 4), 4),
    ) {
        let machine = machine(&distances);
        let merged = policy(name, prefer_closest, &machine).merge(&lists);
        prop_assert_eq!(merged.hint, slow(name, prefer_closest, &machine, &lists));
    }
}
