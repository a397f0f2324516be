//! Sizes of the messages of all contracts, in bytes.
//!
//! The build script makes every generated client and server use these limits, so no caller sets one.
//!
//! | constant | who checks it |
//! |---|---|
//! | [`ITEM`] | the sender of an item of a stream, before it sends the item (`quintlet_kit::messages`) |
//! | [`REQUEST`] | each client before it sends, each server as it decodes |
//! | [`SUBSCRIBE_REQUEST`] | each server of `subscribe.v1` as it decodes |
//! | [`ANSWER`] | each server before it sends, each client as it decodes |
//!
//! A receiver takes more than a sender sends, so that a later release can raise [`ITEM`] for the receivers of
//! this one.

use tonic::client::Grpc;

/// Largest item of a stream. A receiver of an earlier release decodes 4 MiB, the default of tonic. The
/// largest objects need less: an object of the API server has 1.5 MiB, so a status update with two statuses
/// has 3 MiB, and a probe target has 2 MiB of expanded commands and 1.5 MiB of other fields.
pub const ITEM: usize = 4 << 20;

/// Largest request of a unary call and largest item that a server decodes: that of the CRI, four times
/// [`ITEM`].
pub const REQUEST: usize = 16 << 20;

/// Largest request of a subscriber, which is not part of Quintlet: a greeting and a cursor, with room for
/// fields of later versions. A server decodes a request before it counts the streams of its subscribers.
pub const SUBSCRIBE_REQUEST: usize = 64 << 10;

/// Largest answer of a unary call and largest item that a client decodes: that of an earlier release, whose
/// lists of pods are one message. What grows with the number of pods is a stream with items of at most
/// [`ITEM`].
pub const ANSWER: usize = 64 << 20;

/// Size of the pieces of a text or list that a stream splits: one MiB, so that a stream holds few MiB per
/// caller.
pub const PIECE: usize = 1 << 20;

// An item fits into every receiver.
const _: () = assert!(ITEM <= REQUEST && REQUEST <= ANSWER && PIECE < ITEM);

/// Sets the limits of a client.
pub(crate) fn client<T>(inner: Grpc<T>) -> Grpc<T> {
    inner.max_decoding_message_size(ANSWER).max_encoding_message_size(REQUEST)
}
