//! Streams of bounded messages. The sender of a stream leaves out each item that exceeds [`limits::ITEM`].
//!
//! A receiver ends a stream at an item that it does not decode, and the sender would send the same item again
//! on the next stream: one pod would stop the stream of all pods. Each stream of the contracts is therefore a
//! [`Bounded`] (of a server) or comes from [`bounded_requests`] (of a client); `scripts/message-limits.py`
//! checks that there is no other. A sender that knows the pod of an item asks [`fits`] earlier and reports on
//! the pod.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use prost::Message;
use quintlet_proto::{debug::v1 as debug, limits, podsync::v1 as podsync};
use quintlet_telemetry::metrics;
use tokio::sync::mpsc;
use tonic::{Response, Status, Streaming};

/// An item exceeds [`limits::ITEM`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{bytes} bytes are more than the {} bytes of a message between the services of the node agent",
    limits::ITEM
)]
pub struct TooLarge {
    /// Size of the item.
    pub bytes: usize,
}

/// Returns whether `message` may be an item of a stream.
///
/// # Errors
/// It is too large.
pub fn fits(message: &impl Message) -> Result<(), TooLarge> {
    let bytes = message.encoded_len();
    if bytes <= limits::ITEM { Ok(()) } else { Err(TooLarge { bytes }) }
}

/// Bytes of a message around the only message that it has: a tag and a length, twice.
const AROUND: usize = 16;

/// Returns whether a message that contains only `message`, such as an event or a chunk, may be an item of a
/// stream.
///
/// # Errors
/// It is too large.
pub fn fits_inside(message: &impl Message) -> Result<(), TooLarge> {
    let bytes = message.encoded_len().saturating_add(AROUND);
    if bytes <= limits::ITEM { Ok(()) } else { Err(TooLarge { bytes }) }
}

/// Counts an item that `stream` does not carry, such as `Probe.Drive`.
pub fn count_left_out(stream: &'static str) {
    add_left_out(stream, 1);
}

/// Counts a stream that a client opens or a server serves. A stream that its receiver ends at an item is
/// opened again and again.
fn count_opened(stream: &'static str) {
    metrics::counter_family::<[(&str, &str); 1]>(
        "quintlet_streams_opened",
        "Streams between services, and of subscribers, that were opened",
    )
    .get_or_create(&[("stream", stream)])
    .inc();
    // The series of each open stream exists: an alert does not observe the first increase of a series that
    // appears with it.
    add_left_out(stream, 0);
}

/// Adds to the items that `stream` does not carry.
fn add_left_out(stream: &'static str, items: u64) {
    metrics::counter_family::<[(&str, &str); 1]>(
        "quintlet_messages_left_out",
        "Items of a stream between services, or of a subscriber, that were not sent because they were too large",
    )
    .get_or_create(&[("stream", stream)])
    .inc_by(items);
}

/// Returns whether an item is sent, and counts and logs an item that is not.
fn may_send(stream: &'static str, item: &impl Message) -> bool {
    let Err(error) = fits(item) else { return true };
    count_left_out(stream);
    tracing::info!(stream, bytes = error.bytes, "message left out of the stream, it is too large");
    false
}

/// The answers of a streaming method, without items that are too large.
pub struct Bounded<T>(Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>);

impl<T: Message + 'static> Bounded<T> {
    /// Returns the items of `stream` that may be sent. `name` is that of the service and its method.
    #[must_use]
    pub fn new(name: &'static str, stream: impl Stream<Item = Result<T, Status>> + Send + 'static) -> Self {
        count_opened(name);
        let sent = move |item: &Result<T, Status>| item.as_ref().map_or(true, |item| may_send(name, item));
        Self(Box::pin(stream.filter(move |item| std::future::ready(sent(item)))))
    }

    /// Returns an answer that is split by [`chunks`]. Each chunk is made when it is sent.
    #[must_use]
    pub fn of_chunks(name: &'static str, chunks: impl Iterator<Item = T> + Send + 'static) -> Self {
        Self::new(name, futures::stream::iter(chunks.map(Ok)))
    }
}

impl<T> std::fmt::Debug for Bounded<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Bounded")
    }
}

impl<T> Stream for Bounded<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.as_mut().poll_next(cx)
    }
}

/// Returns the requests of a streaming method, without items that are too large.
pub fn bounded_requests<T: Message + 'static>(
    name: &'static str,
    mut items: mpsc::Receiver<T>,
) -> impl Stream<Item = T> + Send + 'static {
    count_opened(name);
    let items = futures::stream::poll_fn(move |cx| items.poll_recv(cx));
    items.filter(move |item| std::future::ready(may_send(name, item)))
}

/// Splits a text into pieces of [`limits::PIECE`] at most, each of whole characters.
pub fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (piece, more) = rest.split_at(rest.floor_char_boundary(limits::PIECE));
        rest = more;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Bytes that a chunk counts for an item beside those of the item itself.
const FRAME: usize = 8;

/// Splits a list into chunks of [`limits::PIECE`] at most. A larger item has a chunk of its own. An empty
/// list has one empty chunk, which a client of the previous release expects.
pub fn chunks<T: Message>(items: impl IntoIterator<Item = T>) -> impl Iterator<Item = Vec<T>> {
    let mut items = items.into_iter();
    let (mut next, mut is_first) = (items.next(), true);
    std::iter::from_fn(move || {
        let (mut chunk, mut bytes) = (Vec::new(), 0_usize);
        while let Some(item) = next.take() {
            bytes = bytes.saturating_add(item.encoded_len()).saturating_add(FRAME);
            if bytes > limits::PIECE && !chunk.is_empty() {
                next = Some(item);
                break;
            }
            chunk.push(item);
            next = items.next();
        }
        (std::mem::take(&mut is_first) || !chunk.is_empty()).then_some(chunk)
    })
}

/// A message that has a part of a list.
pub trait Chunk: Default {
    /// Appends the items of the next chunk.
    fn append(&mut self, next: Self);
}

impl Chunk for podsync::ListPodsReply {
    fn append(&mut self, next: Self) {
        self.pods.extend(next.pods);
        self.problems.extend(next.problems);
    }
}

impl Chunk for podsync::ListEventsReply {
    fn append(&mut self, next: Self) {
        self.events.extend(next.events);
    }
}

impl Chunk for podsync::ListVolumesReply {
    fn append(&mut self, next: Self) {
        self.volumes.extend(next.volumes);
    }
}

impl Chunk for podsync::ListDevicesReply {
    fn append(&mut self, next: Self) {
        self.resources.extend(next.resources);
        self.holders.extend(next.holders);
    }
}

impl Chunk for podsync::ListClaimsReply {
    fn append(&mut self, next: Self) {
        self.drivers.extend(next.drivers);
        self.claims.extend(next.claims);
    }
}

impl Chunk for podsync::ListCpusReply {
    fn append(&mut self, next: Self) {
        self.policies = self.policies.take().or(next.policies);
        self.cpus.extend(next.cpus);
        self.memory.extend(next.memory);
        self.holders.extend(next.holders);
    }
}

impl Chunk for podsync::ListStorageReply {
    fn append(&mut self, next: Self) {
        self.pods.extend(next.pods);
        self.runtime.extend(next.runtime);
    }
}

impl Chunk for debug::MetricsReply {
    fn append(&mut self, next: Self) {
        self.text.push_str(&next.text);
    }
}

impl Chunk for debug::ProfileReply {
    fn append(&mut self, next: Self) {
        self.data.extend(next.data);
    }
}

impl Chunk for debug::TracesReply {
    fn append(&mut self, next: Self) {
        self.spans.extend(next.spans);
        self.dropped = next.dropped;
    }
}

/// Calls a method whose answer is a stream of chunks, and joins them. A server of the previous release sends
/// one chunk.
///
/// # Errors
/// The error of the call or of the stream.
pub async fn whole<T: Chunk>(
    call: impl Future<Output = Result<Response<Streaming<T>>, Status>>,
) -> Result<Response<T>, Status> {
    let (metadata, mut chunks, extensions) = call.await?.into_parts();
    let mut list = T::default();
    while let Some(chunk) = chunks.message().await? {
        list.append(chunk);
    }
    Ok(Response::from_parts(metadata, list, extensions))
}

/// Like [`whole`], with a time limit for the call and for each chunk: what is listed may have hundreds of
/// megabytes.
///
/// # Errors
/// The error of the call or of the stream, or DEADLINE_EXCEEDED.
pub async fn whole_within<T: Chunk>(
    limit: Duration,
    call: impl Future<Output = Result<Response<Streaming<T>>, Status>>,
) -> Result<T, Status> {
    let mut chunks = timely(limit, call).await?.into_inner();
    let mut list = T::default();
    while let Some(chunk) = timely(limit, chunks.message()).await? {
        list.append(chunk);
    }
    Ok(list)
}

/// Awaits an answer with a time limit.
///
/// # Errors
/// The error of the answer, or DEADLINE_EXCEEDED.
pub async fn timely<T>(
    limit: Duration,
    answer: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    match tokio::time::timeout(limit, answer).await {
        Ok(answer) => answer,
        Err(_) => Err(Status::deadline_exceeded(format!("no answer within {}s", limit.as_secs()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_split_into_chunks_that_fit_and_keep_the_order() {
        let event = |bytes: usize| podsync::EventView { message: "m".repeat(bytes), ..Default::default() };
        let sizes = |items: Vec<usize>| -> Vec<Vec<usize>> {
            let split = chunks(items.into_iter().map(event));
            split.map(|chunk| chunk.iter().map(|event| event.message.len()).collect()).collect()
        };
        let half = limits::PIECE / 2 - 12;
        assert_eq!(sizes(vec![]), [[0_usize; 0]], "one empty chunk");
        assert_eq!(sizes(vec![1, half, half, 3]), [vec![1, half], vec![half, 3]]);
        assert_eq!(sizes(vec![half, half]), [[half, half]]);
        assert_eq!(sizes(vec![1, limits::ITEM, 2, 3]), [vec![1], vec![limits::ITEM], vec![2, 3]]);
        for chunk in chunks(vec![podsync::EventView::default(); limits::PIECE]) {
            let reply = podsync::ListEventsReply { events: chunk };
            assert!(reply.encoded_len() <= limits::PIECE, "{} bytes", reply.encoded_len());
        }
    }

    #[test]
    fn a_text_is_split_into_pieces_on_characters() {
        let text = "aé".repeat(limits::PIECE);
        let split: Vec<&str> = pieces(&text).collect();
        assert_eq!(split.concat(), text);
        assert!(split.len() == 4 && split.iter().all(|piece| piece.len() <= limits::PIECE));
        assert_eq!(pieces("").count(), 0);
    }
}
