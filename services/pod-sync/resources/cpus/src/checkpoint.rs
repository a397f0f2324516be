//! The kubelet's file `cpu_manager_state` (`pkg/kubelet/cm/cpumanager/state`): JSON with a checksum of what
//! Go prints for the data.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use pod_sync_machine::CpuSet;
use quintlet_model::hash::{ChecksumMismatch, GoHash, check_checksum, checked_text};
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
    #[error("state file is corrupt: {0}")]
    Checksum(ChecksumMismatch),
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

/// CPUs of the containers of a pod.
type Containers = BTreeMap<String, String>;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct File<E> {
    #[serde(flatten)]
    content: Content<E>,
    checksum: u64,
    // Kubelet 1.37 writes the content a second time, as a text with a checksum of its own, which counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    data: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    data_checksum: Option<u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Content<E> {
    policy_name: String,
    default_cpu_set: String,
    #[serde(default = "BTreeMap::new", skip_serializing_if = "BTreeMap::is_empty")]
    entries: BTreeMap<String, E>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pod_entries: BTreeMap<String, PodEntry>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodEntry {
    #[serde(default)]
    cpu_set: String,
}

/// Returns the content of a state file. With `has_pods` it is that of kubelet 1.37, else that of earlier
/// ones. Earlier kubelets, and 1.37 without the feature gate, read it without the CPUs of whole pods: a node
/// that has such pods must be drained first.
///
/// # Errors
/// Serialization failed, which strings and numbers do not cause.
pub fn encode(
    policy: &str,
    assignments: &CpuAssignments,
    has_pods: bool,
) -> Result<Vec<u8>, serde_json::Error> {
    let mut entries: BTreeMap<String, Containers> = BTreeMap::new();
    for (pod, container, cpus) in assignments.containers() {
        entries.entry(pod.to_owned()).or_default().insert(container.to_owned(), cpus.to_string());
    }
    let pods = assignments.pods().filter(|_| has_pods);
    let content = Content {
        policy_name: policy.to_owned(),
        default_cpu_set: assignments.shared.to_string(),
        entries,
        pod_entries: pods
            .map(|(pod, cpus)| (pod.to_owned(), PodEntry { cpu_set: cpus.to_string() }))
            .collect(),
    };
    let mut file = File { content, checksum: 0, data: None, data_checksum: None };
    if has_pods {
        let data = serde_json::to_string(&file.content)?;
        file.data_checksum = Some(GoHash::of_string(&data));
        file.data = Some(data);
    } else {
        file.checksum = checksum(&file.content, &PLAIN, "map[string]map[string]string", print_containers);
    }
    serde_json::to_vec(&file)
}

/// Parses a state file. `container_of` returns the pod's UID and the name of the container with an ID; only
/// files of kubelets before 1.18 need it.
///
/// # Errors
/// See [`CpuCheckpointError`].
pub fn decode(
    bytes: &[u8],
    policy: &str,
    container_of: impl Fn(&str) -> Option<(String, String)>,
) -> Result<CpuAssignments, CpuCheckpointError> {
    let unreadable = match serde_json::from_slice::<File<Containers>>(bytes) {
        Ok(file) => return assignments_of_pods(&verified(file)?, policy),
        Err(error) => error,
    };
    let Ok(file) = serde_json::from_slice::<File<String>>(bytes) else {
        return Err(CpuCheckpointError::Unreadable(unreadable));
    };
    let expected = checksum(&file.content, &PLAIN, "map[string]string", |out, cpus| out.write_str(cpus));
    check_checksum(file.checksum, &[expected]).map_err(CpuCheckpointError::Checksum)?;
    check_policy(&file.content.policy_name, policy)?;
    let entries = file.content.entries.iter().map(|(id, cpus)| {
        let container = container_of(id).ok_or_else(|| CpuCheckpointError::UnknownContainer(id.clone()))?;
        Ok((container, cpus.clone()))
    });
    assignments(&file.content.default_cpu_set, entries)
}

/// Returns the content of a file whose checksum is right.
fn verified(file: File<Containers>) -> Result<Content<Containers>, CpuCheckpointError> {
    let text = checked_text(file.data, file.data_checksum).map_err(CpuCheckpointError::Checksum)?;
    if let Some(text) = text {
        return serde_json::from_str(&text).map_err(CpuCheckpointError::Unreadable);
    }
    let accepted =
        FORMS.map(|form| checksum(&file.content, form, "map[string]map[string]string", print_containers));
    check_checksum(file.checksum, &accepted).map_err(CpuCheckpointError::Checksum)?;
    Ok(file.content)
}

fn check_policy(found: &str, configured: &str) -> Result<(), CpuCheckpointError> {
    if found == configured {
        return Ok(());
    }
    Err(CpuCheckpointError::Policy { configured: configured.to_owned(), found: found.to_owned() })
}

fn assignments_of_pods(
    content: &Content<Containers>,
    policy: &str,
) -> Result<CpuAssignments, CpuCheckpointError> {
    check_policy(&content.policy_name, policy)?;
    let entries = content.entries.iter().flat_map(|(pod, containers)| {
        containers.iter().map(move |(container, cpus)| ((pod.clone(), container.clone()), cpus.clone()))
    });
    let mut assignments = assignments(&content.default_cpu_set, entries.map(Ok))?;
    for (pod, entry) in &content.pod_entries {
        assignments.restore_pod(pod, parse(&entry.cpu_set)?);
    }
    Ok(assignments)
}

fn parse(text: &str) -> Result<CpuSet, CpuCheckpointError> {
    text.parse().map_err(|_| CpuCheckpointError::Cpus(text.to_owned()))
}

type EntryOfContainer = ((String, String), String);

fn assignments(
    shared: &str,
    entries: impl Iterator<Item = Result<EntryOfContainer, CpuCheckpointError>>,
) -> Result<CpuAssignments, CpuCheckpointError> {
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

/// The form in which a kubelet prints the content for its checksum.
struct Form {
    /// Name of the type in Go.
    name: &'static str,
    has_pods: bool,
}

/// The form of all kubelets without the feature gate `PodLevelResourceManagers`.
const PLAIN: Form = Form { name: "CPUManagerCheckpoint", has_pods: false };
/// Every form that kubelet 1.37 accepts.
const FORMS: [&Form; 4] = [
    &PLAIN,
    // The first revision of the gate wrote this form while the gate was off. Kubelet 1.37 accepts it while
    // the gate is off.
    &Form { name: "CPUManagerCheckpointV2", has_pods: false },
    // Kubelet 1.36 with the gate, where `CPUManagerCheckpointV3` is an alias of this type.
    &Form { name: "CPUManagerCheckpoint", has_pods: true },
    // Revisions with the gate where `CPUManagerCheckpointV3` is a type of its own, as in kubelet 1.37.
    &Form { name: "CPUManagerCheckpointV3", has_pods: true },
];

fn checksum<E>(
    content: &Content<E>,
    form: &Form,
    kind: &str,
    print: impl Fn(&mut GoHash, &E) -> fmt::Result,
) -> u64 {
    let Content { policy_name, default_cpu_set, entries, pod_entries } = content;
    let name = form.name;
    let hash = GoHash::of(|out| {
        write!(
            out,
            "(*state.{name}){{PolicyName:(string){policy_name} DefaultCPUSet:(string){default_cpu_set} Entries:({kind})map["
        )?;
        out.separated(entries, |out, (key, entry)| {
            write!(out, "{key}:")?;
            print(out, entry)
        })?;
        if form.has_pods {
            out.write_str("] PodEntries:(state.PodCPUAssignments)map[")?;
            out.separated(pod_entries, |out, (pod, entry)| print_pod(out, pod, entry))?;
        }
        out.write_str("] Checksum:(checksum.Checksum)0}")
    });
    // The writer never fails.
    hash.unwrap_or(0)
}

fn print_pod(out: &mut GoHash, pod: &str, entry: &PodEntry) -> fmt::Result {
    write!(out, "{pod}:{{CPUSet:(cpuset.CPUSet){{elems:(map[int]struct {{}})map[")?;
    let cpus: CpuSet = entry.cpu_set.parse().unwrap_or_default();
    out.separated(cpus.iter(), |out, cpu| write!(out, "{}:{{}}", cpu.number()))?;
    out.write_str("]}}")
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
            let again = encode(policy, &read(text, policy).unwrap(), false).unwrap();
            assert_eq!(String::from_utf8(again).unwrap(), text);
        }
        let assignments = read(&with_pods(), "static").unwrap();
        assert_eq!(assignments.container("u1", "a"), Some(&cpus("3-4")));
        assert_eq!(assignments.shared, cpus("0,2-7"));
    }

    #[test]
    fn a_file_with_ids_of_containers_is_read() {
        let assignments = read(BY_ID, "static").unwrap();
        assert_eq!(assignments.container("pod", "main"), Some(&cpus("1")));
        let unknown = decode(BY_ID.as_bytes(), "static", |_| None).unwrap_err().to_string();
        assert_eq!(unknown, "containerID 'u1' not found in initial containers list");
    }

    #[test]
    fn the_text_with_the_content_needs_its_checksum() {
        let assignments = CpuAssignments::new(cpus("0-7"));
        let text = String::from_utf8(encode("static", &assignments, true).unwrap()).unwrap();
        assert_eq!(read(&text, "static").unwrap(), assignments);
        let (before, data_checksum) = text.rsplit_once(",\"dataChecksum\":").unwrap();
        let (plain, _) = before.split_once(",\"data\":").unwrap();
        for changed in [
            format!("{before}}}"),
            format!("{before},\"dataChecksum\":0}}"),
            format!("{plain},\"data\":\"\",\"dataChecksum\":{data_checksum}"),
            format!("{plain},\"dataChecksum\":{data_checksum}"),
        ] {
            let refused = read(&changed, "static");
            assert!(matches!(refused, Err(CpuCheckpointError::Checksum { .. })), "{changed} {refused:?}");
        }
        let without = format!("{plain},\"data\":\"\",\"dataChecksum\":0}}");
        assert_eq!(read(&without, "static").unwrap(), assignments);
    }

    // The checksum was computed with the kubelet's library.
    const OF_1_36_WITH_PODS: &str = r#"{"policyName":"static","defaultCpuSet":"1-2","entries":{"pod1":{"container1":"5-6","container2":"3-4"}},"podEntries":{"pod2":{"cpuSet":"7-9"}},"checksum":2284712151}"#;

    #[test]
    fn a_file_of_kubelet_1_36_with_pods_becomes_one_of_1_37() {
        let assignments = read(OF_1_36_WITH_PODS, "static").unwrap();
        assert_eq!(assignments.pod("pod2"), Some(&cpus("7-9")));
        assert_eq!(assignments.container("pod1", "container2"), Some(&cpus("3-4")));
        let changed = read(&OF_1_36_WITH_PODS.replace("7-9", "7-8"), "static");
        assert!(matches!(changed, Err(CpuCheckpointError::Checksum { .. })), "{changed:?}");

        let text = String::from_utf8(encode("static", &assignments, true).unwrap()).unwrap();
        let (before, _) = OF_1_36_WITH_PODS.split_once("\"checksum\"").unwrap();
        let data = format!("{}}}", before.strip_suffix(',').unwrap()).replace('"', "\\\"");
        let checksum = GoHash::of_string(&data.replace('\\', ""));
        let tail = format!("\"checksum\":0,\"data\":\"{data}\",\"dataChecksum\":{checksum}}}");
        assert_eq!(text, format!("{before}{tail}"));
        assert_eq!(read(&text, "static").unwrap(), assignments);
        // The text counts, and is checked.
        let changed = read(&text.replace("\\\"7-9", "\\\"7-8"), "static");
        assert!(matches!(changed, Err(CpuCheckpointError::Checksum { .. })), "{changed:?}");
        assert_eq!(read(&text.replacen("7-9", "7-8", 1), "static").unwrap(), assignments);
        // Without the gate, the CPUs of whole pods are left out.
        let plain = String::from_utf8(encode("static", &assignments, false).unwrap()).unwrap();
        assert_eq!(read(&plain, "static").unwrap().pods().count(), 0);
    }

    #[test]
    fn the_checksum_may_have_each_name_of_the_type_that_kubelet_1_37_accepts() {
        for (text, checksum, other) in [
            (with_pods().as_str(), "3022101356", "375923376"),
            (OF_1_36_WITH_PODS, "2284712151", "766259872"),
        ] {
            let renamed = text.replace(checksum, other);
            assert_eq!(read(&renamed, "static").unwrap(), read(text, "static").unwrap());
            let changed = read(&renamed.replace("3-4", "3"), "static");
            assert!(matches!(changed, Err(CpuCheckpointError::Checksum { .. })), "{changed:?}");
        }
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
            has_pods: bool,
        ) {
            let mut assignments = CpuAssignments::new(cpus("0-99"));
            for (pod, container, cpu) in entries {
                assignments.assign(&pod, &container, cpus(&cpu.to_string()));
            }
            let text = String::from_utf8(encode("static", &assignments, has_pods).unwrap()).unwrap();
            prop_assert_eq!(read(&text, "static").unwrap(), assignments);
        }
    }
}
