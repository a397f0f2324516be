//! One probe of one container: its settings, its memory and its evaluations.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use quintlet_model::ids::PodRef;
use quintlet_model::probe::{ProbeKey, ProbeMemory, ProbeResult};
use quintlet_model::text::{self, cut};
use quintlet_proto::common::v1::Trace;
use quintlet_proto::probe::v1 as wire;
use quintlet_telemetry::propagate;
use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::{Instrument as _, Span};

use crate::convert;
use crate::decide::{self, NextStep, ProbeAttempt};
use crate::handlers::{Attempt, Broken};
use crate::metrics::{Counted, Counters};
use crate::pace::{self, Pace};
use crate::shared::Shared;
use crate::stall;
use crate::subscribe;
use crate::target::{Probe, Target, View};

/// Attempts of one evaluation while their result is unknown (`pkg/kubelet/prober: maxProbeRetries`). A probe
/// with a period below one second has one: its next evaluation is near, and its rate is limited.
const MAX_ATTEMPTS: usize = 3;

/// One probe. Its state is changed and reported under one lock, so that reports keep their order.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) key: ProbeKey,
    pub(crate) pod: PodRef,
    /// Wakes the worker before the next tick.
    pub(crate) wake: Notify,
    /// Wakes the worker to compute its next tick again.
    pub(crate) period_changed: Notify,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    probe: Arc<Probe>,
    view: View,
    generation: u64,
    memory: Option<ProbeMemory>,
    output: String,
    /// Trace of the driver's request that introduced this container instance.
    trace: Option<Trace>,
    counters: Counters,
    pace: Pace,
    /// The probe was removed: evaluations are neither counted nor reported.
    ended: bool,
}

/// The input of one evaluation.
struct Begun {
    probe: Arc<Probe>,
    memory: ProbeMemory,
    pod_ip: String,
    span: Span,
}

impl Slot {
    /// Creates a probe without memory. [`Slot::update`] sets its view.
    pub(crate) fn new(key: ProbeKey, pod: PodRef, target: &Target) -> Self {
        let state = State {
            probe: Arc::clone(&target.probe),
            view: View::default(),
            generation: 0,
            memory: None,
            output: String::new(),
            trace: None,
            counters: Counters::default(),
            pace: Pace::default(),
            ended: false,
        };
        Self { key, pod, wake: Notify::new(), period_changed: Notify::new(), state: Mutex::new(state) }
    }

    /// Applies a target of the driver, and wakes the worker if an attempt has become possible.
    pub(crate) fn update(&self, shared: &Shared, target: &Target, generation: u64, trace: Option<&Trace>) {
        let mut state = self.state.lock();
        let now = shared.clock.boot();
        let before = state.next_step(now);
        if state.view.container_id != target.view.container_id {
            state.trace = trace.cloned();
            state.output.clear();
            state.pace.begin_container();
        }
        if state.probe.period != target.probe.period {
            self.period_changed.notify_one();
        }
        state.probe = Arc::clone(&target.probe);
        state.view = target.view.clone();
        state.generation = generation;
        let (own, seed) = (state.memory.as_ref(), target.seed.as_ref());
        if let Some(memory) =
            decide::select_memory(&state.probe, &state.view, own, seed, shared.service_started)
        {
            self.remember(shared, &mut state, memory);
        }
        self.settle_stopped(shared, &mut state, now);
        let after = state.next_step(now);
        let opened = match after {
            NextStep::Probe(_) => after != before,
            NextStep::After(_) => !matches!(before, NextStep::After(_)),
            NextStep::Idle(_) | NextStep::Stopped(_) => false,
        };
        if opened {
            self.wake.notify_one();
        }
    }

    pub(crate) fn next_step(&self, now: Duration) -> NextStep {
        self.state.lock().next_step(now)
    }

    pub(crate) fn period(&self) -> Duration {
        self.state.lock().probe.period
    }

    /// Returns the report of the memory, or none if there is no memory.
    pub(crate) fn report(&self) -> Option<wire::Result> {
        self.state.lock().report(&self.key)
    }

    /// Calls `put` with the report of the memory, before any later report.
    pub(crate) fn replay(&self, put: impl FnOnce(wire::Result)) {
        let state = self.state.lock();
        if let Some(report) = state.report(&self.key) {
            put(report);
        }
    }

    /// Ends the probe. An evaluation in progress does not count.
    pub(crate) fn end(&self, shared: &Shared) {
        let mut state = self.state.lock();
        state.ended = true;
        shared.metrics.remove(&self.pod, &self.key);
        shared.with_driver(|driver| driver.forget(&self.key));
        if let Some(journal) = shared.journal.get() {
            journal.remove(&self.key);
        }
    }

    /// Evaluates the probe if an attempt is possible.
    ///
    /// Cancellation safety: a dropped evaluation does not count.
    pub(crate) async fn evaluate(&self, shared: &Shared) {
        let Some(begun) = self.begin(shared) else { return };
        let started = Instant::now();
        let (mut attempt, mut stalled) = self.attempt(shared, &begun).await;
        let most = if pace::is_bounded(begun.probe.period) { 1 } else { MAX_ATTEMPTS };
        for _ in 1..most {
            let is_unknown = match attempt {
                Attempt::Success(_) | Attempt::Warning(_) => false,
                Attempt::Failure(_) => stalled,
                Attempt::Broken(_) => true,
            };
            if !is_unknown {
                break;
            }
            if stalled {
                shared.metrics.stalls.inc();
            }
            (attempt, stalled) = self.attempt(shared, &begun).await;
        }
        self.settle(shared, &begun, attempt, stalled, started.elapsed());
    }

    async fn attempt(&self, shared: &Shared, begun: &Begun) -> (Attempt, bool) {
        let id = begun.memory.container_id.to_string();
        let attempt = shared.attempts.attempt(Arc::clone(&begun.probe), id, begun.pod_ip.clone());
        stall::watch(&shared.clock, attempt).instrument(begun.span.clone()).await
    }

    fn begin(&self, shared: &Shared) -> Option<Begun> {
        let mut state = self.state.lock();
        let now = shared.clock.boot();
        self.settle_stopped(shared, &mut state, now);
        let NextStep::Probe(_) = state.next_step(now) else { return None };
        let memory = state.memory.clone()?;
        // The first evaluation belongs to the trace that started the container. One that passes again has no
        // span.
        let span = match memory.last {
            ProbeResult::Success => Span::none(),
            ProbeResult::Unknown => self.span(&memory, state.trace.as_ref()),
            ProbeResult::Failure => self.span(&memory, None),
        };
        Some(Begun { probe: Arc::clone(&state.probe), memory, pod_ip: state.view.pod_ip.clone(), span })
    }

    fn span(&self, memory: &ProbeMemory, trace: Option<&Trace>) -> Span {
        let span = tracing::info_span!(
            "probe",
            k8s.pod.uid = %self.key.uid,
            k8s.namespace.name = &*self.pod.namespace,
            k8s.pod.name = &*self.pod.name,
            k8s.container.name = %self.key.container,
            container.id = %memory.container_id,
            probe.r#type = %self.key.probe,
            probe.outcome = tracing::field::Empty,
        );
        propagate::set_parent(&span, &trace.cloned());
        span
    }

    fn settle(&self, shared: &Shared, begun: &Begun, attempt: Attempt, stalled: bool, took: Duration) {
        let mut state = self.state.lock();
        // The attempt is stale if the container was replaced or has stopped meanwhile.
        let current = state.memory.as_ref().filter(|m| m.container_id == begun.memory.container_id).cloned();
        let Some(memory) = current.filter(|_| !state.ended && state.view.running) else { return };
        let passed = matches!(attempt, Attempt::Success(_) | Attempt::Warning(_));
        if stalled && !passed {
            shared.metrics.stalls.inc();
        }
        let (result, counted, output) = match &attempt {
            Attempt::Success(output) | Attempt::Warning(output) => {
                (ProbeAttempt::Success, Some(Counted::Successful), output)
            }
            Attempt::Failure(output) if stalled => (ProbeAttempt::Unknown, Some(Counted::Unknown), output),
            Attempt::Failure(output) => (ProbeAttempt::Failure, Some(Counted::Failed), output),
            // The kubelet does not count an attempt that returned an error, either.
            Attempt::Broken(Broken { error, .. }) => (ProbeAttempt::Unknown, None, error),
        };
        let span =
            if passed || !begun.span.is_none() { begun.span.clone() } else { self.span(&memory, None) };
        span.record("probe.outcome", tracing::field::debug(result));
        if !passed {
            propagate::record_error(&span, output);
        }
        let _entered = span.enter();
        if let Some(counted) = counted {
            shared.metrics.evaluated(&mut state.counters, &self.pod, &self.key, counted, took);
        }
        output.clone_into(&mut state.output);
        let now = Instant::now();
        if let Some(next) = decide::evaluate(&begun.probe, &memory, result) {
            let next = state.pace.settled(&begun.probe, &memory, next, now);
            self.remember(shared, &mut state, next);
        }
        if let Some(unhealthy) = self.unhealthy(&memory, &attempt).filter(|_| passed || !stalled)
            && state.pace.admits_event(begun.probe.period, now)
        {
            shared.with_driver(|driver| driver.unhealthy(unhealthy, propagate::current_trace()));
        }
        shared.evaluations.push(self.evaluation(shared, &state, result, took));
    }

    fn unhealthy(&self, memory: &ProbeMemory, attempt: &Attempt) -> Option<wire::Unhealthy> {
        let probe = self.key.probe;
        let (reason, message) = match attempt {
            Attempt::Success(_) => return None,
            Attempt::Warning(output) => ("ProbeWarning", format!("{probe} probe warning: {output}")),
            Attempt::Failure(output) => ("Unhealthy", format!("{probe} probe failed: {output}")),
            Attempt::Broken(Broken { event: false, .. }) => return None,
            Attempt::Broken(Broken { state, error, event: true }) => {
                ("Unhealthy", format!("{probe} probe errored and resulted in {state} state: {error}"))
            }
        };
        Some(wire::Unhealthy {
            uid: self.key.uid.to_string(),
            container: self.key.container.clone(),
            r#type: convert::kind(probe),
            container_id: memory.container_id.to_string(),
            reason: reason.to_owned(),
            message: text::shortened(message, text::EVENT),
        })
    }

    fn evaluation(
        &self,
        shared: &Shared,
        state: &State,
        result: ProbeAttempt,
        took: Duration,
    ) -> wire::Evaluation {
        let outcome = match result {
            ProbeAttempt::Success => wire::Outcome::Success,
            ProbeAttempt::Failure => wire::Outcome::Failure,
            ProbeAttempt::Unknown => wire::Outcome::Unknown,
        };
        wire::Evaluation {
            uid: self.key.uid.to_string(),
            pod_name: self.pod.name.to_string(),
            pod_namespace: self.pod.namespace.to_string(),
            container: self.key.container.clone(),
            r#type: convert::kind(self.key.probe),
            outcome: outcome as i32,
            run: state.memory.as_ref().map_or(0, |m| m.run),
            seconds: took.as_secs_f64(),
            output: cut(&state.output, convert::MAX_REPORT_OUTPUT).to_owned(),
            at_unix_ns: i64::try_from(shared.clock.wall().as_nanosecond()).unwrap_or_default(),
        }
    }

    fn settle_stopped(&self, shared: &Shared, state: &mut State, now: Duration) {
        if let NextStep::Stopped(memory) = state.next_step(now) {
            self.remember(shared, state, memory);
        }
    }

    fn remember(&self, shared: &Shared, state: &mut State, memory: ProbeMemory) {
        let State { pace, probe, memory: old, .. } = state;
        let is_changed = decide::is_changed(old.as_ref(), &memory);
        let is_reported = pace.admits_report(probe.period, old.as_ref(), &memory, is_changed, Instant::now());
        if is_reported
            && !state.ended
            && let Some(journal) = shared.journal.get()
        {
            let now = i64::try_from(shared.clock.wall().as_nanosecond()).unwrap_or_default();
            journal.put(self.key.clone(), subscribe::state(&self.pod, &self.key, &memory, now));
        }
        state.memory = Some(memory);
        if let Some(report) = state.report(&self.key).filter(|_| is_reported) {
            shared.with_driver(|driver| driver.result(self.key.clone(), report, propagate::current_trace()));
        }
    }
}

impl State {
    fn next_step(&self, now: Duration) -> NextStep {
        decide::next_step(&self.probe, &self.view, self.memory.as_ref(), now)
    }

    fn report(&self, key: &ProbeKey) -> Option<wire::Result> {
        let memory = self.memory.as_ref().filter(|_| !self.ended)?;
        Some(convert::result(key, self.generation, memory, &self.output))
    }
}
