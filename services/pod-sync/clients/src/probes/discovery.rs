//! Discovers instances by their sockets.

use std::collections::BTreeSet;
use std::path::Path;

use notify::Watcher as _;
use tokio::sync::mpsc;

/// Returns the IDs of the instances whose sockets are in `dir`.
pub(super) fn sockets(dir: &Path) -> BTreeSet<String> {
    let Ok(entries) = std::fs::read_dir(dir) else { return BTreeSet::new() };
    entries
        .flatten()
        .filter_map(|e| e.file_name().to_str().and_then(|n| n.strip_suffix(".sock")).map(str::to_owned))
        .collect()
}

/// Watches the directory, and sends to `wake` after each change. Returns `None` if the watch fails.
pub(super) fn watch(dir: &Path, wake: mpsc::Sender<()>) -> Option<notify::RecommendedWatcher> {
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        if !event.is_ok_and(|e| e.kind.is_access()) {
            let _ = wake.try_send(());
        }
    })
    .ok()?;
    watcher.watch(dir, notify::RecursiveMode::NonRecursive).ok()?;
    Some(watcher)
}
