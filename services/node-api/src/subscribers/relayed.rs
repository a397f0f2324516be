//! The body of a stream that is passed on.

use std::pin::Pin;
use std::sync::Weak;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame};
use prometheus_client::metrics::gauge::Gauge;
use quintlet_kit::slots::Slot;
use tokio::sync::oneshot;
use tonic::{Code, Status};

use crate::connection::ConnectionState;

/// Completes with the status of a stream that ends before its service ends it.
pub(super) type EarlyEnd = Pin<Box<dyn Future<Output = Status> + Send>>;

/// Time that a client has to take the early end of a stream. Less than the grace period of a stop.
const TAKEN_WITHIN: Duration = Duration::from_secs(1);

/// Sends the body of a stream its early end, and then closes the connection: the body of a client whose
/// window is closed is not polled. All streams of a connection have the same reason to end. Completes without
/// an effect once the body is dropped.
pub(super) async fn end_early(
    end: EarlyEnd,
    mut body: oneshot::Sender<Status>,
    connection: Weak<ConnectionState>,
) {
    // Both arms only wait.
    let status = tokio::select! {
        status = end => status,
        () = body.closed() => return,
    };
    let _ = body.send(status);
    tokio::time::sleep(TAKEN_WITHIN).await;
    if let Some(connection) = connection.upgrade() {
        connection.close();
    }
}

/// The place in the messages of a stream that was passed on.
#[derive(Debug, Default)]
struct Place {
    /// The beginning of the prefix of a message: a flag, and the length in four bytes.
    prefix: Vec<u8>,
    /// Bytes of the message that follow.
    rest: usize,
}

impl Place {
    const PREFIX: usize = 5;

    fn pass(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            let wanted = match self.rest {
                0 => Self::PREFIX.saturating_sub(self.prefix.len()),
                rest => rest,
            };
            let (piece, after) = data.split_at(wanted.min(data.len()));
            data = after;
            if self.rest > 0 {
                self.rest = self.rest.saturating_sub(piece.len());
                continue;
            }
            self.prefix.extend_from_slice(piece);
            if let [_, a, b, c, d] = *self.prefix.as_slice() {
                self.rest = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
                self.prefix.clear();
            }
        }
    }

    fn is_between_messages(&self) -> bool {
        self.rest == 0 && self.prefix.is_empty()
    }
}

/// Passes on a stream of a service. The stream counts as open until this is dropped.
pub(super) struct RelayedBody {
    /// The stream of the service, until it has ended.
    body: Option<tonic::body::Body>,
    /// Has the status of an early end, from [`end_early`].
    end: oneshot::Receiver<Status>,
    ending: Option<Status>,
    place: Place,
    open: Gauge,
    _slot: Slot<String>,
}

impl RelayedBody {
    pub(super) fn new(
        body: tonic::body::Body,
        end: oneshot::Receiver<Status>,
        open: Gauge,
        slot: Slot<String>,
    ) -> Self {
        open.inc();
        Self { body: Some(body), end, ending: None, place: Place::default(), open, _slot: slot }
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
        let this = &mut *self;
        let Some(body) = &mut this.body else { return Poll::Ready(None) };
        // Before the body, which may have a frame at any time.
        if this.ending.is_none()
            && let Poll::Ready(end) = Pin::new(&mut this.end).poll(cx)
        {
            this.ending = Some(end.unwrap_or_else(|_| Status::internal("the stream is not watched")));
        }
        // A client would take a part of a message with the status OK for an error.
        if let Some(status) =
            this.ending.take_if(|status| status.code() != Code::Ok || this.place.is_between_messages())
        {
            return Poll::Ready(Some(Ok(this.trailers(&status))));
        }
        let frame = ready!(Pin::new(body).poll_frame(cx));
        match frame {
            Some(Err(_)) => {
                let lost = Status::unavailable("the connection to the service is lost");
                Poll::Ready(Some(Ok(this.trailers(&lost))))
            }
            Some(Ok(frame)) => {
                this.place.pass(frame.data_ref().map_or(&[], |data| data));
                Poll::Ready(Some(Ok(frame)))
            }
            None => Poll::Ready(None),
        }
    }

    // Without it, an answer that has trailers alone would be sent with an empty piece of data, which some
    // clients take for an error.
    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }
}

impl Drop for RelayedBody {
    fn drop(&mut self) {
        self.open.dec();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use http_body_util::{BodyExt as _, StreamBody};
    use node_api_access::limits::{ConnectionLimiter, Limits, Share, Slots};

    use super::*;
    use crate::connection::ConnectionDecision;

    fn relayed(body: tonic::body::Body, end: oneshot::Receiver<Status>) -> RelayedBody {
        let slot = Slots::default().enter("watcher".to_owned(), Share { all: 1, each: 1 }).unwrap();
        RelayedBody::new(body, end, Gauge::default(), slot)
    }

    /// Returns a body that always has a frame: a message of three bytes takes two frames.
    fn endless() -> tonic::body::Body {
        let pieces = [&[0, 0, 0, 0, 3, 7][..], &[8, 9]].into_iter().cycle();
        let frames = pieces.map(|piece| Ok::<_, Status>(Frame::data(Bytes::from_static(piece))));
        tonic::body::Body::new(StreamBody::new(futures::stream::iter(frames)))
    }

    /// Returns the size of the data before the end, and the status.
    async fn rest(mut body: RelayedBody) -> (usize, Code) {
        let mut size = 0_usize;
        for _ in 0..10 {
            let frame = body.frame().await.expect("an end with trailers").unwrap();
            match frame.into_trailers() {
                Ok(trailers) => {
                    assert!(body.is_end_stream());
                    return (size, Status::from_header_map(&trailers).unwrap().code());
                }
                Err(frame) => size += frame.into_data().unwrap().len(),
            }
        }
        panic!("the stream goes on");
    }

    #[tokio::test]
    async fn a_stream_that_always_has_a_frame_ends_at_once_or_after_its_message() {
        for (passed, status, left) in [
            (0, Status::ok("stops"), 0),
            (2, Status::ok("stops"), 0),
            (1, Status::ok("stops"), 2),
            (1, Status::unauthenticated("expired"), 0),
        ] {
            let (sender, end) = oneshot::channel();
            let mut body = relayed(endless(), end);
            for _ in 0..passed {
                assert!(body.frame().await.unwrap().unwrap().is_data());
            }
            let code = status.code();
            sender.send(status).unwrap();
            assert_eq!(rest(body).await, (left, code), "after {passed} frames");
        }
    }

    #[test]
    fn the_place_is_known_for_any_pieces() {
        let stream = [&[0, 0, 0, 0, 0][..], &[0, 0, 0, 0, 2, 1, 1], &[1, 0, 0, 0, 1, 5]].concat();
        let ends = [0, 5, 12, 18];
        for size in 1..=stream.len() {
            let (mut place, mut passed) = (Place::default(), 0);
            for piece in stream.chunks(size) {
                place.pass(piece);
                passed += piece.len();
                assert_eq!(place.is_between_messages(), ends.contains(&passed), "{passed} in {size}");
            }
        }
    }

    #[tokio::test]
    async fn an_answer_without_data_has_its_end_in_its_header() {
        let (_sender, end) = oneshot::channel();
        assert!(relayed(tonic::body::Body::empty(), end).is_end_stream());
        let (_sender, end) = oneshot::channel();
        assert!(!relayed(endless(), end).is_end_stream());
    }

    #[tokio::test(start_paused = true)]
    async fn the_connection_of_a_client_that_does_not_take_the_end_is_closed() {
        let limits = Limits::default();
        let slot = ConnectionLimiter::default().enter([127, 0, 0, 1].into(), &limits).unwrap();
        let connection = Arc::new(ConnectionState::new(slot, limits));
        // A stream that its client closed leaves the connection open.
        let (sender, end) = oneshot::channel();
        drop(end);
        end_early(Box::pin(std::future::pending()), sender, Arc::downgrade(&connection)).await;
        assert_ne!(connection.decision(), ConnectionDecision::Close);
        // Nothing polls the body of this one.
        let (sender, _end) = oneshot::channel();
        let expired = Box::pin(std::future::ready(Status::unauthenticated("expired")));
        end_early(expired, sender, Arc::downgrade(&connection)).await;
        assert_eq!(connection.decision(), ConnectionDecision::Close);
    }
}
