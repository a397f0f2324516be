//! The owner of one pod: the only writer of its entry.
//!
//! Requests wait in a mailbox until an inspection begins, and share it. A request that arrives during an
//! inspection waits for the next one. The owner ends when the pod is gone and no expected change is pending.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::backoff::Backoff;
use quintlet_kit::clock::deadline_after;
use quintlet_kit::contain::{Work as PodWork, contained};
use quintlet_kit::failpoint;
use quintlet_model::ids::{PodRef, PodUid};
use quintlet_model::runtime::{Cursor, SharedPodRuntime};
use quintlet_telemetry::propagate;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::{Instrument as _, Span};

use crate::core::Core;
use crate::entry::{Inspection, InspectionEffect, PodState, effect_shows, is_visible};
use crate::expect::{first_look, next_pause, wait_limit};
use crate::inspect::{Targets, inspect};
use crate::mailbox::{InspectionReply, InspectionRequest, Mailbox, Work};
use crate::metrics::InspectionLabel;
use crate::traits::{HintKind, ReadError};

/// Pause before a failed inspection is retried, as long as the kubelet's relist period.
const RETRY: Duration = Duration::from_secs(1);

/// Limit of an inspection before the first snapshot, which waits for every pod. A pod whose inspection hangs
/// is in it with an error.
const FIRST_LIMIT: Duration = Duration::from_secs(5);

struct Expectation {
    pause: Option<Duration>,
    due: Instant,
    until: Option<Instant>,
    /// The record has had the object since the hint.
    was_visible: bool,
}

type Expectations = HashMap<(String, HintKind), Expectation>;

/// Wait after a panic of an owner. Each further panic in a row doubles it, up to [`LONGEST_AFTER_PANIC`].
const AFTER_PANIC: Duration = Duration::from_secs(10);
const LONGEST_AFTER_PANIC: Duration = Duration::from_secs(3600);

impl Core {
    /// Adds a request to the mailbox of the pod, and spawns an owner if the pod has none.
    pub(crate) fn request_inspection(self: &Arc<Self>, uid: &PodUid, request: InspectionRequest) {
        let mut mailboxes = self.mailboxes.lock();
        let mailbox = mailboxes.entry(uid.clone()).or_insert_with(|| {
            let mailbox = Arc::<Mailbox>::default();
            let owner = supervise(Arc::clone(self), uid.clone(), Arc::clone(&mailbox));
            quintlet_kit::task::spawn("pod-owner", owner);
            mailbox
        });
        mailbox.work.lock().add(request);
        mailbox.wake.notify_one();
    }

    /// Like [`Self::request_inspection`]. The receiver gets the result of the first inspection that begins
    /// after this call.
    pub(crate) fn inspect(
        self: &Arc<Self>,
        uid: &PodUid,
        request: InspectionRequest,
    ) -> oneshot::Receiver<InspectionReply> {
        let (waiter, answer) = oneshot::channel();
        self.request_inspection(uid, InspectionRequest { waiter: Some(waiter), ..request });
        answer
    }
}

/// Runs owners of a pod until the pod is gone. After a panic the next owner continues from the published
/// entry, which stays unchanged during the wait.
pub(crate) async fn supervise(core: Arc<Core>, uid: PodUid, mailbox: Arc<Mailbox>) {
    let mut after_panic = Backoff::new(AFTER_PANIC, 2.0, LONGEST_AFTER_PANIC);
    loop {
        let pod = core.store.get(&uid).map(|record| record.pod.clone());
        let name = pod.map(|pod| format!("{}/{}", pod.namespace, pod.name)).unwrap_or_default();
        let owner = Box::pin(run(Arc::clone(&core), uid.clone(), Arc::clone(&mailbox)));
        if contained(PodWork::new(uid.as_str(), name), owner).await.is_ok() {
            return;
        }
        tokio::time::sleep(after_panic.next_wait()).await;
        // The requests of the panicked owner are lost.
        mailbox.work.lock().requested = true;
    }
}

/// Inspects the pod on request until it is gone.
pub(crate) async fn run(core: Arc<Core>, uid: PodUid, mailbox: Arc<Mailbox>) {
    let mut entry = PodState::published(uid.clone(), core.store.get(&uid), core.store.gone_at(&uid));
    let mut expectations = Expectations::new();
    let mut retry: Option<Instant> = None;
    loop {
        let (requested, urgent) = {
            let mut work = mailbox.work.lock();
            if !work.requested {
                let now = Instant::now();
                let unseen = |(id, kind): &(String, HintKind)| !effect_shows(*kind, id, entry.record());
                for expected in work.expects.drain(..).filter(unseen) {
                    expect(&mut expectations, expected, &entry, now);
                }
            }
            (work.requested, work.urgent)
        };
        let due = expectations.values().map(|e| e.due).chain(retry).min();
        if !requested && due.is_none_or(|due| due > Instant::now()) {
            match due {
                Some(due) => tokio::select! {
                    // Both only cause another look; a dropped one loses nothing.
                    () = mailbox.wake.notified() => {}
                    () = tokio::time::sleep_until(due) => {}
                },
                None if entry.record().is_none() && core.retire(&uid, &mailbox) => return,
                None => mailbox.wake.notified().await,
            }
            continue;
        }
        let by_relist = requested && !urgent && expectations.is_empty();
        let lane = if by_relist {
            tokio::select! {
                lane = core.relist_inspections.acquire() => lane.ok(),
                // An urgent request may have arrived, which does not wait for this permit.
                () = mailbox.wake.notified() => continue,
            }
        } else {
            None
        };
        let Ok(slot) = core.inspections.acquire().await else { return };
        // The inspection begins here: later requests wait for the next one.
        let work = std::mem::take(&mut *mailbox.work.lock());
        let now = Instant::now();
        for expected in &work.expects {
            expect(&mut expectations, expected.clone(), &entry, now);
        }
        let span = inspection_span(&uid, &entry);
        propagate::set_parent(&span, &work.trace);
        // Boxed, since thousands of owners are idle.
        let inspection =
            Box::pin(inspect_once(&core, &mut entry, &uid, &work, &expectations).instrument(span.clone()));
        let answer = inspection.await;
        if let Err(error) = &answer {
            propagate::record_error(&span, &error.to_string());
        }
        drop(span);
        drop((slot, lane));
        retry = answer.is_err().then(|| deadline_after(Instant::now(), RETRY));
        let removed = core.removed.lock().take_visible(entry.record());
        for removed in removed {
            expect(&mut expectations, (removed, HintKind::Deleted), &entry, Instant::now());
        }
        update_expectations(&mut expectations, &entry, answer.is_ok());
        for waiter in work.waiters {
            // The receiver may have been dropped; that is not an error.
            let _ = waiter.send(answer.clone());
        }
    }
}

fn inspection_span(uid: &PodUid, entry: &PodState) -> Span {
    let pod = entry.record().map(|record| &record.pod);
    tracing::info_span!(
        "inspect",
        k8s.pod.uid = %uid,
        k8s.namespace.name = pod.map(|pod| &*pod.namespace),
        k8s.pod.name = pod.map(|pod| &*pod.name),
    )
}

/// An inspection in progress, until this is dropped.
struct InFlight<'a> {
    core: &'a Core,
    ticket: u64,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.core.ends(self.ticket);
    }
}

/// Inspects the pod once, applies the result and publishes it.
async fn inspect_once(
    core: &Core,
    entry: &mut PodState,
    uid: &PodUid,
    work: &Work,
    expectations: &Expectations,
) -> InspectionReply {
    let targets = targets(entry, work, expectations);
    let began = Instant::now();
    let observed = core.clock.boot();
    let ticket = core.begins();
    let limit = if core.store.is_primed() { core.periods.call } else { FIRST_LIMIT.min(core.periods.call) };
    let in_flight = InFlight { core, ticket };
    failpoint::work!("pod inspected");
    let found = match tokio::time::timeout(limit, inspect(core.runtime.as_ref(), uid, targets)).await {
        Ok(found) => found,
        Err(_) => Err(ReadError::Timeout { what: "pod inspection", limit }),
    };
    drop(in_flight);
    core.metrics.inspect_duration.observe(began.elapsed().as_secs_f64());
    let result = if found.is_ok() { "ok" } else { "error" };
    core.metrics.inspections.get_or_create(&InspectionLabel { result, cause: work.cause() }).inc();
    let failure = found.as_ref().err().cloned();
    if let Some(error) = &failure {
        log_new_failure(entry, uid, work, error);
    }
    let before = entry.record().map(|r| r.pod.clone());
    let ended = core.clock.boot();
    let effect = entry.apply(Inspection {
        ticket,
        began: observed,
        ended,
        pod: work.pod.as_ref(),
        // Also an invalid answer shows that the runtime has the pod.
        listed: if failure.as_ref().is_some_and(ReadError::is_data) { Some(ended) } else { work.listed },
        found: found.map_err(|e| e.to_string()),
    });
    let reply = publish(core, entry, uid, effect, before, ended);
    match failure {
        // An invalid answer is an error of the pod, in its record.
        Some(error) if !error.is_data() => Err(error),
        Some(_) | None => Ok(reply),
    }
}

/// Returns the sandboxes and containers to inspect. The pod is listed if one of them may be unknown.
fn targets(entry: &PodState, work: &Work, expectations: &Expectations) -> Targets {
    let mut targets = Targets {
        sandboxes: work.sandboxes.clone(),
        containers: work.containers.clone(),
        list: work.list || (entry.record().is_none() && !work.complete),
    };
    if let Some(record) = entry.record() {
        targets.sandboxes.extend(record.sandboxes.iter().map(|s| s.id.to_string()));
        let containers = record.containers.iter().map(|c| (c.id.to_string(), c.sandbox_id.to_string()));
        targets.containers.extend(containers);
        targets.list |= record.error.is_some();
    }
    let unknown = |id: &String| !targets.sandboxes.contains(id) && !targets.containers.contains_key(id);
    let hinted = expectations.keys().filter(|(_, kind)| *kind != HintKind::Deleted).map(|(id, _)| id);
    targets.list |= work.ids.iter().chain(hinted).any(unknown);
    targets
}

/// Logs an error that the record of the pod does not have yet.
fn log_new_failure(entry: &PodState, uid: &PodUid, work: &Work, error: &ReadError) {
    let record = entry.record();
    if record.is_some_and(|r| r.error.as_ref() == Some(&error.to_string())) {
        return;
    }
    let pod = record.map(|r| &r.pod).or(work.pod.as_ref());
    let pod = pod.map(|p| format!("{}/{}", p.namespace, p.name)).unwrap_or_default();
    tracing::warn!(pod.name = pod, pod.uid = %uid, %error, "inspect pod failed");
}

/// Publishes the result of an inspection. Returns the state of the pod, if there is one, and its position.
/// `before` is the pod of the record before the inspection.
fn publish(
    core: &Core,
    entry: &mut PodState,
    uid: &PodUid,
    effect: InspectionEffect,
    before: Option<PodRef>,
    ended: Duration,
) -> (Option<SharedPodRuntime>, Cursor) {
    let trace = propagate::current_trace();
    match effect {
        InspectionEffect::Changed(changes) => {
            let placed = entry.place(|record| core.store.publish(record, trace.clone()));
            if let Some(record) = &placed {
                core.readers.announce(changes, &record.pod, record.cursor, trace.as_ref());
            }
            let cursor = placed.as_ref().map_or_else(|| core.store.cursor(), |record| record.cursor);
            (placed, cursor)
        }
        InspectionEffect::Gone(changes) => {
            let cursor = core.store.remove(uid, ended, trace.clone());
            if let Some(pod) = before {
                core.readers.announce(changes, &pod, cursor, trace.as_ref());
            }
            (None, cursor)
        }
        InspectionEffect::Same => {
            let seen = entry.shared();
            if let Some(record) = &seen {
                core.store.touch(Arc::clone(record));
            }
            (seen, core.store.cursor())
        }
        InspectionEffect::Stale | InspectionEffect::Nothing => (core.store.get(uid), core.store.cursor()),
    }
}

fn expect(expectations: &mut Expectations, expected: (String, HintKind), entry: &PodState, now: Instant) {
    let delay = first_look(expected.1).unwrap_or_default();
    let due = deadline_after(now, delay);
    let until = wait_limit(expected.1).map(|limit| deadline_after(due, limit));
    let pause = Some(delay).filter(|delay| !delay.is_zero());
    let was_visible = is_visible(&expected.0, entry.record());
    expectations.insert(expected, Expectation { pause, due, until, was_visible });
}

/// Drops expectations that are met or expired, and schedules the next look for the others. `answered` is
/// false after a failed inspection, which does not show that an object is gone.
fn update_expectations(expectations: &mut Expectations, entry: &PodState, answered: bool) {
    let now = Instant::now();
    expectations.retain(|(id, kind), e| {
        let visible = is_visible(id, entry.record());
        // The runtime has an object before it exits, so one that is in no list afterwards is gone.
        let is_exit = matches!(kind, HintKind::Exiting | HintKind::Exited);
        let gone = is_exit && answered && !visible && (e.was_visible || e.due <= now);
        if gone || effect_shows(*kind, id, entry.record()) || e.until.is_some_and(|until| now >= until) {
            return false;
        }
        e.was_visible |= visible;
        if e.due <= now {
            let pause = next_pause(e.pause);
            e.pause = Some(pause);
            e.due = deadline_after(now, pause);
        }
        true
    });
}
