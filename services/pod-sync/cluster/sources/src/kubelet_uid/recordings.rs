//! Compares with UIDs and dumps that a kubelet has computed.
//! `services/pod-sync/cluster/sources/recordings/README.md` says how they were made.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::*;
use crate::Snapshot;
use crate::decode;

/// The node of the recordings.
const NODE: &str = "node-1";

/// The UIDs that kubelets computed for a manifest.
#[derive(Debug, Deserialize)]
struct Recording {
    /// Path or URL of the manifest.
    place: String,
    /// Whether the kubelet refuses the pod after it has computed its UID.
    #[serde(default)]
    is_refused: bool,
    /// UID by minor version of the kubelet.
    uids: BTreeMap<String, String>,
    /// UID that Quintlet computed before it computed those of kubelets.
    former: String,
    /// SHA-256 of the dump by minor version of the kubelet.
    dumps: BTreeMap<String, String>,
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("recordings")
}

fn recordings() -> BTreeMap<String, Recording> {
    let text = std::fs::read_to_string(directory().join("recordings.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn origin(place: &str) -> ManifestOrigin<'_> {
    let kind = if place.starts_with("http") { SourceKind::Http } else { SourceKind::File };
    ManifestOrigin { kind, place, node: NODE }
}

fn sha256(text: &str) -> String {
    use sha2::{Digest as _, Sha256};
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn dumps_and_uids_are_those_of_a_kubelet() {
    let mut failures = Vec::new();
    for (file, recording) in recordings() {
        let text = std::fs::read_to_string(directory().join(&file)).unwrap();
        let (pod, own) = decode::pod_with_defaults(&text).unwrap_or_else(|e| panic!("{file}: {e}"));
        let pod = StaticPod { pod: &pod, own_resources: own.as_ref() };
        let uids = ComputedUids::of(pod, origin(&recording.place));
        if recording.former != uids.former() {
            failures.push(format!("{file}: the former UID"));
        }
        for version in KubeletVersion::ALL {
            let mut dump = String::new();
            pod.dump(version, &mut dump);
            let name = version.name();
            if recording.dumps[name] != sha256(&dump) {
                failures.push(format!("{file}: the dump of {name}"));
            }
            if recording.uids[name] != uids.of_kubelet(version) {
                failures.push(format!("{file}: the UID of {name}"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

struct PanicsWithUids;

impl failpoint::Observer for PanicsWithUids {
    fn reached(&self, point: failpoint::Failpoint) {
        assert!(!format!("{point:?}").contains("UIDs computed"), "no such field");
    }
}

#[test]
fn a_panic_while_uids_of_kubelets_are_computed_leaves_the_former_uid() {
    let file = "minimal.yaml";
    let recording = &recordings()[file];
    let text = std::fs::read_to_string(directory().join(file)).unwrap();
    let uids = std::thread::scope(|scope| {
        let computed = scope.spawn(|| {
            failpoint::observe(std::sync::Arc::new(PanicsWithUids));
            let (pod, own) = decode::pod_with_defaults(&text).unwrap();
            ComputedUids::of(StaticPod { pod: &pod, own_resources: own.as_ref() }, origin(&recording.place))
        });
        computed.join().unwrap()
    });
    assert_eq!(uids.newest(), recording.former);
    assert!(uids.has(&recording.former));
    assert_eq!(uids.version_of(&recording.former), None, "it shows no kubelet");
}

#[test]
fn the_pod_of_a_manifest_has_the_uid_of_the_newest_kubelet() {
    let mut compared = 0;
    for (file, recording) in recordings().into_iter().filter(|(_, recording)| !recording.is_refused) {
        let bytes = std::fs::read(directory().join(&file)).unwrap();
        let mut out = Snapshot::default();
        decode::manifest(&bytes, origin(&recording.place), &mut out);
        assert_eq!(out.problems, [], "{file}");
        let uid = out.pods[0].metadata.uid.as_deref();
        assert_eq!(uid, Some(recording.uids["1.37"].as_str()), "{file}");
        compared += 1;
    }
    assert!(compared >= 25, "{compared}");
}

#[test]
fn each_type_of_the_table_is_a_known_struct_or_a_scalar() {
    let scalars = ["bool", "int32", "int64", "string"];
    let special = ["core.ResourceList", "intstr.IntOrString", "resource.Quantity", "v1.Time"];
    for version in KubeletVersion::ALL {
        let mut pending = vec!["core.Pod"];
        let mut seen = std::collections::BTreeSet::new();
        while let Some(name) = pending.pop() {
            let Some(structure) = types::find(name, version) else {
                assert!(
                    scalars.contains(&name) || special.contains(&name) || is_text(name),
                    "{name} in {version:?}"
                );
                continue;
            };
            if !seen.insert(name) {
                continue;
            }
            let mut fields = std::collections::BTreeSet::new();
            for field in structure.fields(version) {
                assert!(fields.insert(field.name), "{name}.{} twice in {version:?}", field.name);
                let element = field.go_type.trim_start_matches(['*']).trim_start_matches("[]");
                pending.push(element.rsplit(']').next().unwrap_or(element));
            }
        }
        assert!(seen.len() > 120, "{version:?}: {}", seen.len());
    }
}

// A named type whose values are texts.
fn is_text(name: &str) -> bool {
    let in_core = name.strip_prefix("core.").is_some_and(|name| name.starts_with(char::is_uppercase));
    in_core
        || ["types.UID", "v1.FieldsV1", "v1.LabelSelectorOperator", "v1.ManagedFieldsOperationType"]
            .contains(&name)
}
