//! Bounded queues between tasks, with metrics: what waits, how much may, and what was dropped.
//!
//! Every queue of a service has a name: clippy.toml refuses tokio's channels, and `try_send`, elsewhere.
//! Depths are read when metrics are, so a message costs nothing more.
//!
//! | metric | value |
//! |---|---|
//! | `quintlet_queue_depth{queue}` | messages that wait in the fullest queue of the name |
//! | `quintlet_queue_capacity{queue}` | messages that may wait in one queue of the name |
//! | `quintlet_queue_dropped_total{queue}` | messages that were dropped from a full queue |

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Once};

use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use quintlet_telemetry::metrics;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

/// Returns the number of messages that wait, or none if the queue is gone.
type Depth = Arc<dyn Fn() -> Option<usize> + Send + Sync>;

/// The queues of a name.
#[derive(Default, Clone)]
struct Named {
    capacity: usize,
    dropped: u64,
    depths: Vec<Depth>,
}

impl Named {
    /// Returns the depth of the fullest queue, and the queues that are gone.
    fn deepest(&self) -> (usize, Vec<Depth>) {
        let (mut deepest, mut gone) = (0, Vec::new());
        for depth in &self.depths {
            match depth() {
                Some(depth) => deepest = deepest.max(depth),
                None => gone.push(Arc::clone(depth)),
            }
        }
        (deepest, gone)
    }

    fn forget(&mut self, gone: &[Depth]) {
        self.depths.retain(|depth| !gone.iter().any(|gone| Arc::ptr_eq(gone, depth)));
    }
}

/// All queues. The lock is not held while a depth is read: that takes the lock of the queue, whose owner may
/// hold it while a drop is counted.
static QUEUES: Mutex<BTreeMap<&'static str, Named>> = Mutex::new(BTreeMap::new());

/// Creates a queue of the name, which takes `capacity` messages. Further queues of the name have its metrics,
/// too, such as those of several streams.
#[must_use]
pub fn channel<T: Send + 'static>(
    name: &'static str,
    capacity: usize,
) -> (mpsc::Sender<T>, mpsc::Receiver<T>) {
    #[expect(clippy::disallowed_methods, reason = "the one place that makes queues")]
    let (sender, receiver) = mpsc::channel(capacity);
    let weak = sender.downgrade();
    register(name, capacity, move || {
        let sender = weak.upgrade()?;
        Some(sender.max_capacity().saturating_sub(sender.capacity()))
    });
    (sender, receiver)
}

/// Adds a message to a queue of the name if there is a place. One that finds none is dropped and counted.
///
/// # Errors
/// The queue is full, or the receiver is gone.
pub fn offer<T>(sender: &mpsc::Sender<T>, name: &'static str, message: T) -> Result<(), TrySendError<T>> {
    #[expect(clippy::disallowed_methods, reason = "the one place that does not wait for a place")]
    let sent = sender.try_send(message);
    if matches!(sent, Err(TrySendError::Full(_))) {
        count_dropped(name);
    }
    sent
}

/// Returns a channel that wakes a task: it has one place, and a second wake-up before the task runs is the
/// same one. It has no metrics.
#[must_use]
pub fn wakes() -> (mpsc::Sender<()>, mpsc::Receiver<()>) {
    #[expect(clippy::disallowed_methods, reason = "the one place that makes queues")]
    mpsc::channel(1)
}

/// Wakes the task of a channel that [`wakes`] returned.
pub fn wake(sender: &mpsc::Sender<()>) {
    // A full channel has a wake-up already, and a task that has ended needs none.
    #[expect(clippy::disallowed_methods, reason = "a wake-up that finds no place is no loss")]
    let _ = sender.try_send(());
}

/// Registers a queue that is no channel. `depth` returns the number of messages that wait, or none once the
/// queue is gone.
pub fn register(
    name: &'static str,
    capacity: usize,
    depth: impl Fn() -> Option<usize> + Send + Sync + 'static,
) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| metrics::registry().register_collector(Box::new(Queues)));
    // Streams come and go, and the metrics may never be read.
    let known = QUEUES.lock().get(name).cloned().unwrap_or_default();
    let (_, gone) = known.deepest();
    let mut queues = QUEUES.lock();
    let named = queues.entry(name).or_default();
    named.capacity = capacity;
    named.forget(&gone);
    named.depths.push(Arc::new(depth));
}

/// Counts a message that was dropped from the full queue of a name.
pub fn count_dropped(name: &'static str) {
    let mut queues = QUEUES.lock();
    let named = queues.entry(name).or_default();
    named.dropped = named.dropped.saturating_add(1);
}

/// Collects the metrics of all queues.
#[derive(Debug)]
struct Queues;

impl Collector for Queues {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let queues = QUEUES.lock().clone();
        let mut rows = Vec::new();
        for (name, named) in queues {
            let (deepest, gone) = named.deepest();
            if let Some(named) = QUEUES.lock().get_mut(name) {
                named.forget(&gone);
            }
            rows.push((name, deepest, named.capacity, named.dropped));
        }
        let number = |n: usize| ConstGauge::new(i64::try_from(n).unwrap_or(i64::MAX));
        let mut depths = encoder.encode_descriptor(
            "quintlet_queue_depth",
            "Messages that wait in the fullest queue of the name",
            None,
            MetricType::Gauge,
        )?;
        for (name, depth, ..) in &rows {
            number(*depth).encode(depths.encode_family(&[("queue", *name)])?)?;
        }
        let mut capacities = encoder.encode_descriptor(
            "quintlet_queue_capacity",
            "Messages that may wait in one queue of the name",
            None,
            MetricType::Gauge,
        )?;
        for (name, _, capacity, _) in &rows {
            number(*capacity).encode(capacities.encode_family(&[("queue", *name)])?)?;
        }
        let mut dropped = encoder.encode_descriptor(
            "quintlet_queue_dropped",
            "Messages that were dropped from a full queue",
            None,
            MetricType::Counter,
        )?;
        for (name, _, _, count) in &rows {
            ConstCounter::new(*count).encode(dropped.encode_family(&[("queue", *name)])?)?;
        }
        Ok(())
    }
}

/// A queue that is no channel, such as a list that its owner bounds.
#[derive(Debug, Clone)]
pub struct Counted {
    name: &'static str,
    depth: Arc<std::sync::atomic::AtomicUsize>,
}

impl Counted {
    /// Registers the queue of a name, which takes `capacity` messages, until its last clone is dropped.
    #[must_use]
    pub fn new(name: &'static str, capacity: usize) -> Self {
        let depth = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let weak = Arc::downgrade(&depth);
        register(name, capacity, move || Some(weak.upgrade()?.load(std::sync::atomic::Ordering::Relaxed)));
        Self { name, depth }
    }

    /// Sets the number of messages that wait.
    pub fn set(&self, depth: usize) {
        self.depth.store(depth, std::sync::atomic::Ordering::Relaxed);
    }

    /// Counts a message that was dropped.
    pub fn dropped(&self) {
        count_dropped(self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns depth, capacity and drops of a name.
    fn shown(name: &str) -> [Option<u64>; 3] {
        let text = metrics::text();
        ["depth", "capacity", "dropped_total"].map(|metric| {
            let series = format!("quintlet_queue_{metric}{{queue=\"{name}\"}} ");
            text.lines().find_map(|line| line.strip_prefix(&series)?.parse().ok())
        })
    }

    #[tokio::test]
    async fn the_fullest_queue_of_a_name_is_shown_with_its_bound_and_what_it_dropped() {
        let (sender, mut receiver) = channel("test-stream", 2);
        let (other, other_receiver) = channel::<u8>("test-stream", 2);
        assert_eq!(shown("test-stream"), [Some(0), Some(2), Some(0)]);
        sender.send(1).await.unwrap();
        offer(&sender, "test-stream", 2).unwrap();
        assert!(offer(&sender, "test-stream", 3).is_err());
        offer(&other, "test-stream", 1).unwrap();
        assert_eq!(shown("test-stream"), [Some(2), Some(2), Some(1)]);
        assert_eq!(receiver.recv().await, Some(1));
        receiver.recv().await.unwrap();
        assert_eq!(shown("test-stream"), [Some(1), Some(2), Some(1)]);
        drop((other, other_receiver));
        assert_eq!(shown("test-stream"), [Some(0), Some(2), Some(1)]);
        // The metrics do not keep a queue open.
        drop(sender);
        assert_eq!(receiver.recv().await, None);
    }

    #[test]
    fn a_message_that_finds_no_receiver_is_not_dropped_by_the_queue() {
        let (sender, receiver) = channel("test-closed", 1);
        drop(receiver);
        assert!(offer(&sender, "test-closed", 1).is_err());
        assert_eq!(shown("test-closed"), [Some(0), Some(1), Some(0)]);
    }

    #[test]
    fn a_queue_that_is_no_channel_is_counted_until_it_is_gone() {
        let counted = Counted::new("test-list", 7);
        counted.set(5);
        counted.dropped();
        assert_eq!(shown("test-list"), [Some(5), Some(7), Some(1)]);
        drop(counted);
        assert_eq!(shown("test-list"), [Some(0), Some(7), Some(1)]);
    }
}
