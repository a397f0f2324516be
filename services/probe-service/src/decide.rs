//! Computes the next step of a probe and the meaning of an attempt. No I/O; the time is an argument.
//!
//! The steps are those of `pkg/kubelet/prober: worker.doProbe`, with two differences. A run of equal results
//! starts at zero with a new container instance. A pod without an address is not probed over the network.

use std::time::Duration;

use quintlet_model::ids::ContainerId;
use quintlet_model::probe::{ProbeMemory, ProbeResult, ProbeType};

use crate::target::{Probe, View};

/// A container that started this long before the service did is not new and gets no initial result
/// (`pkg/kubelet/prober: probeRestartGracePeriod`).
pub(crate) const RESTART_GRACE: Duration = Duration::from_secs(10);

/// The next step of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NextStep {
    /// No attempt until the view of the container changes or the next period begins.
    Idle(IdleReason),
    /// No attempt for this long: the rest of the initial delay.
    After(Duration),
    /// The container stopped. This memory, with a failed result, replaces the current one.
    Stopped(ProbeMemory),
    /// An attempt on this container instance.
    Probe(ContainerId),
}

/// Reason why a probe does not run, although its target exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IdleReason {
    /// The container has no instance, or its instance has not started.
    NoContainer,
    /// The result is final for this container instance (`pkg/kubelet/prober: worker.onHold`).
    OnHold,
    /// The container stopped, and its memory says so.
    Stopped,
    /// A startup probe that has succeeded does not run again for its instance.
    StartupPassed,
    /// The startup probe has not passed yet.
    NotStarted,
    /// The pod has no address.
    NoAddress,
}

/// The result of one attempt, before thresholds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProbeAttempt {
    /// The handler succeeded.
    Success,
    /// The handler ran and failed.
    Failure,
    /// The attempt could not be made, or the prober stalled during it.
    Unknown,
}

/// Returns the memory to continue with for the container instance in `view`: of `own` and `seed` the one with
/// the higher counter, or an initial memory if neither is about this instance. Returns none if there is no
/// instance.
///
/// `service_started` is the CLOCK_BOOTTIME of the start of this service.
#[must_use]
pub(crate) fn select_memory(
    probe: &Probe,
    view: &View,
    own: Option<&ProbeMemory>,
    seed: Option<&ProbeMemory>,
    service_started: Duration,
) -> Option<ProbeMemory> {
    let id = view.container_id.as_ref()?;
    let own = own.filter(|m| m.container_id == *id);
    let seed = seed.filter(|m| m.container_id == *id);
    match (own, seed) {
        (Some(own), Some(seed)) if seed.counter > own.counter => Some(seed.clone()),
        (Some(own), _) => Some(own.clone()),
        (None, Some(seed)) => Some(seed.clone()),
        (None, None) => Some(ProbeMemory {
            container_id: id.clone(),
            counter: 0,
            result: if known_before(view, service_started) { None } else { Some(initial(probe.kind)) },
            last: ProbeResult::Unknown,
            run: 0,
            on_hold: false,
        }),
    }
}

/// Reports whether the container ran before this service did. An initial "not ready" would then be wrong.
fn known_before(view: &View, service_started: Duration) -> bool {
    view.running
        && (view.started
            || view.started_at.is_some_and(|at| at.saturating_add(RESTART_GRACE) < service_started))
}

fn initial(kind: ProbeType) -> ProbeResult {
    match kind {
        ProbeType::Startup => ProbeResult::Unknown,
        ProbeType::Readiness => ProbeResult::Failure,
        ProbeType::Liveness => ProbeResult::Success,
    }
}

/// Returns the next step at `now` on CLOCK_BOOTTIME. `memory` is that of [`select_memory`] for this view.
#[must_use]
pub(crate) fn next_step(probe: &Probe, view: &View, memory: Option<&ProbeMemory>, now: Duration) -> NextStep {
    let (Some(id), Some(memory)) = (&view.container_id, memory) else {
        return NextStep::Idle(IdleReason::NoContainer);
    };
    if memory.on_hold {
        return NextStep::Idle(IdleReason::OnHold);
    }
    let Some(started_at) = view.started_at else {
        // A container that has not started cannot have failed.
        return NextStep::Idle(IdleReason::NoContainer);
    };
    if !view.running {
        if memory.result == Some(ProbeResult::Failure) {
            return NextStep::Idle(IdleReason::Stopped);
        }
        let counter = memory.counter.saturating_add(1);
        return NextStep::Stopped(ProbeMemory {
            result: Some(ProbeResult::Failure),
            counter,
            ..memory.clone()
        });
    }
    match (probe.kind, view.started) {
        (ProbeType::Startup, true) => return NextStep::Idle(IdleReason::StartupPassed),
        (ProbeType::Readiness | ProbeType::Liveness, false) => return NextStep::Idle(IdleReason::NotStarted),
        (ProbeType::Startup, false) | (ProbeType::Readiness | ProbeType::Liveness, true) => {}
    }
    if probe.handler.host(&view.pod_ip) == Some("") {
        return NextStep::Idle(IdleReason::NoAddress);
    }
    let age = now.saturating_sub(started_at);
    if age < probe.initial_delay {
        return NextStep::After(probe.initial_delay.saturating_sub(age));
    }
    NextStep::Probe(id.clone())
}

/// Returns the memory after an attempt on the container instance of `memory`, or none if the attempt is
/// unknown.
#[must_use]
pub(crate) fn evaluate(probe: &Probe, memory: &ProbeMemory, attempt: ProbeAttempt) -> Option<ProbeMemory> {
    let (last, threshold) = match attempt {
        ProbeAttempt::Success => (ProbeResult::Success, probe.success_threshold),
        ProbeAttempt::Failure => (ProbeResult::Failure, probe.failure_threshold),
        ProbeAttempt::Unknown => return None,
    };
    let run = if memory.last == last { memory.run.saturating_add(1).min(threshold) } else { 1 };
    let mut next = ProbeMemory { counter: memory.counter.saturating_add(1), last, run, ..memory.clone() };
    if run < threshold {
        return Some(next);
    }
    next.result = Some(last);
    let restarts = match probe.kind {
        ProbeType::Startup => true,
        ProbeType::Liveness => last == ProbeResult::Failure,
        ProbeType::Readiness => false,
    };
    if restarts {
        next.on_hold = true;
        next.run = 0;
    }
    Some(next)
}

/// Reports whether anything but the counter changed, so that the driver needs a report.
#[must_use]
pub(crate) fn is_changed(old: Option<&ProbeMemory>, new: &ProbeMemory) -> bool {
    old.is_none_or(|old| ProbeMemory { counter: new.counter, ..old.clone() } != *new)
}

/// Returns the wait before the first evaluation: the fraction `unit` (0 to 1) of the period, or zero.
///
/// The wait spreads the probes of a node after a start of the service. It applies to a container that ran
/// before the service, within one period of the start, and only without a memory of another instance: a probe
/// that is handed over must not pause.
#[must_use]
pub(crate) fn jitter(
    probe: &Probe,
    view: &View,
    handed_over: bool,
    service_started: Duration,
    now: Duration,
    unit: f64,
) -> Duration {
    let young = now.saturating_sub(service_started) < probe.period;
    if handed_over || !young || !known_before(view, service_started) {
        return Duration::ZERO;
    }
    probe.period.mul_f64(unit.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests;
