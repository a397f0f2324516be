//! The pods of each source, as it delivered them last.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_decisions::merge::SourceStore;
use pod_sync_layout::SourceKind;
use quintlet_model::ids::PodUid;

/// One store per source.
#[derive(Debug)]
pub(super) struct Stores(BTreeMap<SourceKind, SourceStore>);

impl Stores {
    pub(super) fn new(sources: &[SourceKind]) -> Self {
        Self(sources.iter().map(|s| (*s, SourceStore::new(s.name()))).collect())
    }

    /// Whether every source has delivered a snapshot.
    pub(super) fn is_ready(&self) -> bool {
        self.0.values().all(SourceStore::is_seen)
    }

    /// Whether a source has delivered a snapshot.
    pub(super) fn is_listed(&self, source: SourceKind) -> bool {
        self.0.get(&source).is_some_and(SourceStore::is_seen)
    }

    pub(super) fn get(&self, source: SourceKind) -> Option<&SourceStore> {
        self.0.get(&source)
    }

    pub(super) fn get_mut(&mut self, source: SourceKind) -> Option<&mut SourceStore> {
        self.0.get_mut(&source)
    }

    /// Returns the pods of all sources.
    pub(super) fn pods(&self) -> impl Iterator<Item = (SourceKind, &PodUid, &Arc<Pod>)> {
        self.0.iter().flat_map(|(source, store)| store.iter().map(|(uid, pod)| (*source, uid, pod)))
    }

    /// Returns the pod with this UID, from whichever source has it.
    pub(super) fn pod(&self, uid: &PodUid) -> Option<&Arc<Pod>> {
        self.0.values().find_map(|store| store.get(uid))
    }
}
