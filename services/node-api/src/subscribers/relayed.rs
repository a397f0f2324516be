//! The body of a stream that is passed on.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame};
use prometheus_client::metrics::gauge::Gauge;
use quintlet_kit::slots::Slot;
use tonic::Status;

/// Completes with the status of a stream that ends before its service ends it.
pub(super) type EarlyEnd = Pin<Box<dyn Future<Output = Status> + Send>>;

/// Passes on a stream of a service. The stream counts as open until this is dropped.
pub(super) struct RelayedBody {
    /// The stream of the service, until it has ended.
    body: Option<tonic::body::Body>,
    end: EarlyEnd,
    open: Gauge,
    _slot: Slot<String>,
}

impl RelayedBody {
    pub(super) fn new(body: tonic::body::Body, end: EarlyEnd, open: Gauge, slot: Slot<String>) -> Self {
        open.inc();
        Self { body: Some(body), end, open, _slot: slot }
    }

    /// Ends the stream, and returns its trailers.
    fn trailers(&mut self, status: &Status) -> Frame<Bytes> {
        self.body = None;
        let mut trailers = HeaderMap::new();
        // A status of this module has no metadata, which alone can be invalid.
        let _ = status.add_header(&mut trailers);
        Frame::trailers(trailers)
    }
}

impl Body for RelayedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = Pin::new(body).poll_frame(cx);
        match frame {
            Poll::Ready(Some(Err(_))) => {
                let lost = Status::unavailable("the connection to the service is lost");
                Poll::Ready(Some(Ok(self.trailers(&lost))))
            }
            Poll::Ready(ready) => Poll::Ready(ready),
            Poll::Pending => self.end.as_mut().poll(cx).map(|status| Some(Ok(self.trailers(&status)))),
        }
    }
}

impl Drop for RelayedBody {
    fn drop(&mut self) {
        self.open.dec();
    }
}
