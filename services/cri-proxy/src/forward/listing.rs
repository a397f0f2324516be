//! Forwards list calls. The proxy calls the runtime's stream method if it exists, and its unary method
//! otherwise. The reply has the form that the caller requested: one list or a stream.
//!
//! A stream forwards messages of whole items while the runtime is still sending, so only a few messages of a
//! list are in memory ([`MAX_BUFFERED`]). An interrupted list is requested again unless a message was
//! forwarded. After the first message, an error ends the stream, and the caller discards the messages before
//! it, as for every CRI stream. Each list is read by a separate task, so a slow caller delays only its own
//! list, for [`SEND_TIMEOUT`] at most.
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Response};
use http_body::Frame;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_kit::clock::deadline_after;
use quintlet_kit::contain::{self, contained_request};
use quintlet_kit::{queue, task};
use quintlet_model::outcome::Outcome;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tonic::Code;
use tracing::{Instrument as _, Span};

use super::call::{Call, MAX_REPLY, outcome_of, record_reply};
use super::dispatch::{Dispatcher, QueueError, failed};
use super::request_body::{BadRequest, read_body};
use crate::budget::{ByteBudget, Exhausted, GrowingReservation};
use crate::lists::{BadList, CHUNK, ListMethods, ListSplitter, MAX_MESSAGE};
use crate::metrics::Metrics;
use crate::policy::Policy;
use crate::reply::{self, Body, BoxError, Reply};
use crate::request_info::RequestInfo;
use crate::upstream::SendError;

/// Time limit for the caller to accept the next message.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum interval between messages to a caller. The list of a full node, about seventy messages, takes two
/// seconds and leaves the runtime, this process and the caller most of their time for other calls.
pub const MIN_INTERVAL: Duration = Duration::from_millis(30);
/// Maximum of buffered bytes of a list whose items are smaller than a message: the message in construction,
/// one that is queued, one that was sent, and the last data from the runtime.
pub const MAX_BUFFERED: usize = 3 * CHUNK + (64 << 10);

impl Dispatcher {
    /// Requests a list for a caller of the unary method.
    pub(super) async fn list_once(
        &self,
        call: &Call,
        methods: ListMethods,
        deadline: Option<Instant>,
    ) -> Result<Reply, SendError> {
        let connection = self.connection_number_for(call).await?;
        if !self.unsupported_streams.contains(methods.stream, connection) {
            let whole = Some((call.budget.clone(), GrowingReservation::default()));
            let mut buffer = ListBuffer {
                splitter: ListSplitter::new(MAX_MESSAGE),
                received_any: false,
                sender: None,
                whole,
            };
            let mut reply = self.read_list(call, methods.stream, deadline, &mut buffer).await?;
            if !reply.data.is_empty()
                && let Some((_, held)) = buffer.whole.take()
            {
                reply.held = held.finish();
            }
            if buffer.received_any || reply.status().code() != Code::Unimplemented {
                return Ok(reply);
            }
            self.record_unsupported_stream(methods, connection);
        }
        self.exchange(call, methods.list, deadline, MAX_REPLY).await
    }

    /// Responds to a caller of the stream method.
    pub(super) async fn list_stream(
        self: &Arc<Self>,
        budget: ByteBudget,
        row: &'static Policy,
        methods: ListMethods,
        mut headers: HeaderMap,
        body: Incoming,
    ) -> Response<Body> {
        let checked = match read_body(body, &budget).await {
            Ok((body, request_bytes)) => {
                reply::unframe(&body).map(|_| (body, request_bytes)).map_err(BadRequest::Frame)
            }
            Err(bad) => Err(bad),
        };
        let (body, request_bytes) = match checked {
            Ok(whole) => whole,
            Err(bad) => {
                self.metrics.done(row.method, Outcome::NotDispatched, None);
                let message = format!("{}: {bad}", row.method);
                return Reply::local(bad.code(), message, Outcome::NotDispatched, Duration::ZERO)
                    .into_response();
            }
        };
        headers.remove(http::header::CONTENT_LENGTH);
        let call = Call {
            policy: row,
            headers,
            body,
            info: RequestInfo::default(),
            budget,
            held: request_bytes,
            short_output: None,
        };
        let held = BufferedBytes::new(&self.metrics);
        let (chunks, frames) = queue::channel("list-chunks", 1);
        let (head, started) = oneshot::channel();
        let (last, end) = oneshot::channel();
        let sender = ListSender { to: chunks, head: Some(head), next: Instant::now(), held: held.clone() };
        let (this, pod) = (self.clone(), contain::current());
        let work = async move {
            let sent = contained_request(pod, this.send_list(&call, methods, sender)).await;
            let reply = sent.unwrap_or_else(|panic| Reply::panicked(&panic));
            // The caller may have disconnected.
            let _ = last.send(reply);
        };
        drop(task::spawn("list", work.instrument(Span::current())));
        match started.await {
            Ok((status, headers)) => {
                let body = ListBody { from: frames, end, rest: None, held };
                let mut response = Response::new(Body::new(body));
                *response.status_mut() = status;
                *response.headers_mut() = headers;
                response
            }
            // The list ended before its first message.
            Err(_) => reply_or_lost_task(end.await.ok()).into_response(),
        }
    }

    /// Queues the call and sends its messages to the caller. Returns the end of the response.
    async fn send_list(&self, call: &Call, methods: ListMethods, sender: ListSender) -> Reply {
        let _in_progress = self.begin();
        let (row, span) = (call.policy, Span::current());
        let arrived = Instant::now();
        let slot = self.queue(call, None).await;
        let queued = arrived.elapsed();
        self.metrics.waited(row.lane, queued);
        span.record("queued_ms", u64::try_from(queued.as_millis()).unwrap_or(u64::MAX));
        let sent = Instant::now();
        let mut reply = match slot {
            Ok(slot) => {
                let reply = self.read_with_retry(call, methods, sender).await;
                drop(slot);
                reply
            }
            Err(QueueError::Full(full)) => {
                let message = full.to_string();
                Reply::local(Code::ResourceExhausted, message, Outcome::NotDispatched, queued)
            }
            Err(QueueError::Fenced(error)) => self.fenced(row.method, error, queued),
        };
        reply.queued = queued;
        let dispatched = reply.outcome != Outcome::NotDispatched;
        self.metrics.done(row.method, reply.outcome, dispatched.then(|| sent.elapsed()));
        record_reply(&span, &reply);
        reply
    }

    async fn read_with_retry(&self, call: &Call, methods: ListMethods, sender: ListSender) -> Reply {
        let timeout = call.timeout(self.timeout);
        let deadline = timeout.map(|t| deadline_after(Instant::now(), t));
        let reading = async {
            let mut buffer = ListBuffer::sending_to(sender);
            let first = match self.stream_once(call, methods, deadline, &mut buffer).await {
                Ok(reply) => return reply,
                Err(error) => error,
            };
            // The call changes nothing and no message was sent, so it may be sent again.
            let retry = call.policy.retry && matches!(first, SendError::Interrupted(_));
            let sender = buffer.sender.take().filter(|sender| retry && sender.head.is_some());
            let Some(again) = sender else { return failed(call.policy.method, first) };
            again.held.remove(buffer.splitter.held());
            let mut buffer = ListBuffer::sending_to(again);
            let again = self.stream_once(call, methods, deadline, &mut buffer).await;
            again.unwrap_or_else(|_| failed(call.policy.method, first))
        };
        let Some(deadline) = deadline else { return reading.await };
        tokio::time::timeout_at(deadline, reading).await.unwrap_or_else(|_| {
            let ms = timeout.unwrap_or_default().as_millis();
            let message = format!("the runtime did not answer {} within {ms} ms", call.policy.method);
            Reply::local(Code::DeadlineExceeded, message, Outcome::Unknown, Duration::ZERO)
        })
    }

    async fn stream_once(
        &self,
        call: &Call,
        methods: ListMethods,
        deadline: Option<Instant>,
        buffer: &mut ListBuffer,
    ) -> Result<Reply, SendError> {
        let connection = self.connection_number_for(call).await?;
        if !self.unsupported_streams.contains(methods.stream, connection) {
            let reply = self.read_list(call, methods.stream, deadline, buffer).await?;
            if buffer.received_any || reply.status().code() != Code::Unimplemented {
                return Ok(reply);
            }
            self.record_unsupported_stream(methods, connection);
        }
        self.read_list(call, methods.list, deadline, buffer).await
    }

    /// Returns the number of the connection that a call uses. Missing streams are remembered per connection.
    async fn connection_number_for(&self, call: &Call) -> Result<u64, SendError> {
        let path = format!("/{}/{}", call.policy.service, call.policy.method);
        Ok(self.upstreams.of(&path).connection_number().await?)
    }

    fn record_unsupported_stream(&self, methods: ListMethods, connection: u64) {
        self.unsupported_streams.record(methods.stream, connection);
        tracing::debug!(method = methods.stream, "runtime does not implement list stream");
    }

    /// Sends the call as `method` and reads its reply. Data that was not sent to the caller is in the
    /// returned reply.
    async fn read_list(
        &self,
        call: &Call,
        method: &'static str,
        deadline: Option<Instant>,
        buffer: &mut ListBuffer,
    ) -> Result<Reply, SendError> {
        let response = self.upstreams.send_as(call, method, deadline).await?;
        let (head, mut body) = response.into_parts();
        let mut reply = Reply::from_head(head.status, head.headers);
        reply.headers.remove(http::header::CONTENT_LENGTH);
        while let Some(frame) = body.frame().await {
            match frame.map_err(SendError::Interrupted)?.into_data() {
                Ok(data) => {
                    if let Err(end) = buffer.push(&data, &reply).await {
                        return Ok(end.reply(method));
                    }
                }
                Err(frame) => reply.trailers = frame.into_trailers().ok(),
            }
        }
        reply.outcome = outcome_of(method, &reply);
        if reply.status().code() == Code::Ok {
            match buffer.finish() {
                Ok(last) => reply.data.extend(last),
                Err(bad) => return Ok(ListError::Bad(bad).reply(method)),
            }
        }
        Ok(reply)
    }
}

/// The reason why a list is not read to its end.
enum ListError {
    Bad(BadList),
    /// The list exceeds a single message.
    TooLarge,
    /// The byte limit of the socket is reached.
    NoRoom(Exhausted),
    /// The caller has disconnected.
    Gone,
    /// The caller does not read.
    Stalled,
}

impl From<BadList> for ListError {
    fn from(bad: BadList) -> Self {
        Self::Bad(bad)
    }
}

impl ListError {
    fn reply(&self, method: &str) -> Reply {
        let (code, why) = match self {
            Self::Bad(bad @ BadList::TooLarge) => (Code::ResourceExhausted, bad.to_string()),
            Self::Bad(bad) => (Code::Internal, bad.to_string()),
            Self::TooLarge => {
                let why = format!("the list is larger than {MAX_MESSAGE} bytes: request its stream");
                (Code::ResourceExhausted, why)
            }
            Self::NoRoom(full) => (Code::ResourceExhausted, full.to_string()),
            Self::Gone => (Code::Cancelled, "the caller has disconnected".to_owned()),
            Self::Stalled => {
                (Code::ResourceExhausted, format!("the caller read nothing for {} s", SEND_TIMEOUT.as_secs()))
            }
        };
        let message = format!("the runtime's answer to {method}: {why}");
        Reply::local(code, message, Outcome::Unknown, Duration::ZERO)
    }
}

/// Data of a list that was not sent yet.
struct ListBuffer {
    splitter: ListSplitter,
    /// Whether the runtime has sent data.
    received_any: bool,
    /// Sends messages to the caller; `None` if all data goes into one reply.
    sender: Option<ListSender>,
    /// Byte limit and reservation of a list that is read as a whole.
    whole: Option<(ByteBudget, GrowingReservation)>,
}

impl ListBuffer {
    fn sending_to(sender: ListSender) -> Self {
        Self { splitter: ListSplitter::new(CHUNK), received_any: false, sender: Some(sender), whole: None }
    }

    async fn push(&mut self, data: &[u8], reply: &Reply) -> Result<(), ListError> {
        self.received_any |= !data.is_empty();
        if let Some((budget, held)) = &mut self.whole {
            budget.reserve(held, data.len()).map_err(ListError::NoRoom)?;
        }
        let mut full = Vec::new();
        let before = self.splitter.held();
        self.splitter.push(data, &mut full)?;
        let Some(sender) = &mut self.sender else {
            return if full.is_empty() { Ok(()) } else { Err(ListError::TooLarge) };
        };
        let after = full.iter().map(Bytes::len).fold(self.splitter.held(), usize::saturating_add);
        sender.held.add(after.saturating_sub(before));
        for message in full {
            sender.send(message, reply).await?;
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<Option<Bytes>, BadList> {
        let last = std::mem::replace(&mut self.splitter, ListSplitter::new(CHUNK)).finish()?;
        // A unary reply has a message even if it is empty.
        let empty = self.sender.is_none().then(|| Bytes::from_static(&[0; 5]));
        Ok(last.or(empty))
    }
}

/// Sends messages to the caller.
struct ListSender {
    to: mpsc::Sender<Bytes>,
    /// Present until the first message is sent.
    head: Option<oneshot::Sender<(http::StatusCode, HeaderMap)>>,
    /// Earliest time of the next message.
    next: Instant,
    held: BufferedBytes,
}

impl ListSender {
    async fn send(&mut self, message: Bytes, reply: &Reply) -> Result<(), ListError> {
        self.held.sent(message.len());
        if let Some(head) = self.head.take() {
            head.send((reply.http, reply.headers.clone())).map_err(|_| ListError::Gone)?;
        }
        tokio::time::sleep_until(self.next).await;
        self.next = deadline_after(Instant::now(), MIN_INTERVAL);
        match tokio::time::timeout(SEND_TIMEOUT, self.to.send(message)).await {
            Ok(sent) => sent.map_err(|_| ListError::Gone),
            Err(_) => Err(ListError::Stalled),
        }
    }
}

/// Counts the buffered bytes of a list.
#[derive(Clone)]
struct BufferedBytes(Arc<BufferedBytesInner>);

struct BufferedBytesInner {
    metrics: Metrics,
    /// Bytes of this list.
    bytes: Gauge,
}

impl BufferedBytes {
    fn new(metrics: &Metrics) -> Self {
        Self(Arc::new(BufferedBytesInner { metrics: metrics.clone(), bytes: Gauge::default() }))
    }

    fn add(&self, bytes: usize) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let now = self.0.bytes.inc_by(bytes).saturating_add(bytes);
        self.0.metrics.list_bytes.inc_by(bytes);
        self.0.metrics.list_bytes_most.inner().fetch_max(now, Ordering::Relaxed);
    }

    /// Records the size of a message.
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

impl Drop for BufferedBytesInner {
    fn drop(&mut self) {
        self.metrics.list_bytes.dec_by(self.bytes.get());
    }
}

/// The response body of a list.
struct ListBody {
    from: mpsc::Receiver<Bytes>,
    end: oneshot::Receiver<Reply>,
    /// Frames after the messages.
    rest: Option<VecDeque<Frame<Bytes>>>,
    held: BufferedBytes,
}

impl http_body::Body for ListBody {
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
            this.rest = Some(reply_or_lost_task(reply).into_last_frames());
        }
        Poll::Ready(this.rest.as_mut().and_then(VecDeque::pop_front).map(Ok))
    }
}

fn reply_or_lost_task(reply: Option<Reply>) -> Reply {
    reply.unwrap_or_else(|| {
        Reply::local(
            Code::Internal,
            "the task of the list ended unexpectedly",
            Outcome::Unknown,
            Duration::ZERO,
        )
    })
}
