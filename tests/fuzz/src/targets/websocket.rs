//! Channels of `v5.channel.k8s.io`: messages of a WebSocket client, and the resulting data of the runtime's
//! stdin and resize streams.
//!
//! An input is a list of messages: a byte for the kind, two for the length, and the payload. Its bytes on the
//! wire are generated from it.

use std::time::Duration;

use node_api_streams::fuzzing::channels;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

use super::Target;
use crate::bytes::TargetInputs;

/// See [`Target`].
pub const TARGET: Target = Target { name: "websocket", inputs, check, planted };

/// Bounds a failure only: everything is in memory.
const LIMIT: Duration = Duration::from_secs(10);

const STDIN: u8 = 0;
const RESIZE: u8 = 4;
const CLOSE: u8 = 255;
/// IDs of the runtime's streams, in the order in which they are opened: error, stdin, stdout, stderr, resize.
const STDIN_ID: u32 = 3;
const RESIZE_ID: u32 = 9;

const CONTINUATION: u8 = 0;
const TEXT: u8 = 1;
const BINARY: u8 = 2;
const HANG_UP: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

struct Message<'a> {
    kind: u8,
    payload: &'a [u8],
}

fn messages(mut input: &[u8]) -> Vec<Message<'_>> {
    let mut out = Vec::new();
    while let Some((&[kind, high, low], rest)) = input.split_first_chunk::<3>() {
        let length = usize::from(u16::from_be_bytes([high, low])).min(rest.len());
        let (payload, rest) = rest.split_at(length);
        // The highest bit is the FIN flag, which all messages have.
        out.push(Message { kind: kind & 0x7f, payload });
        input = rest;
    }
    out
}

fn inputs() -> TargetInputs {
    let payload =
        prop_oneof![4 => vec(any::<u8>(), 0..20), 1 => (0_usize..4_000).prop_map(|n| vec![b'x'; n])];
    let on_channel = (select(vec![STDIN, STDIN, STDIN, RESIZE, CLOSE, 1, 3, 7]), payload.clone())
        .prop_map(|(channel, payload)| (BINARY, [&[channel][..], &payload].concat()));
    let close = select(vec![0_u8, 1, 4, 9]).prop_map(|channel| (BINARY, vec![CLOSE, channel]));
    let other = (select(vec![TEXT, BINARY, HANG_UP, PING, PONG, CONTINUATION, 11, 0x42]), payload)
        .prop_map(|(kind, payload)| (kind, payload));
    let message = prop_oneof![8 => on_channel, 2 => close, 1 => other].prop_map(|(kind, payload)| {
        let length = u16::try_from(payload.len()).unwrap_or(u16::MAX);
        [&[kind][..], &length.to_be_bytes(), &payload].concat()
    });
    let shape = vec(message, 0..16).prop_map(|messages| messages.concat()).boxed();
    TargetInputs {
        shape,
        words: &["\u{2}\u{0}\u{1}\u{0}", "\u{2}\u{0}\u{2}\u{0}a", "\u{0}", "\u{8}\u{0}\u{0}"],
    }
}

/// Data that reaches the runtime.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Seen {
    stdin: Vec<u8>,
    stdin_ended: bool,
    resize: Vec<u8>,
}

fn check(input: &[u8]) -> Result<(), String> {
    against(input, input)
}

fn planted(input: &[u8]) -> Result<(), String> {
    // A planted bug: a message for stdin that begins with a zero loses it.
    let mut given = Vec::new();
    for Message { kind, payload } in messages(input) {
        let payload = match payload {
            [STDIN, 0, rest @ ..] if kind == BINARY => [&[STDIN][..], rest].concat(),
            all => all.to_vec(),
        };
        given.push(kind);
        given.extend(u16::try_from(payload.len()).unwrap_or(u16::MAX).to_be_bytes());
        given.extend(payload);
    }
    against(&given, input)
}

fn against(given: &[u8], input: &[u8]) -> Result<(), String> {
    let (want, cut) = reference(input);
    let executor =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
    let got = executor.block_on(async { timeout(LIMIT, observe(given, want.clone(), cut)).await });
    let got = got.map_err(|_| "the client's end does not end the channels".to_owned())?;
    let holds = if cut {
        // Data in flight may be lost when the client disconnects.
        want.stdin.starts_with(&got.stdin)
            && want.resize.starts_with(&got.resize)
            && (want.stdin_ended || !got.stdin_ended)
    } else {
        got == want
    };
    if holds { Ok(()) } else { Err(format!("cut {cut}: {got:?} in place of {want:?}")) }
}

/// Returns the expected data at the runtime, and whether the client closes the connection itself.
fn reference(input: &[u8]) -> (Seen, bool) {
    let mut seen = Seen::default();
    for Message { kind, payload } in messages(input) {
        match (kind, payload) {
            (PING | PONG, payload) if payload.len() <= 125 => {}
            (BINARY, []) => {}
            (BINARY, [STDIN, data @ ..]) => {
                if !seen.stdin_ended {
                    seen.stdin.extend(data);
                }
            }
            (BINARY, [RESIZE, data @ ..]) => seen.resize.extend(data),
            (BINARY, [CLOSE, STDIN, ..]) => seen.stdin_ended = true,
            (BINARY, [CLOSE, _, ..]) => {}
            _ => return (seen, true),
        }
    }
    (seen, false)
}

/// Encodes a frame of a client, with a mask of zero.
fn wire(Message { kind, payload }: &Message<'_>) -> Vec<u8> {
    let mut out = vec![0x80 | kind];
    match u8::try_from(payload.len()) {
        Ok(length) if length < 126 => out.push(0x80 | length),
        _ => {
            out.push(0x80 | 126);
            out.extend(u16::try_from(payload.len()).unwrap_or(u16::MAX).to_be_bytes());
        }
    }
    out.extend([0; 4]);
    out.extend(*payload);
    out
}

async fn observe(input: &[u8], want: Seen, cut: bool) -> Seen {
    let (client, at_client) = tokio::io::duplex(1 << 16);
    let (runtime, at_runtime) = tokio::io::duplex(1 << 16);
    let bytes: Vec<u8> = messages(input).iter().flat_map(wire).collect();
    let (mut from_node, mut to_node) = tokio::io::split(at_client);
    let (arrived, all_arrived) = tokio::sync::oneshot::channel();
    let talk = async move {
        // node-api reads no more after it has closed the connection.
        let _ = to_node.write_all(&bytes).await;
        if !cut {
            // A client that waits until its last message has arrived.
            let _ = timeout(LIMIT / 2, all_arrived).await;
        }
        let _ = to_node.shutdown().await;
    };
    let listen = async move {
        let mut ignored = Vec::new();
        let _ = from_node.read_to_end(&mut ignored).await;
    };
    let serve = channels(client, runtime);
    let read = stream_data(at_runtime, want, arrived);
    let (seen, (), (), ()) = tokio::join!(read, talk, listen, serve);
    seen
}

/// Reads SPDY frames until the connection ends, and notifies once the expected data has arrived.
async fn stream_data(
    mut stream: impl AsyncRead + Unpin,
    want: Seen,
    arrived: tokio::sync::oneshot::Sender<()>,
) -> Seen {
    let mut seen = Seen::default();
    let mut arrived = Some(arrived);
    loop {
        let lengths = |s: &Seen| (s.stdin.len(), s.stdin_ended, s.resize.len());
        if lengths(&seen) == lengths(&want)
            && let Some(arrived) = arrived.take()
        {
            // The client may have ended already.
            let _ = arrived.send(());
        }
        let mut head = [0; 8];
        if stream.read_exact(&mut head).await.is_err() {
            return seen;
        }
        let length = u32::from_be_bytes([0, head[5], head[6], head[7]]);
        let mut body = vec![0; usize::try_from(length).unwrap_or_default()];
        if stream.read_exact(&mut body).await.is_err() {
            return seen;
        }
        match u32::from_be_bytes([head[0], head[1], head[2], head[3]]) {
            STDIN_ID => {
                seen.stdin.extend(body);
                seen.stdin_ended |= head[4] & 1 != 0;
            }
            RESIZE_ID => seen.resize.extend(body),
            _ => {}
        }
    }
}
