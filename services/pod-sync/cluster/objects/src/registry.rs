//! Reference counts: which pods refer to which objects of one kind.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use quintlet_model::ids::PodUid;

use crate::kind::Key;

/// The registered pods by the objects of one kind that they refer to.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    objects: HashMap<PodUid, BTreeSet<Key>>,
    pods: BTreeMap<Key, BTreeSet<PodUid>>,
}

/// Changes of the reference counts by a registration.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    /// Objects that the pod refers to now, and did not before.
    pub(crate) added: Vec<Key>,
    /// Objects that no pod refers to any more.
    pub(crate) unreferenced: Vec<Key>,
}

impl Registry {
    /// Replaces the references of a pod.
    pub(crate) fn register(&mut self, uid: &PodUid, objects: BTreeSet<Key>) -> Changes {
        let before = self.objects.insert(uid.clone(), objects.clone()).unwrap_or_default();
        let added: Vec<Key> = objects.difference(&before).cloned().collect();
        for key in &added {
            self.pods.entry(key.clone()).or_default().insert(uid.clone());
        }
        let mut unreferenced = Vec::new();
        for key in before.difference(&objects) {
            let Some(pods) = self.pods.get_mut(key) else { continue };
            pods.remove(uid);
            if pods.is_empty() {
                self.pods.remove(key);
                unreferenced.push(key.clone());
            }
        }
        Changes { added, unreferenced }
    }

    /// Removes a pod. Returns the objects that no pod refers to any more.
    pub(crate) fn unregister(&mut self, uid: &PodUid) -> Vec<Key> {
        let changes = self.register(uid, BTreeSet::new());
        self.objects.remove(uid);
        changes.unreferenced
    }

    /// Returns the objects that a pod refers to.
    pub(crate) fn objects(&self, uid: &PodUid) -> impl Iterator<Item = &Key> {
        self.objects.get(uid).into_iter().flatten()
    }

    /// Returns the pods that refer to an object.
    pub(crate) fn pods(&self, key: &Key) -> impl Iterator<Item = &PodUid> {
        self.pods.get(key).into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid(text: &str) -> PodUid {
        PodUid::parse(text).unwrap()
    }

    fn keys(names: &str) -> BTreeSet<Key> {
        names.split_whitespace().map(|name| Key::new("default", name)).collect()
    }

    fn names(keys: &[Key]) -> String {
        keys.iter().map(|key| key.name.as_str()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn an_object_is_referenced_from_its_first_pod_to_its_last() {
        let mut registry = Registry::default();
        // Pod, its objects; those that are new for the pod, those without a pod.
        let table = [
            ("p1", "a b", "a b", ""),
            ("p2", "b c", "b c", ""),
            ("p1", "a b", "", ""),
            ("p1", "b", "", "a"),
            ("p2", "c", "", ""),
            ("p1", "c", "c", "b"),
            ("p2", "", "", ""),
            ("p1", "d", "d", "c"),
        ];
        for (pod, objects, added, unreferenced) in table {
            let changes = registry.register(&uid(pod), keys(objects));
            assert_eq!(names(&changes.added), added, "{pod} {objects}");
            assert_eq!(names(&changes.unreferenced), unreferenced, "{pod} {objects}");
        }
        assert_eq!(registry.pods(&Key::new("default", "d")).collect::<Vec<_>>(), [&uid("p1")]);
        assert_eq!(names(&registry.unregister(&uid("p1"))), "d");
        assert_eq!(names(&registry.unregister(&uid("p1"))), "", "it is not registered");
        assert_eq!(registry.unregister(&uid("p2")), []);
        assert!(registry.objects.is_empty() && registry.pods.is_empty());
    }
}
