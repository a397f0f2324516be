//! Frames of a runtime's streaming server, as the SPDY/3.1 client parses them.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use quintlet_spdy::Connection;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::time::timeout;

use super::Target;
use crate::bytes::TargetInputs;

/// See [`Target`].
pub const TARGET: Target = Target { name: "spdy", inputs, check, planted };

/// Streams of the client; their IDs are odd.
const STREAMS: u32 = 3;
/// Largest accepted frame.
const MAX_FRAME: usize = 1 << 20;
/// Bounds a failure only: everything is in memory.
const LIMIT: Duration = Duration::from_secs(10);

const FIN: u8 = 1;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;

/// Encodes a frame.
#[must_use]
pub fn frame(head: u32, flags: u8, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX) & 0x00ff_ffff;
    [&head.to_be_bytes()[..], &(u32::from(flags) << 24 | length).to_be_bytes(), body].concat()
}

fn inputs() -> TargetInputs {
    let id = select(vec![1_u32, 3, 5, 7, 0, 2, 0x7fff_ffff]);
    let flags = select(vec![0_u8, 0, FIN, 0xff]);
    let body = prop_oneof![4 => vec(any::<u8>(), 0..40), 1 => (0_usize..70_000).prop_map(|n| vec![7; n])];
    let data =
        (id.clone(), flags.clone(), body.clone()).prop_map(|(id, flags, body)| frame(id, flags, &body));
    let kind = select(vec![1_u32, 2, 3, 4, 6, 7, 8, 9, 0xffff]);
    let control = (kind, flags, id.clone(), body).prop_map(|(kind, flags, id, body)| {
        let body = [&id.to_be_bytes()[..], &body].concat();
        frame(0x8003_0000 | kind, flags, &body)
    });
    let short = (select(vec![0x8003_0003_u32, 0x8003_0006, 0x8003_0007]), vec(any::<u8>(), 0..4))
        .prop_map(|(head, body)| frame(head, 0, &body));
    let ping = (0_u32..8).prop_map(|id| frame(0x8003_0006, 0, &id.to_be_bytes()));
    let endless = Just([&3_u32.to_be_bytes()[..], &[0, 0xff, 0xff, 0xff], &[1; 64]].concat());
    let any_frame = prop_oneof![6 => data, 2 => control, 1 => short, 2 => ping, 1 => endless];
    let shape = vec(any_frame, 0..24).prop_map(|frames| frames.concat()).boxed();
    TargetInputs {
        shape,
        words: &["\u{0}\u{0}\u{0}\u{1}", "\u{0}\u{0}\u{0}\u{3}\u{1}\u{0}\u{0}\u{0}", "\u{0}", "\u{1}"],
    }
}

/// Effects of the server's bytes.
#[derive(Debug, Default, PartialEq, Eq)]
struct Seen {
    streams: BTreeMap<u32, Vec<u8>>,
    /// Pings that the client answered.
    pings: Vec<u32>,
}

fn check(input: &[u8]) -> Result<(), String> {
    against(input, input)
}

fn planted(input: &[u8]) -> Result<(), String> {
    // A planted bug: a stream that the server resets stays open.
    let mut deaf = input.to_vec();
    let mut at = 0;
    while let Some(head) = deaf.get(at..at + 8).and_then(|head| <[u8; 8]>::try_from(head).ok()) {
        let length = u32::from_be_bytes([0, head[5], head[6], head[7]]);
        if head[0] & 0x80 != 0 && head[2..4] == RST_STREAM.to_be_bytes() {
            deaf[at + 3] = 9;
        }
        at += 8 + usize::try_from(length).unwrap_or(usize::MAX);
    }
    against(&deaf, input)
}

fn against(given: &[u8], input: &[u8]) -> Result<(), String> {
    let executor =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
    let got = executor
        .block_on(async { timeout(LIMIT, observe(given.to_vec())).await })
        .map_err(|_| "the connection does not end with its bytes".to_owned())?;
    let want = reference(input);
    if got.streams != want.streams {
        let lengths = |s: &Seen| s.streams.iter().map(|(id, b)| (*id, b.len())).collect::<Vec<_>>();
        return Err(format!("streams of {:?} bytes in place of {:?}", lengths(&got), lengths(&want)));
    }
    // The last pings may be lost with the connection.
    if !want.pings.starts_with(&got.pings) {
        return Err(format!("pings {:?} in place of {:?}", got.pings, want.pings));
    }
    Ok(())
}

async fn observe(bytes: Vec<u8>) -> Seen {
    let (near, far) = tokio::io::duplex(1 << 16);
    let (read, write) = tokio::io::split(near);
    let connection = Connection::over(BufReader::new(read), write);
    let mut readers = Vec::new();
    let mut writers = Vec::new();
    for n in 0..STREAMS {
        let stream = connection.stream(&[("streamType", "data")]).await;
        let Some(mut stream) = stream else { continue };
        writers.push(stream.writer);
        readers.push(async move {
            let mut all = Vec::new();
            while let Some(block) = stream.blocks.recv().await {
                all.extend(block);
            }
            (2 * n + 1, all)
        });
    }
    let (mut from_client, mut to_client) = tokio::io::split(far);
    let send = async move {
        // A client that has disconnected reads no more.
        let _ = to_client.write_all(&bytes).await;
        let _ = to_client.shutdown().await;
    };
    let receive = async move {
        let mut all = Vec::new();
        let _ = from_client.read_to_end(&mut all).await;
        all
    };
    let mut readers = readers.into_iter();
    let next = |readers: &mut std::vec::IntoIter<_>| readers.next().expect("there are three streams");
    let a = next(&mut readers);
    let b = next(&mut readers);
    let c = next(&mut readers);
    let ((), received, a, b, c) = tokio::join!(send, receive, a, b, c);
    drop(writers);
    Seen { streams: [a, b, c].into_iter().collect(), pings: frames(&received).filter_map(ping).collect() }
}

fn ping((head, _, body): (u32, u8, &[u8])) -> Option<u32> {
    let is_ping = head & 0x8000_0000 != 0 && (head & 0xffff) == u32::from(PING);
    is_ping.then(|| body.get(..4)?.try_into().ok().map(u32::from_be_bytes)).flatten()
}

/// Returns the frames up to the first one that is too large or truncated.
fn frames(mut bytes: &[u8]) -> impl Iterator<Item = (u32, u8, &[u8])> {
    std::iter::from_fn(move || {
        let (head, rest) = bytes.split_at_checked(8)?;
        let length = usize::try_from(u32::from_be_bytes([0, head[5], head[6], head[7]])).ok()?;
        let (body, rest) = rest.split_at_checked(length).filter(|_| length <= MAX_FRAME)?;
        bytes = rest;
        Some((u32::from_be_bytes([head[0], head[1], head[2], head[3]]), head[4], body))
    })
}

fn reference(input: &[u8]) -> Seen {
    let mut seen = Seen::default();
    let mut open: Vec<u32> = (0..STREAMS).map(|n| 2 * n + 1).collect();
    open.iter().for_each(|id| drop(seen.streams.insert(*id, Vec::new())));
    for (head, flags, body) in frames(input) {
        let mut ended = None;
        if head & 0x8000_0000 == 0 {
            if let Some(stream) = seen.streams.get_mut(&head).filter(|_| open.contains(&head)) {
                stream.extend(body);
            }
            ended = (flags & FIN != 0).then_some(head);
        } else if head & 0xffff == u32::from(RST_STREAM) {
            ended = body
                .get(..4)
                .and_then(|id| id.try_into().ok())
                .map(|id| u32::from_be_bytes(id) & 0x7fff_ffff);
        } else if head & 0xffff == u32::from(PING) {
            let id = body.get(..4).and_then(|id| id.try_into().ok()).map_or(0, u32::from_be_bytes);
            seen.pings.extend((id % 2 == 0).then_some(id));
        }
        open.retain(|id| Some(*id) != ended);
    }
    seen
}
