//! The exporter against a receiver on loopback.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::body::to_bytes;
use axum::extract::Request as AxumRequest;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse as _, Response};
use http::{HeaderMap, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use opentelemetry::trace::{Tracer as _, TracerProvider as _};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_sdk::trace::SdkTracerProvider;
use parking_lot::Mutex;
use prost::Message as _;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::RootCertStore;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

use super::*;

/// A request that the receiver has read.
#[derive(Debug, Clone)]
struct Got {
    path: String,
    headers: HeaderMap,
    spans: Vec<String>,
}

/// The answer of the receiver to each request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Taken,
    /// The first two requests fail with a status that allows a retry.
    BusyTwice,
    Refused,
    Never,
}

#[derive(Debug, Clone)]
struct Receiver {
    answer: Answer,
    got: Arc<Mutex<Vec<Got>>>,
    address: SocketAddr,
}

impl Receiver {
    async fn start(protocol: Protocol, answer: Answer, tls: Option<rustls::ServerConfig>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let receiver = Self { answer, got: Arc::default(), address };
        let router = match protocol {
            Protocol::Grpc => {
                tonic::service::Routes::new(TraceServiceServer::new(receiver.clone())).into_axum_router()
            }
            _ => Router::new(),
        };
        let recorder = receiver.clone();
        let router = router
            .fallback(|| async { "" })
            .layer(from_fn(move |request, next| recorder.clone().record(protocol, request, next)));
        let acceptor = tls.map(|config| TlsAcceptor::from(Arc::new(config)));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (router, acceptor) = (router.clone(), acceptor.clone());
                tokio::spawn(async move {
                    match acceptor {
                        Some(acceptor) => {
                            if let Ok(stream) = acceptor.accept(stream).await {
                                serve(protocol, stream, router).await;
                            }
                        }
                        None => serve(protocol, stream, router).await,
                    }
                });
            }
        });
        receiver
    }

    /// Records requests over HTTP and answers them. Those over gRPC are answered by the service.
    async fn record(self, protocol: Protocol, request: AxumRequest, next: Next) -> Response {
        let (path, headers) = (request.uri().to_string(), request.headers().clone());
        if protocol == Protocol::Grpc {
            self.got.lock().push(Got { path, headers, spans: Vec::new() });
            return next.run(request).await;
        }
        assert_eq!(request.method(), http::Method::POST);
        let body = to_bytes(request.into_body(), usize::MAX).await.unwrap();
        let spans = names(&ExportTraceServiceRequest::decode(body).unwrap());
        let attempt = {
            let mut got = self.got.lock();
            got.push(Got { path, headers, spans });
            got.len()
        };
        match self.answer {
            Answer::BusyTwice if attempt <= 2 => StatusCode::SERVICE_UNAVAILABLE.into_response(),
            Answer::Refused => StatusCode::BAD_REQUEST.into_response(),
            Answer::Never => std::future::pending().await,
            Answer::Taken | Answer::BusyTwice => {
                ExportTraceServiceResponse::default().encode_to_vec().into_response()
            }
        }
    }

    fn got(&self) -> Vec<Got> {
        self.got.lock().clone()
    }
}

#[tonic::async_trait]
impl TraceService for Receiver {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        let attempt = {
            let mut got = self.got.lock();
            got.last_mut().unwrap().spans = names(request.get_ref());
            got.len()
        };
        match self.answer {
            Answer::BusyTwice if attempt <= 2 => Err(tonic::Status::unavailable("busy")),
            Answer::Refused => Err(tonic::Status::invalid_argument("refused")),
            Answer::Never => std::future::pending().await,
            Answer::Taken | Answer::BusyTwice => {
                Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
            }
        }
    }
}

async fn serve(
    protocol: Protocol,
    stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    router: Router,
) {
    let (io, service) = (TokioIo::new(stream), TowerToHyperService::new(router));
    // It ends with the client.
    let _ended = match protocol {
        Protocol::Grpc => {
            hyper::server::conn::http2::Builder::new(TokioExecutor::new()).serve_connection(io, service).await
        }
        _ => hyper::server::conn::http1::Builder::new().serve_connection(io, service).await,
    };
}

fn names(request: &ExportTraceServiceRequest) -> Vec<String> {
    let scopes = request.resource_spans.iter().flat_map(|of_process| &of_process.scope_spans);
    scopes.flat_map(|scope| &scope.spans).map(|span| span.name.clone()).collect()
}

#[derive(Debug, Clone, Default)]
struct Kept(Arc<Mutex<Vec<SpanData>>>);

impl SpanExporter for Kept {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.0.lock().extend(batch);
        Ok(())
    }
}

/// Returns a batch of one span for each name.
fn batch(names: &[&'static str]) -> Vec<SpanData> {
    let kept = Kept::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(kept.clone()).build();
    for name in names {
        provider.tracer("test").in_span(*name, |_| {});
    }
    let spans = kept.0.lock();
    spans.clone()
}

/// Returns the collector of a flag and variables, whose names are without their common beginning.
fn collector(flag: &str, variables: &[(&str, &str)]) -> Result<Option<Collector>, OtlpError> {
    let find = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
    Collector::from(Some(flag), |name| find(name.strip_prefix("OTEL_EXPORTER_OTLP_").unwrap()))
}

type Exporter = OnRuntime<opentelemetry_otlp::SpanExporter>;

fn exporter(endpoint: &str, timeout: u64, variables: &[(&str, &str)]) -> Result<Exporter, OtlpError> {
    let collector = collector(endpoint, variables)?.unwrap();
    Collector { timeout: Duration::from_millis(timeout), ..collector }.exporter()
}

fn word(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Grpc => "grpc",
        _ => "http/protobuf",
    }
}

const BOTH: [Protocol; 2] = [Protocol::Grpc, Protocol::HttpBinary];

#[tokio::test]
async fn spans_arrive_with_the_path_and_content_of_the_protocol() {
    for (protocol, base, path, content) in [
        (
            Protocol::Grpc,
            "",
            "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
            "application/grpc",
        ),
        (Protocol::HttpBinary, "", "/v1/traces", "application/x-protobuf"),
        (Protocol::HttpBinary, "/", "/v1/traces", "application/x-protobuf"),
        (Protocol::HttpBinary, "/in?k=v", "/in?k=v", "application/x-protobuf"),
    ] {
        let receiver = Receiver::start(protocol, Answer::Taken, None).await;
        let endpoint = format!("http://{}{base}", receiver.address);
        let exporter = exporter(&endpoint, 5000, &[("PROTOCOL", word(protocol))]).unwrap();
        exporter.export(batch(&["one", "two"])).await.unwrap();
        let got = receiver.got();
        let [request] = &got[..] else { panic!("{got:?}") };
        assert!(request.path.ends_with(path), "{request:?}");
        assert_eq!(request.spans, ["one", "two"]);
        assert_eq!(request.headers.get("content-type").unwrap(), content, "{protocol:?}");
    }
}

#[tokio::test]
async fn an_answer_decides_whether_spans_are_sent_again() {
    for protocol in BOTH {
        for (answer, is_sent, attempts) in
            [(Answer::Taken, true, 1), (Answer::BusyTwice, true, 3), (Answer::Refused, false, 1)]
        {
            let receiver = Receiver::start(protocol, answer, None).await;
            let endpoint = format!("http://{}", receiver.address);
            let exporter = exporter(&endpoint, 20_000, &[("PROTOCOL", word(protocol))]).unwrap();
            let sent = exporter.export(batch(&["one"])).await;
            assert_eq!(sent.is_ok(), is_sent, "{protocol:?} {answer:?} {sent:?}");
            assert_eq!(receiver.got().len(), attempts, "{protocol:?} {answer:?}");
        }
    }
}

#[tokio::test]
async fn a_collector_that_never_answers_costs_the_time_limit() {
    for protocol in BOTH {
        let silent = Receiver::start(protocol, Answer::Never, None).await;
        let endpoint = format!("http://{}", silent.address);
        let exporter = exporter(&endpoint, 300, &[("PROTOCOL", word(protocol))]).unwrap();
        let began = Instant::now();
        exporter.export(batch(&["one"])).await.unwrap_err();
        let spent = began.elapsed();
        assert!((300..2000).contains(&spent.as_millis()), "{protocol:?} {spent:?}");
    }
}

#[tokio::test]
async fn the_sdk_exports_from_a_thread_of_its_own_and_a_dead_collector_delays_nothing() {
    for protocol in BOTH {
        // The listener is closed at once.
        let dead = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let alive = Receiver::start(protocol, Answer::Taken, None).await;
        for (address, is_sent) in [(dead, false), (alive.address, true)] {
            let exporter =
                exporter(&format!("http://{address}"), 200, &[("PROTOCOL", word(protocol))]).unwrap();
            let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).build();
            let began = Instant::now();
            for _ in 0..100 {
                provider.tracer("test").in_span("one", |_| {});
            }
            let spent = began.elapsed();
            assert!(spent < Duration::from_millis(200), "{spent:?}");
            let flush = tokio::task::spawn_blocking(move || provider.force_flush());
            assert_eq!(flush.await.unwrap().is_ok(), is_sent, "{protocol:?}");
        }
        let spans: usize = alive.got().iter().map(|request| request.spans.len()).sum();
        assert_eq!(spans, 100, "{protocol:?}");
    }
}

#[test]
fn the_endpoint_is_that_of_the_flag_or_of_a_variable() {
    let http = ("PROTOCOL", "http/protobuf");
    for (flag, variables, wanted) in [
        ("", vec![], None),
        ("", vec![("ENDPOINT", "")], None),
        ("http://c:4317", vec![], Some((Some("http://c:4317"), false))),
        ("http://c:4318", vec![http], Some((Some("http://c:4318/v1/traces"), false))),
        ("https://c/own/path", vec![http], Some((Some("https://c/own/path"), true))),
        // The exporter reads these variables itself.
        ("", vec![("ENDPOINT", "http://all:1")], Some((None, false))),
        ("", vec![("TRACES_ENDPOINT", "https://t:1")], Some((None, true))),
        ("", vec![("ENDPOINT", "c:4317")], Some((None, true))),
        ("", vec![("ENDPOINT", "c:4317"), ("INSECURE", "True")], Some((None, false))),
    ] {
        let found = collector(flag, &variables).unwrap();
        let found = found.as_ref().map(|c| (c.endpoint.as_deref(), c.tls.is_some()));
        assert_eq!(found, wanted, "{flag:?} {variables:?}");
    }
}

#[test]
fn the_time_limit_is_that_of_a_variable() {
    for (variables, milliseconds) in [
        (vec![], 10_000),
        (vec![("TIMEOUT", "30000")], 30_000),
        (vec![("TIMEOUT", "1"), ("TRACES_TIMEOUT", "250")], 250),
        (vec![("TIMEOUT", "5s")], 10_000),
    ] {
        let found = collector("http://c:1", &variables).unwrap().unwrap();
        assert_eq!(found.timeout, Duration::from_millis(milliseconds), "{variables:?}");
    }
}

#[test]
fn a_wrong_value_is_named() {
    for (variables, wanted) in [
        (
            ("PROTOCOL", "http/json"),
            "OTEL_EXPORTER_OTLP_PROTOCOL: protocol \"http/json\" is not supported, expected grpc or http/protobuf",
        ),
        (
            ("TRACES_CLIENT_KEY", "/k"),
            "OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY is set without OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE",
        ),
        (
            ("CLIENT_CERTIFICATE", "/c"),
            "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE is set without OTEL_EXPORTER_OTLP_CLIENT_KEY",
        ),
    ] {
        assert_eq!(collector("https://c:1", &[variables]).unwrap_err().to_string(), wanted);
    }
}

#[tokio::test]
async fn an_endpoint_that_is_no_url_is_an_error() {
    for (protocol, endpoint) in [
        (Protocol::Grpc, "http://[c"),
        (Protocol::HttpBinary, "http://a b/c"),
        (Protocol::HttpBinary, "c:4318"),
    ] {
        let error = exporter(endpoint, 1, &[("PROTOCOL", word(protocol))]).unwrap_err();
        assert!(matches!(error, OtlpError::Exporter(_)), "{error:?}");
    }
}

/// An authority, and files of what it issued.
struct Pki {
    authority: CertifiedIssuer<'static, KeyPair>,
    dir: tempfile::TempDir,
}

impl Pki {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let pki = Self { authority, dir: tempfile::tempdir().unwrap() };
        std::fs::write(pki.path("ca.pem"), pki.authority.pem()).unwrap();
        let key = KeyPair::generate().unwrap();
        let client = CertificateParams::new(vec!["client".to_owned()]).unwrap();
        let client = client.signed_by(&key, &pki.authority).unwrap();
        std::fs::write(pki.path("client.pem"), client.pem()).unwrap();
        std::fs::write(pki.path("client.key"), key.serialize_pem()).unwrap();
        pki
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        Path::new(self.dir.path()).join(name)
    }

    /// Returns a server that requires a client certificate of this authority.
    fn server(&self, protocol: Protocol) -> rustls::ServerConfig {
        let key = KeyPair::generate().unwrap();
        let server = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let server = server.signed_by(&key, &self.authority).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(self.authority.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .build()
            .unwrap();
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(clients)
            .with_single_cert(
                vec![server.der().clone()],
                PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())),
            )
            .unwrap();
        if protocol == Protocol::Grpc {
            config.alpn_protocols = vec![b"h2".to_vec()];
        }
        config
    }
}

#[tokio::test]
async fn both_protocols_use_the_configured_certificates() {
    let (ours, other) = (Pki::new(), Pki::new());
    for protocol in BOTH {
        let receiver = Receiver::start(protocol, Answer::Taken, Some(ours.server(protocol))).await;
        let endpoint = format!("https://{}", receiver.address);
        for (authority, client, arrives) in [
            (&ours, Some(&ours), true),
            (&other, Some(&ours), false),
            (&ours, Some(&other), false),
            (&ours, None, false),
        ] {
            let path = |pki: &Pki, name: &str| pki.path(name).display().to_string();
            let mut variables =
                vec![("PROTOCOL", word(protocol).to_owned()), ("CERTIFICATE", path(authority, "ca.pem"))];
            if let Some(client) = client {
                variables.push(("CLIENT_CERTIFICATE", path(client, "client.pem")));
                variables.push(("CLIENT_KEY", path(client, "client.key")));
            }
            let variables: Vec<_> = variables.iter().map(|(n, v)| (*n, v.as_str())).collect();
            let before = receiver.got().len();
            let timeout = if arrives { 5000 } else { 300 };
            let sent = exporter(&endpoint, timeout, &variables).unwrap().export(batch(&["one"])).await;
            assert_eq!(sent.is_ok(), arrives, "{protocol:?} {variables:?} {sent:?}");
            assert_eq!(receiver.got().len() > before, arrives, "{protocol:?} {variables:?}");
        }
    }
}

#[tokio::test]
async fn a_file_without_a_certificate_is_named() {
    let pki = Pki::new();
    let (key, absent) = (pki.path("client.key").display().to_string(), pki.path("no").display().to_string());
    for (protocol, path) in BOTH.into_iter().flat_map(|p| [(p, &key), (p, &absent)]) {
        let variables = [("PROTOCOL", word(protocol)), ("CERTIFICATE", path)];
        let error = exporter("https://c:1", 1, &variables).unwrap_err();
        assert_eq!(error.to_string(), format!("OTEL_EXPORTER_OTLP_CERTIFICATE: failed to read {path}"));
    }
    // Without TLS no file is read.
    exporter("http://c:1", 1, &[("CERTIFICATE", &absent)]).unwrap();
}
