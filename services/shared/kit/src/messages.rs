//! Streams of bounded messages. The sender of a stream leaves out each item that exceeds [`limits::ITEM`].
//!
//! A receiver ends a stream at an item that it does not decode, and the sender would send the same item again on the next stream: one
//! pod would stop the stream of all pods. Each stream of the contracts is therefore a [`Bounded`] (of a server) or comes from
//! [`bounded_requests`] (of a client); `scripts/message-limits.py` checks that there is no other. A sender that knows the pod of an item
//! asks [`fits`] earlier and reports on the pod.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures::{Stream, StreamExt as _};
use prost::Message;
use quintlet_proto::limits;
use quintlet_telemetry::metrics;
use tokio::sync::mpsc;
use tonic::Status;

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

/// Counts an item that `stream` does not carry, such as `Probe.Drive`.
pub fn count_left_out(stream: &'static str) {
    metrics::counter_family::<[(&str, &str); 1]>(
        "quintlet_messages_left_out",
        "Items of a stream between services that were not sent because they were too large",
    )
    .get_or_create(&[("stream", stream)])
    .inc();
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
        let sent = move |item: &Result<T, Status>| item.as_ref().map_or(true, |item| may_send(name, item));
        Self(Box::pin(stream.filter(move |item| std::future::ready(sent(item)))))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_split_into_pieces_on_characters() {
        let text = "aé".repeat(limits::PIECE);
        let split: Vec<&str> = pieces(&text).collect();
        assert_eq!(split.concat(), text);
        assert!(split.len() == 4 && split.iter().all(|piece| piece.len() <= limits::PIECE));
        assert_eq!(pieces("").count(), 0);
    }
}
