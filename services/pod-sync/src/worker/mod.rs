//! One worker per pod: sync, terminating, terminated.
//!
//! A worker is the only one who acts on its pod, one action at a time. Everything else only rings its bell. Each pass
//! takes the newest desired pod, the runtime's state no older than the last action, probe memory and back-off, decides
//! by the functions of [`crate::decide`], acts, and says when it wants to look again.

mod hooks;
mod messages;
mod prepare;
mod start;
mod stop;
mod sync;
pub mod targets;
mod terminate;

pub(crate) use stop::stop_all;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use quintlet_model::ids::{ContainerId, PodRef};
use quintlet_model::pod as pods;
use quintlet_model::probe::{ProbeMemory, ProbeType};
use quintlet_model::runtime::{PodRuntime, SharedPodRuntime};
use quintlet_proto::status::v1 as status_wire;
use rand::RngExt as _;
use tokio::sync::{Notify, watch};
use tracing::{Instrument as _, Span};

use crate::clients::events::EventType;
use crate::clients::pleg::ObserveError;
use crate::clients::runtime::CallError;
use crate::context::{Context, Desired};
use crate::decide::conditions::READY;
use crate::decide::probes::ProbeView;
use crate::decide::{grace, status, waiting};
use crate::source::SourceKind;
use crate::state::{PodRecord, Termination, TerminationCause};
use crate::view::{Decision, View, Waiting};
use crate::volumes::MountedVolumes;

/// After a call that was cut: look again soon, then less often. What it waits for rings the bell when it is back.
const CUT_FIRST: Duration = Duration::from_millis(100);
const CUT_LAST: Duration = Duration::from_secs(1);
/// After an error of this pod (pkg/kubelet/pod_workers.go), with jitter up to half of it.
const ERROR_WAIT: Duration = Duration::from_secs(10);

/// What comes after a pass.
#[derive(Debug)]
pub(crate) enum Next {
    /// Another pass at once.
    Again,
    /// Look again after so long, or when the bell rings.
    Wait(Duration),
    /// Nothing is left of the pod.
    Done,
}

/// Why a pass ended early.
#[derive(Debug)]
pub(crate) enum Halt {
    /// A call was cut or could not be made; nothing is known. No event, no back-off.
    Cut(String),
    /// Something about this pod failed; tried again later.
    Failed {
        /// Text, for `explain`.
        error: String,
        /// When to look again; none for the default.
        after: Option<Duration>,
    },
}

impl Halt {
    fn failed(error: impl std::fmt::Display) -> Self {
        Self::Failed { error: error.to_string(), after: None }
    }

    fn after(self, wait: Duration) -> Self {
        match self {
            Self::Failed { error, .. } => Self::Failed { error, after: Some(wait) },
            cut @ Self::Cut(_) => cut,
        }
    }

    /// A verdict of the runtime is an error of the pod, anything else says nothing.
    fn of(error: &CallError, what: &str) -> Self {
        if error.is_verdict() {
            Self::failed(format!("{what}: {error}"))
        } else {
            Self::Cut(format!("{} {}: {error}", error.method, error.outcome))
        }
    }
}

/// What was last handed to status-reporter.
#[derive(Debug, PartialEq)]
struct Reported {
    status: PodStatus,
    finished: bool,
    api_uid: String,
    deleting: bool,
}

/// Labels and annotations: what volumes show of a pod's metadata.
type Shown = (Option<BTreeMap<String, String>>, Option<BTreeMap<String, String>>);

/// What one pass works with.
pub(crate) struct Pass {
    pod: Arc<Pod>,
    runtime: SharedPodRuntime,
    probes: ProbeView,
    status: PodStatus,
}

/// A worker and all it knows.
pub struct Worker {
    ctx: Arc<Context>,
    pod_ref: PodRef,
    desired: watch::Receiver<Desired>,
    bell: Arc<Notify>,
    pod: Arc<Pod>,
    record: PodRecord,
    saved: PodRecord,
    version: u64,
    reported: Option<Reported>,
    // End of the last action: nothing older is decided on.
    acted: Duration,
    // A full look comes first.
    full: bool,
    epoch: u64,
    seen: Option<SharedPodRuntime>,
    // Made since the last look: a look that does not know of them is no look after the action.
    made: Vec<String>,
    messages: HashMap<ContainerId, String>,
    seeded: bool,
    mounted: Option<MountedVolumes>,
    refreshed: Option<Duration>,
    refreshed_for: Option<Shown>,
    // Starts that failed for another reason than a back-off of their own, and when each is tried again (boottime).
    holds: BTreeMap<String, Duration>,
    // The same of sandbox, cgroup and volumes.
    hold_all: Duration,
    cut: Duration,
    decision: Decision,
    waiting: Option<Waiting>,
    accepted_unix_ns: i64,
    // From what began it until the pod is Ready or over: one trace.
    operation: Option<Span>,
}

impl Worker {
    /// A worker for `desired`, going on from `record` where an earlier pod-sync left one.
    #[must_use]
    pub fn new(
        ctx: Arc<Context>,
        pod_ref: PodRef,
        desired: watch::Receiver<Desired>,
        record: Option<PodRecord>,
    ) -> Self {
        let bell = ctx.wakes.register(&pod_ref.uid);
        let pod = Arc::clone(&desired.borrow().pod);
        let known = record.is_some();
        let mut record = record.unwrap_or_default();
        if !known {
            record.accepted = ctx.clock.boot();
        } else {
            let memory = record.probes.iter().map(|(c, t, m)| ((c.clone(), *t), m.clone())).collect();
            ctx.probes.restore(&pod_ref.uid, memory);
        }
        let age = ctx.clock.boot().saturating_sub(record.accepted);
        let accepted = ctx.clock.wall().checked_sub(age).unwrap_or_else(|_| ctx.clock.wall());
        let operation = (!known).then(|| operation("create", &pod_ref));
        Self {
            operation,
            accepted_unix_ns: unix_ns(accepted),
            pod_ref,
            desired,
            bell,
            pod,
            saved: record.clone(),
            record,
            version: 0,
            reported: None,
            acted: Duration::ZERO,
            full: true,
            epoch: 0,
            seen: None,
            made: Vec::new(),
            messages: HashMap::new(),
            seeded: false,
            mounted: None,
            refreshed: None,
            refreshed_for: None,
            holds: BTreeMap::new(),
            hold_all: Duration::ZERO,
            cut: CUT_FIRST,
            decision: Decision::default(),
            waiting: None,
            ctx,
        }
    }

    /// Works until nothing is left of the pod.
    pub async fn run(mut self) {
        loop {
            let span = self.operation.as_ref().map_or_else(Span::none, |operation| {
                tracing::info_span!(parent: operation, "pass", pod.uid = %self.pod_ref.uid, worker = self.phase())
            });
            let next = self.pass().instrument(span).await;
            if self.is_settled() {
                self.operation = None;
            }
            self.save();
            let wait = match next {
                Ok(Next::Again) => {
                    self.cut = CUT_FIRST;
                    self.show(true);
                    // Passes that follow each other at once must not keep other tasks from running.
                    tokio::task::yield_now().await;
                    continue;
                }
                Ok(Next::Done) => break,
                Ok(Next::Wait(wait)) => {
                    self.cut = CUT_FIRST;
                    wait
                }
                Err(Halt::Cut(why)) => {
                    tracing::debug!(pod.uid = %self.pod_ref.uid, why, "pass was cut");
                    self.full = true;
                    self.decision.errors = vec![why];
                    let wait = self.cut;
                    self.cut = (self.cut * 2).min(CUT_LAST);
                    wait
                }
                Err(Halt::Failed { error, after }) => {
                    tracing::info!(pod.uid = %self.pod_ref.uid, error, "pass failed");
                    self.cut = CUT_FIRST;
                    self.decision.errors = vec![error];
                    after.unwrap_or_else(|| jitter(ERROR_WAIT))
                }
            };
            self.show(false);
            // Any of these only says "look": what it is about is read anew.
            tokio::select! {
                () = self.bell.notified() => {}
                changed = self.desired.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(wait) => {}
            }
        }
        self.ctx.statuses.forget(&self.pod_ref.uid);
        self.ctx.probes.remove(&self.pod_ref.uid);
        self.ctx.views.hide(&self.pod_ref.uid);
        self.ctx.state.remove(&self.pod_ref.uid);
    }

    // What began has come to its end: Ready, or over.
    fn is_settled(&self) -> bool {
        let ready =
            |s: &PodStatus| s.conditions.iter().flatten().any(|c| c.type_ == READY && c.status == "True");
        match &self.record.termination {
            None => self.record.status.as_ref().is_some_and(ready),
            Some(t) => t.finished,
        }
    }

    pub(super) fn begin_operation(&mut self, name: &'static str) {
        if self.operation.is_none() {
            self.operation = Some(operation(name, &self.pod_ref));
        }
    }

    fn phase(&self) -> &'static str {
        match &self.record.termination {
            None => "sync",
            Some(t) if t.finished => "finished",
            Some(t) if t.stopped => "terminated",
            Some(_) => "terminating",
        }
    }

    async fn pass(&mut self) -> Result<Next, Halt> {
        let desired = self.desired.borrow_and_update().clone();
        self.accept(&desired);
        self.waiting = None;
        self.decision.errors.clear();
        if let Some(rejection) = &desired.rejected
            && self.record.termination.is_none()
        {
            return self.reject(rejection);
        }
        match self.phase() {
            "sync" => {
                // Two static pods of one name never run at once: the older one goes first.
                if pods::is_static(&self.pod)
                    && !self.ctx.names.take(&self.pod_ref.full_name(), &self.pod_ref.uid)
                {
                    let other = self
                        .ctx
                        .names
                        .holder(&self.pod_ref.full_name())
                        .map(|u| u.to_string())
                        .unwrap_or_default();
                    self.wait_for(&waiting::Waiting::StaticName { other }, None);
                    return Ok(Next::Wait(self.ctx.sync_frequency));
                }
                self.sync(&desired).await
            }
            "terminating" => self.terminating().await,
            "terminated" => self.terminated().await,
            _ => self.finished(&desired).await,
        }
    }

    // Takes over what the source says, and begins a termination where it asks for one.
    fn accept(&mut self, desired: &Desired) {
        if self.pod.spec != desired.pod.spec {
            self.holds.clear();
            self.hold_all = Duration::ZERO;
        }
        self.pod = Arc::clone(&desired.pod);
        if self.record.pod.as_ref() != Some(&*self.pod) {
            self.record.pod = Some((*self.pod).clone());
        }
        let meta = &self.pod.metadata;
        let api_phase = self.pod.status.as_ref().and_then(|s| s.phase.as_deref());
        let cause = if meta.deletion_timestamp.is_some() {
            Some(TerminationCause::Deleted)
        } else if desired.removed {
            Some(TerminationCause::Removed)
        } else if pods::is_terminal_phase(api_phase) && !pods::is_static(&self.pod) {
            Some(TerminationCause::Completed)
        } else {
            None
        };
        if let Some(cause) = cause {
            self.begin_termination(cause);
        }
    }

    pub(crate) fn begin_termination(&mut self, cause: TerminationCause) {
        let boot = self.ctx.clock.boot();
        let stored = self.record.termination.as_ref().map_or(0, |t| t.grace_seconds);
        let effective = grace::effective(stored, &self.pod, None);
        let seconds = u64::try_from(effective.seconds).unwrap_or(1);
        match self.record.termination.as_mut() {
            None => {
                self.operation = Some(operation("terminate", &self.pod_ref));
                self.record.termination = Some(Termination {
                    cause,
                    grace_seconds: effective.seconds,
                    deadline: boot + Duration::from_secs(seconds),
                    since: boot,
                    hooks: BTreeMap::new(),
                    stopped: false,
                    finished: false,
                });
            }
            Some(t) => {
                // It can only become sooner.
                if effective.shortened {
                    t.grace_seconds = effective.seconds;
                    t.deadline = t.deadline.min(boot + Duration::from_secs(seconds));
                }
                if cause == TerminationCause::Deleted || t.cause == TerminationCause::Completed {
                    t.cause = cause;
                }
            }
        }
        self.save();
    }

    fn reject(&mut self, rejection: &crate::decide::admission::Rejection) -> Result<Next, Halt> {
        self.ctx.events.pod(&self.pod, EventType::Warning, &rejection.reason, &rejection.message, "");
        let status =
            status::rejected(&self.pod, &rejection.reason, &rejection.message, self.ctx.clock.wall());
        self.begin_termination(TerminationCause::Completed);
        if let Some(t) = self.record.termination.as_mut() {
            t.stopped = true;
            t.finished = true;
        }
        self.report(status, true);
        Ok(Next::Again)
    }

    // The runtime's state, never older than the last action.
    pub(crate) async fn observe(&mut self) -> Result<SharedPodRuntime, Halt> {
        let uid = &self.pod_ref.uid;
        let cached = self.ctx.pleg.get(uid);
        let fresh = cached
            .as_ref()
            .is_some_and(|c| c.observed > self.acted && c.cursor.epoch == self.epoch && c.error.is_none())
            && (self.made.is_empty()
                || cached.as_ref().is_some_and(|c| {
                    let ids = c.ids();
                    self.made.iter().all(|made| ids.contains(made))
                }));
        let runtime = match cached {
            Some(cached) if fresh && !self.full => cached,
            cached => {
                let mut ids = cached.as_ref().or(self.seen.as_ref()).map(|p| p.ids()).unwrap_or_default();
                ids.extend(self.made.iter().cloned());
                let full =
                    self.full || cached.is_none() || cached.is_some_and(|c| c.cursor.epoch != self.epoch);
                match self.ctx.pleg.observe(uid, ids, full).await {
                    Ok(Some(runtime)) => runtime,
                    Ok(None) => Arc::new(PodRuntime::empty(
                        self.pod_ref.clone(),
                        self.seen.as_ref().map(|s| s.cursor).unwrap_or_default(),
                        self.ctx.clock.boot(),
                    )),
                    Err(ObserveError::Unavailable(why)) => {
                        return Err(Halt::Cut(format!("runtime state cannot be read: {why}")));
                    }
                    Err(ObserveError::Runtime(why)) => {
                        let message = format!("error determining status: {why}");
                        self.ctx.events.pod(&self.pod, EventType::Warning, "FailedSync", &message, "");
                        return Err(Halt::failed(message));
                    }
                }
            }
        };
        self.full = false;
        self.made.clear();
        self.epoch = runtime.cursor.epoch;
        self.seen = Some(Arc::clone(&runtime));
        for container in &runtime.containers {
            if container.state == quintlet_model::runtime::ContainerState::Exited
                && !self.messages.contains_key(&container.id)
            {
                self.messages.insert(container.id.clone(), messages::of(container));
            }
        }
        self.messages.retain(|id, _| runtime.containers.iter().any(|c| c.id == *id));
        Ok(runtime)
    }

    // Snapshot, status, report, probe target: how every pass begins.
    pub(crate) async fn look(&mut self, is_terminal: bool) -> Result<Pass, Halt> {
        let runtime = self.observe().await?;
        if !self.seeded {
            self.seeded = true;
            let api = self.record.status.as_ref().or(self.pod.status.as_ref());
            for (container, probe, memory) in
                api.map(|s| targets::seeds(&self.pod, s, &runtime)).unwrap_or_default()
            {
                let known = self.ctx.probes.memory(&self.pod_ref.uid);
                if known
                    .get(&(container.clone(), probe))
                    .is_none_or(|m| m.container_id != memory.container_id)
                {
                    self.ctx.probes.seed(&self.pod_ref.uid, &container, probe, memory);
                }
            }
        }
        let memory = self.ctx.probes.memory(&self.pod_ref.uid);
        let mut probes = ProbeView::default();
        for ((_, probe), m) in &memory {
            probes.add(*probe, m);
        }
        let probes_kept: Vec<_> = memory.into_iter().map(|((c, t), m)| (c, t, m)).collect();
        if !same_but_for_counters(&self.record.probes, &probes_kept) {
            self.record.probes = probes_kept;
        }
        let status = self.make_status(&runtime, &probes, is_terminal);
        Ok(Pass { pod: Arc::clone(&self.pod), runtime, probes, status })
    }

    pub(crate) fn make_status(
        &self,
        runtime: &PodRuntime,
        probes: &ProbeView,
        is_terminal: bool,
    ) -> PodStatus {
        let handler = runtime.sandboxes.first().map(|s| s.runtime_handler.as_str()).unwrap_or_default();
        let facts = self.ctx.facts(handler);
        status::generate(&status::StatusInput {
            pod: &self.pod,
            old: self.record.status.as_ref(),
            runtime,
            probes,
            waiting: &self.record.waiting,
            termination_messages: &self.messages,
            resize: &[],
            node: &facts,
            is_terminal,
            now: self.ctx.clock.wall(),
        })
    }

    // Hands a status over where it says something new; the record of it comes first.
    pub(crate) fn report(&mut self, status: PodStatus, finished: bool) {
        let said = {
            let desired = self.desired.borrow();
            let object = desired.mirror.as_ref().unwrap_or(&self.pod);
            Reported {
                status: status.clone(),
                finished,
                api_uid: object.metadata.uid.clone().unwrap_or_default(),
                deleting: object.metadata.deletion_timestamp.is_some(),
            }
        };
        if self.reported.as_ref() == Some(&said) {
            return;
        }
        self.record.status = Some(status.clone());
        self.save();
        self.version += 1;
        let desired = self.desired.borrow();
        let object = desired.mirror.as_ref().unwrap_or(&self.pod);
        let is_static = pods::is_static(&self.pod);
        if self.ctx.has_api && (!is_static || desired.mirror.is_some()) {
            let json = |s: Option<&PodStatus>| s.and_then(|s| serde_json::to_vec(s).ok()).unwrap_or_default();
            let update = status_wire::PodStatusUpdate {
                uid: self.pod_ref.uid.to_string(),
                api_uid: object.metadata.uid.clone().unwrap_or_default(),
                name: self.pod_ref.name.to_string(),
                namespace: self.pod_ref.namespace.to_string(),
                owner_epoch: self.ctx.epoch,
                version: self.version,
                base_status: json(object.status.as_ref()),
                base_resource_version: object.metadata.resource_version.clone().unwrap_or_default(),
                desired_status: json(Some(&status)),
                could_run: self.record.termination.as_ref().is_none_or(|t| !t.stopped),
                finished,
                deleting: object.metadata.deletion_timestamp.is_some(),
                mirror: is_static,
            };
            self.ctx.statuses.report(&self.pod_ref.uid, update);
        }
        drop(desired);
        self.reported = Some(said);
    }

    // What probe-service is to do for this pod now.
    pub(crate) fn set_targets(&self, pass: &Pass, terminating: bool) {
        let input = targets::TargetInput {
            pod: &pass.pod,
            status: &pass.status,
            runtime: &pass.runtime,
            terminating,
            key: &self.ctx.grant_key,
            now: self.ctx.clock.wall(),
            boot: self.ctx.clock.boot(),
        };
        if let Some(target) = targets::target(&input) {
            self.ctx.probes.set_target(&self.pod_ref.uid, target);
        }
    }

    pub(crate) fn acted(&mut self) {
        self.acted = self.ctx.clock.boot();
    }

    pub(crate) fn save(&mut self) {
        if self.record == self.saved {
            return;
        }
        match self.ctx.state.save(&self.pod_ref.uid, &self.record) {
            Ok(()) => self.saved = self.record.clone(),
            Err(e) => {
                tracing::error!(pod.uid = %self.pod_ref.uid, error = quintlet_kit::error_chain(&e), "state not saved")
            }
        }
    }

    // `until` is boottime.
    pub(crate) fn wait_for(&mut self, what: &waiting::Waiting, until: Option<Duration>) {
        let now = self.ctx.clock.wall();
        let left = until.map(|t| t.saturating_sub(self.ctx.clock.boot()));
        let until = left.and_then(|d| now.checked_add(d).ok());
        self.wait_shown(&waiting::WaitingFor { what: what.clone(), since: Some(now), until });
    }

    // What it waited for before is what it still waits for.
    pub(crate) fn keep_waiting(&mut self) {
        self.waiting = self.ctx.views.get(&self.pod_ref.uid).and_then(|v| v.waiting.clone());
    }

    pub(crate) fn wait_shown(&mut self, wait: &waiting::WaitingFor) {
        self.waiting = Some(Waiting {
            reason: wait.what.reason().to_owned(),
            message: wait.what.message(),
            container: wait.what.container().unwrap_or_default().to_owned(),
            since_unix_ns: wait.since.map_or_else(|| unix_ns(self.ctx.clock.wall()), unix_ns),
            until_unix_ns: wait.until.map_or(0, unix_ns),
        });
    }

    pub(super) fn show(&mut self, between: bool) {
        let mut pod = (*self.pod).clone();
        if let Some(status) = &self.record.status {
            pod.status = Some(status.clone());
        }
        let old = self.ctx.views.get(&self.pod_ref.uid);
        // The same wait goes on: it began when it was first seen.
        if let (Some(new), Some(old)) = (self.waiting.as_mut(), old.as_ref().and_then(|v| v.waiting.as_ref()))
            && new.reason == old.reason
            && new.container == old.container
        {
            new.since_unix_ns = old.since_unix_ns;
        }
        // Between two passes that follow each other at once the wait of the first is still what is known.
        let waiting = match (&self.waiting, between) {
            (None, true) => old.as_ref().and_then(|v| v.waiting.clone()),
            (waiting, _) => waiting.clone(),
        };
        let view = View {
            pod_ref: self.pod_ref.clone(),
            source: self.source(),
            pod: Arc::new(pod),
            worker: self.phase(),
            is_removed: self.desired.borrow().removed,
            waiting,
            decision: self.decision.clone(),
            created_unix_ns: self.accepted_unix_ns,
            version: 0,
        };
        let same = old.is_some_and(|o| {
            o.pod == view.pod
                && o.worker == view.worker
                && same_wait(o.waiting.as_ref(), view.waiting.as_ref())
                && o.decision == view.decision
        });
        if !same {
            self.ctx.views.show(&self.pod_ref.uid, view);
        }
    }

    fn source(&self) -> SourceKind {
        self.desired.borrow().source
    }

    // Takes note of what a decision saw and said.
    pub(crate) fn decided(&mut self, lines: Vec<String>, runtime: &PodRuntime) {
        let same = self.decision.lines == lines;
        if same && self.decision.saw == runtime.cursor {
            return;
        }
        let now = self.ctx.clock.boot();
        self.decision.lines = lines;
        self.decision.at_unix_ns = unix_ns(self.ctx.clock.wall());
        self.decision.saw = runtime.cursor;
        self.decision.age_ms = now.saturating_sub(runtime.observed).as_secs_f64() * 1000.0;
        self.decision.trace_id = quintlet_telemetry::propagate::current_trace_id().unwrap_or_default();
    }
}

// Two waits that a reader cannot tell apart: the end of one is made anew from two clocks each time.
fn same_wait(a: Option<&Waiting>, b: Option<&Waiting>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => {
            a.reason == b.reason
                && a.message == b.message
                && a.container == b.container
                && (a.until_unix_ns - b.until_unix_ns).abs() < 100_000_000
        }
        (None, None) => true,
        (Some(_), None) | (None, Some(_)) => false,
    }
}

fn operation(name: &'static str, pod: &PodRef) -> Span {
    let title = format!("{name} {}/{}", pod.namespace, pod.name);
    tracing::info_span!(parent: None, "operation", otel.name = title, pod.uid = %pod.uid, pod.name = %pod.name)
}

type Memories = [(String, ProbeType, ProbeMemory)];

// Counters grow with every evaluation; only what a restart must not lose is worth a write.
fn same_but_for_counters(a: &Memories, b: &Memories) -> bool {
    a.len() == b.len()
        && a.iter().zip(b).all(|((ac, at, am), (bc, bt, bm))| {
            (ac, at) == (bc, bt) && *am == ProbeMemory { counter: am.counter, ..bm.clone() }
        })
}

pub(crate) fn unix_ns(t: jiff::Timestamp) -> i64 {
    i64::try_from(t.as_nanosecond()).unwrap_or(i64::MAX)
}

/// `d` and up to half of it more, so that pods that failed together do not come back together.
pub(crate) fn jitter(d: Duration) -> Duration {
    d + d.mul_f64(rand::rng().random_range(0.0..0.5))
}
