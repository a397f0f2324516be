//! Machines and pods for tests.

use std::collections::BTreeMap;
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_cpus::CpuGates;
use pod_sync_memory::MemoryKind;
use quintlet_testkit::pods::pod_json;
use serde_json::{Value, json};

use crate::args::{CpuPolicyName, MemoryPolicyName, PlacementSettings};

/// Memory of each NUMA node of [`write_machine`].
pub(crate) const NODE_BYTES: u64 = 4 << 30;

/// Writes the sysfs of a machine with this number of NUMA nodes, each of which has four CPUs on four cores
/// and [`NODE_BYTES`].
pub(crate) fn write_machine(sys: &Path, nodes: u32) {
    let write = |path: String, text: &str| {
        let path = sys.join("devices/system").join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, format!("{text}\n")).unwrap();
    };
    write("cpu/online".to_owned(), &format!("0-{}", nodes * 4 - 1));
    for node in 0..nodes {
        for cpu in node * 4..(node + 1) * 4 {
            write(format!("cpu/cpu{cpu}/topology/core_id"), &cpu.to_string());
            write(format!("cpu/cpu{cpu}/topology/physical_package_id"), &node.to_string());
            write(format!("cpu/cpu{cpu}/topology/thread_siblings_list"), &cpu.to_string());
            std::fs::create_dir_all(sys.join(format!("devices/system/node/node{node}/cpu{cpu}"))).unwrap();
        }
        write(format!("node/node{node}/cpulist"), &format!("{}-{}", node * 4, node * 4 + 3));
        write(format!("node/node{node}/meminfo"), &format!("Node {node} MemTotal: {} kB", NODE_BYTES >> 10));
        let distances: Vec<&str> = (0..nodes).map(|other| if other == node { "10" } else { "20" }).collect();
        write(format!("node/node{node}/distance"), &distances.join(" "));
    }
}

/// Returns the policies `static` and `Static` with one reserved CPU and 512 MiB on node 0.
pub(crate) fn settings(topology: &str, scope: &str) -> PlacementSettings {
    let half: u64 = 512 << 20;
    PlacementSettings {
        cpu_policy: CpuPolicyName::Static,
        cpu_options: BTreeMap::new(),
        cpu_gates: CpuGates { alpha: false, beta: true },
        reserved_cpus: "0".to_owned(),
        reserved_milli_cpus: Some(1000),
        memory_policy: MemoryPolicyName::Static,
        reserved_memory: [(0.try_into().unwrap(), [(MemoryKind::memory(), half)].into())].into(),
        memory_of_node: [(MemoryKind::memory(), half)].into(),
        topology_policy: topology.parse().unwrap(),
        topology_scope: scope.parse().unwrap(),
        topology_options: BTreeMap::new(),
        has_pod_level: false,
    }
}

/// Returns a Guaranteed container.
pub(crate) fn container(name: &str, cpu: &str, memory: &str) -> Value {
    let amounts = json!({"cpu": cpu, "memory": memory});
    json!({"name": name, "image": "i", "resources": {"requests": amounts, "limits": amounts}})
}

/// Returns a pod with these containers.
pub(crate) fn pod(uid: &str, init: Value, containers: Value) -> Pod {
    let mut pod = pod_json(json!({"initContainers": init, "containers": containers}));
    pod.metadata.uid = Some(uid.to_owned());
    pod
}

/// Returns a pod with one container.
pub(crate) fn single(uid: &str, cpu: &str, memory: &str) -> Pod {
    pod(uid, json!([]), json!([container("main", cpu, memory)]))
}
