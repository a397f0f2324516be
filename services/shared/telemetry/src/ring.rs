//! Keeps the newest spans of the process in memory.
use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use opentelemetry::trace::{SpanId, Status, TraceId};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};
use parking_lot::Mutex;
use quintlet_proto::debug::v1 as pb;

/// Bytes of spans kept per process: about 1,500 spans, or 15 pod operations of 100 spans.
pub const RING_BYTES: usize = 1 << 19;

/// The span attribute with the UID of a pod.
pub(crate) const POD_UID: &str = "k8s.pod.uid";

/// Ends each key and each value of [`SpanRecord::attributes`].
const END: char = '\0';

/// A finished span, reduced to the fields of `debug.v1.Span`.
#[derive(Debug, Clone)]
struct SpanRecord {
    trace_id: TraceId,
    span_id: SpanId,
    /// [`SpanId::INVALID`] for a root span.
    parent_span_id: SpanId,
    name: Cow<'static, str>,
    /// Wall-clock time.
    start_unix_ns: i64,
    /// Wall-clock time.
    end_unix_ns: i64,
    /// Keys and values in turn. As one text, they take a third of the memory of a vector.
    attributes: Box<str>,
    /// Description of the error; `None` if the span did not fail.
    error: Option<Cow<'static, str>>,
}

impl SpanRecord {
    fn from_data(data: SpanData) -> Self {
        let error = match data.status {
            Status::Error { description } if description.is_empty() => Some(Cow::Borrowed("failed")),
            Status::Error { description } => Some(description),
            Status::Unset | Status::Ok => None,
        };
        Self {
            trace_id: data.span_context.trace_id(),
            span_id: data.span_context.span_id(),
            parent_span_id: data.parent_span_id,
            name: data.name,
            start_unix_ns: unix_ns(data.start_time),
            end_unix_ns: unix_ns(data.end_time),
            attributes: joined(&data.attributes),
            error,
        }
    }

    /// Returns the bytes that the record takes.
    fn bytes(&self) -> usize {
        let texts = [Some(&self.name), self.error.as_ref()];
        // Only an owned text takes memory of its own.
        let owned = texts.into_iter().flatten().map(|text| match text {
            Cow::Owned(text) => text.len(),
            Cow::Borrowed(_) => 0,
        });
        owned.fold(size_of::<Self>().saturating_add(self.attributes.len()), usize::saturating_add)
    }

    fn attributes(&self) -> impl Iterator<Item = (&str, &str)> {
        let mut texts = self.attributes.split_terminator(END);
        std::iter::from_fn(move || Some((texts.next()?, texts.next()?)))
    }

    fn is_of_pod(&self, uid: &str) -> bool {
        self.attributes().any(|(key, value)| key == POD_UID && value == uid)
    }

    fn to_proto(&self, service: &str) -> pb::Span {
        let parent = self.parent_span_id;
        pb::Span {
            trace_id: self.trace_id.to_string(),
            span_id: self.span_id.to_string(),
            parent_span_id: if parent == SpanId::INVALID { String::new() } else { parent.to_string() },
            service: service.to_owned(),
            name: self.name.to_string(),
            start_unix_ns: self.start_unix_ns,
            end_unix_ns: self.end_unix_ns,
            attributes: self.attributes().map(|(key, value)| (key.to_owned(), value.to_owned())).collect(),
            error: self.error.as_deref().unwrap_or_default().to_owned(),
        }
    }
}

fn unix_ns(at: SystemTime) -> i64 {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// Joins keys and values. A value with [`END`] loses it.
fn joined(attributes: &[KeyValue]) -> Box<str> {
    let mut text = String::new();
    for attribute in attributes {
        let value = attribute.value.as_str();
        for part in [attribute.key.as_str(), &*value] {
            text.extend(part.chars().filter(|c| *c != END));
            text.push(END);
        }
    }
    text.into_boxed_str()
}

#[derive(Debug)]
struct Kept {
    spans: VecDeque<SpanRecord>,
    bytes: usize,
}

/// A queue of finished spans of bounded size. When it is full, the oldest spans are dropped.
#[derive(Debug)]
pub struct SpanRing {
    most_bytes: usize,
    kept: Mutex<Kept>,
    dropped: AtomicU64,
    service: OnceLock<&'static str>,
}

impl SpanRing {
    /// Returns an empty ring of at most `most_bytes`.
    pub const fn new(most_bytes: usize) -> Self {
        Self {
            most_bytes,
            kept: Mutex::new(Kept { spans: VecDeque::new(), bytes: 0 }),
            dropped: AtomicU64::new(0),
            service: OnceLock::new(),
        }
    }

    /// Sets the service of the spans. Only the first call has an effect.
    pub fn set_service(&self, service: &'static str) {
        self.service.get_or_init(|| service);
    }

    /// Adds a span. Drops the oldest spans if the ring is full.
    fn push(&self, span: SpanRecord) {
        let mut kept = self.kept.lock();
        kept.bytes = kept.bytes.saturating_add(span.bytes());
        kept.spans.push_back(span);
        while kept.bytes > self.most_bytes
            && let Some(oldest) = kept.spans.pop_front()
        {
            kept.bytes = kept.bytes.saturating_sub(oldest.bytes());
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the number of spans that the ring keeps now.
    pub fn len(&self) -> usize {
        self.kept.lock().spans.len()
    }

    /// Returns whether the ring keeps no span now.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of spans dropped since the process started.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Returns the spans that match both filters, oldest first. An empty filter matches every span.
    pub fn query(&self, trace_id: &str, pod_uid: &str) -> pb::TracesReply {
        let service = self.service.get().copied().unwrap_or_default();
        let wanted = TraceId::from_hex(trace_id).ok();
        let kept = self.kept.lock();
        let spans = match (trace_id.is_empty(), wanted) {
            (false, None) => Vec::new(),
            (_, wanted) => kept
                .spans
                .iter()
                .filter(|s| wanted.is_none_or(|t| s.trace_id == t))
                .filter(|s| pod_uid.is_empty() || s.is_of_pod(pod_uid))
                .map(|s| s.to_proto(service))
                .collect(),
        };
        pb::TracesReply { spans, dropped: self.dropped() }
    }
}

/// Returns the ring of the process.
pub fn ring() -> &'static SpanRing {
    static RING: SpanRing = SpanRing::new(RING_BYTES);
    &RING
}

/// A span processor that adds every finished span to a ring.
#[derive(Debug)]
pub struct RingProcessor {
    ring: &'static SpanRing,
}

impl RingProcessor {
    /// Creates a processor that adds spans to `ring`.
    pub fn new(ring: &'static SpanRing) -> Self {
        Self { ring }
    }
}

impl SpanProcessor for RingProcessor {
    fn on_start(&self, _span: &mut Span, _cx: &Context) {}

    fn on_end(&self, span: SpanData) {
        self.ring.push(SpanRecord::from_data(span));
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _timeout: Duration) -> OTelSdkResult {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::disallowed_methods)]
    use super::*;

    fn span(trace: u128, id: u64, pod: Option<&str>) -> SpanRecord {
        SpanRecord {
            trace_id: TraceId::from_bytes(trace.to_be_bytes()),
            span_id: SpanId::from_bytes(id.to_be_bytes()),
            parent_span_id: SpanId::INVALID,
            name: Cow::Borrowed("s"),
            start_unix_ns: 1,
            end_unix_ns: 2,
            attributes: joined(pod.map(|p| KeyValue::new(POD_UID, p.to_owned())).as_slice()),
            error: None,
        }
    }

    #[test]
    fn the_ring_is_bounded_and_counts_what_it_drops() {
        let one = span(1, 1, Some("a")).bytes();
        assert_eq!(one, size_of::<SpanRecord>() + "k8s.pod.uid a ".len());
        let ring = SpanRing::new(3 * one + 1);
        for id in 1..=5 {
            ring.push(span(1, id, Some("a")));
        }
        assert_eq!(ring.len(), 3);
        assert_eq!(ring.dropped(), 2);
        let reply = ring.query("", "");
        assert_eq!(reply.dropped, 2);
        let ids: Vec<_> = reply.spans.iter().map(|s| s.span_id.as_str()).collect();
        assert_eq!(ids, ["0000000000000003", "0000000000000004", "0000000000000005"]);
    }

    #[test]
    fn a_query_filters_by_trace_and_by_pod() {
        let ring = SpanRing::new(RING_BYTES);
        ring.push(span(1, 1, Some("a")));
        ring.push(span(1, 2, None));
        ring.push(span(2, 3, Some("b")));
        let first = format!("{:032x}", 1);
        for (trace, pod, count) in
            [("", "", 3), (&*first, "", 2), ("", "a", 1), (&*first, "b", 0), ("nonsense", "", 0)]
        {
            assert_eq!(ring.query(trace, pod).spans.len(), count, "trace {trace:?} pod {pod:?}");
        }
    }

    #[test]
    fn attributes_are_kept_as_text() {
        let attributes = [
            KeyValue::new("empty", ""),
            KeyValue::new("number", 7),
            KeyValue::new("ends", "a\0b"),
            KeyValue::new("last", "x"),
        ];
        let record = SpanRecord { attributes: joined(&attributes), ..span(1, 1, None) };
        let kept: Vec<_> = record.attributes().collect();
        assert_eq!(kept, [("empty", ""), ("number", "7"), ("ends", "ab"), ("last", "x")]);
    }
}
