//! Aggregates, counts and filters events (`client-go/tools/record: EventCorrelator`). No I/O, no clock.
//!
//! Keys and messages are kept as hashes of 128 bits, since an entry would consist of the same texts several
//! times. The hashes have random seeds.

use std::hash::{BuildHasher as _, Hash, RandomState};
use std::num::NonZeroUsize;
use std::time::Duration;

use jiff::Timestamp;
use lru::LruCache;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Occurrence;
use crate::status::normalize::seconds;
use crate::status::text;

/// Capacity of each of the three caches (`maxLruCacheEntries`).
const ENTRIES: NonZeroUsize = NonZeroUsize::new(4096).expect("4096 is not zero");

/// Distinct messages after which similar events are aggregated (`defaultAggregateMaxEvents`).
const MAX_SIMILAR: usize = 10;

/// Interval without a similar event after which the aggregation starts again
/// (`defaultAggregateIntervalInSeconds`).
const SIMILAR_WINDOW: Duration = Duration::from_secs(600);

/// Burst of events of one object (`defaultSpamBurst`).
const BURST: f64 = 25.0;

/// Time until one more event of the object is allowed (`defaultSpamQPS`).
const REFILL: Duration = Duration::from_secs(300);

/// Start of the message of an aggregated event.
const COMBINED: &str = "(combined from similar events): ";

/// The write for an occurrence.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    /// Create this event, then call [`Correlator::stored`].
    Create(CountKey, Value),
    /// Increase the count of an existing event, or create the event if it is gone.
    Count {
        /// Identifies the existing event.
        key: CountKey,
        /// The whole event.
        event: Value,
        /// The changed fields.
        patch: Value,
    },
    /// Drop the event: the object has too many.
    Drop,
}

/// Hash of the texts of a key or a message.
type Digest = u128;

/// Key of equal events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CountKey(Digest);

#[derive(Default)]
struct Hasher([RandomState; 2]);

impl Hasher {
    fn digest(&self, texts: impl Hash) -> Digest {
        let [high, low] = self.0.each_ref().map(|seed| Digest::from(seed.hash_one(&texts)));
        (high << 64) | low
    }
}

/// Messages of similar events, which differ only in message and field path.
struct AggregateRecord {
    messages: Vec<Digest>,
    last: Timestamp,
}

/// The parts of an event in an answer of the API server that are kept.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct StoredEvent {
    metadata: StoredMetadata,
    count: Option<u64>,
    first_timestamp: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StoredMetadata {
    name: String,
}

/// An event that the API server has.
struct WrittenEvent {
    name: String,
    count: u64,
    first: String,
}

struct TokenBucket {
    tokens: f64,
    last: Timestamp,
}

/// Returns an empty cache of [`ENTRIES`]. Unlike one that is created with its capacity, it takes memory only
/// for what it has.
fn cache<K: Hash + Eq, V>() -> LruCache<K, V> {
    let mut cache = LruCache::unbounded();
    cache.resize(ENTRIES);
    cache
}

/// The caches of written events.
pub struct Correlator {
    node: String,
    hasher: Hasher,
    // By object, type and reason.
    aggregates: LruCache<Digest, AggregateRecord>,
    // By the key of `aggregates`, field path and message. The latter are empty for an aggregated event.
    written: LruCache<CountKey, WrittenEvent>,
    // By object and type.
    spam: LruCache<Digest, TokenBucket>,
}

impl Correlator {
    /// Creates empty caches. `node` is the host in the source of events.
    #[must_use]
    pub fn new(node: &str) -> Self {
        Self {
            node: node.to_owned(),
            hasher: Hasher::default(),
            aggregates: cache(),
            written: cache(),
            spam: cache(),
        }
    }

    /// Aggregates, counts and filters, in this order, so that filtered events are counted, too. An event has
    /// the time of its occurrence; aggregates and the filter follow `now`.
    pub fn decide(&mut self, occurrence: &Occurrence, now: Timestamp) -> Decision {
        let Occurrence { kind, namespace, name, uid, event_type, reason, .. } = occurrence;
        let object = (kind, namespace, name, uid);
        let aggregate = self.hasher.digest((object, event_type, reason));
        let sender = self.hasher.digest((object, event_type));
        let at = occurrence.at.unwrap_or(now);
        let mut event = occurrence.to_event(&self.node, at);
        let message = self.hasher.digest(&occurrence.message);
        let (field_path, message) = if self.is_aggregated(aggregate, message, now) {
            event["message"] = json!(format!("{COMBINED}{}", occurrence.message));
            if let Some(event) = event.as_object_mut() {
                event.remove("reportingComponent");
                event.remove("reportingInstance");
            }
            ("", "")
        } else {
            (occurrence.field_path.as_str(), occurrence.message.as_str())
        };
        let key = CountKey(self.hasher.digest((aggregate, field_path, message)));
        let decision = match self.written.get_mut(&key) {
            Some(written) => {
                written.count = written.count.saturating_add(1);
                event["metadata"]["name"] = json!(written.name);
                event["firstTimestamp"] = json!(written.first);
                event["count"] = json!(written.count);
                let patch = json!({
                    "count": written.count, "lastTimestamp": event["lastTimestamp"], "message": event["message"],
                });
                Decision::Count { key, event, patch }
            }
            None => {
                let written = WrittenEvent {
                    name: text(&event["metadata"], "name").to_owned(),
                    count: 1,
                    first: seconds(at),
                };
                self.written.put(key, written);
                Decision::Create(key, event)
            }
        };
        if self.is_spam(sender, now) { Decision::Drop } else { decision }
    }

    /// Records the event that the API server returned.
    pub fn stored(&mut self, key: CountKey, event: StoredEvent) {
        let written = WrittenEvent {
            name: event.metadata.name,
            count: event.count.unwrap_or(1),
            first: event.first_timestamp.unwrap_or_default(),
        };
        self.written.put(key, written);
    }

    /// Records a message. Returns whether enough similar events with other messages were recorded.
    fn is_aggregated(&mut self, key: Digest, message: Digest, now: Timestamp) -> bool {
        let new = || AggregateRecord { messages: Vec::with_capacity(1), last: now };
        let record = self.aggregates.get_or_insert_mut(key, new);
        if since(record.last, now) > SIMILAR_WINDOW {
            *record = new();
        }
        record.last = now;
        if !record.messages.contains(&message) {
            record.messages.push(message);
        }
        if record.messages.len() < MAX_SIMILAR {
            return false;
        }
        // Only the number of messages matters, so any message may be dropped.
        record.messages.pop();
        true
    }

    /// Takes a token of the object. Returns true if there is none.
    fn is_spam(&mut self, key: Digest, now: Timestamp) -> bool {
        let bucket = self.spam.get_or_insert_mut(key, || TokenBucket { tokens: BURST, last: now });
        let earned = since(bucket.last, now).as_secs_f64() / REFILL.as_secs_f64();
        bucket.tokens = (bucket.tokens + earned).min(BURST);
        bucket.last = now;
        if bucket.tokens < 1.0 {
            return true;
        }
        bucket.tokens -= 1.0;
        false
    }
}

/// Returns the interval, or zero if the wall clock was set back.
fn since(earlier: Timestamp, later: Timestamp) -> Duration {
    Duration::try_from(later.duration_since(earlier)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).unwrap()
    }

    fn occurrence(reason: &str, message: &str) -> Occurrence {
        Occurrence {
            kind: "Pod".into(),
            namespace: "default".into(),
            name: "web".into(),
            uid: "u".into(),
            event_type: "Normal".into(),
            reason: reason.into(),
            message: message.into(),
            ..Occurrence::default()
        }
    }

    fn create(decision: Decision) -> Value {
        match decision {
            Decision::Create(_, event) => event,
            other => panic!("not a create: {other:?}"),
        }
    }

    #[test]
    fn an_event_of_a_pod_with_the_longest_name_has_a_valid_name() {
        let mut correlator = Correlator::new("n1");
        let mut what = occurrence("Failed", "m");
        what.name = "x".repeat(253);
        let names: Vec<String> = (0..2)
            .map(|second| {
                what.message = format!("m{second}");
                let event = create(correlator.decide(&what, at(second)));
                event["metadata"]["name"].as_str().unwrap().to_owned()
            })
            .collect();
        assert!(names.iter().all(|n| !n.is_empty() && n.len() <= 253) && names[0] != names[1], "{names:?}");
    }

    #[test]
    fn a_first_event_has_the_fields_that_the_kubelet_sets() {
        let mut correlator = Correlator::new("n1");
        let mut what = occurrence("Started", "Container started");
        what.field_path = "spec.containers{main}".into();
        let event = create(correlator.decide(&what, at(0)));
        assert_eq!(event["source"], json!({"component": "kubelet", "host": "n1"}));
        assert_eq!(event["involvedObject"]["fieldPath"], "spec.containers{main}");
        assert_eq!(event["metadata"]["name"], format!("web.{:x}", at(0).as_nanosecond()));
        assert_eq!((&event["count"], &event["firstTimestamp"]), (&json!(1), &event["lastTimestamp"]));
        let node =
            create(correlator.decide(&Occurrence::of_node("n1", "Normal", "NodeReady", "m".into()), at(0)));
        assert_eq!(node["metadata"]["namespace"], "default");
        assert_eq!(node["involvedObject"], json!({"apiVersion": "v1", "kind": "Node", "name": "n1"}));
    }

    #[test]
    fn an_event_that_is_written_late_has_the_time_of_its_occurrence() {
        let mut correlator = Correlator::new("n1");
        let mut what = occurrence("Started", "Container started");
        what.at = Some(at(0));
        let event = create(correlator.decide(&what, at(900)));
        let time = json!(seconds(at(0)));
        assert_eq!((&event["firstTimestamp"], &event["lastTimestamp"]), (&time, &time));
        assert_eq!(event["metadata"]["name"], format!("web.{:x}", at(0).as_nanosecond()));
        what.at = Some(at(60));
        let Decision::Count { event, patch, .. } = correlator.decide(&what, at(901)) else {
            panic!("counted")
        };
        assert_eq!((&event["firstTimestamp"], &patch["lastTimestamp"]), (&time, &json!(seconds(at(60)))));
    }

    #[test]
    fn an_event_has_the_annotations_of_its_occurrence() {
        let mut correlator = Correlator::new("n1");
        let mut what = occurrence("Evicted", "m");
        let plain = create(correlator.decide(&what, at(0)));
        assert_eq!(plain["metadata"].get("annotations"), None);
        what.message = "other".into();
        what.annotations = [("starved_resource".to_owned(), "memory".to_owned())].into();
        let annotated = create(correlator.decide(&what, at(1)));
        assert_eq!(annotated["metadata"]["annotations"], json!({"starved_resource": "memory"}));
    }

    #[test]
    fn a_repeated_event_is_counted_without_limit_in_time() {
        let mut correlator = Correlator::new("n1");
        let what = occurrence("BackOff", "Back-off");
        let first = create(correlator.decide(&what, at(0)));
        for (n, second) in [(2, 10), (3, 100_000)] {
            let Decision::Count { event, patch, .. } = correlator.decide(&what, at(second)) else {
                panic!("not counted")
            };
            assert_eq!(event["metadata"]["name"], first["metadata"]["name"]);
            assert_eq!(event["firstTimestamp"], first["firstTimestamp"]);
            assert_eq!(
                patch,
                json!({"count": n, "lastTimestamp": seconds(at(second)), "message": "Back-off"})
            );
        }
    }

    #[test]
    fn the_count_continues_from_the_servers_reply() {
        let mut correlator = Correlator::new("n1");
        let what = occurrence("BackOff", "Back-off");
        let Decision::Create(key, mut event) = correlator.decide(&what, at(0)) else { panic!("not created") };
        event["count"] = json!(41);
        correlator.stored(key, serde_json::from_value(event).unwrap());
        let Decision::Count { patch, .. } = correlator.decide(&what, at(1)) else { panic!("not counted") };
        assert_eq!(patch["count"], 42);
    }

    #[test]
    fn the_tenth_different_message_is_combined() {
        let mut correlator = Correlator::new("n1");
        for n in 0..9 {
            create(correlator.decide(&occurrence("Failed", &format!("m{n}")), at(n)));
        }
        let combined = create(correlator.decide(&occurrence("Failed", "m9"), at(9)));
        assert_eq!(combined["message"], "(combined from similar events): m9");
        assert_eq!(combined.get("reportingComponent"), None);
        let Decision::Count { patch, .. } = correlator.decide(&occurrence("Failed", "m10"), at(10)) else {
            panic!("the combined event is not counted")
        };
        assert_eq!(
            (&patch["count"], &patch["message"]),
            (&json!(2), &json!("(combined from similar events): m10"))
        );
        create(correlator.decide(&occurrence("Other", "m11"), at(11)));
    }

    #[test]
    fn similar_events_expire_after_an_interval_without_events() {
        let mut correlator = Correlator::new("n1");
        for n in 0..9 {
            create(correlator.decide(&occurrence("Failed", &format!("m{n}")), at(n)));
        }
        let event = create(correlator.decide(&occurrence("Failed", "late"), at(8 + 601)));
        assert_eq!(event["message"], "late");
    }

    #[test]
    fn an_object_has_a_budget_per_type_that_refills_slowly() {
        let mut correlator = Correlator::new("n1");
        let spam = |n: i64| occurrence(&format!("R{n}"), "m");
        for n in 0..25 {
            assert_ne!(correlator.decide(&spam(n), at(0)), Decision::Drop, "{n}");
        }
        assert_eq!(correlator.decide(&spam(25), at(0)), Decision::Drop);
        assert_eq!(correlator.decide(&spam(25), at(299)), Decision::Drop);
        let mut warning = spam(26);
        warning.event_type = "Warning".into();
        assert_ne!(correlator.decide(&warning, at(299)), Decision::Drop, "another type has its own");
        let mut other = spam(26);
        other.name = "other".into();
        assert_ne!(correlator.decide(&other, at(299)), Decision::Drop, "another object has its own");
        let Decision::Count { patch, .. } = correlator.decide(&spam(25), at(301)) else {
            panic!("not counted")
        };
        assert_eq!(patch["count"], 3, "filtered ones were counted");
        assert_eq!(correlator.decide(&spam(25), at(301)), Decision::Drop, "one more per 300 s");
    }

    #[test]
    fn the_caches_have_the_newest_entries() {
        let mut cache = cache();
        let entries = u32::try_from(ENTRIES.get()).unwrap();
        for n in 0..entries {
            cache.put(n, n);
        }
        assert_eq!(*cache.get_or_insert_mut(0, || 7), 0, "it is in the cache, and used now");
        assert_eq!(*cache.get_or_insert_mut(entries, || 7), 7);
        cache.put(entries + 1, 8);
        assert_eq!(cache.len(), ENTRIES.get());
        assert_eq!([0, 1, 2, 3].map(|n| cache.contains(&n)), [true, false, false, true]);
    }

    #[test]
    fn a_clock_that_is_set_back_has_no_effect() {
        let mut correlator = Correlator::new("n1");
        create(correlator.decide(&occurrence("A", "m"), at(1000)));
        assert!(matches!(correlator.decide(&occurrence("A", "m"), at(0)), Decision::Count { .. }));
    }
}
