//! The kubelet's file `memory_manager_state` (`pkg/kubelet/cm/memorymanager/state`): JSON with a checksum of
//! what Go prints for the data.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use pod_sync_machine::{NumaNode, NumaNodes};
use quintlet_model::hash::{ChecksumMismatch, GoHash, check_checksum, checked_text};
use serde::{Deserialize, Serialize};

use crate::blocks::{MemoryAssignments, MemoryBlock};
use crate::kind::MemoryKind;
use crate::node_table::{MemoryTable, NodeTable, NodeTables};

/// Name of the file in the root directory.
pub const CHECKPOINT: &str = "memory_manager_state";

/// Reason why a state file cannot be used. The node must be drained, and the file removed.
#[derive(Debug, thiserror::Error)]
pub enum MemoryCheckpointError {
    /// The file is not valid JSON, or has other fields.
    #[error("not a state file of memory")]
    Unreadable(#[source] serde_json::Error),
    /// The checksum does not match.
    #[error("state file is corrupt: {0}")]
    Checksum(ChecksumMismatch),
    /// The file was written with another policy.
    #[error(
        "[memorymanager] configured policy {configured:?} differs from state checkpoint policy {found:?}"
    )]
    Policy {
        /// The policy of the configuration.
        configured: String,
        /// The policy of the file.
        found: String,
    },
    /// The number of a NUMA node is no number, or too high.
    #[error("NUMA node {0} is not supported")]
    Node(String),
    /// The name of a resource is not one of memory.
    #[error("{0:?} is no kind of memory")]
    Kind(String),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    #[serde(flatten)]
    content: Content,
    checksum: u64,
    // Kubelet 1.37 writes the content a second time, as a text with a checksum of its own, which counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    data: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    data_checksum: Option<u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Content {
    policy_name: String,
    // JSON has numbers as keys in quotes, and Go writes them in the order of their text.
    machine_state: BTreeMap<String, FileNode>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    entries: BTreeMap<String, BTreeMap<String, Vec<FileBlock>>>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pod_entries: BTreeMap<String, PodEntry>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodEntry {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    memory_blocks: Vec<FileBlock>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct FileNode {
    number_of_assignments: u64,
    memory_map: BTreeMap<String, FileTable>,
    cells: Vec<u64>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct FileTable {
    total: u64,
    system_reserved: u64,
    allocatable: u64,
    reserved: u64,
    free: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct FileBlock {
    numa_affinity: Vec<u64>,
    #[serde(rename = "type")]
    kind: String,
    size: u64,
}

/// Returns the content of a state file. With `has_pods` it is that of kubelet 1.37, else that of earlier
/// ones. Earlier kubelets, and 1.37 without the feature gate, read it without the memory of whole pods: a
/// node that has such pods must be drained first.
///
/// # Errors
/// Serialization failed, which strings and numbers do not cause.
pub fn encode(
    policy: &str,
    tables: &NodeTables,
    assignments: &MemoryAssignments,
    has_pods: bool,
) -> Result<Vec<u8>, serde_json::Error> {
    let table = |table: &MemoryTable| {
        let MemoryTable { total, system_reserved, allocatable, reserved, free } = *table;
        FileTable { total, system_reserved, allocatable, reserved, free }
    };
    let node = |(node, found): (&NumaNode, &NodeTable)| {
        let memory_map = found.kinds.iter().map(|(kind, found)| (kind.to_string(), table(found)));
        let cells = numbers(found.group);
        let number_of_assignments = found.assignments;
        (node.to_string(), FileNode { number_of_assignments, memory_map: memory_map.collect(), cells })
    };
    let mut entries: BTreeMap<String, BTreeMap<String, Vec<FileBlock>>> = BTreeMap::new();
    for (pod, container, blocks) in assignments.all() {
        entries.entry(pod.to_owned()).or_default().insert(container.to_owned(), file_blocks(blocks));
    }
    let machine_state = tables.0.iter().map(node).collect();
    let content =
        Content { policy_name: policy.to_owned(), machine_state, entries, pod_entries: BTreeMap::new() };
    let checksum = checksum(&content, false);
    let mut file = File { content, checksum, data: None, data_checksum: None };
    if has_pods {
        let pod = |(pod, blocks): (&str, &[MemoryBlock])| {
            (pod.to_owned(), PodEntry { memory_blocks: file_blocks(blocks) })
        };
        file.content.pod_entries = assignments.pods().map(pod).collect();
        let data = serde_json::to_string(&file.content)?;
        file.content.pod_entries.clear();
        file.data_checksum = Some(GoHash::of_string(&data));
        file.data = Some(data);
    }
    serde_json::to_vec(&file)
}

fn numbers(nodes: NumaNodes) -> Vec<u64> {
    nodes.iter().map(|node| u64::from(node.number())).collect()
}

fn file_blocks(blocks: &[MemoryBlock]) -> Vec<FileBlock> {
    let block = |block: &MemoryBlock| FileBlock {
        numa_affinity: numbers(block.nodes),
        kind: block.kind.to_string(),
        size: block.bytes,
    };
    blocks.iter().map(block).collect()
}

/// Parses a state file.
///
/// # Errors
/// See [`MemoryCheckpointError`].
pub fn decode(bytes: &[u8], policy: &str) -> Result<(NodeTables, MemoryAssignments), MemoryCheckpointError> {
    let file: File = serde_json::from_slice(bytes).map_err(MemoryCheckpointError::Unreadable)?;
    let content = verified(file)?;
    if content.policy_name != policy {
        let (configured, found) = (policy.to_owned(), content.policy_name);
        return Err(MemoryCheckpointError::Policy { configured, found });
    }
    let mut tables = NodeTables::default();
    for (number, node) in content.machine_state {
        let parsed = number.parse().map_err(|_| MemoryCheckpointError::Node(number))?;
        tables.0.insert(numa_node(parsed)?, node_table(node)?);
    }
    let mut assignments = MemoryAssignments::default();
    for (pod, containers) in content.entries {
        for (container, blocks) in containers {
            assignments.insert(&pod, &container, memory_blocks(blocks)?);
        }
    }
    for (pod, entry) in content.pod_entries {
        assignments.insert_pod(&pod, memory_blocks(entry.memory_blocks)?);
    }
    Ok((tables, assignments))
}

/// Returns the content of a file whose checksum is right.
fn verified(file: File) -> Result<Content, MemoryCheckpointError> {
    let text = checked_text(file.data, file.data_checksum).map_err(MemoryCheckpointError::Checksum)?;
    if let Some(text) = text {
        return serde_json::from_str(&text).map_err(MemoryCheckpointError::Unreadable);
    }
    let accepted = [false, true].map(|has_pods| checksum(&file.content, has_pods));
    check_checksum(file.checksum, &accepted).map_err(MemoryCheckpointError::Checksum)?;
    Ok(file.content)
}

fn numa_node(number: u64) -> Result<NumaNode, MemoryCheckpointError> {
    NumaNode::try_from(number).map_err(|error| MemoryCheckpointError::Node(error.0.to_string()))
}

fn numa_nodes(numbers: Vec<u64>) -> Result<NumaNodes, MemoryCheckpointError> {
    numbers.into_iter().map(numa_node).collect()
}

fn memory_kind(name: String) -> Result<MemoryKind, MemoryCheckpointError> {
    MemoryKind::parse(&name).ok_or(MemoryCheckpointError::Kind(name))
}

fn node_table(node: FileNode) -> Result<NodeTable, MemoryCheckpointError> {
    let table = |(name, table): (String, FileTable)| {
        let FileTable { total, system_reserved, allocatable, reserved, free } = table;
        Ok((memory_kind(name)?, MemoryTable { total, system_reserved, allocatable, reserved, free }))
    };
    let kinds: Result<_, MemoryCheckpointError> = node.memory_map.into_iter().map(table).collect();
    Ok(NodeTable { assignments: node.number_of_assignments, group: numa_nodes(node.cells)?, kinds: kinds? })
}

fn memory_blocks(blocks: Vec<FileBlock>) -> Result<Vec<MemoryBlock>, MemoryCheckpointError> {
    blocks.into_iter().map(memory_block).collect()
}

fn memory_block(block: FileBlock) -> Result<MemoryBlock, MemoryCheckpointError> {
    let nodes = numa_nodes(block.numa_affinity)?;
    Ok(MemoryBlock { nodes, kind: memory_kind(block.kind)?, bytes: block.size })
}

/// Returns the checksum in the form of a kubelet with or without the memory of whole pods.
fn checksum(content: &Content, has_pods: bool) -> u64 {
    // The writer never fails.
    GoHash::of(|out| print(out, content, has_pods)).unwrap_or(0)
}

fn print(out: &mut GoHash, file: &Content, has_pods: bool) -> fmt::Result {
    let policy = &file.policy_name;
    write!(
        out,
        "(*state.MemoryManagerCheckpoint){{PolicyName:(string){policy} MachineState:(state.NUMANodeMap)map["
    )?;
    // Go sorts the keys of a printed map as numbers.
    let mut nodes: Vec<(&String, &FileNode)> = file.machine_state.iter().collect();
    nodes.sort_by_key(|(number, _)| number.parse::<u64>().unwrap_or(u64::MAX));
    out.separated(nodes, |out, (number, node)| {
        write!(out, "{number}:")?;
        print_node(out, node)
    })?;
    out.write_str("] Entries:(state.ContainerMemoryAssignments)map[")?;
    out.separated(&file.entries, |out, (pod, containers)| {
        write!(out, "{pod}:map[")?;
        out.separated(containers, |out, (container, blocks)| {
            write!(out, "{container}:[")?;
            out.separated(blocks, print_block)?;
            out.write_char(']')
        })?;
        out.write_char(']')
    })?;
    if has_pods {
        out.write_str("] PodEntries:(state.PodMemoryAssignments)map[")?;
        out.separated(&file.pod_entries, |out, (pod, entry)| {
            write!(out, "{pod}:{{MemoryBlocks:([]state.Block)[")?;
            out.separated(&entry.memory_blocks, print_block)?;
            out.write_str("]}")
        })?;
    }
    out.write_str("] Checksum:(checksum.Checksum)0}")
}

fn print_node(out: &mut GoHash, node: &FileNode) -> fmt::Result {
    let count = node.number_of_assignments;
    write!(
        out,
        "<*>{{NumberOfAssignments:(int){count} MemoryMap:(map[v1.ResourceName]*state.MemoryTable)map["
    )?;
    out.separated(&node.memory_map, |out, (kind, table)| {
        let FileTable { total, system_reserved, allocatable, reserved, free } = table;
        write!(
            out,
            "{kind}:<*>{{TotalMemSize:(uint64){total} SystemReserved:(uint64){system_reserved} Allocatable:(uint64){allocatable} Reserved:(uint64){reserved} Free:(uint64){free}}}"
        )
    })?;
    out.write_str("] Cells:([]int)[")?;
    out.separated(&node.cells, |out, cell| write!(out, "{cell}"))?;
    out.write_str("]}")
}

fn print_block(out: &mut GoHash, block: &FileBlock) -> fmt::Result {
    out.write_str("{NUMAAffinity:([]int)[")?;
    out.separated(&block.numa_affinity, |out, node| write!(out, "{node}"))?;
    write!(out, "] Type:(v1.ResourceName){} Size:(uint64){}}}", block.kind, block.size)
}

#[cfg(test)]
mod tests {
    use super::*;

    // A kubelet writes this file where it never had another policy.
    const OF_KUBELET: &str = r#"{"policyName":"None","machineState":{},"checksum":4236770233}"#;
    // The checksum was computed with the kubelet's library.
    const WITH_PODS: &str = r#"{"policyName":"Static","machineState":{"10":{"numberOfAssignments":0,"memoryMap":{"memory":{"total":100,"systemReserved":1,"allocatable":99,"reserved":2,"free":3}},"cells":[10]},"2":{"numberOfAssignments":2,"memoryMap":{"hugepages-2Mi":{"total":100,"systemReserved":1,"allocatable":99,"reserved":2,"free":5},"memory":{"total":100,"systemReserved":1,"allocatable":99,"reserved":2,"free":4}},"cells":[0,2]}},"entries":{"u1":{"c":[{"numaAffinity":[0,1],"type":"memory","size":7},{"numaAffinity":[0],"type":"hugepages-2Mi","size":9}]}},"checksum":CHECKSUM}"#;

    fn with_pods() -> String {
        WITH_PODS.replace("CHECKSUM", "748132094")
    }

    #[test]
    fn state_files_of_kubelets_are_read_and_written_again_byte_for_byte() {
        for (text, policy) in [(OF_KUBELET, "None"), (&with_pods(), "Static")] {
            let (tables, assignments) = decode(text.as_bytes(), policy).unwrap();
            let again = encode(policy, &tables, &assignments, false).unwrap();
            assert_eq!(String::from_utf8(again).unwrap(), text);
        }
    }

    #[test]
    fn the_text_with_the_content_needs_its_checksum() {
        let empty = (NodeTables::default(), MemoryAssignments::default());
        let text = String::from_utf8(encode("Static", &empty.0, &empty.1, true).unwrap()).unwrap();
        assert_eq!(decode(text.as_bytes(), "Static").unwrap(), empty);
        let (before, data_checksum) = text.rsplit_once(",\"dataChecksum\":").unwrap();
        let (plain, _) = before.split_once(",\"data\":").unwrap();
        for changed in [
            format!("{before}}}"),
            format!("{before},\"dataChecksum\":0}}"),
            format!("{plain},\"data\":\"\",\"dataChecksum\":{data_checksum}"),
            format!("{plain},\"dataChecksum\":{data_checksum}"),
        ] {
            let refused = decode(changed.as_bytes(), "Static");
            assert!(matches!(refused, Err(MemoryCheckpointError::Checksum { .. })), "{changed} {refused:?}");
        }
        let without = format!("{plain},\"data\":\"\",\"dataChecksum\":0}}");
        assert_eq!(decode(without.as_bytes(), "Static").unwrap(), empty);
    }

    // The checksums were computed with the kubelet's library.
    const OF_1_36_WITH_PODS: &str = r#"{"policyName":"static","machineState":{"0":{"numberOfAssignments":0,"memoryMap":{"memory":{"total":2048,"systemReserved":512,"allocatable":1536,"reserved":512,"free":1024}},"cells":[]}},"entries":{"pod":{"container1":[{"numaAffinity":[0],"type":"memory","size":512}]}},"podEntries":{"pod":{"memoryBlocks":[{"numaAffinity":[0],"type":"memory","size":512}]}},"checksum":1278640530}"#;

    #[test]
    fn a_file_of_kubelet_1_36_with_pods_becomes_one_of_1_37() {
        let (tables, assignments) = decode(OF_1_36_WITH_PODS.as_bytes(), "static").unwrap();
        assert_eq!(assignments.pod("pod"), assignments.container("pod", "container1"));
        let (changed, _) = OF_1_36_WITH_PODS.rsplit_once("512").unwrap();
        let changed = format!("{changed}513}}]}}}},\"checksum\":1278640530}}");
        let changed = decode(changed.as_bytes(), "static");
        assert!(matches!(changed, Err(MemoryCheckpointError::Checksum { .. })), "{changed:?}");

        let text = String::from_utf8(encode("static", &tables, &assignments, true).unwrap()).unwrap();
        let (data, _) = OF_1_36_WITH_PODS.rsplit_once(",\"checksum\"").unwrap();
        let data = format!("{data}}}").replace('"', "\\\"");
        let tail = format!(",\"data\":\"{data}\",\"dataChecksum\":637296054}}");
        assert!(text.ends_with(&tail), "{text}");
        // Earlier kubelets read the rest.
        let plain = encode("static", &tables, &assignments, false).unwrap();
        let plain = String::from_utf8(plain).unwrap();
        assert_eq!(format!("{}}}", text.strip_suffix(&tail).unwrap()), plain);
        assert_eq!(decode(plain.as_bytes(), "static").unwrap().1.pods().count(), 0);
        let read = decode(text.as_bytes(), "static").unwrap();
        assert_eq!(read, (tables, assignments));
        let changed = decode(text.replace("637296054", "637296055").as_bytes(), "static");
        assert!(matches!(changed, Err(MemoryCheckpointError::Checksum { .. })), "{changed:?}");
    }

    #[test]
    fn a_torn_changed_or_foreign_file_is_refused() {
        let whole = with_pods();
        for cut in [0, 1, whole.len() / 2, whole.len() - 1] {
            let torn = decode(&whole.as_bytes()[..cut], "Static");
            assert!(matches!(torn, Err(MemoryCheckpointError::Unreadable(_))), "{cut}");
        }
        let refused = |text: String, policy| decode(text.as_bytes(), policy).unwrap_err().to_string();
        assert!(refused(whole.replace("\"size\":7", "\"size\":8"), "Static").contains("corrupt"));
        let other =
            "[memorymanager] configured policy \"Static\" differs from state checkpoint policy \"None\"";
        assert_eq!(refused(OF_KUBELET.to_owned(), "Static"), other);
        let unchecked = whole.replace("748132094", "0");
        assert!(decode(unchecked.as_bytes(), "Static").is_ok());
        assert_eq!(refused(unchecked.replace("[0,1]", "[64]"), "Static"), "NUMA node 64 is not supported");
        assert_eq!(
            refused(unchecked.replace("{\"10\":", "{\"x\":"), "Static"),
            "NUMA node x is not supported"
        );
        assert_eq!(
            refused(unchecked.replace("type\":\"memory", "type\":\"cpu"), "Static"),
            "\"cpu\" is no kind of memory"
        );
    }
}
