//! Tables and histories of the inventory.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const GPU: &str = "a.com/gpu";
const AT: Duration = Duration::from_secs(1000);

fn ids(names: &str) -> DeviceIds {
    names.split_whitespace().map(DeviceId::from).collect()
}

// Names with a leading ! are unhealthy.
fn listed(names: &str) -> BTreeMap<DeviceId, Device> {
    let device = |name: &str| {
        let id = DeviceId::from(name.trim_start_matches('!'));
        (id, Device { is_healthy: !name.starts_with('!'), numa_nodes: Vec::new() })
    };
    names.split_whitespace().map(device).collect()
}

fn serving(names: &str) -> DeviceInventory {
    let mut inventory = DeviceInventory::default();
    let number = inventory.register(GPU, PluginOptions::default(), AT);
    inventory.list(GPU, number, listed(names)).unwrap();
    inventory
}

fn give(inventory: &mut DeviceInventory, pod: &str, names: &str) {
    let reservation = inventory.reserve(GPU, ids(names));
    inventory.commit(reservation, pod, "main", Vec::new());
}

fn request<'a>(pod: &'a str, required: usize, reusable: &'a DeviceIds) -> DeviceRequest<'a> {
    DeviceRequest {
        pod,
        container: "main",
        resource: GPU,
        required,
        reusable,
        is_admitted: false,
        nodes: None,
    }
}

fn decide(inventory: &DeviceInventory, pod: &str, required: usize, now: Duration) -> String {
    let none = DeviceIds::new();
    let decided = inventory.decide(&request(pod, required, &none), Preference::None, now);
    match decided {
        Ok(DeviceDecision::Nothing) => "nothing".to_owned(),
        Ok(DeviceDecision::Wait { until }) => format!("wait until {}", until.as_secs()),
        Ok(DeviceDecision::Query(..)) => "query".to_owned(),
        Ok(DeviceDecision::Allocate(_, ids)) => {
            ids.iter().map(DeviceId::as_str).collect::<Vec<_>>().join(" ")
        }
        Err(error) => error.to_string(),
    }
}

#[test]
fn each_state_of_a_resource_has_its_decision_or_the_kubelets_text() {
    let mut held = serving("a b c");
    give(&mut held, "p", "a");
    let mut held_unhealthy = serving("a b");
    give(&mut held_unhealthy, "p", "a");
    let number = held_unhealthy.registration(GPU).unwrap().0;
    held_unhealthy.list(GPU, number, listed("!a b")).unwrap();
    let mut gone = serving("a b");
    give(&mut gone, "p", "a");
    let number = gone.registration(GPU).unwrap().0;
    gone.list(GPU, number, listed("b")).unwrap();
    // Inventory, pod, required, decision.
    let table = [
        (DeviceInventory::default(), "p", 1, "nothing"),
        (serving("a b"), "p", 0, "nothing"),
        (serving("b a"), "p", 1, "a"),
        (serving("a b"), "p", 2, "a b"),
        (serving("!a b"), "p", 1, "b"),
        (
            serving("!a b"),
            "p",
            2,
            "requested number of devices unavailable for a.com/gpu. Requested: 2, Available: 1",
        ),
        (serving("!a"), "p", 1, "no healthy devices present; cannot allocate unhealthy devices a.com/gpu"),
        (serving(""), "p", 1, "no healthy devices present; cannot allocate unhealthy devices a.com/gpu"),
        (
            held_unhealthy,
            "p",
            1,
            "previously allocated devices are no longer healthy; cannot allocate unhealthy devices a.com/gpu",
        ),
        (
            gone,
            "p",
            1,
            "previously allocated devices are no longer healthy; cannot allocate unhealthy devices a.com/gpu",
        ),
    ];
    for (inventory, pod, required, expected) in table {
        assert_eq!(decide(&inventory, pod, required, AT), expected);
    }
    assert_eq!(decide(&held, "p", 1, AT), "nothing");
    assert_eq!(decide(&held, "q", 1, AT), "b");
    assert_eq!(
        decide(&held, "p", 2, AT),
        r#"pod "p" container "main" changed request for resource "a.com/gpu" from 1 to 2"#
    );
}

#[test]
fn a_pod_waits_for_its_plugin_until_the_grace_period_is_over() {
    let mut before = serving("a b");
    give(&mut before, "p", "a");
    let mut inventory = DeviceInventory::restored(before.checkpoint(), AT);
    assert_eq!(inventory.capacity()[GPU], ResourceCount::default());
    assert_eq!(inventory.allocatable_for("new"), [(GPU.to_owned(), usize::MAX)].into());
    assert_eq!(decide(&inventory, "p", 1, AT), "wait until 1300");
    assert_eq!(decide(&inventory, "new", 1, AT), "wait until 1300");
    // The containers of an admitted pod may be running, and it has its devices.
    let none = DeviceIds::new();
    let admitted = DeviceRequest { is_admitted: true, ..request("p", 1, &none) };
    assert_eq!(inventory.decide(&admitted, Preference::None, AT), Ok(DeviceDecision::Nothing));
    let later = AT + GRACE;
    assert_eq!(decide(&inventory, "p", 1, later), "cannot allocate unregistered device a.com/gpu");
    let number = inventory.register(GPU, PluginOptions::default(), AT);
    assert_eq!(decide(&inventory, "p", 1, AT), "wait until 1300");
    assert_eq!(inventory.list(GPU, number, listed("a b")), Some(["p".to_owned()].into()));
    assert_eq!(decide(&inventory, "p", 1, AT), "nothing");
    assert_eq!(decide(&inventory, "new", 1, AT), "b");
}

#[test]
fn the_devices_of_a_stopped_plugin_stay_in_the_capacity_for_the_grace_period() {
    let mut inventory = serving("a !b");
    let count = |capacity, allocatable| ResourceCount { capacity, allocatable };
    assert_eq!(inventory.capacity()[GPU], count(2, 1));
    let number = inventory.registration(GPU).unwrap().0;
    assert!(inventory.stop(GPU, number, AT));
    assert!(!inventory.stop(GPU, number, AT));
    assert_eq!(inventory.capacity()[GPU], count(2, 0));
    assert_eq!(inventory.next_expiry(), Some(AT + GRACE));
    assert!(!inventory.expire(AT + GRACE));
    assert!(inventory.expire(AT + GRACE + Duration::from_secs(1)));
    assert_eq!(inventory.capacity()[GPU], count(0, 0));
    assert!(inventory.checkpoint().registered.is_empty());
    let late = AT + GRACE * 2;
    assert_eq!(decide(&inventory, "p", 1, late), "cannot allocate unregistered device a.com/gpu");
    assert_eq!(inventory.next_expiry(), None);
    let number = inventory.register(GPU, PluginOptions::default(), AT);
    inventory.list(GPU, number, listed("a")).unwrap();
    assert_eq!(inventory.capacity()[GPU], count(1, 1));
}

#[test]
fn the_health_of_held_devices_follows_the_plugin_and_its_absence() {
    let mut inventory = serving("a b c d");
    give(&mut inventory, "p", "a b c");
    let shown = |inventory: &DeviceInventory| {
        let health = inventory.health("p");
        let devices = health["main"][GPU].iter().map(|(id, health)| format!("{id} {health:?}"));
        devices.collect::<Vec<_>>().join(", ")
    };
    let number = inventory.registration(GPU).unwrap().0;
    inventory.list(GPU, number, listed("a !b d")).unwrap();
    assert_eq!(shown(&inventory), "a Healthy, b Unhealthy, c Unhealthy");
    inventory.stop(GPU, number, AT);
    assert_eq!(shown(&inventory), "a Unchanged, b Unchanged, c Unchanged");
    let restored = DeviceInventory::restored(inventory.checkpoint(), AT);
    assert_eq!(shown(&restored), "a Unchanged, b Unchanged, c Unchanged");
    inventory.expire(AT + GRACE * 2);
    assert_eq!(shown(&inventory), "a Unknown, b Unknown, c Unknown");
    assert!(inventory.health("q").is_empty());
}

#[test]
fn a_list_or_an_end_of_a_replaced_registration_is_ignored() {
    let mut inventory = DeviceInventory::default();
    let first = inventory.register(GPU, PluginOptions::default(), AT);
    let second = inventory.register(GPU, PluginOptions::default(), AT);
    assert_eq!(inventory.list(GPU, first, listed("x")), None);
    assert!(inventory.list(GPU, second, listed("a")).is_some());
    assert!(!inventory.stop(GPU, first, AT));
    assert_eq!(decide(&inventory, "p", 1, AT), "a");
    // A plugin that registers again keeps its devices in the capacity, and none is healthy before its list.
    inventory.register(GPU, PluginOptions::default(), AT);
    assert_eq!(inventory.capacity()[GPU], ResourceCount { capacity: 1, allocatable: 0 });
}

#[test]
fn pre_start_is_needed_by_the_last_options() {
    let mut inventory = DeviceInventory::default();
    assert_eq!(inventory.pre_start(GPU), PreStartNeed::None);
    for (pre_start, serving, stopped) in [
        (true, PreStartNeed::Call, PreStartNeed::PluginAway),
        (false, PreStartNeed::None, PreStartNeed::None),
    ] {
        let number = inventory.register(GPU, PluginOptions { pre_start, preferences: false }, AT);
        assert_eq!(inventory.pre_start(GPU), serving);
        inventory.list(GPU, number, listed("a")).unwrap();
        assert_eq!(inventory.pre_start(GPU), serving);
        inventory.stop(GPU, number, AT);
        assert_eq!(inventory.pre_start(GPU), stopped);
    }
    let restored = DeviceInventory::restored(inventory.checkpoint(), AT);
    assert_eq!(restored.pre_start(GPU), PreStartNeed::None);
}

#[test]
fn only_pods_whose_devices_changed_their_health_are_reported() {
    let mut inventory = serving("a b c");
    give(&mut inventory, "p", "a");
    give(&mut inventory, "q", "b");
    let number = inventory.registration(GPU).unwrap().0;
    let mut list = |names: &str| inventory.list(GPU, number, listed(names)).unwrap();
    assert_eq!(list("a !b !c"), ["q".to_owned()].into());
    assert_eq!(list("a !b c"), BTreeSet::new());
    assert_eq!(list("!b c"), ["p".to_owned()].into());
    assert_eq!(list("a b c"), ["p".to_owned(), "q".to_owned()].into());
}

#[test]
fn devices_of_two_resources_with_one_id_have_a_health_of_their_own() {
    // kubernetes/kubernetes#140323: the pod of the other resource was updated.
    const NIC: &str = "a.com/nic";
    let mut inventory = serving("d0");
    give(&mut inventory, "p", "d0");
    let nic = inventory.register(NIC, PluginOptions::default(), AT);
    inventory.list(NIC, nic, listed("d0")).unwrap();
    let reservation = inventory.reserve(NIC, ids("d0"));
    inventory.commit(reservation, "q", "main", Vec::new());
    assert_eq!(inventory.list(NIC, nic, listed("!d0")).unwrap(), ["q".to_owned()].into());
    let gpu = inventory.registration(GPU).unwrap().0;
    assert_eq!(inventory.list(GPU, gpu, listed("!d0")).unwrap(), ["p".to_owned()].into());
}

#[test]
fn a_device_is_reserved_during_its_call_whatever_changes_meanwhile() {
    // kubernetes/kubernetes#137534: the devices in use were computed from the records while a call was in
    // flight, and another pod got the same device.
    let mut inventory = serving("a b c");
    give(&mut inventory, "q", "c");
    let reservation = inventory.reserve(GPU, ids("a"));
    let check = |inventory: &DeviceInventory, free: &str| {
        assert_eq!(decide(inventory, "r", 1, AT), free.split_whitespace().next().unwrap());
        let available = free.split_whitespace().count();
        let text = format!(
            "requested number of devices unavailable for a.com/gpu. Requested: 3, Available: {available}"
        );
        assert_eq!(decide(inventory, "r", 3, AT), text);
    };
    check(&inventory, "b");
    assert!(inventory.release("q"));
    check(&inventory, "b c");
    let number = inventory.registration(GPU).unwrap().0;
    inventory.list(GPU, number, listed("a !b c")).unwrap();
    check(&inventory, "c");
    let number = inventory.register(GPU, PluginOptions::default(), AT);
    inventory.list(GPU, number, listed("a b c")).unwrap();
    check(&inventory, "b c");
    inventory.commit(reservation, "p", "main", Vec::new());
    check(&inventory, "b c");
    let reservation = inventory.reserve(GPU, ids("b"));
    check(&inventory, "c");
    inventory.cancel(reservation);
    check(&inventory, "b c");
}

#[test]
fn a_device_is_recorded_below_each_of_its_numa_nodes() {
    let mut inventory = DeviceInventory::default();
    let number = inventory.register(GPU, PluginOptions::default(), AT);
    let device = |numa_nodes| Device { is_healthy: true, numa_nodes };
    let devices = [("a", vec![0, 1]), ("b", vec![1]), ("c", vec![])];
    let devices = devices.map(|(id, nodes)| (DeviceId::from(id), device(nodes))).into();
    inventory.list(GPU, number, devices).unwrap();
    give(&mut inventory, "p", "a b c");
    let per_node = &inventory.held().container("p", "main").unwrap()[GPU].devices;
    let names: Vec<_> = per_node.iter().map(|(node, ids)| (*node, ids.len())).collect();
    assert_eq!(names, [(-1, 1), (0, 1), (1, 2)]);
    assert_eq!(inventory.allocatable_for("p")[GPU], 3);
    let number = inventory.registration(GPU).unwrap().0;
    inventory.list(GPU, number, listed("a")).unwrap();
    assert_eq!((inventory.allocatable_for("p")[GPU], inventory.allocatable_for("q")[GPU]), (3, 1));
    inventory.stop(GPU, number, AT);
    inventory.expire(AT + GRACE * 2);
    assert_eq!((inventory.allocatable_for("p")[GPU], inventory.allocatable_for("q")[GPU]), (3, 0));
}

#[derive(Debug, Clone)]
enum Action {
    Admit { pod: u8, required: usize },
    Finish { pod: u8, is_ok: bool },
    Release(u8),
    List(Vec<bool>),
    Stop,
    Restart,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        4 => (0..6_u8, 1..4_usize).prop_map(|(pod, required)| Action::Admit { pod, required }),
        4 => (0..6_u8, any::<bool>()).prop_map(|(pod, is_ok)| Action::Finish { pod, is_ok }),
        2 => (0..6_u8).prop_map(Action::Release),
        3 => prop::collection::vec(any::<bool>(), 0..7).prop_map(Action::List),
        1 => Just(Action::Stop),
        1 => Just(Action::Restart),
    ]
}

proptest! {
    /// Pods come and go while the plugin lists, stops and this process restarts.
    #[test]
    fn no_device_is_given_to_two_pods_and_none_is_lost(actions in prop::collection::vec(action(), 0..60)) {
        let mut inventory = DeviceInventory::default();
        // An obvious list of holders, kept beside it.
        let mut holders: HashMap<u8, DeviceIds> = HashMap::new();
        let mut in_flight: HashMap<u8, (Reservation, DeviceIds)> = HashMap::new();
        let none = DeviceIds::new();
        for action in actions {
            match action {
                Action::Admit { pod, required } if !in_flight.contains_key(&pod) && !holders.contains_key(&pod) => {
                    let name = pod.to_string();
                    let decided = inventory.decide(&request(&name, required, &none), Preference::None, AT);
                    if let Ok(DeviceDecision::Allocate(_, ids)) = decided {
                        prop_assert_eq!(ids.len(), required);
                        let taken = holders.values().chain(in_flight.values().map(|(_, ids)| ids));
                        for taken in taken {
                            prop_assert!(ids.is_disjoint(taken), "{:?} {:?}", ids, taken);
                        }
                        in_flight.insert(pod, (inventory.reserve(GPU, ids.clone()), ids));
                    }
                }
                Action::Finish { pod, is_ok } => if let Some((reservation, ids)) = in_flight.remove(&pod) {
                    if is_ok {
                        inventory.commit(reservation, &pod.to_string(), "main", Vec::new());
                        holders.insert(pod, ids);
                    } else {
                        inventory.cancel(reservation);
                    }
                },
                Action::Release(pod) => {
                    prop_assert_eq!(inventory.release(&pod.to_string()), holders.remove(&pod).is_some());
                }
                Action::List(healthy) => {
                    let number = match inventory.registration(GPU) {
                        Some((number, _)) => number,
                        None => inventory.register(GPU, PluginOptions::default(), AT),
                    };
                    let device = |(n, is_healthy)| {
                        (DeviceId::from(format!("d{n}")), Device { is_healthy, numa_nodes: Vec::new() })
                    };
                    inventory.list(GPU, number, healthy.into_iter().enumerate().map(device).collect()).unwrap();
                }
                Action::Stop => if let Some((number, _)) = inventory.registration(GPU) {
                    inventory.stop(GPU, number, AT);
                },
                Action::Restart => {
                    inventory = DeviceInventory::restored(inventory.checkpoint(), AT);
                    in_flight.clear();
                }
                Action::Admit { .. } => {}
            }
            for (pod, ids) in &holders {
                let held = inventory.held().held(&pod.to_string(), "main", GPU);
                prop_assert_eq!(held.as_ref(), Some(ids));
            }
        }
        // Everything ends: all devices are free again.
        for (reservation, _) in in_flight.into_values() {
            inventory.cancel(reservation);
        }
        for pod in holders.into_keys() {
            inventory.release(&pod.to_string());
        }
        let number = inventory.register(GPU, PluginOptions::default(), AT);
        inventory.list(GPU, number, listed("d0 d1 d2 d3")).unwrap();
        prop_assert_eq!(decide(&inventory, "last", 4, AT), "d0 d1 d2 d3");
    }
}
