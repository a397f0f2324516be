//! Schedules status writes: the newest status of each pod, one write at a time per pod, many pods
//! concurrently.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use quintlet_kit::clock::Clock;
use quintlet_kit::contain::{Work, contained};
use quintlet_kit::{failpoint, queue};
use quintlet_model::ids::PodUid;
use quintlet_telemetry::propagate;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;
use tracing::{Instrument, debug, info, info_span, warn};

use crate::api::{ApiClient, ApiFailure};
use crate::gate::Gate;
use crate::metrics::Metrics;
use crate::status::normalize::{normalize, seconds};
use crate::status::{is_terminal, is_true, phase};
use crate::update::{Ack, Stamp, Update, UpdateOutcome};
use crate::write::{self, AttemptOutcome, Memory, Room};

/// Concurrent writes. More than an API server nearby needs for the limit of writes per second; with HTTP/1.1
/// each takes a connection.
const IN_FLIGHT: usize = 16;

/// Capacity in pods: far more than a node runs. A pod takes a few KiB.
const PODS: usize = 4096;

/// Time after which the streams are ended if an update was turned away because so many pods are known.
/// pod-sync then sends every status again, and which pods it has, so that pods that it no longer has make
/// room.
const AFTER_FULL: Duration = Duration::from_secs(10);

/// Acks that are queued for one stream: several for each pod of a full node. A slower stream is ended.
const ACKS: usize = 4096;

/// Name of their queue.
const ACK_QUEUE: &str = "status-acks";

/// Pauses after failed writes of one pod: 50 ms, doubled up to 1 s.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Pauses after writes of one pod that the API server refused: 10 s, doubled up to two minutes. A newer
/// update is tried at once.
const AFTER_REFUSAL: Duration = Duration::from_secs(10);
const LONGEST_AFTER_REFUSAL: Duration = Duration::from_secs(120);

/// Longest text of a refusal in an ack, in bytes. Policies and webhooks choose the text.
const REFUSAL_TEXT: usize = 1024;

/// Longest wait of an update that changes only the observed generation of a pod that is being deleted: the
/// default terminationGracePeriodSeconds. The statuses of a pod that stops within it are written once.
pub const DEFERRAL: Duration = Duration::from_secs(30);

/// Wait after a write that panicked. Each further panic in a row doubles it, up to [`LONGEST_AFTER_PANIC`].
const AFTER_PANIC: Duration = Duration::from_secs(10);
const LONGEST_AFTER_PANIC: Duration = Duration::from_secs(3600);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lane {
    Urgent,
    Routine,
}

/// The state of one pod.
#[derive(Default)]
struct Entry {
    /// The newest pending update, and the time since which an update is pending.
    waiting: Option<(Update, Instant)>,
    /// The update being written.
    writing: Option<Stamp>,
    /// The queue that has the pod. An entry in the other queue is stale.
    queued: Option<Lane>,
    memory: Option<Memory>,
    room: Room,
    done: Option<(Stamp, UpdateOutcome)>,
    failures: u32,
    /// Refused attempts in a row, of any update.
    refusals: u32,
    /// Number of the last attempt. The retry timer of an earlier attempt is obsolete.
    attempt: u64,
    /// The time of the first update since the last write that was deferred ([`DEFERRAL`]).
    deferred: Option<Instant>,
    /// The pod is removed when its write has ended.
    forgotten: bool,
}

impl Entry {
    fn newest(&self) -> Option<Stamp> {
        let waiting = self.waiting.as_ref().map(|(u, _)| u.stamp);
        waiting.max(self.writing).max(self.done.as_ref().map(|(s, _)| *s))
    }

    /// Returns the lane of an update. The first Ready and the end of a pod are urgent.
    fn lane(&self, update: &Update) -> Lane {
        let known = self.memory.as_ref().map_or(&*update.base, Memory::status);
        let first_ready = is_true(&update.desired, "Ready") && !is_true(known, "Ready");
        let ends = is_terminal(phase(&update.desired)) && !is_terminal(phase(known));
        if first_ready || ends || (update.finished && update.deleting) { Lane::Urgent } else { Lane::Routine }
    }
}

#[derive(Default)]
struct State {
    pods: HashMap<PodUid, Entry>,
    urgent: VecDeque<PodUid>,
    routine: VecDeque<PodUid>,
    in_flight: usize,
    /// The highest epoch of pod-sync so far.
    epoch: u64,
    listeners: Vec<mpsc::Sender<Ack>>,
    /// An update was turned away, and the streams will be ended.
    is_full: bool,
}

struct Shared {
    /// `None` in standalone mode.
    api: Option<ApiClient>,
    clock: Clock,
    state: Mutex<State>,
    gate: Gate,
    idle: Notify,
    metrics: Metrics,
    deferral: Duration,
    /// Pods that may be known at once.
    capacity: usize,
}

/// Writes updates. Clones share the state.
#[derive(Clone)]
pub struct Reporter {
    shared: Arc<Shared>,
}

impl Reporter {
    /// Creates a reporter. Without a client every update is acked with [`UpdateOutcome::NoApi`].
    #[must_use]
    pub fn new(api: Option<ApiClient>, clock: Clock, metrics: Metrics) -> Self {
        Self::with_deferral(api, clock, metrics, DEFERRAL)
    }

    /// Creates a reporter as [`Self::new`] does, with another limit in place of [`DEFERRAL`].
    #[must_use]
    pub fn with_deferral(api: Option<ApiClient>, clock: Clock, metrics: Metrics, deferral: Duration) -> Self {
        Self::with_limits(api, clock, metrics, deferral, PODS)
    }

    /// Creates a reporter as [`Self::with_deferral`] does, which knows at most `capacity` pods at once.
    #[must_use]
    pub fn with_limits(
        api: Option<ApiClient>,
        clock: Clock,
        metrics: Metrics,
        deferral: Duration,
        capacity: usize,
    ) -> Self {
        let shared = Shared {
            api,
            clock,
            state: Mutex::default(),
            gate: Gate::default(),
            idle: Notify::new(),
            metrics,
            deferral,
            capacity,
        };
        let shared = Arc::new(shared);
        let weak = Arc::downgrade(&shared);
        queue::register("pod-statuses", capacity, move || Some(weak.upgrade()?.state.lock().pods.len()));
        Self { shared }
    }

    /// Returns the pending updates, and a receiver of acks. A receiver that is too slow is closed.
    #[must_use]
    pub fn listen(&self) -> (Vec<(PodUid, Stamp)>, mpsc::Receiver<Ack>) {
        let (sender, receiver) = queue::channel(ACK_QUEUE, ACKS);
        let mut state = self.shared.state.lock();
        let held = state.pods.iter().filter_map(|(uid, entry)| {
            let stamp = entry.waiting.as_ref().map(|(u, _)| u.stamp).or(entry.writing)?;
            Some((uid.clone(), stamp))
        });
        let held = held.collect();
        state.listeners.retain(|l| !l.is_closed());
        state.listeners.push(sender);
        (held, receiver)
    }

    /// Accepts an update. Replaces a pending one of the same pod.
    pub fn submit(&self, mut update: Update) {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        let (uid, stamp) = (update.uid.clone(), update.stamp);
        if shared.api.is_none() {
            return shared.acknowledge(&mut state, Ack { uid, stamp, verdict: UpdateOutcome::NoApi });
        }
        // Only one process owns the root directory, and each has a higher epoch than the one before: the
        // sender has ended, and what it sent is outdated.
        if stamp.epoch < state.epoch {
            let why = format!("owner epoch {} has been replaced by {}", stamp.epoch, state.epoch);
            return shared.acknowledge(&mut state, Ack { uid, stamp, verdict: UpdateOutcome::Refused(why) });
        }
        state.epoch = stamp.epoch;
        if !state.pods.contains_key(&uid) && state.pods.len() >= shared.capacity {
            let why = format!("more than {} pods are known", shared.capacity);
            if !std::mem::replace(&mut state.is_full, true) {
                warn!(pods = shared.capacity, "too many pods are known, further statuses wait");
                Shared::end_streams_later(Arc::clone(shared));
            }
            return shared.acknowledge(&mut state, Ack { uid, stamp, verdict: UpdateOutcome::Queued(why) });
        }
        let entry = state.pods.entry(uid.clone()).or_default();
        entry.forgotten = false;
        match entry.newest() {
            Some(newest) if stamp < newest => {
                debug!(pod.uid = %uid, "outdated status ignored");
                return;
            }
            Some(newest) if stamp == newest => {
                let seen = entry.memory.as_ref().map_or(0, Memory::version);
                if entry.writing == Some(stamp) {
                    return;
                }
                if let Some((_, verdict)) =
                    entry.done.as_ref().filter(|(s, _)| *s == stamp && update.base_version <= seen)
                {
                    let verdict = verdict.clone();
                    return shared.acknowledge(&mut state, Ack { uid, stamp, verdict });
                }
            }
            Some(_) | None => {}
        }
        normalize(&mut update.desired);
        let before = entry.waiting.take().filter(|_| entry.deferred.is_none());
        let since = before.map_or_else(Instant::now, |(_, since)| since);
        entry.waiting = Some((update, since));
        shared.enqueue(&mut state, &uid);
        Shared::pump(shared, &mut state);
    }

    /// Removes every pod that is not in the set.
    pub fn retain(&self, uids: &HashSet<PodUid>) {
        let mut state = self.shared.state.lock();
        state.pods.retain(|uid, entry| {
            if uids.contains(uid) {
                return true;
            }
            entry.waiting = None;
            entry.forgotten = true;
            entry.writing.is_some()
        });
        self.shared.metrics.pods.set(count(state.pods.len()));
    }

    /// Waits until no write is in flight.
    pub async fn idle(&self) {
        loop {
            let idle = self.shared.idle.notified();
            if self.shared.state.lock().in_flight == 0 {
                return;
            }
            idle.await;
        }
    }
}

fn count(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

impl Shared {
    fn acknowledge(&self, state: &mut State, ack: Ack) {
        self.metrics.acked(&ack.verdict);
        state.listeners.retain(|listener| match queue::offer(listener, ACK_QUEUE, ack.clone()) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Full(_)) => {
                warn!("report stream is too slow and ended");
                false
            }
            Err(mpsc::error::TrySendError::Closed(_)) => false,
        });
    }

    fn end_streams_later(self: Arc<Self>) {
        quintlet_kit::task::spawn("status-capacity", async move {
            tokio::time::sleep(AFTER_FULL).await;
            let mut state = self.state.lock();
            state.is_full = false;
            state.listeners.clear();
        });
    }

    fn enqueue(&self, state: &mut State, uid: &PodUid) {
        let Some(entry) = state.pods.get_mut(uid) else { return };
        let Some((update, _)) = entry.waiting.as_ref().filter(|_| entry.writing.is_none()) else { return };
        let lane = entry.lane(update);
        if entry.queued == Some(lane) || entry.queued == Some(Lane::Urgent) {
            return;
        }
        entry.queued = Some(lane);
        match lane {
            Lane::Urgent => state.urgent.push_back(uid.clone()),
            Lane::Routine => state.routine.push_back(uid.clone()),
        }
        self.metrics.pods.set(count(state.pods.len()));
    }

    /// Starts as many writes as allowed.
    fn pump(shared: &Arc<Self>, state: &mut State) {
        while state.in_flight < IN_FLIGHT {
            let (uid, lane) = if let Some(uid) = state.urgent.pop_front() {
                (uid, Lane::Urgent)
            } else if let Some(uid) = state.routine.pop_front() {
                (uid, Lane::Routine)
            } else {
                break;
            };
            let Some(entry) = state.pods.get_mut(&uid).filter(|e| e.queued == Some(lane)) else { continue };
            entry.queued = None;
            let Some((update, _)) = &entry.waiting else { continue };
            entry.writing = Some(update.stamp);
            state.in_flight = state.in_flight.saturating_add(1);
            let work = Arc::clone(shared).work(uid);
            quintlet_kit::task::spawn("status-write", work);
        }
        self::count_in_flight(shared, state);
    }

    async fn work(self: Arc<Self>, uid: PodUid) {
        self.gate.enter().await;
        let begun = {
            let mut state = self.state.lock();
            // An update that arrived while the gate was closed replaces the older one.
            state.pods.get_mut(&uid).and_then(|entry| {
                let (update, since) = entry.waiting.take()?;
                entry.writing = Some(update.stamp);
                let may_defer = entry.deferred.is_none_or(|first| first.elapsed() < self.deferral);
                Some((update, since, entry.memory.take(), entry.room, may_defer))
            })
        };
        let (Some(api), Some((update, since, mut memory, mut room, may_defer))) = (self.api.as_ref(), begun)
        else {
            return Self::ended(&self, &uid, None);
        };
        let span = info_span!(
            "write status",
            k8s.pod.uid = %uid,
            k8s.namespace.name = update.namespace,
            k8s.pod.name = update.name,
            version = update.stamp.version,
        );
        propagate::set_parent(&span, &update.trace);
        let now = seconds(self.clock.wall());
        let name = format!("{}/{}", update.namespace, update.name);
        let writing = Box::pin(async {
            failpoint::work!("write of a status");
            let write = write::write(api, &update, &mut memory, &mut room, may_defer, &now);
            write.instrument(span.clone()).await
        });
        let written = contained(Work::new(uid.as_str(), name), writing).await;
        let outcome = written.unwrap_or_else(|panic| {
            // The panic may have left the memory inconsistent.
            memory = None;
            AttemptOutcome::Later(ApiFailure::Panicked(panic.to_string()))
        });
        if let AttemptOutcome::Later(failure) = &outcome {
            propagate::record_error(&span, &failure.to_string());
        }
        drop(span);
        match &outcome {
            AttemptOutcome::Later(failure) if failure.is_of_server() => {
                self.gate.failed(failure.retry_after())
            }
            AttemptOutcome::Later(_) | AttemptOutcome::Done(_) => self.gate.answered(),
            AttemptOutcome::Deferred => {}
        }
        Self::ended(&self, &uid, Some(Attempt { update, since, memory, room, outcome }));
    }

    fn ended(shared: &Arc<Self>, uid: &PodUid, attempt: Option<Attempt>) {
        let mut state = shared.state.lock();
        let state = &mut *state;
        state.in_flight = state.in_flight.saturating_sub(1);
        if let Some(entry) = state.pods.get_mut(uid) {
            entry.writing = None;
            entry.attempt = entry.attempt.saturating_add(1);
            let number = entry.attempt;
            let (ack, pause) = match attempt {
                Some(attempt) => shared.settle(entry, attempt),
                None => (None, None),
            };
            let over = matches!(
                ack.as_ref().map(|a| &a.verdict),
                Some(UpdateOutcome::Gone | UpdateOutcome::Deleted)
            );
            if entry.waiting.is_none() && (entry.forgotten || over) {
                state.pods.remove(uid);
            }
            if let Some(ack) = ack {
                shared.acknowledge(state, ack);
            }
            match pause {
                Some(pause) => Self::resume_after(shared, uid.clone(), number, pause),
                None => shared.enqueue(state, uid),
            }
        }
        Self::pump(shared, state);
        if state.in_flight == 0 {
            shared.idle.notify_waiters();
        }
    }

    /// Records an attempt. Returns the ack, and the pause before the next attempt.
    fn settle(&self, entry: &mut Entry, attempt: Attempt) -> (Option<Ack>, Option<Duration>) {
        let Attempt { update, since, memory, room, outcome } = attempt;
        let (uid, stamp) = (update.uid.clone(), update.stamp);
        entry.memory = memory;
        entry.room = room;
        match outcome {
            AttemptOutcome::Done(verdict) => {
                (entry.failures, entry.refusals) = (0, 0);
                entry.deferred = None;
                entry.done = Some((stamp, verdict.clone()));
                self.metrics.sync_seconds.observe(since.elapsed().as_secs_f64());
                match &verdict {
                    UpdateOutcome::Deleted => {
                        info!(pod.uid = %uid, pod = %update.name, "deleted pod from the API server")
                    }
                    verdict => debug!(pod.uid = %uid, ?verdict, "handled status"),
                }
                (Some(Ack { uid, stamp, verdict }), None)
            }
            AttemptOutcome::Later(failure) => {
                entry.failures = entry.failures.saturating_add(1);
                entry.refusals = if failure.is_refusal() { entry.refusals.saturating_add(1) } else { 0 };
                self.metrics.failed(failure.code());
                // A newer update may not be refused.
                let is_replaced = entry.waiting.is_some() && failure.is_refusal();
                if entry.waiting.is_none() && !entry.forgotten {
                    entry.waiting = Some((update, since));
                }
                let first = entry.failures == 1;
                if first || entry.refusals == 1 {
                    warn!(pod.uid = %uid, %failure, "write status failed, retrying");
                }
                // An update that was acked before may be of an earlier pod-sync: a declined write is acked
                // each time.
                let verdict = if failure.is_declined() {
                    Some(UpdateOutcome::Retrying(cut(failure.to_string())))
                } else {
                    first.then(|| UpdateOutcome::Queued(failure.to_string()))
                };
                let ack = verdict.map(|verdict| Ack { uid, stamp, verdict });
                (ack, (!is_replaced).then(|| pause(entry.failures, entry.refusals, &failure)))
            }
            AttemptOutcome::Deferred => {
                if entry.waiting.is_some() || entry.forgotten {
                    return (None, None);
                }
                debug!(pod.uid = %uid, "deferred status of a pod that is being deleted");
                entry.waiting = Some((update, since));
                let first = *entry.deferred.get_or_insert_with(Instant::now);
                (None, Some(self.deferral.saturating_sub(first.elapsed())))
            }
        }
    }

    /// Repeats the write after `pause`, unless there is an attempt after that with this `number` until then.
    fn resume_after(shared: &Arc<Self>, uid: PodUid, number: u64, pause: Duration) {
        let shared = Arc::clone(shared);
        quintlet_kit::task::spawn("status-retry", async move {
            tokio::time::sleep(pause).await;
            let mut state = shared.state.lock();
            if state.pods.get(&uid).is_none_or(|entry| entry.attempt != number) {
                return;
            }
            shared.enqueue(&mut state, &uid);
            Self::pump(&shared, &mut state);
        });
    }
}

fn count_in_flight(shared: &Shared, state: &State) {
    shared.metrics.in_flight.set(count(state.in_flight));
}

struct Attempt {
    update: Update,
    since: Instant,
    memory: Option<Memory>,
    room: Room,
    outcome: AttemptOutcome,
}

/// Cuts a text to [`REFUSAL_TEXT`].
fn cut(text: String) -> String {
    quintlet_model::text::shortened(text, REFUSAL_TEXT)
}

/// Returns the pause before the next attempt. `failures` and `refusals` are those in a row, this one
/// included.
fn pause(failures: u32, refusals: u32, failure: &ApiFailure) -> Duration {
    if failure.is_refusal() {
        let doubled = AFTER_REFUSAL.saturating_mul(2_u32.saturating_pow(refusals.saturating_sub(1)));
        return doubled.min(LONGEST_AFTER_REFUSAL);
    }
    if let ApiFailure::Panicked(_) = failure {
        let doubled = AFTER_PANIC.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1)));
        return doubled.min(LONGEST_AFTER_PANIC);
    }
    let doubled = FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1).min(10)));
    failure.retry_after().unwrap_or_else(|| doubled.min(LONGEST_PAUSE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::ErrorResponse;

    #[test]
    fn each_failure_has_its_pause_and_a_refusal_a_long_one() {
        let answer = |code| ErrorResponse { code: Some(code), message: "no".to_owned() };
        let (invalid, refused) = (ApiFailure::Invalid("no".to_owned()), ApiFailure::Refused(answer(400)));
        let busy = ApiFailure::TooMany { retry_after: Some(Duration::from_secs(7)) };
        // (failures, refusals, failure) and the pause in milliseconds.
        let cases = [
            (1, 1, invalid.clone(), 10_000),
            (2, 2, refused.clone(), 20_000),
            (4, 4, refused, 80_000),
            (5, 5, invalid.clone(), 120_000),
            (u32::MAX, u32::MAX, invalid.clone(), 120_000),
            // An outage before the refusal does not lengthen its pause.
            (1000, 1, invalid, 10_000),
            (1, 0, ApiFailure::Denied(answer(403)), 50),
            (9, 0, ApiFailure::Denied(answer(403)), 1000),
            (1, 0, ApiFailure::Server(answer(500)), 50),
            (9, 0, ApiFailure::Unreachable("x".to_owned()), 1000),
            (9, 0, busy, 7000),
            (1, 0, ApiFailure::Panicked("x".to_owned()), 10_000),
        ];
        for (failures, refusals, failure, want) in cases {
            let got = pause(failures, refusals, &failure);
            assert_eq!(got, Duration::from_millis(want), "{failures} {refusals} {failure}");
        }
    }

    #[test]
    fn a_long_refusal_is_cut_on_a_character() {
        assert_eq!(cut("é".repeat(2000)).len(), REFUSAL_TEXT);
        assert_eq!(cut(format!("x{}", "é".repeat(2000))).len(), REFUSAL_TEXT - 1);
    }
}
