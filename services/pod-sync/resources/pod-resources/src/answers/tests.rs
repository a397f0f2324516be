//! The content of answers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pod_sync_devices::{Device, DeviceId, PluginOptions};
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::test_pods::{Checkpoints, DRIVER, GPU, view};

/// Returns devices as `resource=ID@node`.
fn shown(devices: &[v1::ContainerDevices]) -> Vec<String> {
    let show = |device: &v1::ContainerDevices| {
        let nodes = device.topology.iter().flat_map(|topology| &topology.nodes);
        let nodes: Vec<String> = nodes.map(|node| format!("@{}", node.id)).collect();
        format!("{}={}{}", device.resource_name, device.device_ids.join("+"), nodes.concat())
    };
    devices.iter().map(show).collect()
}

#[test]
fn a_pod_has_its_sidecars_and_containers_with_their_devices_and_no_init_container() {
    let mut checkpoints = Checkpoints::new();
    checkpoints.allocate("u1", "init", GPU, &[(-1, "g9")]);
    checkpoints.allocate("u1", "sidecar", GPU, &[(1, "g1")]);
    checkpoints.allocate("u1", "main", GPU, &[(-1, "g2"), (0, "g3"), (1, "g3")]);
    checkpoints.allocate("u1", "main", "example.com/nic", &[(-1, "n1")]);
    checkpoints.allocate("u2", "main", GPU, &[(-1, "g4")]);
    let (held, _dir) = checkpoints.restore();
    let spec = json!({
        "initContainers": [{"name": "init"}, {"name": "sidecar", "restartPolicy": "Always"}],
        "containers": [{"name": "main"}, {"name": "other"}],
    });
    let view = view("u1", "web", spec);
    let pod = held.of_pod(&view);
    assert_eq!((pod.namespace.as_str(), pod.name.as_str()), ("ns", "web"));
    let containers: Vec<_> = pod.containers.iter().map(|c| (c.name.as_str(), shown(&c.devices))).collect();
    let devices = |all: &str| all.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let gpus = "example.com/gpu=g2 example.com/gpu=g3@0 example.com/gpu=g3@1 example.com/nic=n1";
    let expected =
        [("sidecar", devices("example.com/gpu=g1@1")), ("main", devices(gpus)), ("other", Vec::new())];
    assert_eq!(containers, expected);
    assert!(pod.cpu_ids.is_empty() && pod.memory.is_empty());
    assert!(pod.containers.iter().all(|c| c.cpu_ids.is_empty() && c.memory.is_empty()));
    // The first version has no sidecars and no topology.
    let pod = held.of_pod_alpha(&view);
    let containers: Vec<_> = pod.containers.iter().map(|c| (c.name.as_str(), c.devices.len())).collect();
    assert_eq!(containers, [("main", 4), ("other", 0)]);
    assert_eq!(pod.containers[0].devices[0].device_ids, ["g2"]);
}

#[test]
fn a_container_has_the_devices_of_its_requests_from_claims_that_are_prepared_for_its_pod() {
    let mut checkpoints = Checkpoints::new();
    let devices = [("d1", "first", "a.com/nic=1"), ("d2", "second", "a.com/nic=2")];
    checkpoints.prepare("u1", "nics", &devices);
    checkpoints.prepare("u2", "foreign", &[("d3", "first", "a.com/nic=3")]);
    let (held, _dir) = checkpoints.restore();
    let spec = json!({
        "resourceClaims": [
            {"name": "nics", "resourceClaimName": "nics"},
            {"name": "foreign", "resourceClaimName": "foreign"},
        ],
        "containers": [
            {"name": "one", "resources": {"claims": [{"name": "nics", "request": "second"}]}},
            {"name": "all", "resources": {"claims": [{"name": "nics"}, {"name": "nics", "request": "first"}]}},
            {"name": "none"},
            {"name": "foreign", "resources": {"claims": [{"name": "nics"}, {"name": "foreign"}]}},
        ],
    });
    let pod = held.of_pod(&view("u1", "web", spec));
    let shown = |container: &v1::ContainerResources| {
        let resources = container.dynamic_resources.iter().flat_map(|claim| {
            claim.claim_resources.iter().map(|device| {
                assert_eq!((device.driver_name.as_str(), device.pool_name.as_str()), (DRIVER, "pool"));
                let cdi: Vec<&str> = device.cdi_devices.iter().map(|device| device.name.as_str()).collect();
                let (namespace, name) = (&claim.claim_namespace, &claim.claim_name);
                format!("{namespace}/{name} {} {}", device.device_name, cdi.join("+"))
            })
        });
        resources.collect::<Vec<_>>()
    };
    let containers: Vec<_> = pod.containers.iter().map(shown).collect();
    // Each device has its own CDI devices; the kubelet adds those of the device before.
    let (first, second) = ("ns/nics d1 a.com/nic=1", "ns/nics d2 a.com/nic=2");
    assert_eq!(containers, [vec![second], vec![first, second], vec![], vec![]]);
}

#[derive(Debug)]
struct TestManagers;

fn block(bytes: u64, numa_nodes: &[i64]) -> MemoryBlock {
    MemoryBlock { kind: "memory".to_owned(), bytes, numa_nodes: numa_nodes.to_vec() }
}

impl ExclusiveResources for TestManagers {
    fn cpus(&self, pod: &str, container: &str) -> Vec<i64> {
        if (pod, container) == ("u1", "main") { vec![2, 3] } else { Vec::new() }
    }

    fn memory(&self, pod: &str, container: &str) -> Vec<MemoryBlock> {
        if (pod, container) == ("u1", "main") { vec![block(5, &[0, 1])] } else { Vec::new() }
    }

    fn pod_cpus(&self, _: &str) -> Vec<i64> {
        vec![2, 3, 4]
    }

    fn pod_memory(&self, _: &str) -> Vec<MemoryBlock> {
        vec![block(7, &[0])]
    }

    fn allocatable_cpus(&self) -> Vec<i64> {
        vec![1, 2, 3, 4]
    }

    fn allocatable_memory(&self) -> Vec<MemoryBlock> {
        vec![block(9, &[1])]
    }
}

#[test]
fn exclusive_cpus_and_memory_are_those_of_the_managers() {
    let mut checkpoints = Checkpoints::new();
    checkpoints.exclusive = Arc::new(TestManagers);
    let (held, _dir) = checkpoints.restore();
    let pod = held.of_pod(&view("u1", "web", json!({"containers": [{"name": "main"}, {"name": "other"}]})));
    let shown = |memory: &[v1::ContainerMemory]| {
        let show = |block: &v1::ContainerMemory| {
            let nodes = block.topology.iter().flat_map(|topology| &topology.nodes);
            (block.memory_type.clone(), block.size, nodes.map(|node| node.id).collect::<Vec<_>>())
        };
        memory.iter().map(show).collect::<Vec<_>>()
    };
    let memory = |bytes, nodes: &[i64]| vec![("memory".to_owned(), bytes, nodes.to_vec())];
    let [main, other] = &pod.containers[..] else { panic!("two containers") };
    assert_eq!((&main.cpu_ids[..], shown(&main.memory)), (&[2, 3][..], memory(5, &[0, 1])));
    assert!(other.cpu_ids.is_empty() && other.memory.is_empty());
    assert_eq!((&pod.cpu_ids[..], shown(&pod.memory)), (&[2, 3, 4][..], memory(7, &[0])));
    let allocatable = held.allocatable().unwrap();
    assert_eq!((&allocatable.cpu_ids[..], shown(&allocatable.memory)), (&[1, 2, 3, 4][..], memory(9, &[1])));
}

#[test]
fn healthy_devices_are_allocatable_with_all_their_numa_nodes() {
    let mut inventory = DeviceInventory::default();
    let number = inventory.register(GPU, PluginOptions::default(), Duration::ZERO);
    assert!(healthy_devices(&inventory, GPU).is_empty(), "nothing is listed");
    let device = |is_healthy, nodes: &[i64]| Device { is_healthy, numa_nodes: nodes.to_vec() };
    let listed = [
        (DeviceId::from("a"), device(true, &[])),
        (DeviceId::from("b"), device(false, &[0])),
        (DeviceId::from("c"), device(true, &[0, 1])),
    ];
    inventory.list(GPU, number, listed.into()).unwrap();
    let devices = shown(&healthy_devices(&inventory, GPU));
    assert_eq!(devices, ["example.com/gpu=a", "example.com/gpu=c@0", "example.com/gpu=c@1"]);
    assert!(healthy_devices(&inventory, "example.com/other").is_empty());
}

#[test]
fn an_answer_ends_at_its_limit() {
    let pod = |bytes: usize| v1::PodResources { name: "n".repeat(bytes), ..v1::PodResources::default() };
    let half = MOST_BYTES / 2;
    assert_eq!(bounded([pod(half - 100), pod(half - 100)].into_iter()).map(|pods| pods.len()), Ok(2));
    let mut made = 0;
    let endless = std::iter::from_fn(|| {
        made += 1;
        Some(pod(half))
    });
    assert_eq!(bounded(endless).map(|pods| pods.len()), Err(AnswerTooLarge));
    assert_eq!(made, 2);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_device_that_a_container_holds_is_in_its_entry_and_no_other(
        held in prop::collection::vec((0..3_usize, 0..2_usize, 0..2_usize, -1..2_i64, "[a-z]"), 0..20),
    ) {
        let resources = [GPU, "example.com/nic"];
        let mut expected = BTreeMap::<(usize, usize), BTreeSet<String>>::new();
        let mut allocations = BTreeMap::<_, Vec<(i64, String)>>::new();
        for (pod, container, resource, node, id) in held {
            let of_resource = allocations.entry((pod, container, resource)).or_default();
            if !of_resource.contains(&(node, id.clone())) {
                of_resource.push((node, id.clone()));
            }
            let node = if node < 0 { String::new() } else { format!("@{node}") };
            let all = expected.entry((pod, container)).or_default();
            all.insert(format!("{}={id}{node}", resources[resource]));
        }
        let mut checkpoints = Checkpoints::new();
        for ((pod, container, resource), devices) in &allocations {
            let devices: Vec<_> = devices.iter().map(|(node, id)| (*node, id.as_str())).collect();
            let (pod, container) = (format!("u{pod}"), format!("c{container}"));
            checkpoints.allocate(&pod, &container, resources[*resource], &devices);
        }
        let (held, _dir) = checkpoints.restore();
        for pod in 0..3 {
            let spec = json!({"containers": [{"name": "c0"}, {"name": "c1"}]});
            let answer = held.of_pod(&view(&format!("u{pod}"), "p", spec));
            for (number, container) in answer.containers.iter().enumerate() {
                let all = shown(&container.devices);
                let unique: BTreeSet<String> = all.iter().cloned().collect();
                prop_assert_eq!(all.len(), unique.len());
                prop_assert_eq!(unique, expected.get(&(pod, number)).cloned().unwrap_or_default());
            }
        }
    }
}
