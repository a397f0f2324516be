//! The record of the pod and its copy on disk.

use std::ops::{Deref, DerefMut};

use pod_sync_records::{PodRecord, RecordJson, StateDir};
use quintlet_model::ids::PodRef;

/// The record of the pod, which a restarted pod-sync continues from.
pub(super) struct RecordFile {
    current: PodRecord,
    // The record on disk.
    saved: PodRecord,
    json: RecordJson,
}

impl RecordFile {
    /// Takes over the record that is on disk.
    pub(super) fn new(record: PodRecord) -> Self {
        Self { saved: record.clone(), current: record, json: RecordJson::default() }
    }

    /// Returns the JSON of the status in the record, which the record on disk has, too.
    pub(super) fn status_json(&mut self) -> Vec<u8> {
        self.json.status(&self.current).map(<[u8]>::to_vec).unwrap_or_default()
    }

    /// Writes the record if it has changed. A failure is logged, and the next save tries again.
    pub(super) fn save(&mut self, records: &StateDir, pod: &PodRef) {
        if self.current == self.saved {
            return;
        }
        match records.save(&pod.uid, &self.current, &mut self.json) {
            Ok(()) => self.saved = self.current.clone(),
            Err(e) => {
                let (name, error) =
                    (format!("{}/{}", pod.namespace, pod.name), quintlet_kit::error_chain(&e));
                tracing::error!(pod.name = name, pod.uid = %pod.uid, error, "failed to save the pod record");
            }
        }
    }
}

impl Deref for RecordFile {
    type Target = PodRecord;

    fn deref(&self) -> &PodRecord {
        &self.current
    }
}

impl DerefMut for RecordFile {
    fn deref_mut(&mut self) -> &mut PodRecord {
        &mut self.current
    }
}
