//! Watches the directory with the sockets of instances.

use std::path::Path;

use notify::Watcher as _;
use tokio::sync::mpsc;

// Blocks: the run directory is on a tmpfs.
/// Watches the directory, and sends to `wake` after each change. Returns `None` if the watch fails.
pub(super) fn watch(dir: &Path, wake: mpsc::Sender<()>) -> Option<notify::RecommendedWatcher> {
    let woken = move |_: notify::Result<notify::Event>| {
        quintlet_kit::queue::wake(&wake);
    };
    // Without reads: a list of the directory would wake the watcher's thread.
    let changes = notify::Config::default().with_event_kinds(notify::EventKindMask::CORE);
    let mut watcher = notify::RecommendedWatcher::new(woken, changes).ok()?;
    watcher.watch(dir, notify::RecursiveMode::NonRecursive).ok()?;
    Some(watcher)
}
