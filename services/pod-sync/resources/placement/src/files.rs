//! The kubelet's state files `cpu_manager_state` and `memory_manager_state` in the root directory.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use pod_sync_cpus::checkpoint::{self as cpu_file, CpuCheckpointError};
use pod_sync_cpus::{CpuAssignments, CpuManager, CpuOptionError, InvalidCpuState, PolicyError, StaticPolicy};
use pod_sync_machine::{DiscoverError, NumaNode};
use pod_sync_memory::checkpoint::{self as memory_file, MemoryCheckpointError};
use pod_sync_memory::{
    Amounts, InvalidMemoryState, MemoryAssignments, MemoryKind, MemoryManager, NodeTables, ReservedError,
};
use pod_sync_records::StateFile;
use pod_sync_topology::{PodLevel, TopologyOptionError, UnsupportedMachine};
use quintlet_kit::failpoint;

use crate::admission::NodePlacement;
use crate::args::{CpuPolicyName, MemoryPolicyName};

/// Reason why the managers cannot start. The texts are the kubelet's.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The CPUs of the machine cannot be read.
    #[error("failed to read the CPUs and NUMA nodes of the machine")]
    Machine(#[from] DiscoverError),
    /// Options of CPUs are set without a policy.
    #[error("new none policy error: None policy: received unsupported options=map[{0}]")]
    OptionsWithoutPolicy(String),
    /// No CPU is reserved.
    #[error("[cpumanager] unable to determine reserved CPU resources for static policy")]
    NoReservedCpus,
    /// The list of reserved CPUs is malformed.
    #[error("unable to parse reserved-cpus list: {0:?}")]
    ReservedCpus(String),
    /// An option of CPUs cannot be used.
    #[error("new static policy error")]
    CpuOption(#[from] CpuOptionError),
    /// The CPU policy cannot be used on this machine.
    #[error("new static policy error")]
    CpuPolicy(#[from] PolicyError),
    /// The reserved memory does not fit.
    #[error(transparent)]
    ReservedMemory(#[from] ReservedError),
    /// An option of the alignment cannot be used.
    #[error(transparent)]
    TopologyOption(#[from] TopologyOptionError),
    /// The alignment is not possible on this machine.
    #[error(transparent)]
    Topology(#[from] UnsupportedMachine),
    /// A state file cannot be read.
    #[error("failed to read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A state file cannot be written.
    #[error("failed to write {}", path.display())]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The state file of CPUs cannot be used with this configuration.
    #[error(
        "start cpu manager error: could not restore state from checkpoint: {reason}, please drain this node and delete the CPU manager checkpoint file {path:?} before restarting Kubelet"
    )]
    CpuCheckpoint {
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        reason: CpuCheckpointError,
    },
    /// The state file of CPUs does not fit this machine.
    #[error("start cpu manager error: {reason}, please drain this node and delete {path:?}")]
    CpuState {
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        reason: InvalidCpuState,
    },
    /// The state file of memory cannot be used with this configuration.
    #[error(
        "start memory manager error: could not restore state from checkpoint: {reason}, please drain this node and delete the memory manager checkpoint file {path:?} before restarting Kubelet"
    )]
    MemoryCheckpoint {
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        reason: MemoryCheckpointError,
    },
    /// The state file of memory does not fit this machine.
    #[error("start memory manager error: {reason}, please drain this node and delete {path:?}")]
    MemoryState {
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        reason: InvalidMemoryState,
    },
}

/// Both state files, with what was written to them last.
#[derive(Debug)]
pub(crate) struct PlacementFiles {
    cpus: StateFile,
    memory: StateFile,
}

/// Both state files as they were found; `None` if there is no file.
#[derive(Debug)]
pub(crate) struct ReadFiles {
    pub(crate) files: PlacementFiles,
    pub(crate) cpus: Option<Vec<u8>>,
    pub(crate) memory: Option<Vec<u8>>,
}

/// The content of both state files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlacementContent {
    cpus: Vec<u8>,
    memory: Vec<u8>,
}

impl PlacementContent {
    /// Returns the content for the assignments of a node.
    ///
    /// # Errors
    /// Serialization failed, which strings and numbers do not cause.
    pub(crate) fn of(node: &NodePlacement) -> Result<Self, serde_json::Error> {
        let has_pods = node.pod_level() != PodLevel::Unmanaged;
        let no_cpus = CpuAssignments::default();
        let (no_tables, no_memory) = (NodeTables::default(), MemoryAssignments::default());
        let assignments = node.cpus().map_or(&no_cpus, CpuManager::assignments);
        let cpus = cpu_file::encode(node.cpu_policy().as_str(), assignments, has_pods)?;
        let (tables, assignments) = match node.memory() {
            Some(memory) => (memory.tables(), memory.assignments()),
            None => (&no_tables, &no_memory),
        };
        let memory = memory_file::encode(node.memory_policy().as_str(), tables, assignments, has_pods)?;
        Ok(Self { cpus, memory })
    }
}

impl PlacementFiles {
    /// Reads both files. Blocks.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn read(root_dir: &Path) -> Result<ReadFiles, StartError> {
        let read = |name: &str| {
            let path = root_dir.join(name);
            StateFile::read(path.clone()).map_err(|source| StartError::Read { path, source })
        };
        let (cpus, cpu_bytes) = read(cpu_file::CHECKPOINT)?;
        let (memory, memory_bytes) = read(memory_file::CHECKPOINT)?;
        Ok(ReadFiles { files: Self { cpus, memory }, cpus: cpu_bytes, memory: memory_bytes })
    }

    /// Replaces the files whose content has changed. Blocks.
    ///
    /// # Errors
    /// A file cannot be replaced.
    pub(crate) fn write(&mut self, content: PlacementContent) -> io::Result<()> {
        if !self.cpus.has(&content.cpus) {
            failpoint::file!("CPU state written", || self.cpus.write(content.cpus))?;
        }
        if !self.memory.has(&content.memory) {
            failpoint::file!("memory state written", || self.memory.write(content.memory))?;
        }
        Ok(())
    }
}

/// Continues with the CPUs of a state file, if there is one.
pub(crate) fn restore_cpus(
    policy: Option<StaticPolicy>,
    bytes: Option<&[u8]>,
    path: &Path,
    level: PodLevel,
) -> Result<Option<CpuManager>, StartError> {
    let name = if policy.is_some() { CpuPolicyName::Static } else { CpuPolicyName::None }.as_str();
    // Files of kubelets before 1.18 have IDs of containers, which nothing here maps to pods.
    let decode = |bytes| cpu_file::decode(bytes, name, |_| None);
    let restored = bytes.map(decode).transpose();
    let restored = restored.map_err(|reason| StartError::CpuCheckpoint { path: path.to_owned(), reason })?;
    let manager =
        policy.map(|policy| CpuManager::new(policy, restored.unwrap_or_default(), level)).transpose();
    manager.map_err(|reason| StartError::CpuState { path: path.to_owned(), reason })
}

/// Continues with the memory of a state file, if there is one. `unused` is the memory of the machine; `None`
/// with the policy `None`.
pub(crate) fn restore_memory(
    unused: Option<NodeTables>,
    bytes: Option<&[u8]>,
    path: &Path,
    level: PodLevel,
) -> Result<Option<MemoryManager>, StartError> {
    let name = if unused.is_some() { MemoryPolicyName::Static } else { MemoryPolicyName::None }.as_str();
    let restored = bytes.map(|bytes| memory_file::decode(bytes, name)).transpose();
    let restored =
        restored.map_err(|reason| StartError::MemoryCheckpoint { path: path.to_owned(), reason })?;
    let (tables, assignments) = restored.unwrap_or_default();
    let recorded = tables.sizes();
    let manager = unused.map(|unused| MemoryManager::new(unused, tables, assignments, level)).transpose();
    let manager = manager.map_err(|reason| StartError::MemoryState { path: path.to_owned(), reason })?;
    if let Some(manager) = &manager {
        log_other_sizes(&recorded, &manager.tables().sizes());
    }
    Ok(manager)
}

fn log_other_sizes(recorded: &BTreeMap<NumaNode, Amounts>, found: &BTreeMap<NumaNode, Amounts>) {
    let memory = MemoryKind::memory();
    for (node, sizes) in recorded {
        let found = found.get(node).and_then(|sizes| sizes.get(&memory));
        if let (Some(recorded), Some(found)) = (sizes.get(&memory), found)
            && recorded != found
        {
            tracing::info!(
                numa_node = %node,
                recorded,
                found,
                "a NUMA node has another size than recorded, the assignments fit"
            );
        }
    }
}
