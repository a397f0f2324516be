//! The event queue and the task that writes events.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use quintlet_kit::backoff::Backoff;
use quintlet_kit::clock::Clock;
use quintlet_kit::queue as kit_queue;
use serde_json::{Value, json};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::Occurrence;
use super::correlate::{Correlator, CountKey, Decision, StoredEvent};
use super::recent::RecentIds;
use crate::api::{ApiClient, ApiFailure};
use crate::metrics::Metrics;

/// Capacity of the queue, as in the kubelet.
const QUEUE: usize = 1000;

/// Name of the queue.
const EVENTS: &str = "events";

/// Time after which an event is dropped. The kubelet makes twelve attempts, ten seconds apart.
const UNREACHABLE_LIMIT: Duration = Duration::from_secs(120);

/// Pauses between attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Queues events. Clones share the queue.
#[derive(Clone)]
pub struct Recorder {
    /// Queue of events and the clock; `None` without an API server.
    queue: Option<(mpsc::Sender<Queued>, Clock)>,
    metrics: Metrics,
    node_uid: NodeUid,
}

/// UID of the Node object; empty until the Node is known.
type NodeUid = Arc<Mutex<String>>;

/// An event in the queue.
struct Queued {
    // 0: the event has no ID.
    id: u64,
    occurrence: Occurrence,
    // Receives a message once the event is written or dropped.
    done: oneshot::Sender<()>,
}

/// The result of [`Recorder::write`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventOutcome {
    /// The event is written, or it was dropped after it was queued.
    Done,
    /// The queue was full, and the event is lost.
    QueueFull,
    /// The recorder has stopped before it wrote the event.
    Stopped,
}

/// The queue took no event: it is full, or its reader has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NotQueued {
    Full,
    Stopped,
}

impl Recorder {
    /// Creates a recorder that only logs.
    #[must_use]
    pub fn standalone(metrics: Metrics) -> Self {
        Self { queue: None, metrics, node_uid: NodeUid::default() }
    }

    /// Spawns the task that writes events, until `stop`.
    #[must_use]
    pub fn start(
        api: ApiClient,
        node: &str,
        clock: Clock,
        metrics: Metrics,
        stop: CancellationToken,
    ) -> Self {
        let (queue, waiting) = kit_queue::channel(EVENTS, QUEUE);
        let (correlator, recent) = (Correlator::new(node), RecentIds::default());
        let node_uid = NodeUid::default();
        let writer = Writer {
            api,
            clock: clock.clone(),
            correlator,
            recent,
            metrics: metrics.clone(),
            node_uid: Arc::clone(&node_uid),
        };
        quintlet_kit::task::spawn("events", async move {
            // pod-sync sends its events again to the next process. Those of this process are lost.
            tokio::select! {
                () = writer.run(waiting) => {}
                () = stop.cancelled() => {}
            }
        });
        Self { queue: Some((queue, clock)), metrics, node_uid }
    }

    /// Sets the UID of the Node, for events of the node that are written from now on. Events before have no
    /// UID (`pkg/kubelet: nodeRefWithUID`).
    pub fn set_node_uid(&self, uid: &str) {
        let mut known = self.node_uid.lock();
        if *known != uid {
            uid.clone_into(&mut known);
        }
    }

    /// Queues an event and does not wait. Returns false if the event is lost: the queue is full, or the
    /// recorder has stopped.
    pub fn record(&self, occurrence: Occurrence) -> bool {
        self.enqueue(0, occurrence).is_ok()
    }

    /// Queues an event and waits until it is written or dropped. An event with the ID of a recent one is a
    /// repetition and is not written again; `id` 0: no ID.
    pub async fn write(&self, id: u64, occurrence: Occurrence) -> EventOutcome {
        match self.enqueue(id, occurrence) {
            Ok(done) => done.await.map_or(EventOutcome::Stopped, |()| EventOutcome::Done),
            Err(NotQueued::Full) => EventOutcome::QueueFull,
            Err(NotQueued::Stopped) => EventOutcome::Stopped,
        }
    }

    // The server still takes calls for a moment after the recorder has stopped.
    fn enqueue(&self, id: u64, occurrence: Occurrence) -> Result<oneshot::Receiver<()>, NotQueued> {
        debug!(
            pod.uid = %occurrence.uid, kind = %occurrence.kind, name = %occurrence.name, reason = %occurrence.reason,
            "event: {}", occurrence.message
        );
        let (done, waiting) = oneshot::channel();
        let Some((queue, clock)) = &self.queue else {
            let _ = done.send(());
            return Ok(waiting);
        };
        let occurrence = Occurrence { at: occurrence.at.or_else(|| Some(clock.wall())), ..occurrence };
        let queued = kit_queue::offer(queue, EVENTS, Queued { id, occurrence, done }).map_err(|e| match e {
            TrySendError::Full(_) => NotQueued::Full,
            TrySendError::Closed(_) => NotQueued::Stopped,
        });
        if queued == Err(NotQueued::Full) && self.metrics.events_dropped.inc().is_multiple_of(100) {
            warn!("event queue is full, events are lost");
        }
        self.metrics
            .events_queued
            .set(i64::try_from(QUEUE.saturating_sub(queue.capacity())).unwrap_or(i64::MAX));
        queued.map(|()| waiting)
    }
}

struct Writer {
    api: ApiClient,
    clock: Clock,
    correlator: Correlator,
    recent: RecentIds,
    metrics: Metrics,
    node_uid: NodeUid,
}

impl Writer {
    async fn run(mut self, mut waiting: mpsc::Receiver<Queued>) {
        while let Some(Queued { id, mut occurrence, done }) = waiting.recv().await {
            if occurrence.kind == "Node" && occurrence.uid.is_empty() {
                occurrence.uid.clone_from(&self.node_uid.lock());
            }
            // A repetition is behind its event in the queue, so it is acknowledged once that is written.
            if !self.recent.add(id) {
                let _ = done.send(());
                continue;
            }
            match self.correlator.decide(&occurrence, self.clock.wall()) {
                Decision::Create(key, event) => self.create(key, &event).await,
                Decision::Count { key, event, patch } => self.count(key, event, &patch).await,
                Decision::Drop => {
                    self.metrics.events_filtered.inc();
                }
            }
            // An event of this process has no receiver.
            let _ = done.send(());
        }
    }

    async fn create(&mut self, key: CountKey, event: &Value) {
        let path = format!("/api/v1/namespaces/{}/events", namespace(event));
        let api = self.api.clone();
        let answer = retry(|| api.create_as(&path, event)).await;
        self.settle(key, answer);
    }

    async fn count(&mut self, key: CountKey, mut event: Value, patch: &Value) {
        let name = event["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let path = format!("/api/v1/namespaces/{}/events/{name}", namespace(&event));
        let api = self.api.clone();
        match retry(|| api.patch_as(&path, patch)).await {
            // The event has expired: create it again under the same name.
            Err(ApiFailure::NotFound(_)) => {
                event["metadata"]["resourceVersion"] = json!("");
                self.create(key, &event).await;
            }
            answer => self.settle(key, answer),
        }
    }

    fn settle(&mut self, key: CountKey, answer: Result<StoredEvent, ApiFailure>) {
        match answer {
            Ok(event) => self.correlator.stored(key, event),
            // The pod is deleted with its namespace, so that the event has no reader.
            Err(failure @ ApiFailure::NamespaceEnding(_)) => {
                info!(%failure, "event dropped, its namespace ends");
            }
            Err(failure) => warn!(%failure, "event dropped"),
        }
    }
}

fn namespace(event: &Value) -> &str {
    event["metadata"]["namespace"].as_str().unwrap_or("default")
}

/// Retries while the server does not answer. Any answer is final.
async fn retry<T, F>(mut call: impl FnMut() -> F) -> Result<T, ApiFailure>
where
    F: Future<Output = Result<T, ApiFailure>>,
{
    let start = Instant::now();
    let mut backoff = Backoff::new(FIRST_PAUSE, 2.0, LONGEST_PAUSE);
    loop {
        match call().await {
            Err(ApiFailure::Unreachable(_)) if start.elapsed() < UNREACHABLE_LIMIT => {
                tokio::time::sleep(backoff.next_wait()).await;
            }
            answer => return answer,
        }
    }
}
