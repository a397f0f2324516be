//! Lists: by stream where the runtime has it, in whole where not, and to the caller as it asked.
//!
//! Who asks for a stream gets messages of whole items while the runtime still sends, so that a list of any size is here for a few
//! messages only ([`HELD`]). One that fails in the middle ends with its error, and its caller drops what came before it, as of every
//! stream of the CRI; until the first message is on its way a list that is cut is asked for again. A task of its own reads it: a
//! caller that is slow holds up its own list, and for [`STALL`] at most.
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};

use http_body::Frame;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::{mpsc, oneshot};

use super::*;
use crate::lists::{BadList, CHUNK, Cutter, MAX_MESSAGE, Twins};
use crate::reply::BoxError;

/// A caller that takes nothing for so long is not given the rest.
const STALL: Duration = Duration::from_secs(10);
/// A caller gets a message at most so often: the list of a full node, some seventy messages, takes two seconds and leaves the runtime,
/// this process and the caller most of their time for whoever waits for one pod.
pub const PACE: Duration = Duration::from_millis(30);
/// Bytes held of one list on its way to a caller, of items no larger than a message: the message being made, one that waits to be
/// given away, one that was, and what came last from the runtime.
pub const HELD: usize = 3 * CHUNK + (64 << 10);

impl Forwarder {
    /// Asks for a list once, for a caller that wants one answer.
    pub(super) async fn list_once(
        &self,
        call: &Call,
        twins: Twins,
        deadline: Option<Instant>,
    ) -> Result<Reply, SendError> {
        let connection = self.connection_of(call).await?;
        if !self.lacking.has(twins.stream, connection) {
            let whole = Some((call.budget.clone(), Growing::default()));
            let mut taken = Taken { cutter: Cutter::new(MAX_MESSAGE), any: false, giver: None, whole };
            let mut reply = self.read_list(call, twins.stream, deadline, &mut taken).await?;
            if !reply.data.is_empty()
                && let Some((_, held)) = taken.whole.take()
            {
                reply.held = held.done();
            }
            if taken.any || reply.status().code() != Code::Unimplemented {
                return Ok(reply);
            }
            self.note_lacking(twins, connection);
        }
        self.exchange(call, twins.list, deadline, MAX_ANSWER).await
    }

    /// Answers a list with a stream.
    pub(super) async fn list_stream(
        self: &Arc<Self>,
        socket: Socket,
        row: &'static Policy,
        twins: Twins,
        mut headers: HeaderMap,
        body: Incoming,
    ) -> Response<Body> {
        let budget = self.budget(socket);
        let checked = match whole(body, &budget).await {
            Ok((body, of_request)) => {
                reply::message(&body).map(|_| (body, of_request)).map_err(BadRequest::Frame)
            }
            Err(bad) => Err(bad),
        };
        let (body, of_request) = match checked {
            Ok(whole) => whole,
            Err(bad) => {
                self.metrics.done(row.method, Outcome::NotDispatched, None);
                let message = format!("{}: {bad}", row.method);
                return Reply::refused(bad.code(), message, Outcome::NotDispatched, Duration::ZERO)
                    .into_response();
            }
        };
        headers.remove(http::header::CONTENT_LENGTH);
        let call = Call { policy: row, headers, body, facts: Facts::default(), budget, held: of_request };
        let held = Held::new(&self.metrics);
        let (to, from) = mpsc::channel(1);
        let (head, begun) = oneshot::channel();
        let (last, end) = oneshot::channel();
        let giver = Giver { to, head: Some(head), next: Instant::now(), held: held.clone() };
        let (this, pod) = (self.clone(), contain::current());
        let work = async move {
            let given = contained_request(pod, this.give_list(&call, twins, giver)).await;
            let reply = given.unwrap_or_else(|panic| Reply::panicked(&panic));
            // Nobody waits for it where the caller went away.
            let _ = last.send(reply);
        };
        drop(task::spawn("list", work.instrument(Span::current())));
        match begun.await {
            Ok((status, headers)) => {
                let body = Listing { from, end, rest: None, held };
                let mut response = Response::new(Body::new(body));
                *response.status_mut() = status;
                *response.headers_mut() = headers;
                response
            }
            // It was over before a message was full.
            Err(_) => ended(end.await.ok()).into_response(),
        }
    }

    /// Queues, asks and gives away message by message; returns what is left to be said.
    async fn give_list(&self, call: &Call, twins: Twins, giver: Giver) -> Reply {
        self.busy.send_modify(|n| *n = n.saturating_add(1));
        let _busy = Busy(&self.busy);
        let (row, span) = (call.policy, Span::current());
        let arrived = Instant::now();
        let slot = self.queue(call, None).await;
        let queued = arrived.elapsed();
        self.metrics.waited(row.lane, queued);
        span.record("queued_ms", u64::try_from(queued.as_millis()).unwrap_or(u64::MAX));
        let sent = Instant::now();
        let mut reply = match slot {
            Ok(slot) => {
                let reply = self.read_for(call, twins, giver).await;
                drop(slot);
                reply
            }
            Err(NoSlot::Full(full)) => {
                let message = full.to_string();
                Reply::refused(Code::ResourceExhausted, message, Outcome::NotDispatched, queued)
            }
            Err(NoSlot::Fenced(refusal)) => self.fenced(row.method, refusal, queued),
        };
        reply.queued = queued;
        let dispatched = reply.outcome != Outcome::NotDispatched;
        self.metrics.done(row.method, reply.outcome, dispatched.then(|| sent.elapsed()));
        note(&span, &reply);
        reply
    }

    async fn read_for(&self, call: &Call, twins: Twins, giver: Giver) -> Reply {
        let timeout = call.timeout(self.timeout);
        let deadline = timeout.map(|t| deadline_after(Instant::now(), t));
        let reading = async {
            let mut taken = Taken::by(giver);
            let first = match self.stream_once(call, twins, deadline, &mut taken).await {
                Ok(reply) => return reply,
                Err(error) => error,
            };
            // Nothing was changed by it and nothing given away, so it may simply be asked again.
            let retry = call.policy.retry && matches!(first, SendError::Cut(_));
            let giver = taken.giver.take().filter(|giver| retry && giver.head.is_some());
            let Some(again) = giver else { return failed(call.policy.method, first) };
            again.held.remove(taken.cutter.held());
            let mut taken = Taken::by(again);
            let again = self.stream_once(call, twins, deadline, &mut taken).await;
            again.unwrap_or_else(|_| failed(call.policy.method, first))
        };
        let Some(deadline) = deadline else { return reading.await };
        tokio::time::timeout_at(deadline, reading).await.unwrap_or_else(|_| {
            let ms = timeout.unwrap_or_default().as_millis();
            let message = format!("the runtime did not answer {} within {ms} ms", call.policy.method);
            Reply::refused(Code::DeadlineExceeded, message, Outcome::Unknown, Duration::ZERO)
        })
    }

    async fn stream_once(
        &self,
        call: &Call,
        twins: Twins,
        deadline: Option<Instant>,
        taken: &mut Taken,
    ) -> Result<Reply, SendError> {
        let connection = self.connection_of(call).await?;
        if !self.lacking.has(twins.stream, connection) {
            let reply = self.read_list(call, twins.stream, deadline, taken).await?;
            if taken.any || reply.status().code() != Code::Unimplemented {
                return Ok(reply);
            }
            self.note_lacking(twins, connection);
        }
        self.read_list(call, twins.list, deadline, taken).await
    }

    /// Which connection a call goes by. What the runtime lacks is remembered for as long as that lasts.
    async fn connection_of(&self, call: &Call) -> Result<u64, SendError> {
        let path = format!("/{}/{}", call.policy.service, call.policy.method);
        Ok(self.upstream_of(&path).connection().await?)
    }

    fn note_lacking(&self, twins: Twins, connection: u64) {
        self.lacking.note(twins.stream, connection);
        tracing::debug!(method = twins.stream, "the runtime has no such stream");
    }

    /// Sends the call as `method` and reads its answer; what is not given away is in the reply.
    async fn read_list(
        &self,
        call: &Call,
        method: &'static str,
        deadline: Option<Instant>,
        taken: &mut Taken,
    ) -> Result<Reply, SendError> {
        let response = self.send_as(call, method, deadline).await?;
        let (head, mut body) = response.into_parts();
        let mut reply = Reply::begun(head.status, head.headers);
        reply.headers.remove(http::header::CONTENT_LENGTH);
        while let Some(frame) = body.frame().await {
            match frame.map_err(SendError::Cut)?.into_data() {
                Ok(data) => {
                    if let Err(end) = taken.take(&data, &reply).await {
                        return Ok(end.reply(method));
                    }
                }
                Err(frame) => reply.trailers = frame.into_trailers().ok(),
            }
        }
        reply.outcome = answered(method, &reply);
        if reply.status().code() == Code::Ok {
            match taken.rest() {
                Ok(last) => reply.data.extend(last),
                Err(bad) => return Ok(End::Bad(bad).reply(method)),
            }
        }
        Ok(reply)
    }
}

/// Why a list is not read to its end.
enum End {
    Bad(BadList),
    /// It does not fit in the one message that is asked for.
    TooLarge,
    /// The calls of the caller's socket hold all that they may.
    NoRoom(Exhausted),
    /// The caller is away.
    Gone,
    /// It does not read.
    Stalled,
}

impl From<BadList> for End {
    fn from(bad: BadList) -> Self {
        Self::Bad(bad)
    }
}

impl End {
    fn reply(&self, method: &str) -> Reply {
        let (code, why) = match self {
            Self::Bad(bad @ BadList::TooLarge) => (Code::ResourceExhausted, bad.to_string()),
            Self::Bad(bad) => (Code::Internal, bad.to_string()),
            Self::TooLarge => {
                let why =
                    format!("the list is larger than {MAX_MESSAGE} bytes: its stream must be asked for");
                (Code::ResourceExhausted, why)
            }
            Self::NoRoom(full) => (Code::ResourceExhausted, full.to_string()),
            Self::Gone => (Code::Cancelled, "its caller is away".to_owned()),
            Self::Stalled => {
                (Code::ResourceExhausted, format!("its caller took nothing for {} s", STALL.as_secs()))
            }
        };
        let message = format!("the runtime's answer to {method}: {why}");
        Reply::refused(code, message, Outcome::Unknown, Duration::ZERO)
    }
}

/// What was read of a list and not given away.
struct Taken {
    cutter: Cutter,
    /// The runtime sent something.
    any: bool,
    /// None: all of it is to be in the reply.
    giver: Option<Giver>,
    /// Where the bytes of a list that is taken in whole are counted; one that is given away has few at once.
    whole: Option<(Budget, Growing)>,
}

impl Taken {
    fn by(giver: Giver) -> Self {
        Self { cutter: Cutter::new(CHUNK), any: false, giver: Some(giver), whole: None }
    }

    async fn take(&mut self, data: &[u8], reply: &Reply) -> Result<(), End> {
        self.any |= !data.is_empty();
        if let Some((budget, held)) = &mut self.whole {
            budget.hold(held, data.len()).map_err(End::NoRoom)?;
        }
        let mut full = Vec::new();
        let before = self.cutter.held();
        self.cutter.push(data, &mut full)?;
        let Some(giver) = &mut self.giver else {
            return if full.is_empty() { Ok(()) } else { Err(End::TooLarge) };
        };
        let after = full.iter().map(Bytes::len).fold(self.cutter.held(), usize::saturating_add);
        giver.held.add(after.saturating_sub(before));
        for message in full {
            giver.give(message, reply).await?;
        }
        Ok(())
    }

    fn rest(&mut self) -> Result<Option<Bytes>, BadList> {
        let last = std::mem::replace(&mut self.cutter, Cutter::new(CHUNK)).finish()?;
        // One answer is a message, of nothing too.
        let empty = self.giver.is_none().then(|| Bytes::from_static(&[0; 5]));
        Ok(last.or(empty))
    }
}

/// The way to a caller.
struct Giver {
    to: mpsc::Sender<Bytes>,
    /// Until the first message is given.
    head: Option<oneshot::Sender<(http::StatusCode, HeaderMap)>>,
    /// The next message goes no earlier.
    next: Instant,
    held: Held,
}

impl Giver {
    async fn give(&mut self, message: Bytes, reply: &Reply) -> Result<(), End> {
        self.held.sent(message.len());
        if let Some(head) = self.head.take() {
            head.send((reply.http, reply.headers.clone())).map_err(|_| End::Gone)?;
        }
        tokio::time::sleep_until(self.next).await;
        self.next = deadline_after(Instant::now(), PACE);
        match tokio::time::timeout(STALL, self.to.send(message)).await {
            Ok(given) => given.map_err(|_| End::Gone),
            Err(_) => Err(End::Stalled),
        }
    }
}

/// Counts the bytes of one list that are here.
#[derive(Clone)]
struct Held(Arc<Count>);

struct Count {
    metrics: Metrics,
    /// Of this list alone.
    bytes: Gauge,
}

impl Held {
    fn new(metrics: &Metrics) -> Self {
        Self(Arc::new(Count { metrics: metrics.clone(), bytes: Gauge::default() }))
    }

    fn add(&self, bytes: usize) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let now = self.0.bytes.inc_by(bytes).saturating_add(bytes);
        self.0.metrics.list_bytes.inc_by(bytes);
        self.0.metrics.list_bytes_most.inner().fetch_max(now, Ordering::Relaxed);
    }

    /// A message of so many bytes is full.
    fn sent(&self, bytes: usize) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.0.metrics.list_message_largest.inner().fetch_max(bytes, Ordering::Relaxed);
    }

    fn remove(&self, bytes: usize) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.0.bytes.dec_by(bytes);
        self.0.metrics.list_bytes.dec_by(bytes);
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        self.metrics.list_bytes.dec_by(self.bytes.get());
    }
}

/// The body of a list on its way to its caller.
struct Listing {
    from: mpsc::Receiver<Bytes>,
    end: oneshot::Receiver<Reply>,
    /// What comes behind the messages.
    rest: Option<VecDeque<Frame<Bytes>>>,
    held: Held,
}

impl http_body::Body for Listing {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        if this.rest.is_none() {
            if let Some(message) = ready!(this.from.poll_recv(cx)) {
                this.held.remove(message.len());
                return Poll::Ready(Some(Ok(Frame::data(message))));
            }
            let reply = ready!(Pin::new(&mut this.end).poll(cx)).ok();
            this.rest = Some(ended(reply).into_last_frames());
        }
        Poll::Ready(this.rest.as_mut().and_then(VecDeque::pop_front).map(Ok))
    }
}

fn ended(reply: Option<Reply>) -> Reply {
    reply.unwrap_or_else(|| {
        Reply::refused(Code::Internal, "the list's task died", Outcome::Unknown, Duration::ZERO)
    })
}
