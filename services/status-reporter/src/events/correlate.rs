//! Aggregates, counts and filters events (`client-go/tools/record: EventCorrelator`). No I/O, no clock.

use std::collections::HashSet;
use std::hash::Hash;
use std::num::NonZeroUsize;
use std::time::Duration;

use jiff::Timestamp;
use lru::LruCache;
use serde_json::{Value, json};

use super::Occurrence;
use crate::status::normalize::seconds;
use crate::status::text;

/// Capacity of each of the three caches (`maxLruCacheEntries`).
const ENTRIES: NonZeroUsize = NonZeroUsize::new(4096).expect("4096 is not zero");

/// Distinct messages after which similar events are aggregated (`defaultAggregateMaxEvents`).
const MAX_SIMILAR: usize = 10;

/// Interval without a similar event after which the aggregation starts again (`defaultAggregateIntervalInSeconds`).
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
        key: CountKey,
        /// The whole event.
        event: Value,
        /// The changed fields.
        patch: Value,
    },
    /// Drop the event: the object has too many.
    Drop,
}

/// The object of an event: kind, namespace, name, UID.
type ObjectKey = [String; 4];

/// Key of similar events, which differ only in message and field path.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct AggregateKey {
    object: ObjectKey,
    event_type: String,
    reason: String,
}

/// Key of equal events.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CountKey {
    aggregate: AggregateKey,
    field_path: String,
    /// Empty for an aggregated event.
    message: String,
}

/// Messages of similar events.
struct AggregateRecord {
    messages: HashSet<String>,
    last: Timestamp,
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

/// The caches of written events.
pub struct Correlator {
    node: String,
    aggregates: LruCache<AggregateKey, AggregateRecord>,
    written: LruCache<CountKey, WrittenEvent>,
    spam: LruCache<(ObjectKey, String), TokenBucket>,
}

impl Correlator {
    /// Creates empty caches. `node` is the host in the source of events.
    #[must_use]
    pub fn new(node: &str) -> Self {
        Self {
            node: node.to_owned(),
            aggregates: LruCache::new(ENTRIES),
            written: LruCache::new(ENTRIES),
            spam: LruCache::new(ENTRIES),
        }
    }

    /// Aggregates, counts and filters, in this order, so that filtered events are counted, too.
    pub fn decide(&mut self, occurrence: &Occurrence, now: Timestamp) -> Decision {
        let object =
            [&occurrence.kind, &occurrence.namespace, &occurrence.name, &occurrence.uid].map(Clone::clone);
        let aggregate = AggregateKey {
            object: object.clone(),
            event_type: occurrence.event_type.clone(),
            reason: occurrence.reason.clone(),
        };
        let mut event = occurrence.to_event(&self.node, now);
        let is_aggregated = self.is_aggregated(&aggregate, &occurrence.message, now);
        let key = if is_aggregated {
            event["message"] = json!(format!("{COMBINED}{}", occurrence.message));
            if let Some(event) = event.as_object_mut() {
                event.remove("reportingComponent");
                event.remove("reportingInstance");
            }
            CountKey { aggregate, field_path: String::new(), message: String::new() }
        } else {
            CountKey {
                aggregate,
                field_path: occurrence.field_path.clone(),
                message: occurrence.message.clone(),
            }
        };
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
                    first: seconds(now),
                };
                self.written.put(key.clone(), written);
                Decision::Create(key, event)
            }
        };
        if self.is_spam((object, occurrence.event_type.clone()), now) { Decision::Drop } else { decision }
    }

    /// Records the event that the API server returned.
    pub fn stored(&mut self, key: &CountKey, event: &Value) {
        let written = WrittenEvent {
            name: text(&event["metadata"], "name").to_owned(),
            count: event["count"].as_u64().unwrap_or(1),
            first: text(event, "firstTimestamp").to_owned(),
        };
        self.written.put(key.clone(), written);
    }

    // Records a message. Returns whether enough similar events with other messages were recorded.
    fn is_aggregated(&mut self, key: &AggregateKey, message: &str, now: Timestamp) -> bool {
        let new = || AggregateRecord { messages: HashSet::new(), last: now };
        let record = self.aggregates.get_or_insert_mut(key.clone(), new);
        if since(record.last, now) > SIMILAR_WINDOW {
            *record = new();
        }
        record.last = now;
        record.messages.insert(message.to_owned());
        if record.messages.len() < MAX_SIMILAR {
            return false;
        }
        // Only the number of messages matters, so any message may be dropped.
        if let Some(any) = record.messages.iter().next().cloned() {
            record.messages.remove(&any);
        }
        true
    }

    // Takes a token of the object. Returns true if there is none.
    fn is_spam(&mut self, key: (ObjectKey, String), now: Timestamp) -> bool {
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
        correlator.stored(&key, &event);
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
    fn a_clock_that_is_set_back_has_no_effect() {
        let mut correlator = Correlator::new("n1");
        create(correlator.decide(&occurrence("A", "m"), at(1000)));
        assert!(matches!(correlator.decide(&occurrence("A", "m"), at(0)), Decision::Count { .. }));
    }
}
