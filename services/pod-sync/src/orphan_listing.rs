//! When the directories and cgroups of unknown pods are listed. A pass of housekeeping without a change needs
//! no list.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use notify::Watcher as _;
use quintlet_model::ids::PodUid;

/// Interval between lists without a change.
const PERIOD: Duration = Duration::from_secs(60);
/// Shortest interval between lists after changes. A list reads the directory of each cgroup hierarchy, and in
/// a burst each pass of housekeeping finds a change.
const PAUSE: Duration = Duration::from_secs(5);

/// Input and result of a search for unknown pods.
#[derive(Debug)]
struct LastList {
    /// The pods that were known.
    known: HashSet<PodUid>,
    /// CLOCK_BOOTTIME of its begin.
    at: Duration,
    /// Whether the list had an unknown pod, whose removal may fail.
    found: bool,
}

/// Decides when unknown pods are listed: after a change of the known pods or of the directory of pods, and
/// while unknown pods are found.
#[derive(Debug)]
pub(crate) struct OrphanListing {
    dir: PathBuf,
    /// The directory of pods has changed since the last list.
    changed: Arc<AtomicBool>,
    watcher: Option<notify::RecommendedWatcher>,
    last: Option<LastList>,
}

impl OrphanListing {
    /// `dir` is the directory of pods. It need not exist yet.
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir, changed: Arc::default(), watcher: None, last: None }
    }

    /// Returns whether unknown pods must be listed now. The caller then lists them and calls [`Self::ended`].
    pub(crate) fn begin(&mut self, known: &HashSet<PodUid>, now: Duration) -> bool {
        if self.watcher.is_none() {
            self.watcher = self.watch();
        }
        // Without a watch, any pass may find a change.
        let changed = self.changed.load(Ordering::Relaxed) || self.watcher.is_none();
        let is_due = is_due(self.last.as_ref(), changed, known, now);
        if is_due {
            // Before the list, which finds what has changed until then.
            self.changed.store(false, Ordering::Relaxed);
            self.last = Some(LastList { known: known.clone(), at: now, found: false });
        }
        is_due
    }

    /// Records the result of a list.
    pub(crate) fn ended(&mut self, found: bool) {
        if let Some(last) = &mut self.last {
            last.found = found;
        }
    }

    // Blocks: the first pass watches the directory, which the start has made.
    fn watch(&self) -> Option<notify::RecommendedWatcher> {
        let changed = Arc::clone(&self.changed);
        let on_change = move |_: notify::Result<notify::Event>| changed.store(true, Ordering::Relaxed);
        // Without reads: lists read, too.
        let changes = notify::Config::default().with_event_kinds(notify::EventKindMask::CORE);
        let mut watcher = notify::RecommendedWatcher::new(on_change, changes).ok()?;
        watcher.watch(&self.dir, notify::RecursiveMode::NonRecursive).ok()?;
        // What was created before the watch is found by the list of this pass.
        self.changed.store(true, Ordering::Relaxed);
        Some(watcher)
    }
}

fn is_due(last: Option<&LastList>, changed: bool, known: &HashSet<PodUid>, now: Duration) -> bool {
    let Some(last) = last else { return true };
    let age = now.saturating_sub(last.at);
    last.found || age >= PERIOD || age >= PAUSE && (changed || last.known != *known)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(uids: &[&str]) -> HashSet<PodUid> {
        uids.iter().map(|uid| PodUid::parse(uid).unwrap()).collect()
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn unknown_pods_are_listed_after_a_change_while_some_are_found_and_once_a_minute() {
        let last = |found| Some(LastList { known: known(&["a", "b"]), at: at(100), found });
        let cases = [
            ("the first list", None, false, known(&[]), 0, true),
            ("no change", last(false), false, known(&["b", "a"]), 159, false),
            ("a minute without a change", last(false), false, known(&["a", "b"]), 160, true),
            ("a pod less", last(false), false, known(&["a"]), 105, true),
            ("a pod more", last(false), false, known(&["a", "b", "c"]), 105, true),
            ("a change of the directory", last(false), true, known(&["a", "b"]), 105, true),
            ("a change during the pause", last(false), true, known(&["a"]), 104, false),
            ("an unknown pod in the last list", last(true), false, known(&["a", "b"]), 102, true),
        ];
        for (name, last, changed, known, now, want) in cases {
            assert_eq!(is_due(last.as_ref(), changed, &known, at(now)), want, "{name}");
        }
    }

    #[test]
    fn a_directory_that_appears_is_listed_and_a_quiet_one_is_not() {
        let root = tempfile::tempdir().unwrap();
        let pods = root.path().join("pods");
        let mut listing = OrphanListing::new(pods.clone());
        let none = known(&[]);
        assert!(listing.begin(&none, at(0)) && listing.begin(&none, at(5)), "nothing is watched yet");
        std::fs::create_dir(&pods).unwrap();
        assert!(listing.begin(&none, at(10)), "the first pass with a watch");
        listing.ended(false);
        assert!(!listing.begin(&none, at(15)));
        std::fs::read_dir(&pods).unwrap().count();
        assert!(!listing.begin(&none, at(20)), "a list is no change");
        std::fs::create_dir(pods.join("left-over")).unwrap();
        let deadline = std::time::Duration::from_secs(10);
        let mut waited = Duration::ZERO;
        while !listing.begin(&none, at(25)) {
            std::thread::sleep(Duration::from_millis(10));
            waited += Duration::from_millis(10);
            assert!(waited < deadline, "the change is noticed");
        }
        listing.ended(true);
        assert!(listing.begin(&none, at(26)), "until the directory has been removed");
    }
}
