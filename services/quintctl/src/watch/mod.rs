//! `quintctl watch`: prints a line for each change of a pod, each lifecycle event and each probe, as they happen.
//!
//! Tasks: one per stream (pod-sync, pleg-service's events and its records, each instance of probe-service), one per service that
//! is watched for its health only, and one that scans for new instances of probe-service. All tasks send lines on one channel. A
//! stream that ends is reopened, and the loss and the return of the service are lines too. The tasks end when the output is closed.

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

/// Capacity of the channel of lines. If the terminal does not keep up, the streams wait and their services skip states.
const LINE_CAPACITY: usize = 256;

/// Interval between attempts to connect to a service.
const RETRY: Duration = Duration::from_millis(100);

/// Width of the text column, in characters.
const TEXT_WIDTH: usize = 32;

/// Show changes as they happen.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct WatchArgs {
    /// Only changes of this pod: name, NAMESPACE/NAME or UID
    pub pod: Option<String>,
    /// Omit probes that continue to succeed
    #[arg(short, long)]
    pub quiet: bool,
}

/// One line of the output.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Line {
    /// Time of the change, nanoseconds since 1970.
    #[serde(serialize_with = "as_moment")]
    pub at: i64,
    /// `pleg`, `status`, `api`, `probe`, or `service` for a line about a service.
    pub source: &'static str,
    /// Display name of the pod, or name of the service.
    pub subject: String,
    pub text: String,
    /// Position in the source's sequence, or a duration: `epoch 7 rev 1182`, `rv 88123`, `0.9ms`.
    pub place: String,
    /// Nanoseconds since the change that caused this one: from a lifecycle event to the status, from a status to its write to the
    /// API server.
    #[serde(rename = "afterNs")]
    pub after: Option<i64>,
    /// UID of the pod; empty for a service.
    pub uid: String,
    /// The probe of an evaluation, and whether it succeeded.
    #[serde(skip)]
    pub probe: Option<(String, bool)>,
}

fn as_moment<S: serde::Serializer>(at: &i64, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(&crate::text::moment(*at))
}

/// Prints changes until standard output is closed.
///
/// # Errors
/// Neither pod-sync nor pleg-service is reachable at the start, or standard output is closed.
pub async fn run(args: WatchArgs, paths: &Paths, format: Format) -> Result<(), Error> {
    let pod_sync = Peer::pod_sync(paths);
    if let (Err(error), Err(_)) = (pod_sync.channel().await, Peer::pleg(paths).channel().await) {
        return Err(error);
    }
    let (lines, mut out) = mpsc::channel(LINE_CAPACITY);
    let tasks = TaskGroup::new();
    let events = Events::default();
    tasks.spawn("watch pods", streams::pods(pod_sync, events.clone(), lines.clone()));
    tasks.spawn("watch lifecycle", streams::lifecycle(Peer::pleg(paths), events, lines.clone()));
    tasks.spawn("watch records", records::follow(Peer::pleg(paths), lines.clone()));
    for peer in [Peer::cri_proxy(paths), Peer::status_reporter(paths)] {
        tasks.spawn("watch health", streams::health(peer, lines.clone()));
    }
    tasks.spawn("find probers", streams::probers(paths.clone(), lines));
    let mut filter = Filter { args, succeeded: BTreeSet::new() };
    while let Some(line) = out.recv().await {
        if !filter.matches(&line) {
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

/// Time of the newest lifecycle event of each pod, nanoseconds since 1970.
#[derive(Debug, Clone, Default)]
struct Events(Arc<Mutex<BTreeMap<String, i64>>>);

impl Events {
    fn record(&self, uid: &str, at: i64) {
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

/// Selects the lines to print.
struct Filter {
    args: WatchArgs,
    /// Probes whose last evaluation succeeded.
    succeeded: BTreeSet<String>,
}

impl Filter {
    /// Returns whether to print a line: lines about services always, with `--quiet` no probe that continues to succeed.
    fn matches(&mut self, line: &Line) -> bool {
        let continues_to_succeed = match &line.probe {
            Some((probe, true)) => !self.succeeded.insert(probe.clone()),
            Some((probe, false)) => {
                self.succeeded.remove(probe);
                false
            }
            None => false,
        };
        if continues_to_succeed && self.args.quiet {
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

#[must_use]
pub fn render(line: &Line) -> String {
    let at = time_of_day(line.at);
    if line.source == "service" {
        return format!("{at} ------ {} {}\n", line.subject, line.text);
    }
    let after = line.after.map(|ns| format!("  +{}", took(ns))).unwrap_or_default();
    let detail = format!("{}{after}", line.place);
    let gap = if line.text.chars().count() > TEXT_WIDTH { "  " } else { " " };
    let text =
        format!("{at} {:<6} {:<16} {:<TEXT_WIDTH$}{gap}{detail}", line.source, line.subject, line.text);
    format!("{}\n", text.trim_end())
}

#[cfg(test)]
mod tests;
