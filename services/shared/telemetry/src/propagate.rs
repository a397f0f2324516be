//! Propagates the W3C trace context between processes: in the metadata of calls and in the `trace` field of
//! stream messages.
use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator as _};
use opentelemetry::trace::TraceContextExt as _;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use quintlet_proto::common::v1::Trace;
use tonic::metadata::{AsciiMetadataKey, KeyRef, MetadataMap, MetadataValue};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// W3C header with the trace id, the parent span and the flags.
pub const TRACEPARENT: &str = "traceparent";
/// W3C header with vendor-specific data.
pub const TRACESTATE: &str = "tracestate";

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

impl TraceSource for http::HeaderMap {
    fn trace_context(&self) -> Context {
        struct Headers<'a>(&'a http::HeaderMap);
        impl Extractor for Headers<'_> {
            fn get(&self, key: &str) -> Option<&str> {
                self.0.get(key).and_then(|v| v.to_str().ok())
            }
            fn keys(&self) -> Vec<&str> {
                self.0.keys().map(http::HeaderName::as_str).collect()
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
    let context = span.context();
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

/// Adds the context of the current span, if any, to the metadata of a call.
pub fn inject(metadata: &mut MetadataMap) {
    struct Writer<'a>(&'a mut MetadataMap);
    impl Injector for Writer<'_> {
        fn set(&mut self, key: &str, value: String) {
            let parsed = (AsciiMetadataKey::from_bytes(key.as_bytes()), MetadataValue::try_from(value));
            if let (Ok(key), Ok(value)) = parsed {
                self.0.insert(key, value);
            }
        }
    }
    if let Some(trace) = current_trace() {
        let mut writer = Writer(metadata);
        writer.set(TRACEPARENT, trace.traceparent);
        if !trace.tracestate.is_empty() {
            writer.set(TRACESTATE, trace.tracestate);
        }
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

/// Returns the hexadecimal trace id of the current span. `None` outside a span.
pub fn current_trace_id() -> Option<String> {
    let context = Span::current().context();
    let span = context.span();
    let context = span.span_context();
    context.is_valid().then(|| context.trace_id().to_string())
}

/// Adds the context of the current span to each call of a client.
#[derive(Debug, Clone, Copy, Default)]
pub struct PropagatingInterceptor;

impl tonic::service::Interceptor for PropagatingInterceptor {
    fn call(&mut self, mut request: tonic::Request<()>) -> Result<tonic::Request<()>, tonic::Status> {
        inject(request.metadata_mut());
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn nothing_is_injected_outside_a_span() {
        let mut metadata = MetadataMap::new();
        inject(&mut metadata);
        assert!(metadata.is_empty());
        assert_eq!(current_trace(), None);
    }
}
