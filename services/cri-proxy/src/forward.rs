//! The path of one call: policy, fence, join, lane, runtime, trailers.
//!
//! Unary calls and lists are taken in whole and answered whole; other streams are passed on frame by frame. A mutation runs in a task
//! of its own, so that a caller that goes away cannot cut it in half.
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Request, Response};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use parking_lot::Mutex;
use quintlet_kit::clock::{Clock, bounded, deadline_after};
use quintlet_kit::contain::{self, Work, contained_request};
use quintlet_kit::failpoint;
use quintlet_kit::task;
use quintlet_model::outcome::{JOIN_ONLY_HEADER, Outcome};
use quintlet_telemetry::propagate;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tracing::{Instrument as _, Span, field};

use crate::budget::{Budget, Exhausted, Growing, Held};
use crate::ended::{Ended, Known};
use crate::facts::{self, Facts};
use crate::fence::{Fence, Refusal, Terms};
use crate::inflight::{Admission, Answer, InFlight};
use crate::lanes::{Lanes, Slot};
use crate::lists::{self, Lacking};
use crate::metrics::{Metrics, OTHER};
use crate::outcome;
use crate::policy::{self, Class, Deadline, Hold, Lane, Policy, Socket, Verdict};
use crate::repair::Repair;
use crate::reply::{self, Body, Frames, Reply};
use crate::upstream::{SendError, Upstream};

mod listing;
mod passing;

use passing::Passing;

pub use listing::{HELD, PACE};

/// A request may be this large: the CRI's own limit of 16 MiB and room for its frame.
const MAX_REQUEST: usize = (16 << 20) + 5;
/// A unary answer may be this large: containerd itself sends no larger one.
const MAX_ANSWER: usize = (16 << 20) + 5;

/// The one method whose failure the proxy can do something about.
const REMOVE_CONTAINER: &str = "RemoveContainer";
/// On the socket `sync` these are hooks, which must not run twice.
const EXEC_SYNC: &str = "ExecSync";

/// Everything calls share.
pub struct Forwarder {
    upstream: Upstream,
    /// Where the image service is, if not there as well.
    images: Option<Upstream>,
    /// The usual time a call may take.
    timeout: Duration,
    lanes: Lanes,
    fence: Fence,
    in_flight: InFlight,
    ended: Ended,
    clock: Clock,
    metrics: Metrics,
    repair: Repair,
    /// List streams the runtime does not have.
    lacking: Lacking,
    /// The bytes that the calls of each socket hold.
    budgets: [(Socket, Budget); Socket::ALL.len()],
    /// Unary calls being worked on.
    busy: watch::Sender<usize>,
    /// Cancelled when streams are to end.
    closing: CancellationToken,
}

/// One unary call being worked on.
struct Busy<'a>(&'a watch::Sender<usize>);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n = n.saturating_sub(1));
    }
}

impl std::fmt::Debug for Forwarder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Forwarder").field("upstream", &self.upstream).finish_non_exhaustive()
    }
}

/// One unary call, ready to be sent any number of times.
#[derive(Debug, Clone)]
pub struct Call {
    /// Its row.
    pub policy: &'static Policy,
    /// Metadata for the runtime.
    pub headers: HeaderMap,
    /// The body, frame prefix included.
    pub body: Bytes,
    /// What was read from it.
    pub facts: Facts,
    /// Where its answer is counted.
    pub budget: Budget,
    /// What its body holds of a budget.
    pub held: Held,
}

impl Call {
    /// Returns how long the call may take once it is sent, at most [`quintlet_kit::clock::FAR`]. The caller's own
    /// `grpc-timeout` goes before the table; `usual` is what the table adds a request's own seconds to.
    fn timeout(&self, usual: Duration) -> Option<Duration> {
        let timeout = reply::grpc_timeout(&self.headers).or(match self.policy.deadline {
            Deadline::Usual => Some(usual),
            Deadline::WithRequest { zero_is_none } => {
                let seconds = u64::try_from(self.facts.seconds.unwrap_or(0)).unwrap_or(0);
                (seconds > 0 || !zero_is_none).then(|| usual.saturating_add(Duration::from_secs(seconds)))
            }
            Deadline::CallerOnly => None,
        });
        timeout.map(bounded)
    }
}

impl Forwarder {
    /// A forwarder to the runtime at `upstream`, whose pods are in the containerd namespace `namespace`, and to an image
    /// service of its own if there is one; calls may usually take `timeout`, and those of a socket hold as many bytes as its `share`.
    #[must_use]
    pub fn new(
        upstream: Upstream,
        images: Option<Upstream>,
        namespace: &str,
        timeout: Duration,
        clock: Clock,
        metrics: Metrics,
        share: fn(Socket) -> usize,
    ) -> Self {
        let refused = &metrics.refused_bytes;
        let budgets = Socket::ALL.map(|socket| (socket, Budget::new(share(socket), refused.clone())));
        Self {
            repair: Repair::new(upstream.clone(), namespace),
            upstream,
            images,
            timeout,
            lanes: Lanes::default(),
            fence: Fence::default(),
            in_flight: InFlight::default(),
            ended: Ended::since(clock.boot()),
            clock,
            metrics,
            lacking: Lacking::default(),
            budgets,
            busy: watch::Sender::new(0),
            closing: CancellationToken::new(),
        }
    }

    /// Returns the budget of the calls of a socket.
    #[must_use]
    pub fn budget(&self, socket: Socket) -> Budget {
        let found = self.budgets.iter().find(|(of, _)| *of == socket);
        found.map(|(_, budget)| budget.clone()).expect("every socket has a budget")
    }

    /// Ends every stream passed through, with a status that says why.
    pub fn end_streams(&self) {
        self.closing.cancel();
    }

    /// Where a method is served.
    fn upstream_of(&self, path: &str) -> &Upstream {
        let is_image = path.strip_prefix('/').and_then(|p| p.split('/').next()) == Some(policy::IMAGE);
        self.images.as_ref().filter(|_| is_image).unwrap_or(&self.upstream)
    }

    /// Returns once no unary call is being worked on.
    pub async fn idle(&self) {
        // The sender lives as long as `self`.
        let _ = self.busy.subscribe().wait_for(|n| *n == 0).await;
    }

    /// The highest owner epoch seen.
    #[must_use]
    pub fn owner_epoch(&self) -> u64 {
        self.fence.highest()
    }

    /// What is counted.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Writes the lanes' depths to the metrics.
    pub fn observe_lanes(&self) {
        for lane in Lane::ALL {
            self.metrics.lane(lane, &self.lanes);
        }
    }

    /// Refuses a call that is on the wrong socket or that nobody knows.
    pub fn refuse(&self, socket: Socket, service: &str, method: &str, known: bool) -> Response<Body> {
        self.metrics.denied(label(service, method), socket);
        let why = if known { "is not allowed" } else { "is not known, hence not allowed," };
        let message = format!("{service}/{method} {why} on the socket {}", socket.name());
        tracing::warn!(socket = socket.name(), method = %format_args!("{service}/{method}"), "call refused");
        Reply::refused(Code::PermissionDenied, message, Outcome::NotDispatched, Duration::ZERO)
            .into_response()
    }

    /// Forwards one call as its verdict says.
    pub async fn forward(self: &Arc<Self>, socket: Socket, request: Request<Incoming>) -> Response<Body> {
        let (head, body) = request.into_parts();
        let path = head.uri.path();
        let Some((service, method)) = policy::split_path(path) else {
            let message = format!("{path:?} names no method");
            return Reply::refused(Code::Unimplemented, message, Outcome::NotDispatched, Duration::ZERO)
                .into_response();
        };
        let (row, lane) = match policy::verdict(socket, service, method) {
            Verdict::Forward(row) => (Some(row), Some(row.lane)),
            Verdict::Passthrough => (None, None),
            Verdict::WrongSocket | Verdict::Own => return self.refuse(socket, service, method, true),
            Verdict::NotKnown => return self.refuse(socket, service, method, false),
        };
        let span = span(service, method, socket, &head.headers);
        let headers = reply::forwardable(&head.headers);
        let twins = row.and_then(lists::twins).filter(|twins| twins.streamed);
        let work = async {
            match (row, twins) {
                (Some(row), Some(twins)) => self.list_stream(socket, row, twins, headers, body).await,
                (Some(row), None) if row.class != Class::Stream => {
                    self.unary(socket, row, &head.headers, headers, body).await.into_response()
                }
                (Some(_) | None, _) => self.stream(label(service, method), path, lane, headers, body).await,
            }
        };
        work.instrument(span).await
    }

    async fn unary(
        self: &Arc<Self>,
        socket: Socket,
        row: &'static Policy,
        given: &HeaderMap,
        mut headers: HeaderMap,
        body: Incoming,
    ) -> Reply {
        let refuse = |code, message: String| {
            self.metrics.done(row.method, Outcome::NotDispatched, None);
            Reply::refused(code, message, Outcome::NotDispatched, Duration::ZERO)
        };
        let budget = self.budget(socket);
        let (body, held) = match whole(body, &budget).await {
            Ok(whole) => whole,
            Err(bad) => return refuse(bad.code(), format!("{}: {bad}", row.method)),
        };
        headers.remove(http::header::CONTENT_LENGTH);
        let message = match reply::message(&body) {
            Ok(message) => message,
            Err(error) => return refuse(Code::InvalidArgument, format!("{}: {error}", row.method)),
        };
        if row.class == Class::Read {
            if !matches!(socket, Socket::Admin | Socket::Sync) {
                // Beyond the CRI the runtime tells the environment of a container, which has values of Secrets.
                match facts::asks_verbosely(row.method, &message) {
                    Ok(false) => {}
                    Ok(true) => {
                        self.metrics.denied(row.method, socket);
                        let why = "verbose is not allowed on the socket";
                        let message = format!("{}: {why} {}", row.method, socket.name());
                        return refuse(Code::PermissionDenied, message);
                    }
                    Err(error) => {
                        return refuse(Code::InvalidArgument, format!("{}: {error}", row.method));
                    }
                }
            }
            let facts = Facts::default();
            return self.run(&Call { policy: row, headers, body, facts, budget, held }, None).await;
        }
        let facts = match facts::read(row.service, row.method, &message) {
            Ok(facts) => facts,
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                let source = error.source().map(ToString::to_string).unwrap_or_default();
                return refuse(Code::InvalidArgument, format!("{error}: {source}"));
            }
        };
        if let Some(uid) = &facts.pod_uid {
            Span::current().record("pod.uid", uid.as_str());
        }
        // The caller names the pod of every call that is for one; a request itself often names a container only.
        let work = contain::current().or_else(|| facts.pod_uid.as_ref().map(|uid| Work::new(uid, "")));
        let terms = match Terms::read(given, socket == Socket::Sync)
            .and_then(|terms| self.fence.check(terms, self.clock.boot()).map(|()| terms))
        {
            Ok(terms) => terms,
            Err(refusal) => return self.fenced(row.method, refusal, Duration::ZERO),
        };
        let mut call = Call { policy: row, headers, body, facts, budget, held };
        // Operators at `admin` may do the same thing in two ways at once; only pod-sync's calls are keyed.
        let key = call.facts.key.take().filter(|_| socket == Socket::Sync);
        if let Some(began) = given.get(JOIN_ONLY_HEADER) {
            let began =
                began.to_str().ok().and_then(|v| v.parse().ok()).map_or(Duration::ZERO, Duration::from_nanos);
            let joined = key.as_ref().and_then(|key| self.in_flight.join(key, &call.body, terms));
            if let Some(answer) = joined {
                self.metrics.joined.inc();
                Span::current().record("joined", true);
                return answer_of(answer).await;
            }
            match key.as_ref().map_or(Known::Nothing, |key| self.ended.find(key, began)) {
                Known::NeverCame => {}
                Known::Ended(reply) => return *reply,
                Known::Nothing => {
                    return refuse(Code::NotFound, format!("no such {} is in flight", row.method));
                }
            }
        }
        let answer = match key {
            Some(key) => match self.in_flight.enter(key.clone(), &call.body, terms) {
                Admission::Lead(lead) => {
                    let answer = lead.subscribe();
                    let this = self.clone();
                    let (entered, kept) = (self.clock.boot(), (row.method == EXEC_SYNC).then_some(key));
                    let work = async move {
                        let terms = lead.terms();
                        let reply = this.run_contained(work, &call, &terms).await;
                        // Who looks in between finds it in flight.
                        if let Some(key) = kept {
                            this.ended.note(key, entered, &reply);
                        }
                        lead.finish(reply);
                    };
                    drop(task::spawn("mutation", work.instrument(Span::current())));
                    answer
                }
                Admission::Join(answer) => {
                    self.metrics.joined.inc();
                    Span::current().record("joined", true);
                    answer
                }
                Admission::Conflict => {
                    self.metrics.conflicts.inc();
                    let message = format!("another {} for the same object is in flight", row.method);
                    return refuse(Code::Aborted, message);
                }
            },
            None => {
                let (sender, answer) = watch::channel(None);
                let this = self.clone();
                let work = async move {
                    let reply = this.run_contained(work, &call, &Arc::new(Mutex::new(terms))).await;
                    sender.send_replace(Some(Arc::new(reply)));
                };
                drop(task::spawn("mutation", work.instrument(Span::current())));
                answer
            }
        };
        answer_of(answer).await
    }

    fn fenced(&self, method: &'static str, refusal: Refusal, queued: Duration) -> Reply {
        self.metrics.fenced(refusal.name());
        self.metrics.done(method, Outcome::NotDispatched, None);
        Reply::refused(refusal.code(), format!("{method}: {refusal}"), Outcome::NotDispatched, queued)
    }

    // A panic ends this call alone. What the runtime did of it is not known.
    async fn run_contained(&self, work: Option<Work>, call: &Call, terms: &Arc<Mutex<Terms>>) -> Reply {
        let ran = contained_request(work, self.run(call, Some(terms))).await;
        ran.unwrap_or_else(|panic| {
            self.metrics.done(call.policy.method, Outcome::Unknown, None);
            let reply = Reply::panicked(&panic);
            note(&Span::current(), &reply);
            reply
        })
    }

    /// Queues and sends one unary call. With terms it is fenced right before it is sent.
    pub async fn run(&self, call: &Call, terms: Option<&Arc<Mutex<Terms>>>) -> Reply {
        self.busy.send_modify(|n| *n = n.saturating_add(1));
        let _busy = Busy(&self.busy);
        let row = call.policy;
        let arrived = Instant::now();
        let slot = self.queue(call, terms).await;
        let queued = arrived.elapsed();
        self.metrics.waited(row.lane, queued);
        let fence = || match terms {
            Some(terms) => self.fence.check(*terms.lock(), self.clock.boot()),
            None => Ok(()),
        };
        let span = Span::current();
        span.record("queued_ms", u64::try_from(queued.as_millis()).unwrap_or(u64::MAX));
        let slot = match slot.map(|slot| (slot, fence())) {
            Ok((slot, Ok(()))) => slot,
            Ok((_, Err(refusal))) | Err(NoSlot::Fenced(refusal)) => {
                let reply = self.fenced(row.method, refusal, queued);
                note(&span, &reply);
                return reply;
            }
            Err(NoSlot::Full(full)) => {
                self.metrics.done(row.method, Outcome::NotDispatched, None);
                let message = full.to_string();
                return Reply::refused(Code::ResourceExhausted, message, Outcome::NotDispatched, queued);
            }
        };
        let sent = Instant::now();
        let (in_flight, waiting) = (slot.in_flight, slot.waiting);
        let mut reply = self.send_holding(call, slot).await;
        if row.method == REMOVE_CONTAINER
            && reply.outcome == Outcome::RuntimeError
            && let Some(again) = self.remove_after_repair(call, terms).await
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
        note(&span, &reply);
        reply
    }

    /// The answer to a removal that is sent once more, where what stood in its way is gone.
    async fn remove_after_repair(&self, call: &Call, terms: Option<&Arc<Mutex<Terms>>>) -> Option<Reply> {
        let fence = || terms.is_none_or(|t| self.fence.check(*t.lock(), self.clock.boot()).is_ok());
        let message = reply::message(&call.body).ok()?;
        if !fence() || !self.repair.after_failed_removal(&message).await {
            return None;
        }
        self.metrics.lost_tasks.inc();
        let slot = self.queue(call, terms).await.ok()?;
        if !fence() {
            return None;
        }
        Some(self.send_holding(call, slot).await)
    }

    async fn queue(&self, call: &Call, terms: Option<&Arc<Mutex<Terms>>>) -> Result<Slot, NoSlot> {
        failpoint::work!("call queued");
        let mut turn = pin!(self.lanes.enter(call.policy.lane, call.facts.registry.as_deref()));
        loop {
            let Some(deadline) = terms.and_then(|t| t.lock().deadline) else {
                return turn.await.map_err(NoSlot::Full);
            };
            let now = self.clock.boot();
            let Some(left) = deadline.checked_sub(now).filter(|left| !left.is_zero()) else {
                let late = now.saturating_sub(deadline);
                return Err(NoSlot::Fenced(Refusal::DeadlinePassed { late }));
            };
            // Both arms may be dropped: the turn is only borrowed, and a joiner may have moved the deadline.
            tokio::select! {
                biased;
                slot = &mut turn => return slot.map_err(NoSlot::Full),
                () = tokio::time::sleep(bounded(left)) => {}
            }
        }
    }

    async fn send_holding(&self, call: &Call, slot: Slot) -> Reply {
        let mut answer = pin!(self.send(call));
        if let Hold::AtMost(hold) = call.policy.lane.hold() {
            // The answer is polled first, so that even with no time at all it has been sent before the slot goes.
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
                Reply::refused(Code::DeadlineExceeded, message, Outcome::Unknown, Duration::ZERO)
            }
        }
    }

    async fn send_retrying(&self, call: &Call, deadline: Option<Instant>) -> Reply {
        match self.send_once(call, deadline).await {
            Ok(reply) => reply,
            // Nothing was changed by it, so it may simply be asked again.
            Err(SendError::Cut(first)) if call.policy.retry => {
                tracing::debug!(method = call.policy.method, error = %first, "sent once more");
                self.send_once(call, deadline).await.unwrap_or_else(|_| cut(call.policy.method, &first))
            }
            Err(error) => failed(call.policy.method, error),
        }
    }

    async fn send_once(&self, call: &Call, deadline: Option<Instant>) -> Result<Reply, SendError> {
        match lists::twins(call.policy) {
            Some(twins) => self.list_once(call, twins, deadline).await,
            None => self.exchange(call, call.policy.method, deadline, MAX_ANSWER).await,
        }
    }

    /// Sends the call as `method` and takes in its answer, of at most `max` bytes.
    async fn exchange(
        &self,
        call: &Call,
        method: &'static str,
        deadline: Option<Instant>,
        max: usize,
    ) -> Result<Reply, SendError> {
        let response = self.send_as(call, method, deadline).await?;
        let (head, mut body) = response.into_parts();
        let mut reply = Reply::begun(head.status, head.headers);
        let mut size = 0_usize;
        let mut held = Growing::default();
        while let Some(frame) = body.frame().await {
            match frame.map_err(SendError::Cut)?.into_data() {
                Ok(data) => {
                    size = size.saturating_add(data.len());
                    if size > max {
                        return Ok(too_large(method, max));
                    }
                    if let Err(full) = call.budget.hold(&mut held, data.len()) {
                        return Ok(no_room(method, full));
                    }
                    reply.data.push(data);
                }
                Err(frame) => reply.trailers = frame.into_trailers().ok(),
            }
        }
        reply.held = held.done();
        reply.outcome = answered(method, &reply);
        Ok(reply)
    }

    /// Sends the call as `method` and waits for the head of its answer.
    async fn send_as(
        &self,
        call: &Call,
        method: &'static str,
        deadline: Option<Instant>,
    ) -> Result<Response<Incoming>, SendError> {
        let mut headers = call.headers.clone();
        if let Some(deadline) = deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            headers.insert("grpc-timeout", reply::grpc_timeout_value(left));
        }
        if lists::twins(call.policy).is_some() {
            // Its messages are read here.
            headers.remove("grpc-accept-encoding");
        }
        let path = format!("/{}/{method}", call.policy.service);
        let request = reply::request(&path, headers, Frames::of(vec![call.body.clone()]));
        self.upstream_of(&path).send(request).await
    }

    /// Passes a stream through on a connection of its own.
    async fn stream(
        &self,
        method: &'static str,
        path: &str,
        lane: Option<Lane>,
        headers: HeaderMap,
        body: Incoming,
    ) -> Response<Body> {
        let arrived = Instant::now();
        let refuse = |code, message, outcome, queued| {
            self.metrics.done(method, outcome, None);
            let reply = Reply::refused(code, message, outcome, queued);
            note(&Span::current(), &reply);
            reply.into_response()
        };
        // Only the opening is bounded: a watch would hold its slot forever.
        let slot = match lane {
            Some(lane) => match self.lanes.enter(lane, None).await {
                Ok(slot) => Some(slot),
                Err(full) => {
                    let message = full.to_string();
                    return refuse(
                        Code::ResourceExhausted,
                        message,
                        Outcome::NotDispatched,
                        arrived.elapsed(),
                    );
                }
            },
            None => None,
        };
        let queued = arrived.elapsed();
        let timeout = reply::grpc_timeout(&headers).map(bounded);
        let upstream = self.upstream_of(path).another();
        let sending = upstream.send(reply::request(path, headers, reply::boxed(body)));
        let too_late =
            || format!("the runtime did not answer within {} ms", timeout.unwrap_or_default().as_millis());
        let answer = match timeout {
            None => sending.await,
            Some(timeout) => match tokio::time::timeout(timeout, sending).await {
                Ok(answer) => answer,
                Err(_) => return refuse(Code::DeadlineExceeded, too_late(), Outcome::Unknown, queued),
            },
        };
        drop(slot);
        match answer {
            Ok(response) => {
                let (mut head, body) = response.into_parts();
                if let Some(status) = reply::status_in(&head.headers) {
                    let outcome = outcome::of_status(method, status.code(), status.message());
                    self.metrics.done(method, outcome, None);
                    reply::mark(&mut head.headers, outcome, queued);
                    return Response::from_parts(head, Frames::of(Vec::new()));
                }
                self.metrics.streams.inc();
                let deadline = timeout.map(|t| {
                    Box::pin(tokio::time::sleep_until(deadline_after(arrived, queued.saturating_add(t))))
                });
                let body = Passing {
                    inner: Some(body),
                    method,
                    queued,
                    deadline,
                    closing: Box::pin(self.closing.clone().cancelled_owned()),
                    metrics: self.metrics.clone(),
                    span: Span::current(),
                };
                Response::from_parts(head, Body::new(body))
            }
            Err(SendError::NotSent(error)) => {
                refuse(Code::Unavailable, error.to_string(), Outcome::NotDispatched, queued)
            }
            Err(SendError::Cut(error)) => {
                self.metrics.cut_streams.inc();
                refuse(Code::Unavailable, format!("the runtime went away: {error}"), Outcome::Unknown, queued)
            }
        }
    }
}

/// Why a request is not taken in.
#[derive(Debug, thiserror::Error)]
enum BadRequest {
    #[error("the request was cut: {0}")]
    Cut(hyper::Error),
    #[error("the request is larger than {MAX_REQUEST} bytes")]
    TooLarge,
    #[error(transparent)]
    NoRoom(Exhausted),
    #[error(transparent)]
    Frame(reply::BadFrame),
}

impl BadRequest {
    fn code(&self) -> Code {
        match self {
            Self::Cut(_) | Self::TooLarge | Self::Frame(_) => Code::InvalidArgument,
            Self::NoRoom(_) => Code::ResourceExhausted,
        }
    }
}

/// The whole body of a request, and what it holds of the budget.
async fn whole(mut body: Incoming, budget: &Budget) -> Result<(Bytes, Held), BadRequest> {
    let mut out = BytesMut::new();
    let mut held = Growing::default();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(BadRequest::Cut)?;
        if let Some(data) = frame.data_ref() {
            if out.len().saturating_add(data.len()) > MAX_REQUEST {
                return Err(BadRequest::TooLarge);
            }
            budget.hold(&mut held, data.len()).map_err(BadRequest::NoRoom)?;
            out.extend_from_slice(data);
        }
    }
    Ok((out.freeze(), held.done()))
}

/// Why a call did not get to be sent.
enum NoSlot {
    Full(crate::lanes::Full),
    Fenced(Refusal),
}

// The call was made, and how it ended stands behind what is not read: unknown.
fn too_large(method: &str, max: usize) -> Reply {
    let message = format!("the runtime's answer to {method} is larger than {max} bytes");
    Reply::refused(Code::ResourceExhausted, message, Outcome::Unknown, Duration::ZERO)
}

fn no_room(method: &str, full: Exhausted) -> Reply {
    let message = format!("the runtime's answer to {method} is not taken in: {full}");
    Reply::refused(Code::ResourceExhausted, message, Outcome::Unknown, Duration::ZERO)
}

/// The outcome of an answer that was read to its end.
fn answered(method: &'static str, reply: &Reply) -> Outcome {
    if reply.trailers.is_none() && reply::status_in(&reply.headers).is_none() {
        return Outcome::Unknown;
    }
    let status = reply.status();
    outcome::of_status(method, status.code(), status.message())
}

fn failed(method: &str, error: SendError) -> Reply {
    match error {
        SendError::Cut(error) => cut(method, &error),
        SendError::NotSent(error) => {
            Reply::refused(Code::Unavailable, error.to_string(), Outcome::NotDispatched, Duration::ZERO)
        }
    }
}

fn cut(method: &str, error: &hyper::Error) -> Reply {
    let message = format!("the runtime went away during {method}: {error}");
    Reply::refused(Code::Unavailable, message, Outcome::Unknown, Duration::ZERO)
}

async fn answer_of(mut answer: Answer) -> Reply {
    let reply = answer.wait_for(Option::is_some).await.ok().and_then(|reply| reply.as_deref().cloned());
    reply.unwrap_or_else(|| {
        Reply::refused(Code::Internal, "the call's task died", Outcome::Unknown, Duration::ZERO)
    })
}

/// The label of a method: its name if the table has it.
fn label(service: &str, method: &str) -> &'static str {
    let row = policy::TABLE.iter().find(|row| row.service == service && row.method == method);
    row.map_or(OTHER, |row| row.method)
}

/// The span of a call.
pub(crate) fn span(service: &str, method: &str, socket: Socket, headers: &HeaderMap) -> Span {
    let span = tracing::info_span!(
        "cri",
        otel.name = method,
        otel.status_code = field::Empty,
        error = field::Empty,
        rpc.service = service,
        socket = socket.name(),
        pod.uid = field::Empty,
        queued_ms = field::Empty,
        outcome = field::Empty,
        joined = field::Empty,
    );
    propagate::set_parent(&span, headers);
    span
}

fn note(span: &Span, reply: &Reply) {
    span.record("outcome", reply.outcome.name());
    if reply.outcome != Outcome::Ok {
        let status = reply.status();
        span.record("otel.status_code", "ERROR");
        span.record("error", format!("{:?}: {}", status.code(), status.message()));
    }
}
