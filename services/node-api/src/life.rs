//! How long a connection may live, by what came over it.

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

use crate::limits::{Limits, Pass};

#[derive(Debug, Clone, Copy)]
struct State {
    accepted: Instant,
    /// A request came.
    heard: bool,
    /// Somebody was let in.
    trusted: bool,
    /// Nobody was, and somebody was sent away.
    refused: Option<Instant>,
    /// Requests whose answer has not ended.
    in_flight: usize,
    /// Since when there has been none.
    idle: Instant,
    /// An answer was given up, since the client made no room for it.
    stalled: bool,
}

/// What is to be done with a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nothing until then, unless something happens on it.
    Goes(Instant),
    /// It takes no further request, and ends with its last answer; looked at again then.
    Ends(Instant),
    /// It is cut.
    Over,
}

impl State {
    fn judge(&self, now: Instant, limits: &Limits) -> Verdict {
        let ends = |since: Instant| match deadline_after(since, limits.linger) {
            last if now >= last => Verdict::Over,
            last => Verdict::Ends(last),
        };
        if !self.trusted {
            let begin = if self.heard { limits.stranger } else { limits.header };
            let last = deadline_after(self.accepted, begin.min(limits.stranger));
            return match self.refused {
                _ if now >= last => Verdict::Over,
                Some(refused) => ends(refused),
                None => Verdict::Goes(last),
            };
        }
        let idle = deadline_after(self.idle, limits.idle);
        match self.in_flight {
            // What was not sent of the answer that was given up goes with the connection.
            0 if self.stalled => ends(self.idle),
            _ if self.stalled => Verdict::Ends(deadline_after(now, limits.idle)),
            0 if now >= idle => ends(idle),
            0 => Verdict::Goes(idle),
            // Looked at again when the last answer has ended.
            _ => Verdict::Goes(deadline_after(now, limits.idle)),
        }
    }
}

/// The life of one connection, which holds its place.
#[derive(Debug)]
pub struct Life {
    pass: Pass,
    limits: Limits,
    state: Mutex<State>,
    changed: Notify,
}

impl Life {
    /// Of a connection that was just accepted.
    #[must_use]
    pub fn new(pass: Pass, limits: Limits) -> Self {
        let now = Instant::now();
        let state = State {
            accepted: now,
            heard: false,
            trusted: false,
            refused: None,
            in_flight: 0,
            idle: now,
            stalled: false,
        };
        Self { pass, limits, state: Mutex::new(state), changed: Notify::new() }
    }

    /// Somebody was let in: from now on the connection is theirs.
    pub fn trust(&self) {
        let was = std::mem::replace(&mut self.state.lock().trusted, true);
        if !was {
            self.pass.trust();
            self.changed.notify_one();
        }
    }

    /// Somebody was sent away. A connection on which nobody was let in before ends with the answer.
    pub fn refuse(&self) {
        self.state.lock().refused.get_or_insert_with(Instant::now);
        self.changed.notify_one();
    }

    /// The client made no room for an answer, which was given up.
    fn stall(&self) {
        self.state.lock().stalled = true;
        self.changed.notify_one();
    }

    /// A request came; it is in flight until the guard is dropped.
    pub(crate) fn request(self: &Arc<Self>) -> InFlight {
        let mut state = self.state.lock();
        state.heard = true;
        state.in_flight = state.in_flight.saturating_add(1);
        drop(state);
        self.changed.notify_one();
        InFlight(self.clone())
    }

    pub(crate) fn verdict(&self) -> Verdict {
        self.state.lock().judge(Instant::now(), &self.limits)
    }

    /// Something happened that may change the verdict.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Somebody else has the place.
    pub(crate) async fn displaced(&self) {
        self.pass.displaced().await;
    }
}

/// A request in flight.
#[derive(Debug)]
pub(crate) struct InFlight(Arc<Life>);

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.in_flight = state.in_flight.saturating_sub(1);
        state.idle = Instant::now();
        drop(state);
        self.0.changed.notify_one();
    }
}

tokio::task_local! {
    static STREAM: Arc<Progress>;
}

/// Whether the peer takes the answer on a stream of HTTP/2, which has a window of its own: since when a piece of it waits.
#[derive(Debug, Default)]
struct Progress(Mutex<Option<Instant>>);

impl Progress {
    /// Ends when a piece has waited for so long, or a little longer.
    async fn stalled(&self, patience: Duration) {
        loop {
            let since = *self.0.lock();
            let look = deadline_after(since.unwrap_or_else(Instant::now), patience);
            if look <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(look).await;
        }
    }
}

/// Runs the streams of an HTTP/2 connection, each in a task. One whose peer makes no room for its answer for too long is given up:
/// its connection takes no further request, the others on it go on, and it ends with them.
#[derive(Debug, Clone)]
pub(crate) struct Streams(pub(crate) Arc<Life>);

impl<F> hyper::rt::Executor<F> for Streams
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, stream: F) {
        let progress = Arc::new(Progress::default());
        let (watched, life) = (progress.clone(), self.0.clone());
        drop(task::spawn_contained("node-api-stream", None, async move {
            // Dropping the stream frees all that it has but its last piece, before which h2 does not say that it is reset.
            tokio::select! {
                _ = STREAM.scope(progress, stream) => {}
                () = watched.stalled(life.limits.write) => {
                    tracing::debug!("an answer that nobody takes was given up");
                    life.stall();
                }
            }
        }));
    }
}

/// What is sent of an answer over HTTP/2 at a time. Once begun, a piece is h2's, and nobody is told whether the peer took it.
const PIECE: usize = 16 << 10;

/// The body of an answer, in flight until it has been sent.
#[derive(Debug)]
pub(crate) struct Answering {
    body: axum::body::Body,
    _in_flight: InFlight,
    /// Of its stream; none over HTTP/1, where [`Impatient`] watches.
    progress: Option<Arc<Progress>>,
    /// What the body gave and was not sent yet.
    rest: Bytes,
}

impl Answering {
    /// The body of the answer to a request in whose task this is called.
    pub(crate) fn new(body: axum::body::Body, in_flight: InFlight) -> Self {
        let progress = STREAM.try_with(Arc::clone).ok();
        Self { body, _in_flight: in_flight, progress, rest: Bytes::new() }
    }
}

impl Body for Answering {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Some(progress) = self.progress.clone() else { return Pin::new(&mut self.body).poll_frame(cx) };
        // The piece before this one has begun to go.
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

/// A stream that fails when its peer takes nothing of what is written for too long.
#[derive(Debug)]
pub(crate) struct Impatient<S> {
    stream: S,
    life: Arc<Life>,
    /// Runs while the peer takes nothing.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> Impatient<S> {
    pub(crate) fn new(stream: S, life: Arc<Life>) -> Self {
        Self { stream, life, stalled: None }
    }

    fn watch<T>(&mut self, written: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let patience = self.life.limits.write;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        ready!(stalled.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer does not read")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Impatient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Impatient<S> {
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
    async fn a_connection_lives_by_what_came_over_it() {
        let limits = Limits::default();
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let new = State {
            accepted: start,
            heard: false,
            trusted: false,
            refused: None,
            in_flight: 0,
            idle: start,
            stalled: false,
        };
        let heard = State { heard: true, in_flight: 1, ..new };
        let refused = State { refused: Some(at(20)), in_flight: 0, ..heard };
        let trusted = State { trusted: true, ..heard };
        let idle = State { in_flight: 0, idle: at(100), ..trusted };
        let once_refused = State { refused: Some(at(20)), ..idle };
        let stalled = State { stalled: true, ..trusted };
        use Verdict::{Ends, Goes, Over};
        for (name, state, now, want) in [
            ("has to ask for something in time", new, 29, Goes(at(30))),
            ("and did not", new, 30, Over),
            ("asked and waits for a review", heard, 59, Goes(at(60))),
            ("was never let in", heard, 60, Over),
            ("is sent away", refused, 20, Ends(at(25))),
            ("does not go", refused, 25, Over),
            ("works for hours", trusted, 100_000, Goes(at(100_090))),
            ("pauses", idle, 189, Goes(at(190))),
            ("paused for too long", idle, 190, Ends(at(195))),
            ("does not see that it is over", idle, 195, Over),
            ("left an answer waiting and has others", stalled, 100_000, Ends(at(100_090))),
            ("and those have ended", State { in_flight: 0, ..stalled }, 0, Ends(at(5))),
            ("and it holds on", State { in_flight: 0, ..stalled }, 5, Over),
            ("was let in and sent away once", once_refused, 189, Goes(at(190))),
        ] {
            assert_eq!(state.judge(at(now), &limits), want, "{name}");
        }
    }
}
