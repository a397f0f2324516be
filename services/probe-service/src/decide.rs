//! What a probe does next and what an attempt means: plain functions of what is known.
//!
//! The steps are those of the kubelet's `pkg/kubelet/prober/worker.go:doProbe`. Two differences: a run of equal
//! results starts anew with a new container instance, and a pod without an address is not probed over the network.

use std::time::Duration;

use quintlet_model::ids::ContainerId;
use quintlet_model::probe::{ProbeMemory, ProbeResult, ProbeType};

use crate::target::{Probe, View};

/// A container that had started this long before the service did is no new one: it gets no initial value
/// (the kubelet's grace constant).
pub const RESTART_GRACE: Duration = Duration::from_secs(10);

/// What to do now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gate {
    /// Nothing; a change of the view or the next tick asks again.
    Idle(Why),
    /// Nothing before this much time has passed: the initial delay.
    After(Duration),
    /// The container stopped: its result is this memory.
    Stopped(ProbeMemory),
    /// Probe this instance.
    Probe(ContainerId),
}

/// Why a probe is idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// There is no container instance, or it has not started.
    NoContainer,
    /// It rests until the next container instance.
    OnHold,
    /// The container stopped and this is known.
    Stopped,
    /// The startup probe has passed.
    StartupPassed,
    /// The startup probe has not passed.
    NotStarted,
    /// The pod has no address.
    NoAddress,
}

/// What one attempt says of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Raw {
    /// It passed.
    Success,
    /// It failed.
    Failure,
    /// It says nothing: the attempt broke, or the prober was stalled.
    Unknown,
}

/// Which memory to go on with: of two about the instance in `view`, the one with the higher counter. With none the
/// instance is new to us and gets its initial value.
///
/// None where there is no instance. `born` is the CLOCK_BOOTTIME of the start of this service.
#[must_use]
pub fn adopt(
    probe: &Probe,
    view: &View,
    own: Option<&ProbeMemory>,
    seed: Option<&ProbeMemory>,
    born: Duration,
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
            result: if known_before(view, born) { None } else { Some(initial(probe.kind)) },
            last: ProbeResult::Unknown,
            run: 0,
            on_hold: false,
        }),
    }
}

/// Whether the container was there before this service was: then "not ready" would be an invention.
fn known_before(view: &View, born: Duration) -> bool {
    view.running
        && (view.started || view.started_at.is_some_and(|at| at.saturating_add(RESTART_GRACE) < born))
}

fn initial(kind: ProbeType) -> ProbeResult {
    match kind {
        ProbeType::Startup => ProbeResult::Unknown,
        ProbeType::Readiness => ProbeResult::Failure,
        ProbeType::Liveness => ProbeResult::Success,
    }
}

/// What to do now, at `now` on CLOCK_BOOTTIME. `memory` is what [`adopt`] gave for this view.
#[must_use]
pub fn gate(probe: &Probe, view: &View, memory: Option<&ProbeMemory>, now: Duration) -> Gate {
    let (Some(id), Some(memory)) = (&view.container_id, memory) else {
        return Gate::Idle(Why::NoContainer);
    };
    if memory.on_hold {
        return Gate::Idle(Why::OnHold);
    }
    let Some(started_at) = view.started_at else {
        // Created and not started yet: it cannot have failed.
        return Gate::Idle(Why::NoContainer);
    };
    if !view.running {
        if memory.result == Some(ProbeResult::Failure) {
            return Gate::Idle(Why::Stopped);
        }
        let counter = memory.counter.saturating_add(1);
        return Gate::Stopped(ProbeMemory { result: Some(ProbeResult::Failure), counter, ..memory.clone() });
    }
    match (probe.kind, view.started) {
        (ProbeType::Startup, true) => return Gate::Idle(Why::StartupPassed),
        (ProbeType::Readiness | ProbeType::Liveness, false) => return Gate::Idle(Why::NotStarted),
        (ProbeType::Startup, false) | (ProbeType::Readiness | ProbeType::Liveness, true) => {}
    }
    if probe.handler.host(&view.pod_ip) == Some("") {
        return Gate::Idle(Why::NoAddress);
    }
    let age = now.saturating_sub(started_at);
    if age < probe.initial_delay {
        return Gate::After(probe.initial_delay.saturating_sub(age));
    }
    Gate::Probe(id.clone())
}

/// What is remembered after an attempt on the instance `memory` is about. None: the attempt says nothing.
#[must_use]
pub fn evaluate(probe: &Probe, memory: &ProbeMemory, raw: Raw) -> Option<ProbeMemory> {
    let (last, threshold) = match raw {
        Raw::Success => (ProbeResult::Success, probe.success_threshold),
        Raw::Failure => (ProbeResult::Failure, probe.failure_threshold),
        Raw::Unknown => return None,
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

/// Whether a driver has to hear of `new` after `old`: anything but the counter changed.
#[must_use]
pub fn is_news(old: Option<&ProbeMemory>, new: &ProbeMemory) -> bool {
    old.is_none_or(|old| ProbeMemory { counter: new.counter, ..old.clone() } != *new)
}

/// How long to wait before the first evaluation: a part of one period (`unit`, 0 to 1) for a container that was
/// there before the service, when the service is younger than the period and nothing was handed over to it. This
/// spreads the probes of a whole node; a probe that goes on where another stopped must not wait.
#[must_use]
pub fn jitter(
    probe: &Probe,
    view: &View,
    handed_over: bool,
    born: Duration,
    now: Duration,
    unit: f64,
) -> Duration {
    let young = now.saturating_sub(born) < probe.period;
    if handed_over || !young || !known_before(view, born) {
        return Duration::ZERO;
    }
    probe.period.mul_f64(unit.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests;
