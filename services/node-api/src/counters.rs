//! Metrics of this process.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task;

use axum::body::{Body, Bytes};
use hyper::body::{Frame, SizeHint};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use quintlet_telemetry::metrics::{
    Buckets, counter, counter_family, gauge, gauge_family, histogram_family_of,
};
use tokio::time::Instant;
use tracing::Span;

use node_api_access::limits::{Client, Pool, Slot};

/// Default buckets of Prometheus, in seconds.
const DURATION: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    method: String,
    path: String,
    server_type: String,
    long_running: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabel {
    code: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClientLabel {
    client: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LimitLabels {
    client: &'static str,
    limit: &'static str,
}

/// The share that a user has used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShareOf {
    /// Open connections.
    Connections,
    /// Requests in flight.
    Requests,
}

impl ShareOf {
    /// Returns the label in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Connections => "connections",
            Self::Requests => "requests",
        }
    }
}

/// Metrics of the HTTPS API. Clones share their values.
#[derive(Debug, Clone)]
pub struct Counters {
    requests: Family<RequestLabels, Counter>,
    durations: Family<RequestLabels, Histogram, Buckets>,
    inflight: Family<RequestLabels, Gauge>,
    refused: Family<CodeLabel, Counter>,
    connections: Counter,
    displaced: Family<ClientLabel, Counter>,
    limited: Family<LimitLabels, Counter>,
    reviews: Counter,
    handshakes: Counter,
    /// Open connections of exec, attach and port-forward.
    pub upgrades: Gauge,
    /// Open streams of logs.
    pub log_streams: Gauge,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            requests: counter_family(
                "kubelet_http_requests",
                "Number of the http requests received since the server started",
            ),
            durations: histogram_family_of(
                "kubelet_http_requests_duration_seconds",
                "Duration in seconds to serve http requests",
                DURATION,
            ),
            inflight: gauge_family("kubelet_http_inflight_requests", "Number of the inflight http requests"),
            refused: counter_family(
                "quintlet_node_api_refused_requests",
                "Requests refused because of missing credentials (401) or permissions (403), by status code",
            ),
            connections: counter(
                "quintlet_node_api_refused_connections",
                "Connections refused because too many are open",
            ),
            displaced: counter_family(
                "quintlet_node_api_displaced_connections",
                "Untrusted or idle connections closed in favour of a new one, by client (untrusted, certificate, other)",
            ),
            limited: counter_family(
                "quintlet_node_api_limited_requests",
                "Requests answered with 429 because their user has its share of connections or requests, by limit and client",
            ),
            reviews: counter(
                "quintlet_node_api_unreviewed_requests",
                "Requests answered with 429 because too many wait for a TokenReview",
            ),
            handshakes: counter("quintlet_node_api_failed_handshakes", "TLS handshakes that failed"),
            upgrades: gauge(
                "quintlet_node_api_upgrades",
                "Exec, attach and port-forward connections open now",
            ),
            log_streams: gauge("quintlet_node_api_log_streams", "Log streams open now"),
        }
    }
}

impl Counters {
    /// Counts a request by the first segment of its path. Paths without a route share one label, so that a
    /// scanner does not grow the registry. The request is in flight until the returned guard is dropped.
    #[must_use]
    pub fn request(&self, method: &http::Method, route: &str, is_readonly: bool) -> InFlightRequest {
        let labels = RequestLabels {
            method: if is_usual(method) { method.to_string() } else { "other".to_owned() },
            path: route.to_owned(),
            server_type: if is_readonly { "readonly" } else { "readwrite" }.to_owned(),
            long_running: LONG_RUNNING.contains(&route).to_string(),
        };
        self.requests.get_or_create(&labels).inc();
        self.inflight.get_or_create(&labels).inc();
        InFlightRequest {
            labels,
            began: Instant::now(),
            of: self.clone(),
            slot: OnceLock::new(),
            span: OnceLock::new(),
        }
    }

    /// Counts a request without valid credentials (401) or permission (403).
    pub fn refused(&self, code: http::StatusCode) {
        self.refused.get_or_create(&CodeLabel { code: code.as_u16() }).inc();
    }

    /// Counts a connection that was refused because too many are open.
    pub fn refused_connection(&self) {
        self.connections.inc();
    }

    /// Counts a connection that was closed in favour of a new one. `pool` is none for an untrusted one.
    pub fn displaced_connection(&self, pool: Option<Pool>) {
        let client = pool.map_or("untrusted", Pool::name);
        self.displaced.get_or_create(&ClientLabel { client }).inc();
    }

    /// Counts a request that was refused because its user has its share.
    pub fn limited_request(&self, share: ShareOf, pool: Pool) {
        self.limited.get_or_create(&LimitLabels { client: pool.name(), limit: share.name() }).inc();
    }

    /// Counts a request that was refused because too many wait for a TokenReview.
    pub fn refused_review(&self) {
        self.reviews.inc();
    }

    /// Counts a connection that closed before TLS was established.
    pub fn failed_handshake(&self) {
        self.handshakes.inc();
    }
}

/// Paths that the kubelet counts as long-running (`pkg/kubelet/server: isLongRunningRequest`). Port-forward
/// is missing there, too: the kubelet looks for another spelling.
const LONG_RUNNING: [&str; 3] = ["exec", "attach", "debug"];

/// A request in flight. An upgraded connection and a followed log are in flight until they end.
#[derive(Debug)]
pub struct InFlightRequest {
    labels: RequestLabels,
    began: Instant,
    of: Counters,
    /// The slot of the user; not set before the request is authorized.
    slot: OnceLock<Slot<Client>>,
    /// The span of the request, as the slot.
    span: OnceLock<Span>,
}

impl InFlightRequest {
    /// Holds a slot for as long as the request is in flight.
    pub(crate) fn hold(&self, slot: Slot<Client>) {
        // A request is authorized once.
        let _ = self.slot.set(slot);
    }

    /// Keeps a span open for as long as the request is in flight.
    pub(crate) fn trace(&self, span: Span) {
        // As above.
        let _ = self.span.set(span);
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        self.of.inflight.get_or_create(&self.labels).dec();
        self.of.durations.get_or_create(&self.labels).observe(self.began.elapsed().as_secs_f64());
    }
}

fn is_usual(method: &http::Method) -> bool {
    matches!(method.as_str(), "OPTIONS" | "GET" | "HEAD" | "POST" | "PUT" | "DELETE" | "TRACE" | "CONNECT")
}

/// A body whose request counts as in flight until the body was sent.
pub(crate) struct CountedBody {
    body: Body,
    _in_flight: Arc<InFlightRequest>,
}

impl CountedBody {
    pub(crate) fn new(body: Body, in_flight: Arc<InFlightRequest>) -> Self {
        Self { body, _in_flight: in_flight }
    }
}

impl hyper::body::Body for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut task::Context<'_>,
    ) -> task::Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::Method;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn requests_have_the_labels_that_the_kubelet_gives_them() {
        let counters = Counters::default();
        for (method, route, is_readonly, labels) in [
            (Method::GET, "metrics/cadvisor", false, ["GET", "metrics/cadvisor", "readwrite", "false"]),
            (Method::POST, "exec", false, ["POST", "exec", "readwrite", "true"]),
            (Method::GET, "portForward", false, ["GET", "portForward", "readwrite", "false"]),
            (Method::PATCH, "other", true, ["other", "other", "readonly", "false"]),
        ] {
            let [method_label, path, server, long] = labels;
            let value = |name: &str, more: &str| {
                let series = format!(
                    "{name}{{method=\"{method_label}\",path=\"{path}\",server_type=\"{server}\",long_running=\"{long}\"{more}}} "
                );
                let text = quintlet_telemetry::metrics::text();
                text.lines().find_map(|l| l.strip_prefix(&series)?.parse::<f64>().ok())
            };
            let in_flight = counters.request(&method, route, is_readonly);
            assert_eq!(value("kubelet_http_requests_total", ""), Some(1.0), "{labels:?}");
            assert_eq!(value("kubelet_http_inflight_requests", ""), Some(1.0), "{labels:?}");
            assert_eq!(value("kubelet_http_requests_duration_seconds_count", ""), None, "{labels:?}");
            tokio::time::advance(Duration::from_secs(2)).await;
            drop(in_flight);
            assert_eq!(value("kubelet_http_inflight_requests", ""), Some(0.0), "{labels:?}");
            assert_eq!(value("kubelet_http_requests_duration_seconds_sum", ""), Some(2.0), "{labels:?}");
            assert_eq!(
                value("kubelet_http_requests_duration_seconds_bucket", ",le=\"1.0\""),
                None,
                "le comes first"
            );
        }
    }
}
