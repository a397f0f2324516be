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

/// A span, as far as tests look at it.
#[derive(Debug, Clone)]
pub struct Span {
    /// Service that made it.
    pub service: String,
    /// Trace it belongs to, in hex.
    pub trace: String,
    /// Name.
    pub name: String,
    /// Attributes with text values.
    pub attributes: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Default)]
struct Spans(Arc<Mutex<Vec<Span>>>);

/// A running receiver.
#[derive(Debug)]
pub struct Receiver {
    endpoint: String,
    spans: Spans,
    _stop: DropGuard,
}

impl Receiver {
    /// Starts one on a free loopback port.
    ///
    /// # Panics
    /// The loopback address cannot be bound.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free loopback port can be bound");
        let endpoint = format!("http://{}", listener.local_addr().expect("a bound socket has an address"));
        let (spans, stop) = (Spans::default(), CancellationToken::new());
        let serve = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(spans.clone()))
            .serve_with_incoming_shutdown(TcpListenerStream::new(listener), stop.clone().cancelled_owned());
        quintlet_kit::task::spawn("otlp-receiver", async move {
            // It ends when the test does.
            let _ended = serve.await;
        });
        Self { endpoint, spans, _stop: stop.drop_guard() }
    }

    /// For `--otlp-endpoint`.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// All spans so far.
    #[must_use]
    pub fn spans(&self) -> Vec<Span> {
        self.spans.0.lock().clone()
    }

    /// The services in each trace.
    #[must_use]
    pub fn services(&self) -> BTreeMap<String, BTreeSet<String>> {
        let mut traces: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for span in self.spans.0.lock().iter() {
            traces.entry(span.trace.clone()).or_default().insert(span.service.clone());
        }
        traces
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
            let service = texts(&resource.attributes).remove("service.name").unwrap_or_default();
            for span in of_process.scope_spans.into_iter().flat_map(|s| s.spans) {
                self.0.lock().push(Span {
                    service: service.clone(),
                    trace: span.trace_id.iter().map(|b| format!("{b:02x}")).collect(),
                    attributes: texts(&span.attributes),
                    name: span.name,
                });
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
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
