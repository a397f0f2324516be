//! The exporter to an OTLP collector, over gRPC or over HTTP with protobuf.
//!
//! Headers and endpoint are those of the standard environment variables, which `opentelemetry-otlp` reads.
//! The protocol, the time limit and the files of certificates are read here.

#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "kit, which has the methods to be taken instead, depends on this crate"
)]
mod tests;
mod tls;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::connect::HttpConnector;
use opentelemetry_http::hyper::HyperClient;
use opentelemetry_otlp::{ExporterBuildError, Protocol, WithExportConfig, WithHttpConfig, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{SpanData, SpanExporter};

pub use crate::otlp::tls::TlsError;
use crate::otlp::tls::{NamedFile, TlsFiles};

/// Default time limit of one export with its retries, as the specification of OTLP has it.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Path of traces below an endpoint of OTLP over HTTP.
const TRACES_PATH: &str = "/v1/traces";

/// The reason why spans cannot be exported as configured.
#[derive(Debug, thiserror::Error)]
pub enum OtlpError {
    /// The protocol is not supported.
    #[error("{name}: protocol {value:?} is not supported, expected grpc or http/protobuf")]
    Protocol {
        /// The variable.
        name: String,
        /// The value that was set.
        value: String,
    },
    /// A client certificate without a key, or a key without a certificate.
    #[error("{name} is set without {missing}")]
    Incomplete {
        /// The variable.
        name: String,
        /// The variable that is not set.
        missing: &'static str,
    },
    /// A file of certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Another setting is invalid, such as the endpoint.
    #[error("failed to build the OTLP exporter")]
    Exporter(#[from] ExporterBuildError),
}

/// A collector, and how it is reached.
#[derive(Debug, Clone)]
pub(crate) struct Collector {
    protocol: Protocol,
    /// The endpoint of the flag. Without it, that of the environment.
    endpoint: Option<String>,
    /// Time limit of one export with its retries.
    timeout: Duration,
    /// Files for TLS. None if the endpoint has no TLS.
    tls: Option<TlsFiles>,
}

impl Collector {
    /// Returns the collector of the flag or, without it, of the environment; none if neither has an endpoint.
    pub(crate) fn from(
        flag: Option<&str>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, OtlpError> {
        let variables = Variables(variable);
        let flag = flag.filter(|endpoint| !endpoint.is_empty());
        let Some(endpoint) = flag.map(str::to_owned).or_else(|| variables.value("ENDPOINT")) else {
            return Ok(None);
        };
        let protocol = variables.protocol()?;
        let tls = if variables.is_plain(&endpoint) { None } else { Some(variables.tls()?) };
        let endpoint = flag.map(|endpoint| match protocol {
            Protocol::HttpBinary => of_traces(endpoint),
            _ => endpoint.to_owned(),
        });
        Ok(Some(Self { protocol, endpoint, timeout: variables.timeout(), tls }))
    }

    /// Returns an exporter to the collector, whose calls run on the current runtime. It connects with the
    /// first export.
    pub(crate) fn exporter(self) -> Result<OnRuntime<opentelemetry_otlp::SpanExporter>, OtlpError> {
        let exporter = opentelemetry_otlp::SpanExporter::builder();
        // The limit of the exporter ends retries, and no request over HTTP.
        let request_timeout = self.timeout;
        let exporter = match (self.protocol, &self.tls) {
            (Protocol::HttpBinary, None) => {
                let client = HyperClient::new(HttpConnector::new(), request_timeout, None);
                self.configured(exporter.with_http().with_http_client(client)).build()?
            }
            (Protocol::HttpBinary, Some(files)) => {
                let mut tcp = HttpConnector::new();
                tcp.enforce_http(false);
                let connector = HttpsConnector::from((tcp, tls::of_http(files)?));
                let client = HyperClient::new(connector, request_timeout, None);
                self.configured(exporter.with_http().with_http_client(client)).build()?
            }
            (_, None) => self.configured(exporter.with_tonic()).build()?,
            (_, Some(files)) => {
                let exporter = exporter.with_tonic().with_tls_config(tls::of_grpc(files)?);
                self.configured(exporter).build()?
            }
        };
        Ok(OnRuntime { exporter: Arc::new(exporter), runtime: tokio::runtime::Handle::current() })
    }

    fn configured<B: WithExportConfig>(&self, mut builder: B) -> B {
        builder = builder.with_protocol(self.protocol).with_timeout(self.timeout);
        match &self.endpoint {
            Some(endpoint) => builder.with_endpoint(endpoint),
            None => builder,
        }
    }
}

/// Returns the endpoint with the path of traces if it has none.
fn of_traces(endpoint: &str) -> String {
    let host = endpoint.trim_end_matches('/');
    let has_path = host.split_once("://").is_some_and(|(_, rest)| rest.contains('/'));
    if has_path { endpoint.to_owned() } else { format!("{host}{TRACES_PATH}") }
}

/// Runs the exports of the SDK's thread on a runtime, which timers and connections need.
#[derive(Debug)]
pub(crate) struct OnRuntime<E> {
    exporter: Arc<E>,
    runtime: tokio::runtime::Handle,
}

impl<E: SpanExporter + 'static> SpanExporter for OnRuntime<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let exporter = Arc::clone(&self.exporter);
        let exported = self.runtime.spawn(async move { exporter.export(batch).await }).await;
        exported.map_err(|error| OTelSdkError::InternalFailure(error.to_string()))?
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        // The SDK sets it before the first export.
        if let Some(exporter) = Arc::get_mut(&mut self.exporter) {
            exporter.set_resource(resource);
        }
    }
}

/// The environment. A variable that is empty counts as not set.
struct Variables<F>(F);

impl<F: Fn(&str) -> Option<String>> Variables<F> {
    /// Returns the variable for traces with this ending or, without it, the one for all signals.
    fn of_traces(&self, ending: &str) -> Option<(String, String)> {
        let names =
            ["OTEL_EXPORTER_OTLP_TRACES_", "OTEL_EXPORTER_OTLP_"].map(|start| format!("{start}{ending}"));
        names.into_iter().find_map(|name| {
            let value = (self.0)(&name).filter(|value| !value.is_empty())?;
            Some((name, value))
        })
    }

    fn value(&self, ending: &str) -> Option<String> {
        self.of_traces(ending).map(|(_, value)| value)
    }

    // Only an endpoint of gRPC without a scheme goes by the variable.
    fn is_plain(&self, endpoint: &str) -> bool {
        let is_insecure = || self.value("INSECURE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        endpoint.starts_with("http://") || (!endpoint.contains("://") && is_insecure())
    }

    fn protocol(&self) -> Result<Protocol, OtlpError> {
        let Some((name, value)) = self.of_traces("PROTOCOL") else { return Ok(Protocol::Grpc) };
        match value.trim() {
            "grpc" => Ok(Protocol::Grpc),
            "http/protobuf" => Ok(Protocol::HttpBinary),
            _ => Err(OtlpError::Protocol { name, value }),
        }
    }

    /// Returns the time limit in milliseconds. As in the exporter, a value that is no number does not count.
    fn timeout(&self) -> Duration {
        let milliseconds = self.value("TIMEOUT").and_then(|value| value.parse().ok());
        milliseconds.map_or(TIMEOUT, Duration::from_millis)
    }

    fn tls(&self) -> Result<TlsFiles, OtlpError> {
        let file = |ending: &str| {
            self.of_traces(ending).map(|(name, path)| NamedFile { name, path: PathBuf::from(path) })
        };
        let incomplete = |file: NamedFile, missing| OtlpError::Incomplete { name: file.name, missing };
        let client = match (file("CLIENT_CERTIFICATE"), file("CLIENT_KEY")) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            (Some(certificate), None) => {
                return Err(incomplete(certificate, "OTEL_EXPORTER_OTLP_CLIENT_KEY"));
            }
            (None, Some(key)) => return Err(incomplete(key, "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE")),
        };
        Ok(TlsFiles { authorities: file("CERTIFICATE"), client })
    }
}
