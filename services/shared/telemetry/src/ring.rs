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

/// Spans kept per process: about 1.2 MiB at 300 bytes each, or 40 pod operations of 100 spans.
pub const RING_CAPACITY: usize = 4096;

/// The span attribute that names a pod.
pub(crate) const POD_UID: &str = "pod.uid";

/// A finished span, reduced to the fields of `debug.v1.Span`.
#[derive(Debug, Clone)]
pub struct SpanRecord {
    pub trace_id: TraceId,
    pub span_id: SpanId,
    /// [`SpanId::INVALID`] for a root span.
    pub parent_span_id: SpanId,
    pub name: Cow<'static, str>,
    /// Wall-clock time.
    pub start: SystemTime,
    /// Wall-clock time.
    pub end: SystemTime,
    pub attributes: Box<[KeyValue]>,
    /// Description of the error; `None` if the span did not fail.
    pub error: Option<Cow<'static, str>>,
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
            start: data.start_time,
            end: data.end_time,
            attributes: data.attributes.into_boxed_slice(),
            error,
        }
    }

    fn is_of_pod(&self, uid: &str) -> bool {
        self.attributes.iter().any(|a| a.key.as_str() == POD_UID && a.value.as_str() == uid)
    }

    fn to_proto(&self, service: &str) -> pb::Span {
        let parent = self.parent_span_id;
        pb::Span {
            trace_id: self.trace_id.to_string(),
            span_id: self.span_id.to_string(),
            parent_span_id: if parent == SpanId::INVALID { String::new() } else { parent.to_string() },
            service: service.to_owned(),
            name: self.name.to_string(),
            start_unix_ns: unix_ns(self.start),
            end_unix_ns: unix_ns(self.end),
            attributes: self
                .attributes
                .iter()
                .map(|a| (a.key.to_string(), a.value.as_str().into_owned()))
                .collect(),
            error: self.error.as_deref().unwrap_or_default().to_owned(),
        }
    }
}

fn unix_ns(at: SystemTime) -> i64 {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// A bounded queue of finished spans. When it is full, the oldest span is dropped.
#[derive(Debug)]
pub struct SpanRing {
    capacity: usize,
    spans: Mutex<VecDeque<SpanRecord>>,
    dropped: AtomicU64,
    service: OnceLock<&'static str>,
}

impl SpanRing {
    /// Returns an empty ring of at most `capacity` spans.
    pub const fn new(capacity: usize) -> Self {
        Self {
            capacity,
            spans: Mutex::new(VecDeque::new()),
            dropped: AtomicU64::new(0),
            service: OnceLock::new(),
        }
    }

    /// Sets the service of the spans. Only the first call has an effect.
    pub fn set_service(&self, service: &'static str) {
        self.service.get_or_init(|| service);
    }

    /// Adds a span. Drops the oldest one if the ring is full.
    pub fn push(&self, span: SpanRecord) {
        let mut spans = self.spans.lock();
        if spans.len() >= self.capacity {
            spans.pop_front();
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        spans.push_back(span);
    }

    pub fn len(&self) -> usize {
        self.spans.lock().len()
    }

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
        let spans = self.spans.lock();
        let spans = match (trace_id.is_empty(), wanted) {
            (false, None) => Vec::new(),
            (_, wanted) => spans
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
    static RING: SpanRing = SpanRing::new(RING_CAPACITY);
    &RING
}

/// A span processor that adds every finished span to a ring.
#[derive(Debug)]
pub struct RingProcessor {
    ring: &'static SpanRing,
}

impl RingProcessor {
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
        let now = SystemTime::now();
        SpanRecord {
            trace_id: TraceId::from_bytes(trace.to_be_bytes()),
            span_id: SpanId::from_bytes(id.to_be_bytes()),
            parent_span_id: SpanId::INVALID,
            name: Cow::Borrowed("s"),
            start: now,
            end: now,
            attributes: pod.map(|p| KeyValue::new(POD_UID, p.to_owned())).into_iter().collect(),
            error: None,
        }
    }

    #[test]
    fn the_ring_is_bounded_and_counts_what_it_drops() {
        let ring = SpanRing::new(3);
        for id in 1..=5 {
            ring.push(span(1, id, None));
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
        let ring = SpanRing::new(8);
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
}
