//! Logs, spans, metrics and trace context of every service.
//!
//! [`init`] installs the process's subscriber once. Logs go to stderr. Spans go to the in-memory
//! [`SpanRing`], which `debug.v1` serves, and, if an endpoint is configured, to an OTLP collector through a
//! queue with a thread of its own. No service waits for the collector: spans that it does not accept are
//! dropped.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod export;
pub mod log_filter;
mod logs;
pub mod metrics;
mod otlp;
mod process;
pub mod propagate;
mod repeat_filter;
mod ring;

use std::time::Duration;

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_subscriber::filter::{FilterFn, LevelFilter};
use tracing_subscriber::layer::{Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::reload;

pub use export::{ALL_TRACES, Machine};
pub use logs::{LogFormat, LogOutput, write_line};
pub use otlp::{OtlpError, TlsError};
pub use repeat_filter::REPEAT_INTERVAL;
pub use ring::{RING_BYTES, RingProcessor, SpanRing, ring};

/// Time limit for exporting the last spans when the process ends.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Options of [`init`].
#[derive(Debug, Clone, Default)]
pub struct TelemetryOptions {
    /// Format of the lines on standard error.
    pub log_format: LogFormat,
    /// A `tracing` filter such as `info` or `info,pod_sync=debug`. Empty means `info`.
    pub log_level: String,
    /// Endpoint of an OTLP collector, such as `http://127.0.0.1:4317`. Without it, the variable
    /// `OTEL_EXPORTER_OTLP_ENDPOINT` counts. Without both, spans are kept in memory only.
    pub otlp_endpoint: Option<String>,
    /// Number of a million traces to export, of those that begin in this process. The others go by the
    /// service that began them.
    pub sampling_rate_per_million: u32,
    /// The machine of the process.
    pub machine: Machine,
}

/// The reason why logs or traces could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// The filter of [`TelemetryOptions::log_level`] is invalid.
    #[error("failed to parse the log level {given:?}")]
    Filter {
        /// The filter as it was given.
        given: String,
        /// The error of its syntax.
        source: tracing_subscriber::filter::ParseError,
    },
    /// A setting of the exporter is invalid. A collector that does not answer is not an error.
    #[error("failed to configure the export of traces")]
    Otlp(#[source] OtlpError),
}

/// Keeps the exporter running. Call [`TelemetryGuard::shutdown`] at the end of `main`.
#[derive(Debug)]
pub struct TelemetryGuard {
    provider: Option<SdkTracerProvider>,
}

impl TelemetryGuard {
    /// Exports the remaining spans, for at most 2 s.
    pub async fn shutdown(mut self) {
        if let Some(provider) = self.provider.take() {
            #[expect(
                clippy::disallowed_methods,
                reason = "kit::task depends on this crate; a panic loses the same spans"
            )]
            let flush = tokio::task::spawn_blocking(move || provider.shutdown_with_timeout(FLUSH_TIMEOUT));
            // Spans that cannot be exported at the end are lost; that is not an error of the service.
            let _ = tokio::time::timeout(FLUSH_TIMEOUT, flush).await;
        }
    }
}

/// Installs the process's subscriber. A second call in the same process has no effect and is not an error.
///
/// With an OTLP endpoint, call it inside a tokio runtime, which drives the exporter's connections.
///
/// # Errors
/// Fails if the log filter or a setting of the exporter is invalid.
pub fn init(service: &'static str, options: &TelemetryOptions) -> Result<TelemetryGuard, InitError> {
    ring().set_service(service);
    let level = if options.log_level.is_empty() { "info" } else { &options.log_level };
    let filter = log_filter::parse(level)
        .map_err(|source| InitError::Filter { given: options.log_level.clone(), source })?;
    let (filter, handle) = reload::Layer::new(filter);

    let mut provider = SdkTracerProvider::builder()
        .with_sampler(export::ExportSampler::per_million(options.sampling_rate_per_million))
        .with_resource(export::resource(service, &options.machine))
        .with_span_processor(RingProcessor::new(ring()));
    let variable = |name: &str| std::env::var(name).ok();
    let collector =
        otlp::Collector::from(options.otlp_endpoint.as_deref(), variable).map_err(InitError::Otlp)?;
    let is_exported = collector.is_some();
    if let Some(collector) = collector {
        let most = variable("OTEL_BSP_MAX_QUEUE_SIZE").and_then(|number| number.parse::<usize>().ok());
        let most = most.filter(|most| *most > 0).unwrap_or(export::QUEUE);
        let queue = export::queue(collector, most).map_err(InitError::Otlp)?;
        provider = provider.with_span_processor(queue);
    }
    let provider = provider.build();

    let spans = tracing_opentelemetry::layer()
        .with_tracer(provider.tracer("quintlet"))
        .with_location(false)
        .with_threads(false)
        .with_target(false)
        .with_tracked_inactivity(false)
        // The hint lets spans and events of libraries at lower levels end with one comparison.
        .with_filter(FilterFn::new(is_our_span).with_max_level_hint(LevelFilter::INFO));
    let subscriber = tracing_subscriber::registry()
        .with(spans)
        .with(log_layer(service, options.log_format, logs::Stderr).with_filter(filter));
    let installed = tracing::subscriber::set_global_default(subscriber).is_ok();
    if installed {
        log_filter::install(handle, level);
    }
    Ok(TelemetryGuard { provider: (installed && is_exported).then_some(provider) })
}

/// Returns the layer that writes log lines. The filter of the layer must let spans pass whose pod the lines
/// have: those of [`is_our_span`].
pub fn log_layer<S>(service: &'static str, format: LogFormat, out: impl LogOutput) -> impl Layer<S>
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a>,
{
    logs::LogLayer::new(service, format, out)
}

/// Returns whether a span is recorded. Spans of the transport are not: they would displace spans about pods
/// in the ring.
#[must_use]
pub fn is_our_span(metadata: &tracing::Metadata<'_>) -> bool {
    const TRANSPORT: [&str; 6] = ["h2", "hyper", "hyper_util", "tonic", "tower", "opentelemetry"];
    let root = metadata.target().split("::").next().unwrap_or_default();
    metadata.is_span()
        && *metadata.level() <= tracing::Level::INFO
        && !TRANSPORT.iter().any(|t| root == *t || root.starts_with("opentelemetry"))
}
