//! The configuration of the policies.

use std::collections::BTreeMap;
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use pod_sync_cpus::{CpuGates, StaticPolicy};
use pod_sync_machine::NumaNode;
use pod_sync_memory::{Amounts, MemoryKind, MemoryManager};
use pod_sync_topology::{PodLevel, PolicyName, TopologyScope};
use quintlet_config::table::{CPU_ALPHA_OPTIONS, CPU_BETA_OPTIONS, POD_LEVEL_MANAGERS, has_gate};
use quintlet_model::qos::ResourceList;
use quintlet_model::quantity::Quantity;

/// Memory of one NUMA node that no pod gets.
pub(crate) type NodeReservation = (NumaNode, Amounts);

/// The value of `cpuManagerPolicy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CpuPolicyName {
    /// No container has CPUs of its own.
    None,
    /// See [`StaticPolicy`].
    Static,
}

impl CpuPolicyName {
    const ALL: [Self; 2] = [Self::None, Self::Static];

    /// Returns the name in the configuration and in the state file.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Static => StaticPolicy::NAME,
        }
    }
}

/// The value of `memoryManagerPolicy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryPolicyName {
    /// The memory of containers comes from any NUMA node.
    None,
    /// See [`MemoryManager`].
    Static,
}

impl MemoryPolicyName {
    const ALL: [Self; 2] = [Self::None, Self::Static];

    /// Returns the name in the configuration and in the state file.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Static => MemoryManager::POLICY,
        }
    }
}

/// Returns a parser of the names of some values.
fn names<T: Copy + Send + Sync + 'static, const N: usize>(
    all: [T; N],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(all.map(name))
        .try_map(move |text| all.into_iter().find(|value| name(*value) == text).ok_or("unknown name"))
}

/// CPUs, memory and NUMA nodes of containers.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "CPUs and NUMA nodes")]
pub struct PlacementArgs {
    /// static: containers of Guaranteed pods with a whole number of CPUs get exclusive ones.
    #[arg(long, default_value = "none", value_parser = names(CpuPolicyName::ALL, CpuPolicyName::as_str), value_name = "POLICY")]
    pub cpu_manager_policy: CpuPolicyName,
    /// Option of the policy static, `full-pcpus-only=true`; may be given more than once.
    #[arg(long, value_delimiter = ',', value_parser = quintlet_config::pair, value_name = "OPTION=VALUE")]
    pub cpu_manager_policy_options: Vec<(String, String)>,
    /// Interval between comparisons of the CPUs of running containers. Changes of the shared CPUs are applied
    /// at once.
    #[arg(long, default_value = "10s", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub cpu_manager_reconcile_period: Duration,
    /// Static: the memory of Guaranteed pods comes from NUMA nodes that have enough of it.
    #[arg(long, default_value = "None", value_parser = names(MemoryPolicyName::ALL, MemoryPolicyName::as_str), value_name = "POLICY")]
    pub memory_manager_policy: MemoryPolicyName,
    /// Memory of a NUMA node that no pod gets, `0:memory=1Gi,hugepages-2Mi=64Mi`; may be given more than
    /// once. Only the policy Static uses it.
    #[arg(long, value_delimiter = ';', value_parser = reservation, value_name = "NODE:AMOUNTS")]
    pub reserved_memory: Vec<NodeReservation>,
    /// How CPUs, memory and devices are aligned on NUMA nodes.
    #[arg(
        long,
        default_value = "none",
        value_parser = names(PolicyName::ALL, PolicyName::as_str),
        value_name = "POLICY"
    )]
    pub topology_manager_policy: PolicyName,
    /// container: each container is aligned on its own; pod: all containers together.
    #[arg(long, default_value = "container", value_parser = names(TopologyScope::ALL, TopologyScope::as_str), value_name = "SCOPE")]
    pub topology_manager_scope: TopologyScope,
    /// Option of the alignment, `prefer-closest-numa-nodes=true`; may be given more than once.
    #[arg(long, value_delimiter = ',', value_parser = quintlet_config::pair, value_name = "OPTION=VALUE")]
    pub topology_manager_policy_options: Vec<(String, String)>,
}

/// Amounts that no pod gets, from other arguments.
#[derive(Debug, Clone, Copy)]
pub struct ReservedAmounts<'a> {
    /// `systemReserved` and `kubeReserved` together.
    pub reserved: &'a ResourceList,
    /// Amounts that hard eviction thresholds keep free.
    pub eviction: &'a ResourceList,
    /// `reservedSystemCPUs`; may be empty.
    pub cpus: &'a str,
}

/// The policies of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacementSettings {
    /// `cpuManagerPolicy`.
    pub cpu_policy: CpuPolicyName,
    /// `cpuManagerPolicyOptions`.
    pub cpu_options: BTreeMap<String, String>,
    /// Feature gates of the options.
    pub cpu_gates: CpuGates,
    /// `reservedSystemCPUs`; may be empty.
    pub reserved_cpus: String,
    /// Reserved CPUs in thousandths; `None` if no CPU is reserved.
    pub reserved_milli_cpus: Option<i64>,
    /// `memoryManagerPolicy`.
    pub memory_policy: MemoryPolicyName,
    /// `reservedMemory`.
    pub reserved_memory: BTreeMap<NumaNode, Amounts>,
    /// Reserved memory of the whole node in bytes, with that of eviction thresholds.
    pub memory_of_node: Amounts,
    /// `topologyManagerPolicy`.
    pub topology_policy: PolicyName,
    /// `topologyManagerScope`.
    pub topology_scope: TopologyScope,
    /// `topologyManagerPolicyOptions`.
    pub topology_options: BTreeMap<String, String>,
    /// Feature gate `PodLevelResourceManagers`.
    pub has_pod_level: bool,
}

impl PlacementSettings {
    /// Returns what the managers do with resources of the pod level: pods have CPUs and memory as a whole if
    /// they are aligned so.
    #[must_use]
    pub fn pod_level(&self) -> PodLevel {
        match (self.has_pod_level, self.topology_policy, self.topology_scope) {
            (false, ..) => PodLevel::Unmanaged,
            (true, PolicyName::None, _) | (true, _, TopologyScope::Container) => PodLevel::Containers,
            (true, _, TopologyScope::Pod) => PodLevel::Pod,
        }
    }
}

impl PlacementArgs {
    /// Returns the policies of the node.
    #[must_use]
    pub fn settings(&self, gates: &[String], reserved: ReservedAmounts<'_>) -> PlacementSettings {
        let map = |pairs: &[(String, String)]| pairs.iter().cloned().collect();
        let amount = |list: &ResourceList, name: &str| list.get(name).copied().unwrap_or_default();
        let memory = amount(reserved.reserved, "memory") + amount(reserved.eviction, "memory");
        let bytes = u64::try_from(memory.value()).unwrap_or(0);
        let mut reserved_memory: BTreeMap<NumaNode, Amounts> = BTreeMap::new();
        for (node, amounts) in &self.reserved_memory {
            reserved_memory.entry(*node).or_default().extend(amounts.clone());
        }
        PlacementSettings {
            cpu_policy: self.cpu_manager_policy,
            cpu_options: map(&self.cpu_manager_policy_options),
            cpu_gates: CpuGates {
                alpha: has_gate(gates, CPU_ALPHA_OPTIONS),
                beta: has_gate(gates, CPU_BETA_OPTIONS),
            },
            reserved_cpus: reserved.cpus.to_owned(),
            reserved_milli_cpus: reserved.reserved.get("cpu").map(|cpu| cpu.milli_value()),
            memory_policy: self.memory_manager_policy,
            reserved_memory,
            memory_of_node: [(MemoryKind::memory(), bytes)].into(),
            topology_policy: self.topology_manager_policy,
            topology_scope: self.topology_manager_scope,
            topology_options: map(&self.topology_manager_policy_options),
            has_pod_level: has_gate(gates, POD_LEVEL_MANAGERS),
        }
    }
}

/// Parses the memory of a NUMA node, as the kubelet's flag has it.
fn reservation(text: &str) -> Result<NodeReservation, String> {
    const FORM: &str = "want NODE:KIND=AMOUNT,KIND=AMOUNT";
    let (node, amounts) = text.split_once(':').ok_or(FORM)?;
    let number: u64 = node.parse().map_err(|_| FORM)?;
    let node = NumaNode::try_from(number).map_err(|error| error.to_string())?;
    let mut all = Amounts::new();
    for pair in amounts.split(',') {
        let (kind, amount) = pair.split_once('=').ok_or(FORM)?;
        let kind =
            MemoryKind::parse(kind).ok_or_else(|| format!("{kind} cannot be reserved per NUMA node"))?;
        let amount = Quantity::parse(amount).map_err(|error| error.to_string())?;
        all.insert(kind, u64::try_from(amount.value()).map_err(|_| format!("{pair} is negative"))?);
    }
    Ok((node, all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_a_numa_node_is_parsed_as_in_the_kubelets_flag() {
        let shown = |text: &str| {
            let (node, amounts) = reservation(text)?;
            let amounts = amounts.iter().map(|(kind, bytes)| format!("{kind}={bytes}"));
            Ok::<_, String>(format!("{node}:{}", amounts.collect::<Vec<_>>().join(",")))
        };
        let parsed = shown("1:memory=1Gi,hugepages-2Mi=4Mi");
        assert_eq!(parsed.as_deref(), Ok("1:hugepages-2Mi=4194304,memory=1073741824"));
        for bad in [
            "memory=1Gi",
            "x:memory=1Gi",
            "64:memory=1Gi",
            "0:memory",
            "0:cpu=1",
            "0:memory=x",
            "0:memory=-1",
        ] {
            assert!(reservation(bad).is_err(), "{bad}");
        }
    }
}
