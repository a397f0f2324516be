//! Allocated and actuated resources of pods, in memory and in the two checkpoints of the kubelet below the root directory, and the
//! resize conditions of pods.
//!
//! A checkpoint file has all entries. So changes are appended to a journal in the state directory (module `journal`), and the files
//! are written at most once per [`WRITE_INTERVAL`], and at the end of the process. [`Allocations::flush`] returns once the changes made
//! before it are in the journal. It precedes the creation of a container. There is no fsync: after a crash of the machine either version
//! may be on disk, and no container of either version is running.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodCondition, PodStatus, ResourceRequirements};
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
    fn open(path: PathBuf, journal_path: PathBuf) -> Self {
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

    // Appends the changes to the journal. Returns false if they are to be written to the file.
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
    fn checkpoints(&mut self) -> [&mut Checkpoint; 2] {
        [&mut self.allocated, &mut self.actuated]
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
}

impl Allocations {
    /// Reads the checkpoints below `root`, and their journals in `state_dir`. An unusable checkpoint is logged and renamed.
    #[must_use]
    pub fn open(root: &Path, state_dir: &Path) -> Self {
        let open = |name: &str| Checkpoint::open(root.join(name), state_dir.join(format!(".{name}.journal")));
        let state = State {
            allocated: open(ALLOCATED),
            actuated: open(ACTUATED),
            conditions: BTreeMap::new(),
            written: None,
        };
        let (state, writing) = (Arc::new(Mutex::new(state)), Arc::default());
        Self { state, writing, metrics: ResizeMetrics::registered(), room: Notify::new() }
    }

    /// Begins the next interval of ten seconds, and returns true, if the files lack changes, the last interval is over, and no
    /// write is under way.
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
            write_file(&state, |state| &mut state.allocated);
            write_file(&state, |state| &mut state.actuated);
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

    /// Allocates the resources in the spec of `pod`.
    pub fn allocate(&self, uid: &PodUid, pod: &Pod) {
        let resources = allocation::of_pod(pod);
        self.state.lock().allocated.change(uid, |entry| *entry = resources);
    }

    /// Restores the allocation of a pod that ran before, from its status, if there is none on disk.
    pub fn recover(&self, uid: &PodUid, pod: &Pod, status: Option<&PodStatus>) {
        let mut state = self.state.lock();
        if !state.allocated.entries.contains_key(uid.as_str())
            && let Some(had) = status.and_then(|s| allocation::of_status(pod, s))
        {
            tracing::info!(pod.uid = %uid, "restored allocation of pod from its status");
            state.allocated.change(uid, |entry| *entry = had);
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

    /// Records for how long the resize of a pod was deferred, before its condition is removed. Does nothing if it is not deferred.
    pub fn deferral_ended(&self, uid: &PodUid, end: DeferralEnd, now: jiff::Timestamp) {
        let state = self.state.lock();
        let Some(conditions) = state.conditions.get(uid) else { return };
        self.metrics.deferral_ended(conditions, end, now);
    }

    /// Completes the resize of a pod, and returns the condition that ended. Returns `None` if no resize was in progress, or if
    /// there is a newer allocation than the one in `pod`.
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

// Changes are recorded in the journal while the file is written.
fn write_file(state: &Mutex<State>, which: impl Fn(&mut State) -> &mut Checkpoint) {
    let (path, bytes) = {
        let mut state = state.lock();
        let checkpoint = which(&mut state);
        let Some(bytes) = checkpoint.begin_write() else { return };
        (checkpoint.path.clone(), bytes)
    };
    let written = bytes.map_err(std::io::Error::from);
    let written = written.and_then(|bytes| atomic_file::write(&path, &bytes, 0o600).map(|()| bytes));
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
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use pod_sync_decisions::resize::feasibility::PendingReason;
    use prometheus_client::metrics::family::Family;
    use prometheus_client::metrics::gauge::Gauge;
    use quintlet_telemetry::metrics;

    use super::*;
    use crate::resize_metrics::PRIORITY_BUCKETS;
    use quintlet_testkit::pods::pod_json;
    use serde_json::json;

    fn pod(cpu: &str) -> Arc<Pod> {
        Arc::new(pod_json(json!({"containers": [{"name": "a", "image": "i",
            "resources": {"requests": {"cpu": cpu}}}]})))
    }

    fn uid() -> PodUid {
        PodUid::parse("u1").unwrap()
    }

    fn open(dir: &tempfile::TempDir) -> Allocations {
        let state_dir = dir.path().join("state");
        std::fs::create_dir_all(&state_dir).unwrap();
        Allocations::open(dir.path(), &state_dir)
    }

    fn inode(dir: &tempfile::TempDir, file: &str) -> Option<u64> {
        std::fs::metadata(dir.path().join(file)).map(|meta| meta.ino()).ok()
    }

    #[test]
    fn an_outdated_pod_does_not_complete_a_newer_resize() {
        let dir = tempfile::tempdir().unwrap();
        let all = open(&dir);
        let (before, after) = (pod("1"), pod("2"));
        all.allocate(&uid(), &before);
        all.allocate(&uid(), &after);
        all.conditions(&uid(), |c| c.set_in_progress(Some(2), jiff::Timestamp::UNIX_EPOCH));
        assert_eq!(all.complete(&uid(), &before), None, "observed before the allocation");
        assert_eq!(all.condition_list(&uid()).len(), 1);
        assert_eq!(all.complete(&uid(), &after).unwrap().observed_generation, Some(2));
        assert!(all.condition_list(&uid()).is_empty());
        assert_eq!(all.complete(&uid(), &after), None, "it completes once");
    }

    #[tokio::test]
    async fn allocated_and_actuated_resources_survive_a_restart_until_the_pod_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let all = open(&dir);
        assert!(!all.is_allocated(&uid()));
        all.allocate(&uid(), &pod("1"));
        all.actuate(&uid(), "a", allocation::of_pod(&pod("500m")).containers["a"].clone());
        all.flush().await;

        let again = open(&dir);
        assert_eq!(again.apply(&uid(), &pod("2")), pod("1"));
        assert_eq!(again.actuated(&uid()), Some(allocation::of_pod(&pod("500m"))));
        again.retain(&["u1"].into());
        again.remove(&uid());
        again.flush().await;
        let last = open(&dir);
        assert!(!last.is_allocated(&uid()) && last.actuated(&uid()).is_none());
        last.allocate(&uid(), &pod("1"));
        last.flush().await;
        last.retain(&HashSet::new());
        last.flush().await;
        assert!(!open(&dir).is_allocated(&uid()), "the pod is not known");
    }

    #[tokio::test]
    async fn changes_are_recorded_in_a_journal_until_the_files_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let all = open(&dir);
        let uids: Vec<PodUid> = (0..100).map(|n| PodUid::parse(&format!("u{n}")).unwrap()).collect();
        for uid in &uids {
            all.allocate(uid, &pod("1"));
            all.flush().await;
        }
        assert_eq!(inode(&dir, ALLOCATED), None, "the file is not written for each change");
        let again = open(&dir);
        assert!(uids.iter().all(|uid| again.is_allocated(uid)), "the journal has all changes");
        assert!(again.begin_interval(Duration::ZERO), "the file still lacks them");
        again.write_files().await;
        let first = inode(&dir, ALLOCATED).unwrap();
        assert_eq!(inode(&dir, ACTUATED), None, "that file has not changed");
        again.write_files().await;
        assert_eq!(inode(&dir, ALLOCATED), Some(first), "a write without changes writes nothing");

        again.allocate(&uids[0], &pod("2"));
        again.remove(&uids[1]);
        again.flush().await;
        let last = open(&dir);
        assert_eq!(last.apply(&uids[0], &pod("1")), pod("2"));
        assert!(!last.is_allocated(&uids[1]) && last.is_allocated(&uids[2]));
        assert_eq!(inode(&dir, ALLOCATED), Some(first));
    }

    #[tokio::test]
    async fn a_file_that_another_program_wrote_is_used_without_the_journal() {
        let dir = tempfile::tempdir().unwrap();
        let all = open(&dir);
        all.allocate(&uid(), &pod("1"));
        all.write_files().await;
        all.allocate(&uid(), &pod("2"));
        all.flush().await;
        let others: PodResourceEntries = [("u1".to_owned(), allocation::of_pod(&pod("3")))].into();
        std::fs::write(dir.path().join(ALLOCATED), checkpoint::encode(&others).unwrap()).unwrap();
        assert_eq!(open(&dir).apply(&uid(), &pod("1")), pod("3"));
    }

    #[tokio::test]
    async fn each_change_is_written_to_the_file_if_there_is_no_journal() {
        let dir = tempfile::tempdir().unwrap();
        let all = Allocations::open(dir.path(), &dir.path().join("missing"));
        for cpu in ["1", "2"] {
            all.allocate(&uid(), &pod(cpu));
            all.flush().await;
            let file = std::fs::read(dir.path().join(ALLOCATED)).unwrap();
            assert_eq!(checkpoint::decode(&file).unwrap()["u1"], allocation::of_pod(&pod(cpu)));
        }
        std::fs::create_dir(dir.path().join("missing")).unwrap();
        all.allocate(&uid(), &pod("3"));
        all.flush().await;
        let first = inode(&dir, ALLOCATED);
        all.allocate(&uid(), &pod("4"));
        all.flush().await;
        assert_eq!(inode(&dir, ALLOCATED), first, "there is a journal again");
        let again = Allocations::open(dir.path(), &dir.path().join("missing"));
        assert_eq!(again.apply(&uid(), &pod("1")), pod("4"));
    }

    #[test]
    fn files_are_due_at_most_once_per_interval() {
        let dir = tempfile::tempdir().unwrap();
        let all = open(&dir);
        let began = Duration::from_secs(100);
        assert!(!all.begin_interval(began), "nothing has changed");
        all.allocate(&uid(), &pod("1"));
        assert!(all.begin_interval(began));
        assert!(!all.begin_interval(began + WRITE_INTERVAL - Duration::from_millis(1)));
        let under_way = all.writing.try_lock().unwrap();
        assert!(!all.begin_interval(began + WRITE_INTERVAL), "a write is under way");
        drop(under_way);
        assert!(all.begin_interval(began + WRITE_INTERVAL));
    }

    #[test]
    fn resizes_are_counted_by_state() {
        use pod_sync_decisions::resize::feasibility::PendingResize;
        let dir = tempfile::tempdir().unwrap();
        let mut all = open(&dir);
        // Not those of the process, which other tests change too.
        all.metrics.pending = Family::default();
        all.metrics.in_progress = Gauge::default();
        let counted = || {
            let of = |label| {
                let labels = |bucket| [("reason", label), ("priority_bucket", bucket)];
                PRIORITY_BUCKETS
                    .map(|bucket| all.metrics.pending.get_or_create(&labels(bucket)).get())
                    .iter()
                    .sum::<i64>()
            };
            (of("deferred"), of("infeasible"), all.metrics.in_progress.get())
        };
        let now = jiff::Timestamp::UNIX_EPOCH;
        let wait = |name: &str, reason| {
            let pending = PendingResize { reason, cause: String::new(), message: String::new(), detail: "" };
            all.conditions(&PodUid::parse(name).unwrap(), |c| c.set_pending(&pending, None, now));
        };
        wait("u1", PendingReason::Deferred);
        wait("u2", PendingReason::Deferred);
        wait("u3", PendingReason::Infeasible);
        assert_eq!(counted(), (2, 1, 0));
        all.conditions(&uid(), |c| c.set_priority(7));
        let high = [("reason", "deferred"), ("priority_bucket", "high")];
        assert_eq!((counted(), all.metrics.pending.get_or_create(&high).get()), ((2, 1, 0), 1));
        all.conditions(&uid(), |c| c.set_in_progress(None, now));
        assert_eq!(counted(), (1, 1, 1), "one was allocated");
        all.conditions(&uid(), ResizeConditions::clear_in_progress);
        all.retain(&["u1", "u2"].into());
        assert_eq!(counted(), (1, 0, 0));
        all.remove(&PodUid::parse("u2").unwrap());
        assert_eq!(counted(), (0, 0, 0));
    }

    #[test]
    fn the_time_of_a_deferred_resize_is_recorded_with_its_end() {
        use pod_sync_decisions::resize::feasibility::PendingResize;
        let all = open(&tempfile::tempdir().unwrap());
        let at = |seconds| jiff::Timestamp::from_second(seconds).unwrap();
        for (name, priority, reason, end, bucket) in [
            ("u1", 2_000_001_000, PendingReason::Deferred, DeferralEnd::Accepted, "system"),
            ("u2", 1, PendingReason::Deferred, DeferralEnd::Reverted, "high"),
            ("u3", -1, PendingReason::Deferred, DeferralEnd::Terminated, "low"),
            ("u4", 0, PendingReason::Infeasible, DeferralEnd::Reverted, "default"),
        ] {
            let uid = PodUid::parse(name).unwrap();
            let pending = PendingResize { reason, cause: String::new(), message: String::new(), detail: "" };
            all.conditions(&uid, |c| {
                c.set_priority(priority);
                c.set_pending(&pending, None, at(100))
            });
            let series = format!(
                "kubelet_pod_deferred_resize_duration_seconds_sum{{priority_bucket=\"{bucket}\",resolution=\"{}\"}} ",
                end.as_str()
            );
            let sum = || {
                let text = metrics::text();
                text.lines().find_map(|l| l.strip_prefix(&series)?.parse::<f64>().ok()).unwrap_or(0.0)
            };
            let before = sum();
            all.deferral_ended(&uid, end, at(142));
            let want = if reason == PendingReason::Deferred { 42.0 } else { 0.0 };
            assert!((sum() - before - want).abs() < 0.001, "{series}{} {}", before, sum());
        }
    }

    #[tokio::test]
    async fn a_checkpoint_is_written_only_if_it_changed() {
        let dir = tempfile::tempdir().unwrap();
        let all = open(&dir);
        all.allocate(&uid(), &pod("1"));
        all.write_files().await;
        let file = dir.path().join(ALLOCATED);
        std::fs::remove_file(&file).unwrap();
        all.allocate(&uid(), &pod("1"));
        all.write_files().await;
        assert!(!file.exists());
        all.allocate(&uid(), &pod("2"));
        all.write_files().await;
        assert!(file.exists());
    }

    #[tokio::test]
    async fn an_unusable_checkpoint_is_moved_aside_and_the_status_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let before = open(&dir);
        before.allocate(&uid(), &pod("1"));
        before.write_files().await;
        let file = dir.path().join(ALLOCATED);
        let good = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, good.replace("u1", "u2")).unwrap();
        let all = open(&dir);
        assert!(!all.is_allocated(&uid()) && !file.exists());
        assert!(dir.path().join("allocated_pods_state.corrupt").exists());

        let status = serde_json::from_value(json!({"containerStatuses": [{
            "name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0,
            "allocatedResources": {"cpu": "1"}}],
            "conditions": [{"type": "PodResizePending", "status": "True", "reason": "Deferred"}]}))
        .unwrap();
        all.recover(&uid(), &pod("2"), Some(&status));
        assert_eq!(all.apply(&uid(), &pod("2")), pod("1"));
        assert_eq!(all.condition_list(&uid()).len(), 1);
        all.allocate(&uid(), &pod("2"));
        all.recover(&uid(), &pod("2"), Some(&status));
        assert_eq!(all.apply(&uid(), &pod("2")), pod("2"), "what is known counts more");
    }
}
