//! `quintctl watch`: prints a line for each change of a pod, each lifecycle event and each probe, as they
//! happen.
//!
//! Tasks: one per stream (pod-sync, pleg-service's events and its records, each instance of probe-service),
//! one per service that is watched for its health only, and one that scans for new instances of
//! probe-service. All tasks send lines on one channel. A stream that ends is reopened, and the loss and the
//! return of the service are lines too. The tasks end when the output is closed.

mod known;
mod lines;
mod link;
mod records;
mod streams;

use std::collections::BTreeSet;

use quintlet_kit::args::paths::Paths;
use quintlet_kit::task::TaskGroup;

use crate::client::Peer;
use crate::error::Error;
use crate::out::{Format, print};

pub(crate) use lines::{Line, render};

/// Capacity of the channel of lines. If the terminal does not keep up, the streams wait and their services
/// skip states.
const LINE_CAPACITY: usize = 256;

/// Show changes as they happen.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct WatchArgs {
    /// Only changes of this pod: name, NAMESPACE/NAME or UID
    pub(crate) pod: Option<String>,
    /// Omit probes that continue to succeed
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// Prints changes until standard output is closed.
///
/// # Errors
/// Neither pod-sync nor pleg-service is reachable at the start, or standard output is closed.
pub(crate) async fn run(args: WatchArgs, paths: &Paths, format: Format) -> Result<(), Error> {
    let pod_sync = Peer::pod_sync(paths);
    if let (Err(error), Err(_)) = (pod_sync.channel().await, Peer::pleg(paths).channel().await) {
        return Err(error);
    }
    let (lines, mut out) = quintlet_kit::queue::channel("lines", LINE_CAPACITY);
    let tasks = TaskGroup::new();
    let events = streams::Events::default();
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

/// Selects the lines to print.
struct Filter {
    args: WatchArgs,
    /// Probes whose last evaluation succeeded.
    succeeded: BTreeSet<String>,
}

impl Filter {
    /// Returns whether to print a line: lines about services always, with `--quiet` no probe that continues
    /// to succeed.
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

#[cfg(test)]
mod tests;
