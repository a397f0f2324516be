//! `quintctl watch`: a line for each change of a pod, each lifecycle event and each probe, as they happen.
//!
//! Tasks: one per stream (pod-sync, pleg-service's events and its records, each instance of probe-service), one per
//! service that is only watched for being there, and one that looks for new instances of probe-service. All send into one
//! channel; a stream that ends is opened again, and both are told. Ends with the reader.

mod known;
mod lines;
mod link;
mod records;
mod streams;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quintlet_kit::paths::Paths;
use quintlet_kit::task::TaskGroup;
use serde::Serialize;
use tokio::sync::mpsc;

use crate::client::Peer;
use crate::error::Error;
use crate::out::{Format, print};
use crate::text::{time_of_day, took};

pub use known::Known;
pub use lines::{lifecycle_line, probe_line};

/// Lines on their way to the terminal; when it does not keep up, the streams wait, and their services skip states.
const LINES: usize = 256;

/// Between two attempts to reach a service.
const RETRY: Duration = Duration::from_millis(100);

/// Characters of a change before what stands behind it.
const SAID: usize = 32;

/// Changes as they happen.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct WatchArgs {
    /// Only of this pod: name, NAMESPACE/NAME or UID
    pub pod: Option<String>,
    /// Without probes that succeed
    #[arg(short, long)]
    pub quiet: bool,
}

/// One change.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Line {
    /// When, nanoseconds since 1970.
    #[serde(serialize_with = "as_moment")]
    pub at: i64,
    /// `pleg`, `status`, `api`, `probe`, or `service` for what is about a service.
    pub source: &'static str,
    /// Name of the pod as people use it; the service's where it is about one.
    pub subject: String,
    /// What happened.
    pub text: String,
    /// Where it stands in its source's sequence, or how long it took: `epoch 7 rev 1182`, `rv 88123`, `0.9ms`.
    pub place: String,
    /// Nanoseconds since the change of this pod that it follows from: a status from a lifecycle event, a write to the
    /// API server from a status.
    #[serde(rename = "afterNs")]
    pub after: Option<i64>,
    /// UID of the pod; empty where it is about a service.
    pub uid: String,
    /// Of an evaluation: which probe, and whether it succeeded.
    #[serde(skip)]
    pub probe: Option<(String, bool)>,
}

fn as_moment<S: serde::Serializer>(at: &i64, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(&crate::text::moment(*at))
}

/// Runs until nobody reads.
///
/// # Errors
/// No service answers at the start, or nobody reads.
pub async fn run(args: WatchArgs, paths: &Paths, format: Format) -> Result<(), Error> {
    let pod_sync = Peer::pod_sync(paths);
    if let (Err(error), Err(_)) = (pod_sync.channel().await, Peer::pleg(paths).channel().await) {
        return Err(error);
    }
    let (lines, mut out) = mpsc::channel(LINES);
    let tasks = TaskGroup::new();
    let events = Events::default();
    tasks.spawn("watch pods", streams::pods(pod_sync, events.clone(), lines.clone()));
    tasks.spawn("watch lifecycle", streams::lifecycle(Peer::pleg(paths), events, lines.clone()));
    tasks.spawn("watch records", records::follow(Peer::pleg(paths), lines.clone()));
    for peer in [Peer::cri_proxy(paths), Peer::status_reporter(paths)] {
        tasks.spawn("watch health", streams::health(peer, lines.clone()));
    }
    tasks.spawn("find probers", streams::probers(paths.clone(), lines));
    let mut wanted = Wanted { args, succeeded: BTreeSet::new() };
    while let Some(line) = out.recv().await {
        if !wanted.has(&line) {
            continue;
        }
        let printed = format.render_line(&line, |_| render(&line)).and_then(print);
        if let Err(error) = printed {
            drop(out);
            return Err(error);
        }
    }
    Ok(())
}

/// When the newest lifecycle event of each pod was: what a status follows from.
#[derive(Debug, Clone, Default)]
struct Events(Arc<Mutex<BTreeMap<String, i64>>>);

impl Events {
    fn was(&self, uid: &str, at: i64) {
        if let Ok(mut events) = self.0.lock() {
            events.insert(uid.to_owned(), at);
        }
    }

    fn of(&self, uid: &str) -> Option<i64> {
        self.0.lock().ok()?.get(uid).copied()
    }

    fn forget(&self, uid: &str) {
        if let Ok(mut events) = self.0.lock() {
            events.remove(uid);
        }
    }
}

/// Which lines are printed.
struct Wanted {
    args: WatchArgs,
    /// Probes that succeeded last.
    succeeded: BTreeSet<String>,
}

impl Wanted {
    /// Lines about services are always wanted; with `--quiet` a probe that goes on succeeding is not.
    fn has(&mut self, line: &Line) -> bool {
        let as_before = match &line.probe {
            Some((probe, true)) => !self.succeeded.insert(probe.clone()),
            Some((probe, false)) => {
                self.succeeded.remove(probe);
                false
            }
            None => false,
        };
        if as_before && self.args.quiet {
            return false;
        }
        match &self.args.pod {
            None => true,
            Some(_) if line.uid.is_empty() => line.source == "service",
            Some(pod) => {
                let name = pod.strip_prefix("default/").unwrap_or(pod);
                line.uid == *pod || line.subject == name || line.subject.ends_with(&format!("/{name}"))
            }
        }
    }
}

/// The line of a change.
#[must_use]
pub fn render(line: &Line) -> String {
    let at = time_of_day(line.at);
    if line.source == "service" {
        return format!("{at} ------ {} {}\n", line.subject, line.text);
    }
    let after = line.after.map(|ns| format!("  +{}", took(ns))).unwrap_or_default();
    let behind = format!("{}{after}", line.place);
    let gap = if line.text.chars().count() > SAID { "  " } else { " " };
    let text = format!("{at} {:<6} {:<16} {:<SAID$}{gap}{behind}", line.source, line.subject, line.text);
    format!("{}\n", text.trim_end())
}

#[cfg(test)]
mod tests;
