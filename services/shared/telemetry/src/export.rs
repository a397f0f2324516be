//! Spans for an OTLP collector: which traces are exported, what they say about the process, and what became
//! of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use opentelemetry::trace::{Link, SpanKind, TraceContextExt as _, TraceId};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, IdGenerator as _, RandomIdGenerator, Sampler, SamplingDecision,
    SamplingResult, ShouldSample, Span, SpanData, SpanExporter, SpanProcessor,
};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

use crate::metrics;
use crate::otlp::{Collector, OtlpError};

/// All traces, in traces per million.
pub const ALL_TRACES: u32 = 1_000_000;

/// Spans that wait for the collector, unless `OTEL_BSP_MAX_QUEUE_SIZE` has another number
/// (OpenTelemetry specification: "Batch Span Processor").
pub(crate) const QUEUE: usize = 2048;

/// Samples traces as their parent says, and those without a parent by a rate
/// (`component-base/tracing: NewProvider`). A trace that is not sampled is recorded all the same, for the
/// ring.
#[derive(Debug, Clone)]
pub(crate) struct ExportSampler(Sampler);

impl ExportSampler {
    /// Samples this number of a million traces.
    pub(crate) fn per_million(rate: u32) -> Self {
        Self(Sampler::TraceIdRatioBased(f64::from(rate) / f64::from(ALL_TRACES)))
    }
}

impl ShouldSample for ExportSampler {
    fn should_sample(
        &self,
        parent: Option<&Context>,
        trace_id: TraceId,
        name: &str,
        kind: &SpanKind,
        attributes: &[KeyValue],
        links: &[Link],
    ) -> SamplingResult {
        let parent_span = parent.map(|context| context.span().span_context().clone());
        let parent_span = parent_span.filter(opentelemetry::trace::SpanContext::is_valid);
        let (is_sampled, trace_state) = match parent_span {
            Some(span) => (span.is_sampled(), span.trace_state().clone()),
            None => {
                let drawn = self.0.should_sample(None, trace_id, name, kind, attributes, links);
                (drawn.decision == SamplingDecision::RecordAndSample, drawn.trace_state)
            }
        };
        let decision =
            if is_sampled { SamplingDecision::RecordAndSample } else { SamplingDecision::RecordOnly };
        SamplingResult { decision, attributes: Vec::new(), trace_state }
    }
}

/// The machine that a process runs on, as its traces name it.
#[derive(Debug, Clone, Default)]
pub struct Machine {
    /// Name of the host.
    pub host_name: String,
    /// Name of the node, where the process knows it.
    pub node_name: Option<String>,
}

/// Returns what each exported span says about its process. `OTEL_RESOURCE_ATTRIBUTES` adds to it.
pub(crate) fn resource(service: &'static str, machine: &Machine) -> Resource {
    let node_name = machine.node_name.clone().map(|name| KeyValue::new("k8s.node.name", name));
    let process = [
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        // Two processes of a service, one after the other or at a time, are two instances.
        KeyValue::new("service.instance.id", RandomIdGenerator::default().new_trace_id().to_string()),
        KeyValue::new("host.name", machine.host_name.clone()),
    ];
    Resource::builder()
        .with_service_name(service)
        .with_attributes(process.into_iter().chain(node_name))
        .build()
}

/// Labels of exported spans.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ExportLabels {
    /// `exported` or `failed`.
    result: &'static str,
}

/// Counts of spans. Those that are sampled and neither exported, failed nor dropped wait.
#[derive(Debug, Clone)]
struct ExportCounts {
    sampled: Counter,
    dropped: Counter,
    results: Family<ExportLabels, Counter>,
    /// Spans in the queue, and those of the batch that the exporter has not taken yet.
    waiting: Arc<AtomicUsize>,
}

impl ExportCounts {
    fn new() -> Self {
        let results = metrics::counter_family(
            "quintlet_spans_exported",
            "Spans by what the OTLP collector made of them: exported, or failed and dropped.",
        );
        for result in ["exported", "failed"] {
            // The series exists before the first export.
            let _series = results.get_or_create(&ExportLabels { result });
        }
        let sampled = metrics::counter(
            "quintlet_spans_sampled",
            "Spans for the OTLP collector, those that are dropped from a full queue included.",
        );
        let dropped = metrics::counter(
            "quintlet_spans_dropped",
            "Spans for the OTLP collector that were dropped since the queue was full.",
        );
        Self { sampled, dropped, results, waiting: Arc::default() }
    }

    fn count(&self, result: &'static str, spans: usize) {
        let spans = u64::try_from(spans).unwrap_or(u64::MAX);
        self.results.get_or_create(&ExportLabels { result }).inc_by(spans);
    }
}

/// The queue of the spans for a collector. Counts the spans, and drops those for which it has no room.
///
/// The queue of the SDK drops spans without a count. Its bound is the same as this one, so it is never full.
#[derive(Debug)]
pub(crate) struct ExportQueue<P> {
    queue: P,
    counts: ExportCounts,
    most: usize,
}

impl<P: SpanProcessor> SpanProcessor for ExportQueue<P> {
    fn on_start(&self, _span: &mut Span, _context: &Context) {}

    fn on_end(&self, span: SpanData) {
        if !span.span_context.is_sampled() {
            return;
        }
        self.counts.sampled.inc();
        if self.counts.waiting.fetch_add(1, Ordering::Relaxed) < self.most {
            self.queue.on_end(span);
        } else {
            self.counts.waiting.fetch_sub(1, Ordering::Relaxed);
            self.counts.dropped.inc();
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.queue.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.queue.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.queue.set_resource(resource);
    }
}

/// Counts what an exporter does.
#[derive(Debug)]
pub(crate) struct CountedExporter<E> {
    exporter: E,
    counts: ExportCounts,
}

impl<E: SpanExporter> SpanExporter for CountedExporter<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        self.counts.waiting.fetch_sub(spans, Ordering::Relaxed);
        let result = self.exporter.export(batch).await;
        self.counts.count(if result.is_ok() { "exported" } else { "failed" }, spans);
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

/// Returns the queue of the spans for a collector, of at most `most` spans. A thread of its own exports them,
/// with calls that run on the current runtime.
pub(crate) fn queue(collector: Collector, most: usize) -> Result<ExportQueue<BatchSpanProcessor>, OtlpError> {
    let config = BatchConfigBuilder::default().with_max_queue_size(most).build();
    Ok(counted(collector.exporter()?, most, |exporter| {
        BatchSpanProcessor::builder(exporter).with_batch_config(config).build()
    }))
}

/// Returns the queue that `queue` makes of the counted exporter.
fn counted<E, P>(exporter: E, most: usize, queue: impl FnOnce(CountedExporter<E>) -> P) -> ExportQueue<P> {
    let counts = ExportCounts::new();
    ExportQueue { queue: queue(CountedExporter { exporter, counts: counts.clone() }), counts, most }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::{
        SpanContext, SpanId, TraceFlags, TraceState, Tracer as _, TracerProvider as _,
    };
    use opentelemetry_sdk::error::OTelSdkError;
    use opentelemetry_sdk::trace::{SdkTracerProvider, SimpleSpanProcessor};
    use parking_lot::Mutex;

    use super::*;

    /// Keeps the names of exported spans. Fails if `fails` is set.
    #[derive(Debug, Clone, Default)]
    struct Kept {
        names: Arc<Mutex<Vec<String>>>,
        fails: bool,
    }

    impl SpanExporter for Kept {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            self.names.lock().extend(batch.into_iter().map(|span| span.name.into_owned()));
            if self.fails { Err(OTelSdkError::InternalFailure("refused".to_owned())) } else { Ok(()) }
        }
    }

    fn remote(is_sampled: bool) -> Context {
        let flags = if is_sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
        let (trace, span) = (TraceId::from(7), SpanId::from(7));
        Context::new().with_remote_span_context(SpanContext::new(trace, span, flags, true, TraceState::NONE))
    }

    #[test]
    fn a_parent_decides_and_the_rate_only_without_one() {
        let decision = |rate: u32, parent: Option<Context>| {
            let sampler = ExportSampler::per_million(rate);
            sampler
                .should_sample(parent.as_ref(), TraceId::from(1 << 100), "", &SpanKind::Internal, &[], &[])
                .decision
        };
        for (rate, parent, wanted) in [
            (0, None, SamplingDecision::RecordOnly),
            (0, Some(Context::new()), SamplingDecision::RecordOnly),
            (0, Some(remote(true)), SamplingDecision::RecordAndSample),
            (ALL_TRACES, None, SamplingDecision::RecordAndSample),
            (ALL_TRACES, Some(Context::new()), SamplingDecision::RecordAndSample),
            (ALL_TRACES, Some(remote(false)), SamplingDecision::RecordOnly),
        ] {
            assert_eq!(decision(rate, parent.clone()), wanted, "{rate} {parent:?}");
        }
    }

    #[test]
    fn a_rate_samples_its_share_of_traces() {
        let sampler = ExportSampler::per_million(100_000);
        let ids = RandomIdGenerator::default();
        let sampled = (0..10_000).filter(|_| {
            let result = sampler.should_sample(None, ids.new_trace_id(), "", &SpanKind::Internal, &[], &[]);
            result.decision == SamplingDecision::RecordAndSample
        });
        let sampled = sampled.count();
        // The standard deviation is 30.
        assert!((700..1300).contains(&sampled), "{sampled} of 10000");
    }

    #[test]
    fn only_sampled_spans_are_exported_and_each_of_them_is_counted() {
        for (rate, fails, wanted) in
            [(ALL_TRACES, false, (2, 2, 0)), (ALL_TRACES, true, (2, 0, 2)), (0, false, (0, 0, 0))]
        {
            let kept = Kept { fails, ..Kept::default() };
            let queue = counted(kept.clone(), 1, SimpleSpanProcessor::new);
            let counts = queue.counts.clone();
            let value = |result: &'static str| counts.results.get_or_create(&ExportLabels { result }).get();
            let values = || (counts.sampled.get(), value("exported"), value("failed"));
            let before = values();
            let provider = SdkTracerProvider::builder()
                .with_sampler(ExportSampler::per_million(rate))
                .with_span_processor(queue)
                .build();
            let tracer = provider.tracer("test");
            tracer.in_span("parent", |_| tracer.in_span("child", |_| {}));
            let after = values();
            let counted = (after.0 - before.0, after.1 - before.1, after.2 - before.2);
            assert_eq!(counted, wanted, "{rate} {fails}");
            assert_eq!(kept.names.lock().len(), usize::try_from(wanted.0).unwrap());
        }
    }

    /// A queue whose spans are never exported.
    #[derive(Debug, Clone, Default)]
    struct Stuck(Arc<AtomicUsize>);

    impl SpanProcessor for Stuck {
        fn on_start(&self, _span: &mut Span, _context: &Context) {}

        fn on_end(&self, _span: SpanData) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn force_flush(&self) -> OTelSdkResult {
            Ok(())
        }

        fn shutdown_with_timeout(&self, _timeout: Duration) -> OTelSdkResult {
            Ok(())
        }
    }

    #[test]
    fn spans_are_dropped_from_a_full_queue_and_counted() {
        let stuck = Stuck::default();
        let queue = counted(Kept::default(), 3, |_| stuck.clone());
        let counts = queue.counts.clone();
        let before = (counts.sampled.get(), counts.dropped.get());
        let provider = SdkTracerProvider::builder().with_span_processor(queue).build();
        let tracer = provider.tracer("test");
        let spans = |number: usize| (0..number).for_each(|_| tracer.in_span("span", |_| {}));
        let values = || (counts.sampled.get() - before.0, counts.dropped.get() - before.1);
        spans(5);
        assert_eq!((values(), stuck.0.load(Ordering::Relaxed)), ((5, 2), 3));
        // The exporter takes a batch.
        counts.waiting.fetch_sub(2, Ordering::Relaxed);
        spans(3);
        assert_eq!((values(), stuck.0.load(Ordering::Relaxed)), ((8, 3), 5));
    }

    #[test]
    fn a_process_is_named_by_its_resource() {
        let text = |resource: &Resource, key: &'static str| {
            resource.get(&opentelemetry::Key::from_static_str(key)).map(|value| value.to_string())
        };
        let node = Machine { host_name: "h1".to_owned(), node_name: Some("n1".to_owned()) };
        let host = Machine { node_name: None, ..node.clone() };
        let (first, second) = (resource("pod-sync", &node), resource("pod-sync", &host));
        assert_eq!(text(&first, "service.name").as_deref(), Some("pod-sync"));
        assert_eq!(text(&first, "service.version").as_deref(), Some(env!("CARGO_PKG_VERSION")));
        assert_eq!(text(&first, "k8s.node.name").as_deref(), Some("n1"));
        assert_eq!(text(&second, "k8s.node.name"), None);
        assert_eq!(text(&first, "host.name").as_deref(), Some("h1"));
        assert_ne!(text(&first, "service.instance.id"), text(&second, "service.instance.id"));
    }
}
