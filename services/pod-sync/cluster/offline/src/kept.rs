//! The content of the cache in memory: pods, the Node, and the answers that they need. Plain functions of the
//! state, without I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeStatus, PersistentVolume, PersistentVolumeClaim, Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use quintlet_model::ids::PodUid;
use quintlet_model::labels::CONFIG_SEEN;
use quintlet_model::pod as pods;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::answer::AnswerKey;
use crate::needs::{KnownVolumes, needs};

/// File of the Node.
const NODE: &str = "node";
/// Beginning of the name of a pod's file.
const POD: &str = "pod-";

/// Returns the name of a pod's file.
pub(crate) fn file_of(uid: &PodUid) -> String {
    format!("{POD}{uid}")
}

/// Returns whether this is the name of a pod's file.
pub(crate) fn is_pod_file(name: &str) -> bool {
    name.strip_prefix(POD).is_some_and(|uid| PodUid::parse(uid).is_ok())
}

/// The content of a file.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Content {
    /// Name of the node that has written the file.
    pub(crate) node: String,
    /// Time of the write. Of two files with an answer, the newer one counts.
    saved: Timestamp,
    subject: Subject,
}

#[derive(Debug, Serialize, Deserialize)]
enum Subject {
    Node(Box<Node>),
    Pod(PodContent),
}

#[derive(Debug, Serialize, Deserialize)]
struct PodContent {
    pod: Box<Pod>,
    has_run: bool,
    answers: Vec<KeptAnswer>,
}

// It may be a Secret.
#[derive(Serialize, Deserialize)]
struct KeptAnswer {
    key: AnswerKey,
    version: String,
    value: Box<RawValue>,
}

impl std::fmt::Debug for KeptAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeptAnswer").field("key", &self.key).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct KeptPod {
    pod: Arc<Pod>,
    // The pod as it was given last. The same one is not compared again.
    given: Option<Arc<Pod>>,
    has_run: bool,
    needs: BTreeSet<AnswerKey>,
    is_due: bool,
}

// It may be a Secret.
struct Stored {
    version: String,
    json: Arc<str>,
}

/// The decision about a kept pod while the API server is away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartDecision {
    /// The pod is given to the sync loop, which starts it, or terminates it if its deletion was requested.
    Give,
    /// A container of a pod with `restartPolicy: Never` has run, so the pod is not run again.
    HasRun,
    /// The pod is bound to a node of another name.
    OtherNode,
    /// The pod has succeeded or failed.
    Finished,
}

/// Decides about a kept pod. `has_run` is kept of pods with `restartPolicy: Never`.
#[must_use]
pub fn decide_start(pod: &Pod, has_run: bool, node: &str) -> StartDecision {
    let spec = pods::spec(pod);
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if spec.node_name.as_deref() != Some(node) {
        StartDecision::OtherNode
    } else if pods::is_terminal_phase(phase) {
        StartDecision::Finished
    } else if has_run && never_restarts(pod) && pod.metadata.deletion_timestamp.is_none() {
        StartDecision::HasRun
    } else {
        StartDecision::Give
    }
}

fn never_restarts(pod: &Pod) -> bool {
    pods::spec(pod).restart_policy.as_deref() == Some("Never")
}

/// Removes what a start does not need and what changes all the time.
fn trimmed_pod(pod: &Pod) -> Pod {
    let mut trimmed = pod.clone();
    trimmed.metadata.managed_fields = None;
    trimmed.metadata.resource_version = None;
    trimmed.status = pod.status.as_ref().map(|status| PodStatus {
        start_time: status.start_time.clone(),
        qos_class: status.qos_class.clone(),
        resource_claim_statuses: status.resource_claim_statuses.clone(),
        extended_resource_claim_status: status.extended_resource_claim_status.clone(),
        ..PodStatus::default()
    });
    trimmed
}

// Each process sets the time at which it saw a pod first.
fn keep_seen(kept: &Pod, newer: &mut Pod) {
    let before = kept.metadata.annotations.as_ref().and_then(|all| all.get(CONFIG_SEEN));
    let seen = newer.metadata.annotations.as_mut().and_then(|all| all.get_mut(CONFIG_SEEN));
    if let (Some(before), Some(seen)) = (before, seen) {
        seen.clone_from(before);
    }
}

fn trimmed_node(node: &Node) -> Node {
    let meta = &node.metadata;
    Node {
        metadata: ObjectMeta {
            name: meta.name.clone(),
            uid: meta.uid.clone(),
            labels: meta.labels.clone(),
            annotations: meta.annotations.clone(),
            creation_timestamp: meta.creation_timestamp.clone(),
            ..ObjectMeta::default()
        },
        spec: node.spec.clone(),
        status: node.status.as_ref().map(|status| NodeStatus {
            addresses: status.addresses.clone(),
            allocatable: status.allocatable.clone(),
            capacity: status.capacity.clone(),
            volumes_attached: status.volumes_attached.clone(),
            ..NodeStatus::default()
        }),
    }
}

/// The pods of the API server that this node has admitted, and what they need for a start.
#[derive(Default)]
pub(crate) struct Kept {
    node_name: String,
    node: Option<Arc<Node>>,
    is_node_due: bool,
    pods: BTreeMap<PodUid, KeptPod>,
    answers: BTreeMap<AnswerKey, Stored>,
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kept").field("pods", &self.pods.keys()).finish_non_exhaustive()
    }
}

impl KnownVolumes for BTreeMap<AnswerKey, Stored> {
    fn claim(&self, namespace: &str, name: &str) -> Option<PersistentVolumeClaim> {
        let key = AnswerKey::Claim(namespace.to_owned(), name.to_owned());
        serde_json::from_str(&self.get(&key)?.json).ok()
    }

    fn volume(&self, name: &str) -> Option<PersistentVolume> {
        serde_json::from_str(&self.get(&AnswerKey::Volume(name.to_owned()))?.json).ok()
    }
}

impl Kept {
    /// Returns what files of an earlier process have.
    pub(crate) fn of(node_name: &str, mut contents: Vec<Content>) -> Self {
        let mut kept = Self { node_name: node_name.to_owned(), ..Self::default() };
        contents.sort_by_key(|content| content.saved);
        let mut loaded = Vec::new();
        for content in contents {
            match content.subject {
                Subject::Node(node) => kept.node = Some(Arc::from(node)),
                Subject::Pod(PodContent { pod, has_run, answers }) => {
                    for KeptAnswer { key, version, value } in answers {
                        kept.answers.insert(key, Stored { version, json: value.get().into() });
                    }
                    let Some(uid) = pod.metadata.uid.as_deref().and_then(|uid| PodUid::parse(uid).ok())
                    else {
                        continue;
                    };
                    loaded.push((uid, pod, has_run));
                }
            }
        }
        for (uid, pod, has_run) in loaded {
            let needs = needs(&pod, node_name, &kept.answers);
            let pod = KeptPod { pod: Arc::from(pod), given: None, has_run, needs, is_due: false };
            kept.pods.insert(uid, pod);
        }
        kept
    }

    /// Keeps an admitted pod. Returns whether its file is due.
    pub(crate) fn keep(&mut self, uid: &PodUid, pod: &Arc<Pod>) -> bool {
        let before = self.pods.get_mut(uid);
        if before.as_ref().and_then(|kept| kept.given.as_ref()).is_some_and(|given| Arc::ptr_eq(given, pod)) {
            return false;
        }
        let mut trimmed = trimmed_pod(pod);
        if let Some(kept) = before {
            kept.given = Some(Arc::clone(pod));
            keep_seen(&kept.pod, &mut trimmed);
            if *kept.pod == trimmed {
                return false;
            }
            kept.needs = needs(&trimmed, &self.node_name, &self.answers);
            kept.pod = Arc::new(trimmed);
            kept.is_due = true;
            return true;
        }
        let needs = needs(&trimmed, &self.node_name, &self.answers);
        let (pod, given) = (Arc::new(trimmed), Some(Arc::clone(pod)));
        self.pods.insert(uid.clone(), KeptPod { pod, given, has_run: false, needs, is_due: true });
        true
    }

    /// Forgets a pod. Returns whether it was kept.
    pub(crate) fn forget(&mut self, uid: &PodUid) -> bool {
        let was_kept = self.pods.remove(uid).is_some();
        if was_kept {
            self.drop_unneeded();
        }
        was_kept
    }

    fn drop_unneeded(&mut self) {
        let pods = &self.pods;
        self.answers.retain(|key, _| match key {
            AnswerKey::Token(token) => pods.keys().any(|uid| uid.as_str() == token.pod_uid),
            _ => pods.values().any(|pod| pod.needs.contains(key)),
        });
    }

    pub(crate) fn uids(&self) -> Vec<PodUid> {
        self.pods.keys().cloned().collect()
    }

    /// Records that a container of a pod is about to run, if that matters for its next start. Returns whether
    /// its file has to be written first.
    pub(crate) fn runs(&mut self, uid: &PodUid) -> bool {
        let Some(kept) = self.pods.get_mut(uid) else { return false };
        if kept.has_run || !never_restarts(&kept.pod) {
            return false;
        }
        kept.has_run = true;
        kept.is_due = true;
        true
    }

    fn needing(&self, key: &AnswerKey) -> Vec<PodUid> {
        let is_needed = |uid: &PodUid, pod: &KeptPod| match key {
            AnswerKey::Token(token) => token.pod_uid == uid.as_str(),
            _ => pod.needs.contains(key),
        };
        self.pods.iter().filter(|(uid, pod)| is_needed(uid, pod)).map(|(uid, _)| uid.clone()).collect()
    }

    /// Returns whether an answer with this version is kept already.
    pub(crate) fn has_version(&self, key: &AnswerKey, version: &str) -> bool {
        !version.is_empty() && self.answers.get(key).is_some_and(|stored| stored.version == version)
    }

    pub(crate) fn is_needed(&self, key: &AnswerKey) -> bool {
        !self.needing(key).is_empty()
    }

    /// Keeps an answer. Returns whether files are due. A token that replaces another one is written with the
    /// next change.
    pub(crate) fn remember(&mut self, key: AnswerKey, version: String, json: String) -> bool {
        let needing = self.needing(&key);
        if needing.is_empty() {
            return false;
        }
        let before = self.answers.get(&key).map(|stored| Arc::clone(&stored.json));
        let is_due = match (&key, &before) {
            (AnswerKey::Token(_), Some(_)) => false,
            (_, Some(before)) => **before != *json,
            (_, None) => true,
        };
        let finds_more = is_due && matches!(key, AnswerKey::Claim(..) | AnswerKey::Volume(_));
        self.answers.insert(key, Stored { version, json: json.into() });
        if !is_due {
            return false;
        }
        for uid in needing {
            let Some(kept) = self.pods.get_mut(&uid) else { continue };
            kept.is_due = true;
            if finds_more {
                kept.needs = needs(&kept.pod, &self.node_name, &self.answers);
            }
        }
        if finds_more {
            self.drop_unneeded();
        }
        true
    }

    /// Returns the JSON of an answer.
    pub(crate) fn recall(&self, key: &AnswerKey) -> Option<Arc<str>> {
        self.answers.get(key).map(|stored| Arc::clone(&stored.json))
    }

    /// Keeps the Node. Returns whether its file is due.
    pub(crate) fn set_node(&mut self, node: &Node) -> bool {
        let trimmed = trimmed_node(node);
        if self.node.as_deref() == Some(&trimmed) {
            return false;
        }
        self.node = Some(Arc::new(trimmed));
        self.is_node_due = true;
        true
    }

    pub(crate) fn node(&self) -> Option<Arc<Node>> {
        self.node.clone()
    }

    /// Returns all kept pods, the oldest first, each with what is done with it.
    pub(crate) fn starts(&self) -> Vec<(Arc<Pod>, StartDecision)> {
        let mut all: Vec<_> = self.pods.values().collect();
        all.sort_by_key(|kept| kept.pod.metadata.creation_timestamp.as_ref().map(|created| created.0));
        let decided = |kept: &KeptPod| decide_start(&kept.pod, kept.has_run, &self.node_name);
        all.into_iter().map(|kept| (Arc::clone(&kept.pod), decided(kept))).collect()
    }

    /// Makes the file of a pod, or of the Node, due again after a failed write.
    pub(crate) fn failed(&mut self, file: &str) {
        if file == NODE {
            self.is_node_due = true;
        }
        let uid = file.strip_prefix(POD).and_then(|uid| PodUid::parse(uid).ok());
        if let Some(kept) = uid.and_then(|uid| self.pods.get_mut(&uid)) {
            kept.is_due = true;
        }
    }

    /// Takes the files that are due: name and content.
    pub(crate) fn take_due(&mut self, now: Timestamp) -> Vec<(String, serde_json::Result<Vec<u8>>)> {
        let mut due = Vec::new();
        let node_name = self.node_name.clone();
        let encoded =
            |subject: Subject| serde_json::to_vec(&Content { node: node_name.clone(), saved: now, subject });
        if let (true, Some(node)) = (std::mem::take(&mut self.is_node_due), &self.node) {
            due.push((NODE.to_owned(), encoded(Subject::Node(Box::new((**node).clone())))));
        }
        let answers = &self.answers;
        for (uid, kept) in self.pods.iter_mut().filter(|(_, kept)| kept.is_due) {
            kept.is_due = false;
            let tokens = answers.keys().filter(|key| match key {
                AnswerKey::Token(token) => token.pod_uid == uid.as_str(),
                _ => false,
            });
            let stored = kept.needs.iter().chain(tokens).filter_map(|key| Some((key, answers.get(key)?)));
            let stored = stored.map(|(key, stored)| -> serde_json::Result<KeptAnswer> {
                let value = RawValue::from_string((*stored.json).to_owned())?;
                Ok(KeptAnswer { key: key.clone(), version: stored.version.clone(), value })
            });
            let content = stored.collect::<serde_json::Result<Vec<_>>>().and_then(|answers| {
                let pod = Box::new((*kept.pod).clone());
                encoded(Subject::Pod(PodContent { pod, has_run: kept.has_run, answers }))
            });
            due.push((file_of(uid), content));
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn uid(text: &str) -> PodUid {
        PodUid::parse(text).unwrap()
    }

    fn pod_of(name: &str, spec: Value) -> Arc<Pod> {
        let mut pod = json!({"metadata": {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "1"},
            "spec": {"nodeName": "n1", "containers": [{"name": "c"}]}});
        for (field, value) in spec.as_object().unwrap() {
            pod["spec"][field] = value.clone();
        }
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    fn with_config(name: &str) -> Arc<Pod> {
        pod_of(name, json!({"volumes": [{"name": "v", "configMap": {"name": "m"}}]}))
    }

    fn seen(pod: &Pod, time: &str) -> Arc<Pod> {
        let mut pod = pod.clone();
        pod.metadata.annotations = Some([(CONFIG_SEEN.to_owned(), time.to_owned())].into());
        Arc::new(pod)
    }

    fn config() -> AnswerKey {
        AnswerKey::ConfigMap("ns".to_owned(), "m".to_owned())
    }

    fn token(pod: &str) -> AnswerKey {
        let key = json!({"Token": {"namespace": "ns", "service_account": "a", "audiences": [],
            "expiration_seconds": 3607, "pod_uid": pod}});
        serde_json::from_value(key).unwrap()
    }

    fn due(kept: &mut Kept) -> Vec<String> {
        kept.take_due(Timestamp::UNIX_EPOCH).into_iter().map(|(name, _)| name).collect()
    }

    fn reloaded(kept: &mut Kept) -> Kept {
        for uid in kept.uids() {
            kept.failed(&file_of(&uid));
        }
        let contents = kept.take_due(Timestamp::UNIX_EPOCH);
        let contents =
            contents.into_iter().map(|(_, bytes)| serde_json::from_slice(&bytes.unwrap()).unwrap());
        Kept::of("n1", contents.collect())
    }

    #[test]
    fn a_pod_is_given_unless_it_has_run_is_finished_or_is_bound_to_another_node() {
        let case = |policy: &str, edit: Value| {
            let mut pod = serde_json::to_value(&*pod_of("p", json!({"restartPolicy": policy}))).unwrap();
            for (path, value) in edit.as_object().unwrap() {
                *pod.pointer_mut(path.rsplit_once('/').unwrap().0).unwrap() = value.clone();
            }
            serde_json::from_value::<Pod>(pod).unwrap()
        };
        let plain = json!({});
        let deleted = json!({"/metadata/x": {"name": "p", "deletionTimestamp": "2026-01-01T00:00:00Z"}});
        for (name, pod, has_run, node, want) in [
            ("always", case("Always", plain.clone()), true, "n1", StartDecision::Give),
            ("on failure", case("OnFailure", plain.clone()), true, "n1", StartDecision::Give),
            ("never, before", case("Never", plain.clone()), false, "n1", StartDecision::Give),
            ("never, has run", case("Never", plain.clone()), true, "n1", StartDecision::HasRun),
            ("never, is deleted", case("Never", deleted.clone()), true, "n1", StartDecision::Give),
            ("deleted", case("Always", deleted), false, "n1", StartDecision::Give),
            ("another node", case("Always", plain), false, "n2", StartDecision::OtherNode),
        ] {
            assert_eq!(decide_start(&pod, has_run, node), want, "{name}");
        }
        for phase in ["Succeeded", "Failed"] {
            let mut pod = (*pod_of("p", json!({}))).clone();
            pod.status = Some(PodStatus { phase: Some(phase.to_owned()), ..PodStatus::default() });
            assert_eq!(decide_start(&pod, false, "n1"), StartDecision::Finished);
        }
    }

    #[test]
    fn only_changes_that_a_start_needs_make_a_file_due() {
        let mut kept = Kept { node_name: "n1".to_owned(), ..Kept::default() };
        let pod = with_config("a");
        assert!(kept.keep(&uid("a"), &pod));
        assert_eq!(due(&mut kept), ["pod-a"]);
        let mut same = (*pod).clone();
        same.metadata.resource_version = Some("2".to_owned());
        same.status = Some(PodStatus { phase: Some("Running".to_owned()), ..PodStatus::default() });
        // An empty status takes the place of none once.
        kept.keep(&uid("a"), &Arc::new(same.clone()));
        let _once = due(&mut kept);
        same.status.as_mut().unwrap().pod_ip = Some("10.0.0.1".to_owned());
        assert!(!kept.keep(&uid("a"), &Arc::new(same.clone())), "an address");
        assert_eq!(due(&mut kept), [""; 0]);

        assert!(kept.remember(config(), "u 1".to_owned(), "{}".to_owned()));
        assert!(!kept.remember(config(), "u 2".to_owned(), "{}".to_owned()), "the same content");
        assert!(kept.has_version(&config(), "u 2") && !kept.has_version(&config(), ""));
        assert!(kept.remember(token("a"), String::new(), "1".to_owned()));
        assert_eq!(due(&mut kept), ["pod-a"]);
        assert!(!kept.remember(token("a"), String::new(), "2".to_owned()), "a renewed token");
        assert!(!kept.remember(token("b"), String::new(), "1".to_owned()), "no such pod");
        assert!(kept.recall(&token("b")).is_none());
        assert_eq!(due(&mut kept), [""; 0]);

        same.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        assert!(kept.keep(&uid("a"), &Arc::new(same)), "a deletion");
        assert_eq!(&*kept.recall(&token("a")).unwrap(), "2");
    }

    #[test]
    fn what_was_kept_is_there_after_it_was_read_again_and_goes_with_its_last_pod() {
        let mut kept = Kept { node_name: "n1".to_owned(), ..Kept::default() };
        kept.keep(&uid("a"), &with_config("a"));
        kept.keep(&uid("b"), &seen(&with_config("b"), "first"));
        kept.keep(&uid("n"), &pod_of("n", json!({"restartPolicy": "Never"})));
        kept.remember(config(), "u 1".to_owned(), r#"{"data":{"x":"1"}}"#.to_owned());
        kept.remember(token("a"), String::new(), "1".to_owned());
        assert!(kept.runs(&uid("n")) && !kept.runs(&uid("n")) && !kept.runs(&uid("a")));
        let mut again = reloaded(&mut kept);
        assert_eq!(due(&mut again), [""; 0]);
        assert!(!again.keep(&uid("a"), &with_config("a")), "the same pod");
        assert!(!again.keep(&uid("b"), &seen(&with_config("b"), "later")), "seen by another process");
        assert_eq!(&*again.recall(&config()).unwrap(), r#"{"data":{"x":"1"}}"#);
        assert!(again.has_version(&config(), "u 1"));
        let starts: Vec<_> = again
            .starts()
            .into_iter()
            .map(|(pod, start)| (pod.metadata.uid.clone().unwrap(), start))
            .collect();
        let [give, has_run] = [StartDecision::Give, StartDecision::HasRun];
        assert_eq!(starts, [("a".to_owned(), give), ("b".to_owned(), give), ("n".to_owned(), has_run)]);
        assert!(again.forget(&uid("a")) && !again.forget(&uid("a")));
        assert!(again.recall(&token("a")).is_none() && again.recall(&config()).is_some());
        again.forget(&uid("b"));
        assert!(again.recall(&config()).is_none());
    }

    #[test]
    fn a_claim_makes_its_volume_needed() {
        let mut kept = Kept { node_name: "n1".to_owned(), ..Kept::default() };
        kept.keep(
            &uid("a"),
            &pod_of("a", json!({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]})),
        );
        let volume = AnswerKey::Volume("pv".to_owned());
        assert!(!kept.remember(volume.clone(), String::new(), "{}".to_owned()));
        let claim = AnswerKey::Claim("ns".to_owned(), "c".to_owned());
        assert!(kept.remember(claim.clone(), String::new(), r#"{"spec":{"volumeName":"pv"}}"#.to_owned()));
        assert!(kept.remember(volume.clone(), String::new(), "{}".to_owned()));
        assert!(reloaded(&mut kept).recall(&volume).is_some());
        assert!(kept.remember(claim, String::new(), r#"{"spec":{"volumeName":"other"}}"#.to_owned()));
        assert!(kept.recall(&volume).is_none(), "the claim is bound to another volume");
    }

    #[test]
    fn of_the_node_conditions_images_and_versions_are_left_out() {
        let mut kept = Kept::default();
        let node = |version: &str, label: &str| -> Node {
            serde_json::from_value(json!({
                "metadata": {"name": "n1", "resourceVersion": version, "labels": {"l": label}},
                "spec": {"podCIDR": "10.0.0.0/24"},
                "status": {"conditions": [{"type": "Ready", "status": version}],
                    "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
            }))
            .unwrap()
        };
        assert!(kept.set_node(&node("1", "a")));
        assert_eq!(due(&mut kept), ["node"]);
        assert!(!kept.set_node(&node("2", "a")));
        assert!(kept.set_node(&node("2", "b")));
        let again = reloaded(&mut kept);
        let node = again.node().unwrap();
        assert_eq!(node.spec.as_ref().unwrap().pod_cidr.as_deref(), Some("10.0.0.0/24"));
        assert_eq!(node.status.as_ref().unwrap().addresses.as_ref().unwrap().len(), 1);
        assert!(node.status.as_ref().unwrap().conditions.is_none());
    }
}
