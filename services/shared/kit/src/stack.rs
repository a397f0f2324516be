//! The tower layers of the gRPC servers and clients.
//!
//! A server ([`server`]) has, from the outside in:
//!
//! 1. [`CountLayer`]: counts the call by its method and status.
//! 2. [`ContainLayer`]: a panic ends the call alone, and the log line has the pod that the request names.
//! 3. [`DeadlineLayer`]: the caller's `grpc-timeout`.
//! 4. [`ContinueTraceLayer`]: spans of the call belong to the trace of the caller.
//!
//! A client ([`Caller`]) adds its trace and its pod to each request. `docs/design/services.md` has the limits
//! that are no layers.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::{HeaderMap, Request, Response};
use hyper::body::{Body, Frame, SizeHint};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use quintlet_telemetry::metrics;
use quintlet_telemetry::propagate::{self, Continued};
use tokio::time::Sleep;
use tonic::{Code, Status};
use tower::{Layer, Service};

use crate::contain::{self, Contained, Panic, Work};
use crate::status_code;

/// Layers of a server whose services are routed by axum.
#[derive(Debug, Clone, Copy, Default)]
pub struct ServerLayer;

/// A service with the layers of a server.
pub type Served<S, R> = Count<Contain<Deadline<ContinueTrace<S>>, R>>;

/// Returns the layers of a server.
#[must_use]
pub fn server() -> ServerLayer {
    ServerLayer
}

impl<S> Layer<S> for ServerLayer {
    type Service = Served<S, axum::response::Response>;

    fn layer(&self, inner: S) -> Self::Service {
        // axum's responses and those of a layer have one type.
        tower::ServiceBuilder::new()
            .layer(CountLayer)
            .layer(ContainLayer::new(|panic| Status::internal(panic.to_string()).into_http()))
            .layer(DeadlineLayer)
            .layer(ContinueTraceLayer)
            .service(inner)
    }
}

/// Makes a panic in a call the response to that call. Otherwise it would end the connection and all other
/// calls of the client.
#[derive(Debug)]
pub struct ContainLayer<R> {
    answer: fn(&Panic) -> R,
}

impl<R> ContainLayer<R> {
    /// Returns a layer whose response to a panic is that of `answer`.
    #[must_use]
    pub fn new(answer: fn(&Panic) -> R) -> Self {
        Self { answer }
    }
}

impl<R> Clone for ContainLayer<R> {
    fn clone(&self) -> Self {
        Self { answer: self.answer }
    }
}

impl<S, R> Layer<S> for ContainLayer<R> {
    type Service = Contain<S, R>;

    fn layer(&self, inner: S) -> Self::Service {
        Contain { inner, answer: self.answer }
    }
}

/// A service of [`ContainLayer`].
#[derive(Debug)]
pub struct Contain<S, R> {
    inner: S,
    answer: fn(&Panic) -> R,
}

impl<S: Clone, R> Clone for Contain<S, R> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), answer: self.answer }
    }
}

impl<S, B, R> Service<Request<B>> for Contain<S, R>
where
    S: Service<Request<B>, Response = R>,
{
    type Response = R;
    type Error = S::Error;
    type Future = ContainFuture<S::Future, R>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let work = Work::of_request(request.headers());
        let call = contain::contained_request(work, self.inner.call(request));
        ContainFuture { call, answer: self.answer }
    }
}

pin_project_lite::pin_project! {
    /// A call of [`Contain`].
    #[derive(Debug)]
    #[must_use = "futures do nothing unless they are awaited"]
    pub struct ContainFuture<F, R> {
        #[pin]
        call: Contained<F>,
        answer: fn(&Panic) -> R,
    }
}

impl<F, R, E> Future for ContainFuture<F, R>
where
    F: Future<Output = Result<R, E>>,
{
    type Output = Result<R, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let called = ready!(this.call.poll(cx));
        Poll::Ready(called.unwrap_or_else(|panic| Ok((this.answer)(&panic))))
    }
}

/// Makes the spans of a call children of the caller's span (W3C `traceparent`), if they have no other parent.
#[derive(Debug, Clone, Copy, Default)]
pub struct ContinueTraceLayer;

impl<S> Layer<S> for ContinueTraceLayer {
    type Service = ContinueTrace<S>;

    fn layer(&self, inner: S) -> Self::Service {
        ContinueTrace { inner }
    }
}

/// A service of [`ContinueTraceLayer`].
#[derive(Debug, Clone)]
pub struct ContinueTrace<S> {
    inner: S,
}

impl<S, B> Service<Request<B>> for ContinueTrace<S>
where
    S: Service<Request<B>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Continued<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let context = propagate::remote_context(request.headers());
        propagate::continued(context, self.inner.call(request))
    }
}

/// Header with the time that a caller waits.
const GRPC_TIMEOUT: &str = "grpc-timeout";

/// Time by which a deadline precedes that of tonic's server, which answers CANCELLED. tokio's timers have
/// milliseconds.
const BEFORE_TONIC: Duration = Duration::from_millis(2);

/// Answers a call with DEADLINE_EXCEEDED when its caller's deadline passes before the response begins. What
/// the call has begun in tasks of its own continues. A stream that has begun is not ended.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeadlineLayer;

impl<S> Layer<S> for DeadlineLayer {
    type Service = Deadline<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Deadline { inner }
    }
}

/// A service of [`DeadlineLayer`].
#[derive(Debug, Clone)]
pub struct Deadline<S> {
    inner: S,
}

impl<S, B, R> Service<Request<B>> for Deadline<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    R: Default,
{
    type Response = Response<R>;
    type Error = S::Error;
    type Future = DeadlineFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let limit = time_limit(request.headers());
        let end = limit.map(|limit| tokio::time::sleep(limit.saturating_sub(BEFORE_TONIC)));
        DeadlineFuture { call: self.inner.call(request), end }
    }
}

/// Returns the time that a caller waits: at most eight digits and a unit. An invalid one is no limit, as in
/// tonic.
fn time_limit(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(GRPC_TIMEOUT)?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number.saturating_mul(3600)),
        "M" => Duration::from_secs(number.saturating_mul(60)),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

pin_project_lite::pin_project! {
    /// A call of [`Deadline`].
    #[derive(Debug)]
    #[must_use = "futures do nothing unless they are awaited"]
    pub struct DeadlineFuture<F> {
        #[pin]
        call: F,
        #[pin]
        end: Option<Sleep>,
    }
}

impl<F, R, E> Future for DeadlineFuture<F>
where
    F: Future<Output = Result<Response<R>, E>>,
    R: Default,
{
    type Output = Result<Response<R>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if let Poll::Ready(answer) = this.call.poll(cx) {
            return Poll::Ready(answer);
        }
        let Some(end) = this.end.as_pin_mut() else { return Poll::Pending };
        ready!(end.poll(cx));
        Poll::Ready(Ok(Status::deadline_exceeded("the deadline of the caller has passed").into_http()))
    }
}

/// Labels of a call. A method that no service has is `other`, so that callers do not choose the number of
/// series.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabel {
    service: String,
    method: String,
    code: &'static str,
}

/// Counts calls when they end, as `quintlet_grpc_calls_total`. A call that its client cuts is `Canceled`.
#[derive(Debug, Clone, Copy, Default)]
pub struct CountLayer;

impl<S> Layer<S> for CountLayer {
    type Service = Count<S>;

    fn layer(&self, inner: S) -> Self::Service {
        let calls = metrics::counter_family(
            "quintlet_grpc_calls",
            "gRPC calls that have ended, by method and status",
        );
        Count { inner, calls }
    }
}

/// A service of [`CountLayer`].
#[derive(Debug, Clone)]
pub struct Count<S> {
    inner: S,
    calls: Family<CallLabel, Counter>,
}

impl<S, B, R> Service<Request<B>> for Count<S>
where
    S: Service<Request<B>, Response = Response<R>>,
{
    type Response = Response<CountedBody<R>>;
    type Error = S::Error;
    type Future = CountFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let path = request.uri().path().to_owned();
        let open = OpenCall { path, code: None, calls: self.calls.clone() };
        CountFuture { call: self.inner.call(request), open: Some(open) }
    }
}

/// A call that has not ended. It is counted when it is dropped.
#[derive(Debug)]
struct OpenCall {
    path: String,
    code: Option<Code>,
    calls: Family<CallLabel, Counter>,
}

impl OpenCall {
    /// Takes the status from headers or trailers, if they have one.
    fn read(&mut self, fields: &HeaderMap) {
        if let Some(code) = fields.get(Status::GRPC_STATUS) {
            self.code = Some(Code::from_bytes(code.as_bytes()));
        }
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        let code = self.code.unwrap_or(Code::Cancelled);
        let known = (code != Code::Unimplemented).then_some(self.path.as_str());
        let names = known.and_then(|path| path.strip_prefix('/')?.split_once('/'));
        let (service, method) = names.unwrap_or(("other", "other"));
        let label = CallLabel {
            service: service.to_owned(),
            method: method.to_owned(),
            code: status_code::go_name(code),
        };
        self.calls.get_or_create(&label).inc();
    }
}

pin_project_lite::pin_project! {
    /// A call of [`Count`].
    #[derive(Debug)]
    #[must_use = "futures do nothing unless they are awaited"]
    pub struct CountFuture<F> {
        #[pin]
        call: F,
        open: Option<OpenCall>,
    }
}

impl<F, R, E> Future for CountFuture<F>
where
    F: Future<Output = Result<Response<R>, E>>,
{
    type Output = Result<Response<CountedBody<R>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let answer = ready!(this.call.poll(cx));
        let mut open = this.open.take();
        Poll::Ready(answer.map(|answer| {
            // An error without a message is in the headers; any other status is in the trailers.
            if let Some(open) = &mut open {
                open.read(answer.headers());
            }
            answer.map(|body| CountedBody { body, open })
        }))
    }
}

pin_project_lite::pin_project! {
    /// The body of a call that is counted.
    #[derive(Debug)]
    pub struct CountedBody<B> {
        #[pin]
        body: B,
        open: Option<OpenCall>,
    }
}

impl<B: Body> Body for CountedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let this = self.project();
        let frame = ready!(this.body.poll_frame(cx));
        let trailers = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.trailers_ref());
        if let (Some(trailers), Some(open)) = (trailers, this.open.as_mut()) {
            open.read(trailers);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Adds the trace context of the current span and the pod that this thread works for to each request.
#[derive(Debug, Clone)]
pub struct Caller<S> {
    inner: S,
}

impl<S> Caller<S> {
    /// Returns a client of this service.
    #[must_use]
    pub fn new(inner: S) -> Self {
        Self { inner }
    }
}

impl<S, B> Service<Request<B>> for Caller<S>
where
    S: Service<Request<B>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        propagate::inject(request.headers_mut());
        contain::name_pod(request.headers_mut());
        self.inner.call(request)
    }
}

#[cfg(test)]
mod tests;
