//! Computes whether the node is ready.

use std::time::Duration;

use serde_json::Value;

use super::super::Facts;

/// Age of facts at which the node is not ready.
pub const FACTS_LIMIT: Duration = Duration::from_secs(30);

/// Time after a start of this service for which Ready stays unchanged without facts.
pub const START_GRACE: Duration = Duration::from_secs(30);

/// The source whose facts are required.
pub const MAIN_SOURCE: &str = "pod-sync";

/// Health of another service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Name for the message of the condition.
    pub name: &'static str,
    /// Time since the service stopped serving; none while it serves.
    pub down_for: Option<Duration>,
    /// Time without health after which the node is not ready.
    pub limit: Duration,
}

/// Reason against Ready until the CSINode is written (`pkg/volume/csi: initializeCSINode`).
pub const NO_CSI_NODE: &str = "CSINode is not yet initialized";

/// Returns the reason against Ready from the CSINode. After a restart, a Ready node stays Ready for
/// [`START_GRACE`].
#[must_use]
pub fn csi_node_problem(live: &Value, has_csi_node: bool, since_start: Duration) -> Option<&'static str> {
    let is_starting = since_start < START_GRACE && crate::status::is_true(&live["status"], "Ready");
    (!has_csi_node && !is_starting).then_some(NO_CSI_NODE)
}

/// The input of [`readiness`].
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// Newest facts of each service.
    pub facts: &'a [Facts],
    /// Health of the services.
    pub peers: &'a [Peer],
    /// Reason against Ready from this service.
    pub own: Option<&'a str>,
    /// Current CLOCK_BOOTTIME.
    pub boot: Duration,
    /// CLOCK_BOOTTIME of the start of this service.
    pub started: Duration,
}

/// The value of the condition Ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Readiness {
    /// No service has a reason against it.
    Ready,
    /// The reasons.
    NotReady(Vec<String>),
    /// This service has just started and has no facts: the condition in the API server stays.
    Unknown,
}

/// Computes readiness, without the check of the capacity.
#[must_use]
pub fn readiness(view: View<'_>) -> Readiness {
    let known = view.facts.iter().any(|f| f.source == MAIN_SOURCE);
    if !known && view.boot.saturating_sub(view.started) < START_GRACE {
        return Readiness::Unknown;
    }
    let mut problems: Vec<String> = Vec::new();
    let mut add = |problem: String| {
        if !problems.contains(&problem) {
            problems.push(problem);
        }
    };
    for facts in view.facts {
        facts.not_ready.iter().cloned().for_each(&mut add);
    }
    view.own.map(str::to_owned).into_iter().for_each(&mut add);
    for peer in view.peers {
        if peer.down_for.is_some_and(|d| d > peer.limit) {
            add(format!(
                "{} is not healthy: not serving for more than {} s",
                peer.name,
                peer.limit.as_secs()
            ));
        }
    }
    if !known {
        add(format!("{MAIN_SOURCE} has not reported yet"));
    }
    for facts in view.facts {
        if view.boot.saturating_sub(facts.observed) > FACTS_LIMIT {
            add(format!("{} has not reported for more than {} s", facts.source, FACTS_LIMIT.as_secs()));
        }
    }
    if problems.is_empty() { Readiness::Ready } else { Readiness::NotReady(problems) }
}
