//! Propagates the W3C trace context between processes: in the metadata of calls and in the `trace` field of
//! stream messages.
use std::pin::Pin;
use std::task::Poll;

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, TextMapPropagator as _};
use opentelemetry::trace::{Status, TraceContextExt as _};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use quintlet_proto::common::v1::Trace;
use tonic::metadata::{KeyRef, MetadataMap};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// W3C header with the trace id, the parent span and the flags.
pub const TRACEPARENT: &str = "traceparent";
/// W3C header with vendor-specific data.
pub const TRACESTATE: &str = "tracestate";

/// Longest description of an error in a span, in bytes. The description may have a text of the runtime or of
/// a tenant, which the log has as a whole.
const MAX_ERROR: usize = 1 << 10;

/// A message or header map that may carry a trace context.
pub trait TraceSource {
    /// Returns the remote context; an empty one if there is none or it does not parse.
    fn trace_context(&self) -> Context;
}

impl TraceSource for Trace {
    fn trace_context(&self) -> Context {
        struct Fields<'a>(&'a Trace);
        impl Extractor for Fields<'_> {
            fn get(&self, key: &str) -> Option<&str> {
                match key {
                    TRACEPARENT => Some(&self.0.traceparent),
                    TRACESTATE => Some(&self.0.tracestate),
                    _ => None,
                }
            }
            fn keys(&self) -> Vec<&str> {
                vec![TRACEPARENT, TRACESTATE]
            }
        }
        if self.traceparent.is_empty() {
            return Context::new();
        }
        TraceContextPropagator::new().extract_with_context(&Context::new(), &Fields(self))
    }
}

impl TraceSource for MetadataMap {
    fn trace_context(&self) -> Context {
        struct Metadata<'a>(&'a MetadataMap);
        impl Extractor for Metadata<'_> {
            fn get(&self, key: &str) -> Option<&str> {
                self.0.get(key).and_then(|v| v.to_str().ok())
            }
            fn keys(&self) -> Vec<&str> {
                self.0
                    .keys()
                    .filter_map(|k| match k {
                        KeyRef::Ascii(k) => Some(k.as_str()),
                        KeyRef::Binary(_) => None,
                    })
                    .collect()
            }
        }
        TraceContextPropagator::new().extract_with_context(&Context::new(), &Metadata(self))
    }
}

impl TraceSource for HeaderMap {
    fn trace_context(&self) -> Context {
        struct Headers<'a>(&'a HeaderMap);
        impl Extractor for Headers<'_> {
            fn get(&self, key: &str) -> Option<&str> {
                self.0.get(key).and_then(|v| v.to_str().ok())
            }
            fn keys(&self) -> Vec<&str> {
                self.0.keys().map(HeaderName::as_str).collect()
            }
        }
        if !self.contains_key(TRACEPARENT) {
            return Context::new();
        }
        TraceContextPropagator::new().extract_with_context(&Context::new(), &Headers(self))
    }
}

impl<T: TraceSource> TraceSource for Option<T> {
    fn trace_context(&self) -> Context {
        self.as_ref().map_or_else(Context::new, TraceSource::trace_context)
    }
}

/// Returns the context of the current span, for the `trace` field of a stream message. `None` outside a span.
pub fn current_trace() -> Option<Trace> {
    trace_of(&Span::current())
}

/// Returns the context of `span`. `None` if the span is disabled or not recorded.
pub fn trace_of(span: &Span) -> Option<Trace> {
    trace_in(&span.context())
}

/// Returns the context that a new span would continue: that of the current span, or that of [`continued`].
pub fn continued_trace() -> Option<Trace> {
    trace_in(&Context::current())
}

fn trace_in(context: &Context) -> Option<Trace> {
    let span = context.span();
    let context = span.span_context();
    context.is_valid().then(|| Trace {
        traceparent: format!(
            "00-{}-{}-{:02x}",
            context.trace_id(),
            context.span_id(),
            context.trace_flags().to_u8()
        ),
        tracestate: context.trace_state().header(),
    })
}

/// Adds the context of the current span, if any, to the headers of a request.
pub fn inject(headers: &mut HeaderMap) {
    let mut set = |key: &'static str, value: String| {
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(key, value);
        }
    };
    if let Some(trace) = current_trace() {
        set(TRACEPARENT, trace.traceparent);
        if !trace.tracestate.is_empty() {
            set(TRACESTATE, trace.tracestate);
        }
    }
}

/// Returns the trace context that a request carries, for [`continued`]. `None` if it carries none.
pub fn remote_context(headers: &HeaderMap) -> Option<Context> {
    let context = headers.trace_context();
    context.span().span_context().is_valid().then_some(context)
}

/// Runs a future whose spans are children of `context`, unless they have another parent. Tasks that the
/// future spawns do not inherit the context.
///
/// Cancellation safety: the same as that of the future.
pub fn continued<F: Future>(context: Option<Context>, future: F) -> Continued<F> {
    Continued { context, future }
}

pin_project_lite::pin_project! {
    /// A future that continues a trace, from [`continued`].
    #[derive(Debug)]
    #[must_use = "futures do nothing unless they are awaited"]
    pub struct Continued<F> {
        context: Option<Context>,
        #[pin]
        future: F,
    }
}

impl<F: Future> Future for Continued<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let _attached = this.context.clone().map(Context::attach);
        this.future.poll(cx)
    }
}

/// Makes `span` a child of the remote context in `source`. Has no effect without a context or after the span
/// was entered.
pub fn set_parent(span: &Span, source: &impl TraceSource) {
    let context = source.trace_context();
    if context.span().span_context().is_valid() {
        // Fails only for a span that is not recorded or was already entered: both keep the parent they have.
        let _ = span.set_parent(context);
    }
}

/// Links `span` to the span with this W3C `traceparent`, which belongs to another trace. Has no effect if the
/// text does not parse.
pub fn add_link(span: &Span, traceparent: &str) {
    let trace = Trace { traceparent: traceparent.to_owned(), tracestate: String::new() };
    let context = trace.trace_context();
    let linked = context.span().span_context().clone();
    span.add_link(linked);
}

/// Sets the status of `span` to an error with this description, which is cut at 1 KiB. Has no effect if the
/// span is not recorded.
pub fn record_error(span: &Span, description: &str) {
    let end = description.floor_char_boundary(MAX_ERROR);
    span.set_status(Status::error(description[..end].to_owned()));
}

/// Records the error of a gRPC call in the span of the call, see [`record_error`].
pub fn record_status<T>(span: &Span, answer: &Result<T, tonic::Status>) {
    if let Err(status) = answer {
        record_error(span, &format!("{:?}: {}", status.code(), status.message()));
    }
}

/// Returns the hexadecimal trace id of the current span. `None` outside a span.
pub fn current_trace_id() -> Option<String> {
    let context = Span::current().context();
    let span = context.span();
    let context = span.span_context();
    context.is_valid().then(|| context.trace_id().to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use opentelemetry::trace::TracerProvider as _;
    use opentelemetry_sdk::error::OTelSdkResult;
    use opentelemetry_sdk::trace::{SdkTracerProvider, Span as SdkSpan, SpanData, SpanProcessor};
    use parking_lot::Mutex;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    fn parent(source: &impl TraceSource) -> Option<String> {
        let context = source.trace_context();
        let span = context.span();
        let context = span.span_context();
        context.is_valid().then(|| context.trace_id().to_string())
    }

    #[test]
    fn a_trace_context_is_parsed_from_messages_metadata_and_headers_and_invalid_ones_are_ignored() {
        let id = "4bf92f3577b34da6a3ce929d0e0e4736";
        let good = format!("00-{id}-00f067aa0ba902b7-01");
        for (traceparent, expected) in
            [(good.as_str(), Some(id.to_owned())), ("", None), ("00-zz", None), ("00-0-0-0", None)]
        {
            let trace = Trace { traceparent: traceparent.to_owned(), tracestate: String::new() };
            assert_eq!(parent(&trace), expected, "message {traceparent:?}");
            assert_eq!(parent(&Some(trace)), expected, "optional {traceparent:?}");
            let mut metadata = MetadataMap::new();
            metadata.insert(TRACEPARENT, traceparent.parse().unwrap());
            assert_eq!(parent(&metadata), expected, "metadata {traceparent:?}");
            assert_eq!(parent(&metadata.into_headers()), expected, "headers {traceparent:?}");
        }
        assert_eq!(parent(&None::<Trace>), None);
    }

    /// Keeps the data of ended spans.
    #[derive(Debug, Clone, Default)]
    struct Ended(Arc<Mutex<Vec<SpanData>>>);

    impl SpanProcessor for Ended {
        fn on_start(&self, _span: &mut SdkSpan, _context: &Context) {}

        fn on_end(&self, span: SpanData) {
            self.0.lock().push(span);
        }

        fn force_flush(&self) -> OTelSdkResult {
            Ok(())
        }

        fn shutdown_with_timeout(&self, _timeout: Duration) -> OTelSdkResult {
            Ok(())
        }
    }

    #[test]
    fn a_span_has_the_link_to_another_trace_and_the_description_of_its_error() {
        let ended = Ended::default();
        let provider = SdkTracerProvider::builder().with_span_processor(ended.clone()).build();
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            let created = tracing::info_span!(parent: None, "create pod");
            let trace = trace_of(&created).unwrap();
            let deleted = tracing::info_span!(parent: None, "terminate pod");
            add_link(&deleted, &trace.traceparent);
            add_link(&deleted, "00-zz");
            record_error(&deleted, &"é".repeat(MAX_ERROR));
        });
        let ended = ended.0.lock();
        let [deleted, created] = &ended[..] else { panic!("{ended:?}") };
        let links: Vec<_> = deleted.links.iter().map(|link| &link.span_context).collect();
        assert_eq!(links.len(), 1, "{links:?}");
        assert_eq!(links[0].span_id(), created.span_context.span_id());
        assert_ne!(links[0].trace_id(), deleted.span_context.trace_id());
        assert_eq!(deleted.status, Status::error("é".repeat(MAX_ERROR / 2)));
        assert_eq!(created.status, Status::Unset);
    }

    #[test]
    fn nothing_is_injected_outside_a_span() {
        let mut headers = HeaderMap::new();
        inject(&mut headers);
        assert!(headers.is_empty());
        assert_eq!(current_trace(), None);
    }
}
