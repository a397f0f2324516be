//! Lists and their streams: which belong together, and how one is made of the other.
//!
//! A list may be larger than a gRPC message (16 MiB at the runtime, at this proxy and at its callers). The CRI of Kubernetes 1.36 has a
//! stream for each list. Both take the same request, and in every message of both the items are field 1: messages of a stream put one
//! behind the other are the list's answer, and a list's answer cut between its fields is a stream. Nothing here knows the types.
use std::collections::HashMap;

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;

use crate::policy::{IMAGE, Policy, RUNTIME};

/// A message to a caller holds so much, unless a single item is larger.
pub const CHUNK: usize = 1 << 20;
/// The CRI's limit of a message.
pub const MAX_MESSAGE: usize = 16 << 20;
/// Room behind a message being made for what comes with its last bytes: a few frames of HTTP/2.
const SLACK: usize = 64 << 10;
/// Before each message: whether it is compressed, and its length.
const PREFIX: usize = 5;

/// The lists with their streams.
const TWINS: &[(&str, &str, &str)] = &[
    (RUNTIME, "ListPodSandbox", "StreamPodSandboxes"),
    (RUNTIME, "ListContainers", "StreamContainers"),
    (RUNTIME, "ListContainerStats", "StreamContainerStats"),
    (RUNTIME, "ListPodSandboxStats", "StreamPodSandboxStats"),
    (RUNTIME, "ListPodSandboxMetrics", "StreamPodSandboxMetrics"),
    (IMAGE, "ListImages", "StreamImages"),
];

/// A list, whichever way it was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Twins {
    /// The call with one answer.
    pub list: &'static str,
    /// The call with a stream of them.
    pub stream: &'static str,
    /// The caller wants a stream.
    pub streamed: bool,
}

/// The two calls of a list; None: the row is none.
#[must_use]
pub fn twins(row: &Policy) -> Option<Twins> {
    let mut of_service = TWINS.iter().filter(|(service, ..)| *service == row.service);
    of_service.find_map(|&(_, list, stream)| {
        (row.method == list || row.method == stream).then_some(Twins {
            list,
            stream,
            streamed: row.method == stream,
        })
    })
}

/// Which streams the runtime has said it lacks, and on which connection: after an upgrade it is asked again.
#[derive(Debug, Default)]
pub struct Lacking(Mutex<HashMap<&'static str, u64>>);

impl Lacking {
    /// It said so on this connection.
    pub fn note(&self, stream: &'static str, connection: u64) {
        self.0.lock().insert(stream, connection);
    }

    /// Whether it said so on this connection.
    #[must_use]
    pub fn has(&self, stream: &'static str, connection: u64) -> bool {
        self.0.lock().get(stream) == Some(&connection)
    }
}

/// What is wrong with a list of the runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadList {
    /// The flag before a message is neither 0 nor 1.
    #[error("a gRPC prefix begins with {0}, neither 0 nor 1")]
    Flag(u8),
    /// Compressed messages cannot be read here.
    #[error("compressed messages are not taken here")]
    Compressed,
    /// A message is larger than the CRI allows.
    #[error("a message is larger than {MAX_MESSAGE} bytes")]
    TooLarge,
    /// A message has bytes that are no field of protobuf, or ends within one.
    #[error("byte {at} of a message begins no field")]
    Field {
        /// Where.
        at: usize,
    },
    /// The body ends within a message.
    #[error("the body is cut: {missing} bytes of a message are missing")]
    Cut {
        /// At least so many.
        missing: usize,
    },
}

/// Takes the bytes of a list's answer, stream or not, and makes messages of whole items of them. Each byte is copied once.
///
/// It holds the message being made and the item being read, so at most `chunk`, what was put in last, and one item.
#[derive(Debug)]
pub struct Cutter {
    chunk: usize,
    /// Bytes of a prefix read so far.
    prefix: [u8; PREFIX],
    has: usize,
    /// What is missing of the message being read, and how long it is.
    left: usize,
    length: usize,
    /// Room for a prefix, whole items, and the item being read.
    out: BytesMut,
    /// Where in `out` the item being read begins.
    item: usize,
}

impl Cutter {
    /// Messages will be of at most `chunk` bytes, unless a single item is larger.
    #[must_use]
    pub fn new(chunk: usize) -> Self {
        let out = BytesMut::from(&[0; PREFIX][..]);
        Self { chunk, prefix: [0; PREFIX], has: 0, left: 0, length: 0, out, item: PREFIX }
    }

    /// Bytes held.
    #[must_use]
    pub fn held(&self) -> usize {
        self.out.len().saturating_sub(PREFIX)
    }

    /// Takes bytes in; the messages that are full go to `full`, in their frames.
    ///
    /// # Errors
    /// See [`BadList`].
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

    /// Finds the whole items in what there is of the message being read.
    fn read_items(&mut self, full: &mut Vec<Bytes>) -> Result<(), BadList> {
        loop {
            let begun = self.out.get(self.item..).unwrap_or_default();
            let at = self.length.saturating_sub(self.left).saturating_sub(begun.len());
            let length = match field_length(begun) {
                Field::Is(length) if length <= begun.len() => length,
                // The rest of it is to come, if there is any.
                Field::Is(_) | Field::Short if self.left > 0 || begun.is_empty() => return Ok(()),
                Field::Is(_) | Field::Short | Field::Bad => return Err(BadList::Field { at }),
            };
            // The item is whole: it ends within `out`.
            if self.item.saturating_add(length) > self.chunk.saturating_add(PREFIX) && self.item > PREFIX {
                full.push(self.cut());
            }
            self.item = self.item.saturating_add(length);
        }
    }

    /// The whole items so far as a message in its frame.
    fn cut(&mut self) -> Bytes {
        let begun = self.out.split_off(self.item);
        let mut next = BytesMut::with_capacity(
            self.chunk.min(CHUNK).saturating_add(begun.len()).saturating_add(PREFIX + SLACK),
        );
        next.extend_from_slice(&[0; PREFIX]);
        next.extend_from_slice(&begun);
        self.item = PREFIX;
        sealed(std::mem::replace(&mut self.out, next))
    }

    /// The last message; None: there was nothing left for one.
    ///
    /// # Errors
    /// [`BadList::Cut`] when the answer was not whole.
    pub fn finish(self) -> Result<Option<Bytes>, BadList> {
        if self.left > 0 || self.has > 0 {
            return Err(BadList::Cut { missing: self.left.max(PREFIX.saturating_sub(self.has) % PREFIX) });
        }
        Ok((self.held() > 0).then(|| sealed(self.out)))
    }
}

/// A message behind the room for its prefix, with its prefix.
fn sealed(mut message: BytesMut) -> Bytes {
    // At most MAX_MESSAGE, which is less.
    let length = u32::try_from(message.len().saturating_sub(PREFIX)).unwrap_or(u32::MAX);
    message[1..PREFIX].copy_from_slice(&length.to_be_bytes());
    message.freeze()
}

/// What the bytes at the begin of a field say.
enum Field {
    /// It is so long, its tag included.
    Is(usize),
    /// They do not tell yet.
    Short,
    /// They begin none.
    Bad,
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
            usize::try_from(length).ok().and_then(|l| l.checked_add(size)).ok_or(Field::Bad)
        }),
        5 => Ok(4),
        // Groups are of proto2; the CRI has none.
        _ => Err(Field::Bad),
    };
    match length {
        Ok(length) => head.checked_add(length).map_or(Field::Bad, Field::Is),
        Err(field) => field,
    }
}

/// A varint and how many bytes it took.
fn varint(bytes: &[u8]) -> Result<(u64, usize), Field> {
    let mut value = 0u64;
    for (i, byte) in (0u32..10).zip(bytes) {
        value |= u64::from(byte & 0x7f) << i.saturating_mul(7);
        if byte & 0x80 == 0 {
            return Ok((value, (i as usize).saturating_add(1)));
        }
    }
    Err(if bytes.len() < 10 { Field::Short } else { Field::Bad })
}

#[cfg(test)]
mod tests {
    use k8s_cri::v1;
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;
    use crate::policy;

    #[test]
    fn every_list_of_the_table_has_its_stream_there_and_the_same_rights() {
        let row = |method: &str| policy::TABLE.iter().find(|r| r.method == method).unwrap();
        for (_, list, stream) in TWINS {
            let (list, stream) = (row(list), row(stream));
            assert_eq!((list.class, list.lane, list.sockets), (stream.class, stream.lane, stream.sockets));
            assert!(!twins(list).unwrap().streamed && twins(stream).unwrap().streamed);
        }
        let others = policy::TABLE.iter().filter(|r| r.method.starts_with("List") && twins(r).is_none());
        assert_eq!(others.map(|r| r.method).collect::<Vec<_>>(), ["ListMetricDescriptors"]);
    }

    /// All messages that come of these bytes.
    fn cut(bytes: &[u8], piece: usize, chunk: usize) -> Result<Vec<Bytes>, BadList> {
        let mut cutter = Cutter::new(chunk);
        let mut full = Vec::new();
        for piece in bytes.chunks(piece) {
            cutter.push(piece, &mut full)?;
        }
        full.extend(cutter.finish()?);
        Ok(full)
    }

    fn framed(message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        [&[0], &length[..], message].concat()
    }

    #[test]
    fn what_is_no_message_is_refused_and_not_cut() {
        for bad in [&[0x0a, 5, 1][..], &[0x0b], &[0x0a], &[0x80], &[0x09, 1, 2], &[0xff; 11], &[0x0a, 0xff]] {
            for piece in 1..12 {
                let answer = cut(&framed(bad), piece, 100);
                assert_eq!(answer, Err(BadList::Field { at: 0 }), "{bad:?} by {piece}");
            }
        }
        assert_eq!(cut(&framed(&[0x08, 1, 0x0a, 5, 1]), 3, 100), Err(BadList::Field { at: 2 }));
        assert_eq!(cut(&[0, 0, 0], 9, 9), Err(BadList::Cut { missing: 2 }));
        assert_eq!(cut(&[0, 0, 0, 0, 2, 8], 9, 9), Err(BadList::Cut { missing: 1 }));
        assert_eq!(cut(&[1, 0, 0, 0, 0], 9, 9), Err(BadList::Compressed));
        assert_eq!(cut(&[7, 0, 0, 0, 0], 9, 9), Err(BadList::Flag(7)));
        assert_eq!(cut(&[0, 1, 0, 0, 1], 9, 9), Err(BadList::TooLarge));
        assert_eq!(cut(&[0; 10], 3, 9), Ok(vec![]), "two messages without an item");
    }

    proptest! {
        #[test]
        fn a_list_in_one_or_in_many_comes_out_in_messages_of_whole_items(
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
            let mut cutter = Cutter::new(chunk);
            let mut full = Vec::new();
            for piece in bytes.chunks(piece) {
                cutter.push(piece, &mut full).unwrap();
                prop_assert!(cutter.held() <= chunk.max(largest) + piece.len() + largest);
            }
            full.extend(cutter.finish().unwrap());
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
