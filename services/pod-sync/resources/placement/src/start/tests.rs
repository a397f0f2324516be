//! What a node starts with, and what keeps it from starting.

use std::path::PathBuf;

use pod_sync_topology::Hints;

use super::*;
use crate::counts::AdmissionCounts;
use crate::tests::{settings, single, write_machine};

struct Machines(tempfile::TempDir);

impl Machines {
    fn new(nodes: u32) -> Self {
        let temp = tempfile::tempdir().unwrap();
        write_machine(&temp.path().join("sys"), nodes);
        Self(temp)
    }

    fn sys(&self) -> PathBuf {
        self.0.path().join("sys")
    }

    fn start(&self, settings: &PlacementSettings) -> Result<StartedPlacement, String> {
        start(settings, self.0.path(), &self.sys()).map_err(|error| quintlet_kit::error_chain(&error))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }
}

fn off() -> PlacementSettings {
    let (cpu_policy, memory_policy) = (CpuPolicyName::None, MemoryPolicyName::None);
    PlacementSettings { cpu_policy, memory_policy, ..settings("none", "container") }
}

#[test]
fn the_state_files_of_a_new_node_are_those_of_a_kubelet() {
    let machines = Machines::new(1);
    machines.start(&off()).unwrap();
    // As a kubelet writes them with the policies none and None.
    assert_eq!(
        machines.text("cpu_manager_state"),
        r#"{"policyName":"none","defaultCpuSet":"","checksum":1353318690}"#
    );
    assert!(
        machines
            .text("memory_manager_state")
            .starts_with(r#"{"policyName":"None","machineState":{},"checksum":"#)
    );
    let machines = Machines::new(1);
    machines.start(&settings("none", "container")).unwrap();
    assert!(
        machines
            .text("cpu_manager_state")
            .starts_with(r#"{"policyName":"static","defaultCpuSet":"0-3","checksum":"#)
    );
}

#[test]
fn a_node_continues_with_its_state_files_and_refuses_others_with_the_kubelets_text() {
    let machines = Machines::new(1);
    let mut started = machines.start(&settings("none", "container")).unwrap();
    let requests = started.node.requests(&single("p", "2", "1Gi"));
    let devices = |_: pod_sync_topology::RequestScope<'_>| -> Vec<Hints> { Vec::new() };
    started.node.admit(&requests, &devices, &mut AdmissionCounts::default()).unwrap();
    started.files.write(PlacementContent::of(&started.node).unwrap()).unwrap();
    let again = machines.start(&settings("none", "container")).unwrap().node;
    assert_eq!(again.cpus().unwrap().assignments(), started.node.cpus().unwrap().assignments());
    assert_eq!(again.memory().unwrap().tables(), started.node.memory().unwrap().tables());
    assert_eq!(again.shared().unwrap().to_string(), "0,3");

    let refused = machines.start(&off()).unwrap_err();
    let text = "start cpu manager error: could not restore state from checkpoint: configured policy \"none\" differs from state checkpoint policy \"static\", please drain this node and delete the CPU manager checkpoint file";
    assert!(refused.starts_with(text), "{refused}");
    assert!(
        refused.contains(&format!("{:?} before restarting Kubelet", machines.path("cpu_manager_state"))),
        "{refused}"
    );
    let only_cpus =
        PlacementSettings { memory_policy: MemoryPolicyName::None, ..settings("none", "container") };
    let refused = machines.start(&only_cpus).unwrap_err();
    assert!(
        refused.contains("configured policy \"None\" differs from state checkpoint policy \"Static\""),
        "{refused}"
    );
    // A reserved CPU that a pod has.
    let (reserved_cpus, reserved_milli_cpus) = ("0-1".to_owned(), Some(2000));
    let more = PlacementSettings { reserved_cpus, reserved_milli_cpus, ..settings("none", "container") };
    let refused = machines.start(&more).unwrap_err();
    assert!(
        refused.contains("not all reserved cpus: \"0-1\" are present in defaultCpuSet: \"0,3\""),
        "{refused}"
    );
    for name in ["cpu_manager_state", "memory_manager_state"] {
        let whole = std::fs::read(machines.path(name)).unwrap();
        std::fs::write(machines.path(name), &whole[..whole.len() / 2]).unwrap();
        let refused = machines.start(&settings("none", "container")).unwrap_err();
        assert!(refused.contains("please drain this node and delete the"), "{refused}");
        assert_eq!(
            std::fs::read(machines.path(name)).unwrap(),
            whole[..whole.len() / 2],
            "it is left as it is"
        );
        std::fs::write(machines.path(name), whole).unwrap();
    }
    machines.start(&settings("none", "container")).unwrap();
}

#[test]
fn a_node_with_the_gate_of_pods_continues_with_its_files_and_one_without_it_ends_what_whole_pods_have() {
    let machines = Machines::new(1);
    let on = PlacementSettings { has_pod_level: true, ..settings("restricted", "pod") };
    let mut started = machines.start(&on).unwrap();
    let amounts = serde_json::json!({"cpu": "2", "memory": "1Gi"});
    let mut pod = single("p", "1", "512Mi");
    let spec = pod.spec.as_mut().unwrap();
    spec.resources =
        Some(serde_json::from_value(serde_json::json!({"requests": amounts, "limits": amounts})).unwrap());
    let requests = started.node.requests(&pod);
    let devices = |_: pod_sync_topology::RequestScope<'_>| -> Vec<Hints> { Vec::new() };
    started.node.admit(&requests, &devices, &mut AdmissionCounts::default()).unwrap();
    started.files.write(PlacementContent::of(&started.node).unwrap()).unwrap();
    assert!(machines.text("cpu_manager_state").contains(r#""podEntries":{"p":{"cpuSet":"1-2"}}"#));
    let mut again = machines.start(&on).unwrap().node;
    assert!(
        again.holds("p") && !again.has_exclusive_cpus("p"),
        "the file does not have which CPUs are exclusive"
    );
    again.recognize(&requests);
    assert!(again.has_exclusive_cpus("p"));
    let off = machines.start(&settings("restricted", "pod")).unwrap().node;
    assert!(!off.holds("p"));
    assert_eq!(off.shared().unwrap().to_string(), "0-3");
    assert!(!machines.text("cpu_manager_state").contains("podEntries"));
    machines.start(&on).unwrap();
}

#[test]
fn a_configuration_that_the_kubelet_refuses_is_refused_with_its_text() {
    let refused = |change: &dyn Fn(&mut PlacementSettings)| {
        let mut settings = settings("single-numa-node", "container");
        change(&mut settings);
        Machines::new(2).start(&settings).unwrap_err()
    };
    let option = |name: &str| [(name.to_owned(), "true".to_owned())].into();
    let text = refused(&|s| s.reserved_milli_cpus = None);
    assert_eq!(text, "[cpumanager] unable to determine reserved CPU resources for static policy");
    let text = refused(&|s| (s.reserved_milli_cpus, s.reserved_cpus) = (Some(0), String::new()));
    assert_eq!(
        text,
        "new static policy error: [cpumanager] the static policy requires systemreserved.cpu + kubereserved.cpu to be greater than zero"
    );
    let text = refused(&|s| s.cpu_options = option("x"));
    assert_eq!(text, "new static policy error: unknown CPU Manager Policy option: \"x\"");
    let text = refused(&|s| s.cpu_options = option("align-by-socket"));
    assert_eq!(
        text,
        "new static policy error: CPU Manager Policy Alpha-level Options not enabled, but option \"align-by-socket\" provided"
    );
    let text = refused(&|s| (s.cpu_policy, s.cpu_options) = (CpuPolicyName::None, option("full-pcpus-only")));
    assert_eq!(
        text,
        "new none policy error: None policy: received unsupported options=map[full-pcpus-only:true]"
    );
    let text = refused(&|s| s.topology_options = option("x"));
    assert_eq!(text, "unknown Topology Manager Policy option: \"x\"");
    let text = refused(&|s| s.reserved_memory.clear());
    assert_eq!(
        text,
        "the total amount \"0\" of type \"memory\" is not equal to the value \"536870912\" determined by Node Allocatable feature"
    );
    // The options of an alignment that is off are not read, as in the kubelet.
    let unread = PlacementSettings { topology_options: option("x"), ..settings("none", "container") };
    Machines::new(2).start(&unread).unwrap();
}

#[test]
fn a_machine_that_cannot_be_read_matters_only_to_a_policy() {
    let temp = tempfile::tempdir().unwrap();
    let sys = temp.path().join("sys");
    let error = start(&settings("none", "container"), temp.path(), &sys).unwrap_err();
    assert_eq!(error.to_string(), "failed to read the CPUs and NUMA nodes of the machine");
    let started = start(&off(), temp.path(), &sys).unwrap();
    assert!(!started.node.is_active() && started.machine.nodes.is_empty());
}

#[test]
fn a_state_file_that_cannot_be_written_matters_only_to_a_policy() {
    let machines = Machines::new(1);
    // The directory does not exist.
    let missing = machines.path("missing");
    assert!(start(&off(), &missing, &machines.sys()).is_ok());
    let refused = start(&settings("none", "container"), &missing, &machines.sys());
    assert!(matches!(refused, Err(StartError::Write { .. })), "{refused:?}");
}
