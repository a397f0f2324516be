//! Sends spans to a collector by OTLP, over gRPC or over HTTP with protobuf.
//!
//! The batch processor of the SDK calls the exporter on a thread of its own. The calls themselves run on the service's runtime, each
//! with a time limit. An answer that allows it is retried within that limit.

mod settings;
#[cfg(test)]
mod tests;
mod tls;

use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, USER_AGENT};
use http::{HeaderMap, HeaderValue, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkError;
use opentelemetry_sdk::trace::SpanData;
use prost::Message as _;
use tonic::Code;
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};

pub use crate::otlp::settings::OtlpError;
pub(crate) use crate::otlp::settings::{Collector, Protocol};
use crate::sink::SpanSink;

/// Waits between attempts: the first one, and the longest. Each is twice as long as the one before.
const RETRY_WAITS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// Largest answer over HTTP that is read. An answer has a count and a message.
const MAX_ANSWER: usize = 64 * 1024;

const AGENT: &str = concat!("quintlet/", env!("CARGO_PKG_VERSION"));

type Connector = HttpsConnector<HttpConnector>;

/// Connections to a collector.
#[derive(Debug, Clone)]
enum Transport {
    Grpc(TraceServiceClient<Channel>),
    Http { client: Box<Client<Connector, Full<Bytes>>>, endpoint: Uri },
}

/// An exporter to one collector.
#[derive(Debug)]
pub(crate) struct OtlpExporter {
    sender: Sender,
    resource: ResourceAttributesWithSchema,
    runtime: tokio::runtime::Handle,
}

/// The connections and settings of each call. Clones share the connections.
#[derive(Debug, Clone)]
struct Sender {
    transport: Transport,
    headers: HeaderMap,
    timeout: Duration,
}

/// The reason why a batch was not exported.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum SendError {
    #[error("collector answered with gRPC status {0:?}")]
    Grpc(Code),
    #[error("collector answered with HTTP status {0}")]
    Http(StatusCode),
    #[error("collector cannot be reached")]
    Connection,
    #[error("request or answer is invalid")]
    Invalid,
    #[error("collector did not take the spans within the time limit")]
    Timeout,
}

impl SendError {
    /// Returns whether the specification of OTLP lets a client send the same spans again.
    fn is_retryable(&self) -> bool {
        match self {
            Self::Grpc(code) => matches!(
                code,
                Code::Cancelled
                    | Code::DeadlineExceeded
                    | Code::Aborted
                    | Code::OutOfRange
                    | Code::Unavailable
                    | Code::DataLoss
            ),
            Self::Http(status) => matches!(status.as_u16(), 429 | 502 | 503 | 504),
            Self::Connection => true,
            Self::Invalid | Self::Timeout => false,
        }
    }
}

impl OtlpExporter {
    /// Returns an exporter whose calls run on the current runtime. It connects with the first export.
    pub(crate) fn new(collector: Collector) -> Result<Self, OtlpError> {
        let Collector { protocol, endpoint, headers, timeout, tls } = collector;
        let is_tls = endpoint.scheme_str() == Some("https");
        let mut tls = if is_tls { tls::client(&tls)? } else { tls::unused()? };
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_connect_timeout(Some(timeout));
        let transport = match protocol {
            Protocol::Grpc => {
                tls.alpn_protocols = vec![b"h2".to_vec()];
                let target =
                    Endpoint::from(endpoint).user_agent(AGENT).expect("a constant is a header value");
                let channel = target.connect_with_connector_lazy(Connector::from((tcp, tls)));
                Transport::Grpc(TraceServiceClient::new(channel))
            }
            Protocol::Http => {
                let client = Client::builder(TokioExecutor::new()).build(Connector::from((tcp, tls)));
                Transport::Http { client: Box::new(client), endpoint }
            }
        };
        let sender = Sender { transport, headers, timeout };
        let runtime = tokio::runtime::Handle::current();
        Ok(Self { sender, resource: ResourceAttributesWithSchema::default(), runtime })
    }
}

impl SpanSink for OtlpExporter {
    async fn send(&self, batch: Vec<SpanData>) -> Result<usize, OTelSdkError> {
        let resource_spans = group_spans_by_resource_and_scope(batch, &self.resource);
        let sending = self.sender.clone().send(ExportTraceServiceRequest { resource_spans });
        let answer = match self.runtime.spawn(sending).await {
            Ok(sent) => sent.map_err(|error| OTelSdkError::InternalFailure(error.to_string()))?,
            // The runtime has stopped.
            Err(error) => return Err(OTelSdkError::InternalFailure(error.to_string())),
        };
        let rejected = answer.partial_success.map_or(0, |partial| partial.rejected_spans);
        Ok(usize::try_from(rejected).unwrap_or(0))
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.resource = resource.into();
    }
}

impl Sender {
    /// Sends spans until the collector takes them, refuses them for good, or the time limit ends.
    async fn send(self, request: ExportTraceServiceRequest) -> Result<ExportTraceServiceResponse, SendError> {
        let sending = async {
            let (mut wait, longest) = RETRY_WAITS;
            loop {
                match self.send_once(&request).await {
                    Err(error) if error.is_retryable() => {
                        tracing::debug!(%error, "export of spans failed, retrying")
                    }
                    done => return done,
                }
                tokio::time::sleep(wait).await;
                wait = wait.saturating_mul(2).min(longest);
            }
        };
        tokio::time::timeout(self.timeout, sending).await.unwrap_or(Err(SendError::Timeout))
    }

    async fn send_once(
        &self,
        request: &ExportTraceServiceRequest,
    ) -> Result<ExportTraceServiceResponse, SendError> {
        match &self.transport {
            Transport::Grpc(client) => {
                let mut call = tonic::Request::new(request.clone());
                *call.metadata_mut() = MetadataMap::from_headers(self.headers.clone());
                let answer = client.clone().export(call).await;
                answer.map(tonic::Response::into_inner).map_err(|status| SendError::Grpc(status.code()))
            }
            Transport::Http { client, endpoint } => {
                let call = self.post(endpoint, request)?;
                let answer = client.request(call).await.map_err(|_| SendError::Connection)?;
                let status = answer.status();
                if !status.is_success() {
                    return Err(SendError::Http(status));
                }
                let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
                let body = body.map_err(|_| SendError::Invalid)?.to_bytes();
                ExportTraceServiceResponse::decode(body).map_err(|_| SendError::Invalid)
            }
        }
    }

    fn post(
        &self,
        endpoint: &Uri,
        request: &ExportTraceServiceRequest,
    ) -> Result<Request<Full<Bytes>>, SendError> {
        let mut call = Request::post(endpoint.clone())
            .body(Full::new(Bytes::from(request.encode_to_vec())))
            .map_err(|_| SendError::Invalid)?;
        call.headers_mut().clone_from(&self.headers);
        call.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        call.headers_mut().insert(USER_AGENT, HeaderValue::from_static(AGENT));
        Ok(call)
    }
}
