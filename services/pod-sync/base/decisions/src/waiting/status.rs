//! Derives what a pod waits for from its status.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use quintlet_model::pod;

use super::{StartFailure, Waiting};
use crate::conditions;
use crate::resize::feasibility::PendingReason;
use crate::restart::RESTARTING_ALL;

/// The reason for which a pod waits, and the times of the wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingFor {
    /// The first unfinished step, in the order of a pod's start.
    pub what: Waiting,
    /// Wall-clock time at which the wait began; `None` if the status does not have it.
    pub since: Option<jiff::Timestamp>,
    /// Latest end of the wait; `None` if it is not known.
    pub until: Option<jiff::Timestamp>,
}

/// A container start delayed by a back-off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StartBackoff {
    /// Time until the next attempt.
    pub remaining: Duration,
    /// Length of the whole back-off.
    pub delay: Duration,
}

/// Delayed starts, by container name.
pub type StartBackoffs = BTreeMap<String, StartBackoff>;

fn later(now: jiff::Timestamp, wait: Duration) -> Option<jiff::Timestamp> {
    now.checked_add(jiff::SignedDuration::try_from(wait).ok()?).ok()
}

/// Returns the first thing that the pod waits for, in the order of its life cycle. `None` for a pod in a
/// terminal phase.
#[must_use]
pub fn from_status(
    pod: &Pod,
    status: &PodStatus,
    start_backoffs: &StartBackoffs,
    now: jiff::Timestamp,
) -> Option<WaitingFor> {
    if pod::is_terminal_phase(status.phase.as_deref()) {
        return None;
    }
    let start = status.start_time.as_ref().map(|t| t.0);
    let restarting = status
        .conditions
        .iter()
        .flatten()
        .find(|c| c.type_ == conditions::ALL_CONTAINERS_RESTARTING && c.status == "True");
    if let Some(c) = restarting {
        let since = c.last_transition_time.as_ref().map(|t| t.0);
        return Some(WaitingFor { what: Waiting::RestartingAll, since, until: None });
    }
    let find = |list: &Option<Vec<ContainerStatus>>, name: &str| {
        list.iter().flatten().find(|s| s.name == name).cloned()
    };
    let inits = || {
        pod::init_containers(pod)
            .iter()
            .filter_map(|c| Some((c, find(&status.init_container_statuses, &c.name)?)))
    };
    for (c, s) in inits() {
        let sidecar = pod::is_sidecar(c);
        let done = if sidecar { s.started == Some(true) } else { s.ready };
        if done {
            continue;
        }
        // A plain init container has no probes: while it runs, its exit is awaited.
        let running = s.state.as_ref().is_some_and(|s| s.running.is_some());
        let own = if running && !sidecar { None } else { of_container(&s, start_backoffs, now, start) };
        return own.or_else(|| {
            let what = Waiting::PodInitializing { container: c.name.clone() };
            Some(WaitingFor { what, since: since_of(&s).or(start), until: None })
        });
    }
    let regular = pod::spec(pod).containers.iter().filter_map(|c| find(&status.container_statuses, &c.name));
    // A started sidecar delays no other container, but the pod is Ready only once it is.
    let sidecars = inits().filter(|(c, _)| pod::is_sidecar(c)).map(|(_, s)| s);
    if let Some(w) = regular.chain(sidecars).find_map(|s| of_container(&s, start_backoffs, now, start)) {
        return Some(w);
    }
    let true_condition =
        |name: &str| status.conditions.iter().flatten().any(|c| c.type_ == name && c.status == "True");
    let gates: Vec<String> = pod::spec(pod)
        .readiness_gates
        .iter()
        .flatten()
        .map(|g| g.condition_type.clone())
        .filter(|g| !true_condition(g))
        .collect();
    if gates.is_empty() {
        return resize(status);
    }
    let since = status
        .conditions
        .iter()
        .flatten()
        .find(|c| c.type_ == conditions::READY)
        .and_then(|c| c.last_transition_time.as_ref())
        .map(|t| t.0);
    Some(WaitingFor { what: Waiting::ReadinessGates { gates }, since, until: None })
}

// The pod itself waits for nothing.
fn resize(status: &PodStatus) -> Option<WaitingFor> {
    let pending = status.conditions.iter().flatten().find(|c| c.type_ == conditions::RESIZE_PENDING)?;
    let message = pending.message.clone().unwrap_or_default();
    let reason = pending.reason.as_deref();
    let what = if reason == Some(PendingReason::Infeasible.as_str()) {
        Waiting::ResizeInfeasible { message }
    } else {
        Waiting::ResizeDeferred { message }
    };
    Some(WaitingFor { what, since: pending.last_transition_time.as_ref().map(|t| t.0), until: None })
}

fn since_of(s: &ContainerStatus) -> Option<jiff::Timestamp> {
    let state = s.state.as_ref()?;
    if let Some(running) = &state.running {
        return running.started_at.as_ref().map(|t| t.0);
    }
    let ended = state.terminated.as_ref().or_else(|| s.last_state.as_ref()?.terminated.as_ref());
    ended.and_then(|t| t.finished_at.as_ref()).map(|t| t.0)
}

fn of_container(
    s: &ContainerStatus,
    start_backoffs: &StartBackoffs,
    now: jiff::Timestamp,
    start: Option<jiff::Timestamp>,
) -> Option<WaitingFor> {
    let container = s.name.clone();
    let since = since_of(s).or(start);
    let hold = start_backoffs.get(&s.name);
    let until = hold.and_then(|h| later(now, h.remaining));
    let state = s.state.as_ref()?;
    let ended = state.terminated.as_ref().or_else(|| s.last_state.as_ref()?.terminated.as_ref());
    let what = if let Some(w) = &state.waiting {
        let reason = w.reason.as_deref().unwrap_or_default();
        let message = w.message.clone().unwrap_or_default();
        match StartFailure::parse(reason) {
            Some(StartFailure::CrashLoopBackOff) | None if hold.is_some() => Waiting::CrashLoop {
                container,
                exit_code: ended.map_or(0, |t| t.exit_code),
                delay: hold.map_or(Duration::ZERO, |h| h.delay),
            },
            Some(failure) => Waiting::StartFailed { container, failure, message },
            None if reason == RESTARTING_ALL => Waiting::RestartingAll,
            // Regular containers are reached after initialization, which was checked before.
            None => Waiting::ContainerCreating { container },
        }
    } else if state.running.is_some() {
        if s.started != Some(true) {
            Waiting::StartupProbe { container }
        } else if !s.ready {
            Waiting::ReadinessProbe { container }
        } else {
            return None;
        }
    } else {
        let hold = hold?;
        Waiting::CrashLoop { container, exit_code: ended.map_or(0, |t| t.exit_code), delay: hold.delay }
    };
    Some(WaitingFor { what, since, until })
}
