//! Logs, spans, metrics and trace context, the same in every service.
//!
//! [`init`] installs the process's subscriber once: logs go to stderr, spans go to the in-memory [`SpanRing`]
//! that `debug.v1` serves and, with an endpoint, to an OTLP collector from a thread of the exporter's own.
//! Nothing here waits for a collector: what it cannot take is dropped.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]
mod gate;
mod logs;
pub mod metrics;
mod process;
pub mod propagate;
mod ring;

use std::str::FromStr;
use std::time::Duration;

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};
use tracing_subscriber::filter::{EnvFilter, FilterFn};
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};

pub use gate::EVERY as FAULT_EVERY;
pub use logs::{Lines, LogFormat, write_line};
pub use propagate::PropagatingInterceptor;
pub use ring::{RING_CAPACITY, RingProcessor, SpanRecord, SpanRing, ring};

/// How long the last spans may take to reach the collector when the process ends.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// How long one export may take; a collector that is away costs its thread this and nobody else anything.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// What libraries tell of failures that their callers handle and tell of themselves: the client of the API server logs
/// each refused connection as an error, its watcher each refusal. Whoever names a target gets it nevertheless.
const QUIET: [&str; 2] = ["kube_client::client::builder", "kube_runtime::watcher"];

/// What [`init`] needs to know.
#[derive(Debug, Clone, Default)]
pub struct TelemetryOptions {
    /// Text or JSON.
    pub log_format: LogFormat,
    /// A `tracing` filter such as `info` or `info,pod_sync=debug`. Empty: `info`.
    pub log_level: String,
    /// gRPC endpoint of an OTLP collector, such as `http://127.0.0.1:4317`. None: spans stay in memory.
    pub otlp_endpoint: Option<String>,
}

/// Why telemetry could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// The log filter does not parse.
    #[error("the log level {given:?} is not a filter")]
    Filter {
        /// What was given.
        given: String,
        /// What is wrong with it.
        source: tracing_subscriber::filter::ParseError,
    },
    /// The endpoint is not usable at all. One that does not answer is no error.
    #[error("the OTLP endpoint {endpoint:?} cannot be used")]
    Endpoint {
        /// What was given.
        endpoint: String,
        /// What is wrong with it.
        source: opentelemetry_otlp::ExporterBuildError,
    },
}

/// Keeps telemetry alive; flush with [`TelemetryGuard::shutdown`] at the end of `main`.
#[derive(Debug)]
pub struct TelemetryGuard {
    provider: Option<SdkTracerProvider>,
}

impl TelemetryGuard {
    /// Sends what is left to the collector, for at most 2 s.
    pub async fn shutdown(mut self) {
        if let Some(provider) = self.provider.take() {
            let flush = tokio::task::spawn_blocking(move || provider.shutdown_with_timeout(FLUSH_TIMEOUT));
            // A lost flush is not worth a word on the way out.
            let _ = tokio::time::timeout(FLUSH_TIMEOUT, flush).await;
        }
    }
}

/// Installs the process's subscriber. A second call in the same process changes nothing and is no error.
///
/// Call it inside a tokio runtime when an OTLP endpoint is given: the exporter's connection lives there.
///
/// # Errors
/// When the log filter or the endpoint cannot be parsed.
pub fn init(service: &'static str, options: &TelemetryOptions) -> Result<TelemetryGuard, InitError> {
    ring().set_service(service);
    let level = if options.log_level.is_empty() { "info" } else { &options.log_level };
    let filter =
        filter(level).map_err(|source| InitError::Filter { given: options.log_level.clone(), source })?;

    let mut provider = SdkTracerProvider::builder()
        .with_sampler(Sampler::AlwaysOn)
        .with_resource(Resource::builder().with_service_name(service).build())
        .with_span_processor(RingProcessor::new(ring()));
    let endpoint = options.otlp_endpoint.as_deref().filter(|e| !e.is_empty());
    if let Some(endpoint) = endpoint {
        let exporter = SpanExporter::builder()
            .with_tonic()
            .with_endpoint(endpoint)
            .with_timeout(EXPORT_TIMEOUT)
            .build()
            .map_err(|source| InitError::Endpoint { endpoint: endpoint.to_owned(), source })?;
        provider = provider.with_batch_exporter(exporter);
    }
    let provider = provider.build();

    let spans = tracing_opentelemetry::layer()
        .with_tracer(provider.tracer("quintlet"))
        .with_location(false)
        .with_threads(false)
        .with_target(false)
        .with_tracked_inactivity(false)
        .with_filter(FilterFn::new(is_our_span));
    let subscriber = tracing_subscriber::registry()
        .with(spans)
        .with(logs::LogLayer::new(service, options.log_format, logs::Out::Stderr).with_filter(filter));
    let installed = tracing::subscriber::set_global_default(subscriber).is_ok();
    Ok(TelemetryGuard { provider: (installed && endpoint.is_some()).then_some(provider) })
}

/// What is logged whatever the filter says: who acted on containers. The last word on a target counts.
const ALWAYS: &str = "audit=info";

/// A subscriber of one thread, whose lines of `level` and above a test reads.
#[must_use]
pub fn kept(service: &'static str, level: tracing::Level, lines: &Lines) -> tracing::Dispatch {
    let wanted = FilterFn::new(move |m| {
        is_our_span(m) || m.is_event() && *m.level() <= level && !QUIET.contains(&m.target())
    });
    let layer = logs::LogLayer::new(service, LogFormat::Json, logs::Out::Kept(lines.clone()));
    tracing_subscriber::registry().with(layer.with_filter(wanted)).into()
}

/// Which events are logged.
fn filter(level: &str) -> Result<EnvFilter, tracing_subscriber::filter::ParseError> {
    let quiet: String = QUIET.iter().map(|target| format!("{target}=off,")).collect();
    EnvFilter::from_str(&format!("{quiet}{level},{ALWAYS}"))
}

/// Spans of the transport say nothing of pods and would push out those that do.
fn is_our_span(metadata: &tracing::Metadata<'_>) -> bool {
    const TRANSPORT: [&str; 6] = ["h2", "hyper", "hyper_util", "tonic", "tower", "opentelemetry"];
    let root = metadata.target().split("::").next().unwrap_or_default();
    metadata.is_span()
        && *metadata.level() <= tracing::Level::INFO
        && !TRANSPORT.iter().any(|t| root == *t || root.starts_with("opentelemetry"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    struct Count(Arc<AtomicUsize>);

    impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Count {
        fn on_event(&self, _: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn refused_connections_are_logged_by_who_handles_them_unless_the_library_is_asked_for_by_name() {
        for (level, want) in [("info", 1), ("debug", 1), ("info,kube_client::client::builder=error", 2)] {
            let logged = Arc::new(AtomicUsize::new(0));
            let layer = Count(logged.clone()).with_filter(filter(level).unwrap());
            tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
                tracing::error!(target: "kube_client::client::builder", "failed with error client error (Connect)");
                tracing::warn!(target: "kube_runtime::watcher", "watch list error with 403");
                tracing::warn!("the pods cannot be read");
            });
            assert_eq!(logged.load(Ordering::Relaxed), want, "{level}");
        }
        assert!(filter("a=b=c").is_err());
    }

    #[test]
    fn the_audit_log_is_written_whatever_the_filter_says() {
        for level in ["info", "warn", "off", "error,audit=off", "pod_sync=debug"] {
            let logged = Arc::new(AtomicUsize::new(0));
            let layer = Count(logged.clone()).with_filter(filter(level).unwrap());
            tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
                tracing::info!(target: "audit", "audit");
            });
            assert_eq!(logged.load(Ordering::Relaxed), 1, "{level}");
        }
    }
}
