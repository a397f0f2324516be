//! Translates two WebSocket protocols that runtimes do not support to SPDY: `v5.channel.k8s.io` (exec and
//! attach, with a signal that closes a single stream), and SPDY tunneled in WebSocket messages
//! (port-forward). Runtimes support the older protocols themselves.

use std::time::Duration;

use base64::Engine as _;
use bytes::{Buf as _, Bytes};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt as _, StreamExt as _};
use http::{HeaderMap, HeaderValue, header};
use quintlet_kit::clock::deadline_after;
use quintlet_spdy::{Connection, Stream, Writer};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader};
use tokio::sync::mpsc::Receiver;
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Message, Utf8Bytes};
use tokio_util::sync::CancellationToken;

use crate::remote_command::{Action, Streams};

/// The exec and attach protocol with a close signal per stream.
pub(crate) const CHANNELS: &str = "v5.channel.k8s.io";
/// The port-forward protocol that carries SPDY in WebSocket messages.
pub(crate) const TUNNEL: &str = "SPDY/3.1+portforward.k8s.io";

/// Interval of pings to the client, as in the kubelet.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum size of a message: kubectl sends blocks of 32 KiB.
const MAX_MESSAGE: usize = 1 << 20;
/// Size of the read buffer of a tunnel.
const TUNNEL_BUFFER: usize = 32 << 10;
/// Time limit for remaining output after the exit status.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for sending the close frame, and for the client's answer.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// A signal whose next byte names the stream to close.
const CLOSE: u8 = 255;

/// How a stream request is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StreamProtocol {
    /// By the runtime: bytes are copied.
    PassThrough,
    /// By translation from [`CHANNELS`] or [`TUNNEL`].
    Translated {
        /// The WebSocket subprotocol.
        protocol: &'static str,
        /// Value of Sec-WebSocket-Accept.
        accept: String,
    },
}

impl StreamProtocol {
    /// Returns how to serve an upgrade with these headers.
    #[must_use]
    pub(crate) fn negotiate(action: Action, headers: &HeaderMap) -> Self {
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
            Self::PassThrough
        }
    }

    /// Returns the headers of the request to the runtime, or none if the client's headers are used.
    #[must_use]
    pub(crate) fn runtime_headers(&self) -> Option<HeaderMap> {
        let Self::Translated { protocol, .. } = self else { return None };
        let version = if *protocol == TUNNEL { "portforward.k8s.io" } else { "v4.channel.k8s.io" };
        let mut headers = HeaderMap::new();
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("SPDY/3.1"));
        headers.insert("x-stream-protocol-version", HeaderValue::from_static(version));
        Some(headers)
    }

    /// Returns the headers of the 101 to the client, or none if the runtime's headers are used.
    #[must_use]
    pub(crate) fn client_headers(&self) -> Option<HeaderMap> {
        let Self::Translated { protocol, accept } = self else { return None };
        let mut headers = HeaderMap::new();
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(protocol));
        // Base64 is a valid header value.
        headers.extend(HeaderValue::from_str(accept).ok().map(|a| (header::SEC_WEBSOCKET_ACCEPT, a)));
        Some(headers)
    }
}

async fn websocket_server<C: AsyncRead + AsyncWrite + Unpin>(client: C) -> WebSocketStream<C> {
    let config =
        WebSocketConfig::default().max_message_size(Some(MAX_MESSAGE)).max_frame_size(Some(MAX_MESSAGE));
    WebSocketStream::from_raw_socket(client, Role::Server, Some(config)).await
}

/// Translates until the process has exited and its output has been sent, or until one of both sides has
/// closed the connection. At `stop` the client receives the reason as the status of its session.
pub(crate) async fn channels<C, R>(client: C, runtime: R, streams: Streams, stop: &CancellationToken)
where
    C: AsyncRead + AsyncWrite + Unpin + Send,
    R: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (read, write) = tokio::io::split(runtime);
    let connection = Connection::over(BufReader::new(read), write);
    let (to_client, from_client) = websocket_server(client).await.split();
    let opened = open(&connection, streams).await;
    if let Some((input, output)) = opened {
        run_both(client_to_runtime(from_client, input), runtime_to_client(output, to_client, stop)).await;
    }
    connection.close();
}

/// Runs both directions until one has ended. If the runtime's direction has ended, the client has
/// [`CLOSE_TIMEOUT`] to answer the close frame: closing a socket with unread data discards data that the
/// client has not read.
async fn run_both(client_to_runtime: impl Future<Output = ()>, runtime_to_client: impl Future<Output = ()>) {
    let mut client_to_runtime = std::pin::pin!(client_to_runtime);
    // The direction that is dropped ends with the connections of both.
    tokio::select! {
        () = &mut client_to_runtime => {}
        () = runtime_to_client => {
            let _ = timeout(CLOSE_TIMEOUT, client_to_runtime).await;
        }
    }
}

/// Sends a normal close frame. A client treats any other end, or a close frame without a code, as an error.
async fn send_close<C>(mut client: SplitSink<WebSocketStream<C>, Message>)
where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let normal = CloseFrame { code: CloseCode::Normal, reason: Utf8Bytes::default() };
    // A client that does not read it is disconnected.
    let _ = timeout(CLOSE_TIMEOUT, client.send(Message::Close(Some(normal)))).await;
}

struct Input {
    stdin: Option<Writer>,
    resize: Option<Writer>,
}

struct Output {
    stdout: Option<Receiver<Vec<u8>>>,
    stderr: Option<Receiver<Vec<u8>>>,
    error: Receiver<Vec<u8>>,
    /// Streams of which the other direction is unused. They stay open as long as this value.
    _open: Vec<Writer>,
}

/// Opens the streams that the runtime expects, in the order of kubectl.
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

/// Forwards messages of the client until it closes the connection or sends an invalid message.
async fn client_to_runtime<C>(mut client: SplitStream<WebSocketStream<C>>, mut input: Input)
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
            (STDIN, _) => send_data(input.stdin.as_ref(), &data).await,
            (RESIZE, _) => send_data(input.resize.as_ref(), &data).await,
            (CLOSE, Some(&STDIN)) => {
                if let Some(stdin) = input.stdin.take() {
                    stdin.end().await;
                }
                true
            }
            // A client cannot close the other streams; the request is ignored.
            (CLOSE, Some(_)) => true,
            _ => false,
        };
        if !goes_on {
            return;
        }
    }
}

/// Sends data. Data for a stream that is not requested or already closed is dropped. Returns false if the
/// runtime is gone.
async fn send_data(writer: Option<&Writer>, data: &Bytes) -> bool {
    match writer {
        Some(writer) if !data.is_empty() => writer.send(data).await,
        Some(_) | None => true,
    }
}

/// Forwards output of the runtime until all streams have ended.
async fn runtime_to_client<C>(
    mut output: Output,
    mut client: SplitSink<WebSocketStream<C>, Message>,
    stop: &CancellationToken,
) where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let mut ping = interval_at(deadline_after(Instant::now(), PING_INTERVAL), PING_INTERVAL);
    ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut status = Some(());
    // A client parses all that comes on the error channel as one status.
    let mut has_status = false;
    let mut last = None;
    while status.is_some() || output.stdout.is_some() || output.stderr.is_some() {
        // Dropping a receive or a tick loses nothing.
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
            () = stop.cancelled() => {
                if has_status {
                    break;
                }
                // A client that does not read it is disconnected.
                let _ = timeout(CLOSE_TIMEOUT, client.send(Message::Binary(stop_status().into()))).await;
                break;
            }
        };
        match block {
            Some(block) => {
                has_status |= channel == ERROR;
                let message = [&[channel][..], &block].concat();
                if client.send(Message::Binary(message.into())).await.is_err() {
                    return;
                }
            }
            None => match channel {
                STDOUT => output.stdout = None,
                STDERR => output.stderr = None,
                _ => (status, last) = (None, Some(deadline_after(Instant::now(), DRAIN_TIMEOUT))),
            },
        }
    }
    send_close(client).await;
}

/// Returns the message of the error channel for sessions that this process ends. kubectl prints its text.
fn stop_status() -> Vec<u8> {
    let status = json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "reason": "ServiceUnavailable",
        "message": "the node API of the node is stopping or being upgraded, which ends its sessions: run the command again",
        "code": 503,
    });
    [&[ERROR][..], status.to_string().as_bytes()].concat()
}

/// Returns the next block of an open stream. Never completes for others.
async fn next(receiver: &mut Option<Receiver<Vec<u8>>>) -> Option<Vec<u8>> {
    match receiver {
        Some(receiver) => receiver.recv().await,
        None => std::future::pending().await,
    }
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Copies SPDY between the messages of the client and the runtime, until one side ends, the client opens no
/// stream within `first`, or `stop`. The client receives a close frame.
pub(crate) async fn tunnel<C, R>(client: C, runtime: R, first: Duration, stop: &CancellationToken)
where
    C: AsyncRead + AsyncWrite + Unpin,
    R: AsyncRead + AsyncWrite + Unpin,
{
    let (mut read, mut write) = tokio::io::split(runtime);
    let (mut to_client, mut from_client) = websocket_server(client).await.split();
    let client_to_runtime = async {
        let mut silent_until = Some(deadline_after(Instant::now(), first));
        loop {
            // The second arm ends the connection, so a message that has begun to arrive is not missed.
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
    let runtime_to_client = async {
        let mut ping = interval_at(deadline_after(Instant::now(), PING_INTERVAL), PING_INTERVAL);
        ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut buffer = vec![0; TUNNEL_BUFFER];
        loop {
            // A dropped read has read nothing.
            let message = tokio::select! {
                read = read.read(&mut buffer) => match read {
                    Ok(n) if n > 0 => Message::Binary(Bytes::copy_from_slice(&buffer[..n])),
                    _ => break,
                },
                _ = ping.tick() => Message::Ping(Bytes::new()),
                () = stop.cancelled() => break,
            };
            if to_client.send(message).await.is_err() {
                break;
            }
        }
        send_close(to_client).await;
    };
    // A tunnel cannot be half-closed.
    run_both(client_to_runtime, runtime_to_client).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(k, v)| (k.parse().unwrap(), HeaderValue::from_static(v))).collect()
    }

    #[test]
    fn only_protocols_that_runtimes_lack_are_translated() {
        let websocket = |offers: &'static str| {
            headers(&[
                ("upgrade", "WebSocket"),
                ("sec-websocket-version", "13"),
                // The example key and its answer in RFC 6455.
                ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
                ("sec-websocket-protocol", offers),
            ])
        };
        let accept = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=".to_owned();
        let both = websocket("v5.channel.k8s.io, v4.channel.k8s.io");
        let translated = StreamProtocol::Translated { protocol: CHANNELS, accept: accept.clone() };
        assert_eq!(StreamProtocol::negotiate(Action::Exec, &both), translated);
        assert_eq!(StreamProtocol::negotiate(Action::Attach, &both), translated);
        assert_eq!(StreamProtocol::negotiate(Action::PortForward, &both), StreamProtocol::PassThrough);
        let tunnel = websocket(TUNNEL);
        assert_eq!(
            StreamProtocol::negotiate(Action::PortForward, &tunnel),
            StreamProtocol::Translated { protocol: TUNNEL, accept }
        );
        assert_eq!(StreamProtocol::negotiate(Action::Exec, &tunnel), StreamProtocol::PassThrough);
        assert_eq!(
            StreamProtocol::negotiate(Action::Exec, &websocket("v4.channel.k8s.io")),
            StreamProtocol::PassThrough
        );
        let mut spdy = both.clone();
        spdy.insert("upgrade", HeaderValue::from_static("SPDY/3.1"));
        assert_eq!(StreamProtocol::negotiate(Action::Exec, &spdy), StreamProtocol::PassThrough);
        let mut no_key = both;
        no_key.insert("sec-websocket-key", HeaderValue::from_static("short"));
        assert_eq!(StreamProtocol::negotiate(Action::Exec, &no_key), StreamProtocol::PassThrough);
    }

    /// Stops a session whose client has read a line of output and then, if there is one, the status of its
    /// process. Returns what the client reads after that.
    async fn stopped(status: Option<&[u8]>) -> Vec<Message> {
        let (client, far_client) = tokio::io::duplex(64 << 10);
        let stop = CancellationToken::new();
        let (blocks, stdout) = quintlet_kit::queue::channel("test", 1);
        let (errors, error) = quintlet_kit::queue::channel("test", 1);
        let output = Output { stdout: Some(stdout), stderr: None, error, _open: Vec::new() };
        let (to_client, _from_client) = websocket_server(client).await.split();
        let stopping = stop.clone();
        let sent = quintlet_kit::task::spawn("output", async move {
            runtime_to_client(output, to_client, &stopping).await;
        });
        let mut far = WebSocketStream::from_raw_socket(far_client, Role::Client, None).await;
        blocks.send(b"line".to_vec()).await.unwrap();
        assert_eq!(far.next().await.unwrap().unwrap(), Message::Binary(Bytes::from_static(b"\x01line")));
        if let Some(status) = status {
            errors.send(status.to_vec()).await.unwrap();
            let wanted = [&[ERROR][..], status].concat();
            assert_eq!(far.next().await.unwrap().unwrap(), Message::Binary(wanted.into()));
        }
        stop.cancel();
        let mut rest = Vec::new();
        while let Some(Ok(message)) = far.next().await {
            let is_last = message.is_close();
            rest.push(message);
            if is_last {
                break;
            }
        }
        sent.await.unwrap();
        rest
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_ends_a_session_with_the_reason_and_a_normal_close_frame() {
        let rest = stopped(None).await;
        let [Message::Binary(status), Message::Close(Some(close))] = &rest[..] else { panic!("{rest:?}") };
        let (channel, status) = status.split_first().unwrap();
        let status: serde_json::Value = serde_json::from_slice(status).unwrap();
        assert_eq!((*channel, &status["status"], &status["code"]), (ERROR, &json!("Failure"), &json!(503)));
        assert_eq!(close.code, CloseCode::Normal);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_sends_no_second_status_to_a_client_that_has_one() {
        let rest = stopped(Some(br#"{"status":"Success"}"#)).await;
        let [Message::Close(Some(close))] = &rest[..] else { panic!("{rest:?}") };
        assert_eq!(close.code, CloseCode::Normal);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_ends_a_tunnel_with_a_normal_close_frame() {
        let (client, far_client) = tokio::io::duplex(64 << 10);
        let (runtime, _far_runtime) = tokio::io::duplex(64 << 10);
        let stop = CancellationToken::new();
        let stopping = stop.clone();
        let carried = quintlet_kit::task::spawn("tunnel", async move {
            tunnel(client, runtime, Duration::from_secs(30), &stopping).await;
        });
        let mut far = WebSocketStream::from_raw_socket(far_client, Role::Client, None).await;
        stop.cancel();
        let Message::Close(Some(close)) = far.next().await.unwrap().unwrap() else {
            panic!("no close frame")
        };
        assert_eq!(close.code, CloseCode::Normal);
        drop(far);
        carried.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_tunnel_ends_if_the_client_opens_no_stream_and_continues_if_it_does() {
        for (speaks, kept) in [(false, false), (true, true)] {
            let (client, far_client) = tokio::io::duplex(64 << 10);
            let (runtime, mut far_runtime) = tokio::io::duplex(64 << 10);
            let carried = quintlet_kit::task::spawn("tunnel", async move {
                tunnel(client, runtime, Duration::from_secs(30), &CancellationToken::new()).await;
            });
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
