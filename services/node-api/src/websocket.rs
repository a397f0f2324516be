//! WebSocket clients that no runtime understands: `v5.channel.k8s.io` (exec and attach, with a signal that ends one stream) and
//! SPDY in a tunnel (port-forward). Both become SPDY towards the runtime; older protocols it speaks itself.

use std::time::Duration;

use base64::Engine as _;
use bytes::{Buf as _, Bytes};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt as _, StreamExt as _};
use http::{HeaderMap, HeaderValue, header};
use quintlet_kit::clock::deadline_after;
use quintlet_spdy::{Connection, Stream, Writer};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader};
use tokio::sync::mpsc::Receiver;
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Message, Utf8Bytes};

use crate::remote_command::{Action, Streams};

/// The protocol whose streams end one by one.
pub const CHANNELS: &str = "v5.channel.k8s.io";
/// The protocol that carries SPDY's bytes in messages.
pub const TUNNEL: &str = "SPDY/3.1+portforward.k8s.io";

/// So often a client is shown that the connection lives, as the kubelet does.
const PING: Duration = Duration::from_secs(5);
/// Largest message taken: kubectl sends blocks of 32 KiB.
const MAX_MESSAGE: usize = 1 << 20;
/// Read of a tunnel at once.
const BLOCK: usize = 32 << 10;
/// After the status has come, output under way may take so long.
const DRAIN: Duration = Duration::from_secs(10);
/// So long a client may take to hear of the end, and to answer.
const ANSWER: Duration = Duration::from_secs(5);

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// The next byte names the stream that ends.
const CLOSE: u8 = 255;

/// How a client wants what it asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Form {
    /// As the runtime serves it: bytes are passed on.
    Runtime,
    /// By [`CHANNELS`] or [`TUNNEL`]; the answer to the client's key.
    Translated {
        /// What is spoken.
        protocol: &'static str,
        /// Value of Sec-WebSocket-Accept.
        accept: String,
    },
}

impl Form {
    /// What the headers of an upgrade ask for.
    #[must_use]
    pub fn of(action: Action, headers: &HeaderMap) -> Self {
        let protocol = match action {
            Action::Exec | Action::Attach => CHANNELS,
            Action::PortForward => TUNNEL,
        };
        let value = |name| headers.get(name).and_then(|v: &HeaderValue| v.to_str().ok()).unwrap_or_default();
        let is_websocket = value(header::UPGRADE).eq_ignore_ascii_case("websocket")
            && value(header::SEC_WEBSOCKET_VERSION) == "13";
        let key = value(header::SEC_WEBSOCKET_KEY);
        let is_key = base64::engine::general_purpose::STANDARD.decode(key).is_ok_and(|k| k.len() == 16);
        let offers = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter().filter_map(|v| v.to_str().ok());
        if is_websocket && is_key && offers.flat_map(|v| v.split(',')).any(|p| p.trim() == protocol) {
            Self::Translated { protocol, accept: derive_accept_key(key.as_bytes()) }
        } else {
            Self::Runtime
        }
    }

    /// Headers of the request to the runtime, in place of the client's; none where those are passed on.
    #[must_use]
    pub fn towards_runtime(&self) -> Option<HeaderMap> {
        let Self::Translated { protocol, .. } = self else { return None };
        let spoken = if *protocol == TUNNEL { "portforward.k8s.io" } else { "v4.channel.k8s.io" };
        let mut headers = HeaderMap::new();
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("SPDY/3.1"));
        headers.insert("x-stream-protocol-version", HeaderValue::from_static(spoken));
        Some(headers)
    }

    /// Headers of the 101 to the client, in place of the runtime's.
    #[must_use]
    pub fn towards_client(&self) -> Option<HeaderMap> {
        let Self::Translated { protocol, accept } = self else { return None };
        let mut headers = HeaderMap::new();
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(protocol));
        // Base64 fits in a header.
        headers.extend(HeaderValue::from_str(accept).ok().map(|a| (header::SEC_WEBSOCKET_ACCEPT, a)));
        Some(headers)
    }
}

async fn server<C: AsyncRead + AsyncWrite + Unpin>(client: C) -> WebSocketStream<C> {
    let config =
        WebSocketConfig::default().max_message_size(Some(MAX_MESSAGE)).max_frame_size(Some(MAX_MESSAGE));
    WebSocketStream::from_raw_socket(client, Role::Server, Some(config)).await
}

/// Goes on until the process has ended and all it said is with the client, or one of the two is gone.
pub(crate) async fn channels<C, R>(client: C, runtime: R, streams: Streams)
where
    C: AsyncRead + AsyncWrite + Unpin + Send,
    R: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (read, write) = tokio::io::split(runtime);
    let connection = Connection::over(BufReader::new(read), write);
    let (to_client, from_client) = server(client).await.split();
    let opened = open(&connection, streams).await;
    if let Some((input, output)) = opened {
        either(up(from_client, input), down(output, to_client)).await;
    }
    connection.close();
}

/// Goes on until one of the two has ended. A client that was told the end is listened to until it answers: what is closed
/// with words of its unread takes with it what it has not read.
async fn either(up: impl Future<Output = ()>, down: impl Future<Output = ()>) {
    let mut up = std::pin::pin!(up);
    tokio::select! {
        () = &mut up => {}
        () = down => {
            let _ = timeout(ANSWER, up).await;
        }
    }
}

/// Tells the client that all is said. Any other end is an error to it, one without a code too.
async fn end<C>(mut client: SplitSink<WebSocketStream<C>, Message>)
where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let normal = CloseFrame { code: CloseCode::Normal, reason: Utf8Bytes::default() };
    // A client that does not take it is hung up on.
    let _ = timeout(ANSWER, client.send(Message::Close(Some(normal)))).await;
}

struct Input {
    stdin: Option<Writer>,
    resize: Option<Writer>,
}

struct Output {
    stdout: Option<Receiver<Vec<u8>>>,
    stderr: Option<Receiver<Vec<u8>>>,
    error: Receiver<Vec<u8>>,
    /// Streams whose other half is in use or says nothing; they stay open as long as this does.
    _open: Vec<Writer>,
}

/// The streams that the runtime waits for, in the order in which kubectl opens them.
async fn open(connection: &Connection, streams: Streams) -> Option<(Input, Output)> {
    let open = async |wanted: bool, kind: &str| match wanted {
        true => connection.stream(&[("streamType", kind)]).await.map(Some),
        false => Some(None),
    };
    let error = open(true, "error").await??;
    let stdin = open(streams.stdin, "stdin").await?;
    let stdout = open(streams.stdout, "stdout").await?;
    let stderr = open(streams.stderr, "stderr").await?;
    let resize = open(streams.tty, "resize").await?;
    let mut open = vec![error.writer];
    let mut reader = |stream: Option<Stream>| {
        let Stream { writer, blocks } = stream?;
        open.push(writer);
        Some(blocks)
    };
    let (stdout, stderr) = (reader(stdout), reader(stderr));
    let input = Input { stdin: stdin.map(|s| s.writer), resize: resize.map(|s| s.writer) };
    Some((input, Output { stdout, stderr, error: error.blocks, _open: open }))
}

/// What the client says, until it says no more or what makes no sense.
async fn up<C>(mut client: SplitStream<WebSocketStream<C>>, mut input: Input)
where
    C: AsyncRead + AsyncWrite + Unpin,
{
    while let Some(Ok(message)) = client.next().await {
        let mut data = match message {
            Message::Binary(data) if !data.is_empty() => data,
            Message::Binary(_) | Message::Ping(_) | Message::Pong(_) => continue,
            Message::Text(_) | Message::Close(_) | Message::Frame(_) => return,
        };
        let goes_on = match (data.get_u8(), data.first()) {
            (STDIN, _) => say(input.stdin.as_ref(), &data).await,
            (RESIZE, _) => say(input.resize.as_ref(), &data).await,
            (CLOSE, Some(&STDIN)) => {
                if let Some(stdin) = input.stdin.take() {
                    stdin.end().await;
                }
                true
            }
            // The others are not the client's to end, and ending them harms nobody.
            (CLOSE, Some(_)) => true,
            _ => false,
        };
        if !goes_on {
            return;
        }
    }
}

/// What nobody asked for, or what comes after the end, is dropped. False: the runtime is gone.
async fn say(to: Option<&Writer>, data: &Bytes) -> bool {
    match to {
        Some(to) if !data.is_empty() => to.send(data).await,
        Some(_) | None => true,
    }
}

/// What the runtime says, until all streams have ended.
async fn down<C>(mut output: Output, mut client: SplitSink<WebSocketStream<C>, Message>)
where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let mut ping = interval_at(deadline_after(Instant::now(), PING), PING);
    ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut status = Some(());
    let mut last = None;
    while status.is_some() || output.stdout.is_some() || output.stderr.is_some() {
        // Receiving and ticking lose nothing when dropped.
        let (channel, block) = tokio::select! {
            block = next(&mut output.stdout) => (STDOUT, block),
            block = next(&mut output.stderr) => (STDERR, block),
            block = output.error.recv(), if status.is_some() => (ERROR, block),
            _ = ping.tick() => {
                if client.send(Message::Ping(Bytes::new())).await.is_err() {
                    return;
                }
                continue;
            }
            () = until(last) => break,
        };
        match block {
            Some(block) => {
                let message = [&[channel][..], &block].concat();
                if client.send(Message::Binary(message.into())).await.is_err() {
                    return;
                }
            }
            None => match channel {
                STDOUT => output.stdout = None,
                STDERR => output.stderr = None,
                _ => (status, last) = (None, Some(deadline_after(Instant::now(), DRAIN))),
            },
        }
    }
    end(client).await;
}

/// A block of a stream that is open; waits for ever for others.
async fn next(from: &mut Option<Receiver<Vec<u8>>>) -> Option<Vec<u8>> {
    match from {
        Some(from) => from.recv().await,
        None => std::future::pending().await,
    }
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Carries SPDY's bytes, as they are, until one side ends or the client opens no stream within `first`.
pub(crate) async fn tunnel<C, R>(client: C, runtime: R, first: Duration)
where
    C: AsyncRead + AsyncWrite + Unpin,
    R: AsyncRead + AsyncWrite + Unpin,
{
    let (mut read, mut write) = tokio::io::split(runtime);
    let (mut to_client, mut from_client) = server(client).await.split();
    let up = async {
        let mut silent_until = Some(deadline_after(Instant::now(), first));
        loop {
            let message = tokio::select! {
                message = from_client.next() => message,
                () = until(silent_until) => return,
            };
            let Some(Ok(message)) = message else { return };
            match message {
                Message::Binary(data) => {
                    silent_until = None;
                    if write.write_all(&data).await.is_err() || write.flush().await.is_err() {
                        return;
                    }
                }
                Message::Ping(_) | Message::Pong(_) => {}
                Message::Text(_) | Message::Close(_) | Message::Frame(_) => return,
            }
        }
    };
    let down = async {
        let mut ping = interval_at(deadline_after(Instant::now(), PING), PING);
        ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut buffer = vec![0; BLOCK];
        loop {
            // A read that is dropped has read nothing.
            let message = tokio::select! {
                read = read.read(&mut buffer) => match read {
                    Ok(n) if n > 0 => Message::Binary(Bytes::copy_from_slice(&buffer[..n])),
                    _ => break,
                },
                _ = ping.tick() => Message::Ping(Bytes::new()),
            };
            if to_client.send(message).await.is_err() {
                break;
            }
        }
        end(to_client).await;
    };
    // A tunnel has no half that could go on alone.
    either(up, down).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(k, v)| (k.parse().unwrap(), HeaderValue::from_static(v))).collect()
    }

    #[test]
    fn only_what_no_runtime_speaks_is_translated() {
        let websocket = |offers: &'static str| {
            headers(&[
                ("upgrade", "WebSocket"),
                ("sec-websocket-version", "13"),
                // The key and its answer of RFC 6455.
                ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
                ("sec-websocket-protocol", offers),
            ])
        };
        let accept = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=".to_owned();
        let both = websocket("v5.channel.k8s.io, v4.channel.k8s.io");
        let translated = Form::Translated { protocol: CHANNELS, accept: accept.clone() };
        assert_eq!(Form::of(Action::Exec, &both), translated);
        assert_eq!(Form::of(Action::Attach, &both), translated);
        assert_eq!(Form::of(Action::PortForward, &both), Form::Runtime);
        let tunnel = websocket(TUNNEL);
        assert_eq!(Form::of(Action::PortForward, &tunnel), Form::Translated { protocol: TUNNEL, accept });
        assert_eq!(Form::of(Action::Exec, &tunnel), Form::Runtime);
        assert_eq!(Form::of(Action::Exec, &websocket("v4.channel.k8s.io")), Form::Runtime);
        let mut spdy = both.clone();
        spdy.insert("upgrade", HeaderValue::from_static("SPDY/3.1"));
        assert_eq!(Form::of(Action::Exec, &spdy), Form::Runtime);
        let mut no_key = both;
        no_key.insert("sec-websocket-key", HeaderValue::from_static("short"));
        assert_eq!(Form::of(Action::Exec, &no_key), Form::Runtime);
    }

    #[tokio::test(start_paused = true)]
    async fn a_tunnel_whose_client_opens_nothing_ends_and_one_that_is_used_goes_on() {
        for (speaks, kept) in [(false, false), (true, true)] {
            let (client, far_client) = tokio::io::duplex(64 << 10);
            let (runtime, mut far_runtime) = tokio::io::duplex(64 << 10);
            let carried =
                quintlet_kit::task::spawn("tunnel", tunnel(client, runtime, Duration::from_secs(30)));
            let mut far = WebSocketStream::from_raw_socket(far_client, Role::Client, None).await;
            if speaks {
                far.send(Message::Binary(Bytes::from_static(b"ping"))).await.unwrap();
                let mut four = [0; 4];
                far_runtime.read_exact(&mut four).await.unwrap();
                assert_eq!(&four, b"ping");
            }
            let ended = timeout(Duration::from_secs(600), carried).await.is_ok();
            assert_eq!(ended, !kept, "speaks: {speaks}");
        }
    }
}
