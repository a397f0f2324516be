//! Allocated and actuated resources of pods, in memory and in the two checkpoints of the kubelet below the
//! root directory, and the resize conditions of pods.
//!
//! A checkpoint file has all entries. So changes are appended to a journal in the state directory (module
//! `journal`), and the files are written at most once per [`WRITE_INTERVAL`], and at the end of the process.
//! [`Allocations::flush`] returns once the changes made before it are in the journal. It precedes the
//! creation of a container. The journal is not synced, since the state directory does not survive a crash of
//! the machine. The files are synced, so that after such a crash they have a complete, perhaps older version.
//! What it lacks is read from the statuses of pods.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodCondition, PodStatus, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use parking_lot::Mutex;
use pod_sync_decisions::resize::allocation::{self, PodResources};
use pod_sync_decisions::resize::checkpoint::{self, PodResourceEntries};
use pod_sync_decisions::resize::conditions::ResizeConditions;
use quintlet_kit::atomic_file;
use quintlet_kit::task::blocking;
use quintlet_model::ids::PodUid;
use tokio::sync::Notify;

use crate::journal::Journal;
use crate::resize_metrics::{DeferralEnd, NOT_COUNTED, ResizeMetrics, counted};
use crate::state_file;

const ALLOCATED: &str = "allocated_pods_state";
const ACTUATED: &str = "actuated_pods_state";

/// Time after a write of the checkpoint files in which changes are in the journals only.
const WRITE_INTERVAL: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Checkpoint {
    path: PathBuf,
    journal_path: PathBuf,
    // `None`: changes are in the file only.
    journal: Option<Journal>,
    entries: PodResourceEntries,
    // UIDs whose entries have changed since the last write to the journal.
    unrecorded: BTreeSet<String>,
    // The file lacks a change.
    is_behind: bool,
}

impl Checkpoint {
    // An unusable checkpoint is renamed for inspection, and an empty one replaces it.
    fn open(path: PathBuf, journal_path: PathBuf, keeps_size_limits: bool) -> Self {
        let (file, mut entries) = match state_file::read(&path, checkpoint::decode) {
            Some((file, entries)) => (Some(file), entries),
            None => (None, PodResourceEntries::new()),
        };
        let changes = Journal::read(&journal_path, file.as_deref());
        for (uid, entry) in &changes {
            match entry {
                Some(entry) => drop(entries.insert(uid.clone(), entry.clone())),
                None => drop(entries.remove(uid)),
            }
        }
        let journal =
            created(Journal::create(journal_path.clone(), file.as_deref(), &changes), &journal_path);
        let is_behind = !changes.is_empty();
        if !keeps_size_limits {
            entries.values_mut().for_each(|entry| entry.size_limits.clear());
        }
        Self { path, journal_path, journal, entries, unrecorded: BTreeSet::new(), is_behind }
    }

    fn change(&mut self, uid: &PodUid, change: impl FnOnce(&mut PodResources)) {
        let entry = self.entries.entry(uid.to_string()).or_default();
        let before = entry.clone();
        change(entry);
        if *entry != before {
            self.changed(uid.to_string());
        }
    }

    fn changed(&mut self, uid: String) {
        self.unrecorded.insert(uid);
        self.is_behind = true;
    }

    fn remove(&mut self, uid: &PodUid) {
        if self.entries.remove(uid.as_str()).is_some() {
            self.changed(uid.to_string());
        }
    }

    fn retain(&mut self, known: &HashSet<&str>) {
        let unknown = self.entries.extract_if(.., |uid, _| !known.contains(uid.as_str()));
        for uid in unknown.map(|(uid, _)| uid).collect::<Vec<_>>() {
            self.changed(uid);
        }
    }

    /// Appends the changes to the journal. Returns false if they are to be written to the file.
    fn record(&mut self) -> bool {
        if self.unrecorded.is_empty() {
            return true;
        }
        let Some(journal) = &mut self.journal else { return false };
        let changes = self.unrecorded.iter().map(|uid| (uid.as_str(), self.entries.get(uid)));
        if let Err(e) = journal.append(changes) {
            self.abandon_journal(&e);
            return false;
        }
        self.unrecorded.clear();
        true
    }

    fn abandon_journal(&mut self, error: &std::io::Error) {
        tracing::error!(path = %self.journal_path.display(), %error, "failed to write journal of resource checkpoint");
        self.journal = None;
    }

    /// Returns the content of the file if it is to be written.
    fn begin_write(&mut self) -> Option<serde_json::Result<Vec<u8>>> {
        if !std::mem::take(&mut self.is_behind) {
            return None;
        }
        // If there is no journal, calls of `flush` wait until the file is written.
        self.record();
        let bytes = checkpoint::encode(&self.entries);
        if let (Ok(bytes), Some(journal)) = (&bytes, &mut self.journal)
            && let Err(e) = journal.name_file(bytes)
        {
            self.abandon_journal(&e);
        }
        Some(bytes)
    }

    /// Shortens or creates the journal after a write of the file.
    fn written(&mut self, file: &[u8]) {
        let journal = match self.journal.take() {
            Some(journal) => journal.shorten(),
            None => Journal::create(self.journal_path.clone(), Some(file), &[]),
        };
        self.journal = created(journal, &self.journal_path);
    }
}

// Without a journal, each change is written to the file.
fn created(journal: std::io::Result<Journal>, path: &Path) -> Option<Journal> {
    journal
        .inspect_err(|error| {
            tracing::error!(path = %path.display(), %error, "failed to create journal of resource checkpoint");
        })
        .ok()
}

#[derive(Debug)]
struct State {
    allocated: Checkpoint,
    actuated: Checkpoint,
    conditions: BTreeMap<PodUid, ResizeConditions>,
    // CLOCK_BOOTTIME of the last write of the files.
    written: Option<Duration>,
}

impl State {
    // In the order of their records: what was actuated before a resize precedes its allocation. Else a
    // process that ends in between would take the allocation for actuated.
    fn checkpoints(&mut self) -> [&mut Checkpoint; 2] {
        [&mut self.actuated, &mut self.allocated]
    }
}

/// Allocated and actuated resources of all pods.
#[derive(Debug)]
pub struct Allocations {
    state: Arc<Mutex<State>>,
    // Held while the files are written.
    writing: Arc<tokio::sync::Mutex<()>>,
    metrics: ResizeMetrics,
    room: Notify,
    resizes_volumes: bool,
}

impl Allocations {
    /// Reads the checkpoints below `root`, and their journals in `state_dir`. An unusable checkpoint is
    /// logged and renamed. `resizes_volumes`: size limits of memory-backed volumes are allocated, too.
    #[must_use]
    pub fn open(root: &Path, state_dir: &Path, resizes_volumes: bool) -> Self {
        let open = |name: &str| {
            let journal = state_dir.join(format!(".{name}.journal"));
            Checkpoint::open(root.join(name), journal, resizes_volumes)
        };
        let state = State {
            allocated: open(ALLOCATED),
            actuated: open(ACTUATED),
            conditions: BTreeMap::new(),
            written: None,
        };
        let (state, writing) = (Arc::new(Mutex::new(state)), Arc::default());
        let (metrics, room) = (ResizeMetrics::registered(), Notify::new());
        Self { state, writing, metrics, room, resizes_volumes }
    }

    /// Begins the next interval of ten seconds, and returns true, if the files lack changes, the last
    /// interval is over, and no write is under way.
    ///
    /// `now`: CLOCK_BOOTTIME.
    #[must_use]
    pub fn begin_interval(&self, now: Duration) -> bool {
        // While the disk hangs, no more writes wait for it.
        if self.writing.try_lock().is_err() {
            return false;
        }
        let mut state = self.state.lock();
        let is_due = state.written.is_none_or(|written| now >= written.saturating_add(WRITE_INTERVAL))
            && state.checkpoints().iter().any(|checkpoint| checkpoint.is_behind);
        if is_due {
            state.written = Some(now);
        }
        is_due
    }

    /// Records the changes made before the call on disk.
    ///
    /// A failure is logged and does not stop the pod: the next start recovers the allocation from the status.
    pub async fn flush(&self) {
        // Both, even if the first one fails.
        let recorded = self.state.lock().checkpoints().map(Checkpoint::record);
        if recorded.contains(&false) {
            self.write_files().await;
        }
    }

    /// Writes the files if they lack changes.
    pub async fn write_files(&self) {
        let writing = Arc::clone(&self.writing).lock_owned().await;
        let state = Arc::clone(&self.state);
        blocking(move || {
            // Held until the end of the write, even if the caller is gone.
            let _writing = writing;
            write_file(&state, |state| &mut state.actuated);
            write_file(&state, |state| &mut state.allocated);
        })
        .await;
    }

    /// Returns whether the pod has an allocation.
    #[must_use]
    pub fn is_allocated(&self, uid: &PodUid) -> bool {
        self.state.lock().allocated.entries.contains_key(uid.as_str())
    }

    /// Returns the pod with its allocated resources in place of the desired ones.
    #[must_use]
    pub fn apply(&self, uid: &PodUid, pod: &Arc<Pod>) -> Arc<Pod> {
        let state = self.state.lock();
        match state.allocated.entries.get(uid.as_str()).map(|a| allocation::apply(pod, a)) {
            Some(Cow::Owned(allocated)) => Arc::new(allocated),
            Some(Cow::Borrowed(_)) | None => Arc::clone(pod),
        }
    }

    /// Returns the resources in the spec of `pod` that a resize can change on this node.
    #[must_use]
    pub fn resources_of(&self, pod: &Pod) -> PodResources {
        let mut resources = allocation::of_pod(pod);
        if !self.resizes_volumes {
            resources.size_limits.clear();
        }
        resources
    }

    /// Allocates the resources in the spec of `pod`. Its volumes were mounted with the previous allocation,
    /// unless they have a record.
    pub fn allocate(&self, uid: &PodUid, pod: &Pod) {
        let resources = self.resources_of(pod);
        let mut state = self.state.lock();
        let previous = state.allocated.entries.get(uid.as_str()).map(|had| had.size_limits.clone());
        let previous = previous.filter(|limits| !limits.is_empty() && *limits != resources.size_limits);
        state.allocated.change(uid, |entry| *entry = resources);
        if let Some(limits) = previous {
            state.actuated.change(uid, |entry| {
                for (volume, limit) in limits {
                    entry.size_limits.entry(volume).or_insert(limit);
                }
            });
        }
    }

    /// Restores the allocation of a pod that ran before, from its status, if there is none on disk.
    pub fn recover(&self, uid: &PodUid, pod: &Pod, status: Option<&PodStatus>) {
        let mut state = self.state.lock();
        let size_limits = self.resources_of(pod).size_limits;
        if state.allocated.entries.contains_key(uid.as_str()) {
            // Volumes that were mounted before their limits were recorded.
            state.allocated.change(uid, |entry| {
                for (volume, limit) in size_limits {
                    entry.size_limits.entry(volume).or_insert(limit);
                }
            });
        } else if let Some(had) = status.and_then(|s| allocation::of_status(pod, s)) {
            tracing::info!(pod.uid = %uid, "restored allocation of pod from its status");
            state.allocated.change(uid, |entry| *entry = PodResources { size_limits, ..had });
        }
        if let Some(status) = status
            && !state.conditions.contains_key(uid)
        {
            let conditions = ResizeConditions::of_status(status);
            let is_counted = counted(&conditions) != NOT_COUNTED;
            state.conditions.insert(uid.clone(), conditions);
            if is_counted {
                self.metrics.set(state.conditions.values());
            }
        }
    }

    /// Returns the resources that the runtime was last asked to set.
    #[must_use]
    pub fn actuated(&self, uid: &PodUid) -> Option<PodResources> {
        self.state.lock().actuated.entries.get(uid.as_str()).cloned()
    }

    /// Returns whether the runtime was asked to set more than a pod requests: the pod has shrunk since.
    #[must_use]
    pub fn is_more_actuated(&self, uid: &PodUid, pod: &Pod) -> bool {
        let state = self.state.lock();
        state.actuated.entries.get(uid.as_str()).is_some_and(|had| allocation::is_any_larger(pod, had))
    }

    /// Records the resources that the runtime is asked to set for a container.
    pub fn actuate(&self, uid: &PodUid, container: &str, resources: ResourceRequirements) {
        self.state.lock().actuated.change(uid, |entry| {
            entry.containers.insert(container.to_owned(), resources);
        });
    }

    /// Records the size limit that was applied to a memory-backed volume.
    pub fn actuate_volume(&self, uid: &PodUid, volume: &str, limit: Quantity) {
        self.state.lock().actuated.change(uid, |entry| {
            entry.size_limits.insert(volume.to_owned(), limit);
        });
    }

    /// Records the resources that are set for the pod's cgroup.
    pub fn actuate_pod(&self, uid: &PodUid, resources: Option<ResourceRequirements>) {
        self.state.lock().actuated.change(uid, |entry| entry.pod_level = resources);
    }

    /// Reads or changes the resize conditions of a pod.
    pub fn conditions<T>(&self, uid: &PodUid, f: impl FnOnce(&mut ResizeConditions) -> T) -> T {
        let mut state = self.state.lock();
        let conditions = state.conditions.entry(uid.clone()).or_default();
        let before = counted(conditions);
        let result = f(conditions);
        if counted(conditions) != before {
            self.metrics.set(state.conditions.values());
        }
        result
    }

    /// Records for how long the resize of a pod was deferred, before its condition is removed. Does nothing
    /// if it is not deferred.
    pub fn deferral_ended(&self, uid: &PodUid, end: DeferralEnd, now: jiff::Timestamp) {
        let state = self.state.lock();
        let Some(conditions) = state.conditions.get(uid) else { return };
        self.metrics.deferral_ended(conditions, end, now);
    }

    /// Completes the resize of a pod, and returns the condition that ended. Returns `None` if no resize was
    /// in progress, or if there is a newer allocation than the one in `pod`.
    pub fn complete(&self, uid: &PodUid, pod: &Pod) -> Option<PodCondition> {
        let mut state = self.state.lock();
        let allocated = state.allocated.entries.get(uid.as_str());
        if allocated.is_some_and(|a| matches!(allocation::apply(pod, a), Cow::Owned(_))) {
            return None;
        }
        let over = state.conditions.get_mut(uid)?.clear_in_progress();
        self.metrics.set(state.conditions.values());
        if over.is_some() {
            // A pod that has shrunk makes room for others.
            self.freed();
        }
        over
    }

    /// Returns the resize conditions for the status.
    #[must_use]
    pub fn condition_list(&self, uid: &PodUid) -> Vec<PodCondition> {
        self.state.lock().conditions.get(uid).map(ResizeConditions::list).unwrap_or_default()
    }

    /// Removes all data of a pod.
    pub fn remove(&self, uid: &PodUid) {
        let mut state = self.state.lock();
        state.allocated.remove(uid);
        state.actuated.remove(uid);
        let removed = state.conditions.remove(uid);
        if removed.is_some_and(|conditions| counted(&conditions) != NOT_COUNTED) {
            self.metrics.set(state.conditions.values());
        }
    }

    /// Removes the data of all other pods.
    pub fn retain(&self, known: &HashSet<&str>) {
        let mut state = self.state.lock();
        state.allocated.retain(known);
        state.actuated.retain(known);
        state.conditions.retain(|uid, _| known.contains(uid.as_str()));
        self.metrics.set(state.conditions.values());
    }

    /// Wakes [`Self::room`], after a pod released its resources.
    pub fn freed(&self) {
        self.room.notify_one();
    }

    /// Waits until a pod releases its resources. Dropping the future loses no wake-up.
    pub async fn room(&self) {
        self.room.notified().await;
    }
}

/// Changes are recorded in the journal while the file is written.
fn write_file(state: &Mutex<State>, which: impl Fn(&mut State) -> &mut Checkpoint) {
    let (path, bytes) = {
        let mut state = state.lock();
        let checkpoint = which(&mut state);
        let Some(bytes) = checkpoint.begin_write() else { return };
        (checkpoint.path.clone(), bytes)
    };
    let written = bytes.map_err(std::io::Error::from);
    let written = written.and_then(|bytes| atomic_file::write_durable(&path, &bytes, 0o600).map(|()| bytes));
    let mut state = state.lock();
    let checkpoint = which(&mut state);
    match written {
        Ok(bytes) => checkpoint.written(&bytes),
        Err(e) => {
            checkpoint.is_behind = true;
            drop(state);
            tracing::error!(path = %path.display(), error = %e, "failed to write resource checkpoint");
        }
    }
}

#[cfg(test)]
mod tests;
