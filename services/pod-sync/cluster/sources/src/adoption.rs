//! Decides which static pods keep the UID of a kubelet.
//!
//! A kubelet computes the UID of a static pod from a dump of Go structs, which no other program reproduces for each version.
//! The sandbox of the pod has that UID, so that a pod whose manifest is as the kubelet read it can keep it.

use std::collections::HashMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use quintlet_cri_api::v1 as cri;
use quintlet_model::hash::container_hash;
use quintlet_model::ids::PodUid;
use quintlet_model::labels;

/// A sandbox of a static pod from a file, and the containers in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticSandbox {
    pub id: String,
    pub uid: String,
    pub name: String,
    pub namespace: String,
    pub created_unix_ns: i64,
    pub config_hash: String,
    /// The time at which the node agent first saw the pod, if the sandbox has a valid one.
    pub seen: Option<Timestamp>,
    pub containers: Vec<HashedContainer>,
}

/// A container of a [`StaticSandbox`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HashedContainer {
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
    /// Returns a sandbox without containers, or `None` if its pod is not a static pod from a file.
    #[must_use]
    pub fn of(sandbox: cri::PodSandbox) -> Option<Self> {
        if sandbox.annotations.get(labels::CONFIG_SOURCE).map(String::as_str) != Some("file") {
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

/// Returns the UID of a kubelet that a static pod keeps, if the manifest is as the kubelet read it. `computed` is the UID that
/// Quintlet computes. The pod has its final name and namespace.
#[must_use]
pub fn adopted_uid(
    pod: &Pod,
    computed: &str,
    times: FileTimes,
    sandboxes: &[StaticSandbox],
) -> Option<PodUid> {
    let metadata = &pod.metadata;
    let of_pod = || {
        sandboxes.iter().filter(|sandbox| {
            Some(&sandbox.name) == metadata.name.as_ref()
                && Some(&sandbox.namespace) == metadata.namespace.as_ref()
        })
    };
    if of_pod().any(|sandbox| sandbox.uid == computed) {
        return None;
    }
    // A UID of the manifest is no hash.
    let newest = of_pod()
        .filter(|sandbox| sandbox.config_hash == sandbox.uid)
        .max_by_key(|sandbox| sandbox.created_unix_ns)?;
    let is_unchanged = newest.seen.is_some_and(|seen| times.modified < seen && times.changed < seen);
    if is_unchanged && has_containers_of(newest, pod) { PodUid::parse(&newest.uid).ok() } else { None }
}

// Containers that the manifest does not name have no definition to compare.
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
    const COMPUTED: &str = "fedcba9876543210fedcba9876543210";
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

    struct Case {
        pod: Pod,
        times: FileTimes,
        sandboxes: Vec<cri::PodSandbox>,
        containers: Vec<HashedContainer>,
    }

    impl Case {
        fn adopted(self) -> Option<String> {
            let with_containers = |sandbox| {
                let mut sandbox = StaticSandbox::of(sandbox)?;
                sandbox.containers = self.containers.clone();
                Some(sandbox)
            };
            let sandboxes: Vec<_> = self.sandboxes.into_iter().filter_map(with_containers).collect();
            adopted_uid(&self.pod, COMPUTED, self.times, &sandboxes).map(|uid| uid.to_string())
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
        let cases: [(&str, Change, Option<&str>); 21] = [
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
            ("a sandbox of Quintlet", |c| c.sandboxes.push(sandbox(COMPUTED, 4)), None),
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
    fn only_the_newest_pod_of_a_kubelet_counts() {
        let mut case = adopted_case();
        case.sandboxes.push(sandbox("newer", 6));
        // The manifest was changed after the older pod was made.
        annotate(&mut case.sandboxes[0], labels::CONFIG_SEEN, "2026-11-29T00:00:00Z");
        annotate(&mut case.sandboxes[1], labels::CONFIG_SEEN, "2026-11-28T00:00:00Z");
        assert_eq!(case.adopted(), None);
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
