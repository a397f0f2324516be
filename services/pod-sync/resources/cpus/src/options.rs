//! Options of the policy `static` (`cpuManagerPolicyOptions`).

use std::collections::BTreeMap;

use pod_sync_machine::CpuTopology;
use pod_sync_topology::PolicyName;

const FULL_CORES: &str = "full-pcpus-only";
const ACROSS_NODES: &str = "distribute-cpus-across-numa";
const BY_SOCKET: &str = "align-by-socket";
const ACROSS_CORES: &str = "distribute-cpus-across-cores";
const STRICT_RESERVATION: &str = "strict-cpu-reservation";
const BY_CACHE: &str = "prefer-align-cpus-by-uncorecache";

/// Options that exclude each other.
const EXCLUSIVE: [(&str, &str); 4] = [
    (FULL_CORES, ACROSS_CORES),
    (ACROSS_NODES, ACROSS_CORES),
    (BY_CACHE, ACROSS_CORES),
    (BY_CACHE, ACROSS_NODES),
];

/// Options of the policy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// `full-pcpus-only`: no core is shared by two containers.
    pub full_cores: bool,
    /// `distribute-cpus-across-numa`: a container that needs several NUMA nodes gets as many CPUs of each.
    pub across_nodes: bool,
    /// `align-by-socket`: CPUs on one socket are as good as CPUs on one NUMA node.
    pub by_socket: bool,
    /// `distribute-cpus-across-cores`: a container gets threads of different cores first.
    pub across_cores: bool,
    /// `strict-cpu-reservation`: no pod runs on reserved CPUs.
    pub strict_reservation: bool,
    /// `prefer-align-cpus-by-uncorecache`: a container gets CPUs of as few last-level caches as possible.
    pub by_cache: bool,
}

/// Feature gates of the options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuGates {
    /// `CPUManagerPolicyAlphaOptions`.
    pub alpha: bool,
    /// `CPUManagerPolicyBetaOptions`.
    pub beta: bool,
}

/// An option cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CpuOptionError {
    /// There is no such option.
    #[error("unknown CPU Manager Policy option: {0:?}")]
    Unknown(String),
    /// The feature gate of the option is off.
    #[error("CPU Manager Policy {level}-level Options not enabled, but option {name:?} provided")]
    Gate {
        /// `Alpha` or `Beta`.
        level: &'static str,
        /// Name of the option.
        name: String,
    },
    /// The value is not a boolean.
    #[error("bad value for option {name:?}: {value:?}")]
    NotBoolean {
        /// Name of the option.
        name: String,
        /// Value in the configuration.
        value: String,
    },
    /// Two options exclude each other.
    #[error("static policy options {0} and {1} can not be used at the same time")]
    Exclusive(&'static str, &'static str),
    /// `align-by-socket` needs resources on more than one NUMA node.
    #[error(
        "topology manager policy single-numa-node is incompatible with CPU manager policy option {BY_SOCKET}"
    )]
    SingleNumaNode,
    /// `align-by-socket` needs sockets that are no smaller than NUMA nodes.
    #[error("{BY_SOCKET} is not compatible with hardware that has more sockets than NUMA nodes")]
    SmallSockets,
}

impl CpuOptions {
    /// Parses the options of the configuration.
    ///
    /// # Errors
    /// An option is unknown, its gate is off, its value is not a boolean, or another option excludes it.
    pub fn parse(options: &BTreeMap<String, String>, gates: CpuGates) -> Result<Self, CpuOptionError> {
        let mut parsed = Self::default();
        for (name, value) in options {
            *parsed.field(name, gates)? = boolean(name, value)?;
        }
        let is_set = |name: &str| {
            parsed.clone().field(name, CpuGates { alpha: true, beta: true }).is_ok_and(|set| *set)
        };
        match EXCLUSIVE.into_iter().find(|(first, second)| is_set(first) && is_set(second)) {
            Some((first, second)) => Err(CpuOptionError::Exclusive(first, second)),
            None => Ok(parsed),
        }
    }

    fn field(&mut self, name: &str, gates: CpuGates) -> Result<&mut bool, CpuOptionError> {
        let gate = |level, is_on| {
            if is_on { Ok(()) } else { Err(CpuOptionError::Gate { level, name: name.to_owned() }) }
        };
        match name {
            FULL_CORES => Ok(&mut self.full_cores),
            STRICT_RESERVATION => Ok(&mut self.strict_reservation),
            BY_CACHE => Ok(&mut self.by_cache),
            ACROSS_NODES => gate("Beta", gates.beta).map(|()| &mut self.across_nodes),
            BY_SOCKET => gate("Alpha", gates.alpha).map(|()| &mut self.by_socket),
            ACROSS_CORES => gate("Alpha", gates.alpha).map(|()| &mut self.across_cores),
            _ => Err(CpuOptionError::Unknown(name.to_owned())),
        }
    }

    /// Checks that the machine and the topology policy fit the options (`ValidateStaticPolicyOptions`).
    ///
    /// # Errors
    /// `align-by-socket` is set, and they do not fit it.
    pub fn check(&self, topology: &CpuTopology, policy: PolicyName) -> Result<(), CpuOptionError> {
        if self.by_socket && policy == PolicyName::SingleNumaNode {
            return Err(CpuOptionError::SingleNumaNode);
        }
        if self.by_socket && topology.socket_count() > topology.nodes().len() {
            return Err(CpuOptionError::SmallSockets);
        }
        Ok(())
    }
}

/// Parses a boolean as Go's `strconv.ParseBool` does.
fn boolean(name: &str, value: &str) -> Result<bool, CpuOptionError> {
    match value {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Ok(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Ok(false),
        _ => Err(CpuOptionError::NotBoolean { name: name.to_owned(), value: value.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_machines::{DUAL_SOCKET, FOUR_SOCKETS_IN_TWO_NODES, machine};

    const ALL: CpuGates = CpuGates { alpha: true, beta: true };

    fn parse(names: &str, gates: CpuGates) -> Result<CpuOptions, String> {
        let options = names.split_whitespace().map(|name| (name.to_owned(), "true".to_owned())).collect();
        CpuOptions::parse(&options, gates).map_err(|error| error.to_string())
    }

    #[test]
    fn options_are_parsed_as_far_as_their_gates_are_on() {
        let none = CpuOptions::default();
        let stable = CpuOptions { full_cores: true, strict_reservation: true, by_cache: true, ..none };
        let names = format!("{FULL_CORES} {STRICT_RESERVATION} {BY_CACHE}");
        assert_eq!(parse(&names, CpuGates { alpha: false, beta: false }), Ok(stable));
        assert_eq!(parse(ACROSS_NODES, ALL), Ok(CpuOptions { across_nodes: true, ..none }));
        assert_eq!(parse(BY_SOCKET, ALL), Ok(CpuOptions { by_socket: true, ..none }));
        assert_eq!(parse(ACROSS_CORES, ALL), Ok(CpuOptions { across_cores: true, ..none }));
        let gate = |level: &str, name: &str| {
            Err(format!("CPU Manager Policy {level}-level Options not enabled, but option {name:?} provided"))
        };
        assert_eq!(parse(ACROSS_NODES, CpuGates { beta: false, ..ALL }), gate("Beta", ACROSS_NODES));
        assert_eq!(parse(BY_SOCKET, CpuGates { alpha: false, ..ALL }), gate("Alpha", BY_SOCKET));
        assert_eq!(parse("x", ALL), Err("unknown CPU Manager Policy option: \"x\"".to_owned()));
        let bad = CpuOptions::parse(&[(FULL_CORES.to_owned(), "yes".to_owned())].into(), ALL);
        assert!(matches!(bad, Err(CpuOptionError::NotBoolean { .. })));
    }

    #[test]
    fn options_that_exclude_each_other_are_refused() {
        for (first, second) in EXCLUSIVE {
            let text = format!("static policy options {first} and {second} can not be used at the same time");
            assert_eq!(parse(&format!("{first} {second}"), ALL), Err(text));
        }
        assert!(parse(&format!("{FULL_CORES} {ACROSS_NODES} {BY_SOCKET}"), ALL).is_ok());
        assert!(parse(&format!("{FULL_CORES} {BY_CACHE} {BY_SOCKET}"), ALL).is_ok());
    }

    #[test]
    fn aligning_by_socket_needs_a_machine_and_a_topology_policy_that_fit() {
        let by_socket = CpuOptions { by_socket: true, ..CpuOptions::default() };
        let check = |options: CpuOptions, shape, policy| options.check(&machine(shape), policy);
        assert_eq!(check(by_socket, DUAL_SOCKET, PolicyName::Restricted), Ok(()));
        let single = check(by_socket, DUAL_SOCKET, PolicyName::SingleNumaNode);
        assert_eq!(single, Err(CpuOptionError::SingleNumaNode));
        let small = check(by_socket, FOUR_SOCKETS_IN_TWO_NODES, PolicyName::None);
        assert_eq!(small, Err(CpuOptionError::SmallSockets));
        assert_eq!(
            check(CpuOptions::default(), FOUR_SOCKETS_IN_TWO_NODES, PolicyName::SingleNumaNode),
            Ok(())
        );
    }
}
