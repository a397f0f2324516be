//! Watchers of pleg-service, and message sizes.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use bytes::{Buf as _, Bytes};
use parking_lot::Mutex;
use prost::Message as _;
use quintlet_kit::socket::channel;
use quintlet_kit::task;
use quintlet_proto::pleg::v1 as pb;
use quintlet_proto::pleg::v1::watch_event::Event;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Request, Status, Streaming};

use crate::{Exit, MAX_MESSAGE, now};

/// Undecoded messages.
#[derive(Debug, Clone, Copy, Default)]
struct Raw;

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        bytes::BufMut::put(buffer, item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

/// Opens a stream. A message above the size limit is measured instead of rejected.
async fn open(channel: Channel, path: &'static str, request: Bytes) -> anyhow::Result<Streaming<Bytes>> {
    let mut client = tonic::client::Grpc::new(channel).max_decoding_message_size(8 * MAX_MESSAGE);
    client.ready().await?;
    let path = PathAndQuery::from_static(path);
    Ok(client.server_streaming(Request::new(request), path, Raw).await?.into_inner())
}

/// Sizes of the messages of a list.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sizes {
    pub(crate) bytes: usize,
    pub(crate) largest: usize,
}

impl Sizes {
    /// Measures all messages of the stream at `path`.
    pub(crate) async fn of(channel: Channel, path: &'static str) -> anyhow::Result<Self> {
        let mut messages = open(channel, path, Bytes::new()).await?;
        let mut sizes = Self::default();
        while let Some(message) = messages.message().await? {
            sizes.bytes += message.len();
            sizes.largest = sizes.largest.max(message.len());
        }
        Ok(sizes)
    }
}

/// Times at which a watcher received exits, by container ID.
type Seen = Arc<Mutex<HashMap<String, u64>>>;

/// Clients of Watch, each with its own connection.
pub(crate) struct Watchers {
    tasks: Vec<JoinHandle<anyhow::Result<()>>>,
    seen: Vec<Seen>,
    changed: watch::Receiver<usize>,
    largest: Arc<AtomicUsize>,
}

impl Drop for Watchers {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Watchers {
    /// Opens watches once the service responds, and waits until each has the first state of `pods` pods.
    pub(crate) async fn open(socket: &Path, n: usize, pods: usize, limit: Duration) -> anyhow::Result<Self> {
        quintlet_kit::socket::wait_ready(socket, limit).await?;
        let largest = Arc::<AtomicUsize>::default();
        let (pictures, mut have) = watch::channel(0);
        let (events, changed) = watch::channel(0);
        let mut watchers = Self { tasks: Vec::new(), seen: Vec::new(), changed, largest };
        for _ in 0..n {
            let seen = Seen::default();
            let reader = Reader {
                seen: Arc::clone(&seen),
                largest: Arc::clone(&watchers.largest),
                pictures: pictures.clone(),
                changed: events.clone(),
                pods,
            };
            watchers.tasks.push(task::spawn("watcher", reader.read(channel(socket.to_owned()))));
            watchers.seen.push(seen);
        }
        drop((pictures, events));
        tokio::time::timeout(limit, have.wait_for(|have| *have == n)).await?.context("a watcher ended")?;
        Ok(watchers)
    }

    /// Returns the size of the largest message so far.
    pub(crate) fn largest(&self) -> usize {
        self.largest.load(Ordering::Relaxed)
    }

    /// Waits until all watchers have these exits. Returns the delays in nanoseconds.
    pub(crate) async fn exits(&mut self, exits: &[Exit], limit: Duration) -> anyhow::Result<Vec<u64>> {
        let seen = self.seen.clone();
        let all =
            |_: &usize| seen.iter().all(|seen| exits.iter().all(|(id, _)| seen.lock().contains_key(id)));
        tokio::time::timeout(limit, self.changed.wait_for(all)).await?.context("the watchers ended")?;
        let delay = |seen: &Seen, (id, at): &Exit| seen.lock().get(id).map(|seen| seen.saturating_sub(*at));
        Ok(self.seen.iter().flat_map(|seen| exits.iter().filter_map(|exit| delay(seen, exit))).collect())
    }
}

struct Reader {
    seen: Seen,
    largest: Arc<AtomicUsize>,
    pictures: watch::Sender<usize>,
    changed: watch::Sender<usize>,
    pods: usize,
}

impl Reader {
    async fn read(self, channel: Channel) -> anyhow::Result<()> {
        let hello = pb::WatchRequest { hello: Some(quintlet_proto::hello()), resume: None };
        let mut messages =
            open(channel, "/quintlet.pleg.v1.Pleg/Watch", hello.encode_to_vec().into()).await?;
        let (mut picture, mut in_picture) = (0, true);
        while let Some(message) = messages.message().await? {
            let at = now();
            self.largest.fetch_max(message.len(), Ordering::Relaxed);
            match pb::WatchEvent::decode(message)?.event {
                Some(Event::Pod(_)) if in_picture => picture += 1,
                Some(Event::Pod(pod)) => {
                    let exited = pod.containers.iter().filter(|c| c.state() == pb::ContainerState::Exited);
                    for container in exited {
                        // The first message with the exit counts.
                        self.seen.lock().entry(container.id.clone()).or_insert(at);
                    }
                    self.changed.send_modify(|n| *n += 1);
                }
                Some(Event::SnapshotEnd(_)) => {
                    anyhow::ensure!(picture == self.pods, "{picture} pods in the picture of {}", self.pods);
                    in_picture = false;
                    self.pictures.send_modify(|n| *n += 1);
                }
                _ => {}
            }
        }
        anyhow::bail!("the stream ended")
    }
}
