//! Decodes manifests to valid pods with defaults (`pkg/kubelet/config: tryDecodeSinglePod`).

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Pod, ResourceRequirements, Secret, Toleration};
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_saphyr::DuplicateKeyPolicy;

use pod_sync_layout::{ManifestProblem, SourceKind};
use quintlet_kit::contain::{Work, contained_now};
use quintlet_kit::failpoint;
use quintlet_model::ids::PodUid;
use quintlet_model::labels;

use super::defaults::set_defaults;
use super::kubelet_uid::{ComputedUids, StaticPod};
pub use super::origin::ManifestOrigin;
use super::zero::ZeroForNull;
use super::{Snapshot, validate};

/// The priority class of pods that every node needs, and its priority (`pkg/apis/scheduling`).
const NODE_CRITICAL: &str = "system-node-critical";
const NODE_CRITICAL_PRIORITY: i32 = 2_000_001_000;

/// Returns the UID of a pod whose manifest has none. `None` is that of the newest version of the kubelet.
pub type KeptUid<'a> = dyn FnMut(&Pod, &ComputedUids) -> Option<PodUid> + 'a;

/// Decodes all documents of a manifest into `into`. An invalid document becomes a problem and does not affect
/// the others. A panic becomes a problem of the whole manifest.
pub fn manifest(bytes: &[u8], origin: ManifestOrigin<'_>, into: &mut Snapshot) {
    manifest_keeping_uids(bytes, origin, &mut |_, _| None, into);
}

/// Decodes a manifest as [`manifest`] does. `kept` returns the UIDs of pods without one.
pub fn manifest_keeping_uids(
    bytes: &[u8],
    origin: ManifestOrigin<'_>,
    kept: &mut KeptUid<'_>,
    into: &mut Snapshot,
) {
    // The UIDs are not known before the manifest is decoded.
    let work = Work::new("", origin.place);
    let decoded = contained_now(&work, || {
        let mut decoded = Snapshot::default();
        documents(bytes, origin, kept, &mut decoded);
        decoded
    });
    match decoded {
        Ok(decoded) => {
            into.pods.extend(decoded.pods);
            into.config_maps.extend(decoded.config_maps);
            into.secrets.extend(decoded.secrets);
            into.problems.extend(decoded.problems);
            into.warnings.extend(decoded.warnings);
        }
        Err(panic) => into.problems.push(ManifestProblem {
            origin: origin.place.to_owned(),
            field: String::new(),
            message: format!("internal error: pod-sync {panic}"),
        }),
    }
}

fn documents(bytes: &[u8], origin: ManifestOrigin<'_>, kept: &mut KeptUid<'_>, into: &mut Snapshot) {
    failpoint::work!("manifest decoded");
    let problem =
        |field: String, message: String| ManifestProblem { origin: origin.place.to_owned(), field, message };
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(e) => {
            into.problems.push(problem(String::new(), format!("not UTF-8: {e}")));
            return;
        }
    };
    let documents = match parse(text) {
        Ok((documents, duplicate)) => {
            into.warnings.extend(duplicate.map(|message| problem(String::new(), message)));
            documents
        }
        Err(message) => {
            into.problems.push(problem(String::new(), format!("not YAML or JSON: {message}")));
            return;
        }
    };
    let mut seen = false;
    for document in documents {
        if document.is_null() {
            continue;
        }
        seen = true;
        one(document, origin, kept, into);
    }
    if !seen {
        into.problems.push(problem(String::new(), "empty: no document in it".to_owned()));
    }
}

/// Returns the documents, and a warning if a key stands twice in a mapping. Its last value counts, as in the
/// kubelet.
fn parse(text: &str) -> Result<(Vec<Value>, Option<String>), String> {
    let read = |duplicate_keys| {
        // `0440` is octal, as in the kubelet.
        let options = serde_saphyr::options! {
            legacy_octal_numbers: true,
            duplicate_keys: duplicate_keys,
        };
        serde_saphyr::from_multiple_with_options(text, options)
    };
    // Only the first line of a message: the others quote the source text.
    let line = |e: &serde_saphyr::Error| e.to_string().lines().next().unwrap_or_default().trim().to_owned();
    match read(DuplicateKeyPolicy::Error) {
        Ok(documents) => Ok((documents, None)),
        Err(e) if matches!(e.without_snippet(), serde_saphyr::Error::DuplicateMappingKey { .. }) => {
            let warning = format!("warning: {}; the last value counts", line(&e));
            let documents = read(DuplicateKeyPolicy::LastWins).map_err(|e| line(&e))?;
            Ok((documents, Some(warning)))
        }
        Err(e) => Err(line(&e)),
    }
}

fn one(document: Value, origin: ManifestOrigin<'_>, kept: &mut KeptUid<'_>, into: &mut Snapshot) {
    let mut fail = |field: &str, message: String| {
        into.problems.push(ManifestProblem {
            origin: origin.place.to_owned(),
            field: field.to_owned(),
            message,
        })
    };
    let kind = document.get("kind").and_then(Value::as_str).unwrap_or_default().to_owned();
    let api_version = document.get("apiVersion").and_then(Value::as_str).unwrap_or_default().to_owned();
    if !document.is_object() {
        return fail("", "not an object with apiVersion and kind".to_owned());
    }
    if kind.is_empty() {
        return fail("kind", "required".to_owned());
    }
    if api_version != "v1" {
        return fail("apiVersion", format!("{api_version:?}: only v1 objects are used here"));
    }
    match kind.as_str() {
        "Pod" => match typed::<Pod>(document) {
            Ok(pod) => add_pod(pod, origin, kept, into),
            Err((field, message)) => fail(&field, message),
        },
        "ConfigMap" => match typed::<ConfigMap>(document) {
            Ok(mut object) => {
                object.metadata.namespace.get_or_insert_with(|| "default".to_owned());
                into.config_maps.push(object);
            }
            Err((field, message)) => fail(&field, message),
        },
        "Secret" => match typed::<Secret>(document) {
            Ok(mut object) => {
                object.metadata.namespace.get_or_insert_with(|| "default".to_owned());
                for (key, value) in object.string_data.take().unwrap_or_default() {
                    object
                        .data
                        .get_or_insert_with(BTreeMap::new)
                        .insert(key, k8s_openapi::ByteString(value.into_bytes()));
                }
                into.secrets.push(object);
            }
            Err((field, message)) => fail(&field, message),
        },
        "PodList" if origin.kind == SourceKind::Http => {
            let items = document.get("items").and_then(Value::as_array).cloned().unwrap_or_default();
            for mut item in items {
                if let Some(object) = item.as_object_mut() {
                    object.entry("kind").or_insert_with(|| "Pod".into());
                    object.entry("apiVersion").or_insert_with(|| "v1".into());
                }
                one(item, origin, kept, into);
            }
        }
        other => fail("kind", format!("{other:?}: want Pod, ConfigMap or Secret")),
    }
}

fn typed<T: DeserializeOwned>(document: Value) -> Result<T, (String, String)> {
    serde_path_to_error::deserialize(ZeroForNull(document)).map_err(|e| {
        let field = e.path().to_string();
        (if field == "." { String::new() } else { field }, e.into_inner().to_string())
    })
}

fn add_pod(mut pod: Pod, origin: ManifestOrigin<'_>, kept: &mut KeptUid<'_>, into: &mut Snapshot) {
    let fail = |field: &str, message: String| ManifestProblem {
        origin: origin.place.to_owned(),
        field: field.to_owned(),
        message,
    };
    if pod.metadata.name.as_deref().unwrap_or_default().is_empty() {
        into.problems.push(fail("metadata.name", "required: a pod needs a name".to_owned()));
        return;
    }
    let own_resources = pod.spec.as_ref().and_then(|spec| spec.resources.clone());
    set_defaults(&mut pod);
    identify(&mut pod, own_resources.as_ref(), origin, kept);
    let errors = validate::static_pod(&pod);
    if errors.is_empty() {
        if let Some((field, message)) = priority_warning(&pod) {
            into.warnings.push(fail(field, format!("warning: {message}")));
        }
        into.pods.push(Arc::new(pod));
    } else {
        into.problems.extend(errors.into_iter().map(|e| fail(&e.field, e.message)));
    }
}

/// Returns the field and the warning of a static pod whose priority does not have the effect that its author
/// may expect (`pkg/kubelet/config: getStaticPodPriorityWarning`).
fn priority_warning(pod: &Pod) -> Option<(&'static str, String)> {
    let spec = pod.spec.as_ref()?;
    let class = spec.priority_class_name.as_deref().unwrap_or_default();
    match spec.priority {
        None if class.is_empty() => None,
        None => Some((
            "spec.priorityClassName",
            "the pod has no priority, so pod-sync does not use its priority class; the creation of the mirror pod may fail"
                .to_owned(),
        )),
        Some(_) if class.is_empty() => Some((
            "spec.priority",
            "set without spec.priorityClassName; the creation of the mirror pod may fail if the default priority class has \
             another priority"
                .to_owned(),
        )),
        Some(NODE_CRITICAL_PRIORITY) if class == NODE_CRITICAL => None,
        Some(priority) => Some((
            "spec.priority",
            format!(
                "{priority} of {class} is not {NODE_CRITICAL_PRIORITY} of {NODE_CRITICAL}; the mirror pod may be evicted, which \
                 does not end the pod"
            ),
        )),
    }
}

/// Sets UID, name, namespace and annotations of a static pod (`pkg/kubelet/config: applyDefaults`).
///
/// The UID is a hash of the pod and its origin, so any change makes a new pod. It is the one that a kubelet
/// computes.
fn identify(
    pod: &mut Pod,
    own_resources: Option<&ResourceRequirements>,
    origin: ManifestOrigin<'_>,
    kept: &mut KeptUid<'_>,
) {
    let has_uid = !pod.metadata.uid.as_deref().unwrap_or_default().is_empty();
    let computed = (!has_uid).then(|| ComputedUids::of(StaticPod { pod, own_resources }, origin));
    let node = origin.node.to_lowercase();
    if let Some(name) = pod.metadata.name.as_mut() {
        *name = format!("{name}-{node}");
    }
    pod.metadata.namespace.get_or_insert_with(|| "default".to_owned());
    if let Some(computed) = computed {
        let uid = kept(pod, &computed).map_or_else(|| computed.newest().to_owned(), |uid| uid.to_string());
        pod.metadata.uid = Some(uid);
    }
    let uid = pod.metadata.uid.clone().unwrap_or_default();
    pod.metadata.annotations.get_or_insert_with(BTreeMap::new).insert(labels::CONFIG_HASH.to_owned(), uid);
    pod.status.get_or_insert_with(Default::default).phase = Some("Pending".to_owned());
    if let Some(spec) = pod.spec.as_mut() {
        spec.node_name = Some(origin.node.to_owned());
        if origin.kind == SourceKind::File {
            let all = |t: &Toleration| {
                t.operator.as_deref() == Some("Exists")
                    && t.effect.as_deref() == Some("NoExecute")
                    && t.key.is_none()
            };
            let tolerations = spec.tolerations.get_or_insert_with(Vec::new);
            if !tolerations.iter().any(all) {
                tolerations.push(Toleration {
                    operator: Some("Exists".to_owned()),
                    effect: Some("NoExecute".to_owned()),
                    ..Toleration::default()
                });
            }
        }
    }
}

/// Returns the only pod of a manifest with its defaults, before it is identified, and its own resources.
#[cfg(test)]
pub(crate) fn pod_with_defaults(text: &str) -> Result<(Pod, Option<ResourceRequirements>), String> {
    let (documents, _) = parse(text)?;
    let document = documents.into_iter().next().ok_or("no document")?;
    let mut pod = typed::<Pod>(document).map_err(|(field, message)| format!("{field}: {message}"))?;
    let own_resources = pod.spec.as_ref().and_then(|spec| spec.resources.clone());
    set_defaults(&mut pod);
    Ok((pod, own_resources))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::defaults::has_latest_tag;

    const ORIGIN: ManifestOrigin<'static> =
        ManifestOrigin { kind: SourceKind::File, place: "/m/web.yaml", node: "Node1" };

    fn decode(text: &str) -> Snapshot {
        let mut out = Snapshot::default();
        manifest(text.as_bytes(), ORIGIN, &mut out);
        out
    }

    const WEB: &str = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\nspec:\n  containers:\n  - name: main\n    image: busybox:1\n";

    struct Panics;

    impl failpoint::Observer for Panics {
        fn reached(&self, _: failpoint::Failpoint) {
            panic!("no such digit");
        }
    }

    #[test]
    fn a_panic_while_a_manifest_is_decoded_is_a_problem_of_that_manifest() {
        let out = std::thread::spawn(|| {
            failpoint::observe(Arc::new(Panics));
            decode(WEB)
        });
        let out = out.join().unwrap();
        let [problem] = &out.problems[..] else { panic!("{:?}", out.problems) };
        assert_eq!((problem.origin.as_str(), out.pods.len()), ("/m/web.yaml", 0));
        let message = &problem.message;
        let is_reported = message.starts_with("internal error: pod-sync panicked at ");
        assert!(is_reported && message.ends_with(": no such digit"), "{message}");
    }

    #[test]
    fn a_pod_of_a_file_gets_the_kubelets_name_namespace_annotations_and_toleration() {
        let out = decode(WEB);
        assert_eq!(out.problems, []);
        let pod = &out.pods[0];
        assert_eq!(pod.metadata.name.as_deref(), Some("web-node1"));
        assert_eq!(pod.metadata.namespace.as_deref(), Some("default"));
        let uid = pod.metadata.uid.clone().unwrap();
        assert_eq!(uid.len(), 32);
        assert_eq!(pod.metadata.annotations.as_ref().unwrap()[labels::CONFIG_HASH], uid);
        let spec = pod.spec.as_ref().unwrap();
        assert_eq!(spec.node_name.as_deref(), Some("Node1"));
        assert_eq!(spec.tolerations.as_ref().unwrap().len(), 1);
        assert_eq!(spec.termination_grace_period_seconds, Some(30));
        assert_eq!(spec.containers[0].image_pull_policy.as_deref(), Some("IfNotPresent"));
    }

    #[test]
    fn defaults_are_those_of_the_api_server() {
        for (spec, path, want) in [
            (
                "volumes: [{name: v, image: {reference: r.test/a:latest}}]",
                "/volumes/0/image/pullPolicy",
                json!("Always"),
            ),
            (
                "volumes: [{name: v, image: {reference: r.test/a:1}}]",
                "/volumes/0/image/pullPolicy",
                json!("IfNotPresent"),
            ),
            (
                "volumes: [{name: v, projected: {sources: [{downwardAPI: {items: [{path: p, fieldRef: {fieldPath: metadata.name}}]}}]}}]",
                "/volumes/0/projected/sources/0/downwardAPI/items/0/fieldRef/apiVersion",
                json!("v1"),
            ),
            (
                "resources: {limits: {cpu: 1, memory: 1Mi}}",
                "/resources/requests",
                json!({"cpu": "1", "memory": "1Mi"}),
            ),
            (
                "resources: {limits: {cpu: 1}}\n  initContainers: [{name: i, image: i, resources: {limits: {memory: 2Mi}}}]",
                "/resources/requests",
                json!({"cpu": "1", "memory": "2Mi"}),
            ),
            ("resources: {requests: {cpu: 2}, limits: {cpu: 3}}", "/resources/requests", json!({"cpu": "2"})),
            ("resources: {}", "/resources", json!({})),
            (
                "initContainers: [{name: i, image: i, lifecycle: {preStop: {httpGet: {port: 1}}}, restartPolicy: Always}]",
                "/initContainers/0/lifecycle/preStop/httpGet",
                json!({"path": "/", "port": 1, "scheme": "HTTP"}),
            ),
            (
                "initContainers: [{name: i, image: i, env: [{name: A, valueFrom: {fileKeyRef: {key: a, path: p, volumeName: v}}}]}]\n  volumes: [{name: v, emptyDir: {}}]",
                "/initContainers/0/env/0/valueFrom/fileKeyRef/optional",
                json!(false),
            ),
        ] {
            let out = decode(&format!("{WEB}  {spec}\n"));
            assert_eq!(out.problems, [], "{spec}");
            let got = serde_json::to_value(out.pods[0].spec.as_ref().unwrap()).unwrap();
            assert_eq!(got.pointer(path), Some(&want), "{spec}: {got:#}");
        }
    }

    #[test]
    fn of_duplicate_keys_the_last_value_counts_and_the_manifest_has_a_warning() {
        let twice = WEB.replace("    image: busybox:1\n", "    image: busybox:1\n    image: busybox:2\n");
        let out = decode(&twice);
        assert_eq!(out.problems, []);
        assert_eq!(out.pods[0].spec.as_ref().unwrap().containers[0].image.as_deref(), Some("busybox:2"));
        let [warning] = &out.warnings[..] else { panic!("{:?}", out.warnings) };
        let message = &warning.message;
        assert!(
            message.starts_with("warning: ") && message.ends_with("; the last value counts"),
            "{message}"
        );
        assert!(message.contains("image") && message.contains("9"), "the key and its line: {message}");
        let json = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "name": "b"},
            "spec": {"containers": [{"name": "c", "image": "i"}]}}"#;
        assert_eq!(decode(json).pods[0].metadata.name.as_deref(), Some("b-node1"));
        assert_eq!(decode(WEB).warnings, []);
    }

    #[test]
    fn a_priority_that_the_mirror_pod_does_not_share_is_warned_of() {
        for (priority, want) in [
            ("", None),
            ("  priority: 2000001000\n  priorityClassName: system-node-critical\n", None),
            (
                "  priorityClassName: system-node-critical\n",
                Some(
                    "spec.priorityClassName: warning: the pod has no priority, so pod-sync does not use its priority class; the creation of the mirror pod may fail",
                ),
            ),
            (
                "  priority: 2000001000\n",
                Some(
                    "spec.priority: warning: set without spec.priorityClassName; the creation of the mirror pod may fail if the default priority class has another priority",
                ),
            ),
            (
                "  priority: 2000000000\n  priorityClassName: system-cluster-critical\n",
                Some(
                    "spec.priority: warning: 2000000000 of system-cluster-critical is not 2000001000 of system-node-critical; the mirror pod may be evicted, which does not end the pod",
                ),
            ),
            (
                "  priority: 5\n  priorityClassName: system-node-critical\n",
                Some(
                    "spec.priority: warning: 5 of system-node-critical is not 2000001000 of system-node-critical; the mirror pod may be evicted, which does not end the pod",
                ),
            ),
        ] {
            let out = decode(&WEB.replace("spec:\n", &format!("spec:\n{priority}")));
            assert_eq!((out.problems.as_slice(), out.pods.len()), (&[][..], 1), "{priority}");
            let warnings: Vec<String> =
                out.warnings.iter().map(|w| format!("{}: {}", w.field, w.message)).collect();
            assert_eq!(warnings, want.map(str::to_owned).into_iter().collect::<Vec<_>>(), "{priority}");
        }
    }

    #[test]
    fn a_volume_without_a_source_is_an_empty_dir() {
        let out = decode(&format!("{WEB}  volumes: [{{name: a}}, {{name: b, emptyDir: }}]\n"));
        assert_eq!(out.problems, []);
        let volumes = out.pods[0].spec.clone().unwrap().volumes.unwrap();
        assert!(volumes.iter().all(|v| v.empty_dir.is_some()), "{volumes:?}");
    }

    #[test]
    fn a_mode_with_a_leading_zero_is_octal() {
        for (mode, want) in [("0440", 288), ("0o440", 288), ("0", 0), ("288", 288)] {
            let volume = format!(
                "  volumes: [{{name: v, emptyDir: {{}}}}, {{name: c, configMap: {{name: c, defaultMode: {mode}}}}}]\n"
            );
            let out = decode(&format!("{WEB}{volume}"));
            assert_eq!(out.problems, [], "{mode}");
            let volumes = out.pods[0].spec.as_ref().unwrap().volumes.clone().unwrap();
            assert_eq!(volumes[1].config_map.as_ref().unwrap().default_mode, Some(want), "{mode}");
        }
    }

    #[test]
    fn equal_manifests_have_the_same_uid_and_any_change_results_in_another() {
        let uid = |text: &str| decode(text).pods[0].metadata.uid.clone().unwrap();
        assert_eq!(uid(WEB), uid(WEB));
        assert_ne!(uid(WEB), uid(&WEB.replace("busybox:1", "busybox:2")));
        let mut fixed = decode(&WEB.replace("name: web", "name: web\n  uid: u-1"));
        assert_eq!(fixed.pods.remove(0).metadata.uid.as_deref(), Some("u-1"));
    }

    #[test]
    fn an_invalid_document_is_reported_with_its_field_and_does_not_affect_the_others() {
        for (text, field, message) in [
            ("{{", "", "not YAML or JSON"),
            ("", "", "empty"),
            ("- a\n", "", "not an object"),
            ("apiVersion: v1\nkind: Deployment\nmetadata: {name: x}\n", "kind", "want Pod"),
            ("apiVersion: apps/v1\nkind: Pod\nmetadata: {name: x}\n", "apiVersion", "only v1"),
            ("apiVersion: v1\nkind: Pod\nspec: {containers: []}\n", "metadata.name", "required"),
            (
                "apiVersion: v1\nkind: Pod\nmetadata: {name: x}\nspec: {containers: []}\n",
                "spec.containers",
                "Required value",
            ),
            (
                "apiVersion: v1\nkind: Pod\nmetadata: {name: X_}\nspec: {containers: [{name: a, image: b}]}\n",
                "metadata.name",
                "RFC 1123 subdomain",
            ),
            (
                "apiVersion: v1\nkind: Pod\nmetadata: {name: x}\nspec: {containers: [{name: a}]}\n",
                "spec.containers[0].image",
                "Required value",
            ),
            (
                "apiVersion: v1\nkind: Pod\nmetadata: {name: x}\nspec: {containers: [{name: 5, image: b}]}\n",
                "spec.containers[0].name",
                "invalid type",
            ),
        ] {
            let both = decode(&format!("{text}\n---\n{WEB}"));
            let alone = decode(text);
            assert!(alone.pods.is_empty(), "{text}");
            let p = alone.problems.first().unwrap_or_else(|| panic!("no problem for {text:?}"));
            assert_eq!(p.field, field, "{text:?}: {p:?}");
            assert!(p.message.contains(message), "{text:?}: {p:?}");
            if !text.starts_with("{{") {
                assert_eq!(both.pods.len(), 1, "{text:?}");
            }
        }
    }

    #[test]
    fn config_maps_and_secrets_may_stand_beside_pods() {
        let out = decode(
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {a: b}\n---\napiVersion: v1\nkind: Secret\nmetadata: {name: s}\nstringData: {k: v}\n",
        );
        assert_eq!(out.problems, []);
        assert_eq!(out.config_maps[0].metadata.namespace.as_deref(), Some("default"));
        assert_eq!(out.secrets[0].data.as_ref().unwrap()["k"].0, b"v");
    }

    #[test]
    fn an_image_without_tag_or_with_latest_is_always_pulled() {
        for (image, latest) in [
            ("busybox", true),
            ("busybox:latest", true),
            ("host:5000/busybox", true),
            ("host:5000/busybox:1", false),
            ("busybox@sha256:00", false),
        ] {
            assert_eq!(has_latest_tag(image), latest, "{image}");
        }
    }
}
