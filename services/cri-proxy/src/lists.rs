//! Lists and their streams: which belong together, and how one is made of the other.
//!
//! A list may be larger than a gRPC message (16 MiB at the runtime, at this proxy and at its callers). The CRI of Kubernetes 1.36 has a
//! stream for each list. Both take the same request, and in every message of both the items are field 1: messages of a stream put one
//! behind the other are the list's answer, and a list's answer cut between its fields is a stream. Nothing here knows the types.
use std::collections::HashMap;

use bytes::{BufMut as _, Bytes, BytesMut};
use parking_lot::Mutex;

use crate::policy::{IMAGE, Policy, RUNTIME};
use crate::reply::BadFrame;

/// A message to a caller holds so much, unless a single item is larger.
pub const CHUNK: usize = 1 << 20;

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

/// The messages in the body of an answer.
///
/// # Errors
/// When it is not whole, uncompressed gRPC frames.
pub fn messages(mut body: Bytes) -> Result<Vec<Bytes>, BadFrame> {
    let mut out = Vec::new();
    while !body.is_empty() {
        let got = body.len();
        let Some(&[flag, a, b, c, d]) = body.first_chunk::<5>() else {
            return Err(BadFrame::Cut { got, promised: 5 });
        };
        match flag {
            0 => {}
            1 => return Err(BadFrame::Compressed),
            flag => return Err(BadFrame::Flag(flag)),
        }
        let promised = (u32::from_be_bytes([a, b, c, d]) as usize).saturating_add(5);
        if got < promised {
            return Err(BadFrame::Cut { got, promised });
        }
        out.push(body.split_to(promised).slice(5..));
    }
    Ok(out)
}

/// What is wrong with a message of the runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("byte {at} of the message begins no field")]
pub struct BadMessage {
    at: usize,
}

/// The fields of a message, each with its tag.
///
/// # Errors
/// When it is no protobuf message.
pub fn fields(message: &Bytes) -> Result<Vec<Bytes>, BadMessage> {
    let mut out = Vec::new();
    let mut at = 0;
    while at < message.len() {
        let length = field_length(message.get(at..).unwrap_or_default()).ok_or(BadMessage { at })?;
        let end = at.checked_add(length).filter(|end| *end <= message.len()).ok_or(BadMessage { at })?;
        out.push(message.slice(at..end));
        at = end;
    }
    Ok(out)
}

/// How long the field at the begin of these bytes is, its tag included.
fn field_length(bytes: &[u8]) -> Option<usize> {
    let (tag, head) = varint(bytes)?;
    let body = bytes.get(head..)?;
    let length = match tag & 7 {
        0 => varint(body)?.1,
        1 => 8,
        2 => {
            let (length, size) = varint(body)?;
            usize::try_from(length).ok()?.checked_add(size)?
        }
        5 => 4,
        // Groups are of proto2; the CRI has none.
        _ => return None,
    };
    head.checked_add(length)
}

/// A varint and how many bytes it took.
fn varint(bytes: &[u8]) -> Option<(u64, usize)> {
    let mut value = 0u64;
    for (i, byte) in bytes.iter().take(10).enumerate() {
        value |= u64::from(byte & 0x7f).checked_shl(u32::try_from(i).ok()? * 7)?;
        if byte & 0x80 == 0 {
            return Some((value, i + 1));
        }
    }
    None
}

/// One frame of all parts. None: it would be larger than `max`.
#[must_use]
pub fn joined(parts: &[Bytes], max: usize) -> Option<Bytes> {
    let size: usize = parts.iter().map(Bytes::len).sum();
    let length = u32::try_from(size).ok().filter(|_| size <= max)?;
    let mut out = BytesMut::with_capacity(size + 5);
    out.put_u8(0);
    out.put_u32(length);
    for part in parts {
        out.extend_from_slice(part);
    }
    Some(out.freeze())
}

/// The parts in frames of at most `chunk`, in their order; a part that is larger has one of its own.
#[must_use]
pub fn chunked(parts: &[Bytes], chunk: usize) -> Vec<Bytes> {
    let mut out = Vec::new();
    let mut rest = parts;
    while !rest.is_empty() {
        let mut size = 0;
        let fits = |part: &&Bytes| {
            size += part.len();
            size <= chunk
        };
        let n = rest.iter().take_while(fits).count().max(1);
        let (now, later) = rest.split_at(n);
        out.extend(joined(now, usize::MAX));
        rest = later;
    }
    out
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

    #[test]
    fn what_is_no_message_is_refused_and_not_cut() {
        for bad in [&[0x0a, 5, 1][..], &[0x0b], &[0x0a], &[0x80], &[0x09, 1, 2], &[0xff; 11], &[0x0a, 0xff]] {
            assert!(fields(&Bytes::from_static(bad)).is_err(), "{bad:?}");
        }
        assert_eq!(messages(Bytes::from_static(&[0, 0, 0])), Err(BadFrame::Cut { got: 3, promised: 5 }));
        assert_eq!(
            messages(Bytes::from_static(&[0, 0, 0, 0, 2, 1])),
            Err(BadFrame::Cut { got: 6, promised: 7 })
        );
        assert_eq!(messages(Bytes::from_static(&[1, 0, 0, 0, 0])), Err(BadFrame::Compressed));
        assert_eq!(messages(Bytes::from_static(&[7, 0, 0, 0, 0])), Err(BadFrame::Flag(7)));
    }

    proptest! {
        #[test]
        fn a_list_cut_to_a_stream_and_put_together_again_is_the_list(
            sizes in proptest::collection::vec(0..400usize, 0..60),
            chunk in 1..1000usize,
        ) {
            let item = |size: &usize| v1::Container { id: "x".repeat(*size), ..Default::default() };
            let list = v1::ListContainersResponse { containers: sizes.iter().map(item).collect() };
            let whole = Bytes::from(list.encode_to_vec());
            let parts = fields(&whole).unwrap();
            prop_assert_eq!(parts.len(), sizes.len());
            let frames = chunked(&parts, chunk);
            let mut seen = Vec::new();
            for message in messages(frames.concat().into()).unwrap() {
                let part = v1::ListContainersResponse::decode(message.clone()).unwrap();
                prop_assert!(!part.containers.is_empty());
                prop_assert!(message.len() <= chunk || part.containers.len() == 1);
                seen.push(message);
            }
            let again = messages(joined(&seen, usize::MAX).unwrap()).unwrap();
            prop_assert_eq!(v1::ListContainersResponse::decode(again[0].clone()).unwrap(), list);
            prop_assert_eq!(joined(&seen, whole.len().saturating_sub(1)).is_none(), !whole.is_empty());
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let bytes = Bytes::from(bytes);
            let _ = messages(bytes.clone());
            if let Ok(parts) = fields(&bytes) {
                prop_assert_eq!(parts.concat(), bytes.to_vec());
            }
        }
    }
}
