//! A receiver of traces over OTLP/gRPC.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Request, Response, Status};

/// The tested fields of a span.
#[derive(Debug, Clone)]
pub struct Span {
    /// The resource attribute `service.name`.
    pub service: String,
    /// Attributes of the process.
    pub resource: Arc<BTreeMap<String, String>>,
    /// Trace ID, in hex.
    pub trace: String,
    /// Span ID, in hex.
    pub id: String,
    /// Parent span ID, in hex; empty for the root of a trace.
    pub parent: String,
    /// Name of the span.
    pub name: String,
    /// Start, in nanoseconds since 1970.
    pub start_unix_ns: u64,
    /// End, in nanoseconds since 1970.
    pub end_unix_ns: u64,
    /// Trace ID and span ID of each linked span, in hex.
    pub links: Vec<(String, String)>,
    /// Attributes with string values.
    pub attributes: BTreeMap<String, String>,
}

impl Span {
    /// Returns an attribute, or an empty text.
    #[must_use]
    pub fn attribute(&self, key: &str) -> &str {
        self.attributes.get(key).map_or("", String::as_str)
    }
}

/// Returns the root of a trace.
///
/// # Panics
/// The trace has no root.
#[must_use]
pub fn root(spans: &[Span]) -> &Span {
    spans.iter().find(|span| span.parent.is_empty()).expect("a trace has a root")
}

#[derive(Debug, Clone, Default)]
struct Spans(Arc<Mutex<Vec<Span>>>);

/// An OTLP collector in memory: a gRPC server that keeps the spans it receives.
#[derive(Debug)]
pub struct Receiver {
    endpoint: String,
    spans: Spans,
    _stop: DropGuard,
}

impl Receiver {
    /// Starts a receiver on a free loopback port.
    ///
    /// # Panics
    /// The loopback address cannot be bound.
    pub async fn start() -> Self {
        Self::start_at("127.0.0.1:0").await
    }

    /// Starts a receiver at an address with a port.
    ///
    /// # Panics
    /// The address cannot be bound.
    pub async fn start_at(address: &str) -> Self {
        let listener = TcpListener::bind(address).await.expect("the address can be bound");
        let endpoint = format!("http://{}", listener.local_addr().expect("a bound socket has an address"));
        let (spans, stop) = (Spans::default(), CancellationToken::new());
        let serve = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(spans.clone()))
            .serve_with_incoming_shutdown(TcpListenerStream::new(listener), stop.clone().cancelled_owned());
        quintlet_kit::task::spawn("otlp-receiver", async move {
            // It ends with the test.
            let _ended = serve.await;
        });
        Self { endpoint, spans, _stop: stop.drop_guard() }
    }

    /// Returns the value of `--otlp-endpoint`.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Returns the names of the services whose spans have arrived.
    #[must_use]
    pub fn services(&self) -> BTreeSet<String> {
        self.spans.0.lock().iter().map(|span| span.service.clone()).collect()
    }

    /// Returns all spans so far.
    #[must_use]
    pub fn spans(&self) -> Vec<Span> {
        self.spans.0.lock().clone()
    }

    /// Returns the spans of the only trace whose root has this name and concerns this pod.
    ///
    /// # Errors
    /// There is no such trace, or more than one, or a span's parent is not in the trace.
    pub fn tree(&self, root: &str, pod_uid: &str) -> Result<Vec<Span>, String> {
        let all = self.spans();
        let is_root = |s: &&Span| s.name == root && s.attribute("k8s.pod.uid") == pod_uid;
        let roots: Vec<&Span> = all.iter().filter(is_root).collect();
        let [root] = roots[..] else { return Err(format!("{} spans {root:?}: {roots:?}", roots.len())) };
        if !root.parent.is_empty() {
            return Err(format!("the root is a part of something: {root:?}"));
        }
        let of_trace: Vec<Span> = all.iter().filter(|s| s.trace == root.trace).cloned().collect();
        let ids: BTreeSet<&str> = of_trace.iter().map(|s| s.id.as_str()).collect();
        let lost: Vec<&Span> =
            of_trace.iter().filter(|s| s.id != root.id && !ids.contains(s.parent.as_str())).collect();
        if lost.is_empty() { Ok(of_trace) } else { Err(format!("spans without their parents: {lost:#?}")) }
    }
}

#[tonic::async_trait]
impl TraceService for Spans {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for of_process in request.into_inner().resource_spans {
            let resource = of_process.resource.unwrap_or_default();
            let resource = Arc::new(texts(&resource.attributes));
            let service = resource.get("service.name").cloned().unwrap_or_default();
            for span in of_process.scope_spans.into_iter().flat_map(|s| s.spans) {
                self.0.lock().push(Span {
                    service: service.clone(),
                    resource: resource.clone(),
                    trace: hex(&span.trace_id),
                    id: hex(&span.span_id),
                    parent: hex(&span.parent_span_id),
                    attributes: texts(&span.attributes),
                    name: span.name,
                    start_unix_ns: span.start_time_unix_nano,
                    end_unix_ns: span.end_time_unix_nano,
                    links: span.links.iter().map(|l| (hex(&l.trace_id), hex(&l.span_id))).collect(),
                });
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn texts(attributes: &[opentelemetry_proto::tonic::common::v1::KeyValue]) -> BTreeMap<String, String> {
    attributes
        .iter()
        .filter_map(|kv| match kv.value.as_ref()?.value.as_ref()? {
            Value::StringValue(text) => Some((kv.key.clone(), text.clone())),
            _ => None,
        })
        .collect()
}
