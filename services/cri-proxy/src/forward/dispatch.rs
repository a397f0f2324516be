//! Sends one call to the runtime: queue, fence, request, reply.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt as _;
use parking_lot::Mutex;
use quintlet_kit::clock::{Clock, bounded, deadline_after};
use quintlet_kit::contain::{self, Work, contained_request};
use quintlet_kit::failpoint;
use quintlet_model::outcome::Outcome;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Code;
use tracing::Span;

use super::call::{Call, MAX_REPLY, no_room, outcome_of, record_reply, too_large};
use super::exec_reply;
use super::upstreams::Upstreams;
use crate::budget::GrowingReservation;
use crate::fence::{Fence, FenceError, FencingToken};
use crate::lanes::{Lanes, Priority, Slot};
use crate::lists::{self, UnsupportedListStreams};
use crate::metrics::Metrics;
use crate::orphaned_tasks::OrphanedTasks;
use crate::policy::{Hold, Lane};
use crate::reply::{self, Reply};
use crate::upstream::SendError;

/// The method that is retried after orphaned tasks were killed.
const REMOVE_CONTAINER: &str = "RemoveContainer";

/// Counts a unary call in progress.
pub(super) struct InProgress<'a>(&'a watch::Sender<usize>);

impl Drop for InProgress<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n = n.saturating_sub(1));
    }
}

/// Queues calls and sends them to the runtime. The mutations among them pass the fence first.
pub(super) struct Dispatcher {
    pub(super) upstreams: Upstreams,
    orphaned_tasks: OrphanedTasks,
    /// Default time limit of a call.
    pub(super) timeout: Duration,
    pub(super) lanes: Lanes,
    pub(super) fence: Fence,
    pub(super) clock: Clock,
    pub(super) metrics: Metrics,
    pub(super) unsupported_streams: UnsupportedListStreams,
    /// Number of unary calls in progress.
    in_progress: watch::Sender<usize>,
}

impl Dispatcher {
    pub(super) fn new(
        upstreams: Upstreams,
        orphaned_tasks: OrphanedTasks,
        timeout: Duration,
        clock: Clock,
        metrics: Metrics,
    ) -> Self {
        Self {
            upstreams,
            orphaned_tasks,
            timeout,
            lanes: Lanes::default(),
            fence: Fence::default(),
            clock,
            metrics,
            unsupported_streams: UnsupportedListStreams::default(),
            in_progress: watch::Sender::new(0),
        }
    }

    /// Counts a call until the result is dropped.
    pub(super) fn begin(&self) -> InProgress<'_> {
        self.in_progress.send_modify(|n| *n = n.saturating_add(1));
        InProgress(&self.in_progress)
    }

    /// Completes when no unary call is in progress.
    pub(super) async fn wait_idle(&self) {
        // The sender exists as long as `self`.
        let _ = self.in_progress.subscribe().wait_for(|n| *n == 0).await;
    }

    pub(super) fn fenced(&self, method: &'static str, error: FenceError, queued: Duration) -> Reply {
        self.metrics.fenced(error.name());
        self.metrics.done(method, Outcome::NotDispatched, None);
        Reply::local(error.code(), format!("{method}: {error}"), Outcome::NotDispatched, queued)
    }

    // A panic ends this call only. Whether the runtime has executed it is unknown.
    pub(super) async fn run_contained(
        &self,
        work: Option<Work>,
        call: &Call,
        token: &Arc<Mutex<FencingToken>>,
    ) -> Reply {
        let ran = contained_request(work, self.run(call, Some(token))).await;
        ran.unwrap_or_else(|panic| {
            self.metrics.done(call.policy.method, Outcome::Unknown, None);
            let reply = Reply::panicked(&panic);
            record_reply(&Span::current(), &reply);
            reply
        })
    }

    /// Queues and sends a unary call. A call with a token is fenced again right before it is sent.
    pub(super) async fn run(&self, call: &Call, token: Option<&Arc<Mutex<FencingToken>>>) -> Reply {
        let _in_progress = self.begin();
        let row = call.policy;
        let arrived = Instant::now();
        let slot = self.queue(call, token).await;
        let queued = arrived.elapsed();
        self.metrics.waited(row.lane, queued);
        let fence = || match token {
            Some(token) => self.fence.check(*token.lock(), self.clock.boot()),
            None => Ok(()),
        };
        let span = Span::current();
        span.record("queued_ms", u64::try_from(queued.as_millis()).unwrap_or(u64::MAX));
        let slot = match slot.map(|slot| (slot, fence())) {
            Ok((slot, Ok(()))) => slot,
            Ok((_, Err(error))) | Err(QueueError::Fenced(error)) => {
                let reply = self.fenced(row.method, error, queued);
                record_reply(&span, &reply);
                return reply;
            }
            Err(QueueError::Full(full)) => {
                self.metrics.done(row.method, Outcome::NotDispatched, None);
                let message = full.to_string();
                return Reply::local(Code::ResourceExhausted, message, Outcome::NotDispatched, queued);
            }
        };
        let sent = Instant::now();
        let (in_flight, waiting) = (slot.in_flight, slot.waiting);
        let mut reply = self.send_with_slot(call, slot).await;
        if row.method == REMOVE_CONTAINER
            && reply.outcome == Outcome::RuntimeError
            && let Some(again) = self.retry_removal(call, token).await
        {
            reply = again;
        }
        reply.queued = queued;
        let latency = sent.elapsed();
        if row.lane == Lane::Start && matches!(reply.outcome, Outcome::Ok | Outcome::RuntimeError) {
            let limit = self.lanes.answered(row.method, latency, in_flight, waiting);
            self.metrics.mutation_limit.set(i64::try_from(limit).unwrap_or(i64::MAX));
        }
        let dispatched = reply.outcome != Outcome::NotDispatched;
        self.metrics.done(row.method, reply.outcome, dispatched.then_some(latency));
        record_reply(&span, &reply);
        reply
    }

    /// Kills orphaned tasks of the container, and sends the removal again. Returns none if there was no such
    /// task.
    async fn retry_removal(&self, call: &Call, token: Option<&Arc<Mutex<FencingToken>>>) -> Option<Reply> {
        let fence = || token.is_none_or(|t| self.fence.check(*t.lock(), self.clock.boot()).is_ok());
        let message = reply::unframe(&call.body).ok()?;
        if !fence() || !self.orphaned_tasks.kill_after_failed_removal(&message).await {
            return None;
        }
        self.metrics.lost_tasks.inc();
        let slot = self.queue(call, token).await.ok()?;
        if !fence() {
            return None;
        }
        Some(self.send_with_slot(call, slot).await)
    }

    pub(super) async fn queue(
        &self,
        call: &Call,
        token: Option<&Arc<Mutex<FencingToken>>>,
    ) -> Result<Slot, QueueError> {
        if token.is_some() {
            failpoint::work!("mutation queued");
        } else {
            failpoint::work!("read queued");
        }
        let is_critical = contain::current().is_some_and(|work| work.is_critical());
        let priority = Priority::of(call.policy.method, is_critical);
        let mut turn = pin!(self.lanes.enter(call.policy.lane, priority, call.info.registry.as_deref()));
        loop {
            let Some(deadline) = token.and_then(|t| t.lock().deadline) else {
                return turn.await.map_err(QueueError::Full);
            };
            let now = self.clock.boot();
            let Some(left) = deadline.checked_sub(now).filter(|left| !left.is_zero()) else {
                let late = now.saturating_sub(deadline);
                return Err(QueueError::Fenced(FenceError::DeadlinePassed { late }));
            };
            // Both arms may be dropped: the turn is only borrowed. A joined call may have extended the
            // deadline.
            tokio::select! {
                biased;
                slot = &mut turn => return slot.map_err(QueueError::Full),
                () = tokio::time::sleep(bounded(left)) => {}
            }
        }
    }

    async fn send_with_slot(&self, call: &Call, slot: Slot) -> Reply {
        let mut answer = pin!(self.send(call));
        if let Hold::AtMost(hold) = call.policy.lane.hold() {
            // The call is polled first, so that it is sent even with a hold of zero.
            tokio::select! {
                biased;
                reply = &mut answer => return reply,
                () = tokio::time::sleep(hold) => drop(slot),
            }
            return answer.await;
        }
        let reply = answer.await;
        drop(slot);
        reply
    }

    async fn send(&self, call: &Call) -> Reply {
        let Some(timeout) = call.timeout(self.timeout) else { return self.send_retrying(call, None).await };
        let deadline = deadline_after(Instant::now(), timeout);
        match tokio::time::timeout_at(deadline, self.send_retrying(call, Some(deadline))).await {
            Ok(reply) => reply,
            Err(_) => {
                let message = format!(
                    "the runtime did not answer {} within {} ms",
                    call.policy.method,
                    timeout.as_millis()
                );
                Reply::local(Code::DeadlineExceeded, message, Outcome::Unknown, Duration::ZERO)
            }
        }
    }

    async fn send_retrying(&self, call: &Call, deadline: Option<Instant>) -> Reply {
        match self.send_once(call, deadline).await {
            Ok(reply) => reply,
            // The call changes nothing, so it may be sent again.
            Err(SendError::Interrupted(first)) if call.policy.retry => {
                tracing::debug!(method = call.policy.method, error = %first, "call interrupted, retrying");
                self.send_once(call, deadline)
                    .await
                    .unwrap_or_else(|_| interrupted(call.policy.method, &first))
            }
            Err(error) => failed(call.policy.method, error),
        }
    }

    async fn send_once(&self, call: &Call, deadline: Option<Instant>) -> Result<Reply, SendError> {
        match (lists::list_methods(call.policy), call.short_output) {
            (Some(methods), _) => self.list_once(call, methods, deadline).await,
            (None, Some(max)) => exec_reply::exchange(&self.upstreams, call, max, deadline).await,
            (None, None) => self.exchange(call, call.policy.method, deadline, MAX_REPLY).await,
        }
    }

    /// Sends the call as `method`. Returns its reply, if it has at most `max` bytes.
    pub(super) async fn exchange(
        &self,
        call: &Call,
        method: &'static str,
        deadline: Option<Instant>,
        max: usize,
    ) -> Result<Reply, SendError> {
        let response = self.upstreams.send_as(call, method, deadline).await?;
        let (head, mut body) = response.into_parts();
        let mut reply = Reply::from_head(head.status, head.headers);
        let mut size = 0_usize;
        let mut held = GrowingReservation::default();
        while let Some(frame) = body.frame().await {
            match frame.map_err(SendError::Interrupted)?.into_data() {
                Ok(data) => {
                    size = size.saturating_add(data.len());
                    if size > max {
                        return Ok(too_large(method, max));
                    }
                    if let Err(full) = call.budget.reserve(&mut held, data.len()) {
                        return Ok(no_room(method, full));
                    }
                    reply.data.push(data);
                }
                Err(frame) => reply.trailers = frame.into_trailers().ok(),
            }
        }
        reply.held = held.finish();
        reply.outcome = outcome_of(method, &reply);
        Ok(reply)
    }
}

/// The reason why a call is not sent.
pub(super) enum QueueError {
    Full(crate::lanes::Full),
    Fenced(FenceError),
}

pub(super) fn failed(method: &str, error: SendError) -> Reply {
    match error {
        SendError::Interrupted(error) => interrupted(method, &error),
        SendError::NotSent(error) => {
            Reply::local(Code::Unavailable, error.to_string(), Outcome::NotDispatched, Duration::ZERO)
        }
    }
}

pub(super) fn interrupted(method: &str, error: &hyper::Error) -> Reply {
    let message = format!("the runtime went away during {method}: {error}");
    Reply::local(Code::Unavailable, message, Outcome::Unknown, Duration::ZERO)
}
