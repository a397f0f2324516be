//! Decides which static pods keep the UID of their sandbox.
//!
//! A sandbox whose UID some node agent computes for the manifest ([`crate::kubelet_uid`]) was made from this
//! manifest. The UIDs of other kubelets cannot be computed. A pod keeps such a UID if its manifest is as the
//! kubelet read it. The newest sandbox to which one of both applies counts. Pods in the records of an earlier
//! run show their UIDs without the runtime.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use quintlet_cri_api::v1 as cri;
use quintlet_model::hash::container_hash;
use quintlet_model::ids::PodUid;
use quintlet_model::labels;

use crate::kubelet_uid::{ComputedUids, KubeletVersion};

/// A sandbox of a static pod, and the containers in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticSandbox {
    /// ID of the sandbox in the runtime.
    pub id: String,
    /// UID in the sandbox's labels.
    pub uid: String,
    /// Name of the pod in the sandbox's labels.
    pub name: String,
    /// Namespace in the sandbox's labels.
    pub namespace: String,
    /// Creation of the sandbox, in nanoseconds since 1970.
    pub created_unix_ns: i64,
    /// The annotation `kubernetes.io/config.hash`; empty if the sandbox has none.
    pub config_hash: String,
    /// The time at which the node agent first saw the pod, if the sandbox has a valid one.
    pub seen: Option<Timestamp>,
    /// The newest instance of each container.
    pub containers: Vec<HashedContainer>,
}

/// A container of a [`StaticSandbox`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HashedContainer {
    /// Name in the spec.
    pub name: String,
    /// The hash of its definition, empty if the container has none.
    pub hash: String,
}

/// Times of the last changes of a manifest file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileTimes {
    /// Last change of the content. Programs may set it.
    pub modified: Timestamp,
    /// Last change of the inode, including renames. Only the kernel sets it.
    pub changed: Timestamp,
}

impl StaticSandbox {
    /// Returns a sandbox without containers, or `None` if its pod is not a static pod from this source, as
    /// its annotation names it.
    #[must_use]
    pub fn of(sandbox: cri::PodSandbox, source: &str) -> Option<Self> {
        if sandbox.annotations.get(labels::CONFIG_SOURCE).map(String::as_str) != Some(source) {
            return None;
        }
        let value = |map: &HashMap<String, String>, key: &str| map.get(key).cloned().unwrap_or_default();
        Some(Self {
            uid: value(&sandbox.labels, labels::POD_UID),
            name: value(&sandbox.labels, labels::POD_NAME),
            namespace: value(&sandbox.labels, labels::POD_NAMESPACE),
            created_unix_ns: sandbox.created_at,
            config_hash: value(&sandbox.annotations, labels::CONFIG_HASH),
            seen: sandbox.annotations.get(labels::CONFIG_SEEN).and_then(|seen| seen.parse().ok()),
            containers: Vec::new(),
            id: sandbox.id,
        })
    }

    /// Returns a pod in a record of an earlier run, or `None` if it is not from this source. It has the UID
    /// that a pod keeps only if it was surely made from the manifest.
    #[must_use]
    pub fn of_record(uid: &PodUid, pod: &Pod, accepted: Duration, source: &str) -> Option<Self> {
        let metadata = &pod.metadata;
        if metadata.annotations.as_ref()?.get(labels::CONFIG_SOURCE).map(String::as_str) != Some(source) {
            return None;
        }
        Some(Self {
            id: String::new(),
            uid: uid.to_string(),
            name: metadata.name.clone()?,
            namespace: metadata.namespace.clone()?,
            created_unix_ns: i64::try_from(accepted.as_nanos()).unwrap_or(i64::MAX),
            config_hash: String::new(),
            seen: None,
            containers: Vec::new(),
        })
    }

    fn is_of(&self, pod: &Pod) -> bool {
        let metadata = &pod.metadata;
        Some(&self.name) == metadata.name.as_ref() && Some(&self.namespace) == metadata.namespace.as_ref()
    }
}

impl HashedContainer {
    /// Returns the name and the hash of a container.
    #[must_use]
    pub fn of(container: &cri::Container) -> Self {
        Self {
            name: container.labels.get(labels::CONTAINER_NAME).cloned().unwrap_or_default(),
            hash: container.annotations.get(labels::CONTAINER_HASH).cloned().unwrap_or_default(),
        }
    }
}

/// Returns the newest sandbox of a pod that was surely made from its manifest. The pod has its final name and
/// namespace.
fn made_from<'a>(
    pod: &Pod,
    computed: &ComputedUids,
    sandboxes: &'a [StaticSandbox],
) -> Option<&'a StaticSandbox> {
    let made = sandboxes.iter().filter(|sandbox| sandbox.is_of(pod) && computed.has(&sandbox.uid));
    made.max_by_key(|sandbox| sandbox.created_unix_ns)
}

/// Returns the UID of the newest sandbox that was surely made from the manifest. The pod has its final name
/// and namespace.
#[must_use]
pub fn made_uid(pod: &Pod, computed: &ComputedUids, sandboxes: &[StaticSandbox]) -> Option<PodUid> {
    PodUid::parse(&made_from(pod, computed, sandboxes)?.uid).ok()
}

/// Returns the version of the kubelet that made the newest of the sandboxes of these pods.
#[must_use]
pub fn version_of_kubelet<'a>(
    pods: impl IntoIterator<Item = &'a (Pod, ComputedUids)>,
    sandboxes: &[StaticSandbox],
) -> Option<KubeletVersion> {
    let made = pods.into_iter().filter_map(|(pod, computed)| {
        let sandbox = made_from(pod, computed, sandboxes)?;
        Some((sandbox.created_unix_ns, computed.version_of(&sandbox.uid)?))
    });
    made.max_by_key(|(created, _)| *created).map(|(_, version)| version)
}

/// Returns the UID that a static pod from a file keeps: that of the newest sandbox that was surely made from
/// the manifest, or that a kubelet made if the manifest is as the kubelet read it. Of the other sandboxes of
/// kubelets only the newest one counts. The pod has its final name and namespace.
#[must_use]
pub fn adopted_uid(
    pod: &Pod,
    computed: &ComputedUids,
    times: FileTimes,
    sandboxes: &[StaticSandbox],
) -> Option<PodUid> {
    let mut of_pod: Vec<_> = sandboxes.iter().filter(|sandbox| sandbox.is_of(pod)).collect();
    of_pod.sort_by_key(|sandbox| Reverse(sandbox.created_unix_ns));
    // A UID of the manifest is no hash.
    let is_of_other =
        |sandbox: &&StaticSandbox| !computed.has(&sandbox.uid) && sandbox.config_hash == sandbox.uid;
    let newest_of_other = of_pod.iter().copied().find(is_of_other);
    let unchanged = newest_of_other.filter(|sandbox| {
        let is_unchanged = sandbox.seen.is_some_and(|seen| times.modified < seen && times.changed < seen);
        is_unchanged && has_containers_of(sandbox, pod)
    });
    let kept =
        of_pod.into_iter().find(|sandbox| computed.has(&sandbox.uid) || Some(*sandbox) == unchanged)?;
    PodUid::parse(&kept.uid).ok()
}

/// Containers that the manifest does not name have no definition to compare.
fn has_containers_of(sandbox: &StaticSandbox, pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    spec.init_containers.iter().flatten().chain(&spec.containers).all(|container| {
        let hash = container_hash(&container.name, container.image.as_deref().unwrap_or_default());
        let mut made = sandbox.containers.iter().filter(|made| made.name == container.name);
        made.all(|made| made.hash == hash)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const KUBELETS: &str = "0123456789abcdef0123456789abcdef";
    const NEWEST: &str = "fedcba9876543210fedcba9876543210";
    const SEEN: &str = "2026-11-28T22:58:12.123456789+01:00";

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn pod() -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "etcd-node1", "namespace": "kube-system"},
            "spec": {
                "initContainers": [{"name": "init", "image": "i:1"}],
                "containers": [{"name": "etcd", "image": "etcd:3"}],
            },
        }))
        .unwrap()
    }

    fn sandbox(uid: &str, created_at: i64) -> cri::PodSandbox {
        let map = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        cri::PodSandbox {
            id: format!("sandbox-{created_at}"),
            created_at,
            labels: map(&[
                (labels::POD_UID, uid),
                (labels::POD_NAME, "etcd-node1"),
                (labels::POD_NAMESPACE, "kube-system"),
            ]),
            annotations: map(&[
                (labels::CONFIG_SOURCE, "file"),
                (labels::CONFIG_HASH, uid),
                (labels::CONFIG_SEEN, SEEN),
            ]),
            ..cri::PodSandbox::default()
        }
    }

    fn container(name: &str, image: &str) -> HashedContainer {
        HashedContainer { name: name.to_owned(), hash: container_hash(name, image) }
    }

    fn computed() -> ComputedUids {
        ComputedUids::of_test(["1.35", "1.36", NEWEST], "former")
    }

    struct Case {
        pod: Pod,
        times: FileTimes,
        sandboxes: Vec<cri::PodSandbox>,
        containers: Vec<HashedContainer>,
    }

    impl Case {
        fn adopted(self) -> Option<String> {
            let with_containers = |sandbox| {
                let mut sandbox = StaticSandbox::of(sandbox, "file")?;
                sandbox.containers = self.containers.clone();
                Some(sandbox)
            };
            let sandboxes: Vec<_> = self.sandboxes.into_iter().filter_map(with_containers).collect();
            adopted_uid(&self.pod, &computed(), self.times, &sandboxes).map(|uid| uid.to_string())
        }
    }

    fn adopted_case() -> Case {
        let before = at("2026-11-28T21:58:12.123456788Z");
        Case {
            pod: pod(),
            times: FileTimes { modified: before, changed: before },
            sandboxes: vec![sandbox(KUBELETS, 5)],
            containers: vec![container("init", "i:1"), container("etcd", "etcd:3")],
        }
    }

    fn annotate(sandbox: &mut cri::PodSandbox, key: &str, value: &str) {
        sandbox.annotations.insert(key.to_owned(), value.to_owned());
    }

    fn label(sandbox: &mut cri::PodSandbox, key: &str, value: &str) {
        sandbox.labels.insert(key.to_owned(), value.to_owned());
    }

    #[test]
    fn a_pod_keeps_the_uid_of_a_kubelet_only_if_each_condition_holds() {
        type Change = fn(&mut Case);
        let cases: [(&str, Change, Option<&str>); 28] = [
            ("as the kubelet left it", |_| {}, Some(KUBELETS)),
            ("no container is left", |c| c.containers.clear(), Some(KUBELETS)),
            (
                "a container that the manifest does not have",
                |c| c.containers.push(container("debug", "b")),
                Some(KUBELETS),
            ),
            ("two restarts", |c| c.containers.push(container("etcd", "etcd:3")), Some(KUBELETS)),
            ("no sandbox", |c| c.sandboxes.clear(), None),
            ("another name", |c| label(&mut c.sandboxes[0], labels::POD_NAME, "etcd-node2"), None),
            ("another namespace", |c| label(&mut c.sandboxes[0], labels::POD_NAMESPACE, "default"), None),
            ("from a URL", |c| annotate(&mut c.sandboxes[0], labels::CONFIG_SOURCE, "http"), None),
            ("no source", |c| drop(c.sandboxes[0].annotations.remove(labels::CONFIG_SOURCE)), None),
            ("a fixed UID", |c| annotate(&mut c.sandboxes[0], labels::CONFIG_HASH, "another"), None),
            ("an invalid UID", |c| c.sandboxes = vec![sandbox("../etc", 5)], None),
            ("made from the manifest", |c| c.sandboxes.push(sandbox(NEWEST, 6)), Some(NEWEST)),
            ("made by an older kubelet", |c| c.sandboxes.push(sandbox("1.35", 6)), Some("1.35")),
            ("made by a former Quintlet", |c| c.sandboxes.push(sandbox("former", 6)), Some("former")),
            ("made before it by an older kubelet", |c| c.sandboxes.push(sandbox("1.35", 4)), Some(KUBELETS)),
            (
                "made before it by a former Quintlet",
                |c| c.sandboxes.push(sandbox("former", 4)),
                Some(KUBELETS),
            ),
            (
                "made before a pod of a kubelet that the manifest does not have",
                |c| {
                    c.times.modified = Timestamp::MAX;
                    c.sandboxes.push(sandbox("1.35", 4));
                },
                Some("1.35"),
            ),
            (
                "the newest that was made from the manifest",
                |c| c.sandboxes.extend([sandbox("1.36", 8), sandbox(NEWEST, 9), sandbox("former", 7)]),
                Some(NEWEST),
            ),
            (
                "made from the manifest, which was touched since",
                |c| {
                    c.times.modified = Timestamp::MAX;
                    c.sandboxes = vec![sandbox("1.36", 4)];
                },
                Some("1.36"),
            ),
            ("a newer pod of a kubelet", |c| c.sandboxes.push(sandbox("newer", 6)), Some("newer")),
            ("an older pod of a kubelet", |c| c.sandboxes.push(sandbox("older", 4)), Some(KUBELETS)),
            ("modified since", |c| c.times.modified = at(SEEN), None),
            ("renamed since", |c| c.times.changed = at(SEEN), None),
            ("never seen", |c| drop(c.sandboxes[0].annotations.remove(labels::CONFIG_SEEN)), None),
            ("seen at no time", |c| annotate(&mut c.sandboxes[0], labels::CONFIG_SEEN, "today"), None),
            ("another image", |c| c.containers[1] = container("etcd", "etcd:4"), None),
            ("another init image", |c| c.containers[0] = container("init", "i:2"), None),
            ("a container without a hash", |c| c.containers[1].hash.clear(), None),
        ];
        for (name, change, want) in cases {
            let mut case = adopted_case();
            change(&mut case);
            assert_eq!(case.adopted().as_deref(), want, "{name}");
        }
    }

    #[test]
    fn the_version_of_the_kubelet_is_that_of_the_newest_sandbox() {
        let version = |made: &[(&str, i64)]| {
            let sandboxes = made.iter().map(|(uid, created)| sandbox(uid, *created));
            let sandboxes: Vec<_> =
                sandboxes.filter_map(|sandbox| StaticSandbox::of(sandbox, "file")).collect();
            version_of_kubelet(&[(pod(), computed())], &sandboxes)
        };
        for (made, want) in [
            (&[][..], None),
            (&[("former", 3), (KUBELETS, 4)], None),
            (&[("1.35", 3)], Some(KubeletVersion::V1_35)),
            (&[("1.35", 3), ("1.36", 4)], Some(KubeletVersion::V1_36)),
            (&[(NEWEST, 3), ("1.36", 2)], Some(KubeletVersion::V1_37)),
        ] {
            assert_eq!(version(made), want, "{made:?}");
        }
    }

    #[test]
    fn only_the_newest_pod_of_a_kubelet_counts() {
        let mut case = adopted_case();
        case.sandboxes.push(sandbox("newer", 6));
        // The manifest was changed after the older pod was made.
        annotate(&mut case.sandboxes[0], labels::CONFIG_SEEN, "2026-11-29T00:00:00Z");
        annotate(&mut case.sandboxes[1], labels::CONFIG_SEEN, "2026-11-28T00:00:00Z");
        assert_eq!(case.adopted(), None);
    }

    #[test]
    fn a_record_shows_a_uid_only_if_it_was_made_from_the_manifest_and_has_the_source() {
        let adopted = |uid: &str, source: &str| {
            let mut recorded = pod();
            let annotations = [(labels::CONFIG_SOURCE.to_owned(), "file".to_owned())].into();
            recorded.metadata.annotations = Some(annotations);
            let uid = PodUid::parse(uid).unwrap();
            let record = StaticSandbox::of_record(&uid, &recorded, Duration::from_secs(1), source)?;
            let before = FileTimes { modified: Timestamp::MIN, changed: Timestamp::MIN };
            adopted_uid(&pod(), &computed(), before, &[record]).map(|uid| uid.to_string())
        };
        assert_eq!(adopted("former", "file").as_deref(), Some("former"));
        assert_eq!(adopted("former", "http"), None);
        assert_eq!(adopted(KUBELETS, "file"), None);
    }

    #[test]
    fn a_container_is_compared_by_the_name_in_its_label() {
        let listed = cri::Container {
            labels: [(labels::CONTAINER_NAME.to_owned(), "etcd".to_owned())].into(),
            annotations: [(labels::CONTAINER_HASH.to_owned(), "a1".to_owned())].into(),
            ..cri::Container::default()
        };
        let want = HashedContainer { name: "etcd".to_owned(), hash: "a1".to_owned() };
        assert_eq!(HashedContainer::of(&listed), want);
    }
}
