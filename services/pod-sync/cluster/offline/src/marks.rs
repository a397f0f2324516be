//! The pods that were started from the cache since the boot.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use quintlet_model::ids::PodUid;
use serde::{Deserialize, Serialize};

/// When a pod was started from the cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfflineStart {
    /// Time at which the pod was given to the sync loop.
    pub since: Timestamp,
    /// Time at which the API server delivered the same pod; none while it has not.
    pub confirmed: Option<Timestamp>,
}

impl OfflineStart {
    /// Describes the start for a person.
    #[must_use]
    pub fn describe(&self) -> String {
        let since = self.since.strftime("%Y-%m-%dT%H:%M:%SZ");
        match self.confirmed {
            None => format!(
                "started from the offline cache at {since}: the API server has not answered since the start"
            ),
            Some(at) => {
                let at = at.strftime("%Y-%m-%dT%H:%M:%SZ");
                format!("started from the offline cache at {since}, confirmed by the API server at {at}")
            }
        }
    }
}

/// The marks of pods, and their file below the run directory, which a restarted pod-sync reads.
#[derive(Debug)]
pub(crate) struct Marks {
    path: PathBuf,
    starts: BTreeMap<PodUid, OfflineStart>,
    is_due: bool,
}

impl Marks {
    /// Reads the file. One that is missing or unusable counts as empty.
    pub(crate) fn open(path: &Path) -> Self {
        let read = std::fs::read(path).ok();
        let found: BTreeMap<String, OfflineStart> =
            read.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        let parsed = found.into_iter().filter_map(|(uid, start)| Some((PodUid::parse(&uid).ok()?, start)));
        Self { path: path.to_owned(), starts: parsed.collect(), is_due: false }
    }

    pub(crate) fn get(&self, uid: &PodUid) -> Option<&OfflineStart> {
        self.starts.get(uid)
    }

    pub(crate) fn started(&mut self, uid: &PodUid, since: Timestamp) {
        self.is_due = true;
        self.starts.entry(uid.clone()).or_insert(OfflineStart { since, confirmed: None });
    }

    pub(crate) fn confirm(&mut self, at: Timestamp) {
        for start in self.starts.values_mut().filter(|start| start.confirmed.is_none()) {
            start.confirmed = Some(at);
            self.is_due = true;
        }
    }

    pub(crate) fn remove(&mut self, uid: &PodUid) {
        self.is_due |= self.starts.remove(uid).is_some();
    }

    /// Returns the number of pods that are not confirmed.
    pub(crate) fn unconfirmed(&self) -> usize {
        self.starts.values().filter(|start| start.confirmed.is_none()).count()
    }

    /// Returns whether the file has to be written.
    pub(crate) fn is_due(&self) -> bool {
        self.is_due
    }

    /// Takes the content of the file, if it is due.
    pub(crate) fn take_due(&mut self) -> Option<(PathBuf, Vec<u8>)> {
        if !std::mem::take(&mut self.is_due) {
            return None;
        }
        let all: BTreeMap<&str, &OfflineStart> =
            self.starts.iter().map(|(uid, start)| (uid.as_str(), start)).collect();
        Some((self.path.clone(), serde_json::to_vec(&all).ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_outlive_the_process_and_say_whether_the_server_has_confirmed_the_pod() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(".offline");
        let uid = PodUid::parse("a").unwrap();
        let time = |second| Timestamp::from_second(second).unwrap();
        let mut marks = Marks::open(&path);
        assert!(marks.take_due().is_none());
        marks.started(&uid, time(0));
        marks.started(&uid, time(5));
        let (path, bytes) = marks.take_due().unwrap();
        std::fs::write(&path, bytes).unwrap();
        let mut marks = Marks::open(&path);
        let text = marks.get(&uid).unwrap().describe();
        assert_eq!(
            text,
            "started from the offline cache at 1970-01-01T00:00:00Z: the API server has not answered since the start"
        );
        assert_eq!(marks.unconfirmed(), 1);
        marks.confirm(time(60));
        marks.confirm(time(90));
        let text = marks.get(&uid).unwrap().describe();
        assert!(text.ends_with("confirmed by the API server at 1970-01-01T00:01:00Z"), "{text}");
        assert_eq!(marks.unconfirmed(), 0);
        marks.remove(&uid);
        assert!(marks.take_due().is_some() && marks.take_due().is_none());
        std::fs::write(&path, "torn").unwrap();
        assert!(Marks::open(&path).get(&uid).is_none());
    }
}
