//! Request targets that are longer than hyper reads.
//!
//! `kubectl exec` puts the command into the query. The kubelet reads 1 MiB of request header
//! (`net/http: DefaultMaxHeaderBytes`), and hyper at most 64 KiB of target. [`LongTarget`] takes the end of a
//! longer target out of the first request line of a connection, and [`Rest`] hands it to the request. Later
//! requests of a connection have hyper's limit: the API server opens a connection per exec.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, ready};

use http::Request;
use node_api_base::uri::QueryEnd;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Length of the request line from which its target is cut, below the limit of hyper.
const CUT: usize = 60 << 10;
/// Longest end of a target, so that the header has 1 MiB.
const MAX_REST: usize = (1 << 20) - CUT;
/// Steps in which memory for ends is reserved, and all of that memory. Connections without an authorized
/// request hold some of it, too.
const STEP: usize = 64 << 10;
const STEPS: usize = 256;

static MEMORY: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(STEPS)));

/// The end of a target.
#[derive(Debug, Default)]
struct End {
    bytes: Vec<u8>,
    reserved: Vec<OwnedSemaphorePermit>,
    is_refused: bool,
}

impl End {
    fn push(&mut self, byte: u8) {
        if self.is_refused {
            return;
        }
        let has_room = self.bytes.len() < self.reserved.len().saturating_mul(STEP)
            || Arc::clone(&MEMORY).try_acquire_owned().map(|step| self.reserved.push(step)).is_ok();
        if has_room && self.bytes.len() < MAX_REST {
            self.bytes.push(byte);
        } else {
            *self = Self { is_refused: true, ..Self::default() };
        }
    }
}

/// The end of the first target of a connection. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rest(Arc<Mutex<End>>);

impl Rest {
    /// Adds the end of the query to the request that it belongs to. Returns false if the target is too long.
    #[must_use]
    pub(crate) fn complete<B>(&self, request: &mut Request<B>) -> bool {
        let end = std::mem::take(&mut *self.0.lock());
        if end.bytes.is_empty() {
            return !end.is_refused;
        }
        let Ok(text) = String::from_utf8(end.bytes) else { return false };
        // The end of a path is not the end of a query.
        let is_query = request.uri().query().is_some();
        request.extensions_mut().insert(QueryEnd(text.into()));
        is_query
    }
}

/// The position in the first request line.
#[derive(Debug, Clone, Copy)]
enum Position {
    /// Before the end of the line, with the bytes and spaces so far.
    Line {
        bytes: usize,
        spaces: usize,
    },
    /// In the end of a long target.
    End,
    Behind,
}

/// A connection whose first target may be long.
#[derive(Debug)]
pub(crate) struct LongTarget<S> {
    inner: S,
    position: Position,
    rest: Rest,
}

impl<S> LongTarget<S> {
    /// The end of the first target goes to `rest`.
    pub(crate) fn new(inner: S, rest: Rest) -> Self {
        Self { inner, position: Position::Line { bytes: 0, spaces: 0 }, rest }
    }

    /// Returns the bytes without the end of a long target.
    fn cut(&mut self, read: &[u8]) -> Vec<u8> {
        let mut kept = Vec::with_capacity(read.len());
        let mut end = self.rest.0.lock();
        for byte in read {
            self.position = match (self.position, byte) {
                (Position::Line { bytes, spaces: 1 }, byte)
                    if bytes >= CUT && !byte.is_ascii_whitespace() =>
                {
                    Position::End
                }
                (Position::Line { spaces: 1, .. } | Position::End, b' ')
                | (Position::Line { .. } | Position::End, b'\n') => Position::Behind,
                (Position::Line { bytes, spaces }, byte) => Position::Line {
                    bytes: bytes.saturating_add(1),
                    spaces: spaces.saturating_add(usize::from(*byte == b' ')),
                },
                (position @ (Position::End | Position::Behind), _) => position,
            };
            match self.position {
                Position::End => {
                    end.push(*byte);
                    // hyper ends a line that continues, so that none is endless.
                    if end.is_refused {
                        self.position = Position::Behind;
                    }
                }
                Position::Line { .. } | Position::Behind => kept.push(*byte),
            }
        }
        kept
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for LongTarget<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let before = buf.filled().len();
            ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
            let read = buf.filled().get(before..).unwrap_or_default();
            if read.is_empty() || matches!(self.position, Position::Behind) {
                return Poll::Ready(Ok(()));
            }
            let kept = self.cut(read);
            buf.set_filled(before);
            buf.put_slice(&kept);
            // No bytes would mean the end of the stream.
            if !kept.is_empty() {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for LongTarget<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use tokio::io::AsyncReadExt as _;

    use super::*;

    /// Reads piece by piece.
    struct Pieces(VecDeque<Vec<u8>>);

    impl AsyncRead for Pieces {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            if let Some(mut piece) = self.0.pop_front() {
                let rest = piece.split_off(piece.len().min(buf.remaining()));
                buf.put_slice(&piece);
                if !rest.is_empty() {
                    self.0.push_front(rest);
                }
            }
            Poll::Ready(Ok(()))
        }
    }

    /// Returns what hyper reads of these bytes, read in pieces, and the end of the target.
    async fn read(sent: &str, piece: usize) -> (String, End) {
        let rest = Rest::default();
        let pieces = Pieces(sent.as_bytes().chunks(piece).map(<[u8]>::to_vec).collect());
        let mut read = String::new();
        LongTarget::new(pieces, rest.clone()).read_to_string(&mut read).await.unwrap();
        let end = std::mem::take(&mut *rest.0.lock());
        (read, end)
    }

    #[tokio::test]
    async fn the_end_of_a_long_target_is_taken_out_and_nothing_else() {
        let long = "a".repeat(200_000);
        for piece in [1000, 8192, 1 << 20] {
            let tail = "Host: x\r\n\r\nGET /second?b HTTP/1.1\r\n";
            let sent = format!("POST /exec?command={long} HTTP/1.1\r\n{tail}");
            let (read, end) = read(&sent, piece).await;
            let end = String::from_utf8(end.bytes).unwrap();
            let (first, after) = read.split_once(" HTTP/1.1\r\n").unwrap();
            assert_eq!((format!("{first}{end}"), after), (format!("POST /exec?command={long}"), tail));
            assert!(first.len() <= CUT, "{}", first.len());
            for short in ["GET /healthz HTTP/1.1\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "\n", ""] {
                let body = format!("{short}{long} {long}\n");
                let sent = if short.is_empty() { short } else { body.as_str() };
                let (read, end) = self::read(sent, piece).await;
                assert!(read == sent && end.bytes.is_empty(), "{short:?}");
            }
        }
    }

    #[tokio::test]
    async fn a_target_of_more_than_a_mebibyte_is_refused_and_holds_no_memory() {
        let sent = format!("POST /exec?command={} HTTP/1.1\r\n", "a".repeat(1 << 20));
        let (_, end) = read(&sent, 8192).await;
        assert!(end.is_refused && end.bytes.is_empty());
        let (read, _) = read(&format!("POST /{}", "a".repeat(4 << 20)), 8192).await;
        assert!(read.len() > 2 << 20, "the rest of an endless line is left to hyper: {}", read.len());
        let rest = Rest(Arc::new(Mutex::new(end)));
        assert!(!rest.complete(&mut Request::get("/exec?command=a").body(()).unwrap()));
        assert!(rest.complete(&mut Request::get("/").body(()).unwrap()), "the next request is not at fault");
        let rest = Rest::default();
        rest.0.lock().bytes = b"nd".to_vec();
        assert!(!rest.complete(&mut Request::get("/a-path-without-e").body(()).unwrap()));
    }
}
