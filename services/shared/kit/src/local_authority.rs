//! Requests of clients that name the path of a socket as the authority.
//!
//! Clients of grpc-go, grpc-java and the C core send the path of a unix socket, plain or percent-encoded, as
//! `:authority`, depending on the form of the address that they were given. Device plugins of the Kubernetes
//! project do. `h2` resets such a request with PROTOCOL_ERROR (hyperium/h2#487). The authority of a request
//! on a unix socket says nothing, so it is replaced before `h2` reads it.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The value of each `:authority`, as an HPACK string.
const LOCALHOST: &[u8] = b"\x09localhost";

/// The bytes that begin a connection of HTTP/2 (RFC 9113, section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Length of the head of a frame.
const HEAD: usize = 9;
/// Largest payload of a frame that `h2` accepts by default.
const LARGEST: usize = 16_384;

const HEADERS: u8 = 1;
const PADDED: u8 = 0x08;
const PRIORITY: u8 = 0x20;
/// Length of the fields of a frame with [`PRIORITY`].
const PRIORITY_FIELDS: usize = 5;

/// Index of `:authority` in the static table of HPACK (RFC 7541, appendix A).
const AUTHORITY: usize = 1;

/// The server's end of a connection. Each request that it reads has the authority `localhost`.
#[derive(Debug)]
pub struct LocalAuthority<S> {
    stream: S,
    rewriter: Rewriter,
    /// Bytes that were rewritten and not read yet.
    out: Vec<u8>,
    read: usize,
}

impl<S> LocalAuthority<S> {
    /// Wraps a connection of which nothing was read.
    pub fn new(stream: S) -> Self {
        Self { stream, rewriter: Rewriter::default(), out: Vec::new(), read: 0 }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for LocalAuthority<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            let ready = this.out.get(this.read..).unwrap_or_default();
            if !ready.is_empty() {
                let some = ready.get(..buf.remaining()).unwrap_or(ready);
                buf.put_slice(some);
                this.read = this.read.saturating_add(some.len());
                if this.read >= this.out.len() {
                    this.out.clear();
                    this.read = 0;
                }
                return Poll::Ready(Ok(()));
            }
            let mut space = [MaybeUninit::uninit(); LARGEST];
            let mut chunk = ReadBuf::uninit(&mut space);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut chunk))?;
            if chunk.filled().is_empty() {
                // What is left of a frame that the client did not complete.
                this.rewriter.end(&mut this.out);
                if this.out.is_empty() {
                    return Poll::Ready(Ok(()));
                }
            }
            this.rewriter.push(chunk.filled(), &mut this.out);
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for LocalAuthority<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// The part of the connection that the next byte belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Position {
    /// The preface, of which this number of bytes was there.
    Preface(usize),
    /// The head of a frame.
    Head,
    /// The payload of a frame that stays as it is, of which this number of bytes is left.
    Payload(usize),
    /// The payload of a HEADERS frame, of which this number of bytes is left.
    Fields(usize),
    /// Something other than HTTP/2.
    Other,
}

/// Rewrites the bytes of a connection.
#[derive(Debug)]
struct Rewriter {
    position: Position,
    /// The head of the frame, and its payload in [`Position::Fields`].
    frame: Vec<u8>,
}

impl Default for Rewriter {
    fn default() -> Self {
        Self { position: Position::Preface(0), frame: Vec::new() }
    }
}

impl Rewriter {
    /// Appends the next bytes of the connection to `out`, as far as their frames are complete.
    fn push(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) {
        while !bytes.is_empty() {
            let rest = self.step(bytes, out);
            bytes = bytes.get(rest..).unwrap_or_default();
        }
    }

    /// Appends what is left of a frame that is not complete.
    fn end(&mut self, out: &mut Vec<u8>) {
        out.append(&mut self.frame);
    }

    /// Takes bytes of one part of the connection. Returns their number.
    fn step(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> usize {
        let up_to = |most: usize| bytes.get(..most).unwrap_or(bytes);
        match self.position {
            Position::Preface(there) => {
                let expected = PREFACE.get(there..).unwrap_or_default();
                let some = up_to(expected.len());
                out.extend_from_slice(some);
                let there = there.saturating_add(some.len());
                self.position = match (expected.starts_with(some), there == PREFACE.len()) {
                    (false, _) => Position::Other,
                    (true, false) => Position::Preface(there),
                    (true, true) => Position::Head,
                };
                some.len()
            }
            Position::Head => {
                let some = up_to(HEAD.saturating_sub(self.frame.len()));
                self.frame.extend_from_slice(some);
                if let [a, b, c, kind, ..] = *self.frame.as_slice()
                    && self.frame.len() == HEAD
                {
                    let length = usize::try_from(u32::from_be_bytes([0, a, b, c])).unwrap_or(usize::MAX);
                    if kind == HEADERS && length <= LARGEST {
                        self.position = Position::Fields(length);
                    } else {
                        out.append(&mut self.frame);
                        self.position = Position::Payload(length);
                    }
                    self.next_frame(out);
                }
                some.len()
            }
            Position::Payload(left) => {
                let some = up_to(left);
                out.extend_from_slice(some);
                self.position = Position::Payload(left.saturating_sub(some.len()));
                self.next_frame(out);
                some.len()
            }
            Position::Fields(left) => {
                let some = up_to(left);
                self.frame.extend_from_slice(some);
                self.position = Position::Fields(left.saturating_sub(some.len()));
                self.next_frame(out);
                some.len()
            }
            Position::Other => {
                out.extend_from_slice(bytes);
                bytes.len()
            }
        }
    }

    /// Begins the next frame if this one is complete.
    fn next_frame(&mut self, out: &mut Vec<u8>) {
        match self.position {
            Position::Payload(0) => self.position = Position::Head,
            Position::Fields(0) => {
                if let Some(rewritten) = with_local_authority(&self.frame) {
                    self.frame = rewritten;
                }
                out.append(&mut self.frame);
                self.position = Position::Head;
            }
            _ => {}
        }
    }
}

/// Returns a HEADERS frame with another authority. `None` if the frame has no authority as a literal: it may
/// be an entry of the dynamic table, which has the replaced value, or in a CONTINUATION frame.
fn with_local_authority(frame: &[u8]) -> Option<Vec<u8>> {
    let (head, payload) = frame.split_at_checked(HEAD)?;
    let flags = *head.get(4)?;
    let mut start = 0_usize;
    let mut padding = 0;
    if flags & PADDED != 0 {
        padding = usize::from(*payload.first()?);
        start = 1;
    }
    if flags & PRIORITY != 0 {
        start = start.checked_add(PRIORITY_FIELDS)?;
    }
    let end = payload.len().checked_sub(padding)?;
    let value = authority(payload.get(start..end)?)?;
    let value = value.start.checked_add(start)?..value.end.checked_add(start)?;
    let payload = [payload.get(..value.start)?, LOCALHOST, payload.get(value.end..)?].concat();
    let length = u32::try_from(payload.len()).ok().filter(|_| payload.len() <= LARGEST)?;
    Some([length.to_be_bytes().get(1..)?, head.get(3..)?, &payload].concat())
}

/// Returns where the value of `:authority` is in a block of header fields (RFC 7541, section 6): a string
/// with its length.
fn authority(block: &[u8]) -> Option<Range<usize>> {
    let mut at = 0;
    loop {
        let first = *block.get(at)?;
        let prefix = match first {
            // An indexed field, which has no literal.
            0x80.. => 7,
            // A literal that the dynamic table takes.
            0x40..0x80 => 6,
            // A new size of the dynamic table.
            0x20..0x40 => 5,
            // Another literal.
            0..0x20 => 4,
        };
        let (index, mut next) = integer(block, at, prefix)?;
        if matches!(prefix, 6 | 4) {
            if index == 0 {
                next = string(block, next)?.end;
            }
            let value = string(block, next)?;
            if index == AUTHORITY {
                return Some(value);
            }
            next = value.end;
        }
        at = next;
    }
}

/// Returns the integer at a position, with a prefix of this number of bits, and the position after it (RFC
/// 7541, section 5.1).
fn integer(block: &[u8], at: usize, prefix: u32) -> Option<(usize, usize)> {
    let most = (1_usize << prefix).wrapping_sub(1);
    let mut value = usize::from(*block.get(at)?) & most;
    let mut next = at.checked_add(1)?;
    if value < most {
        return Some((value, next));
    }
    for shift in [0, 7, 14, 21] {
        let byte = usize::from(*block.get(next)?);
        next = next.checked_add(1)?;
        value = value.checked_add((byte & 0x7f) << shift)?;
        if byte & 0x80 == 0 {
            return Some((value, next));
        }
    }
    None
}

/// Returns where the string at a position is, with its length (RFC 7541, section 5.2).
fn string(block: &[u8], at: usize) -> Option<Range<usize>> {
    let (length, start) = integer(block, at, 7)?;
    let end = start.checked_add(length).filter(|end| *end <= block.len())?;
    Some(at..end)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::io::AsyncReadExt as _;

    use super::*;

    /// A frame of this kind with these flags.
    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    /// `:method: POST`, `:path` as an indexed field, and `:authority` as a literal with this value.
    fn block(kind: u8, authority: &[u8]) -> Vec<u8> {
        [&[0x83, 0x84, kind | 1, u8::try_from(authority.len()).unwrap()], authority, b"\x40\x01a\x01b"]
            .concat()
    }

    fn rewritten(chunks: &[&[u8]]) -> Vec<u8> {
        let (mut rewriter, mut out) = (Rewriter::default(), Vec::new());
        for chunk in chunks {
            rewriter.push(chunk, &mut out);
        }
        rewriter.end(&mut out);
        out
    }

    #[test]
    fn each_form_of_a_literal_authority_is_replaced() {
        for kind in [0x40, 0x00, 0x10] {
            let given = [PREFACE, &frame(HEADERS, 4, &block(kind, b"/run/x.sock"))].concat();
            let wanted = [PREFACE, &frame(HEADERS, 4, &block(kind, b"localhost"))].concat();
            assert_eq!(rewritten(&[&given]), wanted, "{kind:#x}");
        }
    }

    #[test]
    fn padding_and_priority_are_kept() {
        let fields = |value: &[u8]| [&[3, 0, 0, 0, 0, 16], block(0x40, value).as_slice(), &[0; 3]].concat();
        let flags = PADDED | PRIORITY | 4;
        let given = [PREFACE, &frame(HEADERS, flags, &fields(b"%2Frun%2Fx.sock"))].concat();
        let wanted = [PREFACE, &frame(HEADERS, flags, &fields(b"localhost"))].concat();
        assert_eq!(rewritten(&[&given]), wanted);
    }

    #[test]
    fn what_has_no_literal_authority_stays_as_it_is() {
        // The longer authority would exceed the largest frame.
        let largest = [&[0x40, 1, b'a', 0x7f, 0xf3, 0x7e][..], &[b'x'; 16_370], b"\x41\x00"].concat();
        for payload in [
            &b""[..],
            b"\x83\x84\xbe",
            b"\x83\x41",
            b"\x83\x41\x05ab",
            b"\x3f\xff\xff\xff\xff\xff\x0f",
            b"\x41\xff\xff\xff\xff\xff\xff",
            &largest,
        ] {
            let given = [PREFACE, &frame(HEADERS, 4, payload), &frame(0, 1, b"data")].concat();
            assert!(rewritten(&[&given]) == given, "{:?}", payload.get(..20).unwrap_or(payload));
        }
        // DATA that looks like fields, padding that is longer than its frame, a frame that is too long, and
        // HTTP/1.
        let data = [PREFACE, &frame(0, 0, &block(0x40, b"/run/x.sock"))].concat();
        let padded = [PREFACE, &frame(HEADERS, PADDED, b"\xff\x41\x01/")].concat();
        let long = [PREFACE, &frame(HEADERS, 4, &vec![0x41; LARGEST + 1])].concat();
        let other = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n".to_vec();
        let cut = [PREFACE, &frame(HEADERS, 4, &block(0x40, b"/"))[..12]].concat();
        for given in [data, padded, long, other, cut] {
            assert!(rewritten(&[&given]) == given, "{:?}", given.get(..60).unwrap_or(&given));
        }
    }

    proptest! {
        #[test]
        fn the_chunks_of_a_connection_do_not_matter(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..6),
            kinds in prop::collection::vec(0_u8..3, 6),
            cuts in prop::collection::vec(1_usize..20, 1..60),
        ) {
            let frames = payloads.iter().zip(kinds).map(|(payload, kind)| frame(kind, 4, payload));
            let whole = PREFACE.iter().copied().chain(frames.flatten()).collect::<Vec<u8>>();
            let (mut chunks, mut rest) = (Vec::new(), whole.as_slice());
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (chunk, left) = rest.split_at((*cut).min(rest.len()));
                chunks.push(chunk);
                rest = left;
            }
            prop_assert_eq!(rewritten(&chunks), rewritten(&[&whole]));
        }

        #[test]
        fn any_bytes_are_read_without_a_loss(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            // Without the preface, nothing changes.
            prop_assert_eq!(rewritten(&[&bytes]), bytes);
        }
    }

    #[tokio::test]
    async fn a_reader_gets_all_bytes_with_small_buffers() {
        let given =
            [PREFACE, &frame(HEADERS, 4, &block(0x40, b"/run/x.sock")), &frame(0, 1, b"data")].concat();
        let wanted =
            [PREFACE, &frame(HEADERS, 4, &block(0x40, b"localhost")), &frame(0, 1, b"data")].concat();
        let mut reader = LocalAuthority::new(given.as_slice());
        let mut read = Vec::new();
        let mut buffer = [0; 3];
        loop {
            let some = reader.read(&mut buffer).await.unwrap();
            if some == 0 {
                break;
            }
            read.extend_from_slice(&buffer[..some]);
        }
        assert_eq!(read, wanted);
    }
}
