//! The response body of a passed-through stream.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body::Frame;
use hyper::body::Incoming;
use quintlet_model::outcome::Outcome;
use tokio::time::Sleep;
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::Code;
use tracing::Span;

use crate::metrics::Metrics;
use crate::outcome;
use crate::reply::{self, BoxError};

/// The response body of a passed-through stream. The proxy's trailers are added to the runtime's.
pub(super) struct StreamBody {
    pub(super) inner: Option<Incoming>,
    pub(super) method: &'static str,
    pub(super) queued: Duration,
    pub(super) deadline: Option<Pin<Box<Sleep>>>,
    pub(super) closing: Pin<Box<WaitForCancellationFutureOwned>>,
    pub(super) metrics: Metrics,
    pub(super) span: Span,
}

impl StreamBody {
    fn end(&mut self, mut trailers: HeaderMap, outcome: Outcome) -> Frame<Bytes> {
        self.inner = None;
        reply::insert_trailers(&mut trailers, outcome, self.queued);
        self.span.record("outcome", outcome.name());
        self.metrics.done(self.method, outcome, None);
        Frame::trailers(trailers)
    }

    fn fail(&mut self, code: Code, message: String) -> Frame<Bytes> {
        let mut trailers = HeaderMap::new();
        if tonic::Status::new(code, message).add_header(&mut trailers).is_err() {
            trailers.insert("grpc-status", http::HeaderValue::from(code as i32));
        }
        self.end(trailers, Outcome::Unknown)
    }
}

impl Drop for StreamBody {
    fn drop(&mut self) {
        self.metrics.streams.dec();
    }
}

impl http_body::Body for StreamBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        let Some(inner) = this.inner.as_mut() else { return Poll::Ready(None) };
        if let Some(deadline) = this.deadline.as_mut()
            && deadline.as_mut().poll(cx).is_ready()
        {
            let frame = this.fail(Code::DeadlineExceeded, "the stream exceeded its deadline".to_owned());
            return Poll::Ready(Some(Ok(frame)));
        }
        if this.closing.as_mut().poll(cx).is_ready() {
            this.metrics.closed_streams.inc();
            let frame = this.fail(Code::Unavailable, "cri-proxy is stopping".to_owned());
            return Poll::Ready(Some(Ok(frame)));
        }
        let frame = match ready!(Pin::new(inner).poll_frame(cx)) {
            Some(Ok(frame)) => match frame.into_trailers() {
                Ok(trailers) => {
                    let outcome = reply::status_from(&trailers).map_or(Outcome::Unknown, |status| {
                        outcome::from_status(this.method, status.code(), status.message())
                    });
                    this.end(trailers, outcome)
                }
                Err(data) => data,
            },
            Some(Err(error)) => {
                this.metrics.cut_streams.inc();
                this.fail(Code::Unavailable, format!("the runtime went away: {error}"))
            }
            None => this.fail(Code::Internal, "the runtime ended the stream without a status".to_owned()),
        };
        Poll::Ready(Some(Ok(frame)))
    }
}
