//! Derives additions, updates and removals from snapshots of a source
//! (`pkg/kubelet/config: podStorage.merge`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use quintlet_model::ids::PodUid;
use quintlet_model::labels::{CONFIG_MIRROR, CONFIG_SEEN, CONFIG_SOURCE};

/// Change of a pod (`pkg/kubelet/types: PodOperation`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PodOperation {
    /// Removed from the source.
    Remove,
    /// Seen in its source for the first time.
    Add,
    /// Spec, labels or annotations changed.
    Update,
    /// Marked for deletion, or changed after that.
    Delete,
    /// Only the status changed.
    Reconcile,
}

/// One difference between two snapshots of a source.
#[derive(Debug, Clone, PartialEq)]
pub struct PodChange {
    /// Kind of the difference, which selects the handler of the sync loop.
    pub op: PodOperation,
    /// The pod after the change; with [`PodOperation::Remove`] before it.
    pub pod: Arc<Pod>,
}

/// Result of merging a snapshot.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MergeResult {
    /// Changes in the order in which to handle them: removed, added (oldest first), updated, deleted,
    /// reconciled.
    pub changes: Vec<PodChange>,
    /// Pods dropped because an earlier entry has the same full name.
    pub duplicates: Vec<Arc<Pod>>,
    /// Pods dropped because their UID is missing or invalid.
    pub unusable: Vec<Arc<Pod>>,
    /// This is the first snapshot of the source. The source is ready once the changes are handled, even if
    /// there are none.
    pub is_first: bool,
}

/// The last snapshot of one source.
#[derive(Debug)]
pub struct SourceStore {
    source: &'static str,
    pods: BTreeMap<PodUid, Entry>,
    seen: bool,
}

#[derive(Debug)]
struct Entry {
    // The pod as the source sent it, if the source keeps it. If it is sent again unchanged, it is not
    // compared.
    given: Option<Arc<Pod>>,
    pod: Arc<Pod>,
}

fn is_local(key: &str) -> bool {
    matches!(key, CONFIG_SOURCE | CONFIG_MIRROR | CONFIG_SEEN)
}

fn same_meaning(a: &Pod, b: &Pod) -> bool {
    fn annotations(p: &Pod) -> impl Iterator<Item = (&String, &String)> {
        p.metadata.annotations.iter().flatten().filter(|(key, _)| !is_local(key))
    }
    fn labels(p: &Pod) -> impl Iterator<Item = (&String, &String)> {
        p.metadata.labels.iter().flatten()
    }
    a.spec == b.spec
        && a.metadata.deletion_timestamp == b.metadata.deletion_timestamp
        && a.metadata.deletion_grace_period_seconds == b.metadata.deletion_grace_period_seconds
        && labels(a).eq(labels(b))
        && annotations(a).eq(annotations(b))
}

/// Returns the creation time of a pod. Static pods have none and come first.
#[must_use]
pub fn creation_time(pod: &Pod) -> Option<jiff::Timestamp> {
    pod.metadata.creation_timestamp.as_ref().map(|t| t.0)
}

fn full_name(pod: &Pod) -> (&str, &str) {
    (pod.metadata.namespace.as_deref().unwrap_or("default"), pod.metadata.name.as_deref().unwrap_or_default())
}

impl SourceStore {
    /// Returns an empty store for `file`, `http` or `api`.
    #[must_use]
    pub fn new(source: &'static str) -> Self {
        Self { source, pods: BTreeMap::new(), seen: false }
    }

    /// Returns whether the source has delivered a snapshot.
    #[must_use]
    pub fn is_seen(&self) -> bool {
        self.seen
    }

    /// Returns a pod of the last snapshot.
    #[must_use]
    pub fn get(&self, uid: &PodUid) -> Option<&Arc<Pod>> {
        self.pods.get(uid).map(|e| &e.pod)
    }

    /// Returns the pods of the last snapshot.
    pub fn pods(&self) -> impl Iterator<Item = &Arc<Pod>> {
        self.pods.values().map(|e| &e.pod)
    }

    /// Returns the pods of the last snapshot with their UIDs.
    pub fn iter(&self) -> impl Iterator<Item = (&PodUid, &Arc<Pod>)> {
        self.pods.iter().map(|(uid, e)| (uid, &e.pod))
    }

    /// Merges a complete snapshot. `now` becomes the first-seen annotation of new pods.
    ///
    /// `unchanged`: UIDs of the other pods of the snapshot, which are as they were.
    pub fn set(
        &mut self,
        snapshot: Vec<Arc<Pod>>,
        unchanged: &[PodUid],
        now: jiff::Timestamp,
    ) -> MergeResult {
        let mut merged =
            MergeResult { is_first: !std::mem::replace(&mut self.seen, true), ..MergeResult::default() };
        let (mut added, mut updated) = (vec![], vec![]);
        let (mut deleted, mut reconciled) = (vec![], vec![]);
        let mut names = BTreeSet::new();
        let unchanged = unchanged.iter().filter_map(|uid| self.pods.remove_entry(uid));
        let mut next: BTreeMap<PodUid, Entry> = unchanged.collect();
        for entry in next.values() {
            let (namespace, name) = full_name(&entry.pod);
            names.insert((namespace.to_owned(), name.to_owned()));
        }
        for given in snapshot {
            let Ok(uid) = PodUid::parse(given.metadata.uid.as_deref().unwrap_or_default()) else {
                merged.unusable.push(given);
                continue;
            };
            let (namespace, name) = full_name(&given);
            if !names.insert((namespace.to_owned(), name.to_owned())) || next.contains_key(&uid) {
                merged.duplicates.push(given);
                continue;
            }
            let (entry, change) = merge(self.source, self.pods.remove(&uid), given, now);
            next.insert(uid, entry);
            let Some(change) = change else { continue };
            match change.op {
                PodOperation::Add => added.push(change),
                PodOperation::Update => updated.push(change),
                PodOperation::Delete => deleted.push(change),
                PodOperation::Reconcile | PodOperation::Remove => reconciled.push(change),
            }
        }
        // The older pod is admitted first (`pkg/kubelet: HandlePodAdditions`).
        added.sort_by_key(|change| creation_time(&change.pod));
        let gone = std::mem::replace(&mut self.pods, next);
        merged.changes = gone
            .into_values()
            .map(|entry| PodChange { op: PodOperation::Remove, pod: entry.pod })
            .chain(added)
            .chain(updated)
            .chain(deleted)
            .chain(reconciled)
            .collect();
        merged
    }

    /// Merges one pod, as [`Self::set`] does with a snapshot in which the other pods are as before.
    pub fn apply(&mut self, given: Arc<Pod>, now: jiff::Timestamp) -> MergeResult {
        let Ok(uid) = PodUid::parse(given.metadata.uid.as_deref().unwrap_or_default()) else {
            return MergeResult { unusable: vec![given], ..MergeResult::default() };
        };
        let (entry, change) = merge(self.source, self.pods.remove(&uid), given, now);
        self.pods.insert(uid, entry);
        MergeResult { changes: change.into_iter().collect(), ..MergeResult::default() }
    }

    /// Removes one pod, as [`Self::set`] does with a snapshot that does not have it.
    pub fn remove(&mut self, uid: &PodUid) -> MergeResult {
        let gone = self.pods.remove(uid);
        let change = gone.map(|entry| PodChange { op: PodOperation::Remove, pod: entry.pod });
        MergeResult { changes: change.into_iter().collect(), ..MergeResult::default() }
    }
}

/// Compares a pod with its last version. Returns its new entry and its change, if any.
fn merge(
    source: &str,
    known: Option<Entry>,
    given: Arc<Pod>,
    now: jiff::Timestamp,
) -> (Entry, Option<PodChange>) {
    let known = match known {
        Some(entry) if entry.given.as_ref().is_some_and(|before| Arc::ptr_eq(before, &given)) => {
            return (entry, None);
        }
        known => known.map(|entry| entry.pod),
    };
    let kept = (Arc::strong_count(&given) > 1).then(|| Arc::clone(&given));
    // Cloned only if the source keeps it.
    let mut pod = Arc::unwrap_or_clone(given);
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.insert(CONFIG_SOURCE.to_owned(), source.to_owned());
    let entry = |pod: Pod, given, op| {
        let pod = Arc::new(pod);
        (Entry { given, pod: Arc::clone(&pod) }, Some(PodChange { op, pod }))
    };
    let Some(known) = known else {
        let first_seen = now.strftime("%Y-%m-%dT%H:%M:%S%.9fZ").to_string();
        annotations.insert(CONFIG_SEEN.to_owned(), first_seen);
        return entry(pod, kept, PodOperation::Add);
    };
    let first_seen = known.metadata.annotations.as_ref().and_then(|a| a.get(CONFIG_SEEN)).cloned();
    if let Some(first_seen) = first_seen {
        annotations.insert(CONFIG_SEEN.to_owned(), first_seen);
    }
    let op = if !same_meaning(&known, &pod) {
        if pod.metadata.deletion_timestamp.is_some() { PodOperation::Delete } else { PodOperation::Update }
    } else if known.status != pod.status {
        PodOperation::Reconcile
    } else {
        return (Entry { given: kept, pod: known }, None);
    };
    // Owners and finalizers stay as first seen, as in the kubelet. The resource version is updated, since
    // status writes use it.
    let mut metadata = known.metadata.clone();
    metadata.resource_version = pod.metadata.resource_version.take();
    if op != PodOperation::Reconcile {
        metadata.labels = pod.metadata.labels.take();
        metadata.annotations = pod.metadata.annotations.take();
        metadata.deletion_timestamp = pod.metadata.deletion_timestamp.take();
        metadata.deletion_grace_period_seconds = pod.metadata.deletion_grace_period_seconds;
        metadata.generation = pod.metadata.generation;
    }
    entry(Pod { metadata, spec: pod.spec, status: pod.status }, kept, op)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use quintlet_model::pod::annotation;
    use quintlet_testkit::pods::{at, time};
    use serde_json::json;

    fn arcs(pods: Vec<Pod>) -> Vec<Arc<Pod>> {
        pods.into_iter().map(Arc::new).collect()
    }

    fn pod(uid: &str, name: &str) -> Pod {
        serde_json::from_value(json!({"metadata": {"uid": uid, "name": name, "namespace": "n"},
            "spec": {"containers": [{"name": "c", "image": "i"}]}}))
        .unwrap()
    }

    fn ops(merged: &MergeResult) -> Vec<(PodOperation, &str)> {
        merged.changes.iter().map(|c| (c.op, c.pod.metadata.uid.as_deref().unwrap())).collect()
    }

    #[test]
    fn changes_come_in_order_and_only_where_something_changed() {
        let mut store = SourceStore::new("file");
        let all: Vec<_> = ["a", "b", "c", "d", "e"].map(|u| pod(u, u)).into();
        let first = store.set(arcs(all.clone()), &[], at(0));
        assert!(first.is_first);
        assert_eq!(ops(&first).len(), 5);
        assert_eq!(annotation(&first.changes[0].pod, CONFIG_SOURCE), Some("file"));
        assert_eq!(annotation(&first.changes[0].pod, CONFIG_SEEN), Some("2026-01-01T00:00:00.000000000Z"));
        assert_eq!(store.set(arcs(all.clone()), &[], at(9)), MergeResult::default());

        let mut next = all;
        next.remove(0);
        next[0].spec.as_mut().unwrap().containers[0].image = Some("j".into());
        next[1].metadata.deletion_timestamp = Some(time(1));
        next[2].status = Some(Default::default());
        next.push(pod("f", "f"));
        let merged = store.set(arcs(next), &[], at(9));
        assert_eq!(
            ops(&merged),
            [
                (PodOperation::Remove, "a"),
                (PodOperation::Add, "f"),
                (PodOperation::Update, "b"),
                (PodOperation::Delete, "c"),
                (PodOperation::Reconcile, "d")
            ]
        );
        let seen: Vec<_> = merged.changes.iter().map(|c| annotation(&c.pod, CONFIG_SEEN).unwrap()).collect();
        assert_eq!(seen[2], "2026-01-01T00:00:00.000000000Z");
        assert_eq!(seen[1], "2026-01-01T00:00:09.000000000Z");
    }

    #[test]
    fn pods_are_added_by_age_and_manifests_in_their_order() {
        let mut store = SourceStore::new("api");
        let created_at = |name: &str, age: Option<i64>| {
            let mut p = pod(name, name);
            p.metadata.creation_timestamp = age.map(time);
            p
        };
        let all = [("a", Some(9)), ("b", Some(3)), ("z", None), ("c", Some(3)), ("d", Some(1)), ("y", None)];
        let merged = store.set(arcs(all.map(|(name, age)| created_at(name, age)).into()), &[], at(10));
        let order: Vec<_> = ops(&merged).into_iter().map(|(_, uid)| uid).collect();
        assert_eq!(order, ["z", "y", "d", "b", "c", "a"]);
    }

    #[test]
    fn only_changed_objects_of_a_repeated_snapshot_are_compared() {
        let mut store = SourceStore::new("api");
        let (a, b) = (Arc::new(pod("a", "a")), Arc::new(pod("b", "b")));
        store.set(vec![Arc::clone(&a), Arc::clone(&b)], &[], at(0));
        let mut next = pod("b", "b");
        next.status = Some(Default::default());
        let next = Arc::new(next);
        assert_eq!(
            ops(&store.set(vec![Arc::clone(&a), Arc::clone(&next)], &[], at(1))),
            [(PodOperation::Reconcile, "b")]
        );
        assert_eq!(store.set(vec![a, next], &[], at(2)), MergeResult::default());
        assert_eq!(
            ops(&store.set(vec![b], &[], at(3))),
            [(PodOperation::Remove, "a"), (PodOperation::Reconcile, "b")]
        );
    }

    #[test]
    fn a_recreated_pod_of_the_same_name_is_removed_and_added() {
        let mut store = SourceStore::new("api");
        store.set(arcs(vec![pod("u1", "web")]), &[], at(0));
        let merged = store.set(arcs(vec![pod("u2", "web")]), &[], at(1));
        assert_eq!(ops(&merged), [(PodOperation::Remove, "u1"), (PodOperation::Add, "u2")]);
    }

    #[test]
    fn of_two_pods_with_one_name_the_first_is_kept() {
        let mut store = SourceStore::new("file");
        let merged = store.set(
            arcs(vec![pod("u1", "web"), pod("u2", "web"), pod("", "x"), pod("u1", "other")]),
            &[],
            at(0),
        );
        assert_eq!(ops(&merged), [(PodOperation::Add, "u1")]);
        assert_eq!(merged.duplicates.len(), 2);
        assert_eq!(merged.unusable.len(), 1);
        // The dropped pod is added when the first one is removed.
        let merged = store.set(arcs(vec![pod("u2", "web")]), &[], at(1));
        assert_eq!(ops(&merged), [(PodOperation::Remove, "u1"), (PodOperation::Add, "u2")]);
    }

    #[test]
    fn each_relevant_field_causes_an_update_and_local_annotations_do_not() {
        type Edit = fn(&mut Pod);
        let cases: [(&str, Edit, Option<PodOperation>); 8] = [
            (
                "labels",
                |p| p.metadata.labels = Some([("a".into(), "b".into())].into()),
                Some(PodOperation::Update),
            ),
            (
                "annotations",
                |p| p.metadata.annotations = Some([("a".into(), "b".into())].into()),
                Some(PodOperation::Update),
            ),
            ("grace", |p| p.metadata.deletion_grace_period_seconds = Some(1), Some(PodOperation::Update)),
            ("empty labels", |p| p.metadata.labels = Some(Default::default()), None),
            (
                "source",
                |p| p.metadata.annotations = Some([(CONFIG_SOURCE.into(), "file".into())].into()),
                None,
            ),
            ("mirror", |p| p.metadata.annotations = Some([(CONFIG_MIRROR.into(), "x".into())].into()), None),
            ("resource version", |p| p.metadata.resource_version = Some("7".into()), None),
            ("finalizers", |p| p.metadata.finalizers = Some(vec!["x".into()]), None),
        ];
        for (name, edit, want) in cases {
            let mut store = SourceStore::new("api");
            store.set(arcs(vec![pod("u", "web")]), &[], at(0));
            let mut p = pod("u", "web");
            edit(&mut p);
            let merged = store.set(arcs(vec![p]), &[], at(1));
            assert_eq!(merged.changes.first().map(|c| c.op), want, "{name}");
        }
    }

    #[test]
    fn an_update_carries_status_and_resource_version_and_keeps_the_owners() {
        let mut store = SourceStore::new("api");
        store.set(arcs(vec![pod("u", "web")]), &[], at(0));
        let mut p = pod("u", "web");
        p.metadata.resource_version = Some("7".into());
        p.metadata.finalizers = Some(vec!["x".into()]);
        p.metadata.generation = Some(2);
        p.metadata.deletion_timestamp = Some(time(0));
        p.status = Some(Default::default());
        let merged = store.set(arcs(vec![p]), &[], at(1));
        let got = &merged.changes[0];
        assert_eq!(got.op, PodOperation::Delete);
        assert_eq!(got.pod.metadata.resource_version.as_deref(), Some("7"));
        assert_eq!((got.pod.metadata.generation, got.pod.metadata.finalizers.clone()), (Some(2), None));
        assert!(got.pod.status.is_some());
    }

    proptest! {
        #[test]
        fn replaying_the_changes_results_in_the_snapshot(
            snapshots in prop::collection::vec(prop::collection::vec((0..5_u8, 0..3_u8), 0..6), 1..8)
        ) {
            let mut store = SourceStore::new("file");
            let mut mine: BTreeMap<String, Option<String>> = BTreeMap::new();
            for snapshot in snapshots {
                let pods = snapshot.iter().map(|(u, image)| {
                    let mut p = pod(&format!("u{u}"), &format!("p{u}"));
                    p.spec.as_mut().unwrap().containers[0].image = Some(format!("i{image}"));
                    p
                }).collect();
                for c in store.set(arcs(pods), &[], at(0)).changes {
                    let uid = c.pod.metadata.uid.clone().unwrap();
                    let image = c.pod.spec.as_ref().unwrap().containers[0].image.clone();
                    match c.op {
                        PodOperation::Remove => prop_assert!(mine.remove(&uid).is_some()),
                        PodOperation::Add => prop_assert!(mine.insert(uid, image).is_none()),
                        PodOperation::Update | PodOperation::Delete | PodOperation::Reconcile => prop_assert!(mine.insert(uid, image).is_some()),
                    }
                }
                // Of entries with the same UID, the first counts.
                let mut want = BTreeMap::new();
                for (u, image) in &snapshot {
                    want.entry(format!("u{u}")).or_insert(Some(format!("i{image}")));
                }
                prop_assert_eq!(&mine, &want);
            }
        }

        #[test]
        fn single_changes_have_the_effect_of_snapshots(
            changes in prop::collection::vec((0..4_u8, prop::option::of((0..3_u8, 0..3_u8))), 1..20)
        ) {
            let mut stores = [(); 3].map(|()| SourceStore::new("api"));
            for store in &mut stores {
                store.set(Vec::new(), &[], at(0));
            }
            let [mut whole, mut single, mut named] = stores;
            let mut all: BTreeMap<u8, Arc<Pod>> = BTreeMap::new();
            for (u, change) in changes {
                let uid = format!("u{u}");
                let others: Vec<PodUid> =
                    all.keys().filter(|other| **other != u).map(|u| PodUid::parse(&format!("u{u}")).unwrap()).collect();
                let mut changed = Vec::new();
                let got = match change {
                    Some((image, phase)) => {
                        let mut p = pod(&uid, &format!("p{u}"));
                        p.spec.as_mut().unwrap().containers[0].image = Some(format!("i{image}"));
                        p.status.get_or_insert_default().phase = Some(format!("{phase}"));
                        let p = Arc::new(p);
                        all.insert(u, Arc::clone(&p));
                        // The source keeps none of these.
                        changed.push(Arc::new(Pod::clone(&p)));
                        single.apply(Arc::new(Pod::clone(&p)), at(0))
                    }
                    None => {
                        all.remove(&u);
                        single.remove(&PodUid::parse(&uid).unwrap())
                    }
                };
                prop_assert_eq!(&got, &whole.set(all.values().cloned().collect(), &[], at(0)));
                prop_assert_eq!(&got, &named.set(changed, &others, at(0)));
                prop_assert!(single.pods().eq(whole.pods()) && named.pods().eq(whole.pods()));
            }
        }
    }
}
