//! Watches: streams of changes from a version.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::time::Instant;

use crate::error::ApiError;
use crate::faults::WatchCut;
use crate::resources::Resource;
use crate::select::Selector;
use crate::server::Server;
use crate::store::{Change, ChangeKind};

pub(crate) fn line(kind: &str, object: &Value) -> String {
    format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n")
}

pub(crate) fn bookmark(resource: &Resource, rv: u64, initial_end: bool) -> Value {
    let mut meta = json!({"resourceVersion": rv.to_string(), "creationTimestamp": null});
    if initial_end {
        meta["annotations"] = json!({"k8s.io/initial-events-end": "true"});
    }
    json!({"kind": resource.kind, "apiVersion": resource.api_version(), "metadata": meta})
}

/// One open watch: a cursor into the history.
pub(crate) struct Watch {
    pub(crate) server: Arc<Server>,
    pub(crate) changed: tokio::sync::watch::Receiver<u64>,
    pub(crate) cuts: tokio::sync::watch::Receiver<WatchCut>,
    /// The last disconnection before this watch began.
    pub(crate) cut: WatchCut,
    pub(crate) resource: &'static Resource,
    pub(crate) namespace: String,
    pub(crate) selector: Selector,
    /// Version from which a bookmark reports progress.
    pub(crate) began: u64,
    pub(crate) cursor: u64,
    pub(crate) pending: Vec<String>,
    pub(crate) ended: bool,
    pub(crate) until: Instant,
    pub(crate) bookmarks: bool,
    pub(crate) next_bookmark: Instant,
}

impl Watch {
    /// Returns the next lines; `None` at the end of the watch.
    pub(crate) async fn next(&mut self) -> Option<String> {
        loop {
            if !self.pending.is_empty() {
                return Some(self.pending.drain(..).collect());
            }
            if self.ended {
                return None;
            }
            let cut = *self.cuts.borrow_and_update();
            if cut != self.cut {
                self.ended = true;
                if cut.expired {
                    self.pending.push(line("ERROR", &ApiError::expired(self.cursor, self.cursor + 1).body()));
                }
                continue;
            }
            self.changed.borrow_and_update();
            match self.server.store.changes_after(self.resource, self.cursor) {
                Err(error) => {
                    self.ended = true;
                    self.pending.push(line("ERROR", &error.body()));
                    continue;
                }
                Ok((changes, rv)) => {
                    self.pending = changes.iter().filter_map(|change| self.describe(change)).collect();
                    self.cursor = self.cursor.max(rv);
                }
            }
            if !self.pending.is_empty() {
                continue;
            }
            // All three arms only wake the loop; a dropped one is polled again.
            tokio::select! {
                changed = self.changed.changed() => if changed.is_err() { return None },
                cut = self.cuts.changed() => if cut.is_err() { return None },
                () = tokio::time::sleep_until(self.next_bookmark), if self.bookmarks && self.cursor > self.began => {
                    self.next_bookmark = Instant::now() + self.server.bookmark_every;
                    self.pending.push(line("BOOKMARK", &bookmark(self.resource, self.cursor, false)));
                }
                () = tokio::time::sleep_until(self.until) => self.ended = true,
            }
        }
    }

    /// Describes a change as an event: an object that begins to match is added, one that ceases to match is
    /// deleted.
    fn describe(&self, change: &Change) -> Option<String> {
        let meta = &change.object["metadata"];
        if !self.namespace.is_empty() && meta["namespace"] != json!(self.namespace) {
            return None;
        }
        let matched = change.before.as_ref().is_some_and(|before| self.selector.matches(before));
        let matches = change.kind != ChangeKind::Deleted && self.selector.matches(&change.object);
        match (matched, matches) {
            (false, false) => None,
            (false, true) => Some(line("ADDED", &change.object)),
            (true, true) => Some(line("MODIFIED", &change.object)),
            (true, false) => Some(line("DELETED", &change.object)),
        }
    }
}
