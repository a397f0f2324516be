//! One worker per pod: sync, terminating, terminated.
//!
//! A worker is the only one who acts on its pod, one action at a time. Everything else only rings its bell. Each pass
//! takes the newest desired pod, the runtime's state no older than the last action, probe memory and back-off, decides
//! by the functions of [`pod_sync_decisions`], acts, and says when it wants to look again.

mod cancellable;
mod halt;
mod hook_http;
mod hooks;

mod prepare;
mod probe_targets;
mod publish_view;
mod resize;
mod runtime_files;
mod start;
mod stop;
mod sync;
mod terminate;
mod termination_message;

pub(crate) use halt::{Halt, Next, Step};
pub(crate) use stop::stop_all;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1 as cri;
use k8s_openapi::api::core::v1::{Pod, PodStatus, Secret};
use pod_sync_clients::{EventNumber, EventType, ObserveError, Observed, StatusAck};
use quintlet_kit::backoff::Backoff;
use quintlet_kit::failpoint;
use quintlet_kit::task::blocking;
use quintlet_model::ids::{ContainerId, PodRef};
use quintlet_model::pod as pods;
use quintlet_model::probe::{ProbeMemory, ProbeType};
use quintlet_model::runtime::{ContainerState, Cursor, Known, PodRuntime, SharedPodRuntime};
use quintlet_proto::status::v1 as status_wire;
use rand::RngExt as _;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, Span};

use crate::context::{Desired, INTERNAL_ERROR, WorkerContext};
use crate::image;
use crate::mirror::MirrorReconciler;
use crate::pod_workers::NextWork;
use pod_sync_containment::PodWork;
use pod_sync_cri_config::mounts::MountedVolumes;
use pod_sync_decisions::active::PodStart;
use pod_sync_decisions::conditions::READY;
use pod_sync_decisions::containment::Suspension;
use pod_sync_decisions::probes::{ProbeResults, record_starts};
use pod_sync_decisions::reconcile::{self, CorrectionDue, StatusCorrections};
use pod_sync_decisions::unknown_calls::UnknownCalls;
use pod_sync_decisions::worker::freshness::{Freshness, NextObservation};
use pod_sync_decisions::worker::{self, Input, Outcome, Work};
use pod_sync_decisions::{status, waiting};
use pod_sync_state::{PodRecord, Termination};
use pod_sync_views::{Decision, Waiting, unix_ns};

/// After an error of this pod (pkg/kubelet/pod_workers.go), with jitter up to half of it.
const ERROR_WAIT: Duration = Duration::from_secs(10);
/// Between the first tries of volumes that fail (pkg/volume/util/exponentialbackoff).
const MOUNT_WAIT: Duration = Duration::from_millis(500);
/// The kubelet goes on to two minutes; what is missing is often just late.
const MOUNT_WAIT_MAX: Duration = Duration::from_secs(16);

/// What metrics call the passes (pkg/kubelet/types: SyncPodType).
const CREATE: &str = "create";
const UPDATE: &str = "update";
const SYNC: &str = "sync";
const KILL: &str = "kill";

/// What was last handed to status-reporter.
#[derive(Debug, PartialEq)]
struct Reported {
    status: Arc<PodStatus>,
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
    probes: ProbeResults,
    status: PodStatus,
}

/// A worker and all it knows.
pub struct Worker {
    ctx: Arc<WorkerContext>,
    pod_ref: PodRef,
    desired: watch::Receiver<Desired>,
    bell: Arc<Notify>,
    pod: Arc<Pod>,
    record: PodRecord,
    saved: PodRecord,
    version: u64,
    reported: Option<Reported>,
    corrections: StatusCorrections,
    // The object's and the status's version that were compared last, and whether they differ.
    compared: Option<(String, u64, bool)>,
    // CLOCK_BOOTTIME at which a status that differs in the API server is looked at again.
    recheck: Option<Duration>,
    fresh: Freshness,
    seen: Option<SharedPodRuntime>,
    // Of a static pod that is to run.
    mirror: Option<MirrorReconciler>,
    // Of the work at hand: it is to end where it has not reached the runtime.
    cancel: CancellationToken,
    messages: HashMap<ContainerId, String>,
    seeded: bool,
    mounted: Option<MountedVolumes>,
    // Of the last pass that started something.
    pull_secrets: Vec<Arc<Secret>>,
    handler: String,
    userns: Option<cri::UserNamespace>,
    image_volumes: image::Volumes,
    refreshed: Option<Duration>,
    refreshed_for: Option<Shown>,
    // Starts that failed for another reason than a back-off of their own, and when each is tried again (boottime).
    start_backoffs: BTreeMap<String, sync::Held>,
    // The same of sandbox, cgroup and volumes.
    hold_all: Duration,
    // The same of a resize that was refused.
    resize_hold: Duration,
    // Between tries of volumes that fail.
    mount_wait: Backoff,
    unknown_calls: UnknownCalls,
    decision: Arc<Decision>,
    waiting: Option<Waiting>,
    accepted_unix_ns: i64,
    // What metrics call the next pass over a pod that is to run.
    kind: &'static str,
    // The pod as it was when its worker last saw it, while it is left alone.
    left_alone_as: Option<Desired>,
    // Until when the pod was set aside when an event last told of it.
    told_aside: Duration,
    // From what began it until the pod is Ready or over: one trace.
    operation: Option<Span>,
}

impl Worker {
    /// A worker for `desired`, going on from `record` where an earlier pod-sync left one.
    #[must_use]
    pub fn new(
        ctx: Arc<WorkerContext>,
        pod_ref: PodRef,
        desired: watch::Receiver<Desired>,
        record: Option<PodRecord>,
    ) -> Self {
        let bell = ctx.control.wakeups.register(&pod_ref.uid);
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
            kind: if known { SYNC } else { CREATE },
            accepted_unix_ns: unix_ns(accepted),
            pod_ref,
            desired,
            bell,
            pod,
            saved: record.clone(),
            record,
            // A UID that is used again goes on where its last life ended: status-reporter keeps the newest.
            version: u64::try_from(ctx.clock.boot().as_nanos()).unwrap_or_default(),
            reported: None,
            corrections: StatusCorrections::default(),
            compared: None,
            recheck: None,
            fresh: Freshness::default(),
            seen: None,
            mirror: None,
            cancel: CancellationToken::new(),
            messages: HashMap::new(),
            seeded: false,
            mounted: None,
            pull_secrets: Vec::new(),
            handler: String::new(),
            userns: None,
            image_volumes: image::Volumes::new(),
            refreshed: None,
            refreshed_for: None,
            start_backoffs: BTreeMap::new(),
            hold_all: Duration::ZERO,
            mount_wait: Backoff::new(MOUNT_WAIT, 2.0, MOUNT_WAIT_MAX),
            resize_hold: Duration::ZERO,
            unknown_calls: UnknownCalls::default(),
            decision: Arc::default(),
            waiting: None,
            left_alone_as: None,
            told_aside: Duration::ZERO,
            ctx,
        }
    }

    /// Works until nothing is left of the pod.
    pub async fn run(mut self) {
        if self.ctx.faults.containment.wait(&self.pod_ref.uid).is_none() {
            // The first pass may hang in a call of the runtime.
            self.show(false);
        }
        loop {
            if let Some(wait) = self.ctx.faults.containment.wait(&self.pod_ref.uid) {
                if !self.is_left_alone(&wait).await {
                    return;
                }
                continue;
            }
            self.left_alone_as = None;
            let wait = match self.ctx.control.pod_workers.take(&self.pod_ref.uid) {
                NextWork::Exit => break,
                NextWork::Idle(wait) => wait,
                NextWork::Blocked(work, wait) => {
                    self.held_up(&work);
                    wait
                }
                NextWork::Run(work, cancel) => {
                    self.cancel = cancel;
                    let (ctx, pod) = (Arc::clone(&self.ctx), PodWork::of(&self.pod_ref));
                    let worked = Box::pin(self.work(work));
                    let Some(told) = ctx.faults.contained(&pod, worked).await else {
                        // What it knew may be half-changed: the table makes another worker from the record.
                        return;
                    };
                    match told {
                        NextWork::Idle(wait) => wait,
                        NextWork::Exit | NextWork::Run(..) | NextWork::Blocked(..) => break,
                    }
                }
            };
            self.show(wait.is_zero());
            if wait.is_zero() {
                // Passes that follow each other at once must not keep other tasks from running.
                tokio::task::yield_now().await;
                continue;
            }
            // Any of these only says "look": what it is about is read anew.
            tokio::select! {
                () = self.bell.notified() => {}
                changed = self.desired.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(wait) => {}
            }
        }
        self.ctx.control.static_pod_gate.release(&self.pod_ref.uid);
        self.ctx.reporting.statuses.forget(&self.pod_ref.uid);
        self.ctx.probes.remove(&self.pod_ref.uid);
        self.ctx.reporting.views.remove(&self.pod_ref.uid);
        self.ctx.checkpoints.records.remove(&self.pod_ref.uid);
        self.ctx.faults.containment.forget(&self.pod_ref.uid);
    }

    // Shows why the pod is left alone until something may have ended that. False: nobody has the pod any more.
    async fn is_left_alone(&mut self, wait: &Suspension) -> bool {
        self.ctx.control.static_pod_gate.release(&self.pod_ref.uid);
        let before = self.left_alone_as.take().unwrap_or_else(|| self.desired());
        if wait.is_aside && self.told_aside != wait.until {
            self.told_aside = wait.until;
            self.ctx.reporting.events.pod(&self.pod, EventType::Warning, INTERNAL_ERROR, &wait.message, "");
        }
        self.wait_for(&waiting::Waiting::InternalError { message: wait.message.clone() }, Some(wait.until));
        Arc::make_mut(&mut self.decision).errors = vec![wait.message.clone()];
        self.show(false);
        // Any of these only says "look".
        tokio::select! {
            () = self.bell.notified() => {}
            changed = self.desired.changed() => if changed.is_err() { return false },
            () = tokio::time::sleep(wait.until.saturating_sub(self.ctx.clock.boot())) => {}
        }
        let now = self.desired();
        let ends = |d: &Desired| (d.removed, d.pod.metadata.deletion_timestamp.is_some());
        if now.pod.spec != before.pod.spec || ends(&now) != ends(&before) {
            self.ctx.faults.containment.record_spec_change(&self.pod_ref.uid);
        }
        self.left_alone_as = Some(now);
        true
    }

    // Two static pods of one name never run at once: the older one goes first.
    fn held_up(&mut self, work: &Work) {
        self.ctx.control.static_pod_gate.release(&self.pod_ref.uid);
        let desired = self.desired.borrow_and_update().clone();
        self.accept(&desired);
        self.no_errors();
        if let Work::WaitForFullName { other } = work {
            let other = other.as_ref().map(ToString::to_string).unwrap_or_default();
            self.wait_for(&waiting::Waiting::StaticName { other }, None);
        }
    }

    async fn work(&mut self, work: Work) -> NextWork {
        self.adopt();
        let span = self.operation.as_ref().map_or_else(Span::none, |operation| {
            let name = self.name();
            tracing::info_span!(parent: operation, "pass", pod.uid = %self.pod_ref.uid, pod.name = name, worker = self.phase())
        });
        // Boxed: what a pass needs is needed for the time of the pass only, and a worker rests nearly always.
        let began = Instant::now();
        let first_event = self.ctx.reporting.events.next_number();
        let next = Box::pin(self.pass(&work)).instrument(span).await;
        match &next {
            // A service is away: that keeps everybody.
            Err(Halt::Interrupted(_)) => self.ctx.control.static_pod_gate.extend(&self.pod_ref.uid),
            Ok(Next::Again) => {}
            Ok(Next::Idle(_) | Next::Advance)
            | Err(Halt::Failed { .. } | Halt::NetworkNotReady(_) | Halt::Cancelled) => {
                self.ctx.control.static_pod_gate.release(&self.pod_ref.uid);
            }
        }
        let kind = match work {
            Work::Sync => std::mem::replace(&mut self.kind, SYNC),
            Work::Terminating | Work::Terminated | Work::Finished { .. } | Work::WaitForFullName { .. } => {
                KILL
            }
        };
        self.ctx.reporting.metrics.sync_completed(kind, began.elapsed());
        if self.is_settled() {
            self.operation = None;
        }
        self.save();
        let outcome = self.outcome(next, first_event);
        // A pass that was cut has not shown that the pod does no harm.
        if outcome != Outcome::Interrupted {
            self.ctx.faults.containment.record_success(&self.pod_ref.uid);
        }
        let told = self.ctx.control.pod_workers.done(&self.pod_ref.uid, outcome);
        if outcome == Outcome::Advance {
            self.ctx.checkpoints.allocations.freed();
        }
        told
    }

    // `first_event` is the first that the pass may have recorded: what was warned of is in the log.
    fn outcome(&mut self, next: Result<Next, Halt>, first_event: EventNumber) -> Outcome {
        match next {
            Ok(Next::Again) => Outcome::Requeue,
            Ok(Next::Idle(within)) => {
                let now = self.ctx.clock.boot();
                let recheck = self.recheck.map(|at| at.saturating_sub(now));
                Outcome::Idle(within.into_iter().chain(recheck).min())
            }
            Ok(Next::Advance) => Outcome::Advance,
            Err(Halt::Interrupted(why)) => {
                tracing::debug!(pod.uid = %self.pod_ref.uid, why, "pass was cut");
                self.fresh.require_full_inspection();
                Arc::make_mut(&mut self.decision).errors = vec![why];
                if self.waiting.is_none() {
                    self.wait_for(&waiting::Waiting::Service { name: "cri-proxy" }, None);
                }
                Outcome::Interrupted
            }
            Err(Halt::Failed { error, waiting, after }) => {
                let (uid, pod) = (self.pod_ref.uid.as_str(), self.name());
                if self.ctx.reporting.events.has_warning_since(uid, first_event) {
                    tracing::debug!(pod.name = pod, pod.uid = uid, error, "pass failed");
                } else {
                    let reason = waiting.reason();
                    tracing::warn!(pod.name = pod, pod.uid = uid, reason, error, "pass failed");
                }
                Arc::make_mut(&mut self.decision).errors = vec![error];
                self.wait_for(&waiting, None);
                Outcome::Failed(after)
            }
            Err(Halt::NetworkNotReady(message)) => {
                Arc::make_mut(&mut self.decision).errors = vec![format!("network is not ready: {message}")];
                self.wait_for(&waiting::Waiting::NetworkNotReady { message }, None);
                Outcome::NetworkNotReady
            }
            Err(Halt::Cancelled) => Outcome::Cancelled,
        }
    }

    // Of a removal that the pass can do without: whether it was done. The refusal of one is told, and no more.
    fn unless_cut(&self, removed: Result<(), Halt>) -> Result<bool, Halt> {
        match removed {
            Ok(()) => Ok(true),
            Err(Halt::Failed { error, .. }) => {
                let (pod, uid) = (self.name(), self.pod_ref.uid.as_str());
                tracing::warn!(pod.name = pod, pod.uid = uid, error, "dead instances not removed");
                Ok(false)
            }
            Err(cut @ (Halt::Interrupted(_) | Halt::NetworkNotReady(_) | Halt::Cancelled)) => Err(cut),
        }
    }

    // Puts on record what was decided on this pod, before anything is done for it.
    fn adopt(&mut self) {
        let uid = &self.pod_ref.uid;
        let (ending, started) =
            self.ctx.control.pod_workers.read(|w| (w.termination(uid).cloned(), w.is_started(uid)));
        let before = self.record.termination.as_ref();
        if ending.is_some() && before.is_none() {
            self.operation = Some(operation("terminate", &self.pod_ref));
        }
        let before = self.record.termination.as_ref();
        self.record.termination = ending.map(|e| Termination::of(&e, before));
        self.record.started = started;
        self.save();
    }

    // What began has come to its end: Ready, or over.
    fn is_settled(&self) -> bool {
        let ready =
            |s: &PodStatus| s.conditions.iter().flatten().any(|c| c.type_ == READY && c.status == "True");
        match &self.record.termination {
            None => self.record.status.as_deref().is_some_and(ready),
            Some(t) => t.finished,
        }
    }

    pub(super) fn begin_operation(&mut self, name: &'static str) {
        if self.operation.is_none() {
            self.operation = Some(operation(name, &self.pod_ref));
        }
    }

    // A copy: with one guard held, a second one would never be given behind a table that waits to write.
    pub(super) fn desired(&self) -> Desired {
        self.desired.borrow().clone()
    }

    // As log lines have it.
    fn name(&self) -> String {
        format!("{}/{}", self.pod_ref.namespace, self.pod_ref.name)
    }

    fn phase(&self) -> &'static str {
        match &self.record.termination {
            None => "sync",
            Some(t) if t.finished => "finished",
            Some(t) if t.stopped => "terminated",
            Some(_) => "terminating",
        }
    }

    async fn pass(&mut self, work: &Work) -> Result<Next, Halt> {
        let desired = self.desired.borrow_and_update().clone();
        self.accept(&desired);
        self.waiting = None;
        self.no_errors();
        if *work != Work::Sync {
            self.mirror = None;
        }
        failpoint::work!("pod worker pass");
        match work {
            Work::Sync => match &desired.rejected {
                Some(rejection) => self.reject(rejection),
                None => match self.makes_room(&desired) {
                    Some(wait) => Ok(Next::Idle(Some(wait))),
                    None => self.sync(&desired).await,
                },
            },
            Work::Terminating => self.terminating().await,
            Work::Terminated => self.terminated().await,
            Work::Finished { clean } => self.finished(*clean).await,
            Work::WaitForFullName { .. } => Ok(Next::Idle(None)),
        }
    }

    // Those that go for this pod go first; one that does not go in time is not waited for.
    fn makes_room(&mut self, desired: &Desired) -> Option<Duration> {
        let now = self.ctx.clock.boot();
        let left: Vec<_> = desired
            .after
            .iter()
            .filter(|v| !self.ctx.control.pod_workers.is_over(&self.ctx.reporting.views, &v.uid))
            .collect();
        let until = left.iter().map(|v| v.until).max().filter(|until| *until > now)?;
        let victims = left.iter().map(|v| v.uid.to_string()).collect();
        self.wait_for(&waiting::Waiting::Preempting { victims }, Some(until));
        Some(until.saturating_sub(now))
    }

    // Takes over what the source says.
    fn accept(&mut self, desired: &Desired) {
        if self.pod.spec != desired.pod.spec {
            if self.kind == SYNC {
                self.kind = UPDATE;
            }
            self.start_backoffs.clear();
            self.hold_all = Duration::ZERO;
            self.resize_hold = Duration::ZERO;
            self.mount_wait.reset();
        }
        self.pod = Arc::clone(&desired.pod);
        self.record.pod = Some(Arc::clone(&self.pod));
    }

    fn reject(&mut self, rejection: &pod_sync_decisions::admission::Rejection) -> Result<Next, Halt> {
        self.ctx.reporting.events.pod(
            &self.pod,
            EventType::Warning,
            &rejection.reason,
            &rejection.message,
            "",
        );
        let status =
            status::rejected(&self.pod, &rejection.reason, &rejection.message, self.ctx.clock.wall());
        self.ctx.control.pod_workers.step(Input::Reject(self.pod_ref.uid.clone()));
        self.adopt();
        self.report(status, true);
        Ok(Next::Again)
    }

    // The runtime's state, never older than the last action.
    pub(crate) async fn observe(&mut self) -> Result<SharedPodRuntime, Halt> {
        let uid = &self.pod_ref.uid;
        let cached = self.ctx.runtime.pleg.get(uid);
        let runtime = match (self.fresh.next_observation(cached.as_deref()), cached) {
            (NextObservation::UseCached, Some(cached)) => cached,
            (look, cached) => {
                let last = cached.as_ref().or(self.seen.as_ref());
                let mut known = last.map_or_else(Known::default, |p| Known::of(p));
                known.add(self.fresh.created());
                let full = look != NextObservation::Inspect { full: false };
                match self.ctx.runtime.pleg.observe(uid, known, full).await {
                    // A pleg-service that was started meanwhile knows the pod by a list of everything at best.
                    Ok(observed) if !full && !self.fresh.is_from_epoch(observed.epoch) => {
                        return Err(Halt::Interrupted("pleg-service was restarted".to_owned()));
                    }
                    Ok(Observed { pod: Some(runtime), .. }) => runtime,
                    Ok(Observed { pod: None, epoch }) => Arc::new(PodRuntime::empty(
                        self.pod_ref.clone(),
                        Cursor { epoch, rev: 0 },
                        self.ctx.clock.boot(),
                    )),
                    Err(ObserveError::Unavailable(why)) => {
                        self.wait_for(&waiting::Waiting::Service { name: "pleg-service" }, None);
                        return Err(Halt::Interrupted(format!("runtime state cannot be read: {why}")));
                    }
                    Err(ObserveError::Runtime(why)) => {
                        let message = format!("error determining status: {why}");
                        self.ctx.reporting.events.pod(
                            &self.pod,
                            EventType::Warning,
                            "FailedSync",
                            &message,
                            "",
                        );
                        return Err(Halt::failed(waiting::Waiting::Runtime { error: Some(why) }, message));
                    }
                }
            }
        };
        self.fresh.observed(runtime.cursor.epoch);
        self.seen = Some(Arc::clone(&runtime));
        let exited: Vec<_> = runtime
            .containers
            .iter()
            .filter(|c| c.state == ContainerState::Exited && !self.messages.contains_key(&c.id))
            .cloned()
            .collect();
        if !exited.is_empty() {
            let pod = self.ctx.node.pod_dir(&self.pod_ref.uid);
            let logs =
                pod_sync_cri_config::paths::pod_log_dir(&self.ctx.node.settings.pod_logs_dir, &self.pod_ref);
            let read = move || {
                let places = termination_message::Places { pod: &pod, logs: &logs };
                exited.into_iter().map(|c| (c.id.clone(), termination_message::of(&c, places))).collect()
            };
            let read: Vec<_> = blocking(read).await;
            self.messages.extend(read);
        }
        self.messages.retain(|id, _| runtime.containers.iter().any(|c| c.id == *id));
        Ok(runtime)
    }

    // Snapshot, status, report, probe target: how every pass begins.
    pub(crate) async fn look(&mut self, is_terminal: bool) -> Result<Pass, Halt> {
        let runtime = self.observe().await?;
        let named = !self.ctx.runtime.state.borrow().name.is_empty()
            || self.record.status.as_deref().and_then(status::runtime_name).is_some();
        if !named && !runtime.containers.is_empty() {
            return Err(Halt::Interrupted(
                "the runtime's name, a part of container ids, is not known yet".to_owned(),
            ));
        }
        if !self.seeded {
            self.seeded = true;
            let api = self.record.status.as_deref().or(self.pod.status.as_ref());
            for (container, probe, memory) in
                api.map(|s| probe_targets::seeds(&self.pod, s, &runtime)).unwrap_or_default()
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
        let (wall, boot) = (self.ctx.clock.wall(), self.ctx.clock.boot());
        record_starts(&mut self.record.container_starts, &runtime.containers, wall, boot);
        let memory = self.ctx.probes.memory(&self.pod_ref.uid);
        let mut probes = ProbeResults::default();
        for ((_, probe), m) in &memory {
            probes.add(*probe, m);
        }
        let probes_kept: Vec<_> = memory.into_iter().map(|((c, t), m)| (c, t, m)).collect();
        if !same_but_for_counters(&self.record.probes, &probes_kept) {
            self.record.probes = probes_kept;
        }
        if self.record.termination.is_none() {
            self.note_resize(&runtime);
        }
        let known = self.record.status.as_deref().or(self.pod.status.as_ref());
        if let Some(start) = known.and_then(|s| s.start_time.as_ref()) {
            self.record.active = Some(PodStart::at(start.0, self.record.active, wall, boot));
        }
        let status = self.make_status(&runtime, &probes, is_terminal);
        Ok(Pass { pod: Arc::clone(&self.pod), runtime, probes, status })
    }

    pub(crate) fn make_status(
        &self,
        runtime: &PodRuntime,
        probes: &ProbeResults,
        is_terminal: bool,
    ) -> PodStatus {
        let handler = runtime.sandboxes.first().map(|s| s.runtime_handler.as_str()).unwrap_or_default();
        let mut facts = self.ctx.facts(handler);
        if facts.runtime_name.is_empty() {
            // Not asked yet since this process began: container ids are as they were.
            facts.runtime_name =
                self.record.status.as_deref().and_then(status::runtime_name).unwrap_or_default();
        }
        status::generate(&status::StatusInput {
            pod: &self.pod,
            old: self.record.status.as_deref(),
            runtime,
            probes,
            waiting: &self.record.waiting,
            termination_messages: &self.messages,
            resize: &self.ctx.checkpoints.allocations.condition_list(&self.pod_ref.uid),
            actuated: self.ctx.checkpoints.allocations.actuated(&self.pod_ref.uid).as_ref(),
            node: &facts,
            is_terminal,
            now: self.ctx.clock.wall(),
            unstepped: self.unstepped(),
        })
    }

    // Wall time, had nobody set the clock since the pod started.
    pub(super) fn unstepped(&self) -> jiff::Timestamp {
        self.record.active.map_or_else(|| self.ctx.clock.wall(), |active| active.now(self.ctx.clock.boot()))
    }

    // Hands a status over where it says something new; the record of it comes first.
    pub(crate) fn report(&mut self, status: PodStatus, finished: bool) {
        let mirror = self.desired().mirror;
        let object = Arc::clone(mirror.as_ref().unwrap_or(&self.pod));
        // One that says the same is kept once.
        let status = match &self.record.status {
            Some(last) if **last == status => Arc::clone(last),
            Some(_) | None => Arc::new(status),
        };
        let said = Reported {
            status: Arc::clone(&status),
            finished,
            api_uid: object.metadata.uid.clone().unwrap_or_default(),
            deleting: object.metadata.deletion_timestamp.is_some(),
        };
        let base = object.metadata.resource_version.as_deref().unwrap_or_default();
        let boot = self.ctx.clock.boot();
        self.recheck = None;
        if self.reported.as_ref() == Some(&said) {
            if !self.is_changed_by_others(&object, &status) {
                return;
            }
            if let CorrectionDue::At(at) = self.corrections.due(base, boot) {
                self.recheck = Some(at);
                return;
            }
            tracing::info!(pod.uid = %self.pod_ref.uid, version = base, "status changed by another client, restoring it");
            self.corrections.record_correction(base, boot);
        } else {
            self.corrections.record_report(base, boot);
        }
        self.count(&status);
        self.record.status = Some(Arc::clone(&status));
        self.save();
        self.version = self.version.saturating_add(1);
        let could_run = self.could_run();
        let is_static = pods::is_static(&self.pod);
        if self.ctx.node.has_api && (!is_static || mirror.is_some()) {
            let json = |s: Option<&PodStatus>| s.and_then(|s| serde_json::to_vec(s).ok()).unwrap_or_default();
            let update = status_wire::PodStatusUpdate {
                uid: self.pod_ref.uid.to_string(),
                api_uid: object.metadata.uid.clone().unwrap_or_default(),
                name: self.pod_ref.name.to_string(),
                namespace: self.pod_ref.namespace.to_string(),
                owner_epoch: self.ctx.node.epoch,
                version: self.version,
                base_status: json(object.status.as_ref()),
                base_resource_version: object.metadata.resource_version.clone().unwrap_or_default(),
                desired_status: json(Some(&*status)),
                could_run,
                finished,
                deleting: object.metadata.deletion_timestamp.is_some(),
                mirror: is_static,
            };
            self.ctx.reporting.statuses.report(&self.pod_ref.uid, update);
        }
        self.reported = Some(said);
    }

    fn could_run(&self) -> bool {
        self.record.termination.as_ref().is_none_or(|t| !t.stopped)
    }

    // The API server has something else than what was last written there. While a write is on its way, and while the watch is
    // behind it, nobody can tell: the acknowledgement and the watch both wake the worker.
    fn is_changed_by_others(&mut self, object: &Pod, status: &PodStatus) -> bool {
        let is_there = !pods::is_static(&self.pod) || self.desired().mirror.is_some();
        if !self.ctx.node.has_api || !is_there {
            return false;
        }
        let settled = match self.ctx.reporting.statuses.ack(&self.pod_ref.uid, self.version) {
            Some(StatusAck::Written | StatusAck::Refused(_)) => true,
            Some(StatusAck::Gone | StatusAck::UidMismatch | StatusAck::NoApi | StatusAck::Deleted) | None => {
                false
            }
        };
        let base = object.metadata.resource_version.as_deref().unwrap_or_default();
        if !settled
            || reconcile::is_older(base, &self.ctx.reporting.statuses.written_version(&self.pod_ref.uid))
        {
            return false;
        }
        if let Some((of, version, needs_reconcile)) = &self.compared
            && of == base
            && *version == self.version
        {
            return *needs_reconcile;
        }
        let needs_reconcile = reconcile::needs_reconcile(object.status.as_ref(), status, self.could_run());
        self.compared = Some((base.to_owned(), self.version, needs_reconcile));
        needs_reconcile
    }

    fn count(&self, status: &PodStatus) {
        let old = self.record.status.as_deref().or(self.pod.status.as_ref());
        self.ctx.reporting.metrics.status_changed(old, status);
        self.ctx.reporting.metrics.start_latency.status_changed(
            &self.pod_ref.uid,
            &self.pod,
            status,
            self.ctx.clock.wall(),
        );
        if pod_sync_metrics::began_to_run(old, status) {
            let since = self.ctx.clock.boot().saturating_sub(self.record.accepted);
            self.ctx.reporting.metrics.pod_start.observe(since.as_secs_f64());
        }
    }

    // What probe-service is to do for this pod now.
    pub(crate) fn set_targets(&self, pass: &Pass, terminating: bool) {
        let input = probe_targets::TargetInput {
            pod: &pass.pod,
            status: &pass.status,
            runtime: &pass.runtime,
            terminating,
            key: &self.ctx.node.grant_key,
            starts: &self.record.container_starts,
        };
        if let Some(target) = probe_targets::target(&input) {
            self.ctx.probes.set_target(&self.pod_ref.uid, target);
        }
    }

    pub(crate) fn acted(&mut self) {
        self.fresh.action_ended(self.ctx.clock.boot());
    }

    pub(crate) fn save(&mut self) {
        if self.record == self.saved {
            return;
        }
        match self.ctx.checkpoints.records.save(&self.pod_ref.uid, &self.record) {
            Ok(()) => self.saved = self.record.clone(),
            Err(e) => {
                let (pod, error) = (self.name(), quintlet_kit::error_chain(&e));
                tracing::error!(pod.name = pod, pod.uid = %self.pod_ref.uid, error, "state not saved");
            }
        }
    }
}

fn operation(name: &'static str, pod: &PodRef) -> Span {
    let title = format!("{name} {}/{}", pod.namespace, pod.name);
    let name = format!("{}/{}", pod.namespace, pod.name);
    tracing::info_span!(parent: None, "operation", otel.name = title, pod.uid = %pod.uid, pod.name = name)
}

type Memories = [(String, ProbeType, ProbeMemory)];

// Counters grow with every evaluation; only what a restart must not lose is worth a write.
fn same_but_for_counters(a: &Memories, b: &Memories) -> bool {
    a.len() == b.len()
        && a.iter().zip(b).all(|((ac, at, am), (bc, bt, bm))| {
            (ac, at) == (bc, bt) && *am == ProbeMemory { counter: am.counter, ..bm.clone() }
        })
}

/// `d` and up to half of it more, by chance.
pub(crate) fn jitter(d: Duration) -> Duration {
    worker::jitter(d, rand::rng().random_range(0.0..1.0))
}
