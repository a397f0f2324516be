//! ConnectionState cycle of a connection: when it is drained or closed.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use quintlet_kit::clock::deadline_after;
use quintlet_kit::task;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep};

use node_api_access::limits::{Client, ConnectionSlot, Limits, Pool, ShareExceeded};

#[derive(Debug, Clone, Copy)]
struct State {
    accepted: Instant,
    /// A request has arrived.
    received_request: bool,
    /// A request was authorized.
    trusted: bool,
    /// A request was refused, and none was authorized before.
    refused: Option<Instant>,
    /// A request was refused, and its answer has to be sent before `refused` is set.
    refused_once_answered: bool,
    /// The connection has to be closed at once.
    closed: bool,
    /// Requests whose response has not been sent completely.
    in_flight: usize,
    /// Time since which no request is in flight.
    idle: Instant,
    /// A response was abandoned because the client did not read it.
    stalled: bool,
}

/// Decision about a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionDecision {
    /// Keep it until this time, unless an event occurs.
    Keep(Instant),
    /// Accept no further request, and close the connection after its last response.
    Drain(Instant),
    /// Close it now.
    Close,
}

impl State {
    fn decide(&self, now: Instant, limits: &Limits) -> ConnectionDecision {
        let ends = |since: Instant| match deadline_after(since, limits.linger) {
            last if now >= last => ConnectionDecision::Close,
            last => ConnectionDecision::Drain(last),
        };
        if self.closed {
            return ConnectionDecision::Close;
        }
        if !self.trusted {
            let begin = if self.received_request { limits.stranger } else { limits.header };
            let last = deadline_after(self.accepted, begin.min(limits.stranger));
            return match self.refused {
                _ if now >= last => ConnectionDecision::Close,
                Some(refused) => ends(refused),
                None => ConnectionDecision::Keep(last),
            };
        }
        let idle = deadline_after(self.idle, limits.idle);
        match self.in_flight {
            // The rest of the abandoned response is discarded with the connection.
            0 if self.stalled => ends(self.idle),
            _ if self.stalled => ConnectionDecision::Drain(deadline_after(now, limits.idle)),
            0 if now >= idle => ends(idle),
            0 => ConnectionDecision::Keep(idle),
            // The verdict is evaluated again when the last response has been sent.
            _ => ConnectionDecision::Keep(deadline_after(now, limits.idle)),
        }
    }
}

/// State of one connection. It occupies one of the connection slots.
#[derive(Debug)]
pub(crate) struct ConnectionState {
    pass: ConnectionSlot,
    limits: Limits,
    state: Mutex<State>,
    changed: Notify,
}

impl ConnectionState {
    /// Creates the state of a connection that was just accepted.
    #[must_use]
    pub(crate) fn new(pass: ConnectionSlot, limits: Limits) -> Self {
        let now = Instant::now();
        let state = State {
            accepted: now,
            received_request: false,
            trusted: false,
            refused: None,
            refused_once_answered: false,
            closed: false,
            in_flight: 0,
            idle: now,
            stalled: false,
        };
        Self { pass, limits, state: Mutex::new(state), changed: Notify::new() }
    }

    /// Takes a slot of a client that is known from its certificate, so that untrusted connections do not
    /// displace this one. The connection remains untrusted if there is none: [`ConnectionState::trust`]
    /// reports that.
    pub(crate) fn identify(&self, client: &Client) {
        let _ = self.pass.claim(client, &self.limits);
    }

    /// Marks the connection as trusted: a request of the client was authorized on it. The connection counts
    /// for its first client.
    ///
    /// # Errors
    /// Fails if the client has its share of connections.
    pub(crate) fn trust(&self, client: &Client) -> Result<(), ShareExceeded> {
        if self.state.lock().trusted {
            return Ok(());
        }
        self.pass.claim(client, &self.limits)?;
        self.state.lock().trusted = true;
        self.changed.notify_one();
        Ok(())
    }

    /// Returns the kind of slot that the connection has, or none while it is untrusted.
    pub(crate) fn pool(&self) -> Option<Pool> {
        self.pass.pool()
    }

    /// Records a refused request. If no request was authorized before, the connection is closed after the
    /// response.
    pub(crate) fn refuse(&self) {
        self.state.lock().refused.get_or_insert_with(Instant::now);
        self.changed.notify_one();
    }

    /// Does the same as [`ConnectionState::refuse`] once the requests in flight are answered: a client of
    /// HTTP/2 may fail a request whose answer follows a GOAWAY.
    pub(crate) fn refuse_once_answered(&self) {
        self.state.lock().refused_once_answered = true;
    }

    /// Closes the connection with all its requests.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_one();
    }

    /// Records that a response was abandoned because the client did not read it.
    fn stall(&self) {
        self.state.lock().stalled = true;
        self.changed.notify_one();
    }

    /// Records a request or an upgraded connection, which is in flight until the returned guard is dropped.
    pub(crate) fn request(self: &Arc<Self>) -> RequestGuard {
        let mut state = self.state.lock();
        state.received_request = true;
        state.in_flight = state.in_flight.saturating_add(1);
        drop(state);
        self.pass.begin();
        self.changed.notify_one();
        RequestGuard(self.clone())
    }

    pub(crate) fn decision(&self) -> ConnectionDecision {
        self.state.lock().decide(Instant::now(), &self.limits)
    }

    /// Completes when an event may have changed the verdict.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Completes when another connection takes the slot of this one.
    pub(crate) async fn displaced(&self) {
        self.pass.displaced().await;
    }
}

#[derive(Debug)]
pub(crate) struct RequestGuard(Arc<ConnectionState>);

impl Drop for RequestGuard {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.in_flight = state.in_flight.saturating_sub(1);
        state.idle = Instant::now();
        if state.refused_once_answered && state.in_flight == 0 {
            state.refused = state.refused.or(Some(state.idle));
        }
        drop(state);
        self.0.pass.end();
        self.0.changed.notify_one();
    }
}

tokio::task_local! {
    static STREAM: Arc<Progress>;
}

/// Tracks whether the client reads a response on an HTTP/2 stream: the time since which a piece of it waits.
#[derive(Debug, Default)]
struct Progress(Mutex<Option<Instant>>);

impl Progress {
    /// Completes when a piece has waited for at least `limit`.
    async fn stalled(&self, limit: Duration) {
        loop {
            let since = *self.0.lock();
            let look = deadline_after(since.unwrap_or_else(Instant::now), limit);
            if look <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(look).await;
        }
    }
}

/// Runs each stream of an HTTP/2 connection in a task. If the client does not read a response within the
/// limit, the response is abandoned and its connection is drained.
#[derive(Debug, Clone)]
pub(crate) struct Streams(pub(crate) Arc<ConnectionState>);

impl<F> hyper::rt::Executor<F> for Streams
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, stream: F) {
        let progress = Arc::new(Progress::default());
        let (watched, life) = (progress.clone(), self.0.clone());
        drop(task::spawn_contained("node-api-stream", None, async move {
            // Dropping the stream frees its buffers except for its last piece. h2 sends the reset after that
            // piece.
            tokio::select! {
                _ = STREAM.scope(progress, stream) => {}
                () = watched.stalled(life.limits.write) => {
                    tracing::debug!("response abandoned, client does not read");
                    life.stall();
                }
            }
        }));
    }
}

/// Size of the pieces in which a response is sent over HTTP/2. h2 does not report whether the client has read
/// a piece that it took.
const PIECE: usize = 16 << 10;

/// A response body. The request is in flight until the body has been sent.
#[derive(Debug)]
pub(crate) struct ResponseBody {
    body: axum::body::Body,
    _in_flight: RequestGuard,
    /// State of its stream. None over HTTP/1, where [`WriteTimeout`] watches the connection.
    progress: Option<Arc<Progress>>,
    /// Data of the body that was not sent yet.
    rest: Bytes,
}

impl ResponseBody {
    /// Returns the body of the response to the request that the current task handles.
    pub(crate) fn new(body: axum::body::Body, in_flight: RequestGuard) -> Self {
        let progress = STREAM.try_with(Arc::clone).ok();
        Self { body, _in_flight: in_flight, progress, rest: Bytes::new() }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Some(progress) = self.progress.clone() else { return Pin::new(&mut self.body).poll_frame(cx) };
        // h2 has begun to send the previous piece.
        *progress.0.lock() = None;
        if self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                ended => return Poll::Ready(ended),
            }
        }
        let length = self.rest.len().min(PIECE);
        let piece = self.rest.split_to(length);
        *progress.0.lock() = Some(Instant::now());
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (mut hint, rest) = (self.body.size_hint(), self.rest.len() as u64);
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper.saturating_add(rest));
        }
        hint.set_lower(hint.lower().saturating_add(rest));
        hint
    }
}

/// A stream whose writes fail if the client does not read for the limit.
#[derive(Debug)]
pub(crate) struct WriteTimeout<S> {
    stream: S,
    life: Arc<ConnectionState>,
    /// Runs while a write waits for the client.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> WriteTimeout<S> {
    pub(crate) fn new(stream: S, life: Arc<ConnectionState>) -> Self {
        Self { stream, life, stalled: None }
    }

    fn watch<T>(&mut self, written: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let limit = self.life.limits.write;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        ready!(stalled.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.watch(written, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.watch(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_kept_or_closed_by_its_requests() {
        let limits = Limits::default();
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let new = State {
            accepted: start,
            received_request: false,
            trusted: false,
            refused: None,
            refused_once_answered: false,
            closed: false,
            in_flight: 0,
            idle: start,
            stalled: false,
        };
        let received_request = State { received_request: true, in_flight: 1, ..new };
        let refused = State { refused: Some(at(20)), in_flight: 0, ..received_request };
        let trusted = State { trusted: true, ..received_request };
        let idle = State { in_flight: 0, idle: at(100), ..trusted };
        let once_refused = State { refused: Some(at(20)), ..idle };
        let stalled = State { stalled: true, ..trusted };
        use ConnectionDecision::{Close, Drain, Keep};
        for (name, state, now, want) in [
            ("has to ask for something in time", new, 29, Keep(at(30))),
            ("and did not", new, 30, Close),
            ("asked and waits for a review", received_request, 59, Keep(at(60))),
            ("was never let in", received_request, 60, Close),
            ("is sent away", refused, 20, Drain(at(25))),
            ("does not go", refused, 25, Close),
            ("works for hours", trusted, 100_000, Keep(at(100_090))),
            ("pauses", idle, 189, Keep(at(190))),
            ("paused for too long", idle, 190, Drain(at(195))),
            ("does not detect its end", idle, 195, Close),
            ("left an answer waiting and has others", stalled, 100_000, Drain(at(100_090))),
            ("and those have ended", State { in_flight: 0, ..stalled }, 0, Drain(at(5))),
            ("and it holds on", State { in_flight: 0, ..stalled }, 5, Close),
            ("was let in and sent away once", once_refused, 189, Keep(at(190))),
            ("may not go on", State { closed: true, ..trusted }, 1, Close),
        ] {
            assert_eq!(state.decide(at(now), &limits), want, "{name}");
        }
    }
}
