//! Server streams that are passed through frame by frame.

use http::{HeaderMap, Response};
use hyper::body::Incoming;
use quintlet_kit::clock::{bounded, deadline_after};
use quintlet_model::outcome::Outcome;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tracing::Span;

use super::call::record_reply;
use super::dispatch::Dispatcher;
use super::stream_body::StreamBody;
use crate::lanes::Priority;
use crate::outcome;
use crate::policy::Lane;
use crate::reply::{self, Body, Frames, Reply};
use crate::upstream::SendError;

/// A stream that a caller opens.
#[derive(Debug, Clone, Copy)]
pub(super) struct OpenedStream<'a> {
    /// The label of the method in metrics.
    pub(super) method: &'static str,
    pub(super) path: &'a str,
    pub(super) lane: Option<Lane>,
}

impl OpenedStream<'_> {
    /// Passes the stream through on a connection of its own, until `closing` is cancelled.
    pub(super) async fn pass(
        self,
        dispatcher: &Dispatcher,
        closing: &CancellationToken,
        headers: HeaderMap,
        body: Incoming,
    ) -> Response<Body> {
        let Self { method, path, lane } = self;
        let arrived = Instant::now();
        let refuse = |code, message, outcome, queued| {
            dispatcher.metrics.done(method, outcome, None);
            let reply = Reply::local(code, message, outcome, queued);
            record_reply(&Span::current(), &reply);
            reply.into_response()
        };
        // The slot is released once the stream is open: a watch would hold it forever.
        let slot = match lane {
            Some(lane) => match dispatcher.lanes.enter(lane, Priority::Other, None).await {
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
        let upstream = dispatcher.upstreams.of(path).new_connection();
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
                if let Some(status) = reply::status_from(&head.headers) {
                    let outcome = outcome::from_status(method, status.code(), status.message());
                    dispatcher.metrics.done(method, outcome, None);
                    reply::insert_trailers(&mut head.headers, outcome, queued);
                    return Response::from_parts(head, Frames::from_data(Vec::new()));
                }
                dispatcher.metrics.streams.inc();
                let deadline = timeout.map(|t| {
                    Box::pin(tokio::time::sleep_until(deadline_after(arrived, queued.saturating_add(t))))
                });
                let body = StreamBody {
                    inner: Some(body),
                    method,
                    queued,
                    deadline,
                    closing: Box::pin(closing.clone().cancelled_owned()),
                    metrics: dispatcher.metrics.clone(),
                    span: Span::current(),
                };
                Response::from_parts(head, Body::new(body))
            }
            Err(SendError::NotSent(error)) => {
                refuse(Code::Unavailable, error.to_string(), Outcome::NotDispatched, queued)
            }
            Err(SendError::Interrupted(error)) => {
                dispatcher.metrics.cut_streams.inc();
                refuse(Code::Unavailable, format!("the runtime went away: {error}"), Outcome::Unknown, queued)
            }
        }
    }
}
