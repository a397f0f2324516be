//! The sync loop: merges what the sources say, and keeps one worker per pod.

mod cleanup;
mod manifest_gate;
mod resize;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::EventType;
use quintlet_kit::failpoint;
use quintlet_kit::notify::Heartbeat;
use quintlet_model::ids::{PodRef, PodUid};
use quintlet_model::{labels, pod as pods};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::context::{Context, Desired, Victim};
use crate::housekeeping::{HousekeepingPace, LogSweeper};
use crate::pending_resizes::PendingResizes;
use crate::view::{self, Decision, View, unix_ns};
use crate::worker::Worker;
use manifest_gate::ManifestGate;
use pod_sync_containment::PodWork;
use pod_sync_decisions::admission::{self, AdmitResult, Rejection};
use pod_sync_decisions::merge::{PodChange, PodOperation, SourceStore, creation_time};
use pod_sync_decisions::resize::allocation::PodResources;
use pod_sync_decisions::resize::feasibility::NodeResizePolicy;
use pod_sync_decisions::status::{KillCause, KillOverride};
use pod_sync_decisions::waiting::{Waiting, WaitingFor};
use pod_sync_decisions::worker::{Effect, Input, KillPodOptions, PodFacts, SyncPodType};
use pod_sync_decisions::{grace, preempt};
use pod_sync_sources::objects::ManifestObjects;
use pod_sync_sources::{SourceEvent, SourceKind, SourceMessage};
use pod_sync_state::{PodRecord, Termination};

/// Housekeeping period (pkg/kubelet/kubelet.go).
const HOUSEKEEPING: Duration = Duration::from_secs(2);
/// How long the API server gets to tell of the Node before a pod is refused for it.
const NODE_READ: Duration = Duration::from_secs(5);
/// Reason of a rejection for which there is no better word.
const UNEXPECTED: &str = "UnexpectedAdmissionError";

struct Entry {
    // What its source asks for, as it was last compared with what was allocated.
    asks: PodResources,
    desired: watch::Sender<Desired>,
    task: JoinHandle<()>,
    // Put back from a record, and no source has named it yet.
    restored: bool,
}

/// What admission needs to know of the node, made anew for each decision.
#[async_trait]
pub trait Admission: Send + Sync {
    /// Decides on a pod beside the others.
    fn admit(&self, pod: &Pod, others: &[&Pod]) -> AdmitResult;

    /// Whether a rejection only says that the runtime has not told yet what it can do.
    fn awaits_runtime(&self, rejection: &Rejection) -> bool;

    /// Waits until the runtime told what it can do.
    async fn runtime_known(&self);

    /// Asks the API server for the Node, whose watch may be behind. False where there is nobody to ask.
    async fn refresh(&self) -> bool;

    /// What of the node makes a resize infeasible.
    fn resize_rules(&self) -> NodeResizePolicy;
}

/// A pod that is to be admitted once the Node was read anew, or the runtime for the first time.
#[derive(Debug)]
struct PendingAdmission {
    source: SourceKind,
    pod: Arc<Pod>,
}

// It is on its way out, or over.
fn is_ending(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
        || pods::is_terminal_phase(pod.status.as_ref().and_then(|s| s.phase.as_deref()))
}

/// All pods and their workers.
pub struct PodManager {
    ctx: Arc<Context>,
    objects: Arc<ManifestObjects>,
    admission: Arc<dyn Admission>,
    stores: BTreeMap<SourceKind, SourceStore>,
    pods: HashMap<PodUid, Entry>,
    mirrors: HashMap<(String, String), Arc<Pod>>,
    orphans: HashMap<PodUid, JoinHandle<()>>,
    draining: bool,
    // What the burstable tier was last given.
    burstable: Option<u64>,
    pending_admission: HashMap<PodUid, PendingAdmission>,
    // Pods of the API server that came while an earlier life of their UID ended. Others without a worker are over: the API
    // server said so before its watch did.
    again: HashSet<PodUid>,
    // Rings when the Node was read for those.
    node_read: Arc<Notify>,
    // Lists directories of pods that nobody knows.
    listing: Option<JoinHandle<BTreeSet<PodUid>>>,
    sweeper: LogSweeper,
    pace: HousekeepingPace,
    resizes: PendingResizes,
    heartbeat: Heartbeat,
    manifests: ManifestGate,
    // Pods that may not be worked on, and what their sources say of them meanwhile is not taken over.
    held: HashMap<PodUid, SourceKind>,
    // Those of them that the fleet knows and that have no worker.
    unborn: HashSet<PodUid>,
}

// What a listing found, once it ended. Cancellation safety: the listing goes on.
async fn found(listing: &mut Option<JoinHandle<BTreeSet<PodUid>>>) -> BTreeSet<PodUid> {
    match listing {
        // One that panicked ends the process.
        Some(listing) => listing.await.unwrap_or_default(),
        None => std::future::pending().await,
    }
}

impl std::fmt::Debug for PodManager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PodManager").field("pods", &self.pods.len()).finish_non_exhaustive()
    }
}

/// Whether a record of an earlier run has a pod to go on with.
#[must_use]
pub fn has_pod(record: &PodRecord) -> bool {
    record.pod.as_ref().is_some_and(|pod| pods::pod_ref(pod).is_ok())
}

impl PodManager {
    /// An empty table for these sources.
    #[must_use]
    pub fn new(
        ctx: Arc<Context>,
        objects: Arc<ManifestObjects>,
        admission: Arc<dyn Admission>,
        sources: &[SourceKind],
    ) -> Self {
        let heartbeat = Heartbeat::new(ctx.clock.clone());
        let stores = sources.iter().map(|s| (*s, SourceStore::new(s.name()))).collect();
        Self {
            ctx,
            objects,
            admission,
            stores,
            pods: HashMap::new(),
            mirrors: HashMap::new(),
            orphans: HashMap::new(),
            draining: false,
            burstable: None,
            pending_admission: HashMap::new(),
            again: HashSet::new(),
            node_read: Arc::default(),
            listing: None,
            sweeper: LogSweeper::default(),
            pace: HousekeepingPace::default(),
            resizes: PendingResizes::new(),
            heartbeat,
            manifests: ManifestGate::of(sources),
            held: HashMap::new(),
            unborn: HashSet::new(),
        }
    }

    /// Tells whether the loop comes round.
    #[must_use]
    pub fn heartbeat(&self) -> Heartbeat {
        self.heartbeat.clone()
    }

    /// Goes on with the pods an earlier run left records of: they are maintained before any source has spoken.
    pub fn restore(&mut self, records: Vec<(PodUid, PodRecord)>) {
        for (uid, record) in records {
            let Some(pod) = record.pod.clone() else {
                self.ctx.state.remove(&uid);
                continue;
            };
            let source = match pods::annotation(&pod, labels::CONFIG_SOURCE) {
                Some("file") => SourceKind::File,
                Some("http") => SourceKind::Http,
                Some(_) | None => SourceKind::Api,
            };
            let Ok(pod_ref) = pods::pod_ref(&pod) else { continue };
            tracing::info!(pod.uid = %uid, pod = %pod_ref, "going on with a known pod");
            let allocations = &self.ctx.allocations;
            if !allocations.is_allocated(&uid) {
                // It was recorded as it was allocated.
                allocations.allocate(&uid, &pod);
            }
            allocations.recover(&uid, &pod, record.status.as_deref());
            let desired = Desired {
                pod: allocations.apply(&uid, &pod),
                source,
                mirror: None,
                removed: false,
                rejected: None,
                after: Vec::new(),
            };
            let facts = PodFacts::of(&desired.pod, pod_ref.full_name());
            let termination = record.termination.as_ref().map(Termination::to_worker);
            self.ctx.pod_workers.step(Input::Restore { uid, facts, termination, started: record.started });
            self.spawn(pod_ref, desired, Some(record), true);
        }
    }

    fn spawn(&mut self, pod_ref: PodRef, desired: Desired, record: Option<PodRecord>, restored: bool) {
        let uid = pod_ref.uid.clone();
        let (tx, rx) = watch::channel(desired);
        let worker = Worker::new(Arc::clone(&self.ctx), pod_ref, rx, record);
        let task = quintlet_kit::task::spawn("pod-worker", worker.run());
        let asks = PodResources::default();
        self.pods.insert(uid, Entry { asks, desired: tx, task, restored });
    }

    /// Runs until told to stop, or, after `drain` said so, until no pod is left.
    pub async fn run(
        mut self,
        mut updates: mpsc::Receiver<SourceMessage>,
        mut drain: watch::Receiver<bool>,
        stop: CancellationToken,
    ) {
        let mut housekeeping = tokio::time::interval(HOUSEKEEPING);
        housekeeping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let ctx = Arc::clone(&self.ctx);
            let node_read = Arc::clone(&self.node_read);
            let late = self.manifests.due();
            self.heartbeat.beat();
            // Snapshots stay queued, the rest is level-triggered: a dropped arm loses nothing.
            tokio::select! {
                () = stop.cancelled() => return,
                update = updates.recv() => match update {
                    Some((source, update)) => self.receive(source, update),
                    None => return,
                },
                () = late => self.manifests_read(),
                _ = housekeeping.tick() => self.housekeeping(),
                () = ctx.wakes.housekeeping_due() => self.housekeeping(),
                listed = found(&mut self.listing) => self.remove_listed(listed),
                () = node_read.notified() => self.admit_pending(),
                () = ctx.allocations.room() => self.resizes.retry_soon(),
                () = self.resizes.due() => {}
                changed = drain.changed() => if changed.is_ok() && *drain.borrow() { self.begin_drain() },
            }
            self.reap();
            self.look_at_resizes();
            // Pods of the API server run on, as they do when the process is told to stop.
            let from_manifests = |e: &Entry| e.desired.borrow().source != SourceKind::Api;
            if self.draining && !self.pods.values().any(from_manifests) && self.orphans.is_empty() {
                return;
            }
        }
    }

    fn begin_drain(&mut self) {
        self.draining = true;
        tracing::info!(pods = self.pods.len(), "removing the pods of manifests");
        for (uid, entry) in &self.pods {
            if entry.desired.borrow().source != SourceKind::Api {
                self.remove(uid, entry);
            }
        }
    }

    fn remove(&self, uid: &PodUid, entry: &Entry) {
        self.ctx.pod_workers.step(Input::Remove(uid.clone()));
        entry.desired.send_modify(|d| d.removed = true);
        self.ctx.views.wanted(uid, &entry.desired.borrow());
    }

    fn update(&mut self, source: SourceKind, update: SourceEvent) {
        let now = self.ctx.clock.wall();
        let snapshot = match update {
            SourceEvent::Snapshot(snapshot) => snapshot,
            SourceEvent::Problems(problems) => {
                return self.ctx.views.set_problems(source, problems, unix_ns(now));
            }
        };
        self.ctx.views.set_problems(source, snapshot.problems, unix_ns(now));
        for undecodable in snapshot.undecodable {
            let pod = Pod { metadata: *undecodable.metadata, ..Pod::default() };
            let message = format!("failed to decode the pod: {}: {}", undecodable.field, undecodable.error);
            self.ctx.events.pod(&pod, EventType::Warning, "FailedValidation", &message, "");
        }
        if source == SourceKind::File {
            self.objects.set(snapshot.config_maps, snapshot.secrets);
        }
        if self.draining && source != SourceKind::Api {
            return;
        }
        let Some(store) = self.stores.get_mut(&source) else { return };
        let merged = store.set(snapshot.pods, now);
        for pod in &merged.duplicates {
            let name = pods::pod_ref(pod).map(|r| r.full_name()).unwrap_or_default();
            let message = format!(
                "Error validating pod {name} from {} due to duplicate pod name {name:?}, ignoring",
                source.name()
            );
            self.ctx.events.pod(pod, EventType::Warning, "FailedValidation", &message, "");
        }
        for pod in &merged.unusable {
            let message = format!(
                "Error validating pod {} from {}: its UID {:?} is not usable, ignoring",
                pod.metadata.name.as_deref().unwrap_or_default(),
                source.name(),
                pod.metadata.uid.as_deref().unwrap_or_default()
            );
            self.ctx.events.pod(pod, EventType::Warning, "FailedValidation", &message, "");
        }
        for PodChange { op, pod } in merged.changes {
            self.change(source, op, pod);
        }
        if merged.is_first {
            self.drop_unnamed();
        }
    }

    // Takes a change of one pod over. A panic in that is contained to the pod, which is taken over again later.
    fn change(&mut self, source: SourceKind, op: PodOperation, pod: Arc<Pod>) {
        let Ok(pod_ref) = pods::pod_ref(&pod) else { return };
        let uid = pod_ref.uid.clone();
        let ctx = Arc::clone(&self.ctx);
        let may_be_taken =
            self.pods.contains_key(&uid) && !self.held.contains_key(&uid) || op == PodOperation::Remove;
        if !may_be_taken && ctx.containment.wait(&uid).is_some() {
            return self.hold(&pod_ref, source, &pod);
        }
        self.held.remove(&uid);
        let work = PodWork::of(&pod_ref);
        let changed = ctx.containment.contained_now(&uid, work.name.clone(), || {
            self.take_change(source, op, Arc::clone(&pod), pod_ref.clone());
        });
        if let Err(panic) = changed {
            ctx.panicked(&work, &panic, Some(&pod));
            self.hold(&pod_ref, source, &pod);
        }
    }

    // A pod is taken over when it may be worked on again, as its source has it then.
    fn hold(&mut self, pod_ref: &PodRef, source: SourceKind, pod: &Arc<Pod>) {
        let uid = &pod_ref.uid;
        self.held.insert(uid.clone(), source);
        if self.pods.contains_key(uid) {
            return;
        }
        if self.ctx.pod_workers.read(|w| w.is_known(uid)) {
            self.unborn.insert(uid.clone());
        }
        if let Some(wait) = self.ctx.containment.wait(uid) {
            let left = wait.until.saturating_sub(self.ctx.clock.boot());
            let until = self.ctx.clock.wall().checked_add(left).ok();
            let what = Waiting::InternalError { message: wait.message.clone() };
            let decision = Decision { errors: vec![wait.message], ..Decision::default() };
            self.show_wait(pod_ref, source, pod, &WaitingFor { what, since: None, until }, decision);
        }
    }

    // Takes over what was held back and may be worked on again.
    fn change_held(&mut self) {
        let due: Vec<(PodUid, SourceKind)> = self
            .held
            .iter()
            .filter(|(uid, _)| self.ctx.containment.wait(uid).is_none())
            .map(|(uid, source)| (uid.clone(), *source))
            .collect();
        for (uid, source) in due {
            self.held.remove(&uid);
            let has_uid = |pod: &&Arc<Pod>| pod.metadata.uid.as_deref() == Some(uid.as_str());
            let pod = self.stores.get(&source).and_then(|store| store.pods().find(has_uid).cloned());
            match pod {
                Some(pod) => self.change(source, PodOperation::Update, pod),
                None => self.ctx.views.hide(&uid),
            }
        }
    }

    fn take_change(&mut self, source: SourceKind, op: PodOperation, pod: Arc<Pod>, pod_ref: PodRef) {
        failpoint::work!("pod taken over");
        if pods::is_mirror(&pod) {
            return self.mirror(op, pod);
        }
        match op {
            PodOperation::Remove => {
                self.again.remove(&pod_ref.uid);
                if let Some(PendingAdmission { source, pod }) = self.pending_admission.remove(&pod_ref.uid) {
                    // Its worker has nothing to take down, and says so.
                    self.take(pod_ref.clone(), source, pod, Ok(Vec::new()));
                }
                self.resizes.drop(&pod_ref.uid);
                self.resizes.retry_soon();
                // Only a source that has spoken before removes: what it no longer has, nobody has.
                match self.pods.get(&pod_ref.uid) {
                    Some(entry) => self.remove(&pod_ref.uid, entry),
                    None => self.ctx.views.hide(&pod_ref.uid),
                }
            }
            PodOperation::Add | PodOperation::Update | PodOperation::Delete | PodOperation::Reconcile => {
                let uid = pod_ref.uid.clone();
                let facts = PodFacts::of(&pod, pod_ref.full_name());
                // A pod that was put back from a record is not new to its worker.
                let restored = self.pods.get(&uid).is_some_and(|e| e.restored);
                let kind = if op == PodOperation::Add && !restored {
                    SyncPodType::Create
                } else {
                    SyncPodType::Update
                };
                let quiet = facts.terminal
                    && self.ctx.pleg.all().is_some()
                    && self.ctx.pleg.get(&uid).is_none_or(|runtime| runtime.is_quiet());
                let effects =
                    self.ctx.pod_workers.step(Input::Update { uid: uid.clone(), facts, kind, quiet });
                if self.ctx.pod_workers.read(|w| w.is_restart_requested(&uid)) {
                    // Its earlier life ends as it was, and knows nothing of what comes after it.
                    // One without a worker has nobody else to show it.
                    if !self.pods.contains_key(&uid) {
                        self.show_waiting(&pod_ref, source, &pod, Waiting::PreviousPod);
                    }
                    self.again.insert(uid);
                    return;
                }
                // One that ran before, and of which the checkpoint says nothing, had what its status tells.
                self.ctx.allocations.recover(&uid, &pod, pod.status.as_ref());
                let asked = pod;
                let pod = self.ctx.allocations.apply(&uid, &asked);
                if let Some(entry) = self.pods.get_mut(&uid) {
                    entry.restored = false;
                    entry.desired.send_modify(|d| {
                        d.pod = pod;
                        d.source = source;
                        d.removed = false;
                    });
                    self.ctx.views.wanted(&pod_ref.uid, &entry.desired.borrow());
                    self.compare(&uid, &asked);
                    return;
                }
                if let Some(unsure) = self.pending_admission.get_mut(&uid) {
                    unsure.pod = pod;
                    return;
                }
                // One whose worker was to be made when something panicked.
                let is_unborn = self.unborn.remove(&uid);
                if !effects.contains(&Effect::Spawn(uid.clone())) && !is_unborn {
                    // What the runtime has of an earlier life goes first; the pod is added then.
                    self.again.insert(uid);
                    return self.show_waiting(&pod_ref, source, &pod, Waiting::PreviousPod);
                }
                self.again.remove(&uid);
                let admitted = self.admit(&pod);
                let early = self.is_early(&admitted);
                if early || admitted.as_ref().is_err_and(|r| r.reason == admission::NODE_AFFINITY) {
                    return self.look_again(pod_ref.uid, PendingAdmission { source, pod }, early);
                }
                self.take(pod_ref, source, pod, admitted);
                self.compare(&uid, &asked);
            }
        }
    }

    fn is_early(&self, admitted: &Result<Vec<Victim>, Rejection>) -> bool {
        admitted.as_ref().is_err_and(|rejection| self.admission.awaits_runtime(rejection))
    }

    // A pod without a worker, which would show it.
    fn show_waiting(&self, pod_ref: &PodRef, source: SourceKind, pod: &Arc<Pod>, what: Waiting) {
        let old = self.ctx.views.get(&pod_ref.uid);
        if old.as_ref().and_then(|v| v.waiting.as_ref()).is_some_and(|w| w.reason == what.reason()) {
            return;
        }
        let wait = WaitingFor { what, since: None, until: None };
        self.show_wait(pod_ref, source, pod, &wait, Decision::default());
    }

    fn show_wait(
        &self,
        pod_ref: &PodRef,
        source: SourceKind,
        pod: &Arc<Pod>,
        wait: &WaitingFor,
        decision: Decision,
    ) {
        let now = self.ctx.clock.wall();
        let view = View {
            pod_ref: pod_ref.clone(),
            source,
            pod: Arc::clone(pod),
            status: None,
            deletion: pod.metadata.deletion_timestamp.clone(),
            worker: "",
            is_removed: false,
            mirror_uid: String::new(),
            waiting: Some(view::Waiting::of(wait, now)),
            decision: Arc::new(decision),
            created_unix_ns: unix_ns(now),
            resource_version: String::new(),
            version: 0,
        };
        self.ctx.views.show(&pod_ref.uid, view);
    }

    // The Node may have been labelled for this very pod, and the watch of it be behind that of pods.
    fn look_again(&mut self, uid: PodUid, unsure: PendingAdmission, early: bool) {
        let is_first = self.pending_admission.is_empty();
        let what = if early {
            "the runtime has not said what it can do"
        } else {
            "the Node is read again, it does not match"
        };
        if let Ok(pod_ref) = pods::pod_ref(&unsure.pod) {
            self.show_waiting(&pod_ref, unsure.source, &unsure.pod, Waiting::NotAdmitted { what });
        }
        if pods::is_static(&unsure.pod) {
            self.ctx.static_pod_gate.register(&uid);
        }
        self.pending_admission.insert(uid, unsure);
        if !is_first {
            return;
        }
        let (admission, bell) = (Arc::clone(&self.admission), Arc::clone(&self.node_read));
        quintlet_kit::task::spawn("read-node", async move {
            if early {
                admission.runtime_known().await;
            }
            let read = tokio::time::timeout(NODE_READ, admission.refresh()).await;
            tracing::debug!(?read, "node read for a pod that it does not seem to match");
            bell.notify_one();
        });
    }

    fn admit_pending(&mut self) {
        // Who came first has the first choice of the room.
        let mut unsure: Vec<PendingAdmission> =
            std::mem::take(&mut self.pending_admission).into_values().collect();
        unsure.sort_by_key(|unsure| creation_time(&unsure.pod));
        for PendingAdmission { source, pod } in unsure {
            let Ok(pod_ref) = pods::pod_ref(&pod) else { continue };
            if self.draining && source != SourceKind::Api {
                self.ctx.views.hide(&pod_ref.uid);
                continue;
            }
            let admitted = self.admit(&pod);
            if self.is_early(&admitted) {
                self.look_again(pod_ref.uid, PendingAdmission { source, pod }, true);
            } else {
                self.take(pod_ref, source, pod, admitted);
            }
        }
    }

    fn take(
        &mut self,
        pod_ref: PodRef,
        source: SourceKind,
        pod: Arc<Pod>,
        admitted: Result<Vec<Victim>, Rejection>,
    ) {
        let (rejected, after) = match admitted {
            Ok(after) => (None, after),
            Err(rejection) => {
                self.ctx.metrics.pod_rejected(&rejection.reason);
                (Some(rejection), Vec::new())
            }
        };
        if source == SourceKind::Api && rejected.is_none() {
            self.ctx.metrics.start_latency.pod_accepted(&pod_ref.uid, &pod);
        }
        let key = (pod_ref.namespace.to_string(), pod_ref.name.to_string());
        let mirror = self.mirrors.get(&key).cloned();
        if rejected.is_none() && !is_ending(&pod) {
            self.ctx.allocations.allocate(&pod_ref.uid, &pod);
            if pods::is_static(&pod) {
                self.ctx.static_pod_gate.register(&pod_ref.uid);
            }
        }
        let desired = Desired { pod, source, mirror, removed: false, rejected, after };
        self.spawn(pod_ref, desired, None, false);
    }

    // Those that go first, or why the node does not take it.
    fn admit(&self, pod: &Pod) -> Result<Vec<Victim>, Rejection> {
        if is_ending(pod) {
            return Ok(Vec::new());
        }
        let others = self.active(None);
        let others: Vec<&Pod> = others.iter().map(AsRef::as_ref).collect();
        match self.admission.admit(pod, &others) {
            AdmitResult::Admit => Ok(Vec::new()),
            AdmitResult::Reject(rejection) => Err(rejection),
            AdmitResult::Preempt(short) => {
                let victims = preempt::pods_to_preempt(pod, &others, &short)
                    .map_err(|e| Rejection { reason: UNEXPECTED.to_owned(), message: e.to_string() })?;
                Ok(victims.into_iter().filter_map(|v| self.preempt(v, pod)).collect())
            }
        }
    }

    // Pods that have room here, with what was allocated to them.
    fn active(&self, but: Option<&PodUid>) -> Vec<Arc<Pod>> {
        self.pods
            .iter()
            .filter(|(uid, entry)| {
                let d = entry.desired.borrow();
                Some(*uid) != but && !d.removed && d.rejected.is_none() && !self.is_over(uid)
            })
            .map(|(_, entry)| Arc::clone(&entry.desired.borrow().pod))
            .collect()
    }

    // Ends a victim, and wakes who waits for its room.
    fn preempt(&self, victim: &Pod, by: &Pod) -> Option<Victim> {
        let victim_ref = pods::pod_ref(victim).ok()?;
        let by = pods::pod_ref(by).ok()?.uid;
        let message = preempt::PREEMPTED_MESSAGE;
        self.ctx.events.pod(victim, EventType::Warning, preempt::PREEMPTING, message, "");
        let kill = KillPodOptions {
            evict: true,
            killed_as: Some(KillOverride {
                cause: KillCause::Preempting,
                message: message.to_owned(),
                disruption: Some(preempt::DISRUPTION_MESSAGE.to_owned()),
            }),
            ..KillPodOptions::default()
        };
        let limit = grace::kill_timeout(pods::spec(victim).termination_grace_period_seconds);
        let until = self.ctx.clock.boot().saturating_add(limit);
        let uid = victim_ref.uid.clone();
        let (ctx, victim) = (Arc::clone(&self.ctx), victim.clone());
        let work = PodWork::of(&victim_ref);
        let kill_victim = async move {
            let facts = PodFacts::of(&victim, victim_ref.full_name());
            if let Err(e) = ctx.pod_workers.kill(&victim_ref.uid, facts, kill).await {
                tracing::warn!(pod.uid = %victim_ref.uid, error = %e, "a preempted pod is not waited for any more");
                let text = "Container runtime did not kill the pod within specified grace period.";
                ctx.events.pod(&victim, EventType::Warning, "ExceededGracePeriod", text, "");
            }
            ctx.wakes.wake(&by);
        };
        let ctx = Arc::clone(&self.ctx);
        quintlet_kit::task::spawn("preempt", async move {
            let _ = ctx.contained(&work, Box::pin(kill_victim)).await;
        });
        Some(Victim { uid, until })
    }

    fn is_over(&self, uid: &PodUid) -> bool {
        self.ctx.pod_workers.read(|w| w.is_known_terminated(uid))
    }

    fn mirror(&mut self, op: PodOperation, mirror: Arc<Pod>) {
        let Ok(mirror_ref) = pods::pod_ref(&mirror) else { return };
        let key = (mirror_ref.namespace.to_string(), mirror_ref.name.to_string());
        let now = match op {
            PodOperation::Remove => {
                self.mirrors.remove(&key);
                None
            }
            PodOperation::Add | PodOperation::Update | PodOperation::Delete | PodOperation::Reconcile => {
                self.mirrors.insert(key.clone(), Arc::clone(&mirror));
                Some(mirror)
            }
        };
        for entry in self.pods.values() {
            let is_it = {
                let d = entry.desired.borrow();
                pods::is_static(&d.pod)
                    && d.pod.metadata.namespace.as_deref() == Some(&key.0)
                    && d.pod.metadata.name.as_deref() == Some(&key.1)
            };
            if is_it {
                entry.desired.send_modify(|d| d.mirror.clone_from(&now));
            }
        }
    }

    fn sources_ready(&self) -> bool {
        self.stores.values().all(SourceStore::is_seen)
    }

    // A restored pod that its source no longer names has been removed meanwhile.
    fn drop_unnamed(&mut self) {
        for (uid, entry) in self.pods.iter_mut().filter(|(_, e)| e.restored) {
            let source = entry.desired.borrow().source;
            if self.stores.get(&source).is_none_or(SourceStore::is_seen) {
                entry.restored = false;
                self.ctx.pod_workers.step(Input::Remove(uid.clone()));
                entry.desired.send_modify(|d| d.removed = true);
            }
        }
    }

    fn reap(&mut self) {
        let done: Vec<PodUid> =
            self.pods.iter().filter(|(_, e)| e.task.is_finished()).map(|(uid, _)| uid.clone()).collect();
        for uid in done {
            self.ctx.wakes.forget(&uid);
            let Some(entry) = self.pods.remove(&uid) else { continue };
            let desired = entry.desired.borrow().clone();
            if self.ctx.pod_workers.read(|w| w.is_known(&uid)) {
                // A worker that fell over is made anew, from the record: its pod is still wanted, or still to be ended.
                if self.ctx.containment.wait(&uid).is_none() {
                    tracing::error!(pod.uid = %uid, "pod worker exited unexpectedly, restarting");
                }
                self.ctx.pod_workers.step(Input::WorkerExited(uid.clone()));
                if let Ok(pod_ref) = pods::pod_ref(&desired.pod) {
                    let record = self.ctx.state.read(&uid);
                    let desired = Desired { after: Vec::new(), ..desired };
                    self.spawn(pod_ref, desired, record, entry.restored);
                }
                continue;
            }
            self.resizes.drop(&uid);
            self.resizes.retry_soon();
            self.ctx.allocations.remove(&uid);
            tracing::info!(pod.uid = %uid, "pod is gone from this node");
        }
        self.orphans.retain(|_, task| !task.is_finished());
        self.add_unknown();
    }

    // A pod that no worker knows: its UID was used before, and that life is over now.
    fn add_unknown(&mut self) {
        if self.draining {
            return;
        }
        let unknown: Vec<(SourceKind, Arc<Pod>)> = self
            .stores
            .iter()
            .flat_map(|(source, store)| store.pods().map(|pod| (*source, Arc::clone(pod))))
            .filter(|(source, pod)| {
                pod.metadata.uid.as_deref().and_then(|uid| PodUid::parse(uid).ok()).is_some_and(|uid| {
                    !self.held.contains_key(&uid)
                        && (*source != SourceKind::Api || self.again.contains(&uid))
                        && !self.pods.contains_key(&uid)
                        && !self.ctx.pod_workers.read(|w| w.is_known(&uid))
                })
            })
            .collect();
        for (source, pod) in unknown {
            self.change(source, PodOperation::Add, pod);
        }
    }
}
