//! Makes the managers from the configuration, the machine and the state files.

use std::path::Path;

use pod_sync_cpus::{CpuOptions, ReservedCpus, StaticPolicy};
use pod_sync_machine::{CpuSet, Machine, discover};
use pod_sync_memory::{NodeTables, ReservedMemory};
use pod_sync_topology::{PolicyName, TopologyOptions, TopologyPolicy};

use crate::admission::NodePlacement;
use crate::args::{CpuPolicyName, MemoryPolicyName, PlacementSettings};
use crate::files::{PlacementContent, PlacementFiles, ReadFiles, StartError, restore_cpus, restore_memory};

/// The managers of a node at its start.
#[derive(Debug)]
pub(crate) struct StartedPlacement {
    pub(crate) node: NodePlacement,
    /// CPUs and NUMA nodes; empty if they cannot be read and no policy needs them.
    pub(crate) machine: Machine,
    pub(crate) files: PlacementFiles,
}

/// Reads the machine and the state files, and writes files that are missing. Blocks.
///
/// # Errors
/// The configuration, the machine and the files do not fit each other.
pub(crate) fn start(
    settings: &PlacementSettings,
    root_dir: &Path,
    sys: &Path,
) -> Result<StartedPlacement, StartError> {
    let PlacementSettings {
        cpu_policy: cpus, memory_policy: memory, topology_policy, topology_scope, ..
    } = *settings;
    let needs_machine = cpus != CpuPolicyName::None
        || memory != MemoryPolicyName::None
        || topology_policy != PolicyName::None;
    let machine = match discover(sys) {
        Ok(machine) => machine,
        Err(error) if needs_machine => return Err(error.into()),
        Err(error) => {
            let error = quintlet_kit::error_chain(&error);
            tracing::info!(error, "the CPUs and NUMA nodes of the machine are unknown, no policy needs them");
            Machine::default()
        }
    };
    let topology = topology(settings, topology_policy, &machine)?;
    let ReadFiles { mut files, cpus: cpu_bytes, memory: memory_bytes } = PlacementFiles::read(root_dir)?;
    let cpus = restore_cpus(
        cpu_policy(settings, topology_policy, &machine)?,
        cpu_bytes.as_deref(),
        &root_dir.join(pod_sync_cpus::checkpoint::CHECKPOINT),
        settings.pod_level(),
    )?;
    let memory = restore_memory(
        unused_memory(settings, &machine)?,
        memory_bytes.as_deref(),
        &root_dir.join(pod_sync_memory::checkpoint::CHECKPOINT),
        settings.pod_level(),
    )?;
    let node = NodePlacement::new(cpus, memory, topology, topology_scope, settings.pod_level());
    let content = PlacementContent::of(&node).map_err(std::io::Error::other);
    match content.and_then(|content| files.write(content)) {
        Ok(()) => {}
        Err(source) if node.is_active() => {
            return Err(StartError::Write { path: root_dir.to_owned(), source });
        }
        Err(error) => {
            tracing::warn!(%error, "failed to write the state of CPUs and memory, no policy needs it")
        }
    }
    Ok(StartedPlacement { node, machine, files })
}

fn topology(
    settings: &PlacementSettings,
    policy: PolicyName,
    machine: &Machine,
) -> Result<TopologyPolicy, StartError> {
    // As in the kubelet, the options of an alignment that is off are not read.
    let options = match policy {
        PolicyName::None => TopologyOptions::default(),
        PolicyName::BestEffort | PolicyName::Restricted | PolicyName::SingleNumaNode => {
            TopologyOptions::parse(&settings.topology_options)?
        }
    };
    Ok(TopologyPolicy::new(policy, options, machine)?)
}

/// Returns the policy `static`; `None` for the policy `none`.
fn cpu_policy(
    settings: &PlacementSettings,
    topology: PolicyName,
    machine: &Machine,
) -> Result<Option<StaticPolicy>, StartError> {
    let options = &settings.cpu_options;
    if settings.cpu_policy == CpuPolicyName::None {
        if options.is_empty() {
            return Ok(None);
        }
        let all: Vec<String> = options.iter().map(|(name, value)| format!("{name}:{value}")).collect();
        return Err(StartError::OptionsWithoutPolicy(all.join(" ")));
    }
    let milli = settings.reserved_milli_cpus.ok_or(StartError::NoReservedCpus)?;
    let listed: Result<CpuSet, _> = settings.reserved_cpus.parse();
    let listed = listed.map_err(|_| StartError::ReservedCpus(settings.reserved_cpus.clone()))?;
    let reserved = if listed.is_empty() {
        let whole = u64::try_from(milli).unwrap_or(0).div_ceil(1000);
        ReservedCpus::Count(usize::try_from(whole).unwrap_or(usize::MAX))
    } else {
        ReservedCpus::These(listed)
    };
    let options = CpuOptions::parse(options, settings.cpu_gates)?;
    Ok(Some(StaticPolicy::new(machine.cpus.clone(), options, reserved, topology)?))
}

/// Returns the memory of the machine without assignments; `None` for the policy `None`.
fn unused_memory(settings: &PlacementSettings, machine: &Machine) -> Result<Option<NodeTables>, StartError> {
    if settings.memory_policy == MemoryPolicyName::None {
        return Ok(None);
    }
    let reserved = ReservedMemory::new(settings.reserved_memory.clone(), &settings.memory_of_node, machine)?;
    Ok(Some(NodeTables::unused(machine, &reserved)))
}

#[cfg(test)]
mod tests;
