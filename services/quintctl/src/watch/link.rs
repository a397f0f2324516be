//! Reports the loss and the return of a service.

use std::time::Duration;

use quintctl_text::{clean, took};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::lines::{Line, service_line};
use crate::client::Peer;
use crate::error::Error;

/// One process of a service. Another ID means that the service restarted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Run {
    /// The process ID or the epoch.
    pub(super) id: u64,
    /// The ID with its kind, for the line.
    pub(super) name: String,
}

/// The reachability of one service.
pub(super) struct Link {
    service: String,
    /// When the connection was lost; none while the service is reachable.
    lost_at: Option<Instant>,
    run: Option<Run>,
    /// The service was reachable before.
    was_reachable: bool,
}

impl Link {
    pub(super) fn new(service: &str) -> Self {
        Self { service: service.to_owned(), lost_at: None, run: None, was_reachable: false }
    }

    /// Returns the line of a loss, the first time.
    pub(super) fn lost(&mut self, reason: &str) -> Option<Line> {
        if self.lost_at.is_some() {
            return None;
        }
        self.lost_at = Some(Instant::now());
        let state = if self.was_reachable { "unreachable" } else { "not reachable yet" };
        Some(service_line(&self.service, format!("{state}: {}", clean(reason))))
    }

    /// Returns the line of a return after a loss. `run` is the process that serves now; `detail` ends the
    /// line.
    pub(super) fn back(&mut self, run: Option<Run>, detail: &str) -> Option<Line> {
        let lost_at = self.lost_at.take();
        let first = !std::mem::replace(&mut self.was_reachable, true);
        let before = std::mem::replace(&mut self.run, run);
        let after = took(i64::try_from(lost_at?.elapsed().as_nanos()).unwrap_or(i64::MAX));
        let detail = if detail.is_empty() { String::new() } else { format!(", {detail}") };
        let text = match (&before, &self.run) {
            _ if first => format!("reachable{detail}"),
            (Some(before), Some(now)) if before != now => {
                format!("restarted: {}, reachable after {after}{detail}", now.name)
            }
            _ => format!("reachable again after {after}{detail}"),
        };
        Some(service_line(&self.service, text))
    }
}

/// Sends a line. Returns false if the reader is gone.
pub(super) async fn say(out: &mpsc::Sender<Line>, line: Option<Line>) -> bool {
    match line {
        Some(line) => out.send(line).await.is_ok(),
        None => !out.is_closed(),
    }
}

pub(super) fn ended(peer: &Peer) -> Error {
    Error::Unresponsive {
        service: peer.service.clone(),
        path: peer.path.clone(),
        reason: "the stream ended".to_owned(),
    }
}

/// Returns the reason of an error without the name of the service, which the line begins with.
pub(super) fn why(error: &Error) -> String {
    match error {
        Error::Unreachable { source, .. } => source.to_string(),
        Error::Unresponsive { reason, .. } => reason.clone(),
        Error::Rpc { message, .. } => message.clone(),
        other => quintlet_kit::error_chain(other),
    }
}

/// Formats the cost of a restart.
pub(super) fn read_again(within: Duration, changed: usize) -> String {
    let within = took(i64::try_from(within.as_nanos()).unwrap_or(i64::MAX));
    let noun = if changed == 1 { "pod" } else { "pods" };
    format!("snapshot received in {within}, {changed} {noun} changed meanwhile")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(id: u64) -> Option<Run> {
        Some(Run { id, name: format!("epoch {id}") })
    }

    #[tokio::test(start_paused = true)]
    async fn the_loss_and_the_return_of_a_service_are_reported_once_each() {
        let mut link = Link::new("pleg-service");
        assert!(link.back(run(7), "").is_none());
        assert_eq!(link.lost("refused").unwrap().text, "unreachable: refused");
        assert!(link.lost("refused").is_none());
        tokio::time::advance(Duration::from_millis(1500)).await;
        let text = link.back(run(8), "0 pods changed meanwhile").unwrap().text;
        assert_eq!(text, "restarted: epoch 8, reachable after 1.5s, 0 pods changed meanwhile");
        assert!(link.back(run(8), "").is_none());
        assert!(link.lost("cut").is_some());
        assert_eq!(
            link.back(run(8), "").unwrap().text,
            "reachable again after 0µs",
            "the same run is no restart"
        );
        let mut never = Link::new("pod-sync");
        assert_eq!(never.lost("no file").unwrap().text, "not reachable yet: no file");
        assert_eq!(never.back(run(1), "").unwrap().text, "reachable");
    }
}
