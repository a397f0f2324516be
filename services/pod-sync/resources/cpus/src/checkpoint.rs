//! The kubelet's file `cpu_manager_state` (`pkg/kubelet/cm/cpumanager/state`): JSON with a checksum of what Go prints for the data.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use pod_sync_machine::CpuSet;
use quintlet_model::hash::GoHash;
use serde::{Deserialize, Serialize};

use crate::assignments::CpuAssignments;

/// Name of the file in the root directory.
pub const CHECKPOINT: &str = "cpu_manager_state";

/// Reason why a state file cannot be used. The node must be drained, and the file removed.
#[derive(Debug, thiserror::Error)]
pub enum CpuCheckpointError {
    /// The file is not valid JSON, or has other fields.
    #[error("not a state file of CPUs")]
    Unreadable(#[source] serde_json::Error),
    /// The checksum does not match.
    #[error("state file is corrupt: its checksum is {found}, that of its data is {expected}")]
    Checksum {
        /// Checksum in the file.
        found: u64,
        /// Checksum of the data.
        expected: u64,
    },
    /// The file was written with another policy.
    #[error("configured policy {configured:?} differs from state checkpoint policy {found:?}")]
    Policy {
        /// The policy of the configuration.
        configured: String,
        /// The policy of the file.
        found: String,
    },
    /// A set of CPUs is malformed.
    #[error("could not parse cpuset {0:?}")]
    Cpus(String),
    /// The file is of a kubelet before 1.18, which has IDs of containers, and there is no such container.
    #[error("containerID '{0}' not found in initial containers list")]
    UnknownContainer(String),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct File<E> {
    policy_name: String,
    default_cpu_set: String,
    #[serde(default = "BTreeMap::new", skip_serializing_if = "BTreeMap::is_empty")]
    entries: BTreeMap<String, E>,
    checksum: u64,
}

/// CPUs of the containers of a pod.
type Containers = BTreeMap<String, String>;

/// Returns the content of a state file.
///
/// # Errors
/// Serialization failed, which strings and numbers do not cause.
pub fn encode(policy: &str, assignments: &CpuAssignments) -> Result<Vec<u8>, serde_json::Error> {
    let mut entries: BTreeMap<String, Containers> = BTreeMap::new();
    for (pod, container, cpus) in assignments.all_exclusive() {
        entries.entry(pod.to_owned()).or_default().insert(container.to_owned(), cpus.to_string());
    }
    let default_cpu_set = assignments.shared.to_string();
    let mut file = File { policy_name: policy.to_owned(), default_cpu_set, entries, checksum: 0 };
    file.checksum = checksum(&file, "map[string]map[string]string", print_containers);
    serde_json::to_vec(&file)
}

/// Parses a state file. `container_of` returns the pod's UID and the name of the container with an ID; only files of kubelets before
/// 1.18 need it.
///
/// # Errors
/// See [`CpuCheckpointError`].
pub fn decode(
    bytes: &[u8],
    policy: &str,
    container_of: impl Fn(&str) -> Option<(String, String)>,
) -> Result<CpuAssignments, CpuCheckpointError> {
    let unreadable = match serde_json::from_slice::<File<Containers>>(bytes) {
        Ok(file) => {
            check(&file, policy, checksum(&file, "map[string]map[string]string", print_containers))?;
            let entries = file.entries.iter().flat_map(|(pod, containers)| {
                containers
                    .iter()
                    .map(move |(container, cpus)| ((pod.clone(), container.clone()), cpus.clone()))
            });
            return assignments(&file.default_cpu_set, entries.map(Ok));
        }
        Err(error) => error,
    };
    let Ok(file) = serde_json::from_slice::<File<String>>(bytes) else {
        return Err(CpuCheckpointError::Unreadable(unreadable));
    };
    check(&file, policy, checksum(&file, "map[string]string", |out, cpus| out.write_str(cpus)))?;
    let entries = file.entries.iter().map(|(id, cpus)| {
        let container = container_of(id).ok_or_else(|| CpuCheckpointError::UnknownContainer(id.clone()))?;
        Ok((container, cpus.clone()))
    });
    assignments(&file.default_cpu_set, entries)
}

fn check<E>(file: &File<E>, policy: &str, expected: u64) -> Result<(), CpuCheckpointError> {
    // Old kubelets wrote no checksum.
    if file.checksum != 0 && file.checksum != expected {
        return Err(CpuCheckpointError::Checksum { found: file.checksum, expected });
    }
    if file.policy_name != policy {
        let (configured, found) = (policy.to_owned(), file.policy_name.clone());
        return Err(CpuCheckpointError::Policy { configured, found });
    }
    Ok(())
}

type EntryOfContainer = ((String, String), String);

fn assignments(
    shared: &str,
    entries: impl Iterator<Item = Result<EntryOfContainer, CpuCheckpointError>>,
) -> Result<CpuAssignments, CpuCheckpointError> {
    let parse = |text: &str| text.parse::<CpuSet>().map_err(|_| CpuCheckpointError::Cpus(text.to_owned()));
    let mut assignments = CpuAssignments::new(parse(shared)?);
    for entry in entries {
        let ((pod, container), cpus) = entry?;
        assignments.restore(&pod, &container, parse(&cpus)?);
    }
    Ok(assignments)
}

fn print_containers(out: &mut GoHash, containers: &Containers) -> fmt::Result {
    out.write_str("map[")?;
    out.separated(containers, |out, (container, cpus)| write!(out, "{container}:{cpus}"))?;
    out.write_char(']')
}

fn checksum<E>(file: &File<E>, kind: &str, print: impl Fn(&mut GoHash, &E) -> fmt::Result) -> u64 {
    let File { policy_name, default_cpu_set, entries, .. } = file;
    let hash = GoHash::of(|out| {
        write!(
            out,
            "(*state.CPUManagerCheckpoint){{PolicyName:(string){policy_name} DefaultCPUSet:(string){default_cpu_set} Entries:({kind})map["
        )?;
        out.separated(entries, |out, (key, entry)| {
            write!(out, "{key}:")?;
            print(out, entry)
        })?;
        out.write_str("] Checksum:(checksum.Checksum)0}")
    });
    // The writer never fails.
    hash.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    // A kubelet writes this file where it never had another policy.
    const OF_KUBELET: &str = r#"{"policyName":"none","defaultCpuSet":"","checksum":1353318690}"#;
    // The checksums were computed with the kubelet's library.
    const WITH_PODS: &str = r#"{"policyName":"static","defaultCpuSet":"0,2-7","entries":{"u0":{"c":"8"},"u1":{"a":"3-4","b":"1"}},"checksum":CHECKSUM}"#;
    const BY_ID: &str =
        r#"{"policyName":"static","defaultCpuSet":"0,2-7","entries":{"u1":"1"},"checksum":2504733722}"#;

    fn with_pods() -> String {
        WITH_PODS.replace("CHECKSUM", "3022101356")
    }

    fn read(text: &str, policy: &str) -> Result<CpuAssignments, CpuCheckpointError> {
        decode(text.as_bytes(), policy, |id| (id == "u1").then(|| ("pod".to_owned(), "main".to_owned())))
    }

    fn cpus(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    #[test]
    fn state_files_of_kubelets_are_read_and_written_again_byte_for_byte() {
        for (text, policy) in [(OF_KUBELET, "none"), (&with_pods(), "static")] {
            let again = encode(policy, &read(text, policy).unwrap()).unwrap();
            assert_eq!(String::from_utf8(again).unwrap(), text);
        }
        let assignments = read(&with_pods(), "static").unwrap();
        assert_eq!(assignments.exclusive("u1", "a"), Some(&cpus("3-4")));
        assert_eq!(assignments.shared, cpus("0,2-7"));
    }

    #[test]
    fn a_file_with_ids_of_containers_is_read() {
        let assignments = read(BY_ID, "static").unwrap();
        assert_eq!(assignments.exclusive("pod", "main"), Some(&cpus("1")));
        let unknown = decode(BY_ID.as_bytes(), "static", |_| None).unwrap_err().to_string();
        assert_eq!(unknown, "containerID 'u1' not found in initial containers list");
    }

    #[test]
    fn a_torn_changed_or_foreign_file_is_refused() {
        let whole = with_pods();
        for cut in [0, 1, whole.len() / 2, whole.len() - 1] {
            assert!(matches!(read(&whole[..cut], "static"), Err(CpuCheckpointError::Unreadable(_))), "{cut}");
        }
        let refused = |text: &str, policy: &str| read(text, policy).unwrap_err().to_string();
        let changed = refused(&whole.replace("3-4", "3-5"), "static");
        assert!(changed.contains("checksum is 3022101356"), "{changed}");
        let other = refused(OF_KUBELET, "static");
        assert_eq!(other, "configured policy \"static\" differs from state checkpoint policy \"none\"");
        let without_checksum = whole.replace("3022101356", "0");
        assert!(read(&without_checksum, "static").is_ok());
        assert_eq!(
            refused(&without_checksum.replace("3-4", "4-3"), "static"),
            "could not parse cpuset \"4-3\""
        );
        assert!(refused("{}", "static").contains("not a state file"));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            entries in prop::collection::vec(("[a-z]{1,3}", "[a-z-]{1,2}", 0_u32..99), 0..8),
        ) {
            let mut assignments = CpuAssignments::new(cpus("0-99"));
            for (pod, container, cpu) in entries {
                assignments.assign(&pod, &container, cpus(&cpu.to_string()));
            }
            let text = String::from_utf8(encode("static", &assignments).unwrap()).unwrap();
            prop_assert_eq!(read(&text, "static").unwrap(), assignments);
        }
    }
}
