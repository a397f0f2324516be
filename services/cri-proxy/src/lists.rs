//! Conversion between list replies and list streams.
//!
//! A list may exceed the size of a gRPC message (16 MiB at the runtime, here and at callers). The CRI of
//! Kubernetes 1.36 has a stream for each list. Both have the same request, and items are field 1 in the
//! messages of both. So the concatenated messages of a stream are a list reply, and a list reply split
//! between its fields is a stream. The code does not depend on the message types.
use std::collections::HashMap;

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;

use crate::policy::{IMAGE, Policy, RUNTIME};

/// Maximum size of a message to a caller, unless a single item is larger.
pub const CHUNK: usize = 1 << 20;
/// Maximum size of a CRI message.
pub const MAX_MESSAGE: usize = 16 << 20;
/// Extra capacity of a message for the data received with its last bytes: a few HTTP/2 frames.
const SLACK: usize = 64 << 10;
/// Size of the gRPC prefix: the compression flag and the length.
const PREFIX: usize = 5;

/// List methods with their streams.
const LIST_METHODS: &[(&str, &str, &str)] = &[
    (RUNTIME, "ListPodSandbox", "StreamPodSandboxes"),
    (RUNTIME, "ListContainers", "StreamContainers"),
    (RUNTIME, "ListContainerStats", "StreamContainerStats"),
    (RUNTIME, "ListPodSandboxStats", "StreamPodSandboxStats"),
    (RUNTIME, "ListPodSandboxMetrics", "StreamPodSandboxMetrics"),
    (IMAGE, "ListImages", "StreamImages"),
];

/// The two methods of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListMethods {
    /// The unary method.
    pub list: &'static str,
    /// The streaming method.
    pub stream: &'static str,
    /// Whether the caller used the streaming method.
    pub is_stream: bool,
}

/// Returns the two methods of a list, or none for other calls.
#[must_use]
pub fn list_methods(row: &Policy) -> Option<ListMethods> {
    let mut of_service = LIST_METHODS.iter().filter(|(service, ..)| *service == row.service);
    of_service.find_map(|&(_, list, stream)| {
        (row.method == list || row.method == stream).then_some(ListMethods {
            list,
            stream,
            is_stream: row.method == stream,
        })
    })
}

/// The list streams that the runtime does not implement, per connection: after a reconnect they are tried
/// again.
#[derive(Debug, Default)]
pub struct UnsupportedListStreams(Mutex<HashMap<&'static str, u64>>);

impl UnsupportedListStreams {
    /// Records that the stream is unimplemented on this connection.
    pub fn record(&self, stream: &'static str, connection: u64) {
        self.0.lock().insert(stream, connection);
    }

    /// Returns whether the stream is unimplemented on this connection.
    #[must_use]
    pub fn contains(&self, stream: &'static str, connection: u64) -> bool {
        self.0.lock().get(stream) == Some(&connection)
    }
}

/// An invalid list reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadList {
    /// The first byte of a frame, which is the compression flag, has an unknown value.
    #[error("a gRPC prefix begins with {0}, neither 0 nor 1")]
    Flag(u8),
    /// The runtime compressed a message although the request does not accept it.
    #[error("compressed messages are not supported")]
    Compressed,
    /// The length in a prefix is above the limit of one message.
    #[error("a message is larger than {MAX_MESSAGE} bytes")]
    TooLarge,
    /// A message is not valid protobuf, or ends within a field.
    #[error("byte {at} of a message does not start a valid field")]
    Field {
        /// Offset of the field.
        at: usize,
    },
    /// The runtime closed the stream within a message.
    #[error("the body is truncated: {missing} bytes of a message are missing")]
    Truncated {
        /// Lower bound of the missing bytes.
        missing: usize,
    },
}

/// Splits list replies, streamed or not, into messages of whole items. Each byte is copied once.
///
/// It holds the message in construction and the item being read: at most `chunk`, the last input, and one
/// item.
#[derive(Debug)]
pub struct ListSplitter {
    chunk: usize,
    /// The part of a prefix read so far.
    prefix: [u8; PREFIX],
    has: usize,
    /// Missing bytes of the current message, and its length.
    left: usize,
    length: usize,
    /// Space for a prefix, whole items, and the item being read.
    out: BytesMut,
    /// Offset in `out` of the item being read.
    item: usize,
}

impl ListSplitter {
    /// Creates a splitter for messages of at most `chunk` bytes, unless a single item is larger.
    #[must_use]
    pub fn new(chunk: usize) -> Self {
        let out = BytesMut::from(&[0; PREFIX][..]);
        Self { chunk, prefix: [0; PREFIX], has: 0, left: 0, length: 0, out, item: PREFIX }
    }

    /// Returns the number of buffered bytes.
    #[must_use]
    pub fn held(&self) -> usize {
        self.out.len().saturating_sub(PREFIX)
    }

    /// Adds input. Completed messages are appended to `full`, with their gRPC prefix.
    ///
    /// # Errors
    /// Fails if the input is invalid.
    pub fn push(&mut self, mut data: &[u8], full: &mut Vec<Bytes>) -> Result<(), BadList> {
        while let Some(&first) = data.first() {
            if self.left > 0 {
                let (now, later) = data.split_at(self.left.min(data.len()));
                self.out.extend_from_slice(now);
                self.left = self.left.saturating_sub(now.len());
                data = later;
                self.read_items(full)?;
                continue;
            }
            match (self.has, first) {
                (0, 1) => return Err(BadList::Compressed),
                (0, flag @ 2..) => return Err(BadList::Flag(flag)),
                _ => {}
            }
            let (now, later) = data.split_at(PREFIX.saturating_sub(self.has).min(data.len()));
            let has = self.has.saturating_add(now.len());
            self.prefix[self.has..has].copy_from_slice(now);
            self.has = has;
            data = later;
            if self.has == PREFIX {
                let [_, length @ ..] = self.prefix;
                self.length = u32::from_be_bytes(length) as usize;
                (self.has, self.left) = (0, self.length);
                if self.length > MAX_MESSAGE {
                    return Err(BadList::TooLarge);
                }
            }
        }
        Ok(())
    }

    /// Finds the complete items in the current message.
    fn read_items(&mut self, full: &mut Vec<Bytes>) -> Result<(), BadList> {
        loop {
            let begun = self.out.get(self.item..).unwrap_or_default();
            let at = self.length.saturating_sub(self.left).saturating_sub(begun.len());
            let length = match field_length(begun) {
                Field::Length(length) if length <= begun.len() => length,
                // The rest of the item may follow.
                Field::Length(_) | Field::Incomplete if self.left > 0 || begun.is_empty() => return Ok(()),
                Field::Length(_) | Field::Incomplete | Field::Invalid => return Err(BadList::Field { at }),
            };
            // The item is complete: it ends within `out`.
            if self.item.saturating_add(length) > self.chunk.saturating_add(PREFIX) && self.item > PREFIX {
                full.push(self.take_message());
            }
            self.item = self.item.saturating_add(length);
        }
    }

    /// Returns the complete items as a message with its prefix.
    fn take_message(&mut self) -> Bytes {
        let begun = self.out.split_off(self.item);
        let mut next = BytesMut::with_capacity(
            self.chunk.min(CHUNK).saturating_add(begun.len()).saturating_add(PREFIX + SLACK),
        );
        next.extend_from_slice(&[0; PREFIX]);
        next.extend_from_slice(&begun);
        self.item = PREFIX;
        with_prefix(std::mem::replace(&mut self.out, next))
    }

    /// Returns the last message, if there is one.
    ///
    /// # Errors
    /// Fails with [`BadList::Truncated`] if the input was incomplete.
    pub fn finish(self) -> Result<Option<Bytes>, BadList> {
        if self.left > 0 || self.has > 0 {
            return Err(BadList::Truncated {
                missing: self.left.max(PREFIX.saturating_sub(self.has) % PREFIX),
            });
        }
        Ok((self.held() > 0).then(|| with_prefix(self.out)))
    }
}

/// Sets the prefix of a message, for which space is reserved.
fn with_prefix(mut message: BytesMut) -> Bytes {
    // The length is at most MAX_MESSAGE.
    let length = u32::try_from(message.len().saturating_sub(PREFIX)).unwrap_or(u32::MAX);
    message[1..PREFIX].copy_from_slice(&length.to_be_bytes());
    message.freeze()
}

/// The result of parsing the start of a field.
enum Field {
    /// Length of the field, including its tag.
    Length(usize),
    /// More bytes are needed.
    Incomplete,
    Invalid,
}

fn field_length(bytes: &[u8]) -> Field {
    let (tag, head) = match varint(bytes) {
        Ok(read) => read,
        Err(field) => return field,
    };
    let body = bytes.get(head..).unwrap_or_default();
    let length = match tag & 7 {
        0 => varint(body).map(|(_, size)| size),
        1 => Ok(8),
        2 => varint(body).and_then(|(length, size)| {
            usize::try_from(length).ok().and_then(|l| l.checked_add(size)).ok_or(Field::Invalid)
        }),
        5 => Ok(4),
        // Groups exist in proto2 only; the CRI has none.
        _ => Err(Field::Invalid),
    };
    match length {
        Ok(length) => head.checked_add(length).map_or(Field::Invalid, Field::Length),
        Err(field) => field,
    }
}

/// Parses a varint. Returns it with its length.
fn varint(bytes: &[u8]) -> Result<(u64, usize), Field> {
    let mut value = 0u64;
    for (i, byte) in (0u32..10).zip(bytes) {
        value |= u64::from(byte & 0x7f) << i.saturating_mul(7);
        if byte & 0x80 == 0 {
            return Ok((value, (i as usize).saturating_add(1)));
        }
    }
    Err(if bytes.len() < 10 { Field::Incomplete } else { Field::Invalid })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message as _;
    use quintlet_cri_api::v1;

    use super::*;
    use crate::policy;

    #[test]
    fn every_list_in_the_table_has_a_stream_with_the_same_policy() {
        let row = |method: &str| policy::TABLE.iter().find(|r| r.method == method).unwrap();
        for (_, list, stream) in LIST_METHODS {
            let (list, stream) = (row(list), row(stream));
            assert_eq!((list.class, list.lane, list.sockets), (stream.class, stream.lane, stream.sockets));
            assert!(!list_methods(list).unwrap().is_stream && list_methods(stream).unwrap().is_stream);
        }
        let others =
            policy::TABLE.iter().filter(|r| r.method.starts_with("List") && list_methods(r).is_none());
        assert_eq!(others.map(|r| r.method).collect::<Vec<_>>(), ["ListMetricDescriptors"]);
    }

    /// Returns all messages for the given bytes.
    fn cut(bytes: &[u8], piece: usize, chunk: usize) -> Result<Vec<Bytes>, BadList> {
        let mut splitter = ListSplitter::new(chunk);
        let mut full = Vec::new();
        for piece in bytes.chunks(piece) {
            splitter.push(piece, &mut full)?;
        }
        full.extend(splitter.finish()?);
        Ok(full)
    }

    fn framed(message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        [&[0], &length[..], message].concat()
    }

    #[test]
    fn an_invalid_message_is_refused() {
        for bad in [&[0x0a, 5, 1][..], &[0x0b], &[0x0a], &[0x80], &[0x09, 1, 2], &[0xff; 11], &[0x0a, 0xff]] {
            for piece in 1..12 {
                let answer = cut(&framed(bad), piece, 100);
                assert_eq!(answer, Err(BadList::Field { at: 0 }), "{bad:?} by {piece}");
            }
        }
        assert_eq!(cut(&framed(&[0x08, 1, 0x0a, 5, 1]), 3, 100), Err(BadList::Field { at: 2 }));
        assert_eq!(cut(&[0, 0, 0], 9, 9), Err(BadList::Truncated { missing: 2 }));
        assert_eq!(cut(&[0, 0, 0, 0, 2, 8], 9, 9), Err(BadList::Truncated { missing: 1 }));
        assert_eq!(cut(&[1, 0, 0, 0, 0], 9, 9), Err(BadList::Compressed));
        assert_eq!(cut(&[7, 0, 0, 0, 0], 9, 9), Err(BadList::Flag(7)));
        assert_eq!(cut(&[0, 1, 0, 0, 1], 9, 9), Err(BadList::TooLarge));
        assert_eq!(cut(&[0; 10], 3, 9), Ok(vec![]), "two messages without an item");
    }

    proptest! {
        #[test]
        fn a_list_in_one_or_many_frames_is_forwarded_in_messages_of_whole_items(
            sizes in proptest::collection::vec(0..400usize, 0..60),
            per_message in 1..60usize,
            piece in 1..500usize,
            chunk in 1..1000usize,
        ) {
            let item = |size: &usize| v1::Container { id: "x".repeat(*size), ..Default::default() };
            let containers: Vec<_> = sizes.iter().map(item).collect();
            let message = |part: &[v1::Container]| {
                framed(&v1::ListContainersResponse { containers: part.to_vec() }.encode_to_vec())
            };
            let bytes = containers.chunks(per_message).map(message).collect::<Vec<_>>().concat();
            let largest = containers.iter().map(|c| message(std::slice::from_ref(c)).len()).max().unwrap_or(0);
            let mut splitter = ListSplitter::new(chunk);
            let mut full = Vec::new();
            for piece in bytes.chunks(piece) {
                splitter.push(piece, &mut full).unwrap();
                prop_assert!(splitter.held() <= chunk.max(largest) + piece.len() + largest);
            }
            full.extend(splitter.finish().unwrap());
            let mut seen = Vec::new();
            for message in full {
                prop_assert_eq!(&framed(&message[PREFIX..]), &message);
                let part = v1::ListContainersResponse::decode(&message[PREFIX..]).unwrap().containers;
                prop_assert!(!part.is_empty());
                prop_assert!(message.len() <= chunk + PREFIX || part.len() == 1);
                seen.extend(part);
            }
            prop_assert_eq!(seen, containers);
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64), piece in 1..9usize) {
            let _ = cut(&bytes, piece, 16);
            if let Ok(messages) = cut(&framed(&bytes), piece, 16) {
                let items: Vec<u8> = messages.iter().flat_map(|m| m[PREFIX..].to_vec()).collect();
                prop_assert_eq!(items, bytes);
            }
        }
    }
}
