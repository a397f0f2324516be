//! A client for SPDY/3.1, as far as the streaming server of a container runtime needs it: streams that the
//! client opens, data in both directions, half-closing.
//!
//! The client does not read the server's header blocks, so it needs no dictionary of the protocol. It
//! compresses its own header blocks without the dictionary, which zlib allows.
//!
//! One task reads frames and passes data to the channels of the streams. The channels are bounded: a slow
//! reader of one stream delays the whole connection. Another task writes frames. Flow control is that of the
//! socket, as with the servers. Both tasks end with the connection, on [`Connection::close`], and when the
//! last handle is dropped.
//!
//! [`Connection::open`] connects to a URL of the runtime. Here the server is the other end of a pipe:
//!
//! ```
//! use quintlet_spdy::Connection;
//! use tokio::io::AsyncReadExt as _;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> std::io::Result<()> {
//! let (client, mut server) = tokio::io::duplex(1024);
//! let (read, write) = tokio::io::split(client);
//! let connection = Connection::over(read, write);
//! let stdin = connection.stream(&[("streamType", "stdin")]).await.expect("the connection is open");
//! assert!(stdin.writer.send(b"hello").await);
//! stdin.writer.end().await;
//!
//! // Version 3, SYN_STREAM.
//! let mut frame = [0; 4];
//! server.read_exact(&mut frame).await?;
//! assert_eq!(frame, [0x80, 3, 0, 1]);
//! # Ok(())
//! # }
//! ```

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod dial;
mod frame;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use flate2::{Compress, Compression};
use http::Uri;
use quintlet_kit::task;
use tokio::io::{
    AsyncBufRead, AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _,
    BufReader,
};
use tokio::sync::{Mutex, mpsc};
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::frame::{
    CONTROL_BIT, FIN, GOAWAY, MAX_STREAM_ID, PING, RST_STREAM, SYN_STREAM, control, data, header_block,
};
pub use dial::{Transport, dial};

/// Time limit of the upgrade. A URL of the runtime expires after about a minute.
const UPGRADE_TIMEOUT: Duration = Duration::from_secs(10);
/// Capacity of the queue of outgoing frames: two blocks of each of a few streams.
const OUTGOING_FRAMES: usize = 16;
/// Capacity of the queue of a stream, in blocks. The connection waits for a reader whose queue is full.
const STREAM_BLOCKS: usize = 16;
/// Largest answer to the upgrade, in bytes.
const MAX_HEAD: usize = 64 << 10;
/// Largest frame, in bytes. Servers send blocks of 32 KiB.
const MAX_FRAME: usize = 1 << 20;

/// A failed upgrade.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UpgradeError {
    /// The connection fails.
    #[error("failed to connect to the runtime's streaming server at {0}")]
    Connect(String, #[source] io::Error),
    /// The URL is not `http://host:port/path` or `https://host:port/path`.
    #[error("{0} is not a URL of a streaming server")]
    Url(String),
    /// The answer is not 101. Has the text of the answer.
    #[error("the runtime's streaming server refused the upgrade: {0}")]
    Refused(String),
}

/// A SPDY connection.
#[derive(Clone)]
pub struct Connection {
    shared: Arc<Shared>,
    open: Arc<DropGuard>,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

struct Shared {
    out: mpsc::Sender<Vec<u8>>,
    opening: Mutex<Opening>,
    streams: parking_lot::Mutex<Streams>,
    stop: CancellationToken,
}

/// State of the opening of streams.
struct Opening {
    next_id: u32,
    headers: Compress,
}

#[derive(Default)]
struct Streams {
    readers: HashMap<u32, mpsc::Sender<Vec<u8>>>,
    closed: bool,
}

/// A stream with its two directions.
#[derive(Debug)]
pub struct Stream {
    /// Sends data.
    pub writer: Writer,
    /// Receives data. It ends with the stream.
    pub blocks: mpsc::Receiver<Vec<u8>>,
}

/// The sending half of a stream.
#[derive(Debug)]
pub struct Writer {
    id: u32,
    out: mpsc::Sender<Vec<u8>>,
    /// Keeps the connection open while the stream exists.
    _open: Arc<DropGuard>,
}

impl Writer {
    /// Sends a block. Returns false if the connection is closed.
    pub async fn send(&self, block: &[u8]) -> bool {
        self.out.send(data(self.id, 0, block)).await.is_ok()
    }

    /// Ends the sending half.
    pub async fn end(&self) {
        // A closed connection needs no end of the stream.
        let _ = self.out.send(data(self.id, FIN, &[])).await;
    }
}

impl Connection {
    /// Connects to `url` (`http` or `https`) and upgrades to SPDY. `protocols` are the versions of the stream
    /// protocol to offer, newest first.
    ///
    /// # Errors
    /// The URL is invalid, the connection fails, or the server refuses the upgrade.
    pub async fn open(url: &str, protocols: &[&str]) -> Result<Self, UpgradeError> {
        let no_url = || UpgradeError::Url(url.to_owned());
        let uri: Uri = url.parse().map_err(|_| no_url())?;
        let (Some(host), Some(path)) = (uri.authority(), uri.path_and_query()) else { return Err(no_url()) };
        let failed = |e| UpgradeError::Connect(host.to_string(), e);
        let stream = dial::dial(&uri).await.map_err(|e| match e.kind() {
            io::ErrorKind::InvalidInput => no_url(),
            _ => failed(e),
        })?;
        let (read, mut write) = tokio::io::split(stream);
        let offers: String =
            protocols.iter().map(|p| format!("X-Stream-Protocol-Version: {p}\r\n")).collect();
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n{offers}Content-Length: 0\r\n\r\n"
        );
        write.write_all(request.as_bytes()).await.map_err(failed)?;
        let mut read = BufReader::new(read);
        let (status, length) = timeout(UPGRADE_TIMEOUT, head(&mut read))
            .await
            .map_err(|_| failed(io::ErrorKind::TimedOut.into()))?
            .map_err(failed)?;
        if status != 101 {
            let mut body = vec![0; length.min(MAX_HEAD)];
            // The error has the part of the body that can be read.
            let read = timeout(UPGRADE_TIMEOUT, read.read_exact(&mut body)).await;
            let text = if read.is_ok() { String::from_utf8_lossy(&body).into_owned() } else { String::new() };
            return Err(UpgradeError::Refused(format!("{status} {text}").trim().to_owned()));
        }
        Ok(Self::over(read, write))
    }

    /// Creates a connection from one that has been upgraded.
    #[must_use]
    pub fn over(
        read: impl AsyncRead + Unpin + Send + 'static,
        write: impl AsyncWrite + Unpin + Send + 'static,
    ) -> Self {
        let (out, frames) = quintlet_kit::queue::channel("spdy-frames", OUTGOING_FRAMES);
        let opening = Opening { next_id: 1, headers: Compress::new(Compression::fast(), true) };
        let stop = CancellationToken::new();
        let shared = Arc::new(Shared {
            out,
            opening: Mutex::new(opening),
            streams: parking_lot::Mutex::default(),
            stop: stop.clone(),
        });
        let writing = stop.clone();
        task::spawn("spdy write", async move {
            // A dropped read loses only frames without a receiver.
            let _ = writing.run_until_cancelled(write_frames(write, frames)).await;
        });
        let reading = Arc::clone(&shared);
        task::spawn("spdy read", async move {
            // All streams end with the connection.
            let _ = reading.stop.run_until_cancelled(read_frames(read, &reading)).await;
            reading.stop.cancel();
            let mut streams = reading.streams.lock();
            streams.closed = true;
            streams.readers.clear();
        });
        Self { shared, open: Arc::new(stop.drop_guard()) }
    }

    /// Closes the connection.
    pub fn close(&self) {
        self.shared.stop.cancel();
    }

    /// Opens a stream. Returns none if the connection is closed or has no stream ID left.
    pub async fn stream(&self, headers: &[(&str, &str)]) -> Option<Stream> {
        // Stream IDs must ascend on the wire, and a compressed block depends on earlier ones: one stream is
        // opened at a time.
        let mut opening = self.shared.opening.lock().await;
        let id = opening.next_id;
        if id > MAX_STREAM_ID {
            return None;
        }
        opening.next_id = id.saturating_add(2);
        let (sender, blocks) = quintlet_kit::queue::channel("spdy-blocks", STREAM_BLOCKS);
        {
            let mut streams = self.shared.streams.lock();
            if streams.closed {
                return None;
            }
            streams.readers.insert(id, sender);
        }
        let mut body = Vec::new();
        body.extend(id.to_be_bytes());
        body.extend([0; 4 + 2]);
        body.extend(header_block(&mut opening.headers, headers).ok()?);
        self.shared.out.send(control(SYN_STREAM, 0, &body)).await.ok()?;
        let out = self.shared.out.clone();
        Some(Stream { writer: Writer { id, out, _open: Arc::clone(&self.open) }, blocks })
    }

    /// Removes a stream after both of its halves have ended.
    pub fn forget(&self, stream: &Writer) {
        self.shared.streams.lock().readers.remove(&stream.id);
    }
}

/// Reads the head of the answer. Returns the status and the length of the body.
async fn head(read: &mut (impl AsyncBufRead + Unpin)) -> io::Result<(u16, usize)> {
    let mut status = None;
    let mut length = 0;
    let mut total = 0;
    loop {
        let mut line = String::new();
        // The limit of the whole head bounds each line.
        let n = (&mut *read).take(MAX_HEAD as u64).read_line(&mut line).await?;
        total = n.saturating_add(total);
        if n == 0 || total > MAX_HEAD {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let line = line.trim_end();
        if status.is_none() {
            let code = line.split(' ').nth(1).and_then(|c| c.parse().ok());
            status = Some(code.ok_or(io::ErrorKind::InvalidData)?);
        } else if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().unwrap_or(0);
        }
        if line.is_empty() {
            return Ok((status.unwrap_or_default(), length));
        }
    }
}

async fn write_frames(mut write: impl AsyncWrite + Unpin, mut frames: mpsc::Receiver<Vec<u8>>) {
    while let Some(frame) = frames.recv().await {
        if write.write_all(&frame).await.is_err() || write.flush().await.is_err() {
            return;
        }
    }
}

async fn read_frames(mut read: impl AsyncRead + Unpin, shared: &Shared) -> io::Result<()> {
    loop {
        let mut head = [0; 8];
        read.read_exact(&mut head).await?;
        let [a, b, c, d, flags, length @ ..] = head;
        let length =
            usize::try_from(u32::from_be_bytes([0, length[0], length[1], length[2]])).unwrap_or(usize::MAX);
        if length > MAX_FRAME {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut body = vec![0; length];
        read.read_exact(&mut body).await?;
        let first = u32::from_be_bytes([a, b, c, d]);
        if first & CONTROL_BIT == 0 {
            let reader = shared.streams.lock().readers.get(&first).cloned();
            if let Some(reader) = reader
                && !body.is_empty()
            {
                // Data of a stream without a reader is dropped.
                let _ = reader.send(body).await;
            }
            if flags & FIN != 0 {
                shared.streams.lock().readers.remove(&first);
            }
            continue;
        }
        let id = body.get(..4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_be_bytes);
        match u16::from_be_bytes([c, d]) {
            RST_STREAM => {
                shared.streams.lock().readers.remove(&(id & MAX_STREAM_ID));
            }
            // Pings of the server have even IDs and are returned unchanged.
            PING if id % 2 == 0 => {
                // The reader continues without a writer.
                let _ = shared.out.send(control(PING, 0, &id.to_be_bytes())).await;
            }
            // Open streams continue after GOAWAY.
            GOAWAY => shared.streams.lock().closed = true,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use flate2::{Decompress, FlushDecompress};
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn frames_have_the_format_of_the_protocol() {
        assert_eq!(data(3, FIN, b"ab"), [0, 0, 0, 3, 1, 0, 0, 2, b'a', b'b']);
        assert_eq!(control(PING, 0, &2_u32.to_be_bytes()), [0x80, 3, 0, 6, 0, 0, 0, 4, 0, 0, 0, 2]);
    }

    #[test]
    fn header_blocks_are_one_zlib_stream() {
        let mut zlib = Compress::new(Compression::fast(), true);
        let mut reader = Decompress::new(true);
        for value in ["stdin", "stdout"] {
            let block = header_block(&mut zlib, &[("streamType", value)]).unwrap();
            let mut plain = Vec::with_capacity(256);
            reader.decompress_vec(&block, &mut plain, FlushDecompress::Sync).unwrap();
            let length = u8::try_from(value.len()).unwrap();
            let want =
                [b"\0\0\0\x01\0\0\0\x0astreamtype\0\0\0".as_slice(), &[length], value.as_bytes()].concat();
            assert_eq!(plain, want);
        }
    }

    /// Accepts the upgrade, and then replies to each frame with the result of `script`.
    async fn server(
        answer: &'static str,
        frames: Vec<Vec<u8>>,
    ) -> (String, tokio::task::JoinHandle<Vec<u8>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/exec/token", listener.local_addr().unwrap());
        let task = task::spawn("server", async move {
            let (mut tcp, _) = listener.accept().await.unwrap();
            let mut got = vec![0; 4096];
            let n = tcp.read(&mut got).await.unwrap();
            tcp.write_all(answer.as_bytes()).await.unwrap();
            for frame in frames {
                tcp.write_all(&frame).await.unwrap();
            }
            tcp.shutdown().await.unwrap();
            got.truncate(n);
            let _ = tcp.read_to_end(&mut got).await;
            got
        });
        (url, task)
    }

    #[tokio::test]
    async fn data_reaches_its_stream_pings_are_answered_and_streams_end_with_the_connection() {
        let head = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";
        let reply = control(2, 0, b"\0\0\0\x01anything");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/exec/token", listener.local_addr().unwrap());
        let task = task::spawn("server", async move {
            let (mut tcp, _) = listener.accept().await.unwrap();
            let mut got = vec![0; 4096];
            let n = tcp.read(&mut got).await.unwrap();
            assert!(got[..n].starts_with(b"POST /exec/token HTTP/1.1\r\n"));
            tcp.write_all(head.as_bytes()).await.unwrap();
            // Both streams have to be there before there is data for them.
            let mut opened = 0;
            while opened < 2 {
                let mut head = [0; 8];
                tcp.read_exact(&mut head).await.unwrap();
                let mut body = vec![0; usize::from(head[7])];
                tcp.read_exact(&mut body).await.unwrap();
                opened += usize::from(head[3] == 1);
            }
            for frame in [
                reply,
                data(1, 0, b"one"),
                control(PING, 0, &2_u32.to_be_bytes()),
                data(3, FIN, b"three"),
                data(1, 0, b"more"),
            ] {
                tcp.write_all(&frame).await.unwrap();
            }
            let mut pong = [0; 12];
            tcp.read_exact(&mut pong).await.unwrap();
            pong
        });
        let connection = Connection::open(&url, &["v4.channel.k8s.io"]).await.unwrap();
        let mut first = connection.stream(&[("streamType", "stdout")]).await.unwrap();
        let mut second = connection.stream(&[("streamType", "error")]).await.unwrap();
        assert_eq!(first.blocks.recv().await.unwrap(), b"one");
        assert_eq!(second.blocks.recv().await.unwrap(), b"three");
        assert!(second.blocks.recv().await.is_none());
        assert_eq!(first.blocks.recv().await.unwrap(), b"more");
        assert!(first.blocks.recv().await.is_none(), "it ends with the connection");
        assert_eq!(task.await.unwrap(), [0x80, 3, 0, 6, 0, 0, 0, 4, 0, 0, 0, 2]);
        assert!(connection.stream(&[]).await.is_none());
    }

    #[tokio::test]
    async fn a_server_that_refuses_is_quoted() {
        let refusal = "HTTP/1.1 404 Not Found\r\nContent-Length: 13\r\n\r\nunknown token";
        let (url, task) = server(refusal, Vec::new()).await;
        let error = Connection::open(&url, &[]).await.err().unwrap();
        assert_eq!(
            error.to_string(),
            "the runtime's streaming server refused the upgrade: 404 unknown token"
        );
        let _ = task.await;
        for bad in ["ftp://x/y", "/x", "unix:///x"] {
            assert!(matches!(Connection::open(bad, &[]).await, Err(UpgradeError::Url(_))), "{bad}");
        }
    }
}
