//! The record of the pod and its copy on disk.

use std::ops::Deref;
use std::sync::Arc;

use pod_sync_records::{PodRecord, RecordJson};
use quintlet_model::ids::PodRef;
use quintlet_model::runtime::{ContainerState, PodRuntime};

use crate::context::Checkpoints;

/// The record of the pod, which a restarted pod-sync continues from. [`Self::update`] is the only way to
/// change it.
pub(super) struct RecordFile {
    checkpoints: Arc<Checkpoints>,
    pod_ref: PodRef,
    current: PodRecord,
    // The record on disk.
    saved: PodRecord,
    json: RecordJson,
}

impl RecordFile {
    /// Takes over the record that is on disk.
    pub(super) fn new(checkpoints: Arc<Checkpoints>, pod_ref: PodRef, record: PodRecord) -> Self {
        Self { checkpoints, pod_ref, saved: record.clone(), current: record, json: RecordJson::default() }
    }

    /// Changes the record and, if it then differs from the one on disk, writes it before it returns. Call it
    /// before the action that the change describes. A failure is logged, and the next update writes the
    /// change.
    pub(super) fn update<T>(&mut self, change: impl FnOnce(&mut PodRecord) -> T) -> T {
        let changed = change(&mut self.current);
        if self.current != self.saved {
            match self.checkpoints.records.save(&self.pod_ref.uid, &self.current, &mut self.json) {
                Ok(()) => self.saved = self.current.clone(),
                Err(e) => {
                    let name = format!("{}/{}", self.pod_ref.namespace, self.pod_ref.name);
                    let (uid, error) = (&self.pod_ref.uid, quintlet_kit::error_chain(&e));
                    tracing::error!(pod.name = name, pod.uid = %uid, error, "failed to save the pod record");
                }
            }
        }
        changed
    }

    /// Returns the JSON of the status in the record, which the record on disk has, too.
    pub(super) fn status_json(&mut self) -> Vec<u8> {
        self.json.status(&self.current).map(<[u8]>::to_vec).unwrap_or_default()
    }

    /// Deletes the record on disk, as the last action of the worker.
    pub(super) fn delete(self) {
        self.checkpoints.records.remove(&self.pod_ref.uid);
    }
}

impl Deref for RecordFile {
    type Target = PodRecord;

    fn deref(&self) -> &PodRecord {
        &self.current
    }
}

/// Removes the notes about stops, hooks and starts whose containers have left the state of the note.
pub(super) fn forget_ended(record: &mut PodRecord, runtime: &PodRuntime) {
    let is = |id: &str, state| runtime.containers.iter().any(|c| c.id.as_str() == id && c.state == state);
    record.stops.retain(|id, _| is(id, ContainerState::Running));
    // A container that is only created runs its hook when a pass starts it.
    record.post_starts.retain(|id, _| is(id, ContainerState::Running) || is(id, ContainerState::Created));
    forget_starts(record, runtime);
}

/// Removes the notes about starts whose instance has left the state Created, or has a successor.
pub(super) fn forget_starts(record: &mut PodRecord, runtime: &PodRuntime) {
    record.starting.retain(|name, id| {
        let newest = runtime.newest(name);
        newest.is_some_and(|c| c.id.as_str() == id && c.state == ContainerState::Created)
    });
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pod_sync_records::{Allocations, StateDir};
    use quintlet_model::ids::PodUid;

    use super::*;

    #[test]
    fn an_update_is_on_disk_when_it_returns_and_a_failed_one_is_written_with_the_next() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("records");
        let records = StateDir::open(&dir, "boot".to_owned()).unwrap();
        let allocations = Allocations::open(temp.path(), temp.path(), false);
        let checkpoints = Arc::new(Checkpoints { records: records.clone(), allocations });
        let uid = PodUid::parse("u").unwrap();
        let pod_ref = PodRef { uid: uid.clone(), namespace: "ns".into(), name: "p".into() };
        let mut record = RecordFile::new(checkpoints, pod_ref, PodRecord::default());
        record.update(|record| record.started = true);
        assert_eq!(records.read(&uid), Some(PodRecord { started: true, ..PodRecord::default() }));

        // Nothing is written without a change.
        std::fs::remove_dir_all(&dir).unwrap();
        record.update(|record| record.started = true);
        assert_eq!(records.read(&uid), None);

        record.update(|record| record.limiting = true);
        assert_eq!((records.read(&uid), record.limiting), (None, true), "the directory is missing");
        std::fs::create_dir(&dir).unwrap();
        record.update(|record| record.accepted = Duration::from_secs(1));
        assert_eq!(records.read(&uid).as_ref(), Some(&*record));
        assert!(record.limiting);
    }
}
