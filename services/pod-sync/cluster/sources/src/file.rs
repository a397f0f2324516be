//! The manifest directory (`pkg/kubelet/config: sourceFile`): read at start, on inotify events, and
//! periodically.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use notify::Watcher as _;
use parking_lot::Mutex;
use pod_sync_layout::{ManifestProblem, SourceKind};
use quintlet_kit::contain::{Panic, contained_request};
use quintlet_kit::task;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::adoption::FileTimes;
use super::decode::{self, KeptUid, ManifestOrigin};
use super::kubelet_uid::ComputedUids;
use super::static_uids::{SandboxListing, StaticPodUids, list_sandboxes};
use super::{MAX_MANIFEST, Snapshot, SourceEvent, SourceSender};

/// Wait after an event for further ones: editors write in several steps.
const SETTLE: Duration = Duration::from_millis(20);

/// Reason why the manifests are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadTrigger {
    /// The interval elapsed: the content is complete.
    Period,
    /// An event: a file may be incomplete.
    Event,
}

/// Reads a directory or a file of manifests, and remembers the last content of each file.
#[derive(Debug)]
pub struct ManifestReader {
    path: PathBuf,
    node: String,
    uids: StaticPodUids,
    last: BTreeMap<PathBuf, Content>,
}

/// The pods and objects of a file at the last read.
#[derive(Debug)]
struct Content {
    snapshot: Snapshot,
    /// The snapshot is the last one without a problem, whatever the file has now.
    is_valid: bool,
}

/// Files whose removal was observed since the last read, whether or not they exist again.
pub type RemovedFiles = BTreeSet<PathBuf>;

impl ManifestReader {
    /// Returns a reader of the manifests in a directory, or of a single file. Reads nothing yet.
    #[must_use]
    pub fn new(path: PathBuf, node: String, uids: StaticPodUids) -> Self {
        Self { path, node, uids, last: BTreeMap::new() }
    }

    /// Returns how long to wait for the sandboxes that decide on UIDs, and the pods on which they decide;
    /// `None` if they decide on none. Reads the manifests, and keeps nothing of them.
    fn undecided(&self) -> Option<(Duration, Vec<(Pod, ComputedUids)>)> {
        if !self.uids.is_deciding() {
            return None;
        }
        let mut pods = Vec::new();
        let mut collect = |pod: &Pod, uids: &ComputedUids| {
            pods.push((pod.clone(), uids.clone()));
            None
        };
        for file in files(&self.path).unwrap_or_default() {
            if let Ok((bytes, _)) = read_file(&file) {
                decode_file(&file, &self.node, &bytes, &mut collect);
            }
        }
        Some((self.uids.sandbox_wait(&pods)?, pods))
    }

    /// Forgets removed files. Returns the other files as they were, if pods are removed by that.
    ///
    /// A manifest that is removed and written again is a new pod, even if both happen between two reads
    /// (`pkg/kubelet/config: consumeWatchEvent`). The pods of the returned snapshot are followed by those of
    /// the next read.
    pub fn forget(&mut self, removed: &RemovedFiles) -> Option<SourceEvent> {
        let gone: Vec<Content> = removed.iter().filter_map(|file| self.last.remove(file)).collect();
        gone.iter().any(|file| !file.snapshot.pods.is_empty()).then(|| {
            let files = self.last.iter().map(|(file, content)| (file.clone(), content.snapshot.clone()));
            SourceEvent::Snapshot(joined(files))
        })
    }

    /// Reads all files. An error affects its file only; the pods of an invalid file stay until the next
    /// periodic read. If the path exists but cannot be read, no pod changes. If it does not exist, there are
    /// no pods.
    pub fn read(&mut self, why: ReadTrigger) -> SourceEvent {
        let files = match files(&self.path) {
            // Most nodes of a cluster have no manifests, so this is not an error.
            Err(ListError::Missing) => {
                self.last.clear();
                self.uids.decided(false);
                return SourceEvent::Snapshot(Snapshot::default());
            }
            Err(ListError::Unreadable(message)) => {
                return SourceEvent::Problems(vec![problem(&self.path, message)]);
            }
            Ok(files) => files,
        };
        let is_directory = files != [self.path.clone()];
        let mut read = BTreeMap::new();
        for file in files {
            let found = self.decode(&file);
            let mut content = Content { is_valid: found.problems.is_empty(), snapshot: found };
            if !content.is_valid && !is_directory && content.snapshot.pods.is_empty() {
                return SourceEvent::Problems(content.snapshot.problems);
            }
            if !content.is_valid
                && why == ReadTrigger::Event
                && let Some(last) = self.last.remove(&file).filter(|last| last.is_valid)
            {
                content = Content {
                    snapshot: Snapshot { problems: content.snapshot.problems, ..last.snapshot },
                    is_valid: true,
                };
            }
            read.insert(file, content);
        }
        self.last = read;
        self.uids.decided(self.last.values().all(|content| content.snapshot.problems.is_empty()));
        SourceEvent::Snapshot(joined(self.last.iter().map(|(file, c)| (file.clone(), c.snapshot.clone()))))
    }

    fn decode(&mut self, file: &Path) -> Snapshot {
        match read_file(file) {
            Ok((bytes, times)) => {
                let uids = &mut self.uids;
                let mut kept = |pod: &Pod, computed: &ComputedUids| uids.kept_uid(pod, computed, times);
                decode_file(file, &self.node, &bytes, &mut kept)
            }
            Err(e) => Snapshot {
                problems: vec![problem(file, format!("cannot be read: {e}"))],
                ..Snapshot::default()
            },
        }
    }
}

fn decode_file(file: &Path, node: &str, bytes: &[u8], kept: &mut KeptUid<'_>) -> Snapshot {
    let mut out = Snapshot::default();
    let place = file.display().to_string();
    let origin = ManifestOrigin { kind: SourceKind::File, place: &place, node };
    decode::manifest_keeping_uids(bytes, origin, kept, &mut out);
    out
}

fn problem(origin: &Path, message: String) -> ManifestProblem {
    ManifestProblem { origin: origin.display().to_string(), field: String::new(), message }
}

fn joined(files: impl Iterator<Item = (PathBuf, Snapshot)>) -> Snapshot {
    let mut out = Snapshot::default();
    let mut origins = Vec::new();
    for (file, mut found) in files {
        out.pods.append(&mut found.pods);
        out.config_maps.append(&mut found.config_maps);
        out.secrets.append(&mut found.secrets);
        out.problems.append(&mut found.problems);
        out.warnings.append(&mut found.warnings);
        origins.resize(out.pods.len(), file.display().to_string());
    }
    drop_duplicates(&mut out, &origins);
    out
}

// In the kubelet the last file with a name silently wins. Here the first one wins and the others are
// reported.
fn drop_duplicates(out: &mut Snapshot, origins: &[String]) {
    let mut first: BTreeMap<(Option<String>, Option<String>), &str> = BTreeMap::new();
    let mut problems = Vec::new();
    let mut pods = Vec::new();
    for (pod, origin) in out.pods.drain(..).zip(origins) {
        let key = (pod.metadata.namespace.clone(), pod.metadata.name.clone());
        match first.get(&key) {
            Some(other) => problems.push(ManifestProblem {
                origin: origin.clone(),
                field: "metadata.name".to_owned(),
                message: format!(
                    "duplicate pod name {:?}: {other} has it, this one is ignored",
                    key.1.unwrap_or_default()
                ),
            }),
            None => {
                first.insert(key, origin);
                pods.push(pod);
            }
        }
    }
    out.pods = pods;
    out.problems.extend(problems);
}

/// Reason why there are no files to read.
enum ListError {
    Missing,
    Unreadable(String),
}

/// Returns the path itself if it is a file, or else the files in the directory.
fn files(path: &Path) -> Result<Vec<PathBuf>, ListError> {
    match std::fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Err(ListError::Missing),
        Err(e) => Err(ListError::Unreadable(format!("cannot be read: {e}"))),
        Ok(meta) if meta.is_file() => Ok(vec![path.to_owned()]),
        Ok(_) => list(path).map_err(|e| ListError::Unreadable(format!("cannot be listed: {e}"))),
    }
}

fn list(path: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    // The path of a file is part of the UID. The kubelet joins it without empty and `.` components, too.
    let directory: PathBuf = path.components().collect();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        // Follows links, as the kubelet does. A file that disappeared is skipped.
        if std::fs::metadata(entry.path()).is_ok_and(|m| m.is_file()) {
            files.push(entry.path());
        }
    }
    files.sort();
    Ok(files)
}

// The times are those after the content was read.
fn read_file(path: &Path) -> std::io::Result<(Vec<u8>, FileTimes)> {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path)?;
    (&file).take(MAX_MANIFEST as u64).read_to_end(&mut bytes)?;
    if bytes.len() >= MAX_MANIFEST {
        return Err(std::io::Error::other(format!("larger than {MAX_MANIFEST} bytes")));
    }
    let content = file_times(&file.metadata()?)?;
    // A link that leads to another file is a change, too.
    let link = file_times(&std::fs::symlink_metadata(path)?)?;
    let times = FileTimes {
        modified: content.modified.max(link.modified),
        changed: content.changed.max(link.changed),
    };
    Ok((bytes, times))
}

fn file_times(meta: &std::fs::Metadata) -> std::io::Result<FileTimes> {
    let time = |seconds, nanoseconds: i64| {
        let nanoseconds = i32::try_from(nanoseconds).map_err(std::io::Error::other)?;
        jiff::Timestamp::new(seconds, nanoseconds).map_err(std::io::Error::other)
    };
    Ok(FileTimes {
        modified: time(meta.mtime(), meta.mtime_nsec())?,
        changed: time(meta.ctime(), meta.ctime_nsec())?,
    })
}

/// Reads at start, after every change and every `period`, until `stop`. `sandboxes` decides which pods keep
/// the UID of a kubelet.
pub async fn run(
    reader: ManifestReader,
    sandboxes: Option<Arc<dyn SandboxListing>>,
    period: Duration,
    out: SourceSender,
    stop: CancellationToken,
) {
    // One slot is enough: an event only triggers a read.
    let (wake, mut woken) = quintlet_kit::queue::wakes();
    let removed = Arc::new(Mutex::new(RemovedFiles::new()));
    let mut watcher = None;
    let mut is_missing = false;
    let path = reader.path.clone();
    let reader = Arc::new(Mutex::new(reader));
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        if watcher.is_none() {
            let path = path.clone();
            let wake = wake.clone();
            let removed = Arc::clone(&removed);
            watcher = task::blocking(move || watch(&path, wake, removed)).await;
        }
        // Dropping either arm loses nothing: any of them leads to a complete read.
        let why = tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => ReadTrigger::Period,
            _ = woken.recv() => {
                tokio::time::sleep(SETTLE).await;
                while woken.try_recv().is_ok() {}
                ReadTrigger::Event
            }
        };
        let looked = path.clone();
        let exists = task::blocking(move || looked.exists()).await;
        let was_missing = std::mem::replace(&mut is_missing, !exists);
        if is_missing {
            // A recreated directory is another inode and needs a new watch.
            watcher = None;
            if !was_missing {
                tracing::info!(path = %path.display(), "manifest path does not exist, waiting for it");
            }
        }
        if let Some(sandboxes) = &sandboxes {
            // Nothing was read yet.
            let Some(()) = stop.run_until_cancelled(find_sandboxes(&reader, sandboxes)).await else { return };
        }
        match updates(&reader, &removed, why).await {
            // On stop an update may be dropped: it has no receiver any more.
            Ok(updates) => {
                for update in updates {
                    tokio::select! {
                        () = stop.cancelled() => return,
                        sent = out.send((SourceKind::File, update)) => if sent.is_err() { return },
                    }
                }
            }
            Err(e) => tracing::error!(path = %path.display(), error = %e, "failed to read manifests"),
        }
        if watcher.is_none() {
            // Without inotify the kubelet retries every second.
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(Duration::from_secs(1)) => ticks.reset_immediately(),
            }
        }
    }
}

/// Lists the sandboxes of the runtime until the first snapshot is delivered, if there is a pod that may keep
/// a UID.
async fn find_sandboxes(reader: &Arc<Mutex<ManifestReader>>, sandboxes: &Arc<dyn SandboxListing>) {
    let pending = Arc::clone(reader);
    let undecided = contained_request(None, task::blocking(move || pending.lock().undecided())).await;
    if let Ok(Some((wait, pods))) = undecided {
        let listed = list_sandboxes(sandboxes, "file", wait).await;
        reader.lock().uids.set_sandboxes(listed, &pods);
    }
}

async fn updates(
    reader: &Arc<Mutex<ManifestReader>>,
    removed: &Arc<Mutex<RemovedFiles>>,
    why: ReadTrigger,
) -> Result<Vec<SourceEvent>, Panic> {
    let (reader, removed) = (Arc::clone(reader), Arc::clone(removed));
    let read = task::blocking(move || {
        let mut reader = reader.lock();
        // Taken before the read: of a removal during the read, the next one learns.
        let removed = std::mem::take(&mut *removed.lock());
        reader.forget(&removed).into_iter().chain([reader.read(why)]).collect()
    });
    contained_request(None, read).await
}

fn watch(
    path: &Path,
    wake: mpsc::Sender<()>,
    removed: Arc<Mutex<RemovedFiles>>,
) -> Option<notify::RecommendedWatcher> {
    let woken = move |event: notify::Result<notify::Event>| {
        removed.lock().extend(event.ok().and_then(removed_file));
        quintlet_kit::queue::wake(&wake);
    };
    // Without reads: reacting to them would not end.
    let kinds = notify::EventKindMask::CORE | notify::EventKindMask::ACCESS_CLOSE;
    let changes = notify::Config::default().with_event_kinds(kinds);
    let mut watcher = notify::RecommendedWatcher::new(woken, changes).ok()?;
    watcher.watch(path, notify::RecursiveMode::NonRecursive).ok()?;
    Some(watcher)
}

// A file that another one replaces by a rename is not removed.
fn removed_file(event: notify::Event) -> Option<PathBuf> {
    use notify::event::{EventKind, ModifyKind, RenameMode};
    match event.kind {
        EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(RenameMode::From)) => {
            event.paths.into_iter().next()
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use quintlet_model::labels;

    use super::*;
    use crate::adoption::StaticSandbox;

    fn reader(path: &Path) -> ManifestReader {
        ManifestReader::new(path.to_owned(), "n".to_owned(), StaticPodUids::computed())
    }

    fn pod(name: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{containers: [{{name: a, image: b}}]}}\n"
        )
    }

    #[test]
    fn the_uid_does_not_depend_on_the_spelling_of_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.yaml"), pod("a")).unwrap();
        let uid = |path: &Path| {
            let SourceEvent::Snapshot(snapshot) = reader(path).read(ReadTrigger::Period) else {
                panic!("no snapshot")
            };
            snapshot.pods[0].metadata.uid.clone()
        };
        let spelled = format!("{}//./", dir.path().display());
        assert_eq!(uid(dir.path()), uid(Path::new(&spelled)));
    }

    #[test]
    fn dot_files_and_directories_are_skipped_and_an_invalid_file_affects_no_other() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.yaml"), pod("a")).unwrap();
        std::fs::write(dir.path().join(".b.yaml"), pod("b")).unwrap();
        std::fs::create_dir(dir.path().join("c")).unwrap();
        std::fs::write(dir.path().join("d.yaml"), "{{").unwrap();
        std::fs::write(dir.path().join("e.yaml"), pod("a")).unwrap();
        let mut reader = reader(dir.path());
        let (pods, problems) = received(reader.read(ReadTrigger::Period));
        assert_eq!(pods, Some(vec!["a-n".to_owned()]));
        assert_eq!(problems.len(), 2, "{problems:?}");
    }

    // Returns the names of the pods, empty for an update that only has problems.
    fn received(update: SourceEvent) -> (Option<Vec<String>>, Vec<ManifestProblem>) {
        let name = |p: Arc<Pod>| p.metadata.name.clone().unwrap_or_default();
        let problems = update.problems();
        let SourceEvent::Snapshot(snapshot) = update else { return (None, problems) };
        (Some(snapshot.pods.into_iter().map(name).collect()), problems)
    }

    const KUBELETS: &str = "0123456789abcdef0123456789abcdef";

    // Reads as pod-sync does at its start, beside a sandbox that a kubelet made once it had seen the file.
    // Returns the UID, and the hash that the mirror pod has.
    fn first_uid(root: &Path, dir: &Path, seen: jiff::Timestamp) -> (String, String) {
        let sandbox = StaticSandbox {
            id: "s".to_owned(),
            uid: KUBELETS.to_owned(),
            name: "a-n".to_owned(),
            namespace: "default".to_owned(),
            created_unix_ns: 1,
            config_hash: KUBELETS.to_owned(),
            seen: Some(seen),
            containers: Vec::new(),
        };
        let mut reader =
            ManifestReader::new(dir.to_owned(), "n".to_owned(), StaticPodUids::open(root, Vec::new()));
        let (_, pods) = reader.undecided().expect("a pod to decide on");
        reader.uids.set_sandboxes(Some(vec![sandbox]), &pods);
        let SourceEvent::Snapshot(snapshot) = reader.read(ReadTrigger::Period) else { panic!("no snapshot") };
        assert!(reader.undecided().is_none(), "it is decided");
        let metadata = &snapshot.pods[0].metadata;
        let hash = metadata.annotations.as_ref().unwrap()[labels::CONFIG_HASH].clone();
        (metadata.uid.clone().unwrap(), hash)
    }

    fn just_after(file: &Path) -> jiff::Timestamp {
        let times = file_times(&std::fs::symlink_metadata(file).unwrap()).unwrap();
        times.modified.max(times.changed) + Duration::from_nanos(1)
    }

    #[test]
    fn a_pod_keeps_the_uid_of_a_kubelet_if_its_file_was_not_changed_since() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.yaml");
        std::fs::write(&file, pod("a")).unwrap();
        let seen = just_after(&file);
        let kept = (KUBELETS.to_owned(), KUBELETS.to_owned());
        let (root, other_root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        assert_eq!(first_uid(root.path(), dir.path(), seen), kept);
        let touched = std::fs::File::options().write(true).open(&file).unwrap();
        touched.set_modified(std::time::SystemTime::from(seen) + Duration::from_secs(1)).unwrap();
        assert_eq!(first_uid(root.path(), dir.path(), seen), kept, "touched, and known");
        let (uid, hash) = first_uid(other_root.path(), dir.path(), seen);
        assert_ne!(uid, KUBELETS, "changed before the start");
        assert_eq!(uid, hash);
    }

    #[test]
    fn a_link_that_was_changed_since_is_a_changed_file() {
        let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (real, link) = (elsewhere.path().join("real.yaml"), dir.path().join("a.yaml"));
        std::fs::write(&real, pod("a")).unwrap();
        let changed = |path: &Path| file_times(&std::fs::symlink_metadata(path).unwrap()).unwrap().changed;
        // The clock of the file system has ticks of some milliseconds.
        loop {
            std::os::unix::fs::symlink(&real, &link).unwrap();
            if changed(&link) > changed(&real) {
                break;
            }
            std::fs::remove_file(&link).unwrap();
        }
        for (seen, is_kept) in [(just_after(&link), true), (changed(&link), false)] {
            let root = tempfile::tempdir().unwrap();
            assert_eq!(first_uid(root.path(), dir.path(), seen).0 == KUBELETS, is_kept, "{seen}");
        }
    }

    #[test]
    fn a_partially_written_file_keeps_its_pods_until_the_periodic_read() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let mut reader = reader(dir.path());
        let all = Some(vec!["a-n".to_owned(), "b-n".to_owned()]);
        std::fs::write(at("a.yaml"), pod("a")).unwrap();
        std::fs::write(at("b.yaml"), pod("b")).unwrap();
        assert_eq!(received(reader.read(ReadTrigger::Period)), (all.clone(), vec![]));
        for half in ["", "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n", "{{"] {
            std::fs::write(at("a.yaml"), half).unwrap();
            // At every read.
            for _ in 0..2 {
                let (pods, problems) = received(reader.read(ReadTrigger::Event));
                assert_eq!((pods, problems.len()), (all.clone(), 1), "{half:?}");
            }
        }
        std::fs::write(at("a.yaml"), pod("a")).unwrap();
        assert_eq!(received(reader.read(ReadTrigger::Event)), (all, vec![]));

        std::fs::write(at("a.yaml"), "").unwrap();
        assert_eq!(received(reader.read(ReadTrigger::Period)).0, Some(vec!["b-n".to_owned()]));
        assert_eq!(
            received(reader.read(ReadTrigger::Event)).0,
            Some(vec!["b-n".to_owned()]),
            "it does not come back"
        );
        std::fs::remove_file(at("b.yaml")).unwrap();
        assert_eq!(
            received(reader.read(ReadTrigger::Event)).0,
            Some(vec![]),
            "one that is gone is gone at once"
        );
    }

    #[test]
    fn an_unreadable_path_removes_no_pod_and_a_missing_one_removes_all() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("one.yaml");
        std::fs::write(&file, pod("a")).unwrap();
        let mut single = reader(&file);
        assert_eq!(received(single.read(ReadTrigger::Period)).0, Some(vec!["a-n".to_owned()]));
        std::fs::write(&file, "{{").unwrap();
        for why in [ReadTrigger::Event, ReadTrigger::Period] {
            let (pods, problems) = received(single.read(why));
            assert_eq!((pods, problems.len()), (None, 1), "{why:?}");
        }
        std::fs::remove_file(&file).unwrap();
        assert_eq!(received(single.read(ReadTrigger::Event)), (Some(vec![]), vec![]), "it is missing");

        // Root can read every file, but not a link to itself.
        let odd = dir.path().join("odd");
        std::os::unix::fs::symlink(&odd, &odd).unwrap();
        let (pods, problems) = received(reader(&odd).read(ReadTrigger::Period));
        assert_eq!((pods, problems.len()), (None, 1));
    }

    #[test]
    fn a_file_that_was_removed_and_written_again_loses_its_pods_first() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let mut reader = reader(dir.path());
        for name in ["a", "b"] {
            std::fs::write(at(name), pod(name)).unwrap();
        }
        std::fs::write(at("half"), format!("{}---\nkind: X\n", pod("half"))).unwrap();
        assert!(reader.forget(&[at("a")].into()).is_none(), "nothing was read");
        let names = |all: &[&str]| Some(all.iter().map(|name| format!("{name}-n")).collect::<Vec<_>>());
        assert_eq!(received(reader.read(ReadTrigger::Period)).0, names(&["a", "b", "half"]));
        assert!(reader.forget(&[at("other")].into()).is_none());
        let without = reader.forget(&[at("a"), at("other")].into()).unwrap();
        assert_eq!(received(without).0, names(&["b", "half"]), "files with problems stay");
        assert!(reader.forget(&[at("a")].into()).is_none(), "it is forgotten");
        assert_eq!(received(reader.read(ReadTrigger::Event)).0, names(&["a", "b", "half"]));

        let _ = reader.forget(&[at("a")].into());
        std::fs::write(at("a"), "").unwrap();
        assert_eq!(
            received(reader.read(ReadTrigger::Event)).0,
            names(&["b", "half"]),
            "its old content is gone"
        );
    }

    #[tokio::test]
    async fn a_manifest_that_is_replaced_keeps_its_pod_and_one_that_is_removed_in_between_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let (tx, mut rx) = quintlet_kit::queue::channel("test", 4);
        let stop = CancellationToken::new();
        let path = dir.path().to_owned();
        let (file, other) = (path.join("a.yaml"), path.join(".a.yaml"));
        std::fs::write(&file, pod("a")).unwrap();
        let task = run(reader(&path), None, Duration::from_secs(3600), tx, stop.clone());
        let check = async {
            let mut next = async || {
                let got = tokio::time::timeout(Duration::from_secs(10), rx.recv()).await;
                received(got.expect("an update within 10 s").unwrap().1).0.unwrap()
            };
            assert_eq!(next().await, ["a-n"]);
            std::fs::write(&other, pod("a")).unwrap();
            std::fs::rename(&other, &file).unwrap();
            assert_eq!(next().await, ["a-n"], "replaced");
            for _ in 0..3 {
                let text = std::fs::read(&file).unwrap();
                std::fs::remove_file(&file).unwrap();
                std::fs::write(&file, text).unwrap();
                // An event may lead to a read of its own.
                while !next().await.is_empty() {}
                while next().await != ["a-n"] {}
            }
            stop.cancel();
            while rx.recv().await.is_some() {}
        };
        tokio::join!(task, check);
    }

    #[tokio::test]
    async fn a_change_behind_a_link_is_found_at_the_next_read() {
        let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let real = elsewhere.path().join("real.yaml");
        std::fs::write(&real, pod("a")).unwrap();
        std::os::unix::fs::symlink(&real, dir.path().join("a.yaml")).unwrap();
        let (tx, mut rx) = quintlet_kit::queue::channel("test", 4);
        let stop = CancellationToken::new();
        let task = run(reader(dir.path()), None, Duration::from_millis(50), tx, stop.clone());
        let check = async {
            assert_eq!(received(rx.recv().await.unwrap().1).0, Some(vec!["a-n".to_owned()]));
            // The watched directory has no event for this change.
            std::fs::write(&real, pod("b")).unwrap();
            let new = Some(vec!["b-n".to_owned()]);
            let found =
                async { while rx.recv().await.is_some_and(|(_, update)| received(update).0 != new) {} };
            tokio::time::timeout(Duration::from_secs(10), found).await.expect("the change is found");
            stop.cancel();
            while rx.recv().await.is_some() {}
        };
        tokio::join!(task, check);
    }

    #[tokio::test]
    async fn a_new_a_changed_and_a_removed_manifest_each_bring_a_snapshot_long_before_the_period() {
        let dir = tempfile::tempdir().unwrap();
        let (tx, mut rx) = quintlet_kit::queue::channel("test", 4);
        let stop = CancellationToken::new();
        let path = dir.path().to_owned();
        let task = run(reader(&path), None, Duration::from_secs(3600), tx, stop.clone());
        let check = async {
            let mut wait = async |want: &[&str]| {
                let mut last = Vec::new();
                let found = tokio::time::timeout(Duration::from_secs(10), async {
                    while let Some((_, update)) = rx.recv().await {
                        last = received(update).0.unwrap_or_default();
                        if last == want {
                            return;
                        }
                    }
                })
                .await;
                assert!(found.is_ok(), "want {want:?}, last {last:?}");
            };
            wait(&[]).await;
            std::fs::write(path.join("a.yaml"), pod("a")).unwrap();
            wait(&["a-n"]).await;
            std::fs::write(path.join("a.yaml"), pod("b")).unwrap();
            wait(&["b-n"]).await;
            std::fs::remove_file(path.join("a.yaml")).unwrap();
            wait(&[]).await;
            stop.cancel();
        };
        tokio::join!(task, check);
    }
}
